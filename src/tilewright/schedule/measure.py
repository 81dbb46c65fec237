"""Verify first, then time. Nothing that fails its check is ever timed.

Random data, never zeros; sources in more than one layout; medians over interleaved rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from tilewright.schedule.candidate import Runner
from tilewright.schedule.expected import Expected, check
from tilewright.schedule.problem import AnyProblem

HOPELESS = 8
SHORT_S = 0.01


def examine(problem: AnyProblem, expected: Expected, runner: Runner, sources: Sequence[torch.Tensor]) -> str | None:
    """None if a runner may be trusted with `sources`, else a sentence.

    It runs on other data first, so that a result kept from an earlier call shows; then on `sources` laid out in memory
    otherwise, as a program's views will hand them over; then as they are. What it gave before must still stand, and its sources
    be untouched.
    """
    before = [t.clone() for t in sources]
    first = runner([t if weight else _other_data(t) for t, weight in zip(sources, problem.weights, strict=True)])
    kept = [t.clone() for t in first]
    laid_out = [t if weight else _otherwise_laid_out(t) for t, weight in zip(sources, problem.weights, strict=True)]
    why = check(problem, expected, runner(laid_out))
    if why is not None:
        plain = check(problem, expected, runner(sources))
        return why if plain is not None else f"{why} (only when its sources are not contiguous)"
    why = check(problem, expected, runner(sources))
    if why is not None:
        return why
    if not all(_same(a, b) for a, b in zip(kept, first, strict=True)):
        return "a result changed when it ran again: it gives memory that it writes later"
    if not all(_same(a, b) for a, b in zip(before, sources, strict=True)):
        return "it writes its sources"
    return None


def _other_data(t: torch.Tensor) -> torch.Tensor:
    """The same elements in reverse order."""
    return t.reshape(-1).view(_bits(t)).flip(0).view(t.dtype).reshape(t.shape)


def _otherwise_laid_out(t: torch.Tensor) -> torch.Tensor:
    """The same values with the last two axes exchanged in memory and one element between rows."""
    if t.dim() < 2:
        return t
    *batch, rows, columns = t.shape
    room = torch.empty(*batch, columns, rows + 1, dtype=t.dtype, device=t.device)
    return room[..., :rows].transpose(-1, -2).copy_(t)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(_bits(a)), b.contiguous().view(_bits(a)))


def _bits(t: torch.Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize]


def synchronize(device: str) -> None:
    """Wait for the device's work; nothing on a CPU."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def time_interleaved(
    runs: Sequence[Callable[[], object]], device: str, *, budget_s: float, min_rounds: int = 3, max_rounds: int = 200
) -> list[float]:
    """Median time of each run in µs, in rounds that take each in turn, within a budget for all together.

    A run slower than the best by far stops taking part after the first round, so a hopeless candidate costs one call (or two,
    if short: one alone may have met an interruption).
    """
    first = [_once(f, device) for f in runs]
    times: list[list[float]] = [[] for _ in runs]
    best = min(first)
    for i, f in enumerate(runs):
        if HOPELESS * best < first[i] < SHORT_S:
            first[i] = min(first[i], _once(f, device))
    start = time.perf_counter()
    for done in range(max_rounds):
        for i, f in enumerate(runs):
            if first[i] <= HOPELESS * best:
                times[i].append(_once(f, device))
        if done + 1 >= min_rounds and time.perf_counter() - start > budget_s:
            break
    return [1e6 * (statistics.median(t) if t else f) for t, f in zip(times, first, strict=True)]


def _once(f: Callable[[], object], device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    f()
    synchronize(device)
    return time.perf_counter() - start
