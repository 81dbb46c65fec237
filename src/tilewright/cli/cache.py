"""`tune`, and `cache info|clear`: decisions that are kept."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import click

from tilewright.cli.compile import Compiling, compile_options, compile_program
from tilewright.cli.errors import interrupted
from tilewright.cli.given import Given, given_options
from tilewright.cli.options import WRITTEN_JSON, Command, common_options
from tilewright.cli.show import show
from tilewright.errors import counted

TUNE_BUDGET_S = 60.0


@click.command(cls=Command, short_help="Choose a program's kernels with more time, and keep the choices.")
@given_options()
@click.option(
    "--export", "exported", type=WRITTEN_JSON, metavar="F.json", help="Write the choices as a file, to be taken elsewhere."
)
@click.option("--import", "imported", type=click.Path(path_type=Path), metavar="F", help="Try first what such a file says.")
@click.option("--retry", is_flag=True, help="Try again what is remembered to have crashed or hung.")
@common_options
@compile_options
def tune(
    given: Given,
    how: Compiling,
    exported: Path | None,
    imported: Path | None,
    retry: bool,
    as_json: bool,
) -> None:
    """Choose a program's kernels with more time than other verbs take (60 seconds by the clock unless --budget says), and keep
    the choices: every verb and `tilewright.compile` then read them back, on this machine and with these libraries.

    Each choice is kept as soon as it is made, and the best so far of the one under way if Ctrl-C ends it.
    """
    from tilewright.hardware.detect import detect
    from tilewright.report.explain.tuning import describe_tuning
    from tilewright.report.text.tuning_table import print_tuning
    from tilewright.schedule.cache import user_cache
    from tilewright.schedule.record import read_records, write_records
    from tilewright.schedule.tuning_database import TuningDatabase

    hints = () if imported is None else read_records(imported)
    graph = given.load()
    cache = user_cache() if how.cache else None
    excess = how.excess_precision
    database = TuningDatabase(detect(how.device), cache, excess_precision=excess, hints=hints, retry=retry, finish=True)
    budget_s = TUNE_BUDGET_S if how.budget is None else how.budget
    started = time.monotonic()
    try:
        program, _ = compile_program(graph, replace(how, budget=budget_s, database=database))
    except KeyboardInterrupt:
        where = cache.file if cache is not None else None
        made = len(database.settled)
        kept = f"{made} {'choice is' if made == 1 else 'choices are'} kept" if where is not None else "nothing is kept"
        interrupted(f"interrupted after {time.monotonic() - started:.0f} s: {kept}")
        raise
    seconds = time.monotonic() - started
    if exported is not None:
        write_records(exported, program.target.name, list(database.settled.values()))
    names = [None if path is None else str(path) for path in (exported, imported)]
    report = describe_tuning(program, str(given.file), seconds, budget_s, cache, *names)
    show(report, as_json, print_tuning)


@click.group(short_help="Say what choices are kept, or forget them.")
def cache() -> None:
    """Say what choices were measured before and are read back, or forget them."""


@cache.command(cls=Command)
@common_options
def info(as_json: bool) -> None:
    """Say where choices are kept, how many, of which chips and versions, and since when; what crashed or hung; and how many
    compiled programs there are."""
    from tilewright.report.explain.cache import describe_cache
    from tilewright.report.text.cache_table import print_cache
    from tilewright.schedule.cache import user_cache

    show(describe_cache(user_cache()), as_json, print_cache)


@cache.command(cls=Command)
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(yes: bool) -> None:
    """Forget every choice, and every compiled program. Machine code stays: it is found by its content."""
    from tilewright.errors import InputError
    from tilewright.runtime import program_folder
    from tilewright.schedule.cache import user_cache

    if not yes and not click.confirm("Forget every choice that was measured?"):
        click.echo("kept")
        return
    found = user_cache()
    count = 0 if found is None else found.clear()
    if found is None or found.unusable is not None:
        raise InputError(
            "choices cannot be forgotten", where=found and found.unusable, hint="TILEWRIGHT_CACHE names another folder"
        )
    said = [counted(count, "choice"), *([counted(gone, "program")] if (gone := program_folder.clear()) else [])]
    click.echo(f"forgot {' and '.join(said)}")
