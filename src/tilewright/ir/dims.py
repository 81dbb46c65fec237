"""Extents that are not known yet: dims with their bounds, and the guards under which what was made with them holds.

What arithmetic makes of dims is an `Extent` (`extent.py`). A comparison of extents is answered for the whole range where bounds
or divisibility decide it (`decide.py`). Where they do not, it is answered for one example of each dim, its *hint*, and that
answer is kept as a `Guard`: what was made so far holds for those values alone for which all guards do. But two extents that are
not equal for the hints are taken to differ without a guard, whatever the values: what is right for extents that differ is right
where they happen to agree, which only would have allowed for more (an axis of one that is stretched, a slice that is
everything). So 1 needs no program of its own. Emptiness is no such case, and guarded.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import cast

from tilewright.dtype import BY_NAME
from tilewright.errors import InputError, check_type
from tilewright.ir.decide import Relation, decided
from tilewright.ir.extent import Atom, Extent, extent_at, extent_of, hint_of, names_of, terms_of
from tilewright.sizes import round_up

MOST = 1 << 20  # the upper bound of a dim that nobody gave one
USUAL = 256  # the same, where shapes are chosen to measure at
_WORDS = ("true", "false", "none", "nan", "inf", "div")  # of the graph's text
_FIRST_HINT = 29  # smaller numbers are ranks, heads and other constants of programs


@dataclass(frozen=True)
class Dim:
    """An extent that is left open: any multiple of `multiple_of` from `low` to `high`.

    Attributes:
        name: what programs, texts and messages call it.
        low, high: the least and the greatest value, both included.
        multiple_of: every value is a multiple of it.

    Raises:
        InputError: no number lies within its bounds, or a bound is negative.
    """

    name: str
    low: int = 1
    high: int = MOST
    multiple_of: int = 1

    def __post_init__(self) -> None:
        check_type(self.name, str, "the name of a dim", '"batch"')
        if spelt(self.name) != self.name:
            raise InputError(f"{self.name!r} cannot name a dim", where="the name of a dim", hint=f"{spelt(self.name)!r}")
        for given in (self.low, self.high, self.multiple_of):
            check_type(given, int, f"dim {self.name!r}", 'Dim("batch", 1, 64)')
        by = self.multiple_of
        if not 0 <= self.low <= self.high or by < 1 or self.high // by * by < self.low:
            what = f"no extent lies from {self.low} to {self.high}" + (f" in steps of {by}" if by > 1 else "")
            raise InputError(what, where=f"dim {self.name!r}", hint='Dim("batch", 1, 64)')

    def __str__(self) -> str:
        by = f" multiple_of={self.multiple_of}" if self.multiple_of > 1 else ""
        return f"{self.name} {self.low}..{self.high}{by}"

    def __contains__(self, value: int) -> bool:
        return self.low <= value <= self.high and value % self.multiple_of == 0


def as_dim(name: str, given: object) -> Dim:
    """The dim that a user gives for a name of the program's: a `Dim`, `(low, high)`, `(low, high, multiple_of)`, or the upper
    bound alone.

    Raises:
        InputError: it is none of these.
    """
    if isinstance(given, Dim):
        return given
    name = spelt(name)
    if isinstance(given, int) and not isinstance(given, bool):
        return Dim(name, 1, given)
    parts = tuple(cast("Iterable[int]", given)) if isinstance(given, (tuple, list, range)) else ()
    if len(parts) not in (2, 3) or not all(type(p) is int for p in parts):
        raise InputError(f"{given!r} gives no bounds", where=f"dim {name!r}", hint='dims={"batch": (1, 64)}')
    return Dim(name, *parts)


def spelt(name: str) -> str:
    """A name as texts have it: letters, digits and "_" alone, and neither a type nor another word."""
    plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return plain if re.match(r"[A-Za-z_]", plain) and plain not in BY_NAME and plain not in _WORDS else f"d_{plain}"


@dataclass(frozen=True)
class Guard:
    """An answer that was given for the hints.

    Attributes:
        relation: "==" or "<".
        left, right: what was compared.
        answer: what was answered.
    """

    relation: Relation
    left: int
    right: int
    answer: bool

    def holds(self, values: Mapping[str, int]) -> bool:
        """Tell whether the answer is right for values of the dims by name."""
        try:
            a, b = extent_at(self.left, values), extent_at(self.right, values)
        except ZeroDivisionError:  # of what a guard before this one has to be more than 0
            return False
        return (a == b if self.relation == "==" else a < b) is self.answer

    def __str__(self) -> str:
        shown = {("==", True): "==", ("==", False): "!=", ("<", True): "<", ("<", False): ">="}[self.relation, self.answer]
        return f"{self.left} {shown} {self.right}"


@dataclass(frozen=True, eq=False)
class Finding:
    """A fact that code found out for the hints, and that is found out again for other values.

    Attributes:
        what: a sentence, for reports.
        holds: tells whether it is a fact for values of the dims by name.
    """

    what: str
    holds: Callable[[Mapping[str, int]], bool]

    def __str__(self) -> str:
        return self.what


@dataclass(eq=False)
class Scope:
    """The dims of one reading of one program, and the guards that reading and rewriting it left. Scopes share no extents, so
    guards are never lost because another program asked the same before.

    Attributes:
        dims: by name, in the order in which they came.
        hints: an example of each.
        guards: what holds for the hints, and is to hold for any values, with the operation or rule that asked (`asking`).
        differing: extents that were taken to differ.
        assumed: answers for extents that were taken to be more than one. 1 is no case of its own: what is right for several
            elements is right for one, but for a program that compares an extent with 1 or 2 itself.
        strict: extents that differ for the hints are guarded, too.
        fixed: dims that are numbers, those of their hints.
        asked: hints for dims yet to come.
    """

    dims: dict[str, Dim] = field(default_factory=dict[str, Dim])
    hints: dict[str, int] = field(default_factory=dict[str, int])
    guards: dict[Guard | Finding, str | None] = field(default_factory=dict["Guard | Finding", "str | None"])
    differing: dict[Guard, None] = field(default_factory=dict["Guard", None])
    assumed: dict[Guard, None] = field(default_factory=dict["Guard", None])
    strict: bool = False
    fixed: set[str] = field(default_factory=set[str])
    asked: dict[str, int] = field(default_factory=dict[str, int])
    _numbers: dict[Guard, str | None] = field(default_factory=dict["Guard", "str | None"])  # that code asked for

    def expect(self, hints: Mapping[str, int], fixed: Iterable[str] = ()) -> Scope:
        """The scope itself, which takes these hints for dims yet to come; those that are `fixed` are these numbers."""
        self.asked.update(hints)
        self.fixed.update(fixed)
        return self

    def extent(self, dim: Dim) -> int:
        """The extent that a dim is; a number, if its bounds leave but one.

        Raises:
            InputError: a dim of that name has other bounds.
        """
        known = self.dims.setdefault(dim.name, dim)
        if known != dim:
            what = f"it is given as {known} and as {dim}"
            raise InputError(what, where=f"dim {dim.name!r}", hint="another name for one of them")
        by = dim.multiple_of
        low, high = round_up(dim.low, by), dim.high // by * by
        if low == high:
            self.hints[dim.name] = low
            return low
        if dim.name not in self.hints:
            asked = self.asked.get(dim.name)
            self.hints[dim.name] = asked if asked is not None and asked in dim else _hint(dim, self.hints.values())
        name = dim.name
        if name in self.fixed:
            value = self.hints[name]
            if not any(str(g) == f"{name} is {value}" for g in self.guards):
                self.found(f"{name} is {value}", lambda values: values[name] == value)
            return value
        atom = Atom(self, name, (name,), self.hints[name], (low, high), lambda values: values[name], by)
        return extent_of(((((atom,), 1)),))

    @property
    def words(self) -> str:
        """The bounds of the dims, and the guards, each once."""
        ranges = ", ".join(map(str, self.dims.values()))
        guards = " and ".join(dict.fromkeys(map(str, self.guards)))
        return f"for {ranges}" + (f", where {guards}" if guards else "")

    def within(self, part: float) -> dict[str, int]:
        """A value in each dim's range (the usual one, if it has no upper bound): at so much of its logarithm, from 0 to 1."""
        found: dict[str, int] = {}
        for name, dim in self.dims.items():
            by = dim.multiple_of
            high = dim.high if dim.high < MOST else max(dim.low, USUAL)
            value = round(max(dim.low, 1) ** (1 - part) * max(high, 1) ** part / by) * by
            found[name] = min(max(value, round_up(dim.low, by)), dim.high // by * by)
        return found

    @property
    def numbers(self) -> list[str]:
        """A sentence for each set of dims that was asked for its number, so that what was made holds for one value alone."""
        asked: dict[str, dict[str, None]] = {}
        for guard, who in self._numbers.items():
            atoms = {a.key for m, _ in terms_of(guard.left) for a in m}
            if atoms and atoms <= self.dims.keys():
                asked.setdefault(" and ".join(sorted(atoms)), {})[who or "the program"] = None
        return [
            f"for each {names} it is read and rewritten anew: {_first_few([*who])} cannot take an open extent there"
            for names, who in asked.items()
        ]

    def failing(self, values: Mapping[str, int]) -> list[Guard | Finding]:
        """The guards that do not hold for values of the dims by name."""
        return [g for g in self.guards if not g.holds(values)]

    def number(self, extent: int, value: int) -> int:
        """Give the number that code asks of an extent, with a guard that the extent is it."""
        guard = Guard("==", extent, value, True)
        self.guards.setdefault(guard, _asking.get())
        self._numbers.setdefault(guard, _asking.get())
        return value

    def found(self, what: str, holds: Callable[[Mapping[str, int]], bool]) -> None:
        """Keep a fact that was found out for the hints."""
        self.guards[Finding(what, holds)] = _asking.get()

    def compare(self, relation: Relation, a: int, b: int) -> bool:
        """Answer a comparison, for the whole range if that is decided, else for the hints, with a guard."""
        answer, exact = decided(relation, a, b), _exact.get()
        if answer is None and not exact and (answer := decided(relation, a, b, several=True)) is not None:
            self.assumed.setdefault(Guard(relation, a, b, answer))
        if answer is None:
            one, other = hint_of(a), hint_of(b)
            answer = one == other if relation == "==" else one < other
            free = (
                not (self.strict or exact)
                and relation == "=="
                and not answer
                and 0 not in (one, other)
                and not _is_zero(a)
                and not _is_zero(b)
            )
            if free:
                self.differing.setdefault(Guard(relation, a, b, answer))
            else:
                self.guards.setdefault(Guard(relation, a, b, answer), _asking.get())
        return answer

    def __deepcopy__(self, memo: object) -> Scope:
        return self


_exact: ContextVar[bool] = ContextVar("exact", default=False)


@contextlib.contextmanager
def exactly() -> Generator[None]:
    """A context in which no comparison is taken for granted: for a program's own ones, whose answer is a value."""
    token = _exact.set(True)
    try:
        yield
    finally:
        _exact.reset(token)


_asking: ContextVar[str | None] = ContextVar("asking", default=None)


def asking(who: str | None) -> None:
    """Say which operation is read, or which rule is applied, from now on: guards that it leaves are told with its name."""
    _asking.set(who)


def _is_zero(extent: int) -> bool:
    return type(extent) is int and extent == 0


def _first_few(names: Sequence[str]) -> str:
    more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def _hint(dim: Dim, taken: Iterable[int]) -> int:
    """An example of a dim: a prime, unlike others' and unlike what constants usually are, where its bounds leave one."""
    by, used = dim.multiple_of, set(taken)
    low, high = -(-dim.low // by), dim.high // by
    first = max(low, 2) if high < _FIRST_HINT * 2 else max(low, _FIRST_HINT)
    near = [k for k in range(first, min(high, first + 400) + 1) if k * by not in used]
    primes = [k for k in near if all(k % p for p in range(2, math.isqrt(k) + 1))]
    if high < _FIRST_HINT * 2:  # few to choose from: the larger are less often a constant
        primes.reverse()
    return (primes or near or [high])[0] * by


def named(extent: int) -> str | None:
    """The name of the dim that an extent is; None for a number, and for what is computed from dims."""
    if isinstance(extent, Extent) and len(extent.terms) == 1:
        monomial, c = next(iter(extent.terms))
        if c == 1 and len(monomial) == 1 and monomial[0].key in extent.scope.dims:
            return monomial[0].key
    return None


def scope_of(extents: Iterable[int]) -> Scope | None:
    """The scope of the first open extent among these."""
    return next((e.scope for e in extents if isinstance(e, Extent)), None)


def solve(shapes: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> dict[str, int]:
    """The values of dims for which arrays have these shapes.

    Args:
        shapes: of each input its name, its extents, and its array's shape, of as many axes.

    Returns:
        dict[str, int]: every dim that is an axis by itself, or the only unknown of one, by name.

    Raises:
        InputError: a number differs, a value lies outside its dim's bounds, or an axis differs from what the others make it.
    """
    values: dict[str, int] = {}
    later: list[tuple[str, int, Extent, int]] = []
    for name, extents, shape in shapes:
        for axis, (extent, value) in enumerate(zip(extents, shape, strict=True)):
            if not isinstance(extent, Extent):
                if extent != value:
                    raise InputError(f"axis {axis} is {value}, the program has {extent}", where=f"input {name!r}")
                continue
            called = named(extent)
            if called is None or called in values:
                later.append((name, axis, extent, value))
                continue
            dim = extent.scope.dims[called]
            if value not in dim:
                hint = "compile with wider bounds"
                raise InputError(f"axis {axis} is {value}, outside {dim}", where=f"input {name!r}", hint=hint)
            values[called] = value
    for name, axis, extent, value in later:
        unknown = [n for n in names_of(extent) if n not in values]
        found = _root(extent, unknown[0], values, value) if len(unknown) == 1 else None
        if found is not None:
            values[unknown[0]] = found
        elif unknown:
            raise InputError(f"axis {axis}, {extent}, leaves {', '.join(unknown)} open", where=f"input {name!r}")
        if extent.at(values) != value:
            what = f"axis {axis} is {value}, and {extent} is {extent.at(values)} here"
            raise InputError(what, where=f"input {name!r}", hint=", ".join(f"{n} is {v}" for n, v in values.items()))
    return values


def _root(extent: Extent, name: str, values: Mapping[str, int], wanted: int) -> int | None:
    """The value of one dim for which an extent, which grows with it, is `wanted`; None if there is none."""
    dim = extent.scope.dims[name]
    low, high = dim.low, dim.high
    while low < high:
        middle = (low + high) // 2
        if extent.at({**values, name: middle}) < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low in dim and extent.at({**values, name: low}) == wanted else None
