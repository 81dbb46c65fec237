"""Running a program: steps over numbered value slots, each value dropped after its last reader."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from tilewright.deadline import Budget
from tilewright.errors import AnotherWayError, InputError, TypeMismatchError, UnsupportedError, check_type, counted, visible
from tilewright.hardware.target import Target
from tilewright.ir.account import Account, account_of
from tilewright.ir.anchor import ANCHORS
from tilewright.ir.evaluate import evaluate_nodes, evaluator
from tilewright.ir.graph import Graph, Node
from tilewright.ir.literal import Literal
from tilewright.ir.ops import Call, Const, Input, Item, Write
from tilewright.ir.pattern import Trace
from tilewright.ir.state import caller_inputs, meets, span
from tilewright.ir.types import TensorType
from tilewright.progress import Progress
from tilewright.rules.calibrate import Layer
from tilewright.runtime.arrays import Wanted, address, is_numpy, separate, to_user
from tilewright.runtime.partition import Part, decided, parts_for
from tilewright.runtime.replay import Bound, OnDevice, results_last
from tilewright.schedule.budget import SharedBudget
from tilewright.schedule.candidate import Kernel, Runner
from tilewright.schedule.measure import last_cache_bytes
from tilewright.schedule.problem import AnyProblem, FusionProblem
from tilewright.schedule.recipe import describe, recipe_of
from tilewright.schedule.search import Decision
from tilewright.schedule.tuning_database import TuningDatabase
from tilewright.threads import limited, usable, with_torch

if TYPE_CHECKING:
    from types import ModuleType

    from tilewright.ir.graph import Value


PACKED_BPS = 0.5e9  # bytes of weights a second that are packed once kernels are chosen
ALIGNED = 16  # bytes, as generated kernels take memory
_COMPARED = "tilewright.as_traced.default"  # the call that ends another way than the traced one (frontends/torch/taken.py)

SHOWN = 160  # characters of the inputs, and as many of the results, that a program's own line shows

E = TypeVar("E", bound="Executable")
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

    def __repr__(self) -> str:
        """One line: its name, what it computes, and what does that."""
        by = "the source's own library" if self.decision is None else self.decision.kernel.candidate
        what = self.part.kind if self.decision is None else str(self.decision.problem)
        return f"<step {listed([self.name])!r}: {listed([what])} by {by}>"


@dataclass(repr=False)
class Executable:
    """A compiled program: call it with the inputs in order, or by name. Those that the source's own function takes after an
    argument that was fixed (None, a number, left out of the examples) are given by name.

    Takes torch tensors, NumPy arrays or anything with DLPack. Gives torch tensors, or NumPy arrays if it was given NumPy
    arrays alone; one result bare, several as a tuple. The results are the caller's own: never memory of an input or a constant.
    An input in memory that calls write to (`state`) is read as it was before the call.

    Attributes:
        source: the graph as read, and quantised if that was asked for.
        graph: the graph as compiled.
        target: where it runs.
        steps: in order.
        trace: what the rules did.
        layers: what quantising a float model did to each product; empty if it was not quantised here.
        own_graphs: whether its calls may become CUDA graphs of its own; not those of a part of somebody's program.
        constant_memory: addresses of what no caller may write to.
        threads: threads for calls on a CPU; None is torch's number, but no more than the machine has for this process.
        uncompiled: runs the source itself on the inputs, where these lead another way than the one that was traced.
        told: what rules did, of a program whose trace was not kept.
        finished: rules and calibration were not cut short for want of time.
    """

    source: Graph
    graph: Graph
    target: Target
    steps: tuple[Step, ...]
    trace: Trace
    _ready: dict[Node, Value]
    layers: tuple[Layer, ...] = ()
    own_graphs: bool = True
    threads: int | None = None
    uncompiled: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]] | None = None
    told: Account | None = None
    finished: bool = True

    def __repr__(self) -> str:
        """One line of less than 500 characters: how many steps, where, from which inputs to which results."""
        inputs = listed([f"{name}: {t}" for name, t in self.input_types.items()])
        results = listed([str(o.type) for o in self.graph.outputs[: len(self.graph.outputs) - len(self.graph.state)]])
        count = counted(len(self.steps), "step")
        return f"<tilewright program of {count} on {self.target.device}: ({inputs}) -> {results}>"

    def __post_init__(self) -> None:
        if self.graph.state:
            self.steps = compared_first(self.steps)
        slot: dict[Node, int] = {}
        for node in self.graph.inputs:
            slot[node] = len(slot)
        for node in self._ready:
            slot.setdefault(node, len(slot))
        for step in self.steps:
            for node in step.part.outputs:
                slot.setdefault(node, len(slot))
        kept = {slot[n] for n in (*self.graph.outputs, *self._ready)}
        last: dict[int, int] = {}
        for i, step in enumerate(self.steps):
            last.update((slot[n], i) for n in (*step.part.inputs, *step.part.outputs))
        self._program = [
            Bound(
                step.name,
                step.run,
                [slot[n] for n in step.part.inputs],
                [slot[n] for n in step.part.outputs],
                [s for s, at in last.items() if at == i and s not in kept],
                "it runs in the source's own library" if step.decision is None and step.part.kind != "write" else None,
            )
            for i, step in enumerate(self.steps)
        ]
        result_bytes = [sum(t.size_bytes for n in s.part.outputs if isinstance(t := n.type, TensorType)) for s in self.steps]
        self._program = results_last(self._program, {slot[n] for n in self.graph.outputs}, result_bytes)
        self._wanted = [Wanted(name, t, self.target.device) for name, t in self.input_types.items()]
        self._inputs = [slot[n] for n in caller_inputs(self.graph)]
        count = len(self.graph.outputs) - len(self.graph.state)
        self._outputs = [slot[n] for n in (*self.graph.outputs[:count], *(new for new, _ in self._replaced()))]
        self._start: list[Value] = [None] * len(slot)
        for node, value in self._ready.items():
            self._start[slot[node]] = value
        constants = (v for v in self._ready.values() if isinstance(v, torch.Tensor))
        self.constant_memory: frozenset[int] = frozenset(map(address, constants))
        self._slots = slot
        self._bind_state()
        self._usable = usable()
        self._foreign = any(s.decision is None or not s.decision.kernel.candidate.startswith("llvm") for s in self.steps)
        self._launch()

    def _replaced(self) -> list[tuple[Node, Node]]:
        """The new values of state that are copied over the old ones as a call ends, with these."""
        count = len(self.graph.outputs) - len(self.graph.state)
        ends = zip(self.graph.outputs[count:], self.graph.inputs[len(self._inputs) :], strict=True)
        return [(new, old) for new, old in ends if new is not old and not isinstance(new.op, Write)]

    def _bind_state(self) -> None:
        """Take the memory of state that calls write to."""
        self._copied = [cast("torch.Tensor", self._ready[old]) for _, old in self._replaced()]
        self._copied_at = frozenset(map(address, self._copied))
        risked = written_before_compared(self.steps) if self.graph.state else set[Node]()
        self._at_risk = [cast("torch.Tensor", self._ready[n]) for n in risked if n in self._ready]
        self._written = [span(t) for t in self.state.values()]

    def _launch(self) -> None:
        """Choose how calls reach the device, from the first call on."""
        device, given = self.target.device, (self._program, self._start, self._inputs, self._outputs)
        self._on_device = None if self.target.kind == "cpu" else OnDevice(device, *given, allowed=self.own_graphs)
        self._kernels = self.steps, self._program, self._on_device  # as one, so that a call takes all of one kind

    def swap(self, steps: tuple[Step, ...]) -> None:
        """Run by these steps from the next call on; calls under way end as they began. They are the steps that there are, with
        other kernels."""
        self.steps = steps
        self._program = [replace(b, run=s.run) for b, s in zip(self._program, steps, strict=True)]
        self._launch()

    def __deepcopy__(self, memo: dict[int, object]) -> Executable:
        """A copy with constants of its own.

        Raises:
            InputError: it keeps something from call to call, which kernels of both would write to.
        """
        if self.graph.state:
            what = f"a program that writes to {', '.join(self.state)} cannot be copied"
            raise InputError(what, where=self.graph.name, hint="compile a copy of the module")
        made = memo[id(self)] = object.__new__(type(self))
        assert self.source  # read, if it was not yet
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def __copy__(self) -> Executable:
        """Another look at the same program: constants and state are shared."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def read_source(self, read: Callable[[], Graph]) -> None:
        """Take the graph as read from `read`, when it is first asked for."""
        self._read_source = read
        del self.source

    def __getattr__(self, name: str) -> Graph:
        if name != "source" or "_read_source" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        self.source = self._read_source()
        del self._read_source
        return self.source

    def __reduce__(self) -> tuple[Callable[..., Executable], tuple[object, ...]]:
        """Pickle the program as the artefact that `save` writes; what is unpickled is trusted, as pickles are."""
        from tilewright.runtime.artefact import artefact_of, unpickled

        return unpickled, (artefact_of(self), type(self))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the program to a file, whole or not at all: its graph, weights, decisions and machine code.

        `tilewright.load_program` reads it back, without what compiled it (docs/artefacts.md). State is written as it is now.

        Raises:
            InputError: the file cannot be written, or the program's weights were dropped and are needed.
            UnsupportedError: it holds a constant that is no tensor.
        """
        from tilewright.runtime.artefact import save

        check_type(path, (str, PathLike), "path", '"model.twp"')
        save(self, Path(path))

    def with_state(self: E, state: Sequence[torch.Tensor]) -> E:
        """The same program over other memory: tensors on its device, as many and of the types of its state, which was without
        data (on the meta device) when it was prepared. Kernels and constants are shared. Inputs of its calls are to lie
        elsewhere."""
        made = copy.copy(self)
        count = len(self._inputs)
        given = dict(zip(self.graph.inputs[count:], state, strict=True))
        made._ready = {**self._ready, **given}
        made._start = self._start.copy()
        for node, value in given.items():
            made._start[self._slots[node]] = value
        made._bind_state()
        made._written = []
        made._launch()
        return made

    @property
    def account(self) -> Account:
        """The account of the rules: what they did to the graph, and what they left."""
        return account_of(self.trace, self.graph) if self.told is None else self.told

    @property
    def launched(self) -> str | None:
        """A sentence on how the steps are launched on a GPU: as CUDA graphs, or one by one and why; None on a CPU."""
        return None if self._on_device is None else self._on_device.words

    @property
    def graph_bytes(self) -> int:
        """Device memory of its CUDA graphs: every value on the way, inputs and results."""
        return 0 if self._on_device is None else self._on_device.graph_bytes

    @property
    def input_types(self) -> dict[str, TensorType]:
        """The inputs by name, in call order."""
        return {cast("Input", n.op).label: n.tensor for n in caller_inputs(self.graph)}

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """State that calls write for later ones, by name: memory of the module's own buffers where they are on the device.

        A tensor that the module is given for a buffer afterwards is not these.
        """
        count = len(self._inputs)
        return {cast("Input", n.op).label: cast("torch.Tensor", self._ready[n]) for n in self.graph.inputs[count:]}

    def value(self, node: Node) -> torch.Tensor:
        """The value of a node that depends on constants alone, or of state; what kernels hold packed is computed again.

        Raises:
            InputError: a constant was dropped (`drop_weights`) that was in no file.
            UnsupportedError: it is no tensor.
        """
        found = self._ready.get(node)
        if found is None:
            (found,) = evaluate_nodes((node,), {})
        if not isinstance(found, torch.Tensor):
            raise UnsupportedError(f"a constant of type {node.type} is no tensor", where=self.graph.origin(node))
        return found

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the program.

        Raises:
            InputError: an input is missing, unknown, or of another shape or type.
        """
        values = self.bind(args, kwargs)
        results = separate(self.run(values), map(address, values), self.constant_memory)
        plain = all(map(is_numpy, (*args, *kwargs.values()))) and bool(args or kwargs)
        shown = [to_user(r, n.tensor, plain) for r, n in zip(results, self.graph.outputs, strict=not self.graph.state)]
        return shown[0] if len(shown) == 1 else tuple(shown)

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
        """The user's arrays as tensors on the device, in input order, checked."""
        if len(args) == len(self._wanted) and not kwargs and not self.graph.places:
            return [wanted.take(value) for wanted, value in zip(self._wanted, args, strict=True)]
        if not args and len(kwargs) == len(self._wanted) and all(wanted.name in kwargs for wanted in self._wanted):
            return [wanted.take(kwargs[wanted.name]) for wanted in self._wanted]
        types = self.input_types
        if len(args) > len(types):
            raise InputError(f"{counted(len(types), 'input')} wanted, {len(args)} given", where=self.graph.name)
        given = dict(zip(self._by_place(len(args)), args, strict=True))
        for name, value in kwargs.items():
            if name not in types or name in given:
                why = "given twice" if name in types else f"unknown; there are {', '.join(types) or 'none'}"
                raise InputError(f"input {name!r} is {why}", where=self.graph.name)
            given[name] = value
        missing = [n for n in types if n not in given]
        if missing:
            raise InputError(f"no value for input {missing[0]!r}", where=self.graph.name, hint=f"it is {types[missing[0]]}")
        return [wanted.take(given[wanted.name]) for wanted in self._wanted]

    def _by_place(self, count: int) -> list[str]:
        """The inputs that this many positional arguments are.

        Raises:
            InputError: the source's own function takes something else there, or that cannot be told.
        """
        names = (self.graph.places or (*self.input_types,))[:count]
        for i, name in enumerate(names):
            if name not in self.input_types:
                rest = ", ".join(f"{n}=…" for n in self.input_types if n not in names[:i])
                what = f"argument {i + 1} is {name!r}, which is no input: it was fixed when the program was traced"
                hint = f"give what follows by name: {rest}; or compile with an example of {name!r}"
                if name.startswith("*"):
                    what, hint = f"what argument {i + 1} is cannot be told: the program takes it by name", f"give {rest}"
                raise InputError(what, where=self.graph.name, hint=hint)
        return [*names]

    def run(self, inputs: Sequence[torch.Tensor], observe: Callable[[Step, list[Value]], None] | None = None) -> list[Value]:
        """The results for tensors on the device. `observe` sees each step with its inputs before it runs.

        On a GPU, work is put on torch's current stream of the device, as torch's own operations are; the host does not wait.
        """
        if self.target.kind == "cpu":
            count = torch.get_num_threads()
            if self._foreign and (self.threads or count) > 1:
                with with_torch(self.threads):
                    return self._run_alike(inputs, observe)
            if self.threads is not None or count > self._usable:
                with limited(self.threads):
                    return self._run_alike(inputs, observe)
        return self._run_alike(inputs, observe)

    def _run_alike(self, inputs: Sequence[torch.Tensor], observe: Callable[[Step, list[Value]], None] | None) -> list[Value]:
        """Run the program, or the module itself on inputs that lead another way."""
        before = [t.detach().clone() for t in self._at_risk]
        records = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # pyright: ignore[reportPrivateUsage] - `no_grad` takes longer than a small product
        try:
            if self._on_device is None or torch.cuda.current_device() == self.target.index:
                return self._run(inputs, observe)
            with torch.cuda.device(self.target.index):
                return self._run(inputs, observe)
        except AnotherWayError as error:
            for kept, held in zip(self._at_risk, before, strict=True):
                kept.copy_(held)
            if self.uncompiled is None or observe is not None:
                raise
            warnings.warn(f"torch ran the module itself, uncompiled: {error}", stacklevel=3)
            return cast("list[Value]", self.uncompiled(inputs))
        finally:
            torch._C._set_grad_enabled(records)  # pyright: ignore[reportPrivateUsage]

    def _run(self, inputs: Sequence[torch.Tensor], observe: Callable[[Step, list[Value]], None] | None) -> list[Value]:
        """Run the program with its device the current one."""
        if self._written:
            inputs = [t.clone() if meets(span(t), self._written) else t for t in inputs]
        steps, program, on_device = self._kernels
        if on_device is not None and observe is None:
            results = on_device(inputs)
            if results is not None:
                return self._kept_from(results)
        values = self._start.copy()
        for slot, tensor in zip(self._inputs, inputs, strict=True):
            values[slot] = tensor
        if observe is None:
            for bound in program:
                bound(values)
        else:
            for step, bound in zip(steps, program, strict=True):
                observe(step, [values[s] for s in bound.inputs])
                bound(values)
        return self._kept_from([values[s] for s in self._outputs])

    def _kept_from(self, results: list[Value]) -> list[Value]:
        """The caller's results, once the others have been copied over the state."""
        if not self._copied:
            return results
        # A result or a new value that is what an array held is not to change with it.
        apart = [r.clone() if isinstance(r, torch.Tensor) and address(r) in self._copied_at else r for r in results]
        count = len(results) - len(self._copied)
        for array, new in zip(self._copied, apart[count:], strict=True):
            array.copy_(cast("torch.Tensor", new))
        return apart[:count]

    @property
    def packed_bytes(self) -> int:
        """Memory that packing weights added."""
        within = sum(p.packed_bytes for s in self.steps for p in s.within)
        return within + sum(s.decision.kernel.packed_bytes for s in self.steps if s.decision is not None)

    def drop_weights(self) -> int:
        """Let go of the weights that are packed: the program runs on, with one copy of them instead of two.

        Weights that came from a file are read again when something asks for the source's values (`verify`); those of a module
        in memory are then missing, and the memory is free once the module is, too.

        Returns:
            int: bytes that this program no longer holds.
        """
        read = {n for step in self.steps for n in step.part.inputs if n not in step.releasable} | set(self.graph.outputs)
        dropped = 0
        for node in [n for n in self._ready if n not in read]:
            value = self._ready.pop(node)
            self._start[self._slots[node]] = None
            dropped += value.nbytes if isinstance(value, torch.Tensor) else 0
        for graph in (self.source, self.graph):
            for node in graph.nodes():
                if isinstance(node.op, Const):
                    node.op.data.drop()
        self._launch()  # graphs read what they were captured with
        return dropped


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
    parts: Sequence[Part] | None = None,
    constants: Mapping[Literal, torch.Tensor] | None = None,
    known: dict[Node, Value] | None = None,
) -> E:
    """Cut the graph into steps, evaluate what depends on constants alone, and choose a kernel for each gemm: for those problems
    first of which `first` gives most. `inner` compiles the regions of loops and conditionals; without it the oracle runs
    them. `made` is the kind of executable that is wanted, `parts` what the graph was cut into before, and `constants` has
    values in place of literals' own. `known` has values that depend on constants alone, and is given those that are found."""
    parts = parts_for(graph, target) if parts is None else parts
    ready: dict[Node, Value] = {} if known is None else known
    for node in graph.nodes():
        if isinstance(node.op, Const) and node not in ready:
            given = None if constants is None else constants.get(node.op.data)
            ready[node] = (node.op.data.tensor() if given is None else given).detach().to(target.device)
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
    in_turn = posed.values() if first is None else sorted(posed.values(), key=lambda p: first(p.problem), reverse=True)
    decisions = {p.part: decide(p.problem, p.weights) for p in in_turn}
    steps: list[Step] = []
    for part in parts:
        if part in posed:
            steps.append(kernel_step(graph, posed[part], ready, decisions[part]))
        elif not part.once:
            steps.append(library_step(graph, part, target, inner))
    used = {n for step in steps for n in step.part.inputs} | set(graph.outputs) | set(graph.inputs)
    return made(source, graph, target, tuple(steps), trace, {n: v for n, v in ready.items() if n in used})


def _evaluate_once(part: Part, ready: Mapping[Node, Value], target: Target) -> list[Value]:
    bound = {n: _moved(ready[n], "cpu") for n in part.inputs}
    return [_moved(v, target.device) for v in evaluate_nodes(part.outputs, bound)]


def chooser(
    graph: Graph,
    target: Target,
    budget: float | Budget,
    progress: Progress | None = None,
    database: TuningDatabase | None = None,
    parts: Sequence[Part] | None = None,
) -> SharedBudget:
    """The choice of kernels for a graph's problems, which share a budget, or so many seconds from now on (`SharedBudget`), less
    what packing its weights will take. `parts` is what the graph was cut into before."""
    budget = budget if isinstance(budget, Budget) else Budget(budget)
    parts = [p for p in (parts_for(graph, target) if parts is None else parts) if decided(p)]
    size = weights_bytes(parts)
    problems, cold = Counter(p.posed[0] for p in parts), size > last_cache_bytes(target)
    rest = budget.part(max(0.0, budget.left_s() - size / PACKED_BPS))
    return SharedBudget(problems, target, rest, cold=cold, progress=progress, database=database)


def weights_bytes(parts: Sequence[Part]) -> int:
    """The bytes of constants that parts for which kernels are chosen read."""
    weights = {n for p in parts if decided(p) for n in p.inputs if n.constant}
    return sum(n.tensor.size_bytes for n in weights if isinstance(n.type, TensorType))


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
        picked = list(range(len(part.outputs)))
        placed = any(problem.destinations)
        runner = bind_outputs(problem, part, decision.kernel, weights, ready) if placed else decision.kernel.prepare(weights)
        arrays = {i: part.inputs.index(n.src[0]) for i, n in enumerate(part.outputs) if _is_given(n, ready)}
        if arrays:
            return Step(name, part, _into_given(problem, runner, order, arrays), decision, runner=runner)
    else:
        runner = decision.kernel.prepare(weights)
        picked = [n.op.index if isinstance(n.op, Item) else 0 for n in part.outputs]
    as_given = order == list(range(len(part.inputs))) and picked == list(range(len(problem.outputs)))

    def run(values: Sequence[Value]) -> Sequence[Value]:
        try:
            if as_given:
                return runner(cast("Sequence[torch.Tensor]", values))
            results = runner([cast("torch.Tensor", values[i]) for i in order])
        except TypeMismatchError as error:  # an operation that fails for these values: an index out of range
            raise TypeMismatchError(error.what, where=name, hint=error.hint) from error
        return [results[i] for i in picked]

    releasable = frozenset(sources[i] for i in decision.kernel.releasable)
    releasable -= {s for i, s in enumerate(sources) if i not in decision.kernel.releasable}
    return Step(name, part, run, decision, releasable, runner=runner)


def library_step(graph: Graph, part: Part, target: Target, inner: Inner | None) -> Step:
    """A step that no kernels compete for: a call into the source's own library, or a write at positions that are data."""
    if part.kind == "write":
        name = graph.origin(part.nodes[0])
        return Step(name, part, written(part, name), None)
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
        if there:
            try:
                with torch.device(target.device):
                    return [_moved(v, target.device) for v in evaluate(values)]
            except TypeMismatchError as error:
                if not isinstance(error.__cause__, NotImplementedError):  # torch has no kernel for these types there
                    raise
        return [_moved(v, target.device) for v in evaluate([_moved(v, "cpu") for v in values])]

    return Step(name, part, run, None)


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
    constants = frozenset[int]().union(*(p.constant_memory for p in programs))  # which a result must not be

    def run(values: Sequence[Value]) -> Sequence[Value]:
        given = [cast("torch.Tensor", values[i]) for i in order]
        results = separate(library.run_regions(op, given, [p.run for p in programs]), (), constants)
        return [results[i] for i in picked]

    return run, programs


def _result_of(node: Node, call: Node) -> bool:
    return isinstance(node.op, Item) and node.src[0] is call


def _moved(value: Value, device: str) -> Value:
    if isinstance(value, tuple):
        return tuple(_moved(v, device) for v in cast("tuple[Value, ...]", value))
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


def written(part: Part, name: str) -> Callable[[Sequence[Value]], Sequence[Value]]:
    """A write that is a step by itself, as its positions are data: values of the part's inputs in, the array out.

    Raises:
        TypeMismatchError: when it runs, on a CPU: a position is out of range.
    """
    (node,) = part.nodes
    assert isinstance(node.op, Write)
    x, positions, y = (part.inputs.index(s) for s in node.src)
    axis = node.op.axis

    def run(values: Sequence[Value]) -> Sequence[Value]:
        array, at, new = (cast("torch.Tensor", values[i]) for i in (x, positions, y))
        try:
            array[(slice(None),) * axis + (at.to(torch.int64),)] = new
        except IndexError as error:
            raise TypeMismatchError(f"write: {error}", where=name) from error
        return [array]

    return run


def compared_first(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps with those ahead that comparisons with the traced way need: a call that ends there wrote nothing yet."""
    needed: set[Node] = set()
    ahead: set[int] = set()
    for i, step in reversed([*enumerate(steps)]):
        if _compares(step) or needed.intersection(step.part.outputs):
            ahead.add(i)
            needed.update(step.part.inputs)
    return tuple(steps[i] for i in sorted(range(len(steps)), key=lambda i: i not in ahead))


def written_before_compared(steps: Sequence[Step]) -> set[Node]:
    """The states written to by steps that a comparison follows, as its outcome depends on them."""
    last = max((i for i, step in enumerate(steps) if _compares(step)), default=0)
    writes = [n for step in steps[:last] for n in step.part.nodes if isinstance(n.op, Write)]
    roots: set[Node] = set()
    for node in writes:
        while isinstance(node.op, Write):
            node = node.src[0]
        roots.add(node)
    return roots


def _compares(step: Step) -> bool:
    return any(isinstance(n.op, Call) and n.op.target == _COMPARED for n in step.part.nodes)
