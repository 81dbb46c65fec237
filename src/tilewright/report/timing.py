"""How often to run something, and what each run took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tilewright.schedule.measure import busy_us, synchronize

WARM_UPS = 2


@dataclass(frozen=True)
class Rounds:
    """Between `least` and `most` runs, stopping past `least` once `budget_s` is spent."""

    least: int
    most: int
    budget_s: float

    @classmethod
    def of(cls, iterations: int | None, budget_s: float) -> Rounds:
        """Just `iterations`, or as many as the budget allows if that is None."""
        return cls(5, 100, budget_s) if iterations is None else cls(iterations, iterations, 0.0)


def wall_us(run: Callable[[], object], device: str, rounds: Rounds) -> list[float]:
    """What each run took from call to finished result, in µs, after a warm-up."""
    for _ in range(WARM_UPS):
        run()
    synchronize(device)
    times: list[float] = []
    began = time.perf_counter()
    while _more(times, rounds, began):
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(1e6 * (time.perf_counter() - start))
    return times


def device_us(run: Callable[[], object], device: str, rounds: Rounds) -> list[float]:
    """What each run kept the device busy, in µs: by events on a GPU, which never waits for the host to launch them
    (`measure.busy_us`); by the clock on a CPU."""
    if device == "cpu":
        return wall_us(run, device, rounds)
    times: list[float] = []
    host_us = min(busy_us(run, device)[1] for _ in range(WARM_UPS))
    began = time.perf_counter()
    while _more(times, rounds, began):
        taken, now_us = busy_us(run, device, count=min(rounds.most - len(times), rounds.least), ahead_us=host_us)
        host_us = min(host_us, now_us)
        times += taken
    return times


def _more(times: list[float], rounds: Rounds, began: float) -> bool:
    if len(times) < rounds.least:
        return True
    return len(times) < rounds.most and time.perf_counter() - began < rounds.budget_s
