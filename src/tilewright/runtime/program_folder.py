"""The folder of compiled programs that `programs.py` keeps; torch is not imported to count or remove them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tilewright.files import SAVED, cache_folder, foreign


def folder() -> Path:
    """The folder of kept programs.

    Raises:
        OSError: there can be none.
    """
    found = cache_folder() / "programs"
    found.mkdir(mode=0o700, exist_ok=True)
    if (why := foreign(found)) is not None:
        raise PermissionError(1, f"it {why}", str(found))
    return found


def kept_programs() -> list[tuple[Path, int]]:
    """The kept programs and their bytes, the one that was used longest ago first."""
    found: list[tuple[float, Path, int]] = []
    with contextlib.suppress(OSError):
        for path in (cache_folder() / "programs").glob(f"*{SAVED}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, path, status.st_size))
    return [(path, size) for _, path, size in sorted(found)]


def clear() -> int:
    """Forget all kept programs; how many there were. Processes that run one go on."""
    count = 0
    for path, _ in kept_programs():
        with contextlib.suppress(OSError):
            path.unlink()
            count += 1
    return count
