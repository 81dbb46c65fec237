"""The type of a value: an element type and a shape, or a tuple of such.

An extent is a whole number, or one that is still open (`dims.py`): code here and elsewhere treats both as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tilewright.dtype import OPAQUE, DType
from tilewright.errors import InputError, TypeMismatchError
from tilewright.ir.extent import is_open, plain_index

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorType:
    """`dtype[shape]`, e.g. `f32[2,3]`; `opaque` has no shape and travels only between `call` nodes."""

    dtype: DType
    shape: Shape

    def __post_init__(self) -> None:
        shape = () if self.dtype is OPAQUE else self.shape
        if shape is not self.shape or type(shape) is not tuple or any(type(d) is not int for d in shape):
            object.__setattr__(self, "shape", tuple(map(plain_index, shape)))

    def __str__(self) -> str:
        return "opaque" if self.dtype is OPAQUE else f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def open(self) -> bool:
        """Tell whether an extent is not known yet."""
        return is_open(self.shape)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes when stored densely (two 4-bit codes a byte)."""
        return self.dtype.size_bytes(self.elements)

    def with_dtype(self, dtype: DType) -> TensorType:
        return TensorType(dtype, self.shape)

    def with_shape(self, shape: Iterable[int]) -> TensorType:
        return TensorType(self.dtype, tuple(shape))


@dataclass(frozen=True, slots=True)
class TupleType:
    """Several results of one node; `item` picks one."""

    items: tuple[TensorType, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.items))})"


Type = TensorType | TupleType


def broadcast_shapes(*shapes: Shape, where: str = "broadcast") -> Shape:
    """NumPy broadcasting: align right; extents must be equal or 1.

    Raises:
        TypeMismatchError: two extents differ and neither is 1.
    """
    rank = max((len(s) for s in shapes), default=0)
    out: list[int] = []
    for axis in range(-rank, 0):
        there = [s[axis] for s in shapes if len(s) >= -axis]
        extents = {*there} - {1}  # by hash: an open extent is not compared with 1
        first = next((e for e in there if e in extents), 1)
        if len(extents) > 1 and any(e != first for e in extents):  # open ones of other terms may be equal
            shown = " and ".join(str(list(s)) for s in shapes)
            raise TypeMismatchError(f"shapes {shown} do not broadcast together", where=where)
        out.append(first)
    return tuple(out)


def normalize_axis(axis: int, rank: int, where: str) -> int:
    """`axis` counted from the front.

    Raises:
        TypeMismatchError: it is not an axis of a rank-`rank` tensor.
    """
    if not -rank <= axis < rank:
        raise TypeMismatchError(f"axis {axis} is not an axis of a tensor of rank {rank}", where=where)
    return axis % rank


def no_numbers(name: str) -> InputError:
    """The error that an input is no array of numbers: strings, a sequence, an optional."""
    hint = "cut the model behind it: onnx.utils.extract_model"
    return InputError(
        "it holds strings or other things than numbers, which no input here can", where=f"input {name!r}", hint=hint
    )


def reshape_groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]] | None:
    """The smallest runs of axes with equal products on both sides of a reshape; None where an extent is zero."""
    if 0 in before or 0 in after:
        return None
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = [], []
        while True:
            p, q = math.prod(before[a] for a in old), math.prod(after[a] for a in new)
            if p == q and (old or new):
                break
            if (p <= q and i < len(before)) or j >= len(after):
                old.append(i)
                i += 1
            else:
                new.append(j)
                j += 1
        groups.append((old, new))
    return groups
