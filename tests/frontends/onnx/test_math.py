"""Products, reductions, normalisations and attention of ONNX, against onnxruntime and NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import FLOAT, INT64, agrees, native, one, ours, read, tame, theirs, whole

from tilewright.compiler import optimise

rng = np.random.default_rng(11)


@pytest.mark.parametrize(
    "op",
    [
        "ReduceSum",
        "ReduceMean",
        "ReduceMax",
        "ReduceMin",
        "ReduceProd",
        "ReduceL1",
        "ReduceL2",
        "ReduceSumSquare",
        "ReduceLogSumExp",
    ],
)
@pytest.mark.parametrize("axes", [None, [1], [0, 2], [-1]])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_reductions(op, axes, keepdims):
    x = tame(3, 4, 5)
    constants = {} if axes is None else {"axes": np.array(axes, np.int64)}
    agrees(one(op, {"x": x}, constants, keepdims=keepdims), {"x": x}, rtol=1e-4)


def test_reductions_over_no_axes_and_by_attribute():
    x = tame(3, 4)
    agrees(one("ReduceSum", {"x": x}, {"axes": np.array([], np.int64)}, noop_with_empty_axes=1), {"x": x})
    agrees(one("ReduceMean", {"x": x}, axes=[1], opset=13), {"x": x})
    agrees(one("ReduceMax", {"x": whole(np.int8, 5, 3)}, {"axes": np.array([0], np.int64)}), {"x": whole(np.int8, 5, 3)})


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("last", [0, 1])
def test_places_of_extremes(op, last):
    x = rng.integers(0, 4, (4, 6)).astype(np.float32)
    agrees(one(op, {"x": x}, out=INT64, axis=1, select_last_index=last), {"x": x})
    agrees(one(op, {"x": x}, out=INT64, axis=0, keepdims=0), {"x": x})


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_cumulative_sums(dtype, exclusive, reverse):
    x = rng.integers(-9, 9, (3, 4, 5)).astype(dtype)
    for axis in (0, 1, -1):
        m = one("CumSum", {"x": x}, {"axis": np.array(axis, np.int64)}, exclusive=exclusive, reverse=reverse)
        agrees(m, {"x": x})


def test_cumulative_sums_of_floats_and_of_many_are_torchs():
    """An infinity reaches nothing before it, and no matrix is made up for thousands of elements."""
    x = np.array([[1, np.inf, 2, np.nan, 3, -np.inf]], np.float32)
    many = rng.integers(-9, 9, (2, 20_000))
    for given in (x, many):
        for reverse in (0, 1):
            m = one("CumSum", {"x": given}, {"axis": np.array(1, np.int64)}, reverse=reverse)
            graph = read(m)
            assert [n.op.target for n in graph.nodes() if n.op.name == "call"] == ["aten.cumsum.default"]
            assert not any(n.op.name == "gemm" for n in graph.nodes())
            np.testing.assert_array_equal(ours(graph, {"x": given})[0], theirs(m, {"x": given})[0])


@pytest.mark.parametrize(
    "shapes", [((3,), (3,)), ((3,), (3, 4)), ((2, 3), (3,)), ((2, 1, 3, 4), (5, 4, 2)), ((4,), (2, 4, 3)), ((1, 0), (0, 3))]
)
def test_matmul(shapes):
    feeds = {"a": tame(*shapes[0]), "b": tame(*shapes[1])}
    graph = agrees(one("MatMul", feeds), feeds)
    assert sum(n.op.name == "gemm" for n in graph.nodes()) == 1


def test_matmul_of_other_types():
    feeds = {"a": whole(np.int32, 3, 4), "b": whole(np.int32, 4, 5)}
    np.testing.assert_array_equal(ours(one("MatMul", feeds), feeds)[0], feeds["a"] @ feeds["b"])
    half = {"a": tame(5, 64).astype(np.float16), "b": tame(64, 3).astype(np.float16)}
    wanted = half["a"].astype(np.float64) @ half["b"].astype(np.float64)
    np.testing.assert_allclose(ours(one("MatMul", half), half)[0].astype(np.float64), wanted, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("transposed", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("bias", [None, (), (1,), (5,), (3, 1), (3, 5)])
def test_gemm(transposed, bias):
    a, b = tame(3, 4), tame(4, 5)
    feeds = {"a": a.T.copy() if transposed[0] else a, "b": b.T.copy() if transposed[1] else b}
    if bias is not None:
        feeds["c"] = tame(*bias)
    agrees(one("Gemm", feeds, transA=transposed[0], transB=transposed[1], alpha=0.5, beta=-2.0), feeds)


EQUATIONS = [
    ("ij,jk->ik", (3, 4), (4, 5)),
    ("ij,kj", (3, 4), (5, 4)),
    ("bhid,bhjd->bhij", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("bij,jk->bik", (2, 3, 4), (4, 5)),
    ("...ij,...jk->...ik", (2, 3, 4), (2, 4, 5)),
    ("ab,cd->abcd", (2, 3), (4, 5)),
    ("i,i->", (7,), (7,)),
    ("abc,cd->ad", (2, 3, 4), (4, 5)),
    ("ij,ij->ij", (3, 4), (3, 4)),
    ("ijk->kj", (2, 3, 4)),
    ("...->...", (2, 3)),
    ("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)),
]


@pytest.mark.parametrize("case", EQUATIONS, ids=lambda c: c[0])
def test_einsum(case):
    equation, *shapes = case
    feeds = {f"x{i}": tame(*s) for i, s in enumerate(shapes)}
    m = one("Einsum", feeds, equation=equation)
    graph = read(m)
    assert native(graph)
    np.testing.assert_allclose(ours(graph, feeds)[0], np.einsum(equation, *feeds.values()), rtol=1e-4, atol=1e-5)


def test_normalisations():
    x = tame(2, 3, 4, 5)
    parts = {"s": tame(4, 5), "b": tame(4, 5)}
    m = one("LayerNormalization", {"x": x}, parts, out=[FLOAT] * 3, axis=2, epsilon=1e-3)
    agrees(m, {"x": x}, rtol=1e-4, atol=1e-5)
    channel = {k: np.abs(tame(3)) + 0.1 for k in "sbmv"}
    agrees(one("BatchNormalization", {"x": x}, channel), {"x": x}, rtol=1e-4, atol=1e-5)
    agrees(one("InstanceNormalization", {"x": x}, {k: channel[k] for k in "sb"}), {"x": x}, rtol=1e-4, atol=1e-5)
    agrees(one("LpNormalization", {"x": x}, axis=1, p=1), {"x": x}, rtol=1e-4)
    agrees(one("MeanVarianceNormalization", {"x": x}, axes=[0, 2, 3]), {"x": x}, rtol=1e-3, atol=1e-4)
    agrees(one("GlobalAveragePool", {"x": x}), {"x": x}, rtol=1e-4)
    agrees(one("GlobalMaxPool", {"x": x}), {"x": x})
    m = one("RMSNormalization", {"x": x}, {"s": tame(5)}, opset=23)
    agrees(m, {"x": x}, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(op, axis):
    x = tame(3, 17, 2)
    agrees(one(op, {"x": x}, axis=axis), {"x": x})


def test_softmax_before_version_13_takes_all_axes_from_its_own():
    x = tame(2, 3, 4)
    agrees(one("Softmax", {"x": x}, axis=1, opset=11), {"x": x})


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": 1},
    "scaled": {"scale": 0.3},
    "capped": {"softcap": 2.0},
    "capped and causal": {"softcap": 2.0, "is_causal": 1},
}


@pytest.mark.parametrize("mask", ["none", "pred", "float"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("form", ATTENTION)
def test_attention(form, heads, mask):
    attributes = ATTENTION[form]
    feeds = {"q": tame(2, heads[0], 5, 8), "k": tame(2, heads[1], 7, 8), "v": tame(2, heads[1], 7, 6)}
    if mask == "pred":
        feeds["m"] = rng.random((2, 1, 5, 7)) < 0.7
        feeds["m"][..., 0] = True
    elif mask == "float":
        feeds["m"] = tame(5, 7)
    m = one("Attention", feeds, opset=23, **attributes)
    graph = read(m)
    assert native(graph)
    q, k, v = (feeds[n].astype(np.float64) for n in "qkv")
    k, v = (np.repeat(t, heads[0] // heads[1], 1) for t in (k, v))
    scores = q @ k.swapaxes(-1, -2) * attributes.get("scale", 8**-0.5)
    if cap := attributes.get("softcap"):
        scores = cap * np.tanh(scores / cap)
    if mask != "none":
        scores = np.where(feeds["m"], scores, -np.inf) if mask == "pred" else scores + feeds["m"]
    if attributes.get("is_causal"):
        scores = np.where(np.tri(5, 7, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = weights / weights.sum(-1, keepdims=True) @ v
    np.testing.assert_allclose(ours(graph, feeds)[0], wanted, rtol=1e-4, atol=1e-5)


def test_attention_of_three_axes_with_a_past_against_onnxruntime():
    feeds = {
        "q": tame(2, 3, 32),
        "k": tame(2, 3, 16),
        "v": tame(2, 3, 16),
        "m": tame(3, 7),
        "pk": tame(2, 2, 4, 8),
        "pv": tame(2, 2, 4, 8),
    }
    m = one("Attention", feeds, out=[FLOAT] * 3, opset=23, q_num_heads=4, kv_num_heads=2, is_causal=0)
    agrees(m, feeds, rtol=1e-4, atol=1e-5)


def test_a_query_that_may_see_no_key_gives_zero():
    feeds = {
        "q": tame(1, 1, 2, 4),
        "k": tame(1, 1, 3, 4),
        "v": tame(1, 1, 3, 4),
        "m": np.array([[True, True, False], [False] * 3]),
    }
    for more in ({}, {"softcap": 3.0}):
        got = ours(one("Attention", feeds, opset=23, **more), feeds)[0]
        assert np.isfinite(got).all()
        assert not got[0, 0, 1].any()


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("turned", [0, 4])
def test_rotary_embedding(interleaved, turned):
    half = (turned or 8) // 2
    feeds = {"x": tame(2, 3, 5, 8), "c": tame(9, half), "s": tame(9, half), "p": rng.integers(0, 9, (2, 5))}
    m = one("RotaryEmbedding", feeds, opset=23, interleaved=interleaved, rotary_embedding_dim=turned)
    agrees(m, feeds, rtol=1e-4, atol=1e-5)


def test_half_precision_models_stay_half():
    x = tame(3, 4).astype(np.float16)
    weights = {"w": tame(4, 5).astype(np.float16), "b": tame(5).astype(np.float16)}
    m = one("Gemm", {"x": x}, weights)
    assert read(m).outputs[0].dtype.name == "f16"
    np.testing.assert_allclose(ours(m, {"x": x})[0], theirs(m, {"x": x})[0], rtol=2e-3, atol=2e-3)


def test_softmax_of_f16_is_read_as_onnx_defines_it_and_becomes_one_node_again():
    x = {"x": tame(3, 8).astype(np.float16)}
    graph = read(one("Softmax", x))
    assert [n.op.name for n in graph.nodes()] == ["input", "reduce", "map", "map", "reduce", "map"]
    assert [n.op.name for n in optimise(graph).nodes()] == ["input", "softmax"]
    np.testing.assert_allclose(ours(graph, x)[0], theirs(one("Softmax", x), x)[0], rtol=4e-3)
