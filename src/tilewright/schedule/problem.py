"""What one gemm asks, as a candidate sees it: extents, operands, accumulator, stores, and which sources are weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from tilewright.dtype import DType
from tilewright.ir.graph import Node, toposort
from tilewright.ir.notation import show_gemm
from tilewright.ir.ops import Acc, Broadcast, Convert, Dequantize, Gemm, Param, Reshape, Slice, Transpose
from tilewright.ir.types import Shape, TensorType

VIEWS = (Reshape, Transpose, Slice, Broadcast)


@dataclass(frozen=True)
class Operand:
    """One side of the product, read off its expression.

    Attributes:
        source: index of the gemm's source it is made from; None when the expression has several (a general prologue).
        stored: type of that source in memory (of the operand itself for a general prologue).
        dtype: type it is multiplied in.
        shape: [*batch, rows, columns] as multiplied.
        views: the reshapes, transposes, slices and broadcasts between source and operand, from the source outward.
        dequantize: the dequantisation on the way, if any.
        plain: nothing but views lie between source and operand.
        transposed: the last two axes are the source's, exchanged, and nothing else is rearranged.
    """

    source: int | None
    stored: TensorType
    dtype: DType
    shape: Shape
    views: tuple[Node, ...]
    dequantize: Node | None
    plain: bool
    transposed: bool


def read_operand(root: Node) -> Operand:
    """The operand that an expression over `param`s describes."""
    views: list[Node] = []
    dequantize: Node | None = None
    plain = True
    node = root
    while node.src:
        if isinstance(node.op, VIEWS):
            views.append(node)
        elif isinstance(node.op, Dequantize) and dequantize is None:
            dequantize, plain = node, False
        elif isinstance(node.op, Convert):
            plain = False
        else:
            break
        node = node.src[0]
    views.reverse()
    if not isinstance(node.op, Param):
        return Operand(None, root.tensor, root.dtype, root.shape, (), None, False, False)
    return Operand(
        node.op.index, node.tensor, root.dtype, root.shape, tuple(views), dequantize, plain, _is_swap(node.shape, views)
    )


def _is_swap(shape: Shape, views: list[Node]) -> bool:
    rank = len(shape)
    swap = (*range(rank - 2), rank - 1, rank - 2)
    return len(views) == 1 and isinstance(views[0].op, Transpose) and views[0].op.perm == swap


@dataclass(frozen=True)
class Problem:
    """A gemm and the types of its sources. Hashable; equal problems are interchangeable.

    Attributes:
        op: the gemm (operand and store expressions inside).
        types: of the sources.
        weights: which sources are constants, and may be repacked once.
    """

    op: Gemm
    types: tuple[TensorType, ...]
    weights: tuple[bool, ...]

    @cached_property
    def batch(self) -> int:
        """Product of the batch extents."""
        return math.prod(self.acc.shape[:-2])

    @cached_property
    def acc(self) -> TensorType:
        return self.op.acc_type

    @property
    def M(self) -> int:  # noqa: N802
        return self.acc.shape[-2]

    @property
    def N(self) -> int:  # noqa: N802
        return self.acc.shape[-1]

    @property
    def K(self) -> int:  # noqa: N802
        return self.op.lhs.shape[-1]

    @cached_property
    def lhs(self) -> Operand:
        return read_operand(self.op.lhs)

    @cached_property
    def rhs(self) -> Operand:
        return read_operand(self.op.rhs)

    @cached_property
    def outputs(self) -> tuple[TensorType, ...]:
        return tuple(s.tensor for s in self.op.stores)

    @cached_property
    def node(self) -> Node:
        """The gemm over stand-in sources, for evaluation."""
        return Node(self.op, *(Node(Param(i, t)) for i, t in enumerate(self.types)))

    @property
    def ops(self) -> int:
        """Arithmetic of the product: 2 * batch * M * N * K (a multiply and an add each)."""
        return 2 * self.batch * self.M * self.N * self.K

    @property
    def bytes(self) -> int:
        """The least memory traffic: every source read once, every result written once."""
        return sum(t.size_bytes for t in (*self.types, *self.outputs))

    def first_conversion(self) -> DType | None:
        """The one type to which every store first converts acc, acc's own type if all use it as it is, else None."""
        acc = [n for n in toposort(self.op.stores) if isinstance(n.op, Acc)]
        if not acc:
            return None
        readers = [n for n in toposort(self.op.stores) if acc[0] in n.src]
        kinds = {n.dtype if isinstance(n.op, Convert) and n.op.overflow == "wrap" else None for n in readers}
        if acc[0] in self.op.stores:
            kinds.add(None)
        kind = next(iter(kinds)) if len(kinds) == 1 else None
        return kind if kind is not None and kind.is_float == self.acc.dtype.is_float else self.acc.dtype

    def __str__(self) -> str:
        return show_gemm(self.op, self.types)


def problem_of(node: Node) -> Problem:
    """The problem that a gemm node poses."""
    assert isinstance(node.op, Gemm)
    return Problem(node.op, tuple(s.tensor for s in node.src), tuple(s.constant for s in node.src))
