"""Packing both operands, the parts of it that every function of a nest shares first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.candidates.llvm.expressions.casts import element
from tilewright.candidates.llvm.expressions.text import Function, Int, Module, vec
from tilewright.candidates.llvm.expressions.vector import Columns, Vectors
from tilewright.candidates.llvm.gemm.dots import PAIRS
from tilewright.candidates.llvm.gemm.nest import CACHE_LINE, Nest, rounded
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param
from tilewright.lowering.access import Access


class Packing:
    """Writes the functions that pack a nest's operands."""

    def __init__(self, nest: Nest, module: Module | None = None):
        self.nest, self.module = nest, module or Module(rounds_bf16=nest.dot.instruction == PAIRS)

    def _function(self, name: str, *more: tuple[str, str]) -> Function:
        return Function(self.module, name, [("ptr", "d"), *more])

    def _given(self, f: Function, index: int) -> str:
        """A pointer that the call was given."""
        return f.load("ptr", f.at("%d", 8 * index), 8)

    def _sources(self, f: Function, access: Access) -> Callable[[Node], str]:
        leaves = [n for n in toposort((access.root,)) if isinstance(n.op, Param)]
        loaded = {n: self._given(f, n.op.index) for n in leaves if isinstance(n.op, Param)}
        return loaded.__getitem__

    def _scratch(self, f: Function, offset: Int) -> str:
        return f.at(self._given(f, self.nest.pointers - 2), offset)

    def _rhs(self, f: Function) -> str:
        return self._given(f, self.nest.pointers - 1) if self.nest.constant else self._scratch(f, self.nest.rhs_at)

    def _counter(self, f: Function, which: int) -> str:
        return f.at("%d", rounded(8 * self.nest.pointers) + CACHE_LINE * which)

    def _operand(self, vectors: Vectors, row: Int, as_: str) -> str:
        """An operand's value, in the type that the instruction multiplies."""
        dot = self.nest.dot
        dtype, root = dot.lhs if as_ == "lhs" else dot.rhs, vectors.access.root.dtype
        value = vectors.row(row)
        # 8-bit codes stay as they are: their sign is the instruction's business
        if root is not dtype if root.is_float else element(root) != element(dtype):
            value = vectors.convert(value, root, dtype)
        if dot.element == "bfloat":
            return vectors.f.v(f"bitcast {vec(vectors.lanes, 'i16')} {value} to {vec(vectors.lanes, 'bfloat')}")
        return value

    def _pack_lhs(self) -> None:
        """pack_lhs(d): tiles of the left operand, a task each; pack_tile(d, b, tile, to, sums): one of them."""
        n = self.nest
        self._pack_tile()
        if n.blocks.packs_per_thread:
            return
        f = self._function("pack_lhs")
        copies, sums = self._scratch(f, 0), self._scratch(f, n.sums_at)
        with f.tasks(self._counter(f, 1), n.batch * n.tiles) as task:
            b, tile = f.div(task, n.tiles), f.rem(task, n.tiles)
            place = f.add(f.mul(f.mul(b, n.passes), n.tiles), tile)
            self._call_pack_tile(f, b, tile, f.at(copies, f.mul(place, n.lhs_tile)), f.at(sums, f.mul(f.mul(b, n.rows), 4)))
        f.finish()

    def _call_pack_tile(self, f: Function, b: Int, tile: Int, to: str, sums: str) -> None:
        f.call("pack_tile", ("ptr", "%d"), ("i64", b), ("i64", tile), ("ptr", to), ("ptr", sums))

    def _pack_tile(self) -> None:
        """A tile of matrix b to its place in the first pass, and its rows' sums to the matrix's where they are needed."""
        n, d = self.nest, self.nest.dot
        f = self._function("pack_tile", ("i64", "b"), ("i64", "tile"), ("ptr", "to"), ("ptr", "sums"))
        sources = self._sources(f, n.lhs)
        begin = f.mul("%tile", n.blocks.mr)
        with f.loop(0, f.min(n.blocks.mr, f.sub(n.rows, begin))) as loop:
            inside = f.add(begin, loop.index)
            row = f.add(f.mul("%b", n.rows), inside)
            turn = f.rem(loop.index, d.rows)
            line = f.add(f.mul(f.sub(loop.index, turn), n.lhs_stride), f.mul(turn, d.lane_bytes))

            def one(column: Int, mask: str | None, total: str) -> str:
                vectors = Vectors(f, n.lhs, n.vector, Columns(column, True, mask), sources)
                value = self._operand(vectors, row, "lhs")
                if mask is not None:
                    t = d.operand
                    value = f.v(f"select {vec(n.vector, 'i1')} {mask}, {t} {value}, {t} zeroinitializer")
                if n.blocks.pack_lhs:
                    pass_, at = f.div(column, n.blocks.kc), f.rem(column, n.blocks.kc)
                    place = f.mul(f.mul(pass_, n.tiles), n.lhs_tile)
                    offset = f.add(place, f.add(line, f.mul(at, d.rows * d.lane_bytes // d.k)))
                    for i, (type_, part) in enumerate(self._by_group(f, value)):
                        f.store(type_, part, f.at("%to", f.add(offset, i * d.rows * d.lane_bytes)), 4)
                return d.emit(f, total, value, "splat (i8 1)") if n.choice.correction else total

            whole = n.depth // n.vector * n.vector
            zero = [(d.accumulator, "zeroinitializer")]
            with f.loop(0, whole, n.vector, zero) as inner:
                inner.next = [one(inner.index, None, inner.carried[0])]
            total = inner.carried[0]
            if n.depth % n.vector:
                total = one(whole, f.first_lanes(n.vector, n.depth - whole), total)
            if n.choice.correction:
                i32 = f.intrinsic(f"llvm.vector.reduce.add.v{d.lanes * d.rows}i32", "i32", (d.accumulator, total))
                times = d.lanes if d.rows > 1 else 1  # that each sum is in it, once for a column
                f.store("i32", f.v(f"mul i32 {i32}, {n.choice.correction // times}"), f.at("%sums", f.mul(inside, 4)), 4)
        f.finish()

    def _by_group(self, f: Function, value: str) -> list[tuple[str, str]]:
        """Types and values of what of a packed vector of one row lies together."""
        n, d = self.nest, self.nest.dot
        if d.rows == 1:
            return [(d.operand, value)]
        type_ = vec(d.k, d.element)
        return [(type_, f.shuffle(d.operand, value, value, range(at, at + d.k))) for at in range(0, n.vector, d.k)]

    def _pack_rhs(self, name: str = "pack_rhs", counter: int = 0) -> None:
        """name(d): panels of the right operand, a task each; name_panel(d, b, panel, out): one of them."""
        n = self.nest
        f = self._function(f"{name}_panel", ("i64", "b"), ("i64", "panel"), ("ptr", "out"))
        if n.depth:
            (self._pack_along if n.k_contiguous else self._pack_across)(f, "%b", "%panel", "%out")
        f.finish()
        f = self._function(name)
        if not n.blocks.packs_per_thread:
            with f.tasks(self._counter(f, counter), n.batch * n.panels) as task:
                b, panel = f.div(task, n.panels), f.rem(task, n.panels)
                out = f.at(self._rhs(f), f.mul(task, n.panel))
                f.call(f"{name}_panel", ("ptr", "%d"), ("i64", b), ("i64", panel), ("ptr", out))
        f.finish()

    def _flipped(self, f: Function, type_: str, value: str) -> str:
        return f.v(f"xor {type_} {value}, splat (i8 -128)") if self.nest.choice.flip else value

    def _column(self, f: Function, panel: Int, part: Int) -> Int:
        """The right operand's column at which a vector of a panel starts."""
        n = self.nest
        if n.second is None:
            return f.add(f.mul(panel, n.nr), f.mul(part, n.dot.lanes))
        each = n.blocks.nv // 2
        inside = f.add(f.mul(panel, n.width), f.mul(f.rem(part, each), n.dot.lanes))
        return f.add(inside, f.mul(f.div(part, each), n.stored))

    def _pack_across(self, f: Function, b: Int, panel: Int, out: str) -> None:
        """From rows of columns: k rows are interleaved into groups, for as many vectors at once as an accumulator has rows."""
        n, d = self.nest, self.nest.dot
        sources = self._sources(f, n.rhs)
        inside, lanes = n.columns % n.nr, d.lanes * d.rows
        type_ = vec(lanes * d.k, d.element)
        with f.loop(0, n.blocks.nv, d.rows) as part:
            column = self._column(f, panel, part.index)
            mask = f.first_lanes(lanes, f.sub(n.columns, column)) if inside else None
            aligned = n.second is None or n.stored % lanes == 0
            vectors = Vectors(f, n.rhs, lanes, Columns(column, aligned, mask), sources)

            def group(index: Int, count: int, at: Int = part.index, vectors: Vectors = vectors) -> None:
                first = f.add(f.mul(b, n.depth), f.mul(index, d.k))
                rows = [self._operand(vectors, f.add(first, i), "rhs") for i in range(count)]
                rows += ["zeroinitializer"] * (d.k - count)
                value = self._flipped(f, type_, self._interleaved(f, rows, lanes))
                f.store(type_, value, f.at(out, f.mul(f.add(f.mul(index, n.blocks.nv), at), d.vector_bytes)), 4)

            with f.loop(0, n.depth // d.k) as loop:
                group(loop.index, d.k)
            if n.depth % d.k:
                group(n.depth // d.k, n.depth % d.k)
            for index in range(-(-n.depth // d.k), n.groups(n.depth)):  # past K, up to a whole tile
                place = f.mul(f.add(index * n.blocks.nv, part.index), d.vector_bytes)
                f.store(d.operand, "zeroinitializer", f.at(out, place), 4)

    def _interleaved(self, f: Function, rows: list[str], lanes: int) -> str:
        """Vectors of a row's columns into one of columns' groups."""
        element_type = self.nest.dot.element
        while len(rows) > 1:
            # each vector holds groups of `width` elements a column
            half = len(rows) // 2
            width = len(rows[:1]) and (self.nest.dot.k // len(rows))
            pairs: list[str] = []
            for i in range(half):
                count = lanes * width
                picks = [
                    lane * width + e + (count if side else 0) for lane in range(lanes) for side in (0, 1) for e in range(width)
                ]
                pairs.append(f.shuffle(vec(count, element_type), rows[2 * i], rows[2 * i + 1], picks))
            rows = pairs
        return rows[0]

    def _pack_along(self, f: Function, b: Int, panel: Int, out: str) -> None:
        """From columns of K: as many columns as lanes are read and their groups transposed; what K leaves over, word by word,
        which is the shorter code."""
        n, d = self.nest, self.nest.dot
        sources = self._sources(f, n.rhs)
        word, width = f"i{8 * d.lane_bytes}", d.vector_bytes
        words = vec(d.lanes, word)
        whole = n.depth // n.vector * n.vector
        left = n.depth - whole
        line = f.alloca(width) if left else ""
        with f.loop(0, n.blocks.nv) as part:
            column = self._column(f, panel, part.index)

            def read(vectors: Vectors, i: Int, mask: str | None, column: Int = column) -> str:
                inside = f.min(f.add(column, i), n.columns - 1)  # columns past the last are never stored
                value = self._operand(vectors, f.add(f.mul(b, n.columns), inside), "rhs")
                if mask is not None:
                    value = f.v(f"select {vec(n.vector, 'i1')} {mask}, {d.operand} {value}, {d.operand} zeroinitializer")
                return f.v(f"bitcast {d.operand} {self._flipped(f, d.operand, value)} to {words}")

            def place(group: Int, at: Int = part.index) -> str:
                return f.at(out, f.mul(f.add(f.mul(group, n.blocks.nv), at), width))

            if whole:
                with f.loop(0, whole, n.vector) as loop:
                    vectors = Vectors(f, n.rhs, n.vector, Columns(loop.index, True, None), sources)
                    first = f.div(loop.index, d.k)
                    for i, value in enumerate(transposed(f, [read(vectors, i, None) for i in range(d.lanes)], word)):
                        f.store(words, value, place(f.add(first, i)), 4)
            if left:
                mask = f.first_lanes(n.vector, left)
                vectors = Vectors(f, n.rhs, n.vector, Columns(whole, True, mask), sources)
                with f.loop(0, d.lanes) as lane:
                    f.store(words, read(vectors, lane.index, mask), line, width)
                    to = f.mul(lane.index, d.lane_bytes)
                    with f.loop(0, n.groups(left)) as group:
                        value = f.load(word, f.at(line, f.mul(group.index, d.lane_bytes)), 4)
                        f.store(word, value, f.at(place(f.add(whole // d.k, group.index)), to), 4)


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
