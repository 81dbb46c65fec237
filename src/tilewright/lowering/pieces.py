"""A problem done in pieces, each a problem of its own: the whole's schedule names candidate and point of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from tilewright.errors import UnsupportedError
from tilewright.hardware.target import Target
from tilewright.schedule.candidate import Candidate, Kernel, Plan, Runner, Schedule, concerns, discover, plan_for
from tilewright.schedule.problem import AnyProblem
from tilewright.schedule.search import search

BY = "by"  # the knob that names each piece's candidate; those of piece 0's own point are called 0.NAME
BUDGET_S = 0.1  # to search for a piece whose kernel nobody named
Fastest = Callable[[AnyProblem, Target], Kernel]


def joined(schedule: Schedule, chosen: Iterable[tuple[str, Schedule]]) -> Schedule:
    """A point with candidate and point of each piece."""
    chosen = list(chosen)
    own = [(f"{i}.{name}", value) for i, (_, point) in enumerate(chosen) for name, value in point.knobs]
    return Schedule((*schedule.knobs, (BY, ", ".join(name for name, _ in chosen)), *own))


def own_of(schedule: Schedule) -> Schedule:
    """A point without those of its pieces: the inverse of `joined`, with `chosen_of`."""
    return Schedule(tuple((name, value) for name, value in schedule.knobs if name != BY and "." not in name))


def chosen_of(schedule: Schedule) -> list[tuple[str, Schedule]]:
    """Candidate and point of each piece."""
    own = [(*name.partition(".")[::2], value) for name, value in schedule.knobs]
    names = str(schedule[BY]).split(", ") if schedule[BY] else []
    return [(name, Schedule(tuple((k, v) for at, k, v in own if k and at == str(i)))) for i, name in enumerate(names)]


def plan_of_piece(piece: AnyProblem, name: str, target: Target, among: Sequence[Candidate] | None = None) -> Plan:
    """The plan of a piece's candidate, which is one `among` these; None for all.

    Raises:
        UnsupportedError: there is no such candidate, or it refuses.
    """
    every = discover() if among is None else among
    found = next((c for c in every if c.name == name and concerns(c, piece, target)), None)
    if found is None:
        raise UnsupportedError(f"{name}: there is no such candidate", where=str(piece))
    return plan_for(found, piece, target)


def offered(pieces: Sequence[AnyProblem], schedule: Schedule, target: Target, among: Sequence[Candidate] | None = None) -> bool:
    """Tell whether a schedule names a point for each piece, which its candidate has.

    Raises:
        UnsupportedError: a piece's candidate is gone, or refuses.
    """
    if BY not in dict(schedule.knobs):
        return False
    each = zip(pieces, chosen_of(schedule), strict=True)
    return all(point in plan_of_piece(p, name, target, among).schedules() for p, (name, point) in each)


def searched(piece: AnyProblem, target: Target) -> Kernel:
    """The fastest kernel of a piece that a short search finds."""
    return search(piece, target, budget_s=BUDGET_S).kernel


def kernels_of(
    pieces: Sequence[AnyProblem],
    schedule: Schedule,
    target: Target,
    fastest: Fastest = searched,
    among: Sequence[Candidate] | None = None,
) -> list[Kernel]:
    """The kernel of each piece that a schedule names, which are not verified by themselves: whoever asks verifies the whole.
    If it names none, the fastest of each.

    Raises:
        UnsupportedError: a piece's candidate is gone, or refuses.
    """
    if BY not in dict(schedule.knobs):
        return [fastest(p, target) for p in pieces]
    each = zip(pieces, chosen_of(schedule), strict=True)
    return [plan_of_piece(p, name, target, among).build(point) for p, (name, point) in each]


def whole_of(
    name: str,
    schedule: Schedule,
    pieces: Sequence[AnyProblem],
    kernels: Sequence[Kernel],
    prepare: Callable[[Mapping[int, torch.Tensor]], Runner],
    releasable: frozenset[int] = frozenset(),
) -> Kernel:
    """The kernel of a candidate's point without its pieces, which runs the pieces' kernels."""
    return Kernel(
        name,
        joined(schedule, [(k.candidate, k.schedule) for k in kernels]),
        prepare,
        workspace_bytes=max((k.workspace_bytes for k in kernels), default=0),
        packed_bytes=sum(k.packed_bytes for k in kernels),
        releasable=releasable,
        roundoff=max((k.roundoff for k in kernels), default=0.0),
        parts=tuple((p.kind, k.candidate) for p, k in zip(pieces, kernels, strict=True)),
    )
