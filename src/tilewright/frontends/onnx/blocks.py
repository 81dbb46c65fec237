"""onnxruntime's lookup in a table of weights quantised by blocks (GatherBlockQuantized)."""

from __future__ import annotations

from tilewright.dtype import S64, U8
from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends.onnx.matmul import unpacked
from tilewright.frontends.onnx.node import OpNode, converts
from tilewright.ir.build import broadcast, const, convert, map_, reshape, slice_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Dequantize, Gather, Select


@converts("GatherBlockQuantized", 1, 1, "com.microsoft")
def _gather_block_quantized(op: OpNode) -> Node:
    """Slices of (code - zero point) * scale, a scale for each `block_size` along `quantize_axis`; 0 for an index outside.

    u8 data hold codes of `bits` bits, low bits first along the last axis; their zero point is 2**(bits - 1) when absent, that
    of a 4-bit type 0. What is gathered is the codes.
    """
    data, indices, scales, zeros = op.input(0), op.input(1), op.input(2), op.optional(3)
    rank = len(data.shape)
    axis, along = op.axis("gather_axis", 0, rank), op.axis("quantize_axis", 1, rank)
    block, bits = op.integer("block_size", 128), op.integer("bits", 4)
    if data.dtype.is_float or block < 1:
        raise UnsupportedError(f"GatherBlockQuantized of {data.type}", where=op.where, hint="integer codes by blocks")
    if data.dtype is U8:
        if bits not in (2, 4, 8):
            raise UnsupportedError(f"GatherBlockQuantized of {bits} bits", where=op.where, hint="2, 4 or 8 bits")
        extent = data.shape[-1] * (8 // bits)
        data = _codes(data, bits, extent)
        if zeros is not None:
            zeros = _codes(zeros, bits, scales.shape[-1])
        else:
            zeros = broadcast(const(1 << bits - 1, data.dtype), scales.shape)
    wanted = tuple(-(-d // block) if a == along else d for a, d in enumerate(data.shape))
    if scales.shape != wanted or (zeros is not None and zeros.shape != wanted):
        raise InputError(f"GatherBlockQuantized with scales {scales.type} for {data.type}", where=op.where)
    parameters = [scales] if zeros is None else [scales, zeros]
    if axis == along:
        y = Node(Gather(axis), Node(Dequantize(scales.dtype, _blocks(rank, along, block)), data, *parameters), _inside(op))
    else:
        picked = [Node(Gather(axis), t, _inside(op)) for t in (data, *parameters)]
        place = along if along < axis else along + len(indices.shape) - 1
        y = Node(Dequantize(scales.dtype, _blocks(len(picked[0].shape), place, block)), *picked)
    n = data.shape[axis]
    index = convert(indices, S64)
    known = map_("and", map_("less", index, const(n, S64)), map_("greater_equal", index, const(-n, S64)))
    known = reshape(known, (*[1] * axis, *indices.shape, *[1] * (rank - 1 - axis)))
    return Node(Select(), broadcast(known, y.shape), y, const(0.0, y.dtype))


def _inside(op: OpNode) -> Node:
    """Indices, those outside as the nearest inside."""
    n = _extent(op)
    return map_("clamp", const(-n, S64), convert(op.input(1), S64), const(n - 1, S64))


def _extent(op: OpNode) -> int:
    data = op.input(0)
    return data.shape[op.axis("gather_axis", 0, len(data.shape))]


def _blocks(rank: int, axis: int, block: int) -> tuple[int, ...]:
    return tuple(block if a == axis else 1 for a in range(rank))


def _codes(packed: Node, bits: int, extent: int) -> Node:
    """u8 [..., bytes] as codes [..., extent]."""
    rows = packed.tensor.elements // packed.shape[-1] if packed.shape[-1] else 0
    codes = unpacked(reshape(packed, (rows, packed.shape[-1])), bits)
    return reshape(slice_(codes, 1, 0, extent), (*packed.shape[:-1], extent))
