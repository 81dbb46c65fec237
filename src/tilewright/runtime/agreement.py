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
from typing import cast

import msgspec
import torch

from tilewright.deadline import Budget
from tilewright.errors import PeerError, say
from tilewright.hardware.ceilings import cache_folder
from tilewright.hardware.links import kept_links, key_of, links_for
from tilewright.hardware.target import Target
from tilewright.ir.graph import Graph, Node, attributes, toposort
from tilewright.ir.literal import bits_of
from tilewright.ir.ops import Const
from tilewright.processors import usable
from tilewright.progress import Progress
from tilewright.runtime.steps import Posed
from tilewright.runtime.team import ProcessTeam
from tilewright.runtime.ways import BetweenPlan, Point, Ways, expected_us
from tilewright.schedule.ahead import LOOK_S, MOST_PROCESSES, Ahead, Job
from tilewright.schedule.bench import failure
from tilewright.schedule.budget import LONGEST, LONGEST_S, BudgetedChooser, ordinary
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
from tilewright.schedule.search import Decision, by_reference
from tilewright.schedule.tuning_database import TuningDatabase, rebuilt, repeat

SEARCHING = 0.7  # of the time, for problems of one rank alone
BESIDE = 0.5  # of what is left, for those while problems with operations between ranks wait
HEAD_S, LEAST_BESIDE = 0.5, 0.25  # kept back for each of the first points of these, but for so much of what is left
MOST_AHEAD = 32  # points of a problem whose machine code is made beforehand
GRAPHED = 16  # calls in a CUDA graph that is timed: ranks begin it some 50 µs apart
TIMING_S = 0.2  # for timing one point of a problem that all ranks take part in
LEAST, MOST = 3, 30  # calls of it
COMPILED = ("cuda",)  # kinds of device whose machine code other processes make
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
    """A problem of one rank alone: its constant sources at hand, how many steps pose it, its text, and whether the program can
    do without it."""

    problem: AnyProblem
    weights: Mapping[int, torch.Tensor]
    count: int
    text: str
    spare: bool


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
        self._drawn_data: dict[AnyProblem, _Checked | None] = {}
        self._aheads, self._beside = list[Ahead](), False
        self._accepted_s = 0.0  # for which a decision on a problem of one rank alone was made that will do
        self._begun = set[Job]()  # whose machine code some rank makes, or made

    def __call__(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
        return self._chosen[problem]

    def deal(self, posed: Sequence[Posed]) -> None:
        """Choose for all problems of a program. Every rank calls it with the same ones, in the same order."""
        # Clocks differ: what rank 0 does, all do.
        self._measures = self._team.peers.gathered(self._measures, bool, "the time there is")[0]
        try:
            self._deal(posed)
        finally:
            for ahead in self._aheads:
                ahead.stop()
            self._drawn_data.clear()
        said = [(d.kernel.candidate, d.kernel.schedule.knobs) for p in posed for d in [self._chosen[p.problem]]]
        self._team.peers.agree({"the kernels chosen": digest(msgspec.json.encode(said))}, "the choice of kernels")

    def _deal(self, posed: Sequence[Posed]) -> None:
        """Choose what all take part in of what rank 0 knows; then in waves: problems of one rank alone that the wave's points
        are made of, and these points. Meanwhile machine code is made of points that need no such problem."""
        steps, given = Counter(p.problem for p in posed), {p.problem: p.weights for p in reversed(posed)}
        problems = [*dict.fromkeys(p.problem for p in posed)]
        between = {p: self._plans(p) for p in problems if collectives_of(p)}
        known = {p: self._known(p, plans) for p, plans in between.items()}
        every = {p: Ways(p, plans, self._measures) for p, plans in between.items()}
        self._beside = self._measures and bool(every)
        # The same in the next compile, whatever is known then.
        alone = {*problems}.difference(between)
        alone |= {p for plans in between.values() for plan in plans.values() for p, _ in plan.pieces_with({})}
        seconds = self._budget.seconds
        even_s = BESIDE * seconds * self._team.mesh.size / max(len(alone), 1)
        self._accepted_s = min(even_s, max(LONGEST_S, LONGEST * seconds))
        for problem, (told, whole) in known.items():
            if told is not None and not whole:
                every[problem].go_on_from(told)
        self._compile_ahead([w for p, w in every.items() if known[p][0] is None or not known[p][1]])
        for problem, (told, whole) in known.items():
            found = self._recalled(problem, between[problem], told) if told is not None and whole else None
            if found is not None:
                self._chosen[problem] = found
                del every[problem]

        def local(wanted: Mapping[AnyProblem, Sequence[AnyProblem]], own: Sequence[AnyProblem]) -> list[_Local]:
            """The problems of one rank alone that others want (`wanted`) and that are not chosen yet, and the program's own."""
            found = {p: _Local(p, given[p], steps[p], text_of(p), False) for p in own}
            for problem, pieces in wanted.items():
                ways = every[problem]
                held = {p: w for plan in ways.plans.values() for p, w in plan.pieces_with(given[problem])}
                for piece in dict.fromkeys(pieces):
                    one = found.setdefault(piece, _Local(piece, held[piece], 0, text_of(piece), True))
                    one.count += steps[problem]
                    one.spare = one.spare and piece not in ways.plain
            return [one for p, one in found.items() if p not in self._chosen]

        own = [p for p in problems if p not in between]
        cold = sum(t.nbytes for held in given.values() for t in held.values()) > last_cache_bytes(self._target)
        for number in range(max((w.waves for w in every.values()), default=0) or 1):
            waves = {p: w.wave(number) for p, w in every.items() if self._measures or not w.passed}
            waves = {p: points for p, points in waves.items() if points}
            if number and (not waves or (self._measures and self._agreed(self._budget.over()))):
                break
            if number and self._measures:  # while code of pieces is made
                self._search_each(every, waves, 0.5)
            pieces = {p: [piece for point in points for piece in point.needs] for p, points in waves.items()}
            self._choose_local(local(pieces, own if number == 0 else ()), sum(map(len, waves.values())), cold=cold)
            self._beside = False
            self._compile_ahead([*every.values()], pieces=number == 0)
            if number == 0 and self._measures:
                self._order([*every.values()])
            self._search_each(every, waves)
        for problem, ways in every.items():
            self._chosen[problem] = self._decided(ways)

    def _plans(self, problem: AnyProblem) -> dict[Candidate, BetweenPlan]:
        """The plans of candidates for a problem with operations between ranks, but for the reference."""
        able = [c for c in discover(kind=self._target.kind) if c.preference < LAST_RESORT]
        found = {c: planned(c, problem, self._target) for c in able if concerns(c, problem, self._target)}
        return {c: cast("BetweenPlan", p) for c, p in found.items() if not isinstance(p, Refusal)}

    def _choose_local(self, local: Sequence[_Local], points: int, *, cold: bool) -> None:
        """Search this rank's share, and take the others' choices for the rest; `points` between ranks are tried next. Problems
        that the program can do without are left out once the time is over, or where what was found does not do everywhere."""
        if not local:
            return
        peers, own = self._team.peers, self._team.rank
        mine = self._dealt(local)
        share = sorted((one for one, r in zip(local, mine, strict=True) if r == own), key=lambda one: one.spare)
        found: dict[int, Chosen] = {}
        if share:
            within = self._budget.part(self._local_s(points))
            shared = BudgetedChooser(
                {one.problem: one.count for one in share},
                self._target,
                within,
                cold=cold,
                progress=self._progress,
                database=self._database,
                most=self._processes(),
                accepted_s=self._accepted_s,
            )
            share.sort(key=lambda one: (one.spare, -shared.weight(one.problem)))
            while share:
                one = share.pop(shared.turn([one.problem for one in share]))
                if not (one.spare and within.over()):
                    self._chosen[one.problem] = shared(one.problem, one.weights)
            own_ones = {i: self._chosen.get(one.problem) for i, one in enumerate(local) if mine[i] == own}
            found = {i: choice_of(d, Chosen, recalled=d.recalled) for i, d in own_ones.items() if d is not None}
        told = peers.gathered(found, dict[int, Chosen], "the kernels that others searched")
        chosen = {i: c for by_rank in told for i, c in by_rank.items()}
        points_of = {i: [(c.candidate, Schedule(c.knobs)), *c.others()[:MOST_OTHERS]] for i, c in chosen.items()}
        failing, attempt = [i for i in chosen if mine[i] != own], 0
        here = [i for i in chosen if mine[i] == own]
        while True:
            bad = [i for i in failing if not self._take(local, i, points_of[i], attempt)]
            bad = sorted({i for by_rank in peers.gathered(bad, list[int], "the check of kernels") for i in by_rank})
            for i in {*failing, *here} - {*bad}:
                if attempt == 0:
                    self._chosen[local[i].problem] = chosen[i].told(self._chosen[local[i].problem])
                if attempt == 0 and self._database is not None and mine[i] != own:
                    checked = replace(self._chosen[local[i].problem], verified=not local[i].spare)
                    self._database.keep(checked, self._accepted_s)
            for i in [i for i in bad if local[i].spare]:
                self._chosen.pop(local[i].problem, None)
                bad.remove(i)
            if not bad:
                return
            for i in bad:
                last = points_of[i][min(attempt, len(points_of[i]) - 1)][0]
                say(f"{last} fails on a rank: {local[i].problem}; all take another")
            failing, here, attempt = bad, [], attempt + 1

    def _local_s(self, points: int) -> float:
        """The seconds for problems of one rank alone, so many points of others being tried behind them."""
        left_s = self._budget.left_s()
        if not points:
            return SEARCHING * left_s
        return min(BESIDE * left_s, max(left_s - HEAD_S * points, LEAST_BESIDE * left_s))

    def _take(self, local: Sequence[_Local], i: int, points: Sequence[tuple[str, Schedule]], attempt: int) -> bool:
        """Build and verify a point here; behind the last one the reference, which passes. Tell whether it does. A piece that
        the program can do without is verified with the whole of which it is a piece."""
        one, target = local[i], self._target
        if attempt >= len(points):
            self._chosen[one.problem] = by_reference(one.problem, target)
            return True
        name, schedule = points[attempt]
        alike = any(o.text == one.text and o.problem in self._chosen for o in local[:i])
        if one.spare or (alike and ordinary(one.problem)):
            found = rebuilt(one.problem, target, name, schedule)
        else:
            found = repeat(one.problem, target, name, schedule, one.weights)
        if found is not None:
            self._chosen[one.problem] = found
        return found is not None

    def _dealt(self, local: Sequence[_Local]) -> list[int]:
        """The rank that searches each problem, as rank 0 says: it takes those that it knows, and the others go to whoever has
        least to do, the heaviest first. Problems that differ in numbers alone go together."""
        said: list[int] = []
        if self._team.rank == 0:
            heavy: dict[str, float] = {}
            for one in local:
                heavy[one.text] = heavy.get(one.text, 0.0) + one.count * least_us(one.problem, self._target)
            database = self._database
            known = {o.text for o in local if database is not None and database.known(o.problem, self._accepted_s)}
            loads = dict.fromkeys(reversed(range(self._team.mesh.size)), 0.0)
            by_text = dict.fromkeys(known, 0)
            for text in sorted(heavy.keys() - known, key=lambda t: (-heavy[t], t)):
                by_text[text] = min(loads, key=lambda r: loads[r])
                loads[by_text[text]] += max(heavy[text], 1.0)
            said = [by_text[one.text] for one in local]
        return self._team.peers.gathered(said, list[int], "the problems dealt out")[0]

    def _decided(self, ways: Ways) -> Decision:
        """The fastest point that gives the right results on all ranks, which rank 0 keeps."""
        found = ways.decision(self._chosen)
        if found is None:
            found = by_reference(ways.problem, self._target)
            return replace(found, rejected=ways.rejected, verified=self._drawn_for(ways.problem) is not None)
        if self._together is not None:
            whole = not any(r.kind == "untried" for r in found.rejected)
            self._together.keep(found, self._together_s() if whole else 0.0)  # the next compile goes on
        return found

    def _together_s(self) -> float:
        return TIMING_S if self._measures else 0.0

    def _known(self, problem: AnyProblem, plans: Mapping[Candidate, BetweenPlan]) -> tuple[Chosen | None, bool]:
        """The decision that rank 0 knows for a problem that all take part in, and whether it will do: where that was cut short,
        and there is time, it is gone on from."""
        record, whole = None, True
        if self._together is not None:
            noted = self._together.noted(problem, self._together_s())
            if noted is None and self._measures:
                noted, whole = self._together.noted(problem, 0.0), False
            if noted is not None and (whole or (noted.time_us is not None and not noted.provisional)):
                record = Chosen(noted.candidate, noted.knobs, noted.time_us, noted.rejected, noted.provisional, recalled=True)
        said = self._team.peers.gathered((record, whole), tuple[Chosen | None, bool], "what is known of a problem")[0]
        return said if said[0] is not None and any(c.name == said[0].candidate for c in plans) else (None, False)

    def _recalled(self, problem: AnyProblem, plans: Mapping[Candidate, BetweenPlan], told: Chosen) -> Decision | None:
        """A decision that is known, if it still passes on all ranks."""
        checked = self._drawn_for(problem)
        plan = next(p for c, p in plans.items() if c.name == told.candidate)
        kernel, runner, why = self._built(plan, Schedule(told.knobs), checked)
        # Also where it cannot be checked here: the others build it, and are to hear so.
        if self._verdict(why, partial(self._examined, problem, checked, kernel, runner)) or kernel is None:
            return None
        return told.told(Decision(problem, kernel, None, (), False, True))

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

    def _search_each(
        self, every: Mapping[AnyProblem, Ways], waves: Mapping[AnyProblem, Sequence[Point]], part: float = 1.0
    ) -> None:
        """Try points of several problems, which share a part of the time that is left."""
        ends = time.monotonic() + part * self._budget.left_s()
        for n, (problem, points) in enumerate(waves.items()):
            now = time.monotonic()
            self._search(every[problem], points, now + max(0.0, ends - now) / (len(waves) - n))

    def _search(self, ways: Ways, points: Sequence[Point], until: float) -> None:
        """Build, verify and time points until then, those first whose machine code is there. Of none is known that it passes:
        then they are tried until one does, however long that takes."""
        checked = self._drawn_for(ways.problem)
        while not ways.passed or self._measures:
            left = [p for p in ways.ranked(points) if p in ways.left and all(piece in self._chosen for piece in p.needs)]
            left = [p for p in left if not ways.known(p, p.with_pieces(self._chosen))]
            if not left:
                break
            over, at = self._next(ways.problem, left, until)
            if over and ways.passed:
                break
            if at is None:
                time.sleep(LOOK_S)
            else:
                self._try(ways, left[at], checked)
        if ways.passed and not ways.left:
            self._drawn_data.pop(ways.problem, None)  # it may be large

    def _next(self, problem: AnyProblem, points: Sequence[Point], until: float) -> tuple[bool, int | None]:
        """Tell whether the time is over by rank 0's clock, and the first point's place whose machine code nobody still makes;
        None where there is none, and there is time to wait."""
        over = self._measures and time.monotonic() > until
        jobs = [(problem, p.candidate.name, p.with_pieces(self._chosen)) for p in points]
        making = [i for i, job in enumerate(jobs) if any(ahead.waits(job) for ahead in self._aheads)]
        said = self._team.peers.gathered((over, making), tuple[bool, list[int]], "what is tried next")
        over, making = said[0][0], {i for _, of_rank in said for i in of_rank}
        return over, next((i for i in range(len(points)) if i not in making), 0 if over else None)

    def _try(self, ways: Ways, point: Point, checked: _Checked | None) -> None:
        """Build, verify and time a point on all ranks."""
        problem, schedule = ways.problem, point.with_pieces(self._chosen)
        if self._progress is not None:
            done = len(ways.passed) + len(ways.rejected)
            self._progress(done, done + len(ways.left), f"ways between ranks: {point.candidate.name}")
        began = time.perf_counter()
        kernel, runner, why = self._built(point.plan, schedule, checked)
        why = self._verdict(why, partial(self._examined, problem, checked, kernel, runner))
        if why or kernel is None or runner is None or checked is None:
            ways.failed(point, schedule, why)
            return
        us = self._timed(runner, checked.sources) if self._measures else None
        took_s = time.perf_counter() - began
        ways.took(point, Decision(problem, kernel, us, (), us is not None, True, checked_s=took_s))

    def _order(self, several: Sequence[Ways]) -> None:
        """Have candidates' first points tried in the order of their expected times, as rank 0 says: by the rates of links that
        were measured, or else the chip's."""
        team, target, said = self._team, self._target, list[list[int]]()
        if team.rank == 0:
            links = links_for(target, kept_links(key_of(target, str(team.mesh), team.links), target.kind))
            for ways in several:
                own_us = ways.own_us(self._chosen, target)
                said.append(ways.in_order(lambda p, w=ways, us=own_us: expected_us(p, w.problem, us, links)))
        for ways, places in zip(several, team.peers.gathered(said, list[list[int]], "the order of ways")[0], strict=True):
            ways.set_order(places)

    def _agreed(self, what: bool) -> bool:
        """The answer of rank 0, since clocks differ."""
        return self._team.peers.gathered(what, bool, "whether there is time")[0]

    def _processes(self) -> int:
        """The processes that may make machine code for this rank at once, of those of its host; while it searches problems of
        its own, half of them for these."""
        _, ranks = self._team.on_host
        most = min(usable() // ranks, MOST_PROCESSES + 1) - 1  # a core is left to who searches
        return max(1, most // 2 if self._beside else most)

    def _compile_ahead(self, several: Sequence[Ways], *, pieces: bool = False) -> None:
        """Have other processes make the machine code of points, each rank that of its share while it goes on, and with `pieces`
        that of pieces which points to come need. Ranks of one host have one cache of it. Points whose pieces are not chosen
        yet come last, as their plans guess them."""
        if not self._measures or self._target.kind not in COMPILED:
            return
        points = [(w, p) for w in several for p in w.left if isinstance(p.plan, Precompiled) and p.at < MOST_AHEAD]
        guessed = {p for _, p in points if any(piece not in self._chosen for piece in p.needs)}
        jobs: dict[Job, None] = {}
        for w, p in sorted(points, key=lambda one: (one[1] in guessed, one[1].at)):
            schedule = p.schedule if p in guessed else p.with_pieces(self._chosen)
            if not w.tried_before(p, schedule):
                jobs[w.problem, p.candidate.name, schedule] = None
        new = [job for job in jobs if job not in self._begun]
        self._begun.update(new)
        needed = dict.fromkeys(piece for w in several for p in w.left for piece in p.needs if pieces)
        later = [piece for piece in needed if piece not in self._chosen]
        place, ranks = self._team.on_host
        share, own = new[place::ranks], later[place::ranks]
        if share or own:
            self._aheads.append(Ahead(own, self._target, chosen=share, most=self._processes()))

    def _drawn_for(self, problem: AnyProblem) -> _Checked | None:
        """The data of `_drawn`, drawn once."""
        if problem not in self._drawn_data:
            self._drawn_data[problem] = self._drawn(problem)
        return self._drawn_data[problem]

    def _drawn(self, problem: AnyProblem) -> _Checked | None:
        """Random data of this rank and what it must give there, worked out without the others; None where it cannot be."""
        seed, constants = 17, [i for i, weight in enumerate(problem.weights) if weight]

        def draw(rank: int) -> list[torch.Tensor]:
            return random_sources(problem, seed=seed + rank)

        def worked_out(device: str, roundoff: float = 0.0) -> tuple[list[torch.Tensor], Expected]:
            return expect_on_mesh(problem, draw, self._team.mesh, self._team.rank, device, roundoff)

        drawn, why, where = None, "", ""
        # Where ranks have a GPU each, their processes often have one thread each: there data and float64 take a CPU minutes.
        places = [*dict.fromkeys((self._target.device, "cpu"))]
        for where in places:
            try:
                drawn = worked_out(where)
            except Exception as error:  # out of memory, or no such operation there
                drawn, why = None, failure("the oracle failed", error)
            # Devices draw other numbers, and what one rank must give depends on all ranks' data: all draw in one place.
            if len(places) == 1 or all(self._team.peers.gathered(drawn is not None, bool, "data drawn")):
                break
            torch.cuda.empty_cache()
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
