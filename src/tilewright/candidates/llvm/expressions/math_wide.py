"""Functions of f32 vectors, worked out in f64, so that sums of a series, cut off past 2^-36, are right to the last place.

They are what models seldom ask for: powers, trigonometry and its inverses, remainders. Errors are in units in the last place of
an f32 result (ulp), over all finite arguments. NaN gives NaN, infinities and zeros what C's functions of the names give.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import cache

from tilewright.candidates.llvm.expressions.text import Function, vec

LN2, SQRT_HALF_BITS = math.log(2), 0x3FE6A09E667F3BCD
# pi / 2 as two f64: the first one's product with a whole number below 2^27, taken from an f32, leaves no error.
HALF_PI, HALF_PI_LOW = 1.5707963267948966, 6.123233995736766e-17
LARGE = 2.0**27  # an angle from which turns are counted by `TURNS`
LARGE_EXPONENT = 127 + 27  # of its bits
EXP = [1 / math.factorial(k) for k in range(11)]  # |r| <= ln(2) / 2: 2e-13 off
LOG = [2 / (2 * k + 1) for k in range(8)]  # 2 atanh(s) / s in s^2, |s| <= 0.172: 3e-14 off
SINE = [(-1) ** k / math.factorial(2 * k + 1) for k in range(6)]  # sin(r) / r in r^2, |r| <= pi / 4: 7e-12 off
COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(7)]  # the same of cos(r): 4e-13 off
ATAN = [(-1) ** k / (2 * k + 1) for k in range(13)]  # atan(t) / t in t^2, |t| <= tan(pi / 8): 5e-12 off
EIGHTH = math.tan(math.pi / 8)
DIGITS = 29  # bits of a quotient that one step of a remainder finds: a product with 24 bits is exact
STEPS = 10  # which together reach from the largest f32 to the smallest


def f64(value: float) -> str:
    """A double as LLVM wants it."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


@cache
def turns() -> tuple[tuple[float, float, float], ...]:
    """For each exponent e of a large f32 m 2^e, m a whole number: 2^e 2/pi without multiples of 4, as three numbers of at most
    29 bits, whose products with m are exact (Payne and Hanek 1983)."""
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
    found: list[tuple[float, float, float]] = []
    for e in range(LARGE_EXPONENT - 150, 255 - 150):
        rest = (whole << e) % (4 << bits)
        parts: list[float] = []
        for last in (27, 56, 85):
            top = rest >> bits - last
            parts.append(top / 2.0**last)
            rest -= top << bits - last
        found.append((parts[0], parts[1], parts[2]))
    return tuple(found)


class WideMath:
    """Functions on vectors of `lanes` floats, emitted into one function."""

    def __init__(self, f: Function, lanes: int):
        self.f, self.lanes = f, lanes
        self.type, self._single, self._bits, self._i1 = (vec(lanes, t) for t in ("double", "float", "i64", "i1"))

    def call(self, fn: str, args: Sequence[str]) -> str:
        """Function `fn`, as `map` names it, of f32 vectors."""
        wide = [self.f.v(f"fpext {self._single} {a} to {self.type}") for a in args]
        return self.f.v(f"fptrunc {self.type} {getattr(self, fn)(*wide)} to {self._single}")

    # -- instructions

    def const(self, value: float) -> str:
        return f"splat (double {f64(value)})"

    def op(self, name: str, a: str, b: str) -> str:
        return self.f.v(f"{name} {self.type} {a}, {b}")

    def one(self, name: str, *args: str) -> str:
        return self.f.intrinsic(f"llvm.{name}.v{self.lanes}f64", self.type, *((self.type, a) for a in args))

    def compare(self, how: str, a: str, b: str) -> str:
        return self.f.v(f"fcmp {how} {self.type} {a}, {b}")

    def select(self, mask: str, a: str, b: str) -> str:
        return self.f.v(f"select {self._i1} {mask}, {self.type} {a}, {self.type} {b}")

    def both(self, a: str, b: str, how: str = "and") -> str:
        return self.f.v(f"{how} {self._i1} {a}, {b}")

    def fma(self, a: str, b: str, c: str) -> str:
        return self.one("fma", a, b, c)

    def negated(self, x: str) -> str:
        return self.f.v(f"fneg {self.type} {x}")

    def polynomial(self, x: str, coefficients: Sequence[float]) -> str:
        value = self.const(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            value = self.fma(value, x, self.const(c))
        return value

    def _held(self, x: str, low: float, high: float) -> str:
        """Between two numbers; NaN stays."""
        x = self.select(self.compare("olt", x, self.const(low)), self.const(low), x)
        return self.select(self.compare("ogt", x, self.const(high)), self.const(high), x)

    # -- exponentials and logarithms

    def _exp(self, x: str) -> str:
        """e^x; past what f32 has, a number that f32 has not."""
        x = self._held(x, -600.0, 600.0)
        n = self.one("rint", self.op("fmul", x, self.const(1 / LN2)))
        r = self.fma(n, self.const(-LN2), x)
        whole = self.f.v(f"fptosi {self.type} {n} to {vec(self.lanes, 'i32')}")  # of a NaN anything: the product is one
        wide = self.f.v(f"sext {vec(self.lanes, 'i32')} {whole} to {self._bits}")
        power = self.f.v(f"shl {self._bits} {self.f.v(f'add {self._bits} {wide}, splat (i64 1023)')}, splat (i64 52)")
        scale = self.f.v(f"bitcast {self._bits} {power} to {self.type}")
        known = self.compare("ord", x, x)
        return self.select(known, self.op("fmul", self.polynomial(r, EXP), scale), x)

    def log(self, x: str) -> str:
        """Natural logarithm of a number that is 2^-1000 or more, zero or infinite, within 2^-44 of it; NaN of one below."""
        f, bits = self.f, self._bits
        raw = f.v(f"bitcast {self.type} {x} to {bits}")
        shifted = f.v(f"sub {bits} {raw}, splat (i64 {SQRT_HALF_BITS})")
        n = f.v(f"ashr {bits} {shifted}, splat (i64 52)")
        m = f.v(f"sub {bits} {raw}, {f.v(f'shl {bits} {n}, splat (i64 52)')}")
        part = self.op("fsub", f.v(f"bitcast {bits} {m} to {self.type}"), self.const(1.0))
        s = self.op("fdiv", part, self.op("fadd", part, self.const(2.0)))
        value = self.op("fmul", s, self.polynomial(self.op("fmul", s, s), LOG))
        value = self.fma(f.v(f"sitofp {bits} {n} to {self.type}"), self.const(LN2), value)
        value = self.select(self.compare("oeq", x, self.const(0.0)), self.const(-math.inf), value)
        value = self.select(self.compare("oeq", x, self.const(math.inf)), x, value)
        return self.select(self.compare("oge", x, self.const(0.0)), value, self.const(math.nan))

    def _log_of_one_more(self, y: str, small: str) -> str:
        """log(1 + y) for y from 0 on, and `small` where it is below 2^-28."""
        return self.select(self.compare("olt", y, self.const(2.0**-28)), small, self.log(self.op("fadd", y, self.const(1.0))))

    def power(self, x: str, y: str) -> str:
        """x^y within 0.6 ulp."""
        size, one = self.one("fabs", x), self.const(1.0)
        value = self._exp(self.op("fmul", y, self.log(size)))
        half = self.op("fmul", y, self.const(0.5))
        whole = self.compare("oeq", self.one("floor", y), y)  # infinity, too
        odd = self.both(whole, self.compare("une", self.one("floor", half), half))
        value = self.select(self.both(self.compare("oeq", size, one), self.compare("ord", y, y)), one, value)
        below = self.compare("olt", self.one("copysign", one, x), self.const(0.0))
        value = self.select(self.both(below, odd), self.negated(value), value)
        inside = self.both(self.compare("olt", x, self.const(0.0)), self.compare("one", size, self.const(math.inf)))
        value = self.select(self.both(inside, self.compare("one", self.one("floor", y), y)), self.const(math.nan), value)
        known = self.both(self.compare("oeq", y, self.const(0.0)), self.compare("oeq", x, one), "or")
        return self.select(known, one, value)

    def cbrt(self, x: str) -> str:
        """Cube root within 0.6 ulp."""
        value = self._exp(self.op("fmul", self.log(self.one("fabs", x)), self.const(1 / 3)))
        value = self.select(self.compare("oeq", self.one("fabs", x), self.const(math.inf)), self.const(math.inf), value)
        return self.one("copysign", self.select(self.compare("une", x, self.const(0.0)), value, x), x)

    def sinh(self, x: str) -> str:
        """Within 0.6 ulp: of a small number a series."""
        size = self.one("fabs", x)
        e = self._exp(size)
        far = self.op("fmul", self.op("fsub", e, self.op("fdiv", self.const(1.0), e)), self.const(0.5))
        series = [1 / math.factorial(2 * k + 1) for k in range(6)]
        near = self.op("fmul", size, self.polynomial(self.op("fmul", size, size), series))
        value = self.select(self.compare("olt", size, self.const(0.5)), near, far)
        return self.one("copysign", value, x)

    def cosh(self, x: str) -> str:
        """Within 0.6 ulp."""
        e = self._exp(self.one("fabs", x))
        return self.op("fmul", self.op("fadd", e, self.op("fdiv", self.const(1.0), e)), self.const(0.5))

    def asinh(self, x: str) -> str:
        """Within 0.6 ulp."""
        size = self.one("fabs", x)
        square = self.op("fmul", size, size)
        root = self.one("sqrt", self.op("fadd", square, self.const(1.0)))
        y = self.op("fadd", size, self.op("fdiv", square, self.op("fadd", root, self.const(1.0))))
        y = self.select(self.compare("oeq", size, self.const(math.inf)), size, y)
        return self.one("copysign", self._log_of_one_more(y, size), x)

    def acosh(self, x: str) -> str:
        """Within 0.6 ulp."""
        less, more = self.op("fsub", x, self.const(1.0)), self.op("fadd", x, self.const(1.0))
        y = self.op("fadd", less, self.one("sqrt", self.op("fmul", less, more)))
        value = self._log_of_one_more(y, y)
        return self.select(self.compare("oge", x, self.const(1.0)), value, self.const(math.nan))

    def atanh(self, x: str) -> str:
        """Within 0.6 ulp."""
        size, one = self.one("fabs", x), self.const(1.0)
        ratio = self.op("fdiv", self.op("fadd", one, size), self.op("fsub", one, size))
        value = self.op("fmul", self.log(ratio), self.const(0.5))
        value = self.select(self.compare("olt", size, self.const(2.0**-28)), size, value)
        return self.one("copysign", self.select(self.compare("ole", size, one), value, self.const(math.nan)), x)

    # -- angles

    def _turned(self, x: str) -> tuple[str, str]:
        """r and n, a whole number: x = n pi/2 + r but for multiples of 2 pi, |r| <= pi/4."""
        f, size = self.f, self.one("fabs", x)
        n = self.one("rint", self.op("fmul", x, self.const(2 / math.pi)))
        r = self.fma(n, self.const(-HALF_PI_LOW), self.fma(n, self.const(-HALF_PI), x))
        large = self.both(self.compare("oge", size, self.const(LARGE)), self.compare("olt", size, self.const(math.inf)))
        n = self.select(self.compare("olt", size, self.const(LARGE)), n, self.const(0.0))
        # Done once if any lane needs it, else not at all.
        any_ = f.intrinsic(f"llvm.vector.reduce.or.v{self.lanes}i1", "i1", (self._i1, large))
        with f.loop(0, f.v(f"zext i1 {any_} to i64"), 1, [(self.type, r), (self.type, n)]) as loop:
            far, turn = self._turned_far(size, large)
            sign = self.one("copysign", self.const(1.0), x)
            loop.next = [
                self.select(large, self.op("fmul", far, sign), r),
                self.select(large, self.op("fmul", turn, sign), n),
            ]
        r, n = loop.carried
        return self.select(self.compare("olt", size, self.const(math.inf)), r, self.const(math.nan)), n

    def _turned_far(self, size: str, large: str) -> tuple[str, str]:
        """The same of sizes of `LARGE` and more."""
        f, bits = self.f, self._bits
        numbers = [x for parts in turns() for x in parts]
        given = ", ".join(f"double {f64(x)}" for x in numbers)
        f.module.declarations["turns"] = f"@turns = internal constant [{len(numbers)} x double] [{given}], align 64"
        raw = f.v(f"bitcast {self.type} {size} to {bits}")
        exponent = f.v(f"lshr {bits} {raw}, splat (i64 52)")
        # m = size / 2^e is a whole number of 24 bits, e = exponent - 1023 - 23
        place = f.v(f"mul {bits} {f.v(f'sub {bits} {exponent}, splat (i64 {1023 + 27})')}, splat (i64 3)")
        place = f.v(f"select {self._i1} {large}, {bits} {place}, {bits} zeroinitializer")
        fraction = f.v(f"and {bits} {raw}, splat (i64 {(1 << 52) - 1})")
        whole = f.v(f"or {bits} {fraction}, splat (i64 {1023 + 23 << 52})")
        m = f.v(f"bitcast {bits} {whole} to {self.type}")
        parts: list[str] = []
        for i in range(3):
            pointers = vec(self.lanes, "ptr")
            at = f.v(f"add {bits} {place}, splat (i64 {i})")
            where = f.v(f"getelementptr double, ptr @turns, {bits} {at}")
            name = f"llvm.masked.gather.v{self.lanes}f64.v{self.lanes}p0"
            mask = (self._i1, "splat (i1 true)")
            entry = f.intrinsic(name, self.type, (pointers, where), ("i32 immarg", "8"), mask, (self.type, "zeroinitializer"))
            parts.append(self.op("fmul", m, entry))
        quarter = self.one("floor", self.op("fmul", parts[0], self.const(0.25)))
        first = self.fma(quarter, self.const(-4.0), parts[0])
        n = self.one("rint", self.op("fadd", first, parts[1]))
        r = self.op("fadd", self.op("fadd", self.op("fsub", first, n), parts[1]), parts[2])
        return self.op("fmul", r, self.const(HALF_PI)), n

    def _of_angle(self, x: str, quarters: int) -> tuple[str, str, str]:
        """sin(r) and cos(r), and how many quarter turns stand before them, `quarters` more."""
        r, n = self._turned(x)
        square = self.op("fmul", r, r)
        sine, cosine = self.op("fmul", r, self.polynomial(square, SINE)), self.polynomial(square, COSINE)
        i32 = vec(self.lanes, "i32")
        count = self.f.v(f"fptosi {self.type} {n} to {i32}")
        return sine, cosine, self.f.v(f"add {i32} {count}, splat (i32 {quarters})") if quarters else count

    def _bit(self, count: str, bit: int) -> str:
        i32 = vec(self.lanes, "i32")
        return self.f.v(f"icmp ne {i32} {self.f.v(f'and {i32} {count}, splat (i32 {bit})')}, zeroinitializer")

    def sine(self, x: str, quarters: int = 0) -> str:
        """Within 0.6 ulp."""
        sine, cosine, count = self._of_angle(x, quarters)
        value = self.select(self._bit(count, 1), cosine, sine)
        value = self.select(self._bit(count, 2), self.negated(value), value)
        return value if quarters else self.select(self.compare("une", x, self.const(0.0)), value, x)

    def cosine(self, x: str) -> str:
        """Within 0.6 ulp."""
        return self.sine(x, 1)

    def tan(self, x: str) -> str:
        """Within 0.6 ulp."""
        sine, cosine, count = self._of_angle(x, 0)
        odd = self._bit(count, 1)
        value = self.op("fdiv", self.select(odd, self.negated(cosine), sine), self.select(odd, sine, cosine))
        return self.select(self.compare("une", x, self.const(0.0)), value, x)

    def _atan_of_part(self, t: str) -> str:
        """The angle of a tangent from 0 to 1."""
        far = self.compare("ogt", t, self.const(EIGHTH))
        one = self.const(1.0)
        u = self.select(far, self.op("fdiv", self.op("fsub", t, one), self.op("fadd", t, one)), t)
        value = self.op("fmul", u, self.polynomial(self.op("fmul", u, u), ATAN))
        return self.select(far, self.op("fadd", value, self.const(math.pi / 4)), value)

    def atan2(self, y: str, x: str) -> str:
        """The angle of (x, y) within 0.6 ulp."""
        up, right = self.one("fabs", y), self.one("fabs", x)
        steep = self.compare("ogt", up, right)
        less, more = self.select(steep, right, up), self.select(steep, up, right)
        t = self.op("fdiv", less, more)
        t = self.select(self.compare("oeq", more, self.const(0.0)), self.const(0.0), t)
        t = self.select(self.compare("oeq", less, self.const(math.inf)), self.const(1.0), t)
        value = self._atan_of_part(t)
        value = self.select(steep, self.op("fsub", self.const(math.pi / 2), value), value)
        left = self.compare("olt", self.one("copysign", self.const(1.0), x), self.const(0.0))
        value = self.select(left, self.op("fsub", self.const(math.pi), value), value)
        value = self.select(self.compare("uno", x, y), self.const(math.nan), value)
        return self.one("copysign", value, y)

    def atan(self, x: str) -> str:
        """Within 0.6 ulp."""
        return self.atan2(x, self.const(1.0))

    def asin(self, x: str) -> str:
        """Within 0.6 ulp."""
        return self.atan2(x, self._cathetus(x))

    def acos(self, x: str) -> str:
        """Within 0.6 ulp."""
        return self.atan2(self._cathetus(x), x)

    def _cathetus(self, x: str) -> str:
        """sqrt(1 - x^2)."""
        one = self.const(1.0)
        return self.one("sqrt", self.op("fmul", self.op("fsub", one, x), self.op("fadd", one, x)))

    # -- remainders

    def remainder(self, a: str, b: str) -> str:
        """a - b q, q the quotient towards zero, exactly."""
        f, size, divisor = self.f, self.one("fabs", a), self.one("fabs", b)
        reach = self.op("fmul", divisor, self.const(2.0**DIGITS))
        far = self.both(self.compare("oge", size, reach), self.compare("ogt", divisor, self.const(0.0)))
        any_ = f.intrinsic(f"llvm.vector.reduce.or.v{self.lanes}i1", "i1", (self._i1, far))
        count = f.v(f"select i1 {any_}, i64 {STEPS}, i64 1")
        top = self.op("fmul", divisor, self.const(2.0 ** (DIGITS * (STEPS - 1))))
        first = f.v(f"select i1 {any_}, {self.type} {top}, {self.type} {divisor}")
        with f.loop(0, count, 1, [(self.type, size), (self.type, first)]) as loop:
            rest, step = loop.carried
            quotient = self.one("trunc", self.op("fdiv", rest, step))
            left = self.fma(self.negated(quotient), step, rest)
            left = self.select(self.compare("olt", left, self.const(0.0)), self.op("fadd", left, step), left)
            over = self.compare("oge", left, step)
            left = self.select(over, self.op("fsub", left, step), left)
            loop.next = [left, self.op("fmul", step, self.const(2.0**-DIGITS))]
        value = self.select(self.compare("oeq", divisor, self.const(math.inf)), size, loop.carried[0])
        value = self.select(self.compare("oeq", size, self.const(math.inf)), self.const(math.nan), value)
        value = self.select(self.compare("ogt", divisor, self.const(0.0)), value, self.const(math.nan))
        return self.one("copysign", value, a)

    def modulo(self, a: str, b: str) -> str:
        """The remainder that has the divisor's sign; a sum, where that is added, rounded once."""
        rest = self.remainder(a, b)
        apart = self.compare("olt", self.op("fmul", self.one("copysign", self.const(1.0), rest), b), self.const(0.0))
        wrong = self.both(apart, self.compare("one", rest, self.const(0.0)))
        value = self.select(wrong, self.op("fadd", rest, b), rest)
        zero = self.compare("oeq", value, self.const(0.0))
        return self.select(zero, self.one("copysign", self.const(0.0), b), value)
