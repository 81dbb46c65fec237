"""Every size that a nest may be given: one statement of what is legal, and a ladder of sizes that enumerates it.

Heuristic and tuner both take their points from here; `_work` says what each makes the machine do, `schedule.cost` what that
costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from tilewright.candidates.llvm.gemm.dots import Dot
from tilewright.candidates.llvm.gemm.nest import CACHE_LINE, Blocks, rounded
from tilewright.candidates.llvm.runtime.run import ONE_THREAD_OPS, Plan
from tilewright.hardware.target import Target
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import VIEWS, Acc, Dequantize, Map, Param, Quantize
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

L2_BYTES = 1 << 20  # where the machine reports none
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
    def of(cls, problem: Problem, plan: Plan) -> Product:
        """What a plan says of a problem."""
        dot, op = plan.choice.dot, problem.op
        stores = toposort(op.stores)
        beside = sum(n.tensor.size_bytes for n in stores if isinstance(n.op, Param))
        written = sum(t.size_bytes for t in problem.outputs)
        return cls(
            dot, plan.batch, plan.rows, problem.N, problem.K, plan.constant, plan.in_place,
            correction=bool(plan.choice.correction),
            gate_up=plan.second is not None,
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
    """Sizes side by side, as `Blocks` holds those of one nest, but for kc in groups."""

    mr: Ints
    nv: Ints
    kc: Ints
    mc_tiles: Ints
    nc_panels: Ints
    pack_lhs: Flags
    packs_per_thread: Flags

    def __len__(self) -> int:
        return len(self.mr)

    def at(self, keep: Flags | Ints) -> Points:
        """Some of them, in the order asked for."""
        p = self
        return Points(
            p.mr[keep], p.nv[keep], p.kc[keep], p.mc_tiles[keep], p.nc_panels[keep], p.pack_lhs[keep], p.packs_per_thread[keep]
        )

    def blocks(self, product: Product) -> Iterator[Blocks]:
        """One after the other."""
        for mr, nv, kc, mc, nc, pack, private in zip(*(getattr(self, f.name) for f in fields(self)), strict=True):
            deep = product.depth if kc >= product.groups else int(kc) * product.dot.k
            yield Blocks(int(mr), int(nv), max(deep, 1), int(mc), int(nc), bool(pack), bool(private))

    @classmethod
    def of(cls, blocks: Blocks, dot: Dot) -> Points:
        """One nest's."""
        kc = rounded(-(-blocks.kc // dot.k), dot.steps)
        mr, nv, deep, mc, nc = (np.array([x], np.int64) for x in (blocks.mr, blocks.nv, kc, blocks.mc_tiles, blocks.nc_panels))
        return cls(mr, nv, deep, mc, nc, np.array([blocks.pack_lhs]), np.array([blocks.packs_per_thread]))


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
    return fits & inside & steps & sums & near & read & whole & aligned & ~(p.packs_per_thread & product.constant)


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
