"""Gemms on Hopper: warp-specialised, persistent, fed and emptied by TMA (`_kernel.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from tilewright.candidates.triton.hopper.gemm.form import Form
from tilewright.candidates.triton.hopper.gemm.plan import Plan, plan_of
from tilewright.candidates.triton.hopper.gemm.run import compiled, runner
from tilewright.candidates.triton.hopper.gemm.space import Point, form_of, points, work
from tilewright.candidates.triton.runtime import module
from tilewright.dtype import F8E4M3FN, F8E5M2
from tilewright.hardware.target import Target
from tilewright.ir.graph import toposort
from tilewright.ir.ops import Param
from tilewright.schedule.candidate import GEMM, GPU, Candidate, Kernel, Schedule, Unsupported
from tilewright.schedule.cost import Work
from tilewright.schedule.problem import Problem

# Hopper keeps about 14 bits of a sum of 8-bit float products (DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3.2).
SHORT_SUM_BITS = 14
MOST_TRIED = 12  # points; the ranking is better than what is left of them


@dataclass(frozen=True)
class HopperPlan:
    gemm: Plan

    @cached_property
    def points(self) -> list[Point]:
        """The most promising points."""
        return points(self.gemm)[:MOST_TRIED]

    @property
    def short(self) -> bool:
        """Sums keep few bits."""
        return self.gemm.lhs.dtype in (F8E4M3FN, F8E5M2)

    def schedules(self) -> Iterable[Schedule]:
        bits = {"acc_bits": SHORT_SUM_BITS} if self.short else {}
        return (Schedule.of_point(p, **bits) for p in self.points)

    def work(self, schedule: Schedule) -> Work:
        return work(self.gemm, schedule.point(Point))

    def compile(self, schedule: Schedule) -> None:
        self.machine_code(form_of(self.gemm, schedule.point(Point)))

    def machine_code(self, form: Form) -> module.Built:
        """A form's kernel."""
        return compiled(form, tuple(t.dtype for t in self.gemm.problem.types), self.gemm.target.index)

    def build(self, schedule: Schedule) -> Kernel:
        point = schedule.point(Point)
        form = form_of(self.gemm, point)
        built = self.machine_code(form)
        packed = [m for m in (form.plan.lhs, form.plan.rhs) if m.constant and m.source is None]
        sources = {n.op.index for n in toposort([m.root for m in packed]) if isinstance(n.op, Param)}
        return Kernel(
            CANDIDATE.name,
            schedule,
            lambda weights: runner(form, built, weights),
            workspace_bytes=8 * point.blocks * point.tile_m * point.tile_n if point.shared_tiles else 0,
            packed_bytes=sum(m.copied_bytes for m in packed),
            releasable=frozenset(sources - {int(n[1:]) for n in built.names if n[0] == "p" and n[1:].isdigit()}),
            roundoff=2.0 ** (1 - SHORT_SUM_BITS) if self.short else 0.0,
            **vars(module.needs(built.kernel)),
        )


def plan(problem: Problem, target: Target) -> HopperPlan:
    if "sm_90" not in target.features:
        raise Unsupported("wgmma and TMA as they are used here are Hopper's (sm_90)")
    if not module.installed():
        raise Unsupported(module.INSTALL)
    found = HopperPlan(plan_of(problem, target))
    if not found.points:
        raise Unsupported("no tile fits shared memory")
    return found


CANDIDATE = Candidate("hopper", GEMM, GPU, 4, plan, packing_knobs=("widened",))
