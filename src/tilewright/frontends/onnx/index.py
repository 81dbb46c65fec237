"""ONNX's operators that pick elements by index."""

from __future__ import annotations

import math

import torch

from tilewright.dtype import S64
from tilewright.errors import InputError
from tilewright.frontends.onnx.node import OpNode, Unmodelled, converts
from tilewright.ir.build import broadcast, const, convert, expand_dims, map_, reduce_, reshape, slice_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather, Iota, Select


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
        raise InputError(f"GatherND from {x.type} by {indices.type}", where=op.where, hint="export the model again")
    indexed = x.shape[batch : batch + depth]
    strides = [math.prod(indexed[i + 1 :]) for i in range(depth)]
    extents = const(torch.tensor(indexed, dtype=torch.int64))
    wrapped = Node(Select(), map_("less", indices, const(0, S64)), map_("add", indices, extents), indices)
    flat = reduce_("add", map_("multiply", wrapped, const(torch.tensor(strides, dtype=torch.int64))), [-1])
    if batch:
        lines = math.prod(x.shape[:batch])
        first = map_("multiply", Node(Iota(S64, (lines,), 0)), const(math.prod(indexed), S64))
        first = reshape(first, (*x.shape[:batch], *[1] * (len(flat.shape) - batch)))
        flat = map_("add", flat, first)
    rest = x.shape[batch + depth :]
    return Node(Gather(0), reshape(x, (math.prod(x.shape[: batch + depth]), *rest)), flat)


@converts("OneHot", 9, 28)
def _one_hot(op: OpNode) -> Node:
    """`on` where a coordinate along the new axis is the index; an index outside matches none."""
    indices, values = convert(op.input(0), S64), op.input(2)
    depth = op.known(op.input(1))
    if depth is None:
        raise Unmodelled("its depth is known only at run time")
    count = int(depth.reshape(()).item())
    rank = len(indices.shape) + 1
    axis = op.axis("axis", -1, rank)
    wrapped = Node(Select(), map_("less", indices, const(0, S64)), map_("add", indices, const(count, S64)), indices)
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
        raise InputError("ReverseSequence along its batch axis", where=op.where, hint="export the model again")
    step = expand_dims(Node(Iota(S64, (x.shape[time],), 0)), time, rank)
    length = expand_dims(lengths, batch, rank)
    mirrored = map_("subtract", map_("subtract", length, const(1, S64)), step)
    index = Node(Select(), map_("less", step, length), mirrored, step)
    return Node(Gather(time, elementwise=True), x, broadcast(index, x.shape))
