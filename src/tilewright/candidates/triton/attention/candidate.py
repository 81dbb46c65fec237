"""Generated GPU attention: two products and a softmax in one kernel; masks, roundings and stores as the graph has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, product

from tilewright.candidates.triton.attention.heads import Heads, Rounded, heads_of
from tilewright.candidates.triton.attention.kernel import TileConfig, kernel_text, power, sources_of
from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.runtime.launch import caller
from tilewright.candidates.triton.runtime.module import Arch, Built, arch_of, build, exact_fp8, launcher, needs
from tilewright.dtype import F32
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import ATTENTION, GPU, Candidate, Kernel, Schedule, Unsupported
from tilewright.schedule.problem import AttentionProblem

MOST_DEPTH = 256  # of a head: past that neither operands nor sums fit into registers and shared memory
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
        return map(Schedule.of_point, islice(_points(self.heads, self.arch, shared), POINTS))

    def compile(self, schedule: Schedule) -> None:
        self.machine_code(schedule)

    def machine_code(self, schedule: Schedule) -> Built:
        """The machine code of a kernel."""
        tile = schedule.point(TileConfig)
        types = {f"p{i}": self.problem.types[i] for i in sources_of(self.heads)}
        types |= {f"o{i}": t for i, t in enumerate(self.problem.outputs)}
        signature = {name: pointer_type(t.dtype) for name, t in types.items()}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": False}
        return build(kernel_text(self.heads, tile, exact_fp8(self.arch)), signature, self.arch, self.target.index, **options)

    def build(self, schedule: Schedule) -> Kernel:
        heads, target = self.heads, self.target
        built = self.machine_code(schedule)
        grid = heads.batch * heads.heads * -(-heads.queries // int(schedule["tile_m"]))
        launch = launcher(built.kernel, (grid,), target.index, built.numbers)
        return Kernel(
            CANDIDATE.name,
            schedule,
            lambda weights: caller(sources_of(heads), self.problem.outputs, launch, weights, target),
            **vars(needs(built.kernel)),
        )


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


def _points(heads: Heads, arch: Arch, shared: int) -> Iterable[TileConfig]:
    """Legal sizes, best guess first."""
    wide = heads.mma_dtype is F32
    exact = arch.capability >= 80  # three products of tf32 are as good as one of f32
    bytes_each = heads.mma_dtype.bits // 8
    depth, width = power(heads.depth), power(heads.width)
    narrow = WARPGROUPS if arch.capability in (90, 100, 103) else WARPS
    ways = ("online",) if heads.on_weights is None else ("twice",)
    if isinstance(heads.on_weights, Rounded) and not wide and arch.backend == "cuda":
        ways = ("held", "twice")
    for scores, precision in product(ways, ("tf32x3", "ieee") if wide and exact else ("ieee",)):
        for tile_m, tile_n, warps, stages in WIDE if wide else HOLDING if scores == "held" else narrow:
            if tile_m > power(heads.queries) or tile_n > power(heads.keys):
                continue
            held = -(-heads.keys // tile_n) * tile_n * tile_m
            if scores == "held" and (held > HELD * warps * arch.warp or tile_m < min(64, power(heads.queries))):
                continue
            taken = bytes_each * (tile_m * depth + stages * tile_n * (depth + width))
            if taken <= shared and tile_m * width <= 128 * warps * arch.warp:
                yield TileConfig(tile_m, tile_n, warps, stages, scores, precision)


CANDIDATE = Candidate("triton_attention", ATTENTION, GPU, 5, plan)
