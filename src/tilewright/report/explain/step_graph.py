"""A compiled program as a graph of its steps: which step reads which, and the same with repeated layers folded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewright.ir.graph import Node, label_of
from tilewright.ir.ops import Input, Item, maker_of
from tilewright.report.explain.names import step_names
from tilewright.report.schema import Repeat
from tilewright.runtime.executable import Executable


@dataclass(frozen=True)
class StepGraph:
    """Steps, and which of them reads what.

    Attributes:
        names: of each step, in the model.
        reads: for each step but views, which are looked through, the steps whose values it reads.
        inputs: for each input of the program that is read, its name and the steps that read it.
        results: for each result of the program that a step makes, its name and this step.
        operations: of the program as it was read, without those that depend on constants alone; 0 if it is not known.
    """

    names: list[str]
    reads: dict[int, tuple[int, ...]]
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    results: tuple[tuple[str, int], ...]
    operations: int = 0


@dataclass(frozen=True)
class FoldedGraph:
    """The graph of steps with each place in repeated layers as one box.

    Attributes:
        boxes: the steps that each box stands for, in the order of the program.
        reads: pairs of boxes, the one that is read first. What a layer reads of those before it is left out.
        runs: for each run of layers the boxes in it.
        box_of: the box of each step.
    """

    boxes: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[int, int], ...]
    runs: tuple[tuple[int, ...], ...]
    box_of: dict[int, int]


def step_graph(program: Executable) -> StepGraph:
    """The graph of a program's steps. Values that depend on constants alone are none of its edges."""
    makers: dict[Node, int | tuple[Node, ...]] = {}  # the step that makes a value, or what a view looks at
    reads: dict[int, tuple[int, ...]] = {}
    readers: dict[Node, list[int]] = {}

    def sources(values: Iterable[Node]) -> dict[Node | int, None]:
        """The steps and inputs of the program that values come from."""
        found: dict[Node | int, None] = {}
        for value in values:
            made = makers.get(value, makers.get(maker_of(value)))
            if isinstance(made, int):
                found[made] = None
            elif made is not None:
                found |= sources(made)
            elif isinstance(value.op, Input):
                found[value] = None
        return found

    for i, step in enumerate(program.steps):
        if step.part.kind == "view":
            makers.update(dict.fromkeys(step.part.outputs, step.part.inputs))
            continue
        read = sources(step.part.inputs)
        reads[i] = tuple(s for s in read if isinstance(s, int))
        for source in read:
            if not isinstance(source, int):
                readers.setdefault(source, []).append(i)
        makers.update(dict.fromkeys(step.part.outputs, i))
    graph = program.graph
    results = [
        (name, source)
        for name, node in zip(graph.output_names, graph.outputs, strict=True)
        for source in sources([node])
        if isinstance(source, int)
    ]
    inputs = [(label_of(n), tuple(readers[n])) for n in graph.inputs if n in readers]
    operations = sum(not n.constant and not isinstance(n.op, Input | Item) for n in program.source.nodes())
    return StepGraph(step_names(program), reads, tuple(inputs), tuple(results), operations)


def folded(graph: StepGraph, layers: Sequence[Repeat]) -> FoldedGraph:
    """The graph with each run of layers as one."""
    listed = list(graph.reads)
    place: dict[int, tuple[int, int, int]] = {}  # of a step: the run, the layer in it, the place in the layer
    for number, run in enumerate(layers):
        begin = listed.index(run.first)
        for j, step in enumerate(listed[begin : begin + run.count * run.length]):
            place[step] = number, j // run.length, j % run.length
    boxes: list[list[int]] = []
    box_of: dict[int, int] = {}
    known: dict[tuple[int, int], int] = {}
    for step in listed:
        at = place.get(step)
        box_of[step] = len(boxes) if at is None else known.setdefault((at[0], at[2]), len(boxes))
        if box_of[step] == len(boxes):
            boxes.append([])
        boxes[box_of[step]].append(step)
    edges: dict[tuple[int, int], None] = {}
    for step, read in graph.reads.items():
        run, layer, _ = place.get(step, (-1, 0, 0))
        for source in read:
            other_run, other_layer, _ = place.get(source, (-1, 0, 0))
            if run < 0 or run != other_run or layer == other_layer:
                edges[box_of[source], box_of[step]] = None
    runs = [tuple(known[number, j] for j in range(run.length)) for number, run in enumerate(layers)]
    return FoldedGraph(tuple(map(tuple, boxes)), tuple(edges), tuple(runs), box_of)
