"""Generated GPU kernels for what stands between products: norms, softmaxes, reductions, elementwise chains, quantisation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import product

from tilewright.candidates.triton._call import caller
from tilewright.candidates.triton._casts import pointer_type
from tilewright.candidates.triton._emit import NUMBERED, check_node
from tilewright.candidates.triton._module import (
    INSTALL,
    Arch,
    arch_of,
    compiled,
    exact_fp8,
    installed,
    launcher,
    module,
    needs,
)
from tilewright.candidates.triton._rows import Tiles, kernel_text
from tilewright.hardware.target import Target
from tilewright.ir.access import Unsupported
from tilewright.ir.region import Region, region_of_rows
from tilewright.schedule.candidate import GPU, Kernel
from tilewright.schedule.problem import ProblemKind, RegionProblem
from tilewright.schedule.schedule import Schedule

MOST_COLUMNS = 1 << 15  # of a row that is kept in registers
PIECE = 1024  # columns of a tile where nothing is reduced
ELEMENTS = 16  # of a thread: enough loads in flight, few enough registers
PROGRAMS = 4  # of an SM, so that one loads while others compute
POINTS = 12


@lru_cache(maxsize=256)
def _region(problem: RegionProblem) -> Region | str:
    """The rows to generate, or the sentence why there are none."""
    try:
        region = region_of_rows(problem.roots, check_node)
    except Unsupported as why:
        return str(why)
    if any(region.level.values()) and region.columns > MOST_COLUMNS:
        return f"a row of {region.columns:,} columns does not fit into registers"
    if max(region.rows, region.columns) > NUMBERED:
        return "more than 2^31 rows or columns"
    return region


class TritonRows:
    """Found by file name; see `schedule.candidate.Candidate`."""

    name = "triton_rows"
    kinds = frozenset[ProblemKind]({"region"})
    devices = GPU
    preference = 5

    def refuse(self, problem: RegionProblem, target: Target) -> str | None:
        if not installed():
            return INSTALL
        if arch_of(target) is None:
            return f"Triton does not compile for {target.name}"
        found = _region(problem)
        return found if isinstance(found, str) else None

    def schedules(self, problem: RegionProblem, target: Target) -> Iterable[Schedule]:
        region, arch = _region(problem), arch_of(target)
        assert isinstance(region, Region) and arch is not None
        reduces = any(region.level.values())
        tile_n = _power(region.columns if reduces else min(region.columns, PIECE))
        rows = [m for m in (1, 2, 4, 8, 16, 32, 64, 128) if m <= _power(region.rows)]

        def distance(point: tuple[int, int]) -> float:
            """How far a point is from what keeps memory busy: elements of a thread, programs for every SM."""
            tile_m, warps = point
            elements = tile_m * tile_n / (warps * arch.warp)
            programs = Tiles(region, tile_m, tile_n).grid / (PROGRAMS * max(target.cores, 1))
            return abs(math.log2(elements / ELEMENTS)) + max(0.0, -math.log2(programs)) + abs(math.log2(warps / 4)) / 4

        points = sorted(product(rows, (1, 2, 4, 8, 16)), key=distance)
        return tuple(Schedule.of(tile_m=m, tile_n=tile_n, num_warps=w) for m, w in points[:POINTS])

    def build(self, problem: RegionProblem, schedule: Schedule, target: Target) -> Kernel:
        region, arch = _region(problem), arch_of(target)
        assert isinstance(region, Region) and arch is not None
        tiles = Tiles(region, int(schedule["tile_m"]), int(schedule["tile_n"]))
        kernel = machine_code(tiles, problem, arch, num_warps=int(schedule["num_warps"]))
        found = needs(kernel)
        launch = launcher(kernel, (tiles.grid,), target.index)
        return Kernel(
            self.name,
            schedule,
            lambda weights: caller(region.sources, problem.outputs, launch, weights, target),
            registers=found.registers,
            spills=found.spills,
            shared_bytes=found.shared_bytes,
        )


def machine_code(tiles: Tiles, problem: RegionProblem, arch: Arch, *, num_warps: int) -> object:
    """Triton's compiled kernel of a region for an architecture."""
    region = tiles.region
    types = [problem.types[i] for i in region.sources] + list(problem.outputs)
    signature = {name: pointer_type(t.dtype) for name, t in zip(tiles.arguments, types, strict=True)}
    text = kernel_text(tiles, exact_fp8(arch))
    checks = {"debug": True, "sanitize_overflow": False} if region.tables else {}
    return compiled(module(text).kernel, signature, arch, num_warps=num_warps, enable_fp_fusion=False, **checks)


def _power(n: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(n - 1, 0).bit_length()


CANDIDATE = TritonRows()
