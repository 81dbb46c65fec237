"""The micro-kernel: a tile of rows by a panel of columns in registers, kept in memory or stored where results lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from tilewright.candidates.llvm.expressions.text import Function, Int, vec
from tilewright.candidates.llvm.expressions.vector import BINARY, Columns, Vectors
from tilewright.candidates.llvm.gemm import amx as tiles
from tilewright.candidates.llvm.gemm.nest import CACHE_LINE
from tilewright.candidates.llvm.gemm.packing import Packing
from tilewright.ir.graph import toposort
from tilewright.ir.ops import VIEWS, Acc, Const, Convert, Map, Param

FEW = 3  # operations on an accumulator that registers are left for
MASKED = 16  # lanes of vectors of which an instruction stores a part
QUICK = {*BINARY, "relu", "maximum", "minimum"}
PLACE = (("i64", "row"), ("i64", "column"), ("ptr", "sums"))  # of a tile in the result, and its rows' corrections


class Micro(Packing):
    """Writes the functions micro_R and micro_R_more for tiles of R rows."""

    @cached_property
    def direct(self) -> bool:
        """Results go to where they lie straight from the accumulators: what is done to them is little, so that no register is
        missed, and each is all that is made of its tile."""
        n = self.nest
        (store, *others), d = n.stores, n.dot
        if others or any(n.largest) or n.passes > 1 or d.tile > 1 or (store.first, store.columns_extent) != (0, n.stored):
            return False
        if n.columns % n.nr and d.lanes < MASKED:
            return False
        if [(t.inner, t.stride) for t in store.of_result().columns] != [(1, 1)]:
            return False
        done = [x.op for x in toposort((store.root,)) if not isinstance(x.op, (Acc, Const, Param, *VIEWS))]
        return len(done) <= FEW and all(isinstance(op, Convert) or (isinstance(op, Map) and op.fn in QUICK) for op in done)

    def _micro(self, rows: int, *, fresh: bool) -> None:
        """result tile (+)= lhs tile x rhs panel over `groups` groups of K; or the result itself, see `direct`."""
        d, nv = self.nest.dot, self.nest.blocks.nv
        name = f"micro_{rows}{'' if fresh else '_more'}"
        if d.tile_registers:
            tiles.micro(self.module, self.nest, name, rows, fresh=fresh)
            return
        args = [("ptr", "a"), ("i64", "stride"), ("ptr", "b"), ("ptr", "tile"), ("i64", "groups")]
        asks = self.nest.prefetch_distance
        args += [("ptr", "next")] if asks else []
        f = Function(self.module, name, [*args, ("ptr", "d"), *PLACE] if self.direct else args)
        width, tops = d.vector_bytes, range(0, rows, d.rows)
        row_at = [f.mul("%stride", m) for m in tops]
        first = ["zeroinitializer"] * (len(tops) * nv)
        if not fresh:
            first = [self._result(f, m, j, rows) for m in tops for j in range(nv)]
        unroll = 4 if len(first) <= d.registers // 4 else 1  # what is in flight stays in registers

        def step(group: Int, acc: Sequence[str]) -> list[str]:
            b, a = f.at("%b", f.mul(group, width * nv)), f.at("%a", f.mul(group, d.rows * d.lane_bytes))
            for j in range(asks):  # what follows at once, processors read ahead themselves
                f.prefetch(f.at("%next", f.add(f.mul(group, CACHE_LINE * asks), CACHE_LINE * j)), level=2)
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
        if self.direct:
            self._finish(f, rows, results)
            tops = ()
        for m in tops:
            for j in range(nv):
                self._keep(f, next(results), m, j, rows)
        f.finish()

    def _finish(self, f: Function, rows: int, results: Iterator[str]) -> None:
        """Accumulators through the epilogue into the result."""
        n, (store,), lanes = self.nest, self.nest.stores, self.nest.dot.lanes
        target, sources = self._given(f, n.sources), self._sources(f, store)
        parts: list[Vectors] = []
        for j in range(n.width // lanes):
            column = f.add("%column", j * lanes)
            mask = f.first_lanes(lanes, f.sub(n.stored, column)) if n.stored % n.width else None
            parts.append(Vectors(f, store, lanes, Columns(column, True, mask), sources, n.second))
        for m in range(rows):
            row = f.add("%row", m)
            sums = [self._corrected(f, lanes, next(results), row) for _ in range(n.blocks.nv)]
            for j, vectors in enumerate(parts):
                vectors.store(row, vectors.row(row, *sums[j :: len(parts)]), target)

    def _corrected(self, f: Function, lanes: int, acc: str, row: Int) -> str:
        """A vector of one row's accumulators without what a changed sign has added to it."""
        if not self.nest.choice.correction:
            return acc
        fix = f.splat(lanes, "i32", f.load("i32", f.at("%sums", f.mul(row, 4)), 4))
        return f.v(f"add {vec(lanes, 'i32')} {acc}, {fix}")

    def _place(self, f: Function, row: int, part: int) -> tuple[str, str, int]:
        """Type, address and alignment of a row's part of the result tile that one accumulator holds."""
        d = self.nest.dot
        return vec(d.lanes, d.word), f.at("%tile", (row * self.nest.blocks.nv + part) * d.lanes * 4), d.lanes * 4

    def _result(self, f: Function, row: int, part: int, rows: int) -> str:
        """An accumulator out of the result tile, from this row on."""
        d, found = self.nest.dot, list[str]()
        for m in range(row, row + d.rows):
            found.append(f.load(*self._place(f, m, part)) if m < rows else "zeroinitializer")
        if d.rows == 1:
            return found[0]
        return f.shuffle(vec(d.lanes, d.word), found[0], found[1], range(2 * d.lanes))

    def _keep(self, f: Function, value: str, row: int, part: int, rows: int) -> None:
        """An accumulator into the result tile, those of its rows that there are."""
        d = self.nest.dot
        for i, m in enumerate(range(row, min(row + d.rows, rows))):
            type_, at, align = self._place(f, m, part)
            of_row = value if d.rows == 1 else f.shuffle(d.accumulator, value, value, range(i * d.lanes, (i + 1) * d.lanes))
            f.store(type_, of_row, at, align)
