"""The steps of a program in a table, those that are alike on one line, under the layers that they repeat in."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilewright.report.schema import Basis, Counts, Finding, Repeat, StepGroup
from tilewright.report.text.console import WIDE
from tilewright.report.text.tables import Align, hanging, heading, line, table
from tilewright.report.words import above_words, count, cut, listing, percent, titled, us

FEW_ENOUGH, DEAREST = 40, 30  # lines of a table, and those that it has of a longer program
NARROWEST = 30  # characters of a step's line where the table is narrow
ALIKE = "x is how many steps of the program, in layers and beside them, a line stands for"
BY_ITSELF = "a time is that of a step by itself, when its kernel was chosen; perf times all in their places"
SIGNS: dict[Basis, str] = {"measured": "", "predicted": "~", "limit": "≥ ", "": ""}
SAID: dict[Basis, str] = {
    "predicted": "~ is what the cost model expects",
    "limit": "≥ is the least that this machine's rates allow",
}


def print_groups(
    out: Console,
    groups: Sequence[StepGroup],
    layers: Sequence[Repeat],
    *,
    spread: bool,
    everything: bool = False,
    limits_noise: str = "",
) -> None:
    """Print a line for each distinct step.

    With `spread`, where steps were timed in their places, it has the least, median and most time of those that it stands for,
    if they differ. `limits_noise` says why limits are not reliable, "" if they are.
    """
    shown = list(range(len(groups)))
    if not everything and len(groups) > FEW_ENOUGH:
        shown = sorted(sorted(shown, key=lambda i: -(groups[i].total_us or 0.0))[:DEAREST])
    wide, in_place = out.width >= WIDE, spread
    spread = spread and any(groups[i].least_us != groups[i].most_us for i in shown)
    out.print((_wide if wide else _narrow)([(i + 1, groups[i]) for i in shown], layers, spread, out.width))
    hidden = [groups[i] for i in range(len(groups)) if i not in set(shown)]
    if hidden:
        share = percent(sum(g.share or 0.0 for g in hidden))
        line(out, f"{count(len(hidden), 'more distinct step')}, {share} % of the time: -v", style="dim")
    notes = [SAID[b] for b in ("predicted", "limit") if any(groups[i].basis == b for i in shown)]
    if not in_place and any(groups[i].basis == "measured" for i in shown):
        notes.insert(0, BY_ITSELF)
    notes += untimed_words([(i + 1, groups[i]) for i in shown])
    if any(groups[i].repeat is not None for i in shown):
        notes.append(ALIKE)
    above = [groups[i] for i in shown if (groups[i].peak_fraction or 0.0) > 1 and groups[i].basis == "measured"]
    if above:
        notes.append(f"above 100 % of the limit: {above_words((g.memory_bound for g in above), limits_noise)}")
    if notes:
        text = "; ".join(notes)
        line(out, f"{text if notes[0] is ALIKE else text[0].upper() + text[1:]}.", style="dim")  # the column is called x


def _numbers(spread: bool) -> tuple[tuple[str, Align], ...]:
    times = ("least µs", "median µs", "most µs") if spread else ("µs",)
    return tuple((name, "right") for name in ("x", *times, "share %", "of limit %"))


def _wide(shown: Sequence[tuple[int, StepGroup]], layers: Sequence[Repeat], spread: bool, width: int) -> Table:
    made = table(("#", "right"), ("step", "left"), ("problem", "left"), ("by", "left"), *_numbers(spread))
    kernel = max((len(g.candidate) for _, g in shown), default=0)
    left = width - kernel - (74 if spread else 50)
    longest = max((len(g.name) for _, g in shown), default=0) + 2
    names, seen = min(longest, 3 * left // 5), set[int]()
    for number, g in shown:
        indent = _indent(made, g, layers, seen)
        name = Text(indent + tail(g.name, names - len(indent)), no_wrap=True, overflow="ellipsis")
        made.add_row(
            str(number),
            name,
            Text(cut(g.problem, left - names), no_wrap=True, overflow="ellipsis"),
            Text(g.candidate),
            *_row(g, spread),
        )
    return made


def _narrow(shown: Sequence[tuple[int, StepGroup]], layers: Sequence[Repeat], spread: bool, width: int) -> Table:
    """Name and candidate in one column, with the problem on the next line."""
    left = max(NARROWEST, width - (66 if spread else 42))
    made, seen = table(("#", "right"), ("step", "left"), *_numbers(spread)), set[int]()
    for number, g in shown:
        indent = _indent(made, g, layers, seen)
        by = f" by {g.candidate}"
        step = Text(f"{indent}{tail(g.name, max(left - len(indent + by), 8))}{by}\n", no_wrap=True, overflow="ellipsis")
        made.add_row(str(number), step.append(indent + cut(g.problem, left - len(indent)), style="dim"), *_row(g, spread))
    return made


def _indent(made: Table, g: StepGroup, layers: Sequence[Repeat], seen: set[int]) -> str:
    """The indentation of a line; before the first of some layers the table gets a line that names these."""
    if g.repeat is not None and g.repeat not in seen:
        seen.add(g.repeat)
        made.add_row("", Text(layers_words(layers[g.repeat]), style="bold"))
    return "" if g.repeat is None else "  "


def untimed_words(groups: Sequence[tuple[int, StepGroup]]) -> list[str]:
    """The reasons why steps were not timed, each with the numbers of their lines."""
    alike: dict[str, list[str]] = {}
    for number, g in groups:
        if g.untimed:
            alike.setdefault(g.untimed, []).append(str(number))
    if len(alike) == 1 and all(g.untimed for _, g in groups):
        return [f"nothing was timed: {groups[0][1].untimed}"]
    return [f"not timed: {listing(numbers, FEW_ENOUGH)} ({why})" for why, numbers in alike.items()]


def layers_words(r: Repeat) -> str:
    """`layers 0 to 11, 7 steps in each`; `12 layers, 7 steps in each` where names do not number them."""
    which = f"{r.count:,} layers" if r.number is None else f"layers {r.number} to {r.number + r.count - 1}"
    return f"{which}, {count(r.length, 'step')} in each"


def _row(g: StepGroup, spread: bool) -> tuple[str, ...]:
    sign = SIGNS[g.basis]
    differ = g.least_us != g.most_us  # else it is one number
    times = (g.least_us if differ else None, g.median_us, g.most_us if differ else None) if spread else (g.median_us,)
    said = ["" if t is None else f"{sign}{us(t)}" for t in times]
    share = "" if g.share is None else percent(g.share)
    reached = "" if g.peak_fraction is None or g.basis == "limit" else percent(g.peak_fraction)
    return (f"{len(g.steps):,}" if len(g.steps) > 1 else "", *said, share, reached)


def print_reasons(out: Console, groups: Sequence[StepGroup], fallback: Sequence[Finding]) -> None:
    """Print why no generated kernel does a step, of each that none does; `fallback` lists some of them already."""
    said = {titled(f.op) for f in fallback}
    found = [(i, g) for i, g in enumerate(groups, start=1) if g.why and g.kind != "call" and g.problem not in said]
    if not found:
        return
    heading(out, "Not in generated kernels, and why")
    for i, g in sorted(found, key=lambda one: -(one[1].total_us or 0.0))[:FEW_ENOUGH]:
        out.print(hanging(f"{i:>3}. {g.candidate}", f"{g.name}: {g.why}"))


def counts_words(c: Counts) -> list[str]:
    """The counts in sentences: how many steps, what they are, who does them, what is unfused."""
    what = "a matrix multiplication or an attention" if c.products == 1 else "matrix multiplications and attentions"
    kinds = f"{count(c.products, 'product')} ({what})"
    other = c.steps - c.products
    same = "" if c.groups == c.steps else f", {c.groups:,} different"
    alike = "" if c.product_groups == c.products else f", {c.product_groups:,} different"
    parts = [f"{count(c.steps, 'step')}{same}: {kinds}{alike}" + (f", {other:,} other" if other else "") + "."]
    who = [f"{n:,} in {what}" for n, what in ((c.generated, "generated kernels"), (c.library, "libraries")) if n]
    if c.fallback:
        who.append(f"{c.fallback:,} in torch operation by operation, the reference or the source's own library")
    if c.generated == c.steps:
        who = ["all in generated kernels; nothing fell back"]
    elif not c.fallback:
        who.append("nothing fell back")
    loose = f"{c.unfused:,} unfused" if c.unfused else "nothing is unfused"
    text = f"{', '.join(who)}; {loose}."
    return [*parts, f"{text[0].upper()}{text[1:]}"] if c.steps else parts


def tail(text: str, most: int) -> str:
    """A text's last characters, and a sign where there are more: of a path of modules those that tell it from others."""
    return text if len(text) <= most else f"…{text[len(text) - max(most, 2) + 1 :].lstrip()}"
