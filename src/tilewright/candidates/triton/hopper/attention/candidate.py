"""Generated attention for Hopper: whole rows of scores in registers (`attend.py`, `stream.py`), or of some keys
at a time (`_flash.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from tilewright.candidates.triton.attention.heads import Heads, heads_of
from tilewright.candidates.triton.attention.kernel import power, sources_of
from tilewright.candidates.triton.expressions.casts import FP8, pointer_type
from tilewright.candidates.triton.expressions.text import Written
from tilewright.candidates.triton.hopper.attention.attend import WARPS, arguments, kernel_text
from tilewright.candidates.triton.hopper.attention.functions import flash_text, streamed_arguments
from tilewright.candidates.triton.hopper.attention.run import streamed_caller
from tilewright.candidates.triton.hopper.attention.sizes import (
    HELD,
    Point,
    Ring,
    blocks,
    brought,
    flows,
    points,
    registers,
    unaligned,
)
from tilewright.candidates.triton.hopper.attention.stream import streamed_text
from tilewright.candidates.triton.hopper.brief import NATIVE_FP8
from tilewright.candidates.triton.hopper.gemm.build import TMA_TYPES, descriptor
from tilewright.candidates.triton.runtime.launch import caller
from tilewright.candidates.triton.runtime.module import INSTALL, Arch, Built, build, installed, launcher, needs
from tilewright.dtype import F32
from tilewright.hardware.target import Target
from tilewright.lowering.access import Unsupported, or_why
from tilewright.schedule.candidate import GPU, Kernel, Runner
from tilewright.schedule.problem import AttentionProblem, ProblemKind
from tilewright.schedule.schedule import Schedule

MOST_TRIED = 6  # points


@or_why
def _heads(problem: AttentionProblem) -> Heads:
    """The attention to generate, or the sentence why there is none."""
    found = heads_of(problem, NATIVE_FP8)
    why = unaligned(found)
    if found.unit is F32:
        raise Unsupported("the matrix unit takes f16 or bf16 here")
    if found.on_scores is not None or found.on_weights is not None:
        raise Unsupported("its scores or weights are changed on the way")
    if not _takes(found):
        raise Unsupported("queries and keys are multiplied as f16, bf16 or both as one 8-bit float")
    if found.scale <= 0:
        raise Unsupported("its scale is not positive")
    if found.causal == "lower" and found.keys < found.queries:
        raise Unsupported("causality hides all keys from some queries")
    if (registers(found) > HELD and not flows(found)) or max(power(found.depth), power(found.width)) > 128:
        raise Unsupported(f"all scores of {found.keys} keys do not fit into registers beside {found.width} columns")
    if why is not None:
        raise Unsupported(why)
    return found


def _takes(heads: Heads) -> bool:
    """Whether there is a product of queries and keys as they are."""
    q, k, v = (o.codes for o in (heads.q, heads.k, heads.v))
    alike = q is k is None or (q is not None and k is not None and q.dtype is k.dtype and q.dtype in FP8)
    return alike and all(c is None or (c.zero == 0 and c.dtype.name in NATIVE_FP8) for c in (q, k, v))


class HopperAttention:
    """Found by file name; see `schedule.candidate.Candidate`."""

    name = "hopper_attention"
    kinds = frozenset[ProblemKind]({"attention"})
    devices = GPU
    preference = 4

    def refuse(self, problem: AttentionProblem, target: Target) -> str | None:
        if "sm_90" not in target.features:
            return "wgmma as it is used here is Hopper's (sm_90)"
        if not installed():
            return INSTALL
        found = _heads(problem)
        if isinstance(found, str):
            return found
        return None if self._points(found, target) else "keys and values of a head do not fit into shared memory"

    def schedules(self, problem: AttentionProblem, target: Target) -> Iterable[Schedule]:
        found = self._points(_found(problem), target)[:MOST_TRIED]
        return map(schedule_of, found)

    def compile(self, problem: AttentionProblem, schedule: Schedule, target: Target) -> None:
        machine_code(_found(problem), problem, point_of(schedule), target.index)

    def build(self, problem: AttentionProblem, schedule: Schedule, target: Target) -> Kernel:
        heads, point = _found(problem), point_of(schedule)
        built = machine_code(heads, problem, point, target.index)
        found = needs(built.kernel)
        count = blocks(heads, point, target.cores)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            if point.streamed or point.ring:
                return streamed_caller(heads, problem, built, count, target, weights)
            launch = launcher(built.kernel, (count,), target.index, built.numbers)
            return caller(sources_of(heads), problem.outputs, launch, weights, target)

        return Kernel(
            self.name,
            schedule,
            prepare,
            registers=found.registers,
            spills=found.spills,
            shared_bytes=found.shared_bytes,
        )

    @staticmethod
    def _points(heads: Heads, target: Target) -> list[Point]:
        return points(heads, target.cores, target.caches_bytes.get("shared", target.chip.shared_bytes))


def _found(problem: AttentionProblem) -> Heads:
    heads = _heads(problem)
    assert isinstance(heads, Heads)
    return heads


def schedule_of(point: Point) -> Schedule:
    """A point as plans and reports have it."""
    if point.ring:
        r = point.ring
        return Schedule.of(num_stages=r.stages, groups=r.groups, turns=r.turns, overlapped=r.overlapped)
    sums = "products" if point.ones else "adds"
    return Schedule.of(blocks="stay", sums=sums) if point.streamed else Schedule.of(splits=point.splits, sums=sums)


def point_of(schedule: Schedule) -> Point:
    """The point that a schedule names."""
    knobs = dict(schedule.knobs)
    if "num_stages" in knobs:
        ring = Ring(int(knobs["num_stages"]), int(knobs["groups"]), bool(knobs["turns"]), bool(knobs["overlapped"]))
        return Point(1, ones=False, ring=ring)
    return Point(int(knobs.get("splits", 1)), knobs["sums"] == "products", streamed="blocks" in knobs)


def machine_code(heads: Heads, problem: AttentionProblem, point: Point, device: int = 0) -> Built:
    """The kernel."""
    names = (streamed_arguments if point.streamed or point.ring else arguments)(heads)
    signature = {n: pointer_type((problem.types if n[0] == "p" else problem.outputs)[int(n[1:])].dtype) for n in names}
    tma = point.streamed or point.ring
    found = brought(heads) if tma else None
    if found is not None:
        operands = zip("qkv", (heads.q, heads.k, heads.v), found, strict=True)
        boxes = {f"{n}_desc": descriptor(TMA_TYPES[o.dtype.name], b.array.box) for n, o, b in operands}
        signature = boxes | signature
    text = _text(heads, point)
    return build(
        text, "kernel", signature, Arch("cuda", 90, 32), device, enable_fp_fusion=False, num_warps=WARPS, launch_pdl=True
    )


def _text(heads: Heads, point: Point) -> Written:
    if point.ring:
        return flash_text(heads, point.ring)
    return streamed_text(heads, point) if point.streamed else kernel_text(heads, point)


CANDIDATE = HopperAttention()
