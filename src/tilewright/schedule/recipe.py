"""Recipes: what runs a step, as data, so that a saved program runs it again without the generator that made it.

A runner is a function, of which nothing can be asked. Whoever makes one that can be made again from data says so with
`describe`; `recipe_of` asks for it when a program is saved. A runner that nobody described (a library's call, the reference, a
Triton kernel) is built again by its candidate (`Built`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import torch

from tilewright.ir.artefact import Kind
from tilewright.ir.graph import Node
from tilewright.schedule.candidate import Runner


class Called(msgspec.Struct, frozen=True, tag="called", forbid_unknown_fields=True):
    """A call of a generated CPU kernel (`candidates/llvm/runtime/calls.py`).

    Attributes:
        code: name of its object code.
        pointers, read, first, alone, each, one: as in `calls.Call`.
        results: types of what it gives.
        packed, packed_bytes: name and size of the packed right operand, "" and 0 for none.
    """

    code: str
    pointers: int
    read: tuple[int, ...]
    first: int
    results: tuple[Kind, ...]
    alone: int
    each: int
    one: bool
    packed: str
    packed_bytes: int


class Prepared(msgspec.Struct, frozen=True, tag="prepared", forbid_unknown_fields=True):
    """A kernel of a gemm, behind operands that torch evaluates: their expressions as text, "" for one that the kernel reads
    itself; `k_last` tells how the right one is to lie."""

    left: str
    right: str
    k_last: bool
    call: Called


class Checked(msgspec.Struct, frozen=True, tag="checked", forbid_unknown_fields=True):
    """A kernel that picks by indices; the problem's expressions say which was out of range, as an error."""

    call: Called


class Built(msgspec.Struct, frozen=True, tag="built", forbid_unknown_fields=True):
    """A kernel that its candidate builds again."""

    candidate: str
    knobs: tuple[tuple[str, bool | int | str], ...]


class Split(msgspec.Struct, frozen=True, tag="split", forbid_unknown_fields=True):
    """The kernels of a gemm's pieces, in order (`candidates/split.py`)."""

    pieces: tuple[Recipe, ...]


Recipe = Called | Prepared | Checked | Built | Split


class Parts(Protocol):
    """A place for what is no small data. Each method gives the name under which it is found again."""

    def code(self, content: bytes) -> str:
        """Leave object code."""
        ...

    def bytes(self, memory: torch.Tensor) -> str:
        """Leave memory, u8 [n]."""
        ...

    def text(self, roots: Sequence[Node]) -> str:
        """The text of expressions, their large constants left."""
        ...


Describe = Callable[[Parts], Recipe | None]

R = TypeVar("R", bound=Runner)

_described: WeakKeyDictionary[Runner, Describe] = WeakKeyDictionary()


def describe(runner: R, how: Describe) -> R:
    """The runner, of which `recipe_of` gives from now on what `how` says."""
    _described[runner] = how
    return runner


def described(runner: Runner) -> bool:
    """Tell whether there is a recipe of a runner."""
    return runner in _described


def recipe_of(runner: Runner, parts: Parts) -> Recipe | None:
    """The recipe of a runner; None of one that nobody described."""
    how = _described.get(runner)
    return None if how is None else how(parts)
