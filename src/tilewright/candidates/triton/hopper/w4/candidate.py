"""Gemms with constant weights of 4 or 8 bits on Hopper: codes are read as they are stored and made halves in registers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch

from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.hopper.ptx import clustered, rewriting
from tilewright.candidates.triton.hopper.w4 import tiles
from tilewright.candidates.triton.hopper.w4.form import Form, Point
from tilewright.candidates.triton.hopper.w4.pack import packed_weights
from tilewright.candidates.triton.hopper.w4.plan import Plan, plan_of
from tilewright.candidates.triton.hopper.w4.space import point_of, points, schedule_of, work
from tilewright.candidates.triton.hopper.w4.text import Writer
from tilewright.candidates.triton.runtime import module
from tilewright.candidates.triton.runtime.launch import caller
from tilewright.dtype import DType
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import GPU, Kernel, Runner
from tilewright.schedule.cost import Work, predict_us
from tilewright.schedule.problem import Problem, ProblemKind
from tilewright.schedule.schedule import Schedule

LOOKED_AT, SUFFICE = 8, 2  # points whose machine code is looked at before they are offered, until so many are
MOST_SPILLED = 64  # bytes of a thread: with a few of them points were the fastest still


class HopperW4:
    """Found by file name; see `schedule.candidate.Candidate`."""

    name = "hopper_w4"
    kinds = frozenset[ProblemKind]({"gemm"})
    devices = GPU
    preference = 3
    packing_knobs = ("ready",)

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if "sm_90" not in target.features:
            return "clusters, wgmma and dependent launches as they are used here are Hopper's (sm_90)"
        if not module.installed():
            return module.INSTALL
        plan = plan_of(problem)
        if isinstance(plan, str):
            return plan
        large = tiles.plan_of(problem)
        if points(problem, target) or (large is not None and tiles.points(problem, large, target)):
            return None
        if plan.second is not None:
            return f"{plan.rows} rows are many for stores that read both halves of the columns together"
        if plan.operand.bits == 8:
            return (
                f"{plan.rows} rows of 8 bits are many: that takes 4-bit weights, or s8 by integers, and one result in 16 bits"
            )
        return f"{plan.rows} rows are many: that takes 4-bit weights rounded once they are scaled, and one result in 16 bits"

    def schedules(self, problem: Problem, target: Target) -> Iterable[Schedule]:
        large = tiles.plan_of(problem)
        found = [schedule_of(p) for p in points(problem, target)]
        found += tiles.schedules(problem, large, target) if large else []
        ranked = sorted(found, key=lambda s: float(predict_us(self.work(problem, s, target), target)))
        first = next((s for s in ranked if "ready" not in dict(s.knobs)), None)  # who measures nothing takes it: no more memory
        return _spilling_last(problem, sorted(ranked, key=lambda s: s is not first), target)

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        plan = _plan(problem)
        if "tile_m" in dict(schedule.knobs):
            large = tiles.plan_of(problem)
            assert large is not None
            return tiles.work(problem, large, tiles.hopper_space.point_of(schedule), target)
        return work(Form(plan, point_of(schedule)), target)

    def compile(self, problem: Problem, schedule: Schedule, target: Target) -> None:
        if "tile_m" in dict(schedule.knobs):
            large = tiles.plan_of(problem)
            assert large is not None
            tiles.machine_code(problem, large, schedule, target)
        else:
            compiled(Form(_plan(problem), point_of(schedule)), tuple(t.dtype for t in problem.types), target.index)

    def build(self, problem: Problem, schedule: Schedule, target: Target) -> Kernel:
        plan = _plan(problem)
        if "tile_m" in dict(schedule.knobs):
            large = tiles.plan_of(problem)
            assert large is not None
            return tiles.build(self.name, problem, large, plan, schedule, target)
        form = Form(plan, point_of(schedule))
        built = compiled(form, tuple(t.dtype for t in problem.types), target.index)
        needs = module.needs(built.kernel)
        sides = [int(n[1:]) for n in built.names if n[0] == "p" and n[1:].isdigit()]
        w, count = plan.weights, len(problem.types)
        read = [plan.x, *range(count, count + w.tensors), *sides]  # packed ones are numbered after the problem's own

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            packed = packed_weights(w.values(weights), w, plan.operand)
            torch.cuda.synchronize(target.index)  # a launch reads weights before what is ahead of it has ended
            constant = {**weights, **{count + i: t for i, t in enumerate(packed)}}
            launch = module.launcher(built.kernel, (form.grid,), target.index, built.numbers)
            return caller(read, problem.outputs, launch, constant, target)

        return Kernel(
            self.name,
            schedule,
            prepare,
            packed_bytes=plan.packed_bytes,
            releasable=w.sources - frozenset(sides),
            registers=needs.registers,
            spills=needs.spills,
            shared_bytes=needs.shared_bytes,
        )


def _spilling_last(problem: Problem, ranked: Iterable[Schedule], target: Target) -> Iterable[Schedule]:
    """The points in their order, but that those come last, of the first ones, whose registers do not suffice by far: no rate
    that ranks them tells. They are looked at until a few suffice."""
    late: list[Schedule] = []
    kept = 0
    for at, schedule in enumerate(ranked):
        if kept < SUFFICE and at < LOOKED_AT and "tile_m" not in dict(schedule.knobs):
            form = Form(_plan(problem), point_of(schedule))
            built = compiled(form, tuple(t.dtype for t in problem.types), target.index)
            if module.needs(built.kernel).spills > MOST_SPILLED:
                late.append(schedule)
                continue
        kept += 1
        yield schedule
    yield from late


def _plan(problem: Problem) -> Plan:
    plan = plan_of(problem)
    assert isinstance(plan, Plan)
    return plan


def compiled(form: Form, types: tuple[DType, ...], device: int = 0) -> module.Built:
    """A form's machine code; `types` are those of the gemm's sources. Once it has run it is loaded on one device."""
    writer = Writer(form, lambda n: f"p{n.op.index}")  # pyright: ignore[reportAttributeAccessIssue]
    written = writer.write()
    kinds: list[tuple[str, str]] = []
    for name in writer.arguments:
        if name[1:].isdigit():
            at = int(name[1:])
            kinds.append((name, pointer_type(types[at] if name[0] == "p" else form.plan.stores[at].root.dtype)))
        else:
            kinds.append((name, pointer_type(form.plan.operand) if name == "x" else "*i32"))
    kernel = _machine_code(written.text, (*kinds, *written.signature.items()), form.point, device)
    return module.Built(kernel, tuple(written.numbers.values()), tuple(writer.arguments))


@lru_cache(maxsize=512)
def _machine_code(text: str, kinds: tuple[tuple[str, str], ...], point: Point, device: int) -> Any:
    """Triton's compiled kernel of a text, which loads itself once, on the device that is then the current one."""
    with rewriting(*([partial(clustered, size=point.cluster)] if point.cluster > 1 else [])):
        return module.compiled(
            module.module(text).gemm,
            dict(kinds),
            module.Arch("cuda", 90, 32),
            num_warps=point.warps,
            launch_pdl=True,
            maxnreg=point.registers,
            enable_fp_fusion=False,
        )


CANDIDATE = HopperW4()
