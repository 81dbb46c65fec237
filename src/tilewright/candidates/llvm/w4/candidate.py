"""Generated CPU gemms with constant 4-bit weights, scaled by groups along K: the weights are read as they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from tilewright.candidates.llvm.expressions.vector import check
from tilewright.candidates.llvm.gemm.dots import PAIRS, Choice, choose
from tilewright.candidates.llvm.gemm.nest import Blocks
from tilewright.candidates.llvm.gemm.space import L2_BYTES
from tilewright.candidates.llvm.runtime import engine
from tilewright.candidates.llvm.runtime.run import Plan, aligned, lies_right, operand, releasable, runner, side_of
from tilewright.candidates.llvm.runtime.scratch import maker
from tilewright.candidates.llvm.w4.codes import MOST_GROUP, Activations, CodesNest, CodesWriter, activations, chosen
from tilewright.candidates.llvm.w4.kernel import CODES, WIDE, GroupedNest, GroupedWriter
from tilewright.dtype import BF16, F32
from tilewright.hardware.target import Chip, Target
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Dequantize, Param, Transpose
from tilewright.lowering.access import Unsupported, gate_up, of_store, or_why
from tilewright.schedule.candidate import CPU, Kernel, Runner
from tilewright.schedule.packed import packed_once
from tilewright.schedule.problem import Problem, ProblemKind
from tilewright.schedule.schedule import Schedule

ROWS = 16  # of a tile, at most
PANELS = 8  # of a block, if it has more than one tile
RUN = 4  # panels that a thread reads one after the other, at most, if it has one tile: what follows is asked for in time


def _weights(problem: Problem) -> tuple[Node, int, bool]:
    """The dequantisation of the right operand, its group's length, and whether K is its last axis.

    Raises:
        Unsupported: the right operand is no such thing.
    """
    root = problem.op.rhs
    along = isinstance(root.op, Transpose) and isinstance(root.src[0].op, Dequantize)
    found = root.src[0] if along else root
    op = found.op
    if not isinstance(op, Dequantize) or found.src[0].dtype.bits != 4 or not found.src[0].dtype.is_integer:
        raise Unsupported("the right operand is not 4-bit codes with scales")
    if len(found.shape) != 2:
        raise Unsupported("the weights are not one matrix, as it is or transposed")
    if not all(problem.weights[n.op.index] for n in toposort((found,)) if isinstance(n.op, Param)):
        raise Unsupported("the weights are not constant")
    block = op.block[::-1] if op.block and along else op.block
    if not block or block[1] != 1 or block[0] % CODES or problem.K % CODES:
        raise Unsupported("scales are not given for groups of a multiple of 8 along K")
    return found, block[0], along


def _coded(problem: Problem, chip: Chip) -> tuple[Choice, Activations] | None:
    """The instruction for codes by codes and what the left operand is made of; None if it is multiplied as floats."""
    found, group, _ = _weights(problem)
    try:
        lhs = activations(problem.op.lhs)
        choice = chosen(lhs.codes, chip)
    except Unsupported:
        return None
    each = min(group, lhs.group or group)
    even = max(group, lhs.group or group) % each == 0 and each % CODES == 0
    return (choice, lhs) if found.dtype is F32 and even and each <= MOST_GROUP else None


@or_why
def planned(problem: Problem, target: Target) -> Plan:
    """The plan, or the sentence why there is none."""
    found, group, along = _weights(problem)
    if problem.acc.dtype is not F32:
        raise Unsupported(f"4-bit weights are added up in f32, not {problem.acc.dtype}")
    if not problem.batch * problem.M * problem.N * problem.K:
        raise Unsupported("the product is empty")
    check(problem.op.stores)
    rows, count = problem.batch * problem.M, len(problem.types)
    rhs = side_of(problem.op.rhs, count + 1, columns_last=True, outside=True)
    roots, second = gate_up(problem.op.stores, count) or (problem.op.stores, None)
    stores = tuple(of_store(root) for root in roots)
    coded = _coded(problem, target.chip)
    if coded is not None:
        choice, left = coded
        lhs = side_of(left.codes, count, columns_last=True, outside=False)
        return Plan(choice, 1, rows, lhs, rhs, along, True, stores, False, second, beside=left.sides)
    choice = choose(F32, F32, F32, target.chip)
    pairs = choose(BF16, BF16, F32, target.chip)
    whole = not group % (2 * CODES) and not problem.K % (2 * CODES)
    plain = len(found.src) == 2  # codes without zero points are bf16 as they are
    suits = (found.dtype is BF16 and whole) or (found.dtype is F32 and plain)
    if pairs is not None and pairs.dot.instruction == PAIRS and problem.lhs.dtype is BF16 and suits:
        choice = pairs
    if choice is None or problem.lhs.dtype.bits > 32 or not problem.lhs.dtype.is_float:
        raise Unsupported(f"{target.chip.name} names no instruction for {problem.lhs.dtype} with 4-bit weights")
    lhs = side_of(problem.op.lhs, count, columns_last=True, outside=False)
    in_place = lhs.outside is None and (rows == 1 or _panels(choice, rows)) and lies_right(lhs.access, problem, choice, rows)
    return Plan(choice, 1, rows, lhs, rhs, along, True, stores, in_place, second)


def _panels(choice: Choice, rows: int) -> bool:
    """Whether panels are decoded once, for several tiles: by shifts and conversions, where no instruction looks codes up."""
    dot = choice.dot
    return dot.acc is F32 and dot.k == 1 and dot.lanes < WIDE and rows > ROWS


class LlvmW4:
    """Found by file name; see `schedule.candidate.Candidate`."""

    name = "llvm_w4"
    kinds = frozenset[ProblemKind]({"gemm"})
    devices = CPU
    preference = 4
    packing_knobs = ("nr", "instruction")

    def refuse(self, problem: Problem, target: Target) -> str | None:
        return engine.refusal(lambda: planned(problem, target))

    def schedules(self, problem: Problem, target: Target) -> Iterable[Schedule]:
        plan = planned(problem, target)
        assert isinstance(plan, Plan)
        dot = plan.choice.dot
        rounded = dot.lhs is BF16 and _weights(problem)[0].dtype is BF16
        halves = 1 if plan.second is None else 2  # of a panel
        most = min(ROWS, dot.registers // 2) // halves // (2 if rounded else 1)  # rounded pairs take more registers to decode
        mr = -(-plan.rows // -(-plan.rows // most))
        nv = (2 if rounded else 4) if mr == 1 else 2 if 4 * mr <= dot.registers else 1
        nv = min(nv, halves * -(-problem.N // halves // dot.lanes))
        few = max(1, min(RUN, -(-problem.N // (nv * dot.lanes)) // (8 * target.cores)))  # enough tasks for every thread
        nc = few if plan.rows <= mr else PANELS
        each = Schedule.of(instruction=dot.instruction, mr=mr, nr=nv * dot.lanes, nc=nc * nv * dot.lanes)
        if not _panels(plan.choice, plan.rows):
            return (each,)
        nv = min(2, halves * -(-problem.N // halves // dot.lanes))
        most = dot.most_rows(nv)
        mr = -(-plan.rows // -(-plan.rows // most))
        nr = nv * dot.lanes
        return (Schedule.of(instruction=dot.instruction, mr=mr, nr=nr, nc=nr, decoded=True), each)

    def build(self, problem: Problem, schedule: Schedule, target: Target) -> Kernel:
        plan = planned(problem, target)
        assert isinstance(plan, Plan)
        nest = nest_of(problem, plan, schedule, target)
        call = engine.function(writer_of(nest).write().text(*engine.host()))

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            found, group, _ = _weights(problem)

            def pack() -> torch.Tensor:
                room = maker((nest.packed_rhs + 64,), torch.uint8)()
                codes, *sides = (operand(s, weights, not plan.along) for s in found.src)
                if group > nest.group:
                    sides = [s.repeat_interleave(group // nest.group, dim=1)[:, : nest.group_count] for s in sides]
                codes, *sides = (nest.by_panel(x) for x in (codes, *sides))
                stream = nest.packed(codes, sides[0], sides[1] if nest.zeros else None)
                start = aligned(room) - room.data_ptr()
                room[start : start + nest.batch * nest.panels * nest.panel] = stream.view(-1).view(torch.uint8)
                return room

            read = [weights[n.op.index] for n in toposort((found,)) if isinstance(n.op, Param)]
            zero = isinstance(nest, CodesNest) and nest.zero is not None  # of the left operand: sums of codes go along
            form = found, plan.along, plan.choice, nest.nr, nest.width, nest.group, nest.rounded_to, zero
            return runner(problem, plan, nest, call, packed_once(read, form, pack))

        scratch = nest.scratch(torch.get_num_threads())
        return Kernel(
            self.name,
            schedule,
            prepare,
            workspace_bytes=scratch,
            packed_bytes=nest.packed_rhs,
            releasable=releasable(problem, plan),
        )


def writer_of(nest: GroupedNest) -> GroupedWriter:
    return CodesWriter(nest) if isinstance(nest, CodesNest) else GroupedWriter(nest)


def nest_of(problem: Problem, plan: Plan, schedule: Schedule, target: Target) -> GroupedNest:
    """The loop nest that a schedule stands for."""
    found, group, _ = _weights(problem)
    knobs, dot = dict(schedule.knobs), plan.choice.dot
    mr, nr, nc = (int(knobs[k]) for k in ("mr", "nr", "nc"))
    decoded = bool(knobs.get("decoded", False))
    l2 = target.caches_bytes.get("L2", 0) or L2_BYTES
    near = max(1, l2 // 2 // (mr * problem.K * 4))  # tiles whose rows stay in the cache from panel to panel
    mc = min(-(-plan.rows // mr), near) if decoded else 1
    common = (
        plan.batch,
        plan.rows,
        problem.K,
        problem.N,
        plan.choice,
        plan.lhs.access,
        plan.rhs.access,
        plan.along,
        plan.constant,
        plan.stores,
        len(problem.types) + 2,
        Blocks(mr, nr // dot.lanes, -(-problem.K // (dot.lanes * dot.k)) * dot.lanes * dot.k, mc, nc // nr, not plan.in_place),
        plan.second,
        plan.largest,
    )
    signed, zeros = found.src[0].dtype.kind == "int", len(found.src) == 3
    if dot.acc is F32:
        return GroupedNest(*common, group, signed, zeros, found.dtype, decoded)
    left = activations(problem.op.lhs)
    return CodesNest(*common, min(group, left.group or group), signed, zeros, scale=left.scale, zero=left.zero)


CANDIDATE = LlvmW4()
