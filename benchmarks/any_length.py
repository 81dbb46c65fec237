"""BERT from ONNX with open batch and length: right at many shapes, and how much slower and larger than a program for one shape.

    python benchmarks/any_length.py [--layers 12] [--shapes 50] [--compared 6] [--budget 20] [--threads 1] [--model bert.onnx]

One program for ranges is called at random shapes, drawn by their logarithms, and its results are compared with
onnxruntime's. Printed are how often it was compiled; the seconds of the first call at a shape and of a later one, beside
onnxruntime's; and what the first call took of its thread's own time to make the instance (kernels are built and checked),
whatever else the machine did. For some of the shapes it is timed in turns with a program compiled for that shape alone,
within the same budget. Memory that is no file's is looked at in processes of their own, without onnxruntime: of the program
for ranges after all shapes, and of one for the largest of them alone.
"""

from __future__ import annotations

import contextlib
import io
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

BATCH, LENGTH = (1, 64), (1, 512)
TURNS = 7
WAIT_S = 0.1


@click.command()
@click.option("--layers", default=12, show_default=True)
@click.option("--shapes", default=50, show_default=True)
@click.option("--compared", default=6, show_default=True, help="Shapes that are compiled alone, too.")
@click.option("--budget", default=20.0, show_default=True, help="Seconds of each compile.")
@click.option("--threads", default=1, show_default=True)
@click.option("--tokens", default=2048, show_default=True, help="Most of them in a call.")
@click.option("--seed", default=0, show_default=True)
@click.option("--model", type=click.Path(path_type=Path), help="Where the exported model is kept; made if it is not there.")
@click.option("--weigh", type=click.Choice(["ranges", "one"]), help="Print the memory of one kind of program alone.")
def main(
    layers: int,
    shapes: int,
    compared: int,
    budget: float,
    threads: int,
    tokens: int,
    seed: int,
    model: Path | None,
    weigh: str | None,
) -> None:
    """Print what a program for ranges costs beside one for a shape."""
    import onnxruntime
    import torch

    import tilewright

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bert.onnx") if model is None else model
        if not path.exists():
            exported(path, layers)
        drawn = shapes_of(shapes, tokens, seed)
        if weigh is not None:
            print(weight(path, drawn, weigh, budget, threads))
            return
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        began = time.perf_counter()
        program = tilewright.compile(path, dims={"batch": BATCH, "length": LENGTH}, budget_s=budget, threads=threads)
        print(f"compiled in {time.perf_counter() - began:.1f} s, {program.made} shapes measured; {program!r}")
        apart, firsts, ratios, rows = 0.0, list[float](), list[float](), list[tuple[tuple[int, int], float, float]]()
        makings = list[float]()
        for i, shape in enumerate(drawn):
            given = arrays(*shape)
            began, of_thread = time.perf_counter(), time.thread_time()
            program.at(**program.values_of((), given))
            makings.append(time.thread_time() - of_thread)
            found = program(**given)
            first = time.perf_counter() - began
            wanted = session.run(None, given)[0]
            apart = max(apart, float(np.abs(np.asarray(found) - wanted).max()))
            ours, theirs = in_turns([lambda given=given: program(**given), lambda given=given: session.run(None, given)])
            firsts.append(first)
            ratios.append(ours / theirs)
            rows.append((shape, ours, theirs))
            print(f"{i + 1:3} batch {shape[0]:2} length {shape[1]:3}: first {first:6.2f} s, then {ours * 1e3:8.2f} ms, "
                  f"onnxruntime {theirs * 1e3:8.2f} ms, largest difference so far {apart:.1e}", flush=True)  # fmt: skip
        print(f"compiled {program.compiled} times, {program.made} instances")
        print(f"first call of a shape: {statistics.median(firsts):.2f} s (median), {max(firsts):.2f} s (longest)")
        print(f"making its instance: {statistics.median(makings):.2f}, {max(makings):.2f} s of the thread's own time")
        print(f"beside onnxruntime: {statistics.geometric_mean(ratios):.2f} of its time (geometric mean)")
        waits = sum(f - r[1] > WAIT_S for f, r in zip(firsts, rows, strict=True))
        print(f"waits: {waits} first calls took {WAIT_S} s more than later ones")
        same = [
            "--model",
            str(path),
            "--shapes",
            str(shapes),
            "--tokens",
            str(tokens),
            "--budget",
            str(budget),
            "--seed",
            str(seed),
        ]
        mb = {kind: float(called([*same, "--threads", str(threads), "--weigh", kind])) for kind in ("one", "ranges")}
        times = mb["ranges"] / mb["one"]
        print(
            f"memory: {mb['one']:.0f} MB for the largest shape alone, {mb['ranges']:.0f} MB after {shapes}: {times:.2f} times"
        )
        slower = list[float]()
        for shape, _, _ in sorted(rows)[:: max(1, len(rows) // max(compared, 1))][:compared]:
            given = arrays(*shape)
            dims: dict[str, tuple[int, int]] = dict.fromkeys(("input_ids", "attention_mask"), shape)
            alone = tilewright.compile(path, input_dims=dims, budget_s=budget, threads=threads)
            ours, single = in_turns([lambda given=given: program(**given), lambda given=given, p=alone: p(**given)])
            slower.append(ours / single)
            print(f"batch {shape[0]:2} length {shape[1]:3}: {ours * 1e3:8.2f} ms, compiled alone {single * 1e3:8.2f} ms: "
                  f"{ours / single:.3f} times", flush=True)  # fmt: skip
        if slower:
            print(f"beside a program for one shape: {statistics.geometric_mean(slower):.3f} times (geometric mean)")


def weight(path: Path, drawn: list[tuple[int, int]], kind: str, budget: float, threads: int) -> float:
    """Memory of this process, in MB, with a program for ranges that was called at all shapes, or one for the largest shape."""
    import tilewright

    before = anonymous_mb()
    if kind == "ranges":
        program = tilewright.compile(path, dims={"batch": BATCH, "length": LENGTH}, budget_s=budget, threads=threads)
        for shape in drawn:
            program(**arrays(*shape))
    else:
        most = max(drawn, key=lambda s: s[0] * s[1])
        dims: dict[str, tuple[int, int]] = dict.fromkeys(("input_ids", "attention_mask"), most)
        program = tilewright.compile(path, input_dims=dims, budget_s=budget, threads=threads)
        for _ in range(3):
            program(**arrays(*most))
    return anonymous_mb() - before


def called(args: list[str]) -> str:
    """The last line that this program prints when it is called with arguments."""
    return subprocess.run([sys.executable, __file__, *args], capture_output=True, text=True, check=True).stdout.split("\n")[-2]


def exported(path: Path, layers: int) -> None:
    """Write BERT-base with random weights, its batch and length open."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=28996, num_hidden_layers=layers)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    batch, length = (torch.export.Dim(n, min=r[0], max=r[1]) for n, r in (("batch", BATCH), ("length", LENGTH)))
    feeds = {"input_ids": torch.zeros((2, 16), dtype=torch.int64), "attention_mask": torch.ones((2, 16), dtype=torch.int64)}
    dynamic: Any = {name: {0: batch, 1: length} for name in feeds}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (), path, kwargs=feeds, dynamo=True, opset_version=20, external_data=True, input_names=list(feeds),
            output_names=["last_hidden_state"], dynamic_shapes=dynamic, verbose=False,
        )  # fmt: skip


def shapes_of(count: int, tokens: int, seed: int) -> list[tuple[int, int]]:
    """Random shapes of so many tokens at most, the corners of the ranges among them."""
    rng = random.Random(seed)
    found = [(8, 23), (1, 1), (1, min(LENGTH[1], tokens)), (min(BATCH[1], tokens), 1)]
    while len(found) < count:
        batch, length = (round(r[0] * (r[1] / r[0]) ** rng.random()) for r in (BATCH, LENGTH))
        if batch * length <= tokens:
            found.append((batch, length))
    return found[:count]


def arrays(batch: int, length: int) -> dict[str, np.ndarray[Any, Any]]:
    """Tokens, and a mask that ends sequences at random places."""
    rng = np.random.default_rng(batch * 1000 + length)
    mask = np.arange(length) < rng.integers(1, length + 1, (batch, 1))
    return {"input_ids": rng.integers(0, 28996, (batch, length)), "attention_mask": mask.astype(np.int64)}


def timed(run: Callable[[], object]) -> tuple[float, object]:
    """Seconds of one call, and its result."""
    began = time.perf_counter()
    found = run()
    return time.perf_counter() - began, found


def in_turns(runs: list[Callable[[], object]]) -> list[float]:
    """The low quartile of each one's seconds, called in turns."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(TURNS):
        for run, times in zip(runs, taken, strict=True):
            times.append(timed(run)[0])
    return [statistics.quantiles(t, n=4)[0] for t in taken]


def anonymous_mb() -> float:
    """Memory of this process that is no file's, in MB."""
    text = Path("/proc/self/smaps_rollup").read_text("utf-8")
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Anonymous:")) / 1e3


if __name__ == "__main__":
    sys.exit(main())
