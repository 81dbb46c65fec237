"""The reference: evaluates a problem with the oracle, operation by operation. Exact for integers, refuses nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch

from tilewright.hardware.target import Target
from tilewright.ir.evaluate import evaluator
from tilewright.ir.graph import Node
from tilewright.ir.ops import Param
from tilewright.schedule.candidate import CPU, GPU, LAST_RESORT, Kernel, Runner
from tilewright.schedule.problem import AnyProblem, FusionProblem, ProblemKind
from tilewright.schedule.schedule import Schedule


class Reference:
    name = "reference"
    kinds = frozenset[ProblemKind]({"gemm", "attention", "fusion"})
    devices = CPU | GPU
    preference = LAST_RESORT

    def refuse(self, problem: AnyProblem, target: Target) -> str | None:
        return None

    def schedules(self, problem: AnyProblem, target: Target) -> Iterable[Schedule]:
        return (Schedule(),)

    def build(self, problem: AnyProblem, schedule: Schedule, target: Target) -> Kernel:
        several = len(problem.outputs) > 1 and not isinstance(problem, FusionProblem)  # results of one node
        roots = problem.roots if isinstance(problem, FusionProblem) else (problem.node,)
        evaluate = evaluator(roots, [Node(Param(i, t)) for i, t in enumerate(problem.types)])

        def run(sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            values = evaluate(sources)
            return cast("Sequence[torch.Tensor]", values[0] if several else values)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            return run

        return Kernel(self.name, schedule, prepare)


CANDIDATE = Reference()
