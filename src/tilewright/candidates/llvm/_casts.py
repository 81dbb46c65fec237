"""Values in registers and what turns one type into another: conversions, quantisation, fp8 codes."""

from __future__ import annotations

import torch

from tilewright.candidates.llvm._access import Unsupported
from tilewright.candidates.llvm._math import Math
from tilewright.candidates.llvm._text import Function, f32, suffix, vec
from tilewright.dtype import BF16, F8E4M3FN, F8E4M3FNUZ, F8E5M2, F16, F32, PRED, DType
from tilewright.ir.graph import Node
from tilewright.ir.ops import Const

FLOATS = {"f32": "float", "bf16": "bfloat", "f16": "half"}
FP8 = (F8E4M3FN, F8E4M3FNUZ, F8E5M2)


def element(dtype: DType) -> str:
    """The LLVM type of a value in a register; pred is i1 there and a byte in memory.

    Raises:
        Unsupported: f64 and 64-bit integers are not made for it.
    """
    if dtype.is_float:
        if dtype in FP8:
            return "i8"
        if dtype.name not in FLOATS:
            raise Unsupported(f"{dtype} has no vectors here")
        return FLOATS[dtype.name]
    if dtype is PRED:
        return "i1"
    if dtype.bits > 32:
        raise Unsupported(f"{dtype} has no vectors here")
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
        bits = int(n.op.data.tensor().reshape(1).view(dtype=torch.int16).item()) & 0xFFFF
        return f"splat ({name} 0x{'R' if n.dtype is BF16 else 'H'}{bits:04X})"
    return f"splat ({name} {str(bool(value)).lower() if n.dtype is PRED else int(value)})"


class Casts:
    """Type changes on vectors of `lanes`, emitted into one function."""

    def __init__(self, f: Function, lanes: int):
        self.f, self.lanes = f, lanes
        self.math = Math(f, lanes)

    def convert(self, value: str, source: DType, target: DType, *, saturate: bool = False) -> str:
        """`Convert`'s meaning on a vector."""
        f = self.f
        if source is target:
            return value
        from_, to = vec(self.lanes, element(source)), vec(self.lanes, element(target))
        if source in FP8:
            return self.convert(self._decode(value, source), F16, target) if target is not F16 else self._decode(value, source)
        if target is PRED:
            return f.v(
                f"fcmp une {from_} {value}, zeroinitializer" if source.is_float else f"icmp ne {from_} {value}, zeroinitializer"
            )
        if source.is_float and target.is_float:
            if target is F32:
                return f.v(f"fpext {from_} {value} to {to}")
            if source is not F32:
                return self.convert(self.convert(value, source, F32), F32, target, saturate=saturate)
            if saturate and target.max < source.max:
                top = self.math.const(float(target.max))
                value = self.math.at_least(self.math.at_most(value, top), self.math.const(-float(target.max)))
            return f.v(f"fptrunc {from_} {value} to {to}")
        if target.is_float:
            if source.bits > 16 and target is not F32:  # once, not twice: through f64
                f64 = vec(self.lanes, "double")
                wide = f.v(f"{'sitofp' if source.kind == 'int' else 'uitofp'} {from_} {value} to {f64}")
                return f.v(f"fptrunc {f64} {wide} to {to}")
            single = vec(self.lanes, "float")
            value = f.v(f"{'sitofp' if source.kind == 'int' else 'uitofp'} {from_} {value} to {single}")
            return value if target is F32 else f.v(f"fptrunc {single} {value} to {to}")
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

    def _decode(self, code: str, dtype: DType) -> str:
        """fp8 as f16, which holds every value: the bits are those of an f16 but for the exponent's bias (OCP OFP8)."""
        f, i8, i16, half = self.f, vec(self.lanes, "i8"), vec(self.lanes, "i16"), vec(self.lanes, "half")
        wide = f.v(f"zext {i8} {code} to {i16}")
        if dtype is F8E5M2:
            return f.v(f"bitcast {i16} {f.v(f'shl {i16} {wide}, splat (i16 8)')} to {half}")
        magnitude = f.v(f"shl {i16} {f.v(f'and {i16} {wide}, splat (i16 127)')}, splat (i16 7)")
        sign = f.v(f"shl {i16} {f.v(f'and {i16} {wide}, splat (i16 128)')}, splat (i16 8)")
        small = f.v(f"bitcast {i16} {f.v(f'or {i16} {magnitude}, {sign}')} to {half}")
        scaled = f.v(f"fmul {half} {small}, splat (half {float(256 if dtype is F8E4M3FN else 128):.1f})")
        nan, bits = ("127", f.v(f"and {i8} {code}, splat (i8 127)")) if dtype is F8E4M3FN else ("-128", code)
        is_nan = f.v(f"icmp eq {i8} {bits}, splat (i8 {nan})")
        return f.v(f"select {vec(self.lanes, 'i1')} {is_nan}, {half} splat (half 0xH7E00), {half} {scaled}")

    def quantize(self, n: Node, args: list[str]) -> str:
        """Round half to even in f32, then the zero point, both exact below 2^18, beyond which any 8-bit result is an end."""
        f, m, target = self.f, self.math, n.dtype
        i32, single = vec(self.lanes, "i32"), vec(self.lanes, "float")
        x, scale = (self.convert(a, s.dtype, F32) for a, s in zip(args[:2], n.src[:2], strict=True))
        rounded = m.call("rint", m.op("fdiv", x, scale))
        held = m.at_least(m.at_most(rounded, m.const(2.0**18)), m.const(-(2.0**18)))
        code = f.intrinsic(f"llvm.fptosi.sat.{suffix(i32)}.{suffix(single)}", i32, (single, held))
        if len(args) == 3:
            grow = "sext" if target.kind == "int" else "zext"
            zero = f.v(f"{grow} {vec(self.lanes, element(target))} {args[2]} to {i32}")
            code = f.v(f"add {i32} {code}, {zero}")
        for name, bound in (("smax", int(target.min)), ("smin", int(target.max))):
            code = f.intrinsic(f"llvm.{name}.{suffix(i32)}", i32, (i32, code), (i32, f"splat (i32 {bound})"))
        known = m.compare("ord", rounded, rounded)  # NaN gives 0, whatever the zero point
        code = f.v(f"select {vec(self.lanes, 'i1')} {known}, {i32} {code}, {i32} zeroinitializer")
        return f.v(f"trunc {i32} {code} to {vec(self.lanes, element(target))}")

    def dequantize(self, n: Node, args: list[str]) -> str:
        f, source, i32 = self.f, n.src[0].dtype, vec(self.lanes, "i32")
        grow = "sext" if source.kind == "int" else "zext"
        wide = [f.v(f"{grow} {vec(self.lanes, element(source))} {a} to {i32}") for a in (args[0], *args[2:])]
        code = wide[0] if len(wide) == 1 else f.v(f"sub {i32} {wide[0]}, {wide[1]}")
        value = f.v(f"sitofp {i32} {code} to {vec(self.lanes, 'float')}")
        scaled = self.math.op("fmul", value, self.convert(args[1], n.src[1].dtype, F32))
        return self.convert(scaled, F32, n.dtype)
