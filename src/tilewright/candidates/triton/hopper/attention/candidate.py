"""Generated attention for Hopper: all scores of a row in registers (`_whole_rows.py`) or some at a time (`_flash.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from tilewright.candidates.triton.attention.heads import Heads, heads_of
from tilewright.candidates.triton.attention.kernel import padded_extent, sources_of
from tilewright.candidates.triton.expressions.printer import FP8, pointer_type
from tilewright.candidates.triton.hopper.arch import SM_90, require
from tilewright.candidates.triton.hopper.attention.kernel import (
    CHUNK,
    COUNTERS,
    GROUPS,
    ROWS,
    STAGES,
    TileConfig,
    arguments,
    check_alignment,
    config_of,
    kernel_text,
    padded,
    same_for_queries,
    tma_operands,
)
from tilewright.candidates.triton.hopper.fast_math import NATIVE_FP8
from tilewright.candidates.triton.hopper.gemm.tma import TMA_TYPES, TmaView, descriptor, with_descriptors
from tilewright.candidates.triton.runtime.launch import caller, pointers
from tilewright.candidates.triton.runtime.module import Built, build, launcher, needs
from tilewright.dtype import F32
from tilewright.hardware.target import Target
from tilewright.ir.extent import extent_at
from tilewright.schedule.candidate import ATTENTION, GPU, Candidate, Kernel, Ranged, Runner, Schedule, Unsupported
from tilewright.schedule.problem import AttentionProblem
from tilewright.schedule.recipe import Pointer

MOST_TRIED = 6  # sizes
MOST_REGISTERS = 224  # of a thread, for scores and result
EXCHANGE_BYTES = 2 << 10  # by which a warpgroup's results are exchanged among threads


@dataclass(frozen=True)
class Plan:
    """An attention on a Hopper GPU, and the sizes to try, best guess first."""

    problem: AttentionProblem
    target: Target
    heads: Heads
    tiles: tuple[TileConfig, ...]

    def schedules(self) -> Iterable[Schedule]:
        return map(Schedule.of_point, self.tiles)

    def compile(self, schedule: Schedule) -> None:
        self.machine_code(schedule.point(TileConfig))

    def machine_code(self, tile: TileConfig) -> Built:
        """The machine code of a kernel of these sizes."""
        heads, problem = self.heads, self.problem
        names = arguments(heads, tile)
        signature = {n: pointer_type((problem.types if n[0] == "p" else problem.outputs)[int(n[1:])].dtype) for n in names}
        operands = zip("qkv", (heads.q, heads.k, heads.v), (tma_operands(heads) if tile.by_tma else None) or (), strict=False)
        boxes = {f"{n}_desc": descriptor(TMA_TYPES[o.dtype.name], view.box) for n, o, (_, view) in operands}
        if tile.on_demand:
            signature |= dict.fromkeys(COUNTERS, "*i32")
        options = {"enable_fp_fusion": False, "num_warps": 4, "launch_pdl": True}
        return build(kernel_text(heads, tile), boxes | signature, SM_90, self.target.index, **options)

    def build(self, schedule: Schedule) -> Kernel:
        tile = schedule.point(TileConfig)
        operands = (tma_operands(self.heads) or []) if tile.by_tma else []
        grid = blocks(self.heads, tile, self.target.cores)
        return self.kernel(self.problem, schedule, self.machine_code(tile), grid, operands)

    def kernel(
        self, problem: AttentionProblem, schedule: Schedule, built: Built, grid: int, operands: Sequence[tuple[int, TmaView]]
    ) -> Kernel:
        """The kernel of a problem that machine code of these heads serves, of so many blocks; TMA brings `operands`."""
        heads, target, tile = self.heads, self.target, schedule.point(TileConfig)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            start = launcher(built.kernel, (grid,), target.index, built.numbers)
            read = sources_of(heads)
            if tile.by_tma:
                read = [source for source, _ in operands] + [int(n[1:]) for n in arguments(heads, tile) if n[0] == "p"]
                start = with_descriptors(start, [view for _, view in operands], built.kernel.metadata.tensordesc_meta)
            given = [*pointers("source", read), *pointers("result", range(len(problem.outputs)))]
            if tile.on_demand:
                given.append(Pointer("counters", 1))
            return caller(start, given, len(problem.types), problem.outputs, weights, target)

        return Kernel(CANDIDATE.name, schedule, prepare, **vars(needs(built.kernel)))


def plan(problem: AttentionProblem, target: Target) -> Plan:
    """The plan of an attention of f16, bf16 or 8-bit floats on an `sm_90` target: at most `MOST_TRIED` sizes.

    Raises:
        Unsupported: the reason why there is none.
    """
    require(target)
    found = supported_heads(problem)
    fitting = points(found, target.cores, target.caches_bytes.get("shared", target.chip.shared_bytes))
    if not fitting:
        raise Unsupported("keys and values of a head do not fit into shared memory")
    return Plan(problem, target, found, tuple(fitting[:MOST_TRIED]))


def ranged(problem: AttentionProblem, target: Target, schedule: Schedule) -> Ranged:
    """A kernel that leaves extents open which the problem leaves open: `flash`, whatever the schedule is, since the others have
    registers for so many keys.

    Raises:
        Unsupported: the reason why there is none.
    """
    require(target)
    heads = supported_heads(problem)
    operands = tma_operands(heads) if streams(heads) else None
    if operands is None:
        raise Unsupported("its keys do not pass through shared memory, and others are held in registers")
    shared = target.caches_bytes.get("shared", target.chip.shared_bytes)
    tile = schedule.point(TileConfig) if schedule["kernel"] == "flash" else next(iter(streamed(heads, shared)), None)
    if tile is None:
        raise Unsupported("keys and values of a head do not fit into shared memory")
    whole = Plan(problem, target, heads, (tile,))
    built, items, point = whole.machine_code(tile), config_of(heads, tile).items, Schedule.of_point(tile)

    def at(one: AttentionProblem, values: Mapping[str, int]) -> Kernel:
        arrays = [(source, view.at(values)) for source, view in operands]
        return whole.kernel(one, point, built.at(values), min(target.cores, extent_at(items, values)), arrays)

    return at


def code_of(schedule: Schedule) -> Schedule:
    """The point of `flash`; one for all others."""
    return schedule if schedule["kernel"] == "flash" else Schedule()


def supported_heads(problem: AttentionProblem) -> Heads:
    """The attention to generate.

    Raises:
        Unsupported: the sentence why there is none.
    """
    found = heads_of(problem, NATIVE_FP8)
    if found.mma_dtype is F32:
        raise Unsupported("the matrix unit takes f16 or bf16 here")
    if found.on_scores is not None or found.on_weights is not None:
        raise Unsupported("its scores or weights are changed on the way")
    if not _takes(found):
        raise Unsupported("queries and keys are multiplied as f16, bf16 or both as one 8-bit float")
    if found.scale <= 0:
        raise Unsupported("its scale is not positive")
    if found.causal == "lower" and found.keys < found.queries:
        raise Unsupported("causality hides all keys from some queries")
    check_alignment(found)
    if found.equal_masked_rows and found.causal != "no" and not streams(found):
        raise Unsupported("rows that see nothing have equal weights, for keys that causality hides, too")
    if not (streams(found) or holds(found)) or max(padded_extent(found.depth), padded_extent(found.width)) > 128:
        raise Unsupported(f"all scores of {found.keys} keys do not fit into registers beside {found.width} columns")
    return found


def _takes(heads: Heads) -> bool:
    """Tell whether there is a product of queries and keys as they are."""
    q, k, v = (o.codes for o in (heads.q, heads.k, heads.v))
    alike = q is k is None or (q is not None and k is not None and q.dtype is k.dtype and q.dtype in FP8)
    return alike and all(c is None or (c.zero == 0 and c.dtype.name in NATIVE_FP8) for c in (q, k, v))


# -- sizes


def _row_bytes(heads: Heads) -> tuple[int, int]:
    """Bytes of a row of queries or keys, and of a row of values, in shared memory."""
    each = heads.mma_dtype.bits // 8
    return padded_extent(heads.depth) * (each if heads.q.codes is None else 1), padded_extent(heads.width) * each


def shared_bytes(heads: Heads, tile: TileConfig) -> int:
    """Shared memory of a block of `whole_rows` or `persistent`: keys, values, a tile of queries, results on their way out."""
    depth_bytes, width_bytes = _row_bytes(heads)
    keys, own = padded(heads.keys), ROWS * depth_bytes + EXCHANGE_BYTES  # of a warpgroup
    ones = 8 * CHUNK * heads.mma_dtype.bits // 8 if tile.ones else 0
    if tile.kernel == "persistent":
        keys = -(-keys // CHUNK) * min(keys, CHUNK)
        mask = 0 if heads.mask is None else 4 * keys
        return STAGES * (keys * (depth_bytes + width_bytes) + mask) + GROUPS * own + ones + 512  # barriers
    return keys * (depth_bytes + width_bytes) + own + ones


def registers(heads: Heads) -> int:
    """Registers of a thread for its part of all scores of a tile and of the result."""
    return (padded(heads.keys) + padded_extent(heads.width)) // 2


def blocks(heads: Heads, tile: TileConfig, multiprocessors: int) -> int:
    """Blocks of a kernel."""
    each = heads.batch * heads.heads
    if tile.kernel == "whole_rows":
        return each * (tile.splits or 1)
    return min(multiprocessors, each * (-(-heads.queries // (tile.groups * ROWS)) if tile.groups else 1))


def expected(heads: Heads, tile: TileConfig, multiprocessors: int, shared: int) -> float:
    """The time of a kernel, in tiles of queries that one block works at: its rounds of blocks, each of which waits for keys and
    values first."""
    each, tiles = heads.batch * heads.heads, -(-heads.queries // ROWS)
    if tile.groups:  # measured: a round of `flash` over 384 keys, as 1.36 or 1.05 tiles, of `persistent`, as half a tile each
        rounds = math.ceil(each * math.ceil(tiles / tile.groups) / multiprocessors)
        return 1.0 + rounds * ((1.36 if tile.groups == 3 else 1.05) * (1.2 if heads.causal != "no" else 1.0))
    if tile.kernel == "persistent":
        return 1.0 + math.ceil(each / multiprocessors) * tiles * 0.52
    at_once = max(min(shared // (shared_bytes(heads, tile) + 1024), 2), 1)
    rounds = math.ceil(blocks(heads, tile, multiprocessors) / (multiprocessors * at_once))
    return rounds * (1.0 + math.ceil(tiles / (tile.splits or 1)))


def points(heads: Heads, multiprocessors: int, shared: int) -> list[TileConfig]:
    """The sizes that fit, best guess first."""
    found: list[TileConfig] = []
    tiles = -(-heads.queries // ROWS)
    if holds(heads):
        found += [TileConfig("whole_rows", n, ones) for n, ones in product(range(1, tiles + 1), (False, True))]
        if tiles > 1 and heads.v.codes is None and tma_operands(heads) is not None:  # a tile of every head for each group
            found.append(TileConfig("persistent", ones=True))
        found = [p for p in found if shared_bytes(heads, p) <= shared]
    if heads.keys > ROWS and streams(heads):
        found += streamed(heads, shared, multiprocessors)
    return sorted(found, key=lambda p: expected(heads, p, multiprocessors, shared))


def streamed(heads: Heads, shared: int, multiprocessors: int | None = None) -> list[TileConfig]:
    """The sizes of `flash` that fit. Where blocks may have several parts each, those that take them on demand come first: on an
    H200 they took 2 to 18 % less time behind other kernels (docs/lab-notes/gpu-models.md), and nowhere more."""
    groups = 1 if heads.queries <= ROWS else 3 if heads.width <= 64 and heads.causal == "no" else 2
    depth_bytes, width_bytes = _row_bytes(heads)
    left = shared - groups * (ROWS * depth_bytes + EXCHANGE_BYTES) - 1024  # barriers and the like
    stages = min(left // (CHUNK * (depth_bytes + width_bytes + 4)), 4)
    if stages < 2:
        return []
    kinds = ((True, False), (True, True), (False, True), (False, False))  # pingpong, overlapped; sorting keeps this order
    flash = [TileConfig("flash", None, None, stages, groups, *kind) for kind in kinds[2 if groups == 1 else 0 :]]
    if multiprocessors is not None and heads.batch * heads.heads * -(-heads.queries // (groups * ROWS)) <= multiprocessors:
        return flash
    return [replace(flash[0], on_demand=True), *flash]


def holds(heads: Heads) -> bool:
    """Tell whether all scores of a row fit into registers. Such kernels leave out keys that causality hides, which have
    weight where rows that see nothing have equal weights."""
    return registers(heads) <= MOST_REGISTERS and not (heads.equal_masked_rows and heads.causal != "no")


def streams(heads: Heads) -> bool:
    """Tell whether any number of keys may pass through shared memory."""
    key_padding = heads.mask is None or same_for_queries(heads, heads.mask)
    return key_padding and heads.v.codes is None and tma_operands(heads) is not None


CANDIDATE = Candidate("hopper_attention", ATTENTION, GPU, 4, plan, ranged=ranged, code_of=code_of)
