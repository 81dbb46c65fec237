"""A gemm with constant weights of few bits in the terms of `hopper_w4`: its right operand becomes the left one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch

from tilewright.candidates.triton.expressions.emit import check
from tilewright.dtype import BF16, F8E4M3FN, F8E5M2, F16, F32, S8, S32, U8, DType
from tilewright.ir.build import convert, map_
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import Acc, Convert, Dequantize, Param, Transpose
from tilewright.lowering.access import Access, codes_of, gate_up, of_operand, of_store
from tilewright.schedule.candidate import Unsupported
from tilewright.schedule.problem import Problem, read_operand
from tilewright.sizes import round_up

BLOCK = 64  # rows and columns of a block of packed weights
ROWS = 256  # the number of their rows is filled up to a multiple of this
SMALLEST_GROUP = 32
OPERANDS = (F16, BF16, S8, U8, F8E4M3FN, F8E5M2)


@dataclass(frozen=True)
class Weights:
    """The operand of few bits.

    Attributes:
        codes, scale, zero: expressions over weights, such as those of siblings that were joined; no zero point is None, and so
            is a scale of 1.
        kind: type of the codes.
        scales: type of the scales.
        group: codes along K that share a scale: 32, or a multiple of 64; all of K where a row has one scale.
        rounded: a weight is rounded to the other operand's type once it is scaled.
        k_contiguous: K is the codes' last axis.
        interleaved: rows of the first half are packed beside those of the second one.
    """

    codes: Node
    scale: Node | None
    zero: Node | None
    kind: DType
    scales: DType
    group: int
    rounded: bool
    k_contiguous: bool
    interleaved: bool = False

    @property
    def scale_k(self) -> int:
        """Codes along K for which a packed scale stands."""
        return math.gcd(self.group, BLOCK)

    @property
    def nodes(self) -> list[Node]:
        """Expressions of what is packed, but for a scale of 1."""
        return [n for n in (self.codes, self.scale, self.zero) if n is not None]

    @property
    def tensors(self) -> int:
        """The number of packed tensors."""
        return 2 if self.zero is None else 3

    @property
    def sources(self) -> frozenset[int]:
        """Numbers of the sources of the weights."""
        return frozenset(n.op.index for n in toposort(self.nodes) if isinstance(n.op, Param))

    def values(self, sources: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of `nodes`, from weights by their numbers."""
        given = {n: sources[n.op.index] for n in toposort(self.nodes) if isinstance(n.op, Param)}
        return [cast("torch.Tensor", v) for v in evaluate_nodes(self.nodes, given)]


@dataclass(frozen=True)
class PackedGemm:
    """The product [rows, K] x [K, out_features].

    Attributes:
        rows, out_features, K: extents; rows are those of the left operand, batch axes and all.
        x: number of the left operand's source.
        operand: type of the left operand, of 16 bits or codes of 8.
        weights: the right operand.
        stores: the results; the scale of 8-bit activations is in them.
        up: the leaf for the right half of the product's columns in stores that read both halves together: the left half is
            the accumulator then.
    """

    rows: int
    out_features: int
    K: int
    x: int
    operand: DType
    weights: Weights
    stores: tuple[Access, ...]
    up: Node | None = None

    @property
    def accumulators(self) -> int:
        """Sums that make one element of the results, and rows of the weights: 2 where gate and up meet, else 1."""
        return 1 if self.up is None else 2

    @property
    def weight_rows(self) -> int:
        """Rows of the weights that are multiplied."""
        return self.out_features if self.up is None else -(-self.out_features // 8) * 16

    @property
    def packed_rows(self) -> int:
        """Rows of the weights as they are packed, filled up."""
        return round_up(self.weight_rows, ROWS)

    def packed_bytes(self, *, expanded: bool = False) -> int:
        """Bytes of codes, scales and zero points as they are packed (`pack.packed_weights`)."""
        w = self.weights
        bits, sides = (8, 1) if expanded else (w.kind.bits, w.tensors - 1)
        return self.packed_rows * (self.K * bits + self.K // w.scale_k * sides * w.scales.bits) // 8


def plan_of(problem: Problem) -> PackedGemm:
    """The plan of a problem.

    Raises:
        Unsupported: the reason why there is none.
    """
    x, scale = left_of(problem)
    operand = x.dtype
    integers = problem.acc.dtype is S32
    if operand not in OPERANDS or not (integers or problem.acc.dtype is F32):
        raise Unsupported("the left operand of codes is f16, bf16 or codes of 8 bits, added up in f32 or as integers")
    roots, up = gate_up(problem.op.stores, len(problem.types)) or (problem.op.stores, None)
    sums = [n for n in toposort(roots) if isinstance(n.op, Acc) or n is up]
    if integers:
        found = [Node(replace(n.op, type=replace(n.tensor, dtype=F32))) for n in sums if isinstance(n.op, (Acc, Param))]
        roots = tuple(substitute(roots, {n: convert(f, S32) for n, f in zip(sums, found, strict=True)}))
        up = None if up is None else Node(Param(len(problem.types), replace(up.tensor, dtype=F32)))
    elif scale is not None:
        roots = tuple(substitute(roots, {n: map_("multiply", n, scale) for n in sums}))
    weights = _integers(problem, operand) if integers else _weights(problem, operand)
    weights = replace(weights, interleaved=up is not None)
    rows, out_features = problem.batch * problem.M, problem.N if up is None else problem.N // 2
    if not rows * problem.N * problem.K:
        raise Unsupported("the result is empty or a sum of nothing")
    check(roots)
    stores = tuple(map(of_store, roots))
    return PackedGemm(rows, out_features, problem.K, _dense(problem, x, rows), operand, weights, stores, up)


def left_of(problem: Problem) -> tuple[Node, Node | None]:
    """The left operand as it lies in memory, and the factor of the sums of its products where it is codes with a scale for each
    row or for all.

    Raises:
        Unsupported: codes have zero points, or other scales.
    """
    root = problem.op.lhs
    op = root.op
    if not isinstance(op, (Convert, Dequantize)) or root.dtype is not F32:
        return root, None
    x, *scales = root.src
    if x.dtype not in OPERANDS or x.dtype.bits != 8:
        return root, None
    if not scales:
        return x, None
    scale, *zeros = scales
    of_rows = len(scale.shape) == len(root.shape) and scale.shape[-1] == 1
    if zeros or op != Dequantize(F32) or (scale.shape and not of_rows):
        raise Unsupported("8-bit activations have zero points, or scales other than one, or one a row")
    return x, convert(scale, F32) if scale.dtype is not F32 else scale


def _integers(problem: Problem, operand: DType) -> Weights:
    """Weights without scales, which are multiplied by integers: f32 holds all sums."""
    root = problem.op.rhs
    k_contiguous = isinstance(root.op, Transpose)
    codes = root.src[0] if k_contiguous else root
    while isinstance(codes.op, Convert) and _holds(codes.dtype, codes.src[0].dtype):
        codes = codes.src[0]
    kind = codes.dtype
    if not kind.is_integer or kind.bits not in (4, 8) or len(codes.shape) != 2 or problem.K % BLOCK:
        raise Unsupported("the right operand is not one matrix of codes of 4 or 8 bits, or K is no multiple of 64")
    if not problem.constant(codes):
        raise Unsupported("the weights are not constant")
    if problem.K * max(-operand.min, operand.max) * max(-kind.min, kind.max) > 1 << 24:
        raise Unsupported(f"f32 does not hold every sum of {problem.K} products of {operand} and {kind}")
    return Weights(codes, None, None, kind, F16, problem.K, False, k_contiguous)


def _holds(wide: DType, narrow: DType) -> bool:
    """Tell whether integers of one type are those of a wider one, too."""
    return narrow.is_integer and narrow.bits < wide.bits and narrow.is_signed <= wide.is_signed


def _weights(problem: Problem, operand: DType) -> Weights:
    """Weights with scales."""
    found, k_contiguous = codes_of(problem, 4, 8)
    kind, scale = found.src[0].dtype, found.src[1]
    group = _group(found, scale, k_contiguous=k_contiguous)
    if problem.K % BLOCK or group % SMALLEST_GROUP or (group % BLOCK and group != SMALLEST_GROUP):
        raise Unsupported("K is no multiple of 64, or a scale stands for other than 32 or a multiple of 64 codes along K")
    if found.dtype not in (operand, F32) or scale.dtype not in (F16, BF16, F32):
        raise Unsupported(f"weights made {found.dtype} by scales of {scale.dtype} do not meet {operand}")
    rounded = found.dtype is operand
    if rounded and scale.dtype is not operand:
        raise Unsupported(f"weights rounded to {operand} have scales of {scale.dtype}")
    zero = found.src[2] if len(found.src) == 3 else None
    if kind.bits == 8 and operand is BF16 and (zero is not None or kind.kind == "uint"):
        raise Unsupported("bf16 does not hold the difference of an 8-bit code and a zero point")
    return Weights(found.src[0], scale, zero, kind, scale.dtype, group, rounded, k_contiguous)


def _group(found: Node, scale: Node, *, k_contiguous: bool) -> int:
    """Codes along K that share a scale.

    Raises:
        Unsupported: scales are given otherwise than by groups of a row.
    """
    op = found.op
    assert isinstance(op, Dequantize)
    k, columns = found.shape[::-1] if k_contiguous else found.shape
    if op.block is not None:
        group, rows = op.block[::-1] if k_contiguous else op.block
        if rows == 1:
            return min(group, k)
    elif scale.shape == ((columns, 1) if k_contiguous else (1, columns)):
        return k
    raise Unsupported("scales are not given for groups along K or for whole rows")


def _dense(problem: Problem, root: Node, rows: int) -> int:
    """The number of the left operand's source, whose rows are contiguous in memory."""
    access = of_operand(root, columns_last=True)
    operand = read_operand(root)
    if operand.source is None or not operand.plain:
        raise Unsupported("the left operand is not stored as it is multiplied")
    place = access.of_leaf(next(n for n in toposort((root,)) if isinstance(n.op, Param)))
    down = [(t.extent, t.inner, t.stride) for t in place.rows]
    across = [(t.extent, t.inner, t.stride) for t in place.columns]
    if place.offset or across != [(problem.K, 1, 1)] or (rows > 1 and down != [(rows, 1, problem.K)]):
        raise Unsupported("the left operand's rows do not follow one another in memory")
    return operand.source
