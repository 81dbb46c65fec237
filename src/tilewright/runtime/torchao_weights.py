"""Reader of torchao's quantised tensors (0.18): the subclasses that its `quantize_` puts into layers, and what its safetensors
files hold of them. torchao itself is not needed.

A tensor is told by the name of its class; its data and its facts have the names that torchao gives them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import torch

from tilewright.dtype import S4, S8
from tilewright.errors import InputError, TypeMismatchError, UnsupportedError
from tilewright.runtime.quantized_weight import QuantizedWeight
from tilewright.runtime.weight_formats import from_codes, from_fp4, from_torch_int4

DATA = ("qdata", "scale", "zero_point", "scale_and_zero", "per_tensor_scale", "act_pre_scale")
FACTS = ("block_size", "shape", "target_dtype", "elem_dtype", "is_swizzled_scales", "act_quant_kwargs")
TILE = 128, 4  # rows and columns of a tile of swizzled scales


def is_torchao(weight: object) -> bool:
    """Tell whether a tensor is one of torchao's."""
    return type(weight).__module__.partition(".")[0] == "torchao"


def from_torchao(kind: str, data: Mapping[str, torch.Tensor], facts: Mapping[str, object]) -> QuantizedWeight:
    """A weight of the parts of one of torchao's tensors, dequantised bit for bit as it is there.

    Args:
        kind: Int8Tensor, Float8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor, Int4TilePackedTo4dTensor, MXTensor or NVFP4Tensor.
        data: its tensors by torchao's names (`DATA`).
        facts: its attributes (`FACTS`).

    Raises:
        TypeMismatchError: extents or types do not fit together.
        InputError: a part is missing.
        UnsupportedError: another class, codes of other bits, or a weight that scales activations beforehand.
    """
    missing = [n for n in _NEEDED.get(kind, ()) if n not in data]
    if missing:
        raise InputError(f"a {kind} without {missing[0]}", hint="all tensors that torchao writes of one")
    if data.get("act_pre_scale") is not None:
        raise UnsupportedError(f"a {kind} with act_pre_scale, which scales activations", hint="quantise without SmoothQuant")
    qdata, scale = data.get("qdata"), data.get("scale")
    block = _extents(facts.get("block_size"))
    if kind in ("Int8Tensor", "Float8Tensor"):
        assert qdata is not None and scale is not None
        return from_codes(qdata, scale, data.get("zero_point"), block=block if len(block) == 2 else None)
    if kind == "IntxUnpackedToInt8Tensor":
        assert qdata is not None and scale is not None
        bits = re.fullmatch(r"(?:torch\.)?int([1-8])", str(facts.get("target_dtype")))
        if bits is None:
            raise UnsupportedError(f"codes of {facts.get('target_dtype')}", hint="int1 to int8")
        if len(block) != 2 or block[0] != 1:
            raise UnsupportedError(f"a {kind} with blocks of {list(block)}", hint="groups along `in`")
        zeros = data["zero_point"]
        return QuantizedWeight.of(
            qdata, scale, S4 if int(bits[1]) <= 4 else S8, block[1], zero_points=zeros if bool(zeros.any()) else None
        )
    if kind == "Int4Tensor":
        assert qdata is not None and scale is not None
        offsets = data["zero_point"].t().to(torch.float32).contiguous()
        count, packed = 2 * qdata.shape[1], qdata.contiguous().view(torch.uint8)
        held = offsets if bool(offsets.any()) else None
        return QuantizedWeight(S4, packed, scale.t().contiguous(), count, _group(block, count), offsets=held)
    if kind == "Int4TilePackedTo4dTensor":
        assert qdata is not None
        shape = _extents(facts.get("shape"))
        return from_torch_int4(qdata, data["scale_and_zero"], shape=(shape[0], shape[1]) if len(shape) == 2 else None)
    if kind in ("MXTensor", "NVFP4Tensor"):
        assert qdata is not None and scale is not None
        return _from_mx(kind, qdata, scale, data.get("per_tensor_scale"), facts)
    raise UnsupportedError(f"a {kind} of torchao", hint=", ".join(_NEEDED))


_NEEDED = {
    "Int8Tensor": ("qdata", "scale"),
    "Float8Tensor": ("qdata", "scale"),
    "IntxUnpackedToInt8Tensor": ("qdata", "scale", "zero_point"),
    "Int4Tensor": ("qdata", "scale", "zero_point"),
    "Int4TilePackedTo4dTensor": ("qdata", "scale_and_zero"),
    "MXTensor": ("qdata", "scale"),
    "NVFP4Tensor": ("qdata", "scale"),
}


def _from_mx(
    kind: str, qdata: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None, facts: Mapping[str, object]
) -> QuantizedWeight:
    """Floats of 8 or 4 bits with scales by blocks along `in`, which may be swizzled as cuBLAS reads them."""
    block = facts.get("block_size")
    if not isinstance(block, int) or block < 1 or qdata.dim() != 2 or qdata.stride(0) < qdata.stride(1):
        raise TypeMismatchError(f"a {kind} of {list(qdata.shape)} with blocks of {block}", hint="[out, in], not transposed")
    halves = kind == "NVFP4Tensor" or "float4" in str(facts.get("elem_dtype"))
    out, count = qdata.shape[0], qdata.shape[1] * (2 if halves and qdata.element_size() == 1 else 1)
    scale = _unswizzled(scale, out, count // block) if facts.get("is_swizzled_scales") else scale.reshape(out, -1)
    if kind == "MXTensor":
        scale = scale.view(torch.uint8)
    if halves:
        return from_fp4(qdata.view(torch.uint8), scale, factor, divides=False)
    return from_codes(qdata, scale, block=(1, block))


def _unswizzled(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scales [rows, columns] of tiles of 128 x 4, in each of which rows that are 32 apart lie side by side.

    Source: cuBLAS 12.8, "1D block scaling factors layout".

    Raises:
        TypeMismatchError: there are not so many.
    """
    high, wide = -(-rows // TILE[0]), -(-columns // TILE[1])
    if scale.numel() != high * wide * TILE[0] * TILE[1]:
        raise TypeMismatchError(f"swizzled scales {list(scale.shape)} for {[rows, columns]}", hint="whole tiles of 128 x 4")
    bits = scale.contiguous().view(torch.uint8).reshape(high, wide, 32, 4, 4)
    whole = bits.permute(0, 3, 2, 1, 4).reshape(high * TILE[0], wide * TILE[1])
    return whole[:rows, :columns].contiguous().view(scale.dtype)


def _extents(value: object) -> tuple[int, ...]:
    given = cast("list[object]", list(cast("Any", value))) if isinstance(value, (list, tuple)) else []
    return tuple(n for n in given if isinstance(n, int))


def _group(block: tuple[int, ...], count: int) -> int:
    return block[-1] if block else count


def parts_of(weight: torch.Tensor) -> tuple[str, dict[str, torch.Tensor], dict[str, object]]:
    """The kind, the data and the facts of a tensor of torchao's, as `from_torchao` takes them."""
    data = {n: t for n in DATA if isinstance(t := getattr(weight, n, None), torch.Tensor)}
    facts: dict[str, object] = {n: getattr(weight, n, None) for n in FACTS}
    return type(weight).__name__, data, facts


def quantizes_activations(facts: Mapping[str, object]) -> bool:
    """Tell whether activations are quantised to 8 bits as they come, a scale a row and no zero point."""
    asked = facts.get("act_quant_kwargs")
    if asked is None:
        return False
    said = str(asked)
    return "PerRow" in said and "ASYMMETRIC" not in said and ("Int8" in said or "Float8" in said)
