"""Products of many rows that store their tiles into the memory of the ranks that own the rows, point by point.

    torchrun --nproc-per-node 4 benchmarks/push_tiles.py [--layers o,down] [--dtypes bf16,fp8] [--rows 512,4096] [--points 4]
    python benchmarks/push_tiles.py [--ranks 4] ...          # all ranks on one GPU

The products are Llama 3 70B's behind which sums are reduce-scattered or all-reduced, one rank's part each. A line for each:

- "right", or why not: the error against f32 on the same data, and whether all ranks have the same bits of an all-reduce. With
  several GPUs each point is called three times on other data, one rank late, before it is timed.
- "stress": CUDA graphs of three calls on other data, replayed with delays drawn by lot, so that ranks overtake one another;
  wrong bytes are counted within the graphs. On one GPU of small shapes alone, whose waiting kernels leave multiprocessors to
  those that they wait for (`--layers small --rows 128,256`).
- µs of a graph, the slowest rank: ours, the fastest of the points, which is named; "product", the same kernel with its tiles
  at home; with several GPUs "nccl", NCCL behind cuBLASLt, and "limit", the larger of cuBLASLt's product and the bytes that a
  rank sends at `--link` GB/s. On one GPU "behind" is what kernels behind the product take, and nothing crosses a link.

NVLink multicast is off. The last line is "push_tiles: all right", or how much is wrong. --json FILE has all of it.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

# Before anything communicates: multicast can put shared GPUs out of service.
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

import click
import torch
import torch.distributed as dist

from replayed import VARIANTS, captured, delayed, median_us, replayed, wrong_bytes
from tilewright.candidates.triton.hopper.gemm.run import compiled, runner
from tilewright.candidates.triton.hopper.gemm.spec import spec_of
from tilewright.candidates.triton.hopper.gemm.tile import TileConfig
from tilewright.candidates.triton.push_rows.virtual import VirtualRanks
from tilewright.candidates.triton.push_tiles.candidate import CANDIDATE, Plan, Way
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.expression import make_gemm
from tilewright.ir.graph import Node, label_of
from tilewright.ir.mesh import Mesh
from tilewright.ir.notation import parse
from tilewright.ir.ops import AllReduce, Gemm, Param, ReduceScatter
from tilewright.lowering.pieces import chosen_of, joined
from tilewright.runtime.team import team_of
from tilewright.schedule.candidate import Schedule, plan_for
from tilewright.schedule.problem import Problem

LAYERS = {"o": (8192, 8192), "down": (8192, 28672), "small": (512, 1024)}  # N and K of the whole weight
CALLS = 3  # of a graph: an odd number, so that calls on the same data take either slot
ROUNDS = 15
OVER = ("tp",)


@dataclass(frozen=True)
class Case:
    """A product and its sums.

    Attributes:
        layer, dtype, rows, scatter, ranks: what the command names.
    """

    layer: str
    dtype: str
    rows: int
    scatter: bool
    ranks: int

    def __str__(self) -> str:
        return f"{self.layer:5} {self.dtype:4} {self.rows:5} {'reduce_scatter' if self.scatter else 'all_reduce':14}"

    @cached_property
    def posed(self) -> tuple[Problem, tuple[str, ...]]:
        """The problem, and the names of its sources."""
        (n, k), m = LAYERS[self.layer], self.rows
        k //= self.ranks
        line = {
            "bf16": f"bf16[{m},{k}] @ bf16[{n},{k}]^T -> bf16",
            "f16": f"f16[{m},{k}] @ f16[{n},{k}]^T -> f16",
            "fp8": f"f8e4m3fn[{m},{k}] scale=channel @ f8e4m3fn[{n},{k}]^T scale=channel -> bf16",
        }[self.dtype]
        (node,) = parse(line).outputs
        op = node.op
        assert isinstance(op, Gemm)
        between = ReduceScatter(OVER, (self.ranks,), axis=0) if self.scatter else AllReduce(OVER, (self.ranks,))
        labels = tuple(map(label_of, node.src))
        sources = [Node(Param(i, s.tensor)) for i, s in enumerate(node.src)]
        made = make_gemm(op.acc_dtype, op.lhs, op.rhs, (Node(between, op.stores[0]),), sources)
        assert isinstance(made.op, Gemm)
        return Problem(made.op, tuple(s.tensor for s in sources), tuple(n.startswith("b") for n in labels)), labels

    def plan(self, target: Target) -> Plan:
        return cast("Plan", plan_for(CANDIDATE, self.posed[0], target))

    def points(self, target: Target, most: int, *, few: bool) -> list[Schedule]:
        """The first points, those of different ways in turn; `few`: of kernels that wait on few multiprocessors."""
        by_way: dict[object, list[Schedule]] = {}
        for s in self.plan(target).schedules():
            by_way.setdefault(chosen_of(s)[0][1].point(Way), []).append(s)
        found = [ways[i] for i in range(max(map(len, by_way.values()))) for ways in by_way.values() if i < len(ways)]
        if few:
            found = [fewer(s, self.plan(target)) for s in found]
        return [*dict.fromkeys(found)][:most]


def fewer(schedule: Schedule, plan: Plan) -> Schedule:
    """The same point with few programs in kernels that wait."""
    (product, own), (tail, _) = chosen_of(schedule)
    behind = cast("Any", plan.form(own.point(Way)).tail.plan)
    fewest = min(behind.schedules(), key=lambda s: sum(t.grid for t in behind.tiles(s)))
    knobs = tuple((name, min(int(value), 8) if name == "adders" else value) for name, value in own.knobs)
    return joined(Schedule(), [(product, Schedule(knobs)), (tail, fewest)])


def drawn(case: Case, rank: int, call: int, device: str) -> list[torch.Tensor]:
    """A rank's sources; weights are those of every call, and scales of rows all ranks' own."""
    problem, names = case.posed
    found: list[torch.Tensor] = []
    k = LAYERS[case.layer][1]
    for at, (name, t) in enumerate(zip(names, problem.types, strict=True)):
        whose = 0 if name == "a_scale" else rank + 1
        generator = torch.Generator(device).manual_seed(100 * whose + 10 * at + (call if name[0] == "a" else 0))
        if "scale" in name:
            value = (0.5 + torch.rand(t.shape, generator=generator, device=device)) / math.sqrt(k if name == "b_scale" else 1)
        else:
            value = torch.randn(t.shape, generator=generator, device=device)
            value = value / math.sqrt(k) if name == "b" and case.dtype != "fp8" else value
        found.append(value.to(t.dtype.to_torch()))
    return found


def partial_sums(case: Case, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """A rank's product in f32, rounded as it travels."""
    given = dict(zip(case.posed[1], (t.float() for t in sources), strict=True))
    y = given["a"] @ given["b"].T
    if "b_scale" in given:
        y = y * given["a_scale"].reshape(-1, 1) * given["b_scale"].reshape(1, -1)
    return y.to(case.posed[0].outputs[0].dtype.to_torch()).float()


class World:
    """The ranks: one of this process among others, or all of them on this GPU.

    Attributes:
        mine: numbers of the ranks that this process runs.
        size: how many there are.
        device: this process's GPU.
    """

    def __init__(self, ranks: int) -> None:
        self.real = int(os.environ.get("WORLD_SIZE", "1")) > 1
        self.space: VirtualRanks | None = None
        if self.real:
            self.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(self.device)
            dist.init_process_group("cpu:gloo,cuda:nccl")
            self.size = dist.get_world_size()
            self.team: Any = team_of(f"tp={self.size}", self.device)
            self.team.prepare([OVER])
            self.mine = [self.team.rank]
            self.control = dist.new_group(backend="gloo")
        else:
            self.size, self.device, self.mine = ranks, detect("cuda").device, [*range(ranks)]
            self.space = VirtualRanks(Mesh((("tp", ranks),)), self.device)

    def memory(self, rank: int, size: int) -> Any:
        return self.team.symmetric(OVER, size) if self.space is None else self.space.member(rank).symmetric(OVER, size)

    def late(self) -> bool:
        """Tell whether a kernel of this process waited in vain."""
        memories = self.team._symmetric.values() if self.space is None else ()
        return any(self.space.late()) if self.space is not None else any(int(m.late) for m in memories)

    def gathered(self, value: Any) -> list[Any]:
        """Say something to all processes, and give what each says."""
        if not self.real:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.control)
        return found

    def barrier(self) -> None:
        torch.cuda.synchronize()
        if self.real:
            dist.barrier(group=self.control)

    def summed(self, values: list[torch.Tensor]) -> torch.Tensor:
        """The sum over all ranks, of this process's summands, in f32."""
        total = values[0].clone()
        for v in values[1:]:
            total += v
        if self.real:
            dist.all_reduce(total)
        return total


class Ranks:
    """The ranks of this process, of a case at one point: kernels in turn, with their data."""

    def __init__(self, world: World, case: Case, point: Schedule, target: Target) -> None:
        self.world, self.case = world, case
        plan, problem = case.plan(target), case.posed[0]
        (_, own), _ = chosen_of(point)
        tile, way = own.point(TileConfig), own.point(Way)
        steps, size = plan.steps(point), plan.chunks(tile, way).bytes
        self.sources = {r: [drawn(case, r, call, world.device) for call in range(CALLS)] for r in world.mine}
        self.steps: dict[int, list[Any]] = {}
        plain = spec_of(plan.form(way).gemm, tile)
        for r in world.mine:
            weights = {i: t for i, t in enumerate(self.sources[r][0]) if problem.weights[i]}
            self.steps[r] = steps(weights, world.memory(r, size))
        weights = {i: t for i, t in enumerate(self.sources[world.mine[0]][0]) if problem.weights[i]}
        self.plain = runner(plain, compiled(plain), {at: weights[i] for at, i in enumerate(plan.summed.places) if i in weights})
        self.places = plan.summed.places

    def call(self, rank: int, call: int) -> torch.Tensor:
        """All kernels of a rank."""
        *first, last = self.steps[rank]
        for step in first:
            step(self.sources[rank][call])
        return last(self.sources[rank][call])[0]

    def in_turns(self, call: int) -> dict[int, torch.Tensor]:
        """A call of this process's ranks on one stream, kernel by kernel: nobody waits for what comes behind it."""
        found: dict[int, torch.Tensor] = {}
        for at in range(len(self.steps[self.world.mine[0]])):
            for r in self.world.mine:
                made = self.steps[r][at](self.sources[r][call])
                if made:
                    found[r] = made[0]
        return found

    def product(self) -> object:
        """The same product, with its tiles at home."""
        return self.plain([self.sources[self.world.mine[0]][0][i] for i in self.places])

    def wrong(self, call: int, results: dict[int, torch.Tensor]) -> str:
        """The reason why results of a call are not right; "" if they are."""
        case, world = self.case, self.world
        whole = world.summed([partial_sums(case, self.sources[r][call]) for r in world.mine])
        each = case.rows // world.size
        why = ""
        for r, got in results.items():
            right = whole[r * each : (r + 1) * each] if case.scatter else whole
            far = float((got.float() - right).norm() / right.norm())
            why = why or ("" if far < 0.005 else f"rank {r} is off by {far:.3g}")
        digests = {sha256(t.cpu().view(torch.uint8).numpy()).hexdigest() for t in results.values()}
        said = world.gathered((why, digests))
        why = next((w for w, _ in said if w), "")
        if not why and not case.scatter and len(set[str]().union(*(d for _, d in said))) > 1:
            why = "ranks have different bits"
        return why


def timed(world: World, run: Callable[[], object], calls: int = 8) -> float:
    """µs of a call in a graph, of the slowest rank; the L2 cache is as the call before left it."""
    world.barrier()
    graph, _kept = captured(lambda: [run() for _ in range(calls)])
    graph.replay()
    return max(world.gathered(median_us(graph.replay, calls, ROUNDS, world.barrier)))


def stressed(ranks: Ranks, right: dict[int, list[torch.Tensor]], replays: int, seed: int) -> str:
    """Replays with delays: the reason why they went wrong; "right" if they did not."""
    world = ranks.world
    rng = random.Random(seed + 1000 * world.mine[0])
    bad = {r: torch.zeros((), dtype=torch.int64, device=world.device) for r in world.mine}

    def calls(rank: int) -> object:
        made: list[torch.Tensor] = []
        for call in range(CALLS):
            delayed(rng)
            made.append(ranks.call(rank, call))
            bad[rank].add_(wrong_bytes(made[-1], right[rank][call]))
        return made

    made = {r: [captured(lambda r=r: calls(r)) for _ in range(VARIANTS)] for r in world.mine}
    world.barrier()
    late = replayed({r: [graph for graph, _ in each] for r, each in made.items()}, replays, rng, world.late)
    found = [int(b) for b in bad.values()]
    said = world.gathered((found, late))
    if why := next((why for _, why in said if why), ""):
        return why
    return f"wrong bytes by rank: {said}" if any(any(f) for f, _ in said) else "right"


def built(case: Case, target: Target, most: int, few: bool) -> str:
    """Leave machine code of a case in Triton's cache; what fails, as a sentence."""
    try:
        plan = case.plan(target)
        for point in case.points(target, most, few=few and case.layer == "small"):
            plan.steps(point)
            own = chosen_of(point)[0][1]
            compiled(spec_of(plan.form(own.point(Way)).gemm, own.point(TileConfig)))
    except Exception as error:  # whatever it is, the sentence is printed
        return f"{case}: {type(error).__name__}: {error}"
    return ""


def by_nccl(world: World, case: Case) -> tuple[Callable[[], object], Callable[[], object]]:
    """NCCL behind torch's product, and that product alone."""
    given = dict(zip(case.posed[1], drawn(case, world.mine[0], 0, world.device), strict=True))
    a, b = given["a"], given["b"]

    def product() -> torch.Tensor:
        if case.dtype != "fp8":
            return a @ b.T
        kinds: Any = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        scales = given["a_scale"].reshape(-1, 1), given["b_scale"].reshape(1, -1)
        return torch._scaled_mm(a, b.T, scale_a=scales[0], scale_b=scales[1], **kinds)  # pyright: ignore

    part = torch.empty(case.rows // world.size, b.shape[0], dtype=product().dtype, device=world.device)

    def whole() -> torch.Tensor:
        y = product()
        if case.scatter:
            dist.reduce_scatter_tensor(part, y)
            return part
        dist.all_reduce(y)
        return y

    return whole, product


def one_case(world: World, case: Case, target: Target, most: int, replays: int, seed: int, link: float) -> dict[str, Any]:
    """Check, stress and time a case."""
    row: dict[str, Any] = {"case": str(case), "points": [], "why": ""}
    for at, point in enumerate(case.points(target, most, few=not world.real and case.layer == "small")):
        ranks = Ranks(world, case, point, target)
        world.barrier()  # a rank that loads its code is not waited for by kernels
        results: list[dict[int, torch.Tensor]] = []
        for call in range(CALLS):
            if world.real and world.mine[0] == call % world.size:
                torch.cuda._sleep(2_000_000)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
            results.append(ranks.in_turns(call))
        torch.cuda.synchronize()
        whys = [ranks.wrong(call, r) for call, r in enumerate(results)]
        why = next((f"call {call}: {w}" for call, w in enumerate(whys) if w), "")
        if any(world.gathered(world.late())):
            why = f"a rank waited in vain; {why}"
        found: dict[str, Any] = {"point": str(point), "check": why or "right"}
        if not why and at == 0 and replays and (world.real or case.layer == "small"):
            began = time.perf_counter()
            found["stress"] = stressed(ranks, {r: [x[r] for x in results] for r in world.mine}, replays, seed)
            found["stress_s"] = round(time.perf_counter() - began, 1)
            why = why or ("" if found["stress"] == "right" else found["stress"])
        if not why:
            if world.real:
                found["us"] = timed(world, lambda ranks=ranks: ranks.call(ranks.world.mine[0], 0))
            else:
                found["us"] = timed(world, lambda ranks=ranks: ranks.in_turns(0), 2) / world.size
            found["product"] = timed(world, ranks.product)
        row["why"] = row["why"] or why
        row["points"].append(found)
        if why:
            break
    timely = [p for p in row["points"] if "us" in p]
    if timely:
        best = min(timely, key=lambda p: p["us"])
        row |= {"us": best["us"], "product": best["product"], "best": best["point"]}
    if world.real:
        whole, product = by_nccl(world, case)
        row["nccl"], alone = timed(world, whole), timed(world, product)
        sent = case.rows * LAYERS[case.layer][0] * 2 * (world.size - 1) / world.size * (1 if case.scatter else 2)
        row["limit"] = max(alone, sent / link / 1e3)
    return row


def told(row: dict[str, Any]) -> str:
    """A case's line."""
    words = [row["case"], row["why"] or "right"]
    stress = next((p for p in row["points"] if "stress" in p), None)
    words += [f"stress {stress['stress']} in {stress['stress_s']} s"] if stress else []
    words += [f"{key} {row[key]:.1f}" for key in ("us", "product", "nccl", "limit") if key in row]
    if "nccl" in row and "us" in row:
        words.append(f"nccl/us {row['nccl'] / row['us']:.2f} us/limit {row['us'] / row['limit']:.2f}")
    if "best" in row:
        words.append(f"[{row['best']}]")
        words.append("all " + " ".join(f"{p['us']:.1f}" for p in row["points"] if "us" in p))
    return "  ".join(words)


@click.command()
@click.option("--ranks", default=4, show_default=True, help="On one GPU.")
@click.option("--layers", default="o,down", show_default=True, help="Of o, down and small.")
@click.option("--dtypes", default="bf16,fp8", show_default=True)
@click.option("--rows", default="512,4096", show_default=True)
@click.option("--ways", default="reduce_scatter,all_reduce", show_default=True)
@click.option("--points", default=4, show_default=True, help="Of each case.")
@click.option("--replays", default=200, show_default=True, help="Of the stress; 0 for none.")
@click.option("--link", default=363.0, show_default=True, help="GB/s that a rank sends and receives.")
@click.option("--seconds", default=420.0, show_default=True, help="After which no further case is begun.")
@click.option("--workers", default=4, show_default=True, help="Processes that compile.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Where all times go.")
def main(
    ranks: int, layers: str, dtypes: str, rows: str, ways: str, points: int, replays: int, link: float, seconds: float,
    workers: int, seed: int, file: Path | None,
) -> None:  # fmt: skip
    """Check, stress and time each case; see the head of this file."""
    began = time.perf_counter()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    size = size if size > 1 else ranks
    cases = [
        Case(name, kind, int(m), way == "reduce_scatter", size)
        for m in rows.split(",")
        for kind in dtypes.split(",")
        for name in layers.split(",")
        for way in ways.split(",")
    ]
    few = int(os.environ.get("WORLD_SIZE", "1")) == 1
    local = int(os.environ.get("LOCAL_RANK", "0"))
    target = detect(f"cuda:{local}")
    own = cases[local::size] if not few else cases  # each rank compiles some of them, into a cache that all read
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        failed = [why for why in pool.map(partial(built, target=target, most=points, few=few), own) if why]
    world, table = World(ranks), list[dict[str, Any]]()
    failed = [why for said in world.gathered(failed) for why in said]
    first = world.mine[0] == 0
    if first:
        click.echo(f"compiled in {time.perf_counter() - began:.0f} s")
    for case in cases:
        if max(world.gathered(time.perf_counter() - began)) > seconds:
            failed.append(f"{case}: not begun, the time is over")
            continue
        try:
            row = one_case(world, case, target, points, replays, seed, link)
        except Exception as error:  # the next case may run, where one process has all ranks
            failed.append(f"{case}: {type(error).__name__}: {error}")
            if world.real:
                click.echo(f"rank {world.mine[0]}: {failed[-1]}")
                raise
            continue
        table.append(row)
        failed += [f"{case}: {row['why']}"] if row["why"] else []
        if first:
            click.echo(told(row))
        if row["why"] and world.real and "vain" in row["why"]:
            break  # a later call would wait in vain, too
    if first:
        if file is not None:
            file.write_text(json.dumps({"rows": table, "failed": failed}, indent=1))
        for why in failed:
            click.echo(why)
        click.echo("push_tiles: all right" if not failed else f"push_tiles: {len(failed)} wrong")
    if world.real:
        world.barrier()
        dist.destroy_process_group()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
