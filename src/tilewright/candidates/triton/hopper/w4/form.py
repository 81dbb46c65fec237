"""What the text of a kernel of few rows and weights of few bits depends on."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.candidates.triton.hopper.w4.asm import Product
from tilewright.candidates.triton.hopper.w4.plan import Plan
from tilewright.dtype import F16

X_AT = 1024  # in shared memory: what swizzling wants; before it a barrier
BARRIER_AT = 512


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
    def spread(self) -> bool:
        """A warp's tiles of 16 rows lie apart, so that four warps have 64 rows together."""
        return self.point.wide

    @property
    def between(self) -> int:
        """Tiles of 16 rows from one of a warp's to the next."""
        return self.point.row_warps if self.spread else 1

    @property
    def code_loads(self) -> int:
        """Loads of 16 bytes for a tile of a warp."""
        return self.plan.weights.kind.bits // 4

    def block(self, kb: int) -> str:
        """A block of K of a warp, of those that exist: past the last one it is the last one again."""
        return f"gl.minimum(first + {kb}, {self.blocks - 1})"

    def along(self, kb: int, each: int, further: int) -> str:
        """Where a block of K lies from the warp's first one (from the first of all if they are not even), and further."""
        return str(kb * each + further) if self.even else f"{self.block(kb)} * {each} + {further}"

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
        return not (p.wide or w.rounded or p.chunks > 1) and (w.kind.bits, self.plan.half) == (4, F16)

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
    def product(self) -> Product:
        w = self.plan.weights
        return Product(
            self.plan.half,
            w.kind,
            w.scales,
            w.sub,
            w.zero is not None,
            w.rounded,
            self.columns,
            self.point.wide,
            self.small,
        )
