"""A product of few rows whose sums ranks add up: its epilogue stores partial sums into their memory, and one kernel behind it
waits for those of all, adds them up in the order of ranks with one rounding, and does what follows (residual, norm,
quantisation). Results are the same bits on every rank and on every run.

The product is that of another generator, of which the store alone differs (`expressions/exchange.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import islice, product
from typing import Protocol, cast

import torch

from tilewright.candidates.triton.expressions.exchange import Awaiting, Exchange, Push, Pushing, slot_bytes
from tilewright.dtype import BF16, F16, F32
from tilewright.hardware.target import Target
from tilewright.ir.build import convert, map_
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.mesh import team
from tilewright.ir.ops import AllReduce, Param, ReduceScatter
from tilewright.lowering.stages import Stages, chosen_of, joined
from tilewright.schedule.candidate import (
    GEMM,
    GPU,
    Candidate,
    Kernel,
    Refusal,
    Runner,
    Schedule,
    Unsupported,
    concerns,
    discover,
    planned,
)
from tilewright.schedule.candidate import Plan as AnyPlan
from tilewright.schedule.problem import AnyProblem, FusionProblem, Problem, fusion_of

MOST_ROWS = 64
MOST_RANKS = 16
TAILS = 2  # points of the kernel behind that are offered with each product's


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


@dataclass(frozen=True)
class Plan:
    """A product, the ranks that want its sums, and what follows.

    Attributes:
        problem, target: what is done, and where.
        local: the product of this rank alone, which gives what travels.
        places: its sources among the gemm's.
        between: the operation between ranks, over a stand-in.
        tail: the kernel behind.
        products: plans of generators that can store elsewhere, by name.
    """

    problem: Problem
    target: Target
    local: Problem
    places: tuple[int, ...]
    between: Node
    tail: Tail
    products: Mapping[str, Pushing]

    @cached_property
    def push(self) -> Push:
        """The store of the product."""
        op = self.between.op
        scattered = self.between.shape[0] if isinstance(op, ReduceScatter) else 0
        return Push(Exchange(len(self.tail.partials), slot_bytes(self.between.tensor)), scattered)

    def schedules(self) -> Sequence[Schedule]:
        """The points: those of products, each with those of the kernel behind."""
        own = [(name, point) for name, plan in self.products.items() for point in plan.pushing()]
        tails = [(self.tail.name, point) for point in islice(self.tail.plan.schedules(), TAILS)]
        return [joined(Schedule(), pair) for pair in product(own, tails)]

    def of_pieces(self, schedule: Schedule, chosen: Sequence[tuple[str, Schedule]]) -> Schedule:
        """The point itself, which has candidate and point of both kernels."""
        return schedule

    def pieces(self) -> list[AnyProblem]:
        """None: a product that stores elsewhere may be fastest at another point."""
        return []

    def pieces_with(self, weights: Mapping[int, torch.Tensor]) -> list[tuple[AnyProblem, dict[int, torch.Tensor]]]:
        return []

    def offers(self, schedule: Schedule) -> bool:
        return schedule in self.schedules()

    def build(self, schedule: Schedule) -> Kernel:
        (name, point), (tail, behind) = chosen_of(schedule)
        product = self.products[name].pushed(point, self.push)
        follow = self.tail.plan.awaiting(behind, self.push.exchange, self.tail.partials)
        places, tail_places = self.places, [self.tail.places.get(i, 0) for i in range(self.tail.count)]

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            op = self.between.op
            assert isinstance(op, (AllReduce, ReduceScatter))
            memory = team().symmetric(op.over, self.push.exchange.bytes)
            first = product({at: weights[i] for at, i in enumerate(places) if i in weights}, memory)
            second = follow({at: weights[i] for at, i in self.tail.places.items() if i in weights}, memory)

            def run(sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
                first([sources[i] for i in places])
                return second([sources[i] for i in tail_places])

            return run

        return Kernel(CANDIDATE.name, schedule, prepare, parts=(("gemm", name), ("fusion", tail)))


def plan(problem: Problem, target: Target) -> Plan:
    """The plan of a product whose sums alone travel.

    Raises:
        Unsupported: the reason why there is none.
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
    rows = math.prod(sums.shape[:-1])
    if not 0 < rows <= MOST_ROWS or op.ranks > MOST_RANKS:
        raise Unsupported(f"{rows} rows for {op.ranks} ranks: up to {MOST_ROWS} for {MOST_RANKS}, since all are stored by each")
    tail = _tail(problem, found, met, target)
    products = {name: plan for name, plan in _plans(local.what, target) if isinstance(plan, Pushing) and plan.pushing()}
    if not products:
        raise Unsupported("no generator of this product stores elsewhere")
    return Plan(problem, target, local.what, local.places, met, tail, products)


def _plans(problem: AnyProblem, target: Target) -> list[tuple[str, AnyPlan]]:
    """The plans of a problem of one rank, by candidate."""
    able = [(c.name, planned(c, problem, target)) for c in discover(kind=target.kind) if concerns(c, problem, target)]
    return [(name, plan) for name, plan in able if not isinstance(plan, Refusal)]


def _tail(problem: Problem, found: Stages, met: Node, target: Target) -> Tail:
    """The kernel behind the product: the sum over ranks, rounded once, and what is computed of it.

    Raises:
        Unsupported: the reason why there is none.
    """
    op, count = met.op, len(problem.types)
    assert isinstance(op, (AllReduce, ReduceScatter))
    given = [Node(Param(i, t)) for i, t in enumerate(problem.types)]
    partials = [Node(Param(count + rank, met.tensor)) for rank in range(op.ranks)]
    total = convert(reduce(lambda a, b: map_("add", a, b), (convert(p, F32) for p in partials)), met.dtype)
    values = [*given, total, total]  # the product's own sums, which nobody reads, and those of all
    for stage in found.stages[2:]:
        assert isinstance(stage.what, FusionProblem)
        stand_in = {n: values[stage.places[n.op.index]] for n in toposort(stage.what.roots) if isinstance(n.op, Param)}
        values += substitute(stage.what.roots, stand_in)
    region, order = fusion_of([*given, *partials], [values[i] for i in found.results])
    index = {n: i for i, n in enumerate(order)}
    places = {i: n.op.index for n, i in index.items() if isinstance(n.op, Param) and n.op.index < count}
    weights = tuple(i in places and problem.weights[places[i]] for i in range(len(order)))
    whole = replace(region, weights=weights)
    for name, plan in _plans(whole, target):
        if isinstance(plan, Awaiting):
            return Tail(name, cast("Tails", plan), len(order), tuple(index[p] for p in partials), places)
    raise Unsupported("what follows the sums has no kernel that waits")


CANDIDATE = Candidate("push_rows", GEMM, GPU, 7, plan, ranks="several")
