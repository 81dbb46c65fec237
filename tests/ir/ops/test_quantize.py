"""Quantize and dequantize against onnx.reference and exact arithmetic."""

import math

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from values import assert_same, constant, random_array, run, specials, value_of

from tilewright.dtype import (
    BF16,
    F8E4M3FN,
    F8E4M3FNUZ,
    F8E5M2,
    F8E5M2FNUZ,
    F16,
    F32,
    F64,
    OPAQUE,
    PRED,
    S4,
    S8,
    S16,
    S32,
    S64,
    U4,
    U8,
    U16,
    U32,
)
from tilewright.errors import TypeMismatchError
from tilewright.ir.build import input_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Dequantize, Quantize

ONNX = {
    S4: TensorProto.INT4,
    U4: TensorProto.UINT4,
    S8: TensorProto.INT8,
    U8: TensorProto.UINT8,
    S16: TensorProto.INT16,
    U16: TensorProto.UINT16,
    S32: TensorProto.INT32,
    F8E4M3FN: TensorProto.FLOAT8E4M3FN,
    F8E4M3FNUZ: TensorProto.FLOAT8E4M3FNUZ,
    F8E5M2: TensorProto.FLOAT8E5M2,
    F8E5M2FNUZ: TensorProto.FLOAT8E5M2FNUZ,
    F32: TensorProto.FLOAT,
    F16: TensorProto.FLOAT16,
}
CODES = [d for d in ONNX if d not in (F32, F16)]
# How a scale is laid against x of shape [6, 10]: shape, ONNX axis, ONNX block size, our block.
LAYOUTS = {
    "tensor": ((), 1, 0, None),
    "row": ((6,), 0, 0, None),
    "column": ((10,), 1, 0, None),
    "block of 5 columns": ((6, 2), 1, 5, (1, 5)),
    "block of 4 columns, the last short": ((6, 3), 1, 4, (1, 4)),
    "block of 3 rows": ((2, 10), 0, 3, (3, 1)),
}


def by_onnx(op: str, inputs: list[np.ndarray], types: list, out, **attributes) -> np.ndarray:
    names = ["x", "scale", "zero_point"][: len(inputs)]
    node = helper.make_node(op, names, ["y"], **attributes)
    infos = [helper.make_tensor_value_info(n, ONNX[t], a.shape) for n, t, a in zip(names, types, inputs, strict=True)]
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("y", ONNX[out], None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    return ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))[0]


def ours(t: np.ndarray, layout: str) -> np.ndarray:
    """ONNX's scale of a row as it broadcasts against x."""
    return t[:, None] if layout == "row" else t


def scale_of(shape, rng) -> np.ndarray:
    return (2.0 ** rng.integers(-4, 3, shape) * rng.uniform(1, 2, shape)).astype(np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("d", [d for d in CODES if d is not S32], ids=str)
def test_quantize_is_onnxs(d, layout):
    rng = np.random.default_rng(0)
    shape, axis, block_size, block = LAYOUTS[layout]
    spread = 3 * math.log2(float(d.max)) / 8
    x = (rng.standard_normal((6, 10)) * 2.0 ** rng.uniform(-spread, 2 * spread, (6, 10))).astype(np.float32)
    x.reshape(-1)[:2] = 0.0, -0.0
    scale = scale_of(shape, rng)
    x[5, :5] = (np.arange(5) + 0.5) * np.broadcast_to(ours(scale, layout) if block is None else scale[-1:, :1], (6, 10))[5, :5]
    zero = random_array(d, shape, rng) if d.is_integer else np.zeros(shape, d.to_numpy())
    attributes = {"axis": axis, **({"block_size": block_size} if block else {})}
    if block == (1, 4):  # ONNX pads nothing: give it whole blocks, drop the rest
        padded = np.concatenate([x, np.zeros((6, 2), np.float32)], 1)
        wanted = by_onnx("QuantizeLinear", [padded, scale, zero], [F32, F32, d], d, **attributes)[:, :10]
    else:
        wanted = by_onnx("QuantizeLinear", [x, scale, zero], [F32, F32, d], d, **attributes)
    got = run(Quantize(d, block), (x, F32), (ours(scale, layout), F32), (ours(zero, layout), d))
    assert_same(got, np.asarray(wanted).astype(d.to_numpy()), x)
    plain = (x, F32), (ours(scale, layout), F32)
    no_zero = np.zeros_like(ours(zero, layout))
    assert_same(run(Quantize(d, block), *plain), run(Quantize(d, block), *plain, (no_zero, d)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("d", CODES, ids=str)
def test_dequantize_is_onnxs(d, layout):
    rng = np.random.default_rng(1)
    shape, axis, block_size, block = LAYOUTS[layout]
    x = random_array(d, (6, 10), rng)
    if d is S32:
        x = (x // 512).astype(np.int32)  # of 23 bits, so that ONNX's difference in f32 is exact too
    scale = scale_of(shape, rng)
    zero = random_array(d, shape, rng) if d.is_integer and d is not S32 else np.zeros(shape, d.to_numpy())
    attributes = {"axis": axis, **({"block_size": block_size} if block else {})}
    if block == (1, 4):
        padded = np.concatenate([x, x[:, :2]], 1)
        wanted = by_onnx("DequantizeLinear", [padded, scale, zero], [d, F32, d], F32, **attributes)[:, :10]
    else:
        wanted = by_onnx("DequantizeLinear", [x, scale, zero], [d, F32, d], F32, **attributes)
    got = run(Dequantize(F32, block), (x, d), (ours(scale, layout), F32), (ours(zero, layout), d))
    nonzero = (got != 0) | (wanted != 0)  # ONNX may give -0
    assert_same(np.where(nonzero, got, 0.0), np.where(nonzero, wanted, 0.0), x)


@pytest.mark.parametrize("d", [S4, U4, S8, U8, S16, U16, S32, U32], ids=str)
def test_the_zero_point_is_added_exactly_and_the_sum_saturates(d):
    zero = np.array([int(d.max) - 1, int(d.min) + 1, 1, 0]).astype(d.to_numpy())
    x = np.array([0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3e38, -3e38, np.inf, -np.inf, float(2**24 + 2), -7.0], np.float32)
    got = run(Quantize(d), (np.repeat(x[:, None], 4, 1), F32), (np.float32(1), F32), (zero, d))
    for i, v in enumerate(x.tolist()):
        for j, z in enumerate(zero.tolist()):
            wanted = int(d.max) if v == np.inf else int(d.min) if v == -np.inf else round(v) + int(z)
            assert int(got[i, j]) == min(max(wanted, int(d.min)), int(d.max)), (v, z)


@pytest.mark.parametrize("d", [S4, U8, S32, F8E4M3FN], ids=str)
def test_nan_quantizes_to_0_or_nan(d):
    got = run(Quantize(d), (np.float32(np.nan), F32), (np.float32(1), F32), (np.array(1).astype(d.to_numpy()), d))
    assert int(got) == 0 if d.is_integer else np.isnan(got.astype(np.float32))
    zero_over_zero = run(Quantize(d), (np.float32(0), F32), (np.float32(0), F32))
    assert int(zero_over_zero) == 0 if d.is_integer else np.isnan(zero_over_zero.astype(np.float32))


@pytest.mark.parametrize("overflow", ["saturate", "wrap"])
def test_overflow_of_a_float_code_is_what_the_node_says(overflow):
    x = np.array([1000.0, -1000.0, 448.0, np.inf, np.nan], np.float32)
    got = run(Quantize(F8E4M3FN, overflow=overflow), (x, F32), (np.float32(1), F32)).astype(np.float32)
    assert_same(
        got,
        np.array(
            [448, -448, 448, 448, np.nan] if overflow == "saturate" else [np.nan, np.nan, 448, np.nan, np.nan], np.float32
        ),
    )


def test_an_f64_operand_is_divided_in_f64():
    x, scale = np.float64(0.5) + np.float64(2.0**-40), np.float64(1)
    assert run(Quantize(S8), (x, F64), (scale, F64)) == 1
    assert run(Quantize(S8), (np.float32(x), F32), (np.float32(1), F32)) == 0


@pytest.mark.parametrize("out", [F64, F32, F16, BF16, F8E4M3FN], ids=str)
@pytest.mark.parametrize("d", [S4, U4, S8, U8, S16, U16, S32, U32], ids=str)
def test_dequantize_subtracts_exactly(d, out):
    x = specials(d)
    zero = np.array([int(d.min), int(d.max)]).astype(d.to_numpy())
    scale = np.float64(0.7) if out is F64 else np.float32(0.7)
    got = run(Dequantize(out), (np.repeat(x[:, None], 2, 1), d), (scale, F64 if out is F64 else F32), (zero, d))
    difference = x.astype(object)[:, None] - zero.astype(object)
    kind = np.float64 if out is F64 else np.float32
    with np.errstate(all="ignore"):
        assert_same(got, (difference.astype(kind) * kind(scale)).astype(out.to_numpy()))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 5)])
def test_shapes_without_elements(shape):
    q = run(Quantize(U4), (np.zeros(shape, np.float32), F32), (np.float32(1), F32), (np.array(3).astype(ml_dtypes.uint4), U4))
    assert q.shape == shape and (q == 3).all()
    if len(shape) == 2:
        grid = tuple(-(-d // 2) for d in shape)
        assert run(Dequantize(F16, (2, 2)), (q, U4), (np.ones(grid, np.float32), F32)).shape == shape


def test_a_block_larger_than_the_tensor_costs_nothing():
    node = Node(
        Dequantize(F32, (1, 10**12)), constant(np.ones((2, 3), np.int8), S8), constant(np.full((2, 1), 2, np.float32), F32)
    )
    assert (value_of(node) == 2).all()


def test_wrong_operands_are_refused():
    x, q, p = input_("x", F32, (4, 6)), input_("q", S8, (4, 6)), input_("p", PRED, (4, 6))
    s, z, wide = input_("s", F32, ()), input_("z", S8, ()), input_("w", F32, (2, 4, 6))
    for node, message in (
        (lambda: Node(Quantize(S8), x), "quantize takes x, scale and maybe a zero point, not 1 operands"),
        (lambda: Node(Quantize(S8), x, s, z, z), "quantize takes x, scale and maybe a zero point, not 4 operands"),
        (lambda: Node(Quantize(S8), x, z), "quantize: the scale is s8, not a float\n  try: convert it"),
        (lambda: Node(Quantize(S8), x, wide), r"quantize: scale f32\[2,4,6\] is larger than f32\[4,6\]"),
        (lambda: Node(Quantize(S8), x, input_("t", F32, (3,))), r"do not broadcast together \(quantize scale\)"),
        (lambda: Node(Quantize(U8), x, s, z), "quantize to u8 has a zero point of type s8"),
        (lambda: Node(Quantize(S64), x, s), "quantize does not turn f32 into s64\n  try: s32 and narrower, or a float"),
        (lambda: Node(Quantize(PRED), x, s), "quantize does not turn f32 into pred"),
        (lambda: Node(Quantize(OPAQUE), x, s), "quantize does not turn f32 into opaque"),
        (lambda: Node(Quantize(S8), p, s), "quantize does not turn pred into s8"),
        (
            lambda: Node(Quantize(S8, (1, 2)), x, s),
            r"scale f32\[\] does not give one value a \[1, 2\] block of f32\[4,6\]",
        ),
        (lambda: Node(Quantize(S8, (2,)), x, s), r"does not give one value a \[2\] block"),
        (lambda: Node(Quantize(S8, (0, 1)), x, s), r"quantize: a block cannot be \[0, 1\]"),
        (lambda: Node(Dequantize(F32, (1, -1)), q, s), r"dequantize: a block cannot be \[1, -1\]"),
        (lambda: Node(Dequantize(F32), q), "dequantize takes x, scale and maybe a zero point, not 1 operands"),
        (lambda: Node(Dequantize(S32), q, s), "dequantize gives a float, not s32"),
        (lambda: Node(Dequantize(F32), p, s), r"dequantize does not take pred\[4,6\]"),
        (lambda: Node(Dequantize(F32), q, s, input_("u", U8, ())), r"dequantize of s8\[4,6\] has a zero point of type u8"),
        (lambda: Node(Dequantize(F32), q, s, input_("l", S8, (2, 1, 1))), r"dequantize: zero point s8\[2,1,1\] is larger"),
        (lambda: Node(Dequantize(F32), q, z), "dequantize: the scale is s8, not a float"),
    ):
        with pytest.raises(TypeMismatchError, match=message):
            node()
