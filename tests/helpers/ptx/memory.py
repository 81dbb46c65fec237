"""Global and shared memory: bounds and alignment are checked at every access."""

from __future__ import annotations

import gc
from bisect import bisect_right

import numpy as np
import torch

from ptx.numbers import UNSIGNED, u1, u2, u4, u8

SHARED_BASE = 1024  # where arrays of a block begin, as on a device
CLUSTER_SHIFT = 24  # an address in shared memory of a cluster: number of the block plus one, then the address there


class Fault(Exception):  # noqa: N818
    """A kernel does what it must not do."""


class Region:
    """Bytes at an address, seen as words of every size."""

    def __init__(self, base: int, data: np.ndarray, name: str) -> None:
        self.base, self.size, self.name, self.data = base, len(data), name, data
        self.views = {t: data[: len(data) // t().itemsize * t().itemsize].view(t) for t in (u1, u2, u4, u8)}

    def places(self, addresses: np.ndarray, each: int, count: int) -> np.ndarray:
        """Numbers of the first of `count` words of `each` bytes at addresses."""
        at = addresses.astype(u8) - u8(self.base)
        if (at > u8(max(self.size - each * count, 0))).any() or self.size < each * count:
            worst = int(at.max())
            raise Fault(f"bytes {worst} to {worst + each * count} of {self.name}, which has {self.size}")
        if (at & u8(each * count - 1)).any():
            raise Fault(f"an address in {self.name} is no multiple of {each * count}")
        return (at // u8(each)).astype(np.int64)

    def read(self, addresses: np.ndarray, word: type, count: int = 1) -> np.ndarray:
        """(count, n) words."""
        at = self.places(addresses, word().itemsize, count)
        return self.views[word][at + np.arange(count)[:, None]]

    def write(self, addresses: np.ndarray, words: list[np.ndarray]) -> None:
        kind = words[0].dtype.type
        at = self.places(addresses, kind().itemsize, len(words))
        for i, w in enumerate(words):
            self.views[kind][at + i] = w


def _raw(t: torch.Tensor) -> np.ndarray:
    storage = t.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # pyright: ignore


class Global:
    """Memory of the tensors that a launch's addresses lie in."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._starts: list[int] = []

    def add(self, addresses: list[int]) -> None:
        """Finds the tensors in which these lie."""
        wanted = sorted(a for a in set(addresses) if a and self._region(a) is None)
        if not wanted:
            return
        for o in gc.get_objects():
            kind = type(o)
            if not (kind is torch.Tensor or issubclass(kind, torch.Tensor)) or o.device.type != "cpu":
                continue
            try:
                start, size = o.untyped_storage().data_ptr(), o.untyped_storage().nbytes()
            except (RuntimeError, NotImplementedError):  # of no memory of its own
                continue
            if size and any(start <= a < start + size for a in wanted) and self._region(start) is None:
                self.regions.append(Region(start, _raw(o), f"{kind.__name__} {o.dtype}{list(o.shape)}"))
                self.regions.sort(key=lambda r: r.base)
                self._starts = [r.base for r in self.regions]
        for a in wanted:
            if self._region(a) is None:
                raise Fault(f"an argument is the address {a:#x}, where no tensor is")

    def _region(self, address: int) -> Region | None:
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address >= self.regions[at].base + self.regions[at].size:
            return None
        return self.regions[at]

    def region(self, address: int) -> Region:
        found = self._region(address)
        if found is None:
            raise Fault(f"address {address:#x}, where no tensor is")
        return found

    def _parts(self, addresses: np.ndarray) -> list[tuple[Region, np.ndarray | slice]]:
        first = self.region(int(addresses[0]))
        if (addresses - u8(first.base) < u8(first.size)).all():
            return [(first, slice(None))]
        names = [self.region(int(a)) for a in addresses]
        return [(r, np.array([n is r for n in names])) for r in {id(n): n for n in names}.values()]

    def read(self, addresses: np.ndarray, word: type, count: int = 1) -> np.ndarray:
        """(count, n) words."""
        parts = self._parts(addresses)
        if len(parts) == 1:
            return parts[0][0].read(addresses, word, count)
        got = np.empty((count, len(addresses)), word)
        for region, which in parts:
            got[:, which] = region.read(addresses[which], word, count)
        return got

    def write(self, addresses: np.ndarray, words: list[np.ndarray]) -> None:
        for region, which in self._parts(addresses):
            region.write(addresses[which], [w[which] for w in words])


def shared(size: int, name: str) -> Region:
    """A block's shared memory, NaN wherever nobody wrote."""
    raw = np.full(size + 2 * SHARED_BASE, 0xFF, u1)
    skip = -raw.ctypes.data % SHARED_BASE
    return Region(SHARED_BASE, raw[skip : skip + -(-size // 16) * 16], name)


def word_of(bits: int) -> type:
    return UNSIGNED[bits]
