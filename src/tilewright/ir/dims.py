"""Extents that are not known yet: a `Dim` with its bounds, and the whole numbers that arithmetic makes of it.

An `Extent` stands wherever an extent may: in types, in attributes, in anything computed from them. It is a polynomial in the
dims of one `Scope`, with whole coefficients; quotients and remainders that do not come out even are further unknowns in it.
Code written for numbers runs on it unchanged. A comparison is answered for the whole range where bounds or divisibility decide
it. Where they do not, it is answered for one example of each dim, its *hint*, and that answer is kept as a `Guard`: what was
made so far holds for those values alone for which all guards do. But two extents that are not equal for the hints are taken to
differ without a guard, whatever the values: what is right for extents that differ is right where they happen to agree, which
only would have allowed for more (an axis of one that is stretched, a slice that is everything). So 1 needs no program of its
own. Emptiness is no such case, and guarded. Whatever needs the number itself (`range`, NumPy, torch) gets
the hint's, and a guard that the extent equals it. So a symbol may be lost, but never unnoticed.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from tilewright.dtype import BY_NAME
from tilewright.errors import InputError, check_type

MOST = 1 << 20  # the upper bound of a dim that nobody gave one
USUAL = 256  # the same, where shapes are chosen to measure at
_WORDS = ("true", "false", "none", "nan", "inf", "div")  # of the graph's text
_FIRST_HINT = 29  # smaller numbers are ranks, heads and other constants of programs

Relation = Literal["==", "<"]
Monomial = tuple["Atom", ...]
Terms = tuple[tuple[Monomial, int], ...]


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


class Atom:
    """An unknown of a polynomial: a dim in its scope, or a quotient or remainder that does not come out even.

    Attributes:
        scope: where its guards are kept.
        key: orders the unknowns of a monomial; the text of it.
        names: the dims that it is made of.
        hint: its value for the hints.
        low, high: its bounds.
        multiple_of: a divisor of it.
    """

    __slots__ = ("_at", "_hash", "high", "hint", "key", "low", "multiple_of", "names", "scope")

    scope: Scope
    key: str
    names: frozenset[str]
    hint: int
    low: int
    high: int
    multiple_of: int

    def __init__(
        self,
        scope: Scope,
        key: str,
        names: Iterable[str],
        hint: int,
        bounds: tuple[int, int],
        at: Callable[[Mapping[str, int]], int],
        by: int = 1,
    ) -> None:
        self.scope, self.key, self.names, self.hint, self.multiple_of = scope, key, frozenset(names), hint, by
        self.low, self.high = bounds
        self._at, self._hash = at, hash((id(scope), key))

    def at(self, values: Mapping[str, int]) -> int:
        """Its value for values of the dims by name."""
        return self._at(values)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Atom) and self.scope is other.scope and self.key == other.key)

    def __hash__(self) -> int:
        return self._hash

    def __lt__(self, other: Atom) -> bool:
        return self.key < other.key


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
        a, b = extent_at(self.left, values), extent_at(self.right, values)
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
        guards: what holds for the hints, and is to hold for any values.
        differing: extents that were taken to differ.
        assumed: answers for extents that were taken to be more than one. 1 is no case of its own: what is right for several
            elements is right for one, but for a program that compares an extent with 1 or 2 itself.
        strict: extents that differ for the hints are guarded, too.
    """

    dims: dict[str, Dim] = field(default_factory=dict[str, Dim])
    hints: dict[str, int] = field(default_factory=dict[str, int])
    guards: dict[Guard | Finding, None] = field(default_factory=dict[Guard | Finding, None])
    differing: dict[Guard, None] = field(default_factory=dict["Guard", None])
    assumed: dict[Guard, None] = field(default_factory=dict["Guard", None])
    strict: bool = False
    _asked: dict[str, int] = field(default_factory=dict[str, int])
    _fixed: set[str] = field(default_factory=set[str])

    def expect(self, hints: Mapping[str, int], fixed: Iterable[str] = ()) -> Scope:
        """The scope itself, which takes these hints for dims yet to come; those that are `fixed` are these numbers."""
        self._asked.update(hints)
        self._fixed.update(fixed)
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
        low, high = -(-dim.low // by) * by, dim.high // by * by
        if low == high:
            self.hints[dim.name] = low
            return low
        if dim.name not in self.hints:
            asked = self._asked.get(dim.name)
            self.hints[dim.name] = asked if asked is not None and asked in dim else _hint(dim, self.hints.values())
        name = dim.name
        if name in self._fixed:
            value = self.hints[name]
            if not any(str(g) == f"{name} is {value}" for g in self.guards):
                self.found(f"{name} is {value}", lambda values: values[name] == value)
            return value
        atom = Atom(self, name, (name,), self.hints[name], (low, high), lambda values: values[name], by)
        return _made(((((atom,), 1)),))

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
            found[name] = min(max(value, -(-dim.low // by) * by), dim.high // by * by)
        return found

    def failing(self, values: Mapping[str, int]) -> list[Guard | Finding]:
        """The guards that do not hold for values of the dims by name."""
        return [g for g in self.guards if not g.holds(values)]

    def found(self, what: str, holds: Callable[[Mapping[str, int]], bool]) -> None:
        """Keep a fact that was found out for the hints."""
        self.guards[Finding(what, holds)] = None

    def compare(self, relation: Relation, a: int, b: int) -> bool:
        """Answer a comparison, for the whole range if that is decided, else for the hints, with a guard."""
        answer, exact = _decided(relation, a, b), _exact.get()
        if answer is None and not exact and (answer := _decided(relation, a, b, several=True)) is not None:
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
            (self.differing if free else self.guards).setdefault(Guard(relation, a, b, answer))
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


class _Extent:
    """A polynomial in the dims of a scope."""

    __slots__ = ("__weakref__", "_hash", "_high", "_hint", "_low", "scope", "terms")

    scope: Scope
    terms: Terms

    def __new__(cls, *args: object) -> _Extent:
        raise TypeError("an Extent is made by arithmetic on what Scope.extent gives")

    @property
    def hint(self) -> int:
        """Its value for the hints."""
        return self._hint

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the greatest that it may be; not always as narrow as can be."""
        return self._low, self._high

    def at(self, values: Mapping[str, int]) -> int:
        """Its value for values of the dims by name."""
        return sum(c * math.prod(a.at(values) for a in m) for m, c in self.terms)

    def __index__(self) -> int:
        self.scope.guards.setdefault(Guard("==", cast("int", self), self._hint, True))
        return self._hint

    __int__ = __index__
    __trunc__ = __index__

    def __float__(self) -> float:
        return float(self.__index__())

    def __bool__(self) -> bool:
        return not self.scope.compare("==", cast("int", self), 0)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, _Extent):
            return self.terms == other.terms or self.scope.compare("==", cast("int", self), cast("int", other))
        return self.scope.compare("==", cast("int", self), cast("int", other)) if _is_int(other) else NotImplemented

    def __lt__(self, other: int) -> bool:
        return self.scope.compare("<", cast("int", self), other) if _takes(other) else NotImplemented

    def __gt__(self, other: int) -> bool:
        return self.scope.compare("<", other, cast("int", self)) if _takes(other) else NotImplemented

    def __le__(self, other: int) -> bool:
        return not self.scope.compare("<", other, cast("int", self)) if _takes(other) else NotImplemented

    def __ge__(self, other: int) -> bool:
        return not self.scope.compare("<", cast("int", self), other) if _takes(other) else NotImplemented

    def __add__(self, other: int) -> int:
        return _sum(self, other, 1) if _takes(other) else NotImplemented

    __radd__ = __add__

    def __sub__(self, other: int) -> int:
        return _sum(self, other, -1) if _takes(other) else NotImplemented

    def __rsub__(self, other: int) -> int:
        return _sum(-self, other, 1) if _takes(other) else NotImplemented

    def __neg__(self) -> int:
        return _made(tuple((m, -c) for m, c in self.terms))

    def __pos__(self) -> int:
        return cast("int", self)

    def __abs__(self) -> int:
        return -self if cast("int", self) < 0 else cast("int", self)

    def __mul__(self, other: int) -> int:
        return _product(self, other) if _takes(other) else NotImplemented

    __rmul__ = __mul__

    def __pow__(self, exponent: int) -> int:
        return math.prod([cast("int", self)] * exponent)

    def __floordiv__(self, other: int) -> int:
        return _divided(cast("int", self), other)[0] if _takes(other) else NotImplemented

    def __rfloordiv__(self, other: int) -> int:
        return _divided(other, cast("int", self))[0] if _takes(other) else NotImplemented

    def __mod__(self, other: int) -> int:
        return _divided(cast("int", self), other)[1] if _takes(other) else NotImplemented

    def __rmod__(self, other: int) -> int:
        return _divided(other, cast("int", self))[1] if _takes(other) else NotImplemented

    def __divmod__(self, other: int) -> tuple[int, int]:
        return _divided(cast("int", self), other) if _takes(other) else NotImplemented

    def __rdivmod__(self, other: int) -> tuple[int, int]:
        return _divided(other, cast("int", self)) if _takes(other) else NotImplemented

    def __truediv__(self, other: float) -> float:
        return self.__index__() / other

    def __rtruediv__(self, other: float) -> float:
        return other / self.__index__()

    def __rshift__(self, by: int) -> int:
        return cast("int", self) // (1 << by)

    def __lshift__(self, by: int) -> int:
        return cast("int", self) * (1 << by)

    def __and__(self, other: int) -> int:
        return self.__index__() & operator.index(other)

    __rand__ = __and__

    def __or__(self, other: int) -> int:
        return self.__index__() | operator.index(other)

    __ror__ = __or__

    def __ceil__(self) -> int:
        return cast("int", self)

    __floor__ = __ceil__

    def __round__(self, digits: int | None = None) -> int:
        return cast("int", self)

    def bit_length(self) -> int:
        return self.__index__().bit_length()

    def __deepcopy__(self, memo: object) -> _Extent:
        return self

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        raise TypeError(f"the open extent {self} cannot leave its process")

    def __str__(self) -> str:
        text = ""
        for monomial, c in self.terms:
            product = "*".join(a.key for a in monomial)
            one = product if abs(c) == 1 and monomial else f"{product}*{abs(c)}" if monomial else str(abs(c))
            text += (" - " if text else "-") + one if c < 0 else (" + " if text else "") + one
        return text

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(str(self), "" if spec in (",", "d", "n") else spec)


if TYPE_CHECKING:

    class Extent(int):
        """An open extent, which type checkers take for the number that it stands for."""

        scope: Scope
        terms: Terms
        hint: int
        bounds: tuple[int, int]

        def at(self, values: Mapping[str, int]) -> int: ...
else:
    Extent = _Extent


def _is_int(value: object) -> bool:
    return isinstance(value, (int, _Extent))


def _takes(value: object) -> bool:
    return isinstance(value, (int, _Extent)) or hasattr(value, "__index__")


def hint_of(extent: int) -> int:
    """An extent's value for the hints: itself, if it is a number. No guard is left: for what decides nothing but speed."""
    return extent.hint if isinstance(extent, Extent) else extent


def bounds_of(extent: int) -> tuple[int, int]:
    """The least and the greatest that an extent may be."""
    return extent.bounds if isinstance(extent, Extent) else (extent, extent)


def extent_at(extent: int, values: Mapping[str, int]) -> int:
    """An extent for values of its dims by name: itself, if it is a number."""
    return extent.at(values) if isinstance(extent, Extent) else extent


def is_open(extents: Iterable[object]) -> bool:
    """Tell whether any of these is an extent that is not known yet."""
    return any(isinstance(e, _Extent) for e in extents)


def plain_index(value: Any) -> int:
    """`operator.index`, but an open extent stays one.

    Raises:
        TypeError: it is no whole number.
    """
    return value if type(value) is int or isinstance(value, Extent) else int(operator.index(value))


def _terms(value: int) -> Terms:
    if isinstance(value, Extent):
        return value.terms
    value = operator.index(value)
    return (((), value),) if value else ()


def _made(terms: Terms) -> int:
    """The extent of these terms: no monomial twice, no coefficient 0; a number, if they have no unknowns."""
    if not terms:
        return 0
    if len(terms) == 1 and not terms[0][0]:
        return terms[0][1]
    made = object.__new__(_Extent)
    made.terms = tuple(sorted(terms, key=lambda t: (-len(t[0]), [a.key for a in t[0]])))
    scopes = {a.scope for m, _ in terms for a in m}
    if len(scopes) > 1:
        raise InputError(
            "extents of two readings meet", where=str(made), hint="read both programs with the same LoadOptions.scope"
        )
    (made.scope,) = scopes
    made._hash = hash(made.terms)  # pyright: ignore[reportPrivateUsage]
    made._hint = sum(c * math.prod(a.hint for a in m) for m, c in terms)  # pyright: ignore[reportPrivateUsage]
    low = high = 0
    for monomial, c in terms:
        ends = (1, 1)
        for a in monomial:
            corners = [x * y for x in ends for y in (a.low, a.high)]
            ends = (min(corners), max(corners))
        low, high = low + min(c * ends[0], c * ends[1]), high + max(c * ends[0], c * ends[1])
    made._low, made._high = low, high  # pyright: ignore[reportPrivateUsage]
    return cast("int", made)


def _collected(terms: Iterable[tuple[Monomial, int]]) -> int:
    total: dict[Monomial, int] = {}
    for m, c in terms:
        total[m] = total.get(m, 0) + c
    return _made(tuple((m, c) for m, c in total.items() if c))


def _sum(a: Any, b: int, sign: int) -> int:
    return _collected((*a.terms, *((m, sign * c) for m, c in _terms(b))))


def _product(a: Any, b: int) -> int:
    return _collected((tuple(sorted((*m, *n))), c * d) for m, c in a.terms for n, d in _terms(b))


def _divided(a: int, b: int) -> tuple[int, int]:
    """The quotient, rounded down, and the remainder."""
    if type(b) is int and b == 0:
        raise ZeroDivisionError("division by zero")
    if isinstance(b, Extent):
        if not _terms(a):
            return 0, 0
        exact = _exactly(a, b)
        if exact is not None:
            return exact, 0
        return _atom("div", a, b), _atom("%", a, b)
    if b < 0:
        q, r = _divided(-a, -b)
        return q, -r
    whole: list[tuple[Monomial, int]] = []
    rest: list[tuple[Monomial, int]] = []
    for m, c in _terms(a):
        whole.append((m, c // b))
        if c % b:
            rest.append((m, c % b))
    left = _collected(rest)
    if not isinstance(left, Extent):  # 0 <= left < b
        return _collected((m, c) for m, c in whole if c), left
    even = all(c * math.prod(x.multiple_of for x in m) % b == 0 for m, c in left.terms)
    quotient = _collected((*((m, c) for m, c in whole if c), *_terms(_atom("div", left, b))))
    return quotient, 0 if even else _atom("%", left, b)


def _exactly(a: int, b: Extent) -> int | None:
    """a / b, if that is a polynomial: b is one term, or a a multiple of it."""
    if len(b.terms) > 1:
        if not isinstance(a, Extent) or len(a.terms) < len(b.terms):
            return None
        quotient, left = 0, cast("int", a)
        for _ in range(len(a.terms)):  # long division by the leading term
            if not isinstance(left, Extent):
                break
            one = _exactly(_made((left.terms[0],)), cast("Extent", _made((b.terms[0],))))
            if one is None:
                return None
            quotient, left = quotient + one, left - one * b
        return quotient if not isinstance(left, Extent) and left == 0 else None
    below, divisor = next(iter(b.terms))
    found: list[tuple[Monomial, int]] = []
    for m, c in _terms(a):
        over = list(m)
        for atom in below:
            if atom not in over:
                return None
            over.remove(atom)
        if c % divisor:
            return None
        found.append((tuple(over), c // divisor))
    return _collected(found)


def _atom(sign: Literal["div", "%"], a: int, b: int) -> int:
    """A quotient, rounded down, or a remainder as an unknown."""
    scope = (a if isinstance(a, Extent) else cast("Extent", b)).scope
    work = operator.floordiv if sign == "div" else operator.mod
    (al, ah), (bl, bh) = bounds_of(a), bounds_of(b)
    if bl <= 0:
        scope.compare("<", 0, b)
        bl = max(bl, 1)
    corners = [x // y for x in (al, ah) for y in (bl, bh)]
    bounds = (min(corners), max(corners)) if sign == "div" else (0, min(bh - 1, ah) if al >= 0 else bh - 1)
    if bounds[0] == bounds[1]:
        return bounds[0]
    shown = [f"({x})" if isinstance(x, Extent) and not str(x).isidentifier() else str(x) for x in (a, b)]
    key = f"({shown[0]}{sign if sign == '%' else ' div '}{shown[1]})"
    atom = Atom(
        scope,
        key,
        {*names_of(a), *names_of(b)},
        work(hint_of(a), hint_of(b)),
        bounds,
        lambda values: work(extent_at(a, values), extent_at(b, values)),
    )
    return _made(((((atom,), 1)),))


def _decided(relation: Relation, a: int, b: int, *, several: bool = False) -> bool | None:
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
        gains, losses = (_made(tuple((m, c * s) for m, c in less if c * s > 0)) for s in (1, -1))
        return _decided(relation, gains, losses, several=several)
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


def _is_zero(extent: int) -> bool:
    return type(extent) is int and extent == 0


def _is_one(extent: int, one: int) -> bool:
    return type(one) is int and one == 1 and isinstance(extent, Extent) and extent.bounds[0] == 1


def slice_bounds(start: int | None, stop: int | None, extent: int) -> tuple[int, int]:
    """The first element that Python's slice with a positive step takes of an axis, and the end, which is not before it."""
    first, last = (min(max(i + extent if i < 0 else i, 0), extent) for i in (start or 0, extent if stop is None else stop))
    return first, max(first, last)


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
                hint = "compile with wider bounds (dims=…)"
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


def names_of(extent: int) -> list[str]:
    """The dims that an extent is made of, by name."""
    found = {n for m, _ in extent.terms for a in m for n in a.names} if isinstance(extent, Extent) else set[str]()
    return sorted(found)


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
