"""ONNX operators that torch computes, against onnxruntime: convolutions, the k largest, cumulative sums, scattered elements."""

import numpy as np
import pytest
from onnx import TensorProto
from onnx.helper import make_node as node
from onnx_models import FLOAT, INT64, model, one, ours, read, tame, theirs, value, whole

from tilewright.compiler import compile
from tilewright.errors import InputError, TypeMismatchError, UnsupportedError

rng = np.random.default_rng(7)


def by_torch(m, feeds, *targets, rtol=1e-4):
    """Read a model, which leaves these operators to torch and none to onnx's evaluator, and compare it with onnxruntime."""
    graph = read(m)
    assert {(n.op.library, n.op.target) for n in graph.nodes() if n.op.name == "call"} == {
        ("torch", f"aten.{t}") for t in targets
    }
    assert all(any(f"aten.{t} is left to torch" in note for note in graph.notes) for t in targets)
    for got, wanted in zip(ours(graph, feeds), theirs(m, feeds), strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=1e-4 if rtol else 0)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"pads": [1, 0, 2, 1]},
        {"pads": [1, 1, 1, 1], "strides": [2, 1], "group": 2},
        {"auto_pad": "SAME_UPPER"},
        {"auto_pad": "SAME_LOWER", "strides": [2, 3]},
        {"auto_pad": "VALID", "group": 3},
        {"dilations": [2, 1], "kernel_shape": [3, 2]},
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_convolutions(given, bias):
    x, w = tame(2, 6, 9, 7), tame(6, 6 // given.get("group", 1), 3, 2)
    constants = {"w": w, "b": tame(6)} if bias else {"w": w}
    by_torch(one("Conv", {"x": x}, constants, **given), {"x": x}, "convolution.default")


@pytest.mark.parametrize("spatial", [(9,), (5, 6, 7)])
def test_convolutions_of_other_ranks(spatial):
    x, w = tame(2, 3, *spatial), tame(4, 3, *([2] * len(spatial)))
    by_torch(one("Conv", {"x": x}, {"w": w}), {"x": x}, "convolution.default")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"pads": [1, 0, 2, 1]},
        {"pads": [1, 1, 1, 1], "strides": [2, 2]},
        {"strides": [3, 2], "output_padding": [1, 1]},
        {"strides": [3, 2], "output_padding": [2, 1], "pads": [2, 1, 2, 1]},
        {"strides": [2, 2], "output_padding": [1, 1], "pads": [0, 1, 2, 1]},
        {"strides": [3, 2], "output_shape": [25, 13]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
        {"auto_pad": "SAME_UPPER", "strides": [4, 3]},
        {"dilations": [2, 1], "group": 2},
    ],
)
def test_transposed_convolutions(given):
    x, w = tame(2, 6, 9, 7), tame(6, 6 // given.get("group", 1), 3, 2)
    constants = {"w": w, "b": tame(6)}
    by_torch(one("ConvTranspose", {"x": x}, constants, **given), {"x": x}, "convolution.default")


@pytest.mark.parametrize("constants", [{"w": tame(4, 5, 3, 3)}, {"w": tame(4, 3, 3)}, {"w": tame(4, 3, 3, 3), "b": tame(5)}])
def test_windows_that_do_not_fit_are_refused(constants):
    x = tame(1, 3, 8, 8)
    with pytest.raises((InputError, TypeMismatchError, UnsupportedError), match="Conv"):
        compile(one("Conv", {"x": x}, constants), budget_s=0)(x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32, np.int64, np.int8, np.uint8])
@pytest.mark.parametrize("largest", [0, 1])
def test_of_equal_ones_the_first_is_among_the_largest(dtype, largest):
    x = rng.integers(0, 5, (3, 40, 2)).astype(dtype)
    m = one("TopK", {"x": x}, {"k": np.array([7], np.int64)}, out=[0, INT64], axis=1, largest=largest)
    by_torch(m, {"x": x}, "sort.stable", rtol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("largest", [0, 1])
def test_the_largest_of_many(dtype, largest):
    """Torch looks for them, and does not sort all; zeros of both signs are equal."""
    x = rng.integers(-50, 50, (3, 9000)).astype(dtype)
    x[0, 5], x[0, 100:200], x[1, 7:900:7], x[2, :] = np.inf, -np.inf, -0.0, x[2] * 0
    m = one("TopK", {"x": x}, {"k": np.array([300], np.int64)}, out=[0, INT64], axis=1, largest=largest)
    by_torch(m, {"x": x}, "view.dtype", "topk.default", rtol=0)


def test_more_than_there_are_are_refused():
    x = tame(2, 3)
    with pytest.raises(InputError, match="TopK of 4 among 3"):
        read(one("TopK", {"x": x}, {"k": np.array([4], np.int64)}, out=[FLOAT, INT64]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
def test_cumulative_sums(dtype, exclusive, reverse):
    x = (rng.standard_normal((3, 700)) * 5).astype(dtype)
    m = one("CumSum", {"x": x}, {"axis": np.array(1, np.int64)}, exclusive=exclusive, reverse=reverse)
    by_torch(m, {"x": x}, "cumsum.default")


WAYS = {"none": "scatter.src", "add": "scatter_add.default", **dict.fromkeys(("mul", "max", "min"), "scatter_reduce.two")}


@pytest.mark.parametrize("reduction", WAYS)
def test_scattered_elements(reduction):
    x, updates = tame(4, 5, 3), tame(3, 2, 3)
    at = np.stack([rng.permutation(5)[:2] - 5 * (i % 2) for i in range(9)]).reshape(3, 3, 2).transpose(0, 2, 1)
    m = one("ScatterElements", {"x": x}, {"i": at, "u": updates}, axis=1, reduction=reduction, opset=18)
    by_torch(m, {"x": x}, WAYS[reduction])


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scattered_slices(reduction):
    x, at = tame(4, 5, 3), np.array([[0, 1], [3, -1], [2, 2]], np.int64)
    m = one("ScatterND", {"x": x}, {"i": at, "u": tame(3, 3)}, reduction=reduction, opset=18)
    by_torch(m, {"x": x}, "index_put.default")


@pytest.mark.parametrize(("op", "at", "updates"), [("ScatterElements", [[9]], (1, 1)), ("ScatterND", [[9, 0]], (1,))])
def test_an_index_outside_is_an_error(op, at, updates):
    x = tame(2, 3)
    program = compile(one(op, {"x": x}, {"i": np.array(at, np.int64), "u": tame(*updates)}, opset=18), budget_s=0)
    with pytest.raises(TypeMismatchError, match="index 9 is out of bounds for dimension 0 with size 2"):
        program(x)


WHERE = {"b": (1, 8), "h": (5, 64)}
OPEN = {
    "Conv": ([node("Conv", ["x", "w"], ["y"], pads=[1, 1], strides=[2])], ["b", 3, "h"], {"w": tame(4, 3, 3)}),
    "ConvTranspose": ([node("ConvTranspose", ["x", "w"], ["y"], pads=[1, 1])], ["b", 4, "h"], {"w": tame(4, 3, 3)}),
    "CumSum": ([node("CumSum", ["x", "a"], ["y"], reverse=1)], ["b", "h"], {"a": np.array(1, np.int64)}),
    "TopK": ([node("TopK", ["x", "k"], ["y", "z"])], ["b", "h"], {"k": np.array([3], np.int64)}),
}


@pytest.mark.parametrize("name", OPEN)
def test_one_reading_serves_all_extents(name):
    nodes, shape, constants = OPEN[name]
    m = model(nodes, [value("x", FLOAT, shape)], {"y": FLOAT}, constants)
    program = compile(m, dims=WHERE, budget_s=0)
    for b, h in ((1, 8), (2, 64), (3, 5), (8, 51)):
        x = tame(*({"b": b, "h": h}.get(e, e) for e in shape))
        np.testing.assert_allclose(program(x), theirs(m, {"x": x})[0], rtol=1e-4, atol=1e-4)
    assert program.compiled == 1


@pytest.mark.parametrize("kernel", [[13, 13], [9, 20], [3, 3]])
@pytest.mark.parametrize("given", [{"auto_pad": "SAME_UPPER"}, {"strides": [2, 2], "ceil_mode": 1}, {"pads": [1, 2, 1, 2]}])
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool"])
def test_pools_of_large_windows(op, kernel, given):
    x = tame(1, 3, 30, 31)
    by_torch(one(op, {"x": x}, kernel_shape=kernel, **given), {"x": x})


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"pads": [1, 1, 1, 1]},
        {"strides": [2, 2], "ceil_mode": 1},
        {"dilations": [2, 2], "pads": [1, 2, 0, 1]},
        {"storage_order": 1, "pads": [1, 0, 1, 1], "strides": [2, 1]},
    ],
)
def test_places_of_the_largest(dtype, given):
    """Windows are one step apart by default, of which onnx's evaluator gives other places."""
    x = (tame(2, 3, 9, 8) * 20).astype(dtype)
    by_torch(one("MaxPool", {"x": x}, out=[0, INT64], kernel_shape=[2, 3], **given), {"x": x}, rtol=0)


CODES = {
    "per tensor": ((), ()),
    "per channel": ((), (4,)),
}


@pytest.mark.parametrize("scales", CODES)
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("given", [{"pads": [1, 0, 2, 1]}, {"strides": [2, 1], "group": 2}])
def test_convolutions_of_codes(scales, dtype, given):
    """Padded with zero points; sums are exact, and onnxruntime's products of scales may round to the neighbouring code."""
    groups, (_, of_w) = given.get("group", 1), CODES[scales]
    x, w = whole(np.uint8, 2, 6, 9, 7), whole(dtype, 4, 6 // groups, 3, 2)
    zero, w_zero = np.uint8(117), np.full(of_w, 3 if dtype is np.uint8 else 0, dtype)
    m = one("ConvInteger", {"x": x}, {"w": w, "xz": zero, "wz": np.asarray(w_zero.flat[0])}, out=TensorProto.INT32, **given)
    by_torch(m, {"x": x}, "convolution.default", rtol=0)
    w_scale = np.abs(tame(*of_w)).astype(np.float32) * 0.01 + np.float32(0.01)
    constants = {"xs": np.float32(0.02), "xz": zero, "w": w, "ws": w_scale, "wz": w_zero}
    constants |= {"ys": np.float32(0.7), "yz": np.uint8(128), "b": rng.integers(-9999, 9999, 4).astype(np.int32)}
    m = one("QLinearConv", {"x": x}, constants, **given)
    graph = read(m)
    assert {n.op.target for n in graph.nodes() if n.op.name == "call"} == {"aten.convolution.default"}
    got, wanted = (r[0].astype(int) for r in (ours(graph, {"x": x}), theirs(m, {"x": x})))
    assert np.abs(got - wanted).max() <= 1 and (got == wanted).mean() > 0.99 and len(np.unique(got)) > 20


@pytest.mark.parametrize("given", [{}, {"exclusive": 1}, {"reverse": 1}, {"reverse": 1, "exclusive": 1}])
def test_cumulative_products(given):
    """onnxruntime has none yet."""
    x = tame(3, 4, 5)
    graph = read(one("CumProd", {"x": x}, {"axis": np.int64(1)}, opset=26, **given))
    assert [n.op.target for n in graph.nodes() if n.op.name == "call"] == ["aten.cumprod.default"]
    wanted = x[:, ::-1] if given.get("reverse") else x
    if given.get("exclusive"):
        wanted = np.concatenate([np.ones_like(x[:, :1]), wanted[:, :-1]], 1)
    wanted = wanted.cumprod(1)
    np.testing.assert_allclose(ours(graph, {"x": x})[0], wanted[:, ::-1] if given.get("reverse") else wanted, rtol=1e-5)


def test_determinants():
    x = tame(2, 3, 4, 4)
    by_torch(one("Det", {"x": x}), {"x": x}, "_linalg_det.default")


@pytest.mark.parametrize("axis", [-2, 1, -1])
@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("start", [False, True])
def test_a_cache_takes_an_update(axis, mode, start):
    """onnxruntime has no TensorScatter of all of these."""
    cache, count = tame(2, 4, 5, 6), 2
    update = tame(*(count if a == axis % 4 else d for a, d in enumerate(cache.shape)))
    places = np.array([1, 2 if mode == "linear" else cache.shape[axis] - 1], np.int64)
    feeds = {"x": cache, "u": update} | ({"at": places} if start else {})
    graph = read(one("TensorScatter", feeds, opset=24, axis=axis, mode=mode))
    assert [n.op.target for n in graph.nodes() if n.op.name == "call"] == ["aten.scatter.src"]
    wanted = np.moveaxis(cache.copy(), axis, 1)
    for b in range(2):
        for i in range(count):
            at = (places[b] if start else 0) + i
            wanted[b, at % wanted.shape[1]] = np.moveaxis(update, axis, 1)[b, i]
    np.testing.assert_array_equal(ours(graph, feeds)[0], np.moveaxis(wanted, 1, axis))


def test_an_update_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match=r"TensorScatter of f32\[2,2\] into f32\[2,3,4\] along axis 1, linear"):
        read(one("TensorScatter", {"x": tame(2, 3, 4), "u": tame(2, 2)}, opset=24))
