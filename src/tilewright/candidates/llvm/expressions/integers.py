"""Functions of integer vectors past one instruction: quotients, remainders, powers, shifts, as in `ir/ops/integers.py`."""

from __future__ import annotations

from tilewright.candidates.llvm.expressions.text import Function, vec
from tilewright.dtype import DType

SHIFTS = {"shift_left": "shl", "shift_right_logical": "lshr", "shift_right_arithmetic": "ashr"}


class Integers:
    """Functions of `lanes` integers of one type, emitted into one function."""

    def __init__(self, f: Function, lanes: int, dtype: DType):
        self._f, self._bits, self._signed = f, dtype.bits, dtype.kind == "int"
        self._element = f"i{dtype.bits}"
        self._type, self._i1 = vec(lanes, self._element), vec(lanes, "i1")

    def call(self, fn: str, args: list[str]) -> str:
        """Function `fn`, as `map` names it."""
        return self._shift(SHIFTS[fn], *args) if fn in SHIFTS else getattr(self, fn)(*args)

    def _number(self, value: int) -> str:
        return f"splat ({self._element} {value})"

    def _op(self, name: str, a: str, b: str) -> str:
        return self._f.v(f"{name} {self._type} {a}, {b}")

    def _is(self, how: str, a: str, b: str) -> str:
        return self._f.v(f"icmp {how} {self._type} {a}, {b}")

    def _pick(self, mask: str, a: str, b: str) -> str:
        return self._f.v(f"select {self._i1} {mask}, {self._type} {a}, {self._type} {b}")

    def _negated(self, x: str) -> str:
        return self._op("sub", "zeroinitializer", x)

    def abs(self, x: str) -> str:
        """The lowest value is its own."""
        return self._pick(self._is("slt", x, "zeroinitializer"), self._negated(x), x) if self._signed else x

    def sign(self, x: str) -> str:
        """-1, 0 or 1."""
        some = self._pick(self._is("ne", x, "zeroinitializer"), self._number(1), "zeroinitializer")
        return self._pick(self._is("slt", x, "zeroinitializer"), self._number(-1), some) if self._signed else some

    def divide(self, a: str, b: str) -> str:
        """The quotient towards zero; the processor's instruction is kept from what it traps at."""
        nothing, less = self._is("eq", b, "zeroinitializer"), None
        divisor = self._pick(nothing, self._number(1), b)
        if self._signed:
            less = self._is("eq", b, self._number(-1))
            divisor = self._pick(less, self._number(1), divisor)
        quotient = self._op("sdiv" if self._signed else "udiv", a, divisor)
        if less is not None:
            quotient = self._pick(less, self._negated(a), quotient)
        return self._pick(nothing, self._number(-1), quotient)

    def remainder(self, a: str, b: str) -> str:
        """Remainder of a division, with the dividend's sign."""
        return self._op("sub", a, self._op("mul", b, self.divide(a, b)))

    def modulo(self, a: str, b: str) -> str:
        """Remainder of a division, with the divisor's sign."""
        rest = self.remainder(a, b)
        if not self._signed:
            return rest
        apart = self._is("slt", self._op("xor", rest, b), "zeroinitializer")
        some = [self._is("ne", x, "zeroinitializer") for x in (rest, b)]
        wrong = self._f.v(f"and {self._i1} {apart}, {self._f.v(f'and {self._i1} {some[0]}, {some[1]}')}")
        return self._pick(wrong, self._op("add", rest, b), rest)

    def power(self, a: str, n: str) -> str:
        """a^n, wrapping; of a negative n what XLA makes of it."""
        with self._f.loop(0, self._bits, 1, [(self._type, self._number(1)), (self._type, a), (self._type, n)]) as loop:
            result, base, left = loop.carried
            odd = self._is("ne", self._op("and", left, self._number(1)), "zeroinitializer")
            loop.next = [
                self._pick(odd, self._op("mul", result, base), result),
                self._op("mul", base, base),
                self._op("lshr", left, self._number(1)),
            ]
        result = loop.carried[0]
        if not self._signed:
            return result
        odd = self._is("ne", self._op("and", n, self._number(1)), "zeroinitializer")
        even = self._pick(odd, self._number(-1), self._number(1))
        unit = self._pick(self._is("eq", a, self._number(1)), self._number(1), "zeroinitializer")
        unit = self._pick(self._is("eq", a, self._number(-1)), even, unit)
        return self._pick(self._is("slt", n, "zeroinitializer"), unit, result)

    def _shift(self, name: str, a: str, n: str) -> str:
        """Shift of any count: by the width or more (n without a sign), zeros or copies of the top bit."""
        inside = self._is("ult", n, self._number(self._bits))
        if name == "ashr":
            return self._op(name, a, self._pick(inside, n, self._number(self._bits - 1)))
        return self._pick(inside, self._op(name, a, self._pick(inside, n, "zeroinitializer")), "zeroinitializer")
