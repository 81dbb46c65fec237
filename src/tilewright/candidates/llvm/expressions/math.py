"""Functions of f32 vectors, written out in multiplies and adds; their errors are measured in tests.

Errors are in units in the last place of the result (ulp), over all finite f32 arguments unless a range is given. NaN gives NaN,
infinity what the formula gives in IEEE arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.candidates._approximations import (
    LOG2_UPPER,
    LOG2_UPPER_TO,
    SQRT_2_OVER_PI,
    TANH,
    UPPER,
    UPPER_TO,
)
from tilewright.candidates.llvm.expressions.text import Function, f32, vec

LOG2_E = 1.4426950408889634
# ln 2 in two parts, the first of 15 bits, so that n times it is exact for the n that occur (Cody and Waite 1980).
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
# Added to a float below 2^22 it leaves the nearest integer in the low bits of the sum.
ROUND, ROUND_BITS = 1.5 * 2.0**23, 0x4B400000
# (e^r - 1 - r) / r^2 on |r| <= ln(2)/2: Cephes expf (Moshier).
EXP = (5.0000001201e-1, 1.6666665459e-1, 4.1665795894e-2, 8.3334519073e-3, 1.3981999507e-3, 1.9875691500e-4)
# x Phi(-x) exp(x^2 / 2), Phi the normal distribution, in (x - a) / (x + 3) for 0.99 <= x <= 14.4: own minimax fit, 6e-9 off. Of
# the first coefficient nothing is lost in f32: a was sought for that.
TAIL_FROM, TAIL_TO = 1.676025390625, 3.0
TAIL = (0.3199808597564697, 0.27389878034591675, -0.3793184757232666, 0.2554440498352051, -0.05921177566051483,
        -0.027270769700407982, 0.012494838796555996, 0.0069593992084264755, -0.004057207144796848)  # fmt: skip
# 2^r on |r| <= 1/2: own minimax fit, 2^-18 off.
EXP2 = (0.9999992847442627, 0.6931217908859253, 0.2402474582195282, 0.055917903780937195, 0.009570103138685226)
# -erf(x) / x on |x| < 0.7075: own minimax fit, 5e-9 of erfc(x) off.
ERFC = (-1.1283791065216064, 0.37612417340278625, -0.1128135621547699, 0.026749806478619576, -0.004956061020493507,
        0.0005663267220370471)  # fmt: skip
# (erf(x) - x) / x in x^2 on |x| < 1: Cephes erff (Moshier), whose first coefficient is 1 more.
ERF = (1.28379165726710e-1, -3.761262582423300e-1, 1.128358514861418e-1, -2.685381193529856e-2, 5.188327685732524e-3,
       -8.010193625184903e-4, 7.853861353153693e-5)  # fmt: skip
# (log(1 + f) - f + f^2 / 2) / f^3 on sqrt(1/2) <= 1 + f < sqrt(2): Cephes logf (Moshier).
LOG = (3.3333331174e-1, -2.4999993993e-1, 2.0000714765e-1, -1.6668057665e-1, 1.4249322787e-1, -1.2420140846e-1,
       1.1676998740e-1, -1.1514610310e-1, 7.0376836292e-2)  # fmt: skip
SQRT_HALF_BITS = 0x3F3504F3
# Where gelu_tanh's exponent is 89, beyond f32; 89.5, which gives infinity; and -87.4, which gives zero.
GELU_TANH_FROM, GELU_TANH_PAST, GELU_TANH_TO = -10.07244, -10.09427, 10.00380


class Math:
    """Functions on vectors of `lanes` floats, emitted into one function."""

    def __init__(self, f: Function, lanes: int):
        self.f, self.lanes, self.type = f, lanes, vec(lanes, "float")

    def const(self, value: float) -> str:
        return f"splat (float {f32(value)})"

    def op(self, name: str, a: str, b: str) -> str:
        """fadd, fsub, fmul, fdiv."""
        return self.f.v(f"{name} {self.type} {a}, {b}")

    def call(self, name: str, *args: str) -> str:
        t = self.type
        from_ = f"llvm.{name}.v{self.lanes}f32"
        return self.f.intrinsic(from_, t, *((t, a) for a in args))

    def fma(self, a: str, b: str, c: str) -> str:
        """a * b + c, rounded once."""
        return self.call("fma", a, b, c)

    def compare(self, how: str, a: str, b: str) -> str:
        return self.f.v(f"fcmp {how} {self.type} {a}, {b}")

    def select(self, mask: str, a: str, b: str) -> str:
        return self.f.v(f"select {vec(self.lanes, 'i1')} {mask}, {self.type} {a}, {self.type} {b}")

    def at_most(self, x: str, bound: str) -> str:
        """min(x, bound); NaN stays."""
        return self.select(self.compare("olt", bound, x), bound, x)

    def at_least(self, x: str, bound: str) -> str:
        """max(x, bound); NaN stays."""
        return self.select(self.compare("ogt", bound, x), bound, x)

    def polynomial(self, x: str, coefficients: Sequence[float]) -> str:
        """Lowest coefficient first (Horner)."""
        value = self.const(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            value = self.fma(value, x, self.const(c))
        return value

    def exp(self, x: str) -> str:
        """e^x within 1.1 ulp; denormal too, infinity past 88.73 and zero below -104."""
        beyond, n = self._reduced_exp(self.at_least(self.at_most(x, self.const(89.0)), self.const(-104.5)))
        return self._scaled(self.fma(beyond, self.const(2.0), self.const(2.0)), n)

    def _scaled(self, x: str, n: str) -> str:
        """x 2^n in two factors: n reaches from -154 to 127, an exponent from -126 to 127."""
        f, i32 = self.f, vec(self.lanes, "i32")
        half = f.v(f"ashr {i32} {n}, splat (i32 1)")
        return self.op("fmul", self.op("fmul", x, self._power_of_2(half)), self._power_of_2(f.v(f"sub {i32} {n}, {half}")))

    def bounded_exp(self, x: str) -> str:
        """e^x within 1.1 ulp, but zero below -86.99: no denormals."""
        beyond, n = self._reduced_exp(self.at_least(self.at_most(x, self.const(89.0)), self.const(-87.4)))
        p = self.fma(beyond, self.const(2.0), self.const(2.0))
        return self.op("fmul", p, self._power_of_2(n))  # the factor 2^-127 is zero

    def _power_of_2(self, n: str) -> str:
        f, i32 = self.f, vec(self.lanes, "i32")
        bits = f.v(f"shl {i32} {f.v(f'add {i32} {n}, splat (i32 127)')}, splat (i32 23)")
        return f.v(f"bitcast {i32} {bits} to {self.type}")

    def _reduced_exp(self, x: str, low: str | None = None, factors: tuple[str, str] | None = None) -> tuple[str, str]:
        """e^r - 1 and the integer n - 1, where x + low = n ln 2 + r and |r| <= ln(2) / 2; |low| < 2^-16. 1 less as 2^128 is
        no number. Of a product, `factors`, not even its rounding to x is felt."""
        f, i32 = self.f, vec(self.lanes, "i32")
        shifted = self.fma(x, self.const(LOG2_E), self.const(ROUND))
        n = self.op("fsub", shifted, self.const(ROUND))
        if factors is None:
            first = self.fma(n, self.const(-LN2_HIGH), x)  # exact
        else:
            first = self.fma(*factors, self.op("fmul", n, self.const(-LN2_HIGH)))
        if low is None:
            r = rest = self.fma(n, self.const(-LN2_LOW), first)
        else:
            small = self.fma(n, self.const(-LN2_LOW), low)
            r = self.op("fadd", first, small)
            rest = self.op("fsub", small, self.op("fsub", r, first))  # what r has lost
        square = self.op("fmul", r, r)
        beyond = self.fma(self.polynomial(r, EXP), square, rest)
        if low is not None:
            beyond = self.op("fadd", r, beyond)
        return beyond, f.v(f"sub {i32} {f.v(f'bitcast {self.type} {shifted} to {i32}')}, splat (i32 {ROUND_BITS + 1})")

    def _half_of_one_more(self, x: str, factors: tuple[str, str] | None = None) -> str:
        """(1 + e^x) / 2; infinity past 89. `factors`: whose product x is, from -87.4 to 89.5."""
        if factors is None:
            x = self.select(self.compare("ogt", x, self.const(89.0)), self.const(89.5), self.at_least(x, self.const(-87.4)))
        beyond, n = self._reduced_exp(x, factors=factors)
        power = self._power_of_2(n)
        return self.op("fadd", self.fma(beyond, power, self.const(0.5)), power)

    def logistic(self, x: str) -> str:
        """1 / (1 + e^-x) within 2 ulp down to -88; below at most 2^-127 off."""
        return self.op("fdiv", self.const(0.5), self._half_of_one_more(self.negated(x)))

    def exponential_minus_one(self, x: str) -> str:
        """e^x - 1 within 2 ulp; a small x is itself."""
        held = self.at_least(self.at_most(x, self.const(89.0)), self.const(-18.0))
        beyond, n = self._reduced_exp(held)
        power = self._power_of_2(n)  # half of it, which f32 has
        value = self.op("fmul", self.fma(beyond, power, self.op("fsub", power, self.const(0.5))), self.const(2.0))
        return self.select(self.compare("olt", self.call("fabs", x), self.const(2.0**-25)), x, value)

    def log(self, x: str) -> str:
        """Natural logarithm within 1 ulp."""
        small = self.compare("olt", x, self.const(2.0**-126))
        normal = self.select(small, self.op("fmul", x, self.const(2.0**24)), x)
        f, n = self._part_and_exponent(normal)
        n = self.op("fsub", n, self.select(small, self.const(24.0), self.const(0.0)))
        return self._log_ends(x, self._log_of(f, n))

    def log_plus_one(self, x: str) -> str:
        """log(1 + x) within 2 ulp: what the sum has lost is carried along."""
        one = self.const(1.0)
        sum_ = self.op("fadd", x, one)
        lost = self.op("fsub", x, self.op("fsub", sum_, one))
        f, n = self._part_and_exponent(sum_)
        i32 = vec(self.lanes, "i32")
        exponent = self.f.v(f"fptosi {self.type} {self.at_most(n, self.const(126.0))} to {i32}")
        back = self._power_of_2(self.f.v(f"sub {i32} zeroinitializer, {exponent}"))
        value = self._log_ends(sum_, self._log_of(self.fma(lost, back, f), n))
        return self.select(self.compare("olt", self.call("fabs", x), self.const(2.0**-25)), x, value)

    def _part_and_exponent(self, x: str) -> tuple[str, str]:
        """f and n: x = (1 + f) 2^n, sqrt(1/2) <= 1 + f < sqrt(2); of a normal number."""
        v, i32 = self.f.v, vec(self.lanes, "i32")
        raw = v(f"bitcast {self.type} {x} to {i32}")
        n = v(f"ashr {i32} {v(f'sub {i32} {raw}, splat (i32 {SQRT_HALF_BITS})')}, splat (i32 23)")
        part = v(f"sub {i32} {raw}, {v(f'shl {i32} {n}, splat (i32 23)')}")
        return self.op("fsub", v(f"bitcast {i32} {part} to {self.type}"), self.const(1.0)), v(
            f"sitofp {i32} {n} to {self.type}"
        )

    def _log_of(self, f: str, n: str) -> str:
        square = self.op("fmul", f, f)
        value = self.op("fmul", self.op("fmul", f, square), self.polynomial(f, LOG))
        value = self.fma(square, self.const(-0.5), self.fma(n, self.const(LN2_LOW), value))
        return self.fma(n, self.const(LN2_HIGH), self.op("fadd", f, value))

    def _log_ends(self, x: str, value: str) -> str:
        """Put in the logarithms of zero, infinity, numbers below zero and NaN."""
        value = self.select(self.compare("oeq", x, self.const(0.0)), self.const(-float("inf")), value)
        value = self.select(self.compare("oeq", x, self.const(float("inf"))), x, value)
        return self.select(self.compare("oge", x, self.const(0.0)), value, self.const(float("nan")))

    def negated(self, x: str) -> str:
        return self.f.v(f"fneg {self.type} {x}")

    def silu(self, x: str) -> str:
        """x / (1 + e^-x) within 2 ulp down to -88; below at most 2^-121 off."""
        return self.op("fdiv", self.op("fmul", x, self.const(0.5)), self._half_of_one_more(self.negated(x)))

    def tanh(self, x: str) -> str:
        """1 - 2 / (e^2|x| + 1) with x's sign, a polynomial where that cancels: within 1.4 ulp."""
        size = self.call("fabs", x)
        square = self.op("fmul", x, x)
        near = self.fma(self.op("fmul", self.polynomial(square, TANH), square), x, x)
        e = self.bounded_exp(self.op("fadd", size, size))
        far = self.op("fsub", self.const(1.0), self.op("fdiv", self.const(2.0), self.op("fadd", e, self.const(1.0))))
        small = self.compare("olt", size, self.const(0.625))
        return self.call("copysign", self.select(small, near, far), x)

    def _tail(self, size: str, a: str, b: str) -> tuple[str, str, str]:
        """sqrt 2 size Phi(-size), for a size from 1 to 15, where a b is size^2 / 2, as p, q, n: (p + p q) 2^n."""
        t = self.op("fdiv", self.op("fsub", size, self.const(TAIL_FROM)), self.op("fadd", size, self.const(TAIL_TO)))
        # The square is needed beyond f32: its rounding error is carried along.
        square = self.negated(self.op("fmul", a, b))
        beyond, n = self._reduced_exp(square, self.negated(self.fma(a, b, square)))
        return self.polynomial(t, [2 * 2**0.5 * c for c in TAIL]), beyond, n

    def _erfc_of_size(self, x: str) -> str:
        """erfc(|x|) for |x| >= 0.7072: 2 Phi(-sqrt 2 |x|)."""
        z = self.at_most(self.call("fabs", x), self.const(10.3))
        p, q, n = self._tail(self.op("fmul", z, self.const(2**0.5)), z, z)
        product = self.fma(p, q, p)
        lost = self.fma(p, q, self.op("fsub", p, product))
        inverse = self.op("fdiv", self.const(1.0), z)
        near = self.op("fmul", product, inverse)
        rest = self.op("fadd", self.fma(self.negated(near), z, product), lost)
        return self._scaled(self.fma(rest, inverse, near), n)

    def erf(self, x: str) -> str:
        """Within 1 ulp."""
        square = self.op("fmul", x, x)
        near = self.fma(x, self.polynomial(square, ERF), x)
        far = self.op("fsub", self.const(1.0), self._erfc_of_size(x))
        return self.select(self.compare("olt", self.call("fabs", x), self.const(1.0)), near, self.call("copysign", far, x))

    def erfc(self, x: str) -> str:
        """Within 2.7 ulp, denormal too."""
        tail = self._erfc_of_size(x)
        far = self.select(self.compare("oge", x, self.const(0.0)), tail, self.op("fsub", self.const(2.0), tail))
        small = self.compare("olt", self.call("fabs", x), self.const(0.7074))
        square = self.op("fmul", x, x)
        linear = self.fma(x, self.const(ERFC[0]), self.const(1.0))  # what is not linear is added last, being small
        near = self.fma(self.op("fmul", x, square), self.polynomial(square, ERFC[1:]), linear)
        return self.select(small, near, far)

    def gelu(self, x: str) -> str:
        """x Phi(x) as max(x, 0) - |x| Phi(-|x|), which keeps the digits of the negative tail.

        Within 1.8 ulp down to -0.25, 2.6 to -1, below 2.6 + x^2 ulp; zero from -13.2.
        """
        size, half = self.call("fabs", x), self.op("fmul", x, self.const(0.5))
        size, positive = self.at_most(size, self.const(13.215)), self.fma(size, self.const(0.5), half)  # NaN at -infinity
        less = self.op("fmul", size, self.const(-0.5))
        beyond, n = self._reduced_exp(self.op("fmul", size, less), factors=(size, less))
        t = self.op("fdiv", size, self.op("fadd", size, self.const(UPPER_TO)))
        upper = self.polynomial(t, [2 * c for c in UPPER])
        upper = self.op("fmul", self.fma(upper, beyond, upper), self._power_of_2(n))  # the factor 2^-127 is zero
        return self.call("copysign", self.fma(self.negated(upper), size, positive), x)

    def gelu_to_bf16(self, x: str) -> str:
        """gelu(x) for a value that is rounded to bf16 at once: within 2^-16.5 of it down to -5, 2^-14.9 to -12.9; zero from
        -12.98. No division, and one exponential whose argument comes from a polynomial: half the work."""
        size, half = self.call("fabs", x), self.op("fmul", x, self.const(0.5))
        positive = self.fma(size, self.const(0.5), half)  # NaN at -infinity
        size = self.at_most(size, self.const(LOG2_UPPER_TO))
        power = self.polynomial(size, LOG2_UPPER)
        shifted = self.op("fadd", power, self.const(ROUND))
        p = self.polynomial(self.op("fsub", power, self.op("fsub", shifted, self.const(ROUND))), EXP2)
        i32 = vec(self.lanes, "i32")
        n = self.f.v(f"sub {i32} {self.f.v(f'bitcast {self.type} {shifted} to {i32}')}, splat (i32 {ROUND_BITS})")
        upper = self.op("fmul", p, self._power_of_2(n))
        return self.fma(self.negated(upper), size, positive)

    def gelu_tanh(self, x: str) -> str:
        """x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3): 0.5 x (1 + tanh u) without its cancellation.

        Within 2.5 ulp down to -1; below at most 2^-23 |x| off.
        """
        k = -2 * SQRT_2_OVER_PI
        z = self.at_most(x, self.const(GELU_TANH_TO))
        z = self.select(self.compare("olt", x, self.const(GELU_TANH_FROM)), self.const(GELU_TANH_PAST), z)
        factor = self.fma(self.op("fmul", z, z), self.const(k * 0.044715), self.const(k))
        return self.op(
            "fdiv", self.op("fmul", x, self.const(0.5)), self._half_of_one_more(self.op("fmul", z, factor), (z, factor))
        )
