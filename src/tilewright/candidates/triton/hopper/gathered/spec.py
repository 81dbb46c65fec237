"""One kernel of the gemm whose rows come from other ranks: its constants and arguments."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from tilewright.candidates.triton.hopper.gathered.protocol import WAIT
from tilewright.candidates.triton.hopper.gemm.plan import HopperGemm
from tilewright.candidates.triton.hopper.gemm.spec import Argument, KernelConfig, KernelSpec, spec_of
from tilewright.candidates.triton.hopper.gemm.tile import TileConfig
from tilewright.candidates.triton.hopper.gemm.tma import TMA_TYPES, descriptor
from tilewright.candidates.triton.runtime.copies import ARRIVED, LINE, PLACE

GROUP_M = 16


@dataclass(frozen=True, kw_only=True)
class GatheredConfig(KernelConfig):
    """The constants where rows are gathered (`_operand.py`); places are in words of 32 bits from the own words on."""

    rank_tiles: int  # tile rows of a rank
    piece_rows: int  # rows that have a flag
    shared_at: int  # of the scratch arguments, the first of the two pointers to memory that ranks share
    place_word: int  # where this rank's place is
    flags_word: int  # where the first rank's flags are
    flags_stride: int  # from one rank's flags to the next

    @property
    def gathers(self) -> bool:
        """Rows of the left operand come while the kernel runs."""
        return True


@dataclass(frozen=True)
class GatheredSpec(KernelSpec):
    """One kernel. Behind the problem's sources come the own rows, the own words, and the word that the host reads.

    Attributes:
        ranks: how many send rows.
        pieces: flags of a rank.
    """

    ranks: int
    pieces: int

    kernel: ClassVar[str] = "tilewright.candidates.triton.hopper.gathered._operand.gathered_gemm"

    @property
    def note(self) -> str:
        """Words of what Triton's cache does not know."""
        return f", waits as {hashlib.sha256(WAIT.encode()).hexdigest()[:12]}"

    @property
    def rank_rows(self) -> int:
        """Rows of a rank."""
        return self.plan.M // self.ranks

    @cached_property
    def config(self) -> GatheredConfig:
        """The kernel's constants."""
        return GatheredConfig(
            **vars(super().config),
            rank_tiles=self.rank_rows // self.tile.tile_m,
            piece_rows=self.rank_rows // self.pieces,
            shared_at=2 if self.tile.stream_k else 0,
            place_word=PLACE // 4,
            flags_word=ARRIVED // 4,
            flags_stride=LINE // 4,
        )

    @cached_property
    def operands(self) -> tuple[Argument, ...]:
        """All rows, the right operand, the own rows."""
        own = replace(self.plan.lhs, extents=(1, self.rank_rows, self.plan.K))
        view = own.view(self.config.rows, self.config.tile_k)
        kind = descriptor(TMA_TYPES[own.dtype.name], view.box)
        return (*super().operands, Argument("own_desc", kind, view, source=len(self.plan.problem.types)))

    @property
    def shared(self) -> tuple[int, ...]:
        """The numbers of the own words and of the host's word as sources."""
        count = len(self.plan.problem.types)
        return count + 1, count + 2

    @property
    def scratch(self) -> dict[str, str]:
        """The pointers of `KernelSpec`, and those."""
        return super().scratch | {"words": "*i32", "late": "*i32"}


def gathered_spec(plan: HopperGemm, tile: TileConfig, ranks: int, pieces: int) -> GatheredSpec:
    """The kernel of a tile configuration that fits."""
    base = spec_of(plan, tile)
    return GatheredSpec(base.plan, base.tile, base.acc, base.stores, ranks, pieces)


def fitting(tile: TileConfig, rows: int, cores: int) -> TileConfig | None:
    """The tile for ranks of so many rows each, its groups of tile rows within a rank's; None where tiles have rows of two.

    A multiprocessor is left to others: blocks that wait keep theirs, and a copy that the driver should make by a kernel would
    find no room on any rank.
    """
    clusters = 2 if tile.multicast else 1
    if tile.split_k > 1 or rows % (tile.tile_m * clusters):
        return None
    tiles = rows // tile.tile_m
    able = [g for g in range(1, GROUP_M + 1) if tiles % g == 0 and g % clusters == 0]
    return replace(tile, group_m=able[-1], blocks=min(tile.blocks, (cores - 1) // clusters * clusters))
