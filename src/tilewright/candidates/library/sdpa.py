"""torch.nn.functional.scaled_dot_product_attention: flash kernels on a GPU, a fused loop on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.candidates.library._around import rest_of, side
from tilewright.dtype import BF16, F16, F32, F64, PRED, dtype
from tilewright.hardware.target import Target
from tilewright.ir.anchor import acc_of, operands_of, stores_of
from tilewright.schedule.candidate import ATTENTION, CPU, GPU, Candidate, FixedPlan, Kernel, Refusal, Runner, Schedule
from tilewright.schedule.problem import AttentionProblem

FEW_QUERIES = 64  # rows of a head's queries that may be given as heads of one query each
CUDNN_FIRST = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def _build(problem: AttentionProblem, schedule: Schedule) -> Kernel:
    op, node = problem.op, problem.node
    knobs = dict(schedule.knobs)
    storage, result = dtype(str(schedule["compute"])).to_torch(), problem.acc.dtype.to_torch()
    finish = rest_of(stores_of(node), acc_of(node))
    (batch, heads, queries, _), key_heads = problem.operands[0].shape, problem.operands[1].shape[1]
    as_heads, cudnn = bool(knobs.get("query_heads")), knobs.get("prefer") == "cudnn"
    grouped = heads * (queries if as_heads else 1) != key_heads
    fully_masked = 0.0 if op.zero_masked_rows else float("nan")
    as_mask = None if len(problem.operands) < 4 or problem.operands[3].dtype is PRED else storage

    def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
        q, k, v = (side(o, weights, lambda t: t.to(storage)) for o in operands_of(node)[:3])
        mask = None
        if len(problem.operands) == 4:
            mask = side(operands_of(node)[3], weights, lambda t: t if as_mask is None else t.to(as_mask))

        def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            visible, query, values = None if mask is None else mask(sources), q(sources), v(sources)
            if as_heads:
                query = query.reshape(batch, heads * queries, 1, -1)
                if visible is not None:
                    visible = _rows_as_heads(visible, heads, queries)
            with _backends(cudnn=cudnn):
                product = torch.nn.functional.scaled_dot_product_attention(
                    query,
                    k(sources),
                    values,
                    attn_mask=visible,
                    is_causal=op.causal != "no",
                    scale=op.scale,
                    enable_gqa=grouped,
                ).to(result)
            if visible is not None:
                # What a row that sees no key gives depends on the kernel the library picks: say it ourselves.
                sees = visible if visible.dtype == torch.bool else visible != float("-inf")
                blind: float | torch.Tensor = fully_masked
                if op.equal_masked_rows:
                    mean = values.mean(-2, keepdim=True, dtype=torch.float32).to(result)
                    blind = mean.repeat_interleave(product.shape[1] // key_heads, 1)
                product = torch.where(sees.any(-1, keepdim=True), product, blind)
            return finish(product.reshape(batch, heads, queries, -1), sources)

        return run

    return Kernel(CANDIDATE.name, schedule, prepare)


def _backends(*, cudnn: bool) -> AbstractContextManager[object]:
    """cuDNN's kernel first where it takes the attention, then torch's others; or torch's own order."""
    return sdpa_kernel(list(CUDNN_FIRST), set_priority=True) if cudnn else nullcontext()


def _rows_as_heads(mask: torch.Tensor, heads: int, queries: int) -> torch.Tensor:
    """A mask over [B, H, S, T] as one over [B, H * S, 1, T]; it is copied where it differs by head or query."""
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    batch, of_heads, of_queries, keys = mask.shape
    if of_heads == of_queries == 1:
        return mask
    return mask.expand(batch, heads, queries, keys).reshape(batch, heads * queries, 1, keys)


def plan(problem: AttentionProblem, target: Target) -> FixedPlan | Refusal:
    """Take attentions that scaled_dot_product_attention can express, a point for each type it computes in; else a refusal."""
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
    if target.kind != "cpu":
        return FixedPlan(_gpu_points(problem), partial(_build, problem))
    found = [Schedule.of(compute=q.name)]
    if q in (BF16, F16):
        found.append(Schedule.of(compute="f32"))
    return FixedPlan(found, partial(_build, problem))


def _gpu_points(problem: AttentionProblem) -> list[Schedule]:
    """The forms in which torch's kernels may be fastest, best guess first.

    Queries of a group that shares keys arrive as rows of one head. Kernels that split the keys do so for heads of one query, as
    decoding has them: four rows of eight heads over 32,768 keys took 381 µs on an H200, one of 32 heads 38.
    """
    op, (q, k) = problem.op, problem.operands[:2]
    plain = Schedule.of(compute=q.dtype.name)
    if q.dtype not in (BF16, F16):
        return [plain]  # whose kernels take no groups, and would have keys and values repeated
    cudnn = Schedule.of(compute=q.dtype.name, prefer="cudnn")
    if op.causal != "no" or not 1 < q.shape[2] <= FEW_QUERIES or k.shape[2] <= q.shape[2]:
        return [plain, cudnn]
    heads = [Schedule((*s.knobs, ("query_heads", True))) for s in (plain, cudnn)]
    return [*heads, plain, cudnn]


CANDIDATE = Candidate("sdpa", ATTENTION, CPU | GPU, 10, plan)
