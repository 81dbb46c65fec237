"""ONNX operators along axes whose extents stay open: one reading for all lengths, against onnxruntime."""

import logging

import numpy as np
import pytest
from onnx import TensorProto
from onnx.helper import make_node as node
from onnx_models import model, theirs, value

from tilewright import errors
from tilewright.compiler import compile

ROWS = (1, 2, 3, 8, 31, 64)


def whole(*values):
    return np.array(values, np.int64)


def rows_of(nodes, constants):
    """A model of x: f32[n, 6], whose result is y."""
    return model(nodes, [value("x", TensorProto.FLOAT, ["n", 6])], {"y": TensorProto.FLOAT}, constants)


EXTENT = node("Shape", ["x"], ["extent"], start=0, end=1)
SLICED = node("Slice", ["x", "start", "stop", "axis", "step"], ["y"])
TOP = node("TopK", ["x", "k"], ["y", "places"], axis=0)
END = -(1 << 63) + 1
CASES = {
    "reversed": ([SLICED], {"start": whole(-1), "stop": whole(END), "axis": whole(0), "step": whole(-1)}),
    "every second, backwards": ([SLICED], {"start": whole(-1), "stop": whole(END), "axis": whole(0), "step": whole(-2)}),
    "all but one, backwards": ([SLICED], {"start": whole(-1), "stop": whole(0), "axis": whole(0), "step": whole(-1)}),
    "as many as there are": ([EXTENT, node("TopK", ["x", "extent"], ["y", "places"], axis=0)], {}),
    "the largest": ([TOP], {"k": whole(1)}),
    "the largest of each row": ([node("TopK", ["x", "k"], ["y", "places"])], {"k": whole(3)}),
    "edge": ([node("Pad", ["x", "pads"], ["y"], mode="edge")], {"pads": whole(1, 0, 2, 0)}),
    "reflect": ([node("Pad", ["x", "pads"], ["y"], mode="reflect")], {"pads": whole(0, 2, 0, 1)}),
    "twice as many": (
        [
            node("Unsqueeze", ["x", "front"], ["x4"]),
            node("Resize", ["x4", "", "scales"], ["y4"], mode="nearest"),
            node("Squeeze", ["y4", "front"], ["y"]),
        ],
        {"front": whole(0, 1), "scales": np.array([1, 1, 2, 1], np.float32)},
    ),
    "a sum of what is not zero": (
        [node("NonZero", ["x"], ["places"]), node("ReduceSum", ["places"], ["s"]), node("Cast", ["s"], ["y"], to=1)],
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_reading_serves_all_lengths(name):
    onnx_model = rows_of(*CASES[name])
    program = compile(onnx_model, dims={"n": (1, 64)}, budget_s=0)
    for rows in ROWS:
        x = np.random.default_rng(rows).standard_normal((rows, 6)).astype(np.float32)
        np.testing.assert_allclose(program(x), theirs(onnx_model, {"x": x})[0], rtol=1e-5, atol=1e-6)
    assert program.compiled == (2 if "all but one" in name else 1)  # of one row none are left


def test_a_window_slides_along_an_open_axis():
    nodes = [node("Unsqueeze", ["x", "front"], ["x4"]), node("AveragePool", ["x4"], ["y"], kernel_shape=[2, 2])]
    onnx_model = rows_of(nodes, {"front": whole(0, 1)})
    program = compile(onnx_model, dims={"n": (4, 64)}, budget_s=0)
    for rows in (4, 9, 30, 64):
        x = np.random.default_rng(rows).standard_normal((rows, 6)).astype(np.float32)
        np.testing.assert_allclose(program(x), theirs(onnx_model, {"x": x})[0], rtol=1e-5, atol=1e-6)
    assert program.compiled <= 2


def test_what_is_read_anew_for_each_length_says_so(caplog, monkeypatch):
    monkeypatch.setattr(errors, "_said", set())
    nodes = [
        node("Unsqueeze", ["x", "front"], ["x4"]),
        node("Resize", ["x4", "", "scales"], ["y"], name="stretch", mode="nearest"),
    ]
    onnx_model = rows_of(nodes, {"front": whole(0, 1), "scales": np.array([1, 1, 1.5, 1], np.float32)})
    with caplog.at_level(logging.WARNING, "tilewright"):
        program = compile(onnx_model, dims={"n": (1, 64)}, budget_s=0)
        sentence = "for each n it is read and rewritten anew: Resize node 'stretch' cannot take an open extent there"
        assert any(sentence in r.message for r in caplog.records)
        for rows in (2, 5, 7, 12, 20):
            x = np.random.default_rng(rows).standard_normal((rows, 6)).astype(np.float32)
            np.testing.assert_allclose(program(x), theirs(onnx_model, {"x": x})[0], rtol=1e-5, atol=1e-6)
    assert program.compiled == 7  # one for the hint, one for the middle, one for each
    assert sentence in " ".join(str(program.explain(n=5)).split())
    assert "g: 6 readings for" in caplog.text
    assert "by now: Resize node 'stretch' by n" in caplog.text
