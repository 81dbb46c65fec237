"""Constants, known before the program runs: folding numbers, dropping neutral operands, reading a node's number."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from rule_checks import assert_exact, assert_order_is_free, fired, graph_of, refusals, staged
from values import ALL, every_value, from_numpy, random_value, same, to_numpy

from tilewright.dtype import BF16, F16, F32, F64, PRED, S8, S32, S64, U8, DType
from tilewright.ir.build import broadcast, const, convert, input_, map_, reshape, transpose
from tilewright.ir.constant import constant_value, repeating_value, scalar_value, scaling
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Node
from tilewright.ir.literal import Literal
from tilewright.ir.ops import Const, Convert, Dequantize, Iota, Quantize, Select
from tilewright.ir.types import TensorType


def test_a_number_is_read_through_views_and_conversions():
    number = const(0.1, F32)
    assert scalar_value(broadcast(number, (3, 4))) == pytest.approx(0.1)
    assert scalar_value(transpose(reshape(broadcast(number, (3, 4)), (2, 6)), (1, 0))) == scalar_value(number)
    assert scalar_value(convert(number, BF16)) == pytest.approx(0.1, rel=BF16.epsilon)
    assert scalar_value(convert(number, BF16)) != scalar_value(number)
    assert scalar_value(convert(const(300, S32), S8)) == 44
    assert scalar_value(const(True, PRED)) is True
    assert scalar_value(const([1.0, 1.0], F32)) is None
    assert scalar_value(broadcast(number, (0, 4))) is None
    assert scalar_value(input_("x", F32, ())) is None


def test_scaling_says_which_operand_and_by_how_much():
    x = input_("x", F32, (3,))
    two = const(2.0, F32)
    assert scaling(map_("multiply", x, two)) == (0, 2.0)
    assert scaling(map_("multiply", two, x)) == (1, 2.0)
    assert scaling(map_("divide", x, two)) == (0, 0.5)
    assert scaling(map_("divide", two, x)) is None
    assert scaling(map_("multiply", x, const(0.0, F32))) is None
    assert scaling(map_("multiply", input_("y", S32, (3,)), const(2, S32))) is None


def test_a_value_made_of_constants_is_computed_within_limits():
    table = map_("greater_equal", Node(Iota(S32, (4, 6), 0)), Node(Iota(S32, (4, 6), 1)))
    value = constant_value(table)
    assert value is not None and torch.equal(value, torch.ones(4, 6, dtype=torch.bool).tril())
    assert constant_value(table, max_elements=23) is None
    assert constant_value(table, max_nodes=2) is None
    assert constant_value(map_("and", table, input_("m", PRED, (4, 6)))) is None


def test_a_mask_that_was_looked_at_is_not_kept():
    mask = torch.arange(64) % 3 == 0
    node = Node(Const(Literal(TensorType(PRED, (64,)), lambda mask=mask: mask, "mask")))
    assert scalar_value(node) is scalar_value(node) is None
    gone = weakref.ref(mask)
    del mask, node
    gc.collect()
    assert gone() is None


def test_a_value_that_repeats_is_computed_once():
    wide = (1 << 20, 1 << 10)  # far more elements than are computed
    rows, columns = (broadcast(Node(Iota(S32, shape, axis)), (*wide, 4, 6)) for shape, axis in (((4, 1), 0), ((6,), 0)))
    table = map_("greater_equal", rows, columns)
    value = repeating_value(table)
    assert value is not None and torch.equal(value, torch.ones(1, 1, 4, 6, dtype=torch.bool).tril())
    assert repeating_value(table, max_elements=23) is None and repeating_value(table, max_nodes=2) is None
    assert repeating_value(map_("and", table, input_("m", PRED, (4, 6)))) is None
    every = const(torch.full((3, 4), float("nan")), F32)
    assert repeating_value(every) is not None and repeating_value(every).shape == (3, 4)  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64, S32, U8], ids=str)
def test_numbers_are_computed_beforehand(dtype: DType):
    a, b = const(7, dtype), const(3, dtype)
    x = input_("x", dtype, (5,))
    out = map_("add", x, map_("subtract", map_("multiply", a, b), reshape(const([2], dtype), ())))
    before = graph_of(out)
    after = staged(before, "recognise")
    assert after.outputs == (map_("add", x, const(19, dtype)),)
    assert_exact(before, after)


def test_larger_constants_and_quantised_ones_stay_as_they_are():
    x = input_("x", F32, (2,))
    pair = map_("add", const([1.0, 2.0], F32), const([3.0, 4.0], F32))
    codes = Node(Dequantize(F32), const(3, S8), const(0.5, F32))
    for value in (pair, codes, Node(Quantize(S8), const(0.3, F32), const(0.5, F32))):
        graph = graph_of(map_("add", x, value) if value.dtype is F32 else value)
        assert staged(graph, "recognise").outputs == graph.outputs


def test_selecting_by_a_known_predicate():
    a, b = input_("a", F32, (3, 4)), input_("b", F32, (4,))
    for known, wanted in ((True, a), (False, broadcast(b, (3, 4)))):
        before = graph_of(Node(Select(), const(known, PRED), a, b))
        after = staged(before, "recognise")
        assert after.outputs == (wanted,)
    runtime = graph_of(Node(Select(), input_("p", PRED, ()), a, b))
    assert staged(runtime, "recognise").outputs == runtime.outputs


def test_a_variance_that_may_be_undefined_is_the_variance():
    """jnp.var(x) selects NaN unless n - ddof > 0, all of it known."""
    x = input_("x", F32, (3, 1))
    count = map_("subtract", const(8.0, F32), convert(const(0, S32), F32))
    before = graph_of(Node(Select(), map_("greater", count, const(0.0, F32)), map_("divide", x, count), const(math.nan, F32)))
    after = staged(before, "recognise")
    assert after.outputs == (map_("divide", x, const(8.0, F32)),)
    assert_exact(before, after)


NEUTRAL = [
    ("multiply", F32, 1.0),
    ("multiply", S8, 1),
    ("divide", BF16, 1.0),
    ("add", S32, 0),
    ("subtract", U8, 0),
    ("maximum", F32, -math.inf),
    ("maximum", S8, -128),
    ("maximum", U8, 0),
    ("minimum", F64, math.inf),
    ("minimum", S8, 127),
    ("and", PRED, True),
    ("multiply", PRED, True),
    ("or", PRED, False),
]


@pytest.mark.parametrize(("fn", "dtype", "number"), NEUTRAL)
def test_operands_that_change_nothing_are_dropped(fn: str, dtype: DType, number: float):
    x = input_("x", dtype, (4, 16))
    given = {x.op.label: random_value(x.tensor, 3, special=0.5)}
    pairs = [(x, const(number, dtype)), (const(number, dtype), x)]
    for pair in pairs[: 1 if fn in ("divide", "subtract") else 2]:
        before = graph_of(map_(fn, *pair))
        after = assert_order_is_free(before, "recognise", orders=4)
        assert after.outputs == (x,)
        (a,), (b,) = (evaluate(g, given) for g in (before, after))
        assert torch.equal(a, b) or torch.equal(a.isnan(), b.isnan())
    wide = map_(fn, x, broadcast(const(number, dtype), (2, 4, 16)))
    assert staged(graph_of(wide), "recognise").outputs == (broadcast(x, (2, 4, 16)),)


def test_a_mask_that_hides_nothing_is_dropped():
    """Exported models spell it so: a constant that is true everywhere, or positions that are none below zero."""
    seen = input_("m", PRED, (2, 1, 1, 8))
    positions = reshape(Node(Iota(S64, (8,), 0)), (1, 1, 8, 1))
    nothing = [const(torch.ones(1, 1, 8, 1, dtype=torch.bool)), map_("greater_equal", positions, const(0, S64))]
    for other in nothing:
        graph = graph_of(map_("and", other, seen))
        after = staged(graph, "recognise")
        assert after.outputs == (broadcast(seen, (2, 1, 8, 8)),)
        assert_exact(graph, after)
    some = [const(torch.arange(8).reshape(1, 1, 8, 1) > 0), map_("greater_equal", positions, const(1, S64))]
    for other in some:
        assert fired(graph_of(map_("and", other, seen)), "drop_operand_that_changes_nothing", "recognise") == 0


@pytest.mark.parametrize(
    ("fn", "dtype", "number"),
    [
        ("add", F32, 0.0),  # -0.0 + 0.0 is 0.0
        ("subtract", F32, 0.0),
        ("multiply", F32, 0.0),
        ("maximum", F32, 0.5),
        ("maximum", F32, -3.4028234663852886e38),  # -inf is lower
        ("minimum", S8, 0),
        ("add", PRED, True),
        ("power", F32, 2.0),
    ],
)
def test_other_numbers_stay(fn: str, dtype: DType, number: float):
    graph = graph_of(map_(fn, input_("x", dtype, (4,)), const(number, dtype)))
    assert fired(graph, "drop_operand_that_changes_nothing", "recognise") == 0


def test_one_divided_by_x_is_not_x():
    for fn in ("divide", "subtract"):
        number = {"divide": 1, "subtract": 0}[fn]
        graph = graph_of(map_(fn, const(number, S32), input_("x", S32, (4,))))
        assert staged(graph, "recognise").outputs == graph.outputs


# Casts that cancel.


@pytest.mark.parametrize("narrow", [d for d in ALL if d.bits <= 16], ids=str)
@pytest.mark.parametrize("wide", ALL, ids=str)
def test_a_detour_is_dropped_just_where_no_value_changes(narrow: DType, wide: DType):
    """Every value of the narrow type, through every other."""
    values = from_numpy(every_value(narrow), narrow)
    x = input_("x", narrow, tuple(values.shape))
    for overflow in ("wrap", "saturate"):
        detour = Node(Convert(narrow, overflow), Node(Convert(wide, overflow), x))
        (there_and_back,) = evaluate(graph_of(detour), [values])
        kept = bool(same(to_numpy(there_and_back, narrow), every_value(narrow)).all())
        dropped = staged(graph_of(detour), "recognise").outputs == (x,)
        assert kept or not dropped
        assert dropped or not kept or wide is narrow or (overflow == "saturate" and narrow.is_float)


def test_another_type_at_the_end_is_no_detour():
    x = input_("x", F16, (4,))
    for out in (convert(convert(x, F32), BF16), convert(convert(input_("y", F32, (4,)), F16), F32)):
        assert staged(graph_of(out), "recognise").outputs == (out,)


# Casts around arithmetic.

CASTS = "function_between_casts_is_the_function_of_what_is_cast"


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("fn", ["add", "multiply", "divide", "subtract", "maximum"])
def test_a_function_between_casts_is_that_of_the_narrow_type(dtype: DType, fn: str):
    x, y = input_("x", dtype, (64,)), input_("y", dtype, (64,))
    before = graph_of(convert(map_(fn, convert(x, F32), convert(y, F32)), dtype))
    after = assert_order_is_free(before, "recognise", orders=4)
    assert after.outputs == (map_(fn, x, y),)
    assert_exact(before, after)


def test_numbers_among_the_operands_must_be_exact_in_the_narrow_type():
    x = input_("x", BF16, (8,))
    exact = graph_of(convert(map_("multiply", convert(x, F32), const(0.5, F32)), BF16))
    assert staged(exact, "recognise").outputs == (map_("multiply", x, const(0.5, BF16)),)
    inexact = graph_of(convert(map_("multiply", convert(x, F32), const(0.1, F32)), BF16))
    assert staged(inexact, "recognise").outputs == inexact.outputs


def test_casts_stay_where_the_wide_value_is_read_or_wanted():
    x = input_("x", BF16, (8,))
    wide = map_("tanh", convert(x, F32))
    graph = graph_of(convert(wide, BF16), wide)
    assert refusals(graph, CASTS, "recognise") == ["the tanh is also read in f32"]
    assert staged(graph, "recognise").outputs == graph.outputs
    other = graph_of(convert(map_("tanh", convert(x, F32)), F16))
    assert staged(other, "recognise").outputs == other.outputs
    f32 = graph_of(convert(map_("tanh", input_("y", F32, (8,))), BF16))
    assert staged(f32, "recognise").outputs == f32.outputs


def test_a_predicate_selects_between_narrow_values_too():
    x, p = input_("x", F16, (8,)), input_("p", PRED, (8,))
    before = graph_of(convert(Node(Select(), p, convert(x, F32), const(0.0, F32)), F16))
    after = staged(before, "recognise")
    assert after.outputs == (Node(Select(), p, x, const(0.0, F16)),)
    assert_exact(before, after)


def test_constants_of_a_program_are_shared_not_copied():
    weight = torch.randn(64, 64)
    node = const(weight, F32)
    assert isinstance(node.op, Const)
    graph = graph_of(map_("multiply", node, const(1.0, F32)))
    (out,) = staged(graph, "recognise").outputs
    assert out is node and node.op.data.tensor().data_ptr() == weight.data_ptr()
