"""ONNX tensors, element types and NumPy arrays as Tilewright's: literals that load when first used, and back."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from tilewright.dtype import BY_NAME, OPAQUE, DType, from_numpy
from tilewright.errors import InputError
from tilewright.frontends.onnx.files import DataFiles, Span, malformed, quoted
from tilewright.ir import arrays
from tilewright.ir.few_bits import unpack_halves
from tilewright.ir.literal import Literal
from tilewright.ir.types import TensorType

if TYPE_CHECKING:
    import onnx

# TensorProto.DataType numbers (onnx.proto); the ones left out (strings, complex, 2 and 6 bits, …) are opaque.
_CODES = {
    "f32": 1,
    "u8": 2,
    "s8": 3,
    "u16": 4,
    "s16": 5,
    "s32": 6,
    "s64": 7,
    "pred": 9,
    "f16": 10,
    "f64": 11,
    "u32": 12,
    "u64": 13,
    "bf16": 16,
    "f8e4m3fn": 17,
    "f8e4m3fnuz": 18,
    "f8e5m2": 19,
    "f8e5m2fnuz": 20,
    "u4": 21,
    "s4": 22,
    "f4e2m1fn": 23,
}
_DTYPES = {code: BY_NAME[name] for name, code in _CODES.items()}
_STRING = 8
# Which typed field holds the elements when `raw_data` does not; the rest are in int32_data, as bits if not integers.
_FIELDS = {"f32": "float_data", "f64": "double_data", "s64": "int64_data", "u32": "uint64_data", "u64": "uint64_data"}
_TOO_MANY = 1 << 48  # elements; past any machine, and far enough below 2**63 that no product here overflows torch's


def element_type(code: int, where: str) -> DType:
    """The dtype with this TensorProto.DataType number; `OPAQUE` if Tilewright has none like it.

    Raises:
        InputError: ONNX has no such type.
    """
    import onnx

    found = _DTYPES.get(code)
    if found is not None:
        return found
    if code == 0 or code not in onnx.TensorProto.DataType.values():
        raise InputError(f"unknown element type {code}", where=where, hint="upgrade the onnx package if the model is newer")
    return OPAQUE


def element_code(dtype: DType) -> int:
    """The TensorProto.DataType number of a dtype."""
    return _CODES[dtype.name]


def checked_shape(dims: list[int], where: str) -> tuple[int, ...]:
    """`dims`, if a tensor can have them.

    Raises:
        InputError: one is negative, or together they are more than any machine holds.
    """
    elements = 1
    for d in dims:
        if d < 0:
            raise malformed(f"a negative extent in the shape {dims[:8]}", where)
        elements *= max(d, 1)
    if elements > _TOO_MANY:
        many = f"the shape {dims[:8]} has 2^{elements.bit_length() - 1} elements or more"
        raise InputError(many, where=where, hint="no machine holds that many")
    return tuple(dims)


def tensor_literal(tensor: onnx.TensorProto, files: DataFiles, where: str, embedded: Span | None = None) -> Literal | None:
    """A tensor of the model as a literal that refers to the model's memory; None if its element type is opaque.

    Args:
        tensor: initializer or attribute.
        files: where external data is looked up.
        where: what to call it in messages.
        embedded: its `raw_data`, where the reader of the file has cut it out.

    Raises:
        InputError: shape, type, size and data do not fit together.
    """
    dtype = element_type(tensor.data_type, where)
    shape = checked_shape(list(tensor.dims), where)
    if tensor.HasField("segment"):
        raise malformed("a tensor stored in segments", where)
    if dtype is OPAQUE:
        return None
    type = TensorType(dtype, shape)
    label = tensor.name
    if tensor.data_location == tensor.EXTERNAL:
        span = files.span(tensor, type.size_bytes, where)
        return Literal(type, (lambda: _from_span(span, type)) if span else _empty(type), label)
    if embedded is not None:
        _check_size(type, embedded.size, type.size_bytes, where)
        return Literal(type, lambda: _from_span(embedded, type), label)
    if tensor.HasField("raw_data"):
        _check_size(type, len(tensor.raw_data), type.size_bytes, where)
        return Literal(type, lambda: _from_bytes(bytearray(tensor.raw_data), 0, type), label)
    field = _FIELDS.get(dtype.name, "int32_data")
    wanted = (type.elements + 1) // 2 if dtype.bits == 4 else type.elements
    _check_size(type, len(getattr(tensor, field)), wanted, where)
    return Literal(type, lambda: _from_field(np.array(getattr(tensor, field)), type), label)


def _check_size(type: TensorType, held: int, wanted: int, where: str) -> None:
    if held != wanted:
        raise InputError(
            f"{type} needs {wanted} {'bytes' if wanted == type.size_bytes else 'values'}, {held} are there",
            where=where,
            hint="the file is damaged: export the model again",
        )


def _empty(type: TensorType) -> torch.Tensor:
    return torch.empty(type.shape, dtype=type.dtype.to_torch())


def _from_span(span: Span, type: TensorType) -> torch.Tensor:
    if span.offset % max(type.dtype.bits // 8, 1):  # kernels may assume that elements are aligned
        return _from_bytes(bytearray(memoryview(span.data)[span.offset : span.offset + span.size]), 0, type)
    return _from_bytes(span.data, span.offset, type)


def _from_bytes(data: object, offset: int, type: TensorType) -> torch.Tensor:
    """Little-endian elements, densely packed (two 4-bit codes a byte, the low half first), as a tensor."""
    if not type.elements:
        return _empty(type)
    dtype = type.dtype
    if dtype.bits == 4:
        pairs = torch.frombuffer(data, dtype=torch.uint8, count=type.size_bytes, offset=offset)
        return unpack_halves(pairs, type.elements, dtype).reshape(type.shape)
    if dtype.kind == "pred":  # a byte other than 0 and 1 would not be a torch bool
        return (torch.frombuffer(data, dtype=torch.uint8, count=type.elements, offset=offset) != 0).reshape(type.shape)
    return torch.frombuffer(data, dtype=dtype.to_torch(), count=type.elements, offset=offset).reshape(type.shape)


def _from_field(values: np.ndarray, type: TensorType) -> torch.Tensor:
    dtype = type.dtype
    if dtype.kind == "pred":
        return torch.from_numpy(values != 0).reshape(type.shape)
    if dtype.bits == 4:
        packed = values.astype(np.uint8)
    elif dtype.is_float and dtype.bits <= 16:
        packed = values.astype(np.uint16 if dtype.bits == 16 else np.uint8)
    else:
        packed = values.astype(dtype.storage)
    return _from_bytes(bytearray(packed.tobytes()), 0, type)


def embedded_tensor(tensor: onnx.TensorProto, files: DataFiles, where: str) -> onnx.TensorProto:
    """A copy of a tensor with its external data brought inside; strings are counted.

    Raises:
        InputError: data missing or too long.
    """
    import onnx

    shape = checked_shape(list(tensor.dims), where)
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    if tensor.data_location == tensor.EXTERNAL:
        entries = {e.key: e.value for e in tensor.external_data}
        dtype = element_type(tensor.data_type, where)
        size = int(entries["length"]) if entries.get("length", "").isdigit() else dtype.size_bytes(math.prod(shape))
        span = files.span(tensor, size, where)
        copy.raw_data = bytes(memoryview(span.data)[span.offset : span.offset + span.size]) if span else b""
        copy.data_location = onnx.TensorProto.DEFAULT
        del copy.external_data[:]
    elements = math.prod(shape)
    if tensor.data_type == _STRING and len(tensor.string_data) != elements:
        raise malformed(f"{len(tensor.string_data)} strings for the shape {list(shape)[:8]}", where)
    return copy


def to_numpy(value: torch.Tensor, code: int) -> np.ndarray:
    """A tensor as the NumPy array that onnx's own tools use for this element type (ml_dtypes for the narrow ones)."""
    return arrays.to_numpy(value, _DTYPES[code])


def from_array(array: object, type: TensorType, where: str) -> torch.Tensor:
    """A NumPy array as the tensor of logical type `type`.

    Raises:
        InputError: it has another shape or element type.
    """
    a = np.asarray(array)
    if a.shape != type.shape or a.dtype != type.dtype.to_numpy():
        raise InputError(f"{quoted(str(a.dtype))}{list(a.shape)} given, {type} wanted", where=where)
    return arrays.from_numpy(a, type.dtype)


def array_type(array: object) -> TensorType | None:
    """The type of a NumPy array; None if Tilewright has no such element type, or it is no array."""
    if not isinstance(array, (np.ndarray, np.generic)):
        return None
    a = cast("np.ndarray", np.asarray(array))
    known = {d.to_numpy() for d in _DTYPES.values()}
    return TensorType(from_numpy(a.dtype), tuple(a.shape)) if a.dtype in known else None
