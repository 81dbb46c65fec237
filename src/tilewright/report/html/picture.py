"""A graph as an SVG picture: boxes in layers from inputs to results, an arrow for each value read."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from tilewright.errors import InputError
from tilewright.files import write_whole
from tilewright.ir.anchor import ANCHORS
from tilewright.ir.graph import Graph, Node
from tilewright.ir.literal import Literal
from tilewright.ir.literal_file import FILE, arrays_of
from tilewright.ir.ops import (
    ALIASES,
    Call,
    Const,
    Convert,
    Dequantize,
    Gather,
    Input,
    Item,
    LayerNorm,
    Quantize,
    Reduce,
    Softmax,
    maker_of,
)
from tilewright.ir.shown import op_name
from tilewright.ir.text import print_with_literals
from tilewright.report.html.layered import Box, Gaps, curve, join, lay_out
from tilewright.report.measure.inputs import write_npz
from tilewright.report.program import tensor_types
from tilewright.schedule.problem import problem_of

MOST_NODES = 150
CHARACTER, LINE, PADDING = 6.65, 15, 8
WRAP = 44
MARGIN = 24
GAPS = Gaps(beside=22, below=38, margin=MARGIN, head=62)

# Fill and stroke of a box.
_COLOURS: dict[str, tuple[str, str]] = {
    "product": ("#dbe9fb", "#2f6fb7"),
    "quantise, convert": ("#fdebd3", "#c77a16"),
    "norm, softmax, reduce": ("#e2f3df", "#4a8f3c"),
    "view": ("#f1f1f3", "#9a9aa4"),
    "gather, call": ("#f0e4f7", "#8a4fae"),
    "elementwise": ("#ffffff", "#5f6672"),
    "input, result": ("#2d3440", "#2d3440"),
}
_FAMILIES: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("product", ANCHORS),
    ("quantise, convert", (Quantize, Dequantize, Convert)),
    ("norm, softmax, reduce", (LayerNorm, Softmax, Reduce)),
    ("view", ALIASES),
    ("gather, call", (Gather, Call)),
    ("input, result", (Input,)),
)


@dataclass(eq=False, kw_only=True)
class _Box(Box):
    """A node, or a result of the program: its lines, its family, and where it stands in the source."""

    lines: tuple[str, ...]
    family: str
    tip: str = ""


def _sized(lines: Sequence[str], family: str, tip: str = "") -> _Box:
    """A box with room for its lines."""
    width = max(len(line) for line in lines) * CHARACTER + 2 * PADDING
    return _Box(width, len(lines) * LINE + 2 * PADDING - 3, lines=tuple(lines), family=family, tip=tip)


def picture(graph: Graph, title: str) -> str:
    """The graph as the text of an SVG file.

    What depends on constants alone is written into the boxes that read it. Of a program with more than 150 other nodes the
    first are drawn, and the picture says so.
    """
    shown = [n for n in graph.nodes() if not n.constant and not isinstance(n.op, Item)]
    left_out = len(shown) - MOST_NODES
    boxes = _boxes(graph, shown[:MOST_NODES])
    width, height = lay_out(boxes, GAPS)
    note = f"the first {MOST_NODES} of {len(shown):,} nodes; the text beside this picture has all" if left_out > 0 else ""
    return _svg(boxes, title, note, max(width, 760.0), height)


class Dump:
    """Writes `NN-STAGE.tw` and `NN-STAGE.svg` for each stage it is called with, and the large constants that the texts name
    once for all of them to `constants.npz`; the folder is made if missing.

    Raises:
        InputError: the folder cannot be made, or a file in it not written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = 0
        self._literals: dict[str, Literal] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot be made a folder: {error.strerror}", where=str(folder)) from error

    def __call__(self, stage: str, graph: Graph) -> None:
        name = f"{self._written:02}-{stage}"
        self._written += 1
        known = len(self._literals)
        text, literals = print_with_literals(graph, self._literals)
        if len(literals) > known:
            write_npz(self._folder / FILE, dict(arrays_of(v, k) for k, v in literals.items()))
        write_whole(self._folder / f"{name}.tw", text.encode())
        write_whole(self._folder / f"{name}.svg", picture(graph, f"{graph.name}, {stage}").encode())


def _boxes(graph: Graph, nodes: Sequence[Node]) -> list[_Box]:
    """A box for each node and each result, joined by what reads what."""
    made: dict[Node, _Box] = {}
    for node in nodes:
        family = next((name for name, ops in _FAMILIES if isinstance(node.op, ops)), "elementwise")
        made[node] = _sized(_lines(node), family, graph.origins.get(node, ""))
        for source in dict.fromkeys(map(maker_of, node.src)):
            if source in made:
                join(made[source], made[node])
    found = list(made.values())
    for name, node in zip(graph.output_names, graph.outputs, strict=True):
        maker = maker_of(node)
        if maker in made:
            found.append(_sized((_cut(name), str(node.type)), "input, result"))
            join(made[maker], found[-1])
    return found


def _lines(node: Node) -> list[str]:
    """The lines in a node's box: the operation, what it reads of constants, its type."""
    types = [str(t) for t in tensor_types(node)]
    if isinstance(node.op, Input):
        return [_cut(node.op.label), *types]
    if isinstance(node.op, ANCHORS):
        problem = textwrap.wrap(str(problem_of(node)), WRAP)
        return [node.op.name, *problem[:8], *(["…"] if len(problem) > 8 else [])]
    beside = [_constant(s) for s in node.src if s.constant]
    return [op_name(node), *(f"with {c}" for c in beside[:3]), *types]


def _constant(node: Node) -> str:
    if isinstance(node.op, Const) and node.tensor.elements == 1:
        return f"{node.op.data.scalar():.6g}"
    label = node.op.data.label if isinstance(node.op, Const) else ""
    return f"{node.type} {_cut(label, WRAP - len(str(node.type)))}".rstrip()


def _cut(text: str, most: int = WRAP) -> str:
    """The end of a long name, which says more than its beginning."""
    return text if len(text) <= most else f"…{text[len(text) - max(most, 8) + 1 :]}"


def _svg(boxes: Sequence[_Box], title: str, note: str, width: float, height: float) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="ui-monospace,Menlo,Consolas,monospace" font-size="11">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0.5 L8 4 L0 7.5 z" fill="#7a828e"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="22" font-size="14" font-weight="bold" fill="#20242b">{_xml(title)}</text>',
        *_legend(),
    ]
    if note:
        parts.append(f'<text x="{MARGIN + len(title) * 8.5 + 20:.0f}" y="22" fill="#b3261e">{_xml(note)}</text>')
    parts += [
        f'<path d="{curve(b, reader)}" fill="none" stroke="#7a828e" stroke-width="1.1" marker-end="url(#tip)"/>'
        for b in boxes
        for reader in b.readers
    ]
    parts += [_box(b) for b in boxes]
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> list[str]:
    parts: list[str] = []
    x = float(MARGIN)
    for name, (fill, stroke) in _COLOURS.items():
        parts.append(f'<rect x="{x:.0f}" y="34" width="11" height="11" rx="2" fill="{fill}" stroke="{stroke}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="43" font-size="10" fill="#5f6672">{name}</text>')
        x += 16 + len(name) * 6.1 + 14
    return parts


def _box(b: _Box) -> str:
    fill, stroke = _COLOURS[b.family]
    dark = b.family == "input, result"
    parts = [
        "<g>",
        f"<title>{_xml(b.tip)}</title>" if b.tip else "",
        f'<rect x="{b.x - b.width / 2:.1f}" y="{b.y:.1f}" width="{b.width:.1f}" height="{b.height:.1f}" '
        f'rx="{10 if dark else 4}" fill="{fill}" stroke="{stroke}"/>',
    ]
    for i, line in enumerate(b.lines):
        look = ' font-weight="bold"' if i == 0 else ""
        colour = "#ffffff" if dark else "#20242b" if i == 0 else "#4a505b"
        at = f'x="{b.x:.1f}" y="{b.y + PADDING + LINE * i + 9:.1f}"'
        parts.append(f'<text {at} text-anchor="middle" fill="{colour}"{look}>{_xml(line)}</text>')
    return "".join([*parts, "</g>"])


def _xml(text: str) -> str:
    """Text that may stand in an SVG file: markup escaped, control characters left out."""
    return escape("".join(c for c in text if c.isprintable()))
