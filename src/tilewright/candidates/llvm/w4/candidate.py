"""Generated CPU gemms with constant 4-bit weights, scaled by groups along K: the weights are read as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from tilewright.candidates.llvm.expressions.vector import check
from tilewright.candidates.llvm.gemm.dots import PAIRS, Choice, choose
from tilewright.candidates.llvm.gemm.nest import Blocks
from tilewright.candidates.llvm.gemm.space import L2_BYTES
from tilewright.candidates.llvm.runtime import engine
from tilewright.candidates.llvm.runtime.calls import aligned
from tilewright.candidates.llvm.runtime.run import UNSIZED, NestPlan, lies_right, operand, packed_memory, side_of
from tilewright.candidates.llvm.w4.codes import MOST_GROUP, Activations, CodesNest, CodesWriter, activations, chosen
from tilewright.candidates.llvm.w4.kernel import CODES, WIDE, GroupedNest, GroupedWriter
from tilewright.dtype import BF16, F32
from tilewright.hardware.target import Chip, Target
from tilewright.ir.few_bits import half_codes
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Dequantize, Param
from tilewright.lowering.access import codes_of, gate_up, of_store
from tilewright.schedule.candidate import CPU, GEMM, Candidate, Kernel, Runner, Schedule, Unsupported
from tilewright.schedule.packed import packed_once
from tilewright.schedule.problem import Problem

ROWS = 16  # of a tile, at most
PANELS = 8  # of a block, if it has more than one tile
RUN = 4  # panels that a thread reads one after the other, at most, if it has one tile: what follows is asked for in time


def _coded(problem: Problem, found: Node, group: int, chip: Chip) -> tuple[Choice, Activations] | None:
    """The instruction for codes by codes and what the left operand is made of; None if it is multiplied as floats."""
    try:
        lhs = activations(problem.op.lhs)
        choice = chosen(lhs.codes, chip)
    except Unsupported:
        return None
    each = min(group, lhs.group or group)
    even = max(group, lhs.group or group) % each == 0 and each % CODES == 0
    return (choice, lhs) if found.dtype is F32 and even and each <= MOST_GROUP else None


@dataclass(frozen=True)
class TileConfig:
    """One point of the space.

    Attributes:
        instruction: the dot instruction's name.
        mr, nr, nc: see docs/glossary.md.
        decoded: a panel is decoded before its tiles are multiplied; None, and no knob, where each tile decodes it as it goes.
    """

    instruction: str
    mr: int
    nr: int
    nc: int
    decoded: bool | None = None


@dataclass(frozen=True)
class Plan(NestPlan):
    """A gemm with 4-bit weights.

    Attributes:
        nest: a `GroupedNest`, or a `CodesNest` for codes by codes.
        weights: the dequantisation of the right operand.
        group: codes of a column that share a scale.
    """

    nest: GroupedNest
    weights: Node = field(kw_only=True)
    group: int = field(kw_only=True)

    def schedules(self) -> tuple[Schedule, ...]:
        nest, dot = self.nest, self.nest.dot
        rounded = dot.lhs is BF16 and self.weights.dtype is BF16
        halves = 1 if nest.gate_up is None else 2  # of a panel
        most = min(ROWS, dot.registers // 2) // halves // (2 if rounded else 1)  # rounded pairs take more registers to decode
        mr = -(-nest.M // -(-nest.M // most))
        nv = (2 if rounded else 4) if mr == 1 else 2 if 4 * mr <= dot.registers else 1
        nv = min(nv, halves * -(-nest.stored // dot.lanes))
        few = max(1, min(RUN, -(-nest.N // (nv * dot.lanes)) // (8 * self.target.cores)))  # enough tasks for every thread
        nc = few if mr >= nest.M else PANELS
        each = Schedule.of_point(TileConfig(dot.instruction, mr, nv * dot.lanes, nc * nv * dot.lanes))
        if not _panels(nest.choice, nest.M):
            return (each,)
        nv = min(2, halves * -(-nest.stored // dot.lanes))
        most = dot.most_rows(nv)
        mr = -(-nest.M // -(-nest.M // most))
        nr = nv * dot.lanes
        return (Schedule.of_point(TileConfig(dot.instruction, mr, nr, nr, decoded=True)), each)

    def nest_of(self, schedule: Schedule) -> GroupedNest:
        """The loop nest that a schedule stands for."""
        nest, dot, tile = self.nest, self.nest.dot, schedule.point(TileConfig)
        decoded = bool(tile.decoded)
        l2 = self.target.caches_bytes.get("L2", 0) or L2_BYTES
        near = max(1, l2 // 2 // (tile.mr * nest.K * 4))  # tiles whose rows stay in the cache from panel to panel
        mc = min(-(-nest.M // tile.mr), near) if decoded else 1
        deep = -(-nest.K // (dot.lanes * dot.k)) * dot.lanes * dot.k
        blocks = Blocks(dot.instruction, tile.mr, tile.nr, deep, mc * tile.mr, tile.nc, not self.in_place)
        return replace(nest, blocks=blocks, decoded=decoded)

    def build(self, schedule: Schedule) -> Kernel:
        nest = self.nest_of(schedule)
        source = writer_of(nest).write().source(*engine.host())
        call = engine.function(source.text)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            def pack() -> torch.Tensor:
                packed = packed_memory(nest)
                codes, *sides = (operand(s, weights, not nest.k_contiguous) for s in self.weights.src)
                if self.group > nest.group:
                    sides = [s.repeat_interleave(self.group // nest.group, dim=1)[:, : nest.group_count] for s in sides]
                codes, *sides = (nest.by_panel(x) for x in (half_codes(codes) if nest.floats else codes, *sides))
                stream = nest.packed(codes, sides[0], sides[1] if nest.zeros else None)
                start = aligned(packed) - packed.data_ptr()
                packed[start : start + nest.batch * nest.rhs_panels * nest.rhs_panel_bytes] = stream.view(-1).view(torch.uint8)
                return packed

            read = [weights[n.op.index] for n in toposort((self.weights,)) if isinstance(n.op, Param)]
            zero = isinstance(nest, CodesNest) and nest.zero is not None  # of the left operand: sums of codes go along
            laid = nest.nr, nest.width, nest.group, nest.rounded_to, zero
            packed = packed_once(read, (self.weights, nest.k_contiguous, nest.choice, *laid), pack)
            return self.runner(nest, call, packed, source.given)

        return self.kernel(CANDIDATE.name, schedule, nest, prepare)


def writer_of(nest: GroupedNest) -> GroupedWriter:
    return CodesWriter(nest) if isinstance(nest, CodesNest) else GroupedWriter(nest)


def plan(problem: Problem, target: Target) -> Plan:
    """The plan.

    Raises:
        Unsupported: the sentence why there is none.
    """
    engine.require()
    found, along = codes_of(problem, 4, floats=True)
    assert isinstance(found.op, Dequantize)
    group, across = (found.op.block[::-1] if along else found.op.block) if found.op.block else (1, 1)
    if across != 1 or group % CODES or problem.K % CODES:
        raise Unsupported("scales are not given for groups of a multiple of 8 along K")
    if problem.acc.dtype is not F32:
        raise Unsupported(f"4-bit weights are added up in f32, not {problem.acc.dtype}")
    if not problem.batch * problem.M * problem.N * problem.K:
        raise Unsupported("the product is empty")
    check(problem.op.stores)
    rows, count = problem.batch * problem.M, len(problem.types)
    rhs, right = side_of(problem.op.rhs, count + 1, columns_last=True, outside=True)
    roots, second = gate_up(problem.op.stores, count) or (problem.op.stores, None)
    stores = tuple(of_store(root) for root in roots)
    kind, zeros = found.src[0].dtype.kind, len(found.src) == 3
    signed, floats = kind == "int", kind == "float"
    coded = None if floats else _coded(problem, found, group, target.chip)
    choice, codes = coded or (_floats(problem, found, group, target.chip), None)
    lhs, left = side_of(problem.op.lhs if codes is None else codes.codes, count, columns_last=True, outside=False)
    common = (
        1, rows, problem.K, problem.N, choice, lhs, rhs, along, True, stores, count + 2, UNSIZED, second, ()
    )  # fmt: skip
    if codes is not None:
        nest = CodesNest(*common, min(group, codes.group or group), signed, zeros, scale=codes.scale, zero=codes.zero)
        return Plan(problem, target, nest, (left, right), False, codes.sides, weights=found, group=group)
    in_place = left is None and (rows == 1 or _panels(choice, rows)) and lies_right(lhs, problem, choice, rows)
    nest = GroupedNest(*common, group, signed, zeros, found.dtype, floats=floats)
    return Plan(problem, target, nest, (left, right), in_place, weights=found, group=group)


def _floats(problem: Problem, weights: Node, group: int, chip: Chip) -> Choice:
    """The instruction for weights made floats."""
    choice = choose(F32, F32, F32, chip)
    pairs = choose(BF16, BF16, F32, chip)
    whole = not group % (2 * CODES) and not problem.K % (2 * CODES)
    plain = len(weights.src) == 2  # codes without zero points are bf16 as they are
    suits = (weights.dtype is BF16 and whole) or (weights.dtype is F32 and plain)
    if pairs is not None and pairs.dot.instruction == PAIRS and problem.lhs.dtype is BF16 and suits:
        choice = pairs
    if choice is None or problem.lhs.dtype.bits > 32 or not problem.lhs.dtype.is_float:
        raise Unsupported(f"{chip.name} names no instruction for {problem.lhs.dtype} with 4-bit weights")
    return choice


def _panels(choice: Choice, rows: int) -> bool:
    """Tell whether panels are decoded once, for several tiles: by shifts and conversions, where no instruction looks codes
    up."""
    dot = choice.dot
    return dot.acc is F32 and dot.k == 1 and dot.lanes < WIDE and rows > ROWS


CANDIDATE = Candidate("llvm_w4", GEMM, CPU, 4, plan, packing_knobs=("nr", "instruction"))
