"""ONNX's quantization: QuantizeLinear and its like, and products of quantized matrices."""

from __future__ import annotations

from tilewright.dtype import F32, F64, S32, U8
from tilewright.frontends.onnx.matmul import matmul
from tilewright.frontends.onnx.node import OpNode, converts
from tilewright.frontends.onnx.scope import MICROSOFT
from tilewright.frontends.onnx.tensors import element_type
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, const, convert, expand_dims, map_, reduce_, reshape, slice_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Const, Dequantize, Quantize, Select
from tilewright.ir.types import Shape


def _spread(op: OpNode, x: Node, parameter: Node) -> tuple[Node, Shape | None]:
    """A scale or zero point as the graph takes it (ready to broadcast), and the shape of a block if it is blocked."""
    rank = len(x.shape)
    block = op.integer("block_size", 0)
    if len(parameter.shape) > 1 or (block and len(parameter.shape) == rank):
        axis = op.axis("axis", 1, rank)
        if block < 1:
            raise op.malformed(f"scale {parameter.type} without a block size")
        return parameter, tuple(block if a == axis else 1 for a in range(rank))
    if parameter.tensor.elements == 1:
        return reshape(parameter, ()), None
    axis = op.axis("axis", 1, rank) if rank > 1 else 0
    if not parameter.shape or parameter.shape[0] != x.shape[axis]:
        raise op.malformed(f"{parameter.type} does not give one value for each of the {x.shape[axis]} along axis {axis}")
    return expand_dims(parameter, axis, rank), None


def _repeated(parameter: Node, shape: Shape, block: Shape | None) -> Node:
    """A blocked parameter with one value for each element."""
    for axis, size in enumerate(block or ()):
        if size > 1:
            before, held, after = parameter.shape[:axis], parameter.shape[axis], parameter.shape[axis + 1 :]
            apart = broadcast(reshape(parameter, (*before, held, 1, *after)), (*before, held, size, *after))
            parameter = slice_(reshape(apart, (*before, held * size, *after)), axis, 0, shape[axis])
    return parameter


def _zero_point(op: OpNode, x: Node, zero: Node | None) -> list[Node]:
    """The zero point, if there is one; of an 8-bit float only if it may be something else than 0."""
    if zero is None or (zero.dtype.is_float and _is_zero(zero)):
        return []
    return [_spread(op, x, zero)[0]]


def _is_zero(zero: Node) -> bool:
    return isinstance(zero.op, Const) and not bool(zero.op.data.tensor().float().ne(0).any())


@converts("QuantizeLinear", 10, 28)
@converts("QuantizeLinear", 1, 1, MICROSOFT)
def _quantize_linear(op: OpNode) -> Node:
    """saturate(round(x / scale) + zero point); from version 23 the quotient has the scale's precision or a stated one."""
    x, scale, zero = op.input(0), op.input(1), op.optional(2)
    target = element_type(op.integer("output_dtype"), op.where) if op.integer("output_dtype", 0) else None
    dtype = zero.dtype if zero is not None else target or U8
    if dtype.kind == "opaque" or not scale.dtype.is_float:
        raise Unmodelled("it quantizes to or by a type that Tilewright lacks")
    if target is not None and target is not dtype:
        raise op.malformed(f"output_dtype {target} with a zero point of {dtype}")
    overflow = "saturate" if op.integer("saturate", 1) or not dtype.is_float else "ieee"
    spread, block = _spread(op, x, scale)
    zeros = _zero_point(op, x, zero)
    if dtype.is_float and zeros:
        spread, *zeros = (convert(_repeated(p, x.shape, block), F32) for p in (spread, *zeros))
        return convert(map_("add", map_("divide", convert(x, F32), spread), zeros[0]), dtype, overflow)
    stated = element_type(op.integer("precision"), op.where) if op.integer("precision", 0) else None
    precision = stated or (scale.dtype if op.version >= 23 and not op.domain else F32)
    if precision.is_float and precision.bits < 32:
        # The quotient is rounded to the narrow type before it is rounded to an integer.
        spread, *zeros = (_repeated(p, x.shape, block) for p in (spread, *zeros))
        quotient = map_("divide", convert(x, precision), convert(spread, precision))
        return Node(Quantize(dtype, None, overflow), quotient, const(1.0, precision), *zeros)
    if precision is F64:
        x = convert(x, F64)
    return Node(Quantize(dtype, block, overflow), x, spread, *zeros)


@converts("DequantizeLinear", 10, 28)
@converts("DequantizeLinear", 1, 1, MICROSOFT)
def _dequantize_linear(op: OpNode) -> Node:
    """(x - zero point) * scale, in the scale's type or `output_dtype`."""
    x, scale = op.input(0), op.input(1)
    stated = op.integer("output_dtype", 0)
    dtype = element_type(stated, op.where) if stated else scale.dtype
    if not scale.dtype.is_float or not dtype.is_float:
        raise Unmodelled("it dequantizes by or to a type that Tilewright lacks")
    spread, block = _spread(op, x, scale)
    zeros = _zero_point(op, x, op.optional(2))
    if x.dtype.is_float and zeros:
        spread, *zeros = (convert(_repeated(p, x.shape, block), F32) for p in (spread, *zeros))
        return convert(map_("multiply", map_("subtract", convert(x, F32), zeros[0]), spread), dtype)
    return Node(Dequantize(dtype, block), x, spread, *zeros)


@converts("DynamicQuantizeLinear", 11, 11)
def _dynamic_quantize_linear(op: OpNode) -> list[Node]:
    return dynamic_u8(op.input(0))


def dynamic_u8(x: Node) -> list[Node]:
    """Codes, scale and zero point: u8 over the range of x widened to contain 0.

    The scale is (max - min) / 255, or 1 for an x of zeros as onnxruntime has it.
    """
    every = list(range(len(x.shape)))
    nought = const(0.0, F32)
    low = map_("minimum", reduce_("minimum", x, every), nought)
    high = map_("maximum", reduce_("maximum", x, every), nought)
    flat = map_("equal", low, high)
    ratio = map_("divide", map_("subtract", high, low), const(255.0, F32))
    scale = Node(Select(), flat, const(1.0, F32), ratio)
    offset = map_("divide", map_("subtract", nought, low), scale)
    zero = convert(map_("round_half_even", map_("clamp", nought, offset, const(255.0, F32))), U8)
    return [Node(Quantize(U8), x, scale, zero), scale, zero]


def lined_up(parameter: Node, x: Node, rows: bool) -> Node:
    """A scale or zero point ready to broadcast over the product: one in all, one a row of x, or one a column."""
    if parameter.tensor.elements == 1:
        return reshape(parameter, ())
    if rows and len(parameter.shape) == 1 and len(x.shape) > 1:
        return reshape(parameter, (*parameter.shape, 1))
    return parameter


def shifted_product(a: Node, a_zero: Node | None, b: Node, b_zero: Node | None) -> Node:
    """(a - a's zero point) @ (b - b's zero point) in s32, which wraps."""
    return matmul(_shifted(a, a_zero, rows=True), _shifted(b, b_zero, rows=False), acc_dtype=S32)


def _shifted(x: Node, zero: Node | None, rows: bool) -> Node:
    """x - zero point in s32; x itself without one."""
    return x if zero is None else map_("subtract", convert(x, S32), convert(lined_up(zero, x, rows), S32))


@converts("MatMulInteger", 10, 10)
def _matmul_integer(op: OpNode) -> Node:
    return shifted_product(op.input(0), op.optional(2), op.input(1), op.optional(3))


@converts("QLinearMatMul", 10, 21)
def _qlinear_matmul(op: OpNode) -> Node:
    """The s32 product of the shifted operands, times (a_scale * b_scale / y_scale), quantized by y's zero point.

    Operands in 8-bit floats are multiplied as they are, in f32.
    """
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (op.input(i) for i in range(8))
    out = y_zero.dtype
    if len({a.dtype.is_float, b.dtype.is_float, out.is_float}) > 1:
        raise Unmodelled("it mixes integers and floats")
    if a.dtype.is_float:
        if not all(_is_zero(z) for z in (a_zero, b_zero, y_zero)):
            raise Unmodelled("the zero point of an 8-bit float may not be 0")
        product = matmul(a, b, acc_dtype=F32)
    else:
        product = convert(shifted_product(a, a_zero, b, b_zero), F32)
    scales = [lined_up(a_scale, a, True), lined_up(b_scale, b, False), lined_up(y_scale, product, True)]
    by_a, by_b, by_y = (convert(s, F32) for s in scales)
    factor = map_("divide", map_("multiply", by_a, by_b), by_y)
    scaled = map_("multiply", product, factor)
    zeros = [] if out.is_float else [lined_up(y_zero, product, True)]
    return Node(Quantize(out), scaled, const(1.0, F32), *zeros)
