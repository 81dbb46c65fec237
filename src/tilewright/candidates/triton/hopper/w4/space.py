"""Sizes of a kernel with weights of few bits: which are legal, and what each makes an SM do.

Cycles were fitted to 289 kernels for 15 problems of 1 to 32 rows on an H200, launched one after the other: predictions of what
lies behind a launch are within 9 % (root mean square), the first choice of those that were measured 2.4 % slower than the best
(10 % at most).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from tilewright.candidates.triton.hopper.w4.form import Form, Point
from tilewright.candidates.triton.hopper.w4.plan import Plan
from tilewright.hardware.target import Target
from tilewright.schedule.cost import Phase, Work, predict_us

MOST_TRIED = 12
MOST_ROWS = 64
MOST_NARROW = 32  # rows, by mma.sync
FEWEST_WIDE = 9
MOST_TILES = 32  # loads of a warp, all written out
MOST_ADDED = 2  # sums of a block that has all of K: others were up to a fifth slower
BARRIERS_BYTES = 1024
MOST_LOOPED = 64  # the same, in a loop
FEW_COLUMNS = 16  # more of them leave room for fewer loads under way
ALONE_COLUMNS = 32  # more of them than these make a block of 8 warps want an SM's registers
MOST_AHEAD = 8  # loads of a warp under way: with more of them the other operand waits
EARLY = 4  # of those, before the other operand is asked for
WARPS = 16  # of an SM, with as many registers as they need
START_CYCLES = 2109.0  # from a launch until a block's first products, and from its last ones until its results are written
ROUND_CYCLES = 3045.0  # of that, what no other block of the SM hides
TURN_CYCLES = 963.0  # from a row tile's sums to the next one's, while loads are under way
# Of 132 SMs, those that clusters of so many whole SMs find room on: they do not span the chip's parts, of 16 or 18 SMs each.
REACHED = {1: 1.0, 2: 1.0, 4: 112 / 132, 8: 112 / 132}
BYTES_PER_CYCLE = 28.0  # that one SM takes in
TILE_CYCLES = 87.6  # of a scheduler, 16 rows by 64 columns made halves, and what goes with that
SCALE_CYCLES = 10.0  # more, if each code is scaled
PRODUCT_CYCLES = 22.5  # of 8 columns of the other operand: fragments, four products, sums scaled; by mma.sync
FRAGMENT_CYCLES = 6.2  # of that, for a warp's first tile alone: the others read the same ones
WIDE_CYCLES = 16.6  # by wgmma
WAIT_CYCLES = 6.4  # more, for which a warp waits for wgmma
LOOP_CYCLES = 19.8  # by wgmma in a loop
FEWEST_NARROW_SOON = 5  # rows by mma.sync from which the same: faster at 8, not at 1; between them nothing was measured
LEAST_SOON = 4  # blocks of a cluster whose next kernel starts when it has: with fewer nothing was measured
FEW_WARPS = 1.38  # times as many, if an SM has fewer than 16 warps at a time
ALL_WARPS_CYCLES = 689.0  # more, if a block takes a whole SM: no block of the next kernel begins beside it
ALL_WARPS = 1.02  # times as many of a tile then: more warps wait for one another
TWO_BLOCKS = 0.95  # times as many, if an SM has two blocks where there was room for one of more registers a thread
SUM_CYCLES = 1.11 / 64  # of a byte of sums in shared memory, or sent
NARROW_SOON_CYCLES = 300.0  # the same by mma.sync, seen at 8 rows
SOON_CYCLES = 1577.0  # fewer, if the next kernel starts when this one has
CHUNK_CYCLES = 526.0  # from a chunk of the other operand to the next one
WIDENED_CYCLES = 0.1  # of an element of 8 bits made 16 (0.03 to 0.14 where the same problem was measured with both)


def points(plan: Plan, target: Target) -> tuple[Point, ...]:
    """The legal points of a plan, the most promising first."""
    found = list(_legal(plan, target))
    stay = [p for p in found if Form(plan, p).again]
    if stay:  # faster than blocks that come and go, wherever both were measured
        found = [p for p in found if p in stay or Form(plan, p).grid * p.warps <= target.cores * WARPS]
    return tuple(sorted(found, key=lambda p: float(predict_us(work(Form(plan, p), target), target)))[:MOST_TRIED])


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
            if loads > (MOST_LOOPED if wide else MOST_TILES):
                continue
            if cluster == 1 and (k_warps > MOST_ADDED or (wide and blocks % 2 == 0)):
                continue
            if (depth - 1) * cluster * k_warps >= blocks or cluster * k_warps > blocks:
                continue
            point = Point(wide, 1, cluster, row_warps, k_warps, tiles, depth, 1, 1, 1)
            if point.out_tile > max(2 * plan.weight_rows, 64) or point.out_tile % (16 * cluster):
                continue
            row_tiles = Form(plan, point).row_tiles
            at_once = int(target.cores * REACHED[cluster] / cluster * WARPS / point.warps)
            if at_once == 0:
                continue  # so few SMs hold no such cluster
            rounds = -(-row_tiles // at_once)
            if rounds > 1 and depth * cluster * k_warps == blocks:
                stay = [p for p in _written(plan, replace(point, clusters=-(-row_tiles // rounds))) if _fits(plan, p, target)]
                yield from stay
                if stay:
                    continue
            every = [c for c in range(1, depth + 1) if depth % c == 0]
            for whole in _written(plan, replace(point, clusters=row_tiles)):
                if whole.together:
                    fitting = [c for c in every if depth // c == whole.loop and _fits(plan, replace(whole, chunks=c), target)]
                else:
                    fitting = [c for c in every if _fits(plan, replace(whole, chunks=c), target)]
                for chunks in fitting[: 1 if plan.rows <= FEW_COLUMNS else 2]:  # the fewest that fit
                    found = replace(whole, chunks=chunks)
                    if found.together > 1 and Form(plan, found).grid <= _sms(cluster, target):
                        continue  # there are no two blocks for an SM
                    if not found.loop or Form(plan, found).chunk_depth % found.loop == 0:
                        yield found
                        early = cluster >= LEAST_SOON and found.warps < WARPS and not (found.together or found.tiles > 2)
                        if early and plan.rows > (0 if wide else FEWEST_NARROW_SOON - 1):
                            yield replace(found, soon=1)


def _written(plan: Plan, point: Point) -> Iterable[Point]:
    """The point with its loads, all blocks of K written out or, by `wgmma`, in a loop: where all is written out registers may
    not suffice, and then ptxas lets each product end before the next one starts."""
    each = plan.weights.kind.bits // 4 * point.tiles
    form = Form(plan, point)
    loads = point.depth * each
    if loads <= MOST_TILES and not (point.wide and (form.again or form.columns > ALONE_COLUMNS)):
        most = MOST_AHEAD if form.columns <= FEW_COLUMNS else MOST_AHEAD - 2
        ahead = max(a for a in range(1, most + 1) if loads % a == 0) if form.again else min(loads, most)
        yield replace(point, ahead=ahead, early=min(EARLY, ahead))
    run = math.gcd(4, form.blocks * form.subs)
    alone = point.warps < WARPS and form.columns > ALONE_COLUMNS and not form.again
    for loop in (4, 2, 1) if alone else (8, 4, 2, 1):
        fits = loop * each <= MOST_AHEAD and point.depth % loop == 0 and loop * form.subs % run == 0
        if point.wide and form.even and fits:
            looped = replace(point, loop=loop, lag=1, ahead=loop * each, early=min(EARLY, loop * each))
            if alone:
                yield from (replace(looped, lag=2, together=t) for t in ((1, 2) if plan.weights.rounded else (1,)))
            else:
                yield looped


def _fits(plan: Plan, point: Point, target: Target) -> bool:
    room = target.chip.shared_bytes - BARRIERS_BYTES
    return Form(plan, point).shared_bytes <= room // (point.together or WARPS // point.warps)


def _sms(cluster: int, target: Target) -> int:
    """That blocks of such clusters run on."""
    return int(target.cores * REACHED[cluster] + 0.5)


def work(form: Form, target: Target) -> Work:
    """What a point makes the machine do."""
    p, plan = form.point, form.plan
    together = p.together or WARPS // p.warps
    sms = _sms(p.cluster, target)
    each_sm = -(-form.grid // sms)  # blocks
    tiles_of_block = -(-form.row_tiles // p.clusters)
    rounds = -(-each_sm // together)
    code_bytes = plan.packed_bytes / form.row_tiles / p.cluster
    other_bytes = plan.rows * form.local_blocks * 8 * plan.operand.bits
    block = form.columns / 8
    tile = TILE_CYCLES * plan.weights.kind.bits / 4 + (SCALE_CYCLES if plan.weights.rounded else 0.0)
    if not p.wide:
        tile += block * (PRODUCT_CYCLES - FRAGMENT_CYCLES * (1 - 1 / p.tiles))
    elif p.loop:
        tile += block * LOOP_CYCLES
    else:
        tile += block * WIDE_CYCLES + WAIT_CYCLES
    if min(each_sm, together) * p.warps < WARPS and not p.together:
        tile *= FEW_WARPS
    if p.warps == WARPS:
        tile *= ALL_WARPS
    if p.together > 1:
        tile *= TWO_BLOCKS
    tiles = p.warps * p.tiles * p.depth / 4  # of a block, on one of four schedulers
    sums = form.sums * 4 * (p.k_warps + 2 * (p.cluster > 1)) * SUM_CYCLES
    first = other_bytes / p.chunks * min(each_sm, together)  # before anything is multiplied
    further = each_sm * (tiles_of_block * code_bytes + other_bytes) - first
    cycles = START_CYCLES + (rounds - 1) * ROUND_CYCLES / together - (SOON_CYCLES if p.wide else NARROW_SOON_CYCLES) * p.soon
    cycles += ALL_WARPS_CYCLES if p.warps == WARPS else 0.0
    cycles += first / BYTES_PER_CYCLE + max(further / BYTES_PER_CYCLE, each_sm * tiles_of_block * tiles * tile)
    if plan.operand.bits == 8:
        cycles += each_sm * plan.rows * form.local_blocks * 64 * WIDENED_CYCLES
    cycles += each_sm * tiles_of_block * sums + (tiles_of_block - 1) * TURN_CYCLES + (p.chunks - 1) * CHUNK_CYCLES
    read = plan.packed_bytes + plan.rows * plan.K * plan.operand.bits // 8 + plan.rows * plan.outs * 2
    return Work((Phase(cycles, 0.0, {"memory": float(read)}),))
