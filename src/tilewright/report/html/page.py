"""The performance report as one page that needs nothing else: `page.html`, filled in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.report.explain.step_graph import StepGraph
from tilewright.report.html.roofline import SMALL, WIDE, Point, roofline
from tilewright.report.html.step_picture import MOST_BOXES, draw
from tilewright.report.html.template import fill, text_of
from tilewright.report.measure.perf import Measured
from tilewright.report.schema import Advice, Device, Difference, Explain, Made, Peer, Perf, Rejected, StepGroup
from tilewright.report.text.advice_text import saved_words
from tilewright.report.text.difference_table import WORDS
from tilewright.report.text.explain_text import (
    NOTHING_FELL_BACK,
    NOTHING_UNFUSED,
    fallback_title,
    product_sections,
    who_is_who,
)
from tilewright.report.text.perf_table import agreement
from tilewright.report.text.tables import alike, noise_words
from tilewright.report.words import count, size_words, us
from tilewright.schedule.candidate import labelled

MOST_PLACES = 4  # names that a piece of advice is about


@dataclass(frozen=True)
class Row:
    """A row of the table of steps: steps that are alike. Times are in µs; `key` is its number, by which others link to it."""

    key: int
    name: str
    kind: str
    problem: str
    candidate: str
    times: int
    total: float
    share: float
    least: float
    median: float
    most: float
    limit: float
    fraction: float
    gops: float
    bound: str


@dataclass(frozen=True)
class Account:
    """The account of a row: a line, titles each with its lines, its box in the graph, and each step with its time."""

    row: Row
    headline: str
    sections: list[tuple[str, list[str]]]
    box: int | None
    point: bool
    steps: list[tuple[int, float]]


@dataclass(frozen=True)
class Kind:
    """The time of a kind of step, and where its part of the bar begins."""

    kind: str
    us: float
    share: float
    begins: float
    steps: int
    limit: float


def page(
    measured: Measured, explained: Explain, machine: Device, graph: StepGraph, difference: Difference | None = None
) -> str:
    """The page as HTML text. Whatever comes from the program is escaped; the page may load nothing and run only its own script.

    Args:
        measured: the program's times.
        explained: the account of its choices.
        machine: where that was.
        graph: which step reads which.
        difference: from an earlier report to this one.
    """
    report = measured.report
    rows = [_row(i, g, measured) for i, g in enumerate(report.groups)]
    points = _points(rows, measured)
    drawing = draw(graph, report.groups, report.layers, [s.time_us for s in report.steps])
    plotted = {p.key for p in points}
    boxes = {} if drawing is None else drawing.box_of
    accounts = [_account(r, report, explained, boxes.get(r.key), r.key in plotted) for r in rows]
    group_of = {step: i for i, g in enumerate(report.groups) for step in g.steps}
    peaks, gbps = measured.ceilings.peak_gops, measured.ceilings.read_gbps
    silent = len(rows) - len(points)
    return fill(
        "page.html",
        name=_short(report.program),
        style=text_of("kinds.css") + text_of("page.css"),
        script=text_of("page.js"),
        report=report,
        noise=noise_words(report.noise, report.limits_noise),
        limits_noise=report.limits_noise,
        rest=_rest(report),
        sections=_sections(report, difference is not None),
        difference=difference,
        difference_words="" if difference is None else _difference_words(difference),
        altered_words={"graph": "other steps", **WORDS},
        figures=_figures(measured),
        saved_words=lambda advice: saved_words(advice.saves_us, sum(s.time_us for s in report.steps), report.noise),
        places=lambda advice: _places(advice, rows, group_of),
        peers=_peers(report.against, report.total_us),
        kinds=_kinds(report),
        sent_words=size_words,
        graph_words=_graph_words(report, graph, drawn=drawing is not None),
        drawing=drawing,
        rows=rows,
        largest=max((r.share for r in rows), default=0.0) or 1.0,
        every=[(i, s, graph.names[i], group_of.get(i)) for i, s in enumerate(report.steps)],
        legend=Counter(p.kind for p in points).most_common(),
        rooflines=[roofline(points, peaks, gbps, size) for size in (WIDE, SMALL)] if points and gbps else [],
        silent=f" {count(silent, 'row')} of the table that only move or look at data are not shown." if silent else "",
        accounts=accounts,
        who=who_is_who(explained),
        fallback=list(alike(report.fallback)),
        unfused=list(alike(report.unfused)),
        fallback_title=fallback_title(report.fallback, report.counts),
        nothing_fell_back=NOTHING_FELL_BACK,
        nothing_unfused=NOTHING_UNFUSED,
        machine=machine,
        machine_facts=_machine(machine),
        made_facts=[] if report.made is None else _made(report.made),
        footer="" if report.made is None else f"Tilewright {report.made.version}, {report.made.when}",
    )


def _short(program: str) -> str:
    """A file's name; a problem as it is."""
    return program if "@" in program else program.rpartition("/")[2]


def _sections(report: Perf, compared: bool) -> list[tuple[str, str]]:
    """The titles of the page, each with the name by which links find it."""
    found = [
        ("advice", "What you can change"),
        ("beside", "Beside others"),
        ("before", "Before and after"),
        ("kinds", "Time by kind"),
        ("graph", "Graph"),
        ("steps", "Steps"),
        ("ranks", "Between ranks"),
        ("roofline", "Roofline"),
        ("accounts", "Accounts"),
        ("fallback", fallback_title(report.fallback, report.counts)),
        ("unfused", "Unfused"),
        ("quantized", "Quantised layers"),
        ("machine", "Machine"),
        ("inputs", "Inputs"),
        ("made", "How this was made"),
    ]
    there = {
        "beside": bool(report.against),
        "before": compared,
        "ranks": bool(report.traffic),
        "quantized": report.quantized is not None,
        "inputs": bool(report.inputs),
    }
    return [(key, title) for key, title in found if there.get(key, True)]


def _figures(measured: Measured) -> list[tuple[str, str]]:
    report = measured.report
    limit = sum(s.limit_us for s in report.steps)
    found = [(f"{us(report.total_us)} µs", f"a call, median of {len(measured.whole.us):,}")]
    if limit:
        found.append((f"{us(limit)} µs", "least that the measured ceilings allow"))
    counts = report.counts
    if counts is not None:
        found.append((f"{counts.steps:,}", "step" if counts.steps == 1 else f"steps, {counts.groups:,} of them different"))
    if report.steps_per_layer is not None:
        found.append((str(report.steps_per_layer), "steps a layer"))
    return found


def _rest(report: Perf) -> str:
    """The sentence on the sum of the steps and what a call takes beside it."""
    if not report.rest or report.steps_us is None:
        return ""
    rest_us = report.total_us - report.steps_us
    rest = f"The rest of a call is {us(rest_us)} µs" if rest_us > 0 else "A call has no rest beside them"
    return f"The steps, each timed by itself, take {us(report.steps_us)} µs. {rest}: {report.rest}."


def _places(advice: Advice, rows: Sequence[Row], group_of: dict[int, int]) -> list[tuple[str, int | None]]:
    """The names that a piece of advice is about: of the rows of its steps, with their keys, and others that it gives."""
    keys = {rows[group_of[s]].name: group_of[s] for s in advice.steps if s in group_of}
    others = [name for name in advice.where if not any(row in name for row in keys)]
    shown: list[tuple[str, int | None]] = [*((name, None) for name in others), *keys.items()]
    rest = len(shown) - MOST_PLACES
    return shown if rest <= 0 else [*shown[:MOST_PLACES], (f"{rest:,} more", None)]


def _peers(peers: Sequence[Peer], own_us: float) -> list[dict[str, str]]:
    """The rows of the table of others, ours first."""
    if not peers:
        return []
    own = next((p.own_us for p in peers if p.own_us is not None), own_us)
    found = [{"name": "tilewright", "time": us(own), "ratio": "1.00", "results": "", "what": "the program as compiled"}]
    for p in peers:
        ran = p.time_us is not None
        time, ratio = us(p.time_us) if p.time_us is not None else "", f"{p.ratio:.2f}" if p.ratio is not None else ""
        results, what = (agreement(p), p.what) if ran else ("", p.why or "")
        found.append({"name": p.name, "time": time, "ratio": ratio, "results": results, "what": what})
    return found


def _difference_words(d: Difference) -> str:
    """The sentences on both times and on what they are of."""
    was, now = d.before.total_us, d.after.total_us
    said = f"Before is {d.before.file}: {d.before.program} on {d.before.target}."
    if was is not None and now is not None:
        ratio = "" if d.ratio is None else f", {d.ratio:.3f} times as long"
        ratio = f": {d.covered}" if d.covered else ratio
        said += f" A call took {us(was)} µs there, and takes {us(now)} here{ratio}."
    said += f" {count(d.before.steps, 'step')} before, {d.after.steps:,} after, of which {d.same:,} did not change."
    return f"{said} Times of before are not reliable: {d.before.noise}." if d.before.noise else said


def _kinds(report: Perf) -> list[Kind]:
    """The time of each kind of step, the longest first."""
    total = sum(s.time_us for s in report.steps) or 1.0
    found: list[Kind] = []
    begins = 0.0
    spent = Counter[str]()
    for s in report.steps:
        spent[s.kind] += s.time_us  # pyright: ignore[reportArgumentType] - a counter of floats
    for kind, time in spent.most_common():
        those = [s for s in report.steps if s.kind == kind]
        found.append(Kind(kind, time, time / total, begins, len(those), sum(s.limit_us for s in those)))
        begins += time / total
    return found


def _graph_words(report: Perf, graph: StepGraph, *, drawn: bool) -> str:
    became = f"{count(graph.operations, 'operation')} of the program became {count(len(graph.reads), 'step')}. "
    if not drawn:
        return (
            f"{became}More than {MOST_BOXES} boxes, layers folded, are no picture. `--picture F.json` writes the graph for "
            "Model Explorer, `--picture F.dot` for Graphviz."
        )
    layers = " Repeated layers are drawn once, with the time of all of them." if report.layers else ""
    return (
        f"{became}Drawn is what reads what, from the inputs down to the results; views are left out. A box is filled as far as "
        f"its time is of the longest, in the colour of its kind.{layers} A click leads to its account."
    )


def _row(key: int, g: StepGroup, measured: Measured) -> Row:
    first = g.steps[0]
    median = g.median_us or 0.0
    ops = measured.arithmetic[first]
    return Row(
        key=key,
        name=g.name,
        kind=g.kind,
        problem=g.problem,
        candidate=g.candidate,
        times=len(g.steps),
        total=g.total_us or 0.0,
        share=g.share or 0.0,
        least=g.least_us or 0.0,
        median=median,
        most=g.most_us or 0.0,
        limit=g.limit_us or 0.0,
        fraction=g.peak_fraction or 0.0,
        gops=ops / median / 1e3 if median > 0 else 0.0,
        bound="" if not g.limit_us else "memory" if g.memory_bound else "compute",
    )


def _points(rows: Sequence[Row], measured: Measured) -> list[Point]:
    """A point for each row that computes anything."""
    found: list[Point] = []
    for row in rows:
        first = measured.report.groups[row.key].steps[0]
        ops, moved = measured.arithmetic[first], measured.report.steps[first].bytes
        if ops and moved and row.median > 0:
            times = f" × {row.times:,}" if row.times > 1 else ""
            title = f"{row.name}: {row.kind}{times}, {us(row.median)} µs each, {row.gops:,.1f} Gop/s, by {row.candidate}"
            found.append(Point(ops / moved, row.gops, row.kind, title, row.key))
    return found


def _account(row: Row, report: Perf, explained: Explain, box: int | None, point: bool) -> Account:
    group = report.groups[row.key]
    steps = [(i, report.steps[i].time_us) for i in group.steps]
    if group.product is not None:
        product = explained.products[group.product]
        reached = f", {row.fraction:.0%} of the limit of {us(row.limit)} µs" if row.limit else ""
        said = f"{product.chosen.candidate}: {us(row.median)} µs{reached}"
        return Account(row, said, product_sections(product, report.limits_noise, while_choosing=True), box, point, steps)
    settings = [] if group.schedule in ("", "default") else [f"settings: {group.schedule}"]
    said = [("Done by", [f"{group.candidate}{f': {group.why}' if group.why else ''}", *settings])]
    refused = [_refused(r) for r in report.steps[group.steps[0]].rejected]
    return Account(row, f"by {group.candidate}", [*said, *([("Not by", refused)] if refused else [])], box, point, steps)


def _refused(r: Rejected) -> str:
    return f"{labelled(r.candidate, r.schedule)}: {r.why}"


def _machine(d: Device) -> list[tuple[str, str]]:
    caches = ", ".join(f"{name} {size / 1024:,.0f} KiB" for name, size in d.caches_bytes.items())
    chip = d.chip if d.exact_match else f"{d.chip}, the nearest family: there is no description of this very chip"
    memory = f"{d.read_gbps:,.1f} GB/s read, {d.copy_gbps:,.1f} GB/s copied (measured)" if d.read_gbps else "not measured"
    said = [
        ("name", d.name),
        ("chip", chip),
        ("cores" if d.device == "cpu" else "SMs", f"{d.cores:,}"),
        ("caches", caches or "unknown"),
        ("memory", memory),
        ("features", " ".join(d.features)),
        *(("note", note) for note in d.notes),
    ]
    return [(name, value) for name, value in said if value]


def _made(made: Made) -> list[tuple[str, str]]:
    said = [
        ("Tilewright", made.version),
        ("when", made.when),
        ("command", made.command),
        ("system", made.system),
        ("threads", f"{made.threads:,}"),
        ("with", ", ".join(f"{name} {version}" for name, version in made.packages.items())),
    ]
    return [(name, value) for name, value in said if value]
