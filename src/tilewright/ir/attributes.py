"""An operation's attributes in one spelling: checked and normalised by their declared types when the operation is made.

Python holds 1, 1.0 and True equal, and 0.0 and -0.0. Hash-consing compares attributes, so without this `Softmax(True)` and
`Softmax(1)` would be one node or two as luck has it, and the text could not give the same node back.
"""

from __future__ import annotations

import math
import operator
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np

from tilewright.errors import TypeMismatchError

Reader = Callable[[Any], object]


class _WrongError(Exception):
    """The value is not of the declared type; says what is."""


def normalise(op: object, op_name: str) -> None:
    """Give each field of a frozen dataclass the plain Python value of its declared type.

    An int becomes a float where a float is declared, a list a tuple, a NumPy number a Python one, -0.0 0.0 (an operation that
    must tell them apart takes the number as a source).

    Raises:
        TypeMismatchError: a value is not of the declared type, or is NaN, which equals nothing and so cannot be an attribute.
    """
    for name, read in _readers(type(op)):
        value = getattr(op, name)
        try:
            plain = read(value)
        except _WrongError as wrong:
            raise TypeMismatchError(f"{op_name}: {name} is {_shown(value)}, not {wrong}") from None
        if plain is not value:
            object.__setattr__(op, name, plain)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


@cache
def _readers(cls: type) -> tuple[tuple[str, Reader], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((f.name, _reader(hints[f.name])) for f in fields(cls))


def _reader(hint: Any) -> Reader:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return _one_of(args)
    if origin in (typing.Union, types.UnionType):
        return _either([_reader(a) for a in args])
    if origin is tuple:
        return _tuple_of(_reader(args[0]))
    numbers: dict[Any, Reader] = {bool: _bool, int: _int, float: _float}
    return numbers.get(hint) or _instance_of(hint)


def _bool(value: Any) -> bool:
    if not isinstance(value, np.bool_) and _int(value) not in (0, 1):
        raise _WrongError("true or false")
    return bool(value)


def _int(value: Any) -> int:
    try:
        return int(operator.index(value))
    except TypeError:
        raise _WrongError("a whole number") from None


def _float(value: Any) -> float:
    try:
        if isinstance(value, str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise _WrongError("a number") from None
    if math.isnan(number):
        raise _WrongError("a number")
    return value if type(value) is float and value else number + 0.0


def _one_of(choices: Iterable[object]) -> Reader:
    known = {c: c for c in choices}

    def read(value: Any) -> object:
        if not isinstance(value, str) or value not in known:
            raise _WrongError(f"one of {', '.join(map(str, known))}")
        return known[value]

    return read


def _either(readers: list[Reader]) -> Reader:
    def read(value: Any) -> object:
        wanted: list[str] = []
        for option in readers:
            try:
                return option(value)
            except _WrongError as wrong:
                wanted.append(str(wrong))
        raise _WrongError(" or ".join(wanted))

    return read


def _tuple_of(read_item: Reader) -> Reader:
    def read(value: Any) -> object:
        if type(value) is not tuple and not isinstance(value, (list, tuple)):
            raise _WrongError("a list")
        items = tuple(map(read_item, typing.cast("Iterable[object]", value)))
        same = type(value) is tuple and all(a is b for a, b in zip(items, typing.cast("tuple[object]", value), strict=True))
        return value if same else items

    return read


def _instance_of(cls: type) -> Reader:
    name = "none" if cls is types.NoneType else f"a {cls.__name__}"

    def read(value: Any) -> object:
        if not isinstance(value, cls):
            raise _WrongError(name)
        return value

    return read
