"""Attribution of a program's steps to candidates, in a line: how many products each has, and why not a generated kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tilewright.report.schema import Step
from tilewright.report.text.tables import count
from tilewright.schedule.candidate import discover

FIRST_LIBRARY = 10  # the least preference of a candidate that is not generated for the problem
_PRODUCTS = {"gemm": "matrix product", "attention": "attention"}


def attribution(steps: Sequence[Step]) -> dict[str, dict[str, int]]:
    """The number of each kind of product by candidate, the most first; all other steps but views count as "other"."""
    found: dict[str, Counter[str]] = {}
    for s in steps:
        if s.kind != "view":
            found.setdefault(s.kind if s.kind in _PRODUCTS else "other", Counter())[s.candidate] += 1
    return {kind: dict(found[kind].most_common()) for kind in (*_PRODUCTS, "other") if kind in found}


def attribution_words(steps: Sequence[Step]) -> list[str]:
    """The same in sentences; those done by a library say what kept the generated kernels from it."""
    generated = {c.name for c in discover() if c.preference < FIRST_LIBRARY}
    sentences: list[str] = []
    for kind, by in attribution(steps).items():
        noun = _PRODUCTS.get(kind, "other step")
        parts = [f"{n:,} by {name}" if len(by) > 1 else f"by {name}" for name, n in by.items()]
        said = f"{count(sum(by.values()), noun)}: {', '.join(parts)}."
        if kind in _PRODUCTS:
            said += "".join(f" {name} where {why}." for name, why in _reasons(steps, kind, by, generated))
        sentences.append(said)
    return sentences


def _reasons(steps: Sequence[Step], kind: str, by: dict[str, int], generated: set[str]) -> list[tuple[str, str]]:
    """The most frequent reason of each candidate that is no generated kernel for what it has."""
    found: list[tuple[str, str]] = []
    for name in by:
        if name in generated:
            continue
        why = Counter(_why_not_generated(s, generated) for s in steps if s.kind == kind and s.candidate == name)
        reason = next((w for w, _ in why.most_common() if w), "")
        if reason:
            found.append((name, reason))
    return found


def _why_not_generated(step: Step, generated: set[str]) -> str:
    """The sentence that stopped the generated kernel that came furthest: one that was timed, else the general one."""
    said = [(r.candidate.split(" ")[0], r.why) for r in step.rejected]
    own = [(name, why) for name, why in said if name in generated]
    timed = [why for _, why in own if why.startswith(("slower", "a tie"))]
    if timed:
        return f"the generated kernel is {timed[0]}"
    return next((f"{name} says: {why}" for name, why in sorted(own, key=lambda r: len(r[0]))), "")
