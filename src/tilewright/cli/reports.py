"""Files and comparisons that `perf` gives beside its table: a page, a picture, a trace, other libraries."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from tilewright.cli.against import PEERS
from tilewright.cli.options import WRITTEN, WRITTEN_JSON, WRITTEN_PAGE, F, all_of

if TYPE_CHECKING:
    from tilewright.report.explain.step_graph import StepGraph
    from tilewright.report.measure.inputs import Feed
    from tilewright.report.measure.perf import Measured
    from tilewright.report.schema import Explain, Perf
    from tilewright.runtime.executable import Executable


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(n.strip() for n in (value or "").split(",") if n.strip()))
    for name in found:
        if name not in PEERS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(PEERS)}", ctx, param)
    if value is not None and not found:
        raise click.BadParameter(f"name some of {', '.join(PEERS)}", ctx, param)
    return found


@dataclass(frozen=True)
class Reports:
    """The reports that were asked for.

    Attributes:
        html, picture, trace: files to write.
        before: the file and the content of an earlier report, to be compared with in the page.
        against: names of peers.
    """

    html: Path | None = None
    picture: Path | None = None
    trace: Path | None = None
    before: tuple[str, Perf] | None = None
    against: tuple[str, ...] = ()

    def write(self, measured: Measured, program: Executable, feeds: Sequence[Feed], *, first: bool = True) -> None:
        """Write the files. On a mesh all ranks make the calls of a trace, and the `first` one alone writes.

        Raises:
            InputError: one cannot be written.
        """
        from tilewright.files import write_whole
        from tilewright.report.measure.trace_events import traced, write_trace

        report = measured.report
        if self.trace is not None:
            from tilewright.report.measure.perf import bind

            calls = traced(program, bind(program, feeds))
            if first:
                write_trace(self.trace, report, calls)
        if not first:
            return
        if self.html is None and self.picture is None:
            return
        from tilewright.report.explain.step_graph import step_graph

        graph = step_graph(program)
        if self.picture is not None:
            write_picture(self.picture, report, graph)
        if self.html is not None:
            from tilewright.report.explain.explain import explain_program
            from tilewright.report.explain.machine import describe
            from tilewright.report.html.page import page

            explained = explain_program(program, report.program, measured.ceilings, report.quantized)
            machine = describe(measured.ceilings)
            difference = None
            if self.before is not None:
                from tilewright.report.explain.difference import compare

                difference = compare(self.before[1], report, (self.before[0], "this report"))
            text = page(measured, explained, machine, graph, difference)
            write_whole(self.html, text.encode(errors="replace"))


PICTURES = (".svg", ".json", ".dot")


def _picture(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.suffix.lower() not in PICTURES:
        raise click.BadParameter(f"{str(value)!r} ends in none of {', '.join(PICTURES)}", ctx, param)
    return value


def write_picture(path: Path, report: Perf | Explain, graph: StepGraph) -> None:
    """Write the graph of a program's steps as its suffix says: a picture (`.svg`), Model Explorer's JSON, Graphviz's DOT.

    Raises:
        InputError: the picture would have too many boxes, or cannot be written.
    """
    from tilewright.errors import InputError
    from tilewright.files import write_whole
    from tilewright.report.html.step_picture import MOST_BOXES, draw, picture_of_steps
    from tilewright.report.schema import Perf
    from tilewright.report.text.step_files import dot, model_explorer
    from tilewright.report.words import us

    times = {i: g.median_us for g in report.groups for i in g.steps}
    if isinstance(report, Perf):
        times = {i: s.time_us for i, s in enumerate(report.steps)}
    each = [times.get(i) for i in range(len(graph.names))]
    suffix = path.suffix.lower()
    if suffix != ".svg":
        write = dot if suffix == ".dot" else model_explorer
        write_whole(path, write(graph, report.groups, report.layers, each, report.program))
        return
    total = f"{us(report.total_us)} µs a call on " if isinstance(report, Perf) else ""
    drawing = draw(graph, report.groups, report.layers, each, report.program, f"{total}{report.target}")
    if drawing is None:
        hint = "--picture F.json for Model Explorer, or F.dot for Graphviz"
        raise InputError(f"the picture would have more than {MOST_BOXES} boxes", where=str(path), hint=hint)
    write_whole(path, picture_of_steps(drawing).encode(errors="replace"))


def _before(ctx: click.Context, param: click.Parameter, value: Path | None) -> tuple[str, Perf] | None:
    """The earlier report, read before the work that it is compared with."""
    if value is None:
        return None
    from tilewright.errors import InputError
    from tilewright.report.explain.difference import read_report
    from tilewright.report.schema import Perf

    report = read_report(value)
    if not isinstance(report, Perf):
        raise InputError("it is of explain, and times are compared", where=str(value), hint="what `perf --json` printed")
    return str(value), report


picture_option = click.option(
    "--picture",
    type=WRITTEN,
    callback=_picture,
    metavar="F",
    help="Write the graph of its steps: F.svg a picture, F.json for Model Explorer, F.dot for Graphviz.",
)
_options = all_of(
    click.option("--html", type=WRITTEN_PAGE, metavar="F.html", help="Write the report as a page that needs nothing else."),
    picture_option,
    click.option(
        "--before",
        type=click.Path(path_type=Path),
        callback=_before,
        metavar="F.json",
        help="With --html: compare with what an earlier `perf --json` printed.",
    ),
    click.option("--trace", type=WRITTEN_JSON, metavar="F.json", help="Write timed calls, step by step, for Perfetto (JSON)."),
    click.option(
        "--against",
        callback=_names,
        metavar="NAME,…",
        help=f"Time others beside it: {', '.join(PEERS)}; any of them, by commas.",
    ),
)


def report_options(f: F) -> F:
    """Gather the options above into one argument `reports`."""

    @functools.wraps(f)
    def gathered(
        *,
        html: Path | None,
        picture: Path | None,
        before: tuple[str, Perf] | None,
        trace: Path | None,
        against: tuple[str, ...],
        **given: Any,
    ) -> Any:
        if before is not None and html is None:
            raise click.UsageError("--before belongs to --html; `tilewright diff` compares two reports on the terminal")
        named = {"--html": html, "--picture": picture, "--trace": trace}
        for (one, first), (other, second) in combinations(named.items(), 2):
            if first is not None and second is not None and first.resolve() == second.resolve() and not first.is_char_device():
                raise click.UsageError(f"{one} and {other} name one file")
        return f(reports=Reports(html, picture, trace, before, against), **given)

    return _options(cast("F", gathered))
