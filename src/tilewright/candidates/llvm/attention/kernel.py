"""Attention as two products with a softmax between them, a tile of query rows at a time: the scores never leave the cache.

Keys and values are packed first, once for all queries that share them. A task takes one tile of one head's queries. It computes
scores panel by panel, without the panels of keys that causality hides from the whole tile, and the softmax row by row over all
scores. Then it multiplies the weights by the values; each panel of scores is the left operand as it lies. Everything is added
up in f32, whatever the operands' type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tilewright.candidates.llvm.expressions.printer import Printer, element
from tilewright.candidates.llvm.expressions.text import Function, Int, Module, vec
from tilewright.candidates.llvm.expressions.vector import Columns, Vectors
from tilewright.candidates.llvm.gemm.kernel import GemmWriter
from tilewright.candidates.llvm.gemm.nest import Nest, rounded
from tilewright.dtype import F32, PRED
from tilewright.ir.extent import Extent
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param
from tilewright.lowering.access import Access
from tilewright.lowering.attention import AttentionFacts
from tilewright.lowering.scalar.functions import bounded_exp

MINUS_INFINITY = "0xFFF0000000000000"
NAN = "0x7FF8000000000000"


@dataclass(frozen=True, kw_only=True)
class AttentionNest(AttentionFacts):
    """The loop nests of an attention: of its two products, with what happens between them.

    Attributes:
        scores: the product of queries (lhs) and keys (rhs, K contiguous), a matrix a key head; its `rows` are S.
        output: the product of weights and values (rhs, N contiguous); its stores are the results.
        on_scores, on_weights: what happens to the scaled scores, and to the softmax.
    """

    scores: Nest
    output: Nest
    scale: float
    on_scores: Access | None
    on_weights: Access | None

    @property
    def roots(self) -> list[Node]:
        """The operands, what happens to scores and weights, and the results."""
        inner = (self.mask, self.on_scores, self.on_weights)
        accesses = (self.scores.lhs, self.scores.rhs, self.output.rhs, *inner, *self.stores)
        return [a.root for a in accesses if a is not None]

    @property
    def queries_bytes(self) -> int:
        return self.scores.lhs_panel_bytes

    @property
    def scores_bytes(self) -> int:
        return self.scores.rhs_panels * self.scores.tile_bytes

    @property
    def values_at(self) -> int:
        """The offset of the packed values, behind the packed keys."""
        return rounded(self.scores.packed_rhs_bytes)

    @property
    def threads_at(self) -> int:
        return self.values_at + rounded(self.output.packed_rhs_bytes)

    @property
    def thread_bytes(self) -> int:
        return self.queries_bytes + self.scores_bytes + self.output.tile_bytes

    def scratch(self, threads: int) -> int:
        return self.threads_at + threads * self.thread_bytes

    @property
    def pointers(self) -> int:
        return self.output.pointers

    @property
    def leaves_out(self) -> bool:
        """Tell whether keys that causality hides from all queries of a tile are left out: they have no weight."""
        return self.causal != "no" and not self.equal_masked_rows and self.on_weights is None


class _Keys(GemmWriter):
    """Packs the keys at the start of the scratch memory."""

    def _rhs(self, f: Function) -> str:
        return self._scratch(f, 0)

    def write(self) -> Module:
        self._pack_rhs("pack_keys", 1)
        return self.module


class AttentionWriter(GemmWriter):
    """Writes an attention as a module with an entry `python(pointers…, threads, 0)`."""

    def __init__(self, attention: AttentionNest):
        super().__init__(attention.output)
        self.attention = attention

    def _fuses_epilogue(self) -> bool:
        """Say no: its micro-kernels fill tiles, which the softmax and the stores read."""
        return False

    def _rhs(self, f: Function) -> str:
        return self._scratch(f, self.attention.values_at)

    def write(self) -> Module:
        _Keys(self.attention.scores, self.module).write()
        self._pack_rhs()
        self._tile_kernels(more=True)
        self._softmax()
        self._attend()
        keys, values = self.attention.scores, self.nest
        packing = {"pack_keys": keys.batch * keys.rhs_panels, "pack_rhs": values.batch * values.rhs_panels}
        self._worker(packing, "attend")
        self._entry()
        return self.module

    def _accumulated(self, vectors: Vectors, acc: str) -> str:
        return vectors.convert(acc, F32, self.attention.result)

    # -- one tile of queries

    def _attend(self) -> None:
        """Write the phase whose tasks are tiles of `mr` queries of a head: scores panel by panel of packed keys, the softmax of
        their rows, then the sums over packed values, with the epilogue of each panel of results."""
        h, n, s = self.attention, self.nest, self.attention.scores
        f = self._phase("attend")
        queries = self._scratch(f, f.add(h.threads_at, f.mul("%thread", h.thread_bytes)))
        scores = f.at(queries, h.queries_bytes)
        out = f.at(scores, h.scores_bytes)
        keys, values = self._scratch(f, 0), self._rhs(f)
        sources = self._sources(f, s.lhs)
        with f.tasks(self._counter(f, 2), h.batch * h.heads * n.lhs_panels) as task:
            head, tile = f.div(task, n.lhs_panels), f.rem(task, n.lhs_panels)
            begin = f.mul(tile, n.blocks.mr)
            row = f.add(f.mul(head, n.M), begin)
            count = f.min(n.blocks.mr, f.sub(n.M, begin))
            # The key head of a query head; heads of one batch entry follow one another in both.
            key_head = f.div(head, h.shared)
            self._copy_queries(f, sources, row, count, queries)

            def products(rows: int) -> None:
                panels = self._panels_seen(f, begin, rows)
                with f.loop(0, panels) as panel:
                    right = f.at(keys, f.mul(f.add(f.mul(key_head, s.rhs_panels), panel.index), s.rhs_panel_bytes))
                    to = f.at(scores, f.mul(panel.index, s.tile_bytes))
                    f.call(f"micro_{rows}", *_micro(queries, s.lhs_stride, right, to, s.groups(s.K)))
                f.call(
                    "softmax",
                    ("ptr", "%arguments"),
                    ("ptr", scores),
                    ("i64", row),
                    ("i64", begin),
                    ("i64", rows),
                    ("i64", panels),
                )
                with f.loop(0, n.rhs_panels) as panel:
                    right = f.at(values, f.mul(f.add(f.mul(key_head, n.rhs_panels), panel.index), n.rhs_panel_bytes))
                    width = s.nr  # scores in a panel
                    each, last = n.groups(width), n.groups(h.keys % width)
                    step = each * n.nr * 4  # bytes of as many rows of values
                    f.call(f"micro_{rows}", *_micro(scores, s.nr * 4, right, out, f.min(each, n.groups(h.keys))))
                    whole = h.keys // width
                    with f.loop(1, f.min(whole, panels) if h.leaves_out else whole) as more:
                        a, b = f.at(scores, f.mul(more.index, s.tile_bytes)), f.at(right, f.mul(more.index, step))
                        f.call(f"micro_{rows}_more", *_micro(a, s.nr * 4, b, out, each))
                    if isinstance(whole, Extent) or (h.leaves_out and whole and h.keys % width):
                        with f.loop(f.max(whole, 1), panels) as more:
                            a, b = f.at(scores, f.mul(more.index, s.tile_bytes)), f.at(right, f.mul(more.index, step))
                            f.call(f"micro_{rows}_more", *_micro(a, s.nr * 4, b, out, last))
                    elif whole and h.keys % width:
                        a, b = f.at(scores, whole * s.tile_bytes), f.at(right, whole * step)
                        f.call(f"micro_{rows}_more", *_micro(a, s.nr * 4, b, out, last))
                    self._epilogue(f, out, row, rows, panel.index)

            for rows in reversed(n.heights):
                with f.when(f.compare("eq", count, rows)):
                    products(rows)
        f.finish()

    def _panels_seen(self, f: Function, begin: Int, rows: int) -> Int:
        """Panels of keys of which some of a tile's `rows` queries from `begin` on see a key, at least one."""
        h, s = self.attention, self.attention.scores
        if not h.leaves_out:
            return s.rhs_panels
        keys = f.max(f.add(f.add(begin, rows), h.shift), 1)
        return f.min(f.div(f.add(keys, s.nr - 1), s.nr), s.rhs_panels)

    def _copy_queries(self, f: Function, sources: Callable[[Node], str], row: Int, count: Int, to: str) -> None:
        s, d = self.attention.scores, self.nest.dot
        with f.loop(0, count) as loop:

            def store(column: Int, value: str) -> None:
                offset = f.add(f.mul(loop.index, s.lhs_stride), f.mul(column, 4 // d.k))
                f.store(d.operand, value, f.at(to, offset), 4)

            self._vectors_of_row(f, s, sources, f.add(row, loop.index), store)

    # -- softmax

    def _softmax(self) -> None:
        """A tile's scores, panel by panel, into weights in the same place, as far as the first `panels` panels go."""
        h, s = self.attention, self.attention.scores
        lanes, t = s.nr, vec(s.nr, "float")
        args = [("ptr", "scores"), ("i64", "row"), ("i64", "query"), ("i64", "rows"), ("i64", "panels")]
        f = self._function("softmax", *args)
        accesses = [a for a in (h.on_scores, h.mask, h.on_weights) if a is not None]
        pointers: dict[Node, str] = {}
        for a in accesses:
            pointer = self._sources(f, a)
            pointers.update((n, pointer(n)) for n in toposort((a.root,)) if isinstance(n.op, Param))
        b = Printer(f, lanes)
        whole, rest = h.keys // lanes, h.keys % lanes

        with f.loop(0, "%rows") as loop:
            row, query = f.add("%row", loop.index), f.add("%query", loop.index)
            line = f.at("%scores", f.mul(loop.index, lanes * 4))

            def vectors(access: Access, column: Int, mask: str | None) -> Vectors:
                return Vectors(f, access, lanes, Columns(column, True, mask), pointers.__getitem__)

            def chosen(mask: str, value: str, other: float) -> str:
                return b.select(b.named(mask, PRED), b.named(value, F32), other).name

            def masked(column: Int, mask: str | None, value: str) -> str:
                value = (b.named(value, F32) * h.scale).name
                if h.on_scores is not None:
                    value = vectors(h.on_scores, column, mask).row(row, value)
                if h.mask is not None:
                    seen = vectors(h.mask, column, mask)
                    given = seen.row(row)
                    if h.mask.root.dtype is PRED:
                        value = chosen(given, value, h.hidden)
                    else:
                        value = (b.named(value, F32) + b.named(seen.convert(given, h.mask.root.dtype, F32), F32)).name
                if h.causal != "no":
                    last = f.add(query, h.shift)
                    value = chosen(f.first_lanes(lanes, f.add(f.sub(last, column), 1)), value, h.hidden)
                return value if mask is None else chosen(mask, value, -math.inf)

            def panels(body: Callable[[str, Int, str | None, str], str], carried: str) -> str:
                """body(place, column, mask, carried) over every panel; what it carries at the end."""
                with f.loop(0, f.min(whole, "%panels") if h.leaves_out else whole, 1, [(t, carried)]) as panel:
                    place = f.at(line, f.mul(panel.index, s.tile_bytes))
                    panel.next = [body(place, f.mul(panel.index, lanes), None, panel.carried[0])]
                carried = panel.carried[0]
                if isinstance(rest, Extent) or (h.leaves_out and rest):
                    with f.loop(whole, "%panels", 1, [(t, carried)]) as panel:
                        place, column = f.at(line, f.mul(panel.index, s.tile_bytes)), f.mul(panel.index, lanes)
                        panel.next = [body(place, column, f.first_lanes(lanes, f.sub(h.keys, column)), panel.carried[0])]
                    carried = panel.carried[0]
                elif rest:
                    mask = f.first_lanes(lanes, rest)
                    carried = body(f.at(line, whole * s.tile_bytes), whole * lanes, mask, carried)
                return carried

            def first(place: str, column: Int, mask: str | None, most: str) -> str:
                value = masked(column, mask, f.load(t, place, 64))
                f.store(t, value, place, 64)
                return b.named(value, F32).at_least(b.named(most, F32)).name

            most = panels(first, f"splat (float {MINUS_INFINITY})")
            top = f.intrinsic(f"llvm.vector.reduce.fmax.v{lanes}f32", "float", (t, most))
            nothing = f.v(f"fcmp oeq float {top}, {MINUS_INFINITY}")
            level = f.splat(lanes, "float", f.v(f"select i1 {nothing}, float 0.0, float {top}"))

            def second(place: str, column: Int, mask: str | None, total: str) -> str:
                value = b.named(f.load(t, place, 64), F32)
                weight = b.select(value == -math.inf, 0.0, bounded_exp(value - b.named(level, F32)))
                f.store(t, weight.name, place, 64)
                return (b.named(total, F32) + weight).name

            total = panels(second, "zeroinitializer")
            sum_ = f.intrinsic(f"llvm.vector.reduce.fadd.v{lanes}f32", "float", ("float", "0.0"), (t, total))
            blind = "0.0" if h.zero_masked_rows else NAN
            share = f.v(f"select i1 {nothing}, float {blind}, float {f.v(f'fdiv float 1.0, {sum_}')}")
            by = f.splat(lanes, "float", share)

            def third(place: str, column: Int, mask: str | None, carried: str) -> str:
                value = (b.named(f.load(t, place, 64), F32) * b.named(by, F32)).name
                if h.on_weights is not None:
                    value = vectors(h.on_weights, column, mask).row(row, value)
                value = value if mask is None else chosen(mask, value, 0.0)
                taken = self.nest.dot.lhs
                f.store(vec(lanes, element(taken)), b.convert(value, F32, taken), place, 64)
                return carried

            panels(third, "zeroinitializer")
        f.finish()


def _micro(a: str, stride: Int, b: str, tile: str, groups: Int) -> tuple[tuple[str, Int], ...]:
    return (("ptr", a), ("i64", stride), ("ptr", b), ("ptr", tile), ("i64", groups))
