"""The changes between two reports, those of the largest effect first."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tilewright.report.schema import Altered, AlteredStep, Difference
from tilewright.report.text.tables import heading, line, noise_line, section, table
from tilewright.report.words import count, cut, us

MOST = 20  # changes that are listed without --all
LITTLE = 0.002  # of the time before: a change of less is not listed, unless the graph changed
SHOWN = 8  # steps of one change without --all
LONGEST = 140  # characters of a problem and of settings without --all
WORDS = {"kernel": "other kernel", "schedule": "other settings", "time": "other time", "outside": "outside the steps"}


def print_difference(out: Console, d: Difference, *, everything: bool = False) -> None:
    """Print what changed; with `everything` all of it, problems and settings whole."""
    for name, side in (("before", d.before), ("after", d.after)):
        line(out, f"{name}: {side.file}, {side.program} on {side.target}", style="bold")
        noise_line(out, side.noise)
    for i, s in enumerate(d.settings):
        section(out, "" if i else "Differs in", [f"{s.what}: {s.before or 'none'} -> {s.after or 'none'}"])
    out.print()
    line(out, _totals(d))
    _changes(out, d, everything)
    if d.findings:
        heading(out, "Fell back, and unfused")
        for f in d.findings:
            times = f"{f.count} x " if f.count > 1 else ""
            line(out, f"{'now' if f.came else 'no more'} {f.what}: {times}{f.op}, at {f.where}", indent=2)
            line(out, f.why, indent=4, style="dim")
    if d.against:
        heading(out, "Beside others: their time, and how many times ours that is")
        for p in d.against:
            was, now = (
                "not run" if t is None or ratio is None else f"{us(t)} µs, {ratio:.2f}x"
                for t, ratio in ((p.before_us, p.before_ratio), (p.after_us, p.after_ratio))
            )
            line(out, f"{p.name}: {was} -> {now}", indent=2)


def _totals(d: Difference) -> str:
    """The sentence on both times."""
    sides, what = (d.before, d.after), "a call"
    times = [s.total_us for s in sides]
    if None in times:
        times, what = [s.steps_us for s in sides], "all steps, one by one"
    was, now = times
    said = f"{count(d.before.steps, 'step')} before, {d.after.steps:,} after, of which {d.same:,} did not change."
    if was is None or now is None:
        return f"No time is known. {said}"
    ratio = "" if d.ratio is None else f": {d.ratio:.3f} times as long"
    ratio = f": {d.covered}" if d.covered else ratio
    if not d.after.steps:
        said = f"{d.after.file} does not say what its steps are."
    return f"{us(was)} µs before, {us(now)} after, for {what}{ratio}. {said}"


def _changes(out: Console, d: Difference, everything: bool) -> None:
    before = d.before.total_us or d.before.steps_us or 0.0
    listed = [a for a in d.altered if everything or a.what == "graph" or abs(a.effect_us or 0.0) >= LITTLE * before]
    listed = listed if everything else listed[:MOST]
    if listed:
        out.print()
        made = table(
            ("effect µs", "right"), ("before", "right"), ("after", "right"), ("times", "right"), ("what changed", "left")
        )
        for a in listed:
            effect = ("~ " if a.covered else "") + _signed(a.effect_us)
            known = (effect, *("" if t is None else us(t) for t in (a.before_us, a.after_us)))
            made.add_row(*known, f"{a.count:,}" if a.what != "outside" else "", _told(a, None if everything else LONGEST))
        out.print(made)
        if any(a.covered and a.effect_us is not None for a in listed):
            line(out, "~: single runs differ by as much, so chance may have made it.", style="dim")
    left = [a for a in d.altered if a not in listed]
    if left:
        effect = sum(a.effect_us or 0.0 for a in left)
        more = count(len(left), "more change")
        line(out, f"{more}, {_signed(effect)} µs together, not listed: --all lists all", style="dim")


def _signed(effect: float | None) -> str:
    return "" if effect is None else f"{effect:+,.1f}"


def _told(a: Altered, most: int | None) -> Text:
    """A change in some lines: what it is, the steps, the reasons."""
    if a.what == "outside":
        return Text(f"{WORDS[a.what]}: what a call takes beyond the sum of its steps")
    if a.what == "graph":
        if a.before and a.after:
            title = "became"
        else:
            title = "came" if a.after else "went"
        said = Text(title, style="bold")
        for sign, steps in (("-", a.before), ("+", a.after)):
            for s in steps[: most and SHOWN]:
                times = f"{s.count} x " if s.count > 1 else ""
                said.append(f"\n{sign} {times}{s.kind} {_shown(s.name, most)}", style="not bold").append(_problem(s, most))
            if most and len(steps) > SHOWN:
                more = sum(s.count for s in steps[SHOWN:])
                said.append(f"\n{sign} {count(more, 'more step')}: --all lists them", style="not bold dim")
        return said
    old, new = a.before[0], a.after[0]
    title = WORDS[a.what] + (f", {old.candidate} -> {new.candidate}" if a.what == "kernel" else "")
    said = Text(title, style="bold").append(f": {new.kind} {_shown(new.name, most)}", style="not bold")
    said.append(_problem(new, most))
    for why in a.why:
        said.append(f"\n  {_shown(why, most)}", style="not bold")
    return said


def _problem(s: AlteredStep, most: int | None) -> Text:
    return Text(f"\n  {_shown(s.problem, most)}, by {s.candidate}", style="not bold dim")


def _shown(text: str, most: int | None) -> str:
    return text if most is None else cut(text, most)
