"""Functions of integers past one operator, as Triton's arithmetic: quotients, remainders, powers, shifts; see
`ir/ops/integers.py`."""

from __future__ import annotations

from tilewright.candidates.triton.expressions.text import Text
from tilewright.dtype import DType


class Integers:
    """Functions of integers of one type, `name` to Triton, written into a text."""

    def __init__(self, text: Text, dtype: DType, name: str):
        self._text, self._dtype, self._signed = text, dtype, dtype.kind == "int"
        self._name = f"{text.language}.{name}"
        self._unsigned = f"{text.language}.uint{dtype.bits}"

    def call(self, fn: str, args: list[str]) -> str:
        """Function `fn`, as `map` names it."""
        return self._shift(fn, *args) if fn.startswith("shift") else getattr(self, fn)(*args)

    def _v(self, expression: str) -> str:
        return self._text.v(expression)

    def _pick(self, condition: str, a: str, b: str) -> str:
        """Choose a or b, in the integers' own type whatever that of a written number is."""
        return self._v(f"{self._text.call('where', condition, a, b)}.to({self._name})")

    def abs(self, x: str) -> str:
        return self._pick(self._v(f"{x} < 0"), self._v(f"0 - {x}"), x) if self._signed else x

    def sign(self, x: str) -> str:
        some = self._pick(self._v(f"{x} != 0"), "1", "0")
        return self._pick(self._v(f"{x} < 0"), "-1", some) if self._signed else some

    def divide(self, a: str, b: str) -> str:
        nothing = self._v(f"{b} == 0")
        divisor = self._pick(nothing, "1", b)
        less = self._v(f"{b} == -1") if self._signed else None
        if less is not None:
            divisor = self._pick(less, "1", divisor)
        quotient = self._v(f"{a} // {divisor}")
        if less is not None:
            quotient = self._pick(less, self._v(f"0 - {a}"), quotient)
        return self._pick(nothing, "-1" if self._signed else str(int(self._dtype.max)), quotient)

    def remainder(self, a: str, b: str) -> str:
        return self._v(f"({a} - {b} * {self.divide(a, b)}).to({self._name})")

    def modulo(self, a: str, b: str) -> str:
        rest = self.remainder(a, b)
        if not self._signed:
            return rest
        wrong = self._v(f"(({rest} ^ {b}) < 0) & ({rest} != 0) & ({b} != 0)")
        return self._pick(wrong, self._v(f"{rest} + {b}"), rest)

    def power(self, a: str, n: str) -> str:
        """a^n, wrapping; of a negative n what XLA makes of it."""
        result, base = self._v(f"{a} * 0 + 1"), a
        left = self._v(f"{n}.to({self._unsigned}, bitcast=True)")
        for bit in range(self._dtype.bits):
            odd = self._v(f"(({left} >> {bit}) & 1) != 0")
            result = self._pick(odd, self._v(f"{result} * {base}"), result)
            base = self._v(f"{base} * {base}")
        if not self._signed:
            return result
        even = self._pick(self._v(f"({n} & 1) != 0"), "-1", "1")
        unit = self._pick(self._v(f"{a} == 1"), "1", "0")
        return self._pick(self._v(f"{n} < 0"), self._pick(self._v(f"{a} == -1"), even, unit), result)

    def _shift(self, fn: str, a: str, n: str) -> str:
        """Shift of any count: by the width or more (n without a sign), zeros or copies of the top bit."""
        bits = self._dtype.bits
        inside = self._v(f"({n} >= 0) & ({n} < {bits})")
        if fn == "shift_right_arithmetic":
            by = self._pick(inside, n, str(bits - 1))
            signed = f"{self._text.language}.int{bits}"
            moved = self._v(f"{a}.to({signed}, bitcast=True) >> {by}.to({signed}, bitcast=True)")
            return self._v(f"{moved}.to({signed}).to({self._name}, bitcast=True)")
        by = self._v(f"{self._pick(inside, n, '0')}.to({self._unsigned}, bitcast=True)")
        moved = self._v(f"{a}.to({self._unsigned}, bitcast=True) {'<<' if fn == 'shift_left' else '>>'} {by}")
        moved = self._v(f"{moved}.to({self._unsigned}).to({self._name}, bitcast=True)")
        return self._pick(inside, moved, "0")
