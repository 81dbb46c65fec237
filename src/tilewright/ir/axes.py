"""Axes of the elements of a value: they keep their identity while reshapes split and merge them and transposes move them, so
that "the keys" or "the heads" can be found in any layout a program chose.

A layout gives, for each dimension of a tensor, the axes that make it up, outer first. Extents of 1 are no axes. An axis that
some reshape cuts in two is two axes everywhere from then on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewright.ir.build import broadcast, reshape, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Broadcast, Reshape, Transpose
from tilewright.ir.types import Shape


class Axis:
    """One axis of some extent above 1; once split, it stands for its parts."""

    extent: int

    __slots__ = ("extent", "parts")

    def __init__(self, extent: int) -> None:
        self.extent = extent
        self.parts: tuple[Axis, ...] = ()

    def split(self, outer: int) -> None:
        """Two axes from now on, the first of extent `outer`."""
        self.parts = (Axis(outer), Axis(self.extent // outer))

    def whole(self) -> list[Axis]:
        """The axes it is made of by now: itself, or its parts."""
        return [a for p in self.parts for a in p.whole()] if self.parts else [self]


Layout = tuple[tuple[Axis, ...], ...]


def layout_of(shape: Shape) -> Layout:
    """A layout of axes never seen before."""
    return tuple((Axis(d),) if d > 1 else () for d in shape)


def axes_of(dims: Iterable[Sequence[Axis]]) -> list[Axis]:
    """The axes of these dimensions in order, split as far as they are by now."""
    return [w for dim in dims for a in dim for w in a.whole()]


def _extent(axes: Iterable[Axis]) -> int:
    return math.prod(a.extent for a in axes)


def reshaped(layout: Layout, shape: Shape) -> Layout | None:
    """The layout after a reshape to `shape`; splits axes where dimensions cut them. None where extents do not divide."""
    rest = axes_of(layout)
    result: list[tuple[Axis, ...]] = []
    for extent in shape:
        dim: list[Axis] = []
        while (missing := extent // _extent(dim)) > 1 and rest:
            first = rest[0]
            if missing % first.extent and first.extent % missing:
                return None
            if first.extent > missing:
                first.split(missing)
                rest[0:1] = first.whole()
            dim.append(rest.pop(0))
        if _extent(dim) != extent:
            return None
        result.append(tuple(dim))
    return None if rest else tuple(result)


def propagate_to_user(view: Node, layout: Layout) -> Layout | None:
    """The layout of a reshape or transpose whose source has `layout`."""
    if isinstance(view.op, Transpose):
        return tuple(layout[p] for p in view.op.perm)
    return reshaped(layout, view.shape) if isinstance(view.op, Reshape) else None


def propagate_to_source(view: Node, layout: Layout) -> Layout | None:
    """The layout of the source of a reshape, transpose or broadcast which itself has `layout`.

    What a broadcast repeats has none of the axes along which it does.
    """
    source = view.src[0].shape
    if isinstance(view.op, Transpose):
        inverse = sorted(range(len(source)), key=view.op.perm.__getitem__)
        return tuple(layout[i] for i in inverse)
    if isinstance(view.op, Broadcast):
        return broadcast_aligned(source, layout)
    return reshaped(layout, source) if isinstance(view.op, Reshape) else None


def broadcast_aligned(shape: Shape, layout: Layout) -> Layout | None:
    """The layout of a value of `shape` that broadcasts against one of `layout`; None if it is the larger."""
    extra = len(layout) - len(shape)
    if extra < 0:
        return None
    found: list[tuple[Axis, ...]] = []
    for extent, dim in zip(shape, layout[extra:], strict=True):
        axes = axes_of((dim,))
        if extent not in (1, _extent(axes)):
            return None
        found.append(tuple(axes) if extent > 1 else ())
    return tuple(found)


@dataclass(frozen=True)
class Placed:
    """A value and where its elements lie."""

    node: Node
    layout: Layout

    @property
    def axes(self) -> list[Axis]:
        """The axes it varies over."""
        return axes_of(self.layout)

    def without_views(self) -> Placed:
        """The value of which this one is a view, as far up as views go."""
        placed = self
        while isinstance(placed.node.op, (Reshape, Transpose, Broadcast)):
            layout = propagate_to_source(placed.node, placed.layout)
            if layout is None:
                return placed
            placed = Placed(placed.node.src[0], layout)
        return placed

    def arranged(self, dims: Sequence[Sequence[Axis]]) -> Node:
        """The value with dimensions made of these axes, among which are all it varies over.

        A dimension along none of whose axes it varies has extent 1; one along some of them, it is repeated along.
        """
        mine = self.axes
        wanted = [axes_of((dim,)) for dim in dims]
        kept = [[a for a in dim if a in mine] for dim in wanted]
        assert sum(map(len, kept)) == len(mine), "an axis of the value has no place among the dimensions"
        node = _permuted(self.node, [axes_of((dim,)) for dim in self.layout], kept)
        partly = [0 < len(some) < len(dim) for some, dim in zip(kept, wanted, strict=True)]
        if any(partly):
            apart = [a for dim in wanted for a in dim]
            node = reshape(node, [a.extent if a in mine else 1 for a in apart])
            repeated = [a for dim, part in zip(wanted, partly, strict=True) for a in dim if part]
            node = broadcast(node, [a.extent if a in mine or a in repeated else 1 for a in apart])
        return reshape(node, [_extent(dim) if some else 1 for dim, some in zip(wanted, kept, strict=True)])


def _permuted(node: Node, given: list[list[Axis]], wanted: list[list[Axis]]) -> Node:
    """The node's axes in another order, each dimension cut only where its axes part, one of extent 1 for each that is empty:
    a transpose alone, or between reshapes where dimensions are cut or joined."""
    mine = [a for dim in given for a in dim]
    order = [a for dim in wanted for a in dim]
    if order == mine:
        return node
    starts = {dim[0] for dim in (*given, *wanted) if dim}
    runs: list[list[Axis]] = []  # in the wanted order; an empty one stands for an empty dimension
    for dim in wanted:
        runs.extend([] if dim else [[]])
        for axis in dim:
            follows = bool(runs) and bool(runs[-1]) and mine.index(axis) == mine.index(runs[-1][-1]) + 1
            if follows and axis not in starts:
                runs[-1].append(axis)
            else:
                runs.append([axis])
    moved = iter(sorted((i for i, run in enumerate(runs) if run), key=lambda i: mine.index(runs[i][0])))
    before = [next(moved) if run else i for i, run in enumerate(runs)]
    return transpose(reshape(node, [_extent(runs[i]) for i in before]), [before.index(i) for i in range(len(runs))])
