"""Generated GPU attention: two products and a softmax in one kernel; masks, roundings and stores as the graph has them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice, product

import torch

from tilewright.candidates.triton.attention.heads import Heads, Rounded, heads_of
from tilewright.candidates.triton.attention.kernel import (
    WORKSPACE,
    TileConfig,
    config_of,
    kernel_text,
    padded_extent,
    sources_of,
)
from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.runtime.launch import caller, pointers
from tilewright.candidates.triton.runtime.module import Arch, Built, arch_of, build, exact_fp8, launcher, needs
from tilewright.dtype import F32
from tilewright.hardware.target import Target
from tilewright.ir.extent import Extent, extent_at
from tilewright.schedule.candidate import ATTENTION, GPU, Candidate, Kernel, Ranged, Runner, Schedule, Unsupported
from tilewright.schedule.problem import AttentionProblem
from tilewright.schedule.recipe import Pointer
from tilewright.sizes import round_up

MOST_DEPTH = 256  # of a head: past that neither operands nor sums fit into registers and shared memory
# Of programs that share the keys of few queries: tile_n, num_warps, num_stages. First those of which an SM holds one: so the
# programs of a call are spread evenly, however the ones of the call before lie.
SPLIT = (
    (128, 4, 3),
    (64, 4, 5),
    (128, 4, 4),
    (64, 4, 6),
    (32, 4, 8),
    (64, 4, 4),
    (64, 4, 3),
    (32, 4, 4),
    (128, 4, 2),
    (64, 4, 2),
)
MOST_ROWS = 64  # of such a program: past that a tile's partial sums are more to write than keys and values are to read
LEAST_KEYS = 256  # below, one program has them all before the parts of others could be brought together
MEMORY_BYTES_PER_US, SM_BYTES_PER_US = 4.3e6, 4.5e4  # of an H200, and what one of its SMs has been seen to read
START_US = 6.0  # from the launch until the first keys come, and from the last ones until all parts are left and counted
TILE_US, LATENCY_US = 0.6, 1.5  # of the products and the softmax of a tile, and from asking for a tile until it is there
COMBINED_BYTES_PER_US = 6e4  # of what the parts have found, read by one SM
INDEX_BYTES = 8  # of a place in the table of blocks
HELD = 64  # scores of a thread, at most: as many again are needed while they are computed
POINTS = 10
# tile_m, tile_n, num_warps, num_stages, in the order in which they are expected to serve:
# two blocks of an SM, one multiplying while the other is at its softmax, took 0.6 of the time of one of 128 x 128 on an H200
WARPGROUPS = ((128, 64, 8, 3), (64, 64, 4, 2), (64, 128, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2), (128, 64, 4, 3),
              (64, 32, 4, 3), (32, 64, 4, 2), (16, 64, 4, 2), (16, 32, 2, 2), (16, 16, 1, 2))  # fmt: skip
WARPS = ((128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (128, 32, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 64, 4, 2),
         (16, 32, 2, 2), (16, 16, 1, 2))  # fmt: skip
HOLDING = ((64, 128, 8, 1), (64, 64, 8, 1), (64, 64, 4, 1), (32, 64, 4, 1), (16, 64, 4, 1), (16, 16, 1, 1))
WIDE = ((64, 64, 8, 2), (64, 32, 4, 2), (128, 32, 8, 2), (32, 64, 4, 2), (32, 32, 4, 2), (16, 32, 4, 2), (16, 16, 1, 1))


@dataclass(frozen=True)
class Plan:
    """An attention on a GPU, compiled for `arch`."""

    problem: AttentionProblem
    target: Target
    arch: Arch
    heads: Heads

    def schedules(self) -> Iterable[Schedule]:
        shared = self.target.caches_bytes.get("shared", self.target.chip.shared_bytes)
        split = list(split_points(self.heads, self.arch, shared, self.target.cores))
        return map(Schedule.of_point, islice((*split, *_points(self.heads, self.arch, shared)), POINTS))

    def leading(self) -> Schedule | None:
        """The first point, if it splits keys: without that few programs read them all, whichever kernel it is."""
        first = next(iter(self.schedules()), None)
        return first if first is not None and (first.point(TileConfig).split_kv or 1) > 1 else None

    def compile(self, schedule: Schedule) -> None:
        self.machine_code(schedule)

    def machine_code(self, schedule: Schedule) -> Built:
        """The machine code of a kernel."""
        tile = schedule.point(TileConfig)
        types = {f"p{i}": self.problem.types[i] for i in sources_of(self.heads)}
        types |= {f"o{i}": t for i, t in enumerate(self.problem.outputs)}
        signature = {name: pointer_type(t.dtype) for name, t in types.items()}
        if tile.split_kv is not None:
            signature |= dict(zip(WORKSPACE, ("*fp32", "*i32"), strict=True))
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": False}
        if self.heads.paged:  # an index out of range ends the program; Triton shares stages out among a table and what it picks
            options |= {"debug": True, "sanitize_overflow": False, "num_stages": 2 * tile.num_stages - 1}
        if tile.launch_early:
            options["launch_pdl"] = True
        text = kernel_text(self.heads_of(tile), tile, exact_fp8(self.arch))
        return build(text, signature, self.arch, self.target.index, **options)

    def heads_of(self, tile: TileConfig) -> Heads:
        """The heads whose queries a program has rows of: where keys are split, one for each head of keys."""
        return self.heads if tile.split_kv is None else self.heads.by_key_head()

    def build(self, schedule: Schedule) -> Kernel:
        return self.kernel(self.problem, schedule, self.machine_code(schedule), {})

    def kernel(self, problem: AttentionProblem, schedule: Schedule, built: Built, values: Mapping[str, int]) -> Kernel:
        """The kernel of a problem that machine code serves, for values of the dims that it leaves open, by name."""
        target, tile = self.target, schedule.point(TileConfig)
        heads = self.heads_of(tile)
        config = config_of(heads, tile)
        parts, (size, count) = extent_at(config.parts, values), (extent_at(n, values) for n in config.workspace)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            start = launcher(built.kernel, (parts,), target.index, built.numbers)
            given = [*pointers("source", sources_of(heads)), *pointers("result", range(len(problem.outputs)))]
            if tile.split_kv is not None:  # what parts of the keys give, and counters of parts done
                given += [Pointer("scratch", 4 * size), Pointer("counters", count)]
            return caller(start, given, len(problem.types), problem.outputs, weights, target)

        scratch = 0 if tile.split_kv is None else 4 * (size + count)
        return Kernel(CANDIDATE.name, schedule, prepare, workspace_bytes=scratch, **vars(needs(built.kernel)))


def plan(problem: AttentionProblem, target: Target) -> Plan:
    """The plan of an attention whose heads have at most `MOST_DEPTH` columns.

    Raises:
        Unsupported: the reason why there is none.
    """
    arch = arch_of(target)
    heads = heads_of(problem, exact_fp8(arch))
    if max(heads.depth, heads.width) > MOST_DEPTH:
        raise Unsupported(f"a head of {max(heads.depth, heads.width)} columns does not fit into registers")
    return Plan(problem, target, arch, heads)


def ranged(problem: AttentionProblem, target: Target, schedule: Schedule) -> Ranged:
    """A kernel that leaves extents open which the problem leaves open. It holds no more than a tile of scores.

    Raises:
        Unsupported: the reason why there is none.
    """
    whole, tile = plan(problem, target), schedule.point(TileConfig)
    if tile.scores == "held" and isinstance(whole.heads.keys, Extent):
        schedule = Schedule.of_point(replace(tile, scores="twice"))
    built = whole.machine_code(schedule)
    return lambda one, values: whole.kernel(one, schedule, built.at(values), values)


def _points(heads: Heads, arch: Arch, shared: int) -> Iterable[TileConfig]:
    """Legal sizes, best guess first."""
    wide = heads.mma_dtype is F32
    exact = arch.capability >= 80  # three products of tf32 are as good as one of f32
    bytes_each = heads.mma_dtype.bits // 8
    depth, width = padded_extent(heads.depth), padded_extent(heads.width)
    narrow = WARPGROUPS if arch.capability in (90, 100, 103) else WARPS
    ways = ("online",) if heads.on_weights is None else ("twice",)
    if isinstance(heads.on_weights, Rounded) and not wide and arch.backend == "cuda":
        ways = ("held", "twice")
    for scores, precision in product(ways, ("tf32x3", "ieee") if wide and exact else ("ieee",)):
        for tile_m, tile_n, warps, stages in WIDE if wide else HOLDING if scores == "held" else narrow:
            if tile_m > padded_extent(heads.queries) or tile_n > padded_extent(heads.keys):
                continue
            held = round_up(heads.keys, tile_n) * tile_m
            if scores == "held" and (held > HELD * warps * arch.warp or tile_m < min(64, padded_extent(heads.queries))):
                continue
            taken = bytes_each * (tile_m * depth + stages * tile_n * (depth + width))
            if taken <= shared and tile_m * width <= 128 * warps * arch.warp:
                yield TileConfig(tile_m, tile_n, warps, stages, scores, precision)


def split_points(heads: Heads, arch: Arch, shared: int, cores: int) -> Iterable[TileConfig]:
    """Points at which programs share the keys of a tile of queries so that all of them together fill the machine, best guess
    first. None where weights are rounded, which needs their sum first, where queries are many, or where tiles of them fill it
    anyway.

    Args:
        heads: the attention.
        arch: the architecture.
        shared: bytes of shared memory of an SM.
        cores: SMs.
    """
    grouped = heads.by_key_head()
    if heads.on_weights is not None or grouped.queries > MOST_ROWS or heads.keys < LEAST_KEYS:
        return
    wide = heads.mma_dtype is F32
    tile_m, blocks = padded_extent(grouped.queries), heads.batch * grouped.heads
    width = padded_extent(heads.width)
    precision = "tf32x3" if wide and arch.capability >= 80 else "ieee"
    found: list[tuple[float, TileConfig]] = []
    for tile_n, warps, stages in SPLIT:
        taken = shared_bytes(heads, tile_m, tile_n, stages)
        at_once = min(shared // (taken + 1024), 2048 // (warps * arch.warp), 3)
        if not at_once or tile_m * width > 128 * warps * arch.warp:
            continue
        chunks = -(-heads.keys // tile_n)
        most = [min(cores * n // blocks, chunks) for n in range(1, at_once + 1)]
        for parts in dict.fromkeys([*most, *(most[0] >> n for n in range(1, 4))]):
            if parts < 1:
                continue
            # Programs of the call after this one, where an SM has room for them, would lie beside one another there.
            early = arch.capability >= 90 and (at_once == 1 or blocks * (parts + 1) > cores * at_once)
            point = TileConfig(tile_m, tile_n, warps, stages, "online", precision, parts, early or None)
            found.append((expected_us(grouped, point, cores, at_once), point))
    yield from (point for _, point in sorted(found, key=lambda f: f[0]))


def shared_bytes(heads: Heads, tile_m: int, tile_n: int, stages: int) -> int:
    """Bytes of shared memory of a program that has a part of the keys, as Triton lays them out: one stage is in registers."""
    columns, each = padded_extent(heads.depth) + padded_extent(heads.width), heads.mma_dtype.bits // 8
    table = 2 * (stages - 1) * tile_n * INDEX_BYTES if heads.paged else 0
    return table + each * ((stages - 1) * (tile_n * columns + tile_m * padded_extent(heads.depth)) + 2 * tile_m * tile_n)


def expected_us(heads: Heads, tile: TileConfig, cores: int, at_once: int) -> float:
    """The time of a call in which programs share keys, in microseconds, fitted to an H200's (docs/lab-notes).

    Args:
        heads: the attention, with a head for each head of keys.
        tile: the sizes.
        cores: SMs.
        at_once: programs of which an SM has room.
    """
    assert tile.split_kv is not None
    programs, each = heads.batch * heads.heads * tile.split_kv, heads.mma_dtype.bits // 8
    tile_bytes = tile.tile_n * (padded_extent(heads.depth) + padded_extent(heads.width)) * each
    rounds = math.ceil(programs / (cores * at_once))
    running = min(programs, cores * at_once)
    # While a tile is multiplied, the others of the ring are on their way, but the one that takes its place.
    memory_us = tile_bytes * max(running / MEMORY_BYTES_PER_US, math.ceil(running / cores) / SM_BYTES_PER_US)
    waits = max(memory_us, TILE_US, LATENCY_US / (tile.num_stages - 1))
    if tile.num_stages < 3:
        waits += TILE_US
    steps = rounds * math.ceil(math.ceil(heads.keys / tile.tile_n) / tile.split_kv)
    sums = tile.split_kv * heads.queries * padded_extent(heads.width) * 4
    return START_US + steps * waits + sums / COMBINED_BYTES_PER_US


CANDIDATE = Candidate("triton_attention", ATTENTION, GPU, 5, plan, ranged=ranged, code_of=lambda schedule: schedule)
