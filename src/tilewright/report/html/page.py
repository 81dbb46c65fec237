"""The performance report as one page that needs nothing else: roofline, steps, why each choice was made, the machine."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from tilewright.report.html.roofline import Point, marker, roofline
from tilewright.report.measure.perf import Measured
from tilewright.report.schema import Device, Explain, Finding, Input, Peer, Product, Step
from tilewright.report.text.explain_text import headline, places, product_sections, who_is_who
from tilewright.report.text.perf_table import agreement, cut
from tilewright.report.text.tables import alike
from tilewright.report.words import count, percent, us

WIDE, SMALL = (1000, 520), (400, 400)
PROBLEM = 180  # characters of one that the table shows; the whole stands under the choices


def page(measured: Measured, explained: Explain, machine: Device) -> str:
    """The page as HTML text. Whatever comes from the program is escaped; the page may load nothing and run only its own script.

    Args:
        measured: the program's times.
        explained: the account of its choices.
        machine: where that was.
    """
    report = measured.report
    name = escape(_short(report.program))
    style = files("tilewright.report.html").joinpath("page.css").read_text("utf-8")
    script = files("tilewright.report.html").joinpath("page.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    body = [
        _head(measured),
        _against(report.against, report.total_us),
        _plot(measured),
        _steps(measured),
        _choices(explained),
        _findings("Fell back", report.fallback, "Nothing fell back: no product was left to the reference."),
        _findings("Unfused", report.unfused, "Nothing is unfused: no step only converts or moves what another step made."),
        _machine(machine),
        _inputs(report.inputs),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{name}: performance</title>'
        f"<style>{style}</style></head><body><main>\n" + "\n".join(body) + f"\n</main><script>{script}</script></body></html>\n"
    )


def _head(measured: Measured) -> str:
    report = measured.report
    limit = sum(s.limit_us for s in report.steps)
    figures = [(f"{us(report.total_us)} µs", f"a call, median of {len(measured.whole.us):,}")]
    if limit:
        figures.append((f"{us(limit)} µs", "least that the measured ceilings allow"))
    steps = sum(s.kind != "view" for s in report.steps)
    figures.append((f"{steps:,}", "step" if steps == 1 else "steps"))
    if report.steps_per_layer is not None:
        figures.append((str(report.steps_per_layer), "steps a layer"))
    said = "every product agrees with the reference" if report.verified else "a product was NOT verified"
    items = "".join(f"<li><b>{escape(value)}</b>{escape(what)}</li>" for value, what in figures)
    done = "".join(f"<p>{escape(text)}</p>" for text in report.summary)
    noise = f"<p><b>Times are not reliable: {escape(report.noise)}.</b></p>" if report.noise else ""
    return (
        f'<header><h1>{escape(_short(report.program))}</h1><p class="soft">{escape(report.program)} on '
        f"{escape(report.target)}</p>{noise}"
        f'<ul class="figures">{items}</ul>{done}<p>Verified: {escape(said)} on random data.</p></header>'
    )


def _short(program: str) -> str:
    """A file's name; a problem as it is."""
    return program if "@" in program else program.rpartition("/")[2]


def _table(heads: Sequence[str], rows: Iterable[str], attributes: str = "") -> str:
    """A table that scrolls where it does not fit; a head that begins with # is of numbers."""
    cells = "".join(f'<th class="n">{h[1:]}</th>' if h.startswith("#") else f"<th>{h}</th>" for h in heads)
    return f'<div class="scroll"><table{attributes}><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _row(*cells: str, attributes: str = "") -> str:
    return f"<tr{attributes}>{''.join(cells)}</tr>"


def _td(text: str, kind: str = "") -> str:
    """A cell of text, escaped."""
    return _cell(escape(text), kind)


def _cell(html: str, kind: str = "") -> str:
    return f'<td class="{kind}">{html}</td>' if kind else f"<td>{html}</td>"


def _number(text: str, value: float | None = None) -> str:
    """A cell of a number, and what to sort it by."""
    return f'<td class="n">{text}</td>' if value is None else f'<td class="n" data-v="{value:.9g}">{text}</td>'


def _against(peers: Sequence[Peer], own_us: float) -> str:
    if not peers:
        return ""
    own = next((p.own_us for p in peers if p.own_us is not None), own_us)
    rows = [_row("<th>tilewright</th>", _number(us(own)), _number("1.00"), _td(""), _td("the program as compiled"))]
    for p in peers:
        name = f"<th>{escape(p.name)}</th>"
        if p.time_us is None:
            rows.append(_row(name, _td(""), _td(""), _td(""), _td(p.why or "")))
        else:
            ratio = f"{p.ratio:.2f}" if p.ratio is not None else ""
            rows.append(_row(name, _number(us(p.time_us)), _number(ratio), _td(agreement(p)), _td(p.what)))
    return (
        "<section><h2>Beside others</h2><p>Timed in turns, each in a process of its own while the others are held; the ratio "
        "is the median over the rounds, above 1 where Tilewright is faster.</p>"
        + _table(("who", "#median µs", "#ratio", "results", "what it ran"), rows)
        + "</section>"
    )


def points(measured: Measured) -> list[Point]:
    """A point for each step that computes anything."""
    found: list[Point] = []
    for i, (s, ops) in enumerate(zip(measured.report.steps, measured.arithmetic, strict=True)):
        if ops and s.bytes and s.time_us > 0:
            rate = ops / s.time_us / 1e3
            title = f"{i}. {s.name}\n{s.problem}\n{s.candidate}: {us(s.time_us)} µs, {rate:,.1f} Gop/s"
            found.append(Point(ops / s.bytes, rate, s.kind, title, i))
    return found


def _plot(measured: Measured) -> str:
    shown = points(measured)
    t = measured.ceilings
    kinds = Counter(p.kind for p in shown)
    legend = "".join(
        f'<li><svg viewBox="-8 -8 16 16" aria-hidden="true">{marker(kind)}</svg>{escape(kind)} ({n:,})</li>'
        for kind, n in kinds.most_common()
    )
    silent = len(measured.report.steps) - len(shown)
    rest = f" {count(silent, 'step')} that only move or look at data are not shown." if silent else ""
    pictures = "".join(roofline(shown, t.peak_gops, t.read_gbps, *size) for size in (WIDE, SMALL)) if shown else ""
    return (
        "<section><h2>Roofline</h2><p>Each step by what it computes for a byte of memory traffic, and how fast. The lines are "
        "what this machine was measured to reach: its memory, sloping, and its matrix unit for each type that it multiplies. "
        "A point near a line has little left to gain; one above the memory's found its data in a cache.</p>"
        f'<ul class="legend">{legend}</ul>{pictures}'
        '<p class="soft">Products count two operations a multiply-add; everything else one an element for each operation, '
        f"seven for a norm, four for a softmax.{rest}</p></section>"
    )


def _steps(measured: Measured) -> str:
    steps = measured.report.steps
    total = sum(s.time_us for s in steps)
    found = zip(steps, measured.memory_bound, measured.arithmetic, strict=True)
    rows = [_step(i, s, total, memory, ops) for i, (s, memory, ops) in enumerate(found)]
    heads = ("##", "kind", "problem", "candidate", "#median µs", "#share %", "#of limit %", "#limit µs", "#Gop/s", "bound by")
    made = _table(heads, rows, ' class="sortable" id="steps"')
    return (
        "<section><h2>Steps</h2><p>In the order in which they run; a click on a title sorts. Each is timed by itself, with the "
        f"values that it has in the program.</p>{made}</section>"
    )


def _step(i: int, s: Step, total: float, memory: bool, ops: int) -> str:
    share = s.time_us / total if total else 0.0
    rate = ops / s.time_us / 1e3 if s.time_us > 0 else 0.0
    problem = f'<code title="{escape(s.problem)}">{escape(cut(s.problem, PROBLEM))}</code>'
    bound = "" if not s.limit_us else "memory" if memory else "compute"
    return _row(
        _number(str(i), i),
        _td(s.kind),
        _cell(f'{problem}<br><span class="soft">{escape(s.name)}</span>', "long problem"),
        _cell(f'<span title="{escape(s.schedule)}">{escape(s.candidate)}</span>'),
        _number(us(s.time_us), s.time_us),
        _number(percent(share), share),
        _number(percent(s.peak_fraction) if s.limit_us else "", s.peak_fraction if s.limit_us else -1),
        _number(us(s.limit_us) if s.limit_us else "", s.limit_us or -1),
        _number(f"{rate:,.1f}" if ops else "", rate),
        _td(bound),
        attributes=f' id="step-{i}"',
    )


def _choices(explained: Explain) -> str:
    if not explained.products:
        return ""
    who = "".join(f"<dt>{escape(name)}</dt><dd>{escape(what)}</dd>" for name, what in who_is_who(explained))
    return (
        "<section><h2>Choices</h2><p>What became of each product, products that are alike together: what is folded into it, "
        f"who does it, and why others do not.</p>{''.join(map(_product, explained.products))}"
        f"<details><summary>Who is who</summary><dl>{who}</dl></details></section>"
    )


def _product(p: Product) -> str:
    rows = "".join(
        f"<dt>{escape(title)}</dt><dd>{'<br>'.join(map(escape, lines))}</dd>" for title, lines in product_sections(p) if lines
    )
    times = f"{len(p.names)} x " if len(p.names) > 1 else ""
    names = escape(places(p.names))
    return (
        f'<details class="product"><summary>{times}<code>{escape(p.problem)}</code><span class="soft">{escape(headline(p))}'
        f'</span></summary><p class="soft">{names}</p><dl>{rows}</dl></details>'
    )


def _findings(title: str, found: Sequence[Finding], nothing: str) -> str:
    if not found:
        return f"<section><h2>{title}</h2><p>{escape(nothing)}</p></section>"
    rows: list[str] = []
    for op, times, why, cost, where in alike(found):
        what = f'{times}<code>{escape(op)}</code><br><span class="soft">{escape(where)}</span>'
        rows.append(_row(_cell(what, "long"), _number("" if cost is None else us(cost)), _td(why, "long")))
    return f"<section><h2>{title}</h2>{_table(('what', '#µs', 'why'), rows)}</section>"


def _machine(d: Device) -> str:
    caches = ", ".join(f"{name} {size / 1024:,.0f} KiB" for name, size in d.caches_bytes.items())
    chip = d.chip if d.exact_match else f"{d.chip}, the nearest family: there is no description of this very chip"
    said = [
        ("name", d.name),
        ("chip", chip),
        ("cores" if d.device == "cpu" else "SMs", f"{d.cores:,}"),
        ("caches", caches or "unknown"),
        ("memory", f"{d.read_gbps:,.1f} GB/s read, {d.copy_gbps:,.1f} GB/s copied (measured)"),
        ("features", " ".join(d.features)),
        *(("note", note) for note in d.notes),
    ]
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in said if value)
    units = [
        _row(
            *(_td(text) for text in (u.operand, u.acc, u.instruction)),
            _number(f"{u.ops_per_cycle:,}"),
            _number("" if u.measured_gops is None else f"{u.measured_gops:,.1f}"),
        )
        for u in d.units
    ]
    heads = ("multiplies", "into", "instruction", "#ops/cycle", "#measured Gop/s")
    return f'<section><h2>Machine</h2><dl class="machine">{rows}</dl>{_table(heads, units)}</section>'


def _inputs(inputs: Sequence[Input]) -> str:
    if not inputs:
        return ""
    flatters = ' <b class="warn">(filled: it flatters)</b>'
    rows = [
        _row(_td(i.name, "long"), _cell(f"<code>{escape(i.type)}</code>"), _cell(escape(i.data) + flatters * i.filled))
        for i in inputs
    ]
    return f"<section><h2>Inputs</h2>{_table(('name', 'type', 'data'), rows)}</section>"
