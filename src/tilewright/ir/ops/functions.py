"""The elementwise functions that `map` names: arity, operand kinds, and meaning on torch tensors.

Meanings are the StableHLO specification's where it has the function: integers wrap, integer division truncates and gives
-1 for a zero divisor, `remainder` takes the dividend's sign, `maximum` and `minimum` propagate NaN and put -0 below +0 (IEEE
754-2019, 9.6), a shift by the width or more leaves zeros (or the sign).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tilewright.dtype import PRED, DType
from tilewright.ir.ops import integers
from tilewright.ir.ops.rounding import to_float

FLOAT = frozenset({"float"})
INTEGER = frozenset({"int", "uint"})
NUMBER = FLOAT | INTEGER
BITS = INTEGER | {"pred"}
ANY = NUMBER | {"pred"}

BITS_TYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # that torch has all kernels for, by bytes
_WIDER = {"u16": torch.int32, "u32": torch.int64}


@dataclass(frozen=True)
class Function:
    """One elementwise function.

    Attributes:
        arity: number of operands.
        kinds: of types it takes.
        apply: its meaning on torch tensors of the operands' common type, or a wider one; a shift takes s64 and the width.
        to_pred: whether it gives pred, not the operands' type.
        on_u64: its meaning on u64, which travels as the s64 of the same bits, where `apply` would see the sign.
    """

    arity: int
    kinds: frozenset[str]
    apply: Callable[..., torch.Tensor]
    to_pred: bool = False
    on_u64: Callable[..., torch.Tensor] | None = None


def evaluate_function(f: Function, dtype: DType, args: list[torch.Tensor]) -> torch.Tensor:
    """`f` on operands of logical type `dtype`: narrow floats through f32, unsigned types through a wider signed one."""
    if f.kinds == INTEGER:  # a shift
        return narrow_integer(f.apply(*[as_s64(a) for a in args], dtype.bits), dtype)
    apply = f.apply
    if dtype.is_float and dtype.bits <= 8:
        args = [a.to(torch.float32) for a in args]
    elif dtype.name in _WIDER:
        args = [a.to(_WIDER[dtype.name]) for a in args]
    elif dtype.name == "u64":
        args = [as_s64(a) for a in args]
        apply = f.on_u64 or f.apply
    result = apply(*args)
    if f.to_pred or dtype is PRED:
        return result
    return narrow_integer(result, dtype) if dtype.is_integer else to_float(result, dtype)


def by_bits(f: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """`f` on tensors whose elements are only moved: types torch has no kernels for travel as integers of their width."""
    storage = tensors[0].dtype
    if storage in (torch.uint16, torch.uint32, torch.uint64) or (storage.is_floating_point and storage.itemsize == 1):
        return f(*[t.view(BITS_TYPE[storage.itemsize]) for t in tensors]).view(storage)
    return f(*tensors)


def as_s64(x: torch.Tensor) -> torch.Tensor:
    """Integers as s64: the same bits for u64."""
    return x.view(torch.int64) if x.dtype is torch.uint64 else x.to(torch.int64)


def narrow_integer(value: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Integers modulo 2**bits, in the storage of `dtype` (two's complement; 4-bit codes one to a byte)."""
    if dtype.bits == 4:
        low = value.to(torch.int64) & 15
        return (torch.where(low > 7, low - 16, low) if dtype.kind == "int" else low).to(dtype.to_torch())
    if dtype.name == "u64":
        return value.to(torch.int64).view(torch.uint64) if value.dtype != torch.uint64 else value
    return value.to(dtype.to_torch())


def _sign(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        return torch.sign(x)
    return torch.where(torch.isnan(x) | (x == 0), x, torch.sign(x))


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.uint8 else torch.abs(x)


def _round_half_away(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.frac(x).abs() == 0.5, torch.trunc(x) + torch.sign(x), torch.round(x))


def _extreme(greater: bool) -> Callable[..., torch.Tensor]:
    """torch's maximum or minimum, which give either of two zeros: equal numbers have equal bits but for a zero's sign, which
    is minus in both (the bits' `and`) or in any (their `or`)."""
    pick, join = (torch.maximum, torch.bitwise_and) if greater else (torch.minimum, torch.bitwise_or)

    def apply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        picked = pick(a, b)
        if not picked.is_floating_point():
            return picked
        bits = BITS_TYPE[picked.dtype.itemsize]
        joined = join(*(t.to(picked.dtype).view(bits) for t in (a, b)))  # a number of no axes may be of another width
        return torch.where(a == b, joined.view(picked.dtype), picked)

    return apply


_maximum, _minimum = _extreme(True), _extreme(False)


def _clamp(low: torch.Tensor, x: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return _minimum(_maximum(x, low), high)


def _by_numpy(f: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A NumPy function of floats, where torch has none or (its vectorised fmod) one that overflows on the way."""

    def apply(*args: torch.Tensor) -> torch.Tensor:
        kind = torch.float64 if args[0].dtype is torch.float64 else torch.float32
        with np.errstate(all="ignore"):
            result = np.asarray(f(*(a.detach().to(kind).cpu().numpy() for a in args)))
        return torch.from_numpy(result).to(args[0].device, args[0].dtype)

    return apply


def _relu(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.uint8 else torch.relu(x)


def _erf(x: torch.Tensor) -> torch.Tensor:
    # Of small numbers of 16 bits torch's own has no digit right on a CPU.
    return torch.erf(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    # x * Phi(x) by erfc: 1 + erf(x) loses all digits of a negative tail, and torch's own gives NaN at infinity.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (0.5 * wide * torch.erfc(wide * -math.sqrt(0.5))).to(x.dtype)


def _logical(on_bool: Callable[..., torch.Tensor], on_bits: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def apply(*args: torch.Tensor) -> torch.Tensor:
        return on_bool(*args) if args[0].dtype == torch.bool else on_bits(*args)

    return apply


def _by_kind(on_float: Callable[..., torch.Tensor], on_int: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def apply(*args: torch.Tensor) -> torch.Tensor:
        return on_float(*args) if args[0].is_floating_point() else on_int(*args)

    return apply


def _unary(kinds: frozenset[str], apply: Callable[..., torch.Tensor]) -> Function:
    return Function(1, kinds, apply)


def _binary(
    kinds: frozenset[str], apply: Callable[..., torch.Tensor], on_u64: Callable[..., torch.Tensor] | None = None
) -> Function:
    return Function(2, kinds, apply, on_u64=on_u64)


def _compare(apply: Callable[..., torch.Tensor]) -> Function:
    return Function(2, ANY, apply, to_pred=True, on_u64=integers.in_order_u64(apply, to_pred=True))


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x


def _is_nonzero(x: torch.Tensor) -> torch.Tensor:
    return (x != 0).to(x.dtype)


FUNCTIONS: dict[str, Function] = {
    "abs": Function(1, NUMBER, _magnitude, on_u64=_itself),
    "acos": _unary(FLOAT, torch.acos),
    "acosh": _unary(FLOAT, torch.acosh),
    "add": _binary(ANY, _logical(torch.logical_or, torch.add)),
    "and": _binary(BITS, _logical(torch.logical_and, torch.bitwise_and)),
    "asin": _unary(FLOAT, torch.asin),
    "asinh": _unary(FLOAT, torch.asinh),
    "atan": _unary(FLOAT, torch.atan),
    "atan2": _binary(FLOAT, torch.atan2),
    "atanh": _unary(FLOAT, torch.atanh),
    "cbrt": _unary(FLOAT, _by_numpy(np.cbrt)),
    "ceil": _unary(FLOAT, torch.ceil),
    "clamp": Function(3, NUMBER, _clamp, on_u64=integers.in_order_u64(_clamp, to_pred=False)),  # clamp(low, x, high)
    "cosh": _unary(FLOAT, torch.cosh),
    "cosine": _unary(FLOAT, torch.cos),
    "divide": _binary(NUMBER, _by_kind(torch.div, integers.divide), integers.divide_u64),
    "equal": _compare(torch.eq),
    "erf": _unary(FLOAT, _erf),
    "erfc": _unary(FLOAT, torch.erfc),
    "exponential": _unary(FLOAT, torch.exp),
    "exponential_minus_one": _unary(FLOAT, torch.expm1),
    "floor": _unary(FLOAT, torch.floor),
    "gelu": _unary(FLOAT, _gelu),
    "gelu_tanh": _unary(FLOAT, partial(torch.nn.functional.gelu, approximate="tanh")),
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
    "maximum": _binary(ANY, _logical(torch.logical_or, _maximum), integers.in_order_u64(torch.maximum, to_pred=False)),
    "minimum": _binary(ANY, _logical(torch.logical_and, _minimum), integers.in_order_u64(torch.minimum, to_pred=False)),
    "modulo": _binary(NUMBER, _by_kind(_by_numpy(np.mod), integers.modulo), integers.remainder_u64),
    "multiply": _binary(ANY, _logical(torch.logical_and, torch.mul)),
    "negate": _unary(NUMBER, torch.neg),
    "not": _unary(BITS, _logical(torch.logical_not, torch.bitwise_not)),
    "not_equal": _compare(torch.ne),
    "or": _binary(BITS, _logical(torch.logical_or, torch.bitwise_or)),
    "power": _binary(NUMBER, _by_kind(torch.pow, integers.power), integers.power_u64),
    "relu": Function(1, NUMBER, _relu, on_u64=_itself),
    # remainder has the dividend's sign, modulo the divisor's
    "remainder": _binary(NUMBER, _by_kind(_by_numpy(np.fmod), integers.remainder), integers.remainder_u64),
    "round_half_away": _unary(FLOAT, _round_half_away),
    "round_half_even": _unary(FLOAT, torch.round),
    "rsqrt": _unary(FLOAT, torch.rsqrt),
    "shift_left": _binary(INTEGER, integers.shift_left),
    "shift_right_arithmetic": _binary(INTEGER, integers.shift_right_arithmetic),
    "shift_right_logical": _binary(INTEGER, integers.shift_right_logical),
    "sign": Function(1, NUMBER, _sign, on_u64=_is_nonzero),
    "silu": _unary(FLOAT, torch.nn.functional.silu),
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
