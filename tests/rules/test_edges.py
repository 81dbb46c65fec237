"""Edges that rules must not change: results that saturate, rows that see nothing, numbers that are none."""

from __future__ import annotations

import pytest
import torch
from rule_checks import assert_close, assert_exact, feeds_of, gemms, graph_of, staged

from tilewright.dtype import BF16, F16, F32, PRED
from tilewright.ir.build import const, convert, input_, map_, swap_last
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Attention, Convert, Dequantize, LayerNorm, Select, Softmax, gemm
from tilewright.rules.calibrate import Layer, calibrate, quantize, scheme

EDGES = [0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 60000.0, -60000.0, 3.0, 0.5, 11.5]


def saturated(node: Node, dtype=F16) -> Node:
    return Node(Convert(dtype, "saturate"), node)


# Casts that saturate are no mere roundings: taken back, infinity would come out where a number was.


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("fn", ["multiply", "add", "exponential", "negate"])
def test_a_function_between_casts_stays_wide_if_its_result_saturates(dtype, fn):
    x, y = input_("x", dtype, (len(EDGES),)), input_("y", dtype, (len(EDGES),))
    sides = [convert(x, F32)] if fn in ("exponential", "negate") else [convert(x, F32), convert(y, F32)]
    before = graph_of(saturated(map_(fn, *sides), dtype))
    data = torch.tensor(EDGES).to(dtype.to_torch())
    feeds = {"x": data, "y": data.roll(3)}
    (want,), (got,) = (evaluate(g, {n.op.label: feeds[n.op.label] for n in g.inputs}) for g in (before, staged(before)))
    assert torch.equal(want.isnan(), got.isnan()) and not got.isinf().any()
    assert torch.equal(want.nan_to_num(), got.nan_to_num())


def test_a_norm_stays_wide_if_its_result_saturates():
    x, scale = input_("x", F16, (4, 8)), const(torch.full((8,), 60000.0, dtype=torch.float16))
    before = graph_of(saturated(Node(LayerNorm(1, 1e-5), convert(x, F32), convert(scale, F32))))
    assert_exact(before, staged(before))


def test_attention_does_not_forget_that_its_scores_saturate():
    """A hidden score is then a number: a row that sees nothing has equal weights, and no NaN."""
    q, k, v = (input_(name, F32, (1, 1, 3, 4)) for name in "qkv")
    mask = const(torch.tensor([[0.0, -float("inf"), 0.0], [-float("inf")] * 3, [0.0] * 3]))
    scores = saturated(map_("add", gemm(q, swap_last(k)), mask))
    before = graph_of(gemm(Node(Softmax(-1), convert(scores, F32)), v))
    after = staged(before)
    assert not any(isinstance(n.op, Attention) for n in after.nodes())
    assert_close(before, after, 1e-6)


# A mask of finite numbers leaves equal weights to a row that sees nothing; causality leaves it none.


@pytest.mark.parametrize("spelling", ["add", "select", "select not"])
@pytest.mark.parametrize("fill", [-1e9, -1e30, torch.finfo(torch.float32).min, -float("inf")])
@pytest.mark.parametrize(("queries", "keys"), [(4, 2), (3, 1), (2, 4), (3, 3)])
def test_more_queries_than_keys_are_causal_for_infinite_masks_alone(queries, keys, fill, spelling):
    q, k, v = (input_(name, F32, (1, 2, rows, 4)) for name, rows in (("q", queries), ("k", keys), ("v", keys)))
    visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]
    scores = gemm(q, swap_last(k))
    if spelling == "add":
        hidden = torch.zeros(visible.shape).masked_fill(~visible, fill)
        masked = map_("add", scores, const(hidden))
    elif spelling == "select":
        masked = Node(Select(), const(visible, PRED), scores, const(fill))
    else:
        masked = Node(Select(), const(~visible, PRED), const(fill), scores)
    before = graph_of(gemm(Node(Softmax(-1), masked), v))
    after = staged(before)
    blind = queries > keys
    found = [n.op for n in after.nodes() if isinstance(n.op, Attention)]
    equal = any(op.equal_masked_rows for op in found)
    assert equal <= (blind and -float("inf") < fill <= -1e30)
    assert any(op.causal == "lower" for op in found) <= (not blind or equal or fill == -float("inf"))
    want, got = (evaluate(g, feeds_of(before))[0] for g in (before, after))  # in f32: -1e9 drowns what it is added to
    assert torch.equal(want.isnan(), got.isnan()) and torch.allclose(want, got, rtol=1e-5, atol=1e-5, equal_nan=True)


# Quantising a float model: what is not finite stays, and is said to; what is small is scaled; experts are weights, too.

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def quantized(weight: torch.Tensor, *batches: torch.Tensor, to: str = "int8") -> tuple[Graph, Graph, Layer]:
    before = graph_of(gemm(input_("x", F32, batches[0].shape), const(weight)))
    after, (layer,) = quantize(before, scheme(to, group=4), calibrate(before, [{"x": x} for x in batches]))
    return before, after, layer


def spoilt(x: torch.Tensor, value: float) -> torch.Tensor:
    made = x.clone()
    made[1, 2] = value
    return made


@pytest.mark.parametrize("to", ["int8", "fp8", "w4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_float_and_is_said_to(value, to):
    for batches in ([spoilt(X, value)], [X, spoilt(X, value)], [spoilt(X, value), X]):
        before, after, layer = quantized(WEIGHT, *batches, to=to)
        assert layer.skip_reason == "its activations are not finite" and after.outputs == before.outputs
    before, after, layer = quantized(spoilt(WEIGHT, value), X, to=to)
    assert layer.skip_reason == "its weight is not finite" and after.outputs == before.outputs


@pytest.mark.parametrize("to", ["int8", "fp8"])
@pytest.mark.parametrize(("x", "weight"), [(1e-30, 1), (1, 1e-30), (1e30, 1), (1e-15, 1e-15)])
def test_scales_follow_magnitudes_however_small_or_large(x, weight, to):
    _, _, usual = quantized(WEIGHT, X, to=to)
    before, after, layer = quantized(WEIGHT * weight, X * x, to=to)
    assert layer.error == pytest.approx(usual.error, rel=0.01) and layer.skip_reason is None
    want, got = (evaluate(g, {"x": X * x})[0].double() for g in (before, staged(after)))
    assert (got - want).norm() <= 2 * usual.error * want.norm()


@pytest.mark.parametrize("to", ["int8", "fp8", "w4"])
@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 3, 5, 8)])
def test_one_matrix_for_each_expert_is_quantised_with_scales_of_its_own(shape, to):
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=g), torch.randn(*shape[:-2], 8, 6, generator=g)
    weight *= 10.0 ** torch.arange(shape[-3])[:, None, None]  # no scale serves two experts
    before, after, layer = quantized(weight, x, to=to)
    assert layer.skip_reason is None and layer.error < {"int8": 0.02, "fp8": 0.06, "w4": 0.12}[to]
    (wide,) = evaluate(before, {"x": x})
    (got,) = evaluate(staged(after), {"x": x})
    axes = (-2, -1)
    assert bool(((got - wide).norm(dim=axes) < 2 * layer.error * wide.norm(dim=axes)).all())
    (node,) = gemms(staged(after))
    assert to == "w4" or not any(isinstance(n.op, Dequantize) for n in (node.op.lhs, node.op.rhs))
