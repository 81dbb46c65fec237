"""Gemms on Hopper: warp-specialised, persistent, fed and emptied by TMA (`_kernel.py`)."""

from __future__ import annotations

from tilewright.candidates.triton.hopper.arch import require
from tilewright.candidates.triton.hopper.gemm.kernels import Plan, code_of
from tilewright.candidates.triton.hopper.gemm.plan import plan_of
from tilewright.candidates.triton.hopper.gemm.space import has_tiles
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import GEMM, GPU, Candidate, Ranged, Schedule, Unsupported
from tilewright.schedule.problem import Problem


def plan(problem: Problem, target: Target) -> Plan:
    """The plan of a gemm on an `sm_90` target with Triton installed.

    Raises:
        Unsupported: the reason why there is none.
    """
    require(target)
    found = Plan(plan_of(problem, target))
    if not has_tiles(found.gemm):
        raise Unsupported("no tile fits shared memory")
    return found


def ranged(problem: Problem, target: Target, schedule: Schedule) -> Ranged:
    """A kernel that leaves extents open which the problem leaves open.

    Raises:
        Unsupported: the reason why there is none.
    """
    require(target)
    return Plan(plan_of(problem, target)).ranged(schedule)


CANDIDATE = Candidate("hopper", GEMM, GPU, 4, plan, packing_knobs=("vector_store",), ranged=ranged, code_of=code_of)
