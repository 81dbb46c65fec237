"""Weights of 4 bits on a CUDA device beside the libraries: products as decoding launches them, weights read from memory.

    python benchmarks/w4_gpu.py [--shapes] [--weights 4096x4096] [--rows 1,16] [--x f16,e4m3,s8] [--group 64] [--points 2]
                                [--bytes 200000000] [--seconds 150] [--build]

A call has a copy of the weight that no call before it in the graph had, so that it comes from memory and no cache. "chain":
one product after the other; "alone" (few rows): between kernels that end before the next one begins, less what those take.
"ours" is the fastest of the points that `tilewright.Linear.tune` would time, those over a copy of the weight in 16 bits among
them ("copy", and "library" for cuBLAS over such a copy); "first" is the one that a layer takes unmeasured. Peers are cuBLAS in
f16, torch's kernel for 4-bit weights (bf16, few rows), gemlite where it is installed and brings tuned settings for the shape,
and cuBLASLt in fp8 with its quantising, which rounds the activations to 8 bits: a ratio with it and one without it are given.
The error is the largest of our kernels' relative ones, against float64 on the dequantised weights.

With --x e4m3 or s8 our kernels read 8-bit activations, too, whose values those are that errors are against. "whole" is the
fastest one behind the quantising of x, as its peers pay it (e4m3: torch's cast for both; s8: the generated kernel that a layer
has, before `torch._int_mm`, too), and what ratios are of; "bare" ratios are of products alone, codes given.

With --shapes, the weights of Llama 3 8B and 70B, with --weights certain ones. --build compiles what would be timed, notes it in
the file --kept, and ends; a run with that file compiles nothing. --seconds begins no further weight once they are over.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch

import w4_activations as activations
from tilewright.dtype import F16
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import Candidate, Schedule, discover, plan_for, refusal
from tilewright.schedule.problem import Problem
from w4_verdict import Row, judged

THREAD = ((3584, 8192),)
LLAMA = (
    *((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1024, 4096), (14336, 4096)),
    *((8192, 8192), (10240, 8192), (57344, 8192), (8192, 28672), (28672, 8192), (1024, 8192)),
)
DEVICE = "cuda"
MOST_COPIES = 24
LIBRARY = "aten"
LABELS = {"hopper": "copy", LIBRARY: "library"}  # of kernels that read the weight in 16 bits
REPLAYS = (5, 15)
REPLAYED_US = 15_000.0  # about how long a graph is replayed
ALONE = 32  # rows, up to which a call alone is timed as well
SAMPLE = 1024  # columns of the result that are compared with float64
Run = Callable[[], object]
Point = tuple[str, Schedule]
Case = tuple[str, int, int, int, int]  # activations, rows, outs, k, group


def able() -> dict[str, Candidate]:
    """The candidates that generate kernels for such weights on Hopper, the preferred one first, and the library."""
    return {c.name: c for c in discover() if "gemm" in c.kinds and c.name in ("hopper_w4", "hopper", LIBRARY)}


def points(p: Problem, target: Target, count: int) -> list[Point]:
    """The first points of every generator that can, and the library's where it multiplies in x's type."""
    of = [c for c in able().values() if refusal(c, p, target) is None]
    found = [(c.name, s) for c in of for s in list(plan_for(c, p, target).schedules())[: 1 if c.name == LIBRARY else count]]
    return [(name, s) for name, s in found if name != LIBRARY or s["compute"] == F16.name]


def build(job: tuple[Case, int, bool]) -> tuple[list[Point], list[str]]:
    """The points of a case, compiled into Triton's cache; and what cannot be built."""
    case, count, gemlite = job
    kind, rows, outs, k, group = case
    p, target = activations.problem(*case), detect("cuda")
    found, failed = list[Point](), list[str]()
    for name, schedule in points(p, target, count):
        try:
            plan_for(able()[name], p, target).build(schedule)
            found.append((name, schedule))
        except Exception as error:
            failed.append(f"{p} {name} {schedule}: {str(error)[:200]}")
    for fusion in activations.fusions(kind, rows, outs, k):
        activations.compile_fusion(fusion, target)
    if gemlite and kind == "f16":
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


def timed(peers: dict[str, list[Run]]) -> dict[str, float]:
    """Microseconds of those that can."""
    found: dict[str, float] = {}
    for name, runs in peers.items():
        try:
            found[name] = replay_us(runs)
        except RuntimeError as why:
            print(f"{name}: {str(why)[:200]}", flush=True)
    return found


def alone_us(calls: Sequence[Run]) -> float:
    """Microseconds of a call that begins when what is ahead of it has ended."""
    mark = torch.zeros(1, device=DEVICE)
    between: list[Run] = [lambda: mark.add_(1)] * len(calls)
    return replay_us([c for pair in zip(between, calls, strict=True) for c in pair]) * 2 - replay_us(between)


def read_tbps() -> float:
    """Rate of reading memory in TB/s, by the best of torch's reductions over 4 GB."""
    x = torch.rand(1 << 30, device=DEVICE)
    loops: list[Run] = [lambda: torch.sum(x), lambda: torch.amax(x), lambda: torch.dot(x, x)]
    return x.nbytes / min(replay_us([loop]) for loop in loops) / 1e6


class Weights:
    """One weight in copies, as ours and the peers' kernels read it."""

    def __init__(self, outs: int, k: int, group: int, at_least: int, *, integers: bool) -> None:
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
        full = partial(torch.randint, -127, 128, (outs, k), device=DEVICE, dtype=torch.int8)
        self.integers = [full() for _ in range(max(self.copies // 2, 2))] if integers else []
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


def peers(w: Weights, x: torch.Tensor, target: Target) -> dict[str, list[Run]]:
    """Calls of the libraries, one a copy of the weight; "bare" ones are given codes of x."""
    rows, one = x.shape[0], torch.ones((), device=DEVICE)
    calls: dict[str, list[Run]] = {"cuBLAS": [partial(torch.mm, x, m.T) for m in w.dense]}

    def scaled(m: torch.Tensor, codes: torch.Tensor | None = None) -> torch.Tensor:
        codes = x.to(m.dtype) if codes is None else codes
        return torch.ops.aten._scaled_mm(codes, m.T, one, one, out_dtype=x.dtype, use_fast_accum=True)

    if w.eight and rows % 16 == 0:
        calls["fp8"] = [partial(scaled, m) for m in w.eight]
        calls["fp8 bare"] = [partial(scaled, m, x.to(m.dtype)) for m in w.eight]
    if w.integers and rows > 16:  # which torch insists on
        calls |= activations.int8(activations.Activations.of("s8", x, target), w.integers, target)
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


def measure(w: Weights, kind: str, x: torch.Tensor, found: Sequence[Point], target: Target) -> Row | None:
    """Our kernels for a case; None where none is right."""
    p, given = activations.problem(kind, len(x), w.outs, w.k, w.group), activations.Activations.of(kind, x, target)
    row = Row(kind, len(x), w.outs, w.k, w.group)
    want = given.value @ w.sample.T
    runs: dict[str, list[Any]] = {}
    weights = range(len(given.given), len(given.given) + 2)
    for name, schedule in found:
        label = f"{LABELS.get(name, name)} {schedule}"
        try:
            kernel = plan_for(able()[name], p, target).build(schedule)
            prepared = [kernel.prepare(dict(zip(weights, s, strict=True))) for s in w.sources]
            got = torch.as_tensor(prepared[0]([*given.given, *w.sources[0]])[0])
        except Exception as why:
            print(f"{p} {label}: {type(why).__name__}: {str(why)[:200]}", flush=True)
            continue
        error = float((got[:, w.chosen].double() - want).norm() / want.norm())
        if not error < activations.LIMIT[kind]:
            print(f"{p} {label}: relative error {error:.1e}", flush=True)
            continue
        row.error = max(row.error, error)
        runs[label] = prepared
        row.ours[label] = replay_us([partial(run, [*given.given, *s]) for run, s in zip(prepared, w.sources, strict=True)])
    if not row.ours:
        return None
    best = list(zip(runs[min(row.ours, key=lambda n: row.ours[n])], w.sources, strict=True))
    if len(x) <= ALONE:
        row.alone = alone_us([partial(run, [*given.given, *s]) for run, s in best])
    if kind != "f16":
        row.whole = replay_us([lambda run=run, s=s: run([*given.quantise(), *s]) for run, s in best])
    return row


@click.command()
@click.option("--shapes", is_flag=True, help="Weights of Llama 3 instead of the thread's.")
@click.option("--weights", default="", help="These weights instead, as OUTxIN, one after the other.")
@click.option("--x", "kinds", default="f16", show_default=True, help="Activations: f16, e4m3, s8, or several of them.")
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
    weights: str,
    kinds: str,
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
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", rows):
        raise click.BadParameter(f"{rows}: numbers and commas, such as 1,16", param_hint="--rows")
    if not re.fullmatch(r"(\d+x\d+(,\d+x\d+)*)?", weights):
        raise click.BadParameter(f"{weights}: OUTxIN and commas, such as 4096x4096", param_hint="--weights")
    numbers = [int(n) for n in rows.split(",")]
    given = [(int(outs), int(k)) for outs, k in (w.split("x") for w in weights.split(",") if w)]
    shapes_of = given or (LLAMA if shapes else THREAD)
    if unknown := set(kinds.split(",")) - set(activations.KINDS):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: not {', '.join(activations.KINDS)}", param_hint="--x")
    of_x = [kind for kind in activations.KINDS if kind in kinds.split(",")]
    cases: list[Case] = [(kind, n, outs, k, group) for outs, k in shapes_of for n in numbers for kind in of_x]
    if kept is not None and kept.exists() and not only_build:
        built = pickle.loads(kept.read_bytes())
    else:
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            built = dict(zip(cases, pool.map(build, [(c, count, gemlite) for c in cases]), strict=True))
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
        w = Weights(outs, k, group, at_least, integers="s8" in of_x)
        layers = [of_gemlite(*s) for s in w.sources] if gemlite else []
        w.gemlite = [m for m in layers if m is not None]
        for n in numbers:
            x = torch.randn(n, k, device=DEVICE).half()
            theirs = timed(peers(w, x, target))
            for kind in of_x:
                row = measure(w, kind, x, built[kind, n, outs, k, group][0], target)
                if row:
                    row.theirs = theirs
                    done.append(row)
                print(row or f"{kind} {n} {outs}x{k}: no kernel of ours is right", flush=True)
        del w
        torch.cuda.empty_cache()
    tbps = read_tbps()
    for kind in of_x:
        print(f"{kind} activations:")
        judged([r for r in done if r.kind == kind], tbps)
    if len(of_x) > 1:
        print(f"The fastest of {', '.join(of_x)}:")
        fastest: dict[tuple[int, int, int], Row] = {}
        for r in sorted(done, key=lambda r: -r.paid):
            fastest[r.rows, r.outs, r.k] = r
        judged(list(fastest.values()), tbps)


if __name__ == "__main__":
    main()
