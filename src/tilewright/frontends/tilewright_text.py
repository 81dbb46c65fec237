"""The graph's own textual form as a program: `.tw` files, and text that begins with `graph "name" {`; and the graph of a saved
program, a `.twp` file, of which nothing else is looked at.

Constants too large for a file's text are looked for in `constants.npz` in its folder. The writer of a `.tw` file may put
anything into a call, so the front end that evaluates it is asked first (`check_call`). A call is refused if its front end does
not vouch for it, or cannot be asked.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.dtype import OPAQUE
from tilewright.errors import InputError, TilewrightError
from tilewright.files import SAVED
from tilewright.frontends import ALLOW_CALLS, LoadOptions
from tilewright.ir.artefact import Container, Manifest
from tilewright.ir.graph import Graph, Node
from tilewright.ir.literal import Literal
from tilewright.ir.literal_file import FILE, read_literals
from tilewright.ir.ops import Call, Item, maker_of
from tilewright.ir.text import parse
from tilewright.ir.types import TensorType

if TYPE_CHECKING:
    import torch

    Shapes = dict[Node, tuple[torch.Tensor, ...]]


SUFFIX = ".tw"
_HEAD = re.compile(r'(?:\s|//[^\n]*+)*+graph\s+"')


def accepts(program: object) -> bool:
    """A path that ends in .tw or .twp, or text that begins as the textual form does."""
    if isinstance(program, Path):
        return program.suffix.lower() in (SUFFIX, SAVED)
    return isinstance(program, str) and _HEAD.match(program) is not None


def load(program: object, options: LoadOptions) -> Graph:
    """The graph the text describes. Its shapes are written out, so `options` has nothing to bind.

    Raises:
        InputError: not UTF-8, malformed, damaged, it refers to a constant too large to stand in the text, or it calls what a
            file may not and `options` do not allow it.
    """
    where = str(program) if isinstance(program, Path) else "text"
    graph = _saved(program) if isinstance(program, Path) and program.suffix.lower() == SAVED else _written(program, where)
    if not options.allow_calls:
        try:
            check_calls(graph)
        except TilewrightError as error:
            raise type(error)(error.what, where=", ".join(p for p in (where, error.where) if p), hint=error.hint) from error
    return graph


def _saved(program: Path) -> Graph:
    """The graph of a saved program as it was read, with a copy of its state."""
    container = Container(program)
    graphs = container.decoded(Manifest).program
    return container.graph(graphs.source, graphs, container.state(graphs))


def _written(program: object, where: str) -> Graph:
    """The graph of a text."""
    try:
        text = program.read_text("utf-8") if isinstance(program, Path) else str(program)
    except UnicodeDecodeError as error:
        raise InputError(f"byte {error.start} is not UTF-8 text", where=where) from error
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=where) from error
    try:
        return parse(text, _constants(program, text))
    except InputError as error:
        large = error.what.startswith("no data given for constant")
        hint = (
            f"text holds small constants only: {FILE} beside it holds the others, as --dump writes it" if large else error.hint
        )
        raise InputError(error.what, where=", ".join(p for p in (where, error.where) if p), hint=hint) from error


def _constants(program: object, text: str) -> dict[str, Literal]:
    """Constants beside a file whose text names some."""
    if not isinstance(program, Path) or '@"' not in text or not program.with_name(FILE).is_file():
        return {}
    return read_literals(program.with_name(FILE))


def check_calls(graph: Graph) -> None:
    """See that every call in a graph from a file is one that a file may make.

    Raises:
        InputError: one is not, or its payload is malformed.
        TypeMismatchError: one gives other types than it declares.
        UnsupportedError: nothing can evaluate one.
    """
    known: Shapes = {}
    for node in graph.nodes():
        if isinstance(node.op, Call):
            try:
                known[node] = _checked(node.op, [_shape_of(s, known) for s in node.src])
            except TilewrightError as error:
                where = f"{node.op.library} {node.op.target}"
                raise type(error)(error.what, where=where, hint=error.hint) from error


def _checked(call: Call, sources: list[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    name = f"tilewright.frontends.{call.library}"
    known = call.library.isidentifier() and (name in sys.modules or importlib.util.find_spec(name) is not None)
    check = getattr(importlib.import_module(name), "check_call", None) if known else None
    if check is None:
        raise InputError(f"calls into {call.library!r}, which does not say what a file may call", hint=ALLOW_CALLS)
    return tuple(check(call, sources))


def _shape_of(source: Node, known: Shapes) -> torch.Tensor | None:
    """A tensor without data for a call's operand; None if only the running program knows its shape."""
    import torch

    index = source.op.index if isinstance(source.op, Item) else 0
    maker = maker_of(source)
    if maker in known:
        return known[maker][index] if index < len(known[maker]) else None
    if not isinstance(source.type, TensorType) or source.dtype is OPAQUE:
        return None
    return torch.empty(source.shape, dtype=source.dtype.to_torch(), device="meta")
