"""Memory that calls work in and give results in, used again instead of being asked of the system each time.

A page that the system hands out costs a fault and its zeroing at first touch: for a result of 50 MB that is a tenth of the time
its product takes. Concurrent calls never share any memory: taking from and giving back to a pool are single list operations.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import prod
from typing import Any, TypeVar

import torch

from tilewright.schedule.guard import BYTE, before_runs, visible
from tilewright.sizes import round_up

ALIGNMENT = 64
SMALLEST = 1 << 16
LARGE_BYTES = 1 << 20  # below this the C library's allocator does the same
HUGE_BYTES = 1 << 21  # a page of them, on x86-64 and most others
SMALL_BYTES = 1 << 22  # blocks of which any number is kept
KEPT_BYTES = 1 << 29  # of memory that no result is in, and of memory to work in, at most

Block = TypeVar("Block")
Scratch = tuple[int, int, torch.Tensor]  # address, aligned to a cache line; size; what keeps it

_free: dict[int, list[Scratch]] = {}
_idle: dict[int, list[mmap.mmap]] = {}


def take(size_bytes: int) -> Scratch:
    """Take `size_bytes` bytes of scratch memory or more, nobody else's until they are given back."""
    size = 1 << (size_bytes - 1).bit_length() if size_bytes > SMALLEST else SMALLEST
    try:
        return _free[size].pop()
    except (KeyError, IndexError):
        if size < HUGE_BYTES:
            memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        else:
            memory = torch.frombuffer(_pages(size), dtype=torch.uint8)
        return -(-memory.data_ptr() // ALIGNMENT) * ALIGNMENT, size, memory


def give(scratch: Scratch) -> None:
    """Back to the pool, unless that holds enough: then to the system."""
    size = scratch[1]
    if size > SMALL_BYTES and size + sum(each * len(blocks) for each, blocks in list(_free.items())) > KEPT_BYTES:
        return
    try:
        _free[size].append(scratch)
    except KeyError:
        _free.setdefault(size, []).append(scratch)


def maker(shape: Sequence[int], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """A function that makes dense tensors; large ones in memory that is used again when their last user has let go of it."""
    if visible():
        return partial(torch.empty, tuple(shape), dtype=dtype)
    if prod(shape) * dtype.itemsize < LARGE_BYTES:
        example = torch.empty(tuple(shape), dtype=dtype)
        try:  # what torch's own compiled programs make theirs with
            made = partial(torch._C._dynamo.guards._empty_strided_cpu, tuple(shape), example.stride(), dtype)  # type: ignore[attr-defined]
            if made().dtype is dtype:
                return made
        except (AttributeError, TypeError):
            pass
        return partial(torch.empty_like, example)
    return partial(_large, tuple(shape), dtype)


def _large(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = prod(shape)
    lent = _lend(_block_of(count * dtype.itemsize))
    return torch.frombuffer(lent, dtype=dtype, count=count).view(shape)


@cache
def _block_of(size_bytes: int) -> int:
    """The size of the block for so many bytes: one of eight from each power of two to the next, so that shapes share them."""
    step = max(LARGE_BYTES, 1 << max(0, (size_bytes - 1).bit_length() - 4))
    return round_up(size_bytes, step)


def _lend(size: int) -> Any:
    memory = None
    for each in (size, *sorted(s for s in list(_idle) if s > size)):  # a larger one has its pages already
        with contextlib.suppress(KeyError, IndexError):
            memory, size = _idle[each].pop(), each
            break
    if memory is None:
        _drop(size)
        memory = _pages(size)
    lent = _lent_type(size).from_buffer(memory)
    lent.owner = memory
    return lent


def _pages(size: int) -> mmap.mmap:
    """Memory from the system, in huge pages where there are any."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a fork's are its own
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _drop(size: int) -> None:
    """Give smaller free blocks back to the system, of as many bytes: who asks for large ones now needs few of them."""
    known = list(_idle.items())  # other threads add sizes
    for each, blocks in sorted(known):
        while blocks and each < size and size > 0:
            del blocks[-1:]  # another thread may have taken it
            size -= each


@cache
def _lent_type(size: int) -> Any:
    """Arrays over a block of memory that give it back when they are collected. A tensor made from one holds on to it."""

    def give_back(self: Any) -> None:
        kept = sum(each * len(blocks) for each, blocks in list(_idle.items()))
        for each, blocks in list(_idle.items()):  # sizes that nobody asks for any more make room
            while blocks and each != size and kept + size > KEPT_BYTES:
                del blocks[-1:]  # another thread may have taken it
                kept -= each
        if kept + size <= KEPT_BYTES:
            _idle.setdefault(size, []).append(self.owner)

    return type("Lent", (ctypes.c_uint8 * size,), {"__del__": give_back})


def _poison() -> None:
    """Fill free memory with 0xFF, so that it does not happen to hold the right numbers. Each block is taken out meanwhile."""
    for blocks in list(_free.values()):
        for scratch in _in_turn(blocks):
            scratch[2].fill_(BYTE)
    for size, idle in list(_idle.items()):
        for block in _in_turn(idle):
            ctypes.memset((ctypes.c_uint8 * size).from_buffer(block), BYTE, size)


def _in_turn(blocks: list[Block]) -> Iterator[Block]:
    for _ in range(len(blocks)):
        try:
            block = blocks.pop(0)
        except IndexError:  # another thread took it
            return
        yield block
        blocks.append(block)


before_runs(_poison)
