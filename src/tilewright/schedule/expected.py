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
        low, high: the interval of each element; NaN where the error bound spans a pole, and anything is right.
        width: how far each element typically lies from the reference, with a factor for safety.
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
    def around(cls, mid: torch.Tensor, slack: torch.Tensor, storage: torch.dtype) -> _Band:
        room = torch.where(mid.isfinite(), slack, torch.zeros_like(slack))
        return cls((mid - room).to(storage), mid.to(storage), (mid + room).to(storage))

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
        gemm = isinstance(problem, Problem)
        product, bound, usual = _product(problem, params, roundoff) if gemm else _attention(problem, sources)
        worst = _bands(problem, params, _Band.around(product, bound, storage))
        typical = _bands(problem, params, _Band.around(product, usual, storage))
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    rounds = _rounding(problem)
    for w, t, inexact in zip(worst, typical, rounds, strict=True):
        if not inexact:
            found.append((t.mid, t.mid, torch.zeros(())))
            continue
        # An epilogue that turns within the wide interval may leave its ends on one side: the narrow one is within bounds too.
        low, high = torch.minimum(w.low.double(), t.low.double()), torch.maximum(w.high.double(), t.high.double())
        found.append((low, high, torch.maximum(t.high.double() - t.mid.double(), t.mid.double() - t.low.double())))
    low, high, width = zip(*found, strict=True)
    return Expected(tuple(t.mid for t in typical), low, high, width, tuple(not r for r in rounds))


def _params(problem: AnyProblem) -> list[Node]:
    node = problem.node
    regions = [r for roots in node.op.regions().values() for r in roots]
    return [n for n in toposort((*regions, *node.src)) if isinstance(n.op, Param)]


def _operands(problem: Problem, params: Mapping[Node, torch.Tensor]) -> list[torch.Tensor]:
    return cast("list[torch.Tensor]", evaluate_nodes((problem.op.lhs, problem.op.rhs), params))


_Bounds = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _product(problem: Problem, params: Mapping[Node, torch.Tensor], roundoff: float) -> _Bounds:
    """The product in float64, the bound of each element's error, and its typical size.

    The partial sums behind the typical size are taken to be as large as the result (data of one sign) or as a random walk of
    the products, estimated from the norms of row and column, whichever is more. A unit with fewer bits cuts products off below
    the largest of a group: that adds a few of its roundoffs of |a|.|b|, whatever K is.
    """
    a, b = (t.double() for t in _operands(problem, params))
    u, k = problem.acc.dtype.epsilon / 2, max(problem.K, 1)
    product = a @ b
    bound = ((k + 2) * u + SAFETY * roundoff) * (a.abs() @ b.abs()) + torch.finfo(problem.acc.dtype.to_torch()).tiny
    walk = a.square().sum(-1, keepdim=True) @ b.square().sum(-2, keepdim=True) / k
    usual = SAFETY * (math.sqrt(k) * u + roundoff) * (product.square() + walk).sqrt()
    return product, bound, torch.minimum(bound, usual)


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
    for n in toposort(stores):
        if n in values:
            continue
        src = [values[s] for s in n.src]
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
    ends = [_rounded(b, s.dtype) if s in dependent else (b.mid,) for s, b in zip(n.src, src, strict=True)]
    mid = cast("torch.Tensor", n.op.evaluate(n, [b.mid for b in src]))
    band = _Band.spanning(mid, [cast("torch.Tensor", n.op.evaluate(n, list(corner))) for corner in itertools.product(*ends)])
    if not n.dtype.is_float or isinstance(n.op, Select):
        return band
    left = torch.zeros((), dtype=torch.float64)
    if isinstance(n.op, Map) and n.op.fn in CANCELLING:
        left = STEP_ROUNDINGS * n.dtype.epsilon * _size(src[0].mid)
    low, high = (_moved(end, n.dtype, sign, left) for end, sign in ((band.low, -1), (band.high, 1)))
    return _Band(low, mid, high)


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
    right = got == reference
    if reference.is_floating_point():
        right |= got.isnan() & reference.isnan()
    if not expected.exact[i]:
        g, r = got.double(), reference.double()
        right |= ((g >= low) & (g <= high)) | ((low.isnan() | high.isnan()) & ~r.isnan())
    count = got.numel() - int(right.sum())
    if count:
        at = tuple(int(x) for x in (~right).nonzero()[0])
        return f"{count} of {got.numel()} elements differ, first at {list(at)}: {got[at].item()} for {reference[at].item()}"
    if not expected.exact[i]:
        error = (got.double() - reference.double()).abs()
        counted = width.isfinite() & error.isfinite()
        total, limit = float(error[counted].sum()), float(width[counted].sum())
        if total > limit:
            return f"its elements differ by {total:.3g} in all, where {limit:.3g} is accounted for: precision was dropped"
    return None
