"""Watch over shared memory: who touches it while a copy or a product is under way, and what was written without a fence.

What threads read and write themselves and what copies and products do at their own pace meet at barriers, waits and fences
alone (PTX ISA 9.0, 8.6 and 9.7.9.25). Memory is looked at in pieces of 16 bytes.
"""

from __future__ import annotations

import numpy as np

from ptx.memory import SHARED_BASE, Fault

WARP = 32
PIECE = 16


def pieces(addresses: np.ndarray) -> np.ndarray:
    """Pieces that addresses in shared memory lie in; several addresses may lie in one."""
    return (addresses.astype(np.int64) - SHARED_BASE) // PIECE


class Watch:
    """The watch over a block's shared memory.

    Attributes:
        writer, written: the warp that wrote a piece last, and when; 0 where what products and copies read needs no fence.
        fenced: when each warp's last `fence.proxy.async` was.
        coming: copies to a piece that are under way.
        busy: products and copies under way that read it.
    """

    def __init__(self, size: int, *, late: bool) -> None:
        self.late, self.now = late, 0
        self.writer, self.written = np.zeros(size // PIECE, np.int8), np.zeros(size // PIECE, np.int64)
        self.fenced = np.zeros(WARP, np.int64)
        self.coming, self.busy = (np.zeros(size // PIECE, np.int16) for _ in range(2))

    def read(self, at: np.ndarray) -> None:
        """Threads read."""
        if self.late and self.coming[at].any():
            raise Fault("a read of shared memory where a copy is under way")

    def write(self, at: np.ndarray, threads: np.ndarray) -> None:
        """Threads write."""
        if self.late and (self.coming[at].any() or self.busy[at].any()):
            raise Fault("a write to shared memory where a copy or a product is under way")
        self.wrote(at, threads)

    def wrote(self, at: np.ndarray, threads: np.ndarray) -> None:
        """Threads did, now or soon."""
        self.now += 1
        self.writer[at], self.written[at] = threads // WARP, self.now

    def fence(self, threads: np.ndarray) -> None:
        """`fence.proxy.async`."""
        self.now += 1
        self.fenced[np.unique(threads // WARP)] = self.now

    def use(self, at: np.ndarray, threads: np.ndarray) -> None:
        """A product or a copy of some threads uses pieces from now on; their fence or the writer's must stand between."""
        self._unmoved(at)
        own = self.fenced[np.unique(threads // WARP)].min()
        bare = self.written[at] > np.maximum(self.fenced[self.writer[at]], own)
        if bare.any():
            warp = int(self.writer[at][bare][0])
            raise Fault(f"no fence.proxy.async since warp {warp} wrote to shared memory that a product or a copy reads")

    def hold(self, at: np.ndarray, threads: np.ndarray) -> None:
        """The same, until `free`."""
        self.use(at, threads)
        self.busy[at] += 1

    def free(self, at: np.ndarray) -> None:
        """It has read."""
        self._unmoved(at)
        self.busy[at] -= 1

    def _unmoved(self, at: np.ndarray) -> None:
        if self.coming[at].any():
            raise Fault("a product or a copy reads shared memory where a copy is under way")

    def start(self, at: np.ndarray, *, fenced: bool) -> None:
        """A copy to it, `fenced` if not the threads' own."""
        if self.busy[at].any():
            raise Fault("a copy to shared memory that a product or a copy under way reads")
        if fenced and self.coming[at].any():
            raise Fault("a copy to shared memory where another one is under way")
        np.add.at(self.coming, at, 1)

    def end(self, at: np.ndarray) -> None:
        np.subtract.at(self.coming, at, 1)
