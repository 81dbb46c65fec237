"""The command line: read, run, verify, perf, explain, devices; `gemm`, `tune` and `cache` are defined beside it.

Nothing but click is imported before a verb runs, so `tilewright --help` answers at once.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from tilewright import __version__
from tilewright.cli.cache import cache, tune
from tilewright.cli.compile import (
    Compiling,
    compile_options,
    compile_program,
    dump_option,
    load_program,
    make_feeds_of,
    measured_ceilings,
    progress,
    rtol_option,
)
from tilewright.cli.errors import DIFFERS, Group, traceback_option
from tilewright.cli.gemm import gemm
from tilewright.cli.options import (
    NOT_NEGATIVE,
    WRITTEN,
    Command,
    common_options,
    everything_option,
    file_options,
    fill_options,
    inputs_option,
    iterations_option,
)
from tilewright.cli.reports import Reports, beside, report_options, with_source
from tilewright.cli.show import measure_program, print_json, show_perf

if TYPE_CHECKING:
    import numpy as np

    from tilewright.runtime.executable import Executable


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tilewright")
@traceback_option
def cli() -> None:
    """A matrix-multiplication compiler: XLA HLO, StableHLO, ONNX and PyTorch programs in, every matmul done the fastest way
    that was checked.

    FILE is an .hlo, .mlir, .stablehlo or .onnx file, or a .tw file as `read` prints it.

    Exit codes: 0 fine; 1 `verify` or `gemm` found a difference; 2 bad input or usage; 70 a bug in Tilewright; 130 interrupted.
    """


@cli.command(cls=Command)
@file_options
@common_options
def read(file: Path, batch: int | None, input_dims: Mapping[str, Sequence[int]], as_json: bool) -> None:
    """Print a program's graph as text, with counts."""
    from tilewright.errors import visible
    from tilewright.ir.text import print_graph
    from tilewright.report.explain.summary import comments, summarise

    graph = load_program(file, batch, input_dims)
    report = summarise(graph, str(file))
    if as_json:
        print_json(report)
        return
    click.echo(visible(comments(report) + print_graph(graph)), nl=False)


@cli.command(cls=Command)
@file_options
@rtol_option
@fill_options
@inputs_option
@click.option("--output", type=WRITTEN, metavar="F.npz", help="Write the outputs to an .npz file.")
@common_options
@compile_options
def run(
    file: Path,
    batch: int | None,
    input_dims: Mapping[str, Sequence[int]],
    how: Compiling,
    fill0: Sequence[str],
    fill1: Sequence[str],
    seed: int,
    inputs: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Run a program once and print what it gave."""
    from tilewright.report.explain.summary import outputs
    from tilewright.report.measure.perf import bind
    from tilewright.report.program import target_name
    from tilewright.report.schema import Run

    graph = load_program(file, batch, input_dims)
    feeds = make_feeds_of(graph, seed, fill0, fill1, inputs)
    program, quantized = compile_program(graph, how)
    results = program.run(bind(program, feeds))
    written = None if output is None else str(output)
    shown = [f.shown for f in feeds]
    report = Run(str(file), target_name(program.target), shown, outputs(program.source, results), written, quantized)
    if output is not None:
        _write(output, program, results)
    if as_json:
        print_json(report)
        return
    from tilewright.report.text.console import console
    from tilewright.report.text.other_tables import print_run

    print_run(console(), report)


@cli.command(cls=Command)
@file_options
@fill_options
@inputs_option
@click.option(
    "--quantized", is_flag=True, help="With --int8, --fp8, --w4: say how far each layer and output is from the float model's."
)
@click.option(
    "--rtol",
    type=NOT_NEGATIVE,
    help="Allow floats this error relative to the element, not the derived one; with --int8, --fp8, --w4: leave layers that "
    "lose more in float.",
)
@click.option(
    "--source", is_flag=True, help="Have the source's own library run the program, too: onnxruntime or onnx, or XLA on the CPU."
)
@click.option("--atol", type=NOT_NEGATIVE, help="Allow floats this absolute error, not the derived one.")
@click.option("--rms-tol", type=NOT_NEGATIVE, help="Allow floats this root mean square of the error, relative to theirs.")
@common_options
@compile_options
def verify(
    file: Path,
    batch: int | None,
    input_dims: Mapping[str, Sequence[int]],
    how: Compiling,
    fill0: Sequence[str],
    fill1: Sequence[str],
    seed: int,
    inputs: Path | None,
    quantized: bool,
    source: bool,
    atol: float | None,
    rms_tol: float | None,
    as_json: bool,
) -> None:
    """Compare a compiled program with the oracle, step by step and end to end.

    Integers must be equal. Floats are compared with float64 under a bound that grows with the length of the sums, unless a
    tolerance is given. Exits with 1 and names the first step that differs.
    """
    from msgspec.structs import replace

    from tilewright.errors import InputError
    from tilewright.report.measure.compare import Tolerances
    from tilewright.report.measure.verify import verify_program

    if quantized and how.scheme is None:
        raise InputError("--quantized compares a quantised program with its float model", hint="add --int8, --fp8 or --w4")
    if source and (how.scheme is not None or how.half is not None):
        raise InputError(
            "--source compares the program as it is written", hint="leave out --int8, --fp8, --w4, --fp16 and --bf16"
        )
    graph = load_program(file, batch, input_dims)
    feeds = make_feeds_of(graph, seed, fill0, fill1, inputs)
    program, choices = compile_program(graph, how)
    tolerances = Tolerances(how.rtol if how.scheme is None else None, atol, rms_tol)
    with progress("comparing") as show:
        report = replace(verify_program(program, str(file), feeds, tolerances, show), quantized=choices)
    if source:
        report = with_source(report, program, feeds, str(file), batch, input_dims, (seed, fill0, fill1, inputs))
    if quantized:
        from tilewright.report.measure.accuracy import accuracy

        report = replace(report, accuracy=accuracy(graph, program, program.layers, feeds))
    if as_json:
        print_json(report)
    else:
        from tilewright.report.text.console import console
        from tilewright.report.text.other_tables import print_verify

        print_verify(console(), report)
    if not report.verified:
        click.get_current_context().exit(DIFFERS)


@cli.command(cls=Command, short_help="Time a program and each step; what fell back, what is unfused.")
@file_options
@rtol_option
@fill_options
@inputs_option
@iterations_option
@everything_option
@dump_option
@report_options
@common_options
@compile_options
def perf(
    file: Path,
    batch: int | None,
    input_dims: Mapping[str, Sequence[int]],
    how: Compiling,
    fill0: Sequence[str],
    fill1: Sequence[str],
    seed: int,
    inputs: Path | None,
    iterations: int | None,
    everything: bool,
    reports: Reports,
    as_json: bool,
) -> None:
    """Time a program and each of its steps; say what fell back and what is unfused."""
    phases = reports.phases()
    graph = load_program(file, batch, input_dims)
    feeds = make_feeds_of(graph, seed, fill0, fill1, inputs)
    program, quantized = compile_program(graph, how, phases)
    measured = measure_program(program, str(file), feeds, iterations, quantized)
    if reports.against:
        given = None if inputs is None else str(inputs)
        measured = beside(measured, program, feeds, reports.against, str(file), batch, input_dims, (seed, fill0, fill1, given))
    reports.write(measured, program, feeds, phases)
    show_perf(measured, everything, as_json)


@cli.command(cls=Command, short_help="Say what was folded into each matmul, what was not, and why.")
@file_options
@rtol_option
@dump_option
@common_options
@compile_options
def explain(file: Path, batch: int | None, input_dims: Mapping[str, Sequence[int]], how: Compiling, as_json: bool) -> None:
    """Say for each matmul what was folded into it, what was not and why, which kernel does it and why others do not."""
    from tilewright.report.explain.explain import explain_program

    graph = load_program(file, batch, input_dims)
    program, quantized = compile_program(graph, how)
    report = explain_program(program, str(file), measured_ceilings(program), quantized)
    if as_json:
        print_json(report)
        return
    from tilewright.report.text.console import console
    from tilewright.report.text.explain_text import print_explain

    print_explain(console(), report)


cli.add_command(gemm)


@cli.command(cls=Command, short_help="Say what this machine is and what it was seen to reach.")
@click.option("--remeasure", is_flag=True, help="Measure the ceilings again instead of reading them back.")
@common_options
def devices(remeasure: bool, as_json: bool) -> None:
    """Say which devices were found, what they are, and what they were seen to reach."""
    from tilewright.report.explain.machine import describe_machine, targets

    with progress("measuring the machine"):
        report = describe_machine(targets(), remeasure=remeasure)
    if as_json:
        print_json(report)
        return
    from tilewright.report.text.console import console
    from tilewright.report.text.other_tables import print_devices

    print_devices(console(), report)


cli.add_command(tune)
cli.add_command(cache)


def main() -> None:
    """The `tilewright` command."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, who wants none of it
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without µ still gets its report
    cli(prog_name="tilewright")


def _write(path: Path, program: Executable, results: Sequence[object]) -> None:
    """Write a program's results as an .npz file by output name."""
    from tilewright.errors import InputError
    from tilewright.report.measure.inputs import write_npz
    from tilewright.runtime.arrays import to_user

    source = program.source
    arrays: dict[str, np.ndarray] = {}
    for name, node, value in zip(source.output_names, source.outputs, results, strict=True):
        array = to_user(value, node.tensor, as_numpy=True)
        if not hasattr(array, "dtype"):
            raise InputError(f"output {name!r} is no array and cannot be written", where=str(path))
        arrays[name] = cast("np.ndarray", array)
    write_npz(path, arrays)
