"""Cutting a graph into steps."""

import pytest
import torch
from hypothesis import given, settings
from random_graphs import CONSTANTS, INPUTS, ONE, SHAPE, TWO, graphs, joined, quantised, split_by_sign
from rotated import turned
from rule_checks import graph_of

from tilewright.dtype import BF16, F32, S8, S32, S64
from tilewright.ir.build import const, convert, input_, items, map_, reduce_, reshape, slice_, transpose
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import (
    Call,
    Concat,
    Const,
    Dequantize,
    Gather,
    Input,
    Item,
    LayerNorm,
    Pad,
    Quantize,
    Softmax,
    Write,
    gemm,
)
from tilewright.ir.types import TensorType
from tilewright.ir.verify import verify
from tilewright.runtime.partition import ALONE, MOST_ALIKE, MOST_NUMBERS, decided, partition

X, Y, _ = INPUTS


def parts_of(*outputs, inputs=(X, Y)):
    return partition(verify(Graph("g", tuple(inputs), tuple(outputs), tuple(f"r{i}" for i in range(len(outputs))))))


@settings(max_examples=300, deadline=None)
@given(graphs())
def test_steps_in_order_only_read_what_is_there(graph):
    verify(graph)
    nodes = graph.nodes()
    parts = partition(graph)
    inside = [n for p in parts for n in p.nodes]
    leaves = [n for n in nodes if isinstance(n.op, (Input, Const))]
    assert len(inside) == len(set(inside)) and set(inside) | set(leaves) == set(nodes) and not set(inside) & set(leaves)
    there = {*graph.inputs, *leaves}
    for part in parts:
        assert part.outputs and set(part.inputs) <= there
        assert set(part.outputs) <= set(part.nodes) and not set(part.inputs) & set(part.nodes)
        there |= set(part.outputs)
        position = {n: i for i, n in enumerate(part.nodes)}
        assert all(position[s] < position[n] for n in part.nodes for s in n.src if s in position)
    assert set(graph.outputs) <= there


@settings(max_examples=200, deadline=None)
@given(graphs())
def test_what_stands_alone_stands_alone_and_constants_come_first(graph):
    parts = partition(graph)
    once = [p.once for p in parts]
    assert once == sorted(once, reverse=True)
    for part in parts:
        assert all(n.constant == part.once for n in part.nodes)
        alone = [n for n in part.nodes if isinstance(n.op, ALONE)]
        if alone and not part.once:
            assert part.nodes[0] is alone[0] and all(isinstance(n.op, Item) and n.src[0] is alone[0] for n in part.nodes[1:])
        readers = {s for p in parts if p is not part for n in p.nodes for s in n.src} | set(graph.outputs)
        assert set(part.outputs) == {n for n in part.nodes if n in readers}


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_parts_run_one_by_one_give_what_the_graph_gives(graph):
    generator = torch.Generator().manual_seed(1)
    values = {n: torch.randn(n.shape, generator=generator) for n in graph.inputs}
    wanted = evaluate_nodes(graph.outputs, values)
    for node in graph.nodes():
        if isinstance(node.op, Const):
            values[node] = node.op.data.tensor()
    for part in partition(graph):
        found = evaluate_nodes(part.outputs, {n: values[n] for n in part.inputs})
        values.update(zip(part.outputs, found, strict=True))
    for got, node in zip(wanted, graph.outputs, strict=True):
        assert torch.equal(got, values[node])


def table(*outputs, inputs=(X, Y)):
    return [(p.kind, p.once, p.unfused) for p in parts_of(*outputs, inputs=inputs)]


def test_a_chain_of_products_and_what_lies_between():
    out = gemm(map_("tanh", gemm(map_("relu", X), Y)), Y)
    assert table(map_("add", out, Y)) == [
        ("elementwise", False, False),
        ("gemm", False, False),
        ("elementwise", False, False),
        ("gemm", False, False),
        ("elementwise", False, False),
    ]


def test_what_touches_is_one_fusion_and_what_does_not_is_two():
    a = map_("tanh", map_("relu", X))
    assert len(parts_of(a, map_("negate", a))) == 1
    assert len(parts_of(map_("tanh", X), map_("relu", Y))) == 2
    # Joined by a later reader on the same level.
    assert len(parts_of(map_("add", map_("tanh", X), map_("relu", Y)))) == 1


def test_fusions_that_do_the_same_to_results_of_one_product_are_one_step():
    a, b = joined(X, Y)
    cos, sin = const(torch.randn(1, 2)), const(torch.randn(1, 2))
    queries, keys = (turned(slice_(y, 0, 0, count), cos, sin) for y, count in ((a, 3), (b, 2)))
    fusions = [p for p in parts_of(queries, keys) if not p.once and p.kind == "elementwise"]
    assert [p.outputs for p in fusions] == [(queries, keys)], "the extents differ"
    assert len(parts_of(map_("tanh", a), map_("relu", b))) == 3, "they do not do the same"
    grown = Node(Concat(0), slice_(X, 1, 0, 2), b)
    assert len(parts_of(queries, grown)) == 2, "nothing but moves and plain arithmetic"
    assert len(parts_of(queries, transpose(b, (1, 0)))) == 3, "a view copies nothing, and is to stay one"
    other = gemm(X, Y)
    assert len(parts_of(map_("relu", a), map_("relu", other))) == 4, "of two products"
    ranges = [(i, j) for j in range(1, 4) for i in range(j)][: MOST_ALIKE + 1]
    many = [turned(slice_(a, 0, i, j), cos, sin) for i, j in ranges]
    assert [len(p.outputs) for p in parts_of(*many) if p.kind == "elementwise" and not p.once] == [MOST_ALIKE, 1]


def test_a_product_between_two_halves_of_an_expression_separates_them():
    """x feeds both a product and, beside it, what the product is added to: one fusion on either side, no cycle."""
    h = map_("tanh", X)
    parts = parts_of(map_("add", gemm(h, Y), map_("relu", h)))
    assert [p.kind for p in parts] == ["elementwise", "gemm", "elementwise"]
    assert len(parts[0].nodes) == 2 and len(parts[0].outputs) == 2


SCALE = const(0.1, F32)
Q = input_("q", S8, SHAPE)


def by_its_peak(data, of=X):
    """A quantisation whose scale is found as the program runs."""
    peak = reduce_("maximum", map_("abs", of), [-1], keepdims=True)
    return Node(Quantize(S8), data, map_("multiply", peak, const(1 / 127, F32)))


@pytest.mark.parametrize(
    ("build", "kind", "unfused"),
    [
        (lambda: Node(Quantize(S8), X, SCALE), "quantize", True),
        (lambda: Node(Dequantize(F32), Q, SCALE), "quantize", True),
        (lambda: convert(X, BF16), "quantize", True),
        (lambda: quantised(transpose(X, (1, 0))), "quantize", True),
        (lambda: Node(Concat(0), X, Y), "move", True),
        (lambda: Node(Pad((1, 0), (0, 0), (0, 0)), X, const(0.0, F32)), "move", True),
        (lambda: Node(Quantize(S8), Node(Concat(0), X, Y), SCALE), "quantize", True),
        (lambda: by_its_peak(X), "quantize", True),
        (lambda: reshape(by_its_peak(X), (16,)), "quantize", True),
        (lambda: by_its_peak(map_("tanh", X)), "reduce", False),
        (lambda: map_("negate", by_its_peak(X)), "reduce", False),
        (lambda: by_its_peak(Node(LayerNorm(1, 1e-5), X), Node(LayerNorm(1, 1e-5), X)), "norm", False),
        (lambda: transpose(reshape(X, (2, 8)), (1, 0)), "view", False),
        (lambda: slice_(X, 0, 1, 3), "view", False),
        (lambda: quantised(map_("tanh", X)), "elementwise", False),
        (lambda: Node(Quantize(S8), Node(LayerNorm(1, 1e-5), X), SCALE), "norm", False),
        (lambda: ONE["softmax"](quantised(X)), "softmax", False),
        (lambda: ONE["row sums"](X), "reduce", False),
        (lambda: Node(Gather(0), X, const(torch.tensor([0, 2]))), "gather", False),
        (lambda: split_by_sign(X)[0], "call", False),
        (lambda: gemm(X, Y), "gemm", False),
    ],
)
def test_kinds_and_what_is_unfused(build, kind, unfused):
    (part,) = parts_of(build(), inputs=(X, Y, Q))
    assert (part.kind, part.unfused, part.once) == (kind, unfused, False)


def test_what_depends_on_constants_alone_runs_once_and_is_not_unfused():
    weight = quantised(CONSTANTS[0])
    folded = gemm(weight, CONSTANTS[1])
    parts = parts_of(gemm(X, folded))
    assert [(p.once, p.unfused) for p in parts] == [(True, False), (False, False)]
    assert parts[1].inputs == (X, folded)


def test_results_of_several_stores_and_of_calls_go_with_what_makes_them():
    first, second = joined(X, Y)
    (only,) = parts_of(second, first)
    assert only.kind == "gemm" and only.outputs == (first, second)
    (half,) = parts_of(second)
    assert half.outputs == (second,)
    above, below = split_by_sign(X)
    parts = parts_of(map_("add", above, below))
    assert [p.kind for p in parts] == ["call", "elementwise"] and parts[0].outputs == (above, below)


def test_a_call_without_sources_is_no_constant():
    """It may be a random number."""
    node = Node(Call("splitter", "Random", "", (X.tensor,)))
    parts = parts_of(map_("add", X, node))
    assert [(p.kind, p.once) for p in parts] == [("call", False), ("elementwise", False)]


def test_leaves_alone_make_no_steps():
    assert parts_of(X, CONSTANTS[1], X) == []
    assert [p.kind for p in parts_of(TWO["add"](X, CONSTANTS[1]))] == ["elementwise"]
    assert items(X) == [X]


def test_deep_and_wide_graphs_are_cut_in_linear_time():
    x = X
    for _ in range(3000):
        x = map_("tanh", x)
    wide = x
    for i in range(1000):
        wide = map_("add", wide, map_("multiply", x, const(float(i), F32)))
    assert [p.kind for p in parts_of(wide)] == ["elementwise"]


def parts(*outputs: Node):
    return [p for p in partition(graph_of(*outputs)) if p.kind != "view"]


def test_a_cast_of_what_is_there_anyway_waits_for_the_fusion_that_reads_it():
    """A norm whose scale is an input of a narrower type: the cast is no step of its own before the product in between."""
    scale = input_("scale", BF16, SHAPE[-1:])
    deep = gemm(X, CONSTANTS[1])
    wide = convert(scale, F32)
    first, second = parts(Node(LayerNorm(1, 1e-5), deep, wide))
    assert (first.kind, second.kind) == ("gemm", "norm") and second.nodes[0] is wide
    viewed = transpose(convert(reshape(scale, (1, *SHAPE[-1:])), F32), (1, 0))
    assert [p.kind for p in parts(map_("tanh", map_("add", deep, viewed)))] == ["gemm", "elementwise"]


def test_a_cast_that_others_read_or_that_narrows_what_a_fusion_makes_does_not_wait():
    deep = gemm(X, CONSTANTS[1])
    other = input_("other", BF16, SHAPE)
    wide = convert(other, F32)
    assert [p.kind for p in parts(map_("add", deep, wide), wide)] == ["quantize", "gemm", "elementwise"]
    assert [p.kind for p in parts(map_("tanh", map_("add", deep, wide)), gemm(wide, CONSTANTS[1]))].count("quantize") == 1
    narrow = convert(map_("tanh", X), BF16)
    first, *_ = parts(map_("add", convert(deep, BF16), narrow))
    assert first.kind == "elementwise" and first.outputs == (narrow,)


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_kernels_compete_for_what_runs_at_every_call_but_for_opaque_calls(graph):
    for part in partition(graph):
        called = any(isinstance(n.op, Call) for n in part.nodes)
        assert decided(part) == (not part.once and not called)
        if decided(part):
            problem, sources = part.posed
            assert (problem.kind == "fusion") == (part.kind not in ("gemm", "attention"))
            assert set(sources) == set(part.inputs) and problem.types == tuple(s.tensor for s in sources)
            if problem.kind == "fusion":
                assert problem.outputs == tuple(n.tensor for n in part.outputs)


def test_other_reductions_of_what_was_reduced_are_fusions_of_their_own():
    """A norm's rows, then the range of all of it and what that quantises, then the rows of the codes: three kernels, none of
    which reduces along different axes."""
    x = input_("x", F32, (4, 8))
    normed = Node(LayerNorm(-1, 1e-5), x)
    span = reduce_("maximum", map_("abs", normed), [0, 1])
    codes = Node(Quantize(S8), normed, map_("divide", span, const(127.0, F32)))
    sums = reduce_("add", convert(codes, S32), [1], keepdims=True)
    graph = Graph("g", (x,), (normed, codes, sums), ("n", "c", "s"))
    parts = [p for p in partition(graph) if not p.once]
    assert [p.kind for p in parts] == ["norm", "quantize", "reduce"]
    assert [p.outputs for p in parts] == [(normed,), (codes,), (sums,)]


def test_one_kind_of_reduction_is_one_fusion():
    x = input_("x", F32, (4, 8))
    mean = reduce_("mean", x, [1], keepdims=True)
    apart = map_("subtract", x, mean)
    y = map_("divide", apart, reduce_("maximum", map_("abs", apart), [1], keepdims=True))
    assert len(partition(Graph("g", (x,), (Node(Softmax(-1), y),), ("y",)))) == 1


def test_writes_at_the_same_positions_are_one_step():
    caches = [Node(Input(name, TensorType(F32, (2, 9, 4)), mutable=True)) for name in ("k", "v", "w", "other")]
    new = [input_(f"new_{n.op.label}", F32, (2, 1, 4)) for n in caches]
    at, elsewhere = input_("at", S64, (1,)), input_("elsewhere", S64, (1,))
    where = [at, at, at, elsewhere]
    writes = tuple(Node(Write(1), c, p, n) for c, p, n in zip(caches, where, new, strict=True))
    graph = Graph("g", (*new, at, elsewhere, *caches), writes, ("k", "v", "w", "other"), state=dict.fromkeys("kvwo", None))
    parts = [p for p in partition(graph) if any(isinstance(n.op, Write) for n in p.nodes)]
    assert [(p.kind, p.outputs) for p in parts] == [("write", writes[:3]), ("write", writes[3:])]
    assert not any(map(decided, parts))


def test_single_numbers_are_one_step_up_to_a_limit():
    counters = [input_(f"at{i}", S64, (1,) if i % 2 else ()) for i in range(MOST_NUMBERS + 3)]
    parts = parts_of(*(map_("add", c, const(1, S64)) for c in counters), inputs=counters)
    assert sorted(len(p.outputs) for p in parts if not p.once) == [3, MOST_NUMBERS]
    longer = [input_(f"long{i}", S64, (2,)) for i in range(3)]
    parts = parts_of(*(map_("add", c, const(1, S64)) for c in longer), inputs=longer)
    assert [len(p.outputs) for p in parts if not p.once] == [1, 1, 1]
