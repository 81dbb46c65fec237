"""ATen's look-ups: embeddings, gathers and indexing with tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewright.dtype import S32, S64
from tilewright.frontends.torch.registry import Site, aten
from tilewright.frontends.torch.types import converted
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, const, map_, reshape, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather, Select, Write
from tilewright.ir.state import is_state
from tilewright.ir.types import normalize_axis


@aten("embedding.default")
def embedding(site: Site, weight: Node, indices: Node, *_: object, **__: object) -> Node:
    """Rows of a table; an id below zero is out of range."""
    return Node(Gather(0, wraps=False), weight, indices)


@aten("index_select.default")
def index_select(site: Site, self: Node, dim: int, index: Node) -> Node:
    """Positions of one axis."""
    axis = normalize_axis(dim, max(len(self.shape), 1), site.target)
    if not self.shape:
        return self
    return Node(Gather(axis, wraps=False), self, reshape(index, (prod(index.shape),)))


@aten("gather.default")
def gather(site: Site, self: Node, dim: int, index: Node, *, sparse_grad: bool = False) -> Node:
    """One element of an axis for each index."""
    if len(self.shape) != len(index.shape) or not self.shape:
        raise Unmodelled("an operand has no axes")
    return Node(Gather(normalize_axis(dim, len(self.shape), site.target), elementwise=True, wraps=False), self, index)


@aten("index.Tensor", "_unsafe_index.Tensor")
def index_tensor(site: Site, self: Node, indices: Sequence[Node | None]) -> Node:
    """self[i0, :, i1, …] with integer tensors, which broadcast together (NumPy's advanced indexing).

    The indexed axes are joined into one, read with the joined index, and stand where the first of them stood if they were
    neighbours, in front if not. A mask picks a number of elements that depends on data, and is not expressed.
    """
    axes = [a for a, index in enumerate(indices) if index is not None]
    picked = [index for index in indices if index is not None]
    if not axes or not all(index.dtype.is_integer for index in picked):
        raise Unmodelled("a mask picks as many elements as the data say")
    neighbours = axes == list(range(axes[0], axes[-1] + 1))
    front = axes[0] if neighbours else 0
    rest = [a for a in range(len(self.shape)) if a not in axes]
    x = self if neighbours else transpose(self, [*axes, *rest])
    extents = [self.shape[a] for a in axes]
    joined = (*x.shape[:front], prod(extents), *x.shape[front + len(axes) :])
    result = Node(Gather(front, wraps=len(picked) == 1), reshape(x, joined), _joined_index(picked, extents))
    return reshape(result, site.out.shape)


@aten("index_put.default")
def index_put(site: Site, self: Node, indices: Sequence[Node | None], values: Node, accumulate: bool = False) -> Node:
    """A buffer that the program writes to, with the slices at some positions of one axis replaced."""
    axes = [a for a, index in enumerate(indices) if index is not None]
    index = indices[axes[0]] if len(axes) == 1 else None
    if index is None or index.dtype not in (S32, S64) or len(index.shape) != 1:
        raise Unmodelled("positions are not a list of whole ones along one axis")
    if accumulate or not site.in_place or not is_state(self):
        raise Unmodelled("it adds to what is there, or writes to what is no state of the program")
    shape = (*self.shape[: axes[0]], *index.shape, *self.shape[axes[0] + 1 :])
    return Node(Write(axes[0]), self, index, broadcast(converted(values, self.dtype), shape))


@aten("index_copy.default")
def index_copy(site: Site, self: Node, dim: int, index: Node, source: Node) -> Node:
    """The same; a position below zero is out of range."""
    if not self.shape or index.dtype not in (S32, S64) or len(index.shape) != 1:
        raise Unmodelled("positions are not a list of whole ones along one axis")
    if not site.in_place or not is_state(self):
        raise Unmodelled("it writes to what is no state of the program")
    return Node(Write(normalize_axis(dim, len(self.shape), site.target), wraps=False), self, index, source)


def _joined_index(indices: Sequence[Node], extents: Sequence[int]) -> Node:
    """Row-major position in axes of these extents; negative indices count from the end of their axis. Of an index outside its
    axis a position past all of them."""
    if len(indices) == 1:
        return indices[0]
    total: Node | None = None
    for index, extent in zip(indices, extents, strict=True):
        wide = converted(index, S64)
        size, none = const(extent, S64), const(prod(extents), S64)
        wide = Node(Select(), map_("less", wide, const(0, S64)), map_("add", wide, size), wide)
        inside = map_("and", map_("greater_equal", wide, const(0, S64)), map_("less", wide, size))
        wide = Node(Select(), inside, wide, none)
        total = wide if total is None else map_("add", map_("multiply", total, size), wide)
    assert total is not None
    return total
