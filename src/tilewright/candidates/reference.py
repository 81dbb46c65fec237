"""The reference: evaluates a problem with the oracle, operation by operation. Exact for integers, refuses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch

from tilewright.hardware.target import Target
from tilewright.ir.evaluate import evaluator
from tilewright.ir.graph import Node
from tilewright.ir.ops import Param
from tilewright.schedule.candidate import ATTENTION, CPU, FUSION, GEMM, GPU, LAST_RESORT, Candidate, FixedPlan, Kernel, Schedule
from tilewright.schedule.problem import AnyProblem, FusionProblem


def _build(problem: AnyProblem, schedule: Schedule) -> Kernel:
    several = len(problem.outputs) > 1 and not isinstance(problem, FusionProblem)  # results of one node
    roots = problem.roots if isinstance(problem, FusionProblem) else (problem.node,)
    evaluate = evaluator(roots, [Node(Param(i, t)) for i, t in enumerate(problem.types)])

    def run(sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        values = evaluate(sources)
        return cast("Sequence[torch.Tensor]", values[0] if several else values)

    return Kernel(CANDIDATE.name, schedule, lambda weights: run)


def plan(problem: AnyProblem, target: Target) -> FixedPlan:
    return FixedPlan((Schedule(),), partial(_build, problem))


CANDIDATE = Candidate("reference", GEMM | ATTENTION | FUSION, CPU | GPU, LAST_RESORT, plan, ranks="any")
