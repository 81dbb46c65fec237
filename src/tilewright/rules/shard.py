"""Placing a program on a mesh: from a graph over whole tensors to the program of one rank.

`propagate` finds out how values may lie, given how inputs and places do; `localise` goes through the graph once, shares out the
factors of each operation (`ir/factor.py`), and puts collective operations where values lie otherwise than they are needed. Like
quantising, it feeds the rewrite rules and is not one of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from tilewright.dtype import F16
from tilewright.errors import InputError, UnsupportedError, counted
from tilewright.ir.expression import linear_in, outside
from tilewright.ir.factor import Factor
from tilewright.ir.graph import Graph, Node, Op, substitute, toposort
from tilewright.ir.instance import dims_of
from tilewright.ir.mesh import Mesh, Placement
from tilewright.ir.ops import (
    Acc,
    AllGather,
    AllReduce,
    AllToAll,
    Attention,
    Collective,
    Convert,
    Gemm,
    Input,
    Item,
    Own,
    Param,
    Place,
    ReduceScatter,
    Reshape,
    Transpose,
    gemm,
)
from tilewright.ir.types import Shape, TensorType
from tilewright.ir.verify import verify

# By which ways to share out an operation are compared: what 4 H200s reach (bf16 products, memory, one direction of NVLink).
TFLOPS, MEMORY_GBPS, LINK_GBPS = 765.0, 4215.0, 363.0

Splits = tuple[tuple[str, ...], ...]


def localise(graph: Graph) -> Graph:
    """The program of one rank of `graph.mesh`, for a program over whole tensors.

    An input lies as the place says that alone reads it; others are whole on every rank, and so is a result that no place reads,
    unless it comes out split. Constants stay whole in the graph: a rank reads its part (`own`). State lies as what is written
    to it does; `Graph.state` of the result holds the whole tensors still.

    Raises:
        InputError: the graph has no mesh, or is local already.
        UnsupportedError: extents are open, ranks do not divide what they are to split, or a whole value is placed as partial.
    """
    if graph.mesh is None or graph.local:
        what = "is the program of one rank already" if graph.local else "has no mesh"
        raise InputError(f"the graph {what}", where=graph.name, hint="give `Graph.mesh` of a program over whole tensors")
    if dims_of(graph) is not None:
        raise UnsupportedError(
            "extents are open, and parts of them are not known", where=graph.name, hint="fix the shapes first"
        )
    verify(graph)
    graph = _plain_products(graph)
    lies = _of_inputs(graph)
    return verify(_Ranks(graph, propagate(graph, lies), lies).local())


def plan_for(graph: Graph) -> Graph:
    """A program that places nothing, with places as Megatron has them, and a note that says which.

    Over the last mesh axis the weights of products are split: by columns where the other operand is whole, by rows where its K
    is split. Over the axes before it inputs that are no weights are split along their first axis. What ranks do not divide
    stays whole. Weights are constants, and inputs that a product reads on its right, through views and casts.
    Source: Shoeybi et al. 2019, arXiv 1909.08053.
    """
    mesh = cast("Mesh", graph.mesh)
    graph = _plain_products(graph)
    *first, (name, ranks) = mesh.axes
    weights = {_weight(n.src[1]): n.src[1] for n in graph.nodes() if isinstance(n.op, Gemm)}
    made: dict[Node, Node] = {}
    for node in graph.inputs:
        splits = tuple(n for n, _ in first)
        if splits and node not in weights and node.shape[:1] and node.shape[0] % mesh.ranks_of(splits) == 0:
            made[node] = Node(Place((splits, *(((),) * (len(node.shape) - 1)))), node)
    batches = len(made)
    along: dict[Node, int] = {}  # the axis of a value that the last mesh axis splits
    columns = rows = 0
    for node in graph.nodes():
        if node not in made:
            made[node] = node.with_src([made[s] for s in node.src])
        if not isinstance(node.type, TensorType) or not all(isinstance(s.type, TensorType) for s in node.src):
            continue
        split = dict(along)
        if isinstance(node.op, Gemm) and _weight(node.src[1]) is not None:
            left, weight = node.src
            by_rows = along.get(left) == len(left.shape) - 1
            axis = len(weight.shape) - (2 if by_rows else 1)
            if weight.shape[axis] % ranks == 0 and (by_rows or left not in along):
                split[weight] = axis
                splits = tuple((name,) if a == axis else () for a in range(len(weight.shape)))
                made[node] = Node(node.op, made[left], Node(Place(splits), made[weight]))
                columns, rows = columns + (not by_rows), rows + by_rows
        for f in node.op.factors(node):
            held = [a == split.get(s) for s, a in zip(node.src, f.axes, strict=True) if s in split]
            if held and all(held) and f.result is not None and node.shape[f.result] % ranks == 0:
                along[node] = f.result
    batch = f"{counted(batches, 'input')} along the first axis over {', '.join(n for n, _ in first)}, " if first else ""
    said = f"{batch}the weights of {counted(columns, 'product')} by columns and of {rows} by rows over {name} are split"
    return replace(graph, outputs=tuple(made[o] for o in graph.outputs), notes=(*graph.notes, f"{PLANNED}: {said}"))


PLANNED = "the program places nothing"  # how the note of `plan_for` begins


def _weight(right: Node) -> Node | None:
    """The constant or input that alone makes a product's right operand; None if none does."""
    if right.constant:
        return right
    while isinstance(right.op, (Reshape, Transpose, Convert)):
        right = right.src[0]
    return right if isinstance(right.op, Input) and not right.op.mutable else None


def _of_inputs(graph: Graph) -> dict[Node, Placement]:
    """Find how the inputs lie that a caller gives."""
    readers = graph.users()
    found: dict[Node, Placement] = {}
    for node in graph.inputs:
        read = [r.op for r in readers[node] if r is not None] if node in readers else []
        if len(read) == 1 and isinstance(read[0], Place) and node not in graph.outputs:
            found[node] = read[0].placement
        elif not (isinstance(node.op, Input) and node.op.mutable):
            found[node] = Placement.whole(node.tensor.rank)
    return found


def _plain_products(graph: Graph) -> Graph:
    """The graph with products whose operands and result are computed by nodes of their own; the rules fold them again."""
    made: dict[Node, Node] = {}
    origins = dict(graph.origins)
    several: dict[Node, list[Node]] = {}
    for node in graph.nodes():
        src = [made[s] for s in node.src if s not in several]
        op = node.op
        if isinstance(op, Gemm) and not op.factors(node):
            lhs, rhs = outside(op.lhs, src), outside(op.rhs, src)
            product = gemm(lhs, rhs, acc_dtype=op.acc_dtype)
            leaves = {n: src[n.op.index] for n in toposort(op.stores) if isinstance(n.op, Param)}
            stores = substitute(op.stores, {Node(Acc(op.acc_type)): product, **leaves})
            if node in graph.origins:
                origins.setdefault(product, graph.origins[node])
            if len(stores) > 1:
                several[node] = stores
                continue
            made[node] = stores[0]
        elif isinstance(op, Item) and node.src[0] in several:
            made[node] = several[node.src[0]][op.index]
        else:
            made[node] = node.with_src([made[s] for s in node.src])
        if node in graph.origins:
            origins.setdefault(made[node], graph.origins[node])
    return graph.with_outputs([made[o] for o in graph.outputs], origins)


def propagate(graph: Graph, lies: Mapping[Node, Placement]) -> dict[Node, Splits]:
    """Find how each value may lie so that nothing moves that `lies`, or a place in the graph, says to lie in some way.

    Along each factor of an operation sources and result take over from each other what splits their axes, until none changes;
    mesh axes that two factors of one operation claim are left as they are. Source: Shardy's propagation, without priorities.
    """
    mesh = cast("Mesh", graph.mesh)
    nodes = [n for n in graph.nodes() if isinstance(n.type, TensorType)]
    found: dict[Node, list[tuple[str, ...]]] = {n: [()] * n.tensor.rank for n in (*nodes, *graph.inputs)}
    for node in nodes:
        if isinstance(node.op, Place):
            found[node] = list(node.op.splits)
    found.update({n: list(p.splits) for n, p in lies.items()})
    fixed = {*lies, *(n for n in nodes if isinstance(n.op, Place))}
    factors = [(n, n.op.factors(n)) for n in nodes if all(isinstance(s.type, TensorType) for s in n.src)]
    factors = [(n, f) for n, f in factors if f]

    def settle(node: Node, given: Sequence[Factor]) -> bool:
        ends = [[(s, a) for s, a in zip((*node.src, node), (*f.axes, f.result), strict=True) if a is not None] for f in given]
        split = [max((found[v][a] for v, a in pairs), key=len, default=()) for pairs in ends]
        claims = [{name for v, a in pairs for name in found[v][a]} for pairs in ends]
        changed = False
        for i, (names, pairs) in enumerate(zip(split, ends, strict=True)):
            others = set[str]().union(*(c for j, c in enumerate(claims) if j != i))
            if not names or others & {*names} or any(names[: len(found[v][a])] != found[v][a] for v, a in pairs):
                continue
            ranks = mesh.ranks_of(names)
            for v, a in pairs:
                elsewhere = {n for b, ns in enumerate(found[v]) for n in ns if b != a}
                if v not in fixed and found[v][a] != names and not elsewhere & {*names} and v.shape[a] % ranks == 0:
                    found[v][a] = names
                    changed = True
        return changed

    changed = True
    while changed:
        changed = False
        for node, given in (*factors, *reversed(factors)):
            changed |= settle(node, given)
    return {n: tuple(s) for n, s in found.items()}


def moves(now: Placement, to: Placement, shape: Shape, mesh: Mesh) -> list[Collective]:
    """The operations by which ranks that hold parts of a tensor of this shape come to hold others.

    Args:
        now: how the tensor lies.
        to: how it is to lie.
        shape: of the whole tensor.
        mesh: the ranks.

    Raises:
        UnsupportedError: what is no sum over ranks is to be partial.
    """
    more = [name for name in to.partial if name not in now.partial]
    if more:
        raise UnsupportedError(f"values that are no summands over {more[0]!r} are placed as partial", where=str(to))
    splits = [list(names) for names in now.splits]
    wanted = [list(names) for names in to.splits]
    sizes, found = dict(mesh.axes), list[Collective]()

    def how(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return tuple(names), tuple(sizes[n] for n in names)

    def kept(axis: int) -> int:
        """The number of mesh axes that split an axis now, and will first of all."""
        pairs = zip(splits[axis], wanted[axis], strict=False)
        return len(list(itertools.takewhile(lambda p: p[0] == p[1], pairs)))

    def own() -> None:
        for axis in range(len(splits)):
            used = {n for names in splits for n in names}
            more = list(itertools.takewhile(lambda n: n not in used, wanted[axis][kept(axis) :]))  # noqa: B023 - used at once
            if more and kept(axis) == len(splits[axis]):
                found.append(Own(*how(more), axis=axis))
                splits[axis] += more

    whole: list[str] = []
    for name in (n for n in now.partial if n not in to.partial):
        axis = next((a for a, names in enumerate(wanted) if names[: len(splits[a]) + 1] == [*splits[a], name]), None)
        if axis is None:
            whole.append(name)
        else:
            found.append(ReduceScatter(*how([name]), axis=axis))
            splits[axis].append(name)
    if whole:
        found.append(AllReduce(*how(whole)))
    own()
    for axis, names in enumerate(splits):
        if not names or kept(axis) == len(names):
            continue
        other = next(
            (b for b, w in enumerate(wanted) if b != axis and w[: len(splits[b]) + 1] == [*splits[b], names[-1]]), None
        )
        if other is not None and kept(other) == len(splits[other]):
            found.append(AllToAll(*how([names[-1]]), split=other, join=axis))
            splits[other].append(names.pop())
    for axis, names in enumerate(splits):
        if kept(axis) < len(names):
            found.append(AllGather(*how(names[kept(axis) :]), axis=axis))
            del names[kept(axis) :]
    own()
    return found


@dataclass(frozen=True)
class _Way:
    """One way to share out an operation: the mesh axes along each factor, and how each source then has to lie."""

    names: tuple[tuple[str, ...], ...]
    needs: tuple[Placement, ...]
    result: Placement


class _Ranks:
    """The local program under construction: for each value of the global one, a rank's part and how it lies."""

    def __init__(self, graph: Graph, wishes: Mapping[Node, Splits], lies: Mapping[Node, Placement]) -> None:
        self.graph, self.wishes = graph, wishes
        self.mesh = mesh = cast("Mesh", graph.mesh)
        self.users = graph.users()
        self.origins: dict[Node, str] = {}
        self.at: dict[Node, tuple[Node, Placement]] = {}
        self.inputs: list[Node] = []
        for node in graph.inputs:
            placed = lies.get(node) or Placement(wishes[node])
            op = node.op
            assert isinstance(op, Input)
            part = Node(replace(op, type=node.tensor.with_shape(placed.local_shape(node.shape, mesh))))
            self.inputs.append(part)
            self.at[node] = part, placed

    def local(self) -> Graph:
        graph = self.graph
        for node in graph.nodes():
            if node not in self.at:
                self.at[node] = self._of(node)
            self._name(self.at[node][0], node)
        outputs = [self.at[o] if isinstance(o.op, Place) else self._summed(o) for o in graph.outputs]
        state = len(graph.state)
        for i, (given, kept) in enumerate(zip(graph.inputs[-state:], graph.outputs[-state:], strict=True) if state else ()):
            at = len(outputs) - state + i
            lies = self.at[given][1]
            outputs[at] = self._moved(kept, *outputs[at], lies), lies
        return replace(
            graph,
            inputs=tuple(self.inputs),
            outputs=tuple(node for node, _ in outputs),
            origins=self.origins,
            placements=(*(self.at[n][1] for n in graph.inputs), *(lies for _, lies in outputs)),
        )

    def _name(self, part: Node, node: Node) -> None:
        if node in self.graph.origins:
            self.origins.setdefault(part, self.graph.origins[node])

    def _moved(self, node: Node, part: Node, now: Placement, to: Placement) -> Node:
        """A rank's part of a value, as it is to lie."""
        for op in moves(now, to, node.shape, self.mesh):
            part = Node(cast("Op", op), part)
            self._name(part, node)
        return part

    def _summed(self, node: Node) -> tuple[Node, Placement]:
        """A rank's part of a value, whose summands are added up: for all ranks, or for those who may hold parts of the sum."""
        part, now = self.at[node]
        if not now.partial:
            return part, now
        splits = [list(names) for names in now.splits]
        for name in now.partial:
            for axis, wished in enumerate(self.wishes[node]):
                if wished[: len(splits[axis]) + 1] == (*splits[axis], name):
                    splits[axis].append(name)
        to = Placement(tuple(map(tuple, splits)))
        self.at[node] = self._moved(node, part, now, to), to
        return self.at[node]

    def _of(self, node: Node) -> tuple[Node, Placement]:
        """A rank's part of an operation's result."""
        op = node.op
        if isinstance(op, Collective):
            raise InputError(f"{op.name} stands in a program over whole tensors", where=self.graph.origin(node))
        if isinstance(op, Place):
            several = self.users.count(node.src[0]) > 1
            part, now = self._summed(node.src[0]) if several else self.at[node.src[0]]
            return self._moved(node, part, now, op.placement), op.placement
        if not isinstance(node.type, TensorType) or not all(isinstance(s.type, TensorType) for s in node.src):
            return self._whole(node)
        through = self._passes_sums(node)
        lies = [self.at[s][1] if through else self._summed(s)[1] for s in node.src]
        way = self._best(node, lies)
        src = [self._moved(s, self.at[s][0], now, need) for s, now, need in zip(node.src, lies, way.needs, strict=True)]
        shape = way.result.local_shape(node.shape, self.mesh)
        if shape == node.shape and all(a.type == b.type for a, b in zip(src, node.src, strict=True)):
            part = node.with_src(src)
        else:
            part = Node(op.of_part(node, shape, [s.tensor for s in src]), *src)
        self._name(part, node)
        for factor, names in zip(node.op.factors(node), way.names, strict=True):
            if names and factor.result is None and not _sums(node, factor):
                sizes = tuple(dict(self.mesh.axes)[n] for n in names)
                part = Node(AllReduce(names, sizes, fn=factor.fn), part)  # type: ignore[arg-type]
                self._name(part, node)
        return part, way.result

    def _whole(self, node: Node) -> tuple[Node, Placement]:
        """An operation of several results, or on them, which every rank does whole."""
        src: list[Node] = []
        for s in node.src:
            part, now = self.at[s] if not isinstance(s.type, TensorType) else self._summed(s)
            src.append(
                part if not isinstance(s.type, TensorType) else self._moved(s, part, now, Placement.whole(s.tensor.rank))
            )
        rank = node.tensor.rank if isinstance(node.type, TensorType) else 0
        return node.with_src(src), Placement.whole(rank)

    def _passes_sums(self, node: Node) -> bool:
        """Tell whether an operation may be done on summands, so that less travels, or nothing more: it is linear in them. f16
        has too small a range for summands, which travel in the type that they had before."""
        partial = [i for i, s in enumerate(node.src) if self.at[s][1].partial]
        if not partial or any(self.users.count(node.src[i]) > 1 for i in partial):
            return False
        first = node.src[partial[0]]
        if node.tensor.size_bytes > first.tensor.size_bytes or len({self.at[node.src[i]][1].partial for i in partial}) > 1:
            return False
        narrows = isinstance(node.op, Convert) and node.dtype is F16 and first.dtype is not F16
        return not narrows and linear_in(node, partial)

    def _best(self, node: Node, lies: Sequence[Placement]) -> _Way:
        """The way on which most mesh axes share out the work as sources lie; of those the one that takes the least time, by
        what travels, is computed, and is read and written."""
        _, best = min(self._ways(node, lies), key=lambda found: (found[0], self._time_us(node, lies, found[1])))
        return best

    def _ways(self, node: Node, lies: Sequence[Placement]) -> Iterator[tuple[int, _Way]]:
        """Every way, with the number of mesh axes that split a source, and along whose factor no work is shared out by it.

        A mesh axis runs along a factor that splits a source already, or had better split the result, or along none.
        """
        factors = node.op.factors(node)
        summed = {n for p in lies for n in p.partial}
        claims: dict[str, dict[int, int]] = {}
        held: dict[str, set[int]] = {}
        for i, f in enumerate(factors):
            given = [p.splits[a] for p, a in zip(lies, f.axes, strict=True) if a is not None]
            wished = [self.wishes[node][f.result]] if f.result is not None else []
            for names in (*given, *wished):
                for place, name in enumerate(names):
                    if name not in summed:
                        claims.setdefault(name, {}).setdefault(i, place)
            for name in itertools.chain(*given):
                held.setdefault(name, set()).add(i)
        options = [[*claims[name], None] for name in claims]
        for chosen in itertools.product(*options):
            along: list[list[tuple[int, str]]] = [[] for _ in factors]
            for name, i in zip(claims, chosen, strict=True):
                if i is not None:
                    along[i].append((claims[name][i], name))
            way = self._way(node, lies, factors, [tuple(name for _, name in sorted(names)) for names in along])
            if way is not None:
                yield sum(name in held and i not in held[name] for name, i in zip(claims, chosen, strict=True)), way

    def _way(
        self, node: Node, lies: Sequence[Placement], factors: Sequence[Factor], names: Sequence[tuple[str, ...]]
    ) -> _Way | None:
        """The way with these mesh axes along the factors; None where ranks do not divide an extent."""
        needs: list[list[tuple[str, ...]]] = [[()] * s.tensor.rank for s in node.src]
        result: list[tuple[str, ...]] = [()] * node.tensor.rank
        partial = list(dict.fromkeys(n for p in lies for n in p.partial))
        for f, along in zip(factors, names, strict=True):
            ranks = self.mesh.ranks_of(along)
            if f.result is not None:
                result[f.result] = along
            elif _sums(node, f):
                partial += along
            for s, need, a in zip((*node.src, node), (*needs, result), (*f.axes, f.result), strict=True):
                if a is not None:
                    need[a] = along
                    if s.shape[a] % ranks:
                        return None
        placed = (Placement(tuple(need), p.partial) for need, p in zip(needs, lies, strict=True))
        return _Way(tuple(names), tuple(placed), Placement(tuple(result), tuple(partial)))

    def _wire_bytes(self, node: Node, now: Placement, to: Placement) -> int:
        local = node.tensor.with_shape(now.local_shape(node.shape, self.mesh))
        return wire_bytes(moves(now, to, node.shape, self.mesh), local)

    def _time_us(self, node: Node, lies: Sequence[Placement], way: _Way) -> float:
        """The time of a way, with a share of what travels for all readers of a source, and all that brings the result to where
        it had better lie."""
        moved = zip(node.src, lies, way.needs, strict=True)
        wire = sum(self._wire_bytes(s, now, need) / self.users.count(s) for s, now, need in moved)
        if not way.result.partial:
            wire += self._wire_bytes(node, way.result, Placement(self.wishes[node]))
        local = node.tensor.with_shape(way.result.local_shape(node.shape, self.mesh))
        for factor, names in zip(node.op.factors(node), way.names, strict=True):
            if names and factor.result is None:
                kept = names[-1] in {n for s in self.wishes[node] for n in s}
                wire += (1 if kept else 2) * local.size_bytes
        shares = math.prod(self.mesh.ranks_of(names) for names in way.names)
        used = [s.tensor.with_shape(p.local_shape(s.shape, self.mesh)) for s, p in zip(node.src, way.needs, strict=True)]
        touched = local.size_bytes + sum(t.size_bytes for t in used)
        return wire / LINK_GBPS / 1e3 + touched / MEMORY_GBPS / 1e3 + _operations(node) / shares / TFLOPS / 1e6


def _sums(node: Node, factor: Factor) -> bool:
    """Tell whether ranks that share out a factor get summands of the result, which can be added up later."""
    return factor.result is None and factor.fn == "add" and (node.dtype.is_float or node.dtype.is_integer)


def _operations(node: Node) -> int:
    op = node.op
    if isinstance(op, Gemm):
        return 2 * node.tensor.elements * op.lhs.shape[-1]
    if isinstance(op, Attention):
        q, k, v = node.src[:3]
        return 2 * math.prod(q.shape[:3]) * k.shape[2] * (q.shape[3] + v.shape[3])
    return 0


def wire_bytes(ops: Sequence[Collective], type: TensorType) -> int:
    """Bytes that each rank receives in a chain of operations on a value of this type, at least."""
    total = 0
    for op in ops:
        after = Node(cast("Op", op), Node(Param(0, type))).tensor
        total += op.wire_bytes(type)
        type = after
    return total
