"""Attention for GPUs in general."""
