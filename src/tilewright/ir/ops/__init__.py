"""Every operation of the graph. Importing this registers them all; an op is an attribute class (see `ir/graph.py`)."""

from tilewright.ir.ops.attention import Attention
from tilewright.ir.ops.collective import AllGather, AllReduce, AllToAll, Collective, Own, Place, ReduceScatter
from tilewright.ir.ops.elementwise import Convert, Dequantize, Map, Overflow, Quantize, Select
from tilewright.ir.ops.functions import FUNCTIONS
from tilewright.ir.ops.gemm import Gemm, gemm
from tilewright.ir.ops.norm import LayerNorm, Reduce, Softmax
from tilewright.ir.ops.shape import VIEWS, Broadcast, Concat, Gather, Iota, Pad, Reshape, Slice, Transpose, Write
from tilewright.ir.ops.source import Acc, Call, Const, Extents, Input, Item, Param, maker_of

ALIASES = (*VIEWS, Item)  # operations that compute nothing: they name what another has, or a part of it

__all__ = [
    "ALIASES",
    "FUNCTIONS",
    "VIEWS",
    "Acc",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Attention",
    "Broadcast",
    "Call",
    "Collective",
    "Concat",
    "Const",
    "Convert",
    "Dequantize",
    "Extents",
    "Gather",
    "Gemm",
    "Input",
    "Iota",
    "Item",
    "LayerNorm",
    "Map",
    "Overflow",
    "Own",
    "Pad",
    "Param",
    "Place",
    "Quantize",
    "Reduce",
    "ReduceScatter",
    "Reshape",
    "Select",
    "Slice",
    "Softmax",
    "Transpose",
    "Write",
    "gemm",
    "maker_of",
]
