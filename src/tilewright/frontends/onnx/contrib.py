"""onnxruntime's own operators (domain com.microsoft) that its optimiser writes: activations, norms, products, embeddings.

Source of their meanings: onnxruntime's contrib operator schemas, checked against its CPU kernels.
"""

from __future__ import annotations

from tilewright.dtype import F32, S32, S64
from tilewright.frontends.onnx.elementwise import hard_sigmoid, leaky_relu, swish
from tilewright.frontends.onnx.matmul import gemm_of, matmul
from tilewright.frontends.onnx.node import Converter, OpNode, converts
from tilewright.frontends.onnx.scope import MICROSOFT
from tilewright.ir.build import broadcast, const, convert, map_, reduce_, swap_last, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather, Iota, LayerNorm


def _activated(function: str) -> Converter:
    """function(x + bias), the bias optional and rounded as x is."""

    def convert_activation(op: OpNode) -> Node:
        x, bias = op.input(0), op.optional(1)
        return map_(function, x if bias is None else map_("add", x, bias))

    return convert_activation


converts("Gelu", 1, 1, MICROSOFT)(_activated("gelu"))
converts("BiasGelu", 1, 1, MICROSOFT)(_activated("gelu"))
converts("FastGelu", 1, 1, MICROSOFT)(_activated("gelu_tanh"))


@converts("QuickGelu", 1, 1, MICROSOFT)
def _quick_gelu(op: OpNode) -> Node:
    return swish(op.input(0), op.real("alpha", 1.702))


@converts("SimplifiedLayerNormalization", 1, 1, MICROSOFT)
def _simplified_layer_normalization(op: OpNode) -> list[Node | None]:
    """RMS norm, in the type of the scale; onnxruntime has it in ONNX's domain."""
    x, scale = op.input(0), op.input(1)
    axis = op.axis("axis", -1, len(x.shape))
    epsilon = op.real("epsilon", 1e-5)
    y = Node(LayerNorm(axis, epsilon, center=False), convert(x, scale.dtype), scale)
    return [y, _inverse_rms(x, axis, epsilon) if op.wants(1) else None]


def _inverse_rms(x: Node, axis: int, epsilon: float) -> Node:
    wide = convert(x, F32)
    axes = list(range(axis, len(x.shape)))
    mean = reduce_("mean", map_("multiply", wide, wide), axes, keepdims=True)
    return map_("rsqrt", map_("add", mean, const(epsilon, F32)))


@converts("SkipLayerNormalization", 1, 1, MICROSOFT)
@converts("SkipSimplifiedLayerNormalization", 1, 1, MICROSOFT)
def _skip_layer_normalization(op: OpNode) -> list[Node | None]:
    """Norm of x + skip + bias over the last axis, and that sum."""
    simplified = op.op_type.startswith("SkipSimplified")
    x, skip, scale = op.input(0), op.input(1), op.input(2)
    beta, bias = (None, op.optional(3)) if simplified else (op.optional(3), op.optional(4))
    if op.wants(1) or op.wants(2):
        raise op.refuse(f"{op.op_type} with a mean or a variance", "only training asks for them")
    total = map_("add", x, broadcast(skip, x.shape))
    if bias is not None:
        total = map_("add", total, bias)
    given = [scale] if beta is None else [scale, beta]
    y = Node(LayerNorm(len(x.shape) - 1, op.real("epsilon", 1e-12), center=not simplified), total, *given)
    return [y, None, None, total]


@converts("EmbedLayerNormalization", 1, 1, MICROSOFT)
def _embed_layer_normalization(op: OpNode) -> list[Node | None]:
    """Norm of the sum of word, position and segment embeddings; how many mask entries of a row are 1; and the sum."""
    ids, segments = op.input(0), op.optional(1)
    words, positions, kinds = op.input(2), op.input(3), op.optional(4)
    batch, length = ids.shape
    given = op.optional(8)
    if given is None and length > positions.shape[0]:
        what = f"{op.op_type} of {length} positions by a table {positions.type}"
        raise op.malformed(what, "a shorter sequence, or export the model with a longer table")
    at = given if given is not None else Node(Iota(S64, (1, length), 1))
    pick = Gather(0, wraps=False)
    total = map_("add", Node(pick, words, ids), broadcast(Node(pick, positions, at), (batch, length, words.shape[1])))
    if segments is not None and kinds is not None:
        total = map_("add", total, Node(pick, kinds, segments))
    y = Node(LayerNorm(2, op.real("epsilon", 1e-12)), total, op.input(5), op.input(6))
    count = None
    if op.wants(1):
        mask = op.optional(7)
        if mask is None:
            count = broadcast(const(0, S32), (batch,))
        else:
            count = reduce_("add", convert(map_("equal", mask, const(1, mask.dtype)), S32), [1])
    return [y, count, total]


@converts("FusedMatMul", 1, 1, MICROSOFT)
@converts("TransposeMatMul", 1, 1, MICROSOFT)
def _fused_matmul(op: OpNode) -> Node:
    """alpha * A' @ B', either with its last two axes exchanged, or its first before the last but one (`transBatch`)."""
    a, b = (_fused_operand(op, i, "AB"[i]) for i in (0, 1))
    alpha = op.real("alpha", 1.0)
    if alpha == 1.0:
        return matmul(a, b, out_dtype=a.dtype)
    wide = matmul(a, b)
    return convert(map_("multiply", wide, const(alpha, wide.dtype)), a.dtype)


def _fused_operand(op: OpNode, index: int, name: str) -> Node:
    x = op.input(index)
    rank = len(x.shape)
    if op.integer(f"transBatch{name}", 0) and rank > 2:
        x = transpose(x, (*range(1, rank - 1), 0, rank - 1))
    return swap_last(x) if op.integer(f"trans{name}", 0) and rank > 1 else x


@converts("FusedGemm", 1, 1, MICROSOFT)
def _fused_gemm(op: OpNode) -> Node:
    return _activation(op, gemm_of(op))


def _activation(op: OpNode, y: Node) -> Node:
    """The node's `activation` of y, with its alpha, beta and gamma.

    Raises:
        UnsupportedError: no such activation.
    """
    name = op.text("activation", "")
    if name in ("Relu", "Sigmoid", "Tanh", ""):
        return map_({"Relu": "relu", "Sigmoid": "logistic", "Tanh": "tanh"}[name], y) if name else y
    dtype = y.dtype
    given = [op.real(f"activation_{n}") for n in ("alpha", "beta") if op.has(f"activation_{n}")]
    first, second = (*given, 0.0, 0.0)[:2]
    if name == "LeakyRelu":
        return leaky_relu(y, const(first if given else 0.01, dtype))
    if name == "Clip":
        return map_("clamp", const(first, dtype), y, const(second, dtype))
    if name == "HardSigmoid":
        return hard_sigmoid(y, first if given else 0.2, second if given else 0.5)
    raise op.refuse(f"{op.op_type} with activation {name!r}", "save the model unoptimised")
