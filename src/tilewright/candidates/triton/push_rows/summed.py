"""A product whose sums ranks add up, apart: the product of one rank, the operation between ranks, and what is computed of the
sums, which a kernel does that waits for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol, cast

import torch

from tilewright.candidates.triton.expressions.exchange import Awaiting
from tilewright.dtype import BF16, F16, F32
from tilewright.hardware.target import Target
from tilewright.ir.build import const, convert, map_
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import AllReduce, Param, ReduceScatter
from tilewright.lowering.stages import Stages
from tilewright.schedule.candidate import Plan as AnyPlan
from tilewright.schedule.candidate import Refusal, Schedule, Unsupported, concerns, discover, planned
from tilewright.schedule.problem import AnyProblem, FusionProblem, Problem, fusion_of


class Tails(Awaiting, AnyPlan, Protocol):
    """A plan of fusions that may wait."""


@dataclass(frozen=True)
class Tail:
    """The kernel behind the product.

    Attributes:
        name: the candidate.
        plan: its fusion that adds them up and goes on, of any sizes.
        count: number of its sources.
        partials: numbers of each rank's sums among its sources, in the order of ranks.
        places: the gemm's source that each of its sources is, partial sums aside.
    """

    name: str
    plan: Tails
    count: int
    partials: tuple[int, ...]
    places: Mapping[int, int]


class Undivided(ABC):
    """The part of a plan that says that nothing of it is searched for by itself: a product that stores elsewhere may be fastest
    at another point than one that does not."""

    @abstractmethod
    def schedules(self) -> Sequence[Schedule]:
        """The points, each of which has candidate and point of both kernels."""

    def of_pieces(self, schedule: Schedule, chosen: Sequence[tuple[str, Schedule]]) -> Schedule:
        """The point itself."""
        return schedule

    def pieces(self) -> list[AnyProblem]:
        """No problems."""
        return []

    def pieces_with(self, weights: Mapping[int, torch.Tensor]) -> list[tuple[AnyProblem, dict[int, torch.Tensor]]]:
        return []

    def offers(self, schedule: Schedule) -> bool:
        return schedule in self.schedules()


@dataclass(frozen=True)
class Summed:
    """A product whose sums alone travel.

    Attributes:
        problem, target: what is done, and where.
        local: the product of this rank alone, which gives what travels.
        places: its sources among the gemm's.
        between: the operation between ranks, over a stand-in.
        found: all that is done, in turn.
    """

    problem: Problem
    target: Target
    local: Problem
    places: tuple[int, ...]
    between: Node
    found: Stages

    @property
    def op(self) -> AllReduce | ReduceScatter:
        """The operation between ranks."""
        op = self.between.op
        assert isinstance(op, (AllReduce, ReduceScatter))
        return op

    def tail(self, *, summed: bool = False) -> Tail:
        """The kernel behind: the sum over ranks, rounded once, and what is computed of it. If they are `summed` already, ranks
        send one source, the sums.

        Raises:
            Unsupported: the reason why there is none.
        """
        problem, met, op, count = self.problem, self.between, self.op, len(self.problem.types)
        given = [Node(Param(i, t)) for i, t in enumerate(problem.types)]
        partials = [Node(Param(count + rank, met.tensor)) for rank in range(1 if summed else op.ranks)]
        total = convert(reduce(lambda a, b: map_("add", a, b), (convert(p, F32) for p in partials)), met.dtype)
        if total in partials:
            total = map_("multiply", total, const(1.0, F32))  # a copy, to the bit
        values = [*given, total, total]  # the product's own sums, which nobody reads, and those of all
        for stage in self.found.stages[2:]:
            assert isinstance(stage.what, FusionProblem)
            stand_in = {n: values[stage.places[n.op.index]] for n in toposort(stage.what.roots) if isinstance(n.op, Param)}
            values += substitute(stage.what.roots, stand_in)
        region, order = fusion_of([*given, *partials], [values[i] for i in self.found.results])
        index = {n: i for i, n in enumerate(order)}
        places = {i: n.op.index for n, i in index.items() if isinstance(n.op, Param) and n.op.index < count}
        weights = tuple(i in places and problem.weights[places[i]] for i in range(len(order)))
        whole = replace(region, weights=weights)
        for name, plan in plans(whole, self.target):
            if isinstance(plan, Awaiting):
                return Tail(name, cast("Tails", plan), len(order), tuple(index[p] for p in partials), places)
        raise Unsupported("what follows the sums has no kernel that waits")


def summed(problem: Problem, target: Target) -> Summed:
    """A problem's product, if its sums alone travel: in f32, bf16 or f16, of rows that are shared out or of all.

    Raises:
        Unsupported: the reason why they do not.
    """
    if "cuda" not in target.features:
        raise Unsupported("flags are waited for in PTX")
    found = Stages(problem)
    if len(found.stages) < 2:
        raise Unsupported("no sums travel")
    local, between, *behind = found.stages
    op = between.what.op if isinstance(between.what, Node) else None
    if not isinstance(local.what, Problem) or not isinstance(op, (AllReduce, ReduceScatter)) or len(behind) > 1:
        raise Unsupported("more than the product's sums travel")
    count = len(problem.types)
    if len(local.what.outputs) != 1 or between.places != (count,) or any(count in s.places for s in behind):
        raise Unsupported("the sums of one rank are read, too")
    assert isinstance(between.what, Node)
    met, sums = between.what, local.what.outputs[0]
    if op.fn != "add" or sums.dtype not in (F32, BF16, F16):
        raise Unsupported(f"{op.fn} of {sums.dtype.name}: sums of f32, bf16 or f16 are added up")
    if isinstance(op, ReduceScatter) and (op.axis != 0 or sums.rank != 2):
        raise Unsupported("rows alone are shared out")
    return Summed(problem, target, local.what, local.places, met, found)


def plans(problem: AnyProblem, target: Target) -> list[tuple[str, AnyPlan]]:
    """The plans of a problem of one rank, by candidate."""
    able = [(c.name, planned(c, problem, target)) for c in discover(kind=target.kind) if concerns(c, problem, target)]
    return [(name, plan) for name, plan in able if not isinstance(plan, Refusal)]
