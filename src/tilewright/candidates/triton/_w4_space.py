"""Sizes of a kernel with weights of few bits: which are legal, and what each makes an SM do."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import product

from tilewright.candidates.triton._w4_plan import Plan
from tilewright.candidates.triton._w4_text import Form, Point
from tilewright.hardware.target import Target
from tilewright.ir.graph import toposort
from tilewright.ir.ops import Acc, Convert, Param
from tilewright.schedule.cost import Phase, Work, predict_us
from tilewright.schedule.problem import Problem
from tilewright.schedule.schedule import Schedule

MOST_TRIED = 12
MOST_ROWS = 64
MOST_NARROW = 32  # rows, by mma.sync
FEWEST_WIDE = 16
MOST_TILES = 32  # loads of a warp, all written out
SHARED_BYTES = 226 << 10


def schedule_of(point: Point) -> Schedule:
    """As reports print it."""
    return Schedule.of(**{k: getattr(point, k) for k in Point.__dataclass_fields__})


def point_of(schedule: Schedule) -> Point:
    """The point that a schedule names."""
    knobs = dict(schedule.knobs)
    return Point(**{k: bool(v) if k in ("wide", "paired") else int(v) for k, v in knobs.items()})


@lru_cache(maxsize=256)
def points(plan: Plan, target: Target) -> tuple[Point, ...]:
    """The legal points, the most promising first."""
    found = sorted(_legal(plan, target), key=lambda p: cycles(Form(plan, p), target))
    return tuple(found[:MOST_TRIED])


def _legal(plan: Plan, target: Target) -> Iterable[Point]:
    if plan.rows > MOST_ROWS:
        return
    blocks = plan.K // 64
    for wide in (False, True):
        if plan.rows > MOST_NARROW if not wide else plan.rows < FEWEST_WIDE:
            continue
        rows = (4, 8, 16) if wide else (2, 4, 8)
        for cluster, row_warps, k_warps, tiles in product((1, 2, 4, 8), rows, (1, 2, 4, 8), (1,) if wide else (1, 2, 4)):
            depth = -(-blocks // (cluster * k_warps))
            if row_warps * k_warps not in (8, 16) or depth * tiles > MOST_TILES or (depth == 1 and cluster * k_warps > blocks):
                continue
            ahead = min(depth * tiles, 16 if plan.rows <= 16 else 8)
            point = Point(wide, cluster, row_warps, k_warps, tiles, depth, ahead, min(4, ahead))
            if point.out_tile % (16 * cluster) or Form(plan, point).shared_bytes > SHARED_BYTES:
                continue
            if point.out_tile >= 2 * max(plan.outs, 64):
                continue
            yield point


def cycles(form: Form, target: Target) -> float:
    return 0.0


def work(problem: Problem, form: Form, target: Target) -> Work:
    return Work((Phase(0.0, 0.0, {"memory": float(problem.bytes)}),))
