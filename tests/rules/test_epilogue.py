"""Epilogues: any elementwise tail in any order, and views, move into the store of the product; not what others read."""

import itertools

import pytest
import torch
from rule_checks import (
    arithmetic,
    assert_close,
    assert_exact,
    assert_no_growth,
    assert_order_is_free,
    fired,
    gemms,
    graph_of,
    kinds,
    refusals,
    results,
    same_bits,
    staged,
    steps,
    traffic,
)

from tilewright.compiler import optimise
from tilewright.dtype import BF16, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F16, F32, PRED, S8, S32, U8
from tilewright.ir.anchor import stores_of
from tilewright.ir.build import broadcast, const, convert, input_, map_, reduce_, reshape, slice_, swap_last, transpose
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Attention, Convert, Dequantize, Gemm, LayerNorm, Quantize, Select, gemm

ELEMENTWISE = "absorb_elementwise_into_store"
VIEW = "absorb_view_into_store"
M, N, K = 6, 8, 5
A, B = input_("a", F32, (M, K)), input_("b", F32, (K, N))
BIAS, FULL, ROW = input_("bias", F32, (N,)), input_("full", F32, (M, N)), input_("row", F32, (M, 1))
MASK = input_("mask", PRED, (M, N))


def product(dtype=F32):
    a, b = input_("a", dtype, (M, K)), input_("b", dtype, (K, N))
    return gemm(a, b, out_dtype=dtype)


def quantize(x, to, scale=0.1, zero=None):
    extra = [] if zero is None else [const(zero, to)]
    return Node(Quantize(to), x, const(scale, F32), *extra)


def one_step(before, exact=True):
    """The one gemm that everything becomes, checked."""
    after = assert_order_is_free(before, orders=4)
    assert kinds(after) == ["gemm"], kinds(after)
    assert len(after.outputs) == 1 and isinstance(after.outputs[0].op, Gemm)
    assert_no_growth(before, after)
    if exact:
        assert_exact(before, after)
    return after.outputs[0]


STEPS = {
    "scale": lambda y: map_("multiply", y, const(0.3, F32)),
    "bias": lambda y: map_("add", y, BIAS),
    "broadcast bias": lambda y: map_("add", broadcast(reshape(BIAS, (1, N)), (M, N)), y),
    "row": lambda y: map_("subtract", ROW, y),
    "relu": lambda y: map_("relu", y),
    "gelu": lambda y: map_("gelu", y),
    "gelu_tanh": lambda y: map_("gelu_tanh", y),
    "silu": lambda y: map_("silu", y),
    "tanh": lambda y: map_("tanh", y),
    "sigmoid": lambda y: map_("logistic", y),
    "clamp": lambda y: map_("minimum", map_("maximum", y, const(-1.0, F32)), const(1.0, F32)),
    "residual": lambda y: map_("add", y, FULL),
    "where": lambda y: Node(Select(), MASK, y, const(-1e9, F32)),
    "through f16": lambda y: convert(convert(y, F16), F32),
}


@pytest.mark.parametrize("name", STEPS)
def test_one_step_is_folded_exactly(name):
    before = graph_of(STEPS[name](gemm(A, B)))
    one_step(before)
    assert fired(before, ELEMENTWISE) >= 1


@pytest.mark.parametrize("order", list(itertools.permutations(("bias", "gelu", "residual", "where"), 4))[::5])
def test_steps_fold_in_any_order(order):
    y = gemm(A, B)
    for name in order:
        y = STEPS[name](y)
    one_step(graph_of(y))


@pytest.mark.parametrize("to", [S8, U8, F8E4M3FN, F8E4M3FNUZ, F8E5M2], ids=str)
def test_a_quantised_result_is_stored_as_codes(to):
    y = map_("relu", map_("add", gemm(A, B), BIAS))
    node = one_step(graph_of(quantize(y, to, zero=3 if to.is_integer else None)))
    assert node.dtype is to


@pytest.mark.parametrize("shape", [(N,), (M, 1), (M, N)])
def test_a_result_is_quantised_by_scales_per_column_row_or_element(shape):
    scale = const(torch.rand(shape) + 0.05)
    zero = const(torch.randint(-5, 5, shape, dtype=torch.int8))
    assert one_step(graph_of(Node(Quantize(S8), gemm(A, B), scale, zero))).dtype is S8


def test_quantised_and_back_is_one_step_that_rounds():
    y = Node(Dequantize(F32), quantize(gemm(A, B), S8), const(0.1, F32))
    assert "quantize" in {n.op.name for n in toposort(stores_of(one_step(graph_of(y))))}


@pytest.mark.parametrize("overflow", ["wrap", "saturate"])
def test_the_cast_of_an_integer_product_keeps_its_overflow(overflow):
    a, b = input_("a", S8, (M, 300)), input_("b", S8, (300, N))
    node = one_step(graph_of(convert(gemm(a, b), S8, overflow)))
    (cast,) = [n.op for n in toposort(stores_of(node)) if isinstance(n.op, Convert)]
    assert cast.overflow == overflow


def test_nan_and_infinity_pass_through_the_fold():
    y = Node(Select(), map_("is_nan", STEPS["bias"](gemm(A, B))), const(0.5, F32), map_("tanh", gemm(A, B)))
    before = graph_of(y)
    after = optimise(before)
    feeds = {
        "a": torch.tensor([[float("nan")] * K, [float("inf")] * K, [-float("inf")] * K, [1.0] * K, [0.0] * K, [-0.0] * K]),
        "b": torch.ones(K, N),
        "bias": torch.full((N,), -float("inf")),
    }
    for a, b in zip(results(before, feeds), results(after, feeds), strict=True):
        assert same_bits(a, b) and (a == 0.5).any()


# nvFuser's cases: the product is rounded to the operands' type, as torch writes it, then cast, given its bias, activated.

TAILS = {
    "alone": lambda y, bias: y,
    "cast": lambda y, bias: convert(y, F32),
    "bias": lambda y, bias: map_("add", y, bias),
    "relu": lambda y, bias: map_("relu", y),
    "bias relu": lambda y, bias: map_("relu", map_("add", y, bias)),
    "bias gelu": lambda y, bias: map_("gelu", map_("add", y, bias)),
    "bias relu in f32": lambda y, bias: convert(map_("relu", map_("add", convert(y, F32), convert(bias, F32))), y.dtype),
    "bias gelu in f32": lambda y, bias: convert(map_("gelu", map_("add", convert(y, F32), convert(bias, F32))), y.dtype),
}


@pytest.mark.parametrize("batch", [(), (3,)], ids=["single", "batched"])
@pytest.mark.parametrize("layout", ["TT", "TN", "NT", "NN"])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("tail", TAILS)
def test_nvfuser_cases_are_one_step(tail, dtype, layout, batch):
    a = input_("a", dtype, (*batch, M, K) if layout[0] == "T" else (*batch, K, M))
    b = input_("b", dtype, (*batch, N, K) if layout[1] == "N" else (*batch, K, N))
    lhs = a if layout[0] == "T" else swap_last(a)
    rhs = swap_last(b) if layout[1] == "N" else b
    before = graph_of(TAILS[tail](gemm(lhs, rhs, out_dtype=dtype), input_("bias", dtype, (N,))))
    after = optimise(before)
    assert kinds(after) == ["gemm"]
    assert_no_growth(before, after)
    assert_exact(before, after)
    (node,) = gemms(after)
    assert node.dtype is before.outputs[0].dtype
    assert {s.dtype for s in node.src} == {dtype}  # nothing is stored wider first
    assert not any(isinstance(n.op, Convert) for root in (node.op.lhs, node.op.rhs) for n in toposort((root,)))
    rounding = [n for n in toposort(stores_of(node)) if isinstance(n.op, Convert) and n.dtype.bits == 16]
    assert len(rounding) <= 2  # of the product, and of the result where it is computed in f32


# Views


def heads(y, b=2, h=4):
    return transpose(reshape(y, (b, y.shape[0] // b, h, y.shape[1] // h)), (0, 2, 1, 3))


VIEWS = {
    "heads": heads,
    "transposed": swap_last,
    "reshaped": lambda y: reshape(y, (M * N,)),
    "bias after heads": lambda y: map_("add", heads(y), input_("hb", F32, (4, 1, N // 4))),
    "residual after heads": lambda y: map_("add", heads(y), input_("hr", F32, (2, 4, M // 2, N // 4))),
    "quantised after heads": lambda y: quantize(heads(y), S8),
    "per channel after transpose": lambda y: Node(Quantize(S8), swap_last(y), const(torch.rand(N, 1) + 0.1)),
    "there and back": lambda y: map_("relu", reshape(map_("tanh", heads(y)), (M, N))),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_the_result_are_how_it_is_written(name):
    before = graph_of(VIEWS[name](gemm(A, B)))
    one_step(before)
    assert name.endswith("transpose") or fired(before, VIEW) >= 1


def test_attention_takes_its_tail_and_view():
    q, k, v = (input_(n, F32, (2, 4, 6, 8)) for n in "qkv")
    attended = Node(Attention(0.25), q, k, v)
    y = quantize(reshape(transpose(attended, (0, 2, 1, 3)), (12, 32)), S8, 0.02)
    before = graph_of(y)
    after = assert_order_is_free(before, orders=4)
    assert kinds(after) == ["attention"] and after.outputs[0].dtype is S8
    assert_no_growth(before, after)
    assert_exact(before, after)


# Where they must not fire


def test_what_others_read_stays():
    y = gemm(A, B)
    before = graph_of(map_("relu", y), reduce_("add", y, [1]))
    after = staged(before, "epilogue")
    assert after.outputs == before.outputs
    assert refusals(before, ELEMENTWISE, "epilogue") == ["2 operations read the gemm"]
    assert refusals(graph_of(swap_last(y), y), VIEW, "epilogue") == ["2 operations read the gemm"]


def test_a_gemm_that_leaves_the_graph_and_is_read_stays():
    y = gemm(A, B)
    assert fired(graph_of(y, map_("relu", y)), ELEMENTWISE, "epilogue") == 0


def test_a_broadcast_of_the_result_stays():
    y = map_("add", gemm(A, B), input_("more", F32, (3, M, N)))
    before = graph_of(y)
    after = optimise(before)
    assert kinds(after) == ["gemm", "elementwise"]
    assert refusals(before, ELEMENTWISE) == [f"it broadcasts the gemm from {[M, N]} to {[3, M, N]}"]
    assert_exact(before, after)


def test_a_gemm_that_is_a_scale_stays():
    scale = gemm(A, B)
    before = graph_of(Node(Quantize(S8), FULL, map_("exponential", scale)))
    assert refusals(before, ELEMENTWISE) == ["the gemm is its scale"]
    after = optimise(before)
    assert kinds(after) == ["gemm", "quantize"]
    assert_exact(before, after)


@pytest.mark.parametrize("reader", ["norm", "product"])
def test_a_widening_cast_is_left_to_a_reader_that_does_not_fold(reader):
    y = convert(product(F16), F32)
    if reader == "norm":
        last = Node(LayerNorm(1, 1e-5), y, const(torch.rand(N)), const(torch.rand(N)))
    else:
        last = gemm(y, input_("w", F32, (N, 3)))
    after = optimise(graph_of(last))
    assert gemms(after)[0].dtype is F16
    assert_exact(graph_of(last), after)


def test_reductions_and_slices_are_no_epilogue():
    for after in (reduce_("add", gemm(A, B), [1]), slice_(gemm(A, B), 0, 1, 3)):
        assert fired(graph_of(after), ELEMENTWISE) == fired(graph_of(after), VIEW) == 0


def test_two_products_read_by_one_function_fold_into_one_of_them():
    other = gemm(input_("c", F32, (M, 7)), input_("d", F32, (7, N)))
    before = graph_of(map_("multiply", gemm(A, B), other))
    after = assert_order_is_free(before, orders=4)
    assert kinds(after) == ["gemm", "gemm"] and arithmetic(after) == arithmetic(before)
    assert traffic(after) < traffic(before) and len(steps(after)) < len(steps(before))
    assert_exact(before, after)


def test_folding_makes_no_cycle():
    """The tail of one product reads another that is made of the first."""
    y = gemm(A, B)
    z = gemm(y, input_("w", F32, (N, N)))
    before = graph_of(map_("add", y, z))
    after = assert_order_is_free(before, orders=4)
    assert kinds(after) == ["gemm", "gemm"]
    assert_exact(before, after)


def test_s32_accumulators_wrap_as_the_program_says():
    """Sums beyond 32 bits wrap in the product itself, whatever follows it."""
    a, b = input_("a", S32, (M, K)), input_("b", S32, (K, N))
    before = graph_of(map_("maximum", gemm(a, b), const(0, S32)))
    one_step(before)
    a = [graph_of(n) for n in (convert(gemm(a, b), S8, "wrap"), convert(gemm(a, b), S8, "saturate"))]
    assert not torch.equal(*(results(g)[0] for g in a))


def test_close_is_close():
    """The checks above can fail: another bias is another result."""
    with pytest.raises(AssertionError, match="off by"):
        assert_close(graph_of(STEPS["bias"](gemm(A, B))), graph_of(map_("add", gemm(A, B), map_("negate", BIAS))), 1e-3)
