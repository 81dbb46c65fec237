"""Races: contenders take turns in short rounds, and what they took is compared round by round.

On a quiet machine the clock's low quartile counts. While other processes have the cores, only those calls count in which no
thread waited for a core; where these are few, that waiting is taken off the time of one thread. Several wait for each other as
well, which no counter tells from work, so there nothing is told apart. A difference counts only if chance hardly makes it. What
cannot be told apart is left to the order that the cost model gives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.hardware.load import Sample

CLEAN = 5  # calls of either contender that met no other process, from which the clock may be believed
WAITED, WAITED_S = 0.05, 10e-6  # of a call, and seconds, that threads may wait for a core in one that is clean
CHANCE = 0.05
APART = 1.25  # times as long, where a few rounds are to show it
SPREAD = 2.0  # upper over lower quartile of times, above which they are noise, whatever the load seems to be


@dataclass(frozen=True)
class Laps:
    """The calls of one contender.

    Attributes:
        wall_us: times by the clock, or by a GPU's own events; one a round, fewer if it sat out.
        own_us: the same but for what threads waited for a core.
        clean: of each, no thread waited for a core.
    """

    wall_us: tuple[float, ...] = ()
    own_us: tuple[float, ...] = ()
    clean: tuple[bool, ...] = ()

    @staticmethod
    def of(samples: Sequence[Sample]) -> Laps:
        """Laps from samples in the order of the rounds."""
        return Laps(
            tuple(1e6 * s.wall_s for s in samples),
            tuple(1e6 * s.own_s for s in samples),
            tuple(s.waited_s <= WAITED * s.wall_s + WAITED_S for s in samples),
        )

    def scaled(self, by: float) -> Laps:
        """The laps with their times multiplied."""
        return Laps(tuple(by * us for us in self.wall_us), tuple(by * us for us in self.own_us), self.clean)


@dataclass(frozen=True)
class Race:
    """The laps of contenders, by key.

    Attributes:
        laps: the calls of each.
        noise: why they are not reliable, "" if they are.
        exact: waiting could be told from work: one thread ran, or a GPU's own events say how long it worked.
    """

    laps: Mapping[int, Laps]
    noise: str = ""
    exact: bool = True

    def us(self, key: int) -> float:
        """The time in µs that counts for a contender; infinity for one that did not come back."""
        laps = self.laps[key]
        if not laps.wall_us:
            return math.inf
        if self.noise and sum(laps.clean) < CLEAN:
            return low_quartile(laps.own_us)
        return low_quartile([us for us, clean in zip(laps.wall_us, laps.clean, strict=True) if clean or not self.noise])

    def beats(self, one: int, other: int, band: float) -> bool:
        """Tell whether a contender is faster than another by more than `band`, and was in most rounds; where times are not
        reliable, in so many that chance hardly explains it."""
        a, b = self._paired(one, other)
        if not self.laps[one].wall_us or not self.laps[other].wall_us:
            return bool(self.laps[one].wall_us)
        if not a or not b:
            return False
        alone = min(len(a), len(b)) == 1
        if low_quartile(b) <= (1 + max(band, APART - 1 if alone and self.noise else 0.0)) * low_quartile(a):
            return False
        if alone:  # the other one was hopeless, and sat out
            return True
        rounds = min(len(a), len(b))
        won = sum(x < y for x, y in zip(a, b, strict=False))
        if not self.noise:
            return 2 * won > rounds
        return by_chance(won, rounds) <= CHANCE or (rounds >= 3 and max(a) * APART < min(b))

    def _paired(self, one: int, other: int) -> tuple[list[float], list[float]]:
        """Times of two contenders in the rounds that count for both."""
        a, b = self.laps[one], self.laps[other]
        if not self.noise:
            return list(a.wall_us), list(b.wall_us)
        both = [i for i, clean in enumerate(zip(a.clean, b.clean, strict=False)) if all(clean)]
        if len(both) >= CLEAN:
            return [a.wall_us[i] for i in both], [b.wall_us[i] for i in both]
        return (list(a.own_us), list(b.own_us)) if self.exact else ([], [])


def low_quartile(times: Sequence[float]) -> float:
    """The lower quartile of some times, the least of up to four: what else runs only ever adds to a time."""
    return sorted(times)[(len(times) - 1) // 4]


def scatter(what: str, times_us: Sequence[float]) -> str:
    """The words on times that lie too far apart to be believed, by their quartiles; "" of others, and of fewer than five."""
    ordered = sorted(times_us)
    if len(ordered) < 5 or ordered[3 * (len(ordered) - 1) // 4] <= SPREAD * ordered[(len(ordered) - 1) // 4]:
        return ""
    return f"{what} took from {ordered[0]:,.1f} to {ordered[-1]:,.1f} µs"


def by_chance(won: int, rounds: int) -> float:
    """The probability that one of two equals wins so many rounds or more (the sign test, one-sided)."""
    return sum(math.comb(rounds, k) for k in range(won, rounds + 1)) / 2**rounds
