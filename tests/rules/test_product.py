"""Quantised operands are multiplied as codes: scales and zero points stand behind the product, sums fit 32 bits."""

import pytest
import torch
from rule_checks import (
    arithmetic,
    assert_close,
    assert_exact,
    assert_order_is_free,
    feeds_of,
    fired,
    gemms,
    graph_of,
    kinds,
    refusals,
    results,
    steps,
    traffic,
)

from tilewright.compiler import optimise
from tilewright.dtype import BF16, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F16, F32, F64, PRED, S4, S8, S16, S32, U4, U8, U16
from tilewright.ir.anchor import stores_of
from tilewright.ir.build import broadcast, const, convert, input_, map_, reduce_, reshape, slice_, swap_last, transpose
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Dequantize, Quantize, Reduce, gemm
from tilewright.ir.ops.functions import narrow_integer

RULE = "multiply_codes_and_scale_the_accumulator"
M, N, K = 6, 8, 12
G = torch.Generator()


def drawn(dtype, shape, seed=0):
    G.manual_seed(seed)
    if dtype.is_integer:
        wide = torch.randint(int(dtype.min), int(dtype.max) + 1, shape, generator=G, dtype=torch.int64)
        return narrow_integer(wide, dtype)
    return (torch.randn(shape, generator=G) * 2).to(dtype.to_torch())


def powers(shape, seed=0):
    G.manual_seed(seed)
    return const(2.0 ** -torch.randint(0, 8, shape, generator=G).float())


def dequantized(x, scale, zero=None, to=F32, block=None):
    return Node(Dequantize(to, block), x, scale, *([] if zero is None else [zero]))


def operand(dtype, shape, k_axis, granularity, shifted, constant, seed):
    """Codes of their whole range, scaled by powers of two: every product and every sum of them is exact."""
    scales = () if granularity == "tensor" else tuple(1 if a == k_axis else d for a, d in enumerate(shape))
    zero = const(drawn(dtype, scales, seed + 1), dtype) if shifted else None
    x = const(drawn(dtype, shape, seed), dtype) if constant else input_(f"x{seed}", dtype, shape)
    return dequantized(x, powers(scales, seed + 2), zero)


def on_codes(before, exact=True):
    after = assert_order_is_free(before, orders=4)
    assert fired(before, RULE) == 1
    (node,) = gemms(after)
    assert not any(isinstance(n.op, Dequantize) for root in (node.op.lhs, node.op.rhs) for n in toposort((root,)))
    assert arithmetic(after) == arithmetic(before) and traffic(after) <= traffic(before)
    if exact:
        assert_exact(before, after)
    return node


INTEGERS = [(S8, S8), (U8, S8), (U8, U8), (S8, U8), (S4, S8), (S8, S4), (U8, U4), (S4, S4)]


@pytest.mark.thin(3)
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("shifted", ["neither", "left", "right", "both"])
@pytest.mark.parametrize(("a", "b"), INTEGERS, ids=lambda d: str(d))
def test_integer_codes_are_multiplied_exactly(a, b, shifted, granularity):
    x = operand(a, (M, K), 1, granularity, shifted in ("left", "both"), False, 10)
    w = operand(b, (K, N), 0, granularity, shifted in ("right", "both"), True, 20)
    before = graph_of(gemm(x, w))
    node = on_codes(before)
    assert node.op.acc_dtype is S32
    sums = [p for p in steps(optimise(before)) if p.kind != "gemm"]
    # Sums over a constant weight are computed once; rows of the activations are summed only for a zero point of the weight.
    assert len(sums) == (shifted in ("right", "both"))
    assert all(isinstance(n.op, Reduce) or n.shape == (M, 1) or n.shape == (M, K) for p in sums for n in p.nodes)


@pytest.mark.parametrize("to", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_a_whole_qdq_layer_is_one_step(to, turned):
    """QDQ activations, weights per column, a bias, relu, and a quantised result."""
    x, scale, zero = input_("x", to, (M, K)), const(0.02, F32), const(3, U8)
    x = dequantized(Node(Quantize(U8), x, scale, zero), scale, zero, to)
    codes = const(drawn(S8, (N, K) if turned else (K, N)))
    w = dequantized(codes, const(torch.rand((N, 1) if turned else (1, N)) * 0.1), None, to)
    y = map_("relu", map_("add", gemm(x, swap_last(w) if turned else w, out_dtype=to), const(torch.randn(N).to(to.to_torch()))))
    y = Node(Quantize(S8), y, const(0.3, F32))
    before = graph_of(y)
    after = assert_order_is_free(before, orders=4)
    assert kinds(after) == ["quantize", "gemm"]  # the input alone is quantised by itself
    assert gemms(after)[0].op.acc_dtype is S32 and after.outputs[0].dtype is S8
    a, b = (r[0].double() for r in (results(before), results(after)))
    assert (a - b).abs().max() <= 1, "codes differ by more than a rounding"


@pytest.mark.parametrize("to", [F32, F16, BF16], ids=str)
def test_arbitrary_scales_agree_within_rounding(to):
    x = dequantized(input_("x", S8, (M, 200)), const(0.0123, F32), None, to)
    w = dequantized(input_("w", S8, (200, N)), const(torch.rand(1, N) * 0.1), None, to)
    before = graph_of(gemm(x, w, out_dtype=to))
    on_codes(before, exact=False)
    assert_close(before, optimise(before), {F32: 1e-5, F16: 5e-3, BF16: 3e-2}[to])


def test_the_sum_of_codes_is_nearer_to_the_real_product():
    """Codes are summed exactly and scaled once; dequantised bf16 operands were each rounded first."""
    x = dequantized(input_("x", S8, (M, 200)), const(0.0123, F32), None, BF16)
    w = dequantized(input_("w", S8, (200, N)), const(0.0456, F32), None, BF16)
    before = graph_of(gemm(x, w))
    feeds = feeds_of(before)
    ideal = feeds["x"].double() @ feeds["w"].double() * 0.0123 * 0.0456
    (a,), (b,) = results(before, feeds), results(optimise(before), feeds)
    assert (b - ideal).abs().max() < (a - ideal).abs().max() / 100


@pytest.mark.parametrize(
    ("a", "b"),
    [(F8E4M3FN, F8E4M3FN), (F8E4M3FNUZ, F8E4M3FNUZ), (F8E5M2, F8E5M2), (F8E4M3FN, F8E5M2)],
    ids=lambda d: str(d),
)
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_8_bit_floats_accumulate_in_f32(a, b, granularity):
    x = operand(a, (M, K), 1, granularity, False, False, 10)
    w = operand(b, (K, N), 0, granularity, False, True, 20)
    node = on_codes(graph_of(gemm(x, w)))
    assert node.op.acc_dtype is F32 and {s.dtype for s in node.src[:2]} == {a, b}


def test_f64_products_stay_f64():
    x = dequantized(input_("x", S8, (M, K)), const(0.1, F32), None, F64)
    w = dequantized(input_("w", S8, (K, N)), const(0.1, F32), None, F64)
    before = graph_of(gemm(x, w, acc_dtype=F64))
    on_codes(before, exact=False)
    assert_close(before, optimise(before), 1e-14)


@pytest.mark.parametrize("zero", [None, 7])
def test_a_zero_point_that_is_zero_costs_nothing(zero):
    zeros = const(torch.zeros(1, N, dtype=torch.int8)) if zero is None else const(torch.full((1, N), zero, dtype=torch.int8))
    w = dequantized(const(drawn(S8, (K, N))), powers((1, N)), zeros)
    before = graph_of(gemm(dequantized(input_("x", S8, (M, K)), powers(())), w))
    on_codes(before)
    assert len(steps(optimise(before))) == (1 if zero is None else 2)


def test_a_zero_point_known_only_at_run_time():
    zero = input_("z", U8, ())
    x = dequantized(input_("x", U8, (M, K)), powers(()), zero)
    node = on_codes(graph_of(gemm(x, dequantized(const(drawn(S8, (K, N))), powers((1, N))))))
    assert zero in node.src


def test_rows_scaled_as_the_program_runs():
    """Dynamic quantisation per row: the scale is computed from the data, and is a side input of the product."""
    x = input_("x", F32, (M, K))
    scale = map_("multiply", reduce_("maximum", map_("abs", x), [1], keepdims=True), const(1 / 127, F32))
    x = dequantized(Node(Quantize(S8), x, scale), scale)
    before = graph_of(gemm(x, dequantized(const(drawn(S8, (K, N))), powers((1, N)))))
    node = on_codes(before, exact=False)
    assert any(s.shape == (M, 1) for s in node.src)
    assert_close(before, optimise(before), 1e-5)


VIEWS = {
    "transposed": (lambda t: swap_last(t), (K, M), (1, M)),
    "heads merged": (lambda t: reshape(t, (M, K)), (2, 3, K), (2, 3, 1)),
    "part": (lambda t: slice_(t, 0, 1, 1 + M), (M + 2, K), (M + 2, 1)),
    "transposed and cut": (lambda t: slice_(transpose(t, (1, 0)), 0, 2, 2 + M), (K, M + 3), (1, M + 3)),
    "repeated": (lambda t: broadcast(t, (M, K)), (1, K), ()),
}


@pytest.mark.parametrize("name", VIEWS)
def test_codes_are_found_through_views(name):
    """Scales and zero points follow the views of their codes."""
    view, shape, scales = VIEWS[name]
    x = dequantized(input_("x", S8, shape), powers(scales), const(drawn(S8, scales, 3), S8))
    before = graph_of(gemm(view(x), dequantized(const(drawn(S8, (K, N))), powers((1, N)))))
    on_codes(before)


def test_batched_codes():
    x = dequantized(input_("x", S8, (2, 3, M, K)), powers((2, 1, 1, 1)), const(drawn(S8, (2, 1, 1, 1)), S8))
    w = dequantized(input_("w", S8, (3, N, K)), powers((3, 1, 1)), const(drawn(S8, (3, 1, 1)), S8))
    on_codes(graph_of(gemm(x, swap_last(w))))


# Sums and 32 bits

LONGEST = (2**31 - 1) // (128 * 128)


def test_the_longest_sum_that_fits_is_taken_on_codes_and_is_right():
    """K codes of the largest magnitude, -128 * -128 each: one more would not fit s32."""
    for k, fits in ((LONGEST, True), (LONGEST + 1, False)):
        x = dequantized(input_("x", S8, (1, k)), const(1.0, F32))
        w = dequantized(input_("w", S8, (k, 1)), const(1.0, F32))
        before = graph_of(gemm(x, w))
        assert fired(before, RULE) == fits
        if not fits:
            assert f"sums over K = {k} may not fit 32 bits" in refusals(before, RULE)
        feeds = {"x": torch.full((1, k), -128, dtype=torch.int8), "w": torch.full((k, 1), -128, dtype=torch.int8)}
        assert results(optimise(before), feeds)[0].item() == torch.tensor(k * 128 * 128).float().item()


@pytest.mark.parametrize(
    ("zero", "largest"), [(const(0, U8), 255), (const(128, U8), 128), (const(255, U8), 255), (input_("z", U8, ()), 255)]
)
def test_the_bound_counts_the_zero_point(zero, largest):
    """Codes less their zero point are what is summed: u8 about 128 reaches no further than s8 does."""
    k = (2**31 - 1) // (128 * largest)
    for extent in (k, k + 1):
        x = dequantized(input_("x", U8, (1, extent)), const(1.0, F32), zero)
        w = dequantized(input_("w", S8, (extent, 1)), const(1.0, F32))
        assert fired(graph_of(gemm(x, w)), RULE) == (extent == k)


def test_corrections_may_wrap_on_the_way_but_not_in_the_end():
    """The product of the codes alone, or one correction, can exceed 32 bits where their sum does not: it wraps back."""
    k = 66_000  # 255 * 255 * k > 2**31
    x = dequantized(input_("x", U8, (1, k)), const(1.0, F32), const(128, U8))
    w = dequantized(input_("w", U8, (k, 1)), const(1.0, F32), const(127, U8))
    before = graph_of(gemm(x, w))
    assert fired(before, RULE) == 1
    feeds = {"x": torch.full((1, k), 255, dtype=torch.uint8), "w": torch.full((k, 1), 255, dtype=torch.uint8)}
    assert results(optimise(before), feeds)[0].item() == torch.tensor(k * 127 * 128).float().item()


WIDENED = {
    "as they lie": lambda: convert(input_("x", S8, (K, K)), F32),
    "turned, then widened": lambda: convert(swap_last(input_("x", S8, (K, K))), F32),
    "widened, then turned": lambda: swap_last(convert(input_("x", S8, (K, K)), F32)),
    "split and joined": lambda: reshape(reshape(convert(input_("x", U8, (K, K)), F32), (3, 4, K)), (K, K)),
    "cut": lambda: slice_(convert(convert(input_("x", S8, (K + 2, K)), S16), F32), 0, 1, K + 1),
}


@pytest.mark.parametrize("name", WIDENED)
def test_codes_divided_by_a_scale_are_read_as_they_are_viewed(name):
    """Extents are alike, so that a view that is lost shows in the values alone."""
    on_codes(graph_of(gemm(map_("divide", WIDENED[name](), const(8.0)), dequantized(input_("w", S8, (K, N)), const(0.5)))))


# Where it must not fire


CHANGED = {
    "a sign wraps": lambda: convert(convert(input_("x", S8, (M, K)), U16), F32),
    "a fraction is cut": lambda: convert(convert(input_("x", F8E4M3FN, (M, K)), S32), F32),
    "only zero or not": lambda: convert(convert(input_("x", S8, (M, K)), PRED), F32),
}


@pytest.mark.parametrize("name", CHANGED)
def test_quotients_of_what_a_cast_changes_stay(name):
    x = map_("divide", CHANGED[name](), const(8.0))
    refused(x, dequantized(input_("w", F8E4M3FN if "cut" in name else S8, (K, N)), const(0.5)), "an operand is not quantised")


def test_a_quotient_in_8_bits_stays():
    x = map_("divide", input_("x", F8E4M3FN, (M, K)), const(3.0, F8E4M3FN))
    refused(x, dequantized(input_("w", F8E4M3FN, (K, N)), const(0.5)), "an operand is not quantised")


def refused(x, w, why):
    before = graph_of(gemm(x, w))
    after = optimise(before)
    assert fired(before, RULE) == 0 and why in refusals(before, RULE)
    assert gemms(after)[0].op.acc_dtype is F32
    assert_exact(before, after)
    return after


CODED = dequantized(input_("x", S8, (M, K)), const(0.1, F32))
WEIGHT = dequantized(input_("w", S8, (K, N)), const(0.1, F32))


def test_scales_that_vary_along_k_stay():
    along = dequantized(input_("w", S8, (K, N)), const(torch.rand(K, 1)))
    refused(CODED, along, "a scale varies along K")
    refused(dequantized(input_("x", S8, (M, K)), const(torch.rand(K))), WEIGHT, "a scale varies along K")
    shifted = dequantized(input_("w", S8, (K, N)), const(0.1, F32), const(drawn(S8, (K, 1)), S8))
    refused(CODED, shifted, "a scale varies along K")


def test_groups_along_k_stay():
    w = dequantized(input_("w", S8, (K, N)), const(torch.rand(3, N)), None, F32, (4, 1))
    after = refused(CODED, w, "a scale is given per block along K")
    assert kinds(after) == ["gemm"]


def test_one_float_operand_keeps_the_other_dequantised():
    after = refused(input_("f", F32, (M, K)), WEIGHT, "an operand is not quantised")
    assert kinds(after) == ["gemm"]


@pytest.mark.parametrize(
    ("shape", "scales", "why"),
    [((3, 2 * K), (3, 1), "a scale varies along K"), ((M, 3, 4), (M, 3, 1), "a scale is given per block along K")],
)
def test_a_scale_along_an_axis_that_a_reshape_splits_or_merges_with_k_stays(shape, scales, why):
    x = reshape(dequantized(input_("x", S8, shape), const(torch.rand(scales))), (M, K))
    refused(x, WEIGHT, why)


@pytest.mark.parametrize(("a", "b"), [(S8, F8E4M3FN), (S16, S8), (S16, S16), (S32, S8)], ids=lambda d: str(d))
def test_codes_that_no_matrix_unit_multiplies_stay(a, b):
    x = dequantized(input_("x", a, (M, K)), const(2.0**-10, F32))
    w = dequantized(input_("w", b, (K, N)), const(0.1, F32))
    refused(x, w, f"the codes are {a} and {b}, which no matrix unit multiplies")


def test_nan_among_8_bit_floats_stays_nan():
    x = dequantized(input_("x", F8E4M3FN, (2, 3)), const(0.5, F32))
    before = graph_of(gemm(x, dequantized(input_("w", F8E4M3FN, (3, 2)), const(0.5, F32))))
    feeds = feeds_of(before)
    feeds["x"] = torch.tensor([[1, float("nan"), 2], [1, 2, 3]]).to(torch.float8_e4m3fn)
    (a,), (b,) = results(before, feeds), results(optimise(before), feeds)
    assert a[0].isnan().all() and b[0].isnan().all() and torch.equal(a[1], b[1])


def test_a_product_of_codes_written_out_is_left_as_it_is():
    before = graph_of(convert(gemm(input_("x", S8, (M, K)), input_("w", S8, (K, N))), F32))
    assert fired(before, RULE) == 0
    node = gemms(optimise(before))[0]
    assert node.op.acc_dtype is S32 and stores_of(node)[0].dtype is F32
