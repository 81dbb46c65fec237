"""The performance report for people: steps, a summary by kind, totals, what fell back, what is unfused."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilewright.report.measure.perf import Measured
from tilewright.report.schema import Peer, Step
from tilewright.report.text.console import WIDE
from tilewright.report.text.explain_text import NOTHING_FELL_BACK, NOTHING_UNFUSED
from tilewright.report.text.quantized_table import print_quantized
from tilewright.report.text.tables import Align, findings, heading, input_lines, line, noise_line, table
from tilewright.report.words import count, percent, us

FEW_ENOUGH = 60
MOST_EXPENSIVE = 40
# Characters of a problem that a table shows; --all and --json give it whole.
WIDE_PROBLEM, NARROW_PROBLEM = 180, 84
NUMBERS: tuple[tuple[str, Align], ...] = (
    ("median µs", "right"),
    ("share %", "right"),
    ("of peak %", "right"),
    ("limit µs", "right"),
)


def print_perf(out: Console, measured: Measured, *, everything: bool = False) -> None:
    """Print the report; `everything` lists views and every step of a long program."""
    report = measured.report
    noise_line(out, report.noise)
    line(out, f"{report.program} on {report.target}", style="bold")
    input_lines(out, report.inputs)
    print_quantized(out, report.quantized, everything=everything)
    out.print()
    _steps(out, measured, everything)
    out.print()
    _summary(out, report.steps)
    out.print()
    _totals(out, measured)
    for sentence in report.summary:
        line(out, sentence)
    findings(out, "Fell back", report.fallback, NOTHING_FELL_BACK)
    findings(out, "Unfused: work that belongs inside another step", report.unfused, NOTHING_UNFUSED)
    _against(out, report.against)


def _steps(out: Console, measured: Measured, everything: bool) -> None:
    steps = measured.report.steps
    listed = [i for i, s in enumerate(steps) if everything or s.kind != "view"]
    shown = listed
    if not everything and len(listed) > FEW_ENOUGH:
        dearest = sorted(listed, key=lambda i: -steps[i].time_us)[:MOST_EXPENSIVE]
        shown = sorted(dearest)
    total = sum(s.time_us for s in steps)
    out.print((_wide if out.width >= WIDE else _narrow)(measured, shown, total, everything))
    hidden = [steps[i] for i in range(len(steps)) if i not in set(shown)]
    if hidden:
        share = percent(sum(s.time_us for s in hidden) / total if total else 0.0)
        more = count(len(hidden), "more step")
        line(
            out,
            f"{more}, {share} % of the time, {'is' if len(hidden) == 1 else 'are'} not listed: --all lists them",
            style="dim",
        )
    if any(steps[i].peak_fraction > 1 for i in shown):
        line(out, "Above 100 %: the data stayed in a cache, or the kernel beats the library that set the peak.", style="dim")


def _wide(measured: Measured, shown: Sequence[int], total: float, whole: bool) -> Table:
    made = table(("#", "right"), ("kind", "left"), ("problem", "left"), ("candidate", "left"), *NUMBERS, ("bound by", "left"))
    for i in shown:
        s = measured.report.steps[i]
        problem = s.problem if whole else cut(s.problem, WIDE_PROBLEM)
        bound = "" if not s.limit_us else "memory" if measured.memory_bound[i] else "compute"
        made.add_row(str(i), s.kind, Text(problem), Text(_candidate(s) if whole else s.candidate), *_numbers(s, total), bound)
    return made


def _narrow(measured: Measured, shown: Sequence[int], total: float, whole: bool) -> Table:
    """Kind, candidate and problem in one column, on lines of their own."""
    made = table(("#", "right"), ("step", "left"), *NUMBERS)
    for i in shown:
        s = measured.report.steps[i]
        problem = s.problem if whole else cut(s.problem, NARROW_PROBLEM)
        step = Text(f"{s.kind} by {s.candidate}\n").append(problem, style="dim")
        made.add_row(str(i), step, *_numbers(s, total))
    return made


def cut(text: str, most: int) -> str:
    """A text's first characters, and a sign where there are more."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def _candidate(s: Step) -> str:
    return s.candidate if s.schedule in ("", "default") else f"{s.candidate} {s.schedule}"


def _numbers(s: Step, total: float) -> tuple[str, ...]:
    share = percent(s.time_us / total if total else 0.0)
    return us(s.time_us), share, *((percent(s.peak_fraction), us(s.limit_us)) if s.limit_us else ("", ""))


def _summary(out: Console, steps: Sequence[Step]) -> None:
    total = sum(s.time_us for s in steps)
    by_kind: dict[str, list[Step]] = {}
    for s in steps:
        by_kind.setdefault(s.kind, []).append(s)
    made = table(("kind", "left"), ("total ms", "right"), ("share %", "right"), ("steps", "right"), ("mean µs", "right"))
    for kind, group in sorted(by_kind.items(), key=lambda g: -sum(s.time_us for s in g[1])):
        spent = sum(s.time_us for s in group)
        share = percent(spent / total if total else 0.0)
        made.add_row(kind, f"{spent / 1e3:,.3f}", share, f"{len(group):,}", us(spent / len(group)))
    out.print(made)


def _totals(out: Console, measured: Measured) -> None:
    report = measured.report
    runs, calls = measured.whole.us, measured.whole.calls
    steps_us, limit_us = sum(s.time_us for s in report.steps), sum(s.limit_us for s in report.steps)
    made = Table.grid(padding=(0, 2))
    made.add_column()
    made.add_column(justify="right", no_wrap=True)
    made.add_column(overflow="fold")
    each = count(len(runs), "run") if calls == 1 else f"{count(len(runs), 'timing')} of {calls} calls in a row"
    spread = f"median of {each}, {us(min(runs))} to {us(max(runs))}"
    made.add_row("Whole program", f"{us(report.total_us)} µs", spread)
    made.add_row("Sum of steps", f"{us(steps_us)} µs", "each timed by itself, its data still in cache where it fits")
    if limit_us:
        made.add_row("Sum of limits", f"{us(limit_us)} µs", "what the measured ceilings of this machine allow")
    if report.steps_per_layer is not None:
        made.add_row("Steps per layer", f"{report.steps_per_layer}", "from one attention up to the next")
    if report.total_us:
        made.add_row("Rate", f"{1e6 / report.total_us:,.1f} /s", "")
    out.print(made)
    products = [s for s in report.steps if s.kind in ("gemm", "attention")]
    if products:
        said = "every product agrees with the reference on random data" if report.verified else "a product was NOT verified"
        line(out, f"Verified: {said}.")


def _against(out: Console, peers: Sequence[Peer]) -> None:
    """Print who else ran the program, and how long it took them."""
    if not peers:
        return
    heading(out, "Beside others, in turns, each in a process of its own")
    made = table(("who", "left"), ("median µs", "right"), ("ratio", "right"), ("results", "left"), ("what it ran", "left"))
    own = next((p.own_us for p in peers if p.own_us is not None), None)
    if own is not None:
        made.add_row("tilewright", us(own), "1.00", "", "the program as compiled")
    for p in peers:
        if p.time_us is not None:
            ratio = "" if p.ratio is None else f"{p.ratio:.2f}"
            made.add_row(p.name, us(p.time_us), ratio, agreement(p), Text(p.what))
        else:
            made.add_row(p.name, "", "", "", Text(p.why or ""))
    out.print(made)
    line(out, "A ratio is their time over Tilewright's, the median over the rounds: above 1 Tilewright is faster.", style="dim")


def agreement(p: Peer) -> str:
    """The distance of a peer's results from ours, in words."""
    if p.difference is None:
        return "of other shapes"
    return "equal" if p.difference == 0 else f"{p.difference:.1e} apart"
