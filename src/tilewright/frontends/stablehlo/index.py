"""Reading and writing at indices known only at run time: gather, dynamic slices and updates.

XLA clamps a start index so that the slice stays inside; every index here is clamped before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch

from tilewright.dtype import S32, S64, DType
from tilewright.frontends.stablehlo.collective import by_rank, own_part
from tilewright.frontends.stablehlo.registry import Site, Value, lowers
from tilewright.frontends.stablehlo.shape import pad, strided_slice
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, concat, const, convert, expand_dims, extents, map_, reshape, slice_, transpose
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.extent import is_open, plain_index
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Call, Const, Gather, Iota, Map, Own, Select
from tilewright.ir.types import Shape

_MAKERS, _ELEMENTS = 64, 4096  # of a scalar that is computed as the program is read


def _clamped(index: Node, highest: int) -> Node:
    """index held within 0…highest, in its own type if that reaches so far, else in s64."""
    if index.dtype.max < highest:
        index = convert(index, S64)
    return map_("clamp", const(0, index.dtype), index, _number(highest, index.dtype))


def _number(value: int, dtype: DType) -> Node:
    """A number, which may be an open extent."""
    return convert(extents((value,), single=True), dtype) if is_open((value,)) else const(value, dtype)


def _iota(extent: int, dtype: DType) -> Node:
    return Node(Iota(dtype, (extent,), 0))


def _index_type(extent: int) -> DType:
    return S32 if extent <= S32.max else S64


def known_number(node: Node) -> int | float | bool | None:
    """The value of a scalar that constants alone make, cheaply; None of any other."""
    if isinstance(node.op, Const):
        return node.op.data.scalar()
    if not node.constant or node.tensor.elements != 1:
        return None
    made = toposort([node])
    if len(made) > _MAKERS or any(isinstance(n.op, (Call, Own)) or n.tensor.elements > _ELEMENTS for n in made):
        return None
    (value,) = evaluate_nodes([node], {})
    return cast(torch.Tensor, value).item()


def _known(site: Site, starts: Sequence[Node]) -> list[int] | None:
    """The values of scalars that constants and extents make, or None if one is none."""
    out: list[int] = []
    for s in starts:
        told = site.extents(s)
        value = told[0] if told else known_number(s)
        if value is None:
            return None
        out.append(plain_index(int(value) if isinstance(value, float) else value))
    return out


def _held(starts: Sequence[int], shape: Shape, sizes: Sequence[int]) -> list[int]:
    return [min(max(s, 0), d - n) for s, d, n in zip(starts, shape, sizes, strict=True)]


@lowers("stablehlo.dynamic_slice")
def _dynamic_slice(site: Site) -> Value:
    """`dynamic_slice x, starts` -> a slice where the starts are constants, an `own` where each rank takes its part, else a
    gather on each axis that is cut."""
    x, *starts = site.nodes
    return _cut(site, x, starts, site.op.ints("slice_sizes"))


def _cut(site: Site, x: Node, starts: Sequence[Node], sizes: Sequence[int]) -> Node:
    known = _known(site, starts)
    if known is not None:
        begin = _held(known, x.shape, sizes)
        return strided_slice(x, begin, [b + n for b, n in zip(begin, sizes, strict=True)], [1] * len(sizes))
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        extent, mesh = x.shape[axis], site.reader.mesh
        if size != extent:
            each = by_rank(start, mesh)
            part = None
            if mesh is not None and each is not None:
                part = own_part(x, axis, [min(max(s, 0), extent - size) for s in each], size, mesh)
            if part is not None:
                x = part
                continue
            dtype = _index_type(extent)
            first = convert(_clamped(start, extent - size), dtype)
            x = Node(Gather(axis), x, map_("add", _iota(size, dtype), first))
    return x


@lowers("stablehlo.real_dynamic_slice", "stablehlo.dynamic_pad")
def _with_known_extents(site: Site) -> Value:
    """A slice or a pad whose widths are vectors that constants make."""
    x, *rest = site.nodes
    value, widths = (rest[0], rest[1:]) if site.op.name.endswith("pad") else (None, rest)
    known = [site.extents(w) or _known_vector(w) for w in widths]
    size = _size(site, widths[0], widths[1]) if value is None and known[0] is None and known[2] == [1] * len(x.shape) else None
    if size is not None:
        return _cut(site, x, [reshape(slice_(widths[0], 0, a, a + 1), ()) for a in range(len(x.shape))], size)
    if any(k is None for k in known):
        raise site.refuse("its widths are known only at run time", hint="make them constants")
    a, b, c = cast("list[list[int]]", known)
    return strided_slice(x, a, b, c) if value is None else pad(x, value, a, b, c)


def _size(site: Site, start: Node, limit: Node) -> list[int] | None:
    """The extents of a slice whose limit is its start and as much more; None of another."""
    if not (isinstance(limit.op, Map) and limit.op.fn == "add" and start in limit.src):
        return None
    return site.extents(limit.src[1 - limit.src.index(start)])


def _known_vector(node: Node) -> list[int] | None:
    if not node.constant or any(isinstance(n.op, (Call, Own)) or n.tensor.elements > _ELEMENTS for n in toposort([node])):
        return None
    (value,) = evaluate_nodes([node], {})
    return [int(v) for v in cast(torch.Tensor, value).tolist()]


@lowers("stablehlo.dynamic_update_slice")
def _dynamic_update_slice(site: Site) -> Value:
    """`dynamic_update_slice x, u, starts` -> x's pieces around u where the starts are constants.

    Else, with p[axis] = position - start: u at p where 0 <= p < u's extent on every axis, x elsewhere.
    """
    x, update, *starts = site.nodes
    if x.shape == update.shape:
        return update
    if update.tensor.elements == 0:
        return x
    known = _known(site, starts)
    if known is not None:
        return _spliced(x, update, _held(known, x.shape, update.shape), 0)
    inside: Node | None = None
    for axis, start in enumerate(starts):
        extent, size = x.shape[axis], update.shape[axis]
        if size == extent:
            continue
        dtype = _index_type(extent)
        first = convert(_clamped(start, extent - size), dtype)
        offset = map_("subtract", _iota(extent, dtype), first)
        update = Node(Gather(axis), update, _clamped(offset, size - 1))
        fits = map_("equal", offset, _clamped(offset, size - 1))
        fits = expand_dims(fits, axis, len(x.shape))
        inside = fits if inside is None else map_("and", inside, fits)
    assert inside is not None
    return Node(Select(), inside, update, x)


def _spliced(x: Node, update: Node, begin: Sequence[int], axis: int) -> Node:
    """x with `update` at constant offsets: cut on one axis after another."""
    while axis < len(begin) and x.shape[axis] == update.shape[axis]:
        axis += 1
    if axis == len(begin):
        return update
    start, stop, extent = begin[axis], begin[axis] + update.shape[axis], x.shape[axis]
    middle = _spliced(slice_(x, axis, start, stop), update, begin, axis + 1)
    parts = [slice_(x, axis, 0, start), middle, slice_(x, axis, stop, extent)]
    return concat([p for p in parts if p.shape[axis]], axis)


@lowers("stablehlo.dynamic_gather")
def _dynamic_gather(site: Site) -> Value:
    """A gather whose slice sizes are extents: a slice where its one index follows from extents, too."""
    x, starts, _ = site.nodes
    sizes, told = site.extents(site.nodes[2]), site.extents(starts)
    if sizes is None:
        raise Unmodelled("its slices are as large as the data say")
    q = site.op.dimension_numbers("GatherDimensionNumbers", "dimension_numbers")
    if told is None or len(starts.shape) != 1 or list(q.operand_batching_dims):
        return _gathered(site, x, starts, sizes)
    begin = [0] * len(sizes)
    for k, d in enumerate(q.start_index_map):
        begin[d] = max(0, min(told[k], x.shape[d] - sizes[d]))
    cut = strided_slice(x, begin, [b + n for b, n in zip(begin, sizes, strict=True)], [1] * len(sizes))
    return reshape(cut, [n for d, n in enumerate(sizes) if d not in list(q.collapsed_slice_dims)])


@lowers("stablehlo.gather")
def _gather(site: Site) -> Value:
    x, starts = site.nodes
    return _gathered(site, x, starts, site.op.ints("slice_sizes"))


def _gathered(site: Site, x: Node, starts: Node, sizes: Sequence[int]) -> Value:
    """Any gather, as one graph gather over a single axis.

    The axes that indices start in (mapped) and those walked along with a batch of indices (batching) are brought to the front
    and flattened; the others are cut to their slice size. A flat index is the sum, over those axes, of (clamped start +
    position in the window) * stride. With one mapped axis nothing needs flattening.
    """
    q = site.op.dimension_numbers("GatherDimensionNumbers", "dimension_numbers")
    mapped, batching = list(q.start_index_map), list(q.operand_batching_dims)
    vector_axis = int(q.index_vector_dim)
    index_batch = [i for i in range(len(starts.shape)) if i != vector_axis]
    batch_shape = tuple(starts.shape[i] for i in index_batch)

    def component(k: int) -> Node:
        if vector_axis == len(starts.shape):
            return starts
        return reshape(slice_(starts, vector_axis, k, k + 1), batch_shape)

    picked = [*mapped, *batching]
    whole = [d for d in range(len(x.shape)) if d not in picked]
    x = strided_slice(
        x, [0] * len(sizes), [sizes[d] if d in whole else x.shape[d] for d in range(len(sizes))], [1] * len(sizes)
    )
    window = tuple(sizes[d] for d in picked)
    dtype = _index_type(math.prod(x.shape[d] for d in picked))
    rank = len(batch_shape) + len(window)
    flat: Node | None = None
    stride = math.prod(x.shape[d] for d in picked)
    for position, d in enumerate(picked):
        stride = stride // x.shape[d] if x.shape[d] else 0
        if d in mapped:
            start = convert(_clamped(component(mapped.index(d)), x.shape[d] - sizes[d]), dtype)
            index = reshape(start, (*batch_shape, *(1 for _ in window)))
        else:
            axis = index_batch.index(int(list(q.start_indices_batching_dims)[batching.index(d)]))
            index = expand_dims(_iota(batch_shape[axis], dtype), axis, rank)
        if sizes[d] > 1:
            index = map_("add", index, expand_dims(_iota(sizes[d], dtype), len(batch_shape) + position, rank))
        if stride != 1:
            index = map_("multiply", index, _number(stride, dtype))
        flat = index if flat is None else map_("add", flat, index)
    if flat is None:
        raise site.refuse("a gather that maps no axis")
    flat = broadcast(flat, (*batch_shape, *window))
    return _arranged(site, _picked(x, picked, whole, flat), picked, whole, sizes, len(batch_shape))


def _picked(x: Node, picked: list[int], whole: list[int], flat: Node) -> Node:
    """[*flat.shape, *whole axes]: the elements of x at flat indices over its picked axes."""
    if len(picked) == 1 and (axis := picked[0]) != 0:
        # Gather along the axis where it stands, then bring what the indices made to the front.
        got = Node(Gather(axis), x, flat)
        made = list(range(axis, axis + len(flat.shape)))
        return transpose(got, [*made, *(a for a in range(len(got.shape)) if a not in made)])
    front = transpose(x, [*picked, *whole])
    rows = reshape(front, (math.prod(x.shape[d] for d in picked), *(x.shape[d] for d in whole)))
    return Node(Gather(0), rows, flat)


def _arranged(site: Site, got: Node, picked: list[int], whole: list[int], sizes: Sequence[int], batch_rank: int) -> Node:
    """[*batch, *window over picked axes, *whole axes] as the result wants it: window axes at offset_dims."""
    q = site.op.dimension_numbers("GatherDimensionNumbers", "dimension_numbers")
    dropped = {*q.collapsed_slice_dims, *q.operand_batching_dims}
    kept = [d for d in (*picked, *whole) if d not in dropped]
    got = reshape(got, (*got.shape[:batch_rank], *(sizes[d] for d in kept)))
    offset_dims = list(q.offset_dims)
    perm: list[int] = []
    batch = iter(range(batch_rank))
    for axis in range(len(got.shape)):
        if axis in offset_dims:
            d = sorted(kept)[offset_dims.index(axis)]
            perm.append(batch_rank + kept.index(d))
        else:
            perm.append(next(batch))
    return transpose(got, perm)
