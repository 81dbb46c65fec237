"""Types of numbers as NumPy holds them: conversions with the roundings of PTX's `cvt`, sums and products rounded once.

A register's bits are an unsigned integer array; f16, f32 and f64 are views of it, bf16 and 8-bit floats are decoded to f32.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import numpy as np

from ptx.text import Unknown

u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
i1, i2, i4, i8 = np.int8, np.int16, np.int32, np.int64
f2, f4, f8 = np.float16, np.float32, np.float64

UNSIGNED = {8: u1, 16: u2, 32: u4, 64: u8}
SIGNED = {8: i1, 16: i2, 32: i4, 64: i8}
FLOATS = {"f16": f2, "f32": f4, "f64": f8}
SMALL = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}  # bits of exponent and mantissa, bias


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """f32 of bf16's bits."""
    return (bits.astype(u4) << u4(16)).view(f4)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest bf16 of f32 or f64, ties to even."""
    if x.dtype == f8:
        x = odd_f32(x)
    bits = np.ascontiguousarray(x).view(u4)
    rounded = (bits + u4(0x7FFF) + ((bits >> u4(16)) & u4(1))) >> u4(16)
    return np.where(np.isnan(x), u4(0x7FFF), rounded).astype(u2)


def odd_f32(x: np.ndarray) -> np.ndarray:
    """f64 as f32, towards zero, the last bit set where that is not exact: rounded again it is as if rounded once."""
    near = x.astype(f4)
    bits = np.ascontiguousarray(near).view(u4)
    exact = (near.astype(f8) == x) | ~np.isfinite(x)
    down = np.where(~exact & (np.abs(near.astype(f8)) > np.abs(x)), bits - u4(1), bits)
    return np.where(exact, bits, down | u4(1)).view(f4)


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray, to: type) -> np.ndarray:
    """x * y + z of f16 or f32 rounded once."""
    product, addend = x.astype(f8) * y.astype(f8), z.astype(f8)
    total = product + addend
    # What the sum in f64 left out decides where it lies half way between two numbers of the result's type.
    back = total - product
    lost = (product - (total - back)) + (addend - back)
    if np.any((lost != 0) & np.isfinite(total)):
        bits = total.view(u8)
        even = (bits & u8(1)) == 0
        away = (lost > 0) == (total > 0)
        fix = (lost != 0) & np.isfinite(total) & even
        total = np.where(fix, np.where(away, bits | u8(1), bits - u8(1)), bits).view(f8)
    if to is u2:  # bf16
        return to_bf16(total)
    return total.astype(to)


@cache
def small_values(kind: str) -> np.ndarray:
    """f32 of every 8-bit float."""
    exponent_bits, mantissa_bits, bias = SMALL[kind]
    code = np.arange(256)
    sign = np.where(code >> 7, -1.0, 1.0)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    value = np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))
    if kind == "e4m3":
        value = np.where((code & 0x7F) == 0x7F, np.nan, value)
    else:
        value = np.where(exponent == 31, np.where(mantissa == 0, np.inf, np.nan), value)
    return (sign * value).astype(f4)


@cache
def _steps(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Finite numbers from 0 up, and half way between each and the next."""
    values = small_values(kind)[:128].astype(f8)
    finite = values[np.isfinite(values)]
    return finite, (finite[1:] + finite[:-1]) / 2


def to_small(x: np.ndarray, kind: str, *, relu: bool = False) -> np.ndarray:
    """Bits of the nearest 8-bit float, ties to even, saturated."""
    x = x.astype(f8)
    if relu:
        x = np.where(x > 0, x, np.where(np.isnan(x), x, 0.0))
    finite, halves = _steps(kind)
    size = np.abs(x)
    low = np.searchsorted(halves, size, side="left")  # of two that are equally near, the lower one
    tie = (low < len(halves)) & (halves[np.minimum(low, len(halves) - 1)] == size)
    code = np.where(tie & (low % 2 == 1), low + 1, low)
    code = np.minimum(code, len(finite) - 1)
    code = np.where(np.isnan(x), 0x7F, code | np.where(np.signbit(x), 0x80, 0))
    return code.astype(u1)


def to_tf32(bits: np.ndarray, *, away: bool) -> np.ndarray:
    """f32 bits rounded to ten bits of mantissa: ties away from zero, or to even."""
    half = u4(0x1000) if away else u4(0xFFF) + ((bits >> u4(13)) & u4(1))
    return (bits + half) & u4(0xFFFFE000)


def flush(x: np.ndarray) -> np.ndarray:
    """f32 without the numbers that have no leading one."""
    return np.where(np.abs(x) < f4(2.0**-126), np.copysign(f4(0), x), x)


def bits_of(kind: str) -> int:
    """Bits of a type, by its name in an opcode."""
    if kind in SMALL:
        return 8
    if kind == "tf32":
        return 32
    if kind.endswith("x2"):
        return 2 * bits_of(kind[:-2])
    if kind == "bf16":
        return 16
    if not re.fullmatch(r"[bsuf](8|16|32|64)", kind):
        raise Unknown(f"type {kind}")
    return int(kind[1:])


def decoded(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    """A function from a type's bits to numbers."""
    if kind == "bf16":
        return from_bf16
    if kind in FLOATS:
        to = FLOATS[kind]
        return lambda b: b.view(to)
    if kind in SMALL:
        table = small_values(kind)
        return lambda b: table[b]
    if kind == "tf32":
        return lambda b: (b & u4(0xFFFFE000)).view(f4)
    if kind[0] == "s":
        to_signed = SIGNED[int(kind[1:])]
        return lambda b: b.view(to_signed)
    return lambda b: b


def _rounded_to(x: np.ndarray, kind: str, rounding: str) -> np.ndarray:
    """Bits of f16 or bf16 or f32, of a wider float."""
    if rounding in ("rn", ""):
        return to_bf16(x) if kind == "bf16" else x.astype(FLOATS[kind]).view(UNSIGNED[bits_of(kind)])
    if rounding == "rz":
        near = _rounded_to(x, kind, "rn")
        wide = decoded(kind)(near).astype(f8)
        return np.where(np.abs(wide) > np.abs(x.astype(f8)), near - near.dtype.type(1), near)
    raise NotImplementedError(f"rounding {rounding} to {kind}")


WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
Cast = Callable[..., np.ndarray]


def cast(to: str, of: str, mods: frozenset[str]) -> Cast:
    """`cvt.to.of` of bits in arrays of their own width (of two such arrays for `x2` types made of two f32)."""
    rounding = next((m for m in mods if m in ("rn", "rz", "rna", *WHOLE)), "")
    relu, saturate = "relu" in mods, "sat" in mods or "satfinite" in mods
    if to.endswith("x2") and not of.endswith("x2"):  # two f32: the first goes to the upper half
        half = cast(to[:-2], of, mods)
        width = bits_of(to) // 2
        word = UNSIGNED[2 * width]
        return lambda a, b: (half(a).astype(word) << word(width)) | half(b).astype(word)
    if to.endswith("x2"):
        half = cast(to[:-2], of[:-2], mods)
        part, whole = UNSIGNED[bits_of(of) // 2], UNSIGNED[bits_of(to)]
        return lambda a: np.ascontiguousarray(half(np.ascontiguousarray(a).view(part))).view(whole)
    number = decoded(of)
    if to in SMALL:
        return lambda a: to_small(number(a), to, relu=relu)
    if to == "tf32":
        return lambda a: to_tf32(a, away=rounding == "rna")
    floating = of in FLOATS or of == "bf16" or of in SMALL
    if to in FLOATS or to == "bf16":
        return _to_float(to, number, rounding, floating, relu, saturate and "sat" in mods, "ftz" in mods)
    width = bits_of(to)
    kind = SIGNED[width] if to[0] == "s" else UNSIGNED[width]
    out = UNSIGNED[width]
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    if not floating:
        if saturate:
            return lambda a: (
                np.clip(number(a), max(low, np.iinfo(number(a).dtype).min), min(high, np.iinfo(number(a).dtype).max))
                .astype(kind)
                .view(out)
            )
        return lambda a: number(a).astype(kind).view(out)
    whole = WHOLE[rounding]

    def to_integer(a: np.ndarray) -> np.ndarray:
        x = whole(number(a).astype(f8))
        x = np.where(np.isnan(x), 0.0, x)
        top = x >= float(high)
        return (
            np.where(top, kind(high), np.clip(np.where(top, 0.0, x), float(low), float(high)).astype(kind))
            .astype(kind)
            .view(out)
        )

    return to_integer


def _to_float(to: str, number: Cast, rounding: str, floating: bool, relu: bool, sat: bool, ftz: bool) -> Cast:
    def made(a: np.ndarray) -> np.ndarray:
        x = number(a)
        if not floating:
            x = x.astype(f8) if to == "f64" or x.dtype.itemsize < 8 else x
            if to == "f32" and x.dtype != f8:
                return x.astype(f4).view(u4)
        if rounding in WHOLE:
            x = WHOLE[rounding](x)
        if ftz and x.dtype == f4:
            x = flush(x)
        if relu:
            x = np.where(x > 0, x, np.where(np.isnan(x), x, x.dtype.type(0)))
        if sat:
            x = np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0, 1)).astype(x.dtype)
        return _rounded_to(x, to, "rz" if rounding == "rz" else "rn")

    return made
