"""What a program adds to the kernels of attention on Hopper, whose sources are `_flash.py` and its siblings: the constants of a
configuration, and small generated functions (where its operands lie, what its mask does, how its results leave).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch

from tilewright.candidates.triton.attention.heads import Heads, Operand, number
from tilewright.candidates.triton.attention.kernel import LOG2_E, power, sources_of
from tilewright.candidates.triton.expressions.emit import Emitter, Tile, pointer_of
from tilewright.candidates.triton.expressions.printer import FP8_NAMES, NATIVE, in_memory
from tilewright.candidates.triton.expressions.text import Text, Written
from tilewright.candidates.triton.hopper.attention.sizes import (
    ROWS,
    Point,
    brought,
    chunks,
    last_seen,
    leaf_of,
    same_for_queries,
)
from tilewright.candidates.triton.hopper.fast_math import MAGIC, NATIVE_FP8, twice
from tilewright.candidates.triton.runtime.module import Function, instance
from tilewright.dtype import F32, PRED, S8, U8, DType
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import VIEWS, Acc, Param, Quantize
from tilewright.lowering.access import Access

PACKAGE = "tilewright.candidates.triton.hopper.attention"


@dataclass(frozen=True)
class Config:
    """What every kernel is compiled for; extents are constants of it."""

    heads: int  # of queries, over the whole batch
    shared: int  # how many of them have the same keys and values
    queries: int  # of a head
    keys: int
    chunks: int  # of keys, that are multiplied one after the other
    depth: int  # columns of queries and keys, and of values, filled up to powers of two
    width: int
    causal: bool  # a query sees no key more than `shift` after its own place
    shift: int
    masked: bool  # a mask is read
    by_keys: bool  # it is the same for all queries of a head
    added: bool  # it is added to the scores (a number), else it hides some (a truth value)
    zero_rows: bool  # a query that sees no key gets zeros, not NaN


@dataclass(frozen=True)
class FlashConfig(Config):
    """What `_flash.py` is compiled for beside that; see `sizes.Ring`."""

    parts: int  # of a head's queries, a tile for each warpgroup
    items: int  # such parts of all heads
    stages: int
    groups: int
    turns: bool
    overlapped: bool
    hides: bool  # chunks after the last key that a mask shows are left out


@dataclass(frozen=True)
class RowsConfig(Config):
    """What `_rows.py` is compiled for beside that; see `sizes.Point`."""

    splits: int
    ones: bool
    tiles: int  # of a head's queries
    runs: tuple[tuple[int, int, int], ...]  # tiles that see as many chunks of keys: first, last, keys that one sees
    stored: str  # what Triton calls queries and keys in shared memory
    product: str  # and as the matrix unit takes them
    unit: str  # what it calls values and weights


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
        self.text.do(f"async_load({into}, {pointer_of(leaf)} + {where}{more})")


def arguments(heads: Heads, point: Point) -> list[str]:
    """Pointers that a point's kernel takes: to the sources that it reads itself, not through TMA, and to its results."""
    read = sources_of(heads)
    if point.by_tma:
        roots = [*([heads.mask.root] if heads.mask else []), *(s.root for s in heads.stores)]
        read = sorted({n.op.index for n in toposort(roots) if isinstance(n.op, Param)})
    return [f"p{i}" for i in read] + [f"o{i}" for i in range(len(heads.stores))]


def kernel_text(heads: Heads, point: Point) -> Written:
    """The module of a point's kernel: `kernel` of descriptors of queries, keys and values, if TMA brings them, and of
    `arguments`."""
    made = _Generated(heads, point)
    if point.ring:
        parts = -(-heads.queries // (point.ring.groups * ROWS))
        items, hides = heads.batch * heads.heads * parts, made.by_keys and not made.added
        config = FlashConfig(**made.config, **asdict(point.ring), parts=parts, items=items, hides=hides)
        return made.module("_flash.flash", config)
    return made.module("_rows.stream" if point.streamed else "_rows.attend", made.rows)


class _Generated:
    """The generated functions of one attention; the numbers they are given are those of its kernel.

    Args:
        heads: the attention.
        point: its kernel's sizes.
    """

    def __init__(self, heads: Heads, point: Point) -> None:
        self.h, self._point, self._numbers = heads, point, Text("gl")
        self._ragged = heads.queries % (point.ring.groups * ROWS if point.ring else ROWS) != 0
        mask = heads.mask
        self.added = mask is not None and mask.root.dtype is not PRED
        self.by_keys = mask is not None and same_for_queries(heads, mask)

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of any `Config`."""
        h = self.h
        return {
            "heads": h.batch * h.heads,
            "shared": h.shared,
            "queries": h.queries,
            "keys": h.keys,
            "chunks": len(chunks(h.keys)),
            "depth": power(h.depth),
            "width": power(h.width),
            "causal": h.causal != "no",
            "shift": h.keys - h.queries if h.causal == "lower" else 0,
            "masked": h.mask is not None,
            "by_keys": self.by_keys,
            "added": self.added,
            "zero_rows": h.zero_masked_rows and h.mask is not None,
        }

    @property
    def rows(self) -> RowsConfig:
        """The configuration of `_rows.py`."""
        h, point = self.h, self._point
        first = h.q.dtype if h.q.codes is not None else h.unit
        product = FP8_NAMES.get(first) or NATIVE[first.name]
        seen = [last_seen(h, t) for t in range(-(-h.queries // ROWS))]
        runs = [list(run) for _, run in groupby(range(len(seen)), lambda t: chunks(seen[t]))]
        return RowsConfig(
            **self.config,
            splits=point.splits,
            ones=point.ones,
            tiles=len(seen),
            runs=tuple((run[0], run[-1], seen[run[-1]]) for run in runs),
            stored=in_memory(first),
            product=product,
            unit=NATIVE[h.unit.name],
        )

    def module(self, kernel: str, config: Config) -> Written:
        """The module of a kernel ("file.function"), which takes descriptors, if TMA brings operands, `scales`, and what is
        made here."""
        scales = self._scales  # first: numbers in another order than they are used in took ptxas' code 2 to 5 % longer
        functions: dict[str, Function] = self._by_tma() if self._point.by_tma else self._copies()
        functions["epilogue"] = self._epilogue()
        if self.h.mask is not None:
            functions["mask"] = self._mask()
        given = [*(["q_desc", "k_desc", "v_desc"] if self._point.by_tma else []), f"({', '.join(scales)},)"]
        pointers = arguments(self.h, self._point)
        return instance(f"{PACKAGE}.{kernel}", config, given, pointers, functions, self._numbers.numbers)

    def _by_tma(self) -> dict[str, Function]:
        """Where boxes of each operand begin: a head's rows from one on."""
        views = brought(self.h)
        assert views is not None
        made: dict[str, Function] = {}
        for name, view in zip("qkv", views, strict=True):
            t = self._body()
            t.do(f"return {', '.join(view.array.coordinates('head', 'row', '0'))}")
            made[f"{name}_at"] = ("head", "row"), t
        return made

    def _copies(self) -> dict[str, Function]:
        """What copies each operand to shared memory; values that are codes are read, and made floats."""
        h = self.h
        made = {"load_q": self._queries(), "load_k": self._keys(h.k, h.depth)}
        if h.v.codes is None:
            return made | {"load_v": self._keys(h.v, h.width)}
        t = self._body()
        t.do(f"return {self._emitter(t, Tile('', '', 0)).convert('codes', h.v.dtype, h.unit)}")
        return made | {"read_v": self._keys(h.v, h.width, read=True), "as_floats": (("codes",), t)}

    @property
    def _scales(self) -> list[str]:
        """What scores, the largest of a row and scores beside a mask that is added are multiplied by, to be powers of two; and
        the result. They are data where scales of codes are in them."""
        h = self.h
        factor = 1.0 if self.added else h.scale * LOG2_E
        found = {"opposite": -factor, "factor": factor, "scale": h.scale * LOG2_E if self.added else 1.0}
        if h.q.codes is None:
            opposite, factor, scale = map(repr, found.values())
        else:
            opposite, factor, scale = (self._numbers.number(key, value) for key, value in found.items())
        values = "1.0" if h.v.codes is None else self._numbers.number("scale of values", h.v.codes.scale)
        return [factor, opposite, scale, values]

    def _body(self) -> Text:
        return Text("gl", beside=self._numbers)

    def _emitter(self, t: Text, tile: Tile) -> _Values:
        return _Values(t, tile, fp8=NATIVE_FP8)

    def _queries(self) -> Function:
        """Has a tile of queries copied to shared memory."""
        h, t = self.h, self._body()
        columns = self._pieces(t, h.q.dtype, h.depth)
        t.do(f"queries = tile * {ROWS} + gl.arange(0, {ROWS}, gl.SliceLayout(1, C))")
        mask = t.v(f"queries < {h.queries}") if self._ragged else None
        tile = replace(columns, rows=t.v(f"head * {h.queries} + queries"), row_mask=mask)
        self._emitter(t, tile).copy(h.q.at, "into")
        return ("into", "head", "tile", "side"), t

    def _keys(self, operand: Operand, extent: int, *, read: bool = False) -> Function:
        """Has a chunk's rows of keys or values copied to shared memory, or reads them; `ragged`: some do not exist."""
        h, t = self.h, self._body()
        columns = self._pieces(t, operand.dtype, extent)
        t.do("keys = first + gl.arange(0, count, gl.SliceLayout(1, C))")
        rows = t.v(f"key_head * {h.keys} + keys")
        for header, inside in (("if ragged:", f"keys < {h.keys}"), ("else:", None)):
            with t.block(header):
                emitter = self._emitter(t, replace(columns, rows=rows, row_mask=None if inside is None else t.v(inside)))
                if read:
                    t.do(f"return {emitter.value(operand.at)}")
                else:
                    emitter.copy(operand.at, "into")
        own = ["key_head", "first: gl.constexpr", "count: gl.constexpr", "ragged: gl.constexpr", "side"]
        return own if read else ["into", *own], t

    def _pieces(self, t: Text, dtype: DType, extent: int) -> Tile:
        """Columns of an operand as a warpgroup moves them in pieces of 16 bytes."""
        each = 128 // max(dtype.bits, 8)
        along = min(max(power(extent) // each, 1), 32)
        t.do(f"C: gl.constexpr = gl.BlockedLayout([1, {each}], [{32 // along}, {along}], [4, 1], [1, 0])")
        t.do(f"columns = gl.arange(0, {power(extent)}, gl.SliceLayout(0, C))")
        return Tile("", "columns", extent, None, t.v(f"columns < {extent}") if power(extent) != extent else None)

    def _mask(self) -> Function:
        """A mask of a head: f32 that is added, or what is seen; of one row of it where it is the same for all queries.
        `ragged`: some of these keys do not exist."""
        h, t = self.h, self._body()
        assert h.mask is not None
        t.do(f"rows = head * {h.queries} + queries")
        few = f"queries < {h.queries}" if not self.by_keys and self._ragged else None
        for header, inside in (("if ragged:", f"keys < {h.keys}"), ("else:", None)):
            with t.block(header):
                row_mask, column_mask = (None if m is None else t.v(m) for m in (few, inside))
                emitter = self._emitter(t, Tile("rows", "keys", h.keys, row_mask, column_mask))
                value = emitter.value(h.mask)
                t.do(f"return {emitter.convert(value, h.mask.root.dtype, F32) if self.added else value}")
        return ("head", "queries", "keys", "ragged: gl.constexpr", "side"), t

    def _epilogue(self) -> Function:
        """Results of a tile of queries, worked out where the product left them, then moved to where rows are written in pieces
        of 16 bytes."""
        h, t = self.h, self._body()
        t.do("O: gl.constexpr = acc.type.layout")
        t.do(f"C: gl.constexpr = {self._leaving()}")
        emitters: list[_Values] = []
        for name, layout in (("x", "O"), ("o", "C")):
            t.do(f"{name}_column = gl.arange(0, {power(h.width)}, gl.SliceLayout(0, {layout}))")
            t.do(f"{name}_m = tile * {ROWS} + gl.arange(0, {ROWS}, gl.SliceLayout(1, {layout}))")
            t.do(f"{name}_rows = head * {h.queries} + {name}_m")
            row_mask = t.v(f"{name}_m < {h.queries}") if self._ragged else None
            column_mask = t.v(f"{name}_column < {h.width}") if power(h.width) != h.width else None
            tile = Tile(f"{name}_rows", f"{name}_column", h.width, row_mask, column_mask)
            emitters.append(self._emitter(t, replace(tile, acc="result")))
        quick = [quantised_result(store.root) for store in h.stores]
        if None in quick:
            t.do("result = acc * inverse[:, None]")
            t.do(f"result = {emitters[0].convert('result', F32, h.result)}")
        for i, (store, codes) in enumerate(zip(h.stores, quick, strict=True)):
            if codes is None:
                value = emitters[0].value(store)
            else:
                t.do(f"scaled = acc * (inverse * {t.number(('codes', i), codes.factor)})[:, None]")
                value = codes.integers(t) or emitters[0].convert("scaled", F32, codes.dtype, saturate=True)
            emitters[1].store(store, f"o{i}", f"gl.convert_layout({value}, C)")
        return ("acc", "inverse", "head", "tile", "side"), t

    def _leaving(self) -> str:
        """Rows as they are written: each thread has a piece, of those that it and the three beside it have after the product
        (PTX ISA 9.0, 9.7.15.5.1), so that pieces are exchanged among four threads."""
        width = power(self.h.width)
        each = min(128 // max(self.h.stores[0].root.dtype.bits, 8), width // 4)
        powers = [1 << b for b in range(width.bit_length() - 1)]
        registers = [[0, n] for n in powers if n < each] + [[8, 0]] + [[0, n] for n in powers if n >= 4 * each]
        lanes, warps = [[0, each], [0, 2 * each], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
        return f"gl.DistributedLinearLayout({registers}, {lanes}, {warps}, [], [{ROWS}, {width}])"


@dataclass(frozen=True)
class QuantisedResult:
    """A result that leaves as 8-bit codes of one scale: it is divided in f32 together with its sum of weights. For integers it
    is rounded to f16 then, as an f16 result would be before, and to whole numbers by an addition."""

    dtype: DType
    scale: float

    @property
    def factor(self) -> float:
        """What a float result is multiplied by; an integer's has the rest of its scale in `integers`."""
        return 1 / self.scale if self.dtype.is_float else 1 / (self.scale * self._half)

    @property
    def _half(self) -> float:
        """The inverse of the scale as f16 has it."""
        return float(torch.tensor(1 / self.scale, dtype=torch.float16).item())

    def integers(self, t: Text) -> str | None:
        """Codes of `scaled`, if they are integers; NaN gives 0, which both a maximum and a minimum with 0 give."""
        if self.dtype.is_float:
            return None
        words = {
            "zero": 0.0,
            "magic": MAGIC,
            "least": MAGIC + self.dtype.min,
            "most": MAGIC + self.dtype.max,
        }
        lines = [f".reg .b32 {', '.join(words)}, a, b, q0, q1;"]
        lines += [f"mov.b32 {name}, {twice(value):#010x};" for name, value in words.items()]
        for q, low, high in (("q0", "$1", "$2"), ("q1", "$3", "$4")):
            lines += [f"cvt.rn.f16x2.f32 a, {high}, {low};", "max.f16x2 b, a, zero;", "min.f16x2 a, a, zero;"]
            lines += [f"fma.rn.f16x2 {q}, b, $5, magic;", f"fma.rn.f16x2 {q}, a, $5, {q};"]
            lines += [f"max.f16x2 {q}, {q}, least;", f"min.f16x2 {q}, {q}, most;"]
        lines.append("prmt.b32 $0, q0, q1, 0x6420;")
        kind = "int8" if self.dtype is S8 else "uint8"
        # The pair of inverses is a word, one of the four that stand beside four values.
        text, inverse = f'"{{ {" ".join(lines)} }}", "=r,f,f,f,f,r,r,r,r"', t.number("halves", twice(self._half))
        return f"gl.inline_asm_elementwise({text}, [scaled, {inverse}], dtype=gl.{kind}, is_pure=True, pack=4)"


def quantised_result(root: Node) -> QuantisedResult | None:
    """The codes that a store's expression is, if it is nothing but a quantisation by one number."""
    while isinstance(root.op, VIEWS):
        root = root.src[0]
    if (
        not isinstance(root.op, Quantize)
        or len(root.src) != 2
        or not isinstance(root.src[0].op, Acc)
        or root.op.block is not None
    ):
        return None
    scale = number(root.src[1])
    if scale is None or not 2.0**-14 <= scale <= 2.0**13:  # its inverse is a normal f16, which what is rounded times it fits
        return None
    saturates = root.dtype in (S8, U8) or (root.dtype.name in NATIVE_FP8 and root.op.overflow == "saturate")
    return QuantisedResult(root.dtype, scale) if saturates else None
