"""A Hopper kernel: a point of a plan, its stores, and the constants that it is compiled for."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from tilewright.candidates.triton.hopper.gemm.view import TmaView
from tilewright.candidates.triton.runtime.versions import within
from tilewright.dtype import BF16, F16, DType
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param, Slice
from tilewright.lowering.access import Access

if TYPE_CHECKING:
    import torch

    from tilewright.candidates.triton.hopper.gemm.plan import Plan
    from tilewright.candidates.triton.hopper.gemm.space import Point

FRAGMENT = {"s8": "int8", "u8": "int8", "f8e4m3fn": "float8e4nv", "f8e5m2": "float8e5", "bf16": "bfloat16", "f16": "float16"}
OF_POINT = ("tile_m", "tile_n", "pingpong", "num_stages", "group_m", "hold", "split", "paired")
HELD = (BF16, F16)  # of bytes it saved nothing: 25.8 us against 25.6 for sixteen products of 1024 x 1024 x 1024


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
    """What the kernel (`_kernel.py`) is compiled for: its constants, and what follows from them."""

    tile_m: int  # rows and columns of a block's tile, and elements of K of a stage: 128 bytes, as wide as the swizzle
    tile_n: int
    tile_k: int
    halves: int  # columns of the tile that make one of the result, which it has as many of
    shape_n: int  # tile_n as Triton is told, who knows powers of two alone; columns beyond tile_n are never touched
    integer: bool  # sums are int32, else f32
    groups: int  # warpgroups that multiply
    pingpong: bool  # each of them owns whole tiles, every other one of the block's; while one multiplies the other writes
    turns: bool  # warpgroups take turns at the tensor cores
    num_stages: int  # of the ring
    stage_bytes: int  # of shared memory, a stage, all of which TMA brings
    group_m: int  # rows of tiles in a band
    hold: bool  # a result waits in registers and leaves behind the first products of the next tile
    streamed: bool  # stream-K: the last tiles are shared out evenly along K, their parts added up in order
    split: int  # blocks of a cluster that have a share of K each, add up their sums, and finish a share of the columns each
    paired: bool  # multicast: two blocks bring each other's half of the right operand
    chained: bool  # programmatic dependent launch: it may be launched before the kernel ahead of it has ended
    block_strides: tuple[int, ...]  # of scales of 128 products: of a row, of a block of K; of those of columns the same
    left: tuple[bool, bool, bool]  # along K, batched, shared: see `Matrix`
    right: tuple[bool, bool, bool]
    widened: bool  # a thread stores eight neighbours of a row
    fetches: bool  # TMA brings another operand of the result's extents while the product is computed
    alike: bool  # stores differ in their addresses alone, and one stands for all
    store_columns: tuple[int, ...]  # of a piece of each store
    store_first: tuple[int, ...]  # of the result's columns that it takes
    store_extent: tuple[int, ...]  # how many; 0: all
    store_by_tma: tuple[int, ...]  # which of the descriptors it has, -1 for none
    store_across: tuple[bool, ...]  # rows are its contiguous axis
    consumer_registers: int  # of a thread, of 64K in all
    producer_registers: int  # of a thread of the warp that loads: more where words are asked for as well

    @property
    def width(self) -> int:
        """Columns of the result that a tile gives."""
        return self.tile_n // self.halves

    @property
    def own_n(self) -> int:
        """Columns of a tile that one block finishes."""
        return self.width // self.split

    @property
    def instruction(self) -> tuple[int, int, int]:
        """What one instruction multiplies, as Triton is told: it has none of 256 columns for integers."""
        return 16, min(self.shape_n, 128 if self.integer else 256), self.tile_k // 4

    @property
    def parts(self) -> int:
        """Of a stage of the left operand, and of its readers."""
        return 1 if self.pingpong else self.groups

    @property
    def rows(self) -> int:
        """Of a warpgroup."""
        return self.tile_m // self.parts

    @property
    def cluster(self) -> int:
        """Blocks that are started together."""
        return 2 if self.paired else self.split

    @property
    def unit(self) -> int:
        """Rows of the right operand, columns of the result, that one copy brings."""
        share = self.tile_n // (2 if self.paired else self.halves)
        return share if share & (share - 1) == 0 else math.gcd(share, 64)

    @property
    def units(self) -> int:
        """Copies of the right operand to a stage."""
        return self.tile_n // self.unit

    @property
    def by_blocks(self) -> bool:
        """Sums of 128 products are multiplied by scales."""
        return bool(self.block_strides)

    @property
    def within(self) -> bool:
        """A view of shared memory may not be larger than what it is a view of."""
        return within()

    @property
    def pieces(self) -> int:
        """Of the first store."""
        return self.own_n // self.store_columns[0]

    @property
    def ahead(self) -> int:
        """Steps along K of a tile that are asked for before it is known which one it is."""
        return self.pieces if self.hold else 1

    @property
    def stores_by_tma(self) -> bool:
        """Some of them leave by TMA."""
        return max(self.store_by_tma) >= 0

    @property
    def store_everywhere(self) -> tuple[bool, ...]:
        """Every tile has a part in each."""
        return tuple(extent == 0 for extent in self.store_extent)

    @property
    def out_bytes(self) -> int:
        """Of shared memory, pieces on their way out."""
        return self.groups * self.rows * 128 * self.leaving if self.stores_by_tma else 0

    @property
    def leaving(self) -> int:
        """Pieces of a warpgroup that have a place of their own; all of them where something comes in by them first, unless it
        may come later, while the other warpgroup multiplies."""
        if self.fetches:
            return min(self.pieces, 2) if self.pingpong else self.pieces
        return 2 if self.rows == 64 else 1

    def tiles(self, batch: int, M: int, N: int) -> int:
        """Of a result; where blocks work in pairs, pairs of tiles one below the other."""
        return batch * -(-M // (self.tile_m * (2 if self.paired else 1))) * -(-N // self.width)


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
        """Tell whether warpgroups take turns at the tensor cores, in tiles of so many columns."""
        ...


@dataclass(frozen=True)
class Form:
    """One kernel: a point of a plan.

    Attributes:
        plan, point: see there.
        acc: type of the sums.
        outs: the stores.
        chained: it may be launched before the kernel ahead of it has ended.
        coded: the left operand is words, of which the warps that multiply make numbers.
    """

    plan: Plan
    point: Point
    acc: DType
    outs: tuple[Out, ...]
    chained: bool
    coded: Packed | None = None

    @cached_property
    def config(self) -> KernelConfig:
        """The kernel's constants."""
        plan, point, coded = self.plan, self.point, self.coded
        lhs, rhs, blocks = plan.lhs, plan.rhs, plan.blocks
        same, shape_n = alike(self.outs, point.tile_n), 1 << (point.tile_n - 1).bit_length()
        outs, views = self.outs[:1] if same else self.outs, [o.view for o in self.outs]
        constants: dict[str, Any] = {
            **{name: getattr(point, name) for name in OF_POINT},
            "tile_k": plan.tile_k,
            "halves": plan.halves,
            "shape_n": shape_n,
            "integer": self.acc.is_integer,
            "groups": 2 if point.tile_m >= 128 or point.pingpong else 1,
            "turns": point.pingpong if coded is None else coded.turns(shape_n),
            "stage_bytes": (coded.copied_bytes(point.tile_m) if coded else point.tile_m * 128) + point.tile_n * 128,
            "streamed": point.shared_tiles > 0,
            "chained": self.chained,
            "block_strides": (*blocks.lhs_strides, *blocks.rhs_strides) if blocks else (),
            **{name: (x.along_k, x.batched, x.shared) for name, x in (("left", lhs), ("right", rhs))},
            "widened": rhs.widened,
            "fetches": any(o.fetched for o in outs),
            "alike": same,
            "store_columns": tuple(o.columns for o in outs),
            "store_first": tuple(o.access.first for o in outs),
            "store_extent": tuple(0 if same or o.access.columns_extent == plan.N else o.access.columns_extent for o in outs),
            "store_by_tma": tuple(sum(map(bool, views[:i])) if views[i] else -1 for i in range(len(outs))),
            "store_across": tuple(o.view is not None and o.view.across for o in outs),
            "consumer_registers": 232 if coded else 240,
            "producer_registers": 40 if coded else 24,
        }
        return KernelConfig(**constants) if coded is None else coded.configured(constants)


def leaves(out: Out, second: Node | None) -> list[Node]:
    """What a store reads of memory, in order."""
    return [n for n in toposort((out.access.root,)) if isinstance(n.op, Param) and n is not second]


def alike(outs: Sequence[Out], tile_n: int) -> bool:
    """Tell whether several stores differ in where they read and write alone, as those of Q, K and V do, so that one code serves
    them: they take equal ranges of columns, of whole tiles, one after the other."""
    extent = outs[0].access.columns_extent
    if len(outs) < 2 or extent % tile_n or any(o.view is None for o in outs):
        return False
    follow = all(o.access.first == i * extent for i, o in enumerate(outs))
    return follow and len({_shape(o) for o in outs}) == 1


def _shape(out: Out) -> Hashable:
    """A store without the sources it reads, where in them it begins, and the columns it takes."""
    number: dict[Node, int] = {}
    found: list[Hashable] = [out.view, out.columns, out.access.columns_extent]
    for n in toposort((out.access.root,)):
        number[n] = len(number)
        if isinstance(n.op, Param):
            found.append((n.tensor, replace(out.access.of_leaf(n), offset=0)))
        elif isinstance(n.op, Slice):
            found.append((n.op.step, n.tensor, number[n.src[0]]))
        else:
            found.append((n.op, n.tensor, *(number[s] for s in n.src)))
    return tuple(found)


def size(dtype: DType) -> int:
    """Bytes of an element in memory."""
    return max(dtype.bits // 8, 1)
