"""Sizes of attention on Hopper that holds whole rows of scores (`_rows.py`): which fit, and which are best."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.candidates.triton.attention.heads import Heads
from tilewright.candidates.triton.attention.kernel import power
from tilewright.candidates.triton.hopper.gemm.tma import TmaView, tma_view
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param
from tilewright.lowering.access import Access, AccessMap

HELD = 224  # registers of a thread that scores and result may take
ROWS = 64  # queries of a warpgroup
WIDEST = 128  # keys of a product
LEAVING = 2 << 10  # bytes by which a warpgroup's results are exchanged among threads
GROUPS = 2  # warpgroups of a block that stays
AHEAD = 2  # heads whose keys and values it has in shared memory


@dataclass(frozen=True)
class Ring:
    """Sizes of a kernel through whose shared memory keys and values pass.

    Attributes:
        stages: chunks of `WIDEST` keys, and of their values, that are there.
        groups: warpgroups that multiply, by 64 queries each.
        turns: one after the other is at its exponentials.
        overlapped: a product's wait is held back until the exponentials that it goes on beside are done; rows are gone
            through in four parts at once.
    """

    stages: int
    groups: int
    turns: bool
    overlapped: bool


@dataclass(frozen=True)
class Point:
    """Sizes of a kernel.

    Attributes:
        splits: blocks that share a head's queries.
        ones: weights are added up by the matrix unit, as their product with ones: fewer instructions and registers.
        ring: keys and values pass through shared memory, however many there are (`_flash.py`).
        streamed: blocks stay, two warpgroups each, and have the next head brought meanwhile (`_rows.py`).
    """

    splits: int
    ones: bool
    streamed: bool = False
    ring: Ring | None = None

    @property
    def by_tma(self) -> bool:
        """Tell whether TMA brings the operands."""
        return self.streamed or self.ring is not None


@dataclass(frozen=True)
class Chunk:
    """Keys of one product: where they start, and how many there are (zeros beyond the last)."""

    start: int
    extent: int


def chunks(keys: int) -> list[Chunk]:
    """So many keys, as they are multiplied."""
    padded = -(-keys // ROWS) * ROWS
    return [Chunk(start, min(WIDEST, padded - start)) for start in range(0, padded, WIDEST)]


def last_seen(heads: Heads, tile: int) -> int:
    """How many keys a tile of queries sees, at most."""
    if heads.causal == "no":
        return heads.keys
    shift = heads.keys - heads.queries if heads.causal == "lower" else 0
    return min((tile + 1) * ROWS + shift, heads.keys)


def shared_bytes(heads: Heads, point: Point) -> int:
    """What a block keeps there: keys, values, one tile of queries, and some of the results on their way out."""
    each, width = heads.unit.bits // 8, power(heads.width)
    depth_bytes = power(heads.depth) * (each if heads.q.codes is None else 1)
    keys = sum(c.extent for c in chunks(heads.keys))
    ones = 8 * WIDEST * each if point.ones else 0
    if point.streamed:
        keys = len(chunks(heads.keys)) * chunks(heads.keys)[0].extent
        mask = 0 if heads.mask is None else 4 * keys
        own = ROWS * depth_bytes + LEAVING  # of a warpgroup
        return AHEAD * (keys * (depth_bytes + width * each) + mask) + GROUPS * own + ones + 512  # barriers
    return keys * (depth_bytes + width * each) + ROWS * depth_bytes + LEAVING + ones


def registers(heads: Heads) -> int:
    """Of a thread, for its part of the scores and the result."""
    return (sum(c.extent for c in chunks(heads.keys)) + power(heads.width)) // 2


def stages(heads: Heads, groups: int, shared: int) -> int:
    """Chunks that shared memory has room for."""
    each = heads.unit.bits // 8
    depth_bytes = power(heads.depth) * (each if heads.q.codes is None else 1)
    left = shared - groups * (ROWS * depth_bytes + LEAVING) - 1024  # barriers and the like
    return min(left // (WIDEST * (depth_bytes + power(heads.width) * each + 4)), 4)


def unaligned(heads: Heads) -> str | None:
    """A sentence, unless all rows of the operands lie in memory as copies of 16 bytes take them."""
    for name, operand in (("queries", heads.q), ("keys", heads.k), ("values", heads.v)):
        each = 128 // operand.dtype.bits
        place = _place(operand.at) if operand.reads_nothing_as_zero else None
        if place is None:
            return f"its {name} are worked out from other values"
        along = [t for t in place.columns if t.inner == 1]
        steady = len(place.columns) == len(along) == 1 and along[0].stride == 1 and along[0].extent >= operand.at.columns_extent
        if not steady or any(n % each for n in (place.offset, *(t.stride for t in place.rows))):
            return f"rows of its {name} do not lie in pieces of 16 bytes"
    return None


@dataclass(frozen=True)
class Brought:
    """An operand as TMA brings it: the source, and the array, whose boxes are tiles of queries or chunks of keys."""

    source: int
    array: TmaView


def brought(heads: Heads) -> tuple[Brought, Brought, Brought] | None:
    """Queries, keys and values; None where TMA cannot bring one."""
    found: list[Brought] = []
    key_heads = heads.batch * heads.heads // heads.shared
    for operand, extent, rows, batch, width in (
        (heads.q, heads.queries, ROWS, heads.batch * heads.heads, heads.depth),
        (heads.k, heads.keys, chunks(heads.keys)[0].extent, key_heads, heads.depth),
        (heads.v, heads.keys, chunks(heads.keys)[0].extent, key_heads, heads.width),
    ):
        leaf, place = leaf_of(operand.at), _place(operand.at)
        assert leaf is not None and isinstance(leaf.op, Param) and place is not None
        array = tma_view(place, batch, extent, width, rows, power(width), operand.dtype.bits // 8)
        if array is None or array.m_major:
            return None
        found.append(Brought(leaf.op.index, array))
    return found[0], found[1], found[2]


def _place(at: Access) -> AccessMap | None:
    leaf = leaf_of(at)
    return None if leaf is None else at.of_leaf(leaf)


def leaf_of(at: Access) -> Node | None:
    leaves = [n for n in at.views if isinstance(n.op, Param)]
    return leaves[0] if len(leaves) == 1 else None


def blocks(heads: Heads, point: Point, multiprocessors: int) -> int:
    """Of the whole kernel."""
    if point.ring:
        return min(multiprocessors, heads.batch * heads.heads * -(-heads.queries // (point.ring.groups * ROWS)))
    if point.streamed:
        return min(multiprocessors, heads.batch * heads.heads)
    return heads.batch * heads.heads * point.splits


def expected(heads: Heads, point: Point, multiprocessors: int, shared: int) -> float:
    """How long a kernel takes, in tiles of queries that one block works at: its rounds of blocks, each of which waits for
    keys and values first."""
    tiles = -(-heads.queries // ROWS)
    if point.ring:  # measured: a round of a ring over 384 keys, as 1.36 or 1.05 tiles, of blocks that stay, as half a tile each
        rounds = math.ceil(heads.batch * heads.heads * math.ceil(tiles / point.ring.groups) / multiprocessors)
        each = (1.36 if point.ring.groups == 3 else 1.05) * (1.2 if heads.causal != "no" else 1.0)
        return 1.0 + rounds * each
    if point.streamed:
        return 1.0 + math.ceil(heads.batch * heads.heads / multiprocessors) * tiles * 0.52
    at_once = max(min(shared // (shared_bytes(heads, point) + 1024), 2), 1)
    rounds = math.ceil(blocks(heads, point, multiprocessors) / (multiprocessors * at_once))
    return rounds * (1.0 + math.ceil(tiles / point.splits))


def points(heads: Heads, multiprocessors: int, shared: int) -> list[Point]:
    """That fit, best guess first."""
    found: list[Point] = []
    if registers(heads) <= HELD:
        found += [Point(n, ones) for n in range(1, -(-heads.queries // ROWS) + 1) for ones in (False, True)]
        if heads.queries > ROWS and heads.v.codes is None and brought(heads) is not None:  # a tile of every head for each group
            found.append(Point(1, ones=True, streamed=True))
        found = [p for p in found if shared_bytes(heads, p) <= shared]
    groups = 1 if heads.queries <= ROWS else 3 if heads.width <= 64 and heads.causal == "no" else 2
    count = stages(heads, groups, shared)
    if heads.keys > ROWS and count > 1 and flows(heads):
        kinds = ((True, False), (True, True), (False, True), (False, False))  # turns, overlapped; sorting keeps this order
        kinds = kinds[2:] if groups == 1 else kinds
        found += [Point(1, ones=False, ring=Ring(count, groups, *kind)) for kind in kinds]
    return sorted(found, key=lambda p: expected(heads, p, multiprocessors, shared))


def flows(heads: Heads) -> bool:
    """Tell whether any number of keys may pass through shared memory."""
    by_keys = heads.mask is None or same_for_queries(heads, heads.mask)
    return by_keys and heads.v.codes is None and brought(heads) is not None


def same_for_queries(heads: Heads, mask: Access) -> bool:
    """Tell whether a mask hides the same keys from all queries of a head."""
    places = [mask.of_leaf(n) for n in toposort((mask.root,)) if isinstance(n.op, Param)]
    return all(term.inner % heads.queries == 0 for place in places for term in place.rows)
