"""Quality of the cost model's ranking: the best of its first one, five and ten schedules beside the best of all timed.

    python benchmarks/cost.py --measure --seconds 100 --json FILE      time what is not in FILE yet; again until it says done
    python benchmarks/cost.py --json FILE                              the table

For each of 64 products the generated kernel is timed at 48 points drawn evenly from its whole space (`--points`; half of them
with tiles that fill the registers), and at the model's own first ten of the whole space. A ratio is the least time of any point
over the least of the model's first few. The model's constants were chosen on the products with an even number; those with an
odd number are the test.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from tilewright.candidates.llvm.gemm.candidate import CANDIDATE
from tilewright.compiler import optimise
from tilewright.hardware.ceilings import with_ceilings
from tilewright.hardware.detect import detect
from tilewright.ir.notation import parse
from tilewright.schedule.candidate import Schedule, plan_for
from tilewright.schedule.problem import Problem, problem_of
from tilewright.schedule.sample import random_sources

# A right operand is a constant, packed beforehand; in batches, and where its shape is the result's, both operands change.
PRODUCTS = (
    "f32[1,4096] @ f32[4096,4096]",
    "f32[1,768] @ f32[768,2304] + bias",
    "f32[4,2048] @ f32[2048,2048]",
    "f32[7,2048] @ f32[2048,2816]",
    "f32[8,4096] @ f32[4096,1024] + bias, silu",
    "f32[16,768] @ f32[768,3072] + bias, gelu",
    "f32[19,2048] @ f32[2048,1408]",
    "f32[32,2048] @ f32[2048,4096]",
    "f32[64,768] @ f32[768,3072] + bias, gelu",
    "f32[64,3072] @ f32[3072,768] + bias + residual",
    "f32[128,768] @ f32[768,768] + bias",
    "f32[128,768] @ f32[768,2304] + bias",
    "f32[128,3072] @ f32[3072,768] + bias",
    "f32[256,4096] @ f32[4096,1024]",
    "f32[512,768] @ f32[768,768] + bias + residual",
    "f32[512,768] @ f32[768,3072] + bias, gelu_tanh",
    "f32[33,1408] @ f32[1408,2048]",
    "f32[100,100] @ f32[100,100]",
    "f32[255,129] @ f32[129,257]",
    "f32[1000,1000] @ f32[1000,10]",
    "f32[10,1000] @ f32[1000,1000]",
    "f32[1000,10] @ f32[10,1000]",
    "f32[12,128,64] @ f32[12,128,64]^T",
    "f32[16,256,256] @ f32[16,256,256]",
    "bf16[1,4096] @ bf16[4096,4096] -> bf16",
    "bf16[8,4096] @ bf16[4096,4096] -> bf16",
    "bf16[16,2048] @ bf16[2048,8192], silu -> bf16",
    "bf16[64,4096] @ bf16[4096,2048] -> bf16",
    "bf16[4,4096] @ bf16[4096,6144] -> bf16",
    "bf16[128,768] @ bf16[768,768] + bias:bf16 -> bf16",
    "bf16[128,768] @ bf16[768,3072] + bias:bf16, gelu_tanh -> bf16",
    "bf16[128,3072] @ bf16[3072,768] + bias:bf16 + residual:bf16 -> bf16",
    "bf16[512,768] @ bf16[768,3072] + bias:bf16, gelu -> bf16",
    "bf16[1024,1024] @ bf16[1024,1024] -> bf16",
    "bf16[333,555] @ bf16[555,777] -> bf16",
    "bf16[127,127] @ bf16[127,127] -> bf16",
    "bf16[200,400] @ bf16[400,300] -> bf16",
    "bf16[2048,512] @ bf16[512,64] -> bf16",
    "bf16[1536,192] @ bf16[192,1536] -> bf16",
    "bf16[33,1408] @ bf16[1408,2048] -> bf16",
    "bf16[12,128,64] @ bf16[12,128,64]^T -> bf16",
    "bf16[12,128,128] @ bf16[12,128,64] -> bf16",
    "bf16[8,512,512] @ bf16[8,512,512] -> bf16",
    "bf16[32,768] @ bf16[50257,768]^T -> bf16",
    "s8[1,4096] @ s8[4096,4096] -> s32",
    "s8[1,768] @ s8[768,3072] * scale + bias -> f32",
    "s8[8,4096] @ s8[4096,4096] * scale -> bf16",
    "s8[16,4096] @ s8[4096,11008] -> s32",
    "s8[64,4096] @ s8[4096,4096] -> s32",
    "s8[128,768] @ s8[768,768] * scale + bias -> s8 scale=tensor",
    "s8[128,768] @ s8[768,3072] * scale + bias, gelu -> s8 scale=tensor",
    "s8[128,3072] @ s8[3072,768] * scale + bias + residual -> f32",
    "s8[512,768] @ s8[768,2304] * scale + bias -> s8 scale=tensor",
    "s8[1024,1024] @ s8[1024,1024] -> s8",
    "s8[255,129] @ s8[129,257] -> s32",
    "s8[100,100] @ s8[100,100] -> s32",
    "s8[333,555] @ s8[555,777] -> s32",
    "s8[2048,512] @ s8[512,64] -> s32",
    "s8[1536,192] @ s8[192,1536] -> s32",
    "s8[1000,10] @ s8[10,1000] -> s32",
    "s8[12,128,64] @ s8[12,128,64]^T * scale -> f32",
    "s8[4,1024,1024] @ s8[4,1024,1024] -> s8",
    "u8[128,768] @ s8[768,768] * scale + bias, relu -> u8 scale=tensor",
    "s8[64,768] @ s8[50257,768]^T -> s32",
)  # fmt: skip
ROUNDS, MORE_ROUNDS, VISIT_S = 5, 8, 0.002
HOPELESS, CLOSE = 2.5, 1.6  # times the best


def problem(line: str) -> Problem:
    """The problem that a compile poses for a line of the gemm notation."""
    found = problem_of(optimise(parse(line)).outputs[0])
    assert isinstance(found, Problem)
    if found.batch > 1:
        return found
    left = next(i for i, t in enumerate(found.types) if i == found.lhs.source)
    weights = tuple(i != left and t.shape != found.acc.shape for i, t in enumerate(found.types))
    return Problem(found.op, found.types, weights)


def drawn(line: str, schedules: Sequence[Schedule], points: int) -> list[Schedule]:
    """Points of the whole space: the same for a product each time."""
    generator = random.Random(zlib.crc32(line.encode()))
    most: dict[Any, int] = {}
    schedules = sorted(schedules, key=str)  # whatever the model thinks of them
    for s in schedules:
        most[s["nr"]] = max(int(s["mr"]), most.get(s["nr"], 0))
    wide = [s for s in schedules if s["mr"] == most[s["nr"]]]
    chosen = generator.sample(wide, min(points // 2, len(wide)))
    taken = set(chosen)
    rest = [s for s in schedules if s not in taken]
    return chosen + generator.sample(rest, min(points - len(chosen), len(rest)))


def runs_of(posed: Problem, schedules: Sequence[Schedule]) -> dict[str, Callable[[], Any]]:
    """A call of each point's kernel. Every one has given what the first gave."""
    sources = random_sources(posed)
    weights = {i: t for i, t in enumerate(sources) if posed.weights[i]}
    target, runs, right = detect("cpu"), {}, None
    for s in schedules:
        run = plan_for(CANDIDATE, posed, target).build(s).prepare(weights)
        result = [t.float() for t in run(sources)]
        right = result if right is None else right
        for ours, first in zip(result, right, strict=True):
            tolerance = 2.0 if posed.acc.dtype.is_float or posed.outputs[0].dtype.is_float else 0.0
            scale = float(first.abs().max()) + 1e-30
            assert float((ours - first).abs().max()) <= tolerance * 2**-6 * scale, (str(posed), str(s))
        runs[str(s)] = lambda run=run: run(sources)
    return runs


def timed(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Least microseconds of each, in rounds that visit all, with operands as warm as their size allows.

    The least, for what else runs on a machine only ever adds, and the best of many medians is the luckiest. What two visits
    show to be hopeless is not visited again; what is close to the best, more often.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS + MORE_ROUNDS):
        found = {name: min(t) for name, t in times.items() if t}
        limit = min(found.values(), default=math.inf) * (CLOSE if number >= ROUNDS else HOPELESS)
        for name, run in runs.items():
            if number >= 2 and found[name] > limit:
                continue
            run()
            count, start = 0, time.perf_counter()
            while count == 0 or time.perf_counter() - start < VISIT_S:
                run()
                count += 1
            times[name].append(1e6 * (time.perf_counter() - start) / count)
    return {name: min(t) for name, t in times.items()}


def measure(held: dict[str, dict[str, float]], file: Path | None, seconds: float, points: int) -> bool:
    """Time what is missing; True when nothing is."""
    start, target = time.perf_counter(), with_ceilings(detect("cpu"))
    for number, line in enumerate(PRODUCTS):
        posed, known = problem(line), held.setdefault(line, {})
        schedules = list(plan_for(CANDIDATE, posed, target).schedules())
        wanted = {str(s): s for s in (*schedules[:10], *drawn(line, schedules, points))}
        missing = {name: s for name, s in wanted.items() if name not in known}
        if not missing:
            continue
        if time.perf_counter() - start > seconds:
            return False
        close = [n for n in known if known[n] <= CLOSE * min(known.values())]  # timed again beside the new
        found = timed(runs_of(posed, [*(s for s in schedules if str(s) in close), *missing.values()]))
        known.update({n: min(us, known.get(n, math.inf)) for n, us in found.items()})
        if file is not None:
            file.write_text(json.dumps(held, indent=0))
        click.echo(f"{number + 1:2d} {line}: {len(missing)} points, best {min(known.values()):.1f} us", err=True)
    return True


def report(held: dict[str, dict[str, float]]) -> None:
    """Print how far the model's first points are from the best."""
    target = with_ceilings(detect("cpu"))
    rows: list[tuple[float, ...]] = []
    click.echo(f"{'':3s}{'product':72s}{'points':>7s}{'best us':>9s}{'top-1':>7s}{'top-5':>7s}{'top-10':>7s}{'rank ms':>8s}")
    for number, line in enumerate(PRODUCTS):
        known = held.get(line, {})
        start = time.perf_counter()
        schedules = list(plan_for(CANDIDATE, problem(line), target).schedules())
        spent = 1e3 * (time.perf_counter() - start)
        first = [known[n] for s in schedules[:10] if (n := str(s)) in known]
        if len(first) < min(10, len(schedules)):
            click.echo(f"{number:2d} {line:72s} not measured yet: {len(first)} of the model's first ten")
            continue
        best = min(known.values())
        ratios = tuple(best / min(first[:n]) for n in (1, 5, 10))
        rows.append((number, *ratios))
        shown = "".join(f"{100 * r:7.1f}" for r in ratios)
        click.echo(f"{number:2d} {line:72s}{len(known):7d}{best:9.1f}{shown}{spent:8.1f}")
    for name, part in (("even (fitted)", 0), ("odd (test)", 1), ("all", None)):
        chosen = [r for r in rows if part is None or r[0] % 2 == part]
        if chosen:
            means = [100 * math.exp(statistics.fmean(math.log(r[i]) for r in chosen)) for i in (1, 2, 3)]
            click.echo(f"{name}: {len(chosen)} products, geometric mean {means[0]:.1f} / {means[1]:.1f} / {means[2]:.1f} %")


@click.command()
@click.option("--measure", "measuring", is_flag=True, help="Time the points that FILE lacks.")
@click.option("--seconds", default=math.inf, help="Begin no further product after this long.")
@click.option("--points", default=48, show_default=True, help="Drawn from each product's space.")
@click.option("--threads", default=2, show_default=True)
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(measuring: bool, seconds: float, points: int, threads: int, file: Path) -> None:
    """Time the points of 64 products' spaces, and compare with the cost model's order."""
    torch.set_num_threads(threads)
    held = json.loads(file.read_text()) if file.exists() else {}
    if measuring:
        click.echo("done" if measure(held, file, seconds, points) else "more to do")
        return
    report(held)


if __name__ == "__main__":
    main()
