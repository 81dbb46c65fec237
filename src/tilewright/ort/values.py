"""Values of a session: arrays on a device, strings, sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch

from tilewright.dtype import OPAQUE, DType, from_torch
from tilewright.dtype import from_numpy as numpy_dtype
from tilewright.errors import InputError, check_type
from tilewright.frontends.onnx.tensors import element_code, element_type
from tilewright.ir.arrays import from_numpy, to_numpy
from tilewright.ir.types import TensorType
from tilewright.runtime.arrays import from_dlpack, is_numpy

_STRING = 8  # of TensorProto's element types


class OrtValue:
    """An array on a device, or a value that is no array (strings, a sequence, a map)."""

    def __init__(self, value: object, dtype: DType | None = None) -> None:
        """`value`: a tensor, or what is none; `dtype`: its element type, where the tensor's own does not say it (4 bits)."""
        self._value = value
        self._dtype = dtype if dtype is not None else from_torch(value.dtype) if isinstance(value, torch.Tensor) else OPAQUE

    @staticmethod
    def ortvalue_from_numpy(array: np.ndarray, device_type: str = "cpu", device_id: int = 0) -> OrtValue:
        """A value over an array's memory; a copy on another device, of strings, and of what is read-only or not contiguous."""
        check_type(array, np.ndarray, "OrtValue.ortvalue_from_numpy", "numpy.asarray(value)")
        place = device(device_type, device_id)
        if are_strings(array):
            return OrtValue(strings(array, "OrtValue.ortvalue_from_numpy"))
        dtype = numpy_dtype(array.dtype)
        return OrtValue(from_numpy(array, dtype).to(place), dtype)

    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(data: np.ndarray, onnx_element_type: int) -> OrtValue:
        """A value over an array's memory, its bits taken for those of another element type of the same width.

        Raises:
            InputError: the widths differ.
        """
        dtype = element_type(onnx_element_type, "onnx_element_type")
        native = dtype.to_numpy()
        if native.itemsize != data.dtype.itemsize:
            what = f"{data.dtype.itemsize} bytes an element, {dtype} has {native.itemsize}"
            raise InputError(what, where="OrtValue.ortvalue_from_numpy_with_onnx_type", hint="an array of that width")
        return OrtValue(from_numpy(np.ascontiguousarray(data).view(native), dtype), dtype)

    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Sequence[int], element_type: Any, device_type: str = "cpu", device_id: int = 0
    ) -> OrtValue:
        """Memory for an array on a device, with whatever is in it; the type is NumPy's or a number of ONNX's.

        Raises:
            InputError: it is no shape, or there is no such type or device.
        """
        kind = kind_of(element_type, shape, "OrtValue")
        memory = torch.empty(kind.shape, dtype=kind.dtype.to_torch(), device=device(device_type, device_id))
        return OrtValue(memory, kind.dtype)

    @staticmethod
    def from_dlpack(data: Any) -> OrtValue:
        """A value over the memory of anything with DLPack.

        Raises:
            InputError: its producer fails, or gives a type that torch has not.
        """
        return OrtValue(from_dlpack(data, "OrtValue.from_dlpack"))

    @property
    def value(self) -> object:
        """The tensor, or what is none."""
        return self._value

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor.

        Raises:
            InputError: the value is none.
        """
        if not isinstance(self._value, torch.Tensor):
            raise InputError(f"{type(self._value).__name__} is no tensor", where="OrtValue", hint="OrtValue.value")
        return self._value

    def numpy(self) -> np.ndarray:
        """A copy as a NumPy array: strings as objects, of ml_dtypes' type where NumPy has none."""
        if isinstance(self._value, np.ndarray):
            return self._value.copy()
        return to_numpy(self.tensor.clone(), self._dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The array that `numpy.asarray` takes: over the same memory on a CPU, unless it is to be copied or of another type."""
        array = self._value if isinstance(self._value, np.ndarray) else to_numpy(self.tensor, self._dtype)
        return np.array(array, dtype=dtype, copy=copy)

    def shape(self) -> list[int]:
        """The extents."""
        return list(self._value.shape if isinstance(self._value, np.ndarray) else self.tensor.shape)

    def element_type(self) -> int:
        """The element type's number in ONNX."""
        return _STRING if isinstance(self._value, np.ndarray) else element_code(self._dtype)

    def data_type(self) -> str:
        """The type, as `NodeArg.type` has it."""
        if isinstance(self._value, list):
            items = [OrtValue(v if isinstance(v, torch.Tensor) else _held(v)) for v in cast("list[Any]", self._value)]
            return f"seq({items[0].data_type() if items else 'tensor(float)'})"
        return f"tensor({spelt(self.element_type())})"

    def device_name(self) -> str:
        """The kind of device: "cpu" or "cuda"."""
        return self._value.device.type if isinstance(self._value, torch.Tensor) else "cpu"

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self.tensor.data_ptr()

    def tensor_size_in_bytes(self) -> int:
        """Bytes of the elements."""
        return self.tensor.nbytes

    def has_value(self) -> bool:
        """Tell whether there is a value: an optional one may be missing."""
        return self._value is not None

    def is_tensor(self) -> bool:
        """Tell whether it is an array."""
        return isinstance(self._value, (torch.Tensor, np.ndarray))

    def is_tensor_sequence(self) -> bool:
        """Tell whether it is a sequence."""
        return isinstance(self._value, list)

    def is_sparse_tensor(self) -> bool:
        """Tell whether it is sparse, which none is."""
        return False

    def update_inplace(self, array: Any) -> None:
        """Write an array, or another value, of the same shape and type over it."""
        check_type(array, (OrtValue, np.ndarray), "OrtValue.update_inplace", "a NumPy array, or an OrtValue")
        new = array.tensor if isinstance(array, OrtValue) else from_numpy(array, numpy_dtype(array.dtype))
        fill(self.tensor, new, "OrtValue.update_inplace")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> object:
        return self.tensor.__dlpack__(*args, **kwargs)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def spelt(code: int) -> str:
    """An element type by its number in ONNX, as onnxruntime spells it."""
    import onnx

    return onnx.TensorProto.DataType.Name(cast("Any", code)).lower()


def dtype_of(given: Any) -> DType:
    """An element type by its number in ONNX, or as NumPy's.

    Raises:
        InputError: there is no such type.
    """
    if isinstance(given, int):
        return element_type(given, "element_type")
    try:
        return numpy_dtype(np.dtype(given))
    except TypeError as error:
        raise InputError(f"{given!r} is no element type", where="element_type", hint="numpy.float32") from error


def kind_of(element_type: Any, shape: object, where: str) -> TensorType:
    """The type of an array, by its element type and its shape.

    Raises:
        InputError: it is no shape, or there is no such type.
    """
    dtype = dtype_of(element_type)
    extents: tuple[Any, ...] = tuple(cast("Iterable[Any]", shape)) if isinstance(shape, Iterable) else (shape,)
    if not all(hasattr(e, "__index__") and e >= 0 for e in extents):
        raise InputError(f"{list(extents)} is no shape", where=where, hint="whole numbers, 0 or more")
    return TensorType(dtype, extents)


def device(kind: str, index: int) -> str:
    """A device as torch names it.

    Raises:
        InputError: there is no such kind.
    """
    if kind not in ("cpu", "cuda"):
        raise InputError(f"no device {kind!r}", where="device_type", hint='"cpu" or "cuda"')
    return kind if kind == "cpu" else f"{kind}:{index}"


def taken(value: Any) -> object:
    """The array in a value: one of ours, or of onnxruntime's."""
    return value.value if isinstance(value, OrtValue) else value.numpy() if hasattr(value, "numpy") else value


def strings(value: object, where: str) -> np.ndarray:
    """Strings as an array of objects, bytes being UTF-8.

    Raises:
        InputError: they are no strings, or bytes that are no UTF-8.
    """
    array = np.asarray(value)
    if not are_strings(array):
        raise InputError(f"{array.dtype} given, strings wanted", where=where, hint="an array of str")
    found = np.empty(array.shape, object)
    try:
        found.reshape(-1)[:] = [_text(v) for v in array.flat]
    except UnicodeDecodeError as error:
        raise InputError(f"bytes that are no UTF-8: {error.reason}", where=where, hint="decode them first") from error
    return found


def are_strings(array: np.ndarray) -> bool:
    """Tell whether an array holds strings, or bytes that may be some."""
    return array.dtype.kind in "OUS" or array.dtype.type is np.void


def _text(value: Any) -> str:
    raw = value.tobytes() if isinstance(value, np.void) else value
    return raw.decode() if isinstance(raw, bytes) else str(raw)


def fill(memory: torch.Tensor, value: object, where: str) -> None:
    """Write a result into bound memory.

    Raises:
        InputError: the memory is for another shape or type.
    """
    if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (memory.shape, memory.dtype):
        what = f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"{what} into memory for {memory.dtype}{list(memory.shape)}", where=where, hint="bind what it is")
    memory.copy_(value)


def _held(value: object) -> object:
    """An item of a sequence as a value holds it."""
    if not is_numpy(value):
        return value
    return OrtValue.ortvalue_from_numpy(np.asarray(value)).value
