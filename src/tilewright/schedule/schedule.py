"""One point of a candidate's space: named knobs with values."""

from __future__ import annotations

from dataclasses import dataclass

Knob = int | str | bool


@dataclass(frozen=True)
class Schedule:
    """Settings of one kernel, e.g. `tile_m=128 tile_n=256 num_stages=4`. Names are those of docs/glossary.md."""

    knobs: tuple[tuple[str, Knob], ...] = ()

    @classmethod
    def of(cls, **knobs: Knob) -> Schedule:
        """A schedule from knobs by name, in the order given."""
        return cls(tuple(knobs.items()))

    def __getitem__(self, name: str) -> Knob:
        return dict(self.knobs)[name]

    def __str__(self) -> str:
        return " ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in self.knobs) or "default"
