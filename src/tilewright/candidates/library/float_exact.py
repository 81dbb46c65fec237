"""Integer products through the float unit, exactly: where an integer kernel is missing or bad.

Sums of products stay integers below 2**24 (f32) or 2**53 (f64), where floats are exact, if K is cut in blocks short enough;
blocks are added as integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.candidates.library._around import side, stores
from tilewright.dtype import F32, F64, DType, dtype
from tilewright.hardware.target import Target
from tilewright.ir.ops.functions import narrow_integer
from tilewright.schedule.candidate import CPU, GEMM, GPU, Candidate, Kernel, Refusal, Runner, Schedule
from tilewright.schedule.problem import Problem

EXACT = {F32: 1 << 24, F64: 1 << 53}
SHORTEST_BLOCK = 64


def block_k(problem: Problem, compute: DType) -> int:
    """The longest K whose sums are exact in `compute`: its integer range over the largest product."""
    a, b = problem.lhs.dtype, problem.rhs.dtype
    largest = max(-int(a.min), int(a.max)) * max(-int(b.min), int(b.max))
    return EXACT[compute] // max(largest, 1)


@dataclass(frozen=True)
class Plan:
    problem: Problem
    exact: tuple[DType, ...]

    def schedules(self) -> list[Schedule]:
        return [Schedule.of(compute=d.name) for d in self.exact]

    def build(self, schedule: Schedule) -> Kernel:
        problem = self.problem
        compute = dtype(str(schedule["compute"]))
        storage = compute.to_torch()
        length = block_k(problem, compute)
        finish = stores(problem, problem.acc.dtype)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            lhs = side(problem.op.lhs, weights, lambda t: t.to(storage))
            rhs = side(problem.op.rhs, weights, lambda t: t.to(storage))

            def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                a, b = lhs(sources), rhs(sources)
                total = torch.matmul(a[..., :length], b[..., :length, :]).to(torch.int64)
                for k in range(length, problem.K, length):
                    total += torch.matmul(a[..., k : k + length], b[..., k : k + length, :]).to(torch.int64)
                return finish(narrow_integer(total, problem.acc.dtype), sources)

            return run

        sides = (problem.op.lhs, problem.op.rhs)
        return Kernel(
            CANDIDATE.name, schedule, prepare, workspace_bytes=sum(compute.size_bytes(s.tensor.elements) for s in sides)
        )


def plan(problem: Problem, target: Target) -> Plan | Refusal:
    if not problem.acc.dtype.is_integer:
        return Refusal("float_exact is for integer products")
    shortest = min(SHORTEST_BLOCK, max(problem.K, 1))
    exact = tuple(d for d in (F32, F64) if block_k(problem, d) >= shortest)
    if not exact:
        return Refusal(f"products of {problem.lhs.dtype} and {problem.rhs.dtype} exceed what float64 sums exactly")
    return Plan(problem, exact)


CANDIDATE = Candidate("float_exact", GEMM, CPU | GPU, 40, plan)
