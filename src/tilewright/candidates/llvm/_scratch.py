"""Memory that a call works in: taken from a pool and given back, so that concurrent calls never share any."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

ALIGNMENT = 64
SMALLEST = 1 << 16

_free: dict[int, list[torch.Tensor]] = {}


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
