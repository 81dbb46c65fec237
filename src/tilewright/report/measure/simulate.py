"""A program's form for one rank, run on every rank of a simulated mesh and held against the whole program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch

from tilewright.errors import InputError, TypeMismatchError, counted
from tilewright.hardware.load import uncrowded
from tilewright.ir.evaluate import evaluate, evaluate_mesh
from tilewright.ir.graph import Graph, Node, label_of
from tilewright.ir.mesh import Mesh, Placement, split_feeds
from tilewright.ir.ops import Input, Place
from tilewright.ir.pattern import Trace
from tilewright.ir.state import caller_inputs
from tilewright.report.measure.compare import Tolerances
from tilewright.report.measure.inputs import Feed
from tilewright.report.measure.traffic import operation_words
from tilewright.report.measure.verify import output_comparison
from tilewright.report.schema import Comparison, OnMesh, Traffic, Verify
from tilewright.rules.collective import collectives, why_outside
from tilewright.rules.shard import PLANNED, localise, plan_for


def whole_program(graph: Graph, mesh: Mesh | None) -> Graph:
    """The program that a mesh is to run: placed by the program itself or, where it places nothing, by `plan_for`. The program
    of one rank as it is.

    Raises:
        InputError: there is no mesh, or one rank's program is for another one.
    """
    mesh = mesh or graph.mesh
    if mesh is None:
        raise InputError("no mesh to simulate", where=graph.name, hint="--mesh tp=8")
    if graph.local:
        if graph.mesh != mesh:
            raise InputError(f"the program of one rank is for {graph.mesh}, not {mesh}", where="--mesh", hint="leave it out")
        return graph
    graph = replace(graph, mesh=mesh)
    return graph if any(isinstance(n.op, Place) for n in graph.nodes()) else plan_for(graph)


def whole_inputs(graph: Graph) -> Graph:
    """A graph whose inputs are the tensors that a caller of all ranks gives; of a program over whole tensors itself."""
    if not graph.local:
        return graph
    mesh = cast("Mesh", graph.mesh)
    made: list[Node] = []
    for node, lies in zip(graph.inputs, graph.placements, strict=False):
        shape = (d * mesh.ranks_of(names) for d, names in zip(node.shape, lies.splits, strict=True))
        made.append(Node(Input(label_of(node), node.tensor.with_shape(shape))))
    given = tuple(made[: len(caller_inputs(graph))])
    return Graph(graph.name, given, given, tuple(map(label_of, given)))


@uncrowded()
def verify_on_mesh(
    graph: Graph,
    name: str,
    feeds: Sequence[Feed],
    optimise: Callable[[Graph, Trace], Graph],
    tolerances: Tolerances | None,
    whole: Graph | None,
) -> Verify:
    """Compare what all ranks give together, after the rules, with what the oracle gives for the whole program.

    Args:
        graph: with its mesh: over whole tensors, or one rank's; then the oracle is all ranks' run of it, as it was read,
            unless `whole` is given.
        name: the program, as the report has it.
        feeds: whole inputs.
        optimise: applies the rules.
        tolerances: of the user's.
        whole: the same program over whole tensors, where its source says how one rank's is made of it.
    """
    mesh, trace = cast("Mesh", graph.mesh), Trace()
    given = {f.shown.name: cast("torch.Tensor", f.value) for f in feeds}
    local = graph if graph.local else localise(graph)
    made = optimise(local, trace)
    results = made.placements[len(made.inputs) :]
    if graph.local and whole is None:
        read = _ranks(local, given, float64=True)
        wanted = [p.joined([r[i] for r in read], mesh) for i, p in enumerate(results)]
    else:
        wanted = cast("list[torch.Tensor]", evaluate(whole or graph, given, float64=True))
    ranks = _ranks(made, given, float64=False)
    rows: list[Comparison] = []
    for i, (output, node, lies) in enumerate(zip(graph.output_names, graph.outputs, results, strict=True)):
        try:
            got = lies.joined([r[i] for r in ranks], mesh)
        except TypeMismatchError as error:  # ranks that should hold the same bits do not
            rows.append(Comparison(output, "output", str(node.type), "the whole program", 0.0, 0.0, False, error.what))
        else:
            rows.append(output_comparison(output, node, got, wanted[i], tolerances or Tolerances()))
    outside = why_outside(made, trace)
    travels = [
        Traffic(made.origin(carrier), operation_words(node), size, outside.get(node, ""))
        for node, carrier, size in collectives(made)
    ]
    ends = (*zip(map(label_of, made.inputs), made.placements, strict=False),)
    split = {n: str(p) for n, p in (*ends, *zip(made.output_names, results, strict=True)) if p.names}
    first = next((r for r in rows if not r.ok), None)
    on = OnMesh(str(mesh), mesh.size, split, travels, [n for n in graph.notes if n.startswith(PLANNED)])
    target = f"a simulated mesh of {counted(mesh.size, 'rank')}, {mesh}"
    return Verify(name, target, first is None, first, [], rows, [f.shown for f in feeds], mesh=on)


def _ranks(local: Graph, given: Mapping[str, torch.Tensor], *, float64: bool) -> list[list[torch.Tensor]]:
    """The results of each rank, for whole inputs."""
    mesh = cast("Mesh", local.mesh)
    lies: dict[str, Placement] = dict(zip(map(label_of, local.inputs), local.placements, strict=False))
    found = evaluate_mesh(local, split_feeds(given, lies, mesh), mesh, float64=float64)
    return cast("list[list[torch.Tensor]]", found)
