"""The choices of `tune` and the records of `cache info`, as tables."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from tilewright.report.explain.choices import MEASURED, NOT_MEASURED, READ_BACK
from tilewright.report.schema import CacheInfo, Tune
from tilewright.report.text.explain_text import section
from tilewright.report.text.tables import line, table
from tilewright.report.words import count, us
from tilewright.schedule.candidate import labelled


def print_tuning(out: Console, report: Tune) -> None:
    """Print the choices of a program, the problem that takes longest first."""
    line(out, f"{report.program} on {report.target}", style="bold")
    made = table(("µs", "right"), ("steps", "right"), ("", "left"), ("problem", "left"), ("done by", "left"))
    for p in sorted(report.problems, key=lambda p: -(p.time_us or 0) * p.steps):
        by = labelled(p.candidate, p.schedule)
        made.add_row("" if p.time_us is None else us(p.time_us), str(p.steps), p.how, p.problem, by)
    out.print(made)
    ways = Counter(p.how for p in report.problems)
    parts = ", ".join(f"{ways[way]} {way}" for way in (MEASURED, READ_BACK, NOT_MEASURED) if ways[way])
    line(out, f"{count(len(report.problems), 'problem')} in {report.seconds:.1f} s: {parts or 'none'}.")
    noisy = [p.provisional for p in report.problems if p.provisional]
    if noisy:
        line(out, f"{count(len(noisy), 'choice')} made on a busy machine ({noisy[0]}): chosen again when it is quiet.")
    section(out, "Kept in", [report.cache or "nothing is kept"])
    if report.exported is not None:
        section(out, "Written", [report.exported])


def print_cache(out: Console, report: CacheInfo) -> None:
    """Print what is kept, and where."""
    if report.path is None:
        line(out, f"Decisions are not kept: {report.unusable}.")
        return
    section(out, "Decisions", [f"{report.records:,} in {report.bytes / 1024:,.0f} KiB: {report.path}"])
    for title, counted in (("By chip", report.by_chip), ("By version", report.by_version)):
        section(out, title, [f"{number:,}  {name}" for name, number in counted.items()])
    if report.oldest is not None:
        section(out, "Made", [f"{report.oldest} to {report.newest}"])
    section(out, "Crashed or hung", [f"{r.candidate} on {r.problem}, {r.when}: {r.why}" for r in report.refused])
    if report.programs:
        section(out, "Programs", [f"{report.programs:,} in {report.programs_bytes / 2**20:,.0f} MiB"])
