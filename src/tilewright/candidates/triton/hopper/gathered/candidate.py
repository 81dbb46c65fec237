"""Gemms on Hopper whose rows are gathered from other ranks: one kernel that begins with this rank's own rows and goes on as the
others come, by copies that need no multiprocessor (`runtime/copies.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from tilewright.candidates.triton.gemm.dots import SHORT_SUM_BITS, SHORT_SUM_ROUNDOFF
from tilewright.candidates.triton.hopper.arch import require
from tilewright.candidates.triton.hopper.gathered.spec import GatheredSpec, fitting, gathered_spec
from tilewright.candidates.triton.hopper.gathered.timeline import expected_us
from tilewright.candidates.triton.hopper.gemm import kernels
from tilewright.candidates.triton.hopper.gemm.plan import plan_of
from tilewright.candidates.triton.hopper.gemm.run import compiled, runner
from tilewright.candidates.triton.hopper.gemm.space import tile_configs
from tilewright.candidates.triton.hopper.gemm.tile import TileConfig
from tilewright.candidates.triton.runtime.copies import MOST_BYTES, MOST_RANKS, Copies, Sizes
from tilewright.candidates.triton.runtime.module import needs
from tilewright.hardware.target import Target
from tilewright.ir.mesh import team
from tilewright.ir.ops import Param
from tilewright.lowering.gathered import Gathering, gathering
from tilewright.lowering.stages import Stages
from tilewright.schedule.candidate import GEMM, GPU, Candidate, Kernel, Runner, Schedule, Unsupported
from tilewright.schedule.problem import AnyProblem, Problem

FEWEST_ROWS = 256
PIECES = (1, 2, 4)  # of a rank's rows
PIECE_BYTES = 1 << 20  # of one of several: smaller ones travel at less than half the rate
TILES = 2  # of the product alone that are offered
MORE, NEAR = 6, 1.05  # tiles of other shapes, and how much longer than the first of those they may be expected to take


@dataclass(frozen=True)
class Plan:
    """Kernels for a product behind gathers.

    Attributes:
        problem: the whole.
        gathered: what is gathered, and the product.
        product: the kernels of the product alone.
    """

    problem: Problem
    gathered: Gathering
    product: kernels.Plan

    @property
    def rows(self) -> int:
        """Rows of a rank."""
        return self.product.gemm.M // self.gathered.ranks

    @cached_property
    def _fit(self) -> list[TileConfig]:
        """All tiles that fit, the most promising for the product alone first."""
        found = map(self._fitting, tile_configs(self.product.gemm))
        return list(dict.fromkeys(t for t in found if t is not None))

    @property
    def tiles(self) -> list[TileConfig]:
        """The most promising tiles of the product alone that fit."""
        return self._fit[:TILES]

    @cached_property
    def points(self) -> list[tuple[TileConfig, int]]:
        """Tiles and numbers of pieces, the most promising first: those that are expected to end first as rows come, the first
        tiles of the product alone, and the first of both in more pieces."""
        shapes: dict[tuple[int, int, bool], TileConfig] = {}
        for tile in self._fit:
            if not tile.stream_k:  # else shares of a tile come behind all whole ones
                shapes.setdefault((tile.tile_m, tile.tile_n, tile.pingpong), tile)
        gemm, ranks, first = self.product.gemm, self.gathered.ranks, self.tiles[0]
        sent = self.gathered.data_bytes // ranks
        took = {
            (tile, n): expected_us(gemm, tile, ranks, sent, n)
            for n in self.pieces_of_rows
            for tile in (*shapes.values(), first)
        }
        most, best = NEAR * took[first, 1], dict[TileConfig, int]()
        for tile, n in sorted(took, key=lambda point: took[point]):  # of a tile the fewest pieces of those that are equal
            if took[tile, n] <= most and len(best) < MORE:
                best.setdefault(tile, n)
        tiles = dict.fromkeys((*[*best][:1], first))
        further = [(tile, n) for n in self.pieces_of_rows[1:] for tile in tiles if took[tile, n] <= most]
        return [*dict.fromkeys([*best.items(), *((tile, 1) for tile in self.tiles), *further])]

    def _fitting(self, tile: TileConfig) -> TileConfig | None:
        return fitting(tile, self.rows, self.product.gemm.target.cores)

    @property
    def pieces_of_rows(self) -> list[int]:
        """Numbers of pieces that a rank's rows may be sent in."""
        size = self.gathered.data_bytes // self.gathered.ranks
        return [n for n in PIECES if n == 1 or (self.rows % n == 0 and size // n >= PIECE_BYTES)]

    def schedules(self) -> list[Schedule]:
        return [self._point(tile, n) for tile, n in self.points]

    def _point(self, tile: TileConfig, pieces: int) -> Schedule:
        bits = {"acc_bits": SHORT_SUM_BITS} if self.product.short_sums else {}
        return Schedule.of_point(tile, pieces=pieces, **bits)

    def pieces(self) -> list[AnyProblem]:
        """The product of this rank alone, whose fastest tile is tried here, too."""
        return [self.gathered.multiplied]

    def pieces_with(self, weights: Mapping[int, torch.Tensor]) -> list[tuple[AnyProblem, dict[int, torch.Tensor]]]:
        """The same with its constant sources."""
        places = self.gathered.product.places
        return [(self.gathered.multiplied, {at: weights[i] for at, i in enumerate(places) if i in weights})]

    def of_pieces(self, schedule: Schedule, chosen: Sequence[tuple[str, Schedule]]) -> Schedule:
        """The point, with the tile of the product's fastest kernel in place of the first one, if it is of this generator and
        fits."""
        ((name, point),) = chosen
        tile = self._fitting(point.point(TileConfig)) if name == self.product.name else None
        first = schedule.point(TileConfig) == self.tiles[0]
        return self._point(tile, int(schedule["pieces"])) if tile is not None and first else schedule

    def overlapped(self, schedule: Schedule) -> int:
        """The number of parts of which one is multiplied while another one travels."""
        return int(schedule["pieces"]) * self.gathered.ranks

    def offers(self, schedule: Schedule) -> bool:
        tile = schedule.point(TileConfig)
        return self._fitting(tile) == tile and schedule["pieces"] in self.pieces_of_rows

    def spec(self, schedule: Schedule) -> GatheredSpec:
        """The kernel of a point."""
        return gathered_spec(self.product.gemm, schedule.point(TileConfig), self.gathered.ranks, int(schedule["pieces"]))

    def compile(self, schedule: Schedule) -> None:
        compiled(self.spec(schedule))
        Sizes(self.gathered.ranks, self.gathered.data_bytes).machine_code(self.product.gemm.target)

    def build(self, schedule: Schedule) -> Kernel:
        spec, target = self.spec(schedule), self.product.gemm.target
        built, sizes = compiled(spec), Sizes(self.gathered.ranks, self.gathered.data_bytes)
        code, places = sizes.machine_code(target), self.gathered.product.places
        packed_bytes, _ = self.product.packing(spec)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            copies = Copies(team().symmetric(self.gathered.over, sizes.bytes), sizes, target, code)
            given = {at: weights[i] for at, i in enumerate(places) if i in weights}
            multiply = runner(spec, built, given)
            return lambda sources: self._run(spec, copies, multiply, sources)

        return Kernel(
            CANDIDATE.name,
            schedule,
            prepare,
            packed_bytes=packed_bytes,
            roundoff=SHORT_SUM_ROUNDOFF if self.product.short_sums else 0.0,
            parts=(("gemm", self.product.name),),
            **vars(needs(built.kernel)),
        )

    def _run(self, spec: GatheredSpec, copies: Copies, multiply: Runner, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        g, each, here = self.gathered, self.rows // spec.pieces, copies.own
        copies.begin()
        values = [*sources, *(o.seen(copies.data(here)) for o in g.operands)]
        own = [sources[o.source].contiguous() for o in g.operands]
        left = g.product.places[self._left]
        for operand, mine in zip(g.operands, own, strict=True):
            if operand.value != left:  # scales: the epilogue reads all rows' in one place
                copies.lane.here(values[operand.value].narrow(0, here * self.rows, self.rows), mine)
        for step in range(1, g.ranks):  # the order in which receivers want them: theirs are followed by those behind them
            peer = (here - step) % g.ranks
            for j in range(spec.pieces):
                for operand, mine in zip(g.operands, own, strict=True):
                    place = operand.offset + (here * self.rows + j * each) * operand.row_bytes
                    copies.send(peer, place, mine.narrow(0, j * each, each))
                copies.tell(peer, j)
        mine = next(t for o, t in zip(g.operands, own, strict=True) if o.value == left)
        made = multiply([*(values[i] for i in g.product.places), mine, copies.words, copies.late])
        copies.end()
        return [made[i - len(values)] for i in g.results]

    @property
    def _left(self) -> int:
        """The number of the left operand among the product's sources."""
        root = self.gathered.multiplied.op.lhs
        assert isinstance(root.op, Param)
        return root.op.index


def plan(problem: Problem, target: Target) -> Plan:
    """The plan of a product whose left operand's rows are gathered, on an `sm_90` target.

    Raises:
        Unsupported: the reason why there is none.
    """
    require(target)
    found = gathering(problem, Stages(problem))
    if len(found.before) != len(found.operands):
        raise Unsupported("rows are computed before they are gathered")
    product = kernels.Plan(plan_of(found.multiplied, target))
    gemm, root = product.gemm, found.multiplied.op.lhs
    if not isinstance(root.op, Param) or gemm.lhs.source != root.op.index or not gemm.lhs.along_k or gemm.scales:
        raise Unsupported("TMA does not read the rows as they are gathered")
    if found.product.places[root.op.index] not in {o.value for o in found.operands}:
        raise Unsupported("what is gathered is not the left operand")
    if found.ranks > MOST_RANKS or gemm.M < FEWEST_ROWS or gemm.M % found.ranks:
        raise Unsupported(f"{gemm.M} rows of {found.ranks} ranks: {FEWEST_ROWS} or more, of up to {MOST_RANKS}")
    if found.data_bytes > MOST_BYTES:
        raise Unsupported(f"{found.data_bytes:,} bytes are gathered, of which ranks share up to {MOST_BYTES:,}")
    made = Plan(problem, found, product)
    if not made.tiles:
        raise Unsupported(f"no tile has rows of one rank alone, of {made.rows} rows")
    return made


CANDIDATE = Candidate("hopper_gathered", GEMM, GPU, 52, plan, ranks="several")
