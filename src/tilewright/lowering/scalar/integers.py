"""Functions of integers of one type, as `ir/ops/integers.py` means them: quotients, remainders, powers, shifts."""

from __future__ import annotations

from collections.abc import Callable

from tilewright.dtype import S8, S16, S32, S64, U8, U16, U32, U64, DType
from tilewright.lowering.scalar.values import Value

SIGNED = {U8: S8, U16: S16, U32: S32, U64: S64}
UNSIGNED = {signed: unsigned for unsigned, signed in SIGNED.items()}


def _signed(dtype: DType) -> DType:
    return SIGNED.get(dtype, dtype)


def _unsigned(dtype: DType) -> DType:
    return UNSIGNED.get(dtype, dtype)


def absolute(x: Value) -> Value:
    """Size; the lowest value is its own."""
    return x.builder.select(x < 0, -x, x) if x.dtype.is_signed else x


def sign(x: Value) -> Value:
    """-1, 0 or 1."""
    some = x.builder.select(x != 0, 1, 0, x.dtype)
    return x.builder.select(x < 0, -1, some) if x.dtype.is_signed else some


def divide(a: Value, b: Value) -> Value:
    """Quotient toward zero, all ones by zero; the machine's own division is kept from what it traps at."""
    pick, nothing = a.builder.select, b == 0
    divisor = pick(nothing, 1, b)
    if not a.dtype.is_signed:
        return pick(nothing, -1, a // divisor)
    less = b == -1
    return pick(nothing, -1, pick(less, -a, a // pick(less, 1, divisor)))


def remainder(a: Value, b: Value) -> Value:
    """Remainder of `divide`, with the dividend's sign."""
    return a - b * divide(a, b)


def modulo(a: Value, b: Value) -> Value:
    """Remainder with the divisor's sign."""
    rest = remainder(a, b)
    if not a.dtype.is_signed:
        return rest
    return a.builder.select(((rest ^ b) < 0) & ((rest != 0) & (b != 0)), rest + b, rest)


def power(a: Value, n: Value) -> Value:
    """a^n, wrapping; of a negative n what XLA makes of it."""
    pick, dtype = a.builder.select, a.dtype

    def square(state: list[Value]) -> list[Value]:
        result, base, left = state
        return [pick((left & 1) != 0, result * base, result), base * base, left >> 1]

    start = [a.builder.constant(1, dtype), a, n.bits(_unsigned(dtype))]
    result = a.builder.repeat(dtype.bits, start, square)[0]
    if not dtype.is_signed:
        return result
    even = pick((n & 1) != 0, -1, 1, dtype)
    unit = pick(a == -1, even, pick(a == 1, 1, 0, dtype))
    return pick(n < 0, unit, result)


def shift_left(a: Value, n: Value) -> Value:
    """Shift by any count, n without a sign: zeros by the width or more."""
    inside = n.bits(_unsigned(n.dtype)) < n.dtype.bits
    return a.builder.select(inside, a << a.builder.select(inside, n, 0), 0)


def shift_right_logical(a: Value, n: Value) -> Value:
    """Shift by any count, n without a sign: zeros by the width or more."""
    bits, by = a.bits(_unsigned(a.dtype)), n.bits(_unsigned(n.dtype))
    inside = by < n.dtype.bits
    return a.builder.select(inside, bits >> a.builder.select(inside, by, 0), 0).bits(a.dtype)


def shift_right_arithmetic(a: Value, n: Value) -> Value:
    """Shift by any count, n without a sign: copies of the top bit by the width or more."""
    inside = n.bits(_unsigned(n.dtype)) < n.dtype.bits
    by = a.builder.select(inside, n, n.dtype.bits - 1)
    return (a.bits(_signed(a.dtype)) >> by.bits(_signed(n.dtype))).bits(a.dtype)


FUNCTIONS: dict[str, Callable[..., Value]] = {
    "maximum": lambda x, y: x.max(y), "minimum": lambda x, y: x.min(y), "clamp": lambda low, x, high: x.max(low).min(high),
    "relu": lambda x: x.max(0) if x.dtype.is_signed else x, "negate": lambda x: -x, "abs": absolute, "sign": sign,
    "divide": divide, "remainder": remainder, "modulo": modulo, "power": power,
    "shift_left": shift_left, "shift_right_logical": shift_right_logical, "shift_right_arithmetic": shift_right_arithmetic,
}  # fmt: skip
