"""Gemms on Hopper: warp-specialised, persistent, fed and emptied by TMA (`_kernel.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tilewright.candidates.triton.hopper.gemm.build import compiled
from tilewright.candidates.triton.hopper.gemm.plan import Plan, plan_of
from tilewright.candidates.triton.hopper.gemm.run import runner
from tilewright.candidates.triton.hopper.gemm.space import form_of, plan_for, point_of, points, work
from tilewright.candidates.triton.runtime import module
from tilewright.dtype import F8E4M3FN, F8E5M2
from tilewright.hardware.target import Target
from tilewright.ir.ops import Param
from tilewright.schedule.candidate import GPU, Kernel, Runner
from tilewright.schedule.cost import Work
from tilewright.schedule.problem import Problem, ProblemKind
from tilewright.schedule.schedule import Schedule

# Hopper keeps about 14 bits of a sum of 8-bit float products (DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3.2).
SHORT_SUM_BITS = 14
MOST_TRIED = 12  # points; the ranking is better than what is left of them


class Hopper:
    """Found by file name; see `schedule.candidate.Candidate`."""

    name = "hopper"
    kinds = frozenset[ProblemKind]({"gemm"})
    devices = GPU
    preference = 4
    packing_knobs = ("widened",)

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if "sm_90" not in target.features:
            return "wgmma and TMA as they are used here are Hopper's (sm_90)"
        if not module.installed():
            return module.INSTALL
        plan = plan_of(problem)
        if isinstance(plan, str):
            return plan
        if not points(problem, plan, target):
            return "no tile fits shared memory"
        return None

    def schedules(self, problem: Problem, target: Target) -> Iterable[Schedule]:
        plan = _plan(problem)
        found = points(problem, plan, target)[:MOST_TRIED]
        return (_with_bits(problem, p.schedule(plan.tile_k)) for p in found)

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        return work(problem, _plan(problem), point_of(schedule), target)

    def compile(self, problem: Problem, schedule: Schedule, target: Target) -> None:
        point = point_of(schedule)
        compiled(form_of(problem, plan_for(_plan(problem), point), point), tuple(t.dtype for t in problem.types))

    def build(self, problem: Problem, schedule: Schedule, target: Target) -> Kernel:
        point = point_of(schedule)
        plan = plan_for(_plan(problem), point)
        form = form_of(problem, plan, point)
        built = compiled(form, tuple(t.dtype for t in problem.types), target.index)
        needs = module.needs(built.kernel)
        device = torch.device(target.device)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            return runner(problem, plan, form, built, point.blocks, point.shared_tiles, weights, device)

        packed = [m for m in (plan.lhs, plan.rhs) if m.constant and m.source is None]
        side_inputs = {int(n[1:]) for n in built.names if n[0] == "p" and n[1:].isdigit()}
        return Kernel(
            self.name,
            schedule,
            prepare,
            workspace_bytes=8 * point.blocks * point.tile_m * point.tile_n if point.shared_tiles else 0,
            packed_bytes=sum(m.copied_bytes for m in packed),
            releasable=frozenset(i for m in packed for i in _sources(m.root) if i not in side_inputs),
            roundoff=2.0 ** (1 - SHORT_SUM_BITS) if _short(plan) else 0.0,
            registers=needs.registers,
            spills=needs.spills,
            shared_bytes=needs.shared_bytes,
        )


def _plan(problem: Problem) -> Plan:
    plan = plan_of(problem)
    assert isinstance(plan, Plan)
    return plan


def _short(plan: Plan) -> bool:
    return plan.lhs.dtype in (F8E4M3FN, F8E5M2)


def _with_bits(problem: Problem, schedule: Schedule) -> Schedule:
    short = _short(_plan(problem))
    return Schedule((*schedule.knobs, ("acc_bits", SHORT_SUM_BITS))) if short else schedule


def _sources(root: Any) -> Iterable[int]:
    from tilewright.ir.graph import toposort

    return (n.op.index for n in toposort((root,)) if isinstance(n.op, Param))


CANDIDATE = Hopper()
