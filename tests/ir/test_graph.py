"""Nodes are interned, frozen and weakly held; attributes have one spelling; literals; substitution."""

import copy
import gc
import math
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from in_threads import in_threads
from values import ALL, random_value

from tilewright.dtype import F8E4M3FN, F32, F64, OPAQUE, PRED, S4, S8, S32, S64, U4, U8, U64
from tilewright.errors import TypeMismatchError
from tilewright.ir.build import const, convert, input_, map_, reshape
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Graph, Node, Users, attributes, substitute, toposort
from tilewright.ir.literal import Literal, literal
from tilewright.ir.ops import (
    Attention,
    Const,
    Convert,
    Iota,
    LayerNorm,
    Param,
    Quantize,
    Reduce,
    Reshape,
    Slice,
    Softmax,
    gemm,
)
from tilewright.ir.types import TensorType, TupleType

x = input_("x", F32, (2, 3))


def test_equal_expressions_are_the_same_node():
    def build():
        a = input_("x", F32, (2, 3))
        return map_("add", reshape(map_("tanh", a), (3, 2)), const(1.5, F32)), gemm(a, input_("w", F32, (3, 4)), out_dtype=S8)

    assert build()[0] is build()[0] and build()[1] is build()[1]
    assert map_("tanh", x) is not map_("sine", x)
    assert map_("subtract", x, map_("tanh", x)) is not map_("subtract", map_("tanh", x), x)
    assert input_("x", F64, (2, 3)) is not x and input_("y", F32, (2, 3)) is not x


def test_attributes_that_python_holds_equal_have_one_spelling():
    same = [
        (Softmax(True), Softmax(1), Softmax(np.int64(1))),
        (Attention(1), Attention(1.0), Attention(True), Attention(np.float32(1)), Attention(torch.tensor(1.0))),
        (LayerNorm(1, 0.0), LayerNorm(1, -0.0), LayerNorm(1, 0), LayerNorm(1, False)),
        (Reduce("add", (0,), 1), Reduce("add", [0], True), Reduce("add", (False,), np.True_)),
        (Reshape([2, 3]), Reshape((2, 3)), Reshape(torch.Size([2, 3])), Reshape((np.int32(2), torch.tensor(3)))),
        (Iota(S32, (True, 3), 0), Iota(S32, (1, 3), False)),
        (Quantize(S8, [1, 2]), Quantize(S8, (1, 2))),
        (Param(0, TensorType(F32, [2])), Param(False, TensorType(F32, (np.int8(2),)))),
    ]
    for group in same:
        for op in group:
            assert op == group[0] and hash(op) == hash(group[0])
            assert repr(op) == repr(group[0])
            assert [type(v) for v in attributes(op).values()] == [type(v) for v in attributes(group[0]).values()]
    assert math.copysign(1, LayerNorm(1, -0.0).epsilon) == 1
    assert (
        type(Softmax(True).axis) is int and type(Attention(1).scale) is float and type(Reduce("add", (0,), 1).keepdims) is bool
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Softmax(1.0), "softmax: axis is 1.0, not a whole number"),
        (lambda: Softmax("1"), "softmax: axis is '1', not a whole number"),
        (lambda: Softmax(None), "softmax: axis is None, not a whole number"),
        (lambda: Softmax(1, 2), "softmax: log is 2, not true or false"),
        (lambda: Softmax(1, "yes"), "softmax: log is 'yes', not a whole number|true or false"),
        (lambda: LayerNorm(1, math.nan), "layer_norm: epsilon is nan, not a number"),
        (lambda: LayerNorm(1, "1"), "layer_norm: epsilon is '1', not a number"),
        (lambda: LayerNorm(1, 10**400), "layer_norm: epsilon is 1000.*…, not a number"),
        (lambda: Reshape(5), "reshape: shape is 5, not a list"),
        (lambda: Reshape("12"), "reshape: shape is '12', not a list"),
        (lambda: Reshape((1.5,)), r"reshape: shape is \(1.5,\), not a whole number"),
        (lambda: Reshape({2, 3}), r"reshape: shape is \{2, 3\}, not a list"),
        (lambda: Convert("s8"), "convert: dtype is 's8', not a DType"),
        (lambda: Convert(S8, None), "convert: overflow is None, not one of wrap, saturate, ieee"),
        (lambda: Quantize(S8, 4), "quantize: block is 4, not a list or none"),
        (lambda: Reduce(["add"], (0,)), r"reduce: fn is \['add'\], not one of add"),
        (lambda: Const(3), "const: data is 3, not a Literal"),
        (lambda: Param(0, F32), "param: type is f32, not a TensorType"),
        (lambda: Attention(1.0, operands=x), r"attention: operands is <Input.*, not a list"),
        (lambda: Attention(1.0, scores=(x,)), r"attention: scores is .*, not a Node or none"),
    ],
)
def test_attributes_of_another_type_are_refused(make, message):
    with pytest.raises(TypeMismatchError, match=message):
        make()


def test_a_type_has_one_spelling():
    assert TensorType(F32, [2, np.int64(3)]) == TensorType(F32, (2, 3)) and str(TensorType(F32, [True])) == "f32[1]"
    assert TensorType(OPAQUE, (2, 3)) == TensorType(OPAQUE, ()) and str(TensorType(OPAQUE, ())) == "opaque"
    with pytest.raises(TypeError):
        TensorType(F32, (1.5,))
    t = TensorType(S4, (3, 5))
    assert (str(t), t.rank, t.elements, t.size_bytes) == ("s4[3,5]", 2, 15, 8)
    assert str(TupleType((t, t.with_dtype(F32).with_shape([])))) == "(s4[3,5], f32[])"
    assert TensorType(F32, (0, 5)).elements == 0 and TensorType(F32, ()).elements == 1


def test_nodes_are_frozen():
    for name, value in (("op", None), ("src", ()), ("type", None), ("other", 1)):
        with pytest.raises(AttributeError, match=f"a Node is frozen; build another instead of setting {name}"):
            setattr(x, name, value)
    with pytest.raises(AttributeError):
        x.op.label = "y"
    with pytest.raises(AttributeError):
        x.tensor.shape = ()


def test_copies_and_pickles_are_the_same_node():
    w = const(np.arange(6).reshape(3, 2).tolist(), F32)
    node = convert(gemm(map_("tanh", x), w), S8)
    assert pickle.loads(pickle.dumps(node)) is node
    assert copy.deepcopy(node) is node and copy.copy(node) is node
    large = const(torch.zeros(1000))
    assert copy.deepcopy(map_("tanh", large)) is map_("tanh", large)


def test_what_nobody_holds_is_released():
    node = map_("tanh", map_("negate", input_("released", F32, (7,))))
    product = gemm(reshape(node, (1, 7)), const(torch.zeros(7, 3000)))
    seen = [weakref.ref(n) for n in toposort([product])]
    memory = weakref.ref(product.src[1].op.data)
    del node, product
    gc.collect()
    assert all(r() is None for r in seen) and memory() is None
    assert map_("tanh", input_("released", F32, (7,))).shape == (7,)


def test_a_chain_of_50_000_nodes_is_built_ordered_and_dropped_without_recursion():
    node = input_("chain", F32, ())
    for _ in range(50_000):
        node = map_("negate", node)
    order = toposort([node])
    assert len(order) == 50_001 and order[-1] is node and order[0].op.label == "chain"
    end = weakref.ref(node)
    del node, order
    gc.collect()
    assert end() is None


def test_eight_threads_building_the_same_graph_get_the_same_nodes():
    built: list[Node] = []
    barrier = threading.Barrier(8)

    def build(_):
        barrier.wait()
        for _ in range(5):
            node = input_("shared", F32, (4, 4))
            for i in range(150):
                node = map_("add", map_("tanh", node), const(float(i % 7), F32))
            built.append(node)

    in_threads(8, build)
    assert len(built) == 40 and len(set(built)) == 1


def test_threads_that_build_and_drop_never_see_a_dead_node():
    def churn(_):
        for i in range(300):
            node = reshape(map_("sine", input_("churn", F32, (7, i % 5))), (i % 5, 7))
            assert node.src[0].src[0].op.label == "churn" and node.shape == (i % 5, 7)

    in_threads(8, churn)


def test_small_literals_are_equal_by_type_and_bits():
    assert const(1.5, F32) is const(torch.tensor(1.5)) is const(1.5, F32)
    assert const(0.0, F32) is not const(-0.0, F32)
    assert const(1.0, F32) is not const(1.0, F64) and const(1, S32) is not const(1, S64)
    assert const([1, 2], S8) is not const([[1, 2]], S8) and const([1, 0], S8) is not const([1, 0], U8)
    quiet, other = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
    assert const(quiet) is const(quiet.clone()) and const(quiet) is not const(other)
    assert const([], F32) is const(torch.zeros(0))
    assert Literal(TensorType(F32, ()), torch.tensor(2.0), "a") == Literal(TensorType(F32, ()), torch.tensor(2.0), "b")


def test_a_number_repeated_is_equal_to_itself_written_out():
    repeated = torch.tensor(2.5).expand(1)
    assert repeated.stride() == (0,) and literal(repeated) == literal(torch.tensor([2.5]))
    assert literal(torch.zeros(1, 0).expand(3, 0)) == literal(torch.zeros(3, 0))


def test_large_literals_are_equal_to_themselves_alone_and_never_read():
    reads: list[int] = []

    def load():
        reads.append(1)
        return torch.arange(100.0)

    lazy = Literal(TensorType(F32, (100,)), load)
    node = Node(Const(lazy))
    assert node is Node(Const(lazy)) and not reads
    assert node is not Node(Const(Literal(TensorType(F32, (100,)), torch.arange(100.0))))
    assert lazy.tensor() is lazy.tensor() and reads == [1]
    weight = torch.arange(100.0)
    assert const(weight).op.data.tensor().data_ptr() == weight.data_ptr()
    assert Literal(TensorType(F32, (64,)), torch.zeros(64)) == Literal(TensorType(F32, (64,)), torch.zeros(64))
    assert Literal(TensorType(F32, (65,)), torch.zeros(65)) != Literal(TensorType(F32, (65,)), torch.zeros(65))
    assert Literal(TensorType(F32, (1,)), torch.zeros(1)) != 0.0


def test_a_small_literal_does_not_follow_its_owner_who_writes_to_the_memory():
    bias = torch.zeros(4)
    node = const(bias)
    bias += 1
    assert evaluate_nodes([node], {})[0].tolist() == [0, 0, 0, 0]
    assert const(torch.zeros(4)) is node


@pytest.mark.parametrize("d", ALL, ids=str)
def test_literals_from_numbers(d):
    assert const(1, d).op.data.scalar() == 1
    for number in (d.min, d.max):
        assert const(number, d).op.data.scalar() == number
    assert const([[1, 0], [0, 1]], d).shape == (2, 2)
    if d.is_integer:
        for wrong in (int(d.max) + 1, int(d.min) - 1, 0.5, math.inf, math.nan):
            with pytest.raises(TypeMismatchError, match=rf".* is no {d}"):
                const(wrong, d)


def test_literals_without_a_type():
    assert [const(v).dtype for v in (1, 1.0, True, [1, 2], [1, 2.5], [True], [])] == [S64, F32, PRED, S64, F32, PRED, F32]
    for wrong in ([[1], [1, 2]], "1", [None], 2**70, {}):
        with pytest.raises(TypeMismatchError, match=r"no constant can be made of this|is no s64"):
            const(wrong)
    with pytest.raises(TypeMismatchError, match="no constant can be made of this int: int too large"):
        const(10**400, F32)
    with pytest.raises(TypeMismatchError, match="a constant cannot be opaque"):
        const(1, OPAQUE)
    assert const([1, 2]).op.data.scalar() is None


def test_a_literal_of_another_shape_or_storage_is_refused():
    message = r"a constant declared f32\[2\] holds torch.float64\[2\] \(w\)"
    with pytest.raises(TypeMismatchError, match=message):
        Literal(TensorType(F32, (2,)), torch.zeros(2, dtype=torch.float64), "w")
    late = Literal(TensorType(F32, (100,)), lambda: torch.zeros(99))
    with pytest.raises(TypeMismatchError, match=r"a constant declared f32\[100\] holds torch.float32\[99\] \(constant\)"):
        late.tensor()
    for d, byte in ((S4, -9), (U4, 16)):
        with pytest.raises(TypeMismatchError, match="holds bytes that are no 4-bit codes"):
            literal(torch.tensor([byte], dtype=d.to_torch()), d)


def test_constant_nodes_are_known():
    assert const(1.0).constant and Node(Iota(S32, (3,), 0)).constant
    assert map_("add", const(1.0), const(2.0)).constant and not map_("add", x, const(np.ones((2, 3)).tolist())).constant
    assert not x.constant and not Node(Param(0, x.tensor)).constant


def random_dag(draw, count=12):
    nodes = [input_(f"i{i}", F32, ()) for i in range(2)]
    for _ in range(draw(st.integers(0, count))):
        a, b = draw(st.sampled_from(nodes)), draw(st.sampled_from(nodes))
        nodes.append(draw(st.sampled_from([map_("negate", a), map_("subtract", a, b)])))
    return nodes


@given(st.data())
def test_toposort_gives_each_node_once_after_its_sources(data):
    nodes = random_dag(data.draw)
    roots = data.draw(st.lists(st.sampled_from(nodes), max_size=4))
    order = toposort(roots)
    assert len(order) == len(set(order))
    place = {n: i for i, n in enumerate(order)}
    assert all(place[s] < place[n] for n in order for s in n.src)
    reached, todo = set(), list(roots)
    while todo:
        n = todo.pop()
        reached.add(n)
        todo.extend(n.src)
    assert reached == set(order)


@given(st.data())
def test_users_count_slots_and_outputs(data):
    nodes = random_dag(data.draw)
    roots = data.draw(st.lists(st.sampled_from(nodes), max_size=4))
    users = Users(roots)
    alive = set(toposort(roots))
    for n in nodes:
        reads = [(r, s) for r in alive for s in r.src if s is n]
        assert users.count(n) == len(reads) + roots.count(n)
        assert set(users[n]) == {r for r, _ in reads} | ({None} if n in roots else set())
        assert users.only(n) == (users.count(n) == 1) and (n in users) == (n in alive)


def interpret(node, values, memo):
    """A tiny evaluator of the random graphs, over exact rationals modulo a prime."""
    if node not in memo:
        args = [interpret(s, values, memo) for s in node.src]
        memo[node] = values[node] if node in values else (-args[0] if len(args) == 1 else args[0] - 2 * args[1]) % 1009
    return memo[node]


@given(st.data())
def test_substitute_replaces_every_occurrence_and_does_not_search_what_it_puts(data):
    nodes = random_dag(data.draw)
    root, old, new = (data.draw(st.sampled_from(nodes)) for _ in range(3))
    (after,) = substitute([root], {old: new})
    leaves = {n: 17 + i for i, n in enumerate(nodes[:2])}
    wanted = interpret(root, leaves | {old: interpret(new, leaves, {})}, {})
    assert interpret(after, leaves, {}) == wanted
    assert substitute([root], {})[0] is root


@given(st.data())
def test_graph_replace_follows_chains_of_keys(data):
    """Keys in replaced values are replaced too, when no value depends on its own key."""
    nodes = random_dag(data.draw)
    place = {n: i for i, n in enumerate(toposort(nodes))}
    replacement = {}
    for key in data.draw(st.lists(st.sampled_from(nodes), max_size=4, unique=True)):
        value = data.draw(st.sampled_from(nodes))
        if place[value] < place[key]:
            replacement[key] = value
    root = data.draw(st.sampled_from(nodes))
    g = Graph("g", tuple(nodes[:2]), (root,), ("y",), {root: "named"})
    after = g.replace(replacement)
    leaves = {n: 17 + i for i, n in enumerate(nodes[:2])}

    def mean(node):
        node = replacement.get(node, node) if node not in leaves or node in replacement else node
        while node in replacement:
            node = replacement[node]
        if node in leaves:
            return leaves[node]
        args = [mean(s) for s in node.src]
        return (-args[0] if len(args) == 1 else args[0] - 2 * args[1]) % 1009

    assert interpret(after.outputs[0], leaves, {}) == mean(root)
    assert after.origin(after.outputs[0]) == "named"


def test_graph_replace_of_a_deep_chain():
    node = input_("deep", F32, ())
    start = node
    for _ in range(20_000):
        node = map_("negate", node)
    other = input_("other", F32, ())
    after = Graph("g", (start, other), (node,), ("y",)).replace({start: other})
    assert len(after.nodes()) == 20_001 and after.nodes()[0] is other


def test_graphs_compare_by_what_they_compute():
    y = map_("tanh", x)
    g = Graph("g", (x,), (y,), ("y",), {y: "a"}, ("note",))
    assert g == Graph("g", (x,), (y,), ("y",)) and hash(g) == hash(Graph("g", (x,), (y,), ("y",)))
    assert g.origin(y) == "a" and g.origin(x) == "input"
    assert g.with_outputs([map_("negate", o) for o in g.outputs]).outputs == (map_("negate", y),)
    assert g.users()[x] == (y,)


def test_a_wrong_number_of_sources_is_refused_before_anything_else():
    for op, src, message in (
        (Softmax(0), (), "softmax takes 1 operand, not 0"),
        (Convert(S8), (x, x), "convert takes 1 operand, not 2"),
        (Const(literal(1)), (x,), "const takes 0 operands, not 1"),
        (Param(0, x.tensor), (x,), "param takes 0 operands, not 1"),
        (Slice((0, 0), (1, 1), (1, 1)), (), "slice takes 1 operand, not 0"),
    ):
        with pytest.raises(TypeMismatchError, match=message):
            Node(op, *src)


@pytest.mark.parametrize("d", [S4, U64, F8E4M3FN, PRED], ids=str)
def test_random_data_of_a_type_has_it(d):
    value = random_value(TensorType(d, (3, 5)), 0)
    assert value.dtype == d.to_torch() and tuple(value.shape) == (3, 5)
