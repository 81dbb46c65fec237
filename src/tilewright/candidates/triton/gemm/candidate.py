"""Generated gemms for any GPU that Triton knows: plain `tl.dot` kernels, operands and results through their expressions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from tilewright.candidates.triton.expressions.emit import NUMBERED, check
from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.gemm.dots import SHORT_SUM_BITS, Dot, choose
from tilewright.candidates.triton.gemm.kernel import Nest, Point, write
from tilewright.candidates.triton.gemm.run import operands_outside, runner
from tilewright.candidates.triton.gemm.space import ranked, work
from tilewright.candidates.triton.runtime import module as modules
from tilewright.hardware.target import Target
from tilewright.ir.build import broadcast
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param
from tilewright.lowering.access import Access, Unsupported, gate_up, largest_of, of_operand, of_store, or_why
from tilewright.schedule.candidate import GPU, Kernel, Runner
from tilewright.schedule.cost import Work
from tilewright.schedule.problem import Problem, ProblemKind
from tilewright.schedule.schedule import Schedule


@dataclass(frozen=True)
class Plan:
    """The facts about a problem that are found before any size is chosen.

    Attributes:
        arch: the architecture to compile for.
        batch, rows: matrices, and rows of each; rows of all matrices are those of one if they share the right operand.
        dot: the instruction that multiplies a tile.
        lhs, rhs: access of the operands, K as columns.
        stores: access of the results.
        outside: operands that torch evaluates once, by the number of the argument that stands for them.
        second, largest: see `Nest`.
    """

    arch: modules.Arch
    batch: int
    rows: int
    dot: Dot
    lhs: Access
    rhs: Access
    stores: tuple[Access, ...]
    outside: Mapping[int, Node]
    second: Node | None
    largest: tuple[int, ...]


def plan_of(problem: Problem, target: Target) -> Plan | str:
    """The plan, or the sentence why there is none. TF32 is used where torch is told that f32 products may be imprecise."""
    return _plan(problem, target, torch.get_float32_matmul_precision() != "highest")


@or_why
def _plan(problem: Problem, target: Target, tf32: bool) -> Plan:
    arch = modules.arch_of(target)
    if arch is None:
        raise Unsupported(f"Triton makes nothing for {target.name}")
    if 0 in (problem.batch, problem.M, problem.N, problem.K):
        raise Unsupported("an extent is 0")
    if problem.batch * max(problem.M, problem.N) > NUMBERED:
        raise Unsupported("its rows are not counted in 31 bits")
    dot = choose(problem.lhs.dtype, problem.rhs.dtype, problem.acc.dtype, problem.K, arch, tf32=tf32)
    largest = [largest_of(root) for root in problem.op.stores]
    kept = tuple(inner or root for inner, root in zip(largest, problem.op.stores, strict=True))
    check(kept, blocks=True)
    roots, second = gate_up(kept, len(problem.types)) or (kept, None)
    stores = tuple(of_store(root) for root in roots)
    columns = problem.N if second is None else problem.N // 2
    if any(inner and (s.first, s.columns_extent) != (0, columns) for inner, s in zip(largest, stores, strict=True)):
        raise Unsupported("the largest of a range of columns")
    batch_shape = problem.acc.shape[:-2]
    shared = math.prod(problem.op.rhs.shape[:-2]) == 1
    outside: dict[int, Node] = {}
    lhs = _operand(problem, problem.op.lhs, batch_shape, len(problem.types), outside, columns_last=True)
    rhs = _operand(problem, problem.op.rhs, () if shared else batch_shape, len(problem.types) + 1, outside, columns_last=False)
    batch, rows = (1, problem.batch * problem.M) if shared else (problem.batch, problem.M)
    found = tuple(i for i, inner in enumerate(largest) if inner)
    return Plan(arch, batch, rows, dot, lhs, rhs, stores, outside, second, found)


def _operand(
    problem: Problem, root: Node, batch: tuple[int, ...], index: int, outside: dict[int, Node], *, columns_last: bool
) -> Access:
    """The place of an operand; a constant that has no place in a kernel, or lies badly, is evaluated and laid out once."""
    constant = all(problem.weights[n.op.index] for n in toposort((root,)) if isinstance(n.op, Param))
    whole = broadcast(root, (*batch, *root.shape[-2:])) if batch and root.shape[:-2] != batch else root
    try:
        check((root,), blocks=True)
        access = of_operand(whole, columns_last=columns_last)
        if not (constant and root.dtype.bits <= 8 and not _along_k(access)):
            return access
    except Unsupported:
        if not constant:
            raise
    outside[index] = root
    *lead, m, n = root.shape
    stand_in = Node(Param(index, replace(root.tensor, shape=(*lead, m, n) if columns_last else (*lead, n, m))))
    if batch and tuple(lead) != batch:
        stand_in = broadcast(stand_in, (*batch, *stand_in.shape[-2:]))
    return of_operand(stand_in, columns_last=True)


def _along_k(access: Access) -> bool:
    """The largest source of an operand has its elements along K side by side."""
    leaves = [n for n in toposort((access.root,)) if isinstance(n.op, Param)]
    place = access.of_leaf(max(leaves, key=lambda n: n.tensor.elements))
    return not place.columns or (place.columns[0].inner == 1 and place.columns[0].stride == 1)


class TritonGemm:
    """Found by file name; see `schedule.candidate.Candidate`."""

    name = "triton"
    kinds = frozenset[ProblemKind]({"gemm"})
    devices = GPU
    preference = 6

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if not modules.installed():
            return modules.INSTALL
        plan = plan_of(problem, target)
        return plan if isinstance(plan, str) else None

    def schedules(self, problem: Problem, target: Target) -> Iterable[Schedule]:
        nest = nest_of(problem, target)
        return (schedule_of(point, nest.dot) for point in ranked(nest, target))

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        return work(nest_of(problem, target, point_of(schedule)), target)

    def compile(self, problem: Problem, schedule: Schedule, target: Target) -> None:
        plan = plan_of(problem, target)
        assert isinstance(plan, Plan)
        compile_for(nest_of(problem, target, point_of(schedule)), plan.arch, problem, plan.outside, target.index)

    def build(self, problem: Problem, schedule: Schedule, target: Target) -> Kernel:
        plan = plan_of(problem, target)
        assert isinstance(plan, Plan)
        nest = nest_of(problem, target, point_of(schedule))
        built = compile_for(nest, plan.arch, problem, plan.outside, target.index)
        needs = modules.needs(built.kernel)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            laid_out = operands_outside(plan.outside, plan.rhs, weights)
            return runner(nest, built, {**weights, **laid_out}, target)

        packed = sum(n.tensor.size_bytes for n in plan.outside.values())
        return Kernel(
            self.name,
            schedule,
            prepare,
            workspace_bytes=nest.workspace_bytes,
            packed_bytes=packed,
            releasable=_unread(problem, nest),
            roundoff=plan.dot.roundoff,
            registers=needs.registers,
            spills=needs.spills,
            shared_bytes=needs.shared_bytes,
        )


def nest_of(problem: Problem, target: Target, point: Point | None = None) -> Nest:
    """The kernel that a schedule stands for; of no size yet if none is given."""
    plan = plan_of(problem, target)
    assert isinstance(plan, Plan)
    read = {n.op.index for n in toposort([plan.lhs.root, plan.rhs.root, *problem.op.stores]) if isinstance(n.op, Param)}
    return Nest(
        plan.batch,
        plan.rows,
        problem.N,
        problem.K,
        plan.dot,
        plan.lhs,
        plan.rhs,
        plan.stores,
        tuple(sorted(read)),
        modules.exact_fp8(plan.arch),
        point or Point(16, 16, 32, 4, 1),
        plan.second,
        plan.largest,
    )


def compile_for(
    nest: Nest, arch: modules.Arch, problem: Problem, outside: Mapping[int, Node], device: int = 0
) -> modules.Built:
    """Machine code of a nest."""
    types = {f"p{i}": (outside[i].dtype if i in outside else problem.types[i].dtype) for i in nest.sources}
    signature = {name: pointer_type(t) for name, t in types.items()}
    signature |= {f"o{i}": pointer_type(s.root.dtype) for i, s in enumerate(nest.stores)}
    room = {"sums": "*fp32" if nest.dot.acc.is_float else "*i32", "peaks": "*i32", "counters": "*i32"}
    signature |= {name: kind for name, kind in room.items() if name in nest.arguments}
    fused = nest.dot.precision == "ieee"  # products without a matrix unit are fused multiply-adds
    warps, stages = nest.point.num_warps, nest.point.num_stages
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fused}
    return modules.build(write(nest), "kernel", signature, arch, device, **options)


def _unread(problem: Problem, nest: Nest) -> frozenset[int]:
    """Weights that calls do not read, since all that was in them is laid out elsewhere."""
    return frozenset(i for i, weight in enumerate(problem.weights) if weight and i not in nest.sources)


def schedule_of(point: Point, dot: Dot) -> Schedule:
    """The knobs of a point, and how many bits f32 operands or short sums keep."""
    said = {"precision": dot.precision} if dot.precision else {"acc_bits": SHORT_SUM_BITS} if dot.promote else {}
    return Schedule.of(
        tile_m=point.tile_m,
        tile_n=point.tile_n,
        tile_k=point.tile_k,
        num_warps=point.num_warps,
        num_stages=point.num_stages,
        split_k=point.split_k,
        group_m=point.group_m,
        swap_ab=point.swap_ab,
        **said,
    )


def point_of(schedule: Schedule) -> Point:
    """The point that a schedule stands for."""
    return Point(**{k: v for k, v in schedule.knobs if k in Point.__dataclass_fields__})  # type: ignore[arg-type]


CANDIDATE = TritonGemm()
