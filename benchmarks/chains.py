"""A program's call with steps in chains beside the same steps one by one: µs, and calls a second from several threads.

    python benchmarks/chains.py [--layers 8] [--rounds 9] [--seconds 0.5]

The programs are layers of products with a norm behind each, of 1 x 64 x 64 (whose work is little) to 64 x 256 x 256. The same
kernels run both ways, on one thread each; ways take turns. Times are the least of the rounds, throughputs the medians.
"""

from __future__ import annotations

import copy
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import click
import torch

import tilewright


def model(layers: int, width: int) -> torch.nn.Module:
    """Products with a norm behind each."""
    kinds = [k for _ in range(layers) for k in (torch.nn.Linear(width, width), torch.nn.LayerNorm(width))]
    return torch.nn.Sequential(*kinds).eval()


def one_by_one(program: Any) -> Any:
    """The program over the same kernels, of which none is in a chain."""
    made = copy.copy(program)
    made.swap(tuple(replace(step, run=partial(_run, step.run)) for step in program.steps))
    return made


def _run(run: Callable[[Sequence[object]], Sequence[object]], values: Sequence[object]) -> Sequence[object]:
    return run(values)


def least_us(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """The least time of a call of each, in turns."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times in zip(calls, taken, strict=True):
            call()
            begun = time.perf_counter()
            for _ in range(300):
                call()
            times.append((time.perf_counter() - begun) / 300 * 1e6)
    return [min(times) for times in taken]


def throughput(call: Callable[[], object], threads: int, seconds: float) -> float:
    """Calls a second from so many threads."""
    counts, ends = [0] * threads, time.perf_counter() + seconds

    def work(i: int) -> None:
        while time.perf_counter() < ends:
            call()
            counts[i] += 1

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(counts) / seconds


@click.command()
@click.option("--layers", default=8, show_default=True)
@click.option("--rounds", default=9, show_default=True)
@click.option("--seconds", default=0.5, show_default=True)
def main(layers: int, rounds: int, seconds: float) -> None:
    """Print the table."""
    print("| rows x width | steps | in chains, µs | one by one | 1 thread, calls/s | | 2 threads | | 4 threads | |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for rows, width in ((1, 64), (16, 64), (16, 256), (64, 256)):
        x = torch.randn(rows, width)
        program = tilewright.compile(model(layers, width), example_inputs=(x,), budget_s=5, threads=1)
        ways = [partial(p, x) for p in (program, one_by_one(program))]
        cells = [f"{us:.1f}" for us in least_us(ways, rounds)]
        for threads in (1, 2, 4):
            found = [[throughput(way, threads, seconds) for way in ways] for _ in range(rounds)]
            cells += [f"{statistics.median(f):,.0f}" for f in zip(*found, strict=True)]
        print(f"| {rows} x {width} | {len(program.steps)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
