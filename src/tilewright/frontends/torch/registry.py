"""Registry of the operators of torch that have a meaning in the graph, and the `Site` that a translation is given.

A translation is a function of a `Site` and of the operator's own arguments, by the names and order of its schema, with tensors
replaced by nodes. It returns the node (or nodes) that mean the same, or raises `Unmodelled` where it holds no meaning for these
arguments: the operator then becomes a `call`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tilewright.dtype import BF16, F16, F32, DType
from tilewright.errors import UnsupportedError
from tilewright.ir.graph import Node
from tilewright.ir.types import TensorType

Scalar = bool | int | float
Operand = Node | Scalar
Result = Node | Sequence[Node | None]
Translation = Callable[..., Result]
T = TypeVar("T", bound=Translation)

TRANSLATIONS: dict[str, Translation] = {}


class DependsOnDataError(UnsupportedError):
    """Python branches on, or takes a shape from, what only a call knows."""


@dataclass(frozen=True)
class Site:
    """One operator in its program.

    Attributes:
        target: the operator as torch spells it, "aten.add.Tensor".
        where: the module and name it goes by in the program, for messages.
        outs: types of its results, as torch's own shape and type rules give them.
        used: which of several results anything reads.
        in_place: whether a buffer that the program keeps may be written to where it lies.
        readers: the operators that read its first result; "output" for the program's.
    """

    target: str
    where: str
    outs: tuple[TensorType, ...]
    used: frozenset[int] = frozenset({0})
    in_place: bool = True
    readers: frozenset[str] = frozenset()

    @property
    def out(self) -> TensorType:
        """Type of the first result."""
        return self.outs[0]

    @property
    def dtype(self) -> DType:
        """Element type of the first result, which is also the type torch computes an elementwise operator in."""
        return self.outs[0].dtype

    @property
    def compute_dtype(self) -> DType:
        """The type in which torch evaluates a formula of several steps: f32 for f16 and bf16, which it rounds to once."""
        return F32 if self.dtype in (F16, BF16) else self.dtype

    def refuse(self, what: str, hint: str | None = None) -> UnsupportedError:
        """An error about this operator, to be raised."""
        return UnsupportedError(f"{self.target} {what}", where=self.where, hint=hint)


def aten(*overloads: str) -> Callable[[T], T]:
    """Register a translation of these ATen overloads, each "name.overload"."""
    return operators("aten", *overloads)


def operators(namespace: str, *overloads: str) -> Callable[[T], T]:
    """Register a translation of these overloads of an operator namespace."""

    def register(translation: T) -> T:
        for overload in overloads:
            TRANSLATIONS[f"{namespace}.{overload}"] = translation
        return translation

    return register
