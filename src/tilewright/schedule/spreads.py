"""Interval rules of operations that round nothing, or as the graph says: casts, quantisation, views, pads, picks and writes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import torch

from tilewright.dtype import PRED
from tilewright.ir.graph import Node
from tilewright.ir.ops import Convert, Dequantize, Gather, Quantize, Write
from tilewright.schedule.intervals import Interval, any_of, lost, spans_zero, unsure


def spread(n: Node, src: Sequence[Interval]) -> Interval:
    """The result at the ends of the operands' intervals, for a scale's and a value's each with each."""
    op = n.op
    if isinstance(op, (Gather, Write)):
        return _picked(n, src)
    if isinstance(op, (Quantize, Dequantize)):
        corners = itertools.product(*((b.mid,) if b.is_exact else (b.low, b.high) for b in src))
    else:
        corners = iter(([b.low for b in src], [b.high for b in src]))
    mid = _value(n, [b.mid for b in src])
    band = Interval.spanning(mid, [_value(n, list(c)) for c in corners])
    if isinstance(op, Convert):
        return band.forgotten(_wraps(n, src[0]), n.dtype)
    if isinstance(op, (Quantize, Dequantize)):
        unknown = any_of([lost(src[0]), *(lost(b).any() for b in src[1:])])
        if isinstance(op, Quantize) and not src[1].is_exact:
            unknown = unknown | spans_zero(src[1]).any()
        return band.forgotten(unknown, n.dtype)
    return band


def _value(n: Node, src: Sequence[torch.Tensor]) -> torch.Tensor:
    return cast("torch.Tensor", n.op.evaluate(n, list(src)))


def _wraps(n: Node, x: Interval) -> torch.Tensor:
    """A mask of the places where a conversion is not monotonic between the ends of its interval."""
    op, source, target = cast("Convert", n.op), n.src[0].dtype, n.dtype
    if target is PRED:
        return lost(x) | spans_zero(x)
    if target.is_float:
        return torch.zeros((), dtype=torch.bool)
    if source.is_float:
        return lost(x)
    if op.overflow == "saturate" or source is PRED or (source.min >= target.min and source.max <= target.max):
        return torch.zeros((), dtype=torch.bool)
    outside = [(t.double() < float(target.min)) | (t.double() > float(target.max)) for t in (x.low, x.high)]
    return any_of(outside) & unsure(x)


def _picked(n: Node, src: Sequence[Interval]) -> Interval:
    """The interval of picked values; unknown where the index may be another."""
    picks = src[1].mid
    band = Interval.spanning(
        _value(n, [src[0].mid, picks, *(b.mid for b in src[2:])]),
        [_value(n, [getattr(src[0], end), picks, *(getattr(b, end) for b in src[2:])]) for end in ("low", "high")],
    )
    if src[1].is_exact:
        return band
    other = unsure(src[1])
    if isinstance(n.op, Write):
        return band.forgotten(other.any(), n.dtype)
    op = cast("Gather", n.op)
    if not op.elementwise:
        after = n.src[0].tensor.rank - op.axis % n.src[0].tensor.rank - 1
        other = other.reshape(*other.shape, *(1,) * after)
    return band.forgotten(other, n.dtype)
