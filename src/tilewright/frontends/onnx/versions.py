"""Older meanings of operators that are left to onnx's reference evaluator, which mostly has the newest alone.

A node whose meaning changed is written as one of today's where that can be said (`modern`); any other is refused rather
than run with a meaning that is not its own. Source: the changelog of onnx's operator schemas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from tilewright.errors import UnsupportedError
from tilewright.ir.build import const
from tilewright.ir.graph import Node

if TYPE_CHECKING:
    import onnx

# The first version that means what the newest does, for operators of which an earlier one does not.
_SINCE = {
    **dict.fromkeys(("Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "PRelu", "Pow", "Sub", "Xor"), 7),
    "Concat": 4,
    "GRU": 7,
    "GridSample": 20,
    "Hardmax": 13,
    "LSTM": 7,
    "LogSoftmax": 13,
    "LpPool": 2,
    "RNN": 7,
    "Resize": 11,
    "RoiAlign": 16,
    "Scan": 9,
    "Selu": 6,
    "Softmax": 13,
    "SpaceToDepth": 1,
    "Tile": 6,
    "Upsample": 1 << 30,  # deprecated since 10, and hardly implemented
}
# What the evaluator leaves out without a word: attributes, and an input that is there.
_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
_LEFT_OUT, _LENGTHS = frozenset({"activations", "clip", "input_forget"}), 4
_GRID_MODES = {b"bilinear": "linear", b"bicubic": "cubic"}
_RESIZE_OPSET = 13


def refuse_changed(proto: onnx.NodeProto, version: int, where: str) -> None:
    """Refuse a node of a version whose meaning is not that of the reference evaluator, and what that leaves out.

    Raises:
        UnsupportedError: it means something else.
    """
    since = _SINCE.get(proto.op_type, 1)
    if version < since:
        raise UnsupportedError(
            f"{proto.op_type} of version {version} means something else than the later one of onnx's reference evaluator",
            where=where,
            hint="convert the model to a newer operator set: onnx.version_converter.convert_version(model, 13)",
        )
    if proto.op_type in _RECURRENT:
        left_out = [a.name for a in proto.attribute if a.name in _LEFT_OUT]
        left_out += ["sequence_lens"] if len(proto.input) > _LENGTHS and proto.input[_LENGTHS] else []
        if left_out:
            raise UnsupportedError(
                f"onnx's reference evaluator leaves out {' and '.join(left_out)} of {proto.op_type}",
                where=where,
                hint="take it out of the Loop, Scan or If around it, where it is read, or export the model without them",
            )


def modern(
    proto: onnx.NodeProto,
    version: int,
    sources: Sequence[Node | None],
    known: Mapping[Node, torch.Tensor],
    opsets: Mapping[str, int],
) -> tuple[onnx.NodeProto, Sequence[Node | None], Mapping[str, int], int]:
    """The node (already a copy) as today's operator of the same meaning: it, its sources, the operator sets and its version.

    What has no such form is returned as it is.
    """
    import onnx

    attributes = {a.name: a for a in proto.attribute}
    if proto.op_type == "Selu" and version < 6:
        for name, value in (("alpha", 1.6732), ("gamma", 1.0507)):
            if name not in attributes:
                proto.attribute.append(onnx.helper.make_attribute(name, value))
        return proto, sources, {**opsets, "": 6}, 6
    if proto.op_type == "Elu" and version < 6:
        return proto, sources, {**opsets, "": 6}, 6
    if proto.op_type == "Scatter":  # renamed
        proto.op_type = "ScatterElements"
        return proto, sources, {**opsets, "": 11}, 11
    if proto.op_type == "GridSample" and version < 20:
        mode = attributes["mode"].s if "mode" in attributes else b"bilinear"
        _set(proto, mode=_GRID_MODES.get(mode, mode))
        return proto, sources, {**opsets, "": 20}, 20
    if proto.op_type == "RoiAlign" and version < 16:
        _set(proto, coordinate_transformation_mode="output_half_pixel")
        return proto, sources, {**opsets, "": 16}, 16
    if (proto.op_type == "Upsample" and version >= 7) or (proto.op_type == "Resize" and version == 10):
        if proto.op_type == "Upsample" and version == 7:
            scales = torch.tensor(list(attributes["scales"].floats), dtype=torch.float32)
            node = const(scales)
        else:
            given = sources[1] if len(sources) > 1 else None
            if given is None or (given not in known and proto.op_type == "Resize"):
                return proto, sources, opsets, version
            node, scales = given, known.get(given, torch.ones(1))  # Upsample's are 1 or more
        nearest = attributes["mode"].s != b"linear" if "mode" in attributes else True
        if nearest and bool((scales < 1).any()):
            if bool((scales > 1).any()):
                return proto, sources, opsets, version
            rounding = "ceil"  # what onnxruntime takes when it shrinks
        else:
            rounding = "floor"
        resize = onnx.helper.make_node(
            "Resize",
            [proto.input[0], "", "scales"],
            list(proto.output),
            name=proto.name,
            mode="nearest" if nearest else "linear",
            coordinate_transformation_mode="asymmetric",
            nearest_mode=rounding,
        )
        return resize, (sources[0], None, node), {**opsets, "": _RESIZE_OPSET}, _RESIZE_OPSET
    corners = proto.op_type == "Resize" and any(a.s == b"align_corners" for a in proto.attribute)
    scales = sources[2] if corners and len(sources) == 3 else None
    smoothed = "antialias" in attributes and attributes["antialias"].i != 0
    if scales is not None and sources[0] is not None and scales in known and not smoothed:
        # onnxruntime takes whole extents for the distance of corners, the evaluator fractions of one; given sizes both agree.
        shape = sources[0].shape
        axes = attributes["axes"].ints if "axes" in attributes else range(len(shape))
        factors = known[scales].double().tolist()
        if len(factors) == len(axes) and all(-len(shape) <= a < len(shape) for a in axes):
            sizes = torch.tensor([math.floor(shape[a] * f) for a, f in zip(axes, factors, strict=True)])
            if bool((sizes > 0).all()):
                proto.input[2] = ""
                proto.input.append("sizes")
                return proto, (*sources[:2], None, const(sizes)), opsets, version
    return proto, sources, opsets, version


def _set(proto: onnx.NodeProto, **attributes: str | bytes) -> None:
    """Give attributes their values, whatever they were."""
    import onnx

    kept = [a for a in proto.attribute if a.name not in attributes]
    del proto.attribute[:]
    proto.attribute.extend([*kept, *(onnx.helper.make_attribute(k, v) for k, v in attributes.items())])
