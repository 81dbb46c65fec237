"""Word of how far something long has come: a line in the log every few seconds."""

from __future__ import annotations

import contextlib
import logging
import math
import textwrap
import threading
import time
from collections.abc import Callable, Generator

from tilewright.errors import LOGGER, visible

EVERY_S = 5.0
WIDTH = 80  # of what comes next

Progress = Callable[[int, int, str], None]  # told how many are done, how many there are, and what comes next


class Said:
    """A listener to progress: called with how many are done, how many there are, and what comes next."""

    def __init__(self, what: str, ends: float | None = None) -> None:
        """`ends`: when it must be over, by `time.monotonic`."""
        self._what, self._ends, self._began = what, ends, time.monotonic()
        self._far = ""

    def __call__(self, done: int, total: int, following: str) -> None:
        self._far = f": {done} of {total}, {textwrap.shorten(following, WIDTH, placeholder=' …')}"

    def say(self) -> None:
        """Log a line: as information where the program has set up logging, else as a warning, which Python shows anyway."""
        now = time.monotonic()
        left = "" if self._ends is None else f", {max(0, math.ceil(self._ends - now))} s left"
        level = logging.INFO if LOGGER.hasHandlers() else logging.WARNING
        with contextlib.suppress(OSError, ValueError):  # standard error is closed, and a handler writes there
            LOGGER.log(level, "%s", visible(f"{self._what} for {now - self._began:.0f} s{left}{self._far}"))


@contextlib.contextmanager
def said(what: str, ends: float | None = None, over: threading.Event | None = None) -> Generator[Said]:
    """Say every `EVERY_S` seconds that something is still under way, and how far it has come. `over` ends it."""
    known, over = Said(what, ends), over or threading.Event()

    def now_and_then() -> None:
        while not over.wait(EVERY_S):
            known.say()

    teller = threading.Thread(target=now_and_then, name="tilewright progress", daemon=True)
    teller.start()
    try:
        yield known
    finally:
        over.set()
        teller.join()
