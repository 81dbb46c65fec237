"""Products of quantised operands are taken on the codes; scales and zero points move behind the product."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.dtype import F32, S32
from tilewright.ir.build import const, convert, map_, reduce_, reshape
from tilewright.ir.expression import REARRANGE, Sources, make_gemm
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import Acc, Const, Dequantize, Gemm, Param, Transpose
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
    while isinstance(node.op, REARRANGE):
        views.append(node)
        node = node.src[0]
    if not isinstance(node.op, Dequantize):
        return "an operand is not quantised"
    if node.op.block is not None:
        return "a scale is given per block along K"
    scale = _viewed(node.src[1], node, views)
    zero = _viewed(node.src[2], node, views) if len(node.src) == 3 and not _is_zero(node.src[2], src) else None
    if scale is None or (len(node.src) == 3 and zero is None and not _is_zero(node.src[2], src)):
        return "a scale varies along an axis that a reshape splits"
    for t in (scale, zero):
        if t is not None and len(t.shape) >= -summed_axis and t.shape[summed_axis] != 1:
            return "a scale varies along K"
    codes = node.src[0]
    for view in reversed(views):
        codes = Node(view.op, codes)
    return Coded(codes, scale, zero)


def _viewed(t: Node, dequantized: Node, views: list[Node]) -> Node | None:
    """A scale or zero point as it broadcasts against the operand after `views` (given outermost first)."""
    if t.tensor.elements == 1:
        return reshape(t, ())
    t = reshape(t, (1,) * (len(dequantized.shape) - len(t.shape)) + t.shape)
    for view in reversed(views):
        if not isinstance(view.op, Transpose):
            return None
        t = Node(view.op, t)
    return t


def _is_zero(t: Node, src: tuple[Node, ...]) -> bool:
    source = src[t.op.index] if isinstance(t.op, Param) else t
    return isinstance(source.op, Const) and not bool(source.op.data.tensor().any())


@rule(Pat(Gemm), stage="product")
def multiply_codes_and_scale_the_accumulator(m: Match) -> Node | None:
    """gemm(dequantize(a, sa, za), dequantize(b, sb, zb)) -> gemm(a, b) {acc = s32,
    store over (acc - za colsum(b) - zb rowsum(a) + K za zb) * sa * sb}.

    Where: both operands are integer codes, or both 8-bit floats (without zero points, acc = f32), and no scale varies along K.
    Exact: the integer sum is; the product in floats, which it replaces, was rounded at every step, so results agree within
    the rounding of an f32 gemm of this K. Zero points that are constant zero vanish; sums over constants are computed once.
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
    sources = Sources(node.src)
    acc_dtype = S32 if a.is_integer else F32
    acc = Node(Acc(Gemm(acc_dtype, lhs.codes, rhs.codes, ()).acc_type))
    value = _corrected(acc, lhs, rhs, node.src, sources) if a.is_integer else acc
    value = convert(value, F32)
    for scale in (lhs.scale, rhs.scale):
        value = map_("multiply", value, convert(scale, F32))
    old = Node(Acc(op.acc_type))
    stores = substitute(op.stores, {old: convert(value, op.acc_dtype)})
    return make_gemm(acc_dtype, lhs.codes, rhs.codes, stores, sources.nodes)


def _corrected(acc: Node, lhs: Coded, rhs: Coded, src: tuple[Node, ...], sources: Sources) -> Node:
    value = acc
    zero_a = None if lhs.zero is None else convert(lhs.zero, S32)
    zero_b = None if rhs.zero is None else convert(rhs.zero, S32)
    if zero_a is not None:
        value = map_("subtract", value, map_("multiply", zero_a, _sum(rhs.codes, -2, src, sources)))
    if zero_b is not None:
        value = map_("subtract", value, map_("multiply", zero_b, _sum(lhs.codes, -1, src, sources)))
    if zero_a is not None and zero_b is not None:
        k = const(lhs.codes.shape[-1], S32)
        value = map_("add", value, map_("multiply", map_("multiply", zero_a, zero_b), k))
    return value


def _sum(codes: Node, axis: int, src: tuple[Node, ...], sources: Sources) -> Node:
    """The sum of codes along K as a source of the gemm: a node of the graph, computed once if the codes are constant."""
    leaves = {n: src[n.op.index] for n in toposort((codes,)) if isinstance(n.op, Param)}
    (outside,) = substitute((codes,), leaves)
    return sources.param(reduce_("add", convert(outside, S32), [axis], keepdims=True))
