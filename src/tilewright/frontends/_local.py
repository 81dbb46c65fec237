"""Programs on a mesh: of whole tensors, whose inputs a plan places, and of one rank, whose results' placements are followed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends._plan import as_placement
from tilewright.ir.graph import Graph, Node, label_of, substitute
from tilewright.ir.mesh import Mesh, Placement
from tilewright.ir.ops import AllGather, AllReduce, AllToAll, Collective, Own, Place, ReduceScatter, Reshape
from tilewright.ir.types import TensorType


def over_whole(graph: Graph, mesh: Mesh, plan: Mapping[str, object]) -> Graph:
    """A program over whole tensors, with its inputs and results placed as a plan says of them by name.

    Raises:
        InputError: a name is no input's or result's, or a placement none.
    """
    inputs, _ = _named(graph, plan)
    given = {n: Node(place_of(plan[name], n, mesh, name), n) for name, n in inputs.items() if name in plan}
    roots = substitute(graph.outputs, given)
    left = [
        Node(place_of(plan[name], n, mesh, name), n) if name in plan and name not in inputs else n
        for name, n in zip(graph.output_names, roots, strict=True)
    ]
    return replace(graph.with_outputs(left), mesh=mesh)


def one_ranks(graph: Graph, mesh: Mesh, plan: Mapping[str, object]) -> Graph:
    """A program for one rank, with what a plan says of its inputs and results by name; see `placed`.

    Raises:
        InputError: a name is no input's or result's, or a placement none.
        UnsupportedError: a result differs from rank to rank, and nothing says how.
    """
    inputs, outputs = _named(graph, plan)
    given, left = (
        {name: as_placement(plan[name], n.tensor.rank, mesh, f"plan of {name!r}") for name, n in side.items() if name in plan}
        for side in (inputs, outputs)
    )
    return placed(graph, mesh, given, left)


def _named(graph: Graph, plan: Mapping[str, object]) -> tuple[dict[str, Node], dict[str, Node]]:
    """Inputs and results by name, once the plan is seen to name no other."""
    inputs = {label_of(n): n for n in graph.inputs}
    outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
    unknown = [name for name in plan if name not in inputs and name not in outputs]
    if unknown:
        hint = f"its inputs are {', '.join(inputs) or 'none'}, its results {', '.join(outputs)}"
        what = f"the plan names {unknown[0]!r}, which is no part of the program"
        raise InputError(what, where="plan", hint=hint)
    return inputs, outputs


def place_of(said: object, node: Node, mesh: Mesh, name: str) -> Place:
    """The operation that places a value as a plan says."""
    lies = as_placement(said, node.tensor.rank, mesh, f"plan of {name!r}")
    return Place(lies.splits, lies.partial)


@dataclass(frozen=True)
class _Lies:
    """The ways in which a value differs from rank to rank.

    Attributes:
        splits: for each axis the mesh axes along which ranks hold parts of it.
        summed: mesh axes along which ranks hold summands.
        apart: mesh axes along which ranks hold other values in a way that has no word.
    """

    splits: tuple[tuple[str, ...], ...]
    summed: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """The mesh axes along which values differ at all."""
        return frozenset(n for names in self.splits for n in names) | self.summed | self.apart


def placed(graph: Graph, mesh: Mesh, given: Mapping[str, Placement], left: Mapping[str, Placement] | None = None) -> Graph:
    """A program for one rank, with what its inputs and results are parts of.

    Args:
        graph: the program.
        mesh: the ranks that run it.
        given: how inputs lie, by name; the others are whole on every rank.
        left: how results lie, by name, where that is said; the others are followed from the inputs.

    Raises:
        UnsupportedError: a result differs from rank to rank in a way that is neither parts nor summands.
    """
    lies: dict[Node, _Lies] = {}
    for node in (*graph.inputs, *graph.nodes()):
        if node in lies:
            continue
        if not isinstance(node.type, TensorType):
            lies[node] = _Lies((), apart=frozenset(n for s in node.src for n in lies[s].names))
        elif node in graph.inputs:
            placement = given.get(label_of(node), Placement.whole(node.tensor.rank))
            lies[node] = _Lies(placement.splits, frozenset(placement.partial))
        else:
            lies[node] = _of(node, [lies[s] for s in node.src])
    inputs = [given.get(label_of(n), Placement.whole(n.tensor.rank)) for n in graph.inputs]
    results: list[Placement] = []
    for name, node in zip(graph.output_names, graph.outputs, strict=True):
        found = lies[node]
        if left is not None and name in left:
            results.append(left[name])
        elif found.apart:
            along = ", ".join(sorted(found.apart))
            raise UnsupportedError(
                f"result {name!r} differs from rank to rank along {along}, and the program does not say how",
                where=graph.name,
                hint=f'plan={{"{name}": …}} with its placement',
            )
        else:
            results.append(Placement(found.splits, tuple(n for n, _ in mesh.axes if n in found.summed)))
    return replace(graph, mesh=mesh, placements=(*inputs, *results))


def _of(node: Node, src: Sequence[_Lies]) -> _Lies:
    """The ways of a node's result, given those of its sources."""
    blank = ((),) * node.tensor.rank
    if isinstance(node.op, Collective):
        return _moved(node, src[0])
    names = frozenset(n for s in src for n in s.names)
    if not names:
        return _Lies(blank)
    factors = () if any(not isinstance(s.type, TensorType) for s in node.src) else node.op.factors(node)
    if not factors or (isinstance(node.op, Reshape) and _ambiguous(node, src[0].splits)):
        return _Lies(blank, apart=names)
    splits: list[tuple[str, ...]] = [()] * node.tensor.rank
    summed, apart = set[str](), {n for s in src for n in s.apart}
    told: list[set[int]] = [set() for _ in src]
    for factor in factors:
        found = {s.splits[a] for s, a in zip(src, factor.axes, strict=True) if a is not None and s.splits[a]}
        for seen, axis in zip(told, factor.axes, strict=True):
            if axis is not None:
                seen.add(axis)
        if len(found) > 1:
            apart |= {n for ns in found for n in ns}
        elif found and factor.result is None:
            (summed if factor.fn == "add" else apart).update(*found)
        elif found:
            (splits[cast(int, factor.result)],) = found
    for s, seen in zip(src, told, strict=True):
        apart |= {n for axis, ns in enumerate(s.splits) if axis not in seen for n in ns}
    # A sum passes through what is linear in it alone, which is not known here.
    apart |= {n for s in src for n in s.summed} | {n for n in summed if any(n in ns for ns in splits)}
    twice = [n for ns in splits for n in ns]
    apart |= {n for n in twice if twice.count(n) > 1}
    kept = tuple(tuple(n for n in ns if n not in apart) for ns in splits)
    return _Lies(kept, frozenset(summed - apart), frozenset(apart))


def _ambiguous(node: Node, splits: Sequence[tuple[str, ...]]) -> bool:
    """Tell whether more than one reshape of whole tensors may stand behind one of parts: next to axes of one element, of which
    any may be a part of several."""
    before, after = node.src[0].shape, node.shape
    ends = {f.axes[0]: f.result for f in node.op.factors(node)}
    for axis, names in enumerate(splits):
        at = ends.get(axis)
        if names and before != after and (at is None or before[axis] == 1 or (at > 0 and after[at - 1] == 1)):
            return True
    return False


def _moved(node: Node, x: _Lies) -> _Lies:
    """The ways of the result of an operation between ranks."""
    op = cast(Collective, node.op)
    over = set(op.over)
    splits = [*x.splits]
    if isinstance(op, Own):
        if over & x.names:
            return _Lies(((),) * len(splits), apart=x.names | over)
        splits[op.axis] = (*splits[op.axis], *op.over)
        return _Lies(tuple(splits), x.summed, x.apart)
    summed, apart = x.summed - over, x.apart - over
    if isinstance(op, AllToAll):
        own = splits[op.join]
        if own[len(own) - len(op.over) :] != op.over or op.split == op.join:
            return _Lies(((),) * len(splits), apart=x.names | over)
        splits[op.join] = own[: len(own) - len(op.over)]
        splits[op.split] = (*splits[op.split], *op.over)
        return _Lies(tuple(splits), summed, apart)
    assert isinstance(op, (AllGather, AllReduce, ReduceScatter))
    inner = [ns for ns in splits if over & {*ns} and ns[len(ns) - len(over & {*ns}) :] != tuple(n for n in ns if n in over)]
    splits = [tuple(n for n in ns if n not in over) for ns in splits]
    if inner:  # parts that stand between those that were brought together
        apart |= {n for ns in inner for n in ns if n not in over}
    if isinstance(op, ReduceScatter):
        splits[op.axis] = (*splits[op.axis], *op.over)
    kept = tuple(tuple(n for n in ns if n not in apart) for ns in splits)
    return _Lies(kept, summed, apart)
