"""A decoder layer of Llama 3 70B on the GPUs of one host, beside the same layer with NCCL between kernels, in one run.

    torchrun --nproc-per-node 4 benchmarks/decoder_layer_gpus.py [--dtypes w4,fp8] [--rows 16,4096] [--context 1024]
    torchrun --nproc-per-node 2 benchmarks/decoder_layer_gpus.py --tiny      # small shapes on a CPU, with gloo

Tensor parallel as Megatron has it: each rank has its heads and its part of the MLP, and all-reduces follow o and down. Up to 64
rows are as many sequences with one token each, which attend to `--context` cached places (the token's own keys and values are
results); more rows are one sequence. fp8: rows are quantised before each product, by their own scales on each rank where K is
split. w4: groups of 64.

"ours" is the layer as `tilewright.compile` makes it on the mesh in `--budget` seconds. "nccl" is three programs of one rank,
up to the first sum, from there to the second one, and the rest, compiled in as many seconds, with the library's all-reduce
between them, so that kernels beside those of the sums are the same. "local" is these three with nothing between them. Times are
µs of a CUDA graph of the slowest rank, the median over rounds, weights out of the L2 cache; "limit" is the larger of "local"
and the bytes that a rank sends over the link's rate, measured first. "off" is the difference of both results by norm. The goal
is that nccl/ours be 1.3 up to 64 rows, and 1.15 above. NVLink multicast is off. --json FILE has all of it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

# Before anything communicates: multicast can put shared GPUs out of service.
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

import click
import torch
import torch.distributed as dist

import tilewright
from several_gpus import Job, Run, first, link_gbps
from tilewright.dtype import BF16, F8E4M3FN, F32
from tilewright.ir.build import broadcast, concat, const, convert, input_, map_, reduce_, reshape, slice_, transpose
from tilewright.ir.graph import Graph, Node, label_of, substitute
from tilewright.ir.mesh import Mesh, Placement
from tilewright.ir.notation import parse
from tilewright.ir.ops import AllReduce, Attention, LayerNorm, Quantize
from tilewright.on_mesh import MeshProgram

FEW = 64  # rows up to which each is a sequence of its own
GOALS = {True: 1.3, False: 1.15}  # of nccl/ours, up to so many rows and above
GROUP = 64  # codes of 4 bits along K that share a scale
EPSILON = 1e-5
BASE = 500_000.0  # of the rotation's angles


@dataclass(frozen=True)
class Sizes:
    """A layer: width, query heads and those of keys and values, the width of a head, and of the MLP."""

    width: int
    heads: int
    shared: int
    head: int
    hidden: int


LLAMA_3_70B, TINY = Sizes(8192, 64, 8, 128, 28672), Sizes(256, 8, 4, 32, 1024)


@dataclass
class Layer:
    """One rank's part of a layer, with its weights.

    Attributes:
        job, sizes, dtype, rows, context: which one.
    """

    job: Job
    sizes: Sizes
    dtype: str
    rows: int
    context: int

    @cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator(self.job.device).manual_seed(11 + self.job.rank)  # a CPU with one thread for it takes seconds

    @property
    def decodes(self) -> bool:
        return self.rows <= FEW

    @property
    def own(self) -> tuple[int, int, int]:
        """The query heads of this rank, its heads of keys and values, and columns of the MLP."""
        s, t = self.sizes, self.job.world
        return s.heads // t, s.shared // t, s.hidden // t

    @cached_property
    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """Operands `b` and `b_scale` of each product's line of the notation."""
        (heads, shared, hidden), s = self.own, self.sizes
        shapes = {"qkv": ((heads + 2 * shared) * s.head, s.width), "o": (s.width, heads * s.head)}
        shapes |= {"gate": (hidden, s.width), "up": (hidden, s.width), "down": (s.width, hidden)}
        return {name: self._weight(n, k, self.job.world if name in ("o", "down") else 1) for name, (n, k) in shapes.items()}

    def _weight(self, n: int, k: int, ranks: int) -> dict[str, torch.Tensor]:
        w = torch.randn(n, k, generator=self.generator, device=self.job.device) / math.sqrt(k * ranks)
        return {name: t.cpu() for name, t in self._as_stored(w).items()}

    def _as_stored(self, w: torch.Tensor) -> dict[str, torch.Tensor]:
        n, k = w.shape
        if self.dtype == "fp8":
            scale = w.abs().amax(1, keepdim=True) / 448.0
            return {"b": (w / scale).to(torch.float8_e4m3fn), "b_scale": scale}
        if self.dtype == "w4":
            groups = w.reshape(n, -1, GROUP)
            scale = (groups.abs().amax(-1, keepdim=True) / 7.0).bfloat16()
            codes = (groups / scale.float()).round().clamp(-8, 7)
            return {"b": codes.reshape(n, k).to(torch.int8), "b_scale": scale.squeeze(-1)}
        return {"b": w.bfloat16()}

    def product(self, x: Node, name: str) -> Node:
        """x in bf16 by a weight, in bf16; the rows are quantised before it where it is of fp8."""
        (m, k), given = x.shape, self.weights[name]
        n = given["b"].shape[0]
        line = {
            "bf16": f"bf16[{m},{k}] @ bf16[{n},{k}]^T -> bf16",
            "fp8": f"f8e4m3fn[{m},{k}] scale=channel @ f8e4m3fn[{n},{k}]^T scale=channel -> bf16",
            "w4": f"bf16[{m},{k}] @ s4[{n},{k}]^T group={GROUP} -> bf16",
        }[self.dtype]
        whole = parse(line)
        operands = {"a": x}
        if self.dtype == "fp8":
            wide = convert(x, F32)
            scale = map_("divide", reduce_("maximum", map_("abs", wide), (1,), True), const(448.0, F32))
            operands = {"a": Node(Quantize(F8E4M3FN), wide, scale), "a_scale": scale}
        stand_in: dict[Node, Node] = {}
        for leaf in whole.inputs:
            label = label_of(leaf)
            if label in given:
                stand_in[leaf] = const(given[label].reshape(leaf.shape).to(leaf.dtype.to_torch()), leaf.dtype)
            else:
                stand_in[leaf] = reshape(operands[label], leaf.shape)
        return substitute(whole.outputs, stand_in)[0]

    def norm(self, x: Node) -> Node:
        return convert(Node(LayerNorm(1, EPSILON, False), convert(x, F32), self.gain), BF16)

    @cached_property
    def gain(self) -> Node:
        return const(torch.rand(self.sizes.width, generator=torch.Generator().manual_seed(5)) + 0.5)

    @cached_property
    def angles(self) -> tuple[Node, Node]:
        """Cosine and sine of each place's rotation."""
        head = self.sizes.head
        at = torch.full((1,), float(self.context)) if self.decodes else torch.arange(self.rows, dtype=torch.float32)
        angles = (at[:, None] / BASE ** (torch.arange(0, head, 2) / head)).repeat(1, 2)
        return const(angles.cos().bfloat16()), const(angles.sin().bfloat16())

    def rotated(self, x: Node) -> Node:
        half = self.sizes.head // 2
        cos, sin = (broadcast(reshape(t, (1, 1, *t.shape)), x.shape) for t in self.angles)
        turned = concat([map_("negate", slice_(x, 3, half, 2 * half)), slice_(x, 3, 0, half)], 3)
        return map_("add", map_("multiply", x, cos), map_("multiply", turned, sin))

    def before(self, x: Node, caches: Sequence[Node]) -> list[Node]:
        """Give this rank's part of o's sums, and the keys and values of these rows."""
        (heads, shared, _), head, m = self.own, self.sizes.head, self.rows
        joined = self.product(self.norm(x), "qkv")
        cuts = [0, heads * head, (heads + shared) * head, (heads + 2 * shared) * head]
        each = [slice_(joined, 1, a, b) for a, b in pairwise(cuts)]
        shape = (m, 1) if self.decodes else (1, m)
        q, k, v = (transpose(reshape(t, (*shape, t.shape[1] // head, head)), (0, 2, 1, 3)) for t in each)
        q, k = self.rotated(q), self.rotated(k)
        keys, values = caches if self.decodes else (k, v)
        a = Node(Attention(1 / math.sqrt(head), "no" if self.decodes else "upper"), q, keys, values)
        return [self.product(reshape(transpose(a, (0, 2, 1, 3)), (m, heads * head)), "o"), k, v]

    def between(self, total: Node, x: Node) -> list[Node]:
        """Give the residual stream behind o, and this rank's part of down's sums."""
        h = map_("add", total, x)
        n = self.norm(h)
        gated = map_("multiply", map_("silu", self.product(n, "gate")), self.product(n, "up"))
        return [h, self.product(gated, "down")]

    def inputs(self) -> list[Node]:
        """The residual stream, and the caches where it decodes."""
        x = input_("x", BF16, (self.rows, self.sizes.width))
        cache = (self.rows, self.own[1], self.context, self.sizes.head)
        return [x, *(input_(name, BF16, cache) for name in ("keys", "values") if self.decodes)]

    @cached_property
    def values(self) -> list[torch.Tensor]:
        """The inputs' values: the residual stream the same on all ranks."""
        common = torch.Generator(self.job.device).manual_seed(3)

        def drawn(n: Node) -> torch.Tensor:
            generator = common if label_of(n) == "x" else self.generator
            return torch.randn(n.shape, generator=generator, device=self.job.device).bfloat16()

        return [drawn(n) for n in self.inputs()]

    def whole(self) -> Graph:
        """One rank's program."""
        how: Any = {"over": ("tp",), "sizes": (self.job.world,)}
        x, *caches = self.inputs()
        o, k, v = self.before(x, caches)
        h, down = self.between(Node(AllReduce(**how), o), x)
        y = map_("add", Node(AllReduce(**how), down), h)
        rows, heads = Placement.whole(2), Placement(((), ("tp",), (), ()))
        graph = Graph("layer", (x, *caches), (y, k, v), ("y", "k", "v"))
        placements = (rows, *[heads] * len(caches), rows, heads, heads)
        return replace(graph, mesh=Mesh((("tp", self.job.world),)), placements=placements)

    def apart(self) -> list[Graph]:
        """Three programs of one rank, between which all-reduces stand."""
        x, *caches = self.inputs()
        o, k, v = self.before(x, caches)
        total, h = (input_(name, BF16, x.shape) for name in ("total", "h"))
        stream, down = self.between(total, x)
        return [
            Graph("before", (x, *caches), (o, k, v), ("o", "k", "v")),
            Graph("between", (total, x), (stream, down), ("h", "down")),
            Graph("behind", (total, h), (map_("add", total, h),), ("y",)),
        ]

    def sent_bytes(self) -> int:
        """Bytes that a rank sends at least."""
        return 2 * 2 * (self.rows * self.sizes.width * 2) * (self.job.world - 1) // self.job.world

    def ours(self, budget: float) -> tuple[Run, list[str]]:
        job = self.job
        made = cast("MeshProgram", tilewright.compile(self.whole(), mesh=f"tp={job.world}", budget_s=budget, device=job.device))
        given = self.values
        return lambda: made.run(given), [s.decision.kernel.candidate for s in made.steps if s.decision is not None]

    def theirs(self, budget: float) -> tuple[Run, Run, list[str]]:
        """The three programs with the library's all-reduces between them, and with nothing."""
        programs = [tilewright.compile(g, budget_s=budget / 3, device=self.job.device) for g in self.apart()]
        before, between, behind = programs
        given = self.values

        def run(reduce: bool) -> Any:
            o, k, v = before.run(given)
            if reduce:
                dist.all_reduce(cast("torch.Tensor", o))
            h, down = between.run([cast("torch.Tensor", o), given[0]])
            if reduce:
                dist.all_reduce(cast("torch.Tensor", down))
            return [*behind.run([cast("torch.Tensor", down), cast("torch.Tensor", h)]), k, v]

        kernels = [s.decision.kernel.candidate for p in programs for s in p.steps if s.decision is not None]
        return lambda: run(True), lambda: run(False), kernels


def measured(layer: Layer, rate: float, budget: float) -> dict[str, Any] | None:
    """A layer's times in µs; None where something fails on a rank."""
    job = layer.job
    ours, theirs = job.together(lambda: layer.ours(budget)), job.together(lambda: layer.theirs(budget))
    if ours is None or theirs is None:
        return None
    run, kernels = ours
    nccl, local, their_kernels = theirs
    wanted, found = first(nccl()).float(), first(run()).float()
    off = job.most(float((found - wanted).norm() / wanted.norm()))
    row: dict[str, Any] = {
        "dtype": layer.dtype,
        "rows": layer.rows,
        "off": off,
        "kernels": kernels,
        "their_kernels": their_kernels,
    }
    row |= {"ours": job.timed(run), "nccl": job.timed(nccl), "local": job.timed(local)}
    row["link"] = layer.sent_bytes() / rate / 1e3
    row["limit"] = max(row["local"], row["link"])
    return row | {"ratio": row["nccl"] / row["ours"], "goal": GOALS[layer.decodes]}


@click.command()
@click.option("--dtypes", default="w4,fp8", show_default=True, help="Of w4, fp8 and bf16.")
@click.option("--rows", default="16,4096", show_default=True)
@click.option("--context", default=1024, show_default=True, help="Cached places, where each row is a sequence.")
@click.option("--budget", default=30.0, show_default=True, help="Seconds for choosing kernels, for each program and way.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--seconds", default=540.0, show_default=True, help="After which no further layer is begun.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Where all times go.")
@click.option("--tiny", is_flag=True, help="Small shapes on a CPU.")
def main(
    dtypes: str, rows: str, context: int, budget: float, rounds: int, seconds: float, file: Path | None, tiny: bool
) -> None:
    """Time each layer; see the head of this file."""
    began, job, table = time.perf_counter(), Job.started(rounds, tiny), list[dict[str, Any]]()
    rate = link_gbps(job)
    for m in map(int, rows.split(",")):
        for dtype in dtypes.split(","):
            if job.most(time.perf_counter() - began) > seconds:
                break
            row = measured(Layer(job, TINY if tiny else LLAMA_3_70B, dtype, m, context), rate, budget)
            if row is None:
                continue
            table.append(row)
            if job.rank == 0:
                times = "  ".join(f"{name} {row[name]:.1f}" for name in ("ours", "nccl", "local", "link", "limit"))
                click.echo(
                    f"{dtype:5}{m:5} rows on {job.world}  {times}  nccl/ours {row['ratio']:.2f} (goal {row['goal']})  "
                    f"ours/limit {row['ours'] / row['limit']:.2f}  off {row['off']:.2g}  {'+'.join(row['kernels'])}"
                )
    if job.rank == 0 and file is not None:
        file.write_text(json.dumps({"link_gbps": rate, "world": job.world, "rows": table}, indent=1))
    job.ended()


if __name__ == "__main__":
    main()
