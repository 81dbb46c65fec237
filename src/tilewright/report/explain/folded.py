"""Steps folded: those that are alike as one, with the layers that they repeat in; and the counts that every report gives."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.hardware.target import Target
from tilewright.ir.ops import Call, Collective
from tilewright.report.explain.choices import is_generated, predicted_us, settings, why_not_generated
from tilewright.report.explain.names import step_names, title_of
from tilewright.report.measure.work import candidate_of, work_of
from tilewright.report.schema import Basis, By, Counts, Repeat, StepGroup
from tilewright.report.words import DIGITS, ranged
from tilewright.runtime.executable import Executable
from tilewright.runtime.steps import Step
from tilewright.schedule.candidate import LAST_RESORT, discover
from tilewright.schedule.cost import roughly_us

PRODUCTS = ("gemm", "attention")
BASES: tuple[Basis, ...] = ("", "measured", "predicted", "limit")  # the last that holds for one of several is said of all
FEW = 400  # steps of a program in which layers are looked for that are nearly alike, which takes the square of that
ALIKE = 0.5  # of the steps of a run that ends the layers, the part that must be as in the others


@dataclass(frozen=True)
class Time:
    """A step's time in µs and how it is known; None where nothing is."""

    us: float | None
    basis: Basis


@dataclass(frozen=True)
class Folded:
    """A program's steps, folded.

    Attributes:
        names: of each step, in the model.
        groups, layers, counts: as reports have them.
        times: of each step.
    """

    names: list[str]
    groups: list[StepGroup]
    layers: list[Repeat]
    counts: Counts
    times: list[Time]

    def group_of(self, step: int) -> int | None:
        """The index of the group that a step is in; None of a view."""
        return next((i for i, g in enumerate(self.groups) if step in g.steps), None)


def expected_times(program: Executable, ceilings: Target | None) -> list[Time]:
    """The time of each step as far as it is known without a run: measured while its kernel was chosen, else expected by the
    cost model, else the least that the ceilings allow."""
    return [_expected(step, ceilings) for step in program.steps]


def _expected(step: Step, ceilings: Target | None) -> Time:
    if step.decision is not None and step.decision.time_us is not None:
        return Time(step.decision.time_us, "measured")
    if ceilings is None:
        return Time(None, "")
    if step.decision is not None:
        kernel = step.decision.kernel
        expected = predicted_us(step.decision, kernel.candidate, kernel.schedule, ceilings)
        if expected is not None:
            return Time(expected, "predicted")
    if ceilings.read_gbps:
        return Time(round(work_of(step).limit_us(ceilings), 3), "limit")
    return Time(None, "") if step.decision is None else Time(round(roughly_us(step.decision.problem, ceilings), 3), "predicted")


def _untimed(step: Step) -> str:
    """The reason why a step's time was not measured when its kernel was chosen."""
    if step.decision is None:
        return "no kernel was chosen for it"
    return "its code serves several shapes" if step.decision.checked is not None else "the budget had no time for it"


def fold(program: Executable, times: Sequence[Time], ceilings: Target | None) -> Folded:
    """The steps of a program with those that are alike together.

    Args:
        program: compiled.
        times: of each step, as measured or as `expected_times`.
        ceilings: the program's target with its measured rates; without them there are no limits.
    """
    names = step_names(program)
    listed = [i for i, s in enumerate(program.steps) if s.part.kind != "view"]
    keys = {i: likeness(program.steps[i]) for i in listed}
    runs = layers([keys[i] for i in listed], [program.steps[i].part.kind for i in listed])
    found = [Repeat(listed[r.first], r.count, r.length, _number([names[i] for i in listed], r)) for r in runs]
    inside = {i: n for n, r in enumerate(runs) for i in listed[r.first : r.first + r.count * r.length]}
    alike: dict[Hashable, list[int]] = {}
    for i in listed:
        alike.setdefault(keys[i], []).append(i)
    known = [t.us for i, t in enumerate(times) if i in keys and t.us is not None]
    total = sum(known)
    groups: list[StepGroup] = []
    products = 0
    for steps in alike.values():
        first = program.steps[steps[0]]
        product = products if first.part.kind in PRODUCTS else None
        products += product is not None
        groups.append(_group(program, steps, names, times, total, ceilings, inside.get(steps[0]), product))
    return Folded(names, groups, found, _counts(program, groups), list(times))


def likeness(step: Step) -> Hashable:
    """A key that steps share if they differ in their numbers and names alone."""
    schedule = "" if step.decision is None else settings(step.decision.kernel.schedule)
    calls = tuple(n.op.target for n in step.part.nodes if isinstance(n.op, Call))
    return step.part.kind, title_of(step), candidate_of(step), schedule, calls


def _group(
    program: Executable,
    steps: list[int],
    names: Sequence[str],
    times: Sequence[Time],
    total: float,
    ceilings: Target | None,
    repeat: int | None,
    product: int | None,
) -> StepGroup:
    step = program.steps[steps[0]]
    us = [t.us for t in (times[i] for i in steps) if t.us is not None]
    limits = [] if ceilings is None else [work_of(program.steps[i]).limit_us(ceilings) for i in steps]
    middle = statistics.median(us) if us else None
    limit = round(statistics.median(limits), 3) if limits and any(limits) else None
    bases: list[Basis] = [times[i].basis for i in steps]
    by = done_by(step)
    return StepGroup(
        name=ranged(names[i] for i in steps),
        steps=steps,
        kind=step.part.kind,
        problem=title_of(step),
        candidate=candidate_of(step),
        schedule="" if step.decision is None else settings(step.decision.kernel.schedule),
        by=by,
        why="" if by == "generated" else why_not(step, program.target.kind),
        total_us=round(sum(us), 3) if us else None,
        least_us=round(min(us), 3) if us else None,
        median_us=None if middle is None else round(middle, 3),
        most_us=round(max(us), 3) if us else None,
        basis=max(bases, key=BASES.index),
        share=round(sum(us) / total, 6) if us and total else None,
        limit_us=limit,
        peak_fraction=round(limit / middle, 4) if limit and middle else None,
        memory_bound=ceilings is not None and work_of(step).memory_bound(ceilings),
        repeat=repeat,
        product=product,
        untimed=next((_untimed(program.steps[i]) for i in steps if times[i].basis != "measured"), ""),
    )


def done_by(step: Step) -> By:
    """The kind of who does a step: a "generated" kernel, a "library", or a "fallback" to operations one by one."""
    if step.decision is None:
        return "generated" if step.part.kind in ("view", "write") else "fallback"
    kernel = step.decision.kernel
    last_resort = {c.name for c in discover() if c.preference >= LAST_RESORT}
    if kernel.candidate in last_resort or any(who in last_resort for _, who in kernel.parts):
        return "fallback"
    return "generated" if is_generated(kernel) else "library"


def why_not(step: Step, kind: str) -> str:
    """The sentence why no generated kernel does a step that none does."""
    if step.decision is not None and all(isinstance(n.op, Collective) for n in step.part.nodes):
        return "it is an operation between ranks alone, which their library does"
    if step.decision is not None:
        return why_not_generated(step.decision, kind) or "no generated kernel was faster"
    calls = [n.op for n in step.part.nodes if isinstance(n.op, Call)]
    libraries = ", ".join(dict.fromkeys(c.library for c in calls))
    return f"no operation of the graph expresses it; {libraries} runs it" if calls else "it writes at positions that are data"


def _counts(program: Executable, groups: Sequence[StepGroup]) -> Counts:
    return Counts(
        steps=sum(len(g.steps) for g in groups),
        products=sum(len(g.steps) for g in groups if g.kind in PRODUCTS),
        groups=len(groups),
        product_groups=sum(g.kind in PRODUCTS for g in groups),
        generated=sum(len(g.steps) for g in groups if g.by == "generated"),
        library=sum(len(g.steps) for g in groups if g.by == "library"),
        fallback=sum(len(g.steps) for g in groups if g.by == "fallback"),
        unfused=sum(s.part.unfused for s in program.steps),
    )


def _number(names: Sequence[str], r: Repeat) -> int | None:
    """The number that names of steps count the first layer as: where one of their numbers goes up by one with each layer."""
    said: Counter[int] = Counter()
    for j in range(r.first, r.first + r.length):
        split = [DIGITS.split(names[j + k * r.length]) for k in range(r.count)]
        if len({tuple(s[::2]) for s in split}) > 1:
            continue
        for column in zip(*(s[1::2] for s in split), strict=True):
            numbers = [int(n) for n in column]
            if numbers == list(range(numbers[0], numbers[0] + r.count)):
                said[numbers[0]] += 1
    return said.most_common(1)[0][0] if said else None


def layers(keys: Sequence[Hashable], kinds: Sequence[str]) -> list[Repeat]:
    """The runs of equal steps that follow each other, with a product in each: layers, in order.

    Before or after them, a run whose steps are of the same kinds, at least half of them equal, is a layer, too: the last layer
    of a transformer may write its result otherwise.
    """
    numbers: dict[Hashable, int] = {}
    ids = np.array([numbers.setdefault(k, len(numbers)) for k in keys], dtype=np.int64)
    found = _longest(ids, kinds) or (_nearly(ids, kinds) if len(ids) <= FEW else None)
    if found is None:
        return []
    found = _extended(found, ids, kinds)
    end = found.first + found.count * found.length
    before, after = layers(keys[: found.first], kinds[: found.first]), layers(keys[end:], kinds[end:])
    return [*before, found, *(Repeat(r.first + end, r.count, r.length) for r in after)]


def _longest(ids: np.ndarray, kinds: Sequence[str]) -> Repeat | None:
    """The repetition that covers most steps, of those the one with the shortest run."""
    best: Repeat | None = None
    for length in range(1, len(ids) // 2 + 1):
        equal = np.concatenate(([False], ids[:-length] == ids[length:], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            count = int(stop - start) // length + 1
            if count < 2 or (best is not None and count * length <= best.count * best.length):
                continue
            if any(k in PRODUCTS for k in kinds[start : start + length]):
                best = Repeat(int(start), count, length)
    return best


def _nearly(ids: np.ndarray, kinds: Sequence[str]) -> Repeat | None:
    """Two runs that are as alike as one at the end of others must be: two layers, the last of which ends otherwise."""
    for length in range(len(ids) // 2, 1, -1):
        for start in range(len(ids) - 2 * length + 1):
            first, second = slice(start, start + length), slice(start + length, start + 2 * length)
            same = kinds[first] == kinds[second] and any(k in PRODUCTS for k in kinds[first])
            if same and ids[start] == ids[start + length] and np.mean(ids[first] == ids[second]) >= ALIKE:
                return Repeat(start, 2, length)
    return None


def _extended(r: Repeat, ids: np.ndarray, kinds: Sequence[str]) -> Repeat:
    """The repetition with the runs at its ends that are nearly alike."""
    first, count, n = r.first, r.count, r.length
    pattern, shown = ids[first : first + n], list(kinds[first : first + n])
    for start in (first - n, first + count * n):
        if start < 0 or list(kinds[start : start + n]) != shown or n == 1:
            continue
        if np.mean(ids[start : start + n] == pattern) >= ALIKE:
            first, count = min(first, start), count + 1
    return Repeat(first, count, n)
