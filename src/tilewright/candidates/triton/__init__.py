"""Kernels generated for GPUs with Triton and, where the hardware's own pipeline matters, its lower level Gluon."""

DEVICES = ("cuda",)  # kinds of device that its candidates are for
