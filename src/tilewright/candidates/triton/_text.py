"""The text of a kernel's body: lines, and expressions that are computed once."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


class Text:
    """Lines of a function's body in Triton's Python.

    Attributes:
        language: prefix of the language's names: "tl", or "gl" in a Gluon kernel.
        lines: what was written so far, indented.
    """

    def __init__(self, language: str = "tl", indent: int = 1) -> None:
        self.language, self.lines = language, list[str]()
        self._indent, self._count = indent, 0
        self._known: dict[str, str] = {}

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

    def do(self, line: str) -> None:
        """A statement."""
        self.lines.append("    " * self._indent + line)

    @contextmanager
    def block(self, header: str) -> Generator[None]:
        """What is written inside stands under `header`; nothing that is computed there is known after it."""
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

    def call(self, name: str, *arguments: str) -> str:
        """A function of the language, e.g. `call("where", mask, a, b)`."""
        return self.v(f"{self.language}.{name}({', '.join(arguments)})")

    def __str__(self) -> str:
        return "\n".join(self.lines)
