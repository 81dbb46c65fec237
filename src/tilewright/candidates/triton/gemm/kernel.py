"""The text of a plain Triton gemm: tiles of a grid flattened over the batch, `tl.dot` along K, the epilogue in registers.

Operands are read through their expressions: views as addresses, conversions and scales in registers on the way to the dot. When
K is split, every part leaves its sum in a workspace, and the block that comes last adds them up in order: results are the same
on every run.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.candidates.triton.expressions.emit import Emitter, Tile
from tilewright.candidates.triton.expressions.printer import FP8, FP8_NAMES, Printer, in_memory
from tilewright.candidates.triton.expressions.text import Text, Written
from tilewright.candidates.triton.gemm.dots import Dot
from tilewright.candidates.triton.runtime.module import IMPORTS
from tilewright.dtype import F32
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import VIEWS, Param
from tilewright.lowering.access import Access

PEAKS = 256  # of tiles, that are compared at a time


@dataclass(frozen=True)
class Point:
    """Sizes of one kernel; see docs/glossary.md."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    group_m: int = 8
    swap_ab: bool = False


@dataclass(frozen=True)
class Nest:
    """The loop nest of a kernel.

    Attributes:
        batch, rows, columns, depth: matrices, and M, N, K of each.
        dot: the instruction that multiplies a tile.
        lhs: access of [batch * rows, depth].
        rhs: access of [batch * columns, depth], or of [columns, depth] if `shared`.
        stores: access of [batch * rows, columns], one a result.
        sources: number of arguments before the results.
        fp8: see `Printer`.
        point: tile sizes and other knobs.
        second: what stands in the stores for sums of the right half of `rhs`, whose columns they read beside those of the left
            half: a tile has as many of both.
        largest: stores, by number, that keep the largest of their values alone.
    """

    batch: int
    rows: int
    columns: int
    depth: int
    dot: Dot
    lhs: Access
    rhs: Access
    stores: tuple[Access, ...]
    sources: tuple[int, ...]
    fp8: frozenset[str]
    point: Point
    second: Node | None = None
    largest: tuple[int, ...] = ()

    @property
    def stored(self) -> int:
        """Columns of the results."""
        return self.columns if self.second is None else self.columns // 2

    @property
    def width(self) -> int:
        """The columns of the results that a tile has."""
        return self.point.tile_n if self.second is None else self.point.tile_n // 2

    @property
    def down(self) -> int:
        """Tiles of a matrix along M."""
        return -(-self.rows // self.point.tile_m)

    @property
    def across(self) -> int:
        """Tiles of a matrix along N."""
        return -(-self.stored // self.width)

    @property
    def tiles(self) -> int:
        return self.batch * self.down * self.across

    @property
    def steps(self) -> int:
        """The steps along K of each part."""
        return -(-self.depth // (self.point.tile_k * self.point.split_k))

    @property
    def workspace_bytes(self) -> int:
        """Sums of the parts of K and the largest of each tile, and counters."""
        return 4 * (self.sums + self.peaks + self.counters)

    @property
    def sums(self) -> int:
        """Number of f32 sums that the parts of K leave, where there are several."""
        p = self.point
        return 0 if p.split_k == 1 else self.tiles * p.split_k * p.tile_m * p.tile_n

    @property
    def peaks(self) -> int:
        """The largest of each tile, for each store that keeps that."""
        return self.tiles * len(self.largest)

    @property
    def counters(self) -> int:
        """Number of counters: of parts that are done, one a tile, and of tiles that are."""
        return self.tiles * (self.point.split_k > 1) + bool(self.largest)

    @property
    def arguments(self) -> list[str]:
        """The names of the kernel's arguments, but for numbers."""
        names = [f"p{i}" for i in self.sources] + [f"o{i}" for i in range(len(self.stores))]
        return names + [n for n in ("sums", "peaks", "counters") if getattr(self, n)]


def write(nest: Nest) -> Written:
    """The module of a kernel `gemm`, whose grid is `nest.tiles * split_k` blocks."""
    writer = _Writer(nest)
    writer.write()
    numbers = writer.text.numbers
    arguments = ", ".join([*nest.arguments, *numbers])
    return Written(f"{IMPORTS}\n\n@triton.jit\ndef gemm({arguments}):\n{writer.text}\n", numbers)


class _Writer:
    def __init__(self, nest: Nest) -> None:
        self.nest, self.text = nest, Text()

    def write(self) -> None:
        n, p, t = self.nest, self.nest.point, self.text
        self._place()
        lying, upright = self._operands()
        tile = f"({p.tile_n}, {p.tile_m})" if p.swap_ab else f"({p.tile_m}, {p.tile_n})"
        kind = "tl.float32" if n.dot.acc is F32 else "tl.int32"
        t.do(f"acc = tl.zeros({tile}, dtype={kind})")
        first, second = (n.dot.rhs_flips, n.dot.lhs_flips) if p.swap_ab else (n.dot.lhs_flips, n.dot.rhs_flips)
        if second:
            t.do(f"first_sums = tl.zeros(({p.tile_n if p.swap_ab else p.tile_m},), dtype=tl.int32)")
        if first:
            t.do(f"second_sums = tl.zeros(({p.tile_m if p.swap_ab else p.tile_n},), dtype=tl.int32)")
        span = n.steps * p.tile_k
        loop = f"for {'at' if p.split_k > 1 else 'k0'} in tl.range(0, {span}, {p.tile_k}):"
        for emitter, access in (lying, upright):
            emitter.hoist(access)
        with t.block(loop):
            if p.split_k > 1:
                t.do(f"k0 = part * {span} + at")
            if n.depth % p.tile_k or n.steps * p.tile_k * p.split_k != n.depth:
                t.do(f"k_mask = k < {n.depth} - k0")
            a, b = (
                self._multiplied(self._whole(e, access), access.root, flips)
                for (e, access), flips in zip((lying, upright), (first, second), strict=True)
            )
            if second:
                t.do(f"first_sums += tl.sum({a}.to(tl.int32), axis=1)")
            if first:
                t.do(f"second_sums += tl.sum({b}.to(tl.int32), axis=0)")
            self._dot(a, b)
        if second:
            t.do("acc += (first_sums * 128)[:, None]")
        if first:
            t.do("acc += (second_sums * 128)[None, :]")
        if first and second:
            t.do(f"acc += {16384 * span}")
        if p.split_k > 1:
            self._reduced()
        else:
            self._stores()

    def _place(self) -> None:
        """Emit which tile this block does: `group_m` tiles along M go together, so that neighbours share operands in the
        cache."""
        n, p, t = self.nest, self.nest.point, self.text
        t.do("block = tl.program_id(0)")
        if p.split_k > 1:
            t.do(f"part = block % {p.split_k}")
            t.do(f"block = block // {p.split_k}")
        if n.batch > 1:
            t.do(f"b = block // {n.down * n.across}")
            t.do(f"inner = block % {n.down * n.across}")
        else:
            t.do("inner = block")
        if n.down == 1:
            t.do("tile_row = 0")
            t.do("tile_column = inner")
        elif n.across == 1:
            t.do("tile_row = inner")
            t.do("tile_column = 0")
        else:
            group = min(p.group_m, n.down)
            t.do(f"first_row = inner // {group * n.across} * {group}")
            t.do(f"height = min({n.down} - first_row, {group})" if n.down % group else f"height = {group}")
            t.do(f"tile_row = first_row + inner % {group * n.across} % height")
            t.do(f"tile_column = inner % {group * n.across} // height")
        t.do(f"m = tile_row * {p.tile_m} + tl.arange(0, {p.tile_m})")
        t.do(f"n = tile_column * {n.width} + tl.arange(0, {n.width})")
        t.do(f"k = tl.arange(0, {p.tile_k})")
        if n.rows % p.tile_m:
            t.do(f"m_mask = m < {n.rows}")
        if n.stored % n.width:
            t.do(f"n_mask = n < {n.stored}")
        t.do(f"rows = b * {n.rows} + m" if n.batch > 1 else "rows = m")
        right = "n"
        if n.second is not None:
            t.do(f"of_tile = tl.arange(0, {p.tile_n})")
            t.do(f"of_half = tile_column * {n.width} + of_tile % {n.width}")
            right = f"(of_half + of_tile // {n.width} * {n.stored})"
            if n.stored % n.width:
                t.do(f"right_mask = of_half < {n.stored}")
        t.do(f"right_rows = b * {n.columns} + {right}" if n.batch > 1 else f"right_rows = {right}")

    @property
    def _row_mask(self) -> str | None:
        return "m_mask" if self.nest.rows % self.nest.point.tile_m else None

    @property
    def _column_mask(self) -> str | None:
        return "n_mask" if self.nest.stored % self.nest.width else None

    def _operands(self) -> tuple[tuple[Emitter, Access], tuple[Emitter, Access]]:
        """The operand whose rows run down the dot's tile, and the one whose rows run across it."""
        n, p = self.nest, self.nest.point
        ragged = n.depth % p.tile_k or n.steps * p.tile_k * p.split_k != n.depth
        k_mask = "k_mask" if ragged else None
        right_mask = self._column_mask if n.second is None else self._column_mask and "right_mask"
        sides = (("rows", self._row_mask, n.lhs), ("right_rows", right_mask, n.rhs))
        found = [
            (Emitter(self.text, Tile(rows, "k", n.depth, mask, k_mask, None, across, "k0", p.tile_k), _pointer, n.fp8), access)
            for (rows, mask, access), across in zip(sides[::-1] if p.swap_ab else sides, (False, True), strict=True)
        ]
        return found[0], found[1]

    def _whole(self, emitter: Emitter, access: Access) -> str:
        """An operand's tile: repeated where it does not vary, zero past the end of K."""
        t, p = self.text, self.nest.point
        value = emitter.value(access)
        varies = emitter.varies(access)
        mask = emitter.tile.column_mask
        if mask is not None and (not varies[1] or any(n.src and not isinstance(n.op, VIEWS) for n in toposort((access.root,)))):
            zero = "0.0" if in_memory(access.root.dtype).startswith(("f", "b")) else "0"
            value = emitter.where(emitter.along(mask, 1), value, zero)
            varies = varies[0], True
        if not all(varies):
            rows = p.tile_n if emitter.tile.rows == "right_rows" else p.tile_m
            shape = (p.tile_k, rows) if emitter.tile.across else (rows, p.tile_k)
            value = t.v(f"tl.broadcast_to({value}, {shape})")
        return value

    def _multiplied(self, value: str, root: Node, flips: bool) -> str:
        """An operand's value in the type of the dot."""
        t, target = self.text, self.nest.dot.operand
        if flips:
            return t.v(f"({value} ^ 128).to(tl.int8, bitcast=True)")
        if target in FP8:
            return t.v(f"{value}.to(tl.{FP8_NAMES[root.dtype]}, bitcast=True)")
        return Printer(t, self.nest.fp8).convert(value, root.dtype, target)

    def _dot(self, a: str, b: str) -> None:
        dot, t = self.nest.dot, self.text
        kind = "tl.float32" if dot.acc is F32 else "tl.int32"
        precision = f', input_precision="{dot.precision}"' if dot.precision else ""
        if dot.promote:
            t.do(f"acc += tl.dot({a}, {b}, out_dtype={kind}, max_num_imprecise_acc={min(dot.promote, self.nest.point.tile_k)})")
        else:
            t.do(f"acc = tl.dot({a}, {b}, acc, out_dtype={kind}{precision})")

    def _reduced(self) -> None:
        """Leave the sum of this part; the last block to come adds all up and goes on."""
        n, p, t = self.nest, self.nest.point, self.text
        size = p.tile_m * p.tile_n
        down, wide = (p.tile_n, p.tile_m) if p.swap_ab else (p.tile_m, p.tile_n)
        t.do(f"inside = tl.arange(0, {down})[:, None] * {wide} + tl.arange(0, {wide})[None, :]")
        large = n.tiles * p.split_k * size >= 1 << 31
        at = "block.to(tl.int64)" if large else "block"
        t.do(f"own = sums + {at} * {p.split_k * size}")
        t.do(f"tl.store(own + part * {size} + inside, acc)")
        t.do("tl.debug_barrier()")
        t.do('before = tl.atomic_add(counters + block, 1, sem="acq_rel")')
        with t.block(f"if before == {p.split_k - 1}:"):
            t.do('acc = tl.load(own + inside, cache_modifier=".cg")')
            for i in range(1, p.split_k):
                t.do(f'acc += tl.load(own + {i * size} + inside, cache_modifier=".cg")')
            t.do("tl.store(counters + block, 0)")
            self._stores()

    def _stores(self) -> None:
        n, p, t = self.nest, self.nest.point, self.text
        near: dict[Node, str] = {}
        if n.second is not None:
            cut = f"(2, {n.width}, {p.tile_m})" if p.swap_ab else f"({p.tile_m}, 2, {n.width})"
            t.do(f"acc, second = acc.reshape({cut}).permute({(1, 2, 0) if p.swap_ab else (0, 2, 1)}).split()")
            near[n.second] = "second"
        for i, access in enumerate(n.stores):
            tile = Tile("rows", "n", n.stored, self._row_mask, self._column_mask, "acc", p.swap_ab, near=near)
            emitter = Emitter(t, tile, _pointer, n.fp8)
            if i in n.largest:
                peak = emitter.largest_bits(access)
                t.do(f"tl.store(peaks + {n.largest.index(i) * n.tiles} + block, {peak})")
                continue
            if access.first == 0 and access.columns_extent == n.stored:
                emitter.store(access, f"o{i}")
                continue
            last = access.first + access.columns_extent
            start = f"tile_column * {n.width}"
            with t.block(f"if ({start} < {last}) & ({start} + {n.width} > {access.first}):"):
                emitter.store(access, f"o{i}")
        if n.largest:
            self._largest()

    def _largest(self) -> None:
        """The block whose tile is the last to be done finds the largest of all, in an order that makes no difference."""
        n, t = self.nest, self.text
        done = f"counters + {n.counters - 1}"
        t.do("tl.debug_barrier()")
        t.do(f'came = tl.atomic_add({done}, 1, sem="acq_rel")')
        with t.block(f"if came == {n.tiles - 1}:"):
            for at, i in enumerate(n.largest):
                t.do(f"most = tl.zeros(({PEAKS},), dtype=tl.int32)")
                with t.block(f"for of_tiles in range(0, {n.tiles}, {PEAKS}):"):
                    t.do(f"at_peaks = of_tiles + tl.arange(0, {PEAKS})")
                    here = f"peaks + {at * n.tiles} + at_peaks, mask=at_peaks < {n.tiles}"
                    t.do(f'most = tl.maximum(most, tl.load({here}, other=0, cache_modifier=".cg"))')
                t.do(f"tl.store(o{i}, tl.max(most, axis=0).to(tl.float32, bitcast=True))")
            t.do(f"tl.store({done}, 0)")


def _pointer(n: Node) -> str:
    assert isinstance(n.op, Param)
    return f"p{n.op.index}"
