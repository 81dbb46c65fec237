"""Contenders in processes of their own that take turns: medians over rounds, ratios round by round."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).parent
WARM_S, TIMED_S = 0.03, 0.06


class Process:
    """One contender, waiting for its turns."""

    def __init__(self, name: str, case: object, threads: int):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
        self.name = name
        self._child = subprocess.Popen(
            [sys.executable, str(HERE / "rounds.py"), name, json.dumps(asdict(case))],  # type: ignore[call-overload]
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def ready(self) -> str | None:
        """None once it can run, else why it cannot."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline().strip()
        if line == "ready":
            return None
        self._child.wait()
        assert self._child.stderr is not None
        return line or (self._child.stderr.read().strip().splitlines() or ["died"])[-1]

    def turn(self) -> float:
        """Median seconds of a call."""
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write("go\n")
        self._child.stdin.flush()
        return float(self._child.stdout.readline())

    def stop(self) -> None:
        self._child.kill()
        self._child.wait()


def compete(names: Sequence[str], case: object, *, rounds: int, threads: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds by contender and round, and why the others did not take part."""
    started = [Process(name, case, threads) for name in names]
    processes, refused = list[Process](), dict[str, str]()
    for process in started:
        why = process.ready()
        if why is None:
            processes.append(process)
        else:
            refused[process.name] = why
    times: dict[str, list[float]] = {p.name: [] for p in processes}
    order = random.Random(0)
    try:
        for _ in range(rounds):
            for process in order.sample(processes, len(processes)):
                times[process.name].append(process.turn())
    finally:
        for process in processes:
            process.stop()
    return times, refused


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times faster we are: the median of the rounds' ratios."""
    return statistics.median(t / o for o, t in zip(ours, theirs, strict=True))


def _serve(name: str, case: str) -> None:
    import contenders

    try:
        run = contenders.CONTENDERS[name](contenders.Case(**json.loads(case)))
        run()
    except NotImplementedError as why:
        print(why, flush=True)
        return
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        while time.perf_counter() - began < WARM_S:
            run()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 3 or time.perf_counter() - began < TIMED_S:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        print(statistics.median(times), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2])
