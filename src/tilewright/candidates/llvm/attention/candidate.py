"""Generated CPU attention: two products and a softmax in one kernel, operands, roundings and stores as the graph has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tilewright.candidates.llvm.attention.kernel import AttentionWriter, Heads
from tilewright.candidates.llvm.expressions.vector import check
from tilewright.candidates.llvm.gemm.dots import DOTS, Choice, choose
from tilewright.candidates.llvm.gemm.nest import Blocks, Nest
from tilewright.candidates.llvm.gemm.space import ONE_THREAD_OPS
from tilewright.candidates.llvm.runtime import engine
from tilewright.candidates.llvm.runtime.scratch import give, maker, take
from tilewright.dtype import BF16, F32, DType
from tilewright.hardware.target import Chip, Target
from tilewright.ir.anchor import operands_of, stores_of
from tilewright.ir.build import broadcast
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param
from tilewright.lowering.access import Access, of_operand, of_store
from tilewright.schedule.candidate import ATTENTION, CPU, Candidate, Kernel, Runner, Schedule, Unsupported
from tilewright.schedule.problem import AttentionProblem


def heads_of(problem: AttentionProblem, target: Target) -> Heads:
    """The attention to generate.

    Raises:
        Unsupported: the sentence why there is none.
    """
    op, node = problem.op, problem.node
    q, k, v, *mask = operands_of(node)
    choice = _instruction((q.dtype, k.dtype, v.dtype), target.chip)
    if choice is None:
        raise Unsupported(f"{target.chip.name} names no instruction for f32 x f32")
    batch, heads, queries, depth = q.shape
    key_heads, keys, width = k.shape[1], k.shape[2], v.shape[3]
    if not batch * heads * queries * depth * keys * width:
        raise Unsupported("an extent is zero")
    for t in (q, k, v, *mask):
        if t.dtype.bits > 32:
            raise Unsupported(f"generated attention computes in f32, not {t.dtype}")
    inner = [r for r in (op.scores, op.weights) if r is not None]
    check((*operands_of(node), *inner, *stores_of(node)))
    stores = tuple(of_store(root) for root in stores_of(node))
    dot = choice.dot
    nv = 2 if keys > dot.lanes or width > dot.lanes else 1
    most = {1: 24, 2: 12}[nv] if dot.registers == 32 else {1: 10, 2: 5}[nv]
    mr = -(-queries // -(-queries // most))
    sources = len(problem.types)

    def nest(deep: int, columns: int, lhs: Access, rhs: Access, *, along: bool) -> Nest:
        blocks = Blocks(dot.instruction, mr, nv * dot.lanes, deep, mr, nv * dot.lanes, pack_lhs=True)
        return Nest(batch * key_heads, queries, deep, columns, choice, lhs, rhs, along, False, stores, sources, blocks)

    queries_at = of_operand(q, columns_last=True)
    seen = of_operand(broadcast(mask[0], (batch, heads, queries, keys)), columns_last=True) if mask else None
    return Heads(
        batch,
        heads,
        heads // key_heads,
        nest(depth, keys, queries_at, of_operand(k, columns_last=True), along=True),
        nest(keys, width, queries_at, of_operand(v, columns_last=True), along=False),
        op.scale,
        op.causal,
        op.zero_masked_rows,
        seen,
        None if op.scores is None else of_store(op.scores),
        None if op.weights is None else of_store(op.weights),
        problem.acc.dtype,
    )


def _instruction(operands: Sequence[DType], chip: Chip) -> Choice | None:
    """The dot instruction of both products: bf16 where that takes queries, keys and values as they are, else f32. Scores lie in
    memory as rows, which instructions on tiles do not take."""
    vectors = [u for u in chip.units if all(d.tile == 1 for d in DOTS.get(u.instruction, ()))]
    narrow = choose(BF16, BF16, F32, replace(chip, units=tuple(vectors)))
    if narrow is not None and narrow.dot.lhs is BF16 and all(t is BF16 for t in operands):
        return narrow
    return choose(F32, F32, F32, chip)


@dataclass(frozen=True)
class Plan:
    problem: AttentionProblem
    heads: Heads

    def schedules(self) -> tuple[Schedule]:
        nest = self.heads.scores
        return (Schedule.of(instruction=nest.dot.instruction, mr=nest.blocks.mr, nr=nest.nr),)

    def build(self, schedule: Schedule) -> Kernel:
        call = engine.function(module_text(self.heads))
        room = self.heads.scratch(torch.get_num_threads())
        return Kernel(CANDIDATE.name, schedule, lambda weights: _prepared(self.problem, self.heads, call), workspace_bytes=room)


def plan(problem: AttentionProblem, target: Target) -> Plan:
    engine.require()
    return Plan(problem, heads_of(problem, target))


def module_text(heads: Heads) -> str:
    """The kernel's IR for the processor at hand."""
    return AttentionWriter(heads).write().text(*engine.host())


def _prepared(problem: AttentionProblem, plan: Heads, call: Callable[..., None]) -> Runner:
    small = problem.ops <= ONE_THREAD_OPS
    operands, inner = (plan.scores.lhs, plan.scores.rhs, plan.output.rhs), (plan.mask, plan.on_scores, plan.on_weights)
    nodes: list[Node] = toposort([a.root for a in (*operands, *inner, *plan.output.stores) if a is not None])
    read = sorted({n.op.index for n in nodes if isinstance(n.op, Param)})
    first, room, threads_slot = plan.output.sources, plan.pointers - 2, plan.pointers
    blank = [0] * (plan.pointers + 2)
    makers = [maker(s.root.shape, s.root.dtype.to_torch()) for s in plan.output.stores]

    def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        args, held = blank.copy(), list[torch.Tensor]()  # copies live until the call is over
        for i in read:
            t = sources[i]
            if not t.is_contiguous():
                t = t.contiguous()
                held.append(t)
            args[i] = t.data_ptr()
        results = [make() for make in makers]
        for at, t in enumerate(results, first):
            args[at] = t.data_ptr()
        args[threads_slot] = threads = 1 if small else torch.get_num_threads()
        memory = take(plan.scratch(threads))
        args[room] = memory[0]
        call(*args)
        give(memory)
        return results

    return run


CANDIDATE = Candidate("llvm_attention", ATTENTION, CPU, 5, plan)
