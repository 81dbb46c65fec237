"""One point of a candidate's space: named knobs with values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

Knob = int | str | bool
T = TypeVar("T")


@dataclass(frozen=True)
class Schedule:
    """Settings of one kernel, e.g. `tile_m=128 tile_n=256 num_stages=4`. Names are those of docs/glossary.md."""

    knobs: tuple[tuple[str, Knob], ...] = ()

    @classmethod
    def of(cls, **knobs: Knob) -> Schedule:
        """A schedule from knobs by name, in the order given."""
        return cls(tuple(knobs.items()))

    @classmethod
    def of_point(cls, point: Any, **more: Knob) -> Schedule:
        """A schedule from a dataclass whose fields are the knobs, in their order, and from `more`. A field that is None is no
        knob."""
        own = ((f.name, getattr(point, f.name)) for f in fields(point))
        return cls((*((name, value) for name, value in own if value is not None), *more.items()))

    def point(self, kind: type[T]) -> T:
        """The dataclass of this kind whose fields the knobs give; other knobs are not looked at."""
        names = {f.name for f in fields(kind)}  # type: ignore[arg-type]
        return kind(**{name: value for name, value in self.knobs if name in names})

    def __getitem__(self, name: str) -> Knob:
        return dict(self.knobs)[name]

    def __str__(self) -> str:
        return " ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in self.knobs) or "default"
