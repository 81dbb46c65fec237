"""Products joined by hand are taken apart: slices move before what does not mix their axis, up to the weight of a product."""

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
    refusals,
    staged,
)

from tilewright.compiler import optimise
from tilewright.dtype import F16, F32, PRED, S4, S8
from tilewright.ir.build import const, convert, input_, map_, reduce_, reshape, slice_, swap_last, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Dequantize, Quantize, Select, Slice, gemm

GEMM = "slice_of_gemm_is_gemm_of_slice"
BEFORE = "slice_before_what_does_not_mix"
M, N, K = 6, 12, 5
A, W = input_("a", F32, (M, K)), const(torch.randn(K, N, generator=torch.Generator().manual_seed(0)))


def thirds(y, axis=-1):
    d = y.shape[axis] // 3
    return [slice_(y, axis, i * d, (i + 1) * d) for i in range(3)]


def taken_apart(before, parts=3):
    """Check for as many products as parts, each as narrow as its part; only what the program is given is still sliced."""
    after = assert_order_is_free(before, "unfuse", orders=4)
    assert len(gemms(after)) == parts
    assert arithmetic(after) == arithmetic(before)
    assert all(n.constant or n.src[0].op.name == "input" for n in after.nodes() if isinstance(n.op, Slice))
    assert_exact(before, after)
    assert_no_growth(before, optimise(before))
    return after


def test_a_product_cut_by_columns_is_one_product_a_part():
    before = graph_of(*thirds(gemm(A, W)))
    after = taken_apart(before)
    assert fired(before, GEMM, "unfuse") == 3 and {n.shape for n in gemms(after)} == {(M, N // 3)}


def test_parts_of_any_width_and_columns_that_nobody_reads():
    y = gemm(A, W)
    after = staged(graph_of(slice_(y, 1, 0, 2), slice_(y, 1, 5, 12)), "unfuse")
    assert [n.shape for n in gemms(after)] == [(M, 2), (M, 7)]
    assert arithmetic(after) < arithmetic(graph_of(slice_(y, 1, 0, 2), slice_(y, 1, 5, 12)))


def head_view(y):
    return transpose(reshape(y, (2, 3, 3, 2, 2)), (2, 0, 3, 1, 4))


TAILS = {
    "bias": lambda y: thirds(map_("add", y, const(torch.arange(12.0)))),
    "row and scalar": lambda y: thirds(map_("multiply", map_("add", y, input_("r", F32, (M, 1))), const(0.5, F32))),
    "residual": lambda y: thirds(map_("add", y, input_("r", F32, (M, N)))),
    "gelu": lambda y: thirds(map_("gelu", y)),
    "where": lambda y: thirds(Node(Select(), input_("m", PRED, (M, N)), y, const(0.0, F32))),
    "cast": lambda y: thirds(convert(y, F16)),
    "quantised by one scale": lambda y: thirds(Node(Quantize(S8), y, const(0.1, F32))),
    "quantised by channels": lambda y: thirds(
        Node(Quantize(S8), y, const(torch.rand(N) + 0.1), const(torch.arange(N).to(torch.int8)))
    ),
    "quantised and back": lambda y: thirds(
        Node(Dequantize(F32), Node(Quantize(S8), y, const(torch.rand(N) + 0.1)), const(torch.rand(N)))
    ),
    "transposed": lambda y: thirds(swap_last(y), 0),
    "batch split": lambda y: thirds(reshape(y, (2, 3, N)), 2),
    "one axis of three": lambda y: thirds(head_view(y), 0),
    "cut, bent, cut": lambda y: [
        p for t in thirds(y) for p in (slice_(map_("tanh", t), 1, 0, 1), slice_(map_("tanh", t), 1, 1, 4))
    ],
}


@pytest.mark.parametrize("name", TAILS)
def test_slices_move_before_a_tail(name):
    outputs = TAILS[name](gemm(A, W))
    taken_apart(graph_of(*outputs), len(outputs))


def test_the_weight_of_a_part_is_cut_with_its_scales():
    codes = const(torch.randint(-8, 8, (K, N), dtype=torch.int8), S4)
    w = Node(Dequantize(F32), codes, const(torch.rand(1, N)), const(torch.randint(-8, 8, (1, N), dtype=torch.int8), S4))
    taken_apart(graph_of(*thirds(gemm(A, w))))
    grouped = Node(Dequantize(F32, (2, 1)), codes, const(torch.rand(3, N)))
    before = graph_of(*thirds(gemm(A, grouped)))
    after = staged(before, "unfuse")
    assert "its scale is given per block" in refusals(before, BEFORE, "unfuse")
    assert_exact(before, after)


def test_a_cast_that_only_products_read_is_cut_before_it():
    """Each product then reads its part as it is stored."""
    x = convert(input_("x", F16, (M, 2 * K)), F32)
    before = graph_of(gemm(slice_(x, 1, 0, K), W), gemm(slice_(x, 1, K, 2 * K), W))
    assert fired(before, BEFORE, "unfuse") == 2
    after = optimise(before)
    assert kinds(after) == ["gemm", "gemm"] and all(n.src[0].dtype is F16 for n in gemms(after))
    assert_exact(before, after)
    assert_no_growth(before, after)


def test_a_function_that_products_read_parts_of_stays_one_step():
    x = map_("tanh", input_("x", F32, (M, 2 * K)))
    before = graph_of(gemm(slice_(x, 1, 0, K), W), gemm(slice_(x, 1, K, 2 * K), W))
    assert fired(before, BEFORE) == 0
    assert kinds(optimise(before)) == ["elementwise", "gemm", "gemm"]


# Where they must not fire


def kept(*outputs, rule, why=None):
    before = graph_of(*outputs)
    after = optimise(before)
    assert fired(before, rule, "unfuse") == 0
    assert why is None or why in refusals(before, rule, "unfuse")
    assert arithmetic(after) == arithmetic(before) and len(gemms(after)) == len(gemms(before))
    assert_exact(before, after)
    return after


def test_columns_are_not_computed_twice():
    y = gemm(A, W)
    why = "the gemm is also read otherwise than cut by columns"
    kept(slice_(y, 1, 0, 7), slice_(y, 1, 5, 12), rule=GEMM, why=why)
    kept(slice_(y, 1, 0, 6), y, rule=GEMM, why=why)
    kept(slice_(y, 1, 0, 6), map_("tanh", y), rule=GEMM, why=why)
    kept(slice_(y, 1, 0, 6), slice_(y, 0, 0, 2), rule=GEMM, why=why)


def test_functions_are_not_computed_twice():
    y = map_("tanh", gemm(A, W))
    why = "what it is cut from is also read otherwise"
    kept(slice_(y, 1, 0, 7), slice_(y, 1, 5, 12), rule=GEMM)
    kept(slice_(y, 1, 0, 6), y, rule=GEMM)
    read_whole = graph_of(gemm(slice_(y, 1, 0, 6), input_("v", F32, (6, 2))), y)
    assert why in refusals(read_whole, BEFORE, "unfuse")


def test_rows_steps_and_two_axes_at_once_stay():
    y = gemm(A, W)
    kept(slice_(y, 0, 0, 2), slice_(y, 0, 2, 6), rule=GEMM)
    kept(Node(Slice((0, 0), (M, N), (1, 2)), y), rule=GEMM)
    kept(Node(Slice((0, 0), (3, 6), (1, 1)), y), rule=GEMM)


def test_a_reshape_that_splits_the_part_stays():
    """Three columns of the inner axis are no run of the product's columns."""
    kept(*thirds(reshape(gemm(A, W), (M, 4, 3)), 2), rule=GEMM)


def test_what_no_product_makes_or_reads_is_left_whole():
    """Cutting an activation before it is computed would turn one step into three."""
    y = map_("tanh", input_("x", F32, (M, N)))
    before = graph_of(*thirds(y))
    assert fired(before, BEFORE) == 0
    assert kinds(optimise(before)) == kinds(before)


def test_what_mixes_the_axis_is_no_way_to_the_product():
    kept(*thirds(reduce_("add", reshape(gemm(A, W), (M, 3, 4)), [2])), rule=GEMM)


def test_the_side_input_alone_is_cut_where_it_stretches():
    """A function that repeats the product is cut along the axis that it adds: every part needs the whole product."""
    y = map_("add", gemm(A, W), input_("more", F32, (3, M, N)))
    kept(*thirds(y, 0), rule=GEMM)
