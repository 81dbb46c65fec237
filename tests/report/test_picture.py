"""Pictures and dumps of graphs: what is drawn, where, and that files appear whole."""

import re
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import pytest
import torch
from work import counting

from tilewright import compile
from tilewright.dtype import F32, S8
from tilewright.errors import InputError
from tilewright.files import write_whole
from tilewright.ir.build import const, input_, map_
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import LayerNorm, Quantize, gemm
from tilewright.ir.text import parse
from tilewright.report.html.picture import MOST_NODES, Dump, picture

SVG = "{http://www.w3.org/2000/svg}"


def residual(layers: int) -> Graph:
    """Blocks of norm, product, tanh, with a residual around each."""
    x = start = input_("x", F32, (4, 8))
    for i in range(layers):
        w = const(torch.full((8, 8), float(i)))
        x = map_("add", x, map_("tanh", gemm(Node(LayerNorm(1, 1e-5), x), w)))
    return Graph("a < b & c", (start,), (x, Node(Quantize(S8), x, const(0.5, F32))), ("y", "codes"))


def drawn(svg: str) -> tuple[list[tuple[float, float, float, float]], list[str]]:
    """The boxes of nodes (left, top, right, bottom), and every text."""
    root = ET.fromstring(svg)
    boxes = []
    for rect in root.findall(f"{SVG}g/{SVG}rect"):
        x, y, w, h = (float(rect.get(k) or "nan") for k in ("x", "y", "width", "height"))
        boxes.append((x, y, x + w, y + h))
    return boxes, [t.text or "" for t in root.iter(f"{SVG}text")]


def test_every_node_and_result_has_a_box_and_every_read_an_arrow() -> None:
    graph = residual(2)
    boxes, texts = drawn(picture(graph, "a < b & c, source"))
    nodes = [n for n in graph.nodes() if not n.constant]
    assert len(boxes) == len(nodes) + 2
    reads = sum(len({s for s in n.src if not s.constant}) for n in nodes) + 2
    assert picture(graph, "t").count("marker-end=") == reads
    assert texts[0] == "a < b & c, source"
    assert texts.count("gemm") == 2 and texts.count("f32[4,8] @ f32[8,8]") == 2 and "codes" in texts and "with 0.5" in texts


def test_boxes_neither_overlap_nor_leave_the_picture_and_sources_stand_above() -> None:
    svg = picture(residual(6), "t")
    boxes, _ = drawn(svg)
    width, height = (float(x) for x in re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())  # type: ignore[union-attr]
    for a, b in combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    assert all(b[0] >= 0 and b[2] <= width and b[1] >= 0 and b[3] <= height for b in boxes)


def test_no_arrow_crosses_a_box() -> None:
    svg = picture(residual(4), "t")
    boxes, _ = drawn(svg)
    straight = [(float(x), float(top), float(bottom)) for x, top, bottom in re.findall(r" ([\d.]+) ([\d.]+) V([\d.]+)", svg)]
    assert straight
    for x, top, bottom in straight:
        assert not any(b[0] < x < b[2] and b[1] < bottom and top < b[3] for b in boxes)


def test_a_long_program_is_drawn_in_part_and_says_so_and_is_little_work() -> None:
    graph = residual(400)
    with counting() as calls:
        boxes, texts = drawn(picture(graph, "long"))
    assert calls.count < 400_000
    assert len(boxes) <= MOST_NODES + 2
    assert "the first 150 of 1,602 nodes; the text beside this picture has all" in texts


def test_an_empty_program_has_a_picture() -> None:
    x = input_("x", F32, (2,))
    boxes, texts = drawn(picture(Graph("same", (x,), (x,), ("y",)), "same"))
    assert len(boxes) == 2 and "y" in texts
    assert drawn(picture(Graph("none", (), (), ()), "none"))[0] == []


def test_a_dump_has_every_stage_and_reads_back(tmp_path: Path) -> None:
    x, w = input_("x", F32, (4, 8)), input_("w", F32, (8, 6))
    graph = Graph("g", (x, w), (map_("tanh", gemm(x, w)),), ("y",))
    seen: dict[str, Graph] = {}

    def visit(stage: str, graph: Graph) -> None:
        seen[stage] = graph
        dump(stage, graph)

    dump = Dump(tmp_path / "new" / "folder")
    program = compile(graph, budget_s=0, visit=visit, excess_precision=True)
    texts = sorted((tmp_path / "new" / "folder").glob("*.tw"))
    assert [t.stem for t in texts] == [f"{i:02}-{stage}" for i, stage in enumerate(seen)]
    assert [*seen][:2] == ["source", "accumulator"] and [*seen][-1] == "precision"
    for text, stage in zip(texts, seen.values(), strict=True):
        assert parse(text.read_text()) == stage
        assert ET.parse(text.with_suffix(".svg")).getroot().tag == f"{SVG}svg"
    assert parse(texts[-1].read_text()) == program.graph
    assert sorted(p.suffix for p in texts[0].parent.iterdir()) == [".svg"] * len(seen) + [".tw"] * len(seen)


def test_a_dump_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot be made a folder: .*file"):
        Dump(tmp_path / "file")
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        write_whole(tmp_path / "taken", b"text")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "taken"]
