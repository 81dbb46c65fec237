"""Expressions of a program's nodes as Triton source."""
