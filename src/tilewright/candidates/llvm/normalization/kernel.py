"""Rows as IR: one pass over a row's columns for each reduction that waits for another, and a last one for the results.

A row's first pass reads it from memory, the others find it in the cache. Each reduction has several accumulators side by side,
which are joined in a fixed order, and no row is ever split between threads: the results do not depend on how many there are.
Threads take runs of rows, or pieces of very long ones where nothing is reduced, from a counter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.candidates.llvm.expressions.printer import Printer, element, size_bytes
from tilewright.candidates.llvm.expressions.text import Function, Int, Module, f32, suffix, vec
from tilewright.candidates.llvm.expressions.vector import Columns, Lanes
from tilewright.candidates.llvm.gemm.nest import rounded
from tilewright.candidates.llvm.runtime.calls import write_entries
from tilewright.dtype import F32, PRED, DType
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather, Param, Reduce
from tilewright.lowering.reduction_nest import ReductionNest, is_named
from tilewright.lowering.scalar.functions import bounded_exp
from tilewright.lowering.scalar.steps import scale_of

TASK_ELEMENTS = 8192  # a µs or more: many times what taking a task costs
ALL = ("and", "multiply", "minimum")  # of pred: whether all hold
LONG_BODY = 16  # instructions past which fewer vectors are computed side by side, for want of registers


@dataclass(frozen=True)
class Loops:
    """A nest and the sizes it is generated with.

    Attributes:
        nest: what to compute.
        lanes: of a vector of f32.
        unroll: vectors side by side.
    """

    nest: ReductionNest
    lanes: int
    unroll: int

    @property
    def piece(self) -> int:
        """Columns of a row that one task takes: all, unless nothing is reduced and there are very many."""
        split = self.nest.columns > 2 * TASK_ELEMENTS and not any(self.nest.level.values())
        return TASK_ELEMENTS if split else self.nest.columns

    @property
    def pieces(self) -> int:
        return -(-self.nest.columns // self.piece)

    @property
    def run(self) -> int:
        """Pieces that a task takes."""
        return max(1, TASK_ELEMENTS // self.piece)

    @property
    def tasks(self) -> int:
        return -(-self.nest.rows * self.pieces // self.run)

    def offset_of(self, n: Node) -> int:
        """Bytes before a row of a materialised node in a thread's memory."""
        stored = self.nest.materialised
        return sum(self._row_bytes(k) for k in stored[: stored.index(n)])

    def _row_bytes(self, n: Node) -> int:
        return rounded(rounded(self.nest.columns, self.lanes) * size_bytes(n.dtype))

    @property
    def thread_bytes(self) -> int:
        return sum(map(self._row_bytes, self.nest.materialised))

    def scale(self, n: Node) -> int | None:
        """The problem's source that is the one scale of a quantisation."""
        found = scale_of(n)
        return self.nest.sources[found.op.index] if found is not None and isinstance(found.op, Param) else None

    @property
    def scales(self) -> frozenset[int]:
        """The numbers of the sources that scale any of its quantisations."""
        return frozenset(i for n in self.nest.nodes if (i := self.scale(n)) is not None)


@dataclass(frozen=True)
class Rows:
    """Nests that one call does side by side.

    Attributes:
        each: the nests.
        types, results: how many sources and results the problem has.
        scales: sources of the problem that quantising multiplies by the reciprocal of, known to be `steps.usable`.
        ranged: the kernel is written for extents that are open, whose values a call gives behind the results.
    """

    each: tuple[Loops, ...]
    types: int
    results: int
    scales: frozenset[int] = frozenset()
    ranged: bool = False

    @property
    def sources(self) -> tuple[int, ...]:
        """The numbers of the problem's sources that are read."""
        return tuple(dict.fromkeys(i for loops in self.each for i in loops.nest.sources))

    @property
    def pointers(self) -> int:
        """Sources, results, extents if any are open, the scratch memory, and what tells of an index out of range."""
        return self.types + self.results + self.ranged + 2

    @property
    def tasks(self) -> int:
        return sum(loops.tasks for loops in self.each)

    @property
    def thread_bytes(self) -> int:
        return max(loops.thread_bytes for loops in self.each)


class RowsWriter:
    """Writes rows as a module with the entries of a product's, see `runtime.calls`."""

    def __init__(self, rows: Rows):
        self.rows, self.module = rows, Module(given_at=rows.types + rows.results if rows.ranged else None)

    def write(self) -> Module:
        self._worker()
        write_entries(self.module, self.rows.pointers, 1)
        return self.module

    def _worker(self) -> None:
        """Take tasks: those of the first nest, then those of the next."""
        r = self.rows
        f = Function(self.module, "worker", [("ptr", "arguments"), ("i64", "thread")])
        at = {i: f.load("ptr", f.at("%arguments", 8 * i), 8) for i in r.sources}
        *results, scratch, missed = (f.load("ptr", f.at("%arguments", 8 * i), 8) for i in range(r.types, r.pointers))
        if r.thread_bytes:
            scratch = f.at(scratch, f.mul("%thread", r.thread_bytes))
        writers = [
            _LoopsWriter(f, x, [at[i] for i in x.nest.sources], results, missed, scratch, r.scales & x.scales) for x in r.each
        ]
        with f.tasks(f.at("%arguments", rounded(8 * r.pointers)), r.tasks) as task:
            begun = 0
            for writer in writers:
                mine = f.sub(task, begun)
                begun += writer.rows.tasks
                if len(writers) == 1:
                    writer.task(mine)
                    continue
                with f.when(f.compare("ult", mine, writer.rows.tasks)):
                    writer.task(mine)
        f.finish()


class _LoopsWriter:
    """Writes what a task of a nest does.

    Args:
        f: the function.
        rows: the nest.
        read: what it reads.
        results: of the problem.
        missed: where to tell of an index out of range.
        scratch: the thread's memory.
        scales: see `Rows`.
    """

    def __init__(
        self,
        f: Function,
        rows: Loops,
        read: Sequence[str],
        results: Sequence[str],
        missed: str,
        scratch: str,
        scales: frozenset[int],
    ):
        self._f, self.rows, self.nest = f, rows, rows.nest
        self._read, self._results, self._missed, self._scratch = read, results, missed, scratch
        self._picked: dict[Node, str] = {}
        self._fixed: dict[Node, str] = {}
        whole = Columns(0, True, None)
        for n in self.nest.fixed:
            self._fixed[n] = self._lanes(whole).value(n, self._fixed, 0)
        for n in self.nest.nodes:
            self._lanes(whole).prepare(n, self._fixed, multiplied=rows.scale(n) in scales)

    def task(self, task: Int) -> None:
        r, f = self.rows, self._f
        first = f.mul(task, r.run)
        with f.loop(first, f.min(f.add(first, r.run), self.nest.rows * r.pieces)) as loop:
            if r.pieces == 1:
                self._row(loop.index if self.nest.rows > 1 else 0, 0, self.nest.columns)
            else:
                row, start = f.div(loop.index, r.pieces), f.mul(f.rem(loop.index, r.pieces), r.piece)
                self._row(row, start, f.min(f.add(start, r.piece), self.nest.columns))

    def _lanes(self, columns: Columns) -> Lanes:
        r = self.nest
        return Lanes(self._f, r.access, self.rows.lanes, columns, self._pointer, r.roots, r.read_in_pairs)

    def _pointer(self, leaf: Node) -> str:
        assert isinstance(leaf.op, Param)
        return self._picked.get(leaf) or self._read[leaf.op.index]

    def _result(self, root: int) -> str:
        """The address of the result that a root is, or is a part of."""
        return self._results[self.nest.outputs[root]]

    def _row(self, row: Int, start: Int, stop: Int) -> None:
        """All passes over the columns from `start` to `stop` of a row."""
        nest = self.nest
        known = dict(self._fixed)  # what is the same for the whole row
        one = Columns(0, True, None)
        for pass_ in range(nest.passes + 1):
            for n in nest.nodes:
                if isinstance(n.op, Gather) and pass_ == 0 and n not in nest.by_lanes:
                    self._pick(n, known[n.src[1]])
                by_row = n not in nest.across and n not in nest.tables and not isinstance(n.op, Reduce)
                if by_row and n not in known and nest.level[n] <= pass_:
                    known[n] = self._value(self._lanes(one), n, known, row)
            if pass_ < nest.passes:
                known.update(self._pass(pass_, row, start, stop, known))
        for i, root in enumerate(nest.roots):
            if root not in nest.across:
                first = Columns(0, True, self._f.first_lanes(self.rows.lanes, 1))
                lanes = Lanes(self._f, nest.stores[i], self.rows.lanes, first, self._pointer)
                lanes.store(row, known[root], self._result(i))

    def _value(self, lanes: Lanes, n: Node, values: Mapping[Node, str], row: Int) -> str:
        if n in self.nest.of_softmaxes:
            return bounded_exp(lanes.named(values[n.src[0]], F32)).name
        if n in self.nest.by_lanes:
            return lanes.picked(n, values[n.src[1]], row, self._missed)
        return lanes.value(n.src[0] if isinstance(n.op, Gather) else n, values, row)

    def _pick(self, n: Node, index: str) -> None:
        """Make the table the one row of it that the index says, from now on; the first one, and a note, if it says none."""
        assert isinstance(n.op, Gather)
        f, (table, picks), axis = self._f, n.src, n.op.axis % len(n.src[0].shape)
        extent, type_ = table.shape[axis], element(picks.dtype)
        at = f.v(f"extractelement {vec(self.rows.lanes, type_)} {index}, i64 0")
        if type_ != "i64":
            at = f.v(f"{'sext' if picks.dtype.kind == 'int' else 'zext'} {type_} {at} to i64")
        if picks.dtype.kind == "int" and n.op.wraps:
            at = f.v(f"select i1 {f.compare('slt', at, 0)}, i64 {f.add(at, extent)}, i64 {at}")
        inside = f.compare("ult", at, extent)
        with f.when(f.v(f"xor i1 {inside}, true")):
            f.store("i64", "1", self._missed, 8)
        at = f.v(f"select i1 {inside}, i64 {at}, i64 0")
        stride = math.prod(table.shape[axis + 1 :]) * size_bytes(table.dtype)
        assert isinstance(table.op, Param)
        self._picked[table] = f.at(self._read[table.op.index], f.mul(at, stride))

    def _pass(self, pass_: int, row: Int, start: Int, stop: Int, known: Mapping[Node, str]) -> dict[Node, str]:
        """Write a pass over the columns; the values of its reductions."""
        f, nest, lanes = self._f, self.nest, self.rows.lanes
        reductions = nest.reductions(pass_)
        cost = sum(nest.cost[n] for n in nest.goals(pass_))
        unroll = self.rows.unroll if cost <= LONG_BODY else min(2, self.rows.unroll)
        each = [Combine(f, n, lanes, sees_nan=n not in nest.of_softmaxes) for n in reductions]

        def vector(column: Int, mask: str | None, sums: Sequence[str]) -> list[str]:
            return self._vector(pass_, row, column, mask, known, each, sums)

        def vectors(column: Int, count: int, sums: list[str]) -> list[str]:
            """`sums`: of each reduction its accumulators, those of one vector together."""
            width, after = len(each), list(sums)
            for i in range(count):
                after[i * width : (i + 1) * width] = vector(f.add(column, i * lanes), None, sums[i * width : (i + 1) * width])
            return after

        types = [c.type for c in each] * unroll
        sums = [c.start for c in each] + [c.nothing for c in each] * (unroll - 1)
        wide = lanes * unroll
        extent = f.sub(stop, start)
        many = f.add(start, f.mul(f.div(extent, wide), wide))
        with f.loop(start, many, wide, list(zip(types, sums, strict=True))) as loop:
            loop.next = vectors(loop.index, unroll, loop.carried)
        sums = loop.carried
        if isinstance(many, int) and isinstance(stop, int):
            left = (stop - many) // lanes
            sums = vectors(many, left, sums)
            if (stop - many) % lanes:
                at = left * len(each)
                tail = f.first_lanes(lanes, (stop - many) % lanes)
                sums[at : at + len(each)] = vector(many + left * lanes, tail, sums[at : at + len(each)])
        else:  # nothing is reduced
            full = f.add(start, f.mul(f.div(extent, lanes), lanes))
            with f.loop(many, full, lanes) as loop:
                vector(loop.index, None, [])
            with f.when(f.compare("slt", full, stop)):
                vector(full, f.first_lanes(lanes, f.sub(stop, full)), [])
        return {c.node: c.total(sums[i :: len(each)], nest.columns) for i, c in enumerate(each)}

    def _vector(
        self,
        pass_: int,
        row: Int,
        column: Int,
        mask: str | None,
        known: Mapping[Node, str],
        each: Sequence[Combine],
        sums: Sequence[str],
    ) -> list[str]:
        """One vector of columns in a pass: results written, what is materialised stored, reductions carried on."""
        f, nest = self._f, self.nest
        lanes = self._lanes(Columns(column, True, mask))
        values = dict(known)

        def value(n: Node) -> str:
            if n not in values:
                if n in nest.materialised and nest.level[n] < pass_:
                    values[n] = f.load(*self._materialised(n, column))
                else:
                    for s in (n.src[1:] if n in nest.by_lanes else ()) if isinstance(n.op, Gather) else n.src:
                        value(s)
                    values[n] = self._value(lanes, n, values, row)
            return values[n]

        for n in nest.materialised:
            if nest.level[n] == pass_:
                type_, at, aligned = self._materialised(n, column)
                f.store(type_, value(n), at, aligned)
        seconds = {i for i, _ in nest.written_in_pairs.values()}
        for i in nest.results(pass_):
            store = Lanes(f, nest.stores[i], lanes.lanes, lanes.columns, self._pointer)
            if i in nest.written_in_pairs:
                second, place = nest.written_in_pairs[i]
                store.store_pairs(row, place, value(nest.roots[i]), value(nest.roots[second]), self._result(i))
            elif i not in seconds:
                store.store(row, value(nest.roots[i]), self._result(i))
        return [c.joined(s, c.masked(value(c.node.src[0]), mask)) for c, s in zip(each, sums, strict=True)]

    def _materialised(self, n: Node, column: Int) -> tuple[str, str, int]:
        """Type, address and alignment of a vector of a materialised node."""
        f, size = self._f, size_bytes(n.dtype)
        at = f.at(self._scratch, f.add(self.rows.offset_of(n), f.mul(column, size)))
        return vec(self.rows.lanes, element(n.dtype)), at, self.rows.lanes * size


class Combine:
    """One reduction over vectors of its operand."""

    def __init__(self, f: Function, node: Node, lanes: int, *, sees_nan: bool):
        assert isinstance(node.op, Reduce)
        self._sees_nan = sees_nan
        # Numbers without a sign are in the order of their bits, NaN above all.
        self._sizes = node.op.fn == "maximum" and node.dtype is F32 and is_named(node.src[0], "abs")
        self.node, self._f, self._lanes, self._fn = node, f, lanes, node.op.fn
        self._dtype: DType = node.dtype
        self.type = vec(lanes, element(self._dtype))

    @property
    def start(self) -> str:
        """Initial value of the first accumulator, so that a sum of zeros that are all -0 is 0."""
        return "zeroinitializer" if self._fn in ("add", "mean") and self._dtype is not PRED else self.nothing

    @property
    def nothing(self) -> str:
        """The value that changes nothing when it is joined."""
        d = self._dtype
        if d is PRED:
            return f"splat (i1 {str(self._fn in ALL).lower()})"
        if self._fn in ("add", "mean", "or"):
            return f"splat (float {f32(-0.0)})" if d is F32 else "zeroinitializer"
        if self._fn == "multiply":
            return f"splat ({element(d)} 1)"
        if self._fn == "and":
            return f"splat ({element(d)} -1)"
        if self._sizes:
            return "zeroinitializer"
        worst = d.lowest if self._fn == "maximum" else d.highest
        return f"splat (float {f32(float(worst))})" if d is F32 else f"splat ({element(d)} {int(worst)})"

    def masked(self, value: str, mask: str | None) -> str:
        if mask is None:
            return value
        return self._f.v(f"select {vec(self._lanes, 'i1')} {mask}, {self.type} {value}, {self.type} {self.nothing}")

    def joined(self, a: str, b: str) -> str:
        """The function of two values, lane by lane."""
        f, t = self._f, self.type
        if self._sizes:
            bits = vec(self._lanes, "i32")
            args = [(bits, f.v(f"bitcast {t} {x} to {bits}")) for x in (a, b)]
            return f.v(f"bitcast {bits} {f.intrinsic(f'llvm.umax.{suffix(bits)}', bits, *args)} to {t}")
        if not self._sees_nan:
            p = Printer(f, self._lanes)
            return p.named(a, F32).at_least(p.named(b, F32)).name
        if self._dtype is PRED:
            return f.v(f"{'and' if self._fn in ALL else 'or'} {t} {a}, {b}")
        if self._fn in ("and", "or"):
            return f.v(f"{self._fn} {t} {a}, {b}")
        if self._fn in ("add", "mean", "multiply"):
            name = "mul" if self._fn == "multiply" else "add"
            return f.v(f"{'f' if self._dtype is F32 else ''}{name} {t} {a}, {b}")
        kind = "s" if self._dtype.kind == "int" else "u"
        name = self._fn if self._dtype is F32 else f"{kind}{self._fn[:3]}"
        return f.intrinsic(f"llvm.{name}.{suffix(t)}", t, (t, a), (t, b))

    def total(self, sums: Sequence[str], count: int) -> str:
        """Every lane of the result: accumulators joined in pairs, then lanes half by half."""
        f, parts = self._f, list(sums)
        while len(parts) > 1:
            pairs = [self.joined(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
            parts = pairs + parts[len(pairs) * 2 :]
        (value,) = parts
        half = self._lanes // 2
        while half:
            other = f.shuffle(self.type, value, value, [i ^ half for i in range(self._lanes)])
            value, half = self.joined(value, other), half // 2
        if self._fn == "mean":
            value = f.v(f"fdiv {self.type} {value}, splat (float {f32(float(count))})")
        return value
