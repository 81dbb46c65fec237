"""A fusion of operations as rows: reductions along one set of axes, everything else element by element.

Norms and softmaxes are first decomposed into sums, maxima and elementwise steps. Then every value is given its place among the
axes of the largest one, through whatever views lie between; the axes that are reduced are the columns, all others the rows.
Reductions of a row come one after the other where one needs another's result. Each takes a pass over the row's columns, and a
last pass writes the results. Cheap values are computed again in every pass, the others are stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tilewright import deadline
from tilewright.dtype import PRED
from tilewright.ir.axes import (
    Axis,
    Layout,
    axes_of,
    broadcast_aligned,
    layout_of,
    propagate_to_source,
    propagate_to_user,
    reshaped,
)
from tilewright.ir.expression import ELEMENTWISE
from tilewright.ir.extent import hint_of
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import (
    VIEWS,
    Broadcast,
    Convert,
    Dequantize,
    Gather,
    Map,
    Param,
    Quantize,
    Reduce,
    Reshape,
    Slice,
    Transpose,
)
from tilewright.lowering.access import Access, AccessMap, View, below_view
from tilewright.lowering.decompose import decompose, param_per_access
from tilewright.lowering.ranges import Piece, pieces_of
from tilewright.lowering.scalar.costs import ROW
from tilewright.schedule.candidate import Unsupported
from tilewright.schedule.problem import Destination

COMBINED = ("add", "mean", "maximum", "minimum", "multiply", "and", "or")
MATERIALISED_COLUMNS = 1 << 16  # of rows whose intermediates are stored: past that they would leave the second-level cache
FEW = 4  # results that are single numbers, of which a kernel is not worth building for fewer
MOST_AGAIN = 1.125  # times the work of the expressions as given, at most: a mean in parts divides once more a row
WORKED_OUT_AGAIN = 4  # instructions that cost no more than writing a value and reading it back


@dataclass(frozen=True)
class ReductionNest:
    """A loop nest to generate: rows, each with passes over its columns that end in reductions, and one that stores.

    Attributes:
        roots: the results, over params numbered one for each place that is read.
        sources: index of the problem's source that each of those params is.
        outputs: index of the problem's result that each root is, or is a part of.
        stores: the roots' places there; they share their views, rows and columns.
    """

    roots: tuple[Node, ...]
    sources: tuple[int, ...]
    outputs: tuple[int, ...]
    stores: tuple[Access, ...]

    @cached_property
    def nodes(self) -> list[Node]:
        return toposort(self.roots)

    @property
    def access(self) -> Access:
        return self.stores[0]

    @cached_property
    def tables(self) -> frozenset[Node]:
        """The sources from which rows are picked by index."""
        return frozenset(n.src[0] for n in self.nodes if isinstance(n.op, Gather))

    @cached_property
    def by_lanes(self) -> frozenset[Node]:
        """Gathers that pick anew in every column, or by an index that a pass over the row computes; any other picks one row of
        its table for the whole row."""
        picks = [n for n in self.nodes if isinstance(n.op, Gather)]
        return frozenset(n for n in picks if n.src[1] in self.across or self.level[n.src[1]])

    @cached_property
    def rows(self) -> int:
        return self.access.rows_extent

    @cached_property
    def columns(self) -> int:
        return self.access.columns_extent

    @cached_property
    def across(self) -> set[Node]:
        """The nodes that vary along a row's columns."""
        mine = set(axes_of((self.access.columns,)))
        return {n for n in self.nodes if mine & set(axes_of(self.access.views[n].layout))}

    @cached_property
    def fixed(self) -> list[Node]:
        """The nodes that are the same for all rows and columns."""
        found: dict[Node, None] = {}
        for n in self.nodes:
            alone = not axes_of(self.access.views[n].layout) and not isinstance(n.op, (Reduce, Gather))
            if alone and n not in self.tables and all(s in found for s in n.src):
                found[n] = None
        return list(found)

    @cached_property
    def level(self) -> dict[Node, int]:
        """The number of passes over a row that come before each node can be computed."""
        found: dict[Node, int] = {}
        for n in self.nodes:
            found[n] = max((found[s] for s in n.src), default=0) + isinstance(n.op, Reduce)
        return found

    @cached_property
    def passes(self) -> int:
        """Those that reduce, and one that only writes if a result of that many elements needs the last of them."""
        reducing = max((self.level[n] for n in self.nodes if isinstance(n.op, Reduce)), default=0)
        last = any(r in self.across and self.level[r] == reducing for r in self.roots)
        return reducing + last

    def reductions(self, pass_: int) -> list[Node]:
        """The reductions whose operand is known in a pass."""
        return [n for n in self.nodes if isinstance(n.op, Reduce) and self.level[n] == pass_ + 1]

    def results(self, pass_: int) -> list[int]:
        """The results that are written in a pass, by number."""
        return [i for i, r in enumerate(self.roots) if r in self.across and self.level[r] == pass_]

    def goals(self, pass_: int) -> list[Node]:
        """The nodes that a pass computes along the columns, in order."""
        stored = [n for n in self.materialised if self.level[n] == pass_]
        return [*stored, *(n.src[0] for n in self.reductions(pass_)), *(self.roots[i] for i in self.results(pass_))]

    @cached_property
    def cost(self) -> dict[Node, int]:
        """Instructions to work a node out from memory, roughly."""
        found: dict[Node, int] = {}
        for n in self.nodes:
            mine = _cost(n) if n in self.across else 0
            found[n] = mine + sum(found[s] for s in dict.fromkeys(n.src))
        return found

    @cached_property
    def of_softmaxes(self) -> frozenset[Node]:
        """The maximum and the exponentials of each softmax: the sum tells of a NaN, so the first need not, and no exponent is
        above 0, so that the second may stop at f32's normal numbers."""
        users: dict[Node, list[Node]] = {}
        for n in self.nodes:
            for s in n.src:
                users.setdefault(s, []).append(n)
        found: set[Node] = set()
        for n in self.nodes:
            if is_named(n, "multiply") and is_named(n.src[1], "divide") and is_named(n.src[0], "exponential"):
                weight, total = n.src[0], n.src[1].src[1]
                below, highest = weight.src[0], weight.src[0].src[-1:]
                adds_up = isinstance(total.op, Reduce) and total.op.fn == "add" and total.src == (weight,)
                if (
                    adds_up
                    and set(users[weight]) == {n, total}
                    and weight not in self.roots
                    and is_named(below, "subtract")
                    and highest[0].src == below.src[:1]
                    and users[highest[0]] == [below]
                ):
                    found |= {weight, highest[0]}
        return frozenset(n for n in found if n not in self.roots)

    @cached_property
    def materialised(self) -> list[Node]:
        """The intermediates that are stored when first computed and read in later passes."""
        found: dict[Node, None] = {}
        for n in self.nodes if self.columns <= MATERIALISED_COLUMNS else ():
            for s in n.src:
                later = self.level[n] > self.level[s] and not isinstance(n.op, Reduce)
                if later and s in self.across and s.dtype is not PRED and self.cost[s] > WORKED_OUT_AGAIN:
                    found[s] = None
        return list(found)

    @cached_property
    def read_in_pairs(self) -> dict[Node, tuple[int, AccessMap]]:
        """The params of which every other element along the columns is read: which of each pair, and the map of the pairs."""
        leaves = [n for n in self.nodes if isinstance(n.op, Param) and n not in self.tables]
        found = {n: self.access.of_leaf(n).in_pairs(self.columns, n.tensor.elements) for n in leaves}
        return {n: pairs for n, pairs in found.items() if pairs is not None}

    @cached_property
    def written_in_pairs(self) -> dict[int, tuple[int, AccessMap]]:
        """Roots that are the first of each pair of neighbours in a result: the root that is the second, and where pairs go."""
        firsts: dict[tuple[int, AccessMap, int], int] = {}
        seconds: dict[tuple[int, AccessMap, int], int] = {}
        for i, (root, store) in enumerate(zip(self.roots, self.stores, strict=True)):
            elements = math.prod(store.within[0]) if store.within is not None else root.tensor.elements
            pairs = store.of_result().in_pairs(self.columns, elements) if root in self.across else None
            if pairs is not None:
                (seconds if pairs[0] else firsts)[self.outputs[i], pairs[1], self.level[root]] = i
        return {first: (seconds[key], key[1]) for key, first in firsts.items() if key in seconds}

    @cached_property
    def work(self) -> int:
        """Instructions on elements, roughly."""
        goals = [n for p in range(self.passes) for n in self.goals(p)]
        return self.rows * self.columns * sum(min(self.cost[n], 64) for n in goals)


def is_named(n: Node, fn: str) -> bool:
    return isinstance(n.op, Map) and n.op.fn == fn


def _cost(n: Node) -> int:
    op = n.op
    if isinstance(op, (*VIEWS, Reduce)):
        return 0
    if isinstance(op, Map):
        return ROW(op.fn)
    return 6 if isinstance(op, Quantize) else 2 if isinstance(op, (Convert, Dequantize)) else 1


def reduction_nests(
    roots: Sequence[Node], check: Callable[[Node], None], destinations: Sequence[Destination | None] = ()
) -> tuple[ReductionNest, ...]:
    """A problem's expressions as rows: one nest, unless results, or the pieces into which concatenations cut them, are of
    several sizes; then one for each.

    Args:
        roots: the results.
        check: raises `Unsupported` where the generator has no form for a node, of any operation but reductions and gathers.
        destinations: see `ranges.pieces_of`.

    Raises:
        Unsupported: a sentence why they have none.
    """
    if all(isinstance(n.op, (*VIEWS, Param)) for n in toposort(roots)):
        raise Unsupported("nothing but views: no element need move")
    if any(0 in n.shape for n in toposort(roots)):
        raise Unsupported("an extent is zero")
    if len(roots) < FEW and not any(n.tensor.elements > 1 for n in toposort(roots)):
        raise Unsupported("a handful of numbers")
    written = decompose(roots)
    once = pieces_of(written, destinations, copies=False)
    try:
        pieces = pieces_of(written, destinations)
        if len(pieces) > len(once):
            return _nests(pieces, written, check)
    except Unsupported:
        pass
    return _nests(once, written, check)


def _nests(pieces: Sequence[Piece], written: Sequence[Node], check: Callable[[Node], None]) -> tuple[ReductionNest, ...]:
    """One nest for pieces of results, one for those of each size, or one for each piece."""
    sizes = dict.fromkeys(p.root.tensor.elements for p in pieces)
    by_size = [[p for p in pieces if p.root.tensor.elements == size] for size in sizes]
    first: Unsupported | None = None
    for groups in ([pieces], *([by_size] if len(by_size) > 1 else []), *([[[p] for p in pieces]] if len(pieces) > 1 else [])):
        try:
            found = tuple(_nest(group, check) for group in groups)
            if hint_of(sum(_work(r.roots) for r in found)) <= MOST_AGAIN * hint_of(_work(written)):
                return found
            first = Unsupported("cut into pieces, it would work values out again")
        except Unsupported as why:
            first = first or why
    assert first is not None
    raise first


def _work(roots: Sequence[Node]) -> int:
    """Instructions on elements that expressions take together, roughly."""
    return sum(_cost(n) * n.tensor.elements for n in toposort(roots) if n.src)


def _nest(pieces: Sequence[Piece], check: Callable[[Node], None]) -> ReductionNest:
    """The rows that pieces of results share."""
    written, sources = param_per_access([p.root for p in pieces])
    order = toposort(written)
    for n in order:
        if isinstance(n.op, Reduce):
            multiplies = n.op.fn == "multiply" and n.dtype.is_float  # whose errors have no bound here
            if n.op.fn not in COMBINED or multiplies:
                raise Unsupported(f"reducing {n.dtype} by {n.op.fn} has no vector form")
            if n.dtype.is_integer and n.dtype.bits < 8:
                raise Unsupported(f"reducing {n.dtype} has no vector form")
            continue
        if isinstance(n.op, Gather) and not isinstance(n.src[0].op, Param):
            raise Unsupported("a gather from what is worked out here")
        check(n.src[0] if isinstance(n.op, Gather) else n)
    views = _Places(written, order).views
    access = Access(written[0], views)
    within = [None if p.shape == p.root.shape else (p.shape, p.ranges) for p in pieces]
    stores = tuple(replace(access, root=r, within=w) for r, w in zip(written, within, strict=True))
    access.rows, access.columns = _rows_and_columns(stores)
    for store in stores:
        store.rows, store.columns = access.rows, access.columns
    whole, across = set(axes_of((access.rows,))), set(axes_of((access.columns,)))
    for n in order:
        if not set(axes_of(views[n].layout)) <= whole | across:
            raise Unsupported("its values do not share rows")
    for store in stores:
        mine = set(axes_of(views[store.root].layout))
        if not (mine == whole | across or (mine == whole and any(isinstance(n.op, Reduce) for n in order))):
            raise Unsupported("a result is smaller than its rows")
        store.of_result()
    return ReductionNest(tuple(written), sources, tuple(p.result for p in pieces), stores)


# -- where everything lies


class _Places:
    """The view of every node in the axes of the largest."""

    def __init__(self, roots: Sequence[Node], order: Sequence[Node]):
        self._chains = {n for n in order if isinstance(n.op, Param)}
        for n in order:
            if isinstance(n.op, VIEWS) and n.src[0] in self._chains:
                self._chains.add(n)
        self._users: dict[Node, list[Node]] = {}
        for n in order:
            for s in n.src:
                self._users.setdefault(s, []).append(n)
            if isinstance(n.op, Slice) and n not in self._chains:
                raise Unsupported("a range of what is worked out here")
        self._tables = {n.src[0] for n in order if isinstance(n.op, Gather)}
        # Views of sources are looked through from above; their tops count as values.
        self._values = [n for n in order if n not in self._chains or n in roots or not self._chains.issuperset(self._users[n])]
        self._layouts: dict[Node, Layout] = {}
        self._spread()
        self.views = {n: View.whole(self._layouts[n]) for n in self._values}
        for n in reversed(order):
            if n in self._chains and n.src:
                self.views[n.src[0]] = below_view(n, n.src[0], self.views[n])

    def _spread(self) -> None:
        """A layout for every value, and all of them agree."""
        values = set(self._values)
        largest = max((n for n in self._values if n not in self._tables), key=lambda n: n.tensor.elements)
        known = self._layouts
        pending = [largest]
        known[largest] = layout_of(largest.shape)
        while len(known) < len(values):
            while pending:
                deadline.check()
                n = pending.pop()
                sources = [] if n in self._chains else [s for s in n.src if s in values]
                found = [(s, self._down(n, s)) for s in sources]
                found += [(u, self._up(n, u)) for u in self._users.get(n, []) if u in values and u not in self._chains]
                for other, layout in found:
                    if other not in known and layout is not None:
                        known[other] = layout
                        pending.append(other)
            if len(known) < len(values):
                # What is only under the same rows by its shape; whether that holds everywhere is seen below.
                left = next((n for n in self._values if n not in known and n.tensor.elements == largest.tensor.elements), None)
                layout = reshaped(known[largest], left.shape) if left is not None else None
                if left is None or layout is None:
                    raise Unsupported("its values do not share rows")
                known[left] = layout
                pending.append(left)
        for n in self._values:
            for s in () if n in self._chains else n.src:
                self._agree(n, s)

    def _down(self, n: Node, source: Node) -> Layout | None:
        layout = self._layouts[n]
        if isinstance(n.op, ELEMENTWISE):
            return broadcast_aligned(source.shape, layout)
        if isinstance(n.op, Gather):  # the axis that is picked along is none of the rows': it is an offset
            axis, rank = n.op.axis % len(n.src[0].shape), len(n.src[1].shape)
            if n.op.elementwise:
                return layout if source is n.src[1] else (*layout[:axis], (), *layout[axis + 1 :])
            return layout[axis : axis + rank] if source is n.src[1] else (*layout[:axis], (), *layout[axis + rank :])
        return propagate_to_source(n, layout) if isinstance(n.op, (Reshape, Transpose, Broadcast)) else None

    def _up(self, source: Node, n: Node) -> Layout | None:
        layout = self._layouts[source]
        if isinstance(n.op, (*ELEMENTWISE, Broadcast)) or (isinstance(n.op, Gather) and source is n.src[1]):
            return layout if source.shape == n.shape else None
        if isinstance(n.op, Reduce):
            dims = [() if a in n.op.axes else d for a, d in enumerate(layout)]
            return tuple(d for a, d in enumerate(dims) if n.op.keepdims or a not in n.op.axes)
        return propagate_to_user(n, layout)

    def _agree(self, n: Node, source: Node) -> None:
        if isinstance(n.op, Reduce):
            mine, other = self._up(source, n), self._layouts[n]
        elif isinstance(n.op, (*ELEMENTWISE, Reshape, Transpose, Broadcast, Gather)):
            mine, other = self._down(n, source), self._layouts[source]
        else:
            raise Unsupported(f"{n.op.name} of a value worked out here")
        if mine is None or [axes_of((d,)) for d in mine] != [axes_of((d,)) for d in other]:
            raise Unsupported("it uses one value in two arrangements")


def _rows_and_columns(stores: Sequence[Access]) -> tuple[list[Axis], list[Axis]]:
    """The axes that are reduced are the columns; where none is, as many of the last as lie one after the other everywhere."""
    access, order = stores[0], toposort([s.root for s in stores])
    all_axes = axes_of(max((access.views[n].layout for n in order), key=lambda v: math.prod(a.extent for a in axes_of(v))))
    reduced: list[list[Axis]] = []
    for n in order:
        if isinstance(n.op, Reduce):
            layout = access.views[n.src[0]].layout
            reduced.append(axes_of(layout[a] for a in n.op.axes))
    if reduced:
        if any(set(axes) != set(reduced[0]) for axes in reduced):
            raise Unsupported("it reduces along different axes")
        return [a for a in all_axes if a not in reduced[0]], [a for a in all_axes if a in reduced[0]]
    for first in range(len(all_axes)):
        rows, columns = all_axes[:first], all_axes[first:]
        split = replace(access, rows=rows, columns=columns)
        places = [split.of_leaf(n) for n in order if isinstance(n.op, Param)]
        places += [replace(s, rows=rows, columns=columns).of_result() for s in stores]
        if all(_in_line(p, math.prod(a.extent for a in columns)) for p in places):
            return rows, columns
    return all_axes[:-1], all_axes[-1:]


def _in_line(place: AccessMap, columns: int) -> bool:
    """Columns lie one after the other, or are all the same element."""
    return [(t.extent, t.inner, t.stride) for t in place.columns] in ([], [(columns, 1, 1)])
