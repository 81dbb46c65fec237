"""Activations recognised from arithmetic: in every spelling, with the right constants only, and where no work is done twice."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from rule_checks import assert_close, assert_exact, assert_no_growth, assert_order_is_free, graph_of, refusals, staged
from values import random_array, specials

from tilewright.dtype import BF16, F16, F32, F64, S8, S32, U8, DType
from tilewright.frontends import LoadOptions, load
from tilewright.ir.build import broadcast, const, convert, input_, map_
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node, substitute
from tilewright.ir.ops import Map, Select

RULE = "arithmetic_around_erf_or_tanh_is_an_activation"
Spelling = Callable[[Node], Node]


def mul(a: Node | float, b: Node | float) -> Node:
    return _binary("multiply", a, b)


def add(a: Node | float, b: Node | float) -> Node:
    return _binary("add", a, b)


def div(a: Node | float, b: Node | float) -> Node:
    return _binary("divide", a, b)


def _binary(fn: str, a: Node | float, b: Node | float) -> Node:
    like = a if isinstance(a, Node) else b
    assert isinstance(like, Node)
    return map_(fn, *(n if isinstance(n, Node) else const(n, like.dtype) for n in (a, b)))


def cube(x: Node) -> Node:
    return mul(mul(x, x), x)


def power3(x: Node) -> Node:
    return map_("power", x, const(3, x.dtype))


def erf(x: Node) -> Node:
    return map_("erf", x)


def tanh(x: Node) -> Node:
    return map_("tanh", x)


def negate(x: Node) -> Node:
    return map_("negate", x)


ROOT = math.sqrt(2)
SCALE = math.sqrt(2 / math.pi)

GELU: dict[str, Spelling] = {
    "half first, divided": lambda x: mul(mul(0.5, x), add(1, erf(div(x, ROOT)))),
    "half first, multiplied": lambda x: mul(mul(x, 0.5), add(erf(mul(x, 1 / ROOT)), 1)),
    "half with the sum": lambda x: mul(x, mul(0.5, add(1, erf(div(x, ROOT))))),
    "half distributed": lambda x: mul(x, add(0.5, mul(0.5, erf(mul(1 / ROOT, x))))),
    "half last": lambda x: mul(mul(x, add(1, erf(div(x, ROOT)))), 0.5),
    "divided by two last": lambda x: div(mul(x, add(erf(div(x, ROOT)), 1)), 2),
    "all distributed": lambda x: add(mul(0.5, x), mul(mul(0.5, x), erf(div(x, ROOT)))),
    "erf of minus": lambda x: mul(mul(0.5, x), _binary("subtract", 1, erf(mul(negate(x), 1 / ROOT)))),
    "erfc": lambda x: mul(mul(0.5, x), map_("erfc", mul(negate(x), math.sqrt(0.5)))),
    "erfc of a divided minus": lambda x: mul(0.5, mul(x, map_("erfc", div(negate(x), ROOT)))),
}
GELU_TANH: dict[str, Spelling] = {
    "power": lambda x: mul(mul(0.5, x), add(1, tanh(mul(SCALE, add(x, mul(0.044715, power3(x))))))),
    "products": lambda x: mul(x, mul(0.5, add(1, tanh(mul(SCALE, add(x, mul(0.044715, cube(x)))))))),
    "factored": lambda x: mul(mul(0.5, x), add(tanh(mul(mul(x, SCALE), add(1, mul(mul(0.044715, x), x)))), 1)),
    "scaled apart": lambda x: mul(mul(x, add(tanh(add(mul(SCALE, x), mul(SCALE * 0.044715, cube(x)))), 1)), 0.5),
    "logistic": lambda x: mul(x, map_("logistic", mul(2 * SCALE, add(x, mul(0.044715, power3(x)))))),
    "half distributed": lambda x: mul(x, add(mul(0.5, tanh(mul(add(x, mul(0.044715, cube(x))), SCALE))), 0.5)),
}
SILU: dict[str, Spelling] = {
    "logistic": lambda x: mul(x, map_("logistic", x)),
    "logistic first": lambda x: mul(map_("logistic", x), x),
    "quotient": lambda x: div(x, add(1, map_("exponential", negate(x)))),
    "product with reciprocal": lambda x: mul(x, div(1, add(map_("exponential", mul(x, -1)), 1))),
    "tanh": lambda x: mul(mul(0.5, x), add(1, tanh(mul(0.5, x)))),
}
LOGISTIC: dict[str, Spelling] = {
    "quotient": lambda x: div(1, add(1, map_("exponential", negate(x)))),
    "zero minus": lambda x: div(1, add(map_("exponential", _binary("subtract", 0, x)), 1)),
    "tanh": lambda x: add(0.5, mul(0.5, tanh(mul(0.5, x)))),
    "tanh, divided": lambda x: div(add(tanh(div(x, 2)), 1), 2),
}
CASES = [
    pytest.param(fn, spelling, id=f"{fn}: {name}")
    for fn, spellings in (("gelu", GELU), ("gelu_tanh", GELU_TANH), ("silu", SILU), ("logistic", LOGISTIC))
    for name, spelling in spellings.items()
]


def only_function(graph: Graph) -> str:
    """The function that the graph's one result is, of the input itself."""
    (out,) = graph.outputs
    assert isinstance(out.op, Map), out
    assert out.src == graph.inputs, f"{out.op.fn} of {out.src}"
    return out.op.fn


@pytest.mark.parametrize(("fn", "spelling"), CASES)
@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16], ids=str)
def test_every_spelling_becomes_the_function(fn: str, spelling: Spelling, dtype: DType):
    before = graph_of(spelling(input_("x", dtype, (3, 7, 11))))
    after = staged(before, "recognise")
    assert only_function(after) == fn
    # A spelling in a narrow type rounds up to ten values on the way; the function rounds one.
    assert_close(before, after, 8 * max(dtype.epsilon, 2**-23))
    assert_no_growth(before, after)
    assert len(after.nodes()) < len(before.nodes())


@pytest.mark.parametrize(("fn", "spelling"), CASES)
def test_order_of_rules_does_not_matter(fn: str, spelling: Spelling):
    after = assert_order_is_free(graph_of(spelling(input_("x", F32, (5,)))), "recognise", orders=8)
    assert only_function(after) == fn


@pytest.mark.parametrize(("fn", "spelling"), CASES)
def test_it_stays_where_a_value_inside_is_read_elsewhere(fn: str, spelling: Spelling):
    """Every value between x and the result, given out too, keeps what computes it; work would be done twice."""
    x = input_("x", F32, (4, 5))
    out = spelling(x)
    inside = [n for n in graph_of(out).nodes() if n.src and n is not out and n.op.name == "map" and n.dtype is F32]
    for value in inside:
        before = graph_of(out, value)
        after = staged(before, "recognise")
        assert_close(before, after, 1e-6)
        assert _work(after) <= _work(before), f"{fn} with {value} read elsewhere"


def _work(graph: Graph) -> int:
    return sum(bool(n.src) for n in graph.nodes())


def test_what_is_read_elsewhere_is_named():
    x = input_("x", F32, (4,))
    inner = erf(div(x, ROOT))
    graph = graph_of(mul(mul(0.5, x), add(1, inner)), inner)
    assert refusals(graph, RULE, "recognise") == ["the erf inside this gelu is also read elsewhere"]
    bottom = add(1, map_("exponential", negate(x)))
    graph = graph_of(div(1, bottom), bottom)
    rule = "one_plus_exp_of_minus_x_divides_as_logistic"
    assert refusals(graph, rule, "recognise") == ["the add inside this logistic is also read elsewhere"]


@pytest.mark.parametrize(
    ("spelling", "why"),
    [
        (lambda x: mul(mul(0.5, x), add(1, erf(mul(x, 0.7071)))), "its constant 0.7071 is not gelu's 0.7071068"),
        (lambda x: mul(x, map_("logistic", mul(1.01, x))), "its constant 1.01 is not silu's 1"),
        (
            lambda x: mul(mul(0.5, x), add(1, tanh(mul(0.8, add(x, mul(0.044715, cube(x))))))),
            "its constant 0.8 is not gelu_tanh's 0.7978846",
        ),
    ],
)
def test_constants_beside_the_ideal_are_refused(spelling: Spelling, why: str):
    graph = graph_of(spelling(input_("x", F32, (4,))))
    assert refusals(graph, RULE, "recognise") == [why]
    assert staged(graph, "recognise").outputs == graph.outputs


@pytest.mark.parametrize(
    "spelling",
    [
        lambda x: mul(x, map_("logistic", mul(1.702, x))),  # another approximation of gelu, and a function of its own
        lambda x: mul(mul(0.5, x), add(2, erf(div(x, ROOT)))),
        lambda x: mul(mul(0.5, x), add(1, mul(3, erf(div(x, ROOT))))),
        lambda x: mul(mul(0.5, x), add(1, erf(x))),
        lambda x: mul(mul(0.5, x), add(1, tanh(mul(SCALE, add(x, mul(0.044715, mul(x, x))))))),
        lambda x: mul(mul(mul(0.5, x), x), add(1, erf(div(x, ROOT)))),
        lambda x: div(1, add(2, map_("exponential", negate(x)))),
        lambda x: div(1, add(1, map_("exponential", x))),
    ],
)
def test_other_arithmetic_is_left_alone(spelling: Spelling):
    graph = graph_of(spelling(input_("x", F32, (4,))))
    after = staged(graph, "recognise")
    assert after.outputs == graph.outputs


def test_another_variable_outside_is_no_activation():
    x, y = input_("x", F32, (4,)), input_("y", F32, (4,))
    graph = graph_of(mul(mul(0.5, y), add(1, erf(div(x, ROOT)))))
    assert staged(graph, "recognise").outputs == graph.outputs


def test_the_variable_may_itself_be_arithmetic():
    x, b = input_("x", F32, (6, 4)), input_("b", F32, (4,))
    for inner in (add(x, b), mul(x, 2.0), mul(x, x)):
        before = graph_of(GELU["half first, divided"](inner))
        after = staged(before, "recognise")
        assert after.outputs == (map_("gelu", inner),)
        assert_close(before, after, 1e-6)


def test_a_factor_left_over_stays_a_factor():
    x = input_("x", F32, (9,))
    before = graph_of(mul(x, add(1, erf(div(x, ROOT)))))
    after = staged(before, "recognise")
    assert after.outputs == (mul(map_("gelu", x), 2.0),)
    assert_close(before, after, 1e-6)
    assert_no_growth(before, after)


def test_a_gate_keeps_its_other_factor():
    x, up = input_("x", F32, (9,)), input_("up", F32, (9,))
    assert staged(graph_of(mul(mul(x, map_("logistic", x)), up)), "recognise").outputs == (mul(map_("silu", x), up),)
    before = graph_of(div(up, add(1, map_("exponential", negate(x)))))
    after = staged(before, "recognise")
    assert after.outputs == (mul(up, map_("logistic", x)),)
    assert_close(before, after, 1e-6)


def test_factors_that_do_not_undo_each_other_stay():
    gelu = map_("gelu", input_("x", F32, (4,)))
    for a, b in ((2.0, 0.25), (3.0, 1 / 3), (10.0, 0.1)):
        graph = graph_of(mul(mul(gelu, a), b))
        assert staged(graph, "recognise").outputs == graph.outputs
    assert staged(graph_of(mul(0.5, mul(2.0, gelu))), "recognise").outputs == (gelu,)


def test_relu_is_exact_for_every_type_that_has_a_sign():
    for dtype in (F32, F64, BF16, F16, S8, S32):
        x = input_("x", dtype, (4, 9))
        for out in (map_("maximum", x, const(0, dtype)), map_("maximum", broadcast(const(0, dtype), (4, 9)), x)):
            before = graph_of(out)
            after = staged(before, "unfuse")
            assert after.outputs == (map_("relu", x),)
            assert_exact(before, after)
    unsigned = graph_of(map_("maximum", input_("x", U8, (4,)), const(3, U8)))
    assert staged(unsigned, "unfuse").outputs == unsigned.outputs


def test_relu_keeps_nan_and_infinities():
    x = input_("x", F32, (4,))
    before = graph_of(map_("maximum", x, const(0.0, F32)))
    value = torch.tensor([math.nan, math.inf, -math.inf, -1.0])
    (a,), (b,) = (evaluate(g, [value]) for g in (before, staged(before, "unfuse")))
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a[1:], b[1:])


def bounds(x: Node, low: float, high: float) -> dict[str, Node]:
    lo, hi = const(low, x.dtype), const(high, x.dtype)
    return {
        "low first": map_("minimum", map_("maximum", x, lo), hi),
        "high first": map_("maximum", lo, map_("minimum", hi, x)),
    }


@pytest.mark.parametrize("dtype", [F32, BF16, S8, U8, S32], ids=str)
@pytest.mark.parametrize(("low", "high"), [(0, 6), (1, 5), (3, 3)])
def test_two_bounds_are_a_clamp_exactly(dtype: DType, low: int, high: int):
    x = input_("x", dtype, (64,))
    for out in bounds(x, low, high).values():
        before = graph_of(out)
        after = assert_order_is_free(before, "recognise", orders=6)
        (found,) = after.outputs
        if low <= dtype.min:  # that bound alone changes nothing
            assert found.op.fn == "minimum" and {*found.src} == {x, const(high, dtype)}
        else:
            assert found is map_("clamp", const(low, dtype), x, const(high, dtype))
        assert_exact(before, after)
        assert_no_growth(before, after)


@pytest.mark.parametrize("dtype", [F32, S32], ids=str)
def test_relu_then_a_bound_is_a_clamp_of_integers(dtype: DType):
    x = input_("x", dtype, (8,))
    for out in (map_("minimum", map_("relu", x), const(6, dtype)), map_("relu", map_("minimum", x, const(6, dtype)))):
        before = graph_of(out)
        after = staged(before, "recognise")
        assert after.outputs == ((map_("clamp", const(0, dtype), x, const(6, dtype)),) if dtype is S32 else (out,))
        assert_exact(before, after)


def test_bounds_of_minus_zero_keep_their_sign():
    x = input_("x", F32, (8,))
    low = map_("maximum", x, const(-0.0, F32))
    assert staged(graph_of(low), "recognise", "unfuse").outputs == (low,)
    both = staged(graph_of(map_("maximum", map_("minimum", x, const(-0.0, F32)), const(-1.0, F32))), "recognise")
    assert both.outputs == (map_("clamp", const(-1.0, F32), x, const(-0.0, F32)),)


def test_bounds_the_wrong_way_round_or_read_elsewhere_stay():
    rule = "bounds_on_both_sides_are_a_clamp"
    x = input_("x", F32, (8,))
    for out in bounds(x, 5.0, 1.0).values():
        before = graph_of(out)
        assert refusals(before, rule, "recognise") == ["its lower bound 5 is above its upper bound 1"]
        assert staged(before, "recognise").outputs == before.outputs
    inner = map_("maximum", x, const(1.0, F32))
    before = graph_of(map_("minimum", inner, const(5.0, F32)), inner)
    assert refusals(before, rule, "recognise") == ["the maximum inside this clamp is also read elsewhere"]
    other = graph_of(map_("minimum", map_("maximum", x, input_("y", F32, (8,))), const(5.0, F32)))
    assert staged(other, "recognise").outputs == other.outputs


# The expansion of erfc that XLA writes.


@pytest.fixture(scope="module", params=["float32", "float64"])
def expanded(request: pytest.FixtureRequest) -> Graph:
    import jax

    x = jax.ShapeDtypeStruct((6, 8), request.param)
    text = jax.jit(jax.scipy.special.erfc).lower(x).as_text(dialect="hlo")
    graph = load(text, LoadOptions())
    assert sum(n.op.name in ("map", "select") for n in graph.nodes()) > 40, "XLA no longer expands erfc"
    return graph


def test_expansion_of_erfc_is_recognised(expanded: Graph):
    after = assert_order_is_free(expanded, "recognise", orders=3)
    assert only_function(after) == "erfc"
    dtype = expanded.inputs[0].dtype
    edges = torch.from_numpy(specials(dtype))
    value = torch.cat([edges, torch.linspace(-8, 30, 48 - len(edges), dtype=edges.dtype)]).reshape(6, 8)
    (a,), (b,) = (evaluate(g, [value]) for g in (expanded, after))
    assert torch.equal(a.isnan(), b.isnan()) and a.isnan().any()
    assert torch.allclose(a, b, rtol=1000 * dtype.epsilon, atol=torch.finfo(a.dtype).tiny, equal_nan=True)


def test_an_expansion_with_one_coefficient_off_is_not_erfc(expanded: Graph):
    numbers = [n for n in expanded.nodes() if n.op.name == "const" and n.dtype.is_float and n.tensor.elements == 1]
    changed = 0
    for number in numbers:
        value = number.op.data.scalar()
        if value in (0.0, 1.0, 2.0) or abs(value) > 50 or not math.isfinite(value):
            continue
        near = substitute(expanded.outputs, {number: const(value * 1.01, number.dtype)})
        after = staged(Graph("g", expanded.inputs, tuple(near), ("y",)), "recognise")
        assert not any(getattr(n.op, "fn", "") == "erfc" for n in after.nodes())
        changed += 1
        if changed == 6:
            return
    assert changed


def test_an_expansion_of_which_a_part_is_read_stays(expanded: Graph):
    part = next(n for n in expanded.nodes() if getattr(n.op, "fn", "") == "exponential")
    graph = graph_of(*expanded.outputs, part)
    assert refusals(graph, "expansion_of_erfc_is_erfc", "recognise") == ["what this erfc is expanded to is also read elsewhere"]


def test_selection_by_magnitude_is_not_taken_for_erfc():
    x = input_("x", F32, (4,))
    test = map_("less", map_("abs", x), const(1.0, F32))
    graph = graph_of(Node(Select(), test, mul(x, x), add(x, 3.0)))
    assert staged(graph, "recognise").outputs == graph.outputs


def test_random_values_of_all_magnitudes_agree():
    """Beyond the normal inputs of the tests above: magnitudes from 2**-4 to 2**4, no specials."""
    import numpy as np

    values = torch.from_numpy(random_array(F32, (4096,), np.random.default_rng(5), special=0.0))
    x = input_("x", F32, (4096,))
    for fn, spellings in (("gelu", GELU), ("gelu_tanh", GELU_TANH), ("silu", SILU), ("logistic", LOGISTIC)):
        for spelling in spellings.values():
            before = graph_of(spelling(x))
            (a,), (b,) = (evaluate(g, [values]) for g in (before, staged(before, "recognise")))
            # Far out on the left 1 + erf cancels: the spelling loses digits there, absolutely no more than x * epsilon.
            assert ((a - b).abs() <= 4e-6 * values.abs().clamp(min=1)).all(), fn


def test_casts_around_arithmetic_do_not_hide_it():
    """XLA without bf16 arithmetic computes each step in f32 and rounds after it."""
    x = input_("x", BF16, (6, 4))

    def step(fn: str, *args: Node) -> Node:
        return convert(map_(fn, *(convert(a, F32) for a in args)), BF16)

    def number(value: float) -> Node:
        return const(value, BF16)

    half = step("multiply", x, number(0.5))
    inner = step("erf", step("multiply", x, number(math.sqrt(0.5))))
    before = graph_of(step("multiply", half, step("add", inner, number(1.0))))
    after = staged(before, "recognise")
    assert only_function(after) == "gelu"
    assert_close(before, after, 4 * BF16.epsilon)
