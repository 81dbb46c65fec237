"""A Hopper kernel: a tile configuration of a plan, its stores and arguments, and the constants that it is compiled for."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from tilewright.candidates.triton.expressions.chunks import COUNTERS, Chunks
from tilewright.candidates.triton.expressions.exchange import SHARED
from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.hopper.gemm.plan import HopperGemm, Matrix
from tilewright.candidates.triton.hopper.gemm.tile import TileConfig
from tilewright.candidates.triton.hopper.gemm.tma import TMA_TYPES, TmaView, descriptor, tma_view
from tilewright.dtype import PRED, U8, DType
from tilewright.ir.expression import quantised_at_once
from tilewright.ir.extent import Extent, divides
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Map, Param, Slice
from tilewright.lowering.access import Access
from tilewright.lowering.scalar.costs import COMPOSED
from tilewright.schedule.problem import Problem
from tilewright.sizes import next_power_of_2

LINE_BYTES, WORD_BYTES = 128, 4


@dataclass(frozen=True, kw_only=True)
class KernelConfig(TileConfig):
    """The constants of the kernel (`_kernel.py`), and what follows from them.

    The inherited knobs `blocks` and `stream_k` are set to 0 and to 0 or 1: machine code serves any number of either.
    """

    accumulators: int  # sums that make one element of the result: 2 where gate and up columns of the tile meet
    padded_n: int  # tile_n as Triton is told, who knows powers of two alone; columns beyond tile_n are never touched
    integer: bool  # sums are int32, else f32
    unsigned: tuple[bool, bool]  # operands that are unsigned bytes
    consumers: int  # warpgroups that multiply
    ordered: bool  # they take turns at the tensor cores, by an order barrier
    stage_bytes: int  # of shared memory, a stage, all of which TMA brings
    scale_strides: tuple[int, ...]  # of scales of 128 products (`BlockScales`)
    left: tuple[bool, bool, bool]  # along K, batched, shared: see `Matrix`
    right: tuple[bool, bool, bool]
    aux_load: bool  # TMA brings another operand of the result's extents while the product is computed
    shared_epilogue: bool  # stores differ in their addresses alone, and one's code serves all
    subtile_n: tuple[int, ...]  # columns of an epilogue subtile of each store
    store_first: tuple[int, ...]  # of the result's columns that it takes
    store_extent: tuple[int, ...]  # how many; 0: all, so that every tile has a part in it
    store_desc: tuple[int, ...]  # which of the TMA descriptors it has, -1 for none
    store_m_major: tuple[bool, ...]  # rows are its contiguous axis
    store_pitch: tuple[int, ...]  # elements from row to row where threads write it a line of 128 bytes at a time, else 0
    some_rows: bool  # of the last tiles do not exist
    consumer_registers: int  # of a thread, of 64K in all
    producer_registers: int  # of a thread of the warp that loads: more where words are asked for as well
    owners: int = 0  # ranks into whose memory tiles go, each of which owns the rows of a matrix of the batch; 0: they stay here
    paced: bool = False  # subtiles of a deferred tile leave one by one over all products of the next tile, not behind its first
    mixed: bool = False  # tiles of all owners are multiplied side by side, not those of one and then of the next
    copies: int = 1  # ranks to which each tile goes: all, where there is one owner, which stands for every rank
    owner_m: int = 0  # tile rows of each
    owner_n: int = 0  # tiles of each of them
    chunk_m: int = 0  # tile rows that an owner is told of at once
    counters_at: int = 0  # places of counters and of flags in a rank's memory
    flags_at: int = 0

    @property
    def result_n(self) -> int:
        """Columns of the result that a tile gives."""
        return self.tile_n // self.accumulators

    @property
    def epilogue_n(self) -> int:
        """Columns of a tile that one block of a cluster finishes."""
        return self.result_n // self.split_k

    @property
    def left_boxes(self) -> int:
        """Boxes of the left operand to a stage, and the consumers that share a tile: each has one."""
        return 1 if self.pingpong else self.consumers

    @property
    def rows(self) -> int:
        """Rows of a consumer's part of a tile."""
        return self.tile_m // self.left_boxes

    @property
    def cluster(self) -> int:
        """Blocks that are started together."""
        return 2 if self.multicast else self.split_k

    @property
    def right_rows(self) -> int:
        """Rows of the right operand, columns of the result, in one of its boxes."""
        share = self.tile_n // (2 if self.multicast else self.accumulators)
        return share if share & (share - 1) == 0 else math.gcd(share, 64)

    @property
    def gathers(self) -> bool:
        """Rows of the left operand come while the kernel runs (`gathered/`)."""
        return False

    @property
    def block_scaled(self) -> bool:
        """Sums of 128 products are multiplied by scales."""
        return bool(self.scale_strides)

    @property
    def subtiles(self) -> int:
        """Epilogue subtiles of the first store."""
        return self.epilogue_n // self.subtile_n[0]

    @property
    def prologue_steps(self) -> int:
        """Steps along K of a tile that are asked for before it is known which one it is."""
        return self.subtiles if self.deferred_store else 1

    @property
    def store_bytes(self) -> int:
        """Bytes of shared memory for subtiles on their way out."""
        return self.consumers * self.rows * 128 * self.store_buffers

    @property
    def store_buffers(self) -> int:
        """Buffers of a consumer for epilogue subtiles; one for each of them where the auxiliary operand comes in by them first,
        unless it may come later, while the other warpgroup multiplies."""
        if self.aux_load:
            return min(self.subtiles, 2) if self.pingpong else self.subtiles
        return 2 if self.rows == 64 else 1


@dataclass(frozen=True)
class Store:
    """One result: its expression, and how its subtiles leave.

    Attributes:
        access: where its leaves and its elements lie.
        view: as TMA writes it, None for addresses of its own.
        columns: of a subtile.
        aux: a source that is as wide and long as the result, and how TMA brings it a subtile at a time.
    """

    access: Access
    view: TmaView | None
    columns: int
    aux: tuple[Node, TmaView] | None = None


@dataclass(frozen=True)
class Argument:
    """An address that a kernel is given.

    Attributes:
        name, type: the kernel's name for it, and Triton's type of that.
        view: the array behind a TMA descriptor; None for a pointer.
        source: the number of the gemm's source that lies there, or None.
        result: likewise of the result that is written there.
        matrix: the operand that lies there, a copy where it has no `source`.
    """

    name: str
    type: str
    view: TmaView | None = None
    source: int | None = None
    result: int | None = None
    matrix: Matrix | None = None


@dataclass(frozen=True)
class KernelSpec:
    """One kernel: a tile configuration of a plan.

    Attributes:
        plan, tile: see there.
        acc: type of the sums.
        stores: the results.
        chunks: the memory of ranks into which the one store goes, if it does: rows of each matrix of the batch are a rank's,
            or those of the only one all ranks'.
        paced: a deferred tile leaves as evenly as may be, since links take longer than this chip's memory.
    """

    plan: HopperGemm
    tile: TileConfig
    acc: DType
    stores: tuple[Store, ...]
    chunks: Chunks | None = field(default=None, kw_only=True)
    paced: bool = field(default=False, kw_only=True)

    kernel: ClassVar[str] = "tilewright.candidates.triton.hopper.gemm._kernel.gemm"

    @cached_property
    def config(self) -> KernelConfig:
        """The kernel's constants."""
        plan, tile, stores = self.plan, self.tile, self.stores
        same, views = share_epilogue(stores, tile.tile_n), [s.view for s in stores]
        stores = stores[:1] if same else stores
        constants: dict[str, Any] = vars(tile) | {
            "tile_k": plan.tile_k,
            "blocks": 0,
            "stream_k": min(tile.stream_k, 1),
            "accumulators": plan.accumulators,
            "padded_n": next_power_of_2(tile.tile_n),
            "integer": self.acc.is_integer,
            "unsigned": (plan.lhs.dtype is U8, plan.rhs.dtype is U8),
            "consumers": 2 if tile.tile_m >= 128 or tile.pingpong else 1,
            "ordered": tile.pingpong,
            "stage_bytes": (tile.tile_m + tile.tile_n) * 128,
            "scale_strides": plan.scales.strides if plan.scales else (),
            **{name: (x.along_k, x.batched, x.shared) for name, x in (("left", plan.lhs), ("right", plan.rhs))},
            "aux_load": any(s.aux for s in stores),
            "shared_epilogue": same,
            "subtile_n": tuple(s.columns for s in stores),
            "store_first": tuple(s.access.first for s in stores),
            "store_extent": tuple(0 if same or s.access.columns_extent == plan.N else s.access.columns_extent for s in stores),
            "store_desc": tuple(sum(map(bool, views[:i])) if views[i] else -1 for i in range(len(stores))),
            "store_m_major": tuple(s.view is not None and s.view.m_major for s in stores),
            "store_pitch": tuple(_pitch(s, plan.N) for s in stores),
            "some_rows": not divides(tile.tile_m * (2 if tile.multicast else 1), plan.M),
            "consumer_registers": 240,
            "producer_registers": 24,
        }
        if self.chunks is not None:
            constants |= {
                "owners": 1 if self.chunks.shared else self.chunks.ranks,
                "copies": self.chunks.ranks if self.chunks.shared else 1,
                "paced": self.paced,
                "mixed": self.chunks.spread,
                "owner_m": -(-plan.M // tile.tile_m),
                "owner_n": -(-plan.N // tile.tile_n),
                "chunk_m": self.chunks.chunk // tile.tile_m,
                "counters_at": COUNTERS,
                "flags_at": self.chunks.flags[0],
            }
            if not tile.pingpong:  # more state between tiles: fewer registers spill so
                constants |= {"consumer_registers": 232, "producer_registers": 40}
        return KernelConfig(**constants)

    def at(self, problem: Problem, tile: TileConfig, values: Mapping[str, int]) -> Self:
        """The kernel of a problem that this one's machine code serves, for values of the dims that it leaves open, by name:
        `tile` differs in blocks and in what they share at most."""
        stores = tuple(
            replace(s, view=s.view and s.view.at(values), aux=s.aux and (s.aux[0], s.aux[1].at(values))) for s in self.stores
        )
        made = replace(self, plan=self.plan.at(problem, values), tile=tile, stores=stores)
        vars(made)["config"] = self.config  # as it was compiled for, and so descriptors: of one matrix they would be others
        vars(made)["operands"] = tuple(
            replace(a, view=a.view and a.view.at(values), matrix=a.matrix and a.matrix.at(values)) for a in self.operands
        )
        return made

    @cached_property
    def operands(self) -> tuple[Argument, ...]:
        """The arguments that are multiplied."""
        plan, config = self.plan, self.config
        views = plan.lhs.view(config.rows, config.tile_k), plan.rhs.view(config.right_rows, config.tile_k)
        return tuple(
            Argument(name, descriptor(TMA_TYPES[m.dtype.name], view.box), view, m.source, matrix=m)
            for name, m, view in zip(("a_desc", "b_desc"), (plan.lhs, plan.rhs), views, strict=True)
        )

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's addresses in order: operands, results by TMA, what TMA loads for the epilogue, sources and results by
        pointers."""
        types, stores = self.plan.problem.types, [(i, s, s.access.root.dtype) for i, s in enumerate(self.stores)]
        read = {n for s in self.stores for n in leaves(s, self.plan.up)} - {s.aux[0] for s in self.stores if s.aux}
        sources = {n.op.index for n in read if isinstance(n.op, Param)}
        sources |= {self.plan.scales.lhs, self.plan.scales.rhs} if self.plan.scales else set()
        found = [*self.operands]
        if self.chunks is None:
            found += [Argument(f"c{i}_desc", _tma_type(t, s.view), s.view, result=i) for i, s, t in stores if s.view]
        else:  # tiles of each rank, then the memory of this one, and of all
            ((_, s, t),), ranks = stores, range(self.chunks.ranks)
            assert s.view is not None
            found += [Argument(f"c{r}_desc", _tma_type(t, s.view), s.view, SHARED + r) for r in ranks]
            names = ["own", *(f"to{r}" for r in ranks)]
            found += [Argument(name, "*i32", source=SHARED + len(ranks) + i) for i, name in enumerate(names)]
        for i, s, _ in stores:
            if s.aux and isinstance(s.aux[0].op, Param):
                leaf, view = s.aux
                found.append(Argument(f"d{i}_desc", _tma_type(leaf.dtype, view), view, s.aux[0].op.index))
        found += [Argument(f"p{i}", pointer_type(types[i].dtype), source=i) for i in sorted(sources)]
        found += [Argument(f"r{i}", pointer_type(t), result=i) for i, s, t in stores if s.view is None]
        return tuple(found)

    @property
    def note(self) -> str:
        """Words of what its machine code depends on beside its text."""
        return ""

    @property
    def shared(self) -> tuple[int, ...]:
        """Numbers, as sources, of the last pointers of `scratch`, which are not of scratch memory."""
        return ()

    @property
    def scratch(self) -> dict[str, str]:
        """Names and types of the pointers to parts of sums and to counters of those that have come, with stream-K."""
        return {"partial": "*i32" if self.config.integer else "*fp32", "arrived": "*i32"} if self.tile.stream_k else {}

    @property
    def extents(self) -> dict[str, int]:
        """The problem's extents, by the kernel's names; with stream-K, the number of tiles that are whole, too."""
        plan, shared = self.plan, self.tile.stream_k
        given = {"B": plan.batch, "M": plan.M, "N": plan.N, "K": plan.K}
        if self.chunks is not None:
            return given | {"next_rank": 0}  # the runner says which
        return given | ({"whole_tiles": plan.tiles(self.tile) - shared} if shared else {})


def _tma_type(dtype: DType, view: TmaView) -> str:
    return descriptor(pointer_type(dtype)[1:], view.box)


def spec_of(plan: HopperGemm, tile: TileConfig) -> KernelSpec:
    """The kernel of a tile configuration."""
    if tile.vector_store and not plan.rhs.permuted:
        plan = replace(plan, rhs=plan.rhs.packed(permuted=True))
    rows = tile.tile_m // (2 if tile.tile_m >= 128 and not tile.pingpong else 1)
    stores: list[Store] = []
    for access in plan.stores:
        widest = math.gcd(128 // access.root.dtype.size_bytes(1), tile.tile_n // plan.accumulators // tile.split_k)
        if not quantised_at_once(access.root) and any(isinstance(n.op, Map) and n.op.fn in COMPOSED for n in access.views):
            widest = min(widest, 64)  # of wider ones more would be under way than there are registers
        fitting = (_store(access, plan, rows, widest >> i) for i in range(3))  # heads may be narrower than a subtile
        stores.append(next((s for s in fitting if s.view is not None), Store(access, None, widest)))
    if len(stores) == 1 and plan.scales is None and not tile.deferred_store and not tile.stream_k and tile.split_k == 1:
        stores[0] = replace(stores[0], aux=_aux(stores[0], plan, rows))
    return KernelSpec(plan, tile, plan.problem.acc.dtype, tuple(stores))


def _store(access: Access, plan: HopperGemm, rows: int, columns: int) -> Store:
    """A store in subtiles of so many columns."""
    if access.first % columns:  # a subtile would begin in one store and end in another
        return Store(access, None, columns)
    element = access.root.dtype.size_bytes(1)
    view = tma_view(access.of_result(), plan.batch, plan.M, access.columns_extent, rows, columns, element)
    return Store(access, view, columns)


def _pitch(store: Store, N: int) -> int:
    """Elements from one row of a store to the next, if threads write it by lines: words side by side, in all columns."""
    place, size = store.access.of_result(), store.access.root.dtype.size_bytes(1)
    if store.view is not None or size * store.columns != LINE_BYTES or size != WORD_BYTES or store.access.columns_extent != N:
        return 0
    beside = [(t.inner, t.stride) for t in place.columns] == [(1, 1)]
    pitch = place.rows[0].stride if beside and len(place.rows) == 1 and place.rows[0].inner == 1 else 0
    return 0 if isinstance(pitch, Extent) else pitch


def _aux(store: Store, plan: HopperGemm, rows: int) -> tuple[Node, TmaView] | None:
    """The operand that TMA may bring of those a store reads: one as large as the result, of elements as large."""
    element = store.access.root.dtype.size_bytes(1)
    if store.view is None or store.view.m_major or store.access.columns_extent != plan.N:
        return None
    read = [n for n in store.access.views if isinstance(n.op, Param) and n is not plan.up]
    for leaf in (n for n in read if n.dtype.size_bytes(1) == element and n.dtype is not PRED):
        view = tma_view(store.access.of_leaf(leaf), plan.batch, plan.M, plan.N, rows, store.columns, element)
        if view is not None and not view.m_major:
            return leaf, view
    return None


def leaves(store: Store, up: Node | None) -> list[Node]:
    """The sources that a store reads, in order."""
    return [n for n in toposort((store.access.root,)) if isinstance(n.op, Param) and n is not up]


def share_epilogue(stores: Sequence[Store], tile_n: int) -> bool:
    """Tell whether several stores differ in where they read and write alone, as those of Q, K and V do, so that one code serves
    them: they take equal ranges of columns, of whole tiles, one after the other."""
    extent = stores[0].access.columns_extent
    if len(stores) < 2 or extent % tile_n or any(s.view is None for s in stores):
        return False
    follow = all(s.access.first == i * extent for i, s in enumerate(stores))
    return follow and len({_shape(s) for s in stores}) == 1


def _shape(store: Store) -> Hashable:
    """A store without the sources it reads, where in them it begins, and the columns it takes."""
    number: dict[Node, int] = {}
    found: list[Hashable] = [store.view, store.columns, store.access.columns_extent]
    for n in toposort((store.access.root,)):
        number[n] = len(number)
        if isinstance(n.op, Param):
            found.append((n.tensor, replace(store.access.of_leaf(n), offset=0)))
        elif isinstance(n.op, Slice):
            found.append((n.op.step, n.tensor, number[n.src[0]]))
        else:
            found.append((n.op, n.tensor, *(number[s] for s in n.src)))
    return tuple(found)
