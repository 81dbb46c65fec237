"""`gemm`: one product, written in one line; its rows may be a range, as in `f32[1..4096,768] @ f32[768,3072]`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilewright.cli.compile import Compiling, before_timing, compile_program, ends_of
from tilewright.cli.errors import DIFFERS
from tilewright.cli.given import progress
from tilewright.cli.options import (
    Command,
    budget_option,
    cache_option,
    common_options,
    device_option,
    everything_option,
    fill_options,
    iterations_option,
    simulated_options,
    threads_option,
)
from tilewright.cli.show import measure_program, show, show_perf
from tilewright.errors import InputError

if TYPE_CHECKING:
    from tilewright.ir.graph import Graph


GEMM_BUDGET_S = 5.0
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
@threads_option
@budget_option
@fill_options
@click.option("--perf", "timed", is_flag=True, help="Time it and print the performance report.")
@click.option("--weights", is_flag=True, help="The right operand, its scales and the bias are constants, packed beforehand.")
@simulated_options
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
    ranks: str | None,
    simulate: bool,
    cache: bool,
    iterations: int | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Compile one product, written in one line, check it on random data, and say which kernel does it and why.

    A range of rows, as in "f32[1..4096,768] @ f32[768,3072]", gives a table: which kernel serves which rows of a product with
    that weight, which is a constant. It is measured each time, and keeps no choices.
    """
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
    if ranks is not None or simulate:
        from tilewright.cli.simulated import of_graph
        from tilewright.report.text.other_tables import print_verify

        idle = {"--perf": timed, "--weights": weights, "--no-cache": not cache, "--device": device != "cpu"}
        verified = of_graph(graph, problem, ranks, simulate, idle, lambda _: feeds)
        show(verified, as_json, print_verify)
        if not verified.verified:
            click.get_current_context().exit(DIFFERS)
        return
    if any(n.op.name == "place" for n in graph.nodes()):
        raise InputError("extents are split, and there is no mesh", where=repr(problem), hint="--mesh tp=4 --simulate")
    names = {f.shown.name for f in feeds}
    if weights:
        graph, feeds = baked(graph, feeds, [f.shown.name for f in feeds if f.shown.name.startswith("b")])
    elif names >= {"b_scale"} and "a_scale" not in names:
        click.echo(f"note: {NOT_CONSTANT}", err=True)
    how = Compiling(device, GEMM_BUDGET_S if budget is None else budget, cache=cache)
    program, _ = compile_program(graph, before_timing(how) if timed else before_checking(how, graph))
    if timed:
        show_perf(measure_program(program, problem, feeds, how, iterations), everything, as_json)
        return
    from tilewright.report.explain.explain import account
    from tilewright.report.text.other_tables import print_gemm

    report = account(program, problem, feeds, ends_of(how.budget_s))
    show(report, as_json, print_gemm)
    if not report.verified:
        click.get_current_context().exit(DIFFERS)


def before_checking(how: Compiling, graph: Graph) -> Compiling:
    """The options that leave time of the budget for comparing the product as a whole, but no more than a part of it."""
    from tilewright.ir.ops import Gemm
    from tilewright.schedule.expected import expected_s
    from tilewright.schedule.problem import Problem, problem_of

    problems = [problem_of(n) for n in graph.nodes() if isinstance(n.op, Gemm)]
    whole_s = sum(expected_s(p) for p in problems if isinstance(p, Problem))
    return replace(how, after_s=min(whole_s, CHECK * how.budget_s))


_RANGE = re.compile(r"(\d{1,15})\s*\.\.\s*(\d{1,15})(?!\d)")
ROWS_BUDGET_S = 60.0
CHECK = 0.2  # of the budget, for the comparison that follows the search


def row_range(problem: str) -> tuple[int, int] | None:
    """The range of rows that a product's line gives, if it gives one.

    Raises:
        InputError: it gives several, or an empty one.
    """
    found = {(int(a), int(b)) for a, b in _RANGE.findall(problem)}
    if not found:
        return None
    (first, last), *more = found
    if more:
        raise InputError("two ranges", where=repr(problem), hint="one range, the left operand's rows")
    if not 1 <= first < last:
        raise InputError(f"no range from {first} to {last}", where=repr(problem), hint="such as 1..4096")
    return first, last


def table_of_rows(
    problem: str,
    span: tuple[int, int],
    device: str,
    budget_s: float | None,
    fills: tuple[Sequence[str], Sequence[str]],
    seed: int,
    as_json: bool,
) -> None:
    """Make the table and print it: which kernel serves which rows of `problem`, whose right operand is a constant.

    Raises:
        InputError: the range changes a weight, or the inputs fit no memory.
    """
    from tilewright.ir.ops import Input
    from tilewright.m_dispatch import compile_rows
    from tilewright.report.measure.inputs import baked, check_memory, make_feeds
    from tilewright.report.text.buckets_table import describe_rows, print_rows

    first, last = span
    full = _at(problem, last)
    check_memory(full)
    feeds = make_feeds(full, seed=seed, fill0=fills[0], fill1=fills[1])
    weights = [f.shown.name for f in feeds if f.shown.name.startswith("b")]
    types = [{n.op.label: n.tensor for n in g.inputs if isinstance(n.op, Input)} for g in (full, _at(problem, first))]
    changed = [n for n in weights if types[0][n] != types[1][n]]
    if changed:
        raise InputError(
            f"the range changes {changed[0]!r}, which is a weight", where=repr(problem), hint="the left operand's rows"
        )

    def graph_at(rows: int) -> Graph:
        return baked(_at(problem, rows), feeds, weights)[0]

    with progress("racing kernels") as bar:
        program = compile_rows(
            graph_at,
            first=first,
            last=last,
            device=device,
            budget_s=ROWS_BUDGET_S if budget_s is None else budget_s,
            progress=bar,
        )
    assert program.table is not None  # it was measured
    show(describe_rows(program.table, program.target, problem), as_json, print_rows)


def _at(problem: str, rows: int) -> Graph:
    from tilewright.ir.notation import parse

    return parse(_RANGE.sub(str(rows), problem))
