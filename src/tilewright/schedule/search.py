"""Choosing a kernel among what candidates offer (`space.py`): build, verify, time, pick. Every decision keeps its reasons."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tilewright import threads
from tilewright.deadline import considering
from tilewright.errors import UnsupportedError, say
from tilewright.hardware.target import Target
from tilewright.schedule.bench import Attempt, Bench, failure, unchecked
from tilewright.schedule.candidate import (
    LAST_RESORT,
    MATRIX_LIBRARIES,
    Candidate,
    Kernel,
    Schedule,
    discover,
    kernel_of,
    labelled,
    plan_for,
)
from tilewright.schedule.cost import predict
from tilewright.schedule.fork_server import UnavailableError
from tilewright.schedule.measure import Fault
from tilewright.schedule.problem import AnyProblem, FusionProblem
from tilewright.schedule.race import Race
from tilewright.schedule.record import Reason
from tilewright.schedule.space import LOST, Space, leader, spaces_of
from tilewright.schedule.worker import HostedBench, hosted

TIE_BAND = 0.03  # between candidates
WAITING_BAND = 0.25  # in noise, of what waits for other threads over what does not: a few threads race there as one
POINT_BAND = 0.05  # between points of one: the cost model's order is worth more than a few percent of one run's times
DEPTH = 2  # points of each candidate's space that compete from the start
PROMISING = 1.5  # a candidate this many times slower than the winner is not looked at more deeply
PATIENCE = 8  # points in a row that were no better, and the rest of the space, ranked below them, is left
UNBUILT = 4  # points that could not be built, and are made up for by later ones
RACE, DUEL = 0.5, 0.1  # of the budget, for the points that compete from the start, and for one more against the winner
TIMING = 0.5  # of what it takes to build and check a point, for timing it: a check calls it eight times, a race at least four
WAITS = "its threads wait for each other, which costs more on a busy machine: the generated kernel is kept"
OVER = "not tried: the time for choosing was over"
WHOLE = Schedule()  # where all of a candidate is left out, not one point


@dataclass(frozen=True)
class Rejected:
    """A candidate that was not chosen, or a point of its space: the kind of reason, the sentence, and its time if it was timed.

    The schedule is the default one where all of the candidate is meant.
    """

    candidate: str
    kind: Reason
    why: str
    schedule: Schedule = WHOLE
    time_us: float | None = None

    def __str__(self) -> str:
        """The name and the settings, as reports show them."""
        return labelled(self.candidate, self.schedule)


@dataclass
class Checked:
    """The shapes at which code that serves others, too, was checked.

    Attributes:
        whole: problems of which every element was compared with the reference, on random data.
        spots: those of which some elements were, of the results of a call.
    """

    whole: list[AnyProblem] = field(default_factory=list[AnyProblem])
    spots: list[AnyProblem] = field(default_factory=list[AnyProblem])

    def words(self, problem: AnyProblem) -> str:
        """The shapes at which code for a problem was checked; "" if at its own."""
        if problem in self.whole:
            return ""
        seen = [f"at {', '.join(map(str, self.whole))}"] if self.whole else []
        seen += ["some elements of a call at its own"] if problem in self.spots else []
        return "; ".join(seen) or "at no shape yet"


@dataclass(frozen=True)
class Decision:
    """The kernel chosen for a problem, and why.

    Attributes:
        problem: the gemm, attention or fusion.
        kernel: the winner.
        time_us: its measured time, None when nothing was timed.
        rejected: the others, in the order they were considered.
        measured: False for a heuristic answer.
        verified: the kernel agreed with the reference on random data, here or in an earlier process (`tuning_database.py`), or
            is the reference itself. False where the oracle gave no results on random data to compare with.
        recalled: its times are those of an earlier search, read back, or its point is one that was imported.
        checked_s: seconds that building and verifying the kernel took, the right results included.
        provisional: why the times are not reliable, "" if they are: the problem is searched again when the machine is quiet.
        checked: of code that serves several shapes, at which of them it was verified; None if at this one. More may come.
    """

    problem: AnyProblem
    kernel: Kernel
    time_us: float | None
    rejected: tuple[Rejected, ...]
    measured: bool
    verified: bool
    recalled: bool = False
    checked_s: float = 0.0
    provisional: str = ""
    checked: Checked | None = field(default=None, compare=False)

    @property
    def elsewhere(self) -> str:
        """The shapes at which its code was checked, where that is not this one; "" if it is."""
        return "" if self.checked is None else self.checked.words(self.problem)


class Interruption(KeyboardInterrupt):
    """Ctrl-C while a search looked for something better than it had: `decision` is the best until then."""

    def __init__(self, decision: Decision) -> None:
        super().__init__()
        self.decision = decision


@dataclass
class _Trial:
    """A point that passed its check."""

    space: Space
    attempt: Attempt
    key: int
    took_s: float  # to build and verify
    us: float = math.inf  # until it is timed


def search(
    problem: AnyProblem,
    target: Target,
    *,
    budget_s: float = 0.2,
    candidates: Sequence[Candidate] | None = None,
    weights: Mapping[int, torch.Tensor] | None = None,
    depth: int = DEPTH,
    cold: bool = False,
    within_s: float | None = None,
    lost: Callable[[str, str], None] = lambda candidate, why: None,
    over: Callable[[], bool] = lambda: False,
) -> Decision:
    """The fastest kernel that agrees with the reference.

    Args:
        problem: the problem.
        target: the machine.
        budget_s: time for measuring; 0 takes the first candidate that passes its check (heuristic order), untimed.
        candidates: candidates that may compete; all that are found by default.
        weights: values of constant sources to measure with instead of random ones, by source index.
        depth: points of each candidate's space that compete from the start (one if there is no budget). What is left of the
            budget then goes to one more point at a time, of the fastest candidates, until none is better any more.
        cold: weights are read from memory when kernels are timed, as those of a program are that no cache holds; else they are
            where the last call left them.
        within_s: seconds by the clock for all of it, building and checking included: what would not fit any more is not tried.
            One candidate is built and checked however long that takes.
        lost: called with the name of a candidate that crashed or hung, and how, as soon as it did; not where other programs
            had the processors, which may be why it took so long.
        over: tells whether the time of all problems is over: then not even the first library is tried beside a kernel.

    With a budget, kernels are built, verified and timed in another process (`worker.py`): one that crashes or hangs is
    killed, refused, and not tried again. Here the winner alone is built once more, from the object code that is kept; it is not
    verified again. Where there can be no other process, or a candidate cannot be found there, all happens here.

    Ties go to the one that comes first, so that the same machine picks the same kernel twice: within 3 % to the preferred
    candidate, within 5 % to the point that its candidate ranked before; a point that is tried later must win twice. The
    reference is timed for a fusion alone: there it is torch's own operations, one after the other, and not run at all if it
    stands alone.

    Raises:
        UnsupportedError: not even the reference ran.
        Interruption: Ctrl-C, after all that competed from the start were timed.
    """
    competing = list(candidates) if candidates is not None else discover()
    until = math.inf if within_s is None else time.perf_counter() + within_s
    given = problem, target, budget_s, weights or {}
    if budget_s > 0:
        try:
            return _Search(*given, in_worker=True, cold=cold, until=until, lost=lost, over=over).run(competing, depth)
        except UnavailableError as why:
            say(str(why))
    here = _Search(*given, in_worker=False, cold=cold, until=until, lost=lost, over=over)
    return here.run(competing, depth if budget_s > 0 else 1)


def by_reference(problem: AnyProblem, target: Target) -> Decision:
    """The reference for a problem, which is checked against nothing."""
    last = next(c for c in discover(kind=target.kind) if c.preference >= LAST_RESORT)
    plan = plan_for(last, problem, target)
    return Decision(problem, plan.build(next(iter(plan.schedules()))), None, (), False, True)


def _is_generated(trial: _Trial) -> bool:
    """Tell whether a point is of a generated kernel, which no library's place in the order says."""
    return trial.space.candidate.preference < MATRIX_LIBRARIES.start


class _Search:
    """One search: what was found so far."""

    def __init__(
        self,
        problem: AnyProblem,
        target: Target,
        budget_s: float,
        weights: Mapping[int, torch.Tensor],
        *,
        in_worker: bool,
        cold: bool,
        until: float,
        lost: Callable[[str, str], None],
        over: Callable[[], bool],
    ) -> None:
        self._problem, self._target, self._budget_s, self._weights, self._in_worker = (
            problem,
            target,
            budget_s,
            weights,
            in_worker,
        )
        self._ends, self._until, self._cold, self._lost = time.perf_counter() + budget_s, until, cold, lost
        self._over = over
        self._longest_s = 0.0  # that a point took to be built and checked
        self._rejected: list[Rejected] = []
        self._trials: list[_Trial] = []
        self._keys = itertools.count()
        self._race = Race({})

    def run(self, candidates: Sequence[Candidate], depth: int) -> Decision:
        """Choose among candidates, of which `depth` points each compete from the start."""
        spaces = spaces_of(self._problem, self._target, candidates, self._reject, timed=self._budget_s > 0)
        fusion = isinstance(self._problem, FusionProblem)
        if fusion and spaces and all(s.candidate.preference >= LAST_RESORT for s in spaces):
            only = spaces[0]
            return self._decision(only.plan.build(next(only.points)))
        try:
            self._bench = self._opened(spaces)
        except UnavailableError:
            raise
        except Exception as error:  # random data for it cannot be made
            self._reject("the check", unchecked(error))
            return self._unchecked(spaces)
        try:
            winner = self._found(spaces, depth)
        finally:
            self._bench.close()
        if winner is None:
            return self._unchecked(spaces)
        for space in spaces:
            if not any(t.space is space for t in self._trials):
                continue
            left = space.left(self._until) if self._budget_s > 0 else None
            if left is None:
                self._leave(space, "no more of its settings were tried")
                continue
            count, all_of_them = left
            if count:
                points = "1 more point" if count == 1 else f"{'' if all_of_them else 'at least '}{count:,} more points"
                self._leave(space, f"{points} ranked below {'was' if count == 1 else 'were'} not tried")
        return self._settled(winner, spaces)

    def _opened(self, spaces: Sequence[Space]) -> Bench | HostedBench:
        given = self._problem, self._target, self._weights
        in_worker = hosted(*given, [s.candidate for s in spaces], cold=self._cold) if self._in_worker else None
        return in_worker or Bench(*given, cold=self._cold and self._budget_s > 0)

    def _unchecked(self, spaces: Sequence[Space]) -> Decision:
        """The reference, unexamined, where it fails on random data: what a program computes of its own it may well do."""
        for space in spaces:
            if space.candidate.preference >= LAST_RESORT:
                return self._decision(space.plan.build(next(iter(space.plan.schedules()))), verified=False)
        raise self._nothing()

    def _found(self, spaces: Sequence[Space], depth: int) -> _Trial | None:
        """The winner among all spaces; None if the oracle cannot compute the right results on random data."""
        fusion = isinstance(self._problem, FusionProblem)
        for space in spaces:
            if self._trials and self._budget_s <= 0:
                self._leave(space, space.behind or "not tried: an earlier candidate passed, and nothing was timed")
            elif self._trials and space.candidate.preference >= LAST_RESORT and not fusion:
                self._leave(space, "not timed: a verified kernel exists")
            else:
                self._enter(space, depth)
        if not self._trials:
            if any(r.kind == "unchecked" for r in self._rejected):
                return None
            raise self._nothing()
        libraries = sum(t.space.candidate.preference in MATRIX_LIBRARIES for t in self._trials)
        if self._budget_s > 0 and (time.perf_counter() < self._until or 0 < libraries < len(self._trials)):
            return self._timed()
        first, *others = self._trials
        for trial in others:
            self._leave(trial.space, "not timed: the time for choosing was over", trial.attempt.schedule)
        return first

    def _enter(self, space: Space, depth: int) -> None:
        """Let so many points of a space compete; in place of one that cannot be built the next one, a few times."""
        built = tried = 0
        while built < depth and tried < depth + UNBUILT:
            if self._trials and self._late(len(self._trials) + 1) and not self._owed(space):
                self._leave(space, OVER)
                return
            count = len(self._rejected)
            if self._try_next(space) is None:
                if len(self._rejected) == count:  # its space is used up
                    return
                built -= self._rejected[-1].kind == "unbuilt"
            built, tried = built + 1, tried + 1

    def _owed(self, space: Space) -> bool:
        """Tell whether a point is tried though it is late for this problem: the first one of the first library that passes its
        check."""
        return (
            not self._over()
            and space.candidate.preference in MATRIX_LIBRARIES
            and not any(t.space.candidate.preference in MATRIX_LIBRARIES for t in self._trials)
        )

    def _late(self, racing: int) -> bool:
        """Tell whether one more point, and a race of so many, would end too late."""
        return time.perf_counter() + self._longest_s * (1 + TIMING * racing) > self._until

    def _nothing(self) -> UnsupportedError:
        reasons = "; ".join(f"{r}: {r.why}" for r in self._rejected) or "no candidate was given"
        return UnsupportedError(
            f"nothing can run {self._problem}: {reasons}", hint="report this: the reference refuses nothing"
        )

    def _kernel(self, winner: _Trial) -> Kernel:
        """The winner's kernel in this process."""
        if winner.attempt.kernel is not None:
            return winner.attempt.kernel
        return kernel_of(winner.space.plan, winner.attempt.schedule)

    def _try_next(self, space: Space) -> _Trial | None:
        """Build and verify the next point of a space; None if there is none, or it failed."""
        try:
            with considering():
                schedule = next(space.points, None)
        except Exception as error:
            self._reject(space.candidate.name, Fault("refused", failure("failed to consider it", error)))
            return None
        if schedule is None:
            return None
        key = next(self._keys)
        began, expected = time.perf_counter(), self._bench.expect_s
        attempt = self._bench.attempt(key, space.candidate, schedule)
        took_s = time.perf_counter() - began - (self._bench.expect_s - expected)  # the right results are computed once
        self._longest_s = max(self._longest_s, took_s)
        if attempt.fault is not None:
            if attempt.fault.kind in ("lost", "starved"):
                self._lose(space, attempt)
            else:
                self._reject(space.candidate.name, attempt.fault, attempt.schedule)
                if attempt.fault.kind == "unchecked":  # no point of any candidate can be
                    space.points = iter(())
            return None
        trial = _Trial(space, attempt, key, took_s)
        self._trials.append(trial)
        return trial

    def _timed(self) -> _Trial:
        """The winner of all that passed, and of what the rest of the budget adds to them."""
        self._race = self._time(self._trials, RACE * self._budget_s)
        if not self._trials:
            raise self._nothing()
        winner = self._first_of_the_fastest()
        try:
            winner = self._deepened(winner)
        except KeyboardInterrupt:
            raise Interruption(self._decided(winner)) from None
        for trial in self._trials:
            if trial is not winner:
                ratio = trial.us / winner.us
                slower = Fault("slower", f"slower: {trial.us:,.1f} µs, {ratio:.2f} times the winner")
                tie = "not told apart on a busy machine" if self._race.noise else "a tie"
                why = WAITS if ratio < 1 and self._spared(winner, trial) else f"{tie}; the earlier one is kept"
                fault = slower if ratio > 1 else Fault("tie", why)
                self._reject(trial.space.candidate.name, fault, trial.attempt.schedule, trial.us)
        return winner

    def _time(self, trials: Sequence[_Trial], budget_s: float) -> Race:
        """Race some, and give each its time; those that do not come back are out."""
        budget_s = max(0.0, min(budget_s, self._until - time.perf_counter()))
        race, out = self._bench.times([t.key for t in trials], budget_s), set[str]()
        for trial in list(trials):
            trial.us = race.us(trial.key)
            if trial.us == math.inf:
                self._trials.remove(trial)
                name = trial.space.candidate.name
                if name in out:
                    self._leave(trial.space, "another point of it did not come back", trial.attempt.schedule)
                else:
                    self._lose(trial.space, self._bench.lost[trial.key])
                out.add(name)
        return race

    def _first_of_the_fastest(self) -> _Trial:
        """The first that none beats: of the candidates in their order, then of that one's points."""
        preferred = sorted(self._trials, key=lambda t: t.space.candidate.preference)
        ordered = self._by_model() if self._race.noise else preferred
        space = next(t.space for t in ordered if not self._beaten(t, TIE_BAND))
        return next(t for t in ordered if t.space is space and not self._beaten(t, POINT_BAND))

    def _beaten(self, trial: _Trial, band: float) -> bool:
        """Tell whether any other one is faster by more than a band, and was in most rounds.

        In noise a candidate whose threads wait for each other must be faster than a generated kernel by `WAITING_BAND`. That
        one goes on where a thread finds no core (docs/design/threads.md); torch's operations, and what takes a product apart
        into several, wait for the last thread each time.
        """
        laps, others = self._race.laps, [t for t in self._trials if t is not trial]
        if trial.key not in laps or any(t.key not in laps for t in others):  # they met in duels
            return trial.us > (1 + band) * min((t.us for t in others), default=math.inf)
        wide = max(band, WAITING_BAND)
        return any(self._race.beats(t.key, trial.key, wide if self._spared(trial, t) else band) for t in others)

    def _spared(self, trial: _Trial, other: _Trial) -> bool:
        """Tell whether the times, taken in noise, leave out that the other one's threads wait for each other, and this one's do
        not."""
        several = self._target.kind == "cpu" and threads.count() > 1
        return bool(self._race.noise) and several and _is_generated(trial) and not _is_generated(other)

    def _by_model(self) -> list[_Trial]:
        """The points that passed in the order of what the cost model expects, as far as it says something (`leader`)."""
        expected = [self._predicted_us(t.space, t.attempt.schedule) for t in self._trials]
        best = leader([t.space for t in self._trials], expected)
        return self._trials if best is None else [self._trials[best], *(t for i, t in enumerate(self._trials) if i != best)]

    def _predicted_us(self, space: Space, schedule: Schedule) -> float | None:
        """The time in µs that the cost model expects of a point; None where it says nothing."""
        try:
            return predict(space.candidate, self._problem, schedule, self._target)
        except Exception:  # the candidate's own account
            return None

    def _deepened(self, winner: _Trial) -> _Trial:
        """The winner after one more point at a time met it, each time of the fastest candidate that has points left; on a busy
        machine the same as before, for the model's order of the points left is worth more than their times there."""
        if self._race.noise:
            return winner
        fruitless, best = 0, {id(t.space): t for t in sorted(self._trials, key=lambda t: -t.us)}
        promising = [t.space for t in sorted(best.values(), key=lambda t: t.us) if t.us <= PROMISING * winner.us]
        while promising and fruitless < PATIENCE and time.perf_counter() < self._ends and not self._late(2):
            count = len(self._rejected)
            challenger = self._try_next(promising[0])
            fruitless += 1
            if challenger is None:
                if len(self._rejected) == count:  # its space is used up
                    promising.pop(0)
                    fruitless -= 1
                continue
            if not self._wins(challenger, winner):
                if winner not in self._trials or challenger not in self._trials:
                    break
                continue
            winner, fruitless = challenger, 0
        return winner if winner in self._trials else self._first_of_the_fastest()

    def _wins(self, challenger: _Trial, winner: _Trial) -> bool:
        """Tell whether a point that is tried later beats the winner so far, twice.

        It gets its time as it would have been in the first race, whatever the machine does meanwhile.
        """
        band = POINT_BAND if challenger.space is winner.space else TIE_BAND
        before, challenger.us = winner.us, 0.0
        for _ in range(2):
            ours = challenger.us
            duel = self._time([winner, challenger], DUEL * self._budget_s)
            ratio, winner.us = challenger.us / winner.us, before
            if winner not in self._trials or challenger not in self._trials:
                return False
            challenger.us = max(ours, ratio * before)
            if not duel.beats(challenger.key, winner.key, band):
                return False
        return True

    def _lose(self, space: Space, attempt: Attempt) -> None:
        """A candidate is out for good: each further point could cost as much."""
        assert attempt.fault is not None
        space.points = iter(())
        self._reject(space.candidate.name, attempt.fault, attempt.schedule)
        if attempt.fault.kind == "lost":
            LOST[self._problem, self._target.device, space.candidate.name] = attempt.fault.why
            self._lost(space.candidate.name, attempt.fault.why)

    def _leave(self, space: Space, why: str, schedule: Schedule = WHOLE) -> None:
        self._reject(space.candidate.name, Fault("untried", why), schedule)

    def _reject(self, candidate: str, fault: Fault, schedule: Schedule = WHOLE, us: float | None = None) -> None:
        self._rejected.append(Rejected(candidate, fault.kind, fault.why, schedule, us))

    def _settled(self, winner: _Trial, spaces: Sequence[Space]) -> Decision:
        """The decision for the winner; for the next best one, or the reference, where a plug-in builds in a worker what it does
        not build here."""
        for trial in sorted(self._trials, key=lambda t: (t is not winner, t.us)):
            name, schedule = trial.space.candidate.name, trial.attempt.schedule
            try:
                found = self._decided(trial)
            except Exception as error:
                if not trial.space.candidate.package:
                    raise
                self._reject(name, Fault("unbuilt", failure("failed to build in this process", error)), schedule)
                continue
            return replace(found, rejected=tuple(r for r in found.rejected if (r.candidate, r.schedule) != (name, schedule)))
        return self._unchecked(spaces)

    def _decided(self, winner: _Trial) -> Decision:
        us = winner.us if winner.us < math.inf else None
        return self._decision(self._kernel(winner), us, winner.took_s + self._bench.expect_s)

    def _decision(self, kernel: Kernel, us: float | None = None, checked_s: float = 0.0, *, verified: bool = True) -> Decision:
        provisional = self._race.noise if us is not None else ""
        return Decision(
            self._problem,
            kernel,
            us,
            tuple(self._rejected),
            us is not None,
            verified,
            checked_s=checked_s,
            provisional=provisional,
        )
