"""Library kernels reached through torch: ATen, oneDNN, cuBLASLt."""
