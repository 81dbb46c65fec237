"""Operands read as codes and zero points, and what zero points add to a product of the codes."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from tilewright.dtype import S32, DType
from tilewright.ir.build import const, convert, map_, reduce_, reshape
from tilewright.ir.constant import constant_value
from tilewright.ir.expression import REARRANGE, Sources, before_reshape, outside, with_views
from tilewright.ir.graph import Node
from tilewright.ir.ops import VIEWS, Broadcast, Convert, Dequantize, Map, Slice, Transpose
from tilewright.rules.casts import holds


@dataclass(frozen=True)
class QuantizedOperand:
    """An operand read as codes: (codes - zero) * scale, or divided by it, all expressions over the gemm's sources; `scale` None
    is 1."""

    codes: Node
    scale: Node | None
    zero: Node | None
    divided: bool = False


def as_operand(node: Node, sources: Sources) -> Node:
    """A node of the graph as an operand: what only rearranges or widens is read where it is multiplied."""
    widens = isinstance(node.op, Convert) and are_codes(node.src[0].dtype) and node.src[0].dtype.bits <= node.dtype.bits
    if isinstance(node.op, VIEWS) or widens or isinstance(node.op, Dequantize):
        return Node(node.op, *(as_operand(s, sources) for s in node.src))
    return sources.param(node)


def under_views(root: Node) -> tuple[Node, list[Node]]:
    """The node that an operand views, and the views on it, the innermost first."""
    views: list[Node] = []
    while isinstance(root.op, VIEWS):
        views.append(root)
        root = root.src[0]
    return root, views[::-1]


def are_codes(dtype: DType) -> bool:
    """Tell whether a type is an integer or a float of at most 8 bits."""
    return dtype.kind in ("int", "uint", "float") and dtype.bits <= 8


def widened_codes(node: Node) -> Node | None:
    """The codes of which a node is a copy in a wider type, viewed as the node views them: casts on the way hold every code, so
    that none wraps or is rounded. None if it is anything else."""
    views: list[Node] = []
    while not are_codes(node.dtype):
        if isinstance(node.op, VIEWS):
            views.append(node)
        elif not isinstance(node.op, Convert) or not holds(node.dtype, node.src[0].dtype):
            return None
        node = node.src[0]
    return with_views(node, views[::-1])


def viewed(t: Node, operand: Node, views: Sequence[Node]) -> Node | None:
    """A scale or zero point of `operand` as it broadcasts against that after `views`; None if nothing does."""
    if t.tensor.elements == 1:
        return reshape(t, ())
    t = reshape(t, (1,) * (len(operand.shape) - len(t.shape)) + t.shape)
    for view in views:
        op = view.op
        if isinstance(op, Transpose):
            t = Node(op, t)
        elif isinstance(op, Slice):
            cuts = zip(op.start, op.stop, op.step, t.shape, strict=True)
            start, stop, step = zip(*((low, high, by) if d != 1 else (0, 1, 1) for low, high, by, d in cuts), strict=True)
            t = Node(Slice(start, stop, step), t)
        elif isinstance(op, Broadcast):
            t = reshape(t, (1,) * (len(op.shape) - len(t.shape)) + t.shape)
        else:
            found = before_reshape(t, view.shape, view.src[0].shape)
            if found is None:
                return None
            t = found
    return t


def varies(t: Node | None, summed_axis: int) -> bool:
    """Tell whether a scale or zero point varies along K, which is axis -1 of the left operand and -2 of the right one."""
    return t is not None and len(t.shape) >= -summed_axis and t.shape[summed_axis] != 1


def corrected(value: Node, lhs: QuantizedOperand, rhs: QuantizedOperand, src: Sequence[Node], sources: Sources) -> Node:
    """A product of codes less za colsum(b) - K za zb and zb rowsum(a), in a store over `sources`.

    Zero points and sums are sources as the graph has them, and multiplied in the store; what is constant is computed once.
    """
    zero_a, zero_b = (None if o.zero is None else convert(outside(o.zero, src), S32) for o in (lhs, rhs))
    sums: list[Node] = []
    if zero_a is not None:
        columns = _sum(rhs.codes, -2, src)
        if zero_b is not None:
            columns = map_("subtract", columns, map_("multiply", zero_b, const(lhs.codes.shape[-1], S32)))
        sums.append(map_("multiply", zero_a, columns))
    if zero_b is not None:
        sums.append(map_("multiply", zero_b, _sum(lhs.codes, -1, src)))
    leaves = {z for z in (zero_a, zero_b) if z is not None}
    for one in sums:
        value = map_("subtract", value, _beside_acc(one, sources, leaves))
    return value


def _beside_acc(node: Node, sources: Sources, leaves: Set[Node]) -> Node:
    """A node of the graph as a store reads it: computed in the store down to `leaves` and sums, unless it is constant and no
    larger than what it is made of; a constant vector is then one side input, computed once."""
    known = constant_value(node, max_elements=1)
    if known is not None:
        return const(known, node.dtype)
    grows = bool(node.src) and node.tensor.elements > max(s.tensor.elements for s in node.src)
    views = isinstance(node.op, (*REARRANGE, Broadcast))
    if views or (isinstance(node.op, Convert) and node.src[0].dtype.is_integer):
        within = {*leaves, node.src[0]} if node in leaves else leaves
        return Node(node.op, *(_beside_acc(s, sources, within) for s in node.src))
    if isinstance(node.op, Map) and node not in leaves and (grows or not node.constant):
        return Node(node.op, *(_beside_acc(s, sources, leaves) for s in node.src))
    return sources.param(node)


def _sum(codes: Node, axis: int, src: Sequence[Node]) -> Node:
    """The sum of codes along K: a node of the graph, computed once if the codes are constant."""
    return reduce_("add", convert(outside(codes, src), S32), [axis], keepdims=True)
