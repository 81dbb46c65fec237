"""Work in several threads of Python at once."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Run `work(i)` for every i below `count`, each in a thread of its own, to the end of all of them.

    Raises:
        BaseException: the first that a thread raised.
    """
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
