"""Bounds on the distance of a right kernel's sums, softmaxes and norms from those computed in float64.

With u the roundoff of f32 (f64 for f64), a sum of n numbers is within n u of the sum of their sizes in any order, and typically
within sqrt(n) u of its partial sums; see `expected.py`, whose two bounds these are. A layer norm adds to that what an error of
the mean does to every element, d(x - mean) r, and what one of the variance does to r = 1 / sqrt(var + epsilon): half as much,
relatively. The mean's error moves the variance in second order only, if it is taken from the differences; a kernel that
subtracts two large numbers instead (E[x^2] - E[x]^2) is outside these bounds as soon as it matters.

What is known up to an error on the way in adds to that to first order: a norm's element moves by r times its own error, the
mean one, and what the change of r does; a softmax's logarithm by its own error and the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch

from tilewright.dtype import F32, F64, PRED, DType
from tilewright.ir.graph import Node
from tilewright.ir.ops import LayerNorm, Reduce, Softmax
from tilewright.schedule.intervals import STEP_ROUNDINGS, Interval, any_of, size, unsure
from tilewright.schedule.pieces import by_pieces, most_at_once

SAFETY = 16.0
EXP_ROUNDINGS = 16
SMALLEST = 2.0**-125  # where kernels stop at f32's normal numbers

REDUCING = (Reduce, Softmax, LayerNorm)
_Row = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def reduced(n: Node, src: Sequence[Interval], *, usual: bool) -> Interval:
    """The result of a reduction, softmax or norm over intervals; `usual` takes the typical size of rounding errors."""
    op, x = n.op, src[0]
    if isinstance(op, Reduce):
        if op.fn in ("maximum", "minimum") or not op.axes or n.dtype is PRED:  # nothing rounds, and order is kept
            return Interval.spanning(_value(n, x.mid), (_value(n, x.low), _value(n, x.high)))
        if n.dtype.is_integer:
            return _integers(n, op, x)
        row = _product(n.dtype, usual) if op.fn == "multiply" else _sum(n.dtype, op.fn == "mean", usual)
        mid, room = _by_rows(x, op.axes, row, keep=False)
        return _around(mid.reshape(n.shape), room.reshape(n.shape), n.dtype)
    if isinstance(op, Softmax):
        return _around(*_by_rows(x, (op.axis % len(n.shape),), _softmax(n.dtype, op.log, usual), keep=True), n.dtype)
    assert isinstance(op, LayerNorm)
    axes = tuple(range(op.axis % len(n.shape), len(n.shape)))
    mid, room = _by_rows(x, axes, _norm(op, n.dtype, usual), keep=True)
    return _scaled(n, mid, room, src[1:])


def _integers(n: Node, op: Reduce, x: Interval) -> Interval:
    """Sums of integers are in order until they wrap; of their products and bits nothing is known unless all are exact."""
    band = Interval.spanning(_value(n, x.mid), (_value(n, x.low), _value(n, x.high)))
    loose = unsure(x).expand(x.mid.shape)
    unknown = loose.to(torch.int8).amax(op.axes, keepdim=op.keepdims).bool() if loose.numel() else loose.any()
    if op.fn == "add":
        ends = [t.double().sum(op.axes, keepdim=op.keepdims) for t in (x.low, x.high)]
        unknown = unknown & any_of([(e < 0.999 * float(n.dtype.min)) | (e > 0.999 * float(n.dtype.max)) for e in ends])
    return band.forgotten(unknown, n.dtype)


def _product(dtype: DType, usual: bool) -> _Row:
    u = _roundoff(dtype)

    def row(x: torch.Tensor, off: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        most = (x.abs() + off).prod(-1, keepdim=True)
        return x.prod(-1, keepdim=True), most - x.abs().prod(-1, keepdim=True) + _growth(x.shape[-1], usual) * u * most

    return row


def _value(n: Node, x: torch.Tensor) -> torch.Tensor:
    return cast("torch.Tensor", n.op.evaluate(n, [x]))


def _roundoff(dtype: DType) -> float:
    return (F64 if dtype is F64 else F32).epsilon / 2


def _by_rows(x: Interval, axes: Sequence[int], row: _Row, *, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A row function on (values, how far off they may be), both float64 [rows, n], of a tensor whose `axes` make up the rows, a
    piece at a time; in the tensor's own shape if it keeps the elements of a row."""
    rank = x.mid.dim()
    outer = [a for a in range(rank) if a not in axes]
    order = [*outer, *axes]
    shape = [x.mid.shape[a] for a in order]
    rows, columns = math.prod(shape[: len(outer)]), math.prod(shape[len(outer) :])
    low, mid, high = (t.permute(order).reshape(rows, columns) for t in (x.low, x.mid, x.high))
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    step = max(1, most_at_once(mid) // max(columns, 1))
    for start in range(0, max(mid.shape[0], 1), step):
        some = slice(start, start + step)
        here = mid[some].double()
        off = torch.maximum(high[some].double() - here, here - low[some].double())
        off = torch.where(low[some] == high[some], 0.0, off)  # infinities are exact too
        found.append(row(here, off))
    results = [torch.cat(parts) for parts in zip(*found, strict=True)]
    if keep:
        back = sorted(range(rank), key=order.__getitem__)
        results = [t.reshape(shape).permute(back) for t in results]
    return results[0], results[1]


def _around(mid: torch.Tensor, room: torch.Tensor, dtype: DType) -> Interval:
    storage = dtype.to_torch()
    room = torch.where(mid.isfinite(), room, torch.zeros_like(room))
    return Interval((mid - room).to(storage), mid.to(storage), (mid + room).to(storage))


def _growth(n: int, usual: bool) -> float:
    """The factor by which a sum's error grows with its length, in unit roundoffs."""
    return SAFETY * math.sqrt(n) if usual else n + 2


def _sum_error(x: torch.Tensor, u: float, usual: bool) -> torch.Tensor:
    """The error bound of the sums of rows, [rows, 1]."""
    n = max(x.shape[-1], 1)
    if not usual:
        return _growth(n, False) * u * x.abs().sum(-1, keepdim=True)
    partial = (x.sum(-1, keepdim=True).square() + x.square().sum(-1, keepdim=True)).sqrt()
    return torch.minimum(_growth(n, True) * u * partial, _sum_error(x, u, False))


def _sum(dtype: DType, mean: bool, usual: bool) -> _Row:
    u = _roundoff(dtype)

    def row(x: torch.Tensor, off: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = x.shape[-1] if mean else 1
        total = x.sum(-1, keepdim=True) / n if n else torch.full((x.shape[0], 1), math.nan, dtype=x.dtype)
        carried = off.sum(-1, keepdim=True)
        if usual:
            carried = torch.minimum(carried, SAFETY * off.square().sum(-1, keepdim=True).sqrt())
        return total, (_sum_error(x, u, usual) + carried) / max(n, 1) + 2 * u * total.abs()

    return row


def _softmax(dtype: DType, log: bool, usual: bool) -> _Row:
    u = _roundoff(dtype)

    def row(x: torch.Tensor, off: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.log_softmax(x, -1) if log else torch.softmax(x, -1)
        below = (x - x.amax(-1, keepdim=True)).nan_to_num(0.0, 0.0, 0.0).abs() if x.shape[-1] else x
        moved = off + off.amax(-1, keepdim=True) if x.shape[-1] else off
        relative = (below + _growth(x.shape[-1], usual) + EXP_ROUNDINGS) * u
        if log:
            return y, relative + moved + STEP_ROUNDINGS * u * size(y)
        return y, y * (relative + torch.expm1(moved)) + SMALLEST

    return row


def _norm(op: LayerNorm, dtype: DType, usual: bool) -> _Row:
    u = _roundoff(dtype)

    def row(x: torch.Tensor, off: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = max(x.shape[-1], 1)
        mean_error = torch.zeros(x.shape[0], 1, dtype=x.dtype)
        d = x
        if op.center:
            mean = x.mean(-1, keepdim=True)
            mean_error = _sum_error(x, u, usual) / n + u * mean.abs()
            d = x - mean
        r = torch.rsqrt(d.square().mean(-1, keepdim=True) + op.epsilon)
        y = d * r
        # Of the variance and so of r: its sum, the mean's error in second order, the square root and the division.
        relative = 0.5 * (_growth(n, usual) * u + (mean_error * r).square()) + 2 * STEP_ROUNDINGS * u
        moved = r * off
        spread = (y.abs() * moved).mean(-1, keepdim=True)
        room = r * mean_error + moved + moved.mean(-1, keepdim=True) + y.abs() * (relative + spread)
        room = room * (1 + 4 * moved.amax(-1, keepdim=True).clamp(max=1.0)) if x.shape[-1] else room
        return y, torch.minimum(room, y.abs() + math.sqrt(n))  # no element of a norm is larger than sqrt(n)

    return row


def _scaled(n: Node, mid: torch.Tensor, room: torch.Tensor, more: Sequence[Interval]) -> Interval:
    """A norm's elements times its scale, and its bias added."""
    u = _roundoff(n.dtype)

    def step(y: torch.Tensor, room: torch.Tensor, *ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
        beside = [Interval(*(t.double() for t in ends[i : i + 3])) for i in range(0, len(ends), 3)]
        off = [torch.maximum(b.high - b.mid, b.mid - b.low).nan_to_num(0.0) for b in beside]
        if beside:
            room = room * beside[0].mid.abs() + (y.abs() + room) * off[0]
            y = y * beside[0].mid
        room = room + STEP_ROUNDINGS * u * size(y)
        if len(beside) > 1:
            room = room + off[1] + STEP_ROUNDINGS * u * size(beside[1].mid)
            y = y + beside[1].mid
        band = _around(y, room + SMALLEST, n.dtype)
        return band.low, band.mid, band.high

    return Interval(*by_pieces(n.shape, step, mid, room, *(t for b in more for t in (b.low, b.mid, b.high))))
