"""The oracle: what it says about types is what comes out; inputs are checked; memory is let go; errors say where."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import feeds, graphs
from values import random_value, to_numpy

from tilewright.dtype import F32, OPAQUE, S8
from tilewright.errors import InputError, TypeMismatchError, UnsupportedError
from tilewright.ir.build import const, input_, items, map_, reshape
from tilewright.ir.evaluate import accumulate_in_float64, check_value, evaluate, evaluate_nodes, float64_gemms
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Acc, Call, Gather, Param, gemm
from tilewright.ir.ops.rounding import are_codes
from tilewright.ir.types import TensorType, TupleType
from tilewright.ir.verify import verify

x = input_("x", F32, (2, 3))


def assert_typed(node: Node, value: object) -> None:
    types = node.type.items if isinstance(node.type, TupleType) else (node.type,)
    values = value if isinstance(value, tuple) else (value,)
    assert len(types) == len(values)
    for t, v in zip(types, values, strict=True):
        assert isinstance(v, torch.Tensor)
        assert (tuple(v.shape), v.dtype) == (t.shape, t.dtype.to_torch()), f"{node.op} is {t}, gives {v.dtype}{list(v.shape)}"
        assert t.dtype.bits > 4 or are_codes(v, t.dtype), node.op


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(graphs(), st.sampled_from([0.0, 0.3]), st.booleans())
def test_every_value_has_the_type_its_node_says(graph, special, float64):
    verify(graph)
    seen = set()

    def visit(node, value):
        assert_typed(node, value)
        seen.add(node)

    given_values = feeds(graph, special=special)
    outputs = evaluate(graph, given_values, float64=float64, visit=visit)
    assert seen == set(graph.nodes()) - set(graph.inputs)
    again = evaluate(graph, list(given_values.values()), float64=float64)
    for node, a, b in zip(graph.outputs, outputs, again, strict=True):
        assert_typed(node, a)
        assert to_numpy(a, node.dtype).tobytes() == to_numpy(b, node.dtype).tobytes()


def test_inputs_are_bound_by_name_or_in_order():
    y = input_("y", F32, (2, 3))
    graph = Graph("g", (x, y), (map_("subtract", x, y),), ("d",))
    a, b = torch.full((2, 3), 5.0), torch.full((2, 3), 3.0)
    assert evaluate(graph, {"y": b, "x": a})[0].tolist() == evaluate(graph, [a, b])[0].tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize(
    ("given_values", "message"),
    [
        ({}, r"no value for input 'x' \(g\)\n  try: it is f32\[2,3\]"),
        ([], r"1 input wanted, 0 given \(g\)"),
        ([torch.zeros(3, 2)], r"shape \[3, 2\] given, f32\[2,3\] wanted \(input 'x'\)"),
        (
            [torch.zeros(2, 3, dtype=torch.float64)],
            r"float64 given, f32\[2,3\] wanted \(input 'x'\)\n  try: pass torch.float32",
        ),
        ([np.zeros((2, 3), np.float32)], r"float32 given, f32\[2,3\] wanted"),
        ([[1.0]], r"a list given, f32\[2,3\] wanted \(input 'x'\)"),
        ([None], r"a NoneType given, f32\[2,3\] wanted"),
    ],
)
def test_wrong_inputs_are_refused(given_values, message):
    with pytest.raises(InputError, match=message):
        evaluate(Graph("g", (x,), (map_("tanh", x),), ("y",)), given_values)


def test_an_opaque_value_is_not_looked_at():
    value = object()
    assert check_value(value, TensorType(OPAQUE, ()), "here") is value


def test_what_fails_says_which_node_by_its_name_in_the_source():
    picked = Node(Gather(0), x, input_("i", S8, (1,)))
    graph = Graph("g", (x, picked.src[1]), (picked,), ("y",), {picked: "layer.3/Gather"})
    with pytest.raises(TypeMismatchError, match=r"gather -> f32\[1,3\] cannot be evaluated: .* \(layer.3/Gather\)"):
        evaluate(graph, [torch.zeros(2, 3), torch.tensor([5], dtype=torch.int8)])
    with pytest.raises(TypeMismatchError, match=r"cannot be evaluated: .* \(gather\)"):
        evaluate_nodes([picked], {x: torch.zeros(2, 3), picked.src[1]: torch.tensor([5], dtype=torch.int8)})


def test_leaves_without_a_value_are_errors():
    for leaf, message in (
        (x, "input 'x' has no value"),
        (Node(Param(3, x.tensor)), "param 3 stands outside an operation's expression"),
        (Node(Acc(x.tensor)), "acc stands outside a gemm's stores"),
    ):
        with pytest.raises(TypeMismatchError, match=message):
            evaluate_nodes([map_("tanh", leaf)], {})


@pytest.mark.parametrize("library", ["nobody", "", "a.b", "..compiler", "_private_no", "os;exit"])
def test_a_call_into_nothing_is_unsupported(library):
    with pytest.raises(UnsupportedError, match=rf"nothing can evaluate a call into '{library}' \(Op\)"):
        evaluate_nodes(items(Node(Call(library, "Op", "", (x.tensor,)), const(1.0))), {})


def test_a_value_is_let_go_after_its_last_reader():
    n = const(torch.ones(1000))
    chain = [map_("negate", n)]
    for _ in range(5):
        chain.append(map_("negate", chain[-1]))
    alive: list[weakref.ref] = []

    def visit(node, value):
        alive.append(weakref.ref(value))
        gc.collect()
        assert sum(r() is not None for r in alive) <= 3  # the constant, its reader, and what that reads

    evaluate_nodes([chain[-1]], {}, visit=visit)
    assert len(alive) == 7


def test_kept_roots_and_bound_values_are_not_let_go():
    a = map_("negate", x)
    b = map_("negate", a)
    one = torch.ones(2, 3)
    values = evaluate_nodes([b, a, x, b], {x: one})
    assert values[2] is one and values[0] is values[3] and values[1].tolist() == [[-1.0] * 3] * 2


def test_bound_nodes_are_not_computed_nor_what_only_they_need():
    hidden = map_("tanh", input_("never given", F32, (2, 3)))
    top = map_("negate", hidden)
    assert evaluate_nodes([top], {hidden: torch.ones(2, 3)})[0].tolist() == [[-1.0] * 3] * 2
    one = torch.ones(2, 3)
    assert evaluate_nodes([hidden], {hidden: one})[0] is one


def test_a_chain_of_20_000_nodes_is_evaluated_without_recursion():
    node = input_("x", F32, ())
    for _ in range(20_000):
        node = map_("negate", node)
    graph = Graph("g", (input_("x", F32, ()),), (node,), ("y",))
    assert evaluate(graph, [torch.tensor(3.0)])[0].item() == 3.0


def test_float64_gemms_are_a_choice_of_the_evaluation_or_of_what_is_around_it():
    a = random_value(TensorType(F32, (7, 300)), 0)
    product = gemm(x_wide := input_("a", F32, (7, 300)), const(a.T.contiguous()))
    graph = Graph("g", (x_wide,), (product,), ("y",))
    plain, wide = evaluate(graph, [a])[0], evaluate(graph, [a], float64=True)[0]
    exact = (a.double() @ a.double().T).float()
    assert torch.equal(wide, exact) and not torch.equal(plain, exact)
    with accumulate_in_float64():
        assert float64_gemms() and torch.equal(evaluate(graph, [a])[0], exact)
        with accumulate_in_float64(False):
            assert torch.equal(evaluate(graph, [a])[0], plain)
    assert not float64_gemms()


def test_the_memory_of_a_view_is_shared():
    value = torch.ones(2, 3)
    (flat,) = evaluate_nodes([reshape(x, (6,))], {x: value})
    assert flat.data_ptr() == value.data_ptr()
