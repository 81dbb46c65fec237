"""torch's symbolic extents (SymInt) as open extents of the graph: dims, and the whole numbers computed from them."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, cast

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import LoadOptions
from tilewright.frontends.torch.registry import DependsOnDataError
from tilewright.ir.dims import MOST, Dim, Scope, spelt


class Symbols:
    """Open extents for torch's symbols: each is a dim in one scope, with torch's bounds narrowed to those that are given."""

    def __init__(self, scope: Scope, ranges: Mapping[Any, Any], named: Mapping[str, Dim]) -> None:
        """Dims for symbols.

        Args:
            scope: where they are kept.
            ranges: torch's bounds by symbol (`ExportedProgram.range_constraints`, `ShapeEnv.var_to_range`).
            named: the dim that a symbol is, by the symbol's name; others are called as the symbol is.
        """
        self._scope, self._named = scope, dict(named)
        self._ranges = {str(symbol): found for symbol, found in ranges.items()}

    def __call__(self, d: object) -> int:
        """The extent that an int or SymInt is: a number, or an open one.

        Raises:
            UnsupportedError: it is computed in a way that extents are not, or from data.
        """
        if type(d) is int:
            return d
        return self._of(cast("Any", d).node.expr)

    def _of(self, e: Any) -> int:
        if e.is_Integer:
            return int(e)
        if e.is_Symbol:
            return self._scope.extent(self._dim(str(e)))
        kind, args = type(e).__name__, e.args
        if kind == "Pow" and args[1].is_Integer and int(args[1]) > 0:
            return math.prod([self._of(args[0])] * int(args[1]))
        if kind == "Add":
            return sum(map(self._of, args))
        if kind == "Mul" and all(not a.is_Rational or a.is_Integer for a in args):
            return math.prod(map(self._of, args))
        if kind in ("FloorDiv", "CleanDiv"):
            return self._of(args[0]) // self._of(args[1])
        if kind in ("Mod", "PythonMod"):
            return self._of(args[0]) % self._of(args[1])
        if kind in ("Max", "Min"):
            return (max if kind == "Max" else min)(map(self._of, args))
        raise UnsupportedError(f"an extent is {e}", hint="sums, products, quotients and remainders of dims are read")

    def _dim(self, symbol: str) -> Dim:
        dim, given = dim_of(symbol, self._ranges.get(symbol)), self._named.get(symbol)
        low, high = dim.low, dim.high
        if given is None and _UNBACKED.fullmatch(symbol):
            raise DependsOnDataError(
                "a shape depends on the data, not on the inputs' shapes alone",
                hint="select with a mask (torch.where) instead of picking elements (x[x > 0], nonzero, unique)",
            )
        if given is None:
            return dim
        if max(low, given.low) > min(high, given.high):
            what = f"it is given as {given}, and the program was exported for {low} to {high}"
            raise InputError(what, where=f"dim {given.name!r}", hint="export it with wider bounds (torch.export.Dim)")
        return Dim(given.name, max(low, given.low), min(high, given.high), given.multiple_of)


def dim_of(name: str, found: Any) -> Dim:
    """A dim within torch's bounds of a symbol, if there are any."""
    low, high = (0, MOST) if found is None else (_bound(found.lower, 0), _bound(found.upper, MOST))
    return Dim(spelt(name), low, high)


def _bound(value: Any, least: int) -> int:
    """A bound of torch's as a number; infinity is `MOST`."""
    try:
        return min(max(int(value), 0), MOST)
    except (TypeError, OverflowError, ValueError, AttributeError):  # sympy's infinities
        return least


_UNBACKED = re.compile(r"u\d+")  # torch's name of a symbol for what it cannot work out from extents
_READING: ContextVar[Symbols | None] = ContextVar("symbols", default=None)


@contextmanager
def reading(symbols: Symbols | None) -> Generator[None]:
    """A context in which extents stay open; with None they are to be numbers."""
    token = _READING.set(symbols)
    try:
        yield
    finally:
        _READING.reset(token)


def extent_of(d: object) -> int | None:
    """The extent that an int or SymInt of the program is that is being read; None for a symbol where none may stay open."""
    symbols = _READING.get()
    return d if type(d) is int else None if symbols is None else symbols(d)


def symbols_of(
    program: ExportedProgram, inputs: Mapping[str, object], options: LoadOptions, united: dict[str, list[str]] | None = None
) -> Symbols:
    """The open extents of an exported program: called as `options.dims` says, by the symbol's name or by an input's with the
    number of an axis ("x.0"); else as the first axis that they are, "x_0". Where `united` is given, symbols that are the same
    axis of tensors of one rank, and equal in the example, are one dim, and it is filled with the places of each such dim.

    Raises:
        InputError: a name is none of them.
    """
    given = dict(cast("Mapping[str, Dim]", options.dims)) if not isinstance(options.dims, bool) else {}
    named: dict[str, Dim] = {}
    first: dict[str, str] = {}
    for name, value in inputs.items():
        for axis, d in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            expression = None if type(d) is int else cast("Any", d).node.expr
            if expression is None or not expression.is_Symbol:
                fixed = given.get(f"{name}.{axis}")
                if fixed is not None and fixed.low == fixed.high == d:
                    del given[f"{name}.{axis}"]
                continue
            dim = given.pop(f"{name}.{axis}", None)
            if dim is not None and named.setdefault(str(expression), dim) != dim:
                raise InputError(f"it is {named[str(expression)]} elsewhere", where=f"{name}.{axis}")
            first.setdefault(str(expression), f"{name}.{axis}")
    for symbol in first:
        if symbol in given:
            named[symbol] = given.pop(symbol)
    if given:
        known = ", ".join([*first.values(), *first]) or "none"
        raise InputError(f"no extent that the program leaves open is called {next(iter(given))!r}", hint=f"there are {known}")
    ranges = {str(s): r for s, r in program.range_constraints.items()}
    one: dict[object, str] = {}
    for symbol, place in first.items():
        if symbol not in named:
            named[symbol] = dim_of(place, ranges.get(symbol))
        if united is not None:
            name, _, axis = place.rpartition(".")
            shape = cast("torch.Tensor", inputs[name]).shape
            alike = one.setdefault((axis, len(shape), cast("Any", shape[int(axis)]).node.hint), symbol)
            united.setdefault(alike, []).append(place)
            its, dim = named[symbol], named[alike]
            if its != dim:
                dim = replace(dim, low=max(dim.low, its.low), high=min(dim.high, its.high))
                named |= {s: dim for s in first if s == symbol or named.get(s) == named[alike]}
    return Symbols(options.scope, ranges, named)


def dynamic_shapes(
    module: torch.nn.Module, dims: Mapping[str, object] | bool, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """`torch.export`'s `dynamic_shapes` for extents that stay open: for dims by the name of an input, which is a parameter
    of `forward`, with the number of an axis ("x.0"), those; with True all that torch can leave open.

    Raises:
        InputError: there is no such input, it is no tensor with such an axis, or the example lies outside the bounds.
    """
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    if isinstance(dims, bool):
        return {n: _like(v, _all_open) for n, v in bound.items()}
    leaves = [(_place(n, path), leaf) for n, v in bound.items() for path, leaf in pytree.tree_leaves_with_path(v)]
    tensors = {name: leaf for name, leaf in leaves if isinstance(leaf, torch.Tensor)}
    open_: dict[int, dict[int, Any]] = {}
    made: dict[Dim, Any] = {}
    for key, given in dims.items():
        name, _, axis = key.rpartition(".")
        value, dim = tensors.get(name), cast("Dim", given)
        if value is None or axis not in map(str, range(value.dim())):
            known = ", ".join(f"{n}.{a}" for n, v in tensors.items() for a in range(v.dim()))
            raise InputError(f"no extent of the inputs is called {key!r}", where="dims, --dim", hint=f"there are {known}")
        extent = value.shape[int(axis)]
        if extent not in dim:
            raise InputError(f"the example has {extent} there, outside {dim}", where=key, hint="an example within the bounds")
        if dim.low < dim.high:  # else torch does not call it open
            one = made.setdefault(dim, torch.export.Dim(dim.name, min=dim.low, max=dim.high))
            open_.setdefault(id(value), {})[int(axis)] = one
    return {n: _like(v, lambda leaf: open_.get(id(leaf))) for n, v in bound.items()}


def _like(value: object, leaf: Callable[[object], object]) -> object:
    """Apply `leaf` to a value's leaves, nested as `torch.export` takes it: lists stand for containers of other classes."""
    kind = type(value)
    if kind not in pytree.SUPPORTED_NODES:
        return leaf(value)
    children = pytree.SUPPORTED_NODES[kind].flatten_fn(value)[0]
    made = [_like(child, leaf) for child in children]
    if isinstance(value, dict):
        return dict(zip(cast("dict[object, object]", value), made, strict=True))
    return tuple(made) if isinstance(value, tuple) else made


def _place(argument: str, path: tuple[Any, ...]) -> str:
    """The name that `torch.export` gives the input for a leaf of an argument."""
    parts = (getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))) for k in path)
    return "_".join([argument, *(re.sub("[^a-zA-Z0-9]", "_", str(p)).lower() for p in parts)])


def _all_open(value: object) -> object:
    dim: Any = torch.export.Dim
    return dict.fromkeys(range(value.dim()), dim.AUTO) if isinstance(value, torch.Tensor) else None
