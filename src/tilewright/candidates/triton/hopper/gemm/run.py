"""Kernels of a Hopper plan: machine code, and its calls from Python, for which TMA descriptors are made once an address."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

import torch

from tilewright.candidates.triton.gemm.dots import SHORT_SUM_BITS, SHORT_SUM_ROUNDOFF
from tilewright.candidates.triton.hopper.gemm.epilogue import write
from tilewright.candidates.triton.hopper.gemm.plan import HopperGemm, Matrix
from tilewright.candidates.triton.hopper.gemm.space import tile_configs, work
from tilewright.candidates.triton.hopper.gemm.spec import KernelSpec, TileConfig, spec_of
from tilewright.candidates.triton.hopper.gemm.tma import with_descriptors
from tilewright.candidates.triton.hopper.ptx import Rewrite, multicast, narrowed, rewriting, split, unsigned, widest_products
from tilewright.candidates.triton.runtime.launch import caller
from tilewright.candidates.triton.runtime.module import Arch, Built, build, launcher, needs
from tilewright.dtype import F8E4M3FN, F8E5M2
from tilewright.ir.graph import toposort
from tilewright.ir.ops import Dequantize, Param
from tilewright.schedule.candidate import Kernel, Runner, Schedule
from tilewright.schedule.cost import Work
from tilewright.schedule.packed import packed_once
from tilewright.schedule.recipe import Pointer

OWN = 8  # numbers behind the problem's sources that packed words have (`w4/tiles.py`); copies of operands come after them
MOST_TRIED = 12  # tile configurations; the ranking is better than what is left of them


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
        return self.work_of(schedule.point(TileConfig))

    def compile(self, schedule: Schedule) -> None:
        compiled(self.spec(schedule.point(TileConfig)))

    def build(self, schedule: Schedule) -> Kernel:
        tile = schedule.point(TileConfig)
        spec = self.spec(tile)
        built = compiled(spec)
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


def compiled(spec: KernelSpec) -> Built:
    """A kernel's machine code. Once it has run it is loaded on one device."""
    types = {a.name: a.type for a in spec.arguments} | spec.scratch | dict.fromkeys(spec.extents, "i32")
    with rewriting(*_rewrites(spec)):
        return build(
            write(spec),
            types,
            Arch("cuda", 90, 32),
            spec.plan.target.index,
            num_warps=4,
            launch_pdl=True,
            enable_fp_fusion=False,
        )


def _rewrites(spec: KernelSpec) -> list[Rewrite]:
    """Rewrites of a kernel's PTX, in order; all of them follow from its text."""
    config = spec.config
    found: list[Rewrite] = [widest_products] if config.integer and config.padded_n == 256 else []
    if config.tile_n < config.padded_n:
        found.append(partial(narrowed, columns=config.tile_n))
    if any(config.unsigned):
        found.append(partial(unsigned, lhs=config.unsigned[0], rhs=config.unsigned[1]))
    if config.split_k > 1:
        rings = config.num_stages * config.tile_m * 128, config.num_stages * config.tile_n * 128
        found.append(partial(split, blocks=config.split_k, groups=config.consumers, ring_bytes=rings))
    if config.multicast:
        found.append(partial(multicast, right=[a.name for a in spec.operands].index("b_desc")))
    return found


def runner(spec: KernelSpec, built: Built, weights: Mapping[int, torch.Tensor]) -> Runner:
    """A function that runs a kernel on sources."""
    arguments, config, target = spec.arguments, spec.config, spec.plan.target
    numbers = [*spec.extents.values(), *built.numbers]
    start = launcher(built.kernel, (spec.tile.blocks,), target.index, numbers=numbers)
    views = [a.view for a in arguments if a.view is not None]
    start = with_descriptors(start, views, built.kernel.metadata.tensordesc_meta)
    constant, operands, given = dict(weights), dict[int, Matrix](), list[Pointer]()
    for at, a in enumerate(arguments):
        if a.result is not None:
            given.append(Pointer("result", a.result))
        elif a.source is not None:
            given.append(Pointer("source", a.source))
        elif a.matrix is not None:
            number = len(spec.plan.problem.types) + OWN + at
            given.append(Pointer("source", number))
            if a.matrix.constant:
                constant[number] = _packed(a.matrix, weights)
            else:
                operands[number] = a.matrix
    if spec.tile.stream_k:
        partial_sums = 2 * spec.tile.blocks * config.tile_m * config.padded_n * spec.acc.size_bytes(1)
        arrivals = spec.tile.stream_k * config.consumers * (2 if config.multicast else 1)
        given += [Pointer("scratch", partial_sums), Pointer("counters", arrivals)]
    problem = spec.plan.problem
    return caller(start, given, len(problem.types), problem.outputs, constant, target, operands=operands)


def _packed(matrix: Matrix, weights: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """A constant operand as it lies in memory, copied once."""
    nodes = toposort((matrix.root,))
    if not any(isinstance(n.op, Dequantize) for n in nodes):
        return matrix.copied(weights)
    read = [weights[n.op.index] for n in nodes if isinstance(n.op, Param)]  # codes, which may be dropped and unpacked again
    return packed_once(read, matrix, lambda: matrix.copied(weights))
