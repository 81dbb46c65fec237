"""Checks of all that a graph must satisfy at any time. Run after reading, after every stage, and on anything parsed."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.errors import TypeMismatchError, UnsupportedError
from tilewright.ir.expression import linear_in_acc
from tilewright.ir.graph import Graph, Node, toposort
from tilewright.ir.mesh import Mesh
from tilewright.ir.ops import Acc, AllReduce, Call, Collective, Gemm, Input, Item, Param, Place, ReduceScatter, Write
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
    _verify_mesh(graph)
    declared, readers = set(graph.inputs), graph.users()
    for node in graph.nodes():
        if isinstance(node.op, Write) and (len(readers[node.src[0]]) > 1 or not is_state(node.src[0])):
            raise TypeMismatchError("writes to what is read elsewhere, or is not kept", where=graph.origin(node))
        if isinstance(node.op, Input) and node not in declared:
            raise TypeMismatchError(f"reads input {node.op.label!r}, which the graph does not declare", where=graph.name)
        _verify_node(node, graph.origin(node))
    return graph


def _verify_mesh(graph: Graph) -> None:
    """Check that collective operations and placements are of the graph's mesh."""
    sizes = {} if graph.mesh is None else dict(graph.mesh.axes)
    for name, size in mesh_axes(graph.outputs).items():
        if graph.mesh is not None and sizes.get(name) != size:
            raise TypeMismatchError(f"an operation is over {name}={size}, on a mesh of {graph.mesh}", where=graph.name)
    placed = {n: n.op.placement for n in graph.nodes() if isinstance(n.op, Place)}
    if graph.local and placed:
        raise TypeMismatchError("a program for one rank places whole tensors", where=graph.origin(next(iter(placed))))
    if graph.local and len(graph.placements) != len(graph.inputs) + len(graph.outputs):
        what = f"{len(graph.placements)} placements of {len(graph.inputs)} inputs and {len(graph.outputs)} outputs"
        raise TypeMismatchError(what, where=graph.name)
    sides = zip((*graph.inputs, *graph.outputs), graph.placements, strict=True) if graph.local else ()
    for node, placement in (*placed.items(), *sides):
        unknown = [name for name in placement.names if name not in sizes]
        if unknown:
            hint = "Graph.mesh names its axes" if graph.mesh is None else f"the mesh is {graph.mesh}"
            raise TypeMismatchError(f"no mesh axis {unknown[0]!r}", where=graph.origin(node), hint=hint)
        if placement.rank != node.tensor.rank:
            raise TypeMismatchError(f"the placement {placement} is not of {node.type}", where=graph.origin(node))
        if not graph.local:
            assert graph.mesh is not None or not placement.names
            placement.local_shape(node.shape, graph.mesh or Mesh(()))


def mesh_axes(roots: Sequence[Node]) -> dict[str, int]:
    """The mesh axes along which the collective operations of a program run, with their numbers of ranks.

    Raises:
        TypeMismatchError: two operations disagree on an axis.
    """
    found: dict[str, int] = {}
    for node in toposort(roots):
        own = zip(node.op.over, node.op.sizes, strict=True) if isinstance(node.op, Collective) else ()
        inside = mesh_axes(node.op.region_roots()) if node.op.regions() else {}
        for name, size in (*own, *inside.items()):
            if found.setdefault(name, size) != size:
                raise TypeMismatchError(f"mesh axis {name!r} has {found[name]} ranks and {size}", where=node.op.name)
    return found


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
    for n in toposort(node.op.stores) if isinstance(node.op, Gemm) else ():
        if isinstance(n.op, (AllReduce, ReduceScatter)) and not linear_in_acc(n.src[0]):
            what = f"between acc and its {n.op.name} stands what is not linear in the sums of each rank"
            raise TypeMismatchError(what, where=where, hint="reduce first, and add a bias or apply a function behind it")


def _verify_region(roots: Sequence[Node], where: str) -> None:
    for inner in toposort(roots):
        if isinstance(inner.op, (Input, Call)) or inner.op.regions():
            raise TypeMismatchError(f"{inner.op.name} may not stand inside an expression", where=where)


def _is_opaque(node: Node) -> bool:
    return isinstance(node.type, TensorType) and node.type.dtype.kind == "opaque"
