"""The roofline: distinct steps by arithmetic intensity and rate against what the machine was measured to reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LABEL_GAP, CHARACTER = 14.0, 6.6  # between the lines of labels; the width of a character


@dataclass(frozen=True)
class Size:
    """A picture's size, and the room for labels on its left and right; `name` is the class by which the page shows it."""

    name: str
    width: float
    height: float
    left: float
    right: float


WIDE, SMALL = Size("wide", 1000, 520, 62, 116), Size("small", 380, 420, 50, 96)
ABOVE, BELOW = 16.0, 48.0


@dataclass(frozen=True)
class Point:
    """A step: operations a byte, 1e9 operations a second, its kind, what it is called, and the key of its row."""

    intensity: float
    gops: float
    kind: str
    title: str
    key: int


@dataclass(frozen=True)
class Placed:
    """A point in the picture."""

    x: float
    y: float
    kind: str
    title: str
    key: int


@dataclass(frozen=True)
class Roof:
    """The line of a matrix unit, from `x` to the right edge, and the height of its label."""

    x: float
    y: float
    label_y: float
    label: str
    title: str


@dataclass(frozen=True)
class Memory:
    """The line of the memory, and the middle and slope (degrees) of its label."""

    path: str
    x: float
    y: float
    slope: float
    label: str
    title: str


@dataclass(frozen=True)
class Roofline:
    """The picture: lines of the grid with their labels, roofs and points."""

    size: str
    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    across: list[tuple[float, str]]
    up: list[tuple[float, str]]
    memory: Memory | None
    roofs: list[Roof]
    points: list[Placed]


def roofline(points: Sequence[Point], peaks: Mapping[str, float], gbps: float, size: Size) -> Roofline:
    """The picture of some points.

    Labels of roofs stand in a column on the right, where none touches another.

    Args:
        points: one for each distinct step.
        peaks: measured rate by operand type, in 1e9 operations a second.
        gbps: measured memory bandwidth, in 1e9 bytes a second.
        size: of the picture.
    """
    peaks = {name: rate for name, rate in peaks.items() if rate > 0}
    ridges = [rate / gbps for rate in peaks.values()] if gbps > 0 else []
    x = _range([*ridges, *(p.intensity for p in points)] or [1.0])
    y = _range([*peaks.values(), *(p.gops for p in points)] or [1.0])
    left, right, top, bottom = size.left, size.width - size.right, ABOVE, size.height - BELOW

    def at(intensity: float, gops: float) -> tuple[float, float]:
        across = (math.log10(intensity) - x[0]) / (x[1] - x[0])
        up = (math.log10(gops) - y[0]) / (y[1] - y[0])
        return left + across * (right - left), bottom - up * (bottom - top)

    low, high = (10 ** x[0], 10 ** y[0]), (10 ** x[1], 10 ** y[1])
    ordered = sorted(peaks.items(), key=lambda item: -item[1])
    heights = [at(low[0], rate)[1] for _, rate in ordered]
    roofs = [
        Roof(*at(min(max(rate / gbps, low[0]), high[0]) if gbps > 0 else low[0], rate), label_y, *_words(name, rate))
        for (name, rate), label_y in zip(ordered, spread(heights, LABEL_GAP, top, bottom), strict=True)
    ]
    placed = [Placed(*at(p.intensity, p.gops), p.kind, p.title, p.key) for p in points]
    end = min(max(peaks.values(), default=high[1]) / gbps, high[0]) if gbps > 0 else 0.0
    return Roofline(
        size.name,
        size.width,
        size.height,
        left,
        right,
        top,
        bottom,
        across=[(at(10.0**e, low[1])[0], power(e)) for e in _decades(x)],
        up=[(at(low[0], 10.0**e)[1], power(e)) for e in _decades(y)],
        memory=_memory(at, gbps, low, end, placed) if gbps > 0 else None,
        roofs=roofs,
        points=placed,
    )


def _words(name: str, rate: float) -> tuple[str, str]:
    """The label of a roof, and its title."""
    shown = f"{rate:,.0f}" if rate < 10_000 else f"{rate / 1e3:,.0f}k"
    return f"{name} {shown}", f"{name} products: {rate:,.1f} Gop/s measured"


def spread(wanted: Sequence[float], gap: float, first: float, last: float) -> list[float]:
    """Ascending places near those that are wanted, a gap apart at least, between the first and the last while there is room."""
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + gap if places else first))
    below = last
    for i in range(len(places) - 1, -1, -1):
        places[i] = min(places[i], below)
        below = places[i] - gap
    return places


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Exponents of ten that hold the values with some room, two decades at least."""
    low, high = math.log10(min(values)) - 0.25, math.log10(max(values)) + 0.25
    missing = max(2.0 - (high - low), 0.0)
    return low - missing / 2, high + missing / 2


def _decades(span: tuple[float, float]) -> range:
    """The exponents in a range, so few that their labels have room."""
    first, last = math.ceil(span[0]), math.floor(span[1])
    return range(first, last + 1, 1 + (last - first) // 8)


def power(e: int) -> str:
    """A power of ten, in five characters at most where it is of a size that machines reach."""
    if e >= 0:
        return f"{10 ** (e % 3)}{('', 'k', 'M', 'G')[e // 3]}" if e < 12 else f"1e{e}"
    return f"{10.0**e:g}" if e >= -3 else f"1e{e}"


def _memory(
    at: Callable[[float, float], tuple[float, float]],
    gbps: float,
    low: tuple[float, float],
    end: float,
    points: Sequence[Placed],
) -> Memory | None:
    """The line of the memory, from where it enters the picture up to the highest roof; its label where fewest points are."""
    begin = max(low[0], low[1] / gbps)
    if end <= begin:
        return None
    (sx, sy), (ex, ey) = at(begin, gbps * begin), at(end, gbps * end)
    label = f"memory {gbps:,.0f} GB/s"
    length = math.hypot(ex - sx, ey - sy)
    along, half = ((ex - sx) / length, (ey - sy) / length), len(label) * CHARACTER / 2

    def crowd(t: float) -> int:
        """The points that a label about this part of the line would cover."""
        near = ((p.x - sx - t * (ex - sx), p.y - sy - t * (ey - sy)) for p in points)
        return sum(abs(x * along[0] + y * along[1]) < half + 8 and -24 < y * along[0] - x * along[1] < 6 for x, y in near)

    least = min((half + 16) / length, 0.5)
    t = min((least + (1 - 2 * least) * i / 16 for i in (8, 6, 10, 4, 12, 2, 14, 0, 16)), key=crowd)
    x, y = sx + t * (ex - sx) + 7 * along[1], sy + t * (ey - sy) - 7 * along[0]
    slope = math.degrees(math.atan2(ey - sy, ex - sx))
    return Memory(f"M{sx:.1f} {sy:.1f}L{ex:.1f} {ey:.1f}", x, y, slope, label, f"memory: {gbps:,.1f} GB/s")
