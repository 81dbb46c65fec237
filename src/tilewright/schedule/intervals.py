"""Values known up to an error: intervals, and what elementwise operations make of them.

A step may round its operands and its result a few times, since a kernel may order an expression its own way (contract a
multiply and an add, raise 2 instead of e to a power). Most functions are at their least and largest at the ends of what their
operands may be; those that turn, jump or wrap in between are told of here. Where nothing is known an interval says so: NaN for
a float, all of its range for an integer. Nothing is unknown of an element whose operands are exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import cast

import torch

from tilewright.dtype import PRED, U64, DType
from tilewright.ir.graph import Node
from tilewright.ir.ops import Map
from tilewright.ir.ops.functions import by_bits
from tilewright.schedule.pieces import by_pieces

STEP_ROUNDINGS = 4
# 1 + erf(x), 1 + tanh(x) and the like: a rounding of the operand's size is left where the result is small.
CANCELLING = frozenset({"erf", "erfc", "exponential_minus_one", "gelu", "gelu_tanh", "log_plus_one", "logistic", "silu"})
# Where a function of one float turns.
TURNS = {"abs": 0.0, "cosh": 0.0, "gelu": -0.7517915, "gelu_tanh": -0.7524614, "silu": -1.2784645}
# Of integers: in order until they wrap, which is seen in float64.
WRAPPING: dict[str, Callable[..., torch.Tensor]] = {
    "abs": torch.abs,
    "add": torch.add,
    "divide": torch.div,
    "multiply": torch.mul,
    "negate": torch.neg,
    "subtract": torch.sub,
}
# Of integers: neither in order nor near what they are at the ends of an interval.
UNORDERED = frozenset({"and", "or", "xor", "power", "shift_left", "shift_right_logical", "shift_right_arithmetic"})
_TOP = -(1 << 63)


@dataclass(frozen=True)
class Interval:
    """A value, and the interval its error bound leaves it."""

    low: torch.Tensor
    mid: torch.Tensor
    high: torch.Tensor

    @classmethod
    def exact(cls, value: torch.Tensor) -> Interval:
        """The interval of one point: nothing rounds."""
        return cls(value, value, value)

    @property
    def is_exact(self) -> bool:
        """Say whether nothing rounds: the ends are the very tensor in the middle."""
        return self.low is self.mid is self.high

    @classmethod
    def spanning(cls, mid: torch.Tensor, others: Sequence[torch.Tensor]) -> Interval:
        """The least and the largest of some values. NaN beside a number says that nothing is known there."""
        low, high = (reduce(f, map(_in_order, others), _in_order(mid)) for f in (torch.minimum, torch.maximum))
        return cls(_back(low, mid.dtype), mid, _back(high, mid.dtype))

    def forgotten(self, where: torch.Tensor, dtype: DType) -> Interval:
        """The interval with nothing known in some places, which broadcast to it."""
        where = where.expand(self.mid.shape)
        if not bool(where.any()):
            return self
        storage = self.mid.dtype
        if dtype.is_float:
            nothing = torch.full((), math.nan).to(storage)
            least, largest = nothing, nothing
        elif dtype is U64:
            least, largest = (torch.tensor(v).view(storage) for v in (0, -1))
        else:
            least, largest = (torch.tensor(int(v)).to(storage) for v in (dtype.min, dtype.max))
        return Interval(picked(where, least, self.low), self.mid, picked(where, largest, self.high))


def unsure(b: Interval) -> torch.Tensor:
    """A mask of the places where an interval is more than a point."""
    if b.is_exact:
        return torch.zeros((), dtype=torch.bool)
    low, high = _in_order(b.low), _in_order(b.high)
    return ~((low == high) | (low.isnan() & _in_order(b.mid).isnan() & high.isnan()))


def lost(b: Interval) -> torch.Tensor:
    """A mask of the places where nothing is known of a float that is a number."""
    if not b.mid.dtype.is_floating_point or b.is_exact:
        return torch.zeros((), dtype=torch.bool)
    return (orderable(b.low).isnan() | orderable(b.high).isnan()) & ~orderable(b.mid).isnan()


def spans_zero(b: Interval) -> torch.Tensor:
    """A mask of the places where an interval is more than a point and zero may lie in it."""
    low, high = b.low.double(), b.high.double()
    return (low <= 0) & (high >= 0) & (low != high)


def picked(where: torch.Tensor, on_true: torch.Tensor, on_false: torch.Tensor) -> torch.Tensor:
    """`torch.where`, for types of which torch knows only the bits too."""
    return by_bits(partial(torch.where, where), on_true, on_false)


def any_of(places: Sequence[torch.Tensor]) -> torch.Tensor:
    """The disjunction of masks, false for none."""
    return reduce(torch.logical_or, places, torch.zeros((), dtype=torch.bool))


def propagate(n: Node, src: Sequence[Interval], dependent: Collection[Node]) -> Interval:
    """An elementwise step over intervals: its least and largest value over their ends, and slack for its roundings."""
    fn = n.op.fn if isinstance(n.op, Map) else "select"
    kind = n.src[-1].dtype
    rounded = isinstance(n.op, Map) and n.dtype.is_float

    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        here = [Interval(*tensors[i : i + 3]) for i in range(0, len(tensors), 3)]
        wide = [
            Interval(low, b.mid, high)
            for s, b in zip(n.src, here, strict=True)
            for low, high in (_rounded(b, s.dtype) if s in dependent else (b.mid, b.mid),)
        ]
        ends: list[tuple[torch.Tensor, ...]] = [
            (b.low, b.high) if s in dependent else (b.mid,) for s, b in zip(n.src, wide, strict=True)
        ]
        if rounded and (fn in TURNS or fn == "power"):
            ends[0] = (*ends[0], _nearest(TURNS.get(fn, 0.0), ends[0][0], ends[0][-1]))
        mid = cast("torch.Tensor", n.op.evaluate(n, [b.mid for b in here]))
        corners = [list(corner) for corner in itertools.product(*ends)]
        band = Interval.spanning(mid, [cast("torch.Tensor", n.op.evaluate(n, corner)) for corner in corners])
        if fn != "select":
            band = (_known_float if kind.is_float else _known_integer)(fn, wide, corners, band, n.dtype)
        if not rounded:
            return band.low, mid, band.high
        left = torch.zeros((), dtype=torch.float64)
        if fn in CANCELLING:
            left = STEP_ROUNDINGS * n.dtype.epsilon * size(here[0].mid)
        return _moved(band.low, n.dtype, -1, left), mid, _moved(band.high, n.dtype, 1, left)

    return Interval(*by_pieces(n.shape, step, *(t for b in src for t in (b.low, b.mid, b.high))))


def _known_float(fn: str, src: Sequence[Interval], corners: object, band: Interval, result: DType) -> Interval:
    """The interval of a function of floats whose ends are those of `band`."""
    x, y = src[0], src[-1]
    if fn in ("sine", "cosine"):
        room = (x.high.double() - x.low.double()).nan_to_num(2.0)
        mid = band.mid.double()
        ends = ((mid + sign * room).clamp(-1.0, 1.0).to(band.mid.dtype) for sign in (-1, 1))
        return Interval.spanning(band.mid, [band.low, band.high, *(picked(mid.isnan(), band.mid, e) for e in ends)])
    if fn == "tan":
        low, high = (torch.floor(t.double() / math.pi + 0.5) for t in (x.low, x.high))
        return band.forgotten(low != high, result)
    if fn == "divide":
        return band.forgotten(spans_zero(y), result)
    if fn in ("remainder", "modulo"):
        whole = torch.floor if fn == "modulo" else torch.trunc
        times = [whole(a.double() / b.double()) for a in (x.low, x.high) for b in (y.low, y.high)]
        jumps = any_of([t != times[0] for t in times[1:]]) & (unsure(x) | unsure(y))
        largest = torch.maximum(y.low.double().abs(), y.high.double().abs())
        least, most = ((sign * largest).to(band.mid.dtype) for sign in (-1, 1))
        band = Interval(picked(jumps, least, band.low), band.mid, picked(jumps, most, band.high))
        return band.forgotten(spans_zero(y), result)
    if fn == "power":
        negative, loose = x.low.double() < 0, unsure(y)
        return band.forgotten((negative & loose) | (spans_zero(x) & (y.low.double() < 0)), result)
    if fn == "atan2":
        turns = (src[1].low.double() <= 0) & spans_zero(x)
        least, most = (torch.tensor(sign * math.pi).to(band.mid.dtype) for sign in (-1, 1))
        return Interval(picked(turns, least, band.low), band.mid, picked(turns, most, band.high))
    if result is PRED:
        places = [lost(b) for b in src]
        if fn in ("equal", "not_equal"):
            meet = (x.low.double() <= y.high.double()) & (y.low.double() <= x.high.double())
            places.append(meet & (unsure(x) | unsure(y)))
        return band.forgotten(any_of(places), result)
    return band


def _known_integer(
    fn: str, src: Sequence[Interval], corners: Sequence[Sequence[torch.Tensor]], band: Interval, result: DType
) -> Interval:
    """The same for integers, which wrap, and pred."""
    kind = band.mid.dtype if result is not PRED else src[0].mid.dtype
    if kind == torch.bool:  # all there is was tried
        return band
    loose = any_of([unsure(b) for b in src])
    if not bool(loose.any()):
        return band
    x, y = src[0], src[-1]
    if result is PRED:
        if fn not in ("equal", "not_equal"):
            return band
        xl, xh, yl, yh = (_in_order(t) for t in (x.low, x.high, y.low, y.high))
        return band.forgotten((xl <= yh) & (yl <= xh) & loose, result)
    if fn in UNORDERED:
        return band.forgotten(loose, result)
    if fn in WRAPPING:
        values = [WRAPPING[fn](*(t.double() for t in corner)) for corner in corners]
        slack = 2048.0 if result.bits == 64 else 0.0  # of float64 around 2^64
        outside = [(v < float(result.min) + slack * (result.min != 0)) | (v > float(result.max) - slack) for v in values]
        if fn == "divide":
            outside.append((_in_order(y.low) <= _zero(y)) & (_in_order(y.high) >= _zero(y)))
        return _turned(fn, x, band).forgotten(any_of(outside) & loose, result)
    if fn in ("remainder", "modulo"):
        return band.forgotten(loose, result)
    return band


def _turned(fn: str, x: Interval, band: Interval) -> Interval:
    """The size of an integer, whose least is zero where that lies between."""
    if fn != "abs" or not x.mid.dtype.is_signed:
        return band
    inside = (x.low <= 0) & (x.high >= 0)
    return Interval(torch.where(inside, torch.zeros_like(band.low), band.low), band.mid, band.high)


def _nearest(value: float, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The value nearest to `value` between two tensors of floats."""
    a, b = orderable(low), orderable(high)
    return torch.minimum(torch.maximum(torch.full_like(a, value), a), b).to(low.dtype)


def _zero(b: Interval) -> int:
    return _TOP if b.mid.dtype == torch.uint64 else 0


def inflate(band: Interval, fraction: float) -> Interval:
    """An interval whose ends are a fraction of themselves further out."""
    low, high = ((end.double() + sign * fraction * size(end)).to(end.dtype) for end, sign in ((band.low, -1), (band.high, 1)))
    return Interval(low, band.mid, high)


def _rounded(band: Interval, dtype: DType) -> tuple[torch.Tensor, torch.Tensor]:
    """Both ends of an interval, a few roundings further out."""
    if not dtype.is_float:
        return band.low, band.high
    nothing = torch.zeros((), dtype=torch.float64)
    return _moved(band.low, dtype, -1, nothing), _moved(band.high, dtype, 1, nothing)


def _moved(end: torch.Tensor, dtype: DType, sign: int, further: torch.Tensor) -> torch.Tensor:
    return (end.double() + sign * (STEP_ROUNDINGS * dtype.epsilon * size(end) + further)).to(end.dtype)


def size(t: torch.Tensor) -> torch.Tensor:
    """The magnitude in float64, 0 for NaN and infinities."""
    return t.double().abs().nan_to_num(0.0, 0.0, 0.0)


def _in_order(t: torch.Tensor) -> torch.Tensor:
    """The same order in a type that torch can compare, from which `_back` comes back."""
    if t.dtype == torch.uint64:
        return t.view(torch.int64) ^ _TOP
    return orderable(t)


def _back(t: torch.Tensor, storage: torch.dtype) -> torch.Tensor:
    return (t ^ _TOP).view(torch.uint64) if storage == torch.uint64 else t.to(storage)


def orderable(t: torch.Tensor) -> torch.Tensor:
    """The tensor in a type that torch can compare."""
    if t.dtype.is_floating_point:
        return t.float() if t.dtype.itemsize == 1 else t
    if t.dtype == torch.uint64:
        return t.double()  # to 53 bits, in order
    return t.to(torch.int64) if t.dtype in (torch.uint16, torch.uint32) else t
