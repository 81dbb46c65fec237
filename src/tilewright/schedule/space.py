"""Spaces of points that candidates offer for a problem: who takes part, in which order, and what the cost model expects."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tilewright.deadline import considering
from tilewright.hardware.target import Target
from tilewright.schedule.bench import failure
from tilewright.schedule.candidate import (
    MATRIX_LIBRARIES,
    Candidate,
    Leading,
    Plan,
    Precompiled,
    Refusal,
    Schedule,
    concerns,
    discover,
    planned,
    unbuilt,
)
from tilewright.schedule.cost import predict
from tilewright.schedule.measure import Fault
from tilewright.schedule.problem import AnyProblem

# A generated kernel stands behind a library unmeasured, if it is expected to take this many times as long as the library and
# the microseconds in which torch is called.
PREDICTED_SLOWDOWN, TORCH_US = 1.5, 10.0
COUNTED = 1000  # points that are counted whatever the time: in 10 ms

# Sentences on candidates that did not come back from a problem in this process, by problem, device and name.
LOST: dict[tuple[AnyProblem, str, str], str] = {}


@dataclass
class Space:
    """The points of a candidate that were not tried yet; `behind`: why it stands behind a candidate of a higher preference."""

    candidate: Candidate
    plan: Plan
    points: Iterator[Schedule]
    behind: str = ""

    def left(self, until: float) -> tuple[int, bool] | None:
        """The number of points, and whether these are all: counting stops at `until`, by `time.perf_counter`. None where it
        means compiling them, as for a GPU's that are ranked by their machine code."""
        if isinstance(self.plan, Precompiled):
            return None
        count = 0
        try:
            for count, _ in enumerate(self.points, 1):
                if count % COUNTED == 0 and time.perf_counter() > until:
                    return count, False
        except Exception:
            return 0, True
        return count, True


def spaces_of(
    problem: AnyProblem,
    target: Target,
    candidates: Sequence[Candidate],
    reject: Callable[[str, Fault], object],
    *,
    timed: bool,
    built: bool = True,
) -> list[Space]:
    """The spaces of the candidates that take part, in the order in which they are tried. One that raises anything at all is
    out, and the compile goes on.

    Args:
        problem: what they are to do.
        target: the machine.
        candidates: those that are asked.
        reject: called with the name of each that is out, and why.
        timed: points will be timed; else the first that passes its check is taken.
        built: machine code may be made to put points in order.
    """
    spaces: list[Space] = []
    asked = [c for c in candidates if concerns(c, problem, target)]
    for candidate in sorted(asked, key=lambda c: c.preference):
        try:
            lost = LOST.get((problem, target.device, candidate.name))
            plan = Refusal(lost) if lost else planned(candidate, problem, target)
            if isinstance(plan, Refusal):
                reject(candidate.name, Fault(plan.kind, plan.why))
                continue
            space, point = Space(candidate, plan, iter(plan.schedules() if built else unbuilt(plan))), None
            if isinstance(plan, Leading):
                with considering():
                    point = plan.leading()
            if point is None:
                spaces.append(space)
            elif not timed:
                spaces.append(space)
                spaces.insert(0, Space(candidate, plan, iter((point,))))
            else:  # built first, for time may be over then
                space.points = itertools.chain((point,), (s for s in space.points if s != point))
                spaces.insert(0, space)
        except Exception as error:
            reject(candidate.name, Fault("refused", failure("failed to consider it", error)))
    return spaces if timed else _foreseen(spaces, problem, target)


def foremost(
    problem: AnyProblem, target: Target, candidates: Sequence[Candidate] | None = None
) -> tuple[Candidate, Schedule] | None:
    """The point that a search without a budget tries first: nothing is built. None if no candidate has one."""
    competing = list(candidates) if candidates is not None else discover()
    try:
        for space in spaces_of(problem, target, competing, lambda name, why: None, timed=False, built=False):
            with considering():
                for schedule in space.points:
                    return space.candidate, schedule
    except Exception:  # the candidate's own account of its space
        return None
    return None


def _foreseen(spaces: list[Space], problem: AnyProblem, target: Target) -> list[Space]:
    """The spaces for a search that times nothing: a library leads where a generated kernel is expected to take far longer, as
    one does that packs a right operand in each call for the sake of one row."""
    expected = [_expected_us(s, problem, target) for s in spaces]
    best = leader(spaces, expected)
    if best is None:
        return spaces
    ahead, others = spaces[best], [s for i, s in enumerate(spaces) if i != best]
    why = f"not tried: {ahead.candidate.name} is expected to take {expected[best]:,.1f} µs, this {expected[0]:,.1f}"
    others[0].behind = why
    return [ahead, *others]


def _expected_us(space: Space, problem: AnyProblem, target: Target) -> float | None:
    """The time in µs that the cost model expects of a space's first point; None where it says nothing."""
    first: tuple[Schedule, ...] = ()
    try:
        with considering():
            first = tuple(itertools.islice(space.points, 1))
            return predict(space.candidate, problem, first[0], target) if first else None
    except Exception as error:
        if not first:
            space.points = _failing(error)  # told where the space is entered
        return None
    finally:
        space.points = itertools.chain(first, space.points)


def leader(spaces: Sequence[Space], expected: Sequence[float | None]) -> int | None:
    """The place of the library that leads where the first one, a generated kernel, is expected to take far longer."""
    libraries = [i for i, s in enumerate(spaces) if s.candidate.preference in MATRIX_LIBRARIES and expected[i] is not None]
    best = min(libraries, key=lambda i: expected[i] or 0.0, default=None)
    if best is None or expected[0] is None or expected[0] <= PREDICTED_SLOWDOWN * (TORCH_US + (expected[best] or 0.0)):
        return None
    return best


def _failing(error: Exception) -> Iterator[Schedule]:
    """Points that cannot be asked for."""
    raise error
    yield
