"""The connection of ranks along some axes of a mesh, as data: reports have it, too, and import no torch for it."""

from __future__ import annotations

import msgspec


class Link(msgspec.Struct, frozen=True):
    """The connection of the ranks along some axes of a mesh, as one operation between them finds it.

    Attributes:
        operation: its name.
        over: the axes, by commas.
        ranks: how many ranks take part in it.
        latency_us: the slowest rank's time when next to nothing travels.
        gbps: bytes that each rank receives at least, by the time beyond that; null where more bytes took no longer.
    """

    operation: str
    over: str
    ranks: int
    latency_us: float
    gbps: float | None
