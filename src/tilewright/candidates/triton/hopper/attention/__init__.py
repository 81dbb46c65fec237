"""Attention for Hopper."""
