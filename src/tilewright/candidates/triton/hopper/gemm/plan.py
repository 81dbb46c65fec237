"""What of a gemm a Hopper kernel needs to know: where both operands lie, and where the stores go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from tilewright.candidates.triton.expressions.emit import NUMBERED, check
from tilewright.candidates.triton.hopper.gemm.form import FRAGMENT, Blocks, size
from tilewright.candidates.triton.hopper.gemm.view import ALIGNED, by_batch
from tilewright.dtype import F8E4M3FN, F8E5M2, F32, S32, DType
from tilewright.hardware.target import Target
from tilewright.ir.build import broadcast, swap_last
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Dequantize, Param, Transpose
from tilewright.lowering.access import Access, gate_up, of_operand, of_store
from tilewright.schedule.candidate import Unsupported
from tilewright.schedule.problem import Operand, Problem, read_operand

BLOCK = 128  # of K, as wide as a stage of 8-bit operands


@dataclass(frozen=True)
class Matrix:
    """An operand as TMA reads it: [batch, rows, K], rows being those of the left operand or columns of the right one.

    Attributes:
        root: the expression.
        dtype: of its elements.
        extents: batch, rows, K.
        strides: of those in elements; the batch's is 0 where all share one matrix.
        offset: of the first element.
        source: which of the gemm's sources it is read from; None where a contiguous copy is made first.
        constant: it depends on weights alone, so that the copy is made once.
        columns_last: K is the last axis of the expression.
        widened: the copy's rows come in the order that gives a thread of the result eight neighbours.
    """

    root: Node
    dtype: DType
    extents: tuple[int, int, int]
    strides: tuple[int, int, int]
    offset: int
    source: int | None
    constant: bool
    columns_last: bool
    widened: bool = False

    @property
    def along_k(self) -> bool:
        """K is the contiguous axis."""
        return self.strides[2] == 1

    @property
    def shared(self) -> bool:
        """One matrix serves all of the batch."""
        return self.extents[0] > 1 and self.strides[0] == 0

    def box(self, rows: int, tile_k: int) -> list[int]:
        """Extents of what one copy brings; what is not along K lies transposed."""
        plain = [rows, tile_k] if self.along_k else [tile_k, rows]
        return [1, *plain] if self.batched else plain

    @property
    def flat(self) -> bool:
        """The rows of all the batch follow one another evenly, so that they are the rows of one matrix."""
        batch, rows, _ = self.extents
        return batch == 1 or (self.along_k and self.strides[0] == rows * self.strides[1])

    @property
    def batched(self) -> bool:
        """TMA steps over matrices of the batch along an axis of their own."""
        return not self.flat and self.strides[0] != 0

    def copied(self, sources: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The operand's values, K contiguous, rows a multiple of 16 bytes apart."""
        params = [n for n in toposort((self.root,)) if isinstance(n.op, Param)]
        bound = {n: sources[cast("Param", n.op).index] for n in params}
        value = cast("torch.Tensor", evaluate_nodes((self.root,), bound)[0])
        value = value if self.columns_last else value.transpose(-1, -2)
        own = self.extents[0] if self.strides[0] else 1
        room = torch.empty((own, self.extents[1], self.strides[1]), dtype=value.dtype, device=value.device)
        given = room[..., : self.extents[2]]
        value = value.reshape(given.shape)
        if self.widened:  # a thread of wgmma's result holds columns 2t and 2t + 1 of every 8: those become 8t to 8t + 7 of 32
            threads = value.reshape(own, -1, 4, 4, 2, value.shape[-1])
            value = threads.transpose(2, 3).reshape(given.shape)
        given.copy_(value)
        return room

    @property
    def copied_bytes(self) -> int:
        """Of the copy."""
        batch, rows, _ = self.extents
        return (batch if self.strides[0] else 1) * rows * self.strides[1] * size(self.dtype)


@dataclass(frozen=True)
class Plan:
    """A gemm in a Hopper kernel's terms: batch matrices of M x N over K; `second`: see `Form`."""

    problem: Problem
    target: Target
    batch: int
    M: int
    N: int
    K: int
    lhs: Matrix
    rhs: Matrix
    stores: tuple[Access, ...]
    blocks: Blocks | None = None
    second: Node | None = None

    @property
    def halves(self) -> int:
        """Columns of the right operand that make one of the result."""
        return 1 if self.second is None else 2

    @property
    def tile_k(self) -> int:
        """Elements of 128 bytes."""
        return 128 // size(self.lhs.dtype)

    def packed_for(self, *, widened: bool) -> Plan:
        """The plan with the right operand, a weight, packed so that bytes are stored eight at a time, if that is asked for."""
        if not widened:
            return self
        _, rows, k = self.rhs.extents
        wide = -(-k * size(self.rhs.dtype) // ALIGNED) * ALIGNED // size(self.rhs.dtype)
        strides = (rows * wide if self.rhs.strides[0] else 0, wide, 1)
        return replace(self, rhs=replace(self.rhs, strides=strides, offset=0, source=None, widened=True))


def plan_of(problem: Problem, target: Target) -> Plan:
    """The plan.

    Raises:
        Unsupported: the sentence why there is none.
    """
    blocks = _blocks(problem)
    lhs_root, rhs_root = (problem.op.lhs, problem.op.rhs) if blocks is None else blocks[1:]
    a, b = lhs_root.dtype, rhs_root.dtype
    if a.name not in FRAGMENT or b.name not in FRAGMENT or problem.acc.dtype not in (F32, S32):
        raise Unsupported(f"wgmma has no {a} x {b} product into {problem.acc.dtype}")
    if a.bits != b.bits or (a.bits == 16 and a is not b):
        raise Unsupported(f"wgmma multiplies operands of one type, not {a} by {b}")
    if not problem.batch * problem.M * problem.N * problem.K:
        raise Unsupported("the result is empty or a sum of nothing")
    if problem.batch * max(problem.M, problem.N) > NUMBERED:
        raise Unsupported("its rows are not counted in 31 bits")
    check(problem.op.stores)
    shared = math.prod(problem.op.rhs.shape[:-2]) == 1
    batch, rows = (1, problem.batch * problem.M) if shared else (problem.batch, problem.M)
    shape = problem.acc.shape[:-2]
    lhs = _matrix(problem, read_operand(lhs_root), lhs_root, batch, rows, None if shared and batch == 1 else shape, left=True)
    rhs = _matrix(problem, read_operand(rhs_root), rhs_root, batch, problem.N, None if shared else shape, left=False)
    roots, second = gate_up(problem.op.stores, len(problem.types)) or (problem.op.stores, None)
    if second is not None and blocks is not None:
        raise Unsupported("scales by blocks of both halves of the columns")
    stores = tuple(of_store(root) for root in roots)
    columns = problem.N if second is None else problem.N // 2
    return Plan(problem, target, batch, rows, columns, problem.K, lhs, rhs, stores, blocks[0] if blocks else None, second)


def _blocks(problem: Problem) -> tuple[Blocks, Node, Node] | None:
    """Scales by blocks of 128, and the codes of both operands; None where operands are otherwise."""
    lhs, rhs = problem.op.lhs, problem.op.rhs
    turned = isinstance(rhs.op, Transpose) and rhs.op.perm == (1, 0)
    rhs = rhs.src[0] if turned else rhs
    if not (isinstance(lhs.op, Dequantize) and isinstance(rhs.op, Dequantize) and len(lhs.src) == len(rhs.src) == 2):
        return None
    row, column = lhs.src[1], rhs.src[1]
    if (lhs.op.block, rhs.op.block) != ((1, BLOCK), (BLOCK, BLOCK)) or not (row.dtype is column.dtype is F32):
        return None
    if not isinstance(row.op, Param) or not isinstance(column.op, Param) or lhs.src[0].dtype not in (F8E4M3FN, F8E5M2):
        return None
    along = (column.shape[1], 1) if turned else (1, column.shape[1])
    blocks = Blocks(row.op.index, column.op.index, (row.shape[1], 1), along)
    return blocks, lhs.src[0], swap_last(rhs.src[0]) if turned else rhs.src[0]


def _matrix(
    problem: Problem, operand: Operand, root: Node, batch: int, rows: int, shape: tuple[int, ...] | None, *, left: bool
) -> Matrix:
    """Where an operand lies; its batch axes are broadcast to `shape` first."""
    side = "left" if left else "right"
    params = [n.op.index for n in toposort((root,)) if isinstance(n.op, Param)]
    constant = all(problem.weights[i] for i in params)
    if not operand.plain and not constant:
        raise Unsupported(f"the {side} operand is not stored as it is multiplied")
    own = math.prod(root.shape[:-2])
    if own not in (1, math.prod(shape or (own,))):
        root = broadcast(root, (*(shape or ()), *root.shape[-2:]))
        own = math.prod(root.shape[:-2])
    element = size(operand.dtype)
    wide = -(-problem.K * element // ALIGNED) * ALIGNED // element
    many = own > 1 and batch > 1
    copy = Matrix(root, operand.dtype, (batch, rows, problem.K), (rows * wide if many else 0, wide, 1), 0, None, constant, left)
    if not operand.plain:
        return copy
    try:
        access = of_operand(root, columns_last=left)
        leaf = next(n for n in access.views if isinstance(n.op, Param))
        place = access.of_leaf(leaf)
    except Unsupported:
        return copy
    split = by_batch(place.rows, rows, batch) if many else ([], list(place.rows))
    if split is None:
        return copy
    outer, inner = split
    whole_batch = not many or (len(outer) == 1 and outer[0].extent == batch)
    whole_rows = rows == 1 or (len(inner) == 1 and inner[0].extent == rows)
    whole_k = problem.K == 1 or (len(place.columns) == 1 and place.columns[0].extent == problem.K)
    if not (whole_batch and whole_rows and whole_k):
        return copy
    down = inner[0].stride if rows > 1 else wide
    along = place.columns[0].stride if problem.K > 1 else 1
    strides = (outer[0].stride if many else 0, down, along)
    steps = (strides[0], along if down == 1 and along != 1 else down)
    reads = along == 1 or (down == 1 and element == 2)
    if not reads or place.offset * element % ALIGNED or any(s * element % ALIGNED for s in steps):
        return copy
    assert isinstance(leaf.op, Param)
    return Matrix(root, operand.dtype, (batch, rows, problem.K), strides, place.offset, leaf.op.index, constant, left)
