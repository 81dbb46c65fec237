"""Clusters of a GPU's blocks that hold whole rows of a product's result in their registers."""

from __future__ import annotations

from tilewright.hardware.target import Target

TILE_COLUMNS = (256, 192, 160, 128, 96, 64)  # that a block may have of a row
BLOCKS = (1, 2, 3, 4, 8)  # of a cluster; 8 are as many as any device starts together (CUDA C++ Programming Guide, 2.2.1)


def has_clusters(target: Target) -> bool:
    """Tell whether kernels for clusters are generated for a target: Hopper."""
    return target.kind == "cuda" and "sm_90" in target.features


def row_tiles(columns: int) -> list[tuple[int, int]]:
    """The ways to have a row of so many columns in equal tiles: columns of a tile, and blocks, each of which has one."""
    return [(n, columns // n) for n in TILE_COLUMNS if columns % n == 0 and columns // n in BLOCKS]
