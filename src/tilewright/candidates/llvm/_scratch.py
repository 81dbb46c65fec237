"""Memory that calls work in and give results in, used again instead of being asked of the system each time.

A page that the system hands out costs a fault and its zeroing at first touch: for a result of 50 MB that is as long as a tenth of
its product takes. Concurrent calls never share any memory: taking from and giving back to a pool are single list operations.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import Any

import torch

ALIGNMENT = 64
SMALLEST = 1 << 16
LARGE_BYTES = 1 << 20  # below this the C library's allocator does the same
KEPT_BYTES = 1 << 29  # of memory that no result is in, at most

_free: dict[int, list[torch.Tensor]] = {}
_idle: dict[int, list[mmap.mmap]] = {}


@contextmanager
def scratch(size_bytes: int) -> Generator[int]:
    """The address of at least so many bytes, aligned to a cache line, for as long as the block runs."""
    size = max(SMALLEST, 1 << (size_bytes + ALIGNMENT - 1).bit_length())
    pool = _free.setdefault(size, [])
    try:
        memory = pool.pop()
    except IndexError:
        memory = torch.empty(size, dtype=torch.uint8)
    try:
        yield -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT
    finally:
        pool.append(memory)


def result(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A dense tensor of anything. A large one lies in memory that returns to a pool when its last user has let go of it."""
    count = prod(shape)
    size = count * dtype.itemsize
    if size < LARGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    lent = _lend(-(-size // LARGE_BYTES) * LARGE_BYTES)
    return torch.frombuffer(lent, dtype=dtype, count=count).view(shape)


def _lend(size: int) -> Any:
    try:
        memory = _idle.setdefault(size, []).pop()
    except IndexError:
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
    lent = _lent_type(size).from_buffer(memory)
    lent.owner = memory
    return lent


@cache
def _lent_type(size: int) -> Any:
    """Arrays over a block of memory that give it back when they are collected. A tensor made from one holds on to it."""

    def give_back(self: Any) -> None:
        if sum(each * len(blocks) for each, blocks in list(_idle.items())) + size <= KEPT_BYTES:
            _idle[size].append(self.owner)

    return type("Lent", (ctypes.c_uint8 * size,), {"__del__": give_back})
