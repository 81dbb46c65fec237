"""Every size that a nest may be given. One statement says which sizes are legal, a ladder of sizes enumerates them, and the
work of the processor is counted for many points at once; `schedule.cost` says what that work costs.

Cycles are those of the instruction's own issue. The constants beside them are rates of present processors, chosen by reason and
on half of the products of `benchmarks/cost.py`; they only have to tell bad sizes from good ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tilewright.candidates.llvm.gemm.dots import DOTS, Dot
from tilewright.candidates.llvm.gemm.nest import CACHE_LINE, Blocks, Nest, rounded
from tilewright.dtype import F32
from tilewright.hardware.target import Target
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import VIEWS, Acc, Dequantize, Map, Param, Quantize
from tilewright.lowering.scalar.costs import POLYNOMIAL
from tilewright.schedule.cost import Phase, Quantity, Work, predict_us
from tilewright.schedule.problem import Operand, Problem

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
    """The product that sizes are chosen for.

    Attributes:
        dot: the instruction.
        batch: matrices with a right operand of their own.
        M, N, K: extents of each of them.
        constant: the right operand is packed beforehand.
        in_place: the left operand may be read where it lies.
        compensation: rows of the left operand are added up.
        gate_up: both halves of the columns meet in the stores.
        threaded: it is worth more threads than one.
        lhs_row, rhs_bytes, out_bytes: bytes of a row of the left operand as it lies in memory, of an element of the right one,
            and of what is written and read beside for an element of the result.
        lhs_steps, rhs_steps, steps: operations on a vector of an operand while it is packed, of the sums when they are stored.
        lhs_computed, rhs_computed: of those on operands, what functions take, beside casts.
    """

    dot: Dot
    batch: int
    M: int
    N: int
    K: int
    constant: bool
    in_place: bool
    compensation: bool = False
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
        """The product of a problem whose nest is known."""
        op = problem.op
        side_inputs = sum(n.tensor.size_bytes for n in toposort(op.stores) if isinstance(n.op, Param))
        written = sum(t.size_bytes for t in problem.outputs)
        return cls(
            nest.dot, nest.batch, nest.M, nest.N, nest.K, nest.constant, in_place,
            compensation=bool(nest.choice.compensation),
            gate_up=nest.gate_up is not None,
            threaded=problem.ops > ONE_THREAD_OPS,
            lhs_row=-(-problem.K * _stored_bits(problem.lhs, op.lhs) // 8),
            rhs_bytes=_stored_bits(problem.rhs, op.rhs) / 8,
            out_bytes=(written + side_inputs) / max(1, problem.batch * problem.M * problem.N),
            lhs_steps=1 + _steps((op.lhs,)) - _computed(op.lhs),
            rhs_steps=1 + _steps((op.rhs,)) - _computed(op.rhs),
            steps=_steps(op.stores),
            lhs_computed=_computed(op.lhs),
            rhs_computed=_computed(op.rhs),
        )  # fmt: skip

    @property
    def groups(self) -> int:
        """4-byte groups of K, as the instruction takes them."""
        return -(-max(1, -(-self.K // self.dot.k)) // self.dot.steps) * self.dot.steps


def _steps(roots: Sequence[Node]) -> float:
    """Vector operations of expressions, roughly."""
    found = 0.0
    for n in toposort(roots):
        if isinstance(n.op, Map):
            found += POLYNOMIAL(n.op.fn)
        elif isinstance(n.op, (Quantize, Dequantize)):
            found += 4.0
        elif not isinstance(n.op, (*VIEWS, Param, Acc)):
            found += 1.0
    return found


def _computed(root: Node) -> float:
    """Operations on a vector of an operand that functions take."""
    return sum(POLYNOMIAL(n.op.fn) for n in toposort((root,)) if isinstance(n.op, Map))


def _stored_bits(operand: Operand, root: Node) -> int:
    """Bits of an element as it lies in memory; of all sources of its size, where it is computed from several."""
    if operand.source is not None:
        return operand.stored.dtype.bits
    sources = [n.tensor for n in toposort((root,)) if isinstance(n.op, Param)]
    most = max((t.elements for t in sources), default=0)
    return sum(t.dtype.bits for t in sources if t.elements == most) or root.dtype.bits


@dataclass(frozen=True)
class Points:
    """Sizes side by side, as `Blocks` holds those of one nest, but for kc in groups, and in vectors and micro-panels."""

    mr: Ints
    nv: Ints
    kc: Ints
    mc_panels: Ints
    nc_panels: Ints
    pack_lhs: Flags
    pack_per_thread: Flags

    def __len__(self) -> int:
        return len(self.mr)

    def at(self, keep: Flags | Ints) -> Points:
        """The points at these indices, in their order; or those that a mask keeps."""
        return Points(*(getattr(self, f.name)[keep] for f in fields(self)))

    def blocks(self, product: Product) -> Iterator[Blocks]:
        """Yield the sizes of each point in elements, for a nest of this product."""
        dot = product.dot
        for mr, nv, kc, mc, nc, pack, pack_per_thread in zip(*(getattr(self, f.name) for f in fields(self)), strict=True):
            m, nr = int(mr), int(nv) * dot.lanes
            deep = max(product.K if kc >= product.groups else int(kc) * dot.k, 1)
            yield Blocks(dot.instruction, m, nr, deep, int(mc) * m, int(nc) * nr, bool(pack), bool(pack_per_thread))

    @classmethod
    def of(cls, b: Blocks, dot: Dot) -> Points:
        """The one point that has a nest's sizes."""
        kc = rounded(-(-b.kc // dot.k), dot.steps)
        mr, nv, deep, mc, nc = (np.array([x], np.int64) for x in (b.mr, b.nr // dot.lanes, kc, b.mc // b.mr, b.nc // b.nr))
        return cls(mr, nv, deep, mc, nc, np.array([b.pack_lhs]), np.array([b.pack_per_thread]))


def legal(points: Points, product: Product, target: Target) -> Flags:
    """Tell which points a nest can be generated for, and hold what it promises: tiles in registers, blocks inside the product,
    passes of whole packed vectors; in the second-level cache a block of the right operand and the sums of several passes."""
    p, dot, groups = points, product.dot, product.groups
    most = np.array([0, *(dot.most_rows(nv) for nv in range(1, 1 + max(NARROW)))])
    nr = p.nv * dot.lanes
    lhs_panels, rhs_panels, passes = (
        -(-size // np.maximum(of, 1)) for size, of in ((product.M, p.mr), (product.N, nr), (groups, p.kc))
    )
    fits = (p.mr >= 1) & (p.mr <= most[np.minimum(p.nv, max(NARROW))]) & (p.mr <= product.M)
    inside = (p.mc_panels >= 1) & (p.mc_panels <= lhs_panels) & (p.nc_panels >= 1) & (p.nc_panels <= rhs_panels)
    steps = (p.kc >= groups) | ((p.kc % dot.lanes == 0) & (p.kc >= SHORTEST))
    l2 = target.caches_bytes.get("L2", 0) or L2_BYTES
    sums = (passes == 1) | (p.mc_panels * p.nc_panels * p.mr * nr * 4 <= l2)
    near = (p.nc_panels == 1) | (p.nc_panels * nr * np.minimum(p.kc, groups) * dot.lane_bytes <= l2)
    read = p.pack_lhs | product.in_place
    halves = 1 + product.gate_up
    whole = p.nv % (halves * dot.rows) == 0
    row = nr // halves  # of a tile, read as one vector
    aligned = (row * 4 % CACHE_LINE == 0) | (row & (row - 1) == 0)
    return fits & inside & steps & sums & near & read & whole & aligned & ~(p.pack_per_thread & product.constant)


def space(product: Product, target: Target) -> Points:
    """All legal points on a ladder of sizes."""
    columns: list[list[Ints]] = []
    for nv in NARROW:
        for mr in _heights(product, product.dot.most_rows(nv)):
            lhs_panels, rhs_panels = -(-product.M // mr), -(-product.N // (nv * product.dot.lanes))
            sizes = np.meshgrid(
                mr, nv, _passes(product), _parts(lhs_panels), _parts(rhs_panels), *_flags(product), indexing="ij", copy=False
            )  # fmt: skip
            columns.append([s.reshape(-1) for s in sizes])
    mr, nv, kc, mc, nc, pack, pack_per_thread = (np.concatenate(c) for c in zip(*columns, strict=True))
    points = Points(mr, nv, kc, mc, nc, pack != 0, pack_per_thread != 0)
    return points.at(legal(points, product, target))


def _heights(product: Product, most: int) -> range:
    """Rows of a tile: as many as fit into registers, down to two thirds of that."""
    least, step = min(most, product.M), product.dot.tile if product.dot.tile < product.M else 1
    return range(max(1, -(-2 * least // 3)), least + 1, step) if step == 1 else range(step, least + 1, step)


def _passes(product: Product) -> Ints:
    """Groups of K in a pass."""
    groups, lanes = product.groups, product.dot.lanes
    cut = {rounded(-(-groups // n), lanes) for n in PARTS}
    return np.array(sorted({groups} | {c for c in cut if SHORTEST <= c < groups}))


def _parts(size: int) -> Ints:
    return np.array(sorted({-(-size // n) for n in PARTS} | {1}))


def _flags(product: Product) -> tuple[Ints, Ints]:
    """pack_lhs and pack_per_thread."""
    return np.array([0, 1] if product.in_place else [1]), np.array([0] if product.constant else [0, 1])


# Cycles of what is not the product itself.
LATENCY = 3.5  # until an accumulator can be added to again
SPREAD = 1.0  # of a broadcast element of the left operand that is an operand of the instruction itself
LOADED = 1.1  # of one that is an instruction of its own
WIDE = 1.0  # of 64 bytes of the right operand, unless the first-level cache gives less in a cycle
CALL = 20.0  # of a micro-kernel: its call, filling and draining
SUMS = 4.0  # of a vector of sums stored and read again
STEP = 0.9  # of a vector in each step of the epilogue
ROW = 8.0  # of a row of a tile in the epilogue
PART = 3.0  # times that, of a panel that a store only has part of
ODD_PART = 26.0  # likewise, of vectors that are no power of two: their masks are split
TASK = 180.0  # of taking one from the counter
COPIED = 70.0  # of a vector of the left operand, packed as it lies
TURNED = 10.0  # of a vector of the right one, interleaved or transposed
COMPUTED = 1.5  # of a step of a function on a vector of either, while it is packed
CONFLICT = 0.75  # of a broadcast element, if as many rows as the cache has ways lie in the same places
RESTART = 720.0  # of a block's next piece of the right operand, that lies elsewhere than where it was read before
NEAR = 0.73  # of a cache that operands may fill and stay


def ranked(product: Product, target: Target) -> Iterator[Blocks]:
    """All sizes that a nest may have on this machine, the quickest first."""
    points = space(product, target)
    model = _Model(product, points, target)
    us = predict_us(model.work(), target)
    # threads that wait for one are worse off than the model can tell
    uneven = np.maximum(1, model.share / (EVEN * model.share.min()))
    return points.at(np.argsort(us * uneven**2, kind="stable")).blocks(product)


def work(product: Product, points: Points, target: Target) -> Work:
    """The work of each point."""
    return _Model(product, points, target).work()


class _Model:
    """The work that each point makes a machine do.

    Attributes:
        lhs_panels, rhs_panels, passes: micro-panels of the operands, and blocks of K, of a matrix.
        deep: groups of K in a pass.
        nr: columns of a micro-panel of the right operand.
        down, across: blocks of a matrix.
        l1, l2, l3: bytes of the caches; 0 of one that is not there.
    """

    def __init__(self, product: Product, points: Points, target: Target):
        n, p = self.n, self.p = product, points
        self.target, self.cores = target, target.cores if n.threaded else 1
        self.nr = p.nv * n.dot.lanes
        self.lhs_panels, self.rhs_panels, self.passes = -(-n.M // p.mr), -(-n.N // self.nr), -(-n.groups // p.kc)
        self.deep = np.minimum(p.kc, n.groups)
        self.down, self.across = -(-self.lhs_panels // p.mc_panels), -(-self.rhs_panels // p.nc_panels)
        known = target.caches_bytes
        self.l1, self.l2 = known.get("L1d", 0) or L1_BYTES, known.get("L2", 0) or L2_BYTES
        self.l3 = known.get("L3", 0) if known else L3_BYTES

    @cached_property
    def share(self) -> Quantity:
        """The part of all work that the slowest thread does."""
        n = self.n
        return np.where(self.p.pack_per_thread, -(-n.batch // self.cores) / n.batch, self.makespan())

    def work(self) -> Work:
        """The work: packing together, and then products."""
        n, p, cores, own = self.n, self.p, self.cores, self.p.pack_per_thread
        tiles = n.batch * self.lhs_panels * self.rhs_panels * n.M / (self.lhs_panels * p.mr)  # the last one has fewer rows
        micro, call, epilogue = self._tile()
        total = tiles * (self.passes * (micro + call) + epilogue)
        cycles = tiles * self.passes * micro * self.share
        tasks = np.where(own, n.batch, n.batch * self.down * self.across)
        uneven = np.where(p.nv & (p.nv - 1) == 0, PART, ODD_PART)
        partial = (n.N % self.nr != 0) * (uneven - 1) * n.batch * self.lhs_panels * epilogue
        jumps = n.batch * self.rhs_panels * self.passes * self.down * ((self.passes > 1) & (p.nc_panels > 1) & ~own)
        vector = total * self.share - cycles + TASK * -(-tasks // cores) + (partial + RESTART * jumps) * self.share
        home = self._home()
        reads = self._reads(home)

        packing, moved, meets = self._packing()
        alone = packing * cores * -(-n.batch // cores) / n.batch
        together = _at(home, np.where(home == 4, moved, moved / cores))
        first = Phase(0.0, np.where(own, 0.0, packing), {k: v * ~own for k, v in together.items()})
        then = Phase(cycles, vector + np.where(own, alone, 0.0), {k: reads[k] + v * own for k, v in together.items()})
        return Work((first, then), barriers=meets * (cores > 1))

    def _tile(self) -> tuple[Quantity, Quantity, Quantity]:
        """Cycles of a tile: of its instructions in a pass, of the call around them, of its epilogue."""
        n, p, dot = self.n, self.p, self.n.dot
        unit = next(u for u in self.target.chip.units if dot in DOTS.get(u.instruction, ()))
        issue = 2 * dot.lanes * dot.k * dot.tile * dot.steps / unit.ops_per_cycle  # cycles of an instruction
        spread = SPREAD if dot.lhs is F32 else LOADED
        near = self.target.chip.level("L1d")
        whole = near is not None and 0 < near.bytes_per_cycle <= dot.vector_bytes  # no two vectors are loaded in a cycle
        narrow = max(1.0, 64 / near.bytes_per_cycle) if near is not None and whole else 1.0
        loads = p.mr * spread / (dot.tile * dot.steps) + p.nv * WIDE * narrow * dot.vector_bytes / 64
        group = np.maximum(
            -(-p.mr // dot.tile) * p.nv * issue / dot.steps, np.maximum(0 if dot.tile_registers else LATENCY, loads)
        )
        crowded = ~p.pack_lhs & (p.mr * math.gcd(n.lhs_row, WAY) >= WAYS * WAY)
        vectors = p.mr * self.nr * 4 / dot.vector_bytes
        return (
            self.deep * (group + crowded * p.mr * CONFLICT),
            CALL + SUMS * vectors * np.where(self.passes > 1, 2.0, 1.0),
            p.mr * ROW + vectors * (2 + STEP * n.steps / (1 + n.gate_up)),
        )

    def _home(self) -> Quantity:
        """The level that holds everything a call touches, so that it lies there from the call before."""
        n = self.n
        operands = n.M * n.lhs_row + (0 if n.constant else n.K * n.N * n.rhs_bytes)
        everything = n.batch * (operands + self._packed_rhs_bytes + n.M * n.N * n.out_bytes)
        return np.where(everything <= NEAR * self.l2, 2, np.where(everything <= NEAR * self.l3, 3, 4))

    @property
    def _packed_rhs_bytes(self) -> Quantity:
        """Bytes of a packed right operand."""
        return self.n.groups * self.nr * self.rhs_panels * self.n.dot.lane_bytes

    def _reads(self, home: Quantity) -> dict[str, Quantity]:
        """Bytes that products bring from each level: of the slowest thread; from memory, of as many threads as there are, since
        each has but its part of the bandwidth."""
        n, p, own, word = self.n, self.p, self.p.pack_per_thread, self.n.dot.lane_bytes
        lhs_panel, rhs_panel, packed = p.mr * self.deep * word, self.nr * self.deep * word, self._packed_rhs_bytes
        left, in_l1 = n.M * n.groups * word, lhs_panel + rhs_panel <= NEAR * self.l1
        # each operand once from where it lies, then from the nearest cache that holds what is gone through again
        rhs_first, lhs_first = packed * np.where(own, 1, self.down), left * np.where(own, 1, self.across)
        block_in_l2 = p.nc_panels * rhs_panel + lhs_panel <= NEAR * self.l2
        rhs_level = np.where((p.nc_panels == 1) & in_l1, 1, np.where(block_in_l2, 2, 3))
        sums = np.where(self.passes > 1, 2 * (self.passes - 1) * n.M * self.nr * self.rhs_panels * 4, 0.0)
        parts = (
            (rhs_first, np.where(own, 2, home)),
            (np.maximum(packed * self.lhs_panels - rhs_first, 0), rhs_level),
            (lhs_first, np.where(p.pack_lhs | own, np.minimum(home, 3), home)),
            (np.maximum(left * self.rhs_panels - lhs_first, 0), np.where(in_l1, 1, 2)),
            (sums, np.where(p.mc_panels * p.nc_panels * p.mr * self.nr * 4 <= self.l1 // 2, 1, 2)),
            (n.M * n.N * n.out_bytes, home),
        )
        found: dict[str, Quantity] = dict.fromkeys(LEVELS.values(), 0.0)
        for size, level in parts:
            for name, amount in _at(level, n.batch * size).items():
                found[name] = found[name] + amount * self.share * (self.target.cores if name == "memory" else 1)
        return found

    def _packing(self) -> tuple[Quantity, Quantity, Quantity]:
        """Packing in each call: cycles of a thread if all share it, bytes moved, and whether threads wait for its end."""
        n, p, cores = self.n, self.p, self.cores
        rows, columns = p.pack_lhs | n.compensation, not n.constant
        lhs = rows * (COPIED * n.lhs_steps + COMPUTED * n.lhs_computed) * n.batch * n.M * -(-n.groups // n.dot.lanes)
        rhs = columns * (TURNED * n.rhs_steps + COMPUTED * n.rhs_computed) * n.batch * self.rhs_panels * p.nv * n.groups
        lhs_tasks, rhs_tasks = n.batch * self.lhs_panels, n.batch * self.rhs_panels
        cycles = lhs * -(-lhs_tasks // cores) / lhs_tasks + rhs * -(-rhs_tasks // cores) / rhs_tasks
        moved = n.batch * (rows * n.M * n.lhs_row + columns * (n.K * n.N * n.rhs_bytes + self._packed_rhs_bytes))
        return cycles, moved, (rows | columns) & ~p.pack_per_thread

    def makespan(self) -> Quantity:
        """The share of all work that the slowest thread does, taking blocks from a counter, the short ones at the edge last."""
        n, p, cores, down, across = self.n, self.p, self.cores, self.down, self.across
        height, width = p.mc_panels * p.mr / n.M, p.nc_panels / self.rhs_panels
        flat = across == 1  # then the short one is the lowest, else the column of blocks at the right
        size = np.where(flat, np.minimum(height, 1.0), np.minimum(width, 1.0) / down) / n.batch
        short = np.maximum(np.where(flat, 1 - (down - 1) * height, (1 - (across - 1) * width) / down), 0) / n.batch
        last = np.where(flat, 1, n.batch * down)
        count = np.where(flat, n.batch * down - last, n.batch * (across - 1) * down)
        waves, left = count // cores, count % cores
        free = (cores - left) * np.floor(size / np.maximum(short, 1e-9))  # short ones that fit beside a wave that is not full
        over = np.where(last <= free, size, np.maximum(size, (left * size + last * short) / cores + short / 2))
        found = waves * size + np.where(left > 0, over, -(-last // cores) * short)
        whole = n.batch * np.floor(1 / height + 1e-9) * np.floor(1 / width + 1e-9)  # blocks that are not cut short anywhere
        return np.minimum(np.maximum(found, -(-whole // cores) * height * width / n.batch), 1.0)


def _at(level: Quantity, size: Quantity) -> dict[str, Quantity]:
    """Bytes by the level they come from; those of the first cost nothing."""
    return {name: np.where(level == number, size, 0.0) for number, name in LEVELS.items()}
