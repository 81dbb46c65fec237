"""Attention for CPUs."""
