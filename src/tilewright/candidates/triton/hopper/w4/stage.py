"""4-bit codes as the left operand of a Hopper kernel: TMA brings words of the weight beside a tile of the other operand, and
the warps that multiply make halves of theirs in registers, while the tensor cores are busy with the step before.

A block of 64 rows of the weight by 64 of K is packed in the order of the matrix unit's left fragment (`_w4_pack.py`): what a
thread reads, 16 bytes, is what it multiplies. Halves left in shared memory instead, by warps of their own, took 1.4 times as
long as the products: shared memory is as busy as the tensor cores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tilewright.candidates.triton.expressions.text import Text
from tilewright.candidates.triton.hopper.w4.asm import halves
from tilewright.candidates.triton.hopper.w4.plan import Weights
from tilewright.dtype import F32, DType

BLOCK = 64
BLOCK_BYTES = 2048  # its words
NAMES = ("codes_desc", "scale_desc", "zero_desc")
# Which of several neighbours that a thread holds are a step's, by the lowest bit of its number.
ONE_OF = """\
@gluon.jit
def one_of(x, k, COUNT: gl.constexpr):
    x = x.reshape((x.shape[0], x.shape[1], COUNT, x.shape[2] // COUNT)).permute((0, 1, 3, 2))
    even, odd = x.reshape((x.shape[0], x.shape[1], x.shape[2], COUNT // 2, 2)).split()
    return gl.where(k % 2 == 0, even, odd).permute((0, 1, 3, 2)).reshape((x.shape[0], x.shape[1], COUNT // 2 * x.shape[2]))"""


@dataclass(frozen=True)
class Coded:
    """The left operand as packed codes.

    Attributes:
        weights: how they stand for numbers, each of which is rounded to an `operand` of 16 bits.
        operand: type of the other operand: f16, bf16, or one of 8 bits (`_w4_bytes.py`).
        first: the number of the source with the codes; scales and maybe zero points are the next ones.
        blocks: of 64 along K.
        ready: codes are stored as the bytes that are multiplied, less their zero points.
    """

    weights: Weights
    operand: DType
    first: int
    blocks: int
    ready: bool = False

    @property
    def bits(self) -> int:
        """Of a code as it is stored."""
        return 8 if self.ready else self.weights.kind.bits

    @property
    def zeros(self) -> bool:
        """Zero points are stored, too."""
        return self.weights.zero is not None and not self.ready

    @property
    def descriptors(self) -> tuple[str, ...]:
        """What the kernel calls them."""
        return NAMES[: 3 if self.zeros else 2]

    @property
    def buffers(self) -> list[str]:
        """Where they come to."""
        return [f"{name[:-5]}_bufs" for name in self.descriptors]

    @property
    def deep(self) -> int:
        """Blocks along K of a step."""
        return 16 // self.operand.bits

    @property
    def subs(self) -> int:
        """Scales of a row along a block."""
        return BLOCK // self.weights.sub

    def needed(self, name: str) -> int:
        """Words of a pair of rows for a step."""
        return self.deep * self.subs * (2 if name == NAMES[1] and self.weights.scales is F32 else 1)

    def run(self, name: str) -> int:
        """Words of a pair of rows that lie together (`_w4_pack.paired_rows`)."""
        return math.gcd(4, self.blocks * self.needed(name) // self.deep)

    def runs(self, name: str) -> int:
        """Of those, how many a step needs."""
        return max(self.needed(name) // self.run(name), 1)

    def box(self, name: str, rows: int) -> list[int]:
        """Words that one copy brings: a step's codes, or what all of a tile's rows have for a step along K, or for some."""
        if name == NAMES[0]:
            return [rows // BLOCK, self.deep * self.bits * 2, BLOCK]
        return [rows // 16, 8 * self.run(name) * self.runs(name)]

    def choose(self, t: Text, own: str, name: str) -> None:
        """Of the words that came for some steps, which are last along an axis, those for step `k`."""
        count, divided = self.run(name) * self.runs(name) // self.needed(name), 1
        while count > 1:
            t.do(f"{own} = one_of({own}, k // {divided}, {count})")
            count, divided = count // 2, 2 * divided

    def copied_bytes(self, rows: int) -> int:
        """Of all copies for a step."""
        return sum(4 * math.prod(self.box(n, rows)) for n in self.descriptors)


def as_cut(name: str, packed: torch.Tensor) -> torch.Tensor:
    """Packed words as copies cut them."""
    return packed.view(packed.shape[0], -1, BLOCK) if name == NAMES[0] else packed.view(packed.shape[0], -1)


def prologue(coded: Coded) -> str:
    """The functions `halves_of`, words of a block and what belongs to them to a tile [64, 64] as the matrix unit takes it, and
    `one_of`."""
    asm = halves(coded.operand, coded.weights.kind, zeros=coded.weights.zero is not None)
    given = ", ".join(["words", "scale", *["zero"] * (coded.weights.zero is not None)])
    results = ", ".join(f"x{i}" for i in range(8))
    kind = "gl.bfloat16" if coded.operand.name == "bf16" else "gl.float16"
    return f"""HALVES = gl.constexpr({asm.text!r})
HALVES_C = gl.constexpr({asm.constraints!r})


@gluon.jit
def halves_of({given}, L: gl.constexpr):
    words = gl.convert_layout(words.reshape((4, 8, 4, 2, 2)), scale.type.layout, assert_trivial=True)
    {results} = gl.inline_asm_elementwise(HALVES, HALVES_C, [{given}], dtype=({kind},) * 8, is_pure=True, pack=2)
    even = gl.join(gl.join(x0, x4), gl.join(x2, x6))
    odd = gl.join(gl.join(x1, x5), gl.join(x3, x7))
    tile = gl.join(even, odd).permute((0, 7, 1, 3, 5, 6, 2, 4)).reshape((64, 64))
    return gl.convert_layout(tile, L, assert_trivial=True)


{ONE_OF}"""


def allocate(t: Text, coded: Coded, rows: int, num_stages: int) -> None:
    """Room for words beside the ring."""
    for name, buffer in zip(coded.descriptors, coded.buffers, strict=True):
        box = coded.box(name, rows)
        layout = f"gl.NVMMASharedLayout(0, 32, {len(box)})"
        t.do(f"{buffer} = gl.allocate_shared_memory(gl.int32, {[num_stages, *box]}, {layout})")


def copies(t: Text, coded: Coded, rows: int) -> None:
    """Asks for the words of stage `s`, step `k` of a tile of so many rows."""
    for name, buffer in zip(coded.descriptors, coded.buffers, strict=True):
        at = f"[pm * {rows // BLOCK}, k * {coded.box(name, rows)[1]}, 0]"
        if name != NAMES[0]:
            run = coded.run(name)
            at = f"[pm * {rows // 16}, k * {coded.needed(name)} // {run} * {8 * run}]"
        t.do(f"tma.async_copy_global_to_shared({name}, {at}, ready.index(s), {buffer}.index(s))")


def begin(t: Text, coded: Coded) -> None:
    """How threads hold words, and what belongs to their rows."""
    t.do("W: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2, 2], [1, 8, 4, 1, 1], [4, 1, 1, 1, 1], [4, 3, 2, 1, 0])")
    t.do("F: gl.constexpr = gl.DotOperandLayout(0, L, 2)")
    t.do("V: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])")
    t.do(f"P: gl.constexpr = gl.BlockedLayout([1, 1, {coded.run(NAMES[1])}], [1, 8, 4], [4, 1, 1], [2, 1, 0])")
    for axis, (name, extent) in enumerate((("along", 4), ("pair", 2), ("step", 2)), 2):
        layout = "W"
        for other in reversed([a for a in range(5) if a != axis]):
            layout = f"gl.SliceLayout({other}, {layout})"
        at = ", ".join(":" if a == axis else "None" for a in range(5))
        t.do(f"{name} = gl.arange(0, {extent}, {layout})[{at}]")
    t.do("blank = (along + pair + step) * 0")


def convert(t: Text, coded: Coded, rows: int) -> str:
    """The name of what warpgroup `g` multiplies in step `k`, of the words of stage `s`."""
    of_rows = "gl.SliceLayout(2, gl.SliceLayout(4, W))"
    if coded.subs == 1:
        of_rows = "gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, W)))"
    groups = rows // BLOCK
    codes, *beside = coded.buffers
    shape, layout = [groups, 128, 4], "gl.SwizzledSharedLayout(1, 1, 1, [1, 0])"
    t.do(f"words = {codes}.index(s)._reinterpret(gl.int32, {shape}, {layout}).index(g).load(V)")
    for buffer in beside:
        own, name = buffer[:-5], f"{buffer[:-5]}_desc"
        shape, layout = [groups, 4, 8, coded.run(name)], "gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])"
        t.do(f"{own} = {buffer}.index(s)._reinterpret(gl.int32, {shape}, {layout}).index(g).load(P)")
        coded.choose(t, own, name)
        shaped, at = (f"{own}.reshape((4, 8))", "None") if coded.subs == 1 else (own, ":")
        t.do(f"{own} = gl.convert_layout({shaped}, {of_rows}, assert_trivial=True)")
        t.do(f"{own} = {own}[:, :, None, {at}, None] + blank")
    t.do(f"a = halves_of({', '.join(['words', *(b[:-5] for b in beside)])}, F)")
    return "a"
