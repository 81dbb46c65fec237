"""Preparing a program: its graph is cut into steps, what depends on constants alone is evaluated, kernels are chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tilewright.deadline import Budget
from tilewright.errors import InputError
from tilewright.hardware.target import Target
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Const
from tilewright.ir.pattern import Trace
from tilewright.ir.state import caller_inputs
from tilewright.ir.types import TensorType
from tilewright.progress import Progress
from tilewright.runtime.executable import E
from tilewright.runtime.partition import Part, decided, parts_for
from tilewright.runtime.steps import Decide, Inner, Posed, Step, kernel_step, library_step, moved
from tilewright.schedule.budget import BudgetedChooser
from tilewright.schedule.measure import last_cache_bytes
from tilewright.schedule.packed import return_memory
from tilewright.schedule.problem import AnyProblem
from tilewright.schedule.search import Decision
from tilewright.schedule.tuning_database import TuningDatabase

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

PACKED_BPS = 0.5e9  # bytes of weights a second that are packed once kernels are chosen
LONG_CHECK_S = 0.01  # of a kernel, after which what it left free goes back to the system


def prepare(
    source: Graph,
    graph: Graph,
    target: Target,
    trace: Trace,
    decide: Decide,
    inner: Inner | None = None,
    *,
    made: type[E],
    first: Callable[[AnyProblem], float] | None = None,
    turn: Callable[[Sequence[AnyProblem]], int] | None = None,
    parts: Sequence[Part] | None = None,
    known: dict[Node, Value] | None = None,
    deal: Callable[[Sequence[Posed]], None] | None = None,
) -> E:
    """Cut the graph into steps, evaluate what depends on constants alone, and choose a kernel for each gemm: for those problems
    first of which `first` gives most. `inner` compiles the regions of loops and conditionals; without it the oracle runs
    them. `turn` says which of those that are left comes next, given in that order. `made` is the kind of executable that is
    wanted, `parts` what the graph was cut into before. `known` has values of constants, in place of their own, and of what
    depends on them alone, and is given those that are found. `deal` is told all problems before `decide` is asked about the
    first.

    Raises:
        InputError: what the program keeps from call to call is not at hand.
    """
    parts = parts_for(graph, target) if parts is None else parts
    ready: dict[Node, Value] = {} if known is None else known
    for node in graph.nodes():
        if isinstance(node.op, Const) and node not in ready:
            ready[node] = node.op.data.tensor().detach().to(target.device)
    held = graph.inputs[len(caller_inputs(graph)) :]
    if len(held) != len(graph.state):
        what = "what the program keeps from call to call is missing: a text holds none of it"
        raise InputError(what, where=graph.name, hint="compile the module itself")
    for node, kept in zip(held, graph.state, strict=True):
        ready[node] = kept if kept.is_meta else kept.to(target.device)
    for part in parts:
        if part.once and not all(n in ready for n in part.outputs):
            ready.update(zip(part.outputs, _evaluate_once(part, ready, target), strict=True))
    posed = {part: Posed.of(part, ready) for part in parts if not part.once and decided(part)}
    if deal is not None:
        deal(list(posed.values()))
    left = list(posed.values()) if first is None else sorted(posed.values(), key=lambda p: first(p.problem), reverse=True)
    decisions: dict[Part, Decision] = {}
    while left:
        one = left.pop(0 if turn is None else turn([p.problem for p in left]))
        decisions[one.part] = decide(one.problem, one.weights)
    if any(d.checked_s > LONG_CHECK_S for d in decisions.values()):
        return_memory()  # that they took, before packing takes more
    steps: list[Step] = []
    for part in parts:
        if part in posed:
            steps.append(kernel_step(graph, posed[part], ready, decisions[part]))
        elif not part.once:
            steps.append(library_step(graph, part, target, inner))
    used = {n for step in steps for n in step.part.inputs} | set(graph.outputs) | set(graph.inputs)
    return made(source, graph, target, tuple(steps), trace, {n: v for n, v in ready.items() if n in used})


def _evaluate_once(part: Part, ready: Mapping[Node, Value], target: Target) -> list[Value]:
    bound = {n: moved(ready[n], "cpu") for n in part.inputs}
    return [moved(v, target.device) for v in evaluate_nodes(part.outputs, bound)]


def chooser(
    graph: Graph,
    target: Target,
    budget: float | Budget,
    progress: Progress | None = None,
    database: TuningDatabase | None = None,
    parts: Sequence[Part] | None = None,
) -> BudgetedChooser:
    """The choice of kernels for a graph's problems, which share a budget, or so many seconds from now on, less
    what packing its weights will take. `parts` is what the graph was cut into before."""
    budget = budget if isinstance(budget, Budget) else Budget(budget)
    parts = [p for p in (parts_for(graph, target) if parts is None else parts) if decided(p)]
    size = weights_bytes(parts)
    problems, cold = Counter(p.posed[0] for p in parts), size > last_cache_bytes(target)
    rest = budget.part(max(0.0, budget.left_s() - size / PACKED_BPS))
    return BudgetedChooser(problems, target, rest, cold=cold, progress=progress, database=database)


def weights_bytes(parts: Sequence[Part]) -> int:
    """The bytes of constants that parts for which kernels are chosen read."""
    weights = {n for p in parts if decided(p) for n in p.inputs if n.constant}
    return sum(n.tensor.size_bytes for n in weights if isinstance(n.type, TensorType))
