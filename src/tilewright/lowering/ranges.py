"""Results in ranges: a concatenation is one expression for each range of its result.

    f(concat(a, b), y)  ->  f(a, y[: len(a)]) in the first range, f(b, y[len(a) :]) in the second

Ranges are moved from the result down to the sources, past everything that works element by element or only moves elements, so
that each element is still computed once. Each expression that is left reads parts of the sources and writes a part of the
result, by addresses alone. The rotation of queries and keys, `x * cos + concat(-x2, x1) * sin`, is two such expressions over
the halves of x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tilewright import deadline
from tilewright.dtype import F32
from tilewright.ir.axes import axes_of, layout_of, reshaped
from tilewright.ir.build import broadcast, const, map_, reshape
from tilewright.ir.expression import ELEMENTWISE
from tilewright.ir.extent import Extent
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import (
    VIEWS,
    Broadcast,
    Concat,
    Const,
    Dequantize,
    Gather,
    Param,
    Quantize,
    Reduce,
    Reshape,
    Slice,
    Transpose,
)
from tilewright.ir.ranges import Range
from tilewright.ir.types import Shape
from tilewright.schedule.candidate import Unsupported
from tilewright.schedule.problem import Destination

MOST = 16  # pieces of all results, each of which is code of its own
Ranges = tuple[Range, ...]  # of each axis


@dataclass(frozen=True)
class Piece:
    """Elements of a result.

    Attributes:
        root: their expression.
        result: the number of the result they belong to.
        shape: extents of that result, or of one that it is a reshape of: the same memory.
        ranges: the elements of it that they are, by axis.
    """

    root: Node
    result: int
    shape: Shape
    ranges: Ranges


def pieces_of(roots: Sequence[Node], destinations: Sequence[Destination | None] = (), *, copies: bool = True) -> list[Piece]:
    """Results in pieces without concatenations on the way to them, in order; one piece a result where there are none.

    Args:
        roots: the results, of elementwise operations, reductions, gathers, views and concatenations.
        destinations: for each result the array in which it lies, if it is not one of its own; none are where this is empty.
        copies: ranges of a result that are copies of one another are pieces of one expression.

    Raises:
        Unsupported: a sentence, where concatenations make more than `MOST`.
    """
    made: dict[tuple[Node, Ranges], Node] = {}
    found: list[Piece] = []
    for i, root in enumerate(roots):
        destination = destinations[i] if destinations else None
        nodes = toposort((root,))
        cut = destination is not None or any(isinstance(n.op, (Concat, Slice)) for n in nodes)
        if not cut and any(n.tensor.open for n in nodes):  # copies of open numbers are not told apart
            found.append(Piece(root, i, root.shape, ()))
            continue
        while destination is None and isinstance(root.op, Reshape):
            root = root.src[0]
        shape, ranges = root.shape, whole(root.shape)
        if destination is not None:
            shape, ranges = destination.shape, destination.ranges(root.shape[destination.axis])
        pending = [Piece(_sums_of_parts(_cut_early(root, made), made), i, shape, ranges)]
        while pending:
            deadline.check()
            piece = pending.pop()
            parts = _parts(piece.root) or (_copies(piece.root, made) if copies else [])
            if not parts:
                found.append(piece)
            if len(parts) + len(pending) + len(found) > MOST + i:  # those before may be of one piece each
                raise Unsupported(f"concatenations cut its results into more than {MOST} pieces")
            for part in reversed(parts):
                ranges = tuple(all_.part(r) for all_, r in zip(piece.ranges, part, strict=True))
                cut = _reduced_in_parts(cut_to(piece.root, part, made), piece.root.shape, parts, made)
                pending.append(Piece(cut, i, shape, ranges))
    return found


def whole(shape: Shape) -> Ranges:
    """The ranges of a shape that take every element of each axis."""
    return tuple(map(Range.whole, shape))


def _cut_early(root: Node, made: dict[tuple[Node, Ranges], Node]) -> Node:
    """The expression with ranges of what is computed in it moved to its sources."""
    moved: dict[Node, Node] = {}
    for n in toposort((root,)):
        n_ = moved[n] = n.with_src([moved[s] for s in n.src])
        if isinstance(n_.op, Slice):
            moved[n] = cut_to(n_.src[0], _of_slice(n_.op), made)
        elif isinstance(n_.op, Concat):  # one source that is all of it would be cut into itself for ever
            moved[n] = next((s for s in n_.src if s.shape == n_.shape), n_)
    return moved[root]


def _of_slice(op: Slice) -> Ranges:
    return tuple(Range.of(*bounds) for bounds in zip(op.start, op.stop, op.step, strict=True))


def _copies(root: Node, made: dict[tuple[Node, Ranges], Node]) -> list[Ranges]:
    """The ranges of a result that are copies of one another, as keys' heads are for each query head that reads them; none if
    there are no such ranges. Their expression is one node, computed once and stored to each."""
    parts = _parts(root, Broadcast)
    return parts if len({cut_to(root, part, made) for part in parts}) == 1 else []


def _of_copies(n: Node) -> list[Ranges]:
    """The parts of a broadcast along the first axis that repeats something computed; none if that makes too many."""
    x = n.src[0]
    while isinstance(x.op, VIEWS):
        x = x.src[0]
    if isinstance(x.op, (Param, Const)) or x.tensor.elements == 1:
        return []
    before = (1,) * (len(n.shape) - len(n.src[0].shape)) + n.src[0].shape
    axis = next((a for a, (d, e) in enumerate(zip(before, n.shape, strict=True)) if d < e), None)
    if axis is None or isinstance(n.shape[axis], Extent) or n.shape[axis] > MOST:
        return []
    return [(*whole(n.shape[:axis]), Range(i, 1), *whole(n.shape[axis + 1 :])) for i in range(n.shape[axis])]


def _parts(root: Node, of: type[Concat | Broadcast] = Concat) -> list[Ranges]:
    """The ranges of a result that the sources of the first concatenation make which there is on the way to it, or the copies of
    the first broadcast; none if there is no such node."""
    pending: list[tuple[Node, tuple[Node, ...]]] = [(root, ())]  # and the way to it
    seen: set[Node] = set()
    while pending:
        n, way = pending.pop()
        if n in seen:
            continue
        seen.add(n)
        if isinstance(n.op, of):
            parts = [_upward(r, n, way) for r in (_of_sources(n) if of is Concat else _of_copies(n))]
            known = [p for p in parts if p is not None]
            if known and len(known) == len(parts):
                return known
        if isinstance(n.op, (*ELEMENTWISE, Reshape, Transpose, Broadcast)):
            pending.extend((s, (n, *way)) for s in reversed(n.src))
    return []


def _of_sources(n: Node) -> list[Ranges]:
    """The part of a concatenation that each of its sources makes, empty sources left out."""
    assert isinstance(n.op, Concat)
    axis, first, found = n.op.axis % len(n.shape), 0, list[Ranges]()
    for s in n.src:
        found.append(tuple(Range(first, s.shape[a]) if a == axis else Range.whole(d) for a, d in enumerate(n.shape)))
        first += s.shape[axis]
    return [r for r in found if all(x.extent for x in r)]


def _upward(ranges: Ranges, n: Node, way: Sequence[Node]) -> Ranges | None:
    """The part of the last of the nodes on the way that is made of a part of `n`; None if it is no range along each axis."""
    for reader in way:
        op = reader.op
        if isinstance(op, Transpose):
            ranges = tuple(ranges[p] for p in op.perm)
        elif isinstance(op, Reshape):
            found = _through_reshape(ranges, n.shape, reader.shape)
            if found is None:
                return None
            ranges = found
        else:
            extra = len(reader.shape) - len(n.shape)
            along = [Range.whole(d) if d != n.shape[i] else ranges[i] for i, d in enumerate(reader.shape[extra:])]
            ranges = (*whole(reader.shape[:extra]), *along)
        n = reader
    return ranges


def _through_reshape(ranges: Ranges, before: Shape, after: Shape) -> Ranges | None:
    """The ranges of `after` that hold what these of `before` do, in the same order; None if no ranges do."""
    layout = layout_of(before)
    new = reshaped(layout, after)
    if new is None:
        return None
    of_axis: dict[object, Range] = {}
    for r, dim in zip(ranges, layout, strict=True):
        digits = _in_digits(r, [a.extent for a in axes_of((dim,))])
        if digits is None:
            return None
        of_axis.update(zip(axes_of((dim,)), digits, strict=True))
    found: list[Range] = []
    for dim in new:
        joined = Range(0, 1)
        for axis in reversed(axes_of((dim,))):  # inner first
            outer, inner = of_axis[axis], math.prod(a.extent for a in axes_of((dim,))[axes_of((dim,)).index(axis) + 1 :])
            step = outer.step * inner
            if outer.extent > 1 and joined.extent > 1 and step != joined.extent * joined.step:
                return None
            by, extent = joined.step if joined.extent > 1 else step, outer.extent * joined.extent
            joined = Range(outer.start * inner + joined.start, extent, by if extent > 1 else 1)
        found.append(joined)
    return tuple(found)


def _in_digits(r: Range, extents: Sequence[int]) -> list[Range] | None:
    """A range of numbers as one of each digit, outer first; None if it is no product of such."""
    if not extents:
        return []
    if len(extents) == 1:
        return [r]
    inner = math.prod(extents[1:])
    if r.start == 0 and r.step == 1 and r.extent == extents[0] * inner:
        return [Range.whole(e) for e in extents]
    first, rest = r.start // inner, r.start % inner
    if r.extent == 1 or r.last // inner == first:  # within one outer digit
        digits = _in_digits(Range(rest, r.extent, r.step), extents[1:])
        return None if digits is None else [Range(first, 1), *digits]
    if r.step % inner == 0:
        digits = _in_digits(Range(rest, 1), extents[1:])
        return None if digits is None else [Range.of(first, r.last // inner + 1, r.step // inner), *digits]
    if inner % r.step or rest >= r.step or r.extent % (inner // r.step):
        return None
    digits = _in_digits(Range.of(rest, inner, r.step), extents[1:])
    return None if digits is None else [Range(first, r.extent // (inner // r.step)), *digits]


def cut_to(n: Node, ranges: Ranges, made: dict[tuple[Node, Ranges], Node]) -> Node:
    """`n[ranges]`, taken of its sources: as far down as there is nothing else than moves and elementwise operations.

    Args:
        n: a value.
        ranges: the range of each of its axes, none of them empty.
        made: cuts made before, to which this one is added.
    """
    key = (n, ranges)
    if key not in made:
        made[key] = n if ranges == whole(n.shape) else _cut(n, ranges, made)
    return made[key]


def _cut(n: Node, ranges: Ranges, made: dict[tuple[Node, Ranges], Node]) -> Node:
    op, shape = n.op, tuple(r.extent for r in ranges)

    def of_broadcast(s: Node) -> Node:
        along = ranges[len(ranges) - len(s.shape) :]
        return cut_to(s, tuple(Range(0, 1) if d == 1 else r for d, r in zip(s.shape, along, strict=True)), made)

    if isinstance(op, ELEMENTWISE):
        if not (isinstance(op, (Quantize, Dequantize)) and op.block is not None):
            return n.with_src([of_broadcast(s) for s in n.src])
    elif isinstance(op, Broadcast):
        return broadcast(of_broadcast(n.src[0]), shape)
    elif isinstance(op, Transpose):
        inverse = sorted(range(len(op.perm)), key=op.perm.__getitem__)
        return Node(op, cut_to(n.src[0], tuple(ranges[i] for i in inverse), made))
    elif isinstance(op, Reshape):
        before = _through_reshape(ranges, n.shape, n.src[0].shape)
        if before is not None:
            inner = cut_to(n.src[0], before, made)
            return reshape(inner.src[0] if isinstance(inner.op, Reshape) else inner, shape)
        split = _reshaped(n.src[0], n.shape)
        if split is not None:
            return cut_to(split, ranges, made)
    elif isinstance(op, Slice):
        return cut_to(n.src[0], tuple(a.part(r) for a, r in zip(_of_slice(op), ranges, strict=True)), made)
    elif isinstance(op, Concat):
        axis, found = op.axis % len(shape), list[Node]()
        r, first = ranges[axis], 0
        for s in n.src:
            ends = [-(-(end - r.start) // r.step) for end in (first, first + s.shape[axis])]
            inside = r.between(*(end if end > 0 else 0 for end in ends))
            if inside.extent:
                part = replace(inside, start=inside.start - first)
                found.append(cut_to(s, (*ranges[:axis], part, *ranges[axis + 1 :]), made))
            first += s.shape[axis]
        return found[0] if len(found) == 1 else Node(op, *found)
    elif isinstance(op, Reduce):
        left = iter(ranges)
        if op.keepdims:
            both = zip(n.src[0].shape, ranges, strict=True)
            inner = [Range.whole(d) if a in op.axes else r for a, (d, r) in enumerate(both)]
        else:
            inner = [Range.whole(d) if a in op.axes else next(left) for a, d in enumerate(n.src[0].shape)]
        return Node(op, cut_to(n.src[0], tuple(inner), made))
    elif isinstance(op, Gather) and not op.elementwise:
        axis, rank = op.axis % len(n.src[0].shape), len(n.src[1].shape)
        table = (*ranges[:axis], Range.whole(n.src[0].shape[axis]), *ranges[axis + rank :])
        return Node(op, cut_to(n.src[0], table, made), cut_to(n.src[1], ranges[axis : axis + rank], made))
    return Node(Slice(*(tuple(x) for x in zip(*((r.start, r.stop, r.step) for r in ranges), strict=True))), n)


def _reshaped(n: Node, shape: Shape) -> Node | None:
    """Elementwise operations on params and numbers, computed in another shape; None for any other node."""
    if not isinstance(n.op, ELEMENTWISE) or (isinstance(n.op, (Quantize, Dequantize)) and n.op.block is not None):
        return None
    found: list[Node] = []
    for s in n.src:
        if s.tensor.elements > 1 and s.shape != n.shape:
            return None
        to, below = shape if s.shape == n.shape else (), s
        while isinstance(below.op, VIEWS):
            below = below.src[0]
        part = reshape(s, to) if isinstance(below.op, (Param, Const)) else _reshaped(s, to)
        if part is None:
            return None
        found.append(part)
    return n.with_src(found)


def _reduced_in_parts(root: Node, shape: Shape, parts: Sequence[Ranges], made: dict[tuple[Node, Ranges], Node]) -> Node:
    """A piece with what is reduced along the axis that was cut reduced in the same parts, so that their columns are its own.

    mean(x) -> (sum(x[: n / 2]) + sum(x[n / 2 :])) / n, where all parts are of one size.
    """
    cut = [a for a, d in enumerate(shape) if parts[0][a].extent < d]
    if len(cut) != 1 or len({p[cut[0]].extent for p in parts}) > 1:
        return root
    axis = cut[0]
    moved: dict[Node, Node] = {}
    for n in toposort((root,)):
        n_ = moved[n] = n.with_src([moved[s] for s in n.src])
        op = n_.op
        if isinstance(op, Reduce) and len(op.axes) == 1 and n_.src[0].shape[op.axes[0]] == shape[axis]:
            moved[n] = _joined(n_, [p[axis] for p in parts], made)
    return moved[root]


def _sums_of_parts(root: Node, made: dict[tuple[Node, Ranges], Node]) -> Node:
    """An expression with what is reduced along a concatenation of equal parts reduced part by part."""
    moved: dict[Node, Node] = {}
    for n in toposort((root,)):
        n_ = moved[n] = n.with_src([moved[s] for s in n.src])
        if not isinstance(n_.op, Reduce) or len(n_.op.axes) != 1:
            continue
        axis, every, parts = n_.op.axes[0], whole(n_.src[0].shape), _parts(n_.src[0])
        alone = all(p[:axis] == every[:axis] and p[axis + 1 :] == every[axis + 1 :] for p in parts)
        if len(parts) > 1 and alone and len({p[axis].extent for p in parts}) == 1:
            moved[n] = _joined(n_, [p[axis] for p in parts], made)
    return moved[root]


def _joined(n: Node, parts: Sequence[Range], made: dict[tuple[Node, Ranges], Node]) -> Node:
    """A reduction along one axis as those of its parts; itself where they cannot be joined."""
    op, x = n.op, n.src[0]
    assert isinstance(op, Reduce)
    fn = "add" if op.fn == "mean" else op.fn
    if fn not in ("add", "maximum", "minimum") or not (n.dtype is F32 or n.dtype.is_integer):
        return n
    before, after = whole(x.shape[: op.axes[0]]), whole(x.shape[op.axes[0] + 1 :])
    each = [cut_to(x, (*before, part, *after), made) for part in parts]
    total, *more = (Node(Reduce(fn, op.axes, op.keepdims), part) for part in each)
    for one in more:
        total = map_(fn, total, one)
    return map_("divide", total, const(float(x.shape[op.axes[0]]), F32)) if op.fn == "mean" else total
