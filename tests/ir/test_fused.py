"""Building one gemm with what surrounds it: the numbers, exactly where they are exact, and what is refused."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.dtype import BF16, F8E4M3FN, F8E5M2, F16, F32, F64, S4, S8, S16, S32, S64, U8, dtype
from tilewright.errors import TypeMismatchError
from tilewright.ir.build import const, input_
from tilewright.ir.evaluate import evaluate
from tilewright.ir.fused import Apply, Result, Side, fused_gemm
from tilewright.ir.graph import Graph
from tilewright.ir.ops import Dequantize, Gemm
from tilewright.ir.verify import verify

RNG = np.random.default_rng(0)


def run(node, feeds, float64=False):
    names = {n.op.label: n for n in Graph("g", (), (node,), ("y",)).nodes() if n.op.name == "input"}
    graph = verify(Graph("g", tuple(names.values()), (node,), ("y",)))
    return evaluate(graph, {k: torch.as_tensor(v) for k, v in feeds.items()}, float64=float64)[0]


def codes(t, *shape):
    return RNG.integers(t.min, t.max, shape, endpoint=True).astype(np.int64)


def stored(array, t):
    return torch.tensor(np.array(array)).to(t.to_torch())


INTEGERS = [S4, S8, U8, S16]


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(INTEGERS),
    st.sampled_from(INTEGERS),
    st.tuples(*[st.integers(0, 6)] * 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([((), ()), ((2,), (2,)), ((2,), ()), ((), (3,)), ((2, 1), (3,))]),
    st.sampled_from(["tensor", "channel", "vector", "none"]),
    st.sampled_from(["tensor", "channel", "none"]),
)
def test_zero_points_of_codes_are_corrected_exactly(ta, tb, extents, at, bt, batch, za_kind, zb_kind):
    """((a - za) @ (b - zb)) modulo 2**32, for every layout, batch and extent."""
    m, k, n = extents
    a, b = codes(ta, *batch[0], m, k), codes(tb, *batch[1], k, n)
    za = {"tensor": codes(ta), "channel": codes(ta, m, 1), "vector": codes(ta, m, 1), "none": np.zeros((), np.int64)}[za_kind]
    zb = {"tensor": codes(tb), "channel": codes(tb, 1, n), "none": np.zeros((), np.int64)}[zb_kind]
    wanted = (a - za) @ (b - zb)

    def side(name, value, zero, transposed, t, none, flat):
        laid = value.swapaxes(-1, -2) if transposed else value
        laid_zero = zero.swapaxes(-1, -2) if transposed and zero.ndim else zero
        if flat and transposed:  # one value a column of what is stored needs no leading axis
            laid_zero = laid_zero.reshape(-1)
        feeds = {name: stored(laid, t)} | ({} if none else {f"z{name}": stored(laid_zero, t)})
        zero_node = None if none else input_(f"z{name}", t, laid_zero.shape)
        return Side(input_(name, t, laid.shape), transposed, zero_point=zero_node), feeds

    lhs, fa = side("a", a, za, at, ta, za_kind == "none", za_kind == "vector")
    rhs, fb = side("b", b, zb, bt, tb, zb_kind == "none", False)
    node = fused_gemm(lhs, rhs, None)
    assert node.dtype is S32
    got = run(node, fa | fb).to(torch.int64).numpy()
    np.testing.assert_array_equal(got, wanted.astype(np.int32).astype(np.int64))


def test_zero_points_in_a_wide_accumulator_are_not_narrowed():
    a, b = codes(S16, 3, 50), codes(S16, 50, 4)
    lhs = Side(input_("a", S16, a.shape), zero_point=const(torch.tensor(-32768, dtype=torch.int16)))
    rhs = Side(input_("b", S16, b.shape), zero_point=const(torch.tensor(32767, dtype=torch.int16)))
    got = run(fused_gemm(lhs, rhs, None, acc_dtype=S64), {"a": stored(a, S16), "b": stored(b, S16)})
    np.testing.assert_array_equal(got.numpy(), (a + 32768) @ (b - 32767))
    assert abs(got).max() > 2**31


def test_scales_of_codes_stand_in_the_epilogue_and_the_codes_are_multiplied_as_they_are():
    lhs = Side(input_("a", S8, (3, 8)), scale=input_("sa", F32, (3, 1)))
    rhs = Side(input_("b", U8, (5, 8)), True, scale=input_("sb", F16, (5, 1)))
    node = fused_gemm(lhs, rhs, Result(BF16))
    assert not any(isinstance(n.op, Dequantize) for n in (node.op.lhs, node.op.rhs)) and node.op.acc_dtype is S32
    a, b, sa = codes(S8, 3, 8), codes(U8, 5, 8), RNG.uniform(0.1, 1, (3, 1)).astype(np.float32)
    sb = RNG.uniform(0.1, 1, (5, 1)).astype(np.float16)
    got = run(node, {"a": stored(a, S8), "b": stored(b, U8), "sa": sa, "sb": sb}).double().numpy()
    np.testing.assert_allclose(got, (a * sa) @ (b * sb.astype(float)).T, rtol=2**-8)


@pytest.mark.parametrize(("ta", "tb"), [(F8E4M3FN, F8E4M3FN), (F8E5M2, F8E4M3FN), (dtype("f8e4m3fnuz"), dtype("f8e5m2fnuz"))])
def test_8_bit_floats_against_8_bit_floats(ta, tb):
    a, b = RNG.standard_normal((3, 40)).astype(ta.to_numpy()), RNG.standard_normal((40, 5)).astype(tb.to_numpy())
    lhs = Side(input_("a", ta, a.shape), scale=const(0.5, F32))
    rhs = Side(input_("b", tb, b.shape), scale=input_("sb", F32, (1, 5)))
    node = fused_gemm(lhs, rhs, None)
    assert node.op.acc_dtype is F32 and not any(isinstance(n.op, Dequantize) for n in (node.op.lhs, node.op.rhs))
    sb = RNG.uniform(0.5, 2, (1, 5)).astype(np.float32)
    feeds = {name: torch.from_numpy(x.view(np.uint8)).view(t.to_torch()) for name, x, t in (("a", a, ta), ("b", b, tb))}
    got = run(node, feeds | {"sb": sb}, float64=True)
    np.testing.assert_allclose(got, 0.5 * (a.astype(float) @ b.astype(float)) * sb, rtol=1e-6, atol=1e-6)


def test_an_8_bit_float_against_a_wider_one_is_dequantised_to_it():
    a = RNG.standard_normal((3, 8)).astype(ml_dtypes.bfloat16)
    b = RNG.standard_normal((8, 6)).astype(ml_dtypes.float8_e4m3fn)
    scale = RNG.uniform(0.5, 2, (4, 2)).astype(np.float32)
    rhs = Side(input_("b", F8E4M3FN, (8, 6)), scale=input_("s", F32, (4, 2)), block=(2, 3))
    node = fused_gemm(Side(input_("a", BF16, (3, 8))), rhs, None)
    assert node.op.rhs.dtype is BF16 and node.op.lhs.dtype is BF16
    feeds = {"a": torch.from_numpy(a.view(np.int16)).view(torch.bfloat16), "s": torch.from_numpy(scale)}
    feeds["b"] = torch.from_numpy(b.view(np.uint8)).view(torch.float8_e4m3fn)
    wide = np.repeat(np.repeat(scale, 2, 0), 3, 1) * b.astype(np.float32)
    wanted = a.astype(float) @ wide.astype(ml_dtypes.bfloat16).astype(float)
    np.testing.assert_allclose(run(node, feeds, float64=True), wanted, rtol=1e-6)


@pytest.mark.parametrize("k", [1, 7, 8, 13, 64])
@pytest.mark.parametrize("transposed", [False, True])
def test_groups_along_k_with_a_ragged_end(k, transposed):
    """Code k of a column belongs to group k // 8, whole or not."""
    a, b, groups = RNG.standard_normal((3, k)), codes(S4, k, 5), -(-k // 8)
    scale, zero = RNG.uniform(0.5, 1.5, (groups, 5)), codes(S4, groups, 5)
    index = np.arange(k) // 8
    wanted = a.astype(np.float32).astype(float) @ ((b - zero[index]) * scale.astype(np.float32)[index].astype(float))
    laid = (lambda x: np.ascontiguousarray(x.T)) if transposed else (lambda x: x)
    rhs = Side(
        input_("b", S4, laid(b).shape),
        transposed,
        input_("s", F32, laid(scale).shape),
        input_("z", S4, laid(zero).shape),
        (1, 8) if transposed else (8, 1),
    )
    node = fused_gemm(Side(input_("a", F32, a.shape)), rhs, None)
    feeds = {
        "a": a.astype(np.float32),
        "b": stored(laid(b), S4),
        "s": laid(scale).astype(np.float32),
        "z": stored(laid(zero), S4),
    }
    np.testing.assert_allclose(run(node, feeds, float64=True), wanted, rtol=1e-5, atol=1e-5)


def test_a_zero_point_without_a_scale_shifts_all_the_same():
    a, b = RNG.standard_normal((3, 8)).astype(np.float32), codes(U8, 8, 5)
    rhs = Side(input_("b", U8, b.shape), zero_point=const(torch.tensor(128, dtype=torch.uint8)))
    got = run(fused_gemm(Side(input_("a", F32, a.shape)), rhs, None), {"a": a, "b": stored(b, U8)}, float64=True)
    np.testing.assert_allclose(got, a.astype(float) @ (b - 128.0), rtol=1e-6, atol=1e-4)


def test_steps_are_computed_in_f32_or_as_integers_while_both_are():
    a, b = input_("a", S8, (2, 3)), input_("b", S8, (3, 2))
    integer = fused_gemm(Side(a), Side(b), None, [Apply("add", input_("c", S8, (2,))), Apply("relu")])
    assert integer.dtype is S32
    as_float = fused_gemm(Side(a), Side(b), None, [Apply("add", input_("c", BF16, (2,)))])
    assert as_float.dtype is F32
    assert fused_gemm(Side(a), Side(b), None, [Apply("tanh")]).dtype is F32
    d, e = input_("d", F64, (2, 3)), input_("e", F64, (3, 2))
    assert fused_gemm(Side(d), Side(e), None, [Apply("add", input_("c", F32, (2,)))]).dtype is F64
    rounded = fused_gemm(Side(d), Side(e), None, [Apply("bf16"), Apply("add", const(1.0, F32))])
    assert rounded.dtype is F32
    x = torch.full((2, 3), 1.0 / 3, dtype=torch.float64)
    got = run(rounded, {"d": x, "e": torch.ones(3, 2, dtype=torch.float64)})
    assert (got == torch.tensor(1.0, dtype=torch.bfloat16).float() + 1).all()


@pytest.mark.parametrize(
    ("a", "b", "acc"),
    [
        (S8, U8, S32),
        (S4, S4, S32),
        (S16, S8, S32),
        (S32, S8, S32),
        (S64, S8, S64),
        (BF16, BF16, F32),
        (F16, F32, F32),
        (F64, F32, F64),
        (F8E4M3FN, BF16, F32),
        (S8, F16, F32),
        (S8, F64, F64),
    ],
)
def test_the_natural_accumulator(a, b, acc):
    assert fused_gemm(Side(input_("a", a, (2, 3))), Side(input_("b", b, (3, 2))), None).op.acc_dtype is acc


def test_each_source_stands_once():
    x = input_("x", F32, (4, 4))
    node = fused_gemm(Side(x), Side(x, True), None, [Apply("add", x), Apply("multiply", x)])
    assert node.src == (x,) and isinstance(node.op, Gemm)


X, Y = input_("x", S8, (3, 4)), input_("y", S8, (4, 5))
F = input_("f", F32, (4, 5))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: fused_gemm(Side(input_("v", F32, (4,))), Side(F), None), r"f32\[4\] is no matrix"),
        (lambda: fused_gemm(Side(X), Side(input_("w", S8, (5, 5))), None), r"cannot multiply s8\[3,4\] by s8\[5,5\]"),
        (lambda: fused_gemm(Side(X, scale=input_("s", F32, (1, 4))), Side(Y), None), r"f32\[1,4\] of codes varies along K"),
        (lambda: fused_gemm(Side(X), Side(Y, zero_point=input_("z", S8, (4, 1))), None), r"s8\[4,1\] of codes varies along K"),
        (lambda: fused_gemm(Side(X, scale=input_("s", F32, (2, 3, 1))), Side(Y), None), "is larger than its operand"),
        (lambda: fused_gemm(Side(X, scale=input_("s", F32, (1, 1, 1))), Side(Y), None), "is larger than its operand"),
        (
            lambda: fused_gemm(Side(X, scale=input_("s", F32, (3, 3))), Side(Y), None),
            "does not broadcast to its operand",
        ),
        (lambda: fused_gemm(Side(X, scale=input_("s", S32, ())), Side(F), None), "the scale is s32, not a float"),
        (
            lambda: fused_gemm(Side(X), Side(F, block=(2, 1)), None),
            r"blocks of \[2, 1\] are given for f32\[4,5\], but no scale",
        ),
        (lambda: fused_gemm(Side(X), Side(Y, zero_point=input_("z", F32, ())), None), r"a zero point f32\[\] of s8\[4,5\]"),
        (lambda: fused_gemm(Side(X), Side(F, zero_point=input_("z", S8, ())), None), r"a zero point s8\[\] of f32\[4,5\]"),
        (
            lambda: fused_gemm(Side(X), Side(F, scale=input_("s", F32, (3, 5)), block=(2, 1)), None),
            r"does not give one value a \[2, 1\] block",
        ),
        (lambda: fused_gemm(Side(X), Side(Y), None, [Apply("add", input_("c", F32, (2, 3, 5)))]), "is larger than the result"),
        (
            lambda: fused_gemm(Side(X), Side(Y), Result(S8, zero_point=input_("z", S8, ()))),
            "without a scale would have no effect",
        ),
        (
            lambda: fused_gemm(Side(X), Side(Y), Result(F8E4M3FN, "wrap", const(1.0, F32), input_("z", F8E4M3FN, ()))),
            "a zero point of the result of f8e4m3fn would have no effect",
        ),
        (lambda: fused_gemm(Side(X), Side(Y), Result(F32, "wrap", const(1.0, F32))), "a result is not quantised to f32"),
        (lambda: fused_gemm(Side(input_("i", S32, (3, 4))), Side(F), None), "f32 does not hold every s32"),
        (lambda: fused_gemm(Side(X), Side(Y), None, acc_dtype=F32), "cannot multiply s8 by s8 into f32"),
    ],
)
def test_what_would_be_lost_or_does_not_fit_is_refused(build, message):
    with pytest.raises(TypeMismatchError, match=message):
        build()


@pytest.mark.parametrize("t", [S8, U8, S4, F8E4M3FN])
def test_quantised_results(t):
    a, b = RNG.standard_normal((4, 16)).astype(np.float32), RNG.standard_normal((16, 6)).astype(np.float32)
    scale = RNG.uniform(0.05, 0.2, (4, 1)).astype(np.float32)
    zero = None if t.is_float else input_("z", t, ())
    node = fused_gemm(
        Side(input_("a", F32, a.shape)), Side(input_("b", F32, b.shape)), Result(t, "wrap", input_("s", F32, (4, 1)), zero)
    )
    feeds = {"a": a, "b": b, "s": scale} | ({} if zero is None else {"z": torch.tensor(3, dtype=t.to_torch())})
    got = run(node, feeds, float64=True)
    quotient = (a.astype(float) @ b.astype(float)).astype(np.float32) / scale
    if t.is_float:
        np.testing.assert_array_equal(
            got.float().numpy(), quotient.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        )
    else:
        np.testing.assert_array_equal(got.to(torch.int64), np.clip(np.round(quotient) + 3, t.min, t.max))
