"""Generated CPU gemms: the chip's own dot instruction, both operands packed, the epilogue in registers, several stores."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch

from tilewright.candidates.llvm.expressions.vector import check
from tilewright.candidates.llvm.gemm.dots import Dot, choose
from tilewright.candidates.llvm.gemm.kernel import GemmWriter
from tilewright.candidates.llvm.gemm.nest import Blocks, Nest
from tilewright.candidates.llvm.gemm.space import Points, Product
from tilewright.candidates.llvm.gemm.work import ranked, work
from tilewright.candidates.llvm.runtime import engine
from tilewright.candidates.llvm.runtime.run import Plan, aligned, lies_right, operand, releasable, runner, side_of
from tilewright.candidates.llvm.runtime.scratch import maker
from tilewright.dtype import F32, S32
from tilewright.hardware.target import Target
from tilewright.ir.build import broadcast
from tilewright.ir.graph import toposort
from tilewright.ir.ops import Param
from tilewright.lowering.access import Unsupported, gate_up, largest_of, of_operand, of_store, or_why
from tilewright.lowering.decompose import powers_as_products
from tilewright.schedule.candidate import CPU, Kernel, Runner
from tilewright.schedule.cost import Work
from tilewright.schedule.packed import packed_once
from tilewright.schedule.problem import Problem, ProblemKind
from tilewright.schedule.schedule import Schedule


@or_why
def _plan(problem: Problem, target: Target) -> Plan:
    if problem.acc.dtype not in (F32, S32):
        raise Unsupported(f"generated kernels add up in f32 or s32, not {problem.acc.dtype}")
    choice = choose(problem.lhs.dtype, problem.rhs.dtype, problem.acc.dtype, target.chip)
    if choice is None:
        raise Unsupported(f"{target.chip.name} names no instruction for {problem.lhs.dtype} x {problem.rhs.dtype}")
    if not problem.batch * problem.M * problem.N:
        raise Unsupported("the result is empty")
    batch_shape = problem.acc.shape[:-2]
    shared = math.prod(problem.op.rhs.shape[:-2]) == 1
    largest = tuple(largest_of(root) for root in problem.op.stores)
    kept = tuple(inner or root for inner, root in zip(largest, problem.op.stores, strict=True))
    kept = powers_as_products(kept)
    check(kept)
    roots, second = gate_up(kept, len(problem.types)) or (kept, None)
    stores = tuple(of_store(root) for root in roots)
    lhs_root, rhs_root = problem.op.lhs, problem.op.rhs
    if lhs_root.shape[:-2] != batch_shape:
        lhs_root = broadcast(lhs_root, (*batch_shape, *lhs_root.shape[-2:]))
    if not shared and rhs_root.shape[:-2] != batch_shape:
        rhs_root = broadcast(rhs_root, (*batch_shape, *rhs_root.shape[-2:]))
    constant = shared and all(problem.weights[n.op.index] for n in toposort((rhs_root,)) if isinstance(n.op, Param))
    lhs = side_of(lhs_root, len(problem.types), columns_last=True, outside=False)
    along = _contiguous_along_k(problem)
    rhs = side_of(rhs_root, len(problem.types) + 1, columns_last=not along, outside=constant)
    batch, rows = (1, problem.batch * problem.M) if shared else (problem.batch, problem.M)
    in_place = lhs.outside is None and lies_right(lhs.access, problem, choice, rows)
    reduced = tuple(inner is not None for inner in largest)
    return Plan(choice, batch, rows, lhs, rhs, along, constant, stores, in_place, second, reduced if any(reduced) else ())


def _contiguous_along_k(problem: Problem) -> bool:
    """Whether the right operand's elements along K are neighbours in memory."""
    sources = [n for n in toposort((problem.op.rhs,)) if isinstance(n.op, Param) and len(n.shape) >= 2]
    if not sources:
        return False
    source = max(sources, key=lambda n: n.tensor.elements)
    try:
        place = of_operand(problem.op.rhs, columns_last=False).of_leaf(source)
    except Unsupported:
        return False
    return bool(place.columns) and place.columns[0].inner == 1 and place.columns[0].stride == 1


class LlvmGemm:
    """Found by file name; see `schedule.candidate.Candidate`."""

    name = "llvm"
    kinds = frozenset[ProblemKind]({"gemm"})
    devices = CPU
    preference = 5
    packing_knobs = ("nr", "instruction")

    def refuse(self, problem: Problem, target: Target) -> str | None:
        return engine.refusal(lambda: _plan(problem, target))

    def schedules(self, problem: Problem, target: Target) -> Iterable[Schedule]:
        plan = _plan(problem, target)
        assert isinstance(plan, Plan)
        dot = plan.choice.dot
        return (_schedule(dot, blocks) for blocks in ranked(Product.of(problem, plan), target))

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        plan = _plan(problem, target)
        assert isinstance(plan, Plan)
        dot = plan.choice.dot
        return work(Product.of(problem, plan), Points.of(_blocks(schedule, dot), dot), target)

    def build(self, problem: Problem, schedule: Schedule, target: Target) -> Kernel:
        nest, plan = nest_of(problem, schedule, target)
        call = engine.function(module_text(nest))
        return Kernel(
            self.name,
            schedule,
            lambda weights: _prepared(problem, plan, nest, call, weights),
            workspace_bytes=nest.scratch(torch.get_num_threads()),
            packed_bytes=nest.packed_rhs if plan.constant else 0,
            releasable=releasable(problem, plan),
        )


def _schedule(dot: Dot, blocks: Blocks) -> Schedule:
    nr = blocks.nv * dot.lanes
    return Schedule.of(
        instruction=dot.instruction,
        mr=blocks.mr,
        nr=nr,
        kc=blocks.kc,
        mc=blocks.mc_tiles * blocks.mr,
        nc=blocks.nc_panels * nr,
        pack_lhs=blocks.pack_lhs,
        private=blocks.packs_per_thread,
    )


def _blocks(schedule: Schedule, dot: Dot) -> Blocks:
    knobs = dict(schedule.knobs)
    mr, nr, kc, mc, nc = (int(knobs[k]) for k in ("mr", "nr", "kc", "mc", "nc"))
    return Blocks(mr, nr // dot.lanes, kc, mc // mr, nc // nr, bool(knobs["pack_lhs"]), bool(knobs["private"]))


def nest_of(problem: Problem, schedule: Schedule, target: Target) -> tuple[Nest, Plan]:
    """The loop nest that a schedule stands for."""
    plan = _plan(problem, target)
    assert isinstance(plan, Plan)
    blocks = _blocks(schedule, plan.choice.dot)
    sources = len(problem.types) + 2
    nest = Nest(
        plan.batch,
        plan.rows,
        problem.K,
        problem.N,
        plan.choice,
        plan.lhs.access,
        plan.rhs.access,
        plan.along,
        plan.constant,
        plan.stores,
        sources,
        blocks,
        plan.second,
        plan.largest,
    )
    return nest, plan


def module_text(nest: Nest) -> str:
    """The kernel's IR for the processor at hand."""
    return GemmWriter(nest).write().text(*engine.host())


def _prepared(
    problem: Problem, plan: Plan, nest: Nest, call: Callable[..., None], weights: Mapping[int, torch.Tensor]
) -> Runner:
    if not plan.constant:
        return runner(problem, plan, nest, call, torch.empty(0))

    def pack() -> torch.Tensor:
        value = operand(problem.op.rhs, weights, plan.along)
        room = maker((nest.packed_rhs + 64,), torch.uint8)()
        pointers = [0] * nest.pointers
        pointers[len(problem.types) + 1], pointers[-1] = value.data_ptr(), aligned(room)
        call(*pointers, torch.get_num_threads(), 1)
        return room

    read = [weights[n.op.index] for n in toposort((problem.op.rhs,)) if isinstance(n.op, Param)]
    packed = packed_once(read, (problem.op.rhs, plan.choice, nest.nr, nest.width), pack)
    return runner(problem, plan, nest, call, packed)


CANDIDATE = LlvmGemm()
