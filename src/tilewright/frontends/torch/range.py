"""The range that an expression of floats lies in by how it is written, clamped above all."""

from __future__ import annotations

import math
import operator

import torch

from tilewright.dtype import DType
from tilewright.ir.constant import scalar_value
from tilewright.ir.graph import Node
from tilewright.ir.ops import Broadcast, Convert, Map, Reshape, Slice, Transpose

Range = tuple[float, float]

_ANY: Range = (-math.inf, math.inf)
_MOST_NESTED = 24
_KNOWN: dict[str, Range] = {"logistic": (0, 1), "tanh": (-1, 1), "sine": (-1, 1), "cosine": (-1, 1), "erf": (-1, 1)}
_MONOTONE = {"ceil": math.ceil, "floor": math.floor, "trunc": math.trunc, "round_half_even": round}
_BY_A_NUMBER = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}


def lies_within(x: Node, dtype: DType) -> bool:
    """Tell whether every number of `x`, without what is behind the point, is one of the integer type; NaN aside."""
    low, high = _range(x, 0, {})
    return low > dtype.min - 1 and high < dtype.max + 1


def _range(x: Node, depth: int, known: dict[Node, Range]) -> Range:
    """Numbers between which those of `x` lie; every step rounds, which keeps their order."""
    if x not in known:  # once, however many read it
        known[x] = _found(x, depth, known)
    return known[x]


def _found(x: Node, depth: int, known: dict[Node, Range]) -> Range:
    number = scalar_value(x)
    if number is not None:
        return (float(number), float(number)) if number == number else _ANY
    if depth > _MOST_NESTED:
        return _ANY
    if isinstance(x.op, (Broadcast, Reshape, Slice, Transpose)):
        return _range(x.src[0], depth + 1, known)
    if isinstance(x.op, Convert) and x.dtype.is_float:
        source = x.src[0].dtype
        held = _range(x.src[0], depth + 1, known) if source.is_float else (float(source.min), float(source.max))
        return _rounded(held, x.dtype)
    return _of_function(x.op.fn, x, depth + 1, known) if isinstance(x.op, Map) and x.dtype.is_float else _ANY


def _of_function(fn: str, x: Node, depth: int, known: dict[Node, Range]) -> Range:
    if fn in _KNOWN:
        return _KNOWN[fn]
    if fn not in ("abs", "clamp", "maximum", "minimum", "relu", *_MONOTONE, *_BY_A_NUMBER):
        return _ANY
    ranges = [_range(s, depth, known) for s in x.src]
    if fn == "clamp":
        low, own, high = ranges
        return min(max(own[0], low[0]), high[0]), min(max(own[1], low[1]), high[1])
    if fn in ("maximum", "minimum"):
        extreme = max if fn == "maximum" else min
        return extreme(r[0] for r in ranges), extreme(r[1] for r in ranges)
    low, high = ranges[0]
    if fn == "relu":
        return max(low, 0.0), max(high, 0.0)
    if fn == "abs":
        return 0.0, max(-low, high)
    if fn in _MONOTONE:
        return (
            float(_MONOTONE[fn](low)) if math.isfinite(low) else low,
            float(_MONOTONE[fn](high)) if math.isfinite(high) else high,
        )
    ends = [_BY_A_NUMBER[fn](a, b) for a in ranges[0] for b in ranges[1]]
    return _ANY if any(e != e for e in ends) else _rounded((min(ends), max(ends)), x.dtype)


def _rounded(held: Range, dtype: DType) -> Range:
    low, high = torch.tensor(held, dtype=torch.float64).to(dtype.to_torch()).to(torch.float64).tolist()
    return (low, high) if low <= high else _ANY  # NaN: too large for a type without infinities
