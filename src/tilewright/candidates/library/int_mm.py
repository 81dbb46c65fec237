"""torch._int_mm: oneDNN's integer product on a CPU, cuBLASLt's on a GPU; s8 x s8 -> s32, one matrix at a time.

4-bit signed codes travel one to a byte, so they are s8 to it.
"""

from __future__ import annotations

from functools import partial

import torch

from tilewright.candidates.library._around import flat, kernel_of_call, one_matrix
from tilewright.dtype import S4, S8, S32, U8
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import CPU, GEMM, GPU, Candidate, FixedPlan, Kernel, Refusal, Schedule
from tilewright.schedule.problem import Problem


def _build(problem: Problem, target: Target, schedule: Schedule) -> Kernel:
    batch, one_rhs = problem.acc.shape[:-2], one_matrix(problem)

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if one_rhs:
            rows = a.reshape(problem.batch * problem.M, problem.K)
            return torch.ops.aten._int_mm(_plain(rows), _plain(b)).reshape(problem.acc.shape)
        a, b = flat(a, batch), flat(b, batch)
        product = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=torch.int32, device=a.device)
        for i in range(a.shape[0]):
            torch.ops.aten._int_mm.out(_plain(a[i]), _plain(b[i]), out=product[i])
        return product.reshape(problem.acc.shape)

    rhs = _k_contiguous if target.kind == "cuda" else lambda t: t
    return kernel_of_call(CANDIDATE.name, schedule, problem, multiply, rhs=rhs, workspace_bytes=problem.acc.size_bytes)


def _k_contiguous(t: torch.Tensor) -> torch.Tensor:
    """The right operand with K contiguous, the one layout cuBLASLt takes for every extent."""
    return t if t.stride(-2) == 1 else t.transpose(-1, -2).contiguous().transpose(-1, -2)


def _plain(t: torch.Tensor) -> torch.Tensor:
    """The matrix itself if its rows (or columns) lie apart in memory, else a copy.

    oneDNN misreads any other strides without a word: repeated rows, overlapping ones, the stride of an axis of one element,
    which torch leaves arbitrary and calls contiguous, and those by which a small matrix reaches past 2^31 bytes.
    """
    (rows, columns), (down, across) = t.shape, t.stride()
    apart = down >= max(columns, 1) if across == 1 else down == 1 and across >= max(rows, 1)
    if t.is_cuda:  # cuBLASLt: 16-byte aligned rows
        apart = apart and max(down, across) % 16 == 0 and t.data_ptr() % 16 == 0
    else:
        apart = apart and (rows - 1) * down + (columns - 1) * across < 1 << 31
    return t if apart else t.clone(memory_format=torch.contiguous_format)


def plan(problem: Problem, target: Target) -> FixedPlan | Refusal:
    """Take s8 x s8 products into s32, and u8 x s8 on a CPU, of the shapes that torch._int_mm has; else a refusal."""
    if problem.acc.dtype is not S32:
        return Refusal(f"torch._int_mm accumulates in s32, not {problem.acc.dtype}", "inapplicable")
    unsigned = problem.lhs.dtype is U8 and target.kind == "cpu"  # oneDNN's own form; cuBLASLt has none
    if not ({problem.rhs.dtype} | ({problem.lhs.dtype} if not unsigned else set())) <= {S4, S8}:
        return Refusal(f"torch._int_mm multiplies s8 by s8, not {problem.lhs.dtype} by {problem.rhs.dtype}", "inapplicable")
    if target.kind == "cpu" and any(unit.instruction == "vpmaddwd ymm" for unit in target.chip.units):  # 1 Gop/s on Zen 1
        return Refusal("torch._int_mm multiplies one number at a time on processors without AVX-512 or VNNI")
    if target.kind == "cuda" and (problem.M <= 16 or problem.K % 8 or problem.N % 8):
        # restrictions that torch's CUDA implementation checks and raises on
        return Refusal("torch._int_mm on CUDA needs M > 16 and K and N in multiples of 8")
    return FixedPlan((Schedule(),), partial(_build, problem, target))


CANDIDATE = Candidate("int_mm", GEMM, CPU | GPU, 20, plan)
