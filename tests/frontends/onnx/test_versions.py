"""Operators whose meaning changed from one operator set to another, each with the meaning of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import helper
from onnx_models import BOOL, FLOAT, INT64, agrees, model, one, ours, read, tame, theirs

from tilewright.errors import InputError, TypeMismatchError, UnsupportedError
from tilewright.frontends import onnx as frontend
from tilewright.ir.evaluate import evaluate

rng = np.random.default_rng(3)


@pytest.mark.parametrize("opset", [7, 11, 12, 13, 21])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1])
@pytest.mark.parametrize("op", ["Hardmax", "Softmax", "LogSoftmax"])
def test_softmaxes_flatten_from_their_axis_below_version_13(op, axis, opset):
    x = tame(2, 3, 5)
    x[1, 2] = x[0, 0]  # ties
    attributes = {} if axis is None else {"axis": axis}
    agrees(one(op, {"x": x}, opset=opset, **attributes), {"x": x})


LEGACY = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "Greater": np.greater,
    "Less": np.less,
}


@pytest.mark.parametrize("opset", [1, 6])
@pytest.mark.parametrize("op", LEGACY)
def test_before_version_7_the_second_operand_lies_along_the_axes_from_axis_on(op, opset):
    x, y = np.abs(tame(2, 3, 4, 3)) + 0.5, np.abs(tame(3, 4)) + 0.5
    out = BOOL if op in ("Greater", "Less") else FLOAT
    got = ours(one(op, {"x": x, "y": y}, opset=opset, out=out, broadcast=1, axis=1), {"x": x, "y": y})[0]
    np.testing.assert_allclose(got, LEGACY[op](x, y.reshape(3, 4, 1)), rtol=1e-6)
    last = np.abs(tame(4, 3)) + 0.5
    got = ours(one(op, {"x": x, "y": last}, opset=opset, out=out, broadcast=1), {"x": x, "y": last})[0]
    np.testing.assert_allclose(got, LEGACY[op](x, last), rtol=1e-6)


def test_before_version_7_nothing_is_broadcast_unasked():
    x, y = tame(2, 3), tame(3)
    with pytest.raises(InputError, match=r"Add of f32\[2,3\] and f32\[3\] without broadcast=1"):
        read(one("Add", {"x": x, "y": y}, opset=6))
    with pytest.raises(InputError, match="from axis 2"):
        read(one("Add", {"x": x, "y": y}, opset=6, broadcast=1, axis=2))


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("scales", [(1, 1, 2, 3), (1, 1, 2.5, 1.7), (1, 1, 1, 1)])
@pytest.mark.parametrize(("op", "opset"), [("Upsample", 7), ("Upsample", 9), ("Resize", 10)])
def test_upsample_is_read_as_todays_resize(op, opset, scales, mode):
    x, factors = tame(1, 2, 4, 5), np.array(scales, np.float32)
    constants = {} if opset == 7 else {"s": factors}
    more = {"scales": [float(s) for s in scales]} if opset == 7 else {}
    m = one(op, {"x": x}, constants, opset=opset, mode=mode, **more)
    np.testing.assert_allclose(ours(m, {"x": x})[0], theirs(m, {"x": x})[0], rtol=1e-5, atol=1e-6)


def test_upsample_by_what_is_known_at_run_time_is_read_too():
    feeds = {"x": tame(1, 2, 4, 5), "s": np.array([1, 1, 2, 3], np.float32)}
    m = one("Upsample", feeds, opset=9)
    (found,) = frontend.backend().run_model(m, list(feeds.values()))
    np.testing.assert_array_equal(found, theirs(m, feeds)[0])


def test_scatter_is_the_first_name_of_scatter_elements():
    feeds = {"x": tame(3, 4), "i": np.array([[1, 2], [0, 1]], np.int64), "u": tame(2, 2)}
    m = one("Scatter", feeds, opset=9, axis=1)
    np.testing.assert_array_equal(ours(m, feeds)[0], theirs(m, feeds)[0])


def test_resize_10_that_shrinks_rounds_up_as_onnxruntime_does():
    x = tame(1, 1, 6, 8)
    m = one("Resize", {"x": x}, {"s": np.array([1, 1, 0.5, 0.6], np.float32)}, opset=10)
    np.testing.assert_array_equal(ours(m, {"x": x})[0], theirs(m, {"x": x})[0])
    mixed = one("Resize", {"x": x}, {"s": np.array([1, 1, 0.5, 2], np.float32)}, opset=10)
    with pytest.raises(UnsupportedError, match="Resize of version 10 means something else"):
        read(mixed)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_resize_by_scales_aligns_corners_of_whole_extents(mode):
    x, scales = tame(2, 1, 3, 7), np.array([1, 1, 1.5, 0.5], np.float32)
    constants = {"roi": np.zeros(0, np.float32), "s": scales}
    m = one("Resize", {"x": x}, constants, opset=13, mode=mode, coordinate_transformation_mode="align_corners")
    np.testing.assert_allclose(ours(m, {"x": x})[0], theirs(m, {"x": x})[0], rtol=1e-4, atol=1e-5)


def test_selu_1_has_its_own_constants():
    x = tame(5)
    got = ours(one("Selu", {"x": x}, opset=1), {"x": x})[0]
    assert np.allclose(got[x > 0], 1.0507 * x[x > 0], rtol=2e-7)
    assert not np.array_equal(got, ours(one("Selu", {"x": x}, opset=6), {"x": x})[0])


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample_16_names_its_modes_otherwise(mode):
    x, grid = tame(1, 1, 4, 4), rng.uniform(-1, 1, (1, 3, 3, 2)).astype(np.float32)
    m = one("GridSample", {"x": x, "grid": grid}, opset=16, mode=mode)
    np.testing.assert_allclose(ours(m, {"x": x, "grid": grid})[0], theirs(m, {"x": x, "grid": grid})[0], rtol=1e-4, atol=1e-5)


def test_batch_normalization_7_over_channels():
    x = tame(2, 3, 4)
    given = {k: np.abs(tame(3)) + 0.1 for k in "sbmv"}
    agrees(one("BatchNormalization", {"x": x}, given, opset=7), {"x": x}, atol=1e-5)
    with pytest.raises(UnsupportedError, match="one mean for each place"):
        read(one("BatchNormalization", {"x": x}, given, opset=7, spatial=0))


def test_a_meaning_that_the_evaluator_has_not_is_refused():
    node = helper.make_node("PRelu", ["x", "s"], ["y"])
    with pytest.raises(UnsupportedError, match="PRelu of version 6 means something else") as caught:
        read(model([node], {"x": tame(2, 3, 4), "s": tame(3)}, {"y": FLOAT}, opset=6))
    assert "convert_version" in str(caught.value)


def test_the_meaning_inside_a_loop_is_checked_too():
    """onnx's evaluator would run a body's Hardmax of operator set 11 as 13's."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["c"], ["c2"]),
            helper.make_node("Hardmax", ["s"], ["s2"], axis=1),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("c", BOOL, []),
            helper.make_tensor_value_info("s", FLOAT, [2, 3, 4]),
        ],
        [helper.make_tensor_value_info("c2", BOOL, []), helper.make_tensor_value_info("s2", FLOAT, [2, 3, 4])],
    )
    node = helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)
    n = {"n": np.array(2, np.int64)}
    old = model([node], {"x": tame(2, 3, 4), **n}, {"y": FLOAT}, opset=11)
    with pytest.raises(UnsupportedError, match="Hardmax of version 11 means something else"):
        read(old)
    x = tame(2, 3, 4)
    new = model([node], {"x": x}, {"y": FLOAT}, n, opset=13)
    np.testing.assert_array_equal(evaluate(read(new), {"x": torch.from_numpy(x)})[0], theirs(new, {"x": x})[0])


@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
@pytest.mark.parametrize(
    ("by", "places", "more"),
    [
        ("sizes", [1, 2, 1, 3], {"coordinate_transformation_mode": "pytorch_half_pixel"}),
        ("scales", [1, 1, 0.3, 0.5], {"coordinate_transformation_mode": "pytorch_half_pixel"}),
        ("scales", [0.2, 2], {"coordinate_transformation_mode": "pytorch_half_pixel", "axes": [-1, -2]}),
        ("sizes", [1, 2, 1, 3], {"coordinate_transformation_mode": "pytorch_half_pixel", "antialias": 1}),
        ("scales", [0.55, 0.7], {"coordinate_transformation_mode": "align_corners", "axes": [3, -2]}),
        ("sizes", [3], {"axes": [-1]}),
    ],
)
def test_resizing_counts_whole_extents(mode, by, places, more):
    """The reference evaluator reads -0.5 for 0 where one element is left, fractions of extents, and no axes from the back."""
    if mode == "nearest" and "antialias" in more:
        return  # which no one has
    x = tame(1, 2, 5, 6)
    given = {"s": np.array(places, np.float32)} if by == "scales" else {"z": np.array(places, np.int64)}
    node = helper.make_node("Resize", ["x", "", *(["s"] if by == "scales" else ["", "z"])], ["y"], mode=mode, **more)
    m = model([node], {"x": x}, {"y": FLOAT}, given, opset=19)
    np.testing.assert_allclose(ours(read(m), {"x": x})[0], theirs(m, {"x": x})[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize(("policy", "sizes"), [("not_larger", [2, 2]), ("not_smaller", [1, 1])])
def test_one_element_that_an_aspect_ratio_leaves_is_the_first(mode, policy, sizes):
    """The reference evaluator would read it at -0.5, also where the sizes asked for are larger."""
    x = tame(1, 2, 20, 5)[:, :, :10] if policy == "not_larger" else tame(1, 2, 4, 4)
    more = {"coordinate_transformation_mode": "pytorch_half_pixel", "keep_aspect_ratio_policy": policy, "axes": [2, 3]}
    node = helper.make_node("Resize", ["x", "", "", "z"], ["y"], mode=mode, **more)
    m = model([node], {"x": x}, {"y": FLOAT}, {"z": np.array(sizes, np.int64)}, opset=19)
    np.testing.assert_allclose(ours(read(m), {"x": x})[0], theirs(m, {"x": x})[0], rtol=1e-4, atol=1e-5)
    if mode != "nearest":
        m.graph.node[0].attribute.append(helper.make_attribute("antialias", 1))  # which leaves it to that evaluator
        with pytest.raises(TypeMismatchError, match="one element by pytorch_half_pixel and an aspect ratio"):
            ours(read(m), {"x": x})
