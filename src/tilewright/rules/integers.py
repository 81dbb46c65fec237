"""Products of small integers that a program widens and shifts are taken on the integers as they are stored."""

from __future__ import annotations

from tilewright.dtype import S32, DType
from tilewright.ir.build import map_
from tilewright.ir.constant import constant_value, scalar_value
from tilewright.ir.expression import Sources, make_gemm, outside, with_views
from tilewright.ir.graph import Node, substitute
from tilewright.ir.ops import Acc, Convert, Gemm, Map
from tilewright.ir.pattern import Match, Pat, rule
from tilewright.rules._codes import QuantizedOperand, as_operand, corrected, under_views, varies, viewed

LARGEST_ZEROS = 1 << 20  # elements of a constant zero point that are looked at


@rule(Pat(Gemm, where=lambda n: getattr(n.op, "acc_dtype", None) is S32), stage="recognise")
def multiply_shifted_integers_as_stored(m: Match) -> Node | None:
    """gemm(convert(a, s32) - za, convert(b, s32) - zb) {acc = s32}
    -> gemm(a, b) {acc = s32, store over acc - za colsum(b) - zb rowsum(a) + K za zb}

    Where: a and b are integers of at most 8 bits, each with or without a zero point, of whatever value and type, that does not
    vary along K. Exact: yes, modulo 2**32, in which the program adds up too. Zero points that are constant zero vanish; sums
    over constants are computed once. Done before a product before it can take the difference into its store.
    Source: Jacob et al. 2018, arXiv 1712.05877, eq. 7.
    """
    node, op = m.node, m.node.op
    assert isinstance(op, Gemm)
    if max(op.lhs.dtype.bits, op.rhs.dtype.bits) <= 8:
        return None
    sides = [_read(outside(x, node.src), axis) for x, axis in ((op.lhs, -1), (op.rhs, -2))]
    for side in sides:
        if isinstance(side, str):
            m.refuse(side)
            return None
    lhs, rhs = (s for s in sides if isinstance(s, QuantizedOperand))
    sources = Sources(node.src)
    a, b = as_operand(lhs.codes, sources), as_operand(rhs.codes, sources)
    acc = Node(Acc(op.acc_type))
    value = corrected(acc, lhs, rhs, (), sources)
    return make_gemm(S32, a, b, substitute(op.stores, {acc: value}), sources.nodes)


def _read(root: Node, summed_axis: int) -> QuantizedOperand | str:
    """An integer operand as codes and a zero point in nodes of the graph, or a sentence why it is none."""
    node, views = under_views(root)
    found = _shifted(node)
    if found is None:
        return f"an operand of {node.dtype} is no integer of 8 bits with or without a zero point"
    codes, zero = found
    zero = None if zero is None or _is_nought(zero) else zero
    shift = None if zero is None else viewed(zero, node, views)
    if zero is not None and shift is None:
        return "a zero point varies along an axis that a reshape splits"
    if varies(shift, summed_axis):
        return "a zero point varies along K"
    return QuantizedOperand(with_views(codes, views), None, shift)


def _is_nought(zero: Node) -> bool:
    """Tell whether a zero point is constant zero, a vector of them included, as symmetric weights have."""
    value = constant_value(zero, LARGEST_ZEROS)
    return scalar_value(zero) == 0 or (value is not None and not bool(value.any()))


def _shifted(node: Node) -> tuple[Node, Node | None] | None:
    """The codes and the zero point that make a node: it is the codes, widened, or those less the zero point, in a type in which
    the difference does not wrap, or wraps as s32 does."""
    codes = _codes(node)
    if codes is not None:
        return codes, None
    op = node.op
    if not isinstance(op, Map) or op.fn not in ("subtract", "add") or node.dtype.kind not in ("int", "uint"):
        return None
    for x, other in ((0, 1), (1, 0))[: 1 if op.fn == "subtract" else 2]:
        codes, zero = _codes(node.src[x]), node.src[other]
        if codes is None or codes is node.src[x] or codes.shape != node.shape:
            continue
        if node.dtype.bits >= 32 or (node.dtype.kind == "int" and op.fn == "subtract" and _codes(zero) not in (None, zero)):
            return codes, zero if op.fn == "subtract" else map_("negate", zero)
    return None


def _codes(node: Node) -> Node | None:
    """The narrow source that a node widens, or the node if it is narrow itself; None where it is neither."""
    if _small(node.dtype):
        return node
    if isinstance(node.op, Convert) and _small(node.src[0].dtype) and node.dtype.is_integer:
        signed = node.dtype.kind == "int" or node.dtype.bits >= 32
        return node.src[0] if signed or node.src[0].dtype.kind == "uint" else None
    return None


def _small(dtype: DType) -> bool:
    return dtype.kind in ("int", "uint") and dtype.bits <= 8
