"""An expression on a row's consecutive columns, as vectors: views become addresses, elementwise operations instructions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tilewright.candidates.llvm.expressions.printer import Printer, constant, element, in_memory, size_bytes
from tilewright.candidates.llvm.expressions.text import Function, Int, suffix, vec
from tilewright.dtype import BF16, F8E5M2FNUZ, F32, F64, PRED, DType
from tilewright.ir.expression import REDUCED_PRECISION_SAFE, rounded_at_once
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import VIEWS, Acc, Const, Dequantize, Gather, Map, Param, Quantize
from tilewright.lowering.access import Access, AccessMap, StridedDigit
from tilewright.lowering.scalar.functions import GELU_TO_BF16
from tilewright.lowering.scalar.nodes import Forms
from tilewright.lowering.scalar.values import in_register

SHORTEST_GATHERED = 4  # bytes of an element
DATA_OF = {"add", "subtract", "multiply", "divide", "maximum", "minimum"}  # functions of f32 to which a constant is data
FORMS = Forms("vector form", frozenset({F64, F8E5M2FNUZ}), of_fp8=False, to_64_bits=True)
check, check_node = FORMS.check, FORMS.check_node


def data_of(roots: Sequence[Node]) -> frozenset[Node]:
    """The one-element constants of expressions that are data, for which no code is written: f32 scales, terms, factors and
    bounds, and zero points. An exponent is none, nor is a constant of integer arithmetic."""
    found, other = set[Node](), set[Node]()
    for n in toposort(roots):
        for i, s in enumerate(n.src if not isinstance(n.op, VIEWS) else ()):
            while isinstance(s.op, VIEWS):
                (s,) = s.src
            if isinstance(s.op, Const) and s.tensor.elements == 1:
                (found if _is_data(n, i, s.dtype) else other).add(s)
    return frozenset(found - other)


def _is_data(reader: Node, i: int, dtype: DType) -> bool:
    """Tell whether a constant's value is nothing but data to a node of which it is the source `i`."""
    if isinstance(reader.op, (Quantize, Dequantize)):
        return (i == 1 and dtype is F32) or (i == 2 and dtype.is_integer and dtype.bits <= 16)
    return dtype is F32 and isinstance(reader.op, Map) and reader.op.fn in DATA_OF


@dataclass(frozen=True)
class Columns:
    """The columns that a vector covers.

    Attributes:
        first: the column of lane 0, counted in the access's own columns.
        aligned: it is a multiple of the number of lanes.
        mask: the lanes that exist; None for all.
    """

    first: Int
    aligned: bool
    mask: str | None


class Lanes(Printer):
    """`lanes` columns of a row of an access: its leaves read, its operations done, its result written; `roots`, where that is
    more than the access's own, are computed together. `in_pairs`: see `ReductionNest.read_in_pairs`."""

    def __init__(
        self,
        f: Function,
        access: Access,
        lanes: int,
        columns: Columns,
        pointer: Callable[[Node], str],
        roots: Sequence[Node] = (),
        in_pairs: Mapping[Node, tuple[int, AccessMap]] | None = None,
    ):
        super().__init__(f, lanes)
        self._in_pairs = in_pairs or {}
        self.access, self.columns, self.pointer = access, columns, pointer
        self._roots = tuple(roots) or (access.root,)
        self._coarse = rounded_at_once(*self._roots)

    def store(self, row: Int, value: str, pointer: str) -> None:
        """Write the root's value where the result keeps it."""
        dtype = self.access.root.dtype
        if dtype is PRED:
            value = self.f.v(f"zext {vec(self.lanes, 'i1')} {value} to {vec(self.lanes, 'i8')}")
        type_, place = vec(self.lanes, in_memory(dtype)), self.access.of_result()
        at = self._address(place, row, pointer, size_bytes(dtype))
        if self._consecutive(place):
            self.f.store_where(type_, value, at, self.columns.mask)
        elif self._one_by_one(place, dtype):
            for i, address in enumerate(self._each(place, at, size_bytes(dtype))):
                one = self.f.v(f"extractelement {type_} {value}, i64 {i}")
                self.f.store(in_memory(dtype), one, address)
        else:
            name = f"llvm.masked.scatter.{suffix(type_)}.{suffix(self._pointers)}"
            mask = (vec(self.lanes, "i1"), self.columns.mask or "splat (i1 true)")
            where = self._lanes_apart(place, at, in_memory(dtype))
            self.f.intrinsic(name, "void", (type_, value), (self._pointers, where), ("i32 immarg", "1"), mask)

    def store_pairs(self, row: Int, place: AccessMap, first: str, second: str, pointer: str) -> None:
        """Write the root's values and those of another, each beside the other's, where pairs of them go."""
        dtype = self.access.root.dtype
        memory, bits = in_memory(dtype), vec(self.lanes, "i8")
        if dtype is PRED:
            first, second = (self.f.v(f"zext {vec(self.lanes, 'i1')} {value} to {bits}") for value in (first, second))
        order = [lane + which * self.lanes for lane in range(self.lanes) for which in range(2)]
        both = self.f.shuffle(vec(self.lanes, memory), first, second, order)
        at = self._first_pair(place, row, pointer, size_bytes(dtype))
        self.f.store_where(vec(2 * self.lanes, memory), both, at, self._twice(self.columns.mask))

    # -- addresses

    def _first_pair(self, place: AccessMap, row: Int, pointer: str, size: int) -> str:
        """The address of the pair that lane 0 is one of."""
        at = self._address(AccessMap(place.offset, place.rows, ()), row, pointer, size)
        return self.f.at(at, self.f.mul(self.columns.first, 2 * size))

    def _twice(self, mask: str | None) -> str | None:
        """The mask of both of each pair."""
        order = [lane // 2 for lane in range(2 * self.lanes)]
        return None if mask is None else self.f.shuffle(vec(self.lanes, "i1"), mask, mask, order)

    @property
    def _pointers(self) -> str:
        return vec(self.lanes, "ptr")

    def _spread(self, place: AccessMap) -> list[StridedDigit]:
        """The column terms that differ between lanes."""
        return [t for t in place.columns if not (self.columns.aligned and t.inner % self.lanes == 0)]

    def _consecutive(self, place: AccessMap) -> bool:
        """Lanes lie one after the other."""
        return self._stride(place) == 1

    def _stride(self, place: AccessMap) -> int | None:
        """The elements from each lane to the next; None if that differs."""
        spread = self._spread(place)
        if len(spread) != 1:
            return None
        (t,) = spread
        alone = len(place.columns) == 1 and t.extent * t.inner >= self.access.columns_extent
        return t.stride if t.inner == 1 and (alone or (self.columns.aligned and t.extent % self.lanes == 0)) else None

    def _one_by_one(self, place: AccessMap, dtype: DType) -> bool:
        """Tell whether lanes are read and written at constant distances: of elements so short no processor gathers several, and
        pointers in vectors would be split again."""
        return size_bytes(dtype) < SHORTEST_GATHERED and self.columns.mask is None and self._stride(place) is not None

    def _each(self, place: AccessMap, base: str, size: int) -> list[str]:
        """Each lane's address, `base` being what is common to all."""
        (t,) = self._spread(place)
        start = self.f.at(base, self.f.mul(self._digit(self.columns.first, t, self.access.columns_extent), t.stride * size))
        return [self.f.at(start, i * t.stride * size) for i in range(self.lanes)]

    def _address(self, place: AccessMap, row: Int, pointer: str, size: int, *, common: bool = False) -> str:
        """Address of lane 0, or of what is `common` to all lanes: always where they do not lie one after the other."""
        f, total, access = self.f, place.offset, self.access
        terms = [(t, row, access.rows_extent) for t in place.rows]
        of_lanes = [] if self._consecutive(place) and not common else self._spread(place)
        terms += [(t, self.columns.first, access.columns_extent) for t in place.columns if t not in of_lanes]
        for t, number, numbers in terms:
            total = f.add(total, f.mul(self._digit(number, t, numbers), t.stride))
        return f.at(pointer, f.mul(total, size))

    def _digit(self, number: Int, t: StridedDigit, numbers: int) -> Int:
        """The digit of a number below `numbers`."""
        above = self.f.div(number, t.inner)
        return above if t.extent * t.inner >= numbers else self.f.rem(above, t.extent)

    def _lanes_apart(self, place: AccessMap, base: str, element_type: str, further: str = "zeroinitializer") -> str:
        """A pointer for each lane, so many elements `further`."""
        f, i32, i64 = self.f, vec(self.lanes, "i32"), vec(self.lanes, "i64")
        first = self._word(self.columns.first)
        column = f.v(f"add {i32} {f.splat(self.lanes, 'i32', first)}, {f.iota(self.lanes)}")
        total = further
        for t in self._spread(place):
            digit = f.v(f"udiv {i32} {column}, {self._all(t.inner, 'i32')}") if t.inner > 1 else column
            digit = f.v(f"urem {i32} {digit}, {self._all(t.extent, 'i32')}")
            wide = f.v(f"mul {i64} {f.v(f'zext {i32} {digit} to {i64}')}, {self._all(t.stride, 'i64')}")
            total = f.v(f"add {i64} {total}, {wide}")
        return f.v(f"getelementptr {element_type}, ptr {base}, {i64} {total}")

    def _word(self, number: Int) -> str:
        """A number in 32 bits."""
        given = self.f.number(number)
        return self.f.v(f"trunc i64 {given} to i32") if isinstance(given, str) else str(given)

    def _all(self, number: Int, type_: Literal["i32", "i64"]) -> str:
        """A number in every lane."""
        given = self.f.number(number)
        if not isinstance(given, str):
            return f"splat ({type_} {given})"
        return self.f.splat(self.lanes, type_, given if type_ == "i64" else self._word(given))

    def _leaf(self, n: Node, row: Int) -> str:
        f, place, memory = self.f, self.access.of_leaf(n), in_memory(n.dtype)
        type_ = vec(self.lanes, memory)
        at = self._address(place, row, self.pointer(n), size_bytes(n.dtype))
        if n in self._in_pairs:
            which, pairs = self._in_pairs[n]
            wide = vec(2 * self.lanes, memory)
            first = self._first_pair(pairs, row, self.pointer(n), size_bytes(n.dtype))
            both = f.load_where(wide, first, self._twice(self.columns.mask))
            value = f.shuffle(wide, both, both, range(which, 2 * self.lanes, 2))
        elif not self._spread(place):
            value = f.splat(self.lanes, memory, f.load(memory, at))
        elif self._consecutive(place):
            value = f.load_where(type_, at, self.columns.mask)
        elif self._one_by_one(place, n.dtype):
            value = "poison"
            for i, address in enumerate(self._each(place, at, size_bytes(n.dtype))):
                value = f.v(f"insertelement {type_} {value}, {memory} {f.load(memory, address)}, i64 {i}")
        else:
            value = self._gathered(type_, self._lanes_apart(place, at, memory))
        return f.v(f"icmp ne {type_} {value}, zeroinitializer") if n.dtype is PRED else value

    def _gathered(self, type_: str, pointers: str) -> str:
        return self.f.intrinsic(
            f"llvm.masked.gather.{suffix(type_)}.{suffix(self._pointers)}",
            type_,
            (self._pointers, pointers),
            ("i32 immarg", "1"),
            (vec(self.lanes, "i1"), self.columns.mask or "splat (i1 true)"),
            (type_, "zeroinitializer"),
        )

    def picked(self, n: Node, index: str, row: Int, missed: str) -> str:
        """Elements that a gather picks, one a lane; where an index says none, the first element, and a note in `missed`."""
        assert isinstance(n.op, Gather)
        f, (table, picks), axis = self.f, n.src, n.op.axis % len(n.src[0].shape)
        extent, i64, i1 = table.shape[axis], vec(self.lanes, "i64"), vec(self.lanes, "i1")
        signed, from_ = picks.dtype.kind == "int", vec(self.lanes, element(picks.dtype))
        at = index if from_ == i64 else f.v(f"{'sext' if signed else 'zext'} {from_} {index} to {i64}")
        if signed and n.op.wraps:
            wrapped = f.v(f"add {i64} {at}, {self._all(extent, 'i64')}")
            at = f.v(f"select {i1} {f.v(f'icmp slt {i64} {at}, zeroinitializer')}, {i64} {wrapped}, {i64} {at}")
        inside = f.v(f"icmp ult {i64} {at}, {self._all(extent, 'i64')}")
        outside = f.v(f"xor {i1} {inside}, splat (i1 true)")
        if self.columns.mask is not None:
            outside = f.v(f"and {i1} {outside}, {self.columns.mask}")
        with f.when(f.intrinsic(f"llvm.vector.reduce.or.v{self.lanes}i1", "i1", (i1, outside))):
            f.store("i64", "1", missed, 8)
        at = f.v(f"select {i1} {inside}, {i64} {at}, {i64} zeroinitializer")
        further = f.v(f"mul {i64} {at}, {self._all(math.prod(table.shape[axis + 1 :]), 'i64')}")
        place, memory = self.access.of_leaf(table), in_memory(table.dtype)
        base = self._address(place, row, self.pointer(table), size_bytes(table.dtype), common=True)
        type_ = vec(self.lanes, memory)
        value = self._gathered(type_, self._lanes_apart(place, base, memory, further))
        return f.v(f"icmp ne {type_} {value}, zeroinitializer") if table.dtype is PRED else value

    # -- operations

    def value(self, n: Node, values: Mapping[Node, str], row: Int) -> str:
        """Compute a node from the `values` of its sources, or read it."""
        op, args = n.op, [values[s] for s in n.src]
        if isinstance(op, VIEWS):
            return args[0]
        if isinstance(op, Param):
            return self._leaf(n, row)
        if isinstance(op, Const):
            key = ("data", *self._roots)
            if key not in self.known:
                self.known[key] = data_of(self._roots)
            if n not in self.known[key]:
                return constant(n)
            return self.number((self._roots, n), op.data.tensor().reshape(1).item(), in_register(n.dtype)).name
        coarse = isinstance(op, Map) and op.fn in REDUCED_PRECISION_SAFE and (n in self._coarse or n.dtype is BF16)
        return self.elementwise(n, args, form=GELU_TO_BF16 if coarse else None)


class Vectors(Lanes):
    """One access evaluated on vectors of `lanes` columns.

    What does not depend on the row is computed once by the constructor, the rest by `row`. `second`: a leaf that stands for a
    second accumulator.
    """

    def __init__(
        self,
        f: Function,
        access: Access,
        lanes: int,
        columns: Columns,
        pointer: Callable[[Node], str],
        second: Node | None = None,
    ):
        super().__init__(f, access, lanes, columns, pointer)
        self._fixed: dict[Node, str] = {}
        self._second = second
        order = toposort((access.root,))
        moving: set[Node] = set()
        for n in order:
            leaf = isinstance(n.op, Param) and bool(access.of_leaf(n).rows)
            if leaf or isinstance(n.op, Acc) or n is second or any(s in moving for s in n.src):
                moving.add(n)
            else:
                self._fixed[n] = f.held(self.value(n, self._fixed, 0), lanes, element(n.dtype))
        self._order = [n for n in order if n in moving]
        for n in self._order:
            self.prepare(n, self._fixed)

    def row(self, row: Int, *sums: str) -> str:
        """The root's value on one row, `sums` the accumulator's there, and the second's if there is one."""
        values = dict(self._fixed)
        for n in self._order:
            if isinstance(n.op, Acc):
                values[n] = sums[0]
            elif n is self._second:
                values[n] = sums[1]
            else:
                values[n] = self.value(n, values, row)
        return values[self.access.root]

    def prefetch(self, row: Int) -> None:
        """Prefetch the first lane of what `row` would read, near enough that reading it later does not wait for memory."""
        for n in self._order:
            if isinstance(n.op, Param):
                self.f.prefetch(self._address(self.access.of_leaf(n), row, self.pointer(n), size_bytes(n.dtype)), level=2)
