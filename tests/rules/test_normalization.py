"""Layer norm, RMS norm and softmax recognised from what exporters and XLA write; not from what only looks like them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from rule_checks import assert_close, assert_exact, assert_no_growth, assert_order_is_free, graph_of, refusals, staged

from tilewright.dtype import BF16, F16, F32, F64, DType
from tilewright.ir.build import const, convert, input_, map_, reduce_, reshape
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import LayerNorm, Select, Softmax

NORM = "dividing_by_root_mean_square_is_a_norm"
SOFTMAX = "exponentials_divided_by_their_sum_are_a_softmax"
EPSILON = 1e-5


def op(fn: str, *args: Node | float) -> Node:
    like = next(a for a in args if isinstance(a, Node))
    return map_(fn, *(a if isinstance(a, Node) else const(a, like.dtype) for a in args))


# The parts of a norm, each in the ways it is written.


def mean_reduced(x: Node, axes: Sequence[int]) -> Node:
    return reduce_("mean", x, axes, keepdims=True)


def mean_dropping_axes(x: Node, axes: Sequence[int]) -> Node:
    return reshape(reduce_("mean", x, axes), [1 if a in axes else d for a, d in enumerate(x.shape)])


def mean_as_quotient(x: Node, axes: Sequence[int]) -> Node:
    return op("divide", reduce_("add", x, axes, keepdims=True), float(math.prod(x.shape[a] for a in axes)))


def mean_as_product(x: Node, axes: Sequence[int]) -> Node:
    flat = op("multiply", reduce_("add", x, axes), 1 / math.prod(x.shape[a] for a in axes))
    return reshape(flat, [1 if a in axes else d for a, d in enumerate(x.shape)])


MEANS = {f.__name__: f for f in (mean_reduced, mean_dropping_axes, mean_as_quotient, mean_as_product)}
SQUARES: dict[str, Callable[[Node], Node]] = {
    "product": lambda x: op("multiply", x, x),
    "power": lambda x: op("power", x, 2.0),
}
ROOTS: dict[str, Callable[[Node, Node], Node]] = {
    "divide by sqrt": lambda y, v: op("divide", y, op("sqrt", v)),
    "times rsqrt": lambda y, v: op("multiply", y, op("rsqrt", v)),
    "rsqrt times": lambda y, v: op("multiply", op("rsqrt", v), y),
    "times reciprocal of sqrt": lambda y, v: op("multiply", y, op("divide", 1.0, op("sqrt", v))),
    "times power": lambda y, v: op("multiply", y, op("power", v, -0.5)),
    "divide by power": lambda y, v: op("divide", y, op("power", v, 0.5)),
}


@dataclass(frozen=True)
class Spelling:
    """One way to write a norm over the last axis."""

    mean: str = "mean_reduced"
    square: str = "product"
    root: str = "times rsqrt"
    epsilon: float = EPSILON

    def rms(self, y: Node) -> Node:
        variance = MEANS[self.mean](SQUARES[self.square](y), [len(y.shape) - 1])
        return ROOTS[self.root](y, op("add", variance, self.epsilon))

    def layer(self, x: Node) -> Node:
        return self.rms(op("subtract", x, MEANS[self.mean](x, [len(x.shape) - 1])))


SPELLINGS = [Spelling(*c) for c in itertools.product(MEANS, SQUARES, ROOTS)]


def show(s: Spelling) -> str:
    return f"{s.mean}, {s.square}, {s.root}"


def norm_of(graph: Graph) -> tuple[LayerNorm, tuple[Node, ...]]:
    (out,) = graph.outputs
    assert isinstance(out.op, LayerNorm), out
    return out.op, out.src


@pytest.mark.parametrize("spelling", SPELLINGS, ids=show)
def test_every_spelling_of_rms_norm(spelling: Spelling):
    x = input_("x", F32, (3, 5, 24))
    before = graph_of(spelling.rms(x))
    after = staged(before, "recognise")
    found, src = norm_of(after)
    assert (found.axis, found.center, src) == (2, False, (x,))
    assert found.epsilon == pytest.approx(EPSILON)
    assert_close(before, after, 1e-6)
    assert_no_growth(before, after)


@pytest.mark.parametrize("spelling", SPELLINGS, ids=show)
def test_every_spelling_of_layer_norm(spelling: Spelling):
    x, s, b = input_("x", F32, (3, 5, 24)), input_("s", F32, (24,)), input_("b", F32, (1, 1, 24))
    before = graph_of(op("add", op("multiply", spelling.layer(x), s), b))
    after = staged(before, "recognise")
    found, src = norm_of(after)
    assert (found.axis, found.center, src) == (2, True, (x, s, b))
    assert_close(before, after, 2e-6)
    assert_no_growth(before, after)


@pytest.mark.parametrize("spelling", SPELLINGS[:: len(ROOTS) + 1], ids=show)
def test_order_of_rules_does_not_matter(spelling: Spelling):
    x, s, b = input_("x", F32, (3, 8)), input_("s", F32, (8,)), input_("b", F32, (8,))
    norm_of(assert_order_is_free(graph_of(op("add", op("multiply", spelling.layer(x), s), b)), "recognise", orders=8))


def difference_of_squares(x: Node, s: Node, b: Node, *, clamp: bool) -> Node:
    mean = mean_as_quotient(x, [len(x.shape) - 1])
    variance = op("subtract", mean_as_quotient(op("multiply", x, x), [len(x.shape) - 1]), op("multiply", mean, mean))
    if clamp:
        variance = op("maximum", 0.0, variance)
    scale = op("multiply", op("rsqrt", op("add", variance, EPSILON)), s)
    return op("add", op("multiply", op("subtract", x, mean), scale), b)


@pytest.mark.parametrize("clamp", [False, True])
def test_variance_as_difference_of_squares(clamp: bool):
    """Flax computes it so, and multiplies the scale into the deviation first."""
    x, s, b = input_("x", F32, (4, 6, 32)), input_("s", F32, (32,)), input_("b", F32, (32,))
    before = graph_of(difference_of_squares(x, s, b, clamp=clamp))
    after = assert_order_is_free(before, "recognise", orders=6)
    found, src = norm_of(after)
    assert found.center and src == (x, s, b)
    assert_close(before, after, 1e-5)
    assert_no_growth(before, after)


def test_shift_spread_out_as_tensorflow_writes_it():
    x, s, b = input_("x", F32, (4, 6, 32)), input_("s", F32, (32,)), input_("b", F32, (32,))
    mean = mean_reduced(x, [2])
    centred = op("subtract", x, mean)
    variance = mean_reduced(op("multiply", centred, centred), [2])
    factor = op("multiply", op("rsqrt", op("add", variance, 1e-12)), s)
    before = graph_of(op("add", op("multiply", x, factor), op("subtract", b, op("multiply", mean, factor))))
    after = assert_order_is_free(before, "recognise", orders=6)
    found, src = norm_of(after)
    assert found.center and src == (x, s, b)
    assert_close(before, after, 1e-5)
    assert_no_growth(before, after)


def test_over_several_last_axes_and_without_epsilon():
    x = input_("x", F32, (4, 3, 5))
    axes = [1, 2]
    centred = op("subtract", x, mean_as_quotient(x, axes))
    before = graph_of(op("divide", centred, op("sqrt", mean_as_quotient(op("multiply", centred, centred), axes))))
    after = staged(before, "recognise")
    found, src = norm_of(after)
    assert (found.axis, found.center, found.epsilon, src) == (1, True, 0.0, (x,))
    assert_close(before, after, 1e-6)


def test_a_constant_row_and_odd_extents_give_what_they_gave():
    for shape in ((2, 1), (1, 7), (3, 0), (0, 4), (5, 13)):
        x = input_("x", F32, shape)
        before = graph_of(Spelling().layer(x))
        after = staged(before, "recognise")
        for value in (torch.full(shape, 3.25), torch.randn(shape)):
            (a,), (b,) = (evaluate(g, [value]) for g in (before, after))
            assert torch.allclose(a, b, atol=1e-6, equal_nan=True)


# Scale, bias, casts.


def test_scale_and_bias_join_a_norm_that_has_none():
    x, s, b = input_("x", F32, (4, 8)), input_("s", F32, (8,)), input_("b", F32, (8,))
    norm = Node(LayerNorm(1, EPSILON), x)
    before = graph_of(op("add", b, op("multiply", s, norm)))
    after = assert_order_is_free(before, "recognise", orders=4)
    assert norm_of(after)[1] == (x, s, b)
    assert_exact(before, after)
    assert_no_growth(before, after)
    biased = graph_of(op("add", norm, b))
    after = staged(biased, "recognise")
    assert norm_of(after)[1] == (x, const(1, F32), b)
    assert_exact(biased, after)


@pytest.mark.parametrize(
    "tail",
    [
        lambda x, n: op("multiply", n, x),  # a gate, not a vector
        lambda x, n: op("multiply", n, input_("r", F32, (4, 1))),  # varies over rows
        lambda x, n: op("multiply", n, 2.0),
        lambda x, n: op("add", n, x),  # a residual
        lambda x, n: op("multiply", n, input_("w", F32, (3, 4, 8))),
        lambda x, n: op("multiply", n, n),
    ],
)
def test_what_is_no_vector_is_no_scale(tail: Callable[[Node, Node], Node]):
    x = input_("x", F32, (4, 8))
    graph = graph_of(tail(x, Node(LayerNorm(1, EPSILON), x)))
    assert staged(graph, "recognise").outputs == graph.outputs


def test_scale_stays_outside_where_the_norm_is_also_read_without_it():
    x, s = input_("x", F32, (4, 8)), input_("s", F32, (8,))
    norm = Node(LayerNorm(1, EPSILON), x)
    graph = graph_of(op("multiply", norm, s), norm)
    assert refusals(graph, "vector_times_norm_is_its_scale", "recognise") == ["the norm is also read without it"]
    assert staged(graph, "recognise").outputs == graph.outputs


def test_a_second_scale_or_a_third_operand_stays_outside():
    x, s, t = input_("x", F32, (4, 8)), input_("s", F32, (8,)), input_("t", F32, (8,))
    scaled = Node(LayerNorm(1, EPSILON), x, s)
    for out in (op("multiply", scaled, t), op("add", Node(LayerNorm(1, EPSILON), x, s, t), t)):
        graph = graph_of(out)
        assert staged(graph, "recognise").outputs == graph.outputs


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_norm_computed_in_f32_between_casts(dtype: DType):
    """transformers' RMSNorm: to f32, normalise, back, times weight."""
    x, w = input_("x", dtype, (4, 6, 32)), input_("w", dtype, (32,))
    bare = graph_of(convert(Spelling(square="power", epsilon=1e-6).rms(convert(x, F32)), dtype))
    after = assert_order_is_free(bare, "recognise", orders=6)
    assert norm_of(after)[1] == (x,)
    assert_close(bare, after, dtype.epsilon / 2)
    scaled = graph_of(op("multiply", w, bare.outputs[0]))
    after = assert_order_is_free(scaled, "recognise", orders=6)
    found, src = norm_of(after)
    assert src == (x, w) and not found.center
    assert_close(scaled, after, 2 * dtype.epsilon)
    assert_no_growth(scaled, after)


def test_casts_around_an_f32_norm_are_exact():
    x, w, b = input_("x", BF16, (16, 64)), input_("w", BF16, (64,)), input_("b", BF16, (64,))
    wide = Node(LayerNorm(1, EPSILON), *(convert(n, F32) for n in (x, w, b)))
    before = graph_of(convert(wide, BF16))
    after = staged(before, "recognise")
    assert norm_of(after)[1] == (x, w, b)
    assert_exact(before, after)


def test_casts_stay_where_they_are_not_exact_or_the_norm_is_read_in_f32():
    rule = "norm_between_casts_is_the_norm_of_what_is_cast"
    x, w = input_("x", BF16, (4, 8)), input_("w", F32, (8,))
    graph = graph_of(convert(Node(LayerNorm(1, EPSILON), convert(x, F32), w), BF16))
    assert refusals(graph, rule, "recognise") == ["its scale or bias is f32, its result bf16"]
    wide = Node(LayerNorm(1, EPSILON), convert(x, F32))
    graph = graph_of(convert(wide, BF16), wide)
    assert refusals(graph, rule, "recognise") == ["the norm is also read in f32"]
    other = graph_of(convert(wide, F16))
    assert staged(other, "recognise").outputs == other.outputs


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_norm_written_in_a_narrow_type_with_wide_sums(dtype: DType):
    """JAX sums bf16 in f32 and rounds each mean."""
    x = input_("x", dtype, (4, 6, 32))

    def mean(v: Node) -> Node:
        return convert(mean_as_quotient(convert(v, F32), [2]), dtype)

    centred = op("subtract", x, mean(x))
    before = graph_of(op("divide", centred, op("sqrt", op("add", mean(op("multiply", centred, centred)), EPSILON))))
    after = assert_order_is_free(before, "recognise", orders=6)
    found, src = norm_of(after)
    assert found.center and src == (x,)
    assert_close(before, after, 4 * dtype.epsilon)


# Where it must not fire.


def unlike() -> dict[str, tuple[Node, list[str]]]:
    x, y = input_("x", F32, (4, 8)), input_("y", F32, (4, 8))
    centred = op("subtract", x, mean_reduced(x, [1]))
    square = op("multiply", centred, centred)
    sample = op("divide", reduce_("add", square, [1], keepdims=True), 7.0)

    def mean_square(v: Node, axis: int = 1) -> Node:
        return op("add", mean_reduced(op("multiply", v, v), [axis]), EPSILON)

    return {
        "sample variance": (
            op("divide", centred, op("sqrt", op("add", sample, EPSILON))),
            ["its mean divides the sum by 7, not by 8"],
        ),
        "epsilon after the root": (
            op("divide", centred, op("add", op("sqrt", mean_reduced(square, [1])), EPSILON)),
            ["its epsilon is added after the root, not under it"],
        ),
        "over the first axis": (
            op("divide", x, op("sqrt", mean_square(x, axis=0))),
            ["it normalises over axes [0] of 2, which are not the last"],
        ),
        "length, not mean": (op("divide", x, op("sqrt", reduce_("add", op("multiply", x, x), [1], keepdims=True))), []),
        "of another value": (op("divide", y, op("sqrt", mean_square(x))), []),
        "cube": (op("divide", x, op("sqrt", mean_reduced(op("power", x, 3.0), [1]))), []),
        "product of two": (op("divide", x, op("sqrt", mean_reduced(op("multiply", x, y), [1]))), []),
        "times the root": (op("multiply", x, op("sqrt", mean_square(x))), []),
        "quarter power": (op("multiply", x, op("power", mean_square(x), -0.25)), []),
        "deviation twice": (
            op("divide", op("divide", x, op("sqrt", mean_square(x))), op("sqrt", mean_square(x))),
            ["the sqrt inside this norm is also read elsewhere"],
        ),
        "deviation squared": (
            op("multiply", op("multiply", x, op("rsqrt", mean_square(x))), op("rsqrt", mean_square(x))),
            ["the rsqrt inside this norm is also read elsewhere"],
        ),
    }


@pytest.mark.parametrize("name", unlike())
def test_what_only_looks_like_a_norm_stays(name: str):
    out, why = unlike()[name]
    graph = graph_of(out)
    assert refusals(graph, NORM, "recognise") == why
    after = staged(graph, "recognise")
    assert not any(isinstance(n.op, LayerNorm) for n in after.nodes())
    assert_close(graph, after, 1e-6)


def test_a_deviation_of_rows_multiplied_to_columns_is_no_norm():
    """Square, so that the row value also broadcasts the wrong way."""
    x = input_("x", F32, (6, 6))
    row = reshape(op("rsqrt", op("add", reduce_("mean", op("multiply", x, x), [1]), EPSILON)), (1, 6))
    graph = graph_of(op("multiply", x, row))
    assert staged(graph, "recognise").outputs == graph.outputs


def test_a_norm_of_which_a_part_is_read_stays():
    x = input_("x", F32, (4, 8))
    deviation = op("rsqrt", op("add", mean_reduced(op("multiply", x, x), [1]), EPSILON))
    graph = graph_of(op("multiply", x, deviation), deviation)
    assert refusals(graph, NORM, "recognise") == ["the rsqrt inside this norm is also read elsewhere"]
    assert staged(graph, "recognise").outputs == graph.outputs


def test_a_mean_that_is_read_leaves_an_rms_norm_of_the_difference():
    """Not a layer norm: the mean would be computed twice."""
    rule = "norm_of_what_is_centred_centres_it"
    x = input_("x", F32, (4, 8))
    mean = mean_reduced(x, [1])
    before = graph_of(Spelling().rms(op("subtract", x, mean)), mean)
    assert refusals(before, rule, "recognise") == ["the mean or what it is taken from is also read elsewhere"]
    after = staged(before, "recognise")
    found = after.outputs[0].op
    assert isinstance(found, LayerNorm) and not found.center
    assert_close(before, after, 1e-6)
    assert_no_growth(before, after, bytes_too=False)


def test_the_input_may_have_other_readers():
    x = input_("x", F32, (4, 8))
    before = graph_of(op("add", Spelling().layer(x), x), op("tanh", x))
    after = staged(before, "recognise")
    assert sum(isinstance(n.op, LayerNorm) for n in after.nodes()) == 1
    assert_close(before, after, 1e-6)
    assert_no_growth(before, after)


# Softmax.


def total(e: Node, axis: int) -> Node:
    return reshape(reduce_("add", e, [axis]), [1 if a == axis else d for a, d in enumerate(e.shape)])


def shifted(x: Node, axis: int, *, stop_gradient: bool = False, finite: bool = False) -> Node:
    peak = reduce_("maximum", x, [axis])
    if stop_gradient:
        peak = op("maximum", -math.inf, peak)
    if finite:
        peak = Node(Select(), map_("is_finite", peak), peak, const(0.0, x.dtype))
    return op("subtract", x, reshape(peak, [1 if a == axis else d for a, d in enumerate(x.shape)]))


def softmax(z: Node, axis: int) -> Node:
    e = op("exponential", z)
    return op("divide", e, total(e, axis))


def softmax_by_reciprocal(z: Node, axis: int) -> Node:
    e = op("exponential", z)
    return op("multiply", op("divide", 1.0, total(e, axis)), e)


@pytest.mark.parametrize("form", [softmax, softmax_by_reciprocal])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("wrinkle", [{}, {"stop_gradient": True}, {"finite": True}], ids=str)
@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
def test_every_spelling_of_softmax(form: Callable[[Node, int], Node], axis: int, wrinkle: dict[str, bool], dtype: DType):
    x = input_("x", dtype, (3, 5, 7))
    before = graph_of(form(shifted(x, axis, **wrinkle), axis))
    after = assert_order_is_free(before, "recognise", orders=4)
    assert after.outputs == (Node(Softmax(axis), x),)
    assert_close(before, after, 4 * max(dtype.epsilon, F32.epsilon))
    assert_no_growth(before, after)


def test_rows_that_see_nothing_stay_nan():
    x = input_("x", F32, (3, 4))
    value = torch.tensor([[-math.inf] * 4, [0.0, -math.inf, 1.0, 2.0], [math.nan, 0.0, 0.0, 0.0]])
    for wrinkle in ({}, {"stop_gradient": True}, {"finite": True}):
        before = graph_of(softmax(shifted(x, 1, **wrinkle), 1))
        after = staged(before, "recognise")
        assert after.outputs == (Node(Softmax(1), x),)
        (a,), (b,) = (evaluate(g, [value]) for g in (before, after))
        assert torch.equal(a.isnan(), b.isnan()) and a[0].isnan().all()
        assert torch.allclose(a, b, atol=1e-7, equal_nan=True)


def test_softmax_without_a_maximum_is_a_softmax_that_does_not_overflow():
    x = input_("x", F32, (3, 8))
    before = graph_of(softmax(x, 1))
    after = staged(before, "recognise")
    assert after.outputs == (Node(Softmax(1), x),)
    assert_close(before, after, 1e-6)
    (far,) = evaluate(after, [torch.full((3, 8), 1e4)])
    assert torch.equal(far, torch.full((3, 8), 0.125))


@pytest.mark.parametrize("dtype", [F32, F64, BF16], ids=str)
def test_log_softmax(dtype: DType):
    x = input_("x", dtype, (3, 5, 7))
    z = shifted(x, 2, stop_gradient=True)
    before = graph_of(op("subtract", z, op("log", total(op("exponential", z), 2))))
    after = assert_order_is_free(before, "recognise", orders=4)
    assert after.outputs == (Node(Softmax(2, log=True), x),)
    assert_close(before, after, 4 * max(dtype.epsilon, F32.epsilon))
    assert_no_growth(before, after)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_softmax_in_f32_between_casts(dtype: DType):
    x = input_("x", dtype, (4, 33))
    before = graph_of(convert(softmax(shifted(convert(x, F32), 1), 1), dtype))
    after = assert_order_is_free(before, "recognise", orders=4)
    assert after.outputs == (Node(Softmax(1), x),)
    exact = graph_of(convert(Node(Softmax(1), convert(x, F32)), dtype))
    assert staged(exact, "recognise").outputs == after.outputs
    assert_exact(exact, after)
    wide = Node(Softmax(1), convert(x, F32))
    both = graph_of(convert(wide, dtype), wide)
    rule = "softmax_between_casts_is_the_softmax_of_what_is_cast"
    assert refusals(both, rule, "recognise") == ["the softmax is also read in f32"]


def test_softmax_stays_where_parts_are_read_or_axes_differ():
    x = input_("x", F32, (4, 4))
    e = op("exponential", x)
    read = graph_of(op("divide", e, total(e, 1)), e)
    assert refusals(read, SOFTMAX, "recognise") == ["the exponentials inside this softmax are also read elsewhere"]
    assert staged(read, "recognise").outputs == read.outputs
    both_axes = graph_of(op("divide", e, reduce_("add", e, [0, 1], keepdims=True)))
    assert refusals(both_axes, SOFTMAX, "recognise") == ["it sums over 2 axes, a softmax over one"]
    turned = graph_of(op("divide", e, reshape(reduce_("add", e, [1]), (1, 4))))  # row sums laid along columns
    assert staged(turned, "recognise").outputs == turned.outputs
    other = op("exponential", input_("y", F32, (4, 4)))
    mixed = graph_of(op("divide", e, total(other, 1)))
    assert staged(mixed, "recognise").outputs == mixed.outputs
    z = op("subtract", x, reduce_("maximum", x, [1], keepdims=True))
    log = graph_of(op("subtract", z, op("log", total(op("exponential", z), 1))), op("exponential", z))
    rule = "subtracting_log_of_sum_of_exponentials_is_a_log_softmax"
    assert refusals(log, rule, "recognise") == ["the exponentials inside this log softmax are also read elsewhere"]


def test_only_the_maximum_of_the_same_rows_is_dropped():
    x, y = input_("x", F32, (4, 4)), input_("y", F32, (4, 4))
    for row in (
        reduce_("maximum", x, [0], keepdims=True),
        reduce_("minimum", x, [1], keepdims=True),
        reduce_("maximum", y, [1], keepdims=True),
        reshape(reduce_("maximum", x, [1]), (1, 4)),
        y,
    ):
        graph = graph_of(Node(Softmax(1), op("subtract", x, row)))
        assert staged(graph, "recognise").outputs == graph.outputs
    peak = op("subtract", x, reduce_("maximum", x, [1], keepdims=True))
    graph = graph_of(Node(Softmax(1), peak), peak)
    rule = "softmax_subtracts_the_maximum_itself"
    assert refusals(graph, rule, "recognise") == ["what its maximum is subtracted from is also read elsewhere"]
