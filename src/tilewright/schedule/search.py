"""Choosing a kernel: refuse, build, verify, time, pick. Every decision keeps its reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.errors import UnsupportedError
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import LAST_RESORT, Candidate, Kernel, Runner, discover
from tilewright.schedule.expected import Expected, expect
from tilewright.schedule.measure import examine, time_interleaved
from tilewright.schedule.problem import AnyProblem, RegionProblem
from tilewright.schedule.sample import random_sources

TIE_BAND = 0.03


@dataclass(frozen=True)
class Rejected:
    """A candidate that was not chosen, the sentence why, and its time if it was timed."""

    candidate: str
    why: str
    time_us: float | None = None


@dataclass(frozen=True)
class Decision:
    """What was chosen for a problem and why.

    Attributes:
        problem: the gemm, attention or region.
        kernel: the winner.
        time_us: its measured time, None when nothing was timed.
        rejected: the others, in the order they were considered.
        measured: False for a heuristic answer.
        verified: the kernel agreed with the reference on random data.
        recalled: its times are those of an earlier search, read back; it was built and verified anew.
    """

    problem: AnyProblem
    kernel: Kernel
    time_us: float | None
    rejected: tuple[Rejected, ...]
    measured: bool
    verified: bool
    recalled: bool = False


@dataclass
class _Trial:
    kernel: Kernel
    runner: Runner
    order: int


def search(
    problem: AnyProblem,
    target: Target,
    *,
    budget_s: float = 0.2,
    candidates: Sequence[Candidate] | None = None,
    weights: Mapping[int, torch.Tensor] | None = None,
) -> Decision:
    """The fastest kernel that agrees with the reference.

    Args:
        problem: what to do.
        target: where.
        budget_s: time for measuring; 0 takes the first candidate that passes its check (heuristic order), untimed.
        candidates: who may compete; all that are found by default.
        weights: values of constant sources to measure with instead of random ones, by source index.

    Ties within 3 % go to the candidate that comes first, so that the same machine picks the same kernel twice. The reference is
    timed for a region alone: there it is torch's own operations, one after the other, and not run at all if it stands alone.

    Raises:
        UnsupportedError: not even the reference ran.
    """
    found = [c for c in (candidates if candidates is not None else discover()) if problem.kind in c.kinds]
    rejected: list[Rejected] = []
    builds = _heuristic_order(_built(problem, target, found, rejected))
    region = isinstance(problem, RegionProblem)
    if region and builds and all(c.preference >= LAST_RESORT for c, _ in builds):
        return Decision(problem, builds[0][1], None, tuple(rejected), False, True)
    sources = [t.to(target.device) for t in _sources(problem, weights)]
    on_cpu = [t.cpu() for t in sources]
    expected: dict[float, Expected] = {}
    constants = {i: t for i, t in enumerate(sources) if problem.weights[i]}
    trials: list[_Trial] = []
    for order, (candidate, kernel) in enumerate(builds):
        is_reference = candidate.preference >= LAST_RESORT
        if is_reference and trials and not region:
            rejected.append(Rejected(candidate.name, "not timed: a verified kernel exists"))
            continue
        try:
            runner = kernel.prepare(constants)
            why = None
            if is_reference:  # the others are examined by it; it only has to run
                runner(sources)
            else:
                if kernel.roundoff not in expected:
                    expected[kernel.roundoff] = expect(problem, on_cpu, kernel.roundoff)
                why = examine(problem, expected[kernel.roundoff], runner, sources)
        except Exception as error:
            rejected.append(Rejected(_label(kernel), _failure("failed", error)))
            continue
        if why is not None:
            rejected.append(Rejected(_label(kernel), why))
            continue
        trials.append(_Trial(kernel, runner, order))
        if budget_s <= 0:
            break
    if not trials:
        reasons = "; ".join(f"{r.candidate}: {r.why}" for r in rejected) or "no candidate was given"
        raise UnsupportedError(f"nothing can run {problem}: {reasons}", hint="report this: the reference refuses nothing")
    if budget_s <= 0:
        rejected.extend(
            Rejected(_label(k), "not tried: no time budget, and an earlier candidate passed")
            for _, k in builds[trials[0].order + 1 :]
        )
        return Decision(problem, trials[0].kernel, None, tuple(rejected), False, True)
    return _timed(problem, target, trials, sources, rejected, budget_s)


def _built(
    problem: AnyProblem, target: Target, candidates: Sequence[Candidate], rejected: list[Rejected]
) -> list[tuple[Candidate, Kernel]]:
    """Every kernel there is to try. A candidate that raises anything at all is out of this race, and the compile goes on."""
    builds: list[tuple[Candidate, Kernel]] = []
    for candidate in candidates:
        try:
            why = candidate.refuse(problem, target)
            schedules = [] if why is not None else list(candidate.schedules(problem, target))
        except Exception as error:
            why, schedules = _failure("failed to consider it", error), []
        if why is not None:
            rejected.append(Rejected(candidate.name, why))
        for schedule in schedules:
            try:
                builds.append((candidate, candidate.build(problem, schedule, target)))
            except Exception as error:
                label = f"{candidate.name} ({schedule})" if schedule.knobs else candidate.name
                rejected.append(Rejected(label, _failure("failed to build", error)))
    return builds


def _failure(what: str, error: Exception) -> str:
    first_line = (str(error).splitlines() or [""])[0] or type(error).__name__
    return f"{what}: {first_line[:160]}"


def _timed(
    problem: AnyProblem,
    target: Target,
    trials: list[_Trial],
    sources: Sequence[torch.Tensor],
    rejected: list[Rejected],
    budget_s: float,
) -> Decision:
    runs = [lambda r=t.runner: r(sources) for t in trials]
    times = time_interleaved(runs, target.device, budget_s=budget_s)
    best = min(times)
    winner = next(i for i, t in enumerate(times) if t <= best * (1 + TIE_BAND))
    for i, (trial, us) in enumerate(zip(trials, times, strict=True)):
        if i != winner:
            ratio = us / times[winner]
            why = f"slower: {us:.1f} µs, {ratio:.2f} times the winner" if ratio > 1 else "a tie; the earlier one is kept"
            rejected.append(Rejected(_label(trial.kernel), why, us))
    return Decision(problem, trials[winner].kernel, times[winner], tuple(rejected), True, True)


def _sources(problem: AnyProblem, weights: Mapping[int, torch.Tensor] | None) -> list[torch.Tensor]:
    given = weights or {}
    return [given.get(i, t) for i, t in enumerate(random_sources(problem))]


def _label(kernel: Kernel) -> str:
    return f"{kernel.candidate} ({kernel.schedule})" if kernel.schedule.knobs else kernel.candidate


def _heuristic_order(builds: Sequence[tuple[Candidate, Kernel]]) -> list[tuple[Candidate, Kernel]]:
    """By the candidates' own preference, then in the order found."""
    return sorted(builds, key=lambda b: b[0].preference)
