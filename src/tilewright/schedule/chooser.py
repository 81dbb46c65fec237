"""Choices of kernels for a program: what a search asks, and those that hold another to a packing, note it, or race it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from tilewright.hardware.target import Target
from tilewright.schedule.buckets import PackingVariants
from tilewright.schedule.candidate import Candidate, FixedPlan, Kernel, discover, narrowed
from tilewright.schedule.problem import AnyProblem, Problem
from tilewright.schedule.search import Decision, search
from tilewright.schedule.tuning_database import TuningDatabase

RACED_S = 0.1  # for the race between a kernel for ranges and one for a shape


class Chooser(Protocol):
    """A choice of kernels for a program's problems, such as `BudgetedChooser`, with the weight that each problem has."""

    def __call__(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision: ...

    def weight(self, problem: AnyProblem) -> float: ...


class OnePacking(TuningDatabase):
    """A tuning database in which products keep to the order in which their weights are packed already."""

    def __init__(self, known: TuningDatabase, packings: Mapping[AnyProblem, PackingVariants]) -> None:
        self.__dict__.update(known.__dict__)
        self._packings = packings

    def find(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor], budget_s: float) -> Decision | None:
        found, packing = super().find(problem, weights, budget_s), self._packings.get(problem)
        return None if found is None or (packing is not None and packing_of(found) != packing) else found

    def candidates(self, problem: AnyProblem) -> Sequence[Candidate] | None:
        packing = self._packings.get(problem)
        return super().candidates(problem) if packing is None else [packing]

    def keep(self, decision: Decision, budget_s: float) -> None:
        if decision.problem not in self._packings:  # a choice among few would be taken for one among all
            super().keep(decision, budget_s)


@dataclass(frozen=True)
class Noting:
    """A choice of kernels that tells what it came to."""

    choice: Chooser
    note: Callable[[AnyProblem, Decision], object]

    def __call__(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
        decision = self.choice(problem, weights)
        self.note(problem, decision)
        return decision

    def weight(self, problem: AnyProblem) -> float:
        return self.choice.weight(problem)


@dataclass(frozen=True)
class Raced:
    """A choice of kernels for one shape, which are raced against those that it has and that were not measured for it."""

    choice: Chooser
    before: Mapping[AnyProblem, Decision]
    ranging: Collection[Kernel]
    target: Target

    def __call__(self, problem: AnyProblem, weights: Mapping[int, torch.Tensor]) -> Decision:
        before = self.before[problem]
        if before.measured:
            return replace(before, measured=False)  # which replaces nothing
        found = self.choice(problem, weights)
        kernels, candidates = (before.kernel, found.kernel), {c.name: c for c in discover()}
        points = [(k.candidate, k.schedule) for k in kernels]
        racing: list[Candidate] = []
        if before.kernel in self.ranging:
            for place, kernel in enumerate(kernels):
                plan = FixedPlan((kernel.schedule,), lambda _, kernel=kernel: kernel)
                name = f"{kernel.candidate} for {'one shape' if place else 'ranges'}"
                one = replace(candidates[kernel.candidate], name=name, preference=place, ranged=None, packing_knobs=None)
                racing.append(replace(one, plan=lambda *_, plan=plan: plan))
        elif points[0] == points[1]:
            return found
        else:  # points that the worker can make
            racing = [narrowed(candidates[name], lambda _, point=point: (point,)) for name, point in points]
        raced = search(problem, self.target, budget_s=RACED_S, candidates=racing, weights=weights)
        if before.kernel in self.ranging:
            better = all(r.candidate != racing[1].name for r in raced.rejected)
        else:
            better = (raced.kernel.candidate, raced.kernel.schedule) == points[1]
        return replace(found if better else before, time_us=raced.time_us, measured=raced.measured)

    def weight(self, problem: AnyProblem) -> float:
        return self.choice.weight(problem)


def packing_of(decision: Decision) -> PackingVariants | None:
    """The candidate of a decision held to the order in which it packs weights; None where it packs none in an order."""
    kernel = decision.kernel
    found = next((c for c in discover() if c.name == kernel.candidate), None)
    if found is None or found.packing_knobs is None or not isinstance(decision.problem, Problem):
        return None
    return PackingVariants.of(found, tuple((k, v) for k, v in kernel.schedule.knobs if k in found.packing_knobs))
