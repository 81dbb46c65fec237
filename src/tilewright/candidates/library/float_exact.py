"""Integer products through the float unit, exactly: where an integer kernel is missing or bad.

Sums of products stay integers below 2**24 (f32) or 2**53 (f64), where floats are exact, if K is cut in blocks short enough;
blocks are added as integers.
"""

from __future__ import annotations

from functools import partial

import torch

from tilewright.candidates.library._around import kernel_of_call
from tilewright.dtype import F32, F64, DType, dtype
from tilewright.hardware.target import Target
from tilewright.ir.ops.functions import narrow_integer
from tilewright.schedule.candidate import CPU, GEMM, GPU, Candidate, FixedPlan, Kernel, Refusal, Schedule
from tilewright.schedule.problem import Problem

EXACT = {F32: 1 << 24, F64: 1 << 53}
SHORTEST_BLOCK = 64


def block_k(problem: Problem, compute: DType) -> int:
    """The longest K whose sums are exact in `compute`: its integer range over the largest product."""
    a, b = problem.lhs.dtype, problem.rhs.dtype
    largest = max(-int(a.min), int(a.max)) * max(-int(b.min), int(b.max))
    return EXACT[compute] // max(largest, 1)


def _build(problem: Problem, schedule: Schedule) -> Kernel:
    compute = dtype(str(schedule["compute"]))
    storage, length = compute.to_torch(), block_k(problem, compute)

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = torch.matmul(a[..., :length], b[..., :length, :]).to(torch.int64)
        for k in range(length, problem.K, length):
            total += torch.matmul(a[..., k : k + length], b[..., k : k + length, :]).to(torch.int64)
        return narrow_integer(total, problem.acc.dtype)

    return kernel_of_call(
        CANDIDATE.name,
        schedule,
        problem,
        multiply,
        lhs=lambda t: t.to(storage),
        rhs=lambda t: t.to(storage),
        workspace_bytes=sum(compute.size_bytes(s.tensor.elements) for s in (problem.op.lhs, problem.op.rhs)),
    )


def plan(problem: Problem, target: Target) -> FixedPlan | Refusal:
    """Take integer products whose blocks of K f32 or f64 sums exactly, a point for each of these types; else a refusal."""
    if not problem.acc.dtype.is_integer:
        return Refusal("float_exact is for integer products", "inapplicable")
    shortest = min(SHORTEST_BLOCK, max(problem.K, 1))
    exact = tuple(d for d in (F32, F64) if block_k(problem, d) >= shortest)
    if not exact:
        return Refusal(f"products of {problem.lhs.dtype} and {problem.rhs.dtype} exceed what float64 sums exactly")
    return FixedPlan([Schedule.of(compute=d.name) for d in exact], partial(_build, problem))


CANDIDATE = Candidate("float_exact", GEMM, CPU | GPU, 40, plan)
