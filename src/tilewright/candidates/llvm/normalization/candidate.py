"""Generated CPU kernels for what stands between products: norms, softmaxes, reductions, elementwise chains, quantisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from tilewright import threads
from tilewright.candidates.llvm.expressions.vector import check_node
from tilewright.candidates.llvm.gemm.dots import choose
from tilewright.candidates.llvm.normalization.kernel import Loops, Rows, RowsWriter
from tilewright.candidates.llvm.runtime import engine
from tilewright.candidates.llvm.runtime.calls import Call, bound
from tilewright.dtype import F32
from tilewright.hardware.target import Target
from tilewright.ir.artefact import Kind
from tilewright.ir.evaluate import evaluator
from tilewright.ir.extent import extent_at
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param, Reduce
from tilewright.lowering.reduction_nest import ReductionNest, reduction_nests
from tilewright.lowering.scalar.steps import usable
from tilewright.schedule.candidate import CPU, FUSION, Candidate, FixedPlan, Kernel, Ranged, Runner, Schedule, Unsupported
from tilewright.schedule.problem import FusionProblem
from tilewright.schedule.recipe import CallShape

ONE_THREAD_WORK = 1 << 19  # instructions on elements: below this, waking another thread costs more than it saves
UNROLL = 4
FULL = 16  # lanes of a register of 64 bytes


def rows_of(problem: FusionProblem, target: Target) -> Rows:
    """The loops to generate.

    Raises:
        Unsupported: the sentence why there are none.
    """
    choice = choose(F32, F32, F32, target.chip)
    if choice is None:
        raise Unsupported(f"{target.chip.name} names no instruction for f32 x f32")
    nests = reduction_nests(problem.roots, check_node)
    each = tuple(_loops(r, choice.dot.lanes) for r in nests)
    scales = frozenset(i for loops in each for i in loops.scales if problem.weights[i])
    return Rows(each, len(problem.types), len(problem.outputs), scales, any(t.open for t in (*problem.types, *problem.outputs)))


def _loops(nest: ReductionNest, lanes: int) -> Loops:
    """Choose vectors of several registers where registers are short and the columns come out even: each operation is then so
    many independent ones next to each other, while whole vectors side by side are further apart than processors look ahead.
    Four where nothing is reduced (chains of roundings), else two."""
    reduces = any(isinstance(n.op, Reduce) for n in toposort(nest.roots))
    for registers in (2,) if reduces else (4, 2):
        if lanes < FULL and nest.columns % (registers * lanes) == 0:
            return Loops(nest, registers * lanes, UNROLL // registers)
    return Loops(nest, lanes, UNROLL)


def _build(problem: FusionProblem, rows: Rows, schedule: Schedule) -> Kernel:
    call = engine.function(module_text(rows))

    def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
        if usable(weights.get(i) for i in rows.scales):
            return _prepared(problem, rows, call)
        return _prepared(problem, rows, engine.function(module_text(replace(rows, scales=frozenset()))))

    return Kernel(CANDIDATE.name, schedule, prepare, workspace_bytes=rows.thread_bytes * threads.count())


def ranged(problem: FusionProblem, target: Target, schedule: Schedule) -> Ranged:
    """A kernel that leaves extents open which the problem leaves open.

    Raises:
        Unsupported: the sentence why there is none.
    """
    written = rows_of(problem, target)
    if written.scales:
        raise Unsupported("what scales has to be looked at before each is written")
    module = RowsWriter(written).write()
    text = module.text(*engine.host())

    def at(one: FusionProblem, values: Mapping[str, int]) -> Kernel:
        call, given = engine.function(text), module.given_for(values)
        rows = replace(rows_of(one, target), ranged=written.ranged)
        memory = extent_at(written.thread_bytes, values)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            return _prepared(one, rows, call, memory, given)

        return Kernel(CANDIDATE.name, schedule, prepare, workspace_bytes=memory * threads.count())

    return at


def plan(problem: FusionProblem, target: Target) -> FixedPlan:
    """The plan.

    Raises:
        Unsupported: the sentence why there is none.
    """
    engine.require()
    rows = rows_of(problem, target)
    point = Schedule.of(passes=max(r.nest.passes for r in rows.each), lanes=rows.each[0].lanes)
    return FixedPlan((point,), partial(_build, problem, rows))


def module_text(rows: Rows) -> str:
    """The kernel's IR for the processor at hand."""
    return RowsWriter(rows).write().text(*engine.host())


def _prepared(
    problem: FusionProblem, rows: Rows, kernel: Callable[..., None], memory: int | None = None, given: tuple[int, ...] = ()
) -> Runner:
    picks = any(loops.nest.tables for loops in rows.each)
    small = sum(loops.nest.work for loops in rows.each) <= ONE_THREAD_WORK or rows.tasks == 1
    read, each = rows.sources, rows.thread_bytes if memory is None else memory
    results = tuple(map(Kind.of, problem.outputs))
    call = Call(kernel, CallShape(rows.pointers, tuple(read), rows.types, results, each, each, small, given=given))
    return checked(call, problem) if picks else bound(call)


def checked(call: Call, problem: FusionProblem) -> Runner:
    """A runner of a kernel that picks by indices: one out of range is an error in the words of the operation that picks."""
    return bound(replace(call, missed=evaluator(problem.roots, [Node(Param(i, t)) for i, t in enumerate(problem.types)])))


CANDIDATE = Candidate("llvm_norm", FUSION, CPU, 5, plan, ranged=ranged)
