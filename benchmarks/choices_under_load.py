"""Kernels chosen while other processes kept the cores busy, beside those chosen on a quiet machine.

    python benchmarks/choices_under_load.py [--busy 16] [--cores 0,1] [--budget 20] [--busy-budget 160] [--threads 2] [--again]

The problems are those of the demo's models, at sequences of 128 and of 16: fifty. All are chosen for twice, each time by a
fresh process with a fresh cache: once beside `--busy` processes that do nothing but compute, on the same cores, and once
without them. Then one process times both choices of each problem in turns. `--again` chooses a third time, in quiet and with
the cache of the first time: what was provisional there should then be raced again. A ratio is the time of what was chosen
under load over the time of what was chosen in quiet, the least of many calls each. Problems for which both chose one kernel
count as 1.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

EXAMPLES = Path(__file__).parents[1] / "examples"
SEQUENCES = (128, 16)
# A process that ends with the one that started it (PR_SET_PDEATHSIG), and computes until then.
BUSY = "import ctypes\nctypes.CDLL(None).prctl(1, 9)\nwhile True: pass"
TURNS, TURN_S = 25, 0.004
GOAL, WORST = 1.1, 1.5


@dataclass(frozen=True)
class Chosen:
    """The decision on a problem: the kernel, its schedule, and what was held against others.

    Attributes:
        candidate, knobs: the kernel.
        time_us: its time when it was chosen; None if nothing was timed.
        lost: sentences on candidates that are held to have crashed or hung.
        provisional: why its times were not trusted; "" if they were.
    """

    candidate: str
    knobs: list[Any]
    time_us: float | None
    lost: list[str]
    provisional: str


def problems() -> dict[str, Any]:
    """The problems of the demo's programs, each once, by the digest of its text."""
    sys.path.insert(0, str(EXAMPLES))  # before this folder, which has a `models`, too
    demo, models = importlib.import_module("demo"), importlib.import_module("models")
    from tilewright.compiler import optimise
    from tilewright.frontends import LoadOptions, load
    from tilewright.hardware.detect import detect
    from tilewright.runtime.partition import decided, parts_for
    from tilewright.schedule.key import digest_of

    folder, sources = EXAMPLES / "models", list[Any]()
    sources += [p.source(folder) for p in demo.PROGRAMS if p.key in ("xla_s8", "mixed_input", "linear_gelu")]
    for sequence in SEQUENCES:
        for name, variant in (("bert", "f32"), ("bert", "int8"), ("distilgpt2", "f32")):
            sources.append(models.write_model(name, variant, folder / str(sequence), batch=1, sequence=sequence))
    found: dict[str, Any] = {}
    for source in sources:
        module, inputs = source if isinstance(source, tuple) else (source, None)
        graph = optimise(load(module, LoadOptions(example_inputs=inputs)))
        posed = (p.posed[0] for p in parts_for(graph, detect("cpu")) if decided(p))
        found |= {digest_of(p): p for p in posed}
    return found


def choose(posed: dict[str, Any], folder: Path, budget_s: float) -> dict[str, Chosen]:
    """A decision for each problem, by a search whose records are kept in a folder."""
    from tilewright.hardware.detect import detect
    from tilewright.schedule.budget import BudgetedChooser
    from tilewright.schedule.cache import Cache
    from tilewright.schedule.tuning_database import TuningDatabase
    from tilewright.schedule.worker import begin

    target = detect("cpu")
    begin()
    database = TuningDatabase(target, Cache(folder))
    decide = BudgetedChooser(dict.fromkeys(posed.values(), 1), target, budget_s, cold=True, database=database)
    found: dict[str, Chosen] = {}
    for digest, problem in sorted(posed.items(), key=lambda kv: -decide.weight(kv[1])):
        d = decide(problem, {})
        lost = [f"{r.candidate}: {r.why}" for r in d.rejected if r.kind == "lost"]
        knobs = [list(k) for k in d.kernel.schedule.knobs]
        found[digest] = Chosen(d.kernel.candidate, knobs, d.time_us, lost, d.provisional)
    return found


def least_us(posed: Any, choices: Sequence[Chosen]) -> list[float]:
    """The least time of a call of each choice, in turns, weights from memory: what else runs only ever adds to a time."""
    from tilewright.hardware.detect import detect
    from tilewright.schedule.candidate import Schedule, discover, plan_for
    from tilewright.schedule.measure import Cold
    from tilewright.schedule.sample import random_sources

    target, sources = detect("cpu"), random_sources(posed)
    constants = {i: t for i, t in enumerate(sources) if posed.weights[i]}
    known, runs = {c.name: c for c in discover()}, list[Callable[[], Any]]()
    for choice in choices:
        kernel = plan_for(known[choice.candidate], posed, target).build(Schedule(tuple(tuple(k) for k in choice.knobs)))
        runner = kernel.prepare(constants)
        runs.append(lambda runner=runner: runner(sources))
    cold = Cold(target, sources, posed.weights) if any(posed.weights) else lambda: None
    least = [math.inf] * len(runs)
    for _ in range(TURNS):
        for i, run in enumerate(runs):
            began = time.perf_counter()
            while True:
                cold()
                start = time.perf_counter()
                run()
                least[i] = min(least[i], 1e6 * (time.perf_counter() - start))
                if time.perf_counter() - began > TURN_S:
                    break
    return least


@contextlib.contextmanager
def busy(count: int) -> Generator[None]:
    """A context with so many processes that compute, on the cores that this one may use."""
    started = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def chosen_elsewhere(folder: Path, count: int, budget_s: float, every: int) -> tuple[dict[str, Chosen], float]:
    """The choices of a fresh process with the cache in a folder, beside so many busy ones, and the seconds that they took."""
    out = folder / "chosen.json"
    command = [sys.executable, __file__, "--choose", str(out), "--busy", str(count), "--budget", str(budget_s)]
    subprocess.run([*command, "--every", str(every)], check=True, env={**os.environ, "TILEWRIGHT_CACHE": str(folder)})
    held = json.loads(out.read_text())
    return {k: Chosen(**v) for k, v in held["choices"].items()}, held["seconds"]


@click.command()
@click.option("--busy", "count", default=16, show_default=True, help="Processes that compute beside the first compile.")
@click.option("--cores", default="0,1", show_default=True, help="Cores for everything; empty for all.")
@click.option("--budget", default=20.0, show_default=True, help="Seconds of each compile, by the clock.")
@click.option("--busy-budget", default=160.0, show_default=True, help="Of the first compile, which has a ninth of the cores.")
@click.option("--threads", default=2, show_default=True)
@click.option("--every", default=1, show_default=True, help="Take every n-th problem alone.")
@click.option("--again", is_flag=True, help="Choose once more in quiet, with what the first compile kept.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Written in the end.")
@click.option("--choose", "out", type=click.Path(dir_okay=False, path_type=Path), hidden=True)
def main(
    count: int,
    cores: str,
    budget: float,
    busy_budget: float,
    threads: int,
    every: int,
    again: bool,
    file: Path | None,
    out: Path | None,
) -> None:
    """Compare choices made under load with choices made in quiet; exit 1 if they miss the goal."""
    if out is not None:
        posed = dict(list(problems().items())[::every])
        with busy(count):
            began = time.monotonic()
            choices = {k: asdict(v) for k, v in choose(posed, out.parent, budget).items()}
            seconds = time.monotonic() - began
        out.write_text(json.dumps({"choices": choices, "seconds": seconds}))
        return
    if cores:
        os.sched_setaffinity(0, {int(c) for c in cores.split(",")})
    os.environ["OMP_NUM_THREADS"] = str(threads)
    posed = dict(list(problems().items())[::every])
    with tempfile.TemporaryDirectory() as folder:
        loaded, quiet = Path(folder, "loaded"), Path(folder, "quiet")
        for made in (loaded, quiet):
            made.mkdir(mode=0o700)
        first, took_s = chosen_elsewhere(loaded, count, busy_budget, every)
        print(f"chosen beside {count} busy processes in {took_s:.1f} s", flush=True)
        second, took_s = chosen_elsewhere(quiet, 0, budget, every)
        print(f"chosen in quiet in {took_s:.1f} s", flush=True)
        compared = {"under load": first}
        if again:
            compared["again"], took_s = chosen_elsewhere(loaded, 0, budget, every)
            print(f"chosen again with what was kept in {took_s:.1f} s", flush=True)
        held = {name: report(name, posed, choices, second) for name, choices in compared.items()}
    if file is not None:
        file.write_text(json.dumps(held, indent=1))
    sys.exit(0 if all(h["reached"] for h in held.values()) else 1)


def report(name: str, posed: dict[str, Any], first: dict[str, Chosen], quiet: dict[str, Chosen]) -> dict[str, Any]:
    """Print how each choice fares beside the one made in quiet; what is written as JSON."""
    rows, lost, provisional = list[dict[str, Any]](), 0, 0
    for digest, problem in posed.items():
        ours, theirs = first[digest], quiet[digest]
        lost += bool(ours.lost)
        provisional += bool(ours.provisional)
        same = (ours.candidate, ours.knobs) == (theirs.candidate, theirs.knobs)
        times = [1.0, 1.0] if same else least_us(problem, [ours, theirs])
        ratio = times[0] / times[1]
        rows.append({"problem": str(problem), "ratio": ratio, "us": times, "ours": asdict(ours), "quiet": asdict(theirs)})
        if not same:
            who = f"{ours.candidate} for {theirs.candidate}" if ours.candidate != theirs.candidate else ours.candidate
            print(f"  {ratio:6.2f}  {times[0]:10.1f} for {times[1]:10.1f} us  {who:24s} {str(problem)[:90]}", flush=True)
        for why in ours.lost:
            print(f"    called crashed or hung: {why}")
    mean, worst = math.exp(sum(math.log(r["ratio"]) for r in rows) / len(rows)), max(r["ratio"] for r in rows)
    timed = sum(first[d].time_us is not None for d in posed)
    print(
        f"{name}: geometric mean {mean:.3f}, worst {worst:.2f}, over {WORST}: {sum(r['ratio'] > WORST for r in rows)} of "
        f"{len(rows)}; {timed} timed, {provisional} provisional, {lost} with a candidate called crashed or hung"
    )
    return {"mean": mean, "worst": worst, "lost": lost, "rows": rows, "reached": mean <= GOAL and worst <= WORST and not lost}


if __name__ == "__main__":
    main()
