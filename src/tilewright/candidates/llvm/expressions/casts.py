"""Values in registers and what turns one type into another: conversions, quantisation, fp8 codes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilewright.candidates.llvm.expressions.math import Math
from tilewright.candidates.llvm.expressions.steps import PARTS, PAST, parts_of, scale_of, usable
from tilewright.candidates.llvm.expressions.text import Function, f32, suffix, vec
from tilewright.dtype import BF16, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F16, F32, PRED, S4, S8, U4, U8, DType
from tilewright.ir.graph import Node
from tilewright.ir.ops import Const, Dequantize, Quantize
from tilewright.lowering.access import Unsupported

# 16-bit floats are the integers of their bits until they are converted: instruction selection has no masked memory for bfloat,
# and no conversions where the processor lacks the type.
ROUNDING = 1.5 * 2**23  # floats from 2^23 to 2^24 are the integers
CONVERTED = 16  # floats that an instruction of AVX-512 BF16 rounds
FLOATS = {"f32": "float", "bf16": "i16", "f16": "i16"}
FP8 = (F8E4M3FN, F8E4M3FNUZ, F8E5M2)


def element(dtype: DType) -> str:
    """The LLVM type of a value in a register; pred is i1 there and a byte in memory.

    Raises:
        Unsupported: f64 is not made for it.
    """
    if dtype.is_float:
        if dtype in FP8:
            return "i8"
        if dtype.name not in FLOATS:
            raise Unsupported(f"{dtype} has no vectors here")
        return FLOATS[dtype.name]
    if dtype is PRED:
        return "i1"
    return f"i{max(dtype.bits, 8)}"


def in_memory(dtype: DType) -> str:
    return "i8" if dtype is PRED else element(dtype)


def size_bytes(dtype: DType) -> int:
    """Of one element as torch keeps it: 4-bit codes and pred take a byte."""
    return max(dtype.bits, 8) // 8


def constant(n: Node) -> str:
    """A one-element constant as a vector of it."""
    assert isinstance(n.op, Const)
    value = n.op.data.tensor().reshape(()).item()
    name = element(n.dtype)
    if n.dtype in FP8:
        return f"splat (i8 {int(n.op.data.tensor().reshape(1).view(dtype=torch.uint8).item())})"
    if n.dtype is F32:
        return f"splat (float {f32(float(value))})"
    if n.dtype is BF16 or n.dtype is F16:
        return f"splat (i16 {int(n.op.data.tensor().reshape(1).view(dtype=torch.int16).item())})"
    return f"splat ({name} {str(bool(value)).lower() if n.dtype is PRED else int(value)})"


class Casts:
    """Type changes on vectors of `lanes`, emitted into one function."""

    def __init__(self, f: Function, lanes: int):
        self.f, self.lanes = f, lanes
        self.math = Math(f, lanes)
        self._codes: dict[str, tuple[str, str | None]] = {}  # quantised values as floats from their zero point on, and that

    def convert(self, value: str, source: DType, target: DType, *, saturate: bool = False) -> str:
        """`Convert`'s meaning on a vector."""
        f = self.f
        if source is target:
            return value
        from_, to = vec(self.lanes, element(source)), vec(self.lanes, element(target))
        if source in FP8:
            return self.convert(self._decode(value, source), F32, target, saturate=saturate and source.max >= target.max)
        if target.bits == 4:
            return self._four_bits(value, source, target, saturate=saturate)
        if target is PRED:
            wide = self.convert(value, source, F32) if source.is_float else value
            zero = f"{vec(self.lanes, 'float') if source.is_float else from_} {wide}, zeroinitializer"
            return f.v(f"fcmp une {zero}" if source.is_float else f"icmp ne {zero}")
        if source.is_float and target.is_float:
            if target is F32:
                return self._widened(value, source)
            if source is not F32:
                value = self._widened(value, source)
            return self._narrowed(self._held(value, target) if saturate and target.max < source.max else value, target)
        if target.is_float:
            held = saturate and target.max <= source.max
            if source.bits > 16 and target is not F32:  # once, not twice: through f64
                f64 = vec(self.lanes, "double")
                wide = f.v(f"{'sitofp' if source.kind == 'int' else 'uitofp'} {from_} {value} to {f64}")
                wide = self._odd(wide)
                return self._narrowed(self._held(wide, target) if held else wide, target)
            single = vec(self.lanes, "float")
            value = f.v(f"{'sitofp' if source.kind == 'int' else 'uitofp'} {from_} {value} to {single}")
            return value if target is F32 else self._narrowed(self._held(value, target) if held else value, target)
        if source.is_float:
            value = self.convert(value, source, F32)
            single = vec(self.lanes, "float")
            how = "fptosi" if target.kind == "int" else "fptoui"
            return f.intrinsic(f"llvm.{how}.sat.{suffix(to)}.{suffix(single)}", to, (single, value))
        if saturate:
            value = self._clamped(value, source, target)
        if element(source) == element(target):
            return value
        bits = {"i1": 1}.get(element(source), source.bits)
        grow = "sext" if source.kind == "int" else "zext"
        return f.v(f"{'trunc' if bits > target.bits else grow} {from_} {value} to {to}")

    def _four_bits(self, value: str, source: DType, target: DType, *, saturate: bool) -> str:
        """A 4-bit code in a byte of its own."""
        byte = S8 if target is S4 else U8
        t = vec(self.lanes, "i8")
        if source.is_float:
            return self._clamped(self.convert(value, source, byte), byte, target)
        if saturate:
            return self.convert(self._clamped(value, source, target), source, byte)
        code = self.convert(value, source, byte)
        if target is U4:
            return self.f.v(f"and {t} {code}, splat (i8 15)")
        return self.f.v(f"ashr {t} {self.f.v(f'shl {t} {code}, splat (i8 4)')}, splat (i8 4)")

    def _held(self, value: str, target: DType) -> str:
        """f32 held to the finite range of another float; NaN stays."""
        top = float(target.max)
        return self.math.at_least(self.math.at_most(value, self.math.const(top)), self.math.const(-top))

    def _clamped(self, value: str, source: DType, target: DType) -> str:
        """Integers held to the range of another type, in their own."""
        t, kind = vec(self.lanes, element(source)), "s" if source.kind == "int" else "u"
        low, high = max(int(source.min), int(target.min)), min(int(source.max), int(target.max))
        for name, bound, needed in (("max", low, low > source.min), ("min", high, high < source.max)):
            if needed:
                value = self.f.intrinsic(
                    f"llvm.{kind}{name}.{suffix(t)}", t, (t, value), (t, f"splat ({element(source)} {bound})")
                )
        return value

    def _widened(self, bits: str, source: DType) -> str:
        """bf16 or f16 as f32."""
        f, i16, i32, single = self.f, vec(self.lanes, "i16"), vec(self.lanes, "i32"), vec(self.lanes, "float")
        if source is BF16:
            high = f.v(f"shl {i32} {f.v(f'zext {i16} {bits} to {i32}')}, splat (i32 16)")
            return f.v(f"bitcast {i32} {high} to {single}")
        half = vec(self.lanes, "half")
        return f.v(f"fpext {half} {f.v(f'bitcast {i16} {bits} to {half}')} to {single}")

    def _narrowed(self, value: str, target: DType) -> str:
        """f32 as a narrower float, to the nearest, ties to even; NaN stays one, what is too large becomes infinity or NaN."""
        if target in FP8:
            return self._encode(value, target)
        f, i16, i32, single = self.f, vec(self.lanes, "i16"), vec(self.lanes, "i32"), vec(self.lanes, "float")
        if target is F16:
            half = vec(self.lanes, "half")
            return f.v(f"bitcast {half} {f.v(f'fptrunc {single} {value} to {half}')} to {i16}")
        if f.module.rounds_bf16 and self.lanes in (CONVERTED, 2 * CONVERTED, 4 * CONVERTED):
            return self._by_instruction(value)
        bits = f.v(f"bitcast {single} {value} to {i32}")
        odd = f.v(f"and {i32} {f.v(f'lshr {i32} {bits}, splat (i32 16)')}, splat (i32 1)")
        near = f.v(f"add {i32} {f.v(f'add {i32} {bits}, splat (i32 32767)')}, {odd}")
        quiet = f.v(f"or {i32} {bits}, splat (i32 4194304)")
        known = self.math.compare("ord", value, value)
        kept = f.v(f"select {vec(self.lanes, 'i1')} {known}, {i32} {near}, {i32} {quiet}")
        return f.v(f"trunc {i32} {f.v(f'lshr {i32} {kept}, splat (i32 16)')} to {i16}")

    def cut(self, value: str) -> str:
        """f32 as bf16 where that has the value: without what rounding takes."""
        i16, i32 = vec(self.lanes, "i16"), vec(self.lanes, "i32")
        bits = self.f.v(f"bitcast {vec(self.lanes, 'float')} {value} to {i32}")
        return self.f.v(f"trunc {i32} {self.f.v(f'lshr {i32} {bits}, splat (i32 16)')} to {i16}")

    def _by_instruction(self, value: str) -> str:
        """f32 rounded to bf16, 16 of them or 32 at a time."""
        f, single = self.f, vec(self.lanes, "float")
        count = min(self.lanes, 2 * CONVERTED)
        parts: list[str] = []
        for first in range(0, self.lanes, CONVERTED):
            whole = self.lanes == CONVERTED
            parts.append(value if whole else f.shuffle(single, value, value, range(first, first + CONVERTED)))
        name = f"llvm.x86.avx512bf16.cvtne{'2' if count > CONVERTED else ''}ps2bf16.512"
        bf16, type_ = vec(count, "bfloat"), vec(CONVERTED, "float")
        step = count // CONVERTED
        rounded = [
            f.intrinsic(name, bf16, *((type_, x) for x in reversed(parts[i : i + step]))) for i in range(0, len(parts), step)
        ]
        joined = rounded[0] if len(rounded) == 1 else f.shuffle(bf16, rounded[0], rounded[1], range(self.lanes))
        return f.v(f"bitcast {vec(self.lanes, 'bfloat')} {joined} to {vec(self.lanes, 'i16')}")

    def _odd(self, wide: str) -> str:
        """f64 as f32 rounded to odd, so that rounding it again rounds once (Boldo and Melquiond 2008)."""
        f, i32, i1 = self.f, vec(self.lanes, "i32"), vec(self.lanes, "i1")
        f64, single = vec(self.lanes, "double"), vec(self.lanes, "float")
        near = f.v(f"fptrunc {f64} {wide} to {single}")
        back = f.v(f"fpext {single} {near} to {f64}")
        bits = f.v(f"bitcast {single} {near} to {i32}")
        sizes = [f.intrinsic(f"llvm.fabs.v{self.lanes}f64", f64, (f64, x)) for x in (back, wide)]
        over = f.v(f"zext {i1} {f.v(f'fcmp ogt {f64} {sizes[0]}, {sizes[1]}')} to {i32}")
        inexact = f.v(f"zext {i1} {f.v(f'fcmp une {f64} {back}, {wide}')} to {i32}")
        odd = f.v(f"or {i32} {f.v(f'sub {i32} {bits}, {over}')}, {inexact}")
        return f.v(f"bitcast {i32} {odd} to {single}")

    def _encode(self, value: str, dtype: DType) -> str:
        """f32 as fp8: an integer addition rounds the bits of normal numbers, adding a power of two those of denormal ones."""
        f, m, i1, i8, i32 = self.f, self.math, vec(self.lanes, "i1"), vec(self.lanes, "i8"), vec(self.lanes, "i32")
        kept = 2 if dtype is F8E5M2 else 3  # bits of the fraction
        bias = {F8E5M2: 15, F8E4M3FN: 7, F8E4M3FNUZ: 8}[dtype]
        cut = 23 - kept
        bits = f.v(f"bitcast {m.type} {value} to {i32}")
        size = f.v(f"and {i32} {bits}, splat (i32 2147483647)")
        odd = f.v(f"and {i32} {f.v(f'lshr {i32} {size}, splat (i32 {cut})')}, splat (i32 1)")
        rounded = f.v(f"add {i32} {f.v(f'add {i32} {size}, splat (i32 {(1 << cut - 1) - 1})')}, {odd}")
        normal = f.v(f"sub {i32} {f.v(f'lshr {i32} {rounded}, splat (i32 {cut})')}, splat (i32 {127 - bias << kept})")
        power = 2.0 ** (24 - bias - kept)  # its last place is the smallest denormal
        sum_ = m.op("fadd", f.v(f"bitcast {i32} {size} to {m.type}"), m.const(power))
        denormal = f.v(f"sub {i32} {f.v(f'bitcast {m.type} {sum_} to {i32}')}, splat (i32 {127 + 24 - bias - kept << 23})")
        small = f.v(f"icmp ult {i32} {size}, splat (i32 {128 - bias << 23})")
        code = f.v(f"select {i1} {small}, {i32} {denormal}, {i32} {normal}")
        above = {F8E5M2: 0x7C, F8E4M3FN: 0x7F, F8E4M3FNUZ: 0x80}[dtype]  # infinity, or NaN
        code = f.intrinsic(f"llvm.umin.{suffix(i32)}", i32, (i32, code), (i32, f"splat (i32 {above})"))
        if dtype is F8E5M2:
            code = f.v(f"select {i1} {m.compare('uno', value, value)}, {i32} splat (i32 127), {i32} {code}")
        sign = f.v(f"and {i32} {f.v(f'lshr {i32} {bits}, splat (i32 24)')}, splat (i32 128)")
        if dtype is F8E4M3FNUZ:  # zero has no sign: its code with one is NaN
            some = f.v(f"icmp ne {i32} {code}, zeroinitializer")
            sign = f.v(f"select {i1} {some}, {i32} {sign}, {i32} zeroinitializer")
        return f.v(f"trunc {i32} {f.v(f'or {i32} {code}, {sign}')} to {i8}")

    def _decode(self, code: str, dtype: DType) -> str:
        """fp8 as f32: the bits are those of an f16 but for the exponent's bias (OCP OFP8)."""
        f, i1, i8, i16 = self.f, vec(self.lanes, "i1"), vec(self.lanes, "i8"), vec(self.lanes, "i16")
        wide = f.v(f"zext {i8} {code} to {i16}")
        if dtype is F8E5M2:
            return self._widened(f.v(f"shl {i16} {wide}, splat (i16 8)"), F16)
        magnitude = f.v(f"shl {i16} {f.v(f'and {i16} {wide}, splat (i16 127)')}, splat (i16 7)")
        sign = f.v(f"shl {i16} {f.v(f'and {i16} {wide}, splat (i16 128)')}, splat (i16 8)")
        small = self._widened(f.v(f"or {i16} {magnitude}, {sign}"), F16)
        scaled = self.math.op("fmul", small, self.math.const(256.0 if dtype is F8E4M3FN else 128.0))
        nan, bits = ("127", f.v(f"and {i8} {code}, splat (i8 127)")) if dtype is F8E4M3FN else ("-128", code)
        is_nan = f.v(f"icmp eq {i8} {bits}, splat (i8 {nan})")
        t = vec(self.lanes, "float")
        return f.v(f"select {i1} {is_nan}, {t} splat (float 0x7FF8000000000000), {t} {scaled}")

    def quantize(self, n: Node, args: list[str]) -> str:
        """Hold the quotient to the codes' range, seen from the zero point, and round it half to even; NaN gives 0.

        Adding `ROUNDING` rounds to an integer, which then stands in the low bits. To a float the quotient is converted.
        """
        assert isinstance(n.op, Quantize)
        f, m, target = self.f, self.math, n.dtype
        x, scale = (self.convert(a, s.dtype, F32) for a, s in zip(args[:2], n.src[:2], strict=True))
        if target.is_float:
            quotient = m.op("fdiv", x, scale)
            return self.convert(self._held(quotient, target) if n.op.overflow == "saturate" else quotient, F32, target)
        zero = args[2] if len(args) == 3 else None
        parts = self._parts(n, scale)
        low, high, nothing = self._bounds(zero, target, scale if parts else None)
        x = x if parts else m.op("fdiv", x, scale)
        held = m.at_most(m.select(m.compare("ogt", x, low), x, low), high)
        if target.min < 0:  # else the least code is 0, which NaN has become
            held = m.select(m.compare("ord", x, x), held, nothing)
        if parts:
            held = m.fma(held, parts[0], m.fma(held, parts[1], m.op("fmul", held, parts[2])))
        i32 = vec(self.lanes, "i32")
        rounded = m.op("fadd", held, m.const(ROUNDING))
        whole = f.v(f"bitcast {m.type} {rounded} to {i32}")
        if zero is not None:
            whole = f.v(f"add {i32} {whole}, {self._whole(zero, target)}")
        result = f.v(f"trunc {i32} {whole} to {vec(self.lanes, element(target))}")
        self._codes[result] = (m.op("fsub", rounded, m.const(ROUNDING)), zero)
        return result

    def _parts(self, n: Node, scale: str) -> tuple[str, ...]:
        """The parts of a scale's reciprocal, if it is to be multiplied by: see `steps`."""
        constant = scale_of(n)
        if constant is None or not isinstance(constant.op, Const):
            return self.f.known.get(("parts", scale), ())
        value = constant.op.data.tensor()
        return tuple(self.math.const(part) for part in parts_of(float(value))) if usable((value,)) else ()

    def _bounds(self, zero: str | None, target: DType, scale: str | None) -> tuple[str, ...]:
        """The least and the largest code of a type and the code 0, seen from a zero point; or what they are of a scale, the
        first two `PAST` further out."""
        m, past = self.math, 0.0 if scale is None else PAST
        found = self.f.known.get((target.name, str(zero), str(scale)))
        if found is None:
            found = tuple(m.const(float(bound)) for bound in (target.min - past, target.max + past, 0))
            if zero is not None:
                found = tuple(m.op("fsub", bound, self._single(zero, target)) for bound in found)
            if scale is not None:
                found = tuple(m.op("fmul", bound, scale) for bound in found)
        return found

    def _single(self, zero: str, dtype: DType) -> str:
        """A zero point in f32."""
        return self.f.known.get(("single", zero), ("",))[0] or self.convert(zero, dtype, F32)

    def _whole(self, zero: str, dtype: DType) -> str:
        """A zero point in 32 bits."""
        grow, from_ = "sext" if dtype.kind == "int" else "zext", vec(self.lanes, element(dtype))
        made = self.f.known.get(("whole", zero), ("",))[0]
        return made or self.f.v(f"{grow} {from_} {zero} to {vec(self.lanes, 'i32')}")

    def prepare(self, n: Node, values: Mapping[Node, str], *, multiplied: bool = False) -> None:
        """Work out what quantising takes of a scale and a zero point that are among `values`, once for all columns and rows.

        `multiplied`: the scale is known to be `steps.usable`.
        """
        f, m = self.f, self.math
        if not isinstance(n.op, (Quantize, Dequantize)) or not all(s in values for s in n.src[1:]):
            return
        codes = n.dtype if isinstance(n.op, Quantize) else n.src[0].dtype
        if codes.is_float:
            return
        zero = values[n.src[2]] if len(n.src) == 3 else None
        if zero is not None:
            f.known["single", zero] = (self._single(zero, codes),)
            f.known["whole", zero] = (self._whole(zero, codes),)
        if isinstance(n.op, Dequantize):
            return
        scale = self.convert(values[n.src[1]], n.src[1].dtype, F32)
        if multiplied and ("parts", scale) not in f.known:
            parts, rest, back = list[str](), m.const(1.0), m.negated(scale)
            for _ in range(PARTS):
                parts.append(m.op("fdiv", rest, scale))
                rest = m.fma(parts[-1], back, rest)  # exact, as the rest of a division is
            f.known["parts", scale] = tuple(parts)
        by = scale if self._parts(n, scale) else None
        f.known[n.dtype.name, str(zero), str(by)] = self._bounds(zero, n.dtype, by)

    def dequantize(self, n: Node, args: list[str]) -> str:
        """A code that was quantised here needs no way back from an integer; floats have no zero point."""
        source = n.src[0].dtype
        zero = args[2] if len(args) == 3 and source.is_integer else None
        value, counted_from = self._codes.get(args[0]) or (self.convert(args[0], source, F32), None)
        if zero != counted_from:
            for how, other in (("fadd", counted_from), ("fsub", zero)):
                if other is not None:  # exact: at most 17 bits
                    value = self.math.op(how, value, self._single(other, source))
        scaled = self.math.op("fmul", value, self.convert(args[1], n.src[1].dtype, F32))
        return self.convert(scaled, F32, n.dtype)
