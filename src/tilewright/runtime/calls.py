"""Words between ranks about each call of a program, before values travel in it, so that calls of two programs never meet.

A library's collective operation takes whatever comes: of another program's call it makes wrong numbers, or ends the process.
So a rank writes a *line*, its call's number, program and a digest of what is to lie whole on all ranks, and reads the others'.
On one host lines stand on a *board* in shared memory: whoever comes last to a call sees all of them, and nobody waits for one.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

RING = 8  # calls that a board remembers of each rank: more than one can be ahead of another
WORDS = 4  # of 8 bytes, of a line
SMALL_BYTES = 1 << 14  # up to which a digest reads each byte by itself
ROW_WORDS = 64  # of a larger tensor are added up first
SHARED_MEMORY = Path("/dev/shm")


class Line(NamedTuple):
    """A call as its rank says it.

    Attributes:
        number: how many calls its group made with it.
        program: which program, counted as all ranks compiled them.
        given: the digest of the inputs that all ranks of the group are to hold alike; 0 where none is looked at.
        parts: the digest of the whole tensors of which the rank's other inputs are parts; 0 where that is not known.
    """

    number: int
    program: int
    given: int
    parts: int = 0

    def agrees(self, other: Line) -> bool:
        """Tell whether two ranks' lines may be of one call."""
        return self[:3] == other[:3] and (self.parts == other.parts or 0 in (self.parts, other.parts))


class Board:
    """Lines of all ranks of a group in memory that they share.

    A line's number is written behind the rest of it, so that a line with a number is whole. Between a rank's writing and its
    reading stands a lock's barrier: of two ranks that come at the same time one at least sees the other's line.
    """

    def __init__(self, memory: memoryview, place: int) -> None:
        """`memory` are the words of the group's lines, at first 0, and `place` this rank's among them."""
        self._words, self._place, self._barrier = memory, place, threading.Lock()

    def write(self, line: Line) -> None:
        """Say this rank's line."""
        at = self._at(self._place, line.number)
        self._words[at + 1], self._words[at + 2], self._words[at + 3] = line.program, line.given, line.parts
        with self._barrier:
            pass
        self._words[at] = line.number
        with self._barrier:
            pass

    def read(self, place: int, number: int) -> Line | None:
        """A rank's line of a call; None while it has not come to it."""
        at = self._at(place, number)
        return Line(number, *(self._words[at + i] for i in range(1, WORDS))) if self._words[at] == number else None

    def _at(self, place: int, number: int) -> int:
        return (place * RING + number % RING) * WORDS


def new_file(ranks: int) -> str:
    """The path of a new file for the lines of so many ranks, in memory where the system has such files.

    Raises:
        OSError: there is no room for it.
    """
    handle, path = tempfile.mkstemp(prefix="tilewright-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
    with os.fdopen(handle, "wb") as file:
        file.write(bytes(8 * WORDS * RING * ranks))  # room that is promised, not found missing at the first write
    return path


def shared(path: str) -> memoryview:
    """The words of such a file. They stay when its name is gone.

    Raises:
        OSError: it is not to be had here, as in another container.
    """
    with Path(path).open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")


def digest_of(values: Iterable[torch.Tensor]) -> int:
    """A digest of the bits of tensors on the CPU, in a word of 8 bytes. Of a large one words are added up by `ROW_WORDS` first,
    at the memory's speed: tensors that differ in the order of words within such a row have the same one."""
    found = 0
    for t in values:
        dense = t.detach().contiguous() if t.numel() > 1 else torch.empty(t.shape, dtype=t.dtype).copy_(t.detach())
        data = dense.view(-1).view(torch.uint8)  # one element counts as contiguous, whatever its stride
        if data.numel() > SMALL_BYTES:
            data = data.clone() if data.storage_offset() % 8 else data
            even = data.numel() - data.numel() % (8 * ROW_WORDS)
            sums = data[:even].view(torch.int64).view(-1, ROW_WORDS).sum(1)
            found = zlib.crc32(sums.numpy().data, found)
            data = data[even:]
        found = zlib.crc32(data.numpy().data, found)
    return found
