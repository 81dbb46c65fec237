"""Calls on a machine that others keep busy: one thread and several, beside ONNX Runtime and torch.

    python benchmarks/busy.py [--load 0 --load 16] [--case "bert qdq"] [--case "s8 64x1024x1024"] [--threads 2] [--rounds 12]

A load is a number of processes that never rest; what else runs on the machine comes on top. Contenders take turns of `--turn`
seconds, each in a process of its own that is held while others have theirs; each round begins with another one, so that all
meet the same load. The columns are the median and the 90th percentile of all calls, and the time a call of a usual turn: the
median over the turns of their means, which a turn that lost its core for long does not decide. Ratios are those of two turns of
one round, their quartiles over the rounds: several threads over one, and Tilewright over ONNX Runtime with as many threads.
Where the quartiles lie on both sides of 1, nothing is told apart. A case is a model and a variant of `onnx_tool_files.py`, or a
product as `contenders.py` spells it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import click

import onnx_tool_files as files
from contenders import CONTENDERS, Case

CASES = ("bert f32", "bert qdq", "f32 64x1024x256", "s8 512x1024x1024", "f32 512x2048x2048")
NAMES = ("tilewright", "onnxruntime", "torch")
BUDGET_S = 60.0  # of which small models take a part; a busy machine needs more for the same


class Contender:
    """A contender of one case on a number of threads, in a process of its own that is stopped between its turns."""

    def __init__(self, name: str, threads: int, case: str, folder: str):
        self.name, self.threads, self.turns = name, threads, list[list[float]]()
        command = [sys.executable, __file__, "--serve", name, "--case", case, "--folder", folder, "--threads", str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.refused = self._asked("")

    def turn(self, seconds: float) -> None:
        """Run the case for so many seconds."""
        self.turns.append(json.loads(self._asked(str(seconds))))

    @property
    def figures(self) -> tuple[float, float, float]:
        """Seconds of a call: the median, the 90th percentile, and what a usual turn gives."""
        times = sorted(itertools.chain(*self.turns))
        return statistics.median(times), times[len(times) * 9 // 10], statistics.median(map(statistics.fmean, self.turns))

    def over(self, other: Contender) -> str:
        """The quartiles over the rounds of how many times as long a call took as another contender's."""
        ratios = [statistics.fmean(a) / statistics.fmean(b) for a, b in zip(self.turns, other.turns, strict=True)]
        return " ".join(f"{q:.2f}" for q in statistics.quantiles(ratios, n=4)) if len(ratios) > 1 else f"{ratios[0]:.2f}"

    def _asked(self, word: str) -> str:
        assert self._child.stdin is not None and self._child.stdout is not None
        if word:
            self._child.send_signal(signal.SIGCONT)
            print(word, file=self._child.stdin, flush=True)
        answer = self._child.stdout.readline().strip()
        self._child.send_signal(signal.SIGSTOP)
        return answer

    def stop(self) -> None:
        self._child.kill()
        self._child.wait()


@contextlib.contextmanager
def busy(count: int) -> Generator[None]:
    """A machine with so many processes more that never rest."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    time.sleep(0.3)
    try:
        yield
    finally:
        for other in others:
            other.kill()
        for other in others:
            other.wait()


def prepared(name: str, case: str, folder: str, threads: int) -> Callable[[], Any]:
    """A contender's function that runs a case once."""
    import torch

    if case.split()[0] not in files.MODELS:
        return CONTENDERS[name](Case.parse(case))
    model, variant = case.split()
    path = files.write(model, variant, Path(folder))
    feeds = files.feeds()
    tensors = {n: torch.from_numpy(v) for n, v in feeds.items()}
    if name == "onnxruntime":
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return lambda: session.run(None, feeds)
    if name == "torch":
        if variant != "f32":
            raise NotImplementedError("torch reads no ONNX file")
        torch.manual_seed(0)
        module = files.module(model)
        return torch.inference_mode()(lambda: module(**tensors))
    from tilewright import compile

    program = compile(path, budget_s=BUDGET_S)
    return lambda: program(**tensors)


def serve(name: str, case: str, folder: str, threads: int) -> None:
    """Answer as a `Contender` until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        run = prepared(name, case, folder, threads)
        for _ in range(5):
            run()
    except NotImplementedError as error:
        print(error, file=answers, flush=True)
        return
    print(file=answers, flush=True)
    for line in sys.stdin:
        times, began = list[float](), time.perf_counter()
        while time.perf_counter() - began < float(line) or len(times) < 3:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        print(json.dumps(times), file=answers, flush=True)


@click.command()
@click.option("--load", "loads", multiple=True, type=int, default=(0, 2, 8, 16), show_default=True, help="Busy processes.")
@click.option("--case", "cases", multiple=True, default=CASES, show_default=True)
@click.option("--threads", default=2, show_default=True, help="Beside one.")
@click.option("--rounds", default=12, show_default=True)
@click.option("--turn", default=0.2, show_default=True, help="Seconds: many of the system's time slices.")
@click.option("--only", multiple=True, default=NAMES, show_default=True, help="Contenders.")
@click.option("--serve", "served", hidden=True)
@click.option("--folder", hidden=True)
def main(
    loads: tuple[int, ...],
    cases: tuple[str, ...],
    threads: int,
    rounds: int,
    turn: float,
    only: tuple[str, ...],
    served: str | None,
    folder: str | None,
) -> None:
    """Time each case under each load, and print a line a contender."""
    if served is not None:
        serve(served, cases[0], str(folder), threads)
        return
    print(f"{'':19}one thread, ms{'':19}{threads} threads, ms{'':12}{threads} over one")
    print(f"{'':12}median  90th pc     turn      median  90th pc     turn     quartiles")
    with tempfile.TemporaryDirectory() as written:
        for case in cases:
            if case.split()[0] in files.MODELS:
                files.write(case.split()[0], case.split()[1], Path(written))
            ready = [Contender(n, t, case, written) for n in only for t in (1, threads)]
            taking = [c for c in ready if not c.refused]
            try:
                for load in loads:
                    for contender in taking:
                        contender.turns.clear()
                    with busy(load):
                        for i in range(rounds):
                            for contender in (*taking[i % len(taking) :], *taking[: i % len(taking)]):
                                contender.turn(turn)
                    print(f"{case}, {load} busy processes, load average {os.getloadavg()[0]:.1f}")
                    known = {(c.name, c.threads): c for c in taking}
                    for one, more in [(known[n, 1], known[n, threads]) for n in only if (n, 1) in known]:
                        columns = "   ".join("".join(f"{1e3 * x:9.3f}" for x in c.figures) for c in (one, more))
                        print(f"{one.name:11}{columns}     {more.over(one)}", flush=True)
                    for count in (1, threads):
                        ours, theirs = (known.get((n, count)) for n in NAMES[:2])
                        if ours is not None and theirs is not None:
                            print(f"  over onnxruntime, {count} thread{'s' * (count > 1)}: {ours.over(theirs)}", flush=True)
            finally:
                for contender in ready:
                    contender.stop()


if __name__ == "__main__":
    main()
