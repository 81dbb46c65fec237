"""The first run and the second process of a command, from the command to its answer.

    python benchmarks/first_run.py MODEL [MODEL …] [--budget 20 --budget 0] [--processes 2] [--threads 1]
                                   [--options "--fp8 --fp16 --device cuda"]

`tilewright perf MODEL` runs in processes of its own, one after the other; before the first one of each model and budget
nothing is kept (`TILEWRIGHT_CACHE`, and Triton's own cache, are empty folders). A row for each process: seconds by the clock,
seconds of processors (user and system, of helpers, too), the bytes of kept programs, and what the report says of choices and
of the whole.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click


@click.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--budget", "budgets", type=float, multiple=True, default=(20.0, 0.0), show_default=True)
@click.option("--processes", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="As many as torch takes if not given.")
@click.option("--options", default="", help="Further options of perf.")
def main(models: tuple[Path, ...], budgets: tuple[float, ...], processes: int, threads: int | None, options: str) -> None:
    """Print a row for each process."""
    click.echo("| model | budget | process | s by the clock | s of processors | kept, MB | choices | whole program |")
    click.echo("|---|--:|--:|--:|--:|--:|---|--:|")
    more = [*shlex.split(options), *(("--threads", str(threads)) if threads else ())]
    for model in models:
        for budget in budgets:
            with tempfile.TemporaryDirectory() as folder:
                own = {"TILEWRIGHT_CACHE": str(Path(folder, "tilewright")), "TRITON_CACHE_DIR": str(Path(folder, "triton"))}
                for process in range(1, processes + 1):
                    wall_s, cpu_s, report = timed([str(model), "--budget", f"{budget:g}", *more], own)
                    kept = sum(p.stat().st_size for p in Path(folder).rglob("*.twp"))
                    choices = ", ".join(f"{n} {way}" for way, n in report["choices"].items())
                    click.echo(
                        f"| {model.name} | {budget:g} | {process} | {wall_s:.1f} | {cpu_s:.1f} | {kept / 1e6:.0f} | {choices} "
                        f"| {report['total_us'] / 1e3:.2f} ms |"
                    )
                    if report["noise"]:
                        click.echo(f"(not reliable: {report['noise']})", err=True)


def timed(arguments: list[str], environment: dict[str, str]) -> tuple[float, float, dict[str, object]]:
    """Seconds by the clock and of processors of one command, and its report."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "tilewright", "perf", *arguments, "--json"]
    done = subprocess.run(command, check=True, env=os.environ | environment, stdout=subprocess.PIPE)
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall_s, cpu_s, json.loads(done.stdout)


if __name__ == "__main__":
    main()
