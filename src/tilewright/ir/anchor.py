"""Operands and stores of gemm and attention, into which other operations can be folded.

A rule that folds asks these functions and does not care which of the two it has before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.expression import Sources, make_gemm
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Attention, Gemm, Param

ANCHORS = (Gemm, Attention)


def acc_of(node: Node) -> Node:
    """The accumulator leaf of an anchor's stores."""
    op = node.op
    if isinstance(op, Gemm):
        return Node(Acc(op.acc_type))
    assert isinstance(op, Attention)
    return Node(Acc(op.result_type([s.tensor for s in node.src])))


def stores_of(node: Node) -> tuple[Node, ...]:
    """An anchor's stores as nodes."""
    op = node.op
    assert isinstance(op, ANCHORS)
    return op.stores or (acc_of(node),)


def operands_of(node: Node) -> tuple[Node, ...]:
    """An anchor's operands as expressions over its sources: lhs and rhs, or q, k, v and maybe a mask."""
    op = node.op
    if isinstance(op, Gemm):
        return (op.lhs, op.rhs)
    assert isinstance(op, Attention)
    return op.operands or tuple(Node(Param(i, s.tensor)) for i, s in enumerate(node.src))


def rebuilt(node: Node, operands: Sequence[Node], stores: Sequence[Node], src: Sequence[Node]) -> Node:
    """The anchor with other operands and stores, all over the sources `src`; unused sources are dropped.

    Raises:
        TypeMismatchError: the expressions do not fit together.
    """
    op = node.op
    if isinstance(op, Gemm):
        lhs, rhs = operands
        return make_gemm(op.acc_dtype, lhs, rhs, stores, src)
    assert isinstance(op, Attention)
    inner = [r for r in (op.scores, op.weights) if r is not None]
    used = Sources()
    roots = used.rebase([*operands, *inner, *stores], src)
    count = len(operands)
    scores = roots[count] if op.scores is not None else None
    weights = roots[count + len(inner) - 1] if op.weights is not None else None
    made = replace(op, operands=tuple(roots[:count]), scores=scores, weights=weights, stores=tuple(roots[count + len(inner) :]))
    return Node(made, *used.nodes)
