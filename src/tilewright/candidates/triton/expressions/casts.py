"""What turns one type into another in a Triton kernel: conversions, quantisation, fp8 codes. Each rounds as `ir/ops` says."""

from __future__ import annotations

from tilewright.candidates.triton.expressions.text import Text
from tilewright.dtype import (
    BF16,
    F8E4M3FN,
    F8E4M3FNUZ,
    F8E5M2,
    F8E5M2FNUZ,
    F32,
    PRED,
    S4,
    S8,
    S32,
    U4,
    U8,
    U32,
    DType,
)
from tilewright.ir.graph import Node
from tilewright.ir.ops import VIEWS, Const, Convert, Map, Quantize
from tilewright.lowering.access import Unsupported

NATIVE = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
FP8 = (F8E4M3FN, F8E4M3FNUZ, F8E5M2, F8E5M2FNUZ)
FP8_NAMES = {F8E4M3FN: "float8e4nv", F8E5M2: "float8e5", F8E4M3FNUZ: "float8e4b8", F8E5M2FNUZ: "float8e5b16"}
# bits of the fraction, bias of the exponent, code of what is too large
FP8_FORMATS = {
    F8E4M3FN: (3, 7, 0x7F),
    F8E5M2: (2, 15, 0x7C),
    F8E4M3FNUZ: (3, 8, 0x80),
    F8E5M2FNUZ: (2, 16, 0x80),
}
FNUZ = (F8E4M3FNUZ, F8E5M2FNUZ)
MOST_EXACT = 2.0**23  # from here on every f32 is a whole number
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


def pointer_type(dtype: DType) -> str:
    """Of a kernel argument, as a signature spells it: "*fp16", "*i8"; fp8 is passed as the bytes of its codes."""
    name = in_memory(dtype)
    short = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    return "*" + short.get(name, name.replace("uint", "u").replace("int", "i"))


class Casts:
    """Type changes, written into a text.

    Attributes:
        fp8: the fp8 types that the hardware converts to and from (rounding once, to nearest); others are taken apart in bits.
    """

    def __init__(self, text: Text, fp8: frozenset[str] = frozenset()) -> None:
        self.text, self.fp8 = text, fp8
        self._codes: dict[str, str] = {}  # quantised values before they lost their type
        self._given: dict[str, str] = {}  # numbers in a narrow type, and the arguments that they are

    def cast(self, value: str, name: str, *, bits: bool = False) -> str:
        """Triton's own conversion to a type of its own, or the same bits as that type."""
        return self.text.v(f"{value}.to({self.text.language}.{name}{', bitcast=True' if bits else ''})")

    def narrow(self, number: str, dtype: DType) -> str:
        """An argument of the kernel in a type that f32 or 32-bit integers hold."""
        if dtype is F32:
            return number
        narrow = self.cast(number, in_registers(dtype))
        self._given[narrow] = number
        return narrow

    def _widened(self, value: str, target: DType) -> str | None:
        """A number in f32 or a 32-bit integer, if this is one in another type."""
        name = self._given.get(value)
        if name is None or target not in (F32, S32):
            return None
        number = self.text.numbers[name]
        if isinstance(number, int) == (target is S32):
            return name
        return self.text.number((name, F32), float(number)) if target is F32 else None

    def where(self, condition: str, a: str, b: str) -> str:
        return self.text.call("where", condition, a, b)

    def negative(self, x: str) -> str:
        """-x, of f32."""
        return self.text.v(f"-{x}")

    def at_most(self, x: str, bound: str) -> str:
        """min(x, bound); NaN stays."""
        return self.text.call("minimum", x, bound, "tl.PropagateNan.ALL")

    def at_least(self, x: str, bound: str) -> str:
        """max(x, bound); NaN stays."""
        return self.text.call("maximum", x, bound, "tl.PropagateNan.ALL")

    def _held(self, value: str, target: DType) -> str:
        """f32 held to the finite range of another float; NaN stays."""
        return self.at_least(self.at_most(value, repr(float(target.max))), repr(float(target.min)))

    def convert(self, value: str, source: DType, target: DType, *, saturate: bool = False) -> str:
        """`Convert`'s meaning."""
        if source is target:
            return value
        wide = self._widened(value, target)
        if wide is not None:
            return wide
        if source in FP8:
            return self.convert(self._decode(value, source), F32, target, saturate=saturate and source.max >= target.max)
        if target.bits == 4:
            return self._four_bits(value, source, target, saturate=saturate)
        if target is PRED:
            return self.text.v(f"{self.convert(value, source, F32) if source.is_float else value} != 0")
        if source.is_float:
            wide = self.cast(value, "float32") if source is not F32 else value
            if not target.is_float:
                return self._to_integer(wide, target)
            return self._narrowed(wide, target, saturate=saturate and source.max >= target.max)
        if target.is_float:
            exact = source.bits <= 16 or source is PRED or target is F32
            wide = self.cast(value, "float32") if exact else self._odd(value, source)
            return self._narrowed(wide, target, saturate=saturate and source.max >= target.max)
        if saturate and source is not PRED:
            value = self._clamped(value, source, target)
        if in_registers(source) == in_registers(target):
            return value
        return self.cast(value, in_registers(target))

    def _four_bits(self, value: str, source: DType, target: DType, *, saturate: bool) -> str:
        """A 4-bit code in a byte of its own."""
        byte = S8 if target is S4 else U8
        if source.is_float:
            return self._clamped(self.convert(value, source, byte), byte, target)
        if saturate and source is not PRED:
            return self.convert(self._clamped(value, source, target), source, byte)
        wide = self.convert(value, source, S32)
        if target is U4:
            return self.cast(self.text.v(f"{wide} & 15"), "uint8")
        return self.cast(self.text.v(f"({wide} << 28) >> 28"), "int8")

    def _clamped(self, value: str, source: DType, target: DType) -> str:
        """Integers held to the range of another type, in their own."""
        low, high = max(int(source.min), int(target.min)), min(int(source.max), int(target.max))
        if low > source.min:
            value = self.text.call("maximum", value, str(low))
        if high < source.max:
            value = self.text.call("minimum", value, str(high))
        return value

    def _odd(self, value: str, source: DType) -> str:
        """A 32-bit integer as f32 rounded to odd, so that rounding it again rounds once (Boldo and Melquiond 2008)."""
        t = self.text
        near = self.cast(value, "float32")
        whole, back = self.cast(value, "int64"), self.cast(near, "int64")
        size = t.v(f"{t.language}.abs({whole})")
        over = self.cast(t.v(f"{t.language}.abs({back}) > {size}"), "int32")
        inexact = self.cast(t.v(f"{back} != {whole}"), "int32")
        return self.cast(t.v(f"({self.cast(near, 'int32', bits=True)} - {over}) | {inexact}"), "float32", bits=True)

    def _to_integer(self, x: str, target: DType) -> str:
        """f32 toward zero, held to the range; NaN gives 0."""
        t = self.text
        x = self.where(t.v(f"{x} == {x}"), x, "0.0")
        if target.bits <= 16:
            held = t.call("minimum", t.call("maximum", x, repr(float(target.min))), repr(float(target.max)))
            return self.cast(self.cast(held, "int32"), in_registers(target))
        if target not in (S32, U32):
            raise Unsupported(f"converting a float to {target} has no Triton kernel")
        past = float(target.max) + 1.0
        fits = t.v(f"{x} < {past!r}")
        inside = self.where(fits, t.call("maximum", x, repr(float(target.min))), "0.0")
        whole = self.cast(inside, "int32" if target is S32 else "int64")
        return self.cast(self.where(fits, whole, str(int(target.max))), in_registers(target))

    def _narrowed(self, value: str, target: DType, *, saturate: bool) -> str:
        """f32 as a float of fewer bits, to the nearest, ties to even.

        What is too large becomes the largest value if `saturate`, else infinity or NaN.
        """
        if target is F32:
            return value
        if target.name in self.fp8 and saturate:
            return self.cast(self.cast(value, FP8_NAMES[target]), "uint8", bits=True)
        if saturate:
            value = self._held(value, target)
        if target in FP8:
            return self._encode(value, target)
        return self.cast(value, in_registers(target))

    def _encode(self, x: str, dtype: DType) -> str:
        """f32 as the code of an fp8 value."""
        t = self.text
        kept, bias, above = FP8_FORMATS[dtype]
        if dtype.name in self.fp8:  # the instruction holds what is too large to the largest value
            if dtype is F8E4M3FN:
                x = self.where(t.v(f"{t.language}.abs({x}) > 464.0"), "float('nan')", x)
                return self.cast(self.cast(x, FP8_NAMES[dtype]), "uint8", bits=True)
            code = self.cast(self.cast(self.cast(x, FP8_NAMES[dtype]), "uint8", bits=True), "int32")
            past = t.v(f"{t.language}.abs({x}) >= 61440.0")
            return self.cast(self.where(past, t.v(f"({code} & 128) | {above}"), code), "uint8")
        # An integer addition rounds the bits of normal numbers, adding a power of two those of denormal ones.
        cut = 23 - kept
        bits = self.cast(x, "int32", bits=True)
        size = t.v(f"{bits} & 0x7FFFFFFF")
        finite = t.call("minimum", size, "0x7F800000")
        odd = t.v(f"({finite} >> {cut}) & 1")
        normal = t.v(f"(({finite} + {(1 << cut - 1) - 1} + {odd}) >> {cut}) - {127 - bias << kept}")
        power = 2.0 ** (24 - bias - kept)  # its last place is the smallest denormal
        last = self.cast(t.v(f"{self.cast(size, 'float32', bits=True)} + {power!r}"), "int32", bits=True)
        denormal = t.v(f"{last} - {127 + 24 - bias - kept << 23}")
        code = self.where(t.v(f"{size} < {128 - bias << 23}"), denormal, normal)
        code = t.call("minimum", code, str(above))
        if dtype is F8E5M2:
            code = self.where(t.v(f"{size} > 0x7F800000"), "127", code)
        sign = t.v(f"({bits} >> 24) & 128")
        if dtype in FNUZ:  # zero has no sign: its code with one is NaN
            sign = self.where(t.v(f"{code} != 0"), sign, "0")
        return self.cast(t.v(f"{code} | {sign}"), "uint8")

    def _decode(self, code: str, dtype: DType) -> str:
        """fp8 as f32: the bits are those of an f32 but for the exponent's bias."""
        t = self.text
        if dtype.name in self.fp8:
            return self.cast(self.cast(code, FP8_NAMES[dtype], bits=True), "float32")
        kept, bias, _ = FP8_FORMATS[dtype]
        wide = self.cast(code, "int32")
        small = t.v(f"(({wide} & 127) << {23 - kept}) | (({wide} & 128) << 24)")
        value = t.v(f"{self.cast(small, 'float32', bits=True)} * {2.0 ** (127 - bias)!r}")
        if dtype is F8E5M2:
            low = t.v(f"{wide} & 127")
            value = self.where(t.v(f"{low} == 124"), t.v(f"{value} * float('inf')"), value)
            return self.where(t.v(f"{low} > 124"), "float('nan')", value)
        nan = t.v(f"({wide} & 127) == 127" if dtype is F8E4M3FN else f"{wide} == 128")
        return self.where(nan, "float('nan')", value)

    def quotient(self, x: str, divisor: str, target: DType, *, repeats: bool) -> str:
        """x / divisor in f32, rounded to nearest; what is beyond the range of `target`, or tiny to it, need not be.

        A divisor that repeats along an axis is inverted once, and the product corrected by its remainder: exact where nothing
        leaves the range of normal numbers (Markstein 1990; Muller et al., Handbook of Floating-Point Arithmetic, 2nd ed.,
        section 4.7), for which both are scaled.
        """
        t = self.text
        if not repeats or target in (F32, BF16):
            return t.call("div_rn", x, divisor)
        number = t.numbers.get(divisor)
        if number is not None and 2.0**-62 <= abs(number) <= 2.0**62:
            inverse = t.number((divisor, "inverse"), 1 / number)  # rounded to f64 first, which changes nothing (Figueroa 1995)
            return self.corrected(t.v(f"{x} * {inverse}"), x, divisor, inverse)
        size = t.v(f"{t.language}.abs({divisor})")
        factor = self.where(t.v(f"{size} > {2.0**62!r}"), repr(2.0**-64), "1.0")
        factor = self.where(t.v(f"{size} < {2.0**-62!r}"), repr(2.0**64), factor)
        x, divisor = t.v(f"{x} * {factor}"), t.v(f"{divisor} * {factor}")
        inverse = t.call("div_rn", "1.0", divisor)
        return self.corrected(t.v(f"{x} * {inverse}"), x, divisor, inverse)

    def corrected(self, near: str, x: str, divisor: str, inverse: str) -> str:
        """x / divisor, given x * inverse."""
        t = self.text
        number = t.numbers.get(divisor)
        opposite = t.v(f"-{divisor}") if number is None else t.number((divisor, "opposite"), -number)
        rest = t.call("fma", near, opposite, x)
        exact = t.call("fma", rest, inverse, near)
        return self.where(t.v(f"{exact} == {exact}"), exact, near)  # beside infinities there is no remainder

    def quantize(self, n: Node, args: list[str], *, repeats: bool) -> str:
        """Round half to even in f32 and hold the code to its range there, where all of it is exact; NaN gives 0.

        To a float the quotient is converted.

        Args:
            n: the node.
            args: its sources' values.
            repeats: the scale varies along one axis at most.
        """
        assert isinstance(n.op, Quantize)
        t, target = self.text, n.dtype
        x, scale = (self.convert(a, s.dtype, F32) for a, s in zip(args[:2], n.src[:2], strict=True))
        quotient = self.quotient(x, scale, target, repeats=repeats)
        if target.is_float:
            return self._narrowed(quotient, target, saturate=n.op.overflow == "saturate")
        low, high, nothing = repr(float(target.min)), repr(float(target.max)), "0.0"
        zero = self.convert(args[2], target, F32) if len(args) == 3 else None
        if zero is not None:
            low, high, nothing = (self._less(bound, zero) for bound in (low, high, nothing))
        # The ends are whole numbers: holding before rounding is holding after it.
        sure = scale in t.numbers and _is_number(n.src[0])
        known = quotient if sure else self.where(t.v(f"{quotient} == {quotient}"), quotient, nothing)
        held = t.call("minimum", t.call("maximum", known, low), high)
        shifted = t.v(f"{held} + {ROUND!r}")
        code = t.v(f"{self.cast(shifted, 'int32', bits=True)} - {ROUND_BITS:#x}")
        if zero is not None:
            code = t.v(f"{code} + {self.convert(args[2], target, S32)}")
        result = self.cast(code, in_registers(target))
        self._codes[result] = code
        return result

    def _less(self, bound: str, zero: str) -> str:
        """A literal less a zero point."""
        t, number = self.text, self.text.numbers.get(zero)
        return t.v(f"{bound} - {zero}") if number is None else t.number((bound, zero), float(bound) - number)

    def dequantize(self, n: Node, args: list[str]) -> str:
        """The difference from the zero point is exact in 32-bit integers; a float has none."""
        t, source = self.text, n.src[0].dtype
        if len(args) == 3 and source.is_integer:
            codes = [self._codes.get(args[0]) or self.convert(args[0], source, S32), self.convert(args[2], source, S32)]
            value = self.cast(t.v(f"{codes[0]} - {codes[1]}"), "float32")
        else:
            value = self.convert(args[0], source, F32)
        scaled = t.times(value, self.convert(args[1], n.src[1].dtype, F32))
        return self.convert(scaled, F32, n.dtype)


def _is_number(n: Node) -> bool:
    """Whether a float is no NaN: an integer, times constants. The compiler would know it of literals."""
    if isinstance(n.op, Convert):
        return n.src[0].dtype.is_integer or (n.dtype is F32 and _is_number(n.src[0]))
    if isinstance(n.op, Map) and n.op.fn == "multiply" and n.dtype is F32:
        return any(_is_moderate(a) and _is_number(b) for a, b in (n.src, n.src[::-1]))
    return isinstance(n.op, VIEWS) and _is_number(n.src[0])


def _is_moderate(n: Node) -> bool:
    """A constant, several of which multiply an integer and leave it finite."""
    return isinstance(n.op, Const) and n.tensor.elements == 1 and abs(n.op.data.tensor().item()) < 2.0**24
