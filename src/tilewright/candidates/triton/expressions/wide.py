"""Functions of f32 that are worked out in f64: powers, inverses of trigonometric and hyperbolic functions, remainders.

Models seldom ask for them, and a GPU's f64 is as slow as it is. The arithmetic, and the series, are `llvm/_math_wide.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.candidates.triton.expressions.text import Text

WIDE = frozenset({"acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cosh", "modulo", "power", "remainder",
                  "sinh", "tan"})  # fmt: skip
SINH = [1 / math.factorial(2 * k + 1) for k in range(6)]
ATAN = [(-1) ** k / (2 * k + 1) for k in range(13)]
EIGHTH = math.tan(math.pi / 8)
DIGITS, STEPS = 29, 10
INF, NAN = "float('inf')", "float('nan')"


class WideFunctions:
    """Functions of values in registers, written into a text."""

    def __init__(self, text: Text):
        self._text = text

    def call(self, fn: str, args: Sequence[str]) -> str:
        """Function `fn`, as `map` names it, of f32."""
        language = self._text.language
        wide = [self._v(f"{a}.to({language}.float64)") for a in args]
        return self._v(f"{getattr(self, fn)(*wide)}.to({language}.float32)")

    def _v(self, expression: str) -> str:
        return self._text.v(expression)

    def _pick(self, condition: str, a: str, b: str) -> str:
        return self._text.call("where", self._v(condition), a, b)

    def _signed(self, size: str, like: str) -> str:
        """The size with the sign that another value has, be that zero."""
        return self._pick(self._below(like), self._v(f"-{size}"), size)

    def _below(self, x: str) -> str:
        """Whether the sign is set."""
        return f"{x}.to({self._text.language}.int64, bitcast=True) < 0"

    def _size(self, x: str) -> str:
        return self._text.call("abs", x)

    def _log(self, x: str) -> str:
        return self._text.call("log", x)

    def _polynomial(self, x: str, coefficients: Sequence[float]) -> str:
        value = repr(coefficients[-1])
        for c in reversed(coefficients[:-1]):
            value = self._v(f"{value} * {x} + {c!r}")
        return value

    def power(self, x: str, y: str) -> str:
        t, size = self._text, self._size(x)
        value = t.call("exp", self._v(f"{y} * {self._log(size)}"))
        value = self._pick(f"({size} == 1.0) & ({y} == {y})", "1.0", value)
        floor, half = t.call("floor", y), self._v(f"{y} * 0.5")
        odd = self._v(f"({floor} == {y}) & ({t.call('floor', half)} != {half})")
        value = self._pick(f"({self._below(x)}) & {odd}", self._v(f"-{value}"), value)
        value = self._pick(f"({x} < 0) & ({size} < {INF}) & ({floor} != {y}) & ({y} == {y})", NAN, value)
        return self._pick(f"({y} == 0) | ({x} == 1.0)", "1.0", value)

    def cbrt(self, x: str) -> str:
        size = self._size(x)
        value = self._text.call("exp", self._v(f"{self._log(size)} * {1 / 3!r}"))
        return self._signed(self._pick(f"({size} == 0) | ({size} == {INF})", size, value), x)

    def sinh(self, x: str) -> str:
        size = self._size(x)
        e = self._text.call("exp", size)
        near = self._v(f"{size} * {self._polynomial(self._v(f'{size} * {size}'), SINH)}")
        return self._signed(self._pick(f"{size} < 0.5", near, self._v(f"({e} - 1.0 / {e}) * 0.5")), x)

    def cosh(self, x: str) -> str:
        e = self._text.call("exp", self._size(x))
        return self._v(f"({e} + 1.0 / {e}) * 0.5")

    def asinh(self, x: str) -> str:
        size = self._size(x)
        square = self._v(f"{size} * {size}")
        root = self._text.call("sqrt", self._v(f"{square} + 1.0"))
        y = self._pick(f"{size} == {INF}", size, self._v(f"{size} + {square} / ({root} + 1.0)"))
        return self._signed(self._pick(f"{y} < {2.0**-28!r}", size, self._log(self._v(f"{y} + 1.0"))), x)

    def acosh(self, x: str) -> str:
        held = self._pick(f"{x} >= 1.0", x, NAN)
        root = self._text.call("sqrt", self._v(f"({held} - 1.0) * ({held} + 1.0)"))
        return self._log(self._v(f"{held} + {root}"))

    def atanh(self, x: str) -> str:
        size = self._size(x)
        value = self._v(f"{self._log(self._v(f'(1.0 + {size}) / (1.0 - {size})'))} * 0.5")
        return self._signed(self._pick(f"{size} < {2.0**-28!r}", size, value), x)

    def tan(self, x: str) -> str:
        language = self._text.language
        single = self._v(f"{x}.to({language}.float32)")
        sine, cosine = (self._v(f"{self._text.call(f, single)}.to({language}.float64)") for f in ("sin", "cos"))
        return self._v(f"{sine} / {cosine}")

    def atan2(self, y: str, x: str) -> str:
        up, right = self._size(y), self._size(x)
        steep = self._v(f"{up} > {right}")
        less, more = self._pick(steep, right, up), self._pick(steep, up, right)
        t = self._v(f"{less} / {self._pick(f'{more} == 0', '1.0', more)}")
        t = self._pick(f"{less} == {INF}", "1.0", t)
        far = self._v(f"{t} > {EIGHTH!r}")
        u = self._pick(far, self._v(f"({t} - 1.0) / ({t} + 1.0)"), t)
        value = self._v(f"{u} * {self._polynomial(self._v(f'{u} * {u}'), ATAN)}")
        value = self._pick(far, self._v(f"{value} + {math.pi / 4!r}"), value)
        value = self._pick(steep, self._v(f"{math.pi / 2!r} - {value}"), value)
        value = self._pick(self._below(x), self._v(f"{math.pi!r} - {value}"), value)
        return self._signed(self._pick(f"({x} != {x}) | ({y} != {y})", NAN, value), y)

    def atan(self, x: str) -> str:
        return self.atan2(x, self._one(x))

    def asin(self, x: str) -> str:
        return self.atan2(x, self._cathetus(x))

    def acos(self, x: str) -> str:
        return self.atan2(self._cathetus(x), x)

    def _one(self, x: str) -> str:
        """1, of the shape that a value has."""
        return self._v(f"({x} == {x}).to({self._text.language}.float64) * 0.0 + 1.0")

    def _cathetus(self, x: str) -> str:
        """sqrt(1 - x^2)."""
        square = self._v(f"(1.0 - {x}) * (1.0 + {x})")
        return self._text.call("sqrt", self._pick(f"{square} >= 0", square, NAN))

    def remainder(self, a: str, b: str) -> str:
        """A quotient is found 29 bits at a time, so that no product is rounded."""
        t, rest, divisor = self._text, self._size(a), self._size(b)
        size = rest
        for step in reversed(range(STEPS)):
            by = self._v(f"{divisor} * {2.0 ** (DIGITS * step)!r}")
            whole = t.call("floor", self._v(f"{rest} / {by}"))
            left = self._v(f"{rest} - {whole} * {by}")
            left = self._pick(f"{left} < 0", self._v(f"{left} + {by}"), left)
            rest = self._pick(f"{left} >= {by}", self._v(f"{left} - {by}"), left)
        value = self._pick(f"{divisor} == {INF}", size, rest)
        value = self._pick(f"({size} < {INF}) & ({divisor} > 0)", value, NAN)
        return self._signed(value, a)

    def modulo(self, a: str, b: str) -> str:
        rest = self.remainder(a, b)
        wrong = f"({rest} != 0) & (({rest} < 0) != ({b} < 0)) & ({rest} == {rest})"
        value = self._pick(wrong, self._v(f"{rest} + {b}"), rest)
        return self._pick(f"{value} == 0", self._signed(self._size(value), b), value)
