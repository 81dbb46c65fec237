"""Values known up to an error: intervals, and what elementwise operations make of them.

A step may round its operands and its result a few times, since a kernel may order an expression its own way (contract a
multiply and an add, raise 2 instead of e to a power).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import cast

import torch

from tilewright.dtype import DType
from tilewright.ir.graph import Node
from tilewright.ir.ops import Map
from tilewright.schedule.pieces import by_pieces

STEP_ROUNDINGS = 4
# 1 + erf(x), 1 + tanh(x) and the like: a rounding of the operand's size is left where the result is small.
CANCELLING = frozenset({"erf", "erfc", "exponential_minus_one", "gelu", "gelu_tanh", "log_plus_one", "logistic", "silu"})


@dataclass(frozen=True)
class Band:
    """A value, and the interval its error bound leaves it."""

    low: torch.Tensor
    mid: torch.Tensor
    high: torch.Tensor

    @classmethod
    def exact(cls, value: torch.Tensor) -> Band:
        return cls(value, value, value)

    @property
    def is_exact(self) -> bool:
        return self.low is self.mid is self.high

    @classmethod
    def spanning(cls, mid: torch.Tensor, others: Sequence[torch.Tensor]) -> Band:
        """The least and the largest of some values. NaN beside a number says that nothing is known there."""
        low, high = (reduce(f, map(orderable, others), orderable(mid)) for f in (torch.minimum, torch.maximum))
        return cls(low.to(mid.dtype), mid, high.to(mid.dtype))


def stepped(n: Node, src: Sequence[Band], dependent: set[Node]) -> Band:
    """An elementwise step over intervals: its least and largest value over their ends, and room for its roundings."""
    rounded = isinstance(n.op, Map) and n.dtype.is_float
    cancels = isinstance(n.op, Map) and n.op.fn in CANCELLING

    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        here = [Band(*tensors[i : i + 3]) for i in range(0, len(tensors), 3)]
        ends: list[tuple[torch.Tensor, ...]] = [
            _rounded(b, s.dtype) if s in dependent else (b.mid,) for s, b in zip(n.src, here, strict=True)
        ]
        if isinstance(n.op, Map) and n.op.fn == "abs":  # it turns at zero, which may lie inside
            low, high = ends[0][0], ends[0][-1]
            ends[0] = (low, high, torch.zeros_like(low).clamp(low, high))
        mid = cast("torch.Tensor", n.op.evaluate(n, [b.mid for b in here]))
        band = Band.spanning(mid, [cast("torch.Tensor", n.op.evaluate(n, list(corner))) for corner in itertools.product(*ends)])
        if not rounded:
            return band.low, mid, band.high
        left = torch.zeros((), dtype=torch.float64)
        if cancels:
            left = STEP_ROUNDINGS * n.dtype.epsilon * size(here[0].mid)
        return _moved(band.low, n.dtype, -1, left), mid, _moved(band.high, n.dtype, 1, left)

    return Band(*by_pieces(n.shape, step, *(t for b in src for t in (b.low, b.mid, b.high))))


def loosened(band: Band, fraction: float) -> Band:
    """A band whose ends are a fraction of themselves further out."""
    low, high = ((end.double() + sign * fraction * size(end)).to(end.dtype) for end, sign in ((band.low, -1), (band.high, 1)))
    return Band(low, band.mid, high)


def _rounded(band: Band, dtype: DType) -> tuple[torch.Tensor, torch.Tensor]:
    """Both ends of an interval, a few roundings further out."""
    if not dtype.is_float:
        return band.low, band.high
    nothing = torch.zeros((), dtype=torch.float64)
    return _moved(band.low, dtype, -1, nothing), _moved(band.high, dtype, 1, nothing)


def _moved(end: torch.Tensor, dtype: DType, sign: int, further: torch.Tensor) -> torch.Tensor:
    return (end.double() + sign * (STEP_ROUNDINGS * dtype.epsilon * size(end) + further)).to(end.dtype)


def size(t: torch.Tensor) -> torch.Tensor:
    return t.double().abs().nan_to_num(0.0, 0.0, 0.0)


def orderable(t: torch.Tensor) -> torch.Tensor:
    """In a type that torch can compare."""
    if t.dtype.is_floating_point:
        return t.float() if t.dtype.itemsize == 1 else t
    return t.to(torch.int64) if t.dtype in (torch.uint16, torch.uint32, torch.uint64) else t
