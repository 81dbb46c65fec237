"""Facts of an attention that every generator of kernels needs: its extents, what hides scores, where mask and results lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.dtype import DType
from tilewright.ir.anchor import operands_of, stores_of
from tilewright.ir.build import broadcast
from tilewright.ir.graph import Node
from tilewright.ir.ops.attention import Causal, causal_shift
from tilewright.lowering.access import Access, of_operand, of_store
from tilewright.schedule.candidate import Unsupported
from tilewright.schedule.problem import AttentionProblem


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """An attention of queries [B, Hq, S, D], keys [B, Hk, T, D] and values [B, Hk, T, Dv], as a generator reads it.

    Attributes:
        batch, heads, shared: B, Hq, and queries' heads a key's head serves.
        queries, keys, depth, width: S, T, D, Dv.
        causal, zero_masked_rows, equal_masked_rows, hidden: see `Attention`.
        mask: over rows of queries by keys, pred or float.
        result: type of the attention's own result, before its stores.
        stores: the results.
    """

    batch: int
    heads: int
    shared: int
    queries: int
    keys: int
    depth: int
    width: int
    causal: Causal
    zero_masked_rows: bool
    equal_masked_rows: bool
    hidden: float
    mask: Access | None
    result: DType
    stores: tuple[Access, ...]

    @property
    def shift(self) -> int:
        """The last key that a head's first query sees, where causality hides the others."""
        return causal_shift(self.causal, self.queries, self.keys)


def facts_of(problem: AttentionProblem, check: Callable[[Sequence[Node]], None]) -> AttentionFacts:
    """The facts of an attention.

    Args:
        problem: what is asked.
        check: the generator's own; it raises `Unsupported` for an expression that the generator does not print, and is given
            all but keys and values.

    Raises:
        Unsupported: an extent is zero, an operand has 64 bits, or what `check` and `lowering.access` raise.
    """
    op, node = problem.op, problem.node
    q, k, v, *mask = operands_of(node)
    batch, heads, queries, depth = q.shape
    key_heads, keys, width = k.shape[1], k.shape[2], v.shape[3]
    if not batch * heads * queries * depth * keys * width:
        raise Unsupported("an extent is zero")
    for t in (q, k, v, *mask):
        if t.dtype.bits > 32:
            raise Unsupported(f"generated attention computes in f32, not {t.dtype}")
    inner = [r for r in (op.scores, op.weights) if r is not None]
    check((q, *mask, *inner, *stores_of(node)))
    return AttentionFacts(
        batch=batch,
        heads=heads,
        shared=heads // key_heads,
        queries=queries,
        keys=keys,
        depth=depth,
        width=width,
        causal=op.causal,
        zero_masked_rows=op.zero_masked_rows,
        equal_masked_rows=op.equal_masked_rows,
        hidden=op.hidden,
        mask=of_operand(broadcast(mask[0], (batch, heads, queries, keys)), columns_last=True) if mask else None,
        result=problem.acc.dtype,
        stores=tuple(of_store(root) for root in stores_of(node)),
    )
