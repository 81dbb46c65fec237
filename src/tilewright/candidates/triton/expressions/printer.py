"""Triton's text of operations on tiles: types in registers and in memory, and lines for what algorithms on values ask."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.candidates.triton.expressions.text import Text
from tilewright.dtype import BF16, F4E2M1FN, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ, F32, F64, PRED, S32, S64, U32, DType
from tilewright.lowering.scalar.nodes import NodeBuilder
from tilewright.lowering.scalar.values import FP8, Body, Fewer, Operand, Value
from tilewright.schedule.candidate import Unsupported

NATIVE = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
FP8_NAMES = {
    F4E2M1FN: "float8e4nv",
    F8E4M3FN: "float8e4nv",
    F8E5M2: "float8e5",
    F8E4M3FNUZ: "float8e4b8",
    F8E5M2FNUZ: "float8e5b16",
}
FUNCTIONS = {"exponential": "exp", "sine": "sin", "cosine": "cos", "min": "minimum", "max": "maximum"}
# Added to an f32 below 2^22 it leaves the nearest integer, ties to even, in the low bits of the sum. The 2 makes an integer
# subtraction necessary: ptxas 12.8 takes the low byte of a sum of floats, stored as it is, for a conversion (F2IP.U8).
ROUND, ROUND_BITS = 1.5 * 2.0**23 + 2, 0x4B400002


def in_registers(dtype: DType) -> str:
    """The Triton type of a value; fp8 is its code, 4 bits are a byte.

    Raises:
        Unsupported: f64 has no kernel.
    """
    if dtype in FP8:
        return "uint8"
    if dtype.is_float:
        if dtype.name not in NATIVE:
            raise Unsupported(f"{dtype} has no Triton kernel")
        return NATIVE[dtype.name]
    if dtype is PRED:
        return "int1"
    return f"{'uint' if dtype.kind == 'uint' else 'int'}{max(dtype.bits, 8)}"


def in_memory(dtype: DType) -> str:
    """The Triton type of an element in memory: pred is a byte there."""
    return "uint8" if dtype is PRED else in_registers(dtype)


def zero(dtype: DType) -> str:
    """Nothing of a type in registers, as a literal."""
    return "0.0" if dtype.is_float and dtype not in FP8 else "0"


def pointer_type(dtype: DType) -> str:
    """The type of a kernel's argument, as a signature spells it: "*fp16", "*i8"; fp8 is passed as the bytes of its codes."""
    name = in_memory(dtype)
    short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    return "*" + short.get(name, name.replace("uint", "u").replace("int", "i"))


def spelled(number: float) -> str:
    """A number in Triton's Python."""
    return repr(number) if math.isfinite(number) else f"float('{number}')"


class Printer(NodeBuilder):
    """Operations on tiles, written into a text.

    Attributes:
        fp8: the fp8 types that the hardware converts to and from (rounding once, to nearest); others are taken apart in bits.
    """

    native = frozenset({"exponential", "log", "sine", "cosine", "erf"})
    exponent = 1.0

    def __init__(self, text: Text, fp8: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.text, self.fp8 = text, fp8
        self._arguments: dict[str, str] = {}  # numbers in a narrow type, and the arguments that they are

    def cast(self, value: str, name: str, *, bits: bool = False) -> str:
        """Triton's own conversion to a type of its own, or the same bits as that type."""
        return self.text.v(f"{value}.to({self.text.language}.{name}{', bitcast=True' if bits else ''})")

    def where(self, condition: str, a: str, b: str) -> str:
        """Triton's own selection."""
        return self.text.call("where", condition, a, b)

    def narrow(self, number: str, dtype: DType) -> str:
        """An argument of the kernel in a type that f32 or 32-bit integers hold."""
        if dtype is F32:
            return number
        narrow = self.cast(number, in_registers(dtype))
        self._arguments[narrow] = number
        return narrow

    def given(self, x: Value, target: DType) -> Value | None:
        name = self._arguments.get(x.name)
        if name is None or target not in (F32, S32):
            return None
        number = self.text.numbers[name]
        if isinstance(number, int) == (target is S32):
            return Value(self, name, target)
        return Value(self, self.text.number((name, F32), float(number)), F32) if target is F32 else None

    # -- primitives

    def _type(self, dtype: DType) -> str:
        return f"{self.text.language}.{'float64' if dtype is F64 else in_registers(dtype)}"

    def _made(self, dtype: DType, expression: str) -> Value:
        return Value(self, self.text.v(expression), dtype)

    def put(self, operand: Operand, dtype: DType) -> str:
        if isinstance(operand, Value):
            return operand.name
        return spelled(int(operand) & int(dtype.max) if dtype.kind == "uint" else operand)

    def _typed(self, operand: Operand, dtype: DType) -> str:
        """An operand whose type Triton must not guess."""
        name = self.put(operand, dtype)
        return name if isinstance(operand, Value) or dtype in (F32, S32) else self.text.call("cast", name, self._type(dtype))

    def binary(self, op: str, a: Operand, b: Operand) -> Value:
        dtype = self.type_of(a, b)
        if dtype is PRED and op == "^" and not isinstance(b, Value):
            return self._made(PRED, f"{self.put(a, PRED)} == 0")
        x, y = self.put(a, dtype), self.put(b, dtype)
        known = self._number(op, a, b) if dtype is F32 else None
        if known is not None:
            return Value(self, self.text.number((op, x, y), known), F32)
        if op == "/" and self._exact_inverse(y) is not None:
            return self._made(dtype, f"{x} * {self._exact_inverse(y)}")
        return self._made(dtype, f"{x} {op} {y}")

    def _number(self, op: str, a: Operand, b: Operand) -> float | None:
        """The sum, difference or product of known numbers, exact in f64, so that making it f32 rounds it once."""
        x, y = (self.text.numbers.get(v.name) if isinstance(v, Value) else v for v in (a, b))
        if x is None or y is None or op not in ("+", "-", "*"):
            return None
        return float(x + y if op == "+" else x - y if op == "-" else x * y)

    def _exact_inverse(self, x: str) -> str | None:
        """The inverse of a number that is a power of two."""
        number = self.text.numbers.get(x)
        if number is None or abs(math.frexp(number)[0]) != 0.5 or not 2.0**-126 <= abs(number) <= 2.0**126:
            return None
        return self.text.number((x, "inverse"), 1 / number)

    def compare(self, op: str, a: Operand, b: Operand) -> Value:
        dtype = self.type_of(a, b)
        return self._made(PRED, f"{self.put(a, dtype)} {op} {self.put(b, dtype)}")

    def select(self, mask: Value, a: Operand, b: Operand, dtype: DType | None = None) -> Value:
        dtype = dtype or self.type_of(a, b)
        some = isinstance(a, Value) or isinstance(b, Value)
        x, y = (self.put(v, dtype) if some else self._typed(v, dtype) for v in (a, b))
        return Value(self, self.where(mask.name, x, y), dtype)

    def negated(self, x: Value) -> Value:
        return self._made(x.dtype, f"-{x.name}")

    def call(self, fn: str, *args: Operand) -> Value:
        t, dtype = self.text, self.type_of(*args)
        if fn == "fma" and dtype is F64:  # whose constants a call would round to f32
            a, b, c = (self.put(x, dtype) for x in args)
            return self._made(dtype, f"{a} * {b} + {c}")
        if fn == "copysign":
            size, like = args
            assert isinstance(size, Value) and isinstance(like, Value)
            return self.select(like.bits(S32 if dtype is F32 else S64) < 0, -size, size)
        names = [self._typed(x, dtype) for x in args]
        if fn in ("at_most", "at_least", "minimum", "maximum"):
            fn = "minimum" if fn in ("at_most", "minimum") else "maximum"
            names.append("tl.PropagateNan.ALL")
        elif fn == "sqrt":
            fn = "sqrt_rn" if dtype is F32 else "sqrt"
        return Value(self, t.call(FUNCTIONS.get(fn, fn), *names), dtype)

    def to(self, x: Value, dtype: DType) -> Value:
        name = FP8_NAMES.get(dtype)
        return self._made(dtype, f"{x.name}.to({self._type(dtype) if name is None else f'{self.text.language}.{name}'})")

    def bits(self, x: Value, dtype: DType) -> Value:
        return Value(self, self.cast(x.name, FP8_NAMES.get(dtype) or self._type(dtype).split(".")[1], bits=True), dtype)

    def nearest(self, x: Value) -> tuple[Value, Value]:
        whole = (x + ROUND).bits(S32) - ROUND_BITS
        return whole, whole

    def truncated(self, x: Value, dtype: DType) -> Value:
        x = self.select(x == x, x, 0.0)
        if dtype.bits <= 16:
            return self.to(self.to(x.max(float(dtype.min)).min(float(dtype.max)), S32), dtype)
        if dtype not in (S32, U32):
            raise Unsupported(f"converting a float to {dtype} has no Triton kernel")
        fits = x < float(dtype.max) + 1.0
        whole = self.to(self.select(fits, x.max(float(dtype.min)), 0.0), S32 if dtype is S32 else S64)
        return self.select(fits, whole, int(dtype.max)).to(dtype)

    def repeat(self, times: int, state: Sequence[Value], body: Body, unless: Fewer | None = None) -> list[Value]:
        state = list(state)
        for _ in range(times):
            state = body(state)
        return state

    # -- division

    def is_number(self, x: Value) -> bool:
        return x.name in self.text.numbers

    def quotient(self, x: Value, divisor: Value, target: DType, *, repeats: bool) -> Value:
        """x / divisor in f32, rounded to nearest; what is beyond the range of `target`, or tiny to it, need not be.

        A divisor that repeats along an axis is inverted once, and the product corrected by its remainder: exact where nothing
        leaves the range of normal numbers (Markstein 1990; Muller et al., Handbook of Floating-Point Arithmetic, 2nd ed.,
        section 4.7), for which both are scaled.
        """
        if not repeats or target in (F32, BF16):
            return self.call("div_rn", x, divisor)
        t, number = self.text, self.text.numbers.get(divisor.name)
        if number is not None and 2.0**-62 <= abs(number) <= 2.0**62:
            name = t.number((divisor.name, "inverse"), 1 / number)
            inverse = Value(self, name, F32)
        else:
            size = divisor.abs()
            factor = self.select(size > 2.0**62, 2.0**-64, 1.0, F32)
            factor = self.select(size < 2.0**-62, 2.0**64, factor)
            x, divisor = x * factor, divisor * factor
            inverse = self.call("div_rn", 1.0, divisor)
        near = self._made(F32, f"{x.name} * {inverse.name}")
        return Value(self, self.corrected(near.name, x.name, divisor.name, inverse.name), F32)

    def corrected(self, near: str, x: str, divisor: str, inverse: str) -> str:
        """x / divisor, given x * inverse."""
        t = self.text
        number = t.numbers.get(divisor)
        opposite = t.v(f"-{divisor}") if number is None else t.number((divisor, "opposite"), -number)
        rest = t.call("fma", near, opposite, x)
        exact = t.call("fma", rest, inverse, near)
        return self.where(t.v(f"{exact} == {exact}"), exact, near)  # beside infinities there is no remainder
