"""The accounts of `tune` and `cache info`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from tilewright.report.explain.choices import settings, way_of
from tilewright.report.program import target_name
from tilewright.report.schema import CacheInfo, LostCandidate, Tune, Tuned
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


def describe_cache(cache: Cache | None) -> CacheInfo:
    """Describe the records that are kept, and where."""
    if cache is None:
        return CacheInfo(None, "there is no folder for it", 0, 0, {}, {}, None, None)
    records = cache.records()
    made = sorted(r.made_s for r in records)
    return CacheInfo(
        path=None if cache.file is None else str(cache.file),
        unusable=cache.unusable,
        records=len(records),
        bytes=cache.bytes(),
        by_chip=_counted([r.key.chip for r in records]),
        by_version=_counted([r.key.tilewright for r in records]),
        oldest=_time(made[0]) if made else None,
        newest=_time(made[-1]) if made else None,
        refused=[LostCandidate(r.candidate, r.problem, r.why, _time(r.made_s)) for r in cache.lost()],
    )


def _counted(names: Sequence[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
