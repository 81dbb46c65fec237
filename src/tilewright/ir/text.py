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
      %6 = reduce(%2) fn="add" axes=[1] : f32[2]
      return "y" %6
    }

Attributes left out take their defaults; `//` starts a comment. Small constants stand in the text; a large one is a reference
`@"name"` to be found in the `literals` given to `parse`. Lines `origin %2 "…"` and `note "…"` keep what reports show.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from itertools import count
from typing import cast

import torch

from tilewright.dtype import U64, DType
from tilewright.ir.graph import Graph, Node, attributes, toposort
from tilewright.ir.literal import Literal, literal
from tilewright.ir.text_parser import parse
from tilewright.ir.types import TensorType

__all__ = ["parse", "print_expression", "print_graph", "print_with_literals"]

INLINE_ELEMENTS = 16
EXPRESSION_CHARACTERS = 2000


class _Printer:
    def __init__(self, literals: dict[str, Literal] | None = None) -> None:
        self.lines: list[str] = []
        self.literals: dict[str, Literal] = {} if literals is None else literals
        self._literal_names = {v: name for name, v in self.literals.items()}
        self._numbers = count()

    def block(self, roots: Sequence[Node], indent: str) -> dict[Node, str]:
        """Write what the roots need, each node once; gives the names. A region is a scope of its own."""
        local: dict[Node, str] = {}
        for node in toposort(roots):
            local[node] = f"%{next(self._numbers)}"
            self._node(node, local, indent)
        return local

    def _node(self, node: Node, local: Mapping[Node, str], indent: str) -> None:
        args = f"({', '.join(local[s] for s in node.src)})" if node.src else ""
        shown = [f"{k}={self.value(v)}" for k, v in attributes(node.op).items() if not _is_default(node, k, v)]
        head = " ".join([f"{local[node]} = {node.op.name}{args}", *shown])
        regions = node.op.regions()
        self.lines.append(f"{indent}{head} : {node.type}{' {' if regions else ''}")
        if regions:
            inner = self.block([r for roots in regions.values() for r in roots], indent + "  ")
            for label, roots in regions.items():
                self.lines.append(f"{indent}  {label} {', '.join(inner[r] for r in roots)}")
            self.lines.append(f"{indent}}}")

    def value(self, v: object) -> str:
        if isinstance(v, bool):
            return "true" if v else "false"
        if v is None:
            return "none"
        if isinstance(v, float):
            return repr(v)
        if isinstance(v, (int, DType, TensorType)):
            return str(v)
        if isinstance(v, str):
            return json.dumps(v)
        if isinstance(v, tuple):
            return f"[{', '.join(map(self.value, cast('tuple[object, ...]', v)))}]"
        if isinstance(v, Literal):
            return inline(v) or self._reference(v)
        raise TypeError(f"no textual form for {v!r}")

    def _reference(self, v: Literal) -> str:
        name = self._literal_names.get(v)
        if name is None:
            base = v.label or "constant"
            name = next(n for i in count() if (n := f"{base}.{i}" if i else base) not in self.literals)
            self._literal_names[v] = name
            self.literals[name] = v
        return f"@{json.dumps(name)}"


def inline(v: Literal) -> str | None:
    """A constant of few elements, written out; None if it has more, or a NaN whose bits the word `nan` would not give back."""
    d = v.type.dtype
    if v.type.elements > INLINE_ELEMENTS:
        return None
    flat = v.tensor().reshape(-1)
    if d.is_float:
        numbers: list[float] | list[int] = flat.to(torch.float64).tolist()
    else:
        wide = (flat.view(torch.int64) if d is U64 else flat.to(torch.int64)).tolist()
        numbers = [x & U64.max for x in wide] if d is U64 else wide
    if any(map(math.isnan, numbers)):
        plain = [math.nan if math.isnan(x) else x for x in numbers]  # without the sign that float64 keeps
        if Literal(v.type, literal(plain, d).tensor().reshape(v.type.shape)) != v:
            return None
    return f"{v.type}{{{', '.join(map(repr, numbers))}}}"


def _is_default(node: Node, name: str, value: object) -> bool:
    default = next(f.default for f in fields(node.op) if f.name == name)
    return default is not MISSING and default == value


def print_graph(graph: Graph) -> str:
    """The graph as text."""
    return print_with_literals(graph)[0]


def print_with_literals(graph: Graph, literals: dict[str, Literal] | None = None) -> tuple[str, dict[str, Literal]]:
    """The graph as text, and the large constants its `@"name"`s stand for.

    They are added to `literals`, if given: one that is there already keeps its name, so that several texts can share them.
    """
    p = _Printer(literals)
    local = p.block([*graph.inputs, *graph.outputs], "  ")
    lines = [f"  origin {name} {json.dumps(graph.origins[n])}" for n, name in local.items() if n in graph.origins]
    lines += [f"  note {json.dumps(note)}" for note in graph.notes]
    lines += [f"  return {json.dumps(name)} {local[n]}" for name, n in zip(graph.output_names, graph.outputs, strict=True)]
    return "\n".join([f"graph {json.dumps(graph.name)} {{", *p.lines, *lines, "}", ""]), p.literals


def print_expression(root: Node, names: Mapping[Node, str] | None = None) -> str:
    """One expression in a line, for reports: `convert(acc + param2, s8)` style, shared parts repeated.

    A part of more than `EXPRESSION_CHARACTERS` is shown as `op(…)`.
    """
    shown = dict(names or {})
    for node in toposort((root,)):
        if node not in shown:
            text = _expression(node, [shown[s] for s in node.src])
            shown[node] = text if len(text) <= EXPRESSION_CHARACTERS else f"{text[: text.index('(')]}(…)"
    return shown[root]


def _expression(node: Node, src: Sequence[str]) -> str:
    op = node.op
    if op.name == "acc":
        return "acc"
    if op.name == "param":
        return f"param{getattr(op, 'index', '')}"
    if op.name == "map":
        return f"{getattr(op, 'fn', '')}({', '.join(src)})"
    value = _Printer().value
    shown = [value(v) for k, v in attributes(op).items() if not _is_default(node, k, v) and k != "type"]
    return f"{op.name}({', '.join([*src, *shown])})"
