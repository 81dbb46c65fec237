"""Attention on Hopper as a text of Gluon: one head's keys and values stay in shared memory, and a warpgroup holds all scores of
64 queries in registers.

With a whole row at hand the softmax is done once: no maximum is carried along and nothing is scaled again. The products are
asynchronous: the scores' maximum is sought while the next keys are multiplied, and the weights of some keys are worked out
while those before them meet their values. A block is one warpgroup, and two share a multiprocessor, one at its exponentials
while the other has the matrix unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from tilewright.candidates.triton.attention.heads import Heads
from tilewright.candidates.triton.attention.kernel import LOG2_E, power, sources_of
from tilewright.candidates.triton.expressions.casts import FP8_NAMES, NATIVE, in_memory
from tilewright.candidates.triton.expressions.emit import Emitter, Tile
from tilewright.candidates.triton.expressions.text import Text, Written
from tilewright.candidates.triton.hopper.attention.codes import codes_at_once
from tilewright.candidates.triton.hopper.attention.sizes import (
    ROWS,
    WIDEST,
    Chunk,
    Point,
    chunks,
    last_seen,
    leaf_of,
    same_for_queries,
)
from tilewright.candidates.triton.hopper.brief import NATIVE_FP8
from tilewright.dtype import F32, PRED, DType
from tilewright.ir.graph import Node
from tilewright.ir.ops import Param
from tilewright.lowering.access import Access

WARPS = 4  # of a block
NONE = "float('-inf')"
PROLOGUE = '''\
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def ex2(x):
    """2^x as the special function unit gives it, 0 below the normal numbers."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
'''


def kernel_text(heads: Heads, point: Point) -> Written:
    """A module with the function `kernel` of a pointer for each source that is read, and for each result."""
    body = Writer(heads, point).body()
    header = ", ".join([*arguments(heads), *body.numbers])
    return Written(f"{PROLOGUE}\n\n@gluon.jit\ndef kernel({header}):\n{body}\n", body.numbers)


def arguments(heads: Heads) -> list[str]:
    """Of that function."""
    return [f"p{i}" for i in sources_of(heads)] + [f"o{i}" for i in range(len(heads.stores))]


def chained(t: Text) -> None:
    """The next kernel may be launched, this one waits for the one before (NVIDIA's programmatic dependent launch)."""
    t.do("gdc_launch_dependents()")
    t.do("gdc_wait()")


def pointer_of(leaf: Node) -> str:
    assert isinstance(leaf.op, Param)
    return f"p{leaf.op.index}"


class _Values(Emitter):
    """An emitter that has operands copied, and that divides what was summed up in f32 without a remainder's correction."""

    def corrected(self, near: str, x: str, divisor: str, inverse: str) -> str:
        return near

    def copy(self, at: Access, into: str) -> None:
        """A tile of an operand to shared memory, zeros where there is nothing."""
        leaf = leaf_of(at)
        assert leaf is not None
        where = self._sum(*self._spread(at, at.of_leaf(leaf)))
        mask = self._mask(at, rows=True, columns=True)
        more = f", mask={mask}" if mask else ""
        self.text.do(f"async_copy.async_copy_global_to_shared({into}, {pointer_of(leaf)} + {where}{more})")


class Writer:
    """The lines of one kernel."""

    def __init__(self, heads: Heads, point: Point) -> None:
        self.h, self.p, self.text = heads, point, Text("gl")
        self.unit = NATIVE[heads.unit.name]
        self.first = heads.q.dtype if heads.q.codes is not None else heads.unit  # type of the first product
        self.tiles, self.ragged = -(-heads.queries // ROWS), heads.queries % ROWS != 0
        self.added = heads.mask is not None and heads.mask.root.dtype is not PRED
        self.factor = 1.0 if self.added else heads.scale * LOG2_E  # from what scores are held as to powers of 2
        self.by_keys = heads.mask is not None and same_for_queries(heads, heads.mask)

    def body(self) -> Text:
        h, p, do = self.h, self.p, self.text.do
        chained(self.text)
        self._layouts()
        do("program = gl.program_id(0)")
        do(f"head = program // {p.splits}")
        do(f"part = program % {p.splits}")
        do(f"key_head = head // {h.shared}")
        whole = chunks(h.keys)
        self._room("qs", ROWS, h.depth, self.first)
        for i, c in enumerate(whole):
            self._room(f"ks{i}", c.extent, h.depth, self.first)
            self._room(f"vs{i}", c.extent, h.width, h.unit)
        if p.ones:
            self._ones(self.text)
        coded = h.v.codes is not None  # values are multiplied by weights, which are no codes: they become floats here
        if coded:
            for i, c in enumerate(whole):
                do(f"values{i} = {self._keys(c, 'v', h.width).value(h.v.at)}")
        self._copy_queries("part")
        for i, c in enumerate(whole):
            self._keys(c, "k", h.depth).copy(h.k.at, f"ks{i}")
        for i, c in enumerate(whole):
            if coded:
                value = self._emitter(Tile("", "", 0)).convert(f"values{i}", h.v.dtype, h.unit)
                do(f"vs{i}.store({value})")
            else:
                self._keys(c, "v", h.width).copy(h.v.at, f"vs{i}")
        do("async_copy.commit_group()")
        if h.mask is not None and h.mask.root.dtype is PRED and self.by_keys:
            for i, c in enumerate(whole):
                with self.text.block("for _ in gl.static_range(1):"):  # read again where it is needed, as registers are full
                    do(f"whole{i} = gl.min({self._mask(i, c)}.to(gl.int32), 1).sum(0)")
        self._arrived()
        for first, last in self._runs():
            with self.text.block(f"for tile in {self._range(first, last)}:"):
                self._tile(first, last)
        return self.text

    def _ones(self, t: Text) -> None:
        """What the weights are multiplied by to be added up."""
        layout = f"gl.NVMMASharedLayout.get_default_for([8, {WIDEST}], gl.{self.unit})"
        t.do(f"ones = gl.allocate_shared_memory(gl.{self.unit}, [8, {WIDEST}], {layout})")
        t.do(f"C8: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [{WARPS}, 1], [1, 0])")
        t.do(f"ones.store(gl.full([8, {WIDEST}], 1.0, gl.{self.unit}, C8))")
        t.do("fence_async_shared()")

    def _layouts(self) -> None:
        """Of scores by the keys of a chunk, of the result, of weights as they are multiplied, and of what moves in pieces of 16
        bytes."""
        h, do, warps = self.h, self.text.do, WARPS
        for extent in sorted({c.extent for c in chunks(h.keys)} | {ROWS}):
            do(f"L{extent}: gl.constexpr = {self._of_product(extent, self.first)}")
        do(f"O: gl.constexpr = {self._of_product(power(h.width), h.unit)}")
        do("R: gl.constexpr = gl.SliceLayout(1, O)")
        do("A: gl.constexpr = gl.DotOperandLayout(0, O, 2)")
        if self.p.ones:
            do(f"O8: gl.constexpr = {self._of_product(8, h.unit)}")
            do("A8: gl.constexpr = gl.DotOperandLayout(0, O8, 2)")
        for name, extent, dtype in (("q", h.depth, h.q.dtype), ("k", h.depth, h.k.dtype), ("v", h.width, h.v.dtype)):
            each = 128 // max(dtype.bits, 8)
            along = min(max(power(extent) // each, 1), 32)
            do(f"C{name}: gl.constexpr = gl.BlockedLayout([1, {each}], [{32 // along}, {along}], [{warps}, 1], [1, 0])")
            self._columns(name, extent, f"C{name}")
        do(f"Co: gl.constexpr = {self._leaving()}")
        self._columns("o", h.width, "Co")
        self._columns("x", h.width, "O")

    def _leaving(self) -> str:
        """Rows as they are written: each thread has a piece, of those that it and the three beside it have after the product
        (PTX ISA 9.0, 9.7.15.5.1), so that pieces are exchanged among four threads."""
        width = power(self.h.width)
        each = min(128 // max(self.h.stores[0].root.dtype.bits, 8), width // 4)
        powers = [1 << b for b in range(width.bit_length() - 1)]
        registers = [[0, n] for n in powers if n < each] + [[8, 0]] + [[0, n] for n in powers if n >= 4 * each]
        lanes, warps = [[0, each], [0, 2 * each], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
        return f"gl.DistributedLinearLayout({registers}, {lanes}, {warps}, [], [{ROWS}, {width}])"

    def _columns(self, name: str, extent: int, layout: str) -> None:
        self.text.do(f"{name}_column = gl.arange(0, {power(extent)}, gl.SliceLayout(0, {layout}))")
        if power(extent) != extent:
            self.text.do(f"{name}_mask = {name}_column < {extent}")

    def _of_product(self, extent: int, dtype: DType) -> str:
        return f"gl.NVMMADistributedLayout([3, 0], [{WARPS}, 1], [16, {extent}, {256 // dtype.bits}])"

    def _room(self, name: str, rows: int, columns: int, dtype: DType) -> None:
        """Shared memory for a tile, which holds codes as bytes until they are multiplied."""
        shape, kind = [rows, power(columns)], f"gl.{in_memory(dtype)}"
        layout = f"gl.NVMMASharedLayout.get_default_for({shape}, {kind})"
        self.text.do(f"{name} = gl.allocate_shared_memory({kind}, {shape}, {layout})")

    def _codes(self, name: str, rows: int) -> str:
        """The tile as operand of the first product."""
        if self.h.q.codes is None:
            return name
        return f"{name}._reinterpret(gl.{FP8_NAMES[self.first]}, [{rows}, {power(self.h.depth)}], {name}.layout)"

    def of_scale(self, key: str, value: float) -> str:
        """What is made of the scores' scale, which is data where scales of codes are in it."""
        return repr(value) if self.h.q.codes is None else self.text.number(key, value)

    # -- the tiles of a head's queries

    def _runs(self) -> Iterator[tuple[int, int]]:
        """First and last of tiles that see as many chunks of keys."""
        ends = [chunks(last_seen(self.h, t)) for t in range(self.tiles)]
        first = 0
        for t in range(1, self.tiles + 1):
            if t == self.tiles or ends[t] != ends[first]:
                yield first, t - 1
                first = t

    def _range(self, first: int, last: int) -> str:
        """Tiles go to blocks in turn."""
        n = self.p.splits
        start = "part" if first == 0 else f"{first} + (part + {-first % n}) % {n}"
        return f"range({first}, {last + 1})" if n == 1 else f"range({start}, {last + 1}, {n})"

    def _tile(self, first: int, last: int, most: int | None = None) -> None:
        """One tile of queries, of those from `first` to `last`, and of keys those of `most` chunks."""
        h, p, do = self.h, self.p, self.text.do
        seen = chunks(last_seen(h, last))[:most]
        exact = h.causal == "no"
        self.begin_tile()
        for i, c in enumerate(seen):
            held = chunks(h.keys)[i]
            k = self._part(self._codes(f"ks{i}", held.extent), c, held)
            zeros = f"gl.zeros([{ROWS}, {c.extent}], gl.float32, L{c.extent})"
            q = self._codes("qs", ROWS)
            do(f"s{c.name} = warpgroup_mma({q}, {k}.permute((1, 0)), {zeros}, use_acc=False, is_async=True)")
        for i, c in enumerate(seen):
            do(f"s{c.name} = warpgroup_mma_wait({len(seen) - 1 - i}, deps=(s{c.name},))")
            self._hide(i, c, exact=exact or self._all_seen(first, c))
            top = self._as_rows(f"gl.max(s{c.name}, 1)", c)
            do(f"top = {top if i == 0 else f'gl.maximum(top, {top})'}")
        follows = self.copy_following(first, last)
        if h.mask is not None:
            do(f"top = gl.where(top == {NONE}, 0.0, top)")
        do(f"base = top * {self.of_scale('opposite', -self.factor)}")
        for i, c in enumerate(seen):
            self.before_chunk(i)
            self._weigh(i, c)
            self._multiply(i, c)
        if follows:
            self._arrived()
        sums = "acc, sums" if p.ones else "acc"
        do(f"x{', total' if p.ones else ''} = warpgroup_mma_wait(0, deps=({sums},))")
        if p.ones:
            do("total = gl.convert_layout(gl.max(total, 1), R)")
        do(f"inverse = {1.0 if h.v.codes is None else self.text.number('scale of values', h.v.codes.scale)} / total")
        if h.zero_masked_rows and h.mask is not None:
            do("inverse = gl.where(total == 0.0, 0.0, inverse)")
        self._store()

    def begin_tile(self) -> None:
        """What precedes a tile's first product."""

    def before_chunk(self, i: int) -> None:
        """What precedes the exponentials of a chunk of keys."""

    def _weigh(self, i: int, c: Chunk) -> None:
        """Weights of a chunk, and their sum."""
        do = self.text.do
        base = "base" if self._like_result(c) else f"gl.convert_layout(base, gl.SliceLayout(1, L{c.extent}))"
        factor = self.of_scale("factor", self.factor)
        power_of_2 = f"s{c.name} + {base}[:, None]" if self.added else f"gl.fma(s{c.name}, {factor}, {base}[:, None])"
        do(f"e{c.name} = ex2({power_of_2})")
        if not self.p.ones:
            total = self._as_rows(f"gl.sum(e{c.name}, 1)", c)
            do(f"total = {total if i == 0 else f'total + {total}'}")

    def _multiply(self, i: int, c: Chunk) -> None:
        """Weights of a chunk meet their values."""
        do, rows, held = self.text.do, ROWS, chunks(self.h.keys)[i]
        if i == 0:
            do(f"acc = warpgroup_mma_init(gl.zeros([{rows}, {power(self.h.width)}], gl.float32, O))")
        do(f"w{c.name} = gl.convert_layout(e{c.name}.to(gl.{self.unit}), A)")
        do(f"acc = warpgroup_mma(w{c.name}, {self._part(f'vs{i}', c, held)}, acc, use_acc={i > 0}, is_async=True)")
        if self.p.ones:
            if i == 0:
                do(f"sums = warpgroup_mma_init(gl.zeros([{rows}, 8], gl.float32, O8))")
            ones = "ones" if c.extent == WIDEST else f"ones.slice(0, {c.extent}, dim=1)"
            do(f"u{c.name} = gl.convert_layout(e{c.name}.to(gl.{self.unit}), A8)")
            do(f"sums = warpgroup_mma(u{c.name}, {ones}.permute((1, 0)), sums, use_acc={i > 0}, is_async=True)")

    @staticmethod
    def _part(name: str, c: Chunk, held: Chunk) -> str:
        return name if c == held else f"{name}.slice(0, {c.extent})"

    def _as_rows(self, value: str, c: Chunk) -> str:
        return value if self._like_result(c) else f"gl.convert_layout({value}, R)"

    def _like_result(self, c: Chunk) -> bool:
        """A chunk's scores have the layout of the result, which must not be converted to itself."""
        return c.extent == power(self.h.width) and self.h.q.codes is None

    # -- what hides scores

    def _all_seen(self, tile: int, c: Chunk) -> bool:
        """Causality lets the first query of a tile see all keys of a chunk, so that those after it do."""
        shift = self.h.keys - self.h.queries if self.h.causal == "lower" else 0
        return tile * ROWS + shift >= c.start + c.extent - 1

    def _hide(self, i: int, c: Chunk, *, exact: bool) -> None:
        """Minus infinity where a query does not see a key, unless causality hides none of a chunk's."""
        h, do = self.h, self.text.do
        score = f"s{c.name}"
        if h.mask is not None and not self.hide_keys(i, c):
            self._hide_masked(i, c)
        if not exact:
            shift = h.keys - h.queries if h.causal == "lower" else 0
            row = f"tile * {ROWS} + gl.arange(0, {ROWS}, gl.SliceLayout(1, L{c.extent}))"
            column = f"gl.arange(0, {c.extent}, gl.SliceLayout(0, L{c.extent}))"
            do(f"seen{c.name} = ({row} + {shift - c.start})[:, None] >= {column}[None, :]")
            do(f"{score} = gl.where(seen{c.name}, {score}, {NONE})")
        if c.start + c.extent > h.keys:
            column = f"gl.arange(0, {c.extent}, gl.SliceLayout(0, L{c.extent}))"
            do(f"{score} = gl.where(({column} < {h.keys - c.start})[None, :], {score}, {NONE})")

    def hide_keys(self, i: int, c: Chunk) -> bool:
        """Applies a mask that is the same for all queries, if it is at hand; whether it was."""
        return False

    def _hide_masked(self, i: int, c: Chunk) -> None:
        h, do, score = self.h, self.text.do, f"s{c.name}"
        if self.added:
            mask = self._emitter(Tile("", "", 0)).convert(self._mask(i, c), cast("Access", h.mask).root.dtype, F32)
            do(f"{score} = gl.fma({score}, {self.of_scale('scale', h.scale * LOG2_E)}, {mask} * {LOG2_E!r})")
        elif self.by_keys:
            with self.text.block(f"if whole{i} == 0:"):
                do(f"{score} = gl.where({self._mask(i, c)}, {score}, {NONE})")
        else:
            do(f"{score} = gl.where({self._mask(i, c)}, {score}, {NONE})")

    def _mask(self, i: int, c: Chunk) -> str:
        """Of a chunk of keys; of one row where it is the same for all queries."""
        h, do, layout = self.h, self.text.do, f"L{c.extent}"
        assert h.mask is not None
        own = c.name
        do(f"t{own} = {c.start} + gl.arange(0, {c.extent}, gl.SliceLayout(0, {layout}))")
        ragged = c.start + c.extent > h.keys
        tile = Tile(f"of{own}", f"t{own}", h.keys, column_mask=self.text.v(f"t{own} < {h.keys}") if ragged else None)
        if self.by_keys:
            do(f"of{own} = head * {h.queries} + gl.arange(0, 1, gl.SliceLayout(1, {layout}))")
        else:
            do(f"at{own} = tile * {ROWS} + gl.arange(0, {ROWS}, gl.SliceLayout(1, {layout}))")
            do(f"of{own} = head * {h.queries} + at{own}")
            if h.queries % ROWS:
                tile = replace(tile, row_mask=self.text.v(f"at{own} < {h.queries}"))
        return self._emitter(tile).value(h.mask)

    # -- memory

    def _emitter(self, tile: Tile) -> _Values:
        return _Values(self.text, tile, pointer_of, NATIVE_FP8)

    def _copy_queries(self, tile: str) -> None:
        h, v = self.h, self.text.v
        at = v(f"({tile}) * {ROWS} + gl.arange(0, {ROWS}, gl.SliceLayout(1, Cq))")
        mask = v(f"{at} < {h.queries}") if h.queries % ROWS else None
        self._emitter(self._across("q", v(f"head * {h.queries} + {at}"), mask, h.depth)).copy(h.q.at, "qs")

    def _keys(self, c: Chunk, name: str, extent: int) -> _Values:
        """Reads a chunk's rows of keys or values."""
        own = self.text.v(f"{c.start} + gl.arange(0, {c.extent}, gl.SliceLayout(1, C{name}))")
        mask = self.text.v(f"{own} < {self.h.keys}") if c.start + c.extent > self.h.keys else None
        return self._emitter(self._across(name, self.text.v(f"key_head * {self.h.keys} + {own}"), mask, extent))

    @staticmethod
    def _across(name: str, rows: str, row_mask: str | None, extent: int) -> Tile:
        """Rows of an operand or of the result."""
        return Tile(rows, f"{name}_column", extent, row_mask, None if power(extent) == extent else f"{name}_mask")

    def _arrived(self) -> None:
        """What was copied has come, from all threads, and the matrix unit sees it."""
        self.text.do("async_copy.wait_group(0)")
        self.text.do("fence_async_shared()")
        self.text.do("gl.thread_barrier()")

    def copy_following(self, first: int, last: int) -> bool:
        """Asks for the block's next queries, now that these are multiplied; whether there may be any."""
        n = self.p.splits
        if first + n >= self.tiles:
            return False
        if last + n < self.tiles:
            self._copy_queries(f"tile + {n}")
        else:
            with self.text.block(f"if tile + {n} < {self.tiles}:"):
                self._copy_queries(f"tile + {n}")
        self.text.do("async_copy.commit_group()")
        return True

    def _store(self) -> None:
        """Worked out where the product left it, then moved to where rows are written in pieces of 16 bytes."""
        h, t = self.h, self.text
        emitters: list[_Values] = []
        for name, layout in (("x", "O"), ("o", "Co")):
            t.do(f"{name}_m = tile * {ROWS} + gl.arange(0, {ROWS}, gl.SliceLayout(1, {layout}))")
            t.do(f"{name}_rows = head * {h.queries} + {name}_m")
            mask = t.v(f"{name}_m < {h.queries}") if self.ragged else None
            emitters.append(self._emitter(replace(self._across(name, f"{name}_rows", mask, h.width), acc="result")))
        quick = [codes_at_once(store.root) for store in h.stores]
        if None in quick:
            t.do("result = x * inverse[:, None]")
            t.do(f"result = {self._emitter(Tile('', '', 0)).convert('result', F32, h.result)}")
        for i, (store, codes) in enumerate(zip(h.stores, quick, strict=True)):
            if codes is None:
                value = emitters[0].value(store)
            else:
                t.do(f"scaled = x * (inverse * {t.number(('codes', i), codes.factor)})[:, None]")
                value = codes.integers(t) or emitters[0].convert("scaled", F32, codes.dtype, saturate=True)
            emitters[1].store(store, f"o{i}", f"gl.convert_layout({value}, Co)")
