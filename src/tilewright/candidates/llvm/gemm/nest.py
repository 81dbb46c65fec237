"""The loop nest as data, in BLIS's terms: blocks of kc, mc and nc in the caches, mr x nr tiles in registers, and memory.

Sources: Goto and van de Geijn 2008 (doi 10.1145/1356052.1356053); Van Zee and van de Geijn 2015, BLIS (doi 10.1145/2764454).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilewright.candidates.llvm.gemm.dots import Choice, Dot
from tilewright.ir.dims import exactly
from tilewright.ir.extent import Extent
from tilewright.ir.graph import Node
from tilewright.lowering.access import Access
from tilewright.sizes import round_up

CACHE_LINE = 64
PREFETCHED = 4096  # bytes behind packed operands that kernels ask for in advance


def rounded(size: int, to: int = CACHE_LINE) -> int:
    return round_up(size, to)


@dataclass(frozen=True)
class Blocks:
    """Sizes of the nest, the knobs of its schedules: BLIS's mr, nr, kc, mc and nc, in elements.

    Attributes:
        instruction: as the chip's data names it.
        mr: rows of a tile of the result, and of a micro-panel of the left operand; the last one may have fewer.
        nr: columns of a tile, and of a micro-panel of the right operand: whole vectors.
        kc: of K in one pass; a multiple of a packed vector unless it is all of K.
        mc: rows of a block: whole micro-panels.
        nc: columns of a block: whole micro-panels.
        pack_lhs: the left operand is copied; else it is read where it lies.
        pack_per_thread: a thread takes whole matrices and packs what it multiplies itself, a block of the right operand
            at a time, so that packed data never leave its cache; else threads pack everything together first.
    """

    instruction: str
    mr: int
    nr: int
    kc: int
    mc: int
    nc: int
    pack_lhs: bool
    pack_per_thread: bool = False


@dataclass(frozen=True)
class Nest:
    """One product to generate.

    Attributes:
        batch: matrices that have a right operand of their own.
        M, K, N: extents of each product.
        choice: the instruction.
        lhs: the left operand, [batch * M, K].
        rhs: the right operand, by `k_contiguous` either [batch * N, K] or [batch * K, N].
        k_contiguous: K is the right operand's contiguous axis.
        constant: the right operand is packed beforehand, once.
        stores: the results.
        sources: pointers that a call is given before those of the results.
        blocks: the sizes.
        gate_up: the node that stands, in the stores, for sums of the right half of `rhs`'s columns, where the stores read both
            halves together; None if they do not. A micro-panel then holds nr / 2 columns of each, those of the left half first.
        amaxes: for each store whether it keeps the largest magnitude of its values alone; empty: none does.
    """

    batch: int
    M: int
    K: int
    N: int
    choice: Choice
    lhs: Access
    rhs: Access
    k_contiguous: bool
    constant: bool
    stores: tuple[Access, ...]
    sources: int
    blocks: Blocks
    gate_up: Node | None = None
    amaxes: tuple[bool, ...] = ()

    @property
    def dot(self) -> Dot:
        return self.choice.dot

    @property
    def nr(self) -> int:
        return self.blocks.nr

    @property
    def nv(self) -> int:
        """Vectors in a row of a tile."""
        return self.nr // self.dot.lanes

    @property
    def mc_panels(self) -> int:
        """Micro-panels of the left operand in a block."""
        return self.blocks.mc // self.blocks.mr

    @property
    def nc_panels(self) -> int:
        """Micro-panels of the right operand in a block."""
        return self.blocks.nc // self.nr

    @property
    def width(self) -> int:
        """Columns of the results that a micro-panel of the right operand makes."""
        return self.nr if self.gate_up is None else self.nr // 2

    @property
    def stored(self) -> int:
        """Columns of the results."""
        return self.N if self.gate_up is None else self.N // 2

    @cached_property
    def lhs_panels(self) -> int:
        """Micro-panels of the left operand, of mr rows, in a matrix."""
        return -(-self.M // self.blocks.mr)

    @cached_property
    def rhs_panels(self) -> int:
        """Micro-panels of the right operand, of nr columns, in a matrix."""
        return -(-self.N // self.nr)

    @cached_property
    def passes(self) -> int:
        """Blocks of K. One pass needs other code than several, so that an open K leaves a guard that tells them apart."""
        with exactly():
            several = self.blocks.kc < self.K
        return -(-self.K // self.blocks.kc) if several else 1

    @cached_property
    def prefetch_distance(self) -> int:
        """Cache lines of the next block of the right operand that each group of K prefetches: its share, if two or three
        micro-panels of the left one are all that a packed weight meets, so that memory is read while any of them is multiplied.
        Else 0."""
        few = self.constant and 1 < self.lhs_panels <= 3 and self.nc_panels == 1 and self.dot.tile == 1
        return -(-self.nv // (2 if isinstance(self.lhs_panels, Extent) else self.lhs_panels)) if few else 0

    def groups(self, k: int) -> int:
        """Groups of a lane's bytes that hold k elements of K: as many as the instruction takes at once, or a multiple."""
        return rounded(-(-k // self.dot.k), self.dot.steps)

    @property
    def last_mr(self) -> int:
        """Rows of the last micro-panel of the left operand."""
        return self.M - (self.lhs_panels - 1) * self.blocks.mr

    @property
    def heights(self) -> list[int]:
        """The rows that a tile may have: all up to mr, where it is not known how many are left over."""
        if isinstance(self.last_mr, Extent):
            return list(range(1, self.blocks.mr + 1))
        return sorted({self.last_mr} | ({self.blocks.mr} if self.lhs_panels > 1 else set()))

    # -- memory, in bytes

    @property
    def vector(self) -> int:
        """Elements of K in a packed vector."""
        return self.dot.lanes * self.dot.k

    @property
    def lhs_stride(self) -> int:
        """Stride between rows of a packed micro-panel: whole vectors, and one more so that rows do not meet in a cache set.
        Rows that an operand vector holds together take turns, a group each."""
        width = self.dot.vector_bytes
        return rounded(self.groups(min(self.blocks.kc, self.K)) * self.dot.lane_bytes, width) + width

    @property
    def lhs_panel_bytes(self) -> int:
        """Size of a micro-panel of the left operand in one pass."""
        return rounded(self.lhs_stride * rounded(self.blocks.mr, self.dot.rows))

    @property
    def rhs_panel_bytes(self) -> int:
        """Size of a micro-panel of the right operand over all of K; its passes follow one another."""
        return self.rhs_bytes_over(self.K)

    def rhs_bytes_over(self, k: int) -> int:
        """Size of a micro-panel of the right operand over k elements of K."""
        return self.groups(k) * self.nr * self.dot.lane_bytes

    @property
    def packed_rhs_bytes(self) -> int:
        panels = self.nc_panels if self.blocks.pack_per_thread else self.batch * self.rhs_panels
        return panels * self.rhs_panel_bytes + PREFETCHED

    @property
    def tile_bytes(self) -> int:
        """Size of a tile of the result as it waits for another pass or its epilogue."""
        return self.blocks.mr * self.nr * 4

    @property
    def compensation_at(self) -> int:
        """Offset of the rows' compensations, behind the packed left operand."""
        return self._matrices * self.passes * self.lhs_panels * self.lhs_panel_bytes if self.blocks.pack_lhs else 0

    @property
    def rhs_at(self) -> int:
        """Offset of the packed right operand."""
        return self.compensation_at + (rounded(self._matrices * self.M * 4) if self.choice.compensation else 0)

    @property
    def _matrices(self) -> int:
        """Matrices that are packed at a time."""
        return 1 if self.blocks.pack_per_thread else self.batch

    @property
    def threads_at(self) -> int:
        """Offset of the results in several passes, of the first thread or, packing per thread, of each."""
        return self.rhs_at + (0 if self.constant else rounded(self.packed_rhs_bytes))

    @property
    def thread_bytes(self) -> int:
        """Size of what each thread has to itself, behind what all share; of everything if nothing is shared."""
        results = self.mc_panels * self.nc_panels * self.tile_bytes if self.passes > 1 else 0
        return rounded(self.threads_at + results) if self.blocks.pack_per_thread else results

    def scratch(self, threads: int) -> int:
        shared = 0 if self.blocks.pack_per_thread else self.threads_at
        return shared + threads * self.thread_bytes + CACHE_LINE

    @property
    def pointers(self) -> int:
        """Number of pointers that a call passes: sources, results, what else it gives, scratch, packed right operand."""
        return self.sources + len(self.stores) + 3

    @property
    def given_at(self) -> int:
        """Index of the pointer to what a call gives beside tensors (`Module.given`)."""
        return self.pointers - 3
