"""Operations between ranks: fewer bytes travel, and the product before or behind one carries it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir.anchor import ANCHORS, operands_of, rebuilt, stores_of
from tilewright.ir.build import items
from tilewright.ir.expression import ELEMENTWISE, Sources, linear_in_acc
from tilewright.ir.factor import Factor
from tilewright.ir.graph import Graph, Node, Users, label_of, substitute, toposort
from tilewright.ir.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Call,
    Collective,
    Convert,
    Dequantize,
    Gemm,
    Input,
    LayerNorm,
    Own,
    Param,
    Reduce,
    ReduceScatter,
    Write,
)
from tilewright.ir.pattern import Match, Pat, Step, Trace, graph_pass, rule
from tilewright.ir.types import Shape, TensorType

STAY = (*ANCHORS, Call, Write, Collective)  # operations that a gather is not moved past


@rule(Pat(Own, (Pat((AllReduce, AllGather), name="whole"),)), stage="canonical")
def take_the_own_part_before_it_travels(m: Match) -> Node | None:
    """own(all_reduce(x)) -> reduce_scatter(x); own(all_gather(x)) -> x, along one axis; along two -> all_to_all(x)

    Where: over the same mesh axes; nothing else reads the whole, unless nothing travels any more. Exact: yes, a reduction gives
    every rank the same bits. Shardy's partitioner leaves such pairs.
    """
    own, whole = m.node.op, m["whole"]
    assert isinstance(own, Own)
    op, (x,) = whole.op, whole.src
    assert isinstance(op, (AllReduce, AllGather))
    if op.over != own.over:
        return None
    if isinstance(op, AllGather) and op.axis == own.axis:
        return x
    if len(m.users[whole]) != 1:
        m.refuse(f"others read all of what {op.name} gives")
        return None
    if isinstance(op, AllReduce):
        return Node(ReduceScatter(own.over, own.sizes, fn=op.fn, axis=own.axis), x)
    return Node(AllToAll(own.over, own.sizes, split=own.axis, join=op.axis), x)


@rule(Pat(AllGather, (Pat(Own, name="own"),)), stage="canonical")
def gather_nothing_that_all_hold(m: Match) -> Node | None:
    """all_gather(own(x)) -> x

    Where: over the same mesh axes, along the same axis. Exact: yes.
    """
    gather, own = m.node.op, m["own"].op
    assert isinstance(gather, AllGather) and isinstance(own, Own)
    return m["own"].src[0] if (gather.over, gather.axis) == (own.over, own.axis) else None


@rule(Pat((AllGather, AllReduce, AllToAll, Own, ReduceScatter)), stage="canonical")
def exchange_nothing_with_no_one(m: Match) -> Node | None:
    """all_reduce(x) -> x; the other operations between ranks alike

    Where: over mesh axes of one rank, as of `dp=1,tp=4`. Exact: yes.
    """
    op = m.node.op
    assert isinstance(op, Collective)
    return m.node.src[0] if op.ranks == 1 else None


@rule(Pat(Gemm), stage="carry")
def read_operand_through_all_gather(m: Match) -> Node | None:
    """gemm(all_gather(x), b) -> gemm(x, b) {lhs = all_gather(param0)}; either operand, and scales that a store reads

    Where: nothing else reads what is gathered. Exact: yes. Views, casts and scales of what is gathered stand in the operand
    already, so that codes travel.
    """
    node = m.node
    operands, stores = operands_of(node), stores_of(node)
    for leaf in toposort((*operands, *stores)):
        source = node.src[leaf.op.index] if isinstance(leaf.op, Param) else leaf
        if not isinstance(leaf.op, Param) or not isinstance(source.op, AllGather):
            continue
        if len(m.users[source]) != 1:
            m.refuse(f"{len(m.users[source])} operations read what is gathered")
            continue
        sources = Sources(node.src)
        inner = {leaf: Node(source.op, sources.add(source.src[0]))}
        return rebuilt(node, substitute(operands, inner), substitute(stores, inner), sources.nodes)
    return None


@rule(Pat((AllReduce, ReduceScatter)), stage="carry")
def store_through_reduction(m: Match) -> Node | None:
    """all_reduce(gemm(a, b)) -> gemm(a, b) {store = all_reduce(store)}; reduce_scatter alike

    Where: a sum; nothing else reads the gemm, and it has one store, in which only linear operations follow acc. Exact: yes.
    What follows the reduction then folds as it does without one.
    """
    op, (gemm,) = m.node.op, m.node.src
    assert isinstance(op, (AllReduce, ReduceScatter))
    if not isinstance(gemm.op, Gemm):
        m.refuse(f"what it reduces is no product's, but {gemm.op.name}")
        return None
    if op.fn != "add":
        m.refuse(f"{op.fn} of products is no linear function of their sums")
    elif len(m.users[gemm]) != 1:
        m.refuse(f"{len(m.users[gemm])} operations read the gemm")
    elif not linear_in_acc(stores_of(gemm)[0]):
        m.refuse("its store adds to the sums of each rank, or is no linear function of them")
    else:
        (store,) = stores_of(gemm)
        return rebuilt(gemm, operands_of(gemm), [Node(op, store)], gemm.src)
    return None


@graph_pass(stage="rows")
def store_what_follows_a_reduction_by_rows(graph: Graph, trace: Trace) -> Graph:
    """norm(g), quantize(norm(g)) with g = gemm {store = … all_reduce(…)} -> gemm {stores = norm(store), quantize(norm(store))}

    Where: a norm or a reduction of each row follows, with what is elementwise around it; what else they read is constant or
    computed before the gemm. g itself is stored where others read it. Exact: yes. The kernel that adds up what ranks have then
    does all of it.
    """
    order, users, made = graph.nodes(), graph.users(), dict[Node, Node]()
    place = {n: i for i, n in enumerate(order)}
    for gemm in (n for n in order if isinstance(n.op, Gemm) and len(n.op.stores) == 1):
        (store,) = stores_of(gemm)
        if not any(isinstance(n.op, (AllReduce, ReduceScatter)) for n in toposort((store,))):
            continue
        sources, inside = Sources(gemm.src), {gemm: store}
        for n in order[place[gemm] :]:
            free = all(s in inside or s.constant or place[s] < place[gemm] for s in n.src)
            if n not in inside and free and any(s in inside for s in n.src) and _by_row(n, gemm.shape):
                inside[n] = Node(n.op, *(inside[s] if s in inside else sources.param(s) for s in n.src))
        if not any(isinstance(n.op, (LayerNorm, Reduce)) for n in inside):
            continue
        read = [n for n in inside if any(r is None or r not in inside for r in users[n])]
        one = rebuilt(gemm, operands_of(gemm), [inside[n] for n in read], sources.nodes)
        made |= dict(zip(read, items(one), strict=True))
        trace.steps.extend(Step("store_what_follows_a_reduction_by_rows", "rows", n, made[n]) for n in read if n is not gemm)
    return graph.replace(made) if made else graph


def _by_row(n: Node, shape: Shape) -> bool:
    """Tell whether an operation gives rows of such a shape, or a number for each, of its row and of what all rows read."""
    last, rows = len(shape) - 1, shape[:-1]
    if not isinstance(n.op, (LayerNorm, Reduce, *ELEMENTWISE)) or n.shape not in (shape, (*rows, 1)):
        return False
    if any(s.shape[:-1] not in (rows, (1,) * last, ()) for s in n.src):
        return False
    if isinstance(n.op, LayerNorm):
        return n.op.axis == last
    return not isinstance(n.op, Reduce) or (n.op.axes == (last,) and n.op.keepdims)


def varying(graph: Graph) -> dict[Node, frozenset[str]]:
    """The mesh axes along which ranks may hold different values of each node of a local program."""
    found: dict[Node, frozenset[str]] = {}
    lies = dict(zip(graph.inputs, graph.placements, strict=False))
    for node in graph.nodes():
        names = frozenset[str]().union(*(found[s] for s in node.src))
        if isinstance(node.op, Input):
            names = frozenset(lies[node].names)
        elif isinstance(node.op, (AllGather, AllReduce)):
            names -= {*node.op.over}
        elif isinstance(node.op, Collective):
            names |= {*node.op.over}
        for inside in (n.op for n in toposort(node.op.region_roots())):
            if isinstance(inside, Collective):
                names |= {*inside.over}  # at most
        found[node] = names
    return found


@graph_pass(stage="wire")
def narrow_before_gathering(graph: Graph, trace: Trace) -> Graph:
    """f(all_gather(x), s) -> all_gather(f(x, own(s))), for any chain f of operations by rows: casts, norms, static and dynamic
    quantisation, a residual that all hold.

    Where: f runs along the gathered axis without mixing it (`Op.factors`), s is the same on all ranks, no more bytes travel:
    what is gathered is the narrowest that all readers can be given. Exact: yes. Each rank then does its rows alone.
    """
    if not graph.local:
        return graph
    for group in dict.fromkeys((n.op.over, n.op.sizes) for n in graph.nodes() if isinstance(n.op, AllGather)):
        graph = _gathered_later(graph, *group, trace)
    return graph


def _gathered_later(graph: Graph, over: tuple[str, ...], sizes: tuple[int, ...], trace: Trace) -> Graph:
    varies, users, order = varying(graph), graph.users(), graph.nodes()
    along: dict[Node, int] = {}  # what can be had in parts, and along which axis
    ways: dict[Node, Factor] = {}
    for node in order:
        if isinstance(node.op, AllGather) and (node.op.over, node.op.sizes) == (over, sizes):
            along[node] = node.op.axis
        elif any(s in along for s in node.src):
            factor = _in_parts(node, along, varies, over, AllGather(over, sizes).ranks)
            if factor is not None and factor.result is not None:
                along[node], ways[node] = factor.result, factor
    before = [n for n in along if n not in ways]

    def leaves(n: Node) -> bool:
        return any(r is None or r not in along for r in users[n])

    for node in [n for n in reversed(order) if n in ways]:
        within = [s for s in dict.fromkeys(node.src) if s in along and not leaves(s)]
        inner = any(r in along for r in users[node] if r is not None)
        if not inner and sum(s.tensor.size_bytes for s in within) < node.tensor.size_bytes:
            del along[node], ways[node]
    ends = [n for n in along if leaves(n)]
    if not ways or sum(n.tensor.size_bytes for n in ends) > sum(n.tensor.size_bytes for n in before):
        return graph
    at: dict[Node, Node] = {}
    part: dict[Node, Node] = {}
    origins = dict(graph.origins)
    for node in order:
        if node in ways:
            src = [part[s] if s in along else at[s] for s in node.src]
            axes = ways[node].axes
            for i, (s, axis) in enumerate(zip(node.src, axes, strict=True)):
                if s not in along and axis is not None:
                    src[i] = Node(Own(over, sizes, axis=axis), src[i])
            shape = tuple(d // AllGather(over, sizes).ranks if a == along[node] else d for a, d in enumerate(node.shape))
            part[node] = Node(node.op.of_part(node, shape, [s.tensor for s in src]), *src)
        elif node in along:
            part[node] = at[node.src[0]]
        if node not in along:
            at[node] = node.with_src([at[s] for s in node.src])
        elif node in ends:
            at[node] = Node(AllGather(over, sizes, axis=along[node]), part[node])
            trace.steps.extend([Step("narrow_before_gathering", "wire", node, at[node])] if node in ways else [])
        if node in graph.origins:
            origins.setdefault(at[node] if node in at else part[node], graph.origins[node])
            if node in part:
                origins.setdefault(part[node], graph.origins[node])
    return graph.with_outputs([at[o] for o in graph.outputs], origins)


def _in_parts(
    node: Node, along: Mapping[Node, int], varies: Mapping[Node, frozenset[str]], over: Sequence[str], ranks: int
) -> Factor | None:
    """The factor along which ranks may compute parts of a result, where parts of some sources are at hand; None if there is
    none."""
    if isinstance(node.op, STAY) or not all(isinstance(t, TensorType) for t in (node.type, *(s.type for s in node.src))):
        return None
    if any(s not in along and varies[s] & {*over} for s in node.src):
        return None
    for f in node.op.factors(node):
        given = zip(node.src, f.axes, strict=True)
        if f.result is not None and all(a == along[s] for s, a in given if s in along):
            ends = [(s, a) for s, a in zip((*node.src, node), (*f.axes, f.result), strict=True) if a is not None]
            if all(s.shape[a] % ranks == 0 for s, a in ends):
                return f
    return None


@graph_pass(stage="wire")
def widen_after_gathering(graph: Graph, trace: Trace) -> Graph:
    """all_gather(f(x, s)) -> f(all_gather(x), all_gather(s)), for f a dequantisation or a cast.

    Where: fewer bytes travel so, nothing else reads f(x, s), and what f reads that has no axis along the gathered one is the
    same on all ranks. Exact: yes. Codes travel, not what they stand for.
    """
    if not graph.local:
        return graph
    while True:
        varies, users = varying(graph), graph.users()
        made = next((found for n in graph.nodes() if (found := _widened_later(n, users, varies)) is not None), None)
        if made is None:
            return graph
        trace.steps.append(Step("widen_after_gathering", "wire", *made))
        graph = graph.replace({made[0]: made[1]})


def _widened_later(node: Node, users: Users, varies: Mapping[Node, frozenset[str]]) -> tuple[Node, Node] | None:
    """A gather and what replaces it, where it gathers what a cast or dequantisation has widened."""
    op = node.op
    if not isinstance(op, AllGather) or not isinstance(node.src[0].op, (Convert, Dequantize)) or len(users[node.src[0]]) != 1:
        return None
    wide = node.src[0]
    factor = next((f for f in wide.op.factors(wide) if f.result == op.axis), None)
    if factor is None:
        return None
    pairs = list(zip(wide.src, factor.axes, strict=True))
    if any(a is None and varies[s] & {*op.over} for s, a in pairs):
        return None
    if sum(s.tensor.size_bytes for s, a in pairs if a is not None) >= wide.tensor.size_bytes:
        return None
    src = [s if a is None else Node(AllGather(op.over, op.sizes, axis=a), s) for s, a in pairs]
    return node, Node(wide.op.of_part(wide, node.shape, [s.tensor for s in src]), *src)


def sequence_parallel(graph: Graph) -> Graph:
    """The program with rows shared out where every rank had them all: all_reduce(x) -> all_gather(reduce_scatter(x)), and the
    gathers moved behind norms, residuals and quantisation (`narrow_before_gathering`).

    The graph itself where no fewer elements are computed, or more bytes would travel. Exact: yes; what stands between
    a reduction and the next product is done on a rank's rows alone. Source: Korthikanti et al. 2022, arXiv 2205.05198.
    """
    if not graph.local:
        return graph
    made: dict[Node, Node] = {}
    for node in graph.nodes():
        op, shape = node.op, node.shape if isinstance(node.type, TensorType) else ()
        if isinstance(op, AllReduce) and op.fn == "add":
            axis = next((a for a, d in enumerate(shape[:-1]) if d > 1 and d % op.ranks == 0), None)
            if axis is not None:
                scattered = Node(ReduceScatter(op.over, op.sizes, axis=axis), node.src[0])
                made[node] = Node(AllGather(op.over, op.sizes, axis=axis), scattered)
    after = narrow_before_gathering.apply(graph.replace(made), Trace())
    return after if wire_bytes(after) <= wire_bytes(graph) and _work(after) < _work(graph) else graph


def _work(graph: Graph) -> int:
    """Elements that a rank computes outside products."""
    return sum(
        n.tensor.elements for n in graph.nodes() if n.src and isinstance(n.type, TensorType) and not isinstance(n.op, STAY)
    )


def collectives(graph: Graph) -> list[tuple[Node, Node, int]]:
    """List what travels in a program for one rank: each operation between ranks, the node that is it or that carries it in an
    expression, and the bytes that each rank receives at least."""
    found: list[tuple[Node, Node, int]] = []
    for node in graph.nodes():
        inside = toposort(node.op.region_roots())
        for n in (node, *inside):
            if isinstance(n.op, Collective) and n.op.meets:
                found.append((n, node, n.op.wire_bytes(n.src[0].tensor)))
    return found


def wire_bytes(graph: Graph) -> int:
    """Bytes that each rank receives at least in one call."""
    return sum(size for _, _, size in collectives(graph))


def why_outside(graph: Graph, trace: Trace) -> dict[Node, str]:
    """Say of each operation between ranks that no product carries why none does."""
    said = {n.node: n.why for n in trace.near_misses if n.rule == "store_through_reduction"}
    users = graph.users()
    found: dict[Node, str] = {}
    for node, carrier, _ in collectives(graph):
        if node is not carrier:
            continue
        read = [r for r in users[node] if isinstance(getattr(r, "op", None), Gemm)]
        if isinstance(node.op, (AllReduce, ReduceScatter)):
            found[node] = said.get(node, "what it reduces is no product's")
        elif isinstance(node.op, AllToAll):
            found[node] = "no operand or store is read through an exchange of parts"
        elif None in users[node]:
            found[node] = "it leaves the program"
        elif read and len(users[node]) > 1:
            found[node] = f"{len(users[node])} operations read what is gathered"
        else:
            reader = next((r for r in users[node] if r is not None), None)
            found[node] = f"{'nothing' if reader is None else label_of(reader) or reader.op.name} reads it, no product"
    return found
