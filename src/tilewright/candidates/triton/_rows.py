"""A region's rows as the text of a Triton kernel: a tile of whole rows a program, kept in registers from load to store.

Where something is reduced, a tile holds all columns of its rows, so that nothing is read twice and each reduction is one step;
where nothing is, it takes a piece of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewright.candidates.triton._casts import in_registers
from tilewright.candidates.triton._emit import Emitter, Tile
from tilewright.candidates.triton._module import IMPORTS
from tilewright.candidates.triton._text import Text
from tilewright.dtype import F32
from tilewright.ir.access import Access
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather, Param, Reduce
from tilewright.ir.region import Region

# tl.max passes over NaN
EXTREMES = """
@triton.jit
def highest(a, b):
    return tl.maximum(a, b, tl.PropagateNan.ALL)


@triton.jit
def lowest(a, b):
    return tl.minimum(a, b, tl.PropagateNan.ALL)
"""


@dataclass(frozen=True)
class Tiles:
    """A region cut into tiles.

    Attributes:
        region: what to compute.
        tile_m: rows of a tile; a power of two.
        tile_n: its columns; a power of two.
    """

    region: Region
    tile_m: int
    tile_n: int

    @property
    def pieces(self) -> int:
        """Tiles side by side."""
        return -(-self.region.columns // self.tile_n)

    @property
    def grid(self) -> int:
        return -(-self.region.rows // self.tile_m) * self.pieces

    @property
    def arguments(self) -> list[str]:
        """Of the kernel: a pointer for each place that is read, and for each result."""
        sources = [f"p{i}" for i in range(len(self.region.sources))]
        return sources + [f"o{i}" for i in range(len(self.region.roots))]


def kernel_text(tiles: Tiles, fp8: frozenset[str]) -> str:
    """A module with the function `kernel`.

    Args:
        tiles: the region and its tiles.
        fp8: types that the hardware converts (`_module.exact_fp8`).
    """
    r, text = tiles.region, Text()
    text.do("block = tl.program_id(0)")
    across = "block" if tiles.pieces == 1 else f"(block // {tiles.pieces})"
    text.do(f"rows = {across} * {tiles.tile_m} + tl.arange(0, {tiles.tile_m})")
    first = "" if tiles.pieces == 1 else f"(block % {tiles.pieces}) * {tiles.tile_n} + "
    text.do(f"columns = {first}tl.arange(0, {tiles.tile_n})")
    row_mask = column_mask = None
    if r.rows % tiles.tile_m:
        row_mask = "row_mask"
        text.do(f"row_mask = rows < {r.rows}")
    if r.columns % tiles.tile_n:
        column_mask = "column_mask"
        text.do(f"column_mask = columns < {r.columns}")
    tile = Tile("rows", "columns", r.columns, row_mask, column_mask)
    whole = _Rows(text, tile, tiles, fp8)
    alone = Emitter(text, replace(tile, column_mask=None), _pointer, fp8)  # stores one value a row
    values = whole.values(r.roots, r.access)
    for i, (root, value) in enumerate(zip(r.roots, values, strict=True)):
        (whole if root in r.across else alone).store(r.stores[i], f"o{i}", value)
    return f"{IMPORTS}\n{EXTREMES}\n\n@triton.jit\ndef kernel({', '.join(tiles.arguments)}):\n{text}\n"


def _pointer(leaf: Node) -> str:
    assert isinstance(leaf.op, Param)
    return f"p{leaf.op.index}"


class _Rows(Emitter):
    """An emitter that knows reductions along the columns, and rows of a table picked by index."""

    def __init__(self, text: Text, tile: Tile, tiles: Tiles, fp8: frozenset[str]) -> None:
        super().__init__(text, tile, _pointer, fp8)
        self._tiles = tiles

    def _node(self, n: Node, access: Access, done: Mapping[Node, str]) -> str:
        if isinstance(n.op, Reduce):
            return self._reduce(n, done[n.src[0]])
        if isinstance(n.op, Gather):
            return self._pick(n, access, done[n.src[1]])
        if n in self._tiles.region.tables:
            return ""  # read where it is picked from
        return super()._node(n, access, dict(done))

    def _reduce(self, n: Node, value: str) -> str:
        assert isinstance(n.op, Reduce)
        t, tiles, dtype = self.text, self._tiles, n.dtype
        value = t.call("broadcast_to", value, f"({tiles.tile_m}, {tiles.tile_n})")
        adds = n.op.fn in ("add", "mean")
        if self.tile.column_mask is not None:
            if adds:
                nothing = "-0.0" if dtype is F32 else "0"
            else:
                worst = dtype.lowest if n.op.fn == "maximum" else dtype.highest
                nothing = f"float('{float(worst)}')" if dtype is F32 else str(int(worst))
            value = self.where(t.v(f"{self.tile.column_mask}[None, :]"), value, nothing)
        if adds:
            total = t.call("sum", value, "axis=1", "keep_dims=True")
        elif dtype is F32:
            total = t.call("reduce", value, "1", "highest" if n.op.fn == "maximum" else "lowest", "keep_dims=True")
        else:
            total = t.call(n.op.fn[:3], value, "axis=1", "keep_dims=True")
        if n.op.fn == "mean":
            return t.call("div_rn", total, repr(float(tiles.region.columns)))
        return total if dtype is F32 else self.cast(total, in_registers(dtype))

    def _pick(self, n: Node, access: Access, index: str) -> str:
        """One row of the table for each index; out of range, the program ends as torch's own lookup does on a GPU."""
        assert isinstance(n.op, Gather)
        t, (table, picks), axis = self.text, n.src, n.op.axis % len(n.src[0].shape)
        extent = table.shape[axis]
        at = self.cast(index, "int64")
        if picks.dtype.kind == "int":
            at = self.where(t.v(f"{at} < 0"), t.v(f"{at} + {extent}"), at)
        inside = t.v(f"({at} >= 0) & ({at} < {extent})")
        t.do(f"tl.device_assert({inside}, 'an index out of range')")
        at = t.v(f"{self.where(inside, at, '0')} * {math.prod(table.shape[axis + 1 :])}")
        place = access.of_leaf(table)
        at = self._sum(at, *self._spread(access, place))
        mask = self._mask(access, rows=True, columns=bool(place.columns))
        return t.call("load", f"{_pointer(table)} + {at}", *([f"mask={mask}", "other=0"] if mask else []))
