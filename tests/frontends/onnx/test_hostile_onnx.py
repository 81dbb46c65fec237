"""Malformed and hostile ONNX files: one typed error in a line or two, quickly, before memory is touched."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import FLOAT, model, one, value
from work import counting

from tilewright.errors import InputError, TilewrightError, UnsupportedError
from tilewright.frontends import onnx as frontend
from tilewright.ir.verify import verify

OPSETS = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
X = {"x": np.zeros((2, 3), np.float32)}
LITTLE = 200_000  # calls


def refused(program: onnx.ModelProto | Path, match: str, error: type[TilewrightError] = InputError) -> None:
    """Reading it raises `error` in at most two lines, and is little work."""
    with pytest.raises(error, match=match) as caught, counting() as calls:
        verify(frontend.load(program))
    assert calls.count < LITTLE
    assert str(caught.value).count("\n") <= 1
    assert len(str(caught.value)) < 500


def with_weight(change) -> onnx.ModelProto:
    """x @ w, after `change` has worked on w."""
    m = one("MatMul", X, {"w": np.arange(12, dtype=np.float32).reshape(3, 4)})
    change(m.graph.initializer[0])
    return m


def saved(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    return path


# ---- the file


def test_a_missing_file(tmp_path):
    refused(tmp_path / "none.onnx", "cannot open .*No such file")


def test_a_folder_and_a_pipe(tmp_path):
    refused(tmp_path, "is not a regular file")
    os.mkfifo(tmp_path / "pipe.onnx")
    refused(tmp_path / "pipe.onnx", "is not a regular file")


@pytest.mark.parametrize("data", [b"garbage" * 50, b"\x08\x0a", b"#!/bin/sh\necho hello\n", b"\xff" * 100, b"\x00" * 64])
def test_something_else(tmp_path, data):
    refused(saved(tmp_path, data), "not an ONNX model")


def test_an_empty_file(tmp_path):
    refused(saved(tmp_path, b""), "the file is empty")


@pytest.mark.parametrize("part", [0.2, 0.5, 0.9, 0.99])
def test_a_truncated_file(tmp_path, part):
    whole = with_weight(lambda w: None).SerializeToString()
    refused(saved(tmp_path, whole[: int(len(whole) * part)]), "not an ONNX model, or a damaged one")


def test_a_truncated_file_of_large_weights(tmp_path):
    m = one("MatMul", X, {"w": np.ones((3, 4096), np.float32)})
    refused(saved(tmp_path, m.SerializeToString()[:30000]), "not an ONNX model, or a damaged one")


# ---- tensors


def test_a_negative_extent():
    def negate(w):
        w.dims[:] = [-3, -4]

    refused(with_weight(negate), r"a negative extent in the shape \[-3, -4\] \(initializer 'w'\)")


@pytest.mark.parametrize("dims", [[1 << 40, 1 << 40], [1 << 62, 4], [(1 << 63) - 1], [0, 1 << 62]])
def test_extents_that_overflow(dims):
    def grow(w):
        w.dims[:] = dims

    refused(with_weight(grow), "elements.*no machine|elements")


@pytest.mark.parametrize("size", [0, 11, 47, 49, 96])
def test_data_of_the_wrong_length(size):
    def cut(w):
        w.raw_data = b"\0" * size

    refused(with_weight(cut), rf"f32\[3,4\] needs 48 bytes, {size} are there")


def test_typed_data_of_the_wrong_length():
    m = one("MatMul", X)
    m.graph.node[0].input.append("w")
    m.graph.initializer.append(TensorProto(name="w", data_type=FLOAT, dims=[3, 4], float_data=[1.0] * 11))
    refused(m, r"f32\[3,4\] needs 12 values, 11 are there")
    m.graph.initializer[0].CopyFrom(TensorProto(name="w", data_type=TensorProto.INT4, dims=[3, 5], int32_data=[0] * 7))
    refused(m, r"s4\[3,5\] needs 8")
    m.graph.initializer[0].CopyFrom(TensorProto(name="w", data_type=TensorProto.STRING, dims=[3], string_data=[b"a"]))
    refused(m, r"1 strings for the shape \[3\]")


@pytest.mark.parametrize("code", [0, 99, -1])
def test_an_unknown_element_type(code):
    def retype(w):
        w.data_type = code

    refused(with_weight(retype), f"unknown element type {code}")


def test_an_unknown_element_type_of_an_input():
    m = one("Relu", X)
    m.graph.input[0].type.tensor_type.elem_type = 77
    refused(m, r"unknown element type 77 \(input 'x'\)")


def test_segments_and_sparse_weights():
    def segment(w):
        w.segment.begin = 0

    refused(with_weight(segment), "stored in segments")
    m = with_weight(lambda w: None)
    m.graph.sparse_initializer.add()
    refused(m, "sparse weights")


# ---- external data


def external(tmp_path: Path, size: int = 48, **entries: object) -> Path:
    """A model whose weight lies in w.bin, unless the entries say otherwise."""

    def move(w):
        w.ClearField("raw_data")
        w.data_location = TensorProto.EXTERNAL
        for k, v in {"location": "w.bin", **entries}.items():
            w.external_data.add(key=k, value=str(v))

    (tmp_path / "inside").mkdir()
    (tmp_path / "w.bin").write_bytes(b"\0" * 48)  # outside: what an attack is after
    (tmp_path / "inside" / "w.bin").write_bytes(b"\0" * size)
    return saved(tmp_path / "inside", with_weight(move).SerializeToString())


def test_external_data_in_its_place_is_read(tmp_path):
    verify(frontend.load(external(tmp_path)))


@pytest.mark.parametrize(
    "location",
    ["/etc/passwd", "../w.bin", "a/../../w.bin", "..\\w.bin", "C:\\w.bin", "\\\\host\\w.bin", "", ".", "w\0.bin", "//w.bin"],
)
def test_external_data_outside_the_folder(tmp_path, location):
    refused(external(tmp_path, location=location), "outside the model's folder")


def test_external_data_through_a_symbolic_link(tmp_path):
    path = external(tmp_path, location="link.bin")
    (tmp_path / "inside" / "link.bin").symlink_to(tmp_path / "w.bin")
    refused(path, "symbolic link")


def test_external_data_through_a_linked_folder(tmp_path):
    path = external(tmp_path, location="up/w.bin")
    (tmp_path / "inside" / "up").symlink_to(tmp_path, target_is_directory=True)
    refused(path, "symbolic link")


def test_external_data_that_is_no_file(tmp_path):
    path = external(tmp_path, location="folder")
    (tmp_path / "inside" / "folder").mkdir()
    refused(path, "is not a regular file|cannot open")


def test_external_data_in_a_pipe(tmp_path):
    path = external(tmp_path, location="pipe")
    os.mkfifo(tmp_path / "inside" / "pipe")
    refused(path, "is not a regular file")


def test_external_data_that_is_missing_or_short(tmp_path):
    refused(external(tmp_path, location="none.bin"), "cannot open 'none.bin': No such file")
    (tmp_path / "inside" / "w.bin").write_bytes(b"")
    m = onnx.load(tmp_path / "inside" / "m.onnx", load_external_data=False)
    m.graph.initializer[0].external_data[0].value = "w.bin"
    refused(saved(tmp_path / "inside", m.SerializeToString()), r"bytes 0 to 48 wanted from 'w.bin', which has 0")


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"offset": -4}, "external data with offset '-4'"),
        ({"offset": 4}, "bytes 4 to 52 wanted from 'w.bin', which has 48"),
        ({"offset": 1 << 62}, "which has 48"),
        ({"offset": "0x10"}, "external data with offset '0x10'"),
        ({"offset": "1_0"}, "external data with offset '1_0'"),
        ({"length": -48}, "external data with length '-48'"),
        ({"length": 1 << 62}, "external data of 4611686018427387904 bytes for a tensor of 48"),
        ({"length": 47}, "external data of 47 bytes for a tensor of 48"),
        ({"length": "9" * 30}, "external data with length"),
    ],
)
def test_offsets_and_lengths_that_lie(tmp_path, entries, match):
    refused(external(tmp_path, **entries), match)


def test_external_data_of_a_model_without_a_folder(tmp_path):
    m = onnx.load(external(tmp_path), load_external_data=False)
    refused(m, "its folder is not known")


def test_external_data_in_an_attribute(tmp_path):
    stolen = TensorProto(name="t", data_type=FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
    stolen.external_data.add(key="location", value="../secret.bin")
    (tmp_path / "secret.bin").write_bytes(b"\0" * 12)
    (tmp_path / "inside").mkdir()
    constant = helper.make_node("Constant", [], ["c"], value=stolen)
    branch = helper.make_graph([constant], "b", [], [value("c", FLOAT, [3])])
    choice = helper.make_node("If", ["p"], ["y"], then_branch=branch, else_branch=branch)
    for node in (helper.make_node("Constant", [], ["y"], value=stolen), choice):
        m = model([node], {"p": np.array(True)}, {"y": FLOAT})
        refused(saved(tmp_path / "inside", m.SerializeToString()), "outside the model's folder")


# ---- names and order


def test_two_values_of_one_name():
    relu = helper.make_node("Relu", ["x"], ["y"])
    refused(model([relu, relu], X, {"y": FLOAT}), "two values are called 'y'")
    m = with_weight(lambda w: None)
    m.graph.initializer.append(m.graph.initializer[0])
    refused(m, "two values are called 'w'")
    m = model([relu], X, {"y": FLOAT})
    m.graph.input.append(m.graph.input[0])
    refused(m, "two values are called 'x'")


def test_cycles_and_wrong_order():
    a, b = helper.make_node("Add", ["x", "q"], ["p"]), helper.make_node("Add", ["x", "p"], ["q"])
    refused(model([a, b], X, {"q": FLOAT}), "value 'q' is read before it is made: the nodes form a cycle or")
    refused(model([helper.make_node("Add", ["x", "y"], ["y"])], X, {"y": FLOAT}), "value 'y' is read before it is made")


def test_values_that_nothing_makes():
    refused(model([helper.make_node("Relu", ["ghost"], ["y"])], X, {"y": FLOAT}), "nothing makes the value 'ghost'")
    refused(model([helper.make_node("Relu", ["x"], ["y"])], X, {"z": FLOAT}), r"nothing makes the value 'z' \(output 'z'\)")
    refused(model([], X, {}), "the model has no outputs")


def test_a_name_that_is_not_text(tmp_path):
    data = one("Relu", X).SerializeToString()
    refused(saved(tmp_path, data.replace(b"Relu", b"Re\xff\xfe")), "a name that is not text")


def test_a_name_as_long_as_a_book_or_full_of_lines():
    for name in ("n" * 100_000, "a\nb\nc\n" * 50):
        refused(model([helper.make_node("Relu", [name], ["y"])], X, {"y": FLOAT}), "nothing makes the value")


# ---- operators


def test_operators_nobody_knows():
    refused(one("Wizardry", X), "no operator 'Wizardry' in ONNX's operator set 21", UnsupportedError)
    refused(one("Wizardry", X), "\n  try: ONNX has no such operator: correct its name", UnsupportedError)
    m = one("MatMulBnb4", X, {"w": np.ones((3, 2), np.float32)}, domain="com.microsoft")
    refused(m, "operator MatMulBnb4 of domain 'com.microsoft' is not modelled, and", UnsupportedError)
    m = one("Relu", X)
    m.graph.node[0].domain = "nowhere"
    refused(m, "does not say which version of domain 'nowhere' it uses")


@pytest.mark.parametrize("version", [0, -1, 1 << 40])
def test_operator_sets_that_are_none(version):
    m = one("Relu", X)
    m.opset_import[0].version = version
    refused(m, f"operator set version {version}")


def test_shapes_too_large_for_any_machine():
    shape = {"s": np.array([1 << 40, 1 << 40], np.int64)}
    for op in ("Expand", "ConstantOfShape", "Reshape"):
        inputs = ["s"] if op == "ConstantOfShape" else ["x", "s"]
        node = helper.make_node(op, inputs, ["y"])
        m = model([node], {"x": np.zeros((1, 1), np.float32)}, {"y": FLOAT}, shape)
        refused(m, "no machine holds that many|cannot be reshaped", TilewrightError)


def test_shape_arithmetic_over_a_huge_value_is_not_computed():
    nodes = [
        helper.make_node("ConstantOfShape", ["s"], ["c"], value=numpy_helper.from_array(np.array([1], np.int64))),
        helper.make_node("ReduceSum", ["c"], ["n"], keepdims=1),
        helper.make_node("Reshape", ["x", "n"], ["y"]),
    ]
    m = model(nodes, X, {"y": FLOAT}, {"s": np.array([1 << 46], np.int64)})
    graph = verify(frontend.load(m))
    assert "known only at run time" in " ".join(graph.notes)


def test_attributes_that_would_fill_memory():
    refused(one("Split", X, axis=1, num_outputs=1 << 40), "Split into 1099511627776 parts")
    for mode in ("edge", "wrap", "reflect"):
        m = one("Pad", X, {"p": np.array([0, 0, 0, 1 << 40], np.int64)}, mode=mode)
        with counting() as calls:
            frontend.load(m)
        assert calls.count < LITTLE


# ---- nesting


def test_functions_that_call_themselves():
    def calls(name: str, other: str) -> onnx.FunctionProto:
        node = helper.make_node(other, ["a"], ["b"], domain="f")
        return helper.make_function("f", name, ["a"], ["b"], [node], [helper.make_opsetid("f", 1)])

    for functions in ([calls("A", "A")], [calls("A", "B"), calls("B", "A")]):
        m = model([helper.make_node("A", ["x"], ["y"], domain="f")], X, {"y": FLOAT}, domains={"f": 1}, functions=functions)
        refused(m, "function 'A' calls itself")


def test_functions_that_double_and_double():
    def doubling(i: int) -> onnx.FunctionProto:
        inner, domain = ("Relu", "") if i == 0 else (f"F{i - 1}", "f")
        nodes = [helper.make_node(inner, [a], [b], domain=domain) for a, b in (("a", "m"), ("m", "b"))]
        return helper.make_function(
            "f", f"F{i}", ["a"], ["b"], nodes, [helper.make_opsetid(d, v) for d, v in (("", 21), ("f", 1))]
        )

    functions = [doubling(i) for i in range(40)]
    m = model([helper.make_node("F39", ["x"], ["y"], domain="f")], X, {"y": FLOAT}, domains={"f": 1}, functions=functions)
    refused(m, "nodes once functions are read in place")


def test_functions_nested_too_deep():
    def through(i: int) -> onnx.FunctionProto:
        inner, domain = ("Relu", "") if i == 0 else (f"F{i - 1}", "f")
        node = helper.make_node(inner, ["a"], ["b"], domain=domain)
        return helper.make_function(
            "f", f"F{i}", ["a"], ["b"], [node], [helper.make_opsetid(d, v) for d, v in (("", 21), ("f", 1))]
        )

    functions = [through(i) for i in range(60)]
    m = model([helper.make_node("F59", ["x"], ["y"], domain="f")], X, {"y": FLOAT}, domains={"f": 1}, functions=functions)
    refused(m, "nested more than 48 deep")


@pytest.mark.parametrize("depth", [40, 200, 3000])
def test_branches_inside_branches(tmp_path, depth):
    m = model([], {"x": X["x"], "p": np.array(True)}, {"y": FLOAT})
    graph = m.graph
    for i in range(depth):
        node = graph.node.add(op_type="If", input=["p"], output=[f"y{i}" if i else "y"])
        graph = node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
        graph.output.add(name=f"y{i + 1}")
    graph.node.add(op_type="Relu", input=["x"], output=[f"y{depth}"])
    refused(m, "graphs nested too deep")
    if depth < 3000:  # deeper than protobuf writes
        refused(saved(tmp_path, m.SerializeToString()), "not an ONNX model, or a damaged one")
