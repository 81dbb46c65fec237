"""Every size that a nest may be given: one statement of what is legal, a ladder of sizes that enumerates it, and what each
makes the processor do, for many points at once; `schedule.cost` says what that costs.

Cycles are those of the instruction's own issue. The constants beside them are rates of present processors, chosen by reason and
on half of the products of `benchmarks/cost.py`; they only have to tell bad sizes from good ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from tilewright.candidates.llvm.gemm.dots import DOTS, Dot
from tilewright.candidates.llvm.gemm.nest import CACHE_LINE, Blocks, Nest, rounded
from tilewright.dtype import F32
from tilewright.hardware.target import Target
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import VIEWS, Acc, Dequantize, Map, Param, Quantize
from tilewright.schedule.cost import Phase, Quantity, Work, predict_us
from tilewright.schedule.problem import Operand, Problem

# Operations that a function of `_math` takes.
LONG = {
    "exp": 12.0,
    "logistic": 18.0,
    "silu": 19.0,
    "tanh": 20.0,
    "erf": 25.0,
    "erfc": 30.0,
    "gelu": 28.0,
    "gelu_tanh": 24.0,
    "divide": 8.0,
}
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

L1_BYTES, L2_BYTES, L3_BYTES = 32 << 10, 1 << 20, 8 << 20  # where the machine reports none
ONE_THREAD_OPS = 1 << 20  # below this, waking another thread costs more than it saves
WAY, WAYS = 4096, 8  # of the first-level cache: bytes of one, and how many
EVEN = 1.1  # times the least, that the slowest thread's share may be without being ranked lower for it
LEVELS = {2: "L2", 3: "L3", 4: "memory"}
SHORTEST = 128  # groups of K in a pass, if there are several
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256)  # that an extent may be cut into
NARROW = (1, 2, 3, 4, 6, 8)  # vectors in a row of a tile


@dataclass(frozen=True)
class Product:
    """What the sizes are chosen for.

    Attributes:
        dot: the instruction.
        batch, rows, columns, depth: matrices with a right operand of their own; of each of them.
        constant: the right operand is packed beforehand.
        in_place: the left operand may be read where it lies.
        correction: rows of the left operand are added up.
        paired: both halves of the columns meet in the stores.
        threaded: it is worth more threads than one.
        lhs_row, rhs_bytes, out_bytes: bytes of a row of the left operand as it lies in memory, of an element of the right one,
            and of what is written and read beside for an element of the result.
        lhs_steps, rhs_steps, steps: operations on a vector of an operand while it is packed, of the sums when they are stored.
        lhs_computed, rhs_computed: of those on operands, what functions take, beside casts.
    """

    dot: Dot
    batch: int
    rows: int
    columns: int
    depth: int
    constant: bool
    in_place: bool
    correction: bool = False
    gate_up: bool = False
    threaded: bool = True
    lhs_row: int = 0
    rhs_bytes: float = 4.0
    out_bytes: float = 4.0
    lhs_steps: float = 1.0
    rhs_steps: float = 1.0
    steps: float = 0.0
    lhs_computed: float = 0.0
    rhs_computed: float = 0.0

    @classmethod
    def of(cls, problem: Problem, nest: Nest, *, in_place: bool) -> Product:
        """What a nest says of a problem."""
        op = problem.op
        beside = sum(n.tensor.size_bytes for n in toposort(op.stores) if isinstance(n.op, Param))
        written = sum(t.size_bytes for t in problem.outputs)
        return cls(
            nest.dot, nest.batch, nest.rows, nest.columns, nest.depth, nest.constant, in_place,
            correction=bool(nest.choice.correction),
            gate_up=nest.gate_up is not None,
            threaded=problem.ops > ONE_THREAD_OPS,
            lhs_row=-(-problem.K * _stored_bits(problem.lhs, op.lhs) // 8),
            rhs_bytes=_stored_bits(problem.rhs, op.rhs) / 8,
            out_bytes=(written + beside) / max(1, problem.batch * problem.M * problem.N),
            lhs_steps=1 + _steps((op.lhs,)) - _computed(op.lhs),
            rhs_steps=1 + _steps((op.rhs,)) - _computed(op.rhs),
            steps=_steps(op.stores),
            lhs_computed=_computed(op.lhs),
            rhs_computed=_computed(op.rhs),
        )  # fmt: skip

    @property
    def groups(self) -> int:
        """4-byte groups of K, as the instruction takes them."""
        return -(-max(1, -(-self.depth // self.dot.k)) // self.dot.steps) * self.dot.steps


def _steps(roots: Sequence[Node]) -> float:
    """Vector operations of expressions, roughly."""
    found = 0.0
    for n in toposort(roots):
        if isinstance(n.op, Map):
            found += LONG.get(n.op.fn, 1.0)
        elif isinstance(n.op, (Quantize, Dequantize)):
            found += 4.0
        elif not isinstance(n.op, (*VIEWS, Param, Acc)):
            found += 1.0
    return found


def _computed(root: Node) -> float:
    """Operations on a vector of an operand that functions take."""
    return sum(LONG.get(n.op.fn, 1.0) for n in toposort((root,)) if isinstance(n.op, Map))


def _stored_bits(operand: Operand, root: Node) -> int:
    """Bits of an element as it lies in memory; of all sources of its size, where it is computed from several."""
    if operand.source is not None:
        return operand.stored.dtype.bits
    sources = [n.tensor for n in toposort((root,)) if isinstance(n.op, Param)]
    most = max((t.elements for t in sources), default=0)
    return sum(t.dtype.bits for t in sources if t.elements == most) or root.dtype.bits


@dataclass(frozen=True)
class Points:
    """Sizes side by side, as `Blocks` holds those of one nest, but for kc in groups, and in vectors, tiles and panels."""

    mr: Ints
    nv: Ints
    kc: Ints
    mc_tiles: Ints
    nc_panels: Ints
    pack_lhs: Flags
    private: Flags

    def __len__(self) -> int:
        return len(self.mr)

    def at(self, keep: Flags | Ints) -> Points:
        """Some of them, in the order asked for."""
        return Points(*(getattr(self, f.name)[keep] for f in fields(self)))

    def blocks(self, product: Product) -> Iterator[Blocks]:
        """One after the other."""
        dot = product.dot
        for mr, nv, kc, mc, nc, pack, private in zip(*(getattr(self, f.name) for f in fields(self)), strict=True):
            tile, nr = int(mr), int(nv) * dot.lanes
            deep = max(product.depth if kc >= product.groups else int(kc) * dot.k, 1)
            yield Blocks(dot.instruction, tile, nr, deep, int(mc) * tile, int(nc) * nr, bool(pack), bool(private))

    @classmethod
    def of(cls, b: Blocks, dot: Dot) -> Points:
        """One nest's."""
        kc = rounded(-(-b.kc // dot.k), dot.steps)
        mr, nv, deep, mc, nc = (np.array([x], np.int64) for x in (b.mr, b.nr // dot.lanes, kc, b.mc // b.mr, b.nc // b.nr))
        return cls(mr, nv, deep, mc, nc, np.array([b.pack_lhs]), np.array([b.private]))


def legal(points: Points, product: Product, target: Target) -> Flags:
    """Which points a nest can be generated for, and hold what it promises: tiles in registers, blocks inside the product,
    passes of whole packed vectors; in the second-level cache a block of the right operand and the sums of several passes."""
    p, dot, groups = points, product.dot, product.groups
    most = np.array([0, *(dot.most_rows(nv) for nv in range(1, 1 + max(NARROW)))])
    nr = p.nv * dot.lanes
    tiles, panels, passes = (
        -(-size // np.maximum(of, 1)) for size, of in ((product.rows, p.mr), (product.columns, nr), (groups, p.kc))
    )
    fits = (p.mr >= 1) & (p.mr <= most[np.minimum(p.nv, max(NARROW))]) & (p.mr <= product.rows)
    inside = (p.mc_tiles >= 1) & (p.mc_tiles <= tiles) & (p.nc_panels >= 1) & (p.nc_panels <= panels)
    steps = (p.kc >= groups) | ((p.kc % dot.lanes == 0) & (p.kc >= SHORTEST))
    l2 = target.caches_bytes.get("L2", 0) or L2_BYTES
    sums = (passes == 1) | (p.mc_tiles * p.nc_panels * p.mr * nr * 4 <= l2)
    near = (p.nc_panels == 1) | (p.nc_panels * nr * np.minimum(p.kc, groups) * dot.lane_bytes <= l2)
    read = p.pack_lhs | product.in_place
    halves = 1 + product.gate_up
    whole = p.nv % (halves * dot.rows) == 0
    row = nr // halves  # of a tile, read as one vector
    aligned = (row * 4 % CACHE_LINE == 0) | (row & (row - 1) == 0)
    return fits & inside & steps & sums & near & read & whole & aligned & ~(p.private & product.constant)


def space(product: Product, target: Target) -> Points:
    """All legal points on a ladder of sizes."""
    columns: list[list[Ints]] = []
    for nv in NARROW:
        for mr in _heights(product, product.dot.most_rows(nv)):
            tiles, panels = -(-product.rows // mr), -(-product.columns // (nv * product.dot.lanes))
            sizes = np.meshgrid(
                mr, nv, _passes(product), _parts(tiles), _parts(panels), *_flags(product), indexing="ij", copy=False
            )  # fmt: skip
            columns.append([s.reshape(-1) for s in sizes])
    mr, nv, kc, mc, nc, pack, private = (np.concatenate(c) for c in zip(*columns, strict=True))
    points = Points(mr, nv, kc, mc, nc, pack != 0, private != 0)
    return points.at(legal(points, product, target))


def _heights(product: Product, most: int) -> range:
    """Rows of a tile: as many as there is room for, down to two thirds of that."""
    least, step = min(most, product.rows), product.dot.tile if product.rows > product.dot.tile else 1
    return range(max(1, -(-2 * least // 3)), least + 1, step) if step == 1 else range(step, least + 1, step)


def _passes(product: Product) -> Ints:
    """Groups of K in a pass."""
    groups, lanes = product.groups, product.dot.lanes
    cut = {rounded(-(-groups // n), lanes) for n in PARTS}
    return np.array(sorted({groups} | {c for c in cut if SHORTEST <= c < groups}))


def _parts(size: int) -> Ints:
    return np.array(sorted({-(-size // n) for n in PARTS} | {1}))


def _flags(product: Product) -> tuple[Ints, Ints]:
    """pack_lhs and private."""
    return np.array([0, 1] if product.in_place else [1]), np.array([0] if product.constant else [0, 1])


@dataclass(frozen=True)
class Rates:
    """Cycles of what is not the product itself."""

    latency: float = 3.5  # until an accumulator can be added to again
    spread: float = 1.0  # of a broadcast element of the left operand that is an operand of the instruction itself
    loaded: float = 1.1  # of one that is an instruction of its own
    wide: float = 1.0  # of 64 bytes of the right operand, unless the first-level cache gives less in a cycle
    call: float = 20.0  # of a micro-kernel: its call, filling and draining
    sums: float = 4.0  # of a vector of sums stored and read again
    step: float = 0.9  # of a vector in each step of the epilogue
    row: float = 8.0  # of a row of a tile in the epilogue
    part: float = 3.0  # times that, of a panel that a store only has part of
    odd_part: float = 26.0  # likewise, of vectors that are no power of two: their masks are taken apart
    task: float = 180.0  # of taking one from the counter
    copied: float = 70.0  # of a vector of the left operand, packed as it lies
    turned: float = 10.0  # of a vector of the right one, interleaved or transposed
    computed: float = 1.5  # of a step of a function on a vector of either, while it is packed
    conflict: float = 0.75  # of a broadcast element, if as many rows as the cache has ways lie in the same places
    restart: float = 720.0  # of a block's next piece of the right operand, that lies elsewhere than where it was read before
    near: float = 0.73  # of a cache that operands may fill and stay


RATES = Rates()


def ranked(product: Product, target: Target) -> Iterator[Blocks]:
    """All sizes that a nest may have on this machine, the quickest first."""
    points = space(product, target)
    us = predict_us(work(product, points, target), target)
    cores = target.cores if product.threaded else 1
    share = _share(product, points, _Counts.of(product, points), cores)
    uneven = np.maximum(1, share / (EVEN * share.min()))  # threads waiting for one are worse off than the model can tell
    return points.at(np.argsort(us * uneven**2, kind="stable")).blocks(product)


def _share(n: Product, p: Points, c: _Counts, cores: int) -> Quantity:
    """Of all work, the part that the slowest thread does."""
    return np.where(p.private, -(-n.batch // cores) / n.batch, _makespan(n, p, c, cores))


@dataclass(frozen=True)
class _Counts:
    """How often things are done, a number or an array of one a point.

    Attributes:
        tiles, panels, passes: of a matrix.
        deep: groups of K in a pass.
        nr: columns of a panel.
        down, across: blocks of a matrix.
    """

    tiles: Quantity
    panels: Quantity
    passes: Quantity
    deep: Quantity
    nr: Quantity
    down: Quantity
    across: Quantity

    @classmethod
    def of(cls, n: Product, p: Points) -> _Counts:
        nr = p.nv * n.dot.lanes
        tiles, panels = -(-n.rows // p.mr), -(-n.columns // nr)
        return cls(
            tiles,
            panels,
            -(-n.groups // p.kc),
            np.minimum(p.kc, n.groups),
            nr,
            -(-tiles // p.mc_tiles),
            -(-panels // p.nc_panels),
        )


def work(product: Product, points: Points, target: Target, r: Rates = RATES) -> Work:
    """The work of each point."""
    n, p, c = product, points, _Counts.of(product, points)
    cores = target.cores if n.threaded else 1
    every = n.batch * c.tiles * c.panels * n.rows / (c.tiles * p.mr)  # tiles of the result; the last one has fewer rows
    micro, beside, epilogue = _tile(n, p, c, target, r)
    total = every * (c.passes * (micro + beside) + epilogue)
    slowest = _share(n, p, c, cores)
    home = _home(n, c, target, r)

    cycles = every * c.passes * micro * slowest
    tasks = np.where(p.private, n.batch, n.batch * c.down * c.across)
    uneven = np.where(p.nv & (p.nv - 1) == 0, r.part, r.odd_part)
    partial = (n.columns % c.nr != 0) * (uneven - 1) * n.batch * c.tiles * epilogue
    jumps = n.batch * c.panels * c.passes * c.down * ((c.passes > 1) & (p.nc_panels > 1) & ~p.private)
    vector = total * slowest - cycles + r.task * -(-tasks // cores) + (partial + r.restart * jumps) * slowest
    reads = _reads(n, p, c, target, r, home, slowest)

    packing, moved, meets = _packing(n, p, c, cores, r)
    alone = packing * cores * -(-n.batch // cores) / n.batch
    together = _at(home, np.where(home == 4, moved, moved / cores))
    first = Phase(0.0, np.where(p.private, 0.0, packing), {k: v * ~p.private for k, v in together.items()})
    own = {k: reads[k] + v * p.private for k, v in together.items()}
    return Work((first, Phase(cycles, vector + np.where(p.private, alone, 0.0), own)), meetings=meets * (cores > 1))


def _tile(n: Product, p: Points, c: _Counts, target: Target, r: Rates) -> tuple[Quantity, Quantity, Quantity]:
    """Cycles of a tile: of its instructions in a pass, of what is beside them there, of its epilogue."""
    dot = n.dot
    unit = next(u for u in target.chip.units if dot in DOTS.get(u.instruction, ()))
    issue = 2 * dot.lanes * dot.k * dot.tile * dot.steps / unit.ops_per_cycle  # cycles of an instruction
    spread = r.spread if dot.lhs is F32 else r.loaded
    near = target.chip.level("L1d")
    whole = near is not None and 0 < near.bytes_per_cycle <= dot.vector_bytes  # no two vectors are loaded in a cycle
    narrow = max(1.0, 64 / near.bytes_per_cycle) if near is not None and whole else 1.0
    loads = p.mr * spread / (dot.tile * dot.steps) + p.nv * r.wide * narrow * dot.vector_bytes / 64
    group = np.maximum(
        -(-p.mr // dot.tile) * p.nv * issue / dot.steps, np.maximum(0 if dot.tile_registers else r.latency, loads)
    )
    crowded = ~p.pack_lhs & (p.mr * math.gcd(n.lhs_row, WAY) >= WAYS * WAY)
    vectors = p.mr * c.nr * 4 / dot.vector_bytes
    beside = r.call + r.sums * vectors * np.where(c.passes > 1, 2.0, 1.0)
    return (
        c.deep * (group + crowded * p.mr * r.conflict),
        beside,
        p.mr * r.row + vectors * (2 + r.step * n.steps / (1 + n.gate_up)),
    )


def _caches(target: Target) -> tuple[int, int, int]:
    """Bytes of the three levels; 0 of one that is not there."""
    known = target.caches_bytes
    return known.get("L1d", 0) or L1_BYTES, known.get("L2", 0) or L2_BYTES, known.get("L3", 0) if known else L3_BYTES


def _home(n: Product, c: _Counts, target: Target, r: Rates) -> Quantity:
    """The level that holds everything a call touches, so that it lies there from the call before."""
    _, l2, l3 = _caches(target)
    operands = n.rows * n.lhs_row + (0 if n.constant else n.depth * n.columns * n.rhs_bytes)
    packed = n.groups * c.nr * c.panels * n.dot.lane_bytes
    everything = n.batch * (operands + packed + n.rows * n.columns * n.out_bytes)
    return np.where(everything <= r.near * l2, 2, np.where(everything <= r.near * l3, 3, 4))


def _at(level: Quantity, size: Quantity) -> dict[str, Quantity]:
    """Bytes by the level they come from; those of the first cost nothing."""
    return {name: np.where(level == number, size, 0.0) for number, name in LEVELS.items()}


def _reads(n: Product, p: Points, c: _Counts, target: Target, r: Rates, home: Quantity, share: Quantity) -> dict[str, Quantity]:
    """Bytes that products bring from each level: of the slowest thread, that does `share` of all; from memory, of as many
    threads as there are, since each has but its part of the bandwidth."""
    l1, l2, _ = _caches(target)
    word, near = n.dot.lane_bytes, r.near
    tile, panel, packed = p.mr * c.deep * word, c.nr * c.deep * word, n.groups * c.nr * c.panels * word
    left, beside = n.rows * n.groups * word, tile + panel <= near * l1
    # each operand once from where it lies, then from the nearest cache that holds what is gone through again
    rhs_first, lhs_first = packed * np.where(p.private, 1, c.down), left * np.where(p.private, 1, c.across)
    rhs_level = np.where((p.nc_panels == 1) & beside, 1, np.where(p.nc_panels * panel + tile <= near * l2, 2, 3))
    sums = np.where(c.passes > 1, 2 * (c.passes - 1) * n.rows * c.nr * c.panels * 4, 0.0)
    parts = (
        (rhs_first, np.where(p.private, 2, home)),
        (np.maximum(packed * c.tiles - rhs_first, 0), rhs_level),
        (lhs_first, np.where(p.pack_lhs | p.private, np.minimum(home, 3), home)),
        (np.maximum(left * c.panels - lhs_first, 0), np.where(beside, 1, 2)),
        (sums, np.where(p.mc_tiles * p.nc_panels * p.mr * c.nr * 4 <= l1 // 2, 1, 2)),
        (n.rows * n.columns * n.out_bytes, home),
    )
    found: dict[str, Quantity] = dict.fromkeys(LEVELS.values(), 0.0)
    for size, level in parts:
        for name, amount in _at(level, n.batch * size).items():
            found[name] = found[name] + amount * share * (target.cores if name == "memory" else 1)
    return found


def _packing(n: Product, p: Points, c: _Counts, cores: int, r: Rates) -> tuple[Quantity, Quantity, Quantity]:
    """Packing in each call: cycles of a thread if all share it, bytes that are moved, and whether threads wait for its end."""
    rows, columns = p.pack_lhs | n.correction, not n.constant
    lhs = rows * (r.copied * n.lhs_steps + r.computed * n.lhs_computed) * n.batch * n.rows * -(-n.groups // n.dot.lanes)
    rhs = columns * (r.turned * n.rhs_steps + r.computed * n.rhs_computed) * n.batch * c.panels * p.nv * n.groups
    tiles, panels = n.batch * c.tiles, n.batch * c.panels
    cycles = lhs * -(-tiles // cores) / tiles + rhs * -(-panels // cores) / panels
    packed = n.groups * c.nr * c.panels * n.dot.lane_bytes
    moved = n.batch * (rows * n.rows * n.lhs_row + columns * (n.depth * n.columns * n.rhs_bytes + packed))
    return cycles, moved, (rows | columns) & ~p.private


def _makespan(n: Product, p: Points, c: _Counts, cores: int) -> Quantity:
    """The share of all work that the slowest thread does, taking blocks from a counter, the short ones at the edge last."""
    height, width = p.mc_tiles * p.mr / n.rows, p.nc_panels / c.panels
    flat = c.across == 1  # then the short one is the lowest, else the column of blocks at the right
    size = np.where(flat, np.minimum(height, 1.0), np.minimum(width, 1.0) / c.down) / n.batch
    short = np.maximum(np.where(flat, 1 - (c.down - 1) * height, (1 - (c.across - 1) * width) / c.down), 0) / n.batch
    last = np.where(flat, 1, n.batch * c.down)
    count = np.where(flat, n.batch * c.down - last, n.batch * (c.across - 1) * c.down)
    waves, left = count // cores, count % cores
    free = (cores - left) * np.floor(size / np.maximum(short, 1e-9))  # short ones that fit beside a wave that is not full
    over = np.where(last <= free, size, np.maximum(size, (left * size + last * short) / cores + short / 2))
    found = waves * size + np.where(left > 0, over, -(-last // cores) * short)
    whole = n.batch * np.floor(1 / height + 1e-9) * np.floor(1 / width + 1e-9)  # blocks that are not cut short anywhere
    return np.minimum(np.maximum(found, -(-whole // cores) * height * width / n.batch), 1.0)
