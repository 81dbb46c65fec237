"""Sizes of a Hopper kernel: which are legal, and what each makes an SM do.

A step along K is 128 bytes of both operands. It takes as long as the tensor cores take, or as shared memory takes to be filled
and read, whichever is longer. Cycles were fitted to 1,400 kernels of sixty shapes in three types on an H200: predictions are
within 11 % (root mean square), the first choice 2.7 % slower than the best of six.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

from tilewright.candidates.triton.hopper.gemm.form import HELD, Form, Out, alike, size
from tilewright.candidates.triton.hopper.gemm.plan import Plan
from tilewright.candidates.triton.hopper.gemm.view import TmaView, tma_view
from tilewright.dtype import PRED
from tilewright.hardware.target import Target
from tilewright.ir.expression import quantised_at_once
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Dequantize, Map, Param, Quantize, Select
from tilewright.lowering.access import Access
from tilewright.schedule.cost import Phase, Work, predict_us

TILES = (*((m, n) for m in (128, 64) for n in (256, 224, 192, 160, 128, 96, 64)), (256, 128))
BLOCK_TILES = ((128, 128), (128, 64), (64, 128), (64, 64))  # a tile's columns share a scale
SPLIT_TILES = ((128, 192), (128, 128), (128, 96), (128, 64))  # others lost wherever they were tried
PINGPONG_TILES = ((128, 192), (128, 160), (128, 128), (64, 256))
MOST_STAGES = 8
HALVED = 64  # columns of a tile, at least, both halves of which begin where 32 columns do
BARRIERS_BYTES = 2048  # of shared memory, beside stages and results
LONG = frozenset({"gelu", "gelu_tanh", "erf", "erfc", "tanh", "silu", "logistic"})
MOST_SHARED = 64 * 128  # elements of a warpgroup's part of a shared tile: what it keeps in registers beside those it adds
LATER = 0.03
# Of an H200's 132 SMs, those that clusters of so many blocks find room on: they do not span the chip's parts.
ROOM = {2: 1.0, 3: 117 / 132, 4: 112 / 132}
EXCHANGE_CYCLES = 1200.0  # of a cluster: all are done with their rings, sums are sent, all have come
SENT_BYTES_PER_CYCLE = 8.0  # from one block of a cluster to the others
FEWEST_STEPS = 4  # along K that are worth a share of a tile
SHARED_BYTES_PER_CYCLE = 121.0  # of an SM, of 32 banks of 4 bytes
SCALED = 1.2  # a step whose sums are multiplied by scales
START_CYCLES = 2100.0  # from a launch until the first products: descriptors, first stages from memory
END_CYCLES = 3000.0  # of a tile of 128 x 256 that is packed and stored while the tensor cores wait
TALL = 0.76  # of that, where a warpgroup has 128 rows of bytes, which leave in fewer pieces (850 cycles against 1,117)
HELD_CYCLES = 2600.0  # of one that leaves behind the next tile's products
SHARE_CYCLES = 4800.0  # until a part of a tile is written, counted, and read by the last block
PART_CYCLES = 0.63  # of each of its elements
STEP_CYCLES = 1.0 / 64  # of an elementwise step on an element, for a warpgroup beside another one
TURN_CYCLES = 0.07  # of an element of a tile that is stored while the next one is multiplied: shared memory serves both
FETCHED_CYCLES, READ_CYCLES = 0.10, 0.25  # of an element of an operand as large as the result, by TMA or by threads
CROSSING = 1.2  # of the time of memory, where two blocks read the same columns, often from the other half of L2
PAIR_CYCLES = 600.0  # that blocks of a pair wait for one another
FEWEST_TURNS = 4  # tiles of a block that are worth taking turns
IN_TURNS = 0.93  # of a step, where one warpgroup alone multiplies: less than its bytes of shared memory say
FEW_STAGES = 1.12  # a step of a ring of fewer than four
INSTRUCTIONS = {"gelu": 12, "gelu_tanh": 10, "silu": 8, "logistic": 8, "exponential": 4, "erf": 16, "erfc": 16, "tanh": 14}
QUANTISED_GELU, QUANTISED = 6, 4


@dataclass(frozen=True)
class Point:
    """One kernel of the space.

    Attributes:
        tile_m, tile_n, tile_k, num_stages, group_m, pingpong, hold, widened, paired: see `form.KernelConfig`.
        blocks: that are started.
        shared_tiles: tiles at the end of which every block has an even share of K.
        split: blocks of a cluster that have a share of K each and finish a share of the columns.
        ready: codes are stored as the bytes that are multiplied (`w4.stage.Coded`); None, and no knob, of other kernels.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    num_stages: int
    group_m: int
    pingpong: bool
    hold: bool
    widened: bool
    paired: bool
    blocks: int
    shared_tiles: int
    split: int = 1
    ready: bool | None = None


SMALLEST = Point(64, 64, 128, 2, 16, False, False, False, False, 1, 0)


def form_of(plan: Plan, point: Point, *, chained: bool = True) -> Form:
    """A point's kernel."""
    plan = plan.packed_for(widened=point.widened)
    rows = point.tile_m // (2 if point.tile_m >= 128 and not point.pingpong else 1)
    outs: list[Out] = []
    for access in plan.stores:
        widest = math.gcd(128 // size(access.root.dtype), point.tile_n // plan.halves // point.split)
        if not quantised_at_once(access.root) and any(isinstance(n.op, Map) and n.op.fn in LONG for n in access.views):
            widest = min(widest, 64)  # of wider ones more would be under way than there are registers
        fitting = (_out(access, plan, rows, widest >> i) for i in range(3))  # heads may be narrower than a piece
        outs.append(next((o for o in fitting if o.view is not None), Out(access, None, widest)))
    if len(outs) == 1 and plan.blocks is None and not point.hold and not point.shared_tiles and point.split == 1:
        outs[0] = replace(outs[0], fetched=_fetched(outs[0], plan, rows))
    return Form(plan, point, plan.problem.acc.dtype, tuple(outs), chained)


def _out(access: Access, plan: Plan, rows: int, columns: int) -> Out:
    """A store in pieces of so many columns."""
    if access.first % columns:  # a piece would begin in one store and end in another
        return Out(access, None, columns)
    element = size(access.root.dtype)
    view = tma_view(access.of_result(), plan.batch, plan.M, access.columns_extent, rows, columns, element)
    return Out(access, view, columns)


def _fetched(out: Out, plan: Plan, rows: int) -> tuple[Node, TmaView] | None:
    """What TMA may bring of what a store reads: one operand as large as the result, of elements as large."""
    element = size(out.access.root.dtype)
    if out.view is None or out.view.across or out.access.columns_extent != plan.N:
        return None
    read = [n for n in out.access.views if isinstance(n.op, Param) and n is not plan.second]
    for leaf in (n for n in read if size(n.dtype) == element and n.dtype is not PRED):
        view = tma_view(out.access.of_leaf(leaf), plan.batch, plan.M, plan.N, rows, out.columns, element)
        if view is not None and not view.across:
            return leaf, view
    return None


def points(plan: Plan, most_shared: int = MOST_SHARED) -> list[Point]:
    """The legal points, the most promising first."""
    found = list(_legal(plan, most_shared))
    took = {p: float(predict_us(work(plan, p), plan.target)) for p in found}
    found.sort(key=lambda p: took[p])
    alike: dict[tuple[int, int, bool, int], int] = {}
    for p in found:  # what tiles differ in is better known than what kernels of one tile do: those come later and later
        key = p.tile_m, p.tile_n, p.pingpong, p.split
        earlier = alike.get(key, 0)
        alike[key] = earlier + 1
        took[p] *= 1 + LATER * earlier
    return sorted(found, key=lambda p: took[p])


def _legal(plan: Plan, most_shared: int) -> Iterable[Point]:
    target = plan.target
    steps = -(-plan.K // plan.tile_k)
    for base in _bases(plan):
        pairs = 2 if base.paired else 1
        waste = _tiles(plan, base) * pairs * base.tile_m * base.tile_n / (plan.batch * plan.M * plan.N * plan.halves)
        smallest = replace(base, tile_k=SMALLEST.tile_k, widened=False) == SMALLEST
        if (waste > 4 and not smallest) or (base.paired and base.tile_m >= plan.M):
            continue
        cores = target.cores // pairs
        if base.pingpong and -(-_tiles(plan, base) // cores) < FEWEST_TURNS:
            continue
        form = form_of(plan, base)
        if base.pingpong and base.tile_n > 128 and len(form.outs) > 1 and not alike(form.outs, base.tile_n):
            continue  # there would be no registers for several codes
        for hold in _holds(form, steps, -(-_tiles(plan, base) // cores)):
            whole = (
                hold
                or base.pingpong
                or bool(plan.blocks)
                or form.config.tile_n != form.config.shape_n
                or form.config.rows * form.config.tile_n > most_shared
            )
            for blocks, shared in _partitions(_tiles(plan, base), steps, cores, whole):
                if shared * steps * blocks >= 1 << 31:  # shares are worked out in 32 bits
                    continue
                point = replace(base, hold=hold, blocks=blocks * pairs, shared_tiles=shared)
                form = form_of(plan, point)
                stages = ring_stages(form, target)
                if stages >= 2:
                    yield replace(point, num_stages=stages)
        yield from _splits(plan, base, steps)


def _splits(plan: Plan, base: Point, steps: int) -> Iterable[Point]:
    """Clusters whose blocks share K, one for each tile: where tiles are fewer than SMs."""
    if base.pingpong or base.paired or plan.blocks or plan.second or (base.tile_m, base.tile_n) not in SPLIT_TILES:
        return
    for split, part in ROOM.items():
        own = base.tile_n // split
        tiles = _tiles(plan, base)
        if own < 32 or own * split != base.tile_n or own & (own - 1) or steps < split * FEWEST_STEPS:
            continue
        if tiles * split > round(part * plan.target.cores):
            continue
        point = replace(base, split=split, blocks=tiles * split)
        form = form_of(plan, point)
        stages = ring_stages(form, plan.target)
        if stages >= 2 and stages * form.config.stage_bytes >= room_bytes(point.tile_m * point.tile_n, split):
            yield replace(point, num_stages=stages)


def room_bytes(tile: int, split: int) -> int:
    """Of the ring, what a cluster's exchange takes: a tile of so many sums, and what comes from the other blocks."""
    return 4 * tile * (2 * split - 1) // split


def ring_stages(form: Form, target: Target) -> int:
    """Of the ring, as many as there is room for."""
    return min((target.chip.shared_bytes - form.config.out_bytes - BARRIERS_BYTES) // form.config.stage_bytes, MOST_STAGES)


def _bases(plan: Plan) -> Iterable[Point]:
    """Tiles, and who multiplies them."""
    tiles = TILES if plan.blocks is None else BLOCK_TILES
    tiles = [t for t in tiles if plan.second is None or t[1] % HALVED == 0]
    for (tile_m, tile_n), paired, widened in product(tiles, (False, True), _orders(plan)):
        base = replace(SMALLEST, tile_m=tile_m, tile_n=tile_n, tile_k=plan.tile_k, widened=widened, paired=paired)
        yield base
        if (tile_m, tile_n) in PINGPONG_TILES and plan.blocks is None:
            yield replace(base, pingpong=True)


def _tiles(plan: Plan, point: Point) -> int:
    """Tiles, or pairs of them."""
    down = -(-plan.M // (point.tile_m * (2 if point.paired else 1)))
    return plan.batch * down * -(-plan.N // (point.tile_n // plan.halves))


def _orders(plan: Plan) -> Iterable[bool]:
    """Tell whether rows of the right operand may come in the order that gives a thread eight neighbours of the result: bytes
    should; what is wider needs fewer reads of the columns' scales then, but is copied once more."""
    if not plan.rhs.constant or plan.N % 32:
        return (False,)
    widest = max(size(s.root.dtype) for s in plan.stores)
    return (True,) if widest == 1 else (True, False) if widest == 2 else (False,)


def _holds(form: Form, steps: int, rounds: int) -> Iterable[bool]:
    """Tell whether a result may wait for the next tile: one store of 16-bit values, enough products to hide it behind."""
    out, config = form.outs[0], form.config
    able = len(form.outs) == 1 and out.view is not None and out.access.root.dtype in HELD and not out.view.across
    if (
        able
        and config.rows == 64
        and not (config.pingpong or config.by_blocks)
        and steps >= config.pieces
        and config.tile_n >= 128
        and rounds > 1
    ):
        return (True, False)
    return (False,)


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


def _large(access: Access, plan: Plan) -> float:
    """How many operands of a store vary along rows and columns, of a whole result."""
    places = [access.of_leaf(n) for n in access.views if isinstance(n.op, Param) and n is not plan.second]
    return sum(bool(p.rows and p.columns) for p in places) * access.columns_extent / plan.N


def _instructions(plan: Plan) -> float:
    """About how many a result's element takes."""
    total = 0.0
    for access in plan.stores:
        short = set(quantised_at_once(access.root).values())
        for n in toposort((access.root,)):
            if isinstance(n.op, Map):
                total += (QUANTISED_GELU if n in short else INSTRUCTIONS.get(n.op.fn, 1)) * access.columns_extent / plan.N
            elif isinstance(n.op, (Quantize, Dequantize, Select)):
                total += (1 if short else QUANTISED) * access.columns_extent / plan.N
    return total


def work(plan: Plan, point: Point) -> Work:
    """What a point makes the machine do."""
    plan = plan.packed_for(widened=point.widened)
    form, target = form_of(plan, point), plan.target
    config = form.config
    operand = "s8" if plan.lhs.dtype.is_integer else plan.lhs.dtype.name
    unit = next((u for u in target.chip.units if u.operand == operand), target.chip.units[0])
    steps = -(-plan.K // plan.tile_k)
    products = 2 * point.tile_m * point.tile_n * plan.tile_k / unit.ops_per_cycle
    tall = config.rows == 128 and not point.pingpong and all(size(o.access.root.dtype) == 1 for o in form.outs)
    read = point.tile_m // 64 * (64 + point.tile_n) * 128
    if tall:  # 8 steps took 8,130 cycles, of 128 x 256 8,220
        read = point.tile_n // 64 * (64 + point.tile_m) * 128
    step = max(products, (read + config.stage_bytes) / SHARED_BYTES_PER_CYCLE) * (SCALED if plan.blocks else 1)
    step *= (FEW_STAGES if point.num_stages < 4 else 1) * (IN_TURNS if point.pingpong else 1)
    workers = point.blocks // config.cluster
    whole = _tiles(plan, point) - point.shared_tiles
    each = -(-whole // workers) + point.shared_tiles / workers
    elements = point.tile_m * config.width
    steps = -(-steps // point.split)
    own_n = point.tile_n // point.split
    boundary = (HELD_CYCLES if point.hold else END_CYCLES) * own_n * max(point.tile_m, 128) / (128 * 256)
    boundary *= TALL if tall else 1
    boundary += elements * STEP_CYCLES / config.groups * _instructions(plan) * (2 if point.pingpong else 1)
    reads = elements * sum(FETCHED_CYCLES if o.fetched else READ_CYCLES * _large(o.access, plan) for o in form.outs)
    boundary += reads
    if any(o.view is None for o in form.outs):
        boundary += elements * STEP_CYCLES * 4
    cycles = START_CYCLES + (PAIR_CYCLES if point.paired else 0) + each * steps * step
    if point.pingpong:
        cycles += max(each, 1) * max(elements * TURN_CYCLES + reads / 2, (boundary - steps * step) / 2) + boundary
    else:
        cycles += max(each, 1) * boundary
    if point.split > 1:
        cycles += EXCHANGE_CYCLES + 4 * elements * (1 - 1 / point.split) / SENT_BYTES_PER_CYCLE
    if point.shared_tiles:
        even = workers % point.shared_tiles == 0  # else a block has a part of two tiles
        cycles += SHARE_CYCLES * (1 if even else 2) + point.tile_m * point.tile_n * PART_CYCLES
    copied = sum(2 * m.copied_bytes for m in (plan.lhs, plan.rhs) if m.source is None and not m.constant)
    again = CROSSING if point.tile_m < plan.M <= 2 * point.tile_m and not point.paired else 1
    phases = [Phase(cycles, 0.0, {"memory": again * plan.problem.bytes})]
    launches = 1.0
    if copied:
        phases.insert(0, Phase(0.0, 0.0, {"memory": float(copied)}))
        launches += 1.0
    return Work(tuple(phases), launches=launches)
