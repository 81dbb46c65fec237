"""Products of quantised operands are taken on the codes; scales and zero points move behind the product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.dtype import F32, F64, S32
from tilewright.ir.build import const, convert, map_, reduce_, reshape
from tilewright.ir.constant import constant_value, scalar_value
from tilewright.ir.expression import REARRANGE, Sources, before_reshape, make_gemm, outside
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import VIEWS, Acc, Broadcast, Const, Convert, Dequantize, Gemm, Map, Param, Slice, Transpose
from tilewright.ir.pattern import Match, Pat, rule


@dataclass(frozen=True)
class Coded:
    """An operand read as codes: (codes - zero) * scale, all expressions over the gemm's sources."""

    codes: Node
    scale: Node
    zero: Node | None


def read_codes(root: Node, summed_axis: int, src: tuple[Node, ...]) -> Coded | str:
    """The operand as codes with a scale that does not vary along the summed axis, or a sentence why it is not one."""
    views: list[Node] = []
    node = root
    while isinstance(node.op, VIEWS):
        views.append(node)
        node = node.src[0]
    if not isinstance(node.op, Dequantize):
        return "an operand is not quantised"
    if node.op.block is not None:
        return "a scale is given per block along K"
    views.reverse()
    scale = _viewed(node.src[1], node, views)
    shifted = len(node.src) == 3 and node.src[0].dtype.is_integer and not _is_zero(node.src[2], src)
    zero = _viewed(node.src[2], node, views) if shifted else None
    if scale is None or (shifted and zero is None):
        return "a scale varies along an axis that a reshape splits"
    for t in (scale, zero):
        if t is not None and len(t.shape) >= -summed_axis and t.shape[summed_axis] != 1:
            return "a scale varies along K"
    codes = node.src[0]
    for view in views:
        codes = Node(view.op, codes)
    return Coded(codes, scale, zero)


def _viewed(t: Node, dequantized: Node, views: Sequence[Node]) -> Node | None:
    """A scale or zero point as it broadcasts against the operand after `views`; None if nothing does."""
    if t.tensor.elements == 1:
        return reshape(t, ())
    t = reshape(t, (1,) * (len(dequantized.shape) - len(t.shape)) + t.shape)
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


def _is_zero(t: Node, src: tuple[Node, ...]) -> bool:
    source = src[t.op.index] if isinstance(t.op, Param) else t
    return isinstance(source.op, Const) and not bool(source.op.data.tensor().any())


@rule(Pat(Gemm), stage="product")
def multiply_codes_and_scale_the_accumulator(m: Match) -> Node | None:
    """gemm(dequantize(a, sa, za), dequantize(b, sb, zb)) -> gemm(a, b) {acc = s32,
    store over (acc - za colsum(b) - zb rowsum(a) + K za zb) * sa * sb}.

    Where: both operands are integer codes, or both 8-bit floats (without zero points, acc = f32); no scale varies along K; no
    sum can exceed 32 bits. Exact: the integer sum is; the product in floats, which it replaces, was rounded at every step, so
    results agree within the rounding of an f32 gemm of this K. Zero points that are constant zero vanish; sums over constants
    are computed once.
    Source: Jacob et al. 2018, arXiv 1712.05877, eq. 7.
    """
    node, op = m.node, m.node.op
    assert isinstance(op, Gemm)
    if not any(isinstance(n.op, Dequantize) for n in toposort((op.lhs, op.rhs))):
        return None
    lhs, rhs = read_codes(op.lhs, -1, node.src), read_codes(op.rhs, -2, node.src)
    if isinstance(lhs, str) or isinstance(rhs, str):
        m.refuse(lhs if isinstance(lhs, str) else str(rhs))
        return None
    a, b = lhs.codes.dtype, rhs.codes.dtype
    if a.is_integer != b.is_integer or max(a.bits, b.bits) > 8:
        m.refuse(f"the codes are {a} and {b}, which no matrix unit multiplies")
        return None
    k = lhs.codes.shape[-1]
    if a.is_integer and k * _largest(lhs, node.src) * _largest(rhs, node.src) > S32.max:
        m.refuse(f"sums over K = {k} may not fit 32 bits")
        return None
    sources = Sources(node.src)
    exact = F64 if op.acc_dtype is F64 else F32
    acc_dtype = S32 if a.is_integer else exact
    value = Node(Acc(Gemm(acc_dtype, lhs.codes, rhs.codes, ()).acc_type))
    if a.is_integer:
        for correction in _corrections(lhs, rhs, node.src):
            value = map_("subtract", value, _beside_acc(correction, sources))
    value = convert(value, exact)
    for scale in (lhs.scale, rhs.scale):
        value = map_("multiply", value, convert(scale, exact))
    old = Node(Acc(op.acc_type))
    stores = substitute(op.stores, {old: convert(value, op.acc_dtype)})
    return make_gemm(acc_dtype, lhs.codes, rhs.codes, stores, sources.nodes)


def _largest(operand: Coded, src: tuple[Node, ...]) -> int:
    """The largest magnitude that a code less its zero point can have."""
    low, high = int(operand.codes.dtype.min), int(operand.codes.dtype.max)
    if operand.zero is None:
        return max(-low, high)
    zero = scalar_value(outside(operand.zero, src))
    return high - low if zero is None else max(int(zero) - low, high - int(zero))


def _corrections(lhs: Coded, rhs: Coded, src: tuple[Node, ...]) -> list[Node]:
    """What to subtract from the product of the codes, as nodes of the graph: za colsum(b) - K za zb, and zb rowsum(a)."""
    zero_a, zero_b = (None if o.zero is None else convert(outside(o.zero, src), S32) for o in (lhs, rhs))
    found: list[Node] = []
    if zero_a is not None:
        columns = map_("multiply", zero_a, _sum(rhs.codes, -2, src))
        if zero_b is not None:
            both = map_("multiply", map_("multiply", zero_a, zero_b), const(lhs.codes.shape[-1], S32))
            columns = map_("subtract", columns, both)
        found.append(columns)
    if zero_b is not None:
        found.append(map_("multiply", zero_b, _sum(lhs.codes, -1, src)))
    return found


def _beside_acc(node: Node, sources: Sources) -> Node:
    """A node of the graph as a store reads it: computed in the store where it would be larger than what it is made of, else by
    the graph; a constant vector is then one side input, computed once."""
    known = constant_value(node, max_elements=1)
    if known is not None:
        return const(known, node.dtype)
    grows = bool(node.src) and node.tensor.elements > max(s.tensor.elements for s in node.src)
    if isinstance(node.op, (*REARRANGE, Broadcast, Convert)) or (isinstance(node.op, Map) and (grows or not node.constant)):
        return Node(node.op, *(_beside_acc(s, sources) for s in node.src))
    return sources.param(node)


def _sum(codes: Node, axis: int, src: tuple[Node, ...]) -> Node:
    """The sum of codes along K: a node of the graph, computed once if the codes are constant."""
    return reduce_("add", convert(outside(codes, src), S32), [axis], keepdims=True)
