"""Least work of a step: arithmetic, traffic, and the time the machine's measured ceilings allow for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tilewright.deadline import OverrunError
from tilewright.dtype import F32, DType
from tilewright.hardware.ceilings import corrected, with_ceilings
from tilewright.hardware.target import Target
from tilewright.ir.graph import Node
from tilewright.ir.ops import ALIASES, Call, Gather, Write
from tilewright.ir.shown import show_fusion
from tilewright.report.program import tensor_types
from tilewright.runtime.executable import Executable
from tilewright.runtime.partition import Part
from tilewright.runtime.steps import Step
from tilewright.schedule.problem import FusionProblem, Problem
from tilewright.threads import limit

TOLD_US = 20.0  # a product that is over sooner tells nothing of a rate


@dataclass(frozen=True)
class Work:
    """The least a step can do.

    Attributes:
        ops: multiplies and adds of its products; other arithmetic is not counted.
        bytes: every value read once and written once.
        dtype: what its products multiply.
    """

    ops: int
    bytes: int
    dtype: DType

    def limit_us(self, target: Target) -> float:
        """The least time the measured ceilings allow; 0 where none was measured."""
        return target.limit_us(self.ops, self.bytes, self.dtype)

    def memory_bound(self, target: Target) -> bool:
        """Tell whether memory, not the matrix unit, sets the limit."""
        return self.limit_us(target) > target.limit_us(self.ops, 0, self.dtype)


def unmeasured() -> str:
    """The sentence on rates for which there was no time. They are kept by number of threads: it names one that was given."""
    with_threads = f" --threads {limit()}" if limit() else ""
    return (
        "the time was over before this machine's rates were measured: there are no limits to compare with; "
        f"`tilewright devices{with_threads}` measures and keeps them"
    )


def work_of(step: Step) -> Work:
    """The least that a step can do."""
    problem = step.decision.problem if step.decision is not None else None
    if problem is None or isinstance(problem, FusionProblem):
        return Work(0, _read(step.part) + _written(step.part), F32)
    multiplied = problem.lhs.dtype if isinstance(problem, Problem) else problem.operands[0].dtype
    return Work(problem.ops, problem.bytes, multiplied)


def rates_seen(steps: Sequence[Step], times_us: Sequence[float | None], target: Target) -> dict[str, float]:
    """The rates that products reached, in 1e9 operations a second: the largest for each unit, by its operand type.

    Without those that are over in too short a time to tell, and those that may leave out work (attentions) or bits (a kernel
    that rounds its sums).
    """
    found: dict[str, float] = {}
    for step, us in zip(steps, times_us, strict=True):
        decision = step.decision
        if not us or us < TOLD_US or decision is None or not isinstance(decision.problem, Problem) or decision.kernel.roundoff:
            continue
        work = work_of(step)
        unit = target.unit_for(work.dtype)
        if unit is not None:
            found[unit] = max(found.get(unit, 0.0), work.ops / us / 1e3)
    return found


def measured_ceilings(program: Executable, times_us: Sequence[float | None] | None = None) -> tuple[Target, list[str]]:
    """The program's target with its measured rates, and a sentence on each rate that a product was seen to exceed: it is
    measured again. Where there is no time to measure them, the target without, and a sentence on that.

    Args:
        program: compiled.
        times_us: times of its steps; those that decided by default.
    """
    try:
        target = with_ceilings(program.target)
    except OverrunError:
        return program.target, [unmeasured()]
    if times_us is None:
        known = [s.decision for s in program.steps]
        times_us = [None if d is None or d.provisional else d.time_us for d in known]
    return corrected(target, rates_seen(program.steps, times_us, target))


def _size(node: Node) -> int:
    return sum(t.size_bytes for t in tensor_types(node))


def _read(part: Part) -> int:
    """Bytes of the inputs that the part looks at: a slice or a gather reads what it picks, a view what is read of it."""
    readers: dict[Node, list[Node]] = {}
    for n in part.nodes:
        for s in dict.fromkeys(n.src):
            readers.setdefault(s, []).append(n)
    needed: dict[Node, int] = {}
    for n in (*reversed(part.nodes), *part.inputs):
        total = 0
        for reader in readers.get(n, ()):
            if isinstance(reader.op, ALIASES):
                total += needed[reader]
            elif isinstance(reader.op, Gather) and n is reader.src[0]:
                total += _size(reader)
            elif isinstance(reader.op, Write) and n is reader.src[0]:
                total += 0  # what stays is not looked at
            else:
                total += _size(n)
        needed[n] = min(total, _size(n))
    return sum(needed[n] for n in part.inputs)


def _written(part: Part) -> int:
    """Bytes of the results, each memory once; a view of a value is no other memory."""
    inside = set(part.nodes)
    made: set[Node] = set()
    for n in part.outputs:
        while isinstance(n.op, ALIASES) and n in inside:
            n = n.src[0]
        if isinstance(n.op, Write):
            made.add(n.src[2])
        elif n in inside:
            made.add(n)
    return sum(_size(n) for n in made)


def describe(step: Step) -> str:
    """The problem that a step solves: a gemm in the notation of `tilewright gemm`; the operations of a fusion in order."""
    if step.decision is not None:
        return str(step.decision.problem)
    return show_fusion(step.part.nodes, [n.type for n in step.part.outputs])


def candidate_of(step: Step) -> str:
    """The candidate that does a step, torch (a fusion's operations one by one), or the source's own library."""
    if step.decision is not None:
        name = step.decision.kernel.candidate
        return "torch" if name == "reference" and step.decision.problem.kind == "fusion" else name
    libraries = dict.fromkeys(n.op.library for n in step.part.nodes if isinstance(n.op, Call))
    return ", ".join(libraries) or "torch"


def counts(steps: Sequence[Step]) -> dict[str, int]:
    """The number of steps of each kind in a program, the most frequent first."""
    return dict(Counter(s.part.kind for s in steps).most_common())


def steps_per_layer(steps: Sequence[Step]) -> int | None:
    """The most steps from one attention up to the next, views left out; None with fewer than two attentions.

    A transformer has one attention a layer, so this counts what a layer takes: seven where nothing is unfused.
    """
    working = [s.part.kind for s in steps if s.part.kind != "view"]
    at = [i for i, kind in enumerate(working) if kind == "attention"]
    return max((b - a for a, b in pairwise(at)), default=None)
