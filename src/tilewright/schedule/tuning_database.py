"""Decisions made before, by this process or another: built anew, and neither timed nor verified again.

A record names a candidate and a point of its space. A kernel that was verified in these circumstances, of the same generated
text, is taken as it is, but for a sample (`RECHECKED`, drawn anew in each process): of what these give for random data some
elements are looked at again. A library's call has no text: its verdict rests on the numbers in the problem, too. A record that
fails its check here, or whose candidate now refuses, counts as absent.

Records from elsewhere are hints. A point that the candidate does not itself offer here is never built, and their times are not
believed. A record made in these circumstances saves the search, and its kernel alone is timed here.

A decision made while other processes kept the machine busy is provisional: it is read back like any other until a program with
time to search finds the machine quiet, which then searches anew. Not where another process made it while this program was being
compiled: processes that start at once disturb each other's races, and would each measure everything.

A candidate that crashed or hung is refused on the problem from then on, by every process in the same circumstances, with the
sentence how and the day. Only a `TuningDatabase` that says `retry` tries it again.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import torch

from tilewright.errors import UnsupportedError, say
from tilewright.hardware.load import load_now
from tilewright.hardware.target import Target
from tilewright.schedule.bench import on_device
from tilewright.schedule.cache import Cache
from tilewright.schedule.candidate import (
    Candidate,
    Kernel,
    MetaPlan,
    Refusal,
    Schedule,
    concerns,
    discover,
    kernel_of,
    narrowed,
    plan_for,
    planned,
    refusing,
)
from tilewright.schedule.choice import choice_of, rejected_of
from tilewright.schedule.key import UNMEASURED, budgets_for, circumstances, digest_of
from tilewright.schedule.measure import all_same
from tilewright.schedule.problem import AnyProblem
from tilewright.schedule.record import LONGEST, Key, Lost, Record, Table, Verdict
from tilewright.schedule.sample import random_sources
from tilewright.schedule.search import Decision, search
from tilewright.schedule.shipped import DIGITS, shipped
from tilewright.schedule.spot_check import sampled, spot_check
from tilewright.threads import count

HINT_S = 0.1  # at most, to time the kernel of a record from elsewhere
WAIT_S = 30.0  # for another process that measures the same problem; then both do
LOOKED_S = 5.0  # for which a look at the load holds
TOGETHER_S = 10.0  # between the beginnings of processes that start at once: some are there earlier than others
ORDINARY_S, ALIKE = 2.0, 0.9  # seconds for a problem beyond which decisions with as much time count alone, or almost as much
RECHECKED = 0.05  # of the kernels that are read back are verified again, unless $TILEWRIGHT_RECHECK says how many
LOOK_S = 0.02  # for further elements of a kernel's results, beside the first few
RECHECKING_S = 0.2  # after which a process verifies no more of the sample, unless it says how many
_CHANCE = secrets.token_bytes(16)  # by which the sample is drawn, another one in each process
_rechecking_s = 0.0  # that this process took to verify it


class TuningDatabase:
    """The decisions known for problems on one target, and the cache that holds them."""

    def __init__(
        self,
        target: Target,
        cache: Cache | None,
        *,
        excess_precision: bool = False,
        hints: Iterable[Record] = (),
        retry: bool = False,
        family: str = "",
        finish: bool = False,
        ranges: bool = False,
    ) -> None:
        """`hints` are records from elsewhere, of any machine; the first one of a problem counts.

        `retry`: problems of which a candidate is remembered as refused are searched anew, with it.

        `settled` then holds the record of each decision that was measured or read back, by digest of its problem. `family`
        names the part of the candidates that choices are made among; "" stands for all. `finish`: what a search of as much time
        did not come to measure is measured now. `ranges`: they are for a program with open extents, so that no candidate is
        asked whose kernels take seconds to make, anew for each shape.
        """
        self._ranges = ranges and target.kind != "cpu"
        self.family: str = family
        self._finish = finish
        self._target, self._cache, self._retry = target, cache, retry
        self._circumstances = circumstances(target, excess_precision=excess_precision)
        self._hints: dict[str, Record] = {}
        for record in hints:
            self._hints.setdefault(record.key.problem, record)
        self._digests: dict[AnyProblem, str] = {}
        self.settled: dict[str, Record] = {}
        self._looked, self._seen_quiet = -math.inf, False
        self._began = time.time()

    def of_program(self, *, cold: bool) -> None:
        """Take problems from now on as those of a program whose weights come from memory (`cold`), or are found in a cache."""
        self._circumstances = msgspec.structs.replace(self._circumstances, cold=cold)
        self._began = time.time()

    def of_family(self, name: str) -> TuningDatabase:
        """The same for choices among a part of the candidates."""
        made = copy.copy(self)
        made.family = name
        return made

    def known(self, problem: AnyProblem, budget_s: float) -> bool:
        """Tell whether a record may save the search of a problem."""
        return any(True for _ in self._records(problem, budget_s))

    def find(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor], budget_s: float) -> Decision | None:
        """The decision of a search of `budget_s` or more in the same circumstances, if it still holds."""
        refused = {r.candidate for r in self._lost(problem)} | (
            {c.name for c in discover() if c.slow} if self._ranges else set()
        )
        guesses: list[tuple[str, Schedule]] = []
        for record, foreign, text in self._records(problem, budget_s):
            if record.candidate in refused:
                continue
            schedule = Schedule(record.knobs)
            if foreign:
                tried = self._tried(record, schedule, problem, weights, min(budget_s, HINT_S))
                if tried is not None:
                    return tried
                continue
            decision = self.again(problem, record.candidate, schedule, weights, text=text)
            if decision is None:
                guesses += [(record.candidate, schedule)] if text is not None and budget_s <= 0 else []
                continue
            us, losers, noise = record.time_us, rejected_of(record), record.provisional
            measured = us is not None
            decision = replace(decision, time_us=us, rejected=losers, measured=measured, recalled=measured, provisional=noise)
            if text is not None and self._cache is not None:  # it holds for this version of the code, and is built here
                self._cache.put(record)
            if measured:
                self.settled[record.key.problem] = record
            return decision
        return next(filter(None, (self._guessed(problem, *guess, weights) for guess in guesses)), None)

    def _guessed(
        self, problem: AnyProblem, candidate: str, schedule: Schedule, weights: Mapping[int, torch.Tensor]
    ) -> Decision | None:
        """A point that was measured when its kernel was generated as another text, for those who measure nothing: it is nearer
        to the fastest than what a search without a budget tries first. It counts as not measured."""
        offers = offered(problem, self._target, candidate, schedule)
        decision = self.again(problem, candidate, schedule, weights) if offers else None
        if decision is not None:
            self.keep(decision, 0)
        return decision

    def noted(self, problem: AnyProblem, budget_s: float) -> Record | None:
        """The record of a search of `budget_s` or more in the same circumstances, for one who builds and checks the kernel
        himself; None if nothing is known."""
        return next((r for r, foreign, _ in self._records(problem, budget_s) if not foreign), None)

    def to_build(self, problems: Iterable[AnyProblem]) -> list[tuple[AnyProblem, str, Schedule]]:
        """The points that came with the package, of problems that have nothing of their own yet."""
        firsts = [(p, next(iter(self._records(p, 0)), None)) for p in problems]
        return [(p, f[0].candidate, Schedule(f[0].knobs)) for p, f in firsts if f is not None and f[2] is not None]

    def again(
        self,
        problem: AnyProblem,
        candidate: str,
        schedule: Schedule,
        weights: Mapping[int, torch.Tensor],
        *,
        text: str | None = None,
        among: Sequence[Candidate] | None = None,
    ) -> Decision | None:
        """One point of one candidate, built, and verified if it was not before; None if it does not do here, or if `text` is
        given and the digest of what its kernel is generated as does not begin with that. `among` are all candidates that are
        found by default."""
        candidates = discover() if among is None else among
        kernel, digest, known, began = None, None, False, time.perf_counter()
        try:
            (found,) = [c for c in candidates if c.name == candidate and concerns(c, problem, self._target)]
            kernel = kernel_of(plan_for(found, problem, self._target), schedule)
            if text is not None and kernel.text[:DIGITS] != text:
                return None
            digest = self._verdict(problem, kernel).digest()
            known = self._cache is not None and self._cache.verdict(digest) is not None
            if known and not _drawn(digest):
                return Decision(problem, kernel, None, (), False, True, checked_s=time.perf_counter() - began)
        except Exception:  # a candidate may raise anything: the search says what it is
            if text is not None:
                return None
        right = _looked_at(problem, kernel, self._target, weights) if known and kernel is not None else None
        if kernel is None or right is None:
            decision = repeat(problem, self._target, candidate, schedule, weights, among=candidates)
        else:
            took_s = time.perf_counter() - began
            decision = Decision(problem, kernel, None, (), False, True, checked_s=took_s) if right else None
        if known:
            global _rechecking_s
            _rechecking_s += time.perf_counter() - began
        if decision is not None:
            self.vouch(decision)
        elif known and digest is not None and self._cache is not None:
            self._cache.withdraw(digest)
            say(f"{candidate} passed its check on {problem} before and fails it now: another kernel is chosen")
        return decision

    def vouched(self, problem: AnyProblem, kernel: Kernel) -> bool:
        """Tell whether a kernel was verified before, and is not one of the sample that is verified again."""
        digest = self._verdict(problem, kernel).digest()
        return self._cache is not None and self._cache.verdict(digest) is not None and not _drawn(digest)

    def vouch(self, decision: Decision) -> None:
        """Remember that a decision's kernel was verified."""
        if self._cache is not None and decision.verified:
            self._cache.vouch(self._verdict(decision.problem, decision.kernel))

    def _verdict(self, problem: AnyProblem, kernel: Kernel) -> Verdict:
        """The verdict on a kernel that was verified. Numbers in the problem count where the kernel's text does not tell all."""
        called = not kernel.text or bool(kernel.parts)
        key = msgspec.structs.replace(self._any_budget(problem), family="")
        if called:
            key = msgspec.structs.replace(key, problem=digest_of(problem, numbers=True))
        return Verdict(key, kernel.candidate, kernel.schedule.knobs, kernel.text, time.time())

    def _tried(
        self, record: Record, schedule: Schedule, problem: AnyProblem, weights: Mapping[int, torch.Tensor], budget_s: float
    ) -> Decision | None:
        """The decision that a record from elsewhere names, timed here if there is time, and then kept as our own."""
        if not offered(problem, self._target, record.candidate, schedule):
            return None
        cold = self._circumstances.cold
        decision = repeat(problem, self._target, record.candidate, schedule, weights, budget_s=budget_s, cold=cold)
        if decision is None:
            return None
        self.vouch(decision)
        if decision.time_us is not None:
            self._settle(record.key, replace(decision, rejected=()))
        return replace(decision, rejected=(), recalled=True)

    def _settle(self, key: Key, decision: Decision, *, asked_s: float = 0.0) -> None:
        """Keep a decision."""
        record = choice_of(decision, Record, key=key, problem=str(decision.problem), made_s=time.time())
        if record.time_us is not None:
            record = self.settled[key.problem] = msgspec.structs.replace(record, asked_s=asked_s)
        elif self._cache is not None:
            before = self._cache.get(key)
            record = msgspec.structs.replace(record, asked_s=max(asked_s, 0.0 if before is None else before.asked_s))
        if self._cache is not None:
            self._cache.put(record)

    def candidates(self, problem: AnyProblem) -> Sequence[Candidate] | None:
        """The candidates that compete: None for all as they are; or all, with the point that a hint names tried first, and
        those that did not come back replaced by their refusals."""
        hint = self._hints.get(self._key(problem, 0).problem)
        refused = {} if self._retry else {r.candidate: _sentence(r) for r in self._lost(problem)}
        if hint is None and not refused and not self._ranges:
            return None
        found: list[Candidate] = []
        for c in discover():
            if c.slow and self._ranges:
                found.append(refusing(c, "its kernels would take seconds to make for each shape"))
            elif c.name in refused:
                found.append(refusing(c, refused[c.name]))
            else:
                found.append(_hinted(c, Schedule(hint.knobs)) if hint is not None and c.name == hint.candidate else c)
        return found

    def settle(
        self,
        problem: AnyProblem,
        weights: Mapping[int, torch.Tensor],
        choose: Callable[[], Decision],
        *,
        asked_s: float = 0.0,
        within_s: float = WAIT_S,
    ) -> Decision:
        """The decision that is known, or that another process comes to within so many seconds; else that of `choose`, which
        measures nothing, and is kept; for those, too, that have `asked_s` for the problem, if that much was meant for it."""
        found = self.find(problem, weights, 0)
        if found is not None:
            return found
        with self.alone(problem, 0, within_s) as first:
            found = None if first else self.find(problem, weights, 0)
            if found is not None:
                return found
            decision = choose()
            self.keep(decision, asked_s)
        return decision

    def lost(self, problem: AnyProblem, candidate: str, why: str) -> None:
        """Remember that a candidate did not come back from a problem."""
        if self._cache is not None:
            self._cache.keep_lost(Lost(self._any_budget(problem), str(problem), candidate, why[:LONGEST], time.time()))

    def alone(self, problem: AnyProblem, budget_s: float, within_s: float = WAIT_S) -> AbstractContextManager[bool]:
        """A context in which other processes wait for the decision on the problem, as this one does: for so many seconds, and
        for `WAIT_S` at most."""
        if self._cache is None:
            return contextlib.nullcontext(False)
        return self._cache.alone(self._key(problem, budget_s), min(within_s, WAIT_S))

    def keep(self, decision: Decision, budget_s: float) -> None:
        """Record what a search of `budget_s` decided. Where it measured nothing, that serves those who are to measure nothing,
        and those that have no more time."""
        measured = decision.measured and decision.time_us is not None
        self._settle(self._key(decision.problem, budget_s if measured else 0), decision, asked_s=budget_s)
        self.vouch(decision)
        if self._cache is not None and self._retry:
            lost = {r.candidate for r in decision.rejected if r.kind == "lost"}
            for known in self._lost(decision.problem):
                if known.candidate not in lost:
                    self._cache.evict_lost(known)

    def key_of_rows(self, first: int, last: int, ends: Sequence[AnyProblem]) -> Key:
        """The key of a table from `first` to `last` rows, given the problems there."""
        said = "\0".join([f"{first} {last}", *map(digest_of, ends)])
        return msgspec.structs.replace(self._circumstances, problem=hashlib.sha256(said.encode()).hexdigest())

    def rows(self, key: Key, budget_s: float) -> Table | None:
        """The table that was measured in so many seconds or more."""
        found = None if self._cache is None else self._cache.table(key)
        if found is None or found.budget_s < budget_s or (budget_s > 0 and self._again(found)):
            return None
        return found

    def keep_rows(self, table: Table) -> None:
        """Keep a table, unless a better one is there: measured in quiet, or else in more time."""
        if self._cache is None:
            return
        found = self._cache.table(table.key)
        if found is None or (not found.provisional, found.budget_s) < (not table.provisional, table.budget_s):
            self._cache.put_table(table)

    def alone_with_rows(self, key: Key, budget_s: float) -> AbstractContextManager[bool]:
        """A context in which other processes wait for a table, for as long as it may be measured and `WAIT_S` seconds more."""
        if self._cache is None:
            return contextlib.nullcontext(False)
        return self._cache.alone(key, budget_s + WAIT_S, lambda: self.rows(key, budget_s) is not None)

    def standing(self, problems: Iterable[str]) -> str:
        """A digest of all that is kept on problems, given the digests of their texts: what is chosen for them without a search
        depends on nothing else."""
        said = hashlib.sha256(msgspec.json.encode(self._circumstances))
        for problem in sorted(problems):
            if self._cache is None:
                break
            key = msgspec.structs.replace(self._circumstances, problem=problem)
            found = self._kept(key)
            lost = self._cache.lost(msgspec.structs.replace(key, cold=False))
            said.update(msgspec.json.encode([r and msgspec.structs.replace(r, made_s=0.0) for r in found]))
            said.update(msgspec.json.encode(sorted((r.candidate, r.why) for r in lost)))
        return said.hexdigest()

    def holds(self, decision: Decision) -> bool:
        """Tell whether a decision is one of those that are kept."""
        kernel, found = decision.kernel, self._kept(self._key(decision.problem, 0))
        return any(r is not None and (r.candidate, r.knobs) == (kernel.candidate, kernel.schedule.knobs) for r in found)

    def _kept(self, key: Key) -> list[Record | None]:
        """The records in the cache for those who measure nothing (`_records`), given a key of any budget."""
        if self._cache is None:
            return []
        names = [name for name in budgets_for(0) if name != UNMEASURED]
        places = [*itertools.product((key.cold, not key.cold), names), (key.cold, UNMEASURED)]
        return [self._cache.get(msgspec.structs.replace(key, cold=cold, budget=name)) for cold, name in places]

    def quiet(self) -> bool:
        """Tell whether times taken now would be reliable; what was said holds for some seconds."""
        return self._quiet()

    def _any_budget(self, problem: AnyProblem) -> Key:
        """The key with all that depends on the search's time or on where weights were left out."""
        return msgspec.structs.replace(self._key(problem, 0), budget="", cold=False, family="")

    def _lost(self, problem: AnyProblem) -> list[Lost]:
        return [] if self._cache is None else self._cache.lost(self._any_budget(problem))

    def _key(self, problem: AnyProblem, budget_s: float) -> Key:
        if problem not in self._digests:
            self._digests[problem] = digest_of(problem)
        name, digest = budgets_for(budget_s)[-1], self._digests[problem]
        return msgspec.structs.replace(self._circumstances, budget=name, problem=digest, family=self.family)

    def key_of(self, problem: AnyProblem, budget_s: float) -> Key:
        """The key of a problem that is searched with so many seconds, weights lying as `of_program` says."""
        return self._key(problem, budget_s)

    def _shipped(
        self, problem: AnyProblem, key: Key, names: Sequence[str], colds: Sequence[bool]
    ) -> Iterator[tuple[Record, bool, str]]:
        """Those that came with the package, as records, with their texts; none where candidates take part that they did not
        meet."""
        if self.family or any(c.package for c in discover(kind=self._target.kind)):
            return
        found = shipped(key)
        for cold, name in itertools.product(colds, names):
            d = found.get((key.problem[:DIGITS], cold, name))
            if d is not None:
                own = msgspec.structs.replace(key, budget=name, cold=cold)
                now, text = time.time(), str(problem)
                yield Record(d.candidate, d.knobs, d.time_us, (), key=own, problem=text, made_s=now), False, d.text

    def _records(self, problem: AnyProblem, budget_s: float) -> Iterator[tuple[Record, bool, str | None]]:
        """Those that hold in these circumstances, whether they came from elsewhere, and the digest of the text for which alone
        they hold, if there is one."""
        key = self._key(problem, budget_s)
        if self._retry and self._lost(problem):
            return
        hint = self._hints.get(key.problem)
        names = [name for name in budgets_for(budget_s) if name != UNMEASURED]
        # Where nothing is measured, it does not count where weights were.
        colds = (key.cold,) if budget_s > 0 else (key.cold, not key.cold)
        for cold, name in itertools.product(colds, names):
            wanted = msgspec.structs.replace(key, budget=name, cold=cold)
            if self._cache is not None and (found := self._cache.get(wanted)) is not None:
                if budget_s > 0 and self._again(found):
                    continue
                if budget_s > ORDINARY_S and found.asked_s < ALIKE * budget_s:  # somebody asks for more
                    continue
                yield found, False, None
            if hint is not None and hint.key == wanted:
                yield hint, True, None
        own = None
        if self._cache is not None and (budget_s <= 0 or not self._finish):
            own = self._cache.get(msgspec.structs.replace(key, budget=UNMEASURED))
        if own is not None and budget_s <= 0:  # which was made in view of what came with the package
            yield own, False, None
        yield from self._shipped(problem, key, names, colds)
        if own is not None and 0 < budget_s <= own.asked_s:
            yield own, False, None

    def _again(self, found: Record | Table) -> bool:
        """Tell whether what was measured in noise, before this program began to be compiled, can be measured in quiet now."""
        return bool(found.provisional) and found.made_s < self._began - TOGETHER_S and self._quiet()

    def _quiet(self) -> bool:
        """Tell whether times taken now would be reliable."""
        now = time.monotonic()
        if now > self._looked + LOOKED_S:
            self._looked = now
            self._seen_quiet = not load_now(self._target.device, count()).noise
        return self._seen_quiet


def repeat(
    problem: AnyProblem,
    target: Target,
    candidate: str,
    schedule: Schedule,
    weights: Mapping[int, torch.Tensor],
    *,
    budget_s: float = 0,
    cold: bool = False,
    among: Sequence[Candidate] | None = None,
) -> Decision | None:
    """One point of one candidate, built and verified, and timed if there is a budget; None if it does not do here."""
    found = [narrowed(c, lambda plan: (schedule,)) for c in (discover() if among is None else among) if c.name == candidate]
    try:
        return search(problem, target, budget_s=budget_s, candidates=found, weights=weights, cold=cold)
    except UnsupportedError:
        return None


def _looked_at(problem: AnyProblem, kernel: Kernel, target: Target, weights: Mapping[int, torch.Tensor]) -> bool | None:
    """Tell whether some elements of what a kernel gives for random data are right; None if they cannot be worked out by
    themselves. In a new process that takes milliseconds, where the right results of a whole problem, worked out on a GPU, take
    a second."""
    if not sampled(problem):
        return None
    held = {i: t for i, t in weights.items() if problem.weights[i]}
    try:
        made = on_device(problem, target, lambda: random_sources(problem, given=held)) or random_sources(problem, given=held)
        there = [held[i].to(target.device) if i in held else t.to(target.device, copy=True) for i, t in enumerate(made)]
        drawn = [t.cpu() for t in made]
    except Exception:  # as in a search: such data cannot be made, or there is no room for them
        return None
    try:
        given = kernel.prepare({i: t for i, t in enumerate(there) if problem.weights[i]})(there)
        results = [t.cpu() for t in given]
        after = [t if i in held else there[i].cpu() for i, t in enumerate(drawn)]
    except Exception:  # a kernel may raise anything
        return False
    types = [(t.shape, t.dtype.to_torch()) for t in problem.outputs]
    if [(tuple(t.shape), t.dtype) for t in results] != types or not all_same(drawn, after):
        return False
    try:
        why, _ = spot_check(problem, drawn, dict(enumerate(results)), LOOK_S, kernel.roundoff)
    except Exception:  # which says nothing of the kernel
        return None
    return why is None


def rebuilt(problem: AnyProblem, target: Target, candidate: str, schedule: Schedule) -> Decision | None:
    """One point of one candidate, built and not checked: one for a problem that differs in numbers alone was. None if it cannot
    be built, or is built otherwise."""
    try:
        found = next(c for c in discover() if c.name == candidate)
        kernel = kernel_of(plan_for(found, problem, target), schedule)
    except Exception:  # a candidate may raise anything, as in a search
        return None
    return Decision(problem, kernel, None, (), False, True) if kernel.schedule == schedule else None


def offered(problem: AnyProblem, target: Target, candidate: str, schedule: Schedule) -> bool:
    """Tell whether a point is one of the candidate's own."""
    try:
        able = [c for c in discover() if c.name == candidate and concerns(c, problem, target)]
        plans = [p for c in able if not isinstance(p := planned(c, problem, target), Refusal)]
        return any(schedule in p.schedules() or (isinstance(p, MetaPlan) and p.offers(schedule)) for p in plans)
    except Exception:  # a candidate may raise anything, as in a search
        return False


def _sentence(lost: Lost) -> str:
    when = datetime.fromtimestamp(lost.made_s, UTC).date()
    return f"{lost.why}, on {when}; not tried again unless `tilewright tune --retry` asks for it"


def _drawn(digest: bytes) -> bool:
    """Tell whether a kernel is one of the sample that is verified again."""
    try:
        share = float(os.environ.get("TILEWRIGHT_RECHECK", RECHECKED if _rechecking_s < RECHECKING_S else 0.0))
    except ValueError:
        share = 1.0
    return int.from_bytes(hashlib.sha256(_CHANCE + digest).digest()[:4]) < share * 2**32


def _hinted(candidate: Candidate, schedule: Schedule) -> Candidate:
    """A candidate with one of its points first; a point that it does not offer is none."""
    return narrowed(candidate, lambda plan: sorted(plan.schedules(), key=lambda s: s != schedule))
