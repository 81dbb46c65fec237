"""PTX of `hopper_w4`'s products: codes made halves in registers, and multiplied by the other operand. Every statement is for
one thread, or for the warps it names."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from tilewright.candidates.triton.hopper.w4.pack import MAGIC, bias, places
from tilewright.dtype import BF16, F32, DType

STEPS = 4  # of 16 columns in a block of 64
SMALL = (18, 22)  # codes at bits 6 and 2 of a half without an exponent are this many powers of two too small (f16: 2**-24)
# Upper half of what tells `wgmma` where an operand lies: rows of 128 bytes, swizzled, eight of them 1024 bytes apart from the
# next eight (PTX ISA 9.0, 9.7.15.5.1.2). The lower half is an address of 16 bytes each.
ROWS_OF_128 = 1 << 30 | 64


def _word(value: float) -> int:
    """A number of f32 as a word."""
    return int.from_bytes(struct.pack("<f", value), "little")


def _bits(value: float, operand: DType) -> int:
    """Two equal numbers as a word."""
    import torch

    raw = torch.tensor([value], dtype=operand.to_torch()).view(torch.int16).item()
    return (int(raw) & 0xFFFF) * 0x10001


@dataclass(frozen=True)
class Asm:
    """An inline statement: its text with numbered operands, and their constraints."""

    text: str
    constraints: str


@dataclass(frozen=True)
class Product:
    """What one statement multiplies: of each warp 16 rows by 64 columns (K) of codes, by `columns` of the other operand.

    Attributes:
        operand: f16 or bf16.
        kind: of the codes.
        scales: type of the scales.
        sub: codes along K for which a scale stands, 32 or 64.
        zeros: there are zero points.
        rounded: codes are scaled before they are multiplied; else sums are scaled.
        columns: of the other operand, a multiple of 8.
        wide: by `wgmma`, the other operand read from shared memory by four warps together.
        small: codes are multiplied as the smallest numbers of f16, as they stand in a word, and what they are too large by is
            taken off their sums: it depends on the other operand's sums, which are to hand (`SUMS`).
    """

    operand: DType
    kind: DType
    scales: DType
    sub: int
    zeros: bool
    rounded: bool
    columns: int
    wide: bool
    small: bool = False

    @property
    def words(self) -> int:
        """Of codes that a lane holds."""
        return STEPS * self.kind.bits // 4

    @property
    def subs(self) -> int:
        """Scales along K."""
        return 64 // self.sub

    @property
    def scale_words(self) -> int:
        """That a lane holds."""
        return self.subs * (2 if self.scales is F32 else 1)

    @property
    def sums(self) -> int:
        """That a lane holds."""
        return self.columns // 2

    def asm(self) -> Asm:
        """Operands: sums out; codes, scales, zeros, sums in; then 8 words of the other operand for each 8 columns, or its
        address in shared memory, of 16 bytes each; and if codes are `small` a word of its sums for each scale and 8 columns."""
        return _Writer(self).write()

    # by `wgmma` in three statements, so that others come between them

    def made_halves(self) -> Asm:
        """16 registers of the left operand out; codes, scales, zeros in."""
        return _Writer(self).made_halves()

    @property
    def under_way(self) -> int:
        """Sums of products that are under way."""
        return self.sums * (1 if self.rounded else self.subs)

    def started(self) -> Asm:
        """Sums under way out; 16 registers, the other operand's address and, if weights are rounded, sums in."""
        w = _Writer(self)
        n, given = self.under_way, self.under_way
        sums_in = [given + 17 + i for i in range(self.sums)] if self.rounded else []
        w.do("{")
        w.do(".reg .b32 u; .reg .pred q; .reg .b64 e;")
        for i, s in enumerate(sums_in):
            w.do(f"mov.f32 ${i}, ${s};")
        w.do("wgmma.fence.sync.aligned;")
        each = STEPS // self.subs
        for step in range(STEPS):
            fresh = not self.rounded and step % each == 0
            at = 0 if self.rounded else step // each * self.sums
            d = ",".join(f"${at + i}" for i in range(self.sums))
            a = ",".join(f"${given + 4 * step + r}" for r in range(4))
            w.do(f"setp.ne.b32 q, {0 if fresh else 1}, 0;")
            w.do(f"add.s32 u, ${given + 16}, {2 * step}; mov.b64 e, {{u, 0x{ROWS_OF_128:08x}}};")
            w.do(f"wgmma.mma_async.sync.aligned.m64n{self.columns}k16.f32.{w.kind}.{w.kind} {{{d}}}, {{{a}}}, e, q, 1, 1, 0;")
        w.do("wgmma.commit_group.sync.aligned;")
        w.do("}")
        return Asm("\n".join(w.lines), ",".join(["=&f"] * n + ["r"] * 17 + ["f"] * len(sums_in)))

    def ended(self, left: int) -> Asm:
        """Sums under way out and in; so many products that were started later still are."""
        n = self.under_way
        lines = [f"wgmma.wait_group.sync.aligned {left};"]
        return Asm("\n".join(lines), ",".join(["=f"] * n + [str(i) for i in range(n)]))

    def scaled(self) -> Asm:
        """Sums out; scales, products' sums, sums in."""
        w = _Writer(self)
        w.scale_at = self.sums
        w.do("{")
        w.do(f".reg .b32 u; .reg .f32 s<{2 * self.subs}>; .reg .b16 h0, h1;")
        products = w.scale_at + self.scale_words
        sums_in = products + self.under_way
        for sub in range(self.subs):
            w.scale(sub)
            for i in range(self.sums):
                before = f"${sums_in + i}" if sub == 0 else f"${i}"
                w.do(f"fma.rn.f32 ${i}, ${products + sub * self.sums + i}, s{2 * sub + i % 4 // 2}, {before};")
        w.do("}")
        given = ["r"] * self.scale_words + ["f"] * (self.under_way + self.sums)
        return Asm("\n".join(w.lines), ",".join(["=&f"] * self.sums + given))


class _Writer:
    def __init__(self, product: Product) -> None:
        p = self.p = product
        self.lines: list[str] = []
        self.codes = p.sums
        self.scale_at = self.codes + p.words
        self.zero_at = self.scale_at + p.scale_words
        self.sums_in = self.zero_at + (p.subs if p.zeros else 0)
        self.other = self.sums_in + p.sums
        self.kind = "bf16" if p.operand is BF16 else "f16"
        self.as_they_are = p.kind.bits == 8 and p.operand is BF16  # codes, once they are floats

    def do(self, line: str) -> None:
        self.lines.append(line)

    def write(self) -> Asm:
        p = self.p
        self.do("{")
        self.do(
            f".reg .b32 u, v, a<{STEPS * 4}>, c<{2 * p.subs}>, m<{2 * p.subs}>; .reg .f32 d<{p.sums}>, s<{2 * p.subs}>, z, y;"
        )
        self.do(".reg .b16 h0, h1; .reg .pred q; .reg .b64 e;")
        self.do("mov.f32 z, 0f00000000;")
        for sub in range(p.subs):
            self.scale(sub)
            self.zero(sub)
        if p.rounded:
            for i in range(p.sums):
                self.do(f"mov.f32 d{i}, ${self.sums_in + i};")
        if p.wide:
            self._wide()
        else:
            self._narrow()
        if p.rounded:
            for i in range(p.sums):
                self.do(f"mov.f32 ${i}, d{i};")
        self.do("}")
        given = ["r"] * (self.sums_in - p.sums) + ["f"] * p.sums + ["r"] * (1 if p.wide else p.columns)
        given += ["r"] * (p.subs * p.columns // 8 if p.small else 0)
        return Asm("\n".join(self.lines), ",".join([*["=&f"] * p.sums, *given]))

    def scale(self, i: int) -> None:
        """s: of both rows, as f32; or m: each twice in a word."""
        p = self.p
        word = f"${self.scale_at + i}"
        if p.scales is F32:
            for h in (0, 1):
                self.do(f"mov.b32 s{2 * i + h}, ${self.scale_at + 2 * i + h};")
        elif p.rounded:
            self.do(f"prmt.b32 m{2 * i}, {word}, {word}, 0x1010; prmt.b32 m{2 * i + 1}, {word}, {word}, 0x3232;")
        elif p.scales is BF16:
            self.do(f"shl.b32 u, {word}, 16; mov.b32 s{2 * i}, u; and.b32 u, {word}, 0xffff0000; mov.b32 s{2 * i + 1}, u;")
        else:
            self.do(f"mov.b32 {{h0, h1}}, {word}; cvt.f32.f16 s{2 * i}, h0; cvt.f32.f16 s{2 * i + 1}, h1;")
        if p.small:
            for h in (0, 1):
                self.do(f"mul.rn.f32 s{2 * i + h}, s{2 * i + h}, 0f{_word(2.0 ** SMALL[h]):08x};")

    def zero(self, i: int) -> None:
        """c: what is subtracted from codes of both rows."""
        p = self.p
        if p.small:
            for h, magic in enumerate(MAGIC[p.kind.bits, p.operand.name]):
                unit = 2.0 ** -SMALL[h]
                if not p.zeros:
                    self.do(f"mov.b32 c{2 * i + h}, 0x{_word(-bias(p.kind, p.operand) * unit):08x};")
                    continue
                if h == 0:
                    self.do(f"mov.b32 {{h0, h1}}, ${self.zero_at + i};")
                self.do(f"cvt.f32.f16 y, h{h}; fma.rn.f32 y, y, 0f{_word(-unit):08x}, 0f{_word(magic * unit):08x};")
                self.do(f"mov.b32 c{2 * i + h}, y;")
            return
        if p.zeros:
            word = f"${self.zero_at + i}"
            self.do(f"prmt.b32 c{2 * i}, {word}, {word}, 0x1010; prmt.b32 c{2 * i + 1}, {word}, {word}, 0x3232;")
        elif not self.as_they_are:
            for h in (0, 1):
                value = MAGIC[p.kind.bits, p.operand.name][h] + bias(p.kind, p.operand)
                self.do(f"mov.b32 c{2 * i + h}, 0x{_bits(value, p.operand):08x};")

    def convert(self, step: int) -> None:
        """a: the fragment of a step; its registers are rows g and g + 8 of the left half, then of the right one."""
        p = self.p
        exponent = [_bits(m, p.operand) for m in MAGIC[p.kind.bits, p.operand.name]]
        for kk in (0, 1):
            word = f"${self.codes + (step if p.kind.bits == 4 else 2 * step + kk)}"
            for h, half, bit in places(p.kind.bits, p.operand):
                a = f"a{4 * step + 2 * kk + h}"
                if p.kind.bits == 8:
                    self._byte(a, word, h, exponent[h])
                elif half == kk and p.operand is BF16:
                    if bit:
                        self.do(f"shr.b32 u, {word}, {bit};")
                    self.do(f"lop3.b32 {a}, {'u' if bit else word}, 0x000f000f, 0x{exponent[h]:08x}, 0xea;")
                elif half == kk:
                    if kk and h == 0:
                        self.do(f"shf.r.wrap.b32 u, {word}, {word}, 8;")
                    mask = 0x00010001 * (15 << bit - 8 * kk)
                    if p.small:
                        self.do(f"and.b32 {a}, {'u' if kk else word}, 0x{mask:08x};")
                        continue
                    self.do(f"lop3.b32 {a}, {'u' if kk else word}, 0x{mask:08x}, 0x{exponent[h]:08x}, 0xea;")
        i = step * 16 // p.sub
        for r in range(4):
            a = f"a{4 * step + r}"
            if not self.as_they_are and not p.small:
                self.do(f"sub.rn.{self.kind}x2 {a}, {a}, c{2 * i + r % 2};")
            if p.rounded:
                self.do(f"mul.rn.{self.kind}x2 {a}, {a}, m{2 * i + r % 2};")

    def made_halves(self) -> Asm:
        p = self.p
        self.codes, self.scale_at = 4 * STEPS, 4 * STEPS + p.words
        self.zero_at = self.scale_at + p.scale_words
        self.do("{")
        self.do(f".reg .b32 u, v, a<{STEPS * 4}>, c<{2 * p.subs}>, m<{2 * p.subs}>; .reg .f32 s<{2 * p.subs}>, y;")
        self.do(".reg .b16 h0, h1;")
        for sub in range(p.subs):
            if p.rounded:
                self.scale(sub)
            self.zero(sub)
        for step in range(STEPS):
            self.convert(step)
        for i in range(4 * STEPS):
            self.do(f"mov.b32 ${i}, a{i};")
        self.do("}")
        given = ["r"] * (p.words + p.scale_words + (p.subs if p.zeros else 0))
        return Asm("\n".join(self.lines), ",".join(["=&r"] * (4 * STEPS) + given))

    def _byte(self, a: str, word: str, h: int, exponent: int) -> None:
        """Two bytes of a word, eight bits apart from those of the other row."""
        if self.p.operand is not BF16:
            self.do(f"prmt.b32 {a}, {word}, 0x64646464, {'0x4341' if h else '0x4240'};")
            return
        source = word
        if h:
            self.do(f"shr.b32 u, {word}, 8;")
            source = "u"
        # Seven bits as 128 + code, and what is to be subtracted by the sign: 128, or 256 of a negative code.
        self.do(f"lop3.b32 {a}, {source}, 0x007f007f, 0x{exponent:08x}, 0xea;")
        self.do(f"lop3.b32 v, {source}, 0x00800080, 0x{exponent:08x}, 0xea;")
        self.do(f"sub.rn.bf16x2 {a}, {a}, v;")

    def _scaled(self, sub: int) -> None:
        """Sums of a group's products join the others."""
        if self.p.rounded:
            return
        for i in range(self.p.sums):
            before = f"${self.sums_in + i}" if sub == 0 else f"${i}"
            self.do(f"fma.rn.f32 ${i}, d{i}, s{2 * sub + i % 4 // 2}, {before};")

    def _fragment(self, step: int) -> str:
        return ",".join(f"a{4 * step + r}" for r in range(4))

    def _narrow(self) -> None:
        p, each = self.p, STEPS // self.p.subs
        kinds = f"f32.{self.kind}.{self.kind}.f32"
        for step in range(STEPS):
            self.convert(step)
            for j in range(p.columns // 8):
                d = ",".join(f"d{4 * j + e}" for e in range(4))
                x = f"${self.other + 8 * j + 2 * step},${self.other + 8 * j + 2 * step + 1}"
                first = not p.rounded and step % each == 0
                before = "z,z,z,z" if first else d
                if first and p.small:
                    i = step // each
                    sums = f"${self.other + p.columns + i * p.columns // 8 + j}"
                    kind = "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32"
                    self.do(f"{kind} {{{d}}}, {{c{2 * i},c{2 * i + 1}}}, {{{sums}}}, {{{before}}};")
                    before = d
                self.do(
                    f"mma.sync.aligned.m16n8k16.row.col.{kinds} {{{d}}}, {{{self._fragment(step)}}}, {{{x}}}, {{{before}}};"
                )
            if (step + 1) % each == 0:
                self._scaled(step // each)

    def _wide(self) -> None:
        p, each = self.p, STEPS // self.p.subs
        d, kinds = ",".join(f"d{i}" for i in range(p.sums)), f"f32.{self.kind}.{self.kind}"
        for step in range(STEPS):
            self.convert(step)
        for sub in range(p.subs):
            self.do("wgmma.fence.sync.aligned;")
            for step in range(sub * each, (sub + 1) * each):
                fresh = not p.rounded and step == sub * each
                self.do(f"setp.ne.b32 q, {0 if fresh else 1}, 0;")
                self.do(f"add.s32 u, ${self.other}, {2 * step}; mov.b64 e, {{u, 0x{ROWS_OF_128:08x}}};")
                a = self._fragment(step)
                self.do(f"wgmma.mma_async.sync.aligned.m64n{p.columns}k16.{kinds} {{{d}}}, {{{a}}}, e, q, 1, 1, 0;")
            self.do("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
            self._scaled(sub)


def other_sums(operand: DType, subs: int) -> Asm:
    """Sums of the other operand along K, for each scale of a block of 64: of its fragments of 8 columns, in three parts of 11
    bits that add up to them, as TF32 holds them. A lane gives that part of columns 2 t and 2 t + 1 which lane // 4 says."""
    kind = "bf16" if operand is BF16 else "f16"
    one, product = _bits(1.0, operand), f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    lines = ["{ .reg .f32 d<4>, z, h, m, l; .reg .b32 a, u, w; .reg .pred q0, q1, q2;", "mov.f32 z, 0f00000000;"]
    lines.append(f"mov.b32 a, 0x{one:08x}; shr.u32 w, ${2 * subs + 8}, 2;")
    lines.append("setp.eq.u32 q0, w, 0; setp.eq.u32 q1, w, 1; setp.eq.u32 q2, w, 2;")
    for sub in range(subs):
        for step in range(sub * STEPS // subs, (sub + 1) * STEPS // subs):
            before = "d0,d1,d2,d3" if step % (STEPS // subs) else "z,z,z,z"
            x = f"${2 * subs + 2 * step},${2 * subs + 2 * step + 1}"
            lines.append(f"{product} {{d0,d1,d2,d3}}, {{a,a,a,a}}, {{{x}}}, {{{before}}};")
        for e in (0, 1):
            for part, rest in (("h", f"d{e}"), ("m", "l")):
                lines.append(f"mov.b32 u, {rest}; and.b32 u, u, 0xffffe000; mov.b32 {part}, u; sub.rn.f32 l, {rest}, {part};")
            lines.append("selp.f32 l, l, z, q2; selp.f32 l, m, l, q1; selp.f32 l, h, l, q0;")
            lines.append(f"mov.f32 ${2 * sub + e}, l;")
    lines.append("}")
    return Asm("\n".join(lines), ",".join(["=&f"] * (2 * subs) + ["r"] * 9))


def halves(operand: DType, kind: DType, *, zeros: bool) -> Asm:
    """Two words of 4-bit codes as eight registers, scaled: operands are those, then words, scale and zero point, all twice."""
    writer = _Writer(Product(operand, kind, operand, 32, zeros, rounded=True, columns=0, wide=False))
    writer.codes, writer.scale_at, writer.zero_at = 8, 10, 12
    writer.do("{")
    writer.do(".reg .b32 u, a<8>, c<2>, m<2>;")
    writer.zero(0)
    writer.scale(0)
    for step in (0, 1):
        writer.convert(step)
    for i in range(8):
        writer.do(f"mov.b32 ${i}, a{i};")
    writer.do("}")
    return Asm("\n".join(writer.lines), ",".join(["=&r"] * 8 + ["r"] * (6 if zeros else 4)))
