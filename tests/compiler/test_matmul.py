"""tilewright.matmul: one product, every argument."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

import tilewright
from tilewright import product
from tilewright.compiler import compile
from tilewright.errors import InputError, TypeMismatchError
from tilewright.product import matmul

RNG = np.random.default_rng(0)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def codes(*shape, low=-128, high=127, dtype=np.int8):
    return RNG.integers(low, high, shape, endpoint=True).astype(dtype)


def close(got, wanted, rtol=1e-5):
    np.testing.assert_allclose(np.asarray(got, dtype=np.float64), wanted, rtol=rtol, atol=rtol * max(np.abs(wanted).max(), 1))


@pytest.mark.thin(3)
@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize("batch", [((), ()), ((3,), (3,)), ((3,), ()), ((2, 1), (5,))])
def test_transposes_and_batches(ta, tb, batch):
    a, b = floats(*batch[0], 4, 6), floats(*batch[1], 6, 5)
    stored_a, stored_b = (a.swapaxes(-1, -2) if ta else a), (b.swapaxes(-1, -2) if tb else b)
    close(matmul(stored_a, stored_b, transpose_a=ta, transpose_b=tb), a.astype(float) @ b)


@pytest.mark.thin(3)
@pytest.mark.parametrize("ta", [False, True])
@pytest.mark.parametrize("tb", [False, True])
@pytest.mark.parametrize(("a", "b"), [((6,), (6,)), ((4, 6), (6,)), ((6,), (6, 5)), ((3, 4, 6), (6,)), ((6,), (2, 3, 6, 5))])
def test_a_vector_is_a_row_or_a_column_and_its_axis_goes(ta, tb, a, b):
    a, b = floats(*a), floats(*b)
    stored_a, stored_b = (a.swapaxes(-1, -2) if ta and a.ndim > 1 else a), (b.swapaxes(-1, -2) if tb and b.ndim > 1 else b)
    wanted = np.matmul(a.astype(float), b)
    got = matmul(stored_a, stored_b, transpose_a=ta, transpose_b=tb)
    assert np.shape(got) == wanted.shape
    close(got, wanted)
    bias, residual, scale = (floats(*wanted.shape[-1:]), floats(*wanted.shape), floats(*wanted.shape[-2:]))
    got = matmul(stored_a, stored_b, transpose_a=ta, transpose_b=tb, scale=scale, bias=bias, residual=residual)
    assert np.shape(got) == wanted.shape
    close(got, wanted * scale + bias + residual)


def test_scales_of_vectors():
    a, b, rows = codes(6), codes(6), codes(4, 6)
    wanted = (a.astype(float) - 3) * 0.5 @ ((b.astype(float) + 2) * 0.25)
    close(matmul(a, b, a_scale=0.5, a_zero_point=3, b_scale=0.25, b_zero_point=-2), wanted)
    x, scales = floats(4, 6), floats(3)
    close(matmul(x, b, b_scale=scales, group_size=2), x.astype(float) @ (b * scales.repeat(2)))
    row_scale, out_scale = floats(4, 1) ** 2, np.float32([1, 2, 3, 4])
    got = matmul(rows, b, a_scale=row_scale, out_scale=out_scale, out_dtype="s8")
    exact = (rows.astype(float) * row_scale) @ b / out_scale
    assert got.shape == (4,)
    assert (np.abs(got - np.clip(np.round(exact), -128, 127)) <= 1).all()


def test_types_of_results():
    a, b = floats(2, 3), floats(3, 4)
    assert matmul(a, b).dtype == np.float32
    assert matmul(codes(2, 3), codes(3, 4)).dtype == np.int32
    assert matmul(codes(2, 3), codes(3, 4), scale=0.5).dtype == np.float32
    assert matmul(a.astype(np.float64), b.astype(np.float64)).dtype == np.float64
    half = matmul(a.astype(np.float16), b.astype(np.float16), out_dtype="f16")
    assert half.dtype == np.float16
    assert matmul(a.astype(np.float16), b.astype(np.float16), acc_dtype="f16").dtype == np.float16
    assert matmul(a, b, out_dtype="bfloat16").dtype == ml_dtypes.bfloat16
    assert matmul(a, codes(3, 4)).dtype == np.float32


def test_numpy_torch_dlpack_and_plain_numbers():
    a, b = floats(2, 3), floats(3, 4)
    numpy = matmul(a, b, scale=2, bias=0.5)
    assert type(numpy) is np.ndarray
    close(numpy, a.astype(float) @ b * 2 + 0.5)
    torched = matmul(torch.from_numpy(a), torch.from_numpy(b), scale=2)
    assert type(torched) is torch.Tensor
    assert type(matmul(a, torch.from_numpy(b))) is torch.Tensor

    class Lent:  # no shape, no dtype, nothing but DLPack
        def __init__(self, t):
            self._t = t

        def __dlpack__(self, **kwargs):
            return self._t.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self._t.__dlpack_device__()

    close(matmul(Lent(torch.from_numpy(a)), b, scale=Lent(torch.tensor(2.0))), a.astype(float) @ b * 2)


def test_a_plain_number_is_as_precise_as_the_operands():
    a, b = RNG.standard_normal((2, 3)), RNG.standard_normal((3, 4))
    np.testing.assert_allclose(matmul(a, b, scale=0.1), a @ b * 0.1, rtol=1e-13)


@pytest.mark.parametrize("overflow", ["wrap", "saturate"])
@pytest.mark.parametrize("out", [np.int8, np.uint8, np.int16])
def test_integer_results_overflow_as_asked(overflow, out):
    a, b = codes(5, 40), codes(40, 7)
    wide = a.astype(np.int64) @ b.astype(np.int64)
    info = np.iinfo(out)
    wanted = wide.astype(out) if overflow == "wrap" else wide.clip(info.min, info.max).astype(out)
    got = matmul(a, b, out_dtype=np.dtype(out).name, overflow=overflow)
    assert got.dtype == out
    np.testing.assert_array_equal(got, wanted)


def test_4_bit_codes():
    a = codes(3, 8, low=-8, high=7)
    b = codes(8, 5, low=0, high=15, dtype=np.uint8)
    wanted = a.astype(int) @ b.astype(int)
    np.testing.assert_array_equal(matmul(a, b, a_dtype="s4", b_dtype="u4"), wanted)
    np.testing.assert_array_equal(matmul(a.astype(ml_dtypes.int4), b.astype(ml_dtypes.uint4)), wanted)
    with pytest.raises(InputError, match=r"b holds u8, not s4\n  try: 4-bit codes travel one to a byte"):
        matmul(a, b, b_dtype="s4")
    with pytest.raises(InputError, match="values outside -8…7"):
        matmul(codes(3, 8), b, a_dtype="s4")


def test_scales_and_zero_points_of_codes():
    a, b = codes(3, 8), codes(8, 5, low=0, high=255, dtype=np.uint8)
    sa, sb = RNG.uniform(0.1, 1, (3, 1)).astype(np.float32), RNG.uniform(0.1, 1, (5,)).astype(np.float32)
    za, zb = np.int8(-3), codes(5, low=0, high=255, dtype=np.uint8)
    wanted = ((a.astype(float) + 3) * sa) @ ((b.astype(float) - zb) * sb)
    close(matmul(a, b, a_scale=sa, b_scale=sb, a_zero_point=za, b_zero_point=zb), wanted)
    laid_b = np.ascontiguousarray(b.T)
    got = matmul(a, laid_b, transpose_b=True, a_scale=sa, b_scale=sb[:, None], a_zero_point=-3, b_zero_point=zb[:, None])
    close(got, wanted)
    exact = matmul(a, b, a_zero_point=-3, b_zero_point=zb)
    np.testing.assert_array_equal(exact, (a.astype(int) + 3) @ (b.astype(int) - zb))


@pytest.mark.parametrize("transposed", [False, True])
def test_groups_of_weights(transposed):
    a, codes_b = floats(3, 24).astype(np.float16), codes(24, 5, low=-8, high=7)
    scale, zero = RNG.uniform(0.1, 1, (3, 5)).astype(np.float16), codes(3, 5, low=-8, high=7)
    index = np.arange(24) // 8
    wanted = a.astype(float) @ ((codes_b.astype(float) - zero[index]) * scale[index])
    lay = (lambda x: np.ascontiguousarray(x.T)) if transposed else (lambda x: x)
    got = matmul(
        a,
        lay(codes_b),
        transpose_b=transposed,
        b_dtype="s4",
        b_scale=lay(scale),
        b_zero_point=lay(zero),
        group_size=8,
        out_dtype="f32",
    )
    close(got, wanted, rtol=2e-3)


ACTIVATIONS = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "logistic": torch.sigmoid,
    "exponential": torch.exp,
    "abs": torch.abs,
    "cosine": torch.cos,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_whole_epilogue_in_its_order(name):
    a, b, bias, residual = floats(6, 16), floats(16, 8), floats(8), floats(6, 8)
    wide = torch.from_numpy((a.astype(float) @ b) * 0.25 + bias)
    wanted = ACTIVATIONS[name](wide).numpy() + residual
    close(matmul(a, b, scale=0.25, bias=bias, activation=name, residual=residual), wanted)


def test_what_broadcasts():
    a, b = floats(2, 6, 16), floats(16, 8)
    wide = a.astype(float) @ b
    rows, whole = floats(6, 1), floats(2, 6, 8)
    close(matmul(a, b, scale=rows, bias=whole), wide * rows + whole)
    close(matmul(a, b, bias=floats(1) * 0 + 2), wide + 2)


@pytest.mark.parametrize("out", ["s8", "u8", "s4", "f8e4m3fn"])
def test_quantised_results(out):
    a, b = floats(6, 16), floats(16, 8)
    scale = np.full((), 0.125, np.float32)
    wide = a.astype(float) @ b / 0.125
    if out == "f8e4m3fn":
        got = matmul(a, b, out_dtype=out, out_scale=scale)
        close(got.astype(float), np.clip(wide, -448, 448), rtol=2**-3)
        return
    low, high = {"s8": (-128, 127), "u8": (0, 255), "s4": (-8, 7)}[out]
    got = matmul(a, b, out_dtype=out, out_scale=scale, out_zero_point=3)
    wanted = np.clip(np.round(wide) + 3, low, high)
    assert (np.abs(got.astype(int) - wanted) <= 1).all() and (got.astype(int) == wanted).mean() > 0.9


def test_the_two_spellings_of_the_xla_thread_are_one_program():
    """s8 x s8 -> s8, and s8 x s8 -> s32 narrowed after: equal results, exact modulo 256, from one kernel."""
    a, b = codes(4, 33, 65), codes(4, 65, 17)
    direct, wide = matmul(a, b, out_dtype="s8"), matmul(a, b)
    wanted = (a.astype(np.int64) @ b.astype(np.int64)).astype(np.int8)
    np.testing.assert_array_equal(direct, wanted)
    np.testing.assert_array_equal(wide.astype(np.int8), wanted)
    narrow = matmul(a, b, acc_dtype="s8")
    np.testing.assert_array_equal(narrow, wanted)
    one = compile(product._compiled.__wrapped__(*request(a, b, out_dtype="s8"), threads=None).source, budget_s=0)
    two = compile(product._compiled.__wrapped__(*request(a, b, acc_dtype="s8"), threads=None).source, budget_s=0)
    assert one.graph.outputs == two.graph.outputs


def request(a, b, acc_dtype=None, out_dtype=None):
    types = (("a", product._type(a, None, "a")), ("b", product._type(b, None, "b")))
    return types, (False, False, acc_dtype, out_dtype, "wrap", None, None), "cpu", 0.0


def test_a_shape_is_compiled_once():
    product._compiled.cache_clear()
    a, b = floats(3, 5), floats(5, 7)
    for _ in range(4):
        matmul(a, b, bias=floats(7), scale=RNG.uniform())
    assert product._compiled.cache_info().misses == 1
    matmul(a, b, bias=floats(3, 7))
    matmul(a, b)
    matmul(a.astype(np.float64), b.astype(np.float64))
    assert product._compiled.cache_info().misses == 4


def test_results_do_not_share_memory():
    a = np.eye(3, dtype=np.float32)
    first = matmul(a, a)
    kept = first.copy()
    matmul(a * 5, a)
    np.testing.assert_array_equal(first, kept)
    first[...] = 9
    np.testing.assert_array_equal(a, np.eye(3))


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 0, 3), (2, 3, 0), (1, 1, 1)])
def test_extents_of_nothing_and_one(shape):
    m, k, n = shape
    close(
        matmul(np.ones((m, k), np.float32), np.ones((k, n), np.float32), bias=1.0), np.full((m, n), k + 1.0), 1e-6
    ) if m * n else None
    assert matmul(codes(m, k), codes(k, n), out_dtype="s8").shape == (m, n)


A, B = codes(3, 4), codes(4, 5)
F = floats(4, 5)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        (
            (A, codes(5, 5)),
            {},
            TypeMismatchError,
            r"cannot multiply s8\[3,4\] by s8\[5,5\] \(gemm\)\n  try: inner extents must agree",
        ),
        ((A[0], codes(5, 5)), {}, TypeMismatchError, "try: inner extents must agree"),
        ((A[0], B[:, 0]), {"bias": floats(1)}, TypeMismatchError, "is larger than the result"),
        ((3.0, B), {}, TypeMismatchError, r"f32\[\] is no matrix"),
        (("a", B), {}, InputError, r"a str is no array \(a\)\n  try: a torch tensor, NumPy array or DLPack"),
        ((A, [[1]]), {}, InputError, r"a list is no array \(b\)"),
        ((A, B), {"bias": True}, InputError, r"a bool is no array \(bias\)"),
        ((A.astype(complex), B), {}, InputError, r"unknown dtype 'complex128' \(a\)"),
        ((A, B), {"a_dtype": "s5"}, InputError, "unknown dtype 's5'"),
        ((A, B), {"out_dtype": "f33"}, InputError, "unknown dtype 'f33'"),
        ((A, B), {"acc_dtype": "f32"}, TypeMismatchError, "cannot multiply s8 by s8 into f32"),
        ((A, B), {"overflow": "clip", "out_dtype": "s8"}, TypeMismatchError, "overflow is 'clip', not one of wrap, saturate"),
        ((A, B), {"activation": "swish"}, InputError, "no activation 'swish'\n  try: relu, gelu"),
        ((A, B), {"activation": "add"}, InputError, "no activation 'add'"),
        ((A, B), {"activation": "is_nan"}, InputError, "no activation 'is_nan'"),
        ((A, B), {"out_scale": 0.5}, InputError, "out_scale is given but not the type to quantise to\n  try: out_dtype='s8'"),
        ((A, B), {"out_zero_point": 3}, InputError, "out_zero_point is given but not the type to quantise to"),
        ((A, B), {"out_zero_point": 3, "out_dtype": "s8"}, TypeMismatchError, "without a scale would have no effect"),
        ((A, B), {"out_zero_point": 300, "out_dtype": "s8", "out_scale": 1}, InputError, r"300 is no s8 \(out_zero_point\)"),
        ((np.ma.masked_equal(A, A[0, 0]), B), {}, InputError, r"a masked array given.*\(input 'a'\)\n  try: value.filled\(0\)"),
        ((A, B), {"a_zero_point": math.inf}, InputError, r"inf is no s8 \(a_zero_point\)"),
        ((A, B), {"a_zero_point": math.nan}, InputError, r"nan is no s8"),
        ((A, B), {"scale": 1e39}, InputError, r"1e\+39 is no f32 \(scale\)"),
        ((A, B), {"a_zero_point": 1.5}, InputError, r"1.5 is no s8 \(a_zero_point\)"),
        ((floats(3, 4), F), {"b_zero_point": 1}, TypeMismatchError, r"a zero point f32\[\] of f32\[4,5\]"),
        ((A, B), {"group_size": 2}, TypeMismatchError, r"blocks of \[2, 1\] are given for s8\[4,5\], but no scale"),
        ((A, F), {"group_size": 0, "b_scale": 1.0}, InputError, "group_size is 0"),
        ((A, B), {"a_scale": floats(1, 4)}, TypeMismatchError, "varies along K\n  try: give it per block"),
        (
            (A, B),
            {"bias": floats(6)},
            TypeMismatchError,
            r"^bias f32\[6\] does not broadcast to the result \[3, 5\] \(add\)\n  try: \[5\] is one value a column",
        ),
        ((A, B), {"b_scale": floats(6)}, TypeMismatchError, r"^b_scale f32\[6\] does not broadcast to its operand s8\[4,5\]"),
        (
            (A, B),
            {"residual": floats(2, 3, 5)},
            TypeMismatchError,
            r"^residual f32\[2,3,5\] is larger than the result",
        ),
        ((A, B), {"device": "npu"}, InputError, "unknown device 'npu'"),
        ((floats(3, 4).astype(np.float16), B.astype(np.int16)), {}, TypeMismatchError, "f16 does not hold every s16"),
    ],
)
def test_wrong_arguments_are_refused_in_words(args, kwargs, error, message):
    with pytest.raises(error, match=message):
        matmul(*args, **kwargs)


def test_it_is_the_packages_own_name():
    assert tilewright.matmul is matmul


def test_a_lazy_minus_sign_is_applied():
    wanted = np.full((3, 2), -3.0)
    close(matmul(torch._neg_view(torch.ones(3, 3)), torch.ones(3, 2)), wanted)


def test_nothing_given_for_an_operand_is_named():
    with pytest.raises(InputError, match="a NoneType is no array"):
        matmul(None, torch.ones(3, 2))


def test_it_runs_where_the_arrays_lie(monkeypatch):
    from tilewright import product

    asked = []
    monkeypatch.setattr(product, "_compiled", lambda *given: asked.append(given[2]) or (lambda *arrays: None))
    here, there = torch.randn(3, 4), type("There", (torch.Tensor,), {"device": torch.device("cuda:1")})
    tilewright.matmul(here, here.T.contiguous())
    tilewright.matmul(here.as_subclass(there), here.T.contiguous())
    tilewright.matmul(here.as_subclass(there), here.T.contiguous(), device="cpu")
    assert asked == ["cpu", "cuda:1", "cpu"]
