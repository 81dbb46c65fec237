"""Addresses of an expression's leaves in memory, as functions of the rows and columns that a kernel walks.

An operand or a store is an expression with views in it. Instead of moving data, each leaf gets one stride for each axis, and
the rows and columns of the kernel's own space are written in those axes. So splitting heads, exchanging axes or repeating a
bias is nothing but address arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tilewright.dtype import F32, DType
from tilewright.ir.axes import Axis, Layout, axes_of, layout_of, propagate_to_source, reshaped
from tilewright.ir.build import slice_
from tilewright.ir.expression import ELEMENTWISE
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import (
    VIEWS,
    Acc,
    Broadcast,
    Const,
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
from tilewright.ir.ranges import Range
from tilewright.ir.types import Shape
from tilewright.schedule.candidate import Inapplicable, Unsupported
from tilewright.schedule.problem import Problem


def too_wide(n: Node) -> DType | None:
    """The type of more than 32 bits in which a kernel would have to compute a node and cannot, else None: no f64, and no
    64-bit integer that becomes a float narrower than f32, which would be rounded twice."""
    if isinstance(n.op, (*VIEWS, Param)):
        return None
    types = (n.dtype, *(s.dtype for s in n.src))
    rounds = n.dtype.is_float and n.dtype is not F32 and isinstance(n.op, Convert)
    return next((t for t in types if t.bits > 32 and (t.is_float or rounds)), None)


def contiguous(shape: Shape) -> tuple[int, ...]:
    """Strides of a dense row-major array, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True)
class View:
    """A value's place in the space of its root: the axes of each dimension, and the part of it taken."""

    layout: Layout
    start: Shape
    step: Shape

    @classmethod
    def whole(cls, layout: Layout) -> View:
        return cls(layout, (0,) * len(layout), (1,) * len(layout))

    @property
    def is_whole(self) -> bool:
        return not any(self.start) and all(s == 1 for s in self.step)


@dataclass(frozen=True)
class StridedDigit:
    """A mixed-radix digit of the row or column number, times a stride: (number // inner) % extent * stride. It is a mode
    `extent:stride` of a CuTe layout, with `inner` the product of the extents before it."""

    extent: int
    inner: int
    stride: int


@dataclass(frozen=True)
class AccessMap:
    """The address of a leaf's element: offset + the row's terms + the column's terms, in elements; terms inner first."""

    offset: int
    rows: tuple[StridedDigit, ...]
    columns: tuple[StridedDigit, ...]

    def in_pairs(self, columns: int, elements: int) -> tuple[int, AccessMap] | None:
        """A map of every other element as pairs of neighbours: 0 or 1, for the first or the second of each pair, and the map of
        the pairs, over twice as many columns. None if other elements are meant or a pair lies past `elements` elements."""
        if self.columns != (StridedDigit(columns, 1, 2),):
            return None
        which = self.offset % 2
        pairs = AccessMap(self.offset - which, self.rows, (StridedDigit(2 * columns, 1, 1),))
        last = pairs.offset + sum((t.extent - 1) * t.stride for t in self.rows) + 2 * columns
        return (which, pairs) if last <= elements else None


@dataclass
class Access:
    """An expression over a space of `rows` x `columns` axes.

    Attributes:
        root: the expression.
        views: the view of each node, in the root's axes.
        rows, columns: axes of the space, outer first.
        first: the column of the kernel's space at which the root's columns start (a store of a range of N).
        within: the shape of what the root is only a part of, and the range of each of its axes; None: it is a result itself.
    """

    root: Node
    views: dict[Node, View] = field(default_factory=dict[Node, View])
    rows: Sequence[Axis] = ()
    columns: Sequence[Axis] = ()
    first: int = 0
    within: tuple[Shape, tuple[Range, ...]] | None = None

    def of_leaf(self, leaf: Node) -> AccessMap:
        """The map of a dense array that stands for `leaf`."""
        return self._place(self.views[leaf], contiguous(leaf.shape))

    def of_result(self) -> AccessMap:
        """The map of the root's elements in the dense result."""
        if self.within is None:
            return self._place(self.views[self.root], contiguous(self.root.shape))
        shape, ranges = self.within
        part = View(self.views[self.root].layout, tuple(r.start for r in ranges), tuple(r.step for r in ranges))
        return self._place(part, contiguous(shape))

    @property
    def columns_contiguous(self) -> bool | None:
        """True where neighbouring columns are neighbours in memory in the largest source; None where it has but one column, or
        there is no source."""
        sources = [n for n in toposort((self.root,)) if isinstance(n.op, Param)]
        largest = max(sources, key=lambda n: n.tensor.elements, default=None)
        columns = () if largest is None else self.of_leaf(largest).columns
        return columns[0].inner == 1 and columns[0].stride == 1 if columns else None

    @property
    def rows_extent(self) -> int:
        """The number of rows."""
        return math.prod(a.extent for a in axes_of((self.rows,)))

    @property
    def columns_extent(self) -> int:
        """The number of columns."""
        return math.prod(a.extent for a in axes_of((self.columns,)))

    def _place(self, view: View, strides: Sequence[int]) -> AccessMap:
        offset, stride_of = 0, dict[Axis, int]()
        for dim, start, step, stride in zip(view.layout, view.start, view.step, strides, strict=True):
            offset += start * stride
            inner = stride * step
            for axis in reversed(axes_of((dim,))):
                stride_of[axis] = inner
                inner *= axis.extent
        rows, columns = (_terms(axes_of((axes,)), stride_of) for axes in (self.rows, self.columns))
        if stride_of:
            raise Unsupported("a side input varies along an axis that the product does not have")
        return AccessMap(offset, rows, columns)


def _terms(axes: Sequence[Axis], stride_of: dict[Axis, int]) -> tuple[StridedDigit, ...]:
    """The digits with a stride, neighbours that step evenly taken as one."""
    terms: list[StridedDigit] = []
    inner = 1
    for axis in reversed(axes):
        stride = stride_of.pop(axis, 0)
        last = terms[-1] if terms else None
        if last is not None and last.inner * last.extent == inner and stride == last.stride * last.extent:
            terms[-1] = replace(last, extent=last.extent * axis.extent)
        else:
            terms.append(StridedDigit(axis.extent, inner, stride))
        inner *= axis.extent
    return tuple(t for t in terms if t.stride)


def _visit(root: Node) -> Access:
    access = Access(root)
    pending = [(root, View.whole(layout_of(root.shape)))]
    while pending:
        node, view = pending.pop()
        known = access.views.get(node)
        if known is not None:
            if not _same(known, view):
                raise Unsupported("an epilogue reads one value in two arrangements")
            continue
        access.views[node] = view
        pending.extend((s, below_view(node, s, view)) for s in node.src)
    return access


def _same(a: View, b: View) -> bool:
    return (a.start, a.step) == (b.start, b.step) and [axes_of((d,)) for d in a.layout] == [axes_of((d,)) for d in b.layout]


def below_view(node: Node, source: Node, view: View) -> View:
    """The view of a source of `node`.

    Raises:
        Unsupported: the operation has no place in a generated kernel, or does not follow the view's axes.
    """
    op = node.op
    if isinstance(op, Slice):
        start = tuple(a + s * t for s, a, t in zip(view.start, op.start, op.step, strict=True))
        return View(view.layout, start, tuple(a * b for a, b in zip(view.step, op.step, strict=True)))
    if isinstance(op, Transpose):
        inverse = sorted(range(len(op.perm)), key=op.perm.__getitem__)
        return View(*(tuple(part[i] for i in inverse) for part in (view.layout, view.start, view.step)))  # type: ignore[arg-type]
    if isinstance(op, ELEMENTWISE):
        if isinstance(op, (Quantize, Dequantize)) and op.block is not None and source is not node.src[0]:
            return View.whole(_by_blocks(op.block, node.shape, view))
        return _repeated(source.shape, node, view)
    if isinstance(op, Broadcast):
        return _repeated(source.shape, node, view)
    if isinstance(op, Gather) and not op.elementwise:
        return _of_gather(op.axis % len(node.src[0].shape), node, source is node.src[1], view)
    if not isinstance(op, Reshape):
        raise Unsupported(f"{op.name} has no place in a generated kernel")
    if [d for d in node.shape if d > 1] == [d for d in source.shape if d > 1]:
        return _with_ones(source.shape, node.shape, view)
    layout = propagate_to_source(node, view.layout)
    if layout is None:
        raise Unsupported(f"{op.name} does not follow the axes of the product")
    if not view.is_whole:
        raise Unsupported("a range is taken before a reshape")
    return View.whole(layout)


def _repeated(shape: Shape, node: Node, view: View) -> View:
    """The view of what has `shape` and broadcasts against `node`, of which `view` may show but a range."""
    extra = len(node.shape) - len(shape)
    seen = tuple(zip(view.layout, view.start, view.step, strict=True))[extra:] if extra >= 0 else ()
    found: list[tuple[tuple[Axis, ...], int, int]] = []
    for extent, full, (layout, start, step) in zip(shape, node.shape[max(extra, 0) :], seen, strict=True):
        if extent not in (1, full):
            raise Unsupported(f"{node.op.name} does not follow the axes of the product")
        found.append((tuple(axes_of((layout,))), start, step) if extent > 1 else ((), 0, 1))
    return View(*zip(*found, strict=True)) if found else View((), (), ())


def _of_gather(axis: int, node: Node, indices: bool, view: View) -> View:
    """The view of a gather's indices, or of what it picks from: the picked axis has none of the axes there, and starts at 0."""
    end = axis + len(node.src[1].shape)
    layout, start, step = view.layout, view.start, view.step
    if indices:
        return View(layout[axis:end], start[axis:end], step[axis:end])
    return View((*layout[:axis], (), *layout[end:]), (*start[:axis], 0, *start[end:]), (*step[:axis], 1, *step[end:]))


def _by_blocks(block: Shape, shape: Shape, view: View) -> Layout:
    """The layout of what holds one value for each block: the outer axes of those that blocks cut in two."""
    if not view.is_whole:
        raise Unsupported("a range is taken of what is scaled by blocks")
    found: list[tuple[Axis, ...]] = []
    for extent, size, dim in zip(shape, block, view.layout, strict=True):
        cut = reshaped((tuple(axes_of((dim,))),), (max(extent // size, 1), min(size, extent)))
        if cut is None:
            raise Unsupported("a scale given by blocks that cut an axis unevenly")
        found.append(cut[0])
    return tuple(found)


def _with_ones(shape: Shape, seen: Shape, view: View) -> View:
    """The view of what has `shape`, of which `view` shows a reshape to `seen` that moves extents of 1 alone."""
    whole: tuple[tuple[Axis, ...], int, int] = ((), 0, 1)
    parts = iter([p for p, d in zip(zip(view.layout, view.start, view.step, strict=True), seen, strict=True) if d > 1])
    layout, start, step = zip(*(next(parts) if d > 1 else whole for d in shape), strict=True) if shape else ((), (), ())
    return View(layout, start, step)


def of_store(root: Node) -> Access:
    """A store over the rows (batch axes and M together) and columns (N) of the accumulator.

    Raises:
        Unsupported: a sentence.
    """
    access = _visit(root)
    acc = next((n for n in access.views if isinstance(n.op, Acc)), None)
    if acc is None:
        raise Unsupported("a store does not read the accumulator")
    view = access.views[acc]
    if any(view.start[:-1]) or any(s != 1 for s in view.step):
        raise Unsupported("a store takes a range of rows or every other column")
    access.rows, access.columns = axes_of(view.layout[:-1]), axes_of(view.layout[-1:])
    access.first = view.start[-1]
    if math.prod(a.extent for a in access.rows) != math.prod(acc.shape[:-1]):
        raise Unsupported("a store does not cover the rows of the accumulator")
    access.of_result()
    for leaf in (n for n in access.views if isinstance(n.op, (Param, Const))):
        access.of_leaf(leaf)
    return access


def amax_of(root: Node) -> Node | None:
    """The expression whose largest element is all that a store keeps: magnitudes in f32, none below 0, so that their bits order
    as integers, NaN's above all. None for a store that does not reduce.

    Raises:
        Unsupported: it reduces otherwise.
    """
    if not isinstance(root.op, Reduce):
        return None
    inner = root.src[0]
    size = inner.src[0] if isinstance(inner.op, Convert) else inner
    magnitudes = isinstance(size.op, Map) and size.op.fn == "abs" and size.dtype.is_float
    if root.op.fn != "maximum" or len(root.op.axes) != len(inner.shape) or inner.dtype is not F32 or not magnitudes:
        raise Unsupported("a store reduces, but not to the largest magnitude of all in f32")
    return inner


def gate_up(stores: Sequence[Node], number: int) -> tuple[tuple[Node, ...], Node] | None:
    """Rewrite stores that each read both halves of the accumulator's columns, as SwiGLU reads gate and up.

    In the rewritten stores the accumulator is the left half alone, and a Param stands for the right half.

    Args:
        stores: a gemm's stores.
        number: the number of its sources.

    Returns:
        The rewritten stores and the Param, of the number `number` and the accumulator's type; None if a store reads one half
        only, or reads the accumulator in another way, too.
    """
    found: list[Node] = []
    right: Node | None = None
    for root in stores:
        nodes = toposort((root,))
        acc = next((n for n in nodes if isinstance(n.op, Acc)), None)
        if acc is None or acc.shape[-1] % 2:
            return None
        extent = acc.shape[-1] // 2
        parts = [slice_(acc, -1, i * extent, (i + 1) * extent) for i in range(2)]
        if not all(part in nodes for part in parts):
            return None
        half = replace(acc.tensor, shape=parts[0].shape)
        right = Node(Param(number, half))
        found += substitute((root,), {parts[0]: Node(Acc(half)), parts[1]: right})
        if acc in toposort(found[-1:]):  # it is read in a third way
            return None
        views = _visit(found[-1]).views
        if not _same(views[Node(Acc(half))], views[right]):  # a column of one meets another column of the other
            return None
    return None if right is None else (tuple(found), right)


def codes_of(problem: Problem, *bits: int, floats: bool = False) -> tuple[Node, bool]:
    """The dequantisation that a gemm's right operand is, and whether K is the codes' last axis.

    Raises:
        Unsupported: the operand is not one constant matrix of integers (or `floats`) of so many bits, with scales.
    """
    root = problem.op.rhs
    k_contiguous = isinstance(root.op, Transpose) and isinstance(root.src[0].op, Dequantize)
    found = root.src[0] if k_contiguous else root
    codes = found.src[0].dtype if isinstance(found.op, Dequantize) else None
    if codes is None or not (codes.is_integer or floats) or codes.bits not in bits:
        kind = "codes" if floats else "integer codes"
        raise Inapplicable(f"the right operand is not {kind} of {' or '.join(map(str, bits))} bits with scales")
    if len(found.shape) != 2:
        raise Unsupported("the weights are not one matrix, as it is or transposed")
    if not problem.constant(found):
        raise Unsupported("the weights are not constant")
    return found, k_contiguous


def of_operand(root: Node, *, columns_last: bool) -> Access:
    """An operand over batch axes and one of its last two axes as rows, the other as columns (the last one or the last but one).

    Raises:
        Unsupported: a sentence.
    """
    access = _visit(root)
    *batch, rows, columns = access.views[root].layout
    if not columns_last:
        rows, columns = columns, rows
    access.rows, access.columns = axes_of((*batch, rows)), axes_of((columns,))
    for leaf in (n for n in access.views if isinstance(n.op, (Param, Const))):
        access.of_leaf(leaf)
    return access
