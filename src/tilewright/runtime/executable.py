"""Running a program: steps over numbered value slots, each value dropped after its last reader."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar, cast

import torch

from tilewright.errors import AnotherWayError, InputError, UnsupportedError, check_type, counted, noted
from tilewright.hardware.target import Target
from tilewright.ir.account import Account, account_of
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Const, Input, Write
from tilewright.ir.pattern import Trace
from tilewright.ir.state import caller_inputs, end_bytes, meets, root_of, span
from tilewright.ir.types import TensorType
from tilewright.processors import usable
from tilewright.rules.calibrate import Layer
from tilewright.runtime.arrays import Wanted, address, copy_over, is_numpy, separate, to_user
from tilewright.runtime.chain import generated, in_chains, watched
from tilewright.runtime.replay import Bound, OnDevice, results_last
from tilewright.runtime.steps import (
    Posed,
    Positions,
    Step,
    kernel_step,
    listed,
    refused_first,
    why_alone,
    written_before_compared,
)
from tilewright.schedule.cost import least_us
from tilewright.threads import limited, with_torch

if TYPE_CHECKING:
    from tilewright.ir.graph import Value


E = TypeVar("E", bound="Executable")


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
            self.steps = refused_first(self.steps, positions=self.target.kind == "cpu")
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
                why_alone(step, self.target),
                step.decision is None and not step.only_writes,
            )
            for i, step in enumerate(self.steps)
        ]
        result_bytes = [sum(t.size_bytes for n in s.part.outputs if isinstance(t := n.type, TensorType)) for s in self.steps]
        self._program = results_last(self._program, {slot[n] for n in self.graph.outputs}, result_bytes)
        found = Positions.of(self.steps) if self.graph.state and self.target.kind == "cpu" else None
        self._first = None if found is None else (found.before, Bound("", found.check, [slot[n] for n in found.inputs], [], []))
        self._wanted = [Wanted(name, t, self.target.device) for name, t in self.input_types.items()]
        self._inputs = [slot[n] for n in caller_inputs(self.graph)]
        count = len(self.graph.outputs) - len(self.graph.state)
        self._outputs = [slot[n] for n in (*self.graph.outputs[:count], *(new for new, _ in self._replaced()))]
        self._start: list[Value] = [None] * len(slot)
        for node, value in self._ready.items():  # tensors whose memory is others', but not their strides
            self._start[slot[node]] = value.detach() if isinstance(value, torch.Tensor) else value
        self._slots, self._state_is_given, self._changing = slot, False, threading.RLock()
        self._bind_state()
        self._usable, self._met = usable(), set[int]()
        self._launch()

    def _replaced(self) -> list[tuple[Node, Node]]:
        """The new values of state that are copied over the old ones as a call ends, with these."""
        count = len(self.graph.outputs) - len(self.graph.state)
        ends = zip(self.graph.outputs[count:], self.graph.inputs[len(self._inputs) :], strict=True)
        return [(new, old) for new, old in ends if new is not old and not isinstance(new.op, Write)]

    def _bind_state(self) -> None:
        """Take the memory of state that calls write to."""
        self._kept = [self._held(n) for n in self.graph.inputs[len(self._inputs) :]]
        self._copied = [self._held(old) for _, old in self._replaced()]
        risked = written_before_compared(self.steps) if self.graph.state else set[Node]()
        self._at_risk = [self._held(n) for n in risked if n in self._ready]

    def _held(self, node: Node) -> torch.Tensor:
        """The program's own tensor over the memory of a constant or of state."""
        return cast("torch.Tensor", self._start[self._slots[node]])

    def _launch(self) -> None:
        """Choose how calls reach the device, from the first call on."""
        device, given = self.target.device, (self._program, self._start, self._inputs, self._outputs)
        on_cpu = self.target.kind == "cpu"
        self._foreign = any(s.decision is None or not s.decision.kernel.candidate.startswith("llvm") for s in self.steps)
        self._in_chains = on_cpu and all(generated(bound) is not None for bound in self._program)
        made = {slot for bound in self._program for slot in bound.outputs}
        apart = len(set(self._outputs)) == len(self._outputs) and made.issuperset(self._outputs)
        self._makes_results = self._in_chains and apart and not self.graph.state
        state = self._copied, self._kept
        self._on_device = None if on_cpu else OnDevice(device, *given, *state, allowed=self.own_graphs, met=self._met)
        self._kernels = self.steps, self._program, self._on_device  # as one, so that a call takes all of one kind
        self._locate()

    def _locate(self) -> None:
        """Note where constants lie, and state unless it was given.

        Raises:
            InputError: a step reads one of which somebody let go.
        """
        state = self.graph.inputs[len(self._inputs) :]
        own = [n for n in self._ready if not (self._state_is_given and n in state)]
        tensors = {n: t for n in own if isinstance(t := self._start[self._slots[n]], torch.Tensor) and not t.is_meta}
        wanted = self._read().union(state)
        read = {n: t for n, t in tensors.items() if n in wanted}
        for node, t in read.items():
            if t.untyped_storage().nbytes() < end_bytes(t):
                what = f"its memory was let go of: {t.untyped_storage().nbytes():,} of {end_bytes(t):,} bytes are there"
                raise InputError(what, where=self.graph.origin(node), hint="make its storage as large again, or compile again")
        self._written = [span(tensors[n]) for n in state if n in tensors]
        self.constant_memory: frozenset[int] = frozenset(map(address, tensors.values()))
        moved = watched([*read.values()], self._program) if self.target.kind == "cpu" and read else None
        # What tells whether that is still so; by threads the steps, and the chains of these that hold while it is.
        self._placed: tuple[Callable[[], object] | None, dict[int, tuple[list[Bound], list[Bound]]]] = moved, {}

    def _read(self) -> set[Node]:
        """The nodes that steps read where they lie, and results."""
        return {n for step in self.steps for n in step.part.inputs if n not in step.releasable} | set(self.graph.outputs)

    def swap(self, steps: tuple[Step, ...]) -> None:
        """Run by these steps from the next call on; calls under way end as they began. They are the steps that there are, with
        other kernels."""
        with self._changing:
            self.steps = steps
            self._program = [replace(b, run=s.run) for b, s in zip(self._program, steps, strict=True)]
            self._met = set()
            self._launch()

    def with_constants(self, values: Mapping[Node, Value]) -> Self | None:
        """The same steps over other values of constants, with which kernels are prepared. None where `values`, which has all
        that depends on constants alone, lacks some, or calls write to what the program keeps."""
        made = {n for step in self.steps for n in step.part.outputs}.union(self.graph.inputs)
        needed = [n for n in self._slots if n not in made]
        if self.graph.state or not all(n in values for n in needed):
            return None
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._ready = {n: values[n] for n in needed}
        other.steps = tuple(
            s if s.decision is None else kernel_step(self.graph, Posed.of(s.part, values), values, s.decision)
            for s in self.steps
        )
        other._program = [replace(b, run=s.run) for b, s in zip(self._program, other.steps, strict=True)]
        other._start = [None] * len(self._slots)
        for node, value in other._ready.items():
            other._start[self._slots[node]] = value.detach() if isinstance(value, torch.Tensor) else value
        other._changing, other._met = threading.RLock(), set()
        other._launch()
        return other

    def change(self, changed: Callable[[Step], Step]) -> None:
        """Run what becomes of each step from the next call on; what other threads change meanwhile stays."""
        with self._changing:
            steps = tuple(map(changed, self.steps))
            if any(new.run is not old.run for new, old in zip(steps, self.steps, strict=True)):
                self.swap(steps)
            else:
                self.steps = steps

    def __deepcopy__(self, memo: dict[int, object]) -> Executable:
        """A copy with constants of its own.

        Raises:
            InputError: it keeps something from call to call, which kernels of both would write to.
        """
        if self.graph.state:
            what = f"a program that writes to {', '.join(self.state)} cannot be copied"
            raise InputError(what, where=self.graph.name, hint="compile a copy of the module")
        made = memo[id(self)] = object.__new__(type(self))
        memo.update({id(self._changing): threading.RLock(), id(self._met): set[int](), id(self._on_device): None})
        assert self.source  # read, if it was not yet
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        made._launch()  # over the constants of the copy
        return made

    def __copy__(self) -> Executable:
        """Another look at the same program: constants and state are shared."""
        made = object.__new__(type(self))
        with self._changing:
            made.__dict__.update(self.__dict__)
        return made

    def read_source(self, read: Callable[[], Graph]) -> None:
        """Take the graph as read from `read`, when it is first asked for."""
        self._read_source = read
        del self.source

    def __getattr__(self, name: str) -> Graph:
        if name != "source" or "_changing" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        with self._changing:
            read = self.__dict__.pop("_read_source", None)
            if read is not None:
                self.source = read()
            if "source" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__} has no {name!r}")
            return self.source

    def __reduce__(self) -> tuple[Callable[..., Executable], tuple[object, ...]]:
        """Pickle the program as the artefact that `save` writes; what is unpickled is trusted, as pickles are."""
        from tilewright.runtime.artefact.read import unpickled
        from tilewright.runtime.artefact.write import artefact_of

        return unpickled, (artefact_of(self), type(self))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the program to a file, whole or not at all: its graph, weights, decisions and machine code.

        `tilewright.load_program` reads it back, without what compiled it (docs/artefacts.md). State is written as it is now.

        Raises:
            InputError: the file cannot be written, or the program's weights were dropped and are needed.
            UnsupportedError: it holds a constant that is no tensor.
        """
        from tilewright.runtime.artefact.write import save

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
        made._state_is_given, made._written = True, []
        made._bind_state()
        if made._on_device is not None:
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
        results = self.run_apart(values)
        plain = all(map(is_numpy, (*args, *kwargs.values()))) and bool(args or kwargs)
        shown = [to_user(r, n.tensor, plain) for r, n in zip(results, self.graph.outputs, strict=not self.graph.state)]
        return shown[0] if len(shown) == 1 else tuple(shown)

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
        """The user's arrays as tensors on the device, in input order, checked.

        Raises:
            InputError: an input is missing, unknown, or of another shape or type.
        """
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
        if self._in_chains and observe is None:  # which say how many threads, and record no gradients
            return self._run(inputs, None)
        if self.target.kind == "cpu":
            count = torch.get_num_threads()
            if self._foreign and (self.threads or count) > 1:
                with self.giving_way():
                    return self._run_alike(inputs, observe)
            if self.threads is not None or count > self._usable:
                with limited(self.threads):
                    return self._run_alike(inputs, observe)
        return self._run_alike(inputs, observe)

    def run_apart(self, inputs: Sequence[Value]) -> list[Value]:
        """The results for values on the device, in memory that is neither an input's, a constant's nor another result's."""
        before, given = self._makes_results, cast("Sequence[torch.Tensor]", inputs)
        results = self.run(given)
        if before and self._makes_results:  # the steps that ran, whether they were those before or after a swap
            return results
        return separate(results, [address(v) for v in inputs if isinstance(v, torch.Tensor)], self.constant_memory)

    def giving_way(self) -> AbstractContextManager[None]:
        """The context of a call, or of a step by itself: torch's threads give way to other programs, if it has a part in it."""
        several = self.target.kind == "cpu" and self._foreign and (self.threads or torch.get_num_threads()) > 1
        return with_torch(self.threads) if several else nullcontext()

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
        moved, chains = self._placed
        if moved is not None and moved():
            with self._changing:
                self._locate()
                _, chains = self._placed
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
        bounds, at = program, -1
        if observe is None and on_device is None:
            bounds = self._chained(steps, program, chains)
        try:
            for at, bound in enumerate(bounds):
                if observe is not None:
                    observe(steps[at], [values[s] for s in bound.inputs])
                bound(values)
        except AnotherWayError:  # what was written is put back
            raise
        except Exception as error:
            if on_device is not None or not self.graph.state:
                raise
            raise noted(error, self._said_of_state(bounds[: at + 1])) from error.__cause__
        return self._kept_from([values[s] for s in self._outputs])

    def _said_of_state(self, begun: Sequence[Bound]) -> str:
        """Words for what a call that failed in the last of these steps wrote until then."""
        *done, last = begun
        refuses = {id(step.run) for step in self.steps if step.only_writes}  # and then writes nothing
        slots = {s for bound in (done if id(last.run) in refuses else begun) for s in (*bound.outputs, *bound.free)}
        written = [root_of(n) for n, slot in self._slots.items() if isinstance(n.op, Write) and slot in slots]
        names = dict.fromkeys(cast("Input", n.op).label for n in written)
        return f"the call had written {listed([*names])} by then" if names else "the call has written nothing"

    def _chained(
        self, steps: Sequence[Step], program: list[Bound], chains: dict[int, tuple[list[Bound], list[Bound]]]
    ) -> list[Bound]:
        """The program's steps in chains, made in the first call of these steps with so many threads."""
        threads = self.threads or 0
        found = chains.get(threads)
        if found is None or found[0] is not program:
            constants = self._start.copy()
            for node in self.graph.inputs[len(self._inputs) :]:
                constants[self._slots[node]] = None
            bounds, times_us = program, self._expected_us(steps)
            if self._first is not None:
                at, first = self._first
                bounds, times_us = [*program[:at], first, *program[at:]], [*times_us[:at], 0.0, *times_us[at:]]
            found = chains[threads] = program, in_chains(bounds, constants, times_us, threads)
        return found[1]

    def _expected_us(self, steps: Sequence[Step]) -> list[float]:
        """The times of steps in µs, by the cost model where none was measured; 0 of steps without a kernel."""
        alone = max(self.target.cores, 1) / max(1, min(self.threads or torch.get_num_threads(), self.target.cores))
        decisions = [step.decision for step in steps]
        unknown = {id(d.problem): d.problem for d in decisions if d is not None and d.time_us is None}
        least = {key: alone * least_us(problem, self.target) for key, problem in unknown.items()}
        return [0.0 if d is None else least[id(d.problem)] if d.time_us is None else d.time_us for d in decisions]

    def _kept_from(self, results: list[Value]) -> list[Value]:
        """The caller's results, once the others have been copied over the state."""
        count = len(self._outputs) - len(self._copied)
        if len(results) == count:
            return results
        # A result or a new value that is what an array held is not to change with it.
        at = {*map(address, self._copied)}
        apart = [r.clone() if isinstance(r, torch.Tensor) and address(r) in at else r for r in results]
        copy_over(self._copied, cast("list[torch.Tensor]", apart[count:]))
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
        read, dropped = self._read(), 0
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
