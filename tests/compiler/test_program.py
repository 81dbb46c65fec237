"""A compiled program's account of itself: reports, a line, a notebook's view."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
import torch
from cli_programs import FAST, install_ceilings, invoke, write

import tilewright
from tilewright.dtype import F32
from tilewright.errors import InputError
from tilewright.frontends import LoadOptions
from tilewright.ir.build import input_, map_
from tilewright.ir.graph import Graph
from tilewright.ir.notation import parse
from tilewright.ir.ops import gemm
from tilewright.program import Program

LINE = "f32[4,32] @ f32[32,16] + bias, relu"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    install_ceilings(monkeypatch)


@pytest.fixture
def program() -> Program:
    return tilewright.compile(parse(LINE), budget_s=0)


def same(text: str) -> str:
    """A report without numbers and line ends, and without the program's name at its start."""
    return re.sub(r"[\d.,]+", "0", " ".join(text.partition("1 product")[2].split()))


def test_it_explains_itself_as_the_command_line_does(program: Program, tmp_path) -> None:
    report = program.explain()
    shown = invoke("explain", write(tmp_path, parse(LINE)), *FAST)
    assert same(str(report)) == same(shown.stdout.rstrip()) and repr(report) == str(report)
    (product,) = report.facts.products
    assert (
        product.problem.startswith("f32[4,32] @ f32[32,16]")
        and product.chosen.candidate == program.steps[0].decision.kernel.candidate
    )
    assert json.loads(report.to_json())["products"][0]["problem"] == product.problem
    assert report._repr_html_().startswith("<pre>") and "&lt;" not in str(report)


def test_it_times_itself_on_random_data_or_on_what_it_is_given(program: Program) -> None:
    report = program.perf(iterations=2)
    assert [s.kind for s in report.facts.steps] == ["gemm"] and report.facts.total_us > 0 and "Whole program" in str(report)
    assert all(i.data.startswith("random") for i in report.facts.inputs)
    a, b, bias = (torch.ones(t.shape) for t in program.input_types.values())
    assert [i.data for i in program.perf(a, b, bias, iterations=1).facts.inputs] == ["given"] * 3
    assert [i.data for i in program.perf(a, b, bias=bias, iterations=1).facts.inputs] == ["given"] * 3
    with pytest.raises(InputError, match=r"no value for input 'bias'"):
        program.perf(a, b)
    with pytest.raises(InputError, match=r"0 runs \(iterations\)\n  try: 1 or more, or None"):
        program.perf(iterations=0)


def test_state_is_as_it_was_before_timing() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x + self.count

    program = tilewright.compile(Counter(), example_inputs=(torch.zeros(3),), budget_s=0)
    before = {name: t.clone() for name, t in program.state.items()}
    program.perf(iterations=3)
    assert before and all(torch.equal(t, before[name]) for name, t in program.state.items())


def wide(count: int, name: str) -> Graph:
    """A program of many inputs and results with long names."""
    inputs = tuple(input_(f"{name}{i}", F32, (2, 2)) for i in range(count))
    return Graph("wide", inputs, tuple(map_("tanh", x) for x in inputs), tuple(f"r{i}" for i in range(count)))


@pytest.mark.parametrize("graph", [wide(300, "x"), wide(2, "x" * 900), wide(1, "a\x1b[2J")], ids=["many", "long", "hostile"])
def test_a_line_is_short(graph: Graph) -> None:
    program = tilewright.compile(graph, budget_s=0)
    assert len(repr(program)) < 500 and repr(program).isprintable()
    assert all(len(repr(step)) < 500 and repr(step).isprintable() for step in program.steps)
    if len(graph.inputs) == 300:
        assert re.search(r"x0: f32\[2,2\], .*, … 28\d more\) -> f32\[2,2\], .*, … 2\d\d more>", repr(program))


def test_a_program_over_rows_is_shown_in_a_line(program: Program) -> None:
    rows = tilewright.compile_rows(
        lambda m: tilewright.load(torch.nn.Linear(8, 4), LoadOptions(example_inputs=(torch.empty(m, 8),))),
        last=2,
        budget_s=0.01,
    )
    assert repr(rows) == "<tilewright program for rows 1..2 on cpu: 0 shapes kept>"
    assert isinstance(rows.at(2), Program)


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.found = list[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.found.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]
        self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


def test_a_notebook_shows_steps_and_graph_and_no_name_is_markup() -> None:
    hostile = "<script>alert(1)</script>"
    x = input_(hostile, F32, (4, 8))
    y = gemm(x, input_("w", F32, (8, 4)))
    program = tilewright.compile(Graph(hostile, tuple(y.src), (y,), ("y",), {y: hostile}), budget_s=0)
    tags = Tags(program._repr_html_())
    assert not tags.open and {"table", "svg", "details"} <= tags.found and "script" not in tags.found


def test_a_notebook_shows_no_more_steps_than_can_be_read() -> None:
    x = input_("x", F32, (4, 4))
    products = [gemm(x, input_(f"w{i}", F32, (4, 4 + i))) for i in range(70)]
    program = tilewright.compile(
        Graph("many", (x, *(p.src[1] for p in products)), tuple(products), tuple(f"y{i}" for i in range(70))), budget_s=0
    )
    assert len(program.steps) == 70 and "<p>10 more steps:" in program._repr_html_()
