"""Layouts keep track of elements through any views; polynomials are read from any arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.dtype import BF16, F32, F64, S32
from tilewright.ir.axes import Placed, axes_of, broadcast_aligned, layout_of, propagate_to_source, propagate_to_user, reshaped
from tilewright.ir.build import broadcast, const, convert, input_, map_, reshape, transpose
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node
from tilewright.ir.ops import Reshape, Transpose
from tilewright.ir.polynomial import agree, polynomial, rounding_tolerance


@st.composite
def views(draw: st.DrawFn) -> tuple[Node, Node]:
    """An input and a chain of views of it."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    x = node = input_("x", F32, shape)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["transpose", "reshape", "broadcast"]))
        if kind == "transpose":
            node = transpose(node, draw(st.permutations(range(len(node.shape)))))
        elif kind == "reshape":
            node = reshape(node, draw(regrouped(node.shape)))
        else:
            stretched = [draw(st.sampled_from([1, 2])) if d == 1 else d for d in node.shape]
            node = broadcast(node, [*draw(st.lists(st.just(2), max_size=1)), *stretched])
    return x, node


@st.composite
def regrouped(draw: st.DrawFn, shape: tuple[int, ...]) -> list[int]:
    """A shape of as many elements: factors of the extents, joined at random."""
    factors = [f for d in shape for f in draw(st.sampled_from(splits(d)))]
    result: list[int] = []
    for f in factors:
        if result and draw(st.booleans()):
            result[-1] *= f
        else:
            result.append(f)
    return result or [1]


def splits(d: int) -> list[tuple[int, ...]]:
    return [(d,), *((f, d // f) for f in range(2, d) if d % f == 0), (1, d)]


@given(views())
def test_views_are_undone_and_put_back(case: tuple[Node, Node]):
    x, view = case
    value = torch.arange(math.prod(x.shape), dtype=torch.float32).reshape(x.shape)
    placed = Placed(view, layout_of(view.shape))
    bare = placed.without_views()
    rebuilt = broadcast(bare.arranged(placed.layout), view.shape)
    (wanted,), (found,) = (evaluate_nodes([n], {x: value}) for n in (view, rebuilt))
    assert torch.equal(wanted, found)


def test_a_detour_through_merged_heads_is_seen_through():
    x = input_("x", F32, (2, 4, 5, 8))
    detour = reshape(transpose(reshape(x, (8, 5, 8)), (0, 2, 1)), (2, 4, 8, 5))
    assert Placed(detour, layout_of(detour.shape)).without_views().node is x


@given(views(), st.randoms())
def test_any_arrangement_holds_the_same_elements(case: tuple[Node, Node], dice: object):
    x, view = case
    placed = Placed(view, layout_of(view.shape)).without_views()
    axes = axes_of(layout_of(view.shape)) and placed.axes
    dice.shuffle(axes)  # type: ignore[attr-defined]
    cuts = sorted(dice.randint(0, len(axes)) for _ in range(3))  # type: ignore[attr-defined]
    dims = [axes[i:j] for i, j in zip([0, *cuts], [*cuts, len(axes)], strict=True)]
    value = torch.randn(x.shape)
    (base,) = evaluate_nodes([placed.node], {x: value})
    (found,) = evaluate_nodes([placed.arranged(dims)], {x: value})
    apart = base.reshape([a.extent for a in placed.axes])
    moved = apart.permute([placed.axes.index(a) for a in axes])
    assert torch.equal(found, moved.reshape([math.prod(a.extent for a in d) for d in dims]))


def test_a_transpose_stays_one_transpose():
    x = input_("x", F32, (2, 3, 4, 5))
    layout = layout_of(x.shape)
    node = Placed(x, layout).arranged([layout[i] for i in (0, 1, 3, 2)])
    assert node is transpose(x, (0, 1, 3, 2))
    one = input_("one", F32, (1, 3, 40))
    placed = Placed(reshape(one, (1, 3, 8, 5)), layout_of((1, 3, 8, 5))).without_views()
    assert placed.node is one
    found = placed.arranged([placed.layout[0], placed.axes[1:2], placed.layout[1], placed.axes[2:]])
    assert found is transpose(reshape(one, (1, 3, 8, 5)), (0, 2, 1, 3))


def test_an_axis_that_is_cut_is_cut_everywhere():
    layout = layout_of((6, 5))
    assert [a.extent for a in axes_of(layout)] == [6, 5]
    split = reshaped(layout, (2, 15))
    assert split is not None
    assert [a.extent for a in axes_of(layout)] == [2, 3, 5]
    assert axes_of(split) == axes_of(layout)


def test_what_does_not_divide_has_no_layout():
    assert reshaped(layout_of((4, 6)), (3, 8)) is None
    assert reshaped(layout_of((0, 3)), (0,)) is None
    assert broadcast_aligned((3,), layout_of((4, 2))) is None
    assert broadcast_aligned((5, 4, 2), layout_of((4, 2))) is None
    x = input_("x", F32, (2, 3))
    assert propagate_to_user(map_("tanh", x), layout_of((2, 3))) is None
    assert propagate_to_source(Node(Reshape((6,)), x), layout_of((6,))) is not None
    assert propagate_to_source(Node(Transpose((1, 0)), x), layout_of((3, 2))) is not None


def test_repetition_has_no_axis():
    x = input_("x", F32, (2, 1, 3))
    layout = layout_of((4, 2, 5, 3))
    found = Placed(broadcast(x, (4, 2, 5, 3)), layout).without_views()
    assert found.node is x and found.axes == axes_of(layout)[1::2]
    assert found.arranged(layout).shape == (1, 2, 1, 3)
    joined = found.arranged([axes_of(layout)[:2], axes_of(layout)[2:]])
    assert joined.shape == (8, 15)
    value = torch.randn(2, 1, 3)
    assert torch.equal(evaluate_nodes([joined], {x: value})[0], value.expand(4, 2, 5, 3).reshape(8, 15))


# Polynomials.

X = input_("x", F32, (3,))
Y = input_("y", F32, (3,))


@st.composite
def arithmetic_of(draw: st.DrawFn, depth: int = 3) -> Node:
    """Arithmetic over x, y and numbers."""
    if not depth or draw(st.booleans()):
        return draw(st.sampled_from([X, Y]))
    inner = draw(arithmetic_of(depth - 1))
    number = const(draw(st.sampled_from([-2.0, 0.5, 3.0])), F32)
    kind = draw(st.sampled_from(["add", "subtract", "multiply", "negate", "scale", "over", "square"]))
    if kind == "negate":
        return map_("negate", inner)
    if kind == "scale":
        return map_("multiply", *draw(st.permutations([inner, number])))
    if kind == "over":
        return map_("divide", inner, number)
    if kind == "square":
        return map_("power", inner, const(2.0, F32))
    return map_(kind, inner, draw(st.one_of(arithmetic_of(depth - 1), st.just(number))))


@given(arithmetic_of())
def test_a_polynomial_has_the_values_of_what_it_was_read_from(node: Node):
    inside: list[Node] = []
    found = polynomial(node, [X, Y], inside)
    if found is None:  # of a higher degree than 4
        return
    x, y = torch.tensor([0.5, -1.25, 2.0]), torch.tensor([1.5, 0.75, -0.5])
    (wanted,) = evaluate_nodes([convert(node, F64)], {X: x, Y: y})
    value = sum((c * x.double() ** i * y.double() ** j for (i, j), c in found.items()), torch.zeros(3, dtype=torch.float64))
    assert torch.allclose(value, wanted, rtol=1e-5, atol=1e-4)
    assert {X, Y}.isdisjoint(inside) and (node in inside or node in (X, Y))


def test_what_is_no_polynomial():
    two = const(2.0, F32)
    for node in (
        map_("tanh", X),
        map_("divide", two, X),
        map_("power", X, Y),
        map_("power", X, const(0.5, F32)),
        map_("power", X, const(5.0, F32)),
        map_("add", X, input_("z", F32, (3,))),
        map_("add", X, broadcast(Y, (2, 3))),
    ):
        assert polynomial(node, [X, Y], []) is None
    whole = input_("n", S32, (3,))
    assert polynomial(map_("add", whole, const(1, S32)), [whole], []) is None
    deep = X
    for _ in range(20):
        deep = map_("add", deep, Y)
    assert polynomial(deep, [X, Y], []) is None and polynomial(deep, [X, Y], [], 20) == {(1, 0): 1.0, (0, 1): 20.0}


def test_agreement_is_relative_and_of_the_same_monomials():
    assert agree({(1,): 2.0002}, {(1,): 2.0}, 1e-3) and not agree({(1,): 2.003}, {(1,): 2.0}, 1e-3)
    assert not agree({(1,): 2.0, (2,): 1e-9}, {(1,): 2.0}, 1e-3)
    assert rounding_tolerance(BF16) == pytest.approx(2**-6) and rounding_tolerance(F64) == rounding_tolerance(F32)
