"""torch.matmul: MKL and oneDNN on a CPU, cuBLAS on a GPU; floats only."""

from __future__ import annotations

from functools import partial

import torch

from tilewright.candidates.library._around import flat, kernel_of_call, releasable
from tilewright.dtype import BF16, F16, F32, F64, DType, dtype
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import CPU, GEMM, GPU, Candidate, FixedPlan, Kernel, Refusal, Schedule
from tilewright.schedule.problem import Problem


def _build(problem: Problem, schedule: Schedule) -> Kernel:
    compute, wide = dtype(str(schedule["compute"])), "out" in dict(schedule.knobs)
    storage = compute.to_torch()
    multiply = _wide_product if wide else torch.matmul
    # A product in f32 is the accumulator; a narrow one is already the converted one.
    given = compute if compute.bits < 32 and not wide else problem.acc.dtype
    return kernel_of_call(
        CANDIDATE.name,
        schedule,
        problem,
        lambda a, b: multiply(a, b).to(given.to_torch()),
        lhs=lambda t: t.to(storage),
        rhs=lambda t: t.to(storage),
        form=storage,
        product_dtype=given,
        packed_bytes=_converted_bytes(problem, compute),
        releasable=releasable(problem),
    )


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of 16-bit operands, left in f32 as the matrix unit accumulated it (CUDA only)."""
    if b.dim() == 2:
        rows = torch.ops.aten.mm.dtype(a.reshape(-1, a.shape[-1]), b, torch.float32)
        return rows.reshape(*a.shape[:-1], b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    product = torch.ops.aten.bmm.dtype(flat(a, batch), flat(b, batch), torch.float32)
    return product.reshape(*batch, a.shape[-2], b.shape[-1])


def _converted_bytes(problem: Problem, compute: DType) -> int:
    """Memory of weights held a second time because their operand is not the stored matrix itself."""
    total = 0
    for operand in (problem.lhs, problem.rhs):
        if operand.source is not None and problem.weights[operand.source]:
            if operand.plain and operand.stored.dtype is compute:
                continue
            total += compute.size_bytes(operand.stored.elements)
    return total


def plan(problem: Problem, target: Target) -> FixedPlan | Refusal:
    """Take products added up in floats; a point is the type that torch.matmul multiplies in. Else a refusal."""
    a, b, acc = problem.lhs.dtype, problem.rhs.dtype, problem.acc.dtype
    if not acc.is_float:
        return Refusal(f"torch.matmul has no {a} x {b} product into {acc}", "inapplicable")
    widest = F64 if acc is F64 else F32
    found = [Schedule.of(compute=widest.name)]
    if a is b and a in (BF16, F16) and widest is F32:
        if target.kind == "cuda":
            found.insert(0, Schedule.of(compute=a.name, out="f32"))
        # A 16-bit product leaves torch rounded to 16 bits: allowed when that is what every store does first.
        if problem.first_conversion() is a:
            found.insert(0, Schedule.of(compute=a.name))
    return FixedPlan(found, partial(_build, problem))


CANDIDATE = Candidate("aten", GEMM, CPU | GPU, 20, plan, packing_knobs=("compute",))
