"""Output that several verbs share: a report as JSON or for people, and the times of a program."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from tilewright.cli.compile import Compiling, ends_of, kept_of, measured_ceilings, timing_s
from tilewright.cli.given import progress
from tilewright.cli.options import ARGUMENTS

if TYPE_CHECKING:
    import msgspec
    from rich.console import Console

    from tilewright.report.measure.inputs import Feed
    from tilewright.report.measure.perf import Measured
    from tilewright.report.schema import Explain, Perf, Quantized
    from tilewright.runtime.executable import Executable

R = TypeVar("R", bound="msgspec.Struct")
A = TypeVar("A", "Perf", "Explain")


def show(report: R, as_json: bool, printer: Callable[[Console, R], None]) -> None:
    """Print a report on standard output: as JSON, or as `printer` shows it to people."""
    if as_json:
        from tilewright.report.schema import to_json

        click.echo(to_json(report))
        return
    from tilewright.report.text.console import console

    printer(console(), report)


def by_command(report: A) -> A:
    """The report with the command that is running."""
    from msgspec import structs

    context = click.get_current_context()
    words = ["tilewright", str(context.info_name), *context.meta.get(ARGUMENTS, [])]
    return (
        report if report.made is None else structs.replace(report, made=structs.replace(report.made, command=shlex.join(words)))
    )


def measure_program(
    program: Executable,
    name: str,
    feeds: Sequence[Feed],
    how: Compiling,
    iterations: int | None,
    quantized: Quantized | None = None,
) -> Measured:
    """Time a program and its steps with a progress bar, and compare them with the machine's ceilings."""
    from tilewright.report.measure.perf import measure
    from tilewright.report.measure.timing import device_us

    ends = ends_of(how.budget_s)
    if how.mesh is not None:
        from tilewright.on_mesh import MeshProgram

        assert isinstance(program, MeshProgram)
        program.measure_links()
    ceilings = measured_ceilings(program, ends=ends)
    check = None if how.mesh is not None or not ceilings.peak_gops else partial(measured_ceilings, program, ends=ends)
    with progress("timing steps", kept=kept_of(how)) as bar:
        measured = measure(
            program,
            name,
            feeds,
            ceilings,
            iterations=iterations,
            within_s=timing_s(how.budget_s, ends - time.monotonic()),
            progress=bar,
            quantized=quantized,
            check=check,
            timer=getattr(program, "timer", device_us),
            ends=ends,
        )
    return replace(measured, report=by_command(measured.report))


def show_perf(measured: Measured, everything: bool, as_json: bool) -> None:
    """Print a measured program as JSON or as tables."""
    from tilewright.report.text.perf_table import print_perf

    show(measured.report, as_json, lambda out, _: print_perf(out, measured, everything=everything))
