"""Generated attention beside torch's own kernels, on a CUDA device: decoding steps and prefill.

    python benchmarks/attention_gpu.py [--shape 1,32,8,1,4096,128] [--dtype bf16] [--sweep] [--points 10] [--rounds 15]
                                       [--compiled SECONDS ...] [--json FILE]

A shape is batch, heads of queries, heads of keys, queries, keys, columns of a head, and maybe the word causal. Each has a table
of kernels, fastest first: ours, point by point, and the backends of torch's scaled_dot_product_attention that take it. The
first time is with keys and values in memory (several copies of them take turns, so that no cache holds them), the second with
one copy over and over; the limit is all bytes once at the machine's measured rate, beside the first. Results are compared with
attention in f32 first; then all replay CUDA graphs of twelve calls in turn, in another order each time. `--sweep` adds sizes
that the candidate would not offer, `--compiled` what a program compiled in so many seconds takes.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewright
from gpu import captured, replay_us
from tilewright.candidates.triton.attention.kernel import TileConfig, padded_extent
from tilewright.compiler import optimise
from tilewright.dtype import DType, dtype
from tilewright.hardware.ceilings import with_ceilings
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.build import input_
from tilewright.ir.graph import Graph, Node, toposort
from tilewright.ir.ops import Attention
from tilewright.schedule.candidate import Candidate, Schedule, discover, labelled, plan_for, refusal
from tilewright.schedule.problem import AttentionProblem, problem_of

DEFAULTS = ("1,32,8,1,4096,128", "1,32,8,1,32768,128", "16,32,8,1,4096,128", "1,32,8,2048,2048,128,causal")
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
CALLS = 12  # of a graph: as many again have counters of their own without a step of the graph to clear them
BEYOND_CACHE = 256 << 20  # bytes of all copies
# Keys of a tile, warps and stages of the sweep; with half an SM, one, two and three blocks of it.
SWEPT = ((128, 4, 3), (64, 4, 5), (128, 4, 4), (64, 4, 6), (64, 4, 7), (32, 4, 8), (32, 4, 12), (128, 8, 4), (64, 8, 6),
         (64, 4, 4), (64, 4, 3), (32, 4, 6))  # fmt: skip
ERROR = 1e-2  # relative, in norm
Point = tuple[str, Schedule]


@dataclass(frozen=True)
class Shape:
    """One attention."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    depth: int
    causal: bool
    dtype: DType

    def problem(self) -> AttentionProblem:
        """The problem after the rules."""
        q = input_("q", self.dtype, (self.batch, self.heads, self.queries, self.depth))
        k, v = (input_(n, self.dtype, (self.batch, self.key_heads, self.keys, self.depth)) for n in "kv")
        root = Node(Attention(self.depth**-0.5, "upper" if self.causal else "no"), q, k, v)
        graph = optimise(Graph("attention", (q, k, v), (root,), ("y",)))
        posed = problem_of(next(n for n in toposort(graph.outputs) if isinstance(n.op, Attention)))
        assert isinstance(posed, AttentionProblem)
        return posed

    def sources(self) -> list[torch.Tensor]:
        """Random queries, keys and values on the device."""
        shapes = [(self.heads, self.queries), *[(self.key_heads, self.keys)] * 2]
        made = (torch.randn(self.batch, *s, self.depth, device="cuda") for s in shapes)
        return [t.to(self.dtype.to_torch()) for t in made]

    def library(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """torch's attention."""
        return scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.heads != self.key_heads)

    def expected(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The same in f32, a head of keys at a time."""
        group, found = self.heads // self.key_heads, list[torch.Tensor]()
        for i in range(self.key_heads):
            scores = q[:, i * group : (i + 1) * group].float() @ k[:, i : i + 1].float().mT * self.depth**-0.5
            if self.causal:
                scores += torch.full(scores.shape[-2:], -math.inf, device="cuda").triu(1)
            found.append(scores.softmax(-1) @ v[:, i : i + 1].float())
        return torch.cat(found, 1)

    @property
    def bytes(self) -> int:
        """Bytes of queries, keys, values and results."""
        rows = 2 * self.batch * (self.heads * self.queries + self.key_heads * self.keys)
        return rows * self.depth * self.dtype.bits // 8

    def __str__(self) -> str:
        """The shape as an option gives it."""
        numbers = (self.batch, self.heads, self.key_heads, self.queries, self.keys, self.depth)
        return ",".join(map(str, numbers)) + ",causal" * self.causal


def shape_of(text: str, kind: DType) -> Shape:
    """A shape from an option.

    Raises:
        click.BadParameter: it is not one.
    """
    *numbers, last = text.split(",")
    given = numbers if last == "causal" else [*numbers, last]
    if len(given) != 6 or not all(n.isdecimal() and int(n) for n in given):
        raise click.BadParameter(f"{text!r} is not batch,heads,key heads,queries,keys,depth[,causal]", param_hint="--shape")
    batch, heads, key_heads, queries, keys, depth = map(int, given)
    if heads % key_heads:
        raise click.BadParameter(f"{text!r}: {key_heads} heads of keys for {heads} of queries", param_hint="--shape")
    return Shape(batch, heads, key_heads, queries, keys, depth, last == "causal", kind)


def generated() -> list[Candidate]:
    """The candidates that generate GPU kernels of attention."""
    return [c for c in discover() if c.preference < 10 and "attention" in c.kinds and "cuda" in c.devices]


def swept(problem: AttentionProblem, cores: int) -> Iterable[Schedule]:
    """Sizes of the kernel that splits keys, over a grid."""
    batch, heads, queries, _ = problem.operands[0].shape
    key_heads, keys = problem.operands[1].shape[1:3]
    rows = queries * heads // key_heads
    for (tile_n, warps, stages), blocks in itertools.product(SWEPT, (0.5, 1, 2, 3)):
        parts = min(int(cores * blocks) // (batch * key_heads), keys // tile_n)
        ring = (stages - 1) * tile_n * problem.operands[0].shape[3] * 4
        room = (220 << 10) // ring
        if rows <= 64 and parts > 0 and blocks <= room:
            early = True if blocks in (room, 0.5) or room == 1 else None
            yield Schedule.of_point(TileConfig(padded_extent(rows), tile_n, warps, stages, "online", "ieee", parts, early))


def points(shape: Shape, target: Target, count: int, *, sweep: bool) -> list[Point]:
    """The first points of each generator's space, and those of the sweep."""
    problem = shape.problem()
    found: list[Point] = []
    for candidate in generated():
        if refusal(candidate, problem, target) is None:
            offered = list(plan_for(candidate, problem, target).schedules())[:count]
            extra = swept(problem, target.cores) if sweep and candidate.name == "triton_attention" else ()
            found += [(candidate.name, s) for s in dict.fromkeys([*offered, *extra])]
    return found


def compile_one(job: tuple[Shape, Point, Target]) -> str | None:
    """Fill Triton's cache, in a process of its own; why it cannot be built."""
    shape, (name, schedule), target = job
    candidate = next(c for c in generated() if c.name == name)
    try:
        plan_for(candidate, shape.problem(), target).build(schedule)
    except Exception as error:
        return f"{shape} {name} {schedule}: {str(error)[:300]}"
    return None


def contenders(shape: Shape, kernels: Sequence[Point], target: Target) -> dict[str, Callable[..., torch.Tensor]]:
    """Functions of queries, keys and values by name, all that can be called."""
    problem = shape.problem()
    found: dict[str, Callable[..., torch.Tensor]] = {}
    for name, schedule in kernels:
        candidate = next(c for c in generated() if c.name == name)
        try:
            run = plan_for(candidate, problem, target).build(schedule).prepare({})
        except Exception as error:
            print(f"{shape} {name} {schedule}: {str(error)[:200]}", file=sys.stderr)
            continue

        def call(*given: torch.Tensor, run: Any = run) -> torch.Tensor:
            seen = [t.view(p.shape) for t, p in zip(given, problem.types, strict=True)]
            return run(seen)[0].view(given[0].shape)

        found[labelled(name, schedule)] = call
    for backend in BACKENDS:

        def library(*given: torch.Tensor, backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return shape.library(*given)

        found[f"torch {backend.name.removesuffix('_ATTENTION').lower()}"] = library
    return found


def right(runs: dict[str, Callable[..., torch.Tensor]], shape: Shape, sources: Sequence[torch.Tensor]) -> list[str]:
    """The names of those that compute the attention; the others are told."""
    wanted, fine = shape.expected(*sources), list[str]()
    for name, run in runs.items():
        try:
            for _ in range(3):  # a workspace must be left as it was found
                got = run(*sources).float()
                error = float((got - wanted).norm() / wanted.norm())
                if not error < ERROR:
                    raise ValueError(f"relative error {error:.1e}")
            torch.cuda.synchronize()
        except Exception as why:
            print(f"{shape} {name}: {str(why).splitlines()[0][:200]}", file=sys.stderr)
        else:
            fine.append(name)
    return fine


def timed(runs: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Medians in microseconds of calls (of which each is given its number) that take turns, in another order each time."""
    graphs = {name: captured(_calls(run), 1) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, draw = list(graphs), random.Random(0)
    for turn in range(rounds + 2):
        draw.shuffle(order)
        for name in order:
            us = replay_us(graphs[name], CALLS)
            if turn > 1:
                times[name].append(us)
    return {name: statistics.median(found) for name, found in times.items()}


def _calls(run: Callable[[int], object]) -> Callable[[], None]:
    def all_of_them() -> None:
        for i in range(CALLS):
            run(i)

    return all_of_them


def measure(shape: Shape, kernels: Sequence[Point], target: Target, rounds: int) -> dict[str, tuple[float, float]]:
    """Microseconds of each contender that is right: from memory, and of one copy of keys and values over and over."""
    copies = [shape.sources() for _ in range(min(CALLS, -(-BEYOND_CACHE // shape.bytes)))]
    runs = contenders(shape, kernels, target)
    fine = right(runs, shape, copies[0])
    cold = timed({n: lambda i, run=runs[n]: run(*copies[i % len(copies)]) for n in fine}, rounds)
    warm = timed({n: lambda i, run=runs[n]: run(*copies[0]) for n in fine}, rounds)
    return {n: (cold[n], warm[n]) for n in fine}


def compiled(shape: Shape, budget_s: float, rounds: int) -> tuple[float, str]:
    """Microseconds of a program that does this attention alone, from memory, and what was chosen, with the others' reasons."""

    class Alone(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return shape.library(q, k, v)

    copies = [shape.sources() for _ in range(min(CALLS, -(-BEYOND_CACHE // shape.bytes)))]
    program = tilewright.compile(Alone(), example_inputs=tuple(copies[0]), device="cuda", budget_s=budget_s)
    decided = next(s.decision for s in program.steps if s.decision is not None)
    others = "; ".join(f"{r}: {r.why}" for r in decided.rejected)
    us = timed({"it": lambda i: program(*copies[i % len(copies)])}, rounds)["it"]
    return us, f"{labelled(decided.kernel.candidate, decided.kernel.schedule)} [{others}]"


@click.command()
@click.option("--shape", "shapes", multiple=True, help="batch,heads,key heads,queries,keys,depth[,causal]")
@click.option("--dtype", "kind", default="bf16", show_default=True, type=click.Choice(["bf16", "f16"]))
@click.option("--sweep", is_flag=True, help="More sizes of the kernel that splits keys.")
@click.option("--points", "count", default=10, show_default=True, help="Points of each generator, the most promising first.")
@click.option("--rounds", default=15, show_default=True)
@click.option(
    "--compiled", "budgets_s", multiple=True, type=float, help="Seconds in which a program is compiled, too; 0: untimed."
)
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Where all times go.")
def main(
    shapes: tuple[str, ...], kind: str, sweep: bool, count: int, rounds: int, budgets_s: tuple[float, ...], file: Path | None
) -> None:
    """Time generated attention beside torch's own."""
    chosen = [shape_of(text, dtype(kind)) for text in shapes or DEFAULTS]
    target = with_ceilings(detect("cuda"))
    kernels = {s: points(s, target, count, sweep=sweep) for s in chosen}
    jobs = [(s, point, target) for s, found in kernels.items() for point in found]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for why in filter(None, pool.map(compile_one, jobs)):
            print(why, file=sys.stderr)
    results: dict[str, Any] = {}
    for shape in chosen:
        times = results[str(shape)] = measure(shape, kernels[shape], target, rounds)
        limit = shape.bytes / target.read_gbps / 1e3
        print(f"\n{shape} {kind}: {shape.bytes / 1e6:,.1f} MB, {limit:.1f} us at {target.read_gbps:,.0f} GB/s")
        print("| us | in a cache | of limit | kernel |\n|--:|--:|--:|---|", flush=True)
        for name, (cold, warm) in sorted(times.items(), key=lambda item: item[1]):
            print(f"| {cold:.2f} | {warm:.2f} | {limit / cold:.2f} | {name} |", flush=True)
        for budget_s in budgets_s:
            us, what = compiled(shape, budget_s, rounds)
            print(f"compiled in {budget_s:g} s: {us:.2f} us by {what}", flush=True)
        if file is not None:
            file.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
