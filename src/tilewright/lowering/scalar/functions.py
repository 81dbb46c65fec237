"""The elementwise functions that `map` names, as arithmetic on f32 and integers.

Errors of the functions here are in units in the last place of the result (ulp), over all finite f32 arguments unless a
range is given; tests measure them. NaN gives NaN, infinity what the formula gives in IEEE arithmetic. A target's own
exponential, logarithm or error function is within the few roundings that a step of an epilogue may have
(`schedule/intervals.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from tilewright.dtype import BF16, F32, PRED, S32, DType
from tilewright.lowering.scalar import approximations as fits
from tilewright.lowering.scalar import integers, wide
from tilewright.lowering.scalar.conversions import convert
from tilewright.lowering.scalar.values import Operand, Value, polynomial

LOG2_E = 1.4426950408889634
# ln 2 in two parts, the first of 15 bits, so that n times it is exact for the n that occur (Cody and Waite 1980).
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
# Added to a float below 2^22 it leaves the nearest integer in the low bits of the sum.
ROUND, ROUND_BITS = 1.5 * 2.0**23, 0x4B400000
MOST_EXACT = 2.0**23  # from here on every f32 is a whole number
SQRT_HALF_BITS = 0x3F3504F3
GELU_TO = 13.215  # beyond it Phi(-x) is below 2^-126
# Where gelu_tanh's exponent is 89, beyond f32; 89.5, which gives infinity; and -87.4, which gives zero.
GELU_TANH_FROM, GELU_TANH_PAST, GELU_TANH_TO = -10.07244, -10.09427, 10.00380
# For values rounded or quantised at once: log2 of what x is multiplied by where it is negative, as a polynomial in |x|, and up
# to where.
GELU_TO_BF16, GELU_TO_F16 = (fits.LOG2_UPPER, fits.LOG2_UPPER_TO), (fits.LOG2_UPPER_16, fits.LOG2_UPPER_16_TO)
GELU_TO_8_BITS = {
    "gelu": (fits.LOG2_UPPER_8, fits.LOG2_UPPER_16_TO),
    "gelu_tanh": (fits.LOG2_UPPER_TANH_8, fits.LOG2_UPPER_TANH_8_TO),
}
INF, NAN = float("inf"), float("nan")

COMPARE = {"equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">="}
LOGIC = {"and": "&", "or": "|", "xor": "^", "add": "|", "multiply": "&", "maximum": "|", "minimum": "&"}
BITWISE = ("and", "or", "xor")
BINARY = {"add": "+", "subtract": "-", "multiply": "*"}
TESTS: dict[str, Callable[[Value], Value]] = {
    "is_nan": lambda x: x != x,
    "is_inf": lambda x: x.abs() == INF,
    "is_finite": lambda x: x.abs() < INF,
}
PICKED = frozenset({"negate", "abs", "relu", "maximum", "minimum", "clamp", "sign"})  # values that any type of the operands has


def has_form(fn: str, dtype: DType) -> bool:
    """Tell whether `apply` knows function `fn` of values of a type."""
    if dtype.is_float:
        return any(fn in table for table in (COMPARE, TESTS, FUNCTIONS, wide.FUNCTIONS))
    if fn in COMPARE or fn == "not":
        return True
    return fn in LOGIC if dtype is PRED else fn in BITWISE or fn in BINARY or fn in integers.FUNCTIONS


def apply(fn: str, dtype: DType, args: Sequence[Value]) -> Value:
    """`Map`'s meaning: function `fn` of values of one type."""
    b = args[0].builder
    if not dtype.is_float:
        return _of_integers(fn, dtype, args)
    args = [convert(x, dtype, F32) for x in args]
    if fn in COMPARE:
        return b.compare(COMPARE[fn], *args)
    if fn in TESTS:
        return TESTS[fn](args[0])
    if fn in b.native:
        value = b.call(fn, *args)
    else:
        value = wide.call(fn, args) if fn in wide.FUNCTIONS else FUNCTIONS[fn](*args)
    return b.cut(value) if dtype is BF16 and fn in PICKED else convert(value, F32, dtype)


def gelu_at_once(x: Value, dtype: DType, form: tuple[Sequence[float], float]) -> Value:
    """`gelu_by_power` of any float type."""
    return convert(gelu_by_power(convert(x, dtype, F32), *form), F32, dtype)


def _of_integers(fn: str, dtype: DType, args: Sequence[Value]) -> Value:
    b = args[0].builder
    if fn in COMPARE:
        return b.compare(COMPARE[fn], *args)
    if fn == "not":
        return args[0] ^ (1 if dtype is PRED else -1)
    if dtype is PRED or fn in BITWISE:
        return b.binary(LOGIC[fn], *args)
    if fn in BINARY:
        return b.binary(BINARY[fn], *args)
    return integers.FUNCTIONS[fn](*args)


# -- rounding to whole numbers


def sign(x: Value) -> Value:
    """-1, 1, or x where that is a zero or NaN."""
    return x.builder.select(x > 0.0, 1.0, x.builder.select(x < 0.0, -1.0, x))


def round_half_away(x: Value) -> Value:
    """The nearest whole number, ties away from zero."""
    pick, size = x.builder.select, x.abs()
    near = size.call("floor")
    near = pick(size - near >= 0.5, near + 1.0, near)
    return pick(x < 0.0, -near, pick(x == 0.0, x, near))


def round_half_even(x: Value) -> Value:
    """The nearest whole number, ties to even."""
    pick, size = x.builder.select, x.abs()
    near = (size + MOST_EXACT) - MOST_EXACT
    return pick(size < MOST_EXACT, pick(x < 0.0, -near, near), x)


def trunc(x: Value) -> Value:
    """The nearest whole number toward zero."""
    return x.builder.select(x < 0.0, x.call("ceil"), x.call("floor"))


# -- exponentials


def exp(x: Value) -> Value:
    """e^x within 1.1 ulp; denormal too, infinity past 88.73 and zero below -104."""
    beyond, n = _reduced_exp(x.at_most(89.0).at_least(-104.5))
    return _scaled(x.builder.fma(beyond, 2.0, 2.0), n)


def bounded_exp(x: Value) -> Value:
    """e^x within 1.1 ulp, but zero below -86.99: no denormals."""
    beyond, n = _reduced_exp(x.at_most(89.0).at_least(-87.4))
    return x.builder.fma(beyond, 2.0, 2.0) * _power_of_2(n)  # the factor 2^-127 is zero


def _power_of_2(n: Value) -> Value:
    return ((n + 127) << 23).bits(F32)


def _scaled(x: Value, n: Value) -> Value:
    """x 2^n in two factors: n reaches from -154 to 127, an exponent from -126 to 127."""
    half = n >> 1
    return x * _power_of_2(half) * _power_of_2(n - half)


def _reduced_exp(x: Value, low: Value | None = None, factors: tuple[Value, Value] | None = None) -> tuple[Value, Value]:
    """e^r - 1 and the integer n - 1, where x + low = n ln 2 + r and |r| <= ln(2) / 2; |low| < 2^-16. 1 less as 2^128 is
    no number. Of a product, `factors`, not even its rounding to x is felt."""
    fma = x.builder.fma
    shifted = fma(x, LOG2_E, ROUND)
    n = shifted - ROUND
    first = fma(n, -LN2_HIGH, x) if factors is None else fma(*factors, n * -LN2_HIGH)  # exact
    if low is None:
        r = rest = fma(n, -LN2_LOW, first)
    else:
        small = fma(n, -LN2_LOW, low)
        r = first + small
        rest = small - (r - first)  # what r has lost
    square = r * r
    beyond = fma(polynomial(r, fits.EXP), square, rest)
    if low is not None:
        beyond = r + beyond
    return beyond, shifted.bits(S32) - (ROUND_BITS + 1)


def _one_more(x: Value, factor: Value | float = 1.0, *, held: bool = False) -> tuple[float, Value]:
    """c and c (1 + e^(x factor)), c a power of two; infinity past 89. On a target without an exponential, a factor that is a
    number is a sign. `held`: the product is from -87.4 to 89.5."""
    b, factors = x.builder, None
    if b.exponent is not None:
        return 1.0, b.power(x * (factor if isinstance(factor, Value) else factor * b.exponent)) + 1.0
    if isinstance(factor, Value):
        x, factors = x * factor, (x, factor)
    elif factor < 0:
        x = -x
    if not held:
        x = b.select(x > 89.0, 89.5, x.at_least(-87.4))
    beyond, n = _reduced_exp(x, factors=factors)
    power = _power_of_2(n)
    return 0.5, b.fma(beyond, power, 0.5) + power


def _over_one_more(x: Operand, like: Value, factor: Value | float, *, held: bool = False) -> Value:
    """x / (1 + e^(like factor))."""
    c, more = _one_more(like, factor, held=held)
    return like.builder.over(x if c == 1.0 else x * c, more)


def logistic(x: Value) -> Value:
    """1 / (1 + e^-x) within 2 ulp down to -88; below at most 2^-127 off."""
    return _over_one_more(1.0, x, -1.0)


def silu(x: Value) -> Value:
    """x / (1 + e^-x) within 2 ulp down to -88; below at most 2^-121 off."""
    return _over_one_more(x, x, -1.0)


def tanh(x: Value) -> Value:
    """1 - 2 / (e^2|x| + 1) with x's sign, a polynomial where that cancels: within 1.4 ulp."""
    b, size, square = x.builder, x.abs(), x * x
    near = b.fma(polynomial(square, fits.TANH) * square, size, size)
    if b.exponent is None:
        more = bounded_exp(size + size) + 1.0
    else:
        more = _one_more(size, 2.0)[1]
    far = 1.0 - b.over(2.0, more)
    return b.select(size < 0.625, near, far).call("copysign", x)


def exponential_minus_one(x: Value) -> Value:
    """e^x - 1 within 2 ulp; a small x is itself."""
    b = x.builder
    beyond, n = _reduced_exp(x.at_most(89.0).at_least(-18.0))
    power = _power_of_2(n)  # half of it, which f32 has
    return b.select(x.abs() < 2.0**-25, x, b.fma(beyond, power, power - 0.5) * 2.0)


# -- logarithms


def log(x: Value) -> Value:
    """Natural logarithm within 1 ulp."""
    b, small = x.builder, x < 2.0**-126
    part, n = _part_and_exponent(b.select(small, x * 2.0**24, x))
    return _log_ends(x, _log_of(part, n - b.select(small, 24.0, 0.0, F32)))


def log_plus_one(x: Value) -> Value:
    """log(1 + x) within 2 ulp: what the sum has lost is carried along."""
    b, more = x.builder, x + 1.0
    lost = x - (more - 1.0)
    part, n = _part_and_exponent(more)
    back = _power_of_2(0 - n.at_most(126.0).to(S32))
    value = _log_ends(more, _log_of(b.fma(lost, back, part), n))
    return b.select(x.abs() < 2.0**-25, x, value)


def _part_and_exponent(x: Value) -> tuple[Value, Value]:
    """f and n: x = (1 + f) 2^n, sqrt(1/2) <= 1 + f < sqrt(2); of a normal number."""
    raw = x.bits(S32)
    n = (raw - SQRT_HALF_BITS) >> 23
    return (raw - (n << 23)).bits(F32) - 1.0, n.to(F32)


def _log_of(f: Value, n: Value) -> Value:
    """log((1 + f) 2^n)."""
    fma, square = f.builder.fma, f * f
    value = f * square * polynomial(f, fits.LOG)
    return fma(n, LN2_HIGH, f + fma(square, -0.5, fma(n, LN2_LOW, value)))


def _log_ends(x: Value, value: Value) -> Value:
    """Put in the logarithms of zero, infinity, numbers below zero and NaN."""
    pick = x.builder.select
    return pick(x >= 0.0, pick(x == INF, x, pick(x == 0.0, -INF, value)), NAN)


# -- the normal distribution


def _tail(size: Value, a: Value, b: Value) -> tuple[Value, Value, Value]:
    """sqrt 2 size Phi(-size), for a size from 1 to 15, where a b is size^2 / 2, as p, q, n: (p + p q) 2^n."""
    t = (size - fits.TAIL_FROM) / (size + fits.TAIL_TO)
    # The square is needed beyond f32: its rounding error is carried along.
    square = -(a * b)
    beyond, n = _reduced_exp(square, -size.builder.fma(a, b, square))
    return polynomial(t, [2 * 2**0.5 * c for c in fits.TAIL]), beyond, n


def _erfc_of_size(x: Value) -> Value:
    """erfc(|x|) for |x| >= 0.7072: 2 Phi(-sqrt 2 |x|)."""
    fma, z = x.builder.fma, x.abs().at_most(10.3)
    p, q, n = _tail(z * 2**0.5, z, z)
    product = fma(p, q, p)
    lost = fma(p, q, p - product)
    inverse = 1.0 / z
    near = product * inverse
    return _scaled(fma(fma(-near, z, product) + lost, inverse, near), n)


def erf(x: Value) -> Value:
    """Error function within 1 ulp."""
    b = x.builder
    near = b.fma(x, polynomial(x * x, fits.ERF), x)
    return b.select(x.abs() < 1.0, near, (1.0 - _erfc_of_size(x)).call("copysign", x))


def erfc(x: Value) -> Value:
    """1 - erf(x) within 2.7 ulp, denormal too; where the target has its own erf, within 2^-24."""
    b = x.builder
    if "erf" in b.native:
        return 1.0 - x.call("erf")
    tail = _erfc_of_size(x)
    far = b.select(x >= 0.0, tail, 2.0 - tail)
    square = x * x
    linear = b.fma(x, fits.ERFC[0], 1.0)  # what is not linear is added last, being small
    near = b.fma(x * square, polynomial(square, fits.ERFC[1:]), linear)
    return b.select(x.abs() < 0.7074, near, far)


def _size_and_positive(x: Value) -> tuple[Value, Value]:
    """|x|, and max(x, 0), which is NaN at minus infinity."""
    size = x.abs()
    return size, x.builder.fma(size, 0.5, x * 0.5)


def gelu(x: Value) -> Value:
    """x Phi(x) as max(x, 0) - |x| Phi(-|x|), which keeps the digits of the negative tail; NaN at minus infinity.

    Within 1.8 ulp down to -0.25, 2.6 to -1, below 2.6 + x^2 ulp; zero from -13.2.
    """
    b, (size, positive) = x.builder, _size_and_positive(x)
    size = size.min(GELU_TO)
    t = b.over(size, size + fits.UPPER_TO)
    if b.exponent is not None:
        power = b.call("exp2", size * (-0.5 * LOG2_E) * size)
        return b.fma(polynomial(t, fits.UPPER) * power, -size, positive)
    less = size * -0.5
    beyond, n = _reduced_exp(size * less, factors=(size, less))
    upper = polynomial(t, [2 * c for c in fits.UPPER])
    upper = b.fma(upper, beyond, upper) * _power_of_2(n)  # the factor 2^-127 is zero
    return b.fma(upper, -size, positive).call("copysign", x)


def gelu_by_power(x: Value, coefficients: Sequence[float] = fits.LOG2_UPPER, to: float = fits.LOG2_UPPER_TO) -> Value:
    """gelu(x) for a value that is rounded at once, to bf16 unless told otherwise: within 2^-16.5 of it down to -5, 2^-14.9 to
    -12.9; zero from -12.98. No division, and one exponential whose argument comes from a polynomial: half the work."""
    b, (size, positive) = x.builder, _size_and_positive(x)
    size = size.min(to)
    return b.fma(_exp2(polynomial(size, coefficients)), -size, positive)


def _exp2(x: Value) -> Value:
    """2^x for x from -127 to 0, where bf16 is all that is asked: within 2^-18 or the target's own."""
    b = x.builder
    if b.exponent is not None:
        return b.power(x) if b.exponent == LOG2_E else b.call("exp2", x)
    shifted = x + ROUND
    return polynomial(x - (shifted - ROUND), fits.EXP2) * _power_of_2(shifted.bits(S32) - ROUND_BITS)


def gelu_tanh(x: Value) -> Value:
    """x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3): 0.5 x (1 + tanh u) without its cancellation.

    Within 2.5 ulp down to -1; below at most 2^-23 |x| off.
    """
    b, z, k = x.builder, x, -2 * fits.SQRT_2_OVER_PI * (x.builder.exponent or 1.0)
    if b.exponent is None:
        z = b.select(x < GELU_TANH_FROM, GELU_TANH_PAST, x.at_most(GELU_TANH_TO))
    return _over_one_more(x, z, b.fma(z * z, k * 0.044715, k), held=True)


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.truediv,
    "maximum": lambda x, y: x.call("maximum", y), "minimum": lambda x, y: x.call("minimum", y),
    "clamp": lambda low, x, high: x.call("maximum", low).call("minimum", high), "relu": lambda x: x.at_least(0.0),
    "negate": lambda x: -x, "abs": Value.abs, "sign": sign, "sqrt": lambda x: x.call("sqrt"),
    "rsqrt": lambda x: 1.0 / x.call("sqrt"), "floor": lambda x: x.call("floor"), "ceil": lambda x: x.call("ceil"),
    "trunc": trunc, "round_half_even": round_half_even, "round_half_away": round_half_away, "exponential": exp, "log": log,
    "exponential_minus_one": exponential_minus_one, "log_plus_one": log_plus_one, "logistic": logistic, "silu": silu,
    "tanh": tanh, "erf": erf, "erfc": erfc, "gelu": gelu, "gelu_tanh": gelu_tanh,
}  # fmt: skip
