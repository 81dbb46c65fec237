"""Values known up to an error: intervals, what every operation makes of them, and working through large ones a piece at a
time.

An elementwise step may round its operands and its result a few times, since a kernel may order an expression its own way
(contract a multiply and an add, raise 2 instead of e to a power). Most functions are least and largest at the ends of their
operands' intervals; functions that turn, jump or wrap in between are listed here. Casts, quantisation, views, pads, picks and
writes round nothing, or as the graph says. Where nothing is known an interval says so: NaN for a float, all of its range for an
integer. Nothing is unknown of an element whose operands are exact.

With u the roundoff of f32 (f64 for f64), a sum of n numbers is within n u of the sum of their sizes in any order, and typically
within sqrt(n) u of its partial sums; see `expected.py`, whose two bounds these are. A layer norm adds two effects to that. An
error of the mean moves every element by d(x - mean) r. An error of the variance moves r = 1 / sqrt(var + epsilon) by half as
much, relatively. The mean's error moves the variance in second order only, if it is taken from the differences; a kernel that
subtracts two large numbers instead (E[x^2] - E[x]^2) is outside these bounds as soon as it matters. What is known up to an
error on the way in adds to that to first order: a norm's element moves by r times its own error, the mean one, and what the
change of r does; a softmax's logarithm by its own error and the largest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import cast

import torch

from tilewright.dtype import F4E2M1FN, F32, F64, PRED, U64, DType
from tilewright.ir.graph import Node
from tilewright.ir.mesh import team
from tilewright.ir.ops import (
    AllReduce,
    Convert,
    Dequantize,
    Gather,
    LayerNorm,
    Map,
    Param,
    Quantize,
    Reduce,
    ReduceScatter,
    Softmax,
    Write,
)
from tilewright.ir.ops.functions import by_bits
from tilewright.ir.ops.rounding import to_float

PIECE = 1 << 20  # elements of a large tensor that are worked on at once: 8 MiB in float64
ON_GPU = 16  # times as many on a GPU, which works on a million in less time than an operation takes to be launched
SAFETY = 16.0
EXP_ROUNDINGS = 16
SMALLEST = 2.0**-125  # where kernels stop at f32's normal numbers
REDUCING = (Reduce, Softmax, LayerNorm)
STEP_ROUNDINGS = 4
# 1 + erf(x), 1 + tanh(x) and the like: a rounding of the operand's size is left where the result is small.
CANCELLING = frozenset({"erf", "erfc", "exponential_minus_one", "gelu", "gelu_tanh", "log_plus_one", "logistic", "silu"})
# Of these, what is added to 1 or taken from it is of size 1 at most where the result is small, however large the operand.
OF_ONE = CANCELLING - {"gelu", "gelu_tanh", "silu"}
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

Index = tuple[slice, ...]
_Row = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


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


def _value(n: Node, src: Sequence[torch.Tensor]) -> torch.Tensor:
    return cast("torch.Tensor", n.op.evaluate(n, list(src)))


def unit_roundoff(dtype: DType) -> float:
    """The unit roundoff in which values of a type are computed: f32's, or f64's for f64."""
    return (F64 if dtype is F64 else F32).epsilon / 2


def propagate(n: Node, src: Sequence[Interval], dependent: Collection[Node]) -> Interval:
    """An elementwise step over intervals: its least and largest value over their ends, and slack for its roundings."""
    fn = n.op.fn if isinstance(n.op, Map) else "select"
    if fn != "select" and n.dtype.is_float and n.dtype.bits <= 8:
        return _in_8_bits(n, src, dependent)
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
        mid = _value(n, [b.mid for b in here])
        corners = [list(corner) for corner in itertools.product(*ends)]
        interval = Interval.spanning(mid, [_value(n, corner) for corner in corners])
        if fn != "select":
            interval = (_known_float if kind.is_float else _known_integer)(fn, wide, corners, interval, n.dtype)
        if not rounded:
            return interval.low, mid, interval.high
        left = torch.zeros((), dtype=torch.float64)
        if fn in CANCELLING:
            left = STEP_ROUNDINGS * n.dtype.epsilon * size(here[0].mid).clamp(max=1.0 if fn in OF_ONE else math.inf)
        return _moved(interval.low, n.dtype, -1, left), mid, _moved(interval.high, n.dtype, 1, left)

    return Interval(*by_pieces(n.shape, step, *(t for b in src for t in (b.low, b.mid, b.high))))


def _in_8_bits(n: Node, src: Sequence[Interval], dependent: Collection[Node]) -> Interval:
    """An elementwise step in floats of 8 bits or fewer: no kernel computes in these, so it is one in f32, rounded once."""
    leaves = [Node(Param(i, s.tensor.with_dtype(F32))) for i, s in enumerate(n.src)]
    wide = [Interval(*(t.float() for t in (b.low, b.mid, b.high))) for b in src]
    moved = {leaf for leaf, s in zip(leaves, n.src, strict=True) if s in dependent}
    found = propagate(Node(n.op, *leaves), wide, moved)
    mid, nothing = _value(n, [b.mid for b in src]), torch.full((), math.nan).to(n.dtype.to_torch())
    low, high = (picked(t.isnan(), nothing, to_float(t, n.dtype)) for t in (found.low, found.high))
    return Interval(low, mid, high)


def _known_float(fn: str, src: Sequence[Interval], corners: object, interval: Interval, result: DType) -> Interval:
    """The interval of a function of floats whose ends are those of `interval`."""
    x, y = src[0], src[-1]
    if result is F4E2M1FN:  # an end where the function is NaN does not show in it
        return interval.forgotten(any_of([unsure(b) for b in src]), result)
    if fn in ("sine", "cosine"):
        slack = (x.high.double() - x.low.double()).nan_to_num(2.0)
        mid = interval.mid.double()
        ends = ((mid + sign * slack).clamp(-1.0, 1.0).to(interval.mid.dtype) for sign in (-1, 1))
        return Interval.spanning(
            interval.mid, [interval.low, interval.high, *(picked(mid.isnan(), interval.mid, e) for e in ends)]
        )
    if fn == "tan":
        low, high = (torch.floor(t.double() / math.pi + 0.5) for t in (x.low, x.high))
        return interval.forgotten(low != high, result)
    if fn == "divide":
        return interval.forgotten(spans_zero(y), result)
    if fn in ("remainder", "modulo"):
        whole = torch.floor if fn == "modulo" else torch.trunc
        times = [whole(a.double() / b.double()) for a in (x.low, x.high) for b in (y.low, y.high)]
        jumps = any_of([t != times[0] for t in times[1:]]) & (unsure(x) | unsure(y))
        largest = torch.maximum(y.low.double().abs(), y.high.double().abs())
        least, most = ((sign * largest).to(interval.mid.dtype) for sign in (-1, 1))
        interval = Interval(picked(jumps, least, interval.low), interval.mid, picked(jumps, most, interval.high))
        return interval.forgotten(spans_zero(y), result)
    if fn == "power":
        negative, loose = x.low.double() < 0, unsure(y)
        return interval.forgotten((negative & loose) | (spans_zero(x) & (y.low.double() < 0)), result)
    if fn == "atan2":
        turns = (src[1].low.double() <= 0) & spans_zero(x)
        least, most = (torch.tensor(sign * math.pi).to(interval.mid.dtype) for sign in (-1, 1))
        return Interval(picked(turns, least, interval.low), interval.mid, picked(turns, most, interval.high))
    if result is PRED:
        places = [lost(b) for b in src]
        if fn in ("equal", "not_equal"):
            meet = (x.low.double() <= y.high.double()) & (y.low.double() <= x.high.double())
            places.append(meet & (unsure(x) | unsure(y)))
        return interval.forgotten(any_of(places), result)
    return interval


def _known_integer(
    fn: str, src: Sequence[Interval], corners: Sequence[Sequence[torch.Tensor]], interval: Interval, result: DType
) -> Interval:
    """The same for integers, which wrap, and pred."""
    kind = interval.mid.dtype if result is not PRED else src[0].mid.dtype
    if kind == torch.bool:  # all there is was tried
        return interval
    loose = any_of([unsure(b) for b in src])
    if not bool(loose.any()):
        return interval
    x, y = src[0], src[-1]
    if result is PRED:
        if fn not in ("equal", "not_equal"):
            return interval
        xl, xh, yl, yh = (_in_order(t) for t in (x.low, x.high, y.low, y.high))
        return interval.forgotten((xl <= yh) & (yl <= xh) & loose, result)
    if fn in UNORDERED:
        return interval.forgotten(loose, result)
    if fn in WRAPPING:
        values = [WRAPPING[fn](*(t.double() for t in corner)) for corner in corners]
        slack = 2048.0 if result.bits == 64 else 0.0  # of float64 around 2^64
        outside = [(v < float(result.min) + slack * (result.min != 0)) | (v > float(result.max) - slack) for v in values]
        if fn == "divide":
            outside.append((_in_order(y.low) <= _zero(y)) & (_in_order(y.high) >= _zero(y)))
        return _magnitude(fn, x, interval).forgotten(any_of(outside) & loose, result)
    if fn in ("remainder", "modulo"):
        return interval.forgotten(loose, result)
    return interval


def _magnitude(fn: str, x: Interval, interval: Interval) -> Interval:
    """The size of an integer, whose least is zero where that lies between."""
    if fn != "abs" or not x.mid.dtype.is_signed:
        return interval
    inside = (x.low <= 0) & (x.high >= 0)
    return Interval(torch.where(inside, torch.zeros_like(interval.low), interval.low), interval.mid, interval.high)


def _nearest(value: float, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """The value nearest to `value` between two tensors of floats."""
    a, b = orderable(low), orderable(high)
    return torch.minimum(torch.maximum(torch.full_like(a, value), a), b).to(low.dtype)


def _zero(b: Interval) -> int:
    return _TOP if b.mid.dtype == torch.uint64 else 0


def inflate(interval: Interval, fraction: float) -> Interval:
    """An interval whose ends are a fraction of themselves further out."""
    low, high = (
        (end.double() + sign * fraction * size(end)).to(end.dtype) for end, sign in ((interval.low, -1), (interval.high, 1))
    )
    return Interval(low, interval.mid, high)


def _rounded(interval: Interval, dtype: DType) -> tuple[torch.Tensor, torch.Tensor]:
    """Both ends of an interval, a few roundings further out."""
    if not dtype.is_float or dtype.bits <= 8:  # of these each is what the graph says, or what rounding gave
        return interval.low, interval.high
    nothing = torch.zeros((), dtype=torch.float64)
    return _moved(interval.low, dtype, -1, nothing), _moved(interval.high, dtype, 1, nothing)


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


def most_at_once(*tensors: torch.Tensor) -> int:
    """Elements of a piece, where these tensors are."""
    return PIECE if all(t.device.type == "cpu" for t in tensors) else ON_GPU * PIECE


def pieces(shape: Sequence[int], most: int) -> Iterator[Index]:
    """Indices of pieces of a shape, at most so many elements each, that cover it in row-major order; all of a small one."""
    elements = math.prod(shape)
    if elements <= most:
        yield (slice(None),) * len(shape)
        return
    rows = max(1, most * shape[0] // elements)
    for start in range(0, shape[0], rows):
        for rest in pieces(shape[1:], most) if rows == 1 else [(slice(None),) * (len(shape) - 1)]:
            yield (slice(start, start + rows), *rest)


def part(t: torch.Tensor, index: Index) -> torch.Tensor:
    """The part of a broadcast tensor that a piece of the whole shape reads."""
    mine = index[len(index) - t.dim() :]
    return t[tuple(slice(None) if d == 1 else i for d, i in zip(t.shape, mine, strict=True))]


def by_pieces(shape: Sequence[int], f: Callable[..., Sequence[torch.Tensor]], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The results of an elementwise function of tensors that broadcast to `shape`, computed a piece at a time."""
    found: list[torch.Tensor] = []
    for index in pieces(shape, most_at_once(*tensors)):
        results = f(*(part(t, index) for t in tensors))
        if all(i == slice(None) for i in index):
            return list(results)
        if not found:
            found = [torch.empty(tuple(shape), dtype=r.dtype) for r in results]
        for whole, r in zip(found, results, strict=True):
            whole[index] = r
    return found


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
    interval = Interval.spanning(mid, [_value(n, list(c)) for c in corners])
    if isinstance(op, Convert):
        return interval.forgotten(_wraps(n, src[0]), n.dtype)
    if isinstance(op, (Quantize, Dequantize)):
        unknown = any_of([lost(src[0]), *(lost(b).any() for b in src[1:])])
        if isinstance(op, Quantize) and not src[1].is_exact:
            unknown = unknown | spans_zero(src[1]).any()
        return interval.forgotten(unknown, n.dtype)
    return interval


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
    interval = Interval.spanning(
        _value(n, [src[0].mid, picks, *(b.mid for b in src[2:])]),
        [_value(n, [getattr(src[0], end), picks, *(getattr(b, end) for b in src[2:])]) for end in ("low", "high")],
    )
    if src[1].is_exact:
        return interval
    other = unsure(src[1])
    if isinstance(n.op, Write):
        return interval.forgotten(other.any(), n.dtype)
    op = cast("Gather", n.op)
    if not op.elementwise:
        after = n.src[0].tensor.rank - op.axis % n.src[0].tensor.rank - 1
        other = other.reshape(*other.shape, *(1,) * after)
    return interval.forgotten(other, n.dtype)


def reduced(n: Node, src: Sequence[Interval], *, usual: bool) -> Interval:
    """The result of a reduction, softmax or norm over intervals; `usual` takes the typical size of rounding errors."""
    op, x = n.op, src[0]
    if isinstance(op, Reduce):
        if op.fn in ("maximum", "minimum") or not op.axes or n.dtype is PRED:  # nothing rounds, and order is kept
            return Interval.spanning(_value(n, [x.mid]), (_value(n, [x.low]), _value(n, [x.high])))
        if n.dtype.is_integer:
            return _integers(n, op, x)
        row = _product(n.dtype, usual) if op.fn == "multiply" else _sum(n.dtype, op.fn == "mean", usual)
        mid, slack = _by_rows(x, op.axes, row, keep=False)
        return _around(mid.reshape(n.shape), slack.reshape(n.shape), n.dtype)
    if isinstance(op, Softmax):
        return _around(*_by_rows(x, (op.axis % len(n.shape),), _softmax(n.dtype, op.log, usual), keep=True), n.dtype)
    assert isinstance(op, LayerNorm)
    axes = tuple(range(op.axis % len(n.shape), len(n.shape)))
    mid, slack = _by_rows(x, axes, _norm(op, n.dtype, usual), keep=True)
    return _scaled(n, mid, slack, src[1:])


def met(n: Node, x: Interval) -> Interval:
    """The result of a reduction over ranks, each of which holds an interval: a sum or product of t floats may be taken in any
    order, each step rounded to the type that travels, so it lies within t of its unit roundoffs of the sum of sizes."""
    op = n.op
    assert isinstance(op, (AllReduce, ReduceScatter))
    if not (n.dtype.is_float and op.fn in ("add", "multiply")):
        return spread(n, [x])
    peers = team()

    def over_ranks(t: torch.Tensor) -> torch.Tensor:
        """The same reduction in float64, of which this rank has its part."""
        fold = (lambda v: torch.stack(v).sum(0)) if op.fn == "add" else (lambda v: torch.stack(v).prod(0))
        whole = peers.exchange(t, op.over, fold)
        if isinstance(op, AllReduce):
            return whole
        extent = n.shape[op.axis]
        return whole.narrow(op.axis, peers.mesh.index(peers.rank, op.over) * extent, extent)

    here = x.mid.double()
    off = torch.maximum(x.high.double() - here, here - x.low.double()).nan_to_num(0.0, math.inf, 0.0)
    off = torch.where(here.isfinite(), off, torch.zeros_like(off))
    most = over_ranks(size(here) + off)
    off = over_ranks(off) if op.fn == "add" else most - over_ranks(size(here))
    return _around(over_ranks(here), off + op.ranks * n.dtype.epsilon / 2 * most, n.dtype)


def _integers(n: Node, op: Reduce, x: Interval) -> Interval:
    """Sums of integers are in order until they wrap; of their products and bits nothing is known unless all are exact."""
    interval = Interval.spanning(_value(n, [x.mid]), (_value(n, [x.low]), _value(n, [x.high])))
    loose = unsure(x).expand(x.mid.shape)
    unknown = loose.to(torch.int8).amax(op.axes, keepdim=op.keepdims).bool() if loose.numel() else loose.any()
    if op.fn == "add":
        ends = [t.double().sum(op.axes, keepdim=op.keepdims) for t in (x.low, x.high)]
        unknown = unknown & any_of([(e < 0.999 * float(n.dtype.min)) | (e > 0.999 * float(n.dtype.max)) for e in ends])
    return interval.forgotten(unknown, n.dtype)


def _product(dtype: DType, usual: bool) -> _Row:
    u = unit_roundoff(dtype)

    def row(x: torch.Tensor, off: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        most = (x.abs() + off).prod(-1, keepdim=True)
        return x.prod(-1, keepdim=True), most - x.abs().prod(-1, keepdim=True) + _growth(x.shape[-1], usual) * u * most

    return row


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


def _around(mid: torch.Tensor, slack: torch.Tensor, dtype: DType) -> Interval:
    slack = torch.where(mid.isfinite(), slack, torch.zeros_like(slack))
    return Interval(
        *(to_float(t, dtype) if dtype is F4E2M1FN else t.to(dtype.to_torch()) for t in (mid - slack, mid, mid + slack))
    )


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
    u = unit_roundoff(dtype)

    def row(x: torch.Tensor, off: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n = x.shape[-1] if mean else 1
        total = x.sum(-1, keepdim=True) / n if n else torch.full((x.shape[0], 1), math.nan, dtype=x.dtype)
        carried = off.sum(-1, keepdim=True)
        if usual:
            carried = torch.minimum(carried, SAFETY * off.square().sum(-1, keepdim=True).sqrt())
        return total, (_sum_error(x, u, usual) + carried) / max(n, 1) + 2 * u * total.abs()

    return row


def _softmax(dtype: DType, log: bool, usual: bool) -> _Row:
    u = unit_roundoff(dtype)

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
    u = unit_roundoff(dtype)

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
        slack = r * mean_error + moved + moved.mean(-1, keepdim=True) + y.abs() * (relative + spread)
        slack = slack * (1 + 4 * moved.amax(-1, keepdim=True).clamp(max=1.0)) if x.shape[-1] else slack
        return y, torch.minimum(slack, y.abs() + math.sqrt(n))  # no element of a norm is larger than sqrt(n)

    return row


def _scaled(n: Node, mid: torch.Tensor, slack: torch.Tensor, more: Sequence[Interval]) -> Interval:
    """A norm's elements times its scale, and its bias added."""
    u = unit_roundoff(n.dtype)

    def step(y: torch.Tensor, slack: torch.Tensor, *ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
        beside = [Interval(*(t.double() for t in ends[i : i + 3])) for i in range(0, len(ends), 3)]
        off = [torch.maximum(b.high - b.mid, b.mid - b.low).nan_to_num(0.0) for b in beside]
        if beside:
            slack = slack * beside[0].mid.abs() + (y.abs() + slack) * off[0]
            y = y * beside[0].mid
        slack = slack + STEP_ROUNDINGS * u * size(y)
        if len(beside) > 1:
            slack = slack + off[1] + STEP_ROUNDINGS * u * size(beside[1].mid)
            y = y + beside[1].mid
        interval = _around(y, slack + SMALLEST, n.dtype)
        return interval.low, interval.mid, interval.high

    return Interval(*by_pieces(n.shape, step, mid, slack, *(t for b in more for t in (b.low, b.mid, b.high))))
