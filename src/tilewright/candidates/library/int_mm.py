"""torch._int_mm: oneDNN's integer product on a CPU, cuBLASLt's on a GPU; s8 x s8 -> s32, one matrix at a time.

4-bit signed codes travel one to a byte, so they are s8 to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.candidates.library._around import flat, one_matrix, side, stores
from tilewright.dtype import S4, S8, S32, U8
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import CPU, GEMM, GPU, Candidate, Kernel, Refusal, Runner, Schedule
from tilewright.schedule.problem import Problem


@dataclass(frozen=True)
class Plan:
    problem: Problem
    target: Target

    def schedules(self) -> tuple[Schedule]:
        return (Schedule(),)

    def build(self, schedule: Schedule) -> Kernel:
        problem, target = self.problem, self.target
        batch = problem.acc.shape[:-2]
        finish = stores(problem, problem.acc.dtype)
        one_rhs = one_matrix(problem)
        multiply = torch.ops.aten._int_mm

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            lhs = side(problem.op.lhs, weights)
            rhs = side(problem.op.rhs, weights, _along_k if target.kind == "cuda" else lambda t: t)

            def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                a, b = lhs(sources), rhs(sources)
                if one_rhs:
                    product = multiply(_plain(a.reshape(problem.batch * problem.M, problem.K)), _plain(b))
                else:
                    a, b = flat(a, batch), flat(b, batch)
                    product = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=torch.int32, device=a.device)
                    for i in range(a.shape[0]):
                        multiply.out(_plain(a[i]), _plain(b[i]), out=product[i])
                return finish(product.reshape(problem.acc.shape), sources)

            return run

        scratch = problem.acc.size_bytes
        return Kernel(CANDIDATE.name, schedule, prepare, workspace_bytes=scratch)


def _along_k(t: torch.Tensor) -> torch.Tensor:
    """The right operand with K contiguous, the one layout cuBLASLt takes for every extent."""
    return t if t.stride(-2) == 1 else t.transpose(-1, -2).contiguous().transpose(-1, -2)


def _plain(t: torch.Tensor) -> torch.Tensor:
    """The matrix itself if its rows (or columns) lie apart in memory, else a copy.

    oneDNN misreads any other strides without a word: repeated rows, overlapping ones, and the stride of an axis of one
    element, which torch leaves arbitrary and calls contiguous.
    """
    (rows, columns), (down, across) = t.shape, t.stride()
    apart = down >= max(columns, 1) if across == 1 else down == 1 and across >= max(rows, 1)
    if t.is_cuda:  # cuBLASLt: 16-byte aligned rows
        apart = apart and max(down, across) % 16 == 0 and t.data_ptr() % 16 == 0
    return t if apart else t.clone(memory_format=torch.contiguous_format)


def plan(problem: Problem, target: Target) -> Plan | Refusal:
    if problem.acc.dtype is not S32:
        return Refusal(f"torch._int_mm accumulates in s32, not {problem.acc.dtype}")
    unsigned = problem.lhs.dtype is U8 and target.kind == "cpu"  # oneDNN's own form; cuBLASLt has none
    if not ({problem.rhs.dtype} | ({problem.lhs.dtype} if not unsigned else set())) <= {S4, S8}:
        return Refusal(f"torch._int_mm multiplies s8 by s8, not {problem.lhs.dtype} by {problem.rhs.dtype}")
    if target.kind == "cpu" and any(unit.instruction == "vpmaddwd ymm" for unit in target.chip.units):  # 1 Gop/s on Zen 1
        return Refusal("torch._int_mm multiplies one number at a time on processors without AVX-512 or VNNI")
    if target.kind == "cuda" and (problem.M <= 16 or problem.K % 8 or problem.N % 8):
        # restrictions that torch's CUDA implementation checks and raises on
        return Refusal("torch._int_mm on CUDA needs M > 16 and K and N in multiples of 8")
    return Plan(problem, target)


CANDIDATE = Candidate("int_mm", GEMM, CPU | GPU, 20, plan)
