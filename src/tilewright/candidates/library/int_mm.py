"""torch._int_mm: oneDNN's integer product on a CPU, cuBLASLt's on a GPU; s8 x s8 -> s32, one matrix at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from tilewright.candidates.library._around import flat, side, stores
from tilewright.dtype import S8, S32
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import Kernel, Runner
from tilewright.schedule.problem import Problem
from tilewright.schedule.schedule import Schedule


class IntMm:
    name = "int_mm"
    preference = 20

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.acc.dtype is not S32:
            return f"torch._int_mm accumulates in s32, not {problem.acc.dtype}"
        if problem.lhs.dtype is not S8 or problem.rhs.dtype is not S8:
            return f"torch._int_mm multiplies s8 by s8, not {problem.lhs.dtype} by {problem.rhs.dtype}"
        if target.kind == "cuda" and (problem.M <= 16 or problem.K % 8 or problem.N % 8):
            # restrictions that torch's CUDA implementation checks and raises on
            return "torch._int_mm on CUDA needs M > 16 and K and N in multiples of 8"
        return None

    def schedules(self, problem: Problem, target: Target) -> Iterable[Schedule]:
        return (Schedule(),)

    def build(self, problem: Problem, schedule: Schedule, target: Target) -> Kernel:
        batch = problem.acc.shape[:-2]
        finish = stores(problem, problem.acc.dtype)
        flatten_rows = len(problem.op.rhs.shape) == 2

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            lhs, rhs = side(problem.op.lhs, weights), side(problem.op.rhs, weights)

            def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                a, b = lhs(sources), rhs(sources)
                if flatten_rows:
                    product = torch.ops.aten._int_mm(a.reshape(-1, a.shape[-1]), b)
                else:
                    a, b = flat(a, batch), flat(b, batch)
                    product = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=torch.int32, device=a.device)
                    for i in range(a.shape[0]):
                        torch.ops.aten._int_mm.out(a[i], b[i], out=product[i])
                return finish(product.reshape(problem.acc.shape), sources)

            return run

        scratch = problem.acc.size_bytes
        return Kernel(self.name, schedule, prepare, workspace_bytes=scratch)


CANDIDATE = IntMm()
