"""Gemms with constant weights of 4 or 8 bits on Hopper: codes are read as they are stored and made halves in registers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import cast

import torch

from tilewright.candidates.triton.expressions.emit import Tile
from tilewright.candidates.triton.expressions.exchange import Push, Running
from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.expressions.text import Text
from tilewright.candidates.triton.hopper.arch import SM_90, require
from tilewright.candidates.triton.hopper.fast_math import FastMath
from tilewright.candidates.triton.hopper.gemm.kernels import code_of as tile_code_of
from tilewright.candidates.triton.hopper.ptx import REWRITE_DIGEST, clustered, rewriting
from tilewright.candidates.triton.hopper.w4 import tiles
from tilewright.candidates.triton.hopper.w4.kernel_config import KernelConfig, TileConfig
from tilewright.candidates.triton.hopper.w4.pack import packed_weights
from tilewright.candidates.triton.hopper.w4.plan import PackedGemm, plan_of
from tilewright.candidates.triton.hopper.w4.space import configs, fits, work
from tilewright.candidates.triton.runtime import module
from tilewright.candidates.triton.runtime.launch import caller, pointers
from tilewright.hardware.target import Target
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param
from tilewright.schedule.candidate import GEMM, GPU, Candidate, Kernel, Ranged, Runner, Schedule, Unsupported
from tilewright.schedule.cost import Work, predict_us
from tilewright.schedule.problem import Problem

PUSHED = 3  # points that are offered where the store goes to other ranks
LOOKED_AT, SUFFICE = 8, 2  # points whose machine code is looked at before they are offered, until so many are
MOST_SPILLED = 64  # bytes of a thread: with a few of them points were the fastest still
KERNEL = "tilewright.candidates.triton.hopper.w4._kernel.gemm"
STATEMENTS = sha256(Path(__file__).with_name("_kernel.py").read_bytes()).hexdigest()[:12]  # which Triton's cache does not know


def _pointer(leaf: Node) -> str:
    """The name of the pointer to a source."""
    return f"p{cast('Param', leaf.op).index}"


@dataclass(frozen=True)
class FewRows:
    """A gemm of few rows.

    Attributes:
        problem, target: the problem and the device.
        plan: the product as the kernel sees it.
    """

    problem: Problem
    target: Target
    plan: PackedGemm

    @cached_property
    def configs(self) -> tuple[KernelConfig, ...]:
        """The points, the most promising first."""
        return configs(self.plan, self.target)

    def config(self, schedule: Schedule) -> KernelConfig:
        """A point by its knobs."""
        return KernelConfig.of(self.plan, schedule.point(TileConfig))

    def work(self, schedule: Schedule) -> Work:
        return work(self.plan, self.config(schedule), self.target)

    def compile(self, schedule: Schedule) -> module.Built:
        return self.machine_code(self.config(schedule))

    def machine_code(self, config: KernelConfig, push: Push | None = None) -> module.Built:
        """The kernel with what the program does to its sums. Once it has run it is loaded on one device.

        Args:
            config: the point.
            push: ranks into whose memory the one store goes, if it does.
        """
        plan = self.plan
        leaves = {n for a in plan.stores for n in toposort((a.root,)) if isinstance(n.op, Param)} - {plan.up}
        sides = sorted({_pointer(n) for n in leaves}, key=lambda n: int(n[1:]))
        words = ["codes", "scales", "zeros"][: plan.weights.tensors]
        stores = {f"o{i}": access for i, access in enumerate(plan.stores)}
        t = Text("gl")
        some = config.open_rows or config.columns != plan.rows
        row_mask = t.v(f"rows < {t.extent(plan.rows)}") if some else None
        ragged = plan.out_features % (config.cta_rows // plan.accumulators)
        column_mask = t.v(f"columns < {plan.out_features}") if ragged else None
        near = {} if plan.up is None else {plan.up: "up"}
        tile = Tile("rows", "columns", plan.out_features, row_mask, column_mask, "acc", across=True, near=near)
        results = {n: pointer_type(a.root.dtype) for n, a in stores.items()}
        for name, access in stores.items():
            emitter = FastMath(t, tile, _pointer, {})
            if push is None:
                emitter.store(access, name)
            else:
                replace(push, arrivals=config.row_tiles * config.cluster).store(emitter, access)
                results = push.kinds(access.root.dtype)
        functions = {"store": (("acc", "up", "rows", "columns", "side"), t)}
        note = f"statements of {STATEMENTS}, rewritten by {REWRITE_DIGEST}"
        given = ["x", f"({', '.join(words)})", t.extent(plan.rows) if config.open_rows else "0"]
        text = module.instance(KERNEL, config, given, [*sides, *results], functions, t.numbers, note=note)
        kinds = {"x": pointer_type(plan.operand)} | dict.fromkeys(words, "*i32")
        kinds |= {n: pointer_type(self.problem.types[int(n[1:])].dtype) for n in sides}
        kinds |= results
        with rewriting(*([partial(clustered, size=config.cluster)] if config.cluster > 1 else [])):
            built = module.build(
                text,
                kinds,
                SM_90,
                self.target.index,
                num_warps=config.warps,
                launch_pdl=True,
                maxnreg=config.registers,
                enable_fp_fusion=False,
            )
        return replace(built, names=tuple(kinds))

    def runner(
        self,
        config: KernelConfig,
        weights: Mapping[int, torch.Tensor],
        push: Push | None = None,
        shared: Mapping[int, torch.Tensor] | None = None,
        built: module.Built | None = None,
        problem: Problem | None = None,
    ) -> Runner:
        """A runner of a point.

        Args:
            config: the point.
            weights: sources that do not change, by number.
            push: see `machine_code`.
            shared: memory of ranks into which the store goes then (`Push.names`), by numbers behind those of all sources.
            built: its machine code, if that is at hand.
            problem: the one that it serves, where it leaves extents open.
        """
        problem = problem or self.problem
        plan, target, count = self.plan, self.target, len(problem.types)
        built, w = built or self.machine_code(config, push), plan.weights
        sides = [int(n[1:]) for n in built.names if n[0] == "p" and n[1:].isdigit()]
        read = [plan.x, *range(count, count + w.tensors), *sides]  # packed ones are numbered after the problem's own
        packed = packed_weights(w.values(weights), w, plan.operand)
        constant = {**weights, **{count + i: t for i, t in enumerate(packed)}, **(shared or {})}
        start = module.launcher(built.kernel, (config.grid,), target.index, built.numbers)
        outputs = problem.outputs if push is None else ()
        given = [*pointers("source", (*read, *(shared or ()))), *pointers("result", range(len(outputs)))]
        return caller(start, given, count, outputs, constant, target)

    def build(self, schedule: Schedule) -> Kernel:
        config = self.config(schedule)
        return self.kernel(self.problem, schedule, config, self.machine_code(config))

    def ranged(self, schedule: Schedule) -> Ranged:
        """A kernel that leaves the number of rows open.

        Raises:
            Unsupported: a point for fewer rows has no room for so many.
        """
        config = self.config(schedule)
        if not fits(config, self.target):
            raise Unsupported(f"shared memory has no room for {config.rows} rows")
        built = self.machine_code(config)
        return lambda problem, values: self.kernel(problem, schedule, config, built.at(values))

    def kernel(self, problem: Problem, schedule: Schedule, config: KernelConfig, built: module.Built) -> Kernel:
        """The kernel of a problem that machine code serves."""
        plan, sides = self.plan, [int(n[1:]) for n in built.names if n[0] == "p" and n[1:].isdigit()]

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            return self.runner(config, weights, built=built, problem=problem)

        return Kernel(
            CANDIDATE.name,
            schedule,
            prepare,
            packed_bytes=plan.packed_bytes(),
            releasable=plan.weights.sources - frozenset(sides),
            **vars(module.needs(built.kernel)),
        )


@dataclass(frozen=True)
class Plan:
    """A gemm by one of two kernels.

    Attributes:
        few: the kernel for few rows.
        large: the kernel of large tiles; None where that does not take the problem.
    """

    few: FewRows
    large: tiles.Tiles | None

    @cached_property
    def large_schedules(self) -> list[Schedule]:
        """Schedules of the kernel of large tiles."""
        return list(self.large.schedules()) if self.large else []

    def unbuilt(self) -> list[Schedule]:
        """The points as the cost model ranks them."""
        found = [*(c.schedule() for c in self.few.configs), *self.large_schedules]
        return sorted(found, key=lambda s: float(predict_us(self.work(s), self.few.target)))

    def schedules(self) -> Iterable[Schedule]:
        ranked = self.unbuilt()
        # What is taken where nothing is measured needs no more memory.
        first = next((s for s in ranked if "expanded" not in dict(s.knobs)), None)
        return self._spilling_last(sorted(ranked, key=lambda s: s is not first))

    def _spilling_last(self, ranked: Iterable[Schedule]) -> Iterable[Schedule]:
        """The points in their order, but for those of the first ones that spill registers, which no cost says: they come last.
        Points are compiled until a few do not."""
        late: list[Schedule] = []
        kept = 0
        for at, schedule in enumerate(ranked):
            looked_at = kept < SUFFICE and at < LOOKED_AT and self._plan(schedule) is self.few
            if looked_at and module.needs(self.few.compile(schedule).kernel).spills > MOST_SPILLED:
                late.append(schedule)
                continue
            kept += 1
            yield schedule
        yield from late

    def _plan(self, schedule: Schedule) -> FewRows | tiles.Tiles:
        """The kernel whose point a schedule is."""
        return self.large if self.large and "tile_m" in dict(schedule.knobs) else self.few

    def work(self, schedule: Schedule) -> Work:
        return self._plan(schedule).work(schedule)

    def pushing(self) -> Sequence[Schedule]:
        """The points at which a store may go to other ranks' memory (`expressions/exchange.py`)."""
        return [c.schedule() for c in self.few.configs[:PUSHED]] if len(self.few.plan.stores) == 1 else []

    def pushed(self, schedule: Schedule, push: Push) -> Running:
        """A function that gives the runner of a point whose store goes there."""
        few, config, dtype = self.few, self.few.config(schedule), self.few.problem.outputs[0].dtype
        few.machine_code(config, push)
        return lambda weights, memory: few.runner(config, weights, push, push.exchange.sent(memory, dtype))

    def compile(self, schedule: Schedule) -> None:
        self._plan(schedule).compile(schedule)

    def build(self, schedule: Schedule) -> Kernel:
        return self._plan(schedule).build(schedule)


def plan(problem: Problem, target: Target) -> Plan:
    """The plan of a gemm by constant weights of 4 or 8 bits on an `sm_90` target, for few rows or for many.

    Raises:
        Unsupported: the reason why there is none.
    """
    require(target)
    few = plan_of(problem)
    found = Plan(FewRows(problem, target, few), tiles.tiles_of(problem, target, few))
    if found.few.configs or found.large_schedules:
        return found
    if few.up is not None:
        raise Unsupported(f"{few.rows} rows are many for stores that read both halves of the columns together")
    if few.operand.bits == 8:
        raise Unsupported(
            f"{few.rows} rows of 8 bits are many: that takes 4-bit weights, or s8 by integers, and one result in 16 bits"
        )
    raise Unsupported(
        f"{few.rows} rows are many: that takes 4-bit weights rounded once they are scaled, and one result in 16 bits"
    )


def ranged(problem: Problem, target: Target, schedule: Schedule) -> Ranged:
    """A kernel that leaves the number of rows open.

    Raises:
        Unsupported: the reason why there is none.
    """
    require(target)
    few = plan_of(problem)
    if _is_few(schedule):
        return FewRows(problem, target, few).ranged(schedule)
    large = tiles.tiles_of(problem, target, few)
    if large is None:
        raise Unsupported("it has no form of large tiles")
    return large.ranged(schedule)


def _is_few(schedule: Schedule) -> bool:
    """Tell whether a point is one of the kernel for few rows."""
    return "tile_m" not in dict(schedule.knobs)


def code_of(schedule: Schedule) -> Schedule:
    """A point without what its code does not depend on."""
    return schedule if _is_few(schedule) else tile_code_of(schedule)


CANDIDATE = Candidate("hopper_w4", GEMM, GPU, 3, plan, packing_knobs=("expanded",), ranged=ranged, code_of=code_of)
