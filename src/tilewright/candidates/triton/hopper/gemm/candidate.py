"""Gemms on Hopper: warp-specialised, persistent, fed and emptied by TMA (`_kernel.py`)."""

from __future__ import annotations

from tilewright.candidates.triton.hopper.arch import require
from tilewright.candidates.triton.hopper.gemm.kernels import Plan
from tilewright.candidates.triton.hopper.gemm.plan import plan_of
from tilewright.candidates.triton.hopper.gemm.space import has_tiles
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import GEMM, GPU, Candidate, Unsupported
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


CANDIDATE = Candidate("hopper", GEMM, GPU, 4, plan, packing_knobs=("vector_store",))
