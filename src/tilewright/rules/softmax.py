"""Softmax and its logarithm from the reductions that XLA and hand-written models spell them with."""

from __future__ import annotations

from tilewright.dtype import BF16, F16, F32
from tilewright.ir.axes import Placed, axes_of, broadcast_aligned, layout_of
from tilewright.ir.build import convert
from tilewright.ir.constant import scalar_value, unrounded
from tilewright.ir.graph import Node
from tilewright.ir.ops import Convert, Map, Reduce, Select, Softmax
from tilewright.ir.pattern import Match, Pat, rule
from tilewright.rules._row_statistics import RowReader, function_of, spans_rows


@rule(Pat(Map, where=lambda n: function_of(n) in ("divide", "multiply") and n.dtype.is_float), stage="recognise")
def exponentials_divided_by_their_sum_are_a_softmax(m: Match) -> Node | None:
    """exp(z) / sum(exp(z)) | exp(z) * (1 / sum(exp(z))) -> softmax(z)

    Where: the sum is over one axis; nothing else reads the exponentials. Exact: no: computed in f32, without rounding in
    between, and where exp(z) overflows the softmax does not.
    """
    given = m.node.src
    pairs = [(given[0], given[1], 1.0)] if function_of(m.node) == "divide" else [(*given, -1.0), (given[1], given[0], -1.0)]
    for numerator, row, power in pairs:
        reader = RowReader()
        exponential = reader.wide(numerator)
        if function_of(exponential) != "exponential" or numerator.shape != m.node.shape:
            continue
        total = _sum(reader, row, power)
        if total is None or total[0] is not exponential or not spans_rows(row, numerator.shape, total[1]):
            continue
        if len(total[1]) != 1:
            m.refuse(f"it sums over {len(total[1])} axes, a softmax over one")
            return None
        if m.read_outside([exponential, *reader.passed]) is not None:
            m.refuse("the exponentials inside this softmax are also read elsewhere")
            return None
        return convert(Node(Softmax(total[1][0]), exponential.src[0]), m.node.dtype)
    return None


def _sum(reader: RowReader, row: Node, power: float) -> tuple[Node, tuple[int, ...]] | None:
    """The value and axes that `row` is the sum of, or the reciprocal of the sum if the power is -1."""
    if power < 0:
        row = reader.bare(row)
        if function_of(row) != "divide" or scalar_value(row.src[0]) != 1:
            return None
        row = row.src[1]
    found = reader.reduction(row, "add")
    return None if found is None else (found.x, found.axes)


@rule(Pat(Map, where=lambda n: function_of(n) == "subtract" and n.dtype.is_float), stage="recognise")
def subtracting_log_of_sum_of_exponentials_is_a_log_softmax(m: Match) -> Node | None:
    """z - log(sum(exp(z))) -> softmax(z, log=true)

    Where: the sum is over one axis; nothing else reads what stands in between. Exact: no: computed in f32 without rounding in
    between, and where exp(z) overflows the log softmax does not.
    """
    z, row = m.node.src
    reader = RowReader()
    logarithm = reader.bare(row)
    total = reader.reduction(logarithm.src[0], "add") if function_of(logarithm) == "log" else None
    if total is None or function_of(total.x) != "exponential" or unrounded(total.x.src[0]) is not unrounded(z):
        return None
    if len(total.axes) != 1 or z.shape != m.node.shape or not spans_rows(row, z.shape, total.axes):
        return None
    if m.read_outside([total.x, *reader.passed]) is not None:
        m.refuse("the exponentials inside this log softmax are also read elsewhere")
        return None
    return Node(Softmax(total.axes[0], log=True), z)


@rule(Pat(Softmax, where=lambda n: function_of(unrounded(n.src[0])) == "subtract"), stage="recognise")
def softmax_subtracts_the_maximum_itself(m: Match) -> Node | None:
    """softmax(x - max(x)) -> softmax(x), also where the maximum is replaced by 0 when it is not finite

    Where: the maximum is over the softmax's axis; nothing else reads the difference. Exact: no, but for rounding the difference
    to x's type; a row of -inf gives NaN either way.
    """
    op, reader = m.node.op, RowReader()
    assert isinstance(op, Softmax)
    shifted = reader.wide(m.node.src[0])
    x, row = shifted.src
    if x.shape != shifted.shape or not x.shape or not _is_maximum(row, x, op.axis % len(x.shape)):
        return None
    if m.read_outside((shifted, *reader.passed)) is not None:
        m.refuse("what its maximum is subtracted from is also read elsewhere")
        return None
    return Node(op, x if x.dtype is m.node.dtype else convert(unrounded(x), m.node.dtype))


def _is_maximum(row: Node, x: Node, axis: int) -> bool:
    """Tell whether `row` is the maximum of x along `axis`, as it lies against x, whatever views either is seen through."""
    layout = layout_of(x.shape)
    lies = broadcast_aligned(row.shape, layout)
    if lies is None:
        return False
    peak = _bare(Placed(row, lies))
    if isinstance(peak.node.op, Select):
        peak = _bare(Placed(_if_finite(peak.node), peak.layout))
    op = peak.node.op
    if not isinstance(op, Reduce) or op.fn != "maximum" or len(op.axes) != 1:
        return False
    dims = list(peak.layout)
    dims[op.axes[0] : op.axes[0] + op.keepdims] = [layout[axis]]
    reduced, whole = _bare(Placed(peak.node.src[0], tuple(dims))), _bare(Placed(x, layout))
    return reduced.node is whole.node and [axes_of((d,)) for d in reduced.layout] == [axes_of((d,)) for d in whole.layout]


def _bare(placed: Placed) -> Placed:
    """The value below all views and roundings."""
    while True:
        placed = placed.without_views()
        node = unrounded(placed.node)
        if node is placed.node:
            return placed
        placed = Placed(node, placed.layout)


def _if_finite(row: Node) -> Node:
    """r, where `row` is select(is_finite(r), r, 0)."""
    test, kept, otherwise = row.src
    finite = function_of(test) == "is_finite" and test.src[0] is kept and scalar_value(otherwise) == 0
    return kept if finite else row


@rule(Pat(Convert, (Pat(Softmax, (Pat(Convert, name="wide"),), name="softmax"),)), stage="recognise")
def softmax_between_casts_is_the_softmax_of_what_is_cast(m: Match) -> Node | None:
    """convert(softmax(convert(x, f32)), t) -> softmax(x), with x of type t

    Where: t is f16 or bf16; nothing else reads the f32 softmax. Exact: yes, a softmax is computed in f32 and rounded once to
    its type.
    """
    softmax, x = m["softmax"], m["wide"].src[0]
    if m.node.dtype not in (F16, BF16) or x.dtype is not m.node.dtype or softmax.dtype is not F32:
        return None
    if not m.users.only(softmax):
        m.refuse("the softmax is also read in f32")
        return None
    return Node(softmax.op, x)
