"""Output that several verbs share: a report as JSON, and the times of a program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from tilewright.cli.compile import measured_ceilings, progress

if TYPE_CHECKING:
    import msgspec

    from tilewright.report.measure.inputs import Feed
    from tilewright.report.measure.perf import Measured
    from tilewright.report.schema import Quantized
    from tilewright.runtime.executable import Executable


def measure_program(
    program: Executable, name: str, feeds: Sequence[Feed], iterations: int | None, quantized: Quantized | None = None
) -> Measured:
    """Time a program and its steps with a progress bar, and compare them with the machine's ceilings."""
    from tilewright.report.measure.perf import measure

    ceilings, check = measured_ceilings(program), partial(measured_ceilings, program)
    with progress("timing steps") as show:
        return measure(program, name, feeds, ceilings, iterations=iterations, progress=show, quantized=quantized, check=check)


def show_perf(measured: Measured, everything: bool, as_json: bool) -> None:
    """Print a measured program as JSON or as tables."""
    if as_json:
        print_json(measured.report)
        return
    from tilewright.report.text.console import console
    from tilewright.report.text.perf_table import print_perf

    print_perf(console(), measured, everything=everything)


def print_json(report: msgspec.Struct) -> None:
    """Print a report as JSON on standard output."""
    from tilewright.report.schema import to_json

    click.echo(to_json(report))
