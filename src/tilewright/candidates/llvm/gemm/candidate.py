"""Generated CPU gemms: the chip's own dot instruction, both operands packed, the epilogue in registers, several stores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from ctypes import addressof, c_int64
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from tilewright import threads
from tilewright.candidates.llvm.expressions.text import Source
from tilewright.candidates.llvm.expressions.vector import check
from tilewright.candidates.llvm.gemm.dots import choose
from tilewright.candidates.llvm.gemm.kernel import GemmWriter
from tilewright.candidates.llvm.gemm.nest import Blocks, Nest
from tilewright.candidates.llvm.gemm.space import Points, Product, ranked, work
from tilewright.candidates.llvm.runtime import engine
from tilewright.candidates.llvm.runtime.calls import aligned
from tilewright.candidates.llvm.runtime.run import UNSIZED, NestPlan, lies_right, operand, packed_memory, side_of
from tilewright.dtype import F32, S32
from tilewright.hardware.target import Target
from tilewright.ir.build import broadcast
from tilewright.ir.extent import Extent
from tilewright.ir.graph import toposort
from tilewright.ir.ops import Param
from tilewright.lowering.access import amax_of, gate_up, of_operand, of_store
from tilewright.lowering.decompose import powers_as_products
from tilewright.schedule.candidate import CPU, GEMM, Candidate, Kernel, Ranged, Runner, Schedule, Unsupported
from tilewright.schedule.cost import Work
from tilewright.schedule.packed import packed_once
from tilewright.schedule.problem import Problem


@dataclass(frozen=True)
class Plan(NestPlan):
    """A gemm as a loop nest for one CPU: points of register tiles and cache blocks, and the kernel of each."""

    @cached_property
    def product(self) -> Product:
        return Product.of(self.problem, self.nest, in_place=self.in_place)

    def schedules(self) -> Iterable[Schedule]:
        return map(Schedule.of_point, ranked(self.product, self.target))

    def work(self, schedule: Schedule) -> Work:
        return work(self.product, Points.of(schedule.point(Blocks), self.nest.dot), self.target)

    def nest_of(self, schedule: Schedule) -> Nest:
        """The loop nest that a schedule stands for."""
        return replace(self.nest, blocks=schedule.point(Blocks))

    def build(self, schedule: Schedule) -> Kernel:
        nest = self.nest_of(schedule)
        return self.kernel_of(nest, schedule, source_of(nest))

    def kernel_of(self, nest: Nest, schedule: Schedule, source: Source) -> Kernel:
        """The kernel of a nest's IR."""
        call, given = engine.function(source.text), source.given

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            if not nest.constant:
                return self.runner(nest, call, torch.empty(0), given)
            rhs = self.problem.op.rhs

            def pack() -> torch.Tensor:
                value = operand(rhs, weights, nest.k_contiguous)
                packed = packed_memory(nest)
                pointers = [0] * nest.pointers
                pointers[len(self.problem.types) + 1], pointers[-1] = value.data_ptr(), aligned(packed)
                table = (c_int64 * len(given))(*given)
                if given:
                    pointers[-3] = addressof(table)
                call(*pointers, threads.count(), 1)
                return packed

            read = [weights[n.op.index] for n in toposort((rhs,)) if isinstance(n.op, Param)]
            return self.runner(nest, call, packed_once(read, (rhs, nest.choice, nest.nr, nest.width), pack), given)

        return self.kernel(CANDIDATE.name, schedule, nest, prepare)


def source_of(nest: Nest) -> Source:
    """The kernel's IR for the processor at hand, and what its calls give."""
    return GemmWriter(nest).write().source(*engine.host())


def ranged(problem: Problem, target: Target, schedule: Schedule) -> Ranged:
    """A kernel that leaves extents open which the problem leaves open.

    Raises:
        Unsupported: the sentence why there is none.
    """
    whole = plan(problem, target)
    if not (whole.in_place or schedule.point(Blocks).pack_lhs):  # chosen for extents at which rows happen to be dense
        raise Unsupported("the left operand cannot be read where it lies for all extents")
    nest = whole.nest_of(schedule)
    if isinstance(nest.passes, Extent) and nest.blocks.kc % nest.vector:  # kc was all of a smaller K
        raise Unsupported("passes over an open K would not be of whole packed vectors")
    module = GemmWriter(nest).write()
    text, made = module.text(*engine.host()), [x is None for x in whole.outside]

    def at(one: Problem, values: Mapping[str, int]) -> Kernel:
        found = plan(one, target)
        if [x is None for x in found.outside] != made or found.nest.k_contiguous != whole.nest.k_contiguous:
            raise Unsupported("operands lie otherwise for these extents")
        return found.kernel_of(found.nest_of(schedule), schedule, Source(text, module.given_for(values)))

    return at


def plan(problem: Problem, target: Target) -> Plan:
    """The plan.

    Raises:
        Unsupported: the sentence why there is none.
    """
    engine.require()
    if problem.acc.dtype not in (F32, S32):
        raise Unsupported(f"generated kernels add up in f32 or s32, not {problem.acc.dtype}")
    choice = choose(problem.lhs.dtype, problem.rhs.dtype, problem.acc.dtype, target.chip)
    if choice is None:
        raise Unsupported(f"{target.chip.name} names no instruction for {problem.lhs.dtype} x {problem.rhs.dtype}")
    if not problem.batch * problem.M * problem.N:
        raise Unsupported("the result is empty")
    batch_shape, count = problem.acc.shape[:-2], len(problem.types)
    shared = math.prod(problem.op.rhs.shape[:-2]) == 1
    amaxes = tuple(amax_of(root) for root in problem.op.stores)
    written = powers_as_products([inner or root for inner, root in zip(amaxes, problem.op.stores, strict=True)])
    check(written)
    roots, second = gate_up(written, count) or (written, None)
    stores = tuple(of_store(root) for root in roots)
    lhs_root, rhs_root = problem.op.lhs, problem.op.rhs
    if lhs_root.shape[:-2] != batch_shape:
        lhs_root = broadcast(lhs_root, (*batch_shape, *lhs_root.shape[-2:]))
    if not shared and rhs_root.shape[:-2] != batch_shape:
        rhs_root = broadcast(rhs_root, (*batch_shape, *rhs_root.shape[-2:]))
    constant = shared and problem.constant(rhs_root)
    lhs, left = side_of(lhs_root, count, columns_last=True, outside=False)
    k_contiguous = _k_contiguous(problem)
    rhs, right = side_of(rhs_root, count + 1, columns_last=not k_contiguous, outside=constant)
    batch, rows = (1, problem.batch * problem.M) if shared else (problem.batch, problem.M)
    in_place = left is None and lies_right(lhs, problem, choice, rows)
    reduced = tuple(inner is not None for inner in amaxes)
    nest = Nest(
        batch, rows, problem.K, problem.N, choice, lhs, rhs, k_contiguous, constant, stores, count + 2, UNSIZED, second,
        reduced if any(reduced) else (),
    )  # fmt: skip
    return Plan(problem, target, nest, (left, right), in_place)


def _k_contiguous(problem: Problem) -> bool:
    """Tell whether the right operand's elements along K are neighbours in memory."""
    try:
        return of_operand(problem.op.rhs, columns_last=False).columns_contiguous is True
    except Unsupported:
        return False


CANDIDATE = Candidate("llvm", GEMM, CPU, 5, plan, packing_knobs=("nr", "instruction"), ranged=ranged)
