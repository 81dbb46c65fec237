"""Compiling generated Triton source and launching its kernels."""
