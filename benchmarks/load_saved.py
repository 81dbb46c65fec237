"""Loading a saved program in a process that has neither compilers nor front ends, and its first answer.

    python benchmarks/load_saved.py model.onnx [--budget 20] [--threads 1] [--processes 5]

The model is compiled and saved once. Then each process imports torch, imports Tilewright, loads the file and calls the program;
llvmlite, triton, onnx, onnxruntime, jax and jaxlib raise when they are imported. What is printed is the median of each stage's
seconds over the processes, one after the other, with the file in the page cache. The results must be the bits of the program
that was saved.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.abc import MetaPathFinder
from itertools import pairwise
from pathlib import Path

import click

ABSENT = ("llvmlite", "triton", "onnx", "onnxruntime", "jax", "jaxlib")
STAGES = ("import torch", "import tilewright", "load", "first answer", "a later one")


class Absent(MetaPathFinder):
    """Finds what is not to be there, and says so."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.partition(".")[0] in ABSENT:
            raise ImportError(f"{fullname} is absent")


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--budget", default=20.0, show_default=True, help="Seconds for compiling.")
@click.option("--threads", default=1, show_default=True)
@click.option("--processes", default=5, show_default=True)
@click.option("--load", is_flag=True, hidden=True, help="Be a process that loads MODEL.")
def main(model: Path, budget: float, threads: int, processes: int, load: bool) -> None:
    """Print how long a saved program takes to load and to answer."""
    if load:
        print(json.dumps(loaded(model)))
        return
    import torch

    import tilewright
    from tilewright.report.measure.inputs import make_feeds

    torch.set_num_threads(threads)
    start = time.perf_counter()
    program = tilewright.compile(model, budget_s=budget)
    compiled_s = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "program.twp")
        start = time.perf_counter()
        program.save(saved)
        print(
            f"compiled in {compiled_s:.1f} s, saved in {time.perf_counter() - start:.2f} s: {saved.stat().st_size / 1e6:.0f} MB"
        )
        inputs = [torch.as_tensor(f.value) for f in make_feeds(program.source, seed=0)]
        torch.save((inputs, program(*inputs)), f"{saved}.pt")
        command = [sys.executable, __file__, str(saved), "--load"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        runs = [subprocess.run(command, capture_output=True, text=True, env=environment) for _ in range(processes)]
    for ran in runs:
        if ran.returncode != 0:
            raise click.ClickException(ran.stderr[-2000:])
    each = zip(*(json.loads(ran.stdout) for ran in runs), strict=True)
    for stage, seconds in zip(STAGES, each, strict=True):
        print(f"{stage:18s} {statistics.median(seconds):6.3f} s   {min(seconds):6.3f} to {max(seconds):6.3f}")


def loaded(path: Path) -> list[float]:
    """Seconds of each stage."""
    sys.meta_path.insert(0, Absent())
    at = [time.perf_counter()]
    import torch

    at.append(time.perf_counter())
    from tilewright import load_program

    at.append(time.perf_counter())
    program = load_program(path)
    loaded_at = time.perf_counter()
    inputs, wanted = torch.load(f"{path}.pt")
    began = time.perf_counter()
    result = program(*inputs)
    first_s = time.perf_counter() - began
    assert torch.equal(result, wanted)
    began = time.perf_counter()
    program(*inputs)
    return [*(after - before for before, after in pairwise([*at, loaded_at])), first_s, time.perf_counter() - began]


if __name__ == "__main__":
    main()
