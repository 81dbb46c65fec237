"""The graph's own textual form as a program: `.tw` files, and text that begins with `graph "name" {`.

Constants too large for a file's text are looked for in `constants.npz` in its folder.
"""

from __future__ import annotations

import re
from pathlib import Path

from tilewright.errors import InputError, TilewrightError
from tilewright.frontends import LoadOptions
from tilewright.frontends._calls_in_files import check_calls
from tilewright.ir.graph import Graph
from tilewright.ir.literal import Literal
from tilewright.ir.literal_file import FILE, read_literals
from tilewright.ir.text import parse

SUFFIX = ".tw"
_HEAD = re.compile(r'(?:\s|//[^\n]*+)*+graph\s+"')


def accepts(program: object) -> bool:
    """A path that ends in .tw, or text that begins as the textual form does."""
    if isinstance(program, Path):
        return program.suffix.lower() == SUFFIX
    return isinstance(program, str) and _HEAD.match(program) is not None


def load(program: object, options: LoadOptions) -> Graph:
    """The graph the text describes. Its shapes are written out, so `options` has nothing to bind.

    Raises:
        InputError: not UTF-8, malformed, it refers to a constant too large to stand in the text, or it calls what a file may
            not and `options` do not allow it.
    """
    where = str(program) if isinstance(program, Path) else "text"
    try:
        text = program.read_text("utf-8") if isinstance(program, Path) else str(program)
    except UnicodeDecodeError as error:
        raise InputError(f"byte {error.start} is not UTF-8 text", where=where) from error
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=where) from error
    try:
        graph = parse(text, _constants(program, text))
    except InputError as error:
        large = error.what.startswith("no data given for constant")
        hint = (
            f"text holds small constants only: {FILE} beside it holds the others, as --dump writes it" if large else error.hint
        )
        raise InputError(error.what, where=", ".join(p for p in (where, error.where) if p), hint=hint) from error
    if not options.allow_calls:
        try:
            check_calls(graph)
        except TilewrightError as error:
            raise type(error)(error.what, where=", ".join(p for p in (where, error.where) if p), hint=error.hint) from error
    return graph


def _constants(program: object, text: str) -> dict[str, Literal]:
    """Constants beside a file whose text names some."""
    if not isinstance(program, Path) or '@"' not in text or not program.with_name(FILE).is_file():
        return {}
    return read_literals(program.with_name(FILE))
