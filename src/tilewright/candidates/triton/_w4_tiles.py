"""Gemms of more rows with weights of 4 bits: Hopper's kernel of large tiles, its loading warps making numbers of codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from tilewright.candidates.triton import _hopper_plan as hopper_plan
from tilewright.candidates.triton import _hopper_space as hopper_space
from tilewright.candidates.triton import _module as module
from tilewright.candidates.triton._hopper_build import compiled
from tilewright.candidates.triton._hopper_form import Form
from tilewright.candidates.triton._hopper_plan import Plan
from tilewright.candidates.triton._hopper_run import runner
from tilewright.candidates.triton._hopper_space import Point
from tilewright.candidates.triton._module import Built
from tilewright.candidates.triton._w4_pack import packed_weights
from tilewright.candidates.triton._w4_plan import Plan as Weights
from tilewright.candidates.triton._w4_plan import plan_of as plan_of_weights
from tilewright.candidates.triton._w4_stage import Coded
from tilewright.dtype import S32
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import Kernel, Runner
from tilewright.schedule.cost import Work, predict_us
from tilewright.schedule.problem import Problem
from tilewright.schedule.schedule import Schedule

FEWEST_ROWS = 33
MOST_TRIED = 8
WIDTHS = (64, 128, 256)  # columns of a tile: whole blocks of codes
STEP_CYCLES = 4.0  # of the loading warps, for each column of a step along K


@lru_cache(maxsize=1024)
def plan_of(problem: Problem) -> Plan | None:
    """The plan with the codes' values in the place of the right operand; None where this is no way to do it."""
    weights = plan_of_weights(problem)
    if isinstance(weights, str):
        return None
    w = weights.weights
    if not w.rounded or w.kind.bits != 4 or weights.rows < FEWEST_ROWS:
        return None
    plan = hopper_plan.plan_of(problem)
    if not isinstance(plan, Plan) or plan.second is not None:
        return None
    return plan if plan.batch == 1 and plan.lhs.source is not None else None


def points(problem: Problem, plan: Plan, target: Target) -> list[Point]:
    """The legal points, the most promising first."""
    found = hopper_space.points(problem, plan, target)
    able = [p for p in found if p.tile_n in WIDTHS and not (p.pingpong or p.hold or p.widened or p.paired or p.split > 1)]
    return sorted(able, key=lambda p: float(predict_us(work(problem, plan, p, target), target)))[:MOST_TRIED]


def work(problem: Problem, plan: Plan, point: Point, target: Target) -> Work:
    """What a point makes the machine do: as with numbers, or what making them takes."""
    known = hopper_space.work(problem, plan, point, target)
    steps = -(-plan.K // plan.tile_k)
    tiles = -(-plan.M // point.tile_m) * -(-plan.N // point.tile_n)
    made = tiles / point.blocks * steps * point.tile_n * STEP_CYCLES
    return replace(known, phases=tuple(replace(p, cycles=max(p.cycles, made)) for p in known.phases))


def form_of(problem: Problem, plan: Plan, weights: Weights, point: Point) -> Form:
    """What the text of a point's kernel depends on; codes, scales and zero points come after the problem's own sources."""
    coded = Coded(weights.weights, weights.operand, len(problem.types), plan.K // 64)
    return replace(hopper_space.form_of(problem, plan, point), coded=coded)


def machine_code(problem: Problem, plan: Plan, weights: Weights, schedule: Schedule, target: Target) -> tuple[Form, Built]:
    """Of one point."""
    form = form_of(problem, plan, weights, hopper_space.point_of(schedule))
    assert form.coded is not None
    return form, compiled(form, (*(t.dtype for t in problem.types), *[S32] * len(form.coded.pointers)), target.index)


def build(name: str, problem: Problem, plan: Plan, weights: Weights, schedule: Schedule, target: Target) -> Kernel:
    """A kernel for one point."""
    point = hopper_space.point_of(schedule)
    form, built = machine_code(problem, plan, weights, schedule, target)
    needs = module.needs(built.kernel)
    w, device = weights.weights, torch.device(target.device)

    def prepare(given: Mapping[int, torch.Tensor]) -> Runner:
        packed = packed_weights(w.values(given), w, weights.operand)
        held = {**given, **{len(problem.types) + i: t for i, t in enumerate(packed)}}
        return runner(problem, plan, form, built, point.blocks, point.shared_tiles, held, device)

    read = {int(n[1:]) for n in built.names if n[0] == "p" and n[1:].isdigit()}
    return Kernel(
        name,
        schedule,
        prepare,
        workspace_bytes=8 * point.blocks * point.tile_m * point.tile_n if point.shared_tiles else 0,
        packed_bytes=weights.packed_bytes,
        unread=w.sources - read,
        registers=needs.registers,
        spills=needs.spills,
        shared_bytes=needs.shared_bytes,
    )


def schedules(problem: Problem, plan: Plan, target: Target) -> Iterable[Schedule]:
    """The points as reports print them, the most promising first."""
    return (p.schedule(plan.tile_k) for p in points(problem, plan, target))
