"""Ends for work: a budget of seconds by the clock, and ends for what may turn out endless, which loops in it ask about."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Generator
from contextvars import ContextVar

from tilewright.errors import TilewrightError

REFUSE_S = 20.0  # for a candidate to say whether it takes a problem, or to name its next point
LEAST_S = 1.0  # for that, once candidates have used up what a program allows them

_end: ContextVar[float | None] = ContextVar("end", default=None)
_allowed: ContextVar[list[float] | None] = ContextVar("allowed", default=None)


EXCEEDED, SPENT = 1.1, 1.2  # times a budget
SHORTEST_S = 5.0  # that a budget counts as for these, as reading alone may take a second or two


class Budget:
    """Seconds by the clock for all that is done, from now on; 0 stands for as little work as does, however long that takes.

    Attributes:
        seconds: how many.
        began, ends: when, on the clock of `time.monotonic`.
    """

    seconds: float
    began: float
    ends: float

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began = seconds, time.monotonic()
        self.ends = self.began + seconds

    def left_s(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self.ends - time.monotonic())

    def part(self, seconds: float) -> Budget:
        """A budget of so many seconds at most for a part of the work, which is exceeded and spent when this one is."""
        made = copy.copy(self)
        made.ends = min(self.ends, time.monotonic() + seconds)
        return made

    def exceeded(self) -> bool:
        """Tell whether even the least work that gives a good result would end too late."""
        return self._past(EXCEEDED)

    def spent(self) -> bool:
        """Tell whether nothing may be done any more that can be left out."""
        return self._past(SPENT)

    def _past(self, times: float) -> bool:
        return self.seconds > 0 and time.monotonic() > self.began + times * max(self.seconds, SHORTEST_S)


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
