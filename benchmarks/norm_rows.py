"""A product, a residual, a norm of its rows and codes, by one kernel of clusters and by two kernels, on a Hopper GPU.

    python benchmarks/norm_rows.py [--rows 64,384] [--width 768] [--depth 768,3072] [--only fp8,s8,f16] [--points 8]
                                   [--rounds 25] [--json FILE]

Each type and depth has a table: the fastest products by themselves, the row kernel behind, both one after the other, and points
of the fused kernel. Results are compared with exact or float64 sums first, and the fastest fused kernel's with all that the
search would ask of a few elements. Then all replay CUDA graphs of twelve calls in turn, in another order each time, over three
sets of sources, so that no cache holds them. Times are medians in microseconds.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import click
import torch

from gpu import captured, expected, replay_us
from tilewright.candidates import split
from tilewright.dtype import F8E4M3FN, F16, F32, S8, DType
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.build import const, convert, input_, map_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Gemm, LayerNorm, Param, Quantize
from tilewright.schedule.candidate import Candidate, Runner, Schedule, discover, labelled, plan_for, refusal
from tilewright.schedule.problem import AnyProblem, Problem, problem_of
from tilewright.schedule.spot_check import spot_check

TYPES: Mapping[str, DType] = {"fp8": F8E4M3FN, "s8": S8, "f16": F16}
CALLS, SETS = 12, 3
CODE = 0.029  # the scale of the norm's codes
OFF = 1e-2  # of float results, relative, in norm
FLIPPED = 2e-3  # of codes, that lie between two
Point = tuple[str, Schedule]


def posed(kind: DType, rows: Sequence[int], width: int, depth: int) -> Problem:
    """A product with scales of columns, a bias and a residual of f16, its norm, and codes of that unless operands are f16."""
    shapes = ((kind, (*rows, depth)), (kind, (depth, width)), (F32, (width,)), *[(F16, (width,))] * 3, (F16, (*rows, width)))
    src = [input_(f"x{i}", dtype, shape) for i, (dtype, shape) in enumerate(shapes)]
    p = [Node(Param(i, s.tensor)) for i, s in enumerate(src)]
    sums = convert(Node(Acc(Gemm(kind.accumulator, p[0], p[1], (p[0],)).acc_type)), F32)
    x = convert(map_("add", map_("multiply", sums, p[2]), convert(p[3], F32)), F16)
    y = Node(LayerNorm(len(rows), 1e-12), map_("add", x, p[6]), p[4], p[5])
    stores = [y] if kind is F16 else [y, Node(Quantize(kind), convert(y, F32), const(CODE, F32))]
    made = problem_of(Node(Gemm(kind.accumulator, p[0], p[1], tuple(stores)), *src))
    assert isinstance(made, Problem)
    return Problem(made.op, made.types, tuple(0 < i < 6 for i in range(len(src))))


def sources_of(p: Problem) -> list[torch.Tensor]:
    """Random data on the device, whose products are about as large as the residual."""
    made: list[torch.Tensor] = []
    for i, t in enumerate(p.types):
        storage = t.dtype.to_torch()
        if t.dtype is S8:
            made.append(torch.randint(-127, 128, t.shape, device="cuda", dtype=torch.int32).to(storage))
        else:
            made.append(torch.randn(t.shape, device="cuda").to(storage))
        if i == 2:
            made[i] = (torch.rand(t.shape, device="cuda") + 0.5) / (p.K**0.5 * (5400 if p.acc.dtype.is_integer else 1))
    return made


def generated(problem: AnyProblem, target: Target) -> Candidate:
    """The generator that comes first."""
    able = (c for c in discover(kind=target.kind) if c.preference < 10 and problem.kind in c.kinds)
    return next(c for c in able if refusal(c, problem, target) is None)


def points(problem: AnyProblem, target: Target, count: int) -> list[Point]:
    """Its first points."""
    able = generated(problem, target)
    return [(able.name, s) for s in list(plan_for(able, problem, target).schedules())[:count]]


def build(job: tuple[AnyProblem, Point, Target]) -> str | None:
    """Fill Triton's cache, in a process of its own; why it cannot be built."""
    problem, (name, schedule), target = job
    candidate = next(c for c in discover(kind=target.kind) if c.name == name)
    try:
        plan_for(candidate, problem, target).build(schedule)
    except Exception as error:
        return f"{labelled(name, schedule)}: {type(error).__name__}: {str(error)[:200]}"
    return None


def runner(problem: AnyProblem, point: Point, target: Target, weights: Mapping[int, torch.Tensor]) -> Runner:
    """A kernel, its weights packed."""
    candidate = next(c for c in discover(kind=target.kind) if c.name == point[0])
    return plan_for(candidate, problem, target).build(point[1]).prepare(weights)


def wrong(results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> str | None:
    """Say what is wrong with results; None if nothing is."""
    for got, right in zip(results, wanted, strict=True):
        if got.dtype.is_floating_point and got.element_size() > 1:
            error = float((got.double() - right.double()).norm() / right.double().norm())
            if not error < OFF:
                return f"relative error {error:.1e}"
        elif (off := float((got.view(torch.int8) != right.view(torch.int8)).float().mean())) > FLIPPED:
            return f"{off:.1%} of the codes differ"
    return None


def timed(runs: Mapping[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Medians in microseconds of runs that take turns, given the number of a set of sources."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, run in runs.items():
        turn = iter(range(1 << 30))
        graphs[name] = captured(lambda run=run, turn=turn: run(next(turn) % SETS), CALLS)
    took: dict[str, list[float]] = {name: [] for name in graphs}
    order, draw = list(graphs), random.Random(0)
    for _ in range(rounds + 3):
        draw.shuffle(order)
        for name in order:
            took[name].append(replay_us(graphs[name], CALLS))
    return {name: statistics.median(us[3:]) for name, us in took.items()}


def measure(p: Problem, target: Target, count: int, rounds: int) -> dict[str, float | str]:
    """Times of all ways to do one problem, fastest last, and why others are left out."""
    product, behind = split.by_norm(p)
    sets = [sources_of(p) for _ in range(SETS)]
    for other in sets[1:]:
        other[1:6] = sets[0][1:6]
    weights = {i: sets[0][i] for i in range(1, 6)}
    wanted, first = expected(p, sets[0]), sets[0]
    given = [[s[i] for i in product.places] for s in sets]
    found: dict[str, float | str] = {}

    def own(piece: split.Piece) -> dict[int, torch.Tensor]:
        return {at: weights[i] for at, i in enumerate(piece.places) if i in weights}

    plain = {labelled(*q): runner(product.problem, q, target, own(product)) for q in points(product.problem, target, count)}
    us = timed({f"product: {n}": lambda k, run=run: run(given[k]) for n, run in plain.items()}, rounds)
    found |= us
    best = plain[min(us, key=us.__getitem__).removeprefix("product: ")]
    between = [best(g)[0] for g in given]

    def rest(run: Runner, k: int, x: torch.Tensor) -> Sequence[torch.Tensor]:
        values = [*sets[k], x]
        return run([values[i] for i in behind.places])

    kernels = {labelled(*q): runner(behind.problem, q, target, own(behind)) for q in points(behind.problem, target, 3)}
    us = timed({f"row kernel: {n}": lambda k, run=run: rest(run, k, between[k]) for n, run in kernels.items()}, rounds)
    found |= us
    row = kernels[min(us, key=us.__getitem__).removeprefix("row kernel: ")]
    if why := wrong(rest(row, 0, best(given[0])[0]), wanted):
        found["both"] = why
    runs: dict[str, Callable[[int], object]] = {"both": lambda k: rest(row, k, best(given[k])[0])}
    for q in points(p, target, 1 << 10):
        name = f"fused: {labelled(*q)}"
        try:
            run = runner(p, q, target, weights)
            why = wrong(run(first), wanted)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        if why is None:
            runs[name] = lambda k, run=run: run(sets[k])
        else:
            found[name] = why
    us = timed(runs, rounds)
    found |= us
    fused = {n: t for n, t in us.items() if n != "both"}
    if fused:
        fastest = min(fused, key=fused.__getitem__)
        results = runs[fastest](0)
        assert isinstance(results, Sequence)
        at = {i: r.cpu() for i, r in enumerate(results)}
        said, looked = spot_check(p, [t.cpu() for t in first], at, 0.2)
        found[f"{looked} elements of {fastest}"] = said or "right"
    return found


@click.command()
@click.option("--rows", default="64,384")
@click.option("--width", default=768)
@click.option("--depth", default="768,3072")
@click.option("--only", default=",".join(TYPES))
@click.option("--points", "count", default=6, help="Products that are tried by themselves.")
@click.option("--rounds", default=25)
@click.option("--json", "file", type=click.Path(path_type=Path))
def main(rows: str, width: int, depth: str, only: str, count: int, rounds: int, file: Path | None) -> None:
    """Print the tables."""
    target, began = detect("cuda"), time.perf_counter()
    problems = {
        f"{kind} {rows} x {k} x {width}": posed(TYPES[kind], [*map(int, rows.split(","))], width, int(k))
        for kind in only.split(",")
        for k in depth.split(",")
    }
    jobs: list[tuple[AnyProblem, Point, Target]] = []
    for p in problems.values():
        product, behind = split.by_norm(p)
        for problem, most in ((product.problem, count), (behind.problem, 3), (p, 1 << 10)):
            jobs += [(problem, q, target) for q in points(problem, target, most)]
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), get_context("spawn")) as pool:
        for why in filter(None, pool.map(build, jobs)):
            print(why)
    print(f"{target.name}: {len(jobs)} kernels compiled after {time.perf_counter() - began:.0f} s")
    everything: dict[str, dict[str, float | str]] = {}
    for title, p in problems.items():
        everything[title] = measure(p, target, count, rounds)
        print(f"\n{title}, after {time.perf_counter() - began:.0f} s")
        for name, us in sorted(everything[title].items(), key=lambda x: (isinstance(x[1], str), x[1])):
            print(f"  {us:8.2f}  {name}" if isinstance(us, float) else f"  {name}: {us}")
        if file is not None:
            file.write_text(json.dumps(everything, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
