"""oneDNN with the weight reordered once into its own layout (torch's mkldnn operators); CPU, f32 and bf16, constant rhs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.candidates.library._around import Side, rest_of_store, side, stores
from tilewright.candidates.library._post_ops import PostOps, read_post_ops
from tilewright.dtype import BF16, F32
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import CPU, GEMM, Candidate, Kernel, Refusal, Runner, Schedule
from tilewright.schedule.problem import Problem


@dataclass(frozen=True)
class Plan:
    problem: Problem
    post: PostOps

    def schedules(self) -> tuple[Schedule, ...]:
        problem, post = self.problem, self.post
        plain = Schedule.of(prepacked=True)
        does = [word for word, given in (("bias", post.bias is not None), (post.attr, post.attr != "none")) if given]
        if not does:
            return (plain,)
        fused = Schedule.of(prepacked=True, post="+".join(does))
        return (fused, plain) if problem.lhs.dtype is F32 or problem.first_conversion() is BF16 else (fused,)

    def build(self, schedule: Schedule) -> Kernel:
        problem, given = self.problem, self.problem.lhs.dtype
        post = self.post if "post" in dict(schedule.knobs) else None
        finish = stores(problem, given) if post is None else rest_of_store(problem, post.done)
        attr, algorithm = ("none", "") if post is None else (post.attr, post.algorithm)
        rows, columns = problem.batch * problem.M, problem.N

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            lhs = side(problem.op.lhs, weights)
            matrix = side(problem.op.rhs, weights)(())
            packed = torch.ops.mkldnn._reorder_linear_weight(matrix.t().contiguous(), rows)
            linear = torch.ops.mkldnn._linear_pointwise
            storage = given.to_torch()
            bias: Side | None = None
            if post is not None and post.bias is not None:
                bias = side(post.bias, weights, lambda t: t.reshape(columns).to(storage))

            def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                value = linear(lhs(sources).contiguous(), packed, bias and bias(sources), attr, [], algorithm)
                return finish(value, sources)

            return run

        return Kernel(CANDIDATE.name, schedule, prepare, packed_bytes=given.size_bytes(problem.K * problem.N))


def plan(problem: Problem, target: Target) -> Plan | Refusal:
    if not torch.backends.mkldnn.is_available():
        return Refusal("this torch was built without oneDNN")
    pair = {problem.lhs.dtype, problem.rhs.dtype}
    if pair not in ({F32}, {BF16}) or problem.acc.dtype is not F32:
        return Refusal(f"oneDNN's prepacked linear takes f32 or bf16, not {problem.lhs.dtype} x {problem.rhs.dtype}")
    post = read_post_ops(problem)
    if pair == {BF16} and post.done.dtype is not BF16 and problem.first_conversion() is not BF16:
        return Refusal("oneDNN's prepacked bf16 linear rounds to bf16, and a store reads the f32 accumulator")
    if pair == {BF16} and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Refusal("oneDNN's prepacked bf16 linear takes AVX-512, which this processor lacks")
    if len(problem.op.rhs.shape) != 2 or not problem.constant(problem.op.rhs):
        return Refusal("the right operand is not one constant matrix, so there is nothing to pack once")
    if not problem.M or not problem.N or not problem.K:
        return Refusal("an extent is zero")
    return Plan(problem, post)


CANDIDATE = Candidate("onednn", GEMM, CPU, 10, plan)
