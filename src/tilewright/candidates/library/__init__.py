"""Library kernels reached through torch: ATen, oneDNN, cuBLASLt; `kernel_of_call` makes a kernel of any product."""

from tilewright.candidates.library._around import kernel_of_call

__all__ = ["kernel_of_call"]
