"""Where kernels of one problem are built, verified and timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.hardware.target import Target
from tilewright.schedule.candidate import LAST_RESORT, Candidate, Kernel, Runner
from tilewright.schedule.expected import Expected, expect
from tilewright.schedule.measure import examine, time_interleaved
from tilewright.schedule.problem import AnyProblem
from tilewright.schedule.sample import random_sources
from tilewright.schedule.schedule import Schedule


@dataclass(frozen=True)
class Attempt:
    """What became of one point.

    Attributes:
        schedule: the point as it was built.
        why: the sentence that refused it; None if it may be timed.
        kernel: what was built, where that was done in this process.
    """

    schedule: Schedule
    why: str | None = None
    kernel: Kernel | None = None


class Bench:
    """In this process: for candidates that are trusted to come back."""

    def __init__(self, problem: AnyProblem, target: Target, weights: Mapping[int, torch.Tensor]) -> None:
        """`weights`: values of constant sources to measure with instead of random ones, by source index."""
        self._problem, self._target = problem, target
        self._sources = [weights.get(i, t).to(target.device) for i, t in enumerate(random_sources(problem))]
        self._constants = {i: t for i, t in enumerate(self._sources) if problem.weights[i]}
        self._expected: dict[float, Expected] = {}
        self._runners: dict[int, Runner] = {}

    def attempt(self, key: int, candidate: Candidate, schedule: Schedule) -> Attempt:
        """Build and verify a point; `times` knows it by `key` if it passes."""
        try:
            kernel = candidate.build(self._problem, schedule, self._target)
        except Exception as error:
            return Attempt(schedule, failure("failed to build", error))
        try:
            runner = kernel.prepare(self._constants)
            why = None
            if candidate.preference >= LAST_RESORT:  # the others are examined by it; it only has to run
                runner(self._sources)
            else:
                why = examine(self._problem, self._wanted(kernel.roundoff), runner, self._sources)
        except Exception as error:
            why = failure("failed", error)
        else:
            self._runners[key] = runner
        return Attempt(kernel.schedule, why, kernel)

    def times(self, keys: Sequence[int], budget_s: float) -> list[float]:
        """Medians in µs of points that passed, timed in turn."""
        runs = [lambda r=self._runners[k]: r(self._sources) for k in keys]
        return time_interleaved(runs, self._target.device, budget_s=budget_s)

    def _wanted(self, roundoff: float) -> Expected:
        if roundoff not in self._expected:
            self._expected[roundoff] = expect(self._problem, [t.cpu() for t in self._sources], roundoff)
        return self._expected[roundoff]


def failure(what: str, error: Exception) -> str:
    """An exception as the sentence that refuses a candidate."""
    first_line = (str(error).splitlines() or [""])[0] or type(error).__name__
    return f"{what}: {first_line[:160]}"
