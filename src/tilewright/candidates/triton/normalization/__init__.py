"""Norms, softmaxes and other regions of rows for GPUs."""
