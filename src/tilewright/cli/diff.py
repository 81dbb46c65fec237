"""`diff`: two reports beside each other."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from tilewright.cli.options import Command, common_options, everything_option
from tilewright.cli.show import show


@click.command(cls=Command, short_help="Say what changed between two reports: graph, choices, times.")
@click.argument("before", type=click.Path(path_type=Path), metavar="BEFORE.json")
@click.argument("after", metavar="AFTER.json")
@everything_option
@common_options
def diff(before: Path, after: str, everything: bool, as_json: bool) -> None:
    """Compare two files that `perf --json` printed, or two of `explain --json`: runs, versions, machines, models.

    What changed is ranked by its effect on the time: steps that came, went or became others, kernels, settings, times. In place
    of AFTER.json stands the name of one that BEFORE.json was timed against (`perf --against`), to compare with that.
    """
    from tilewright.report.explain.difference import beside, compare, read_report
    from tilewright.report.text.difference_table import print_difference

    old = read_report(before)
    if not Path(after).exists() and not Path(after).suffix:
        found = beside(old, after, str(before))
    else:
        found = compare(old, read_report(Path(after)), (str(before), after))
    show(found, as_json, partial(print_difference, everything=everything))
