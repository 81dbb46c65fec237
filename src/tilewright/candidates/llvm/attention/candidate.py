"""Generated CPU attention: two products and a softmax in one kernel, operands, roundings and stores as the graph has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from tilewright import threads
from tilewright.candidates.llvm.attention.kernel import AttentionNest, AttentionWriter
from tilewright.candidates.llvm.expressions.text import Source
from tilewright.candidates.llvm.expressions.vector import check
from tilewright.candidates.llvm.gemm.dots import DOTS, Choice, choose
from tilewright.candidates.llvm.gemm.nest import Blocks, Nest
from tilewright.candidates.llvm.gemm.space import ONE_THREAD_OPS
from tilewright.candidates.llvm.runtime import engine
from tilewright.candidates.llvm.runtime.calls import Call, bound
from tilewright.dtype import BF16, F32, DType
from tilewright.hardware.target import Chip, Target
from tilewright.ir.anchor import operands_of
from tilewright.ir.artefact import Kind
from tilewright.ir.extent import Extent, extent_at
from tilewright.ir.graph import toposort
from tilewright.ir.ops import Param
from tilewright.lowering.access import Access, of_operand, of_store
from tilewright.lowering.attention import facts_of
from tilewright.schedule.candidate import ATTENTION, CPU, Candidate, FixedPlan, Kernel, Ranged, Runner, Schedule, Unsupported
from tilewright.schedule.problem import AttentionProblem
from tilewright.schedule.recipe import CallShape


def attention_nest(problem: AttentionProblem, target: Target) -> AttentionNest:
    """The attention to generate.

    Raises:
        Unsupported: the sentence why there is none.
    """
    op, facts = problem.op, facts_of(problem, check)
    q, k, v, *_ = operands_of(problem.node)
    check((k, v))
    choice = _instruction((q.dtype, k.dtype, v.dtype), target.chip)
    if choice is None:
        raise Unsupported(f"{target.chip.name} names no instruction for f32 x f32")
    queries, keys, width = facts.queries, facts.keys, facts.width
    dot = choice.dot
    nv = 2 if width > dot.lanes or keys > dot.lanes else 1
    most = {1: 24, 2: 12}[nv] if dot.registers == 32 else {1: 10, 2: 5}[nv]
    mr = most if isinstance(queries, Extent) else -(-queries // -(-queries // most))
    sources = len(problem.types)

    def nest(deep: int, columns: int, lhs: Access, rhs: Access, *, k_contiguous: bool) -> Nest:
        blocks = Blocks(dot.instruction, mr, nv * dot.lanes, deep, mr, nv * dot.lanes, pack_lhs=True)
        matrices = facts.batch * k.shape[1]
        return Nest(matrices, queries, deep, columns, choice, lhs, rhs, k_contiguous, False, facts.stores, sources, blocks)

    queries_at = of_operand(q, columns_last=True)
    return AttentionNest(
        **vars(facts),
        scores=nest(facts.depth, keys, queries_at, of_operand(k, columns_last=True), k_contiguous=True),
        output=nest(keys, width, queries_at, of_operand(v, columns_last=True), k_contiguous=False),
        scale=op.scale,
        on_scores=None if op.scores is None else of_store(op.scores),
        on_weights=None if op.weights is None else of_store(op.weights),
    )


def _instruction(operands: Sequence[DType], chip: Chip) -> Choice | None:
    """The dot instruction of both products: bf16 where that takes queries, keys and values as they are, else f32. Scores lie in
    memory as rows, which instructions on tiles do not take."""
    vectors = [u for u in chip.units if all(d.tile == 1 for d in DOTS.get(u.instruction, ()))]
    narrow = choose(BF16, BF16, F32, replace(chip, units=tuple(vectors)))
    if narrow is not None and narrow.dot.lhs is BF16 and all(t is BF16 for t in operands):
        return narrow
    return choose(F32, F32, F32, chip)


def _build(problem: AttentionProblem, attention: AttentionNest, schedule: Schedule) -> Kernel:
    return _kernel(problem, attention, schedule, source_of(attention), {})


def _kernel(
    problem: AttentionProblem, attention: AttentionNest, schedule: Schedule, source: Source, values: Mapping[str, int]
) -> Kernel:
    """The kernel of an attention's IR, with values of the dims that it leaves open."""
    kernel, first = engine.function(source.text), attention.output.sources
    read = sorted({n.op.index for n in toposort(attention.roots) if isinstance(n.op, Param)})
    alone, two, all_ = (extent_at(attention.scratch(n), values) for n in (1, 2, threads.count()))
    one = problem.ops <= ONE_THREAD_OPS

    def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
        results = tuple(map(Kind.of, problem.outputs))
        shape = CallShape(attention.pointers, tuple(read), first, results, alone, two - alone, one, given=source.given)
        return bound(Call(kernel, shape))

    return Kernel(CANDIDATE.name, schedule, prepare, workspace_bytes=all_)


def ranged(problem: AttentionProblem, target: Target, schedule: Schedule) -> Ranged:
    """A kernel that leaves extents open which the problem leaves open; its point may be another than the schedule.

    Raises:
        Unsupported: the sentence why there is none.
    """
    attention = attention_nest(problem, target)
    nest, module = attention.scores, AttentionWriter(attention).write()
    point = Schedule.of(instruction=nest.dot.instruction, mr=nest.blocks.mr, nr=nest.nr)
    text = module.text(*engine.host())
    return lambda one, values: _kernel(one, attention, point, Source(text, module.given_for(values)), values)


def plan(problem: AttentionProblem, target: Target) -> FixedPlan:
    """The plan.

    Raises:
        Unsupported: the sentence why there is none.
    """
    engine.require()
    attention = attention_nest(problem, target)
    nest = attention.scores
    point = Schedule.of(instruction=nest.dot.instruction, mr=nest.blocks.mr, nr=nest.nr)
    return FixedPlan((point,), partial(_build, problem, attention))


def source_of(attention: AttentionNest) -> Source:
    """The kernel's IR for the processor at hand, and what its calls give."""
    return AttentionWriter(attention).write().source(*engine.host())


CANDIDATE = Candidate("llvm_attention", ATTENTION, CPU, 5, plan, ranged=ranged)
