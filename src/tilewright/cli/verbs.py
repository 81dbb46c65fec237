"""The command line: read, compile, run, verify, perf, explain, devices; `diff`, `gemm`, `tune`, `cache` are defined beside it.

Nothing but click is imported before a verb runs, so `tilewright --help` answers at once.
"""

from __future__ import annotations

import gc
import io
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from tilewright import __version__
from tilewright.cli.against import beside, beside_s
from tilewright.cli.cache import cache, tune
from tilewright.cli.compile import (
    Compiling,
    compile_options,
    dump_option,
    ends_of,
    kept_of,
    left_of,
    measured_ceilings,
    ready,
    rtol_option,
    trust_option,
)
from tilewright.cli.diff import diff
from tilewright.cli.errors import DIFFERS, Group, end_imports_at_once, output_may_end, traceback_option
from tilewright.cli.gemm import gemm
from tilewright.cli.given import Given, given_options, progress
from tilewright.cli.options import (
    NOT_NEGATIVE,
    WRITTEN,
    WRITTEN_ARRAYS,
    Command,
    common_options,
    everything_option,
    iterations_option,
    simulated_options,
    threads_option,
)
from tilewright.cli.ranks import mesh_option, rank
from tilewright.cli.reports import Reports, picture_option, report_options, write_picture
from tilewright.cli.show import by_command, measure_program, show, show_perf
from tilewright.files import SAVED

if TYPE_CHECKING:
    import numpy as np

    from tilewright.hardware.link import Link
    from tilewright.hardware.target import Target
    from tilewright.runtime.executable import Executable


COLLECTED = 100_000  # objects made since, and the youngest are looked through for cycles


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tilewright")
@traceback_option
def cli() -> None:
    """A matrix-multiplication compiler: XLA HLO, StableHLO, ONNX and PyTorch programs in, every matmul done the fastest way
    that was checked.

    FILE is an .hlo, .mlir, .stablehlo or .onnx file, a .txt file of HLO as XLA dumps it, a .tw file as `read` prints it, or a
    .twp file as `compile` writes it.

    Exit codes: 0 fine; 1 `verify` or `gemm` found a difference; 2 bad input or usage; 70 a bug in Tilewright; 75 another
    rank of a mesh failed; 130 interrupted.
    """


@cli.command(cls=Command)
@given_options()
@common_options
def read(given: Given, as_json: bool) -> None:
    """Print a program's graph as text, with counts."""
    from tilewright.errors import visible
    from tilewright.ir.text import print_graph
    from tilewright.report.explain.summary import comments, summarise

    graph = given.load(leave_open=True)
    report = summarise(graph, str(given.file))
    show(report, as_json, lambda *_: click.echo(visible(comments(report) + print_graph(graph)), nl=False))


@cli.command("compile", cls=Command, short_help="Compile a program and save it, with its machine code.")
@given_options()
@rtol_option
@dump_option
@click.option("--output", "-o", type=WRITTEN, required=True, metavar="F.twp", help="The file to write.")
@trust_option
@mesh_option
@common_options
@compile_options
def compile_(given: Given, how: Compiling, output: Path, as_json: bool) -> None:
    """Compile a program and save it with its weights, decisions and machine code.

    `run`, `verify`, `perf` and `explain` take the file, and so does `tilewright.load_program`. A saved program is written
    again, signed by this user: one from elsewhere with --trust. On a mesh each rank writes a
    file of its own; `run`, `perf` and `explain` take them with the same --mesh, and so does `tilewright.load_on_mesh`.
    """
    from tilewright.errors import InputError
    from tilewright.report.explain.summary import saved
    from tilewright.report.text.other_tables import print_saved
    from tilewright.runtime.programs import KEPT_BPS, constant_bytes

    if output.suffix.lower() != SAVED:
        raise InputError("a saved program is told by its suffix", where=str(output), hint=f"-o {output.stem}{SAVED}")
    if given.dims:
        hint = "--input-dim or --batch for the shapes of the file"
        raise InputError("a saved program has one shape, and --dim leaves extents open", where=str(output), hint=hint)
    made = ready(given, how, after_s=lambda graph: 2 * constant_bytes(graph) / KEPT_BPS)  # packed, and as they are
    made.program.save(output)
    if how.mesh is not None:
        from tilewright.on_mesh import MeshProgram, file_of

        assert isinstance(made.program, MeshProgram)
        output = file_of(output, made.program.team)
    show(saved(made.program, str(given.file), output, made.quantized), as_json, print_saved)
    made.keep()


@cli.command(cls=Command)
@given_options(data=True)
@rtol_option
@click.option("--output", type=WRITTEN_ARRAYS, metavar="F.npz", help="Write the outputs to an .npz file.")
@trust_option
@mesh_option
@common_options
@compile_options
def run(
    given: Given,
    how: Compiling,
    output: Path | None,
    as_json: bool,
) -> None:
    """Run a program once and print what it gave."""
    from tilewright.report.explain.summary import outputs
    from tilewright.report.measure.perf import bind
    from tilewright.report.program import target_name
    from tilewright.report.schema import Run
    from tilewright.report.text.other_tables import print_run

    made = ready(given, how, data=True)
    program = made.program
    results = program.run(bind(program, made.feeds))
    if how.mesh is not None:
        from tilewright.on_mesh import MeshProgram

        assert isinstance(program, MeshProgram)
        results = program.joined(results)
    written = None if output is None else str(output)
    shown, given_out = [f.shown for f in made.feeds], outputs(program.source, results)
    report = Run(str(given.file), target_name(program.target), shown, given_out, written, made.quantized)
    if output is not None and not (how.mesh and rank()):
        _write(output, program, results)
    show(report, as_json, print_run)
    made.keep()


@cli.command(cls=Command)
@given_options(data=True)
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
@simulated_options
@trust_option
@common_options
@compile_options
def verify(
    given: Given,
    how: Compiling,
    quantized: bool,
    source: bool,
    atol: float | None,
    rms_tol: float | None,
    ranks: str | None,
    simulate: bool,
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
    from tilewright.report.text.other_tables import print_verify

    if quantized and how.scheme is None:
        raise InputError("--quantized compares a quantised program with its float model", hint="add --int8, --fp8 or --w4")
    if source and (how.scheme is not None or how.half is not None):
        raise InputError(
            "--source compares the program as it is written", hint="leave out --int8, --fp8, --w4, --fp16 and --bf16"
        )
    tolerances = Tolerances(how.rtol if how.scheme is None else None, atol, rms_tol)
    if ranks is not None or simulate:
        from tilewright.cli.simulated import simulated

        report = simulated(given, how, ranks, simulate, tolerances, {"--quantized": quantized, "--source": source})
        show(report, as_json, print_verify)
        if not report.verified:
            click.get_current_context().exit(DIFFERS)
        return
    made = ready(given, how, data=True)
    program, feeds = made.program, made.feeds
    with progress("comparing", kept=kept_of(how)) as bar:
        report = replace(verify_program(program, str(given.file), feeds, tolerances, bar), quantized=made.quantized)
    if source:
        from tilewright.cli.against import with_source

        report = with_source(report, program, feeds, given, how.budget_s)
    if quantized:
        from tilewright.report.measure.accuracy import accuracy

        report = replace(report, accuracy=accuracy(made.graph, program, program.layers, feeds))
    show(report, as_json, print_verify)
    if not report.verified:
        click.get_current_context().exit(DIFFERS)
    made.keep()


@cli.command(cls=Command, short_help="Time a program and each step; what fell back, what is unfused.")
@given_options(data=True)
@rtol_option
@iterations_option
@everything_option
@dump_option
@report_options
@trust_option
@mesh_option
@common_options
@compile_options
def perf(
    given: Given,
    how: Compiling,
    iterations: int | None,
    everything: bool,
    reports: Reports,
    as_json: bool,
) -> None:
    """Time a program and each of its steps; say what fell back and what is unfused."""
    if how.mesh is not None and reports.against:
        from tilewright.errors import InputError

        raise InputError("--against is for a program of one process", where="--mesh", hint="leave it out")
    after_s = beside_s(how.budget_s, reports.against) if reports.against else 0.0
    made = ready(given, how, data=True, timed=True, after_s=lambda _: after_s)
    program, feeds = made.program, made.feeds
    measured = measure_program(program, str(given.file), feeds, how, iterations, made.quantized)
    if reports.against:
        left_s = left_of(how.budget_s) if how.budget_s > 0 else math.inf
        measured = beside(measured, program, feeds, given, reports.against, left_s)
    reports.write(measured, program, feeds, first=not (how.mesh and rank()))
    show_perf(measured, everything, as_json)
    made.keep()


@cli.command(cls=Command, short_help="Say what was folded into each matmul, what was not, and why.")
@given_options()
@rtol_option
@everything_option
@dump_option
@picture_option
@trust_option
@mesh_option
@common_options
@compile_options
def explain(given: Given, how: Compiling, everything: bool, picture: Path | None, as_json: bool) -> None:
    """Say for each matmul what was folded into it, what was not and why, which kernel does it, and what to change."""
    from tilewright.report.explain.explain import explain_program
    from tilewright.report.text.explain_text import print_explain

    made = ready(given, how)
    ceilings = measured_ceilings(made.program, ends=ends_of(how.budget_s))
    report = by_command(explain_program(made.program, str(given.file), ceilings, made.quantized))
    if picture is not None and not (how.mesh and rank()):
        from tilewright.report.explain.step_graph import step_graph

        write_picture(picture, report, step_graph(made.program))
    show(report, as_json, lambda out, report: print_explain(out, report, everything=everything))
    made.keep()


cli.add_command(diff)
cli.add_command(gemm)


@cli.command(cls=Command, short_help="Say what this machine is and what it was seen to reach.")
@click.option("--remeasure", is_flag=True, help="Measure the ceilings again instead of reading them back.")
@mesh_option
@threads_option
@common_options
def devices(remeasure: bool, mesh: str | None, as_json: bool) -> None:
    """Say which devices were found, what they are, and what they were seen to reach; on a mesh also the links between ranks."""
    from tilewright.report.explain.machine import describe_machine, targets
    from tilewright.report.schema import Devices
    from tilewright.report.text.other_tables import print_devices

    with progress("measuring the machine"):
        found = targets()
        between = [] if mesh is None else measured_links(mesh, found)
        if mesh is not None and rank():
            return  # the first rank measures its machine alone
        report = describe_machine(found, remeasure=remeasure)
    show(Devices(report.devices, between), as_json, print_devices)


def measured_links(mesh: str, found: Sequence[Target]) -> list[Link]:
    """The links between the ranks of a mesh, of which this process is one: between their GPUs, where there are such."""
    from tilewright.hardware.detect import detect
    from tilewright.report.measure.links import links
    from tilewright.runtime.team import team_of

    team = team_of(mesh, f"cuda:{os.environ['LOCAL_RANK']}" if any(t.kind == "cuda" for t in found) else "cpu")
    return links(team, detect(team.device))


cli.add_command(tune)
cli.add_command(cache)


def main() -> None:
    """The `tilewright` command."""
    gc.set_threshold(COLLECTED)  # modules and nodes live to the end: looking for cycles among them takes half a second
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller, who wants none of it
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without µ still gets its report
    end_imports_at_once()
    with output_may_end():
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
