"""ONNX operators that make, cut, join and pick, against onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper
from onnx_models import FLOAT, INT32, INT64, agrees, model, one, read, tame

from tilewright.errors import InputError, TypeMismatchError

rng = np.random.default_rng(11)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slices(data):
    shape = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    x = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape), unique=True))
    bound = st.one_of(st.integers(-8, 8), st.sampled_from([(1 << 63) - 1, -(1 << 63) + 1]))
    starts, stops = ([data.draw(bound) for _ in axes] for _ in range(2))
    steps = [data.draw(st.sampled_from([1, 2, 3, -1, -2])) for _ in axes]
    # onnxruntime takes the largest number as "to the end" also when it goes backwards.
    stops = [-e if p < 0 and e == (1 << 63) - 1 else e for e, p in zip(stops, steps, strict=True)]
    constants = {k: np.array(v, np.int64) for k, v in (("s", starts), ("e", stops), ("a", axes), ("p", steps))}
    agrees(one("Slice", {"x": x}, constants), {"x": x}, exact=True)


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
def test_pads(mode):
    x = tame(4, 5)
    pads = np.array([1, 2, 3, 1], np.int64)
    agrees(one("Pad", {"x": x}, {"p": pads}, mode=mode), {"x": x}, exact=True)
    if mode == "constant":
        constants = {"p": np.array([-1, 3], np.int64), "v": np.array(7, np.float32), "a": np.array([-1], np.int64)}
        agrees(one("Pad", {"x": x}, constants), {"x": x}, exact=True)


def test_shape_changes():
    x = tame(2, 3, 4)
    i64 = lambda *v: np.array(v, np.int64)  # noqa: E731
    cases = [
        ("Reshape", {"s": i64(0, -1)}, {}),
        ("Reshape", {"s": i64(4, 0, -1)}, {}),
        ("Flatten", {}, {"axis": 2}),
        ("Flatten", {}, {"axis": 0}),
        ("Unsqueeze", {"a": i64(0, -1)}, {}),
        ("Transpose", {}, {"perm": [2, 0, 1]}),
        ("Transpose", {}, {}),
        ("Expand", {"s": i64(5, 1, 3, 1)}, {}),
        ("Tile", {"r": i64(2, 1, 3)}, {}),
        ("Trilu", {"k": np.array(1, np.int64)}, {"upper": 0}),
        ("Trilu", {}, {}),
        ("Size", {}, {}),
        ("Shape", {}, {"start": 1, "end": -1}),
        ("Gather", {"i": i64(1, -1, 0).reshape(3, 1)}, {"axis": 1}),
        ("Compress", None, {}),
    ]
    for op, constants, attributes in cases[:-1]:
        out = INT64 if op in ("Size", "Shape") else FLOAT
        agrees(one(op, {"x": x}, constants, out=out, **attributes), {"x": x}, exact=True)
    square = tame(1, 4, 4)
    agrees(one("Squeeze", {"x": square}, {"a": i64(0)}), {"x": square}, exact=True)
    agrees(one("Squeeze", {"x": square}), {"x": square}, exact=True)
    deep = tame(2, 8, 4, 6)
    for mode in ("DCR", "CRD"):
        agrees(one("DepthToSpace", {"x": deep}, blocksize=2, mode=mode), {"x": deep}, exact=True)
    agrees(one("SpaceToDepth", {"x": deep}, blocksize=2), {"x": deep}, exact=True)


def test_concat_and_split():
    feeds = {"a": tame(2, 3), "b": tame(2, 0), "c": tame(2, 5)}
    agrees(one("Concat", feeds, axis=-1), feeds, exact=True)
    x = {"x": tame(7, 5)}
    agrees(one("Split", x, {"s": np.array([3, 0, 4], np.int64)}, out=[FLOAT] * 3, axis=0), x, exact=True)
    agrees(one("Split", x, out=[FLOAT] * 3, axis=0, num_outputs=3), x, exact=True)


def test_picking_elements():
    x = tame(3, 4, 5)
    index = rng.integers(-4, 4, (3, 2, 5)).astype(np.int64)
    agrees(one("GatherElements", {"x": x}, {"i": index}, axis=1), {"x": x}, exact=True)
    for batch, i in (
        (0, rng.integers(-3, 3, (2, 6, 2))),
        (1, rng.integers(-4, 4, (3, 6, 2))),
        (2, rng.integers(-5, 5, (3, 4, 1))),
    ):
        agrees(one("GatherND", {"x": x}, {"i": i.astype(np.int64)}, batch_dims=batch), {"x": x}, exact=True)
    ids = {"i": np.array([[1, 9], [-1, 3]], np.int64)}
    constants = {"d": np.array(5, np.int64), "v": np.array([0.5, 2.0], np.float32)}
    for axis in (-1, 0, 1):
        agrees(one("OneHot", ids, constants, out=FLOAT, axis=axis), ids, exact=True)
    lengths = np.array([1, 4, 3], np.int64)
    m = one("ReverseSequence", {"x": tame(5, 3, 2)}, {"n": lengths}, time_axis=0, batch_axis=1)
    agrees(m, {"x": tame(5, 3, 2)}, exact=True)


def test_making_values():
    x = tame(2, 3)
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("ConstantOfShape", ["s"], ["c"], value=helper.make_tensor("v", INT32, [1], [7])),
        helper.make_node("Gather", ["s", "one"], ["n"]),
        helper.make_node("Range", ["zero", "n", "one"], ["r"]),
        helper.make_node("EyeLike", ["x"], ["e"], k=1),
        helper.make_node("CastLike", ["c", "x"], ["l"]),
    ]
    constants = {"zero": np.array(0, np.int64), "one": np.array(1, np.int64)}
    agrees(model(nodes, {"x": x}, {"c": INT32, "r": INT64, "e": FLOAT, "l": FLOAT}, constants), {"x": x}, exact=True)


@pytest.mark.parametrize("limits", [(0, 5, 1), (10, -3, -4), (2, 2, 1), (5, 1, 2)])
def test_ranges(limits):
    x = np.zeros(1, np.float32)
    for dtype in (np.int64, np.int32, np.float32):
        constants = {k: np.array(v, dtype) for k, v in zip("abc", limits, strict=True)}
        nodes = [helper.make_node("Range", list("abc"), ["y"]), helper.make_node("Identity", ["x"], ["z"])]
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        agrees(model(nodes, {"x": x}, {"y": kind, "z": FLOAT}, constants), {"x": x}, exact=True)


def test_shapes_that_do_not_fit_are_named():
    a = tame(2, 3)
    with pytest.raises(TypeMismatchError, match=r"cannot multiply f32\[2,3\] by f32\[2,3\] \(MatMul node 'node'\)"):
        read(one("MatMul", {"a": a, "b": a}))
    with pytest.raises(TypeMismatchError, match=r"do not broadcast together"):
        read(one("Add", {"a": a, "b": tame(4)}))
    with pytest.raises(InputError, match="cannot split an axis of 3"):
        read(one("Split", {"x": a}, {"s": np.array([1, 1], np.int64)}, out=[FLOAT] * 2, axis=1))
    with pytest.raises(InputError, match="axis 5 of a tensor of rank 2"):
        read(one("Concat", {"a": a, "b": a}, axis=5))
    with pytest.raises(InputError, match="Gemm lacks its input 1"):
        read(one("Gemm", {"a": a}))
    with pytest.raises(InputError, match="Cast lacks attribute 'to'"):
        read(one("Cast", {"a": a}))
    with pytest.raises(InputError, match="attribute 'axis' of Concat has the wrong kind"):
        read(one("Concat", {"a": a, "b": a}, axis=0.5))
