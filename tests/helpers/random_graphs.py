"""Random programs: products with several stores, calls with several results, fusions, constants, views, in any order."""

import sys
import types

import torch
from hypothesis import strategies as st

from tilewright.dtype import F32, S8, S32
from tilewright.ir.build import broadcast, const, convert, input_, items, map_, reduce_, reshape, slice_, transpose
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Acc, Call, Concat, Dequantize, Gemm, Iota, Param, Quantize, Softmax, gemm

N = 4
SHAPE = (N, N)


def evaluate_call(call, values):
    """Two results of one source: what is above zero, and what is below."""
    return [values[0].clamp(min=0), values[0].clamp(max=0)]


fake = types.ModuleType("tilewright.frontends.splitter")
fake.evaluate_call = evaluate_call
sys.modules["tilewright.frontends.splitter"] = fake


def split_by_sign(x):
    """A call with two results."""
    return items(Node(Call("splitter", "Split", "", (x.tensor, x.tensor)), x))


def joined(x, y):
    """A gemm of two stores, each half of the columns, side by side again."""
    lhs, rhs = Node(Param(0, x.tensor)), Node(Param(1, y.tensor))
    acc = Node(Acc(Gemm(F32, lhs, rhs, ()).acc_type))
    stores = (map_("tanh", slice_(acc, -1, 0, N // 2)), slice_(acc, -1, N // 2, N))
    return items(Node(Gemm(F32, lhs, rhs, stores), x, y))


def quantised(x):
    """Quantise x to 8-bit codes, and dequantise those."""
    scale = const(0.1, F32)
    return Node(Dequantize(F32), Node(Quantize(S8), x, scale), scale)


def of_codes(x, y):
    """A product of codes."""
    a, b = (Node(Quantize(S8), v, const(0.05, F32)) for v in (x, y))
    return map_("multiply", convert(gemm(a, b, acc_dtype=S32), F32), const(0.0025, F32))


ONE = {
    "tanh": lambda x: map_("tanh", x),
    "relu": lambda x: map_("relu", x),
    "transpose": lambda x: transpose(x, (1, 0)),
    "reshape": lambda x: reshape(reshape(x, (2, 2 * N)), SHAPE),
    "softmax": lambda x: Node(Softmax(1), x),
    "row sums": lambda x: broadcast(reduce_("add", x, [1], keepdims=True), SHAPE),
    "quantised": quantised,
    "above": lambda x: split_by_sign(x)[0],
    "below": lambda x: split_by_sign(x)[1],
}
TWO = {
    "add": lambda x, y: map_("add", x, y),
    "gemm": lambda x, y: gemm(x, y),
    "joined": lambda x, y: Node(Concat(1), *joined(x, y)),
    "half": lambda x, y: Node(Concat(1), joined(x, y)[1], slice_(x, 1, 0, N // 2)),
    "codes": of_codes,
}
INPUTS = [input_("x", F32, SHAPE), input_("y", F32, SHAPE), input_("unused", F32, (3,))]
CONSTANTS = [
    const(torch.arange(16.0).reshape(SHAPE) / 10 - 0.7),
    const(torch.eye(N)),
    convert(Node(Iota(S32, SHAPE, 1)), F32),
]


@st.composite
def graphs(draw):
    """A program over two inputs and three constants, with up to three results (which may be inputs, constants, or repeated)."""
    values = [*INPUTS[:2], *CONSTANTS]
    for _ in range(draw(st.integers(0, 12))):
        if draw(st.booleans()):
            made = ONE[draw(st.sampled_from(sorted(ONE)))](draw(st.sampled_from(values)))
        else:
            made = TWO[draw(st.sampled_from(sorted(TWO)))](draw(st.sampled_from(values)), draw(st.sampled_from(values)))
        if draw(st.booleans()) and made.op.name != "gemm":
            made = map_("multiply", made, const(0.5, F32))
        values.append(made)
    outputs = [*draw(st.lists(st.sampled_from(values[-4:]), min_size=1, max_size=3)), values[-1]]
    return Graph("random", tuple(INPUTS), tuple(outputs), tuple(f"r{i}" for i in range(len(outputs))))


def feeds(seed=0):
    """Values for the inputs, in order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n.shape, generator=generator) for n in INPUTS]
