"""Other people's arrays in and out: torch, NumPy (ml_dtypes included), and anything with DLPack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilewright.dtype import DType, from_torch
from tilewright.errors import InputError
from tilewright.ir.types import TensorType

if TYPE_CHECKING:
    import numpy as np

    from tilewright.ir.graph import Value

# NumPy's own interchange knows none of the narrow types: they travel as integers of their width.
_CARRIER = {1: "uint8", 2: "int16"}


def from_numpy(array: np.ndarray, dtype: DType) -> torch.Tensor:
    """A NumPy array of logical type `dtype` as a tensor over the same memory (copied only if read-only or not contiguous)."""
    import numpy as np

    contiguous = np.require(array, requirements=["C", "W"])
    if contiguous.dtype.isbuiltin != 1:
        carrier = contiguous.view(_CARRIER[contiguous.dtype.itemsize])
        return torch.from_numpy(carrier).view(dtype.to_torch()) if dtype.bits != 4 else _codes(carrier, dtype)
    return torch.from_numpy(contiguous)


def _codes(carrier: np.ndarray, dtype: DType) -> torch.Tensor:
    low = torch.from_numpy(carrier).to(torch.int16) & 15
    return (torch.where(low > 7, low - 16, low) if dtype.kind == "int" else low).to(dtype.to_torch())


def to_numpy(tensor: torch.Tensor, dtype: DType) -> np.ndarray:
    """A tensor of logical type `dtype` as a NumPy array, of ml_dtypes' type where NumPy has none."""
    t = tensor.detach().cpu()
    native = dtype.to_numpy()
    if native.isbuiltin == 1:
        return t.numpy()
    if dtype.bits == 4:
        return t.numpy().astype(native)
    return t.contiguous().view(getattr(torch, _CARRIER[native.itemsize])).numpy().view(native)


def from_user(value: object, type: TensorType, name: str, device: str) -> torch.Tensor:
    """A user's array as a tensor of the declared type on `device`; never cast, so that nothing changes silently.

    Raises:
        InputError: not an array, or of another shape or type.
    """
    where = f"input {name!r}"
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
    elif value.__class__.__module__ == "numpy":
        import numpy as np

        from tilewright.dtype import from_numpy as numpy_dtype

        array = np.asarray(value)
        given = numpy_dtype(array.dtype)
        if given is not type.dtype and given.to_torch() != type.dtype.to_torch():
            raise InputError(f"{given} given, {type} wanted", where=where, hint=f"astype({type.dtype.to_numpy()})")
        tensor = from_numpy(array, given)
    elif hasattr(value, "__dlpack__"):
        tensor = torch.from_dlpack(value)
    else:
        raise InputError(f"a {value.__class__.__name__} is no array", where=where, hint="a torch tensor, NumPy array or DLPack")
    if tuple(tensor.shape) != type.shape:
        raise InputError(f"shape {list(tensor.shape)} given, {type} wanted", where=where)
    if tensor.dtype != type.dtype.to_torch():
        given_name = from_torch(tensor.dtype)
        raise InputError(f"{given_name} given, {type} wanted", where=where, hint=f"pass {type.dtype.to_torch()}")
    if type.dtype.bits == 4 and tensor.numel() and not _are_codes(tensor, type.dtype):
        raise InputError(f"values outside {type.dtype.min}…{type.dtype.max}, {type} wanted", where=where)
    return tensor.to(device)


def _are_codes(tensor: torch.Tensor, dtype: DType) -> bool:
    """Whether every byte is a 4-bit code: anything else would be read as another number later, silently."""
    low, high = torch.aminmax(tensor)
    return int(low) >= dtype.min and int(high) <= dtype.max


def to_user(value: Value, type: TensorType, as_numpy: bool) -> object:
    """A result as the caller wants it; an opaque value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return to_numpy(value, type.dtype) if as_numpy else value
