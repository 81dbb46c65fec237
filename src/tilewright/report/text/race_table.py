"""The report of `tilewright.race`: who is right, how fast, and why ours is what it is."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tilewright.report.schema import Contender, Race
from tilewright.report.text.explain_text import headline, lost_sections
from tilewright.report.text.tables import heading, input_lines, line, noise_line, section, table
from tilewright.report.words import percent, small, us


def print_race(out: Console, report: Race) -> None:
    """Print a row for each contender, what is wrong with those that are, and why our kernels were chosen."""
    noise_line(out, report.noise, report.limits_noise)
    line(out, f"{report.program} on {report.target}", style="bold")
    input_lines(out, report.inputs)
    out.print()
    made = table(
        ("contender", "left"), ("right", "left"), ("error", "right"), ("bound", "right"), ("25 % µs", "right"),
        ("median µs", "right"), ("75 % µs", "right"), ("rounds", "right"), ("ratio", "right"), ("of peak %", "right"),
    )  # fmt: skip
    for c in report.contenders:
        times = ["" if t is None else us(t) for t in (c.low_us, c.median_us, c.high_us)]
        ratio = "" if c.ratio is None else f"{c.ratio:.2f}x"
        peak = "" if c.peak_fraction is None else percent(c.peak_fraction)
        made.add_row(
            Text(c.name), "yes" if c.right else "NO", *_error(c), *times, f"{c.rounds:,}" if c.rounds else "", ratio, peak
        )
    out.print(made)
    line(out, f"{report.verdict} The least that this machine's rates allow is {us(report.limit_us)} µs.")
    line(out, "Times and ratios are medians over the rounds; a ratio is a time over ours.", style="dim")
    for c in report.contenders:
        if c.why is not None:
            section(out, c.name, [f"is out: {c.why}"])
        section(out, c.name, c.notes)
    for note in report.notes:
        line(out, f"Note: {note}.")
    for p in report.products:
        heading(out, f"Ours: {p.problem}")
        section(out, "Done by", [headline(p, report.limits_noise)])
        for title, lines in lost_sections(p.rejected, p.chosen):
            section(out, title, lines)


def _error(c: Contender) -> tuple[str, str]:
    if c.error is None or c.bound is None:
        return "", ""
    return small(c.error), small(c.bound)
