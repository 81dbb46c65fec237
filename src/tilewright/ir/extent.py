"""The whole numbers that arithmetic makes of dims.

An `Extent` stands wherever an extent may: in types, in attributes, in anything computed from them. It is a polynomial in the
dims of one scope (`dims.py`), with whole coefficients; quotients and remainders that do not come out even are further unknowns
in it. Code written for numbers runs on it unchanged. Its scope answers comparisons. Whatever needs the number itself (`range`,
NumPy, torch) gets the hint's, and a guard that the extent equals it. So a symbol may be lost, but never unnoticed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast

from tilewright.errors import InputError

if TYPE_CHECKING:
    from tilewright.ir.dims import Scope

Monomial = tuple["Atom", ...]
Terms = tuple[tuple[Monomial, int], ...]


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
        return self.scope.number(cast("int", self), self._hint)

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
        if isinstance(other, float) and other.is_integer():
            other = int(other)
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
        return extent_of(tuple((m, -c) for m, c in self.terms))

    def __pos__(self) -> int:
        return cast("int", self)

    def __abs__(self) -> int:
        return -self if cast("int", self) < 0 else cast("int", self)

    def __mul__(self, other: int) -> int:
        return _product(self, other) if _takes(other) else NotImplemented

    __rmul__ = __mul__

    def __pow__(self, exponent: int) -> int:
        return math.prod([cast("int", self)] * exponent) if exponent >= 0 else self.__index__() ** exponent

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
        return cast("int", self) if digits is None or digits >= 0 else round(self.__index__(), digits)

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


def divides(by: int, extent: int) -> bool:
    """Tell whether an extent is a multiple of a number, whatever its dims are; no guard is left."""
    rest = extent % by
    return not isinstance(rest, Extent) and rest == 0


def is_open(extents: Iterable[object]) -> bool:
    """Tell whether any of these is an extent that is not known yet."""
    return any(isinstance(e, _Extent) for e in extents)


def plain_index(value: Any) -> int:
    """`operator.index`, but an open extent stays one.

    Raises:
        TypeError: it is no whole number.
    """
    return value if type(value) is int or isinstance(value, Extent) else int(operator.index(value))


def terms_of(value: int) -> Terms:
    """The monomials of an extent, or of a number, with their coefficients; none for 0."""
    if isinstance(value, Extent):
        return value.terms
    value = operator.index(value)
    return (((), value),) if value else ()


def extent_of(terms: Terms) -> int:
    """The extent of these terms: no monomial twice, no coefficient 0; a number, if they have no unknowns.

    Raises:
        InputError: they are of two scopes.
    """
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
    return extent_of(tuple((m, c) for m, c in total.items() if c))


def _sum(a: Any, b: int, sign: int) -> int:
    return _collected((*a.terms, *((m, sign * c) for m, c in terms_of(b))))


def _product(a: Any, b: int) -> int:
    return _collected((tuple(sorted((*m, *n))), c * d) for m, c in a.terms for n, d in terms_of(b))


def _divided(a: int, b: int) -> tuple[int, int]:
    """The quotient, rounded down, and the remainder."""
    if type(b) is int and b == 0:
        raise ZeroDivisionError("division by zero")
    if isinstance(b, Extent):
        if b.bounds[0] <= 0 and not b.scope.compare("<", 0, b):
            if not b.scope.compare("<", b, 0):
                raise ZeroDivisionError("division by zero")
            q, r = _divided(-a, -b)
            return q, -r
        if not terms_of(a):
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
    for m, c in terms_of(a):
        whole.append((m, c // b))
        if c % b:
            rest.append((m, c % b))
    left = _collected(rest)
    if not isinstance(left, Extent):  # 0 <= left < b
        return _collected((m, c) for m, c in whole if c), left
    even = all(c * math.prod(x.multiple_of for x in m) % b == 0 for m, c in left.terms)
    quotient = _collected((*((m, c) for m, c in whole if c), *terms_of(_atom("div", left, b))))
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
            one = _exactly(extent_of((left.terms[0],)), cast("Extent", extent_of((b.terms[0],))))
            if one is None:
                return None
            quotient, left = quotient + one, left - one * b
        return quotient if not isinstance(left, Extent) and left == 0 else None
    below, divisor = next(iter(b.terms))
    found: list[tuple[Monomial, int]] = []
    for m, c in terms_of(a):
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
    """A quotient, rounded down, or a remainder as an unknown; b is more than 0, whatever its bounds."""
    scope = (a if isinstance(a, Extent) else cast("Extent", b)).scope
    work = operator.floordiv if sign == "div" else operator.mod
    (al, ah), (bl, bh) = bounds_of(a), bounds_of(b)
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
    return extent_of(((((atom,), 1)),))


def names_of(extent: int) -> list[str]:
    """The dims that an extent is made of, by name."""
    found = {n for m, _ in extent.terms for a in m for n in a.names} if isinstance(extent, Extent) else set[str]()
    return sorted(found)


def slice_bounds(start: int | None, stop: int | None, extent: int, *, backwards: bool = False) -> tuple[int, int]:
    """The first element that Python's slice takes of an axis, and the end, which is not before it, or, `backwards`, with a
    negative step, not behind it; the end is then -1 at least."""
    least, most = (-1, extent - 1) if backwards else (0, extent)
    first, last = (
        end if i is None else min(max(i + extent if i < 0 else i, least), most)
        for i, end in ((start, most if backwards else 0), (stop, least if backwards else extent))
    )
    return first, min(first, last) if backwards else max(first, last)
