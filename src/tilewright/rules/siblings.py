"""Gemms that share their left operand become one gemm with a store for each."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.anchor import stores_of
from tilewright.ir.build import slice_
from tilewright.ir.expression import REARRANGE, Sources, make_gemm, outside, views_outward
from tilewright.ir.graph import Graph, Node, substitute, toposort
from tilewright.ir.join import join, manner_of
from tilewright.ir.ops import Acc, Concat, Convert, Dequantize, Gemm, Item, Param, Quantize, Slice
from tilewright.ir.pattern import Match, Pat, Step, Trace, graph_pass, rule

READ_THROUGH = (*REARRANGE, Slice, Convert, Quantize, Dequantize)


def joined(gemms: Sequence[Node]) -> Node:
    """One gemm with the columns of all, which share their left operand and accumulator type; a store for each, in order."""
    sources = Sources()
    first = gemms[0].op
    assert isinstance(first, Gemm)
    lhs = sources.rebase([first.lhs], gemms[0].src)[0]
    rights = [sources.rebase([_gemm(g).rhs], g.src)[0] for g in gemms]
    rhs = join(rights, -1)
    acc = Node(Acc(Gemm(first.acc_dtype, lhs, rhs, ()).acc_type))
    stores: list[Node] = []
    start = 0
    for g, right in zip(gemms, rights, strict=True):
        (store,) = sources.rebase(stores_of(g), g.src)
        stop = start + right.shape[-1]
        stores += substitute((store,), {Node(Acc(_gemm(g).acc_type)): slice_(acc, -1, start, stop)})
        start = stop
    return make_gemm(first.acc_dtype, lhs, rhs, stores, sources.nodes)


def _gemm(node: Node) -> Gemm:
    assert isinstance(node.op, Gemm)
    return node.op


@rule(Pat(Gemm), stage="siblings")
def pair_a_gate_with_what_it_multiplies(m: Match) -> Node | None:
    """gemm(a, b1, gemm(a, b2)) -> gemm(a, b1 | b2) {store over both halves of acc}: SwiGLU and its kind.

    Where: the inner gemm is a side input of the outer one's store and read by nothing else; both have one store, the same left
    operand, accumulator and extents, and right operands that `join_gemms_that_share_their_left_operand` would join. Exact: yes.
    """
    node, op = m.node, _gemm(m.node)
    if len(op.stores) != 1:
        return None
    left = outside(op.lhs, node.src)
    in_store = {n.op.index for n in toposort(op.stores) if isinstance(n.op, Param)}
    for i in sorted(in_store):
        gate = node.src[i]
        inner = gate.op
        if not isinstance(inner, Gemm) or len(inner.stores) != 1 or outside(inner.lhs, gate.src) is not left:
            continue
        if inner.acc_type != op.acc_type or manner_of(inner.rhs) != manner_of(op.rhs) or not _runs(_in_order([gate, node])):
            m.refuse("the gate's weight cannot stand beside its own")
        elif m.users.count(gate) != 1:
            m.refuse("the gate is read elsewhere too")
        else:
            return _paired(node, gate)
    return None


def _paired(node: Node, gate: Node) -> Node:
    order = _in_order([gate, node])
    both = joined(order)
    op = _gemm(both)
    store_of = dict(zip(order, op.stores, strict=True))
    place = Node(Param(both.src.index(gate), gate.tensor))
    (store,) = substitute((store_of[node],), {place: store_of[gate]})
    return make_gemm(op.acc_dtype, op.lhs, op.rhs, (views_outward(store),), both.src)


@graph_pass(stage="siblings")
def join_gemms_that_share_their_left_operand(graph: Graph, trace: Trace) -> Graph:
    """gemm(a, b1), gemm(a, b2), … -> gemm(a, b1 | b2 | …) with one store each: Q, K, V; gate and up.

    Where: same left operand as it is read (view, cast, scale), same accumulator, right operands read in one manner that are
    constants, or else adjacent slices of one value; and equally many gemms before each on the longest path, so that none can
    depend on another: no cycle can arise. Parts may differ in width, scale, epilogue, stored dtype and view. Exact: yes.
    Adjacent slices of one weight are the weight again.
    """
    depth: dict[Node, int] = {}
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes():
        depth[node] = max((depth[s] for s in node.src), default=0) + isinstance(node.op, Gemm)
        op = node.op
        if isinstance(op, Gemm) and len(op.stores) == 1:
            left, right = outside(op.lhs, node.src), outside(op.rhs, node.src)
            kind = (op.acc_dtype, op.rhs.shape[:-2], manner_of(op.rhs), right.constant)
            groups.setdefault((left, depth[node], *kind), []).append(node)
    replacement: dict[Node, Node] = {}
    for members in groups.values():
        for run in _runs(_in_order(members)) if len(members) > 1 else ():
            one = joined(run)
            for i, member in enumerate(run):
                replacement[member] = Node(Item(i), one)
                trace.steps.append(Step("join_gemms_that_share_their_left_operand", "siblings", member, replacement[member]))
    return graph.replace(replacement) if replacement else graph


def _runs(members: Sequence[Node]) -> list[list[Node]]:
    """Members to join: all, if their right operands are constant, else each run of adjacent slices. None of one alone."""
    rights = [outside(_gemm(g).rhs, g.src) for g in members]
    if all(r.constant for r in rights):
        return [list(members)]
    runs: list[list[int]] = []
    for i in range(len(members)):
        if runs and not _side_by_side(join([rights[j] for j in (*runs[-1], i)], -1)):
            runs[-1].append(i)
        else:
            runs.append([i])
    return [[members[i] for i in run] for run in runs if len(run) > 1]


def _side_by_side(root: Node) -> bool:
    """Tell whether an operand is several values side by side, which would have to be copied together."""
    while isinstance(root.op, READ_THROUGH):
        root = root.src[0]
    return isinstance(root.op, Concat)


def _in_order(gemms: Sequence[Node]) -> list[Node]:
    """Parts whose weights are slices of one matrix together and in its order, so that adjacent ones meet; else as they came."""
    bases: dict[Node, int] = {}
    place: dict[Node, tuple[int, tuple[int, ...]]] = {}
    for g in gemms:
        root = outside(_gemm(g).rhs, g.src)
        starts: list[int] = []
        while isinstance(root.op, READ_THROUGH):
            starts.extend(root.op.start if isinstance(root.op, Slice) else ())
            root = root.src[0]
        place[g] = (bases.setdefault(root, len(bases)), tuple(starts))
    return sorted(gemms, key=place.__getitem__)
