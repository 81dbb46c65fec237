"""A bench for functions that somebody else wrote, and for ours beside them: a whole program is the problem, and what a function
must give is known beforehand. They are examined and timed as candidates are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from tilewright.errors import TypeMismatchError
from tilewright.hardware.target import Target
from tilewright.ir.types import TensorType
from tilewright.schedule.bench import Bench
from tilewright.schedule.candidate import CPU, GPU, MATRIX_LIBRARIES, Candidate, FixedPlan, Kernel, Runner, Schedule
from tilewright.schedule.expected import Expected
from tilewright.schedule.guard import visible
from tilewright.schedule.measure import Fault
from tilewright.schedule.problem import AnyProblem
from tilewright.schedule.race import Race

Function = Callable[..., object]


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
    """What a function gave, as a list.

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
    """A bench for a `ContestProblem`."""

    dense: bool = True
    patient: bool = True

    def __init__(self, problem: ContestProblem, target: Target, weights: Mapping[int, torch.Tensor], **how: object) -> None:
        """See `Bench`; there are no weights."""
        self._contest = problem
        super().__init__(cast("AnyProblem", problem), target, weights, **how)  # pyright: ignore[reportArgumentType]

    def _drawn(self, given: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._contest.values

    def _worked_out(self, roundoff: float) -> Expected:
        return self._contest.expected

    def verify(self, key: int) -> Fault | None:
        with torch.no_grad():
            return super().verify(key)

    def times(self, keys: Sequence[int], budget_s: float) -> Race:
        with torch.no_grad():
            return super().times(keys, budget_s)

    def results(self, key: int) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """What a function gives when it is called twice, on the CPU; None where it cannot be called."""
        run = self._runners.get(key)
        if run is None:
            return None
        try:
            with torch.no_grad():
                first, second = (self._called(run) for _ in range(2))
        except Exception:  # as it did when it was examined
            return None
        return first, second

    def _called(self, run: Runner) -> list[torch.Tensor]:
        sources = [t.to(self._target.device, copy=True) for t in self._contest.values]
        return [r.cpu() for r in _tensors(run(sources), sources, self._contest)]
