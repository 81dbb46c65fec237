"""Tensors as NumPy arrays, of ml_dtypes' types where NumPy has none, and back."""

from __future__ import annotations

import numpy as np
import torch

from tilewright.dtype import F4E2M1FN, DType
from tilewright.ir.ops.functions import narrow_integer

# NumPy's own interchange knows none of the narrow types: they travel as integers of their width.
_STORAGE = {1: "uint8", 2: "int16"}


def from_numpy(array: np.ndarray, dtype: DType) -> torch.Tensor:
    """A NumPy array of logical type `dtype` as a tensor over the same memory; copied only if it is read-only, not contiguous or
    not in the machine's byte order."""
    if dtype is F4E2M1FN:
        array = array.astype(dtype.storage)
    native = array if array.dtype.isnative else array.astype(dtype.to_numpy())
    contiguous = forwards(np.require(native, requirements=["C", "W"]))
    if contiguous.dtype.isbuiltin != 1:
        bits = contiguous.view(_STORAGE[contiguous.dtype.itemsize])
        raw = torch.from_numpy(bits)
        return raw.view(dtype.to_torch()) if dtype.bits != 4 or dtype.is_float else narrow_integer(raw, dtype)
    return torch.from_numpy(contiguous)


def forwards(array: np.ndarray) -> np.ndarray:
    """The array, copied if an axis of one element runs backwards: NumPy calls it contiguous, and torch takes none such."""
    return array.copy() if min(array.strides, default=0) < 0 else array


def to_numpy(tensor: torch.Tensor, dtype: DType) -> np.ndarray:
    """A tensor of logical type `dtype` as a NumPy array, of ml_dtypes' type where NumPy has none."""
    t = tensor.detach().cpu()
    native = dtype.to_numpy()
    if native.isbuiltin == 1:
        return t.numpy()
    if dtype.bits == 4:
        return (t.float() if dtype.is_float else t).numpy().astype(native)
    return t.contiguous().view(getattr(torch, _STORAGE[native.itemsize])).numpy().view(native)
