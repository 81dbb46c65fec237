"""Random data for a problem, chosen so that a wrong kernel shows.

Plain random data hides mistakes: beside a sum of a thousand products a bias of 1 is below the tolerance, and a result quantised
with a scale of 1 is the largest code everywhere. So scales and side inputs are brought to the size of the values that they
meet.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch

from tilewright.dtype import F64, PRED
from tilewright.ir.anchor import acc_of, operands_of, stores_of
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.expression import depends_on_acc
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import VIEWS, Convert, Dequantize, Gather, Map, Param, Quantize, Write
from tilewright.ir.ops.functions import narrow_integer
from tilewright.ir.types import TensorType
from tilewright.schedule.problem import AnchorProblem, AnyProblem, FusionProblem, Operand, Problem

ADDITIVE = frozenset({"add", "subtract", "maximum", "minimum"})
LARGE = 16.0
ENOUGH = 4  # rows, so that two may hold one value
ENOUGH_TO_TELL = 10_000
LIMIT = 2.0**62  # what float64 can hand to int64


def random_tensor(t: TensorType, generator: torch.Generator, *, positive: bool = False) -> torch.Tensor:
    """Random data of a type: integers over their full range, floats normal (or in [0.5, 1.5) if `positive`)."""
    d = t.dtype
    if d.kind == "pred":
        return torch.rand(t.shape, generator=generator) < 0.5
    if d.is_integer:
        low, high = max(int(d.min), -(1 << 40)), min(int(d.max), 1 << 40)
        storage = d.to_torch()
        drawn = torch.int64 if storage in (torch.uint16, torch.uint32, torch.uint64) else storage
        return torch.randint(low, high + 1, t.shape, generator=generator, dtype=drawn).to(storage)
    wide = torch.rand(t.shape, generator=generator) + 0.5 if positive else torch.randn(t.shape, generator=generator)
    return wide.to(d.to_torch())


def random_sources(problem: AnyProblem, seed: int = 0, given: Mapping[int, torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Random sources of a problem, drawn where torch makes new tensors.

    Integer operands take their full range, two rows (columns) its ends alone; integer side inputs take it where only integers
    follow. Scales are positive; other side inputs are as large as what they are added to. Indices are in range, however they
    are made. Those in `given`, by index, are what they are.
    """
    return _Sampler(problem, seed, given or {}).sources


class _Sampler:
    def __init__(self, problem: AnyProblem, seed: int, given: Mapping[int, torch.Tensor]) -> None:
        self._generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
        self._settled: set[int] = set()
        self._given = frozenset(given)
        device = torch.get_default_device()
        self.sources = [
            given[i].to(device) if i in given else random_tensor(t, self._generator) for i, t in enumerate(problem.types)
        ]
        if isinstance(problem, FusionProblem):
            self._params = [n for n in problem.nodes if isinstance(n.op, Param)]
            self._settle_fusion(problem)
            return
        node = problem.node
        self._params = [n for n in toposort((*operands_of(node), *stores_of(node))) if isinstance(n.op, Param)]
        self._settle_indices(toposort(operands_of(node)), {})
        for n in toposort(operands_of(node)):
            self._settle_codes(n)
            self._settle_truth(n)
        if isinstance(problem, Problem):
            self._reach_extremes(problem.lhs, -2)
            self._reach_extremes(problem.rhs, -1)
        self._settle_epilogue(problem)

    def _settle_codes(self, n: Node) -> None:
        """A dequantisation gives values of about 1."""
        if isinstance(n.op, Dequantize):
            code = n.src[0].dtype
            self._settle(n.src[1], 2 / code.max if code.is_integer else 1.0, positive=True)

    def _settle_truth(self, n: Node) -> None:
        """Truth values, and integers that are taken for them, are ones up to a random place in their second half, as padding
        leaves them; one row of eight, or the only one, ends anywhere and has holes."""
        given = n.src[0] if isinstance(n.op, Convert) and n.dtype is PRED and n.src[0].dtype.is_integer else n
        if not isinstance(given.op, Param) or (given is n and n.dtype is not PRED):
            return
        index, t = given.op.index, given.tensor
        if index in self._given | self._settled or not t.shape:
            return
        self._settled.add(index)
        *rows, extent = t.shape
        odd = (torch.arange(math.prod(rows)) % 8 == 0).reshape(*rows, 1)
        share = torch.rand((*rows, 1), generator=self._generator)
        ends = torch.ceil(extent * torch.where(odd, share, (1 + share) / 2)).clamp(min=1)
        holes = odd & (torch.rand(t.shape, generator=self._generator) < 0.25)
        self.sources[index] = ((torch.arange(extent) < ends) & ~holes).to(t.dtype.to_torch())

    def _settle_indices(self, nodes: Sequence[Node], large_tables: Mapping[int, int]) -> None:
        """Indices inside what they pick from, however they are made of the sources: those are drawn as small numbers, smaller
        each time until every index is in range. Where none are (the oracle then fails), the last draw stands."""
        settled: list[Node] = []
        drawn = set[Node]()
        for n in nodes:
            if not isinstance(n.op, (Gather, Write)):
                continue
            settled.append(n)
            under = [m for m in toposort((n.src[1],)) if isinstance(m.op, Param)]
            leaves = [m for m in under if cast("Param", m.op).index not in self._given]
            plain = all(isinstance(m.op, (Param, Convert, *VIEWS)) for m in toposort((n.src[1],)))
            if not leaves or ((not plain or drawn.issuperset(leaves)) and self._in_range(settled)):
                continue
            drawn.update(leaves)
            extent = max(n.src[0].shape[n.op.axis], 1)
            ends = large_tables.get(n.src[0].op.index) if isinstance(n.src[0].op, Param) else None
            for bound in [2 * ends if ends else extent] if plain else _bounds(ends or extent):
                for leaf in leaves:
                    small = self._small(leaf.tensor, bound, isinstance(n.op, Write))
                    if plain and ends and leaf.dtype.is_integer and leaf.dtype.max >= extent:
                        wide = small.to(torch.int64)
                        small = torch.where(wide < ends, wide, wide + extent - 2 * ends).to(small.dtype)
                    self.sources[cast("Param", leaf.op).index] = small
                if self._in_range(settled):
                    break

    def _small(self, t: TensorType, bound: int, distinct: bool) -> torch.Tensor:
        """Numbers from 0 up to `bound`, of floats halves among them; each once where there are enough."""
        count = t.elements
        if t.dtype.kind == "pred":
            return torch.rand(t.shape, generator=self._generator) < 0.5 if bound > 1 else torch.zeros(t.shape, dtype=torch.bool)
        top = max(1, min(bound, int(t.dtype.max)))
        if distinct and count <= top:
            drawn = torch.randperm(top, generator=self._generator)[:count].reshape(t.shape)
        else:
            drawn = torch.randint(0, top, t.shape, generator=self._generator)
        if t.dtype.is_float and top > 1:
            drawn = drawn + torch.rand(t.shape, generator=self._generator)
        return drawn.to(t.dtype.to_torch())

    def _in_range(self, picking: Sequence[Node]) -> bool:
        """Tell whether each of these reads and writes inside what it picks from."""
        for n in picking:
            try:
                index = self._value(n.src[1]).to(torch.int64)
            except (IndexError, RuntimeError):  # of what an index inside it picks
                return False
            extent = n.src[0].shape[cast("Gather | Write", n.op).axis]
            first = -extent if cast("Gather | Write", n.op).wraps else 0
            if index.numel() and not first <= int(index.min()) <= int(index.max()) < extent:
                return False
            if isinstance(n.op, Write) and index.remainder(max(extent, 1)).unique().numel() < index.numel():
                return False
        return True

    def _settle_fusion(self, problem: FusionProblem) -> None:
        """Indices inside what they pick from, values of about 1, scales so that codes spread over their range."""
        self._settle_indices(problem.nodes, problem.large_tables)
        for n in problem.nodes:
            self._settle_codes(n)
            if isinstance(n.op, Quantize):
                with contextlib.suppress(IndexError, RuntimeError):  # an index that could not be settled
                    self._settle(n.src[1], 3 * _rms(self._value(n.src[0])) / float(n.dtype.max), positive=True)

    def _reach_extremes(self, operand: Operand, axis: int) -> None:
        """Two rows of the left (columns of the right) at the ends of the range: the largest sums there can be."""
        as_stored = operand.plain and len(operand.views) == int(operand.transposed)
        if (
            operand.source is None
            or operand.source in self._given
            or not as_stored
            or not operand.dtype.is_integer
            or operand.shape[axis] < ENOUGH
        ):
            return
        matrix = self.sources[operand.source]
        across = matrix.transpose(-1, -2) if operand.transposed else matrix
        for i, value in enumerate((operand.dtype.max, operand.dtype.min)):
            across.select(axis, i).fill_(value)

    def _value(self, node: Node) -> torch.Tensor:
        """An expression over sources alone."""
        bound = {p: self.sources[cast("Param", p.op).index] for p in self._params}
        return cast("torch.Tensor", evaluate_nodes((node,), bound)[0])

    def _accumulator(self, problem: AnchorProblem) -> torch.Tensor:
        """Numbers as large as the products will be, without multiplying."""
        operands = [_some(self._value(n)) for n in operands_of(problem.node)]
        acc = problem.acc
        normal = torch.randn(acc.shape, generator=self._generator, dtype=torch.float64)
        if isinstance(problem, Problem):
            a, b = operands
            k = problem.K
            wide = normal.mul_(math.sqrt(k) * _rms(a) * _rms(b)).add_(k * _mean(a) * _mean(b))
        else:
            wide = normal.mul_(_rms(operands[2]))
        wide.clamp_(-LIMIT, LIMIT)  # in place: it may be gigabytes
        return narrow_integer(wide.to(torch.int64), acc.dtype) if acc.dtype.is_integer else wide.to(acc.dtype.to_torch())

    def _settle_epilogue(self, problem: AnchorProblem) -> None:
        node = problem.node
        stores = stores_of(node)
        if not any(isinstance(n.op, Param) for n in toposort(stores)):
            return
        dependent = depends_on_acc(stores)
        values: dict[Node, torch.Tensor] = {acc_of(node): self._accumulator(problem)}
        for n in toposort(stores):
            if n not in dependent or n in values:
                continue
            inner = [values[s] for s in n.src if s in dependent]
            beside = [s for s in n.src if s not in dependent]
            if isinstance(n.op, Quantize):
                self._settle(n.src[1], 3 * _rms(inner[0]) / n.dtype.max, positive=True)
            elif isinstance(n.op, Map) and len(inner) == len(beside) == 1:
                self._settle_side(n.op.fn, inner[0], beside[0], rounded=n.dtype.is_float or _rounds_later(n, stores))
            values[n] = cast("torch.Tensor", n.op.evaluate(n, [values[s] if s in dependent else self._value(s) for s in n.src]))

    def _settle_side(self, fn: str, value: torch.Tensor, side: Node, *, rounded: bool) -> None:
        size = _rms(value)
        if fn in ADDITIVE and rounded:
            self._settle(side, size)
        elif fn == "multiply" and side.dtype.is_float and size > LARGE:
            self._settle(side, LARGE / size)
        elif fn == "divide" and side.dtype.is_float and size > LARGE:
            self._settle(side, size / LARGE, positive=True)

    def _settle(self, expression: Node, size: float, *, positive: bool = False) -> None:
        """Give the one source under an expression values about as large as `size`, unless an earlier use decided that."""
        leaves = [n.op for n in toposort((expression,)) if isinstance(n.op, Param)]
        if len(leaves) != 1 or leaves[0].index in self._settled | self._given or not 0 < size < math.inf:
            return
        index, t = leaves[0].index, leaves[0].type
        self._settled.add(index)
        if t.dtype.is_float:
            wide = random_tensor(TensorType(F64, t.shape), self._generator, positive=positive) * size
            limit = float(t.dtype.max)
            self.sources[index] = wide.clamp(-limit, limit).to(t.dtype.to_torch())
        elif t.dtype.is_integer:
            wide = torch.randn(t.shape, generator=self._generator, dtype=torch.float64) * size
            self.sources[index] = (
                wide.clamp(max(t.dtype.min, -LIMIT), min(t.dtype.max, LIMIT)).to(torch.int64).to(t.dtype.to_torch())
            )


def _bounds(extent: int) -> list[int]:
    """The bounds below which the sources of an index into `extent` slices are drawn in turn; a division may want more than
    `extent`."""
    return [8 * extent >> i for i in range((8 * extent).bit_length())]


def _rounds_later(node: Node, stores: Sequence[Node]) -> bool:
    """Tell whether a store makes floats of an integer node."""
    reached = {node}
    for n in toposort(stores):
        if any(s in reached for s in n.src):
            reached.add(n)
            if n.dtype.is_float:
                return True
    return False


def _mean(t: torch.Tensor) -> float:
    return float(t.mean()) if t.numel() else 0.0


def _some(t: torch.Tensor) -> torch.Tensor:
    """Enough of a tensor's elements, in float64, to tell how large they are."""
    flat = t.reshape(-1)
    return flat[:: max(1, flat.numel() // ENOUGH_TO_TELL)].double()


def _rms(t: torch.Tensor) -> float:
    wide = _some(t)
    wide = wide[wide.isfinite()]
    return float(wide.square().mean().sqrt()) if wide.numel() else 0.0
