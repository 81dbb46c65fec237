"""A picture of the steps: a box for each with its time, layers drawn once, a curve from each to what reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.report.explain.step_graph import StepGraph, folded
from tilewright.report.html.layered import Box, Gaps, curve, join, lay_out
from tilewright.report.html.template import fill, text_of
from tilewright.report.schema import Repeat, StepGroup
from tilewright.report.words import count, ranged, us

MOST_BOXES = 150
WIDTH, HEIGHT, END = 232.0, 42.0, 24.0  # of a step's box; the height of an input's or result's
NAME = 33  # characters that fit into a box
MOST_ENDS = 4  # inputs, and results, drawn one by one; more stand in one box
RUN = 12.0  # room around the boxes of layers


@dataclass(frozen=True)
class Shown:
    """A box: where it stands, its key, kind and title, the words in it, and how full it is: its part of the longest time."""

    x: float
    y: float
    width: float
    height: float
    key: int
    group: int
    kind: str
    title: str
    head: str
    name: str
    time: str
    part: float


@dataclass(frozen=True)
class End:
    """An input or a result, or several."""

    x: float
    y: float
    width: float
    height: float
    label: str
    title: str


@dataclass(frozen=True)
class Run:
    """The frame around repeated layers."""

    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class Drawing:
    """The picture, placed."""

    title: str
    note: str
    left: float
    width: float
    height: float
    boxes: list[Shown]
    ends: list[End]
    runs: list[Run]
    edges: list[str]
    box_of: dict[int, int]


def draw(
    graph: StepGraph,
    groups: Sequence[StepGroup],
    layers: Sequence[Repeat],
    times: Sequence[float | None],
    title: str = "",
    note: str = "",
) -> Drawing | None:
    """The picture of a program's steps, with repeated layers drawn once; None if it had more than 150 boxes even so.

    Args:
        graph: the steps, and which reads which.
        groups, layers: how they are folded.
        times: of each step, in µs.
        title, note: lines above it.
    """
    graph_folded = folded(graph, layers)
    if len(graph_folded.boxes) > MOST_BOXES:
        return None
    head = 56.0 if title else 8.0
    boxes = [Box(WIDTH, HEIGHT) for _ in graph_folded.boxes]
    for source, reader in graph_folded.reads:
        join(boxes[source], boxes[reader])
    ends: list[tuple[Box, str, str]] = []
    for names, at, is_input in _ends(graph, graph_folded.box_of):
        label = names[0] if len(names) == 1 else count(len(names), "input" if is_input else "result")
        box = Box(min(WIDTH, 7.0 * len(label) + 24), END)
        for i in sorted(at):
            join(*((box, boxes[i]) if is_input else (boxes[i], box)))
        ends.append((box, _cut(label), ", ".join(names)))
    first = [box for box, _, _ in ends if box.readers]
    last = [box for box, _, _ in ends if box.sources]
    everything = [*first, *boxes, *last]
    width, height = lay_out(everything, Gaps(beside=28, below=26, margin=RUN + 12, head=head + RUN + 12), sink=False)
    known = [sum(t for i in steps if (t := times[i])) for steps in graph_folded.boxes]
    most = max(known, default=0.0) or 1.0
    shown = [
        _shown(box, key, ranged(graph.names[i] for i in steps), steps, groups, (spent, most))
        for key, (box, steps, spent) in enumerate(zip(boxes, graph_folded.boxes, known, strict=True))
    ]
    drawn = [End(b.x - b.width / 2, b.y, b.width, b.height, label, names) for b, label, names in ends]
    runs = [_run([boxes[i] for i in inside], repeat) for repeat, inside in zip(layers, graph_folded.runs, strict=True)]
    edges = [curve(box, reader) for box in everything for reader in box.readers]
    box_of = {g: graph_folded.box_of[group.steps[0]] for g, group in enumerate(groups)}
    return Drawing(title, note, 16.0, max(width, 280.0), height, shown, drawn, runs, edges, box_of)


def picture_of_steps(drawing: Drawing) -> str:
    """The drawing as the text of an SVG file of its own, in light or dark as its reader prefers."""
    return fill("graph.svg", g=drawing, linked=False, style=text_of("kinds.css"))


def _ends(graph: StepGraph, box_of: dict[int, int]) -> list[tuple[list[str], set[int], bool]]:
    """The inputs and the results to draw: their names, and the boxes that they belong to; many of a kind together."""
    found: list[tuple[list[str], set[int], bool]] = []
    inputs = [([name], {box_of[s] for s in steps}) for name, steps in graph.inputs]
    results = [([name], {box_of[step]}) for name, step in graph.results]
    for ends, is_input in ((inputs, True), (results, False)):
        if len(ends) > MOST_ENDS:
            ends = [([n for names, _ in ends for n in names], set[int]().union(*(at for _, at in ends)))]
        found += [(names, at, is_input) for names, at in ends]
    return found


def _shown(
    box: Box, key: int, name: str, steps: Sequence[int], groups: Sequence[StepGroup], spent_and_most: tuple[float, float]
) -> Shown:
    """The box of some steps with their time and the longest of all; where they are in several groups, it leads to the first."""
    number = next(i for i, g in enumerate(groups) if steps[0] in g.steps)
    group = groups[number]
    times = f" × {len(steps):,}" if len(steps) > 1 else ""
    spent, most = spent_and_most
    time = f"{us(spent)} µs" if spent else ""
    head, label = group.kind + times, _cut(name)
    seen = " ".join(words for words in (head, time, label) if words)  # a link is called by what is seen of it, then the rest
    whole = "" if label == name else f" ({name})"
    return Shown(
        x=box.x - box.width / 2,
        y=box.y,
        width=box.width,
        height=box.height,
        key=key,
        group=number,
        kind=group.kind,
        title=f"{seen}{whole}, by {group.candidate}: {group.problem}",
        head=head,
        name=label,
        time=time,
        part=spent / most,
    )


def _passages(box: Box, within: Sequence[Box]) -> list[Box]:
    """The passages of the curves from a box to others of the same layers."""
    found: list[Box] = []
    for reader in box.readers:
        passed: list[Box] = []
        while reader.passage:
            passed.append(reader)
            reader = reader.readers[0]
        found += passed if reader in within else []
    return found


def _run(boxes: Sequence[Box], repeat: Repeat) -> Run:
    around = [*boxes, *(p for b in boxes for p in _passages(b, boxes))]
    left, right = min(b.x - b.width / 2 for b in around), max(b.x + b.width / 2 for b in around)
    top, bottom = min(b.y for b in boxes), max(b.y + b.height for b in boxes)
    title = f"× {repeat.count:,} layers"
    return Run(left - RUN, top - RUN - 10, right - left + 2 * RUN, bottom - top + 2 * RUN + 10, title)


def _cut(text: str) -> str:
    """The end of a long name, which says more than its beginning."""
    return text if len(text) <= NAME else f"…{text[1 - NAME :].lstrip('.')}"
