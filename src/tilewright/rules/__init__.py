"""Rewrite rules, one idea a file, found by file name."""
