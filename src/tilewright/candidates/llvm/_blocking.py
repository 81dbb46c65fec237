"""Which sizes a nest gets: a small model in cycles of a dot instruction, with the caches' sizes as the machine reports them.

The constants are rates of present processors, good to a factor of two: they only have to tell bad sizes from good ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilewright.candidates.llvm._dots import Dot
from tilewright.candidates.llvm._nest import Blocks
from tilewright.dtype import F32
from tilewright.hardware.target import Target

L1_BYTES, L2_BYTES = 32 << 10, 1 << 20  # where the machine reports none
SPREAD = 1.4  # cycles of a load that is not part of the dot itself, as a multiplication of f32 by one spread element can be
LATENCY = 4  # cycles until an accumulator can be added to again
NEAR, FAR = 16, 8  # bytes a cycle from the second-level cache, and from behind it
CALL = 60  # cycles of a micro-kernel call and of finishing its tile, besides those for each vector of the result
PARTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)  # that an extent may be cut into
WAYS = 8  # rows 4 KiB apart that the first-level cache holds together
TASK = 400  # cycles of taking a task from the counter
CLOSE = 1.02  # times that count as equal: then the wider tile is taken, whose rows are whole cache lines
FEW = 32  # rows below which a weight is read from memory about as fast as it is multiplied
WAIT = 0.25  # of the time of reading operands that is not hidden then
SHORT_BYTES = 1 << 15  # of the right operand that a task of few rows reads at least


def blocks_for(
    dot: Dot, target: Target, *, batch: int, rows: int, columns: int, depth: int, constant: bool, in_place: bool
) -> Blocks:
    """Sizes for `batch` products of `rows` x `depth` by `depth` x `columns`.

    Args:
        constant: the right operand is packed beforehand.
        in_place: the left operand may be read where it lies.
    """
    groups = max(1, -(-depth // dot.k))
    l1, l2 = (target.caches_bytes.get(n, 0) or least for n, least in (("L1d", L1_BYTES), ("L2", L2_BYTES)))
    # Whole matrices are dealt out only if that leaves no thread much longer at work than the others.
    private = not constant and (batch % target.cores == 0 or batch >= 8 * target.cores)
    few = constant and rows <= FEW
    nv, mr = _tile(dot, rows, columns, groups, few)
    tiles, panels, nr = -(-rows // mr), -(-columns // (nv * dot.lanes)), nv * dot.lanes
    kc = _pass(dot, mr, groups, l1, most=l2 // 8 // (nr * 4) if few and tiles > 1 else groups)
    panel = min(kc, groups) * nr * 4
    if private:
        mc, nc = 1, max(1, l2 // 4 // (groups * nr * 4))
    else:
        most = min(panels, max(1, (SHORT_BYTES if few else l2 // 2) // panel))
        if few:
            sizes = [(tiles, each) for each in range(1, most + 1)]
            if panels < 2 * target.cores:  # a panel is then read twice rather than that threads stand idle
                sizes += [(down, 1) for down in _parts(tiles)]
        else:
            sizes = [(down, across) for down in _parts(tiles) for across in {min(p, most) for p in _parts(panels)}]
        product = groups * mr * nv // dot.tile
        mc, nc = _block(target.cores, batch, tiles, panels, sizes, mr * groups * 4, panel, product)
    far_apart = depth * dot.lhs.bits % (8 * 4096) == 0 and mr > WAYS
    kc = depth if kc >= groups else kc * dot.k
    return Blocks(mr, nv, max(kc, 1), min(mc, tiles), min(nc, panels), not in_place or far_apart, private)


def shapes(dot: Dot) -> Iterator[tuple[int, int]]:
    """Vectors in a row of a tile, and the most rows for which everything stays in registers."""
    for nv in (8, 4, 3, 2, 1):
        most = dot.most_rows(nv)
        if most > 0:
            yield nv, most


def _tile(dot: Dot, rows: int, columns: int, groups: int, few: bool) -> tuple[int, int]:
    """(nv, mr): the quickest tile, among equals the widest. Of few rows, it waits a little for operands."""
    wait = WAIT if few else 0
    found: list[tuple[float, int, int]] = []
    for nv, most in shapes(dot):
        tiles = -(-rows // most)
        mr = _even(rows, tiles, most, dot.tile)
        panels = -(-columns // (nv * dot.lanes))

        def cycles(m: int, nv: int = nv) -> float:
            read, spread = nv * dot.lanes * 4 / NEAR, 0.0 if dot.lhs is F32 else SPREAD * (m + nv)
            return groups * (max(m * nv, LATENCY, read, spread) + wait * (read + m / 2)) + CALL + 3 * m * nv

        last = rows - (tiles - 1) * mr
        found.append((panels * ((tiles - 1) * cycles(mr) + cycles(last)), nv, mr))
    best = min(time for time, _, _ in found)
    return next((nv, mr) for time, nv, mr in found if time <= CLOSE * best)


def _even(rows: int, tiles: int, most: int, height: int) -> int:
    """Rows of a tile, the last having fewer: as even as can be without more registers of `height` rows."""

    def registers(mr: int) -> int:
        return (tiles - 1) * -(-mr // height) - (-(rows - (tiles - 1) * mr) // height)

    return min(range(-(-rows // tiles), min(rows, most) + 1), key=lambda mr: (registers(mr), mr))


def _pass(dot: Dot, mr: int, groups: int, l1: int, most: int) -> int:
    """Groups of K in a pass: a tile of the left operand stays in the first-level cache. Whole packed vectors, or all."""
    if mr * groups * 4 <= l1 * 3 // 2 and groups <= most:
        return groups
    room = min(l1 * 3 // 4 // (mr * 4), max(most, dot.lanes))
    passes = -(-groups // max(room, 1))
    return -(-groups // passes // dot.lanes) * dot.lanes


def _parts(size: int) -> set[int]:
    return {-(-size // n) for n in PARTS}


def _block(
    cores: int, batch: int, tiles: int, panels: int, sizes: list[tuple[int, int]], tile: int, panel: int, product: int
) -> tuple[int, int]:
    """(mc, nc): tiles and panels of a task, so that threads finish together and blocks are read from afar seldom.

    Args:
        sizes: to choose from.
        tile, panel: bytes of one.
        product: cycles of a tile times a panel.
    """

    def time(mc: int, nc: int) -> float:
        tasks = batch * -(-tiles // mc) * -(-panels // nc)
        return -(-tasks // cores) * (TASK + mc * nc * (product + CALL) + (mc * tile + nc * panel) / FAR)

    return min(sizes, key=lambda size: (time(*size), size))
