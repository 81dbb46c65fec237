"""The algebra of expressions inside a gemm: each rearrangement means what it rearranged, bit for bit."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from values import assert_same, constant, from_numpy, random_array, to_numpy, value_of

from tilewright.dtype import BF16, F16, F32, S8
from tilewright.ir.anchor import acc_of, operands_of, rebuilt, stores_of
from tilewright.ir.build import const, convert, input_, map_, reshape, slice_, transpose
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.expression import (
    REARRANGE,
    Rearrangement,
    Sources,
    depends_on_acc,
    make_gemm,
    outside,
    slice_columns,
    unview,
    views_outward,
)
from tilewright.ir.graph import Node, toposort
from tilewright.ir.join import join
from tilewright.ir.ops import Acc, Attention, Concat, Dequantize, Gemm, Param, Quantize, Reshape, Slice, Transpose, gemm
from tilewright.ir.types import TensorType, reshape_groups

extents = st.sampled_from([1, 1, 2, 3, 4, 5, 6])


def factored(draw, shape):
    """Another shape of as many elements, by splitting and merging neighbours and strewing ones."""
    out = []
    for d in shape:
        p = draw(st.sampled_from([p for p in (1, 2, 3, 5) if d % p == 0])) if d else 1
        out += [p, d // p] if draw(st.booleans()) else [d]
    while len(out) > 1 and draw(st.booleans()):
        at = draw(st.integers(0, len(out) - 2))
        out[at : at + 2] = [out[at] * out[at + 1]]
    if draw(st.booleans()):
        out.insert(draw(st.integers(0, len(out))), 1)
    return tuple(out)


def viewed(draw, node, steps):
    for _ in range(steps):
        if draw(st.booleans()):
            node = Node(Transpose(tuple(draw(st.permutations(range(len(node.shape)))))), node)
        else:
            node = Node(Reshape(factored(draw, node.shape)), node)
    return node


def side_of(draw, shape, d):
    own = [draw(st.sampled_from([e, 1])) for e in shape][draw(st.integers(0, len(shape))) :]
    return constant(random_array(d, tuple(own), np.random.default_rng(draw(st.integers(0, 9))), 0), d)


def tail(draw, node, steps, views):
    """Elementwise steps, between them views."""
    for _ in range(draw(st.integers(0, steps))):
        way = draw(st.sampled_from(["map", "side", "self", "convert", "scaled", *(["view"] * 3 if views else [])]))
        if way == "view":
            node = viewed(draw, node, 1)
        elif way == "map":
            node = map_("negate", node)
        elif way == "side":
            args = [node, side_of(draw, node.shape, node.dtype)]
            node = map_(draw(st.sampled_from(["add", "subtract", "maximum"])), *(args if draw(st.booleans()) else args[::-1]))
        elif way == "self":
            node = map_("multiply", node, map_("tanh", node))
        elif way == "convert":
            node = convert(convert(node, BF16), F32)
        else:
            scale = map_("abs", side_of(draw, node.shape, F32))
            node = Node(Dequantize(F32), Node(Quantize(S8), node, scale), scale)
    return node


def with_acc(root, acc, value):
    (result,) = evaluate_nodes([root], {acc: from_numpy(value, acc.dtype)})
    return to_numpy(result, root.dtype)


@settings(max_examples=200)
@given(st.lists(extents, min_size=1, max_size=3), st.data())
def test_views_move_outward(shape, data):
    acc = Node(Acc(TensorType(F32, tuple(shape))))
    root = tail(data.draw, acc, 8, views=True)
    assume(root.tensor.elements <= 4096)
    moved = views_outward(root)
    value = random_array(F32, acc.shape, np.random.default_rng(0), 0)
    assert moved.type == root.type
    assert_same(with_acc(moved, acc, value), with_acc(root, acc, value))
    assert views_outward(moved) is moved
    assert depends_on_acc((moved,)) >= {acc} or root is not acc


def test_a_view_between_elementwise_steps_ends_at_the_root():
    acc = Node(Acc(TensorType(F32, (6, 4))))
    heads = transpose(reshape(map_("tanh", acc), (2, 3, 4)), (0, 2, 1))
    bias = constant(np.arange(4, dtype=np.float32).reshape(4, 1), F32)
    moved = views_outward(map_("add", heads, bias))
    assert isinstance(moved.op, Transpose) and isinstance(moved.src[0].op, Reshape)
    assert not any(isinstance(n.op, REARRANGE) for n in toposort([moved.src[0].src[0]]) if n in depends_on_acc((moved,)))


@given(st.lists(extents, min_size=1, max_size=3), st.data())
def test_a_side_input_unviewed_broadcasts_as_it_did(shape, data):
    acc = Node(Acc(TensorType(F32, tuple(shape))))
    root = viewed(data.draw, acc, data.draw(st.integers(0, 3)))
    views = [Rearrangement(n.op, n.src[0].shape, n.shape) for n in toposort([root]) if n is not acc]
    side = side_of(data.draw, root.shape, F32)
    moved = unview(side, views)
    if moved is None:
        return
    value = random_array(F32, acc.shape, np.random.default_rng(0), 0)
    before = with_acc(map_("add", root, side), acc, value)
    after = map_("add", acc, moved)
    assert after.shape == acc.shape
    for v in views:
        after = Node(v.op, after)
    assert_same(with_acc(after, acc, value), before)


@given(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6]), max_size=4), st.data())
def test_groups_of_a_reshape_are_the_smallest_with_equal_products(shape, data):
    after = factored(data.draw, shape)
    groups = reshape_groups(tuple(shape), after)
    if 0 in shape:
        assert groups is None
        return
    assert [a for old, _ in groups for a in old] == list(range(len(shape)))
    assert [a for _, new in groups for a in new] == list(range(len(after)))
    for old, new in groups:
        assert math.prod(shape[a] for a in old) == math.prod(after[a] for a in new)
        for i in range(1, len(old)):
            for j in range(1, len(new)):
                assert math.prod(shape[a] for a in old[:i]) != math.prod(after[a] for a in new[:j])


@settings(max_examples=150)
@given(st.integers(1, 4), st.sampled_from([1, 2, 3, 5, 6]), st.data())
def test_a_range_of_columns_is_a_slice_of_the_whole(rows, columns, data):
    acc = Node(Acc(TensorType(F32, (rows, columns))))
    root = tail(data.draw, acc, 5, views=False)
    start = data.draw(st.integers(0, columns))
    stop = data.draw(st.integers(start, columns))
    part = slice_columns(root, start, stop, columns, acc)
    if part is None:
        assert root.shape[-1] != columns or any(isinstance(n.op, REARRANGE) for n in toposort([root]))
        return
    value = random_array(F32, acc.shape, np.random.default_rng(0), 0)
    assert_same(with_acc(part, acc, value), with_acc(root, acc, value)[..., start:stop])


def test_columns_of_what_rearranges_or_scales_by_blocks_are_refused():
    acc = Node(Acc(TensorType(F32, (4, 6))))
    blocked = Node(Quantize(S8, (1, 2)), acc, constant(np.ones((4, 3), np.float32), F32))
    for root in (transpose(acc, (1, 0)), reshape(acc, (6, 4)), blocked):
        assert slice_columns(root, 0, 2, 6, acc) is None


def build_part(way, width, axis, seed):
    rng = np.random.default_rng(seed)
    shape = (4, width) if axis == 1 else (width, 4)
    if way == "plain":
        return constant(random_array(F32, shape, rng, 0), F32)
    if way == "transpose":
        return transpose(constant(random_array(F32, shape[::-1], rng, 0), F32), (1, 0))
    if way == "convert":
        return convert(constant(random_array(S8, shape, rng), S8), F32)
    if way == "reshape":
        split = (4, width, 1) if axis == 1 else (width, 2, 2)
        return reshape(constant(random_array(F32, split, rng, 0), F32), shape)
    codes = constant(random_array(S8, shape, rng), S8)
    if way == "scaled":
        return Node(Dequantize(F32), codes, const(0.5, F32))
    if way == "row":
        scale = constant(rng.uniform(1, 2, (width, 1) if axis == 0 else (width,)).astype(np.float32), F32)
        return Node(Dequantize(F32), codes, scale)
    block = (2, 2)
    grid = tuple(-(-d // 2) for d in shape)
    return Node(Dequantize(F32, block), codes, constant(rng.uniform(1, 2, grid).astype(np.float32), F32))


WAYS = ("plain", "transpose", "convert", "reshape", "scaled", "row", "block")
several_parts = st.lists(st.tuples(st.sampled_from(WAYS), st.integers(1, 4)), min_size=1, max_size=4)


@settings(max_examples=150)
@given(st.sampled_from([0, 1]), several_parts, st.booleans(), st.data())
def test_joined_parts_are_the_parts_side_by_side(axis, parts, alike, data):
    if alike:
        parts = [(parts[0][0], width) for _, width in parts]
    nodes = [build_part(way, width, axis, seed) for seed, (way, width) in enumerate(parts)]
    one = join(nodes, axis - data.draw(st.sampled_from([0, 2])))
    assert_same(value_of(one), np.concatenate([value_of(n) for n in nodes], axis))
    if alike and len(nodes) > 1 and parts[0][0] in ("transpose", "convert", "scaled"):
        assert one.op == nodes[0].op


@given(st.data())
def test_adjacent_slices_join_to_the_slice_or_the_value(data):
    base = constant(random_array(F32, (3, 8), np.random.default_rng(0), 0), F32)
    cuts = sorted(data.draw(st.sets(st.integers(0, 8), min_size=2, max_size=5)))
    parts = [slice_(base, 1, a, b) for a, b in pairwise(cuts)]
    assert join(parts, 1) is slice_(base, 1, cuts[0], cuts[-1])
    shuffled = data.draw(st.permutations(parts))
    assert_same(value_of(join(shuffled, 1)), np.concatenate([value_of(p) for p in shuffled], 1))
    stepped = [Node(Slice((0, a), (3, 8), (1, 2)), base) for a in (0, 1)]
    assert isinstance(join(stepped, 1).op, Concat)
    assert_same(value_of(join(stepped, 1)), np.concatenate([value_of(p) for p in stepped], 1))
    rows = [slice_(slice_(base, 0, 0, 2), 1, a, b) for a, b in ((0, 4), (4, 8))]
    assert_same(value_of(join(rows, 1)), value_of(base)[:2])


def test_sources_are_met_once_and_small_constants_stand_for_themselves():
    x, y, one = input_("x", F32, (2, 3)), input_("y", F32, (3, 2)), const(1.0, F32)
    sources = Sources([x])
    assert sources.param(y) is Node(Param(1, y.tensor)) and sources.param(x) is Node(Param(0, x.tensor))
    assert sources.param(one) is one and sources.nodes == [x, y]
    expression = map_("add", transpose(Node(Param(0, y.tensor)), (1, 0)), Node(Param(1, x.tensor)))
    (moved,) = sources.rebase([expression], [y, x])
    assert outside(moved, sources.nodes) is map_("add", transpose(y, (1, 0)), x)
    assert outside(expression, [y, x]) is map_("add", transpose(y, (1, 0)), x)


def test_a_gemm_has_one_spelling_whatever_order_its_sources_came_in():
    x, w, b, unused = (input_(n, F32, s) for n, s in (("x", (2, 3)), ("w", (3, 4)), ("b", (4,)), ("u", (7,))))
    acc = Node(Acc(TensorType(F32, (2, 4))))

    def build(order):
        at = {n: Node(Param(i, n.tensor)) for i, n in enumerate(order)}
        return make_gemm(F32, at[x], at[w], (map_("add", acc, at[b]),), order)

    assert build([x, w, b]) is build([b, unused, w, x]) and build([w, b, x]).src == (x, w, b)


@pytest.mark.parametrize("regions", [False, True])
def test_carriers_are_rebuilt_from_their_parts(regions):
    q = input_("q", F16, (1, 2, 3, 4))
    inner, result = Node(Acc(TensorType(F32, (1, 2, 3, 3)))), Node(Acc(TensorType(F16, (1, 2, 3, 4))))
    step = input_("s", F32, (1, 1, 1, 3))
    scores = map_("multiply", inner, Node(Param(1, step.tensor))) if regions else None
    weights = map_("maximum", inner, Node(Param(1, step.tensor))) if regions else None
    p = Node(Param(0, q.tensor))
    op = Attention(0.5, operands=(p, p, p) if regions else (), scores=scores, weights=weights)
    attention = Node(op, *((q, step) if regions else (q, q, q)))
    product = gemm(input_("a", S8, (2, 3)), input_("b", S8, (3, 4)), out_dtype=S8)
    for node in (attention, product):
        again = rebuilt(node, operands_of(node), stores_of(node), node.src)
        assert again.type == node.type and rebuilt(again, operands_of(again), stores_of(again), again.src) is again
        assert acc_of(again) is acc_of(node)
    assert isinstance(product.op, Gemm) and stores_of(product) == (convert(acc_of(product), S8),)
    assert stores_of(attention) == (result,)
    if regions:
        only_scores = Node(Attention(0.5, operands=(p, p, p), scores=scores), q, step)
        again = rebuilt(only_scores, operands_of(only_scores), stores_of(only_scores), only_scores.src)
        assert again.op.scores is not None and again.op.weights is None
        only_weights = Node(Attention(0.5, operands=(p, p, p), weights=weights), q, step)
        again = rebuilt(only_weights, operands_of(only_weights), stores_of(only_weights), only_weights.src)
        assert again.op.scores is None and again.op.weights is not None
