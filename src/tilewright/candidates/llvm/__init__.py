"""Kernels generated for the CPU as LLVM IR: one loop nest, the chip's own dot instruction, the epilogue in registers."""

DEVICES = ("cpu",)  # kinds of device that its candidates are for
