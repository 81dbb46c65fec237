"""A product that several operations read: the elementwise ones become further stores of it."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet

from tilewright.ir.anchor import ANCHORS, operands_of, rebuilt, stores_of
from tilewright.ir.build import items
from tilewright.ir.expression import ELEMENTWISE, REARRANGE, Sources, views_outward
from tilewright.ir.graph import Graph, Node, Users
from tilewright.ir.ops import Call, Item, Slice
from tilewright.ir.pattern import Step, Trace, graph_pass, rewrite
from tilewright.rules.epilogue import left_to_its_readers, stays_outside
from tilewright.rules.prologue import read_side_inputs_unbroadcast

Turn = tuple[int, int]


@graph_pass(stage="tails")
def store_every_elementwise_tail(graph: Graph, trace: Trace) -> Graph:
    """f(g), h(g) with g = gemm(a, b) -> gemm(a, b) {stores = f(store), h(store)[, store]}; any result of a gemm or attention.

    Where: f keeps the result's shape; its other operands are there when the gemm's turn comes (fewer products before them on
    the longest path, or as many and an earlier place), so that no cycle can arise, whatever else is folded; and f's result must
    be written anyway: a product or an opaque call reads it, or it leaves the graph. What only a norm or the like reads is left
    to that reader. The gemm's own result is still stored if anything else reads it. Work never grows: every store was a tensor
    written before, and reading the product again is saved. Side inputs are then read as stored, as in the prologue. Exact: yes.
    """
    users, nodes = graph.users(), graph.nodes()
    turn: dict[Node, Turn] = {}
    for at, node in enumerate(nodes):
        before = max((turn[s] for s in node.src), default=(0, -1))
        turn[node] = (before[0] + 1, at) if isinstance(node.op, ANCHORS) else before
    place = {n: i for i, n in enumerate(nodes)}
    replacement: dict[Node, Node] = {}
    for node in nodes:
        if isinstance(node.op, ANCHORS):
            replacement.update(_tails(node, users, turn, place, trace))
    if not replacement:
        return graph
    return rewrite(graph.replace(replacement), [read_side_inputs_unbroadcast], trace)


def _tails(anchor: Node, users: Users, turn: Mapping[Node, Turn], place: Mapping[Node, int], trace: Trace) -> dict[Node, Node]:
    """The anchor's results and the nodes that become stores, each with what replaces it."""
    results = [r for r in items(anchor) if r in place]
    sources = Sources(anchor.src)
    stores = stores_of(anchor)
    own = {r: stores[r.op.index if isinstance(r.op, Item) else 0] for r in results}
    expression = _closure(anchor, own, users, turn, place, sources)
    wanted = {*own, *_wanted(expression, users, place)}
    # What leaves the anchor must be stored. Where one reader alone waits for such a value, the reader is stored in its place if
    # it may be; then another value can be the only one that leaves, so this goes on until none moves any more.
    while True:
        live_out = {n: [r for r in users[n] if r is None or r not in wanted] for n in expression if n in wanted}
        live_out = {n: outside for n, outside in live_out.items() if outside}
        further = next(
            (r for n, (r, *more) in live_out.items() if not more and _follows(n, r, live_out, wanted, expression, users)), None
        )
        if further is None:
            break
        if further not in expression:
            expression[further] = Node(further.op, *(expression[s] if s in wanted else sources.param(s) for s in further.src))
        wanted.add(further)
    if all(n in own for n in live_out):
        return {}
    roots = [views_outward(expression[n]) for n in live_out]
    one = rebuilt(anchor, operands_of(anchor), roots, sources.nodes)
    made = dict(zip(live_out, items(one), strict=True))
    trace.steps.extend(Step("store_every_elementwise_tail", "tails", n, made[n]) for n in live_out if n not in own)
    return made


def _closure(
    anchor: Node,
    own: Mapping[Node, Node],
    users: Users,
    turn: Mapping[Node, Turn],
    place: Mapping[Node, int],
    sources: Sources,
) -> dict[Node, Node]:
    """Everything elementwise that can be computed from one of the anchor's stores when its turn comes, as expressions."""
    expression = dict(own)
    result_of = {r: r for r in own}
    waiting = [(place[r], r) for n in own for r in users[n] if r is not None]
    heapq.heapify(waiting)
    seen: set[Node] = set()
    while waiting:
        _, n = heapq.heappop(waiting)
        if n in seen:
            continue
        seen.add(n)
        inner = [s for s in n.src if s in expression]
        absorbable = all(_absorbable(n, s) for s in inner)
        late = any(s not in expression and turn[s] >= turn[anchor] for s in n.src)
        if late or not absorbable or len({result_of[s] for s in inner}) != 1:
            continue
        expression[n] = Node(n.op, *(expression[s] if s in expression else sources.param(s) for s in n.src))
        result_of[n] = result_of[inner[0]]
        for r in users[n]:
            if r is not None:
                heapq.heappush(waiting, (place[r], r))
    return expression


def _wanted(expression: Mapping[Node, Node], users: Users, place: Mapping[Node, int]) -> set[Node]:
    """The nodes that must be stored whoever computes them, and all that these are computed from."""
    wanted: set[Node] = set()
    for n in sorted(expression, key=place.__getitem__, reverse=True):
        inside = any(r in wanted for r in users[n])
        if inside or (isinstance(n.op, ELEMENTWISE) and _written_anyway(n, users)):
            wanted.add(n)
    return wanted


def _follows(
    node: Node,
    reader: Node | None,
    live_out: Collection[Node],
    wanted: AbstractSet[Node],
    expression: Mapping[Node, Node],
    users: Users,
) -> bool:
    """Tell whether the single reader of what would be stored moves into the store, as a rule of the epilogue would have it.

    If nothing else leaves the anchor, that reader may wait for whatever it likes: it is all that waits for the anchor.
    """
    if reader is None or left_to_its_readers(reader, users):
        return False
    if reader in expression:
        return all(s in wanted for s in reader.src if s in expression)
    return len(live_out) == 1 and _absorbable(reader, node)


def _absorbable(reader: Node, node: Node) -> bool:
    if isinstance(reader.op, ELEMENTWISE):
        return stays_outside(reader, node) is None
    return isinstance(reader.op, REARRANGE)


def _written_anyway(node: Node, users: Users) -> bool:
    """Tell whether what stands alone reads a value, or a view of it, or it leaves the graph."""
    pending: list[Node] = [node]
    while pending:
        for r in users[pending.pop()]:
            if r is None or isinstance(r.op, (*ANCHORS, Call)):
                return True
            if isinstance(r.op, (*REARRANGE, Slice)):
                pending.append(r)
    return False
