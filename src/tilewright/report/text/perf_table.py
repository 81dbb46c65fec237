"""The performance report for people: what to change, steps, a summary by kind, totals, what fell back, what is unfused."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilewright.report.measure.perf import Measured
from tilewright.report.schema import Peer, Step
from tilewright.report.text.advice_text import print_advice
from tilewright.report.text.console import WIDE
from tilewright.report.text.explain_text import NOTHING_FELL_BACK, NOTHING_UNFUSED, fallback_title, print_traffic
from tilewright.report.text.groups_table import counts_words, print_groups, print_reasons
from tilewright.report.text.quantized_table import print_quantized
from tilewright.report.text.tables import Align, findings, heading, input_lines, line, noise_line, table
from tilewright.report.words import above_words, count, percent, us

NUMBERS: tuple[tuple[str, Align], ...] = (
    ("median µs", "right"),
    ("share %", "right"),
    ("of peak %", "right"),
    ("limit µs", "right"),
)


def print_perf(out: Console, measured: Measured, *, everything: bool = False) -> None:
    """Print the report; `everything` lists every step by itself, views too, where else those alike are one line."""
    report = measured.report
    noise_line(out, report.noise, report.limits_noise)
    line(out, f"{report.program} on {report.target}", style="bold")
    for said in counts_words(report.counts) if report.counts is not None else ():
        line(out, said)
    print_advice(out, report.advice, sum(s.time_us for s in report.steps), report.noise)
    input_lines(out, report.inputs)
    print_quantized(out, report.quantized, everything=everything)
    out.print()
    if everything:
        _steps(out, measured)
    else:
        print_groups(out, report.groups, report.layers, spread=True, limits_noise=report.limits_noise)
    out.print()
    _summary(out, report.steps)
    out.print()
    _totals(out, measured)
    for sentence in report.summary:
        line(out, sentence)
    print_traffic(out, report.traffic)
    print_reasons(out, report.groups, report.fallback)
    if report.fallback:
        findings(out, fallback_title(report.fallback, report.counts), report.fallback, NOTHING_FELL_BACK)
    if report.unfused:
        findings(out, "Unfused: work that belongs inside another step", report.unfused, NOTHING_UNFUSED)
    _against(out, report.against)


def _steps(out: Console, measured: Measured) -> None:
    steps = measured.report.steps
    total = sum(s.time_us for s in steps)
    out.print((_wide if out.width >= WIDE else _narrow)(measured, total))
    above = [memory for s, memory in zip(steps, measured.memory_bound, strict=True) if s.peak_fraction > 1]
    if above:
        line(out, f"Above 100 % of the limit: {above_words(above, measured.report.limits_noise)}.", style="dim")


def _wide(measured: Measured, total: float) -> Table:
    made = table(("#", "right"), ("kind", "left"), ("problem", "left"), ("candidate", "left"), *NUMBERS, ("bound by", "left"))
    for i, s in enumerate(measured.report.steps):
        bound = "" if not s.limit_us else "memory" if measured.memory_bound[i] else "compute"
        made.add_row(str(i), s.kind, Text(s.problem), Text(_candidate(s)), *_numbers(s, total), bound)
    return made


def _narrow(measured: Measured, total: float) -> Table:
    """Kind, candidate and problem in one column, on lines of their own."""
    made = table(("#", "right"), ("step", "left"), *NUMBERS)
    for i, s in enumerate(measured.report.steps):
        step = Text(f"{s.kind} by {s.candidate}\n").append(s.problem, style="dim")
        made.add_row(str(i), step, *_numbers(s, total))
    return made


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
    spread = f"median of {each}, {us(min(runs))} to {us(max(runs))}" if len(runs) > 1 else each
    made.add_row("Whole program", f"{us(report.total_us)} µs", spread)
    made.add_row("Sum of steps", f"{us(steps_us)} µs", "each timed by itself, its data still in cache where it fits")
    if report.rest:
        rest_us = report.total_us - steps_us
        made.add_row("Rest", f"{us(rest_us)} µs" if rest_us > 0 else "none", report.rest)
    if limit_us:
        made.add_row("Sum of limits", f"{us(limit_us)} µs", "the least that this machine's measured rates allow")
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
