"""From a gemm to a choice: problem, candidates, cost, measurement."""
