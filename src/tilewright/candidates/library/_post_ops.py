"""Epilogues that oneDNN does itself: a bias and one activation, on the f32 accumulator, before it rounds."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.ir.anchor import acc_of
from tilewright.ir.expression import REARRANGE
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Convert, Map, Param
from tilewright.schedule.problem import Problem

# Function of `map` -> oneDNN's post-op and its algorithm, as torch's `_linear_pointwise` names them.
ACTIVATIONS = {
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
    "logistic": ("sigmoid", ""),
}


@dataclass(frozen=True)
class PostOps:
    """The part of a store that the library computes.

    Attributes:
        done: the node of the store that the library's result stands for.
        bias: expression of [N] values that it adds, None for none.
        attr, algorithm: its activation.
    """

    done: Node
    bias: Node | None = None
    attr: str = "none"
    algorithm: str = ""


def read_post_ops(problem: Problem) -> PostOps:
    """The longest beginning of a single store that oneDNN computes: [+ bias][, activation][, rounding to the operands' type].

    What it gives is `done`, in the operands' type: for 16-bit operands the rounding must be part of it, or else nothing is.
    """
    acc = acc_of(problem.node)
    nothing = PostOps(acc)
    if len(problem.op.stores) != 1:
        return nothing
    readers: dict[Node, list[Node]] = {}
    for n in toposort(problem.op.stores):
        for s in n.src:
            readers.setdefault(s, []).append(n)

    def only_reader(n: Node) -> Node | None:
        found = readers.get(n, [])
        return found[0] if len(found) == 1 and n is not problem.op.stores[0] else None

    node, found = acc, nothing
    reader = only_reader(node)
    if reader is not None and isinstance(reader.op, Map) and reader.op.fn == "add":
        side = next((s for s in reader.src if s is not node), None)
        if side is not None and _is_row(side, problem.N, problem.lhs.dtype.bits):
            node, found = reader, PostOps(reader, side)
            reader = only_reader(node)
    if reader is not None and isinstance(reader.op, Map) and reader.op.fn in ACTIVATIONS:
        node, found = reader, PostOps(reader, found.bias, *ACTIVATIONS[reader.op.fn])
        reader = only_reader(node)
    if problem.lhs.dtype is problem.acc.dtype:
        return found
    if reader is None or not isinstance(reader.op, Convert):
        return nothing
    if reader.op.dtype is not problem.lhs.dtype or reader.op.overflow != "wrap":
        return nothing
    return PostOps(reader, found.bias, found.attr, found.algorithm)


def _is_row(side: Node, columns: int, bits: int) -> bool:
    """Tell whether a side input is one value a column, made by casts and views from a source that has no more than `bits`: the
    library takes the bias in the operands' type, and a wider one would lose precision."""
    if side.shape[-1:] != (columns,) or side.tensor.elements != columns:
        return False
    while isinstance(side.op, (Convert, *REARRANGE)):
        side = side.src[0]
    return isinstance(side.op, Param) and side.dtype.is_float and side.dtype.bits <= bits
