"""Decisions for people: the candidate that does each problem, the ones that do not and why, the times expected and measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from tilewright.hardware.target import Target
from tilewright.report import schema
from tilewright.report.schema import Choice, RejectedChoice, Step
from tilewright.report.words import count, titled, us
from tilewright.schedule.candidate import MATRIX_LIBRARIES, Kernel, Schedule, discover, labelled
from tilewright.schedule.cost import predict
from tilewright.schedule.problem import AnyProblem
from tilewright.schedule.search import Decision, Rejected

WRONG = 2.0  # a prediction this many times off is said to be
_PRODUCTS = {"gemm": "matrix product", "attention": "attention"}
READ_BACK, MEASURED, NOT_MEASURED = "read back", "measured", "not measured"


def way_of(decision: Decision) -> str:
    """The way a choice came about: read back from the cache, measured now, or the first that agrees with the reference."""
    return READ_BACK if decision.recalled else MEASURED if decision.measured else NOT_MEASURED


def ways_of(decisions: Iterable[Decision]) -> dict[str, int]:
    """The number of choices that came about in each way; one for each distinct problem."""
    found = Counter(way_of(d) for d in {d.problem: d for d in decisions}.values())
    return {way: found[way] for way in (READ_BACK, MEASURED, NOT_MEASURED) if found[way]}


def provisional_words(decisions: Iterable[Decision]) -> str:
    """The words on choices that were made in noise, with the reason of the first; "" where there are none.

    Where numbers make several problems of steps that are alike, the words say why there are more choices than different steps.
    """
    problems = {d.problem: d.provisional for d in decisions}
    noises = [noise for noise in problems.values() if noise]
    if not noises:
        return ""
    apart = len({titled(str(p)) for p in problems}) < len(problems)
    each = " (one for each problem; those with other constants count apart)" if apart else ""
    several = f"{len(noises)} of {count(len(problems), 'choice')}{each}" if len(problems) > 1 else "the choice"
    verb = "were" if len(noises) > 1 else "was"
    return f"{several} {verb} made on a busy machine ({noises[0]}), and will be made again when it is quiet"


def ways_words(ways: dict[str, int]) -> list[str]:
    """The same as a sentence; none where nothing was chosen."""
    said = {
        READ_BACK: "read back from the cache",
        MEASURED: "measured now",
        NOT_MEASURED: "not measured: the first kernel that agrees with the reference",
    }
    parts = [f"{n:,} {said[way]}" for way, n in ways.items()]
    return [f"{count(sum(ways.values()), 'choice')}: {', '.join(parts)}."] if parts else []


def elsewhere_words(decisions: Iterable[Decision]) -> list[str]:
    """A sentence on kernels that were not checked at the shapes at hand; none where all were."""
    where = {d.problem: d.elsewhere for d in decisions}
    several = sum(map(bool, where.values()))
    if not several:
        return []
    of = f"{several} of {count(len(where), 'kernel')}" if len(where) > 1 else "the kernel"
    said = "serve" if several > 1 else "serves"
    return [f"{of[0].upper()}{of[1:]} {said} several shapes, and all elements were checked at others: explain says at which."]


def chosen_of(decision: Decision, target: Target | None = None) -> Choice:
    """The candidate that does a product; with a target, what the cost model expects of it there."""
    kernel = decision.kernel
    expected = predicted_us(decision, kernel.candidate, kernel.schedule, target)
    us, recalled, elsewhere = decision.time_us, decision.recalled, decision.elsewhere
    return Choice(kernel.candidate, str(kernel.schedule), us, expected, recalled, decision.provisional, elsewhere)


def rejected_of(decision: Decision, target: Target | None = None) -> list[RejectedChoice]:
    """The candidates that do not; what the cost model expects of those that could."""
    chosen, found = decision.kernel, list[RejectedChoice]()
    for r in decision.rejected:
        known = bool(r.schedule.knobs) or r.time_us is not None
        expected = predicted_us(decision, r.candidate, r.schedule, target) if known else None
        other = r.schedule.knobs if r.candidate == chosen.candidate else ()
        differs = Schedule(tuple(k for k in other if k not in chosen.schedule.knobs))
        found.append(RejectedChoice(r.candidate, r.why, r.time_us, settings(r.schedule), expected, r.kind, settings(differs)))
    return found


def settings(schedule: Schedule) -> str:
    """The settings of a point; "" where there are none."""
    return str(schedule) if schedule.knobs else ""


def predicted_us(decision: Decision, name: str, schedule: Schedule, target: Target | None) -> float | None:
    """The time in µs that the cost model expects; None where it knows nothing of the candidate or of its settings."""
    return predicted_of(decision.problem, name, schedule, target)


def predicted_of(problem: AnyProblem, name: str, schedule: Schedule, target: Target | None) -> float | None:
    """The time in µs that the cost model expects of a candidate's point for a problem; None where it knows nothing of it."""
    candidate = next((c for c in discover() if c.name == name), None)
    if candidate is None or target is None:
        return None
    try:
        expected = predict(candidate, problem, schedule, target)
    except Exception:  # the candidate's own account, of a point that it cannot build
        return None
    return None if expected is None else round(float(expected), 3)


def mispredictions(chosen: Choice, rejected: Sequence[RejectedChoice]) -> list[str]:
    """A sentence for each candidate that took more than twice, or less than half, of what was expected; none where the times
    are not reliable."""
    found: list[str] = []
    if chosen.provisional:
        return found
    timed = [(f"{chosen.candidate} (chosen)", chosen.predicted_us, chosen.time_us)]
    timed += [(labelled(r.candidate, r.schedule), r.predicted_us, r.time_us) for r in rejected]
    for name, expected, took in timed:
        off = off_by(expected, took)
        if expected and took and off is not None:
            said = f"{off:.1f} times as {'long' if took > expected else 'fast'}"
            found.append(f"{name}: {us(expected)} µs predicted, {us(took)} µs measured, {said}")
    return found


def off_by(predicted_us: float | None, took_us: float | None) -> float | None:
    """The factor by which a prediction was wrong, where it exceeds `WRONG`; None where it does not, or nothing is known."""
    if not predicted_us or not took_us:
        return None
    off = max(took_us / predicted_us, predicted_us / took_us)
    return off if off > WRONG else None


def attribution(steps: Sequence[Step]) -> dict[str, dict[str, int]]:
    """The number of each kind of product by candidate, the most first; all other steps but views count as "other"."""
    found: dict[str, Counter[str]] = {}
    for s in steps:
        if s.kind != "view":
            found.setdefault(s.kind if s.kind in _PRODUCTS else "other", Counter())[s.candidate] += 1
    return {kind: dict(found[kind].most_common()) for kind in (*_PRODUCTS, "other") if kind in found}


def is_generated(kernel: Kernel) -> bool:
    """Tell whether a kernel was generated, whole or in all its parts."""
    generated = {c.name for c in discover() if c.preference < MATRIX_LIBRARIES.start}
    return kernel.candidate in generated or (bool(kernel.parts) and all(who in generated for _, who in kernel.parts))


def why_not_generated(decision: Decision, kind: str) -> str:
    """The sentence that stopped the generated kernel that came furthest on a kind of device: one that was timed, else the
    general one; "" where none was asked."""
    generated = {c.name for c in discover(kind=kind) if c.preference < MATRIX_LIBRARIES.start}
    return _why_none_of(generated, fastest_first(decision.rejected))


def fastest_first(rejected: Sequence[Rejected]) -> list[Rejected]:
    """Those that were timed in the order of their times, then the others as they were considered."""
    return sorted(rejected, key=lambda r: math.inf if r.time_us is None else r.time_us)


def attribution_words(steps: Sequence[Step], kind: str) -> list[str]:
    """The same in sentences, on a kind of device; those done by a library say what kept the generated kernels from it."""
    generated = {c.name for c in discover(kind=kind) if c.preference < MATRIX_LIBRARIES.start}
    sentences: list[str] = []
    for what, by in attribution(steps).items():
        noun = _PRODUCTS.get(what, "other step")
        parts = [f"{n:,} by {name}" if len(by) > 1 else f"by {name}" for name, n in by.items()]
        said = f"{count(sum(by.values()), noun)}: {', '.join(parts)}."
        if what in _PRODUCTS:
            said += "".join(f" {name} where {why}." for name, why in _reasons(steps, what, by, generated))
        sentences.append(said)
    return sentences


def _reasons(steps: Sequence[Step], kind: str, by: dict[str, int], generated: set[str]) -> list[tuple[str, str]]:
    """The most frequent reason of each candidate that is no generated kernel for what it has."""
    found: list[tuple[str, str]] = []
    for name in by:
        if name in generated:
            continue
        why = Counter(_why_none_of(generated, s.rejected) for s in steps if s.kind == kind and s.candidate == name)
        reason = next((w for w, _ in why.most_common() if w), "")
        if reason:
            found.append((name, reason))
    return found


def _why_none_of(generated: set[str], rejected: Iterable[Rejected | schema.Rejected]) -> str:
    """The sentence that stopped the generated kernel that came furthest: the first that was timed, else the general one."""
    own = [r for r in rejected if r.candidate in generated]
    timed = next((r for r in own if r.kind in ("slower", "tie")), None)
    if timed is not None:
        return f"the generated kernel is {timed.why}"
    return next((f"{r.candidate} says: {r.why}" for r in sorted(own, key=lambda r: len(r.candidate))), "")
