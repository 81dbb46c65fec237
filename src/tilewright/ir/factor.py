"""Factors: the loops of an operation that ranks may share out.

An operation runs over an index space; each factor is one of its dimensions, with the axis along which it runs in each source
and in the result. A source that has no axis along it is read whole by every rank. The word and the idea are Shardy's
(`OpShardingRule`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.ir.types import TensorType


@dataclass(frozen=True)
class Factor:
    """One loop.

    Attributes:
        axes: its axis in each source; None where there is none.
        result: its axis in the result; None where the result is a reduction over it.
        fn: of such a reduction: what puts ranks' results together, a function of `Reduce`.
    """

    axes: tuple[int | None, ...]
    result: int | None
    fn: str = "add"


def aligned(result: TensorType, src: Sequence[TensorType]) -> tuple[Factor, ...]:
    """The factors of an elementwise operation, whose sources broadcast to the result's shape: one for each axis."""
    found: list[Factor] = []
    for axis, extent in enumerate(result.shape):
        at = [axis - (result.rank - s.rank) for s in src]
        axes = (a if a >= 0 and (s.shape[a] != 1 or extent == 1) else None for a, s in zip(at, src, strict=True))
        found.append(Factor(tuple(axes), axis))
    return tuple(found)
