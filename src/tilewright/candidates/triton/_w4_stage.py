"""What a Hopper kernel's loading warps do where the right operand is 4-bit codes: they make halves of them and leave those in
the ring, while the others multiply what came before.

A block of 64 columns of the result by 64 of K is read in the order of the matrix unit's left fragment (`_w4_pack.py`): that is
also the order in which threads hold a tile of sums, so what they computed is stored without exchanging anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from tilewright.candidates.triton._text import Text
from tilewright.candidates.triton._w4_asm import halves
from tilewright.candidates.triton._w4_plan import Weights
from tilewright.dtype import DType

WARPS = 4
BLOCK = 64


@dataclass(frozen=True)
class Coded:
    """The right operand as packed codes.

    Attributes:
        weights: how they stand for numbers, each of which is rounded to `operand`.
        operand: f16 or bf16.
        first: the number of the kernel's argument with the codes; scales and maybe zero points are the next ones.
        blocks: of 64 along K.
    """

    weights: Weights
    operand: DType
    first: int
    blocks: int

    @property
    def pointers(self) -> list[str]:
        """What the kernel calls them."""
        return [f"p{self.first + i}" for i in range(2 if self.weights.zero is None else 3)]

    @property
    def run(self) -> int:
        """Words of a row that lie together (`_w4_pack.paired_rows`)."""
        return math.gcd(4, self.blocks * self.subs)

    @property
    def subs(self) -> int:
        """Scales of a row along a block."""
        return BLOCK // self.weights.sub


def prologue(coded: Coded) -> str:
    """The function `halves_of`: words of a block, and what belongs to them, to a tile [64, 64] in the layout of sums."""
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
    return gl.convert_layout(tile, L, assert_trivial=True)"""


def begin(t: Text, coded: Coded) -> None:
    """Where a thread's words lie in a block, once for all tiles."""
    t.do("W: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2, 2], [1, 8, 4, 1, 1], [4, 1, 1, 1, 1], [4, 3, 2, 1, 0])")
    t.do("F: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])")
    for axis, (name, extent) in enumerate((("warp", 4), ("down", 8), ("along", 4), ("pair", 2), ("step", 2))):
        layout = "W"
        for other in reversed([a for a in range(5) if a != axis]):
            layout = f"gl.SliceLayout({other}, {layout})"
        at = ", ".join(":" if a == axis else "None" for a in range(5))
        t.do(f"{name} = gl.arange(0, {extent}, {layout})[{at}]")
    t.do("V: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])")
    t.do("lanes = gl.arange(0, 128, gl.SliceLayout(1, V))[:, None]")
    t.do("own = lanes * 4 + gl.arange(0, 4, gl.SliceLayout(0, V))[None, :]")
    t.do(f"beside = warp * {8 * coded.blocks * coded.subs} + down * {coded.run} + along * 0 + pair * 0 + step * 0")


def ahead(columns: int) -> int:
    """Steps along K whose words are under way: memory is further off than a step takes, and registers are few."""
    return 3 if columns <= 128 else 2


def start(t: Text, coded: Coded, columns: int, k: str, last: str) -> None:
    """Asks for a tile's words from step `k` on, of those before `last`."""
    for i in range(ahead(columns)):
        _ask(t, coded, columns, f"gl.minimum({k} + {i}, {last} - 1)", f"next{i}")


def _ask(t: Text, coded: Coded, columns: int, k: str, prefix: str) -> None:
    """Loads of the words of step `k` of a tile of so many columns, by names that begin with `prefix`."""
    for i in range(columns // BLOCK):
        block = f"(pn * {columns // BLOCK} + {i})"
        t.do(f"{prefix}_words{i} = gl.load({coded.pointers[0]} + ({block} * {coded.blocks} + {k}) * 512 + own)")
        for name, pointer in zip(("scale", "zero"), coded.pointers[1:], strict=False):
            i_along = f"({k} * {coded.subs} + pair * {coded.subs - 1})"
            along = f"{i_along} // {coded.run} * {8 * coded.run} + {i_along} % {coded.run}"
            t.do(f"{prefix}_{name}{i} = gl.load({pointer} + {block} * {32 * coded.blocks * coded.subs} + {along} + beside)")


def names(coded: Coded, columns: int, prefix: str) -> list[str]:
    """What a step's words, scales and zero points are called."""
    kinds = ["words", "scale", *["zero"] * (coded.weights.zero is not None)]
    return [f"{prefix}_{kind}{i}" for i in range(columns // BLOCK) for kind in kinds]


def follow(t: Text, coded: Coded, columns: int, last: str, unit: int, stage: str) -> None:
    """Leaves the words of step `k`, and asks for those of a later one, before `last`."""
    order = ["now", *(f"next{i}" for i in range(ahead(columns)))]
    for now, later in pairwise(order):
        for to, source in zip(names(coded, columns, now), names(coded, columns, later), strict=True):
            t.do(f"{to} = {source}")
    _ask(t, coded, columns, f"gl.minimum(k + {ahead(columns)}, {last} - 1)", order[-1])
    _leave(t, coded, columns, unit, stage, "now")


def _leave(t: Text, coded: Coded, columns: int, unit: int, stage: str, prefix: str) -> None:
    """Halves of the words, in the ring; `unit` rows to one of its buffers, `stage` the first buffer."""
    each = len(names(coded, BLOCK, prefix))
    for i in range(columns // BLOCK):
        given = ", ".join(names(coded, columns, prefix)[i * each : (i + 1) * each])
        buffer = f"b_bufs.index({stage} + {i * BLOCK // unit}).slice({i * BLOCK % unit}, {BLOCK}, 0)"
        t.do(f"{buffer}.store(halves_of({given}, F))")
    t.do("fence_async_shared()")
