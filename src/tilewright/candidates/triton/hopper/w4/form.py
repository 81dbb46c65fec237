"""What a kernel of few rows and weights of few bits depends on, and the constants of `_kernel.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from tilewright.candidates.triton.hopper.w4.convert import halves, twice, widened
from tilewright.candidates.triton.hopper.w4.pack import MAGIC, bias
from tilewright.candidates.triton.hopper.w4.plan import Plan
from tilewright.dtype import F16, F32

X_AT = 1024  # in shared memory: what swizzling wants; before it a barrier
BARRIER_AT = 512
FEW = 2  # words of a row that a load brings where all loads are written out: with more of them registers run out
SMALL = (18, 22)  # codes at bits 6 and 2 of a half without an exponent are this many powers of two too small (f16: 2**-24)


@dataclass(frozen=True)
class KernelConfig:
    """What the kernel is compiled for; `Point` and `Form` say more of those they have."""

    cluster: int
    clusters: int
    row_warps: int
    k_warps: int
    warps: int
    tiles: int
    depth: int
    chunks: int
    early: int
    lag: int
    soon: int
    wide: bool
    out_tile: int
    columns: int
    rows: int  # of the other operand
    blocks: int
    packed_rows: int
    row_tiles: int
    again: bool
    between: int
    chunk_depth: int
    chunk_bytes: int
    body: int
    turns: int
    sums: int
    direct: bool
    small: bool
    sums_at: int
    sums_each: int
    parts_at: int
    sent_at: int
    shared_bytes: int
    halves: int  # rows of the weights that make a column of the results
    own_outs: int
    subs: int
    half: str  # what is multiplied: "f16" or "bf16"
    bits: int  # of a code
    rounded: bool  # codes are scaled before they are multiplied; else sums are scaled
    zeros: bool  # there are zero points
    scale_dtype: str
    pieces: int  # of 16 bytes, as the other operand is stored, in 64 columns
    widen_asm: str  # a statement that makes a piece of 8-bit codes halves
    halves_asm: str  # a statement that makes a step's codes halves, and its constraints
    halves_operands: str
    one: int  # two ones as a word
    enlarged: tuple[float, ...]  # what sums of `small` codes are multiplied by beside their scales, of rows g and g + 8
    excess: tuple[float, ...]  # what is taken off them, or factors and summands that make it of zero points
    # See `Stream`:
    stream_words: tuple[int, ...]
    stream_run: tuple[int, ...]
    stream_width: tuple[int, ...]
    stream_blocks: tuple[int, ...]
    stream_ahead: tuple[int, ...]
    stream_even: tuple[bool, ...]
    stream_loads: tuple[tuple[tuple[int, int, int], ...], ...]


@dataclass(frozen=True)
class Stream:
    """Words that a warp reads along K in loads, some of them under way.

    Attributes:
        words: that a lane has of a block of 64 columns.
        run: words of a pair of rows that lie together (`pack.paired_rows`).
        width: words of a load.
        blocks: that share loads.
        ahead: loads under way.
        even: a warp's first block is where its words begin.
        loads: in the order of their use: first block, where the tile of 16 rows begins, first word.
    """

    words: int
    run: int
    width: int
    blocks: int
    ahead: int
    even: bool
    loads: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Point:
    """Sizes of a kernel.

    Attributes:
        wide: products by `wgmma`, else by `mma.sync`.
        clusters: that are started; each has every so many-th row tile.
        cluster: blocks that share K.
        row_warps, k_warps: of a block.
        tiles: of 16 rows that a warp has.
        depth: blocks of 64 columns that a warp has.
        chunks: in which the other operand comes to shared memory, two of them at a time.
        ahead: loads of weights under way.
        early: of those, before the kernel waits for the one before it.
        loop: blocks of 64 columns that a loop takes at a time, the next ones' weights being under way; 0: all blocks are
            written out.
        lag: products by `wgmma` under way while others are prepared: 0 none, 1 while codes are made halves, 2 while sums are
            scaled, too.
        soon: 1 if the next kernel may start when the one before has ended; 0: when sums are complete.
        together: blocks that share an SM's registers; 0: as many as have 16 warps.
    """

    wide: bool
    clusters: int
    cluster: int
    row_warps: int
    k_warps: int
    tiles: int
    depth: int
    chunks: int
    ahead: int
    early: int
    loop: int = 0
    lag: int = 0
    soon: int = 0
    together: int = 0

    @property
    def warps(self) -> int:
        return self.row_warps * self.k_warps

    @property
    def registers(self) -> int:
        """Of a thread."""
        if self.together:
            return min(65536 // (32 * self.warps * self.together) // 8 * 8, 255)
        return 65536 // (32 * max(self.warps, 16))

    @property
    def out_tile(self) -> int:
        """Rows of the weights of a block."""
        return 16 * self.row_warps * self.tiles


@dataclass(frozen=True)
class Form:
    """A kernel: a plan at a point."""

    plan: Plan
    point: Point

    @property
    def columns(self) -> int:
        """Rows of the other operand, filled up to what is multiplied at once."""
        return max(8, 1 << (self.plan.rows - 1).bit_length())

    @property
    def blocks(self) -> int:
        """Of 64 columns of K."""
        return self.plan.K // 64

    @property
    def local_blocks(self) -> int:
        """Of a thread block."""
        return self.point.k_warps * self.point.depth

    @property
    def chunk_depth(self) -> int:
        """Blocks of 64 columns that a warp has of a chunk."""
        return self.point.depth // self.point.chunks

    @property
    def chunk_bytes(self) -> int:
        """Of shared memory."""
        return self.point.k_warps * self.chunk_depth * self.columns * 128

    @property
    def even(self) -> bool:
        """Every warp has as much of K."""
        return self.local_blocks * self.point.cluster == self.blocks

    @property
    def row_tiles(self) -> int:
        return -(-self.plan.weight_rows // self.point.out_tile)

    @property
    def grid(self) -> int:
        return self.point.clusters * self.point.cluster

    @property
    def again(self) -> bool:
        """A cluster has several row tiles."""
        return self.point.clusters < self.row_tiles

    @property
    def between(self) -> int:
        """Tiles of 16 rows from one of a warp's to the next."""
        return self.point.row_warps if self.point.wide else 1

    @property
    def code_loads(self) -> int:
        """Loads of 16 bytes for a tile of a warp."""
        return self.plan.weights.kind.bits // 4

    @property
    def sums(self) -> int:
        """Of a block's tile."""
        return self.point.out_tile * self.columns

    @property
    def own_rows(self) -> int:
        """Rows of the weights that a block finishes."""
        return self.point.out_tile // self.point.cluster

    @property
    def own_outs(self) -> int:
        """Columns of the results that a block finishes."""
        return self.own_rows // self.plan.halves

    @property
    def direct(self) -> bool:
        """A warp's sums are sent to the block that finishes them as they are."""
        return self.point.k_warps == 1 and self.point.cluster > 1

    @property
    def small(self) -> bool:
        """Codes are multiplied as they stand in their words, the other operand's sums being to hand."""
        w, p = self.plan.weights, self.point
        return not (p.wide or p.loop or w.rounded or p.chunks > 1) and (w.kind.bits, self.plan.half) == (4, F16)

    @property
    def sums_at(self) -> int:
        """Where sums of the other operand are: of each block of 64 columns and scale, in four parts."""
        return X_AT + min(self.point.chunks, 2) * self.chunk_bytes

    @property
    def sums_each(self) -> int:
        """Bytes of those sums of a block of 64 columns."""
        return 64 // self.plan.weights.sub * self.columns * 16

    @property
    def sums_bytes(self) -> int:
        """Of those sums."""
        return self.local_blocks * self.sums_each if self.small else 0

    @property
    def parts_at(self) -> int:
        """Where sums of the block's warps meet: where the other operand was, if it is not needed again."""
        return self.sums_at + self.sums_bytes if self.again else X_AT

    @property
    def sent_at(self) -> int:
        """Where the cluster's blocks send sums: where none of them reads the other operand."""
        own = 0 if self.direct else self.point.k_warps * self.sums * 4
        return max(self.sums_at + self.sums_bytes, self.parts_at + own)

    @property
    def shared_bytes(self) -> int:
        """The other operand, sums of the block's warps, and what the cluster's blocks send, if need be of two row tiles."""
        sent = self.sums * 4 * (2 if self.again else 1) if self.point.cluster > 1 else 0
        return -(-(self.sent_at + sent) // 512) * 512

    @property
    def subs(self) -> int:
        """Scales of a row along a block."""
        return 64 // self.plan.weights.sub

    @property
    def body(self) -> int:
        """Blocks of 64 columns that are written out."""
        return self.point.loop or self.point.depth

    @property
    def turns(self) -> int:
        """Of the loop over them."""
        return self.point.depth // self.body

    def streams(self) -> list[Stream]:
        """Of words of codes, of scales and maybe of zero points."""
        w, p = self.plan.weights, self.point
        found = [self._stream(4 * self.code_loads, 4, 4, 1, p.ahead, self.even)]
        for each in (self.subs * (2 if w.scales is F32 else 1), self.subs)[: w.tensors - 1]:
            run = math.gcd(4, self.blocks * each)
            even = self.even and p.depth * each % run == 0
            width = run if p.loop else math.gcd(run, max(each, FEW)) if even else math.gcd(run, each)
            found.append(self._stream(each, run, width, p.loop or max(width // each, 1), 0, even))
        return found

    def _stream(self, words: int, run: int, width: int, blocks: int, ahead: int, even: bool) -> Stream:
        """A stream of as many loads ahead, or of two groups of blocks, or all of them, so that they take turns in registers."""
        row, tiles, loads = self.blocks * words, self.point.tiles, []
        parts = words * blocks // width
        for group, tile, part in product(range(-(-self.body // blocks)), range(tiles), range(parts)):
            down = tile * self.between
            if ahead:  # codes, of which words of 64 rows are neighbours
                down = down // 4 * row * 128 if self.point.wide else down * words * 32
            else:
                down *= row * 8
            loads.append((group * blocks, down, part * width))
        if self.point.loop or (not ahead and len(loads) % (2 * tiles * parts)):
            ahead = len(loads)
        return Stream(words, run, width, blocks, ahead or 2 * tiles * parts, even, tuple(loads))

    @property
    def config(self) -> KernelConfig:
        """The kernel's constants."""
        w, p, half = self.plan.weights, self.point, self.plan.half
        made, units = halves(w, half, small=self.small), [2.0**-s for s in SMALL]
        excess = [-bias(w.kind, half) * u for u in units]
        if w.zero is not None:
            excess = [-u for u in units] + [m * u for m, u in zip(MAGIC[w.kind.bits, half.name], units, strict=True)]
        streams = self.streams()
        found: dict[str, Any] = {
            "early": min(p.early, streams[0].ahead),
            "rows": self.plan.rows,
            "packed_rows": self.plan.packed_rows,
            "halves": self.plan.halves,
            "half": half.name,
            "bits": w.kind.bits,
            "rounded": w.rounded,
            "zeros": w.zero is not None,
            "scale_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[w.scales.name],
            "pieces": self.plan.operand.bits // 2,
            "widen_asm": widened(self.plan.operand) if self.plan.operand.bits == 8 else "",
            "halves_asm": made.text,
            "halves_operands": made.constraints,
            "one": twice(1.0, half),
            "enlarged": tuple(2.0**s for s in SMALL),
            "excess": tuple(excess),
            **{f"stream_{f.name}": tuple(getattr(s, f.name) for s in streams) for f in fields(Stream)},
        }
        own = {
            f.name: getattr(self if hasattr(self, f.name) else p, f.name) for f in fields(KernelConfig) if f.name not in found
        }
        return KernelConfig(**own, **found)
