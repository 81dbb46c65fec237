"""Constant data: a reference to somebody's memory, never a copy of a weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tilewright.dtype import DType, from_torch
from tilewright.errors import TypeMismatchError
from tilewright.ir.types import TensorType

if TYPE_CHECKING:
    import torch

SMALL_BYTES = 256


class Literal:
    """A constant's value.

    Up to 256 bytes it is equal to any literal of the same type and bits; past that it is equal to itself alone, so that
    hash-consing never reads a weight.

    Attributes:
        type: logical type.
        label: name of the weight in its source, or "" for a number written in the program.
    """

    __slots__ = ("__weakref__", "_key", "_load", "_tensor", "label", "type")

    def __init__(self, type: TensorType, load: Callable[[], torch.Tensor] | torch.Tensor, label: str = "") -> None:
        """`load` is the tensor, or gives it when first asked (memory-mapped data). 4-bit codes are one to a byte."""
        self.type = type
        self.label = label
        self._load = load if callable(load) else None
        self._tensor: torch.Tensor | None = None if callable(load) else load
        self._key: object = None
        if type.elements * max(type.dtype.bits, 8) <= SMALL_BYTES * 8:
            data = self.tensor()
            self._key = (type, tensor_bytes(data))

    def tensor(self) -> torch.Tensor:
        """The value; the same memory each time, to be read only.

        Raises:
            TypeMismatchError: the source gave a tensor of another shape or storage type.
        """
        if self._tensor is None:
            assert self._load is not None
            self._tensor, self._load = self._load(), None
        t = self._tensor
        if tuple(t.shape) != self.type.shape or t.dtype != self.type.dtype.to_torch():
            raise TypeMismatchError(
                f"a constant declared {self.type} holds {t.dtype}{list(t.shape)}", where=self.label or "constant"
            )
        return t

    def scalar(self) -> float | int | bool | None:
        """The value of a one-element literal, else None."""
        return self.tensor().reshape(()).item() if self.type.elements == 1 else None

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Literal) and self._key is not None and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key) if self._key is not None else id(self)

    def __repr__(self) -> str:
        return f"Literal({self.type}{', ' + self.label if self.label else ''})"


def tensor_bytes(t: torch.Tensor) -> bytes:
    """The elements' bits, C order."""
    import torch

    flat = t.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def literal(value: bool | float | int | Sequence[float] | torch.Tensor, dtype: DType | None = None) -> Literal:
    """A literal from a Python number, a list of numbers, or a torch tensor (kept by reference).

    Integers out of the type's range and floats too fine for it are converted as torch converts them.
    """
    import torch

    if isinstance(value, torch.Tensor):
        t = value.detach()
        d = dtype or from_torch(t.dtype)
        return Literal(TensorType(d, tuple(t.shape)), t)
    if dtype is None:
        probe = torch.tensor(value)
        dtype = from_torch(probe.dtype)
        return Literal(TensorType(dtype, tuple(probe.shape)), probe)
    wide = torch.tensor(value, dtype=torch.float64 if dtype.is_float else torch.int64)
    return Literal(TensorType(dtype, tuple(wide.shape)), wide.to(dtype.to_torch()))
