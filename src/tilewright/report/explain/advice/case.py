"""A compiled program as a finder of advice sees it: steps with names and times, and what the cost model expects of another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tilewright.hardware.target import Target
from tilewright.ir.graph import Node
from tilewright.report.explain.choices import predicted_of
from tilewright.report.explain.findings import Reasons
from tilewright.report.explain.folded import Folded
from tilewright.report.measure.work import work_of
from tilewright.report.schema import Basis
from tilewright.runtime.executable import Executable
from tilewright.runtime.steps import Step
from tilewright.schedule.problem import problem_of

SAID: dict[Basis, str] = {
    "measured": "its measured time",
    "predicted": "the time that the cost model expects",
    "limit": "the least time that the machine's rates allow",
    "": "its time",
}


@dataclass(frozen=True)
class Saving:
    """The time in µs that a change would save a call, None where nothing tells, and where the number comes from."""

    us: float | None
    basis: str


UNKNOWN = Saving(None, "only a trial shows what it saves")


@dataclass(frozen=True)
class Found:
    """One place of one kind, before those alike are put together.

    Attributes:
        kind, title, why, change: as of an `Advice`; `why` may hold numbers and names, which then become ranges.
        steps: indices of the steps that it slows down.
        saving: what the change would save.
        where: names in the model; those of the steps if empty.
    """

    kind: str
    title: str
    why: str
    change: str
    steps: tuple[int, ...]
    saving: Saving
    where: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A program with what reports know of it.

    Attributes:
        program: compiled.
        folded: its steps with names, times and groups.
        ceilings: the program's target with its measured rates; None where they are not asked for.
        reasons: what rules said.
    """

    program: Executable
    folded: Folded
    ceilings: Target | None
    reasons: Reasons

    def products(self, *kinds: type) -> Iterator[tuple[int, Step, Node]]:
        """The steps whose product is one of some operations, with their index and that node."""
        for i, step in enumerate(self.program.steps):
            node = step.part.nodes[0]
            if isinstance(node.op, kinds) and step.decision is not None:
                yield i, step, node

    @property
    def total_us(self) -> float:
        """The time of all steps, as far as it is known."""
        return sum(t.us for t in self.folded.times if t.us is not None)

    def whole(self, steps: Sequence[int]) -> Saving:
        """All the time of steps."""
        times = [self.folded.times[i] for i in steps]
        known = [t.us for t in times if t.us is not None]
        return Saving(sum(known), SAID[times[0].basis]) if known else UNKNOWN

    def above_limit(self, step: int) -> Saving:
        """The time of a step that another kernel could save at most: all but the least that the machine's rates allow, where
        it was measured or the cost model expects it."""
        time = self.folded.times[step]
        if time.us is None or time.basis == "limit":
            return UNKNOWN
        least_us = 0.0 if self.ceilings is None else work_of(self.program.steps[step]).limit_us(self.ceilings)
        less = f" less {SAID['limit']}" if least_us else ""
        return Saving(time.us - least_us, f"at most {SAID[time.basis]}{less}") if time.us > least_us else UNKNOWN

    def part(self, step: int, fraction: float, why: str) -> Saving:
        """A part of a step's time; `why` says what else tells how large it is."""
        time = self.folded.times[step]
        if time.us is None:
            return UNKNOWN
        return Saving(time.us * fraction, f"by {SAID[time.basis]} and {why}")

    def instead(self, step: int, other: Node) -> Saving:
        """The saving if a step's product were another one, as the cost model expects both of the step's own kernel."""
        decision, time = self.program.steps[step].decision, self.folded.times[step]
        if decision is None or self.ceilings is None or time.us is None:
            return UNKNOWN
        kernel = decision.kernel
        ours = predicted_of(decision.problem, kernel.candidate, kernel.schedule, self.ceilings)
        theirs = predicted_of(problem_of(other), kernel.candidate, kernel.schedule, self.ceilings)
        if not ours or theirs is None:
            return UNKNOWN
        return self.part(step, max(0.0, 1 - theirs / ours), "what the cost model expects with and without it")


Finder = Callable[[Case], Iterator[Found]]
