"""The accounts of `tune` and `cache info`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console

from tilewright.report.explain.choices import MEASURED, NOT_MEASURED, READ_BACK, way_of
from tilewright.report.program import target_name
from tilewright.report.schema import CacheInfo, Refused, Tune, Tuned
from tilewright.report.text.explain_text import section
from tilewright.report.text.tables import count, line, table, us
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
    schedule = str(kernel.schedule) if kernel.schedule.knobs else ""
    return Tuned(str(decision.problem), kernel.candidate, schedule, decision.time_us, way_of(decision), steps)


def print_tuning(out: Console, report: Tune) -> None:
    """Print it, the problem that takes longest first."""
    line(out, f"{report.program} on {report.target}", style="bold")
    made = table(("µs", "right"), ("steps", "right"), ("", "left"), ("problem", "left"), ("done by", "left"))
    for p in sorted(report.problems, key=lambda p: -(p.time_us or 0) * p.steps):
        by = f"{p.candidate} ({p.schedule})" if p.schedule else p.candidate
        made.add_row("" if p.time_us is None else us(p.time_us), str(p.steps), p.how, p.problem, by)
    out.print(made)
    ways = Counter(p.how for p in report.problems)
    parts = ", ".join(f"{ways[way]} {way}" for way in (MEASURED, READ_BACK, NOT_MEASURED) if ways[way])
    line(out, f"{count(len(report.problems), 'problem')} in {report.seconds:.1f} s: {parts or 'none'}.")
    section(out, "Kept in", [report.cache or "nothing is kept"])
    if report.exported is not None:
        section(out, "Written", [report.exported])


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
        refused=[Refused(r.candidate, r.problem, r.why, _time(r.made_s)) for r in cache.refusals()],
    )


def _counted(names: Sequence[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def print_cache(out: Console, report: CacheInfo) -> None:
    """Print it."""
    if report.path is None:
        line(out, f"Decisions are not kept: {report.unusable}.")
        return
    section(out, "Decisions", [f"{report.records:,} in {report.bytes / 1024:,.0f} KiB: {report.path}"])
    for title, counted in (("By chip", report.by_chip), ("By version", report.by_version)):
        section(out, title, [f"{number:,}  {name}" for name, number in counted.items()])
    if report.oldest is not None:
        section(out, "Made", [f"{report.oldest} to {report.newest}"])
    section(out, "Crashed or hung", [f"{r.candidate} on {r.problem}, {r.when}: {r.why}" for r in report.refused])
