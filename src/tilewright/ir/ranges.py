"""Ranges of elements along an axis, of extents that may be open: Python's own ask for numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """The elements start, start + step, … of an axis, so many; of one or none the step is 1.

    Attributes:
        start, extent, step: see there; the first two may be open.
    """

    start: int
    extent: int
    step: int = 1

    @classmethod
    def of(cls, start: int, stop: int, step: int = 1) -> Range:
        """The elements before `stop`, as Python's `range` gives them."""
        extent = -(-(stop - start) // step)
        extent = extent if extent > 0 else 0
        return cls(start, extent, step if step == 1 or extent > 1 else 1)

    @classmethod
    def whole(cls, extent: int) -> Range:
        """All elements of an axis."""
        return cls(0, extent)

    def __len__(self) -> int:
        return self.extent

    @property
    def last(self) -> int:
        """The last element, if there is one."""
        return self.start + (self.extent - 1) * self.step

    @property
    def stop(self) -> int:
        """One more than the last element."""
        return self.last + 1

    def part(self, of: Range) -> Range:
        """Those of these elements that a range of their numbers names."""
        step = self.step * of.step
        return Range(self.start + of.start * self.step, of.extent, step if step == 1 or of.extent > 1 else 1)

    def between(self, first: int, end: int) -> Range:
        """These elements from number `first` on and before number `end`, of those that there are."""
        first, end = (n if n < self.extent else self.extent for n in (first, end))
        return self.part(Range.of(first, end))
