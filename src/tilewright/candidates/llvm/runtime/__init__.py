"""Compiling LLVM IR, scratch memory, and calling the machine code."""
