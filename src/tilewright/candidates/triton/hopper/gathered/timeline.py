"""The time that a product takes whose rows come while it runs: when they come, and which block works on which tile when.

Blocks take tiles in turn, this rank's own first. Those whose rows are not there wait, and what they wait for takes longer than
its bytes do: a tile that one block alone has is best where all its rows are there, smaller ones where they are not. On two
H200s a product of 512 rows (half of them another rank's, 4.2 MB) by 128 tiles of 128 x 160, of which every block has one, took
84 µs where it takes 58 alone; in four pieces 101.
"""

from __future__ import annotations

from tilewright.candidates.triton.hopper.gemm.plan import HopperGemm
from tilewright.candidates.triton.hopper.gemm.space import work
from tilewright.candidates.triton.hopper.gemm.spec import spec_of
from tilewright.candidates.triton.hopper.gemm.tile import TileConfig
from tilewright.schedule.cost import LAUNCH_US, predict_us

FIRST_US, PIECE_US = 7.0, 5.3  # before the first copy, and for each beside its bytes (fitted to the 84 and 101 µs above)
REACHED = 0.8  # of a link's rate
LINK_GBPS = 64.0  # where a chip's file names none


def came_us(gemm: HopperGemm, ranks: int, sent_bytes: int, pieces: int) -> list[float]:
    """Times at which pieces of the other ranks' rows are there, in order; ranks send so many bytes each."""
    gbps = REACHED * max((link.gbps for link in gemm.target.chip.links), default=LINK_GBPS)
    each = sent_bytes / pieces / gbps / 1e3 + PIECE_US
    return [FIRST_US + each * (i + 1) for i in range((ranks - 1) * pieces)]


def expected_us(gemm: HopperGemm, tile: TileConfig, ranks: int, sent_bytes: int, pieces: int) -> float:
    """The time of a product of whole tiles (`spec.fitting`), of which ranks send so many bytes to each other one."""
    alone, begins = float(predict_us(work(spec_of(gemm, tile)), gemm.target)), LAUNCH_US["cuda"]
    came, together = came_us(gemm, ranks, sent_bytes, pieces), 2 if tile.multicast else 1
    tiles, workers, height, group = gemm.tiles(tile), tile.blocks // together, tile.tile_m * together, tile.group_m // together
    of_rank, rows = tiles // ranks, gemm.M // ranks
    across = group * (of_rank * height // rows)  # tiles of a group of tile rows
    each, ends = (alone - begins) / -(-tiles // workers), [begins] * workers
    for i in range(tiles):
        rank, r = divmod(i, of_rank)  # this one, then the others as they come
        last = (r // across * group + r % across % group + 1) * height - 1  # row of the tile
        there = came[(rank - 1) * pieces + last * pieces // rows] if rank else 0.0
        ends[i % workers] = max(ends[i % workers], there) + each
    return max(ends)
