"""Advice on causal language models: logits that a caller who generates text does not read."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tilewright.ir.anchor import operands_of
from tilewright.ir.expression import outside
from tilewright.ir.graph import Node
from tilewright.ir.ops import VIEWS, Attention, Convert, Gather, Gemm, Item, Map, Softmax
from tilewright.report.explain.advice.case import UNKNOWN, Case, Found, Saving
from tilewright.report.explain.advice.products import plain_us
from tilewright.schedule.problem import Problem

PASSED = (*VIEWS, Convert, Item, Map, Softmax)  # between a head and an output


def logits_of_all_positions(case: Case) -> Iterator[Found]:
    """Heads of causal language models that give logits for every position: products with a column for each row of an embedding,
    from which an output is made, in programs with causal attention.

    Whether the caller reads them all, the program does not say; so the advice asks.
    """
    attentions = [node for _, _, node in case.products(Attention)]
    queries = {operands_of(n)[0].shape[-2] for n in attentions if isinstance(n.op, Attention) and n.op.causal != "no"}
    tables = {n.src[0].shape[0] for n in case.program.graph.nodes() if isinstance(n.op, Gather) and _is_table(n)}
    heads = {_head(output) for output in case.program.graph.outputs}
    for i, _, node in case.products(Gemm):
        op = node.op
        assert isinstance(op, Gemm)
        if node not in heads or not outside(op.rhs, node.src).constant or op.rhs.shape[-1] not in tables:
            continue
        rows = math.prod(op.lhs.shape[:-1])
        positions = max((q for q in queries if q > 1 and rows % q == 0), default=1)
        if positions == 1:
            continue
        why = (
            f"a model that generates text is read at its last position alone, and this product gives "
            f"{op.rhs.shape[-1]:,} logits for each of {positions:,}"
        )
        change = (
            "does the caller read only the last ones? Then compute only those: `logits_to_keep=1` of transformers, or "
            "`hidden[:, -1:]` before the head. Training, scoring and speculative decoding read them all"
        )
        title = f"logits for all {positions:,} positions"
        yield Found("logits-of-all-positions", title, why, change, (i,), _saving(case, i, rows, positions))


def _is_table(node: Node) -> bool:
    """Tell whether a gather looks up rows of a constant matrix."""
    assert isinstance(node.op, Gather)
    return node.op.axis == 0 and not node.op.elementwise and node.src[0].constant and len(node.src[0].shape) == 2


def _head(output: Node) -> Node:
    """The operation that an output is made from by views, casts, functions of each element, or a softmax."""
    while isinstance(output.op, PASSED) and output.src:
        output = output.src[0]
    return output


def _saving(case: Case, i: int, rows: int, positions: int) -> Saving:
    """The saving of one position in place of all."""
    decision = case.program.steps[i].decision
    if decision is None or case.ceilings is None or not isinstance(decision.problem, Problem):
        return UNKNOWN
    n, k = decision.problem.N, decision.problem.K
    every, last = (plain_us(case, decision.problem, m, n, k) for m in (rows, rows // positions))
    if every is None or last is None or last >= every:
        return UNKNOWN
    return case.part(i, 1 - last / every, "what the cost model expects of all positions and of one")
