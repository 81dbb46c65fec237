"""Codes times a scale are dequantisation however they are written, so that products take the codes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_checks import (
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
)

from tilewright.dtype import BF16, F8E4M3FN, F8E5M2, F16, F32, F64, S4, S8, S32, U4, U8
from tilewright.ir.build import broadcast, const, convert, input_, map_, reshape, transpose
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Concat, Dequantize, gemm

RULE, ROUNDED, JOINED = (
    "codes_times_a_scale_are_dequantised",
    "dequantised_values_are_rounded_at_once",
    "groups_that_are_joined_are_blocks",
)
M, N, K = 6, 8, 12


def dequantisations(graph):
    return [n for g in gemms(graph) for n in toposort((g.op.lhs, g.op.rhs)) if isinstance(n.op, Dequantize)]


def times(codes, scale, to=F32):
    return map_("multiply", convert(codes, to), scale)


def one_gemm(before, rtol=None):
    after = assert_order_is_free(before, orders=4)
    assert kinds(after) == ["gemm"]
    assert_no_growth(before, after)
    if rtol is None:
        assert_exact(before, after)
    else:
        assert_close(before, after, rtol)
    return after


SCALES = {"tensor": (), "row": (K, 1), "column": (N,)}


@pytest.mark.parametrize("granularity", SCALES)
@pytest.mark.parametrize("to", [F16, BF16, F32, F64])
@pytest.mark.parametrize("codes", [S4, U4, S8, U8, F8E4M3FN, F8E5M2], ids=str)
def test_the_arithmetic_is_the_dequantisation_to_the_bit(codes, to, granularity):
    """The one rule alone, on every code there is: the same values in every float type."""
    x, w = input_("x", to, (M, K)), input_("w", codes, (K, N))
    scale = input_("s", to, SCALES[granularity])
    before = graph_of(gemm(x, map_("multiply", scale, convert(w, to)), acc_dtype=F64 if to is F64 else F32))
    after = staged(before, "recognise")
    assert fired(before, RULE) == 1
    assert_exact(before, after)
    assert len(dequantisations(one_gemm(before))) == 1


@pytest.mark.parametrize("zero", ["codes", "float", "number", "constant", "integers", "added"])
def test_every_spelling_of_a_zero_point(zero):
    x, w = input_("x", F32, (M, K)), input_("w", U8, (K, N))
    shifted = {
        "codes": lambda: map_("subtract", convert(w, F32), convert(input_("z", U8, (N,)), F32)),
        "float": lambda: map_("subtract", convert(w, F16), convert(input_("z", U8, (N,)), F16)),
        "number": lambda: map_("subtract", convert(w, F32), const(131.0, F32)),
        "constant": lambda: map_("subtract", convert(w, F32), const(torch.arange(N).float())),
        "integers": lambda: map_("subtract", convert(w, S32), convert(input_("z", U8, (K, 1)), S32)),
        "added": lambda: map_("add", convert(w, S32), const(-128, S32)),
    }[zero]()
    before = graph_of(gemm(x, times(shifted, input_("s", F32, (N,)))))
    assert fired(before, RULE) == 1
    after = one_gemm(before)
    (node,) = dequantisations(after)
    assert len(node.src) == 3 and node.src[2].dtype is U8


def test_products_of_scaled_codes_take_the_codes():
    x, w = input_("x", F8E4M3FN, (M, K)), input_("w", F8E5M2, (K, N))
    before = graph_of(gemm(times(x, input_("sx", F32, ())), times(w, input_("sw", F32, (1, N)))))
    after = one_gemm(before, 1e-5)
    assert not dequantisations(after) and gemms(after)[0].op.lhs.dtype is F8E4M3FN


def test_between_views_and_casts():
    x = input_("x", BF16, (M, K))
    w = transpose(convert(convert(input_("w", S4, (N, K)), S8), F32), (1, 0))
    before = graph_of(gemm(x, convert(map_("multiply", w, input_("s", F32, (N,))), BF16)))
    assert fired(before, ROUNDED) == 1
    (node,) = dequantisations(one_gemm(before))
    assert node.dtype is BF16 and node.src[0].dtype is S4


@pytest.mark.parametrize("spelling", ["apart", "repeated", "transposed"])
@pytest.mark.parametrize("shifted", [False, True])
def test_groups_along_k(spelling, shifted):
    """4 groups of 3 along K, whether the codes are taken apart or the scales repeated."""
    x, g = input_("x", F16, (M, K)), 3
    if spelling == "transposed":
        w, s, z = input_("w", U4, (N, K // g, g)), input_("s", F16, (N, K // g, 1)), input_("z", U4, (N, K // g, 1))
    else:
        w, s, z = input_("w", U4, (K // g, g, N)), input_("s", F16, (K // g, 1, N)), input_("z", U4, (K // g, 1, N))
    shape = (N, K) if spelling == "transposed" else (K, N)
    if spelling == "repeated":
        w, s, z = (reshape(broadcast(t, (K // g, g, N)), shape) for t in (w, s, z))
    codes = map_("subtract", convert(w, F16), convert(z, F16)) if shifted else convert(w, F16)
    weight = reshape(map_("multiply", codes, s), shape)
    before = graph_of(gemm(x, transpose(weight, (1, 0)) if spelling == "transposed" else weight))
    (node,) = dequantisations(one_gemm(before))
    assert node.op.block == ((1, g) if spelling == "transposed" else (g, 1)) and len(node.src) == 2 + shifted


def test_codes_divided_by_a_scale_are_multiplied_and_the_sum_is_divided():
    x, w = input_("x", F8E4M3FN, (M, K)), input_("w", S8, (N, K))
    divided = map_("divide", convert(x, F32), input_("sx", F32, (M, 1)))
    before = graph_of(gemm(divided, map_("divide", convert(input_("v", F8E5M2, (K, N)), F32), input_("sv", F32, ()))))
    after = one_gemm(before, 1e-5)
    assert gemms(after)[0].op.lhs.dtype is F8E4M3FN and gemms(after)[0].op.rhs.dtype is F8E5M2
    mixed = graph_of(
        gemm(
            times(input_("y", S8, (M, K)), input_("sy", F32, ())),
            transpose(map_("divide", convert(w, F32), const(3.0)), (1, 0)),
        )
    )
    assert gemms(one_gemm(mixed, 1e-5))[0].op.rhs.dtype is S8
    along_k = graph_of(
        gemm(
            times(x, input_("sx", F32, ())),
            transpose(map_("divide", convert(input_("v", F8E5M2, (N, K)), F32), input_("s", F32, (1, K))), (1, 0)),
        )
    )
    assert "a scale varies along K" in refusals(along_k, "multiply_codes_and_scale_the_accumulator")


NIBBLES = "constant_codes_of_four_bits_are_kept_so"


def nibbles(packed, low, high):
    """The lower nibbles beside the upper ones, [K, 2 N] of [K, N] bytes."""
    return Node(Concat(1), map_("and", packed, const(low, U8)), map_("shift_right_logical", packed, const(high, U8)))


@pytest.mark.parametrize("spelling", ["float", "integer", "shifted"])
def test_constant_nibbles_stay_four_bits(spelling):
    x = input_("x", F32, (M, K))
    codes = nibbles(const(torch.arange(K * N // 2).reshape(K, N // 2).to(torch.uint8) * 5), 15, 4)
    made = {
        "float": lambda: map_("subtract", convert(codes, F32), const(8.0, F32)),
        "integer": lambda: map_("subtract", convert(codes, S32), const(8, S32)),
        "shifted": lambda: convert(map_("subtract", convert(codes, S8), const(8, S8)), F32),
    }[spelling]()
    before = graph_of(gemm(x, times(made, const(torch.rand(N)))))
    after = one_gemm(before)
    (node,) = dequantisations(after)
    assert node.src[0].dtype is (S4 if spelling == "shifted" else U4) and fired(before, NIBBLES) == 1


def test_what_may_take_more_than_four_bits_stays_eight():
    x, packed = input_("x", F32, (M, K)), const(torch.full((K, N // 2), 255, dtype=torch.uint8))
    scale = input_("s", F32, ())
    for codes in (nibbles(packed, 31, 4), nibbles(packed, 15, 3), nibbles(input_("w", U8, (K, N // 2)), 15, 4)):
        before = graph_of(gemm(x, times(codes, scale)))
        assert fired(before, NIBBLES) == 0
        assert_exact(before, staged(before))
    far = graph_of(gemm(x, times(map_("subtract", convert(nibbles(packed, 15, 4), F32), const(16.0, F32)), scale)))
    assert refusals(far, NIBBLES, "recognise") == ["its zero point takes more than 4 bits"]


def test_where_it_stays():
    x, w = input_("x", F32, (M, K)), input_("w", S8, (K, N))
    whole = graph_of(gemm(x, times(w, input_("s", F32, (K, N)))))
    assert refusals(whole, RULE, "recognise") == ["its scale is as large as what it scales"]
    assert fired(graph_of(map_("exponential", times(w, input_("s", F32, ())))), RULE) == 0  # no product reads it
    assert fired(graph_of(gemm(x, times(input_("w", S32, (K, N)), input_("s", F32, ())))), RULE) == 0  # no codes
    real = map_("subtract", convert(w, F32), input_("z", F32, ()))
    assert fired(graph_of(gemm(x, times(real, input_("s", F32, ())))), RULE) == 0  # a zero point that is no code
    half = map_("subtract", convert(w, F32), const(0.5, F32))
    assert fired(graph_of(gemm(x, times(half, input_("s", F32, ())))), RULE) == 0
    wraps = map_("subtract", w, const(100, S8))  # modulo 256: these are the codes
    (node,) = dequantisations(staged(graph_of(gemm(x, times(wraps, input_("s", F32, ()))))))
    assert len(node.src) == 2
    values = times(w, input_("s", F32, ()))
    twice = graph_of(gemm(convert(x, BF16), convert(values, BF16)), map_("negate", values))
    assert refusals(twice, ROUNDED, "recognise") == ["the dequantised values are also read in f32"]
    saturated = graph_of(gemm(convert(x, F16), convert(values, F16, "saturate")))
    assert fired(saturated, ROUNDED) == 0
    split = reshape(times(input_("w", S8, (K, N)), input_("s", F32, (K, 1))), (K // 3, 3, N))
    assert fired(graph_of(gemm(input_("x", F32, (K // 3, M, 3)), split)), JOINED) == 0
    flat = reshape(times(input_("w", S8, (K // 3, 3, N)), input_("s", F32, (1, 3, 1))), (K, N))  # repeats with a period
    assert fired(graph_of(gemm(x, flat)), JOINED) == 0


@settings(max_examples=40, deadline=None)
@given(
    outer=st.sampled_from([1, 2, 5]),
    inner=st.sampled_from([1, 3, 4]),
    n=st.sampled_from([1, 2, 7]),
    varied=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    shifted=st.booleans(),
    codes=st.sampled_from([S4, U8, S8]),
)
def test_any_scale_of_axes_that_are_joined(outer, inner, n, varied, shifted, codes):
    shape = (outer, inner, n)
    sizes = tuple(d if v else 1 for d, v in zip(shape, varied, strict=True))
    w, s = input_("w", codes, shape), input_("s", F32, sizes)
    shifts = map_("subtract", convert(w, F32), convert(input_("z", codes, sizes), F32)) if shifted else convert(w, F32)
    before = graph_of(gemm(input_("x", F32, (3, outer * inner)), reshape(map_("multiply", shifts, s), (outer * inner, n))))
    after = assert_order_is_free(before, orders=2)
    assert_exact(before, after)
