"""The configuration of the kernel for few rows: the knobs of its schedules, and the constants that `_kernel.py` is compiled
for.

K is counted in blocks of 64 columns, which are 128 bytes of activations in 16 bits, as wide as the swizzle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import product
from typing import NamedTuple

from tilewright.candidates.triton.hopper.w4.convert import Asm, dequantize_to_halves, widen
from tilewright.candidates.triton.hopper.w4.pack import MAGIC, bias, half_of
from tilewright.candidates.triton.hopper.w4.plan import BLOCK, PackedGemm
from tilewright.dtype import F16, F32, DType, dtype
from tilewright.ir.extent import Extent
from tilewright.schedule.candidate import Schedule, Unsupported
from tilewright.sizes import next_power_of_2, round_up

BARRIER_AT, X_AT = 512, 1024  # in shared memory: the cluster's barriers, activations aligned as the swizzle wants them
FEW = 2  # words of a row that a load brings where all of K is unrolled: with more of them registers run out
ENLARGED = (2.0**18, 2.0**22)  # what codes at bits 6 and 2 of a half without an exponent are too small by (f16: 2**-24)
ROOM = (8, 16, 32, 64)  # rows of the activations that are multiplied at once
MOST_PREFETCHED = 8  # loads of a warp in flight: with more of them activations wait
FEW_COLUMNS = 16  # more of them leave room for fewer loads in flight
EARLY = 4  # loads of those, before activations are asked for


class Load(NamedTuple):
    """A load of a stream: its offset in words from the warp's first one, and what that is made of."""

    offset: int
    block: int  # first block of 64 columns
    tile: int  # words to the tile of 16 rows
    word: int  # first word of the block's


@dataclass(frozen=True)
class Stream:
    """Words of one array that a warp reads along K, some loads ahead of their use.

    Attributes:
        words: words of a lane for a block of 64 columns.
        run: words of a pair of rows that are contiguous (`pack.paired_rows`).
        width: words of a load.
        blocks: blocks of 64 columns that share loads.
        prefetch: loads in flight.
        even: a warp's first block is where one of its loads begins.
        loads: loads of the unrolled blocks in the order of their use.
    """

    words: int
    run: int
    width: int
    blocks: int
    prefetch: int
    even: bool
    loads: tuple[Load, ...]


@dataclass(frozen=True)
class TileConfig:
    """The knobs of a schedule.

    Attributes:
        wgmma: products by `wgmma`, else by `mma.sync`.
        clusters: clusters in the grid; each takes every so many-th row tile.
        cluster: blocks of a cluster, which share K (split-K over distributed shared memory).
        row_warps, k_warps: warps of a block along the rows of the weights and along K.
        warp_tiles: tiles of 16 rows that a warp has; 1 by `wgmma`.
        k_chunks: parts of K in which activations come to shared memory, two of them at a time.
        unroll: blocks of 64 columns of an iteration of the loop over K; 0: all of K is unrolled.
        in_flight: products by `wgmma` under way while others are prepared: 0 none, 1 while codes are dequantised, 2 while sums
            are scaled, too.
        occupancy: blocks that share an SM's registers.
        launch_early: the next kernel may be launched when the one before has ended (programmatic dependent launch), else when
            the sums of the last row tile are complete.
    """

    wgmma: bool
    clusters: int
    cluster: int
    row_warps: int
    k_warps: int
    warp_tiles: int
    k_chunks: int = 1
    unroll: int = 0
    in_flight: int = 0
    occupancy: int = 1
    launch_early: bool = False

    def schedule(self) -> Schedule:
        """The knobs by name."""
        return Schedule.of(**{f.name: getattr(self, f.name) for f in fields(TileConfig)})

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.row_warps * self.k_warps

    @property
    def registers(self) -> int:
        """The most registers of a thread."""
        return min(65536 // (32 * self.warps * self.occupancy) // 8 * 8, 255)

    @property
    def grid(self) -> int:
        """Blocks of a launch."""
        return self.clusters * self.cluster

    @property
    def cta_rows(self) -> int:
        """Rows of the weights of a block's tile."""
        return 16 * self.row_warps * self.warp_tiles


@dataclass(frozen=True, kw_only=True)
class KernelConfig(TileConfig):
    """The constants that the kernel is compiled for: a problem's extents and types beside the knobs, and what follows from
    them.

    Attributes:
        rows, K: extents of the activations; the most rows that there are room for, where the kernel leaves them open.
        open_rows: it does.
        weight_rows, packed_rows: rows of the weights that are multiplied, and as they are packed, filled up.
        accumulators: rows of the weights that make a column of the results: 2 where gate and up meet, else 1.
        activation, code, scale: names of element types.
        scale_k: codes along K for which a packed scale stands: 32 or 64.
        rounded: codes are scaled before they are multiplied; else sums are.
        zeros: there are zero points.
    """

    rows: int
    open_rows: bool
    K: int
    weight_rows: int
    packed_rows: int
    accumulators: int
    activation: str
    code: str
    scale: str
    scale_k: int
    rounded: bool
    zeros: bool

    @classmethod
    def of(cls, plan: PackedGemm, tile: TileConfig) -> KernelConfig:
        """A plan at a point of its space.

        Raises:
            Unsupported: its open number of rows is more than are multiplied at once for the shape at hand.
        """
        w, rows = plan.weights, plan.rows
        if isinstance(rows, Extent):
            rows = next((n for n in ROOM if plan.rows <= n), 0)
            if not rows:
                raise Unsupported(f"{plan.rows} rows are many")
        return cls(
            **vars(tile),
            rows=rows,
            open_rows=isinstance(plan.rows, Extent),
            K=plan.K,
            weight_rows=plan.weight_rows,
            packed_rows=plan.packed_rows,
            accumulators=plan.accumulators,
            activation=plan.operand.name,
            code=w.kind.name,
            scale=w.scales.name,
            scale_k=w.scale_k,
            rounded=w.rounded,
            zeros=w.zero is not None,
        )

    # -- extents

    @property
    def columns(self) -> int:
        """Rows of the activations, filled up to what is multiplied at once."""
        return max(8, next_power_of_2(self.rows))

    @property
    def row_tiles(self) -> int:
        """Tiles of a block's rows in the weights."""
        return -(-self.weight_rows // self.cta_rows)

    @property
    def persistent(self) -> bool:
        """A cluster has several row tiles."""
        return self.clusters < self.row_tiles

    @property
    def blocks(self) -> int:
        """Blocks of 64 columns in K."""
        return self.K // BLOCK

    @property
    def warp_blocks(self) -> int:
        """Blocks of 64 columns of a warp."""
        return -(-self.blocks // (self.cluster * self.k_warps))

    @property
    def cta_blocks(self) -> int:
        """Blocks of 64 columns of a thread block."""
        return self.k_warps * self.warp_blocks

    @property
    def chunk_blocks(self) -> int:
        """Blocks of 64 columns that a warp has of a chunk."""
        return self.warp_blocks // self.k_chunks

    @property
    def body(self) -> int:
        """Blocks of 64 columns that are unrolled."""
        return self.unroll or self.warp_blocks

    @property
    def iterations(self) -> int:
        """Iterations of the loop over a warp's part of K."""
        return self.warp_blocks // self.body

    @property
    def even(self) -> bool:
        """Every warp has as much of K."""
        return self.cta_blocks * self.cluster == self.blocks

    @property
    def cta_sums(self) -> int:
        """Elements of a block's tile of sums."""
        return self.cta_rows * self.columns

    @property
    def cta_outs(self) -> int:
        """Columns of the results that a block finishes."""
        return self.cta_rows // self.cluster // self.accumulators

    # -- types, and how codes become numbers

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return dtype(self.code).bits

    @property
    def half(self) -> DType:
        """The type that is multiplied: f16 or bf16."""
        return half_of(dtype(self.activation))

    @property
    def scale_dtype(self) -> str:
        """Gluon's name of the scales' type."""
        return {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[self.scale]

    @property
    def block_scales(self) -> int:
        """Scales of a row along a block of 64 columns."""
        return BLOCK // self.scale_k

    @property
    def x_vectors(self) -> int:
        """Vectors of 16 bytes, as the activations are stored, in 64 columns."""
        return dtype(self.activation).bits // 2

    @property
    def widen(self) -> str:
        """The statement that makes 16 bytes of 8-bit activations halves."""
        return widen(dtype(self.activation)) if self.x_vectors < 8 else ""

    @property
    def dequantize(self) -> Asm:
        """The statement that makes halves of the words of a block."""
        return dequantize_to_halves(
            dtype(self.code),
            self.half,
            zeros=self.zeros,
            rounded=self.rounded,
            scale_k=self.scale_k,
            subnormal=self.subnormal,
        )

    @property
    def subnormal(self) -> bool:
        """Codes are multiplied as they stand in their words, as subnormal f16, since sums of the activations are to hand by
        which they are corrected."""
        return not (self.wgmma or self.rounded or self.k_chunks > 1) and self.bits == 4 and self.half is F16

    @property
    def correction(self) -> tuple[float, ...]:
        """The numbers that are taken off subnormal codes, for rows g and g + 8; or factors, then summands, that make them of
        zero points."""
        units = [1 / e for e in ENLARGED]
        if not self.zeros:
            return tuple(-bias(dtype(self.code), self.half) * u for u in units)
        magic = MAGIC[self.bits, self.half.name]
        return (*(-u for u in units), *(m * u for m, u in zip(magic, units, strict=True)))

    # -- shared memory: activations, sums of them along K, sums of products; in bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk of activations."""
        return self.k_warps * self.chunk_blocks * self.columns * 128

    @property
    def x_sums_at(self) -> int:
        """The offset of sums of the activations: for each block of 64 columns and scale, in four parts."""
        return X_AT + min(self.k_chunks, 2) * self.chunk_bytes

    @property
    def x_sums_block_bytes(self) -> int:
        """Bytes of those sums of a block of 64 columns."""
        return self.block_scales * self.columns * 16

    @property
    def x_sums_end(self) -> int:
        """The offset behind those sums, if there are any."""
        return self.x_sums_at + (self.cta_blocks * self.x_sums_block_bytes if self.subnormal else 0)

    @property
    def partials_at(self) -> int:
        """The offset of the sums of the block's warps: where the activations were, if they are not needed again."""
        return self.x_sums_end if self.persistent else X_AT

    @property
    def sends_directly(self) -> bool:
        """A warp's sums are sent to the block that finishes them as they are."""
        return self.k_warps == 1 and self.cluster > 1

    @property
    def received_at(self) -> int:
        """The offset at which sums of the cluster's blocks arrive: where none of them reads activations."""
        own = 0 if self.sends_directly else self.k_warps * self.cta_sums * 4
        return max(self.x_sums_end, self.partials_at + own)

    @property
    def shared_bytes(self) -> int:
        """The size of all of it, with room for sums of two row tiles from the cluster's blocks if need be."""
        received = self.cta_sums * 4 * (2 if self.persistent else 1) if self.cluster > 1 else 0
        return round_up(self.received_at + received, 512)

    # -- loads of the weights

    @property
    def code_loads(self) -> int:
        """Loads of 16 bytes for a block of 64 columns of a warp's tiles."""
        return self.bits // 4 * self.warp_tiles

    @property
    def prefetch(self) -> int:
        """Loads of codes in flight; where row tiles follow one another, so many that they take turns in registers."""
        if self.unroll:
            return self.unroll * self.code_loads
        loads = self.warp_blocks * self.code_loads
        most = MOST_PREFETCHED if self.columns <= FEW_COLUMNS else MOST_PREFETCHED - 2
        return max(n for n in range(1, most + 1) if loads % n == 0) if self.persistent else min(loads, most)

    @property
    def early_prefetch(self) -> int:
        """Loads of those that are issued before the kernel waits for the one before it."""
        return min(EARLY, self.prefetch)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Streams of the codes, of the scales and maybe of the zero points."""
        found = [self._stream(self.bits, 4, 4, 1, self.even, self.prefetch)]
        for words in (self.block_scales * (2 if self.scale == F32.name else 1), self.block_scales)[: 1 + self.zeros]:
            run = math.gcd(4, self.blocks * words)
            even = self.even and self.warp_blocks * words % run == 0
            width = run if self.unroll else math.gcd(run, max(words, FEW)) if even else math.gcd(run, words)
            found.append(self._stream(words, run, width, self.unroll or max(width // words, 1), even, 0))
        return tuple(found)

    def _stream(self, words: int, run: int, width: int, blocks: int, even: bool, prefetch: int) -> Stream:
        """A stream. Codes have a `prefetch`; of the others two groups of blocks are in flight, or all of them, so that they
        take turns in registers."""
        tile, parts = (32 * words if prefetch else 8 * self.blocks * words), words * blocks // width
        loads: list[Load] = []
        for block, t, part in product(range(0, self.body, blocks), range(self.warp_tiles), range(parts)):
            word = block * words + part * width
            along = block * 128 * words + part * width * 32 if prefetch else word // run * run * 8 + word % run
            loads.append(Load(t * tile + along, block, t * tile, part * width))
        two = 2 * self.warp_tiles * parts
        prefetch = prefetch or (len(loads) if self.unroll or len(loads) % two else two)
        return Stream(words, run, width, blocks, prefetch, even, tuple(loads))
