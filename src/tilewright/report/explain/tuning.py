"""The account of `tune`."""

from __future__ import annotations

from collections import Counter

from tilewright.report.explain.choices import settings, way_of
from tilewright.report.program import target_name
from tilewright.report.schema import Tune, Tuned
from tilewright.runtime.executable import Executable
from tilewright.schedule.cache import Cache
from tilewright.schedule.search import Decision


def describe_tuning(
    program: Executable,
    name: str,
    seconds: float,
    budget_s: float,
    cache: Cache | None,
    exported: str | None,
    imported: str | None,
) -> Tune:
    """Describe what was decided for each problem of a program."""
    decisions = [s.decision for s in program.steps if s.decision is not None]
    steps = Counter(d.problem for d in decisions)
    problems = [_tuned(d, steps[d.problem]) for d in {d.problem: d for d in decisions}.values()]
    file = cache.file if cache is not None else None
    where = None if file is None else str(file)
    return Tune(name, target_name(program.target), round(seconds, 2), budget_s, problems, where, exported, imported)


def _tuned(decision: Decision, steps: int) -> Tuned:
    kernel = decision.kernel
    return Tuned(
        str(decision.problem),
        kernel.candidate,
        settings(kernel.schedule),
        decision.time_us,
        way_of(decision),
        steps,
        decision.provisional,
    )
