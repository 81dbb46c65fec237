"""The constants of the kernels of attention on Hopper (`_whole_rows.py`, `_flash.py`), and the functions that are generated for
them from a program: where its operands lie, what its mask does, how its results leave.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Literal

import torch

from tilewright.candidates.triton.attention.heads import Heads, Operand, number
from tilewright.candidates.triton.attention.kernel import LOG2_E, padded_extent, sources_of
from tilewright.candidates.triton.expressions.emit import Emitter, Tile
from tilewright.candidates.triton.expressions.printer import FP8_NAMES, NATIVE, in_memory
from tilewright.candidates.triton.expressions.text import KernelSource, Text
from tilewright.candidates.triton.hopper.fast_math import MAGIC, NATIVE_FP8, twice
from tilewright.candidates.triton.hopper.gemm.tma import TmaView, tma_view
from tilewright.candidates.triton.runtime.module import Function, instance
from tilewright.dtype import F32, PRED, S8, U8, DType
from tilewright.ir.extent import Extent, divides
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import VIEWS, Acc, Param, Quantize
from tilewright.ir.ops.attention import DROWNED
from tilewright.lowering.access import Access, AccessMap
from tilewright.schedule.candidate import Unsupported
from tilewright.sizes import round_up

PACKAGE = "tilewright.candidates.triton.hopper.attention"
ROWS = 64  # queries of a warpgroup, a tile
CHUNK = 128  # keys of a product
GROUPS = 2  # warpgroups of a block of `persistent`
OPEN = ("heads", "queries", "keys", "shift", "chunks", "parts", "items", "whole_chunks", "keys_left")  # what may be, of `flash`
COUNTERS = ("taken",)  # arguments of a kernel whose blocks take items as they come to them: a number that is zero between calls
STAGES = 2  # heads whose keys and values it has in shared memory


@dataclass(frozen=True)
class TileConfig:
    """Sizes of a kernel; None is no knob of it.

    Attributes:
        kernel: "whole_rows", "persistent" (`_whole_rows.py`) or "flash" (`_flash.py`).
        splits: blocks of `whole_rows` that share a head's queries.
        ones: weights are added up by the matrix unit, as their product with ones: fewer instructions and registers.
        num_stages: chunks of `CHUNK` keys, and of their values, that `flash` has in shared memory.
        groups: warpgroups of `flash` that multiply, by 64 queries each.
        pingpong: one of them after the other is at its exponentials.
        overlapped: a product's wait is held back until the exponentials that it goes on beside are done; rows are gone
            through in four parts at once.
        on_demand: blocks of `flash` take parts of queries as they come to them, not in turns.
    """

    kernel: Literal["whole_rows", "persistent", "flash"]
    splits: int | None = None
    ones: bool | None = None
    num_stages: int | None = None
    groups: int | None = None
    pingpong: bool | None = None
    overlapped: bool | None = None
    on_demand: bool | None = None

    @property
    def by_tma(self) -> bool:
        """Tell whether TMA brings the operands."""
        return self.kernel != "whole_rows"


@dataclass(frozen=True, kw_only=True)
class KernelConfig(TileConfig):
    """The constants of a kernel, and what follows from them."""

    heads: int  # of queries, over the whole batch
    shared: int  # how many of them have the same keys and values
    queries: int  # of a head
    keys: int
    ragged: bool  # some of the last chunk of them may not exist
    depth: int  # columns of queries and keys, and of values, filled up to powers of two
    width: int
    causal: bool  # a query sees no key more than `shift` after its own place
    shift: int
    masked: bool  # a mask is read
    key_padding_mask: bool  # a row of it holds for all queries of a head
    additive_bias: bool  # it is numbers that are added to the scores, else truth values: which keys are seen
    zero_rows: bool  # a query that sees no key gets zeros, not NaN
    equal_rows: bool  # it gets equal weights for all keys
    stored: str  # what Triton calls the type of queries and keys in shared memory
    product: str  # and as the matrix unit takes them
    mma_dtype: str  # what it calls that of values and weights, as they are multiplied

    @property
    def hidden(self) -> float:
        """The number that stands for a hidden score."""
        return DROWNED if self.equal_rows else -math.inf

    @property
    def chunks(self) -> int:
        """Chunks of a head's keys, which are multiplied one after the other."""
        return -(-self.keys // CHUNK)

    @property
    def tiles(self) -> int:
        """Tiles of a head's queries."""
        return -(-self.queries // ROWS)

    @property
    def parts(self) -> int:
        """Parts of a head's queries, a tile for each warpgroup of `flash`."""
        return -(-self.queries // ((self.groups or 1) * ROWS))

    @property
    def items(self) -> int:
        """Such parts of all heads."""
        return self.heads * self.parts

    @property
    def whole_chunks(self) -> int:
        """Chunks all of whose keys exist."""
        return self.keys // CHUNK

    @property
    def keys_left(self) -> int:
        """Keys after those."""
        return self.keys % CHUNK

    @property
    def hides(self) -> bool:
        """Tell whether a mask hides keys from all queries alike: chunks after the last that it shows are left out."""
        return self.key_padding_mask and not self.additive_bias

    @property
    def announces(self) -> bool:
        """Tell whether the warp that loads tells the others which item comes next, and how many chunks of keys it has."""
        return self.hides or bool(self.on_demand)

    @property
    def seen(self) -> tuple[int, ...]:
        """The most keys that a query of each tile sees."""
        return tuple(min((t + 1) * ROWS + self.shift, self.keys) if self.causal else self.keys for t in range(self.tiles))

    @property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Tiles that see as many keys in whole tiles: the first, the last, the keys that the last one sees."""
        runs = [list(run) for _, run in groupby(range(self.tiles), lambda t: padded(self.seen[t]))]
        return tuple((run[0], run[-1], self.seen[run[-1]]) for run in runs)


def padded(keys: int) -> int:
    """The number of keys, rounded up to whole tiles."""
    return round_up(keys, ROWS)


class _Values(Emitter):
    """An emitter that has operands copied, and that divides what was summed up in f32 without a remainder's correction."""

    def corrected(self, near: str, x: str, divisor: str, inverse: str) -> str:
        return near

    def copy(self, at: Access, into: str) -> None:
        """Has a tile of an operand copied to shared memory, zeros where there is nothing."""
        found = source_of(at)
        assert found is not None
        where, mask = self._sum(*self._spread(at, found[1])), self._mask(at, rows=True, columns=True)
        self.text.do(f"async_load({into}, p{found[0]} + {where}{f', mask={mask}' if mask else ''})")


def arguments(heads: Heads, tile: TileConfig) -> list[str]:
    """Pointers that a kernel takes: to the sources that it reads itself, not through TMA, and to its results."""
    read = sources_of(heads)
    if tile.by_tma:
        roots = [*([heads.mask.root] if heads.mask else []), *(s.root for s in heads.stores)]
        read = sorted({n.op.index for n in toposort(roots) if isinstance(n.op, Param)})
    return [f"p{i}" for i in read] + [f"o{i}" for i in range(len(heads.stores))]


def config_of(heads: Heads, tile: TileConfig) -> KernelConfig:
    """The constants of an attention's kernel of these sizes."""
    h, mask = heads, heads.mask
    first = h.q.dtype if h.q.codes is not None else h.mma_dtype
    return KernelConfig(
        **asdict(tile),
        heads=h.batch * h.heads,
        shared=h.shared,
        queries=h.queries,
        keys=h.keys,
        ragged=not divides(CHUNK, h.keys),
        depth=padded_extent(h.depth),
        width=padded_extent(h.width),
        causal=h.causal != "no",
        shift=h.shift,
        masked=mask is not None,
        key_padding_mask=mask is not None and same_for_queries(h, mask),
        additive_bias=mask is not None and mask.root.dtype is not PRED,
        zero_rows=h.zero_masked_rows and mask is not None,
        equal_rows=h.equal_masked_rows,
        stored=in_memory(first),
        product=FP8_NAMES.get(first) or NATIVE[first.name],
        mma_dtype=NATIVE[h.mma_dtype.name],
    )


def kernel_text(heads: Heads, tile: TileConfig) -> KernelSource:
    """The module of a kernel: `kernel` of descriptors of queries, keys and values, if TMA brings them, and of `arguments`."""
    made = _Generated(heads, config_of(heads, tile))
    scales = made.scales  # first: numbers in another order than they are used in took ptxas' code 2 to 5 % longer
    given = [*(["q_desc", "k_desc", "v_desc"] if tile.by_tma else []), f"({', '.join(scales)},)"]
    counters = COUNTERS if tile.on_demand else ()
    if tile.kernel == "flash":
        given.insert(3, *(counters or ("0",)))
    kernel = f"{PACKAGE}.{'_flash' if tile.kernel == 'flash' else '_whole_rows'}.{tile.kernel}"
    functions, numbers = made.functions(), made.numbers
    extents = numbers.extents(made.config, OPEN) if tile.kernel == "flash" else {}
    pointers = arguments(heads, tile)
    return instance(kernel, made.config, given, pointers, functions, numbers.numbers, counters, extents=extents)


class _Generated:
    """The generated functions of one attention; the numbers they are given are those of its kernel."""

    def __init__(self, heads: Heads, config: KernelConfig) -> None:
        self.h, self.config, self.numbers = heads, config, Text("gl")
        self._ragged = not divides((config.groups or 1) * ROWS, heads.queries)

    def functions(self) -> dict[str, Function]:
        """Generated functions by the kernel's names for them."""
        made = self._by_tma() if self.config.by_tma else self._copies()
        made["epilogue"] = self._epilogue()
        return made if self.h.mask is None else made | {"mask": self._mask(self.h.mask)}

    def _by_tma(self) -> dict[str, Function]:
        """Functions of where boxes of each operand begin: a head's rows from one on."""
        operands = tma_operands(self.h)
        assert operands is not None
        made: dict[str, Function] = {}
        for name, (_, view) in zip("qkv", operands, strict=True):
            t = self._body()
            t.do(f"return {', '.join(view.coordinates('head', 'row', '0', t.extent))}")
            made[f"{name}_at"] = ("head", "row", "side"), t
        return made

    def _copies(self) -> dict[str, Function]:
        """Functions that copy each operand to shared memory; values that are codes are read, and made floats."""
        h = self.h
        made = {"load_q": self._rows_of(h.q, h.queries, h.depth), "load_k": self._rows_of(h.k, h.keys, h.depth)}
        if h.v.codes is None:
            return made | {"load_v": self._rows_of(h.v, h.keys, h.width)}
        t = self._body()
        t.do(f"return {self._emitter(t, Tile('', '', 0)).convert('codes', h.v.dtype, h.mma_dtype)}")
        return made | {"read_v": self._rows_of(h.v, h.keys, h.width, read=True), "as_floats": (("codes",), t)}

    @property
    def scales(self) -> list[str]:
        """Factors that make powers of two of scores, of the largest of a row and of scores beside a mask that is added; and
        that of the result. They are data where scales of codes are in them."""
        h = self.h
        factor = 1.0 if self.config.additive_bias else h.scale * LOG2_E
        found = {"opposite": -factor, "factor": factor, "scale": h.scale * LOG2_E if self.config.additive_bias else 1.0}
        if h.q.codes is None:
            opposite, factor, scale = map(repr, found.values())
        else:
            opposite, factor, scale = (self.numbers.number(key, value) for key, value in found.items())
        values = "1.0" if h.v.codes is None else self.numbers.number("scale of values", h.v.codes.scale)
        return [factor, opposite, scale, values]

    def _body(self) -> Text:
        return Text("gl", beside=self.numbers)

    def _emitter(self, t: Text, tile: Tile) -> _Values:
        return _Values(t, tile, fp8=NATIVE_FP8)

    def _rows_of(self, operand: Operand, rows: int, columns: int, *, read: bool = False) -> Function:
        """Has tile or chunk i of an operand's `rows` of a head copied to shared memory, or reads it, by pieces of 16 bytes;
        `ragged`: some of its rows do not exist."""
        t = self._body()
        each = 128 // max(operand.dtype.bits, 8)
        lanes = min(max(padded_extent(columns) // each, 1), 32)
        t.do(f"C: gl.constexpr = gl.BlockedLayout([1, {each}], [{32 // lanes}, {lanes}], [4, 1], [1, 0])")
        t.do(f"columns = gl.arange(0, {padded_extent(columns)}, gl.SliceLayout(0, C))")
        column_mask = t.v(f"columns < {columns}") if padded_extent(columns) != columns else None
        at, queries = f"head * {rows} + own", operand is self.h.q
        t.do(f"own = i * {ROWS if queries else CHUNK} + gl.arange(0, count, gl.SliceLayout(1, C))")
        if not queries:  # whose mask comes first: ptxas' code depends on the order, and this one was measured
            t.v(at)
        for mask in t.masked_if_ragged(f"own < {rows}"):
            row_mask = mask and t.v(mask)
            emitter = self._emitter(t, Tile(t.v(at), "columns", columns, row_mask, column_mask))
            if read:
                t.do(f"return {emitter.value(operand.at)}")
            else:
                emitter.copy(operand.at, "into")
        own = ["head", "i", "count: gl.constexpr", "ragged: gl.constexpr", "side"]
        return own if read else ["into", *own], t

    def _mask(self, mask: Access) -> Function:
        """A mask of a head: f32 that is added, or what is seen; of one row of it where it is the same for all queries.
        `ragged`: some of these keys do not exist."""
        h, t = self.h, self._body()
        t.do(f"rows = head * {t.extent(h.queries)} + queries")
        for inside in t.masked_if_ragged(f"keys < {t.extent(h.keys)}"):
            by_query = not self.config.key_padding_mask and self._ragged
            row_mask = t.v(f"queries < {t.extent(h.queries)}") if by_query else None
            emitter = self._emitter(t, Tile("rows", "keys", h.keys, row_mask, inside and t.v(inside)))
            value = emitter.value(mask)
            t.do(f"return {emitter.convert(value, mask.root.dtype, F32) if self.config.additive_bias else value}")
        return ("head", "queries", "keys", "ragged: gl.constexpr", "side"), t

    def _epilogue(self) -> Function:
        """Results of a tile of queries, worked out where the product left them, then moved to where rows are written in pieces
        of 16 bytes."""
        h, t = self.h, self._body()
        t.do("O: gl.constexpr = acc.type.layout")
        t.do(f"C: gl.constexpr = {self._store_layout()}")
        emitters: list[_Values] = []
        for name, layout in (("x", "O"), ("o", "C")):
            t.do(f"{name}_column = gl.arange(0, {padded_extent(h.width)}, gl.SliceLayout(0, {layout}))")
            t.do(f"{name}_m = tile * {ROWS} + gl.arange(0, {ROWS}, gl.SliceLayout(1, {layout}))")
            t.do(f"{name}_rows = head * {t.extent(h.queries)} + {name}_m")
            row_mask = t.v(f"{name}_m < {t.extent(h.queries)}") if self._ragged else None
            column_mask = t.v(f"{name}_column < {h.width}") if padded_extent(h.width) != h.width else None
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
                dtype, scale = codes
                half = float(torch.tensor(1 / scale, dtype=torch.float16).item())
                factor = 1 / scale if dtype.is_float else 1 / (scale * half)
                t.do(f"scaled = acc * (inverse * {t.number(('codes', i), factor)})[:, None]")
                if dtype.is_float:
                    value = emitters[0].convert("scaled", F32, dtype, saturate=True)
                else:
                    value = _integer_codes(t, dtype, half)
            emitters[1].store(store, f"o{i}", f"gl.convert_layout({value}, C)")
        return ("acc", "inverse", "head", "tile", "side"), t

    def _store_layout(self) -> str:
        """The layout in which rows are written: each thread has a piece, of those that it and the three beside it have after
        the product (PTX ISA 9.0, 9.7.15.5.1), so that pieces are exchanged among four threads."""
        width = padded_extent(self.h.width)
        each = min(128 // max(self.h.stores[0].root.dtype.bits, 8), width // 4)
        powers = [1 << b for b in range(width.bit_length() - 1)]
        registers = [[0, n] for n in powers if n < each] + [[8, 0]] + [[0, n] for n in powers if n >= 4 * each]
        lanes, warps = [[0, each], [0, 2 * each], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
        return f"gl.DistributedLinearLayout({registers}, {lanes}, {warps}, [], [{ROWS}, {width}])"


def _integer_codes(t: Text, dtype: DType, half: float) -> str:
    """8-bit codes of `scaled` times `half`, a scale's inverse as f16 has it: rounded to f16, as an f16 result would be before,
    and to whole numbers by an addition. NaN gives 0, which both a maximum and a minimum with 0 give."""
    words = {"zero": 0.0, "magic": MAGIC, "least": MAGIC + dtype.min, "most": MAGIC + dtype.max}
    lines = [f".reg .b32 {', '.join(words)}, a, b, q0, q1;"]
    lines += [f"mov.b32 {name}, {twice(value):#010x};" for name, value in words.items()]
    for q, low, high in (("q0", "$1", "$2"), ("q1", "$3", "$4")):
        lines += [f"cvt.rn.f16x2.f32 a, {high}, {low};", "max.f16x2 b, a, zero;", "min.f16x2 a, a, zero;"]
        lines += [f"fma.rn.f16x2 {q}, b, $5, magic;", f"fma.rn.f16x2 {q}, a, $5, {q};"]
        lines += [f"max.f16x2 {q}, {q}, least;", f"min.f16x2 {q}, {q}, most;"]
    lines.append("prmt.b32 $0, q0, q1, 0x6420;")
    kind = "int8" if dtype is S8 else "uint8"
    # The pair of inverses is a word, one of the four that stand beside four values.
    text, inverse = f'"{{ {" ".join(lines)} }}", "=r,f,f,f,f,r,r,r,r"', t.number("halves", twice(half))
    return f"gl.inline_asm_elementwise({text}, [scaled, {inverse}], dtype=gl.{kind}, is_pure=True, pack=4)"


def quantised_result(root: Node) -> tuple[DType, float] | None:
    """The type and the scale of the 8-bit codes that a store's expression is, if it is nothing but a quantisation by one
    number: the result is divided in f32 together with its sum of weights."""
    while isinstance(root.op, VIEWS):
        root = root.src[0]
    if not isinstance(root.op, Quantize) or root.op.block is not None:
        return None
    if len(root.src) != 2 or not isinstance(root.src[0].op, Acc):
        return None
    scale = number(root.src[1])
    if scale is None or not 2.0**-14 <= scale <= 2.0**13:  # its inverse is a normal f16, which what is rounded times it fits
        return None
    saturates = root.dtype in (S8, U8) or (root.dtype.name in NATIVE_FP8 and root.op.overflow == "saturate")
    return (root.dtype, scale) if saturates else None


# -- where operands lie


def check_alignment(heads: Heads) -> None:
    """Check that all rows of the operands lie in memory as copies of 16 bytes take them.

    Raises:
        Unsupported: a sentence.
    """
    for name, operand in (("queries", heads.q), ("keys", heads.k), ("values", heads.v)):
        each = 128 // operand.dtype.bits
        found = source_of(operand.at) if operand.reads_nothing_as_zero else None
        if found is None:
            raise Unsupported(f"its {name} are worked out from other values")
        _, place = found
        along = [t for t in place.columns if t.inner == 1]
        steady = len(place.columns) == len(along) == 1 and along[0].stride == 1 and along[0].extent >= operand.at.columns_extent
        if not steady or any(n % each for n in (place.offset, *(t.stride for t in place.rows))):
            raise Unsupported(f"rows of its {name} do not lie in pieces of 16 bytes")


def tma_operands(heads: Heads) -> list[tuple[int, TmaView]] | None:
    """Queries, keys and values as TMA brings them: the source, and the array whose boxes are tiles of queries or chunks of
    keys. None where it cannot bring one."""
    found: list[tuple[int, TmaView]] = []
    all_heads = heads.batch * heads.heads
    keys = CHUNK if isinstance(heads.keys, Extent) else min(CHUNK, padded(heads.keys))  # open ones pass through `flash`
    for operand, extent, rows, batch, width in (
        (heads.q, heads.queries, ROWS, all_heads, heads.depth),
        (heads.k, heads.keys, keys, all_heads // heads.shared, heads.depth),
        (heads.v, heads.keys, keys, all_heads // heads.shared, heads.width),
    ):
        source = source_of(operand.at)
        assert source is not None
        view = tma_view(source[1], batch, extent, width, rows, padded_extent(width), operand.dtype.bits // 8)
        if view is None or view.m_major:
            return None
        found.append((source[0], view))
    return found


def source_of(at: Access) -> tuple[int, AccessMap] | None:
    """The one source that an operand is views of, and where its elements lie there; None where it is made of several."""
    found = [(n.op.index, at.of_leaf(n)) for n in at.views if isinstance(n.op, Param)]
    return found[0] if len(found) == 1 else None


def same_for_queries(heads: Heads, mask: Access) -> bool:
    """Tell whether a mask hides the same keys from all queries of a head."""
    places = [mask.of_leaf(n) for n in toposort((mask.root,)) if isinstance(n.op, Param)]
    return all(divides(heads.queries, term.inner) for place in places for term in place.rows)
