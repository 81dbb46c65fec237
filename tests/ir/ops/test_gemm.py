"""The gemm: integers against Python's, floats against float64; operand expressions, stores, errors."""

import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from values import FLOATS, INTEGERS, assert_same, constant, random_array, value_of

from tilewright.dtype import BF16, F8E4M3FN, F16, F32, F64, OPAQUE, PRED, S4, S8, S16, S32, S64, U4, U8, U16, U32, U64
from tilewright.errors import TypeMismatchError
from tilewright.ir.build import broadcast, const, convert, input_, items, map_, reshape, slice_, swap_last, transpose
from tilewright.ir.evaluate import accumulate_in_float64
from tilewright.ir.expression import make_gemm
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Call, Dequantize, Gemm, Param, Quantize, gemm
from tilewright.ir.types import TensorType

extents = st.sampled_from([0, 1, 2, 3, 5, 7, 17])
batches = st.lists(st.sampled_from([1, 2, 3]), max_size=2)


def whole(x: np.ndarray) -> np.ndarray:
    """Python's own integers."""
    return np.array([int(v) for v in x.reshape(-1).tolist()], dtype=object).reshape(x.shape)


def wrapped(x: np.ndarray, d) -> np.ndarray:
    low, size = int(d.min), 1 << d.bits
    return np.array([(v - low) % size + low for v in x.reshape(-1).tolist()], dtype=object).reshape(x.shape)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b for object arrays, batch axes broadcast, K = 0 too."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = np.broadcast_to(a, (*batch, *a.shape[-2:])), np.broadcast_to(b, (*batch, *b.shape[-2:]))
    out = np.empty((*batch, a.shape[-2], b.shape[-1]), dtype=object)
    for i in np.ndindex(out.shape):
        row, column = a[(*i[:-2], i[-2])], b[(*i[:-2], slice(None), i[-1])]
        out[i] = sum((x * y for x, y in zip(row.tolist(), column.tolist(), strict=True)), 0)
    return out


@given(
    st.sampled_from(INTEGERS),
    st.sampled_from(INTEGERS),
    st.sampled_from(INTEGERS),
    extents,
    extents,
    extents,
    batches,
    st.data(),
)
def test_integers_are_exact_modulo_the_accumulator(da, db, acc, m, k, n, batch, data):
    a_batch = [data.draw(st.sampled_from([e, 1])) for e in batch]
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    b_batch = batch[data.draw(st.integers(0, len(batch))) :]
    a, b = random_array(da, (*a_batch, m, k), rng, 0.5), random_array(db, (*b_batch, k, n), rng, 0.5)
    node = gemm(constant(a, da), constant(b, db), acc_dtype=acc)
    got = value_of(node)
    wanted = wrapped(product(whole(a), whole(b)), acc)
    assert got.shape == wanted.shape
    assert whole(got).tolist() == wanted.tolist()


PAIRS = [(S8, S8), (U8, S8), (S16, S16), (U16, S16), (S32, S32), (U32, U32), (S64, S64), (U64, U64)]


@pytest.mark.parametrize(("da", "db"), PAIRS, ids=str)
def test_the_largest_products_do_not_lose_a_bit(da, db):
    """All extremes, over a K where float64 and s32 no longer hold the sum."""
    k = 4096
    for x, y in ((da.min, db.min), (da.max, db.max), (da.min, db.max), (da.max, db.min)):
        a = np.full((1, k), int(x), dtype=object).astype(da.to_numpy())
        b = np.full((k, 1), int(y), dtype=object).astype(db.to_numpy())
        for acc in (S32, S64, U64, S8):
            got = value_of(gemm(constant(a, da), constant(b, db), acc_dtype=acc))
            assert int(got[0, 0]) == wrapped(np.array([[k * int(x) * int(y)]], dtype=object), acc)[0, 0], (x, y, acc)


@pytest.mark.parametrize("out", [S8, S32], ids=str)
def test_integer_products_are_xlas(out):
    rng = np.random.default_rng(0)
    a, b = random_array(S8, (17, 64), rng), random_array(S8, (64, 5), rng)
    wanted = np.asarray(lax.dot(a, b, preferred_element_type=out.to_numpy()))
    assert_same(value_of(gemm(constant(a, S8), constant(b, S8), acc_dtype=out)), wanted)
    assert_same(value_of(gemm(constant(a, S8), constant(b, S8), out_dtype=out)), wanted)


@given(st.sampled_from(FLOATS), st.sampled_from(FLOATS), extents, extents, extents, st.booleans())
def test_floats_accumulate_in_f32_or_on_request_in_float64(da, db, m, k, n, wide):
    rng = np.random.default_rng(1)
    a, b = random_array(da, (m, k), rng, 0), random_array(db, (k, n), rng, 0)
    node = gemm(constant(a, da), constant(b, db))
    acc = F64 if F64 in (da, db) else F32
    assert node.dtype is acc
    with accumulate_in_float64(wide):
        got = value_of(node)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    if wide and acc is F32:
        near = exact.astype(np.float32)
        assert (np.abs(got - near) <= 2.0**-23 * np.abs(near)).all()
    bound = (k + 2) * acc.epsilon * (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)))
    assert (np.abs(got - exact) <= bound).all()


@pytest.mark.parametrize("acc", [F16, BF16, F8E4M3FN], ids=str)
def test_a_narrow_float_accumulator_is_rounded_once_at_the_end(acc):
    a, b = np.full((1, 300), 1, np.float16), np.full((300, 1), 1, np.float16)
    got = value_of(gemm(constant(a, F16), constant(b, F16), acc_dtype=acc))
    with np.errstate(all="ignore"):
        assert_same(got, np.array([[300.0]]).astype(acc.to_numpy()))


def test_nan_and_infinity_travel():
    a = np.array([[np.nan, 0], [np.inf, 0], [np.inf, -np.inf], [0, 0]], np.float32)
    b = np.array([[1.0], [1.0]], np.float32)
    assert_same(value_of(gemm(constant(a, F32), constant(b, F32))), np.array([[np.nan], [np.inf], [np.nan], [0]], np.float32))
    zero, infinity = constant(np.zeros((1, 1), np.float32), F32), constant(np.full((1, 1), np.inf, np.float32), F32)
    assert np.isnan(value_of(gemm(zero, infinity))).all()


@pytest.mark.parametrize("d", [S8, U64, F32, F16, F64, F8E4M3FN], ids=str)
def test_a_sum_over_nothing_is_zero(d):
    a, b = (constant(random_array(d, shape, np.random.default_rng(0)), d) for shape in ((3, 0), (0, 2)))
    assert (value_of(gemm(a, b)) == 0).all()
    assert value_of(gemm(b, swap_last(b))).shape == (0, 0)
    assert value_of(gemm(swap_last(b), constant(np.empty((0, 0)).astype(d.to_numpy()), d))).shape == (2, 0)


def test_the_default_accumulator_is_the_wider_one():
    wanted = {(S8, S8): S32, (S8, S64): S64, (U8, S32): S32, (F16, F16): F32, (F32, F64): F64, (F8E4M3FN, BF16): F32}
    for (da, db), acc in wanted.items():
        assert gemm(input_("a", da, (2, 3)), input_("b", db, (3, 4))).dtype is acc


def sources_of(*given):
    nodes = [constant(a, d) for a, d in given]
    return nodes, [Node(Param(i, n.tensor)) for i, n in enumerate(nodes)]


def test_operands_are_views_of_what_is_stored():
    """lhs: a head of a packed [S, H, D] tensor; rhs: a slice of a transposed weight, broadcast over heads."""
    rng = np.random.default_rng(2)
    x, w = random_array(S8, (5, 24), rng), random_array(S8, (9, 8), rng)
    nodes, (px, pw) = sources_of((x, S8), (w, S8))
    lhs = transpose(reshape(px, (5, 3, 8)), (1, 0, 2))
    rhs = broadcast(slice_(swap_last(pw), 1, 2, 6), (3, 8, 4))
    acc = Node(Acc(Gemm(S32, lhs, rhs, ()).acc_type))
    node = Node(Gemm(S32, lhs, rhs, (acc,)), *nodes)
    assert node.tensor == TensorType(S32, (3, 5, 4))
    wanted = x.reshape(5, 3, 8).transpose(1, 0, 2).astype(np.int32) @ w.T[:, 2:6].astype(np.int32)
    assert_same(value_of(node), wanted)


@pytest.mark.parametrize("code", [S4, U4, S8, U8, F8E4M3FN], ids=str)
@pytest.mark.parametrize("group", [1, 4, 5, 16, 100])
def test_operands_dequantise_by_group(code, group):
    rng = np.random.default_rng(3)
    x, w = random_array(F16, (3, 16), rng, 0), random_array(code, (16, 6), rng, 0)
    groups = -(-16 // group)
    scale = rng.uniform(0.01, 0.1, (groups, 6)).astype(np.float16)
    zero = random_array(code, (groups, 6), rng) if code.is_integer else None
    given = [(x, F16), (w, code), (scale, F16), *([(zero, code)] if zero is not None else [])]
    nodes, params = sources_of(*given)
    rhs = Node(Dequantize(F16, (group, 1)), *params[1:])
    node = make_gemm(F32, params[0], rhs, (Node(Acc(Gemm(F32, params[0], rhs, ()).acc_type)),), nodes)
    rows = np.arange(16) // group
    codes = w.astype(np.float64) - (0 if zero is None else zero.astype(np.float64)[rows])
    real = (codes.astype(np.float32) * scale.astype(np.float32)[rows]).astype(np.float16).astype(np.float64)
    wanted = x.astype(np.float64) @ real
    assert np.abs(value_of(node) - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_stores_are_ranges_of_the_product_each_with_its_own_tail_and_view():
    """Q, K and V of one product: K stored transposed as codes, V with a bias in bf16, and the whole of it as it is."""
    rng = np.random.default_rng(4)
    x, w, bias = random_array(S8, (10, 8), rng), random_array(S8, (8, 12), rng), random_array(F32, (4,), rng, 0)
    scale = np.array([0.01, 0.02, 0.5, 3.0], np.float32)
    nodes, (px, pw, pb, ps) = sources_of((x, S8), (w, S8), (bias, F32), (scale, F32))
    acc = Node(Acc(TensorType(S32, (10, 12))))
    q, k, v = (slice_(acc, 1, i, i + 4) for i in (0, 4, 8))
    stores = (
        reshape(q, (2, 5, 4)),
        transpose(reshape(Node(Quantize(S8), convert(k, F32), ps), (2, 5, 4)), (0, 2, 1)),
        convert(map_("add", convert(v, F32), pb), BF16),
        convert(acc, S8),
    )
    node = Node(Gemm(S32, px, pw, stores), *nodes)
    assert str(node.type) == "(s32[2,5,4], s8[2,4,5], bf16[10,4], s8[10,12])"
    got = [value_of(i) for i in items(node)]
    full = x.astype(np.int64) @ w.astype(np.int64)
    assert_same(got[0], full[:, :4].reshape(2, 5, 4).astype(np.int32))
    codes = np.clip(np.rint(full[:, 4:8].astype(np.float32) / scale), -128, 127).astype(np.int8)
    assert_same(got[1], codes.reshape(2, 5, 4).transpose(0, 2, 1))
    assert_same(got[2], (full[:, 8:].astype(np.float32) + bias).astype(BF16.to_numpy()))
    assert_same(got[3], full.astype(np.int8))


def test_one_source_may_be_both_operands_and_a_residual():
    x = random_array(F64, (4, 4), np.random.default_rng(5), 0)
    nodes, (p,) = sources_of((x, F64))
    acc = Node(Acc(TensorType(F64, (4, 4))))
    node = Node(Gemm(F64, p, swap_last(p), (map_("add", acc, p),)), *nodes)
    assert np.allclose(value_of(node), x @ x.T + x, rtol=1e-14)


def test_a_store_may_leave_the_product_unread():
    nodes, (p,) = sources_of((np.ones((2, 2), np.float32), F32))
    assert (value_of(Node(Gemm(F32, p, p, (const(7.0, F32),)), *nodes)) == 7).all()


def test_xla_agrees_on_batches():
    rng = np.random.default_rng(6)
    a, b = random_array(F64, (3, 4, 5), rng, 0), random_array(F64, (3, 5, 2), rng, 0)
    with jax.enable_x64(True):
        wanted = np.asarray(lax.batch_matmul(a, b))
    assert np.allclose(value_of(gemm(constant(a, F64), constant(b, F64))), wanted, rtol=1e-13)


def test_torch_agrees_with_the_oracle_in_f32():
    rng = np.random.default_rng(7)
    a, b = random_array(F32, (33, 65), rng, 0), random_array(F32, (65, 17), rng, 0)
    wanted = (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()
    assert np.allclose(value_of(gemm(constant(a, F32), constant(b, F32))), wanted, rtol=1e-4, atol=1e-4)


def test_wrong_operands_are_refused():
    x, y, i = input_("x", F32, (2, 3)), input_("y", F32, (3, 4)), input_("i", S8, (3, 4))
    p23, p34 = input_("p", PRED, (2, 3)), input_("p", PRED, (3, 4))
    px, py, minus = Node(Param(0, x.tensor)), Node(Param(1, y.tensor)), Node(Param(-1, x.tensor))
    acc, other, inner = (Node(Acc(TensorType(F32, shape))) for shape in ((2, 4), (4, 2), (3, 4)))
    call = Node(Call("a", "b", "", (x.tensor, y.tensor)), x)
    opaque = Node(Call("a", "b", "", (TensorType(OPAQUE, ()),)), x)
    batches = [input_("b", F32, (2, 2, 3)), input_("c", F32, (3, 3, 4))]
    square = TensorType(F32, (2, 2))
    own = Gemm(F32, Node(Param(0, square)), Node(Acc(square)), (const(1.0),))
    for node, message in (
        (lambda: gemm(x, x), r"cannot multiply f32\[2,3\] by f32\[2,3\] \(gemm\)\n  try: inner extents must agree"),
        (lambda: gemm(reshape(x, (6,)), y), r"cannot multiply f32\[6\] by f32\[3,4\]"),
        (lambda: gemm(x, reshape(y, (12,))), r"cannot multiply f32\[2,3\] by f32\[12\]"),
        (lambda: gemm(opaque, y), r"cannot multiply opaque by f32\[3,4\]"),
        (lambda: gemm(x, i), r"cannot multiply f32 by s8 into f32\n  try: convert first"),
        (lambda: gemm(x, y, acc_dtype=S32), "cannot multiply f32 by f32 into s32"),
        (lambda: gemm(swap_last(i), input_("j", S8, (3, 2)), acc_dtype=F32), "cannot multiply s8 by s8 into f32"),
        (lambda: gemm(swap_last(i), input_("j", S8, (3, 2)), acc_dtype=PRED), "cannot multiply s8 by s8 into pred"),
        (lambda: gemm(swap_last(i), input_("j", S8, (3, 2)), acc_dtype=OPAQUE), "cannot multiply s8 by s8 into opaque"),
        (lambda: gemm(p23, i), "cannot multiply pred by s8 into"),
        (lambda: gemm(swap_last(i), swap_last(p23)), "cannot multiply s8 by pred into"),
        (lambda: gemm(p23, p34), "cannot multiply pred by pred into"),
        (lambda: gemm(*batches), r"shapes \[2\] and \[3\] do not broadcast together \(gemm batch\)"),
        (lambda: Node(Gemm(F32, px, py, ()), x, y), "gemm without a store"),
        (lambda: Node(Gemm(F32, px, py, (acc,)), x), r"param 1 is f32\[3,4\] but the gemm is given nothing"),
        (lambda: Node(Gemm(F32, px, py, (acc,)), x, i), r"param 1 is f32\[3,4\] but the gemm is given s8\[3,4\]"),
        (lambda: Node(Gemm(F32, minus, py, (acc,)), x, y), r"param -1 is f32\[2,3\] but the gemm is given nothing"),
        (lambda: Node(Gemm(F32, px, py, (other,)), x, y), r"a store reads acc as f32\[4,2\]; it is f32\[2,4\]"),
        (lambda: Node(Gemm(F32, px, inner, (acc,)), x), r"reads acc as f32\[3,4\]|reads its own accumulator"),
        (lambda: Node(own, input_("s", F32, (2, 2))), "an operand of a gemm reads its own accumulator"),
        (lambda: Node(Gemm(F32, px, py, (call,)), x, y), "call has several results"),
        (lambda: Node(Gemm(F32, px, py, (acc,)), call), r"gemm takes tensors, not the tuple \(f32\[2,3\], f32\[3,4\]\)"),
        (lambda: Gemm("f32", px, py, (acc,)), "gemm: acc_dtype is 'f32', not a DType"),
        (lambda: Gemm(F32, px, py, (acc, 3)), r"gemm: stores is .*, not a Node"),
        (lambda: Gemm(F32, px, None, (acc,)), "gemm: rhs is None, not a Node"),
    ):
        with pytest.raises(TypeMismatchError, match=message):
            node()
