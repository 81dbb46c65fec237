"""Generated GPU attention: two products and a softmax in one kernel; masks, roundings and stores as the graph has them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Literal, cast

from tilewright.candidates.triton.attention.heads import Heads, Rounded, heads_of
from tilewright.candidates.triton.attention.kernel import Point, kernel_text, power, sources_of
from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.runtime.launch import caller
from tilewright.candidates.triton.runtime.module import (
    INSTALL,
    Arch,
    Built,
    arch_of,
    build,
    exact_fp8,
    installed,
    launcher,
    needs,
)
from tilewright.dtype import F32
from tilewright.hardware.target import Target
from tilewright.lowering.access import Unsupported, or_why
from tilewright.schedule.candidate import GPU, Kernel
from tilewright.schedule.problem import AttentionProblem, ProblemKind
from tilewright.schedule.schedule import Schedule

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


@or_why
def _heads(problem: AttentionProblem, fp8: frozenset[str]) -> Heads:
    found = heads_of(problem, fp8)
    if max(found.depth, found.width) > MOST_DEPTH:
        raise Unsupported(f"a head of {max(found.depth, found.width)} columns does not fit into registers")
    return found


class TritonAttention:
    """Found by file name; see `schedule.candidate.Candidate`."""

    name = "triton_attention"
    kinds = frozenset[ProblemKind]({"attention"})
    devices = GPU
    preference = 5

    def refuse(self, problem: AttentionProblem, target: Target) -> str | None:
        if not installed():
            return INSTALL
        arch = arch_of(target)
        if arch is None:
            return f"Triton does not compile for {target.name}"
        found = _heads(problem, exact_fp8(arch))
        return found if isinstance(found, str) else None

    def schedules(self, problem: AttentionProblem, target: Target) -> Iterable[Schedule]:
        arch = arch_of(target)
        assert arch is not None
        heads = _heads(problem, exact_fp8(arch))
        assert isinstance(heads, Heads)
        shared = target.caches_bytes.get("shared", target.chip.shared_bytes)
        return tuple(_points(heads, arch, shared))[:POINTS]

    def compile(self, problem: AttentionProblem, schedule: Schedule, target: Target) -> None:
        self._machine_code(problem, schedule, target)

    @staticmethod
    def _machine_code(problem: AttentionProblem, schedule: Schedule, target: Target) -> tuple[Heads, Built]:
        arch = arch_of(target)
        assert arch is not None
        heads = _heads(problem, exact_fp8(arch))
        assert isinstance(heads, Heads)
        return heads, machine_code(heads, problem, schedule, arch, target.index)

    def build(self, problem: AttentionProblem, schedule: Schedule, target: Target) -> Kernel:
        heads, built = self._machine_code(problem, schedule, target)
        found = needs(built.kernel)
        grid = heads.batch * heads.heads * -(-heads.queries // int(schedule["tile_m"]))
        launch = launcher(built.kernel, (grid,), target.index, built.numbers)
        return Kernel(
            self.name,
            schedule,
            lambda weights: caller(sources_of(heads), problem.outputs, launch, weights, target),
            registers=found.registers,
            spills=found.spills,
            shared_bytes=found.shared_bytes,
        )


def machine_code(heads: Heads, problem: AttentionProblem, schedule: Schedule, arch: Arch, device: int = 0) -> Built:
    """The kernel for an architecture."""
    written = kernel_text(heads, point_of(schedule), exact_fp8(arch))
    types = {f"p{i}": problem.types[i] for i in sources_of(heads)} | {f"o{i}": t for i, t in enumerate(problem.outputs)}
    signature = {name: pointer_type(t.dtype) for name, t in types.items()}
    warps, stages = int(schedule["num_warps"]), int(schedule["num_stages"])
    return build(written, "kernel", signature, arch, device, enable_fp_fusion=False, num_warps=warps, num_stages=stages)


def point_of(schedule: Schedule) -> Point:
    scores = cast('Literal["online", "held", "twice"]', schedule["scores"])
    return Point(int(schedule["tile_m"]), int(schedule["tile_n"]), str(schedule["precision"]), scores)


def _points(heads: Heads, arch: Arch, shared: int) -> Iterable[Schedule]:
    """Legal points, best guess first."""
    wide = heads.unit is F32
    exact = arch.capability >= 80  # three products of tf32 are as good as one of f32
    bytes_each = heads.unit.bits // 8
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
            room = bytes_each * (tile_m * depth + stages * tile_n * (depth + width))
            if room <= shared and tile_m * width <= 128 * warps * arch.warp:
                yield Schedule.of(
                    tile_m=tile_m, tile_n=tile_n, num_warps=warps, num_stages=stages, scores=scores, precision=precision
                )


CANDIDATE = TritonAttention()
