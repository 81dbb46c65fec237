"""Machine code for ranges of extents, as instances of a program with open extents run it.

A code is made for a problem with open extents (`Candidate.ranged`), and the guards in its scope tell for which shapes it holds.
It is checked at a small shape before its first call, and behind the calls at some that it is called with. Where a call's shape
is much larger, elements of its first results are looked at. A code that is wrong serves no shape any more.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableSet, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch

from tilewright.errors import TypeMismatchError
from tilewright.hardware.target import Target
from tilewright.ir.dims import Dim, Scope
from tilewright.ir.graph import Graph, Node
from tilewright.ir.instance import instance_of, nodes_at
from tilewright.ir.ops import Write
from tilewright.program import Program
from tilewright.runtime.background import behind
from tilewright.runtime.partition import Part
from tilewright.runtime.steps import Decide, Step, picked
from tilewright.schedule.candidate import Candidate, FixedPlan, Kernel, Ranged, Schedule, kernel_of
from tilewright.schedule.packed import return_memory
from tilewright.schedule.problem import AnyProblem
from tilewright.schedule.search import Checked, Decision, by_reference, search
from tilewright.schedule.spot_check import sampled, spot_check
from tilewright.schedule.tuning_database import TuningDatabase
from tilewright.sizes import round_up
from tilewright.threads import count, limited

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

FAR = 8.0  # times an extent of all shapes at which a code was checked, from which a shape is checked by itself
CHECKED = 3  # shapes at which a code is checked behind the calls
PROBES = (5, 11, 23, 47, 95, 191, 383)  # values near which a dim's are for the first check of a code
SPOT_S, SPOT_PART = 0.005, 0.05  # for spot checks in a first call, together; of a step's own time, if that is more


@dataclass(frozen=True)
class Shape:
    """A shape that a program is instantiated for.

    Attributes:
        values: those of the dims, by name.
        came_from: the nodes with open extents that those of the instance come from.
    """

    values: Mapping[str, int]
    came_from: Mapping[Node, Node]


@dataclass
class RangedCode:
    """Machine code for a range of extents.

    Attributes:
        scope: its guards say for which.
        kernel: gives the kernel for values of the dims; None if nothing could be written for them, or if it was wrong.
        checks: the shapes at which it was checked, by which dims are 1.
        behind: the number of those that are checked behind the calls, likewise.
        users: programs that run it, with what chooses other kernels for them.
    """

    scope: Scope
    kernel: Ranged | None
    checks: dict[frozenset[str], Checked] = field(default_factory=dict[frozenset[str], Checked])
    behind: Counter[frozenset[str]] = field(default_factory=Counter[frozenset[str]])
    users: list[tuple[ref[Program], Decide]] = field(default_factory=list["tuple[ref[Program], Decide]"])

    def made(self, decision: Decision | None) -> bool:
        """Tell whether a decision is for this code."""
        return decision is not None and any(decision.checked is c for c in self.checks.values())


GiveUp = Callable[[RangedCode, str], object]


class RangedCodes:
    """The machine code for ranges of one graph with open extents.

    Attributes:
        every: all of it, also what was given up.
    """

    every: list[RangedCode]

    def __init__(
        self,
        graph: Graph,
        scope: Scope,
        target: Target,
        database: TuningDatabase | None,
        kernels: MutableSet[Kernel],
        give_up: GiveUp,
    ) -> None:
        """No code yet.

        Args:
            graph: the graph with open extents, as rewritten.
            scope: its dims, and the guards under which it holds.
            target: the machine.
            database: what is known of problems, and where verdicts are kept.
            kernels: takes up each kernel that is made.
            give_up: called with a code that was found wrong, and how that was found.
        """
        self._graph, self._scope, self._target, self._database = graph, scope, target, database
        self._kernels, self._give_up = kernels, give_up
        self._by_point: dict[tuple[AnyProblem, str, Schedule], list[RangedCode]] = {}
        self._opened: Mapping[Node, Node] | None = None
        self.every = []

    def decision(
        self,
        problem: AnyProblem,
        weights: Mapping[int, torch.Tensor],
        candidate: Candidate | None,
        schedule: Schedule,
        part: Part,
        shape: Shape,
    ) -> Decision | None:
        """A kernel of a candidate near a schedule whose machine code leaves extents open; None if there is none. Before its
        first call it is checked at a small shape among those that it serves in which the same dims are 1; then behind the calls
        at the first few that it is called with.

        Args:
            problem: what a part of an instance poses.
            weights: its constant sources, by their places.
            candidate, schedule: the point that is wanted.
            part: the part.
            shape: the instance's.
        """
        values = shape.values
        if candidate is None or candidate.ranged is None:
            return None
        posed = self._posed_open(part, shape)
        if posed is None or problem_at(posed, values) != problem:
            return None
        code = self._code(posed, candidate, schedule, values)
        kernel, ones = code.kernel, frozenset(name for name, value in values.items() if value <= 1)
        if kernel is None:
            return None

        def plan(problem: AnyProblem, values: Mapping[str, int]) -> FixedPlan:
            return FixedPlan((schedule,), lambda _: kernel(problem, values))

        def check(problem: AnyProblem, values: Mapping[str, int]) -> None:
            fixed, types = plan(problem, values), problem.types
            alone = replace(candidate, plan=lambda *_: fixed, ranged=None)
            given = {i: t for i, t in weights.items() if tuple(t.shape) == types[i].shape}
            known = self._database
            found = None if known is None else known.again(problem, alone.name, schedule, given, among=[alone])
            found = found or search(problem, self._target, budget_s=0, candidates=[alone], weights=given)  # what is wrong
            checked.whole.append(found.problem)

        checked = code.checks.setdefault(ones, Checked())
        calls = self._target.kind == "cpu"  # whose results are looked at; who asks for a GPU's waits for all before them
        looked_at = calls and sampled(problem) and not any(isinstance(n.op, Write) for n in part.outputs)
        try:
            made = Decision(problem, kernel_of(plan(problem, values), schedule), None, (), False, True, checked=checked)
            if problem not in checked.whole and self._database is not None and self._database.vouched(problem, made.kernel):
                checked.whole.append(problem)
            if not checked.whole:
                small = _smaller(values, [code.scope, self._scope], self._scope.dims)
                check(problem_at(posed, small), small)
            if not looked_at and problem not in checked.whole and all(larger(problem, p) > FAR for p in checked.whole):
                check(problem, values)
        except Exception:  # for these extents there is none, or it is wrong
            code.kernel = None
            return None
        if calls and problem not in checked.whole and code.behind[ones] < CHECKED:
            code.behind[ones] += 1
            self._later(lambda: check(problem, values), code)
        self._kernels.add(made.kernel)
        return made

    def _posed_open(self, part: Part, shape: Shape) -> AnyProblem | None:
        """The problem that a part of an instance poses with extents open; None where it has none."""
        if self._opened is None:
            scope = Scope()  # guards that are left in it are not looked at: who uses the problem compares it
            extents = {name: scope.extent(dim) for name, dim in self._scope.dims.items()}
            self._opened = instance_of(self._graph, extents)[1]
        opened = {now: self._opened.get(node, node) for now, node in shape.came_from.items()}
        nodes, inputs, outputs = (tuple(opened.get(n, n) for n in some) for some in (part.nodes, part.inputs, part.outputs))
        try:
            return Part(part.kind, nodes, inputs, outputs).posed[0]
        except (TypeMismatchError, AssertionError):
            return None

    def _code(self, posed: AnyProblem, candidate: Candidate, schedule: Schedule, values: Mapping[str, int]) -> RangedCode:
        """The code for a problem with open extents that holds for values of the dims."""
        assert candidate.ranged is not None
        point = schedule if candidate.packing_knobs is not None else Schedule()  # the others have one for all extents
        point = point if candidate.code_of is None else candidate.code_of(schedule)
        several = self._by_point.setdefault((posed, candidate.name, point), [])
        code = next((c for c in several if not c.scope.failing(values)), None)
        if code is None:
            scope = Scope(strict=True).expect(values)
            extents = {n: scope.extent(dim) for n, dim in self._scope.dims.items()}
            code = RangedCode(scope, None)
            with contextlib.suppress(Exception):  # a candidate may raise anything, as in a search
                code.kernel = candidate.ranged(problem_at(posed, extents), self._target, schedule)
            several.append(code)
            self.every.append(code)
        return code

    def _later(self, check: Callable[[], None], code: RangedCode) -> None:
        """Check a code behind the calls, and give it up where it is wrong."""
        wanted = count()  # of this thread, which the one behind the calls does not know

        def checked() -> None:
            try:
                with limited(wanted):
                    check()
            except Exception as error:
                self._give_up(code, f"results of earlier calls may be wrong: {error}")
            return_memory()

        behind(checked)


def watch(program: Program, decide: Decide, codes: Sequence[RangedCode], give_up: GiveUp) -> None:
    """Note which codes a program runs, and have elements of the results of its first call looked at where such a code serves a
    shape much larger than those at which it was checked: once for each problem.

    Args:
        program: an instance.
        decide: chooses other kernels for it.
        codes: those that it may run.
        give_up: called with a code that was found wrong, and how that was found.
    """
    far: dict[AnyProblem, tuple[int, RangedCode]] = {}
    for i, step in enumerate(program.steps):
        d = step.decision
        code = next((c for c in codes if c.made(d)), None)
        if code is None or d is None or d.checked is None or program.target.kind != "cpu":
            continue
        if not any(user() is program for user, _ in code.users):
            code.users = [(user, choose) for user, choose in code.users if user() is not None]
            code.users.append((ref(program), decide))
        seen = [*d.checked.whole, *d.checked.spots]
        if all(larger(d.problem, p) > FAR for p in seen):
            far.setdefault(d.problem, (i, code))
    if far:
        steps = list(program.steps)
        for i, code in far.values():
            steps[i] = _looked_at(program, steps[i], code, SPOT_S / len(far), give_up)
        program.swap(tuple(steps))


def _looked_at(program: Program, step: Step, code: RangedCode, within_s: float, give_up: GiveUp) -> Step:
    """A step whose first results are looked at before they go on: the reference's take their place if they are wrong. From the
    next call on it is the step itself again, which can be part of a chain."""
    decision, posed = step.decision, program.posed(step)
    assert decision is not None
    problem, checked, weights = decision.problem, decision.checked, dict(posed.weights)  # which a program may drop
    assert checked is not None
    order = [step.part.inputs.index(s) for s in posed.sources]

    def run(values: Sequence[Value]) -> Sequence[Value]:
        began = time.perf_counter()
        results = step.run(values)
        if problem in checked.spots or code.kernel is None:  # since a call before
            put_back()
            return results
        took_s = time.perf_counter() - began
        sources = [weights.get(i, values[place]) for i, place in enumerate(order)]
        given = dict(zip(picked(step.part), results, strict=True))
        allowed_s = max(within_s, SPOT_PART * took_s)
        why, _ = spot_check(problem, cast("Any", sources), cast("Any", given), allowed_s, decision.kernel.roundoff)
        if why is None:
            checked.spots.append(problem)
            weights.clear()
            put_back()
            return results
        (right,) = program.rechosen([step], lambda _: True, lambda p, _: by_reference(p, program.target))
        give_up(code, f"and a result of the reference taken in place of its: {problem}: {why}")
        return right.run(values)

    def put_back() -> None:
        program.change(lambda s: step if s is looked else s)

    looked = replace(step, run=run)
    return looked


def problem_at(problem: AnyProblem, values: Mapping[str, int]) -> AnyProblem:
    """A problem with open extents for values of the dims by name, which may be extents of another scope."""
    at = nodes_at((), values).at
    changed = {name: at(getattr(problem, name)) for name in ("op", "roots", "types") if hasattr(problem, name)}
    return replace(problem, **cast("Any", changed))


def larger(problem: AnyProblem, than: AnyProblem) -> float:
    """The most times that an extent of a problem's sources or results is that of one that differs in extents alone."""
    pairs = zip((*problem.types, *problem.outputs), (*than.types, *than.outputs), strict=True)
    return max((x / max(y, 1) for a, b in pairs for x, y in zip(a.shape, b.shape, strict=True)), default=1.0)


def _smaller(values: Mapping[str, int], scopes: Sequence[Scope], dims: Mapping[str, Dim]) -> Mapping[str, int]:
    """Values with little work for which all guards hold that do for these values, and that are 1 where these are."""
    for size in PROBES:
        tried: dict[str, int] = {}
        for name, value in values.items():
            by, low = dims[name].multiple_of, max(dims[name].low, 2)
            least = max(size + value % 7, low)  # with rests that are not always the same
            tried[name] = min(value, round_up(least, by))
        if all(not scope.failing(tried) for scope in scopes):
            return tried
    return values
