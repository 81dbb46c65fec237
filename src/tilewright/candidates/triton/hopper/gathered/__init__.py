"""A gemm whose rows come from other ranks while it runs."""
