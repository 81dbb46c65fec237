"""The elementwise functions that `map` names, as Triton's arithmetic on values in registers.

Errors are within the few roundings that a step of an epilogue may have (`schedule/intervals.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.candidates._approximations import (
    LOG2_UPPER,
    LOG2_UPPER_8,
    LOG2_UPPER_16_TO,
    LOG2_UPPER_TANH_8,
    LOG2_UPPER_TANH_8_TO,
    LOG2_UPPER_TO,
    SQRT_2_OVER_PI,
    TANH,
    UPPER,
    UPPER_TO,
)
from tilewright.candidates.triton.expressions.casts import MOST_EXACT, Casts, in_registers
from tilewright.candidates.triton.expressions.integers import Integers
from tilewright.candidates.triton.expressions.wide import WIDE, WideFunctions
from tilewright.dtype import F32, PRED, DType

BINARY = {"add": "+", "subtract": "-", "multiply": "*"}
LOGIC = {"and": "&", "or": "|", "xor": "^", "add": "|", "multiply": "&", "maximum": "|", "minimum": "&"}
COMPARE = {"equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=", "greater": ">", "greater_equal": ">="}
PLAIN = {"ceil": "ceil", "floor": "floor", "abs": "abs", "exponential": "exp", "log": "log", "sine": "sin", "cosine": "cos",
         "erf": "erf", "sqrt": "sqrt_rn"}  # fmt: skip
SHIFTS = {"shift_left", "shift_right_logical", "shift_right_arithmetic"}
OWN = {*WIDE, "clamp", "divide", "erfc", "exponential_minus_one", "gelu", "gelu_tanh", "is_finite", "is_inf", "is_nan",
       "log_plus_one", "logistic", "maximum", "minimum", "negate", "relu", "round_half_away", "round_half_even", "rsqrt",
       "sign", "silu", "tanh", "trunc"}  # fmt: skip
ON_FLOATS = {*BINARY, *COMPARE, *PLAIN, *OWN}
ON_INTEGERS = {*BINARY, *COMPARE, *SHIFTS, "and", "or", "xor", "not", "maximum", "minimum", "clamp", "relu", "negate", "abs",
               "sign", "divide", "remainder", "modulo", "power"}  # fmt: skip
LOG2_E = 1.4426950408889634
GELU_TO = 13.215  # beyond it Phi(-x) is below 2^-126
# For values quantised to 8 bits at once: log2 of what x is multiplied by where it is negative, as a polynomial in |x|, and up
# to where.
GELU_TO_8_BITS = {"gelu": (LOG2_UPPER_8, LOG2_UPPER_16_TO), "gelu_tanh": (LOG2_UPPER_TANH_8, LOG2_UPPER_TANH_8_TO)}


class Functions(Casts):
    """Functions of values, written into a text."""

    EXPONENT = 1.0  # what a factor of `one_more` is to be multiplied by

    def map(self, fn: str, dtype: DType, args: list[str]) -> str:
        """`Map`'s meaning: function `fn` of values of one type."""
        t = self.text
        if fn in COMPARE:
            a, b = (self.convert(x, dtype, F32) if dtype.is_float else x for x in args)
            return t.v(f"{a} {COMPARE[fn]} {b}")
        if not dtype.is_float:
            return self._integers(fn, dtype, args)
        wide = [self.convert(a, dtype, F32) for a in args]
        value = self._floats(fn, wide)
        return value if fn.startswith("is_") else self.convert(value, F32, dtype)

    def _integers(self, fn: str, dtype: DType, args: list[str]) -> str:
        t = self.text
        if dtype is PRED or fn in ("and", "or", "xor"):
            if fn == "not":
                return t.v(f"{args[0]} == 0")
            return t.v(f"{args[0]} {LOGIC[fn]} {args[1]}")
        if fn in BINARY:
            return t.v(f"{args[0]} {BINARY[fn]} {args[1]}")
        match fn:
            case "maximum" | "minimum":
                return t.call(fn, *args)
            case "clamp":
                return t.call("minimum", t.call("maximum", args[1], args[0]), args[2])
            case "relu":
                return args[0] if dtype.kind == "uint" else t.call("maximum", args[0], "0")
            case "negate":
                return t.v(f"0 - {args[0]}")
            case "not":
                return t.v(f"{args[0]} ^ {-1 if dtype.kind == 'int' else int(dtype.max)}")
            case _:
                return Integers(t, dtype, in_registers(dtype)).call(fn, args)

    def _floats(self, fn: str, args: list[str]) -> str:
        t, x = self.text, args[0]
        if fn in BINARY:
            return t.v(f"{x} {BINARY[fn]} {args[1]}")
        if fn in PLAIN:
            return t.call(PLAIN[fn], x)
        if fn in WIDE:
            return WideFunctions(t).call(fn, args)
        size = f"{t.language}.abs({x})"
        match fn:
            case "divide":
                inverse = self._exact_inverse(args[1])
                return t.v(f"{x} / {args[1]}" if inverse is None else f"{x} * {inverse}")
            case "maximum":
                return self.at_least(x, args[1])
            case "minimum":
                return self.at_most(x, args[1])
            case "clamp":
                return self.at_most(self.at_least(args[1], x), args[2])
            case "relu":
                return self.at_least(x, "0.0")
            case "negate":
                return t.v(f"-{x}")
            case "rsqrt":
                return t.v(f"1.0 / {t.call('sqrt_rn', x)}")
            case "logistic":
                return self.over("1.0", self.one_more(x, repr(-self.EXPONENT)))
            case "silu":
                return self.over(x, self.one_more(x, repr(-self.EXPONENT)))
            case "gelu":
                return self._gelu(x)
            case "gelu_tanh":
                return self._gelu_tanh(x)
            case "erfc":
                return t.v(f"1.0 - {t.call('erf', x)}")
            case "tanh":
                return self._tanh(x)
            case "is_nan":
                return t.v(f"{x} != {x}")
            case "is_inf":
                return t.v(f"{size} == float('inf')")
            case "is_finite":
                return t.v(f"{size} < float('inf')")
            case "sign":
                return self.where(t.v(f"{x} > 0"), "1.0", self.where(t.v(f"{x} < 0"), "-1.0", x))
            case "exponential_minus_one":
                # What the exponential is off, the logarithm of what it is takes back (Kahan).
                more = t.call("exp", x)
                ratio = t.v(f"{x} / {t.call('log', more)}")
                near = t.v(f"{t.v(f'{more} - 1.0')} * {ratio}")
                far = self.where(t.v(f"{x} > 80.0"), more, t.v(f"{more} - 1.0"))
                held = self.where(t.v(f"{size} < 15.0"), near, far)
                return self.where(t.v(f"{more} == 1.0"), x, held)
            case "log_plus_one":
                more = t.v(f"{x} + 1.0")
                less = t.v(f"{more} - 1.0")
                near = t.v(f"{t.call('log', more)} * {t.v(f'{x} / {less}')}")
                held = self.where(t.v(f"{x} < {2.0**24!r}"), near, t.call("log", more))
                held = self.where(t.v(f"{x} == -1.0"), "float('-inf')", held)
                return self.where(t.v(f"{more} == 1.0"), x, held)
            case "round_half_away":
                near = t.call("floor", t.v(size))
                near = self.where(t.v(f"{size} - {near} >= 0.5"), t.v(f"{near} + 1.0"), near)
                return self.where(t.v(f"{x} < 0"), t.v(f"-{near}"), self.where(t.v(f"{x} == 0"), x, near))
            case "trunc":
                down, up = t.call("floor", x), t.call("ceil", x)
                return self.where(t.v(f"{x} < 0"), up, down)
            case _:
                assert fn == "round_half_even", fn
                near = t.v(f"({t.v(size)} + {MOST_EXACT!r}) - {MOST_EXACT!r}")
                signed = self.where(t.v(f"{x} < 0"), t.v(f"-{near}"), near)
                return self.where(t.v(f"{size} < {MOST_EXACT!r}"), signed, x)

    def _exact_inverse(self, x: str) -> str | None:
        """Of a number that is a power of two."""
        number = self.text.numbers.get(x)
        if number is None or abs(math.frexp(number)[0]) != 0.5 or not 2.0**-126 <= abs(number) <= 2.0**126:
            return None
        return self.text.number((x, "inverse"), 1 / number)

    def over(self, x: str, y: str) -> str:
        """x / y, where y is at least 1."""
        return self.text.v(f"{x} / {y}")

    def one_more(self, x: str, factor: str) -> str:
        """1 + e^(factor x), the factor multiplied by EXPONENT."""
        t = self.text
        return t.v(f"1.0 + {t.call('exp', t.v(f'{x} * {factor}'))}")

    def _gelu(self, x: str) -> str:
        """x Phi(x) as max(x, 0) - |x| Phi(-|x|), which keeps the digits of the negative tail; NaN at minus infinity."""
        t = self.text
        size, positive = self._size_and_positive(x)
        size = t.call("minimum", size, repr(GELU_TO))
        power = t.call("exp2", t.v(f"{t.v(f'{size} * {-0.5 * LOG2_E!r}')} * {size}"))
        upper = self._polynomial(self.over(size, t.v(f"{size} + {UPPER_TO}")), UPPER)
        return t.call("fma", t.v(f"{upper} * {power}"), self.negative(size), positive)

    def gelu_by_power(self, x: str, coefficients: Sequence[float] = LOG2_UPPER, to: float = LOG2_UPPER_TO) -> str:
        """The same for a value that is rounded at once (to bf16, unless told otherwise): one exponential whose argument comes
        from a polynomial."""
        t = self.text
        size, positive = self._size_and_positive(x)
        size = t.call("minimum", size, repr(to))
        upper = self.power(self._polynomial(size, coefficients))
        return t.call("fma", upper, self.negative(size), positive)

    def power(self, x: str) -> str:
        """2^x for x from -127 to 0."""
        return self.text.call("exp2", x)

    def _size_and_positive(self, x: str) -> tuple[str, str]:
        """|x|, and max(x, 0), which is NaN at minus infinity."""
        t = self.text
        size = t.v(f"{t.language}.abs({x})")
        return size, t.call("fma", size, "0.5", t.v(f"{x} * 0.5"))

    def _polynomial(self, x: str, coefficients: Sequence[float]) -> str:
        """Lowest coefficient first (Horner)."""
        value = repr(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            value = self.text.call("fma", value, x, repr(c))
        return value

    def _gelu_tanh(self, x: str) -> str:
        """x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3): half of x (1 + tanh u)."""
        t, k = self.text, -2 * SQRT_2_OVER_PI * self.EXPONENT
        factor = t.call("fma", t.v(f"{x} * {x}"), repr(k * 0.044715), repr(k))
        return self.over(x, self.one_more(x, factor))

    def _tanh(self, x: str) -> str:
        """1 - 2 / (e^2|x| + 1) with x's sign, a polynomial where that cancels."""
        t = self.text
        size, square = t.v(f"{t.language}.abs({x})"), t.v(f"{x} * {x}")
        p = self._polynomial(square, TANH)
        near = t.call("fma", t.v(f"{p} * {square}"), x, x)
        far = t.v(f"1.0 - {self.over('2.0', self.one_more(size, repr(2 * self.EXPONENT)))}")
        far = self.where(t.v(f"{x} < 0"), t.v(f"-{far}"), far)
        return self.where(t.v(f"{size} < 0.625"), near, far)
