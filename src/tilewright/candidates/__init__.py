"""Ways to do a gemm, one a file, found by file name."""
