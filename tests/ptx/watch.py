"""Who is at shared memory while a copy or a product is under way, and what was written without a fence.

What threads read and write themselves and what copies and products do at their own pace meet at barriers, waits and fences
alone (PTX ISA 9.0, 8.6 and 9.7.9.25). Memory is looked at in pieces of 16 bytes.
"""

from __future__ import annotations

import numpy as np

from ptx.memory import SHARED_BASE, Fault

WARP = 32
PIECE = 16


def pieces(addresses: np.ndarray) -> np.ndarray:
    """Of addresses in shared memory, or of one of each piece."""
    return (addresses.astype(np.int64) - SHARED_BASE) // PIECE


class Watch:
    """Of a block.

    Attributes:
        unfenced: the warp that wrote a piece since the last fence, plus one.
        coming: copies to it that are under way.
        busy: products and copies under way that read it.
    """

    def __init__(self, size: int, *, late: bool) -> None:
        self.late = late
        self.unfenced = np.zeros(size // PIECE, np.int8)
        self.coming, self.busy = (np.zeros(size // PIECE, np.int16) for _ in range(2))

    def read(self, at: np.ndarray) -> None:
        """By threads."""
        if self.late and self.coming[at].any():
            raise Fault("a read of shared memory where a copy is under way")

    def write(self, at: np.ndarray, threads: np.ndarray) -> None:
        """By threads."""
        if self.late and (self.coming[at].any() or self.busy[at].any()):
            raise Fault("a write to shared memory where a copy or a product is under way")
        self.unfenced[at] = threads // WARP + 1

    def fence(self, threads: np.ndarray) -> None:
        """`fence.proxy.async`, by the threads that wrote."""
        known = np.zeros(128, bool)
        known[np.unique(threads // WARP) + 1] = True
        self.unfenced[known[self.unfenced]] = 0

    def use(self, at: np.ndarray) -> None:
        """By a product or a copy, which reads now."""
        if self.coming[at].any():
            raise Fault("a product or a copy reads shared memory where a copy is under way")
        if self.unfenced[at].any():
            warp = int(self.unfenced[at].max()) - 1
            raise Fault(f"no fence.proxy.async since warp {warp} wrote to shared memory that a product or a copy reads")

    def hold(self, at: np.ndarray) -> None:
        """By a product or a copy, which may read from now on."""
        self.use(at)
        self.busy[at] += 1

    def free(self, at: np.ndarray) -> None:
        """It has read."""
        self.use(at)
        self.busy[at] -= 1

    def start(self, at: np.ndarray, *, fenced: bool) -> None:
        """A copy to it, `fenced` if not the threads' own."""
        if self.busy[at].any():
            raise Fault("a copy to shared memory that a product or a copy under way reads")
        if fenced and self.coming[at].any():
            raise Fault("a copy to shared memory where another one is under way")
        np.add.at(self.coming, at, 1)

    def end(self, at: np.ndarray) -> None:
        np.subtract.at(self.coming, at, 1)
