"""Advice on what to change in the model, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilewright.report.schema import Advice
from tilewright.report.text.tables import heading, line
from tilewright.report.words import percent, us

TITLE = "What you can change, by what it saves"
NOTHING = "What you can change: nothing was found in this model that costs time without need."


def print_advice(out: Console, advice: Sequence[Advice], total_us: float, noise: str) -> None:
    """Print the advice, what saves most first, as `saved_words` says it."""
    if not advice:
        out.print()
        line(out, NOTHING)
        return
    heading(out, TITLE)
    for number, a in enumerate(advice, start=1):
        about = saved_words(a.saves_us, total_us, noise)
        saved = f": saves about {about}" if about else ""
        head = Table.grid(padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(overflow="fold")
        said = Text(f"{a.title}{saved}", style="bold").append(f"{', ' if saved else ': '}{a.basis}", style="not bold")
        head.add_row(Text(f"{number:>3}."), said)
        out.print(head)
        line(out, f"at {', '.join(a.where)}", indent=5, style="dim")
        line(out, f"{a.why}. Instead: {a.change}.", indent=5)


def saved_words(saves_us: float | None, total_us: float, noise: str) -> str:
    """The time that a change saves: in µs, and in per cent of the sum of all steps; "" where it is not known.

    Args:
        saves_us: that time.
        total_us: the time of all steps, 0 if it is not known.
        noise: why times are not reliable, "" if they are. A busy machine makes all steps longer alike, so that per cent alone
            are given.
    """
    if saves_us is None or (noise and not total_us):
        return ""
    share = f"{percent(saves_us / total_us)} % of all steps" if total_us else ""
    if noise:
        return share
    return f"{us(saves_us)} µs{f' ({share})' if share else ''}"
