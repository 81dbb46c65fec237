"""A product that several operations read: those that are elementwise become further stores of it."""

from __future__ import annotations

from tilewright.ir.carrier import CARRIERS, operands_of, rebuilt, stores_of
from tilewright.ir.expression import ELEMENTWISE, REARRANGE, Sources, views_outward
from tilewright.ir.graph import Graph, Node, Users
from tilewright.ir.ops import Item
from tilewright.ir.pattern import Step, Trace, graph_pass
from tilewright.ir.types import TupleType


@graph_pass(stage="tails")
def store_every_elementwise_tail(graph: Graph, trace: Trace) -> Graph:
    """f(g), h(g) with g = gemm(a, b) -> gemm(a, b) {stores = f(store), h(store)[, store]}; gemm or attention.

    Where: f keeps the gemm's shape and its other operands do not depend on the gemm. The gemm's own result is still stored if
    anything else reads it. Work never grows: every store was a tensor written before, and reading the product again is saved.
    Exact: yes.
    """
    replacement: dict[Node, Node] = {}
    users = graph.users()
    nodes = graph.nodes()
    for at, node in enumerate(nodes):
        if isinstance(node.op, CARRIERS) and not isinstance(node.type, TupleType) and len(users[node]) > 1:
            replacement.update(_tails(node, nodes[at + 1 :], users, trace))
    return graph.replace(replacement) if replacement else graph


def _tails(carrier: Node, after: list[Node], users: Users, trace: Trace) -> dict[Node, Node]:
    """The nodes that become stores, each with the item that replaces it."""
    sources = Sources(carrier.src)
    (own,) = stores_of(carrier)
    banned: set[Node] = set()
    while True:
        expression = _closure(carrier, own, after, banned, sources)
        # A view is no work of its own: it is folded only on the way to something that is.
        loose = {n for n in expression if isinstance(n.op, REARRANGE) and any(r not in expression for r in users[n])}
        if not loose:
            break
        banned |= loose
    if len(expression) == 1:
        return {}
    leaving = [n for n in expression if any(r is None or r not in expression for r in users[n])]
    stores = [views_outward(expression[n]) for n in leaving]
    one = rebuilt(carrier, operands_of(carrier), stores, sources.nodes)
    made = {n: Node(Item(i), one) if len(leaving) > 1 else one for i, n in enumerate(leaving)}
    trace.steps.extend(Step("store_every_elementwise_tail", "tails", n, made[n]) for n in leaving if n is not carrier)
    return made


def _closure(carrier: Node, own: Node, after: list[Node], banned: set[Node], sources: Sources) -> dict[Node, Node]:
    """Everything that can be computed from the carrier's store without waiting for anything else that depends on it."""
    dependent: set[Node] = {carrier}
    expression: dict[Node, Node] = {carrier: own}
    for n in after:
        if not any(s in dependent for s in n.src):
            continue
        dependent.add(n)
        inner = [s for s in n.src if s in expression]
        if n in banned or any(s in dependent and s not in expression for s in n.src):
            continue
        if isinstance(n.op, REARRANGE) or (isinstance(n.op, ELEMENTWISE) and all(s.shape == n.shape for s in inner)):
            expression[n] = Node(n.op, *(expression[s] if s in expression else sources.param(s) for s in n.src))
    return expression
