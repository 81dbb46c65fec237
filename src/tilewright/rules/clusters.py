"""What blocks of a cluster do together that hold whole rows of a product: only for targets that have clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.hardware.clusters import row_tiles
from tilewright.ir.expression import ELEMENTWISE
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Gemm, LayerNorm, Reduce, Softmax
from tilewright.ir.pattern import NearMiss, Trace, graph_pass
from tilewright.rules._row_tail import RowTail

RULE = "store_a_norm_of_rows"
FEWEST_ROWS = 2048  # of fewer, a pass over memory takes as long as a launch


@graph_pass(stage="clusters")
def store_a_norm_of_rows(graph: Graph, trace: Trace) -> Graph:
    """norm(g), quantize(norm(g)) with g = gemm(a, b) -> gemm(a, b) {stores = norm(store), quantize(norm(store))[, store]}

    Where: a norm of the last axis follows a gemm of operands of 8 or 16 bits, with what is elementwise before and behind it;
    what else they read is constant or computed before the gemm; a row is as long as blocks of a cluster have columns, and there
    are enough rows. g itself is stored where others read it. Stays: a norm beside another one; one whose result a further step
    reads by rows or by elements, as where codes have a scale for each row: it would read from memory what the norm's step has
    in registers. Exact: yes. Work never grows: what is stored was written before, and g is not read again.
    """
    made: dict[Node, Node] = {}
    for gemm in (n for n in graph.nodes() if isinstance(n.op, Gemm) and len(n.op.stores) == 1):
        if not _fits(gemm):
            continue
        tail = RowTail.of(gemm, graph)
        norms = [n for n in tail.inside if isinstance(n.op, LayerNorm)]
        if not norms:
            continue
        tail = tail.only(_around(norms[0], tail))
        why = _why_not(norms, tail)
        if why is None:
            made |= tail.stored(RULE, "clusters", trace)
        else:
            trace.near_misses.append(NearMiss(RULE, norms[0], why, graph.origin(norms[0])))
    return graph.replace(made) if made else graph


def _fits(gemm: Node) -> bool:
    """Tell whether blocks of a cluster can have rows of a gemm, of operands that they can multiply."""
    op = gemm.op
    assert isinstance(op, Gemm)
    columns = gemm.shape[-1] if gemm.shape else 0
    if columns != op.acc_type.shape[-1] or not row_tiles(columns) or math.prod(gemm.shape[:-1]) < FEWEST_ROWS:
        return False
    return all(operand.dtype.bits in (8, 16) for operand in (op.lhs, op.rhs))


def _around(norm: Node, tail: RowTail) -> list[Node]:
    """The gemm, the norm, what lies between, and what is computed of the norm by elements."""
    before, after = {norm}, {norm}
    for n in reversed([*tail.inside]):
        if n in before:
            before.update(s for s in n.src if s in tail.inside)
    for n in tail.inside:
        if isinstance(n.op, ELEMENTWISE) and any(s in after for s in n.src):
            after.add(n)
    return [n for n in tail.inside if n in before or n in after]


def _why_not(norms: Sequence[Node], tail: RowTail) -> str | None:
    """A sentence why a norm is not stored; None if it is."""
    if len(norms) > 1:
        return f"{len(norms)} norms follow one product"
    if any(isinstance(n.op, Reduce) for n in tail.inside):
        return "what it normalises is reduced before"
    behind = [r for n in tail.read() if n is not tail.gemm for r in tail.users[n] if r is not None and r not in tail.inside]
    further = next((r for r in behind if isinstance(r.op, (LayerNorm, Reduce, Softmax, *ELEMENTWISE))), None)
    return None if further is None else f"{further.op.name} reads it in a step of its own"
