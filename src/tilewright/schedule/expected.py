"""The results that a kernel's are compared with: the oracle's, and bounds on a right kernel's distance from them.

With u the unit roundoff of the accumulator, an inner product of length K summed in any order is within K u |a|.|b| of the
exact one to first order (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., eq. 3.5), and its error is typically
sqrt(K) u times the partial sums (Higham and Mary 2019, doi 10.1137/18M1226312). Both bounds are carried through the epilogue
as intervals. Every element must lie in the first; all of them together may differ from the reference by no more than the
second, with a factor for safety, adds up to. The sum is what shows a silent drop of precision: operands rounded to 10 bits
(TF32) stay within the first bound from K = 400 on, and within the second only past K = 30,000.

A step of the epilogue, or of a fusion of other operations, may round a few times, sums and norms more often (`intervals.py`).
Nothing is allowed where nothing rounds. An integer result is the exact one. A conversion or a quantisation rounds as the graph
says, to the last bit; codes may differ by one only where the value lies within its error of an edge.

The weights of an attention are a convex combination, so errors of at most d in the scores make of a weight w something between
w e^(-2d) and w e^(2d). So results move by the precision that large scores lose in f32, however exact all that follows is.
Scores that are not scaled, of heads of 256 or 512, reach hundreds, and three digits of the result are gone with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from tilewright.dtype import F16, F32, DType
from tilewright.ir.anchor import acc_of, operands_of, stores_of
from tilewright.ir.evaluate import accumulate_in_float64, evaluate_nodes
from tilewright.ir.expression import QUANTISED_AT_ONCE, ROUNDED_AT_ONCE, depends_on_acc, quantised_to_8_bits, rounds_to_16_bits
from tilewright.ir.graph import Node, toposort
from tilewright.ir.mesh import Mesh, simulate
from tilewright.ir.ops import Acc, AllReduce, LayerNorm, Map, Param, Reduce, ReduceScatter, Select, Softmax
from tilewright.ir.ops.gemm import matmul_exact
from tilewright.ir.ops.rounding import to_float
from tilewright.schedule.intervals import (
    REDUCING,
    SAFETY,
    Interval,
    by_pieces,
    inflate,
    met,
    most_at_once,
    orderable,
    part,
    pieces,
    propagate,
    reduced,
    spread,
    unit_roundoff,
)
from tilewright.schedule.intervals import size as size_of
from tilewright.schedule.problem import (
    AnchorProblem,
    AnyProblem,
    AttentionProblem,
    FusionProblem,
    Problem,
    params_of,
    read_operand,
)

OPS_AN_ELEMENT = 2700  # of a product in doubles, in the time that all else takes for an element: 60 ns of a Zen 5 core
ROUNDINGS = 64  # of an attention's weight and of what is multiplied with it, in the narrowest type on the way
PLAIN_ROUNDINGS = 16  # the same where queries, keys and values are multiplied as they lie in memory: weights alone round
SCORE_ROUNDINGS = 4  # of a score that is there: scaled, masked, the largest taken off, put to the base of the exponential
HOPELESS = 40.0  # an error of a score past which nothing is known of its weight
USUAL_COARSENESS = 1 / 4  # of the tolerance for what is rounded at once: nearly all arguments are small, where it is nearer
# What gives one of its operands, or a whole number, and rounds nothing on the way.
PICKING = {"abs", "clamp", "maximum", "minimum", "negate", "relu"}
UNROUNDED = PICKING | {"ceil", "floor", "round_half_away", "round_half_even", "sign", "trunc"}


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
        found = inexact_nodes(problem.nodes)
        return _between(worst, typical, [r in found for r in problem.roots])
    acc, stores = acc_of(problem.node), stores_of(problem.node)
    given = {n: Interval.exact(sources[cast("Param", n.op).index]) for n in params_of(problem)}
    dependent = depends_on_acc(stores, inexact_nodes(toposort(stores)))
    bounds = accumulated(problem, sources, roundoff)
    usual = False, acc.dtype.is_float
    worst, typical = (carried(stores, {**given, acc: b}, dependent, usual=u) for b, u in zip(bounds, usual, strict=True))
    del bounds
    return _between(worst, typical, _rounding(acc, stores, dependent))


def expected_s(problem: AnchorProblem) -> float:
    """Seconds that `expect` and `check` take on a CPU that multiplies doubles as fast as now: two products' arithmetic, and as
    much work for each element of the results as so many operations take."""
    a, b = torch.ones(128, 512, dtype=torch.float64), torch.ones(512, 512, dtype=torch.float64)
    taken = math.inf
    for _ in range(3):
        began = time.perf_counter()
        torch.mm(a, b)
        taken = min(taken, time.perf_counter() - began)
    operations = 2 * problem.ops + sum(t.elements for t in problem.outputs) * OPS_AN_ELEMENT
    return taken * operations / (2 * a.numel() * b.shape[1])


def accumulated(problem: AnchorProblem, sources: Sequence[torch.Tensor], roundoff: float = 0.0) -> tuple[Interval, Interval]:
    """The accumulator of a gemm or attention, computed in float64, with the bound of its errors and with their typical size."""
    dtype = acc_of(problem.node).dtype
    params = {n: sources[cast("Param", n.op).index] for n in params_of(problem)}
    if dtype.is_integer:
        assert isinstance(problem, Problem)
        a, b = _operands(problem, params)
        exact = Interval.exact(matmul_exact(a, b, problem.op.lhs.dtype, problem.op.rhs.dtype, dtype))
        return exact, exact
    if isinstance(problem, Problem):
        mid, *ends = _product(problem, params, sources, roundoff)
    else:
        mid, *ends = _ends(*_attended(problem, params, sources), dtype)
    return Interval(ends[0], mid, ends[1]), Interval(ends[2], mid, ends[3])


def expect_on_mesh(
    problem: AnyProblem,
    draw: Callable[[int], Sequence[torch.Tensor]],
    mesh: Mesh,
    rank: int,
    device: str = "cpu",
    roundoff: float = 0.0,
) -> tuple[list[torch.Tensor], Expected]:
    """The sources of a rank of a mesh and what a problem that holds operations between ranks must give there, both on a device.
    `draw` gives a rank's sources, where torch makes new tensors: on the device. Every rank's are drawn and worked out here, so
    that nothing is taken from another process.
    `roundoff` is that of each rank's sums, as `expect` takes it.

    Raises:
        TilewrightError: the oracle fails on a rank's data.
    """

    def of_rank(r: int) -> tuple[list[torch.Tensor], Expected]:
        with torch.device(device):
            sources = [t.to(device) for t in draw(r)]
            return sources, expect(problem, sources, roundoff)

    return simulate(mesh, of_rank)[rank]


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


def _ends(mid: torch.Tensor, bound: torch.Tensor, usual: torch.Tensor, dtype: DType) -> tuple[torch.Tensor, ...]:
    """A float64 value as it is stored, and the ends of the intervals of its two bounds; past the largest number of a type
    without infinities, that."""
    ends = [to_float(mid, dtype)]
    for slack in (bound, usual):
        off = torch.where(mid.isfinite(), slack, torch.zeros_like(slack))
        ends += [to_float(end, dtype, saturate=not dtype.infinite) for end in (mid - off, mid + off)]
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
    computed = inexact_nodes(toposort(roots))
    if computed:
        (a, off_a), (b, off_b) = map(_with_error, _worked_out(roots, sources, usual=False))
    else:
        a, b = _operands(problem, params)
        off_a = off_b = torch.zeros(1, 1, dtype=torch.float64)
    storage = problem.acc.dtype.to_torch()
    u, k, tiny = problem.acc.dtype.epsilon / 2, max(problem.K, 1), torch.finfo(storage).tiny

    def product(left: _Factor, right: _Factor) -> tuple[torch.Tensor, ...]:
        found = left.value @ right.value
        bound = ((k + 2) * u + SAFETY * roundoff) * (left.size @ right.size) + tiny
        walk = left.squares @ right.squares / k
        usual = SAFETY * (math.sqrt(k) * u + roundoff) * (found.square() + walk).sqrt()
        if computed:
            off = left.off @ (right.size + right.off) + left.size @ right.off
            bound, usual = bound + off, usual + off
        return _ends(found, bound, torch.minimum(bound, usual), problem.acc.dtype)

    shape = problem.acc.shape
    axis = -1 if shape[-1] > shape[-2] else -2  # the longer one is cut, so that the other operand is small beside a piece
    at_once = max(1, most_at_once(a) * shape[axis] // max(math.prod(shape), k * shape[axis]))
    if at_once >= shape[axis]:
        return product(_Factor.of(a, off_a, -1), _Factor.of(b, off_b, -2))
    rows, columns = (None, _Factor.of(b, off_b, -2)) if axis == -2 else (_Factor.of(a, off_a, -1), None)
    found = [torch.empty(shape, dtype=storage) for _ in range(5)]
    for start in range(0, shape[axis], at_once):
        length = min(at_once, shape[axis] - start)
        left = rows or _Factor.of(a.narrow(-2, start, length), _cut(off_a, -2, start, length), -1)
        right = columns or _Factor.of(b.narrow(-1, start, length), _cut(off_b, -1, start, length), -2)
        for whole, piece in zip(found, product(left, right), strict=True):
            whole.narrow(axis, start, length).copy_(piece)
    return tuple(found)


def _cut(t: torch.Tensor, axis: int, start: int, length: int) -> torch.Tensor:
    """A part of an axis; all of one that is broadcast."""
    return t if t.shape[axis] == 1 else t.narrow(axis, start, length)


@dataclass(frozen=True)
class _Factor:
    """An operand of a product in float64.

    Attributes:
        value: what is multiplied.
        size: its magnitudes.
        squares: sums of its squares along K.
        off: how far it may be from what is right, broadcast where that is nothing.
    """

    value: torch.Tensor
    size: torch.Tensor
    squares: torch.Tensor
    off: torch.Tensor

    @staticmethod
    def of(value: torch.Tensor, off: torch.Tensor, axis: int) -> _Factor:
        """An operand that is summed along an axis."""
        value = value.double()
        return _Factor(value, value.abs(), torch.linalg.vector_norm(value, dim=axis, keepdim=True).square(), off)


def _attended(
    problem: AttentionProblem, params: Mapping[Node, torch.Tensor], sources: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The accumulator, not rounded yet, computed in float64, its errors' bound and their typical size.

    Errors scale with weights @ |v|: T roundings of the sum, those of the weights (`_weights_rounding`), and what those of the
    scores do.
    """
    op = problem.op
    operands = op.operands or problem.node.src
    sized = replace(op, operands=(*operands[:2], Node(Map("abs"), operands[2]), *operands[3:]), stores=())
    with accumulate_in_float64():
        acc, size = (o.product(problem.node, sources) for o in (op, sized))
    u, tokens = unit_roundoff(problem.acc.dtype), max(problem.operands[1].shape[2], 1)
    rounded = _weights_rounding(problem)
    worst = (tokens * u + rounded) * size
    usual = (SAFETY * math.sqrt(tokens) * u + rounded / 4) * (acc.square() + size.square() / tokens).sqrt()
    values = cast("list[torch.Tensor]", evaluate_nodes(operands_of(problem.node), params))
    if op.scores is None:
        moved, usually = _moved(problem, values, acc)
    else:
        moved = usually = torch.zeros((), dtype=torch.float64)
    beside = _flips(problem, params, values) + _vanished(problem, values[2])
    return acc, worst + moved + beside, usual + usually + beside


def _weights_rounding(problem: AttentionProblem) -> float:
    """The part of weights @ |v| that may be off since kernels round weights to the operands' type. Weights of 8-bit operands
    keep the digits of f16, which holds these: with the 2 or 3 bits of their own any result would do."""
    operands = operands_of(problem.node)[:3]
    narrow = max(t.dtype.epsilon if t.dtype.bits > 8 else F16.epsilon for t in operands)
    return narrow * (PLAIN_ROUNDINGS if all(read_operand(o).plain for o in operands) else ROUNDINGS)


def _vanished(problem: AttentionProblem, values: torch.Tensor) -> torch.Tensor:
    """Bounds on what is lost where weights or products are too small for the accumulator's type, or for the values', to which a
    kernel may round weights: processors and GPUs take subnormals of f32 and bf16 for 0. All of a result may be lost where the
    value of the largest weight is 0."""
    # Nothing is added up in 8 bits, and no weight is rounded to them.
    sums = torch.float32 if problem.acc.dtype.bits <= 8 else problem.acc.dtype.to_torch()
    kinds = {sums, torch.float16 if values.dtype.itemsize == 1 else values.dtype}
    flushed = torch.float32, torch.bfloat16
    least = max(torch.finfo(d).tiny * (1.0 if d in flushed else torch.finfo(d).eps) for d in kinds if d.is_floating_point)
    size = size_of(values).sum(-2, keepdim=True)
    return least * (size.repeat_interleave(problem.operands[0].shape[1] // size.shape[1], 1) + 1)


def _moved(problem: AttentionProblem, operands: Sequence[torch.Tensor], acc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds, worst and typical, on how far errors of the scores move the results; computed a piece of the scores at a time."""
    q, k, v = (t.double() for t in operands[:3])
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    keys, squares, values = k.abs(), k.square().sum(-1), size_of(v)
    scores = (*q.shape[:3], k.shape[2])
    mask = operands[3].expand(scores) if len(operands) == 4 else None
    found = torch.empty_like(acc), torch.empty_like(acc)
    for index in pieces(q.shape[:3], max(1, most_at_once(q) // max(scores[3], 1))):
        heads = index[:2]
        hidden, first = None if mask is None else mask[index], index[2].start or 0
        rows = q[index], k[heads], keys[heads], squares[heads], values[heads]
        for whole, moved in zip(found, _moved_rows(problem, rows, acc[index], hidden, first), strict=True):
            whole[index] = torch.minimum(moved, 2 * values[heads].amax(-2, keepdim=True)) if scores[3] else moved
    return found


def _moved_rows(
    problem: AttentionProblem,
    operands: tuple[torch.Tensor, ...],
    acc: torch.Tensor,
    mask: torch.Tensor | None,
    first: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for the rows of queries from `first` on, with operands q, k, the sizes of k, the sums of its squares a key, and
    the sizes of v."""
    q, k, keys, squares, values = operands
    op, u, depth = problem.op, unit_roundoff(problem.acc.dtype), max(q.shape[-1], 1)
    plain = q @ k.transpose(-1, -2) * op.scale
    masked = op.masked(plain, mask, first, problem.operands[0].shape[2])
    there = masked.isfinite()
    seen = SCORE_ROUNDINGS * u * size_of(masked)
    most = (depth + 2) * u * abs(op.scale) * (q.abs() @ keys.transpose(-1, -2)) + seen
    walk = q.square().sum(-1)[..., None] * squares[..., None, :] * (op.scale**2 / depth)
    often = math.sqrt(depth) * u * (plain.square() + walk).sqrt() + seen
    most, often = (torch.where(there, e, torch.zeros_like(e)).clamp(max=HOPELESS) for e in (most, often))
    weights = op.softmax(masked).nan_to_num(0.0)
    # (weights * e^most) / sum(weights * e^-most) is the most that a weight can become.
    least = (weights * torch.exp(-most)).sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    worst = (weights * (torch.exp(most) / least - 1)).clamp(min=0.0) @ values
    off = weights * often
    first_order = (off.square() @ values.square()).sqrt() + acc.nan_to_num(0.0).abs() * off.square().sum(
        -1, keepdim=True
    ).sqrt()
    usual = (
        SAFETY * first_order * torch.exp((2 * often).amax(-1, keepdim=True) if often.shape[-1] else often.sum(-1, keepdim=True))
    )
    return worst, torch.minimum(usual, worst)


def _flips(problem: AttentionProblem, params: Mapping[Node, torch.Tensor], operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Bounds on how far results move when scores or weights within rounding error of the edge between two codes take the other
    one; 0 where an attention has no inner expression. A score that jumps moves a row's weights by at most twice the jump times
    the largest weight; each change of a weight moves the result by that times the value."""
    op = problem.op
    if op.scores is None and op.weights is None:
        return torch.zeros((), dtype=torch.float64)
    q, k, v = (t.double() for t in operands[:3])
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    u, depth = unit_roundoff(problem.acc.dtype), q.shape[3]
    scores = q @ k.transpose(-1, -2) * op.scale
    error = (depth + 2) * u * abs(op.scale) * (q.abs() @ k.abs().transpose(-1, -2))
    scores, jump, jumped = _jumps(op.scores, params, scores, error)
    weights = op.softmax(op.masked(scores, operands[3] if len(operands) == 4 else None)).nan_to_num(0.0)
    peak = weights.amax(-1, keepdim=True)
    moved = jump * peak * (jumped > 0)
    loose = weights * (ROUNDINGS * F32.epsilon + 2 * error.amax(-1, keepdim=True) + moved)
    _, step, counted = _jumps(op.weights, params, weights, loose)
    largest = v.nan_to_num(0.0, 0.0, 0.0).abs().amax(-2, keepdim=True)
    return (2 * jump * peak * jumped + step * counted) * largest


def _jumps(
    root: Node | None, params: Mapping[Node, torch.Tensor], values: torch.Tensor, error: torch.Tensor
) -> tuple[torch.Tensor, float, torch.Tensor]:
    """The values of an inner expression at arguments known up to an error, the largest jump they make there, and the number of
    jumps in each row."""
    if root is None:
        return values, 0.0, torch.zeros(*values.shape[:-1], 1, dtype=torch.float64)
    acc = Node(Acc(root.tensor))
    middle, *ends = (
        cast("torch.Tensor", evaluate_nodes((root,), {**params, acc: x})[0]).double()
        for x in (values, values - error, values + error)
    )
    jump = torch.stack([(e - middle).abs() for e in ends]).amax(0)
    return middle, float(jump.max()) if jump.numel() else 0.0, (jump > 0).double().sum(-1, keepdim=True)


def _with_error(interval: Interval) -> tuple[torch.Tensor, torch.Tensor]:
    """A value in float64, and how far from it a right one may be; nothing where it is no number or infinite."""
    low, mid, high = (t.double() for t in (interval.low, interval.mid, interval.high))
    return mid, torch.where(mid.isfinite(), torch.maximum(high - mid, mid - low), torch.zeros_like(mid))


def inexact_nodes(nodes: Sequence[Node]) -> set[Node]:
    """The nodes whose values round on the way in more than one right way; `nodes` come sources first."""
    found: set[Node] = set()
    for n in nodes:
        op = n.op
        reduces = isinstance(op, (AllReduce, Reduce, ReduceScatter)) and op.fn in ("add", "mean", "multiply")
        sums = isinstance(op, (Softmax, LayerNorm)) or reduces
        steps = isinstance(op, Map) and op.fn not in UNROUNDED
        if ((sums or steps) and n.dtype.is_float) or any(s in found for s in n.src):
            found.add(n)
    return found


def _worked_out(roots: Sequence[Node], sources: Sequence[torch.Tensor], *, usual: bool) -> list[Interval]:
    """Expressions over sources, with one of the two bounds."""
    nodes = toposort(roots)
    given = {n: Interval.exact(sources[n.op.index]) for n in nodes if isinstance(n.op, Param)}
    return carried(roots, given, inexact_nodes(nodes), usual=usual)


def carried(roots: Sequence[Node], values: dict[Node, Interval], dependent: Collection[Node], *, usual: bool) -> list[Interval]:
    """Expressions from the intervals of their leaves, with one of the two bounds; `values` is used up, for its memory.

    `dependent`: the nodes that have more than one right value.
    """
    order = toposort(roots)
    last = {s: n for n in order for s in n.src}
    for n in order:
        if n in values:
            continue
        src = [values[s] for s in n.src]
        for s in n.src:
            if last[s] is n and s not in roots:
                values.pop(s, None)
        steps, reduces = isinstance(n.op, (Map, Select)), isinstance(n.op, (*REDUCING, AllReduce, ReduceScatter))
        rounds = reduces or (steps and any(s.dtype.is_float for s in n.src))
        if n not in dependent or (not rounds and all(b.is_exact for b in src)):
            values[n] = Interval.exact(cast("torch.Tensor", n.op.evaluate(n, [b.mid for b in src])))
        elif steps:
            values[n] = propagate(n, src, dependent)
        elif isinstance(n.op, (AllReduce, ReduceScatter)):
            values[n] = met(n, src[0])
        elif reduces:
            values[n] = reduced(n, src, usual=usual)
        else:
            values[n] = spread(n, _inflated(n, src, USUAL_COARSENESS if usual else 1.0))
    return [values[r] for r in roots]


def _inflated(n: Node, src: Sequence[Interval], share: float) -> list[Interval]:
    """The operands of a node, the first with tolerance for a function whose value is rounded at once, or a share of that."""
    slack = ROUNDED_AT_ONCE if rounds_to_16_bits(n) else QUANTISED_AT_ONCE if quantised_to_8_bits(n) is not None else 0.0
    return [inflate(src[0], share * slack), *src[1:]] if slack else list(src)


def _rounding(acc: Node, stores: Sequence[Node], dependent: Collection[Node]) -> list[bool]:
    """Say for each store whether something rounds on the way in more than one right way: a float sum, or a float step."""
    found: set[Node] = set()
    for n in toposort(stores):
        starts = n is acc and n.dtype.is_float
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
            total += float(torch.where(counted, error, 0.0).sum())
            limit += float(torch.where(counted, w.double(), 0.0).sum())
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
