"""Numbers of threads that a call may use."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from tilewright.errors import InputError
from tilewright.processors import file_text, usable

MOST = 1024  # threads that may be asked for: to start ten thousand takes a minute and a half
AWAY_S = 0.002  # of a call in which its thread did not run: more than the system's own work takes
HOLD_S, LONGEST_HOLD_S = 0.25, 8.0  # for which torch then uses one thread
P = ParamSpec("P")
R = TypeVar("R")

_said = threading.local()
_told: list[Callable[[int, bool], object]] = []
_asked: list[Callable[[], int]] = []


def limit() -> int | None:
    """The number of threads that the calling thread was told to use, by `limited` or `adopt`; None if it was not."""
    return getattr(_said, "count", 0) or None


def count() -> int:
    """Threads that kernels may use which this thread calls now: as many as `limited` says, else torch's, but no more than the
    machine has for this process."""
    return getattr(_said, "count", 0) or min(torch.get_num_threads(), usable())


def valid_count(threads: object) -> int | None:
    """A number of threads as users give it; None leaves it to torch and the machine.

    Raises:
        InputError: it is none.
    """
    if threads is None or (isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= MOST):
        return threads
    hint = f"1 to {MOST}; None, or no --threads, for as many as torch has"
    raise InputError(f"threads={threads!r} is no number of threads", hint=hint)


@contextmanager
def limited(threads: int | None, *, gathered: bool = False, of_torch: int | None = None) -> Generator[None]:
    """A context in which the calling thread's kernels, and torch's operations between them, use so many threads; with None as
    many as before, and no more than the machine has for this process. `gathered`: calls begin when all of them are there, so
    that races show. `of_torch`: torch uses so many at most."""
    before, had = getattr(_said, "count", 0), torch.get_num_threads()
    wanted = threads or before or min(had, usable())
    least = min(wanted, of_torch or wanted)
    if least == had and threads in (None, before) and not gathered:
        yield
        return
    _say(threads or before if of_torch is None else wanted, gathered)
    _set_of_torch(least)
    try:
        yield
    finally:
        _set_of_torch(had)
        _say(before)


def threaded(function: Callable[P, R]) -> Callable[P, R]:
    """The function, run with as many threads as its argument `threads` says (`limited`).

    Raises:
        InputError: it is no number of threads.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with limited(valid_count(kwargs.get("threads"))):
            return function(*args, **kwargs)

    return run


def adopt(threads: int) -> None:
    """Have the calling thread use so many threads from now on, as in `limited`, and torch all over the process."""
    torch.set_num_threads(threads)
    _say(threads)


def tell(told: Callable[[int, bool], object], asked: Callable[[], int]) -> None:
    """Have `told` called, on the thread that it is for, with what `limited` says: the number, or 0 where it says none, and
    whether calls are gathered. `asked` tells whether kernels' threads lately lost cores in the middle of their work."""
    _told.append(told)
    _asked.append(asked)
    told(getattr(_said, "count", 0), False)


@contextmanager
def with_torch(threads: int | None) -> Generator[None]:
    """`limited`, for work that torch has a part in. Its threads wait for each other at barriers, and where one has no core all
    stand still: if that took half the time, or kernels' threads lost cores, torch uses one thread for a while."""
    alone = _crowd.now()
    with limited(threads, of_torch=1 if alone else None):
        wall, own = time.perf_counter(), time.thread_time()
        yield
        wall, own = time.perf_counter() - wall, time.thread_time() - own
    if not alone and wall - own > max(AWAY_S, wall / 2):
        _crowd.came()


class _Crowd:
    """Other processes that want the cores, as far as calls have met them."""

    def __init__(self) -> None:
        self._until = self._hold_s = 0.0

    def now(self) -> bool:
        return time.monotonic() < self._until or any(asked() for asked in _asked)

    def came(self) -> None:
        """Expect them for a while: twice as long as the last time, if they have not been away for as long."""
        now = time.monotonic()
        lately = now - self._until < self._hold_s
        self._hold_s = min(2 * self._hold_s, LONGEST_HOLD_S) if lately else HOLD_S
        self._until = now + self._hold_s


_crowd = _Crowd()


def _say(threads: int, gathered: bool = False) -> None:
    _said.count = threads
    for told in _told:
        told(threads, gathered)


def _set_of_torch(threads: int) -> None:
    """Set torch's threads for the calling thread; for all where torch has no OpenMP."""
    (_openmp() or torch.set_num_threads)(threads)


@cache
def _openmp() -> Callable[[int], object] | None:
    """`omp_set_num_threads` of the OpenMP runtime that torch counts its threads by: it holds for the calling thread alone, and
    torch's own function for threads that other code starts meanwhile, too."""
    before = torch.get_num_threads()
    for path in _loaded_openmp():
        found = getattr(ctypes.CDLL(path), "omp_set_num_threads", None)
        if found is None:
            continue
        found.restype = None
        found(before + 1)
        changed = torch.get_num_threads() == before + 1
        found(before)
        if changed:
            return found
    return None


def _loaded_openmp() -> list[str]:
    """OpenMP runtimes mapped into the process."""
    lines = file_text(Path("/proc/self/maps")).splitlines()  # files may be called anything
    mapped = [line.split(maxsplit=5)[-1] for line in lines if any(n in line for n in ("libgomp", "libomp", "libiomp"))]
    return [path for path in dict.fromkeys(mapped) if Path(path).is_file()]
