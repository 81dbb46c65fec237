"""What a step has to do at least: arithmetic, traffic, and the time the machine's measured ceilings allow for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from tilewright.dtype import F32, DType
from tilewright.hardware.target import Target
from tilewright.ir.graph import Node
from tilewright.ir.ops import Broadcast, Call, Gather, Item, Map, Reshape, Slice, Transpose
from tilewright.report.program import Part, Step, tensor_types
from tilewright.schedule.problem import Problem

VIEWS = (Reshape, Transpose, Slice, Broadcast, Item)
SHOWN_OPS = 6


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
        """Whether memory, not the matrix unit, sets the limit."""
        return self.limit_us(target) > target.limit_us(self.ops, 0, self.dtype)


def work_of(step: Step) -> Work:
    """The least that a step can do."""
    if step.decision is None:
        return Work(0, _read(step.part) + _written(step.part), F32)
    problem = step.decision.problem
    multiplied = problem.lhs.dtype if isinstance(problem, Problem) else problem.operands[0].dtype
    return Work(problem.ops, problem.bytes, multiplied)


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
            if isinstance(reader.op, VIEWS):
                total += needed[reader]
            elif isinstance(reader.op, Gather) and n is reader.src[0]:
                total += _size(reader)
            else:
                total += _size(n)
        needed[n] = min(total, _size(n))
    return sum(needed[n] for n in part.inputs)


def _written(part: Part) -> int:
    """Bytes of the results, each memory once; a view of a value is no other memory."""
    inside = set(part.nodes)
    made: set[Node] = set()
    for n in part.outputs:
        while isinstance(n.op, VIEWS) and n in inside:
            n = n.src[0]
        if n in inside:
            made.add(n)
    return sum(_size(n) for n in made)


def op_name(node: Node) -> str:
    """What an operation is called in reports: the function of a `map`, the target of a `call`, else the op."""
    if isinstance(node.op, Map):
        return node.op.fn
    return node.op.target if isinstance(node.op, Call) else node.op.name


def describe(step: Step) -> str:
    """The problem that a step solves: a gemm in the notation of `tilewright gemm`; the operations of a region in order."""
    if step.decision is not None:
        return str(step.decision.problem)
    part = step.part
    working = [n for n in part.nodes if not isinstance(n.op, VIEWS)] or list(part.nodes)
    runs = [(name, len(list(group))) for name, group in groupby(op_name(n) for n in working)]
    shown = [f"{name} x{count}" if count > 1 else name for name, count in runs[:SHOWN_OPS]]
    if len(runs) > SHOWN_OPS:
        shown.append(f"{sum(count for _, count in runs[SHOWN_OPS:])} more")
    return f"{', '.join(shown)} -> {', '.join(str(n.type) for n in part.outputs)}"


def candidate_of(step: Step) -> str:
    """Who does a step: the chosen candidate, torch, or the source's own library."""
    if step.decision is not None:
        return step.decision.kernel.candidate
    libraries = dict.fromkeys(n.op.library for n in step.part.nodes if isinstance(n.op, Call))
    return ", ".join(libraries) or "torch"


def counts(steps: Sequence[Step]) -> dict[str, int]:
    """How many steps of each kind a plan has, the most frequent first."""
    return dict(Counter(s.part.kind for s in steps).most_common())


def steps_per_layer(steps: Sequence[Step]) -> int | None:
    """The most steps from one attention up to the next, views left out; None with fewer than two attentions.

    A transformer has one attention a layer, so this counts what a layer takes: seven where nothing dangles.
    """
    working = [s.part.kind for s in steps if s.part.kind != "view"]
    at = [i for i, kind in enumerate(working) if kind == "attention"]
    return max((b - a for a, b in pairwise(at)), default=None)
