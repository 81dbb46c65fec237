"""A product of many rows whose sums ranks add up: Hopper's persistent kernel stores each tile into the memory of the rank that
owns its rows, while it multiplies the next one. A kernel behind waits for the tiles of all ranks a chunk of rows at a time,
adds them up in the order of ranks with one rounding, and does what follows. Where all ranks want the sums (`all_reduce`), a
kernel between both adds them up and stores them into the memory of all (two shots); or tiles go to all ranks, each of which
adds up all rows (one shot), which between two ranks sends no more bytes. Results are the same bits on every rank and run.

What lies where, and who waits for what: `expressions/chunks.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import torch

from tilewright.candidates.triton.expressions.chunks import MOST_CHUNKS, Chunks, Inbox
from tilewright.candidates.triton.gemm.dots import SHORT_SUM_BITS, SHORT_SUM_ROUNDOFF
from tilewright.candidates.triton.hopper.arch import require
from tilewright.candidates.triton.hopper.gemm.kernels import Plan as Hopper
from tilewright.candidates.triton.hopper.gemm.plan import HopperGemm, plan_of
from tilewright.candidates.triton.hopper.gemm.run import compiled, runner
from tilewright.candidates.triton.hopper.gemm.space import tile_configs
from tilewright.candidates.triton.hopper.gemm.spec import KernelSpec, Store, spec_of
from tilewright.candidates.triton.hopper.gemm.tile import TileConfig
from tilewright.candidates.triton.hopper.gemm.tma import ALIGNED, TmaView
from tilewright.candidates.triton.push_rows.summed import Summed, Tail, Undivided, summed
from tilewright.candidates.triton.push_tiles.sums import Adders
from tilewright.candidates.triton.push_tiles.timeline import expected_us
from tilewright.candidates.triton.runtime.module import needs
from tilewright.hardware.target import Target
from tilewright.ir.mesh import Symmetric, team
from tilewright.ir.ops import AllReduce
from tilewright.lowering.pieces import chosen_of, joined
from tilewright.schedule.candidate import GEMM, GPU, Candidate, Kernel, Runner, Schedule, Unsupported
from tilewright.schedule.problem import Problem

FEWEST_ROWS = 65
MOST_RANKS = 16
PRODUCT = "hopper"
TILES, POINTS = 6, 8  # tiles that are looked at with each way, and points that are offered
LATER = 0.03  # longer for each earlier point of a tile: what tiles differ in is better known
# Chunks of a rank's rows, SMs that the product leaves to kernels behind, and programs that add up for all ranks. Large tiles of
# even extents leave four SMs in any case: rounds of 128 are as many as those of 132. Smaller chunks are done earlier; blocks at
# work share less of the operands. Programs that add up fill the SMs that the product leaves, and the others when it ends.
ALONE = tuple((chunks, spare, 0) for chunks in (4, 2, 8) for spare in (0, 4))
SPREAD = tuple((chunks, spare, 192) for chunks in (4, 8, 16) for spare in (0, 4, 16))
MOST_SENT = 1 << 22  # bytes that a rank sends in one shot beside those of two: what they take is what a kernel less saves


@dataclass(frozen=True)
class Way:
    """Knobs beside those of the tile.

    Attributes:
        chunks: parts of a rank's rows, at most, of which its kernels behind learn one by one.
        spare: SMs on which the product does not run, as `blocks` of the tile says.
        adders: programs that add up, where all ranks want the sums; 0: none, each rank adds up what all ranks send to it.
        paced: what a deferred tile sends leaves evenly while the next one is multiplied. A link takes a round of tiles of
            128 x 256 in 24 µs; a block that has two of a tile's four subtiles in shared memory waits as long for the others.
    """

    chunks: int
    spare: int
    adders: int
    paced: bool = False


@dataclass(frozen=True)
class Form:
    """The kernels on both sides of what travels.

    Attributes:
        gemm: the product in Hopper's terms, the rows that a rank owns a matrix of the batch.
        tail: the kernel behind.
    """

    gemm: HopperGemm
    tail: Tail


@dataclass(frozen=True)
class Plan(Undivided):
    """A product, the ranks that own its rows, and what follows.

    Attributes:
        summed: the problem, apart.
        owned: where each rank owns some of the rows.
        shared: where each owns all of them; None where more bytes travel so than are worth it.
    """

    summed: Summed
    owned: Form
    shared: Form | None = None

    @cached_property
    def ways(self) -> list[Way]:
        """The ways."""
        return [Way(*w) for w in (*(() if self.spread and self.shared is None else ALONE), *(SPREAD if self.spread else ()))]

    @property
    def spread(self) -> bool:
        """All ranks want the sums."""
        return isinstance(self.summed.op, AllReduce)

    def form(self, way: Way) -> Form:
        """The kernels of a way."""
        if not self.spread or way.adders:
            return self.owned
        assert self.shared is not None
        return self.shared

    @cached_property
    def tiles(self) -> dict[Way, list[TileConfig]]:
        """The most promising tiles of each way: those of the SMs that the product does not leave to others."""
        found: dict[tuple[bool, int], list[TileConfig]] = {}
        for way in self.ways:
            key = self.form(way) is self.owned, way.spare
            if key not in found:
                found[key] = self._tiles(self.form(way).gemm, way.spare)
        return {way: found[self.form(way) is self.owned, way.spare] for way in self.ways}

    def _tiles(self, gemm: HopperGemm, spare: int) -> list[TileConfig]:
        cores = gemm.target.cores
        own = replace(gemm, target=replace(gemm.target, cores=max(cores - spare, cores // 2, 2)))
        found = (t for t in tile_configs(own) if not (t.multicast or t.stream_k) and t.split_k == 1)
        first: dict[tuple[int, int, bool], TileConfig] = {}  # those that differ in more than how registers are stored
        for t in found:
            first.setdefault((t.tile_m, t.tile_n, t.pingpong), t)
        return [*islice(first.values(), TILES)]

    @cached_property
    def points(self) -> list[tuple[TileConfig, Way]]:
        """Tiles and ways by what they are expected to take (`timeline.py`), further ones of a tile later. Early among them, in
        case that is wrong, are the first one of the other number of shots, the first one without pacing, and the first one of
        which warpgroups take turns."""
        took: dict[tuple[TileConfig, Way], float] = {}
        for way, tiles in self.tiles.items():
            for tile in tiles:
                chunks = self.chunks(tile, way).count  # no more than there are rows of tiles
                at = replace(way, chunks=chunks, spare=self.summed.target.cores - tile.blocks)
                config = self.spec(tile, at).config
                held_up = tile.deferred_store and config.subtiles > config.store_buffers
                for paced in (False, True)[: 1 + held_up]:
                    at = replace(at, paced=paced)
                    took[tile, at] = expected_us(self.spec(tile, at), at.adders)
        later, earlier = took.copy(), Counter[tuple[int, int, bool, bool]]()
        for tile, way in sorted(took, key=lambda point: took[point]):
            key = tile.tile_m, tile.tile_n, tile.pingpong, bool(way.adders)
            later[tile, way] *= 1 + LATER * earlier[key]
            earlier[key] += 1
        best, *others = sorted(later, key=lambda point: later[point])
        shots = [p for p in others if bool(p[1].adders) != bool(best[1].adders)][:1]
        turns = [p for p in others if p[0].pingpong][:1]
        early = [best, *others[:1], *shots, (best[0], replace(best[1], paced=False)), *turns]
        return [*dict.fromkeys([*early, *others])][:POINTS]

    def schedules(self) -> Sequence[Schedule]:
        """The points, with the first point of the kernel behind."""
        bits, found = {"acc_bits": SHORT_SUM_BITS} if self._short_sums else {}, list[Schedule]()
        for tile, way in self.points:
            own, tail = Schedule.of_point(tile, **vars(way), **bits), self.form(way).tail
            found.append(joined(Schedule(), [(PRODUCT, own), (tail.name, next(iter(tail.plan.schedules())))]))
        return found

    @property
    def _short_sums(self) -> bool:
        return Hopper(self.owned.gemm).short_sums

    def chunks(self, tile: TileConfig, way: Way) -> Chunks:
        """The memory of a point: chunks of whole tiles."""
        form, dtype = self.form(way), self.summed.between.dtype
        rows = -(-form.gemm.M // tile.tile_m)
        each = max(-(-rows // way.chunks), -(-rows // MOST_CHUNKS)) * tile.tile_m
        owned = form is self.owned
        return Chunks(self.summed.op.ranks, form.gemm.M, form.gemm.N, dtype, each, self.spread and owned, not owned)

    def spec(self, tile: TileConfig, way: Way) -> KernelSpec:
        """The product's kernel, whose store goes to owners of rows."""
        plain, chunks = spec_of(self.form(way).gemm, tile), self.chunks(tile, way)
        (store,) = plain.stores
        rows, columns = plain.config.rows, store.columns
        size = chunks.dtype.size_bytes(1)
        pitches = (chunks.slot(chunks.ranks * chunks.part_room), chunks.columns, 1)
        digits = tuple((name, 1, None) for name in ("b", "row", "column"))
        view = TmaView(0, (2, chunks.rows, chunks.columns), pitches, (1, rows, columns), size, digits)
        paced = way.paced and tile.deferred_store
        return replace(plain, stores=(Store(store.access, view, columns, store.aux),), chunks=chunks, paced=paced)

    def compile(self, schedule: Schedule) -> None:
        self.steps(schedule)

    def overlapped(self, schedule: Schedule) -> int:
        """The number of parts of which one is multiplied while another one travels: chunks of each rank's rows."""
        (_, point), _ = chosen_of(schedule)
        return self.chunks(point.point(TileConfig), point.point(Way)).count * self.summed.op.ranks

    def steps(self, schedule: Schedule) -> Callable[[Mapping[int, torch.Tensor], Symmetric], list[Runner]]:
        """A function that gives the runners of all kernels in turn, each of all sources; the last one has the results."""
        (_, point), (_, behind) = chosen_of(schedule)
        tile, way, target = point.point(TileConfig), point.point(Way), self.summed.target
        spec, chunks, tail = self.spec(tile, way), self.chunks(tile, way), self.form(way).tail
        built, adders = compiled(spec), Adders(chunks, way.adders, target) if chunks.spread else None
        if adders is not None:
            adders.build()
        follow = tail.plan.awaiting(behind, Inbox(chunks, chunks.spread), tail.partials)
        places, tail_places = self.summed.places, [tail.places.get(i, 0) for i in range(tail.count)]

        def made(weights: Mapping[int, torch.Tensor], memory: Symmetric) -> list[Runner]:
            first = runner(spec, built, {at: weights[i] for at, i in enumerate(places) if i in weights}, memory)
            last = follow({at: weights[i] for at, i in tail.places.items() if i in weights}, memory)
            between = [] if adders is None else [adders.runner(memory)]
            return [
                lambda sources: first([sources[i] for i in places]),
                *between,
                lambda sources: last([sources[i] for i in tail_places]),
            ]

        return made

    def build(self, schedule: Schedule) -> Kernel:
        (_, point), _ = chosen_of(schedule)
        tile, way = point.point(TileConfig), point.point(Way)
        form, spec, steps, size = self.form(way), self.spec(tile, way), self.steps(schedule), self.chunks(tile, way).bytes

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            *first, last = steps(weights, team().symmetric(self.summed.op.over, size))

            def run(sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
                kept = [step(sources) for step in first]  # copies of operands: the last kernel writes while the first one reads
                results = last(sources)
                del kept
                return results

            return run

        return Kernel(
            CANDIDATE.name,
            schedule,
            prepare,
            packed_bytes=Hopper(form.gemm).packing(spec)[0],
            roundoff=SHORT_SUM_ROUNDOFF if self._short_sums else 0.0,
            parts=(("gemm", PRODUCT), ("fusion", form.tail.name)),
            **vars(needs(compiled(spec).kernel)),
        )


def plan(problem: Problem, target: Target) -> Plan:
    """The plan of a product of many rows whose sums alone travel, on an `sm_90` target.

    Raises:
        Unsupported: the reason why there is none.
    """
    require(target)
    found = summed(problem, target)
    op, rows = found.op, math.prod(found.local.outputs[0].shape[:-1])
    if rows < FEWEST_ROWS or op.ranks > MOST_RANKS or rows % op.ranks:
        raise Unsupported(
            f"{rows} rows for {op.ranks} ranks: {FEWEST_ROWS} and more, shared out evenly among up to {MOST_RANKS}"
        )
    gemm, spread = plan_of(found.local, target), isinstance(op, AllReduce)
    owned, shared = Form(by_owner(gemm, op.ranks), found.tail(summed=spread)), None
    further = (op.ranks - 1) * (op.ranks - 2) * found.between.tensor.size_bytes // op.ranks  # bytes, if all are sent all
    if spread and further <= MOST_SENT and 2 * op.ranks * gemm.M * gemm.N < 1 << 31:
        shared = Form(by_owner(gemm, 1), found.tail())
    whole = Plan(found, owned, shared)
    if not any(whole.tiles.values()):
        raise Unsupported("no tile fits shared memory")
    return whole


def by_owner(gemm: HopperGemm, ranks: int) -> HopperGemm:
    """A product whose rows are shared out among ranks, as matrices of a batch that share the right operand.

    Raises:
        Unsupported: TMA does not read or write it so.
    """
    if gemm.batch != 1 or gemm.scales is not None or gemm.up is not None:
        raise Unsupported("several matrices, scales by blocks, or halves of columns that meet")
    (store,) = gemm.stores
    size, rows, columns = store.root.dtype.size_bytes(1), gemm.M // ranks, gemm.N
    place = store.of_result()
    plain = [(t.inner, t.stride) for t in (*place.rows, *place.columns)] == [(1, columns), (1, 1)]
    if not plain or place.offset or columns * size % ALIGNED or store.columns_extent != columns:
        raise Unsupported(f"rows of {columns} columns do not lie one after the other, from multiples of {ALIGNED} bytes on")
    if ranks * gemm.M * columns >= 1 << 31:
        raise Unsupported("elements of ranks are not counted in 31 bits")
    lhs, (_, down, along) = gemm.lhs, gemm.lhs.strides
    step = rows * down
    if step * lhs.dtype.size_bytes(1) % ALIGNED:
        raise Unsupported(f"{rows} rows of the left operand do not end at a multiple of {ALIGNED} bytes")
    lhs = replace(lhs, extents=(ranks, rows, gemm.K), strides=(step, down, along))
    rhs = replace(gemm.rhs, extents=(ranks, *gemm.rhs.extents[1:]), strides=(0, *gemm.rhs.strides[1:]))
    return replace(gemm, batch=ranks, M=rows, lhs=lhs, rhs=rhs)


CANDIDATE = Candidate("push_tiles", GEMM, GPU, 7, plan, ranks="several")
