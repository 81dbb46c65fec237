"""Epilogues in few instructions: an SM multiplies a tile in the time in which its lanes do some twenty of them an element, and
the code of both warpgroups should stay in the instruction cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from tilewright.candidates.triton.expressions.emit import Emitter, Tile
from tilewright.candidates.triton.expressions.printer import ROUND, ROUND_BITS, in_registers
from tilewright.candidates.triton.expressions.text import Text
from tilewright.dtype import F8E4M3FN, F8E5M2, F16, F32, S8, U8, DType
from tilewright.ir.expression import depends_on_acc, quantised_at_once
from tilewright.ir.graph import Node
from tilewright.ir.ops import Const, Map, Quantize
from tilewright.lowering.access import Access
from tilewright.lowering.scalar.conversions import narrowed
from tilewright.lowering.scalar.functions import GELU_TO_8_BITS, LOG2_E
from tilewright.lowering.scalar.values import Operand, Value, polynomial

NATIVE_FP8 = frozenset({"f8e4m3fn", "f8e5m2"})
MAGIC = 1536  # added to f16 below 512 it leaves the nearest whole number in the low bits of the sum


class FastMath(Emitter):
    """An emitter that takes the special function unit's own reciprocal and power, a bit less exact than Triton's in 24, and
    flushed to zero where those are below the normal numbers: what x / (1 + e^y) is then is below them as well.

    Factors of the accumulator are multiplied by one another first, since those of columns or scalars are few, and what is added
    then is added in the same instruction. A gelu of f16 that is quantised at once is computed in f16, two at a time, and one of
    f32 without what only infinities and NaN need.
    """

    exponent = LOG2_E

    def __init__(self, text: Text, tile: Tile, pointer: Callable[[Node], str], near: Mapping[Node, str]) -> None:
        """`near`: names of leaves that were read already."""
        super().__init__(text, tile, pointer, NATIVE_FP8)
        self._near = near
        self._scaled: dict[str, tuple[str, str]] = {}  # products that are not computed yet: value and factor
        self._of_tile: set[Node] = set()
        self._in_halves: dict[Node, Node] = {}
        self._in_f32: dict[Node, Node] = {}

    def values(self, roots: Sequence[Node], access: Access) -> list[str]:
        self._of_tile = depends_on_acc((access.root,), self.tile.near)
        self._in_halves, self._in_f32 = {}, {}
        for n, f in quantised_at_once(access.root).items():
            if _fits_halves(n, f):
                self._in_halves[n] = f
            elif f.dtype is F32 and _saturates_by_a_constant(n) and 2.0**-100 <= _inverse(n) <= 2.0**20:
                self._in_f32[n] = f
        return [self._computed(v) for v in super().values(roots, access)]

    def over(self, x: Operand, y: Value) -> Value:
        return self.binary("*", x, self._unit("rcp.approx.ftz", y))

    def negated(self, x: Value) -> Value:
        return self._unit("neg", x)  # Triton subtracts from zero

    def power(self, x: Value) -> Value:
        return self._unit("ex2.approx.ftz", x)

    def _unit(self, name: str, x: Value) -> Value:
        text = f'"{name}.f32 $0, $1;", "=f,f"'
        return self._made(F32, f"gl.inline_asm_elementwise({text}, [{x.name}], dtype=gl.float32, is_pure=True, pack=1)")

    def _node(self, n: Node, access: Access, done: dict[Node, str]) -> str:
        if n in self._in_halves:
            function = self._in_halves[n]
            return self._quantised_gelu(n, function, self._computed(done[function.src[0]]))
        if n in self._in_f32:
            function = self._in_f32[n]
            return self._quantised_gelu_of_f32(n, function, self.named(self._computed(done[function.src[0]]), F32)).name
        if n in self._in_halves.values() or n in self._in_f32.values() or (n.src and not done[n.src[0]]):
            return ""  # part of the quantisation
        if isinstance(n.op, Map) and n.dtype is F32 and len(n.src) == 2 and sum(s in self._of_tile for s in n.src) == 1:
            value, other = sorted(n.src, key=lambda s: s not in self._of_tile)
            if n.op.fn == "multiply":
                x, factor = self._scaled.get(done[value], (done[value], None))
                other = self.named(done[other], F32)
                product = other if factor is None else self.binary("*", self.named(factor, F32), other)
                return self._later(x, product.name)
            if n.op.fn == "add" and done[value] in self._scaled:
                x, factor = self._scaled[done[value]]
                return self.text.call("fma", x, factor, done[other])
        if n in self._near:
            return self._near[n]
        for s in n.src:
            done[s] = self._computed(done[s])
        return super()._node(n, access, done)

    def _later(self, value: str, factor: str) -> str:
        """The name of a product that is computed when it is needed."""
        name = f"{value} * {factor}"
        self._scaled[name] = value, factor
        return name

    def _computed(self, name: str) -> str:
        return self.text.v(name) if name in self._scaled else name

    def _quantised_gelu(self, n: Node, function: Node, x: str) -> str:
        """Codes of a gelu of f16. The special function unit's power of f16 is 2^-9.9 off."""
        assert isinstance(function.op, Map)
        coefficients, to = GELU_TO_8_BITS[function.op.fn]
        lines = [".reg .b32 s, p, m, q0, q1, zero, half, last, least, most, magic;", ".reg .b16 c0, c1;"]
        named = {
            "zero": 0.0,
            "half": 0.5,
            "last": to,
            "least": MAGIC + n.dtype.min,
            "most": MAGIC + n.dtype.max,
            "magic": MAGIC,
        }
        lines += [f"mov.b32 {name}, {twice(value):#010x};" for name, value in named.items()]
        lines += [f".reg .b32 k{i}; mov.b32 k{i}, {twice(c):#010x};" for i, c in enumerate(coefficients)]
        for j in (0, 1):
            lines += self._two_gelus(n, f"${j + 1}", f"q{j}", len(coefficients))
        if n.dtype.is_integer:
            lines.append("prmt.b32 $0, q0, q1, 0x6420;")
        else:
            kind = {F8E4M3FN: "e4m3x2", F8E5M2: "e5m2x2"}[n.dtype]
            lines += [f"cvt.rn.satfinite.{kind}.f16x2 c{j}, q{j};" for j in (0, 1)]
            lines.append("mov.b32 $0, {c0, c1};")
        kind = "int8" if n.dtype is S8 else "uint8"
        # The pair of inverses is a word, one of the four that stand beside four values.
        text, inverse = f'"{{ {" ".join(lines)} }}", "=r,r,r,r,r,r,r"', self.text.number((n, "halves"), twice(_inverse(n)))
        return self.text.v(f"gl.inline_asm_elementwise({text}, [{x}, {inverse}], dtype=gl.{kind}, is_pure=True, pack=4)")

    def _quantised_gelu_of_f32(self, n: Node, function: Node, x: Value) -> Value:
        """Codes of a gelu of f32, in 12 instructions an element. A NaN becomes the integer 0, and stays in a float.

        Rounding to f16 first would take 8, but then small negative values are up to 2^-7 off, and s8 codes a quarter of a step.
        """
        assert isinstance(function.op, Map)
        coefficients, to = GELU_TO_8_BITS[function.op.fn]
        size = x.abs().min(to)
        positive = x.max(0.0) if n.dtype.is_integer else self.fma(x.abs(), 0.5, x * 0.5)
        value = self.fma(self.power(polynomial(size, coefficients)), -size, positive)
        inverse = self.named(self.text.number((n, "inverse"), _inverse(n)), F32)
        if n.dtype.is_float:
            return narrowed(value * inverse, n.dtype, saturate=True)
        rounded = self.fma(value, inverse, ROUND).min(ROUND + float(n.dtype.max))
        return self._saturated(rounded, n.dtype)

    def _saturated(self, x: Value, dtype: DType) -> Value:
        """Codes of whole numbers to which `ROUND` is added, four at a time: the least code for what is below it."""
        pack = f"cvt.pack.sat.{dtype.name}.s32.b32"
        lines = [".reg .b32 a0, a1, a2, a3, pair;", *(f"sub.s32 a{i}, ${i + 1}, {ROUND_BITS:#x};" for i in range(4))]
        lines += [f"{pack} pair, a3, a2, 0;", f"{pack} $0, a1, a0, pair;"]
        kind = in_registers(dtype)
        text = f'"{{ {" ".join(lines)} }}", "=r,r,r,r,r"'
        return self._made(dtype, f"gl.inline_asm_elementwise({text}, [{x.name}], dtype=gl.{kind}, is_pure=True, pack=4)")

    def _two_gelus(self, n: Node, x: str, q: str, terms: int) -> list[str]:
        """max(x, 0) - |x| 2^P(|x|) over the scale. An integer's NaN is 0, which the maximum gives; a float's stays, and that
        of minus infinity."""
        lines = [f"abs.f16x2 s, {x};", "mul.rn.f16x2 m, s, half;", f"fma.rn.f16x2 m, {x}, half, m;"]
        if n.dtype.is_integer:
            lines = [f"abs.f16x2 s, {x};", f"max.f16x2 m, {x}, zero;"]
        lines += ["min.f16x2 s, s, last;", f"mov.b32 p, k{terms - 1};"]
        lines += [f"fma.rn.f16x2 p, p, s, k{i};" for i in reversed(range(terms - 1))]
        lines += ["ex2.approx.f16x2 p, p;", "neg.f16x2 s, s;", "fma.rn.f16x2 m, s, p, m;"]
        if n.dtype.is_integer:
            lines += [f"fma.rn.f16x2 {q}, m, $3, magic;", f"max.f16x2 {q}, {q}, least;", f"min.f16x2 {q}, {q}, most;"]
        else:
            lines.append(f"mul.rn.f16x2 {q}, m, $3;")
        return lines


def _fits_halves(n: Node, function: Node) -> bool:
    """Tell whether a quantised function can be computed in f16, whose normal numbers hold the inverse of the scale."""
    return function.dtype is F16 and _saturates_by_a_constant(n) and 2.0**-14 <= _inverse(n) < 2.0**15


def _saturates_by_a_constant(n: Node) -> bool:
    """Tell whether a quantisation divides by one known number, without a zero point, and saturates."""
    op, scale = n.op, n.src[1].op
    assert isinstance(op, Quantize)
    if not isinstance(scale, Const) or n.src[1].tensor.elements != 1 or len(n.src) != 2:
        return False
    return n.dtype in (S8, U8) or (n.dtype in (F8E4M3FN, F8E5M2) and op.overflow == "saturate")


def _inverse(n: Node) -> float:
    """The inverse of a quantisation's scale, a constant."""
    scale = n.src[1].op
    assert isinstance(scale, Const)
    value = float(scale.data.tensor().item())
    return 1 / value if value else math.inf


def twice(value: float) -> int:
    """A pair of equal f16 as a word."""
    bits = int(torch.tensor(float(value), dtype=torch.float16).view(torch.int16).item()) & 0xFFFF
    return bits << 16 | bits
