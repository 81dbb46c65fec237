"""Values in registers of a kernel that is being written, and the primitives that a target prints for them.

An algorithm is a Python function of `Value`s. Running it writes the kernel: every operator asks the target's `Builder` to print
one instruction (a final-tagless embedding: Carette, Kiselyov and Shan 2009). Python's numbers are constants of the type of the
value beside them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.dtype import BF16, F4E2M1FN, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ, F32, S4, S8, U4, U8, DType
from tilewright.schedule.candidate import Unsupported

FP8 = (F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ, F4E2M1FN)  # floats that are a byte in memory


def in_register(dtype: DType) -> DType:
    """The type of the register that holds a value: fp8 is its code, 4-bit codes have a byte, 4-bit floats are fp8."""
    return U8 if dtype in FP8 or dtype is U4 else S8 if dtype is S4 else dtype


def _binary(op: str) -> Callable[[Value, Operand], Value]:
    return lambda a, b: a.builder.binary(op, a, b)


def _reflected(op: str) -> Callable[[Value, Operand], Value]:
    return lambda b, a: b.builder.binary(op, a, b)


def _compare(op: str) -> Callable[[Value, Operand], Value]:
    return lambda a, b: a.builder.compare(op, a, b)


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value in registers, one for each element that an instruction works on.

    Integers wrap, `//` rounds toward zero, `>>` copies the sign of a signed type. Comparisons with NaN are false but for `!=`.

    Attributes:
        builder: what prints operations on it.
        name: what the kernel calls it.
        dtype: of the register.
    """

    builder: Builder
    name: str
    dtype: DType

    __add__ = __radd__ = _binary("+")
    __sub__, __rsub__ = _binary("-"), _reflected("-")
    __mul__ = __rmul__ = _binary("*")
    __truediv__, __rtruediv__ = _binary("/"), _reflected("/")
    __floordiv__ = _binary("//")
    __and__, __or__, __xor__ = _binary("&"), _binary("|"), _binary("^")
    __lshift__, __rshift__ = _binary("<<"), _binary(">>")
    __lt__, __le__, __gt__, __ge__ = _compare("<"), _compare("<="), _compare(">"), _compare(">=")
    __hash__ = None  # pyright: ignore[reportAssignmentType]  # `==` makes an instruction

    def __eq__(self, other: Operand) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.builder.compare("==", self, other)

    def __ne__(self, other: Operand) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.builder.compare("!=", self, other)

    def __bool__(self) -> bool:
        raise TypeError("what a value is shows when the kernel runs: use `Builder.select`")

    def __neg__(self) -> Value:
        return self.builder.negated(self) if self.dtype.is_float else 0 - self

    def call(self, fn: str, *others: Operand) -> Value:
        """A function that the target has (see `Builder.call`) of this value and others."""
        return self.builder.call(fn, self, *others)

    def abs(self) -> Value:
        """The size of a float."""
        return self.call("abs")

    def at_most(self, bound: Operand) -> Value:
        """min(self, bound); a NaN stays."""
        return self.call("at_most", bound)

    def at_least(self, bound: Operand) -> Value:
        """max(self, bound); a NaN stays."""
        return self.call("at_least", bound)

    def min(self, bound: Operand) -> Value:
        """The smaller; of a NaN and a bound either (see `Builder.drops_nan`)."""
        return self.call("min", bound)

    def max(self, bound: Operand) -> Value:
        """The larger; of a NaN and a bound either."""
        return self.call("max", bound)

    def to(self, dtype: DType) -> Value:
        """The same number in another type: rounded to nearest between floats, toward zero (and in range) to an integer."""
        return self if dtype is self.dtype else self.builder.to(self, dtype)

    def bits(self, dtype: DType) -> Value:
        """The same bits as another type of the same width."""
        return self if dtype is self.dtype else self.builder.bits(self, dtype)


Operand = Value | float  # a Python number is a constant
Body = Callable[[list[Value]], list[Value]]
Fewer = tuple[Value, int, Sequence[Value]]


class Builder(ABC):
    """A printer for a target: some twenty primitives, and the functions that it computes itself.

    Attributes:
        native: functions of f32 and f64, by the names of `map`, that `call` takes and that are no better decomposed.
        exponent: factor of the argument of `power`, the target's own exponential: 1 for e^x, log2(e) for 2^x; None
            where it has none.
        fp8: names of the fp8 types that instructions convert to (rounding once, to nearest, and saturating) and from.
        multiplies: quantising multiplies by a reciprocal in parts where it can (see `steps`).
        drops_nan: `min` and `max` of a NaN and a bound are the bound.
        codes: value of codes quantised here, as f32 or s32 counted from a zero point, and that, by the codes' names.
        known: values computed once, by what they were computed from.
    """

    native: frozenset[str] = frozenset()
    exponent: float | None = None
    fp8: frozenset[str] = frozenset()
    multiplies = False
    drops_nan = False

    def __init__(self) -> None:
        self.codes: dict[str, tuple[Value, Value | None]] = {}
        self.known: dict[tuple[object, ...], Any] = {}

    @staticmethod
    def type_of(*operands: Operand) -> DType:
        """The type of operands of which one at least is a value."""
        return next(x.dtype for x in operands if isinstance(x, Value))

    def named(self, name: str, dtype: DType) -> Value:
        """A name in the kernel as a value of a type (fp8 and 4 bits: codes)."""
        return Value(self, name, in_register(dtype))

    def constant(self, number: float, dtype: DType) -> Value:
        """A number in every element."""
        return Value(self, self.put(number, dtype), dtype)

    # -- printed by a target

    @abstractmethod
    def put(self, operand: Operand, dtype: DType) -> str:
        """Spell an operand of a type: a value's name, or a number."""

    @abstractmethod
    def binary(self, op: str, a: Operand, b: Operand) -> Value:
        """Print `+ - * / // & | ^ << >>` on one type; a shift's count is below the width."""

    @abstractmethod
    def compare(self, op: str, a: Operand, b: Operand) -> Value:
        """Print `< <= == != > >=` on one type: pred."""

    @abstractmethod
    def select(self, mask: Value, a: Operand, b: Operand, dtype: DType | None = None) -> Value:
        """Print `mask ? a : b`; `dtype` is needed where a and b are numbers."""

    @abstractmethod
    def negated(self, x: Value) -> Value:
        """Print -x of a float; the sign of a zero changes."""

    @abstractmethod
    def call(self, fn: str, *args: Operand) -> Value:
        """Print a function on one type: `fma abs floor ceil sqrt copysign at_most at_least maximum minimum` of floats, `min
        max` of all numbers, and what is in `native`."""

    @abstractmethod
    def to(self, x: Value, dtype: DType) -> Value:
        """Print a conversion; see `Value.to`."""

    @abstractmethod
    def bits(self, x: Value, dtype: DType) -> Value:
        """Print a bitcast."""

    @abstractmethod
    def nearest(self, x: Value) -> tuple[Value, Value]:
        """Print f32 below 2^22, rounded to nearest, ties to even: as f32 or s32, and as s32 of which the low 16 bits matter."""

    @abstractmethod
    def truncated(self, x: Value, dtype: DType) -> Value:
        """Print f32 as an integer: toward zero, held to the type's range, 0 for NaN."""

    @abstractmethod
    def quotient(self, x: Value, divisor: Value, target: DType, *, repeats: bool) -> Value:
        """Print x / divisor in f32, rounded to nearest; what is beyond the range of `target`, or tiny to it, need not be.
        `repeats`: the divisor varies along one axis at most."""

    @abstractmethod
    def repeat(self, times: int, state: Sequence[Value], body: Body, unless: Fewer | None = None) -> list[Value]:
        """Print `body` so many times, from `state` on. With `unless`, a mask, fewer times and another state, those will do if
        no element is in the mask."""

    # -- what a target may print in another way

    def given(self, x: Value, target: DType) -> Value | None:
        """A value in another type, where it is known in that; `target` is f32 or s32."""
        return None

    def is_number(self, x: Value) -> bool:
        """Tell whether a value is one number, known when the kernel is launched."""
        return False

    def derived(self, how: Hashable, value: float, *of: Value) -> Value:
        """Give a number of f32 that was made of others that are known, in every element; `how` says in which way."""
        return self.constant(value, F32)

    def cut(self, x: Value) -> Value:
        """f32 as bf16 where that has the value."""
        return self.to(x, BF16)

    def power(self, x: Value) -> Value:
        """The target's own exponential; see `exponent`."""
        return self.call("exponential", x)

    def over(self, x: Operand, y: Value) -> Value:
        """x / y, where y is at least 1."""
        return self.binary("/", x, y)

    def entry(self, table: str, numbers: Sequence[float], index: Value) -> Value:
        """Print a look-up in a table of f64.

        Raises:
            Unsupported: the target has none.
        """
        raise Unsupported(f"a table ({table}) has no form here")

    def fma(self, a: Operand, b: Operand, c: Operand) -> Value:
        """a * b + c, rounded once (in f64, where it may be twice)."""
        return self.call("fma", a, b, c)


def polynomial(x: Value, coefficients: Sequence[float]) -> Value:
    """A polynomial's value, lowest coefficient first (Horner)."""
    value = x.builder.constant(coefficients[-1], x.dtype)
    for c in reversed(coefficients[:-1]):
        value = x.builder.fma(value, x, c)
    return value
