"""Short ways to build nodes. Each drops an operation that would change nothing, so readers need not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilewright.dtype import S64, DType
from tilewright.ir.extent import Extent, is_open
from tilewright.ir.graph import Node
from tilewright.ir.literal import literal
from tilewright.ir.ops import (
    Broadcast,
    Concat,
    Const,
    Convert,
    Extents,
    Input,
    Iota,
    Item,
    Map,
    Overflow,
    Reduce,
    Reshape,
    Slice,
    Transpose,
)
from tilewright.ir.types import Shape, TensorType, TupleType, normalize_axis


def input_(label: str, dtype: DType, shape: Sequence[int]) -> Node:
    """A graph input."""
    return Node(Input(label, TensorType(dtype, tuple(shape))))


def const(value: bool | float | int | Sequence[float] | torch.Tensor, dtype: DType | None = None) -> Node:
    """A constant from numbers or a tensor (kept by reference); of an open extent its number, converted."""
    if isinstance(value, Extent):
        number = extents([value], single=True)
        return number if dtype is None else convert(number, dtype)
    return Node(Const(literal(value, dtype)))


def extents(values: Sequence[int], *, single: bool = False) -> Node:
    """Extents as s64 numbers: a vector, or the only one without an axis; a constant unless one is open."""
    if is_open(values):
        return Node(Extents(tuple(values), single))
    return const(torch.tensor(values[0] if single else list(values), dtype=torch.int64), S64)


def places(count: int, start: int = 0, step: int = 1) -> Node:
    """Indices start, start + step, …, `count` of them, as s64; a constant where all of these are numbers."""
    if not is_open((count, start, step)):
        return const(torch.arange(count, dtype=torch.int64) * step + start)
    line = Node(Iota(S64, (count,), 0))
    scaled = line if type(step) is int and step == 1 else map_("multiply", line, const(step, S64))
    return scaled if type(start) is int and start == 0 else map_("add", scaled, const(start, S64))


def map_(fn: str, *args: Node) -> Node:
    """Elementwise `fn`, a key of `functions.FUNCTIONS`."""
    return Node(Map(fn), *args)


def convert(x: Node, dtype: DType, overflow: Overflow = "wrap") -> Node:
    """x as `dtype`; x itself if it is that already."""
    return x if x.dtype is dtype else Node(Convert(dtype, overflow), x)


def reshape(x: Node, shape: Sequence[int]) -> Node:
    """x under another shape; x itself if it has it already."""
    return x if x.shape == tuple(shape) else Node(Reshape(tuple(shape)), x)


def transpose(x: Node, perm: Sequence[int]) -> Node:
    """Axes permuted: axis i of the result is axis perm[i] of x; x itself if in order."""
    return x if list(perm) == list(range(len(x.shape))) else Node(Transpose(tuple(perm)), x)


def swap_last(x: Node) -> Node:
    """x with its last two axes exchanged."""
    rank = len(x.shape)
    return transpose(x, (*range(rank - 2), rank - 1, rank - 2))


def broadcast(x: Node, shape: Sequence[int]) -> Node:
    """x repeated to `shape` by NumPy's rule; x itself if it has it already."""
    return x if x.shape == tuple(shape) else Node(Broadcast(tuple(shape)), x)


def slice_(x: Node, axis: int, start: int, stop: int, step: int = 1) -> Node:
    """Elements start…stop along one axis, each `step`-th of them; x itself if that is all of it."""
    axis = normalize_axis(axis, len(x.shape), "slice")
    if step == 1 and stop - start == x.shape[axis]:
        return x
    low = tuple(start if a == axis else 0 for a in range(len(x.shape)))
    high = tuple(stop if a == axis else d for a, d in enumerate(x.shape))
    by = tuple(step if a == axis else 1 for a in range(len(x.shape)))
    return Node(Slice(low, high, by), x)


def concat(parts: Sequence[Node], axis: int) -> Node:
    """The parts side by side along `axis`; the only part itself."""
    return parts[0] if len(parts) == 1 else Node(Concat(axis), *parts)


def reduce_(fn: str, x: Node, axes: Sequence[int], keepdims: bool = False) -> Node:
    """Reduction over axes, given in any order and from either end."""
    rank = len(x.shape)
    ordered = tuple(sorted(normalize_axis(a, rank, "reduce") for a in axes))
    return Node(Reduce(fn, ordered, keepdims), x)  # type: ignore[arg-type]


def items(node: Node) -> list[Node]:
    """The results of a node, one node each."""
    return [Node(Item(i), node) for i in range(len(node.type.items))] if isinstance(node.type, TupleType) else [node]


def expand_dims(x: Node, axis: int, rank: int) -> Node:
    """A vector laid along `axis` of a rank-`rank` tensor, ready to broadcast."""
    shape: Shape = tuple(x.shape[0] if a == axis else 1 for a in range(rank))
    return reshape(x, shape)
