"""Other people's arrays in and out: torch, NumPy (ml_dtypes included), and anything with DLPack."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Collection, Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
import torch

from tilewright.dtype import DType, from_torch
from tilewright.dtype import from_numpy as numpy_dtype
from tilewright.errors import InputError, UnsupportedError
from tilewright.ir.arrays import forwards, from_numpy, to_numpy
from tilewright.ir.ops.rounding import are_codes
from tilewright.ir.types import TensorType, no_numbers
from tilewright.tracing import is_transformed, transformed

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

Array = torch.Tensor | np.ndarray | np.generic


def is_numpy(value: object) -> TypeGuard[np.ndarray | np.generic]:
    """Tell whether it is a NumPy array or scalar, of ml_dtypes' types too."""
    return isinstance(value, (np.ndarray, np.generic))


def dtype_of(array: Array, where: str) -> DType:
    """The element type of a tensor or NumPy array; 4-bit codes in bytes are taken for bytes.

    Raises:
        InputError: there is no such type here (complex numbers, strings).
    """
    try:
        return from_torch(array.dtype) if isinstance(array, torch.Tensor) else numpy_dtype(array.dtype)
    except InputError as error:
        raise InputError(error.what, where=where, hint=error.hint) from error


class Wanted:
    """An input as a program declares it; tensors and arrays that are just that are taken as they are, without looking twice.

    Attributes:
        name: what the program calls it.
        type: what it must be.
    """

    name: str
    type: TensorType

    def __init__(self, name: str, type: TensorType, device: str) -> None:
        self.name, self.type, self._device = name, type, device
        looked_at = type.dtype.kind == "opaque" or type.dtype.bits == 4  # every element
        self._dtype = None if looked_at else type.dtype.to_torch()
        self._shape, self._at = torch.Size(type.shape), torch.device(device)
        native = None if looked_at or device != "cpu" else type.dtype.to_numpy()
        self._numpy = native if native is not None and native.isbuiltin == 1 else None

    def take(self, value: object) -> torch.Tensor:
        """A user's array as a tensor on the device.

        Raises:
            InputError: see `from_user`.
        """
        if type(value) is np.ndarray:
            if value.dtype == self._numpy and value.shape == self._shape and value.flags.carray:
                return torch.from_numpy(forwards(value))
        elif type(value) is torch.Tensor and value.dtype is self._dtype and value.shape == self._shape:
            plain = value.layout is torch.strided and not (value.requires_grad or value.is_neg() or transformed())
            if plain and value.device == self._at:
                return value
        return from_user(value, self.type, self.name, self._device)


def from_user(value: object, type: TensorType, name: str, device: str) -> torch.Tensor:
    """A user's array as a tensor of the declared type on `device`; never cast, so that nothing changes silently.

    Raises:
        InputError: not an array, or of another shape or type; elements of it are masked; a gradient or a tangent is
            wanted, or it stands for others in a transform of `torch.func`.
    """
    where = f"input {name!r}"
    if type.dtype.kind == "opaque":
        raise no_numbers(name)
    if isinstance(value, torch.Tensor):
        if value.requires_grad and torch.is_grad_enabled():
            what = "a tensor that requires a gradient given, and compiled programs compute none"
            raise InputError(what, where=where, hint="call under torch.no_grad(), or pass x.detach()")
        if transformed() and is_transformed(value):
            what = "a tensor within a transform of torch.func, or with a tangent, given, and compiled programs know of neither"
            hint = 'x.detach() for a tangent; torch.compile(model, backend="tilewright") of what is transformed'
            raise InputError(what, where=where, hint=hint)
        tensor = value.detach().resolve_neg()  # a lazy minus sign is not in its memory, which kernels read
    elif is_numpy(value):
        if np.ma.is_masked(value):
            raise InputError("a masked array given, and masks mean nothing here", where=where, hint="value.filled(0)")
        array = np.asarray(value)
        if array.dtype.kind == "c" and array.dtype.itemsize <= 16:
            tensor = torch.from_numpy(forwards(np.require(array, array.dtype.newbyteorder("="), ["C", "W"])))
        else:
            given = dtype_of(array, where)
            if given is not type.dtype and given.to_torch() != type.dtype.to_torch():
                raise InputError(f"{given} given, {type} wanted", where=where, hint=f"astype({type.dtype.to_numpy()})")
            tensor = from_numpy(array, given)
    elif hasattr(value, "__dlpack__"):
        tensor = from_dlpack(value, where)
    else:
        raise InputError(f"a {value.__class__.__name__} is no array", where=where, hint="a torch tensor, NumPy array or DLPack")
    if tensor.layout != torch.strided or tensor.is_meta:
        what = "no data" if tensor.is_meta else f"layout {tensor.layout}"
        raise InputError(f"a tensor with {what} given, {type} wanted", where=where, hint="pass a dense tensor")
    if tensor.is_complex():
        tensor = _parts(tensor, type, where)
    if tuple(tensor.shape) != type.shape:
        hint = None
        if tensor.dim() == len(type.shape):
            hint = "a compiled program has the sizes it was compiled for: compile another with these (batch=, input_dims=)"
        raise InputError(f"shape {list(tensor.shape)} given, {type} wanted", where=where, hint=hint)
    if tensor.dtype != type.dtype.to_torch():
        raise InputError(f"{dtype_of(tensor, where)} given, {type} wanted", where=where, hint=f"pass {type.dtype.to_torch()}")
    if type.dtype.bits == 4 and not are_codes(tensor, type.dtype):
        raise InputError(f"values outside {type.dtype.min}…{type.dtype.max}, {type} wanted", where=where)
    return tensor.to(device)


def _parts(tensor: torch.Tensor, type: TensorType, where: str) -> torch.Tensor:
    """Complex numbers as their real and imaginary parts on a last axis, as programs take them.

    Raises:
        InputError: the input is not such parts.
    """
    parts = torch.view_as_real(tensor.resolve_conj()).resolve_neg()
    if parts.dtype != type.dtype.to_torch() or tuple(parts.shape) != type.shape:
        name = str(tensor.dtype).removeprefix("torch.")
        hint = "complex numbers are for an input that holds their two parts on its last axis"
        raise InputError(f"{name}{list(tensor.shape)} given, {type} wanted", where=where, hint=hint)
    return parts


def from_dlpack(value: object, where: str) -> torch.Tensor:
    """A tensor over the memory of anything with DLPack.

    Raises:
        InputError: its producer fails, or gives a type that torch has not.
    """
    try:
        return torch.from_dlpack(value)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0] or error.__class__.__name__
        raise InputError(f"a {value.__class__.__name__} cannot be read through DLPack: {reason}", where=where) from error


def to_user(value: Value, type: TensorType, as_numpy: bool) -> object:
    """A result as the caller wants it; an opaque value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return to_numpy(value, type.dtype) if as_numpy else value


def copy_over(into: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> None:
    """Copy values over as many tensors of the same types, in order: on a GPU in few launches, unless some may overlap."""
    if len({*map(address, into)}) < len(into):
        for old, value in zip(into, new, strict=True):
            old.copy_(value)
        return
    torch._foreach_copy_([*into], [*new])  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage] - optimizers use it


def separate(results: Sequence[Value], borrowed: Iterable[int], constant: Collection[int] = ()) -> list[Value]:
    """Results that the caller may write to: copied where they lie in borrowed memory (inputs and constants, by the address of
    their storage), share memory with another result, or hold one element in several places. Opaque ones are copied: where a
    library has them, nobody knows."""
    taken = set(borrowed)
    found: list[Value] = []
    for value in results:
        if isinstance(value, torch.Tensor) and value.numel():
            at = address(value)
            if at in taken or at in constant or (not value.is_contiguous() and _repeats(value)):
                value = _copied(value)
                at = address(value)
            taken.add(at)
        found.append(copy.deepcopy(value) if isinstance(value, (np.ndarray, list, tuple)) else value)
    return found


def _copied(value: torch.Tensor) -> torch.Tensor:
    """A dense copy.

    Raises:
        UnsupportedError: there is no memory for it.
    """
    try:
        return value.clone(memory_format=torch.contiguous_format)
    except (MemoryError, RuntimeError) as error:
        size = value.numel() * value.element_size()
        hint = "smaller shapes, or another device"
        raise UnsupportedError(f"no memory for a result of {size / 2**30:,.1f} GiB", where="the result", hint=hint) from error


def _repeats(t: torch.Tensor) -> bool:
    return 0 in (stride for stride, extent in zip(t.stride(), t.shape, strict=True) if extent > 1)


def address(tensor: torch.Tensor) -> int:
    """The address at which a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


def at_address(address: int, kind: TensorType, device: str) -> torch.Tensor:
    """A contiguous tensor over memory at an address of a device (4-bit codes one to a byte). It does not hold the memory."""
    dtype, count = kind.dtype.to_torch(), prod(kind.shape)
    if not count:
        return torch.empty(kind.shape, dtype=dtype, device=device)
    size = count * dtype.itemsize
    if device == "cpu":
        flat = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    else:
        flat = torch.as_tensor(_CudaMemory(address, size), device=device)
    return flat.view(dtype).view(kind.shape)


class _CudaMemory:
    """Bytes of device memory, as torch takes them over (the CUDA array interface, version 3)."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (address, False), "version": 3}
