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
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

import torch

from tilewright.deadline import Budget
from tilewright.errors import LOGGER, InputError, TypeMismatchError, UnsupportedError, counted, say
from tilewright.hardware.target import Target
from tilewright.ir.dims import MOST, Dim, Scope, named
from tilewright.ir.graph import Graph, Node, label_of
from tilewright.ir.instance import instance_of, values_for
from tilewright.ir.pattern import Trace
from tilewright.ir.state import caller_inputs
from tilewright.ir.types import TensorType
from tilewright.program import Program, Report
from tilewright.ranged import CHECKED, FAR, RangedCode, RangedCodes, Shape, larger, watch
from tilewright.recent import Recent
from tilewright.report.schema import Explain, Perf
from tilewright.rules.calibrate import Layer
from tilewright.runtime.partition import Part, decided, parts_for
from tilewright.runtime.prepare import chooser, prepare
from tilewright.runtime.steps import Decide, Inner, Step
from tilewright.schedule.buckets import PackingVariants, untimed
from tilewright.schedule.candidate import Candidate, Kernel, Schedule, discover
from tilewright.schedule.chooser import Chooser, Noting, OnePacking, Raced, packing_of
from tilewright.schedule.cost import predict
from tilewright.schedule.packed import Place, return_memory, unwritten
from tilewright.schedule.problem import AnyProblem, AttentionProblem
from tilewright.schedule.search import Checked, Decision
from tilewright.schedule.space import foremost
from tilewright.schedule.tuning_database import TuningDatabase, rebuilt, repeat
from tilewright.threads import limited

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

KEPT = 64  # instances
NEAR = 8.0  # times as much work, or as little, for which what was measured serves
WORSE = 1.25  # times the best point's time, for which the point of a kernel that is built is taken in its place on a GPU
LIKE = 1.5  # times as much work for which what was not measured serves; of less work, NEAR
ANCHORS = (0.5, 0.25, 0.75)  # of the logarithm of each range: the shapes that are measured, as long as there is time
LEAST_PART = 0.2  # of the budget, without which no further one is
PREPARED = (0.4, 0.6, 0.2, 0.3, 0.1)  # likewise: the shapes whose kernels are made beforehand, in what time is left
LARGE_OPS = 1 << 28  # of a problem: one that has fewer is checked in milliseconds
MET = 32  # calls of a shape after which kernels are looked for that are made for it alone, behind the calls
SPECIAL_S = 5.0  # of the budget, at most, for one of these
SPECIAL = 16  # shapes that have such kernels at a time: those that were called last
MOST_REGIONS = 16
OFTEN = 6  # readings of one program, of which a sentence says why
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
class Region:
    """A reading, what is the same in all of its instances, and the choices made for some."""

    reading: Reading
    ranged: RangedCodes
    constants: dict[Node, Value] = field(default_factory=dict["Node", "Value"])
    digests: dict[Place, bytes | None] = field(default_factory=dict[Place, "bytes | None"])
    packings: dict[Key, PackingVariants] = field(default_factory=dict[Key, PackingVariants])
    measured: dict[Key, list[Decision]] = field(default_factory=dict[Key, list[Decision]])
    taken: dict[Key, list[Decision]] = field(default_factory=dict[Key, list[Decision]])
    cuts: dict[tuple[int, ...], tuple[Mapping[str, int], list[Part]]] = field(
        default_factory=dict[tuple[int, ...], tuple[Mapping[str, int], list[Part]]]
    )

    def parts(self, made: Graph, became: Mapping[Node, Node], values: Mapping[str, int], target: Target) -> list[Part]:
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
class Cut:
    """An instance before kernels are chosen.

    Attributes:
        region: the reading that it is one of.
        graph: that reading's, with numbers for extents.
        parts: what it is cut into.
        shape: what it is for.
        keys: of the parts for which kernels compete, the nodes that are the same in all instances.
    """

    region: Region
    graph: Graph
    parts: Sequence[Part]
    shape: Shape
    keys: Mapping[Part, Key]

    @cached_property
    def of_problem(self) -> dict[AnyProblem, list[Key]]:
        """The keys of the parts that pose each problem."""
        found: dict[AnyProblem, list[Key]] = {}
        for part, key in self.keys.items():
            found.setdefault(part.posed[0], []).append(key)
        return found

    @cached_property
    def source(self) -> Graph:
        """The graph as read, with numbers for extents, and a note that says so."""
        reading, values = self.region.reading, self.shape.values
        shown = ", ".join(f"{name} = {value}" for name, value in values.items())
        note = f"an instance for {shown} of a program with open extents, {reading.scope.words}"
        made = instance_of(reading.source, values)[0]
        return replace(made, notes=(*made.notes, note))


Read = Callable[[Scope], Reading]


class AnyShape:
    """A program for any shapes within the bounds of its dims: call it as one calls a `Program`.

    The first call with a shape makes an instance: it builds and checks kernels, and no more. The last `KEPT` are kept.

    Attributes:
        target: where it runs.
        compiled: how many times the program was read and rewritten: once, unless a shape made rules decide otherwise.
        made: how many instances were made.
        background: a search goes on behind instances, also for kernels of those shapes alone that are called often.
        threads: threads for calls on a CPU; None is torch's number, but no more than the machine has for this process.
    """

    target: Target
    compiled: int
    made: int
    background: bool
    threads: int | None

    def __init__(
        self,
        first: Reading,
        read: Read,
        target: Target,
        *,
        inner: Inner | None = None,
        budget: Budget | None = None,
        background: bool = False,
        database: TuningDatabase | None = None,
        kept: int = KEPT,
        threads: int | None = None,
    ) -> None:
        """Made by `compile(…, dims=…)`.

        Args:
            first: the program as read first.
            read: the program with the extents of a scope.
            target: where it runs.
            inner: compiles the regions of loops and branches.
            budget: the time for all of it, and as many seconds for a search behind an instance.
            background: search on behind instances of shapes near which nothing was measured.
            database: what is known of problems.
            kept: instances that are kept.
            threads: threads for calls on a CPU.
        """
        self.target, self.threads, self._budget = target, threads, budget or Budget(0.0)
        self.background = background and self._budget.seconds > 0
        self._read, self._inner, self._database = read, inner, database
        self._kept = Recent[Values, Program](kept, self._forget)
        self._decided = Recent[AnyProblem, Decision](MOST_DECIDED)
        self._ranging = WeakSet[Kernel]()  # those whose machine code is for ranges
        self._regions = [self._region(first)]
        self._met: Counter[Values] = Counter()
        self._special = Recent[Values, tuple[Step, ...]](SPECIAL, self._put_back)  # with their steps before
        self._lock = threading.RLock()
        self._takes([(label_of(n), n.tensor) for n in caller_inputs(first.source)])
        self.compiled, self.made = 1, 0

    def _takes(self, inputs: Sequence[tuple[str, TensorType]]) -> None:
        """Note the inputs by name, and which axis of which each dim is, in the order of names."""
        self._inputs, axes = inputs, dict[str, tuple[int, int]]()
        for i, (_, t) in enumerate(inputs):
            for axis, extent in enumerate(t.shape):
                if (name := named(extent)) is not None:
                    axes.setdefault(name, (i, axis))
        self._axes = [(name, *axes.get(name, (len(inputs), 0))) for name in sorted(self.dims)]

    def start(self) -> AnyShape:
        """Measure some shapes and make kernels beforehand, as long as there is time, and give the program itself; without a
        budget, or where a search goes on behind instances, make a first instance."""
        scope, budget = self._regions[0].reading.scope, self._budget
        if budget.seconds > 0 and not self.background:
            for part in ANCHORS:
                if budget.left_s() < LEAST_PART * budget.seconds and part != ANCHORS[0]:
                    break
                values = scope.within(part)
                try:
                    self._measure(values, budget.part(budget.left_s() / (2 if part == ANCHORS[0] else 1)))
                except (InputError, UnsupportedError) as error:  # beyond what the model can do, which its dims do not say
                    if all(d.high < MOST for d in self.dims.values()):
                        raise
                    LOGGER.info("not measured at %s: %s", values, error.what)
            longest_s = 0.0
            for part in PREPARED:
                began = time.monotonic()
                if began + longest_s < budget.ends:
                    with contextlib.suppress(InputError, UnsupportedError, TypeMismatchError):
                        self.at(**scope.within(part))
                    longest_s = max(longest_s, time.monotonic() - began)
            return_memory()
        elif all(d.high < MOST for d in self.dims.values()):  # else nobody says where the middle is
            self.make_first()
        return self

    def __repr__(self) -> str:
        """One line: the dims, where, and how many instances there are."""
        ranges = ", ".join(f"{d.name} {d.low}..{d.high}" for d in self.dims.values())
        return f"<tilewright program for {ranges} on {self.target.device}: {counted(len(self._kept), 'shape')} kept>"

    def make_first(self) -> None:
        """Make an instance in the middle of all ranges (up to 256, where a dim has no upper bound), if there is none: a call of
        another shape near it is spared most of what its own takes."""
        if not self.made:
            with contextlib.suppress(InputError, UnsupportedError, TypeMismatchError):
                self.at(**self._middle)

    @property
    def _middle(self) -> dict[str, int]:
        return self._regions[0].reading.scope.within(ANCHORS[0])

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
        try:
            found = self._kept.find(tuple([(name, args[i].shape[axis]) for name, i, axis in self._axes]))  # pyright: ignore[reportAttributeAccessIssue]
        except (AttributeError, IndexError):  # given by name, or no array
            found = None
        if found is None or self.background:  # which counts calls
            return self.at(**self.values_of(args, kwargs))(*args, **kwargs)
        try:
            return found(*args, **kwargs)
        except InputError:
            self.values_of(args, kwargs)  # says what is wrong with all shapes together
            raise

    def values_of(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, int]:
        """The values of the dims for arrays as they are given to a call.

        Raises:
            InputError: an array is missing, or of a shape that the program does not take.
        """
        given = dict(zip((name for name, _ in self._inputs), args, strict=False)) | dict(kwargs)
        shapes = {name: tuple(cast("Sequence[int]", getattr(a, "shape", ()))) for name, a in given.items()}
        return values_for(self._inputs, shapes, self.source.name)

    def at(self, *in_order: int, **values: int) -> Program:
        """The instance for values of the dims, in their order or by name.

        Raises:
            InputError: a value is missing, outside its bounds, or of no dim.
        """
        if len(in_order) > len(self.dims):
            what, hint = f"{len(in_order)} values for {counted(len(self.dims), 'dim')}", f"there are {', '.join(self.dims)}"
            raise InputError(what, where=self.source.name, hint=hint)
        values = {**dict(zip(self.dims, in_order, strict=False)), **values}
        if not values.keys() <= self.dims.keys():
            unknown, hint = min(values.keys() - self.dims.keys()), f"there are {', '.join(self.dims)}"
            raise InputError(f"no dim is called {unknown!r}", where=self.source.name, hint=hint)
        for name, dim in self.dims.items():
            if name not in values:
                raise InputError(f"no value for dim {name!r}", where=self.source.name, hint=f"one of {dim}")
            if values[name] not in dim:
                raise InputError(f"{name} = {values[name]} is outside {dim}", where=self.source.name)
        key = tuple(sorted(values.items()))
        with self._lock:
            found = self._kept.find(key)
            if found is None:
                found = self._kept[key] = self._instance(values, self._choice)
            elif self.background:
                self._specialised(key, found)
        return found

    def _forget(self, key: Values, program: Program) -> None:
        """Forget what is noted of a shape whose instance goes."""
        self._special.pop(key, None)
        del self._met[key]

    def _put_back(self, key: Values, steps: tuple[Step, ...]) -> None:
        """Give a shape that is no longer called the kernels back that it had before those of its own."""
        self._met[key] = 0
        if key in self._kept:
            self._kept[key].swap(steps)

    def _specialised(self, key: Values, program: Program) -> None:
        """Look for kernels by measuring, behind a shape that is called often and has some that were not measured for it: code
        for ranges, or the point of a shape near. Each takes the place of such a one where it is faster in a race. The shape
        that was called longest ago has those before back."""
        if self._special.find(key) is not None:
            return
        self._met[key] += 1
        under_way = (p for k in (key, *self._special) if (p := self._kept.get(k)) is not None)
        if self._met[key] < MET or any(p.search is not None and p.search.goes_on for p in under_way):
            return
        self._special[key] = program.steps
        before = {s.decision.problem: s.decision for s in program.steps if s.decision is not None}
        if all(d.measured for d in before.values()):
            return
        packings = {problem: p for problem, d in before.items() if (p := packing_of(d)) is not None}
        held = None if self._database is None else OnePacking(self._database, packings)
        parts = [s.part for s in program.steps]

        def searching() -> Chooser:
            decide = chooser(program.graph, self.target, min(self._budget.seconds, SPECIAL_S), None, held, parts)
            return Raced(decide, before, self._ranging, self.target)

        program.search_on(searching)

    def measured(self, within_s: float, **values: int) -> Program:
        """The instance for values of the dims, by name, which is measured for so many seconds if there was none yet.

        Raises:
            InputError: a value is missing, or outside its bounds (`at`).
        """
        if within_s > 0 and all(name in values and values[name] in dim for name, dim in self.dims.items()):
            self._measure(values, Budget(within_s))
        return self.at(**values)

    def explain(self, **values: int) -> Report[Explain]:
        """Account for every product of one instance, that of the middle of all ranges where no values are given."""
        return self.at(**(values or self._middle)).explain()

    def perf(self, **values: int) -> Report[Perf]:
        """Time one instance and its steps (`Program.perf`), that of the middle of all ranges where no values are given."""
        return self.at(**(values or self._middle)).perf()

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Refuse to be pickled or copied: it holds what makes instances, with a lock and open files.

        Raises:
            UnsupportedError: always.
        """
        values = ", ".join(f"{name}={value}" for name, value in self._middle.items())
        what = "a program with open extents is neither pickled nor copied"
        hint = f"compile it where it is needed; one instance can be: program.at({values})"
        raise UnsupportedError(what, where=self.source.name, hint=hint)

    def save(self, path: Path | str) -> None:
        """Refuse: a file holds the program for one shape.

        Raises:
            UnsupportedError: always.
        """
        values = ", ".join(f"{name}={value}" for name, value in self._middle.items())
        what = "a program with open extents is not saved: a file holds one for one shape"
        raise UnsupportedError(what, where=str(path), hint=f"program.at({values}).save(path), or other values")

    def _measure(self, values: Mapping[str, int], within: Budget) -> None:
        """Choose kernels for one shape by measuring, as for a program of it alone, but for the order of packed weights. Where
        there is no time to measure, they are those for ranges that a budget of 0 takes."""

        def choice(cut: Cut) -> Decide:
            of_problem, untimed = cut.of_problem, self._choice(cut)
            decide = chooser(cut.graph, self.target, within, None, self._held(cut), cut.parts)

            def chosen(problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
                decision = decide(problem, weights) if time.monotonic() < within.ends else None
                if decision is None or not decision.measured:
                    return untimed(problem, weights)
                self._decided[problem] = decision
                for key in of_problem.get(problem, ()):
                    cut.region.measured.setdefault(key, []).append(decision)
                return decision

            return chosen

        key = tuple(sorted(values.items()))
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self._instance(values, choice)

    def _held(self, cut: Cut) -> TuningDatabase | None:
        """The tuning database, held to the order in which each product's weight is packed."""
        if self._database is None:
            return None
        packings = cut.region.packings
        return OnePacking(self._database, {p: packings[k] for p, keys in cut.of_problem.items() for k in keys if k in packings})

    def _searched_on(self, program: Program, cut: Cut) -> None:
        """Search behind an instance near which nothing was measured; what is chosen serves further ones."""
        of_problem, measured = cut.of_problem, cut.region.measured
        if all(self._near(measured, key, p, NEAR) is not None for p, some in of_problem.items() for key in some):
            return

        def searching() -> Chooser:
            decide = chooser(program.graph, self.target, self._budget.seconds, None, self._held(cut), cut.parts)
            return Noting(decide, lambda p, d: [measured.setdefault(k, []).append(d) for k in of_problem.get(p, ())])

        program.search_on(searching)

    def _cut(self, values: Mapping[str, int]) -> Cut:
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
        parts = region.parts(made, became, values, self.target)
        came_from: dict[Node, Node] = {}
        for node, now in became.items():
            came_from.setdefault(now, node)
        keys = {p: tuple(came_from.get(n, n) for n in p.outputs) for p in parts if not p.once and decided(p)}
        return Cut(region, made, parts, Shape(values, came_from), keys)

    def _program(self, cut: Cut, decide: Decide, known: dict[Node, Value]) -> Program:
        """An instance whose kernels somebody chooses; `known` has values, as for `prepare`."""
        reading, graph, inner = cut.region.reading, cut.graph, self._inner
        with limited(self.threads):
            how = graph, graph, self.target, reading.trace, decide, inner
            program = prepare(*how, made=Program, parts=cut.parts, known=known)
        program.read_source(lambda: cut.source)
        program.layers, program.threads = reading.layers, self.threads
        return program

    def _instance(self, values: Mapping[str, int], choice: Callable[[Cut], Decide]) -> Program:
        cut = self._cut(values)
        region = cut.region
        with unwritten([v for v in region.constants.values() if isinstance(v, torch.Tensor)], region.digests):
            program = self._program(cut, choice(cut), region.constants)
        for node in [n for n in region.constants if cut.shape.came_from.get(n) is not n]:  # those of this instance alone
            del region.constants[node]
        for step in program.steps:
            key = cut.keys.get(step.part)
            if key is not None and step.decision is not None:
                region.taken.setdefault(key, []).append(step.decision)
                family = packing_of(step.decision)
                if family is not None:
                    region.packings.setdefault(key, family)
        codes = [code for r in self._regions for code in r.ranged.every]
        watch(program, self._choice(cut), codes, self._give_up)
        if self.background:
            self._searched_on(program, cut)
        self.made += 1
        return program

    def _region(self, reading: Reading) -> Region:
        ranged = RangedCodes(reading.graph, reading.scope, self.target, self._database, self._ranging, self._give_up)
        return Region(reading, ranged)

    def _new_region(self, values: Mapping[str, int]) -> Region:
        if len(self._regions) >= MOST_REGIONS:
            self._regions.pop(1)
        shown = ", ".join(f"{name} = {value}" for name, value in values.items())
        first = self._regions[0].reading.scope
        alone = first.fixed >= values.keys()  # its reader takes numbers
        few = [name for name, value in values.items() if value <= 1]  # which are not like others
        like = _like(values, first)
        tries = [(like, few), (values, few), (values, [*values])]
        if alone:
            del tries[:-1]
        elif like == values or first.numbers:  # which is no other's example
            del tries[0]
        for hints, fixed in tries:
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
                self._regions.append(self._region(reading))
                if len(self._regions) == OFTEN and not alone:
                    say(f"{self.source.name}: {OFTEN} readings for {self.made} shapes by now: {self._decided_by()}")
                return self._regions[-1]
        raise UnsupportedError(f"rules do not settle for {shown}", where=self.source.name, hint="compile for that shape alone")

    def _decided_by(self) -> str:
        """The operations and rules whose decisions told shapes apart so far, and one such decision."""
        seen: dict[str, str] = {}
        for region in self._regions:
            for guard, who in region.reading.scope.guards.items():
                seen.setdefault(who or "the program", str(guard))
        shown = [f"{who} by {guard}" for who, guard in list(seen.items())[:3]]
        return "; ".join(shown) + " (and so on) need others for others"

    def _choice(self, cut: Cut) -> Decide:
        """The choice of kernels without measuring: by the nearest shape that was measured, else by the cost model."""
        part_of = {key: part for part, key in cut.keys.items()}

        def chosen(problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
            if problem not in self._decided:
                key = next(iter(cut.of_problem.get(problem, ())), ())
                self._decided[problem] = self._unmeasured(problem, weights, cut, key, part_of.get(key))
            return self._decided[problem]

        return chosen

    def _near(self, among: Mapping[Key, Sequence[Decision]], key: Key, problem: AnyProblem, less: float) -> Decision | None:
        """The decision for the nearest problem: of `NEAR` times the work at most, or so many times less. Blocks that were
        chosen for few rows make many read a weight again and again; those for many do for few."""
        size = sum(t.elements for t in problem.outputs)
        near = [
            (times, d)
            for d in among.get(key, ())
            if (times := work_ratio(d.problem, problem))
            <= (NEAR if sum(t.elements for t in d.problem.outputs) >= size else less)
        ]
        return min(near, key=lambda pair: pair[0], default=(0.0, None))[1]

    def _unmeasured(
        self,
        problem: AnyProblem,
        weights: Mapping[int, torch.Tensor],
        cut: Cut,
        key: Key,
        part: Part | None,
    ) -> Decision:
        region, shape = cut.region, cut.shape
        known, packing = self._database, region.packings.get(key)
        near = self._near(region.measured, key, problem, NEAR) or self._near(region.taken, key, problem, LIKE)
        if near is not None:
            same = None
            if part is not None:
                candidate = next((c for c in discover() if c.name == near.kernel.candidate), None)
                same = region.ranged.decision(problem, weights, candidate, near.kernel.schedule, part, shape)
            same = same or self._built_like(problem, weights, near, region.taken.get(key, ()))
            if same is not None:
                return same
        if near is None and part is not None and any(c.ranged is not None for c in discover(kind=self.target.kind)):
            among = [packing] if packing is not None else None if known is None else known.candidates(problem)
            if self.target.kind == "cpu":  # what is kept is for one shape, which takes long to compile for a GPU
                kept = None if known is None or packing is not None else known.find(problem, weights, 0)
                if kept is not None:
                    return kept
            candidate, schedule = foremost(problem, self.target, among) or (None, Schedule())
            candidate = candidate.candidate if isinstance(candidate, PackingVariants) else candidate
            built = [] if self.target.kind == "cpu" else self._built_before(problem, region, key, candidate, schedule)
            for point in (*built, schedule):
                same = region.ranged.decision(problem, weights, candidate, point, part, shape)
                if same is not None:
                    return same
        return untimed(problem, self.target, weights, known, packing)

    def _built_before(
        self, problem: AnyProblem, region: Region, key: Key, candidate: Candidate | None, schedule: Schedule
    ) -> list[Schedule]:
        """The points of which there is code already for other shapes, on a GPU, for which compiling takes seconds: those of
        which the cost model expects no more than `WORSE` times the time of a point, the fastest first."""
        best = None if candidate is None else _expected_us(candidate, problem, schedule, self.target)
        if candidate is None or candidate.code_of is None or best is None:
            return []
        taken = (d.kernel for d in region.taken.get(key, ()) if d.kernel.candidate == candidate.name)
        points = dict.fromkeys(candidate.code_of(kernel.schedule) for kernel in taken)
        found = [(us, p) for p in points if (us := _expected_us(candidate, problem, p, self.target)) is not None]
        return [p for us, p in sorted(found, key=lambda pair: pair[0]) if us <= WORSE * best]

    def _give_up(self, code: RangedCode, why: str) -> None:
        """Serve no shape by a code any more: programs that run it have other kernels from their next calls on."""
        with self._lock:
            if code.kernel is None:
                return
            LOGGER.warning("a kernel for ranges is given up, %s", why)
            code.kernel = None
            for problem in [p for p, d in self._decided.items() if code.made(d)]:
                del self._decided[problem]
            for user, decide in code.users:
                program = user()
                if program is not None:
                    aside = {key: steps for key, steps in self._special.items() if self._kept.get(key) is program}
                    self._special.update((key, program.rechosen(steps, code.made, decide)) for key, steps in aside.items())
                    right = {id(s.part): s for s in program.rechosen(program.steps, code.made, decide)}
                    program.change(lambda step, right=right: right[id(step.part)] if code.made(step.decision) else step)
            code.users.clear()

    def _built_like(
        self, problem: AnyProblem, weights: Mapping[int, torch.Tensor], near: Decision, before: Sequence[Decision]
    ) -> Decision | None:
        """The kernel of another shape's candidate and schedule; None if it does not do here. Small problems are checked. Of the
        large, which have the same code for edges and more of what lies between, the first few."""
        point = near.kernel.candidate, near.kernel.schedule
        if self.target.kind != "cpu" or getattr(problem, "ops", problem.bytes) > LARGE_OPS:
            alike = (d for d in before if (d.kernel.candidate, d.kernel.schedule) == point and d.verified)
            sizes = list(dict.fromkeys(d.problem for d in alike if not d.elsewhere))
            if len(sizes) >= CHECKED and any(larger(problem, p) <= FAR for p in sizes):
                found = rebuilt(problem, self.target, *point)
                return None if found is None else replace(found, checked=Checked(sizes))
        if self._database is None:
            return repeat(problem, self.target, *point, weights)
        return self._database.again(problem, *point, weights)


def _moved(part: Part, to: Mapping[Node, Node]) -> Part:
    """The part of other nodes that one is of these."""
    nodes, inputs, outputs = (tuple(to[n] for n in some) for some in (part.nodes, part.inputs, part.outputs))
    return replace(part, nodes=nodes, inputs=inputs, outputs=outputs)


def _expected_us(candidate: Candidate, problem: AnyProblem, schedule: Schedule, target: Target) -> float | None:
    """The time in µs that the cost model expects of a point; None where it says nothing, or that is none for this problem."""
    try:
        return predict(candidate, problem, schedule, target)
    except Exception:  # the candidate's own account
        return None


def work_ratio(a: AnyProblem, b: AnyProblem) -> float:
    """The ratio of work between two problems that differ in extents alone, by the elements of their results; of
    attentions, which work for each pair of a query and a key, the larger ratio of these."""
    sizes = [[t.elements for t in x.outputs] for x in (a, b)]
    if isinstance(a, AttentionProblem) and isinstance(b, AttentionProblem):
        sizes = [[*s, x.operands[0].shape[2], x.operands[1].shape[2]] for s, x in zip(sizes, (a, b), strict=True)]
    ratios = [max(x, 1) / max(y, 1) for x, y in zip(*sizes, strict=True)]
    return max((max(r, 1 / r) for r in ratios), default=1.0)


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
