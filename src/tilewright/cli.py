"""The command line: read, run, verify, perf, explain, gemm, devices.

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
from tilewright._cli_cache import cache, tune
from tilewright._cli_compile import (
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
from tilewright._cli_errors import DIFFERS, Group, traceback_option
from tilewright._cli_options import (
    NOT_NEGATIVE,
    Command,
    budget_option,
    cache_option,
    common_options,
    device_option,
    everything_option,
    file_options,
    fill_options,
    inputs_option,
    iterations_option,
)
from tilewright._cli_reports import Reports, beside, report_options

if TYPE_CHECKING:
    import msgspec
    import numpy as np

    from tilewright.report.inputs import Feed
    from tilewright.report.perf import Measured
    from tilewright.report.schema import Quantized
    from tilewright.runtime.executable import Executable

GEMM_BUDGET_S = 2.0


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
    from tilewright.ir.text import print_graph
    from tilewright.report.summary import comments, summarise

    graph = load_program(file, batch, input_dims)
    report = summarise(graph, str(file))
    if as_json:
        _print_json(report)
        return
    click.echo(comments(report) + print_graph(graph), nl=False)


@cli.command(cls=Command)
@file_options
@rtol_option
@fill_options
@inputs_option
@click.option("--output", type=click.Path(path_type=Path), metavar="F.npz", help="Write the outputs to an .npz file.")
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
    from tilewright.report.perf import bind
    from tilewright.report.program import target_name
    from tilewright.report.schema import Run
    from tilewright.report.summary import outputs

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
        _print_json(report)
        return
    from tilewright.report.console import console
    from tilewright.report.other_tables import print_run

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
    from tilewright.report.compare import Tolerances
    from tilewright.report.verify import verify_program

    if quantized and how.scheme is None:
        raise InputError("--quantized compares a quantised program with its float model", hint="add --int8, --fp8 or --w4")
    graph = load_program(file, batch, input_dims)
    feeds = make_feeds_of(graph, seed, fill0, fill1, inputs)
    program, choices = compile_program(graph, how)
    tolerances = Tolerances(how.rtol if how.scheme is None else None, atol, rms_tol)
    with progress("comparing") as show:
        report = replace(verify_program(program, str(file), feeds, tolerances, show), quantized=choices)
    if quantized:
        from tilewright.report.accuracy import accuracy

        report = replace(report, accuracy=accuracy(graph, program, program.layers, feeds))
    if as_json:
        _print_json(report)
    else:
        from tilewright.report.console import console
        from tilewright.report.other_tables import print_verify

        print_verify(console(), report)
    if not report.verified:
        click.get_current_context().exit(DIFFERS)


@cli.command(cls=Command, short_help="Time a program and each step; what fell back, what dangles.")
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
    """Time a program and each of its steps; say what fell back and what dangles."""
    phases = reports.phases()
    graph = load_program(file, batch, input_dims)
    feeds = make_feeds_of(graph, seed, fill0, fill1, inputs)
    program, quantized = compile_program(graph, how, phases)
    measured = _measure(program, str(file), feeds, iterations, quantized)
    if reports.against:
        given = None if inputs is None else str(inputs)
        measured = beside(measured, program, feeds, reports.against, str(file), batch, input_dims, (seed, fill0, fill1, given))
    reports.write(measured, program, feeds, phases)
    _print_perf(measured, everything, as_json)


@cli.command(cls=Command, short_help="Say what was folded into each matmul, what was not, and why.")
@file_options
@rtol_option
@dump_option
@common_options
@compile_options
def explain(file: Path, batch: int | None, input_dims: Mapping[str, Sequence[int]], how: Compiling, as_json: bool) -> None:
    """Say for each matmul what was folded into it, what was not and why, which kernel does it and why others do not."""
    from tilewright.report.explain import explain_program

    graph = load_program(file, batch, input_dims)
    program, quantized = compile_program(graph, how)
    report = explain_program(program, str(file), measured_ceilings(program), quantized)
    if as_json:
        _print_json(report)
        return
    from tilewright.report.console import console
    from tilewright.report.explain_text import print_explain

    print_explain(console(), report)


class _GemmCommand(Command):
    """`gemm`, whose help ends with the notation's own description."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        import ast

        # Read, not imported: the module needs torch, and help should not.
        source = Path(__file__).parent.joinpath("ir", "notation.py").read_text("utf-8")
        described = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[1:]
        with formatter.section("Notation"):
            for paragraph in described:
                if paragraph.startswith(" "):  # an example or the grammar, whose lines stay as they are
                    formatter.write(paragraph.replace("    ", "  ", 1).replace("\n    ", "\n  ") + "\n\n")
                else:
                    formatter.write_text(" ".join(paragraph.split()))
                    formatter.write("\n")


@cli.command(cls=_GemmCommand, short_help="Compile and check, or time, one product written in one line.")
@click.argument("problem")
@device_option
@budget_option
@fill_options
@click.option("--perf", "timed", is_flag=True, help="Time it and print the performance report.")
@click.option("--weights", is_flag=True, help="The right operand, its scales and the bias are constants, packed beforehand.")
@cache_option
@iterations_option
@everything_option
@common_options
def gemm(
    problem: str,
    device: str,
    budget: float | None,
    fill0: Sequence[str],
    fill1: Sequence[str],
    seed: int,
    timed: bool,
    weights: bool,
    cache: bool,
    iterations: int | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Compile one product, written in one line, check it on random data, and say which kernel does it and why.

    A range of rows, as in "f32[1..4096,768] @ f32[768,3072]", gives a table: which kernel serves which rows of a product with
    that weight.
    """
    from tilewright._cli_rows import row_range, table_of_rows
    from tilewright.ir.notation import parse
    from tilewright.report.inputs import check_memory, kept, make_feeds

    span = row_range(problem)
    if span is not None:
        table_of_rows(problem, span, device, budget, (fill0, fill1), seed, as_json)
        return
    graph = parse(problem)
    check_memory(graph)
    feeds = make_feeds(graph, seed=seed, fill0=fill0, fill1=fill1)
    if weights:
        graph, feeds = kept(graph, feeds, [f.shown.name for f in feeds if f.shown.name.startswith("b")])
    program, _ = compile_program(graph, Compiling(device, GEMM_BUDGET_S if budget is None else budget, cache=cache))
    if timed:
        _print_perf(_measure(program, problem, feeds, iterations), everything, as_json)
        return
    from tilewright.report.one_gemm import account

    report = account(program, problem, feeds)
    if as_json:
        _print_json(report)
    else:
        from tilewright.report.console import console
        from tilewright.report.other_tables import print_gemm

        print_gemm(console(), report)
    if not report.verified:
        click.get_current_context().exit(DIFFERS)


@cli.command(cls=Command, short_help="Say what this machine is and what it was seen to reach.")
@click.option("--remeasure", is_flag=True, help="Measure the ceilings again instead of reading them back.")
@common_options
def devices(remeasure: bool, as_json: bool) -> None:
    """Say which devices were found, what they are, and what they were seen to reach."""
    from tilewright.report.machine import describe_machine, targets

    with progress("measuring the machine"):
        report = describe_machine(targets(), remeasure=remeasure)
    if as_json:
        _print_json(report)
        return
    from tilewright.report.console import console
    from tilewright.report.other_tables import print_devices

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


def _measure(
    program: Executable, name: str, feeds: Sequence[Feed], iterations: int | None, quantized: Quantized | None = None
) -> Measured:
    from tilewright.report.perf import measure

    ceilings = measured_ceilings(program)
    with progress("timing steps") as show:
        return measure(program, name, feeds, ceilings, iterations=iterations, progress=show, quantized=quantized)


def _print_perf(measured: Measured, everything: bool, as_json: bool) -> None:
    if as_json:
        _print_json(measured.report)
        return
    from tilewright.report.console import console
    from tilewright.report.perf_table import print_perf

    print_perf(console(), measured, everything=everything)


def _print_json(report: msgspec.Struct) -> None:
    from tilewright.report.schema import to_json

    click.echo(to_json(report))


def _write(path: Path, program: Executable, results: Sequence[object]) -> None:
    """Write a program's results as an .npz file by output name."""
    from tilewright.errors import InputError
    from tilewright.report.inputs import write_npz
    from tilewright.runtime.arrays import to_user

    source = program.source
    arrays: dict[str, np.ndarray] = {}
    for name, node, value in zip(source.output_names, source.outputs, results, strict=True):
        array = to_user(value, node.tensor, as_numpy=True)
        if not hasattr(array, "dtype"):
            raise InputError(f"output {name!r} is no array and cannot be written", where=str(path))
        arrays[name] = cast("np.ndarray", array)
    write_npz(path, arrays)
