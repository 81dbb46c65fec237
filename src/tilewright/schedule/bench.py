"""The bench on which kernels of one problem are built, verified and timed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch

from tilewright import threads
from tilewright.hardware.load import Meter, uncrowded
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import (
    LAST_RESORT,
    MATRIX_LIBRARIES,
    Candidate,
    Kernel,
    Runner,
    Schedule,
    kernel_of,
    plan_for,
)
from tilewright.schedule.expected import Expected, expect
from tilewright.schedule.fork_server import pulse
from tilewright.schedule.guard import guarded, intact, preparing
from tilewright.schedule.measure import Cold, Fault, Pace, examine, time_interleaved
from tilewright.schedule.problem import AnyProblem
from tilewright.schedule.race import Race
from tilewright.schedule.sample import random_sources

T = TypeVar("T")

LARGE_BYTES = 16 << 20  # of a problem, from which a GPU draws its data and computes its right results
OPS_A_BYTE = 64
ON_ALL = 0.125  # of a race's time, for its fastest on all threads where it was on one
FEW_THREADS = 4  # whose kernels stand in the same order on one
UNCHECKED = "its results cannot be checked"  # begins the sentence where the oracle gives none on random data


@dataclass(frozen=True)
class Attempt:
    """The outcome of building and verifying one point.

    Attributes:
        schedule: the point as it was built.
        fault: the reason that refused it; None if it may be timed.
        kernel: what was built, where that was done in this process.
    """

    schedule: Schedule
    fault: Fault | None = None
    kernel: Kernel | None = None

    @property
    def why(self) -> str | None:
        """The sentence that refused it; None if it may be timed."""
        return None if self.fault is None else self.fault.why


def on_device(problem: AnyProblem, target: Target, work: Callable[[], T]) -> T | None:
    """The result of `work` on the GPU at hand, where a CPU would take seconds; None if it is not to run there, or cannot."""
    if target.device == "cpu" or problem.bytes + getattr(problem, "ops", 0) // OPS_A_BYTE <= LARGE_BYTES:
        return None
    try:
        with torch.device(target.device):
            return work()
    except RuntimeError:  # out of memory, or no such operation there
        torch.cuda.empty_cache()
        return None


class Bench:
    """A bench in this process, for candidates that are trusted to come back.

    Attributes:
        expect_s: seconds that computing the right results took.
        lost: always empty, see `HostedBench`.
    """

    expect_s: float
    dense: bool = False  # kernels are given dense sources alone
    patient: bool = False  # one that takes far longer than the others is examined all the same

    def __init__(
        self,
        problem: AnyProblem,
        target: Target,
        weights: Mapping[int, torch.Tensor],
        *,
        watched: bool = False,
        cold: bool = False,
        counts: Sequence[int] = (),
        pulse: Callable[[], None] = pulse,
        at: Callable[[int], None] = lambda key: pulse(),
    ) -> None:
        """Random sources for a problem.

        Args:
            problem, target: the problem, and the machine to run it on.
            weights: values of constant sources to measure with instead of random ones, by source index.
            watched: see `measure.examine`.
            cold: weights come from memory when kernels are timed, not from a cache.
            counts: numbers of threads to examine kernels with; as many as there are by default.
            pulse: called now and then while kernels are built, examined or timed: that of the worker by default, in which a
                candidate may search on a bench of its own for what it is made of.
            at: told the key of what is timed next.
        """
        self._problem, self._target, self._watched, self._counts = problem, target, watched, counts
        self._pulse, self._at = pulse, at
        given = {i: t.to(target.device) for i, t in weights.items() if problem.weights[i]}
        with uncrowded():
            sources = self._drawn(given)
        drawn = {i: guarded(t.to(target.device)) for i, t in enumerate(sources) if i not in given}
        self._sources = [drawn[i] if i in drawn else given[i] for i in range(len(problem.types))]
        self._guarded = list(drawn.values())
        self._constants = {i: t for i, t in enumerate(self._sources) if problem.weights[i]}
        cold = cold and any(problem.weights)
        self._before = Cold(target, self._sources, problem.weights) if cold else None
        self._expected: dict[float, Expected] = {}
        self._kernels: dict[int, tuple[Candidate, Kernel]] = {}
        self._pace, self._meter = Pace(), Meter(target.device, threads.count())
        self._runners: dict[int, Runner] = {}
        self.expect_s = 0.0
        self.lost: dict[int, Attempt] = {}

    def _drawn(self, given: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor]:
        """The sources to measure with; those in `given` are what they are."""
        problem = self._problem
        return on_device(problem, self._target, lambda: random_sources(problem, given=given)) or random_sources(
            problem, given=given
        )

    def attempt(self, key: int, candidate: Candidate, schedule: Schedule) -> Attempt:
        """Build and verify a point; `times` knows it by `key` if it passes."""
        attempt = self.build(key, candidate, schedule)
        self._pulse()
        if attempt.fault is None and candidate.preference < LAST_RESORT:
            assert attempt.kernel is not None
            try:
                self.expect(attempt.kernel.roundoff)
            except Exception as error:
                return Attempt(attempt.schedule, unchecked(error))
            self._pulse()
        return attempt if attempt.fault is not None else Attempt(attempt.schedule, self.verify(key), attempt.kernel)

    def build(self, key: int, candidate: Candidate, schedule: Schedule) -> Attempt:
        try:
            kernel = kernel_of(plan_for(candidate, self._problem, self._target), schedule)
        except Exception as error:
            return Attempt(schedule, Fault("unbuilt", failure("failed to build", error)))
        self._kernels[key] = candidate, kernel
        return Attempt(kernel.schedule, None, kernel)

    def expect(self, roundoff: float) -> None:
        """Work out what a kernel of this roundoff must give."""
        if roundoff not in self._expected:
            start = time.perf_counter()
            with self._uncrowded():
                self._expected[roundoff] = self._worked_out(roundoff)
            self.expect_s += time.perf_counter() - start

    def _uncrowded(self) -> AbstractContextManager[None]:
        """A context with one thread where a few would wait for each other, at each barrier, until all have a core; torch has no
        more than there are cores free."""
        few = self._target.device == "cpu" and 1 < threads.count() <= FEW_THREADS
        return threads.limited(1) if few and self._meter.load().crowded else uncrowded()

    def _worked_out(self, roundoff: float) -> Expected:
        """The expected results, computed by torch's own operations in float64."""
        found = on_device(self._problem, self._target, lambda: expect(self._problem, self._sources, roundoff))
        return found or expect(self._problem, [t.cpu() for t in self._sources], roundoff)

    def verify(self, key: int) -> Fault | None:
        """None if the kernel that was built as `key` may be timed, else the reason why not."""
        with uncrowded():
            return self._verified(*self._kernels[key], key)

    def _verified(self, candidate: Candidate, kernel: Kernel, key: int) -> Fault | None:
        try:
            with preparing() if self._watched else nullcontext():
                runner = kernel.prepare(self._constants)
            fault = None
            if candidate.preference >= LAST_RESORT:  # the others are examined by it; it only has to run
                runner(self._sources)
            else:
                counts = self._counts or (threads.count(),)
                with self._uncrowded():
                    fault = examine(
                        self._problem,
                        self._expected[kernel.roundoff],
                        runner,
                        self._sources,
                        exactly=candidate.preference < MATRIX_LIBRARIES.start,  # generated kernels promise that
                        counts=counts,
                        watched=self._watched,
                        pulse=self._pulse,
                        pace=None if self.patient else self._pace,
                        dense=self.dense,
                    )
                if fault is None and not all(intact(t) for t in self._guarded):
                    fault = Fault("failed", "it writes beside its sources")
            if self._watched and fault is None:
                runner = kernel.prepare(self._constants)  # as a program will run it
        except Exception as error:
            fault = Fault("failed", failure("failed", error))
        else:
            self._runners[key] = runner
        return fault

    def rehearse(self) -> None:
        """Work out what is right, and examine that as if a kernel had given it: the first time in a process takes seconds on a
        GPU, where each operation of torch is loaded when it is first called."""
        self.expect(0.0)
        expected = self._expected[0.0]

        def runner(_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [t.clone() for t in expected.reference]

        examine(self._problem, expected, runner, self._sources, exactly=True, watched=self._watched, pulse=self._pulse)

    def times(self, keys: Sequence[int], budget_s: float) -> Race:
        """The race of points that passed, by key. Where other processes have the cores, a few threads are one for it: how long
        several wait for each other says nothing of a kernel. Times are then scaled by what the fastest gains on all of them."""
        if not keys:
            return Race({})

        def at(i: int) -> None:
            self._at(keys[i])

        runs = [lambda r=self._runners[k]: r(self._sources) for k in keys]
        device, count = self._target.device, threads.count()
        noise = self._meter.load().noise if device == "cpu" and 1 < count <= FEW_THREADS else ""
        with threads.limited(1 if noise else count):
            race = time_interleaved(runs, device, budget_s=budget_s, at=at, before=self._before)
        laps = {k: race.laps[i] for i, k in enumerate(keys)}
        if noise:
            first = min(range(len(runs)), key=race.us)
            own_us, here = race.us(first), [runs[first]]
            whole = time_interleaved(here, device, budget_s=ON_ALL * budget_s, at=lambda _: at(first), before=self._before)
            gain = min(1.0, max(1 / count, whole.us(0) / own_us)) if 0 < own_us < math.inf else 1.0
            laps = {k: found.scaled(gain) for k, found in laps.items()}
        self._meter = Meter(device, count)
        noise = f"{noise}; kernels raced on one thread" if noise else race.noise
        return Race(laps, noise, race.exact)

    def close(self) -> None:
        """End the bench; nothing more may be asked of it."""

    def again(self, key: int, candidate: Candidate, schedule: Schedule) -> None:
        """Build once more what passed before, unexamined."""
        kernel = kernel_of(plan_for(candidate, self._problem, self._target), schedule)
        self._kernels[key] = candidate, kernel
        self._runners[key] = kernel.prepare(self._constants)


def unchecked(error: Exception) -> Fault:
    """The reason why no kernel can be checked: the oracle raised on random data."""
    return Fault("unchecked", failure(UNCHECKED, error))


def failure(what: str, error: Exception) -> str:
    """An exception as the sentence that refuses a candidate."""
    first_line = (str(error).splitlines() or [""])[0] or type(error).__name__
    return f"{what}: {first_line[:160]}"
