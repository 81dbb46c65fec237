"""ONNX's operators that make, reshape, cut, join and index tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch

from tilewright.dtype import F32, F64, PRED, S64
from tilewright.frontends.onnx.node import OpNode, converts
from tilewright.frontends.onnx.tensors import checked_shape, element_type
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import (
    broadcast,
    concat,
    const,
    convert,
    expand_dims,
    extents,
    map_,
    places,
    reduce_,
    reshape,
    slice_,
    transpose,
)
from tilewright.ir.dims import exactly
from tilewright.ir.extent import is_open, slice_bounds
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather, Iota, Pad, Select, Slice

_LISTED = 1 << 22  # indices that may be listed as a constant


@converts("Constant", 1, 25)
def _constant(op: OpNode) -> Node:
    """Whichever of the value attributes is there."""
    import onnx

    given = [name for name in op.attributes if name != "doc_string"]
    if len(given) != 1:
        raise op.malformed(f"Constant has {len(given)} values, not one")
    name = given[0]
    if name == "value":
        return op.literal(op.tensor("value"))
    if name in ("value_int", "value_ints"):
        return const(torch.tensor(op.integer(name) if name == "value_int" else op.integers(name), dtype=torch.int64))
    if name in ("value_float", "value_floats"):
        values = op.real(name) if name == "value_float" else op.reals(name)
        return const(torch.tensor(values, dtype=torch.float32))
    if name in ("value_string", "value_strings"):
        strings = op.strings(name) if name == "value_strings" else [op.text(name).encode()]
        shape = [len(strings)] if name == "value_strings" else []
        return op.literal(onnx.TensorProto(data_type=onnx.TensorProto.STRING, dims=shape, string_data=strings))
    raise Unmodelled(f"its value is a {name.removeprefix('sparse_')}" if "sparse" in name else f"attribute {name!r}")


@converts("ConstantOfShape", 9, 25)
def _constant_of_shape(op: OpNode) -> Node:
    shape = checked_shape(op.known_ints(0), op.where)
    value = op.literal(op.tensor("value")) if op.has("value") else const(0.0, F32)
    return broadcast(reshape(value, ()), shape)


@converts("Shape", 1, 25)
def _shape(op: OpNode) -> Node:
    shape = op.input(0).shape
    return extents(shape[_bound(op, "start", 0) : _bound(op, "end", len(shape))])


def _bound(op: OpNode, name: str, default: int) -> int:
    rank = len(op.input(0).shape)
    at = op.integer(name, default)
    return min(max(at + rank if at < 0 else at, 0), rank)


@converts("Size", 1, 25)
def _size(op: OpNode) -> Node:
    return extents([op.input(0).tensor.elements], single=True)


@converts("Reshape", 5, 25)
def _reshape(op: OpNode) -> Node:
    x = op.input(0)
    wanted = op.known_ints(1)
    if not op.integer("allowzero", 0):
        wanted = [x.shape[i] if d == 0 and i < len(x.shape) else d for i, d in enumerate(wanted)]
    if wanted.count(-1) > 1:
        raise op.malformed(f"the shape {wanted[:8]} leaves two extents open")
    if -1 in wanted:
        rest = math.prod(d for d in wanted if d != -1)
        filled = x.tensor.elements // rest if rest else 0
        wanted = [filled if d == -1 else d for d in wanted]
    return reshape(x, checked_shape(wanted, op.where))


@converts("Flatten", 1, 25)
def _flatten(op: OpNode) -> Node:
    x = op.input(0)
    axis = op.integer("axis", 1)
    axis = len(x.shape) if axis == len(x.shape) else op.axis("axis", 1, len(x.shape))
    return reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@converts("Squeeze", 1, 25)
def _squeeze(op: OpNode) -> Node:
    x = op.input(0)
    given = op.axes(1)
    with exactly():
        ones = {a for a, d in enumerate(x.shape) if given is None and d == 1}
    axes = ones if given is None else {op.normal_axis(a, len(x.shape)) for a in given}
    if any(x.shape[a] != 1 for a in axes):
        raise op.malformed(f"cannot squeeze axes {sorted(axes)} of {x.type}", "only axes of extent 1")
    return reshape(x, [d for a, d in enumerate(x.shape) if a not in axes])


@converts("Unsqueeze", 1, 25)
def _unsqueeze(op: OpNode) -> Node:
    x = op.input(0)
    given = op.axes(1, ()) or []
    rank = len(x.shape) + len(given)
    axes = {op.normal_axis(a, rank) for a in given}
    if len(axes) != len(given):
        raise op.malformed(f"axes {given} repeat themselves")
    rest = iter(x.shape)
    return reshape(x, [1 if a in axes else next(rest) for a in range(rank)])


@converts("Transpose", 1, 25)
def _transpose(op: OpNode) -> Node:
    x = op.input(0)
    return transpose(x, op.integers("perm", tuple(reversed(range(len(x.shape))))))


@converts("Concat", 4, 13)
def _concat(op: OpNode) -> Node:
    parts = [op.input(i) for i in range(len(op.sources))]
    axis = op.axis("axis", None, len(parts[0].shape))
    return concat(parts, axis)


@converts("Split", 2, 18)
def _split(op: OpNode) -> list[Node]:
    x = op.input(0)
    axis = op.axis("axis", 0, len(x.shape))
    extent = x.shape[axis]
    if op.optional(1) is not None:
        sizes = op.known_ints(1)
    elif op.has("split"):
        sizes = op.integers("split")
    else:
        count = op.integer("num_outputs", len(op.outputs))
        if count != len(op.outputs) or not count:
            raise op.malformed(f"Split into {count} parts gives {len(op.outputs)}")
        each = -(-extent // count)
        sizes = [max(min(each, extent - i * each), 0) for i in range(count)]
    if sum(sizes) != extent or any(s < 0 for s in sizes):
        raise op.malformed(f"cannot split an axis of {extent} into {sizes[:8]}")
    return [slice_(x, axis, end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]


@converts("Slice", 1, 13)
def _slice(op: OpNode) -> Node:
    x = op.input(0)
    starts = op.known_ints(1) if op.optional(1) is not None else op.integers("starts")
    stops = op.known_ints(2) if op.optional(2) is not None else op.integers("ends")
    axes = op.axes(3, range(len(starts))) or []
    steps = op.known_ints(4) if op.optional(4) is not None else [1] * len(starts)
    if not len(starts) == len(stops) == len(axes) == len(steps) or 0 in steps:
        raise op.malformed(f"Slice from {starts} to {stops} along {axes} by {steps}")
    low, high, by = [0] * len(x.shape), list(x.shape), [1] * len(x.shape)
    backwards: list[tuple[int, Node]] = []
    for start, stop, axis, step in zip(starts, stops, axes, steps, strict=True):
        a = op.normal_axis(axis, len(x.shape))
        extent = x.shape[a]
        if step < 0:  # unlike Python, ONNX lets a start before the first element be the first element
            start = max(start, -extent)
            first, end = slice_bounds(start, stop, extent, backwards=True)
            backwards.append((a, _places(-((first - end) // step), first, step)))
        else:
            low[a], high[a] = slice_bounds(start, stop, extent)
            by[a] = step
    if (low, high, by) != ([0] * len(x.shape), list(x.shape), [1] * len(x.shape)):
        x = Node(Slice(tuple(low), tuple(high), tuple(by)), x)
    for a, picked in backwards:
        x = Node(Gather(a), x, picked)
    return x


def _places(count: int, start: int = 0, step: int = 1) -> Node:
    """Indices start, start + step, …, `count` of them.

    Raises:
        Unmodelled: they are too many to list.
    """
    if not is_open((count,)) and count > _LISTED:
        raise Unmodelled(f"it picks {count} elements of one axis")
    return places(count, start, step)


def picked_along(x: Node, axis: int, indices: Sequence[int]) -> Node:
    """The given elements of one axis.

    Raises:
        Unmodelled: they are too many to list.
    """
    if len(indices) > _LISTED:
        raise Unmodelled(f"it picks {len(indices)} elements of one axis")
    return Node(Gather(axis), x, const(torch.tensor(list(indices), dtype=torch.int64)))


@converts("Tile", 6, 13)
def _tile(op: OpNode) -> Node:
    x = op.input(0)
    repeats = op.known_ints(1)
    if len(repeats) != len(x.shape) or any(r < 0 for r in repeats):
        raise op.malformed(f"cannot tile {x.type} {repeats[:8]} times", "one count an axis")
    apart = [e for r, d in zip(repeats, x.shape, strict=True) for e in (r, d)]
    spread = reshape(x, [e for d in x.shape for e in (1, d)])
    shape = [r * d for r, d in zip(repeats, x.shape, strict=True)]
    return reshape(broadcast(spread, checked_shape(apart, op.where)), shape)


@converts("Pad", 2, 25)
def _pad(op: OpNode) -> Node:
    x = op.input(0)
    rank = len(x.shape)
    pads = op.known_ints(1) if op.optional(1) is not None else op.integers("pads")
    axes = [op.normal_axis(a, rank) for a in op.known_ints(3)] if op.optional(3) is not None else list(range(rank))
    if len(pads) != 2 * len(axes):
        raise op.malformed(f"{len(pads)} pads for {len(axes)} axes", "two an axis")
    low, high = [0] * rank, [0] * rank
    for i, a in enumerate(axes):
        low[a], high[a] = pads[i], pads[i + len(axes)]
    checked_shape([max(d + lo + hi, 0) for d, lo, hi in zip(x.shape, low, high, strict=True)], op.where)
    mode = op.text("mode", "constant")
    if mode == "constant":
        value = op.optional(2)
        if value is None:
            value = const(op.real("value", 0.0), x.dtype)
        return Node(Pad(tuple(low), tuple(high), (0,) * rank), x, reshape(value, ()))
    if mode not in ("edge", "reflect", "wrap"):
        raise Unmodelled(f"mode={mode!r}")
    for a in axes:
        if low[a] or high[a]:
            index = _source(_places(x.shape[a] + low[a] + high[a], -low[a]), x.shape[a], mode)
            values = op.known(index)  # a constant, unless the axis is open
            x = Node(Gather(a), x, index if values is None else const(values))
    return x


def _source(index: Node, extent: int, mode: str) -> Node:
    """The elements of an axis that stand at indices, which may lie outside it."""
    if mode == "edge":
        return map_("clamp", const(0, S64), index, const(extent - 1, S64))
    period = const(extent if mode == "wrap" else max(2 * (extent - 1), 1), S64)
    inside = map_("modulo", index, period)
    return inside if mode == "wrap" else map_("minimum", inside, map_("subtract", period, inside))


@converts("Range", 11, 27)
def _range(op: OpNode) -> Node:
    dtype = op.input(0).dtype
    limits = [op.known_number(i) for i in range(3)]
    if any(v is None for v in limits):
        raise Unmodelled("its limits are known only at run time")
    start, stop, step = (v for v in limits if v is not None)
    if step == 0:
        raise op.malformed("Range with a step of 0")
    if dtype.is_float:
        count = max(math.ceil((stop - start) / step), 0)
    else:
        count = max(-cast("int", (start - stop) // step), 0)
    checked_shape([count], op.where)
    line = Node(Iota(S64 if dtype.is_integer else F64, (count,), 0))
    if step != 1:
        line = map_("multiply", line, convert(number(step), line.dtype))
    if start != 0:
        line = map_("add", line, convert(number(start), line.dtype))
    return convert(line, dtype)


def number(value: float) -> Node:
    """A number that is known while reading: a float, a whole number, or an extent."""
    return const(value, F64) if isinstance(value, float) else extents([value], single=True)


@converts("Trilu", 14, 14)
def _trilu(op: OpNode) -> Node:
    x = op.input(0)
    offset = op.known_ints(1)[0] if op.optional(1) is not None else 0
    if len(x.shape) < 2:
        raise op.malformed(f"Trilu of {x.type}", "it takes matrices")
    rows, columns = (Node(Iota(S64, x.shape[-2:], a)) for a in (0, 1))
    keep = "greater_equal" if op.integer("upper", 1) else "less_equal"
    kept = map_(keep, columns, map_("add", rows, number(offset)))
    return Node(Select(), kept, x, const(False, PRED) if x.dtype is PRED else const(0, x.dtype))


@converts("DepthToSpace", 1, 28)
def _depth_to_space(op: OpNode) -> Node:
    x, b = op.input(0), op.integer("blocksize")
    n, c, h, w = x.shape
    if op.text("mode", "DCR") == "DCR":
        apart, perm = (n, b, b, c // (b * b), h, w), (0, 3, 4, 1, 5, 2)
    else:
        apart, perm = (n, c // (b * b), b, b, h, w), (0, 1, 4, 2, 5, 3)
    return reshape(transpose(reshape(x, apart), perm), (n, c // (b * b), h * b, w * b))


@converts("SpaceToDepth", 1, 13)
def _space_to_depth(op: OpNode) -> Node:
    x, b = op.input(0), op.integer("blocksize")
    n, c, h, w = x.shape
    apart = reshape(x, (n, c, h // b, b, w // b, b))
    return reshape(transpose(apart, (0, 3, 5, 1, 2, 4)), (n, c * b * b, h // b, w // b))


@converts("EyeLike", 9, 22)
def _eye_like(op: OpNode) -> Node:
    x = op.input(0)
    dtype = element_type(op.integer("dtype"), op.where) if op.has("dtype") else x.dtype
    rows, columns = (Node(Iota(S64, x.shape, a)) for a in (0, 1))
    return convert(map_("equal", columns, map_("add", rows, const(op.integer("k", 0), S64))), dtype)


@converts("Gather", 1, 13)
def _gather(op: OpNode) -> Node:
    x = op.input(0)
    return Node(Gather(op.axis("axis", 0, len(x.shape))), x, op.input(1))


@converts("GatherElements", 11, 13)
def _gather_elements(op: OpNode) -> Node:
    x = op.input(0)
    return Node(Gather(op.axis("axis", 0, len(x.shape)), elementwise=True), x, op.input(1))


@converts("GatherND", 11, 13)
def _gather_nd(op: OpNode) -> Node:
    """Each row of the indices, as one number over the flattened axes it indexes."""
    x, indices = op.input(0), convert(op.input(1), S64)
    batch = op.integer("batch_dims", 0)
    depth = indices.shape[-1] if indices.shape else 0
    if not 0 <= batch < len(indices.shape) or batch + depth > len(x.shape) or depth == 0:
        raise op.malformed(f"GatherND from {x.type} by {indices.type}")
    indexed = x.shape[batch : batch + depth]
    strides = [math.prod(indexed[i + 1 :]) for i in range(depth)]
    wrapped = Node(Select(), map_("less", indices, const(0, S64)), map_("add", indices, extents(indexed)), indices)
    flat = reduce_("add", map_("multiply", wrapped, extents(strides)), [-1])
    if batch:
        lines = math.prod(x.shape[:batch])
        first = map_("multiply", Node(Iota(S64, (lines,), 0)), number(math.prod(indexed)))
        first = reshape(first, (*x.shape[:batch], *[1] * (len(flat.shape) - batch)))
        flat = map_("add", flat, first)
    rest = x.shape[batch + depth :]
    return Node(Gather(0), reshape(x, (math.prod(x.shape[: batch + depth]), *rest)), flat)


@converts("OneHot", 9, 28)
def _one_hot(op: OpNode) -> Node:
    """`on` where a coordinate along the new axis is the index; an index outside matches none."""
    indices, values = convert(op.input(0), S64), op.input(2)
    depth = op.known_number(1)
    if depth is None:
        raise Unmodelled("its depth is known only at run time")
    count = int(depth) if isinstance(depth, float) else depth
    rank = len(indices.shape) + 1
    axis = op.axis("axis", -1, rank)
    wrapped = Node(Select(), map_("less", indices, const(0, S64)), map_("add", indices, number(count)), indices)
    spread = reshape(wrapped, (*indices.shape[:axis], 1, *indices.shape[axis:]))
    hot = map_("equal", spread, expand_dims(Node(Iota(S64, (count,), 0)), axis, rank))
    off, on = (reshape(slice_(values, 0, i, i + 1), ()) for i in (0, 1))
    return Node(Select(), hot, on, off)


@converts("ReverseSequence", 10, 28)
def _reverse_sequence(op: OpNode) -> Node:
    """Line b of the batch axis has its first lengths[b] elements along the time axis in reverse."""
    x, lengths = op.input(0), convert(op.input(1), S64)
    rank = len(x.shape)
    time, batch = op.axis("time_axis", 0, rank), op.axis("batch_axis", 1, rank)
    if time == batch:
        raise op.malformed("ReverseSequence along its batch axis")
    step = expand_dims(Node(Iota(S64, (x.shape[time],), 0)), time, rank)
    length = expand_dims(lengths, batch, rank)
    mirrored = map_("subtract", map_("subtract", length, const(1, S64)), step)
    index = Node(Select(), map_("less", step, length), mirrored, step)
    return Node(Gather(time, elementwise=True), x, broadcast(index, x.shape))
