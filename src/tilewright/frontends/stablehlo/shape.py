"""Operations that move, repeat or pick whole axes: reshape, transpose, broadcast, slice, pad, concatenate, reverse, bitcast."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.dtype import S32, S64, DType
from tilewright.frontends.stablehlo.module import mlir_type
from tilewright.frontends.stablehlo.registry import Site, Value, lowers
from tilewright.ir.build import broadcast, concat, const, map_, reshape, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather, Iota, Pad, Slice


@lowers("stablehlo.reshape", "stablehlo.dynamic_reshape")
def _reshape(site: Site) -> Value:
    return reshape(site.nodes[0], site.out.shape)


@lowers("stablehlo.transpose")
def _transpose(site: Site) -> Value:
    return transpose(site.nodes[0], site.op.ints("permutation"))


@lowers("stablehlo.broadcast_in_dim", "stablehlo.dynamic_broadcast_in_dim")
def _broadcast_in_dim(site: Site) -> Value:
    """Axis i of x becomes axis dims[i] of the result: transposed into order, given axes of 1, repeated."""
    return broadcast_in_dim(site.nodes[0], site.op.ints("broadcast_dimensions"), site.out.shape)


@lowers("stablehlo.broadcast")
def _broadcast(site: Site) -> Value:
    return broadcast(site.nodes[0], site.out.shape)


def broadcast_in_dim(x: Node, dims: Sequence[int], shape: Sequence[int]) -> Node:
    """x repeated to `shape`, its axis i standing at dims[i]."""
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    x = transpose(x, order)
    placed = [1] * len(shape)
    for axis, extent in zip(sorted(dims), x.shape, strict=True):
        placed[axis] = extent
    # Axes before the first need not be written: they are what broadcasting adds.
    first = min(dims, default=len(shape))
    return broadcast(reshape(x, placed[first:]), shape)


@lowers("stablehlo.slice")
def _slice(site: Site) -> Value:
    start, stop, step = (site.op.ints(k) for k in ("start_indices", "limit_indices", "strides"))
    return strided_slice(site.nodes[0], start, stop, step)


def strided_slice(x: Node, start: Sequence[int], stop: Sequence[int], step: Sequence[int]) -> Node:
    """x[start:stop:step] on every axis; x itself if that is all of it."""
    if all(v == 0 for v in start) and tuple(stop) == x.shape and all(v == 1 for v in step):
        return x
    return Node(Slice(tuple(start), tuple(stop), tuple(step)), x)


@lowers("stablehlo.pad")
def _pad(site: Site) -> Value:
    x, value = site.nodes
    low, high, interior = (site.op.ints(k) for k in ("edge_padding_low", "edge_padding_high", "interior_padding"))
    return pad(x, value, low, high, interior)


def pad(x: Node, value: Node, low: Sequence[int], high: Sequence[int], interior: Sequence[int]) -> Node:
    """x with copies of a scalar around and between its elements; x itself if there are none."""
    if not any((*low, *high, *interior)):
        return x
    return Node(Pad(tuple(low), tuple(high), tuple(interior)), x, value)


@lowers("stablehlo.concatenate")
def _concatenate(site: Site) -> Value:
    return concat(site.nodes, site.op.integer("dimension"))


@lowers("stablehlo.reverse")
def _reverse(site: Site) -> Value:
    """Each axis read backwards: indices extent - 1, …, 1, 0."""
    (x,) = site.nodes
    for axis in site.op.ints("dimensions"):
        extent = x.shape[axis]
        if extent > 1:
            dtype = S32 if extent <= S32.max else S64
            backwards = map_("subtract", const(extent - 1, dtype), Node(Iota(dtype, (extent,), 0)))
            x = Node(Gather(axis), x, backwards)
    return x


@lowers("mhlo.bitcast")
def _bitcast(site: Site) -> Value:
    """XLA's bitcast keeps the bytes of a buffer: elements in the order of the source's layout, read in that of the result's.

    A layout lists axes from the one that varies fastest. Another element type of the same width is a `bitcast_convert`.
    """
    (x,) = site.nodes
    out = site.out
    if x.dtype is not out.dtype:
        if x.dtype.bits != out.dtype.bits:
            raise site.refuse(f"a bitcast from {x.tensor} to {out} regroups bytes", hint="read the program before optimisation")
        x = _reinterpreted(site, x, out.dtype)
    source = list(reversed(site.op.ints("source_layout", range(len(x.shape) - 1, -1, -1))))
    result = list(reversed(site.op.ints("result_layout", range(len(out.shape) - 1, -1, -1))))
    in_memory = reshape(transpose(x, source), [out.shape[d] for d in result])
    return transpose(in_memory, [result.index(d) for d in range(len(result))])


def _reinterpreted(site: Site, x: Node, dtype: DType) -> Node:
    source, result = mlir_type(x.tensor), mlir_type(x.tensor.with_dtype(dtype))
    text = (
        f"func.func @main(%x: {source}) -> {result} {{\n"
        f"  %y = stablehlo.bitcast_convert %x : ({source}) -> {result}\n  return %y : {result}\n}}"
    )
    (y,) = site.reader.expand(text, [x], site.op)
    assert isinstance(y, Node)
    return y
