"""`gemm`: one product, written in one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from tilewright.cli.compile import Compiling, compile_program
from tilewright.cli.errors import DIFFERS
from tilewright.cli.options import (
    Command,
    budget_option,
    cache_option,
    common_options,
    device_option,
    everything_option,
    fill_options,
    iterations_option,
)
from tilewright.cli.show import measure_program, print_json, show_perf

GEMM_BUDGET_S = 2.0
NOT_CONSTANT = (
    "b is given anew with every call; kernels that pack it beforehand, as a model's weights, are compared with --weights"
)


class _GemmCommand(Command):
    """`gemm`, whose help ends with the notation's own description."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        import ast

        # Read, not imported: the module needs torch, and help should not.
        source = Path(__file__).parents[1].joinpath("ir", "notation.py").read_text("utf-8")
        described = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[1:]
        with formatter.section("Notation"):
            for paragraph in described:
                if paragraph.startswith(" "):  # an example or the grammar, whose lines stay as they are
                    formatter.write(paragraph.replace("    ", "  ", 1).replace("\n    ", "\n  ") + "\n\n")
                else:
                    formatter.write_text(" ".join(paragraph.split()))
                    formatter.write("\n")


@click.command(cls=_GemmCommand, short_help="Compile and check, or time, one product written in one line.")
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
    that weight, which is a constant. It is measured each time, and keeps no choices.
    """
    from tilewright.cli.gemm_rows import row_range, table_of_rows
    from tilewright.ir.notation import parse
    from tilewright.report.measure.inputs import baked, check_memory, make_feeds

    span = row_range(problem)
    if span is not None:
        unused = {
            "--perf": timed,
            "--weights": weights,
            "--no-cache": not cache,
            "--iterations": iterations,
            "--all": everything,
        }
        given = [name for name, value in unused.items() if value]
        if given:
            raise click.UsageError(f"{given[0]} says nothing about a range of rows; write one number of rows for it")
        table_of_rows(problem, span, device, budget, (fill0, fill1), seed, as_json)
        return
    graph = parse(problem)
    check_memory(graph)
    feeds = make_feeds(graph, seed=seed, fill0=fill0, fill1=fill1)
    names = {f.shown.name for f in feeds}
    if weights:
        graph, feeds = baked(graph, feeds, [f.shown.name for f in feeds if f.shown.name.startswith("b")])
    elif names >= {"b_scale"} and "a_scale" not in names:
        click.echo(f"note: {NOT_CONSTANT}", err=True)
    program, _ = compile_program(graph, Compiling(device, GEMM_BUDGET_S if budget is None else budget, cache=cache))
    if timed:
        show_perf(measure_program(program, problem, feeds, iterations), everything, as_json)
        return
    from tilewright.report.explain.one_gemm import account

    report = account(program, problem, feeds)
    if as_json:
        print_json(report)
    else:
        from tilewright.report.text.console import console
        from tilewright.report.text.other_tables import print_gemm

        print_gemm(console(), report)
    if not report.verified:
        click.get_current_context().exit(DIFFERS)
