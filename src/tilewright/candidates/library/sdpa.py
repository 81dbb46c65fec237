"""torch.nn.functional.scaled_dot_product_attention: flash kernels on a GPU, a fused loop on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from tilewright.candidates.library._around import rest_of, side
from tilewright.dtype import BF16, F16, F32, F64, PRED, dtype
from tilewright.hardware.target import Target
from tilewright.ir.anchor import acc_of, operands_of, stores_of
from tilewright.schedule.candidate import ATTENTION, CPU, GPU, Candidate, FixedPlan, Kernel, Refusal, Runner, Schedule
from tilewright.schedule.problem import AttentionProblem


def _build(problem: AttentionProblem, schedule: Schedule) -> Kernel:
    op, node = problem.op, problem.node
    storage, result = dtype(str(schedule["compute"])).to_torch(), problem.acc.dtype.to_torch()
    finish = rest_of(stores_of(node), acc_of(node))
    grouped = problem.operands[0].shape[1] != problem.operands[1].shape[1]
    fully_masked = 0.0 if op.zero_masked_rows else float("nan")
    as_mask = None if len(problem.operands) < 4 or problem.operands[3].dtype is PRED else storage

    def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
        q, k, v = (side(o, weights, lambda t: t.to(storage)) for o in operands_of(node)[:3])
        mask = None
        if len(problem.operands) == 4:
            mask = side(operands_of(node)[3], weights, lambda t: t if as_mask is None else t.to(as_mask))

        def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            visible = None if mask is None else mask(sources)
            product = torch.nn.functional.scaled_dot_product_attention(
                q(sources),
                k(sources),
                v(sources),
                attn_mask=visible,
                is_causal=op.causal != "no",
                scale=op.scale,
                enable_gqa=grouped,
            ).to(result)
            if visible is not None:
                # What a row that sees no key gives depends on the kernel the library picks: say it ourselves.
                sees = visible if visible.dtype == torch.bool else visible != float("-inf")
                product = torch.where(sees.any(-1, keepdim=True), product, fully_masked)
            return finish(product, sources)

        return run

    return Kernel(CANDIDATE.name, schedule, prepare)


def plan(problem: AttentionProblem, target: Target) -> FixedPlan | Refusal:
    """Takes attentions that scaled_dot_product_attention can express, a point for each type it computes in; else a refusal."""
    op = problem.op
    if op.scores is not None or op.weights is not None:
        return Refusal("scaled_dot_product_attention cannot round its scores or weights on the way")
    if op.causal == "lower" and problem.operands[0].shape[2] != problem.operands[1].shape[2]:
        return Refusal("scaled_dot_product_attention aligns a causal mask to the first key, not the last")
    if op.causal != "no" and len(problem.operands) == 4:
        return Refusal("scaled_dot_product_attention takes a mask or is causal, not both")
    q = problem.operands[0].dtype
    if q not in (F64, F32, BF16, F16):
        return Refusal(f"scaled_dot_product_attention does not take {q}")
    found = [Schedule.of(compute=q.name)]
    if q in (BF16, F16) and target.kind == "cpu":
        found.append(Schedule.of(compute="f32"))
    return FixedPlan(found, partial(_build, problem))


CANDIDATE = Candidate("sdpa", ATTENTION, CPU | GPU, 10, plan)
