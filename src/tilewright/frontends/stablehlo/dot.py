"""Products: `dot_general` over any batch and contracting dimensions, as transposes, one gemm and a reshape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.dtype import F32, F64, PRED, S32, DType
from tilewright.frontends.stablehlo.elementwise import overflow_to
from tilewright.frontends.stablehlo.module import DTYPES
from tilewright.frontends.stablehlo.registry import Site, Value, lowers
from tilewright.ir.build import convert, reshape, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import gemm

_Dims = Sequence[int]
Pair = tuple[_Dims, _Dims]  # axes of the left and of the right operand


@lowers("stablehlo.dot_general")
def _dot_general(site: Site) -> Value:
    """`dot_general a, b, batching_dims = B, contracting_dims = K -> reshape(gemm(transpose a, transpose b))`.

    An integer product has the result's type as its accumulator, which is exact: sums agree modulo its width. A float product
    accumulates in f32, or in f64 where an operand, the result or the algorithm asked for is f64. What `precision` or
    `algorithm` would allow to be rounded more is not.
    """
    a, b = site.nodes
    accumulator = None
    if site.op.has("algorithm"):
        algorithm = site.op.dimension_numbers("DotAlgorithm", "algorithm")
        accumulator = DTYPES.get(str(algorithm.accumulation_type))
        _note_algorithm(site, algorithm, a.dtype)
    return product(a, b, *dot_dimensions(site), site.out.dtype, accumulator)


def dot_dimensions(site: Site) -> tuple[Pair, Pair]:
    """Batch axes and contracted axes of a `dot_general`, of the left and the right operand each."""
    dims = site.op.dimension_numbers("DotDimensionNumbers", "dot_dimension_numbers")
    batch = (dims.lhs_batching_dimensions, dims.rhs_batching_dimensions)
    contracted = (dims.lhs_contracting_dimensions, dims.rhs_contracting_dimensions)
    return ([*map(int, batch[0])], [*map(int, batch[1])]), ([*map(int, contracted[0])], [*map(int, contracted[1])])


def _note_algorithm(site: Site, algorithm: Any, operand: DType) -> None:
    asked = str(algorithm.lhs_precision_type)
    known = DTYPES.get(asked)
    if known is None or known.epsilon > operand.epsilon:
        site.reader.note(f"{site.op.origin}: operands may be rounded to {asked}; here they keep {operand}")


@lowers("stablehlo.dot")
def _dot(site: Site) -> Value:
    """Rank 1 or 2 each: the last axis of a is contracted with the first of b."""
    a, b = site.nodes
    return product(a, b, ([], []), ([len(a.shape) - 1], [0]), site.out.dtype, None)


def product(
    a: Node,
    b: Node,
    batch: Pair,
    contracted: Pair,
    out: DType,
    accumulator: DType | None,
) -> Node:
    """a and b multiplied; result axes are the batch, a's free and b's free axes.

    Args:
        a: left operand.
        b: right operand.
        batch: batch axes of each, in the result's order.
        contracted: contracted axes of each, in pairs.
        out: element type of the result.
        accumulator: at least this wide, if given.

    Raises:
        TypeMismatchError: extents do not fit.
    """
    how = _arithmetic(a.dtype, b.dtype, out, accumulator)
    pairs = sorted(zip(contracted[0], contracted[1], strict=True))
    lhs, rows = _operand(a, batch[0], [i for i, _ in pairs], contracted_last=True)
    rhs, columns = _operand(b, batch[1], [j for _, j in pairs], contracted_last=False)
    result = gemm(
        convert(lhs, how.lhs), convert(rhs, how.rhs), acc_dtype=how.acc, out_dtype=how.out, overflow=overflow_to(how.out)
    )
    return reshape(result, (*(a.shape[i] for i in batch[0]), *rows, *columns))


def _operand(x: Node, batch: _Dims, contracted: _Dims, *, contracted_last: bool) -> tuple[Node, tuple[int, ...]]:
    """x as [*batch, free, contracted] (or contracted before free), and the extents of its free axes."""
    free = [d for d in range(len(x.shape)) if d not in batch and d not in contracted]
    inner = [free, contracted] if contracted_last else [contracted, free]
    moved = transpose(x, [*batch, *inner[0], *inner[1]])
    shape = (*(x.shape[d] for d in batch), *(math.prod(x.shape[d] for d in part) for part in inner))
    return reshape(moved, shape), tuple(x.shape[d] for d in free)


@dataclass(frozen=True)
class _Arithmetic:
    """The types a product is computed in: of each operand, of the accumulator, of what is stored."""

    lhs: DType
    rhs: DType
    acc: DType
    out: DType


def _arithmetic(a: DType, b: DType, out: DType, accumulator: DType | None) -> _Arithmetic:
    """The types in which XLA multiplies: operands keep theirs where the accumulator holds their products exactly."""
    if a is PRED and b is PRED:
        a = b = S32  # true where any pair is: a count that is not zero
    elif PRED in (a, b):
        a, b = (b, b) if a is PRED else (a, a)
    if a.is_integer and b.is_integer and not out.is_float:
        return _Arithmetic(a, b, S32 if out is PRED else out, out)
    wide = [d for d in (a, b, out, accumulator) if d is not None and d.is_float]
    acc = F64 if F64 in wide else F32
    return _Arithmetic(a if a.is_float else acc, b if b.is_float else acc, acc, out)
