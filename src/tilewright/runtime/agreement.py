"""Kernels that all ranks of a job agree on: problems of one rank alone are dealt out and searched at the same time, those with
operations between ranks are verified and timed by all together, and rank 0 alone keeps what was found.

Whoever searched a problem tells the others which point won. They build it, and verify it with weights of their own; where it
fails on one rank, all take the next best. So all ranks run the same kernels.
"""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast

import msgspec
import torch

from tilewright.deadline import Budget
from tilewright.errors import PeerError, say
from tilewright.hardware.ceilings import cache_folder
from tilewright.hardware.target import Target
from tilewright.ir.graph import Graph, Node, attributes, toposort
from tilewright.ir.literal import bits_of
from tilewright.ir.ops import Const
from tilewright.progress import Progress
from tilewright.runtime.steps import Posed
from tilewright.runtime.team import ProcessTeam
from tilewright.schedule.ahead import compile_ahead
from tilewright.schedule.bench import failure
from tilewright.schedule.budget import LONGEST_S, BudgetedChooser, ordinary
from tilewright.schedule.candidate import (
    LAST_RESORT,
    Candidate,
    Kernel,
    Precompiled,
    Refusal,
    Runner,
    Schedule,
    concerns,
    discover,
    kernel_of,
    planned,
)
from tilewright.schedule.capture import CudaGraphs
from tilewright.schedule.choice import choice_of, rejected_of
from tilewright.schedule.cost import least_us
from tilewright.schedule.expected import Expected, check, expect_on_mesh
from tilewright.schedule.guard import guarded, intact, poison
from tilewright.schedule.key import circumstances, text_of
from tilewright.schedule.measure import all_same, last_cache_bytes, other_data, synchronize
from tilewright.schedule.problem import AnyProblem, collectives_of
from tilewright.schedule.record import Choice
from tilewright.schedule.sample import random_sources
from tilewright.schedule.search import Decision, Rejected, by_reference
from tilewright.schedule.tuning_database import TuningDatabase, rebuilt, repeat


class BetweenPlan(Protocol):
    """A plan for a problem with operations between ranks, of pieces that are problems of one rank alone."""

    def pieces_with(self, weights: Mapping[int, torch.Tensor]) -> list[tuple[AnyProblem, dict[int, torch.Tensor]]]:
        """The pieces, each with its constant sources at hand by index."""
        ...

    def schedules(self) -> Sequence[Schedule]:
        """The points, but for those of the pieces."""
        ...

    def of_pieces(self, schedule: Schedule, chosen: Sequence[tuple[str, Schedule]]) -> Schedule:
        """A point with candidate and point of each piece."""
        ...

    def build(self, schedule: Schedule) -> Kernel:
        """A kernel for one point."""
        ...


SEARCHING = 0.7  # of the time, for problems of one rank alone
AHEAD = 0.6  # of what is left for a problem with operations between ranks, for compiling
MOST_AHEAD = 32  # points of one that are compiled ahead
PLAIN = "sequential"  # the candidate that communicates and multiplies one after the other
GRAPHED = 16  # calls in a CUDA graph that is timed: ranks begin it some 50 µs apart
TIMING_S = 0.2  # for timing one point of a problem that all ranks take part in
LEAST, MOST = 3, 30  # calls of it
LATE_S = 0.005  # that one rank, drawn by lot, comes late to a call that is checked
MOST_OTHERS = 4  # points that are tried where the best one fails on a rank


class Chosen(Choice, frozen=True, kw_only=True):
    """A decision as ranks tell each other: names and numbers, from which each builds its own kernel."""

    recalled: bool

    def others(self) -> list[tuple[str, Schedule]]:
        """The points that were slower, the fastest first."""
        timed = sorted((r.time_us, r.candidate, r.knobs) for r in self.rejected if r.time_us is not None)
        return [(name, Schedule(knobs)) for _, name, knobs in timed]

    def told(self, d: Decision) -> Decision:
        """A decision for the same point, with what its search found."""
        us, losers, noise = self.time_us, rejected_of(self), self.provisional
        measured = us is not None
        return replace(
            d, time_us=us, rejected=losers, measured=measured, recalled=self.recalled, verified=True, provisional=noise
        )


@dataclass
class _Local:
    """A problem of one rank alone: its constant sources at hand, how many steps pose it, and its text."""

    problem: AnyProblem
    weights: Mapping[int, torch.Tensor]
    count: int
    text: str


class Agreed:
    """A choice of kernels that all ranks make together, one for each distinct problem."""

    def __init__(
        self,
        team: ProcessTeam,
        target: Target,
        budget: Budget,
        progress: Progress | None = None,
        database: TuningDatabase | None = None,
        together: TuningDatabase | None = None,
    ) -> None:
        """`database`, for problems of one rank alone, and `together`, for the others, are rank 0's."""
        self._together = together
        if together is not None:
            together.of_program(cold=False)
        self._team, self._target, self._budget, self._progress, self._database = team, target, budget, progress, database
        self._measures = budget.seconds > 0
        self._chosen: dict[AnyProblem, Decision] = {}
        self._between_left = 1  # problems with operations between ranks that are not chosen yet

    def __call__(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
        return self._chosen[problem]

    def deal(self, posed: Sequence[Posed]) -> None:
        """Choose for all problems of a program. Every rank calls it with the same ones, in the same order."""
        # Clocks differ: what rank 0 does, all do.
        self._measures = self._team.peers.gathered(self._measures, bool, "the time there is")[0]
        steps = Counter(p.problem for p in posed)
        given = {p.problem: p.weights for p in reversed(posed)}
        between = {p: self._plans(p) for p in dict.fromkeys(p.problem for p in posed) if collectives_of(p)}
        local: dict[AnyProblem, _Local] = {}

        def add(problem: AnyProblem, weights: Mapping[int, torch.Tensor], count: int) -> None:
            one = local.setdefault(problem, _Local(problem, weights, 0, text_of(problem)))
            one.count += count

        for problem in dict.fromkeys(p.problem for p in posed):
            if problem not in between:
                add(problem, given[problem], steps[problem])
            for plan in between.get(problem, {}).values():
                for piece, held in plan.pieces_with(given[problem]):
                    add(piece, held, steps[problem])
        self._choose_local(list(local.values()))
        for n, (problem, plans) in enumerate(between.items()):
            self._between_left = len(between) - n
            self._chosen[problem] = self._choose_between(problem, plans)
        said = [(d.kernel.candidate, d.kernel.schedule.knobs) for p in posed for d in [self._chosen[p.problem]]]
        self._team.peers.agree({"the kernels chosen": digest(msgspec.json.encode(said))}, "the choice of kernels")

    def _plans(self, problem: AnyProblem) -> dict[Candidate, BetweenPlan]:
        """The plans of candidates for a problem with operations between ranks, but for the reference."""
        able = [c for c in discover(kind=self._target.kind) if c.preference < LAST_RESORT]
        found = {c: planned(c, problem, self._target) for c in able if concerns(c, problem, self._target)}
        return {c: cast("BetweenPlan", p) for c, p in found.items() if not isinstance(p, Refusal)}

    def _choose_local(self, local: Sequence[_Local]) -> None:
        """Search this rank's share, and take the others' choices for the rest."""
        peers, own = self._team.peers, self._team.rank
        mine = self._dealt(local)
        share = [one for one, r in zip(local, mine, strict=True) if r == own]
        found: dict[int, Chosen] = {}
        if share:
            size = sum(t.nbytes for one in local for t in one.weights.values())
            cold = size > last_cache_bytes(self._target)
            within = self._budget.part(SEARCHING * self._budget.left_s())
            shared = BudgetedChooser(
                {one.problem: one.count for one in share},
                self._target,
                within,
                cold=cold,
                progress=self._progress,
                database=self._database,
            )
            for one in sorted(share, key=lambda one: -shared.weight(one.problem)):
                self._chosen[one.problem] = shared(one.problem, one.weights)
            own_ones = {i: self._chosen[one.problem] for i, one in enumerate(local) if mine[i] == own}
            found = {i: choice_of(d, Chosen, recalled=d.recalled) for i, d in own_ones.items()}
        told = peers.gathered(found, dict[int, Chosen], "the kernels that others searched")
        chosen = {i: c for by_rank in told for i, c in by_rank.items()}
        points = {i: [(c.candidate, Schedule(c.knobs)), *c.others()[:MOST_OTHERS]] for i, c in chosen.items()}
        failing, attempt = [i for i in range(len(local)) if mine[i] != own], 0
        here = [i for i in range(len(local)) if mine[i] == own]
        while True:
            bad = [i for i in failing if not self._take(local, i, points[i], attempt)]
            bad = sorted({i for by_rank in peers.gathered(bad, list[int], "the check of kernels") for i in by_rank})
            for i in {*failing, *here} - {*bad}:
                if attempt == 0:
                    self._chosen[local[i].problem] = chosen[i].told(self._chosen[local[i].problem])
                if attempt == 0 and self._database is not None and mine[i] != own:
                    self._database.keep(self._chosen[local[i].problem], self._accepted_s(len(local)))
            if not bad:
                return
            for i in bad:
                say(f"{points[i][min(attempt, len(points[i]) - 1)][0]} fails on a rank: {local[i].problem}; all take another")
            failing, here, attempt = bad, [], attempt + 1

    def _take(self, local: Sequence[_Local], i: int, points: Sequence[tuple[str, Schedule]], attempt: int) -> bool:
        """Build and verify a point here; behind the last one the reference, which passes. Tell whether it does."""
        one, target = local[i], self._target
        if attempt >= len(points):
            self._chosen[one.problem] = by_reference(one.problem, target)
            return True
        name, schedule = points[attempt]
        alike = any(o.text == one.text and o.problem in self._chosen for o in local[:i])
        if alike and ordinary(one.problem):
            found = rebuilt(one.problem, target, name, schedule)
        else:
            found = repeat(one.problem, target, name, schedule, one.weights)
        if found is not None:
            self._chosen[one.problem] = found
        return found is not None

    def _accepted_s(self, count: int) -> float:
        """The seconds that a search of a problem counts as."""
        return min(self._budget.seconds * self._team.mesh.size / max(count, 1), LONGEST_S)

    def _dealt(self, local: Sequence[_Local]) -> list[int]:
        """The rank that searches each problem, as rank 0 says: it takes those that it knows, and the others go to whoever has
        least to do, the heaviest first. Problems that differ in numbers alone go together."""
        said: list[int] = []
        if self._team.rank == 0:
            heavy: dict[str, float] = {}
            for one in local:
                heavy[one.text] = heavy.get(one.text, 0.0) + one.count * least_us(one.problem, self._target)
            accepted_s, database = self._accepted_s(len(heavy)), self._database
            known = {o.text for o in local if database is not None and database.known(o.problem, accepted_s)}
            loads = dict.fromkeys(reversed(range(self._team.mesh.size)), 0.0)
            by_text = dict.fromkeys(known, 0)
            for text in sorted(heavy.keys() - known, key=lambda t: (-heavy[t], t)):
                by_text[text] = min(loads, key=lambda r: loads[r])
                loads[by_text[text]] += max(heavy[text], 1.0)
            said = [by_text[one.text] for one in local]
        return self._team.peers.gathered(said, list[int], "the problems dealt out")[0]

    def _choose_between(self, problem: AnyProblem, plans: Mapping[Candidate, BetweenPlan]) -> Decision:
        """The fastest point of a problem with operations between ranks that gives the right results on all of them."""
        checked = self._drawn(problem)
        found = self._recalled(problem, plans, checked)
        if found is not None:
            return found
        found = self._searched(problem, plans, checked)
        if self._together is not None and found.kernel.candidate in {c.name for c in plans}:
            whole = not any(r.kind == "untried" for r in found.rejected)
            self._together.keep(found, self._together_s() if whole else 0.0)  # the next compile goes on
        return found

    def _together_s(self) -> float:
        return TIMING_S if self._measures else 0.0

    def _recalled(
        self, problem: AnyProblem, plans: Mapping[Candidate, BetweenPlan], checked: _Checked | None
    ) -> Decision | None:
        """The decision that rank 0 knows for a problem that all take part in, if it still passes on all ranks."""
        noted = None if self._together is None else self._together.noted(problem, self._together_s())
        record = None
        if noted is not None:
            record = Chosen(noted.candidate, noted.knobs, noted.time_us, noted.rejected, noted.provisional, recalled=True)
        said = self._team.peers.gathered(record, Chosen | None, "what is known of a problem")[0]  # type: ignore[arg-type]
        plan = None if said is None else next((p for c, p in plans.items() if c.name == said.candidate), None)
        if said is None or plan is None:
            return None
        kernel, runner, why = self._built(plan, Schedule(said.knobs), checked)
        # Also where it cannot be checked here: the others build it, and are to hear so.
        if self._verdict(why, partial(self._examined, problem, checked, kernel, runner)) or kernel is None:
            return None
        return said.told(Decision(problem, kernel, None, (), False, True))

    def _built(
        self, plan: BetweenPlan, schedule: Schedule, checked: _Checked | None
    ) -> tuple[Kernel | None, Runner | None, str]:
        """A point's kernel and runner, or why there is none. Where one rank has no kernel, none prepares its own: then ranks
        may agree on memory that they share, which takes all of them."""
        kernel, why = None, ""
        if checked is None:
            why = "its results cannot be checked"
        else:
            try:
                kernel = kernel_of(plan, schedule)
                checked.expected_of(kernel.roundoff)
            except Exception as error:  # a candidate may raise anything
                why = failure("failed to build", error)
        if any(self._team.peers.gathered(why, str, "the kernels compiled")) or kernel is None or checked is None:
            return None, None, why
        try:
            return kernel, kernel.prepare(checked.weights), ""
        except PeerError:
            raise
        except Exception as error:
            return None, None, failure("failed to build", error)

    def _searched(self, problem: AnyProblem, plans: Mapping[Candidate, BetweenPlan], checked: _Checked | None) -> Decision:
        rejected: list[Rejected] = []
        passed: list[Decision] = []
        points = self._points(plans)
        until = time.monotonic() + self._share_s()
        self._compile_ahead(problem, points, until)
        for n, (candidate, plan, schedule) in enumerate(points):
            if passed and self._agreed(not self._measures or time.monotonic() > until):
                why = "not tried: the time was over" if self._measures else "not tried: nothing is measured"
                rejected += [Rejected(c.name, "untried", why, s) for c, _, s in points[n:]]
                break
            if self._progress is not None:
                self._progress(n, len(points), f"ways between ranks: {candidate.name}")
            began = time.perf_counter()
            kernel, runner, why = self._built(plan, schedule, checked)
            why = self._verdict(why, partial(self._examined, problem, checked, kernel, runner))
            if why or kernel is None or runner is None or checked is None:
                rejected.append(Rejected(candidate.name, "wrong", why, schedule))
                continue
            us = self._timed(runner, checked.sources) if self._measures else None
            took_s = time.perf_counter() - began
            passed.append(Decision(problem, kernel, us, (), us is not None, True, checked_s=took_s))
        if not passed:
            return replace(by_reference(problem, self._target), rejected=tuple(rejected), verified=checked is not None)
        best, *others = sorted(passed, key=lambda d: d.time_us or 0.0)
        for d in others:
            ratio = (d.time_us or 0.0) / (best.time_us or 1.0)
            why = f"slower: {d.time_us:,.1f} µs on the slowest rank, {ratio:.2f} times the winner"
            rejected.append(Rejected(d.kernel.candidate, "slower", why, d.kernel.schedule, d.time_us))
        return replace(best, rejected=tuple(rejected))

    def _points(self, plans: Mapping[Candidate, BetweenPlan]) -> list[tuple[Candidate, BetweenPlan, Schedule]]:
        """The points of all candidates in the order in which they are tried. Where they are timed, the plain way comes first,
        than which nothing may be slower; then the best guess of each candidate, the next ones of each, and so on."""
        found: list[tuple[tuple[bool, int], Candidate, BetweenPlan, Schedule]] = []
        for candidate, plan in plans.items():
            pieces = [(k.candidate, k.schedule) for k in (self._chosen[p].kernel for p, _ in plan.pieces_with({}))]
            for at, point in enumerate(plan.schedules()):
                order = (candidate.name != PLAIN or at > 0, at) if self._measures else (False, 0)
                found.append((order, candidate, plan, plan.of_pieces(point, pieces)))
        return [(candidate, plan, schedule) for _, candidate, plan, schedule in sorted(found, key=lambda one: one[0])]

    def _share_s(self) -> float:
        """The seconds for a problem with operations between ranks: what is left is shared out among those not chosen yet."""
        return self._budget.left_s() / max(1, self._between_left)

    def _agreed(self, what: bool) -> bool:
        """The answer of rank 0, since clocks differ."""
        return self._team.peers.gathered(what, bool, "whether there is time")[0]

    def _compile_ahead(
        self, problem: AnyProblem, points: Sequence[tuple[Candidate, BetweenPlan, Schedule]], until: float
    ) -> None:
        """Have other processes make the machine code of points, each rank that of its share. Ranks of one host have one cache
        of it."""
        if not self._measures or self._target.kind != "cuda":
            return
        able = [(problem, c.name, s) for c, plan, s in points if isinstance(plan, Precompiled)][:MOST_AHEAD]
        own = able[self._team.rank :: self._team.mesh.size]
        if own:
            compile_ahead((), self._target, chosen=own, within_s=AHEAD * max(0.0, until - time.monotonic()))
        self._team.peers.gathered(0, int, "the kernels compiled ahead")

    def _drawn(self, problem: AnyProblem) -> _Checked | None:
        """Random data of this rank and what it must give there, worked out without the others; None where it cannot be."""
        seed, constants = 17, [i for i, weight in enumerate(problem.weights) if weight]

        def draw(rank: int) -> list[torch.Tensor]:
            return random_sources(problem, seed=seed + rank)

        def worked_out(device: str, roundoff: float = 0.0) -> tuple[list[torch.Tensor], Expected]:
            return expect_on_mesh(problem, draw, self._team.mesh, self._team.rank, device, roundoff)

        drawn, why, where = None, "", ""
        # Where ranks have a GPU each, their processes often have one thread each: there float64 takes a CPU minutes.
        for where in dict.fromkeys((self._target.device, "cpu")):
            try:
                drawn = worked_out(where)
                break
            except Exception as error:  # out of memory, or no such operation there
                why = failure("the oracle failed", error)
        if drawn is None:
            say(f"{problem} cannot be checked: {why}")
            return None
        sources, expected = drawn
        there = [guarded(t.to(self._target.device)) for t in sources]
        held = {i: there[i] for i in constants}
        other = [t if i in held else guarded(other_data(t)) for i, t in enumerate(there)]
        return _Checked(there, other, held, {0.0: expected}, lambda roundoff: worked_out(where, roundoff)[1])

    def _examined(self, problem: AnyProblem, checked: _Checked | None, kernel: Kernel | None, runner: Runner | None) -> str:
        """The reason why a runner may not be trusted; "" if it may. It runs on other data first, so that a result or a buffer
        kept from an earlier call shows, and then twice, while one rank, drawn by lot, comes late. Its sources, and what it gave
        before, are to stay as they are."""
        assert checked is not None and kernel is not None and runner is not None
        expected = checked.expected_of(kernel.roundoff)
        outputs = [(t.shape, t.dtype.to_torch()) for t in problem.outputs]
        late = random.Random(text_of(problem)).randrange(self._team.mesh.size)
        before = [t.clone() for t in checked.sources]
        peers = self._team.peers  # what ranks do between two calls takes some longer than others: they meet before each
        peers.gathered(0, int, "a call that is checked")
        first = runner(checked.other)
        kept = [t.clone() for t in first]
        whys: list[str | None] = []  # all calls are made whatever they give, for all ranks make them
        for again in ("", " (when it ran again)"):
            poison(outputs, self._target.device)
            peers.gathered(0, int, "a call that is checked")
            if self._team.rank == late:
                time.sleep(LATE_S)
            results = runner(checked.sources)
            synchronize(self._target.device)
            why = check(problem, expected, results)
            whys.append(why and f"{why}{again}")
            whys.append(None if all_same(kept, first) else "it writes to a result of an earlier call")
            peers.gathered(0, int, "a call that is checked")
            runner(checked.other)
        if any(whys):
            return next(why for why in whys if why)
        if not all_same(before, checked.sources) or not all(map(intact, checked.sources)):
            return "it writes its sources, or beside them"
        return ""

    def _verdict(self, why: str, examine: Callable[[], str]) -> str:
        """The first rank's reason against a kernel; "" if it passed on all. Ranks that could not build it have one already, and
        then none runs it."""
        peers = self._team.peers
        said = peers.gathered(why, str, "the kernels built")
        if not any(said):
            self._team.at("the check of a kernel with operations between ranks")
            try:
                why = examine()
            except PeerError:
                raise
            except Exception as error:
                why = failure("failed", error)
            said = peers.gathered(why, str, "the verdict on a kernel")
        return next((f"rank {r}: {w}" for r, w in enumerate(said) if w), "")

    def _timed(self, runner: Runner, sources: Sequence[torch.Tensor]) -> float:
        """The median over calls of the slowest rank's time in µs, agreed."""
        run, calls = lambda: runner(sources), 1
        replay = self._replayed(run) if self._target.kind == "cuda" else None
        if replay is not None:  # as programs run from their second call on, but for what Python takes
            run, calls = replay, GRAPHED
        times = times_us(self._team, run, self._target.device, within_s=TIMING_S)
        return statistics.median(us for us, _ in times) / calls

    def _replayed(self, run: Callable[[], Sequence[torch.Tensor]]) -> Callable[[], None] | None:
        """Calls in one CUDA graph on each rank; None where a rank cannot capture them, and then for all."""
        replay, why = None, ""
        synchronize(self._target.device)
        self._team.peers.gathered(0, int, "the start of a capture")
        try:
            _, replay = CudaGraphs(self._target.device)(lambda: [run() for _ in range(GRAPHED)])
        except Exception as error:
            why = failure("it cannot be captured", error)
        if not any(self._team.peers.gathered(why, str, "a capture")):
            return replay
        self._team.count_alike()  # who could not capture all calls has counted fewer
        return None


@dataclass(frozen=True)
class _Checked:
    """Data of this rank: sources, others of the same types, those that are constant, and what the first must give, by the
    roundoff of a kernel's sums (`Kernel.roundoff`)."""

    sources: list[torch.Tensor]
    other: list[torch.Tensor]
    weights: Mapping[int, torch.Tensor]
    expected: dict[float, Expected]
    worked_out: Callable[[float], Expected]

    def expected_of(self, roundoff: float) -> Expected:
        """The right results for a kernel whose sums keep fewer bits than their type has; worked out once for each roundoff."""
        if roundoff not in self.expected:
            self.expected[roundoff] = self.worked_out(roundoff)
        return self.expected[roundoff]


def times_us(
    team: ProcessTeam, run: Callable[[], object], device: str, *, within_s: float = 0.0, calls: int | None = None
) -> list[tuple[float, float]]:
    """The slowest rank's time in µs of each call, which all ranks make together: `calls`, or as many as a time allows. With it
    the time in operations between ranks, of the rank that spent least in them: it came last, and waited for nobody."""

    def took_us() -> tuple[float, float]:
        team.barrier()
        synchronize(device)
        spent_s, start = team.spent_s, time.perf_counter()
        run()
        synchronize(device)
        return 1e6 * (time.perf_counter() - start), 1e6 * (team.spent_s - spent_s)

    def between_us() -> float:
        """The time in operations between ranks of a call more, in which each waits for what goes before it on a GPU."""
        team.barrier()
        team.timing, spent_s = True, team.spent_s
        run()
        team.timing = False
        return 1e6 * (team.spent_s - spent_s)

    team.peers.gathered(0, int, "the start of a timing")
    first = max(us for us, _ in team.peers.gathered(took_us(), tuple[float, float], "a first timing"))
    if calls is None:
        calls = min(MOST, max(LEAST, int(1e6 * within_s / max(first, 1.0))))
    times = [took_us() for _ in range(calls)]
    if device != "cpu":
        times = [(us, between_us()) for us, _ in times]
    each = team.peers.gathered(times, list[tuple[float, float]], "a timing")
    return [(max(us for us, _ in call), min(us for _, us in call)) for call in zip(*each, strict=True)]


def facts(target: Target, *, excess_precision: bool, cache: bool) -> dict[str, str]:
    """The circumstances that ranks must share, in words by name."""
    key = circumstances(target, excess_precision=excess_precision)
    found = {
        "chip": key.chip,
        "processor": key.processor,
        "cores": str(key.cores),
        "threads": str(key.threads),
        "driver": key.driver,
        "toolkit": key.toolkit,
        "libraries": key.libraries,
        "version of tilewright": key.tilewright,
        "numerics": key.numerics,
    }
    try:
        folder = str(cache_folder()) if cache else "none"
    except OSError as error:
        folder = f"none: {error.strerror}"
    return {**found, "cache": folder}


def outline(graph: Graph) -> str:
    """A digest of a program for one rank, of all but the values of constants, which differ by rank."""
    nodes = toposort((*graph.inputs, *graph.outputs))
    inner = [{name: [_written(toposort((r,))) for r in roots] for name, roots in n.op.regions().items()} for n in nodes]
    lines = [f"{line} {regions}" for line, regions in zip(_written(nodes), inner, strict=True)]
    return digest("\n".join([*lines, *graph.output_names]).encode())


def constants(graph: Graph) -> str:
    """A digest of the values of a program's constants and state: alike on all ranks where it is over whole tensors."""
    found = hashlib.sha256()
    held = [n.op.data.tensor() for n in toposort(graph.outputs) if isinstance(n.op, Const)]
    for t in (*held, *graph.state):
        found.update(bits_of(t.cpu()).numpy().data)
    return found.hexdigest()[:16]


def _written(nodes: Sequence[Node]) -> list[str]:
    """A line for each node, without the values of constants."""
    at, lines = dict[Node, int](), list[str]()
    for n in nodes:
        at[n] = len(at)
        said = () if isinstance(n.op, Const) else sorted((k, repr(v)) for k, v in attributes(n.op).items())
        lines.append(f"{n.op.name} {n.type} {[at[s] for s in n.src]} {said}")
    return lines


def digest(data: bytes) -> str:
    """The first characters of a SHA-256 digest."""
    return hashlib.sha256(data).hexdigest()[:16]
