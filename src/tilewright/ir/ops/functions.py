"""The elementwise functions that `map` names: arity, operand kinds, and meaning on torch tensors.

Meanings are the StableHLO specification's where it has the function: integers wrap, integer division truncates and gives
-1 for a zero divisor, `remainder` takes the dividend's sign, `maximum` and `minimum` propagate NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilewright.dtype import BF16, F16, F32, F64, PRED, DType

FLOAT = frozenset({"float"})
INTEGER = frozenset({"int", "uint"})
NUMBER = FLOAT | INTEGER
BITS = INTEGER | {"pred"}
ANY = NUMBER | {"pred"}

_WIDER = {"u16": torch.int32, "u32": torch.int64}
_SIGN64 = -(1 << 63)


@dataclass(frozen=True)
class Function:
    """One elementwise function: its torch meaning takes and gives tensors of the operands' common type."""

    arity: int
    kinds: frozenset[str]
    apply: Callable[..., torch.Tensor]
    to_pred: bool = False


def evaluate_function(f: Function, dtype: DType, args: list[torch.Tensor]) -> torch.Tensor:
    """`f` on operands of logical type `dtype`: narrow floats through f32, unsigned types through a wider signed one."""
    storage = dtype.to_torch()
    if dtype.is_float and dtype not in (BF16, F16, F32, F64):
        args = [a.to(torch.float32) for a in args]
    elif dtype.name in _WIDER:
        args = [a.to(_WIDER[dtype.name]) for a in args]
    elif dtype.name == "u64":
        args = [a.view(torch.int64) for a in args]
        if f.to_pred or f is FUNCTIONS["maximum"] or f is FUNCTIONS["minimum"] or f is FUNCTIONS["clamp"]:
            flipped = f.apply(*[a ^ _SIGN64 for a in args])
            return flipped if f.to_pred else (flipped ^ _SIGN64).view(storage)
    result = f.apply(*args)
    if f.to_pred:
        return result
    return narrow_integer(result, dtype) if dtype.is_integer else result.to(storage)


def narrow_integer(value: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Integers modulo 2**bits, in the storage of `dtype` (two's complement; 4-bit codes one to a byte)."""
    if dtype.bits == 4:
        low = value.to(torch.int64) & 15
        return (torch.where(low > 7, low - 16, low) if dtype.kind == "int" else low).to(dtype.to_torch())
    if dtype.name == "u64":
        return value.to(torch.int64).view(torch.uint64) if value.dtype != torch.uint64 else value
    return value.to(dtype.to_torch())


def _divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_floating_point():
        return a / b
    zero = b == 0
    quotient = torch.div(a, torch.where(zero, torch.ones_like(b), b), rounding_mode="trunc")
    return torch.where(zero, torch.full_like(quotient, -1), quotient)


def _remainder(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_floating_point():
        return torch.fmod(a, b)
    zero = b == 0
    return torch.where(zero, a, torch.fmod(a, torch.where(zero, torch.ones_like(b), b)))


def _sign(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        return torch.sign(x)
    return torch.where(torch.isnan(x) | (x == 0), x, torch.sign(x))


def _round_half_away(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.frac(x).abs() == 0.5, torch.trunc(x) + torch.sign(x), torch.round(x))


def _clamp(low: torch.Tensor, x: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.minimum(torch.maximum(x, low), high)


def _cbrt(x: torch.Tensor) -> torch.Tensor:
    return torch.sign(x) * x.abs().pow(1 / 3)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(x)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _logical(on_bool: Callable[..., torch.Tensor], on_bits: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def apply(*args: torch.Tensor) -> torch.Tensor:
        return on_bool(*args) if args[0].dtype == torch.bool else on_bits(*args)

    return apply


def _shift(a: torch.Tensor, n: torch.Tensor, shifted: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Shifts by the width or more give 0, or the sign when arithmetic."""
    width = a.dtype.itemsize * 8
    return shifted(a, n.clamp(0, width - 1))


def _shift_left(a: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    inside = (n >= 0) & (n < a.dtype.itemsize * 8)
    return torch.where(inside, _shift(a, n, torch.bitwise_left_shift), torch.zeros_like(a))


def _shift_right(a: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    n = torch.where(n < 0, torch.full_like(n, a.dtype.itemsize * 8 - 1), n)
    return _shift(a, n, torch.bitwise_right_shift)


def _shift_right_logical(a: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    width = a.dtype.itemsize * 8
    wide = a.to(torch.int64) & ((1 << width) - 1) if width < 64 else a
    inside = (n >= 0) & (n < width)
    step = n.to(torch.int64).clamp(0, 63)
    if width == 64:
        mask = torch.where(step > 0, (torch.ones_like(step) << (64 - step).clamp(0, 63)) - 1, torch.full_like(step, -1))
        out = torch.bitwise_right_shift(wide, step) & mask
    else:
        out = torch.bitwise_right_shift(wide, step)
    return torch.where(inside, out, torch.zeros_like(out)).to(a.dtype)


def _unary(kinds: frozenset[str], apply: Callable[..., torch.Tensor]) -> Function:
    return Function(1, kinds, apply)


def _binary(kinds: frozenset[str], apply: Callable[..., torch.Tensor]) -> Function:
    return Function(2, kinds, apply)


def _compare(apply: Callable[..., torch.Tensor]) -> Function:
    return Function(2, ANY, apply, to_pred=True)


FUNCTIONS: dict[str, Function] = {
    "abs": _unary(NUMBER, torch.abs),
    "acos": _unary(FLOAT, torch.acos),
    "acosh": _unary(FLOAT, torch.acosh),
    "add": _binary(ANY, _logical(torch.logical_or, torch.add)),
    "and": _binary(BITS, _logical(torch.logical_and, torch.bitwise_and)),
    "asin": _unary(FLOAT, torch.asin),
    "asinh": _unary(FLOAT, torch.asinh),
    "atan": _unary(FLOAT, torch.atan),
    "atan2": _binary(FLOAT, torch.atan2),
    "atanh": _unary(FLOAT, torch.atanh),
    "cbrt": _unary(FLOAT, _cbrt),
    "ceil": _unary(FLOAT, torch.ceil),
    "clamp": Function(3, NUMBER, _clamp),  # clamp(low, x, high)
    "cosh": _unary(FLOAT, torch.cosh),
    "cosine": _unary(FLOAT, torch.cos),
    "divide": _binary(NUMBER, _divide),
    "equal": _compare(torch.eq),
    "erf": _unary(FLOAT, torch.erf),
    "erfc": _unary(FLOAT, torch.erfc),
    "exponential": _unary(FLOAT, torch.exp),
    "exponential_minus_one": _unary(FLOAT, torch.expm1),
    "floor": _unary(FLOAT, torch.floor),
    "gelu": _unary(FLOAT, _gelu),
    "gelu_tanh": _unary(FLOAT, _gelu_tanh),
    "greater": _compare(torch.gt),
    "greater_equal": _compare(torch.ge),
    "is_finite": Function(1, FLOAT, torch.isfinite, to_pred=True),
    "is_inf": Function(1, FLOAT, torch.isinf, to_pred=True),
    "is_nan": Function(1, FLOAT, torch.isnan, to_pred=True),
    "less": _compare(torch.lt),
    "less_equal": _compare(torch.le),
    "log": _unary(FLOAT, torch.log),
    "log_plus_one": _unary(FLOAT, torch.log1p),
    "logistic": _unary(FLOAT, torch.sigmoid),
    "maximum": _binary(ANY, _logical(torch.logical_or, torch.maximum)),
    "minimum": _binary(ANY, _logical(torch.logical_and, torch.minimum)),
    "modulo": _binary(NUMBER, torch.remainder),  # sign of the divisor
    "multiply": _binary(ANY, _logical(torch.logical_and, torch.mul)),
    "negate": _unary(NUMBER, torch.neg),
    "not": _unary(BITS, _logical(torch.logical_not, torch.bitwise_not)),
    "not_equal": _compare(torch.ne),
    "or": _binary(BITS, _logical(torch.logical_or, torch.bitwise_or)),
    "power": _binary(NUMBER, torch.pow),
    "relu": _unary(NUMBER, torch.relu),
    "remainder": _binary(NUMBER, _remainder),  # sign of the dividend
    "round_half_away": _unary(FLOAT, _round_half_away),
    "round_half_even": _unary(FLOAT, torch.round),
    "rsqrt": _unary(FLOAT, torch.rsqrt),
    "shift_left": _binary(INTEGER, _shift_left),
    "shift_right_arithmetic": _binary(INTEGER, _shift_right),
    "shift_right_logical": _binary(INTEGER, _shift_right_logical),
    "sign": _unary(NUMBER, _sign),
    "silu": _unary(FLOAT, _silu),
    "sine": _unary(FLOAT, torch.sin),
    "sinh": _unary(FLOAT, torch.sinh),
    "sqrt": _unary(FLOAT, torch.sqrt),
    "subtract": _binary(NUMBER, torch.sub),
    "tan": _unary(FLOAT, torch.tan),
    "tanh": _unary(FLOAT, torch.tanh),
    "trunc": _unary(FLOAT, torch.trunc),
    "xor": _binary(BITS, _logical(torch.logical_xor, torch.bitwise_xor)),
}


def result_dtype(function: Function, operand: DType) -> DType:
    """pred for comparisons and tests, else the operands' type."""
    return PRED if function.to_pred else operand
