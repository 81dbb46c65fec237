"""Attentions of few heads: plain ones, and one over codes."""

from tilewright.dtype import F32, S8
from tilewright.ir.build import const, input_, reshape, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Attention, Dequantize, Param, Quantize
from tilewright.ir.types import TensorType

# batch, query heads, heads a key serves, queries, keys, depth, width of the values
SHAPES = [
    (1, 2, 1, 5, 7, 16, 16),
    (2, 4, 2, 13, 33, 24, 40),
    (2, 3, 3, 1, 65, 8, 3),
    (1, 1, 1, 40, 20, 64, 64),
    (1, 2, 1, 6, 35, 9, 33),
]


def attention(shape, dtype=F32, mask=None, **attributes):
    batch, heads, group, queries, keys, depth, width = shape
    src = [
        input_("q", dtype, (batch, heads, queries, depth)),
        input_("k", dtype, (batch, heads // group, keys, depth)),
        input_("v", dtype, (batch, heads // group, keys, width)),
    ]
    if mask is not None:
        src.append(input_("mask", *mask))
    return Node(Attention(0.125, **attributes), *src)


def quantised(shape):
    """Codes in, scores and weights rounded to codes on the way, codes out in the layout the projection wants."""
    batch, heads, _, queries, keys, depth, width = shape
    types = [TensorType(S8, (batch, heads, n, d)) for n, d in ((queries, depth), (keys, depth), (keys, width))]
    src = [input_(name, t.dtype, t.shape) for name, t in zip("qkv", types, strict=True)]
    operands = tuple(Node(Dequantize(F32), Node(Param(i, t)), const(0.02, F32)) for i, t in enumerate(types))
    inner = Node(Acc(TensorType(F32, (batch, heads, queries, keys))))

    def rounded(scale):
        return Node(Dequantize(F32), Node(Quantize(S8), inner, const(scale, F32)), const(scale, F32))

    acc = Node(Acc(TensorType(F32, (batch, heads, queries, width))))
    codes = Node(Quantize(S8), acc, const(0.01, F32))
    store = reshape(transpose(codes, (0, 2, 1, 3)), (batch, queries, heads * width))
    return Node(Attention(1.0, "no", True, operands, rounded(0.05), rounded(1 / 127), (store,)), *src)
