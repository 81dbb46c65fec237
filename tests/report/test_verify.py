"""Each rule that `verify` states, broken."""

import pytest
from hypothesis import HealthCheck, given, settings
from strategies import graphs

from tilewright.dtype import F32, OPAQUE
from tilewright.errors import TypeMismatchError
from tilewright.ir.build import convert, input_, items, map_, reshape
from tilewright.ir.expression import make_gemm
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Acc, Attention, Call, Gemm, Item, Param, Reshape
from tilewright.ir.types import TensorType
from tilewright.ir.verify import verify

x, y = input_("x", F32, (2, 2)), input_("y", F32, (2, 2))
SQUARE = TensorType(F32, (2, 2))
p, acc = Node(Param(0, SQUARE)), Node(Acc(SQUARE))
unknown = Node(Call("onnx", "NonZero", "", (TensorType(OPAQUE, ()),)), x)


def graph(*outputs, inputs=(x, y), names=None, origins=None):
    return Graph("g", inputs, outputs, tuple(map(str, range(len(outputs)))) if names is None else names, origins or {})


def gemm_with(store, operand=p):
    return Node(Gemm(F32, operand, p, (store,)), x)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(graphs(calls=True))
def test_a_well_formed_graph_is_returned(g):
    assert verify(g) is g


def test_calls_and_items_may_carry_what_is_known_only_at_run_time():
    several = Node(Call("onnx", "Split", "", (TensorType(OPAQUE, ()), SQUARE)), unknown)
    verify(graph(*items(several), unknown))


PAIR = Node(Call("onnx", "Split", "", (SQUARE, SQUARE)), x)
MINUS = input_("n", F32, (-1,))
SHORT = Node(Call("a", "b", "", (SQUARE, TensorType(F32, (-2,)))), x)
STRAY = Node(Item(0), Node(Call("a", "b", "", (SQUARE, SQUARE)), acc))
NESTED = Node(Gemm(F32, p, p, (acc,)), p)
RUN_TIME = "reads a value whose type is known only at run time"
INSIDE = "may not stand inside an expression"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (graph(x, names=("a", "b")), r"1 outputs but 2 names \(g\)"),
        (graph(x, inputs=(x, map_("tanh", x))), r"an input of the graph is not an input node \(g\)"),
        (graph(x, inputs=(x, input_("x", F32, (3,)))), r"two inputs share a name: x, x \(g\)"),
        (graph(x, inputs=(x, x)), r"two inputs share a name: x, x \(g\)"),
        (graph(PAIR, origins={PAIR: "Split_0"}), r"a graph output is a tuple \(Split_0\)\n  try: item\(index=…\) first"),
        (graph(map_("add", x, y), inputs=(x,)), r"reads input 'y', which the graph does not declare \(g\)"),
        (graph(x, inputs=(input_("x", F32, (3, 3)),)), r"reads input 'x', which the graph does not declare"),
        (graph(map_("tanh", p), origins={p: "odd"}), r"param stands outside an operation's expression \(odd\)"),
        (graph(map_("tanh", acc)), r"acc stands outside an operation's expression \(acc\)"),
        (graph(reshape(unknown, (1,))), rf"reshape {RUN_TIME} \(reshape\)"),
        (graph(convert(unknown, F32)), rf"convert {RUN_TIME} \(convert\)"),
        (graph(MINUS, inputs=(MINUS,)), r"input has a negative extent: f32\[-1\] \(input\)"),
        (graph(items(SHORT)[0]), r"call has a negative extent: f32\[-2\] \(call\)"),
        (graph(gemm_with(map_("add", acc, x))), rf"input {INSIDE} \(gemm: stores\)"),
        (graph(gemm_with(acc, map_("tanh", x))), rf"input {INSIDE} \(gemm: lhs\)"),
        (graph(gemm_with(map_("add", acc, NESTED))), rf"gemm {INSIDE} \(gemm: stores\)"),
        (graph(gemm_with(map_("add", acc, STRAY))), rf"call {INSIDE} \(gemm: stores\)"),
    ],
)
def test_what_is_malformed_says_where(broken, message):
    with pytest.raises(TypeMismatchError, match=message):
        verify(broken)


def test_regions_of_attention_are_looked_into():
    q = input_("q", F32, (1, 1, 2, 2))
    pq, inner = Node(Param(0, q.tensor)), Node(Acc(TensorType(F32, (1, 1, 2, 2))))
    good = Node(Attention(1.0, operands=(pq, pq, pq), stores=(inner,)), q)
    verify(Graph("g", (q,), (good,), ("y",)))
    for label, op in (
        ("operands", Attention(1.0, operands=(pq, pq, map_("tanh", q)))),
        ("scores", Attention(1.0, operands=(pq, pq, pq), scores=map_("add", inner, q))),
        ("weights", Attention(1.0, operands=(pq, pq, pq), weights=map_("add", inner, q))),
        ("stores", Attention(1.0, operands=(pq, pq, pq), stores=(map_("add", inner, q),))),
    ):
        with pytest.raises(TypeMismatchError, match=rf"input may not stand inside an expression \(attention: {label}\)"):
            verify(Graph("g", (q,), (Node(op, q),), ("y",)))


def test_a_gemm_made_by_folding_is_well_formed():
    store = map_("add", acc, Node(Param(1, SQUARE)))
    folded = make_gemm(F32, p, p, (store,), (x, y))
    assert verify(graph(folded)).outputs == (folded,) and folded.src == (x, y)
    assert Node(Reshape((4,)), folded).shape == (4,)
