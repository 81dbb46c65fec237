"""Functions of f32 vectors, written out in multiplies and adds; their errors are measured in tests.

Errors are in units in the last place of the result (ulp), over all finite f32 arguments unless a range is given.
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
# log(erfc(z) exp(z^2) / t) in t = 1 / (1 + 0.4 z) for z >= 0: own minimax fit (relative error of erfc 9e-8), in the form of
# Press et al., Numerical Recipes, 6.2.
ERFC_STEP = 0.4
ERFC = (-1.4887055, 1.0016038, 0.40041855, 0.29803115, -0.43835524, 0.9923578, -1.4805027, 0.92217356, -0.20702165)
# erf(x) / x in x^2 on |x| < 1: Cephes erff (Moshier).
ERF = (1.128379165726710, -3.761262582423300e-1, 1.128358514861418e-1, -2.685381193529856e-2, 5.188327685732524e-3,
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

    def exp(self, x: str) -> str:
        """e^x within 1.1 ulp, denormal results too; infinity past 88.73, zero below -104."""
        f, i32 = self.f, vec(self.lanes, "i32")
        x = self.at_least(self.at_most(x, self.const(89.0)), self.const(-104.5))
        p, n = self._reduced_exp(x)
        # 2^n in two factors: n reaches from -151 to 128, an exponent from -126 to 127.
        half = f.v(f"ashr {i32} {n}, splat (i32 1)")
        for part in (half, f.v(f"sub {i32} {n}, {half}")):
            bits = f.v(f"shl {i32} {f.v(f'add {i32} {part}, splat (i32 127)')}, splat (i32 23)")
            p = self.op("fmul", p, f.v(f"bitcast {i32} {bits} to {self.type}"))
        return p

    def bounded_exp(self, x: str) -> str:
        """e^x where neither end of f32 matters: x below -87 counts as -87, above 88 as 88."""
        f, i32 = self.f, vec(self.lanes, "i32")
        p, n = self._reduced_exp(self.at_least(self.at_most(x, self.const(88.0)), self.const(-87.0)))
        bits = f.v(f"add {i32} {f.v(f'bitcast {self.type} {p} to {i32}')}, {f.v(f'shl {i32} {n}, splat (i32 23)')}")
        return f.v(f"bitcast {i32} {bits} to {self.type}")

    def _reduced_exp(self, x: str) -> tuple[str, str]:
        """e^r and the integer n with x = n ln 2 + r, |r| <= ln(2) / 2."""
        f, i32 = self.f, vec(self.lanes, "i32")
        shifted = self.fma(x, self.const(LOG2_E), self.const(ROUND))
        n = self.op("fsub", shifted, self.const(ROUND))
        r = self.fma(n, self.const(-LN2_HIGH), x)
        r = self.fma(n, self.const(-LN2_LOW), r)
        p = self.fma(self.polynomial(r, EXP), self.op("fmul", r, r), self.op("fadd", r, self.const(1.0)))
        return p, f.v(f"sub {i32} {f.v(f'bitcast {self.type} {shifted} to {i32}')}, splat (i32 {ROUND_BITS})")

    def logistic(self, x: str) -> str:
        """1 / (1 + e^-x)."""
        return self.op("fdiv", self.const(1.0), self.op("fadd", self.bounded_exp(self.negated(x)), self.const(1.0)))

    def negated(self, x: str) -> str:
        return self.f.v(f"fneg {self.type} {x}")

    def silu(self, x: str) -> str:
        return self.op("fdiv", x, self.op("fadd", self.bounded_exp(self.negated(x)), self.const(1.0)))

    def tanh(self, x: str) -> str:
        """1 - 2 / (e^2|x| + 1) with x's sign, a polynomial where that cancels."""
        size = self.call("fabs", x)
        square = self.op("fmul", x, x)
        near = self.fma(self.op("fmul", self.polynomial(square, TANH), square), x, x)
        e = self.bounded_exp(self.op("fadd", size, size))
        far = self.op("fsub", self.const(1.0), self.op("fdiv", self.const(2.0), self.op("fadd", e, self.const(1.0))))
        small = self.compare("olt", size, self.const(0.625))
        return self.select(small, near, self.call("copysign", far, x))

    def erfc_of_size(self, z: str, *, to_the_end: bool = True) -> str:
        """erfc(z) for z >= 0; not `to_the_end`, what is below 1e-37 may be off."""
        t = self.op("fdiv", self.const(1.0), self.fma(z, self.const(ERFC_STEP), self.const(1.0)))
        # exp(-z^2) needs z^2 beyond f32: its rounding error is carried along.
        square = self.op("fmul", z, z)
        error = self.fma(z, z, self.negated(square))
        power = self.op("fsub", self.op("fsub", self.polynomial(t, ERFC), error), square)
        return self.op("fmul", t, self.exp(power) if to_the_end else self.bounded_exp(power))

    def erf(self, x: str) -> str:
        square = self.op("fmul", x, x)
        near = self.op("fmul", x, self.polynomial(square, ERF))
        size = self.call("fabs", x)
        far = self.op("fsub", self.const(1.0), self.erfc_of_size(self.at_most(size, self.const(12.0))))
        return self.select(self.compare("olt", size, self.const(1.0)), near, self.call("copysign", far, x))

    def erfc(self, x: str) -> str:
        size = self.call("fabs", x)
        tail = self.erfc_of_size(self.at_most(size, self.const(12.0)))
        positive = self.compare("oge", x, self.const(0.0))
        far = self.select(positive, tail, self.op("fsub", self.const(2.0), tail))
        return self.select(self.compare("olt", size, self.const(0.5)), self.op("fsub", self.const(1.0), self.erf(x)), far)

    def gelu(self, x: str) -> str:
        """x * Phi(x), Phi(x) = erfc(-x / sqrt 2) / 2: keeps the digits of the negative tail."""
        z = self.at_most(self.op("fmul", self.call("fabs", x), self.const(0.5**0.5)), self.const(12.0))
        half = self.op("fmul", self.erfc_of_size(z, to_the_end=False), self.const(0.5))
        positive = self.compare("ogt", x, self.const(0.0))
        return self.op("fmul", x, self.select(positive, self.op("fsub", self.const(1.0), half), half))

    def gelu_tanh(self, x: str) -> str:
        """x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3): 0.5 x (1 + tanh u) without its cancellation."""
        square = self.op("fmul", x, x)
        k = -2 * SQRT_2_OVER_PI
        exponent = self.op("fmul", x, self.fma(square, self.const(k * 0.044715), self.const(k)))
        return self.op("fdiv", x, self.op("fadd", self.bounded_exp(exponent), self.const(1.0)))
