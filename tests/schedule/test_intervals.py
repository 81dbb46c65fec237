"""Bounds of every operation over every type: what its operands may be lies in what its result may be."""

import itertools

import pytest
import torch

from tilewright.dtype import BY_NAME, F32, PRED, S32, S64
from tilewright.ir.build import convert
from tilewright.ir.graph import Node
from tilewright.ir.ops import (
    FUNCTIONS,
    Concat,
    Convert,
    Dequantize,
    Gather,
    LayerNorm,
    Map,
    Pad,
    Param,
    Quantize,
    Reduce,
    Select,
    Softmax,
    Transpose,
    Write,
)
from tilewright.ir.types import TensorType
from tilewright.schedule.expected import check, expect
from tilewright.schedule.intervals import REDUCING, Interval, orderable, propagate, reduced, spread
from tilewright.schedule.problem import FusionProblem
from tilewright.schedule.sample import random_tensor

TYPES = [t for t in BY_NAME.values() if t.kind != "opaque"]
SHAPE = (5, 7)
REDUCTIONS = ("add", "multiply", "maximum", "minimum", "and", "or", "mean")


def param(i, dtype, shape=SHAPE):
    return Node(Param(i, TensorType(dtype, shape)))


def made(op, *src):
    try:
        return Node(op, *src)
    except Exception:  # the operation does not take the type
        return None


def nodes_of(dtype):
    """Every operation on operands of a type, over shapes [5, 7] and, for indices, what fits them."""
    x, y, z = (param(i, dtype) for i in range(3))
    scale = param(1, F32, (5, 1))
    tests = [
        *(made(Map(name), *(x, y, z)[: f.arity]) for name, f in FUNCTIONS.items()),
        *(made(Reduce(fn, axes, keep), x) for fn in REDUCTIONS for axes, keep in (((1,), True), ((0, 1), False))),
        *(made(Convert(t, overflow), x) for t in TYPES for overflow in ("wrap", "saturate")),
        *(made(Quantize(t), x, scale) for t in TYPES),
        *(made(Dequantize(t), x, scale) for t in TYPES),
        made(Dequantize(F32), x, scale, param(2, dtype, (5, 1))),
        *(made(Softmax(1, log), x) for log in (False, True)),
        *(made(LayerNorm(1, 1e-5, center), x) for center in (False, True)),
        made(Select(), param(2, PRED), x, y),
        made(Select(), x, y, z),
        made(Concat(1), x, y),
        made(Transpose((1, 0)), x),
        made(Pad((1, 0), (0, 2), (0, 1)), x, param(1, dtype, ())),
        made(Gather(0), param(0, dtype), param(1, S32, (3,))),
        made(Gather(1), param(0, F32, (3, 5)), param(1, dtype, (2, 2))),
        made(Gather(1, elementwise=True), param(0, F32), param(1, dtype)),
        made(Write(0), param(0, dtype), param(1, S64, (2,)), param(2, dtype, (2, 7))),
        made(Write(0), param(0, F32), param(1, dtype, (2,)), param(2, F32, (2, 7))),
    ]
    return [n for n in tests if n is not None]


def is_index(n, i):
    return isinstance(n.op, (Gather, Write)) and i == 1


def drawn(t, generator, index):
    """Numbers of all sizes, zero and ends among them."""
    if index:
        return (
            torch.randperm(max(t.elements, 4), generator=generator)[: t.elements]
            .remainder(3)
            .reshape(t.shape)
            .to(t.dtype.to_torch())
        )
    full = random_tensor(t, generator)
    if t.dtype is PRED:
        return full
    small = (torch.randint(0, 7, t.shape, generator=generator) - (3 if t.dtype.is_signed else 0)).double()
    small = small / 2 if t.dtype.is_float else small
    near = torch.rand(t.shape, generator=generator) < 0.6
    return torch.where(near, small, full.double()).clamp(float(t.dtype.min), 0.999 * float(t.dtype.max)).to(t.dtype.to_torch())


def within(t, a, b, generator):
    """Something between two tensors, now and then an end."""
    pick = torch.randint(0, 4, t.shape, generator=generator)
    if t.dtype is PRED:
        return torch.where(pick < 2, a, b)
    some = a.double() + torch.rand(t.shape, generator=generator).double() * (b.double() - a.double())
    if t.dtype.is_integer:
        some = torch.minimum(torch.maximum(some.round(), a.double()), b.double())
    made = some.clamp(float(t.dtype.min), 0.999 * float(t.dtype.max)).to(t.dtype.to_torch())
    for i, end in enumerate((a, b)):
        made = torch.where(pick == i, end.view(raw(end)), made.view(raw(made))).view(made.dtype)
    return made


def raw(t):
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize]


def in_order(a, b, dtype):
    if dtype.name == "u64":
        swap = (a.view(torch.int64) ^ -(1 << 63)) > (b.view(torch.int64) ^ -(1 << 63))
    else:
        swap = orderable(a) > orderable(b)
    return tuple(torch.where(swap, p.view(raw(p)), q.view(raw(q))).view(p.dtype) for p, q in ((b, a), (a, b)))


def banded(n, i, generator, loose):
    t = n.src[i].tensor
    mid = drawn(t, generator, is_index(n, i))
    if not loose:
        return Interval.exact(mid)
    other = drawn(t, generator, is_index(n, i))
    if t.dtype.is_float:  # near it or far from it
        near = (mid.double() * (1 + 1e-2 * torch.randn(t.shape, generator=generator))).clamp(t.dtype.min, t.dtype.max)
        far = torch.rand(t.shape, generator=generator) < 0.3
        other = torch.where(far, other.double(), near).clamp(t.dtype.min, 0.999 * t.dtype.max).to(t.dtype.to_torch())
    still = torch.rand(t.shape, generator=generator) < 0.3
    other = torch.where(still, mid.view(raw(mid)), other.view(raw(other))).view(mid.dtype)
    low, high = in_order(mid, other, t.dtype)
    return Interval(low, mid, high)


def bounds(n, src, usual):
    if isinstance(n.op, (Map, Select)):
        return propagate(n, src, n.src)
    return reduced(n, src, usual=usual) if isinstance(n.op, REDUCING) else spread(n, src)


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_an_operation_may_give_lies_within_its_bounds(dtype):
    generator = torch.Generator().manual_seed(0)
    for n in nodes_of(dtype):
        for loose in itertools.product((False, True), repeat=len(n.src)):
            if not any(loose):
                continue
            src = [banded(n, i, generator, moves) for i, moves in enumerate(loose)]
            interval = bounds(n, src, False)
            for _ in range(12):
                given = [within(s.tensor, b.low, b.high, generator) for s, b in zip(n.src, src, strict=True)]
                got = n.op.evaluate(n, given)
                lo, hi, g, mid = (
                    t.double() if n.dtype.name == "u64" else orderable(t).double()
                    for t in (interval.low, interval.high, got, interval.mid)
                )
                fine = ((g >= lo) & (g <= hi)) | lo.isnan() | hi.isnan() | g.isnan() | mid.isnan()
                at = tuple(int(v[0]) for v in (~fine).nonzero(as_tuple=True)) if not bool(fine.all()) else ()

                assert bool(fine.all()), (n.op, loose, at, g[at], lo[at], hi[at], [b.low for b in src], [b.high for b in src])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_operation_on_what_was_rounded_has_a_bound(dtype):
    """No type and no operation is without one: what is right passes, whatever is known."""
    generator = torch.Generator().manual_seed(1)
    for n in nodes_of(dtype):
        leaves = [param(2 * i + j, F32, s.shape) for i, s in enumerate(n.src) for j in range(2)]
        rounded = [Node(Map("multiply"), a, b) for a, b in zip(leaves[::2], leaves[1::2], strict=True)]
        inner = [
            param(2 * i, s.dtype, s.shape) if is_index(n, i) else convert(r, s.dtype)
            for i, (s, r) in enumerate(zip(n.src, rounded, strict=True))
        ]
        root = Node(n.op, *inner)
        types = [r.tensor for r in leaves]
        for i, s in enumerate(n.src):
            if is_index(n, i):
                types[2 * i] = s.tensor
        problem = FusionProblem((root,), tuple(types), (False,) * len(types))
        sources = [drawn(t, generator, is_index(n, i // 2) and i % 2 == 0) for i, t in enumerate(types)]
        expected = expect(problem, sources)
        assert check(problem, expected, [expected.reference[0].clone()]) is None, n.op
