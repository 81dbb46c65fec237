"""Machine code that leaves extents open, of one candidate for one problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilewright.hardware.target import Target
from tilewright.ir.dims import Dim, Scope
from tilewright.ranged import problem_at
from tilewright.schedule.candidate import Candidate, Kernel, Schedule, plan_for


class Code:
    """One candidate's codes for a problem with open extents: a new one where the guards of those before do not hold.

    Attributes:
        codes: the scope of each, which holds its guards, and what gives its kernels.
    """

    def __init__(self, candidate: Candidate, target: Target, make: Callable[..., Any], **dims: Dim) -> None:
        """`make` poses the problem for extents by the dims' names."""
        self.candidate, self.target, self.dims, self.codes = candidate, target, dims, []
        scope = Scope()
        self.problem = make(**{name: scope.extent(dim) for name, dim in dims.items()})

    def at(self, schedule: Schedule | None = None, **values: int) -> tuple[Any, Kernel]:
        """The problem for values of the dims, and its kernel; a new one is near a schedule, the first where none is given."""
        one = problem_at(self.problem, values)
        found = next((c for s, c in self.codes if not s.failing(values)), None)
        if found is None:
            scope = Scope(strict=True).expect(values)
            posed = problem_at(self.problem, {name: scope.extent(dim) for name, dim in self.dims.items()})
            schedule = schedule or next(iter(plan_for(self.candidate, one, self.target).schedules()))
            assert self.candidate.ranged is not None
            found = self.candidate.ranged(posed, self.target, schedule)
            assert not scope.failing(values)
            self.codes.append((scope, found))
        return one, found(one, values)
