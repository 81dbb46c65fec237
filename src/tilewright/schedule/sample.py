"""Random data for a problem, chosen so that a wrong kernel shows.

Plain random data hides mistakes: beside a sum of a thousand products a bias of 1 is below the tolerance, and a result quantised
with a scale of 1 is the largest code everywhere. So scales and side inputs are brought to the size of what they meet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch

from tilewright.dtype import F64
from tilewright.ir.carrier import acc_of, operands_of, stores_of
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.expression import depends_on_acc
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Dequantize, Gather, Map, Param, Quantize
from tilewright.ir.ops.functions import narrow_integer
from tilewright.ir.types import TensorType
from tilewright.schedule.problem import AnyProblem, CarrierProblem, Operand, Problem, RegionProblem

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


def random_sources(problem: AnyProblem, seed: int = 0) -> list[torch.Tensor]:
    """Random sources of a problem, drawn where torch makes new tensors.

    Integer operands take their full range, two rows (columns) its ends alone; integer side inputs take it where only integers
    follow. Scales are positive; other side inputs are as large as what they are added to.
    """
    return _Sampler(problem, seed).sources


class _Sampler:
    def __init__(self, problem: AnyProblem, seed: int) -> None:
        self._generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
        self._settled: set[int] = set()
        self.sources = [random_tensor(t, self._generator) for t in problem.types]
        if isinstance(problem, RegionProblem):
            self._params = [n for n in problem.nodes if isinstance(n.op, Param)]
            self._settle_region(problem)
            return
        node = problem.node
        self._params = [n for n in toposort((*operands_of(node), *stores_of(node))) if isinstance(n.op, Param)]
        for n in toposort(operands_of(node)):
            self._settle_codes(n)
        if isinstance(problem, Problem):
            self._reach_extremes(problem.lhs, -2)
            self._reach_extremes(problem.rhs, -1)
        self._settle_epilogue(problem)

    def _settle_codes(self, n: Node) -> None:
        """A dequantisation gives values of about 1."""
        if isinstance(n.op, Dequantize):
            code = n.src[0].dtype
            self._settle(n.src[1], 2 / code.max if code.is_integer else 1.0, positive=True)

    def _settle_indices(self, picks: Node, extent: int) -> None:
        while len(picks.src) == 1:
            picks = picks.src[0]
        if isinstance(picks.op, Param):
            drawn = self.sources[picks.op.index]
            self.sources[picks.op.index] = drawn.to(torch.int64).remainder(max(extent, 1)).to(drawn.dtype)

    def _settle_region(self, problem: RegionProblem) -> None:
        """Indices inside what they pick from, values of about 1, scales so that codes spread over their range."""
        for n in problem.nodes:
            if isinstance(n.op, Gather):
                self._settle_indices(n.src[1], n.src[0].shape[n.op.axis])
            self._settle_codes(n)
            if isinstance(n.op, Quantize):
                self._settle(n.src[1], 3 * _rms(self._value(n.src[0])) / float(n.dtype.max), positive=True)

    def _reach_extremes(self, operand: Operand, axis: int) -> None:
        """Two rows of the left (columns of the right) at the ends of the range: the largest sums there can be."""
        as_stored = operand.plain and len(operand.views) == int(operand.transposed)
        if operand.source is None or not as_stored or not operand.dtype.is_integer or operand.shape[axis] < ENOUGH:
            return
        matrix = self.sources[operand.source]
        across = matrix.transpose(-1, -2) if operand.transposed else matrix
        for i, value in enumerate((operand.dtype.max, operand.dtype.min)):
            across.select(axis, i).fill_(value)

    def _value(self, node: Node) -> torch.Tensor:
        """An expression over sources alone."""
        bound = {p: self.sources[cast("Param", p.op).index] for p in self._params}
        return cast("torch.Tensor", evaluate_nodes((node,), bound)[0])

    def _accumulator(self, problem: CarrierProblem) -> torch.Tensor:
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

    def _settle_epilogue(self, problem: CarrierProblem) -> None:
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
        if len(leaves) != 1 or leaves[0].index in self._settled or not 0 < size < math.inf:
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


def _rounds_later(node: Node, stores: Sequence[Node]) -> bool:
    """Whether a store makes floats of an integer node."""
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
