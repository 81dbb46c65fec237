"""The time that a product and what travels behind it take, in four steps for each chunk of rows: its tiles are multiplied, they
cross links, kernels behind add them up, and (in two shots) the sums cross links and are gone on with. It ranks points.

- Blocks of the product work on a round of tiles together, and store it when it ends. A chunk is complete with its last round,
  so what one round sends comes behind the product's end: of two rounds it is half of all. The fewer tile rows a chunk has, the
  more columns does a round read.
- Links take `REACHED` of what the chip's file states. A block has one or two subtiles of a warpgroup in shared memory; of a
  tile that leaves at once the others wait for the link, and are taken to hold up the next tile's products. On two H200s 4,096
  rows of 128 x 256 tiles, reduce-scattered, took 60 µs longer than product and sum; of nine points, tiles that warpgroups
  multiply in turns among them, none took less.
- What is paced leaves while the next tile is multiplied, so that a round is with the others later by most of a round.
- Kernels behind have the SMs that the product leaves, at `SM_GBPS` each, and all of memory's rate once it ends. Where a kernel
  adds up for all ranks, its programs fill those SMs, and the last kernel begins behind the product.

What it says of o_proj of Llama 3 70B, measured or not, is in docs/lab-notes/several-gpus.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.candidates.triton.hopper.gemm.space import work
from tilewright.candidates.triton.hopper.gemm.spec import KernelSpec, spec_of
from tilewright.schedule.cost import EXPOSED, LAUNCH_US, memory_us, predict_us

REACHED = 0.8  # of a link's rate
LINK_GBPS = 64.0  # where a chip's file names none
SM_GBPS = 80.0  # read and written by kernels on an SM: what 1,024 threads have under way in about a µs
ARRIVES_US = 2.0  # a flag, and who waits for it
BEGINS_US = 3.0  # a kernel behind, on SMs that were the product's
ADDS_US = 12.0  # a kernel that adds up, beside what it reads and writes: 512 rows in two shots took 87 µs


def expected_us(spec: KernelSpec, adders: int) -> float:
    """Microseconds of a call: a product whose tiles go to other ranks, programs that add up, and the kernel behind."""
    gemm, tile, config, c = spec.plan, spec.tile, spec.config, spec.chunks
    assert c is not None
    size, ranks, target = c.dtype.size_bytes(1), c.ranks, gemm.target
    link = REACHED * 1e3 * max((x.gbps for x in target.chip.links), default=LINK_GBPS)  # bytes in a µs
    to_links = (ranks - 1) * c.part * size  # of tiles; as many of sums
    tiles = gemm.tiles(tile)
    rounds = -(-tiles // tile.blocks)
    launch, per_round = LAUNCH_US["cuda"], to_links / rounds / link
    each = (float(predict_us(work(spec_of(gemm, tile)), target)) - launch) / rounds
    tall = config.chunk_m * (config.owners if config.mixed else 1)  # tile rows that come side by side
    wide = min(config.owner_n, -(-tile.blocks // tall))
    read = max(tall, -(-tile.blocks // config.owner_n)) * tile.tile_m + wide * tile.tile_n
    each += EXPOSED * memory_us(read * gemm.K * gemm.lhs.dtype.size_bytes(1), target)
    later = max(config.subtiles - config.store_buffers, 0) / config.subtiles
    if rounds > 1 and not spec.paced:
        each += per_round * later
    ends, free = launch + rounds * each, max(target.cores - tile.blocks, 0) * SM_GBPS * 1e3
    memory = 1e6 / memory_us(1_000_000, target)  # bytes in a µs

    def crossed(ready: Iterable[float], of_each: float, behind: float) -> list[float]:
        """Times at which what is ready is with the others: all but `behind` µs of it went before."""
        found, at = list[float](), 0.0
        for t in ready:
            at = max(at + of_each / link, t + behind)
            found.append(at + ARRIVES_US)
        return found

    def worked(ready: Iterable[float], of_each: float, early: float) -> list[float]:
        """Times at which a kernel behind has read and written so many bytes for each, at an `early` rate until the product
        ends."""
        found, at = list[float](), 0.0
        for t in ready:
            at, left = max(at, t), of_each
            if at < ends:
                took = min(left, (ends - at) * early)
                at, left = (at + took / early if took == left and early else ends + BEGINS_US), left - took
            at += left / memory
            found.append(at)
        return found

    rows = [min((i + 1) * c.chunk, c.rows) / c.rows for i in range(c.count)]
    done = [launch + -(-int(tiles * r) // tile.blocks) * each for r in rows]
    done = [min(t + each * later, ends) if spec.paced else t for t in done]
    here = crossed(done, to_links / c.count, min(per_round, to_links / c.count / link))
    sums = (ranks + 1) * c.part * size / c.count  # parts are read, sums are written
    if not c.spread:
        return worked(here, sums, free)[-1]
    sums += (ranks - 1) * c.part * size / c.count  # with all ranks
    added = [t + ADDS_US for t in worked(here, sums, free)]
    told = crossed(added, to_links / c.count, to_links / c.count / link)
    told = [max(t, 2 * to_links * (i + 1) / c.count / link + done[0]) for i, t in enumerate(told)]
    return worked(told, 2 * ranks * c.part * size / c.count, 0.0 if adders else free)[-1]
