"""Generated gemms for any GPU that Triton knows: plain `tl.dot` kernels, operands and results through their expressions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from tilewright.candidates.triton.expressions.emit import NUMBERED, check
from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.gemm.dots import SHORT_SUM_BITS, choose
from tilewright.candidates.triton.gemm.kernel import KernelSpec, TileConfig, write
from tilewright.candidates.triton.gemm.run import operands_outside, runner
from tilewright.candidates.triton.gemm.space import ranked, work
from tilewright.candidates.triton.runtime import module as modules
from tilewright.hardware.target import Target
from tilewright.ir.build import broadcast
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param
from tilewright.lowering.access import Access, gate_up, largest_of, of_operand, of_store
from tilewright.schedule.candidate import GEMM, GPU, Candidate, Kernel, Runner, Schedule, Unsupported, f32_precision
from tilewright.schedule.cost import Work
from tilewright.schedule.problem import Problem


@dataclass(frozen=True)
class Plan:
    """A gemm as a kernel whose sizes are not chosen yet.

    Attributes:
        problem, target: what is done, and where.
        arch: the architecture to compile for.
        spec: the kernel, of any sizes. Rows of all matrices are those of one if they share the right operand.
        outside: operands that torch evaluates once, by the number of the argument that stands for them.
    """

    problem: Problem
    target: Target
    arch: modules.Arch
    spec: KernelSpec
    outside: Mapping[int, Node]

    def schedules(self) -> Iterable[Schedule]:
        """The points, and how many bits f32 operands or short sums keep."""
        dot = self.spec.dot
        said = {"precision": dot.precision} if dot.precision else {"acc_bits": SHORT_SUM_BITS} if dot.promote else {}
        return (Schedule.of_point(point, **said) for point in ranked(self.spec, self.target))

    def spec_of(self, schedule: Schedule) -> KernelSpec:
        """The kernel that a schedule stands for."""
        return replace(self.spec, point=schedule.point(TileConfig))

    def work(self, schedule: Schedule) -> Work:
        return work(self.spec_of(schedule), self.target)

    def compile(self, schedule: Schedule) -> None:
        self.machine_code(self.spec_of(schedule))

    def machine_code(self, spec: KernelSpec) -> modules.Built:
        """A kernel's machine code."""
        types = {f"p{i}": (self.outside.get(i) or self.problem.types[i]).dtype for i in spec.sources}
        signature = {name: pointer_type(t) for name, t in types.items()}
        signature |= {f"o{i}": pointer_type(s.root.dtype) for i, s in enumerate(spec.stores)}
        room = {"sums": "*fp32" if spec.dot.acc.is_float else "*i32", "peaks": "*i32", "counters": "*i32"}
        signature |= {name: kind for name, kind in room.items() if name in spec.arguments}
        fused = spec.dot.precision == "ieee"  # products without a matrix unit are fused multiply-adds
        warps, stages = spec.point.num_warps, spec.point.num_stages
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fused}
        return modules.build(write(spec), "kernel", signature, self.arch, self.target.index, **options)

    def build(self, schedule: Schedule) -> Kernel:
        spec = self.spec_of(schedule)
        built = self.machine_code(spec)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            return runner(spec, built, {**weights, **operands_outside(self.outside, spec.rhs, weights)}, self.target)

        return Kernel(
            CANDIDATE.name,
            schedule,
            prepare,
            workspace_bytes=spec.workspace_bytes,
            packed_bytes=sum(n.tensor.size_bytes for n in self.outside.values()),
            releasable=frozenset(i for i, weight in enumerate(self.problem.weights) if weight and i not in spec.sources),
            roundoff=spec.dot.roundoff,
            **vars(modules.needs(built.kernel)),
        )


def plan(problem: Problem, target: Target) -> Plan:
    """The plan. TF32 is used where torch is told that f32 products may be imprecise.

    Raises:
        Unsupported: the sentence why there is none.
    """
    if not modules.installed():
        raise Unsupported(modules.INSTALL)
    arch = modules.arch_of(target)
    if arch is None:
        raise Unsupported(f"Triton makes nothing for {target.name}")
    if 0 in (problem.batch, problem.M, problem.N, problem.K):
        raise Unsupported("an extent is 0")
    if problem.batch * max(problem.M, problem.N) > NUMBERED:
        raise Unsupported("its rows are not counted in 31 bits")
    tf32 = f32_precision() != "highest"
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
    read = {n.op.index for n in toposort([lhs.root, rhs.root, *problem.op.stores]) if isinstance(n.op, Param)}
    spec = KernelSpec(
        batch, rows, problem.N, problem.K, dot, lhs, rhs, stores, tuple(sorted(read)), modules.exact_fp8(arch),
        TileConfig(16, 16, 32, 4, 1), second, tuple(i for i, inner in enumerate(largest) if inner),
    )  # fmt: skip
    return Plan(problem, target, arch, spec, outside)


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


CANDIDATE = Candidate("triton", GEMM, GPU, 6, plan)
