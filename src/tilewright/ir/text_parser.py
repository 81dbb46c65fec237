"""Reading the graph's textual form. The text may come from anywhere: the answer is a graph or an `InputError`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, NoReturn, TypeVar

import tilewright.ir.ops as _ops
from tilewright.dtype import BY_NAME, OPAQUE
from tilewright.errors import InputError, TilewrightError
from tilewright.ir.graph import OPS, Graph, Node, Op
from tilewright.ir.literal import Literal, literal
from tilewright.ir.types import TensorType, TupleType

assert _ops.__all__  # importing it registers every op
MAX_NESTING = 20

_BLANK = r"(?:\s|//[^\n]*+)*+"  # possessive: no part of a comment is ever tried as a token
_TOKEN = re.compile(
    _BLANK + r'(?:(?P<string>"(?:[^"\\\n]|\\.)*+")|(?P<ref>%[0-9]+)|(?P<number>-?(?:[0-9][0-9.]*(?:e[-+]?[0-9]+)?|inf\b))'
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<punct>[(){}\[\]=:,@]))"
)
_WORDS = {"true": True, "false": False, "none": None, "nan": math.nan}
T = TypeVar("T")


class _Parser:
    def __init__(self, text: str, literals: Mapping[str, Literal]) -> None:
        self.literals = literals
        self.tokens: list[tuple[str, str, int]] = []
        self.at = 0
        self._depth = 0
        at, line = 0, 1
        while at < len(text):
            m = _TOKEN.match(text, at)
            if m is None:
                rest = re.sub(f"^{_BLANK}", "", text[at:])
                if not rest:
                    break
                raise InputError(f"unexpected {rest[:12]!r}", where=f"line {1 + text.count(chr(10), 0, len(text) - len(rest))}")
            kind = str(m.lastgroup)
            line += text.count("\n", at, m.start(kind))
            self.tokens.append((kind, m.group(kind), line))
            at = m.end()
        self.tokens.append(("end", "end of text", line))

    def fail(self, wanted: str, at: int | None = None) -> NoReturn:
        _, got, line = self.tokens[self.at if at is None else at]
        raise InputError(f"{wanted} wanted, {got[:40]!r} found", where=f"line {line}")

    def refuse(self, what: str, line: int | None = None) -> NoReturn:
        """Something read already is wrong: `what`, in the line of the last token if not said."""
        raise InputError(what, where=f"line {line or self.tokens[self.at - 1][2]}")

    def peek(self) -> tuple[str, str]:
        return self.tokens[self.at][:2]

    def take(self, kind: str, exact: str | None = None) -> str:
        got, text, _ = self.tokens[self.at]
        if got != kind or (exact is not None and text != exact):
            self.fail(repr(exact) if exact else f"a {kind}")
        self.at += 1
        return text

    def accept(self, kind: str, text: str) -> bool:
        if self.peek() != (kind, text):
            return False
        self.at += 1
        return True

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
        while not self.accept("punct", "}"):
            if self.accept("word", "return"):
                outputs.append((self.string(), self.reference(scope)))
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
        return Graph(name, tuple(inputs), nodes, names, origins, tuple(notes))

    def reference(self, scope: Mapping[str, Node]) -> Node:
        name = self.take("ref")
        if name not in scope:
            self.fail("a value defined above", self.at - 1)
        return scope[name]

    def statement(self, scope: dict[str, Node]) -> Node:
        line = self.tokens[self.at][2]
        target = self.take("ref")
        if target in scope:
            self.refuse(f"{target} is defined twice")
        self.take("punct", "=")
        cls = OPS.get(self.take("word"))
        if cls is None:
            self.fail("an operation", self.at - 1)
        known = {f.name: f for f in fields(cls)}
        src = self.sequence(lambda: self.reference(scope), ")") if self.accept("punct", "(") else []
        given: dict[str, object] = {}
        while not self.accept("punct", ":"):
            key = self.attribute(cls, known, given, region=False)
            self.take("punct", "=")
            given[key] = self.value()
        declared = self.type()
        if self.accept("punct", "{"):
            if not any("Node" in str(f.type) for f in known.values()):
                self.refuse(f"{cls.name} has no expressions")
            self.nested(lambda: self.region(cls, known, given))
        for name, f in known.items():
            if name not in given and f.default is MISSING:
                self.refuse(f"{cls.name} has no {name}", line)
        try:
            node = Node(cls(**given), *src)
        except TilewrightError as error:
            raise InputError(f"{cls.name}: {error.what}", where=f"line {line}", hint=error.hint) from error
        if node.type != declared:
            self.refuse(f"{cls.name} is {node.type}, the text says {declared}", line)
        scope[target] = node
        return node

    def attribute(self, cls: type[Op], known: Mapping[str, Field[Any]], given: Mapping[str, object], *, region: bool) -> str:
        """The name of an attribute that may stand here: once, and as an expression only if it is one."""
        key = self.take("word")
        if key not in known or ("Node" in str(known[key].type)) is not region:
            self.refuse(f"{cls.name} has no {'expression' if region else 'attribute'} {key!r}")
        if key in given:
            self.refuse(f"{key} is given twice")
        return key

    def region(self, cls: type[Op], known: Mapping[str, Field[Any]], given: dict[str, object]) -> None:
        scope: dict[str, Node] = {}
        while not self.accept("punct", "}"):
            if self.peek()[0] == "ref":
                self.statement(scope)
                continue
            label = self.attribute(cls, known, given, region=True)
            roots = [self.reference(scope)]
            while self.accept("punct", ","):
                roots.append(self.reference(scope))
            several = str(known[label].type).startswith("tuple")
            if len(roots) > 1 and not several:
                self.refuse(f"{label} is one expression, not {len(roots)}")
            given[label] = tuple(roots) if several else roots[0]

    def type(self) -> TensorType | TupleType:
        if self.accept("punct", "("):
            return TupleType(tuple(self.sequence(lambda: self.tensor_type(self.take("word")), ")")))
        return self.tensor_type(self.take("word"))

    def tensor_type(self, word: str) -> TensorType:
        if word not in BY_NAME:
            self.fail("a type", self.at - 1)
        if BY_NAME[word] is OPAQUE:
            return TensorType(OPAQUE, ())
        self.take("punct", "[")
        return TensorType(BY_NAME[word], tuple(self.sequence(self.extent, "]")))

    def extent(self) -> int:
        found = self.number()
        if not isinstance(found, int) or found < 0:
            self.fail("an extent", self.at - 1)
        return found

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
        if kind == "number":
            return self.number()
        if self.accept("punct", "["):
            return self.nested(lambda: tuple(self.sequence(self.value, "]")))
        if self.accept("punct", "@"):
            name = self.string()
            if name not in self.literals:
                line = self.tokens[self.at - 1][2]
                raise InputError(f"no data given for constant {name!r}", where=f"line {line}", hint="pass it in `literals`")
            return self.literals[name]
        word = self.take("word")
        if word in _WORDS:
            return _WORDS[word]
        if word in BY_NAME and self.peek() != ("punct", "[") and word != "opaque":
            return BY_NAME[word]
        t = self.tensor_type(word)
        return self.constant(t) if self.accept("punct", "{") else t

    def constant(self, t: TensorType) -> Literal:
        line = self.tokens[self.at - 1][2]
        numbers = self.sequence(self.element, "}")
        if len(numbers) != t.elements:
            self.refuse(f"{len(numbers)} elements given for {t}", line)
        try:
            return Literal(t, literal(numbers, t.dtype).tensor().reshape(t.shape))
        except TilewrightError as error:
            self.refuse(error.what, line)

    def element(self) -> int | float:
        return math.nan if self.accept("word", "nan") else self.number()


def parse(text: str, literals: Mapping[str, Literal] | None = None) -> Graph:
    """The graph that `text` describes: the same nodes, not merely equal ones, as those it was printed from.

    Raises:
        InputError: malformed text, a type that is not the one inferred, or a large constant without data; says in which line.
    """
    return _Parser(text, literals or {}).graph()
