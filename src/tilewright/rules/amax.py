"""The largest magnitude of a result, that delayed scaling wants beside it, is found where the result is stored."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from tilewright.dtype import F32
from tilewright.ir.anchor import operands_of, rebuilt, stores_of
from tilewright.ir.build import convert, items, map_
from tilewright.ir.expression import ELEMENTWISE, REARRANGE, Sources, views_outward
from tilewright.ir.graph import Graph, Node, Users
from tilewright.ir.ops import Convert, Gemm, Input, Item, Map, Quantize, Reduce
from tilewright.ir.pattern import Step, Trace, graph_pass

RULE = "find_the_largest_in_the_store"


@graph_pass(stage="computed")
def find_the_largest_in_the_store(graph: Graph, trace: Trace) -> Graph:
    """reduce[maximum](abs(f(g))) with g = gemm(a, b) -> gemm(a, b) {stores = …, reduce[maximum](abs(f(store)))}.

    Where: everything is reduced to one element; f is elementwise, and reads only inputs and constants beside g; nothing else
    reads what lies between. g is no longer stored if nothing else reads it. Magnitudes are of at most 32 bits; those narrower
    than f32 are widened before and their largest is narrowed behind. relu(…) is its own magnitude. Exact: yes.
    """
    users, present = graph.users(), set(graph.nodes())
    replacement: dict[Node, Node] = {}
    for node in graph.nodes():
        if isinstance(node.op, Gemm):
            replacement.update(_with_largest(node, users, present, trace))
    return graph.replace(replacement) if replacement else graph


def _with_largest(node: Node, users: Users, present: AbstractSet[Node], trace: Trace) -> Mapping[Node, Node]:
    """The results of a gemm and reductions of them, each with what replaces it; nothing where there are no reductions."""
    sources, stores = Sources(node.src), stores_of(node)
    results = [r for r in items(node) if r in present]
    roots: dict[Node, Node] = {}
    wanted: list[Node] = []
    for result in results:
        store = stores[result.op.index if isinstance(result.op, Item) else 0]
        paths = {reader: _path(result, store, reader, users) for reader in users[result]}
        for path in filter(None, paths.values()):
            roots[path[-1]] = _reduced(result, store, path, sources)
        if not all(paths.values()):
            wanted.append(result)
    if not roots:
        return {}
    own = {r: stores[r.op.index if isinstance(r.op, Item) else 0] for r in wanted}
    one = rebuilt(node, operands_of(node), [*own.values(), *roots.values()], sources.nodes)
    made = dict(zip((*own, *roots), items(one), strict=True))
    for n in roots:
        trace.steps.append(Step(RULE, "computed", n, made[n]))
    found = {n: made[n] if n in own else convert(made[n], n.dtype) for n in made}
    wide = ((n, r) for n in roots for r in users[n] if r is not None and isinstance(r.op, Convert) and r.dtype is F32)
    return found | {r: made[n] for n, r in wide}


def _path(result: Node, store: Node, reader: Node | None, users: Users) -> list[Node]:
    """The nodes from the reader of a result to the reduction of its magnitudes; empty where it does not lead there."""
    path: list[Node] = []
    before = result
    while isinstance(store.op, REARRANGE):
        store = store.src[0]
    sizes = _gives_sizes(store)
    while reader is not None:
        path.append(reader)
        if isinstance(reader.op, Reduce):
            whole = reader.op.fn == "maximum" and len(reader.op.axes) == len(before.shape) and not reader.op.keepdims
            return path if whole and sizes else []
        elementwise = (
            isinstance(reader.op, ELEMENTWISE) and not isinstance(reader.op, Quantize) and reader.shape == before.shape
        )
        if not (elementwise or isinstance(reader.op, REARRANGE)) or len(users[reader]) != 1:
            return []
        if not all(s is before or s.constant or isinstance(s.op, Input) for s in reader.src):
            return []
        if elementwise:
            sizes = _gives_sizes(reader)
        before, (reader,) = reader, users[reader]
    return []


def _gives_sizes(n: Node) -> bool:
    """Tell whether numbers are their own magnitudes: abs or relu of floats."""
    return isinstance(n.op, Map) and n.op.fn in ("abs", "relu") and n.dtype.is_float and n.dtype.bits <= F32.bits


def _reduced(result: Node, store: Node, path: list[Node], sources: Sources) -> Node:
    """The store that such a path becomes."""
    before, value = result, store
    for n in path[:-1]:
        value = Node(n.op, *(value if s is before else sources.param(s) for s in n.src))
        before = n
    value = views_outward(value)
    while isinstance(value.op, REARRANGE):  # the largest is that wherever it stands
        value = value.src[0]
    if isinstance(value.op, Map) and value.op.fn == "relu":  # of no number below zero; kernels compare magnitudes by their bits
        value = map_("abs", value)
    return Node(Reduce("maximum", tuple(range(len(value.shape)))), convert(value, F32))
