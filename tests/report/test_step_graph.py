"""The graph of steps: what reads what, layers folded, and the files that `--picture` writes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import pytest
from cli_programs import FAST, block, install_ceilings, install_fake_library, invoke, write

import tilewright
from tilewright.dtype import F32
from tilewright.ir.build import input_, transpose
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import LayerNorm, gemm
from tilewright.report.explain.step_graph import StepGraph, folded, step_graph
from tilewright.report.html.step_picture import MOST_BOXES, WIDTH, draw, picture_of_steps
from tilewright.report.schema import Repeat, StepGroup
from tilewright.report.text.step_files import dot, model_explorer

HOSTILE = 'a "quoted" \\name\\ <b>&\x1b\u202e\nline'


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_library(monkeypatch)
    install_ceilings(monkeypatch)


def chain(n: int, residual: int = 0) -> StepGraph:
    """Steps each of which reads the one before it, and the one so many before that."""
    reads = {i: tuple(dict.fromkeys(j for j in (i - 1, i - 1 - residual) if j >= 0)) for i in range(n)}
    return StepGraph([f"step {i}" for i in range(n)], reads, (("x", (0,)),), (("y", n - 1),))


def groups(*steps: list[int], kind: str = "gemm", name: str = "name") -> list[StepGroup]:
    return [
        StepGroup(
            name=name,
            steps=each,
            kind=kind,
            problem="f32[2,2] @ f32[2,2]",
            candidate="llvm",
            schedule="",
            by="generated",
            why="",
            total_us=None,
            least_us=None,
            median_us=None,
            most_us=None,
            basis="",
            share=None,
            limit_us=None,
            peak_fraction=None,
            memory_bound=False,
        )
        for each in steps
    ]


def test_steps_read_what_their_parts_read_through_views() -> None:
    x, w = input_("x", F32, (4, 8)), input_("w", F32, (8, 8))
    first = gemm(x, w)
    norm = Node(LayerNorm(1, 1e-5), first)
    second = gemm(transpose(norm, (1, 0)), first)
    graph = Graph("g", (x, w), (second, transpose(first, (1, 0)), x), ("y", "turned", "same"))
    program = tilewright.compile(graph, budget_s=0)
    found = step_graph(program)
    kinds = {i: program.steps[i].part.kind for i in found.reads}
    assert "view" not in kinds.values() and [*kinds.values()].count("gemm") == 2
    a, b = (i for i, kind in kinds.items() if kind == "gemm")
    (n,) = (i for i, kind in kinds.items() if kind == "norm")
    assert found.reads[a] == () and found.reads[n] == (a,) and set(found.reads[b]) == {n, a}
    assert found.inputs == (("x", (a,)), ("w", (a,)))
    assert found.results == (("y", b), ("turned", a)), "one that is an input is made by no step"
    assert found.operations == 5


def test_folding_draws_a_layer_once_with_what_comes_in_and_out() -> None:
    graph = chain(8, residual=1)
    one = folded(graph, [Repeat(1, 3, 2)])
    assert one.boxes == ((0,), (1, 3, 5), (2, 4, 6), (7,))
    assert one.runs == ((1, 2),)
    assert set(one.reads) == {(0, 1), (0, 2), (1, 2), (2, 3), (1, 3)}
    assert one.box_of == {0: 0, 1: 1, 3: 1, 5: 1, 2: 2, 4: 2, 6: 2, 7: 3}
    assert all(source < reader for source, reader in one.reads)
    flat = folded(graph, [])
    assert flat.boxes == tuple((i,) for i in range(8)) and flat.runs == ()
    assert folded(StepGraph([], {}, (), ()), []).boxes == ()


def test_boxes_do_not_overlap_and_are_filled_by_their_time() -> None:
    graph = chain(20, residual=2)
    times = [float(i) for i in range(20)]
    drawing = draw(graph, groups(list(range(20))), [], times)
    assert drawing is not None and len(drawing.boxes) == 20
    for a, b in combinations([*drawing.boxes, *drawing.ends], 2):
        assert a.x + a.width <= b.x or b.x + b.width <= a.x or a.y + a.height <= b.y or b.y + b.height <= a.y
    assert [b.part for b in drawing.boxes] == [t / 19 for t in times]
    assert all(b.x >= 0 and b.x + b.width <= drawing.width and b.y + b.height <= drawing.height for b in drawing.boxes)
    for path in drawing.edges:
        places = [float(x) for x, _ in re.findall(r"([\d.]+) ([\d.]+)", path)]
        assert all(0 <= x <= drawing.width for x in places)


def test_a_chain_with_residuals_stands_in_a_line() -> None:
    drawing = draw(chain(12, residual=2), groups(list(range(12))), [], [1.0] * 12)
    assert drawing is not None
    assert max(b.x for b in drawing.boxes) - min(b.x for b in drawing.boxes) < WIDTH / 4
    assert drawing.width < 2 * WIDTH


def test_many_inputs_are_one_box_and_too_many_boxes_none() -> None:
    graph = StepGraph(["a"], {0: ()}, tuple((f"input {i}", (0,)) for i in range(9)), (("y", 0),))
    drawing = draw(graph, groups([0]), [], [None])
    assert drawing is not None and [e.label for e in drawing.ends] == ["9 inputs", "y"]
    assert "input 8" in drawing.ends[0].title
    n = MOST_BOXES + 1
    assert draw(chain(n), groups(list(range(n))), [], [1.0] * n) is None
    assert draw(chain(n), groups(list(range(n))), [Repeat(0, n, 1)], [1.0] * n) is not None


def test_a_picture_of_its_own_is_xml_without_links_and_links_to_nothing() -> None:
    drawing = draw(chain(3), groups([0, 1, 2], name=HOSTILE), [], [1.0, None, 2.0], HOSTILE, "note")
    assert drawing is not None
    text = picture_of_steps(drawing)
    root = ET.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "href" not in text and "prefers-color-scheme: dark" in text
    assert 'a "quoted" \\name\\ <b>&line' in [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]


def test_model_explorer_gets_every_step_with_its_layer() -> None:
    graph = chain(8, residual=1)
    found = json.loads(model_explorer(graph, groups(list(range(8))), [Repeat(1, 3, 2)], [None, *[1.5] * 7], "t"))
    assert found["label"] == "t" and len(found["graphs"]) == 1
    nodes = {n["id"]: n for n in found["graphs"][0]["nodes"]}
    assert len(nodes) == 8 + 2
    for n in nodes.values():
        assert isinstance(n["label"], str) and isinstance(n["namespace"], str)
        assert all(e["sourceNodeId"] in nodes for e in n.get("incomingEdges", []))
        assert all(isinstance(a["value"], str) and a["value"] for a in n.get("attrs", []))
    assert [nodes[str(i)]["namespace"] for i in range(8)] == ["", *(f"layer {k}" for k in (0, 0, 1, 1, 2, 2)), ""]
    assert [e["sourceNodeId"] for e in nodes["3"]["incomingEdges"]] == ["2", "1"]
    assert {"key": "time", "value": "1.5 µs"} in nodes["3"]["attrs"]


def test_dot_is_what_graphviz_reads() -> None:
    named = StepGraph([HOSTILE] * 4, {0: (), 1: (0,), 2: (1,), 3: (2,)}, ((HOSTILE, (0,)),), ((HOSTILE, 3),))
    text = dot(named, groups([0, 1, 2, 3], name=HOSTILE), [Repeat(1, 2, 1)], [1.0, 2.0, 4.0, None], HOSTILE).decode()
    assert text.count("subgraph cluster_") == 2 and text.count("->") == 3 + 2
    widths = dict(re.findall(r"(s\d) \[.*width=([\d.]+)", text))
    assert widths == {"s0": "2.40", "s1": "3.20", "s2": "4.80", "s3": "1.60"}, "by time"
    assert r"a \"quoted\" \\name\\ <b>&\nline" in text
    if shutil.which("dot"):
        done = subprocess.run(["dot", "-Tplain"], input=text, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stderr == ""
        assert len(re.findall(r"^node s", done.stdout, re.M)) == 4


@pytest.mark.parametrize("verb", ["perf", "explain"])
def test_the_suffix_says_which_file(tmp_path: Path, verb: str) -> None:
    program = write(tmp_path, block())
    once = ("-n", 1) if verb == "perf" else ()
    for suffix in (".svg", ".json", ".dot"):
        file = tmp_path / f"picture{suffix}"
        result = invoke(verb, program, "--picture", file, *once, *FAST)
        assert result.exit_code == 0, result.output
        text = file.read_text()
        assert "gemm" in text and "norm" in text
        assert {".svg": "<svg", ".json": "{", ".dot": "digraph"}[suffix] in text[:8]
        assert ("µs a call" in text) == (verb == "perf" and suffix == ".svg")
    result = invoke(verb, program, "--picture", tmp_path / "picture.png", *once, *FAST)
    assert result.exit_code == 2 and "ends in none of .svg, .json, .dot" in " ".join(result.output.split())


def test_files_that_are_one_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    result = invoke("perf", write(tmp_path, block()), "--picture", file, "--trace", file, *FAST)
    assert result.exit_code == 2 and "--picture and --trace name one file" in result.output


def test_a_picture_of_too_many_boxes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.report.html.step_picture.MOST_BOXES", 2)
    result = invoke("explain", write(tmp_path, block()), "--picture", tmp_path / "x.svg", *FAST)
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "the picture would have more than 2 boxes" in said and "--picture F.json for Model Explorer" in said
    assert not (tmp_path / "x.svg").exists()
    page = tmp_path / "page.html"
    assert invoke("perf", write(tmp_path, block()), "--html", page, "-n", 1, *FAST).exit_code == 0
    assert "boxes, layers folded, are no picture. `--picture F.json`" in page.read_text()
    assert 'class="graph"' not in page.read_text() and "In the graph" not in page.read_text()
