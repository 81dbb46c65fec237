"""One gemm in one line: the notation of `tilewright gemm`, of every report, and of messages.

    s8[16,1024,1024] @ s8[16,1024,1024]^T -> s8
    f16[16,8192] @ s4[3584,8192]^T group=64 -> f16
    bf16[4096,4096] @ bf16[4096,4096] + bias, gelu -> bf16

    problem  = operand "@" operand step* ["->" result]
    operand  = type ["^T"] attribute*               the type as stored; ^T multiplies by its transpose
    attribute= "group=" G | "block=" R "x" C | "scale=tensor" | "scale=channel" | "zero_point"
    step     = ("+" | "-" | "*" | "/") side | "," function ["(" side ")"] | "," dtype
    side     = word | type | number      [":" dtype after a word or a number]
    word     = "offset" | "bias" | "row_bias" | "residual" | "scale" | "column_scale" | "row_scale" | "factor" | "row"
    result   = dtype ["wrap" | "saturate"] ["scale=tensor" | "scale=row" | "scale=column"] ["zero_point"] ["acc=" dtype]
               [("rows" | "columns") "/" axis]          over which ranks the result is to be split

On a mesh of ranks an operand's extent may be split: `bf16[4096/tp,8192] @ bf16[8192,10240/tp]`, `/dp*tp` over two axes.

`offset` and `scale` are one number, `bias` and `column_scale` [N], `row_bias`, `row_scale` and `row` one value a row,
`residual` and `factor` as large as the result. What is printed says the role: the first of each for what is added, the other
for what multiplies or divides, a type for a side that does neither. `group=G` scales every G elements along K (and, with
`zero_point`, shifts them); `channel` is a row of the left or a column of the right operand. Steps are computed in f32, or as
integers while both sides are; a dtype as a step rounds to it. A number is f32 unless it says otherwise. Without "->" what the
steps leave is stored.

Reports print more than is parsed: several stores in braces, `[0:768]` for the columns a store takes,
`as 64x384x12x64 (0,2,1,3)` for the shape and the permutation under which it is written, `as 128x768` for the shape that an
operand is read in, `|` between weights side by side, and an expression in braces where steps do not form a chain.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from tilewright.dtype import BY_NAME, F32, DType, dtype
from tilewright.errors import InputError
from tilewright.ir.build import const, input_
from tilewright.ir.fused import Apply, Result, Side, fused_gemm
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import FUNCTIONS, Overflow, Place
from tilewright.ir.tokens import Tokens
from tilewright.ir.types import Shape, TensorType, broadcast_shapes

Splits = tuple[tuple[str, ...], ...]

OPERATORS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
EXAMPLE = '"bf16[64,256] @ bf16[256,128] + bias, gelu -> bf16"'
LONGEST_INTEGER = 20  # digits of 2**64
_AXES = r"[A-Za-z_]\w*(?:\*[A-Za-z_]\w*)*"
_EXTENT = rf"\s*\d{{1,15}}\s*(?:/\s*{_AXES}\s*)?"
_TOKEN = re.compile(
    rf"\s*(?:(?P<type>[a-z][a-z0-9]*\[(?:{_EXTENT}(?:,{_EXTENT})*)?\])|(?P<arrow>->)|(?P<pair>[a-z_]+=[\w.]+)"
    r"|(?P<word>[A-Za-z_]\w*(?::\w+)?)|(?P<number>\d+(?:\.\d*)?(?:e[-+]?\d+)?(?::\w+)?)|(?P<transpose>\^T)"
    r"|(?P<sign>[@+\-*/,()]))"
)
ADDENDS = {"number": "offset", "column": "bias", "row": "row_bias", "result": "residual"}  # by what has a value of its own
FACTORS = {"number": "scale", "column": "column_scale", "row": "row_scale", "result": "factor"}
_SIDES = {word: spread for words in (ADDENDS, FACTORS, {"row": "row"}) for spread, word in words.items()}
_IN_F32 = ("row", "scale", "column_scale", "row_scale")  # sides that are f32 where no dtype is said
_ATTRIBUTES = ("group=", "scale=tensor", "scale=channel", "zero_point", "block=")
_RESULTS = ("wrap", "saturate", "scale=tensor", "scale=row", "scale=column", "zero_point", "rows", "columns")


@dataclass
class _Reader(Tokens):
    """Tokens (kind, text, column), and the graph inputs made so far."""

    text: str
    at: int = 0
    tokens: list[tuple[str, str, int]] = field(default_factory=list[tuple[str, str, int]])
    inputs: list[Node] = field(default_factory=list[Node])

    def __post_init__(self) -> None:
        at = 0
        while self.text[at:].strip():
            m = _TOKEN.match(self.text, at)
            if m is None or m.lastgroup is None:
                at += len(self.text[at:]) - len(self.text[at:].lstrip())
                if long := re.match(r"\[[\s\d,.]*?(\d{16,})", self.text[at:]):
                    raise self.wrong(f"no extent has {len(long[1])} digits", at + long.start(1))
                raise self.wrong(f"{self.text[at : at + 12]!r} is not understood", at)
            self.tokens.append((m.lastgroup, m.group(m.lastgroup), m.start(m.lastgroup)))
            at = m.end()
        self.tokens.append(("end", "the end", len(self.text)))

    def wrong(self, what: str, column: int, hint: str = EXAMPLE) -> InputError:
        """An error at a column counted from 0."""
        return InputError(what, where=f"column {column + 1} of {self.text!r}", hint=hint)

    def fail(self, wanted: str, known: Iterable[str] = ()) -> InputError:
        """The error that the next token is not what was wanted; `known` are words it may be a misspelling of."""
        _, found, column = self.tokens[self.at]
        near = difflib.get_close_matches(found, known, 1)
        return self.wrong(
            f"{wanted} wanted, {found!r} found", column, f"{near[0]!r} in place of {found!r}" if near else EXAMPLE
        )

    @property
    def column(self) -> int:
        """The column of the token taken last."""
        return self.tokens[max(self.at - 1, 0)][2]

    def take(self, kind: str, wanted: str) -> str:
        if self.tokens[self.at][0] != kind:
            raise self.fail(wanted)
        self.at += 1
        return self.tokens[self.at - 1][1]

    def sign(self, text: str) -> None:
        if not self.accept("sign", text):
            raise self.fail(text)

    def input(self, label: str, t: DType, shape: Shape) -> Node:
        used = {n.op.label for n in self.inputs}  # type: ignore[attr-defined]
        name, i = label, 2
        while name in used:
            name, i = f"{label}{i}", i + 1
        self.inputs.append(input_(name, t, shape))
        return self.inputs[-1]

    def dtype(self, name: str, column: int) -> DType:
        try:
            found = dtype(name)
        except InputError as error:
            raise self.wrong(error.what, column, error.hint or EXAMPLE) from None
        if found.kind == "opaque":
            raise self.wrong(f"{name} is no type of numbers", column)
        return found

    def type(self, wanted: str) -> TensorType:
        return self.placed(wanted)[0]

    def placed(self, wanted: str) -> tuple[TensorType, Splits]:
        """A type, and the mesh axes that split each axis."""
        text = self.take("type", wanted)
        name, dims = text[:-1].split("[")
        parts = [d.partition("/") for d in dims.split(",") if d.strip()]
        splits = tuple(tuple(a.strip() for a in axes.split("*")) if axes else () for _, _, axes in parts)
        return TensorType(self.dtype(name, self.column), tuple(int(d) for d, _, _ in parts)), splits


@dataclass
class _Operand:
    """A line's statement of an operand: its type, and attributes with the columns where they stand."""

    type: TensorType
    column: int
    given: dict[str, tuple[str, int]]
    splits: Splits

    def value(self, given: Node) -> Node:
        """The operand's input, placed if the line splits an extent of it."""
        return Node(Place(self.splits), given) if any(self.splits) else given


@dataclass
class _Stored:
    """A line's statement after the arrow: the stored type, its overflow, scale and zero point, and the accumulator type."""

    dtype: DType
    overflow: Overflow = "wrap"
    scale: str | None = None
    zero_point: bool = False
    acc: DType | None = None
    splits: Splits | None = None


def parse(text: str) -> Graph:
    """The one-gemm program that a line of the notation describes. Its inputs are named a, b, then as the line names them.

    Raises:
        InputError: malformed; says at which column.
        TypeMismatchError: extents or types do not fit.
    """
    r = _Reader(text)
    left = _operand(r, "the left operand's type")
    r.sign("@")
    right = _operand(r, "the right operand's type")
    a, b = (o.value(r.input(name, o.type.dtype, o.type.shape)) for name, o in (("a", left), ("b", right)))
    lhs = _side(r, a, left, "a", right.type.dtype, rows=True)
    rhs = _side(r, b, right, "b", left.type.dtype, rows=False)
    shape = _result_shape(r, lhs, rhs, right.column)
    pending: list[tuple[str, object]] = []
    while r.peek()[0] == "sign":
        pending.append(_step(r))
    stored = _stored(r) if r.accept("arrow") else None
    if r.peek()[0] != "end":
        raise r.fail("a step, '->' or the end")
    natural = stored.dtype if stored is not None and stored.dtype.is_float else F32
    steps = [Apply(fn, _beside(r, what, natural, shape)) for fn, what in pending]
    result = None if stored is None else _result(r, stored, shape)
    node = fused_gemm(lhs, rhs, result, steps, None if stored is None else stored.acc)
    if stored is not None and stored.splits is not None:
        node = Node(Place((*(((),) * (len(shape) - 2)), *stored.splits)), node)
    return Graph(text, tuple(r.inputs), (node,), ("result",))


def _operand(r: _Reader, wanted: str) -> _Operand:
    t, splits = r.placed(wanted)
    column = r.column
    if t.rank < 2:
        raise r.wrong(f"{t} is no matrix", column, "write a vector as one row, [1,K]")
    given: dict[str, tuple[str, int]] = {}
    while True:
        if r.accept("transpose"):
            key, value = "^T", ""
        elif pair := r.accept("pair"):
            key, value = pair.split("=")
            if key not in ("group", "block", "scale"):
                r.at -= 1
                raise r.fail("group=, block= or scale=", _ATTRIBUTES)
        elif r.accept("word", "zero_point"):
            key, value = "zero_point", ""
        else:
            return _Operand(t, column, given, splits)
        if key in given or len({"group", "block", "scale"} & {key, *given}) > 1:
            raise r.wrong(f"{key} and {key if key in given else next(iter(given))} are both given", r.column)
        given[key] = (value, r.column)


def _side(r: _Reader, value: Node, said: _Operand, name: str, other: DType, *, rows: bool) -> Side:
    given = said.given
    transposed = "^T" in given
    k_axis = (-1 if rows else -2) if not transposed else (-2 if rows else -1)
    shape, rank = value.shape, len(value.shape)
    block: Shape | None = None
    scale_shape: Shape | None = None
    if "group" in given or "block" in given:
        block = _block(r, given, rank, k_axis)
        scale_shape = tuple(-(-d // e) for d, e in zip(shape, block, strict=True))
    elif "scale" in given:
        kind, column = given["scale"]
        if kind not in ("tensor", "channel"):
            raise r.wrong(f"scale={kind} is not scale=tensor or scale=channel", column)
        kept = rank + {-1: -2, -2: -1}[k_axis]
        scale_shape = () if kind == "tensor" else tuple(d if i == kept else 1 for i, d in enumerate(shape))
    scale = zero = None
    if scale_shape is not None:
        scale = r.input(f"{name}_scale", other if other.is_float and other.bits >= 16 else F32, scale_shape)
    if "zero_point" in given:
        if not value.dtype.is_integer:
            raise r.wrong(f"a zero point needs an integer operand, not {value.dtype}", given["zero_point"][1])
        zero = r.input(f"{name}_zero_point", value.dtype, scale_shape or ())
    return Side(value, transposed, scale, zero, block)


def _block(r: _Reader, given: dict[str, tuple[str, int]], rank: int, k_axis: int) -> Shape:
    extents = [1] * rank
    if "group" in given:
        extents[k_axis] = _whole(r, *given["group"])
    else:
        text, column = given["block"]
        sides = text.split("x")
        if len(sides) != 2:
            raise r.wrong(f"block={text} is not ROWSxCOLUMNS", column)
        extents[-2:] = [_whole(r, s, column) for s in sides]
    return tuple(extents)


def _whole(r: _Reader, text: str, column: int) -> int:
    if re.fullmatch(r"0*[1-9]\d{0,14}", text, re.ASCII) is None:
        why = (
            f"no extent has {len(text)} digits"
            if text.isdecimal() and int(text[:16])
            else f"{text!r} is no positive whole number"
        )
        raise r.wrong(why, column)
    return int(text)


def _result_shape(r: _Reader, lhs: Side, rhs: Side, column: int) -> Shape:
    def seen(s: Side) -> Shape:
        shape = s.value.shape
        return (*shape[:-2], shape[-1], shape[-2]) if s.transposed else shape

    a, b = seen(lhs), seen(rhs)
    if a[-1] != b[-2]:
        raise r.wrong(f"K is {a[-1]} on the left and {b[-2]} on the right", column, "^T transposes an operand")
    return (*broadcast_shapes(a[:-2], b[:-2], where=f"batch of {r.text!r}"), a[-2], b[-1])


def _step(r: _Reader) -> tuple[str, object]:
    sign = r.take("sign", "+, -, *, / or ,")
    if sign in OPERATORS:
        return OPERATORS[sign], _what(r)
    if sign != ",":
        r.at -= 1
        raise r.fail("a step, '->' or the end")
    fn = r.take("word", "the name of a function")
    if fn in BY_NAME:
        return r.dtype(fn, r.column).name, None
    if fn not in FUNCTIONS or FUNCTIONS[fn].to_pred or FUNCTIONS[fn].arity > 2:
        r.at -= 1
        raise r.fail("the name of an elementwise function", FUNCTIONS)
    if FUNCTIONS[fn].arity == 1:
        return fn, None
    r.sign("(")
    what = _what(r)
    r.sign(")")
    return fn, what


def _what(r: _Reader) -> object:
    """A side: a type, a constant, or a word with the dtype said after it (None if none was)."""
    kind, text = r.peek()
    if kind == "type":
        return r.type("a type")
    negative = r.accept("sign", "-") is not None
    kind, text = r.peek()
    word, _, name = text.partition(":")
    number = kind == "number" or (kind == "word" and word in ("inf", "nan"))
    if not number and (negative or kind != "word" or word not in _SIDES):
        raise r.fail("a number" if negative else f"{', '.join(_SIDES)}, a type or a number", _SIDES)
    r.at += 1
    said = r.dtype(name, r.column) if name else None
    if not number:
        return word, said
    t = said or F32
    value = int(word) if word.isdigit() and len(word) <= LONGEST_INTEGER else float(word)
    value = -value if negative else value
    if not t.holds(value) or (kind == "number" and abs(value) == math.inf):
        raise r.wrong(f"{'-' if negative else ''}{word} is no {t}", r.column)
    return const(int(value) if t.is_integer else float(value), t)


def _beside(r: _Reader, what: object, natural: DType, shape: Shape) -> Node | None:
    if what is None or isinstance(what, Node):
        return what
    if isinstance(what, TensorType):
        return r.input("side", what.dtype, what.shape)
    word, said = cast("tuple[str, DType | None]", what)
    shapes: dict[str, Shape] = {"number": (), "column": shape[-1:], "row": (*shape[:-1], 1), "result": shape}
    return r.input(word, said or (F32 if word in _IN_F32 else natural), shapes[_SIDES[word]])


def _stored(r: _Reader) -> _Stored:
    found = _Stored(r.dtype(r.take("word", "the result's dtype"), r.column))
    said: set[str] = set()
    while r.peek()[0] in ("word", "pair"):
        if pair := r.accept("pair"):
            key, value = pair.split("=")
            if key == "acc":
                found.acc = r.dtype(value, r.column)
            elif key == "scale" and value in ("tensor", "row", "column"):
                found.scale = value
            else:
                r.at -= 1
                raise r.fail("scale=tensor, scale=row, scale=column or acc=", _RESULTS)
        elif r.accept("word", "zero_point"):
            key, found.zero_point = "zero_point", True
        elif side := (r.accept("word", "rows") or r.accept("word", "columns")):
            key, names = "the result's placement", [_axis(r, "/")]
            while r.accept("sign", "*"):
                names.append(r.take("word", "a mesh axis"))
            found.splits = (tuple(names), ()) if side == "rows" else ((), tuple(names))
        elif word := (r.accept("word", "wrap") or r.accept("word", "saturate")):
            key, found.overflow = "overflow", "wrap" if word == "wrap" else "saturate"
        else:
            raise r.fail("wrap, saturate, scale=, zero_point or acc=", _RESULTS)
        if key in said:
            raise r.wrong(f"{key} is given twice", r.column)
        said.add(key)
    if found.zero_point and found.scale is None:
        raise r.wrong("a zero point of the result needs a scale", r.column, "scale=tensor zero_point")
    if found.scale is not None and "overflow" in said and found.overflow == "wrap":
        raise r.wrong("a quantised result saturates, it cannot wrap", r.column)
    return found


def _axis(r: _Reader, sign: str) -> str:
    r.sign(sign)
    return r.take("word", "a mesh axis")


def _result(r: _Reader, stored: _Stored, shape: Shape) -> Result:
    extents: dict[str, Shape] = {"tensor": (), "row": (*shape[:-1], 1), "column": shape[-1:]}
    scale = None if stored.scale is None else r.input("out_scale", F32, extents[stored.scale])
    zero = r.input("out_zero_point", stored.dtype, ()) if stored.zero_point else None
    return Result(stored.dtype, stored.overflow, scale, zero)
