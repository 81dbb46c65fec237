"""`gemm` with a range of rows: `f32[1..4096,768] @ f32[768,3072]`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from tilewright.errors import InputError

if TYPE_CHECKING:
    from tilewright.ir.graph import Graph

_RANGE = re.compile(r"(\d{1,15})\s*\.\.\s*(\d{1,15})(?!\d)")
ROWS_BUDGET_S = 60.0


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
    """Make the table and print it: which kernel serves which rows of `problem`, whose right operand is a constant."""
    from tilewright.ir.ops import Input
    from tilewright.m_dispatch import compile_rows
    from tilewright.report.measure.inputs import baked, check_memory, make_feeds
    from tilewright.report.schema import to_json
    from tilewright.report.text.buckets_table import describe_rows, print_rows
    from tilewright.report.text.console import console, progress

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

    with progress("racing kernels") as show:
        program = compile_rows(
            graph_at,
            first=first,
            last=last,
            device=device,
            budget_s=ROWS_BUDGET_S if budget_s is None else budget_s,
            progress=show,
        )
    assert program.table is not None  # it was measured
    report = describe_rows(program.table, program.target, problem)
    if as_json:
        click.echo(to_json(report))
    else:
        print_rows(console(), report)


def _at(problem: str, rows: int) -> Graph:
    from tilewright.ir.notation import parse

    return parse(_RANGE.sub(str(rows), problem))
