"""Every kind of advice is found in a model that shows its mistake, and not in one that does not."""

import dataclasses
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cli_programs import block, install_fake_library
from paths import ROOT

import tilewright
from tilewright.dtype import BF16, F32, S8
from tilewright.hardware.chips.x86_64_zen5 import CHIP as ZEN5
from tilewright.hardware.target import Chip
from tilewright.ir.build import const, convert, input_, map_
from tilewright.ir.graph import Graph, Node, toposort
from tilewright.ir.notation import parse
from tilewright.ir.ops import Attention, Dequantize, Quantize, gemm
from tilewright.program import Program
from tilewright.report.explain.advice import advise
from tilewright.report.explain.advice.case import Case
from tilewright.report.explain.explain import explain_program
from tilewright.report.explain.findings import Reasons
from tilewright.report.explain.folded import expected_times, fold
from tilewright.report.schema import Advice
from tilewright.schedule.search import OVER, Rejected

ROWS, WIDTH = 64, 128
# Rates as of a machine whose integer and 16-bit units are faster than that of f32: what tests say does not depend on the host.
RATES = {"s8": 4000.0, "bf16": 2000.0, "f32": 500.0, "f64": 250.0}


def compiled(*outputs: Node, origins: dict[Node, str] | None = None) -> Program:
    inputs = tuple(n for n in toposort(outputs) if n.op.name == "input")
    names = tuple(f"y{i}" for i in range(len(outputs)))
    return tilewright.compile(Graph("g", inputs, outputs, names, origins or {}), budget_s=0)


def module(forward: Callable[..., object], *inputs: torch.Tensor, **layers: torch.nn.Module) -> Program:
    """A program of a torch module with some layers, whose forward is given."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, layer in layers.items():
                self.add_module(name, layer)

        def forward(self, *x: torch.Tensor) -> object:
            return forward(self, *x)

    return tilewright.compile(Model().eval(), example_inputs=inputs, budget_s=0)


def advice(program: Program, chip: Chip | None = None) -> dict[str, Advice]:
    """The account's advice by kind, each kind once. The cost model takes this chip, if it is given."""
    target = dataclasses.replace(program.target, chip=chip or program.target.chip)
    ceilings = dataclasses.replace(target, peak_gops=RATES, read_gbps=20.0, copy_gbps=20.0)
    found = explain_program(program, "g", ceilings).advice
    assert len({a.kind for a in found}) == len(found)
    assert [a.saves_us or 0.0 for a in found] == sorted((a.saves_us or 0.0 for a in found), reverse=True)
    assert all(a.why and a.change and a.basis and a.steps and a.where for a in found)
    return {a.kind: a for a in found}


def linear(inputs: int, outputs: int, bias: bool = True) -> torch.nn.Linear:
    return torch.nn.Linear(inputs, outputs, bias)


def codes(*shape: int) -> Node:
    return const(torch.randint(-128, 128, shape, dtype=torch.int8))


def scale(*shape: int) -> Node:
    return const(torch.rand(shape) * 0.01 + 0.001)


def quantised(x: Node, s: Node) -> Node:
    return Node(Dequantize(F32), Node(Quantize(S8), x, s), s)


def weight(k: int, n: int) -> Node:
    return Node(Dequantize(F32), codes(k, n), scale(n))


X = torch.randn(ROWS, WIDTH)


def test_an_operation_that_runs_in_the_source_s_library(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_library(monkeypatch)
    found = advice(tilewright.compile(block(), budget_s=0))["runs-in-torch"]
    assert found.title == "Frobnicate runs in fake_library" and found.where == ["net/Frobnicate"]
    assert found.why == "no operation of the graph expresses it; fake_library runs it"
    assert found.basis == "the least time that the machine's rates allow" and found.saves_us
    assert advice(tilewright.compile(parse("f32[64,96] @ f32[96,32] + bias"), budget_s=0)) == {}


def test_where_the_time_is_over_no_more_is_looked_for_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_library(monkeypatch)
    program = tilewright.compile(block(), budget_s=0)
    case = Case(program, fold(program, expected_times(program, None), None), None, Reasons(program))
    every, said = advise(case)
    assert [a.kind for a in every] == ["runs-in-torch", "unfused-step"] and said == ""
    assert advise(case, ends=0.0) == ([], "The time was over: 18 of 18 kinds of advice were not looked for to the end.")
    clock = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    some, said = advise(case, ends=4.0)
    assert [a.kind for a in some] == ["runs-in-torch"]
    assert said == "The time was over: 17 of 18 kinds of advice were not looked for to the end."


def test_an_operation_of_torch_that_has_no_kernel() -> None:
    program = module(lambda m, x: m.b(torch.sort(m.a(x))[0]), X, a=linear(WIDTH, WIDTH), b=linear(WIDTH, WIDTH))
    found = advice(program)["runs-in-torch"]
    assert "sort" in found.title and "runs in torch" in found.title
    assert advice(module(lambda m, x: m.b(torch.relu(m.a(x))), X, a=linear(WIDTH, WIDTH), b=linear(WIDTH, WIDTH))) == {}


def test_a_step_that_only_quantises() -> None:
    x, s, w = input_("x", F32, (64, 96)), const(0.5, F32), input_("w", F32, (96, 32))
    made = Node(Quantize(S8), x, s)
    program = compiled(gemm(Node(Dequantize(F32), made, s), w), origins={made: "net/QuantizeLinear"})
    found = advice(program)["unfused-step"]
    assert found.title == "quantize is a step of its own" and found.where == ["net/QuantizeLinear"] and found.saves_us
    assert "quantize is no view, dequantisation or widening cast" in found.why
    assert "unfused-step" not in advice(compiled(gemm(x, w)))


def layer(*, pair: str) -> Program:
    """An integer layer; QuantizeLinear and DequantizeLinear stand "before" or "behind" its bias, or "twice" behind it."""
    x, b = input_("x", S8, (ROWS, WIDTH)), const(torch.randn(WIDTH))
    product = gemm(Node(Dequantize(F32), x, const(0.01, F32)), weight(WIDTH, WIDTH))
    if pair == "before":
        product = quantised(product, const(0.02, F32))
    value = map_("add", product, b)
    if pair == "twice":
        value = quantised(value, const(0.04, F32))
    return compiled(Node(Quantize(S8), value, const(0.03, F32)))


def test_a_qdq_pair_between_a_product_and_its_bias() -> None:
    found = advice(layer(pair="before"))
    assert set(found) == {"qdq-in-epilogue"}
    assert found["qdq-in-epilogue"].title == "a QDQ pair between MatMul and its bias" and found["qdq-in-epilogue"].saves_us
    assert "and what the cost model expects with and without it" in found["qdq-in-epilogue"].basis
    assert advice(layer(pair="behind")) == {}


def test_a_value_that_is_quantised_twice_in_a_row() -> None:
    found = advice(layer(pair="twice"))
    assert set(found) == {"quantised-twice"}
    assert found["quantised-twice"].title == "a value is quantised twice in a row behind the bias"


def attention(mask: float | None, *, kept: bool = False) -> Program:
    q = torch.randn(1, 4, 64, 32)

    def forward(_: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
        scores = q @ k.transpose(-1, -2) / 8
        if mask is not None:
            scores = scores + torch.triu(torch.full((64, 64), mask), 1)
        weights = scores.softmax(-1)
        return (weights @ v, weights) if kept else weights @ v

    return module(forward, q, q.clone(), q.clone())


def test_a_mask_that_hides_causality_behind_a_finite_number() -> None:
    for number in (-100.0, -1e4, -1e9):
        found = advice(attention(number))
        assert (
            set(found) == {"finite-causal-mask"}
            and f"{number:g} to the scores of later keys" in found["finite-causal-mask"].why
        )
    exact = attention(torch.finfo(torch.float32).min)
    (node,) = (s.part.nodes[0] for s in exact.steps)
    assert isinstance(node.op, Attention) and node.op.causal == "upper", "where it is exact it is recognised"
    for clean in (None, -3.0, float("-inf")):
        assert advice(attention(clean)) == {}


def test_a_finite_mask_is_found_among_others() -> None:
    """Older exporters write it so: a causal constant and the mask of the padding, added up."""
    q, pad = torch.randn(1, 4, 64, 32), torch.ones(1, 64, dtype=torch.int64)

    def forward(_: torch.nn.Module, q: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        mask = torch.triu(torch.full((64, 64), -1e4), 1) + (1.0 - pad[:, None, None, :].float()) * -1e4
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    assert "finite-causal-mask" in advice(module(forward, q, pad))


def test_attention_whose_weights_are_read() -> None:
    found = advice(attention(None, kept=True))
    assert set(found) == {"scores-kept"} and found["scores-kept"].steps == [0, 1, 2]
    assert "the softmax inside this attention is also read elsewhere" in found["scores-kept"].why


def test_attention_over_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (input_(n, S8, (1, 4, 64, 32)) for n in "qkv")
    read = [Node(Dequantize(F32), x, const(0.02, F32)) for x in (q, k, v)]
    program = compiled(Node(Attention(0.25), *read))
    why = (
        "queries, keys, values are integer codes, dequantised and multiplied as floats: no attention kernel multiplies integers"
    )
    assert advice(program) == {}, "left in float they would take as long"
    assert why in " ".join(str(program.explain()).split())
    for rates, costs in (
        ({"f32": 100.0, "s8": 400.0}, "that costs 15.7 µs by this machine's rates, and no change of the model saves it"),
        ({"f32": 100.0}, "by this machine's rates that costs no time, and no change of the model saves it"),
    ):
        ceilings = dataclasses.replace(program.target, peak_gops=rates, read_gbps=1e6)
        assert explain_program(program, "g", ceilings).products[0].left == [f"{why}; {costs}"]
    unknown = "what that costs is not known, as this machine's rates were not measured; no change of the model saves it"
    assert explain_program(program, "g").products[0].left == [f"{why}; {unknown}"]
    on_gpu = dataclasses.replace(program.target, kind="cuda")
    monkeypatch.setitem(vars(program), "target", on_gpu)
    found = advice(program)
    assert set(found) == {"attention-of-codes"} and found["attention-of-codes"].why == why
    assert found["attention-of-codes"].saves_us is None and "--fp8-attention" in found["attention-of-codes"].change
    q, k, v = (input_(n, F32, (1, 4, 64, 32)) for n in "qkv")
    clean = compiled(Node(Attention(0.25), q, k, v))
    assert advice(clean) == {} and not explain_program(clean, "g").products[0].left


def integer(x: Node, w: Node) -> Node:
    return gemm(Node(Dequantize(F32), x, const(0.01, F32)), w)


def test_a_scale_along_k() -> None:
    x = input_("x", S8, (ROWS, WIDTH))
    along = Node(Dequantize(F32), codes(WIDTH, WIDTH), scale(WIDTH, 1))
    found = advice(compiled(integer(x, along)))
    assert set(found) == {"scale-along-k"} and found["scale-along-k"].saves_us
    assert found["scale-along-k"].why.startswith("a scale varies along K, so the codes are dequantised first")
    assert advice(compiled(integer(x, weight(WIDTH, WIDTH)))) == {}


def test_a_product_left_in_float_in_a_quantised_model() -> None:
    x, y = input_("x", S8, (ROWS, WIDTH)), input_("y", F32, (ROWS, WIDTH))
    found = advice(compiled(integer(x, weight(WIDTH, WIDTH)), gemm(y, weight(WIDTH, 2 * WIDTH))))
    assert set(found) == {"product-left-in-float"} and len(found["product-left-in-float"].steps) == 1
    assert "1 other products of this model multiply codes" in found["product-left-in-float"].why
    assert "product-left-in-float" not in advice(compiled(gemm(y, weight(WIDTH, 2 * WIDTH)))), "weights alone are on purpose"


def test_a_constant_weight_that_is_widened() -> None:
    x = input_("x", BF16, (1, 512))
    wide = Node(Dequantize(BF16), codes(512, 512), convert(scale(512), BF16))
    found = advice(compiled(gemm(x, wide)))
    assert set(found) == {"widened-weight"} and found["widened-weight"].saves_us
    assert "the memory sets the time" in found["widened-weight"].why
    assert advice(compiled(integer(input_("x", S8, (1, 512)), weight(512, 512)))) == {}


def test_a_shape_that_wastes_tiles() -> None:
    found = advice(module(lambda m, x: m.a(x), X, a=linear(WIDTH, 65)), ZEN5)
    assert set(found) == {"wasted-tiles"} and "65 columns" in found["wasted-tiles"].title
    assert re.search(r"partly empty: \d+ % of the time", found["wasted-tiles"].why)
    assert found["wasted-tiles"].saves_us is None, "padded it takes as long"
    for width in (2, 64, 96, 1000):
        assert advice(module(lambda m, x: m.a(x), X, a=linear(WIDTH, width)), ZEN5) == {}
    few = tilewright.compile(linear(64, 500).eval(), example_inputs=(torch.randn(16, 64),), budget_s=0, threads=2)
    assert advice(few, ZEN5) == {}, "two threads share more columns out better, but 500 leave a fortieth of their tiles empty"


def test_a_product_in_f64() -> None:
    model = {"a": linear(WIDTH, WIDTH).double()}
    found = advice(module(lambda m, x: m.a(x.double()), X, **model))
    assert set(found) == {"product-in-f64"} and found["product-in-f64"].saves_us
    assert advice(module(lambda m, x: m.a(x), X, a=linear(WIDTH, WIDTH))) == {}


def test_an_epilogue_in_f64() -> None:
    """Whoever multiplies: what follows runs in torch where a library does, and where a product is taken apart."""

    def careful(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(m.a(x).double()).float()

    layers = {"a": linear(WIDTH, WIDTH)}
    program = module(careful, X, **layers)
    (step,) = program.steps
    assert step.decision is not None
    for candidate in (step.decision.kernel.candidate, "onednn"):
        kernel = dataclasses.replace(step.decision.kernel, candidate=candidate)
        program.swap((dataclasses.replace(step, decision=dataclasses.replace(step.decision, kernel=kernel, time_us=900.0)),))
        found = advice(program)
        assert set(found) == {"epilogue-in-f64"} and found["epilogue-in-f64"].title == "gelu behind a product in f64"
        assert found["epilogue-in-f64"].saves_us and found["epilogue-in-f64"].where == ["a"]
    assert advice(module(lambda m, x: torch.nn.functional.gelu(m.a(x)), X, **layers)) == {}


def test_a_product_of_mixed_types() -> None:
    x, w = input_("x", F32, (ROWS, WIDTH)), const(torch.randn(WIDTH, WIDTH).bfloat16())
    found = advice(compiled(gemm(x, convert(w, F32))))
    assert set(found) == {"mixed-operands"} and "its left operand is f32" in found["mixed-operands"].why
    assert advice(compiled(gemm(convert(x, BF16), w))) == {}


def test_products_of_one_value_that_scales_keep_apart() -> None:
    x = input_("x", F32, (ROWS, WIDTH))
    value = map_("tanh", map_("add", x, const(1.0, F32)))

    def both(first: float, second: float) -> Program:
        return compiled(*(gemm(quantised(value, const(s, F32)), weight(WIDTH, WIDTH)) for s in (first, second)))

    found = advice(both(0.01, 0.02))
    assert "siblings-apart" in found and found["siblings-apart"].why == "each quantises what they read with a scale of its own"
    assert len(found["siblings-apart"].steps) == 2 and "as one product" in found["siblings-apart"].basis
    assert "siblings-apart" not in advice(both(0.01, 0.01))


def test_one_weight_for_several_products() -> None:
    one, two = torch.randn(1, 512), torch.randn(1, 512)
    program = module(lambda m, x, y: (torch.relu(m.a(x)), torch.tanh(m.a(y))), one, two, a=linear(512, 512))
    found = advice(program)
    assert set(found) == {"weight-read-again"}
    saved = found["weight-read-again"].saves_us
    assert saved is not None and 0 < saved < 52.4288, "what reading 1 MB at 20 GB/s takes, which neither step does"
    assert advice(module(lambda m, x: m.a(x), torch.cat((one, two)), a=linear(512, 512))) == {}
    assert advice(module(lambda m, x, _: m.a(torch.relu(m.a(x))), one, two, a=linear(512, 512))) == {}, "one after the other"


def test_an_adapter_that_is_not_merged() -> None:
    layers = {"w": linear(WIDTH, WIDTH), "down": linear(WIDTH, 8, False), "up": linear(8, WIDTH, False)}
    found = advice(module(lambda m, x: torch.relu(m.w(x) + m.up(m.down(x)) * 2.0), X, **layers))
    assert set(found) == {"adapter-not-merged"} and found["adapter-not-merged"].where == ["down, up"]
    assert advice(module(lambda m, x: torch.relu(m.w(x)), X, w=layers["w"])) == {}


def test_two_linear_layers_in_a_row() -> None:
    layers = {"up": linear(WIDTH, 4 * WIDTH), "down": linear(4 * WIDTH, WIDTH)}
    found = advice(module(lambda m, x: m.down(m.up(x)), X, **layers))
    assert set(found) == {"linear-chain"} and found["linear-chain"].saves_us
    assert advice(module(lambda m, x: m.down(torch.relu(m.up(x))), X, **layers)) == {}
    narrow = {"up": linear(WIDTH, 8), "down": linear(8, WIDTH)}
    assert advice(module(lambda m, x: m.down(m.up(x)), X, **narrow)) == {}, (
        "of low rank on purpose: one product would take longer"
    )


TOKENS = torch.randint(0, 500, (1, 64))


class Language(torch.nn.Module):
    """A model of a vocabulary of 500: an embedding, attention, a head."""

    def __init__(self, causal: bool, last: bool, outputs: int = 500) -> None:
        super().__init__()
        self.causal, self.last = causal, last
        self.embed, self.qkv = torch.nn.Embedding(500, 64), torch.nn.Linear(64, 192)
        self.head = torch.nn.Linear(64, outputs, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = (t.view(*ids.shape, 2, 32).transpose(1, 2) for t in self.qkv(x).split(64, -1))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + found.transpose(1, 2).reshape(x.shape)
        return self.head(x[:, -1:] if self.last else x)


def test_logits_of_all_positions() -> None:
    def asked(ids: torch.Tensor, **how: Any) -> dict[str, Advice]:
        return advice(tilewright.compile(Language(**how).eval(), example_inputs=(ids,), budget_s=0, threads=2), ZEN5)

    found = asked(TOKENS, causal=True, last=False)
    assert set(found) == {"logits-of-all-positions"} and found["logits-of-all-positions"].saves_us
    said = found["logits-of-all-positions"]
    assert said.title == "logits for all 64 positions" and said.where == ["head"] and "500 logits for each of 64" in said.why
    assert said.change.startswith("does the caller read only the last ones? ") and "`logits_to_keep=1`" in said.change
    assert set(asked(torch.randint(0, 500, (2, 16)), causal=True, last=False)) == {"logits-of-all-positions"}, "a batch"
    assert asked(TOKENS, causal=True, last=True) == {}, "one position"
    assert asked(TOKENS[:, :1], causal=True, last=False) == {}, "a prompt of one"
    assert asked(TOKENS, causal=False, last=False) == {}, "an encoder's head reads every position, as for masked words"
    assert asked(TOKENS, causal=True, last=False, outputs=9) == {}, "a tag for each word"


HEADS = [("GPT2LMHeadModel", {}), ("LlamaForCausalLM", {"intermediate_size": 256})]
OTHERS = [("BertForMaskedLM", {"intermediate_size": 256}), ("GPT2ForTokenClassification", {}), ("GPT2Model", {})]


@pytest.mark.parametrize(("name", "more"), [*HEADS, *OTHERS])
def test_heads_of_language_models(name: str, more: dict[str, int]) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SIZES, **more)).eval()
    cached = {} if "Bert" in name else {"use_cache": False}

    def every(m: Any, ids: torch.Tensor) -> torch.Tensor:
        return m.model(ids, **cached)[0]

    def last(m: Any, ids: torch.Tensor) -> torch.Tensor:
        return m.model(ids, logits_to_keep=1, **cached)[0]

    asks = {"logits-of-all-positions"} if (name, more) in HEADS else set[str]()
    assert set(advice(module(every, TOKENS, model=model))) == asks
    if asks:
        assert advice(module(last, TOKENS, model=model)) == {}


BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a square": lambda h: h * h,
    "a polynomial": lambda h: h * (h + 1),
    "a square of what is left": lambda h: (1 - h) * h,
    "whole numbers": lambda h: (h * 8).to(torch.int32).to(torch.float32),
}


def test_two_layers_are_linear_with_a_number_between() -> None:
    layers = {"up": linear(WIDTH, WIDTH, False), "down": linear(WIDTH, WIDTH, False)}
    assert "linear-chain" in advice(module(lambda m, x: m.down(m.up(x) * 2.0), X, **layers))
    layers = {"w": linear(WIDTH, WIDTH, False), "down": linear(WIDTH, 8, False), "up": linear(8, WIDTH, False)}
    assert "adapter-not-merged" in advice(module(lambda m, x: m.w(x) + m.up(m.down(x) * 2.0), X, **layers))


@pytest.mark.parametrize("name", BETWEEN)
def test_two_layers_are_not_linear_with_this_between(name: str) -> None:
    layers = {"up": linear(WIDTH, WIDTH, False), "down": linear(WIDTH, WIDTH, False)}
    assert "linear-chain" not in advice(module(lambda m, x: m.down(BETWEEN[name](m.up(x))), X, **layers))
    layers = {"w": linear(WIDTH, WIDTH, False), "down": linear(WIDTH, 8, False), "up": linear(8, WIDTH, False)}
    assert "adapter-not-merged" not in advice(module(lambda m, x: m.w(x) + m.up(BETWEEN[name](m.down(x))), X, **layers))


def test_layers_whose_value_between_is_read_elsewhere_are_not_merged() -> None:
    layers = {"a": linear(WIDTH, WIDTH, False), "b": linear(WIDTH, WIDTH, False), "c": linear(WIDTH, WIDTH, False)}

    def kept(m: Any, x: torch.Tensor) -> object:
        h = m.a(x)
        return m.b(h), h

    def gated(m: Any, x: torch.Tensor) -> object:
        return m.c(m.a(x) * m.b(x))

    def residual(m: Any, x: torch.Tensor) -> object:
        h = m.a(x)
        return m.b(h) + h

    for forward in (kept, gated, residual):
        assert "linear-chain" not in advice(module(forward, X, **layers)), forward


def test_an_adapter_that_cannot_be_merged() -> None:
    layers = {"w": linear(WIDTH, WIDTH, False), "down": linear(WIDTH, 8, False), "up": linear(8, WIDTH, False)}

    def kept(m: Any, x: torch.Tensor) -> object:
        h = m.down(x)
        return m.w(x) + m.up(h), h

    def gate(m: Any, x: torch.Tensor) -> object:
        return m.w(x) * m.up(m.down(x))

    def activated(m: Any, x: torch.Tensor) -> object:
        return torch.relu(m.w(x)) + m.up(m.down(x))

    def read_twice(m: Any, x: torch.Tensor) -> object:
        y = m.w(x)
        return (y + m.up(m.down(x))) * y

    for forward in (kept, gate, activated, read_twice):
        assert "adapter-not-merged" not in advice(module(forward, X, **layers)), forward


def test_a_search_that_was_cut_short() -> None:
    program = tilewright.compile(parse("f32[64,96] @ f32[96,32] + bias"), budget_s=0)
    (step,) = program.steps
    assert step.decision is not None
    by_torch = dataclasses.replace(step.decision.kernel, candidate="aten")
    late = tuple(Rejected(c, "untried", OVER) for c in ("llvm", "split"))
    decision = dataclasses.replace(step.decision, kernel=by_torch, rejected=late)
    program.swap((dataclasses.replace(step, decision=decision),))
    found = advice(program)
    assert set(found) == {"search-cut-short"} and "--budget" in found["search-cut-short"].change
    assert found["search-cut-short"].basis.startswith("at most the time that the cost model expects less the least time")
    program.swap((dataclasses.replace(step, decision=dataclasses.replace(decision, time_us=50.0, measured=True)),))
    found = advice(program)["search-cut-short"]
    assert found.saves_us is not None and 0 < found.saves_us < 50
    assert found.basis == "at most its measured time less the least time that the machine's rates allow"
    program.swap((dataclasses.replace(step, decision=dataclasses.replace(decision, time_us=0.001, measured=True)),))
    assert advice(program)["search-cut-short"].saves_us is None, "it is as fast as the machine allows"
    decision = dataclasses.replace(decision, rejected=(Rejected("llvm", "refused", "an extent is zero"),))
    program.swap((dataclasses.replace(step, decision=decision),))
    assert advice(program) == {}, "a library that does what no generated kernel takes is no mistake of the model"


SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}
MLP, FEW_KEYS = {"intermediate_size": 256}, {"intermediate_size": 256, "num_key_value_heads": 2}
ENCODERS: dict[str, dict[str, int]] = {
    "Bert": MLP,
    "Roberta": {**MLP, "max_position_embeddings": 130},
    "DistilBert": {"hidden_dim": 256},
    "Electra": {**MLP, "embedding_size": 64},
    "Albert": {**MLP, "embedding_size": 64},
    "MPNet": MLP,
}
DECODERS: dict[str, dict[str, int]] = {
    "GPT2": {},
    "Llama": MLP,
    "OPT": {"ffn_dim": 256, "word_embed_proj_dim": 128},
    "Mistral": FEW_KEYS,
    "Qwen2": FEW_KEYS,
    "Qwen3": {**FEW_KEYS, "head_dim": 32},
    "Gemma": {**FEW_KEYS, "head_dim": 32},
    "Phi": MLP,
    "Phi3": {**MLP, "pad_token_id": 0},
    "GPTNeoX": MLP,
    "Falcon": {},
    "Bloom": {},
}
ALWAYS = ("Bert", "GPT2", "Llama")
ZOO = [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.conformance) for n in (*ENCODERS, *DECODERS)]


@pytest.mark.parametrize("name", ZOO)
def test_nothing_is_claimed_of_models_as_they_are(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = SIZES | (ENCODERS.get(name) or DECODERS.get(name, {}))
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes)).eval()

    def forward(m: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return m.model(ids, **({} if name in ENCODERS else {"use_cache": False})).last_hidden_state

    assert advice(module(forward, torch.randint(0, 500, (1, 64)), model=model)) == {}


def test_the_docs_name_every_kind() -> None:
    folder = ROOT / "src" / "tilewright" / "report" / "explain" / "advice"
    source = "".join(path.read_text("utf-8") for path in sorted(folder.glob("*.py")))
    kinds = set(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+)+)"', source))
    assert len(kinds) >= 21, kinds
    text = (ROOT / "docs" / "reading-explain.md").read_text("utf-8")
    assert all(f"| `{kind}` |" in text for kind in kinds)
