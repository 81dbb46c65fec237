"""Codes made bytes as the left operand of a Hopper kernel whose other operand has 8 bits, and sums of a group scaled.

Words come as where halves are made of them (`_operand.py`); what a thread holds of four of them is 8 registers of the matrix
unit's left fragment for 8-bit operands (`pack.py`). A 4-bit code less its zero point is at most 15 either way: a byte of
two's complement for integers, for fp8 a sign and a magnitude, which as a subnormal of e4m3 or in its first binade is that
number by 2**-9. So products are exact, and a group's sum is as exact as the tensor cores add, before it is scaled and added in
f32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.candidates.triton.hopper.w4.asm import Asm
from tilewright.dtype import F8E4M3FN, S4, S8, DType

if TYPE_CHECKING:
    from tilewright.candidates.triton.hopper.w4.stage import Coded

BLOCK = 64  # rows of the weight, and elements of K, that are packed together
STEP = 128  # of K: a row of a stage
MOST_COLUMNS = 128  # that are multiplied at once: there are registers for sums of a group of so many, beside those of all
WORDS = 4  # that one statement makes bytes of: 16 codes each of K for rows g and g + 8
TURNS = (26, 30)  # bits to the left, round, that bring codes of row g to the low and to the high half of each byte


def made_bytes(operand: DType, kind: DType, *, zeros: bool, sub: int) -> Asm:
    """Eight registers out, of four words (and four zero points' words): codes of row g of each, then of row g + 8. Where codes
    have 8 bits two words are what one is here."""
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
    for i in range(WORDS if zeros and sub < BLOCK else 2):  # two rows of each group's zero point
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
            lines += [f"add.u32 t, t, b{row + (word // 2 * 2 if zeros and sub < BLOCK else 0)};"]
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


def made(coded: Coded) -> Asm:
    w = coded.weights
    if not coded.ready:
        return made_bytes(coded.operand, w.kind, zeros=w.zero is not None, sub=w.sub)
    # As they are but for a bit: ptxas lets each product end before the next one where an operand is carried round the loop.
    lines = [f"xor.b32 ${r}, ${2 * WORDS + r}, 0x80808080;" for r in range(2 * WORDS)]
    return Asm("\n".join(lines), ",".join(["=&r"] * 2 * WORDS + ["r"] * 2 * WORDS))


def made_type(operand: DType) -> DType:
    """The type of the bytes that codes become: whatever fp8 type the other operand has, e4m3 holds their values."""
    return S8 if operand.is_integer else F8E4M3FN


def held() -> Asm:
    """The same registers as bytes: those of a word's row are neighbours."""
    order = [WORDS * row + word for word in range(WORDS) for row in (0, 1)]
    lines = [f"mov.b32 ${at}, ${2 * WORDS + r};" for at, r in enumerate(order)]
    return Asm("\n".join(lines), ",".join(["=r"] * 2 * WORDS + ["r"] * 2 * WORDS))


def _sixteenfold(operand: DType, kind: DType, *, zeros: bool) -> bool:
    """Bytes are the code times 16, which takes the fewest operations."""
    return operand.is_integer and kind is S4 and not zeros


def factor(coded: Coded) -> float:
    """What a sum of a group's products is too small by."""
    w = coded.weights
    if not coded.operand.is_integer:
        return 512.0
    return 0.0625 if _sixteenfold(coded.operand, w.kind, zeros=w.zero is not None) else 1.0


def widths(coded: Coded) -> tuple[int, ...]:
    """Columns of a tile for which there are registers: beside sums of a group there are those of all."""
    if every(coded) == STEP:
        return 64, 128, 256
    return (64,) if every(coded) < BLOCK and not coded.operand.is_integer else (64, 128)


def in_turns(coded: Coded, columns: int) -> bool:
    """Whether a warpgroup asks for products when the other one has asked for its own: where that was faster on an H200 (floats
    in 256 columns: up to 5 %; integers are up to 10 % slower), and with codes as bytes, which were measured so alone."""
    return coded.ready or (columns > MOST_COLUMNS and not coded.operand.is_integer)


def step_instructions(coded: Coded, columns: int) -> int:
    """Of a warp and a step along K: bytes made, sums scaled. (That sums of integers are made floats was seen in no time.)"""
    return made(coded).text.count(";") * coded.deep + columns // 2 * STEP // every(coded)


def every(coded: Coded) -> int:
    """Products along K that are added up before their sum is scaled."""
    return STEP if coded.weights.group % STEP == 0 or coded.weights.group == coded.blocks * BLOCK else coded.weights.sub
