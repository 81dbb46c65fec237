"""Elementwise ONNX operators and casts against onnxruntime and NumPy: NaN, infinity, extreme integers."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import helper
from onnx_models import BOOL, FLOAT, agrees, floats, one, ours, tame, whole

rng = np.random.default_rng(11)


UNARY = """
    Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor Identity Log Neg Reciprocal Relu Round Sigmoid Sin Sinh
    Softplus Softsign Sqrt Tan Tanh HardSwish Mish Elu Selu Celu LeakyRelu HardSigmoid ThresholdedRelu Shrink
"""


@pytest.mark.parametrize("op", UNARY.split())
def test_of_one_float(op):
    x = tame(3, 17) if op in ("Tan", "Mish", "HardSwish", "Selu", "Celu", "Elu") else floats(3, 17)
    agrees(one(op, {"x": x}), {"x": x}, rtol=2e-5)


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_gelu(form):
    x = tame(3, 17)
    graph = agrees(one("Gelu", {"x": x}, approximate=form), {"x": x})
    assert [n.op.name for n in graph.nodes()] == ["input", "map"]


@pytest.mark.parametrize("op", ["Sign", "IsNaN", "IsInf"])
def test_tests_of_one_float(op):
    x = np.nan_to_num(floats(2, 9), nan=0.0) if op == "Sign" else floats(2, 9)
    agrees(one(op, {"x": x}, out=FLOAT if op == "Sign" else BOOL), {"x": x}, exact=True)
    if op == "IsInf":
        agrees(one(op, {"x": x}, out=BOOL, detect_negative=0), {"x": x}, exact=True)
        agrees(one(op, {"x": x}, out=BOOL, detect_positive=0), {"x": x}, exact=True)


@pytest.mark.parametrize(
    "op", ["Add", "Sub", "Mul", "Div", "Max", "Min", "PRelu", "Pow", "Less", "Greater", "Equal", "LessOrEqual"]
)
@pytest.mark.parametrize("shapes", [((4, 5), (4, 5)), ((3, 1, 5), (4, 1)), ((), (7,)), ((0, 3), (1, 3))])
def test_of_two_floats(op, shapes):
    a, b = (floats(*s) for s in shapes)
    if op == "Pow":
        a, b = np.asarray(np.abs(tame(*shapes[0]))), tame(*shapes[1])
    if op == "PRelu":
        a, b = tame(3, 4, 5), tame(4, 1)
    out = BOOL if op in ("Less", "Greater", "Equal", "LessOrEqual") else FLOAT
    agrees(one(op, {"a": a, "b": b}, out=out), {"a": a, "b": b})


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint64, np.int8, np.uint8])
@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Max", "Min", "Less", "Equal"])
def test_of_two_integers(op, dtype):
    a, b = whole(dtype, 3, 8), whole(dtype, 8)
    out = BOOL if op in ("Less", "Equal") else 0
    m = one(op, {"a": a, "b": b}, out=out)
    numpy = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Max": np.maximum, "Min": np.minimum, "Less": np.less}
    np.testing.assert_array_equal(ours(m, {"a": a, "b": b})[0], numpy.get(op, np.equal)(a, b))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.int8, np.uint32, np.uint64])
def test_integer_division(dtype):
    a, b = whole(dtype, 40), whole(dtype, 40)
    b[(b == 0) | ((b == -1) if b.dtype.kind == "i" else False)] = 3
    feeds = {"a": a, "b": b}
    agrees(one("Div", feeds), feeds)
    agrees(one("Mod", feeds), feeds)
    np.testing.assert_array_equal(ours(one("Mod", feeds, fmod=1), feeds)[0], np.fmod(a, b))  # onnxruntime goes through float


def test_float_remainders():
    feeds = {"a": tame(30) * 5, "b": tame(30)}
    agrees(one("Mod", feeds, fmod=1), feeds)


@pytest.mark.parametrize(
    ("a", "b"), [(np.float32, np.int64), (np.int32, np.float32), (np.int64, np.int64), (np.float32, np.float64)]
)
def test_powers_of_mixed_types(a, b):
    feeds = {"a": rng.integers(1, 5, 12).astype(a), "b": rng.integers(0, 4, 12).astype(b)}
    agrees(one("Pow", feeds), feeds)


@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.uint64])
def test_shifts(dtype, direction):
    feeds = {"a": whole(dtype, 20), "b": rng.integers(0, 8, 20).astype(dtype)}
    agrees(one("BitShift", feeds, direction=direction), feeds)


def test_logic():
    feeds = {"a": rng.random((3, 5)) < 0.5, "b": rng.random(5) < 0.5}
    for op in ("And", "Or", "Xor", "Equal"):
        agrees(one(op, feeds), feeds)
    agrees(one("Not", {"a": feeds["a"]}), {"a": feeds["a"]})
    feeds = {"a": whole(np.int32, 9), "b": whole(np.int32, 9)}
    for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor"):
        agrees(one(op, feeds), feeds)


def test_variadic_and_where_and_clip():
    feeds = {"a": tame(3, 5), "b": tame(5), "c": tame(3, 1)}
    for op in ("Sum", "Mean", "Max", "Min"):
        agrees(one(op, feeds), feeds)
    feeds = {"p": rng.random((3, 1)) < 0.5, "a": floats(5), "b": floats(3, 5)}
    agrees(one("Where", feeds, out=FLOAT), feeds)
    x = {"x": np.nan_to_num(floats(4, 6), neginf=-9.0)}  # onnxruntime's Clip without a minimum lifts -inf
    agrees(one("Clip", x, {"lo": np.array(-1, np.float32), "hi": np.array(0.5, np.float32)}), x)
    agrees(one("Clip", x, {"hi": np.array(0.5, np.float32)}, order=["x", "", "hi"]), x)


NUMBERS = [
    np.float32,
    np.float64,
    np.float16,
    np.int8,
    np.uint8,
    np.int16,
    np.uint16,
    np.int32,
    np.uint32,
    np.int64,
    np.uint64,
    np.bool_,
]


@pytest.mark.parametrize("source", NUMBERS)
@pytest.mark.parametrize("target", NUMBERS)
def test_casts(source, target):
    x = np.array([0, 1, 2, 3, 100, 127], source)
    if np.dtype(source).kind == "i" or np.dtype(source).kind == np.dtype(target).kind == "u":
        x = np.concatenate([x, whole(source, 10)])  # integers wrap
    if np.dtype(source).kind == "f":
        x = np.concatenate([x, np.array([0.5, 1.9, 2.5], source)])
    m = one(
        "Cast",
        {"x": x},
        out=helper.np_dtype_to_tensor_dtype(np.dtype(target)),
        to=helper.np_dtype_to_tensor_dtype(np.dtype(target)),
    )
    agrees(m, {"x": x}, exact=True)


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("kind", [17, 18, 19, 20])
def test_casts_to_8_bit_floats_are_those_of_ml_dtypes(kind, saturate):
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    m = one("Cast", {"x": x}, out=kind, to=kind, saturate=saturate)
    narrow = helper.tensor_dtype_to_np_dtype(kind)
    largest = float(ml_dtypes.finfo(narrow).max)
    with np.errstate(invalid="ignore"):
        wanted = (np.clip(x, -largest, largest) if saturate else x).astype(narrow).astype(np.float32)
    np.testing.assert_array_equal(ours(m, {"x": x})[0].astype(np.float32), wanted)
