"""Writes to state at positions that are data, such as a new token's keys and values to their caches: one launch for all arrays
that are written at the same positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilewright.candidates.triton.runtime.launch import ALIGNED, on
from tilewright.candidates.triton.runtime.module import Built, arch_of, build, instance, launcher
from tilewright.dtype import S32, S64
from tilewright.hardware.target import Target
from tilewright.ir.types import TensorType
from tilewright.sizes import next_power_of_2

KERNEL = "tilewright.candidates.triton._index_copy.index_copy"
WARPS, BLOCK = 4, 1024  # elements of a block at most, of each array
INTEGERS = {8: "*i8", 16: "*i16", 32: "*i32", 64: "*i64"}

Write = Callable[[torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


@dataclass(frozen=True)
class Copies:
    """Extents that `_index_copy.py` is compiled for: y [outer, count, inner] to each of `arrays` x [outer, extent, inner].

    Where there are several positions, one kernel serves any number: `count` and `total` are its arguments then, since prompts
    are of many lengths.
    """

    arrays: int
    outer: int
    extent: int
    count: int
    inner: int
    block: int
    dependent: bool
    wraps: bool

    @property
    def total(self) -> int:
        """Elements that are written to an array."""
        return self.outer * self.count * self.inner


def index_copy(
    array: TensorType, axis: int, positions: TensorType, arrays: int, target: Target, *, wraps: bool = True
) -> Write | None:
    """A function of positions, arrays and values that writes the values to the arrays along an axis, all in one launch; None
    for types and extents that it does not take. All are row-major, and the arrays disjoint.

    A position that is out of range ends the process's work on the device, as by the assertions of torch's own kernels.

    Args:
        array: the type of each array.
        axis: the axis along which positions count.
        positions: their type, [n] of s32 or s64.
        arrays: how many arrays.
        target: the device.
        wraps: negative positions count from the end; else they are out of range.

    Raises:
        Unsupported: Triton is not installed, or makes nothing for the device.
    """
    counted = array.dtype.bits in INTEGERS and positions.dtype in (S32, S64) and not (array.open or positions.open)
    if not counted or 0 in (array.elements, positions.elements):
        return None
    written = array.elements // array.shape[axis] * positions.elements
    if max(array.elements, written) > (1 << 31) - BLOCK:  # places, those past the end too, are counted in 31 bits
        return None
    built, grid = kernel(array, axis, positions, arrays, target, wraps=wraps)
    start = launcher(built.kernel, (grid,), target.index, built.numbers).run

    def run(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        start(*(t.data_ptr() for t in given))
        return []

    launch = on(target.index, run)

    def write(at: torch.Tensor, into: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        launch([at, *(t for pair in zip(into, values, strict=True) for t in pair)])

    return write


def kernel(
    array: TensorType, axis: int, positions: TensorType, arrays: int, target: Target, *, wraps: bool = True
) -> tuple[Built, int]:
    """The machine code, and its number of blocks."""
    arch, shape = arch_of(target), array.shape
    outer, inner, count = math.prod(shape[:axis]), math.prod(shape[axis + 1 :]), positions.elements
    block = BLOCK if count > 1 else min(BLOCK, next_power_of_2(outer * inner))
    copies = Copies(arrays, outer, shape[axis], count, inner, block, arch.capability >= 90, wraps)
    names = [f"{side}{i}" for i in range(arrays) for side in "xy"]
    numbers = {"count": count, "total": copies.total} if count > 1 else {}
    open_ones = dict(zip(numbers, numbers, strict=True))
    source = instance(KERNEL, copies, ["positions"], names, {}, numbers, gluon=False, extents=open_ones)
    signature = {"positions": INTEGERS[positions.dtype.bits], **dict.fromkeys(names, INTEGERS[array.dtype.bits])}
    options = {"launch_pdl": True} if copies.dependent else {}
    built = build(source, signature, arch, target.index, num_warps=WARPS, debug=True, sanitize_overflow=False, **options)
    return built, -(-copies.total // block)


def takes(tensors: Sequence[torch.Tensor]) -> bool:
    """Tell whether the kernel reads and writes tensors as they lie: row-major, from a multiple of 16 bytes on."""
    return all(t.is_contiguous() and t.data_ptr() % ALIGNED == 0 for t in tensors)
