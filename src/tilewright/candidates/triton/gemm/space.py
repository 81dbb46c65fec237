"""Sizes of a plain Triton gemm: the legal points, from the chip's data, and the work of each, for ranking.

A block's steps along K take as long as their slowest part: the matrix unit, shared memory, conversions, or waiting for memory
where too few steps are in flight. Blocks come in waves; the last one may leave most of the chip idle, which split K avoids.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np

from tilewright.candidates.triton.gemm.kernel import KernelSpec, TileConfig
from tilewright.candidates.triton.runtime.module import Arch, arch_of
from tilewright.hardware.target import Target, wider_units
from tilewright.ir.graph import toposort
from tilewright.ir.ops import VIEWS, Const, Map, Param
from tilewright.lowering.access import Access
from tilewright.lowering.scalar.costs import ON_THE_WAY
from tilewright.schedule.cost import Phase, Work, predict_us
from tilewright.sizes import next_power_of_2

LANES = 128  # f32 operations a cycle and SM, of every architecture here but gfx9's 256
SHARED_BYTES_PER_CYCLE = 128  # of an SM: 32 banks of 4 bytes (CUDA C++ Best Practices Guide 13.0, 10.2.3.1)
# Measured on an H200, as are the other numbers without a source.
LATENCY = 700.0  # cycles from asking the last cache to a dot's operand lying in shared memory
FAR_LATENCY = 1650.0  # the same from memory, while it is busy
CONVERTING = 500.0  # cycles of a step in which an operand goes through registers, beside the conversion itself
BEGINNING = 1500.0  # cycles of a block before its first step and after its last, that nothing hides where one block runs alone
THREADS, BLOCKS = 2048, 32  # of an SM at a time
REGISTERS_BESIDE = 56  # of a thread, beside the accumulator
DEFAULT_SHARED = 48 << 10
NEAR_BYTES_PER_CYCLE = 40.0  # of an SM, from the last cache: 8192^3 and 4096^3 products in bf16 and s8 read 7 to 9 TB/s
TAKES_TURNS = 1.45  # with two stages, loads of one wait for the dot of the other, which runs behind (wgmma)
# Bytes a cycle of 8-bit operands that do not lie along K: no matrix unit takes those from shared memory, nor does a load turn
# them, as it turns 16-bit ones, so that each warp gathers them; the dot's second operand and its first. H200, s8 products of 32
# to 4096 rows.
GATHERED, GATHERED_FIRST = 10.0, 2.5
STEP = 40.0  # cycles of a step for its own sake: barriers, addresses
TIGHT = 1.08  # 128 sums a thread leave few registers
MOST = 96  # points that are ranked

Array = Any


def _side_by_side(points: Sequence[TileConfig]) -> Any:
    """A `TileConfig` of arrays, one element a point."""
    columns = zip(*map(astuple, points), strict=True)
    return TileConfig(*(np.array(c, dtype=bool if isinstance(c[0], bool) else np.float64) for c in columns))  # type: ignore[arg-type]


def ranked(spec: KernelSpec, target: Target) -> list[TileConfig]:
    """The legal points of a kernel's space, the one that is expected to be the fastest first."""
    points = list(legal(spec, target))
    if not points:
        return []
    us = predict_us(_work(spec, _side_by_side(points), target), target)
    found: list[TileConfig] = []
    depths: dict[TileConfig, int] = {}  # how many of those that differ in their stages alone
    for i in np.argsort(us, kind="stable"):
        alike = replace(points[i], num_stages=0)
        depths[alike] = depths.get(alike, 0) + 1
        if depths[alike] <= 2:
            found.append(points[i])
    return found[:MOST]


def work(spec: KernelSpec, target: Target) -> Work:
    """The work of one kernel."""
    return _work(spec, _side_by_side([spec.point]), target)


def legal(spec: KernelSpec, target: Target) -> list[TileConfig]:
    """Points whose operands and sums fit into shared memory and registers."""
    arch = arch_of(target)
    size = spec.dot.operand.bits // 8
    shared = target.chip.shared_bytes or DEFAULT_SHARED
    scalar = spec.dot.precision == "ieee"
    rows, columns = _sizes(spec.M), _sizes(spec.N)
    depths = (16, 32) if size == 4 else (32, 64, 128) if size == 2 else (64, 128, 256)
    # wgmma wants 64 rows, and takes its left operand alone from registers, where conversions leave theirs.
    swaps, converts = arch.capability == 90 and not scalar, _conversions(spec.rhs) > _conversions(spec.lhs)
    found: list[TileConfig] = []
    for tile_m, tile_n, tile_k, num_warps in itertools.product(rows, columns, depths, (4, 8)):
        sums = tile_m * tile_n / (num_warps * arch.warp)
        most = 64 if scalar or spec.dot.promote else 128 if arch.backend == "cuda" else 256
        if sums > most or sums < 2 or (tile_m * tile_n < 4096 and num_warps == 8):
            continue
        if tile_k > max(2 * depths[0], next_power_of_2(spec.K)) or (tile_m + tile_n) * tile_k * size > 96 << 10:
            continue
        for num_stages in (1, 2) if arch.backend == "hip" else (2, 3, 4, 5, 6):
            bytes_ = num_stages * (tile_m + tile_n) * tile_k * size
            if bytes_ > shared or (num_stages > 2 and (num_stages - 1) * tile_k >= max(spec.K, tile_k * 2)):
                continue
            for split_k in _splits(spec, tile_m, tile_n, tile_k, target):
                for swap_ab in (False, True) if swaps and (tile_m < 64 or converts) and tile_n >= 64 else (False,):
                    point = TileConfig(tile_m, tile_n, tile_k, num_warps, num_stages, split_k, 8, swap_ab)
                    if shared_bytes(spec, point, arch) <= shared:
                        found.append(point)
    return found


def shared_bytes(spec: KernelSpec, p: TileConfig, arch: Arch) -> int:
    """Shared memory of a point, as Triton was seen to take it: an operand that lies in memory for each stage; of one that is
    computed each source for all stages but one, and what is computed, unless wgmma takes that from registers."""
    size = spec.dot.operand.bits // 8
    bytes_ = 0
    for access, rows, upright in ((spec.lhs, p.tile_m, p.swap_ab), (spec.rhs, p.tile_n, not p.swap_ab)):
        if not _conversions(access):
            bytes_ += p.num_stages * rows * p.tile_k * size
            continue
        vectors = sum(isinstance(n.op, Param) for n in toposort((access.root,))) - 1
        each = rows * p.tile_k * _bytes(access) + 4 * vectors * max(rows, p.tile_k)
        in_registers = arch.capability == 90 and size == 2 and not upright and rows >= 64
        bytes_ += int((p.num_stages - 1) * each) + (0 if in_registers else rows * p.tile_k * size)
    return bytes_


def _sizes(extent: int) -> list[int]:
    """Tile sizes along an axis: up to the first that covers it."""
    return [s for s in (16, 32, 64, 128, 256) if s < 2 * extent or s == 16]


def _splits(spec: KernelSpec, tile_m: int, tile_n: int, tile_k: int, target: Target) -> list[int]:
    """Parts of K that are worth having: each with a few steps, and no more blocks than fill the chip twice."""
    tiles = spec.batch * -(-spec.M // tile_m) * -(-spec.N // tile_n)
    steps = -(-spec.K // tile_k)
    return [1, *(s for s in (2, 4, 8, 16) if steps >= 4 * s and tiles * s <= 2 * target.cores)]


def _work(spec: KernelSpec, p: Any, target: Target) -> Work:
    """The work of kernels, for all points at once."""
    arch = arch_of(target)
    size = spec.dot.operand.bits / 8
    sms = max(target.cores, 1)
    steps = np.ceil(np.ceil(spec.K / p.tile_k) / p.split_k)
    tiles = spec.batch * np.ceil(spec.M / p.tile_m) * np.ceil(spec.N / p.tile_n)
    blocks = tiles * p.split_k

    shared = np.maximum(p.num_stages * (p.tile_m + p.tile_n) * p.tile_k * size, 1024)
    sums = p.tile_m * p.tile_n / (p.num_warps * arch.warp) * (2 if spec.dot.promote else 1)
    registers = (sums + REGISTERS_BESIDE) * p.num_warps * arch.warp * 4
    of_shared = np.floor((target.chip.shared_bytes or DEFAULT_SHARED) / shared)
    of_registers = np.floor((target.chip.registers_bytes or 256 << 10) / registers)
    of_threads = np.minimum(THREADS / (p.num_warps * arch.warp), BLOCKS)
    resident = np.minimum.reduce([of_shared, of_registers, of_threads])
    resident = np.clip(resident, 1, np.maximum(np.ceil(blocks / sms), 1))
    rounds = np.ceil(blocks / sms)  # blocks of the busiest SM
    waves = np.ceil(blocks / (sms * resident))

    lhs, rhs = _bytes(spec.lhs), _bytes(spec.rhs)
    near = p.tile_k * (p.tile_m * lhs + p.tile_n * rhs)  # of a step, from the last cache
    once = spec.batch * spec.K * (spec.M * lhs + spec.N * rhs) + sum(s.root.tensor.size_bytes for s in spec.stores)
    far = np.minimum(once / (near * steps * blocks), 1.0)  # the part of it that comes from memory

    step, behind = _step(spec, p, arch, target)
    step = step + _gathered(spec, p, arch)
    waiting = (LATENCY + far * (FAR_LATENCY - LATENCY)) / (np.maximum(p.num_stages - 1 - behind, 0.5) * resident)
    each = np.maximum.reduce([step, waiting, near / NEAR_BYTES_PER_CYCLE]) + STEP
    each = each * np.where((behind > 0) & (p.num_stages == 2), TAKES_TURNS, 1.0) * np.where(sums >= 128, TIGHT, 1.0)
    converted = _conversions(spec.lhs) * p.tile_m * p.tile_k * ~p.swap_ab
    converted = converted + _conversions(spec.rhs) * p.tile_n * p.tile_k * (~p.swap_ab | (arch.capability != 90))
    if _conversions(spec.lhs) or _conversions(spec.rhs):
        each = each + CONVERTING
    finished = p.tile_m * p.tile_n / LANES * (4 + sum(_operations(s) for s in spec.stores) / len(spec.stores))
    exposed = finished * rounds / resident + BEGINNING * waves
    reduced = np.where(p.split_k > 1, p.tile_m * p.tile_n * 4 * (p.split_k + 1) / 32 + 2 * LATENCY, 0)

    cache = next((c.bytes for c in reversed(target.chip.levels) if c.name.startswith("L")), 32 << 20)
    together = np.minimum(blocks, sms * resident)
    down = np.minimum(np.minimum(p.group_m, np.ceil(spec.M / p.tile_m)), together)
    again = waves * spec.K * (down * p.tile_m * lhs + np.ceil(together / down) * p.tile_n * rhs)
    memory = np.where(once > cache, np.maximum(once, np.minimum(again, near * steps * blocks)), once)
    in_turn = rounds * steps * (each + converted / LANES)
    return Work((Phase(in_turn + exposed + reduced, 0.0, {"memory": memory}),))


def _step(spec: KernelSpec, p: Any, arch: Arch, target: Target) -> tuple[Array, Array]:
    """Cycles of one step along K on the matrix unit, or of shared memory feeding it; and how many steps the dot runs behind."""
    size = spec.dot.operand.bits / 8
    own = "bf16" if spec.dot.unit == "tf32" else spec.dot.unit  # TF32 has half the rate of bf16 on every chip
    unit = next((u for name in (own, *wider_units(own)) for u in target.chip.units if u.operand == name), None)
    rate = (float(unit.ops_per_cycle) if unit is not None else 256.0) / (2 if spec.dot.unit == "tf32" else 1)
    down, wide = _of_dot(p)
    groups = (down >= 64) & (arch.capability == 90 and not _gathers(spec, arch))  # of four warps multiply, from shared memory
    multiplied = 2 * np.maximum(down, 16) * np.maximum(wide, 8) * p.tile_k / rate
    if arch.capability == 90:
        multiplied = multiplied * np.where(groups, 1.0, 1.6)  # mma.sync reaches five eighths of wgmma's rate
    rows = _warps_down(p)
    by_warps = (p.num_warps / rows * down + rows * wide) * p.tile_k * size
    by_groups = down / 64 * (64 + wide) * p.tile_k * size
    fed = np.where(groups, by_groups, by_warps) / SHARED_BYTES_PER_CYCLE
    if spec.dot.precision == "ieee" and arch.backend == "cuda":
        fed = fed * 2  # every operand of a multiply-add comes through a load of its own
    return np.maximum(multiplied, fed), np.where(groups, 1.0, 0.0)


def _of_dot(p: Any) -> tuple[Array, Array]:
    """Rows of the dot's first and second operand."""
    return np.where(p.swap_ab, p.tile_n, p.tile_m), np.where(p.swap_ab, p.tile_m, p.tile_n)


def _warps_down(p: Any) -> Array:
    """Warps side by side along the rows of the dot's first operand: each reads all of the second."""
    down, wide = _of_dot(p)
    return np.clip(2 ** np.round(np.log2(np.sqrt(p.num_warps * down / wide))), 1, np.minimum(p.num_warps, down / 16))


def _gathered(spec: KernelSpec, p: Any, arch: Arch) -> Array:
    """Cycles of a step in which 8-bit operands that do not lie along K are gathered byte by byte."""
    if not _gathers(spec, arch):
        return 0.0
    again = _warps_down(p) / GATHERED
    lhs = np.where(p.swap_ab, again, 1 / GATHERED_FIRST) * p.tile_m if _across(spec.lhs) else 0.0
    rhs = np.where(p.swap_ab, 1 / GATHERED_FIRST, again) * p.tile_n if _across(spec.rhs) else 0.0
    return (lhs + rhs) * p.tile_k


def _gathers(spec: KernelSpec, arch: Arch) -> bool:
    return arch.backend == "cuda" and spec.dot.operand.bits == 8 and (_across(spec.lhs) or _across(spec.rhs))


def _across(access: Access) -> bool:
    """Tell whether an operand's neighbours in memory are not neighbours along K."""
    leaves = [n for n in toposort((access.root,)) if isinstance(n.op, Param)]
    if not leaves:
        return False
    place = access.of_leaf(max(leaves, key=lambda n: n.tensor.elements))
    return bool(place.rows) and bool(place.columns) and all(t.stride != 1 for t in place.columns)


def _conversions(access: Access) -> int:
    """Instructions for each element of an operand on the way to the dot."""
    done = [n.op for n in toposort((access.root,)) if not isinstance(n.op, (Param, Const, *VIEWS))]
    return sum(ON_THE_WAY(op.fn) if isinstance(op, Map) else 7 for op in done)


def _operations(access: Access) -> int:
    return 4 * sum(bool(n.src) and not isinstance(n.op, VIEWS) for n in toposort((access.root,)))


def _bytes(access: Access) -> float:
    """Bytes of memory that an element of an operand takes, in all sources of its size."""
    sources = [n.tensor for n in toposort((access.root,)) if isinstance(n.op, Param) and len(n.shape) > 1]
    most = max((t.elements for t in sources), default=0)
    return sum(max(t.dtype.bits, 8) for t in sources if t.elements == most) / 8 or 1.0
