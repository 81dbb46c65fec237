"""Extents that a StableHLO program leaves open: their names, and the shapes of what is computed from them.

MLIR writes each as `?`. `jax.export` says in the text of its shape assertions what its `?` are called, and how they hang
together ("args[0].shape = (b, 2*s, 8)"). Elsewhere axis 0 of an input x is "x.0". Results have the shapes that rules of types
give, and those of dynamic operations the numbers of their shape operands, which are worked out while reading (`ir/known.py`).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilewright.errors import InputError, UnsupportedError
from tilewright.frontends import LoadOptions
from tilewright.ir.dims import Dim, spelt
from tilewright.ir.extent import bounds_of
from tilewright.ir.types import Shape

_SPECIFIED = re.compile(r"polymorphic shapes specifications: (.*?)\. Obtained dimension variables")
_SHAPE = re.compile(r"([\w\[\]'\".]+)\.shape = \(([^=]*?)\)(?=,\w|\s*$)")
_BOUNDS = re.compile(r"#stablehlo\.bounds<([^>]*)>")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_FUNCTIONS: Mapping[str, Callable[[int, int], int]] = {
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "max": max,
    "min": min,
}


def open_shapes(types: Mapping[str, Any], asm: str, options: LoadOptions, where: str) -> list[Shape]:
    """The shapes of a program's arguments, by their names and MLIR types, with extents left open as the options say.

    Raises:
        InputError: an extent that the program leaves open is neither given nor left open, or lies past its bound.
        UnsupportedError: an argument is no tensor with a rank.
    """
    said = _specified(asm)
    spoken = iter(said) if len(said) == sum(not t.has_static_shape for t in types.values() if hasattr(t, "rank")) else None
    found: list[Shape] = []
    for name, raw in types.items():
        if not getattr(raw, "has_rank", False):
            raise UnsupportedError(f"input {name!r} is {raw}, no tensor with a rank", where=where, hint="tensors with a rank")
        given = options.input_dims.get(name)
        words = [f"{name}.{a}" for a in range(raw.rank)]
        if not raw.has_static_shape and spoken is not None:
            told = next(spoken)
            words = told if len(told) == raw.rank else words
        most, extents = _bounds(raw), list[int]()
        for axis in range(raw.rank):
            if not raw.is_dynamic_dim(axis):
                extents.append(int(raw.get_dim_size(axis)))
            elif given is not None and len(given) == raw.rank:
                extents.append(given[axis])
            else:
                extents.append(_extent(words[axis], f"{name}.{axis}", most[axis], options, f"input {name!r}, axis {axis}"))
        if given is not None and tuple(given) != tuple(extents):
            raise InputError(f"dimensions {list(given)} do not fit input {name!r}, which is {raw}", where=where)
        found.append(tuple(extents))
    return found


def _specified(asm: str) -> list[list[str]]:
    """The extents of each argument with open ones, as the text of a shape assertion says them."""
    text = _SPECIFIED.search(asm)
    shapes = _SHAPE.findall(text.group(1)) if text else []
    return [_split(inner) for _, inner in shapes]


def _split(inner: str) -> list[str]:
    """Split a text at its commas outside brackets."""
    parts, depth = [""], 0
    for c in inner:
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts if p.strip()]


def _bounds(raw: Any) -> list[int | None]:
    """The largest extents that an argument's type allows."""
    found = _BOUNDS.search(str(raw.encoding)) if getattr(raw, "encoding", None) is not None else None
    words = found.group(1).split(",") if found else ["?"] * raw.rank
    return [int(w) if w.strip().isdecimal() else None for w in words]


def _extent(text: str, axis: str, most: int | None, options: LoadOptions, where: str) -> int:
    """The extent that an expression over names of dims says; by the name of the axis, if the user gave one for that."""

    def named(name: str) -> int:
        if options.dims is True and most is not None and name == text:
            return options.scope.extent(Dim(spelt(name), 1, most))
        extent = options.open_extent(name)
        if extent is None:
            wanted = f'dims={{"{name}": (1, {most or 512})}} or --dim {name}=1:{most or 512}, or its shape (input_dims=…)'
            raise InputError(f"no bounds are given for {name!r}, which the program leaves open", where=where, hint=wanted)
        return extent

    by_axis = isinstance(options.dims, Mapping) and axis in options.dims
    try:
        tree = ast.parse(text.replace("^", "**"), mode="eval").body
        extent = named(axis) if by_axis or text == axis else _value(tree, named)
    except (SyntaxError, KeyError):
        extent = named(axis)
    if most is not None and bounds_of(extent)[1] > most:
        raise InputError(f"{extent} may be more than {most}, the bound in the program", where=where, hint=f"at most {most}")
    return extent


def _value(tree: ast.expr, named: Callable[[str], int]) -> int:
    if isinstance(tree, ast.Name):
        return named(tree.id)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return tree.value
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_value(tree.operand, named)
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATORS:
        return _OPERATORS[type(tree.op)](_value(tree.left, named), _value(tree.right, named))
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and len(tree.args) == 2:
        return _FUNCTIONS[tree.func.id](_value(tree.args[0], named), _value(tree.args[1], named))
    raise KeyError(ast.dump(tree))


def filled(raw: Any, extents: Sequence[int] | None) -> Shape | None:
    """The shape of an MLIR tensor type with its open extents filled in; None where these do not fit."""
    if extents is None or len(extents) != raw.rank:
        return None
    known = [None if raw.is_dynamic_dim(a) else int(raw.get_dim_size(a)) for a in range(raw.rank)]
    return tuple(e if k is None else k for k, e in zip(known, extents, strict=True))
