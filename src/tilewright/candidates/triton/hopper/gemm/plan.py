"""A gemm in the terms of a Hopper kernel: where both operands lie in memory, and where the stores go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from tilewright.candidates.triton.expressions.emit import NUMBERED, check
from tilewright.candidates.triton.hopper.gemm.tile import TileConfig
from tilewright.candidates.triton.hopper.gemm.tma import ALIGNED, TMA_TYPES, TmaView, by_batch
from tilewright.dtype import F8E4M3FN, F8E5M2, F32, S32, DType
from tilewright.hardware.target import Target
from tilewright.ir.build import broadcast, swap_last
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.extent import extent_at
from tilewright.ir.graph import Node, toposort
from tilewright.ir.instance import nodes_at
from tilewright.ir.ops import Dequantize, Param, Transpose
from tilewright.lowering.access import Access, gate_up, of_operand, of_store
from tilewright.schedule.candidate import Unsupported
from tilewright.schedule.problem import Problem, read_operand
from tilewright.schedule.recipe import Operand, Parts

BLOCK = 128  # of K, as wide as a stage of 8-bit operands


@dataclass(frozen=True)
class Matrix:
    """An operand as TMA reads it: [batch, rows, K], rows being those of the left operand or columns of the right one.

    Attributes:
        root: the expression.
        extents: batch, rows, K.
        strides: of those in elements; the batch's is 0 where all share one matrix.
        offset: of the first element.
        source: which of the gemm's sources it is read from; None where a contiguous copy is made first.
        constant: it depends on weights alone, so that the copy is made once.
        columns_last: K is the last axis of the expression.
        permuted: the copy's rows come in the order of `TileConfig.vector_store`.
    """

    root: Node
    extents: tuple[int, int, int]
    strides: tuple[int, int, int]
    offset: int
    source: int | None
    constant: bool
    columns_last: bool
    permuted: bool = False

    @property
    def dtype(self) -> DType:
        """The elements' type."""
        return self.root.dtype

    @property
    def along_k(self) -> bool:
        """K is the contiguous axis."""
        return self.strides[2] == 1

    @property
    def shared(self) -> bool:
        """One matrix serves all of the batch."""
        return self.extents[0] > 1 and self.strides[0] == 0

    @property
    def batched(self) -> bool:
        """TMA steps over matrices of the batch along an axis of their own: their rows are not evenly those of one matrix."""
        (batch, rows, _), (over, down, _) = self.extents, self.strides
        return batch > 1 and over != 0 and not (self.along_k and over == rows * down)

    def view(self, box_rows: int, tile_k: int) -> TmaView:
        """The array whose boxes are `box_rows` x `tile_k` of the operand; what is not along K lies transposed."""
        (batch, rows, k), (over, down, along) = self.extents, self.strides
        rows *= batch if over and not self.batched else 1
        shape, strides, box = (rows, k), (down, 1), (box_rows, tile_k)
        if not self.along_k:
            shape, strides, box = (k, rows), (along, 1), (tile_k, box_rows)
        if self.batched:
            return TmaView(self.offset, (batch, *shape), (over, *strides), (1, *box), self.dtype.size_bytes(1))
        return TmaView(self.offset, shape, strides, box, self.dtype.size_bytes(1))

    def packed(self, *, permuted: bool = False) -> Matrix:
        """The operand's copy: K contiguous, rows a multiple of 16 bytes apart."""
        _, rows, k = self.extents
        element = self.dtype.size_bytes(1)
        pitch = -(-k * element // ALIGNED) * ALIGNED // element
        strides = (rows * pitch if self.strides[0] else 0, pitch, 1)
        return replace(self, strides=strides, offset=0, source=None, permuted=permuted)

    def copied(self, sources: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]) -> torch.Tensor:
        """A copy of the operand in memory: [batch or 1, rows, K filled up], its rows `permuted` if they are to be."""
        params = [n for n in toposort((self.root,)) if isinstance(n.op, Param)]
        bound = {n: sources[cast("Param", n.op).index] for n in params}
        value = cast("torch.Tensor", evaluate_nodes((self.root,), bound)[0])
        value = value if self.columns_last else value.transpose(-1, -2)
        own = self.extents[0] if self.strides[0] else 1
        room = torch.empty((own, self.extents[1], self.strides[1]), dtype=value.dtype, device=value.device)
        given = room[..., : self.extents[2]]
        value = value.reshape(given.shape)
        if self.permuted:  # a thread of wgmma's result holds columns 2t and 2t + 1 of every 8: those become 8t to 8t + 7 of 32
            threads = value.reshape(own, -1, 4, 4, 2, value.shape[-1])
            value = threads.transpose(2, 3).reshape(given.shape)
        given.copy_(value)
        return room

    def recipe(self, number: int, parts: Parts) -> Operand:
        """The copy as data, of this number as a source."""
        return Operand(number, parts.text((self.root,)), self.extents, self.strides, self.columns_last, self.permuted)

    def at(self, values: Mapping[str, int]) -> Matrix:
        """The operand for values of the dims that its extents leave open, by name."""
        at = nodes_at((), values).at
        changed = {name: at(getattr(self, name)) for name in ("root", "extents", "strides", "offset")}
        return replace(self, **cast("Any", changed))

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copy."""
        batch, rows, _ = self.extents
        return (batch if self.strides[0] else 1) * rows * self.strides[1] * self.dtype.size_bytes(1)


@dataclass(frozen=True)
class BlockScales:
    """Scales of 8-bit operands that hold for 128 of K: of each row of the left one, of 128 columns of the right one.

    Attributes:
        lhs, rhs: the sources that hold them.
        strides: in elements, of a row of the left operand and of a block of K, of a block of columns and of a block of K.
    """

    lhs: int
    rhs: int
    strides: tuple[int, int, int, int]


@dataclass(frozen=True)
class HopperGemm:
    """A gemm in a Hopper kernel's terms.

    Attributes:
        problem, target: what is done, and where.
        batch, M, N, K: matrices, and extents of the result and of the sums.
        lhs, rhs: the operands; all matrices' rows are those of one if they share the right operand.
        stores: the results over rows and columns.
        scales: scales by blocks.
        up: what stands in the stores for sums of the right half of `rhs`'s columns, where those meet the left half's (SwiGLU).
    """

    problem: Problem
    target: Target
    batch: int
    M: int
    N: int
    K: int
    lhs: Matrix
    rhs: Matrix
    stores: tuple[Access, ...]
    scales: BlockScales | None = None
    up: Node | None = None

    @property
    def accumulators(self) -> int:
        """Sums that make one element of the result: 2 where a gate's and an up projection's columns meet, else 1."""
        return 1 if self.up is None else 2

    @property
    def tile_k(self) -> int:
        """Elements of K in a stage: 128 bytes of them."""
        return 128 // self.lhs.dtype.size_bytes(1)

    @property
    def k_tiles(self) -> int:
        """Steps along K of a tile."""
        return -(-self.K // self.tile_k)

    def at(self, problem: Problem, values: Mapping[str, int]) -> HopperGemm:
        """The gemm of a problem that this one is for values of the dims that it leaves open, by name."""
        batch, rows, columns, depth = (extent_at(x, values) for x in (self.batch, self.M, self.N, self.K))
        operands = self.lhs.at(values), self.rhs.at(values)
        return replace(self, problem=problem, batch=batch, M=rows, N=columns, K=depth, lhs=operands[0], rhs=operands[1])

    def tiles(self, tile: TileConfig) -> int:
        """Tiles of the result; with `multicast`, pairs of tiles one below the other."""
        rows, columns = tile.tile_m * (2 if tile.multicast else 1), tile.tile_n // self.accumulators
        return self.batch * -(-self.M // rows) * -(-self.N // columns)


def plan_of(problem: Problem, target: Target) -> HopperGemm:
    """The plan.

    Raises:
        Unsupported: the sentence why there is none.
    """
    scales, lhs_root, rhs_root = _block_scales(problem) or (None, problem.op.lhs, problem.op.rhs)
    a, b, acc = lhs_root.dtype, rhs_root.dtype, problem.acc
    if a.name not in TMA_TYPES or b.name not in TMA_TYPES or acc.dtype not in (F32, S32):
        raise Unsupported(f"wgmma has no {a} x {b} product into {acc.dtype}")
    if a.bits != b.bits or (a.bits == 16 and a is not b):
        raise Unsupported(f"wgmma multiplies operands of one type, not {a} by {b}")
    *shape, rows, N = acc.shape
    batch, K = math.prod(shape), problem.K
    if not batch * rows * N * K:
        raise Unsupported("the result is empty or a sum of nothing")
    if batch * rows > NUMBERED or batch * N > NUMBERED:
        raise Unsupported("its rows are not counted in 31 bits")
    check(problem.op.stores)
    shared = math.prod(problem.op.rhs.shape[:-2]) == 1
    if shared:
        batch, rows = 1, batch * rows
    lhs = _matrix(problem, lhs_root, (batch, rows, K), [] if shared else shape, left=True)
    rhs = _matrix(problem, rhs_root, (batch, N, K), [] if shared else shape, left=False)
    roots, up = gate_up(problem.op.stores, len(problem.types)) or (problem.op.stores, None)
    if up is not None and scales is not None:
        raise Unsupported("scales by blocks of both halves of the columns")
    stores = tuple(of_store(root) for root in roots)
    return HopperGemm(problem, target, batch, rows, N if up is None else N // 2, K, lhs, rhs, stores, scales, up)


def _block_scales(problem: Problem) -> tuple[BlockScales, Node, Node] | None:
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
    across, along = (column.shape[1], 1) if turned else (1, column.shape[1])
    scales = BlockScales(row.op.index, column.op.index, (row.shape[1], 1, across, along))
    return scales, lhs.src[0], swap_last(rhs.src[0]) if turned else rhs.src[0]


def _matrix(problem: Problem, root: Node, extents: tuple[int, int, int], batch_shape: Sequence[int], *, left: bool) -> Matrix:
    """The place of an operand; its batch axes are broadcast to `batch_shape`, if there are any, first."""
    batch, rows, k = extents
    constant = problem.constant(root)
    plain = read_operand(root).plain
    if not plain and not constant:
        raise Unsupported(f"the {'left' if left else 'right'} operand is not stored as it is multiplied")
    if batch_shape and math.prod(root.shape[:-2]) not in (1, math.prod(batch_shape)):
        root = broadcast(root, (*batch_shape, *root.shape[-2:]))
    many = math.prod(root.shape[:-2]) > 1 and batch > 1
    copy = Matrix(root, extents, (int(many), 1, 1), 0, None, constant, left).packed()
    if not plain:
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
    whole_k = k == 1 or (len(place.columns) == 1 and place.columns[0].extent == k)
    if not (whole_batch and whole_rows and whole_k):
        return copy
    down = inner[0].stride if rows > 1 else copy.strides[1]
    along = place.columns[0].stride if k > 1 else 1
    strides = (outer[0].stride if many else 0, down, along)
    steps = (strides[0], along if down == 1 and along != 1 else down)
    element = root.dtype.size_bytes(1)
    reads = along == 1 or (down == 1 and element == 2)
    if not reads or place.offset * element % ALIGNED or any(s * element % ALIGNED for s in steps):
        return copy
    assert isinstance(leaf.op, Param)
    return replace(copy, strides=strides, offset=place.offset, source=leaf.op.index)
