"""Inline statements of a Gluon text, each written once as a constant."""

from __future__ import annotations

from tilewright.candidates.triton.expressions.text import Text
from tilewright.candidates.triton.hopper.w4.asm import Asm


class Statements:
    """Writes statements into a text.

    Args:
        text: of the kernel's body.
    """

    def __init__(self, text: Text) -> None:
        self.text = text
        self._known: dict[Asm, str] = {}

    def constants(self) -> str:
        """The module's lines that name them."""
        return "\n".join(
            f"{name} = gl.constexpr({a.text!r})\n{name}_C = gl.constexpr({a.constraints!r})" for a, name in self._known.items()
        )

    def do(self, a: Asm, *arguments: str) -> None:
        self.text.do(self._call(a, arguments, "gl.int32", pure=False))

    def some(self, a: Asm, kind: str, count: int, *arguments: str, pure: bool = False) -> list[str]:
        """Writes a statement; names of a statement's results."""
        t = self.text
        names = [f"r{len(t.lines)}_{i}" for i in range(count)]
        types = f"(gl.{kind},) * {count}" if count > 1 else f"gl.{kind}"
        t.do(f"{', '.join(names)} = {self._call(a, arguments, types, pure=pure)}")
        return names

    def assign(self, a: Asm, kind: str, names: list[str], *arguments: str) -> None:
        """Writes a statement whose results have these names, which may have had other values before."""
        types = f"(gl.{kind},) * {len(names)}" if len(names) > 1 else f"gl.{kind}"
        self.text.do(f"{', '.join(names)} = {self._call(a, arguments, types, pure=False)}")

    def _call(self, a: Asm, arguments: tuple[str, ...], types: str, *, pure: bool) -> str:
        name = self._known.setdefault(a, f"A{len(self._known)}")
        given = ", ".join(arguments)
        return f"gl.inline_asm_elementwise({name}, {name}_C, [{given}], dtype={types}, is_pure={pure}, pack=1)"
