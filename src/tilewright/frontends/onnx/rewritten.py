"""onnxruntime's operators around convolutions and pools, as the ONNX operators that they fuse.

A rewriter gives the nodes that stand for one; it reads that node's inputs as i0, i1, … and makes its results o0, o1, ….
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilewright.dtype import S8, U8
from tilewright.frontends.onnx.node import OpNode
from tilewright.frontends.onnx.scope import MICROSOFT
from tilewright.frontends.onnx.tensors import element_code

if TYPE_CHECKING:
    import onnx

Rewriter = Callable[[OpNode], "list[onnx.NodeProto]"]
OPSET = 19  # of the nodes that rewriters give

REWRITERS: dict[tuple[str, str], Rewriter] = {}


def _rewrites(name: str) -> Callable[[Rewriter], Rewriter]:
    def register(f: Rewriter) -> Rewriter:
        REWRITERS[MICROSOFT, name] = f
        return f

    return register


def rewritten(op: OpNode) -> onnx.FunctionProto | None:
    """The operator as a function of ONNX's own; None if no rewriter is written for it."""
    import onnx

    rewriter = REWRITERS.get((op.domain, op.op_type))
    if (op.domain, op.op_type) == ("", "MaxPool") and op.input(0).dtype in (S8, U8):
        rewriter = _max_pool
    if rewriter is None:
        return None
    return onnx.helper.make_function(
        "tilewright",
        op.op_type,
        [f"i{i}" for i in range(len(op.sources))],
        [f"o{i}" for i in range(len(op.outputs))],
        rewriter(op),
        [onnx.helper.make_opsetid("", OPSET)],
    )


def _node(kind: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    import onnx

    return onnx.helper.make_node(kind, inputs, [output], **attributes)


def _kept(op: OpNode, *dropped: str) -> dict[str, Any]:
    """The node's attributes but those."""
    import onnx

    return {name: onnx.helper.get_attribute_value(a) for name, a in op.attributes.items() if name not in dropped}


def _moved(nodes: list[onnx.NodeProto], rank: int, source: str, result: str) -> list[onnx.NodeProto]:
    """Nodes from `x` to `y` of [N, C, …], around which source and result are [N, …, C]."""
    first = _node("Transpose", [source], "x", perm=[0, rank - 1, *range(1, rank - 1)])
    return [first, *nodes, _node("Transpose", ["y"], result, perm=[0, *range(2, rank), 1])]


@_rewrites("NhwcMaxPool")
def _nhwc_max_pool(op: OpNode) -> list[onnx.NodeProto]:
    return _moved([_node("MaxPool", ["x"], "y", **_kept(op))], len(op.input(0).shape), "i0", "o0")


def _max_pool(op: OpNode) -> list[onnx.NodeProto]:
    """MaxPool of 8-bit integers, which the reference evaluator pads with NaN, by way of f32."""
    import onnx

    pool = onnx.helper.make_node("MaxPool", ["x"], ["y", *(["o1"] if op.wants(1) else [])], **_kept(op))
    back = _node("Cast", ["y"], "o0", to=element_code(op.input(0).dtype))
    return [_node("Cast", ["i0"], "x", to=onnx.TensorProto.FLOAT), pool, back]


@_rewrites("QLinearAveragePool")
def _qlinear_average_pool(op: OpNode) -> list[onnx.NodeProto]:
    read = ["i0", "i1", *(["i2"] if op.optional(2) is not None else [])]
    written = ["o", "i3", *(["i4"] if op.optional(4) is not None else [])]
    pool = _node("AveragePool", ["x"], "y", **_kept(op, "channels_last"))
    if op.integer("channels_last", 0):
        inner = _moved([pool], len(op.input(0).shape), "f", "o")
    else:
        inner = [_node("Identity", ["f"], "x"), pool, _node("Identity", ["y"], "o")]
    return [_node("DequantizeLinear", read, "f"), *inner, _node("QuantizeLinear", written, "o0")]


@_rewrites("QLinearConv")
def _qlinear_conv(op: OpNode) -> list[onnx.NodeProto]:
    rest = [f"i{i}" if op.optional(i) is not None else "" for i in range(1, len(op.sources))]
    if not op.integer("channels_last", 0):
        return [_node("QLinearConv", ["i0", *rest], "o0", **_kept(op, "channels_last"))]
    conv = _node("QLinearConv", ["x", *rest], "y", **_kept(op, "channels_last"))
    return _moved([conv], len(op.input(0).shape), "i0", "o0")


@_rewrites("FusedConv")
@_rewrites("NhwcFusedConv")
def _fused_conv(op: OpNode) -> list[onnx.NodeProto]:
    """Conv, then + Z, then the activation."""
    sources = ["x", "i1", *(["i2"] if op.optional(2) is not None else [])]
    conv = [_node("Conv", sources, "c", **_kept(op, "activation", "activation_params"))]
    rank = len(op.input(0).shape)
    if op.op_type == "NhwcFusedConv":
        conv[0].output[0] = "y"
        nodes = _moved(conv, rank, "i0", "c")
    else:
        nodes = [_node("Identity", ["i0"], "x"), *conv]
    last = "c"
    if op.optional(3) is not None:
        nodes.append(_node("Add", ["c", "i3"], "z"))
        last = "z"
    return [*nodes, *_activation(op, last, "o0")]


def _activation(op: OpNode, source: str, result: str) -> list[onnx.NodeProto]:
    name = op.text("activation", "")
    given = op.reals("activation_params") if op.has("activation_params") else []
    if not name:
        return [_node("Identity", [source], result)]
    if name in ("Relu", "Sigmoid", "Tanh"):
        return [_node(name, [source], result)]
    if name == "LeakyRelu":
        return [_node(name, [source], result, **dict(zip(("alpha",), given, strict=False)))]
    if name == "HardSigmoid":
        return [_node(name, [source], result, **dict(zip(("alpha", "beta"), given, strict=False)))]
    if name == "Clip" and len(given) == 2:
        limits = [_node("Constant", [], n, value_float=v) for n, v in zip(("low", "high"), given, strict=True)]
        return [*limits, _node("Clip", [source, "low", "high"], result)]
    raise op.refuse(f"{op.op_type} with activation {name!r}", "save the model unoptimised")
