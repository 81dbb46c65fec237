"""The ways to do a problem with operations between ranks, and the order in which they are tried.

What they took is agreed between ranks, so that all of them go on in one order, whatever their clocks say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from tilewright.hardware.links import Links
from tilewright.hardware.target import Target
from tilewright.ir.ops import Collective
from tilewright.schedule.candidate import Candidate, Kernel, Schedule
from tilewright.schedule.cost import least_us
from tilewright.schedule.problem import AnyProblem, collectives_of
from tilewright.schedule.record import Choice, RejectedRecord
from tilewright.schedule.search import Decision, Rejected

PLAIN = "sequential"  # the candidate that communicates and multiplies one after the other
NEAR = 1.25  # times the fastest: a candidate whose own points come before those of slower ones, and before their pieces
PATIENCE = 0.1  # by which a candidate counts as slower for each of its points that were tried: others have a turn
HEADS, NEAREST, ALL = range(3)  # the waves of points that are timed


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


@runtime_checkable
class InSomePieces(BetweenPlan, Protocol):
    """A plan of whose pieces each point needs some alone. What `of_pieces` is given for the others is not looked at."""

    def pieces_of(self, schedule: Schedule) -> Sequence[AnyProblem]:
        """Those that one point needs."""
        ...


@runtime_checkable
class Overlapping(BetweenPlan, Protocol):
    """A plan whose kernels multiply while values travel."""

    def overlapped(self, schedule: Schedule) -> int:
        """The number of parts of the work at one point, of which one is multiplied while another one travels."""
        ...


@dataclass(frozen=True, eq=False)
class Point:
    """A point of a candidate's plan.

    Attributes:
        candidate, plan: whose.
        schedule: the point as the plan lists it, or with its pieces' (`whole`).
        at: its place among the plan's.
        needs: the pieces that are to be chosen before it is built.
        whole: it names its pieces.
    """

    candidate: Candidate
    plan: BetweenPlan
    schedule: Schedule
    at: int
    needs: tuple[AnyProblem, ...]
    whole: bool = False

    def with_pieces(self, chosen: Mapping[AnyProblem, Decision]) -> Schedule:
        """The point with those of its pieces."""
        if self.whole:
            return self.schedule
        kernels = [chosen[p].kernel if p in chosen else None for p, _ in self.plan.pieces_with({})]
        return self.plan.of_pieces(
            self.schedule, [("", Schedule()) if k is None else (k.candidate, k.schedule) for k in kernels]
        )


class Ways:
    """The points of one problem that are left, and what became of the others.

    Attributes:
        problem, plans: the problem, and each candidate's plan.
        left: the points that were not tried, each candidate's in its own order.
        passed: decisions for those that gave the right results everywhere.
        measures: they are timed; else the first one that passes is taken.
        plain: the pieces without which the plain way cannot be built.
    """

    problem: AnyProblem
    plans: Mapping[Candidate, BetweenPlan]
    left: list[Point]
    passed: list[Decision]
    measures: bool
    plain: tuple[AnyProblem, ...]

    def __init__(self, problem: AnyProblem, plans: Mapping[Candidate, BetweenPlan], measures: bool) -> None:
        self.problem, self.plans, self.measures = problem, plans, measures
        self.left = [Point(c, p, s, at, _needed(p, s)) for c, p in plans.items() for at, s in enumerate(p.schedules())]
        self.plain = next((p.needs for p in self.left if p.candidate.name == PLAIN), ())
        self.passed = []
        self._rejected: list[Rejected] = []
        self._known: dict[tuple[str, Schedule], RejectedRecord] = {}
        self._tried, self._best = Counter[str](), dict[str, float]()
        self._heads = {p: i for i, p in enumerate(sorted((p for p in self.left if p.at == 0), key=_after_plain))}

    @property
    def waves(self) -> int:
        """The number of waves."""
        return ALL + 1 if self.measures else len(self.plans)

    def go_on_from(self, told: Choice) -> None:
        """Take up what an earlier search found in part: its winner is tried first, and points that it tried are not tried
        again unless they were faster than all that is found now."""
        candidate, plan = next((c, p) for c, p in self.plans.items() if c.name == told.candidate)
        self._known = {(r.candidate, Schedule(r.knobs)): r for r in told.rejected if r.kind != "untried"}
        first = Point(candidate, plan, Schedule(told.knobs), 0, (), whole=True)
        self._heads = {first: -1, **self._heads}
        self.left.insert(0, first)

    def in_order(self, expected: Callable[[Point], float]) -> list[int]:
        """The places of the first points of candidates, the plain way's ahead, in the order of the time that each is expected
        to take."""
        heads = [*self._heads]
        return sorted(range(len(heads)), key=lambda i: (not heads[i].whole, _after_plain(heads[i]), expected(heads[i])))

    def set_order(self, places: Sequence[int]) -> None:
        """Try first points in the order of `in_order`."""
        heads = [*self._heads]
        self._heads = {heads[i]: n for n, i in enumerate(places)}

    def wave(self, number: int) -> list[Point]:
        """The points left of a wave. Where they are timed: the first ones of each candidate, then those of candidates that
        are near the fastest, then all. Else each candidate's in turn."""
        if not self.measures:
            names = [c.name for c in self.plans]
            return [p for p in self.left if p.whole or p.candidate.name in names[: number + 1]]
        if number == HEADS:
            return [p for p in self.left if p in self._heads]
        fastest = min(self._best.values(), default=0.0)
        near = [p for p in self.left if p in self._heads or self._best_of(p.candidate.name) <= NEAR * fastest]
        return near if number == NEAREST else [*self.left]

    def ranked(self, points: Sequence[Point]) -> list[Point]:
        """Points in the order in which they are tried: first ones as they stand; others by the time of their candidate's
        fastest point so far, the more of its points were tried, the later."""
        if not self.measures:
            return [*points]

        def key(p: Point) -> tuple[bool, float, int]:
            name = p.candidate.name
            late = self._best_of(name) * (1 + PATIENCE * self._tried[name])
            return p not in self._heads, self._heads.get(p, late), p.at

        return sorted(points, key=key)

    def _best_of(self, name: str) -> float:
        """The time of a candidate's fastest point so far; of one that has none that of the plain way, or the slowest."""
        return self._best.get(name, self._best.get(PLAIN, max(self._best.values(), default=0.0)))

    def tried_before(self, point: Point, schedule: Schedule) -> bool:
        """Tell whether an earlier search tried a point, given with its pieces', and did not take it."""
        return (point.candidate.name, schedule) in self._known

    def known(self, point: Point, schedule: Schedule) -> bool:
        """Leave out a point, given with its pieces', of which is known that it is not the fastest; tell whether that is so."""
        name = point.candidate.name
        fastest, earlier = min(self._best.values(), default=0.0), self._known.get((name, schedule))
        again = any((d.kernel.candidate, d.kernel.schedule) == (name, schedule) for d in self.passed)
        if not again and (earlier is None or not self.passed or (earlier.time_us or fastest) < fastest):
            return False
        self.left.remove(point)
        if not again and earlier is not None:
            self._rejected.append(Rejected(name, earlier.kind, earlier.why, schedule, earlier.time_us))
            self._count(name, earlier.time_us)
        return True

    def took(self, point: Point, decision: Decision) -> None:
        """Note a point that passed, with its time if it was measured."""
        self.left.remove(point)
        self.passed.append(decision)
        self._count(point.candidate.name, decision.time_us)

    def failed(self, point: Point, schedule: Schedule, why: str) -> None:
        """Note a point, given with its pieces', that did not pass. Where an earlier winner does not, all are tried anew."""
        self.left.remove(point)
        if point.whole:
            self._known = {}
        self._rejected.append(Rejected(point.candidate.name, "wrong", why, schedule))
        self._count(point.candidate.name, None)

    def _count(self, name: str, us: float | None) -> None:
        self._tried[name] += 1
        if us is not None:
            self._best[name] = min(us, self._best.get(name, us))

    def decision(self, chosen: Mapping[AnyProblem, Decision]) -> Decision | None:
        """The fastest point that passed, over the others; None if none did. `chosen` has the pieces."""
        if not self.passed:
            return None
        best, *others = sorted(self.passed, key=lambda d: d.time_us or 0.0)
        losers = [Rejected(d.kernel.candidate, "slower", "", d.kernel.schedule, d.time_us) for d in others]
        losers += self._rejected
        for p in self.left:
            schedule = p.with_pieces(chosen) if all(piece in chosen for piece in p.needs) else p.schedule
            earlier = self._known.get((p.candidate.name, schedule))
            if earlier is not None and (earlier.time_us is None or earlier.time_us >= (best.time_us or 0.0)):
                losers.append(Rejected(earlier.candidate, earlier.kind, earlier.why, schedule, earlier.time_us))
                continue
            why = "not tried: the time was over" if self.measures else "not tried: nothing is measured"
            losers.append(Rejected(p.candidate.name, "untried", why, schedule))
        for i, r in enumerate(losers):
            if r.kind == "slower":
                ratio = (r.time_us or 0.0) / (best.time_us or 1.0)
                why = f"slower: {r.time_us or 0.0:,.1f} µs on the slowest rank, {ratio:.2f} times the winner"
                losers[i] = replace(r, why=why)
        return replace(best, rejected=tuple(losers))

    def own_us(self, chosen: Mapping[AnyProblem, Decision], target: Target) -> float:
        """The time in µs of what a rank does alone in the plain way: as measured, else at the least."""
        return sum((chosen[p].time_us if p in chosen else None) or least_us(p, target) for p in self.plain)

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """The points that did not pass."""
        return tuple(self._rejected)


def expected_us(point: Point, problem: AnyProblem, own_us: float, links: Links) -> float:
    """The time in µs that a point is expected to take: the longer of what a rank does alone (`own_us`) and what travels, and
    the part of the shorter that hides behind nothing."""
    met = [n for n in collectives_of(problem) if n.op.meets]
    links_us = sum(
        links.time_us(n.op.name, n.op.over, n.op.wire_bytes(n.src[0].tensor)) for n in met if isinstance(n.op, Collective)
    )
    parts = point.plan.overlapped(point.schedule) if isinstance(point.plan, Overlapping) else 1
    return max(own_us, links_us) + min(own_us, links_us) / max(parts, 1)


def _needed(plan: BetweenPlan, schedule: Schedule) -> tuple[AnyProblem, ...]:
    if isinstance(plan, InSomePieces):
        return tuple(plan.pieces_of(schedule))
    return tuple(p for p, _ in plan.pieces_with({}))


def _after_plain(point: Point) -> bool:
    return point.candidate.name != PLAIN
