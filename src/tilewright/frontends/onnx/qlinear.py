"""onnxruntime's operators on quantised tensors (domain com.microsoft), which its quantisers and its optimiser write.

Each is read as its schema says it: dequantise, compute, quantise; products as products of shifted integers in s32. onnxruntime
itself folds scales beforehand or looks results up in tables, so a value that lies on a tie may be the neighbouring code.
"""

from __future__ import annotations

from collections.abc import Callable

from tilewright.dtype import F32
from tilewright.frontends.onnx.elementwise import leaky_relu
from tilewright.frontends.onnx.matmul import gemm_operands
from tilewright.frontends.onnx.node import OpNode, converts
from tilewright.frontends.onnx.norm import softmax
from tilewright.frontends.onnx.quantize import dynamic_u8, lined_up, shifted_product
from tilewright.frontends.onnx.scope import MICROSOFT
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, concat, const, convert, map_, reduce_, reshape
from tilewright.ir.graph import Node
from tilewright.ir.ops import Dequantize, Quantize, Select
from tilewright.ir.types import broadcast_shapes


def _real(op: OpNode, at: int) -> Node:
    """Inputs at, at + 1, at + 2: codes, scale and maybe zero point, as f32."""
    codes, scale, zero = op.input(at), op.input(at + 1), op.optional(at + 2)
    return Node(Dequantize(F32), codes, _one(scale), *([] if zero is None else [_one(zero)]))


def _coded(op: OpNode, y: Node, scale: Node, zero: Node | None) -> Node:
    """y in codes of the type of the node's first input."""
    if zero is None:
        return Node(Quantize(op.input(0).dtype), y, _one(scale))
    return Node(Quantize(zero.dtype), y, _one(scale), _one(zero))


def _one(parameter: Node) -> Node:
    if parameter.tensor.elements != 1:
        raise Unmodelled(f"a scale or zero point {parameter.type}")
    return reshape(parameter, ())


def _binary(function: str) -> Callable[[OpNode], Node]:
    def convert_binary(op: OpNode) -> Node:
        return _coded(op, map_(function, _real(op, 0), _real(op, 3)), op.input(6), op.optional(7))

    return convert_binary


converts("QLinearAdd", 1, 1, MICROSOFT)(_binary("add"))
converts("QLinearMul", 1, 1, MICROSOFT)(_binary("multiply"))


@converts("QLinearSigmoid", 1, 1, MICROSOFT)
def _sigmoid(op: OpNode) -> Node:
    return _coded(op, map_("logistic", _real(op, 0)), op.input(3), op.optional(4))


@converts("QLinearLeakyRelu", 1, 1, MICROSOFT)
def _leaky_relu(op: OpNode) -> Node:
    x = _real(op, 0)
    return _coded(op, leaky_relu(x, const(op.real("alpha", 0.01), F32)), op.input(3), op.optional(4))


@converts("QLinearSoftmax", 1, 1, MICROSOFT)
def _softmax(op: OpNode) -> Node:
    """A softmax of codes along one axis, or with an `opset` below 13 along all from it on."""
    x = _real(op, 0)
    y = softmax(x, op.axis("axis", -1, len(x.shape)), log=False, rest=op.integer("opset") < 13)
    return _coded(op, y, op.input(3), op.optional(4))


@converts("QLinearConcat", 1, 1, MICROSOFT)
def _concat(op: OpNode) -> Node:
    """Inputs: the result's scale and zero point, then codes, scale and zero point of each part. A part in the result's own
    codes is copied as it is."""
    scale, zero = op.input(0), op.input(1)
    parts: list[Node] = []
    for at in range(2, len(op.sources), 3):
        same = op.input(at + 1) is scale and op.optional(at + 2) is zero and op.input(at).dtype is zero.dtype
        parts.append(op.input(at) if same else Node(Quantize(zero.dtype), _real(op, at), _one(scale), _one(zero)))
    axis = op.axis("axis", None, len(parts[0].shape))
    return concat(parts, axis)


@converts("QLinearWhere", 1, 1, MICROSOFT)
def _where(op: OpNode) -> Node:
    read = (op.input(0), _real(op, 1), _real(op, 4))
    shape = broadcast_shapes(*(n.shape for n in read))
    chosen, zero = Node(Select(), *(broadcast(n, shape) for n in read)), op.input(8)
    return Node(Quantize(zero.dtype), chosen, _one(op.input(7)), _one(zero))


@converts("QLinearReduceMean", 1, 1, MICROSOFT)
def _reduce_mean(op: OpNode) -> Node:
    x = _real(op, 0)
    axes = op.integers("axes") if op.has("axes") else list(range(len(x.shape)))
    y = reduce_("mean", x, [op.normal_axis(a, len(x.shape)) for a in axes], bool(op.integer("keepdims", 1)))
    return _coded(op, y, op.input(3), op.optional(4))


@converts("QLinearGlobalAveragePool", 1, 1, MICROSOFT)
def _global_average_pool(op: OpNode) -> Node:
    x = _real(op, 0)
    rank = len(x.shape)
    axes = range(1, rank - 1) if op.integer("channels_last", 0) else range(2, rank)
    return _coded(op, reduce_("mean", x, list(axes), keepdims=True), op.input(3), op.optional(4))


def _by(op: OpNode, product: Node, factor: Node, bias: Node | None) -> Node:
    """product (s32) * factor + bias, in f32."""
    y = map_("multiply", convert(product, F32), factor)
    return y if bias is None else map_("add", y, convert(bias, F32))


@converts("MatMulIntegerToFloat", 1, 1, MICROSOFT)
def _matmul_integer_to_float(op: OpNode) -> Node:
    """(A - zero point) @ (B - zero point) * (a_scale * b_scale) + bias; B's scale and zero point one in all or one a column."""
    a, b = op.input(0), op.input(1)
    product = shifted_product(a, op.optional(4), b, op.optional(5))
    factor = map_("multiply", lined_up(op.input(2), a, True), lined_up(op.input(3), b, False))
    return convert(_by(op, product, convert(factor, F32), op.optional(6)), op.input(2).dtype)


@converts("DynamicQuantizeMatMul", 1, 1, MICROSOFT)
def _dynamic_quantize_matmul(op: OpNode) -> Node:
    """A quantised to u8 by its own range, times B; then as MatMulIntegerToFloat."""
    a, b = op.input(0), op.input(1)
    codes, scale, zero = dynamic_u8(a)
    product = shifted_product(codes, zero, b, op.optional(3))
    return _by(op, product, map_("multiply", scale, lined_up(op.input(2), b, False)), op.optional(4))


@converts("QGemm", 1, 1, MICROSOFT)
def _qgemm(op: OpNode) -> Node:
    """(A' - zero point) @ (B' - zero point) + C in s32, times alpha * a_scale * b_scale; in codes if it says which."""
    a, b = gemm_operands(op, 3)
    c = op.optional(6)
    product = shifted_product(a, _one(op.input(2)), b, op.input(5))
    if c is not None:
        product = map_("add", product, broadcast(c, product.shape))
    factor = map_("multiply", _one(op.input(1)), lined_up(op.input(4), b, False))
    if op.real("alpha", 1.0) != 1.0:
        factor = map_("multiply", factor, const(op.real("alpha"), F32))
    y = _by(op, product, factor, None)
    scale = op.optional(7)
    return y if scale is None else _coded(op, y, scale, op.optional(8))
