"""A bench for functions that somebody else wrote, and for ours beside them: a whole program is the problem, and what a function
must give is known beforehand. They are examined and timed as candidates are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from tilewright.errors import TypeMismatchError
from tilewright.hardware.target import Target
from tilewright.ir.literal import bits_of
from tilewright.ir.types import TensorType
from tilewright.schedule.bench import Bench
from tilewright.schedule.candidate import CPU, GPU, MATRIX_LIBRARIES, Candidate, FixedPlan, Kernel, Runner, Schedule
from tilewright.schedule.expected import Expected, check
from tilewright.schedule.guard import visible
from tilewright.schedule.measure import KEEPS, Fault, all_same, other_data, overwrite
from tilewright.schedule.problem import AnyProblem
from tilewright.schedule.race import Race

Function = Callable[..., object]

TRIALS, CHANGED = 12, (0.0, 1 / 16, 1 / 4)  # calls with some elements changed, and the parts of all that these are, in turn
SETTLED_S, LOOK_S = 0.3, 0.05  # seconds until threads of OpenMP sleep, and those of a look at who works


@dataclass(frozen=True, eq=False)
class ContestProblem:
    """A program by its inputs and its results.

    Attributes:
        name: what messages call it.
        labels, types: of its inputs.
        outputs: types of its results.
        values: dense tensors for its inputs, on the CPU.
        expected: the results for these, with their bounds.
        views: for each result whether it is an input's own memory, seen in some way: a function may give that back, too.
    """

    name: str
    labels: tuple[str, ...]
    types: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    values: tuple[torch.Tensor, ...]
    expected: Expected
    views: tuple[bool, ...]

    @property
    def weights(self) -> tuple[bool, ...]:
        """No input is a constant."""
        return (False,) * len(self.types)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class Calling:
    """The plan of a function, and what another process makes the function of (`worker.carried`), if it can be sent."""

    name: str
    function: Function
    carried: bytes | None

    def __call__(self, problem: ContestProblem, target: Target) -> FixedPlan:
        return FixedPlan((Schedule(),), lambda schedule: Kernel(self.name, schedule, lambda weights: self._runner(problem)))

    def _runner(self, problem: ContestProblem) -> Runner:
        function = self.function
        if visible():  # it is examined
            return lambda sources: _tensors(function(*sources), sources, problem)
        return lambda sources: cast("Sequence[torch.Tensor]", function(*sources))


def contender(name: str, function: Function, carried: bytes | None = None) -> Candidate:
    """A function as a candidate. It takes the inputs of a `ContestProblem`, and gives its result, or several in a tuple."""
    return Candidate(name, frozenset(), CPU | GPU, MATRIX_LIBRARIES.start, Calling(name, function, carried))


def _tensors(given: object, sources: Sequence[torch.Tensor], problem: ContestProblem) -> Sequence[torch.Tensor]:
    """Check what a function gave, and put it into a list.

    Raises:
        TypeMismatchError: it is no tensor or several, or they lie elsewhere or in the memory of an input.
    """
    found = list(cast("Sequence[object]", given)) if isinstance(given, tuple | list) else [given]
    results: list[torch.Tensor] = []
    memory = {s.untyped_storage().data_ptr(): label for s, label in zip(sources, problem.labels, strict=True) if s.numel()}
    for i, r in enumerate(found):
        if not isinstance(r, torch.Tensor):
            raise TypeMismatchError(f"it gave a {type(r).__name__} where tensors are due")
        if sources and r.device != sources[0].device:
            raise TypeMismatchError(f"a result lies on {r.device}, and the inputs on {sources[0].device}")
        if r.layout != torch.strided:
            raise TypeMismatchError(f"a result is {r.layout}, and no dense tensor")
        view = i < len(problem.views) and problem.views[i]
        if r.numel() and not view and (label := memory.get(r.untyped_storage().data_ptr())) is not None:
            raise TypeMismatchError(f"a result lies in the memory of input {label}")
        results.append(r.detach())
    return results


class ContestBench(Bench):
    """A bench for a `ContestProblem`, whose key 0 is a program that is trusted.

    Before each call that is timed, all elements of each input are others on a CPU, and on a GPU they count as written to: a
    function that remembers a result, or a part of one, does its work each time. One that looks at a few elements alone is found
    afterwards (`results`). What a function replaced in torch or in `time` is put back, and it is out.
    """

    dense: bool = True
    patient: bool = True
    trusted: int = 0

    def __init__(self, problem: ContestProblem, target: Target, weights: Mapping[int, torch.Tensor], **how: object) -> None:
        """See `Bench`; there are no weights."""
        self._contest = problem
        super().__init__(cast("AnyProblem", problem), target, weights, **how)  # pyright: ignore[reportArgumentType]
        self._given, self._meddled = Functions(), dict[int, str]()
        self._ran = self._next = self.trusted
        self._told, self._at = self._at, self._coming
        if target.device == "cpu":
            self._before = self._between  # untimed
            self._draw = torch.Generator().manual_seed(0)
            self._shifts: dict[int, int] = {}

    def _drawn(self, given: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._contest.values

    def _worked_out(self, roundoff: float) -> Expected:
        return self._contest.expected

    def verify(self, key: int) -> Fault | None:
        before = set(threading.enumerate())
        with torch.no_grad():
            fault = super().verify(key)
        if (replaced := self._given.put_back()) is not None:
            return Fault("failed", replaced)
        if fault is None and not before.issuperset(threading.enumerate()) and at_work():
            return Fault("failed", "it leaves threads at work when it comes back, which slow down what comes after it")
        return fault

    def _coming(self, key: int) -> None:
        self._next = key
        self._told(key)

    def _between(self) -> None:
        """Shift the elements of the next call's inputs on, round their ends, and look at what the last call left."""
        self._blame(self._ran)
        self._ran = self._next
        for i, (t, given) in enumerate(zip(self._sources, self._contest.values, strict=True)):
            if t.numel() > 1:  # by another number than the last time
                by = self._shifts.get(i, 0) + int(torch.randint(1, t.numel(), (), generator=self._draw))
                at = self._shifts[i] = by % t.numel()
                shifted, whole = _elements(t), _elements(given)
                shifted[: len(whole) - at], shifted[len(whole) - at :] = whole[at:], whole[:at]
        touch(self._sources)

    def _blame(self, key: int) -> None:
        """Put back what the function that ran last replaced, and remember it of that."""
        if (replaced := self._given.put_back()) is not None:
            self._meddled.setdefault(key, replaced)

    def times(self, keys: Sequence[int], budget_s: float) -> Race:
        plain = dict(self._runners)
        if self._target.device != "cpu":  # whose host is ahead, and whose calls are timed together
            self._runners = {key: _touching(run) for key, run in plain.items()}
        try:
            with torch.no_grad():
                return super().times(keys, budget_s)
        finally:
            self._runners = plain
            self._blame(self._ran)
            overwrite(self._sources, self._contest.values)

    def results(self, key: int) -> tuple[list[torch.Tensor], list[torch.Tensor], str | None] | None:
        """Call a function twice, and take its results to the CPU; None where it cannot be called.

        The third is a sentence, if it is not to be trusted after all. It gives the same for other data in the memory that it
        was timed with, but not for them elsewhere; or the same where some elements are others, and the trusted program does
        not; or it replaced functions.
        """
        run = self._runners.get(key)
        if run is None:
            return None
        device, values = self._target.device, self._contest.values
        other = [other_data(t) for t in values]
        copies = [[t.to(device, copy=True) for t in data] for data in (values, values, other)]  # each at addresses of its own
        try:
            with torch.no_grad():
                first, second, changed = (self._called(run, sources) for sources in copies)
                overwrite(self._sources, other)
                stale = all_same(self._called(run, self._sources), first) and not all_same(changed, first)
                stale = stale or self._overlooks(run)
        except Exception:  # as it did when it was examined
            return None
        finally:
            self._blame(key)
            overwrite(self._sources, values)
        return first, second, self._meddled.get(key, f"the result is wrong after many calls: {KEEPS}" if stale else None)

    def _overlooks(self, run: Runner) -> bool:
        """Tell whether a function gives the bits that it gave before when some elements of its inputs change, by which the
        trusted program's results leave their bounds."""
        ours = self._runners.get(self.trusted)
        if ours is None or ours is run:
            return False
        values, device = self._contest.values, self._target.device
        overwrite(self._sources, values)
        was = self._called(run, self._sources)
        for trial in range(TRIALS):
            draw = torch.Generator().manual_seed(trial)
            overwrite(self._sources, [altered(t, CHANGED[trial % len(CHANGED)], draw).to(device) for t in values])
            due = self._called(ours, self._sources)
            if check(cast("AnyProblem", self._contest), self._contest.expected, due) is None:
                continue  # nothing changed that matters
            if all_same(self._called(run, self._sources), was):
                return True
        return False

    def _called(self, run: Runner, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [r.cpu() for r in _tensors(run(sources), sources, self._contest)]


class Functions:
    """The functions of torch and of clocks, as they were when this was made."""

    def __init__(self) -> None:
        places = {"torch": torch, "torch.Tensor": torch.Tensor, "torch.nn.functional": torch.nn.functional, "time": time}
        self._were = [(name, place, n, f) for name, place in places.items() for n, f in vars(place).items() if callable(f)]

    def put_back(self) -> str | None:
        """Put back what was replaced; the sentence on it, None if nothing was."""
        replaced = [one for one in self._were if vars(one[1]).get(one[2]) is not one[3]]
        found = [one for one in replaced if not _of_torch(vars(one[1]).get(one[2]))]
        for _, place, name, f in found:
            setattr(place, name, f)
        return f"it replaced {', '.join(f'{where}.{name}' for where, _, name, _ in found[:3])}" if found else None


def _of_torch(f: object) -> bool:
    """Tell whether a function is written in a file of torch, which puts some around its own when it compiles."""
    code = getattr(f, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(Path(torch.__file__).parent)


def at_work() -> bool:
    """Tell whether threads of this process work while this one sleeps; those of OpenMP wait at work for a while first."""
    time.sleep(SETTLED_S)
    began = time.process_time()
    time.sleep(LOOK_S)
    return time.process_time() - began > LOOK_S / 5  # others may have the cores


def altered(t: torch.Tensor, part: float, draw: torch.Generator) -> torch.Tensor:
    """A tensor some elements of which, at random, are others of it: a part of all, at least one."""
    made, n = t.clone(), t.numel()
    if n:
        at = torch.randperm(n, generator=draw)[: max(1, int(part * n))]
        _elements(made)[at] = _elements(t)[torch.randint(n, (len(at),), generator=draw)]
    return made


def _elements(t: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor: bytes [elements, bytes of each]."""
    return bits_of(t).view(t.numel(), -1)


def touch(tensors: Sequence[torch.Tensor]) -> None:
    """Have torch count a write to tensors (`Tensor._version`), of no element."""
    for t in tensors:
        t.view(-1)[:0].zero_()


def _touching(run: Runner) -> Runner:
    def touched(sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        touch(sources)
        return run(sources)

    return touched
