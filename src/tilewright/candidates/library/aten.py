"""torch.matmul: MKL and oneDNN on a CPU, cuBLAS on a GPU; floats only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.candidates.library._around import flat, releasable, side, stores
from tilewright.dtype import BF16, F16, F32, F64, DType, dtype
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import CPU, GEMM, GPU, Candidate, Kernel, Refusal, Runner, Schedule
from tilewright.schedule.problem import Problem


@dataclass(frozen=True)
class Plan:
    problem: Problem
    target: Target

    def schedules(self) -> list[Schedule]:
        problem = self.problem
        widest = F64 if problem.acc.dtype is F64 else F32
        found = [Schedule.of(compute=widest.name)]
        a, b = problem.lhs.dtype, problem.rhs.dtype
        if a is b and a in (BF16, F16) and widest is F32:
            if self.target.kind == "cuda":
                found.insert(0, Schedule.of(compute=a.name, out="f32"))
            # A 16-bit product leaves torch rounded to 16 bits: allowed when that is what every store does first.
            if problem.first_conversion() is a:
                found.insert(0, Schedule.of(compute=a.name))
        return found

    def build(self, schedule: Schedule) -> Kernel:
        problem = self.problem
        compute = dtype(str(schedule["compute"]))
        storage = compute.to_torch()
        knobs = dict(schedule.knobs)
        multiply = _wide_product if "out" in knobs else torch.matmul
        # A product in f32 is the accumulator; a narrow one is already the converted one.
        given = compute if compute.bits < 32 and "out" not in knobs else problem.acc.dtype
        finish = stores(problem, given)
        narrow = given.to_torch()

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            lhs = side(problem.op.lhs, weights, lambda t: t.to(storage), storage)
            rhs = side(problem.op.rhs, weights, lambda t: t.to(storage), storage)

            def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                return finish(multiply(lhs(sources), rhs(sources)).to(narrow), sources)

            return run

        packed = _converted_bytes(problem, compute)
        return Kernel(CANDIDATE.name, schedule, prepare, packed_bytes=packed, releasable=releasable(problem))


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


def plan(problem: Problem, target: Target) -> Plan | Refusal:
    if not problem.acc.dtype.is_float:
        return Refusal(f"torch.matmul has no {problem.lhs.dtype} x {problem.rhs.dtype} product into {problem.acc.dtype}")
    return Plan(problem, target)


CANDIDATE = Candidate("aten", GEMM, CPU | GPU, 20, plan, packing_knobs=("compute",))
