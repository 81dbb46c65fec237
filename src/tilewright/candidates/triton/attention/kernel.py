"""Attention as the text of a Triton kernel: a tile of one head's queries a program, the scores never leave the registers.

Keys and values come by tiles. Without a rounding of its weights the softmax is carried along (Milakov and Gimelshein 2018,
arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135). Weights that are rounded must be known first: either all scores of a row
are held, or they are computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from tilewright.candidates.triton.attention.heads import Heads, Operand, Rounded
from tilewright.candidates.triton.expressions.emit import Emitter, Tile
from tilewright.candidates.triton.expressions.printer import FP8, FP8_NAMES, NATIVE
from tilewright.candidates.triton.expressions.text import Text, Written
from tilewright.candidates.triton.runtime.module import IMPORTS
from tilewright.dtype import F16, F32, PRED
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param
from tilewright.lowering.access import Access

LOG2_E = 1.4426950408889634
ROUND = 1.5 * 2.0**23  # added to an f32 below 2^22 it leaves the nearest integer, ties to even, in the low bits of the sum
LOWEST = "float('-inf')"


@dataclass(frozen=True)
class Point:
    """Sizes of a kernel.

    Attributes:
        tile_m: queries of a program.
        tile_n: keys of a tile.
        precision: of a product of f32: "ieee" or "tf32x3".
        scores: "online", "held" or "twice": see the module.
    """

    tile_m: int
    tile_n: int
    precision: str
    scores: Literal["online", "held", "twice"]


def sources_of(heads: Heads) -> list[int]:
    """The problem's sources that the kernel reads."""
    inner = [a.root for a in (heads.on_scores, heads.on_weights, heads.mask) if isinstance(a, Access)]
    roots = [heads.q.at.root, heads.k.at.root, heads.v.at.root, *inner, *(s.root for s in heads.stores)]
    return sorted({n.op.index for n in toposort(roots) if isinstance(n.op, Param)})


def kernel_text(heads: Heads, point: Point, fp8: frozenset[str]) -> Written:
    """A module with the function `kernel` of a pointer for each source that is read, and for each result."""
    body = _Writer(heads, point, fp8).body()
    arguments = [f"p{i}" for i in sources_of(heads)] + [f"o{i}" for i in range(len(heads.stores))]
    header = ", ".join([*arguments, *body.numbers])
    return Written(f"{IMPORTS}\n\n@triton.jit\ndef kernel({header}):\n{body}\n", body.numbers)


def _pointer(leaf: Node) -> str:
    assert isinstance(leaf.op, Param)
    return f"p{leaf.op.index}"


def power(n: int) -> int:
    """The least power of two that is no smaller, and fills a matrix instruction."""
    return max(16, 1 << max(n - 1, 0).bit_length())


class _Operands(Emitter):
    """An emitter that makes operands ready for the matrix unit."""

    def ready(self, operand: Operand, unit: str, shape: tuple[int, int]) -> str:
        """A tile of `shape` in the unit's type, nothing but zeros beside its rows and columns."""
        t, codes, dtype = self.text, operand.codes, operand.dtype
        value = self.value(operand.at)
        if codes is None:
            value = self.cast(self.convert(value, dtype, F32) if unit == "float32" else value, unit)
        elif dtype in FP8:
            native = dtype.name in self.fp8
            value = (
                self.cast(self.cast(value, FP8_NAMES[dtype], bits=True), unit) if native else self.convert(value, dtype, F16)
            )
        else:
            value = self.cast(value, unit)
            if codes.zero:
                zero = t.number((operand.at.root, "zero"), float(codes.zero))
                value = t.v(f"{value} - {zero if unit == 'float32' else self.cast(zero, unit)}")
        mask = self._mask(operand.at, rows=True, columns=True)
        whole = all(self.varies(operand.at))
        if mask is not None and not (whole and operand.reads_nothing_as_zero):
            value = self.where(mask, value, t.call("cast", "0.0", f"tl.{unit}"))
        return value if whole else t.call("broadcast_to", value, str(shape))


class _Writer:
    """The lines of one kernel."""

    def __init__(self, heads: Heads, point: Point, fp8: frozenset[str]) -> None:
        self.h, self.p, self.fp8, self.text = heads, point, fp8, Text()
        self.unit = NATIVE[heads.unit.name]
        self.rows = Tile("rows", "t", heads.keys)
        self._ragged: set[str] = set()  # tiles of keys with some that do not exist
        # Scores stay as the product left them where nothing but a scale would be done to them.
        plain = heads.on_scores is None and heads.scale > 0 and heads.unit is not F32
        self.as_left = plain and (heads.mask is None or heads.mask.root.dtype is PRED)
        self.factor = heads.scale * LOG2_E if self.as_left else LOG2_E
        self._factor = self.text.number("factor", self.factor) if self.as_left else repr(LOG2_E)
        last = heads.causal == "lower" and heads.keys < heads.queries
        self.blind = heads.mask is not None or last  # a row may see no key

    def body(self) -> Text:
        h, p, do = self.h, self.p, self.text.do
        tiles = -(-h.queries // p.tile_m)
        do("program = tl.program_id(0)")
        do(f"head = program // {tiles}")
        order = f"program % {tiles}"
        do(f"tile = {f'{tiles - 1} - {order}' if h.causal != 'no' else order}")  # what sees most keys first
        do(f"m = tile * {p.tile_m} + tl.arange(0, {p.tile_m})")
        do(f"rows = head * {h.queries} + m")
        do(f"first_row = head * {h.queries} + tl.arange(0, 1)")
        do(f"key_head = head // {h.shared}")
        if h.queries % p.tile_m:
            do(f"row_mask = m < {h.queries}")
            self.rows = replace(self.rows, row_mask="row_mask")
        for name, extent in (("d", h.depth), ("e", h.width)):
            do(f"{name} = tl.arange(0, {power(extent)})")
            if power(extent) != extent:
                do(f"{name}_mask = {name} < {extent}")
        q = self._operands(self._columns("d", h.depth, self.rows)).ready(h.q, self.unit, (p.tile_m, power(h.depth)))
        do(f"q = {q}")
        if h.causal == "no":
            do(f"end = {h.keys}")
        else:
            shift = h.keys - h.queries if h.causal == "lower" else 0
            do(f"end = tl.minimum((tile + 1) * {p.tile_m} + {shift}, {h.keys})")
        {"online": self._online, "held": self._held, "twice": self._twice}[p.scores]()
        self._store()
        return self.text

    # -- the three ways

    def _online(self) -> None:
        """Weights unrounded: sums are brought to each new maximum."""
        do = self.text.do
        do(f"acc = tl.zeros([{self.p.tile_m}, {power(self.h.width)}], tl.float32)")
        self._begin()
        with self._loop():
            score = self._scores("t")
            weight, keep = self._carry(score)
            do(f"acc = acc * {keep}[:, None]")
            do(f"acc = {self._product(weight, 't', 'acc')}")
        do(f"acc = acc * {self._inverse()}[:, None]")

    def _twice(self) -> None:
        """The maximum and the sum of each row first, then its weights one tile after another."""
        do = self.text.do
        self._begin()
        with self._loop():
            self._carry(self._scores("t"))
        do(f"inverse = {self._inverse()}")
        do("base = top" if not self.blind else f"base = tl.where(top == {LOWEST}, 0.0, top)")
        do(f"acc = tl.zeros([{self.p.tile_m}, {power(self.h.width)}], tl.float32)")
        with self._loop():
            weight = self._exponential(self._scores("t"), "base")
            weight = self._weights(weight, "inverse", "t")
            do(f"acc = {self._product(weight, 't', 'acc')}")

    def _held(self) -> None:
        """All scores of a row at once, in registers; tiles that a causal mask hides are not left out."""
        text, do = self.text, self.text.do
        starts = range(0, self.h.keys, self.p.tile_n)
        scores: list[str] = []
        for i, start in enumerate(starts):
            self._keys(f"t{i}", str(start), ragged=start + self.p.tile_n > self.h.keys)
            do(f"s{i} = {self._scores(f't{i}')}")
            scores.append(f"s{i}")
        top = text.call("max", scores[0], "1")
        for s in scores[1:]:
            top = text.call("maximum", top, text.call("max", s, "1"))
        base = self.text.call("where", text.v(f"{top} == {LOWEST}"), "0.0", top) if self.blind else top
        weights = [self._exponential(s, base) for s in scores]
        do(f"total = {' + '.join(f'tl.sum({w}, 1)' for w in weights)}")
        inverse, acc = self._inverse(), None
        for i, weight in enumerate(weights):
            rounded = self._weights(weight, inverse, f"t{i}") if self.h.on_weights is not None else weight
            do(f"acc{i} = {self._product(rounded, f't{i}', acc)}")
            acc = f"acc{i}"
        do(f"acc = {acc}" if self.h.on_weights is not None else f"acc = {acc} * {inverse}[:, None]")

    # -- their parts

    @contextmanager
    def _loop(self) -> Generator[None]:
        """Emit the loop over tiles of keys around the body."""
        with self.text.block(f"for start in range(0, end, {self.p.tile_n}):"):
            self._keys("t", "start", ragged=self.h.keys % self.p.tile_n != 0)
            yield

    def _begin(self) -> None:
        self.text.do(f"top = tl.full([{self.p.tile_m}], {LOWEST}, tl.float32)")
        self.text.do(f"total = tl.zeros([{self.p.tile_m}], tl.float32)")

    def _keys(self, t: str, start: str, *, ragged: bool) -> None:
        """The numbers of a tile's keys, and their rows."""
        do = self.text.do
        do(f"{t} = {start} + tl.arange(0, {self.p.tile_n})")
        do(f"{t}_rows = key_head * {self.h.keys} + {t}")
        if ragged:
            do(f"{t}_mask = {t} < {self.h.keys}")
            self._ragged.add(t)

    def _mask_of(self, t: str) -> str | None:
        return f"{t}_mask" if t in self._ragged else None

    def _of_keys(self, t: str, name: str, extent: int) -> _Operands:
        """Reads rows of keys or values."""
        return self._operands(self._columns(name, extent, Tile(f"{t}_rows", "", 0, self._mask_of(t))))

    def _of_scores(self, t: str, acc: str | None = None) -> Emitter:
        """The emitter of values that vary along queries and keys."""
        return Emitter(self.text, replace(self.rows, columns=t, column_mask=self._mask_of(t), acc=acc), _pointer, self.fp8)

    def _columns(self, name: str, extent: int, tile: Tile) -> Tile:
        return replace(tile, columns=name, width=extent, column_mask=None if power(extent) == extent else f"{name}_mask")

    def _operands(self, tile: Tile) -> _Operands:
        return _Operands(self.text, tile, _pointer, self.fp8)

    def _scores(self, t: str) -> str:
        """Emit the scores of a tile of keys; minus infinity where a query does not see a key."""
        h, text = self.h, self.text
        k = self._of_keys(t, "d", h.depth).ready(h.k, self.unit, (self.p.tile_n, power(h.depth)))
        score = text.call("dot", "q", f"tl.trans({k})", *self._precision)
        mask = None if h.mask is None or h.mask.root.dtype is PRED else self._mask(t, h.mask)
        if isinstance(h.on_scores, Rounded):
            factor = text.number("score's code", h.scale / h.on_scores.divisor)
            code = self._rounded(score, factor, h.on_scores)
            scale = text.number("score's scale", h.on_scores.codes.scale)
            score = text.v(f"{code} * {scale}") if mask is None else text.call("fma", code, scale, mask)
        else:
            if isinstance(h.on_scores, Access):
                scaled = text.v(f"{score} * {text.number('scale', h.scale)}")
                score = self._of_scores(t, scaled).value(h.on_scores)
            elif not self.as_left:
                score = text.v(f"{score} * {text.number('scale', h.scale)}")
            if mask is not None:
                score = text.v(f"{score} + {mask}")
        if h.mask is not None and mask is None:
            score = text.call("where", self._mask(t, h.mask), score, LOWEST)
        if h.causal != "no":
            shift = h.keys - h.queries if h.causal == "lower" else 0
            seen = text.v(f"m[:, None]{f' + {shift}' if shift else ''} >= {t}[None, :]")
            score = text.call("where", seen, score, LOWEST)
        if t in self._ragged:
            score = text.call("where", f"{t}_mask[None, :]", score, LOWEST)
        return score

    def _mask(self, t: str, mask: Access) -> str:
        """Emit the mask of a tile of keys: pred, or f32. One that is the same for all queries of a head is read once for
        them."""
        emitter = self._of_scores(t)
        places = [mask.of_leaf(n) for n in mask.views if isinstance(n.op, Param)]
        if all(term.inner % self.h.queries == 0 for place in places for term in place.rows):
            emitter.tile = replace(emitter.tile, rows="first_row", row_mask=None)
        value = emitter.value(mask)
        return value if mask.root.dtype is PRED else emitter.convert(value, mask.root.dtype, F32)

    @property
    def _precision(self) -> tuple[str, ...]:
        return (f"input_precision='{self.p.precision}'",) if self.h.unit is F32 else ()

    def _exponential(self, score: str, base: str) -> str:
        """e^(score - base), both as the product left them where nothing but a scale is done to them."""
        text = self.text
        if self.h.unit is F32:
            return text.call("exp", text.v(f"{score} - {base}[:, None]"))
        if self.as_left:
            moved = text.v(f"{base} * {text.number('opposite of factor', -self.factor)}")
            return text.call("exp2", text.call("fma", score, self._factor, f"{moved}[:, None]"))
        return text.call("exp2", text.v(f"({score} - {base}[:, None]) * {self._factor}"))

    def _carry(self, score: str) -> tuple[str, str]:
        """A tile's weights with respect to the highest score so far, and what becomes of earlier ones."""
        do = self.text.do
        do(f"above = tl.maximum(top, tl.max({score}, 1))")
        do(f"base = tl.where(above == {LOWEST}, 0.0, above)" if self.blind else "base = above")
        weight = self._exponential(score, "base")
        precise = self.h.unit is F32
        do("keep = tl.exp(top - base)" if precise else f"keep = tl.exp2((top - base) * {self._factor})")
        do(f"total = total * keep + tl.sum({weight}, 1)")
        do("top = above")
        return weight, "keep"

    def _inverse(self) -> str:
        """Emit the inverse of the sum of a row's weights."""
        self.text.do("inverse = tl.div_rn(1.0, total)")
        if self.h.zero_masked_rows and self.blind:
            self.text.do("inverse = tl.where(total == 0.0, 0.0, inverse)")
        return "inverse"

    def _weights(self, weight: str, inverse: str, t: str) -> str:
        """Emit the weights as they enter the second product, where an expression is applied to them."""
        h, text = self.h, self.text
        if isinstance(h.on_weights, Rounded):
            scaled = text.v(f"{inverse} * {text.number('code of a weight', 1 / h.on_weights.divisor)}")
            code = self._rounded(weight, f"{scaled}[:, None]", h.on_weights, least=0.0)
            scale = text.number("scale of weights", h.on_weights.codes.scale)
            return code if h.v.codes is not None else text.v(f"{code} * {scale}")
        assert h.on_weights is not None
        return self._of_scores(t, text.v(f"{weight} * {inverse}[:, None]")).value(h.on_weights)

    def _rounded(self, x: str, factor: str, to: Rounded, least: float = -math.inf) -> str:
        """x * factor as the nearest code, less the zero point. None of what is rounded lies below `least`; NaN, which only the
        sum of a row can bring, becomes that."""
        text, codes = self.text, to.codes
        if codes.dtype in FP8:
            code = text.v(f"({x} * {factor}).to(tl.{FP8_NAMES[codes.dtype]})")  # holds what is too large to the largest code
            return text.v(f"{code}.to(tl.float32)")
        low, high = max(float(codes.dtype.min) - codes.zero, least), float(codes.dtype.max) - codes.zero
        bounds = [repr(ROUND + low), repr(ROUND + high)]
        if codes.zero:
            bounds = [text.number((to, i), ROUND + bound) for i, bound in enumerate((low, high))]
        nearest = text.call("fma", x, factor, repr(ROUND))
        held = text.call("minimum", text.call("maximum", nearest, bounds[0]), bounds[1])
        return text.v(f"{held} - {ROUND!r}")

    def _product(self, weight: str, t: str, acc: str | None) -> str:
        """Weights of a tile times its values, added to `acc`."""
        v = self._of_keys(t, "e", self.h.width).ready(self.h.v, self.unit, (self.p.tile_n, power(self.h.width)))
        more = () if acc is None else (acc,)
        return f"tl.dot({', '.join((f'{weight}.to(tl.{self.unit})', v, *more, *self._precision))})"

    def _store(self) -> None:
        h = self.h
        if h.v.codes is not None:
            of_weights = h.on_weights.codes.scale if isinstance(h.on_weights, Rounded) else 1.0
            self.text.do(f"acc = acc * {self.text.number('scale of the result', h.v.codes.scale * of_weights)}")
        tile = self._columns("e", h.width, self.rows)
        with_acc = replace(tile, acc=Emitter(self.text, tile, _pointer, self.fp8).convert("acc", F32, h.result))
        for i, store in enumerate(h.stores):
            Emitter(self.text, with_acc, _pointer, self.fp8).store(store, f"o{i}")
