"""Narrow floats that a program widens before a product are multiplied as they are stored."""

from __future__ import annotations

from tilewright.dtype import F32
from tilewright.ir.expression import make_gemm
from tilewright.ir.graph import Node, substitute
from tilewright.ir.ops import VIEWS, Concat, Convert, Gemm
from tilewright.ir.pattern import Match, Pat, rule


@rule(Pat(Gemm), stage="product")
def multiply_narrow_floats_as_stored(m: Match) -> Node | None:
    """gemm(convert(a, f32), convert(b, f32)) {acc = f32} -> gemm(a, b) {acc = f32}

    Where: a and b are of one type of 16 bits, or both floats of 8. Exact: matrix units multiply those without rounding and add
    up in f32, as the product of the wider operands did.
    """
    op = m.node.op
    assert isinstance(op, Gemm)
    if op.acc_dtype is not F32:
        return None
    lhs, rhs = _as_stored(op.lhs), _as_stored(op.rhs)
    if lhs is None or rhs is None:
        return None
    a, b = lhs.dtype, rhs.dtype
    if a is not b and not a.bits == b.bits == 8:
        m.refuse(f"no matrix unit multiplies {a} by {b}")
        return None
    return make_gemm(op.acc_dtype, lhs, rhs, op.stores, m.node.src)


def _as_stored(root: Node) -> Node | None:
    """A view of widened values as that view of what was widened; None if it is anything else."""
    casts: dict[Node, Node] = {}
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node.op, (*VIEWS, Concat)):
            stack.extend(node.src)
        elif isinstance(node.op, Convert) and node.dtype is F32 and _narrow(node.src[0]):
            casts[node] = node.src[0]
        else:
            return None
    if len({n.dtype for n in casts.values()}) != 1:
        return None
    return substitute((root,), casts)[0]


def _narrow(node: Node) -> bool:
    return node.dtype.is_float and node.dtype.bits <= 16
