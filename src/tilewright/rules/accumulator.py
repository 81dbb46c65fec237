"""Accumulators: no matrix unit accumulates in fewer than 32 bits, so narrow ones are widened first."""

from __future__ import annotations

from tilewright.ir.graph import Node, substitute
from tilewright.ir.ops import Acc, Convert, Gemm
from tilewright.ir.pattern import Match, Pat, rule


@rule(Pat(Gemm), stage="accumulator")
def accumulate_narrow_integers_in_s32(m: Match) -> Node | None:
    """gemm(a, b) {acc = s8} -> gemm(a, b) {acc = s32}, every store reading convert(acc, s8, wrap).

    Where: an integer accumulator of fewer than 32 bits. Exact: addition and multiplication modulo 2**32 reduced modulo 2**8
    equal those modulo 2**8 (2**8 divides 2**32). The narrowing must wrap; a saturating narrowing is another program.
    Source: StableHLO specification, dot_general (accumulation type) and convert.
    """
    op = m.node.op
    assert isinstance(op, Gemm)
    narrow = op.acc_dtype
    wide = narrow.accumulator
    if wide is narrow or not narrow.is_integer:  # a narrow float accumulator was asked for, and rounds otherwise
        return None
    acc = op.acc_type
    widened = Node(Convert(narrow, "wrap"), Node(Acc(acc.with_dtype(wide))))
    stores = substitute(op.stores, {Node(Acc(acc)): widened})
    return Node(Gemm(wide, op.lhs, op.rhs, tuple(stores)), *m.node.src)
