"""oneDNN with the weight reordered once into its own layout (torch's mkldnn operators); CPU, f32 and bf16, constant rhs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from tilewright.candidates.library._around import side, stores
from tilewright.dtype import BF16, F32
from tilewright.hardware.target import Target
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param
from tilewright.schedule.candidate import Kernel, Runner
from tilewright.schedule.problem import Problem, ProblemKind
from tilewright.schedule.schedule import Schedule


def _constant(root: Node, problem: Problem) -> bool:
    return all(problem.weights[n.op.index] for n in toposort((root,)) if isinstance(n.op, Param))


class OneDnn:
    name = "onednn"
    kinds = frozenset[ProblemKind]({"gemm"})
    preference = 10

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if target.kind != "cpu":
            return "oneDNN runs on CPUs"
        if not torch.backends.mkldnn.is_available():
            return "this torch was built without oneDNN"
        pair = {problem.lhs.dtype, problem.rhs.dtype}
        if pair not in ({F32}, {BF16}) or problem.acc.dtype is not F32:
            return f"oneDNN's prepacked linear takes f32 or bf16, not {problem.lhs.dtype} x {problem.rhs.dtype}"
        if pair == {BF16} and problem.first_conversion() is not BF16:
            return "oneDNN's prepacked bf16 linear rounds to bf16, and a store reads the f32 accumulator"
        if len(problem.op.rhs.shape) != 2 or not _constant(problem.op.rhs, problem):
            return "the right operand is not one constant matrix, so there is nothing to pack once"
        if not problem.M or not problem.N or not problem.K:
            return "an extent is zero"
        return None

    def schedules(self, problem: Problem, target: Target) -> Iterable[Schedule]:
        return (Schedule.of(prepacked=True),)

    def build(self, problem: Problem, schedule: Schedule, target: Target) -> Kernel:
        given = problem.lhs.dtype
        finish = stores(problem, given)
        rows = problem.batch * problem.M

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            lhs = side(problem.op.lhs, weights)
            matrix = side(problem.op.rhs, weights)(())
            packed = torch.ops.mkldnn._reorder_linear_weight(matrix.t().contiguous(), rows)
            linear = torch.ops.mkldnn._linear_pointwise

            def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                product = linear(lhs(sources).contiguous(), packed, None, "none", [], "")
                return finish(product, sources)

            return run

        return Kernel(self.name, schedule, prepare, packed_bytes=given.size_bytes(problem.K * problem.N))


CANDIDATE = OneDnn()
