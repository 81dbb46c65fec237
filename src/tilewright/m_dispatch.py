"""`compile_rows`: one product for any number of rows, as a server of language models meets it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch

from tilewright.compiler import home, optimise
from tilewright.deadline import Budget
from tilewright.errors import InputError, UnsupportedError, check_type, counted
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.graph import Graph, label_of
from tilewright.ir.literal import Literal
from tilewright.ir.pattern import Trace
from tilewright.program import Program
from tilewright.progress import Progress, said
from tilewright.recent import Recent
from tilewright.runtime.partition import Part, decided, parts_for
from tilewright.runtime.prepare import prepare
from tilewright.schedule.ahead import Job
from tilewright.schedule.buckets import Buckets, PackingVariants, bucketed, recalled, recorded, untimed
from tilewright.schedule.cache import user_cache
from tilewright.schedule.problem import AnyProblem, Problem
from tilewright.schedule.record import Key
from tilewright.schedule.search import Decision, by_reference
from tilewright.schedule.tuning_database import TuningDatabase
from tilewright.schedule.worker import begin
from tilewright.threads import limited, threaded

MOST_ROWS = 4096
DEFAULT_BUDGET_S = 60.0
LEAST_S = 0.1  # for measuring, where reading took all of the time
KEPT = 128  # numbers of rows whose kernels are kept ready
MOST_DECIDED = 4096
GIVEN = "a function from a number of rows to the program for it: lambda rows: tilewright.load(…)"

GraphAt = Callable[[int], Graph]
T = TypeVar("T")

# By problem, device and family: layers of one shape are searched and checked once.
_decided = Recent[tuple[AnyProblem, str, str | None], Decision](MOST_DECIDED)
_deciding = threading.RLock()


class AnyRows:
    """A program with one product, for any number of rows in a range: call it as one calls a `Program`.

    The first call with a number of rows builds and checks its kernel, by the table (about 50 ms on a CPU, less where its object
    code is in the cache); the next ones look it up. The packed weight is one for all of them. Programs that differ in their
    weights alone share what was decided and checked.

    Attributes:
        table: which kernel serves which rows; None if nothing was measured: then the first that passes its check serves.
        target: where it runs.
        threads: threads for calls on a CPU; None is torch's number, but no more than the machine has for this process.
    """

    table: Buckets | None
    target: Target
    threads: int | None

    def __init__(self, graph_at: GraphAt, table: Buckets | None, target: Target, threads: int | None = None) -> None:
        self.table, self.target, self.threads = table, target, threads
        first, last = (1, MOST_ROWS) if table is None else (table.buckets[0].first, table.buckets[-1].last)
        self._graph_at = graph_at
        self._kept, self._cut = Recent[int, Program](KEPT), Recent[int, _Cut](KEPT)
        self._lock = threading.Lock()
        self._names, self._place = _varying_axis(graph_at(first), graph_at(last))

    def __repr__(self) -> str:
        """One line: for how many rows, where, and how many ranges have a kernel of their own."""
        span = "any number of rows, nothing measured"
        if self.table is not None:
            first, last = self.table.buckets[0].first, self.table.buckets[-1].last
            span = f"{first:,} to {last:,} rows in {counted(len(self.table.buckets), 'range')}"
        return f"<tilewright program for {span} on {self.target.device}>"

    def at(self, rows: int) -> Program:
        """The program for a number of rows.

        Raises:
            InputError: the table does not reach it.
        """
        with self._lock:
            found = self._kept.find(rows)
            if found is None:
                found = self._kept[rows] = self._over(rows, {})
            return found

    def over(self, rows: int, constants: Mapping[Literal, torch.Tensor]) -> Program:
        """The program for a number of rows with other values of its constants; it is the caller's to keep.

        Raises:
            InputError: the table does not reach it.
        """
        with self._lock:
            return self._over(rows, constants)

    def _over(self, rows: int, constants: Mapping[Literal, torch.Tensor]) -> Program:
        cut = self._cut_for(rows)
        decide = self._decide(rows)
        with limited(self.threads):
            program = prepare(
                cut.source, cut.graph, self.target, cut.trace, decide, made=Program, parts=cut.parts, constants=constants
            )
        program.threads = self.threads
        return program

    def _cut_for(self, rows: int) -> _Cut:
        found = self._cut.find(rows)
        if found is None:
            found = self._cut[rows] = _Cut.of(self._graph_at(rows), self.target)
        return found

    def problems(self, rows: int) -> list[AnyProblem]:
        """The problems that the program for a number of rows poses."""
        with self._lock:
            return self._cut_for(rows).problems

    def to_build(self, rows: int) -> tuple[list[AnyProblem], list[Job]]:
        """The problems for a number of rows that nobody has chosen a kernel for, in this process or another; and the points
        that came with the package, where nobody has built them."""
        with self._lock:
            family = self._family(rows)
            asked = [p for p in self._cut_for(rows).problems if self._key(p, family) not in _decided]
            if not asked:
                return [], []
            known = TuningDatabase(self.target, user_cache(), family="" if family is None else family.name)
            return [p for p in asked if not known.known(p, 0)], [*known.to_build(asked)]

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run it on arrays; one input's extent says how many rows there are.

        Raises:
            InputError: an input is missing, unknown, or of another shape or type, or has more rows than the table.
        """
        index, axis = self._place
        name = self._names[index]
        given = args[index] if index < len(args) else kwargs.get(name)
        if given is None:
            raise InputError(f"no value for input {name!r}", hint="its rows say which kernel runs")
        shape = tuple(getattr(given, "shape", ()))
        if len(shape) <= axis:
            raise InputError(f"input {name!r} has shape {list(shape)}", hint=f"axis {axis} holds the rows")
        return self.at(shape[axis])(*args, **kwargs)

    def _decide(self, rows: int) -> Callable[[AnyProblem, Mapping[int, torch.Tensor]], Decision]:
        def decide(problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
            family = self._family(rows) if isinstance(problem, Problem) else None
            key = self._key(problem, family)
            with _deciding:
                found = _decided.find(key)
                if found is None:
                    known = TuningDatabase(self.target, user_cache())
                    found = _decided[key] = untimed(problem, self.target, weights, known, family)
                return found

        return decide

    def _family(self, rows: int) -> PackingVariants | None:
        return None if self.table is None else self.table.at(rows).family

    def _key(self, problem: AnyProblem, family: PackingVariants | None) -> tuple[AnyProblem, str, str | None]:
        return problem, self.target.device, None if family is None else family.name


@threaded
def compile_rows(
    graph_at: GraphAt,
    *,
    first: int = 1,
    last: int = MOST_ROWS,
    device: str | torch.device | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    cache: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> AnyRows:
    """Compile a program that holds one product for every number of rows from `first` to `last`.

    Args:
        graph_at: the program for a number of rows, asked for once for each; its constants are the same memory for all.
        first, last: the range, of two numbers of rows at least.
        device: "cpu", "cuda" or "cuda:1", or a torch device; None is where the weights lie.
        budget_s: seconds by the clock for all of it, more than 0: numbers of rows that there is no time for go with their
            neighbours.
        cache: read back the table that any process measured with as much time in the same circumstances, and keep this one.
        threads: threads for calls on a CPU and for measuring; None is torch's number, but no more than the machine has for
            this process.
        progress: called with races done, races expected, and what comes next.

    Raises:
        InputError: there is no such range, nothing of the program changes with the rows, there is no time to measure, the
            device is not there, or `graph_at` is no function that gives a graph.
        UnsupportedError: the program holds another number of products than one.
    """
    if not 1 <= first < last:
        hint = "tilewright.compile, for one number of rows" if first == last else "such as first=1, last=4096"
        raise InputError(f"no range of rows from {first} to {last}", hint=hint)
    check_type(graph_at, (Callable,), "graph_at", GIVEN)
    budget, told = Budget(budget_s), f"measuring which kernels serve {first} to {last:,} rows"
    with nullcontext(progress) if progress is not None else said(told, budget.ends) as progress:
        target = None if device is None else detect(device)
        graph_at = lru_cache(KEPT)(graph_at)  # tracing a torch module takes most of a second, and races ask for it again
        for rows in (first, last):
            check_type(graph_at(rows), Graph, f"graph_at({rows})", GIVEN)
        target = target or detect(home(graph_at(first)))
        _varying_axis(graph_at(first), graph_at(last))

        def measured() -> Buckets:
            begin()
            left_s = max(LEAST_S, budget.left_s()) if budget_s > 0 else budget_s  # which it refuses
            posed_at = lambda m: _posed(graph_at(m), target)  # noqa: E731
            return bucketed(posed_at, target, first=first, last=last, budget_s=left_s, progress=progress)

        if not cache or not budget_s > 0:
            return AnyRows(graph_at, measured(), target, threads)
        known = TuningDatabase(target, user_cache())
        key = known.key_of_rows(first, last, [_product(graph_at(rows), target) for rows in (first, last)])
        with known.alone_with_rows(key, budget_s):
            table = _recalled(graph_at, target, known, key, budget_s)
            if table is None:
                table = measured()
                known.keep_rows(recorded(table, key, budget_s))
        return AnyRows(graph_at, table, target, threads)


def known_rows(graph_at: GraphAt, target: Target, last: int) -> Buckets | None:
    """The table that `compile_rows` measured for 1 to `last` rows of a program, in any process; None if there is none."""
    known = TuningDatabase(target, user_cache())
    key = known.key_of_rows(1, last, [_product(graph_at(rows), target) for rows in (1, last)])
    return _recalled(graph_at, target, known, key, 0.0)


def _recalled(graph_at: GraphAt, target: Target, known: TuningDatabase, key: Key, budget_s: float) -> Buckets | None:
    found = known.rows(key, budget_s)
    return None if found is None else recalled(found, lambda m: _product(graph_at(m), target), target)


@dataclass(frozen=True)
class _Cut:
    """A program as read and as rewritten, with what the rules did, and what it is cut into."""

    source: Graph
    graph: Graph
    trace: Trace
    parts: tuple[Part, ...]

    @staticmethod
    def of(source: Graph, target: Target) -> _Cut:
        trace = Trace()
        graph = optimise(source, trace)
        return _Cut(source, graph, trace, tuple(parts_for(graph, target)))

    @property
    def problems(self) -> list[AnyProblem]:
        return [p.posed[0] for p in self.parts if decided(p)]


def _product(source: Graph, target: Target) -> Problem:
    """The product of a program.

    Raises:
        UnsupportedError: it holds none, or several.
    """
    return _only([p for p in _Cut.of(source, target).problems if isinstance(p, Problem)], source)


def _only(found: Sequence[T], source: Graph) -> T:
    if len(found) != 1:
        raise UnsupportedError(
            f"{len(found)} products", where=source.name, hint="a table over the rows is made for a program with one product"
        )
    return found[0]


def _posed(source: Graph, target: Target) -> tuple[Problem, Mapping[int, torch.Tensor]]:
    """The product of a program and its weights."""
    found: list[tuple[Problem, Mapping[int, torch.Tensor]]] = []

    def decide(problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
        if isinstance(problem, Problem):
            found.append((problem, weights))
        return by_reference(problem, target)

    cut = _Cut.of(source, target)
    prepare(cut.source, cut.graph, target, cut.trace, decide, made=Program, parts=cut.parts)
    return _only(found, source)


def _varying_axis(one: Graph, other: Graph) -> tuple[list[str], tuple[int, int]]:
    """Names of the inputs, and the first of them whose shape changes with the rows, with the axis.

    Raises:
        InputError: none does.
    """
    names = [label_of(n) for n in one.inputs]
    for index, (a, b) in enumerate(zip(one.inputs, other.inputs, strict=True)):
        for axis, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)):
            if x != y:
                return names, (index, axis)
    raise InputError("no input changes with the number of rows", where=one.name, hint="the left operand's rows")
