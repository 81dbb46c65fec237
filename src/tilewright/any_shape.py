"""A program for ranges: read and rewritten once with open extents, and instantiated for the shapes that it is called with.

An instance is the rewritten graph with numbers for extents (`ir/instance.py`), cut into problems, with a kernel for each. It
costs no reading, no rules and no packing of weights: what holds no open extent is the same node in all instances, and a product
packs its weight in one order for all. Kernels are those that were measured for the nearest shape that was, else what the cost
model names first; either passes its check. Where no shape near was measured, a search may go on behind the instance.

The rules decided some things for one example of the extents. Where a shape would have had them decide otherwise, the program is
read and rewritten anew, for it and those like it; that is a *region*.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from tilewright.errors import LOGGER, InputError, TypeMismatchError, UnsupportedError, counted
from tilewright.hardware.target import Target
from tilewright.ir.dims import MOST, Dim, Scope
from tilewright.ir.graph import Graph, Node, label_of
from tilewright.ir.instance import dims_of, instance_of, nodes_at, values_for
from tilewright.ir.pattern import Trace
from tilewright.ir.state import caller_inputs
from tilewright.ir.types import TensorType
from tilewright.program import Program, Report
from tilewright.report.schema import Explain
from tilewright.rules.calibrate import Layer
from tilewright.runtime.background import Chooser
from tilewright.runtime.executable import Decide
from tilewright.runtime.partition import Part, decided, parts_for
from tilewright.schedule.buckets import PackingVariants
from tilewright.schedule.candidate import Candidate, FixedPlan, Ranged, Schedule, discover, kernel_of
from tilewright.schedule.packed import unwritten
from tilewright.schedule.problem import AnyProblem, AttentionProblem, Problem
from tilewright.schedule.search import Decision, search
from tilewright.schedule.tuning_database import TuningDatabase, rebuilt, repeat
from tilewright.threads import limited

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

KEPT = 64  # instances
NEAR = 8.0  # times as much work, or as little, for which what was measured serves
LIKE = 1.5  # times as much work for which what was not measured serves; of less work, NEAR
ANCHORS = (0.5, 0.25, 0.75)  # of the logarithm of each range: the shapes that are measured, as long as there is time
LEAST_PART = 0.2  # of the budget, without which no further one is
PREPARED = (0.4, 0.6, 0.2, 0.3, 0.1)  # likewise: shapes whose kernels are made and checked beforehand, in what time is left
LONG_CHECK_S = 0.01  # after which what it left free goes back to the system
CHECKED = 3  # shapes at which a point is checked that large problems take
LARGE_OPS = 1 << 28  # of a problem, from which it is: a smaller one is checked in milliseconds
MOST_REGIONS = 16
MOST_DECIDED = 4096

Values = tuple[tuple[str, int], ...]
Key = tuple[Node, ...]


@dataclass(frozen=True)
class Reading:
    """A program with open extents, as read and as rewritten.

    Attributes:
        source, graph: before and after the rules.
        trace: what these did.
        layers: what quantising did to each product.
        scope: its dims, and the guards under which it holds.
    """

    source: Graph
    graph: Graph
    trace: Trace
    layers: tuple[Layer, ...]
    scope: Scope


@dataclass
class _Region:
    """A reading, what is the same in all of its instances, and the choices made for some."""

    reading: Reading
    constants: dict[Node, Value] = field(default_factory=dict["Node", "Value"])
    digests: dict[tuple[int, int], bytes | None] = field(default_factory=dict[tuple[int, int], "bytes | None"])
    packings: dict[Key, PackingVariants] = field(default_factory=dict[Key, PackingVariants])
    measured: dict[Key, list[Decision]] = field(default_factory=dict[Key, list[Decision]])
    taken: dict[Key, list[Decision]] = field(default_factory=dict[Key, list[Decision]])
    opened: Mapping[Node, Node] | None = None
    ranged: dict[tuple[AnyProblem, str, Schedule], list[_Ranged]] = field(
        default_factory=dict[tuple[AnyProblem, str, Schedule], "list[_Ranged]"]
    )
    cuts: dict[tuple[int, ...], tuple[Mapping[str, int], list[Part]]] = field(
        default_factory=dict[tuple[int, ...], tuple[Mapping[str, int], list[Part]]]
    )

    def cut(self, made: Graph, became: Mapping[Node, Node], values: Mapping[str, int], target: Target) -> list[Part]:
        """An instance's parts: those of the last one in which the same nodes became one, where its values are near; which
        kernels take a fusion whole is asked of one of them alone."""
        nodes, first = self.reading.graph.nodes(), dict[Node, int]()
        alike = tuple(first.setdefault(became[n], i) for i, n in enumerate(nodes))
        before, parts = self.cuts.get(alike, ({}, []))
        if before and all(max(values[n], v) <= NEAR * max(1, min(values[n], v)) for n, v in before.items()):
            return [_moved(p, became) for p in parts]
        parts = parts_for(made, target)
        came_from = {now: nodes[i] for now, i in first.items()}
        if all(n in came_from for p in parts for n in (*p.nodes, *p.inputs, *p.outputs)):
            self.cuts[alike] = values, [_moved(p, came_from) for p in parts]
        return parts


@dataclass(frozen=True)
class _Shape:
    """Values of the dims, and the nodes with open extents that those of their instance come from."""

    values: Mapping[str, int]
    came_from: Mapping[Node, Node]


@dataclass
class _Ranged:
    """Machine code for a range of extents.

    Attributes:
        scope: its guards say for which.
        kernel: gives the kernel for values of the dims; None if nothing could be written for them.
        checked: the number of shapes at which it was, by which dims were 1 in them.
    """

    scope: Scope
    kernel: Ranged | None
    checked: Counter[frozenset[str]] = field(default_factory=Counter[frozenset[str]])


Read = Callable[[Scope], Reading]
Make = Callable[[Graph, Trace, Sequence[Part], Decide, "dict[Node, Value]"], Program]
Search = Callable[[Graph, Sequence[Part], float, "TuningDatabase | None"], Chooser]


class AnyShape:
    """A program for any shapes within the bounds of its dims: call it as one calls a `Program`.

    The first call with a shape makes an instance: it builds and checks kernels, and no more. The last `KEPT` are kept.

    Attributes:
        target: where it runs.
        compiled: how many times the program was read and rewritten: once, unless a shape made rules decide otherwise.
        made: how many instances were made.
    """

    target: Target
    compiled: int
    made: int

    def __init__(
        self,
        first: Reading,
        read: Read,
        make: Make,
        search_for: Search,
        target: Target,
        *,
        budget_s: float,
        background: bool,
        database: TuningDatabase | None,
        threads: int | None,
    ) -> None:
        """Made by `compile(…, dims=…)`.

        Args:
            first: the program as read first.
            read: the program with the extents of a scope.
            make: an instance: its graph, trace, parts, choice of kernels, and values that are known.
            search_for: the choice of kernels within so many seconds.
            target: where it runs.
            budget_s: seconds for measuring, at one shape.
            background: search on behind instances of shapes near which nothing was measured.
            database: what is known of problems.
            threads: threads for calls on a CPU.
        """
        self.target, self._threads, self._budget_s, self._background = target, threads, budget_s, background
        self._read, self._make, self._search_for, self._database = read, make, search_for, database
        self._regions = [_Region(first)]
        self._kept: OrderedDict[Values, Program] = OrderedDict()
        self._decided: dict[AnyProblem, Decision] = {}
        self._lock = threading.RLock()
        self._inputs = [(label_of(n), n.tensor) for n in caller_inputs(first.source)]
        self.compiled, self.made = 1, 0
        if budget_s > 0 and not background:
            ends = time.monotonic() + budget_s
            for part in ANCHORS:
                left_s = ends - time.monotonic()
                if left_s < LEAST_PART * budget_s:
                    break
                values = first.scope.within(part)
                try:
                    self._measure(values, left_s / (2 if part == ANCHORS[0] else 1))
                except (InputError, UnsupportedError) as error:  # beyond what the model can do, which its dims do not say
                    if all(d.high < MOST for d in self.dims.values()):
                        raise
                    LOGGER.info("not measured at %s: %s", values, error.what)
            for part in PREPARED:
                if time.monotonic() < ends:
                    with contextlib.suppress(InputError, UnsupportedError, TypeMismatchError):
                        self.at(**first.scope.within(part))
            _return_memory()

    def __repr__(self) -> str:
        """One line: the dims, where, and how many instances there are."""
        ranges = ", ".join(f"{d.name} {d.low}..{d.high}" for d in self.dims.values())
        return f"<tilewright program for {ranges} on {self.target.device}: {counted(len(self._kept), 'shape')} kept>"

    @property
    def dims(self) -> dict[str, Dim]:
        """The dims, by name."""
        return dict(self._regions[0].reading.scope.dims)

    @property
    def input_types(self) -> dict[str, TensorType]:
        """The inputs by name, in call order; extents may be open."""
        return dict(self._inputs)

    @property
    def source(self) -> Graph:
        """The graph as read, with open extents."""
        return self._regions[0].reading.source

    @property
    def graph(self) -> Graph:
        """The graph as rewritten, with open extents."""
        return self._regions[0].reading.graph

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The products of a float model as quantising left them."""
        return self._regions[0].reading.layers

    @property
    def guards(self) -> list[str]:
        """The assumptions of the rules, for each region: shapes for which they do not hold are compiled anew."""
        return [r.reading.scope.words for r in self._regions]

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run it on arrays; their shapes say what the dims are.

        Raises:
            InputError: an input is missing, unknown, or of a type or a shape that the program does not take.
        """
        return self.at(**self.values_of(args, kwargs))(*args, **kwargs)

    def values_of(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, int]:
        """The values of the dims for arrays as they are given to a call.

        Raises:
            InputError: an array is missing, or of a shape that the program does not take.
        """
        given = dict(zip((name for name, _ in self._inputs), args, strict=False)) | dict(kwargs)
        shapes = {name: tuple(cast("Sequence[int]", getattr(a, "shape", ()))) for name, a in given.items()}
        return values_for(self.source, shapes)

    def at(self, **values: int) -> Program:
        """The instance for values of the dims, by name.

        Raises:
            InputError: a value is missing, or outside its bounds.
        """
        for name, dim in self.dims.items():
            if name not in values:
                raise InputError(f"no value for dim {name!r}", where=self.source.name, hint=f"one of {dim}")
            if values[name] not in dim:
                raise InputError(f"{name} = {values[name]} is outside {dim}", where=self.source.name)
        key = tuple(sorted(values.items()))
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._kept[key] = self._instance(values, self._choice)
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(key)
        return found

    def measured(self, within_s: float, **values: int) -> Program:
        """The instance for values of the dims, by name, which is measured for so many seconds if there was none yet.

        Raises:
            InputError: a value is missing, or outside its bounds (`at`).
        """
        if within_s > 0 and all(name in values and values[name] in dim for name, dim in self.dims.items()):
            self._measure(values, within_s)
        return self.at(**values)

    def explain(self, **values: int) -> Report[Explain]:
        """Account for every product of one instance, that of the middle of all ranges where no values are given."""
        return self.at(**(values or self._regions[0].reading.scope.within(ANCHORS[0]))).explain()

    def save(self, path: Path | str) -> None:
        """Refuse: a file holds the program for one shape.

        Raises:
            UnsupportedError: always.
        """
        values = ", ".join(f"{name}={value}" for name, value in self._regions[0].reading.scope.within(ANCHORS[0]).items())
        what = "a program with open extents is not saved: a file holds one for one shape"
        raise UnsupportedError(what, where=str(path), hint=f"program.at({values}).save(path), or other values")

    def _measure(self, values: Mapping[str, int], within_s: float) -> None:
        """Choose kernels for one shape by measuring, as for a program of it alone, but for the order of packed weights."""

        def choice(region: _Region, graph: Graph, parts: Sequence[Part], keys: Mapping[Part, Key], _shape: _Shape) -> Decide:
            of_problem = _keys_of(keys)
            decide = self._search_for(graph, parts, within_s, self._held(region, of_problem))

            def chosen(problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
                decision = self._decided[problem] = decide(problem, weights)
                for key in of_problem.get(problem, ()):
                    region.measured.setdefault(key, []).append(decision)
                return decision

            return chosen

        key = tuple(sorted(values.items()))
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self._instance(values, choice)

    def _held(self, region: _Region, of_problem: Mapping[AnyProblem, Sequence[Key]]) -> TuningDatabase | None:
        """The tuning database, held to the order in which each product's weight is packed."""
        if self._database is None:
            return None
        packings = {p: region.packings[k] for p, keys in of_problem.items() for k in keys if k in region.packings}
        return OnePacking(self._database, packings)

    def _searched_on(self, program: Program, region: _Region, parts: Sequence[Part], keys: Mapping[Part, Key]) -> None:
        """Search behind an instance near which nothing was measured; what is chosen serves further ones."""
        of_problem = _keys_of(keys)
        if all(self._near(region.measured, key, p, NEAR) is not None for p, some in of_problem.items() for key in some):
            return

        def chooser() -> Chooser:
            decide = self._search_for(program.graph, parts, self._budget_s, self._held(region, of_problem))
            return _Noting(decide, lambda p, d: [region.measured.setdefault(k, []).append(d) for k in of_problem.get(p, ())])

        program.search_on(chooser)

    def _instance(
        self,
        values: Mapping[str, int],
        choice: Callable[[_Region, Graph, Sequence[Part], Mapping[Part, Key], _Shape], Decide],
    ) -> Program:
        for region in self._regions:
            if not region.reading.scope.failing(values):
                try:
                    made, became = instance_of(region.reading.graph, values)
                except TypeMismatchError:  # something was taken to differ that does not here
                    continue
                break
        else:
            region = self._new_region(values)
            made, became = instance_of(region.reading.graph, values)
        parts = region.cut(made, became, values, self.target)
        came_from: dict[Node, Node] = {}
        for node, now in became.items():
            came_from.setdefault(now, node)
        keys = {p: tuple(came_from.get(n, n) for n in p.outputs) for p in parts if not p.once and decided(p)}
        decide = choice(region, made, parts, keys, _Shape(values, came_from))
        reading = region.reading
        held = [v for v in region.constants.values() if isinstance(v, torch.Tensor)]
        with unwritten(held, region.digests), limited(self._threads):
            program = self._make(made, reading.trace, parts, decide, region.constants)
        lasting = {n for n, now in became.items() if n is now}
        for node in [n for n in region.constants if n not in lasting]:
            del region.constants[node]
        shown = ", ".join(f"{name} = {value}" for name, value in values.items())
        note = f"an instance for {shown} of a program with open extents, {reading.scope.words}"
        program.read_source(lambda: _noted(instance_of(reading.source, values)[0], note))
        program.layers, program.threads = reading.layers, self._threads
        for step in program.steps:
            key = keys.get(step.part)
            if key is not None and step.decision is not None:
                region.taken.setdefault(key, []).append(step.decision)
                family = _packing(step.decision)
                if family is not None:
                    region.packings.setdefault(key, family)
        if self._background and self._budget_s > 0:
            self._searched_on(program, region, parts, keys)
        self.made += 1
        if any(step.decision is not None and step.decision.checked_s > LONG_CHECK_S for step in program.steps):
            _return_memory()
        return program

    def _new_region(self, values: Mapping[str, int]) -> _Region:
        if len(self._regions) >= MOST_REGIONS:
            self._regions.pop(1)
        shown = ", ".join(f"{name} = {value}" for name, value in values.items())
        few = [name for name, value in values.items() if value <= 1]  # which are not like others
        for hints, fixed in ((_like(values, self._regions[0].reading.scope), few), (values, few), (values, [*values])):
            try:
                reading = self._read(Scope().expect(hints, fixed))
            except TypeMismatchError:
                if len(fixed) == len(values):
                    raise
                continue
            except InputError as error:
                raise InputError(error.what, where=f"{self.source.name} for {shown}", hint=error.hint) from error
            self.compiled += 1
            if not reading.scope.failing(values):
                self._regions.append(_Region(reading))
                return self._regions[-1]
        raise UnsupportedError(f"rules do not settle for {shown}", where=self.source.name, hint="compile for that shape alone")

    def _choice(self, region: _Region, graph: Graph, parts: Sequence[Part], keys: Mapping[Part, Key], shape: _Shape) -> Decide:
        """The choice of kernels without measuring: by the nearest shape that was measured, else by the cost model."""
        of_problem, part_of = _keys_of(keys), {key: part for part, key in keys.items()}

        def chosen(problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
            if problem not in self._decided:
                if len(self._decided) >= MOST_DECIDED:
                    self._decided.pop(next(iter(self._decided)))
                key = next(iter(of_problem.get(problem, ())), ())
                self._decided[problem] = self._unmeasured(problem, weights, region, key, part_of.get(key), shape)
            return self._decided[problem]

        return chosen

    def _near(self, among: Mapping[Key, Sequence[Decision]], key: Key, problem: AnyProblem, less: float) -> Decision | None:
        """The decision for the nearest problem: of `NEAR` times the work at most, or so many times less. Blocks that were
        chosen for few rows make many read a weight again and again; those for many do for few."""
        size = sum(t.elements for t in problem.outputs)
        near = [
            (times, d)
            for d in among.get(key, ())
            if (times := apart(d.problem, problem)) <= (NEAR if sum(t.elements for t in d.problem.outputs) >= size else less)
        ]
        return min(near, key=lambda pair: pair[0], default=(0.0, None))[1]

    def _unmeasured(
        self,
        problem: AnyProblem,
        weights: Mapping[int, torch.Tensor],
        region: _Region,
        key: Key,
        part: Part | None,
        shape: _Shape,
    ) -> Decision:
        known, packing = self._database, region.packings.get(key)
        near = self._near(region.measured, key, problem, NEAR) or self._near(region.taken, key, problem, LIKE)
        if near is not None:
            same = None if part is None else self._of_range(problem, weights, near, region, part, shape)
            same = same or self._built_like(problem, weights, near, region.taken.get(key, ()))
            if same is not None:
                return same
        if packing is not None:
            try:
                return search(problem, self.target, budget_s=0, candidates=[packing], weights=weights)
            except UnsupportedError:  # it has no such point for just these extents
                pass
        if known is None:
            return search(problem, self.target, budget_s=0, weights=weights)
        others = known.candidates(problem)
        how = partial(search, problem, self.target, budget_s=0, candidates=others, weights=weights)
        return known.settle(problem, weights, how)

    def _of_range(
        self,
        problem: AnyProblem,
        weights: Mapping[int, torch.Tensor],
        near: Decision,
        region: _Region,
        part: Part,
        shape: _Shape,
    ) -> Decision | None:
        """A kernel of another shape's candidate and schedule whose machine code leaves extents open; None if there is none. It
        is checked at the first few shapes of those in which the same dims are 1."""
        name, schedule, values = near.kernel.candidate, near.kernel.schedule, shape.values
        candidate = next((c for c in discover() if c.name == name), None)
        if candidate is None or candidate.ranged is None:
            return None
        posed = self._opened(region, part, shape)
        if posed is None or problem_at(posed, values) != problem:
            return None
        point = schedule if candidate.packing_knobs is not None else Schedule()  # the others have one for all extents
        several = region.ranged.setdefault((posed, name, point), [])
        one = next((r for r in several if not r.scope.failing(values)), None)
        if one is None:
            scope = Scope(strict=True).expect(values)
            extents = {n: scope.extent(dim) for n, dim in region.reading.scope.dims.items()}
            one = _Ranged(scope, None)
            with contextlib.suppress(Exception):  # a candidate may raise anything, as in a search
                one.kernel = candidate.ranged(problem_at(posed, extents), self.target, schedule)
            several.append(one)
        kernel, ones = one.kernel, frozenset(name for name, value in values.items() if value <= 1)
        if kernel is None:
            return None
        plan = FixedPlan((schedule,), lambda _: kernel(problem, values))
        try:
            if one.checked[ones] >= CHECKED:
                return Decision(problem, kernel_of(plan, schedule), None, (), False, True)
            alone = replace(candidate, plan=lambda *_: plan, ranged=None)
            found = search(problem, self.target, budget_s=0, candidates=[alone], weights=weights)
        except Exception:  # for these extents there is none, or it is wrong
            one.kernel = None
            return None
        one.checked[ones] += 1
        return found

    def _opened(self, region: _Region, part: Part, shape: _Shape) -> AnyProblem | None:
        """The problem that a part of an instance poses with extents open; None where it has none."""
        if region.opened is None:
            scope = Scope()  # guards that are left in it are not looked at: who uses the problem compares it
            extents = {name: scope.extent(dim) for name, dim in region.reading.scope.dims.items()}
            region.opened = instance_of(region.reading.graph, extents)[1]
        opened = {now: region.opened.get(node, node) for now, node in shape.came_from.items()}
        nodes, inputs, outputs = (tuple(opened.get(n, n) for n in some) for some in (part.nodes, part.inputs, part.outputs))
        try:
            return Part(part.kind, nodes, inputs, outputs).posed[0]
        except (TypeMismatchError, AssertionError):
            return None

    def _built_like(
        self, problem: AnyProblem, weights: Mapping[int, torch.Tensor], near: Decision, before: Sequence[Decision]
    ) -> Decision | None:
        """The kernel of another shape's candidate and schedule; None if it does not do here. Small problems are checked. Of the
        large, which have the same code for edges and more of what lies between, the first few."""
        point = near.kernel.candidate, near.kernel.schedule
        if getattr(problem, "ops", problem.bytes) > LARGE_OPS:
            sizes = {d.problem for d in before if (d.kernel.candidate, d.kernel.schedule) == point and d.verified}
            if len(sizes) >= CHECKED:
                return rebuilt(problem, self.target, *point)
        if self._database is None:
            return repeat(problem, self.target, *point, weights)
        return self._database.again(problem, *point, weights)


def _moved(part: Part, to: Mapping[Node, Node]) -> Part:
    """The part of other nodes that one is of these."""
    nodes, inputs, outputs = (tuple(to[n] for n in some) for some in (part.nodes, part.inputs, part.outputs))
    return replace(part, nodes=nodes, inputs=inputs, outputs=outputs)


def _noted(graph: Graph, note: str) -> Graph:
    return replace(graph, notes=(*graph.notes, note))


class OnePacking(TuningDatabase):
    """A tuning database in which products keep to the order in which their weights are packed already."""

    def __init__(self, known: TuningDatabase, packings: Mapping[AnyProblem, PackingVariants]) -> None:
        self.__dict__.update(known.__dict__)
        self._packings = packings

    def find(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor], budget_s: float) -> Decision | None:
        found, packing = super().find(problem, weights, budget_s), self._packings.get(problem)
        return None if found is None or (packing is not None and _packing(found) != packing) else found

    def candidates(self, problem: AnyProblem) -> Sequence[Candidate] | None:
        packing = self._packings.get(problem)
        return super().candidates(problem) if packing is None else [packing]

    def keep(self, decision: Decision, budget_s: float) -> None:
        if decision.problem not in self._packings:  # a choice among few would be taken for one among all
            super().keep(decision, budget_s)


@dataclass(frozen=True)
class _Noting:
    """A choice of kernels that tells what it came to."""

    choice: Chooser
    note: Callable[[AnyProblem, Decision], object]

    def __call__(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
        decision = self.choice(problem, weights)
        self.note(problem, decision)
        return decision

    def weight(self, problem: AnyProblem) -> float:
        return self.choice.weight(problem)


def problem_at(problem: AnyProblem, values: Mapping[str, int]) -> AnyProblem:
    """A problem with open extents for values of the dims by name, which may be extents of another scope."""
    at = nodes_at((), values).at
    changed = {name: at(getattr(problem, name)) for name in ("op", "roots", "types") if hasattr(problem, name)}
    return replace(problem, **cast("Any", changed))


def _keys_of(keys: Mapping[Part, Key]) -> dict[AnyProblem, list[Key]]:
    found: dict[AnyProblem, list[Key]] = {}
    for part, key in keys.items():
        found.setdefault(part.posed[0], []).append(key)
    return found


def apart(a: AnyProblem, b: AnyProblem) -> float:
    """The ratio of work between two problems that differ in extents alone, by the elements of their results; of
    attentions, which work for each pair of a query and a key, the larger ratio of these."""
    sizes = [[t.elements for t in x.outputs] for x in (a, b)]
    if isinstance(a, AttentionProblem) and isinstance(b, AttentionProblem):
        sizes = [[*s, x.operands[0].shape[2], x.operands[1].shape[2]] for s, x in zip(sizes, (a, b), strict=True)]
    ratios = [max(x, 1) / max(y, 1) for x, y in zip(*sizes, strict=True)]
    return max((max(r, 1 / r) for r in ratios), default=1.0)


def _packing(decision: Decision) -> PackingVariants | None:
    """The candidate of a decision held to the order in which it packs weights; None where it packs none in an order."""
    kernel = decision.kernel
    found = next((c for c in discover() if c.name == kernel.candidate), None)
    if found is None or found.packing_knobs is None or not isinstance(decision.problem, Problem):
        return None
    return PackingVariants.of(found, tuple((k, v) for k, v in kernel.schedule.knobs if k in found.packing_knobs))


def _like(values: Mapping[str, int], scope: Scope) -> dict[str, int]:
    """An example of each dim for which all guards are answered as for these values, and that is unlike constants of programs,
    where there is one near."""
    guards, wanted = list(scope.guards), {g: g.holds(values) for g in scope.guards}
    found = dict(values)
    for name, dim in scope.dims.items():
        for k in range(1, 200):
            value = values[name] + k * dim.multiple_of * (1 if values[name] + k * dim.multiple_of <= dim.high else -1)
            if value in dim and value > 1 and all(value % p for p in (2, 3, 5, 7) if dim.multiple_of == 1 and value > p):
                tried = {**found, name: value}
                if all(g.holds(tried) is wanted[g] for g in guards):
                    found = tried
                    break
    return found


def _return_memory() -> None:
    """Give back to the system what checks and measurements left free in the C library's heap, where it can."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def open_dims(graph: Graph) -> bool:
    """Tell whether an input of a graph has an open extent."""
    return dims_of(graph) is not None
