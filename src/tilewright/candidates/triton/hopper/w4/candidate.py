"""Gemms with constant weights of 4 or 8 bits on Hopper: codes are read as they are stored and made halves in registers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from tilewright.candidates.triton.hopper.w4 import tiles
from tilewright.candidates.triton.hopper.w4.epilogue import compiled
from tilewright.candidates.triton.hopper.w4.form import Form, Point
from tilewright.candidates.triton.hopper.w4.pack import packed_weights
from tilewright.candidates.triton.hopper.w4.plan import Plan, plan_of
from tilewright.candidates.triton.hopper.w4.space import points, work
from tilewright.candidates.triton.runtime import module
from tilewright.candidates.triton.runtime.launch import caller
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import GEMM, GPU, Candidate, Kernel, Runner, Schedule, Unsupported
from tilewright.schedule.cost import Work, predict_us
from tilewright.schedule.problem import Problem

LOOKED_AT, SUFFICE = 8, 2  # points whose machine code is looked at before they are offered, until so many are
MOST_SPILLED = 64  # bytes of a thread: with a few of them points were the fastest still


@dataclass(frozen=True)
class HopperW4:
    """A gemm by one of two kernels, of few rows or of large tiles.

    Attributes:
        problem, target: what is done, and where.
        plan: the product as the kernel for few rows sees it.
        large: as the other one does; None where it is no way to do it.
    """

    problem: Problem
    target: Target
    plan: Plan
    large: tiles.Tiles | None

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The points of the kernel for few rows."""
        return points(self.plan, self.target)

    @cached_property
    def tiled(self) -> list[Schedule]:
        """Schedules of the kernel of large tiles."""
        return self.large.schedules() if self.large else []

    def schedules(self) -> Iterable[Schedule]:
        found = [*map(Schedule.of_point, self.points), *self.tiled]
        ranked = sorted(found, key=lambda s: float(predict_us(self.work(s), self.target)))
        first = next((s for s in ranked if "ready" not in dict(s.knobs)), None)  # who measures nothing takes it: no more memory
        return self._spilling_last(sorted(ranked, key=lambda s: s is not first))

    def _spilling_last(self, ranked: Iterable[Schedule]) -> Iterable[Schedule]:
        """The points in their order, but that those come last, of the first ones, whose registers do not suffice by far: no
        rate that ranks them tells. They are looked at until a few suffice."""
        late: list[Schedule] = []
        kept = 0
        for at, schedule in enumerate(ranked):
            if kept < SUFFICE and at < LOOKED_AT and "tile_m" not in dict(schedule.knobs):
                built = self.machine_code(Form(self.plan, schedule.point(Point)))
                if module.needs(built.kernel).spills > MOST_SPILLED:
                    late.append(schedule)
                    continue
            kept += 1
            yield schedule
        yield from late

    def _large(self, schedule: Schedule) -> tiles.Tiles | None:
        """The way of large tiles, if the schedule is one of its points."""
        return self.large if "tile_m" in dict(schedule.knobs) else None

    def work(self, schedule: Schedule) -> Work:
        large = self._large(schedule)
        if large is not None:
            return large.work(schedule.point(tiles.Point))
        return work(Form(self.plan, schedule.point(Point)), self.target)

    def compile(self, schedule: Schedule) -> None:
        large = self._large(schedule)
        if large is not None:
            large.machine_code(large.form(schedule.point(tiles.Point)))
        else:
            self.machine_code(Form(self.plan, schedule.point(Point)))

    def machine_code(self, form: Form) -> module.Built:
        """The kernel of a form for few rows."""
        return compiled(form, tuple(t.dtype for t in self.problem.types), self.target.index)

    def build(self, schedule: Schedule) -> Kernel:
        large = self._large(schedule)
        if large is not None:
            return large.build(CANDIDATE.name, schedule)
        problem, target, plan = self.problem, self.target, self.plan
        form = Form(plan, schedule.point(Point))
        built = self.machine_code(form)
        sides = [int(n[1:]) for n in built.names if n[0] == "p" and n[1:].isdigit()]
        w, count = plan.weights, len(problem.types)
        read = [plan.x, *range(count, count + w.tensors), *sides]  # packed ones are numbered after the problem's own

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            packed = packed_weights(w.values(weights), w, plan.operand)
            torch.cuda.synchronize(target.index)  # a launch reads weights before what is ahead of it has ended
            constant = {**weights, **{count + i: t for i, t in enumerate(packed)}}
            launch = module.launcher(built.kernel, (form.grid,), target.index, built.numbers)
            return caller(read, problem.outputs, launch, constant, target)

        return Kernel(
            CANDIDATE.name,
            schedule,
            prepare,
            packed_bytes=plan.packed_bytes,
            releasable=w.sources - frozenset(sides),
            **vars(module.needs(built.kernel)),
        )


def plan(problem: Problem, target: Target) -> HopperW4:
    if "sm_90" not in target.features:
        raise Unsupported("clusters, wgmma and dependent launches as they are used here are Hopper's (sm_90)")
    if not module.installed():
        raise Unsupported(module.INSTALL)
    few = plan_of(problem)
    found = HopperW4(problem, target, few, tiles.tiles_of(problem, target, few))
    if found.points or found.tiled:
        return found
    if few.second is not None:
        raise Unsupported(f"{few.rows} rows are many for stores that read both halves of the columns together")
    if few.operand.bits == 8:
        raise Unsupported(
            f"{few.rows} rows of 8 bits are many: that takes 4-bit weights, or s8 by integers, and one result in 16 bits"
        )
    raise Unsupported(
        f"{few.rows} rows are many: that takes 4-bit weights rounded once they are scaled, and one result in 16 bits"
    )


CANDIDATE = Candidate("hopper_w4", GEMM, GPU, 3, plan, packing_knobs=("ready",))
