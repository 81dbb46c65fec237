"""A product of many rows whose sums ranks add up: Hopper's persistent kernel stores each tile into the memory of the rank that
owns its rows, while it multiplies the next one. A kernel behind waits for the tiles of all ranks a chunk of rows at a time,
adds them up in the order of ranks with one rounding, and does what follows. Where all ranks want the sums (`all_reduce`), a
kernel between both adds them up and stores them into the memory of all. Results are the same bits on every rank and run.

What lies where, and who waits for what: `expressions/chunks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product

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
TRIED = 3  # tiles that are offered with each way
# Chunks of a rank's rows, SMs that the product leaves to kernels behind, and programs that add up for all ranks, best guess
# first. Where the sums stay with their owners, kernels behind have little to do before the product ends. Four programs that add
# up have room on an SM that the product leaves; the others begin when it ends.
SCATTERED = ((4, 0, 0), (2, 0, 0), (4, 8, 0))
SPREAD = ((4, 16, 192), (4, 0, 132), (8, 16, 192), (4, 32, 228))


@dataclass(frozen=True)
class Way:
    """Knobs beside those of the tile.

    Attributes:
        chunks: parts of a rank's rows, at most, of which its kernels behind learn one by one.
        spare: SMs on which the product does not run.
        adders: programs that add up, where all ranks want the sums.
    """

    chunks: int
    spare: int
    adders: int


@dataclass(frozen=True)
class Plan(Undivided):
    """A product, the ranks that own its rows, and what follows.

    Attributes:
        summed: the problem, apart.
        gemm: the product in Hopper's terms, the rows of each rank a matrix of the batch.
        tail: the kernel behind.
    """

    summed: Summed
    gemm: HopperGemm
    tail: Tail

    @property
    def ways(self) -> list[Way]:
        """The ways, the most promising first."""
        return [Way(*w) for w in (SPREAD if self.spread else SCATTERED)]

    @property
    def spread(self) -> bool:
        """All ranks want the sums."""
        return isinstance(self.summed.op, AllReduce)

    @cached_property
    def tiles(self) -> dict[int, list[TileConfig]]:
        """The most promising tiles, by the number of SMs that are left to others."""
        return {spare: self._tiles(spare) for spare in dict.fromkeys(w.spare for w in self.ways)}

    def _tiles(self, spare: int) -> list[TileConfig]:
        cores = self.gemm.target.cores
        own = replace(self.gemm, target=replace(self.gemm.target, cores=max(cores - spare, cores // 2, 2)))
        found = (t for t in tile_configs(own) if not (t.multicast or t.stream_k) and t.split_k == 1)
        first: dict[tuple[int, int, bool], TileConfig] = {}  # those that differ in more than how registers are stored
        for t in found:
            first.setdefault((t.tile_m, t.tile_n, t.pingpong), t)
        return [*islice(first.values(), TRIED)]

    def schedules(self) -> Sequence[Schedule]:
        """The points: the first tile of all ways, then the next, with the first point of the kernel behind."""
        behind = next(iter(self.tail.plan.schedules()))
        bits = {"acc_bits": SHORT_SUM_BITS} if self._short_sums else {}
        found: dict[Schedule, None] = {}
        for rank, way in product(range(TRIED), self.ways):
            for tile in self.tiles[way.spare][rank : rank + 1]:
                chunks = self.chunks(tile, way).count  # no more than there are rows of tiles
                own = Schedule.of_point(tile, **vars(replace(way, chunks=chunks)), **bits)
                found[joined(Schedule(), [(PRODUCT, own), (self.tail.name, behind)])] = None
        return [*found]

    @property
    def _short_sums(self) -> bool:
        return Hopper(self.gemm).short_sums

    def chunks(self, tile: TileConfig, way: Way) -> Chunks:
        """The memory of a point: chunks of whole tiles."""
        rows = -(-self.gemm.M // tile.tile_m)
        each = max(-(-rows // way.chunks), -(-rows // MOST_CHUNKS))
        dtype = self.summed.between.dtype
        return Chunks(self.gemm.batch, self.gemm.M, self.gemm.N, dtype, each * tile.tile_m, self.spread)

    def spec(self, tile: TileConfig, way: Way) -> KernelSpec:
        """The product's kernel, whose store goes to owners of rows."""
        plain, chunks = spec_of(self.gemm, tile), self.chunks(tile, way)
        (store,) = plain.stores
        rows, columns = plain.config.rows, store.columns
        size = chunks.dtype.size_bytes(1)
        pitches = (chunks.slot(chunks.ranks * chunks.part_room), chunks.columns, 1)
        digits = tuple((name, 1, None) for name in ("b", "row", "column"))
        view = TmaView(0, (2, chunks.rows, chunks.columns), pitches, (1, rows, columns), size, digits)
        return replace(plain, stores=(Store(store.access, view, columns, store.aux),), chunks=chunks)

    def compile(self, schedule: Schedule) -> None:
        self.steps(schedule)

    def overlapped(self, schedule: Schedule) -> int:
        """The number of parts of which one is multiplied while another one travels: chunks of each rank's rows."""
        (_, point), _ = chosen_of(schedule)
        return self.chunks(point.point(TileConfig), point.point(Way)).count * self.summed.op.ranks

    def steps(self, schedule: Schedule) -> Callable[[Mapping[int, torch.Tensor], Symmetric], list[Runner]]:
        """A function that gives the runners of all kernels in turn, each of all sources; the last one has the results."""
        (_, point), (_, behind) = chosen_of(schedule)
        tile, way, target = point.point(TileConfig), point.point(Way), self.gemm.target
        spec, chunks, tail = self.spec(tile, way), self.chunks(tile, way), self.tail
        built, adders = compiled(spec), Adders(chunks, way.adders, target) if self.spread else None
        if adders is not None:
            adders.build()
        follow = tail.plan.awaiting(behind, Inbox(chunks, self.spread), tail.partials)
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
        own, spec, steps, size = Hopper(self.gemm), self.spec(tile, way), self.steps(schedule), self.chunks(tile, way).bytes

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            *first, last = steps(weights, team().symmetric(self.summed.op.over, size))

            def run(sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
                for step in first:
                    step(sources)
                return last(sources)

            return run

        return Kernel(
            CANDIDATE.name,
            schedule,
            prepare,
            packed_bytes=own.packing(spec)[0],
            roundoff=SHORT_SUM_ROUNDOFF if own.short_sums else 0.0,
            parts=(("gemm", PRODUCT), ("fusion", self.tail.name)),
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
    gemm = by_owner(plan_of(found.local, target), op.ranks)
    whole = Plan(found, gemm, found.tail(summed=isinstance(op, AllReduce)))
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
