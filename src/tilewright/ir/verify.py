"""Checks of all that a graph must satisfy at any time. Run after reading, after every stage, and on anything parsed."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.errors import TypeMismatchError, UnsupportedError
from tilewright.ir.graph import Graph, Node, toposort
from tilewright.ir.ops import Acc, Call, Input, Item, Param, Write
from tilewright.ir.state import is_state
from tilewright.ir.types import TensorType, TupleType

MOST_AXES = 64  # that torch's kernels walk


def verify(graph: Graph) -> Graph:
    """The graph itself, if it is well formed.

    Raises:
        TypeMismatchError: says which node breaks which rule.
        UnsupportedError: a value has more axes than `MOST_AXES`.
    """
    if len(graph.outputs) != len(graph.output_names):
        raise TypeMismatchError(f"{len(graph.outputs)} outputs but {len(graph.output_names)} names", where=graph.name)
    labels = [n.op.label for n in graph.inputs if isinstance(n.op, Input)]
    if len(labels) != len(graph.inputs):
        raise TypeMismatchError("an input of the graph is not an input node", where=graph.name)
    if len(set(labels)) != len(labels):
        raise TypeMismatchError(f"two inputs share a name: {', '.join(labels)}", where=graph.name)
    for output in graph.outputs:
        if isinstance(output.type, TupleType):
            raise TypeMismatchError("a graph output is a tuple", where=graph.origin(output), hint="item(index=…) first")
    given = [n for n in graph.inputs if isinstance(n.op, Input) and not n.op.mutable]
    if graph.inputs[: len(given)] != tuple(given) or len(graph.inputs) - len(given) > len(graph.outputs):
        raise TypeMismatchError("inputs that a program keeps come last, and each has an output", where=graph.name)
    declared, readers = set(graph.inputs), graph.users()
    for node in graph.nodes():
        if isinstance(node.op, Write) and (len(readers[node.src[0]]) > 1 or not is_state(node.src[0])):
            raise TypeMismatchError("writes to what is read elsewhere, or is not kept", where=graph.origin(node))
        if isinstance(node.op, Input) and node not in declared:
            raise TypeMismatchError(f"reads input {node.op.label!r}, which the graph does not declare", where=graph.name)
        _verify_node(node, graph.origin(node))
    return graph


def _verify_node(node: Node, where: str) -> None:
    if isinstance(node.op, (Param, Acc)):
        raise TypeMismatchError(f"{node.op.name} stands outside an operation's expression", where=where)
    if not isinstance(node.op, (Call, Item)) and any(_is_opaque(s) for s in node.src):
        raise TypeMismatchError(f"{node.op.name} reads a value whose type is known only at run time", where=where)
    for tensor in node.type.items if isinstance(node.type, TupleType) else (node.type,):
        if any(d < 0 for d in tensor.shape):
            raise TypeMismatchError(f"{node.op.name} has a negative extent: {tensor}", where=where)
        if tensor.rank > MOST_AXES:
            raise UnsupportedError(f"{node.op.name} has {tensor.rank} axes", where=where, hint=f"{MOST_AXES} at most")
    for label, roots in node.op.regions().items():
        _verify_region(roots, f"{where}: {label}")


def _verify_region(roots: Sequence[Node], where: str) -> None:
    for inner in toposort(roots):
        if isinstance(inner.op, (Input, Call)) or inner.op.regions():
            raise TypeMismatchError(f"{inner.op.name} may not stand inside an expression", where=where)


def _is_opaque(node: Node) -> bool:
    return isinstance(node.type, TensorType) and node.type.dtype.kind == "opaque"
