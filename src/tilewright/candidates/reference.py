"""The reference: evaluates the gemm or attention with the oracle. Slow, exact for integers, refuses nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch

from tilewright.hardware.target import Target
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.schedule.candidate import LAST_RESORT, Kernel, Runner
from tilewright.schedule.problem import AnyProblem, ProblemKind
from tilewright.schedule.schedule import Schedule


class Reference:
    name = "reference"
    kinds = frozenset[ProblemKind]({"gemm", "attention"})
    preference = LAST_RESORT

    def refuse(self, problem: AnyProblem, target: Target) -> str | None:
        return None

    def schedules(self, problem: AnyProblem, target: Target) -> Iterable[Schedule]:
        return (Schedule(),)

    def build(self, problem: AnyProblem, schedule: Schedule, target: Target) -> Kernel:
        node = problem.node
        several = len(problem.outputs) > 1

        def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            value = evaluate_nodes((node,), dict(zip(node.src, sources, strict=True)))[0]
            return list(cast("tuple[torch.Tensor, ...]", value)) if several else [cast("torch.Tensor", value)]

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            return run

        return Kernel(self.name, schedule, prepare)


CANDIDATE = Reference()
