"""A schedule: knobs with their values, and dataclasses of knobs."""

from dataclasses import dataclass

from tilewright.schedule.candidate import Schedule


@dataclass(frozen=True)
class Sizes:
    tile: int
    wide: bool
    kind: str | None = None


def test_a_dataclass_of_knobs_and_its_schedule_name_one_another():
    schedule = Schedule.of_point(Sizes(3, wide=True), bits=14)
    assert schedule == Schedule.of(tile=3, wide=True, bits=14)
    assert schedule.point(Sizes) == Sizes(3, wide=True)
    assert Schedule.of_point(Sizes(3, False, "ring")).point(Sizes) == Sizes(3, False, "ring")
