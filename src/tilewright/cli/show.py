"""Output that several verbs share: a report as JSON or for people, and the times of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import click

from tilewright.cli.compile import Compiling, measured_ceilings, timing_s
from tilewright.cli.given import progress

if TYPE_CHECKING:
    import msgspec
    from rich.console import Console

    from tilewright.report.measure.inputs import Feed
    from tilewright.report.measure.perf import Measured
    from tilewright.report.schema import Quantized
    from tilewright.runtime.executable import Executable

R = TypeVar("R", bound="msgspec.Struct")


def show(report: R, as_json: bool, printer: Callable[[Console, R], None]) -> None:
    """Print a report on standard output: as JSON, or as `printer` shows it to people."""
    if as_json:
        from tilewright.report.schema import to_json

        click.echo(to_json(report))
        return
    from tilewright.report.text.console import console

    printer(console(), report)


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

    ceilings, check = measured_ceilings(program), partial(measured_ceilings, program)
    with progress("timing steps") as bar:
        return measure(
            program,
            name,
            feeds,
            ceilings,
            iterations=iterations,
            within_s=timing_s(how.budget_s),
            progress=bar,
            quantized=quantized,
            check=check,
        )


def show_perf(measured: Measured, everything: bool, as_json: bool) -> None:
    """Print a measured program as JSON or as tables."""
    from tilewright.report.text.perf_table import print_perf

    show(measured.report, as_json, lambda out, _: print_perf(out, measured, everything=everything))
