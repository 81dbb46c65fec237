"""Numbers and lists of names as reports write them."""

from __future__ import annotations

from collections.abc import Sequence


def us(value: float) -> str:
    """Microseconds: one decimal, thousands separated."""
    return f"{value:,.1f}"


def percent(fraction: float) -> str:
    """A share; two digits that mean something, however small."""
    value = 100 * fraction
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def small(value: float) -> str:
    """An error or bound: three digits, and a bare 0."""
    return "0" if value == 0 else f"{value:.2e}"


def count(n: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def listing(names: Sequence[str], most: int = 4) -> str:
    """Some names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
