"""The module of a plain Triton gemm: its constants, and the functions generated from its program, which load a tile of an
operand in the type of the dot, and compute and store a tile of a result. The kernel itself is `_kernel.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from tilewright.candidates.triton.expressions.emit import Emitter, Tile
from tilewright.candidates.triton.expressions.exchange import Push
from tilewright.candidates.triton.expressions.printer import FP8, FP8_NAMES, zero
from tilewright.candidates.triton.expressions.text import KernelSource, Text
from tilewright.candidates.triton.gemm.dots import Dot
from tilewright.candidates.triton.runtime.module import instance
from tilewright.dtype import F32
from tilewright.ir.extent import Extent, divides, is_open
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import VIEWS
from tilewright.lowering.access import Access
from tilewright.schedule.candidate import Unsupported

KERNEL = "tilewright.candidates.triton.gemm._kernel.gemm"
OPEN = ("batch", "M", "N", "K", "stored", "down", "across", "tiles", "part_depth")  # what may be
OPERAND = ("rows", "row_mask", "k", "k_mask", "k0", "side")
RESULT = ("i: tl.constexpr", "acc", "up", "rows", "row_mask", "columns", "column_mask", "side")


@dataclass(frozen=True)
class TileConfig:
    """Sizes of one kernel; see docs/glossary.md."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    group_m: int = 8
    swap_ab: bool = False


@dataclass(frozen=True, kw_only=True)
class KernelConfig(TileConfig):
    """The constants of `_kernel.py`, and what follows from them."""

    batch: int  # matrices, each of M x N x K
    M: int
    N: int
    K: int
    accumulators: int  # sums that make one element of the result: 2 where a gate's and an up projection's columns meet
    integer: bool  # sums are int32, else f32
    precision: str | None  # of a product of f32, as `tl.dot` is told
    promote: int  # products after which short sums are added up in f32; 0 for never
    first_unsigned: bool  # operands of the dot that are unsigned bytes
    second_unsigned: bool
    batched: bool  # there are several matrices
    one_row: bool  # of tiles of a matrix
    one_column: bool
    group_rows: int  # tile rows that go together
    uneven_groups: bool  # the last of such groups may have fewer
    wide_sums: bool  # sums of parts of K are not counted in 31 bits
    store_whole: tuple[bool, ...]  # a result takes all columns, or those from a first to a last one
    store_first: tuple[int, ...]
    store_last: tuple[int, ...]
    store_amax: tuple[int, ...]  # its number among the results that are a largest magnitude, -1 for others

    @property
    def results(self) -> int:
        return len(self.store_first)

    @property
    def stored(self) -> int:
        """Columns of the results."""
        return self.N // self.accumulators

    @property
    def width(self) -> int:
        """Columns of the results that a tile has."""
        return self.tile_n // self.accumulators

    @property
    def down(self) -> int:
        """Tiles of a matrix along M."""
        return -(-self.M // self.tile_m)

    @property
    def across(self) -> int:
        """Tiles of a matrix along N."""
        return -(-self.stored // self.width)

    @property
    def tiles(self) -> int:
        return self.batch * self.down * self.across

    @property
    def part_depth(self) -> int:
        """K of each of its parts, in whole steps."""
        return -(-self.K // (self.tile_k * self.split_k)) * self.tile_k


@dataclass(frozen=True)
class KernelSpec:
    """A gemm at one point of its space: all that its kernel is written from.

    Attributes:
        batch, M, N, K: matrices, and the extents of each.
        dot: the instruction that multiplies a tile.
        lhs: access of [batch * M, K].
        rhs: access of [batch * N, K], or of [N, K] if `shared`.
        stores: access of [batch * M, N], one a result.
        sources: numbers of the sources that are arguments, before the results.
        fp8: see `Printer`.
        point: tile sizes and other knobs.
        up: what stands in the stores for sums of the right half of `rhs`, whose columns they read beside those of the left
            half (SwiGLU): a tile has as many of both.
        amaxes: stores, by number, that keep the largest magnitude of their values alone.
        push: ranks into whose memory the one store goes, if it does.
    """

    batch: int
    M: int
    N: int
    K: int
    dot: Dot
    lhs: Access
    rhs: Access
    stores: tuple[Access, ...]
    sources: tuple[int, ...]
    fp8: frozenset[str]
    point: TileConfig
    up: Node | None = None
    amaxes: tuple[int, ...] = ()
    push: Push | None = None

    @property
    def config(self) -> KernelConfig:
        """The kernel's constants.

        Raises:
            Unsupported: a result takes a range of open columns.
        """
        dot, unsigned, p = self.dot, (self.dot.lhs_flips, self.dot.rhs_flips), self.point
        first, second = unsigned[::-1] if p.swap_ab else unsigned
        ends = [(s.first, s.first + s.columns_extent) for s in self.stores]
        whole = [end == (0, self.N // (1 if self.up is None else 2)) for end in ends]
        ends = [(0, 0) if all_ else end for all_, end in zip(whole, ends, strict=True)]
        if is_open(x for end in ends for x in end):
            raise Unsupported("a result takes a range of columns that are open")
        down, across = self.tiles_of(p)
        group = p.group_m if isinstance(down, Extent) else min(p.group_m, down)
        return KernelConfig(
            **asdict(p),
            batched=self.batch > 1,
            one_row=not isinstance(down, Extent) and down == 1,
            one_column=not isinstance(across, Extent) and across == 1,
            group_rows=group,
            uneven_groups=not divides(group, down),
            wide_sums=p.split_k > 1 and self.batch * down * across * p.split_k * p.tile_m * p.tile_n >= 1 << 31,
            batch=self.batch,
            M=self.M,
            N=self.N,
            K=self.K,
            accumulators=1 if self.up is None else 2,
            integer=dot.acc is not F32,
            precision=dot.precision or None,
            promote=min(dot.promote, self.point.tile_k),
            first_unsigned=first,
            second_unsigned=second,
            store_whole=tuple(whole),
            store_first=tuple(first for first, _ in ends),
            store_last=tuple(last for _, last in ends),
            store_amax=tuple(self.amaxes.index(i) if i in self.amaxes else -1 for i in range(len(self.stores))),
        )

    def tiles_of(self, point: TileConfig) -> tuple[int, int]:
        """Tiles of a matrix along M and along N."""
        accumulators = 1 if self.up is None else 2
        return -(-self.M // point.tile_m), -(-(self.N // accumulators) // (point.tile_n // accumulators))

    @property
    def workspace(self) -> dict[str, int]:
        """Words of scratch memory, by the argument that they are: sums of parts of K, each tile's largest magnitude for each
        store that keeps that, and counters of parts that are done, one a tile, and of tiles that are."""
        tiles, point, sizes = self.config.tiles, self.point, dict[str, int]()
        split = point.split_k > 1
        if split:
            sizes["sums"] = tiles * point.split_k * point.tile_m * point.tile_n
        if self.amaxes:
            sizes["tile_amaxes"] = tiles * len(self.amaxes)
        if split or self.amaxes:
            sizes["counters"] = tiles * split + bool(self.amaxes)
        return sizes

    @property
    def workspace_bytes(self) -> int:
        return 4 * sum(self.workspace.values())

    @property
    def arguments(self) -> list[str]:
        """The names of the kernel's arguments, but for numbers."""
        results = [f"o{i}" for i in range(len(self.stores))] if self.push is None else self.push.names
        return [*(f"p{i}" for i in self.sources), *results, *self.workspace]


def write(spec: KernelSpec) -> KernelSource:
    """A module with the function `kernel`, whose grid is `tiles * split_k` blocks."""
    config, numbers = spec.config, Text()
    row_mask = None if divides(config.tile_m, spec.M) else "row_mask"
    column_mask = None if divides(config.width, config.stored) else "column_mask"
    near = {} if spec.up is None else {spec.up: "up"}
    tile = Tile("rows", "columns", config.stored, row_mask, column_mask, "acc", config.swap_ab, near=near)
    store, amax = Text(beside=numbers), Text(beside=numbers)
    for i, access in enumerate(spec.stores):
        t = amax if i in spec.amaxes else store
        with t.block(f"if i == {i}:"):
            emitter = Emitter(t, tile, fp8=spec.fp8)
            if i in spec.amaxes:
                t.do(f"return {emitter.amax_bits(access)}")
            elif spec.push is not None:
                replace(spec.push, arrivals=config.tiles).store(emitter, access)
            else:
                emitter.store(access, f"o{i}")
    functions = {
        "load_lhs": (OPERAND, _load(spec, spec.lhs, row_mask, numbers, across=config.swap_ab)),
        "load_rhs": (OPERAND, _load(spec, spec.rhs, column_mask and "row_mask", numbers, across=not config.swap_ab)),
        **{name: (RESULT, t) for name, t in (("store", store), ("amax", amax)) if t.lines},
    }
    amaxes, workspace = "".join(f"o{i}, " for i in spec.amaxes), [*spec.workspace]
    given = [*(name if name in workspace else "0" for name in ("sums", "tile_amaxes", "counters")), f"({amaxes})"]
    pointers = [name for name in spec.arguments if name not in workspace]
    extents = numbers.extents(config, OPEN)
    return instance(KERNEL, config, given, pointers, functions, numbers.numbers, workspace, gluon=False, extents=extents)


def _load(spec: KernelSpec, access: Access, row_mask: str | None, numbers: Text, *, across: bool) -> Text:
    """Load a tile of an operand: repeated where it does not vary, zero past the end of K, in the type of the dot."""
    t, point, target = Text(beside=numbers), spec.point, spec.dot.operand
    ragged = not divides(point.tile_k * point.split_k, spec.K)
    tile = Tile("rows", "k", spec.K, row_mask, "k_mask" if ragged else None, None, across, "k0", point.tile_k)
    emitter = Emitter(t, tile, fp8=spec.fp8)
    value, varies, dtype = emitter.value(access), emitter.varies(access), access.root.dtype
    computed = any(n.src and not isinstance(n.op, VIEWS) for n in toposort((access.root,)))
    if ragged and (computed or not varies[1]):
        value = emitter.where(emitter.expand("k_mask", 1), value, zero(dtype))
        varies = varies[0], True
    if not all(varies):
        rows, columns = "rows.shape[0]", "k.shape[0]"
        value = t.v(f"tl.broadcast_to({value}, ({f'{columns}, {rows}' if across else f'{rows}, {columns}'}))")
    if spec.dot.lhs_flips if access is spec.lhs else spec.dot.rhs_flips:
        value = emitter.cast(f"({value} ^ 128)", "int8", bits=True)
    elif target in FP8:
        value = emitter.cast(value, FP8_NAMES[dtype], bits=True)
    else:
        value = emitter.convert(value, dtype, target)
    t.do(f"return {value}")
    return t
