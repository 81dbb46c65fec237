"""Rounding once to a float type: torch's own casts go through f32 and so round twice, and disagree on overflow."""

from __future__ import annotations

import torch

from tilewright.dtype import F4E2M1FN, F8E4M3FN, DType


def to_float(x: torch.Tensor, target: DType, *, saturate: bool = False) -> torch.Tensor:
    """Each element as the nearest value of `target`, ties to even, whatever type of number `x` holds.

    Past the largest finite value: that value if `saturate`, else the format's infinity or, where it has none, NaN; f4e2m1fn,
    which has neither, saturates, and takes NaN for -0 (for 0 where it has a sign) as ml_dtypes does.
    """
    storage = target.to_torch()
    if target is F4E2M1FN:
        return _to_four_bits(_sticky_f32(x))
    if x.dtype is storage and not saturate:
        return x
    if target.bits > 16:
        wide = x if x.dtype is torch.float64 else x.to(storage)
        return (wide.clamp(target.min, target.max) if saturate else x).to(storage)  # clamp keeps NaN
    narrow = _sticky_f32(x)
    if saturate:
        narrow = narrow.clamp(target.min, target.max)
    rounded = narrow.to(storage)
    if target is not F8E4M3FN:
        return rounded
    # torch saturates here; 464 is halfway to the missing 480 and still ties to 448.
    bits = rounded.view(torch.uint8)
    return torch.where(narrow.abs() > 464.0, bits | 0x7F, bits).view(storage)


def _to_four_bits(x: torch.Tensor) -> torch.Tensor:
    """f32 as the nearest f4e2m1fn: the numbers from 0 to 2 are a half apart, to 4 one, to 6 two."""
    size = x.abs().nan_to_num(0.0).clamp(max=F4E2M1FN.max)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    value = (size / step).round() * step
    return torch.where(torch.signbit(x) != x.isnan(), -value, value).to(F4E2M1FN.to_torch())


def _sticky_f32(x: torch.Tensor) -> torch.Tensor:
    """x in f32, rounded to odd where it does not fit: rounding that again to 11 bits or fewer rounds x itself once.

    Source: Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd".
    """
    if x.dtype in (torch.int64, torch.uint64):
        x = _sticky_f64(x)
    elif x.dtype in (torch.int32, torch.uint32):
        x = x.to(torch.float64)
    near = x.to(torch.float32)
    if x.dtype is not torch.float64:
        return near
    exact = (near.to(torch.float64) == x) | torch.isnan(x)
    bits = near.view(torch.int32)
    toward_zero = torch.where(near.to(torch.float64).abs() > x.abs(), bits - 1, bits)
    return torch.where(exact, bits, toward_zero | 1).view(torch.float32)


def _sticky_f64(x: torch.Tensor) -> torch.Tensor:
    """A 64-bit integer in f64, rounded to odd: its lowest eleven bits count only as zero or not."""
    v = x.view(torch.int64)
    high, low = v >> 11, v & 0x7FF
    if x.dtype is torch.uint64:
        high = high & (1 << 53) - 1
    sticky = (high | (low != 0).to(torch.int64)).to(torch.float64) * 2048.0
    small = (v >= 0) & (v < 1 << 53) if x.dtype is torch.uint64 else v.abs() < 1 << 53
    return torch.where(small & (v != -(1 << 63)), v.to(torch.float64), sticky)


def are_codes(x: torch.Tensor, dtype: DType) -> bool:
    """Tell whether every element of a tensor is a value of a 4-bit type, in whose storage it is."""
    if not x.numel():
        return True
    if dtype.is_float:
        return torch.equal(to_float(x, dtype).view(torch.uint8), x.view(torch.uint8))
    low, high = torch.aminmax(x)
    return int(low) >= dtype.min and int(high) <= dtype.max
