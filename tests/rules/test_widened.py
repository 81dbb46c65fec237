"""Products of narrow floats that were widened first are taken as stored; a float model in 16 bits is made of such products."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_programs import FAST, install_ceilings, invoke
from rule_checks import assert_exact, assert_no_growth, assert_order_is_free, fired, gemms, graph_of, refusals

import models
import tilewright
from tilewright.compiler import optimise
from tilewright.dtype import BF16, F8E4M3FN, F8E5M2, F16, F32, F64, S4, DType
from tilewright.errors import InputError
from tilewright.frontends import load
from tilewright.ir.anchor import operands_of
from tilewright.ir.build import const, convert, input_, map_, reshape, slice_, swap_last
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Attention, Gemm, Map, Quantize, gemm
from tilewright.report.measure.accuracy import accuracy
from tilewright.report.measure.inputs import make_feeds
from tilewright.rules.calibrate import calibrate, quantize, scheme
from tilewright.rules.half import half, in_half
from tilewright.runtime.partition import partition

RULE = "multiply_narrow_floats_as_stored"


def widened(a: DType, b: DType, *, turned: bool = False, acc: DType = F32) -> Graph:
    x = convert(input_("x", a, (6, 12)), acc)
    w = convert(input_("w", b, (8, 12) if turned else (12, 8)), acc)
    return graph_of(map_("tanh", gemm(x, swap_last(w) if turned else w)))


def multiplied(graph: Graph) -> tuple[DType, DType]:
    (node,) = gemms(graph)
    lhs, rhs = operands_of(node)
    return lhs.dtype, rhs.dtype


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("a", "b"), [(F16, F16), (BF16, BF16), (F8E4M3FN, F8E5M2)])
def test_what_was_widened_is_multiplied_as_stored(a: DType, b: DType, turned: bool) -> None:
    before = widened(a, b, turned=turned)
    after = assert_order_is_free(before, orders=4)
    assert multiplied(after) == (a, b) and fired(before, RULE) == 1
    assert_exact(before, after)
    assert_no_growth(before, after)


def test_parts_of_what_was_widened() -> None:
    whole = convert(input_("x", BF16, (6, 24)), F32)
    before = graph_of(gemm(slice_(whole, 1, 12, 24), convert(const(torch.randn(12, 8).to(torch.bfloat16)), F32)))
    after = optimise(before)
    assert multiplied(after) == (BF16, BF16)
    assert_exact(before, after)


@pytest.mark.parametrize(("a", "b"), [(F16, BF16), (F16, F32), (F8E4M3FN, F16)])
def test_pairs_that_no_matrix_unit_takes_stay(a: DType, b: DType) -> None:
    before = widened(a, b)
    assert fired(before, RULE) == 0 and multiplied(optimise(before)) == (F32, F32)
    if b is not F32:
        assert f"no matrix unit multiplies {a} by {b}" in refusals(before, RULE)


def test_a_product_in_f64_stays() -> None:
    assert fired(widened(F16, F16, acc=F64), RULE) == 0


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("models")
    config = {"vocab_size": 503, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    return load(models.write_model("bert", "f32", folder, batch=2, sequence=16, layers=2, config=config))


def feeds(graph: Graph) -> dict[str, torch.Tensor]:
    return {f.shown.name: f.value for f in make_feeds(graph)}


def error(graph: Graph, of: Graph) -> float:
    got, want = evaluate(graph, feeds(graph))[0], evaluate(of, feeds(of))[0]
    assert got.dtype is want.dtype is torch.float32
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize(("to", "bound"), [(F16, 2e-3), (BF16, 2e-2)])
def test_a_model_in_half_multiplies_and_attends_in_half(bert: Graph, to: DType, bound: float) -> None:
    made = in_half(bert, to)
    whole = optimise(made)
    assert 0 < error(made, bert) < bound and 0 < error(whole, bert) < bound
    products = [n for n in whole.nodes() if isinstance(n.op, Gemm)]
    attentions = [n for n in whole.nodes() if isinstance(n.op, Attention)]
    assert len(products) == 8 and len(attentions) == 2
    assert {o.dtype for n in products for o in operands_of(n)} == {to}
    assert {o.dtype for n in attentions for o in operands_of(n)[:3]} == {to}
    kinds = [p.kind for p in partition(whole)]
    assert kinds.count("gemm") + kinds.count("attention") + kinds.count("norm") == 2 * 7 + 1


def test_quantised_products_stay_quantised(bert: Graph) -> None:
    quantised, _ = quantize(bert, scheme("int8"), calibrate(bert, [feeds(bert)]))
    made = in_half(quantised, F16)
    assert error(made, quantised) < 0.05
    operands = [o.dtype.name for n in optimise(made).nodes() if isinstance(n.op, Gemm) for o in operands_of(n)]
    assert operands == ["s8"] * 16


@pytest.mark.parametrize("views", [False, True])
def test_a_gelu_that_is_quantised_at_once_is_one_of_f16(views: bool) -> None:
    x, w = input_("x", F32, (4, 32)), const(torch.randn(32, 16, generator=torch.Generator().manual_seed(0)), F32)

    def graph(fn: str, *, other: bool = False) -> Graph:
        value = map_(fn, gemm(x, w, out_dtype=F32))
        code = Node(Quantize(F8E4M3FN), reshape(value, (2, 2, 16)) if views else value, const(0.02, F32))
        outputs = (code, map_("abs", value)) if other else (code,)
        return Graph("g", (x,), outputs, tuple("yz"[: len(outputs)]))

    def types(graph: Graph, to: DType) -> set[DType]:
        return {n.dtype for n in in_half(graph, to).nodes() if isinstance(n.op, Map) and n.op.fn.startswith("gelu")}

    assert types(graph("gelu"), F16) == types(graph("gelu_tanh"), F16) == {F16}
    assert types(graph("gelu"), BF16) == types(graph("gelu", other=True), F16) == {F32}
    assert not types(graph("tanh"), F16)


def test_a_weight_that_alone_is_quantised_is_dequantised_to_half(bert: Graph) -> None:
    quantised, _ = quantize(bert, scheme("w4", group=32), calibrate(bert, [feeds(bert)]))
    made = in_half(quantised, BF16)
    assert error(made, quantised) < 2e-2
    products = [n for n in optimise(made).nodes() if isinstance(n.op, Gemm)]
    assert {o.dtype for n in products for o in operands_of(n)} == {BF16}
    assert any(S4 is s.dtype for n in products for s in n.src)


def test_attention_of_a_model_that_spells_it_out_is_quantised_when_asked(bert: Graph) -> None:
    how = tilewright.Quantization(scheme("fp8", attention=True), [feeds(bert)])
    program = tilewright.compile(bert, half="f16", budget_s=0, quantize=how)
    attentions = [n for n in program.graph.nodes() if isinstance(n.op, Attention)]
    assert len(attentions) == 2 and {s.dtype for n in attentions for s in n.src[:3]} == {F8E4M3FN}
    drawn = make_feeds(bert)
    losses = accuracy(bert, program, program.layers, drawn)
    assert len(losses.layers) == 12 and all(0 < x.error < 0.2 for x in (*losses.layers, *losses.outputs))


def test_compile_takes_it_and_names_what_is_none(bert: Graph) -> None:
    assert half("bf16") is BF16
    with pytest.raises(InputError, match="'f32' is no float of 16 bits"):
        tilewright.compile(bert, half="f32", budget_s=0)
    layers = tilewright.compile(bert, half="f16", budget_s=0, quantize=tilewright.Quantization(scheme("int8"), [feeds(bert)]))
    inside = set(layers.source.nodes())
    assert len(layers.layers) == 12 and len(layers.source.outputs) == 1
    assert all(isinstance(layer.after, Node) and layer.after.op.name == "gemm" for layer in layers.layers)
    assert sum(layer.after in inside for layer in layers.layers) == 12


def test_the_command_line_runs_a_model_in_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_ceilings(monkeypatch)
    config = {"vocab_size": 101, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    file = models.write_model("bert", "f32", tmp_path, batch=1, sequence=8, layers=1, config=config)
    assert "f16[" in invoke("explain", file, "--fp16", *FAST).stdout
    done = invoke("verify", file, "--bf16", "--int8", *FAST)
    assert done.exit_code == 0 and "Verified" in done.stdout
    both = invoke("verify", file, "--bf16", "--fp16")
    assert both.exit_code == 2 and "--fp16 and --bf16 exclude each other" in both.stderr
