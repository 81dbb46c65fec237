"""Sizes of a kernel with weights of few bits: the legal ones, and the work of an SM for each.

Cycles were fitted to 289 kernels for 15 problems of 1 to 32 rows on an H200, launched one after the other. Predictions of the
time behind a launch are within 9 % (root mean square). The first choice among the measured kernels is 2.4 % slower than the
best (10 % at most).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from tilewright.candidates.triton.hopper.gemm.space import CLUSTER_CORES
from tilewright.candidates.triton.hopper.w4.kernel_config import FEW_COLUMNS, MOST_PREFETCHED, KernelConfig, TileConfig
from tilewright.candidates.triton.hopper.w4.plan import PackedGemm
from tilewright.hardware.target import Target
from tilewright.schedule.cost import Phase, Work, predict_us

MOST_TRIED = 12  # points
MOST_ROWS = 64  # of activations
MOST_NARROW = 32  # the same, by mma.sync
FEWEST_WIDE = 9  # the same, by wgmma
MOST_TILES = 32  # loads of a warp where all of K is unrolled
MOST_LOOPED = 64  # the same, in a loop
MOST_ADDED = 2  # warps along K in a block that has all of it: others were up to a fifth slower
BARRIERS_BYTES = 1024  # of shared memory
ALONE_COLUMNS = 32  # more of them than these make a block of 8 warps want an SM's registers
WARPS = 16  # of an SM, with as many registers as they need
FEWEST_EARLY_BLOCKS = 4  # blocks of a cluster that is launched early: with fewer nothing was measured
FEWEST_NARROW_EARLY = 5  # rows by mma.sync that are: faster at 8, not at 1; between them nothing was measured
START_CYCLES = 2109.0  # from a launch until a block's first products, and from its last ones until its results are written
ROUND_CYCLES = 3045.0  # of that, what no other block of the SM hides
TURN_CYCLES = 963.0  # from a row tile's sums to the next one's, while loads are in flight
BYTES_PER_CYCLE = 28.0  # that one SM takes in
TILE_CYCLES = 87.6  # of a scheduler, 16 rows by 64 columns dequantised, and what goes with that
SCALE_CYCLES = 10.0  # more, if each code is scaled
PRODUCT_CYCLES = 22.5  # of 8 columns of the activations: fragments, four products, sums scaled; by mma.sync
FRAGMENT_CYCLES = 6.2  # of that, for a warp's first tile alone: the others read the same ones
WIDE_CYCLES = 16.6  # by wgmma
WAIT_CYCLES = 6.4  # more, for which a warp waits for wgmma
LOOP_CYCLES = 19.8  # by wgmma in a loop
FEW_WARPS = 1.38  # times as many, if an SM has fewer than 16 warps at a time
ALL_WARPS_CYCLES = 689.0  # more, if a block takes a whole SM: no block of the next kernel begins beside it
ALL_WARPS = 1.02  # times as many of a tile then: more warps wait for one another
TWO_BLOCKS = 0.95  # times as many, if an SM has two blocks where there was room for one of more registers a thread
SUM_CYCLES = 1.11 / 64  # of a byte of sums in shared memory, or sent
EARLY_CYCLES = 1577.0  # fewer, if the next kernel is launched when this one has been
NARROW_EARLY_CYCLES = 300.0  # the same by mma.sync, seen at 8 rows
CHUNK_CYCLES = 526.0  # from a chunk of activations to the next one
WIDENED_CYCLES = 0.1  # of an element of 8 bits made 16 (0.03 to 0.14 where the same problem was measured with both)


def configs(plan: PackedGemm, target: Target) -> tuple[KernelConfig, ...]:
    """The legal points of a plan, the most promising first."""
    found = list(_legal(plan, target))
    if any(c.persistent for c in found):  # faster than blocks that come and go, wherever both were measured
        found = [c for c in found if c.persistent or c.grid * c.warps <= target.cores * WARPS]
    return tuple(sorted(found, key=lambda c: float(predict_us(work(plan, c, target), target)))[:MOST_TRIED])


def _legal(plan: PackedGemm, target: Target) -> Iterable[KernelConfig]:
    if plan.rows > MOST_ROWS:
        return
    for wgmma in (False, True):
        if plan.rows > MOST_NARROW if not wgmma else plan.rows < FEWEST_WIDE:
            continue
        for cluster, row_warps, k_warps, tiles in product((1, 2, 4, 8), (2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 4)):
            if row_warps * k_warps not in (8, WARPS) or (wgmma and (row_warps % 4 or tiles > 1)):
                continue
            occupancy = WARPS // (row_warps * k_warps)
            base = KernelConfig.of(plan, TileConfig(wgmma, 1, cluster, row_warps, k_warps, tiles, occupancy=occupancy))
            if base.warp_blocks * base.code_loads > (MOST_LOOPED if wgmma else MOST_TILES):
                continue
            if cluster == 1 and (k_warps > MOST_ADDED or (wgmma and base.blocks % 2 == 0)):
                continue
            if cluster * k_warps > base.blocks:
                continue
            if base.cta_rows > max(2 * plan.weight_rows, 64) or base.cta_rows % (16 * cluster):
                continue
            at_once = int(target.cores * CLUSTER_CORES[cluster] / cluster * WARPS / base.warps)
            if at_once == 0:
                continue  # so few SMs hold no such cluster
            rounds = -(-base.row_tiles // at_once)
            if rounds > 1 and base.even:
                persistent = replace(base, clusters=-(-base.row_tiles // rounds))
                fitting = [c for c in _unrolled(persistent) if fits(c, target)]
                yield from fitting
                if fitting:
                    continue
            for whole in _unrolled(replace(base, clusters=base.row_tiles)):
                yield from _in_chunks(whole, target)


def _unrolled(config: KernelConfig) -> Iterable[KernelConfig]:
    """The point with all of K unrolled or, by `wgmma`, in a loop: where all is unrolled registers may not suffice, and then
    ptxas lets each product end before the next one starts."""
    all_of_k = not (config.wgmma and (config.persistent or config.columns > ALONE_COLUMNS))
    if config.warp_blocks * config.code_loads <= MOST_TILES and all_of_k:
        yield config
    if not (config.wgmma and config.even):
        return
    run = math.gcd(4, config.blocks * config.block_scales)
    alone = config.warps < WARPS and config.columns > ALONE_COLUMNS and not config.persistent
    for unroll in (4, 2, 1) if alone else (8, 4, 2, 1):
        if unroll * config.code_loads > MOST_PREFETCHED or config.warp_blocks % unroll or unroll * config.block_scales % run:
            continue
        if alone:
            yield replace(config, unroll=unroll, in_flight=2, occupancy=1)
        if config.rounded or not alone:
            yield replace(config, unroll=unroll, in_flight=2 if alone else 1)


def _in_chunks(whole: KernelConfig, target: Target) -> Iterable[KernelConfig]:
    """The point with its activations in the fewest chunks that fit, the next kernel launched early or not."""
    every = [replace(whole, k_chunks=n) for n in range(1, whole.warp_blocks + 1) if whole.warp_blocks % n == 0]
    alone = whole.in_flight == 2
    fitting = [c for c in every if fits(c, target) and not (alone and c.chunk_blocks != c.unroll)]
    for found in fitting[: 1 if whole.rows <= FEW_COLUMNS else 2]:
        if alone and whole.occupancy > 1 and found.grid <= _sms(found, target):
            continue  # there are no two blocks for an SM
        if not found.unroll or found.chunk_blocks % found.unroll == 0:
            yield found
            early = found.cluster >= FEWEST_EARLY_BLOCKS and found.warps < WARPS and not alone and found.warp_tiles <= 2
            if early and found.rows >= (1 if found.wgmma else FEWEST_NARROW_EARLY):
                yield replace(found, launch_early=True)


def fits(config: KernelConfig, target: Target) -> bool:
    """Tell whether there is shared memory for as many blocks as are meant to share an SM."""
    return config.shared_bytes <= (target.chip.shared_bytes - BARRIERS_BYTES) // config.occupancy


def _sms(config: KernelConfig, target: Target) -> int:
    """The number of SMs that blocks of such clusters run on."""
    return int(target.cores * CLUSTER_CORES[config.cluster] + 0.5)


def work(plan: PackedGemm, c: KernelConfig, target: Target) -> Work:
    """The cycles of a point and the bytes it reads and writes."""
    alone = c.in_flight == 2
    each_sm = -(-c.grid // _sms(c, target))  # blocks
    tiles_of_block = -(-c.row_tiles // c.clusters)
    rounds = -(-each_sm // c.occupancy)
    code_bytes = plan.packed_bytes() / c.row_tiles / c.cluster
    other_bytes = plan.rows * c.cta_blocks * 8 * plan.operand.bits
    block = c.columns / 8
    tile = TILE_CYCLES * c.bits / 4 + (SCALE_CYCLES if c.rounded else 0.0)
    if not c.wgmma:
        tile += block * (PRODUCT_CYCLES - FRAGMENT_CYCLES * (1 - 1 / c.warp_tiles))
    elif c.unroll:
        tile += block * LOOP_CYCLES
    else:
        tile += block * WIDE_CYCLES + WAIT_CYCLES
    if min(each_sm, c.occupancy) * c.warps < WARPS and not alone:
        tile *= FEW_WARPS
    if c.warps == WARPS:
        tile *= ALL_WARPS
    if alone and c.occupancy > 1:
        tile *= TWO_BLOCKS
    tiles = c.warps * c.warp_tiles * c.warp_blocks / 4  # of a block, on one of four schedulers
    sums = c.cta_sums * 4 * (c.k_warps + 2 * (c.cluster > 1)) * SUM_CYCLES
    first = other_bytes / c.k_chunks * min(each_sm, c.occupancy)  # before anything is multiplied
    further = each_sm * (tiles_of_block * code_bytes + other_bytes) - first
    cycles = START_CYCLES + (rounds - 1) * ROUND_CYCLES / c.occupancy
    cycles -= (EARLY_CYCLES if c.wgmma else NARROW_EARLY_CYCLES) * c.launch_early
    cycles += ALL_WARPS_CYCLES if c.warps == WARPS else 0.0
    cycles += first / BYTES_PER_CYCLE + max(further / BYTES_PER_CYCLE, each_sm * tiles_of_block * tiles * tile)
    if plan.operand.bits == 8:
        cycles += each_sm * plan.rows * c.cta_blocks * 64 * WIDENED_CYCLES
    cycles += each_sm * tiles_of_block * sums + (tiles_of_block - 1) * TURN_CYCLES + (c.k_chunks - 1) * CHUNK_CYCLES
    read = plan.packed_bytes() + plan.rows * plan.K * plan.operand.bits // 8 + plan.rows * plan.out_features * 2
    return Work((Phase(cycles, 0.0, {"memory": float(read)}),))
