"""Constant data: a reference to somebody's memory, never a copy of a weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tilewright.dtype import F32, PRED, S64, U64, DType, from_torch
from tilewright.errors import InputError, TypeMismatchError
from tilewright.ir.types import TensorType

if TYPE_CHECKING:
    import torch

SMALL_BYTES = 256


class Literal:
    """A constant's value.

    Up to 256 bytes it is copied, and equal to any literal of the same type and bits; past that it is equal to itself alone,
    so that hash-consing never reads a weight.

    Attributes:
        type: logical type.
        label: name of the weight in its source, or "" for a number written in the program.
    """

    label: str
    type: TensorType

    __slots__ = ("__weakref__", "_checked", "_key", "_load", "_tensor", "label", "type")

    def __init__(self, type: TensorType, load: Callable[[], torch.Tensor] | torch.Tensor, label: str = "") -> None:
        """`load` is the tensor, or gives it when first asked (memory-mapped data). 4-bit codes are one to a byte."""
        self.type = type
        self.label = label
        self._load = load if callable(load) else None
        self._tensor: torch.Tensor | None = None if callable(load) else load
        self._checked = False
        self._key: object = None
        if type.elements * max(type.dtype.bits, 8) <= SMALL_BYTES * 8:
            # Copied: another program may share this node, and must not see its owner write to the memory.
            self._tensor = self.tensor().detach().clone()
            self._key = (type, tensor_bytes(self._tensor))

    def tensor(self) -> torch.Tensor:
        """The value; the same memory each time, to be read only.

        Raises:
            TypeMismatchError: the source gave a tensor of another shape or storage type, or bytes that are no 4-bit codes.
            InputError: it was dropped, and there is no file to read it from again.
        """
        if self._tensor is None:
            if self._load is None:
                raise InputError(
                    "the value of this constant was dropped",
                    where=self.label or "constant",
                    hint="compile the program again, or call drop_weights() after the last use of its source",
                )
            self._tensor = self._load()
        if not self._checked:
            self._check(self._tensor)
            self._checked = True
        return self._tensor

    @property
    def device(self) -> str:
        """The device on which the value lies, such as "cuda:1"; "cpu" if it is still to be read from a file."""
        return "cpu" if self._tensor is None else str(self._tensor.device)

    def drop(self) -> None:
        """Let go of the memory. A value from a file is read again when it is next asked for."""
        if self._key is None:
            self._tensor, self._checked = None, False

    def _check(self, t: torch.Tensor) -> None:
        from tilewright.ir.ops.rounding import are_codes

        d = self.type.dtype
        if tuple(t.shape) != self.type.shape or t.dtype != self.type.dtype.to_torch():
            raise TypeMismatchError(
                f"a constant declared {self.type} holds {t.dtype}{list(t.shape)}", where=self.label or "constant"
            )
        if d.bits == 4 and not are_codes(t, d):
            raise TypeMismatchError(f"a constant declared {self.type} holds bytes that are no 4-bit codes", where=self.label)

    def scalar(self) -> float | int | bool | None:
        """The value of a one-element literal, else None."""
        return self.tensor().reshape(()).item() if self.type.elements == 1 else None

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Literal) and self._key is not None and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key) if self._key is not None else id(self)

    def __repr__(self) -> str:
        return f"Literal({self.type}{', ' + self.label if self.label else ''})"


def bits_of(t: torch.Tensor) -> torch.Tensor:
    """The elements' bits as u8, C order: a view where they lie in a row."""
    import torch

    flat = t.detach().contiguous().as_strided((t.numel(),), (1,))  # one element, or none, may have any stride
    return flat.view(torch.uint8)


def tensor_bytes(t: torch.Tensor) -> bytes:
    """The elements' bits, C order."""
    return bytes(bits_of(t).tolist())


def literal(value: bool | float | int | Sequence[float] | torch.Tensor, dtype: DType | None = None) -> Literal:
    """A literal from a Python number, a list of numbers, or a torch tensor (kept by reference unless small).

    Without a dtype, whole numbers are s64 and others f32. A float is rounded to its type.

    Raises:
        TypeMismatchError: a number is no value of an integer type, or they are not numbers, equally many in each row.
    """
    import torch

    from tilewright.ir.ops.rounding import to_float

    if isinstance(value, torch.Tensor):
        t = value.detach()
        d = dtype or from_torch(t.dtype)
        return Literal(TensorType(d, tuple(t.shape)), t)
    if dtype is not None and dtype.kind == "opaque":
        raise TypeMismatchError(f"a constant cannot be {dtype}")
    try:
        given = np.array(value, dtype=object)
        numbers: list[bool | int | float] = given.reshape(-1).tolist()
        if dtype is None:
            kinds = {type(v) for v in numbers}
            dtype = PRED if kinds == {bool} else S64 if kinds and kinds <= {bool, int} else F32
        if dtype.is_integer:
            flat = _integers(numbers, dtype)
        else:
            wide = torch.tensor(numbers, dtype=torch.float64)
            flat = wide != 0 if dtype is PRED else to_float(wide, dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeMismatchError(f"no constant can be made of this {type(value).__name__}: {error}") from None
    return Literal(TensorType(dtype, given.shape), flat.reshape(given.shape))


def _integers(numbers: Sequence[bool | int | float], dtype: DType) -> torch.Tensor:
    import torch

    whole: list[int] = []
    for v in numbers:
        if not dtype.min <= v <= dtype.max or int(v) != v:
            raise TypeMismatchError(f"{v} is no {dtype}")
        whole.append(int(v))
    if dtype is U64:
        return torch.tensor([v - (1 << 64) if v >> 63 else v for v in whole], dtype=torch.int64).view(torch.uint64)
    return torch.tensor(whole, dtype=torch.int64).to(dtype.to_torch())
