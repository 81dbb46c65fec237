"""Files and comparisons that `perf` gives beside its table: a page, a trace, other libraries."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from tilewright.cli.against import PEERS
from tilewright.cli.options import WRITTEN, F, all_of

if TYPE_CHECKING:
    from tilewright.report.measure.inputs import Feed
    from tilewright.report.measure.perf import Measured
    from tilewright.report.measure.trace_events import Phases
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
        html, trace: files to write.
        against: names of peers.
    """

    html: Path | None = None
    trace: Path | None = None
    against: tuple[str, ...] = ()

    def phases(self) -> Phases | None:
        """A listener for what compiling takes, where a trace will tell it."""
        if self.trace is None:
            return None
        from tilewright.report.measure.trace_events import Phases

        return Phases()

    def write(self, measured: Measured, program: Executable, feeds: Sequence[Feed], phases: Phases | None) -> None:
        """Write the files.

        Raises:
            InputError: one cannot be written.
        """
        from tilewright.files import write_whole
        from tilewright.report.measure.trace_events import traced, write_trace

        report = measured.report
        if self.trace is not None:
            from tilewright.report.measure.perf import bind

            calls = traced(program, bind(program, feeds))
            write_trace(self.trace, report, calls, [] if phases is None else phases.spans)
        if self.html is not None:
            from tilewright.report.explain.explain import explain_program
            from tilewright.report.explain.machine import describe_machine
            from tilewright.report.html.page import page

            explained = explain_program(program, report.program, measured.ceilings, report.quantized)
            (machine,) = describe_machine([program.target]).devices
            write_whole(self.html, page(measured, explained, machine).encode(errors="replace"))


_options = all_of(
    click.option("--html", type=WRITTEN, metavar="F", help="Write the report as a page that needs nothing else."),
    click.option("--trace", type=WRITTEN, metavar="F", help="Write timed calls, step by step, for Perfetto (JSON)."),
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
    def gathered(*, html: Path | None, trace: Path | None, against: tuple[str, ...], **given: Any) -> Any:
        if html is not None and trace is not None and html.resolve() == trace.resolve() and not html.is_char_device():
            raise click.UsageError("--html and --trace name one file")
        return f(reports=Reports(html, trace, against), **given)

    return _options(cast("F", gathered))
