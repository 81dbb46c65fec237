"""Calls, which the graph has no other node for: onnx's reference evaluator, functions, control flow, opaque values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx_models import BOOL, FLOAT, INT64, agrees, model, native, one, ours, read, tame, theirs, value

from tilewright.compiler import compile
from tilewright.errors import TypeMismatchError, UnsupportedError
from tilewright.frontends import onnx as frontend
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph
from tilewright.ir.ops import Call
from tilewright.ir.text import parse, print_graph, print_with_literals

X = {"x": tame(2, 3)}


def calls(graph: Graph) -> list[str]:
    return [n.op.target for n in graph.nodes() if isinstance(n.op, Call)]


def run(graph: Graph, feeds) -> list[object]:
    return list(evaluate(graph, {k: torch.from_numpy(v) for k, v in feeds.items()}))


def test_an_operator_without_a_node_is_called_and_reported():
    x = {"x": tame(1, 1, 4, 4)}
    m = one("LpPool", x, kernel_shape=[2, 2])
    graph = read(m)
    assert calls(graph) == ["LpPool"]
    assert [str(n.type) for n in graph.outputs] == ["f32[1,1,3,3]"]
    assert graph.notes == ("LpPool (node 'node') runs in onnx's reference evaluator: no node of the graph expresses it",)
    np.testing.assert_allclose(ours(graph, x)[0], theirs(m, x)[0], rtol=1e-6)


def test_a_call_survives_being_printed_and_parsed():
    graph = read(one("LpPool", {"x": tame(1, 1, 4, 4)}, kernel_shape=[2, 2]))
    text, literals = print_with_literals(graph)
    assert parse(text, literals).outputs == graph.outputs
    assert print_graph(parse(text, literals)) == text


def test_equal_calls_are_one_node_but_equal_draws_are_not():
    nodes = [helper.make_node("Det", ["x"], [n]) for n in "ab"] + [
        helper.make_node("RandomUniformLike", ["x"], [n]) for n in "cd"
    ]
    graph = read(model(nodes, {"x": tame(2, 2)}, dict.fromkeys("abcd", FLOAT)))
    a, b, c, d = graph.outputs
    assert a is b
    assert c is not d


def test_a_result_shaped_by_data_is_opaque_and_so_is_what_reads_it():
    nodes = [
        helper.make_node("NonZero", ["x"], ["n"]),
        helper.make_node("Transpose", ["n"], ["t"]),
        helper.make_node("Relu", ["x"], ["r"]),
    ]
    graph = read(model(nodes, X, {"t": INT64, "n": INT64, "r": FLOAT}))
    assert [str(n.type) for n in graph.outputs] == ["opaque", "opaque", "f32[2,3]"]
    assert calls(graph) == ["NonZero", "Transpose"]
    assert "Transpose (node 't') runs in onnx's reference evaluator: it reads a value whose type is known" in graph.notes[1]
    x = np.array([[0, 1, 0], [2, 0, 3]], np.float32)
    found, places, _ = run(graph, {"x": x})
    np.testing.assert_array_equal(places, np.nonzero(x))
    np.testing.assert_array_equal(found, np.argwhere(x))


def test_an_opaque_value_of_a_known_type_becomes_a_tensor_again():
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["s"], axis=0),
        helper.make_node("SequenceAt", ["s", "one"], ["y"]),
        helper.make_node("ReduceSum", ["x"], ["z"]),
    ]
    graph = read(model(nodes, X, {"y": FLOAT, "z": FLOAT}, {"one": np.array(1, np.int64)}))
    np.testing.assert_array_equal(np.asarray(run(graph, X)[0]), X["x"][1:2])


def test_strings_pass_through():
    words = np.array(["a", "bb"], dtype=object)
    nodes = [helper.make_node("StringConcat", ["w", "w"], ["y"]), helper.make_node("Relu", ["x"], ["z"])]
    m = model(nodes, X, {"y": TensorProto.STRING, "z": FLOAT})
    m.graph.initializer.append(helper.make_tensor("w", TensorProto.STRING, [2], words))
    assert list(run(read(m), X)[0]) == ["aa", "bbbb"]


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, np.float16, np.uint16, np.uint64, ml_dtypes.float8_e5m2, ml_dtypes.int4, np.bool_]
)
def test_every_element_type_goes_into_a_call_and_comes_out(dtype):
    x = np.arange(6).reshape(2, 3).astype(dtype)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    same = helper.make_graph([helper.make_node("Identity", ["x"], ["s"])], "b", [], [value("s", kind, (2, 3))])
    node = helper.make_node("If", ["p"], ["y"], then_branch=same, else_branch=same)
    feeds = {"p": np.array(True), "x": x}
    m = model([node], feeds, {"y": kind})
    assert calls(read(m)) == ["If"]
    got = frontend.backend().prepare(m).run(list(feeds.values()))[0]
    assert got.dtype == x.dtype
    assert got.tobytes() == x.tobytes()


def test_shape_arithmetic_through_nonzero_is_known():
    """Older exporters spell a range so."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("ConstantOfShape", ["s"], ["c"], value=numpy_helper.from_array(np.array([1], np.int64))),
        helper.make_node("NonZero", ["c"], ["n"]),
        helper.make_node("Transpose", ["n"], ["t"]),
        helper.make_node("Reshape", ["x", "six"], ["f"]),
        helper.make_node("GatherND", ["x", "t"], ["y"]),
    ]
    graph = agrees(model(nodes, X, {"y": FLOAT, "f": FLOAT}, {"six": np.array([6], np.int64)}), X, exact=True)
    assert native(graph)


# ---- control flow


def branch(name: str, op: str, shape=(2, 3)):
    return helper.make_graph([helper.make_node(op, ["x"], [name])], name, [], [value(name, FLOAT, shape)])


@pytest.mark.parametrize("taken", [True, False])
def test_an_if_that_depends_on_data_is_a_call(taken):
    node = helper.make_node("If", ["p"], ["y"], then_branch=branch("a", "Relu"), else_branch=branch("b", "Neg"))
    feeds = {"p": np.array(taken), **X}
    m = model([node], feeds, {"y": FLOAT})
    graph = read(m)
    assert calls(graph) == ["If"]
    assert str(graph.outputs[0].type) == "f32[2,3]"
    np.testing.assert_array_equal(ours(graph, feeds)[0], theirs(m, feeds)[0])


@pytest.mark.parametrize("rank", [2, 3])
def test_an_if_that_depends_on_shapes_is_read_in_place(rank):
    x = tame(*[2, 3, 1][:rank])
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Size", ["s"], ["r"]),
        helper.make_node("Equal", ["r", "two"], ["p"]),
        helper.make_node("If", ["p"], ["y"], then_branch=branch("a", "Relu"), else_branch=branch("b", "Neg")),
    ]
    graph = agrees(model(nodes, {"x": x}, {"y": FLOAT}, {"two": np.array(2, np.int64)}), {"x": x}, exact=True)
    assert graph.outputs[0].op.fn == ("relu" if rank == 2 else "negate")


def test_a_loop_with_captured_values_is_a_call():
    body = helper.make_graph(
        [
            helper.make_node("Add", ["acc", "step"], ["next"]),
            helper.make_node("Identity", ["go"], ["still"]),
            helper.make_node("Mul", ["next", "next"], ["square"]),
        ],
        "body",
        [value("i", INT64, []), value("go", BOOL, []), value("acc", FLOAT, [2, 3])],
        [value("still", BOOL, []), value("next", FLOAT, [2, 3]), value("square", FLOAT, [2, 3])],
    )
    nodes = [helper.make_node("Mul", ["x", "x"], ["step"]), helper.make_node("Loop", ["n", "", "x"], ["y", "all"], body=body)]
    m = model(nodes, X, {"y": FLOAT, "all": FLOAT}, {"n": np.array(4, np.int64)})
    graph = read(m)
    assert calls(graph) == ["Loop"]
    for got, wanted in zip(run(graph, X), theirs(m, X), strict=True):
        np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-6)


def test_what_a_loop_without_a_turn_gives_is_the_callers_own():
    """It is the constant, or the input, that it began with, for onnx's evaluator; its type is not known beforehand."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["still"]), helper.make_node("Add", ["acc", "acc"], ["next"])],
        "body",
        [value("i", INT64, []), value("go", BOOL, []), value("acc", FLOAT, [2, 3])],
        [value("still", BOOL, []), value("next", FLOAT, [2, 3])],
    )
    nodes = [
        helper.make_node("Loop", ["n", "", start], [end], body=body) for start, end in (("c", "a"), ("x", "b"), ("x", "d"))
    ]
    feeds, constant = {"x": tame(2, 3), "n": np.array(0, np.int64)}, tame(2, 3)
    program = compile(model(nodes, feeds, dict.fromkeys("abd", FLOAT), {"c": constant}), budget_s=0)
    x = feeds["x"].copy()
    for given in (feeds, {k: torch.tensor(v) for k, v in feeds.items()}):
        for _ in range(2):
            found = program(**given)
            for result, start in zip(found, (constant, x, x), strict=True):
                np.testing.assert_array_equal(result, start)
                result[...] = 9.0


@pytest.mark.parametrize("trips", [0, 1, 3, None])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_loops_stack_what_each_turn_gives(shape, trips):
    body = helper.make_graph(
        [
            helper.make_node("Add", ["acc", "acc"], ["next"]),
            helper.make_node("Less", ["i", "five"], ["more"]),
            helper.make_node("Identity", ["acc"], ["each"]),
            helper.make_node("Identity", ["i"], ["turn"]),
        ],
        "body",
        [value("i", INT64, []), value("go", BOOL, []), value("acc", FLOAT, shape)],
        [value("more", BOOL, []), value("next", FLOAT, shape), value("each", FLOAT, shape), value("turn", INT64, [])],
    )
    bound = "" if trips is None else "n"
    constants = {"five": np.array(5, np.int64)} | ({} if trips is None else {"n": np.array(trips, np.int64)})
    node = helper.make_node("Loop", [bound, "", "x"], ["y", "all", "turns"], body=body)
    feeds = {"x": tame(*shape)}
    m = model([node], feeds, {"y": FLOAT, "all": FLOAT, "turns": INT64}, constants)
    for got, wanted in zip(run(read(m), feeds), theirs(m, feeds), strict=True):
        assert np.asarray(got).shape == wanted.shape
        np.testing.assert_array_equal(np.asarray(got), wanted)


def test_a_scan_is_a_call():
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "row"], ["t"]), helper.make_node("Identity", ["t"], ["o"])],
        "body",
        [value("s", FLOAT, [3]), value("row", FLOAT, [3])],
        [value("t", FLOAT, [3]), value("o", FLOAT, [3])],
    )
    m = model(
        [helper.make_node("Scan", ["z", "x"], ["f", "y"], num_scan_inputs=1, body=body)],
        X,
        {"f": FLOAT, "y": FLOAT},
        {"z": np.zeros(3, np.float32)},
    )
    np.testing.assert_allclose(np.asarray(run(read(m), X)[1]), X["x"].cumsum(0), rtol=1e-6)


# ---- functions


def function(name: str, inputs: list[str], outputs: list[str], nodes, **more):
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    return helper.make_function("f", name, inputs, outputs, nodes, opsets, **more)


def test_local_functions_are_read_in_place():
    scaled = function(
        "Scaled",
        ["a", "b"],
        ["c"],
        [helper.make_node("LeakyRelu", ["a"], ["l"]), helper.make_node("Clip", ["l", "b"], ["c"])],
        attributes=["slope"],
    )
    attribute = scaled.node[0].attribute.add(name="alpha", type=1)
    attribute.ref_attr_name = "slope"
    twice = function(
        "Twice",
        ["a"],
        ["c"],
        [
            helper.make_node("Scaled", ["a"], ["m"], domain="f", slope=0.5),
            helper.make_node("Scaled", ["m", "lo"], ["c"], domain="f", slope=2.0),
        ],
    )
    twice.node.insert(0, helper.make_node("Constant", [], ["lo"], value_float=-0.75))
    m = model(
        [helper.make_node("Twice", ["x"], ["y"], domain="f")], X, {"y": FLOAT}, domains={"f": 1}, functions=[twice, scaled]
    )
    graph = agrees(m, X)
    half = np.where(X["x"] < 0, X["x"] * 0.5, X["x"])
    np.testing.assert_allclose(ours(graph, X)[0], np.maximum(np.where(half < 0, half * 2, half), -0.75), rtol=1e-6)


def test_a_functions_default_attribute_holds_where_none_is_given():
    f = function(
        "F",
        ["a"],
        ["c"],
        [helper.make_node("LeakyRelu", ["a"], ["c"])],
        attribute_protos=[helper.make_attribute("slope", 0.25)],
    )
    f.node[0].attribute.add(name="alpha", type=1).ref_attr_name = "slope"
    for given, slope in (({}, 0.25), ({"slope": 0.75}, 0.75)):
        m = model([helper.make_node("F", ["x"], ["y"], domain="f", **given)], X, {"y": FLOAT}, domains={"f": 1}, functions=[f])
        np.testing.assert_allclose(ours(m, X)[0], np.where(X["x"] < 0, X["x"] * slope, X["x"]), rtol=1e-6)


def test_a_function_inside_a_loop_goes_with_the_call():
    f = function("F", ["a"], ["c"], [helper.make_node("Mul", ["a", "a"], ["c"])])
    body = helper.make_graph(
        [helper.make_node("F", ["acc"], ["next"], domain="f"), helper.make_node("Identity", ["go"], ["still"])],
        "body",
        [value("i", INT64, []), value("go", BOOL, []), value("acc", FLOAT, [2, 3])],
        [value("still", BOOL, []), value("next", FLOAT, [2, 3])],
    )
    nodes = [helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)]
    m = model(nodes, X, {"y": FLOAT}, {"n": np.array(2, np.int64)}, domains={"f": 1}, functions=[f])
    np.testing.assert_allclose(np.asarray(run(read(m), X)[0]), X["x"] ** 4, rtol=1e-5)


def test_operators_that_onnx_defines_by_others_are_read_as_those():
    graph = agrees(
        one(
            "GroupNormalization",
            {"x": tame(2, 4, 3)},
            {"s": np.ones(4, np.float32), "b": np.zeros(4, np.float32)},
            num_groups=2,
        ),
        {"x": tame(2, 4, 3)},
        rtol=1e-3,
        atol=1e-4,
    )
    assert native(graph)
    assert not graph.notes
    x = {"x": tame(3, 4)}
    for op, more in (("HardSwish", {}), ("Celu", {"alpha": 0.5}), ("ReduceLogSum", {"keepdims": 0})):
        positive = {"x": np.abs(x["x"])}
        agrees(one(op, positive, **more), positive, rtol=1e-4)


# ---- what cannot be


def test_unknown_operators_of_other_domains_are_refused():
    m = one("BiasDropout", X, {"b": np.zeros(3, np.float32)}, domain="com.microsoft")
    with pytest.raises(UnsupportedError, match=r"operator BiasDropout of domain 'com.microsoft' is not modelled"):
        read(m)


def test_a_call_that_fails_says_so():
    graph = read(one("LpPool", {"x": tame(1, 1, 4)}, kernel_shape=[2]))
    broken = Graph("g", graph.inputs, graph.outputs, graph.output_names)
    with pytest.raises(TypeMismatchError, match="onnx's reference evaluator failed"):
        frontend.evaluate_call(broken.outputs[0].op, [torch.zeros(3)])


def test_a_result_of_another_type_than_inferred_is_an_error():
    op = read(one("LpPool", {"x": tame(1, 1, 4)}, kernel_shape=[2])).outputs[0].op
    with pytest.raises(TypeMismatchError, match="gave what was not inferred"):
        frontend.evaluate_call(op, [torch.zeros(1, 1, 5)])
