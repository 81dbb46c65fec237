"""Reductions, softmax and layer norm against exact arithmetic, XLA and torch."""

import functools
import math
import operator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from values import ALL, FLOATS, INTEGERS, WIDE, assert_same, from_numpy, random_array, run, value_of

from tilewright.dtype import BF16, F8E4M3FN, F16, F32, F64, PRED, S8, S32, U64
from tilewright.errors import TypeMismatchError
from tilewright.ir.build import const, input_, reduce_
from tilewright.ir.graph import Node
from tilewright.ir.ops import LayerNorm, Reduce, Softmax

shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5]), max_size=4).map(tuple)
FNS = ("add", "multiply", "maximum", "minimum", "and", "or", "mean")
WHOLE = {
    "add": (operator.add, 0),
    "multiply": (operator.mul, 1),
    "maximum": (max, None),
    "minimum": (min, None),
    "and": (operator.and_, -1),
    "or": (operator.or_, 0),
}


def cells(x, axes, keepdims):
    """Each result's index and the elements that make it."""
    kept = [a for a in range(x.ndim) if a not in axes]
    shape = [1 if a in axes else x.shape[a] for a in range(x.ndim)] if keepdims else [x.shape[a] for a in kept]
    return shape, x.transpose([*kept, *axes]).reshape(math.prod(shape), math.prod(x.shape[a] for a in axes))


def drawn(data, shape):
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1))) if shape else set()
    return tuple(sorted(axes)), data.draw(st.booleans())


@given(st.sampled_from(INTEGERS), st.sampled_from(FNS[:6]), shapes, st.data())
def test_integers_reduce_exactly_and_wrap(d, fn, shape, data):
    x = random_array(d, shape, np.random.default_rng(0))
    axes, keepdims = drawn(data, shape)
    got = run(Reduce(fn, axes, keepdims), (x, d))
    wanted_shape, rows = cells(x, axes, keepdims)
    assert got.shape == tuple(wanted_shape)
    f, start = WHOLE[fn]
    start = int(d.min if fn == "maximum" else d.max) if start is None else start
    for g, row in zip(got.reshape(-1).tolist(), rows, strict=True):
        total = functools.reduce(f, map(int, row.tolist()), start)
        assert int(g) == (total - int(d.min)) % (1 << d.bits) + int(d.min)


def extreme(fn, row):
    """The maximum or minimum of a row, where -0 lies below +0; NumPy gives either."""
    found = np.max(row) if fn == "maximum" else np.min(row)
    if found == 0:
        signs = np.signbit(row[row == 0])
        return -0.0 if (signs.all() if fn == "maximum" else signs.any()) else 0.0
    return found


@given(
    st.sampled_from([d for d in FLOATS if d.holds(math.nan)]),
    st.sampled_from(("add", "multiply", "maximum", "minimum", "mean")),
    shapes,
    st.data(),
)
def test_floats_reduce_in_f32_or_wider_and_round_once(d, fn, shape, data):
    # A product of huge and tiny numbers leaves f32 on its way or not, by the order in which it is taken.
    special = data.draw(st.sampled_from([0.0, 0.0, 0.2 * (fn != "multiply")]))
    x = random_array(d, shape, np.random.default_rng(1), special=special)
    axes, keepdims = drawn(data, shape)
    got = run(Reduce(fn, axes, keepdims), (x, d))
    if not axes:
        assert_same(got, x)
        return
    wanted_shape, rows = cells(x.astype(np.float64), axes, keepdims)
    assert got.shape == tuple(wanted_shape)
    with np.errstate(all="ignore"):
        if fn in ("maximum", "minimum"):
            worst = float(d.lowest if fn == "maximum" else d.highest)
            wanted = np.array([extreme(fn, r) if r.size else worst for r in rows])
            assert_same(got, wanted.reshape(got.shape).astype(d.to_numpy()))
            return
        f = {"add": np.sum, "multiply": np.prod, "mean": lambda r: np.sum(r) / r.size if r.size else np.nan}[fn]
        wanted = np.array([f(r) for r in rows]).reshape(got.shape)
        slack = np.array([np.abs(r).sum() if fn != "multiply" else np.abs(f(r)) for r in rows]).reshape(got.shape)
        rounded = wanted.astype(d.to_numpy()).astype(np.float64)
        error = np.abs(got.astype(np.float64) - rounded)
        computed_in = 2.0**-52 if d is F64 else 2.0**-23
        allowed = d.epsilon * np.abs(wanted) + 8 * computed_in * np.nan_to_num(slack) + 2.0**-30 * (d is not F64)
        finite = np.isfinite(rounded) & np.isfinite(got.astype(np.float64))
    assert (error[finite] <= allowed[finite]).all()
    near_top = np.abs(wanted) >= float(d.max) * (1 - d.epsilon)
    agree = (np.isnan(got.astype(np.float64)) == np.isnan(rounded)) & (np.isinf(got.astype(np.float64)) == np.isinf(rounded))
    f32_overflow = slack >= 1e38 if d is not F64 else slack >= 1e307
    assert (agree | near_top | f32_overflow | ~np.isfinite(slack)).all()


@pytest.mark.parametrize("fn", FNS[:6])
@given(shape=shapes, data=st.data())
def test_pred_reduces_by_logic(fn, shape, data):
    x = random_array(PRED, shape, np.random.default_rng(2))
    axes, keepdims = drawn(data, shape)
    f = np.any if fn in ("add", "maximum", "or") else np.all
    assert_same(run(Reduce(fn, axes, keepdims), (x, PRED)), np.asarray(f(x, axis=axes, keepdims=keepdims)))


def test_nan_and_infinity_pass_through():
    x = np.array([[1, np.nan], [np.inf, 2], [-np.inf, np.inf]], np.float32)
    assert_same(run(Reduce("maximum", (1,)), (x, F32)), np.array([np.nan, np.inf, np.inf], np.float32))
    assert_same(run(Reduce("minimum", (1,)), (x, F32)), np.array([np.nan, 2, -np.inf], np.float32))
    assert_same(run(Reduce("add", (1,)), (x, F32)), np.array([np.nan, np.inf, np.nan], np.float32))


def test_a_sum_past_the_largest_narrow_float_is_nan_where_there_is_no_infinity():
    x = np.full(3, 400).astype(F8E4M3FN.to_numpy())
    assert np.isnan(float(run(Reduce("add", (0,)), (x, F8E4M3FN))))
    assert run(Reduce("add", (0,)), (np.full(3, 60000, np.float16), F16)) == np.inf


def test_a_large_unsigned_maximum_is_unsigned():
    x = np.array([1, 2**63, 2**64 - 2], np.uint64)
    assert run(Reduce("maximum", (0,)), (x, U64)) == 2**64 - 2
    assert run(Reduce("minimum", (0,)), (x, U64)) == 1
    assert run(Reduce("minimum", (0,)), (x[:0], U64)) == 2**64 - 1


@pytest.mark.parametrize("fn", ["add", "multiply", "maximum", "minimum", "and", "or"])
def test_integers_reduce_as_in_xla(fn):
    """XLA's own reduction, from the same start."""
    x = random_array(S8, (4, 7), np.random.default_rng(3))
    fs = {"add": lax.add, "multiply": lax.mul, "maximum": lax.max, "minimum": lax.min, "and": lax.bitwise_and}
    f = fs.get(fn, lax.bitwise_or)
    start = {"add": 0, "multiply": 1, "maximum": -128, "minimum": 127, "and": -1, "or": 0}[fn]
    assert_same(run(Reduce(fn, (0,)), (x, S8)), np.asarray(lax.reduce(x, np.int8(start), f, (0,))))


def test_axes_are_given_from_either_end_in_any_order():
    x = input_("x", F32, (2, 3, 4))
    assert reduce_("add", x, [-1, 0]).op == Reduce("add", (0, 2))
    assert reduce_("add", x, [1], keepdims=True).shape == (2, 1, 4)


@pytest.mark.parametrize("d", FLOATS, ids=str)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((3, 7), 1), ((3, 7), -2), ((5,), 0), ((0, 3), 1), ((3, 0), 1), ((1, 1), 0)])
def test_softmax_is_that_of_float64_rounded(d, log, shape, axis):
    x = random_array(d, shape, np.random.default_rng(4), special=0)
    got = run(Softmax(axis, log), (x, d)).astype(np.float64)
    f = torch.log_softmax if log else torch.softmax
    wanted = f(torch.from_numpy(x.astype(np.float64)), axis).numpy()
    near = np.abs(got - wanted) <= d.epsilon * np.abs(wanted) + (1e-6 if d is not F64 else 1e-14)
    tiny = 2.0 ** {4: -1, 8: -9, 16: -24, 32: -126, 64: -1022}[d.bits]
    if log and d.bits == 8:  # past the largest: NaN or infinity
        near |= np.abs(wanted) >= float(d.max)
    assert (near | (np.abs(got - wanted) <= tiny)).all()


def test_softmax_of_extremes():
    x = np.array([[1e38, -1e38, 0], [-np.inf, 0, 0], [np.nan, 0, 0], [-np.inf, -np.inf, -np.inf]], np.float32)
    got = run(Softmax(1), (x, F32))
    assert_same(got[:2], np.array([[1, 0, 0], [0, 0.5, 0.5]], np.float32))
    assert np.isnan(got[2:]).all()


@pytest.mark.parametrize("d", WIDE, ids=str)
@pytest.mark.parametrize("sources", [1, 2, 3])
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize(("shape", "axis"), [((4, 6), 1), ((4, 6), -1), ((2, 3, 5), 1), ((7,), 0), ((0, 4), 1), ((3, 1), -1)])
def test_layer_norm_and_rms_norm_are_torchs(d, sources, center, shape, axis):
    rng = np.random.default_rng(5)
    inner = shape[axis % len(shape) :]
    arrays = [random_array(d, s, rng, special=0) for s in (shape, inner, inner)[:sources]]
    got = run(LayerNorm(axis, 1e-5, center), *((a, d) for a in arrays)).astype(np.float64)
    x, *rest = (torch.from_numpy(a.astype(np.float64)) for a in arrays)
    if center:
        wanted = torch.nn.functional.layer_norm(x, inner, *rest, eps=1e-5)
    else:
        wanted = torch.nn.functional.rms_norm(x, inner, *rest[:1], eps=1e-5) + (rest[1] if len(rest) > 1 else 0)
    scale = max(float(wanted.abs().max()), 1.0) if wanted.numel() else 1.0
    tolerance = (2 * d.epsilon if d.bits < 32 else 64 * d.epsilon) * scale
    assert np.abs(got - wanted.numpy()).max(initial=0) <= tolerance


def test_layer_norm_scale_and_bias_broadcast():
    rng = np.random.default_rng(6)
    x, scale, bias = (random_array(F32, s, rng, 0) for s in ((2, 3, 4), (3, 1), ()))
    got = run(LayerNorm(2, 0.0), (x, F32), (scale, F32), (bias, F32))
    plain = run(LayerNorm(2, 0.0), (x, F32))
    assert np.allclose(got, plain * scale + bias, rtol=1e-6)


@pytest.mark.parametrize("d", [F16, BF16], ids=str)
def test_narrow_types_are_computed_in_f32(d):
    x = np.concatenate([np.full(4000, 30), np.full(4000, 31)]).astype(d.to_numpy())  # sums far past what d can hold
    mean = run(Reduce("mean", (0,)), (x, d))
    assert abs(float(mean) - 30.5) <= d.epsilon * 32
    norm = run(LayerNorm(0, 0.0), (x, d)).astype(np.float32)
    assert set(norm.tolist()) == {-1.0, 1.0}


def test_wrong_operands_are_refused():
    x, s, p, v = input_("x", F32, (2, 3)), input_("s", S8, (2,)), input_("p", PRED, (2,)), input_("v", F32, ())
    for node, message in (
        (lambda: reduce_("add", x, [2]), r"axis 2 is not an axis of a tensor of rank 2 \(reduce\)"),
        (
            lambda: Node(Reduce("add", (1, 0)), x),
            r"axes \[1, 0\] of f32\[2,3\] are not sorted, distinct and non-negative",
        ),
        (lambda: Node(Reduce("add", (-1,)), x), r"reduce axes \[-1\] of .* are not sorted"),
        (lambda: Node(Reduce("add", (0, 0)), x), r"reduce axes \[0, 0\] of .* are not sorted, distinct"),
        (lambda: reduce_("and", x, [0]), "reduce and does not take f32"),
        (lambda: reduce_("or", x, [0]), "reduce or does not take f32"),
        (lambda: reduce_("mean", s, [0]), "reduce mean does not take s8"),
        (lambda: reduce_("mean", p, [0]), "reduce mean does not take pred"),
        (
            lambda: reduce_("median", x, [0]),
            "fn is 'median', not one of add, multiply, maximum, minimum, and, or, mean",
        ),
        (lambda: Node(Reduce("add", (0,)), x, x), "reduce takes 1 operand, not 2"),
        (lambda: Node(Softmax(2), x), r"axis 2 is not an axis of a tensor of rank 2 \(softmax\)"),
        (lambda: Node(Softmax(0), v), "axis 0 is not an axis of a tensor of rank 0"),
        (lambda: Node(Softmax(0), s), "softmax does not take s8"),
        (lambda: Node(LayerNorm(2, 0.0), x), r"axis 2 is not an axis of a tensor of rank 2 \(layer_norm\)"),
        (lambda: Node(LayerNorm(0, 0.0), s), "layer_norm does not take s8"),
        (lambda: Node(LayerNorm(0, 0.0)), "layer_norm takes x and maybe scale and bias, not 0 operands"),
        (lambda: Node(LayerNorm(0, 0.0), x, x, x, x), "not 4 operands"),
        (
            lambda: Node(LayerNorm(1, 0.0), x, input_("w", F16, (3,))),
            r"f32\[2,3\] cannot take a scale or bias f16\[3\]",
        ),
        (lambda: Node(LayerNorm(1, 0.0), x, input_("w", F32, (2,))), r"cannot take a scale or bias f32\[2\]"),
        (lambda: Node(LayerNorm(1, 0.0), x, x, input_("w", F32, (1, 2, 3))), r"cannot take a scale or bias f32\[1,2,3\]"),
        (lambda: LayerNorm(1, "a"), "layer_norm: epsilon is 'a', not a number"),
        (lambda: LayerNorm(1, math.nan), "layer_norm: epsilon is nan, not a number"),
    ):
        with pytest.raises(TypeMismatchError, match=message):
            node()


@pytest.mark.parametrize("d", ALL, ids=str)
def test_every_reduction_takes_the_types_it_says(d):
    x = from_numpy(random_array(d, (2, 3), np.random.default_rng(7)), d)
    for fn in FNS:
        wrong = (fn in ("and", "or") and d.is_float) or (fn == "mean" and not d.is_float)
        if wrong:
            with pytest.raises(TypeMismatchError, match=f"reduce {fn} does not take {d}"):
                reduce_(fn, input_("x", d, (2, 3)), [0])
        else:
            node = reduce_(fn, input_("x", d, (2, 3)), [0])
            assert node.dtype is d and node.shape == (3,)
            assert value_of(Node(Reduce(fn, (0,)), const(x, d))).shape == (3,)


def test_a_sum_of_s32_wraps():
    x = np.array([2**31 - 1, 1], np.int32)
    assert run(Reduce("add", (0,)), (x, S32)) == -(2**31)
