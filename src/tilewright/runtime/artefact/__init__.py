"""Saved programs (docs/artefacts.md): a compiled program written to a `.twp` file, and read back without what compiled it.

A file decides what is executed. So its code, and the numbers that the code is called with, are used if a key of this user
signed them or the caller trusts the file; both are checked to fit the graph all the same. On another chip, or with another
version of what calls kernels, nothing of them is used, and the graph is compiled.
"""
