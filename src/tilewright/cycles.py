"""Full looks for cycles put off: Python looks through all objects of the process, torch's million among them, each time their
number has grown by a quarter, for a fifth of a second."""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

NEVER = 1 << 30  # collections of the middle generation before one of the oldest

_lock = threading.Lock()
_within = 0
_before = gc.get_threshold()


@contextmanager
def young() -> Generator[None]:
    """A block in which Python looks for cycles among young objects alone, as it does in between. It is for work whose results
    live on; blocks may overlap in several threads, and what the caller sets meanwhile stays."""
    global _within, _before
    with _lock:
        if not _within:
            _before = gc.get_threshold()
            if _before[0]:  # else nobody looks
                gc.set_threshold(*_before[:2], NEVER)
        _within += 1
    try:
        yield
    finally:
        with _lock:
            _within -= 1
            if not _within and gc.get_threshold() == (*_before[:2], NEVER):
                gc.set_threshold(*_before)
