"""Keys and values kept as 8-bit codes: decoding reads the codes, and nothing dequantises them beforehand."""

import pytest
from rule_checks import assert_close, assert_no_growth, assert_order_is_free, graph_of, kinds, refusals

from tilewright.dtype import BF16, F8E4M3FN, F16, F32, S8, U8
from tilewright.ir.build import broadcast, const, convert, input_, map_, reshape, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Attention, Dequantize

B, H, T, D = 2, 2, 24, 16
SCALES = {"tensor": (), "head": (1, H, 1, 1), "token": (B, 1, T, 1), "head and token": (B, H, T, 1)}


def rounded(codes, scale, dtype):
    """Multiplied in f32, then rounded."""
    return convert(map_("multiply", convert(codes, F32), broadcast(scale, codes.shape)), dtype)


def narrow(codes, scale, dtype):
    """Multiplied in the model's type, to which the scale is narrowed."""
    return map_("multiply", convert(codes, dtype), broadcast(convert(scale, dtype), codes.shape))


def linear(codes, scale, dtype):
    """Dequantise as DequantizeLinear does."""
    return Node(Dequantize(dtype), codes, scale)


def shifted(codes, scale, dtype):
    """Dequantise with a least value that is no code: codes * scale + offset."""
    return map_(
        "add", rounded(codes, scale, dtype), broadcast(input_(f"offset of {codes.op.label}", dtype, (B, H, T, 1)), codes.shape)
    )


def cached(write, codes, scale, dtype=BF16, queries=1, heads=8):
    q = input_("q", dtype, (B, heads, queries, D))
    made = [write(input_(n, codes, (B, H, T, D)), input_(f"{n}_scale", F32, scale), dtype) for n in "kv"]
    return graph_of(Node(Attention(0.25), q, *made))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("write", [rounded, narrow, linear, shifted], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("codes", "dtype"), [(S8, BF16), (F8E4M3FN, F16), (U8, F32)], ids=str)
def test_a_decoding_step_reads_codes(write, codes, dtype, scale):
    before = cached(write, codes, SCALES[scale], dtype)
    after = assert_order_is_free(before, orders=2)
    assert kinds(after) == ["attention"]
    (node,) = (n for n in after.nodes() if n.src)
    assert sum(s.dtype is codes for s in node.src) == 2
    assert_no_growth(before, after)
    assert_close(before, after, 4 * dtype.epsilon)


def test_repeated_for_its_group_after_it_is_dequantised():
    """Transformers' repeat_kv does so."""
    q = input_("q", F16, (B, 8, 1, D))
    made = []
    for n in "kv":
        wide = rounded(input_(n, S8, (B, H, T, D)), input_(f"{n}_scale", F32, (B, H, T, 1)), F16)
        made.append(reshape(broadcast(reshape(wide, (B, H, 1, T, D)), (B, H, 4, T, D)), (B, 8, T, D)))
    before = graph_of(Node(Attention(0.25), q, *made))
    after = assert_order_is_free(before, orders=2)
    assert kinds(after) == ["attention"]
    assert_no_growth(before, after)
    assert_close(before, after, 4 * F16.epsilon)


def test_a_cache_that_lies_by_tokens():
    """[B, T, H, D], with a scale for each head and token."""
    q = input_("q", F16, (B, 8, 1, D))
    kept = [rounded(input_(n, S8, (B, T, H, D)), input_(f"{n}_scale", F32, (B, T, H, 1)), F16) for n in "kv"]
    before = graph_of(Node(Attention(0.25), q, *(transpose(x, (0, 2, 1, 3)) for x in kept)))
    after = assert_order_is_free(before, orders=2)
    assert kinds(after) == ["attention"]
    assert_no_growth(before, after)
    assert_close(before, after, 4 * F16.epsilon)


@pytest.mark.parametrize("write", [rounded, narrow, linear, shifted], ids=lambda f: f.__name__)
def test_many_queries_have_their_keys_dequantised_once(write):
    before = cached(write, S8, (B, H, T, 1), queries=40)
    after = assert_order_is_free(before, orders=2)
    (node,) = (n for n in after.nodes() if isinstance(n.op, Attention))
    assert all(s.dtype is BF16 for s in node.src)
    assert_no_growth(before, after)
    if write is linear:
        assert any("every tile of queries" in why for why in refusals(before, "read_operand_through_views_and_casts"))


def test_a_function_that_costs_more_or_is_read_elsewhere_stays():
    codes, scale = input_("k", S8, (B, H, T, D)), const(0.1, F32)
    curved = map_("tanh", rounded(codes, scale, BF16))
    q, v = input_("q", BF16, (B, 8, 1, D)), input_("v", BF16, (B, H, T, D))
    assert kinds(assert_order_is_free(graph_of(Node(Attention(0.25), q, curved, v)), orders=2)) == ["elementwise", "attention"]
    offset = shifted(codes, scale, BF16)
    shared = graph_of(Node(Attention(0.25), q, offset, v), map_("negate", offset))
    assert any("other readers" in why for why in refusals(shared, "compute_cached_keys_where_they_are_read"))
