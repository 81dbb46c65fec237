"""One spelling for what can be spelt several ways."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_checks import assert_exact, fired, graph_of, same_bits, staged

from tilewright.compiler import CANONICAL, EXCESS_PRECISION, STAGES
from tilewright.dtype import BF16, F8E5M2, F32, PRED, S8, S16, S32, U8, U16
from tilewright.ir.build import broadcast, const, convert, input_, map_, reshape, slice_
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Node
from tilewright.ir.ops import Broadcast, Concat, Convert, Dequantize, Map, Quantize, Reshape, Select, Slice, Transpose
from tilewright.ir.pattern import Rule, discover

X = input_("x", F32, (2, 3, 4))
Y = input_("y", F32, (3, 1))


def node(op, *src):
    """A node as a front end may write it, with nothing left out."""
    return Node(op, *src)


NOTHING = {
    "reshape": (lambda: node(Reshape((2, 3, 4)), X), "drop_what_changes_nothing"),
    "broadcast": (lambda: node(Broadcast((2, 3, 4)), X), "drop_what_changes_nothing"),
    "convert": (lambda: node(Convert(F32), X), "drop_what_changes_nothing"),
    "saturating convert": (lambda: node(Convert(F32, "saturate"), X), "drop_what_changes_nothing"),
    "transpose": (lambda: node(Transpose((0, 1, 2)), X), "drop_transpose_in_order"),
    "slice": (lambda: node(Slice((0, 0, 0), (2, 3, 4), (1, 1, 1)), X), "drop_slice_of_everything"),
    "steps along an axis of one": (lambda: None, "drop_slice_of_everything"),
    "concat of one": (lambda: node(Concat(1), X), "drop_concat_of_nothing"),
    "concat with nothing": (lambda: node(Concat(2), input_("e", F32, (2, 3, 0)), X), "drop_concat_of_nothing"),
    "and back": (lambda: node(Transpose((1, 2, 0)), node(Transpose((2, 0, 1)), X)), "join_transposes"),
    "there and back": (lambda: node(Reshape((2, 3, 4)), node(Reshape((24,)), X)), "join_reshapes"),
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_changes_nothing_is_dropped(name):
    build, rule = NOTHING[name]
    x = X
    changed = build()
    if changed is None:
        x = input_("x", F32, (1, 3))
        changed = node(Slice((0, 0), (1, 3), (5, 1)), x)
    before = graph_of(changed)
    after = staged(before, CANONICAL)
    assert after.outputs == (x,) and len(after.nodes()) < len(before.nodes()) and fired(before, rule, CANONICAL) >= 1
    assert_exact(before, after)


KEPT = {
    "another shape": node(Reshape((24,)), X),
    "a longer shape of as many": node(Broadcast((1, 2, 3, 4)), X),
    "another type": node(Convert(BF16), X),
    "another order": node(Transpose((0, 2, 1)), X),
    "part of it": node(Slice((0, 0, 0), (2, 3, 3), (1, 1, 1)), X),
    "every other": node(Slice((0, 0, 0), (2, 3, 4), (1, 1, 2)), X),
    "two beside each other": node(Concat(-1), X, X),
    "a map that needs the broadcast": map_("add", broadcast(Y, (3, 4)), broadcast(input_("z", F32, (3, 1)), (3, 4))),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_changes_something_is_kept(name):
    before = graph_of(KEPT[name])
    after = staged(before, CANONICAL)
    assert after.outputs[0].type == before.outputs[0].type
    if name != "a map that needs the broadcast":
        assert after.outputs == before.outputs
    assert_exact(before, after)


def test_a_concat_loses_what_has_no_extent():
    e = input_("e", F32, (2, 0, 4))
    for before, after in (
        (node(Concat(-2), e, X, e, X), node(Concat(-2), X, X)),
        (node(Concat(1), e, e), e),
        (node(Concat(0), e, e), node(Concat(0), e, e)),  # four of nothing
    ):
        graph = graph_of(before)
        found = staged(graph, CANONICAL)
        assert found.outputs == (after,)
        assert_exact(graph, found)


def test_two_views_become_one():
    twice = node(Reshape((6, 4)), node(Reshape((4, 6)), X))
    assert staged(graph_of(twice), CANONICAL).outputs == (node(Reshape((6, 4)), X),)
    around = node(Transpose((1, 0, 2)), node(Transpose((2, 0, 1)), X))
    assert staged(graph_of(around), CANONICAL).outputs == (node(Transpose((0, 2, 1)), X),)


def test_functions_broadcast_by_themselves():
    wide = node(Broadcast((2, 3, 4)), Y)
    for before, after in (
        (map_("add", X, wide), map_("add", X, Y)),
        (map_("subtract", wide, X), map_("subtract", Y, X)),
        (Node(Map("clamp"), wide, X, node(Broadcast((2, 3, 4)), const(1.0, F32))), Node(Map("clamp"), Y, X, const(1.0, F32))),
        (
            Node(Select(), node(Broadcast((2, 3, 4)), input_("p", PRED, (4,))), X, wide),
            Node(Select(), input_("p", PRED, (4,)), X, Y),
        ),
    ):
        graph = graph_of(before)
        found = staged(graph, CANONICAL)
        assert found.outputs == (after,) and len(found.nodes()) < len(graph.nodes())
        assert_exact(graph, found)


def test_one_broadcast_stays_where_it_gives_the_shape():
    before = graph_of(map_("add", broadcast(Y, (2, 3, 4)), broadcast(const(1.0, F32), (2, 3, 4))))
    after = staged(before, CANONICAL)
    assert sum(isinstance(n.op, Broadcast) for n in after.nodes()) == 1
    assert_exact(before, after)


@pytest.mark.parametrize("code", [S8, U8, S32])
def test_a_zero_point_of_zero_is_no_zero_point(code):
    x, scale = input_("x", F32, (3, 4)), const(0.1, F32)
    q = input_("q", code, (3, 4))
    zero, zeros, one = const(0, code), const([0, 0, 0], code), const([0, 1, 0], code)
    rule = "drop_zero_point_of_zero"
    per_row = reshape(zeros, (3, 1))
    for before, after in (
        (Node(Quantize(code), x, scale, zero), Node(Quantize(code), x, scale)),
        (Node(Dequantize(F32), q, scale, zero), Node(Dequantize(F32), q, scale)),
        (Node(Dequantize(F32), q, scale, per_row), Node(Dequantize(F32), q, scale)),
        (Node(Dequantize(F32), q, scale, node(Broadcast((3, 4)), zero)), Node(Dequantize(F32), q, scale)),
    ):
        graph = graph_of(before)
        found = staged(graph, CANONICAL)
        assert found.outputs == (after,) and fired(graph, rule, CANONICAL) == 1
        assert_exact(graph, found)
    for kept in (
        Node(Quantize(code), x, scale, const(1, code)),
        Node(Dequantize(F32), q, scale, reshape(one, (3, 1))),
        Node(Dequantize(F32), q, scale, input_("z", code, ())),
    ):
        assert fired(graph_of(kept), rule, CANONICAL) == 0


OPS = [
    lambda x: node(Reshape(x.shape), x),
    lambda x: node(Reshape((x.tensor.elements,)), x),
    lambda x: node(Reshape((2, x.tensor.elements // 2)), x),
    lambda x: node(Transpose(tuple(reversed(range(len(x.shape))))), x),
    lambda x: node(Transpose(tuple(range(len(x.shape)))), x),
    lambda x: node(Slice((0,) * len(x.shape), x.shape, (1,) * len(x.shape)), x),
    lambda x: node(Broadcast((1, *x.shape)), x),
    lambda x: node(Convert(F32), x),
    lambda x: map_("add", x, node(Broadcast(x.shape), const(0.5, F32))),
    lambda x: map_("tanh", x),
    lambda x: slice_(x, -1, 0, x.shape[-1] // 2 * 2),
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(range(len(OPS))), max_size=9), st.integers(0, 2**31))
def test_any_order_of_the_rules_gives_the_same_smaller_graph(picks, shuffle):
    x = X
    for i in picks:
        x = OPS[i](x)
    before = graph_of(x)
    after = staged(before, CANONICAL)
    assert len(after.nodes()) <= len(before.nodes())
    assert staged(before, CANONICAL, shuffle=shuffle).outputs == after.outputs
    assert staged(after, CANONICAL).outputs == after.outputs
    feed = {"x": torch.randn(2, 3, 4)}
    assert same_bits(evaluate(before, feed)[0], evaluate(after, feed)[0])


def test_every_rule_belongs_to_a_stage_that_runs_and_says_what_it_does():
    for rule in discover("tilewright.rules", Rule):
        assert rule.stage in (CANONICAL, *STAGES, EXCESS_PRECISION), rule.name
        assert "->" in rule.doc and "_" in rule.name


def test_what_is_repeated_is_computed_once():
    """An exported model's padding mask: one row of keys for all queries, and for all heads."""
    seen = input_("m", PRED, (2, 1, 1, 8))
    mask = node(Select(), broadcast(seen, (2, 1, 8, 8)), const(0.0, F32), const(-1e9, F32))
    before = graph_of(map_("multiply", mask, const(2.0, F32)))
    after = staged(before, CANONICAL)
    assert fired(before, "function_before_the_broadcast", CANONICAL) >= 2
    assert_exact(before, after)
    (output,) = after.outputs
    assert isinstance(output.op, Broadcast) and output.src[0].shape == (2, 1, 1, 8)
    x, row = input_("x", F32, (4, 1)), input_("r", F32, (1, 4))
    for stays in (
        map_("add", broadcast(x, (4, 4)), broadcast(row, (4, 4))),
        map_("add", input_("f", F32, (4, 4)), broadcast(row, (4, 4))),
    ):
        assert fired(graph_of(stays), "function_before_the_broadcast", CANONICAL) == 0


ALIKE = "quantising_what_was_dequantised_alike_gives_the_codes"


def there_and_back(codes, scale, *zero, view=lambda x: x, to=F32, again=None):
    return Node(Quantize(codes.dtype), view(Node(Dequantize(to), codes, scale, *zero)), *(again or (scale, *zero)))


@settings(max_examples=60, deadline=None)
@given(
    scale=st.floats(2.0**-64, 2.0**64, width=32),
    dtype=st.sampled_from([S8, U8, S16, U16]),
    zero=st.integers(0, 127),
    negative=st.booleans(),
)
def test_codes_that_go_and_come_back_are_themselves(scale, dtype, zero, negative):
    """Every code of the type, by any scale."""
    count = 1 << dtype.bits
    codes = (torch.arange(count) + int(dtype.min)).to(dtype.to_torch())
    x = input_("x", dtype, (count,))
    before = graph_of(there_and_back(x, const(-scale if negative else scale), const(zero, dtype)))
    assert fired(before, ALIKE, CANONICAL) == 1
    after = staged(before, CANONICAL)
    assert after.outputs == (x,)
    assert same_bits(evaluate(before, {"x": codes})[0], evaluate(after, {"x": codes})[0])


def test_codes_come_back_through_views():
    x = input_("x", U8, (2, 6))
    turned = lambda v: node(Transpose((1, 0)), node(Reshape((3, 4)), v))  # noqa: E731
    before = graph_of(there_and_back(x, const(0.1), const(3, U8), view=turned))
    after = staged(before, CANONICAL)
    assert after.outputs == (turned(x),)
    assert_exact(before, after)
    by_channel = graph_of(there_and_back(x, const([0.1] * 6)))
    assert staged(by_channel, CANONICAL).outputs == (x,)


@pytest.mark.parametrize(
    "kept",
    [
        lambda x: there_and_back(x, const(0.1), again=(const(0.2),)),
        lambda x: there_and_back(x, const(0.1), const(1, U8), again=(const(0.1), const(2, U8))),
        lambda x: there_and_back(x, const(0.1), const(1, U8), again=(const(0.1),)),
        lambda x: there_and_back(x, const(2.0**-80)),
        lambda x: there_and_back(x, const(0.0)),
        lambda x: there_and_back(x, const(float("inf"))),
        lambda x: there_and_back(x, input_("s", F32, ())),
        lambda x: there_and_back(x, const(0.1), to=BF16),
        lambda x: there_and_back(x, const([[0.1, 0.2]] * 2), view=lambda v: node(Transpose((1, 0)), v)),
        lambda x: there_and_back(convert(x, F8E5M2), const(0.1)),  # whose infinities saturate
        lambda x: Node(Quantize(S8), Node(Dequantize(F32), x, const(0.1)), const(0.1)),
    ],
)
def test_codes_that_come_back_otherwise_stay(kept):
    before = graph_of(kept(input_("x", U8, (2, 2))))
    assert fired(before, ALIKE, CANONICAL) == 0
