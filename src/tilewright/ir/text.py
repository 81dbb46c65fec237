"""The graph's textual form: `print_graph` writes it, `parse` reads it back to the very same nodes.

    graph "mlp" {
      %0 = input label="x" type=f32[2,3] : f32[2,3]
      %1 = const data=@"w" : f32[3,4]
      %2 = gemm(%0, %1) acc_dtype=f32 : f32[2,4] {
        %3 = param index=0 type=f32[2,3] : f32[2,3]
        %4 = param index=1 type=f32[3,4] : f32[3,4]
        %5 = acc type=f32[2,4] : f32[2,4]
        lhs %3
        rhs %4
        stores %5
      }
      %6 = reduce(%2) fn="add" axes=[1] keepdims=false : f32[2]
      return "y" %6
    }

Attributes left out take their defaults; `//` starts a comment. Small constants stand in the text; a large one is a reference
`@"name"` to be found in the `literals` given to `parse`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import cast

import torch

import tilewright.ir.ops as _ops
from tilewright.dtype import BY_NAME, OPAQUE, DType
from tilewright.errors import InputError, TilewrightError
from tilewright.ir.graph import OPS, Graph, Node, attributes, toposort
from tilewright.ir.literal import Literal, literal
from tilewright.ir.types import TensorType, TupleType

assert _ops.__all__  # importing it registers every op
INLINE_ELEMENTS = 16


class _Printer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[Node, str] = {}
        self.literals: dict[str, Literal] = {}
        self.literal_names: dict[Literal, str] = {}

    def block(self, roots: Sequence[Node], indent: str, outer: Mapping[Node, str]) -> dict[Node, str]:
        local = dict(outer)
        for node in toposort(roots):
            if node not in local:
                local[node] = f"%{len(self.names)}"
                self.names[node] = local[node]
                self._node(node, local, indent)
        return local

    def _node(self, node: Node, local: Mapping[Node, str], indent: str) -> None:
        args = f"({', '.join(local[s] for s in node.src)})" if node.src else ""
        shown = [f"{k}={self.value(v)}" for k, v in attributes(node.op).items() if not _is_default(node, k, v)]
        head = " ".join([f"{local[node]} = {node.op.name}{args}", *shown])
        regions = node.op.regions()
        self.lines.append(f"{indent}{head} : {node.type}{' {' if regions else ''}")
        if regions:
            inner = self.block([r for roots in regions.values() for r in roots], indent + "  ", {})
            for label, roots in regions.items():
                self.lines.append(f"{indent}  {label} {', '.join(inner[r] for r in roots)}")
            self.lines.append(f"{indent}}}")

    def value(self, v: object) -> str:
        if isinstance(v, bool):
            return "true" if v else "false"
        if v is None:
            return "none"
        if isinstance(v, float):
            return _float(v)
        if isinstance(v, (int, DType, TensorType)):
            return str(v)
        if isinstance(v, str):
            return json.dumps(v)
        if isinstance(v, tuple):
            return f"[{', '.join(map(self.value, cast('tuple[object, ...]', v)))}]"
        if isinstance(v, Literal):
            return self._literal(v)
        raise TypeError(f"no textual form for {v!r}")

    def _literal(self, v: Literal) -> str:
        if v.type.elements <= INLINE_ELEMENTS and (v.type.dtype.is_integer or v.type.dtype.kind == "pred"):
            return f"{v.type}{{{', '.join(str(int(x)) for x in v.tensor().reshape(-1).to(torch.int64).tolist())}}}"
        if v.type.elements <= INLINE_ELEMENTS and v.type.dtype.is_float:
            wide = v.tensor().reshape(-1).to(torch.float64)
            if not bool(torch.isnan(wide).any()):  # a NaN's payload would be lost
                return f"{v.type}{{{', '.join(_float(x) for x in wide.tolist())}}}"
        name = self.literal_names.get(v)
        if name is None:
            name = base = v.label or "constant"
            while name in self.literals:
                name = f"{base}.{len(self.literals)}"
            self.literal_names[v] = name
            self.literals[name] = v
        return f"@{json.dumps(name)}"


def _float(x: float) -> str:
    if math.isnan(x):
        return "nan"
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    return repr(float(x))


def _is_default(node: Node, name: str, value: object) -> bool:
    default = next(f.default for f in fields(node.op) if f.name == name)
    return default is not MISSING and default == value and type(default) is type(value)


def print_graph(graph: Graph) -> str:
    """The graph as text."""
    return print_with_literals(graph)[0]


def print_with_literals(graph: Graph) -> tuple[str, dict[str, Literal]]:
    """The graph as text, and the large constants its `@"name"`s stand for."""
    p = _Printer()
    local = p.block([*graph.inputs, *graph.outputs], "  ", {})
    for node, line in _origin_lines(graph, local):
        del node
        p.lines.append(line)
    for name, node in zip(graph.output_names, graph.outputs, strict=True):
        p.lines.append(f"  return {json.dumps(name)} {local[node]}")
    return "\n".join([f"graph {json.dumps(graph.name)} {{", *p.lines, "}", ""]), p.literals


def _origin_lines(graph: Graph, local: Mapping[Node, str]) -> list[tuple[Node, str]]:
    return [(n, f"  origin {name} {json.dumps(graph.origins[n])}") for n, name in local.items() if n in graph.origins]


def print_expression(root: Node, names: Mapping[Node, str] | None = None) -> str:
    """One expression in a line, for reports: `convert(acc + param2, s8)` style, shared parts repeated."""
    names = names or {}
    if root in names:
        return names[root]
    shown = [_Printer().value(v) for k, v in attributes(root.op).items() if not _is_default(root, k, v) and k != "type"]
    if root.op.name == "map":
        return f"{getattr(root.op, 'fn', '')}({', '.join(print_expression(s, names) for s in root.src)})"
    if root.op.name == "acc":
        return "acc"
    if root.op.name == "param":
        return f"param{getattr(root.op, 'index', '')}"
    return f"{root.op.name}({', '.join([*(print_expression(s, names) for s in root.src), *shown])})"


_BLANK = r"(?:\s|//[^\n]*+)*+"  # possessive: no part of a comment is ever tried as a token
_TOKEN = re.compile(
    _BLANK + r'(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<ref>%\d+)|(?P<number>-?(?:\d[\d.]*(?:e[-+]?\d+)?|inf))'
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<punct>[(){}\[\]=:,@]))"
)


class _Parser:
    def __init__(self, text: str, literals: Mapping[str, Literal]) -> None:
        self.literals = literals
        self.tokens: list[tuple[str, str, int]] = []
        at, line = 0, 1
        while at < len(text):
            m = _TOKEN.match(text, at)
            if m is None:
                rest = re.sub(f"^{_BLANK}", "", text[at:])
                if not rest:
                    break
                raise InputError(f"unexpected {rest[:12]!r}", where=f"line {1 + text.count(chr(10), 0, len(text) - len(rest))}")
            line += text.count("\n", at, m.start(m.lastgroup or 0))
            self.tokens.append((m.lastgroup or "", m.group(m.lastgroup or 0), line))
            at = m.end()
        self.tokens.append(("end", "end of text", line))
        self.at = 0

    def fail(self, wanted: str) -> InputError:
        _, got, line = self.tokens[self.at]
        return InputError(f"{wanted} wanted, {got!r} found", where=f"line {line}")

    def peek(self) -> str:
        return self.tokens[self.at][1]

    def take(self, kind: str, exact: str | None = None) -> str:
        got, text, _ = self.tokens[self.at]
        if got != kind or (exact is not None and text != exact):
            raise self.fail(exact or f"a {kind}")
        self.at += 1
        return text

    def accept(self, punct: str) -> bool:
        if self.tokens[self.at][:2] == ("punct", punct):
            self.at += 1
            return True
        return False

    def string(self) -> str:
        raw = self.take("string")
        try:
            return str(json.loads(raw))
        except json.JSONDecodeError:
            raise InputError(f"malformed string {raw[:20]}", where=f"line {self.tokens[self.at - 1][2]}") from None

    def graph(self) -> Graph:
        self.take("word", "graph")
        name = self.string()
        self.take("punct", "{")
        scope: dict[str, Node] = {}
        inputs: list[Node] = []
        outputs: list[tuple[str, Node]] = []
        origins: dict[Node, str] = {}
        while not self.accept("}"):
            if self.peek() == "return":
                self.at += 1
                outputs.append((self.string(), self.reference(scope)))
            elif self.peek() == "origin":
                self.at += 1
                node = self.reference(scope)
                origins[node] = self.string()
            else:
                node = self.statement(scope)
                if node.op.name == "input":
                    inputs.append(node)
        self.take("end")
        return Graph(name, tuple(inputs), tuple(n for _, n in outputs), tuple(o for o, _ in outputs), origins)

    def reference(self, scope: Mapping[str, Node]) -> Node:
        name = self.take("ref")
        if name not in scope:
            self.at -= 1
            raise self.fail("a value defined above")
        return scope[name]

    def statement(self, scope: dict[str, Node]) -> Node:
        target = self.take("ref")
        self.take("punct", "=")
        op_name = self.take("word")
        cls = OPS.get(op_name)
        if cls is None:
            self.at -= 1
            raise self.fail("an operation")
        src: list[Node] = []
        if self.accept("("):
            while not self.accept(")"):
                src.append(self.reference(scope))
                if self.peek() != ")":
                    self.take("punct", ",")
        given: dict[str, object] = {}
        while not self.accept(":"):
            key = self.take("word")
            self.take("punct", "=")
            given[key] = self.value()
        declared = self.type()
        if self.accept("{"):
            given.update(self.region({f.name: str(f.type) for f in fields(cls)}))
        where = f"line {self.tokens[self.at - 1][2]}"
        try:
            node = Node(cls(**given), *src)
        except TilewrightError as error:
            raise InputError(f"{op_name}: {error.what}", where=where) from error
        except TypeError as error:
            raise InputError(f"{op_name}: {error}", where=where) from error
        if node.type != declared:
            raise InputError(f"{op_name} is {node.type}, the text says {declared}", where=where)
        scope[target] = node
        return node

    def region(self, field_types: Mapping[str, str]) -> dict[str, object]:
        scope: dict[str, Node] = {}
        found: dict[str, object] = {}
        while not self.accept("}"):
            if self.tokens[self.at][0] == "ref":
                self.statement(scope)
                continue
            label = self.take("word")
            roots = [self.reference(scope)]
            while self.accept(","):
                roots.append(self.reference(scope))
            found[label] = tuple(roots) if field_types.get(label, "").startswith("tuple") else roots[0]
        return found

    def type(self) -> TensorType | TupleType:
        if self.accept("("):
            items: list[TensorType] = []
            while not self.accept(")"):
                items.append(self.tensor_type(self.take("word")))
                if self.peek() != ")":
                    self.take("punct", ",")
            return TupleType(tuple(items))
        return self.tensor_type(self.take("word"))

    def tensor_type(self, word: str) -> TensorType:
        if word not in BY_NAME:
            self.at -= 1
            raise self.fail("a type")
        if BY_NAME[word] is OPAQUE:
            return TensorType(OPAQUE, ())
        self.take("punct", "[")
        shape: list[int] = []
        while not self.accept("]"):
            shape.append(self.integer())
            if self.peek() != "]":
                self.take("punct", ",")
        return TensorType(BY_NAME[word], tuple(shape))

    def integer(self) -> int:
        text = self.take("number")
        try:
            return int(text)
        except ValueError:
            self.at -= 1
            raise self.fail("an integer") from None

    def value(self) -> object:
        kind, text, _ = self.tokens[self.at]
        if kind == "string":
            return self.string()
        if kind == "number":
            self.at += 1
            return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        if self.accept("["):
            out: list[object] = []
            while not self.accept("]"):
                out.append(self.value())
                if self.peek() != "]":
                    self.take("punct", ",")
            return tuple(out)
        if self.accept("@"):
            name = self.string()
            if name not in self.literals:
                raise InputError(f"no data given for constant {name!r}", hint="pass it in `literals`")
            return self.literals[name]
        word = self.take("word")
        if word in ("true", "false", "none", "nan"):
            return {"true": True, "false": False, "none": None, "nan": math.nan}[word]
        if word in BY_NAME and self.peek() != "[" and word != "opaque":
            return BY_NAME[word]
        t = self.tensor_type(word)
        return self.inline(t) if self.accept("{") else t

    def inline(self, t: TensorType) -> Literal:
        values: list[float | int] = []
        while not self.accept("}"):
            values.append(cast("float | int", self.value()))
            if self.peek() != "}":
                self.take("punct", ",")
        if len(values) != t.elements:
            raise self.fail(f"{t.elements} elements of {t}")
        if t.dtype.name == "u64":
            values = [v - (1 << 64) if v >= 1 << 63 else v for v in values]
            return Literal(t, torch.tensor(values, dtype=torch.int64).view(torch.uint64).reshape(t.shape))
        flat = literal(cast("list[float]", values), t.dtype).tensor() if values else torch.empty(0, dtype=t.dtype.to_torch())
        return Literal(t, flat.reshape(t.shape))


def parse(text: str, literals: Mapping[str, Literal] | None = None) -> Graph:
    """The graph that `text` describes: the same nodes, not merely equal ones, as those it was printed from.

    Raises:
        InputError: malformed text, a type that is not the one inferred, or a large constant without data.
    """
    return _Parser(text, literals or {}).graph()
