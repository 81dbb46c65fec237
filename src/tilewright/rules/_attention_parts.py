"""The operands of an attention, and its axes by role: batch, heads, queries, keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewright.ir.axes import Axis, Placed, axes_of
from tilewright.ir.build import broadcast
from tilewright.ir.constant import scaling
from tilewright.ir.graph import Node, Users
from tilewright.ir.ops import Convert, Dequantize, Quantize
from tilewright.rules._attention_path import Found


@dataclass(frozen=True)
class Operand:
    """An operand taken back to what it is a view of.

    Attributes:
        base: the value and where it lies; a key repeated for a group of queries no longer varies over the group.
        elementwise: operations on it with the source they apply to, last first; they do not see where an element lies.
        factor: number it is multiplied by, where the attention's scale can take that over.
    """

    base: Placed
    elementwise: tuple[tuple[Node, int], ...]
    factor: float

    @property
    def axes(self) -> list[Axis]:
        return self.base.axes

    def arranged(self, dims: Sequence[Sequence[Axis]]) -> Node:
        """The operand laid out along these dimensions, repeated along those it does not vary over."""
        extents = [math.prod(a.extent for a in axes_of((dim,))) for dim in dims]
        node = broadcast(self.base.arranged(dims), extents)
        for op, at in reversed(self.elementwise):
            node = Node(op.op, *(node if i == at else s for i, s in enumerate(op.src)))
        return node


def operand(placed: Placed, users: Users, *, scaled: bool) -> Operand:
    """The operand without its views, and without a factor if it is `scaled` by the attention anyway.

    Casts and quantisation per tensor are passed if nothing else reads them: what they apply to is then rearranged in their
    place, so that they stay beside the operation that makes their input.
    """
    elementwise: list[tuple[Node, int]] = []
    factor = 1.0
    while True:
        placed = placed.without_views()
        node = placed.node
        number = scaling(node)
        at = 0 if number is None else number[0]
        if number is not None and scaled and not elementwise:
            factor *= number[1]
        elif users.only(node) and (number is not None or _per_tensor(node)):
            elementwise.append((node, at))
        else:
            return Operand(placed, tuple(elementwise), factor)
        placed = Placed(node.src[at], placed.layout)


def _per_tensor(node: Node) -> bool:
    """Tell whether a node casts floats, or quantises or dequantises with one scale in all."""
    if isinstance(node.op, Convert):
        return node.dtype.is_float and node.src[0].dtype.is_float
    whole = isinstance(node.op, (Quantize, Dequantize)) and node.op.block is None
    return whole and all(s.tensor.elements == 1 and len(s.shape) <= 1 for s in node.src[1:])


@dataclass(frozen=True)
class Slots:
    """Axes by role. Each head of the keys serves a `group` of query heads."""

    batch: list[Axis]
    heads: list[Axis]
    group: list[Axis]
    queries: list[Axis]
    keys: list[Axis]
    depth: list[Axis]
    value_depth: list[Axis]

    @property
    def _query(self) -> list[list[Axis]]:
        return [self.batch, [*self.heads, *self.group], self.queries]

    @property
    def of_query(self) -> list[list[Axis]]:
        """The layout of queries: batch, heads, queries, depth."""
        return [*self._query, self.depth]

    @property
    def of_key(self) -> list[list[Axis]]:
        """The layout of keys: batch, heads, keys, depth."""
        return [self.batch, self.heads, self.keys, self.depth]

    @property
    def of_value(self) -> list[list[Axis]]:
        """The layout of values: batch, heads, keys, value depth."""
        return [self.batch, self.heads, self.keys, self.value_depth]

    @property
    def of_scores(self) -> list[list[Axis]]:
        """The layout of scores: batch, heads, queries, keys."""
        return [*self._query, self.keys]

    @property
    def of_result(self) -> list[list[Axis]]:
        """The layout of the result: batch, heads, queries, value depth."""
        return [*self._query, self.value_depth]


def slots(found: Found, key: Operand, value: Operand) -> Slots | None:
    """The axes by role; None if keys and values differ in the axes they have in common with queries.

    Axes that keys vary over are batch and heads: of several dimensions the last is the heads. The others are queries, except
    that what no mask tells apart, or stands among the batch, is a group of query heads.
    """
    keys, depth, value_depth = (axes_of((dim,)) for dim in (found.keys, found.depth, found.value_depth))
    product = [a for a in axes_of(found.product) if a not in keys]
    shared = {a for a in key.axes if a not in keys and a not in depth}
    if shared != {a for a in value.axes if a not in keys and a not in value_depth} or not shared <= {*product}:
        return None
    if {*axes_of(found.out)} != {*product, *value_depth}:
        return None
    outer = found.product[:-2]
    common = [a for a in axes_of(outer) if a in shared]
    if len(common) != len(shared):
        return None
    last = axes_of(outer[-1:]) if len(outer) > 1 else common[-1:]
    among_batch = [a for a in axes_of(outer) if a not in shared]
    rows = [a for a in product if a not in shared and a not in among_batch]
    told_apart = [a for a in rows if a in _masked(found)]
    queries = told_apart or rows
    return Slots(
        batch=[a for a in common if a not in last],
        heads=[a for a in common if a in last],
        group=[*among_batch, *(a for a in rows if a not in queries)],
        queries=queries,
        keys=keys,
        depth=depth,
        value_depth=value_depth,
    )


def _masked(found: Found) -> set[Axis]:
    """Axes over which something applied to scores or weights varies."""
    return {*_varying(s for a in (*found.scores, *found.weights) for s in a.sides)}


def _varying(sides: Iterable[Placed | None]) -> Iterable[Axis]:
    for side in sides:
        yield from () if side is None else side.axes
