"""Library kernels reached through torch: ATen, oneDNN, cuBLASLt. `candidate_of_call` makes a candidate of any function that
multiplies matrices, `kernel_of_call` a kernel of any product."""

from tilewright.candidates.library._around import candidate_of_call, kernel_of_call

__all__ = ["candidate_of_call", "kernel_of_call"]
