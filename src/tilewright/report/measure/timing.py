"""Timing: how often to run something, and the time of each call."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from tilewright.schedule.measure import busy_us, calls_per_sample, repeated, synchronize

LATE = 10.0
WARM_UPS = 2
WARM_S = 0.02  # after which a call needs no second one to be warm
SPAN_US = 2000.0  # between two events of a GPU: two hundred times what they take
SHORTEST_SPAN_US = 300.0  # where time is short: thirty times
RESTS = 4.0  # as long a GPU idles after each timing as it was busy: a product that goes on for long lowers the clock
LEAST, LEAST_BY_EVENTS = 5, 3  # timings, where time is short: events of a GPU repeat within a few percent
LOOKS = 3  # on a GPU: the first may compile, the second be captured; the third says how long a call is


@dataclass(frozen=True)
class Rounds:
    """A number of runs from `least` to `most`, stopping past `least` once `budget_s` is spent; before, once they took `LATE`
    times that."""

    least: int
    most: int
    budget_s: float

    @classmethod
    def of(cls, iterations: int | None, budget_s: float) -> Rounds:
        """Just `iterations`, or as many as the budget allows if that is None."""
        return cls(LEAST, 100, budget_s) if iterations is None else cls(iterations, iterations, 0.0)

    @property
    def span_us(self) -> float:
        """The time between two events of a GPU for which the budget has room, rests included."""
        fitting = 1e6 * self.budget_s / (LEAST * (1 + RESTS))
        return SPAN_US if not self.budget_s else min(SPAN_US, max(SHORTEST_SPAN_US, fitting))


def wall_us(run: Callable[[], object], device: str, rounds: Rounds) -> list[float]:
    """The time of each run from call to finished result, in µs, after a warm-up."""
    warming = time.perf_counter()
    for _ in range(WARM_UPS):
        start = time.perf_counter()
        run()
        synchronize(device)
        took_s = time.perf_counter() - start
        if 0 < LATE * rounds.budget_s < took_s:  # what takes so long is not much longer at first
            return [1e6 * took_s]
        if time.perf_counter() - warming > WARM_S:
            break
    times: list[float] = []
    began = time.perf_counter()
    while _more(times, rounds, began):
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(1e6 * (time.perf_counter() - start))
    return times


@dataclass(frozen=True)
class Times:
    """Timings of something that was called again and again.

    Attributes:
        us: time of a call in µs, for each timing.
        calls: calls in each timing: one, or as many as keep a GPU busy for a while.
        replayed: those calls were a CUDA graph.
        between_us: of each call the time in operations between ranks, where several take part.
    """

    us: list[float]
    calls: int = 1
    replayed: bool = False
    between_us: list[float] = field(default_factory=list[float])

    @property
    def median_us(self) -> float:
        """The median of the times, in µs."""
        return statistics.median(self.us)

    @property
    def quartiles_us(self) -> tuple[float, float] | None:
        """The lower and the upper quartile in µs, the outermost of up to four; None of a single time."""
        if len(self.us) < 2:
            return None
        ordered, at = sorted(self.us), (len(self.us) - 1) // 4
        return ordered[at], ordered[-1 - at]


class Timer(Protocol):
    """A clock for a step or a whole program."""

    def __call__(self, run: Callable[[], object], device: str, rounds: Rounds, *, captured: bool = False) -> Times:
        """Time a call so many rounds; see `device_us`."""
        ...


def device_us(run: Callable[[], object], device: str, rounds: Rounds, *, captured: bool = False) -> Times:
    """The time in µs that a call kept the device busy: by events on a GPU, which never waits for the host to launch it
    (`measure.busy_us`), with several short calls between two events, and idle most of the time, at the clock that it has for a
    single call; by the clock on a CPU.

    Args:
        run: the call.
        device: the device that runs it.
        rounds: number of timings.
        captured: several calls are replayed as a CUDA graph if they can be, as kernels are launched within a program.
    """
    if device == "cpu":
        return Times(wall_us(run, device, rounds))
    calls, host_us = 1, math.inf
    for _ in range(LOOKS):
        us, now_us = busy_us(run, device, calls=calls, ahead_us=0.0 if host_us == math.inf else host_us)
        calls, host_us = calls_per_sample(us, rounds.span_us), min(host_us, now_us)
    replay = repeated(run, calls, device) if captured and calls > 1 else None
    if replay is not None:
        host_us = busy_us(replay, device)[1]
    if rounds.budget_s:
        rounds = replace(rounds, least=min(rounds.least, LEAST_BY_EVENTS))
    times: list[float] = []
    began = rested = time.perf_counter()
    while _more(times, rounds, began):
        time.sleep(max(0.0, rested - time.perf_counter()))  # not behind the last one, which nothing is timed after
        if replay is None:
            us, now_us = busy_us(run, device, calls=calls, ahead_us=host_us)
        else:
            us, now_us = busy_us(replay, device, ahead_us=host_us)
            us /= calls
        host_us = min(host_us, now_us)
        times.append(us)
        rested = time.perf_counter() + RESTS * calls * us / 1e6
    return Times(times, calls, replay is not None)


def _more(times: list[float], rounds: Rounds, began: float) -> bool:
    took_s = time.perf_counter() - began
    if len(times) < rounds.least:
        return not times or not 0 < LATE * rounds.budget_s < took_s
    return len(times) < rounds.most and took_s < rounds.budget_s
