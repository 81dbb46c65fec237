"""The time a schedule is expected to take: the work that a candidate says it makes the machine do, and the machine's rates.

A kernel is a sequence of phases with a barrier of all threads between them. A phase takes as long as its slowest resource (the
roofline, by level of memory; Williams, Waterman and Patterson 2009, doi 10.1145/1498765.1498785), plus the part of the others'
time that does not hide behind it. Quantities may be NumPy arrays, one element a schedule: thousands are ranked at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.dtype import DType
from tilewright.hardware.target import Target, wider_units
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import VIEWS, Acc, Param
from tilewright.schedule.candidate import MATRIX_LIBRARIES, Candidate, HasCostModel, Schedule, planned
from tilewright.schedule.problem import AnyProblem, Operand, Problem

Quantity = Any  # a float, or an array of them

LAUNCH_US = {"cpu": 3.0, "cuda": 4.0}  # of a kernel from Python: the call and, on a CPU, waking the threads
BARRIER_US = {"cpu": 6.0, "cuda": 2.0}
CLOCK_GHZ = 3.0  # where nothing was measured and the chip names none
MEMORY_GBPS = {"cpu": 20.0, "cuda": 1000.0}  # likewise
NEAR_BYTES_PER_CYCLE = {"L1d": 64.0, "L2": 32.0, "L3": 12.0}  # likewise, of one core
REACHED = {"cpu": 0.85, "cuda": 0.75}  # of a unit's rate, by a good library on a product that fills the machine
TILE = {"cpu": (16, 64), "cuda": (128, 128)}  # of its result that a core or SM works on at a time
EXPOSED = 0.13  # of what hides behind the slowest resource, the part that does not


@dataclass(frozen=True)
class Phase:
    """The work between two barriers of all threads.

    Attributes:
        cycles: of the core or SM with most to do, while its matrix unit is at work, fills its pipeline or waits for itself.
        vector: cycles of its other instructions: epilogue, conversion, packing, calls, taking tasks.
        reads: bytes that core brings from each level of memory; from "memory" the bytes of all cores together.
    """

    cycles: Quantity = 0.0
    vector: Quantity = 0.0
    reads: Mapping[str, Quantity] = field(default_factory=dict[str, Quantity])


@dataclass(frozen=True)
class Work:
    """The work of one call of a kernel.

    Attributes:
        phases: one after the other.
        launches: kernels started one after the other.
        barriers: times that all threads wait for each other.
    """

    phases: tuple[Phase, ...]
    launches: Quantity = 1.0
    barriers: Quantity = 0.0


def clock_ghz(target: Target) -> float:
    """The clock in GHz under load: from the target's measured peak, else from its description."""
    for unit in target.chip.units:
        peak = target.peak_gops.get(unit.operand, 0.0)
        if peak:
            return peak / (unit.ops_per_cycle * target.cores)
    return target.chip.mhz / 1e3 or CLOCK_GHZ


def predict_us(work: Work, target: Target) -> Quantity:
    """Microseconds of a call, for one schedule or for each of an array."""
    ghz = clock_ghz(target)
    total = work.launches * LAUNCH_US[target.kind] + work.barriers * BARRIER_US[target.kind]
    for phase in work.phases:
        compute = (phase.cycles + phase.vector) / (ghz * 1e3)
        memory = sum((_read_us(n, b, target, ghz) for n, b in phase.reads.items()), 0.0)
        longer = (compute + memory + abs(compute - memory)) / 2
        total = total + longer + EXPOSED * (compute + memory - longer)
    return total


def _read_us(level: str, size: Quantity, target: Target, ghz: float) -> Quantity:
    """Microseconds of reading bytes from a level: from memory all cores together, from a cache one core."""
    known = target.chip.level(level)
    if level == "memory":
        rate = target.read_gbps or (known.gbps if known else 0.0) or MEMORY_GBPS[target.kind]
    elif known and known.gbps:
        rate = known.gbps
    else:
        rate = (known.bytes_per_cycle if known and known.bytes_per_cycle else NEAR_BYTES_PER_CYCLE.get(level, 32.0)) * ghz
    return size / (rate * 1e3)


def predict(candidate: Candidate, problem: AnyProblem, schedule: Schedule, target: Target) -> float | None:
    """Microseconds that a candidate is expected to take by its own account of its work, or a library by `library_work`.

    None where nothing is known: for the reference, for candidates that give no account, for attentions and fusions.
    """
    plan = planned(candidate, problem, target)
    if isinstance(plan, HasCostModel):
        work = plan.work(schedule)
    else:
        work = library_work(problem, target) if candidate.preference in MATRIX_LIBRARIES else None
    return None if work is None else float(np.max(predict_us(work, target)))


def library_work(problem: AnyProblem, target: Target) -> Work | None:
    """The work of a library's gemm: one kernel of large tiles at a stated part of the unit's rate, every source read and every
    result written once; the rest of the epilogue in a pass of its own. None for other problems."""
    if not isinstance(problem, Problem):
        return None
    operand = _multiplied(problem.lhs.dtype, problem.rhs.dtype, target)
    unit = next((u for u in target.chip.units if u.operand == operand), None)
    if unit is None or not target.cores:
        return None
    if target.kind == "cpu" and not all(_taken_as_it_is(problem, x, operand) for x in (problem.lhs, problem.rhs)):
        return None  # a library converts such an operand in each call, or has a slow product of its own for its type
    rows, columns = TILE[target.kind]
    tiles = problem.batch * -(-problem.M // rows) * -(-problem.N // columns)
    waves = -(-tiles // target.cores)
    tile = 2 * min(rows, problem.M) * min(columns, problem.N) * problem.K
    cycles = waves * tile / (unit.ops_per_cycle * REACHED[target.kind])
    steps = sum(not isinstance(n.op, (Acc, Param)) for n in toposort(problem.op.stores))
    between = problem.acc.size_bytes if steps else 0
    plain = Phase(cycles, 0.0, {"memory": float(problem.bytes - sum(t.size_bytes for t in problem.outputs) + between)})
    after = Phase(0.0, 0.0, {"memory": float(between + sum(t.size_bytes for t in problem.outputs))})
    return Work((plain, after), launches=1.0 + steps)


def _taken_as_it_is(problem: Problem, operand: Operand, dtype: str) -> bool:
    """Tell whether a library multiplies an operand as it is stored, or as it was converted once, when it was prepared."""
    constant = operand.source is not None and problem.weights[operand.source]
    return operand.dtype.name == dtype and (operand.plain or constant)


def least_us(problem: AnyProblem, target: Target) -> float:
    """The least time in µs of any kernel, by the rates that the chip's data file states. It compares problems, not
    candidates."""
    ops, rate = getattr(problem, "ops", 0), 0.0
    if ops:
        a, b = (problem.lhs, problem.rhs) if isinstance(problem, Problem) else problem.operands[:2]  # type: ignore[union-attr]
        operand = _multiplied(a.dtype, b.dtype, target)
        rate = next((u.ops_per_cycle for u in target.chip.units if u.operand == operand), 0.0)
    compute = ops / (rate * max(target.cores, 1) * clock_ghz(target) * 1e3) if rate else 0.0
    return max(compute, memory_us(problem.bytes, target))


def roughly_us(problem: AnyProblem, target: Target) -> float:
    """Microseconds expected of a kernel that gives no account of its work, where no rate was measured: a launch, and the
    problem's least time by the rates that the chip's data file states."""
    return LAUNCH_US[target.kind] + least_us(problem, target)


def memory_us(size: int, target: Target) -> float:
    """The time in µs of reading bytes from memory, by the rate that was measured or that the chip's data file states."""
    return float(_read_us("memory", size, target, clock_ghz(target)))


def passes(roots: Sequence[Node], *, together: bool) -> Work:
    """The work of elementwise expressions: sources are read once and results written once, by all of them `together` or by each
    operation."""
    nodes = toposort(roots)
    if together:
        size = sum(n.tensor.size_bytes for n in nodes if isinstance(n.op, Param)) + sum(r.tensor.size_bytes for r in roots)
        return Work((Phase(0.0, 0.0, {"memory": float(size)}),))
    steps = [n for n in nodes if n.src and not isinstance(n.op, VIEWS)]
    each = [float(n.tensor.size_bytes + sum(s.tensor.size_bytes for s in n.src)) for n in steps]
    return Work(tuple(Phase(0.0, 0.0, {"memory": size}) for size in each), launches=float(len(steps)))


def _multiplied(lhs: DType, rhs: DType, target: Target) -> str:
    """The type whose unit multiplies these operands: their own, or the narrowest that holds both."""
    own = {u.operand for u in target.chip.units}
    wanted = lhs.name if lhs.bits >= rhs.bits else rhs.name
    return next((n for n in (wanted, *wider_units(wanted)) if n in own), "f32")
