"""Small transformers as ONNX Runtime's tools write them (quantize_dynamic, QDQ, QOperator, 4 bits...), beside ONNX Runtime.

    python benchmarks/onnx_tools.py [--only bert] [--only "llama qdq"] [--threads 1] [--rounds 5] [--budget 15] [--json FILE]

    python benchmarks/onnx_tools.py --turns 120 --budget 0    # the processor's time of one thread, on a machine that others use

Hidden size 256, 2 layers, 64 tokens, random weights; the same file for both, each in a process of its own, taking turns. The
last columns are |result - reference| / |reference| (Frobenius), the reference being ONNX Runtime without optimisations on the
same file.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import onnx_tool_files as files
from rounds import Process, compete, ratio

Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One file, and the seconds that Tilewright may take to choose kernels."""

    path: str
    budget_s: float


def _session(path: str, threads: int, *, optimised: bool = True) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = files.feeds()
    return lambda: session.run(None, feeds)


def onnxruntime(case: Case) -> Run:
    """ONNX Runtime with all its optimisations."""
    return _session(case.path, int(os.environ["OMP_NUM_THREADS"]))


def tilewright(case: Case) -> Run:
    """The program as `tilewright.compile` gives it, called with torch tensors."""
    import torch

    from tilewright import compile

    program = compile(Path(case.path), budget_s=case.budget_s)
    inputs = {n: torch.from_numpy(v) for n, v in files.feeds().items()}
    return lambda: program(**inputs)


def in_turns(case: Case, turns: int) -> tuple[float, float, float, float, float]:
    """Thread time of both in this process, a call each in turns: medians in seconds, then the median of the pairs' ratios
    (ONNX Runtime's over ours) and its quartiles.

    `time.thread_time` does not count what other programs take; each finds caches that the other has used.
    """
    import torch

    torch.set_num_threads(1)
    runs = (_session(case.path, 1), tilewright(case))
    times: list[list[float]] = [[], []]
    for turn in range(turns + 10):
        for run, taken in zip(runs, times, strict=True):
            start = time.thread_time()
            run()
            if turn >= 10:
                taken.append(time.thread_time() - start)
    ratios = [theirs / ours for theirs, ours in zip(*times, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return statistics.median(times[0]), statistics.median(times[1]), middle, low, high


CONTENDERS: dict[str, Callable[[Case], Run]] = {"onnxruntime": onnxruntime, "tilewright": tilewright}


@click.command()
@click.option("--only", multiple=True, help="A model, a variant, or both: 'bert', 'qdq', 'bert qdq'; may be repeated.")
@click.option("--threads", default=1, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--budget", default=15.0, show_default=True, help="Seconds for choosing kernels, a file.")
@click.option("--turns", default=0, help="Compare thread time of this many calls each, in turns in one process, instead.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Where the figures go.")
def main(only: tuple[str, ...], threads: int, rounds: int, budget: float, turns: int, out: Path | None) -> None:
    """Time each file in both, and print a line a file."""
    import numpy as np

    found: dict[str, Any] = {}
    print(f"{threads} threads{'':14}  onnxruntime ms  tilewright ms  ratio  off: onnxruntime  tilewright")
    with tempfile.TemporaryDirectory() as folder:
        for model in files.MODELS:
            for variant in files.VARIANTS:
                name = f"{model} {variant}"
                if (only and not {model, variant, name} & set(only)) or (model, variant) in files.UNWRITABLE:
                    continue
                path = str(files.write(model, variant, Path(folder)))
                if turns:
                    theirs, ours, middle, low, high = found[name] = in_turns(Case(path, budget), turns)
                    quartiles = f"{middle:8.3f}x ({low:.3f} to {high:.3f})"
                    print(f"{name:24}{1e3 * theirs:14.3f}{1e3 * ours:15.3f}{quartiles}", flush=True)
                    continue
                want = np.asarray(_session(path, 1, optimised=False)()[0], np.float64)
                processes = [Process("onnx_tools", n, threads) for n in CONTENDERS]
                try:
                    times, refused = compete(
                        processes,
                        Case(path, budget),
                        rounds=rounds,
                        warm_s=0.05,
                        timed_s=0.2,
                        results=Path(folder),
                        keep=list(CONTENDERS),
                    )
                finally:
                    for process in processes:
                        process.stop()
                got = {n: np.load(Path(folder) / f"{n}.npy").reshape(want.shape) for n in times}
                off = {n: float(np.linalg.norm(g - want) / np.linalg.norm(want)) for n, g in got.items()}
                found[name] = {"seconds": times, "refused": refused, "difference": off}
                print(_line(name, times, refused, off), flush=True)
    if out is not None:
        out.write_text(json.dumps(found))


def _line(name: str, times: dict[str, list[float]], refused: dict[str, str], off: dict[str, float]) -> str:
    if refused:
        return f"{name:24}" + "; ".join(f"{who}: {why}" for who, why in refused.items())
    peer, ours = (1e3 * statistics.median(times[n]) for n in CONTENDERS)
    faster = ratio(times["tilewright"], times["onnxruntime"])
    return f"{name:24}{peer:14.3f}{ours:15.3f}{faster:8.2f}x{off['onnxruntime']:15.1e}{off['tilewright']:13.1e}"


if __name__ == "__main__":
    sys.exit(main())
