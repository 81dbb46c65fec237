"""Comparisons of extents whose answer bounds or divisibility decide for the whole range."""

from __future__ import annotations

import math
from typing import Literal

from tilewright.ir.extent import Atom, Extent, Monomial, bounds_of, extent_of

Relation = Literal["==", "<"]


def decided(relation: Relation, a: int, b: int, *, several: bool = False) -> bool | None:
    """The answer that holds for the whole range; None if there is none. `several`: an extent of 1 or more is more than one."""
    apart = a - b
    if not isinstance(apart, Extent):
        return apart == 0 if relation == "==" else apart < 0
    common = [x for x in apart.terms[0][0] if x.low > 0 and all(x in m for m, _ in apart.terms)]
    by = math.gcd(*(c for _, c in apart.terms))
    if (common or by > 1) and apart.terms != (
        ((*common[:1],), 1),
    ):  # which are positive: the other factor's sign is that of all
        less = tuple((_without(m, common[0]) if common else m, c // by) for m, c in apart.terms)
        gains, losses = (extent_of(tuple((m, c * s) for m, c in less if c * s > 0)) for s in (1, -1))
        return decided(relation, gains, losses, several=several)
    low, high = apart.bounds
    if relation == "==":
        if low > 0 or high < 0:
            return False
        constant = next((c for m, c in apart.terms if not m), 0)
        by = math.gcd(*(c * math.prod(x.multiple_of for x in m) for m, c in apart.terms if m))
        beside = apart - constant if constant == -1 else constant - apart  # of which it is asked whether it is 1
        return False if constant % by or (several and abs(constant) == 1 and bounds_of(beside)[0] == 1) else None
    if high < 0:
        return True
    if low >= 0:
        return False
    if several and type(b) is int and b == 2 and bounds_of(a)[0] == 1:
        return False
    return True if several and _is_one(b, a) else None


def _without(monomial: Monomial, atom: Atom) -> Monomial:
    at = monomial.index(atom)
    return monomial[:at] + monomial[at + 1 :]


def _is_one(extent: int, one: int) -> bool:
    return type(one) is int and one == 1 and isinstance(extent, Extent) and extent.bounds[0] == 1
