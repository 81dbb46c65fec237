"""Gemms on Hopper: warp-specialised, persistent, fed and emptied by TMA (`_kernel.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from tilewright.candidates.triton.hopper.gemm.build import compiled
from tilewright.candidates.triton.hopper.gemm.plan import Plan, plan_of
from tilewright.candidates.triton.hopper.gemm.run import runner
from tilewright.candidates.triton.hopper.gemm.space import Point, form_of, plan_for, point_of, points, work
from tilewright.candidates.triton.runtime import module
from tilewright.dtype import F8E4M3FN, F8E5M2
from tilewright.hardware.target import Target
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param
from tilewright.schedule.candidate import GEMM, GPU, Candidate, Kernel, Runner, Unsupported
from tilewright.schedule.cost import Work
from tilewright.schedule.problem import Problem
from tilewright.schedule.schedule import Schedule

# Hopper keeps about 14 bits of a sum of 8-bit float products (DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3.2).
SHORT_SUM_BITS = 14
MOST_TRIED = 12  # points; the ranking is better than what is left of them


@dataclass(frozen=True)
class HopperPlan:
    problem: Problem
    target: Target
    gemm: Plan

    @cached_property
    def points(self) -> list[Point]:
        """The most promising points."""
        return points(self.problem, self.gemm, self.target)[:MOST_TRIED]

    def schedules(self) -> Iterable[Schedule]:
        bits = {"acc_bits": SHORT_SUM_BITS} if _short(self.gemm) else {}
        return (Schedule((*p.schedule(self.gemm.tile_k).knobs, *bits.items())) for p in self.points)

    def work(self, schedule: Schedule) -> Work:
        return work(self.problem, self.gemm, point_of(schedule), self.target)

    def compile(self, schedule: Schedule) -> None:
        point = point_of(schedule)
        form = form_of(self.problem, plan_for(self.gemm, point), point)
        compiled(form, tuple(t.dtype for t in self.problem.types), self.target.index)

    def build(self, schedule: Schedule) -> Kernel:
        problem, target, point = self.problem, self.target, point_of(schedule)
        plan = plan_for(self.gemm, point)
        form = form_of(problem, plan, point)
        built = compiled(form, tuple(t.dtype for t in problem.types), target.index)
        device = torch.device(target.device)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            return runner(problem, plan, form, built, point.blocks, point.shared_tiles, weights, device)

        packed = [m for m in (plan.lhs, plan.rhs) if m.constant and m.source is None]
        side_inputs = {int(n[1:]) for n in built.names if n[0] == "p" and n[1:].isdigit()}
        return Kernel(
            CANDIDATE.name,
            schedule,
            prepare,
            workspace_bytes=8 * point.blocks * point.tile_m * point.tile_n if point.shared_tiles else 0,
            packed_bytes=sum(m.copied_bytes for m in packed),
            releasable=frozenset(i for m in packed for i in _sources(m.root) if i not in side_inputs),
            roundoff=2.0 ** (1 - SHORT_SUM_BITS) if _short(plan) else 0.0,
            **vars(module.needs(built.kernel)),
        )


def plan(problem: Problem, target: Target) -> HopperPlan:
    if "sm_90" not in target.features:
        raise Unsupported("wgmma and TMA as they are used here are Hopper's (sm_90)")
    if not module.installed():
        raise Unsupported(module.INSTALL)
    found = HopperPlan(problem, target, plan_of(problem))
    if not found.points:
        raise Unsupported("no tile fits shared memory")
    return found


def _short(plan: Plan) -> bool:
    return plan.lhs.dtype in (F8E4M3FN, F8E5M2)


def _sources(root: Node) -> Iterable[int]:
    return (n.op.index for n in toposort((root,)) if isinstance(n.op, Param))


CANDIDATE = Candidate("hopper", GEMM, GPU, 4, plan, packing_knobs=("widened",))
