"""Operands that are computed before a product: computed where the product reads them, and nothing twice."""

import pytest
import torch
from rule_checks import (
    assert_exact,
    assert_no_growth,
    assert_order_is_free,
    feeds_of,
    fired,
    gemms,
    graph_of,
    kinds,
    refusals,
    results,
    same_bits,
    steps,
)

from tilewright.compiler import compile, optimise
from tilewright.dtype import BF16, F16, F32, PRED, S4, S8, S32
from tilewright.ir.build import broadcast, const, convert, input_, map_, reshape, slice_, swap_last, transpose
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Convert, Dequantize, Gemm, Iota, LayerNorm, Map, Quantize, Reduce, Select, gemm

OPERAND = "compute_operand_where_it_is_read"
SIDE = "compute_side_input_in_the_store"
M, N, K = 6, 8, 12


def select(p, a, b):
    return Node(Select(), p, a, b)


def one_gemm(before, exact=True):
    after = assert_order_is_free(before, orders=3)
    assert kinds(after) == ["gemm"], kinds(after)
    assert_no_growth(before, after)
    if exact:
        assert_exact(before, after)
    return gemms(after)[0]


X, Y = input_("x", F32, (M, K)), input_("y", F32, (M, K))
PROLOGUES = {
    "silu of a gate": lambda: map_("multiply", map_("silu", X), Y),
    "relu of relu": lambda: map_("relu", map_("negate", map_("relu", X))),
    "sum": lambda: map_("add", X, Y),
    "absolute": lambda: map_("abs", X),
    "exponential": lambda: map_("exponential", X),
    "sine": lambda: map_("sine", X),
    "clamped": lambda: map_("clamp", const(-0.5), X, const(0.5)),
    "masked": lambda: select(input_("p", PRED, (M, K)), X, const(0.0)),
    "its own mask": lambda: select(map_("greater", X, const(0.0)), X, map_("multiply", X, const(0.25))),
    "by a row": lambda: map_("multiply", X, input_("r", F32, (K,))),
    "by a column": lambda: map_("multiply", X, input_("c", F32, (M, 1))),
    "of views": lambda: map_("relu", swap_last(reshape(slice_(input_("v", F32, (K, 9)), 1, 1, 1 + M), (K, M)))),
    "viewed": lambda: swap_last(map_("relu", input_("t", F32, (K, M)))),
    "up and down": lambda: convert(map_("tanh", convert(input_("h", BF16, (M, K)), F32)), F32),
    "a chain of casts": lambda: convert(convert(convert(X, BF16), F32), F32),
    "of a comparison": lambda: convert(map_("greater", X, Y), F32),
    "x squared": lambda: map_("multiply", X, X),
}


@pytest.mark.parametrize("name", PROLOGUES)
def test_an_operand_is_computed_where_it_is_read(name):
    made = PROLOGUES[name]()
    left = graph_of(gemm(made, input_("b", F32, (K, N))))
    node = one_gemm(left)
    assert fired(left, OPERAND) >= 1 and all(s.op.name == "input" for s in node.src)
    one_gemm(graph_of(gemm(input_("b", F32, (N, K)), swap_last(made))))


@pytest.mark.parametrize("name", PROLOGUES)
def test_kernels_agree_with_the_oracle(name):
    before = graph_of(gemm(PROLOGUES[name](), input_("b", F32, (K, N))))
    feeds = feeds_of(before, 3)
    for label in feeds:
        if feeds[label].is_floating_point() and label != "b":
            feeds[label].view(-1)[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    got = compile(before, budget_s=0, cache=False)(**feeds)
    (wanted,) = results(before, feeds)
    assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("narrow", [BF16, F16], ids=str)
def test_a_narrowed_operand_is_read_wide(narrow):
    before = graph_of(gemm(convert(X, narrow), convert(input_("b", F32, (K, N)), narrow), out_dtype=narrow))
    assert [s.dtype for s in one_gemm(before).src] == [F32, F32]


def test_integers_narrowed_or_computed():
    a, b = input_("a", S32, (M, K)), input_("b", S8, (K, N))
    one_gemm(graph_of(gemm(Node(Convert(S8, "saturate"), a), b)))
    one_gemm(graph_of(gemm(map_("maximum", input_("a", S8, (M, K)), const(0, S8)), b)))
    rounded = convert(map_("multiply", X, const(3.0)), S8)
    before = graph_of(gemm(rounded, b))
    assert fired(before, OPERAND) == 0 and "exact" in " ".join(refusals(before, OPERAND))


def test_both_operands_and_a_batch():
    a, b = input_("a", F32, (3, M, K)), input_("b", F32, (3, K, N))
    one_gemm(graph_of(gemm(map_("relu", a), map_("abs", b))))
    one_gemm(graph_of(gemm(map_("relu", a), map_("abs", input_("w", F32, (K, N))))))


def test_gate_and_product_computed_from_another_product():
    """Operations that a product's own store can do stay there; the others are done where its result is read."""
    h = gemm(input_("a", F32, (M, 5)), input_("w", F32, (5, K)))
    after = optimise(graph_of(gemm(map_("relu", h), input_("b", F32, (K, N)))))
    first, second = gemms(after)
    assert second.op.lhs.op.name == "param" and "map" in [n.op.name for n in first.op.stores]


X2 = map_("relu", X)
S = map_("relu", input_("s", F32, (M, M)))
ROW = broadcast(map_("relu", input_("v", F32, (1, K))), (M, K))
NORMED = Node(LayerNorm(1, 1e-5), X, const(torch.ones(K)), const(torch.zeros(K)))
LEFT_ALONE = {
    "another reader": (lambda: [gemm(X2, input_("b", F32, (K, N))), X2], "other readers"),
    "a store that reads it": (
        lambda: [map_("add", gemm(S, input_("b", F32, (M, M))), S)],
        "computed twice",
    ),
    "both sides": (lambda: [gemm(X2, swap_last(X2))], "computed twice"),
    "repeated for a batch": (lambda: [gemm(X2, input_("b", F32, (3, K, N)))], "repeats the operand"),
    "repeated by a broadcast": (lambda: [gemm(ROW, input_("b", F32, (K, N)))], None),
    "an exponential repeated": (
        lambda: [gemm(map_("add", X, map_("exponential", input_("r", F32, (K,)))), input_("b", F32, (K, N)))],
        "repeated by a broadcast",
    ),
    "beside groups of codes": (
        lambda: [
            gemm(
                map_("relu", input_("g", F32, (M, 64))),
                Node(Dequantize(F32, (32, 1)), input_("q", S4, (64, N)), input_("sc", F32, (2, N))),
            )
        ],
        "scales by blocks",
    ),
    "a norm before it": (
        lambda: [gemm(map_("relu", NORMED), input_("b", F32, (K, N)))],
        None,
    ),
    "a reduction in it": (
        lambda: [gemm(map_("divide", X, reshape(Node(Reduce("maximum", (1,)), X), (M, 1))), input_("b", F32, (K, N)))],
        None,
    ),
    "a quantisation": (lambda: [gemm(Node(Quantize(S8), X, const(0.1)), input_("b", S8, (K, N)))], None),
    "a constant": (lambda: [gemm(X, map_("tanh", const(torch.randn(K, N))))], None),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_would_be_computed_again_stays(name):
    build, why = LEFT_ALONE[name]
    before = graph_of(*build())
    after = assert_order_is_free(before, orders=3)
    assert fired(before, OPERAND) == 0
    assert_exact(before, after)
    assert_no_growth(before, after)
    if why is not None:
        assert why in " ".join(refusals(before, OPERAND))


# Side inputs


A, B, C = input_("a", F32, (M, K)), input_("b", F32, (K, N)), input_("c", F32, (M, N))
SIDES = {
    "beta C": lambda: map_("multiply", C, const(0.5)),
    "beta C, beta given": lambda: map_("multiply", C, reshape(input_("beta", F32, (1,)), ())),
    "narrowed": lambda: convert(convert(C, BF16), F32),
    "a part": lambda: slice_(slice_(input_("d", F32, (M + 2, 2 * N)), 0, 1, M + 1), 1, 3, 3 + N),
    "turned": lambda: map_("abs", swap_last(input_("e", F32, (N, M)))),
    "masked": lambda: select(input_("p", PRED, (M, N)), C, const(-1.0)),
    "a function": lambda: map_("tanh", C),
    "two biases": lambda: map_("add", input_("v", F32, (N,)), input_("w", F32, (N,))),
    "an activation of an embedding": lambda: map_("multiply", map_("silu", C), input_("f", F32, (M, N))),
    "a column": lambda: map_("negate", input_("col", F32, (M, 1))),
    "a cube": lambda: map_("negate", reshape(input_("cube", F32, (M, 2, N // 2)), (M, N))),
}


@pytest.mark.parametrize("name", SIDES)
def test_a_side_input_is_computed_in_the_store(name):
    before = graph_of(map_("add", map_("multiply", gemm(A, B), const(2.0)), SIDES[name]()))
    one_gemm(before)
    assert fired(before, SIDE) >= 1
    feeds = feeds_of(before, 1)
    got = compile(before, budget_s=0, cache=False)(**feeds)
    assert torch.allclose(got, results(before, feeds)[0], rtol=1e-4, atol=1e-4)


def test_side_inputs_that_stay():
    shared = map_("tanh", C)
    for before, why in (
        (graph_of(map_("add", gemm(A, B), shared), shared), "other readers"),
        (graph_of(map_("add", gemm(A, B), map_("tanh", input_("v", F32, (N,))))), "repeated"),
    ):
        after = assert_order_is_free(before, orders=3)
        assert fired(before, SIDE) == 0 and why in " ".join(refusals(before, SIDE))
        assert len(steps(after)) == 2
        assert_exact(before, after)
    normed = Node(LayerNorm(1, 1e-5), C, const(torch.ones(N)), const(torch.zeros(N)))
    assert fired(graph_of(map_("add", gemm(A, B), map_("negate", normed))), SIDE) == 0


def test_a_view_in_the_middle_of_heads():
    x = transpose(input_("x", F32, (2, 3, K, 5)), (0, 2, 1, 3))
    before = graph_of(gemm(map_("relu", reshape(x, (2, K, 15))), input_("b", F32, (15, N))))
    one_gemm(before)
    feeds = feeds_of(before, 1)
    got = compile(before, budget_s=0, cache=False)(**feeds)
    assert torch.allclose(got, results(before, feeds)[0], rtol=1e-4, atol=1e-4)


def test_bits_of_integers():
    a, b = input_("a", S8, (7, 33)), input_("b", S8, (33, 17))
    before = graph_of(gemm(select(input_("p", PRED, (7, 33)), a, const(0, S8)), map_("maximum", b, const(-3, S8))))
    feeds = feeds_of(before, 1)
    got = compile(before, budget_s=0, cache=False)(**feeds)
    assert same_bits(got, results(before, feeds)[0])


def test_only_functions_stay_in_an_expression():
    node = one_gemm(graph_of(gemm(map_("relu", convert(convert(input_("x", F16, (M, K)), F32), F32)), B)))
    assert isinstance(node.op.lhs.op, Map) and node.src[0].dtype is F16


def test_a_constant_that_is_only_widened_is_read_narrow():
    """The graph does not change when rules see it again."""
    x = input_("x", F32, (4, 4))
    columns = convert(Node(Iota(S32, (4, 4), 1)), F32)
    after = optimise(Graph("g", (x,), (gemm(x, map_("add", x, columns)),), ("y",)))
    assert optimise(after).outputs == after.outputs
    (node,) = (n for n in after.nodes() if isinstance(n.op, Gemm))
    assert {s.dtype for s in node.src} == {F32, S32}
