"""Functions of f32 computed in f64, so that sums of a series, cut off past 2^-36, are right to the last place.

They are what models seldom ask for: powers, angles and their inverses, remainders. All are within 0.6 units in the last place
of an f32 result (ulp), over all finite arguments; remainders are exact. NaN gives NaN, infinities and zeros what C's functions
of the names give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

from tilewright.dtype import F32, F64, S32, S64, U64
from tilewright.lowering.scalar.values import Operand, Value, polynomial

LN2, SQRT_HALF_BITS = math.log(2), 0x3FE6A09E667F3BCD
# pi / 2 as two f64: the first one's product with a whole number below 2^27, taken from an f32, leaves no error.
HALF_PI, HALF_PI_LOW = 1.5707963267948966, 6.123233995736766e-17
LARGE = 2.0**27  # an angle from which turns are counted by `turns`
LARGE_EXPONENT = 127 + 27  # of its bits
EXP = [1 / math.factorial(k) for k in range(11)]  # |r| <= ln(2) / 2: 2e-13 off
LOG = [2 / (2 * k + 1) for k in range(8)]  # 2 atanh(s) / s in s^2, |s| <= 0.172: 3e-14 off
SINE = [(-1) ** k / math.factorial(2 * k + 1) for k in range(6)]  # sin(r) / r in r^2, |r| <= pi / 4: 7e-12 off
COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(7)]  # the same of cos(r): 4e-13 off
ATAN = [(-1) ** k / (2 * k + 1) for k in range(13)]  # atan(t) / t in t^2, |t| <= tan(pi / 8): 5e-12 off
SINH = [1 / math.factorial(2 * k + 1) for k in range(6)]  # sinh(x) / x in x^2, |x| <= 1/2
EIGHTH = math.tan(math.pi / 8)
DIGITS = 29  # bits of a quotient that one step of a remainder finds: a product with 24 bits is exact
STEPS = 10  # which together reach from the largest f32 to the smallest
INF, NAN = math.inf, math.nan


@cache
def turns() -> tuple[float, ...]:
    """The table of reductions by pi/2: for each exponent e of a large f32 m 2^e, m a whole number, 2^e 2/pi without multiples
    of 4, as three numbers of at most 29 bits, whose products with m are exact (Payne and Hanek 1983)."""
    bits = 256
    one = 1 << bits + 32

    def arctangent(n: int) -> int:
        total, power, k = 0, one // n, 0
        while power:
            total += (-power if k % 2 else power) // (2 * k + 1)
            power //= n * n
            k += 1
        return total

    pi = 4 * (4 * arctangent(5) - arctangent(239))  # Machin
    whole = (2 * one << bits) // pi  # 2 / pi, times 2^bits
    found: list[float] = []
    for e in range(LARGE_EXPONENT - 150, 255 - 150):
        rest = (whole << e) % (4 << bits)
        for last in (27, 56, 85):
            top = rest >> bits - last
            found.append(top / 2.0**last)
            rest -= top << bits - last
    return tuple(found)


def call(fn: str, args: Sequence[Value]) -> Value:
    """Function `fn`, as `map` names it, of f32."""
    return FUNCTIONS[fn](*[a.to(F64) for a in args]).to(F32)


def _is_negative(x: Value) -> Value:
    """Tell whether the sign is set, be it a zero's."""
    return x.bits(S64) < 0


# -- exponentials and logarithms


def _exp(x: Value) -> Value:
    """e^x; past what f32 has, a number that f32 has not."""
    b = x.builder
    if "exponential" in b.native:
        return x.call("exponential")
    x = b.select(x < -600.0, -600.0, x)
    x = b.select(x > 600.0, 600.0, x)
    n = (x * (1 / LN2)).call("round_half_even")
    r = b.fma(n, -LN2, x)
    scale = ((n.to(S32).to(S64) + 1023) << 52).bits(F64)  # of a NaN anything
    return b.select(x == x, scale * polynomial(r, EXP), x)


def _log(x: Value) -> Value:
    """Natural logarithm of a number that is 2^-1000 or more, zero or infinite, within 2^-44 of it; NaN of one below."""
    b = x.builder
    if "log" in b.native:
        return x.call("log")
    raw = x.bits(S64)
    n = (raw - SQRT_HALF_BITS) >> 52
    part = (raw - (n << 52)).bits(F64) - 1.0
    s = part / (part + 2.0)
    value = b.fma(n.to(F64), LN2, s * polynomial(s * s, LOG))
    value = b.select(x == 0.0, -INF, value)
    value = b.select(x == INF, x, value)
    return b.select(x >= 0.0, value, NAN)


def _log_of_one_more(y: Value, small: Value) -> Value:
    """log(1 + y) for y from 0 on, and `small` where it is below 2^-28."""
    return y.builder.select(y < 2.0**-28, small, _log(y + 1.0))


def power(x: Value, y: Value) -> Value:
    """x^y."""
    pick, size, floor, half = x.builder.select, x.abs(), y.call("floor"), y * 0.5
    value = _exp(y * _log(size))
    odd = (floor == y) & (half.call("floor") != half)  # infinity is even
    value = pick((size == 1.0) & (y == y), 1.0, value)
    value = pick(_is_negative(x) & odd, -value, value)
    value = pick((x < 0.0) & (size != INF) & (floor != y), NAN, value)
    return pick((y == 0.0) | (x == 1.0), 1.0, value)


def cbrt(x: Value) -> Value:
    """Cube root."""
    size = x.abs()
    value = _exp(_log(size) * (1 / 3))
    value = x.builder.select(size == INF, INF, value)
    return x.builder.select(x != 0.0, value, x).call("copysign", x)


def sinh(x: Value) -> Value:
    """Hyperbolic sine: of a small number a series."""
    size = x.abs()
    e = _exp(size)
    far, near = (e - 1.0 / e) * 0.5, size * polynomial(size * size, SINH)
    return x.builder.select(size < 0.5, near, far).call("copysign", x)


def cosh(x: Value) -> Value:
    """Hyperbolic cosine."""
    e = _exp(x.abs())
    return (e + 1.0 / e) * 0.5


def asinh(x: Value) -> Value:
    """Inverse hyperbolic sine."""
    size = x.abs()
    square = size * size
    y = size + square / ((square + 1.0).call("sqrt") + 1.0)
    y = x.builder.select(size == INF, size, y)
    return _log_of_one_more(y, size).call("copysign", x)


def acosh(x: Value) -> Value:
    """Inverse hyperbolic cosine."""
    less = x - 1.0
    y = less + (less * (x + 1.0)).call("sqrt")
    return x.builder.select(x >= 1.0, _log_of_one_more(y, y), NAN)


def atanh(x: Value) -> Value:
    """Inverse hyperbolic tangent."""
    pick, size = x.builder.select, x.abs()
    value = _log((size + 1.0) / (1.0 - size)) * 0.5
    value = pick(size < 2.0**-28, size, value)
    return pick(size <= 1.0, value, NAN).call("copysign", x)


# -- angles


def _reduced_angle(x: Value) -> tuple[Value, Value]:
    """r and n, a whole number: x = n pi/2 + r but for multiples of 2 pi, |r| <= pi/4."""
    b, size = x.builder, x.abs()
    n = (x * (2 / math.pi)).call("round_half_even")
    r = b.fma(n, -HALF_PI_LOW, b.fma(n, -HALF_PI, x))
    large = (size >= LARGE) & (size < INF)
    n = b.select(size < LARGE, n, 0.0)

    def far(_: list[Value]) -> list[Value]:
        sign = b.constant(1.0, F64).call("copysign", x)
        return [b.select(large, v * sign, near) for v, near in zip(_reduced_large_angle(size, large), (r, n), strict=True)]

    r, n = b.repeat(1, [r, n], far, (large, 0, [r, n]))
    return b.select(size < INF, r, NAN), n


def _reduced_large_angle(size: Value, large: Value) -> tuple[Value, Value]:
    """The same of sizes of `LARGE` and more."""
    b, raw = size.builder, size.bits(S64)
    # m = size / 2^e is a whole number of 24 bits, e = exponent - 1023 - 23
    place = b.select(large, ((size.bits(U64) >> 52).bits(S64) - (1023 + 27)) * 3, 0)
    m = ((raw & ((1 << 52) - 1)) | (1023 + 23 << 52)).bits(F64)
    first, second, third = (m * b.entry("turns", turns(), place + i) for i in range(3))
    first = b.fma((first * 0.25).call("floor"), -4.0, first)
    n = (first + second).call("round_half_even")
    return ((first - n) + second + third) * HALF_PI, n


def _of_angle(x: Value) -> tuple[Value, Value, Value]:
    """sin(r) and cos(r), and how many quarter turns stand before them."""
    r, n = _reduced_angle(x)
    square = r * r
    return r * polynomial(square, SINE), polynomial(square, COSINE), n.to(S32)


def sine(x: Value, quarters: int = 0) -> Value:
    """Sine of x and so many quarter turns."""
    pick, (sine, cosine, count) = x.builder.select, _of_angle(x)
    count = count + quarters if quarters else count
    value = pick((count & 1) != 0, cosine, sine)
    value = pick((count & 2) != 0, -value, value)
    return value if quarters else pick(x != 0.0, value, x)


def cosine(x: Value) -> Value:
    """Cosine."""
    return sine(x, 1)


def tan(x: Value) -> Value:
    """Tangent."""
    pick = x.builder.select
    if "sine" in x.builder.native:
        above, below = (x.to(F32).call(fn).to(F64) for fn in ("sine", "cosine"))
        return above / below
    sine, cosine, count = _of_angle(x)
    odd = (count & 1) != 0
    return pick(x != 0.0, pick(odd, -cosine, sine) / pick(odd, sine, cosine), x)


def _between_axes(up: Value, right: Operand) -> Value:
    """The angle from 0 to pi/2 of a point that no coordinate of is below zero."""
    pick = up.builder.select
    steep = up > right
    less, more = pick(steep, right, up), pick(steep, up, right)
    t = less / pick(more == 0.0, 1.0, more)
    t = pick(less == INF, 1.0, t)
    far = t > EIGHTH
    u = pick(far, (t - 1.0) / (t + 1.0), t)
    value = u * polynomial(u * u, ATAN)
    value = pick(far, value + math.pi / 4, value)
    return pick(steep, math.pi / 2 - value, value)


def atan2(y: Value, x: Value) -> Value:
    """The angle of (x, y)."""
    pick, value = x.builder.select, _between_axes(y.abs(), x.abs())
    value = pick(_is_negative(x), math.pi - value, value)
    return pick((x != x) | (y != y), NAN, value).call("copysign", y)


def atan(x: Value) -> Value:
    """Inverse tangent."""
    return _between_axes(x.abs(), 1.0).call("copysign", x)


def asin(x: Value) -> Value:
    """Inverse sine."""
    return atan2(x, _cathetus(x))


def acos(x: Value) -> Value:
    """Inverse cosine."""
    return atan2(_cathetus(x), x)


def _cathetus(x: Value) -> Value:
    """sqrt(1 - x^2)."""
    return ((1.0 - x) * (x + 1.0)).call("sqrt")


# -- remainders


def remainder(a: Value, b: Value) -> Value:
    """a - b q, q the quotient towards zero, exactly: q is found `DIGITS` bits at a time, so that no product is rounded."""
    pick, size, divisor = a.builder.select, a.abs(), b.abs()

    def step(state: list[Value]) -> list[Value]:
        rest, by = state
        left = a.builder.fma(-(rest / by).call("floor"), by, rest)
        left = pick(left < 0.0, left + by, left)
        return [pick(left >= by, left - by, left), by * 2.0**-DIGITS]

    far = (size >= divisor * 2.0**DIGITS) & (divisor > 0.0)
    top = divisor * 2.0 ** (DIGITS * (STEPS - 1))
    rest, _ = a.builder.repeat(STEPS, [size, top], step, (far, 1, [size, divisor]))
    value = pick(divisor == INF, size, rest)
    return pick((size < INF) & (divisor > 0.0), value, NAN).call("copysign", a)


def modulo(a: Value, b: Value) -> Value:
    """The remainder that has the divisor's sign; a sum, where that is added, rounded once."""
    pick, rest = a.builder.select, remainder(a, b)
    value = pick(((rest.bits(S64) ^ b.bits(S64)) < 0) & (rest != 0.0), rest + b, rest)
    return pick(value == 0.0, value.abs().call("copysign", b), value)


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "acos": acos, "acosh": acosh, "asin": asin, "asinh": asinh, "atan": atan, "atan2": atan2, "atanh": atanh, "cbrt": cbrt,
    "cosh": cosh, "cosine": cosine, "modulo": modulo, "power": power, "remainder": remainder, "sine": sine, "sinh": sinh,
    "tan": tan,
}  # fmt: skip
