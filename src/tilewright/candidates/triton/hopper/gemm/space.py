"""Sizes of a Hopper kernel: the legal ones, and the work of an SM for each.

A step along K is 128 bytes of both operands. It takes as long as the tensor cores take, or as shared memory takes to be filled
and read, whichever is longer. Cycles were fitted to 1,400 kernels of sixty shapes in three types on an H200: predictions are
within 11 % (root mean square), the first choice 2.7 % slower than the best of six.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

from tilewright.candidates.triton.hopper.gemm.plan import HopperGemm
from tilewright.candidates.triton.hopper.gemm.spec import KernelSpec, Store, leaves, spec_of
from tilewright.candidates.triton.hopper.gemm.tile import TileConfig
from tilewright.candidates.triton.runtime.versions import whole_views
from tilewright.dtype import BF16, F16
from tilewright.ir.expression import quantised_at_once
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Dequantize, Map, Quantize, Select
from tilewright.lowering.scalar.costs import SPECIAL_UNIT
from tilewright.schedule.cost import Phase, Work, predict_us

TILES = (*((m, n) for m in (128, 64) for n in (256, 224, 192, 160, 128, 96, 64)), (256, 128))
BLOCK_TILES = ((128, 128), (128, 64), (64, 128), (64, 64))  # a tile's columns share a scale
SPLIT_TILES = ((128, 192), (128, 128), (128, 96), (128, 64))  # others lost wherever they were tried
PINGPONG_TILES = ((128, 192), (128, 160), (128, 128), (64, 256))
MOST_STAGES = 8
GATE_UP_COLUMNS = 64  # columns of a tile, at least, both halves of which begin where 32 columns do
BARRIERS_BYTES = 2048  # of shared memory, beside stages and results
STREAM_K_ELEMENTS = 64 * 128  # elements of a warpgroup's part of a shared tile: what it keeps in registers beside those it adds
LATER = 0.03
# Of an H200's 132 SMs, those that clusters of so many whole SMs find room on: they do not span the chip's parts, of 16 or 18
# SMs each.
CLUSTER_CORES = {1: 1.0, 2: 1.0, 3: 117 / 132, 4: 112 / 132, 8: 112 / 132}
EXCHANGE_CYCLES = 1200.0  # of a cluster: all are done with their rings, sums are sent, all have come
SENT_BYTES_PER_CYCLE = 8.0  # from one block of a cluster to the others
FEWEST_STEPS = 4  # along K that are worth a share of a tile
SHARED_BYTES_PER_CYCLE = 121.0  # of an SM, of 32 banks of 4 bytes
BLOCK_SCALED = 1.2  # a step whose sums are multiplied by scales
START_CYCLES = 2100.0  # from a launch until the first products: descriptors, first stages from memory
END_CYCLES = 3000.0  # of a tile of 128 x 256 that is packed and stored while the tensor cores wait
TALL = 0.76  # of that, where a warpgroup has 128 rows of bytes, which leave in fewer subtiles (850 cycles against 1,117)
DEFERRED_CYCLES = 2600.0  # of one that leaves behind the next tile's products
FIXUP_CYCLES = 4800.0  # until a part of a tile is written, counted, and read by the last block
PART_CYCLES = 0.63  # of each of its elements
STEP_CYCLES = 1.0 / 64  # of an elementwise step on an element, for a warpgroup beside another one
PINGPONG_CYCLES = 0.07  # of an element of a tile that is stored while the next one is multiplied: shared memory serves both
AUX_CYCLES, READ_CYCLES = 0.10, 0.25  # of an element of an operand as large as the result, by TMA or by threads
# Of the time of memory, for results whose rows begin anywhere. f8 24576 x 768 x 50257 with f32 results on an H200: 2,361 us by
# tiles of 64 x 256, 2,722 by 128 x 256, 2,858 by 128 x 192, 3,187 by 128 x 128; at 50304 columns 2,276, 2,153, 1,900, 1,953.
WIDE_LINES, LINES = 1.9, 2.4
CROSSING = 1.2  # of the time of memory, where two blocks read the same columns, often from the other half of L2
MULTICAST_CYCLES = 600.0  # that blocks of a pair wait for one another
FEWEST_PINGPONG_TILES = 4  # tiles of a block that are worth taking turns
PINGPONG_STEP = 0.93  # of a step, where one warpgroup alone multiplies: less than its bytes of shared memory say
FEW_STAGES = 1.12  # a step of a ring of fewer than four
QUANTISED_GELU, QUANTISED = 6, 4  # instructions on an element
# 132 tiles of 128 x 256 that are in work at once, g of them one below another, read 128 g rows and 256 * 132 / g columns of the
# operands, the fewest at g = 16; other tiles at most a quarter more than at their best. That is from L2, and no other value has
# been measured: as a knob it would be one more factor of `_bases`, told apart by `work`.
GROUP_M = 16
SMALLEST = TileConfig(64, 64, 128, 2, GROUP_M, False, False, False, False, 1, 0)


def tile_configs(plan: HopperGemm, most_elements: int = STREAM_K_ELEMENTS) -> list[TileConfig]:
    """The legal points, the most promising first."""
    found = list(_legal(plan, most_elements))
    took = {p: float(predict_us(work(spec_of(plan, p)), plan.target)) for p in found}
    found.sort(key=lambda p: took[p])
    earlier = Counter[tuple[int, int, bool, int]]()
    for p in found:  # what tiles differ in is better known than what kernels of one tile do: those come later and later
        key = p.tile_m, p.tile_n, p.pingpong, p.split_k
        took[p] *= 1 + LATER * earlier[key]
        earlier[key] += 1
    return sorted(found, key=lambda p: took[p])


def has_tiles(plan: HopperGemm) -> bool:
    """Tell whether there is a legal point, without ranking them, which takes tens of milliseconds."""
    return any(True for _ in _legal(plan, STREAM_K_ELEMENTS))


def _legal(plan: HopperGemm, most_elements: int) -> Iterable[TileConfig]:
    steps = plan.k_tiles
    for base in _bases(plan):
        blocks_each, tiles = 2 if base.multicast else 1, plan.tiles(base)
        waste = tiles * blocks_each * base.tile_m * base.tile_n / (plan.batch * plan.M * plan.N * plan.accumulators)
        smallest = replace(base, tile_k=SMALLEST.tile_k, vector_store=False) == SMALLEST
        if (waste > 4 and not smallest) or (base.multicast and base.tile_m >= plan.M):
            continue
        cores = plan.target.cores // blocks_each
        if base.pingpong and -(-tiles // cores) < FEWEST_PINGPONG_TILES:
            continue
        spec = spec_of(plan, base)
        config = spec.config
        if base.pingpong and base.tile_n > 128 and len(spec.stores) > 1 and not config.shared_epilogue:
            continue  # there would be no registers for several codes
        whole = base.pingpong or config.block_scaled or base.tile_n != config.padded_n
        whole = whole or config.rows * base.tile_n > most_elements
        for deferred in (True, False) if _deferrable(spec, steps, -(-tiles // cores)) else (False,):
            for workers, shared in _partitions(tiles, steps, cores, whole or deferred):
                if shared * steps * workers < 1 << 31:  # shares are worked out in 32 bits
                    tile = replace(base, deferred_store=deferred, blocks=workers * blocks_each, stream_k=shared)
                    yield from _with_ring(spec_of(plan, tile))
        # Clusters whose blocks share K, one for each tile: where tiles are fewer than SMs.
        if base.pingpong or base.multicast or plan.scales or plan.up or (base.tile_m, base.tile_n) not in SPLIT_TILES:
            continue
        for split_k in (2, 3, 4):
            own, cores = base.tile_n // split_k, round(CLUSTER_CORES[split_k] * plan.target.cores)
            whole_boxes = own >= 32 and own * split_k == base.tile_n and own & (own - 1) == 0
            if whole_boxes and steps >= split_k * FEWEST_STEPS and tiles * split_k <= cores:
                yield from _with_ring(spec_of(plan, replace(base, split_k=split_k, blocks=tiles * split_k)))


def _with_ring(spec: KernelSpec) -> Iterable[TileConfig]:
    """A kernel's tile with as many stages as there is room for; none where those do not suffice."""
    stages = ring_stages(spec)
    if stages >= 2 and stages * spec.config.stage_bytes >= exchange_bytes(spec.tile):
        yield replace(spec.tile, num_stages=stages)


def exchange_bytes(tile: TileConfig) -> int:
    """Bytes of the ring that a cluster's exchange takes: a tile's sums, and what comes from the other blocks."""
    return 4 * tile.tile_m * tile.tile_n * (2 * tile.split_k - 1) // tile.split_k if tile.split_k > 1 else 0


def ring_stages(spec: KernelSpec) -> int:
    """Stages of the ring, as many as there is room for; its end may hold rows of none (`_operand.spare_rows`)."""
    config = spec.config
    room = spec.plan.target.chip.shared_bytes - config.store_bytes - BARRIERS_BYTES
    if config.tile_n != config.padded_n and whole_views():
        room -= config.padded_n * 128
    return min(room // config.stage_bytes, MOST_STAGES)


def _bases(plan: HopperGemm) -> Iterable[TileConfig]:
    """Tiles, and who multiplies them."""
    tiles = TILES if plan.scales is None else BLOCK_TILES
    tiles = [t for t in tiles if plan.up is None or t[1] % GATE_UP_COLUMNS == 0]
    for (tile_m, tile_n), multicast, permuted in product(tiles, (False, True), _vector_stores(plan)):
        base = replace(SMALLEST, tile_m=tile_m, tile_n=tile_n, tile_k=plan.tile_k, vector_store=permuted, multicast=multicast)
        yield base
        if (tile_m, tile_n) in PINGPONG_TILES and plan.scales is None:
            yield replace(base, pingpong=True)


def _vector_stores(plan: HopperGemm) -> Iterable[bool]:
    """Tell whether rows of the right operand may come in the order that gives a thread eight neighbours of the result: bytes
    should; what is wider needs fewer reads of the columns' scales then, but is copied once more."""
    if not plan.rhs.constant or plan.N % 32:
        return (False,)
    widest = max(s.root.dtype.size_bytes(1) for s in plan.stores)
    return (True,) if widest == 1 else (True, False) if widest == 2 else (False,)


def _deferrable(spec: KernelSpec, steps: int, rounds: int) -> bool:
    """Tell whether a result may wait for the next tile: one store of 16-bit values, enough products to hide it behind."""
    store, config = spec.stores[0], spec.config
    if len(spec.stores) > 1 or store.view is None or store.view.m_major or config.pingpong or config.block_scaled:
        return False
    # Of bytes it saved nothing: 25.8 us against 25.6 for sixteen products of 1024 x 1024 x 1024.
    wide = store.access.root.dtype in (BF16, F16)
    return wide and config.rows == 64 and steps >= config.subtiles and config.tile_n >= 128 and rounds > 1


def _partitions(tiles: int, steps: int, cores: int, whole: bool) -> Iterable[tuple[int, int]]:
    """Numbers of blocks, and of tiles shared out among them."""
    yield -(-tiles // -(-tiles // cores)), 0  # no more than give the same number of rounds: the others would only draw power
    if whole:
        return
    rest = tiles % cores
    if tiles < cores:
        parts = min(cores // tiles, steps // FEWEST_STEPS)
        if parts > 1:
            yield tiles * parts, tiles
        if cores % tiles and tiles * steps // cores >= FEWEST_STEPS:
            yield cores, tiles
    elif rest:
        if rest * steps // cores >= FEWEST_STEPS:
            yield cores, rest
        yield cores, rest + cores


def spread_over(plan: HopperGemm, tile: TileConfig) -> TileConfig:
    """The configuration with blocks for the tiles of a gemm of other extents, and as many tiles shared out as the first
    division that shares any: what machine code does not depend on (`KernelConfig`)."""
    blocks_each, tiles = 2 if tile.multicast else 1, plan.tiles(tile)
    if tile.split_k > 1:
        return replace(tile, blocks=tiles * tile.split_k)  # a cluster has one
    cores, alone = max(plan.target.cores // blocks_each, 1), not tile.stream_k
    one_each = min(tiles, cores), min(tiles, cores)
    found = [(n, shared) for n, shared in _partitions(tiles, plan.k_tiles, cores, alone) if alone or shared]
    fitting = [(n, shared) for n, shared in found if shared * plan.k_tiles * n < 1 << 31]
    workers, shared = next(iter(fitting), one_each)
    return replace(tile, blocks=workers * blocks_each, stream_k=shared)


def _instructions(spec: KernelSpec) -> float:
    """The number of them that an element of the result takes, about."""
    total = 0.0
    for store in spec.stores:
        short = set(quantised_at_once(store.access.root).values())
        for n in toposort((store.access.root,)):
            own = 0
            if isinstance(n.op, Map):
                own = QUANTISED_GELU if n in short else SPECIAL_UNIT(n.op.fn)
            elif isinstance(n.op, (Quantize, Dequantize, Select)):
                own = 1 if short else QUANTISED
            total += own * store.access.columns_extent / spec.plan.N
    return total


def _read_cycles(store: Store, plan_n: int, up: Node | None) -> float:
    """Cycles for an element of the result, of operands that vary along rows and columns."""
    if store.aux:
        return AUX_CYCLES
    places = [store.access.of_leaf(n) for n in leaves(store, up)]
    return READ_CYCLES * (sum(bool(p.rows and p.columns) for p in places) * store.access.columns_extent / plan_n)


def work(spec: KernelSpec) -> Work:
    """The work of a kernel."""
    plan, tile, config = spec.plan, spec.tile, spec.config
    units = plan.target.chip.units
    operand = "s8" if plan.lhs.dtype.is_integer else plan.lhs.dtype.name
    unit = next((u for u in units if u.operand == operand), units[0])
    steps = -(-plan.k_tiles // tile.split_k)
    products = 2 * tile.tile_m * tile.tile_n * plan.tile_k / unit.ops_per_cycle
    tall = config.rows == 128 and not tile.pingpong and all(s.access.root.dtype.size_bytes(1) == 1 for s in spec.stores)
    read = tile.tile_m // 64 * (64 + tile.tile_n) * 128
    if tall:  # 8 steps took 8,130 cycles, of 128 x 256 8,220
        read = tile.tile_n // 64 * (64 + tile.tile_m) * 128
    step = max(products, (read + config.stage_bytes) / SHARED_BYTES_PER_CYCLE) * (BLOCK_SCALED if plan.scales else 1)
    step *= (FEW_STAGES if tile.num_stages < 4 else 1) * (PINGPONG_STEP if tile.pingpong else 1)
    workers = tile.blocks // config.cluster
    whole = plan.tiles(tile) - tile.stream_k
    each = -(-whole // workers) + tile.stream_k / workers
    elements = tile.tile_m * config.result_n
    own_n = tile.tile_n // tile.split_k
    boundary = (DEFERRED_CYCLES if tile.deferred_store else END_CYCLES) * own_n * max(tile.tile_m, 128) / (128 * 256)
    boundary *= TALL if tall else 1
    boundary += elements * STEP_CYCLES / config.consumers * _instructions(spec) * (2 if tile.pingpong else 1)
    reads = elements * sum(_read_cycles(s, plan.N, plan.up) for s in spec.stores)
    boundary += reads
    if any(s.view is None for s in spec.stores):
        boundary += elements * STEP_CYCLES * 4
    cycles = START_CYCLES + (MULTICAST_CYCLES if tile.multicast else 0) + each * steps * step
    if tile.pingpong:
        cycles += max(each, 1) * max(elements * PINGPONG_CYCLES + reads / 2, (boundary - steps * step) / 2) + boundary
    else:
        cycles += max(each, 1) * boundary
    if tile.split_k > 1:
        cycles += EXCHANGE_CYCLES + 4 * elements * (1 - 1 / tile.split_k) / SENT_BYTES_PER_CYCLE
    if tile.stream_k:
        even = workers % tile.stream_k == 0  # else a block has a part of two tiles
        cycles += FIXUP_CYCLES * (1 if even else 2) + tile.tile_m * tile.tile_n * PART_CYCLES
    copied = sum(2 * m.copied_bytes for m in (plan.lhs, plan.rhs) if m.source is None and not m.constant)
    again = CROSSING if tile.tile_m < plan.M <= 2 * tile.tile_m and not tile.multicast else 1
    by_lines = sum(s.access.root.tensor.size_bytes for s, p in zip(spec.stores, config.store_pitch, strict=False) if p)
    by_lines *= (WIDE_LINES if config.padded_n == tile.tile_n == 256 else LINES) - 1
    phases = [Phase(cycles, 0.0, {"memory": again * plan.problem.bytes + by_lines})]
    if copied:
        phases.insert(0, Phase(0.0, 0.0, {"memory": float(copied)}))
    return Work(tuple(phases), launches=float(len(phases)))
