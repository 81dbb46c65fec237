"""PTX that dequantises codes in registers: to halves for `mma.sync` and `wgmma`, or to bytes for an operand of 8 bits.

Words come in the order of the matrix unit's left fragment (`pack.py`). One word of 4-bit codes, or two words of 8-bit codes,
give a thread the four registers of 16 columns in halves: rows g and g + 8 of the left eight, then of the right ones. Four words
give it 8 registers of the fragment for 8-bit operands. A 4-bit code less its zero point is at most 15 either way: a byte of
two's complement for integers, for fp8 a sign and a magnitude, which as a subnormal of e4m3 or in its first binade is that
number by 2**-9. So products are exact, and a group's sum is as exact as the tensor cores add, before it is scaled and added in
f32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.candidates.triton.hopper.w4.pack import MAGIC, bias, places
from tilewright.candidates.triton.hopper.w4.plan import BLOCK
from tilewright.dtype import BF16, F8E4M3FN, F8E5M2, S4, S8, DType

WORDS = 4  # words that one statement makes bytes of: 16 codes each of K for rows g and g + 8
TURNS = (26, 30)  # bits to the left, round, that bring codes of row g to the low and to the high half of each byte


@dataclass(frozen=True)
class Asm:
    """An inline statement: its text with numbered operands, and their constraints."""

    text: str
    constraints: str


def pair(value: float, operand: DType) -> int:
    """Two equal numbers of 16 bits as a word."""
    raw = torch.tensor([value], dtype=operand.to_torch()).view(torch.int16).item()
    return (int(raw) & 0xFFFF) * 0x10001


def dequantize_to_halves(
    kind: DType,
    operand: DType,
    *,
    zeros: bool,
    rounded: bool,
    scale_k: int,
    subnormal: bool = False,
    steps: int = 4,
    slots: int | None = None,
) -> Asm:
    """The statement that dequantises codes to halves. Out: four registers for each step of 16 columns; in: words (of 8-bit
    codes two to a step), and where it matters of each group of steps a word of both rows' scales and one of their zero points.

    Args:
        kind: type of the codes.
        operand: f16 or bf16.
        zeros: there are zero points.
        rounded: codes are scaled.
        scale_k: codes along K that share a scale.
        subnormal: codes stay as they stand in a word, with no exponent (`kernel_config.KernelConfig.subnormal`).
        steps: steps of 16 columns.
        slots: operands that scales and zero points take each, if more than there are groups.
    """
    name, bits = operand.name, kind.bits
    zeros = zeros and not subnormal
    as_they_are = bits == 8 and operand is BF16  # codes, once they are floats
    groups = max(16 * steps // scale_k, 1)
    words, slots = 4 * steps, slots or groups
    scale = words + steps * (2 if bits == 8 else 1)
    zero = scale + slots * rounded
    magic = MAGIC[bits, operand.name]
    exponent = [f"0x{pair(m, operand):08x}" for m in magic]
    lines = [f"{{ .reg .b32 u, v, c<{2 * groups}>, m<{2 * groups}>;"]
    for group in range(groups):
        for at, r in [(zero, "c")] * zeros + [(scale, "m")] * rounded:
            word = f"${at + group}"
            lines += [f"prmt.b32 {r}{2 * group + h}, {word}, {word}, {('0x1010', '0x3232')[h]};" for h in (0, 1)]
    if not (zeros or subnormal or as_they_are):
        lines += [f"mov.b32 c{h}, 0x{pair(magic[h] + bias(kind, operand), operand):08x};" for h in (0, 1)]
    for step in range(steps):
        for h, kk, bit in places(bits, operand) if bits == 4 else [(h, kk, 8 * h) for kk in (0, 1) for h in (0, 1)]:
            a, word = f"${4 * step + 2 * kk + h}", f"${words + (step if bits == 4 else 2 * step + kk)}"
            if as_they_are:
                # Seven bits as 128 + code, and what is to be subtracted by the sign: 128, or 256 of a negative code.
                lines += [f"shr.b32 u, {word}, {bit};", f"lop3.b32 {a}, u, 0x007f007f, {exponent[h]}, 0xea;"]
                lines += [f"lop3.b32 v, u, 0x00800080, {exponent[h]}, 0xea;", f"sub.rn.bf16x2 {a}, {a}, v;"]
            elif bits == 8:  # bytes, eight bits apart from those of the other row
                lines.append(f"prmt.b32 {a}, {word}, 0x64646464, {('0x4240', '0x4341')[h]};")
            elif operand is BF16:
                lines += [f"shr.b32 u, {word}, {bit};", f"lop3.b32 {a}, u, 0x000f000f, {exponent[h]}, 0xea;"]
            else:
                lines += [f"shf.r.wrap.b32 u, {word}, {word}, 8;"] if kk and h == 0 else []
                mask, source = f"0x{0x00010001 * (15 << bit - 8 * kk):08x}", "u" if kk else word
                lines.append(
                    f"and.b32 {a}, {source}, {mask};" if subnormal else f"lop3.b32 {a}, {source}, {mask}, {exponent[h]}, 0xea;"
                )
        group = step * groups // steps
        for r in range(4 * step, 4 * step + 4):
            c, m = 2 * group * zeros + r % 2, 2 * group + r % 2
            lines += [] if as_they_are or subnormal else [f"sub.rn.{name}x2 ${r}, ${r}, c{c};"]
            lines += [f"mul.rn.{name}x2 ${r}, ${r}, m{m};"] if rounded else []
    return Asm("\n".join([*lines, "}"]), ",".join(["=&r"] * words + ["r"] * (zero + slots * zeros - words)))


def widen(codes: DType) -> str:
    """The statement that makes 16 codes of 8 bits, which lie where eight f16 belong ($1, if $2), f16 there and in the next 16
    bytes of a swizzled row: of each four neighbours along K those with even numbers, then the others, as weights for them are
    packed (`pack.py`)."""
    lines = ["{ .reg .pred q; .reg .b32 w<4>, e<4>, o<4>, at; .reg .b16 h0, h1;", "setp.ne.b32 q, $2, 0;"]
    lines += [*(f"mov.b32 w{i}, 0;" for i in range(4)), "@q ld.shared.v4.b32 {w0,w1,w2,w3}, [$1];"]
    for i in range(4):
        if codes is F8E4M3FN:
            lines.append(f"prmt.b32 w{i}, w{i}, 0, 0x3120; mov.b32 {{h0, h1}}, w{i};")
            lines.append(f"cvt.rn.f16x2.e4m3x2 e{i}, h0; cvt.rn.f16x2.e4m3x2 o{i}, h1;")
        elif codes is F8E5M2:  # the upper byte of f16
            lines.append(f"prmt.b32 e{i}, w{i}, 0, 0x2404; prmt.b32 o{i}, w{i}, 0, 0x3414;")
        else:
            word = 0x64806480 if codes.is_signed else 0x64006400  # 1024, or 1024 + 128
            lines += [f"xor.b32 w{i}, w{i}, 0x80808080;"] if codes.is_signed else []
            lines.append(f"prmt.b32 e{i}, w{i}, 0x64646464, 0x4240; prmt.b32 o{i}, w{i}, 0x64646464, 0x4341;")
            lines += [f"mov.b32 at, 0x{word:08x};"] + [f"sub.rn.f16x2 {a}{i}, {a}{i}, at;" for a in ("e", "o")]
    lines.append("@q st.shared.v4.b32 [$1], {e0,e1,e2,e3}; xor.b32 at, $1, 16; @q st.shared.v4.b32 [at], {o0,o1,o2,o3}; }")
    return "\n".join(lines)


def dequantize_to_bytes(operand: DType, kind: DType, *, zeros: bool, scale_k: int) -> Asm:
    """The statement that dequantises codes to bytes. Out: eight registers, for each of four words codes of row g, then for each
    those of row g + 8; in: the words, of 8-bit codes two for each, and four words of zero points if there are any."""
    lines = ["{", ".reg .b32 t, m, n, b<4>;"]
    if kind.bits == 8:
        for word in range(WORDS):
            pair = f"${2 * WORDS + 2 * word}, ${2 * WORDS + 2 * word + 1}"
            for row, bytes_of in ((0, "0x6240"), (1, "0x7351")):  # of the pair: its words' in turn
                out = f"${WORDS * row + word}"
                lines += [f"prmt.b32 t, {pair}, {bytes_of};", f"xor.b32 {out}, t, 0x80808080;"]  # less 128, which was added
        return Asm("\n".join([*lines, "}"]), ",".join(["=&r"] * 2 * WORDS + ["r"] * 2 * WORDS))
    sixteenfold = _sixteenfold(operand, kind, zeros=zeros)
    signed = zeros or kind is S4
    for i in range(WORDS if zeros and scale_k < BLOCK else 2):  # two rows of each group's zero point
        if zeros:
            word = f"${3 * WORDS + i // 2 * 2}"  # zero points on magic numbers: of row g from bit 6 on, of row g + 8 from 18
            lines += [f"shr.u32 t, {word}, {(6, 18)[i % 2]};", "and.b32 t, t, 15;"]
            lines += [f"mul.lo.u32 t, t, 0x01010101; sub.u32 b{i}, 0x80808080, t;"]
        else:
            lines += [f"mov.b32 b{i}, 0x78787878;"]  # less 8, which was added to signed codes
    for word in range(WORDS):
        for row in (0, 1):
            out, given = f"${WORDS * row + word}", f"${2 * WORDS + word}"
            if row == 0:
                lines += [f"shf.l.wrap.b32 t, {given}, {given}, {TURNS[sixteenfold]};"]
            else:
                lines += [f"shl.b32 t, {given}, 2;" if sixteenfold else f"shr.u32 t, {given}, 2;"]
            if sixteenfold:  # in the high half, less 8 as the highest bit is the other one: (t ^ 0x80..) & 0xf0..
                lines += [f"lop3.b32 {out}, t, 0x80808080, 0xf0f0f0f0, 0x28;"]
                continue
            lines += [f"and.b32 {'t' if signed else out}, t, 0x0f0f0f0f;"]
            if not signed:
                continue
            # 128 and the difference: its highest bit says that it is not negative.
            lines += [f"add.u32 t, t, b{row + (word // 2 * 2 if zeros and scale_k < BLOCK else 0)};"]
            if operand.is_integer:
                lines += [f"xor.b32 {out}, t, 0x80808080;"]
                continue
            lines += [
                "prmt.b32 m, t, t, 0xba98;",  # bytes of ones where it is not negative
                "lop3.b32 n, m, 0x01010101, 0, 0x0c;",  # ~m & 0x01..
                "lop3.b32 t, t, m, 0x80808080, 0x4b;",  # m ? t ^ 0x80.. : ~t
                f"add.u32 {out}, t, n;",
            ]
    lines.append("}")
    given = 2 * WORDS if zeros else WORDS
    return Asm("\n".join(lines), ",".join(["=&r"] * 2 * WORDS + ["r"] * given))


def flip_signs() -> Asm:
    """The statement that inverts the highest bit of each byte: ptxas lets each product end before the next one where an operand
    is carried round the loop."""
    lines = [f"xor.b32 ${r}, ${2 * WORDS + r}, 0x80808080;" for r in range(2 * WORDS)]
    return Asm("\n".join(lines), ",".join(["=&r"] * 2 * WORDS + ["r"] * 2 * WORDS))


def byte_type(operand: DType) -> DType:
    """The type of the bytes that codes become: whatever fp8 type the other operand has, e4m3 holds their values."""
    return S8 if operand.is_integer else F8E4M3FN


def spread_rows() -> Asm:
    """The statement that gives the same registers as bytes: those of a word's two rows become neighbours."""
    order = [WORDS * row + word for word in range(WORDS) for row in (0, 1)]
    lines = [f"mov.b32 ${at}, ${2 * WORDS + r};" for at, r in enumerate(order)]
    return Asm("\n".join(lines), ",".join(["=r"] * 2 * WORDS + ["r"] * 2 * WORDS))


def byte_factor(operand: DType, kind: DType, *, zeros: bool) -> float:
    """The factor that a sum of products of such bytes is too small by."""
    return 512.0 if not operand.is_integer else 0.0625 if _sixteenfold(operand, kind, zeros=zeros) else 1.0


def _sixteenfold(operand: DType, kind: DType, *, zeros: bool) -> bool:
    """Tell whether bytes are the code times 16, which takes the fewest operations."""
    return operand.is_integer and kind is S4 and not zeros
