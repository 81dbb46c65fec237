"""Ends for work: a budget of seconds by the clock, and ends for what may turn out endless, which loops in it ask about."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import dataclass, replace

from tilewright.errors import TilewrightError

REFUSE_S = 20.0  # for a candidate to say whether it takes a problem, or to name its next point
LEAST_S = 1.0  # for that, once candidates have used up what a program allows them
STARVED = 30.0  # times as long by the clock, after which work ends that did not have its time of a processor

_allowed: ContextVar[_Allowed | None] = ContextVar("allowed", default=None)


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
        """A budget of so many seconds at most for a part of the work."""
        made = copy.copy(self)
        made.ends = min(self.ends, time.monotonic() + seconds)
        return made

    def over(self) -> bool:
        """Tell whether there was time, and nothing may be done any more that can be left out."""
        return self.seconds > 0 and time.monotonic() > self.ends


class Began(threading.local):
    """The time at which work began in a thread, on its own clock: in one that a context was copied to, when it first asked.

    Attributes:
        at: `time.thread_time` then.
    """

    at: float

    def __init__(self) -> None:
        self.at = time.thread_time()


@dataclass(frozen=True)
class End:
    """An end of work.

    Attributes:
        by_clock: when, on the clock of `time.monotonic`.
        own_s: after how many seconds of `time.thread_time`, which stands still while others have the processor.
        own_from: when these may be over at the earliest, on the first clock, which is asked ten times as fast.
        began: from when they count.
    """

    by_clock: float = math.inf
    own_s: float = math.inf
    own_from: float = math.inf
    began: Began | None = None

    @classmethod
    def after(cls, seconds: float) -> End:
        """The end of work that takes this thread so many seconds of a processor at most, or `STARVED` times that by the clock:
        what others keep from the processors is not what takes long."""
        now = time.monotonic()
        return cls(now + STARVED * seconds, seconds, now + seconds, Began())

    def within(self, outer: End) -> End:
        """The earlier of two ends, by each clock."""
        first = min(self, outer, key=End._own_left_s)
        return replace(first, by_clock=min(self.by_clock, outer.by_clock))

    def passed(self) -> bool:
        """Tell whether that is over."""
        now = time.monotonic()
        return now > self.by_clock or (now > self.own_from and self._own_left_s() < 0)

    def left_s(self) -> float:
        """Seconds until then at least, 0 once it is over."""
        return max(0.0, min(self.by_clock - time.monotonic(), self._own_left_s()))

    def _own_left_s(self) -> float:
        return math.inf if self.began is None else self.own_s - (time.thread_time() - self.began.at)


NEVER = End()
_end: ContextVar[End] = ContextVar("end", default=NEVER)


class OverrunError(TilewrightError):
    """Work whose time is over."""


def over() -> bool:
    """Tell whether the time of the work around it is over; False where it has no end."""
    return _end.get().passed()


def left_s() -> float:
    """Seconds that the work around it has left, at least 0; infinity where it has no end."""
    return _end.get().left_s()


def check() -> None:
    """Give up where the time of the work around it is over; nothing where it has no end.

    Raises:
        OverrunError: it is over.
    """
    if over():
        raise OverrunError("its time is over")


@contextlib.contextmanager
def until(end: float | End) -> Generator[None]:
    """Work that is to end by then, a number being on the clock of `time.monotonic`; or earlier, where that around it does."""
    token = _end.set((end if isinstance(end, End) else End(end)).within(_end.get()))
    try:
        yield
    finally:
        _end.reset(token)


@dataclass
class _Allowed:
    """The seconds that a program's candidates may still overrun in all, and when they are over by the clock."""

    left_s: float
    ends: float


@contextlib.contextmanager
def allowing(seconds: float) -> Generator[None]:
    """A program whose candidates may overrun so long in all; then each has `LEAST_S` of a processor."""
    token = _allowed.set(_Allowed(seconds, time.monotonic() + seconds))
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
    allowed, began = _allowed.get(), time.monotonic()
    limit_s = max(LEAST_S, min(REFUSE_S, math.inf if allowed is None else allowed.left_s))
    end = End.after(limit_s)
    if allowed is not None:  # one that waits uses no processor
        end = replace(end, by_clock=min(end.by_clock, max(allowed.ends, began + STARVED * LEAST_S)))
    try:
        with until(end):
            yield
    except OverrunError:
        took_s = time.monotonic() - began
        if allowed is not None:
            allowed.left_s -= took_s
        raise OverrunError(f"it was still considering the problem after {took_s:.0f} s") from None
