"""Gemms that share their left operand are one gemm with a store each, whatever each does with its part; never a cycle."""

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
    staged,
    steps,
    traffic,
)

from tilewright.compiler import optimise
from tilewright.dtype import F8E4M3FN, F8E4M3FNUZ, F16, F32, S4, S8, U8
from tilewright.ir.anchor import stores_of
from tilewright.ir.build import const, convert, input_, items, map_, reshape, slice_, swap_last, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Attention, Call, Concat, Dequantize, Quantize, Slice, gemm
from tilewright.runtime.partition import partition

JOIN = "join_gemms_that_share_their_left_operand"
PAIR = "pair_a_gate_with_what_it_multiplies"
BATCH, SEQUENCE, HEADS, SIZE = 2, 5, 3, 4
M, N, K = BATCH * SEQUENCE, HEADS * SIZE, 8
X = input_("x", F32, (M, K))


def weight(n=N, dtype=F32, seed=0, k=K):
    return const(torch.randn(k, n, generator=torch.Generator().manual_seed(seed)).to(dtype.to_torch()))


def heads(y, count=HEADS):
    return transpose(reshape(y, (BATCH, SEQUENCE, count, y.shape[-1] // count)), (0, 2, 1, 3))


def quantize(x, to, scale=0.1):
    return Node(Quantize(to), x, const(scale, F32))


def one_gemm(before, stores, bytes_too=True, exact=True):
    """The one gemm with a store a part, checked."""
    after = assert_order_is_free(before, orders=4)
    (node,) = gemms(after)
    assert len(stores_of(node)) == stores
    assert_close(before, after, 1e-6)
    if exact:
        assert_exact(before, after)
    assert_no_growth(before, after, bytes_too=bytes_too)
    return after


def test_q_k_and_v_become_one_product():
    outputs = [heads(map_("add", gemm(X, weight(seed=i)), const(torch.randn(N)))) for i in range(3)]
    before = graph_of(*outputs)
    after = one_gemm(before, 3)
    assert kinds(after) == ["gemm"] and fired(before, JOIN) == 3
    assert traffic(after) < traffic(before)  # the shared operand is read once


EPILOGUES = {
    "alone": lambda y: y,
    "bias": lambda y: map_("add", y, const(torch.arange(float(y.shape[-1])))),
    "gelu": lambda y: map_("gelu", y),
    "heads": lambda y: heads(y, 1),
    "heads as s8": lambda y: quantize(heads(y, 1), S8),
    "fp8": lambda y: quantize(y, F8E4M3FN, 0.5),
    "f16": lambda y: convert(y, F16),
    "residual": lambda y: map_("add", y, input_(f"r{y.shape[-1]}", F32, y.shape)),
}


@pytest.mark.parametrize("parts", list(itertools.combinations(EPILOGUES, 3))[::4], ids=" | ".join)
def test_parts_differ_in_width_scale_epilogue_type_and_view(parts):
    widths = (16, 8, 4)  # grouped queries: K and V narrower than Q
    outputs = [EPILOGUES[name](gemm(X, weight(n, seed=n))) for name, n in zip(parts, widths, strict=True)]
    after = one_gemm(graph_of(*outputs), 3)
    assert kinds(after) == ["gemm"]
    assert [o.dtype for o in after.outputs] == [o.dtype for o in outputs]


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_grouped_queries_feed_attention_from_one_product(kv_heads):
    q = heads(gemm(X, weight(HEADS * SIZE, seed=1)))
    k, v = (heads(gemm(X, weight(kv_heads * SIZE, seed=i)), kv_heads) for i in (2, 3))
    before = graph_of(Node(Attention(0.5), q, k, v))
    after = one_gemm(before, 3)
    assert kinds(after) == ["gemm", "attention"]


# The MIGraphX thread's own graph: N = 2304 cut in three, reshaped, transposed; K alone leaves as fp8.


@pytest.mark.parametrize("to", [F8E4M3FN, F8E4M3FNUZ, S8], ids=str)
@pytest.mark.parametrize("consumer", ["outputs", "attention"])
def test_the_migraphx_graph_is_one_gemm_with_three_stores_and_no_quantize_step(to, consumer):
    b, s, h, d = 1, 4, 12, 64
    x = input_("x", F16, (b * s, 768))
    y = map_("add", gemm(x, weight(3 * h * d, F16, k=768), out_dtype=F16), const(torch.randn(3 * h * d).half()))
    q, k, v = (transpose(reshape(slice_(y, 1, i * 768, (i + 1) * 768), (b, s, h, d)), (0, 2, 1, 3)) for i in range(3))
    k = quantize(k, to, 0.05)
    if consumer == "outputs":
        before = graph_of(q, k, v)
    else:
        before = graph_of(Node(Attention(0.125), q, Node(Dequantize(F16), k, const(0.05, F32)), v))
    after = optimise(before)
    (node,) = gemms(after)
    assert [n.dtype for n in stores_of(node)] == [F16, to, F16]
    assert {n.shape for n in stores_of(node)} == {(b, h, s, d)} and node.op.rhs.shape == (768, 2304)
    assert kinds(after) == ["gemm"] + ["attention"] * (consumer == "attention")
    assert not [p for p in partition(after) if p.unfused]
    assert_exact(before, after)
    assert_no_growth(before, after)


def test_joined_and_separate_weights_end_in_the_same_form():
    """One weight cut in three: the already joined form is taken apart, folded, and joined over the whole weight again."""
    w = input_("w", F32, (K, 3 * N))
    y = gemm(X, w)
    joined = graph_of(*(heads(slice_(y, 1, i * N, (i + 1) * N)) for i in range(3)))
    separate = graph_of(*(heads(gemm(X, slice_(w, 1, i * N, (i + 1) * N))) for i in range(3)))
    after = one_gemm(joined, 3)
    assert after.outputs == optimise(separate).outputs
    (node,) = gemms(after)
    assert node.src == (X, w) and not any(isinstance(n.op, (Slice, Concat)) for n in after.nodes())


def test_columns_that_nobody_reads_are_not_multiplied():
    y = gemm(X, weight(3 * N))
    after = optimise(graph_of(slice_(y, 1, 0, N), slice_(y, 1, 2 * N, 3 * N)))
    assert gemms(after)[0].op.rhs.shape == (K, 2 * N)


@pytest.mark.parametrize("kind", ["tensor", "column", "zero points", "group"])
def test_quantised_weights_join_with_their_scales(kind):
    shape = {"tensor": (), "column": (1, N), "zero points": (1, N), "group": (2, N)}[kind]
    parts = []
    for i in range(3):
        g = torch.Generator().manual_seed(i)
        zero = [const(torch.randint(-8, 8, shape, generator=g, dtype=torch.int8), S4)] if kind == "zero points" else []
        codes = const(torch.randint(-8, 8, (K, N), generator=g, dtype=torch.int8), S4)
        scale = const(2.0 ** -torch.randint(0, 5, shape, generator=g).float())
        parts.append(Node(Dequantize(F32, (4, 1) if kind == "group" else None), codes, scale, *zero))
    after = one_gemm(
        graph_of(*(gemm(X, w) for w in parts)), 3, bytes_too=kind != "tensor"
    )  # a scale a part becomes one a column
    assert any(s.dtype is S4 for s in gemms(after)[0].src)


def test_products_of_codes_join_with_a_scale_and_zero_point_each():
    scale, zero = const(0.125, F32), const(131, U8)
    x = Node(Dequantize(F32), Node(Quantize(U8), X, scale, zero), scale, zero)
    outputs = []
    for i, (n, s) in enumerate(((12, 0.5), (4, 0.25), (4, 0.125))):
        g = torch.Generator().manual_seed(i)
        w = Node(Dequantize(F32), const(torch.randint(-128, 128, (K, n), generator=g, dtype=torch.int8)), const(s, F32))
        outputs.append(quantize(gemm(x, w), S8, 2.0 * s) if i else gemm(x, w))
    before = graph_of(*outputs)
    after = one_gemm(before, 3, bytes_too=False)  # column sums, computed once
    assert [n.dtype for n in stores_of(gemms(after)[0])] == [F32, S8, S8]
    assert kinds(after) == ["quantize", "gemm"]


# A gate and what it multiplies


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "logistic"])
@pytest.mark.parametrize("order", [0, 1])
def test_a_gate_is_paired_with_what_it_multiplies(activation, order):
    gate, up = map_(activation, gemm(X, weight(seed=1))), gemm(X, weight(seed=2))
    before = graph_of(map_("multiply", *((gate, up) if order else (up, gate))))
    after = one_gemm(before, 1, exact=activation == "relu")  # torch's exponential rounds a part of a row otherwise than a row
    assert kinds(after) == ["gemm"] and fired(before, PAIR) == 1
    assert gemms(after)[0].op.rhs.shape == (K, 2 * N) and after.outputs[0].shape == (M, N)


def test_a_gate_in_one_weight_with_biases_then_quantised():
    y = map_("add", gemm(X, weight(2 * N)), const(torch.randn(2 * N)))
    out = map_("multiply", map_("silu", slice_(y, 1, 0, N)), slice_(y, 1, N, 2 * N))
    after = one_gemm(graph_of(quantize(out, S8)), 1)
    assert after.outputs[0].dtype is S8


def test_quantised_gates_are_paired():
    x = Node(Dequantize(F32), input_("q", S8, (M, K)), const(0.25, F32))
    ws = [
        Node(Dequantize(F32), const(torch.randint(-128, 128, (K, N), dtype=torch.int8)), const(2.0 ** -torch.arange(N) % 8))
        for _ in range(2)
    ]
    one_gemm(graph_of(map_("multiply", map_("relu", gemm(x, ws[0])), gemm(x, ws[1]))), 1, bytes_too=False)


def test_a_gate_that_others_read_is_joined_but_not_paired():
    gate, up = map_("silu", gemm(X, weight(seed=1))), gemm(X, weight(seed=2))
    before = graph_of(map_("multiply", gate, up), gate)
    after = optimise(before)
    assert fired(before, PAIR) == 0
    assert_exact(before, after)
    assert_no_growth(before, after)


def test_a_gate_of_another_operand_width_or_kind_is_not_paired():
    other = input_("y", F32, (M, K))
    coded = Node(Dequantize(F32), const(torch.randint(-128, 128, (K, N), dtype=torch.int8)), const(0.1, F32))
    for gate in (gemm(other, weight(seed=1)), gemm(X, weight(1, seed=1)), gemm(X, coded), gemm(X, input_("w", F32, (K, N)))):
        before = graph_of(map_("multiply", gate, gemm(X, weight(seed=2))))
        after = optimise(before)
        assert fired(before, PAIR) == 0 and len(gemms(after)) == 2
        assert_exact(before, after)
    assert "the gate's weight cannot stand beside its own" in refusals(before, PAIR)


# No cycles


def acyclic(before):
    after = assert_order_is_free(before, orders=4)
    assert_exact(before, after)
    assert len(steps(after)) <= len(steps(before)) and arithmetic(after) <= arithmetic(before)
    return after


def test_a_product_is_not_joined_with_one_that_waits_for_it():
    """gemm(x, w1), and gemm(x, w2) whose weight is cut from what the first gives."""
    y = gemm(X, weight(N))
    z = gemm(X, slice_(y, 0, 0, K))
    after = acyclic(graph_of(map_("tanh", y), map_("tanh", z)))
    assert len(gemms(after)) == 2


def test_a_residual_through_another_product_is_no_cycle():
    """gemm(x, w2) + gemm(gemm(x, w1), w3): the second's epilogue waits for the first."""
    first = gemm(X, weight(K, seed=1))
    second = map_("add", gemm(X, weight(N, seed=2)), gemm(first, weight(N, seed=3)))
    after = acyclic(graph_of(second))
    assert len(gemms(after)) in (2, 3)


def test_a_cycle_through_attention_does_not_arise():
    """Q and K of one input make an attention; a third product of the same input adds its result."""
    q, k, v = (heads(gemm(X, weight(N, seed=i))) for i in range(3))
    attended = reshape(transpose(Node(Attention(0.5), q, k, v), (0, 2, 1, 3)), (M, N))
    gate = map_("multiply", map_("silu", gemm(X, weight(N, seed=3))), attended)
    after = acyclic(graph_of(gate))
    assert kinds(after).count("attention") == 1 and len(gemms(after)) <= 2


def test_two_inputs_crosswise_do_not_wait_for_each_other():
    """Four products of two inputs, each pair's epilogue reading one of the other pair's."""
    y = input_("y", F32, (M, K))
    a, b = gemm(X, weight(N, seed=1)), gemm(y, weight(N, seed=2))
    c, d = map_("add", gemm(X, weight(N, seed=3)), map_("tanh", b)), map_("add", gemm(y, weight(N, seed=4)), map_("tanh", a))
    acyclic(graph_of(c, d))
    acyclic(graph_of(a, b, c, d))


def test_products_one_after_another_stay_so():
    y = X
    for i in range(3):
        y = gemm(y, weight(K, seed=i))
    assert len(gemms(acyclic(graph_of(y, gemm(X, weight(N, seed=9)))))) == 3


# Where they must not join


def apart(*outputs):
    before = graph_of(*outputs)
    after = acyclic(before)
    assert fired(before, JOIN) == 0 and len(gemms(after)) == len(outputs)


def test_left_operands_that_differ_are_not_joined():
    apart(gemm(X, weight(seed=1)), gemm(input_("y", F32, (M, K)), weight(seed=2)))
    y = convert(X, F16)
    apart(gemm(X, weight(seed=1)), gemm(y, weight(N, F16, seed=2)))


def test_weights_read_in_different_manners_are_not_joined():
    coded = Node(Dequantize(F32), const(torch.randint(-128, 128, (K, N), dtype=torch.int8)), const(0.1, F32))
    turned = swap_last(const(torch.randn(N, K)))
    grouped = Node(Dequantize(F32, (4, 1)), const(torch.randint(-128, 128, (K, N), dtype=torch.int8)), const(torch.rand(2, N)))
    for one, other in itertools.combinations((weight(), coded, turned, grouped), 2):
        apart(gemm(X, one), gemm(X, other))


def test_weights_that_would_have_to_be_copied_together_are_not_joined():
    """Inputs lie where the caller put them; only adjacent parts of one are one weight."""
    apart(gemm(X, input_("v", F32, (K, N))), gemm(X, input_("w", F32, (K, N))))
    w = input_("w", F32, (K, 3 * N))
    apart(gemm(X, slice_(w, 1, 0, N)), gemm(X, slice_(w, 1, 2 * N, 3 * N)))


def test_accumulators_that_differ_are_not_joined():
    x = input_("h", F16, (M, K))
    apart(gemm(x, weight(N, F16, 1), acc_dtype=F16), gemm(x, weight(N, F16, 2), acc_dtype=F32))


def test_several_results_of_one_call_are_different_weights():
    """Values picked from one operation with several results are read side by side as they are."""
    call = Node(Call("anything", "Two", "", (X.tensor, X.tensor)), X)
    first, second = items(call)
    before = graph_of(gemm(X, transpose(first, (1, 0))), gemm(X, transpose(second, (1, 0))))
    after = staged(before)
    assert len(gemms(after)) == 2 and fired(before, JOIN) == 0
