"""One gemm in one line: the notation of `tilewright gemm`, of every report, and of messages.

    s8[16,1024,1024] @ s8[16,1024,1024]^T -> s8
    f16[16,8192] @ s4[3584,8192]^T group=64 -> f16
    bf16[4096,4096] @ bf16[4096,4096] + bias, gelu -> bf16

    problem  = operand "@" operand step* ["->" result]
    operand  = type ["^T"] attribute*               the type as stored; ^T multiplies by its transpose
    attribute= "group=" G | "block=" R "x" C | "scale=tensor" | "scale=channel" | "zero_point"
    step     = ("+" | "-" | "*" | "/") side | "," function ["(" side ")"] | "," dtype
    side     = "bias" | "residual" | "scale" | "row" | type | number      [":" dtype after a word]
    result   = dtype ["wrap" | "saturate"] ["scale=tensor" | "scale=row" | "scale=column"] ["zero_point"] ["acc=" dtype]

`bias` is [N], `residual` the whole result, `row` one value a row, `scale` one number. `group=G` scales every G elements along K
(and, with `zero_point`, shifts them); `channel` is a row of the left or a column of the right operand. Steps are computed in
f32; a dtype as a step rounds to it. Without "->" the accumulator is stored.

Reports print more than is parsed: several stores in braces, `[0:768]` for the columns a store takes, `as 64x384x12x64(0,2,1,3)`
for the shape and the permutation under which it is written, `quantize(s8)` for a rounding on the way, `|` between weights side
by side, and an expression in braces where steps do not form a chain.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright.dtype import BY_NAME, F32, DType, dtype
from tilewright.errors import InputError
from tilewright.ir.build import const, input_
from tilewright.ir.fused import Apply, Result, Side, fused_gemm
from tilewright.ir.graph import Graph, Node, toposort
from tilewright.ir.ops import (
    FUNCTIONS,
    Acc,
    Broadcast,
    Concat,
    Const,
    Convert,
    Dequantize,
    Gemm,
    Map,
    Overflow,
    Param,
    Quantize,
    Reshape,
    Slice,
    Transpose,
)
from tilewright.ir.text import print_expression
from tilewright.ir.types import Shape, TensorType, TupleType, broadcast_shapes

OPERATORS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
SYMBOLS = {fn: sign for sign, fn in OPERATORS.items()}
EXAMPLE = '"bf16[64,256] @ bf16[256,128] + bias, gelu -> bf16"'
_TOKEN = re.compile(
    r"\s*(?:(?P<type>[a-z][a-z0-9]*\[[\d,\s]*\])|(?P<arrow>->)|(?P<pair>[a-z_]+=[\w.]+)|(?P<word>[A-Za-z_]\w*(?::\w+)?)"
    r"|(?P<number>\d+(?:\.\d*)?(?:e[-+]?\d+)?)|(?P<transpose>\^T)|(?P<sign>[@+\-*/,()]))"
)


@dataclass
class _Reader:
    """Tokens, and the graph inputs made so far."""

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
                raise self.fail("a problem", self.text[at:][:12], at)
            self.tokens.append((m.lastgroup, m.group(m.lastgroup), m.start(m.lastgroup)))
            at = m.end()
        self.tokens.append(("end", "the end", len(self.text)))

    def fail(self, wanted: str, got: str | None = None, at: int | None = None) -> InputError:
        found = self.tokens[self.at] if got is None else ("", got, at or 0)
        return InputError(f"{wanted} wanted, {found[1]!r} found", where=f"column {found[2] + 1} of {self.text!r}", hint=EXAMPLE)

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at][:2]

    def take(self, kind: str, wanted: str) -> str:
        if self.tokens[self.at][0] != kind:
            raise self.fail(wanted)
        self.at += 1
        return self.tokens[self.at - 1][1]

    def accept(self, kind: str, text: str | None = None) -> str | None:
        got = self.peek()
        if got[0] == kind and (text is None or got[1] == text):
            self.at += 1
            return got[1]
        return None

    def input(self, label: str, t: DType, shape: Shape) -> Node:
        used = {n.op.label for n in self.inputs}  # type: ignore[attr-defined]
        name, i = label, 2
        while name in used:
            name, i = f"{label}{i}", i + 1
        self.inputs.append(input_(name, t, shape))
        return self.inputs[-1]

    def type(self, wanted: str) -> TensorType:
        text = self.take("type", wanted)
        name, dims = text[:-1].split("[")
        shape = tuple(int(d) for d in dims.split(",") if d.strip())
        return TensorType(dtype(name), shape)


def parse(text: str) -> Graph:
    """The one-gemm program that a line of the notation describes. Its inputs are named a, b, then as the line names them.

    Raises:
        InputError: malformed; says at which column.
        TypeMismatchError: extents or types do not fit.
    """
    r = _Reader(text)
    a_type = r.type("the left operand's type")
    a_attributes = _operand_tail(r)
    r.take("sign", "@") if r.peek() == ("sign", "@") else r.take("arrow", "@")
    b_type = r.type("the right operand's type")
    b_attributes = _operand_tail(r)
    a, b = r.input("a", a_type.dtype, a_type.shape), r.input("b", b_type.dtype, b_type.shape)
    for t in (a_type, b_type):
        if t.rank < 2:
            raise InputError(f"{t} is no matrix", where=repr(text), hint="write a vector as one row, [1,K]")
    lhs = _side(r, a, a_attributes, "a", b_type.dtype, rows=True)
    rhs = _side(r, b, b_attributes, "b", a_type.dtype, rows=False)
    shape = _result_shape(r, lhs, rhs)
    pending: list[tuple[str, object]] = []
    while r.peek()[0] == "sign":
        pending.append(_step(r))
    result, acc = _result(r, shape)
    if r.peek()[0] != "end":
        raise r.fail("a step, '->' or the end")
    natural = result.dtype if result is not None and result.dtype.is_float else F32
    steps = [Apply(fn, _operand(r, what, natural, shape)) for fn, what in pending]
    node = fused_gemm(lhs, rhs, result, steps, acc)
    if isinstance(node.type, TupleType):
        raise AssertionError("one store gives one result")
    return Graph(text, tuple(r.inputs), (node,), ("result",))


def _operand_tail(r: _Reader) -> dict[str, str]:
    found: dict[str, str] = {}
    while True:
        if r.accept("transpose"):
            found["transposed"] = "yes"
        elif pair := r.accept("pair"):
            key, value = pair.split("=")
            if key not in ("group", "block", "scale"):
                r.at -= 1
                raise r.fail("group=, block= or scale=")
            found[key] = value
        elif r.accept("word", "zero_point"):
            found["zero_point"] = "yes"
        else:
            return found


def _side(r: _Reader, value: Node, given: dict[str, str], name: str, other: DType, *, rows: bool) -> Side:
    transposed = "transposed" in given
    k_axis = (-1 if rows else -2) if not transposed else (-2 if rows else -1)
    shape, rank = value.shape, len(value.shape)
    block: Shape | None = None
    scale_shape: Shape | None = None
    if "group" in given or "block" in given:
        extents = [1] * rank
        if "group" in given:
            extents[k_axis] = _whole(r, given["group"])
        else:
            sides = given["block"].split("x")
            if len(sides) != 2:
                raise InputError(f"block={given['block']} is not ROWSxCOLUMNS", where=repr(r.text))
            extents[-2:] = [_whole(r, s) for s in sides]
        block = tuple(extents)
        scale_shape = tuple(-(-d // e) for d, e in zip(shape, block, strict=True))
    elif given.get("scale") == "tensor":
        scale_shape = ()
    elif given.get("scale") == "channel":
        kept = {-1: -2, -2: -1}[k_axis]
        scale_shape = tuple(shape[i] if i == rank + kept else 1 for i in range(rank))
    elif "scale" in given:
        raise InputError(f"scale={given['scale']} is not scale=tensor or scale=channel", where=repr(r.text))
    elif "zero_point" in given:
        scale_shape = () if value.dtype.is_integer else None
    integer_pair = other.is_integer and value.dtype.is_integer and block is None
    scale_type = other if other.is_float and other.bits >= 16 else F32
    scale = zero = None
    if scale_shape is not None and not (integer_pair and "scale" not in given):
        scale = r.input(f"{name}_scale", scale_type, scale_shape)
    if "zero_point" in given:
        if scale_shape is None or not value.dtype.is_integer:
            raise InputError(f"a zero point needs an integer operand, not {value.dtype}", where=repr(r.text))
        zero = r.input(f"{name}_zero_point", value.dtype, scale_shape)
    return Side(value, transposed, scale, zero, block)


def _whole(r: _Reader, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise InputError(f"{text!r} is no positive whole number", where=repr(r.text))
    return int(text)


def _result_shape(r: _Reader, lhs: Side, rhs: Side) -> Shape:
    def seen(s: Side) -> Shape:
        shape = s.value.shape
        return (*shape[:-2], shape[-1], shape[-2]) if s.transposed else shape

    a, b = seen(lhs), seen(rhs)
    if a[-1] != b[-2]:
        raise InputError(
            f"K is {a[-1]} on the left and {b[-2]} on the right", where=repr(r.text), hint="^T transposes an operand"
        )
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
        return fn, None
    if fn not in FUNCTIONS or FUNCTIONS[fn].to_pred or FUNCTIONS[fn].arity > 2:
        r.at -= 1
        raise r.fail("the name of an elementwise function")
    if FUNCTIONS[fn].arity == 1:
        return fn, None
    r.take("sign", "(") if r.peek() == ("sign", "(") else r.take("arrow", "(")
    what = _what(r)
    r.take("sign", ")") if r.peek() == ("sign", ")") else r.take("arrow", ")")
    return fn, what


def _what(r: _Reader) -> object:
    kind, text = r.peek()
    if kind == "type":
        return r.type("a type")
    if kind == "number":
        r.at += 1
        return float(text)
    if r.accept("sign", "-"):
        return -float(r.take("number", "a number"))
    if kind == "word" and text.split(":")[0] in ("bias", "residual", "scale", "row"):
        r.at += 1
        return text
    raise r.fail("bias, residual, scale, row, a type or a number")


def _operand(r: _Reader, what: object, natural: DType, shape: Shape) -> Node | None:
    if what is None:
        return None
    if isinstance(what, float):
        return const(what, F32)
    if isinstance(what, TensorType):
        return r.input("side", what.dtype, what.shape)
    word, _, given = str(what).partition(":")
    shapes: dict[str, Shape] = {"bias": shape[-1:], "residual": shape, "scale": (), "row": (*shape[:-1], 1)}
    t = dtype(given) if given else F32 if word in ("scale", "row") else natural
    return r.input(word, t, shapes[word])


def _result(r: _Reader, shape: Shape) -> tuple[Result | None, DType | None]:
    if not r.accept("arrow"):
        return None, None
    name = r.take("word", "the result's dtype")
    if name not in BY_NAME:
        r.at -= 1
        raise r.fail("a dtype")
    overflow: Overflow = "wrap"
    scale = zero = acc = None
    while r.peek()[0] in ("word", "pair"):
        if pair := r.accept("pair"):
            key, value = pair.split("=")
            if key == "acc":
                acc = dtype(value)
            elif key == "scale" and value in ("tensor", "row", "column"):
                extents: dict[str, Shape] = {"tensor": (), "row": (*shape[:-1], 1), "column": shape[-1:]}
                scale = r.input("out_scale", F32, extents[value])
            else:
                r.at -= 1
                raise r.fail("scale=tensor, scale=row, scale=column or acc=")
        elif r.accept("word", "zero_point"):
            zero = r.input("out_zero_point", dtype(name), ())
        elif word := (r.accept("word", "wrap") or r.accept("word", "saturate")):
            overflow = "wrap" if word == "wrap" else "saturate"
        else:
            raise r.fail("wrap, saturate, scale=, zero_point or acc=")
    if zero is not None and scale is None:
        raise InputError("a zero point of the result needs a scale", where=repr(r.text), hint="scale=tensor zero_point")
    return Result(dtype(name), overflow, scale, zero), acc


def show_gemm(op: Gemm, types: Sequence[TensorType]) -> str:
    """A gemm in the notation, given the types of its sources."""
    head = f"{_show_operand(op.lhs, types, rows=True)} @ {_show_operand(op.rhs, types, rows=False)}"
    tails = [_show_store(store, op) for store in op.stores]
    return head + tails[0] if len(tails) == 1 else f"{head} {{{';'.join(tails)} }}"


def _show_operand(root: Node, types: Sequence[TensorType], *, rows: bool) -> str:
    node, transposed = root, ""
    rank = len(root.shape)
    if isinstance(node.op, Transpose) and node.op.perm == (*range(rank - 2), rank - 1, rank - 2):
        node, transposed = node.src[0], "^T"
    if isinstance(node.op, Param):
        return f"{node.type}{transposed}"
    if isinstance(node.op, Dequantize) and isinstance(node.src[0].op, Param):
        code, scale = node.src[0], node.src[1]
        zero = " zero_point" if len(node.src) == 3 else ""
        return f"{code.type}{transposed}{_show_scale(node, code, scale, rows, bool(transposed))}{zero}"
    if isinstance(node.op, Concat) and all(isinstance(n.op, Param) for n in node.src):
        return f"{'|'.join(str(n.type) for n in node.src)}{transposed}"
    if isinstance(node.op, Convert) and isinstance(node.src[0].op, Param) and node.src[0].dtype.is_integer:
        return f"{node.src[0].type}{transposed}"
    return f"{root.type}{{{print_expression(root)}}}"


def _show_scale(node: Node, code: Node, scale: Node, rows: bool, transposed: bool) -> str:
    op = node.op
    assert isinstance(op, Dequantize)
    rank = len(code.shape)
    k_axis = rank + ((-1 if rows else -2) if not transposed else (-2 if rows else -1))
    if op.block is not None:
        if all(b == 1 for i, b in enumerate(op.block) if i != k_axis):
            return f" group={op.block[k_axis]}"
        return f" block={op.block[-2]}x{op.block[-1]}"
    return " scale=tensor" if scale.tensor.elements == 1 else " scale=channel"


def _show_store(store: Node, op: Gemm) -> str:
    """Range of acc, steps, result and view of a store, if its steps form a chain; else its expression in braces."""
    view, node = "", store
    while isinstance(node.op, (Reshape, Transpose)):
        shown = "x".join(map(str, node.shape)) if isinstance(node.op, Reshape) else f"({','.join(map(str, node.op.perm))})"
        view, node = f" as {shown}{view[3:]}", node.src[0]
    result = ""
    if isinstance(node.op, Quantize):
        scale = node.src[1].tensor
        kind = "tensor" if scale.elements == 1 else "column" if scale.rank < 2 or scale.shape[-2] == 1 else "row"
        result = f" -> {node.dtype} scale={kind}{' zero_point' if len(node.src) == 3 else ''}"
        node = node.src[0]
    elif isinstance(node.op, Convert):
        saturates = node.op.overflow == "saturate" and node.src[0].dtype.is_integer
        result, node = f" -> {node.dtype}{' saturate' if saturates else ''}", node.src[0]
    dependent: set[Node] = set()
    for n in toposort((store,)):
        if isinstance(n.op, Acc) or any(s in dependent for s in n.src):
            dependent.add(n)
    steps: list[str] = []
    while not isinstance(node.op, Acc):
        inner = [s for s in node.src if s in dependent]
        if isinstance(node.op, Convert) and len(inner) == 1 and _implied(node):
            node = inner[0]
            continue
        if isinstance(node.op, Slice) and isinstance(node.src[0].op, Acc):
            steps.append(f" [{node.op.start[-1]}:{node.op.stop[-1]}]")
            break
        if isinstance(node.op, (Quantize, Dequantize)) and inner == [node.src[0]]:
            steps.append(f", {node.op.name}({node.dtype})")
            node = inner[0]
            continue
        if isinstance(node.op, Convert) and len(inner) == 1:
            steps.append(f", {node.dtype}")
            node = inner[0]
            continue
        step = _show_step(node, inner, node.shape) if isinstance(node.op, Map) and len(inner) == 1 else None
        if step is None:
            steps.append(f" {{{print_expression(node)}}}")
            break
        steps.append(step)
        node = inner[0]
    return "".join(reversed(steps)) + result + view


def _implied(node: Node) -> bool:
    """A conversion the notation makes by itself: steps are computed in f32."""
    return node.dtype is F32


def _show_step(node: Node, inner: list[Node], shape: Shape) -> str | None:
    assert isinstance(node.op, Map)
    fn = node.op.fn
    if len(node.src) == 1:
        return f", {fn}"
    if len(node.src) != 2 or (node.src[0] is not inner[0] and fn not in ("add", "multiply", "maximum", "minimum")):
        return None
    other = node.src[1] if node.src[0] is inner[0] else node.src[0]
    shown = _show_side(other, shape)
    if shown is None:
        return None
    return f" {SYMBOLS[fn]} {shown}" if fn in SYMBOLS else f", {fn}({shown})"


def _show_side(side: Node, shape: Shape) -> str | None:
    value = side
    while isinstance(value.op, (Convert, Reshape, Transpose, Broadcast, Slice, Dequantize)):
        value = value.src[0]
    if isinstance(value.op, Const) and value.tensor.elements == 1 and value.dtype is side.dtype:
        return f"{value.op.data.scalar():g}"
    if not isinstance(value.op, Param):
        return None
    axes = [a for a, d in enumerate(side.shape, len(shape) - len(side.shape)) if d != 1]
    word = "scale" if not axes else "bias" if axes == [len(shape) - 1] else "residual" if side.shape == shape else None
    if word is None and side.shape == (*shape[:-1], 1):
        word = "row"
    return f"{word}:{value.dtype}" if word is not None else str(value.tensor.with_shape(side.shape))
