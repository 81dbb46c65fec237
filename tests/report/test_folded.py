"""Steps that are alike stand together under one name, and every report has the same counts."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_programs import block, install_fake_library
from msgspec.structs import replace

import tilewright
from tilewright.dtype import F32
from tilewright.ir.build import input_
from tilewright.ir.graph import Node
from tilewright.ir.notation import parse
from tilewright.ir.ops import AllReduce
from tilewright.program import Program
from tilewright.report.explain.explain import explain_program
from tilewright.report.explain.folded import Time, expected_times, fold, layers, why_not
from tilewright.report.explain.names import plain, step_names, together
from tilewright.report.html.notebook import notebook
from tilewright.report.measure import perf
from tilewright.report.measure.inputs import make_feeds
from tilewright.report.measure.trace_events import traced
from tilewright.report.measure.verify import verify_program
from tilewright.report.schema import Repeat
from tilewright.report.text.explain_text import last_names, short_sections
from tilewright.report.text.groups_table import layers_words, untimed_words
from tilewright.report.words import ranged, titled


class Block(torch.nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48), torch.nn.Linear(48, 16)
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return torch.tanh(x) if self.last else x


class Stack(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(i == count - 1) for i in range(count))
        self.head = torch.nn.Linear(16, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def stack() -> Program:
    torch.manual_seed(0)
    return tilewright.compile(Stack(4).eval(), example_inputs=(torch.randn(5, 16),), budget_s=0)


def test_layers_are_folded_and_named_by_their_weights(stack: Program) -> None:
    report = explain_program(stack, "g")
    assert report.layers == [Repeat(0, 4, 3, 0)], "the last, which ends otherwise, is a layer, too"
    names = {g.name: len(g.steps) for g in report.groups}
    assert names == {"layers.0-3.norm": 4, "layers.0-3.up": 4, "layers.0-2.down": 3, "layers.3.down": 1, "head": 1}
    assert [g.repeat for g in report.groups] == [0, 0, 0, 0, None]
    assert sorted(i for g in report.groups for i in g.steps) == list(range(13))
    up = report.products[next(g.product for g in report.groups if g.name == "layers.0-3.up")]
    assert up.name == "layers.0-3.up" and len(up.names) == 4
    assert any("constant layers.0-3.up.bias" in step for step in up.stores[0].steps)


def test_where_the_time_is_over_one_step_of_those_that_are_alike_is_timed(
    stack: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds = make_feeds(stack.source)
    for seconds, untimed in ((60.0, 0), (0.0, 8)):
        monkeypatch.setattr(perf, "LATE", 0.0)
        monkeypatch.setattr(perf, "LEAST_S", seconds)
        report = perf.measure(stack, "g", feeds, stack.target, within_s=0.02).report
        assert len({s.time_us for s in report.steps}) <= 13 - untimed and all(s.time_us > 0 for s in report.steps)
        said = [f"The time was over for {untimed} of 13 steps: each is taken to be as long as one like it that was timed."]
        assert [s for s in report.summary if "time was over" in s] == (said if untimed else [])


class Two(torch.nn.Module):
    """Two kinds of layers in a row, numbered through; a head that reads its weights from an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(7))
        self.head = torch.nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) if i < 4 else torch.tanh(layer(x))
        return self.head(x)


def test_a_second_stretch_of_layers_goes_on_counting_and_tied_weights_name_none() -> None:
    program = tilewright.compile(Two().eval(), example_inputs=(torch.arange(5),), budget_s=0)
    report = explain_program(program, "g")
    assert [(r.count, r.number) for r in report.layers] == [(4, 0), (3, 4)]
    assert [layers_words(r) for r in report.layers] == ["layers 0 to 3, 1 step in each", "layers 4 to 6, 1 step in each"]
    assert layers_words(Repeat(0, 12, 7)) == "12 layers, 7 steps in each", "names do not number them"
    assert [g.name for g in report.groups] == ["embed", "layers.0-3", "layers.4-6", "head"]


class Projected(torch.nn.Module):
    """A linear layer that flattens what it reads, as GPT-2's does: the last view of what stands before it is in this module."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.randn(inputs, outputs)), torch.nn.Parameter(torch.randn(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Attending(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Projected(32, 96), Projected(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(1, 8, 2, 16).transpose(1, 2) for t in self.c_attn(x).split(32, -1))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(found.transpose(1, 2).reshape(1, 8, 32))


def test_one_naming_in_every_report() -> None:
    model = torch.nn.Sequential()
    model.add_module("attn", Attending())
    program = tilewright.compile(model.eval(), example_inputs=(torch.randn(1, 8, 32),), budget_s=0)
    feeds = make_feeds(program.source)
    names = ["attn.c_attn", "attn", "attn.c_proj"]
    account = explain_program(program, "g")
    assert [g.name for g in account.groups] == names
    assert "(gemm attn.c_attn)" in account.products[1].operands[0] and "(attention attn)" in account.products[2].operands[0]
    assert [r.name for r in verify_program(program, "g", feeds).steps] == names
    assert [r.name for r in perf.measure(program, "g", feeds, program.target, iterations=1).report.steps] == names
    assert [s.name for s in traced(program, perf.bind(program, feeds), 1)[0]] == names
    assert all(f"<td>{name}</td>" in notebook(program) for name in names)


def test_short_accounts_have_thelast_names(stack: Program) -> None:
    words = " ".join(str(stack.explain()).split())
    assert "left: f32[5,16] (norm); right: f32[48,16] (up.weight), transposed" in words, "not 0-3.norm"
    whole = " ".join(str(stack.explain(everything=True)).split())
    assert "left: f32[5,16] (layer_norm layers.0-3.norm)" in whole and "(constant layers.0-3.up.weight)" in whole
    several = last_names("transformer.{wpe,h.0.ln_1}")
    assert several == "transformer.{wpe,h.0.ln_1}" and last_names("a.b.{c.d,e}") == "b.{c.d,e}"


HLO = """HloModule m
ENTRY e {
  x.1 = f32[2,3] parameter(0)
  constant.9 = f32[3,2] constant({{1, 2}, {3, 4}, {5, 6}})
  ROOT dot.4 = f32[2,2] dot(x.1, constant.9), lhs_contracting_dims={1}, rhs_contracting_dims={0}%s
}"""


def test_a_literal_names_no_module() -> None:
    named = tilewright.compile(HLO % ', metadata={op_name="jit(f)/dot_general"}', budget_s=0)
    assert step_names(named) == ["jit(f)/dot_general"]
    assert step_names(tilewright.compile(HLO % "", budget_s=0)) == ["dot.4"]


def test_counts_are_the_same_in_every_report(stack: Program) -> None:
    explained, measured = stack.explain().facts, stack.perf(iterations=1).facts
    assert explained.counts == measured.counts and explained.layers == measured.layers
    assert [(g.name, g.steps, g.problem) for g in explained.groups] == [(g.name, g.steps, g.problem) for g in measured.groups]
    counts = explained.counts
    assert counts is not None and (counts.steps, counts.products, counts.groups, counts.product_groups) == (13, 9, 5, 4)
    assert counts.generated + counts.library + counts.fallback == counts.steps == len(measured.steps)
    assert all(g.basis == "measured" and g.least_us <= g.median_us <= g.most_us for g in measured.groups)
    assert sum(g.share for g in measured.groups) == pytest.approx(1, abs=1e-4)
    assert sum(g.total_us for g in measured.groups) == pytest.approx(sum(s.time_us for s in measured.steps), abs=0.1)


def test_a_step_of_a_library_is_counted_and_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_library(monkeypatch)
    report = explain_program(tilewright.compile(block(), budget_s=0), "g")
    (group,) = (g for g in report.groups if g.by == "fallback")
    assert report.counts is not None and report.counts.fallback == 1 and group.kind == "call"
    assert group.why == "no operation of the graph expresses it; fake_library runs it"
    assert all(bool(g.why) == (g.by != "generated") for g in report.groups)


def test_a_lone_operation_between_ranks_is_the_ranks_library_s() -> None:
    """No generated kernel raced for it, so none was slower."""
    met = Node(AllReduce(("tp",), (2,)), input_("x", F32, (4,)))
    step: Any = SimpleNamespace(decision=True, part=SimpleNamespace(nodes=[met]))
    assert why_not(step, "cpu") == "it is an operation between ranks alone, which their library does"


def test_times_without_a_run_say_how_they_are_known() -> None:
    program = tilewright.compile(parse("f32[64,96] @ f32[96,32] + bias"), budget_s=0)
    (group,) = program.explain().facts.groups
    assert group.basis == "predicted" and group.median_us == program.explain().facts.products[0].chosen.predicted_us
    assert "; nothing was timed: the budget had no time for it." in " ".join(str(program.explain()).split())
    (group,) = explain_program(program, "g").groups
    assert group.basis == "" and group.median_us is None and group.share is None and group.limit_us is None
    timed = tilewright.compile(parse("f32[64,96] @ f32[96,32] + bias"), budget_s=2)
    (group,) = timed.explain().facts.groups
    assert group.basis == "measured" and group.median_us == round(timed.steps[0].decision.time_us, 3)
    assert group.untimed == ""


def test_every_step_has_a_time_where_no_rate_was_measured(stack: Program) -> None:
    """Rates that the chip's data file states give it; its share counts, and a line says which steps were not timed."""
    timed = next(i for i, s in enumerate(stack.steps) if s.part.kind == "gemm")
    times = [Time(5.0, "measured") if i == timed else t for i, t in enumerate(expected_times(stack, stack.target))]
    groups = fold(stack, times, stack.target).groups
    assert stack.target.read_gbps == 0 and all(g.median_us and g.share for g in groups)
    assert sum(g.share for g in groups) == pytest.approx(1, abs=1e-4)
    norm = next(g for g in groups if g.kind == "norm")
    assert norm.basis == "predicted" and norm.untimed == "the budget had no time for it"
    said = untimed_words([(i, replace(g, untimed="" if g.kind == "gemm" else g.untimed)) for i, g in enumerate(groups, 1)])
    assert said == ["not timed: 1 (the budget had no time for it)"]
    product = explain_program(stack, "g", stack.target).products[0]
    assert (
        dict(short_sections(product, norm.untimed))["Done by"][0]
        .split(": ")[1]
        .startswith("nothing was timed, the budget had no time for it (")
    )


@pytest.mark.parametrize(
    ("keys", "kinds", "expected"),
    [
        ("", "", []),
        ("abc", "gng", []),
        ("gngngn", "gngngn", [Repeat(0, 3, 2)]),
        ("xgngngny", "ngngngng", [Repeat(1, 3, 2)]),
        ("nnnn", "nnnn", []),
        ("abcdabcdabce", "gngngngngngn", [Repeat(0, 3, 4)]),
        ("ababxcdecde", "gngngggnggn", [Repeat(0, 2, 2), Repeat(5, 2, 3)]),
        ("xabcdabce", "ngngngngn", [Repeat(1, 2, 4)]),
        ("abcaxy", "gnggng", []),
    ],
    ids=[
        "none",
        "no repetition",
        "all",
        "between others",
        "no product",
        "another end",
        "two stacks",
        "two layers",
        "too little alike",
    ],
)
def test_layers_are_runs_with_a_product(keys: str, kinds: str, expected: list[Repeat]) -> None:
    assert layers(keys, ["gemm" if k == "g" else "norm" for k in kinds]) == expected


def test_titles_have_no_numbers_but_extents() -> None:
    assert titled("s8[1,128] @ s8[128,64] * 0.041 + bias:f32 -> s8 scale=tensor") == (
        "s8[1,128] @ s8[128,64] * c + bias:f32 -> s8 scale=tensor"
    )
    joined = "f32[4,8] @ f32[8,6] { [0:3] * 8 as 2x2x3; [3:6] / -1e-05, maximum(0.5) }"
    assert titled(joined) == "f32[4,8] @ f32[8,6] { [0:3] * c as 2x2x3; [3:6] / c, maximum(c) }"
    assert titled("layer_norm x2, add -> f32[3]") == "layer_norm x2, add -> f32[3]"


def test_names_that_count_are_a_range() -> None:
    assert ranged(f"h.{i}.attn" for i in range(12)) == "h.0-11.attn"
    assert ranged(["h.0.up", "h.2.up"]) == "h.*.up" and ranged(["head"]) == "head"
    assert ranged(["h.1.norm", "h.2.norm", "norm"]) == "h.1-2.norm, norm"
    assert ranged(["a", "b", "c", "d"]) == "a, b, c and 1 more"
    assert together(["h.0.attn.q", "h.0.attn.k"]) == "h.0.attn.{q,k}" and together(["embed", "h.0.norm"]) == "embed, h.0.norm"
    assert plain("jit(f)/dot_general[precision=None out=int8]") == "jit(f)/dot_general"


def test_every_step_that_is_not_ours_has_its_reason() -> None:
    """A library's product, and an operation of torch: each stands in the text of both reports with a sentence."""

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.sort(x.double() @ w.double())[0]

    program = tilewright.compile(Model(), example_inputs=(torch.randn(8, 16), torch.randn(16, 8)), budget_s=0)
    facts = program.explain().facts
    assert facts.counts is not None and facts.counts.library == 1 and facts.counts.fallback >= 1
    assert all(g.why for g in facts.groups if g.by != "generated")
    for said in (str(program.explain()), str(program.perf(iterations=1))):
        words = " ".join(said.split())
        assert "Not in generated kernels, and why" in words and "generated kernels add up in f32 or s32, not f64" in words
        assert "aten.sort" in words and "torch runs it" in words and "1 in libraries" in words


def test_an_account_is_short_and_in_the_model_s_own_names() -> None:
    """A gated layer: both weights in one product, what follows in words, no type twice."""

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate = torch.nn.Linear(32, 48, bias=False), torch.nn.Linear(32, 48, bias=False)
            self.down = torch.nn.Linear(48, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    program = tilewright.compile(Gated().eval(), example_inputs=(torch.randn(8, 32),), budget_s=0)
    words = " ".join(str(program.explain()).split())
    assert "right: 2 x f32[48,32] (up.weight, gate.weight), side by side" in words or "(gate.weight, up.weight)" in words
    assert re.search(r"Folded multiply\(silu\(columns \d+:\d+\), columns \d+:\d+\)", words)
    assert re.search(r"1\. (up, gate|gate, up) Reads", words)
    assert "+ down.bias, + x" in words and "What you can change: nothing was found" in words
    assert len(str(program.explain()).splitlines()) < len(str(program.explain(everything=True)).splitlines())
