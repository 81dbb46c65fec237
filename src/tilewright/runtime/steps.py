"""Steps of a program: each is a part of its graph, with the kernel or the call of a library that runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from tilewright.candidates.triton.index_copy import index_copy, takes
from tilewright.candidates.triton.runtime.launch import dense
from tilewright.dtype import OPAQUE
from tilewright.errors import TypeMismatchError, UnsupportedError, visible
from tilewright.hardware.target import Target
from tilewright.ir.anchor import ANCHORS
from tilewright.ir.evaluate import evaluator
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Call, Item, Write
from tilewright.ir.state import root_of
from tilewright.ir.types import TensorType
from tilewright.runtime.arrays import separate
from tilewright.runtime.chain import KernelRun
from tilewright.runtime.partition import Part
from tilewright.schedule.candidate import Kernel, Runner, Unsupported
from tilewright.schedule.problem import AnyProblem, FusionProblem
from tilewright.schedule.recipe import describe, recipe_of
from tilewright.schedule.search import Decision

if TYPE_CHECKING:
    from types import ModuleType

    from tilewright.ir.graph import Value
    from tilewright.runtime.executable import Executable

OUTSIDE = "it runs in the source's own library"
OF_OPAQUE = "only a call knows the types of its values"
ON_CPU = "it computes on the CPU, which no CUDA graph does again"
ALIGNED = 16  # bytes, as generated kernels take memory
_COMPARED = "tilewright.as_traced.default"  # the call that ends another way than the traced one (frontends/torch/taken.py)
FEW = 64  # positions that are looked at one by one in less time than torch takes to begin
SHOWN = 160  # characters of the inputs, and as many of the results, that a program's own line shows
Decide = Callable[[AnyProblem, Mapping[int, torch.Tensor]], Decision]
Inner = Callable[[Graph], "Executable"]
"""Compiles the graph of a region for the device of the program around it."""


@dataclass(frozen=True, repr=False)
class Step:
    """One part of the program and what runs it.

    Attributes:
        name: where it stands in the source.
        part: its nodes, inputs and outputs.
        run: values of the part's inputs in, values of its outputs out.
        decision: how the kernel was chosen; None for calls into the source's own library, and for writes to state.
        releasable: inputs that `run` has no use for any more, being packed.
        within: programs that it runs as the data says: a loop's condition and body, a conditional's branches.
        runner: its kernel, prepared.
    """

    name: str
    part: Part
    run: Callable[[Sequence[Value]], Sequence[Value]]
    decision: Decision | None
    releasable: frozenset[Node] = frozenset()
    within: tuple[Executable, ...] = ()
    runner: Runner | None = None

    @property
    def only_writes(self) -> bool:
        """Say whether it writes values that are there to state, at positions that are data."""
        return self.decision is None and self.part.kind == "write"

    def __repr__(self) -> str:
        """One line: its name, what it computes, and what does that."""
        by = "the source's own library" if self.decision is None else self.decision.kernel.candidate
        what = self.part.kind if self.decision is None else str(self.decision.problem)
        return f"<step {listed([self.name])!r}: {listed([what])} by {by}>"


def listed(items: Sequence[str]) -> str:
    """Items by commas, in `SHOWN` characters or a few more: how many are left out, and "…" where one is cut."""
    shown, length = list[str](), 0
    for item in items:
        length += len(item) + 2
        if shown and length > SHOWN:
            shown.append(f"… {len(items) - len(shown):,} more")
            break
        shown.append(visible(item if len(item) <= SHOWN else f"{item[: SHOWN - 1]}…"))
    return ", ".join(shown)


@dataclass(frozen=True)
class Posed:
    """The problem that a part poses: its sources in order, and by source index the values of those that are constant and at
    hand."""

    part: Part
    problem: AnyProblem
    sources: tuple[Node, ...]
    weights: Mapping[int, torch.Tensor]

    @classmethod
    def of(cls, part: Part, ready: Mapping[Node, Value]) -> Posed:
        problem, sources = part.posed
        held = {i: ready.get(s) for i, s in enumerate(sources) if s.constant}
        return cls(part, problem, sources, {i: cast("torch.Tensor", v) for i, v in held.items() if v is not None})


def kernel_step(graph: Graph, posed: Posed, ready: Mapping[Node, Value], decision: Decision) -> Step:
    """The step of a part for which a kernel was chosen, prepared with its weights."""
    part, problem, sources, weights = posed.part, posed.problem, posed.sources, posed.weights
    name = _name(graph, part)
    order = [part.inputs.index(s) for s in sources]
    if isinstance(problem, FusionProblem):
        placed = any(problem.destinations)
        runner = bind_outputs(problem, part, decision.kernel, weights, ready) if placed else decision.kernel.prepare(weights)
        arrays = {i: part.inputs.index(n.src[0]) for i, n in enumerate(part.outputs) if _is_given(n, ready)}
        if arrays:
            return Step(name, part, _into_given(problem, runner, order, arrays), decision, runner=runner)
    else:
        runner = decision.kernel.prepare(weights)
    picks = picked(part)
    as_given = order == list(range(len(part.inputs))) and picks == list(range(len(problem.outputs)))
    run = KernelRun(name, runner, tuple(order), tuple(picks), as_given)
    releasable = frozenset(sources[i] for i in decision.kernel.releasable)
    releasable -= {s for i, s in enumerate(sources) if i not in decision.kernel.releasable}
    return Step(name, part, run, decision, releasable, runner=runner)


def picked(part: Part) -> list[int]:
    """The number of each of a part's outputs among its problem's results."""
    if isinstance(part.posed[0], FusionProblem):
        return list(range(len(part.outputs)))
    return [n.op.index if isinstance(n.op, Item) else 0 for n in part.outputs]


def library_step(graph: Graph, part: Part, target: Target, inner: Inner | None) -> Step:
    """A step that no kernels compete for: a call into the source's own library, or a write at positions that are data."""
    if part.kind == "write":
        name = graph.origin(part.nodes[-1])
        return Step(name, part, written(part, name, target), None)
    return _call_step(graph, part, target, inner)


def _name(graph: Graph, part: Part) -> str:
    """The source's name of a step: of its gemm, or of the results of one that was joined from several; of a fusion's last
    result."""
    node = part.nodes[0]
    if not isinstance(node.op, ANCHORS):
        return graph.origin(part.outputs[-1])
    if node in graph.origins:
        return graph.origins[node]
    return ", ".join(dict.fromkeys(graph.origins[n] for n in part.outputs if n in graph.origins)) or node.op.name


def why_alone(step: Step, target: Target) -> str | None:
    """The reason why a step cannot be part of a CUDA graph; None for kernels, and for operations of torch that may be."""
    if step.decision is not None or step.part.kind == "write":
        return None
    if target.kind == "cpu":
        return OUTSIDE
    calls = [n.op for n in step.part.nodes if isinstance(n.op, Call)]
    if step.within or not calls or any(op.library != "torch" for op in calls):
        return OUTSIDE
    values = (*(n.type for n in (*step.part.inputs, *step.part.outputs)), *(t for op in calls for t in op.types))
    if not all(isinstance(t, TensorType) and t.dtype is not OPAQUE for t in values):
        return OF_OPAQUE
    return next((why for op in calls if (why := cast("ModuleType", op.reader()).not_repeated(op)) is not None), None)


def _call_step(graph: Graph, part: Part, target: Target, inner: Inner | None) -> Step:
    """Opaque calls: torch's operators run where the program does, other libraries on the CPU, their values being moved."""
    name = graph.origin(part.outputs[-1])
    if inner is not None and target.kind == "cpu":
        found = with_regions(part, inner)
        if found is not None:
            return Step(name, part, found[0], None, within=found[1])
    evaluate = evaluator(part.outputs, part.inputs, graph.origin)
    there = all(n.op.library == "torch" for n in part.nodes if isinstance(n.op, Call))

    def run(values: Sequence[Value]) -> Sequence[Value]:
        if target.kind == "cpu":
            return evaluate(values)
        results = None
        if there:
            try:
                with torch.device(target.device):
                    results = evaluate(values)
            except TypeMismatchError as error:
                if not isinstance(error.__cause__, NotImplementedError):  # torch has no kernel for these types there
                    raise
        if (results is None or any(map(_on_cpu, results))) and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(ON_CPU, where=name, hint="call the program outside of the graph")
        return [moved(v, target.device) for v in (evaluate([moved(v, "cpu") for v in values]) if results is None else results)]

    return Step(name, part, run, None)


def _on_cpu(value: Value) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def graphs_of(op: Call) -> Sequence[Graph]:
    """Graphs of the regions that a call runs as the data says; of most calls none."""
    regions = getattr(op.reader(), "regions", None)
    return regions(op) if regions is not None else ()


def with_regions(
    part: Part, inner: Inner
) -> tuple[Callable[[Sequence[Value]], Sequence[Value]], tuple[Executable, ...]] | None:
    """Runner of a call, and the programs of its regions; None for a call that has none."""
    calls = [n for n in part.nodes if isinstance(n.op, Call)]
    if len(calls) != 1 or not all(n is calls[0] or _result_of(n, calls[0]) for n in part.outputs):
        return None
    op, sources = cast("Call", calls[0].op), calls[0].src
    graphs = graphs_of(op)
    if not graphs:
        return None
    library = cast("ModuleType", op.reader())
    programs = tuple(inner(g) for g in graphs)
    order = [part.inputs.index(s) for s in sources]
    picked = [n.op.index if isinstance(n.op, Item) else 0 for n in part.outputs]

    def run(values: Sequence[Value]) -> Sequence[Value]:
        given = [cast("torch.Tensor", values[i]) for i in order]
        results = library.run_regions(op, given, [p.run for p in programs])
        constants = frozenset[int]().union(*(p.constant_memory for p in programs))  # which a result must not be
        results = separate(results, (), constants)
        return [results[i] for i in picked]

    return run, programs


def _result_of(node: Node, call: Node) -> bool:
    return isinstance(node.op, Item) and node.src[0] is call


def moved(value: Value, device: str) -> Value:
    if isinstance(value, tuple):
        return tuple(moved(v, device) for v in cast("tuple[Value, ...]", value))
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _is_given(node: Node, ready: Mapping[Node, Value]) -> bool:
    """Tell whether a node writes to memory that a program is given later (`Executable.with_state`)."""
    array = ready.get(node.src[0]) if isinstance(node.op, Write) else None
    return isinstance(array, torch.Tensor) and array.is_meta


def _into_given(
    problem: FusionProblem, runner: Runner, order: Sequence[int], arrays: Mapping[int, int]
) -> Callable[[Sequence[Value]], Sequence[Value]]:
    """Runner of a fusion of which some results are copied to where they belong in arrays that are among its inputs, by result
    and input."""

    def run(values: Sequence[Value]) -> Sequence[Value]:
        results: list[Value] = list(runner([cast("torch.Tensor", values[i]) for i in order]))
        for i, given in arrays.items():
            at, array, made = problem.destinations[i], cast("torch.Tensor", values[given]), cast("torch.Tensor", results[i])
            assert at is not None
            array.narrow(at.axis, at.start, made.shape[at.axis]).copy_(made)
            results[i] = array
        return results

    return run


def bind_outputs(
    problem: FusionProblem, part: Part, kernel: Kernel, weights: Mapping[int, torch.Tensor], ready: Mapping[Node, Value]
) -> Runner:
    """A fusion's kernel with those results that are writes to state: it writes them there, or they are copied."""
    arrays = {i: cast("torch.Tensor", ready[n.src[0]]) for i, n in enumerate(part.outputs) if isinstance(n.op, Write)}
    if any(a.is_meta for a in arrays.values()):
        return kernel.prepare(weights)
    if kernel.place is not None and all(a.is_contiguous() and a.data_ptr() % ALIGNED == 0 for a in arrays.values()):
        return kernel.place(weights, arrays)
    run = kernel.prepare(weights)

    def copied(sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        results = list(run(sources))
        for i, array in arrays.items():
            at = problem.destinations[i]
            assert at is not None
            array.narrow(at.axis, at.start, results[i].shape[at.axis]).copy_(results[i])
            results[i] = array
        return results

    return describe(copied, lambda parts: recipe_of(run, parts))


def written(part: Part, name: str, target: Target) -> Callable[[Sequence[Value]], Sequence[Value]]:
    """Writes that are a step by themselves, as their positions are data: values of the part's inputs in, the arrays out. On a
    GPU those of like arrays are one launch.

    Raises:
        TypeMismatchError: when it runs, on a CPU: a position is out of range. Nothing is written then.
    """
    alike: dict[object, list[Node]] = {}
    for node in part.nodes:
        alike.setdefault((node.op, node.type, node.src[1]), []).append(node)
    on_cpu = target.kind == "cpu"
    runners = [_copies(nodes, part, name) if on_cpu else _launches(nodes, part, target) for nodes in alike.values()]
    arrays = [part.inputs.index(n.src[0]) for n in part.outputs]

    # One by itself looks at its positions before it writes.
    check = in_range(part.nodes, part.inputs, name) if on_cpu and len(runners) > 1 else None

    def run(values: Sequence[Value]) -> Sequence[Value]:
        if check is not None:
            check(values)
        for runner in runners:
            runner(values)
        return [values[i] for i in arrays]

    return run


def in_range(nodes: Sequence[Node], inputs: Sequence[Node], name: str) -> Callable[[Sequence[Value]], Sequence[Value]]:
    """A function of values that sees whether the positions of some writes lie in the arrays that these write to; it gives
    nothing. `inputs` are the nodes of the values: the positions, and the arrays or what these are a write to.

    Raises:
        TypeMismatchError: when it runs: one does not.
    """
    place = {n: i for i, n in enumerate(inputs)}
    arrays = [n.src[0] if n.src[0] in place else root_of(n) for n in nodes]
    different = {
        (n.src[1], n.op, n.shape[op.axis]): (op, place[n.src[1]], place[array])
        for n, array in zip(nodes, arrays, strict=True)
        for op in (cast("Write", n.op),)
    }
    looked_at = [*different.values()]

    def check(values: Sequence[Value]) -> Sequence[Value]:
        for op, at, array in looked_at:
            _run_of(cast("torch.Tensor", values[at]), op, cast("torch.Tensor", values[array]), name)
        return ()

    return check


def _run_of(positions: torch.Tensor, op: Write, array: torch.Tensor, name: str) -> int | None:
    """The first of positions of which each is the one before it and 1 more; None for any others.

    Raises:
        TypeMismatchError: one is out of range.
    """
    count, extent = positions.numel(), array.shape[op.axis]
    if count <= FEW:
        at = cast("list[int]", positions.tolist()) or [0]
        least, most = min(at), max(at)
    else:
        wide = positions.to(torch.int64)
        least, most = (int(end) for end in wide.aminmax())
        at = wide
    first = -extent if op.wraps else 0
    if least < first or (most >= extent and count):
        axis = op.axis % array.dim()
        what = f"write: position out of range: {least if least < first else most} of {extent} along axis {axis}"
        raise TypeMismatchError(what, where=name, hint=f"positions from {first} to {extent - 1}")
    if least < 0 or most - least != len(at) - 1:
        return None
    follow = at == [*range(least, most + 1)] if isinstance(at, list) else torch.equal(at, torch.arange(least, most + 1))
    return least if follow else None


def _copies(nodes: Sequence[Node], part: Part, name: str) -> Callable[[Sequence[Value]], None]:
    """A function that writes to arrays of one type, at the same positions, on a CPU. Where these follow each other, as
    a cache's new ones do, a plain copy takes half the time.

    Raises:
        TypeMismatchError: when it runs: a position is out of range. Nothing is written then.
    """
    (first, *_), op = nodes, cast("Write", nodes[0].op)
    axis, at = op.axis % len(first.shape), part.inputs.index(first.src[1])
    pairs = [(part.inputs.index(n.src[0]), part.inputs.index(n.src[2])) for n in nodes]

    def run(values: Sequence[Value]) -> None:
        given = cast("Sequence[torch.Tensor]", values)
        positions = given[at]
        start = _run_of(positions, op, given[pairs[0][0]], name)
        if start is not None:
            count = positions.numel()
            for array, new in pairs:
                given[array].narrow(axis, start, count).copy_(given[new])
            return
        index = (*(slice(None),) * axis, positions.to(torch.int64))
        for array, new in pairs:
            given[array][index] = given[new]

    return run


def _launches(nodes: Sequence[Node], part: Part, target: Target) -> Callable[[Sequence[Value]], None]:
    """The same on a GPU."""
    (first, *_), op = nodes, cast("Write", nodes[0].op)
    axis, at = op.axis % len(first.shape), part.inputs.index(first.src[1])
    arrays, new = ([part.inputs.index(n.src[i]) for n in nodes] for i in (0, 2))
    at_once = None
    with contextlib.suppress(Unsupported):
        at_once = index_copy(first.tensor, axis, first.src[1].tensor, len(nodes), target, wraps=op.wraps)

    def run(values: Sequence[Value]) -> None:
        given = [cast("torch.Tensor", v) for v in values]
        into, made, positions = [given[i] for i in arrays], [given[i] for i in new], given[at]
        if at_once is not None and takes([positions, *into]):
            made = [dense(t) for t in made]
            at_once(positions, into, made)
            return
        wide = positions.to(torch.int64)
        for array, value in zip(into, made, strict=True):
            if op.wraps:
                array[(*(slice(None),) * axis, wide)] = value
            else:
                array.index_copy_(axis, wide, value)

    return run


def refused_first(steps: Sequence[Step], *, positions: bool) -> tuple[Step, ...]:
    """The steps with those ahead that comparisons with the traced way need, and `positions` of writes: a call that ends there
    wrote nothing yet."""
    needed: set[Node] = set()
    ahead: set[int] = set()
    for i, step in reversed([*enumerate(steps)]):
        if positions and step.only_writes:
            needed.update(n.src[1] for n in step.part.nodes)
        if _compares(step) or needed.intersection(step.part.outputs):
            ahead.add(i)
            needed.update(step.part.inputs)
    return tuple(steps[i] for i in sorted(range(len(steps)), key=lambda i: i not in ahead))


@dataclass(frozen=True)
class Positions:
    """The look at positions of writes before a call writes anything.

    Attributes:
        before: the number of the step that it comes before.
        inputs: the nodes whose values it takes.
        check: a function of these (`in_range`).
    """

    before: int
    inputs: tuple[Node, ...]
    check: Callable[[Sequence[Value]], Sequence[Value]]

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Positions | None:
        """That of all writes at positions that are known before anything is written; None where there are none. The first step
        that writes looks at its own itself."""
        made = {n: i for i, step in enumerate(steps) for n in step.part.outputs}
        first = next((i for i, step in enumerate(steps) if any(isinstance(n.op, Write) for n in step.part.nodes)), len(steps))
        writing = [(i, step) for i, step in enumerate(steps) if step.only_writes]
        writes = [n for _, step in writing for n in step.part.nodes if made.get(n.src[1], -1) < first]
        if not writes or [i for i, _ in writing] == [first]:
            return None
        inputs = tuple(dict.fromkeys(n for w in writes for n in (w.src[1], root_of(w))))
        before = 1 + max(made.get(n, -1) for n in inputs)
        return cls(before, inputs, in_range(writes, inputs, writing[0][1].name))


def written_before_compared(steps: Sequence[Step]) -> set[Node]:
    """The states written to by steps that a comparison follows, as its outcome depends on them."""
    last = max((i for i, step in enumerate(steps) if _compares(step)), default=0)
    writes = [n for step in steps[:last] for n in step.part.nodes if isinstance(n.op, Write)]
    return {*map(root_of, writes)}


def _compares(step: Step) -> bool:
    return any(isinstance(n.op, Call) and n.op.target == _COMPARED for n in step.part.nodes)
