"""Attention's result as 8-bit codes in few instructions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.candidates.triton.attention.heads import number
from tilewright.candidates.triton.expressions.text import Text
from tilewright.candidates.triton.hopper.brief import MAGIC, NATIVE_FP8, twice
from tilewright.dtype import S8, U8, DType
from tilewright.ir.graph import Node
from tilewright.ir.ops import VIEWS, Acc, Quantize


@dataclass(frozen=True)
class Codes:
    """A result that leaves as 8-bit codes of one scale: it is divided in f32 together with its sum of weights. For integers it
    is rounded to f16 then, as an f16 result would be before, and to whole numbers by an addition."""

    dtype: DType
    scale: float

    @property
    def factor(self) -> float:
        """What a float result is multiplied by; an integer's has the rest of its scale in `integers`."""
        return 1 / self.scale if self.dtype.is_float else 1 / (self.scale * self._half)

    @property
    def _half(self) -> float:
        """The inverse of the scale as f16 has it."""
        return float(torch.tensor(1 / self.scale, dtype=torch.float16).item())

    def integers(self, t: Text) -> str | None:
        """Codes of `scaled`, if they are integers; NaN gives 0, which both a maximum and a minimum with 0 give."""
        if self.dtype.is_float:
            return None
        words = {
            "zero": 0.0,
            "magic": MAGIC,
            "least": MAGIC + self.dtype.min,
            "most": MAGIC + self.dtype.max,
        }
        lines = [f".reg .b32 {', '.join(words)}, a, b, q0, q1;"]
        lines += [f"mov.b32 {name}, {twice(value):#010x};" for name, value in words.items()]
        for q, low, high in (("q0", "$1", "$2"), ("q1", "$3", "$4")):
            lines += [f"cvt.rn.f16x2.f32 a, {high}, {low};", "max.f16x2 b, a, zero;", "min.f16x2 a, a, zero;"]
            lines += [f"fma.rn.f16x2 {q}, b, $5, magic;", f"fma.rn.f16x2 {q}, a, $5, {q};"]
            lines += [f"max.f16x2 {q}, {q}, least;", f"min.f16x2 {q}, {q}, most;"]
        lines.append("prmt.b32 $0, q0, q1, 0x6420;")
        kind = "int8" if self.dtype is S8 else "uint8"
        # The pair of inverses is a word, one of the four that stand beside four values.
        text, inverse = f'"{{ {" ".join(lines)} }}", "=r,f,f,f,f,r,r,r,r"', t.number("halves", twice(self._half))
        return f"gl.inline_asm_elementwise({text}, [scaled, {inverse}], dtype=gl.{kind}, is_pure=True, pack=4)"


def codes_at_once(root: Node) -> Codes | None:
    """The codes that a store's expression is, if it is nothing but a quantisation by one number."""
    while isinstance(root.op, VIEWS):
        root = root.src[0]
    if (
        not isinstance(root.op, Quantize)
        or len(root.src) != 2
        or not isinstance(root.src[0].op, Acc)
        or root.op.block is not None
    ):
        return None
    scale = number(root.src[1])
    if scale is None or not 2.0**-14 <= scale <= 2.0**13:  # its inverse is a normal f16, which what is rounded times it fits
        return None
    saturates = root.dtype in (S8, U8) or (root.dtype.name in NATIVE_FP8 and root.op.overflow == "saturate")
    return Codes(root.dtype, scale) if saturates else None
