"""A gated MLP on the ranks of a job, beside torch with the same all-reduce: the plain way, in turns.

    torchrun --nproc-per-node 2 benchmarks/several_ranks.py

Both have their parts of the weights as constants, split as Megatron does. A time is the slowest rank's, the median over rounds.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import cast

import click
import torch
import torch.distributed as dist
from torch.nn.functional import silu

import tilewright
from tilewright.dtype import F32
from tilewright.ir.build import const, input_, map_
from tilewright.ir.graph import Graph, Node
from tilewright.ir.mesh import Mesh
from tilewright.ir.ops import Place, gemm
from tilewright.on_mesh import MeshProgram
from tilewright.runtime.agreement import times_us

SHAPES = ((1, 1024, 2816), (16, 1024, 2816), (128, 1024, 2816), (512, 1024, 2816))  # rows, width, hidden


def program(rows: int, width: int, hidden: int, weights: list[torch.Tensor], mesh: Mesh) -> Graph:
    """The MLP over whole tensors, its weights placed."""
    x = input_("x", F32, (rows, width))
    columns, lines = ((), ("tp",)), (("tp",), ())
    gate, up, down = (Node(Place(s), const(w)) for s, w in zip((columns, columns, lines), weights, strict=True))
    y = map_("add", gemm(map_("multiply", map_("silu", gemm(x, gate)), gemm(x, up)), down), x)
    return replace(Graph("mlp", (x,), (y,), ("y",)), mesh=mesh)


def plain(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The same by torch: this rank's products, and an all-reduce behind them."""
    y = (silu(x @ gate) * (x @ up)) @ down
    dist.all_reduce(y)
    return y + x


def beside(rows: int, width: int, hidden: int, budget: float, rounds: int) -> str:
    """Both, in turns; a line for people."""
    mesh, rank = Mesh((("tp", dist.get_world_size()),)), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    sizes = ((width, hidden), (width, hidden), (hidden, width))
    weights = [torch.randn(s, generator=generator) / s[0] ** 0.5 for s in sizes]
    x = torch.randn(rows, width, generator=generator)
    made = tilewright.compile(program(rows, width, hidden, weights, mesh), mesh=str(mesh), budget_s=budget)
    ours = cast("MeshProgram", made)
    parts = [w.chunk(mesh.size, axis)[rank].contiguous() for w, axis in zip(weights, (1, 1, 0), strict=True)]
    torch.testing.assert_close(ours(x), plain(x, *parts), rtol=1e-3, atol=1e-3)
    us: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for taken, run in zip(us, (lambda: ours.run([x]), lambda: plain(x, *parts)), strict=True):
            taken += [t for t, _ in times_us(ours.team, run, "cpu", calls=1)]
    ratio = statistics.median(theirs / own for own, theirs in zip(*us, strict=True))
    own, theirs = map(statistics.median, us)
    return f"{rows:5} x {width} x {hidden} on {mesh}: {own:9.1f} µs, torch {theirs:9.1f} µs, {ratio:.2f} times"


@click.command()
@click.option("--budget", default=20.0, show_default=True, help="Seconds for choosing kernels, for each shape.")
@click.option("--rounds", default=40, show_default=True)
def main(budget: float, rounds: int) -> None:
    """Compile each shape on all ranks, and time it beside torch."""
    dist.init_process_group("gloo")
    for rows, width, hidden in SHAPES:
        with torch.no_grad():
            line = beside(rows, width, hidden, budget, rounds)
        if dist.get_rank() == 0:
            click.echo(line)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
