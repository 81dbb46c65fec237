"""The results that a kernel's are held against: the oracle's, and bounds on how far from them a right kernel may be.

With u the unit roundoff of the accumulator, an inner product of length K summed in any order is within K u |a|.|b| of the exact
one to first order (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., eq. 3.5), and its error is typically
sqrt(K) u times the partial sums (Higham and Mary 2019, doi 10.1137/18M1226312). Both bounds are carried through the epilogue as
intervals. Every element must lie in the first; all of them together may differ from the reference by no more than the second,
with a factor for safety, adds up to. The sum is what shows a silent drop of precision: operands rounded to 10 bits (TF32) stay
within the first bound from K = 400 on, and within the second only past K = 30,000.

A step of the epilogue, or of a fusion of other operations, may round a few times (`intervals.py`), sums and norms more often
(`reductions.py`). Nothing is allowed where nothing rounds: an integer result is the exact one, a conversion or a quantisation
rounds as the graph says, to the last bit: codes may differ by one only where the value lies within its error of an edge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from tilewright.ir.anchor import acc_of, stores_of
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.expression import QUANTISED_AT_ONCE, ROUNDED_AT_ONCE, depends_on_acc, quantised_to_8_bits, rounds_to_bf16
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import LayerNorm, Map, Param, Reduce, Select, Softmax
from tilewright.ir.ops.gemm import matmul_exact
from tilewright.schedule.attended import attended
from tilewright.schedule.intervals import Interval, inflate, orderable, propagate
from tilewright.schedule.pieces import by_pieces, most_at_once, part, pieces
from tilewright.schedule.problem import AnchorProblem, AnyProblem, FusionProblem, Problem, params_of
from tilewright.schedule.reductions import REDUCING, SAFETY, reduced
from tilewright.schedule.spreads import spread


@dataclass(frozen=True)
class Expected:
    """The expected results of a gemm or attention, by store.

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


def expect(problem: AnyProblem, sources: Sequence[torch.Tensor], roundoff: float = 0.0) -> Expected:
    """The reference results and their bounds, computed where the sources are and torch makes new tensors.

    `roundoff` is that of a kernel that says it keeps fewer bits of its sums than the accumulator has (`Kernel.roundoff`).
    """
    if isinstance(problem, FusionProblem):
        worst, typical = (_worked_out(problem.roots, sources, usual=usual) for usual in (False, True))
        return _between(worst, typical, _inexact(problem))
    storage = problem.acc.dtype.to_torch()
    params = {n: sources[cast("Param", n.op).index] for n in params_of(problem)}
    if problem.acc.dtype.is_integer:
        assert isinstance(problem, Problem)
        a, b = _operands(problem, params)
        exact = matmul_exact(a, b, problem.op.lhs.dtype, problem.op.rhs.dtype, problem.acc.dtype)
        worst = typical = _bands(problem, params, Interval(exact, exact, exact))
    else:
        if isinstance(problem, Problem):
            ends = _product(problem, params, sources, roundoff)
        else:
            ends = _around(*attended(problem, sources), storage)
        worst = _bands(problem, params, Interval(ends[1], ends[0], ends[2]))
        typical = _bands(problem, params, Interval(ends[3], ends[0], ends[4]), USUAL_COARSENESS)
        del ends
    return _between(worst, typical, _rounding(problem))


def _between(worst: Sequence[Interval], typical: Sequence[Interval], rounds: Sequence[bool]) -> Expected:
    """The intervals that both bounds allow together."""
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
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
        torch.minimum(orderable(worst_low), orderable(low)),
        torch.maximum(orderable(worst_high), orderable(high)),
        width if mid.dtype == torch.float64 else width.float(),
    )


def _around(mid: torch.Tensor, bound: torch.Tensor, usual: torch.Tensor, storage: torch.dtype) -> tuple[torch.Tensor, ...]:
    """A float64 value as it is stored, and the ends of the intervals of its two bounds."""
    ends: list[torch.Tensor] = [mid.to(storage)]
    for slack in (bound, usual):
        room = torch.where(mid.isfinite(), slack, torch.zeros_like(slack))
        ends += [(mid - room).to(storage), (mid + room).to(storage)]
    return tuple(ends)


def _operands(problem: Problem, params: Mapping[Node, torch.Tensor]) -> list[torch.Tensor]:
    return cast("list[torch.Tensor]", evaluate_nodes((problem.op.lhs, problem.op.rhs), params))


def _product(
    problem: Problem, params: Mapping[Node, torch.Tensor], sources: Sequence[torch.Tensor], roundoff: float
) -> tuple[torch.Tensor, ...]:
    """The product computed in float64, and the ends of the intervals of its errors' bound and of their typical size.

    The partial sums behind the typical size are taken to be as large as the result (data of one sign) or as a random walk of
    the products, estimated from the norms of row and column, whichever is more. A unit with fewer bits cuts products off below
    the largest of a group: that adds a few of its roundoffs of |a|.|b|, whatever K is. An operand that is computed on the way,
    with an error e, adds e.|b|.
    """
    roots = (problem.op.lhs, problem.op.rhs)
    computed = _inexact_nodes(toposort(roots))
    if computed:
        (a, off_a), (b, off_b) = map(_with_error, _worked_out(roots, sources, usual=False))
    else:
        a, b = (t.double() for t in _operands(problem, params))
        off_a, off_b = torch.zeros_like(a[..., :1]), torch.zeros_like(b[..., :1, :])
    storage = problem.acc.dtype.to_torch()
    u, k, tiny = problem.acc.dtype.epsilon / 2, max(problem.K, 1), torch.finfo(storage).tiny
    columns, square = b.abs(), b.square().sum(-2, keepdim=True)

    def rows(a: torch.Tensor, off_a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = a @ b
        bound = ((k + 2) * u + SAFETY * roundoff) * (a.abs() @ columns) + tiny
        walk = a.square().sum(-1, keepdim=True) @ square / k
        usual = SAFETY * (math.sqrt(k) * u + roundoff) * (product.square() + walk).sqrt()
        if computed:
            off = off_a @ (columns + off_b) + a.abs() @ off_b
            bound, usual = bound + off, usual + off
        return _around(product, bound, torch.minimum(bound, usual), storage)

    shape = problem.acc.shape
    at_once = max(1, most_at_once(a) * shape[-2] // max(math.prod(shape), 1))
    if at_once >= shape[-2]:
        return rows(a, off_a)
    found = [torch.empty(shape, dtype=storage) for _ in range(5)]
    for start in range(0, shape[-2], at_once):
        some = slice(start, start + at_once)
        for whole, r in zip(found, rows(a[..., some, :], off_a[..., some, :]), strict=True):
            whole[..., some, :] = r
    return tuple(found)


def _with_error(band: Interval) -> tuple[torch.Tensor, torch.Tensor]:
    """A value in float64, and how far from it a right one may be; nothing where it is no number or infinite."""
    low, mid, high = (t.double() for t in (band.low, band.mid, band.high))
    return mid, torch.where(mid.isfinite(), torch.maximum(high - mid, mid - low), torch.zeros_like(mid))


USUAL_COARSENESS = 1 / 4  # of the tolerance for what is rounded at once: nearly all arguments are small, where it is nearer
# What gives one of its operands, or a whole number, and rounds nothing on the way.
PICKING = {"abs", "clamp", "maximum", "minimum", "negate", "relu"}
UNROUNDED = PICKING | {"ceil", "floor", "round_half_away", "round_half_even", "sign", "trunc"}


def _inexact_nodes(nodes: Sequence[Node]) -> set[Node]:
    """The nodes whose values round on the way in more than one right way; `nodes` come sources first."""
    found: set[Node] = set()
    for n in nodes:
        op = n.op
        sums = isinstance(op, (Softmax, LayerNorm)) or (isinstance(op, Reduce) and op.fn in ("add", "mean", "multiply"))
        steps = isinstance(op, Map) and op.fn not in UNROUNDED
        if ((sums or steps) and n.dtype.is_float) or any(s in found for s in n.src):
            found.add(n)
    return found


def _inexact(problem: FusionProblem) -> list[bool]:
    found = _inexact_nodes(problem.nodes)
    return [r in found for r in problem.roots]


def _worked_out(roots: Sequence[Node], sources: Sequence[torch.Tensor], *, usual: bool) -> list[Interval]:
    """Expressions over sources, with one of the two bounds."""
    nodes = toposort(roots)
    inexact = _inexact_nodes(nodes)
    values: dict[Node, Interval] = {}
    last = {s: n for n in nodes for s in n.src}
    for n in nodes:
        src = [values[s] for s in n.src]
        for s in n.src:
            if last[s] is n and s not in roots:
                values.pop(s, None)
        if isinstance(n.op, Param):
            values[n] = Interval.exact(sources[n.op.index])
        elif n not in inexact:
            values[n] = Interval.exact(cast("torch.Tensor", n.op.evaluate(n, [b.mid for b in src])))
        elif isinstance(n.op, (Map, Select)):
            values[n] = propagate(n, src, inexact)
        elif isinstance(n.op, REDUCING):
            values[n] = reduced(n, src, usual=usual)
        else:
            values[n] = spread(n, _loosened(n, src, USUAL_COARSENESS if usual else 1.0))
    return [values[r] for r in roots]


def _loosened(n: Node, src: Sequence[Interval], share: float) -> list[Interval]:
    """The operands of a node, the first with tolerance for a function whose value is rounded at once, or a share of that."""
    room = ROUNDED_AT_ONCE if rounds_to_bf16(n) else QUANTISED_AT_ONCE if quantised_to_8_bits(n) is not None else 0.0
    return [inflate(src[0], share * room), *src[1:]] if room else list(src)


def _bands(problem: AnchorProblem, params: Mapping[Node, torch.Tensor], acc: Interval, share: float = 1.0) -> list[Interval]:
    """The stores for an accumulator known up to its error; `share` of the tolerance for what is rounded at once."""
    stores = stores_of(problem.node)
    dependent = _moving(stores)
    values: dict[Node, Interval] = {acc_of(problem.node): acc}
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
            values[n] = Interval(t, t, t)
        elif isinstance(n.op, (Map, Select)) and any(s.dtype.is_float for s in n.src):
            values[n] = propagate(n, src, dependent)
        elif all(b.low is b.mid is b.high for b in src):
            t = cast("torch.Tensor", n.op.evaluate(n, [b.mid for b in src]))
            values[n] = Interval(t, t, t)
        elif isinstance(n.op, (Map, Select)):
            values[n] = propagate(n, src, dependent)
        else:
            values[n] = spread(n, _loosened(n, src, share))
    return [values[r] for r in stores]


def _moving(stores: Sequence[Node]) -> set[Node]:
    """The nodes that depend on the accumulator, or on a function of side inputs that rounds in more than one right way."""
    return depends_on_acc(stores, _inexact_nodes(toposort(stores)))


def _rounding(problem: AnchorProblem) -> list[bool]:
    """Say for each store whether something rounds on the way in more than one right way: a float sum, or a float step."""
    stores = stores_of(problem.node)
    dependent = _moving(stores)
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
        why = _compare(got.to(expected.reference[i].device), expected, i)
        if why is not None:
            return f"{name} is wrong: {why}"
    return None


def _compare(got: torch.Tensor, expected: Expected, i: int) -> str | None:
    reference, low, high, width = expected.reference[i], expected.low[i], expected.high[i], expected.width[i]
    exact = expected.exact[i]
    wrong, total, limit = 0, 0.0, 0.0
    first: tuple[int, ...] = ()
    for index in pieces(reference.shape, most_at_once(reference)):
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
