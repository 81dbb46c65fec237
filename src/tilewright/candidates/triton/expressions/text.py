"""The text of a kernel's body: lines, expressions that are computed once, and numbers that it is given."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from tilewright.ir.extent import Extent, divides
from tilewright.schedule.candidate import Unsupported

Number = float | int
SIXTEEN = 16  # multiples of so much are told to Triton, which then reads 16 bytes at once
OPERATORS = ("add", "sub", "mul", "floordiv", "mod", "truediv", "divmod", "pow", "lshift", "rshift", "and", "or", "xor")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
MOST_EXTENT = 1 << 31  # of one that is an argument


class UnknownError(Exception):
    """Something was to be made of `OPEN`."""


def _unknown(*given: object) -> NoReturn:
    raise UnknownError("an open extent is known when its kernel runs")


class Open:
    """An extent in a configuration that is an argument of its kernel: nothing can be made of it before that runs."""

    def __repr__(self) -> str:
        return "OPEN"


for _name in ("bool", "index", "neg", "abs", "hash", *COMPARISONS, *(f"{way}{op}" for op in OPERATORS for way in ("", "r"))):
    setattr(Open, f"__{_name}__", _unknown)
OPEN = Open()


@dataclass(frozen=True)
class KernelSource:
    """A kernel's module.

    Attributes:
        text: the module.
        numbers: the last arguments of the kernel, by name, and what a launch passes for them; an open extent its value.
    """

    text: str
    numbers: Mapping[str, Number]

    @property
    def signature(self) -> dict[str, str]:
        """Triton's types of these arguments."""
        return {name: signature_of(value) for name, value in self.numbers.items()}


def signature_of(number: Number) -> str:
    """Triton's type of an argument; "i32:16" of an open extent that is a multiple of 16, whatever its dims."""
    if isinstance(number, Extent):
        return "i32:16" if divides(SIXTEEN, number) else "i32"
    return "i32" if isinstance(number, int) else "fp32"


class Text:
    """Lines of a function's body in Triton's Python.

    Attributes:
        language: prefix of the language's names: "tl", or "gl" in a Gluon kernel.
        lines: what was written so far, indented.
        numbers: arguments that hold data of the problem, such as scales, and their values: problems that differ in these alone
            have one text. To the machine such an argument is what a literal is, a constant that an instruction takes as it is.
    """

    def __init__(self, language: str = "tl", beside: Text | None = None) -> None:
        """`beside`: another function's text, with which this one shares numbers."""
        self.language, self.lines = language, list[str]()
        self._indent, self._count = 1, 0
        self._known: dict[str, str] = {}
        self.numbers: dict[str, Number] = {} if beside is None else beside.numbers
        self._named: dict[Hashable, str] = {} if beside is None else beside._named

    def v(self, expression: str) -> str:
        """The name of an expression's value; one that was computed before in this block or around it is not computed again.

        It may mention only names that are assigned once, or not again as long as this block lasts.
        """
        if expression.isidentifier():
            return expression
        name = self._known.get(expression)
        if name is None:
            self._count += 1
            name = self._known[expression] = f"v{self._count}"
            self.do(f"{name} = {expression}")
        return name

    def number(self, key: Hashable, value: Number) -> str:
        """The argument for a number: a float, passed as f32, or an integer of 32 bits.

        Zero, one and infinities, with which less is to be done, are written as they are; -0, which Triton reads as 0, is not.
        `key` says what the number stands for: equal ones that mean different things are two arguments, or they would be one in
        some problems and two in others.
        """
        if not math.isfinite(value):
            return f"float('{value}')"
        if abs(value) in (0, 1) and repr(value) != "-0.0":
            return repr(value)
        name = self._named.get(key)
        if name is None:
            name = self._named[key] = f"number{len(self.numbers)}"
            self.numbers[name] = value if isinstance(value, int) else ctypes.c_float(value).value
        return name

    def extent(self, x: int) -> str:
        """A whole number in arithmetic of places: itself, or where it is an open extent the argument that it is.

        Raises:
            Unsupported: 32 bits do not hold it for the shape at hand.
        """
        if not isinstance(x, Extent):
            return str(x)
        if not -MOST_EXTENT < x < MOST_EXTENT:
            raise Unsupported(f"the extent {x} is not counted in 31 bits")
        key = "extent", x.terms
        if key not in self._named:
            self._named[key] = f"extent{len(self.numbers)}"
            self.numbers[self._named[key]] = x
        return self._named[key]

    def stride(self, x: int) -> str:
        """A whole number by which places lie apart. An open one that is a multiple of 16 here is taken to be one for all shapes
        that the kernel serves, which a guard says: what begins there is read 16 bytes at a time."""
        return self.extent(x if divides(SIXTEEN, x) or x % SIXTEEN else x // SIXTEEN * SIXTEEN)

    def extents(self, config: object, names: Sequence[str]) -> dict[str, str]:
        """Fields and properties of a kernel's configuration that are open extents, of those with these names, and the arguments
        that they are."""
        values = {name: getattr(config, name) for name in names}
        return {name: self.extent(value) for name, value in values.items() if isinstance(value, Extent)}

    def do(self, line: str) -> None:
        """Add a statement."""
        self.lines.append("    " * self._indent + line)

    @contextmanager
    def block(self, header: str) -> Generator[None]:
        """Indents what is written inside under `header`; nothing that is computed there is known after it."""
        self.do(header)
        outside, count = dict(self._known), len(self.lines)
        self._indent += 1
        try:
            yield
        finally:
            if len(self.lines) == count:
                self.do("pass")
            self._indent -= 1
            self._known = outside

    def masked_if_ragged(self, mask: str) -> Generator[str | None]:
        """Goes through both branches of the kernel's condition `ragged`: with the mask where it holds, else with None."""
        for header, inside in (("if ragged:", mask), ("else:", None)):
            with self.block(header):
                yield inside

    def call(self, name: str, *arguments: str) -> str:
        """A function of the language, e.g. `call("where", mask, a, b)`."""
        return self.v(f"{self.language}.{name}({', '.join(arguments)})")

    def __str__(self) -> str:
        return "\n".join(self.lines)
