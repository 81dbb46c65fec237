"""The loop nest of a matrix product as LLVM IR: packing, BLIS's five loops in another order, micro-kernel, epilogue.

    jc: columns by nc            `_block_loops`  a task is one (jc, ic): a block of the result, for all of K
      ic: rows by mc
        pc: K by kc              `_pc_loop`      of several passes, the block's tiles, mc x nc, wait in the second-level cache
          ir: rows by mr         `_macro_kernel` the right operand's block, kc x nc, stays in the second-level cache
            jr: columns by nr                    the left operand's micro-panel, mr x kc, stays in the first-level cache
              K by 4 bytes       `_micro_kernel` the tile of the result, mr x nr, stays in registers
              after the last pc: `_epilogue`

BLIS's order is jc, pc, ic, jr, ir. Here pc lies inside ic: a task has its block of the result for all of K, so that no sum is
split between threads and results do not depend on how many there are; the price is that tiles wait from pass to pass. And ir
lies outside jr: the block that stays in the second-level cache is the right operand's, in BLIS the left one's (mc x kc).

Operands are packed whole before the loops, unless they lie right as they are (BLIS packs a block inside pc, and one inside ic).
The right one becomes micro-panels of nr columns, K in groups of 4 bytes; the left one micro-panels of mr rows, copied row by
row. A tile's columns are vectors; its rows are broadcast. Threads take tasks from counters: first of packing, and once all of
those are finished, of multiplying. Nobody waits for a thread that has no task. With `pack_per_thread` a task is a whole matrix:
its thread packs the left operand, and in each jc a block of the right one. In the code, jc and jr count micro-panels of the
right operand, ic and ir those of the left one, pc passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tilewright.candidates.llvm.expressions.printer import element
from tilewright.candidates.llvm.expressions.text import Function, Int, Module, suffix, vec
from tilewright.candidates.llvm.expressions.vector import Columns, Vectors
from tilewright.candidates.llvm.gemm import amx
from tilewright.candidates.llvm.gemm.dots import PAIRS
from tilewright.candidates.llvm.gemm.nest import CACHE_LINE, Nest, rounded
from tilewright.candidates.llvm.runtime.calls import write_entries
from tilewright.dtype import F32
from tilewright.ir.extent import Extent
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import VIEWS, Acc, Const, Convert, Map, Param
from tilewright.lowering.access import Access

# Of an epilogue on accumulators in registers: operations that it may have, and functions that need no register of their own.
# (`ir.expression.QUICK` has more: division, comparisons, and what else costs little, however many registers it takes.)
FUSED_OPERATIONS, FUSED_FUNCTIONS = 3, {"add", "subtract", "multiply", "relu", "maximum", "minimum"}
MASKED = 16  # lanes of vectors of which an instruction stores a part
PACKED, COUNTERS = 3, 4  # of the counters, the one of finished packing tasks; tasks are taken from the others
TILE_AT = (("i64", "row"), ("i64", "column"), ("ptr", "compensation"))  # a tile's place in the result; each row's compensation


@dataclass(frozen=True)
class Block:
    """A block of the result: mc x nc of a matrix, or what the edges leave of it.

    Attributes:
        b: the matrix.
        jc, ic: the first micro-panels of the right and of the left operand.
        lhs: the address of the matrix's packed left operand.
        rhs: of the block's first micro-panel of the right operand.
        compensation: of what is added to each row's sums, s32[batch * M], where the choice has it.
        tiles: of memory for one tile of the result or, in several passes, all of the block.
    """

    b: Int
    jc: Int
    ic: Int
    lhs: str
    rhs: str
    compensation: str
    tiles: str


@dataclass(frozen=True)
class Pass:
    """A pass over kc of K: its number, its groups of K, and whether it starts and whether it finishes the sums."""

    pc: Int
    groups: Int
    first: bool
    last: bool


class GemmWriter:
    """Writes a nest as a module with an entry `python(pointers…, threads, pack)`."""

    def __init__(self, nest: Nest, module: Module | None = None):
        self.nest = nest
        self.module = module or Module(nest.dot.instruction == PAIRS, nest.given_at, nest.dot.lanes)

    def _function(self, name: str, *more: tuple[str, str]) -> Function:
        return Function(self.module, name, [("ptr", "arguments"), *more])

    def _phase(self, name: str) -> Function:
        """A function that every thread calls with its number."""
        return self._function(name, ("i64", "thread"))

    def _pointer(self, f: Function, index: int) -> str:
        """A pointer that the call was given."""
        return f.load("ptr", f.at("%arguments", 8 * index), 8)

    def _sources(self, f: Function, access: Access) -> Callable[[Node], str]:
        leaves = [n for n in toposort((access.root,)) if isinstance(n.op, Param)]
        loaded = {n: self._pointer(f, n.op.index) for n in leaves if isinstance(n.op, Param)}
        return loaded.__getitem__

    def _scratch(self, f: Function, offset: Int) -> str:
        return f.at(self._pointer(f, self.nest.pointers - 2), offset)

    def _rhs(self, f: Function) -> str:
        return self._pointer(f, self.nest.pointers - 1) if self.nest.constant else self._scratch(f, self.nest.rhs_at)

    def _finished(self, f: Function) -> str:
        """The counter of finished packing tasks."""
        return self._counter(f, PACKED)

    def _counter(self, f: Function, which: int) -> str:
        return f.at("%arguments", rounded(8 * self.nest.pointers) + CACHE_LINE * which)

    def write(self) -> Module:
        n = self.nest
        self._tile_kernels(more=n.passes > 1)
        self._pack_rhs()
        if n.blocks.pack_lhs or n.choice.compensation:
            self._pack_lhs()
        if n.blocks.pack_per_thread:
            self._prefetch()
        self._block_loops()
        packing = {} if n.constant else {"pack_rhs": n.batch * n.rhs_panels}
        packing |= {"pack_lhs": self._lhs_tasks} if n.blocks.pack_lhs or n.choice.compensation else {}
        self._worker({} if n.blocks.pack_per_thread else packing, "multiply")
        self._entry()
        return self.module

    def _tile_kernels(self, *, more: bool) -> None:
        """Micro-kernels and epilogues of all tiles; with `more`, those that add to a tile, too."""
        n = self.nest
        for rows in n.heights:
            self._micro_kernel(rows, fresh=True)
            if more:
                self._micro_kernel(rows, fresh=False)
        for i, store in enumerate(() if self.fused_epilogue else n.stores):
            self._store_tile(i, store, whole=True)
            if self._partial(store):
                self._store_tile(i, store, whole=False)

    # -- packing

    def _operand(self, vectors: Vectors, row: Int, as_: str, *, zeros: bool = True) -> str:
        """An operand's value, in the type that the instruction multiplies; with `zeros`, zero in lanes that do not exist."""
        dot = self.nest.dot
        dtype, root = dot.lhs if as_ == "lhs" else dot.rhs, vectors.access.root.dtype
        value = vectors.row(row)
        # 8-bit codes stay as they are: their sign is the instruction's business
        if root is not dtype if root.is_float else element(root) != element(dtype):
            value = vectors.convert(value, root, dtype)
        if dot.element == "bfloat":
            value = vectors.f.v(f"bitcast {vec(vectors.lanes, 'i16')} {value} to {vec(vectors.lanes, 'bfloat')}")
        mask, t = vectors.columns.mask, dot.operand
        if mask is None or not zeros:
            return value
        return vectors.f.v(f"select {vec(vectors.lanes, 'i1')} {mask}, {t} {value}, {t} zeroinitializer")

    @property
    def _lhs_tasks(self) -> int:
        """Tasks of packing the left operand."""
        return self.nest.batch * self.nest.lhs_panels

    def _pack_lhs(self) -> None:
        """pack_lhs(arguments, thread): micro-panels of the left operand, a task each.

        pack_lhs_panel(arguments, b, panel, to, compensation): one of them."""
        n = self.nest
        self._pack_lhs_panel()
        if n.blocks.pack_per_thread:
            return
        f = self._phase("pack_lhs")
        copies, compensation = self._scratch(f, 0), self._scratch(f, n.compensation_at)
        with f.tasks(self._counter(f, 1), self._lhs_tasks, self._finished(f)) as task:
            b, panel = f.div(task, n.lhs_panels), f.rem(task, n.lhs_panels)
            place = f.add(f.mul(f.mul(b, n.passes), n.lhs_panels), panel)
            to = f.at(copies, f.mul(place, n.lhs_panel_bytes))
            self._call_pack_lhs_panel(f, b, panel, to, f.at(compensation, f.mul(f.mul(b, n.M), 4)))
        f.finish()

    def _call_pack_lhs_panel(self, f: Function, b: Int, panel: Int, to: str, compensation: str) -> None:
        args = (("i64", b), ("i64", panel), ("ptr", to), ("ptr", compensation))
        f.call("pack_lhs_panel", ("ptr", "%arguments"), *args)

    def _pack_lhs_panel(self) -> None:
        """Pack a micro-panel of matrix b to its place in the first pass; if signs are shifted, store its rows' compensation."""
        n, d = self.nest, self.nest.dot
        f = self._function("pack_lhs_panel", ("i64", "b"), ("i64", "panel"), ("ptr", "to"), ("ptr", "compensation"))
        sources = self._sources(f, n.lhs)
        begin = f.mul("%panel", n.blocks.mr)
        with f.loop(0, f.min(n.blocks.mr, f.sub(n.M, begin))) as loop:
            inside = f.add(begin, loop.index)
            row = f.add(f.mul("%b", n.M), inside)
            turn = f.rem(loop.index, d.rows)
            line = f.add(f.mul(f.sub(loop.index, turn), n.lhs_stride), f.mul(turn, d.lane_bytes))

            def store(column: Int, value: str) -> None:
                if n.blocks.pack_lhs:
                    pass_, at = f.div(column, n.blocks.kc), f.rem(column, n.blocks.kc)
                    place = f.mul(f.mul(pass_, n.lhs_panels), n.lhs_panel_bytes)
                    offset = f.add(place, f.add(line, f.mul(at, d.rows * d.lane_bytes // d.k)))
                    for i, (type_, part) in enumerate(self._by_group(f, value)):
                        f.store(type_, part, f.at("%to", f.add(offset, i * d.rows * d.lane_bytes)), 4)

            (total,) = self._vectors_of_row(f, n, sources, row, store, ("zeroinitializer",))
            if n.choice.compensation:
                i32 = f.intrinsic(f"llvm.vector.reduce.add.v{d.lanes * d.rows}i32", "i32", (d.accumulator, total))
                times = d.lanes if d.rows > 1 else 1  # that each sum is in it, once for a column
                f.store(
                    "i32", f.v(f"mul i32 {i32}, {n.choice.compensation // times}"), f.at("%compensation", f.mul(inside, 4)), 4
                )
        f.finish()

    def _vectors_of_row(
        self,
        f: Function,
        n: Nest,
        sources: Callable[[Node], str],
        row: Int,
        store: Callable[[Int, str], None],
        sums: Sequence[str] = (),
    ) -> Sequence[str]:
        """Call `store(column, value)` with each vector along K of a row of the left operand, as the instruction multiplies it.
        Gives `sums` of the accumulator's type; where signs are shifted, with all values added."""

        def one(column: Int, mask: str | None, sums: Sequence[str]) -> list[str]:
            vectors = Vectors(f, n.lhs, n.vector, Columns(column, True, mask), sources)
            value = self._operand(vectors, row, "lhs")
            store(column, value)
            return [n.dot.emit(f, x, value, "splat (i8 1)") if n.choice.compensation else x for x in sums]

        whole = n.K // n.vector * n.vector
        with f.loop(0, whole, n.vector, [(n.dot.accumulator, x) for x in sums]) as loop:
            loop.next = one(loop.index, None, loop.carried)
        return one(whole, f.first_lanes(n.vector, n.K - whole), loop.carried) if n.K % n.vector else loop.carried

    def _by_group(self, f: Function, value: str) -> list[tuple[str, str]]:
        """Types and values of what of a packed vector of one row lies together."""
        n, d = self.nest, self.nest.dot
        if d.rows == 1:
            return [(d.operand, value)]
        type_ = vec(d.k, d.element)
        return [(type_, f.shuffle(d.operand, value, value, range(at, at + d.k))) for at in range(0, n.vector, d.k)]

    def _pack_rhs(self, name: str = "pack_rhs", counter: int = 0) -> None:
        """name(arguments, thread): micro-panels of the right operand, a task each.

        name_panel(arguments, b, panel, out): one of them."""
        n = self.nest
        f = self._function(f"{name}_panel", ("i64", "b"), ("i64", "panel"), ("ptr", "out"))
        if n.K:
            (self._pack_k_contiguous if n.k_contiguous else self._pack_n_contiguous)(f, "%b", "%panel", "%out")
        f.finish()
        f = self._phase(name)
        if not n.blocks.pack_per_thread:
            with f.tasks(self._counter(f, counter), n.batch * n.rhs_panels, self._finished(f)) as task:
                b, panel = f.div(task, n.rhs_panels), f.rem(task, n.rhs_panels)
                out = f.at(self._rhs(f), f.mul(task, n.rhs_panel_bytes))
                f.call(f"{name}_panel", ("ptr", "%arguments"), ("i64", b), ("i64", panel), ("ptr", out))
        f.finish()

    def _sign_shifted(self, f: Function, type_: str, value: str) -> str:
        return f.v(f"xor {type_} {value}, splat (i8 -128)") if self.nest.choice.shift_sign else value

    def _column(self, f: Function, panel: Int, part: Int) -> Int:
        """The right operand's column at which a vector of a panel starts."""
        n = self.nest
        if n.gate_up is None:
            return f.add(f.mul(panel, n.nr), f.mul(part, n.dot.lanes))
        each = n.nv // 2
        inside = f.add(f.mul(panel, n.width), f.mul(f.rem(part, each), n.dot.lanes))
        return f.add(inside, f.mul(f.div(part, each), n.stored))

    def _pack_n_contiguous(self, f: Function, b: Int, panel: Int, out: str) -> None:
        """Pack rows of N: k rows are interleaved into groups, for as many vectors at once as an accumulator has rows."""
        n, d = self.nest, self.nest.dot
        sources = self._sources(f, n.rhs)
        inside, lanes = n.N % n.nr, d.lanes * d.rows
        type_ = vec(lanes * d.k, d.element)
        with f.loop(0, n.nv, d.rows) as part:
            column = self._column(f, panel, part.index)
            mask = f.first_lanes(lanes, f.sub(n.N, column)) if inside else None
            aligned = n.gate_up is None or n.stored % lanes == 0
            vectors = Vectors(f, n.rhs, lanes, Columns(column, aligned, mask), sources)

            def group(index: Int, count: int, at: Int = part.index, vectors: Vectors = vectors) -> None:
                first = f.add(f.mul(b, n.K), f.mul(index, d.k))
                rows = [self._operand(vectors, f.add(first, i), "rhs", zeros=False) for i in range(count)]
                rows += ["zeroinitializer"] * (d.k - count)
                value = self._sign_shifted(f, type_, self._interleaved(f, rows, lanes))
                f.store(type_, value, f.at(out, f.mul(f.add(f.mul(index, n.nv), at), d.vector_bytes)), 4)

            with f.loop(0, n.K // d.k) as loop:
                group(loop.index, d.k)
            if n.K % d.k:
                group(n.K // d.k, n.K % d.k)
            for index in () if d.steps == 1 else range(-(-n.K // d.k), n.groups(n.K)):  # past K, up to a whole tile
                place = f.mul(f.add(index * n.nv, part.index), d.vector_bytes)
                f.store(d.operand, "zeroinitializer", f.at(out, place), 4)

    def _interleaved(self, f: Function, rows: list[str], lanes: int) -> str:
        """Vectors of a row's columns into one of columns' groups."""
        element_type = self.nest.dot.element
        while len(rows) > 1:
            # each vector holds groups of `width` elements a column
            half = len(rows) // 2
            width = self.nest.dot.k // len(rows)
            pairs: list[str] = []
            for i in range(half):
                count = lanes * width
                picks = [
                    lane * width + e + (count if side else 0) for lane in range(lanes) for side in (0, 1) for e in range(width)
                ]
                pairs.append(f.shuffle(vec(count, element_type), rows[2 * i], rows[2 * i + 1], picks))
            rows = pairs
        return rows[0]

    def _pack_k_contiguous(self, f: Function, b: Int, panel: Int, out: str) -> None:
        """Pack columns that lie along K: as many as lanes are read and their groups transposed; what K leaves over, word
        by word, which is the shorter code."""
        n, d = self.nest, self.nest.dot
        sources = self._sources(f, n.rhs)
        word, width = f"i{8 * d.lane_bytes}", d.vector_bytes
        words = vec(d.lanes, word)
        whole = n.K // n.vector * n.vector
        left = n.K - whole
        line = f.alloca(width) if left else ""
        with f.loop(0, n.nv) as part:
            column = self._column(f, panel, part.index)

            def read(vectors: Vectors, i: Int, column: Int = column) -> str:
                inside = f.min(f.add(column, i), n.N - 1)  # columns past the last are never stored
                value = self._operand(vectors, f.add(f.mul(b, n.N), inside), "rhs")
                return f.v(f"bitcast {d.operand} {self._sign_shifted(f, d.operand, value)} to {words}")

            def place(group: Int, at: Int = part.index) -> str:
                return f.at(out, f.mul(f.add(f.mul(group, n.nv), at), width))

            if whole:
                with f.loop(0, whole, n.vector) as loop:
                    vectors = Vectors(f, n.rhs, n.vector, Columns(loop.index, True, None), sources)
                    first = f.div(loop.index, d.k)
                    for i, value in enumerate(transposed(f, [read(vectors, i) for i in range(d.lanes)], word)):
                        f.store(words, value, place(f.add(first, i)), 4)
            if left:
                mask = f.first_lanes(n.vector, left)
                vectors = Vectors(f, n.rhs, n.vector, Columns(whole, True, mask), sources)
                with f.loop(0, d.lanes) as lane:
                    f.store(words, read(vectors, lane.index), line, width)
                    to = f.mul(lane.index, d.lane_bytes)
                    with f.loop(0, n.groups(left)) as group:
                        value = f.load(word, f.at(line, f.mul(group.index, d.lane_bytes)), 4)
                        f.store(word, value, f.at(place(f.add(whole // d.k, group.index)), to), 4)

    # -- jc and ic: blocks of the result, which are tasks

    def _block_loops(self) -> None:
        n, blocks = self.nest, self.nest.blocks
        f = self._phase("multiply")
        if blocks.pack_per_thread or n.passes > 1:
            shared = 0 if blocks.pack_per_thread else n.threads_at
            own = self._scratch(f, f.add(shared, f.mul("%thread", n.thread_bytes)))
        else:
            own = f.alloca(n.tile_bytes)
        if not blocks.pack_per_thread:
            copies, right, compensation = self._scratch(f, 0), self._rhs(f), self._scratch(f, n.compensation_at)
            across, down = -(-n.rhs_panels // n.nc_panels), -(-n.lhs_panels // n.mc_panels)
            with f.tasks(self._counter(f, 2), n.batch * across * down) as task:
                b, inner = f.div(task, across * down), f.rem(task, across * down)
                jc, ic = f.mul(f.div(inner, down), n.nc_panels), f.mul(f.rem(inner, down), n.mc_panels)
                first = f.at(right, f.mul(f.add(f.mul(b, n.rhs_panels), jc), n.rhs_panel_bytes))
                left = f.at(copies, f.mul(b, n.passes * n.lhs_panels * n.lhs_panel_bytes))
                self._pc_loop(f, Block(b, jc, ic, left, first, compensation, own))
        else:
            right, compensation = f.at(own, n.rhs_at), f.at(own, n.compensation_at)
            tiles = f.at(own, n.threads_at) if n.passes > 1 else f.alloca(n.tile_bytes)
            with f.tasks_ahead(self._counter(f, 2), n.batch) as (b, following):
                if blocks.pack_lhs or n.choice.compensation:
                    with f.loop(0, n.lhs_panels) as panel:
                        to = f.at(own, f.mul(panel.index, n.lhs_panel_bytes))
                        self._call_pack_lhs_panel(f, b, panel.index, to, compensation)
                of_row = f.at(compensation, f.sub(0, f.mul(b, n.M * 4)))
                with f.loop(0, n.rhs_panels, n.nc_panels) as jc:
                    with f.loop(jc.index, f.min(f.add(jc.index, n.nc_panels), n.rhs_panels)) as panel:
                        out = f.at(right, f.mul(f.sub(panel.index, jc.index), n.rhs_panel_bytes))
                        f.call("pack_rhs_panel", ("ptr", "%arguments"), ("i64", b), ("i64", panel.index), ("ptr", out))
                    more = f.compare("slt", f.add(jc.index, n.nc_panels), n.rhs_panels)
                    next_jc = f.v(f"select i1 {more}, i64 {f.add(jc.index, n.nc_panels)}, i64 0")
                    next_b = f.v(f"select i1 {more}, i64 {b}, i64 {following}")
                    with f.loop(0, n.lhs_panels, n.mc_panels) as ic:
                        self._pc_loop(f, Block(b, jc.index, ic.index, own, right, of_row, tiles))
                        with f.when(f.compare("slt", next_b, n.batch)):
                            f.call("prefetch", ("ptr", "%arguments"), ("i64", next_b), ("i64", next_jc), ("i64", ic.index))
        if n.dot.tile_registers:
            amx.release(f)
        f.finish()

    def _prefetch(self) -> None:
        """prefetch(arguments, b, jc, ic): a part of the operands of the block that starts at micro-panel jc of matrix b.

        Each block of rows, ic, prefetches its share, so that memory is read at an even pace while products are computed.
        """
        n, blocks = self.nest, self.nest.blocks
        f = self._function("prefetch", ("i64", "b"), ("i64", "jc"), ("i64", "ic"))
        shares = -(-n.lhs_panels // n.mc_panels)

        def region(access: Access, extent: int, first: Int, last: Int, begin: Int, end: Int) -> None:
            """Rows of matrix b, a share of them, and columns begin to end."""
            bits = max(x.dtype.bits for x in toposort((access.root,)) if isinstance(x.op, Param))
            line = CACHE_LINE * 8 // bits
            with f.loop(first, last) as row, f.loop(begin, end, line) as column:
                vectors = Vectors(f, access, line, Columns(column.index, True, None), self._sources(f, access))
                vectors.prefetch(f.add(f.mul("%b", extent), row.index))

        share = f.div("%ic", n.mc_panels)
        for half in range(0, n.N, n.stored):
            column = f.add(f.mul("%jc", n.width), half)
            until = f.min(f.add(column, n.nc_panels * n.width), half + n.stored)
            if n.k_contiguous:
                each = -(-n.nc_panels * n.width // shares)
                first = f.add(column, f.mul(share, each))
                region(n.rhs, n.N, first, f.min(f.add(first, each), until), 0, n.K)
            else:
                each = -(-n.K // shares)
                first = f.mul(share, each)
                region(n.rhs, n.K, first, f.min(f.add(first, each), n.K), column, until)
        with f.when(f.compare("eq", "%jc", 0)):
            each = n.mc_panels * blocks.mr
            first = f.mul(share, each)
            region(n.lhs, n.M, first, f.min(f.add(first, each), n.M), 0, n.K)
        f.finish()

    # -- pc: passes over K

    def _pc_loop(self, f: Function, block: Block) -> None:
        """All passes over a block of the result."""
        n, kc = self.nest, self.nest.blocks.kc
        jc_end, ic_end = f.min(f.add(block.jc, n.nc_panels), n.rhs_panels), f.min(f.add(block.ic, n.mc_panels), n.lhs_panels)
        each, final = n.groups(min(kc, n.K)), n.groups(n.K - (n.passes - 1) * kc)
        if n.passes > 1:
            self._macro_kernel(f, block, jc_end, ic_end, Pass(0, each, first=True, last=False))
            with f.loop(1, n.passes - 1) as pc:
                self._macro_kernel(f, block, jc_end, ic_end, Pass(pc.index, each, first=False, last=False))
        self._macro_kernel(f, block, jc_end, ic_end, Pass(n.passes - 1, final, first=n.passes == 1, last=True))

    # -- ir and jr: the macro-kernel

    def _macro_kernel(self, f: Function, block: Block, jc_end: Int, ic_end: Int, pass_: Pass) -> None:
        """All tiles of a block in one pass: those of micro-panels jc to jc_end by ic to ic_end."""
        n, mr = self.nest, self.nest.blocks.mr
        pass_bytes = n.rhs_bytes_over(n.blocks.kc)

        def jr_loop(rows: int, ir: Int) -> None:
            begin = f.mul(ir, mr)
            a, stride = self._lhs_panel(f, block.lhs, block.b, ir, begin, pass_.pc)
            with f.loop(block.jc, jc_end) as jr:
                offset = f.add(f.mul(f.sub(jr.index, block.jc), n.rhs_panel_bytes), f.mul(pass_.pc, pass_bytes))
                tile = block.tiles
                if n.passes > 1:
                    index = f.add(f.mul(f.sub(ir, block.ic), n.nc_panels), f.sub(jr.index, block.jc))
                    tile = f.at(tile, f.mul(index, n.tile_bytes))
                right = f.at(block.rhs, offset)
                args = [("ptr", a), ("i64", stride), ("ptr", right), ("ptr", tile), ("i64", pass_.groups)]
                if n.prefetch_distance:  # this tile's share of the block that comes after
                    share = f.mul(f.mul(ir, n.prefetch_distance * CACHE_LINE), pass_.groups)
                    args.append(("ptr", f.at(right, f.add(pass_bytes, share))))
                row = f.add(f.mul(block.b, n.M), begin)
                if self.fused_epilogue:
                    at = (("i64", row), ("i64", f.mul(jr.index, n.width)), ("ptr", block.compensation))
                    args += [("ptr", "%arguments"), *at]
                f.call(f"micro_{rows}{'' if pass_.first else '_more'}", *args)
                if pass_.last and not self.fused_epilogue:
                    self._epilogue(f, tile, row, rows, jr.index, block.compensation)

        def configure(rows: int) -> None:
            if n.dot.tile_registers:
                amx.configure(f, n.dot, rows)

        if isinstance(n.last_mr, Extent):
            full = n.M // mr
            configure(mr)
            with f.loop(block.ic, f.min(ic_end, full)) as ir:
                jr_loop(mr, ir.index)
            with f.when(f.compare("eq", ic_end, n.lhs_panels)):
                for rows in range(1, mr):
                    with f.when(f.compare("eq", n.M % mr, rows)):
                        configure(rows)
                        jr_loop(rows, full)
            return
        full = n.lhs_panels if n.last_mr == mr else n.lhs_panels - 1
        if full:
            configure(mr)
            with f.loop(block.ic, f.min(ic_end, full)) as ir:
                jr_loop(mr, ir.index)
        if full < n.lhs_panels:
            with f.when(f.compare("eq", ic_end, n.lhs_panels)):
                configure(n.last_mr)
                jr_loop(n.last_mr, n.lhs_panels - 1)

    def _lhs_panel(self, f: Function, copies: str, b: Int, panel: Int, begin: Int, pc: Int) -> tuple[str, Int]:
        """The address at which a micro-panel of the left operand starts in one pass, and the bytes between its rows."""
        n = self.nest
        if n.blocks.pack_lhs:
            return f.at(copies, f.mul(f.add(f.mul(pc, n.lhs_panels), panel), n.lhs_panel_bytes)), n.lhs_stride
        leaf = next(x for x in toposort((n.lhs.root,)) if isinstance(x.op, Param))
        place, size = n.lhs.of_leaf(leaf), n.dot.lhs.bits // 8
        row_term, outer = place.rows[0], place.rows[1:]
        offset = f.add(place.offset, f.mul(begin, row_term.stride))
        if outer:
            offset = f.add(offset, f.mul(b, outer[0].stride))
        elif n.batch > 1:
            offset = f.add(offset, f.mul(f.mul(b, n.M), row_term.stride))
        offset = f.add(offset, f.mul(pc, n.blocks.kc))
        assert isinstance(leaf.op, Param)
        return f.at(self._pointer(f, leaf.op.index), f.mul(offset, size)), row_term.stride * size

    # -- the micro-kernel

    @cached_property
    def fused_epilogue(self) -> bool:
        """The micro-kernel ends in the epilogue: results go to where they lie straight from the accumulators."""
        return self._fuses_epilogue()

    def _fuses_epilogue(self) -> bool:
        """Tell whether the one result is all that is made of its tiles, by so little that no register is missed."""
        n = self.nest
        (store, *others), d = n.stores, n.dot
        if others or any(n.amaxes) or n.passes > 1 or d.tile > 1 or (store.first, store.columns_extent) != (0, n.stored):
            return False
        if n.N % n.nr and d.lanes < MASKED:
            return False
        if [(t.inner, t.stride) for t in store.of_result().columns] != [(1, 1)]:
            return False
        done = [x.op for x in toposort((store.root,)) if not isinstance(x.op, (Acc, Const, Param, *VIEWS))]
        return len(done) <= FUSED_OPERATIONS and all(
            isinstance(op, Convert) or (isinstance(op, Map) and op.fn in FUSED_FUNCTIONS) for op in done
        )

    def _micro_kernel(self, rows: int, *, fresh: bool) -> None:
        """tile of the result (+)= lhs micro-panel x rhs micro-panel over `groups` groups of K; or the result itself, see
        `fused_epilogue`."""
        d, nv = self.nest.dot, self.nest.nv
        name = f"micro_{rows}{'' if fresh else '_more'}"
        if d.tile_registers:
            amx.micro(self.module, self.nest, name, rows, fresh=fresh)
            return
        args = [("ptr", "a"), ("i64", "stride"), ("ptr", "b"), ("ptr", "tile"), ("i64", "groups")]
        distance = self.nest.prefetch_distance
        args += [("ptr", "next")] if distance else []
        f = Function(self.module, name, [*args, ("ptr", "arguments"), *TILE_AT] if self.fused_epilogue else args)
        width, tops = d.vector_bytes, range(0, rows, d.rows)
        row_at = [f.mul("%stride", m) for m in tops]
        first = ["zeroinitializer"] * (len(tops) * nv)
        if not fresh:
            first = [self._load_accumulator(f, m, j, rows) for m in tops for j in range(nv)]
        unroll = 4 if len(first) <= d.registers // 4 else 1  # what is in flight stays in registers

        def step(group: Int, acc: Sequence[str]) -> list[str]:
            b, a = f.at("%b", f.mul(group, width * nv)), f.at("%a", f.mul(group, d.rows * d.lane_bytes))
            for j in range(distance):  # what follows at once, processors read ahead themselves
                f.prefetch(f.at("%next", f.add(f.mul(group, CACHE_LINE * distance), CACHE_LINE * j)), level=2)
            right = [f.load(d.operand, f.at(b, width * j), width) for j in range(nv)]
            after: list[str] = []
            for m, at in enumerate(row_at):
                if d.rows == 1:
                    word = f.splat(d.lanes, "i32", f.load("i32", f.at(a, at), 1))
                    left = f.v(f"bitcast {vec(d.lanes, 'i32')} {word} to {d.operand}")
                else:
                    left = f.load(d.operand, f.at(a, at), d.lane_bytes)
                after += [d.emit(f, acc[m * nv + j], left, right[j]) for j in range(nv)]
            return after

        carried = [(d.accumulator, x) for x in first]
        done: Int = 0
        if unroll > 1:
            done = f.mul(f.div("%groups", unroll), unroll)
            with f.loop(0, done, unroll, carried) as loop:
                acc = loop.carried
                for i in range(unroll):
                    acc = step(f.add(loop.index, i), acc)
                loop.next = list(acc)
            carried = [(d.accumulator, x) for x in loop.carried]
        with f.loop(done, "%groups", 1, carried) as loop:
            loop.next = step(loop.index, loop.carried)
        results = iter(loop.carried)
        if self.fused_epilogue:
            self._epilogue_in_registers(f, rows, results)
            tops = ()
        for m in tops:
            for j in range(nv):
                self._store_accumulator(f, next(results), m, j, rows)
        f.finish()

    def _epilogue_in_registers(self, f: Function, rows: int, results: Iterator[str]) -> None:
        """Accumulators through the epilogue into the result."""
        n, (store,), lanes = self.nest, self.nest.stores, self.nest.dot.lanes
        f.numbers_from_here()
        target, sources = self._pointer(f, n.sources), self._sources(f, store)
        parts: list[Vectors] = []
        for j in range(n.width // lanes):
            column = f.add("%column", j * lanes)
            mask = f.first_lanes(lanes, f.sub(n.stored, column)) if n.stored % n.width else None
            parts.append(Vectors(f, store, lanes, Columns(column, True, mask), sources, n.gate_up))
        for m in range(rows):
            row = f.add("%row", m)
            sums = [self._compensated(f, lanes, next(results), row) for _ in range(n.nv)]
            for j, vectors in enumerate(parts):
                vectors.store(row, vectors.row(row, *sums[j :: len(parts)]), target)

    def _compensated(self, f: Function, lanes: int, acc: str, row: Int) -> str:
        """A vector of one row's accumulators without what shifted signs have added to it."""
        if not self.nest.choice.compensation:
            return acc
        fix = f.splat(lanes, "i32", f.load("i32", f.at("%compensation", f.mul(row, 4)), 4))
        return f.v(f"add {vec(lanes, 'i32')} {acc}, {fix}")

    def _in_tile(self, f: Function, row: int, part: int) -> tuple[str, str, int]:
        """Type, address and alignment of a row's part of the result tile that one accumulator holds."""
        d = self.nest.dot
        return vec(d.lanes, d.word), f.at("%tile", (row * self.nest.nv + part) * d.lanes * 4), d.lanes * 4

    def _load_accumulator(self, f: Function, row: int, part: int, rows: int) -> str:
        """An accumulator out of the result tile, from this row on."""
        d, found = self.nest.dot, list[str]()
        for m in range(row, row + d.rows):
            found.append(f.load(*self._in_tile(f, m, part)) if m < rows else "zeroinitializer")
        if d.rows == 1:
            return found[0]
        return f.shuffle(vec(d.lanes, d.word), found[0], found[1], range(2 * d.lanes))

    def _store_accumulator(self, f: Function, value: str, row: int, part: int, rows: int) -> None:
        """An accumulator into the result tile, those of its rows that there are."""
        d = self.nest.dot
        for i, m in enumerate(range(row, min(row + d.rows, rows))):
            type_, at, align = self._in_tile(f, m, part)
            of_row = value if d.rows == 1 else f.shuffle(d.accumulator, value, value, range(i * d.lanes, (i + 1) * d.lanes))
            f.store(type_, of_row, at, align)

    # -- the epilogue

    def _partial(self, store: Access) -> bool:
        """Some panel of the result belongs to this store in part."""
        return bool(store.first % self.nest.width or store.columns_extent % self.nest.width)

    def _store_tile(self, index: int, store: Access, *, whole: bool) -> None:
        """A result tile through the epilogue into one result: whole rows at a time, so that long chains run side by side."""
        n, lanes = self.nest, self.nest.width
        args = [("ptr", "tile"), ("i64", "row"), ("i64", "rows"), ("i64", "column"), ("ptr", "compensation")]
        f = self._function(f"store_{index}{'' if whole else '_part'}", *args)
        mask = None
        if not whole:
            below = f.first_lanes(lanes, f.sub(0, "%column"))
            inside = f.first_lanes(lanes, f.sub(store.columns_extent, "%column"))
            flags = vec(lanes, "i1")
            mask = f.v(f"and {flags} {inside}, {f.v(f'xor {flags} {below}, splat (i1 true)')}")
        columns = Columns("%column", store.first % lanes == 0, mask)
        vectors = Vectors(f, store, lanes, columns, self._sources(f, store), n.gate_up)
        target = self._pointer(f, n.sources + index)
        type_ = vec(lanes, "float" if n.dot.acc is F32 else "i32")
        words, amax = vec(lanes, "i32"), bool(n.amaxes) and n.amaxes[index]
        with f.loop(0, "%rows", 1, [(words, "zeroinitializer")] if amax else []) as loop:
            row = f.add("%row", loop.index)
            sums: list[str] = []
            for half in range(0, n.nr, lanes):
                place = f.at(f.at("%tile", f.mul(loop.index, n.nr * 4)), half * 4)
                acc = self._compensated(f, lanes, f.load(type_, place, math.gcd(lanes * 4, CACHE_LINE)), row)
                sums.append(self._accumulated(vectors, acc))
            value = vectors.row(row, *sums)
            if amax:
                bits = f.v(f"bitcast {vec(lanes, 'float')} {value} to {words}")
                if mask is not None:
                    bits = f.v(f"select {vec(lanes, 'i1')} {mask}, {words} {bits}, {words} zeroinitializer")
                more = ((words, loop.carried[0]), (words, bits))
                loop.next = [f.intrinsic(f"llvm.umax.{suffix(words)}", words, *more)]
            else:
                vectors.store(row, value, target)
        if amax:
            self._store_amax(f, lanes, loop.carried[0], target)
        f.finish()

    def _store_amax(self, f: Function, lanes: int, bits: str, target: str) -> None:
        """Store the largest of a tile's magnitudes, as bits, in the one of all: threads rarely have to agree on who writes."""
        most = f.intrinsic(f"llvm.vector.reduce.umax.v{lanes}i32", "i32", (vec(lanes, "i32"), bits))
        before = f.v(f"load atomic i32, ptr {target} monotonic, align 4")
        with f.when(f.v(f"icmp ugt i32 {most}, {before}")):
            f.v(f"atomicrmw umax ptr {target}, i32 {most} monotonic")

    def _accumulated(self, vectors: Vectors, acc: str) -> str:
        """The accumulator as the stores' expressions take it."""
        return acc

    def _epilogue(self, f: Function, tile: str, row: Int, rows: Int, panel: Int, compensation: str = "null") -> None:
        """A finished tile into every result it has columns of; `compensation`: the address of each row's."""
        n, width = self.nest, self.nest.width
        column = f.mul(panel, width)
        for i, store in enumerate(n.stores):
            own, last = f.sub(column, store.first), store.columns_extent
            args = (("ptr", "%arguments"), ("ptr", tile), ("i64", row), ("i64", rows), ("i64", own), ("ptr", compensation))
            if store.first == 0 and last == n.stored and last % width == 0:
                f.call(f"store_{i}", *args)
                continue
            full = f.compare("ule", own, last - width) if last >= width else "false"
            if last >= width:
                with f.when(full):
                    f.call(f"store_{i}", *args)
            if self._partial(store):
                starts, ends = f.compare("sgt", own, -width), f.compare("slt", own, last)
                some = f.v(f"and i1 {starts}, {ends}")
                with f.when(f.v(f"and i1 {some}, {f.v(f'xor i1 {full}, true')}")):
                    f.call(f"store_{i}_part", *args)

    # -- entries

    def _worker(self, packing: Mapping[str, int], then: str) -> None:
        """worker(arguments, thread): all threads pack together, by function and its number of tasks; when everything is packed,
        they do what is named `then`."""
        f = self._phase("worker")
        for step in packing:
            f.call(step, ("ptr", "%arguments"), ("i64", "%thread"))
        if packing:
            f.meet(self._finished(f), sum(packing.values()))
        f.call(then, ("ptr", "%arguments"), ("i64", "%thread"))
        f.finish()

    def _entry(self) -> None:
        """The entries: with `pack`, the right operand is packed instead of multiplied."""
        n = self.nest

        def begin(f: Function) -> str:
            if any(n.amaxes):
                with f.when(f.compare("eq", "%pack", 0)):
                    for i in (i for i, amax in enumerate(n.amaxes) if amax):
                        f.store("i32", "0", self._pointer(f, n.sources + i), 4)
            return f.v(f"select i1 {f.compare('ne', '%pack', 0)}, ptr @pack_rhs, ptr @worker")

        write_entries(self.module, n.pointers, COUNTERS, begin, packs=True)


def transposed(f: Function, rows: Sequence[str], word: str = "i32") -> list[str]:
    """A square of words, its rows vectors of as many lanes: blocks are exchanged in ever smaller squares."""
    lanes = len(rows)
    type_, values = vec(lanes, word), list(rows)
    half = lanes // 2
    while half:
        low = [i % (2 * half) < half for i in range(lanes)]
        first = [i if low[i] else lanes + i - half for i in range(lanes)]
        second = [i + half if low[i] else lanes + i for i in range(lanes)]
        for i in range(lanes):
            if low[i]:
                a, b = values[i], values[i + half]
                values[i], values[i + half] = f.shuffle(type_, a, b, first), f.shuffle(type_, a, b, second)
        half //= 2
    return values
