"""A graph for values of its dims: the same nodes with numbers for extents.

Nothing is read, rewritten or evaluated for that. What holds no open extent stays the very same node, weights above all, so
whatever was made for it once (a value, a packing) serves every instance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch

from tilewright.errors import InputError
from tilewright.ir.build import extents
from tilewright.ir.dims import Scope, scope_of, solve
from tilewright.ir.extent import Extent, extent_at
from tilewright.ir.graph import Graph, Node, Op, toposort
from tilewright.ir.ops import Broadcast, Extents, Reshape, Slice
from tilewright.ir.types import TensorType


def dims_of(graph: Graph) -> Scope | None:
    """The scope of a graph's open extents; None if its inputs have none."""
    return scope_of(d for n in graph.inputs for d in n.tensor.shape)


def values_for(inputs: Iterable[tuple[str, TensorType]], shapes: Mapping[str, Sequence[int]], where: str) -> dict[str, int]:
    """The values of dims, by name, for which inputs of these names and types have these shapes.

    Raises:
        InputError: a shape is missing, has another rank, or is none that the dims allow.
    """
    given: list[tuple[str, Sequence[int], Sequence[int]]] = []
    for name, t in inputs:
        if not t.open:
            continue
        if name not in shapes:
            raise InputError(f"no value for input {name!r}", where=where, hint=f"it is {t}")
        if len(shapes[name]) != t.rank:
            raise InputError(f"shape {list(shapes[name])} given, {t} wanted", where=f"input {name!r}")
        given.append((name, t.shape, shapes[name]))
    return solve(given)


def instance(graph: Graph, values: Mapping[str, int]) -> Graph:
    """The graph for values of its dims by name. They are to satisfy the guards of its scope, which nobody looks at here.

    Raises:
        TypeMismatchError: they do not, and nodes do not fit together.
    """
    return instance_of(graph, values)[0]


def _sized(state: torch.Tensor, node: Node) -> torch.Tensor:
    """State of an instance: that of the program, unless it is without data and of another shape here."""
    same = not state.is_meta or tuple(state.shape) == node.shape
    return state if same else torch.empty(node.shape, dtype=state.dtype, device="meta")


def instance_of(graph: Graph, values: Mapping[str, int]) -> tuple[Graph, Mapping[Node, Node]]:
    """The same, and what each node became.

    Raises:
        TypeMismatchError: nodes do not fit together for these values.
    """
    memo = nodes_at((*graph.inputs, *graph.outputs), values).memo
    origins = {memo[n]: name for n, name in graph.origins.items() if n in memo}
    ends = [memo[n] for n in graph.outputs]
    inputs = tuple(memo[n] for n in graph.inputs)
    kept = tuple(_sized(t, n) for t, n in zip(graph.state, inputs[len(inputs) - len(graph.state) :], strict=True))
    made = replace(graph, inputs=inputs, outputs=tuple(ends), origins=origins, state=kept)
    return made, memo


class nodes_at:  # noqa: N801 - a function that remembers
    """Nodes for values of the dims by name.

    Attributes:
        memo: what each node of the roots became.
    """

    def __init__(self, roots: Iterable[Node], values: Mapping[str, int]) -> None:
        self._values = values
        self._types: dict[TensorType, TensorType] = {}
        self.memo: dict[Node, Node] = {}
        self._add(tuple(roots))

    def __getitem__(self, node: Node) -> Node:
        return self.memo[node]

    def _add(self, roots: Sequence[Node]) -> None:
        for node in toposort(roots, self.memo):
            src = [self.memo[s] for s in node.src]
            op = self._op(node.op)
            if isinstance(op, Extents):
                self.memo[node] = extents(op.values, single=op.single)
            elif op is node.op:
                self.memo[node] = node.with_src(src)
            else:
                self.memo[node] = _unless_idle(Node(op, *src))

    def _op(self, op: Op) -> Op:
        given = {f.name: getattr(op, f.name) for f in fields(op)}
        made = {name: self.at(v) for name, v in given.items()}
        return op if all(made[n] is v for n, v in given.items()) else type(op)(**cast("Any", made))

    def at(self, value: object) -> object:
        """A node, type, extent, operation or tuple of these for the values; anything else is as it was."""
        if isinstance(value, Extent):
            return extent_at(value, self._values)
        if isinstance(value, TensorType):
            return self._type(value)
        if isinstance(value, Node):
            self._add((value,))
            return self.memo[value]
        if isinstance(value, Op):
            return self._op(value)
        if isinstance(value, tuple):
            items = cast("tuple[object, ...]", value)
            made = tuple(map(self.at, items))
            return value if all(a is b for a, b in zip(made, items, strict=True)) else made
        return value

    def _type(self, t: TensorType) -> TensorType:
        found = self._types.get(t)
        if found is None:
            found = t.with_shape(extent_at(d, self._values) for d in t.shape) if t.open else t
            self._types[t] = found
        return found


def _unless_idle(node: Node) -> Node:
    """The node, or its source where these extents leave it nothing to do."""
    if isinstance(node.op, (Reshape, Broadcast)):
        return node.src[0] if node.type == node.src[0].type else node
    if isinstance(node.op, Slice) and node.type == node.src[0].type and all(s == 1 for s in node.op.step):
        return node.src[0]
    return node
