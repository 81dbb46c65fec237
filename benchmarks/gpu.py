"""Generated GPU kernels beside the libraries, on a CUDA device.

    python benchmarks/gpu.py [--shapes] [--only bf16] [--product "bf16[512,512] @ bf16[512,512]^T -> bf16"]
                             [--points 8] [--rounds 15] [--inductor] [--xla] [--json FILE]

Prints for each product, as it is measured, our best kernel's time, the best peer's, the limit of the machine's measured rates,
and both ratios. Kernels are verified against exact or float64 sums first, then all replay CUDA graphs in turn, in another order
each time, on random data: "loaded" without a pause, and "cool" after one, since a card at its power limit runs at another
clock. Without --shapes, the headlines; with it, sixty shapes of Llama 3, BERT, GPT-2 XL and SDXL in three types, and the
geometric mean of the ratios.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch

from gpu_peers import inductor, products, xla_us
from tilewright.candidates.library._around import side, stores
from tilewright.compiler import optimise
from tilewright.hardware.ceilings import with_ceilings
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.notation import parse
from tilewright.schedule.candidate import Candidate, Schedule, discover, plan_for, refusal
from tilewright.schedule.problem import Problem, problem_of

XLA_THREAD = "s8[16,1024,1024] @ s8[16,1024,1024]^T -> s8"
HEADLINES = (
    XLA_THREAD,
    "s8[8192,8192] @ s8[8192,8192]^T -> s8",
    "f8e4m3fn[8192,8192] scale=channel @ f8e4m3fn[8192,8192]^T scale=channel -> bf16",
    "bf16[8192,8192] @ bf16[8192,8192]^T -> bf16",
    "bf16[8192,8192] @ bf16[8192,8192]^T + bias, gelu_tanh -> bf16",
    "bf16[1000,4096] @ bf16[4096,776] -> bf16",
)
# N and K of the products of a layer, and the rows they are tried with.
LAYERS = (
    (((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), (128, 512, 2048, 8192)),  # Llama 3 8B, Mixtral's experts
    (((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)), (128, 1024, 4096)),  # Llama 3 70B
    (((2304, 768), (768, 768), (3072, 768), (768, 3072)), (384, 3072, 8192)),  # BERT
    (((4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400)), (1024, 4096)),  # GPT-2 XL
    (((1280, 1280), (10240, 1280), (1280, 5120), (640, 640), (5120, 640), (640, 2560)), (1024, 4096)),  # SDXL
)
FORMS = {
    "bf16": "bf16[{m},{k}] @ bf16[{n},{k}]^T -> bf16",
    "fp8": "f8e4m3fn[{m},{k}] scale=channel @ f8e4m3fn[{n},{k}]^T scale=channel -> bf16",
    "s8": "s8[{m},{k}] scale=channel @ s8[{n},{k}]^T scale=channel -> bf16",
}
PAUSE_S = 0.25
WARM_S = 0.7  # until a card that is loaded has come to the clock that it keeps
Point = tuple[str, Schedule]


def problem(line: str) -> Problem:
    """The problem that a line of the gemm notation asks, after the rules."""
    return problem_of(optimise(parse(line)).outputs[0])


def generated() -> list[Candidate]:
    """The candidates that generate GPU kernels."""
    return [c for c in discover() if c.preference < 10 and "gemm" in c.kinds and "cuda" in c.devices]


def compile_one(job: tuple[str, Point, Target]) -> str | None:
    """Fill Triton's cache, in a process of its own; why it cannot be built."""
    line, (name, schedule), target = job
    candidate = next(c for c in generated() if c.name == name)
    try:
        plan_for(candidate, problem(line), target).build(schedule)
    except Exception as error:
        return f"{line} {name} {schedule}: {error}"
    return None


def points(p: Problem, target: Target, count: int) -> list[Point]:
    """The first points of the most promising generator's space."""
    able = next((c for c in generated() if refusal(c, p, target) is None), None)
    return [] if able is None else [(able.name, s) for s in list(plan_for(able, p, target).schedules())[:count]]


def random_sources(p: Problem) -> list[torch.Tensor]:
    """Random data on the device: integers over their full range, scales around 1."""
    made: list[torch.Tensor] = []
    for i, t in enumerate(p.types):
        storage = t.dtype.to_torch()
        if t.dtype.is_integer:
            low, high = max(int(t.dtype.min), -(1 << 20)), min(int(t.dtype.max), 1 << 20)
            made.append(torch.randint(low, high + 1, t.shape, device="cuda", dtype=torch.int32).to(storage))
        elif i in (p.lhs.source, p.rhs.source) or t.dtype.name != "f32":
            made.append(torch.randn(t.shape, device="cuda").to(storage))
        else:
            made.append(torch.rand(t.shape, device="cuda") + 0.5)
    return made


def expected(p: Problem, sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The results, of exact sums of integers or float64 sums of floats."""
    a, b = side(p.op.lhs, {})(sources), side(p.op.rhs, {})(sources)
    product = a.double() @ b.double()
    acc = product.to(torch.int64).to(torch.int32) if p.acc.dtype.is_integer else product.float()
    return stores(p, p.acc.dtype)(acc, sources)


def wrong(results: Sequence[torch.Tensor], all_wanted: Sequence[torch.Tensor]) -> str | None:
    """Say what is wrong with results; None if nothing is."""
    for value, wanted in zip(results, all_wanted, strict=True):
        if not value.dtype.is_floating_point:
            if not torch.equal(value, wanted):
                return f"{int((value != wanted).sum())} of {value.numel()} elements differ"
        else:
            error = float((value.double() - wanted.double()).norm() / wanted.double().norm())
            if not error < 1e-2:
                return f"relative error {error:.1e}"
    return None


def captured(run: Callable[[], object], count: int) -> torch.cuda.CUDAGraph:
    """A graph of `count` calls."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Microseconds of one of the calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / count


def timed(runs: dict[str, Callable[[], object]], p: Problem, rounds: int, *, cool: bool) -> dict[str, tuple[float, float]]:
    """Medians in microseconds, loaded and cool, of runs that take turns, in another order each time."""
    count = 20 if p.ops < 1e11 else 4 if p.ops < 4e11 else 2
    graphs = {name: captured(run, count) for name, run in runs.items()}
    loaded: dict[str, list[float]] = {name: [] for name in graphs}
    order, draw, began = list(graphs), random.Random(0), time.perf_counter()
    while True:
        for graph in graphs.values():
            replay_us(graph, count)
        if not cool or time.perf_counter() - began > WARM_S:
            break
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            loaded[name].append(replay_us(graphs[name], count))
    found: dict[str, tuple[float, float]] = {}
    for name, graph in graphs.items():
        pause = math.nan
        if cool:
            time.sleep(PAUSE_S)
            graph.replay()
            pause = statistics.median(replay_us(graph, count) for _ in range(5))
        found[name] = statistics.median(loaded[name]), pause
    return found


def measure(
    line: str, kernels: Sequence[Point], target: Target, rounds: int, *, cool: bool, with_inductor: bool, with_xla: bool
) -> dict[str, Any]:
    """Measure the times of one product by every contender."""
    p = problem(line)
    sources = random_sources(p)
    peers = products(p, sources) | (inductor(p, sources) if with_inductor else {})
    runs: dict[str, Callable[[], object]] = dict(peers)
    refused: dict[str, str] = {}
    wanted = expected(p, sources)
    for name, schedule in kernels:
        label = f"{name} {schedule}"
        try:
            candidate = next(c for c in generated() if c.name == name)
            run = plan_for(candidate, p, target).build(schedule).prepare({})
            why = wrong(run(sources), wanted)
        except Exception as error:
            why = f"{type(error).__name__}: {str(error)[:200]}"
        if why is None:
            runs[label] = lambda run=run: run(sources)
        else:
            refused[label] = why
    del wanted
    times = timed(runs, p, rounds, cool=cool)
    if with_xla and line == XLA_THREAD:
        took = xla_us(*sources)
        times["XLA, s32 and convert"] = took, took
        peers["XLA, s32 and convert"] = lambda: None
    return {
        "times": times,
        "peers": list(peers),
        "refused": refused,
        "ops": p.ops,
        "limit_us": target.limit_us(p.ops, p.bytes, p.lhs.dtype),
    }


def ratios(found: dict[str, Any]) -> tuple[str, str, float, float]:
    """Our best (loaded), the best peer, and how many times faster ours is, loaded and cool."""
    times, peers = found["times"], found["peers"]
    mine = min((n for n in times if n not in peers), key=lambda n: times[n][0])
    peer = min(peers, key=lambda n: times[n][0])
    return mine, peer, times[peer][0] / times[mine][0], times[peer][1] / times[mine][1]


def brief(kernel: str) -> str:
    """A kernel's name without what it does not do."""
    return " ".join(word for word in kernel.split() if not word.endswith(("=false", "=0")))


@click.command()
@click.option("--shapes", is_flag=True, help="Sixty shapes in three types instead of the headlines.")
@click.option("--only", default="", help="One type of the shapes: bf16, fp8 or s8.")
@click.option("--product", "lines", multiple=True, help="These products, in the notation of `tilewright gemm`.")
@click.option("--points", "count", default=8, show_default=True, help="Kernels of each product, the most promising first.")
@click.option("--rounds", default=15, show_default=True)
@click.option("--inductor", "with_inductor", is_flag=True, help="Inductor's max-autotune too.")
@click.option("--xla", "with_xla", is_flag=True, help="XLA through jax too, on the product of the XLA thread.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Where all times go.")
def main(
    shapes: bool,
    only: str,
    lines: tuple[str, ...],
    count: int,
    rounds: int,
    with_inductor: bool,
    with_xla: bool,
    file: Path | None,
) -> None:
    """Time generated GPU kernels beside their peers."""
    chosen: Sequence[str] = lines or HEADLINES
    if shapes:
        all_shapes = [(m, n, k) for products_, rows in LAYERS for n, k in products_ for m in rows]
        types = [t for t in FORMS if only in ("", t)]
        chosen = [FORMS[t].format(m=m, n=n, k=k) for t in types for m, n, k in all_shapes]
    target = with_ceilings(detect("cuda"))
    kernels = {line: points(problem(line), target, count) for line in chosen}
    jobs = [(line, point, target) for line, found in kernels.items() for point in found]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for why in filter(None, pool.map(compile_one, jobs)):
            print(why, file=sys.stderr)
    results: dict[str, Any] = {}
    reached: dict[str, float] = {}
    columns = ("product", "ours us", "T/s", "peer us", "limit us", "ratio", "cool", "kernel", "peer")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for line in chosen:
        found = results[line] = measure(
            line, kernels[line], target, rounds, cool=not shapes, with_inductor=with_inductor, with_xla=with_xla
        )
        for label, why in found["refused"].items():
            print(f"{line}: {label}: {why}", file=sys.stderr)
        if set(found["times"]) == set(found["peers"]):
            print(f"{line}: no kernel of ours is right", file=sys.stderr)
            continue
        mine, peer, loaded, cool = ratios(found)
        reached[line] = loaded
        ours = found["times"][mine][0]
        row = (f"{ours:.2f}", f"{found['ops'] / ours / 1e6:.0f}", f"{found['times'][peer][0]:.2f}", f"{found['limit_us']:.2f}")
        print(f"| {' | '.join((line, *row, f'{loaded:.3f}', f'{cool:.3f}', brief(mine), peer))} |", flush=True)
        if file is not None:
            file.write_text(json.dumps(results))
    if shapes:
        for name, form in FORMS.items():
            mine = [ratio for line, ratio in reached.items() if line.startswith(form.split("[")[0] + "[")]
            if mine:
                mean = math.exp(sum(map(math.log, mine)) / len(mine))
                kept = math.exp(sum(math.log(max(r, 1.0)) for r in mine) / len(mine))
                said = f"{name}, {len(mine)} products: geometric mean {mean:.3f}, worst {min(mine):.3f}"
                print(f"{said}; with the library beside ours {kept:.3f}")


if __name__ == "__main__":
    main()
