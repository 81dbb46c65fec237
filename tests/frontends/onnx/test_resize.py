"""ONNX's Resize and GridSample, against onnxruntime, and against onnx's evaluator where the two round places otherwise."""

import itertools

import numpy as np
import pytest
from onnx_models import FLOAT, native, one, ours, read, tame, theirs

from tilewright.errors import InputError

TRANSFORMS = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric"]
ROUNDED = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]


def resized(x, by, sizes=False, opset=19, **more):
    names = ["x", "", "", "by"] if sizes else ["x", "", "by"]
    by = np.array(by, np.int64 if sizes else np.float32)
    return one("Resize", {"x": x}, {"by": by}, order=names, opset=opset, **more)


def compare(m, x, targets=()):
    graph = read(m)
    assert {n.op.target for n in graph.nodes() if n.op.name == "call"} == {f"aten.{t}" for t in targets}, graph.notes
    (got,), (wanted,) = ours(graph, {"x": x}), theirs(m, {"x": x})
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("transform", "how"), itertools.product(TRANSFORMS, ROUNDED))
def test_the_nearest_is_picked(transform, how):
    x = tame(2, 3, 7, 5)
    more = {"mode": "nearest", "coordinate_transformation_mode": transform, "nearest_mode": how}
    if transform != "half_pixel_symmetric":  # on a tie, onnxruntime's f32 rounds otherwise
        compare(resized(x, (1, 1, 0.6, 2.3), **more), x)
        compare(resized(x, (2, 3, 14, 3), sizes=True, **more), x)
    compare(resized(x, (2, 3, 10, 9), sizes=True, **more), x)
    compare(resized(x, (1, 2, 2, 1), **more), x)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float16])
def test_the_nearest_of_other_types(dtype):
    x = np.arange(2 * 3 * 4, dtype=dtype).reshape(1, 2, 3, 4)
    graph = read(resized(x, (1, 1, 2, 2), mode="nearest"))
    assert native(graph)
    np.testing.assert_array_equal(ours(graph, {"x": x})[0], x.repeat(2, 2).repeat(2, 3))


@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("transform", TRANSFORMS[:3])
def test_torchs_linear_forms(rank, transform):
    x = tame(2, 3, *(7, 5, 4)[: rank - 2])
    target = {3: "upsample_linear1d", 4: "upsample_bilinear2d", 5: "upsample_trilinear3d"}[rank]
    more = {"mode": "linear", "coordinate_transformation_mode": transform}
    sizes = (2, 3, *(9, 11, 2)[: rank - 2])
    compare(resized(x, sizes, sizes=True, **more), x, [f"{target}.default"])
    if transform != "align_corners":  # of which fractions of an extent are told otherwise
        compare(resized(x, (1, 1, *(0.7, 2.2, 1.5)[: rank - 2]), **more), x, [f"{target}.default"])


@pytest.mark.parametrize("transform", ["half_pixel", "align_corners"])
def test_torchs_cubic_form(transform):
    x = tame(1, 2, 7, 5)
    more = {"mode": "cubic", "coordinate_transformation_mode": transform}
    compare(resized(x, (1, 2, 9, 11), sizes=True, **more), x, ["upsample_bicubic2d.default"])


@pytest.mark.parametrize(
    "more",
    [
        {"mode": "linear", "coordinate_transformation_mode": "asymmetric"},
        {"mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric"},
        {"mode": "cubic", "coordinate_transformation_mode": "asymmetric"},
        {"mode": "cubic", "cubic_coeff_a": -0.5},
        {"mode": "cubic", "exclude_outside": 1},
    ],
)
def test_sums_of_neighbours(more):
    x = tame(1, 2, 7, 5)
    compare(resized(x, (1, 1, 1.7, 2.2), **more), x)
    compare(resized(x, (1, 1, 0.6, 2), **more), x)


def test_axes_that_torch_does_not_interpolate():
    x = tame(4, 6)
    compare(resized(x, (3, 9), sizes=True, mode="linear"), x)
    x = tame(1, 4, 6, 3)  # channels last
    compare(resized(x, (1, 2, 2, 1), mode="linear"), x)


@pytest.mark.parametrize("policy", ["stretch", "not_larger", "not_smaller"])
def test_an_aspect_ratio_is_kept(policy):
    x = tame(1, 2, 7, 5)
    more = {"mode": "nearest", "axes": [2, 3], "keep_aspect_ratio_policy": policy}
    compare(resized(x, (11, 9), sizes=True, **more), x)


def test_upsample():
    x = tame(1, 2, 4, 5)
    for mode in ("nearest", "linear"):
        compare(one("Upsample", {"x": x}, {"by": np.array([1, 1, 2, 3], np.float32)}, opset=9, mode=mode), x)


def test_an_axis_of_a_great_many_elements_is_not_written_out():
    graph = read(resized(tame(1, 1, 4, 4), (1, 1, 50_000_000 / 4, 1), coordinate_transformation_mode="asymmetric"))
    assert [n.op.library for n in graph.nodes() if n.op.name == "call"] == ["onnx"]


def test_what_no_resize_is_is_refused():
    x = tame(1, 1, 4, 4)
    with pytest.raises(InputError, match=r"Resize by -1\.0"):
        read(resized(x, (1, 1, -1, 2)))
    with pytest.raises(InputError, match=r"Upsample by less than 1"):
        read(one("Upsample", {"x": x}, {"by": np.array([1, 1, 0.5, 1], np.float32)}, opset=9))
    with pytest.raises(InputError, match=r"GridSample of f32\[1,1,4,4\] at f32\[1,2,2,3\]"):
        read(one("GridSample", {"x": x, "g": tame(1, 2, 2, 3)}, opset=20))


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("corners", [0, 1])
def test_grids(mode, padding, corners):
    x, grid = tame(2, 3, 5, 6), tame(2, 4, 7, 2)
    for opset, name in ((16, {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)), (22, mode)):
        more = {"mode": name, "padding_mode": padding, "align_corners": corners}
        m = one("GridSample", {"x": x, "g": grid}, opset=opset, **more)
        graph = read(m)
        assert {n.op.target for n in graph.nodes() if n.op.name == "call"} == {"aten.grid_sampler_2d.default"}
        (got,), (wanted,) = ours(graph, {"x": x, "g": grid}), theirs(m, {"x": x, "g": grid})
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)


def test_a_grid_in_a_volume():
    x, grid = tame(1, 2, 4, 5, 6), tame(1, 2, 3, 4, 3)
    m = one("GridSample", {"x": x, "g": grid}, opset=20, out=FLOAT)
    np.testing.assert_allclose(ours(m, {"x": x, "g": grid})[0], theirs(m, {"x": x, "g": grid})[0], rtol=1e-3, atol=1e-4)
