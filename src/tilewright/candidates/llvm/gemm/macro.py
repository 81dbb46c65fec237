"""A nest as IR: micro-kernel, epilogue, loops, threads.

Both operands are packed first, unless they lie right as they are: the right one into panels of nr columns, K in groups of 4
bytes; the left one into tiles of mr rows, copied row by row. A tile's columns are vectors; its rows are broadcast. Threads pack
together, meet at a barrier, and take blocks of the result from a counter; or, of many matrices, each takes whole ones and packs
for itself. No sum is ever split between threads, so results do not depend on how many there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.candidates.llvm.expressions.text import Function, Int, Module, suffix, vec
from tilewright.candidates.llvm.expressions.vector import Columns, Vectors
from tilewright.candidates.llvm.gemm import amx as tiles
from tilewright.candidates.llvm.gemm.micro import Micro
from tilewright.candidates.llvm.gemm.nest import CACHE_LINE, rounded
from tilewright.dtype import F32
from tilewright.ir.graph import toposort
from tilewright.ir.ops import Param
from tilewright.lowering.access import Access


@dataclass(frozen=True)
class Packed:
    """Where a block's operands lie: one matrix's tiles of the left one, the block's first panel of the right one, the rows'
    corrections, and room for tiles of the result."""

    lhs: str
    rhs: str
    sums: str
    results: str


class Writer(Micro):
    """Writes a nest as a module with an entry `python(pointers…, threads, pack)`."""

    def write(self) -> Module:
        n = self.nest
        sizes = {n.last_mr} | ({n.blocks.mr} if n.tiles > 1 else set())
        for rows in sorted(sizes):
            self._micro(rows, fresh=True)
            if n.passes > 1:
                self._micro(rows, fresh=False)
        for i, store in enumerate(() if self.direct else n.stores):
            self._store(i, store, whole=True)
            if self._partial(store):
                self._store(i, store, whole=False)
        self._pack_rhs()
        if n.blocks.pack_lhs or n.choice.correction:
            self._pack_lhs()
        if n.blocks.packs_per_thread:
            self._prefetch()
        self._multiply()
        self._worker()
        self._entry()
        return self.module

    # -- results

    def _partial(self, store: Access) -> bool:
        """Some panel of the result belongs to this store in part."""
        return bool(store.first % self.nest.width or store.columns_extent % self.nest.width)

    def _store(self, index: int, store: Access, *, whole: bool) -> None:
        """A result tile through the epilogue into one result: whole rows at a time, so that long chains run side by side."""
        n, lanes = self.nest, self.nest.width
        args = [("ptr", "tile"), ("i64", "row"), ("i64", "rows"), ("i64", "column"), ("ptr", "sums")]
        f = self._function(f"store_{index}{'' if whole else '_part'}", *args)
        mask = None
        if not whole:
            below = f.first_lanes(lanes, f.sub(0, "%column"))
            inside = f.first_lanes(lanes, f.sub(store.columns_extent, "%column"))
            flags = vec(lanes, "i1")
            mask = f.v(f"and {flags} {inside}, {f.v(f'xor {flags} {below}, splat (i1 true)')}")
        columns = Columns("%column", store.first % lanes == 0, mask)
        vectors = Vectors(f, store, lanes, columns, self._sources(f, store), n.second)
        target = self._given(f, n.sources + index)
        type_ = vec(lanes, "float" if n.dot.acc is F32 else "i32")
        words, largest = vec(lanes, "i32"), bool(n.largest) and n.largest[index]
        with f.loop(0, "%rows", 1, [(words, "zeroinitializer")] if largest else []) as loop:
            row = f.add("%row", loop.index)
            sums: list[str] = []
            for half in range(0, n.nr, lanes):
                place = f.at(f.at("%tile", f.mul(loop.index, n.nr * 4)), half * 4)
                acc = self._corrected(f, lanes, f.load(type_, place, math.gcd(lanes * 4, CACHE_LINE)), row)
                sums.append(self._accumulated(vectors, acc))
            value = vectors.row(row, *sums)
            if largest:
                bits = f.v(f"bitcast {vec(lanes, 'float')} {value} to {words}")
                if mask is not None:
                    bits = f.v(f"select {vec(lanes, 'i1')} {mask}, {words} {bits}, {words} zeroinitializer")
                more = ((words, loop.carried[0]), (words, bits))
                loop.next = [f.intrinsic(f"llvm.umax.{suffix(words)}", words, *more)]
            else:
                vectors.store(row, value, target)
        if largest:
            self._keep_largest(f, lanes, loop.carried[0], target)
        f.finish()

    def _keep_largest(self, f: Function, lanes: int, bits: str, target: str) -> None:
        """The largest of a tile's magnitudes, as bits, into the one of all: threads rarely have to agree on who writes."""
        most = f.intrinsic(f"llvm.vector.reduce.umax.v{lanes}i32", "i32", (vec(lanes, "i32"), bits))
        before = f.v(f"load atomic i32, ptr {target} monotonic, align 4")
        with f.when(f.v(f"icmp ugt i32 {most}, {before}")):
            f.v(f"atomicrmw umax ptr {target}, i32 {most} monotonic")

    def _accumulated(self, vectors: Vectors, acc: str) -> str:
        """The accumulator as the stores' expressions take it."""
        return acc

    def _stores(self, f: Function, tile: str, row: Int, rows: Int, panel: Int, sums: str = "null") -> None:
        """A finished tile into every result it has columns of; `sums`: corrections by row."""
        n, width = self.nest, self.nest.width
        column = f.mul(panel, width)
        for i, store in enumerate(n.stores):
            own, last = f.sub(column, store.first), store.columns_extent
            args = (("ptr", "%d"), ("ptr", tile), ("i64", row), ("i64", rows), ("i64", own), ("ptr", sums))
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

    # -- the loops

    def _multiply(self) -> None:
        n, blocks = self.nest, self.nest.blocks
        f = self._function("multiply")
        if blocks.packs_per_thread or n.passes > 1:
            me = f.v(f"sext i32 {f.intrinsic('omp_get_thread_num', 'i32')} to i64")
            own = self._scratch(f, f.add(0 if blocks.packs_per_thread else n.threads_at, f.mul(me, n.thread_bytes)))
        else:
            own = f.alloca(n.result_tile)
        if not blocks.packs_per_thread:
            copies, right, sums = self._scratch(f, 0), self._rhs(f), self._scratch(f, n.sums_at)
            across, down = -(-n.panels // blocks.nc), -(-n.tiles // blocks.mc)
            with f.tasks(self._counter(f, 2), n.batch * across * down) as task:
                b, inner = f.div(task, across * down), f.rem(task, across * down)
                p0, t0 = f.mul(f.div(inner, down), blocks.nc), f.mul(f.rem(inner, down), blocks.mc)
                first = f.at(right, f.mul(f.add(f.mul(b, n.panels), p0), n.panel))
                self._block(f, b, p0, t0, Packed(f.at(copies, f.mul(b, n.passes * n.tiles * n.lhs_tile)), first, sums, own))
        else:
            right, sums = f.at(own, n.rhs_at), f.at(own, n.sums_at)
            results = f.at(own, n.threads_at) if n.passes > 1 else f.alloca(n.result_tile)
            with f.tasks_ahead(self._counter(f, 2), n.batch) as (b, following):
                if blocks.pack_lhs or n.choice.correction:
                    with f.loop(0, n.tiles) as tile:
                        self._call_pack_tile(f, b, tile.index, f.at(own, f.mul(tile.index, n.lhs_tile)), sums)
                of_row = f.at(sums, f.sub(0, f.mul(b, n.rows * 4)))
                with f.loop(0, n.panels, blocks.nc) as p0:
                    with f.loop(p0.index, f.min(f.add(p0.index, blocks.nc), n.panels)) as panel:
                        out = f.at(right, f.mul(f.sub(panel.index, p0.index), n.panel))
                        f.call("pack_rhs_panel", ("ptr", "%d"), ("i64", b), ("i64", panel.index), ("ptr", out))
                    more = f.compare("slt", f.add(p0.index, blocks.nc), n.panels)
                    p2 = f.v(f"select i1 {more}, i64 {f.add(p0.index, blocks.nc)}, i64 0")
                    b2 = f.v(f"select i1 {more}, i64 {b}, i64 {following}")
                    with f.loop(0, n.tiles, blocks.mc) as t0:
                        self._block(f, b, p0.index, t0.index, Packed(own, right, of_row, results))
                        with f.when(f.compare("slt", b2, n.batch)):
                            f.call("ask", ("ptr", "%d"), ("i64", b2), ("i64", p2), ("i64", t0.index))
        if n.dot.tile_registers:
            tiles.release(f)
        f.finish()

    def _prefetch(self) -> None:
        """ask(d, b, panel, tile): for a part of the operands of the block that starts at `panel` of matrix b.

        Each block of tiles asks for its share, so that memory is read at an even pace while products are computed.
        """
        n, blocks = self.nest, self.nest.blocks
        f = self._function("ask", ("i64", "b"), ("i64", "panel"), ("i64", "tile"))
        shares = -(-n.tiles // blocks.mc)

        def region(access: Access, extent: int, first: Int, last: Int, begin: Int, end: Int) -> None:
            """Rows of matrix b, a share of them, and columns begin to end."""
            bits = max(x.dtype.bits for x in toposort((access.root,)) if isinstance(x.op, Param))
            line = CACHE_LINE * 8 // bits
            with f.loop(first, last) as row, f.loop(begin, end, line) as column:
                vectors = Vectors(f, access, line, Columns(column.index, True, None), self._sources(f, access))
                vectors.prefetch(f.add(f.mul("%b", extent), row.index))

        share = f.div("%tile", blocks.mc)
        for half in range(0, n.columns, n.stored):
            column = f.add(f.mul("%panel", n.width), half)
            until = f.min(f.add(column, blocks.nc * n.width), half + n.stored)
            if n.k_contiguous:
                each = -(-blocks.nc * n.width // shares)
                first = f.add(column, f.mul(share, each))
                region(n.rhs, n.columns, first, f.min(f.add(first, each), until), 0, n.depth)
            else:
                each = -(-n.depth // shares)
                first = f.mul(share, each)
                region(n.rhs, n.depth, first, f.min(f.add(first, each), n.depth), column, until)
        with f.when(f.compare("eq", "%panel", 0)):
            each = blocks.mc * blocks.mr
            first = f.mul(share, each)
            region(n.lhs, n.rows, first, f.min(f.add(first, each), n.rows), 0, n.depth)
        f.finish()

    def _block(self, f: Function, b: Int, p0: Int, t0: Int, packed: Packed) -> None:
        """All tiles of a block: from panel p0 and tile t0 of matrix b on."""
        n, blocks = self.nest, self.nest.blocks
        p1, t1 = f.min(f.add(p0, blocks.nc), n.panels), f.min(f.add(t0, blocks.mc), n.tiles)

        def tile_row(rows: int, tile: Int, pass_: Int, groups: Int, *, fresh: bool, last: bool) -> None:
            begin = f.mul(tile, blocks.mr)
            a, stride = self._tile(f, packed.lhs, b, tile, begin, pass_)
            with f.loop(p0, p1) as loop:
                place = f.add(f.mul(f.sub(loop.index, p0), n.panel), f.mul(pass_, self._pass_bytes))
                out = packed.results
                if n.passes > 1:
                    index = f.add(f.mul(f.sub(tile, t0), blocks.nc), f.sub(loop.index, p0))
                    out = f.at(out, f.mul(index, n.result_tile))
                right = f.at(packed.rhs, place)
                args = [("ptr", a), ("i64", stride), ("ptr", right), ("ptr", out), ("i64", groups)]
                if n.prefetch_distance:  # this tile's share of the block that comes after
                    share = f.mul(f.mul(tile, n.prefetch_distance * CACHE_LINE), groups)
                    args.append(("ptr", f.at(right, f.add(self._pass_bytes, share))))
                row = f.add(f.mul(b, n.rows), begin)
                if self.direct:
                    args += [("ptr", "%d"), ("i64", row), ("i64", f.mul(loop.index, n.width)), ("ptr", packed.sums)]
                f.call(f"micro_{rows}{'' if fresh else '_more'}", *args)
                if last and not self.direct:
                    self._stores(f, out, row, rows, loop.index, packed.sums)

        def configure(rows: int) -> None:
            if n.dot.tile_registers:
                tiles.configure(f, n.dot, rows)

        def one_pass(pass_: Int, groups: Int, *, fresh: bool, last: bool) -> None:
            full = n.tiles if n.last_mr == blocks.mr else n.tiles - 1
            if full:
                configure(blocks.mr)
                with f.loop(t0, f.min(t1, full)) as loop:
                    tile_row(blocks.mr, loop.index, pass_, groups, fresh=fresh, last=last)
            if full < n.tiles:
                with f.when(f.compare("eq", t1, n.tiles)):
                    configure(n.last_mr)
                    tile_row(n.last_mr, n.tiles - 1, pass_, groups, fresh=fresh, last=last)

        each, final = n.groups(min(blocks.kc, n.depth)), n.groups(n.depth - (n.passes - 1) * blocks.kc)
        if n.passes > 1:
            one_pass(0, each, fresh=True, last=False)
            with f.loop(1, n.passes - 1) as loop:
                one_pass(loop.index, each, fresh=False, last=False)
        one_pass(n.passes - 1, final, fresh=n.passes == 1, last=True)

    @property
    def _pass_bytes(self) -> int:
        return self.nest.panel_bytes(self.nest.blocks.kc)

    def _tile(self, f: Function, copies: str, b: Int, tile: Int, begin: Int, pass_: Int) -> tuple[str, Int]:
        """Where a tile of the left operand starts in one pass, and how far apart its rows are."""
        n = self.nest
        if n.blocks.pack_lhs:
            return f.at(copies, f.mul(f.add(f.mul(pass_, n.tiles), tile), n.lhs_tile)), n.lhs_stride
        leaf = next(x for x in toposort((n.lhs.root,)) if isinstance(x.op, Param))
        place, size = n.lhs.of_leaf(leaf), n.dot.lhs.bits // 8
        row_term, outer = place.rows[0], place.rows[1:]
        offset = f.add(place.offset, f.mul(begin, row_term.stride))
        if outer:
            offset = f.add(offset, f.mul(b, outer[0].stride))
        elif n.batch > 1:
            offset = f.add(offset, f.mul(f.mul(b, n.rows), row_term.stride))
        offset = f.add(offset, f.mul(pass_, n.blocks.kc))
        assert isinstance(leaf.op, Param)
        return f.at(self._given(f, leaf.op.index), f.mul(offset, size)), row_term.stride * size

    def _worker(self) -> None:
        n = self.nest
        f = self._function("worker")
        steps: list[str] = []
        if not n.blocks.packs_per_thread:
            steps = ([] if n.constant else ["pack_rhs"]) + (["pack_lhs"] if n.blocks.pack_lhs or n.choice.correction else [])
        for step in steps:
            f.call(step, ("ptr", "%d"))
        if steps:
            f.intrinsic("GOMP_barrier", "void")
        f.call("multiply", ("ptr", "%d"))
        f.finish()

    def _entry(self) -> None:
        """run(pointers, threads, pack): pack the right operand if `pack`, else multiply; counters follow the pointers.

        python(pointers…, threads, pack) is the same, called by CPython as METH_FASTCALL.
        """
        n = self.nest
        counters = rounded(8 * n.pointers)
        f = Function(self.module, "run", [("ptr", "d"), ("i64", "threads"), ("i64", "pack")], public=True)
        for i in range(3):
            f.store("i64", "0", f.at("%d", counters + CACHE_LINE * i), 8)
        if any(n.largest):
            with f.when(f.compare("eq", "%pack", 0)):
                for i in (i for i, largest in enumerate(n.largest) if largest):
                    f.store("i32", "0", self._given(f, n.sources + i), 4)
        which = f.v(f"select i1 {f.compare('ne', '%pack', 0)}, ptr @pack_rhs, ptr @worker")
        alone = f.compare("eq", "%threads", 1)
        with f.when(alone):
            f.do(f"call void {which}(ptr %d)")
        with f.when(f.v(f"xor i1 {alone}, true")):
            count = f.v("trunc i64 %threads to i32")
            f.intrinsic("GOMP_parallel", "void", ("ptr", which), ("ptr", "%d"), ("i32", count), ("i32", "0"))
        f.finish()

        f = Function(self.module, "python", [("ptr", "self"), ("ptr", "args"), ("i64", "count")], "ptr", public=True)
        d = f.alloca(counters + 3 * CACHE_LINE)
        for i in range(n.pointers):
            value = f.intrinsic("PyLong_AsVoidPtr", "ptr", ("ptr", f.load("ptr", f.at("%args", 8 * i), 8)))
            f.store("ptr", value, f.at(d, 8 * i), 8)
        threads, pack = (
            f.intrinsic("PyLong_AsLong", "i64", ("ptr", f.load("ptr", f.at("%args", 8 * (n.pointers + i)), 8))) for i in (0, 1)
        )
        state = f.intrinsic("PyEval_SaveThread", "ptr")
        f.call("run", ("ptr", d), ("i64", threads), ("i64", pack))
        f.intrinsic("PyEval_RestoreThread", "void", ("ptr", state))
        self.module.declarations["_Py_NoneStruct"] = "@_Py_NoneStruct = external global i8"
        f.intrinsic("Py_IncRef", "void", ("ptr", "@_Py_NoneStruct"))
        f.finish("ptr @_Py_NoneStruct")
