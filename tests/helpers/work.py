"""Work as a number that a busy machine does not change."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Calls:
    """Counts calls of functions, of Python's and of C's."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _frame: object, event: str, _arg: object) -> None:
        self.count += event in ("call", "c_call")


@contextmanager
def counting() -> Iterator[Calls]:
    """Count the calls that this thread makes in the block; a loop within one function of C counts once."""
    calls, before = Calls(), sys.getprofile()
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(before)
