"""Weights of 4 bits on a CUDA device beside the libraries: products as decoding launches them, weights read from memory.

    python benchmarks/w4_gpu.py [--shapes] [--rows 1,16] [--group 64] [--points 2] [--bytes 200000000] [--seconds 150] [--build]

A call has a copy of the weight that no call before it in the graph had, so that it comes from memory and no cache. "chain":
one product after the other; "alone" (few rows): between kernels that end before the next one begins, less what those take.
"ours" is the fastest of the points that `tilewright.Linear.tune` would time, those over a copy of the weight in 16 bits among
them ("copy"); "first" is the one that a layer takes unmeasured. Peers are cuBLAS in f16, torch's kernel for 4-bit weights
(bf16, few rows), gemlite where it is installed and brings tuned settings for the shape, and cuBLASLt in fp8 with its
quantising, which rounds the activations to 8 bits: a ratio with it and one without it are given. The error is the largest of
our kernels' relative ones, against float64 on the dequantised weights.

With --shapes, the weights of Llama 3 8B and 70B. --build compiles what would be timed, notes it in the file --kept, and ends; a
run with that file compiles nothing. --seconds begins no further weight once they are over.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch

from tilewright.compiler import optimise
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.notation import parse
from tilewright.ir.ops import Input
from tilewright.linear.kernels import FEW_ROWS
from tilewright.schedule.candidate import Candidate, discover
from tilewright.schedule.problem import Problem, problem_of
from tilewright.schedule.schedule import Schedule

THREAD = ((3584, 8192),)
LLAMA = (
    *((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1024, 4096), (14336, 4096)),
    *((8192, 8192), (10240, 8192), (57344, 8192), (8192, 28672), (28672, 8192), (1024, 8192)),
)
DEVICE = "cuda"
MOST_COPIES = 24
REPLAYS = (5, 15)
REPLAYED_US = 15_000.0  # about how long a graph is replayed
ALONE = 32  # rows, up to which a call alone is timed as well
SAMPLE = 1024  # columns of the result that are compared with float64
TIE = 1.03
LIMIT = {torch.float16: 3e-4, torch.bfloat16: 3e-3}
Run = Callable[[], object]
Point = tuple[str, Schedule]


def problem(rows: int, outs: int, k: int, group: int) -> Problem:
    """f16 x [rows, k] by codes [outs, k], as `tilewright.Linear` poses it: few rows leave the scaled weights unrounded."""
    graph = optimise(parse(f"f16[{rows},{k}] @ s4[{outs},{k}]^T group={group} -> f16"), excess_precision=rows <= FEW_ROWS)
    (node,) = graph.outputs
    p = problem_of(node)
    assert isinstance(p, Problem)
    return Problem(p.op, p.types, tuple(isinstance(s.op, Input) and s.op.label.startswith("b") for s in node.src))


def generated() -> dict[str, Candidate]:
    """The candidates that generate kernels for such weights on GPUs, the preferred one first."""
    return {c.name: c for c in discover() if c.preference < 10 and "gemm" in c.kinds and "cuda" in c.devices}


def points(p: Problem, target: Target, count: int) -> list[Point]:
    """The first points of every generator for Hopper that can."""
    able = [c for c in generated().values() if c.name.startswith("hopper") and c.refuse(p, target) is None]
    return [(c.name, s) for c in able for s in list(c.schedules(p, target))[:count]]


def build(job: tuple[int, int, int, int, int, bool]) -> tuple[list[Point], list[str]]:
    """The points of a case, compiled into Triton's cache; and what cannot be built."""
    rows, outs, k, group, count, gemlite = job
    p, target = problem(rows, outs, k, group), detect("cuda")
    found, failed = list[Point](), list[str]()
    for name, schedule in points(p, target, count):
        try:
            generated()[name].build(p, schedule, target)
            found.append((name, schedule))
        except Exception as error:
            failed.append(f"{p} {name} {schedule}: {str(error)[:200]}")
    if gemlite:
        codes = torch.zeros((outs, k), dtype=torch.int8, device=DEVICE)
        layer = of_gemlite(codes, torch.ones((outs, k // group), dtype=torch.float16, device=DEVICE))
        if layer is not None:
            layer(torch.zeros((rows, k), dtype=torch.float16, device=DEVICE))
    return found, failed


def replay_us(calls: Sequence[Run]) -> float:
    """Microseconds of a call, in a graph of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    replays = REPLAYS[1]
    while len(times) < replays + 2:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
        replays = max(REPLAYS[0], min(REPLAYS[1], int(REPLAYED_US / times[-1])))
    return statistics.median(times[2:]) / len(calls)


def alone_us(calls: Sequence[Run]) -> float:
    """Microseconds of a call that begins when what is ahead of it has ended."""
    mark = torch.zeros(1, device=DEVICE)
    between: list[Run] = [lambda: mark.add_(1)] * len(calls)
    return replay_us([c for pair in zip(between, calls, strict=True) for c in pair]) * 2 - replay_us(between)


def read_tbps() -> float:
    """What reading memory reaches, by the best of torch's reductions over 4 GB."""
    x = torch.rand(1 << 30, device=DEVICE)
    loops: list[Run] = [lambda: torch.sum(x), lambda: torch.amax(x), lambda: torch.dot(x, x)]
    return x.nbytes / min(replay_us([loop]) for loop in loops) / 1e6


class Weights:
    """One weight in copies, as ours and the peers' kernels read it."""

    def __init__(self, outs: int, k: int, group: int, at_least: int) -> None:
        self.outs, self.k, self.group = outs, k, group
        self.copies = max(2, min(MOST_COPIES, -(-at_least // (outs * k // 2))))
        codes = torch.randint(-8, 8, (outs, k), device=DEVICE, dtype=torch.int8)
        scales = (torch.rand(outs, k // group, device=DEVICE) * 0.02 + 0.01).half()
        self.sources = [(torch.roll(codes, i, 0), torch.roll(scales, i, 0)) for i in range(self.copies)]
        chosen = torch.randperm(outs, device=DEVICE)[:SAMPLE]
        self.chosen, self.sample = chosen, self._dense(codes[chosen].double(), scales[chosen].double())
        dense = self._dense(codes.half(), scales)
        self.dense = [dense.clone() for _ in range(max(self.copies // 4, 2))]
        self.eight = [dense.to(torch.float8_e4m3fn) for _ in range(max(self.copies // 2, 2))] if outs % 16 == 0 else []
        pairs = (codes.to(torch.uint8) + 8) & 15
        packed = torch.ops.aten._convert_weight_to_int4pack((pairs[:, ::2] << 4 | pairs[:, 1::2]).contiguous(), 8)
        self.four = [packed.clone() for _ in range(self.copies)]
        self.sides = torch.stack((scales.T, torch.zeros_like(scales.T)), -1).bfloat16().contiguous()
        self.gemlite: list[Any] = []

    def _dense(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (codes.view(len(codes), -1, self.group) * scales[:, :, None]).view(len(codes), self.k)


def of_gemlite(codes: torch.Tensor, scales: torch.Tensor) -> Any:
    """A layer of gemlite's with the settings that it brings for an H100; None if it is not there or has none for the shape."""
    if not importlib.util.find_spec("gemlite"):
        return None
    gemlite, helper = importlib.import_module("gemlite"), importlib.import_module("gemlite.helper")
    settings = Path(str(gemlite.__file__)).parent / "configs" / "h100.json"
    outs, k = codes.shape
    if f'"(16, {outs}, {k}, {k // scales.shape[1]}, ' not in settings.read_text():
        return None
    gemlite.GemLiteLinear.load_config(str(settings))
    each = scales.reshape(-1, 1)
    made = helper.A16W4_HQQ_INT(device="cuda:0", dtype=torch.float16)
    return made.from_weights((codes + 8).to(torch.uint8), each, torch.full_like(each, 8))


def peers(w: Weights, x: torch.Tensor) -> dict[str, list[Run]]:
    """Calls of the libraries, one a copy of the weight."""
    rows, one = x.shape[0], torch.ones((), device=DEVICE)
    calls: dict[str, list[Run]] = {"cuBLAS": [partial(torch.mm, x, m.T) for m in w.dense]}

    def scaled(m: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._scaled_mm(x.to(m.dtype), m.T, one, one, out_dtype=x.dtype, use_fast_accum=True)

    if w.eight and rows % 16 == 0:
        calls["fp8"] = [partial(scaled, m) for m in w.eight]
    if rows <= 64:
        mm, narrow = torch.ops.aten._weight_int4pack_mm, x.bfloat16()
        calls["int4"] = [partial(mm, narrow, m, w.group, w.sides) for m in w.four]
    if w.gemlite:
        calls["gemlite"] = [partial(layer, x) for layer in w.gemlite]
        want = x.double() @ w.sample.T
        off = float((w.gemlite[0](x)[:, w.chosen].double() - want).norm() / want.norm())
        if not off < 1e-2:
            print(f"gemlite is wrong at {rows} rows: relative error {off:.1e}", flush=True)
            del calls["gemlite"]
    return calls


@dataclass
class Row:
    """What was measured of a case, in microseconds."""

    rows: int
    outs: int
    k: int
    ours: dict[str, float] = field(default_factory=dict[str, float])  # by kernel, the first one that a layer takes unmeasured
    theirs: dict[str, float] = field(default_factory=dict[str, float])
    alone: float = math.nan
    error: float = 0.0

    @property
    def us(self) -> float:
        return min(self.ours.values())

    def ratio(self, *, eight: bool) -> float:
        """The best peer's time by ours; with or without the one that rounds activations to 8 bits."""
        return min(t for n, t in self.theirs.items() if eight or n != "fp8") / self.us

    @property
    def read_bytes(self) -> float:
        return self.outs * self.k * (0.5 + 2 / 64) + 2.0 * self.rows * (self.k + self.outs)

    def __str__(self) -> str:
        best = min(self.ours, key=lambda n: self.ours[n])
        flops = 2.0 * self.rows * self.outs * self.k
        parts = [
            f"{self.rows:5d} {self.outs:6d}x{self.k:<6d} ours {self.us:8.2f} alone {self.alone:7.2f}",
            f"first {next(iter(self.ours.values())):8.2f} {self.read_bytes / self.us / 1e6:5.2f} TB/s",
            f"{flops / self.us / 1e6:5.0f} T/s e{self.error:.1e} |",
            *(f"{n} {t:.2f}" for n, t in self.theirs.items()),
            f"| x16 {self.ratio(eight=False):.2f} x8 {self.ratio(eight=True):.2f} | {best}",
        ]
        return " ".join(parts)


def measure(w: Weights, rows: int, found: Sequence[Point], target: Target) -> Row | None:
    """A case; None where no kernel of ours is right."""
    p, x = problem(rows, w.outs, w.k, w.group), torch.randn(rows, w.k, device=DEVICE).half()
    row = Row(rows, w.outs, w.k)
    want = x.double() @ w.sample.T
    calls: dict[str, list[Run]] = {}
    for name, schedule in found:
        kernel = generated()[name].build(p, schedule, target)
        prepared = [kernel.prepare({1: c, 2: s}) for c, s in w.sources]
        got = torch.as_tensor(prepared[0]([x, *w.sources[0]])[0])
        error = float((got[:, w.chosen].double() - want).norm() / want.norm())
        label = f"{'copy' if name == 'hopper' else name} {schedule}"
        if not error < LIMIT[x.dtype]:
            print(f"{p} {label}: relative error {error:.1e}", flush=True)
            continue
        row.error = max(row.error, error)
        calls[label] = [partial(run, [x, *s]) for run, s in zip(prepared, w.sources, strict=True)]
        row.ours[label] = replay_us(calls[label])
    if not row.ours:
        return None
    if rows <= ALONE:
        row.alone = alone_us(calls[min(row.ours, key=lambda n: row.ours[n])])
    row.theirs = {name: replay_us(runs) for name, runs in peers(w, x).items()}
    return row


def judged(found: Sequence[Row], read_tbps: float) -> None:
    """The lines by which all of it is judged."""
    for rows in sorted({r.rows for r in found}):
        of = [r for r in found if r.rows == rows]
        for eight in (False, True):
            worst = min(of, key=lambda r: r.ratio(eight=eight))
            slower = [f"{r.outs}x{r.k}" for r in of if r.ratio(eight=eight) * TIE < 1]
            mean = math.exp(statistics.fmean(math.log(r.ratio(eight=eight)) for r in of))
            print(
                f"{rows:5d} rows, best peer {'with' if eight else 'without'} fp8: mean {mean:.2f}x,",
                f"worst {worst.ratio(eight=eight):.2f}x ({worst.outs}x{worst.k});",
                f"slower at {', '.join(slower) or 'none'}, of {len(of)}",
            )
        first = max(next(iter(r.ours.values())) / r.us for r in of)
        print(f"{'':5s} the kernel that a layer takes unmeasured: at most {first:.2f} times the fastest one's time")
        large = [r for r in of if r.outs * r.k > 100e6]
        if rows <= 16 and large:
            shares = ", ".join(f"{r.outs}x{r.k} {r.read_bytes / r.us / 1e6 / read_tbps:.0%}" for r in large)
            print(f"{'':5s} of the rate of reading ({read_tbps:.2f} TB/s), weights over 50 MB: {shares}")
        if rows >= 1024:
            share = min(r.theirs["cuBLAS"] / r.us for r in of)
            packed = min(r.theirs["cuBLAS"] / min((t for n, t in r.ours.items() if n[0] == "h"), default=math.inf) for r in of)
            print(f"{'':5s} of cuBLAS f16: at least {share:.0%}; without a copy of the weight {packed:.0%}")


@click.command()
@click.option("--shapes", is_flag=True, help="Weights of Llama 3 instead of the thread's.")
@click.option("--rows", default="1,2,4,8,16,32,64", show_default=True)
@click.option("--group", default=64, show_default=True)
@click.option("--points", "count", default=2, show_default=True, help="Kernels of each candidate, the most promising first.")
@click.option("--bytes", "at_least", default=200_000_000, show_default=True, help="Of all copies of a weight, packed.")
@click.option("--seconds", default=600.0, show_default=True, help="No weight is begun once they are over.")
@click.option("--processes", default=8, show_default=True, help="That compile.")
@click.option("--gemlite/--no-gemlite", default=True, show_default=True, help="Among the peers, where it is installed.")
@click.option("--kept", type=click.Path(dir_okay=False, path_type=Path), help="Which kernels a case has.")
@click.option("--build", "only_build", is_flag=True, help="Compile, and measure nothing.")
@torch.no_grad()
def main(
    shapes: bool,
    rows: str,
    group: int,
    count: int,
    at_least: int,
    seconds: float,
    processes: int,
    gemlite: bool,
    kept: Path | None,
    only_build: bool,
) -> None:
    """Time generated kernels for 4-bit weights beside their peers."""
    numbers = [int(n) for n in rows.split(",")]
    shapes_of = LLAMA if shapes else THREAD
    cases = [(n, outs, k, group) for outs, k in shapes_of for n in numbers]
    if kept is not None and kept.exists() and not only_build:
        built = pickle.loads(kept.read_bytes())
    else:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            built = dict(zip(cases, pool.map(build, [(*c, count, gemlite) for c in cases]), strict=True))
        for _, failed in built.values():
            for why in failed:
                print(why, flush=True)
        if kept is not None:
            kept.write_bytes(pickle.dumps(built))
        if only_build:
            return
    began, target, done = time.perf_counter(), detect("cuda"), list[Row]()
    for outs, k in shapes_of:
        if time.perf_counter() - began > seconds:
            print(f"{outs}x{k}: no time left", flush=True)
            continue
        w = Weights(outs, k, group, at_least)
        layers = [of_gemlite(*s) for s in w.sources] if gemlite else []
        w.gemlite = [m for m in layers if m is not None]
        for n in numbers:
            row = measure(w, n, built[n, outs, k, group][0], target)
            print(row or f"{n} {outs}x{k}: no kernel of ours is right", flush=True)
            done += [row] if row else []
        del w
        torch.cuda.empty_cache()
    judged(done, read_tbps())


if __name__ == "__main__":
    main()
