"""One product for any number of rows: which kernel serves which range of M, found by measuring, over one packing of the weight.

A bucket's rows are served by one family: a candidate, and the order it packs the weight in. Within a bucket the sizes that do
not touch that order may change with M.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from tilewright.deadline import Budget
from tilewright.errors import InputError, UnsupportedError
from tilewright.hardware.target import Target
from tilewright.progress import Progress
from tilewright.schedule.candidate import (
    LAST_RESORT,
    Candidate,
    Kernel,
    Knob,
    Refusal,
    Schedule,
    concerns,
    discover,
    kernel_of,
    narrowed,
    plan_for,
    planned,
)
from tilewright.schedule.cost import predict
from tilewright.schedule.measure import last_cache_bytes
from tilewright.schedule.problem import AnyProblem, Problem
from tilewright.schedule.record import End, Key, Range, Table
from tilewright.schedule.search import Decision, search
from tilewright.schedule.tuning_database import TuningDatabase

MOST_PACKINGS = 3
TIMES_LARGEST = 2  # the bytes of the largest packing that there is: for all that are kept together
WORTH = 1.05  # times faster that a second packing must make some number of rows
LOOKED_AT = 64  # points of a candidate's space, the best first, among which its families are found
FAMILIES = 3  # of one candidate that are measured
UNKNOWN_US = 1e3  # of a kernel that was not timed, and of which the cost model knows nothing
UNKNOWN_TIMES = 2.0  # as slow as the winner, likewise
UNKNOWN_BYTES = 1  # of a packing that could not be made: some
HOPELESS = 2.0  # times as slow as the fastest
LATER = 4  # races that are expected beside those at the powers of two
# Of a race's share of the time: what measuring has beside building and checking, and all that it may take at most.
MEASURING, GENEROUS = 0.5, 2.0

Order = tuple[tuple[str, Knob], ...]
PosedAt = Callable[[int], tuple[Problem, Mapping[int, torch.Tensor]]]


@dataclass(frozen=True)
class PackingVariants(Candidate):
    """A candidate held to one packing: itself a candidate.

    Attributes:
        candidate: the candidate that it is a part of.
        order: the knobs that are held, with their values; none for a candidate that has no such knobs.
    """

    candidate: Candidate = field(kw_only=True)
    order: Order = field(kw_only=True)

    @classmethod
    def of(cls, candidate: Candidate, order: Order = ()) -> PackingVariants:
        """The part of a candidate with one order."""
        name = " ".join((candidate.name, *(f"{k}={v}" for k, v in order if k != "instruction")))
        part = narrowed(candidate, lambda plan: (s for s in plan.schedules() if _order(candidate, s) == order))
        return cls(name, part.kinds, part.devices, part.preference, part.plan, candidate=candidate, order=order)


def _order(candidate: Candidate, schedule: Schedule) -> Order:
    return tuple((k, v) for k, v in schedule.knobs if k in (candidate.packing_knobs or ()))


@dataclass(frozen=True)
class Bucket:
    """Rows `first` to `last`, the family that serves them, and what it took at both ends (µs and the kernel)."""

    first: int
    last: int
    family: PackingVariants
    at_first: Decision
    at_last: Decision


@dataclass(frozen=True, repr=False)
class Buckets:
    """A table over M.

    Attributes:
        buckets: without gaps, in order.
        packings: bytes of the packed weight by family; at most three, which together take twice as much as one may.
        measured: the numbers of rows at which families raced, with the time of each in µs.
        provisional: why these times are not reliable, "" if they are.
    """

    buckets: tuple[Bucket, ...]
    packings: Mapping[str, int]
    measured: Mapping[int, Mapping[str, float]]
    provisional: str = ""

    def __repr__(self) -> str:
        """Ranges of rows, and who serves them."""
        ranges = ", ".join(f"{b.first} to {b.last} {b.family.name}" for b in self.buckets)
        return f"<kernels by rows: {ranges}{'; measured on a busy machine' if self.provisional else ''}>"

    def at(self, rows: int) -> Bucket:
        """The bucket of a number of rows.

        Raises:
            InputError: the table does not reach it.
        """
        found = next((r for r in self.buckets if r.first <= rows <= r.last), None)
        if found is None:
            first, last = self.buckets[0].first, self.buckets[-1].last
            raise InputError(f"{rows} rows are outside the table, {first} to {last}", hint="make the table for more rows")
        return found


def bucketed(
    posed_at: PosedAt,
    target: Target,
    *,
    first: int = 1,
    last: int = 4096,
    budget_s: float = 60.0,
    candidates: Sequence[Candidate] | None = None,
    progress: Progress | None = None,
) -> Buckets:
    """The table from `first` to `last` rows.

    All families race at both ends and at the powers of two between them, far apart first; one that was twice as slow as
    another at the numbers of rows next below and above takes no part. Of the families that pack the weight one is kept, or two
    or three if a further one makes some number of rows 5 % faster; together they take twice the bytes of the largest at most,
    so three are copies of codes of a few bits. A family goes on serving while nobody is 5 % faster; where neighbours
    are served by different ones, the crossover is found by bisection. Packings that depend on the rows take no part.

    What there is no time for is left out: numbers of rows between others, steps of bisections. Both ends race always.

    Args:
        posed_at: the problem for a number of rows, and its weights by source index.
        target: the machine.
        first, last: the least and the greatest number of rows.
        budget_s: seconds by the clock, more than 0, building and checking included, spread evenly over the races.
        candidates: who may compete; all but the reference by default.
        progress: called with races done, races expected, and what comes next.

    Raises:
        InputError: there are no such rows, or is no time to measure.
        UnsupportedError: no family can serve some number of rows.
    """
    if not 1 <= first <= last:
        raise InputError(f"no rows from {first} to {last}", hint="a range such as 1..4096")
    if not budget_s > 0:
        raise InputError(
            f"a table over the rows is measured, and {budget_s:g} seconds are none",
            hint="more time, such as --budget 60 (budget_s=60); a product of one number of rows can do without",
        )
    probes = sorted({first, last, *(1 << i for i in range(last.bit_length()) if first <= 1 << i <= last)})
    race = _Race(posed_at, target, budget_s, len(probes), progress)
    found = list(candidates if candidates is not None else [c for c in discover() if _serves(c)])
    families, raced, packed_bytes = _probed(race, probes, found, target)
    probes = sorted(raced)
    times = {m: dict(raced[m]) for m in probes}
    for m, (name, family) in itertools.product(probes, families.items()):
        if name not in raced[m] and race.serves(m, family):
            times[m][name] = min(raced[m].values()) * _times_slower(name, m, raced, race.expected(m, family))
    for name in dict.fromkeys(n for t in times.values() for n in t if n in families and n not in packed_bytes):
        packed_bytes[name] = race.packed_bytes(next(m for m in probes if name in times[m]), families[name])
    winners = _winners(times, _kept(times, packed_bytes))
    table = _cut(race, {m: families[name] for m, name in winners.items()}, raced, first, last)
    used = dict.fromkeys(r.family.name for r in table)
    packings = {n: packed_bytes[n] for n in used if packed_bytes[n]}
    return Buckets(tuple(table), packings, dict(sorted(race.measured.items())), race.noise)


def _probed(
    race: _Race, probes: Sequence[int], found: Sequence[Candidate], target: Target
) -> tuple[dict[str, PackingVariants], dict[int, dict[str, float]], dict[str, int]]:
    """The families by name, their times in µs at the numbers of rows at which they raced, and the bytes of packed weights that
    are known by then."""
    families, raced = dict[str, PackingVariants](), dict[int, dict[str, float]]()
    packed_bytes: dict[str, int] = {}
    for m in _far_apart_first(probes):
        if len(raced) >= 2 and not race.room():
            break
        for f in _families(found, race.posed_at(m)[0], target):
            if f.candidate.packing_knobs is None and f.name not in packed_bytes:
                packed_bytes[f.name] = race.packed_bytes(m, f)
            if f.candidate.packing_knobs is not None or not packed_bytes[f.name]:
                families.setdefault(f.name, f)
        raced[m] = dict(race.times(m, _promising(families, raced, m)))
    return families, raced, packed_bytes


def _winners(times: Mapping[int, Mapping[str, float]], kept: Collection[str]) -> dict[int, str]:
    """The family that serves each number of rows: that of the one below, as long as none is faster by far."""
    winners: dict[int, str] = {}
    stays = ""
    for m, of_all in times.items():
        now = {n: of_all[n] for n in kept if n in of_all}
        best = min(now, key=now.__getitem__)
        winners[m] = stays = stays if stays in now and now[stays] <= WORTH * now[best] else best
    return winners


def _cut(
    race: _Race, winners: Mapping[int, PackingVariants], raced: dict[int, dict[str, float]], first: int, last: int
) -> list[Bucket]:
    """The ranges of rows. Between neighbours that different families serve, the crossover is found by bisection."""
    table: list[Bucket] = []
    start = first
    for (left, one), (right, two) in itertools.pairwise(winners.items()):
        if one.name == two.name:
            continue
        low, high = left, right
        while high - low > 1 and race.room():
            middle = (low + high) // 2
            now = raced[middle] = dict(race.times(middle, [one, two]))
            stays = now.get(one.name, math.inf) <= WORTH * now.get(two.name, math.inf)
            low, high = (middle, high) if stays else (low, middle)
        guessed = low + int((high - low) * _crossing([raced[m] for m in (low, high)], one.name, two.name))
        tried = dict.fromkeys((min(guessed, high - 1), high - 1, low))
        end = next((e for e in tried if race.serves(e, one) and race.serves(e + 1, two)), low)
        table.append(race.bucket(start, end, one))
        start = end + 1
    table.append(race.bucket(start, last, winners[last]))
    return table


def untimed(
    problem: AnyProblem,
    target: Target,
    weights: Mapping[int, torch.Tensor],
    known: TuningDatabase | None,
    family: PackingVariants | None = None,
) -> Decision:
    """The kernel for a problem, chosen without measuring: of a family, where one is given that has a point for just these
    extents, else of all candidates. It is kept, and found again, by what is known.

    Raises:
        UnsupportedError: not even the reference ran.
    """
    if family is not None:
        held = None if known is None else known.of_family(family.name)
        with contextlib.suppress(UnsupportedError):  # no point of its space has the packing for just so many rows
            return _first(problem, target, weights, held, [family])
    return _first(problem, target, weights, known, None if known is None else known.candidates(problem))


def _first(
    problem: AnyProblem,
    target: Target,
    weights: Mapping[int, torch.Tensor],
    known: TuningDatabase | None,
    among: Sequence[Candidate] | None,
) -> Decision:
    def choose() -> Decision:
        return search(problem, target, budget_s=0, candidates=among, weights=weights)

    return choose() if known is None else known.settle(problem, weights, choose)


def _far_apart_first(ordered: Sequence[int]) -> Iterator[int]:
    """Both ends, then what lies in the middle of those that were given, again and again."""
    yield from dict.fromkeys((ordered[0], ordered[-1]))
    gaps = deque([(0, len(ordered) - 1)])
    while gaps:
        low, high = gaps.popleft()
        if high - low > 1:
            middle = (low + high) // 2
            yield ordered[middle]
            gaps += (low, middle), (middle, high)


def _crossing(times: Sequence[Mapping[str, float]], one: str, two: str) -> float:
    """The part of the way between two numbers of rows to where a family serves on, if times grow evenly between them; half of
    it, where one of them was not timed there."""
    if any(name not in t for t in times for name in (one, two)):
        return 0.5
    before, after = (t[one] - WORTH * t[two] for t in times)
    return before / (before - after) if before < 0 < after else 0.5


def _times_slower(name: str, rows: int, raced: Mapping[int, Mapping[str, float]], expected: float) -> float:
    """The ratio of a family's time to the winner's that is assumed at a number of rows where it did not race: as at the
    nearest where it did; else as expected. At least as long."""
    known = [m for m in raced if name in raced[m]]
    near = min(known, key=lambda m: abs(math.log(m / rows)), default=None)
    return max(1.0, expected if near is None else raced[near][name] / min(raced[near].values()))


def _promising(
    families: Mapping[str, PackingVariants], raced: Mapping[int, Mapping[str, float]], rows: int
) -> list[PackingVariants]:
    """The families but for those that were far slower than another at the numbers of rows next below and above."""
    near = [max((m for m in raced if m < rows), default=None), min((m for m in raced if m > rows), default=None)]
    beside = [raced[m] for m in near if m is not None]

    def slow(name: str) -> bool:
        known = [name in t for t in beside]
        return len(known) == 2 and any(known) and all(t.get(name, math.inf) > HOPELESS * min(t.values()) for t in beside)

    return [f for name, f in families.items() if not slow(name)]


def recorded(table: Buckets, key: Key, budget_s: float) -> Table:
    """A table as it is stored, measured in so many seconds."""

    def end(decision: Decision) -> End:
        return End(decision.kernel.schedule.knobs, decision.time_us)

    ranges = [
        Range(b.first, b.last, b.family.candidate.name, b.family.order, end(b.at_first), end(b.at_last)) for b in table.buckets
    ]
    measured = {rows: dict(times) for rows, times in table.measured.items()}
    return Table(key, budget_s, tuple(ranges), dict(table.packings), measured, time.time(), table.provisional)


def recalled(found: Table, problem_at: Callable[[int], Problem], target: Target) -> Buckets | None:
    """The table of what is stored, its kernels built; None if a candidate is gone, or refuses."""

    def decision(rows: int, candidate: Candidate, end: End) -> Decision:
        problem = problem_at(rows)
        kernel = kernel_of(plan_for(candidate, problem, target), Schedule(end.knobs))
        return Decision(problem, kernel, end.time_us, (), True, True, recalled=True)

    candidates = {c.name: c for c in discover()}
    try:
        buckets = [
            Bucket(
                r.first,
                r.last,
                PackingVariants.of(candidates[r.candidate], r.order),
                decision(r.first, candidates[r.candidate], r.at_first),
                decision(r.last, candidates[r.candidate], r.at_last),
            )
            for r in found.buckets
        ]
    except Exception:  # a candidate may raise anything, as in a search
        return None
    return Buckets(tuple(buckets), found.packings, found.measured, found.provisional)


def _serves(candidate: Candidate) -> bool:
    """Tell whether a candidate takes part if nobody says who does: not the reference, nor who searches for kernels itself."""
    return candidate.preference < LAST_RESORT and candidate.name != "split"


def _families(candidates: Sequence[Candidate], problem: Problem, target: Target) -> list[PackingVariants]:
    found: list[PackingVariants] = []
    for candidate in candidates:
        plan = planned(candidate, problem, target) if concerns(candidate, problem, target) else Refusal("")
        if isinstance(plan, Refusal):
            continue
        points = itertools.islice(plan.schedules(), LOOKED_AT)
        orders = list(dict.fromkeys(_order(candidate, s) for s in points))
        found += [PackingVariants.of(candidate, order) for order in orders[:FAMILIES]]
    return found


def _kept(times: Mapping[int, Mapping[str, float]], packed_bytes: Mapping[str, int]) -> list[str]:
    """The families that may serve: whoever packs nothing, and the packings that serve all best.

    Raises:
        UnsupportedError: there is a number of rows that no such choice serves.
    """
    names = list(dict.fromkeys(n for t in times.values() for n in t))
    free = [n for n in names if not packed_bytes.get(n)]
    packed = [n for n in names if packed_bytes.get(n)]

    def best(choice: Sequence[str], m: int) -> float:
        return min((times[m][n] for n in choice if n in times[m]), default=math.inf)

    def total(choice: Sequence[str]) -> float:
        return sum(math.log(best(choice, m)) for m in times)

    most_bytes = TIMES_LARGEST * max((packed_bytes[n] for n in packed), default=0)
    kept = free
    for count in range(1, MOST_PACKINGS + 1):
        fitting = [c for c in itertools.combinations(packed, count) if sum(packed_bytes[n] for n in c) <= most_bytes]
        more = min(([*free, *c] for c in fitting), key=total, default=kept)
        if count == 1 or any(best(kept, m) > WORTH * best(more, m) for m in times):
            kept = more
    missing = [m for m in times if best(kept, m) == math.inf]
    if missing:
        raise UnsupportedError(f"nothing serves {missing[0]} rows", hint="report this: a library runs any product")
    return kept


class _Race:
    """Families against each other at one number of rows after another, within a budget."""

    def __init__(self, posed_at: PosedAt, target: Target, budget_s: float, total: int, progress: Progress | None) -> None:
        self.posed_at: PosedAt = cache(posed_at)
        self._target, self._total, self._progress = target, total, progress
        self._budget, self._longest_s = Budget(budget_s), 0.0
        self._decided: dict[int, Decision] = {}
        self.measured: dict[int, dict[str, float]] = {}
        self.noise = ""

    def room(self) -> bool:
        """Tell whether one more race is likely to end in time."""
        return self._budget.left_s() > self._longest_s

    def times(self, rows: int, families: Sequence[PackingVariants]) -> Mapping[str, float]:
        """Microseconds by family; those that refuse or fail are missing."""
        if self._progress is not None:
            self._progress(len(self.measured), max(self._total, len(self.measured) + 1), f"{rows} rows")
        began = time.monotonic()
        decision = self._decided[rows] = self._search(rows, families)
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        won = self._name(decision.kernel, families)
        if decision.time_us is None:  # for want of time
            return {won: self._expected_us(decision)}
        found = {won: decision.time_us}
        for r in decision.rejected:
            if r.time_us is not None:
                found[r.candidate] = min(r.time_us, found.get(r.candidate, math.inf))
        self.measured.setdefault(rows, {}).update(found)
        return found

    def _expected_us(self, decision: Decision) -> float:
        """The time that the cost model expects of a kernel that was not timed."""
        candidate = next(c for c in discover() if c.name == decision.kernel.candidate)
        return predict(candidate, decision.problem, decision.kernel.schedule, self._target) or UNKNOWN_US

    def expected(self, rows: int, family: PackingVariants) -> float:
        """The ratio to the time of a race's winner that the cost model expects of a family that serves these rows."""
        won = self._decided.get(rows)
        if won is None:
            return UNKNOWN_TIMES
        point = next(iter(plan_for(family, won.problem, self._target).schedules()))
        expected_us = predict(family, won.problem, point, self._target)
        return UNKNOWN_TIMES if expected_us is None else expected_us / self._expected_us(won)

    def serves(self, rows: int, family: PackingVariants) -> bool:
        """Tell whether a family has a kernel for a number of rows."""
        plan = planned(family, self.posed_at(rows)[0], self._target)
        return not isinstance(plan, Refusal) and next(iter(plan.schedules()), None) is not None

    def packed_bytes(self, rows: int, family: PackingVariants) -> int:
        """The bytes of packed weight that a family takes, built for a number of rows that it serves."""
        plan = plan_for(family, self.posed_at(rows)[0], self._target)
        try:
            return plan.build(next(iter(plan.schedules()))).packed_bytes
        except Exception:
            if not family.candidate.package:
                raise
            return UNKNOWN_BYTES  # a plug-in's, which a search would refuse

    def bucket(self, first: int, last: int, family: PackingVariants) -> Bucket:
        at_first = self._alone(first, family)
        return Bucket(first, last, family, at_first, at_first if first == last else self._alone(last, family))

    def _alone(self, rows: int, family: PackingVariants) -> Decision:
        """The best of a family; what won a race, or passes its check first, where there is no time for another one."""
        won = self._decided.get(rows)
        if won is not None and not self.room() and self._name(won.kernel, [family]) == family.name:
            return won
        try:
            return self._search(rows, [family])
        except UnsupportedError:  # it has no kernel for so many rows, and there was no time to find out where it has
            return self._search(rows, [c for c in discover() if _serves(c)])

    def _search(self, rows: int, families: Sequence[Candidate]) -> Decision:
        problem, weights = self.posed_at(rows)
        cold = sum(problem.types[i].size_bytes for i in weights) > last_cache_bytes(self._target)  # as a program's are
        share_s = self._budget.left_s() / (max(self._total - len(self._decided), 0) + LATER)
        found = search(
            problem,
            self._target,
            budget_s=MEASURING * share_s,
            candidates=families,
            weights=weights,
            cold=cold,
            within_s=GENEROUS * share_s,
        )
        self.noise = self.noise or found.provisional
        return found

    @staticmethod
    def _name(kernel: Kernel, families: Sequence[PackingVariants]) -> str:
        own = (f for f in families if f.candidate.name == kernel.candidate)
        return next((f.name for f in own if f.order == _order(f.candidate, kernel.schedule)), "")
