"""Contenders in processes of their own that take turns: medians over rounds, ratios round by round.

A module of contenders has a frozen dataclass `Case` and `CONTENDERS`, which holds for each name a function from a case to a
function that runs it once. One process serves one contender for all cases, so that a library is started once and never shares
a process, or its threads, with another.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# One that is this many times slower than the best in the first two rounds keeps those figures and sits the others out.
OUTCLASSED = 3.0
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>: the signal a process gets when its parent ends


class Process:
    """One contender, waiting for its turns."""

    def __init__(self, module: str, name: str, threads: int):
        self.name = name
        self._command = [sys.executable, str(HERE / "rounds.py"), module, name]
        counts = {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
        self._environment = {**os.environ, **counts, "JAX_PLATFORMS": "cpu"}
        self._child = self._started()

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=self._environment,
        )  # fmt: skip

    def take(self, case: object, result: Path | None = None) -> str | None:
        """None once it has run the case, else why it cannot. The result, if asked for, is written as .npy of float64."""
        answer = self._ask("case", json.dumps(asdict(case)), str(result or ""))  # type: ignore[call-overload]
        if not answer:  # its process ended
            self._child.wait()
            self._child = self._started()
            return "its process died"
        return None if answer == "ready" else answer

    def turn(self, warm_s: float, timed_s: float, least: int) -> float:
        """Median seconds of a call, of at least `least` calls that take `timed_s` together."""
        return float(self._ask("go", str(warm_s), str(timed_s), str(least)))

    def stop(self) -> None:
        self._child.kill()
        self._child.wait()

    def _ask(self, *words: str) -> str:
        """The answer. Until the next question the process is held: threads that spin after their work would slow the others."""
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            self._child.send_signal(signal.SIGCONT)
            self._child.stdin.write("\t".join(words) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return ""
        answer = self._child.stdout.readline().strip()
        self._child.send_signal(signal.SIGSTOP)
        return answer


def compete(
    processes: Sequence[Process], case: object, *, rounds: int, warm_s: float = 0.03, timed_s: float = 0.06, least: int = 3,
    results: Path | None = None, keep: Iterable[str] = (),
) -> tuple[dict[str, list[float]], dict[str, str]]:  # fmt: skip
    """Seconds by contender and round, and why the others did not take part.

    Args:
        processes: prepared one after another, in this order: what one chooses by measuring must not meet another at work.
        case: an instance of their module's `Case`.
        rounds: turns of each.
        warm_s, timed_s, least: see `Process.turn`; warming goes before each turn.
        results: a folder for each contender's result, `<name>.npy`.
        keep: who takes part in all rounds however slow.
    """
    ready, refused = list[Process](), dict[str, str]()
    for process in processes:
        why = process.take(case, results / f"{process.name}.npy" if results is not None else None)
        if why is None:
            ready.append(process)
        else:
            refused[process.name] = why
    times: dict[str, list[float]] = {p.name: [] for p in ready}
    order = random.Random(0)
    for i in range(rounds):
        for process in order.sample(ready, len(ready)):
            times[process.name].append(process.turn(warm_s, timed_s, least))
        if i == 1:
            bar = OUTCLASSED * min((min(t) for t in times.values()), default=0.0)
            ready = [p for p in ready if min(times[p.name]) <= bar or p.name in keep]
    return times, refused


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times faster we are: the median of the ratios of the rounds that both ran."""
    return statistics.median(t / o for o, t in zip(ours, theirs, strict=False))


def _serve(module: str, name: str) -> None:
    if sys.platform == "linux":  # a run that is killed leaves nobody at work beside the next one
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    contenders = importlib.import_module(module)
    run: Callable[[], Any] | None = None
    for line in sys.stdin:
        word, *rest = line.rstrip("\n").split("\t")
        if word == "case":
            run = None  # the last case's memory goes before the next one's comes
            try:
                run = contenders.CONTENDERS[name](contenders.Case(**json.loads(rest[0])))
                result = run()
                if rest[1]:
                    _save(result, rest[1])
                answer = "ready"
            except Exception as why:  # one that cannot is left out, with its own words
                answer = (str(why).splitlines() or [type(why).__name__])[0] or type(why).__name__
        else:
            assert run is not None
            answer = str(_timed(run, float(rest[0]), float(rest[1]), int(rest[2])))
        print(answer, file=answers, flush=True)


def _timed(run: Callable[[], Any], warm_s: float, timed_s: float, least: int) -> float:
    began = time.perf_counter()
    while time.perf_counter() - began < warm_s:
        run()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < least or time.perf_counter() - began < timed_s:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _save(result: Any, path: str) -> None:
    import numpy as np

    if isinstance(result, (list, tuple)):
        result = result[0]
    np.save(path, result.double().numpy() if hasattr(result, "double") else np.asarray(result).astype(np.float64))


if __name__ == "__main__":
    _serve(*sys.argv[1:])
