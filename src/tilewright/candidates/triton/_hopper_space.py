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

from tilewright.candidates.triton._hopper_form import HELD, Form, Out, Side, size
from tilewright.candidates.triton._hopper_plan import Plan, with_wide_stores
from tilewright.candidates.triton._hopper_view import tma_view
from tilewright.hardware.target import Target
from tilewright.ir.access import Access
from tilewright.ir.graph import toposort
from tilewright.ir.ops import Acc, Convert, Map, Param
from tilewright.schedule.cost import Phase, Work, predict_us
from tilewright.schedule.problem import Problem
from tilewright.schedule.schedule import Schedule

TILES = (*((m, n) for m in (128, 64) for n in (256, 224, 192, 160, 128, 96, 64)), (256, 128))
BLOCK_TILES = ((128, 128), (128, 64), (64, 128), (64, 64))  # a tile's columns share a scale
SMALLEST = (64, 64)
MOST_STAGES = 8
BARRIERS_BYTES = 2048  # of shared memory, beside stages and results
LONG = frozenset({"gelu", "gelu_tanh", "erf", "erfc", "tanh", "silu", "logistic"})
MOST_SHARED = 64 * 128  # elements of a warpgroup's part of a shared tile: what it keeps in registers beside those it adds
LATER = 0.03
FEWEST_STEPS = 4  # along K that are worth a share of a tile
SHARED_BYTES_PER_CYCLE = 121.0  # of an SM, of 32 banks of 4 bytes
SCALED = 1.2  # a step whose sums are multiplied by scales
START_CYCLES = 2100.0  # from a launch until the first products: descriptors, first stages from memory
END_CYCLES = 5400.0  # of a tile of 128 x 256 that is packed and stored while the tensor cores wait
HELD_CYCLES = 2800.0  # of one that leaves behind the next tile's products
SHARE_CYCLES = 4800.0  # until a part of a tile is written, counted, and read by the last block
PART_CYCLES = 0.63  # of each of its elements
STEP_CYCLES = 1.0 / 128  # of an elementwise step on an element, four warps of 32 lanes a cycle


@dataclass(frozen=True)
class Point:
    """One kernel of the space.

    Attributes:
        tile_m, tile_n, num_stages, group_m, hold, widened, paired: see `_hopper_text.Form`.
        blocks: that are started.
        shared_tiles: tiles at the end of which every block has an even share of K.
    """

    tile_m: int
    tile_n: int
    num_stages: int
    group_m: int
    hold: bool
    widened: bool
    paired: bool
    blocks: int
    shared_tiles: int

    def schedule(self, tile_k: int) -> Schedule:
        """As reports print it."""
        return Schedule.of(
            tile_m=self.tile_m,
            tile_n=self.tile_n,
            tile_k=tile_k,
            num_stages=self.num_stages,
            group_m=self.group_m,
            hold=self.hold,
            widened=self.widened,
            paired=self.paired,
            blocks=self.blocks,
            shared_tiles=self.shared_tiles,
        )


def point_of(schedule: Schedule) -> Point:
    """The point that a schedule names."""
    knobs = dict(schedule.knobs)

    def number(name: str) -> int:
        return int(knobs[name])

    return Point(
        number("tile_m"),
        number("tile_n"),
        number("num_stages"),
        number("group_m"),
        bool(knobs["hold"]),
        bool(knobs["widened"]),
        bool(knobs["paired"]),
        number("blocks"),
        number("shared_tiles"),
    )


def plan_for(plan: Plan, point: Point) -> Plan:
    """The plan as a point's kernel needs it."""
    return with_wide_stores(plan) if point.widened else plan


def form_of(problem: Problem, plan: Plan, point: Point, *, chained: bool = True) -> Form:
    """What the text of a point's kernel depends on; `plan` is the point's own (`plan_for`)."""
    groups = 2 if point.tile_m >= 128 else 1
    rows = point.tile_m // groups
    outs: list[Out] = []
    for access in plan.stores:
        widest = math.gcd(128 // size(access.root.dtype), point.tile_n)
        if any(isinstance(n.op, Map) and n.op.fn in LONG for n in access.views):
            widest = min(widest, 64)  # of wider ones more would be under way than there are registers
        fitting = (_out(access, plan, rows, widest >> i) for i in range(3))  # heads may be narrower than a piece
        outs.append(next((o for o in fitting if o.view is not None), Out(access, None, widest)))
    return Form(
        Side(plan.lhs.dtype, plan.lhs.along_k, plan.lhs.batched, shared=_shared(plan.lhs.strides[0], plan)),
        Side(plan.rhs.dtype, plan.rhs.along_k, plan.rhs.batched, plan.rhs.widened, shared=_shared(plan.rhs.strides[0], plan)),
        problem.acc.dtype,
        point.tile_m,
        point.tile_n,
        groups,
        point.num_stages,
        point.group_m,
        point.hold,
        point.shared_tiles > 0,
        chained,
        point.paired,
        plan.M % (point.tile_m * (2 if point.paired else 1)) == 0,
        plan.N % point.tile_n == 0,
        plan.N,
        tuple(outs),
        plan.blocks,
    )


def _out(access: Access, plan: Plan, rows: int, columns: int) -> Out:
    """A store in pieces of so many columns."""
    if access.first % columns:  # a piece would begin in one store and end in another
        return Out(access, None, columns)
    element = size(access.root.dtype)
    view = tma_view(access.of_result(), plan.batch, plan.M, access.columns_extent, rows, columns, element)
    return Out(access, view, columns)


def _shared(stride: int, plan: Plan) -> bool:
    return plan.batch > 1 and stride == 0


def points(problem: Problem, plan: Plan, target: Target) -> list[Point]:
    """The legal points, the most promising first."""
    found = list(_legal(problem, plan, target))
    took = {p: float(predict_us(work(problem, plan, p, target), target)) for p in found}
    found.sort(key=lambda p: took[p])
    alike: dict[tuple[int, int], int] = {}
    for p in found:  # what tiles differ in is better known than what kernels of one tile do: those come later and later
        earlier = alike.get((p.tile_m, p.tile_n), 0)
        alike[p.tile_m, p.tile_n] = earlier + 1
        took[p] *= 1 + LATER * earlier
    return sorted(found, key=lambda p: took[p])


def _legal(problem: Problem, plan: Plan, target: Target) -> Iterable[Point]:
    steps = -(-plan.K // plan.tile_k)
    for (tile_m, tile_n), paired in product(TILES if plan.blocks is None else BLOCK_TILES, (False, True)):
        base = Point(tile_m, tile_n, 2, 16, False, False, paired, 1, 0)
        waste = _tiles(plan, base) * (2 if paired else 1) * tile_m * tile_n / (plan.batch * plan.M * plan.N)
        if (waste > 4 and (tile_m, tile_n, paired) != (*SMALLEST, False)) or (paired and tile_m >= plan.M):
            continue
        for widened in _orders(plan):
            base = replace(base, widened=widened)
            form = form_of(problem, plan_for(plan, base), base)
            room = target.chip.shared_bytes - form.out_bytes - BARRIERS_BYTES
            stages = min(room // form.stage_bytes, MOST_STAGES)
            if stages < 2:
                continue
            cores = target.cores // (2 if paired else 1)
            for hold in (False,) if plan.blocks else _holds(form, steps, -(-_tiles(plan, base) // cores)):
                whole = hold or plan.blocks is not None or form.tile_n != form.shape_n or form.rows * form.tile_n > MOST_SHARED
                for blocks, shared in _partitions(_tiles(plan, base), steps, cores, whole):
                    if shared * steps * blocks >= 1 << 31:  # shares are worked out in 32 bits
                        continue
                    blocks *= 2 if paired else 1
                    yield replace(base, num_stages=stages, hold=hold, blocks=blocks, shared_tiles=shared)


def _tiles(plan: Plan, point: Point) -> int:
    """Tiles, or pairs of them."""
    down = -(-plan.M // (point.tile_m * (2 if point.paired else 1)))
    return plan.batch * down * -(-plan.N // point.tile_n)


def _orders(plan: Plan) -> Iterable[bool]:
    """Whether rows of the right operand may come in the order that widens stores of bytes, and should."""
    narrow = all(size(s.root.dtype) == 1 for s in plan.stores)
    return (True,) if narrow and plan.rhs.constant and plan.N % 32 == 0 else (False,)


def _holds(form: Form, steps: int, rounds: int) -> Iterable[bool]:
    """Whether a result may wait for the next tile: one store of 16-bit values, enough products to hide it behind."""
    out = form.outs[0]
    able = len(form.outs) == 1 and out.view is not None and out.access.root.dtype in HELD and not out.view.across
    if able and form.rows == 64 and steps >= form.pieces and form.tile_n >= 128 and rounds > 1:
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


def work(problem: Problem, plan: Plan, point: Point, target: Target) -> Work:
    """What a point makes the machine do."""
    plan = plan_for(plan, point)
    form = form_of(problem, plan, point)
    operand = "s8" if plan.lhs.dtype.is_integer else plan.lhs.dtype.name
    unit = next((u for u in target.chip.units if u.operand == operand), target.chip.units[0])
    steps = -(-plan.K // plan.tile_k)
    products = 2 * point.tile_m * point.tile_n * plan.tile_k / unit.ops_per_cycle
    read = (point.tile_m // 64) * (64 + point.tile_n) * 128
    step = max(products, (read + form.stage_bytes) / SHARED_BYTES_PER_CYCLE) * (SCALED if plan.blocks else 1)
    workers = point.blocks // (2 if point.paired else 1)
    whole = _tiles(plan, point) - point.shared_tiles
    each = -(-whole // workers) + point.shared_tiles / workers
    elementwise = sum(not isinstance(n.op, (Acc, Param, Convert)) for n in toposort(problem.op.stores))
    element = point.tile_m * point.tile_n * STEP_CYCLES / 2
    boundary = (HELD_CYCLES if point.hold else END_CYCLES) * point.tile_n * max(point.tile_m, 128) / (128 * 256)
    boundary += element * elementwise
    if any(o.view is None for o in form.outs):
        boundary += point.tile_m * point.tile_n * STEP_CYCLES * 4
    cycles = START_CYCLES + each * steps * step + boundary * max(each, 1)
    if point.shared_tiles:
        even = workers % point.shared_tiles == 0  # else a block has a part of two tiles
        cycles += SHARE_CYCLES * (1 if even else 2) + point.tile_m * point.tile_n * PART_CYCLES
    copied = sum(2 * m.copied_bytes for m in (plan.lhs, plan.rhs) if m.source is None and not m.constant)
    phases = [Phase(cycles, 0.0, {"memory": float(problem.bytes)})]
    launches = 1.0
    if copied:
        phases.insert(0, Phase(0.0, 0.0, {"memory": float(copied)}))
        launches += 1.0
    return Work(tuple(phases), launches=launches)
