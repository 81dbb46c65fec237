"""Kernels for a gemm on Hopper, as candidates offer them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch

from tilewright.candidates.triton.gemm.dots import SHORT_SUM_BITS, SHORT_SUM_ROUNDOFF
from tilewright.candidates.triton.hopper.gemm.plan import HopperGemm
from tilewright.candidates.triton.hopper.gemm.run import compiled, runner
from tilewright.candidates.triton.hopper.gemm.space import spread_over, tile_configs, work
from tilewright.candidates.triton.hopper.gemm.spec import KernelSpec, spec_of
from tilewright.candidates.triton.hopper.gemm.tile import TileConfig
from tilewright.candidates.triton.runtime.module import Built, needs
from tilewright.dtype import F8E4M3FN, F8E5M2
from tilewright.ir.graph import toposort
from tilewright.ir.ops import Param
from tilewright.schedule.candidate import Kernel, Ranged, Runner, Schedule
from tilewright.schedule.cost import Work
from tilewright.schedule.problem import Problem

SPREAD = {"blocks": 0, "stream_k": 1}  # knobs that machine code does not depend on, but for whether there are any
MOST_TRIED = 12  # tile configurations; the ranking is better than what is left of them


def code_of(schedule: Schedule) -> Schedule:
    """A point without what tells how many blocks there are, and what they share."""
    return Schedule(tuple((name, min(int(value), SPREAD[name]) if name in SPREAD else value) for name, value in schedule.knobs))


@dataclass(frozen=True)
class Plan:
    """Kernels for a gemm on Hopper, as a candidate offers them.

    Attributes:
        gemm: the problem in the kernels' terms.
        name: the candidate's.
    """

    gemm: HopperGemm
    name: ClassVar[str] = "hopper"

    @cached_property
    def tiles(self) -> list[TileConfig]:
        """The most promising tile configurations."""
        return tile_configs(self.gemm)[:MOST_TRIED]

    @property
    def short_sums(self) -> bool:
        """Hopper keeps few bits of sums of 8-bit floats."""
        return self.gemm.lhs.dtype in (F8E4M3FN, F8E5M2)

    def spec(self, tile: TileConfig) -> KernelSpec:
        """The kernel of a tile configuration."""
        return spec_of(self.gemm, tile)

    def work_of(self, tile: TileConfig) -> Work:
        """The work of a kernel."""
        return work(self.spec(tile))

    def packing(self, spec: KernelSpec) -> tuple[int, frozenset[int]]:
        """Bytes of packed weights, and the sources that they are made of."""
        packed = [m for m in (spec.plan.lhs, spec.plan.rhs) if m.constant and m.source is None]
        read = toposort([m.root for m in packed])
        return sum(m.copied_bytes for m in packed), frozenset(n.op.index for n in read if isinstance(n.op, Param))

    def prepare(self, spec: KernelSpec, built: Built, weights: Mapping[int, torch.Tensor]) -> Runner:
        """A function that runs a kernel, its weights packed."""
        return runner(spec, built, weights)

    def schedules(self) -> Iterable[Schedule]:
        bits = {"acc_bits": SHORT_SUM_BITS} if self.short_sums else {}
        return [Schedule.of_point(tile, **bits) for tile in self.tiles]

    def work(self, schedule: Schedule) -> Work:
        tile = schedule.point(TileConfig)
        return self.work_of(tile if tile.blocks else spread_over(self.gemm, tile))

    def compile(self, schedule: Schedule) -> None:
        compiled(self.spec(schedule.point(TileConfig)))

    def build(self, schedule: Schedule) -> Kernel:
        spec = self.spec(schedule.point(TileConfig))
        return self.kernel(schedule, spec, compiled(spec))

    def ranged(self, schedule: Schedule) -> Ranged:
        """A kernel that leaves extents open which the gemm leaves open."""
        tile = schedule.point(TileConfig)
        spec = self.spec(tile)
        built = compiled(spec)

        def at(problem: Problem, values: Mapping[str, int]) -> Kernel:
            spread = spread_over(self.gemm.at(problem, values), tile)
            point = Schedule(tuple((name, getattr(spread, name, value)) for name, value in schedule.knobs))
            return self.kernel(point, spec.at(problem, spread, values), built.at(values))

        return at

    def kernel(self, schedule: Schedule, spec: KernelSpec, built: Built) -> Kernel:
        """The kernel of machine code."""
        tile = spec.tile
        packed_bytes, packed = self.packing(spec)
        return Kernel(
            self.name,
            schedule,
            partial(self.prepare, spec, built),
            workspace_bytes=8 * tile.blocks * tile.tile_m * tile.tile_n if tile.stream_k else 0,
            packed_bytes=packed_bytes,
            releasable=packed - {a.source for a in spec.arguments if a.source is not None},
            roundoff=SHORT_SUM_ROUNDOFF if self.short_sums else 0.0,
            **vars(needs(built.kernel)),
        )
