"""Quantisation as ONNX means it, bit for bit what onnxruntime computes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx_models import FLOAT, INT32, UINT8, agrees, model, native, one, ours, read, theirs

from tilewright.dtype import F4E2M1FN
from tilewright.errors import InputError, UnsupportedError
from tilewright.ir.ops import Const

INTEGERS = {TensorProto.INT8: np.int8, TensorProto.UINT8: np.uint8, TensorProto.INT16: np.int16, TensorProto.UINT16: np.uint16}
FLOATS8 = {
    TensorProto.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
    TensorProto.FLOAT8E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    TensorProto.FLOAT8E5M2: ml_dtypes.float8_e5m2,
    TensorProto.FLOAT8E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
}
rng = np.random.default_rng(7)


def spread(shape, scale=3.0):
    """Values that reach past every 8-bit range, with ties, infinities and zeros among them."""
    x = (rng.standard_normal(shape) * scale * 60).astype(np.float32)
    flat = x.reshape(-1)
    special = np.array([np.inf, -np.inf, 0.0, -0.0, 0.5, 1.5, 2.5, -0.5, 1e30, -1e30], np.float32)
    flat[: special.size] = special[: flat.size]
    return x


@pytest.mark.parametrize("shape", [(1,), (7, 13), (2, 3, 5)])
@pytest.mark.parametrize("kind", INTEGERS)
def test_quantize_and_back_per_tensor(kind, shape):
    x = spread(shape)
    zero = np.array(np.iinfo(INTEGERS[kind]).max // 3, INTEGERS[kind])
    scale = np.array(0.37, np.float32)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    agrees(model(nodes, {"x": x}, {"q": kind, "y": FLOAT}, {"s": scale, "z": zero}), {"x": x}, exact=True)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("kind", INTEGERS)
def test_quantize_and_back_per_axis(kind, axis):
    x = spread((4, 7, 3))
    n = x.shape[axis]
    scale = (rng.random(n) + 0.1).astype(np.float32)
    zero = rng.integers(0, 100, n).astype(INTEGERS[kind])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=axis),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=axis),
    ]
    agrees(model(nodes, {"x": x}, {"q": kind, "y": FLOAT}, {"s": scale, "z": zero}), {"x": x}, exact=True)


@pytest.mark.parametrize("kind", [TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4])
@pytest.mark.parametrize(("axis", "block"), [(0, 3), (1, 4), (1, 5)])
def test_quantize_and_back_in_blocks(kind, axis, block):
    x = (rng.standard_normal((6, 10)) * 9).astype(np.float32)  # onnxruntime's blocked form wraps infinities
    shape = [-(-d // block) if a == axis else d for a, d in enumerate(x.shape)]
    scale = (rng.random(shape) + 0.1).astype(np.float32)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"], axis=axis, block_size=block, output_dtype=kind),
        helper.make_node("DequantizeLinear", ["q", "s"], ["y"], axis=axis, block_size=block),
    ]
    agrees(model(nodes, {"x": x}, {"y": FLOAT}, {"s": scale}), {"x": x}, exact=True)


@pytest.mark.parametrize("kind", [TensorProto.INT4, TensorProto.UINT4])
def test_4_bit_weights_with_zero_points(kind):
    narrow = ml_dtypes.int4 if kind == TensorProto.INT4 else ml_dtypes.uint4
    low = -8 if kind == TensorProto.INT4 else 0
    codes = rng.integers(low, low + 16, (5, 7)).astype(np.int8 if low else np.uint8).astype(narrow)
    zero = rng.integers(low, low + 16, 5).astype(np.int8 if low else np.uint8).astype(narrow)
    scale = (rng.random(5) + 0.1).astype(np.float32)
    x = rng.standard_normal((3, 5)).astype(np.float32)
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=0),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    m = model(nodes, {"x": x}, {"d": FLOAT, "y": FLOAT}, {"w": codes, "s": scale, "z": zero})
    agrees(m, {"x": x})
    assert ours(m, {"x": x})[0].tobytes() == theirs(m, {"x": x})[0].tobytes()


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("kind", FLOATS8)
def test_8_bit_floats(kind, saturate):
    x = spread((8, 9), 5)
    zero = np.zeros((), FLOATS8[kind])
    scale = np.array(0.73, np.float32)
    x[(np.abs(x / scale) >= 480) & (np.abs(x / scale) < 496)] = 0  # not NaN but 448 in onnxruntime without saturation
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], saturate=saturate),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    graph = agrees(model(nodes, {"x": x}, {"y": FLOAT}, {"s": scale, "z": zero}, opset=19), {"x": x}, exact=True)
    assert {n.op.name for n in graph.nodes()} == {"input", "const", "quantize", "dequantize"}


def test_a_zero_point_of_an_8_bit_float_that_is_not_a_constant_is_added():
    x = np.linspace(-3, 3, 13, dtype=np.float32)
    zero = np.array(1.0, ml_dtypes.float8_e4m3fn)
    m = one("QuantizeLinear", {"x": x, "s": np.array(0.5, np.float32), "z": zero}, out=TensorProto.FLOAT8E4M3FN)
    got = ours(m, {"x": x, "s": np.array(0.5, np.float32), "z": zero})[0]
    np.testing.assert_array_equal(got.astype(np.float32), (x / 0.5 + 1).astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_4_bit_floats_in_blocks_with_scales_in_8_bits():
    """Weights as TensorRT's Model Optimizer writes them (NVFP4) become an operand of the product as they are stored."""
    values = rng.integers(0, 16, (64, 48)).astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
    scales = rng.random((4, 48)).astype(ml_dtypes.float8_e4m3fn)
    nodes = [
        helper.make_node("DequantizeLinear", ["s", "half"], ["scale"]),
        helper.make_node("DequantizeLinear", ["w", "scale"], ["weight"], axis=0, block_size=16),
        helper.make_node("MatMul", ["x", "weight"], ["y"]),
        helper.make_node("QuantizeLinear", ["x", "half"], ["q"], output_dtype=TensorProto.FLOAT4E2M1),
        helper.make_node("DequantizeLinear", ["q", "half"], ["r"]),
    ]
    x = spread((4, 64), 0.03)
    graph = read(
        model(nodes, {"x": x}, {"y": FLOAT, "r": FLOAT}, {"w": values, "s": scales, "half": np.float32(0.5)}, opset=23)
    )
    y, r = ours(graph, {"x": x})
    weight = values.astype(np.float32) * np.repeat(scales.astype(np.float32) * 0.5, 16, 0)
    np.testing.assert_allclose(y[1:], x[1:] @ weight, rtol=1e-5, atol=1e-4)
    np.testing.assert_array_equal(r, (x * 2).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) / 2)
    assert native(graph)
    assert any(n.dtype is F4E2M1FN and isinstance(n.op, Const) for n in graph.nodes())


def test_output_dtype_and_precision():
    x = rng.standard_normal(64).astype(np.float16)
    scale = np.array(0.0123, np.float32)
    m = one("QuantizeLinear", {"x": x}, {"s": scale}, out=TensorProto.INT16, output_dtype=TensorProto.INT16, opset=23)
    np.testing.assert_array_equal(ours(m, {"x": x})[0], np.rint(x.astype(np.float32) / scale).astype(np.int16))
    # With precision=FLOAT16 the quotient is rounded to f16 before it is rounded to an integer.
    m = one(
        "QuantizeLinear", {"x": x}, {"s": scale}, out=TensorProto.INT8, output_dtype=TensorProto.INT8, precision=10, opset=23
    )
    wanted = np.clip(np.rint(x / scale.astype(np.float16)), -128, 127).astype(np.int8)
    np.testing.assert_array_equal(ours(m, {"x": x})[0], wanted)
    m = one("DequantizeLinear", {"x": wanted}, {"s": scale}, out=TensorProto.BFLOAT16, output_dtype=16, opset=23)
    assert ours(m, {"x": wanted})[0].dtype == ml_dtypes.bfloat16


def test_a_scale_that_fits_no_axis_is_refused():
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(InputError, match=r"f32\[2\] does not give one value for each of the 3 along axis 1"):
        read(one("QuantizeLinear", {"x": x}, {"s": np.ones(2, np.float32)}, out=UINT8))
    with pytest.raises(InputError, match="without a block size"):
        read(one("QuantizeLinear", {"x": x}, {"s": np.ones((2, 3), np.float32)}, out=UINT8))
    with pytest.raises(InputError, match="output_dtype s8 with a zero point of u8"):
        constants = {"s": np.ones((), np.float32), "z": np.zeros((), np.uint8)}
        read(one("QuantizeLinear", {"x": x}, constants, out=UINT8, output_dtype=TensorProto.INT8))


@pytest.mark.parametrize("x", [[0, 0, 0], [1, 2, 3], [-1, -2, -3.5], [5], [1e-30, 3e4, -7]])
def test_dynamic_quantize_linear(x):
    x = np.array(x, np.float32)
    agrees(one("DynamicQuantizeLinear", {"x": x}, out=[UINT8, FLOAT, UINT8]), {"x": x}, exact=True)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_matmul_integer(data):
    m, n, k = (data.draw(st.sampled_from([1, 2, 3, 5, 17, 33]), label=x) for x in "mnk")
    batch = data.draw(st.sampled_from([(), (2,), (2, 3)]))
    a_kind, b_kind = (data.draw(st.sampled_from([np.int8, np.uint8])) for _ in range(2))
    seeded = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    a, b = (
        seeded.integers(np.iinfo(t).min, np.iinfo(t).max + 1, s).astype(t)
        for t, s in ((a_kind, (*batch, m, k)), (b_kind, (k, n)))
    )
    constants = {}
    if data.draw(st.booleans()):
        rows = data.draw(st.booleans()) and not batch
        constants["az"] = seeded.integers(0, 100, m if rows else ()).astype(a_kind)
        if data.draw(st.booleans()):
            constants["bz"] = seeded.integers(0, 100, n if data.draw(st.booleans()) else ()).astype(b_kind)
    m_ = one("MatMulInteger", {"a": a, "b": b}, constants, out=INT32)
    wide = [a.astype(np.int64), b.astype(np.int64)]
    if "az" in constants:
        wide[0] = wide[0] - (
            constants["az"].astype(np.int64)[..., None] if constants["az"].ndim else constants["az"].astype(np.int64)
        )
    if "bz" in constants:
        wide[1] = wide[1] - constants["bz"].astype(np.int64)
    graph = read(m_)
    assert native(graph)
    np.testing.assert_array_equal(ours(graph, {"a": a, "b": b})[0], (wide[0] @ wide[1]).astype(np.int32))
    if "az" not in constants or not constants["az"].ndim:  # onnxruntime takes no zero point a row
        feeds = {"a": a, "b": seven_bits(b)}
        np.testing.assert_array_equal(ours(graph, feeds)[0], theirs(m_, feeds)[0])


def seven_bits(weights):
    """Codes that onnxruntime multiplies exactly: without VNNI its pairs of 8-bit products saturate at 16 bits, if signed."""
    return weights >> 1 if weights.dtype == np.int8 else weights


@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("kinds", [(np.uint8, np.int8, np.uint8), (np.int8, np.int8, np.int8), (np.uint8, np.uint8, np.uint8)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (16, 64, 33)])
def test_qlinear_matmul(shape, kinds, per_column):
    m, k, n = shape
    a, b = (
        rng.integers(np.iinfo(t).min, np.iinfo(t).max + 1, s).astype(t) for t, s in zip(kinds, ((m, k), (k, n)), strict=False)
    )
    b = seven_bits(b)
    columns = (n,) if per_column else ()
    constants = {
        "as": np.array(0.031, np.float32),
        "az": np.array(11, kinds[0]),
        "b": b,
        "bs": (rng.random(columns) + 0.01).astype(np.float32),
        "bz": np.zeros(columns, kinds[1]),
        "ys": np.array(0.9, np.float32),
        "yz": np.array(17, kinds[2]),
    }
    out = helper.np_dtype_to_tensor_dtype(np.dtype(kinds[2]))
    agrees(one("QLinearMatMul", {"a": a}, constants, out=out), {"a": a}, exact=True)


def test_qlinear_matmul_per_row_and_in_batches():
    a = rng.integers(0, 256, (2, 3, 4)).astype(np.uint8)
    b = rng.integers(0, 256, (2, 4, 5)).astype(np.uint8)
    scale, zero = (rng.random((2, 3, 1)) + 0.5).astype(np.float32), rng.integers(0, 9, (2, 3, 1)).astype(np.uint8)
    b_scale, b_zero = np.array(0.01, np.float32), np.array(3, np.uint8)
    constants = {
        "s": scale,
        "z": zero,
        "b": b,
        "t": b_scale,
        "u": b_zero,
        "ys": np.array(2.0, np.float32),
        "yz": np.array(4, np.uint8),
    }
    m = one("QLinearMatMul", {"a": a}, constants, out=UINT8, order=["a", "s", "z", "b", "t", "u", "ys", "yz"])
    acc = (a.astype(np.int32) - zero) @ (b.astype(np.int32) - 3)
    wanted = np.clip(np.rint(acc.astype(np.float32) * (scale * b_scale / np.float32(2))) + 4, 0, 255)
    np.testing.assert_array_equal(ours(m, {"a": a})[0], wanted.astype(np.uint8))


def packed(codes):
    """4-bit codes two to a byte, the low half first; 8-bit ones as they are."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


@pytest.mark.parametrize("zeros", ["none", "packed", "float"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("m", "k", "n", "block"), [(1, 32, 5, 16), (3, 80, 7, 32), (4, 64, 16, 64)])
def test_matmul_nbits(m, k, n, block, bits, zeros):
    a = rng.standard_normal((2, m, k)).astype(np.float32)
    groups = -(-k // block)
    codes = rng.integers(0, 1 << bits, (n, groups, block)).astype(np.uint8)
    scales = (rng.random((n, groups)) * 0.1 + 0.01).astype(np.float32)
    zero_codes = rng.integers(0, 1 << bits, (n, groups + groups % 2 if bits == 4 else groups)).astype(np.uint8)
    constants = {"b": packed(codes) if bits == 4 else codes, "s": scales}
    zero = np.full((n, groups), 1 << bits - 1, np.float32)
    if zeros == "packed":
        constants["z"] = packed(zero_codes) if bits == 4 else zero_codes
        zero = zero_codes[:, :groups].astype(np.float32)
    elif zeros == "float":
        constants["z"] = zero = rng.standard_normal((n, groups)).astype(np.float32)
    weight = ((codes - zero[..., None]) * scales[..., None]).reshape(n, -1)[:, :k]
    node = {"domain": "com.microsoft", "K": k, "N": n, "bits": bits, "block_size": block}
    m_ = one("MatMulNBits", {"a": a}, constants, **node)
    graph = read(m_)
    assert native(graph)
    np.testing.assert_allclose(ours(graph, {"a": a})[0], a @ weight.T, rtol=1e-4, atol=1e-4)
    if zeros != "float" or bits == 4:  # onnxruntime takes float zero points for 4 bits alone
        np.testing.assert_allclose(ours(graph, {"a": a})[0], theirs(m_, {"a": a})[0], rtol=2e-4, atol=2e-4)
    if zeros != "float":
        weights = [n for n in graph.nodes() if n.op.name == "dequantize"]
        assert len(weights) == 1
        assert weights[0].src[0].dtype.name == ("s4" if bits == 4 and zeros == "none" else f"u{bits}")


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("shape", "n", "block"), [((1, 256), 40, 32), ((2, 3, 80), 7, 32), ((5, 200), 33, 64), ((128,), 9, 16)]
)
def test_matmul_nbits_of_activations_in_8_bits(shape, n, block, zeros):
    """accuracy_level 4 permits it: results are onnxruntime's to the rounding of f32, those of a float product only to 1 %."""
    k, rng = shape[-1], np.random.default_rng(7)
    groups = -(-k // block)
    a = rng.standard_normal(shape).astype(np.float32)
    a.reshape(-1)[:block] = 0  # a group of zeros has scale 0
    constants = {
        "b": packed(rng.integers(0, 16, (n, groups, block)).astype(np.uint8)),
        "s": (rng.random((n, groups)) * 0.1 + 0.01).astype(np.float32),
    }
    if zeros:
        constants["z"] = packed(rng.integers(0, 16, (n, groups + groups % 2)).astype(np.uint8))
    node = {"domain": "com.microsoft", "K": k, "N": n, "bits": 4, "block_size": block}
    made = {level: one("MatMulNBits", {"a": a}, constants, **node, accuracy_level=level) for level in (0, 1, 2, 3, 4)}
    results = {level: ours(read(m), {"a": a})[0] for level, m in made.items()}
    largest = np.abs(results[0]).max()
    assert all(np.array_equal(results[0], results[level]) for level in (1, 2, 3))
    assert np.abs(results[4] - theirs(made[4], {"a": a})[0]).max() < 2e-6 * largest
    assert 1e-4 * largest < np.abs(results[4] - results[0]).max() < 1e-2 * largest
    graph = read(made[4])
    assert native(graph)
    assert sum(node.op.name == "quantize" for node in graph.nodes()) == 1


def test_matmul_nbits_of_halves_in_8_bits():
    """They are quantised in f32 and the product is rounded once."""
    a = rng.standard_normal((4, 64)).astype(np.float16)
    codes = rng.integers(0, 16, (5, 2, 32)).astype(np.uint8)
    scales = rng.random((5, 2)).astype(np.float16)
    m = one(
        "MatMulNBits",
        {"a": a},
        {"b": packed(codes), "s": scales},
        domain="com.microsoft",
        K=64,
        N=5,
        bits=4,
        block_size=32,
        accuracy_level=4,
    )
    (result,) = ours(read(m), {"a": a})
    assert result.dtype == np.float16
    weight = ((codes - 8.0) * scales[..., None]).reshape(5, -1)
    wanted = a.astype(np.float64) @ weight.T
    assert np.abs(result - wanted).max() < 0.02 * np.abs(wanted).max()


def test_matmul_nbits_of_a_weight_that_is_an_input():
    codes = rng.integers(0, 16, (3, 2, 16)).astype(np.uint8)
    scales = rng.random((3, 2)).astype(np.float32)
    a = rng.standard_normal((2, 32)).astype(np.float32)
    feeds = {"a": a, "b": packed(codes), "s": scales}
    m = one("MatMulNBits", feeds, domain="com.microsoft", K=32, N=3, bits=4, block_size=16)
    np.testing.assert_allclose(
        ours(m, feeds)[0], a @ ((codes - 8.0) * scales[..., None]).reshape(3, -1).T, rtol=1e-4, atol=1e-5
    )


def test_matmul_nbits_of_a_weight_that_is_computed():
    codes = rng.integers(0, 16, (3, 3, 16)).astype(np.uint8)  # as many groups as rows: a transpose keeps the shape
    scales = rng.random((3, 3)).astype(np.float32)
    a = rng.standard_normal((2, 48)).astype(np.float32)
    nodes = [
        helper.make_node("Transpose", ["b"], ["t"], perm=[1, 0, 2]),
        helper.make_node("MatMulNBits", ["a", "t", "s"], ["y"], domain="com.microsoft", K=48, N=3, bits=4, block_size=16),
    ]
    m = model(nodes, {"a": a}, {"y": FLOAT}, {"b": packed(codes), "s": scales}, domains={"com.microsoft": 1})
    weight = ((codes.swapaxes(0, 1) - 8.0) * scales[..., None]).reshape(3, -1)
    np.testing.assert_allclose(ours(m, {"a": a})[0], a @ weight.T, rtol=1e-4, atol=1e-5)


def test_matmul_nbits_forms_that_are_refused():
    a = np.zeros((1, 32), np.float32)
    constants = {"b": np.zeros((3, 2, 4), np.uint8), "s": np.zeros((3, 2), np.float32)}
    with pytest.raises(UnsupportedError, match="MatMulNBits of 3 bits"):
        read(one("MatMulNBits", {"a": a}, constants, domain="com.microsoft", K=32, N=3, bits=3, block_size=16))
    with pytest.raises(InputError, match="MatMulNBits of N=3 K=32"):
        read(one("MatMulNBits", {"a": a}, constants, domain="com.microsoft", K=32, N=3, bits=4, block_size=16))
    more = {"b": np.zeros((3, 2, 8), np.uint8), "s": np.zeros((3, 2), np.float32), "z": np.zeros((3, 1), np.uint8)}
    more["g"] = np.zeros(32, np.int32)  # with zero points, onnxruntime's CPU and the operator's description differ
    node = helper.make_node("MatMulNBits", ["a", *more], ["y"], domain="com.microsoft", K=32, N=3, bits=4, block_size=16)
    with pytest.raises(UnsupportedError, match="MatMulNBits of 4 bits with g_idx and zero points"):
        read(model([node], {"a": a}, {"y": FLOAT}, more))


def test_onnxruntimes_own_quantize_and_dequantize():
    x = spread((4, 5))
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], domain="com.microsoft"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], domain="com.microsoft"),
    ]
    constants = {"s": np.array(0.1, np.float32), "z": np.array(7, np.uint16)}
    m = model(nodes, {"x": x}, {"y": FLOAT}, constants, opset=17, domains={"com.microsoft": 1})
    agrees(m, {"x": x}, exact=True)
