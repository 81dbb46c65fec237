"""ATen's operators that move, pick or make elements: views, joins, casts, padding, creation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from tilewright.dtype import F64, S64
from tilewright.frontends.torch.registry import Operand, Scalar, Site, aten, operators
from tilewright.frontends.torch.types import converted, mapped
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, concat, const, map_, places, reshape, slice_, transpose
from tilewright.ir.extent import slice_bounds
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather, Iota, Pad, Select
from tilewright.ir.types import normalize_axis

_SAME_ELEMENTS = (
    "_reshape_alias.default",
    "_unsafe_view.default",
    "flatten.using_ints",
    "reshape.default",
    "squeeze.default",
    "squeeze.dim",
    "squeeze.dims",
    "unflatten.int",
    "unsqueeze.default",
    "view.default",
    "view_as.default",
)
_SAME_VALUE = ("alias.default", "clone.default", "contiguous.default", "detach.default", "lift_fresh_copy.default")


def _axis(x: Node, dim: int, site: Site) -> int:
    """`dim` from the front; a rank-0 tensor has an axis 0 in ATen."""
    return normalize_axis(dim, max(len(x.shape), 1), site.target)


@aten(*_SAME_ELEMENTS)
def same_elements(site: Site, self: Node, *_: object, **__: object) -> Node:
    """The same elements in row-major order: the export knows the resulting shape."""
    return reshape(self, site.out.shape)


@aten(*_SAME_VALUE)
def same_value(site: Site, self: Node, **_: object) -> Node:
    """self: memory is none of the graph's business."""
    return self


@operators("prims", "convert_element_type.default")
@aten("_to_copy.default", "to.dtype", "to.dtype_layout", "to.device", "to.other", "type_as.default")
def to(site: Site, self: Node, *_: object, **__: object) -> Node:
    """self converted to the result's type."""
    return converted(self, site.dtype)


@aten("expand.default", "expand_as.default", "broadcast_to.default")
def expand(site: Site, self: Node, *_: object, **__: object) -> Node:
    """self repeated to the result's shape."""
    return broadcast(self, site.out.shape)


@aten("permute.default")
def permute(site: Site, self: Node, dims: Sequence[int]) -> Node:
    """Axes in the order `dims`."""
    return transpose(self, [_axis(self, d, site) for d in dims])


@aten("transpose.int", "t.default", "numpy_T.default", "mT.default")
def exchange(site: Site, self: Node, dim0: int | None = None, dim1: int | None = None) -> Node:
    """Two axes exchanged: the named ones, or the last two."""
    order = list(range(len(self.shape)))
    if len(order) > 1:
        a, b = _axis(self, -2 if dim0 is None else dim0, site), _axis(self, -1 if dim1 is None else dim1, site)
        order[a], order[b] = order[b], order[a]
    return transpose(self, order)


@aten("select.int")
def select(site: Site, self: Node, dim: int, index: int) -> Node:
    """One position of an axis, which goes."""
    axis = _axis(self, dim, site)
    start = index % self.shape[axis]
    return reshape(slice_(self, axis, start, start + 1), site.out.shape)


@aten("slice.Tensor")
def slice_tensor(site: Site, self: Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Node:
    """self[start:end:step] along one axis, by Python's rules."""
    axis = _axis(self, dim, site)
    low, high = slice_bounds(start, end, self.shape[axis])
    return slice_(self, axis, low, high, step)


def _parts(site: Site, x: Node, axis: int, extents: Sequence[int]) -> list[Node]:
    ends = list(accumulate(extents))
    parts = [slice_(x, axis, stop - extent, stop) for extent, stop in zip(extents, ends, strict=True)]
    return [reshape(part, t.shape) for part, t in zip(parts, site.outs, strict=True)]


@aten("split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default", "unsafe_split.Tensor")
def split(site: Site, self: Node, sizes: int | Sequence[int], dim: int = 0) -> list[Node]:
    """self cut along an axis; the export knows the extents."""
    axis = _axis(self, dim, site)
    return _parts(site, self, axis, [t.shape[axis] for t in site.outs])


@aten("unbind.int")
def unbind(site: Site, self: Node, dim: int = 0) -> list[Node]:
    """Every position of an axis, which goes."""
    axis = _axis(self, dim, site)
    return _parts(site, self, axis, [1] * self.shape[axis])


@aten("cat.default")
def cat(site: Site, tensors: Sequence[Node], dim: int = 0) -> Node:
    """Tensors side by side, in the promoted type; an empty vector among them counts for nothing, as ATen has it."""
    rank = len(site.out.shape)
    whole = [converted(t, site.dtype) for t in tensors if len(t.shape) == rank and (rank == 1 or t.shape != (0,))]
    if not whole:
        return const([], site.dtype)
    return concat(whole, normalize_axis(dim, rank, site.target))


@aten("stack.default")
def stack(site: Site, tensors: Sequence[Node], dim: int = 0) -> Node:
    """Tensors side by side along a new axis."""
    axis = normalize_axis(dim, len(site.out.shape), site.target)
    shape = tuple(1 if a == axis else d for a, d in enumerate(site.out.shape))
    parts = [reshape(converted(t, site.dtype), shape) for t in tensors]
    return concat(parts, axis)


@aten("repeat.default")
def repeat(site: Site, self: Node, repeats: Sequence[int]) -> Node:
    """self laid side by side `repeats` times along each axis; new axes come first."""
    shape = (1,) * (len(repeats) - len(self.shape)) + self.shape
    beside = tuple(extent for d in shape for extent in (1, d))
    spread = tuple(extent for r, d in zip(repeats, shape, strict=True) for extent in (r, d))
    return reshape(broadcast(reshape(self, beside), spread), site.out.shape)


@aten("flip.default")
def flip(site: Site, self: Node, dims: Sequence[int]) -> Node:
    """The order of some axes reversed."""
    x = self
    for axis in {_axis(self, d, site) for d in dims}:
        if self.shape:
            x = Node(Gather(axis), x, places(self.shape[axis], self.shape[axis] - 1, -1))
    return x


@aten("constant_pad_nd.default")
def constant_pad_nd(site: Site, self: Node, pad: Sequence[int], value: Scalar = 0) -> Node:
    """A border of `value`; `pad` gives low and high from the last axis backwards, negative crops."""
    rank = len(self.shape)
    edges = [(pad[2 * i], pad[2 * i + 1]) if 2 * i < len(pad) else (0, 0) for i in range(rank)][::-1]
    low, high = tuple(e[0] for e in edges), tuple(e[1] for e in edges)
    return Node(Pad(low, high, (0,) * rank), self, converted(value, self.dtype))


@aten("slice_scatter.default")
def slice_scatter(
    site: Site, self: Node, src: Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Node:
    """self with self[start:end] along one axis replaced by src."""
    if step != 1:
        raise Unmodelled(f"a step of {step}")
    axis = _axis(self, dim, site)
    low, high = slice_bounds(start, end, self.shape[axis])
    return _replaced(self, converted(src, self.dtype), axis, low, high)


@aten("select_scatter.default")
def select_scatter(site: Site, self: Node, src: Node, dim: int, index: int) -> Node:
    """self with one position of an axis replaced by src."""
    axis = _axis(self, dim, site)
    start = index % self.shape[axis]
    shape = tuple(1 if a == axis else d for a, d in enumerate(self.shape))
    return _replaced(self, reshape(converted(src, self.dtype), shape), axis, start, start + 1)


def _replaced(x: Node, middle: Node, axis: int, start: int, stop: int) -> Node:
    parts = [slice_(x, axis, 0, start), middle, slice_(x, axis, stop, x.shape[axis])]
    return concat([p for p in parts if p.shape[axis]] or [x], axis)


def _triangle(keep: str) -> Callable[..., Node]:
    def triangle(site: Site, self: Node, diagonal: int = 0) -> Node:
        shape = self.shape[-2:]
        row, column = Node(Iota(S64, shape, 0)), Node(Iota(S64, shape, 1))
        kept = map_(keep, map_("subtract", column, row), const(diagonal, S64))
        return Node(Select(), kept, self, converted(0, self.dtype))

    return triangle


aten("tril.default")(_triangle("less_equal"))
aten("triu.default")(_triangle("greater_equal"))


@aten("full.default", "full_like.default")
def full(site: Site, like: object, fill_value: Operand, **_: object) -> Node:
    """One value everywhere."""
    return broadcast(converted(fill_value, site.dtype), site.out.shape)


@aten("scalar_tensor.default")
def scalar_tensor(site: Site, s: Scalar, **_: object) -> Node:
    """A number as a tensor of rank 0."""
    return converted(s, site.dtype)


@aten("empty.memory_format", "empty_strided.default", "empty_permuted.default")
def empty(site: Site, *_: object, **__: object) -> Node:
    """Uninitialised memory, given zeros so that a result never depends on what lay there."""
    return broadcast(converted(0, site.dtype), site.out.shape)


@aten("arange.start_step")
def arange(site: Site, start: Scalar, end: Scalar, step: Scalar = 1, **_: object) -> Node:
    """start + step * i. Floats are computed in f64 and rounded once."""
    wide = F64 if site.dtype.is_float else site.dtype
    if start == 0 and step == 1:
        return Node(Iota(site.dtype, site.out.shape, 0))
    line = Node(Iota(wide, site.out.shape, 0))
    return converted(mapped("add", wide, mapped("multiply", wide, line, step), start), site.dtype)
