"""One graph of AOTAutograd as programs for the extents, parameters and caches that its calls have."""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from tilewright.compiler import compile, search_behind
from tilewright.dynamo.options import Options
from tilewright.errors import LOGGER, TilewrightError
from tilewright.frontends.torch.aot import Concrete, Given, read
from tilewright.program import Program
from tilewright.runtime.arrays import address, separate
from tilewright.runtime.executable import Step

OFTEN = 8  # calls after which better kernels are looked for, and each time after as many again
CHANGES = 2  # of a parameter's values, after which kernels read it as it is
BOUND = 4  # caches of other memory that a program is kept bound to
_version = operator.attrgetter("_version")
_pointer = operator.methodcaller("data_ptr")


class Held:
    """A program and what it holds for: the parameters that it may have packed, as they were then.

    Attributes:
        program: what runs, over no caches yet.
        calls: number so far.
    """

    program: Program
    calls: int

    def __init__(self, program: Program, concrete: Concrete, args: Sequence[Any], constants: Sequence[int]) -> None:
        """A program made for `args`, those at `constants` being constants of it; `concrete` says how a call is made."""
        self.program, self.calls, self._concrete = program, 0, concrete
        self._constants = operator.itemgetter(*constants) if len(constants) > 1 else None
        self._places = list(constants)
        self._tensors = [args[p] for p in constants]
        self._versions, self._pointers = [*map(_version, self._tensors)], [*map(_pointer, self._tensors)]
        self._device = torch.device(program.target.device)
        self._elsewhere = {p for p in (*concrete.inputs, *concrete.written) if args[p].device != self._device}
        self._bound: OrderedDict[tuple[int, ...], _Bound] = OrderedDict()

    def stale(self, args: Sequence[Any]) -> Sequence[int] | None:
        """Places of the parameters that were written to since; None: these are others."""
        given = self._constants(args) if self._constants is not None else [args[p] for p in self._places]
        if not all(map(operator.is_, given, self._tensors)):
            return None
        versions, pointers = [*map(_version, given)], [*map(_pointer, given)]
        if versions == self._versions and pointers == self._pointers:
            return ()
        same = zip(self._places, versions, self._versions, pointers, self._pointers, strict=True)
        return [place for place, v, before, p, then in same if v != before or p != then]

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
        found = self._bound.get(key)
        if found is not None and found.made_of is self.program.steps and pointers == found.pointers:
            return found
        program, made_of = self.program.with_state([t.detach() for t in caches]), self.program.steps
        drop = partial(_forget, weakref.ref(self), key)
        lives = [weakref.ref(t, drop) for t in caches]
        found = self._bound[key] = _Bound(program, made_of, pointers, frozenset(map(address, caches)), lives)
        while len(self._bound) > BOUND:
            self._bound.popitem(last=False)
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


def _forget(held: weakref.ref[Held], key: tuple[int, ...], _: object) -> None:
    one = held()
    if one is not None:
        one._bound.pop(key, None)  # pyright: ignore[reportPrivateUsage]


class Compiled:
    """The function of one graph: of a model's forward pass, or of the backward pass that belongs to it.

    Extents that a graph leaves open are known when it is called. A program is made for each that is met again, and found by
    the extents and by the identity of the parameters, which it may have packed. What no program can be made of, torch runs.

    Attributes:
        name: "forward", "backward" or "inference".
        why: the sentence why torch runs the graph; None if programs do.
        number: of the graph, counted through the process.
    """

    name: str
    why: str | None
    number: int

    def __init__(self, module: fx.GraphModule, constant: Collection[int], options: Options, name: str) -> None:
        """A graph whose arguments at `constant` are parameters and buffers."""
        self.name, self.why = name, None
        self._module, self._options = module, options
        holders = [n.meta.get("val") for n in module.graph.nodes if n.op == "placeholder"]
        self._numbers = [i for i, value in enumerate(holders) if not isinstance(value, torch.Tensor)]
        self._open = [i for i, value in enumerate(holders) if _is_open(value)]
        self._constant = set(constant) - {*self._numbers, *self._open}
        self._lock = threading.RLock()
        self._held: OrderedDict[Hashable, list[Held]] = OrderedDict()
        self._met = Counter[Hashable]()
        self._changes = Counter[int]()
        self._dropped = 0
        self.number = next(_numbers)
        _all.add(self)

    def __call__(self, args: list[Any]) -> Sequence[object]:
        """The results of the graph, for its arguments, which are let go of."""
        given = [*args]
        args.clear()
        if self.why is not None:
            return self._by_torch(given)
        key = self._extents(given)
        held = self._found(key, given) or self._make(key, given)
        if held is None:
            return self._by_torch(given)
        held.calls += 1
        if held.calls % OFTEN == 0 and self._options.background and self._options.budget_s > 0:
            search_behind(held.program, self._options.budget_s, cache=self._options.cache)
        return held(given)

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
            return [h.program for several in self._held.values() for h in several]

    def _extents(self, args: Sequence[Any]) -> Hashable:
        numbers = tuple([args[i] for i in self._numbers])
        return numbers, tuple([args[i].shape for i in self._open]) if self._open else ()

    def _found(self, key: Hashable, args: Sequence[Any]) -> Held | None:
        for held in self._held.get(key, ()):
            stale = held.stale(args)
            if stale is None:
                continue
            if not stale:
                return held
            with self._lock:
                self._changes.update(stale)
                self._constant -= {place for place in stale if self._changes[place] >= CHANGES}
                self._held[key] = [h for h in self._held[key] if h is not held]
            return None
        return None

    def _make(self, key: Hashable, args: Sequence[Any]) -> Held | None:
        """A program for these arguments; None while torch is to run them."""
        with self._lock:
            found = self._found(key, args)
            if found is not None:
                return found
            self._met[key] += 1
            early = self._held and key not in self._held and self._met[key] < self._options.met
            if early or self._dropped > 2 * self._options.most:  # or more extents than are kept come and go
                return None
            try:
                held = self._compiled(args)
            except TilewrightError as error:
                self.why = str(error)
                LOGGER.info("torch runs a graph of torch.compile (%s): %s", self.name, error)
                return None
            self._held.setdefault(key, []).append(held)
            self._held.move_to_end(key)
            while sum(map(len, self._held.values())) > self._options.most:
                oldest = next(iter(self._held))
                self._held[oldest] = self._held[oldest][1:]
                self._dropped += 1
                if not self._held[oldest]:
                    del self._held[oldest]
            return held

    def _compiled(self, args: Sequence[Any]) -> Held:
        options, tensors = self._options, [a for a in args if isinstance(a, torch.Tensor)]
        constant = {i for i in self._constant if not args[i].is_inference()}
        graph, concrete = read(self._module, args, constant, self.name)
        device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        now = 0.0 if options.background else options.budget_s
        program = compile(graph, device=device, budget_s=now, cache=options.cache)
        program.own_graphs = options.cuda_graphs
        return Held(program, concrete, args, sorted(constant.difference(concrete.written)))

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
