"""Reports as lines and tables for people."""
