"""The account of every product, as prose."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from rich.console import Console

from tilewright.report.explain.choices import off_by
from tilewright.report.schema import Choice, Explain, Finding, Product, RejectedChoice
from tilewright.report.text.quantized_table import print_quantized
from tilewright.report.text.tables import findings, hanging, heading, line, noise_line
from tilewright.report.words import count, listing, us
from tilewright.schedule.candidate import Candidate, discover, labelled

NOTHING_FELL_BACK = "Nothing fell back: no step was left to the slow reference or to the source's own library."
NOTHING_UNFUSED = "Nothing is unfused: no step only converts or moves what another step made."


def print_explain(out: Console, report: Explain) -> None:
    """Print the account."""
    noise_line(out, report.noise)
    products = sum(len(p.names) for p in report.products)
    line(out, f"{report.program} on {report.target}", style="bold")
    kinds = f", {count(len(report.products), 'different one')}" if len(report.products) != products else ""
    line(out, f"{count(products, 'product')} (matrix multiplications and attentions){kinds}.")
    kinds = ", ".join(f"{kind} {n:,}" for kind, n in report.steps.items())
    layer = f"; {report.steps_per_layer} a layer, from one attention up to the next" if report.steps_per_layer else ""
    line(out, f"{count(sum(report.steps.values()), 'step')}: {kinds}{layer}.")
    for note in report.notes:
        line(out, f"Note: {note}.")
    print_quantized(out, report.quantized)
    for i, p in enumerate(report.products, start=1):
        _product(out, i, p)
    out.print()
    findings(out, "Fell back", report.fallback, NOTHING_FELL_BACK)
    findings(out, "Unfused: work that belongs inside another step", report.unfused, NOTHING_UNFUSED)
    if report.unfused or report.fallback:
        line(out, "Costs are what this machine's ceilings allow at best; `tilewright perf` measures them.", style="dim")
    known = who_is_who(report)
    if known:
        heading(out, "Who is who")
        for name, what in known:
            out.print(hanging(f"   {name:<15}", what))
        line(
            out,
            "Settings (mr, nr, kc, …) and the notation of the titles: docs/glossary.md, docs/cli.md.",
            indent=3,
            style="dim",
        )


def _product(out: Console, number: int, p: Product) -> None:
    times = f"{len(p.names)} of them, alike but for constants and names: " if len(p.names) > 1 else ""
    heading(out, f"{number}. {p.problem}")
    line(out, f"{times}{places(p.names)}", indent=3, style="dim")
    for title, lines in product_sections(p):
        section(out, title, lines)


def places(names: Sequence[str]) -> str:
    """Some of the names by which the source calls products: fewer where one was joined from several and has all of theirs."""
    found = list(dict.fromkeys(names))
    return listing(found, 1 if ", " in found[0] else 4)


def product_sections(p: Product) -> list[tuple[str, list[str]]]:
    """The account of a product: titles, each with its lines."""
    found = [("Reads", p.operands), ("Accumulates", [p.accumulates])]
    which = [f", result {i} of {len(p.stores)}" if len(p.stores) > 1 else "" for i in range(1, len(p.stores) + 1)]
    for said, store in zip(which, p.stores, strict=True):
        found.append((f"Then{said}", store.steps or ["nothing: the accumulator is the result"]))
        found.append(("Writes", [store.writes]))
    found.append(("Folded by", ["; ".join(p.rules) or "no rule: it stands as it was read"]))
    found.append(("Not folded", [_beside(f) for f in p.beside]))
    found.append(("Rules that left it", p.left))
    found.append(("Done by", [headline(p), *_settings(p.chosen)]))
    found.append(("Not by", refusals(p.rejected, p.chosen)))
    return [(title, lines) for title, lines in found if lines]


def headline(p: Product) -> str:
    """The headline of a product: who does it, how fast, and how that stands beside the prediction and the machine's limit."""
    tied = any(r.time_us and p.chosen.time_us and r.time_us < p.chosen.time_us for r in p.rejected)
    said = [f"{p.chosen.candidate}: {how(p.chosen, p.measured, tied=tied)}"]
    if p.limit_us:
        bound = "memory" if p.memory_bound else "arithmetic"
        reached = p.limit_us / p.chosen.time_us if p.chosen.time_us else 0.0
        part = f", {reached:.0%} of it reached" if reached else ""
        if reached > 1.1 and not p.chosen.provisional:
            part += ", so that ceiling was measured too low" if not p.memory_bound else ", from a cache"
        said.append(f"the limit of this machine's {bound} is {us(p.limit_us)} µs{part}")
    return "; ".join(said)


def _settings(chosen: Choice) -> list[str]:
    return [] if chosen.schedule == "default" else [f"settings: {chosen.schedule}"]


def _beside(f: Finding) -> str:
    cost = "" if f.cost_us is None else f" ({us(f.cost_us)} µs at best)"
    return f"{f.where}{cost}: {f.why}"


def section(out: Console, title: str, lines: Sequence[str]) -> None:
    """A title and its lines beside it."""
    for i, text in enumerate(lines):
        out.print(hanging(f"   {title if not i else '':<21}", text))


def how(chosen: Choice, measured: bool, *, tied: bool = False) -> str:
    """The words on why a candidate was chosen; `tied` if another was faster by less than what counts."""
    expected = _expected(chosen.predicted_us, None if chosen.provisional else chosen.time_us)
    if not measured or chosen.time_us is None:
        return f"the first to be tried that agrees with the reference; nothing was timed{expected}"
    when = ", measured earlier and read back" if chosen.recalled else ""
    best = "as fast as any that agrees" if tied else "the fastest that agrees"
    if chosen.provisional:
        return f"{us(chosen.time_us)} µs on a busy machine{expected}, where none was seen to be faster{when}"
    return f"{us(chosen.time_us)} µs{expected}, {best} with the reference{when}"


def refusals(rejected: Sequence[RejectedChoice], chosen: Choice | None = None) -> list[str]:
    """The candidates that lost, timed ones first, each with why; those that cannot do the problem at all last.

    Of another point of the chosen candidate only the settings are named that differ.
    """
    best_us = None if chosen is None else chosen.time_us
    noisy = chosen is not None and bool(chosen.provisional)
    ordered = sorted(rejected, key=lambda r: (r.time_us is None, r.time_us or 0.0))
    alike: dict[str, list[str]] = {}
    for r in ordered:
        alike.setdefault(_lost(r, best_us, noisy=noisy), []).append(_beside_chosen(r, chosen))
    return [f"{', '.join(dict.fromkeys(names))}: {why}" for why, names in alike.items()]


def _beside_chosen(r: RejectedChoice, chosen: Choice | None) -> str:
    """A candidate and its settings, as far as they are not those chosen."""
    if chosen is not None and r.differs:
        return f"{r.candidate} with {r.differs}"
    return labelled(r.candidate, r.schedule)


def _lost(r: RejectedChoice, best_us: float | None, *, noisy: bool) -> str:
    """The words why one lost; in noise the cost model is not held to its time."""
    expected = _expected(r.predicted_us, None if noisy else r.time_us)
    if r.time_us is None or not best_us:
        return f"{r.why}{expected}"
    if r.time_us <= best_us:
        tie = "not told apart on a busy machine" if noisy else "a tie"
        return f"{us(r.time_us)} µs{expected}, {tie}: the earlier one is kept"
    return f"{us(r.time_us)} µs{expected}, {r.time_us / best_us:.2f} times as long"


def _expected(predicted_us: float | None, took_us: float | None) -> str:
    """The cost model's expectation, and the factor by which it was wrong if that is more than twofold."""
    if not predicted_us:
        return ""
    off = off_by(predicted_us, took_us)
    wrong = "" if off is None else f": wrong by a factor of {off:.1f}"
    return f" ({us(predicted_us)} predicted{wrong})"


def who_is_who(report: Explain) -> list[tuple[str, str]]:
    """The candidates that the account names, each with what it is in its own words."""
    named: set[str] = set()
    for p in report.products:
        for said in (p.chosen.candidate, p.chosen.schedule, *(labelled(r.candidate, r.schedule) for r in p.rejected)):
            named.update(re.findall(r"\w+", said))
    return [(c.name, _described(c)) for c in discover() if c.name in named]


def _described(candidate: Candidate) -> str:
    """The first line that its module, or of a plug-in its plan, says of it; and a plug-in's package."""
    about = sys.modules.get(candidate.plan.__module__)
    lines = ((about and about.__doc__) or candidate.plan.__doc__ or "").strip().splitlines()
    said = [lines[0].rstrip(".")] if lines else []
    return ", ".join([*said, *([f"of the package {candidate.package}"] if candidate.package else [])])
