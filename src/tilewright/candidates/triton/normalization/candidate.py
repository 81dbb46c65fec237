"""Generated GPU kernels for what stands between products: norms, softmaxes, reductions, elementwise chains, quantisation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from tilewright.candidates.triton.expressions.emit import NUMBERED, check_node
from tilewright.candidates.triton.expressions.exchange import SHARED, Inbox, Running, Waits
from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.normalization.kernel import Tiles, arguments_of, kernel_text, sources_of
from tilewright.candidates.triton.runtime.launch import arrays_of, caller, parted, pointers
from tilewright.candidates.triton.runtime.module import Arch, Built, arch_of, build, exact_fp8, launcher, needs
from tilewright.hardware.target import Target
from tilewright.ir.extent import extent_at, hint_of
from tilewright.ir.graph import Node
from tilewright.ir.mesh import Symmetric
from tilewright.ir.ops import Param
from tilewright.lowering.reduction_nest import ReductionNest, reduction_nests
from tilewright.schedule.candidate import FUSION, GPU, Candidate, Kernel, Ranged, Runner, Schedule, Unsupported
from tilewright.schedule.problem import FusionProblem
from tilewright.sizes import next_power_of_2

MOST_COLUMNS = 1 << 15  # of a row that is kept in registers
PIECE = 1024  # columns of a tile where nothing is reduced
VECTOR_BYTES = 16  # that a thread reads or writes at once
ELEMENTS = 20  # of a thread: enough loads in flight, few enough registers
WARPS = (1, 2, 4, 8, 16)
SHARES = (1 / 4, 1 / 2, *WARPS)  # of a row's chunk, in warps
PROGRAMS = 4  # of an SM, so that one loads while others compute
ROOM = 32  # of an SM for programs, and as one ends the next is not begun in no time
POINTS = 12
WAITING_WARPS = 32  # of an SM, of a kernel that waits by rows
EARLY_BYTES = 128  # of constants in a thread's registers while the kernel ahead still runs


@dataclass(frozen=True)
class TileConfig:
    """A point: rows and columns of a tile, and warps of a program."""

    tile_m: int
    tile_n: int
    num_warps: int


@dataclass(frozen=True)
class Plan:
    """A fusion as reduction nests for one GPU: points are rows of a tile and warps of a program.

    Attributes:
        problem, target: what is asked, and where.
        arch: the architecture that Triton compiles for.
        nests: the loops over rows, one kernel for all of them.
    """

    problem: FusionProblem
    target: Target
    arch: Arch
    nests: tuple[ReductionNest, ...]

    @property
    def cores(self) -> int:
        return max(self.target.cores, 1)

    @property
    def largest(self) -> ReductionNest:
        """The reduction nest whose tiles a schedule says; the others' follow from its number of warps."""
        return max(self.nests, key=lambda r: hint_of(r.rows * r.columns))

    def schedules(self) -> list[Schedule]:
        return [Schedule.of_point(p) for p in _points(self.largest, self.arch, self.cores)[:POINTS]]

    def tiles(self, schedule: Schedule) -> tuple[Tiles, ...]:
        """The tiles of each nest that a schedule stands for."""
        point, weights = schedule.point(TileConfig), self.problem.weights
        found: list[Tiles] = []
        for nest in self.nests:
            mine = point if nest is self.largest else _points(nest, self.arch, self.cores, (point.num_warps,))[0]
            tiles = Tiles(nest, mine.tile_m, mine.tile_n, self.arch.capability == 90)
            early = _early(tiles, weights, point.num_warps * self.arch.warp) if any(weights) else ()
            found.append(replace(tiles, early=early))
        return tuple(found)

    def compile(self, schedule: Schedule) -> None:
        self.machine_code(self.tiles(schedule), schedule.point(TileConfig).num_warps)

    def machine_code(self, several: Sequence[Tiles], num_warps: int, arrival: Waits | None = None, programs: int = 0) -> Built:
        """The kernel of all nests; `arrival` and `programs`: see `kernel_text`."""
        types = [self.problem.types[i] for i in sources_of(several)] + list(self.problem.outputs)
        signature = {name: pointer_type(t.dtype) for name, t in zip(arguments_of(several), types, strict=True)}
        signature |= {} if arrival is None else arrival.KINDS
        written = kernel_text(several, exact_fp8(self.arch), arrival, programs)
        options = {"debug": True, "sanitize_overflow": False} if any(t.nest.tables for t in several) else {}
        if any(t.dependent_launch for t in several) or (arrival is not None and arrival.by_rows):
            options["launch_pdl"] = True
        return build(written, signature, self.arch, self.target.index, num_warps=num_warps, **options)

    def build(self, schedule: Schedule) -> Kernel:
        several = self.tiles(schedule)
        built = self.machine_code(several, schedule.point(TileConfig).num_warps)
        return self.kernel(self.problem, schedule, several, built, sum(t.grid for t in several))

    def kernel(self, problem: FusionProblem, schedule: Schedule, several: Sequence[Tiles], built: Built, grid: int) -> Kernel:
        """The kernel of a problem that machine code of these tiles serves, of so many programs."""
        target, start = self.target, launcher(built.kernel, (grid,), self.target.index, built.numbers)
        given = [*pointers("source", sources_of(several)), *pointers("result", range(len(problem.outputs)))]
        run = partial(caller, start, given, len(problem.types), arrays_of(problem))

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            return parted(problem, run(weights, target))

        def place(weights: Mapping[int, torch.Tensor], places: Mapping[int, torch.Tensor]) -> Runner:
            return run(weights, target, places=places)

        return Kernel(CANDIDATE.name, schedule, prepare, place, **vars(needs(built.kernel)))

    def awaiting(self, schedule: Schedule, inbox: Inbox, sent: Sequence[int]) -> Running:
        """A function that gives the runner of a point that waits for what ranks send (`expressions/exchange.py`)."""
        problem, target, several = self.problem, self.target, self.tiles(schedule)
        read, dtype = sources_of(several), problem.types[sent[0]].dtype
        arrival = inbox.arrival(dtype, tuple(f"p{read.index(i)}" for i in sent))
        num_warps, grid, programs = schedule.point(TileConfig).num_warps, sum(t.grid for t in several), 0
        if arrival.by_rows:
            several = tuple(replace(t, dependent_launch=False, early=()) for t in several)
            grid = programs = min(grid, self.cores * max(WAITING_WARPS // num_warps, 1))
        built = self.machine_code(several, num_warps, arrival, programs)

        def made(weights: Mapping[int, torch.Tensor], memory: Symmetric) -> Runner:
            inbox.prepare(memory)
            start = launcher(built.kernel, (grid,), target.index, built.numbers)
            held = {**weights, **dict(zip(sent, inbox.received(memory, dtype), strict=True))}
            held |= {SHARED: inbox.words(memory), SHARED + 1: memory.late}
            given = [*pointers("source", read), *pointers("result", range(len(problem.outputs)))]
            given += pointers("source", (SHARED, SHARED + 1))
            return caller(start, given, len(problem.types), arrays_of(problem), held, target)

        return made


def plan(problem: FusionProblem, target: Target) -> Plan:
    """The plan of a fusion as reduction nests, a kernel for all of them.

    Raises:
        Unsupported: the reason why there is none.
    """
    arch = arch_of(target)
    nests = reduction_nests(problem.roots, check_node, problem.destinations)
    for nest in nests:
        if any(nest.level.values()) and nest.columns > MOST_COLUMNS:
            raise Unsupported(f"a row of {nest.columns:,} columns does not fit into registers")
        if nest.rows > NUMBERED or nest.columns > NUMBERED:
            raise Unsupported("more than 2^31 rows or columns")
    return Plan(problem, target, arch, nests)


def ranged(problem: FusionProblem, target: Target, schedule: Schedule) -> Ranged:
    """A kernel that leaves extents open which the problem leaves open.

    Raises:
        Unsupported: the reason why there is none.
    """
    whole = plan(problem, target)
    several = whole.tiles(schedule)
    built, grid = whole.machine_code(several, schedule.point(TileConfig).num_warps), sum(t.grid for t in several)
    return lambda one, values: whole.kernel(one, schedule, several, built.at(values), extent_at(grid, values))


def _early(tiles: Tiles, weights: Sequence[bool], threads: int) -> tuple[Node, ...]:
    """Constants that are read before the kernel ahead has ended, while there are registers for them: what a row is scaled by
    would else be asked for when the row is reduced."""
    r = tiles.nest
    if not tiles.dependent_launch:
        return ()
    params = [n for n in r.nodes if isinstance(n.op, Param) and n not in r.tables and weights[r.sources[n.op.index]]]
    each = tiles.tile_m * tiles.tile_n * tiles.chunks / threads
    size = sum(each * n.dtype.bits / 8 for n in params if n in r.across)
    return tuple(params) if size <= EARLY_BYTES else ()


def _points(nest: ReductionNest, arch: Arch, cores: int, warps: Sequence[int] = WARPS) -> list[TileConfig]:
    """Tiles of which a thread holds VECTOR_BYTES side by side of the widest values along a row, best first: if it were more,
    narrow results would be exchanged through shared memory. A warp, or several, take a row, or several."""
    along = [n for n in nest.nodes if n in nest.across and (isinstance(n.op, Param) or n in nest.roots)]
    vector = max(1, VECTOR_BYTES // max(n.dtype.size_bytes(1) for n in along)) if along else 1
    reduces, all_rows, all_columns = any(nest.level.values()), hint_of(nest.rows), hint_of(nest.columns)
    columns = next_power_of_2(all_columns if reduces else min(all_columns, PIECE))
    distance: dict[TileConfig, float] = {}
    for num_warps, share in product(warps, SHARES):
        tile_n = min(columns, int(vector * arch.warp * share))
        tile_m = vector * arch.warp * num_warps // tile_n
        if share > num_warps or tile_m > next_power_of_2(all_rows):
            continue
        chunks = -(-all_columns // tile_n) if reduces else 1
        pieces = -(-all_columns // (chunks * tile_n))
        elements, grid = tile_m * tile_n * chunks / (num_warps * arch.warp), -(-all_rows // tile_m) * pieces
        terms = (
            4 * math.log2(pieces * chunks * tile_n / all_columns),  # columns that do not exist
            abs(math.log2(elements / ELEMENTS)),
            max(0.0, -math.log2(grid / (PROGRAMS * cores))),  # SMs without work
            abs(math.log2(num_warps / 4)) / 4,
            1.5 if num_warps == 1 and grid > ROOM * cores else 0.0,
            abs(math.log2(share)) / 4 if reduces else 0.0,
        )
        distance.setdefault(TileConfig(tile_m, tile_n, num_warps), sum(terms))
    if not distance:  # fewer elements than a warp holds
        return [TileConfig(next_power_of_2(all_rows), columns, warps[0])]
    return sorted(distance, key=distance.__getitem__)


CANDIDATE = Candidate("triton_norm", FUSION, GPU, 5, plan, ranged=ranged, code_of=lambda schedule: schedule)
