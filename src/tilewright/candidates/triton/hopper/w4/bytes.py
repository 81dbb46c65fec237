"""Codes made bytes as the left operand of a Hopper kernel whose other operand has 8 bits, and sums of a group scaled.

Words come as where halves are made of them (`_w4_stage.py`); what a thread holds of four of them is 8 registers of the matrix
unit's left fragment for 8-bit operands (`_w4_pack.py`). A 4-bit code less its zero point is at most 15 either way: a byte of
two's complement for integers, for fp8 a sign and a magnitude, which as a subnormal of e4m3 or in its first binade is that
number by 2**-9. So products are exact, and a group's sum is as exact as the tensor cores add, before it is scaled and added in
f32.
"""

from __future__ import annotations

from itertools import product

from tilewright.candidates.triton.expressions.text import Text
from tilewright.candidates.triton.hopper.w4.asm import Asm
from tilewright.candidates.triton.hopper.w4.stage import BLOCK, ONE_OF, Coded
from tilewright.dtype import BF16, F32, S4, DType

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


def _made(coded: Coded) -> Asm:
    w = coded.weights
    if not coded.ready:
        return made_bytes(coded.operand, w.kind, zeros=w.zero is not None, sub=w.sub)
    # As they are but for a bit: ptxas lets each product end before the next one where an operand is carried round the loop.
    lines = [f"xor.b32 ${r}, ${2 * WORDS + r}, 0x80808080;" for r in range(2 * WORDS)]
    return Asm("\n".join(lines), ",".join(["=&r"] * 2 * WORDS + ["r"] * 2 * WORDS))


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
    return _made(coded).text.count(";") * coded.deep + columns // 2 * STEP // every(coded)


def every(coded: Coded) -> int:
    """Products along K that are added up before their sum is scaled."""
    return STEP if coded.weights.group % STEP == 0 or coded.weights.group == coded.blocks * BLOCK else coded.weights.sub


def prologue(coded: Coded) -> str:
    """The functions `bytes_of`, words of a block and what belongs to them to bytes of both rows, four to a word (as words they
    may wait for their turn), `tile_of`, such words to a tile [64, 64] as the matrix unit takes it,
    `half_of`, the first or second half of neighbours, and `scales_of`, words of scales to those of a tile's rows."""
    w = coded.weights
    asm = _made(coded)
    given = ", ".join(["words", *["more"] * (coded.bits == 8), *["zero"] * coded.zeros])
    results = ", ".join(f"x{i}" for i in range(8))
    kind = "gl.int8" if coded.operand.is_integer else "gl.float8e4nv"
    if w.scales is F32:
        rows = "x.to(gl.float32, bitcast=True)"
    else:
        half = "gl.bfloat16" if w.scales is BF16 else "gl.float16"
        low, high = (f"{bits}.to(gl.int16).to({half}, bitcast=True).to(gl.float32)" for bits in ("x", "(x >> 16)"))
        rows = f"gl.join({low}.reshape((4, 8)), {high}.reshape((4, 8)))"
    return f"""BYTES = gl.constexpr({asm.text!r})
BYTES_C = gl.constexpr({asm.constraints!r})
HELD = gl.constexpr({held().text!r})
HELD_C = gl.constexpr({held().constraints!r})


@gluon.jit
def bytes_of({given}):
    return gl.inline_asm_elementwise(BYTES, BYTES_C, [{given}], dtype=(gl.int32,) * 2, is_pure=True, pack=4)


@gluon.jit
def tile_of(first, second, L: gl.constexpr):
    {results} = gl.inline_asm_elementwise(HELD, HELD_C, [first, second], dtype=({kind},) * 8, is_pure=True, pack=4)
    even = gl.join(gl.join(x0, x4), gl.join(x2, x6))
    odd = gl.join(gl.join(x1, x5), gl.join(x3, x7))
    tile = gl.join(even, odd).permute((0, 7, 1, 5, 6, 2, 3, 4)).reshape((64, 64))
    return gl.convert_layout(tile, L, assert_trivial=True)


@gluon.jit
def half_of(x, i: gl.constexpr):
    first, second = x.reshape((x.shape[0], x.shape[1], 2, x.shape[2] // 2)).permute((0, 1, 3, 2)).split()
    return first if i == 0 else second


@gluon.jit
def added(part, rows, r):
    asm: gl.constexpr = "fma.rn.f32 $0, $1, $2, $3;"
    return gl.inline_asm_elementwise(asm, "=f,f,f,f", [part, rows, r], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def scales_of(x, L: gl.constexpr):
    rows = ({rows} * {factor(coded)}).permute((0, 2, 1)).reshape((64,))
    return gl.convert_layout(rows, gl.SliceLayout(1, L), assert_trivial=True)


{ONE_OF}"""


def begin(t: Text, coded: Coded) -> None:
    """How threads hold words, and what belongs to their rows."""
    halves = coded.bits // 4
    t.do(f"V: gl.constexpr = gl.BlockedLayout([1, {halves}, 1, 4], [1, 1, 32, 1], [4, 1, 1, 1], [3, 2, 1, 0])")
    t.do("W: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2, 2], [1, 8, 4, 1, 1], [4, 1, 1, 1, 1], [4, 3, 2, 1, 0])")
    for name in coded.descriptors[1:]:
        per_thread = [1, coded.runs(name), 1, coded.run(name)]
        t.do(f"P_{name[:-5]}: gl.constexpr = gl.BlockedLayout({per_thread}, [1, 1, 8, 4], [4, 1, 1, 1], [3, 2, 1, 0])")
    t.do("F: gl.constexpr = gl.DotOperandLayout(0, L, 4)")
    t.do("blank = gl.zeros((4, 8, 4, 2, 2), gl.int32, W)")


def parts(columns: int) -> list[str]:
    """What sums of so many columns are called: as many at a time as are multiplied at once."""
    return ["r"] if columns <= MOST_COLUMNS else [f"r{i}" for i in range(columns // MOST_COLUMNS)]


def products(t: Text, coded: Coded, rows: int, columns: int, num_stages: int, right: str, steps: tuple[str, str]) -> None:
    """Adds to `parts` the products of warpgroup `g` in steps from one to another along K, from stage `s` of the ring on, with
    what `right` names of stage `of`; warpgroups that take turns ask for those of a group one after the other, so that one
    has its products done while the other one scales.

    While a block is multiplied the next one's codes are made bytes, and words of the next step are read, after the last one
    those that are there. (Bytes made for the next step would be moved on where products under way read theirs: ptxas would let
    each end before the next one starts.)
    """
    first, last = steps
    each, acc = every(coded), "int32" if coded.operand.is_integer else "float32"
    width, at_once, turns = min(each, BLOCK), min(columns, MOST_COLUMNS), in_turns(coded, columns)
    t.do("mbarrier.wait(ready.index(s), phase)")
    _read(t, coded, rows, "s", "")
    with t.block(f"for k in range({first}, {last}):"):
        _beside(t, coded)
        _bytes(t, coded, 0)
        t.do("of = s")
        t.do(f"s, phase = advance(s, phase, {num_stages})")
        for i, at in product(range(columns // at_once), range(0, STEP, width)):
            a = f"tile_of(a{at // BLOCK}, c{at // BLOCK}, F)"
            if width < BLOCK:
                names = "a, other" if at % BLOCK == 0 else "other, a"
                t.do(f"{names} = half({a})")
                a = "gl.convert_layout(a, F, assert_trivial=True)"
            if at % each == 0:
                if turns:
                    t.do("mbarrier.wait(turns.index(g), turn)")
                    t.do("turn = turn ^ 1")
                t.do(f"acc = warpgroup_mma_init(gl.zeros((64, {at_once}), gl.{acc}, L))")
            b = right if at_once == columns else f"{right}.slice({i * at_once}, {at_once}, dim=0)"
            b = f"{b}.slice({at}, {width}, dim=1).permute((1, 0))"
            t.do(f"acc = warpgroup_mma({a}, {b}, acc, use_acc={at % each > 0}, is_async=True)")
            end = at + width
            last_of_all = end == STEP and i + 1 == columns // at_once
            if end % each == 0 and turns:
                t.do("mbarrier.arrive(turns.index(1 - g))")
            if last_of_all:
                t.do(f"mbarrier.wait(ready.index(s), phase, pred=k + 1 < {last})")
                t.do(f"there = gl.where(k + 1 < {last}, s, of)")
                _read(t, coded, rows, "there", "next_")
            elif end % BLOCK == 0 and end < STEP and i == 0:
                _bytes(t, coded, end // BLOCK)
            if end % each == 0:
                t.do("part = warpgroup_mma_wait(0, deps=(acc,))")
                if last_of_all:
                    t.do("mbarrier.arrive(empty.index(of))")
                r = parts(columns)[i]
                if at_once == columns:
                    t.do(f"{r} = gl.fma(part.to(gl.float32), rows{at // each}[:, None], {r})")
                else:
                    t.do(f"{r} = added(part.to(gl.float32), rows{at // each}[:, None], {r})")
        for name in _held(coded):
            t.do(f"{name} = next_{name}")


def _held(coded: Coded) -> list[str]:
    """Names of what a thread holds of a step."""
    return [*(f"words{b}" for b in range(coded.deep)), *(f"{b[:-5]}_words" for b in coded.buffers[1:])]


def _read(t: Text, coded: Coded, rows: int, stage: str, prefix: str) -> None:
    """Words of a warpgroup that are in a stage."""
    groups = rows // BLOCK
    shape = [groups * coded.deep, 4, coded.bits // 4, 32, 4]
    layout = "gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])"
    codes = f"{coded.buffers[0]}.index({stage})._reinterpret(gl.int32, {shape}, {layout})"
    for b in range(coded.deep):
        t.do(f"{prefix}words{b} = {codes}.index(g * {coded.deep} + {b}).load(V)")
    for buffer, name in zip(coded.buffers[1:], coded.descriptors[1:], strict=True):
        shape = [groups, 4, coded.runs(name), 8, coded.run(name)]
        own = buffer[:-5]
        t.do(f"{prefix}{own}_words = {buffer}.index({stage})._reinterpret(gl.int32, {shape}, {layout}).index(g).load(P_{own})")


def _beside(t: Text, coded: Coded) -> None:
    """Scales for a warpgroup's rows, of each sum of step `k`, and zero points as they came."""
    for name in coded.descriptors[1:]:
        own, words = name[:-5], coded.run(name) * coded.runs(name)
        t.do(f"{own} = {own}_words.permute((0, 2, 1, 3)).reshape((4, 8, {words}))")
        coded.choose(t, own, name)
    for i in range(STEP // every(coded)):
        t.do(f"rows{i} = scales_of({_part('scale', i, coded.deep * coded.subs)}, L)")


def _bytes(t: Text, coded: Coded, block: int) -> None:
    """What a warpgroup multiplies, rows g and rows g + 8, of the words of one block along K."""
    words, given = f"words{block}.reshape((4, 8, 4, 2, 2))", ["words"]
    if coded.bits == 8:
        words, given = f"words{block}.reshape((4, 2, 8, 4, 2, 2)).permute((0, 2, 3, 4, 5, 1)).split()", ["words", "more"]
    t.do(f"{', '.join(given)} = {words}")
    given = [f"gl.convert_layout({name}, W, assert_trivial=True)" for name in given]
    if coded.zeros:
        own, at, of_rows = _part("zero", block, coded.deep), ":", "gl.SliceLayout(2, gl.SliceLayout(4, W))"
        if coded.subs == 1:
            own, at, of_rows = f"{own}.reshape((4, 8))", "None", "gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, W)))"
        given.append(f"gl.convert_layout({own}, {of_rows}, assert_trivial=True)[:, :, None, {at}, None] + blank")
    t.do(f"a{block}, c{block} = bytes_of({', '.join(given)})")


def _part(name: str, i: int, count: int) -> str:
    """The i-th of so many parts of neighbours."""
    return name if count == 1 else f"half_of({_part(name, i // 2, count // 2)}, {i % 2})"
