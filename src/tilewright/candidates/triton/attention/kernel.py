"""The constants of plain Triton attention, and the functions that are generated for it of a program: they load tiles of its
operands, make scores of what their product leaves, and round and store. The kernel itself is `_kernel.py`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from tilewright.candidates.triton.attention.heads import Heads, Operand, Rounded
from tilewright.candidates.triton.expressions.emit import Emitter, Tile
from tilewright.candidates.triton.expressions.printer import FP8, FP8_NAMES, NATIVE
from tilewright.candidates.triton.expressions.text import KernelSource, Text
from tilewright.candidates.triton.runtime.module import Function, instance
from tilewright.dtype import F16, F32, PRED
from tilewright.ir.extent import Extent, divides
from tilewright.ir.graph import toposort
from tilewright.ir.ops import Param
from tilewright.ir.ops.attention import DROWNED
from tilewright.lowering.access import Access
from tilewright.sizes import next_power_of_2

KERNEL = "tilewright.candidates.triton.attention._kernel.attention"
SPLIT_KERNEL = "tilewright.candidates.triton.attention._split_kv.split_attention"
OPEN = ("heads", "queries", "own_queries", "keys", "shift", "tiles", "chunks", "parts")  # what may be
WORKSPACE = ("parts", "counters")  # arguments of the second one
LOADED = 64  # sums of a thread that are on their way at a time
LOG2_E = 1.4426950408889634
LEAST = -(2.0**127)  # times LOG2_E, f32 has it
ROUND = 1.5 * 2.0**23  # added to an f32 below 2^22 it leaves the nearest integer, ties to even, in the low bits of the sum


@dataclass(frozen=True)
class TileConfig:
    """Sizes of a kernel.

    Attributes:
        tile_m: queries of a program.
        tile_n: keys of a tile.
        num_warps, num_stages: see docs/glossary.md.
        scores: "online", "held" or "twice": see `_kernel.py`.
        precision: of a product of f32: "ieee" or "tf32x3".
        split_kv: programs that share the keys of a tile of queries (`_split_kv.py`); None for `_kernel.py`.
        launch_early: programs wait for the kernel before this one themselves, and the next kernel's may start beside them.
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    scores: str
    precision: str
    split_kv: int | None = None
    launch_early: bool | None = None


@dataclass(frozen=True, kw_only=True)
class KernelConfig(TileConfig):
    """The constants of `_kernel.py` and `_split_kv.py`, and what follows from them."""

    heads: int  # over the whole batch
    queries: int  # of a head
    group: int  # heads of the graph that these are the queries of, one head's after the other's
    keys: int
    shared: int  # heads of queries that have the same keys and values
    width: int  # columns of the values, filled up to a power of two
    causal: bool  # a query sees no key more than `shift` after its own place
    shift: int
    exact: bool  # e^x is worked out as f32 has it, not as a power of two of the special function unit
    as_left: bool  # nothing but a scale is done to scores, which stay as the product left them
    masks_rows: bool  # a row may be fully masked, and gets zeros then if `zero_rows`
    zero_rows: bool
    equal_rows: bool  # its weights are equal then, over all keys
    kept_rows: int  # of a tile of queries that are worth keeping: it is filled up for the matrix unit
    short: bool  # some queries of the last tile, and keys, may not exist
    ragged: bool
    rounds_weights: bool  # an expression is applied to the weights
    copies_queries: bool  # they are multiplied as they lie in memory

    @property
    def hidden(self) -> float:
        """The number that stands for a hidden score."""
        return DROWNED if self.equal_rows else -math.inf

    @property
    def tiles(self) -> int:
        """Tiles of a head's queries."""
        return -(-self.queries // self.tile_m)

    @property
    def chunks(self) -> int:
        """Tiles of keys."""
        return -(-self.keys // self.tile_n)

    @property
    def parts(self) -> int:
        """Parts of all tiles of queries, one for each program, where keys are split."""
        return self.heads * self.tiles * (self.split_kv or 1)

    @property
    def own_queries(self) -> int:
        """Queries of each of the graph's heads."""
        return self.queries // self.group

    @property
    def at_once(self) -> int:
        """Parts that are added up at a time, a power of two: those that fit into registers."""
        most = LOADED * self.num_warps * 32 // (self.kept_rows * self.width)
        return min(1 << max(most.bit_length() - 1, 0), next_power_of_2(self.split_kv or 1))

    @property
    def workspace(self) -> tuple[int, int]:
        """Numbers of 32 bits in the workspace: sums, maxima and sums of weights of all parts; counters of parts done."""
        return self.parts * self.kept_rows * (self.width + 2), self.heads * self.tiles


def sources_of(heads: Heads) -> list[int]:
    """The problem's sources that the kernel reads."""
    inner = [a.root for a in (heads.on_scores, heads.on_weights, heads.mask) if isinstance(a, Access)]
    roots = [heads.q.at.root, heads.k.at.root, heads.v.at.root, *inner, *(s.root for s in heads.stores)]
    return sorted({n.op.index for n in toposort(roots) if isinstance(n.op, Param)})


def config_of(heads: Heads, point: TileConfig) -> KernelConfig:
    """The constants of a kernel."""
    return _Generated(heads, frozenset()).config(point)


def kernel_text(heads: Heads, point: TileConfig, fp8: frozenset[str]) -> KernelSource:
    """A module with the function `kernel` of a pointer for each source that is read, and for each result."""
    made = _Generated(heads, fp8)
    pointers = [f"p{i}" for i in sources_of(heads)] + [f"o{i}" for i in range(len(heads.stores))]
    functions = made.functions(point)
    factors = f"({', '.join(made.factors)})"
    kernel, workspace = (KERNEL, ()) if point.split_kv is None else (SPLIT_KERNEL, WORKSPACE)
    given = [*workspace, factors]
    config, numbers = made.config(point), made.numbers
    extents = numbers.extents(config, OPEN)
    return instance(kernel, config, given, pointers, functions, numbers.numbers, workspace, gluon=False, extents=extents)


def padded_extent(n: int) -> int:
    """The least power of two that is no smaller and fills a matrix instruction."""
    return max(16, next_power_of_2(n))


class _Operands(Emitter):
    """An emitter that makes operands ready for the matrix unit."""

    def ready(self, operand: Operand, mma_dtype: str) -> str:
        """A tile in the type that is multiplied, nothing but zeros beside its rows and columns."""
        t, codes, dtype = self.text, operand.codes, operand.dtype
        value = self.value(operand.at)
        if codes is None:
            value = self.cast(self.convert(value, dtype, F32) if mma_dtype == "float32" else value, mma_dtype)
        elif dtype in FP8:
            native = dtype.name in self.fp8
            value = (
                self.cast(self.cast(value, FP8_NAMES[dtype], bits=True), mma_dtype)
                if native
                else self.convert(value, dtype, F16)
            )
        else:
            value = self.cast(value, mma_dtype)
            if codes.zero:
                zero = t.number((operand.at.root, "zero"), float(codes.zero))
                value = t.v(f"{value} - {zero if mma_dtype == 'float32' else self.cast(zero, mma_dtype)}")
        mask = self._mask(operand.at, rows=True, columns=True)
        whole = all(self.varies(operand.at))
        if mask is not None and not (whole and operand.reads_nothing_as_zero):
            value = self.where(mask, value, t.call("cast", "0.0", f"tl.{mma_dtype}"))
        return value if whole else t.call("broadcast_to", value, "(rows.shape[0], columns.shape[0])")


class _Generated:
    """The generated functions of one attention; the numbers they are given are those of its kernel."""

    def __init__(self, heads: Heads, fp8: frozenset[str]) -> None:
        self.h, self.fp8, self.numbers = heads, fp8, Text()
        self.mma_dtype = NATIVE[heads.mma_dtype.name]
        # Scores stay as the product left them where nothing but a scale would be done to them.
        plain = heads.on_scores is None and heads.scale > 0 and heads.mma_dtype is not F32
        self.as_left = plain and (heads.mask is None or heads.mask.root.dtype is PRED)

    @property
    def factors(self) -> list[str]:
        """The factor that makes powers of two of scores, and its opposite."""
        if not self.as_left:
            return [repr(LOG2_E), repr(-LOG2_E)]
        factor = self.h.scale * LOG2_E
        return [self.numbers.number(key, x) for key, x in (("factor", factor), ("opposite of factor", -factor))]

    def config(self, point: TileConfig) -> KernelConfig:
        """The kernel's constants."""
        h = self.h
        exact, masks_rows = h.mma_dtype is F32, h.mask is not None or h.shift < 0
        return KernelConfig(
            **asdict(point),
            heads=h.batch * h.heads,
            queries=h.queries,
            group=h.group,
            keys=h.keys,
            shared=h.shared,
            width=padded_extent(h.width),
            causal=h.causal != "no",
            shift=h.shift,
            exact=exact,
            as_left=self.as_left,
            masks_rows=masks_rows or (point.split_kv or 1) > 1,  # a part of the keys may be hidden, or have none
            zero_rows=h.zero_masked_rows and masks_rows,
            equal_rows=h.equal_masked_rows,
            kept_rows=point.tile_m if isinstance(h.queries, Extent) else min(point.tile_m, next_power_of_2(h.queries)),
            short=not divides(point.tile_m, h.queries),
            ragged=not divides(point.tile_n, h.keys),
            rounds_weights=h.on_weights is not None,
            copies_queries=h.q.dtype is h.mma_dtype and h.q.reads_nothing_as_zero,
        )

    def functions(self, point: TileConfig) -> dict[str, Function]:
        """Generated functions by the kernel's names for them."""
        h = self.h
        rows, keys = not divides(point.tile_m, h.queries), not divides(point.tile_n, h.keys)
        self.rows = Tile("rows", "", 0, "row_mask" if rows else None)
        found = {
            "load_q": self._load(h.q, h.depth, ragged=rows),
            "load_k": self._load(h.k, h.depth, ragged=keys),
            "load_v": self._load(h.v, h.width, ragged=keys),
            "score": self._score(ragged=keys),
            "store": self._store(),
        }
        return found if h.on_weights is None else found | {"round_weights": self._round_weights(ragged=keys)}

    def _body(self) -> Text:
        return Text(beside=self.numbers)

    def _columns(self, t: Text, extent: int, tile: Tile) -> Tile:
        """A tile of all columns of an operand or of the result."""
        t.do(f"columns = tl.arange(0, {padded_extent(extent)})")
        mask = None if padded_extent(extent) == extent else t.v(f"columns < {extent}")
        return replace(tile, columns="columns", width=extent, column_mask=mask)

    def _load(self, operand: Operand, extent: int, *, ragged: bool) -> Function:
        """Read a tile's rows of an operand."""
        t = self._body()
        tile = self._columns(t, extent, Tile("rows", "", 0))
        for mask in t.masked_if_ragged("row_mask") if ragged else (None,):
            emitter = _Operands(t, replace(tile, row_mask=mask), fp8=self.fp8)
            t.do(f"return {emitter.ready(operand, self.mma_dtype)}")
        return ("rows", "row_mask", "ragged: tl.constexpr", "side"), t

    def _score(self, *, ragged: bool) -> Function:
        """Make scores of a product of queries and keys: scaled, as an expression of them, masked."""
        h, t = self.h, self._body()
        for column_mask in t.masked_if_ragged("key_mask") if ragged else (None,):
            tile, score = replace(self.rows, columns="keys", width=h.keys, column_mask=column_mask), "x"
            mask = None if h.mask is None else self._mask(t, tile, h.mask)
            hides = h.mask is not None and h.mask.root.dtype is PRED
            if isinstance(h.on_scores, Rounded):
                code = _rounded(t, score, t.number("score's code", h.scale / h.on_scores.divisor), h.on_scores)
                scale = t.number("score's scale", h.on_scores.codes.scale)
                score = t.v(f"{code} * {scale}") if hides or mask is None else t.call("fma", code, scale, mask)
            else:
                if not self.as_left:
                    score = t.v(f"{score} * {t.number('scale', h.scale)}")
                if h.on_scores is not None:
                    score = Emitter(t, replace(tile, acc=score), fp8=self.fp8).value(h.on_scores)
                if mask is not None and not hides:
                    score = t.v(f"{score} + {mask}")
            if mask is not None and hides:
                score = t.call("where", mask, score, "float('-inf')" if math.isinf(h.hidden) else repr(h.hidden))
            t.do(f"return {score}")
        return ("x", "head", "rows", "row_mask", "keys", "key_mask", "ragged: tl.constexpr", "side"), t

    def _mask(self, t: Text, tile: Tile, mask: Access) -> str:
        """The mask of a tile of keys: pred, or f32. One that is the same for all queries of a head is read once for them."""
        places = [mask.of_leaf(n) for n in mask.views if isinstance(n.op, Param)]
        if all(divides(self.h.queries, term.inner) for place in places for term in place.rows):
            tile = replace(tile, rows=t.v(f"head * {t.extent(self.h.queries)} + tl.arange(0, 1)"), row_mask=None)
        emitter = Emitter(t, tile, fp8=self.fp8)
        value = emitter.value(mask)
        if mask.root.dtype is PRED:
            return value
        value = emitter.convert(value, mask.root.dtype, F32)
        # As a power of two, the least number of f32 would be an infinity, and a row all of whose keys it hides no number.
        return t.call("where", f"({value} < {LEAST}) & ({value} > float('-inf'))", f"{LEAST}", value)

    def _round_weights(self, *, ragged: bool) -> Function:
        """Make weights as they enter the second product, of those with the largest of a row one."""
        h, t = self.h, self._body()
        for column_mask in t.masked_if_ragged("key_mask") if ragged else (None,):
            if isinstance(h.on_weights, Rounded):
                scaled = t.v(f"inverse * {t.number('code of a weight', 1 / h.on_weights.divisor)}")
                code = _rounded(t, "weights", f"{scaled}[:, None]", h.on_weights, least=0.0)
                scale = t.number("scale of weights", h.on_weights.codes.scale)
                t.do(f"return {code if h.v.codes is not None else t.v(f'{code} * {scale}')}")
            else:
                assert h.on_weights is not None
                tile = replace(self.rows, columns="keys", width=h.keys, column_mask=column_mask)
                tile = replace(tile, acc=t.v("weights * inverse[:, None]"))
                t.do(f"return {Emitter(t, tile, fp8=self.fp8).value(h.on_weights)}")
        return ("weights", "inverse", "rows", "row_mask", "keys", "key_mask", "ragged: tl.constexpr", "side"), t

    def _store(self) -> Function:
        """Compute and write a tile's results."""
        h, t = self.h, self._body()
        if h.v.codes is not None:
            of_weights = h.on_weights.codes.scale if isinstance(h.on_weights, Rounded) else 1.0
            t.do(f"acc = acc * {t.number('scale of the result', h.v.codes.scale * of_weights)}")
        tile = self._columns(t, h.width, self.rows)
        result = Emitter(t, tile, fp8=self.fp8).convert("acc", F32, h.result)
        for i, store in enumerate(h.stores):
            Emitter(t, replace(tile, acc=result), fp8=self.fp8).store(store, f"o{i}")
        return ("acc", "rows", "row_mask", "side"), t


def _rounded(t: Text, x: str, factor: str, to: Rounded, least: float = -math.inf) -> str:
    """x * factor as the nearest code, less the zero point. None of what is rounded lies below `least`; NaN, which only the sum
    of a row can bring, becomes that."""
    codes = to.codes
    if codes.dtype in FP8:
        code = t.v(f"({x} * {factor}).to(tl.{FP8_NAMES[codes.dtype]})")  # holds what is too large to the largest code
        return t.v(f"{code}.to(tl.float32)")
    low, high = max(float(codes.dtype.min) - codes.zero, least), float(codes.dtype.max) - codes.zero
    bounds = [repr(ROUND + low), repr(ROUND + high)]
    if codes.zero:
        bounds = [t.number((to, i), ROUND + bound) for i, bound in enumerate((low, high))]
    nearest = t.call("fma", x, factor, repr(ROUND))
    held = t.call("minimum", t.call("maximum", nearest, bounds[0]), bounds[1])
    return t.v(f"{held} - {ROUND!r}")
