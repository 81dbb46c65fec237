"""Layered drawings of directed graphs: boxes in layers from sources to readers, a curve for each value read.

Layers, then order, then place, after Sugiyama, Tagawa and Toda 1981 (IEEE Trans. SMC 11, 109-125): a box lies below what it
reads; each layer is sorted by the mean place of its neighbours; and boxes move towards their neighbours as far as those beside
them allow. A curve over several layers passes through a narrow place of its own in each, so that it crosses no box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

SWEEPS = 8
PASSAGE = 6  # width of the place that a curve takes in a layer it passes
YIELDS = 1e-4  # the weight of a passage where it and a box want one place: boxes stand in a line, and passages beside them


@dataclass(eq=False)
class Box:
    """Something that takes room in a layer.

    Attributes:
        width, height: in the drawing's units; those of a passage are its own.
        passage: a curve that passes through, and no box to be seen.
        layer: its number, from the top.
        x: of its middle.
        y: of its upper edge.
    """

    width: float
    height: float
    passage: bool = False
    sources: list[Box] = field(default_factory=list["Box"])
    readers: list[Box] = field(default_factory=list["Box"])
    layer: int = 0
    x: float = 0.0
    y: float = 0.0


@dataclass(frozen=True)
class Gaps:
    """The room between boxes of one layer, between layers, around the drawing, and above it for a title."""

    beside: float
    below: float
    margin: float
    head: float


def join(source: Box, reader: Box) -> None:
    """Note that one box is read by another."""
    source.readers.append(reader)
    reader.sources.append(source)


def lay_out(boxes: Sequence[Box], gaps: Gaps, *, sink: bool = True) -> tuple[float, float]:
    """Place the boxes, which stand sources first; the width and height of the drawing, margins included.

    Args:
        boxes: joined.
        gaps: the room between them.
        sink: place those that read none as low as their first reader allows; else in the first layer.
    """
    layers = _layers(boxes, sink=sink)
    _sort(layers)
    _place(layers, gaps)
    width = max((b.x + b.width / 2 for layer in layers for b in layer), default=0.0) + gaps.margin
    height = max((b.y + b.height for b in boxes), default=gaps.head) + gaps.margin
    return width, height


def curve(source: Box, reader: Box) -> str:
    """The path of a curve from a box down to its reader, through the passages between them."""
    x, y = source.x, source.y + source.height
    path = f"M{x:.1f} {y:.1f}"
    while True:
        middle = (y + reader.y) / 2
        path += f" C{x:.1f} {middle:.1f} {reader.x:.1f} {middle:.1f} {reader.x:.1f} {reader.y:.1f}"
        if not reader.passage:
            return path
        x, y = reader.x, reader.y + reader.height
        path += f" V{y:.1f}"
        reader = reader.readers[0]


def _layers(boxes: Sequence[Box], *, sink: bool) -> list[list[Box]]:
    """The boxes by layer, sources first, with passages for long arrows."""
    for b in boxes:  # sources stand first
        b.layer = max((a.layer + 1 for a in b.sources), default=0)
    for b in reversed(boxes):
        if sink and not b.sources and b.readers:
            b.layer = min(c.layer for c in b.readers) - 1
    layers: list[list[Box]] = [[] for _ in range(max((b.layer for b in boxes), default=-1) + 1)]
    for b in boxes:
        layers[b.layer].append(b)
    for b in boxes:
        for reader in list(b.readers):
            _lengthen(b, reader, layers)
    return layers


def _lengthen(source: Box, reader: Box, layers: list[list[Box]]) -> None:
    """Lead the arrow between two boxes through every layer in between."""
    if reader.layer - source.layer < 2:
        return
    source.readers.remove(reader)
    reader.sources.remove(source)
    last = source
    for layer in range(source.layer + 1, reader.layer):
        passage = Box(PASSAGE, 0.0, passage=True, layer=layer)
        layers[layer].append(passage)
        join(last, passage)
        last = passage
    join(last, reader)


def _sort(layers: Sequence[list[Box]]) -> None:
    """Order each layer by where its neighbours stand, downwards and upwards in turn."""
    place = {b: float(i) for layer in layers for i, b in enumerate(layer)}
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            wanted: dict[Box, float] = {}
            for b in layer:
                near = b.sources if down else b.readers
                wanted[b] = sum(place[n] for n in near) / len(near) if near else place[b]
            layer.sort(key=wanted.__getitem__)
            place.update((b, float(i)) for i, b in enumerate(layer))


def _place(layers: Sequence[list[Box]], gaps: Gaps) -> None:
    """Coordinates: layers below each other, and in each the boxes as near to their neighbours as their order allows."""
    y = gaps.head
    for layer in layers:
        x = 0.0
        for b in layer:
            b.x, b.y = x + b.width / 2, y
            x += b.width + gaps.beside
        tallest = max(b.height for b in layer)
        for b in layer:
            b.height = tallest if b.passage else b.height
        y += tallest + gaps.below
    for sweep in range(2 * SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            targets: list[float] = []
            for b in layer:
                near = (b.sources or b.readers) if down else (b.readers or b.sources)
                near = [n for n in near if not n.passage] or near
                targets.append(sum(n.x for n in near) / len(near) if near else b.x)
            _spread(layer, targets, gaps.beside)
    shift = gaps.margin - min((b.x - b.width / 2 for layer in layers for b in layer), default=0.0)
    for layer in layers:
        for b in layer:
            b.x += shift


def _spread(layer: Sequence[Box], targets: Sequence[float], gap: float) -> None:
    """The places nearest to the targets, by least squares, that keep the order and the gaps: neighbours that would overlap move
    as one block to the mean of what its members want, passages for next to nothing."""
    offsets = [0.0]
    for a, b in pairwise(layer):
        offsets.append(offsets[-1] + (a.width + b.width) / 2 + gap)
    blocks: list[tuple[float, float, int]] = []  # the weighted sum of what the members want, their weight, how many they are
    for b, target, offset in zip(layer, targets, offsets, strict=False):
        weight = YIELDS if b.passage else 1.0
        total, weights, members = weight * (target - offset), weight, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / weights:
            before = blocks.pop()
            total, weights, members = total + before[0], weights + before[1], members + before[2]
        blocks.append((total, weights, members))
    starts = [total / weights for total, weights, members in blocks for _ in range(members)]
    for b, start, offset in zip(layer, starts, offsets, strict=False):
        b.x = start + offset
