"""The first run and the second process of a command, from the command to its answer.

    python benchmarks/first_run.py MODEL [MODEL …] [--budget 20 --budget 0] [--processes 2] [--at-once 3] [--threads 1]
                                   [--options "--fp8 --fp16 --device cuda"]

`tilewright perf MODEL` runs in processes of its own, one after the other, or several at once; before the first ones of each
model and budget nothing is kept (`TILEWRIGHT_CACHE`, and Triton's own cache, are empty folders). A row for each process:
seconds by the clock, seconds of processors (user and system, of helpers, too), the most memory it had at a time (files that are
mapped count), the bytes of kept programs, and what the report says of choices and of the whole. Of processes that start at once
one measures a problem, and the others read it back.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("models", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--budget", "budgets", type=float, multiple=True, default=(20.0, 0.0), show_default=True)
@click.option("--processes", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--at-once", type=click.IntRange(min=1), default=1, show_default=True, help="Processes that start together.")
@click.option("--threads", type=click.IntRange(min=1), help="As many as torch takes if not given.")
@click.option("--options", default="", help="Further options of perf.")
def main(
    models: tuple[Path, ...], budgets: tuple[float, ...], processes: int, at_once: int, threads: int | None, options: str
) -> None:
    """Print a row for each process."""
    click.echo(
        "| model | budget | process | s by the clock | s of processors | memory, MB | kept, MB | choices | whole program |"
    )
    click.echo("|---|--:|--:|--:|--:|--:|--:|---|--:|")
    more = [*shlex.split(options), *(("--threads", str(threads)) if threads else ())]
    for model in models:
        for budget in budgets:
            with tempfile.TemporaryDirectory() as folder:
                own = {"TILEWRIGHT_CACHE": str(Path(folder, "tilewright")), "TRITON_CACHE_DIR": str(Path(folder, "triton"))}
                for process in range(1, processes + 1):
                    with ThreadPoolExecutor(at_once) as runs:
                        begun = [
                            runs.submit(timed, [str(model), "--budget", f"{budget:g}", *more], own) for _ in range(at_once)
                        ]
                    kept = sum(p.stat().st_size for p in Path(folder).rglob("*.twp"))
                    for wall_s, cpu_s, memory, report in (run.result() for run in begun):
                        choices = ", ".join(f"{n} {way}" for way, n in report["choices"].items())
                        click.echo(
                            f"| {model.name} | {budget:g} | {process} | {wall_s:.1f} | {cpu_s:.1f} | {memory / 1e6:,.0f} "
                            f"| {kept / 1e6:.0f} | {choices} | {report['total_us'] / 1e3:.2f} ms |"
                        )
                        if report["noise"]:
                            click.echo(f"(not reliable: {report['noise']})", err=True)


def timed(arguments: list[str], environment: dict[str, str]) -> tuple[float, float, int, dict[str, Any]]:
    """Seconds by the clock and of processors of one command, the most bytes that it had in memory, and its report."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "tilewright", "perf", *arguments, "--json"]
    with tempfile.TemporaryFile() as answer:
        pid = subprocess.Popen(command, env=os.environ | environment, stdout=answer).pid
        _, status, used = os.wait4(pid, 0)
        wall_s = time.perf_counter() - began
        if status:
            raise click.ClickException(f"{shlex.join(command)} ended with status {os.waitstatus_to_exitcode(status)}")
        answer.seek(0)
        return wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, json.loads(answer.read())


if __name__ == "__main__":
    main()
