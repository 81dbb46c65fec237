"""Gemms that share their left operand become one gemm with a store for each."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.build import slice_
from tilewright.ir.carrier import stores_of
from tilewright.ir.expression import REARRANGE, Sources, make_gemm
from tilewright.ir.graph import Graph, Node, substitute, toposort
from tilewright.ir.join import join, manner_of
from tilewright.ir.ops import Acc, Convert, Dequantize, Gemm, Item, Param, Quantize, Slice
from tilewright.ir.pattern import Match, Pat, Step, Trace, graph_pass, rule


def outside(root: Node, src: Sequence[Node]) -> Node:
    """An operand's expression as a node of the graph."""
    return substitute((root,), {n: src[n.op.index] for n in toposort((root,)) if isinstance(n.op, Param)})[0]


def _joinable(node: Node) -> bool:
    """A product with one constant matrix on the right: its weight can be packed beside another's."""
    op = node.op
    return isinstance(op, Gemm) and len(op.stores) == 1 and len(op.rhs.shape) == 2 and outside(op.rhs, node.src).constant


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

    Where: the inner gemm is a side input of the outer one's store, has the same left operand and accumulator, is read by
    nothing else, and both weights are constant. Exact: yes.
    """
    node, op = m.node, _gemm(m.node)
    if not _joinable(node):
        return None
    left = outside(op.lhs, node.src)
    in_store = {n.op.index for n in toposort(op.stores) if isinstance(n.op, Param)}
    for i, source in enumerate(node.src):
        if i not in in_store or not _joinable(source):
            continue
        inner = _gemm(source)
        if inner.acc_dtype is not op.acc_dtype or outside(inner.lhs, source.src) is not left:
            continue
        if inner.rhs.dtype is not op.rhs.dtype or len(m.users[source]) != 1:
            m.refuse("the gate is read elsewhere too")
            continue
        return _paired(node, source, i)
    return None


def _paired(node: Node, gate: Node, index: int) -> Node:
    both = joined([gate, node])
    op = _gemm(both)
    gate_store, own_store = op.stores
    place = next((n for n in toposort((own_store,)) if isinstance(n.op, Param) and both.src[n.op.index] is gate), None)
    assert place is not None, index
    (store,) = substitute((own_store,), {place: gate_store})
    return make_gemm(op.acc_dtype, op.lhs, op.rhs, (store,), both.src)


@graph_pass(stage="siblings")
def join_gemms_that_share_their_left_operand(graph: Graph, trace: Trace) -> Graph:
    """gemm(a, b1), gemm(a, b2), … -> gemm(a, b1 | b2 | …) with one store each: Q, K, V; gate and up.

    Where: same left operand as it is read (view, cast, scale), same accumulator and right operand type, constant right
    operands, and equally many gemms before each on the longest path, so that none can depend on another: no cycle can arise.
    Parts may differ in width, scale, dtype, epilogue and view. Exact: yes. Adjacent slices of one weight are the weight again.
    """
    depth: dict[Node, int] = {}
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes():
        depth[node] = max((depth[s] for s in node.src), default=0) + isinstance(node.op, Gemm)
        if _joinable(node):
            op = _gemm(node)
            left = outside(op.lhs, node.src)
            groups.setdefault((left, op.acc_dtype, manner_of(op.rhs), depth[node]), []).append(node)
    replacement: dict[Node, Node] = {}
    for members in groups.values():
        if len(members) < 2:
            continue
        ordered = _in_order(members)
        one = joined(ordered)
        for i, member in enumerate(ordered):
            replacement[member] = Node(Item(i), one)
            trace.steps.append(Step("join_gemms_that_share_their_left_operand", "siblings", member, replacement[member]))
    return graph.replace(replacement) if replacement else graph


def _in_order(gemms: Sequence[Node]) -> list[Node]:
    """Parts whose weights are slices of one matrix together and in its order, so that adjacent ones meet; else as they came."""
    bases: dict[Node, int] = {}
    place: dict[Node, tuple[int, tuple[int, ...]]] = {}
    for g in gemms:
        root = outside(_gemm(g).rhs, g.src)
        starts: list[int] = []
        while isinstance(root.op, (*REARRANGE, Slice, Convert, Quantize, Dequantize)):
            starts.extend(root.op.start if isinstance(root.op, Slice) else ())
            root = root.src[0]
        place[g] = (bases.setdefault(root, len(bases)), tuple(starts))
    return sorted(gemms, key=place.__getitem__)
