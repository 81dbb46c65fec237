"""The rule that leaves out roundings inside a kernel: where it fires, what it changes, and that nobody gets it unasked."""

import pytest
import torch
from rule_checks import arithmetic, assert_close, assert_order_is_free, fired, graph_of, results, staged, steps, traffic

from tilewright import compile
from tilewright.compiler import EXCESS_PRECISION, STAGES, optimise
from tilewright.dtype import BF16, F8E4M3FN, F16, F32, F64, S4, S8, U4
from tilewright.ir.anchor import operands_of, stores_of
from tilewright.ir.build import const, convert, input_, map_
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node, toposort
from tilewright.ir.ops import Attention, Convert, Dequantize, Gemm, gemm


def _program(narrow, out=None):
    a, b, bias = input_("a", F32, (5, 32)), input_("b", F32, (32, 7)), input_("bias", F32, (7,))
    rounded = convert(convert(gemm(a, b), narrow), F32)
    result = map_("add", rounded, bias)
    return Graph("precision", (a, b, bias), (result if out is None else convert(result, out),), ("y",))


def _roundings(graph):
    (anchor,) = [n for n in graph.nodes() if isinstance(n.op, Gemm)]
    return sum(isinstance(n.op, Convert) for n in toposort(stores_of(anchor)))


@pytest.mark.parametrize("narrow", [F16, BF16])
def test_a_rounding_between_steps_is_dropped_only_when_asked(narrow):
    graph = _program(narrow)
    assert _roundings(optimise(graph)) == 2
    dropped = optimise(graph, excess_precision=True)
    assert _roundings(dropped) == 0 and len(dropped.nodes()) <= len(optimise(graph).nodes())
    rng = torch.Generator().manual_seed(0)
    feeds = {n.op.label: torch.randn(*n.shape, generator=rng) for n in graph.inputs}
    exact = feeds["a"].double() @ feeds["b"].double() + feeds["bias"].double()
    errors = [float((evaluate(g, feeds)[0].double() - exact).abs().max()) for g in (graph, dropped)]
    assert errors[1] < errors[0] / 100


def test_what_is_stored_and_what_was_meant_to_be_8_bits_stays():
    stored = optimise(_program(F16, F16), excess_precision=True)
    assert stored.outputs[0].dtype is F16 and _roundings(stored) == 1
    assert _roundings(optimise(_program(S8), excess_precision=True)) == 2


def test_compile_takes_it():
    graph = _program(BF16)
    a, b, bias = torch.randn(5, 32), torch.randn(32, 7), torch.randn(7)
    plain = compile(graph, budget_s=0)(a, b, bias)
    more = compile(graph, budget_s=0, excess_precision=True)(a, b, bias)
    exact = (a.double() @ b.double() + bias.double()).float()
    assert torch.allclose(more, exact, atol=1e-4) and not torch.allclose(plain, exact, atol=1e-4)


RULE = "drop_rounding_between_steps"


def _settled(*outputs):
    graph = graph_of(*outputs)
    plain, more = staged(graph), staged(graph, *STAGES, EXCESS_PRECISION)
    assert len(steps(more)) == len(steps(plain)) and traffic(more) <= traffic(plain) and arithmetic(more) == arithmetic(plain)
    assert [o.type for o in more.outputs] == [o.type for o in plain.outputs]
    return graph, plain, more


A, B, BIAS = input_("a", F16, (5, 32)), input_("b", F16, (32, 7)), input_("bias", F16, (7,))


def _layer(fn="tanh"):
    """A linear layer in f16 whose activation is taken in f32, as torch writes it."""
    y = map_("add", gemm(A, B, out_dtype=F16), BIAS)
    return convert(map_(fn, convert(y, F32)), F16)


def test_it_fires_in_its_own_stage_alone():
    y = map_("tanh", convert(convert(gemm(input_("a", F32, (5, 32)), input_("b", F32, (32, 7))), F16), F32))
    graph, plain, more = _settled(y)
    assert fired(graph, RULE) == 0 and fired(graph, RULE, *STAGES, EXCESS_PRECISION) == 1
    assert _roundings(plain) == 2 and _roundings(more) == 0


def test_a_rounding_between_narrow_steps_stays():
    """The bias is added in f16: what is rounded then is no cast there and back of one value."""
    _, plain, more = _settled(_layer())
    assert plain.outputs == more.outputs


def test_stores_of_one_gemm_each_lose_theirs():
    y = convert(convert(gemm(input_("a", F32, (5, 32)), input_("b", F32, (32, 7))), BF16), F32)
    _, plain, more = _settled(map_("tanh", y), map_("negate", y))
    assert _roundings(plain) == 2 and _roundings(more) == 0


def test_attention_too():
    q, k, v = (input_(n, F32, (1, 2, 6, 8)) for n in "qkv")
    y = map_("multiply", convert(convert(Node(Attention(0.5), q, k, v), BF16), F32), const(2.0, F32))
    graph, plain, more = _settled(y)
    kinds = [n.op.name for n in toposort(stores_of(more.outputs[0]))]
    assert "convert" not in kinds and fired(graph, RULE, *STAGES, EXCESS_PRECISION) == 1
    assert_close(plain, more, 2**-7)


WEIGHTS = "keep_weights_unrounded_once_scaled"


def _grouped(left, codes, block=(8, 1), to=BF16):
    x, w = input_("x", left, (3, 32)), input_("w", codes, (32, 7))
    scales = input_("s", F32, tuple(d // b for d, b in zip((32, 7), block, strict=True)) if block else (7,))
    return gemm(x, Node(Dequantize(to, block), w, scales), out_dtype=BF16)


def _dequantized(graph):
    (anchor,) = [n for n in graph.nodes() if isinstance(n.op, Gemm)]
    return {n.dtype for n in toposort(operands_of(anchor)) if isinstance(n.op, Dequantize)}


@pytest.mark.parametrize(("left", "codes", "to"), [(BF16, S4, BF16), (F16, U4, F16)])
def test_grouped_weights_are_not_rounded_when_asked(left, codes, to):
    graph, plain, more = _settled(_grouped(left, codes, to=to))
    assert fired(graph, WEIGHTS) == 0 and fired(graph, WEIGHTS, *STAGES, EXCESS_PRECISION) == 1
    assert _dequantized(plain) == {to} and _dequantized(more) == {F32}
    assert_close(plain, more, 2**-6)


@pytest.mark.parametrize(
    "y",
    [
        _grouped(BF16, S8),  # the unit multiplies these rounded
        _grouped(BF16, S4, None),  # one scale for all of K
        _grouped(F32, S4),  # as the source has it
        _grouped(F32, S4, to=F32),
    ],
)
def test_other_weights_stay_as_they_are(y):
    graph, plain, more = _settled(y)
    assert plain.outputs == more.outputs and fired(graph, WEIGHTS, *STAGES, EXCESS_PRECISION) == 0


KEPT = {
    "what is stored": lambda y: convert(y, F16),
    "codes": lambda y: convert(convert(y, F8E4M3FN), F32),
    "integers": lambda y: convert(convert(y, S8), F32),
    "saturating": lambda y: convert(convert(y, F16, "saturate"), F32),
    "back to another type": lambda y: convert(convert(y, F16), F64),
    "of a side input alone": lambda y: map_("add", y, convert(convert(input_("r", F32, (5, 7)), F16), F32)),
}


@pytest.mark.parametrize("name", KEPT)
def test_roundings_that_are_meant_stay(name):
    y = KEPT[name](gemm(input_("a", F32, (5, 32)), input_("b", F32, (32, 7))))
    graph, plain, more = _settled(y)
    assert plain.outputs == more.outputs and fired(graph, RULE, *STAGES, EXCESS_PRECISION) == 0


def test_an_infinity_past_the_largest_f16_becomes_the_number_that_it_was():
    """The rule's docstring owns up to this."""
    y = convert(convert(gemm(input_("a", F32, (1, 2)), input_("b", F32, (2, 1))), F16), F32)
    _, plain, more = _settled(map_("negate", y))
    feeds = {"a": torch.full((1, 2), 300.0), "b": torch.full((2, 1), 300.0)}
    assert results(plain, feeds)[0].item() == -float("inf") and results(more, feeds)[0].item() == -180000.0


def test_nan_stays():
    y = map_("relu", convert(convert(gemm(input_("a", F32, (1, 2)), input_("b", F32, (2, 1))), BF16), F32))
    _, plain, more = _settled(y)
    feeds = {"a": torch.tensor([[float("nan"), 1.0]]), "b": torch.ones(2, 1)}
    assert results(plain, feeds)[0].isnan().all() and results(more, feeds)[0].isnan().all()


def test_the_order_of_rules_does_not_show():
    y = convert(convert(gemm(input_("a", F32, (5, 32)), input_("b", F32, (32, 7))), BF16), F32)
    assert_order_is_free(graph_of(map_("tanh", y), map_("negate", y)), *STAGES, EXCESS_PRECISION, orders=4)
