"""The knobs of a Hopper kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileConfig:
    """One point of the space: the knobs of a kernel.

    Attributes:
        tile_m, tile_n, tile_k: rows and columns of a block's tile, elements of K of a stage: 128 bytes, the swizzle's width.
        num_stages: stages of the ring in shared memory.
        group_m: tile rows of a rasterisation group (swizzle).
        pingpong: each consumer owns whole tiles, every other one of the block's; while one multiplies the other one writes.
        deferred_store: a result waits in registers and leaves behind the first products of the next tile.
        vector_store: rows of a constant right operand are permuted so that a thread stores eight neighbours of a row.
        multicast: clusters of two blocks, each of which brings both half of the right operand.
        blocks: that are started.
        stream_k: tiles at the end of which every block has an even share of K, their parts added up in order.
        split_k: blocks of a cluster that have a share of K each, add up their sums, and finish a share of the columns each.
        expanded: packed codes are pre-expanded to bytes, as they are multiplied (`w4.tiles`); None, and no knob, elsewhere.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    num_stages: int
    group_m: int
    pingpong: bool
    deferred_store: bool
    vector_store: bool
    multicast: bool
    blocks: int
    stream_k: int
    split_k: int = 1
    expanded: bool | None = None
