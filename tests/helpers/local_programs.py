"""Programs of whole tensors with their forms for one rank, written by hand: what ranks must compute together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.dtype import BF16, F32, S8, DType
from tilewright.ir.build import broadcast, const, convert, input_, map_
from tilewright.ir.graph import Graph, Node, label_of
from tilewright.ir.mesh import Mesh, Placement
from tilewright.ir.ops import Acc, AllGather, AllReduce, AllToAll, Dequantize, Gemm, Own, Param, ReduceScatter, gemm
from tilewright.ir.types import TensorType
from tilewright.schedule.sample import random_tensor

ROWS = Placement((("tp",), ()))
COLUMNS = Placement(((), ("tp",)))


@dataclass(frozen=True)
class Case:
    """A program of whole tensors, that of one rank, how inputs and results lie, and how far off a result may be."""

    mesh: Mesh
    whole: Graph
    local: Graph
    placements: dict[str, Placement]
    within: float = 2e-4

    def feeds(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {label_of(n): random_tensor(n.tensor, generator) for n in self.whole.inputs}


def case(name: str, mesh: Mesh) -> Case:
    """A program of `PROGRAMS` on a mesh that has an axis tp; its other axes hold copies."""
    found = PROGRAMS[name](mesh)
    sides = [*map(label_of, found.local.inputs), *found.local.output_names]
    nodes = (*found.local.inputs, *found.local.outputs)
    lie = tuple(found.placements.get(s, Placement.whole(n.tensor.rank)) for s, n in zip(sides, nodes, strict=True))
    return replace(found, local=replace(found.local, mesh=mesh, placements=lie))


def over(mesh: Mesh) -> dict[str, Any]:
    return {"over": ("tp",), "sizes": (mesh.ranks_of(["tp"]),)}


def part(n: Node, placement: Placement, mesh: Mesh) -> Node:
    return input_(label_of(n), n.dtype, placement.local_shape(n.shape, mesh))


def param(i: int, n: Node) -> Node:
    return Node(Param(i, n.tensor))


def acc(dtype: DType, *shape: int) -> Node:
    return Node(Acc(TensorType(dtype, shape)))


def megatron(mesh: Mesh) -> Case:
    """Columns, then rows of the weights; an all-reduce, and a residual behind it."""
    x, w, v, r = (input_(n, F32, s) for n, s in (("x", (64, 96)), ("w", (96, 128)), ("v", (128, 96)), ("r", (64, 96))))
    whole = Graph("megatron", (x, w, v, r), (map_("add", gemm(map_("tanh", gemm(x, w)), v), r),), ("y",))
    lies = {"w": COLUMNS, "v": ROWS}
    w, v = part(w, COLUMNS, mesh), part(v, ROWS, mesh)
    y = map_("add", Node(AllReduce(**over(mesh)), gemm(map_("tanh", gemm(x, w)), v)), r)
    return Case(mesh, whole, Graph("megatron", (x, w, v, r), (y,), ("y",)), lies)


def row_parallel(mesh: Mesh) -> Case:
    """Rows of a weight, and nothing behind the sum of what ranks have."""
    x, w = input_("x", F32, (64, 96)), input_("w", F32, (96, 40))
    whole = Graph("row_parallel", (x, w), (gemm(x, w),), ("y",))
    x, w = part(x, COLUMNS, mesh), part(w, ROWS, mesh)
    y = Node(AllReduce(**over(mesh)), gemm(x, w))
    return Case(mesh, whole, Graph("row_parallel", (x, w), (y,), ("y",)), {"x": COLUMNS, "w": ROWS})


def sequence_parallel(mesh: Mesh) -> Case:
    """The same with rows split between the products: gathered by the first gemm, scattered by the second one's store."""
    whole, how, tp = megatron(mesh).whole, over(mesh), mesh.ranks_of(["tp"])
    lies = {"x": ROWS, "w": COLUMNS, "v": ROWS, "r": ROWS, "y": ROWS}
    x, w, v, r = (part(n, lies[label_of(n)], mesh) for n in whole.inputs)
    first = Node(Gemm(F32, Node(AllGather(**how), param(0, x)), param(1, w), (map_("tanh", acc(F32, 64, 128 // tp)),)), x, w)
    store = map_("add", Node(ReduceScatter(**how), acc(F32, 64, 96)), param(2, r))
    y = Node(Gemm(F32, param(0, first), param(1, v), (store,)), first, v, r)
    return Case(mesh, whole, Graph("sequence_parallel", (x, w, v, r), (y,), ("y",)), lies)


def codes_travel(mesh: Mesh) -> Case:
    """Rows of codes and their scales are gathered, and dequantised behind that: narrow values travel."""
    x, s, w = input_("x", S8, (32, 64)), input_("s", F32, (32, 1)), input_("w", F32, (64, 48))
    whole = Graph("codes", (x, s, w), (gemm(Node(Dequantize(F32), x, s), w),), ("y",))
    how, lies = over(mesh), {"x": ROWS, "s": ROWS, "w": COLUMNS, "y": COLUMNS}
    x, s, w = (part(n, lies[label_of(n)], mesh) for n in whole.inputs)
    lhs = Node(Dequantize(F32), Node(AllGather(**how), param(0, x)), Node(AllGather(**how), param(1, s)))
    store = acc(F32, 32, 48 // mesh.ranks_of(["tp"]))
    y = Node(Gemm(F32, lhs, param(2, w), (store,)), x, s, w)
    return Case(mesh, whole, Graph("codes", (x, s, w), (y,), ("y",)), lies, within=0.05)  # of numbers up to 2,000


def integers(mesh: Mesh) -> Case:
    """Sums of codes, exactly, of which each rank keeps its rows; rows of another product become columns, as experts' do."""
    x, z, w = (input_(n, S8, s) for n, s in (("x", (16, 64)), ("z", (16, 64)), ("w", (64, 24))))
    whole = Graph("integers", (x, z, w), (gemm(x, w), gemm(z, w)), ("sums", "turned"))
    how, lies = over(mesh), {"x": COLUMNS, "z": ROWS, "sums": ROWS, "turned": COLUMNS}
    x, z = part(x, COLUMNS, mesh), part(z, ROWS, mesh)
    sums = Node(Own(**how), Node(AllReduce(**how), gemm(x, Node(Own(**how), w))))
    turned = Node(AllToAll(**how, split=1, join=0), gemm(z, w))
    return Case(mesh, whole, Graph("integers", (x, z, w), (sums, turned), ("sums", "turned")), lies, within=0)


def bf16_wire(mesh: Mesh) -> Case:
    """Partial sums travel in bf16, and are gathered again within the same store."""
    x, w = input_("x", BF16, (16, 256)), input_("w", BF16, (256, 40))
    sums = gemm(x, w)
    whole = Graph("wire", (x, w), (map_("add", sums, sums),), ("y",))
    how, lies = over(mesh), {"x": COLUMNS, "w": ROWS}
    x, w = part(x, COLUMNS, mesh), part(w, ROWS, mesh)
    scattered = Node(ReduceScatter(**how, axis=1), convert(acc(F32, 16, 40), BF16))
    store = convert(Node(AllGather(**how, axis=1), map_("add", scattered, scattered)), F32)
    y = Node(Gemm(F32, param(0, x), param(1, w), (store,)), x, w)
    return Case(mesh, whole, Graph("wire", (x, w), (y,), ("y",)), lies, within=1.0)  # of numbers up to 120


def constants(mesh: Mesh) -> Case:
    """Each rank packs its own rows of a constant weight, once."""
    x, w, b = (
        input_("x", F32, (8, 128)),
        const(torch.randn(128, 48, generator=torch.Generator().manual_seed(5))),
        const(torch.ones(48)),
    )
    whole = Graph("constants", (x,), (map_("add", gemm(x, w), broadcast(b, (8, 48))),), ("y",))
    how = over(mesh)
    x = part(x, COLUMNS, mesh)
    y = map_("add", Node(AllReduce(**how), gemm(x, Node(Own(**how), w))), broadcast(b, (8, 48)))
    return Case(mesh, whole, Graph("constants", (x,), (y,), ("y",)), {"x": COLUMNS})


PROGRAMS: dict[str, Callable[[Mesh], Case]] = {
    "megatron": megatron,
    "row parallel": row_parallel,
    "sequence parallel": sequence_parallel,
    "codes travel": codes_travel,
    "integers": integers,
    "bf16 wire": bf16_wire,
    "constants": constants,
}
