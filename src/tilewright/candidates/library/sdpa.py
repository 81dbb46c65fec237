"""torch.nn.functional.scaled_dot_product_attention: flash kernels on a GPU, a fused loop on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from tilewright.candidates.library._around import side
from tilewright.dtype import BF16, F16, F32, F64, PRED, dtype
from tilewright.hardware.target import Target
from tilewright.ir.anchor import acc_of, operands_of, stores_of
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param
from tilewright.schedule.candidate import ATTENTION, CPU, GPU, Candidate, Kernel, Refusal, Runner, Schedule
from tilewright.schedule.problem import AttentionProblem


@dataclass(frozen=True)
class Plan:
    problem: AttentionProblem
    target: Target

    def schedules(self) -> list[Schedule]:
        q = self.problem.operands[0].dtype
        found = [Schedule.of(compute=q.name)]
        if q in (BF16, F16) and self.target.kind == "cpu":
            found.append(Schedule.of(compute="f32"))
        return found

    def build(self, schedule: Schedule) -> Kernel:
        problem = self.problem
        op, node = problem.op, problem.node
        storage = dtype(str(schedule["compute"])).to_torch()
        result = problem.acc.dtype.to_torch()
        acc, stores = acc_of(node), stores_of(node)
        params = [(n, n.op.index) for n in toposort(stores) if isinstance(n.op, Param)]
        grouped = problem.operands[0].shape[1] != problem.operands[1].shape[1]
        blind = 0.0 if op.zero_masked_rows else float("nan")
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
                    product = torch.where(sees.any(-1, keepdim=True), product, blind)
                bound: dict[Node, object] = {n: sources[i] for n, i in params}
                bound[acc] = product
                return cast("list[torch.Tensor]", evaluate_nodes(stores, bound))

            return run

        return Kernel(CANDIDATE.name, schedule, prepare)


def plan(problem: AttentionProblem, target: Target) -> Plan | Refusal:
    op = problem.op
    if op.scores is not None or op.weights is not None:
        return Refusal("scaled_dot_product_attention cannot round its scores or weights on the way")
    if op.causal == "lower" and problem.operands[0].shape[2] != problem.operands[1].shape[2]:
        return Refusal("scaled_dot_product_attention aligns a causal mask to the first key, not the last")
    if op.causal != "no" and len(problem.operands) == 4:
        return Refusal("scaled_dot_product_attention takes a mask or is causal, not both")
    if problem.operands[0].dtype not in (F64, F32, BF16, F16):
        return Refusal(f"scaled_dot_product_attention does not take {problem.operands[0].dtype}")
    return Plan(problem, target)


CANDIDATE = Candidate("sdpa", ATTENTION, CPU | GPU, 10, plan)
