"""Llama 3 70B's products with what travels between the GPUs of one host, beside torch's ways, in one run.

    torchrun --nproc-per-node 4 benchmarks/several_gpus.py [--layers o,down] [--rows 1,16] [--dtypes bf16] [--replays 10000]
    torchrun --nproc-per-node 2 benchmarks/several_gpus.py --tiny      # small shapes on a CPU, with gloo

qkv and gate_up gather their rows; o and down reduce: by an all-reduce and, where ranks divide the rows, a reduce-scatter. Up to
64 rows a residual, an RMS norm and codes in fp8 by row follow the all-reduce, in one generated kernel for all ways but ours,
which may fold them. Ours is the program that `tilewright.compile` makes of one rank's graph in `--budget` seconds. Ways of
torch: NCCL behind or before cuBLASLt's product (4-bit weights: torch's own), its one-shot and two-shot all-reduces, and its
fused products.

Times are µs of a CUDA graph, of the slowest rank, the median over rounds. Before each call the L2 cache is overwritten, which
is timed alone and taken off. "limit" is the larger of the product alone and the bytes a rank sends over the link's rate,
measured first. Every way is compared with ours. With --replays, graphs of ours are replayed with delays of each rank drawn by
lot, and wrong bytes counted. --points lists the points that were tried: whether they were right, and what they took, by graphs
of 16 calls and with data in the L2 cache where it fits. NVLink multicast is off. --json FILE has all of it.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

# Before anything communicates: multicast can put shared GPUs out of service.
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

import click
import torch
import torch.distributed as dist

import tilewright
from replayed import VARIANTS, captured, delayed, median_us, replayed, wrong_bytes
from tilewright.dtype import BF16, F8E4M3FN, F32
from tilewright.ir.build import const, convert, input_, map_, reduce_
from tilewright.ir.graph import Graph, Node, label_of, substitute
from tilewright.ir.mesh import Mesh, Placement
from tilewright.ir.notation import parse
from tilewright.ir.ops import AllGather, AllReduce, LayerNorm, Quantize, ReduceScatter
from tilewright.lowering.pieces import BY, chosen_of, own_of
from tilewright.on_mesh import MeshProgram
from tilewright.schedule.candidate import Schedule, labelled

LAYERS = {"qkv": ("all_gather", 10240, 8192), "o": ("reduce", 8192, 8192), "gate_up": ("all_gather", 57344, 8192)}
LAYERS["down"] = ("reduce", 8192, 28672)  # N and K of the whole weight
TAIL_ROWS = 64  # up to which residual, norm and codes follow
ONE_SHOT_BYTES = 8 << 20
COLD_BYTES = 192 << 20  # written before each call
GROUP = 128
EPSILON = 1e-5
WIDTH = 300  # of a line for a point
Run = Callable[[], Any]


@dataclass
class Job:
    """One rank among the others."""

    rank: int
    world: int
    device: str
    control: Any
    rounds: int

    @classmethod
    def started(cls, rounds: int, tiny: bool) -> Job:
        """Take this process as a rank of torchrun's: on a GPU of its own, on the CPU if there is none or shapes are `tiny`."""
        cuda, local = torch.cuda.is_available() and not tiny, int(os.environ.get("LOCAL_RANK", "0"))
        if cuda:
            torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        control = dist.new_group(backend="gloo")
        return cls(dist.get_rank(), dist.get_world_size(), f"cuda:{local}" if cuda else "cpu", control, rounds)

    def ended(self) -> None:
        """Leave the job, when all have come here."""
        dist.barrier(group=self.control)
        dist.destroy_process_group()

    @property
    def cuda(self) -> bool:
        return self.device != "cpu"

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def most(self, value: float) -> float:
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.control)
        return float(found)

    def timed(self, run: Run, cold: bool = True) -> float:
        """µs of a call, of the slowest rank."""
        run()
        self.sync()
        if not self.cuda:
            return self._median(run, 1)
        scratch = torch.empty(COLD_BYTES, dtype=torch.uint8, device=self.device)
        calls = 8
        flush = captured(lambda: [scratch.zero_() for _ in range(calls)])
        whole = captured(lambda: [(scratch.zero_(), run()) for _ in range(calls)])
        return max(self._median(whole[0].replay, calls) - (self._median(flush[0].replay, calls) if cold else 0.0), 0.1)

    def _median(self, run: Run, calls: int) -> float:
        if self.cuda:
            return self.most(median_us(run, calls, self.rounds, lambda: dist.barrier(group=self.control)))
        found: list[float] = []
        for _ in range(self.rounds):
            dist.barrier(group=self.control)
            began = time.perf_counter()
            run()
            found.append(1e6 * (time.perf_counter() - began) / calls)
        return self.most(statistics.median(found))

    def together(self, make: Callable[[], Any]) -> Any:
        """Give what it gives; None where it fails on a rank, with the reason told."""
        try:
            made, why = make(), ""
        except Exception as error:  # a way that does not work here is left out on all ranks
            made, why = None, f"{type(error).__name__}: {error}"
        if self.most(float(bool(why))):
            if why:
                click.echo(f"rank {self.rank}: {why[:200]}", err=True)
            return None
        return made


@dataclass
class Layer:
    """One rank's product of a layer: its data, the program that we compile, and torch's product."""

    job: Job
    name: str
    dtype: str
    rows: int
    collective: str
    n: int
    k: int

    def __post_init__(self) -> None:
        job, m = self.job, self.rows
        generator = torch.Generator(job.device).manual_seed(7 + job.rank)  # ranks have one thread each: a CPU takes seconds
        drawn: Any = {"generator": generator, "device": job.device}
        have = m // job.world if self.collective == "all_gather" else m
        kind = {"bf16": "bf16", "fp8": "f8e4m3fn", "w4": "bf16"}[self.dtype]
        scales = {"bf16": "", "fp8": " scale=channel", "w4": ""}[self.dtype]
        right = f"s4[{self.n},{self.k}]^T group={GROUP}" if self.dtype == "w4" else f"{kind}[{self.n},{self.k}]^T{scales}"
        self.line = f"{kind}[{m},{self.k}]{scales} @ {right} -> bf16"
        self.x = torch.randn(have, self.k, **drawn).bfloat16()
        w = torch.randn(self.n, self.k, **drawn) / math.sqrt(self.k * job.world)
        self.given: dict[str, torch.Tensor] = {"a": self.x, "b": w.bfloat16()}
        if self.dtype == "fp8":
            for name, value in (("a", self.x.float()), ("b", w)):
                largest = value.abs().amax(1, keepdim=True).clamp_min(1e-12)
                if name == "a" and self.collective != "all_gather":  # a row's parts share its scale
                    largest = largest.cpu()
                    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=job.control)
                    largest = largest.to(job.device)
                scale = largest / 448.0
                self.given[name], self.given[f"{name}_scale"] = (value / scale).to(torch.float8_e4m3fn), scale
        if self.dtype == "w4":
            groups = w.reshape(self.n, -1, GROUP)
            scale = (groups.abs().amax(-1, keepdim=True) / 7.0).bfloat16()
            codes = (groups / scale.float()).round().clamp(-8, 7)
            self.given["b"], self.given["b_scale"] = codes.reshape(self.n, self.k).to(torch.int8), scale.squeeze(-1)
        common = torch.Generator().manual_seed(3)
        self.residual = torch.randn(m, self.n, generator=common).bfloat16()
        self.gain = torch.rand(self.n, generator=common) + 0.5
        self.tail = self.collective == "all_reduce" and m <= TAIL_ROWS

    def program(self) -> Graph:
        """One rank's program, over its own parts."""
        (node,) = (whole := parse(self.line)).outputs
        job, known = self.job, {label_of(n): n for n in whole.inputs}
        how: Any = {"over": ("tp",), "sizes": (job.world,)}
        inputs: list[Node] = []
        stand_in: dict[Node, Node] = {}
        for name, n in known.items():
            value = self.given[name].reshape([-1, *n.shape[1:]]) if len(n.shape) == 2 else self.given[name].reshape(-1)
            if name.startswith("b"):
                stand_in[n] = const(value.reshape(n.shape).to(n.dtype.to_torch()).cpu(), n.dtype)
                continue
            own = input_(name, n.dtype, value.shape)
            inputs.append(own)
            stand_in[n] = Node(AllGather(**how, axis=0), own) if self.collective == "all_gather" else own
        (y,) = substitute((node,), stand_in)
        if self.collective == "reduce_scatter":
            y = Node(ReduceScatter(**how, axis=0), y)
        if self.collective == "all_reduce":
            y = Node(AllReduce(**how), y)
        outputs = self._followed(y, inputs) if self.tail else [y]
        rows, columns = Placement((("tp",), ())), Placement(((), ("tp",)))
        lies = {"all_gather": (rows, columns), "reduce_scatter": (columns, rows), "all_reduce": (columns, Placement.whole(2))}
        before, behind = lies[self.collective]
        placed = [before if label_of(n) == "a" else Placement.whole(n.tensor.rank) for n in inputs]
        if self.collective == "all_gather":
            placed = [rows if len(n.shape) == 2 else Placement((("tp",),)) for n in inputs]
        names = tuple(f"y{i}" for i in range(len(outputs)))
        graph = Graph(self.name, tuple(inputs), tuple(outputs), names)
        return replace(graph, mesh=Mesh((("tp", job.world),)), placements=(*placed, *([behind] * len(outputs))))

    def _followed(self, y: Node, inputs: list[Node]) -> list[Node]:
        """Residual, norm and codes of a sum."""
        residual = input_("residual", BF16, y.shape)
        inputs.append(residual)
        y = map_("add", y, residual)
        normed = Node(LayerNorm(1, EPSILON, False), convert(y, F32), const(self.gain))
        scale = reduce_("maximum", map_("abs", normed), (1,), True)
        scale = map_("divide", scale, const(float(F8E4M3FN.max), F32))
        return [y, Node(Quantize(F8E4M3FN), normed, scale), scale]

    def ours(self, budget: float) -> Run:
        made = tilewright.compile(self.program(), mesh=f"tp={self.job.world}", budget_s=budget, device=self.job.device)
        program = cast("MeshProgram", made)
        decisions = [s.decision for s in program.steps if s.decision is not None]
        self.kernels = [d.kernel.candidate for d in decisions]
        self.points = [
            f"{'' if us is None else f'{us:.1f} µs':>11}  {point_words(name, schedule)}  {why if us is None else ''}".rstrip()
            for d in decisions
            for name, schedule, us, why in [
                (d.kernel.candidate, d.kernel.schedule, d.time_us, ""),
                *((r.candidate, r.schedule, r.time_us, r.why) for r in d.rejected),
            ]
        ]
        names = [label_of(n) for n in program.graph.inputs]
        given = {**self.given, "residual": self.residual}
        held = program.input_types
        inputs = [given[n].reshape(held[n].shape).to(self.job.device) for n in names if n in held]
        return lambda: program.run(inputs)

    def ways(self, budget: float) -> dict[str, Run]:
        """Torch's ways, by name."""
        job, device = self.job, self.job.device
        own = {name: t.to(device) for name, t in self.given.items()}
        group, symm = dist.group.WORLD, cast("Any", torch.ops.symm_mem)
        name = cast("Any", group).group_name
        m, n, t = self.rows, self.n, job.world
        whole = torch.empty(m, self.k, dtype=own["a"].dtype, device=device)
        scales = torch.empty(m, 1, device=device)
        if self.dtype == "w4" and job.cuda:
            packed, pairs = packed_by_torch(own["b"], own["b_scale"])
        elif self.dtype == "w4":
            scaled = own["b"].reshape(n, -1, GROUP).float() * own["b_scale"].float().unsqueeze(-1)
            dense = scaled.reshape(n, self.k).bfloat16()

        def product(a: torch.Tensor, a_scale: torch.Tensor | None = None) -> torch.Tensor:
            if self.dtype == "bf16":
                return a @ own["b"].T
            if self.dtype == "w4":
                return torch.ops.aten._weight_int4pack_mm(a, packed, GROUP, pairs) if job.cuda else a @ dense.T
            if not job.cuda:
                return ((a.float() * cast("torch.Tensor", a_scale)) @ (own["b"].float() * own["b_scale"]).T).bfloat16()
            kinds: Any = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
            return torch._scaled_mm(a, own["b"].T, scale_a=a_scale, scale_b=own["b_scale"].T.contiguous(), **kinds)  # pyright: ignore

        def gathered() -> torch.Tensor:
            dist.all_gather_into_tensor(whole.view(torch.uint8), own["a"].contiguous().view(torch.uint8))
            if self.dtype == "fp8":
                dist.all_gather_into_tensor(scales, own["a_scale"])
            return product(whole, scales if self.dtype == "fp8" else None)

        def local() -> torch.Tensor:
            return product(own["a"], own.get("a_scale"))

        if self.collective == "all_gather":
            self.alone = lambda: product(whole, scales if self.dtype == "fp8" else None)
            found: dict[str, Run] = {"nccl": gathered}
            if job.cuda and self.dtype == "bf16":
                found["fused"] = lambda: symm.fused_all_gather_matmul(own["a"], [own["b"].T], 0, name, return_A=False)[1][0]
            return found
        self.alone = local
        part = torch.empty(m // t if m % t == 0 else 0, n, dtype=torch.bfloat16, device=device)
        if self.collective == "reduce_scatter":
            found = {"nccl": lambda: (dist.reduce_scatter_tensor(part, local()), part)[1]}
            if job.cuda and self.dtype == "bf16":
                found["fused"] = lambda: symm.fused_matmul_reduce_scatter(own["a"], own["b"].T, "sum", 0, name)
            return found
        follow: Callable[[torch.Tensor], Any] = lambda y: y  # noqa: E731
        if self.tail:
            inputs = [input_("sum", BF16, (m, n))]
            outputs = self._followed(inputs[0], inputs)
            tail = tilewright.compile(
                Graph("tail", tuple(inputs), tuple(outputs), ("y", "c", "s")), budget_s=budget, device=device
            )
            residual = self.residual.to(device)
            follow = lambda y: tail.run([y, residual])  # noqa: E731

        def nccl() -> Any:
            y = local()
            dist.all_reduce(y)
            return follow(y)

        found = {"nccl": nccl}
        if job.cuda and m * n * 2 % (16 * t) == 0:
            import torch.distributed._symmetric_memory as symmetric

            buffer = symmetric.empty(m, n, dtype=torch.bfloat16, device=torch.device(device))
            if symmetric.rendezvous(buffer, name).multicast_ptr:
                raise RuntimeError("multicast is on")
            found["two_shot"] = lambda: follow(symm.two_shot_all_reduce_(buffer.copy_(local()), "sum", name))
            if m * n * 2 <= ONE_SHOT_BYTES:
                found["one_shot"] = lambda: follow(symm.one_shot_all_reduce(buffer.copy_(local()), "sum", name))
        return found

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends at least."""
        size = self.rows * (self.k * (1 if self.dtype == "fp8" else 2) if self.collective == "all_gather" else self.n * 2)
        return size * (self.job.world - 1) // self.job.world * (2 if self.collective == "all_reduce" else 1)


def packed_by_torch(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """4-bit weights as torch's product reads them."""
    unsigned = (codes + 8).to(torch.uint8)
    packed = torch.ops.aten._convert_weight_to_int4pack((unsigned[:, ::2] << 4 | unsigned[:, 1::2]).contiguous(), 8)
    pairs = torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).contiguous()
    return packed, pairs


def point_words(name: str, schedule: Schedule) -> str:
    """A candidate with the settings of its point: its own, where its pieces were searched by themselves; those of its kernels,
    where it has no other. What is off or 0 is left out."""

    def on(point: Schedule) -> Schedule:
        return Schedule(tuple((k, v) for k, v in point.knobs if v))

    own = own_of(schedule)
    if own.knobs or BY not in dict(schedule.knobs):
        return labelled(name, on(own))
    return f"{name}: {', '.join(labelled(kernel, on(point)) for kernel, point in chosen_of(schedule))}"


def first(results: Any) -> torch.Tensor:
    return results[0] if isinstance(results, (list, tuple)) else results


def link_gbps(job: Job) -> float:
    """GB/s that a rank sends and receives in a large all-gather."""
    if not job.cuda:
        return 1.0
    size = 256 << 20
    own = torch.empty(size // job.world, dtype=torch.uint8, device=job.device)
    whole = torch.empty(size, dtype=torch.uint8, device=job.device)
    us = job.timed(lambda: dist.all_gather_into_tensor(whole, own), cold=False)
    return size * (job.world - 1) / job.world / us / 1e3


def stressed(job: Job, run: Run, replays: int) -> str:
    """Graphs with delays by rank: how many bytes of results were wrong."""
    rng, wanted = random.Random(job.rank), first(run()).clone()
    bad = torch.zeros((), dtype=torch.int64, device=job.device)

    def calls() -> Any:
        made: list[Any] = []
        for _ in range(3):
            delayed(rng, 1.0)
            made.append(run())
            bad.add_(wrong_bytes(first(made[-1]), wanted))
        return made

    graphs = [captured(calls) for _ in range(VARIANTS)]
    replayed({job.rank: [graph for graph, _ in graphs]}, replays, rng, lambda: False)
    return f"{replays} replays, {int(job.most(float(bad)))} wrong bytes"


def cases(layers: Sequence[str], dtypes: Sequence[str], rows: Sequence[int], world: int) -> list[tuple[str, str, int, str]]:
    """Layer, type, rows and operation between ranks of each."""
    found: list[tuple[str, str, int, str]] = []
    for dtype in dtypes:
        for layer in layers:
            for m in rows:
                split = m % world == 0
                kinds = (
                    ["all_gather"] * split if LAYERS[layer][0] == "all_gather" else ["all_reduce", *["reduce_scatter"] * split]
                )
                found += [(layer, dtype, m, kind) for kind in kinds]
    return found


@click.command()
@click.option("--layers", default=",".join(LAYERS), show_default=True)
@click.option("--dtypes", default="bf16,fp8,w4", show_default=True)
@click.option("--rows", default="1,16,64,512,4096,8192", show_default=True)
@click.option("--budget", default=10.0, show_default=True, help="Seconds for choosing kernels, for each case.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--seconds", default=540.0, show_default=True, help="After which no further case is begun.")
@click.option("--replays", default=0, show_default=True, help="Of graphs with delays, of each case of up to 64 rows.")
@click.option("--points", is_flag=True, help="Say of each point that was tried what it took, or why not.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Where all times go.")
@click.option("--tiny", is_flag=True, help="Small shapes on a CPU.")
def main(
    layers: str,
    dtypes: str,
    rows: str,
    budget: float,
    rounds: int,
    seconds: float,
    replays: int,
    points: bool,
    file: Path | None,
    tiny: bool,
) -> None:
    """Time each case; see the head of this file."""
    job = Job.started(rounds, tiny)
    began, table, rate = time.perf_counter(), list[dict[str, Any]](), link_gbps(job)
    shrink = 32 if tiny else 1
    for name, dtype, m, collective in cases(layers.split(","), dtypes.split(","), [int(r) for r in rows.split(",")], job.world):
        if job.most(time.perf_counter() - began) > seconds:
            break
        n, k = LAYERS[name][1] // shrink, LAYERS[name][2] // shrink
        n, k = (n // job.world, k) if collective == "all_gather" else (n, k // job.world)
        row: dict[str, Any] = {"layer": name, "dtype": dtype, "rows": m, "collective": collective}
        layer = Layer(job, name, dtype, m, collective, n, k)
        run = job.together(lambda layer=layer: layer.ours(budget))
        ways = job.together(lambda layer=layer: layer.ways(budget))
        if run is None or ways is None:
            continue
        right = first(run()).float()
        row["kernels"], row["points"], row["us"] = layer.kernels, layer.points, {"ours": job.timed(run)}
        row["off"] = {}
        for way, op in ways.items():
            got = job.together(op)
            if got is not None:
                row["us"][way] = job.timed(op)
                off = (first(got).float() - right).norm() / right.norm()
                row["off"][way] = job.most(float(off))
        row["product"], row["link"] = job.timed(layer.alone), layer.sent_bytes / rate / 1e3
        row["limit"] = max(row["product"], row["link"])
        if replays and m <= TAIL_ROWS and job.cuda:
            row["stress"] = stressed(job, run, replays)
        table.append(row)
        if job.rank == 0:
            best = min(us for way, us in row["us"].items() if way != "ours")
            times = "  ".join(f"{way} {us:.1f}" for way, us in row["us"].items())
            worst = max(row["off"].values())
            click.echo(
                f"{name:8}{dtype:5}{m:5} {collective:15} {times}  limit {row['limit']:.1f}  best/ours "
                f"{best / row['us']['ours']:.2f}  off {worst:.2g}  {'+'.join(layer.kernels)}  {row.get('stress', '')}"
            )
            for line in layer.points if points else ():
                click.echo(f"    {line[:WIDTH]}")
    if job.rank == 0 and file is not None:
        file.write_text(json.dumps({"link_gbps": rate, "world": job.world, "rows": table}, indent=1))
    job.ended()


if __name__ == "__main__":
    main()
