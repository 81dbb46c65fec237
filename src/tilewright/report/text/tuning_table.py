"""The choices of `tune` as a table."""

from __future__ import annotations

from collections import Counter

from rich.console import Console

from tilewright.report.explain.choices import MEASURED, NOT_MEASURED, READ_BACK
from tilewright.report.schema import Tune
from tilewright.report.text.tables import line, section, table
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
