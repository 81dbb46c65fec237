"""torch._scaled_mm: cuBLASLt's 8-bit float product (Ada, Hopper and later)."""

from __future__ import annotations

from functools import partial

import torch

from tilewright.candidates.library._around import kernel_of_call, one_matrix
from tilewright.dtype import BF16, F8E4M3FN, F8E5M2, F32
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import GEMM, GPU, Candidate, FixedPlan, Kernel, Refusal, Schedule
from tilewright.schedule.problem import Problem

# Ada and Hopper keep about 14 bits of a sum of 8-bit float products, which cuBLASLt adds up in f32 every 128 along K
# (DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3.2).
SHORT_SUMS = frozenset({"sm_89", "sm_90"})
SHORT_SUM_BITS, F32_BITS = 14, 24


def _build(problem: Problem, target: Target, schedule: Schedule) -> Kernel:
    out = BF16 if schedule["out"] == "bf16" else F32
    one = torch.ones((), device=target.device)

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        rows = a.reshape(problem.batch * problem.M, problem.K).contiguous()
        return torch.ops.aten._scaled_mm(rows, b, one, one, out_dtype=out.to_torch()).reshape(problem.acc.shape)

    return kernel_of_call(
        CANDIDATE.name,
        schedule,
        problem,
        multiply,
        rhs=lambda t: t.t().contiguous().t(),  # the library wants K contiguous
        product_dtype=out,
        roundoff=2.0**-13 if schedule["acc_bits"] == SHORT_SUM_BITS else 0.0,
    )


def plan(problem: Problem, target: Target) -> FixedPlan | Refusal:
    """Take products of 8-bit floats by one matrix, K and N in multiples of 16, on chips with such a unit; else a refusal."""
    a, b = problem.lhs.dtype, problem.rhs.dtype
    if {a, b} - {F8E4M3FN, F8E5M2} or a is b is F8E5M2:
        return Refusal(f"cuBLASLt's 8-bit float product takes e4m3fn with e4m3fn or e5m2, not {a} x {b}", "inapplicable")
    if not any(f in target.features for f in ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120")):
        return Refusal(f"{target.name} has no 8-bit float unit")
    if not one_matrix(problem) or problem.K % 16 or problem.N % 16 or 0 in (problem.batch, problem.M, problem.N, problem.K):
        return Refusal("cuBLASLt's 8-bit float product takes one rhs matrix with K and N in multiples of 16")
    out = BF16 if problem.first_conversion() is BF16 else F32
    bits = SHORT_SUM_BITS if SHORT_SUMS & target.features else F32_BITS
    point = Schedule.of(out=out.name, fast_accum=False, acc_bits=bits)
    return FixedPlan((point,), partial(_build, problem, target))


CANDIDATE = Candidate("scaled_mm", GEMM, GPU, 10, plan)
