"""Products of quantised operands are taken on the codes; scales and zero points move behind the product."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.dtype import F32, F64, S32
from tilewright.ir.build import convert, map_
from tilewright.ir.constant import scalar_value
from tilewright.ir.expression import REARRANGE, Sources, make_gemm, outside, with_views
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import Acc, Broadcast, Const, Dequantize, Gemm, Map, Param
from tilewright.ir.pattern import Match, Pat, rule
from tilewright.rules._codes import (
    QuantizedOperand,
    as_operand,
    corrected,
    under_views,
    varies,
    viewed,
    widened_codes,
)


def read_codes(root: Node, summed_axis: int, sources: Sources) -> QuantizedOperand | str:
    """The operand as codes with a scale that does not vary along the summed axis, or a sentence why it is not one."""
    node, views = under_views(root)
    divided = _quotient(node, sources)
    node = node if divided is None else divided
    if not isinstance(node.op, Dequantize):
        return "an operand is not quantised"
    if node.op.block is not None:
        return "a scale is given per block along K"
    scale = viewed(node.src[1], node, views)
    shifted = len(node.src) == 3 and node.src[0].dtype.is_integer and not _is_zero(node.src[2], sources.nodes)
    zero = viewed(node.src[2], node, views) if shifted else None
    if scale is None or (shifted and zero is None):
        return "a scale varies along an axis that a reshape splits"
    for t in (scale, zero):
        if varies(t, summed_axis):
            return "a scale varies along K"
    return QuantizedOperand(with_views(node.src[0], views), scale, zero, divided is not None)


def _quotient(node: Node, sources: Sources) -> Node | None:
    """A source that divides codes by a scale, as if it dequantised them by it; None for any other operand.

    A quotient is no dequantisation, which multiplies: where one stands alone it stays. Here the sum is divided.
    """
    source = sources.nodes[node.op.index] if isinstance(node.op, Param) else node
    if not isinstance(source.op, Map) or source.op.fn != "divide" or not _wide(source):
        return None
    widened, scale = source.src
    codes = widened_codes(widened)
    if codes is None or codes.shape != source.shape or scale.tensor.elements >= max(codes.tensor.elements, 2):
        return None
    return Node(Dequantize(source.dtype), as_operand(codes, sources), _beside(scale, sources))


def _wide(node: Node) -> bool:
    """Tell whether a quotient is rounded to no fewer bits than codes have."""
    return node.dtype.is_float and node.dtype.bits >= 16


def _beside(scale: Node, sources: Sources) -> Node:
    views = isinstance(scale.op, (*REARRANGE, Broadcast))
    return Node(scale.op, _beside(scale.src[0], sources)) if views else sources.param(scale)


def _is_zero(t: Node, src: Sequence[Node]) -> bool:
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
    An operand of codes divided by a scale is one, too: the sum is divided.
    Source: Jacob et al. 2018, arXiv 1712.05877, eq. 7.
    """
    node, op = m.node, m.node.op
    assert isinstance(op, Gemm)
    sources = Sources(node.src)
    quantised = any(isinstance(n.op, Dequantize) for n in toposort((op.lhs, op.rhs)))
    if not quantised and not any(_quotient(s, sources) is not None for s in node.src):
        return None
    lhs, rhs = read_codes(op.lhs, -1, sources), read_codes(op.rhs, -2, sources)
    if isinstance(lhs, str) or isinstance(rhs, str):
        m.refuse(lhs if isinstance(lhs, str) else str(rhs))
        return None
    a, b = lhs.codes.dtype, rhs.codes.dtype
    if a.is_integer != b.is_integer or max(a.bits, b.bits) > 8:
        m.refuse(f"the codes are {a} and {b}, which no matrix unit multiplies")
        return None
    k = lhs.codes.shape[-1]
    if a.is_integer and k * _largest(lhs, sources.nodes) * _largest(rhs, sources.nodes) > S32.max:
        m.refuse(f"sums over K = {k} may not fit 32 bits")
        return None
    exact = F64 if op.acc_dtype is F64 else F32
    acc_dtype = S32 if a.is_integer else exact
    value = Node(Acc(Gemm(acc_dtype, lhs.codes, rhs.codes, ()).acc_type))
    if a.is_integer:
        value = corrected(value, lhs, rhs, tuple(sources.nodes), sources)
    value = convert(value, exact)
    for side in (lhs, rhs):
        if side.scale is not None:
            value = map_("divide" if side.divided else "multiply", value, convert(side.scale, exact))
    old = Node(Acc(op.acc_type))
    stores = substitute(op.stores, {old: convert(value, op.acc_dtype)})
    return make_gemm(acc_dtype, lhs.codes, rhs.codes, stores, sources.nodes)


def _largest(operand: QuantizedOperand, src: Sequence[Node]) -> int:
    """The largest magnitude that a code less its zero point can have."""
    low, high = int(operand.codes.dtype.min), int(operand.codes.dtype.max)
    if operand.zero is None:
        return max(-low, high)
    zero = scalar_value(outside(operand.zero, src))
    return high - low if zero is None else max(int(zero) - low, high - int(zero))
