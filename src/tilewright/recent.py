"""A dictionary of the entries that were used last."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """The last entries that were set or asked for by `find`, no more than `most`; `dropped` is told each one that goes. Several
    threads may ask and set at once."""

    def __init__(self, most: int, dropped: Callable[[K, V], object] = lambda key, value: None) -> None:
        super().__init__()
        self._most, self._dropped, self._setting = most, dropped, threading.RLock()

    def find(self, key: K) -> V | None:
        """The value of a key, which is the last used then; None if there is none."""
        try:
            self.move_to_end(key)
            return self[key]
        except KeyError:  # it may go meanwhile
            return None

    def __setitem__(self, key: K, value: V) -> None:
        gone = list[tuple[K, V]]()
        with self._setting, contextlib.suppress(KeyError):  # an entry may be deleted meanwhile
            super().__setitem__(key, value)
            self.move_to_end(key)
            while len(self) > self._most:
                gone.append(self.popitem(last=False))
        for entry in gone:  # which may wait for locks of others
            self._dropped(*entry)
