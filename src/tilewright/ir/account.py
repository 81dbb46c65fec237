"""An account of what rules did to a graph, by the nodes that it has now: what a trace says once its intermediate graphs are
gone, so that it can be kept with a compiled program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tilewright.ir.anchor import ANCHORS
from tilewright.ir.graph import Graph, Node, Op
from tilewright.ir.ops import maker_of
from tilewright.ir.pattern import Trace
from tilewright.ir.shown import op_name


@dataclass(frozen=True)
class Account:
    """An account of rules: what they did, and what they left.

    Attributes:
        left: of a node, the sentences of rules that recognised it and left it.
        rules: of a gemm or an attention, the rules that made it what it is, in the order in which they fired.
    """

    left: Mapping[Node, Sequence[str]] = field(default_factory=dict[Node, "Sequence[str]"])
    rules: Mapping[Node, Sequence[str]] = field(default_factory=dict[Node, "Sequence[str]"])


def account_of(trace: Trace, graph: Graph) -> Account:
    """The account of the graph that a trace led to."""
    by_node: dict[Node, dict[str, None]] = {}
    by_origin: dict[tuple[str, str], dict[str, None]] = {}
    for miss in trace.near_misses:
        sentence = f"{miss.rule.replace('_', ' ')}: {miss.why}"
        by_node.setdefault(miss.node, {})[sentence] = None
        # A later stage may have rebuilt the node: what the source called it, and its operation, still name it.
        if miss.where != miss.node.op.name:
            by_origin.setdefault((miss.where, op_name(miss.node)), {})[sentence] = None
    made: dict[Op, dict[str, tuple[int, Op | None]]] = {}
    for i, step in enumerate(trace.steps):
        after = maker_of(step.after)
        if isinstance(after.op, ANCHORS):
            made.setdefault(after.op, {}).setdefault(step.rule, (i, _continued(step.before, after)))
    left: dict[Node, Sequence[str]] = {}
    rules: dict[Node, Sequence[str]] = {}
    for node in graph.nodes():
        said = by_node.get(node) or by_origin.get((graph.origin(node), op_name(node)), {})
        if said:
            left[node] = tuple(said)
        if isinstance(node.op, ANCHORS):
            rules[node] = _fired(node.op, made)
    return Account(left, rules)


def _fired(op: Op, made: Mapping[Op, Mapping[str, tuple[int, Op | None]]]) -> tuple[str, ...]:
    """The rules that led to an anchor's operation.

    A node is rebuilt without a rule when what it reads changes, so it is followed by its operation: of products with equal
    operations the first one's history is told.
    """
    fired: dict[int, str] = {}
    pending: list[Op] = [op]
    seen: set[Op] = set(pending)
    while pending:
        for rule, (i, before) in made.get(pending.pop(), {}).items():
            fired[i] = rule.replace("_", " ")
            if before is not None and before not in seen:
                pending.append(before)
                seen.add(before)
    runs = groupby(fired[i] for i in sorted(fired))
    return tuple(f"{rule}{f' x{n}' if (n := len(list(group))) > 1 else ''}" for rule, group in runs)


def _continued(before: Node, after: Node) -> Op | None:
    """The anchor that lives on in what a rule made: the one rewritten, or the one whose sources come first in the new one."""
    if isinstance(before.op, ANCHORS):
        return before.op
    found = (n for n in map(maker_of, before.src) if isinstance(n.op, ANCHORS) and after.src[: len(n.src)] == n.src)
    return next((n.op for n in found), None)
