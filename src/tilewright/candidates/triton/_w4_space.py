"""Sizes of a kernel with weights of few bits: which are legal, and what each makes an SM do.

Cycles were fitted to 140 kernels of thirteen weights, 1 to 64 rows, on an H200: predictions are within 14 % (root mean square),
the first choice of those that were measured 3.7 % slower than the best.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import product

from tilewright.candidates.triton._w4_form import Form, Point
from tilewright.candidates.triton._w4_plan import Plan, plan_of
from tilewright.hardware.target import Target
from tilewright.schedule.cost import Phase, Work, predict_us
from tilewright.schedule.problem import Problem
from tilewright.schedule.schedule import Schedule

MOST_TRIED = 12
MOST_ROWS = 64
MOST_NARROW = 32  # rows, by mma.sync
FEWEST_WIDE = 9
MOST_TILES = 32  # loads of a warp, all written out
BARRIERS_BYTES = 1024
MOST_AHEAD = 8  # loads of a warp under way: with more of them the other operand waits
EARLY = 4  # of those, before the other operand is asked for
WARPS = 16  # of an SM, with as many registers as they need
START_CYCLES = 3170.0  # from a launch until a block's first products, and from its last ones until its results are written
ROUND_CYCLES = 840.0  # of that, what no other block of the SM hides
TURN_CYCLES = 820.0  # from a row tile's sums to the next one's, while loads are under way
# Of 132 SMs, those that clusters of so many whole SMs find room on: they do not span the chip's parts, of 16 or 18 SMs each.
REACHED = {1: 1.0, 2: 1.0, 4: 112 / 132, 8: 112 / 132}
BYTES_PER_CYCLE = 28.4  # that one SM takes in
TILE_CYCLES = 84.0  # of a scheduler, 16 rows by 64 columns made halves, and what goes with that
SCALE_CYCLES = 10.0  # more, if each code is scaled
PRODUCT_CYCLES = 27.0  # of 8 columns of the other operand: fragments, four products, sums scaled; by mma.sync
WIDE_CYCLES = 23.0  # by wgmma
WAIT_CYCLES = 10.0  # more, for which a warp waits for wgmma


def schedule_of(point: Point) -> Schedule:
    """As reports print it."""
    return Schedule.of(**{k: getattr(point, k) for k in Point.__dataclass_fields__})


def point_of(schedule: Schedule) -> Point:
    """The point that a schedule names."""
    knobs = dict(schedule.knobs)
    wide = bool(knobs.pop("wide"))
    return Point(wide, **{k: int(v) for k, v in knobs.items()})


@lru_cache(maxsize=1024)
def points(problem: Problem, target: Target) -> tuple[Point, ...]:
    """The legal points of a problem that has a plan, the most promising first."""
    plan = plan_of(problem)
    assert isinstance(plan, Plan)
    found = sorted(_legal(plan, target), key=lambda p: float(predict_us(work(Form(plan, p), target), target)))
    return tuple(found[:MOST_TRIED])


def _legal(plan: Plan, target: Target) -> Iterable[Point]:
    if plan.rows > MOST_ROWS:
        return
    blocks = plan.K // 64
    for wide in (False, True):
        if plan.rows > MOST_NARROW if not wide else plan.rows < FEWEST_WIDE:
            continue
        for cluster, row_warps, k_warps, tiles in product((1, 2, 4, 8), (2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 4)):
            if row_warps * k_warps not in (8, 16) or (wide and (row_warps % 4 or tiles > 1)):
                continue
            depth = -(-blocks // (cluster * k_warps))
            loads = depth * tiles * plan.weights.kind.bits // 4
            if loads > MOST_TILES or (depth - 1) * cluster * k_warps >= blocks or cluster * k_warps > blocks:
                continue
            point = Point(wide, 1, cluster, row_warps, k_warps, tiles, depth, 1, 1, 1)
            if point.out_tile > max(2 * plan.outs, 64) or point.out_tile % (16 * cluster):
                continue
            row_tiles = Form(plan, point).row_tiles
            ahead = min(loads, MOST_AHEAD)
            for chunks in (c for c in range(1, depth + 1) if depth % c == 0):  # the fewest that fit
                whole = replace(point, clusters=row_tiles, chunks=chunks, ahead=ahead, early=min(EARLY, ahead))
                if _fits(plan, whole, target):
                    yield whole
                    break
            rounds = -(-row_tiles // int(target.cores * REACHED[cluster] / cluster * WARPS / point.warps))
            if rounds > 1 and depth * cluster * k_warps == blocks:
                ahead = max(a for a in range(1, MOST_AHEAD + 1) if loads % a == 0)
                stays = replace(point, clusters=-(-row_tiles // rounds), ahead=ahead, early=min(EARLY, ahead))
                if _fits(plan, stays, target):
                    yield stays


def _fits(plan: Plan, point: Point, target: Target) -> bool:
    return Form(plan, point).shared_bytes <= (target.chip.shared_bytes - BARRIERS_BYTES) * point.warps // WARPS


def work(form: Form, target: Target) -> Work:
    """What a point makes the machine do."""
    p, plan = form.point, form.plan
    together = WARPS // p.warps
    sms = int(target.cores * REACHED[p.cluster] + 0.5)
    each_sm = -(-form.grid // sms)  # blocks
    tiles_of_block = -(-form.row_tiles // p.clusters)
    rounds = -(-each_sm // together)
    code_bytes = plan.packed_bytes / form.row_tiles / p.cluster
    other_bytes = plan.rows * form.local_blocks * 128
    block = form.columns / 8
    tile = TILE_CYCLES * plan.weights.kind.bits / 4 + (SCALE_CYCLES if plan.weights.rounded else 0.0)
    tile += block * WIDE_CYCLES + WAIT_CYCLES if p.wide else block * PRODUCT_CYCLES
    tiles = p.warps * p.tiles * p.depth / 4  # of a block, on one of four schedulers
    sums = form.sums * 4 * (p.k_warps + 2 * (p.cluster > 1)) / 64
    each = max(code_bytes / BYTES_PER_CYCLE, tiles * tile) + sums
    cycles = START_CYCLES + (rounds - 1) * ROUND_CYCLES / together
    cycles += each_sm * (tiles_of_block * each + other_bytes / BYTES_PER_CYCLE) + (tiles_of_block - 1) * TURN_CYCLES
    read = plan.packed_bytes + plan.rows * plan.K * 2 + plan.rows * plan.outs * 2
    return Work((Phase(cycles, 0.0, {"memory": float(read)}),))
