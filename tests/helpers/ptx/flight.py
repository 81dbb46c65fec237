"""Copies, stores and products that a unit has started and not waited for.

A machine that is late lets them come as late as they may. Until then their destinations hold no numbers, so that who reads
before waiting, or starts anew what is still read, is found out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from ptx.memory import Fault
from ptx.watch import Watch

T = TypeVar("T")
Of = Callable[[np.ndarray], np.ndarray]  # some lanes of a register


@dataclass
class Groups(Generic[T]):
    """Work in groups that are waited for in order; `open` is not a group yet."""

    open: list[T] = field(default_factory=list)
    closed: list[list[T]] = field(default_factory=list)

    def commit(self) -> None:
        self.closed.append(self.open)
        self.open = []

    def take(self, left: int) -> list[T]:
        """The work of all groups but so many."""
        first = max(len(self.closed) - left, 0)
        found = [x for group in self.closed[:first] for x in group]
        self.closed = self.closed[first:]
        return found

    def due(self, left: int) -> bool:
        return any(self.closed[: max(len(self.closed) - left, 0)])

    def mapped(self, of: Callable[[T], T | None]) -> Groups[T]:
        def kept(group: list[T]) -> list[T]:
            return [y for x in group if (y := of(x)) is not None]

        return Groups(kept(self.open), [kept(g) for g in self.closed])


@dataclass(frozen=True)
class Work:
    """Copies or stores: what each of some threads does."""

    threads: np.ndarray
    lanes: tuple[np.ndarray, ...]
    run: Callable[..., None]

    def only(self, threads: np.ndarray) -> Work | None:
        which = np.isin(self.threads, threads)
        return Work(self.threads[which], tuple(x[which] for x in self.lanes), self.run) if which.any() else None


class Held:
    """Pieces of shared memory that a product reads, for as long as any part of a unit that parted has it under way."""

    def __init__(self, watch: Watch, at: list[np.ndarray], threads: np.ndarray) -> None:
        self.watch, self.at, self.parts = watch, at, 0
        for x in at:
            watch.hold(x, threads)

    def free(self) -> None:
        self.parts -= 1
        if self.parts <= 0:
            for x in self.at:
                self.watch.free(x)


@dataclass(frozen=True)
class Started:
    """A product: what it reads, and what stands in its registers until it is done."""

    product: Any
    a: tuple[np.ndarray, ...]
    b: np.ndarray
    before: tuple[np.ndarray, ...] | None
    marks: tuple[np.ndarray, ...]
    held: Held

    def of(self, lanes: Of) -> Started:
        self.held.parts += 1
        before = None if self.before is None else tuple(map(lanes, self.before))
        return replace(self, a=tuple(map(lanes, self.a)), b=lanes(self.b), before=before, marks=tuple(map(lanes, self.marks)))


@dataclass
class Flight:
    """All of a unit's."""

    copies: Groups[Work] = field(default_factory=lambda: Groups())
    stores: Groups[Work] = field(default_factory=lambda: Groups())
    products: Groups[Started] = field(default_factory=lambda: Groups())

    def of(self, threads: np.ndarray, lanes: Of) -> Flight:
        """The flight of some of the unit's threads."""
        copies, stores = (g.mapped(lambda w: w.only(threads)) for g in (self.copies, self.stores))
        return Flight(copies, stores, self.products.mapped(lambda s: s.of(lanes)))

    @staticmethod
    def together(flights: list[Flight], merged: Callable[[list[np.ndarray]], np.ndarray]) -> Flight:
        """The flight of several units that become one."""
        products = [f.products for f in flights]
        first = products[0]
        if any([len(g) for g in (p.open, *p.closed)] != [len(g) for g in (first.open, *first.closed)] for p in products):
            raise Fault("threads with different products under way go on together")

        def joined(parts: tuple[Started, ...]) -> Started:
            before = None
            if parts[0].before is not None:
                before = tuple(merged(list(x)) for x in zip(*(p.before or () for p in parts), strict=True))
            a, marks = (
                tuple(merged(list(x)) for x in zip(*v, strict=True)) for v in ([p.a for p in parts], [p.marks for p in parts])
            )
            held = parts[0].held
            held.parts -= len(parts) - 1
            return Started(parts[0].product, a, merged([p.b for p in parts]), before, marks, held)

        def zipped(groups: list[list[Started]]) -> list[Started]:
            return [joined(parts) for parts in zip(*groups, strict=True)]

        made = Groups(
            zipped([p.open for p in products]), [zipped(list(g)) for g in zip(*(p.closed for p in products), strict=True)]
        )
        return Flight(_aligned([f.copies for f in flights]), _aligned([f.stores for f in flights]), made)


def _aligned(several: list[Groups[Work]]) -> Groups[Work]:
    """The latest group is the latest of all."""
    most = max(len(g.closed) for g in several)
    closed: list[list[Work]] = [[] for _ in range(most)]
    for g in several:
        for i, group in enumerate(g.closed):
            closed[most - len(g.closed) + i] += group
    return Groups([w for g in several for w in g.open], closed)
