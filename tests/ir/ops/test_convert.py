"""Conversions: exhaustively against ml_dtypes for narrow floats, against XLA and exact arithmetic for the rest."""

from fractions import Fraction

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from values import (
    ALL,
    FLOATS,
    INTEGERS,
    NARROW,
    assert_same,
    every_value,
    random_array,
    run,
    same,
    specials,
    widened,
)

from tilewright.dtype import BF16, F4E2M1FN, F8E4M3FN, F8E5M2, F16, F32, F64, OPAQUE, PRED, S4, S8, S32, S64, U4, U8, U64
from tilewright.errors import TypeMismatchError
from tilewright.ir.build import convert, input_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Convert


def by_ml_dtypes(x: np.ndarray, d, *, saturate: bool) -> np.ndarray:
    """x as ml_dtypes rounds it, clamped first if asked."""
    with np.errstate(all="ignore"):
        if saturate:
            x = np.where(np.isnan(x), x, np.clip(x.astype(np.float64), d.min, d.max).astype(np.float32))
        return x.astype(d.to_numpy())


@pytest.mark.parametrize("overflow", ["wrap", "saturate", "ieee"])
@pytest.mark.parametrize("source", [F16, BF16], ids=str)
@pytest.mark.parametrize("target", NARROW, ids=str)
def test_every_16_bit_float_becomes_an_8_bit_one_as_ml_dtypes_says(source, target, overflow):
    values = every_value(source)
    got = run(Convert(target, overflow), (values, source))
    assert got.size == 65536
    assert_same(got, by_ml_dtypes(values.astype(np.float32), target, saturate=overflow == "saturate"), values)


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", NARROW, ids=str)
def test_every_8_bit_float_converts_as_ml_dtypes_says(source, target):
    values = every_value(source)
    if target is F4E2M1FN:  # ml_dtypes takes NaN of one sign for 0 and of the other for -0, by the type that it comes from
        values = values[~np.isnan(values.astype(np.float32))]
    wide = values.astype(np.float32)
    assert_same(run(Convert(target), (values, source)), by_ml_dtypes(wide, target, saturate=False), values)
    saturated = by_ml_dtypes(wide, target, saturate=source is not target and source.max >= target.max)
    assert_same(run(Convert(target, "saturate"), (values, source)), saturated, values)


@pytest.mark.parametrize("target", [F16, BF16, *NARROW], ids=str)
@pytest.mark.parametrize("source", [F32, F64], ids=str)
def test_floats_round_once_to_the_nearest_ties_to_even(source, target):
    """Midpoints of neighbouring values and their own neighbours: where rounding through f32 first goes wrong."""
    values = widened(every_value(target))
    finite = np.unique(values[np.isfinite(values)])
    middle = (finite[1:] + finite[:-1]) / 2
    middle = np.random.default_rng(0).choice(middle, min(middle.size, 5000), replace=False)
    top = float(target.max) + (float(target.max) - finite[-2]) / 2  # halfway past the largest
    with np.errstate(over="ignore"):  # past the largest f32
        near = np.concatenate([middle, [top, -top, 2 * top, -2 * top]]).astype(source.to_numpy()).astype(np.float64)
    kind = source.to_numpy()
    x = np.concatenate([near.astype(kind), np.nextafter(near.astype(kind), kind.type(np.inf))])
    x = np.concatenate([x, np.nextafter(near.astype(kind), kind.type(-np.inf)), specials(source)])
    got = run(Convert(target), (x, source)).astype(np.float64)
    index = np.searchsorted(finite, x.astype(np.float64))
    bits = every_value(target)[np.isfinite(values)]
    codes = bits.view(f"u{max(target.bits // 8, 1)}")
    even = {float(v): int(b) % 2 == 0 for v, b in zip(bits.astype(np.float64), codes, strict=True)}
    for v, g, i in zip(x.tolist(), got.tolist(), index.tolist(), strict=True):
        if np.isnan(v) or abs(v) >= top:
            if target is F4E2M1FN:  # which has neither infinity nor NaN
                assert abs(g) == (0 if np.isnan(v) else 6), (v, g)
                continue
            overflowed = np.inf if np.isinf(target.highest) else np.nan
            past = abs(v) > top or not even.get(float(target.max), False) or np.isinf(v)
            wanted = np.nan if np.isnan(v) else (np.copysign(overflowed, v) if past else np.copysign(target.max, v))
        else:
            candidates = finite[max(i - 1, 0) : i + 1]
            error = [abs(Fraction(float(c)) - Fraction(v)) for c in candidates]
            best = [float(c) for c, e in zip(candidates, error, strict=True) if e == min(error)]
            wanted = best[0] if len(best) == 1 else next(b for b in best if even[b])
        assert g == wanted or (np.isnan(g) and np.isnan(wanted)), (v, g, wanted)


@pytest.mark.parametrize("target", FLOATS, ids=str)
@pytest.mark.parametrize("source", [d for d in INTEGERS if d.bits > 8], ids=str)
def test_integers_round_once(source, target):
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, source.bits, 3000)
    x = random_array(source, (3000,), rng).astype(object) >> sizes.astype(object)  # of every magnitude
    x = np.concatenate([x.astype(np.uint64 if source is U64 else np.int64).astype(source.to_numpy()), specials(source)])
    got = run(Convert(target), (x, source)).astype(np.float64)
    for v, g in zip(x.tolist(), got.tolist(), strict=True):
        assert g == nearest(int(v), target) or (np.isnan(g) and np.isnan(nearest(int(v), target))), (v, g)


def nearest(v: int, d) -> float:
    """A whole number in a float type, worked out in whole numbers."""
    info = ml_dtypes.finfo(d.to_numpy())
    precision = int(info.nmant) + 1
    excess = max(abs(v).bit_length() - precision, 0)
    quotient, rest = abs(v) >> excess, abs(v) & (1 << excess) - 1
    half = 1 << excess >> 1
    quotient += rest > half or (rest == half and excess > 0 and quotient & 1)
    rounded = quotient << excess
    if rounded > int(d.max):
        rounded = 6 if d is F4E2M1FN else float("inf") if np.isinf(d.highest) else float("nan")
    return float(rounded) if v >= 0 else -float(rounded)


@pytest.mark.parametrize("target", [d for d in FLOATS if d.bits <= 16], ids=str)
@pytest.mark.parametrize("source", [F64, F32, BF16, F16, S64, U64, S32], ids=str)
def test_saturation_stops_at_the_largest_value(source, target):
    if source.max < target.max:
        pytest.skip("nothing is past the largest value")
    x = specials(source)
    got = run(Convert(target, "saturate"), (x, source)).astype(np.float64)
    plain = run(Convert(target), (x, source)).astype(np.float64)
    wide = x.astype(np.float64)
    beyond = (np.abs(wide) > float(target.max)) & (source is not target)
    assert np.array_equal(got[beyond], np.copysign(float(target.max), wide[beyond]))
    assert same(got[~beyond], plain[~beyond]).all()


@pytest.mark.parametrize("target", INTEGERS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_floats_become_integers_toward_zero_saturating_and_nan_is_0(source, target):
    rng = np.random.default_rng(1)
    edges = np.array([-(2.0**63), 2.0**63, 2.0**64, float(target.min) - 1, float(target.max) + 1, -0.9, 0.9, 1e18, -1e18])
    with np.errstate(all="ignore"):
        x = np.concatenate([specials(source), edges.astype(source.to_numpy()), random_array(source, (500,), rng)])
    for overflow in ("wrap", "saturate", "ieee"):
        got = run(Convert(target, overflow), (x, source))
        for v, g in zip(x.astype(np.float64).tolist(), got.tolist(), strict=True):
            low, high = int(target.min), int(target.max)
            wanted = 0 if np.isnan(v) else low if v < low else high if v > high else int(v)
            assert int(g) == wanted, (v, g)


@pytest.mark.parametrize("source", [F32, F64, F16, BF16], ids=str)
def test_floats_become_integers_as_in_xla(source):
    targets = [d for d in INTEGERS if d.bits > 4]
    x = np.concatenate([specials(source), random_array(source, (500,), np.random.default_rng(2))])
    with jax.enable_x64(True):
        wanted = jax.jit(lambda x: [lax.convert_element_type(x, d.to_numpy()) for d in targets])(x)
    for d, w in zip(targets, wanted, strict=True):
        assert_same(run(Convert(d), (x, source)), np.asarray(w), x)


@given(st.sampled_from(INTEGERS), st.sampled_from(INTEGERS), st.sampled_from(["wrap", "saturate", "ieee"]), st.integers(0, 99))
def test_integers_become_integers_by_their_low_bits_or_clamped(source, target, overflow, seed):
    x = np.concatenate([specials(source), random_array(source, (50,), np.random.default_rng(seed))])
    got = run(Convert(target, overflow), (x, source))
    low, high = int(target.min), int(target.max)
    for v, g in zip(x.tolist(), got.tolist(), strict=True):
        wrapped = (int(v) - low) % (high - low + 1) + low
        assert int(g) == (min(max(int(v), low), high) if overflow == "saturate" else wrapped), v


@pytest.mark.parametrize("d", ALL, ids=str)
def test_pred_is_not_zero_and_becomes_0_or_1(d):
    x = specials(d)
    assert_same(run(Convert(PRED), (x, d)), x.astype(np.float64) != 0, x)
    both = np.array([True, False])
    assert run(Convert(d), (both, PRED)).astype(np.float64).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("d", ALL, ids=str)
def test_converting_to_the_same_type_changes_nothing(d):
    x = specials(d)
    for overflow in ("wrap", "saturate", "ieee"):
        assert_same(run(Convert(d, overflow), (x, d)), x)
    node = input_("x", d, (2,))
    assert convert(node, d) is node


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1)])
def test_shapes_stay(shape):
    for source, target in ((F64, F8E4M3FN), (S64, BF16), (U64, F8E5M2), (F32, U64), (S4, U4), (S8, S4), (F16, S64)):
        assert run(Convert(target, "saturate"), (np.ones(shape).astype(source.to_numpy()), source)).shape == shape


def test_wrong_conversions_are_refused():
    x = input_("x", F32, (2,))
    with pytest.raises(TypeMismatchError, match="nothing converts to opaque"):
        Node(Convert(OPAQUE), x)
    with pytest.raises(TypeMismatchError, match="convert: overflow is 'clip', not one of wrap, saturate, ieee"):
        convert(x, U8, "clip")
    with pytest.raises(TypeMismatchError, match="convert takes 1 operand, not 2"):
        Node(Convert(U8), x, x)
