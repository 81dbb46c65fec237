"""Products of widened and shifted integers are taken on the integers as stored, modulo 2**32 as the program's own sums."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
    results,
    steps,
)

from tilewright.dtype import F32, S4, S8, S16, S32, S64, U8, U32
from tilewright.ir.build import broadcast, const, convert, input_, map_, reshape, slice_, swap_last, transpose
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Quantize, Reduce, gemm
from tilewright.ir.ops.functions import narrow_integer

RULE = "multiply_shifted_integers_as_stored"
M, N, K = 6, 8, 12
G = torch.Generator()


def drawn(dtype, shape, seed=0):
    G.manual_seed(seed)
    wide = torch.randint(int(dtype.min), int(dtype.max) + 1, shape, generator=G, dtype=torch.int64)
    return narrow_integer(wide, dtype)


def shifted(x, zero, wide=S32):
    return map_("subtract", convert(x, wide), zero if zero.dtype is wide else convert(zero, wide))


def on_codes(before, narrow=8):
    after = assert_order_is_free(before, orders=4)
    assert fired(before, RULE) == 1
    (node,) = gemms(after)
    assert max(node.op.lhs.dtype.bits, node.op.rhs.dtype.bits) <= narrow
    assert arithmetic(after) == arithmetic(before)
    assert_exact(before, after)
    return after


ZEROS = {"none": None, "tensor": (), "channel": "channel"}


@pytest.mark.thin(3)
@pytest.mark.parametrize("wide", [S16, S32, U32, S64])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize(("za", "zb"), [("none", "none"), ("tensor", "none"), ("none", "channel"), ("channel", "tensor")])
@pytest.mark.parametrize(("a", "b"), [(S8, S8), (U8, S8), (S8, U8), (U8, U8), (S4, U8)], ids=str)
def test_every_kind_of_zero_point(a, b, za, zb, constant, wide):
    if wide is S16 and constant:
        za = zb = "none"  # numbers written in s16 are no codes any more
    if wide is U32:
        a, b = U8, U8
    x, w = input_("x", a, (M, K)), const(drawn(b, (K, N)), b) if constant else input_("w", b, (K, N))

    def operand(codes, kind, channel, name):
        if kind == "none":
            return convert(codes, wide)
        shape = channel if kind == "channel" else ()
        zero = const(drawn(codes.dtype, shape, 3), codes.dtype) if constant else input_(name, codes.dtype, shape)
        return shifted(codes, zero, wide)

    left, right = operand(x, za, (M, 1), "za"), operand(w, zb, (N,), "zb")
    if wide is U32:  # a product of u32 is added up in u32; one of s32 and u32 in s32
        left = convert(x, S32) if za == "none" else shifted(x, convert(input_("z", U8, ()), S32))
    after = on_codes(graph_of(gemm(left, right, acc_dtype=S32)))
    assert sum(k == "gemm" for k in kinds(after)) == 1


def test_extremes_wrap_as_the_program_does():
    """Zero points of any s32 and sums far past 2**31 come out modulo 2**32."""
    x, w = input_("x", U8, (3, 300)), input_("w", S8, (300, 5))
    before = graph_of(gemm(shifted(x, input_("za", S32, (3, 1))), shifted(w, input_("zb", S32, (5,))), acc_dtype=S32))
    after = on_codes(before)
    feeds = {
        "x": torch.full((3, 300), 255, dtype=torch.uint8),
        "w": torch.full((300, 5), -128, dtype=torch.int8),
        "za": torch.tensor([[2**31 - 1], [-(2**31)], [-1]], dtype=torch.int32),
        "zb": torch.tensor([2**31 - 1, -(2**31), 0, 1, -1], dtype=torch.int32),
    }
    assert torch.equal(results(before, feeds)[0], results(after, feeds)[0])


def test_a_zero_point_that_is_added_is_one():
    x, w = input_("x", U8, (M, K)), const(drawn(S8, (K, N)), S8)
    on_codes(graph_of(gemm(map_("add", convert(x, S32), const(-128, S32)), convert(w, S32))))


def test_constant_zeros_leave_the_codes_alone():
    x, w = input_("x", S8, (M, K)), const(drawn(S8, (K, N)), S8)
    before = graph_of(gemm(shifted(x, const(0, S8)), shifted(w, const(torch.zeros(N, dtype=torch.int8)))))
    after = on_codes(before)
    (node,) = gemms(after)
    assert len(node.src) == 2 and not any(isinstance(n.op, Reduce) for n in after.nodes())
    assert_no_growth(before, after)


def test_sums_over_a_weight_are_made_once_and_stand_in_the_store():
    x, w = input_("x", U8, (M, K)), const(drawn(S8, (K, N)), S8)
    before = graph_of(convert(gemm(shifted(x, input_("z", U8, ())), convert(w, S32)), F32))
    after = on_codes(before)
    assert kinds(after) == ["gemm"] and len(steps(after)) < len(steps(before))


def test_a_difference_stays_with_the_product_that_reads_it():
    """A product before it would else take the difference into its store, and leave s32 behind."""
    x, u, w = input_("x", U8, (M, K)), const(drawn(S8, (K, K), 1), S8), const(drawn(S8, (K, N)), S8)
    first = Node(Quantize(U8), convert(gemm(shifted(x, const(9, U8)), convert(u, S32)), F32), const(300.0, F32), const(128, U8))
    after = assert_order_is_free(graph_of(gemm(shifted(first, const(128, U8)), convert(w, S32))), orders=4)
    assert kinds(after) == ["gemm", "gemm"] and [g.op.lhs.dtype for g in gemms(after)] == [U8, U8]
    assert_exact(graph_of(gemm(shifted(first, const(128, U8)), convert(w, S32))), after)


def test_through_views():
    x, w = input_("x", U8, (2, K, M)), input_("w", S8, (2, 2 * N, K))
    left = swap_last(shifted(x, input_("za", U8, (2, 1, 1))))
    right = slice_(transpose(shifted(w, input_("zb", S8, (2 * N, 1))), (0, 2, 1)), 2, 3, 3 + N)
    on_codes(graph_of(gemm(left, right)))
    on_codes(graph_of(gemm(reshape(shifted(x, const(7, U8)), (M, 2 * K)), reshape(shifted(w, const(-3, S8)), (2 * K, 2 * N)))))
    on_codes(
        graph_of(
            gemm(broadcast(shifted(input_("y", U8, (M, K)), const(7, U8)), (3, M, K)), convert(input_("v", S8, (3, K, N)), S32))
        )
    )


def test_where_it_stays():
    x, w = input_("x", U8, (M, K)), input_("w", S8, (K, N))
    along_k = graph_of(gemm(shifted(x, input_("z", U8, (1, K))), convert(w, S32)))
    assert "a zero point varies along K" in refusals(along_k, RULE)
    wide = graph_of(gemm(input_("x", S32, (M, K)), convert(w, S32)))
    assert refusals(wide, RULE) == ["an operand of s32 is no integer of 8 bits with or without a zero point"]
    wraps = graph_of(gemm(convert(map_("subtract", x, const(3, U8)), S32), convert(w, S32)))  # modulo 256, before it is widened
    on_codes(wraps)
    halves = graph_of(gemm(map_("subtract", convert(x, S16), input_("z", S16, ())), convert(w, S16), acc_dtype=S32))
    assert fired(halves, RULE) == 0  # which wraps modulo 2**16
    signs = graph_of(gemm(convert(w, S32), map_("multiply", convert(input_("v", S8, (N, K)), S32), const(3, S32))))
    assert fired(signs, RULE) == 0


@settings(max_examples=25, deadline=None)
@given(
    m=st.sampled_from([0, 1, 3, 17]),
    k=st.sampled_from([0, 1, 5, 31]),
    n=st.sampled_from([0, 1, 2, 13]),
    a=st.sampled_from([S8, U8]),
    b=st.sampled_from([S8, U8]),
    zeros=st.lists(st.sampled_from(["none", "tensor", "channel"]), min_size=2, max_size=2),
)
def test_any_shape(m, k, n, a, b, zeros):
    x, w = input_("x", a, (m, k)), input_("w", b, (k, n))
    left, right = (
        convert(c, S32) if kind == "none" else shifted(c, input_(name, c.dtype, channel if kind == "channel" else ()))
        for c, kind, name, channel in ((x, zeros[0], "za", (m, 1)), (w, zeros[1], "zb", (1, n)))
    )
    before = graph_of(gemm(left, right))
    after = assert_order_is_free(before, orders=2)
    assert_exact(before, after)
    assert all(len(toposort((g.op.lhs,))) == 1 for g in gemms(after))
