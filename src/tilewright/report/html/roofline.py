"""The roofline: steps by arithmetic intensity and rate against what the machine was measured to reach, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

# A shape and a colour for each kind of step, so that neither alone tells them apart; colours are CSS variables of the page.
SHAPES = {
    "gemm": "circle",
    "attention": "square",
    "norm": "triangle",
    "softmax": "diamond",
    "elementwise": "cross",
    "quantize": "star",
    "reduce": "drop",
    "call": "hexagon",
    "gather": "plus",
}
_OUTLINES = {
    "square": "-5,-5 5,-5 5,5 -5,5",
    "triangle": "0,-6.5 6,5 -6,5",
    "drop": "0,6.5 6,-5 -6,-5",
    "diamond": "0,-7 6,0 0,7 -6,0",
    "hexagon": "6,0 3,5.2 -3,5.2 -6,0 -3,-5.2 3,-5.2",
    "star": "0,-7 2,-2 7,-2 3,1.5 4.5,7 0,3.5 -4.5,7 -3,1.5 -7,-2 -2,-2",
    "plus": "-2,-6 2,-6 2,-2 6,-2 6,2 2,2 2,6 -2,6 -2,2 -6,2 -6,-2 -2,-2",
    "cross": "-6,-3.2 -3.2,-6 0,-2.8 3.2,-6 6,-3.2 2.8,0 6,3.2 3.2,6 0,2.8 -3.2,6 -6,3.2 -2.8,0",
}


@dataclass(frozen=True)
class Point:
    """A step: operations a byte, 1e9 operations a second, its kind, what it is called, and its number in the table."""

    intensity: float
    gops: float
    kind: str
    title: str
    step: int


@dataclass(frozen=True)
class _Axes:
    width: int
    height: int
    left: int
    right: int
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, intensity: float, gops: float) -> tuple[float, float]:
        """The position of a value, in the picture's own units."""
        across = (math.log10(intensity) - self.x[0]) / (self.x[1] - self.x[0])
        up = (math.log10(gops) - self.y[0]) / (self.y[1] - self.y[0])
        below, above = 52, 16
        return self.left + across * (self.width - self.left - self.right), self.height - below - up * (
            self.height - below - above
        )


def marker(kind: str) -> str:
    """The symbol of a kind, about the origin."""
    shape = SHAPES.get(kind, "circle")
    if shape == "circle":
        return f'<circle class="k-{_class(kind)}" r="5.5"/>'
    return f'<polygon class="k-{_class(kind)}" points="{_OUTLINES[shape]}"/>'


def _class(kind: str) -> str:
    return kind if kind in SHAPES else "other"


def roofline(points: Sequence[Point], peaks: Mapping[str, float], gbps: float, width: int, height: int) -> str:
    """The picture.

    Args:
        points: one a step; each links to the row `step-N` of the page.
        peaks: measured rate by operand type, in 1e9 operations a second.
        gbps: measured memory bandwidth, in 1e9 bytes a second.
        width, height: of the view box.
    """
    roofs = {name: rate for name, rate in peaks.items() if rate > 0}
    rates = [*roofs.values(), *(p.gops for p in points)] or [1.0]
    ridges = [rate / gbps for rate in roofs.values()] if gbps > 0 else []
    across = [*ridges, *(p.intensity for p in points)] or [1.0]
    wide = width >= 700
    x = _range(across)
    y = _range(rates)
    axes = _Axes(width, height, 64 if wide else 44, 92 if wide else 14, x, y)
    parts = [f'<svg class="roofline {"wide" if wide else "small"}" viewBox="0 0 {width} {height}" role="img" '
             f'aria-label="Roofline: {len(points)} steps">']  # fmt: skip
    parts += _grid(axes, wide)
    parts += _roofs(axes, roofs, gbps, wide)
    for p in points:
        px, py = axes.at(p.intensity, p.gops)
        parts.append(
            f'<a href="#step-{p.step}"><g class="point" data-step="{p.step}" transform="translate({px:.1f} {py:.1f})">'
            f"<title>{escape(p.title)}</title>{marker(p.kind)}</g></a>"
        )
    return "\n".join([*parts, "</svg>"])


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Exponents of ten that hold the values with some room, two decades at least."""
    low, high = math.log10(min(values)) - 0.25, math.log10(max(values)) + 0.25
    missing = max(2.0 - (high - low), 0.0)
    return low - missing / 2, high + missing / 2


def _grid(axes: _Axes, wide: bool) -> list[str]:
    found: list[str] = []
    x0, y0 = axes.at(10 ** axes.x[0], 10 ** axes.y[0])
    x1, y1 = axes.at(10 ** axes.x[1], 10 ** axes.y[1])
    for e in range(math.ceil(axes.x[0]), math.floor(axes.x[1]) + 1):
        px, _ = axes.at(10.0**e, 10 ** axes.y[0])
        found.append(f'<path class="grid" d="M{px:.1f} {y0:.1f}V{y1:.1f}"/>')
        found.append(f'<text class="tick" x="{px:.1f}" y="{y0 + 16:.1f}" text-anchor="middle">{_power(e)}</text>')
    for e in range(math.ceil(axes.y[0]), math.floor(axes.y[1]) + 1):
        _, py = axes.at(10 ** axes.x[0], 10.0**e)
        found.append(f'<path class="grid" d="M{x0:.1f} {py:.1f}H{x1:.1f}"/>')
        found.append(f'<text class="tick" x="{x0 - 7:.1f}" y="{py + 4:.1f}" text-anchor="end">{_power(e)}</text>')
    middle = (x0 + x1) / 2
    label = "operations per byte of memory traffic" if wide else "operations per byte"
    found.append(f'<text class="axis" x="{middle:.1f}" y="{y0 + 40:.1f}" text-anchor="middle">{label}</text>')
    up = (y0 + y1) / 2
    side = 14 if wide else 10
    found.append(
        f'<text class="axis" transform="translate({side} {up:.1f}) rotate(-90)" text-anchor="middle">Gop/s reached</text>'
    )
    return found


def _power(e: int) -> str:
    return f"{10**e:,}" if 0 <= e <= 5 else f"{10.0**e:g}" if -3 <= e < 0 else f"1e{e}"


def _roofs(axes: _Axes, roofs: Mapping[str, float], gbps: float, wide: bool) -> list[str]:
    found: list[str] = []
    last = 10 ** axes.x[1]
    taken: list[float] = []
    for name, rate in sorted(roofs.items(), key=lambda item: -item[1]):
        ridge = max(rate / gbps, 10 ** axes.x[0]) if gbps > 0 else 10 ** axes.x[0]
        bx, by = axes.at(min(ridge, last), rate)
        ex, _ = axes.at(last, rate)
        found.append(f'<path class="roof" d="M{bx:.1f} {by:.1f}H{ex:.1f}"><title>{escape(_rate(name, rate))}</title></path>')
        ly = by + 4 if wide else by - 4
        while any(abs(ly - t) < 13 for t in taken):
            ly += 1
        taken.append(ly)
        where = f'x="{ex + 6:.1f}" text-anchor="start"' if wide else f'x="{ex:.1f}" text-anchor="end"'
        found.append(f'<text class="rooflabel" y="{ly:.1f}" {where}>{escape(f"{name} {rate:,.0f}")}</text>')
    if gbps > 0:
        begin = 10 ** axes.x[0]
        low = 10 ** axes.y[0]
        start = (begin, gbps * begin) if gbps * begin >= low else (low / gbps, low)
        highest = max(roofs.values(), default=10 ** axes.y[1])
        end = min(highest / gbps, last)
        if end > start[0]:
            (sx, sy), (ex, ey) = axes.at(*start), axes.at(end, gbps * end)
            found.append(
                f'<path class="roof" d="M{sx:.1f} {sy:.1f}L{ex:.1f} {ey:.1f}"><title>memory: {gbps:,.1f} GB/s</title></path>'
            )
            slope = math.degrees(math.atan2(ey - sy, ex - sx))
            mx, my = sx + 0.55 * (ex - sx), sy + 0.55 * (ey - sy)
            place = f"translate({mx:.1f} {my - 6:.1f}) rotate({slope:.1f})"
            found.append(f'<text class="rooflabel" transform="{place}">memory {gbps:,.0f} GB/s</text>')
    return found


def _rate(name: str, rate: float) -> str:
    return f"{name} products: {rate:,.1f} Gop/s measured"
