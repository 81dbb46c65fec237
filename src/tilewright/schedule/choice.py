"""Decisions as data: a `Choice` of a decision, and back."""

from __future__ import annotations

from typing import Any, TypeVar

from tilewright.schedule.candidate import Schedule
from tilewright.schedule.record import LONGEST, Choice, RejectedRecord
from tilewright.schedule.search import Decision, Rejected

C = TypeVar("C", bound=Choice)


def choice_of(decision: Decision, kind: type[C], **more: Any) -> C:
    """A decision as a choice of this kind, which holds `more`; its sentences end after `LONGEST` characters."""
    kernel = decision.kernel
    return kind(
        candidate=kernel.candidate,
        knobs=kernel.schedule.knobs,
        time_us=decision.time_us,
        rejected=tuple(
            RejectedRecord(r.candidate, r.why[:LONGEST], r.time_us, r.schedule.knobs, r.kind) for r in decision.rejected
        ),
        provisional=decision.provisional[:LONGEST],
        **more,
    )


def rejected_of(choice: Choice) -> tuple[Rejected, ...]:
    """The candidates and points that a choice was made over."""
    return tuple(Rejected(r.candidate, r.kind, r.why, Schedule(r.knobs), r.time_us) for r in choice.rejected)
