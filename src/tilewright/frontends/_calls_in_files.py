"""Calls that a file brings with it: what one may name, and what is seen of it before anything runs.

A call made while a module or a model is read says what its program said. One in a `.tw` file says what the file's writer liked,
so the front end that evaluates it is asked first (`check_call`): what it does not vouch for is refused, as are calls into a
front end that cannot be asked.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

from tilewright.dtype import OPAQUE
from tilewright.errors import InputError, TilewrightError
from tilewright.frontends import ALLOW_CALLS
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Call, Item
from tilewright.ir.types import TensorType

if TYPE_CHECKING:
    import torch

    Shapes = dict[Node, tuple[torch.Tensor, ...]]


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
    maker = source.src[0] if isinstance(source.op, Item) else source
    if maker in known:
        return known[maker][index] if index < len(known[maker]) else None
    if not isinstance(source.type, TensorType) or source.dtype is OPAQUE:
        return None
    return torch.empty(source.shape, dtype=source.dtype.to_torch(), device="meta")
