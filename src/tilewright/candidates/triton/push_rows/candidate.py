"""A product of few rows whose sums ranks add up: its epilogue stores partial sums into their memory, and one kernel behind it
waits for those of all, adds them up in the order of ranks with one rounding, and does what follows (residual, norm,
quantisation). Results are the same bits on every rank and on every run.

The product is that of another generator, of which the store alone differs (`expressions/exchange.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product

import torch

from tilewright.candidates.triton.expressions.exchange import Exchange, Push, Pushing, Running, slot_bytes
from tilewright.candidates.triton.push_rows.summed import Summed, Tail, Undivided, plans, summed
from tilewright.hardware.target import Target
from tilewright.ir.mesh import team
from tilewright.ir.ops import ReduceScatter
from tilewright.lowering.pieces import chosen_of, joined
from tilewright.schedule.candidate import GEMM, GPU, Candidate, Kernel, Runner, Schedule, Unsupported
from tilewright.schedule.problem import Problem

MOST_ROWS = 64
MOST_RANKS = 16
TAILS = 2  # points of the kernel behind that are offered with each product's


@dataclass(frozen=True)
class Plan(Undivided):
    """A product, the ranks that want its sums, and what follows.

    Attributes:
        summed: the problem, apart.
        tail: the kernel behind.
        products: plans of generators that can store elsewhere, by name.
    """

    summed: Summed
    tail: Tail
    products: Mapping[str, Pushing]

    @cached_property
    def push(self) -> Push:
        """The store of the product."""
        between = self.summed.between
        scattered = between.shape[0] if isinstance(between.op, ReduceScatter) else 0
        return Push(Exchange(len(self.tail.partials), slot_bytes(between.tensor)), scattered)

    def schedules(self) -> Sequence[Schedule]:
        """The points: those of products, each with those of the kernel behind."""
        own = [(name, point) for name, plan in self.products.items() for point in plan.pushing()]
        tails = [(self.tail.name, point) for point in islice(self.tail.plan.schedules(), TAILS)]
        return [joined(Schedule(), pair) for pair in product(own, tails)]

    def compile(self, schedule: Schedule) -> None:
        self._made(schedule)

    def _made(self, schedule: Schedule) -> tuple[Running, Running]:
        """Product and kernel behind, their machine code made."""
        (name, point), (_, behind) = chosen_of(schedule)
        product = self.products[name].pushed(point, self.push)
        return product, self.tail.plan.awaiting(behind, self.push.exchange, self.tail.partials)

    def build(self, schedule: Schedule) -> Kernel:
        (name, _), (tail, _) = chosen_of(schedule)
        product, follow = self._made(schedule)
        places, tail_places = self.summed.places, [self.tail.places.get(i, 0) for i in range(self.tail.count)]

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            memory = team().symmetric(self.summed.op.over, self.push.exchange.bytes)
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
    found = summed(problem, target)
    op, rows = found.op, math.prod(found.local.outputs[0].shape[:-1])
    if not 0 < rows <= MOST_ROWS or op.ranks > MOST_RANKS:
        raise Unsupported(f"{rows} rows for {op.ranks} ranks: up to {MOST_ROWS} for {MOST_RANKS}, since all are stored by each")
    tail = found.tail()
    products = {name: plan for name, plan in plans(found.local, target) if isinstance(plan, Pushing) and plan.pushing()}
    if not products:
        raise Unsupported("no generator of this product stores elsewhere")
    return Plan(found, tail, products)


CANDIDATE = Candidate("push_rows", GEMM, GPU, 7, plan, ranks="several")
