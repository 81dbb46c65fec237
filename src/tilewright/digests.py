"""Digests of files by all their bytes, worked out by threads of their own, and whether a file is still what was digested.

A large file is digested in pieces, so that several cores share it: SHA-256 of the pieces' SHA-256, and of the length. Four
cores of a Zen 5 take 0.06 s for 440 MB, less than importing torch does, so no time stamp is ever taken for a content.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tilewright.errors import say
from tilewright.processors import affine

PIECE_BYTES = 1 << 23
RACY_S = 2.0  # a file changed so shortly before it was looked at may change again within one tick of its time stamp
THREADS = 8
LIMIT, LIMIT_GIB = "TILEWRIGHT_PROGRAMS_GIB", 8.0  # all kept programs together, and a model's file; 0 keeps none


class Sighting:
    """A file as it was found: its digest is being worked out from now on.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self._seen_s = time.time()
        self.stamp: tuple[int, ...] = stamp_of(path.stat())
        path.open("rb").close()
        pool = ThreadPoolExecutor(min(THREADS, len(affine())))
        self._pieces: list[Future[bytes]] = [pool.submit(_digest, path, at) for at in range(0, self.stamp[2], PIECE_BYTES)]
        pool.shutdown(wait=False)  # once these are done
        self._found = ""

    def digest(self) -> str:
        """The digest of the file's bytes, in hexadecimal: of a file that is being changed, no content's.

        Raises:
            OSError: it can no longer be read.
        """
        if not self._found:
            whole = hashlib.sha256(b"".join(p.result() for p in self._pieces) + str(self.stamp[2]).encode())
            self._found, self._pieces = whole.hexdigest(), []
        return self._found

    def unchanged(self) -> bool:
        """Tell whether the file is still what was digested; one that had just been written is digested again for that."""
        try:
            if stamp_of(self.path.stat()) != self.stamp:
                return False
            racy = self._seen_s - self.stamp[4] / 1e9 < RACY_S
            return not racy or Sighting(self.path).digest() == self.digest()
        except OSError:
            return False


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """A file's status, as far as it changes with its content: device, inode, bytes, times of change (bytes, status) in ns."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def limit_bytes() -> int:
    """The bytes that all kept programs may have together."""
    try:
        return int(float(os.environ.get(LIMIT, LIMIT_GIB)) * 2**30)
    except (ValueError, OverflowError):
        say(f"{LIMIT} is no number of GiB: {LIMIT_GIB:g} are taken")
        return int(LIMIT_GIB * 2**30)


_begun: dict[Path, Sighting] = {}


def begin(path: Path, most: int) -> None:
    """Begin to digest a model's file, and data beside it under the names that exporters give, while others are busy; none of
    more than `most` bytes."""
    for each in (path, *(path.with_name(f"{path.name}{end}") for end in (".data", "_data"))):
        with contextlib.suppress(OSError):
            if each.is_file() and each.stat().st_size <= most:
                _begun[each.resolve()] = Sighting(each)


def sighted(paths: Iterable[Path]) -> list[Sighting | None]:
    """Files as they are found now, digested at once; None for one that cannot be read. What `begin` began is used once."""
    found: list[Sighting | None] = []
    for path in paths:
        try:
            begun = _begun.pop(path.resolve(), None)
            found.append(begun if begun is not None and begun.stamp == stamp_of(path.stat()) else Sighting(path))
        except OSError:
            found.append(None)
    return found


def _digest(path: Path, at: int) -> bytes:
    """The digest of a piece. It is read, not mapped: a file that is cut meanwhile would end the process."""
    with path.open("rb") as file:
        file.seek(at)
        return hashlib.sha256(file.read(PIECE_BYTES)).digest()
