"""Weights of 4 bits on a CUDA device beside the libraries: products as decoding launches them, weights read from memory.

    python benchmarks/w4_gpu.py [--shapes] [--rows 1,16] [--group 64] [--dtype f16] [--points 2] [--bytes 200000000]

A call has a copy of the weight that no call before it in the graph had, so that it comes from memory and no cache. "chain":
one product after the other; "alone": between kernels that end before the next one begins, less what those take. Peers are
cuBLAS in the activations' type, cuBLASLt in fp8 with their quantising, and torch's kernel for 4-bit weights (bf16). The error
is the largest of the kernels' relative ones, against float64 on the dequantised weights. With --shapes, the weights of Llama 3
8B and 70B.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import click
import torch
from rich.console import Console
from rich.table import Table

from tilewright.compiler import optimise
from tilewright.hardware.ceilings import with_ceilings
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.notation import parse
from tilewright.ir.ops import Input
from tilewright.schedule.candidate import Candidate, discover
from tilewright.schedule.problem import Problem, problem_of
from tilewright.schedule.schedule import Schedule

THREAD = ((3584, 8192),)
LLAMA = (
    *((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1024, 4096), (14336, 4096)),
    *((8192, 8192), (10240, 8192), (57344, 8192), (8192, 28672), (28672, 8192), (1024, 8192)),
)
REPLAYS = 15
MOST_COPIES = 24
Run = Callable[[], object]


def problem(rows: int, outs: int, k: int, group: int, dtype: str) -> Problem:
    """x [rows, k] by codes [outs, k]; few rows leave the weights unrounded, as `--excess-precision` does."""
    graph = optimise(parse(f"{dtype}[{rows},{k}] @ s4[{outs},{k}]^T group={group} -> {dtype}"), excess_precision=rows <= 64)
    (node,) = graph.outputs
    p = problem_of(node)
    assert isinstance(p, Problem)
    return Problem(p.op, p.types, tuple(isinstance(s.op, Input) and s.op.label.startswith("b") for s in node.src))


def generated() -> list[Candidate]:
    """The candidates that generate kernels for GPUs, those for such weights first."""
    return [c for c in discover() if c.preference < 10 and "gemm" in c.kinds and "cuda" in c.devices]


def compile_one(job: tuple[Problem, str, Schedule, Target]) -> str | None:
    """Fill Triton's cache, in a process of its own; why it cannot be built."""
    p, name, schedule, target = job
    try:
        next(c for c in generated() if c.name == name).build(p, schedule, target)
    except Exception as error:
        return f"{p} {name} {schedule}: {error}"
    return None


def points(p: Problem, target: Target, count: int) -> list[tuple[str, Schedule]]:
    """The first points of every generator that can."""
    able = [c for c in generated() if c.refuse(p, target) is None]
    return [(c.name, s) for c in able for s in list(c.schedules(p, target))[:count]]


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
    for _ in range(REPLAYS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[3:])


def alone_us(calls: Sequence[Run]) -> float:
    """Microseconds of a call that begins when what is ahead of it has ended."""
    mark = torch.zeros(1, device="cuda")
    between: list[Run] = [lambda: mark.add_(1)] * len(calls)
    return replay_us([c for pair in zip(between, calls, strict=True) for c in pair]) * 2 - replay_us(between)


class Weights:
    """Codes and scales, the first ones in copies, and the activations."""

    def __init__(self, rows: int, outs: int, k: int, group: int, dtype: torch.dtype) -> None:
        self.codes = torch.randint(-8, 8, (outs, k), device="cuda", dtype=torch.int8)
        self.scales = (torch.rand(outs, k // group, device="cuda") * 0.02 + 0.01).to(dtype)
        self.x = torch.randn(rows, k, device="cuda").to(dtype)
        self.group = group

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """[outs, k], dequantised."""
        outs, k = self.codes.shape
        return (self.codes.view(outs, -1, self.group).to(dtype) * self.scales.to(dtype)[:, :, None]).view(outs, k)


def peers(w: Weights, copies: int) -> dict[str, list[Run]]:
    """Calls of the libraries, one a copy of the weight."""
    x, outs = w.x, w.codes.shape[0]
    dense = w.dense(x.dtype)
    calls: dict[str, list[Run]] = {"cuBLAS": [partial(torch.mm, x, dense.clone().T) for _ in range(max(copies // 4, 2))]}
    one = torch.ones((), device="cuda")
    narrow = torch.float8_e4m3fn

    def scaled(m: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._scaled_mm(x.to(narrow), m.T, one, one, out_dtype=x.dtype, use_fast_accum=True)

    if outs % 16 == 0 and x.shape[0] % 16 == 0:
        eight = dense.to(narrow)
        calls["cuBLASLt fp8"] = [partial(scaled, eight.clone()) for _ in range(max(copies // 2, 2))]
    if x.dtype == torch.bfloat16 and w.group in (32, 64, 128):
        pairs = (w.codes.to(torch.uint8) + 8) & 15
        packed = torch.ops.aten._convert_weight_to_int4pack((pairs[:, ::2] << 4 | pairs[:, 1::2]).contiguous(), 8)
        sides = torch.stack((w.scales.T, torch.zeros_like(w.scales.T)), -1).contiguous()
        mm = torch.ops.aten._weight_int4pack_mm
        calls["torch int4"] = [partial(mm, x, packed.clone(), w.group, sides) for _ in range(copies)]
    return calls


def measure(
    rows: int, outs: int, k: int, group: int, dtype: str, found: Sequence[tuple[str, Schedule]], target: Target, at_least: int
) -> tuple[str, ...] | None:
    """A row of the table; None where no kernel of ours is right."""
    kind = {"f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    p, w = problem(rows, outs, k, group, dtype), Weights(rows, outs, k, group, kind)
    copies = max(2, min(MOST_COPIES, -(-at_least // (outs * k // 2))))
    want = w.x.double() @ w.dense(torch.float64).T
    ours: dict[str, tuple[float, list[Run]]] = {}
    worst = 0.0
    for name, schedule in found:
        kernel = next(c for c in generated() if c.name == name).build(p, schedule, target)
        sources = [[w.x, torch.roll(w.codes, i, 0), torch.roll(w.scales, i, 0)] for i in range(copies)]
        prepared = [kernel.prepare({1: s[1], 2: s[2]}) for s in sources]
        (got,) = prepared[0](sources[0])
        error = float((got.double() - want).norm() / want.norm())
        if not error < {"f16": 3e-4, "bf16": 3e-3}[dtype]:
            print(f"{p} {name} {schedule}: relative error {error:.1e}", file=sys.stderr)
            continue
        worst = max(worst, error)
        calls: list[Run] = [lambda run=run, s=s: run(s) for run, s in zip(prepared, sources, strict=True)]
        ours[f"{name} {schedule}"] = replay_us(calls), calls
    if not ours:
        return None
    best = min(ours, key=lambda n: ours[n][0])
    us, calls = ours[best]
    theirs = {name: replay_us(calls) for name, calls in peers(w, copies).items()}
    peer = min(theirs, key=lambda n: theirs[n])
    read = p.bytes - outs * k + outs * k // 2
    limit = target.limit_us(p.ops, read, p.lhs.dtype)
    return (
        *(f"{us:.2f}", f"{alone_us(calls):.2f}", f"{limit:.2f}", f"{read / us / 1e6:.2f}", f"{p.ops / us / 1e6:.0f}"),
        *(f"{worst:.1e}", f"{theirs[peer] / us:.2f}", ", ".join(f"{n} {t:.2f}" for n, t in theirs.items()), best),
    )


@click.command()
@click.option("--shapes", is_flag=True, help="Weights of Llama 3 instead of the thread's.")
@click.option("--rows", default="1,2,4,8,16,32,64", show_default=True)
@click.option("--group", default=64, show_default=True)
@click.option("--dtype", type=click.Choice(["f16", "bf16"]), default="f16", show_default=True)
@click.option("--points", "count", default=2, show_default=True, help="Kernels of each generator, the most promising first.")
@click.option("--bytes", "at_least", default=200_000_000, show_default=True, help="Of all copies of a weight, packed.")
def main(shapes: bool, rows: str, group: int, dtype: str, count: int, at_least: int) -> None:
    """Time generated kernels for 4-bit weights beside their peers."""
    target = with_ceilings(detect("cuda"))
    cases = [(int(n), outs, k) for outs, k in (LLAMA if shapes else THREAD) for n in rows.split(",")]
    found = {case: points(problem(*case, group, dtype), target, count) for case in cases}
    jobs = [(problem(*case, group, dtype), name, s, target) for case in cases for name, s in found[case]]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for why in filter(None, pool.map(compile_one, jobs)):
            print(why, file=sys.stderr)
    table = Table("rows", "weight", "chain us", "alone us", "limit us", "TB/s", "T/s", "error", "x peer", "peers us", "kernel")
    reached: list[float] = []
    for case in cases:
        row = measure(*case, group, dtype, found[case], target, at_least)
        if row is None:
            print(f"{case}: no kernel of ours is right", file=sys.stderr)
            continue
        reached.append(float(row[6]))
        table.add_row(str(case[0]), f"{case[1]}x{case[2]}", *row)
    Console(width=250).print(table)
    print(f"geometric mean of the best peer's time by ours: {math.exp(statistics.fmean(map(math.log, reached))):.3f}")


if __name__ == "__main__":
    main()
