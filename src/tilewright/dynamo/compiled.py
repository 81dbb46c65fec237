"""One graph of AOTAutograd as programs for the extents, parameters and caches that its calls have."""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from tilewright.any_shape import AnyShape
from tilewright.compiler import compile
from tilewright.dynamo.options import Options
from tilewright.errors import LOGGER, TilewrightError
from tilewright.frontends import GRAPH_BREAK
from tilewright.frontends.torch.aot import Concrete, Given, Open, read, written
from tilewright.program import Program, search_behind
from tilewright.recent import Recent
from tilewright.runtime.arrays import address, separate
from tilewright.runtime.steps import Step
from tilewright.tracing import transformed

OFTEN = 8  # calls after which better kernels are looked for, and each time after as many again
CHANGES = 2  # of a parameter's values, after which kernels read it as it is
BOUND = 4  # caches of other memory that a program is kept bound to
_version = operator.attrgetter("_version")
_pointer = operator.methodcaller("data_ptr")


class Instance:
    """A program for the extents of a call, and how a call of it is made.

    Attributes:
        program: what runs, over no caches yet.
        calls: number so far.
    """

    program: Program
    calls: int

    def __init__(self, program: Program, concrete: Concrete, args: Sequence[Any]) -> None:
        """A program made for arguments as `args`; `concrete` says how a call is made."""
        self.program, self.calls, self._concrete = program, 0, concrete
        self._device = torch.device(program.target.device)
        self._elsewhere = {p for p in (*concrete.inputs, *concrete.written) if args[p].device != self._device}
        self._bound: Recent[tuple[int, ...], _Bound] = Recent(BOUND)

    def __call__(self, args: Sequence[Any]) -> list[object]:
        """The results of the graph; arguments that it writes to are written."""
        concrete, moved = self._concrete, list[torch.Tensor]()
        inputs, program, borrowed = [args[p] for p in concrete.inputs], self.program, frozenset[int]()
        if self._elsewhere:
            inputs = [t.to(self._device) for t in inputs]
            moved = [args[p].to(self._device) for p in concrete.written]
            program = program.with_state(moved) if moved else program
        elif concrete.written:
            bound = self._over([args[p] for p in concrete.written])
            program, borrowed = bound.program, bound.memory
        made = program.run(inputs)
        for place, new in zip(concrete.written, moved, strict=False):
            if place in self._elsewhere:
                args[place].copy_(new)
        made = separate(made, (*map(address, inputs), *map(address, moved)), borrowed | program.constant_memory)
        return [r.of(args) if isinstance(r, Given) else r.of(made) for r in concrete.results]

    def _over(self, caches: Sequence[torch.Tensor]) -> _Bound:
        """The program over these caches, which are not kept alive by it."""
        key, pointers = tuple(map(id, caches)), [*map(_pointer, caches)]
        found = self._bound.find(key)
        if found is not None and found.made_of is self.program.steps and pointers == found.pointers:
            return found
        program, made_of = self.program.with_state([t.detach() for t in caches]), self.program.steps
        drop = partial(_forget, weakref.ref(self), key)
        lives = [weakref.ref(t, drop) for t in caches]
        found = self._bound[key] = _Bound(program, made_of, pointers, frozenset(map(address, caches)), lives)
        return found


@dataclass(frozen=True)
class _Bound:
    """A program over caches.

    Attributes:
        program: what runs.
        made_of: steps that it was made of, which a search may have replaced since.
        pointers, memory: addresses of the caches' first elements, and of their storages.
        lives: ends the binding with the first of them.
    """

    program: Program
    made_of: tuple[Step, ...]
    pointers: list[int]
    memory: frozenset[int]
    lives: list[weakref.ref[torch.Tensor]]


def _forget(instance: weakref.ref[Instance], key: tuple[int, ...], _: object) -> None:
    one = instance()
    if one is not None:
        one._bound.pop(key, None)  # pyright: ignore[reportPrivateUsage]


class Held:
    """Programs of a graph for any extents, and what they hold for: the parameters that they may have packed, as they were then.

    Attributes:
        instances: by the extents of calls, those that were made last at the end.
        ranges: what instances are made of; None where the graph is read for the extents of each.
        constants: places of the parameters among the arguments.
    """

    instances: OrderedDict[Hashable, Instance]
    ranges: tuple[Open, AnyShape] | None
    constants: list[int]

    def __init__(self, args: Sequence[Any], constants: Sequence[int], ranges: tuple[Open, AnyShape] | None) -> None:
        """Programs in which the arguments at `constants` are constants."""
        self.instances, self.ranges = OrderedDict(), ranges
        self.constants = list(constants)
        self._get = operator.itemgetter(*constants) if len(constants) > 1 else None
        self._tensors = [args[p] for p in constants]
        self._versions, self._pointers = [*map(_version, self._tensors)], [*map(_pointer, self._tensors)]

    def stale(self, args: Sequence[Any]) -> Sequence[int] | None:
        """Places of the parameters that were written to since; None: these are others."""
        given = self._get(args) if self._get is not None else [args[p] for p in self.constants]
        if not all(map(operator.is_, given, self._tensors)):
            return None
        versions, pointers = [*map(_version, given)], [*map(_pointer, given)]
        if versions == self._versions and pointers == self._pointers:
            return ()
        same = zip(self.constants, versions, self._versions, pointers, self._pointers, strict=True)
        return [place for place, v, before, p, then in same if v != before or p != then]


class Compiled:
    """The function of one graph: of a model's forward pass, or of the backward pass that belongs to it.

    A graph with open extents is read once, as a program for ranges, and instantiated for extents that are met again; what
    cannot be left open is read for the extents of each call. Programs are found by the extents and by the identity of the
    parameters, which they may have packed. What no program can be made of, torch runs.

    Attributes:
        name: "forward", "backward" or "inference".
        why: the sentence why torch runs the graph; None if programs do.
        concrete: the sentence why its extents are not left open; None if they are, or if it has none.
        broken: where torch.compile breaks the model's graph off behind this one, and why; "" where it does not.
        number: of the graph, counted through the process.
    """

    name: str
    why: str | None
    concrete: str | None
    broken: str
    number: int

    def __init__(
        self, module: fx.GraphModule, constant: Collection[int], options: Options, name: str, broken: str = ""
    ) -> None:
        """A graph whose arguments at `constant` are parameters and buffers."""
        self.name, self.why, self.concrete, self.broken = name, None, None, broken
        self._module, self._options = module, options
        holders = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
        self._numbers = [i for i, value in enumerate(holders) if not isinstance(value, torch.Tensor)]
        self._open = [i for i, value in enumerate(holders) if _is_open(value)]
        self._constant = set(constant) - {*self._numbers, *self._open, *written(module)}
        self._lock = threading.RLock()
        self._held: list[Held] = []
        self._met = Counter[Hashable]()
        self._changes = Counter[int]()
        self._dropped = self._read = 0
        self.number = next(_numbers)
        _all.add(self)

    def __call__(self, args: list[Any]) -> Sequence[object]:
        """The results of the graph, for its arguments, which are let go of."""
        given = [*args]
        args.clear()
        if self.why is not None or transformed():  # torch's own operations know derivatives forward
            return self._by_torch(given)
        key = self._extents(given)
        found = self._find(key, given) or self._make(key, given)
        if found is None:
            return self._by_torch(given)
        found.calls += 1
        if found.calls % OFTEN == 0 and self._options.background and self._options.budget_s > 0:
            search_behind(found.program, self._options.budget_s, cache=self._options.cache)
        return found(given)

    def boxed(self) -> Callable[[list[Any]], Sequence[object]]:
        """The function as AOTAutograd takes it: of a list of arguments, which it empties."""

        def run(args: list[Any]) -> Sequence[object]:
            return self(args)

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run

    @property
    def programs(self) -> list[Program]:
        """The programs that there are now."""
        with self._lock:
            return [i.program for held in self._held for i in held.instances.values()]

    @property
    def compiled(self) -> int:
        """The number of times that the graph was read and rewritten."""
        with self._lock:
            return self._read + sum(h.ranges[1].compiled for h in self._held if h.ranges is not None)

    def _extents(self, args: Sequence[Any]) -> Hashable:
        numbers = tuple([args[i] for i in self._numbers])
        return numbers, tuple([(args[i].shape, args[i].stride()) for i in self._open]) if self._open else ()

    def _find(self, key: Hashable, args: Sequence[Any]) -> Instance | None:
        held = self._current(args)
        return None if held is None else held.instances.get(key)

    def _current(self, args: Sequence[Any]) -> Held | None:
        """Find the programs that hold for these parameters as they are; those for a parameter's former value are dropped."""
        for held in self._held:
            stale = held.stale(args)
            if stale is None:
                continue
            if not stale:
                return held
            with self._lock:
                self._changes.update(stale)
                self._constant -= {place for place in stale if self._changes[place] >= CHANGES}
                self._forget(held)
            return None
        return None

    def _forget(self, held: Held) -> None:
        if held in self._held:
            self._read += 0 if held.ranges is None else held.ranges[1].compiled
            self._held = [h for h in self._held if h is not held]

    def _make(self, key: Hashable, args: Sequence[Any]) -> Instance | None:
        """A program for these arguments; None while torch is to run them."""
        with self._lock:
            held = self._current(args)
            found = None if held is None else held.instances.get(key)
            if found is not None:
                return found
            self._met[key] += 1
            early = self._held and not any(key in h.instances for h in self._held) and self._met[key] < self._options.met
            if early or self._dropped > 2 * self._options.most:  # or more extents than are kept come and go
                return None
            try:
                held = held or self._holding(args)
                made = held.instances[key] = self._instance(held, args)
            except TilewrightError as error:
                self.why = str(error)
                LOGGER.info("torch runs a graph of torch.compile (%s): %s", self.name, error)
                return None
            self._held = [*(h for h in self._held if h is not held), held]
            while sum(len(h.instances) for h in self._held) > self._options.most:
                self._held[0].instances.popitem(last=False)
                self._dropped += 1
                if not self._held[0].instances:
                    self._forget(self._held[0])
            return made

    def _holding(self, args: Sequence[Any]) -> Held:
        """Begin with these parameters: read the graph with its extents left open, where it can be; no program is made yet."""
        constant = {i for i in self._constant if not args[i].is_inference()}
        ranges = None
        if self._open and self.concrete is None:
            try:
                ranges = self._opened(Open(self._module, args, constant, self.name), args)
            except TilewrightError as error:
                self.concrete = str(error)
                LOGGER.info("a graph of torch.compile (%s) is compiled for each shape: %s", self.name, error)
        return Held(args, sorted(constant), ranges)

    def _opened(self, opened: Open, args: Sequence[Any]) -> tuple[Open, AnyShape]:
        """The graph read with its extents left open, in the first of three ways that it can be read in."""
        alike = opened.alike(args)  # lengths of keys and of values, which torch gives symbols of their own
        for one in (opened, alike) if alike.united else (opened,):
            with contextlib.suppress(TilewrightError):
                return self._ranged(one, args)
        return self._ranged(opened.expecting(args), args)

    def _ranged(self, opened: Open, args: Sequence[Any]) -> tuple[Open, AnyShape]:
        return opened, compile(opened, dims=True, device=_device(args), budget_s=0, cache=self._options.cache)

    def _instance(self, held: Held, args: Sequence[Any]) -> Instance:
        options = self._options
        now = 0.0 if options.background else options.budget_s
        if held.ranges is not None:
            try:
                if not held.ranges[0].holds(args):
                    self._read += held.ranges[1].compiled
                    held.ranges = self._ranged(held.ranges[0].alike(args), args)
                opened, ranges = held.ranges
                values = opened.values(args)
                program = ranges.measured(0.0 if held.instances else now, **{n: values[n] for n in ranges.dims})
                return self._with_options(Instance(program, opened.at(args), args))
            except TilewrightError as error:
                LOGGER.info("a graph of torch.compile (%s) is compiled for a shape by itself: %s", self.name, error)
        graph, concrete = read(self._module, args, held.constants, self.name)
        self._read += 1
        program = compile(graph, device=_device(args), budget_s=now, cache=options.cache)
        return self._with_options(Instance(program, concrete, args))

    def _with_options(self, made: Instance) -> Instance:
        if self.broken:
            source = made.program.source
            made.program.source = replace(source, notes=(*source.notes, GRAPH_BREAK + self.broken))
        if made.program.own_graphs != self._options.cuda_graphs:
            made.program.own_graphs = self._options.cuda_graphs
            made.program.swap(made.program.steps)
        return made

    def _by_torch(self, args: list[Any]) -> Sequence[object]:
        with torch.no_grad():
            return cast("Callable[..., Sequence[object]]", self._module)(*args)


def graphs() -> list[Compiled]:
    """The graphs that this process has compiled and that are alive, the latest last."""
    return sorted(_all, key=lambda g: g.number)


_all = weakref.WeakSet[Compiled]()
_numbers = itertools.count()


def _is_open(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not all(type(d) is int for d in value.shape)


def _device(args: Sequence[Any]) -> torch.device:
    """The device that a graph with these arguments runs on: the accelerator where one of them lies, else the CPU."""
    devices = (t.device for t in args if isinstance(t, torch.Tensor) and t.device.type != "cpu")
    return next(devices, torch.device("cpu"))
