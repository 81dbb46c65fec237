"""Functions of f32 vectors, written out in multiplies and adds; their errors are measured in tests.

Errors are in units in the last place of the result (ulp), over all finite f32 arguments unless a range is given. NaN gives NaN,
infinity what the formula gives in IEEE arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.candidates.llvm._text import Function, f32, vec

LOG2_E = 1.4426950408889634
# ln 2 in two parts, the first of 15 bits, so that n times it is exact for the n that occur (Cody and Waite 1980).
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
# Added to a float below 2^22 it leaves the nearest integer in the low bits of the sum.
ROUND, ROUND_BITS = 1.5 * 2.0**23, 0x4B400000
# (e^r - 1 - r) / r^2 on |r| <= ln(2)/2: Cephes expf (Moshier).
EXP = (5.0000001201e-1, 1.6666665459e-1, 4.1665795894e-2, 8.3334519073e-3, 1.3981999507e-3, 1.9875691500e-4)
# (tanh(x) - x) / x^3 in x^2 on |x| < 0.625: Cephes tanhf (Moshier).
TANH = (-3.33332819422e-1, 1.33314422036e-1, -5.37397155531e-2, 2.06390887954e-2, -5.70498872745e-3)
# log(erfc(z) exp(z^2) / t) / (1 - t), t = 1 / (1 + 0.45 z), in 1 - t for 0 <= z < 10.3: own minimax fit, 1.4e-8 off in the
# logarithm. The form is that of Press et al., Numerical Recipes, 6.2, but for the root at z = 0, where nothing cancels now.
ERFC_STEP = 0.45
ERFC = (
    -1.50750923,
    -0.213004857,
    0.285888404,
    0.221337736,
    -0.0944388583,
    0.129892126,
    -0.604961038,
    0.590884924,
    -0.179064393,
)
# (erf(x) - x) / x in x^2 on |x| < 1: Cephes erff (Moshier), whose first coefficient is 1 more.
ERF = (1.28379165726710e-1, -3.761262582423300e-1, 1.128358514861418e-1, -2.685381193529856e-2, 5.188327685732524e-3,
       -8.010193625184903e-4, 7.853861353153693e-5)  # fmt: skip
SQRT_2_OVER_PI = 0.7978845608028654


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

    def exp(self, x: str, low: str | None = None) -> str:
        """e^(x + low), -1.5 <= low <= 0, within 1.3 ulp; denormal too, infinity past 88.73 and zero below -104."""
        f, i32 = self.f, vec(self.lanes, "i32")
        p, n = self._reduced_exp(self.at_least(self.at_most(x, self.const(89.0)), self.const(-104.5)), low)
        # 2^n in two factors: n reaches from -154 to 127, an exponent from -126 to 127.
        half = f.v(f"ashr {i32} {n}, splat (i32 1)")
        return self.op("fmul", self.op("fmul", p, self._power_of_2(half)), self._power_of_2(f.v(f"sub {i32} {n}, {half}")))

    def bounded_exp(self, x: str) -> str:
        """e^x within 1.3 ulp, but zero below -86.99: no denormals."""
        return self._bounded(self.at_least(self.at_most(x, self.const(89.0)), self.const(-87.4)))

    def _bounded(self, x: str, low: str | None = None) -> str:
        """e^(x + low) between -87.6 and 89; zero below -87: the factor 2^-127 is zero."""
        p, n = self._reduced_exp(x, low)
        return self.op("fmul", p, self._power_of_2(n))

    def _power_of_2(self, n: str) -> str:
        f, i32 = self.f, vec(self.lanes, "i32")
        bits = f.v(f"shl {i32} {f.v(f'add {i32} {n}, splat (i32 127)')}, splat (i32 23)")
        return f.v(f"bitcast {i32} {bits} to {self.type}")

    def _reduced_exp(self, x: str, low: str | None) -> tuple[str, str]:
        """2 e^r and the integer n - 1, where x + low = n ln 2 + r and |r| <= ln(2) / 2: doubled, as 2^128 is no number."""
        f, i32 = self.f, vec(self.lanes, "i32")
        shifted = self.fma(x if low is None else self.op("fadd", x, low), self.const(LOG2_E), self.const(ROUND))
        n = self.op("fsub", shifted, self.const(ROUND))
        r = self.fma(n, self.const(-LN2_HIGH), x)
        r = self.fma(n, self.const(-LN2_LOW), r)
        if low is not None:
            r = self.op("fadd", r, low)
        first = self.fma(r, self.const(2.0), self.const(2.0))
        p = self.fma(self.polynomial(r, [2 * c for c in EXP]), self.op("fmul", r, r), first)
        return p, f.v(f"sub {i32} {f.v(f'bitcast {self.type} {shifted} to {i32}')}, splat (i32 {ROUND_BITS + 1})")

    def logistic(self, x: str) -> str:
        """1 / (1 + e^-x) within 3.2 ulp down to -87; below at most 2^-125 off."""
        return self.op("fdiv", self.const(1.0), self.op("fadd", self.bounded_exp(self.negated(x)), self.const(1.0)))

    def negated(self, x: str) -> str:
        return self.f.v(f"fneg {self.type} {x}")

    def silu(self, x: str) -> str:
        """x / (1 + e^-x) within 3 ulp down to -87; below at most 2^-121 off."""
        return self.op("fdiv", x, self.op("fadd", self.bounded_exp(self.negated(x)), self.const(1.0)))

    def tanh(self, x: str) -> str:
        """1 - 2 / (e^2|x| + 1) with x's sign, a polynomial where that cancels: within 1.4 ulp."""
        size = self.call("fabs", x)
        square = self.op("fmul", x, x)
        near = self.fma(self.op("fmul", self.polynomial(square, TANH), square), x, x)
        e = self.bounded_exp(self.op("fadd", size, size))
        far = self.op("fsub", self.const(1.0), self.op("fdiv", self.const(2.0), self.op("fadd", e, self.const(1.0))))
        small = self.compare("olt", size, self.const(0.625))
        return self.call("copysign", self.select(small, near, far), x)

    def _erfc_parts(self, scaled: str, half: str, z: str) -> tuple[str, str, str]:
        """t, high, low such that erfc(sqrt(half z)) = t e^(high + low), from `scaled` = 0.45 sqrt(half z)."""
        t = self.op("fdiv", self.const(1.0), self.op("fadd", scaled, self.const(1.0)))
        # The square is needed beyond f32: its rounding error is carried along.
        square = self.op("fmul", half, z)
        high = self.negated(square)
        error = self.fma(half, z, high)
        beyond = self.op("fmul", scaled, t)  # 1 - t
        return t, high, self.fma(self.polynomial(beyond, ERFC), beyond, self.negated(error))

    def _erfc_of_size(self, x: str) -> str:
        """erfc(|x|)."""
        z = self.at_most(self.call("fabs", x), self.const(10.3))
        t, high, low = self._erfc_parts(self.op("fmul", z, self.const(ERFC_STEP)), z, z)
        return self.op("fmul", t, self.exp(high, low))

    def erf(self, x: str) -> str:
        """Within 1 ulp."""
        square = self.op("fmul", x, x)
        near = self.fma(x, self.polynomial(square, ERF), x)
        far = self.op("fsub", self.const(1.0), self._erfc_of_size(x))
        return self.select(self.compare("olt", self.call("fabs", x), self.const(1.0)), near, self.call("copysign", far, x))

    def erfc(self, x: str) -> str:
        """Within 5.5 ulp, denormal too."""
        tail = self._erfc_of_size(x)
        positive = self.compare("oge", x, self.const(0.0))
        far = self.select(positive, tail, self.op("fsub", self.const(2.0), tail))
        small = self.compare("olt", self.call("fabs", x), self.const(0.5))
        return self.select(small, self.op("fsub", self.const(1.0), self.erf(x)), far)

    def gelu(self, x: str) -> str:
        """x * Phi(x), Phi(x) = erfc(-x / sqrt 2) / 2, which keeps the digits of the negative tail.

        Within 5.5 ulp down to -12.9; below at most 2^-124 off, zero from -13.13 on.
        """
        size = self.at_most(self.call("fabs", x), self.const(13.13))
        scaled = self.op("fmul", size, self.const(ERFC_STEP * 0.5**0.5))
        halved = self.op("fmul", size, self.const(0.5))
        t, high, low = self._erfc_parts(scaled, halved, size)
        half = self.op("fmul", self.op("fmul", t, self.const(0.5)), self._bounded(high, low))
        positive = self.compare("ogt", x, self.const(0.0))
        return self.op("fmul", x, self.select(positive, self.op("fsub", self.const(1.0), half), half))

    def gelu_tanh(self, x: str) -> str:
        """x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3): 0.5 x (1 + tanh u) without its cancellation.

        Within 2.5 ulp down to -1; below at most 2^-23 |x| off.
        """
        square = self.op("fmul", x, x)
        k = -2 * SQRT_2_OVER_PI
        exponent = self.op("fmul", x, self.fma(square, self.const(k * 0.044715), self.const(k)))
        return self.op("fdiv", x, self.op("fadd", self.bounded_exp(exponent), self.const(1.0)))
