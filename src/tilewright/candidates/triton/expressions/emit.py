"""An expression over an access as lines of Triton: views become addresses, elementwise operations arithmetic on tiles.

What varies along rows or columns alone is read and computed as a vector, and broadcast where it meets a tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tilewright.candidates.triton.expressions.printer import Printer, in_registers, zero
from tilewright.candidates.triton.expressions.text import SIXTEEN, Text
from tilewright.dtype import BF16, F16, F64, PRED, DType
from tilewright.ir.axes import axes_of
from tilewright.ir.expression import quantised_at_once, rounded_at_once
from tilewright.ir.extent import Extent
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import VIEWS, Acc, Const, Gather, Map, Param, Quantize
from tilewright.lowering.access import Access, AccessMap, StridedDigit
from tilewright.lowering.scalar.functions import GELU_TO_8_BITS, GELU_TO_BF16, GELU_TO_F16
from tilewright.lowering.scalar.nodes import Forms
from tilewright.lowering.scalar.values import FP8

FORMS = Forms("Triton form", frozenset({F64}), of_fp8=True, to_64_bits=False)
NUMBERED = (1 << 31) - (1 << 16)  # rows or columns that 32 bits count, with those of the last tile that do not exist
check, check_node = FORMS.check, FORMS.check_node


def pointer_of(leaf: Node) -> str:
    """The name by which kernels know the memory of a source."""
    assert isinstance(leaf.op, Param)
    return f"p{leaf.op.index}"


@dataclass(frozen=True)
class Tile:
    """Names in scope around an expression.

    Attributes:
        rows, columns: vectors of row and column numbers (32-bit), of an access's rows (batch axes and M together) and columns;
            `x[:, None]` and `y[None, :]` of them broadcast to the tile.
        row_mask, column_mask: vectors, where those exist; None where all do.
        acc: the accumulator's tile; none in an operand.
        width: how many columns there are; a store of fewer of them masks the others.
        across: the tile stands on its side: what is called rows runs along its second axis.
        step: a number to be added to every column number, in a loop over columns; None for none.
        stride: that number is a multiple of this, and there are no more columns in the tile.
        near: leaves whose tiles are there already.
    """

    rows: str
    columns: str
    width: int
    row_mask: str | None = None
    column_mask: str | None = None
    acc: str | None = None
    across: bool = False
    step: str | None = None
    stride: int = 1
    near: Mapping[Node, str] = field(default_factory=dict[Node, str])


class Emitter(Printer):
    """Writes values of expressions, and their stores, into a text.

    Args:
        text: where to.
        tile: names in scope.
        pointer: what the kernel calls the memory of a leaf.
        fp8: see `Printer`.
    """

    def __init__(
        self, text: Text, tile: Tile, pointer: Callable[[Node], str] = pointer_of, fp8: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(text, fp8)
        self.tile, self.pointer = tile, pointer
        self._coarse: Mapping[Node, DType] = {}  # values that are rounded to 16 bits at once
        self._codes_of: dict[Node, Node] = {}  # quantisations to 8 bits, and the functions they alone read
        self._tables: frozenset[Node] = frozenset()

    def value(self, access: Access) -> str:
        """The root's value, in registers as `in_registers` says: fp8 as bytes, pred as int1."""
        return self.values((access.root,), access)[0]

    def values(self, roots: Sequence[Node], access: Access) -> list[str]:
        """Values of several nodes of an access."""
        done: dict[Node, str] = {}
        self.look_at(roots)
        for n in toposort(roots):
            done[n] = self._node(n, access, done)
        return [done[r] for r in roots]

    def look_at(self, roots: Sequence[Node]) -> None:
        """Learn what becomes of the values that these are made of."""
        self._coarse, self._codes_of = rounded_at_once(*roots), quantised_at_once(*roots)
        self._tables = frozenset(n.src[0] for n in toposort(roots) if isinstance(n.op, Gather))

    def store(self, access: Access, pointer: str, value: str | None = None, *, by_row: bool = False) -> None:
        """The root's value (or one that is given) to where the result keeps it; `by_row`: a row has one."""
        root, t = access.root, self.text
        value = self.value(access) if value is None else value
        if root.dtype is PRED:
            value = self.cast(value, "uint8")
        place = access.of_result()
        rows, columns = self._spread(access, place)
        everywhere = [self.expand(f"{self.tile.rows} * 0", 0)] if not place.rows else []
        everywhere += [self.expand(f"{self.tile.columns} * 0", 1)] if not (place.columns or by_row) else []
        at = self._sum(rows, columns, *everywhere)
        mask = self._mask(access, rows=True, columns=not by_row)
        t.do(f"{t.language}.store({pointer} + {at}, {value}{f', mask={mask}' if mask else ''})")

    def amax_bits(self, access: Access) -> str:
        """The largest of the root's values, f32 and none below zero, as the integer that its bits are; the sign that a NaN may
        keep is none."""
        bits = self.text.v(f"{self.value(access)}.to(tl.int32, bitcast=True) & 0x7FFFFFFF")
        mask = self._mask(access, rows=True, columns=True)
        if mask is not None:
            bits = self.where(mask, bits, "0")
        return self.text.v(f"tl.max(tl.max({bits}, axis=1), axis=0)")

    # -- addresses

    def own_columns(self, access: Access) -> str:
        """Column numbers of the access's own columns."""
        columns = self.tile.columns
        if self.tile.step is not None:
            columns = self.text.v(f"{self.tile.step} + {columns}")
        return self.text.v(f"{columns} - {self.text.extent(access.first)}") if access.first else columns

    def _spread(self, access: Access, place: AccessMap) -> tuple[str | None, str | None]:
        """Offsets of a place by row and by column as tiles of one column and one row, in elements, None where it has none."""
        most = place.offset + sum((t.extent - 1) * t.stride for t in (*place.rows, *place.columns))
        wide = most >= 1 << 31
        spelt = self._spelt(place)
        rows_extent = math.prod(a.extent for a in axes_of((access.rows,)))
        rows = self._digits(self.tile.rows, place.rows, rows_extent, spelt, wide=wide)
        alike, each = self._split_columns(place)
        own = self.own_columns(access) if each else ""
        columns = self._digits(own, each, access.columns_extent, spelt, wide=wide)
        of_step = " + ".join(self._of_step(x, spelt, wide=wide) for x in alike)
        if of_step:
            rows = self.text.v(of_step if rows is None else f"{rows} + ({of_step})")
        if place.offset:
            offset = spelt(place.offset)
            if rows is not None or columns is None:
                rows = self.text.v(f"{rows} + {offset}") if rows is not None else offset
            else:
                columns = self.text.v(f"{columns} + {offset}")
        if rows is not None and place.rows:
            rows = self.expand(rows, 0)
        return rows, None if columns is None else self.expand(columns, 1)

    def _spelt(self, place: AccessMap) -> Callable[[int], str]:
        """Write the strides of a place: multiples of 16 if all that are open are such for the shape at hand."""
        t = self.text
        strides = [x for x in (place.offset, *(term.stride for term in (*place.columns, *place.rows))) if isinstance(x, Extent)]
        return t.stride if all(x % SIXTEEN == 0 for x in strides) else t.extent

    def _of_step(self, term: StridedDigit, spelt: Callable[[int], str], *, wide: bool) -> str:
        """The part of an address that a digit adds which the whole tile of a step shares."""
        t = self.text
        digit = t.v(f"{self.tile.step} // {t.extent(term.inner)} % {t.extent(term.extent)}")
        return f"{self.cast(digit, 'int64') if wide else digit} * {spelt(term.stride)}"

    def varies(self, access: Access) -> tuple[bool, bool]:
        """Tell whether an access's value is a tile of more than one row, and of more than one column."""
        places = [access.of_leaf(n) for n in access.views if isinstance(n.op, Param)]
        return any(p.rows for p in places), any(self._split_columns(p)[1] for p in places)

    def _split_columns(self, place: AccessMap) -> tuple[list[StridedDigit], list[StridedDigit]]:
        """The columns' digits that are one number for the whole tile of a step, and the others."""
        steps = self.tile.step is not None
        alike = [t for t in place.columns if steps and t.inner % self.tile.stride == 0 and t.inner > 1]
        return alike, [t for t in place.columns if t not in alike]

    def expand(self, vector: str, axis: int) -> str:
        """A vector along the rows (0) or columns (1) as a tile of one column or one row."""
        return self.text.v(f"{self.text.v(vector)}{'[:, None]' if (axis == 0) != self.tile.across else '[None, :]'}")

    def _digits(
        self, number: str, terms: Sequence[StridedDigit], extent: int, spelt: Callable[[int], str], *, wide: bool
    ) -> str | None:
        """The sum of digits times strides."""
        parts: list[str] = []
        for term in terms:
            digit = number if term.inner == 1 else f"({number} // {self.text.extent(term.inner)})"
            if term.extent * term.inner < extent:
                digit = f"({digit} % {self.text.extent(term.extent)})"
            if wide:
                digit = f"{self.cast(self.text.v(digit), 'int64')}"
            parts.append(digit if term.stride == 1 else f"{digit} * {spelt(term.stride)}")
        return self.text.v(" + ".join(parts)) if parts else None

    def _sum(self, *parts: str | None, sign: str = "+") -> str | None:
        given = [p for p in parts if p is not None]
        return self.text.v(f" {sign} ".join(given)) if len(given) > 1 else given[0] if given else None

    def _mask(self, access: Access, *, rows: bool, columns: bool) -> str | None:
        """The mask of elements that exist of what varies along rows, columns or both."""
        of_rows = self.expand(self.tile.row_mask, 0) if rows and self.tile.row_mask else None
        of_columns = self.tile.column_mask if columns else None
        if columns and (access.first or access.columns_extent != self.tile.width):  # the access's own, of a range of columns
            own = self.own_columns(access)
            of_columns = self.text.v(f"({own} >= 0) & ({own} < {self.text.extent(access.columns_extent)})")
        return self._sum(of_rows, self.expand(of_columns, 1) if of_columns else None, sign="&")

    def _leaf(self, n: Node, access: Access) -> str:
        place = access.of_leaf(n)
        _, each = self._split_columns(place)
        mask = self._mask(access, rows=bool(place.rows), columns=bool(each))
        return self._load(self._address(n, access), mask if place.rows or each else None, n.dtype)

    def _address(self, n: Node, access: Access) -> str:
        """Pointers to a leaf's elements: where a step moves every column by the same distance, those of step 0, which a loop
        computes once, and that distance."""
        place, step, pointer = access.of_leaf(n), self.tile.step, self.pointer(n)
        term = place.columns[0] if len(place.columns) == 1 else None
        if step is None or term is None or term.inner != 1 or term.extent < access.columns_extent:
            at = self._sum(*self._spread(access, place))
            return pointer if at is None else f"{pointer} + {at}"
        still = Emitter(self.text, replace(self.tile, step=None), self.pointer, self.fp8)
        base = self.text.v(f"{pointer} + {still._sum(*still._spread(access, place))}")
        if term.stride == 1:
            return f"{base} + {step}"
        wide = term.extent * term.stride >= 1 << 31
        return f"{base} + {self.cast(step, 'int64') if wide else step} * {self._spelt(place)(term.stride)}"

    def _load(self, where: str, mask: str | None, dtype: DType) -> str:
        """The elements at a pointer, zeros where the mask has none."""
        value = self.text.call("load", where, *([f"mask={mask}", f"other={zero(dtype)}"] if mask else []))
        return self.text.v(f"{value} != 0") if dtype is PRED else value

    def _pick(self, n: Node, access: Access, index: str, *, by_column: bool = False) -> str:
        """One slice of the table for each index, which may differ `by_column`; out of range, the program ends as torch's own
        lookup does on a GPU."""
        assert isinstance(n.op, Gather)
        t, (table, picks), axis = self.text, n.src, n.op.axis % len(n.src[0].shape)
        extent = t.extent(table.shape[axis])
        at = self.cast(index, "int64")
        if picks.dtype.kind == "int" and n.op.wraps:
            at = self.where(t.v(f"{at} < 0"), t.v(f"{at} + {extent}"), at)
        inside = t.v(f"({at} >= 0) & ({at} < {extent})")
        place = access.of_leaf(table)
        mask = self._mask(access, rows=True, columns=bool(place.columns) or by_column)
        fine = inside if mask is None else t.v(f"{inside} | ({mask} == 0)")  # what is not there has no index
        t.do(f"tl.device_assert({fine}, 'an index out of range')")
        at = t.v(f"{self.where(inside, at, '0')} * {t.stride(math.prod(table.shape[axis + 1 :]))}")
        at = self._sum(at, *self._spread(access, place))
        return self._load(f"{self.pointer(table)} + {at}", mask, table.dtype)

    # -- operations

    def _node(self, n: Node, access: Access, done: dict[Node, str]) -> str:
        op, args = n.op, [done[s] for s in n.src]
        if isinstance(op, VIEWS):
            return args[0]
        if isinstance(op, Gather):
            return self._pick(n, access, args[1])
        if n in self._tables:
            return ""  # read where it is picked from
        if isinstance(op, Acc):
            assert self.tile.acc is not None
            return self.tile.acc
        if isinstance(op, Param):
            return self.tile.near[n] if n in self.tile.near else self._leaf(n, access)
        if isinstance(op, Const):
            return self._constant(n)
        repeats = True
        if isinstance(op, Quantize):
            place = access.of_leaf(n.src[1])
            repeats = not (place.rows and place.columns)
        return self.elementwise(n, args, repeats=repeats, form=self._by_power(n))

    def _by_power(self, n: Node) -> tuple[Sequence[float], float] | None:
        """The polynomial of a gelu that needs no more digits than what it is rounded to at once, and up to where."""
        if not isinstance(n.op, Map):
            return None
        if n in self._codes_of.values():
            return GELU_TO_8_BITS[n.op.fn]
        if n.op.fn != "gelu":
            return None
        return {F16: GELU_TO_F16, BF16: GELU_TO_BF16}.get(self._coarse.get(n, n.dtype))

    def _constant(self, n: Node) -> str:
        assert isinstance(n.op, Const)
        tensor = n.op.data.tensor().reshape(1)
        if n.dtype in FP8:
            value = repr(int(tensor.view(dtype=torch.uint8).item()))
        elif n.dtype.is_float or (n.dtype.bits <= 8 and n.dtype is not PRED):  # wide integers are ends of ranges
            value = self.text.number(n, tensor.item())
            if value in self.text.numbers:
                return self.narrow(value, n.dtype)
        else:
            value = repr(tensor.item())
        return self.text.call("cast", value, f"{self.text.language}.{in_registers(n.dtype)}")
