"""Run a gated MLP on the ranks of a job, and compare it with the same MLP in torch.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

The program is `tensor_parallel.tw`, over whole tensors; its places split the weights over the ranks, as docs/several-devices.md
says. Inputs and results are DTensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import tilewright
from tilewright.on_mesh import MeshProgram, placements_of

SHAPES = {"x": (64, 256), "w_gate": (256, 768), "w_up": (256, 768), "w_down": (768, 256)}


@click.command()
@click.option("--budget", default=5.0, show_default=True, help="Seconds for choosing kernels.")
def main(budget: float) -> None:
    """Compile the program on every rank, call it with DTensors, and compare the result with torch's."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    made = tilewright.compile(Path(__file__).with_suffix(".tw"), mesh=mesh, budget_s=budget)
    program = cast("MeshProgram", made)
    generator = torch.Generator().manual_seed(0)  # the same data on every rank
    whole = {name: torch.randn(shape, generator=generator) / shape[0] ** 0.5 for name, shape in SHAPES.items()}
    lies = {name: placements_of(program.placements[name], program.team.mesh) for name in whole}
    y = program(**{name: distribute_tensor(value, mesh, lies[name]) for name, value in whole.items()})
    assert isinstance(y, DTensor)
    x, gate, up, down = whole.values()
    wanted = x + (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down
    torch.testing.assert_close(y.full_tensor(), wanted, rtol=1e-4, atol=1e-4)
    if dist.get_rank() == 0:
        click.echo(f"{program}\nequal to torch's result on one process; y is {y.placements} on {y.device_mesh}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
