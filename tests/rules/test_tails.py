"""A result that several operations read: what must be written anyway becomes a store; what a reader can do itself does not."""

import pytest
import torch
from rule_checks import (
    arithmetic,
    assert_exact,
    assert_no_growth,
    assert_order_is_free,
    fired,
    gemms,
    graph_of,
    kinds,
    steps,
    traffic,
)

from tilewright.dtype import F16, F32, PRED, S8
from tilewright.ir.anchor import stores_of
from tilewright.ir.build import const, convert, input_, items, map_, reduce_, reshape, slice_, swap_last, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Attention, Call, Dequantize, LayerNorm, Quantize, Select, Softmax, gemm

RULE = "store_every_elementwise_tail"
M, N, K = 6, 8, 5
A, B = input_("a", F32, (M, K)), input_("b", F32, (K, N))
Y = gemm(A, B)


def quantize(x, to=S8, scale=0.1):
    return Node(Quantize(to), x, const(scale, F32))


def norm(x):
    return Node(LayerNorm(1, 1e-5), x, const(torch.rand(N)), const(torch.rand(N)))


def settled(before, bytes_too=True):
    after = assert_order_is_free(before, orders=4)
    assert_exact(before, after)
    assert_no_growth(before, after, bytes_too=bytes_too)
    return after


def one_gemm(before, stores, bytes_too=True):
    after = settled(before, bytes_too)
    assert kinds(after) == ["gemm"], kinds(after)
    assert len(stores_of(gemms(after)[0])) == stores
    return after


BOTH = {
    "two functions": (lambda: [map_("relu", Y), map_("negate", Y)], 2),
    "itself and a function": (lambda: [Y, map_("tanh", Y)], 2),
    "itself and its codes": (lambda: [Y, quantize(Y)], 2),
    "two codes of two scales": (lambda: [quantize(Y), quantize(Y, S8, 0.3)], 2),
    "three casts": (lambda: [Y, convert(Y, F16), map_("greater", Y, const(0.0, F32))], 3),
    "a function of a function": (lambda: [map_("tanh", Y), map_("relu", map_("tanh", Y))], 2),
    "views": (lambda: [swap_last(Y), reshape(map_("tanh", Y), (M * N,))], 2),
    "heads and codes of heads": (
        lambda: [transpose(reshape(Y, (M, 2, 4)), (1, 0, 2)), quantize(transpose(reshape(Y, (M, 2, 4)), (1, 0, 2)))],
        2,
    ),
    "side inputs": (lambda: [map_("add", Y, input_("r", F32, (M, N))), map_("multiply", Y, input_("c", F32, (N,)))], 2),
    "a diamond": (lambda: [map_("multiply", map_("relu", Y), Y)], 1),
    "a mask of itself": (lambda: [Node(Select(), map_("less", Y, const(0.0, F32)), const(-1.0, F32), Y)], 1),
    "a mask beside": (lambda: [Node(Select(), input_("m", PRED, (M, N)), Y, const(0.0, F32)), Y], 2),
}


@pytest.mark.parametrize("name", BOTH)
def test_every_tail_that_leaves_is_a_store(name):
    build, stores = BOTH[name]
    before = graph_of(*build())
    after = one_gemm(before, stores)
    assert len(steps(after)) < len(steps(before)) or traffic(after) <= traffic(before)


def test_work_is_saved_where_others_read_too():
    """A value that a product and an output read is written once by the first product, in the form each wants."""
    codes = quantize(map_("gelu", Y), S8, 0.05)
    second = gemm(Node(Dequantize(F32), codes, const(0.05, F32)), const(torch.randn(N, 3)))
    after = settled(graph_of(second, map_("gelu", Y)))
    assert kinds(after) == ["gemm", "gemm"]
    assert {n.dtype for n in stores_of(gemms(after)[0])} == {S8, F32}


def test_a_further_result_of_a_joined_gemm_folds_too():
    parts = [map_("add", gemm(A, const(torch.randn(K, 4))), const(torch.randn(4))) for _ in range(2)]
    before = graph_of(*parts, quantize(parts[1]), map_("relu", parts[0]))
    one_gemm(before, 4)


def test_attention_stores_its_tails():
    q, k, v = (input_(n, F32, (1, 2, 6, 8)) for n in "qkv")
    attended = Node(Attention(0.5), q, k, v)
    before = graph_of(attended, quantize(transpose(attended, (0, 2, 1, 3))))
    after = settled(before)
    assert kinds(after) == ["attention"] and len(after.outputs[0].src[0].op.stores) == 2


def test_side_inputs_of_new_stores_are_read_as_they_are_stored():
    bias, residual = input_("bias", F32, (N,)), input_("r", S8, (M, N))
    wide = Node(Dequantize(F32), residual, const(0.1, F32))
    after = one_gemm(graph_of(Y, map_("add", map_("add", Y, bias), wide)), 2)
    assert {bias, residual} <= set(gemms(after)[0].src)


# Left to those who read


def test_what_a_norm_reads_is_left_to_the_norm():
    """The residual stream is stored once; the norm's step adds nothing to it."""
    added = map_("add", Y, input_("r", F32, (M, N)))
    before = graph_of(added, norm(added))
    after = settled(before)
    assert kinds(after) == ["gemm", "norm"] and len(stores_of(gemms(after)[0])) == 1


@pytest.mark.parametrize("reader", ["norm", "softmax", "sum"])
def test_a_function_that_only_a_row_step_reads_is_no_store(reader):
    read = {"norm": norm, "softmax": lambda x: Node(Softmax(1), x), "sum": lambda x: reduce_("add", x, [1])}[reader]
    before = graph_of(Y, read(map_("multiply", Y, const(0.5, F32))))
    after = settled(before)
    assert fired(before, RULE) == 0 and len(stores_of(gemms(after)[0])) == 1 and len(kinds(after)) == 2


def test_what_an_opaque_call_reads_is_written():
    seen = map_("tanh", Y)
    called = items(Node(Call("anything", "Two", "", (seen.tensor, seen.tensor)), seen))
    before = graph_of(called[0], map_("relu", Y))
    after = assert_order_is_free(before, orders=4)
    assert kinds(after) == ["gemm", "call"] and len(stores_of(gemms(after)[0])) == 2


def test_a_tail_that_changes_the_shape_is_no_store():
    wider = map_("add", Y, input_("more", F32, (3, M, N)))
    before = graph_of(Y, wider)
    after = settled(before)
    assert fired(before, RULE) == 0 and kinds(after) == ["gemm", "elementwise"]
    cut = graph_of(Y, slice_(Y, 0, 0, 2))
    assert fired(cut, RULE) == 0


def test_a_function_of_two_stores_stays_a_step():
    """Its parts lie in different columns of the product."""
    parts = [gemm(A, const(torch.randn(K, 4))) for _ in range(2)]
    before = graph_of(*parts, map_("add", *parts))
    after = settled(before)
    assert len(gemms(after)) == 1 and len(stores_of(gemms(after)[0])) == 2 and len(kinds(after)) == 2


# No cycle, no waiting for one another


def test_a_tail_that_waits_for_a_later_product_stays_behind_it():
    later = gemm(map_("tanh", Y), input_("w", F32, (N, N)))
    both = map_("add", Y, later)
    after = settled(graph_of(both))
    assert kinds(after) == ["gemm", "gemm"]
    assert arithmetic(after) == arithmetic(graph_of(both))


def test_tails_of_two_products_that_read_each_other_make_no_cycle():
    """The second stores both sums: it has the first product's result beside its own."""
    other = gemm(A, input_("c", F32, (K, N)))
    after = settled(graph_of(Y, other, map_("add", Y, map_("tanh", other)), map_("add", other, map_("tanh", Y))))
    assert kinds(after) == ["gemm", "gemm"]
    assert [len(stores_of(n)) for n in gemms(after)] == [1, 3]


def test_a_tail_that_waits_for_an_attention_of_its_own_product_stays_behind_it():
    x = input_("x", F32, (M, 12))
    q, k, v, gate = (gemm(x, const(torch.randn(12, 12))) for _ in range(4))

    def heads(y):
        return transpose(reshape(y, (1, M, 3, 4)), (0, 2, 1, 3))

    attended = reshape(transpose(Node(Attention(0.5), heads(q), heads(k), heads(v)), (0, 2, 1, 3)), (M, 12))
    before = graph_of(map_("multiply", gate, attended), gate, q)
    after = settled(before, bytes_too=False)
    assert kinds(after) == ["gemm", "attention"]
