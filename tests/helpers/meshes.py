"""Programs on meshes: placed values, and the ranks of a local program run together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import hypothesis.strategies as st
import torch
from random_programs import programs

from tilewright.dtype import F32
from tilewright.ir.evaluate import evaluate_mesh
from tilewright.ir.graph import Graph, Node, label_of
from tilewright.ir.mesh import Mesh, Placement, split_feeds
from tilewright.ir.ops import AllReduce, Collective, Convert, Input, Place, Quantize, ReduceScatter

MESHES = ["tp=2", "tp=2", "tp=4", "tp=3", "dp=2,tp=2", "dp=2,tp=3", "tp=1"]


def placed(x: Node, *splits: str, partial: str = "") -> Node:
    """A value and the mesh axes that split each of its axes: "" for none, "dp*tp" for two."""
    return Node(Place(tuple(tuple(s.split("*")) if s else () for s in splits), tuple(partial.split())), x)


def run(local: Graph, feeds: Mapping[str, torch.Tensor], *, float64: bool = True) -> list[torch.Tensor]:
    """Run a local program on all ranks, for whole inputs, and join their results."""
    assert local.mesh is not None
    lies = dict(zip(map(label_of, local.inputs), local.placements, strict=False))
    ranks = evaluate_mesh(local, split_feeds(feeds, lies, local.mesh), local.mesh, float64=float64)
    left = local.placements[len(local.inputs) :]
    return [p.joined([r[i] for r in ranks], local.mesh) for i, p in enumerate(left)]


def collectives(graph: Graph) -> list[str]:
    """The operations between ranks that take time."""
    return sorted(n.op.name for n in graph.nodes() if isinstance(n.op, Collective) and n.op.meets)


def on(mesh: str, *outputs: Node) -> Graph:
    """The program that computes these, on a mesh."""
    whole = Graph("g", (), outputs, tuple(f"y{i}" for i in range(len(outputs))))
    return replace(whole, inputs=tuple(n for n in whole.nodes() if isinstance(n.op, Input)), mesh=Mesh.parse(mesh))


@st.composite
def placements(draw, node: Node, mesh: Mesh) -> Placement:
    """A way in which a value may lie, as far as ranks divide it."""
    splits: list[tuple[str, ...]] = [()] * len(node.shape)
    for name in draw(st.permutations([n for n, _ in mesh.axes])):
        fits = [a for a, d in enumerate(node.shape) if d % mesh.ranks_of((*splits[a], name)) == 0]
        axis = draw(st.sampled_from([*fits, *fits, None]))
        if axis is not None:
            splits[axis] = (*splits[axis], name)
    return Placement(tuple(splits))


@st.composite
def placed_programs(draw) -> tuple[Graph, dict[str, torch.Tensor]]:
    """A random program over whole tensors with a mesh and up to eight places, and its inputs; its sums are exact."""
    program, mesh = draw(programs(exact=True)), Mesh.parse(draw(st.sampled_from(MESHES)))
    nodes = [n for n in program.graph.nodes() if n.tensor.elements > 1]
    chosen = draw(st.lists(st.sampled_from(nodes), max_size=8, unique=True)) if nodes else []
    made: dict[Node, Node] = {}
    for node in program.graph.nodes():
        made[node] = node.with_src([made[s] for s in node.src])
        if node in chosen:
            made[node] = Node(Place(draw(placements(node, mesh)).splits), made[node])
    outputs = tuple(made[o] for o in program.graph.outputs)
    return replace(program.graph, outputs=outputs, origins={}, mesh=mesh), program.feeds


def assert_agree(local: Graph, wanted: torch.Tensor, found: torch.Tensor) -> None:
    """A result of all ranks is the wanted one: to the bit, or within the rounding of f32 where ranks add up floats.

    Sums that are rounded to fewer bits, or then jump to other codes, are not compared.
    """
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    sums = {n.dtype for n in local.nodes() if isinstance(n.op, (AllReduce, ReduceScatter)) and n.dtype.is_float}
    jumps = any(isinstance(n.op, (Quantize, Convert)) or getattr(n.op, "fn", "") == "floor" for n in local.nodes())
    if sums and (sums != {F32} or jumps):
        return
    largest = float(wanted.double().abs().nan_to_num(0, 0, 0).max()) if wanted.numel() else 0.0
    rtol = 1e-5 if sums else 0.0
    if found.itemsize == 1 and found.is_floating_point():  # of which torch compares bits alone
        found, wanted = found.float(), wanted.float()
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol * largest, equal_nan=True)
