"""Integer arithmetic as StableHLO means it, where torch's traps, refuses or knows no unsigned 64-bit type.

Tensors hold the operands' storage type or a wider signed one; a u64 travels as the s64 of the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

SIGN64 = -(1 << 63)


def divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Quotient toward zero; all bits set for a zero divisor; the lowest value by -1 is itself."""
    # torch divides the lowest s32 or s64 by -1 with the processor's instruction, which traps.
    special = (b == 0) | (b == -1) if b.dtype.is_signed else b == 0
    quotient = torch.div(a, torch.where(special, torch.ones_like(b), b), rounding_mode="trunc")
    if b.dtype.is_signed:
        quotient = torch.where(b == -1, torch.neg(a), quotient)
    return torch.where(b == 0, ~torch.zeros_like(quotient), quotient)


def remainder(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a - b * divide(a, b): the sign is the dividend's; the dividend itself for a zero divisor."""
    return a - b * divide(a, b)


def modulo(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The remainder with the divisor's sign; the dividend itself for a zero divisor."""
    rest = remainder(a, b)
    return torch.where((rest != 0) & (b != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


def divide_u64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Quotient of unsigned values; all bits set for a zero divisor."""
    large = b < 0  # 2**63 or more: fits at most once
    divisor = torch.where(large | (b == 0), torch.ones_like(b), b)
    half = divide((a >> 1) & ~SIGN64, divisor) << 1  # of twice the half: one too small at most
    quotient = half + at_least_u64(a - half * divisor, divisor).to(torch.int64)
    quotient = torch.where(large, at_least_u64(a, b).to(torch.int64), quotient)
    return torch.where(b == 0, torch.full_like(quotient, -1), quotient)


def remainder_u64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a - b * divide_u64(a, b); the dividend for a zero divisor."""
    return a - b * divide_u64(a, b)


def at_least_u64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Tell whether a >= b as unsigned values."""
    return (a ^ SIGN64) >= (b ^ SIGN64)


def in_order_u64(f: Callable[..., torch.Tensor], to_pred: bool) -> Callable[..., torch.Tensor]:
    """A function that only compares, on unsigned values: flipping the top bit keeps the order and makes it signed."""

    def flipped(*args: torch.Tensor) -> torch.Tensor:
        result = f(*[a ^ SIGN64 for a in args])
        return result if to_pred else result ^ SIGN64

    return flipped


def power(a: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """a**n, wrapping; a negative n gives the power of 1 and -1, and 0 for any other base (as XLA does)."""
    a, n = torch.broadcast_tensors(a, n)
    result = _power_of_unsigned(a, n.clamp(min=0) if n.dtype.is_signed else n)
    if not n.dtype.is_signed:
        return result
    unit = torch.where((a == -1) & (n & 1 == 1), a, ((a == 1) | (a == -1)).to(a.dtype))
    return torch.where(n < 0, unit, result)


def power_u64(a: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """a**n modulo 2**64, of unsigned values."""
    return _power_of_unsigned(*torch.broadcast_tensors(a, n))


def _power_of_unsigned(a: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    result, base = torch.ones_like(a), a
    while bool((n != 0).any()):
        result = torch.where(n & 1 == 1, result * base, result)
        base = base * base
        n = (n >> 1) & (~SIGN64 if n.dtype is torch.int64 else -1)
    return result


def shift_left(a: torch.Tensor, n: torch.Tensor, bits: int) -> torch.Tensor:
    """a's bits moved up by n; 0 once n, as an unsigned number, is the width or more. Operands are s64."""
    return torch.where(_inside(n, bits), a << n.clamp(0, 63), torch.zeros_like(a))


def shift_right_logical(a: torch.Tensor, n: torch.Tensor, bits: int) -> torch.Tensor:
    """a's bits moved down by n, zeros coming in; 0 once n is the width or more. Operands are s64."""
    step = n.clamp(0, 63)
    if bits < 64:
        moved = (a & (1 << bits) - 1) >> step
    else:
        moved = torch.where(step == 0, a, ((a >> 1) & ~SIGN64) >> (step - 1).clamp(0, 63))
    return torch.where(_inside(n, bits), moved, torch.zeros_like(moved))


def shift_right_arithmetic(a: torch.Tensor, n: torch.Tensor, bits: int) -> torch.Tensor:
    """a's bits moved down by n, its top bit coming in (of unsigned types too). Operands are s64."""
    signed = (a << 64 - bits) >> 64 - bits
    return signed >> torch.where(_inside(n, bits), n, torch.full_like(n, bits - 1))


def _inside(n: torch.Tensor, bits: int) -> torch.Tensor:
    return (n >= 0) & (n < bits)
