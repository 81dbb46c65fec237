"""Norms, softmaxes and other reductions over rows for GPUs."""
