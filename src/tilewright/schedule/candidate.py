"""One notion for a generated kernel, a library call and the reference: something that may do what a program asks.

A candidate is one module under `candidates/` with a module-level `CANDIDATE`; it is found by file name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from tilewright.deadline import OverrunError, considering
from tilewright.discovery import modules
from tilewright.hardware.target import DeviceKind, Target
from tilewright.schedule.problem import AnyProblem, ProblemKind
from tilewright.schedule.schedule import Schedule

if TYPE_CHECKING:
    from tilewright.schedule.cost import Work

CPU, GPU = frozenset[DeviceKind]({"cpu"}), frozenset[DeviceKind]({"cuda"})
LAST_RESORT = 90
LIBRARIES = range(10, 40)  # preferences of those that multiply with a unit of the operands' own type

Runner = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Kernel:
    """A built candidate.

    Attributes:
        candidate: name of the candidate.
        schedule: the point it was built for.
        prepare: given the weights by source index, packs them and returns what runs: all the problem's sources in, one tensor
            a result out. Sources may have any strides; the runner must not write them nor return memory it will write again.
        place: the same, for a program that has results of a fusion in larger arrays (`FusionProblem.destinations`), given by
            result number: they are written there, and the arrays returned. None if they are to be copied.
        workspace_bytes: scratch memory a call needs.
        packed_bytes: bytes that packing adds to the memory of the weights.
        unread: weights, by source index, that the runner has no use for once it is prepared: it may be given None for them.
        roundoff: that of the sums, where the hardware keeps fewer bits of them than the accumulator has; verified with slack
            for that, and its schedule says so, since precision never drops without a word.
        parts: the kind of problem and the candidate of each kernel that this one is made of, if it is.
        registers, spills, shared_bytes: resources of the machine code, where there is any of our own.
    """

    candidate: str
    schedule: Schedule
    prepare: Callable[[Mapping[int, torch.Tensor]], Runner]
    place: Callable[[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]], Runner] | None = None
    workspace_bytes: int = 0
    packed_bytes: int = 0
    releasable: frozenset[int] = frozenset()
    roundoff: float = 0.0
    parts: tuple[tuple[ProblemKind, str], ...] = ()
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None


@runtime_checkable
class Candidate(Protocol):
    """A way to do gemms, attentions or fusions. `refuse` comes first: the other two may assume it said None.

    Attributes:
        name: unique.
        kinds: of problem it is ever asked about: a `Problem`, an `AttentionProblem`, a `FusionProblem`.
        devices: kinds of device it is ever asked about: on others nobody hears of it.
        preference: order in which candidates are tried when nothing is measured, and which of two equally fast ones is kept:
            below 10 for kernels generated for the problem, 10 to 89 for libraries, `LAST_RESORT` for the reference.
    """

    name: str
    kinds: frozenset[ProblemKind]
    devices: frozenset[DeviceKind]
    preference: int

    def refuse(self, problem: Any, target: Target) -> str | None:
        """A sentence why this candidate cannot do the problem there, or None. `explain` prints it."""
        ...

    def schedules(self, problem: Any, target: Target) -> Iterable[Schedule]:
        """The legal points of its space, best guess first."""
        ...

    def build(self, problem: Any, schedule: Schedule, target: Target) -> Kernel:
        """A kernel for one point."""
        ...


@runtime_checkable
class HasCostModel(Protocol):
    """A candidate that can say what a schedule makes the machine do, so that it can be ranked without being built."""

    def work(self, problem: Any, schedule: Schedule, target: Target) -> Work | None:
        """The work of one point, None if it cannot be told."""
        ...


@runtime_checkable
class MetaCandidate(Protocol):
    """A candidate whose kernels are of points that `schedules` does not list, since it searches for kernels itself."""

    def pieces(self, problem: Any, target: Target) -> Sequence[AnyProblem]:
        """The problems for which it does."""
        ...

    def offers(self, problem: Any, schedule: Schedule, target: Target) -> bool:
        """Tell whether the point of a kernel is one that it could have come to here."""
        ...


@runtime_checkable
class Leading(Protocol):
    """A candidate that may be the better choice where nothing may be measured, whatever its preference."""

    def leading(self, problem: Any, target: Target) -> Schedule | None:
        """The point to take before all other candidates', by its own expectations; None if there is none."""
        ...


@runtime_checkable
class PacksOnce(Protocol):
    """A candidate whose packed weights serve any number of rows.

    Attributes:
        packing_knobs: names of knobs that a packing depends on: points that agree in them, or have none, share one.
    """

    packing_knobs: tuple[str, ...]


@runtime_checkable
class Precompiled(Protocol):
    """A candidate of whose kernels any process, with no device at hand, can make the machine code beforehand."""

    def compile(self, problem: Any, schedule: Schedule, target: Target) -> None:
        """Leaves it where `build` finds it, in whatever process."""
        ...


def refusal(candidate: Candidate, problem: AnyProblem, target: Target) -> str | None:
    """A candidate's own sentence why it cannot do a problem, or that it took too long to say; None if it can."""
    try:
        with considering():
            return candidate.refuse(problem, target)
    except OverrunError as overrun:
        return overrun.what


def concerns(candidate: Candidate, problem: AnyProblem, target: Target) -> bool:
    """Tell whether a candidate is asked about a problem on a device at all."""
    return problem.kind in candidate.kinds and target.kind in candidate.devices


def discover(extra: Iterable[Path] = ()) -> list[Candidate]:
    """Every candidate, by preference."""
    return list(_discover(tuple(extra)))


@cache
def _discover(extra: tuple[Path, ...]) -> tuple[Candidate, ...]:
    found = [m.CANDIDATE for m in modules("tilewright.candidates", extra, "CANDIDATE")]
    return tuple(sorted(found, key=lambda c: (c.preference, c.name)))
