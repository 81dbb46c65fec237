"""A second stream of each virtual rank, for `candidates/triton/runtime/copies.py`: its copies are queued beside launches, and
run in turns with them (`launch.together`)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from ptx.memory import Fault

MOST_ROUNDS = 200_000  # that one waits for another stream


class Mark:
    """A place in a stream."""

    def __init__(self) -> None:
        self.come = False

    def rounds(self) -> Iterator[None]:
        self.come = True
        yield


class Await:
    """A stream's wait for a place in another one."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark

    def rounds(self) -> Iterator[None]:
        for _ in range(MOST_ROUNDS):
            if self.mark.come:
                return
            yield
        raise Fault("a stream waits for ever for another one")


class Copy:
    """A copy of bytes, in parts between which others run."""

    def __init__(self, to: int, of: int, count: int) -> None:
        self.to, self.of, self.count = to, of, count

    def rounds(self) -> Iterator[None]:
        for part in range(3):
            first, last = part * self.count // 3, (part + 1) * self.count // 3
            ctypes.memmove(self.to + first, self.of + first, last - first)
            yield


class Lane:
    """The stand-in for a second stream of the rank whose launches a driver queues."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.queue = driver, list[Any]()

    def follow(self) -> None:
        mark = Mark()
        self.driver.queue.append(mark)
        self.queue.append(Await(mark))

    def join(self) -> None:
        mark = Mark()
        self.queue.append(mark)
        self.driver.queue.append(Await(mark))

    def copy(self, to: int, of: int, count: int) -> None:
        self.queue.append(Copy(to, of, count))

    def here(self, to: torch.Tensor, of: torch.Tensor) -> None:
        assert to.is_contiguous() and of.is_contiguous() and to.nbytes == of.nbytes
        self.driver.queue.append(Copy(to.data_ptr(), of.data_ptr(), to.nbytes))
