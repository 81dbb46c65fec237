"""`compile_rows`: one product for any number of rows, as a server of language models meets it.

It is a program with one open extent, its rows. Its kernels are chosen by a table over them (`schedule/buckets.py`), not by the
nearest shape that was measured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

from tilewright.any_shape import MOST_DECIDED, AnyShape, Cut, Reading
from tilewright.compiler import home, optimise
from tilewright.deadline import Budget
from tilewright.errors import InputError, UnsupportedError, check_type
from tilewright.hardware.detect import detect
from tilewright.hardware.target import Target
from tilewright.ir.dims import Dim, Scope
from tilewright.ir.graph import Graph, Node, label_of
from tilewright.ir.pattern import Trace
from tilewright.ir.types import TensorType
from tilewright.program import Program
from tilewright.progress import Progress, said
from tilewright.recent import Recent
from tilewright.runtime.partition import Part
from tilewright.schedule.ahead import Job
from tilewright.schedule.buckets import Buckets, PackingVariants, bucketed, recalled, recorded, untimed
from tilewright.schedule.cache import user_cache
from tilewright.schedule.problem import AnyProblem, Problem
from tilewright.schedule.record import Key
from tilewright.schedule.search import Decision, by_reference
from tilewright.schedule.tuning_database import TuningDatabase
from tilewright.schedule.worker import begin
from tilewright.threads import threaded

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

MOST_ROWS = 4096
DEFAULT_BUDGET_S = 60.0
LEAST_S = 0.1  # for measuring, where reading took all of the time
KEPT = 128  # numbers of rows whose kernels are kept ready
ROWS = "rows"
GIVEN = "a function from a number of rows to the program for it: lambda rows: tilewright.load(…)"

GraphAt = Callable[[int], Graph]

# By problem, device and family: layers of one shape are searched and checked once.
_decided = Recent[tuple[AnyProblem, str, str | None], Decision](MOST_DECIDED)
_deciding = threading.RLock()


class AnyRows(AnyShape):
    """A program with one product, for any number of rows in a range: call it as one calls a `Program`.

    It is an `AnyShape` with one dim, "rows". The first call with a number of rows builds and checks its kernel, by the table
    (about 50 ms on a CPU, less where its object code is in the cache); the next ones look it up. The packed weight is one for
    all of them. Programs that differ in their weights alone share what was decided and checked.

    Attributes:
        table: which kernel serves which rows; None if nothing was measured: then the first that passes its check serves.
    """

    table: Buckets | None

    def __init__(
        self,
        graph_at: GraphAt,
        target: Target | None,
        first: int = 1,
        last: int = MOST_ROWS,
        *,
        dims: bool = False,
        threads: int | None = None,
    ) -> None:
        """Made by `compile_rows`, with whose arguments; without a table, and on the device where the weights lie if `target` is
        None."""
        rows = Dim(ROWS, first, last)

        def read(scope: Scope) -> Reading:
            number = scope.expect({}, () if dims else (ROWS,)).extent(rows)
            source, trace = graph_at(number), Trace()
            check_type(source, Graph, f"graph_at({number})", GIVEN)
            return Reading(source, optimise(source, trace), trace, (), scope)

        reading = read(Scope().expect({} if dims else {ROWS: first}))
        super().__init__(reading, read, target or detect(home(reading.source)), kept=KEPT, threads=threads)
        self.table, self._rows = None, rows
        self._cuts = Recent[int, Cut](KEPT)
        self._over = WeakValueDictionary[int, Program]()  # one that `over` gave, as long as somebody has it
        self._chosen = set[int]()  # numbers of rows for whose problems there are kernels
        if not dims:
            self._takes(_opened(reading.source, self._cut({ROWS: last}).region.reading.source, rows))
        if not any(t.open for t in self.input_types.values()):
            what = "no input changes with the number of rows"
            raise InputError(what, where=reading.source.name, hint="the left operand's rows")

    def over(self, rows: int, known: dict[Node, Value]) -> Program:
        """The program for a number of rows with other values of its constants; it is the caller's to keep. `known` has these
        values, and is given what is computed from them.

        Raises:
            InputError: there is no graph for so many.
        """
        with self._lock:
            like = self._over.get(rows)
            found = None if like is None else like.with_constants(known)
            if found is None:
                cut = self._cut({ROWS: rows})
                found = self._over[rows] = self._program(cut, self._choice(cut), known)
            return found

    def problems(self, rows: int) -> list[AnyProblem]:
        """The problems that the program for a number of rows poses."""
        with self._lock:
            return [p.posed[0] for p in self._cut({ROWS: rows}).keys]

    def to_build(self, rows: int) -> tuple[list[AnyProblem], list[Job]]:
        """The problems for a number of rows that nobody has chosen a kernel for, in this process or another; and the points
        that came with the package, where nobody has built them."""
        if rows in self._chosen:
            return [], []
        family = self._family(rows)
        asked = [p for p in self.problems(rows) if self._key(p, family) not in _decided]
        if not asked:
            self._chosen.add(rows)
            return [], []
        known = TuningDatabase(self.target, user_cache(), family="" if family is None else family.name)
        return [p for p in asked if not known.known(p, 0)], [*known.to_build(asked)]

    def tune(self, budget: Budget, *, cache: bool, progress: Progress | None) -> None:
        """Make the table, or read back that of a process that had as much time, as `compile_rows` does."""
        known = TuningDatabase(self.target, user_cache() if cache and budget.seconds > 0 else None)
        first, last, key = self._rows.low, self._rows.high, self._place(known)
        with known.alone_with_rows(key, budget.seconds):
            if not self.recall(budget.seconds, known):
                begin()
                left_s = max(LEAST_S, budget.left_s()) if budget.seconds > 0 else budget.seconds  # which it refuses
                self._chosen.clear()
                self.table = bucketed(self._posed, self.target, first=first, last=last, budget_s=left_s, progress=progress)
                known.keep_rows(recorded(self.table, key, budget.seconds))

    def recall(self, budget_s: float = 0.0, known: TuningDatabase | None = None) -> bool:
        """Take the table that any process measured for these rows in so many seconds or more; tell whether there is one."""
        known = known or TuningDatabase(self.target, user_cache())
        found = known.rows(self._place(known), budget_s)
        self._chosen.clear()
        self.table = None if found is None else recalled(found, self._product, self.target)
        return self.table is not None

    def _cut(self, values: Mapping[str, int]) -> Cut:
        found = self._cuts.find(values[ROWS])
        if found is None:
            found = self._cuts[values[ROWS]] = super()._cut(values)
        return found

    def _unmeasured(
        self, problem: AnyProblem, weights: Mapping[int, torch.Tensor], cut: Cut, key: tuple[Node, ...], part: Part | None
    ) -> Decision:
        """The kernel by the table; what the cost model names first, if there is none."""
        family = self._family(cut.shape.values[ROWS]) if isinstance(problem, Problem) else None
        at = self._key(problem, family)
        with _deciding:
            found = _decided.find(at)
            if found is None:
                found = _decided[at] = untimed(problem, self.target, weights, TuningDatabase(self.target, user_cache()), family)
            return found

    def _family(self, rows: int) -> PackingVariants | None:
        return None if self.table is None else self.table.at(rows).family

    def _key(self, problem: AnyProblem, family: PackingVariants | None) -> tuple[AnyProblem, str, str | None]:
        return problem, self.target.device, None if family is None else family.name

    def _product(self, rows: int) -> Problem:
        """The product for a number of rows.

        Raises:
            UnsupportedError: there is none, or several.
        """
        found = [p for p in self.problems(rows) if isinstance(p, Problem)]
        if len(found) != 1:
            hint = "a table over the rows is made for a program with one product"
            raise UnsupportedError(f"{len(found)} products", where=self.source.name, hint=hint)
        return found[0]

    def _place(self, known: TuningDatabase) -> Key:
        ends = self._rows.low, self._rows.high
        return known.key_of_rows(*ends, [self._product(rows) for rows in ends])

    def _posed(self, rows: int) -> tuple[Problem, Mapping[int, torch.Tensor]]:
        """The product for a number of rows and its weights."""
        product = self._product(rows)
        with self._lock:
            program = self._program(self._cut({ROWS: rows}), lambda p, _: by_reference(p, self.target), {})
        (step,) = (s for s in program.steps if s.decision is not None and s.decision.problem == product)
        return product, program.posed(step).weights


@threaded
def compile_rows(
    graph_at: GraphAt,
    *,
    first: int = 1,
    last: int = MOST_ROWS,
    dims: bool = False,
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
        dims: `graph_at` takes an extent that stays open in place of a number (`Scope.extent`); it is then asked once, or once
            for each way in which it decides by the rows.
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
        program = AnyRows(graph_at, target, first, last, dims=dims, threads=threads)
        program.tune(budget, cache=cache, progress=progress)
    return program


def _opened(one: Graph, other: Graph, rows: Dim) -> list[tuple[str, TensorType]]:
    """The inputs of programs for the least and the greatest number of rows by name, with extents that change left open."""
    number = Scope().extent(rows)
    if len(one.inputs) != len(other.inputs):
        what = f"{len(one.inputs)} inputs for {rows.low} rows, and {len(other.inputs)} for {rows.high}"
        raise InputError(what, where=one.name, hint="the same inputs for every number of rows")
    types = [(label_of(n), n.tensor, m.shape) for n, m in zip(one.inputs, other.inputs, strict=True)]

    def extent(low: int, high: int) -> int:
        """An extent that grows evenly with the rows in between; of one that does not, their number."""
        step, uneven = divmod(high - low, rows.high - rows.low)
        return number if uneven else low + step * (number - rows.low)

    return [(name, t.with_shape(map(extent, t.shape, last))) for name, t, last in types]
