"""What the text of a Hopper kernel depends on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tilewright.candidates.triton.hopper.gemm.view import TmaView
from tilewright.dtype import BF16, F16, DType
from tilewright.ir.graph import Node
from tilewright.lowering.access import Access

if TYPE_CHECKING:
    import torch

FRAGMENT = {"s8": "int8", "u8": "int8", "f8e4m3fn": "float8e4nv", "f8e5m2": "float8e5", "bf16": "bfloat16", "f16": "float16"}
HELD = (BF16, F16)  # of bytes it saved nothing: 25.8 us against 25.6 for sixteen products of 1024 x 1024 x 1024


@dataclass(frozen=True)
class Side:
    """How an operand lies.

    Attributes:
        dtype: of its elements.
        along_k: K is its contiguous axis; else its rows (or columns) are, and a stage holds it transposed.
        batched: it has a matrix for each of the batch, beyond a stride that TMA steps over.
        widened: its rows were packed in the order in which a thread of the result then holds eight neighbours.
        shared: it is one matrix for all of the batch.
    """

    dtype: DType
    along_k: bool
    batched: bool
    widened: bool = False
    shared: bool = False

    def box(self, rows: int, tile_k: int) -> list[int]:
        """Extents of what one copy brings."""
        plain = [rows, tile_k] if self.along_k else [tile_k, rows]
        return [1, *plain] if self.batched else plain


@dataclass(frozen=True)
class Blocks:
    """Scales of 8-bit operands that hold for 128 of K: of each row of the left one, of 128 columns of the right one.

    Attributes:
        lhs, rhs: the sources that hold them.
        lhs_strides: of a row and of a block of K, in elements.
        rhs_strides: of a block of columns and of a block of K.
    """

    lhs: int
    rhs: int
    lhs_strides: tuple[int, int]
    rhs_strides: tuple[int, int]


@dataclass(frozen=True)
class Out:
    """One store: its expression, and how its pieces leave.

    Attributes:
        access: where its leaves and its elements lie.
        view: as TMA writes it, None for addresses of its own.
        columns: of a piece.
        fetched: a source that is as wide and long as the result, and how TMA brings it a piece at a time.
    """

    access: Access
    view: TmaView | None
    columns: int
    fetched: tuple[Node, TmaView] | None = None


@dataclass(frozen=True)
class KernelConfig:
    """What the kernel (`_kernel.py`) is compiled for: its constants, features among them. `Form` says more of those it has."""

    tile_m: int  # rows and columns of a block's tile, and elements of K of a stage
    tile_n: int
    tile_k: int
    width: int  # columns of the result that a tile gives, each of `halves` of its own
    halves: int
    own_n: int  # columns that one block finishes
    shape_n: int  # tile_n as Triton is told
    instruction: tuple[int, int, int]  # rows, columns and elements of K of one product, as Triton is told
    integer: bool  # sums are int32, else f32
    rows: int  # of a warpgroup
    groups: int
    parts: int  # of a stage of the left operand
    pingpong: bool
    turns: bool  # warpgroups take turns at the tensor cores
    num_stages: int
    stage_bytes: int
    group_m: int
    ahead: int  # steps along K of the prologue
    hold: bool
    streamed: bool  # stream-K
    split: int  # blocks of a cluster that share K, by way of distributed shared memory
    paired: bool  # multicast
    cluster: int
    chained: bool  # programmatic dependent launch
    by_blocks: bool  # sums of 128 products are multiplied by scales
    block_strides: tuple[int, ...]  # of those of rows: of a row, of a block of K; of those of columns the same
    unit: int  # columns of the right operand that one copy brings, and copies to a stage
    units: int
    left: tuple[bool, bool, bool]  # along K, batched, shared: see `Side`
    right: tuple[bool, bool, bool]
    widened: bool  # a thread stores eight neighbours of a row
    within: bool  # a view of shared memory may not be larger than what it is a view of
    out_bytes: int
    leaving: int
    pieces: int  # of the first store
    fetches: bool
    stores_by_tma: bool  # some of them
    alike: bool  # stores differ in their addresses alone, and one stands for all
    store_columns: tuple[int, ...]  # of a piece of each store
    store_first: tuple[int, ...]  # of the result's columns that it takes
    store_extent: tuple[int, ...]  # how many; 0: all
    store_by_tma: tuple[int, ...]  # which of the descriptors it has, -1 for none
    store_across: tuple[bool, ...]  # rows are its contiguous axis
    store_everywhere: tuple[bool, ...]  # every tile has a part in it
    consumer_registers: int  # of a thread
    producer_registers: int


class Packed(Protocol):
    """A left operand that comes packed in words, which a kernel of its own makes numbers of.

    Attributes:
        descriptors: what the kernel calls its arrays of words.
        first: the number of the source with the first of them.
    """

    @property
    def descriptors(self) -> tuple[str, ...]: ...
    @property
    def first(self) -> int: ...
    @property
    def kernel(self) -> str:
        """Module and name of the kernel, which takes the right operand's descriptor and the tuple of these first."""
        ...

    def box(self, name: str, rows: int) -> list[int]:
        """Words of a tile of so many rows that one copy of an array brings."""
        ...

    def copied_bytes(self, rows: int) -> int:
        """Of all copies for a step."""
        ...

    def cut(self, name: str, packed: torch.Tensor) -> torch.Tensor:
        """An array as copies cut it."""
        ...

    def configured(self, constants: Mapping[str, Any]) -> KernelConfig:
        """The kernel's constants, those of every gemm given."""
        ...

    def turns(self, columns: int) -> bool:
        """Whether warpgroups take turns at the tensor cores, in tiles of so many columns."""
        ...


@dataclass(frozen=True)
class Form:
    """What a kernel's text depends on.

    Attributes:
        lhs, rhs: the operands.
        tile_m, tile_n: of the result, a block's.
        groups: warpgroups that multiply.
        pingpong: each warpgroup owns whole tiles, every other one of the block's; while one multiplies the other writes.
        num_stages: of the ring.
        group_m: rows of tiles in a band.
        hold: a result waits in registers and leaves behind the first products of the next tile.
        streamed: the last tiles are shared out evenly along K, their parts added up in order.
        chained: it may be launched before the kernel ahead of it has ended.
        paired: two blocks bring each other's half of the right operand.
        rows_whole, columns_whole: tiles end where the result does.
        columns: of the result.
        outs: the stores.
        blocks: scales that sums of 128 products are multiplied by before they are added up.
        coded: the left operand is words, of which the warps that multiply make numbers.
        second: what stands in the stores for sums of the right half of the right operand's columns, which meet those of the
            left half: a tile has as many of both.
        split: blocks of a cluster that have a share of K each, add up their sums, and finish a share of the columns each.
    """

    lhs: Side
    rhs: Side
    acc: DType
    tile_m: int
    tile_n: int
    groups: int
    pingpong: bool
    num_stages: int
    group_m: int
    hold: bool
    streamed: bool
    chained: bool
    paired: bool
    rows_whole: bool
    columns_whole: bool
    columns: int
    outs: tuple[Out, ...]
    blocks: Blocks | None = None
    coded: Packed | None = None
    second: Node | None = None
    split: int = 1

    @property
    def halves(self) -> int:
        """Columns of a tile that make one of the result."""
        return 1 if self.second is None else 2

    @property
    def width(self) -> int:
        """Columns of the result that a tile gives."""
        return self.tile_n // self.halves

    @property
    def tile_k(self) -> int:
        """128 bytes: a row of a stage, as wide as the swizzle."""
        return 128 * 8 // self.lhs.dtype.bits

    @property
    def rows(self) -> int:
        """Of a warpgroup."""
        return self.tile_m // self.parts

    @property
    def parts(self) -> int:
        """Of a stage of the left operand, and of its readers."""
        return 1 if self.pingpong else self.groups

    @property
    def shape_n(self) -> int:
        """Columns as Triton is told of them, who knows powers of two alone; those beyond tile_n are never touched."""
        return 1 << (self.tile_n - 1).bit_length()

    @property
    def own_n(self) -> int:
        """Columns of a tile that one block finishes."""
        return self.width // self.split

    @property
    def cluster(self) -> int:
        """Blocks that are started together."""
        return 2 if self.paired else self.split

    @property
    def unit(self) -> int:
        """Rows of the right operand, columns of the result, that one copy brings."""
        share = self.tile_n // (2 if self.paired or self.second else 1)
        return share if share & (share - 1) == 0 else math.gcd(share, 64)

    @property
    def units(self) -> int:
        """Copies of the right operand to a stage."""
        return self.tile_n // self.unit

    @property
    def instruction(self) -> tuple[int, int, int]:
        """What one instruction multiplies, as Triton is told: it has none of 256 columns for integers."""
        widest = 128 if self.acc.is_integer else 256
        return 16, min(self.shape_n, widest), 256 // self.lhs.dtype.bits

    def tiles(self, batch: int, M: int, N: int) -> int:
        """Of a result; where blocks work in pairs, pairs of tiles one below the other."""
        down = -(-M // (self.tile_m * (2 if self.paired else 1)))
        return batch * down * -(-N // self.width)

    @property
    def turns(self) -> bool:
        """Warpgroups take turns at the tensor cores."""
        return self.pingpong or (self.coded is not None and self.coded.turns(self.shape_n))

    @property
    def ahead(self) -> int:
        """Steps along K of a tile that are asked for before it is known which one it is."""
        return self.pieces if self.hold else 1

    @property
    def consumer_registers(self) -> int:
        """Of a thread of a warpgroup, of 64K in all."""
        return 232 if self.coded else 240

    @property
    def producer_registers(self) -> int:
        """Of a thread of the warp that loads: more where words are asked for as well."""
        return 40 if self.coded else 24

    @property
    def pieces(self) -> int:
        """Of a result that is held."""
        return self.own_n // self.outs[0].columns

    @property
    def stage_bytes(self) -> int:
        """Of shared memory, one stage of the ring, all of which TMA brings."""
        left = self.coded.copied_bytes(self.tile_m) if self.coded else self.tile_m * 128
        return left + self.tile_n * 128

    @property
    def out_bytes(self) -> int:
        """Of shared memory, pieces on their way out."""
        return self.groups * self.rows * 128 * self.leaving if any(o.view for o in self.outs) else 0

    @property
    def leaving(self) -> int:
        """Pieces of a warpgroup that have a place of their own; all of them where something comes in by them first, unless it
        may come later, while the other warpgroup multiplies."""
        if self.fetches:
            return min(self.pieces, 2) if self.pingpong else self.pieces
        return 2 if self.rows == 64 else 1

    @property
    def fetches(self) -> bool:
        """TMA brings another operand of the result's extents while the product is computed."""
        return any(o.fetched for o in self.outs)


def size(dtype: DType) -> int:
    """Bytes of an element in memory."""
    return max(dtype.bits // 8, 1)
