"""Generated gemms for any GPU that Triton knows: plain `tl.dot` kernels, operands and results through their expressions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tilewright.candidates.triton.expressions.emit import NUMBERED, check
from tilewright.candidates.triton.expressions.exchange import Push, Running
from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.gemm.dots import SHORT_SUM_BITS, choose
from tilewright.candidates.triton.gemm.kernel import KernelSpec, TileConfig, write
from tilewright.candidates.triton.gemm.space import ranked, work
from tilewright.candidates.triton.runtime import module as modules
from tilewright.candidates.triton.runtime.launch import caller, pointers
from tilewright.hardware.target import Target
from tilewright.ir.build import broadcast
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.extent import extent_at
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Dequantize, Param
from tilewright.lowering.access import Access, amax_of, gate_up, of_operand, of_store
from tilewright.schedule.candidate import GEMM, GPU, Candidate, Kernel, Ranged, Runner, Schedule, Unsupported, f32_precision
from tilewright.schedule.cost import Work
from tilewright.schedule.packed import packed_once
from tilewright.schedule.problem import Problem
from tilewright.schedule.recipe import Pointer

PUSHED = 3  # points that are offered where the store goes to other ranks

# Operands that torch evaluated, by one of the weights they are made of and their expression, so that kernels of other sizes
# share them: which tensors at which version, the operand, and the other weights, whose identity must not pass to new ones.
_laid_out: MutableMapping[
    torch.Tensor, dict[tuple[Node, bool], tuple[tuple[tuple[int, int], ...], torch.Tensor, list[torch.Tensor]]]
] = WeakTensorKeyDictionary()


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
        results = {f"o{i}": pointer_type(store.root.dtype) for i, store in enumerate(spec.stores)}
        results = results if spec.push is None else spec.push.kinds(spec.stores[0].root.dtype)
        signature = {name: pointer_type(t) for name, t in types.items()} | results | dict.fromkeys(spec.workspace, "*i32")
        if "sums" in signature and spec.dot.acc.is_float:
            signature["sums"] = "*fp32"
        fused = spec.dot.precision == "ieee"  # products without a matrix unit are fused multiply-adds
        warps, stages = spec.point.num_warps, spec.point.num_stages
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fused}
        return modules.build(write(spec), signature, self.arch, self.target.index, **options)

    def runner(
        self,
        spec: KernelSpec,
        built: modules.Built,
        weights: Mapping[int, torch.Tensor],
        shared: Mapping[int, torch.Tensor] | None = None,
        one: tuple[Problem, Mapping[str, int]] | None = None,
    ) -> Runner:
        """A runner of a kernel.

        Args:
            spec: the kernel.
            built: its machine code.
            weights: sources that do not change, by number.
            shared: memory of ranks into which the store goes (`Push.names`), by numbers behind those of all sources.
            one: where the kernel leaves extents open, the problem that it serves, and values of the dims by name.
        """
        problem, values = one or (self.problem, {})
        target, blocks = self.target, extent_at(spec.config.tiles * spec.point.split_k, values)
        start = modules.launcher(built.kernel, (blocks,), target.index, built.numbers)
        outputs = problem.outputs if shared is None else ()
        given = [*pointers("source", (*spec.sources, *(shared or ()))), *pointers("result", range(len(outputs)))]
        if spec.workspace:  # sums of parts of K, largest magnitudes of tiles, counters of parts done
            *sizes, count = (extent_at(size, values) for size in spec.workspace.values())
            given += [*pointers("scratch", (4 * size for size in sizes)), Pointer("counters", count)]
        constant = {**weights, **operands_outside(self.outside, spec.rhs, weights), **(shared or {})}
        return caller(start, given, len(problem.types), outputs, constant, target)

    def pushing(self) -> Sequence[Schedule]:
        """The points at which a store may go to other ranks' memory (`expressions/exchange.py`)."""
        return [*islice(self.schedules(), PUSHED)] if len(self.spec.stores) == 1 and not self.spec.amaxes else []

    def pushed(self, schedule: Schedule, push: Push) -> Running:
        """A function that gives the runner of a point whose store goes there."""
        push = replace(push, grants=self.arch.capability == 90)
        spec, dtype = replace(self.spec_of(schedule), push=push), self.problem.outputs[0].dtype
        built = self.machine_code(spec)
        return lambda weights, memory: self.runner(spec, built, weights, push.exchange.sent(memory, dtype))

    def build(self, schedule: Schedule) -> Kernel:
        spec = self.spec_of(schedule)
        return self.kernel(schedule, spec, self.machine_code(spec))

    def kernel(
        self,
        schedule: Schedule,
        spec: KernelSpec,
        built: modules.Built,
        one: tuple[Problem, Mapping[str, int]] | None = None,
    ) -> Kernel:
        """The kernel of machine code; `one`: see `runner`."""

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            return self.runner(spec, built, weights, one=one)

        return Kernel(
            CANDIDATE.name,
            schedule,
            prepare,
            workspace_bytes=extent_at(spec.workspace_bytes, one[1] if one else {}),
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
    arch = modules.arch_of(target)
    if 0 in (problem.batch, problem.M, problem.N, problem.K):
        raise Unsupported("an extent is 0")
    if problem.batch * problem.M > NUMBERED or problem.batch * problem.N > NUMBERED:
        raise Unsupported("its rows are not counted in 31 bits")
    tf32 = f32_precision() != "highest"
    dot = choose(problem.lhs.dtype, problem.rhs.dtype, problem.acc.dtype, problem.K, arch, tf32=tf32)
    amaxes = [amax_of(root) for root in problem.op.stores]
    each = tuple(inner or root for inner, root in zip(amaxes, problem.op.stores, strict=True))
    check(each, blocks=True)
    roots, up = gate_up(each, len(problem.types)) or (each, None)
    stores = tuple(of_store(root) for root in roots)
    columns = problem.N if up is None else problem.N // 2
    if any(inner and (s.first, s.columns_extent) != (0, columns) for inner, s in zip(amaxes, stores, strict=True)):
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
        TileConfig(16, 16, 32, 4, 1), up, tuple(i for i, inner in enumerate(amaxes) if inner),
    )  # fmt: skip
    return Plan(problem, target, arch, spec, outside)


def ranged(problem: Problem, target: Target, schedule: Schedule) -> Ranged:
    """A kernel that leaves extents open which the problem leaves open.

    Raises:
        Unsupported: the sentence why there is none.
    """
    whole = plan(problem, target)
    spec = whole.spec_of(schedule)
    built = whole.machine_code(spec)
    return lambda one, values: whole.kernel(schedule, spec, built.at(values), (one, values))


def _operand(
    problem: Problem, root: Node, batch: tuple[int, ...], index: int, outside: dict[int, Node], *, columns_last: bool
) -> Access:
    """The place of an operand; a constant that has no place in a kernel, or lies badly, is evaluated and laid out once."""
    constant = problem.constant(root)
    whole = broadcast(root, (*batch, *root.shape[-2:])) if batch and root.shape[:-2] != batch else root
    try:
        check((root,), blocks=True)
        access = of_operand(whole, columns_last=columns_last)
        if not (constant and root.dtype.bits <= 8 and access.columns_contiguous is False):
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


def operands_outside(outside: Mapping[int, Node], rhs: Access, weights: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Constant operands as a kernel reads them, K last, by the number of its argument."""
    right = {n.op.index for n in toposort((rhs.root,)) if isinstance(n.op, Param)}
    return {index: _evaluated(root, weights, transposed=index in right) for index, root in outside.items()}


def _evaluated(root: Node, weights: Mapping[int, torch.Tensor], *, transposed: bool) -> torch.Tensor:
    values = {n: weights[n.op.index] for n in toposort((root,)) if isinstance(n.op, Param)}
    given = list(values.values())
    versioned = bool(given) and not any(t.is_inference() for t in given)  # what tells that one was written since
    made_of = tuple((id(t), t._version) for t in given) if versioned else ()
    known = _laid_out.get(given[0], {}).get((root, transposed)) if versioned else None
    if known is not None and known[0] == made_of:
        return known[1]

    def lay_out() -> torch.Tensor:
        (value,) = evaluate_nodes((root,), values)
        assert isinstance(value, torch.Tensor)
        return (value.transpose(-1, -2) if transposed else value).contiguous()

    quantised = any(isinstance(n.op, Dequantize) for n in toposort((root,)))  # codes may be dropped and unpacked again
    result = packed_once(given, ("laid out", root, transposed), lay_out) if quantised and given else lay_out()
    own = all(result.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() for t in given)
    if versioned and own:  # a view would keep its weight alive for good
        _laid_out.setdefault(given[0], {})[root, transposed] = made_of, result, given[1:]
    return result


CANDIDATE = Candidate("triton", GEMM, GPU, 6, plan, ranged=ranged, code_of=lambda schedule: schedule)
