"""A check of some elements of the results that a call gave, by the sources that it read: milliseconds, whatever their size.

The expressions of a problem are written anew for a few elements of a result. Views become choices of elements, what reduces
reads whole rows, and a product or an attention becomes a batch of one row and one column each. What right results are, and how
far a kernel's may lie from them, is then worked out as for a whole problem (`expected.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import torch

from tilewright.dtype import PRED, S64, DType
from tilewright.ir.anchor import operands_of, stores_of
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import (
    Acc,
    Attention,
    Broadcast,
    Concat,
    Const,
    Convert,
    Dequantize,
    Gather,
    Gemm,
    Iota,
    LayerNorm,
    Map,
    Param,
    Quantize,
    Reduce,
    Reshape,
    Select,
    Slice,
    Softmax,
    Transpose,
)
from tilewright.ir.ops.attention import causal_shift
from tilewright.ir.ops.functions import by_bits
from tilewright.ir.types import Shape, TensorType
from tilewright.schedule.expected import accumulated, carried, inexact_nodes
from tilewright.schedule.intervals import Interval, orderable
from tilewright.schedule.problem import AnchorProblem, AnyProblem, AttentionProblem, FusionProblem, Problem

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

FIRST = 8  # elements of each result that are looked at, however long that takes
MOST = 256  # of each result
LONGEST = 1 << 21  # elements that one of a result may depend on
SEED = 20171

_SAME = (Map, Select, Convert)
_LEAVES = (Acc, Const, Iota, Param)
_VIEWS = (Broadcast, Concat, Gather, Reshape, Slice, Transpose)
_ROWS = (LayerNorm, Reduce, Softmax)
_KNOWN = (*_SAME, *_LEAVES, *_VIEWS, *_ROWS, Dequantize, Quantize)


def sampled(problem: AnyProblem) -> bool:
    """Tell whether elements of a problem's results can be worked out by themselves, with little work for each."""
    if not all(t.elements for t in (*problem.types, *problem.outputs)):
        return False
    if isinstance(problem, FusionProblem):
        return not any(problem.destinations) and (_reach(problem.roots) or LONGEST) < LONGEST
    inner = problem.K if isinstance(problem, Problem) else math.prod(problem.operands[1].shape[2:])
    roots = [r for label, some in problem.op.regions().items() for r in some if label != "stores"]
    reach = [_reach(some) for some in (roots, stores_of(problem.node))]
    return all(reach) and inner * math.prod(reach) < LONGEST


def _reach(roots: Sequence[Node]) -> int:
    """The most elements that one of an expression's depends on; 0 where an operation is not known here."""
    reach: dict[Node, int] = {}
    for n in toposort(roots):
        by_data = isinstance(n.op, Gather) and (n.op.elementwise or any(isinstance(s.op, Acc) for s in toposort(n.src[1:])))
        if not isinstance(n.op, _KNOWN) or by_data:
            return 0
        reach[n] = max((reach[s] for s in n.src), default=1) * max(math.prod(_row(n)), 1)
    return max((reach[r] for r in roots), default=1)


def spot_check(
    problem: AnyProblem,
    sources: Sequence[torch.Tensor],
    results: Mapping[int, torch.Tensor],
    within_s: float,
    roundoff: float = 0.0,
) -> tuple[str | None, int]:
    """None if some elements of a call's results are right, else a sentence: which one is not, and what it should be. And how
    many of each result were looked at.

    Args:
        problem: what was called, of which elements can be looked at (`sampled`).
        sources: what it read, on a CPU.
        results: what it gave, there too, by number; not all need be there.
        within_s: seconds in which further elements are looked at, beside `FIRST` of each result.
        roundoff: that of the kernel's sums (`Kernel.roundoff`).
    """
    began, drawn, count, done = time.perf_counter(), torch.Generator().manual_seed(SEED), FIRST, 0
    roots = problem.roots if isinstance(problem, FusionProblem) else stores_of(problem.node)
    while count > 0:
        for i, got in results.items():
            root = roots[i]
            at = _places(root.shape, count, drawn, ends=not done)
            low, mid, high = _expected(problem, root, at, sources, roundoff)
            found = orderable(_taken(got, at))
            right = (found == mid) | ((found >= low) & (found <= high))
            if found.is_floating_point():
                right |= mid.isnan() & found.isnan() | (low.isnan() | high.isnan()) & ~mid.isnan()
            if not right.all():
                wrong = int((~right).nonzero()[0])
                place = [int(x) for x in torch.unravel_index(at[wrong], root.shape)]
                return f"result {i} is wrong at {place}: {found[wrong].item()} for {mid[wrong].item()}", done + count
        done += count
        each_s = (time.perf_counter() - began) / done
        count = min(int((began + within_s - time.perf_counter()) / each_s), MOST - done)
    return None, done


def _places(shape: Shape, count: int, drawn: torch.Generator, *, ends: bool) -> torch.Tensor:
    """Elements as numbers in row-major order, drawn at random, half of their coordinates from the last four of an axis;
    with both `ends` of the array first."""
    at = torch.zeros(count, dtype=torch.int64)
    for extent in shape:
        anywhere, last, which = (torch.rand(count, generator=drawn, dtype=torch.float64) for _ in range(3))
        near_end = extent - 1 - (last * min(extent, 4)).long()
        at = at * extent + torch.where(which < 0.5, (anywhere * extent).long(), near_end)
    if ends:
        at[:2] = torch.tensor([0, math.prod(shape) - 1])
    return at


def _expected(
    problem: AnyProblem, root: Node, at: torch.Tensor, sources: Sequence[torch.Tensor], roundoff: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Elements of a result, and the ends of the intervals that both bounds on errors allow together."""
    view = _Elements(sources)
    node = view.of(root, at)
    sums: dict[Node, tuple[Interval, Interval]] = {}
    for leaf, places in view.sums.items():
        assert not isinstance(problem, FusionProblem)
        sums[leaf] = _accumulated(problem, sources, places, roundoff)
    nodes = toposort((node,))
    moved = {*sums, *inexact_nodes(nodes)}
    moved.update(n for n in nodes if any(s in moved for s in n.src))  # sources come first
    given = {leaf: Interval.exact(value) for leaf, value in view.picked.items()}
    found: list[Interval] = []
    for usual in (False, True):
        values = given | {leaf: bounds[usual] for leaf, bounds in sums.items()}
        found += carried((node,), values, moved, usual=usual)
    worst, typical = ([orderable(t.expand(at.shape)) for t in (b.low, b.mid, b.high)] for b in found)
    return torch.minimum(worst[0], typical[0]), typical[1], torch.maximum(worst[2], typical[2])


def _accumulated(
    problem: AnchorProblem, sources: Sequence[torch.Tensor], at: torch.Tensor, roundoff: float
) -> tuple[Interval, Interval]:
    """Elements of the accumulator with both bounds (`expected.accumulated`), in the shape of `at`."""
    view, operands, flat = _Elements(sources), operands_of(problem.node), at.reshape(-1)
    count, place = len(flat), _coordinates(problem.acc.shape, flat)

    def rows(operand: Node, space: Shape, chosen: Sequence[torch.Tensor | None], *extents: int) -> Node:
        """An operand [count, *extents] of those elements of a larger space whose coordinates are chosen, with all along the
        others."""
        return view.of(operand, _stretched(operand.shape, space, _grid(space, chosen).reshape(count, *extents)))

    if isinstance(problem, Problem):
        *batch, row, column = place
        outer = problem.acc.shape[:-2]
        lhs = rows(operands[0], (*outer, problem.M, problem.K), [*batch, row, None], 1, problem.K)
        rhs = rows(operands[1], (*outer, problem.K, problem.N), [*batch, None, column], problem.K, 1)
        op: Gemm | Attention = replace(problem.op, lhs=lhs, rhs=rhs, stores=(Node(Acc(problem.acc.with_shape((count, 1, 1)))),))
        one: AnchorProblem = Problem(op, view.types, view.weights)
    else:
        batch, head, query, column = place
        q, k, v = (o.shape for o in operands[:3])
        shared = head // (q[1] // k[1])
        keys = (count, 1, 1, k[2])
        scores = _grid((*q[:3], k[2]), [batch, head, query, None]).reshape(keys)
        taken = [
            rows(operands[0], q, [batch, head, query, None], 1, 1, q[3]),
            rows(operands[1], k, [batch, shared, None, None], 1, k[2], k[3]),
            rows(operands[2], v, [batch, shared, None, column], 1, k[2], 1),
            *(view.of(m, _stretched(m.shape, (*q[:3], k[2]), scores)) for m in operands[3:]),
        ]
        if problem.op.causal != "no":
            last = query.reshape(count, 1, 1, 1) + causal_shift(problem.op.causal, q[2], k[2])
            seen = view.leaf(PRED, (torch.arange(k[2]) <= last).expand(keys))
            if len(taken) == 3:
                taken.append(seen)
            elif taken[3].dtype is PRED:
                taken[3] = Node(Map("and"), taken[3], seen)
            else:
                hidden = view.leaf(taken[3].dtype, torch.full(keys, -math.inf).to(taken[3].dtype.to_torch()))
                taken[3] = Node(Select(), seen, taken[3], hidden)
        view.scores = scores
        inner = {
            name: view.of(root, scores) for name in ("scores", "weights") if (root := getattr(problem.op, name)) is not None
        }
        op = replace(problem.op, causal="no", operands=tuple(taken), stores=(), **inner)
        one = AttentionProblem(op, view.types, view.weights)
    worst, typical = accumulated(one, list(view.picked.values()), roundoff)
    return _shaped(worst, at.shape), _shaped(typical, at.shape)


def _shaped(b: Interval, shape: Shape) -> Interval:
    if b.is_exact:
        return Interval.exact(b.mid.reshape(shape))
    return Interval(b.low.reshape(shape), b.mid.reshape(shape), b.high.reshape(shape))


@dataclass
class _Elements:
    """Expressions written anew for some elements, by their numbers in row-major order.

    Attributes:
        sources: what the expressions' leaves stand for.
        picked: the leaves of what is written, with their values.
        sums: those that stand for elements of an accumulator, with the numbers of these.
        scores: the numbers of the scores that an attention's inner expressions are written for.
    """

    sources: Sequence[torch.Tensor]
    picked: dict[Node, torch.Tensor] = field(default_factory=dict[Node, torch.Tensor])
    sums: dict[Node, torch.Tensor] = field(default_factory=dict[Node, torch.Tensor])
    scores: torch.Tensor | None = None
    _written: dict[tuple[Node, int], tuple[Node, torch.Tensor]] = field(
        default_factory=dict[tuple[Node, int], tuple[Node, torch.Tensor]]
    )

    @property
    def types(self) -> tuple[TensorType, ...]:
        return tuple(n.tensor for n in self.picked)

    @property
    def weights(self) -> tuple[bool, ...]:
        return (False,) * len(self.picked)

    def leaf(self, dtype: DType, value: torch.Tensor) -> Node:
        """A leaf that stands for a value."""
        made = Node(Param(len(self.picked) + len(self.sums), TensorType(dtype, tuple(value.shape))))
        self.picked[made] = value
        return made

    def of(self, n: Node, at: torch.Tensor) -> Node:
        """An expression for the elements `at`, in the shape of that."""
        key = n, id(at)
        if key not in self._written:
            self._written[key] = self._of(n, at), at  # which keeps the number of `at` its own
        return self._written[key][0]

    def _of(self, n: Node, at: torch.Tensor) -> Node:
        op, src = n.op, n.src
        if isinstance(op, Param):
            return self.leaf(n.dtype, _taken(self.sources[op.index], at))
        if isinstance(op, (Const, Iota)):
            return self.leaf(n.dtype, _taken(cast("torch.Tensor", op.evaluate(n, [])), at))
        if isinstance(op, Acc):
            if at is self.scores:
                return Node(Acc(n.tensor.with_shape(tuple(at.shape))))
            made = Node(Param(len(self.picked) + len(self.sums), n.tensor.with_shape(tuple(at.shape))))
            self.sums[made] = at
            return made
        if isinstance(op, (Dequantize, Quantize)) and op.block is not None:
            blocks = [c // b for c, b in zip(_coordinates(n.shape, at), op.block, strict=True)]
            scales = [self.of(s, _numbers(s.shape, blocks)) for s in src[1:]]
            return Node(replace(op, block=None), self.of(src[0], at), *scales)
        if isinstance(op, (*_SAME, Dequantize, Quantize)):
            return Node(op, *(self.of(s, _stretched(s.shape, n.shape, at)) for s in src))
        if isinstance(op, Reshape):
            return self.of(src[0], at)
        if isinstance(op, _ROWS):
            return self._of_row(n, at)
        return self._of_view(n, at)

    def _of_view(self, n: Node, at: torch.Tensor) -> Node:
        op, src, place = n.op, n.src, _coordinates(n.shape, at)
        if isinstance(op, Broadcast):
            return self.of(src[0], _stretched(src[0].shape, n.shape, at))
        if isinstance(op, Transpose):
            return self.of(src[0], _numbers(src[0].shape, [place[op.perm.index(a)] for a in range(len(place))]))
        if isinstance(op, Slice):
            moved = [lo + by * c for lo, by, c in zip(op.start, op.step, place, strict=True)]
            return self.of(src[0], _numbers(src[0].shape, moved))
        if isinstance(op, Gather):
            axis, rank = op.axis % len(src[0].shape), len(src[1].shape)
            index = _Elements(self.sources)
            node = index.of(src[1], _numbers(src[1].shape, place[axis : axis + rank]))
            (chosen,) = evaluate_nodes((node,), dict[Node, "Value"](index.picked))
            chosen = cast("torch.Tensor", chosen).long()
            chosen = torch.where(chosen < 0, chosen + src[0].shape[axis], chosen).expand(at.shape)
            return self.of(src[0], _numbers(src[0].shape, [*place[:axis], chosen, *place[axis + rank :]]))
        assert isinstance(op, Concat)
        axis, start, found = op.axis % len(n.shape), 0, cast("Node | None", None)
        for s in src:
            within = (place[axis] - start).clamp(0, max(s.shape[axis] - 1, 0))
            if s.tensor.elements:
                one = self.of(s, _numbers(s.shape, [*place[:axis], within, *place[axis + 1 :]]))
                found = one if found is None else Node(Select(), self.leaf(PRED, place[axis] >= start), one, found)
            start += s.shape[axis]
        assert found is not None
        return found

    def _of_row(self, n: Node, at: torch.Tensor) -> Node:
        """Operations that reduce, over whole rows that are the last axis; of a norm or a softmax one element of each."""
        op, (x, *sides), place = n.op, n.src, _coordinates(n.shape, at)
        axes, last = _axes(n), len(at.shape)
        if isinstance(op, Reduce) and not op.keepdims:
            for a in axes:
                place.insert(a, torch.zeros_like(at))
        row = _row(n)
        along = _coordinates(row, torch.arange(math.prod(row)))
        own = _numbers(row, [place[a] for a in axes])
        spread = [p[..., None] if a not in axes else along[axes.index(a)] for a, p in enumerate(place)]
        whole = _numbers(x.shape, spread).expand(*at.shape, math.prod(row)).contiguous()
        if isinstance(op, Reduce):
            return Node(replace(op, axes=(last,) if axes else (), keepdims=False), self.of(x, whole if axes else at))
        node = Node(
            replace(op, axis=last), self.of(x, whole), *(self.of(s, _stretched(s.shape, n.shape, whole)) for s in sides)
        )
        pick = self.leaf(S64, own + torch.arange(at.numel()).reshape(at.shape) * math.prod(row))
        return Node(Gather(0), Node(Reshape((at.numel() * math.prod(row),)), node), pick)


def _axes(n: Node) -> tuple[int, ...]:
    """The axes that an operation reduces, or normalises."""
    op, rank = n.op, len(n.shape)
    if isinstance(op, Reduce):
        return op.axes
    if isinstance(op, Softmax):
        return (op.axis % rank,)
    return tuple(range(op.axis % rank, rank)) if isinstance(op, LayerNorm) else ()


def _row(n: Node) -> Shape:
    return tuple(n.src[0].shape[a] for a in _axes(n))


def _coordinates(shape: Shape, at: torch.Tensor) -> list[torch.Tensor]:
    """The coordinates of elements, axis by axis."""
    found: list[torch.Tensor] = []
    for extent in reversed(shape):
        found.append(at % extent)
        at = at // extent
    return found[::-1]


def _numbers(shape: Shape, place: Sequence[torch.Tensor]) -> torch.Tensor:
    """The numbers of elements at coordinates, which broadcast."""
    at = torch.zeros((), dtype=torch.int64)
    for extent, along in zip(shape, place, strict=True):
        at = at * extent + along
    return at


def _grid(shape: Shape, chosen: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The numbers of the elements [count, …] of a space with chosen coordinates [count], and all of them along other axes."""
    free = [a for a, c in enumerate(chosen) if c is None]
    place = [
        torch.arange(shape[a]).reshape([-1 if f == a else 1 for f in free]) if c is None else c.reshape(-1, *(1 for _ in free))
        for a, c in enumerate(chosen)
    ]
    return _numbers(shape, place)


def _stretched(shape: Shape, to: Shape, at: torch.Tensor) -> torch.Tensor:
    """The numbers of the elements of an array that are repeated to those of a larger one (NumPy's rule)."""
    if shape == to:
        return at
    place = _coordinates(to, at)[len(to) - len(shape) :]
    found = _numbers(shape, [torch.zeros_like(p) if d == 1 else p for d, p in zip(shape, place, strict=True)])
    return found.expand(at.shape)


def _taken(t: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The elements of an array by their numbers."""
    return by_bits(lambda x: x[tuple(_coordinates(tuple(x.shape), at))] if x.dim() else x.expand(at.shape), t)
