"""Generated attention for Hopper: whole rows of scores in registers (`_rows.py`), or of some keys at a time (`_flash.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewright.candidates.triton.attention.heads import Heads, heads_of
from tilewright.candidates.triton.attention.kernel import power, sources_of
from tilewright.candidates.triton.expressions.printer import FP8, pointer_type
from tilewright.candidates.triton.hopper.attention.functions import arguments, kernel_text
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
from tilewright.candidates.triton.hopper.fast_math import NATIVE_FP8
from tilewright.candidates.triton.hopper.gemm.run import MOST_KEPT
from tilewright.candidates.triton.hopper.gemm.tma import TMA_TYPES, descriptor
from tilewright.candidates.triton.runtime.launch import addresses, caller, dense, maker, on
from tilewright.candidates.triton.runtime.module import INSTALL, Arch, Built, build, installed, launcher, needs
from tilewright.dtype import F32
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import ATTENTION, GPU, Candidate, Kernel, Runner, Schedule, Unsupported
from tilewright.schedule.problem import AttentionProblem

MOST_TRIED = 6  # points


@dataclass(frozen=True)
class Plan:
    problem: AttentionProblem
    target: Target
    heads: Heads
    points: tuple[Point, ...]

    def schedules(self) -> Iterable[Schedule]:
        return map(schedule_of, self.points)

    def compile(self, schedule: Schedule) -> None:
        machine_code(self.heads, self.problem, point_of(schedule), self.target.index)

    def build(self, schedule: Schedule) -> Kernel:
        heads, problem, target, point = self.heads, self.problem, self.target, point_of(schedule)
        built = machine_code(heads, problem, point, target.index)
        count = blocks(heads, point, target.cores)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            if point.by_tma:
                return _tma_caller(heads, problem, point, built, count, target, weights)
            launch = launcher(built.kernel, (count,), target.index, built.numbers)
            return caller(sources_of(heads), problem.outputs, launch, weights, target)

        return Kernel(CANDIDATE.name, schedule, prepare, **vars(needs(built.kernel)))


def plan(problem: AttentionProblem, target: Target) -> Plan:
    if "sm_90" not in target.features:
        raise Unsupported("wgmma as it is used here is Hopper's (sm_90)")
    if not installed():
        raise Unsupported(INSTALL)
    found = supported_heads(problem)
    fitting = points(found, target.cores, target.caches_bytes.get("shared", target.chip.shared_bytes))
    if not fitting:
        raise Unsupported("keys and values of a head do not fit into shared memory")
    return Plan(problem, target, found, tuple(fitting[:MOST_TRIED]))


def supported_heads(problem: AttentionProblem) -> Heads:
    """The attention to generate.

    Raises:
        Unsupported: the sentence why there is none.
    """
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
    """Tell whether there is a product of queries and keys as they are."""
    q, k, v = (o.codes for o in (heads.q, heads.k, heads.v))
    alike = q is k is None or (q is not None and k is not None and q.dtype is k.dtype and q.dtype in FP8)
    return alike and all(c is None or (c.zero == 0 and c.dtype.name in NATIVE_FP8) for c in (q, k, v))


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
    names = arguments(heads, point)
    signature = {n: pointer_type((problem.types if n[0] == "p" else problem.outputs)[int(n[1:])].dtype) for n in names}
    found = brought(heads) if point.by_tma else None
    if found is not None:
        operands = zip("qkv", (heads.q, heads.k, heads.v), found, strict=True)
        boxes = {f"{n}_desc": descriptor(TMA_TYPES[o.dtype.name], b.array.box) for n, o, b in operands}
        signature = boxes | signature
    text = kernel_text(heads, point)
    return build(text, "kernel", signature, Arch("cuda", 90, 32), device, enable_fp_fusion=False, num_warps=4, launch_pdl=True)


def _tma_caller(
    heads: Heads,
    problem: AttentionProblem,
    point: Point,
    built: Built,
    blocks: int,
    target: Target,
    weights: Mapping[int, torch.Tensor],
) -> Runner:
    """What runs a kernel whose operands come by TMA.

    Args:
        heads, point: what it was made for.
        problem: the attention, for its results' types.
        built: its machine code.
        blocks: how many.
        target: the device.
        weights: sources that do not change, by number.
    """
    operands = brought(heads)
    assert operands is not None
    start = launcher(built.kernel, (blocks,), target.index, built.numbers)
    metas = built.kernel.metadata.tensordesc_meta
    read = [o.source for o in operands] + [int(n[1:]) for n in arguments(heads, point) if n[0] == "p"]
    constant = {i: dense(t) for i, t in weights.items() if i in read}
    fixed = [constant[i].data_ptr() if i in constant else 0 for i in read]
    given = [(at, i) for at, i in enumerate(read) if i not in constant]
    make = maker(problem.outputs, target.device)
    known: dict[tuple[int, ...], list[object]] = {}

    def run(sources: Sequence[torch.Tensor], _kept: object = constant) -> list[torch.Tensor]:  # by its address alone
        found, _copies = addresses(fixed, given, sources)
        made = make()
        brought_from = tuple(found[: len(operands)])
        descriptors = known.get(brought_from)
        if descriptors is None:
            if len(known) >= MOST_KEPT:
                known.clear()
            descriptors = known[brought_from] = [
                x for o, at, meta in zip(operands, brought_from, metas, strict=True) for x in o.array.at(at, meta)
            ]
        start(*descriptors, *found[len(operands) :], *[t.data_ptr() for t in made])
        return made

    return on(target.index, run)


CANDIDATE = Candidate("hopper_attention", ATTENTION, GPU, 4, plan)
