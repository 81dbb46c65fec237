"""Sizes in whole parts, by the names that CUTLASS and Triton have for them. Extents that are open are taken, too."""

from __future__ import annotations


def round_up(size: int, to: int) -> int:
    """The least multiple of `to` that is no smaller."""
    return -(-size // to) * to


def next_power_of_2(n: int) -> int:
    """The least power of two that is no smaller; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()
