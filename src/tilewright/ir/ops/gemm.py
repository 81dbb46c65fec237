"""The gemm: one matmul and everything that touches its operands and its result.

A gemm carries *expressions*: ordinary nodes whose leaves are `param` (the gemm's sources) and `acc` (its accumulator). `lhs`
and `rhs` are the operands (a view, a cast, a dequantisation of a source). Each store is a result (an epilogue over a range of
`acc`, and the view under which it is written). Folding an operation into a gemm is therefore substitution, and the oracle
evaluates a gemm with the code that evaluates any graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from tilewright.dtype import F64, DType
from tilewright.errors import TypeMismatchError
from tilewright.ir.evaluate import evaluate_nodes, float64_gemms
from tilewright.ir.factor import Factor, aligned
from tilewright.ir.graph import Node, Op, toposort
from tilewright.ir.ops.elementwise import Convert, Overflow
from tilewright.ir.ops.functions import as_s64, narrow_integer
from tilewright.ir.ops.rounding import to_float
from tilewright.ir.ops.source import Acc, Param
from tilewright.ir.types import Shape, TensorType, TupleType, Type, broadcast_shapes

if TYPE_CHECKING:
    from tilewright.ir.graph import Value


@dataclass(frozen=True)
class Gemm(Op):
    """acc = lhs @ rhs (NumPy's matmul, accumulated in `acc_dtype`); each store is a result computed from acc.

    Attributes:
        acc_dtype: s32 or f32 as a rule; an integer accumulator wraps.
        lhs: expression of shape [*batch, M, K].
        rhs: expression of shape [*batch, K, N]; batch axes broadcast.
        stores: one expression a result.

    A range of N that a store reads is a `slice` of `acc`; a store's view is the reshapes and transposes at its root.
    """

    acc_dtype: DType
    lhs: Node
    rhs: Node
    stores: tuple[Node, ...]

    def regions(self) -> dict[str, tuple[Node, ...]]:
        return {"lhs": (self.lhs,), "rhs": (self.rhs,), "stores": self.stores}

    @property
    def acc_type(self) -> TensorType:
        """Type of the accumulator: `acc_dtype`[*batch, M, N].

        Raises:
            TypeMismatchError: the operands do not fit.
        """
        a, b = self.lhs.tensor, self.rhs.tensor
        if a.rank < 2 or b.rank < 2 or a.shape[-1] != b.shape[-2]:
            raise TypeMismatchError(f"cannot multiply {a} by {b}", where="gemm", hint="inner extents must agree")
        kinds = {t.is_float for t in (a.dtype, b.dtype, self.acc_dtype)}
        if len(kinds) != 1 or any(t.kind in ("pred", "opaque") for t in (a.dtype, b.dtype, self.acc_dtype)):
            raise TypeMismatchError(f"cannot multiply {a.dtype} by {b.dtype} into {self.acc_dtype}", hint="convert first")
        batch = broadcast_shapes(a.shape[:-2], b.shape[:-2], where="gemm batch")
        return TensorType(self.acc_dtype, (*batch, a.shape[-2], b.shape[-1]))

    def infer(self, *src: TensorType) -> Type:
        acc = self.acc_type
        if not self.stores:
            raise TypeMismatchError("gemm without a store")
        for leaf in leaves((self.lhs, self.rhs, *self.stores)):
            op = leaf.op
            if isinstance(op, Param) and not (0 <= op.index < len(src) and src[op.index] == op.type):
                given = src[op.index] if 0 <= op.index < len(src) else "nothing"
                raise TypeMismatchError(f"param {op.index} is {op.type} but the gemm is given {given}")
            if isinstance(op, Acc) and op.type != acc:
                raise TypeMismatchError(f"a store reads acc as {op.type}; it is {acc}")
        for operand in (self.lhs, self.rhs):
            if any(isinstance(leaf.op, Acc) for leaf in leaves((operand,))):
                raise TypeMismatchError("an operand of a gemm reads its own accumulator")
        types = tuple(s.tensor for s in self.stores)
        return types[0] if len(types) == 1 else TupleType(types)

    def factors(self, node: Node) -> tuple[Factor, ...]:
        """Batch axes, M, N and K of a product of two sources as they are, which is stored as it is; none of any other."""
        acc = self.acc_type
        plain = (Node(Param(0, self.lhs.tensor)), Node(Param(1, self.rhs.tensor)), (Node(Acc(acc)),))
        if (self.lhs, self.rhs, self.stores) != plain:
            return ()
        a, b = self.lhs.tensor, self.rhs.tensor
        batch = aligned(acc, [a, b])[: acc.rank - 2]
        rows, columns = Factor((a.rank - 2, None), acc.rank - 2), Factor((None, b.rank - 1), acc.rank - 1)
        return (*batch, rows, columns, Factor((a.rank - 1, b.rank - 2), None))

    def of_part(self, node: Node, shape: Shape, src: Sequence[TensorType]) -> Op:
        lhs, rhs = (Node(Param(i, t)) for i, t in enumerate(src))
        return Gemm(self.acc_dtype, lhs, rhs, (Node(Acc(TensorType(self.acc_dtype, shape))),))

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        bound: dict[Node, Value] = {}
        acc: Node | None = None
        for leaf in leaves((self.lhs, self.rhs, *self.stores)):
            if isinstance(leaf.op, Param):
                bound[leaf] = src[leaf.op.index]
            elif isinstance(leaf.op, Acc):
                acc = leaf
        a, b = cast("list[torch.Tensor]", evaluate_nodes((self.lhs, self.rhs), bound))
        product = matmul_exact(a, b, self.lhs.dtype, self.rhs.dtype, self.acc_dtype)
        if acc is not None:
            bound[acc] = product
        results = evaluate_nodes(self.stores, bound)
        return results[0] if len(results) == 1 else tuple(results)


def leaves(roots: Sequence[Node]) -> Iterator[Node]:
    """The `param` and `acc` leaves of expressions."""
    return (n for n in toposort(roots) if isinstance(n.op, (Param, Acc)))


def matmul_exact(a: torch.Tensor, b: torch.Tensor, a_dtype: DType, b_dtype: DType, acc_dtype: DType) -> torch.Tensor:
    """a @ b in `acc_dtype`: integers exactly (modulo the accumulator's width); floats in f32, or in float64 for an f64
    operand or accumulator or on request, rounded once.

    Integer products go through float64 while every partial sum stays below 2**53, where float64 is exact; wider operands
    multiply in int64, whose wrap-around is exact modulo 2**64.
    """
    if acc_dtype.is_float:
        compute = torch.float64 if F64 in (acc_dtype, a_dtype, b_dtype) or float64_gemms() else torch.float32
        product = torch.matmul(a.to(compute), b.to(compute))
        if a.dtype is not compute:  # whose sums begin at 0 also where one product is all of a sum, and -0
            product = product + 0.0
        return to_float(product, acc_dtype)
    k = a.shape[-1]
    largest = max(abs(int(a_dtype.min)), int(a_dtype.max)) * max(abs(int(b_dtype.min)), int(b_dtype.max))
    if largest * max(k, 1) < 1 << 53:
        wide = torch.matmul(a.to(torch.float64), b.to(torch.float64)).to(torch.int64)
    else:
        wide = torch.matmul(as_s64(a), as_s64(b))
    return narrow_integer(wide, acc_dtype)


def gemm(
    a: Node,
    b: Node,
    *,
    acc_dtype: DType | None = None,
    out_dtype: DType | None = None,
    overflow: Overflow = "wrap",
) -> Node:
    """a [*batch, M, K] @ b [*batch, K, N], stored as `out_dtype` (the accumulator's own type if None).

    Raises:
        TypeMismatchError: shapes or types do not fit.
    """
    acc = acc_dtype or max(a.dtype.accumulator, b.dtype.accumulator, key=lambda d: d.bits)
    lhs, rhs = Node(Param(0, a.tensor)), Node(Param(1, b.tensor))
    result = Node(Acc(Gemm(acc, lhs, rhs, ()).acc_type))
    if out_dtype is not None and out_dtype is not acc:
        result = Node(Convert(out_dtype, overflow), result)
    return Node(Gemm(acc, lhs, rhs, (result,)), a, b)
