"""Products of few rows that store partial sums into other ranks' memory, with all ranks on one GPU.

    python benchmarks/push_rows.py [--ranks 4] [--layers o,down] [--dtypes bf16,fp8,w4] [--rows 1,16,64] [--replays 10000]

The products are Llama 3 70B's behind which sums are all-reduced, one rank's part each; behind the sum stand residual, RMS norm
and quantising by row to fp8. No value crosses a link: it shows what is right, and what storing, flags and one kernel behind the
product cost beside kernels apart.

- "check": all products, then all kernels behind them: the error against f32 on the same data, and whether all ranks have the
  same bits.
- "stress" (up to 16 rows): a stream for each rank, CUDA graphs of three calls on different data, replayed with delays drawn by
  lot before and within them, so that ranks overtake one another. Wrong bytes are counted within the graphs.
- "us": one rank's call, ranks in turns, in a graph: pushed (product and kernel behind); apart (the same product and, by one
  kernel, the same sums from plain memory); torch (the same product, then torch's sum, norm and quantising). Each is the fastest
  of the points. Weights of 4 bits of all ranks fit into the L2 cache; the others do not.

The last line is "push_rows: all right", or how much is wrong. --json FILE has all numbers.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import click
import torch

from replayed import VARIANTS, captured, delayed, median_us, replayed, wrong_bytes
from tilewright.candidates.triton.push_rows.candidate import CANDIDATE, Plan
from tilewright.candidates.triton.push_rows.virtual import VirtualRanks
from tilewright.dtype import F8E4M3FN, F32
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.build import const, convert, map_, reduce_
from tilewright.ir.expression import make_gemm
from tilewright.ir.graph import Node, label_of
from tilewright.ir.mesh import Mesh
from tilewright.ir.notation import parse
from tilewright.ir.ops import AllReduce, Gemm, LayerNorm, Param, Quantize
from tilewright.ir.types import TensorType
from tilewright.lowering.pieces import chosen_of
from tilewright.schedule.candidate import Schedule, discover, plan_for
from tilewright.schedule.problem import Problem

LAYERS = {"o": (8192, 8192), "down": (8192, 28672)}  # N and K of the whole weight
GROUP = 128  # codes of 4 bits along K that share a scale
OVERLAPPED = 16  # rows, up to which waiting kernels leave multiprocessors to those that they wait for
CALLS = 3  # of a graph: an odd number, so that calls on the same data take either slot
ROUNDS = 11
EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    """One rank's product of a layer, and what follows.

    Attributes:
        layer, dtype, rows, ranks: which one.
        n, k: extents of one rank's weight.
    """

    layer: str
    dtype: str
    rows: int
    ranks: int
    n: int
    k: int

    @classmethod
    def of(cls, layer: str, dtype: str, rows: int, ranks: int) -> Case:
        n, k = LAYERS[layer]
        return cls(layer, dtype, rows, ranks, n, k // ranks)

    @cached_property
    def line(self) -> str:
        m, n, k = self.rows, self.n, self.k
        return {
            "bf16": f"bf16[{m},{k}] @ bf16[{n},{k}]^T -> bf16",
            "fp8": f"f8e4m3fn[{m},{k}] scale=channel @ f8e4m3fn[{n},{k}]^T scale=channel -> bf16",
            "w4": f"bf16[{m},{k}] @ s4[{n},{k}]^T group={min(GROUP, k)} -> bf16",
        }[self.dtype]

    @cached_property
    def posed(self) -> tuple[Problem, tuple[str, ...]]:
        """The problem, and the names of its sources."""
        (node,) = parse(self.line).outputs
        op = node.op
        assert isinstance(op, Gemm)
        total = Node(AllReduce(("tp",), (self.ranks,)), op.stores[0])
        names = [*map(label_of, node.src), "residual", "gain"]
        types = [*(s.tensor for s in node.src), total.tensor, TensorType(F32, (self.n,))]
        sources = [Node(Param(i, t)) for i, t in enumerate(types)]
        y = map_("add", total, sources[-2])
        normed = Node(LayerNorm(1, EPSILON, False), convert(y, F32), sources[-1])
        largest = reduce_("maximum", map_("abs", normed), (1,), True)
        scale = map_("divide", largest, const(float(F8E4M3FN.max), F32))
        made = make_gemm(op.acc_dtype, op.lhs, op.rhs, (y, Node(Quantize(F8E4M3FN), normed, scale), scale), sources)
        assert isinstance(made.op, Gemm)
        kept = [sources.index(s) for s in made.src]
        labels = tuple(names[i] for i in kept)
        constant = tuple(name.startswith("b") or name == "gain" for name in labels)
        return Problem(made.op, tuple(types[i] for i in kept), constant), labels

    def plan(self, target: Target) -> Plan:
        return cast("Plan", plan_for(CANDIDATE, self.posed[0], target))

    def points(self, target: Target) -> list[Schedule]:
        """Points of the preferred generator, each with the first kernel behind."""
        found = [*self.plan(target).schedules()]
        first = chosen_of(found[0])
        return [s for s in found if chosen_of(s)[0][0] == first[0][0] and chosen_of(s)[1] == first[1]]


def drawn(case: Case, rank: int, call: int, device: str) -> list[torch.Tensor]:
    """A rank's sources; residual and norm weights are all ranks' own, and weights those of every call."""
    problem, names = case.posed
    found: list[torch.Tensor] = []
    for name, t in zip(names, problem.types, strict=True):
        seed = hash((name in ("residual", "gain") or rank, names.index(name), not problem.weights[names.index(name)] and call))
        generator = torch.Generator(device).manual_seed(seed & 0x7FFFFFFF)
        kind = t.dtype.to_torch()
        if name == "gain" or "scale" in name:
            value = 0.5 + torch.rand(t.shape, generator=generator, device=device)
            value = (
                value / math.sqrt(case.k * case.ranks) / (20.0 if case.dtype == "w4" else 1.0) if name == "b_scale" else value
            )
        elif not t.dtype.is_float:
            value = torch.randint(-8, 8, t.shape, generator=generator, device=device)
        else:
            value = torch.randn(t.shape, generator=generator, device=device)
            value = value / math.sqrt(case.k * case.ranks) if name == "b" and case.dtype == "bf16" else value
        found.append(value.to(kind))
    return found


def wanted(case: Case, by_rank: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum with its residual, and the norm, of all ranks' sources, in f32 where the program rounds not."""
    _, names = case.posed
    partial: list[torch.Tensor] = []
    for sources in by_rank:
        given = {name: t.float() for name, t in zip(names, sources, strict=True)}
        a, b = given["a"], given["b"]
        if "a_scale" in given:
            a = a * given["a_scale"].reshape(-1, 1)
        if "b_scale" in given:
            scale = given["b_scale"]
            b = b * scale.reshape(b.shape[0], -1).repeat_interleave(b.shape[1] * b.shape[0] // scale.numel(), 1)
        partial.append((a @ b.T).bfloat16().float())
    given = dict(zip(names, by_rank[0], strict=True))
    y = (sum(partial[1:], partial[0]).bfloat16().float() + given["residual"].float()).bfloat16().float()
    normed = y * torch.rsqrt(y.square().mean(1, keepdim=True) + EPSILON) * given["gain"].float()
    return y, normed


def error(got: torch.Tensor, right: torch.Tensor) -> float:
    return float((got.float() - right).norm() / right.norm())


def wrong(case: Case, results: Sequence[Sequence[torch.Tensor]], right: tuple[torch.Tensor, torch.Tensor]) -> str:
    """The reason why results of all ranks are not right; "" if they are."""
    for rank, (y, codes, scale) in enumerate(results):
        far = error(y, right[0]), error(codes.float() * scale.float(), right[1])
        if not (far[0] < 0.01 and far[1] < 0.05):
            return f"rank {rank} is off by {far[0]:.3g} and {far[1]:.3g}"
        same = all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(results[rank], results[0], strict=True)
        )
        if not same:
            return f"rank {rank} has other bits than rank 0"
    return ""


class Ranks:
    """All ranks of a case at one point, with their weights.

    Attributes:
        space: their memory.
        products, tails: each rank's two kernels, of the product's sources and of the tail's.
    """

    def __init__(self, case: Case, point: Schedule, target: Target) -> None:
        self.case, self.target, self.plan = case, target, case.plan(target)
        self.space = VirtualRanks(Mesh((("tp", case.ranks),)), target.device)
        problem, device = case.posed[0], target.device
        (name, own), (_, behind) = chosen_of(point)
        push, tail = self.plan.push, self.plan.tail
        product = self.plan.products[name].pushed(own, push)
        follow = tail.plan.awaiting(behind, push.exchange, tail.partials)
        self.sources = [[drawn(case, r, call, device) for call in range(CALLS)] for r in range(case.ranks)]
        self.products: list[Any] = []
        self.tails: list[Any] = []
        for r in range(case.ranks):
            weights = {i: t for i, t in enumerate(self.sources[r][0]) if problem.weights[i]}
            memory = self.space.member(r).symmetric(("tp",), push.exchange.bytes)
            self.products.append(
                product({at: weights[i] for at, i in enumerate(self.plan.summed.places) if i in weights}, memory)
            )
            self.tails.append(follow({at: weights[i] for at, i in tail.places.items() if i in weights}, memory))

    def product(self, rank: int, call: int) -> None:
        self.products[rank]([self.sources[rank][call][i] for i in self.plan.summed.places])

    def tail(self, rank: int, call: int) -> list[torch.Tensor]:
        given, tail = self.sources[rank][call], self.plan.tail
        return list(self.tails[rank]([given[tail.places.get(at, 0)] for at in range(tail.count)]))

    def in_turns(self, call: int) -> list[list[torch.Tensor]]:
        """A call of all ranks on one stream: nobody waits."""
        for r in range(self.case.ranks):
            self.product(r, call)
        return [self.tail(r, call) for r in range(self.case.ranks)]

    def apart(self, point: Schedule) -> tuple[Callable[[], object], Callable[[], object]]:
        """The same product with its own results, then the sums in one kernel, or by torch, for all ranks in turns."""
        problem, plan, case = self.case.posed[0], self.plan, self.case
        (name, own), (tail_name, behind) = chosen_of(point)
        generators = {c.name: c for c in discover(kind="cuda")}
        product = plan_for(generators[name], plan.summed.local, self.target).build(own)
        runs: list[Any] = []
        for r in range(case.ranks):
            weights = {i: t for i, t in enumerate(self.sources[r][0]) if problem.weights[i]}
            runs.append(product.prepare({at: weights[i] for at, i in enumerate(plan.summed.places) if i in weights}))
        whole = plan.tail.plan.problem  # pyright: ignore[reportAttributeAccessIssue]
        held = {at: self.sources[0][0][i] for at, i in plan.tail.places.items() if whole.weights[at]}
        follow = plan_for(generators[tail_name], whole, self.target).build(behind).prepare(held)
        names = self.case.posed[1]
        residual, gain = (self.sources[0][0][names.index(n)] for n in ("residual", "gain"))

        def products() -> list[torch.Tensor]:
            return [runs[r]([self.sources[r][0][i] for i in plan.summed.places])[0] for r in range(case.ranks)]

        def ours() -> object:
            partial = dict(zip(plan.tail.partials, products(), strict=True))
            given = [partial.get(at, self.sources[0][0][plan.tail.places.get(at, 0)]) for at in range(plan.tail.count)]
            return [follow(given) for _ in range(case.ranks)]

        def torchs() -> object:
            partial = torch.stack(products())
            return [by_torch(partial, residual, gain) for _ in range(case.ranks)]

        return ours, torchs


def by_torch(partial: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor) -> object:
    """The sums, residual, norm and codes by torch's kernels."""
    y = partial.sum(0) + residual
    normed = torch.nn.functional.rms_norm(y.float(), (y.shape[1],), gain, EPSILON)
    scale = normed.abs().amax(1, keepdim=True) / 448.0
    return y, (normed / scale).to(torch.float8_e4m3fn), scale


def stressed(ranks: Ranks, right: Sequence[Sequence[torch.Tensor]], replays: int, seed: int) -> str:
    """Replays with delays: the reason why they went wrong; "" if they did not.

    `right` are the results of each call, the same on all ranks.
    """
    case, rng, device = ranks.case, random.Random(seed), ranks.target.device
    bad = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(case.ranks)]

    def calls(rank: int) -> object:
        made: list[object] = []
        for call in range(CALLS):
            delayed(rng)
            ranks.product(rank, call)
            delayed(rng)
            results = ranks.tail(rank, call)
            for got, r in zip(results, right[call], strict=True):
                bad[rank].add_(wrong_bytes(got, r))
            made.append(results)
        return made

    made = {r: [captured(lambda r=r: calls(r)) for _ in range(VARIANTS)] for r in range(case.ranks)}
    graphs = {r: [graph for graph, _ in each] for r, each in made.items()}
    if why := replayed(graphs, replays, rng, lambda: any(ranks.space.late())):
        return f"{why}: {ranks.space.late()}"
    found = [int(b) for b in bad]
    return f"wrong bytes by rank: {found}" if any(found) else ""


def compiled(case: Case, target: Target) -> str:
    """Leave machine code of a case in Triton's cache; what fails, as a sentence."""
    try:
        plan = case.plan(target)
        generators = {c.name: c for c in discover(kind="cuda")}
        for point in case.points(target):
            plan.build(point)
            (name, own), (_, behind) = chosen_of(point)
            cast("Any", plan_for(generators[name], plan.summed.local, target)).compile(own)
            cast("Any", plan.tail.plan).compile(behind)
    except Exception as error:  # whatever it is, the sentence is printed
        return f"{case.layer} {case.dtype} {case.rows}: {type(error).__name__}: {error}"
    return ""


def one_case(case: Case, target: Target, replays: int, seed: int) -> dict[str, Any]:
    """Check, stress and time a case."""
    row: dict[str, Any] = {"layer": case.layer, "dtype": case.dtype, "rows": case.rows, "points": []}
    main = torch.cuda.Stream()
    for at, point in enumerate(case.points(target)):
        ranks = Ranks(case, point, target)
        results = [ranks.in_turns(call) for call in range(CALLS)]
        torch.cuda.synchronize()
        why = ""
        for call in range(CALLS):
            right = wanted(case, [ranks.sources[r][call] for r in range(case.ranks)])
            why = why or wrong(case, results[call], right)
        found = {"point": str(point), "check": why or "right"}
        if not why and at == 0 and case.rows <= OVERLAPPED and replays:
            began = time.perf_counter()
            found["stress"] = stressed(ranks, [r[0] for r in results], replays, seed) or "right"
            found["stress_s"] = round(time.perf_counter() - began, 1)
        ways = {"pushed": lambda ranks=ranks: ranks.in_turns(0)}
        ways["apart"], ways["torch"] = ranks.apart(point)
        for name, way in ways.items():
            way()
            torch.cuda.synchronize()
            graph, _kept = captured(lambda way=way: [way() for _ in range(4)], main)
            graph.replay()
            found[name] = round(median_us(graph.replay, 4 * case.ranks, ROUNDS), 2)
        if any(ranks.space.late()):
            found["check"] = f"ranks waited in vain: {ranks.space.late()}"
        row["points"].append(found)
    for name in ("pushed", "apart", "torch"):
        row[name] = min(p[name] for p in row["points"])
    return row


@click.command()
@click.option("--ranks", default=4, show_default=True)
@click.option("--layers", default="o,down", show_default=True)
@click.option("--dtypes", default="bf16,fp8,w4", show_default=True)
@click.option("--rows", default="1,16,64", show_default=True)
@click.option("--replays", default=10000, show_default=True, help="Of the stress; 0 for none.")
@click.option("--seconds", default=420.0, show_default=True, help="After which no further case is begun.")
@click.option("--workers", default=8, show_default=True, help="Processes that compile.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Where all times go.")
def main(
    ranks: int,
    layers: str,
    dtypes: str,
    rows: str,
    replays: int,
    seconds: float,
    workers: int,
    seed: int,
    file: Path | None,
) -> None:
    """Check, stress and time each case; see the head of this file."""
    began = time.perf_counter()
    names, kinds = layers.split(","), dtypes.split(",")
    cases = [Case.of(name, kind, int(m), ranks) for m in rows.split(",") for kind in kinds for name in names]
    target, table = detect("cuda"), list[dict[str, Any]]()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        failed = [why for why in pool.map(partial(compiled, target=target), cases) if why]
    click.echo(f"compiled in {time.perf_counter() - began:.0f} s")
    for case in cases:
        if time.perf_counter() - began > seconds:
            failed.append(f"{case.layer} {case.dtype} {case.rows}: not begun, the time is over")
            continue
        try:
            row = one_case(case, target, replays, seed)
        except Exception as error:  # the next case may run
            failed.append(f"{case.layer} {case.dtype} {case.rows}: {type(error).__name__}: {error}")
            continue
        table.append(row)
        said = [f"{p[key]}" for p in row["points"] for key in ("check", "stress") if p.get(key, "right") != "right"]
        failed += [f"{case.layer} {case.dtype} {case.rows}: {why}" for why in said]
        stress = next((f"stress {p['stress']} in {p['stress_s']} s" for p in row["points"] if "stress" in p), "no stress")
        times = f"pushed {row['pushed']:7.2f}  apart {row['apart']:7.2f}  torch {row['torch']:7.2f} us"
        click.echo(f"{case.layer:5} {case.dtype:5} {case.rows:3} rows  {times}  {said[0] if said else 'right'}; {stress}")
    if file is not None:
        file.write_text(json.dumps({"rows": table, "failed": failed}, indent=1))
    for why in failed:
        click.echo(why)
    click.echo("push_rows: all right" if not failed else f"push_rows: {len(failed)} wrong")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
