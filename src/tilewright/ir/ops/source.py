"""Sources of values: graph inputs, constants, a gemm's own parameters, opaque calls, one of several results."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from tilewright.dtype import S64
from tilewright.errors import TypeMismatchError, UnsupportedError
from tilewright.ir.graph import Node, Op
from tilewright.ir.literal import Literal
from tilewright.ir.types import Shape, TensorType, TupleType, Type

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from tilewright.ir.graph import Value


class _Leaf:
    """The rule of operations without sources, whose type is declared."""

    arity: ClassVar[int | None] = 0

    type: TensorType

    def infer(self, *src: TensorType) -> Type:
        return self.type


@dataclass(frozen=True)
class Input(_Leaf, Op):
    """A value given at run time, called `label`; or, if `mutable`, kept by the program from call to call (`Graph.state`)."""

    label: str
    type: TensorType
    mutable: bool = False

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        raise TypeMismatchError(f"input {self.label!r} has no value")


@dataclass(frozen=True)
class Const(Op):
    """A constant; `data` refers to the source's memory."""

    arity: ClassVar[int | None] = 0
    constant_source: ClassVar[bool] = True

    data: Literal

    def infer(self, *src: TensorType) -> Type:
        return self.data.type

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        return self.data.tensor()


@dataclass(frozen=True)
class Extents(Op):
    """Extents as numbers that a program computes with: s64, one each, or the only one without an axis.

    Some are open (`ir/extent.py`), else this is a constant: `build.extents` makes either.
    """

    arity: ClassVar[int | None] = 0
    constant_source: ClassVar[bool] = True

    values: Shape
    single: bool = False

    def infer(self, *src: TensorType) -> Type:
        if self.single and len(self.values) != 1:
            raise TypeMismatchError(f"{len(self.values)} extents for one number")
        return TensorType(S64, () if self.single else (len(self.values),))

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        import torch

        return torch.tensor([int(v) for v in self.values], dtype=torch.int64).reshape(node.shape)


@dataclass(frozen=True)
class Param(_Leaf, Op):
    """Source `index` of the gemm in whose expression this stands. Only inside an op's regions."""

    index: int
    type: TensorType

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        raise TypeMismatchError(f"param {self.index} stands outside an operation's expression")


@dataclass(frozen=True)
class Acc(_Leaf, Op):
    """The accumulator [*batch, M, N] of the gemm in whose store this stands. Only inside a gemm's stores."""

    type: TensorType

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        raise TypeMismatchError("acc stands outside a gemm's stores")


@dataclass(frozen=True)
class Item(Op):
    """Result `index` of an operation with several."""

    arity: ClassVar[int | None] = 1

    index: int

    def infer_types(self, *src: Type) -> Type:
        (source,) = src
        if not isinstance(source, TupleType):
            raise TypeMismatchError(f"item takes an operation with several results, not {source}")
        if not 0 <= self.index < len(source.items):
            raise TypeMismatchError(f"result {self.index} of {len(source.items)} wanted")
        return source.items[self.index]

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        return cast("tuple[Value, ...]", src[0])[self.index]


@dataclass(frozen=True)
class Call(Op):
    """An operation no other node expresses, kept as its source wrote it and evaluated by the source's own library.

    `library` names the front end module whose `evaluate_call(call, values)` runs it: slower, never refused. `opaque`
    among `types` is a value whose type is known only at run time; nothing but another call may read it.

    Attributes:
        library: front end module.
        target: operator, as the source spells it; stands in reports.
        payload: everything else the library needs, as text.
        types: types of the results.
    """

    library: str
    target: str
    payload: str
    types: tuple[TensorType, ...]

    def infer(self, *src: TensorType) -> Type:
        return self.types[0] if len(self.types) == 1 else TupleType(self.types)

    def reader(self) -> ModuleType | None:
        """The front end module of its library; None where there is none."""
        name = f"tilewright.frontends.{self.library}"
        known = self.library.isidentifier() and (name in sys.modules or importlib.util.find_spec(name) is not None)
        return importlib.import_module(name) if known else None

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        run = getattr(self.reader(), "evaluate_call", None)
        if run is None:
            raise UnsupportedError(f"nothing can evaluate a call into {self.library!r}", where=self.target)
        results = tuple(run(self, src))
        return results[0] if len(self.types) == 1 else results


def maker_of(node: Node) -> Node:
    """The operation that computes a value: the one that an item picks from, else the node itself."""
    return node.src[0] if isinstance(node.op, Item) else node
