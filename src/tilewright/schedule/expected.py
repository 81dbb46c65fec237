"""What a kernel's results are held against: the oracle's, and how far from them a right kernel may be.

With u the unit roundoff of the accumulator, an inner product of length K summed in any order is within K u |a|.|b| of the exact
one to first order (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., eq. 3.5), and its error is typically
sqrt(K) u times the partial sums (Higham and Mary 2019, doi 10.1137/18M1226312). Both bounds are carried through the epilogue as
intervals. Every element must lie in the first; all of them together may differ from the reference by no more than the second,
with a factor for safety, adds up to. The sum is what shows a silent drop of precision: operands rounded to 10 bits (TF32) stay
within the first bound from K = 400 on, and within the second only past K = 30,000.

A step of the epilogue may round its operands and its result a few times, since a kernel may order an expression its own way
(contract a multiply and an add, raise 2 instead of e to a power). Nothing is allowed where nothing rounds: an integer result is
the exact one, a conversion or a quantisation rounds as the graph says, to the last bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import cast

import torch

from tilewright.dtype import F32, DType
from tilewright.ir.carrier import acc_of, operands_of, stores_of
from tilewright.ir.evaluate import accumulate_in_float64, evaluate_nodes
from tilewright.ir.expression import depends_on_acc
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Acc, Map, Param, Select
from tilewright.ir.ops.gemm import matmul_exact
from tilewright.schedule.pieces import PIECE, by_pieces, part, pieces
from tilewright.schedule.problem import AnyProblem, AttentionProblem, Problem

SAFETY = 16.0
STEP_ROUNDINGS = 4
ATTENTION_ROUNDINGS = 64
# 1 + erf(x), 1 + tanh(x) and the like: a rounding of the operand's size is left where the result is small.
CANCELLING = frozenset({"erf", "erfc", "exponential_minus_one", "gelu", "gelu_tanh", "log_plus_one", "logistic", "silu"})


@dataclass(frozen=True)
class Expected:
    """What a gemm or attention must give, by store.

    Attributes:
        reference: the oracle's results on the product in float64 (exact for integers).
        low, high: the interval of each element, in a type that can be compared; NaN where the error bound spans a pole, and
            anything is right.
        width: how far each element typically lies from the reference, with a factor for safety; f32, f64 for an f64 store.
        exact: nothing rounds before the store leaves: the reference alone is right, and both ends of the interval.
    """

    reference: tuple[torch.Tensor, ...]
    low: tuple[torch.Tensor, ...]
    high: tuple[torch.Tensor, ...]
    width: tuple[torch.Tensor, ...]
    exact: tuple[bool, ...]


@dataclass(frozen=True)
class _Band:
    """A value, and the interval its error bound leaves it."""

    low: torch.Tensor
    mid: torch.Tensor
    high: torch.Tensor

    @classmethod
    def spanning(cls, mid: torch.Tensor, others: Sequence[torch.Tensor]) -> _Band:
        """The least and the largest of some values. NaN beside a number says that nothing is known there."""
        low, high = (reduce(f, map(_orderable, others), _orderable(mid)) for f in (torch.minimum, torch.maximum))
        return cls(low.to(mid.dtype), mid, high.to(mid.dtype))


def expect(problem: AnyProblem, sources: Sequence[torch.Tensor], roundoff: float = 0.0) -> Expected:
    """The reference results and their bounds, for sources on the CPU.

    `roundoff` is that of a kernel that says it keeps fewer bits of its sums than the accumulator has (`Kernel.roundoff`).
    """
    storage = problem.acc.dtype.to_torch()
    params = {n: sources[cast("Param", n.op).index] for n in _params(problem)}
    if problem.acc.dtype.is_integer:
        assert isinstance(problem, Problem)
        a, b = _operands(problem, params)
        exact = matmul_exact(a, b, problem.op.lhs.dtype, problem.op.rhs.dtype, problem.acc.dtype)
        worst = typical = _bands(problem, params, _Band(exact, exact, exact))
    else:
        if isinstance(problem, Problem):
            ends = _product(problem, params, roundoff)
        else:
            ends = _around(*_attention(problem, sources), storage)
        worst = _bands(problem, params, _Band(ends[1], ends[0], ends[2]))
        typical = _bands(problem, params, _Band(ends[3], ends[0], ends[4]))
        del ends
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    rounds = _rounding(problem)
    for w, t, inexact in zip(worst, typical, rounds, strict=True):
        if not inexact:
            found.append((t.mid, t.mid, torch.zeros(())))
            continue
        # An epilogue that turns within the wide interval may leave its ends on one side: the narrow one is within bounds too.
        low, high, width = by_pieces(t.mid.shape, _both, w.low, w.high, t.low, t.mid, t.high)
        found.append((low, high, width))
    low, high, width = zip(*found, strict=True)
    return Expected(tuple(t.mid for t in typical), low, high, width, tuple(not r for r in rounds))


def _both(
    worst_low: torch.Tensor, worst_high: torch.Tensor, low: torch.Tensor, mid: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The interval of both bounds together, and the width of the second."""
    width = torch.maximum(high.double() - mid.double(), mid.double() - low.double())
    return (
        torch.minimum(_orderable(worst_low), _orderable(low)),
        torch.maximum(_orderable(worst_high), _orderable(high)),
        width if mid.dtype == torch.float64 else width.float(),
    )


def _around(mid: torch.Tensor, bound: torch.Tensor, usual: torch.Tensor, storage: torch.dtype) -> tuple[torch.Tensor, ...]:
    """A float64 value as it is stored, and the ends of the intervals of its two bounds."""
    ends: list[torch.Tensor] = [mid.to(storage)]
    for slack in (bound, usual):
        room = torch.where(mid.isfinite(), slack, torch.zeros_like(slack))
        ends += [(mid - room).to(storage), (mid + room).to(storage)]
    return tuple(ends)


def _params(problem: AnyProblem) -> list[Node]:
    node = problem.node
    regions = [r for roots in node.op.regions().values() for r in roots]
    return [n for n in toposort((*regions, *node.src)) if isinstance(n.op, Param)]


def _operands(problem: Problem, params: Mapping[Node, torch.Tensor]) -> list[torch.Tensor]:
    return cast("list[torch.Tensor]", evaluate_nodes((problem.op.lhs, problem.op.rhs), params))


_Bounds = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _product(problem: Problem, params: Mapping[Node, torch.Tensor], roundoff: float) -> tuple[torch.Tensor, ...]:
    """The product worked out in float64, and the ends of the intervals of its errors' bound and of their typical size.

    The partial sums behind the typical size are taken to be as large as the result (data of one sign) or as a random walk of
    the products, estimated from the norms of row and column, whichever is more. A unit with fewer bits cuts products off below
    the largest of a group: that adds a few of its roundoffs of |a|.|b|, whatever K is.
    """
    a, b = (t.double() for t in _operands(problem, params))
    storage = problem.acc.dtype.to_torch()
    u, k, tiny = problem.acc.dtype.epsilon / 2, max(problem.K, 1), torch.finfo(storage).tiny
    columns, square = b.abs(), b.square().sum(-2, keepdim=True)

    def rows(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = a @ b
        bound = ((k + 2) * u + SAFETY * roundoff) * (a.abs() @ columns) + tiny
        walk = a.square().sum(-1, keepdim=True) @ square / k
        usual = SAFETY * (math.sqrt(k) * u + roundoff) * (product.square() + walk).sqrt()
        return _around(product, bound, torch.minimum(bound, usual), storage)

    shape = problem.acc.shape
    at_once = max(1, PIECE * shape[-2] // max(math.prod(shape), 1))
    if at_once >= shape[-2]:
        return rows(a)
    found = [torch.empty(shape, dtype=storage) for _ in range(5)]
    for start in range(0, shape[-2], at_once):
        some = slice(start, start + at_once)
        for whole, r in zip(found, rows(a[..., some, :]), strict=True):
            whole[..., some, :] = r
    return tuple(found)


def _attention(problem: AttentionProblem, sources: Sequence[torch.Tensor]) -> _Bounds:
    """The same for an attention. Its weights are a convex combination, so errors scale with weights @ |v|: T roundings of the
    sum, and those of the scores and of the weights, which a kernel may round to the operands' type."""
    op = problem.op
    operands = op.operands or problem.node.src
    plain = replace(op, stores=())
    sized = replace(op, operands=(*operands[:2], Node(Map("abs"), operands[2]), *operands[3:]), stores=())
    bound = dict(zip(problem.node.src, sources, strict=True))
    with accumulate_in_float64():
        acc, size = cast("list[torch.Tensor]", evaluate_nodes([Node(o, *problem.node.src) for o in (plain, sized)], bound))
    acc, size = acc.double(), size.double()
    u, narrow = F32.epsilon / 2, max(t.dtype.epsilon for t in problem.operands[:3])
    tokens = max(problem.operands[1].shape[2], 1)
    usual = (SAFETY * math.sqrt(tokens) * u + ATTENTION_ROUNDINGS / 4 * narrow) * (acc.square() + size.square() / tokens).sqrt()
    flips = _flips(problem, bound)
    return acc, (tokens * u + ATTENTION_ROUNDINGS * narrow) * size + flips, usual + flips


def _flips(problem: AttentionProblem, bound: Mapping[Node, torch.Tensor]) -> torch.Tensor:
    """How far results move when a score or a weight that lies within its rounding error of the edge between two codes takes the
    other one: nothing where an attention does not round on the way. A score that jumps moves a row's weights by twice the jump
    times the largest weight at most; each change of a weight moves the result by that times the value."""
    op = problem.op
    if op.scores is None and op.weights is None:
        return torch.zeros((), dtype=torch.float64)
    operands = cast("list[torch.Tensor]", evaluate_nodes(operands_of(problem.node), _as_params(problem, bound)))
    q, k, v = (t.double() for t in operands[:3])
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    u, depth = F32.epsilon / 2, q.shape[3]
    scores = q @ k.transpose(-1, -2) * op.scale
    error = (depth + 2) * u * abs(op.scale) * (q.abs() @ k.abs().transpose(-1, -2))
    scores, jump, jumped = _jumps(problem, op.scores, bound, scores, error)
    weights = torch.softmax(op.masked(scores, operands[3] if len(operands) == 4 else None), -1).nan_to_num(0.0)
    peak = weights.amax(-1, keepdim=True)
    moved = jump * peak * (jumped > 0)
    loose = weights * (ATTENTION_ROUNDINGS * F32.epsilon + 2 * error.amax(-1, keepdim=True) + moved)
    _, step, stepped = _jumps(problem, op.weights, bound, weights, loose)
    largest = v.nan_to_num(0.0, 0.0, 0.0).abs().amax(-2, keepdim=True)
    return (2 * jump * peak * jumped + step * stepped) * largest


def _jumps(
    problem: AttentionProblem, root: Node | None, bound: Mapping[Node, torch.Tensor], values: torch.Tensor, error: torch.Tensor
) -> tuple[torch.Tensor, float, torch.Tensor]:
    """What an inner expression makes of values known up to an error, how far it jumps there at most, and how often in a row."""
    if root is None:
        return values, 0.0, torch.zeros(*values.shape[:-1], 1, dtype=torch.float64)
    acc = Node(Acc(root.tensor))
    params = _as_params(problem, bound)
    middle, *ends = (
        cast("torch.Tensor", evaluate_nodes((root,), {**params, acc: x})[0]).double()
        for x in (values, values - error, values + error)
    )
    jump = torch.stack([(e - middle).abs() for e in ends]).amax(0)
    return middle, float(jump.max()) if jump.numel() else 0.0, (jump > 0).double().sum(-1, keepdim=True)


def _as_params(problem: AttentionProblem, bound: Mapping[Node, torch.Tensor]) -> dict[Node, torch.Tensor]:
    """The sources as the leaves of the problem's own expressions."""
    return {n: bound[problem.node.src[cast("Param", n.op).index]] for n in _params(problem)}


def _bands(problem: AnyProblem, params: Mapping[Node, torch.Tensor], acc: _Band) -> list[_Band]:
    """The stores for an accumulator known up to its error."""
    stores = stores_of(problem.node)
    dependent = depends_on_acc(stores)
    values: dict[Node, _Band] = {acc_of(problem.node): acc}
    del acc
    order = toposort(stores)
    last = {s: n for n in order for s in n.src}
    for n in order:
        if n in values:
            continue
        src = [values[s] for s in n.src]
        for s in n.src:
            if last[s] is n and s not in stores:
                values.pop(s, None)  # its memory, for what follows
        if n not in dependent:
            t = params[n] if n in params else cast("torch.Tensor", n.op.evaluate(n, [b.mid for b in src]))
            values[n] = _Band(t, t, t)
        elif isinstance(n.op, (Map, Select)) and any(s.dtype.is_float for s in n.src):
            values[n] = _stepped(n, src, dependent)
        elif all(b.low is b.mid is b.high for b in src):
            t = cast("torch.Tensor", n.op.evaluate(n, [b.mid for b in src]))
            values[n] = _Band(t, t, t)
        elif isinstance(n.op, (Map, Select)):
            values[n] = _stepped(n, src, dependent)
        else:
            low, mid, high = (
                cast("torch.Tensor", n.op.evaluate(n, parts))
                for parts in ([b.low for b in src], [b.mid for b in src], [b.high for b in src])
            )
            values[n] = _Band.spanning(mid, (low, high))
    return [values[r] for r in stores]


def _stepped(n: Node, src: Sequence[_Band], dependent: set[Node]) -> _Band:
    """An elementwise step over intervals: its least and largest value over their ends, and room for its roundings."""
    rounded = isinstance(n.op, Map) and n.dtype.is_float
    cancels = isinstance(n.op, Map) and n.op.fn in CANCELLING

    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        here = [_Band(*tensors[i : i + 3]) for i in range(0, len(tensors), 3)]
        ends = [_rounded(b, s.dtype) if s in dependent else (b.mid,) for s, b in zip(n.src, here, strict=True)]
        mid = cast("torch.Tensor", n.op.evaluate(n, [b.mid for b in here]))
        band = _Band.spanning(
            mid, [cast("torch.Tensor", n.op.evaluate(n, list(corner))) for corner in itertools.product(*ends)]
        )
        if not rounded:
            return band.low, mid, band.high
        left = torch.zeros((), dtype=torch.float64)
        if cancels:
            left = STEP_ROUNDINGS * n.dtype.epsilon * _size(here[0].mid)
        return _moved(band.low, n.dtype, -1, left), mid, _moved(band.high, n.dtype, 1, left)

    return _Band(*by_pieces(n.shape, step, *(t for b in src for t in (b.low, b.mid, b.high))))


def _rounded(band: _Band, dtype: DType) -> tuple[torch.Tensor, torch.Tensor]:
    """Both ends of an interval, a few roundings further out."""
    if not dtype.is_float:
        return band.low, band.high
    nothing = torch.zeros((), dtype=torch.float64)
    return _moved(band.low, dtype, -1, nothing), _moved(band.high, dtype, 1, nothing)


def _moved(end: torch.Tensor, dtype: DType, sign: int, further: torch.Tensor) -> torch.Tensor:
    return (end.double() + sign * (STEP_ROUNDINGS * dtype.epsilon * _size(end) + further)).to(end.dtype)


def _size(t: torch.Tensor) -> torch.Tensor:
    return t.double().abs().nan_to_num(0.0, 0.0, 0.0)


def _orderable(t: torch.Tensor) -> torch.Tensor:
    """In a type that torch can compare."""
    if t.dtype.is_floating_point:
        return t.float() if t.dtype.itemsize == 1 else t
    return t.to(torch.int64) if t.dtype in (torch.uint16, torch.uint32, torch.uint64) else t


def _rounding(problem: AnyProblem) -> list[bool]:
    """For each store whether something rounds on the way in more than one right way: a float sum, or a float step."""
    stores = stores_of(problem.node)
    dependent = depends_on_acc(stores)
    found: set[Node] = set()
    for n in toposort(stores):
        starts = n is acc_of(problem.node) and n.dtype.is_float
        steps = n in dependent and isinstance(n.op, Map) and any(s.dtype.is_float for s in n.src)
        if starts or steps or any(s in found for s in n.src):
            found.add(n)
    return [r in found for r in stores]


def check(problem: AnyProblem, expected: Expected, results: Sequence[torch.Tensor]) -> str | None:
    """None if the results are right, else a sentence: which store, which element, how far off."""
    if len(results) != len(problem.outputs):
        return f"gave {len(results)} results, {len(problem.outputs)} wanted"
    for i, (got, wanted) in enumerate(zip(results, problem.outputs, strict=True)):
        name = f"store {i}" if len(results) > 1 else "the result"
        if tuple(got.shape) != wanted.shape or got.dtype != wanted.dtype.to_torch():
            return f"{name} is {got.dtype}{list(got.shape)}, {wanted} wanted"
        why = _compare(got.cpu(), expected, i)
        if why is not None:
            return f"{name} is wrong: {why}"
    return None


def _compare(got: torch.Tensor, expected: Expected, i: int) -> str | None:
    reference, low, high, width = expected.reference[i], expected.low[i], expected.high[i], expected.width[i]
    exact = expected.exact[i]
    wrong, total, limit = 0, 0.0, 0.0
    first: tuple[int, ...] = ()
    for index in pieces(reference.shape):
        g, r, lo, hi, w = (part(t, index) for t in (got, reference, low, high, width))
        right = g == r
        if r.is_floating_point():
            right |= g.isnan() & r.isnan()
        if not exact:
            g, r, lo, hi = g.double(), r.double(), lo.double(), hi.double()
            right |= ((g >= lo) & (g <= hi)) | ((lo.isnan() | hi.isnan()) & ~r.isnan())
            error = (g - r).abs()
            counted = w.isfinite() & error.isfinite()
            total, limit = total + float(error[counted].sum()), limit + float(w[counted].double().sum())
        count = right.numel() - int(right.sum())
        if count and not wrong:
            first = tuple(int(x) + (s.start or 0) for x, s in zip((~right).nonzero()[0], index, strict=True))
        wrong += count
    if wrong:
        said = f"{got[first].item()} for {reference[first].item()}"
        return f"{wrong} of {got.numel()} elements differ, first at {list(first)}: {said}"
    if total > limit:
        return f"its elements differ by {total:.3g} in all, where {limit:.3g} is accounted for: precision was dropped"
    return None
