"""Ends for work that may turn out endless: whoever gives it time sets an end, and loops in it ask whether that has passed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator
from contextvars import ContextVar

from tilewright.errors import TilewrightError

REFUSE_S = 20.0  # for a candidate to say whether it takes a problem, or to name its next point
LEAST_S = 1.0  # for that, once candidates have used up what a program allows them

_end: ContextVar[float | None] = ContextVar("end", default=None)
_allowed: ContextVar[list[float] | None] = ContextVar("allowed", default=None)


class OverrunError(TilewrightError):
    """Work whose time is over."""


def check() -> None:
    """Give up where the time of the work around it is over; nothing where it has no end.

    Raises:
        OverrunError: it is over.
    """
    end = _end.get()
    if end is not None and time.monotonic() > end:
        raise OverrunError("its time is over")


@contextlib.contextmanager
def until(end: float) -> Generator[None]:
    """Work that is to end by then, on the clock of `time.monotonic`; or earlier, where that around it does."""
    outer = _end.get()
    token = _end.set(end if outer is None else min(end, outer))
    try:
        yield
    finally:
        _end.reset(token)


@contextlib.contextmanager
def allowing(seconds: float) -> Generator[None]:
    """A program whose candidates may overrun so long in all; then each has `LEAST_S`."""
    token = _allowed.set([seconds])
    try:
        yield
    finally:
        _allowed.reset(token)


@contextlib.contextmanager
def considering() -> Generator[None]:
    """A candidate's look at a problem.

    Raises:
        OverrunError: it took too long, in a sentence.
    """
    left = _allowed.get()
    limit_s = max(LEAST_S, min(REFUSE_S, math.inf if left is None else left[0]))
    began = time.monotonic()
    try:
        with until(began + limit_s):
            yield
    except OverrunError:
        took_s = time.monotonic() - began
        if left is not None:
            left[0] -= took_s
        raise OverrunError(f"it was still considering the problem after {took_s:.0f} s") from None
