"""Binding what a model leaves open, what it is told apart by, and how it is reported."""

from __future__ import annotations

import sys

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import FLOAT, model, native, one, ours, read, tame, value

from tilewright.errors import InputError, MissingDependencyError
from tilewright.frontends import onnx as frontend
from tilewright.frontends.unmodelled import Unmodelled


def open_model(*shapes):
    """Inputs x0, x1, … of these symbolic shapes; the results are their own sums."""
    names = [f"x{i}" for i in range(len(shapes))]
    nodes = [helper.make_node("Relu", [n], [f"y{n}"]) for n in names]
    return model(nodes, [value(n, FLOAT, s) for n, s in zip(names, shapes, strict=True)], {f"y{n}": FLOAT for n in names})


def shapes(graph):
    return [n.shape for n in graph.inputs]


def test_a_symbol_bound_once_is_bound_everywhere():
    m = open_model(["batch", "seq"], ["batch", 4, "seq"], [3])
    assert shapes(read(m, input_dims={"x0": (2, 7)})) == [(2, 7), (2, 4, 7), (3,)]
    assert shapes(read(m, input_dims={"x1": (5, 4, 1)})) == [(5, 1), (5, 4, 1), (3,)]


def test_batch_binds_first_axes_and_their_symbols():
    m = open_model(["batch", 3], [3, "batch"], [None, 2])
    assert shapes(read(m, batch=8)) == [(8, 3), (3, 8), (8, 2)]
    assert shapes(read(m, batch=8, input_dims={"x0": (2, 3)})) == [(2, 3), (3, 2), (8, 2)]


def test_extents_that_stay_open_are_named():
    m = open_model(["batch", "seq"])
    hint = r"--input-dim @x0 1 1 \(or other sizes; input_dims=…\), --batch 1 \(batch=1\) for first axes, or bounds: --dim "
    with pytest.raises(InputError, match=rf"axis 0 \('batch'\) has no size \(input 'x0'\)\n  try: {hint}"):
        read(m)
    with pytest.raises(InputError, match=r"axis 1 \('seq'\) has no size .*\n  try: --input-dim @x0 2 1 "):
        read(m, batch=2)
    unranked = open_model(["n"])
    unranked.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(InputError, match=r"its shape is not in the model.*\n  try: --input-dim @x0 and then its extents"):
        read(unranked)
    assert shapes(read(unranked, input_dims={"x0": (2, 3)})) == [(2, 3)]


def test_dims_that_contradict_the_model_or_each_other():
    m = open_model(["batch", 3], ["batch"])
    with pytest.raises(InputError, match=r"axis 1 is 3 in the model, not 4 \(input 'x0'\)"):
        read(m, input_dims={"x0": (2, 4)})
    with pytest.raises(InputError, match="'batch' is given as 2 and as 5"):
        read(m, input_dims={"x0": (2, 3), "x1": (5,)})
    with pytest.raises(InputError, match="1 extent given, the model has 2"):
        read(m, input_dims={"x0": (2,)})
    with pytest.raises(InputError, match=r"no input is called 'z'\n  try: the inputs are 'x0', 'x1'"):
        read(m, input_dims={"z": (2,)})
    with pytest.raises(InputError, match="-1 is no extent"):
        read(m, batch=-1)


@pytest.mark.parametrize(("opset", "noted"), [(11, "older"), (13, ""), (23, ""), (29, "newer")])
def test_other_operator_sets_are_noted(opset, noted):
    x = {"x": tame(2, 3)}
    graph = read(one("Softmax", x, opset=opset, axis=1))
    assert native(graph)
    assert [noted in n for n in graph.notes] == ([True] if noted else [])


def test_axes_as_attributes_of_older_operators():
    x = tame(2, 1, 3)
    nodes = [
        helper.make_node("Squeeze", ["x"], ["a"], axes=[1]),
        helper.make_node("Unsqueeze", ["a"], ["b"], axes=[0]),
        helper.make_node("Slice", ["b"], ["c"], starts=[1], ends=[3], axes=[2]),
        helper.make_node("ReduceSum", ["c"], ["d"], axes=[0], keepdims=0),
        helper.make_node("Clip", ["d"], ["e"], min=-1.0, max=1.0),
        helper.make_node("Pad", ["e"], ["f"], pads=[0, 1, 0, 0], value=2.0),
    ]
    graph = read(model(nodes, {"x": x}, {"f": FLOAT}, opset=9))
    assert native(graph)
    wanted = np.pad(np.clip(x[:, 0, 1:3], -1, 1), ((0, 0), (1, 0)), constant_values=2)
    np.testing.assert_array_equal(ours(graph, {"x": x})[0], wanted)


def test_an_operator_newer_than_its_converter_is_never_read_with_an_old_meaning():
    from tilewright.frontends.onnx.node import CONVERTERS, converter_of

    versions = {(s.name, s.since_version) for s in onnx.defs.get_all_schemas_with_history() if not s.domain}
    for (domain, name), found in CONVERTERS.items():
        newest = max(d.until for d in found)
        with pytest.raises(Unmodelled, match="is not modelled"):
            converter_of(domain, name, newest + 1)
        assert domain or (name, newest) in versions, f"{name}: no version {newest}"


def test_nodes_and_weights_keep_their_names():
    x, w, b = tame(2, 3), tame(3, 4), tame(4)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"], name="/layer.0/query"), helper.make_node("Add", ["a", "b"], ["y"])]
    graph = read(model(nodes, {"x": x}, {"y": FLOAT}, {"w": w, "b": b}))
    by_op = {graph.origin(n): n for n in graph.nodes()}
    assert by_op["/layer.0/query MatMul"].op.name == "gemm"
    assert by_op["y Add"].op.name == "map"
    assert {by_op["w"].op.data.label, by_op["b"].op.data.label} == {"w", "b"}
    assert graph.output_names == ("y",)


def test_what_is_accepted():
    assert frontend.accepts("model.onnx")
    assert not frontend.accepts("model.hlo")
    assert frontend.accepts(onnx.ModelProto())
    assert not frontend.accepts(onnx.GraphProto())


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingDependencyError, match=r"needs the onnx package\n  try: pip install 'tilewright\[onnx\]'"):
        frontend.load("any.onnx")


def test_shape_chains_of_a_dynamic_export_leave_no_trace():
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Unsqueeze", ["n", "zero1"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["t"], axis=0),
        helper.make_node("Reshape", ["x", "t"], ["y"]),
    ]
    constants = {"zero": np.array(0), "zero1": np.array([0]), "rest": np.array([3, -1])}
    graph = read(model(nodes, [value("x", FLOAT, ["n", 6])], {"y": FLOAT}, constants), batch=5)
    assert [n.op.name for n in graph.nodes()] == ["input", "reshape"]
    assert graph.outputs[0].shape == (5, 3, 2)
