"""The account of every product, as prose."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from tilewright.report.quantized_table import print_quantized
from tilewright.report.schema import Choice, Explain, Finding, Product, Refusal
from tilewright.report.tables import count, findings, hanging, heading, line, listing, us


def print_explain(out: Console, report: Explain) -> None:
    """Print the account."""
    products = sum(len(p.names) for p in report.products)
    line(out, f"{report.program} on {report.target}", style="bold")
    kinds = f", {count(len(report.products), 'different one')}" if len(report.products) != products else ""
    line(out, f"{count(products, 'product')} (matrix multiplications and attentions){kinds}.")
    kinds = ", ".join(f"{kind} {n:,}" for kind, n in report.steps.items())
    layer = f"; {report.steps_per_layer} a layer, from one attention up to the next" if report.steps_per_layer else ""
    line(out, f"{count(sum(report.steps.values()), 'step')}: {kinds}{layer}.")
    print_quantized(out, report.quantized)
    for i, p in enumerate(report.products, start=1):
        _product(out, i, p)
    out.print()
    findings(out, "Fell back", report.fallback, "Nothing fell back.")
    findings(out, "Dangling: work that belongs inside another step", report.dangling, "Nothing dangles.")
    if report.dangling or report.fallback:
        line(out, "Costs are what this machine's ceilings allow at best; `tilewright perf` measures them.", style="dim")


def _product(out: Console, number: int, p: Product) -> None:
    times = f"{len(p.names)} of them, alike but for constants and names: " if len(p.names) > 1 else ""
    heading(out, f"{number}. {p.problem}")
    line(out, f"{times}{listing(list(dict.fromkeys(p.names)))}", indent=3, style="dim")
    section(out, "Reads", p.operands)
    section(out, "Accumulates", [p.accumulates])
    for i, store in enumerate(p.stores, start=1):
        which = f", result {i} of {len(p.stores)}" if len(p.stores) > 1 else ""
        section(out, f"Then{which}", store.steps or ["nothing: the accumulator is the result"])
        section(out, "Writes", [store.writes])
    section(out, "Rules", ["; ".join(p.rules) or "none: it stands as it was read"])
    section(out, "Not folded", [_beside(f) for f in p.beside])
    section(out, "Rules that left it", p.left)
    section(out, "Done by", [f"{choice(p.chosen)}: {how(p.chosen, p.measured)}"])
    section(out, "Not by", refusals(p.rejected))


def _beside(f: Finding) -> str:
    cost = "" if f.cost_us is None else f" ({us(f.cost_us)} µs at best)"
    return f"{f.where}{cost}: {f.why}"


def section(out: Console, title: str, lines: Sequence[str]) -> None:
    """A title and its lines beside it."""
    for i, text in enumerate(lines):
        out.print(hanging(f"   {title if not i else '':<21}", text))


def choice(chosen: Choice) -> str:
    """A candidate and its settings."""
    return chosen.candidate if chosen.schedule == "default" else f"{chosen.candidate} ({chosen.schedule})"


def how(chosen: Choice, measured: bool) -> str:
    """Why a candidate was chosen."""
    if not measured or chosen.time_us is None:
        return "the first in order of preference that agrees with the reference; nothing was timed"
    return f"{us(chosen.time_us)} µs, the fastest that agrees with the reference"


def refusals(rejected: Sequence[Refusal]) -> list[str]:
    """The candidates that lost, timed ones first, each with why."""
    ordered = sorted(rejected, key=lambda r: (r.time_us is None, r.time_us or 0.0))
    return [f"{r.candidate}: {r.why}" for r in ordered]
