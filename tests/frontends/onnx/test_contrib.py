"""onnxruntime's own operators against onnxruntime."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from onnx import helper
from onnx_contrib import CASES, Case
from onnx_models import FLOAT, UINT8, model, one, ours, read, tame, theirs

from tilewright.compiler import optimise
from tilewright.errors import InputError, TypeMismatchError, UnsupportedError

SEEDS = 2


def check(case: Case) -> None:
    """Every result as onnxruntime gives it, within what the case allows."""
    graph = read(case.model)
    for i, (got, wanted) in enumerate(zip(ours(graph, case.feeds), theirs(case.model, case.feeds), strict=True)):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        if case.unspecified and i in case.unspecified:
            got, wanted = (np.where(case.unspecified[i], 0, x) for x in (got, wanted))
        if wanted.dtype.kind == "f":
            np.testing.assert_allclose(got, wanted, rtol=case.rtol, atol=case.atol)
        else:
            off = np.abs(got.astype(np.int64) - wanted.astype(np.int64))
            assert off.max(initial=0) <= case.codes, (got, wanted)


def drawn(op: str, seed: int) -> Case:
    """Case number `seed` of an operator."""
    return CASES[op](np.random.default_rng([zlib.crc32(op.encode()), seed]))


@pytest.mark.parametrize("op", CASES)
def test_as_onnxruntime_computes_it(op):
    for seed in range(SEEDS):
        check(drawn(op, seed))


@pytest.mark.parametrize(
    ("op", "domain", "hint"),
    [
        ("DynamicQuantizeLSTM", "com.microsoft", "fewer optimisations"),
        ("Conv", "com.microsoft.nchwc", "ORT_ENABLE_EXTENDED instead of ORT_ENABLE_ALL"),
    ],
)
def test_what_is_not_read_says_how_to_save_it(op, domain, hint):
    with pytest.raises(UnsupportedError, match=f"operator '{op}' of domain|operator {op} of domain") as caught:
        read(one(op, {"x": tame(1, 8, 4, 4)}, {"w": tame(8, 8, 1, 1)}, domain=domain))
    assert hint in str(caught.value)


def refused(op, inputs, **attributes):
    names = [k for k, v in inputs.items() if v is not None]
    node = helper.make_node(op, names, ["y"], name="node", domain="com.microsoft", **attributes)
    with pytest.raises((UnsupportedError, InputError)) as caught:
        read(model([node], inputs, {"y": FLOAT}))
    return str(caught.value)


def test_forms_that_only_other_devices_have_are_refused_by_name():
    x, w, b = tame(1, 3, 8), tame(8, 24), tame(24)
    three = {"x": x, "w": w, "b": b}
    assert "Attention with do_rotary" in refused("Attention", three, num_heads=2, do_rotary=1)
    assert "packed operands" in refused("MultiHeadAttention", {"q": tame(1, 3, 2, 3, 4)}, num_heads=2)
    given = {
        "q": tame(1, 1, 48),
        "k": tame(1, 1, 32),
        "v": tame(1, 1, 32),
        "n": np.zeros(1, np.int32),
        "t": np.array(1, np.int32),
    }
    assert "3 query heads over 2 key heads" in refused("GroupQueryAttention", given, num_heads=3, kv_num_heads=2)
    table = {"x": tame(1, 3, 8), "p": np.zeros(1, np.int64), "c": tame(2, 2), "s": tame(2, 2)}
    assert "RotaryEmbedding over 3 positions by a table f32[2,2]" in refused("RotaryEmbedding", table)
    mask = np.ones((1, 1, 3, 3), np.int32)
    assert "Attention with a mask s32[1,1,3,3]" in refused("Attention", {**three, "m": mask}, num_heads=2)
    assert "3 heads in f32[1,3,8]" in refused("Attention", three, num_heads=3)
    assert "activation 'Swoosh'" in refused("FusedGemm", {"a": x[0], "w": w}, activation="Swoosh")
    assert "with a mean or a variance" in _trained()


def _trained():
    given = {"x": tame(1, 2, 4), "s": tame(1, 2, 4), "g": tame(4)}
    node = helper.make_node("SkipLayerNormalization", list(given), ["y", "m"], domain="com.microsoft")
    with pytest.raises(UnsupportedError) as caught:
        read(model([node], given, {"y": FLOAT, "m": FLOAT}))
    return str(caught.value)


@pytest.mark.parametrize(
    ("queries", "keys", "low", "given"),
    [
        (4, 4, True, "mask"),
        (4, 4, False, "mask"),
        (4, 4, False, "bias"),
        (2, 4, False, ""),
        (4, 2, False, ""),
        (1, 4, False, ""),
    ],
)
def test_a_query_that_sees_nothing_looks_ahead_as_in_onnxruntime(queries, keys, low, given):
    """Causality hides by the lowest number: what padding or a bias makes as low is no lower than keys to come."""
    mask = np.array([[0, 0, 1, 1]], np.int32) if given == "mask" else None
    bias = np.zeros((1, 1, 4, 4), np.float32) if given == "bias" else None
    if bias is not None:
        bias[0, 0, :2, :2] = np.finfo(np.float32).min
        bias[0, 0, 2] = -np.inf
    feeds = {"q": tame(1, queries, 4), "k": tame(1, keys, 4), "v": tame(1, keys, 4), "m": mask, "b": bias}
    feeds = {n: v for n, v in feeds.items() if v is not None}
    names = ["q", "k", "v", "", "m" if given == "mask" else "", *(["b"] if given == "bias" else [])]
    more = {"mask_filter_value": float(np.finfo(np.float32).min)} if low else {}
    node = helper.make_node("MultiHeadAttention", names, ["y"], domain="com.microsoft", num_heads=1, unidirectional=1, **more)
    m = model([node], feeds, {"y": FLOAT})
    np.testing.assert_allclose(ours(read(m), feeds)[0], theirs(m, feeds)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("seed", "causal"), [(0, 1), (1, 1), (2, 0)])
def test_causal_attention_stays_one_causal_node(seed, causal):
    """Keys that causality hides are never computed: a mask in place of that flag would double the work."""
    given = {"x": tame(1, 5, 8), "w": tame(8, 24), "b": tame(24), "m": np.ones((1, 5), np.int32)}
    given = given if seed else {k: v for k, v in given.items() if k != "m"}
    node = helper.make_node("Attention", list(given), ["y"], domain="com.microsoft", num_heads=2, unidirectional=causal)
    (found,) = [n.op for n in read(model([node], given, {"y": FLOAT})).nodes() if n.op.name == "attention"]
    assert found.causal == ("lower" if causal else "no")


def test_attention_is_one_node_of_the_graph():
    """A fused projection, its heads and its mask leave one gemm and one attention."""
    case = drawn("Attention", 5)
    names = [n.op.name for n in optimise(read(case.model)).nodes()]
    assert names.count("gemm") == 1
    assert names.count("attention") == 1


def test_a_requantised_part_in_the_results_own_codes_is_copied():
    s, z = np.array(0.1, np.float32), np.array(3, np.uint8)
    x = np.arange(6, dtype=np.uint8).reshape(2, 3)
    node = helper.make_node("QLinearConcat", ["s", "z", "x", "s", "z", "x", "s", "z"], ["y"], domain="com.microsoft", axis=0)
    m = model([node], {"x": x}, {"y": UINT8}, {"s": s, "z": z})
    assert [n.op.name for n in read(m).nodes()] == ["input", "concat"]
    np.testing.assert_array_equal(ours(m, {"x": x})[0], theirs(m, {"x": x})[0])


@pytest.mark.parametrize("position", [-1, 4])
def test_positions_outside_their_table_are_refused_as_the_program_runs(position):
    given = {"x": tame(1, 1, 8), "p": np.array([position], np.int64), "c": tame(4, 2), "s": tame(4, 2)}
    m = model([helper.make_node("RotaryEmbedding", list(given), ["y"], domain="com.microsoft")], given, {"y": FLOAT})
    with pytest.raises(TypeMismatchError, match=f"index out of range: {position} of 4"):
        ours(read(m), given)
