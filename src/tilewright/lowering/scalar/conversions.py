"""Conversions between types, quantising and dequantising, as `ir/ops` means them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tilewright.dtype import (
    F4E2M1FN,
    F8E4M3FN,
    F8E4M3FNUZ,
    F8E5M2,
    F8E5M2FNUZ,
    F16,
    F32,
    PRED,
    S8,
    S16,
    S32,
    U4,
    U8,
    U16,
    U32,
    DType,
)
from tilewright.ir.graph import Node
from tilewright.ir.ops import VIEWS, Const, Convert, Dequantize, Map, Quantize
from tilewright.lowering.scalar.steps import PARTS, PAST, parts_of, scale_of, usable
from tilewright.lowering.scalar.values import FP8, Builder, Operand, Value, in_register


class Format(NamedTuple):
    """An fp8 type: bits of the fraction, bias of the exponent, and the code on overflow: infinity, or NaN."""

    fraction: int
    bias: int
    overflow: int


FORMATS = {
    F8E4M3FN: Format(3, 7, 0x7F),
    F8E5M2: Format(2, 15, 0x7C),
    F8E4M3FNUZ: Format(3, 8, 0x80),
    F8E5M2FNUZ: Format(2, 16, 0x80),
}
FNUZ = (F8E4M3FNUZ, F8E5M2FNUZ)
NAN = float("nan")


def convert(x: Value, source: DType, target: DType, *, saturate: bool = False) -> Value:
    """`Convert`'s meaning: a value of type `source` as one of type `target`."""
    if source is target:
        return x
    known = x.builder.given(x, target)
    if known is not None:
        return known
    if source in FP8:
        return convert(_decoded(x, source), F32, target, saturate=saturate and source.max >= target.max)
    if target.bits == 4:
        return _four_bits(x, source, target, saturate=saturate)
    if target is PRED:
        return (x.to(F32) if source.is_float else x) != 0
    if target.is_float:
        once = source.is_float or source.bits <= 16 or target is F32
        return narrowed((x if once else _sticky(x)).to(F32), target, saturate=saturate and source.max >= target.max)
    if source.is_float:
        return x.builder.truncated(x.to(F32), target)
    return (_clamped(x, source, target) if saturate else x).to(target)


def narrowed(x: Value, target: DType, *, saturate: bool = False) -> Value:
    """f32 as a float of fewer bits, to nearest, ties to even; NaN stays one. What is too large becomes the largest value if
    `saturate`, else infinity or, where the type has none, NaN."""
    native = target.name in x.builder.fp8
    if saturate and not native:
        x = x.at_most(float(target.max)).at_least(float(target.min))
    if target not in FP8:
        return x.to(target)
    if native:
        return x.to(target).bits(U8) if saturate else _encoded_beyond(x, target)
    return _encoded(x, target)


def _encoded_beyond(x: Value, dtype: DType) -> Value:
    """f32 as fp8 by an instruction that saturates, where what is too large is to become `Format.overflow`."""
    if dtype is F8E4M3FN:
        return x.builder.select(x.abs() > 464.0, NAN, x).to(dtype).bits(U8)
    code = x.to(dtype).bits(U8).to(S32)
    return x.builder.select(x.abs() >= 61440.0, (code & 128) | FORMATS[dtype].overflow, code).to(U8)


def _encoded(x: Value, dtype: DType) -> Value:
    """f32 as fp8: an integer addition rounds the bits of normal numbers, adding a power of two those of denormal ones."""
    b, (fraction, bias, overflow) = x.builder, FORMATS[dtype]
    cut = 23 - fraction
    bits = x.bits(U32)
    size = bits & 0x7FFFFFFF
    normal = ((size + ((1 << cut - 1) - 1) + ((size >> cut) & 1)) >> cut) - (127 - bias << fraction)
    power = 2.0 ** (24 - bias - fraction)  # its last place is the smallest denormal
    denormal = (size.bits(F32) + power).bits(U32) - (127 + 24 - bias - fraction << 23)
    code = b.select(size < (128 - bias << 23), denormal, normal).min(overflow)
    if dtype is F8E5M2:
        code = b.select(x == x, code, 127)
    sign = (bits >> 24) & 128
    if dtype in FNUZ:  # zero has no sign: its code with one is NaN
        sign = b.select(code != 0, sign, 0)
    return (code | sign).to(U8)


def _decoded(code: Value, dtype: DType) -> Value:
    """fp8 as f32: the bits are those of an f16 but for the exponent's bias (OCP OFP8)."""
    b, dtype = code.builder, F8E4M3FN if dtype is F4E2M1FN else dtype
    if dtype.name in b.fp8:
        return code.bits(dtype).to(F32)
    if dtype is F8E5M2:
        return (code.to(U16) << 8).bits(F16).to(F32)
    if dtype is F8E5M2FNUZ:  # whose largest values f16 has not
        wide = code.to(S32)
        value = (((wide & 127) << 21) | ((wide & 128) << 24)).bits(F32) * 2.0 ** (127 - 16)
    else:
        sign_twice = code.bits(S8).to(S16) << 7
        value = (sign_twice & ~0x4000).bits(F16).to(F32) * 2.0 ** (15 - FORMATS[dtype].bias)
    return b.select(code == 128 if dtype in FNUZ else (code & 127) == 127, NAN, value)


def _four_bits(x: Value, source: DType, target: DType, *, saturate: bool) -> Value:
    """A 4-bit code in a byte of its own."""
    byte = in_register(target)
    if source.is_float:
        return _clamped(convert(x, source, byte), byte, target)
    if saturate:
        return convert(_clamped(x, source, target), source, byte)
    code = convert(x, source, byte)
    return code & 15 if target is U4 else (code << 4) >> 4


def _clamped(x: Value, source: DType, target: DType) -> Value:
    """Integers held to the range of another type, in their own."""
    low, high = max(int(source.min), int(target.min)), min(int(source.max), int(target.max))
    x = x.max(low) if low > source.min else x
    return x.min(high) if high < source.max else x


def _sticky(x: Value) -> Value:
    """A 32-bit integer that f32 holds, and whose f32 rounds to a narrower float as the integer itself: bits past those that
    f16 looks at are put together in one (rounding to odd; Boldo and Melquiond 2008)."""
    odd = (x | ((x & 255) + 255)) & ~255
    held = (x + (1 << 24)).bits(U32) < (1 << 25) if x.dtype is S32 else x < (1 << 24)
    return x.builder.select(held, x, odd)


def rounded_to_bf16(x: Value) -> Value:
    """The bits of f32 rounded to bf16, for targets without an instruction for it; NaN stays one."""
    bits = x.bits(U32)
    near = bits + 32767 + ((bits >> 16) & 1)
    return (x.builder.select(x == x, near, bits | 0x400000) >> 16).to(U16)


def quantize(n: Node, x: Value, scale: Value, zero: Value | None = None, *, repeats: bool = True) -> Value:
    """`Quantize`'s meaning: hold the quotient in f32 to the codes' range, seen from the zero point, and round it half to even;
    NaN gives 0. To a float the quotient is converted.

    Args:
        n: the node.
        x, scale, zero: its sources' values.
        repeats: the scale varies along one axis at most.
    """
    assert isinstance(n.op, Quantize)
    b, target = x.builder, n.dtype
    x, scale = (convert(v, s.dtype, F32) for v, s in zip((x, scale), n.src, strict=False))
    if target.is_float:
        quotient = b.quotient(x, scale, target, repeats=repeats)
        return narrowed(quotient, target, saturate=n.op.overflow == "saturate")
    parts = _parts(n, scale)
    low, high, nothing = _bounds(zero, target, scale if parts else None, b)
    x = x if parts else b.quotient(x, scale, target, repeats=repeats)
    held = x.max(low).min(high)
    becomes_zero = b.drops_nan and not target.is_signed  # a NaN: the least code
    if not becomes_zero and not (b.is_number(scale) and _is_number(n.src[0])):
        held = b.select(x == x, held, nothing)
    if parts:
        held = b.fma(held, parts[0], b.fma(held, parts[1], held * parts[2]))
    value, whole = b.nearest(held)
    code = (whole if zero is None else whole + _point(zero, target, S32)).to(in_register(target))
    b.codes[code.name] = value, zero
    return code


def _parts(n: Node, scale: Value) -> tuple[Value, ...]:
    """The parts of a scale's reciprocal, if it is to be multiplied by: see `steps`."""
    b, constant = scale.builder, scale_of(n)
    if not b.multiplies or constant is None or not isinstance(constant.op, Const):
        return b.known.get(("parts", scale.name), ())
    number = constant.op.data.tensor()
    if not usable((number,)):
        return ()
    return tuple(b.derived(("part", i), part, scale) for i, part in enumerate(parts_of(float(number))))


def _bounds(zero: Value | None, target: DType, scale: Value | None, b: Builder) -> tuple[Operand, ...]:
    """The least and the largest code of a type and the code 0, seen from a zero point; or what they are of a scale, the first
    two `PAST` further out."""
    key, past = ("bounds", target, _name(zero), _name(scale)), 0.0 if scale is None else PAST
    found: Sequence[Operand] = [float(target.min - past), float(target.max + past), 0.0]
    if key in b.known:
        return b.known[key]
    if zero is not None:
        point = _point(zero, target, F32)
        found = [bound - point for bound in found]
    return tuple(found if scale is None else [scale * bound for bound in found])


def _name(x: Value | None) -> str | None:
    return None if x is None else x.name


def _point(zero: Value, source: DType, target: DType) -> Value:
    """A zero point in f32 or s32."""
    key, known = ("point", zero.name, target), zero.builder.known
    return known[key] if key in known else convert(zero, source, target)


def prepare(n: Node, values: Mapping[Node, Value], *, multiplied: bool = False) -> None:
    """Work out what quantising takes of a scale and a zero point that are among `values`, once for all columns and rows.

    `multiplied`: the scale is known to be `steps.usable`.
    """
    if not isinstance(n.op, (Quantize, Dequantize)) or not all(s in values for s in n.src[1:]):
        return
    codes, scale = n.dtype if isinstance(n.op, Quantize) else n.src[0].dtype, values[n.src[1]]
    if codes.is_float:
        return
    b, zero = scale.builder, values[n.src[2]] if len(n.src) == 3 else None
    if zero is not None:
        b.known.update({("point", zero.name, d): _point(zero, codes, d) for d in (F32, S32)})
    if isinstance(n.op, Dequantize):
        return
    scale = convert(scale, n.src[1].dtype, F32)
    if multiplied and ("parts", scale.name) not in b.known:
        parts, rest, back = list[Value](), b.constant(1.0, F32), -scale
        for _ in range(PARTS):
            parts.append(rest / scale)
            rest = b.fma(parts[-1], back, rest)  # exact, as the rest of a division is
        b.known["parts", scale.name] = tuple(parts)
    by = scale if _parts(n, scale) else None
    bounds = _bounds(zero, n.dtype, by, b)
    b.known["bounds", n.dtype, _name(zero), _name(by)] = bounds


def dequantize(n: Node, x: Value, scale: Value, zero: Value | None = None) -> Value:
    """`Dequantize`'s meaning. A code that was quantised here needs no way back. The difference from a zero point is exact, in
    s32 or in f32; a float has no zero point."""
    b, source = x.builder, n.src[0].dtype
    zero = zero if source.is_integer else None
    value, point = b.codes.get(x.name) or (convert(x, source, F32 if zero is None else S32), None)
    if _name(zero) != _name(point):
        value = value if point is None else value + _point(point, source, value.dtype)
        value = value if zero is None else value - _point(zero, source, value.dtype)
    return convert(value.to(F32) * convert(scale, n.src[1].dtype, F32), F32, n.dtype)


def _is_number(n: Node) -> bool:
    """Tell whether a float is no NaN: an integer, times constants. The compiler would know it of literals."""
    if isinstance(n.op, Convert):
        return n.src[0].dtype.is_integer or (n.dtype is F32 and _is_number(n.src[0]))
    if isinstance(n.op, Map) and n.op.fn == "multiply" and n.dtype is F32:
        return any(_is_moderate(a) and _is_number(b) for a, b in (n.src, n.src[::-1]))
    return isinstance(n.op, VIEWS) and _is_number(n.src[0])


def _is_moderate(n: Node) -> bool:
    """A constant, several of which multiply an integer and leave it finite."""
    return isinstance(n.op, Const) and n.tensor.elements == 1 and abs(n.op.data.tensor().item()) < 2.0**24
