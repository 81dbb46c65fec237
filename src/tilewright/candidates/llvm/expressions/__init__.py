"""Expressions of a program's nodes as vectors of LLVM IR."""
