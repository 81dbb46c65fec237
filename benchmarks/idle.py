"""Cost of a call after 50 ms of rest: a thread pool that has gone to sleep must be woken.

    python benchmarks/idle.py [--product "f32 128x768x768"] [--threads 2] [--rest-ms 50] [--calls 40]

For each contender, in a process of its own and alone: the median of calls that follow each other, and the median and the 90th
percentile of what a call after a rest takes more. Of that, caches that others used meanwhile and a clock that slowed down are
everyone's; `one thread` runs ours without a pool and shows how much that is.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict

import click

from contenders import CONTENDERS, Case

CONTESTED = ("tilewright", "torch", "onednn", "onnxruntime", "openblas")


@click.command()
@click.option("--product", default="f32 128x768x768", show_default=True, help="TYPE [BATCHx]MxNxK[ + bias[, gelu]].")
@click.option("--threads", default=2, show_default=True)
@click.option("--rest-ms", default=50.0, show_default=True)
@click.option("--calls", default=40, show_default=True, help="Calls of each kind.")
@click.option("--serve", hidden=True, help="Be this contender.")
def main(product: str, threads: int, rest_ms: float, calls: int, serve: str | None) -> None:
    """Time calls after a rest beside calls that follow each other."""
    case = Case.parse(product)
    if serve is not None:
        print(json.dumps(measure(serve, case, rest_ms / 1e3, calls)))
        return
    print(f"{product}, a call after {rest_ms:g} ms of rest, {threads} threads")
    for name, count in (("tilewright", 1), *((n, threads) for n in CONTESTED)):
        command = [sys.executable, __file__, "--serve", name, "--product", product, "--rest-ms", str(rest_ms)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(count), "OPENBLAS_NUM_THREADS": str(count)}
        done = subprocess.run([*command, "--calls", str(calls)], capture_output=True, text=True, env=environment, check=False)
        label = "one thread" if count < threads else name
        if done.returncode != 0:
            print(f"{label:12s} {(done.stderr.strip().splitlines() or ['died'])[-1]}")
            continue
        hot, more, worst = json.loads(done.stdout.splitlines()[-1])
        print(f"{label:12s} {1e3 * hot:8.3f} ms; after a rest {1e3 * more:+7.3f} ms, 90th percentile {1e3 * worst:+7.3f} ms")


def measure(name: str, case: Case, rest_s: float, calls: int) -> tuple[float, float, float]:
    """Seconds of a call among others; what one after a rest takes more, median and 90th percentile."""
    run = CONTENDERS[name](Case(**asdict(case)))

    def timed() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    for _ in range(10):
        run()
    hot: list[float] = []
    rested: list[float] = []
    for _ in range(calls):
        run()
        run()
        hot.append(timed())
        time.sleep(rest_s)
        rested.append(timed())
    usual = statistics.median(hot)
    return usual, statistics.median(rested) - usual, sorted(rested)[calls * 9 // 10] - usual


if __name__ == "__main__":
    main()
