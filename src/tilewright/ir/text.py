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

Extents that are open (`ir/extent.py`) are written out, as in `f32[batch,seq*768]`; a line for each dim comes first,
`dim seq low=1 high=512 hint=31`, and one for each guard, `guard seq < 64`. Attributes left out take their defaults; `//` starts
a comment. A program for several ranks has a line `mesh "dp=2,tp=4"`; one rank's program also says how inputs and outputs lie:
`part %0 splits=[["tp"], []] partial=[]`, `return "y" %6 splits=[[], []] partial=["tp"]`. Small constants stand in the text; a
large one is a reference `@"name"` to be found in the `literals` given to `parse`. Lines `origin %2 "…"` and `note "…"` keep
what reports show.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache, lru_cache
from itertools import count
from typing import NamedTuple, NoReturn, TypeVar, cast

import torch

import tilewright.ir.ops as _ops
from tilewright.dtype import BY_NAME, OPAQUE, U64, DType
from tilewright.errors import InputError, TilewrightError, TypeMismatchError
from tilewright.ir.dims import Dim, Guard, Scope
from tilewright.ir.extent import Extent, bounds_of, hint_of
from tilewright.ir.graph import OPS, Graph, Node, Op, attributes, toposort
from tilewright.ir.instance import dims_of
from tilewright.ir.literal import Literal, literal
from tilewright.ir.mesh import Mesh, Placement
from tilewright.ir.ops import Place
from tilewright.ir.tokens import Tokens
from tilewright.ir.types import TensorType, TupleType

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
        if isinstance(v, (int, Extent, DType, TensorType)):
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
    scope = dims_of(graph)
    first = [] if scope is None else [f"  {line}" for line in _of_scope(scope)]
    if graph.mesh is not None:
        first.append(f"  mesh {json.dumps(str(graph.mesh))}")
    sides = zip((*graph.inputs, *graph.outputs), graph.placements, strict=True) if graph.local else ()
    shown = [f" splits={p.value(lies.splits)} partial={p.value(lies.partial)}" for _, lies in sides]
    given, left = shown[: len(graph.inputs)], shown[len(graph.inputs) :] or [""] * len(graph.outputs)
    lines = [f"  origin {name} {json.dumps(graph.origins[n])}" for n, name in local.items() if n in graph.origins]
    lines += [f"  note {json.dumps(note)}" for note in graph.notes]
    lines += [f"  part {local[n]}{lies}" for n, lies in zip(graph.inputs, given, strict=False)]
    named = zip(graph.output_names, graph.outputs, left, strict=True)
    lines += [f"  return {json.dumps(name)} {local[n]}{lies}" for name, n, lies in named]
    return "\n".join([f"graph {json.dumps(graph.name)} {{", *first, *p.lines, *lines, "}", ""]), p.literals


def _of_scope(scope: Scope) -> list[str]:
    """The lines for dims and guards; facts that were found out otherwise are comments."""
    lines: list[str] = []
    for dim in scope.dims.values():
        by = f" multiple_of={dim.multiple_of}" if dim.multiple_of > 1 else ""
        lines.append(f"dim {dim.name} low={dim.low} high={dim.high}{by} hint={scope.hints[dim.name]}")
    return [*lines, *(f"guard {g}" if isinstance(g, Guard) else f"// found: {g}" for g in scope.guards)]


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


assert _ops.__all__  # importing it registers every op
MAX_NESTING = 20

_BLANK = r"(?:\s|//[^\n]*+)*+"  # possessive: no part of a comment is ever tried as a token
_TYPE = rf"(?:{'|'.join(n for n in BY_NAME if n != OPAQUE.name)})\[(?:[0-9]{{1,18}}(?:,[0-9]{{1,18}})*)?\]"  # extents are plain
_TOKEN = re.compile(
    _BLANK + r'(?:(?P<string>"(?:[^"\\\n]|\\.)*+")|(?P<ref>%[0-9]+)|(?P<number>-?(?:[0-9][0-9.]*(?:e[-+]?[0-9]+)?|inf\b))'
    rf"|(?P<type>{_TYPE})"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<punct>[=!]=|>=|[(){}\[\]=:,@*%+<-])|(?P<end>\Z)|(?P<other>\S))"
)
_ARITHMETIC = (("punct", "*"), ("punct", "+"), ("punct", "-"))
_WORDS = {"true": True, "false": False, "none": None, "nan": math.nan}
T = TypeVar("T")


class _Attribute(NamedTuple):
    """An attribute of an operation: an expression (`region`), or `several` of them; `needed` if it has no default."""

    region: bool
    several: bool
    needed: bool


@cache
def _attributes(cls: type[Op]) -> dict[str, _Attribute]:
    said = {f.name: (str(f.type), f.default is MISSING) for f in fields(cls)}
    return {name: _Attribute("Node" in of, of.startswith("tuple"), needed) for name, (of, needed) in said.items()}


@lru_cache(maxsize=4096)
def _plain(text: str) -> TensorType:
    """The type that one token says."""
    name, _, extents = text[:-1].partition("[")
    return TensorType(BY_NAME[name], tuple(map(int, extents.split(","))) if extents else ())


class _Parser(Tokens):
    def __init__(self, text: str, literals: Mapping[str, Literal], scope: Scope) -> None:
        self.literals = literals
        self.scope = scope
        self.text = text
        self.at = 0
        self._depth = 0
        self.tokens: list[tuple[str, str, int]] = []
        end = 0
        for m in _TOKEN.finditer(text):  # which leaves nothing out, as anything at all is a token
            kind = str(m.lastgroup)
            if kind == "other":
                at = m.start(kind)
                raise InputError(f"unexpected {text[at : at + 12]!r}", where=self.where(at))
            if kind == "end":
                break
            end = m.end()
            self.tokens.append((kind, m[kind], end))
        self.tokens.append(("end", "end of text", end))

    def where(self, place: int) -> str:
        """The line in which the text's character of a number stands."""
        return f"line {1 + self.text.count(chr(10), 0, place)}"

    def fail(self, wanted: str, at: int | None = None) -> NoReturn:
        _, got, place = self.tokens[self.at if at is None else at]
        raise InputError(f"{wanted} wanted, {got[:40]!r} found", where=self.where(place))

    def refuse(self, what: str, place: int | None = None) -> NoReturn:
        """Something read already is wrong: `what`, in the line of the last token if no place is said."""
        raise InputError(what, where=self.where(self.tokens[self.at - 1][2] if place is None else place))

    def take(self, kind: str, exact: str | None = None) -> str:
        got, text, _ = self.tokens[self.at]
        if got != kind or (exact is not None and text != exact):
            self.fail(repr(exact) if exact else f"a {kind}")
        self.at += 1
        return text

    def sequence(self, item: Callable[[], T], close: str) -> list[T]:
        """Items between commas, up to and with the closing mark."""
        found: list[T] = []
        while not self.accept("punct", close):
            if found:
                self.take("punct", ",")
                if self.accept("punct", close):
                    break
            found.append(item())
        return found

    def nested(self, read: Callable[[], T]) -> T:
        """Call `read`, unless it is nested too deeply: recursion must end before Python's does."""
        self._depth += 1
        if self._depth > MAX_NESTING:
            self.refuse(f"nested more than {MAX_NESTING} deep")
        found = read()
        self._depth -= 1
        return found

    def string(self) -> str:
        raw = self.take("string")
        try:
            return str(json.loads(raw))
        except json.JSONDecodeError:
            self.refuse(f"malformed string {raw[:20]}")

    def graph(self) -> Graph:
        self.take("word", "graph")
        name = self.string()
        self.take("punct", "{")
        scope: dict[str, Node] = {}
        inputs: dict[Node, None] = {}
        outputs: list[tuple[str, Node]] = []
        origins: dict[Node, str] = {}
        notes: list[str] = []
        mesh: Mesh | None = None
        parts: dict[Node, Placement] = {}
        left: list[Placement] = []
        while not self.accept("punct", "}"):
            if self.accept("word", "dim"):
                self.dim()
            elif self.accept("word", "guard"):
                self.guard()
            elif self.accept("word", "return"):
                outputs.append((self.string(), self.reference(scope)))
                if self.peek() == ("word", "splits"):
                    left.append(self.placement())
            elif self.accept("word", "mesh"):
                mesh = Mesh.parse(self.string())
            elif self.accept("word", "part"):
                node = self.reference(scope)
                parts[node] = self.placement()
            elif self.accept("word", "origin"):
                node = self.reference(scope)
                origins[node] = self.string()
            elif self.accept("word", "note"):
                notes.append(self.string())
            else:
                node = self.statement(scope)
                if node.op.name == "input":
                    inputs[node] = None
        self.take("end")
        names, nodes = tuple(o for o, _ in outputs), tuple(n for _, n in outputs)
        if (parts or left) and (len(left) != len(outputs) or [*parts] != [*inputs]):
            self.refuse("placements are wanted of every input and output, in order, or of none")
        placements = (*parts.values(), *left)
        return Graph(name, tuple(inputs), nodes, names, origins, tuple(notes), mesh=mesh, placements=placements)

    def placement(self) -> Placement:
        """The mesh axes that split each axis, and those over which values are summands."""
        given: list[object] = []
        for key in ("splits", "partial"):
            self.take("word", key)
            self.take("punct", "=")
            given.append(self.value())
        try:
            return Place(*given).placement  # type: ignore[arg-type]
        except TypeMismatchError as error:
            self.refuse(error.what)

    def reference(self, scope: Mapping[str, Node]) -> Node:
        name = self.take("ref")
        if name not in scope:
            self.fail("a value defined above", self.at - 1)
        return scope[name]

    def statement(self, scope: dict[str, Node]) -> Node:
        place = self.tokens[self.at][2]
        target = self.take("ref")
        if target in scope:
            self.refuse(f"{target} is defined twice")
        self.take("punct", "=")
        cls = OPS.get(self.take("word"))
        if cls is None:
            self.fail("an operation", self.at - 1)
        known = _attributes(cls)
        src = self.sequence(lambda: self.reference(scope), ")") if self.accept("punct", "(") else []
        given: dict[str, object] = {}
        while not self.accept("punct", ":"):
            key = self.attribute(cls, known, given, region=False)
            self.take("punct", "=")
            given[key] = self.value()
        declared = self.type()
        if self.accept("punct", "{"):
            if not any(a.region for a in known.values()):
                self.refuse(f"{cls.name} has no expressions")
            self.nested(lambda: self.region(cls, known, given))
        for name, attribute in known.items():
            if name not in given and attribute.needed:
                self.refuse(f"{cls.name} has no {name}", place)
        try:
            node = Node(cls(**given), *src)
        except TilewrightError as error:
            raise InputError(f"{cls.name}: {error.what}", where=self.where(place), hint=error.hint) from error
        if node.type != declared:
            self.refuse(f"{cls.name} is {node.type}, the text says {declared}", place)
        scope[target] = node
        return node

    def attribute(self, cls: type[Op], known: Mapping[str, _Attribute], given: Mapping[str, object], *, region: bool) -> str:
        """The name of an attribute that may stand here: once, and as an expression only if it is one."""
        key = self.take("word")
        if key not in known or known[key].region is not region:
            self.refuse(f"{cls.name} has no {'expression' if region else 'attribute'} {key!r}")
        if key in given:
            self.refuse(f"{key} is given twice")
        return key

    def region(self, cls: type[Op], known: Mapping[str, _Attribute], given: dict[str, object]) -> None:
        scope: dict[str, Node] = {}
        while not self.accept("punct", "}"):
            if self.peek()[0] == "ref":
                self.statement(scope)
                continue
            label = self.attribute(cls, known, given, region=True)
            roots = [self.reference(scope)]
            while self.accept("punct", ","):
                roots.append(self.reference(scope))
            several = known[label].several
            if len(roots) > 1 and not several:
                self.refuse(f"{label} is one expression, not {len(roots)}")
            given[label] = tuple(roots) if several else roots[0]

    def type(self) -> TensorType | TupleType:
        if self.accept("punct", "("):
            return TupleType(tuple(self.sequence(self.tensor_type, ")")))
        return self.tensor_type()

    def tensor_type(self) -> TensorType:
        plain = self.accept("type")
        if plain is not None:
            return _plain(plain)
        word = self.take("word")
        if word not in BY_NAME:
            self.fail("a type", self.at - 1)
        if BY_NAME[word] is OPAQUE:
            return TensorType(OPAQUE, ())
        self.take("punct", "[")
        return TensorType(BY_NAME[word], tuple(self.sequence(self.extent, "]")))

    def extent(self) -> int:
        plain = self.peek()[0] == "number" and self.after() not in _ARITHMETIC
        found = self.number() if plain else self.whole()
        if not isinstance(found, (int, Extent)) or hint_of(found) < 0:
            self.fail("an extent", self.at - 1)
        return found

    def whole(self) -> int:
        """A whole number, or a polynomial in dims: terms of factors, in brackets where one is a quotient or remainder."""
        total = 0
        sign = -1 if self.accept("punct", "-") else 1
        while True:
            product = self.factor()
            while self.accept("punct", "*"):
                product = product * self.factor()
            total = total + sign * product
            if self.accept("punct", "+"):
                sign = 1
            elif self.accept("punct", "-"):
                sign = -1
            else:
                return total

    def factor(self) -> int:
        if self.accept("punct", "("):
            found = self.nested(self.whole)
            if self.accept("word", "div"):
                found = found // self.divisor()
            elif self.accept("punct", "%"):
                found = found % self.divisor()
            self.take("punct", ")")
            return found
        if self.peek()[0] == "word":
            name = self.take("word")
            if name not in self.scope.dims:
                self.fail("a dim", self.at - 1)
            return self.scope.extent(self.scope.dims[name])
        found = self.number()
        if not isinstance(found, int):
            self.fail("a whole number", self.at - 1)
        return found

    def divisor(self) -> int:
        found = self.factor()
        if bounds_of(found)[0] <= 0:
            self.refuse(f"{found} may divide by nothing")
        return found

    def dim(self) -> None:
        """A dim's line: its name, bounds and hint."""
        name, given = self.take("word"), dict[str, int]()
        while self.peek()[0] == "word" and self.peek()[1] in ("low", "high", "multiple_of", "hint"):
            key = self.take("word")
            self.take("punct", "=")
            given[key] = self.factor()
        hint = given.pop("hint", None)
        try:
            dim = Dim(name, **given)
            if hint is not None:
                self.scope.expect({name: hint})
            self.scope.extent(dim)
        except InputError as error:
            self.refuse(error.what)

    def guard(self) -> None:
        """A guard's line: two extents with a relation between them."""
        left = self.whole()
        sign = next((s for s in ("==", "!=", "<", ">=") if self.accept("punct", s)), None)
        if sign is None:
            self.fail("==, !=, < or >=")
        guard = Guard("==" if sign in ("==", "!=") else "<", left, self.whole(), sign in ("==", "<"))
        self.scope.guards[guard] = None

    def after(self) -> tuple[str, str]:
        """The kind and text of the token after the next."""
        kind, text, _ = self.tokens[min(self.at + 1, len(self.tokens) - 1)]
        return kind, text

    def number(self) -> int | float:
        text = self.take("number")
        try:
            return int(text) if text.lstrip("-").isdigit() else float(text)
        except ValueError:
            self.fail("a number", self.at - 1)

    def value(self) -> object:
        kind, _ = self.peek()
        if kind == "string":
            return self.string()
        if kind == "number" and self.after() not in _ARITHMETIC:
            return self.number()
        if kind == "number" or self.peek() in (("punct", "("), ("punct", "-")) or self.peek()[1] in self.scope.dims:
            return self.whole()
        if self.accept("punct", "["):
            return self.nested(lambda: tuple(self.sequence(self.value, "]")))
        if self.accept("punct", "@"):
            name = self.string()
            if name not in self.literals:
                where = self.where(self.tokens[self.at - 1][2])
                raise InputError(f"no data given for constant {name!r}", where=where, hint="pass it in `literals`")
            return self.literals[name]
        if kind == "word":
            _, word, _ = self.tokens[self.at]
            if word in _WORDS or (word in BY_NAME and self.after() != ("punct", "[") and word != "opaque"):
                self.at += 1
                return _WORDS[word] if word in _WORDS else BY_NAME[word]
        t = self.tensor_type()
        return self.constant(t) if self.accept("punct", "{") else t

    def constant(self, t: TensorType) -> Literal:
        place = self.tokens[self.at - 1][2]
        numbers = self.sequence(self.element, "}")
        if len(numbers) != t.elements:
            self.refuse(f"{len(numbers)} elements given for {t}", place)
        try:
            return Literal(t, literal(numbers, t.dtype).tensor().reshape(t.shape))
        except TilewrightError as error:
            self.refuse(error.what, place)
        except (TypeError, RuntimeError):  # no elements, and an extent that no tensor can have
            self.refuse(f"no constant can be {t}", place)

    def element(self) -> int | float:
        return math.nan if self.accept("word", "nan") else self.number()


def parse(text: str, literals: Mapping[str, Literal] | None = None, scope: Scope | None = None) -> Graph:
    """The graph that `text` describes: the same nodes, not merely equal ones, as those it was printed from. (Where extents are
    open, the same if their `scope` is given.)

    Raises:
        InputError: malformed text, a type that is not the one inferred, or a large constant without data; says in which line.
    """
    return _Parser(text, literals or {}, scope or Scope()).graph()
