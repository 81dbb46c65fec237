"""Cutting a graph into steps: each gemm alone, everything between gemms in connected fusions, constants once and for all.

A fusion that no kernel takes whole is cut, so that only operations without a kernel are left to torch. A node joins the fusion
that it reads, as long as a generator takes the two together; else it begins another. No cycle arises, as a node joins the last
of the fusions that it reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tilewright.hardware.target import Target
from tilewright.ir.anchor import ANCHORS
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import (
    ALIASES,
    VIEWS,
    Attention,
    Call,
    Collective,
    Concat,
    Const,
    Convert,
    Dequantize,
    Gather,
    Gemm,
    Input,
    Iota,
    Item,
    LayerNorm,
    Map,
    Own,
    Pad,
    Quantize,
    Reduce,
    Softmax,
    Write,
    maker_of,
)
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import LAST_RESORT, concerns, discover, refusal
from tilewright.schedule.problem import AnyProblem, FusionProblem, destination_of, fusion_of, problem_of

Kind = Literal[
    "gemm",
    "attention",
    "norm",
    "softmax",
    "call",
    "collective",
    "reduce",
    "gather",
    "elementwise",
    "quantize",
    "move",
    "view",
    "write",
]

Taken = Callable[[FusionProblem], bool]

MOVE = (Concat, Pad)
CAST = (Quantize, Dequantize, Convert)
ALONE = (Gemm, Attention, Call, Collective, Write)
MOST_ALIKE = 4  # fusions that are made one step: each is code of its own in a kernel, of which there is only so much
MOST_NUMBERS = 64  # fusions of single numbers, such as a cache's counters, that are made one step
MOST_NODES = 200  # of a fusion that is cut: each is asked for
_JOINED = (0, 0)  # stands for a concatenation among reductions
NUMBERS, WRITES = "numbers", "writes"  # what parts are that are made one step though they read no one product
ARITHMETIC = ("add", "subtract", "multiply", "negate")
# The first that a fusion holds names it.
_NAMING: tuple[tuple[Kind, tuple[type, ...]], ...] = (
    ("gemm", (Gemm,)),
    ("attention", (Attention,)),
    ("call", (Call,)),
    ("view", (Own,)),
    ("collective", (Collective,)),
    ("norm", (LayerNorm,)),
    ("softmax", (Softmax,)),
    ("reduce", (Reduce,)),
    ("gather", (Gather,)),
)


@dataclass(frozen=True)
class Part:
    """Nodes that run together.

    Attributes:
        kind: what the step is called in reports.
        nodes: sources first.
        inputs: values it reads from outside.
        outputs: values others read.
        once: depends on constants alone; runs when the program is prepared, not at every call.
    """

    kind: Kind
    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    once: bool = False

    @property
    def unfused(self) -> bool:
        """Tell whether it only quantises, dequantises, converts or moves data: work that belongs inside another step."""
        return self.kind in ("quantize", "move") and not self.once

    @cached_property
    def posed(self) -> tuple[AnyProblem, tuple[Node, ...]]:
        """The problem that it poses, and the nodes whose values are its sources."""
        node = self.nodes[0]
        if isinstance(node.op, ANCHORS):
            return problem_of(node), node.src
        return fusion_of(self.inputs, self.outputs)


def decided(part: Part) -> bool:
    """Tell whether kernels compete for a part: any that runs at every call, but for calls, writes and what has no tensors."""
    if part.once or any(isinstance(n.op, (Call, Iota)) or (isinstance(n.op, Write) and _alone(n)) for n in part.nodes):
        return False
    if isinstance(part.nodes[0].op, ANCHORS):
        return True
    values = (*part.inputs, *part.nodes)
    return all(isinstance(n.type, TensorType) and n.dtype.kind != "opaque" for n in values)


def partition(graph: Graph) -> list[Part]:
    """The graph's parts in an order in which they can run.

    Gemms, attentions and calls stand alone, with the items that pick their results. A node's level is the number of such
    before it on the longest path, and then the number of times that what is reduced along some axes is reduced along others;
    other nodes of one level that touch each other form one fusion. A fusion reads what stands alone at its own level or lower
    and feeds only higher ones, so no cycle can arise. What only casts or moves a value that is there anyway waits for the one
    fusion that reads it.
    """
    readers = readers_of(graph)
    nodes = list(readers)
    level: dict[Node, tuple[int, int]] = {}
    reduced: dict[Node, frozenset[tuple[int, int]]] = {}
    group: dict[Node, Node] = {}

    def find(n: Node) -> Node:
        while group[n] is not n:
            group[n] = group[group[n]]
            n = group[n]
        return n

    for node in nodes:
        before = (level[s][0] + (isinstance(s.op, Write) and not _alone(s)) for s in node.src)
        at = max(before, default=0) + (_alone(node) and not node.constant)
        level[node], reduced[node] = _passes(node, at, level, reduced)
    for node in reversed(nodes):
        reader = _waits_for(node, readers)
        if reader is not None:
            level[node] = level[reader]
        elif _of_what_is_stored(node, readers, level):
            level[node] = min(level[r] for r in readers[node] if r is not None)
    for node in nodes:
        if isinstance(node.op, (Input, Const)):
            continue
        group[node] = node
        for s in node.src:
            if s in group and level[s] == level[node] and s.constant == node.constant and _touch(node, s):
                group[find(node)] = find(s)
    members: dict[Node, list[Node]] = {}
    for node in nodes:
        if node in group:
            members.setdefault(find(node), []).append(node)
    alike: dict[tuple[object, ...], tuple[list[Node], int]] = {}
    for first, several in list(members.items()):
        what = _what_it_does(several, level[first])
        if what is None:
            continue
        most = MOST_NUMBERS if what[0] == NUMBERS else MOST_ALIKE
        into, count = alike.get(what, (several, most))
        if count < most:
            into.extend(members.pop(first))
            alike[what] = into, count + 1
        else:
            alike[what] = several, 1
    parts = [part_of(m, readers, m[0].constant) for m in members.values()]
    index = {n: i for i, n in enumerate(nodes)}
    # Within a level what stands alone comes first; fusions of one level do not depend on each other.
    parts.sort(key=lambda p: (not p.once, level[p.nodes[0]], not _alone(p.nodes[0]), index[p.nodes[0]]))
    return parts


def _passes(
    node: Node,
    at: int,
    level: Mapping[Node, tuple[int, int]],
    reduced: Mapping[Node, frozenset[tuple[int, int]]],
) -> tuple[tuple[int, int], frozenset[tuple[int, int]]]:
    """A node's level, of which `at` is the first part, and the reductions before it there: how many sums, of how much.

    A kernel walks rows of one length, and writes what is joined piece by piece: a range over a whole tensor, a scale by group
    or a norm that follows another kind of reduction, and any reduction of what is joined, starts a fusion of its own.
    """
    within = [s for s in node.src if level[s][0] == at and not s.constant]
    part = max((level[s][1] for s in within), default=0)
    before = frozenset[tuple[int, int]]().union(*(reduced[s] for s in within if level[s][1] == part))
    kind = None if node.constant else _reduction(node)
    if kind is None:
        joined = isinstance(node.op, Concat) and not node.constant
        return (at, part), before | {_JOINED} if joined else before
    if before - {kind}:
        return (at, part + 1), frozenset({kind})
    return (at, part), before | {kind}


def _of_what_is_stored(node: Node, readers: Mapping[Node, set[Node | None]], level: Mapping[Node, tuple[int, int]]) -> bool:
    """Tell whether the readers of a node can compute it again: all are later reductions of its level, and the one value that it
    is a function of is stored for others anyway."""
    at, part = level[node]
    later = all(r is not None and level[r][0] == at and level[r][1] > part for r in readers[node])
    if node.constant or not later or not readers[node] or not isinstance(node.op, (Map, Convert, *ALIASES)):
        return False
    if any(not isinstance(s.type, TensorType) for s in node.src) or not isinstance(node.type, TensorType):
        return False
    whole = [s for s in node.src if not s.constant and s.tensor.elements >= node.tensor.elements]
    return len(whole) == 1 and any(r is None or level[r] > level[node] for r in readers[whole[0]] - {node})


def _reduction(node: Node) -> tuple[int, int] | None:
    """The number of a reduction's results and of the values behind each; None for another node, or one that reduces nothing."""
    op = node.op
    if isinstance(op, Reduce):
        (source, *_), results = node.src, node.tensor.elements if isinstance(node.type, TensorType) else 0
        length = math.prod(source.shape[a] for a in op.axes)
    elif isinstance(op, (LayerNorm, Softmax)):
        axis = op.axis % len(node.shape)
        length = math.prod(node.shape[axis:]) if isinstance(op, LayerNorm) else node.shape[axis]
        results = node.tensor.elements // max(length, 1)
    else:
        return None
    return (results, length) if length > 1 and results > 0 else None


def _alone(node: Node) -> bool:
    """Tell whether a node is a step by itself: not a write that the fusion before it can do."""
    return isinstance(node.op, ALONE) and not (isinstance(node.op, Write) and destination_of(node) is not None)


def _waits_for(node: Node, readers: Mapping[Node, set[Node | None]]) -> Node | None:
    """The one reader of a cast or a move of values that are written whoever reads them, if it runs in a fusion."""
    waits = isinstance(node.op, (*CAST, *MOVE, *VIEWS))
    if not waits or node.constant or len(readers[node]) != 1:
        return None
    (reader,) = readers[node]
    if reader is None or isinstance(reader.op, Item) or _alone(reader):
        return None
    for source in node.src:
        while isinstance(source.op, (*VIEWS, *CAST)):
            source = source.src[0]
        if not (source.constant or isinstance(source.op, (Input, Item, *ALONE))):
            return None
    return reader


def _touch(node: Node, source: Node) -> bool:
    """Tell whether a node belongs with its source: an item with what it picks from, anything else unless that stands alone."""
    if node.constant:
        return True
    if isinstance(node.op, Item):
        return True
    return not isinstance(maker_of(source).op, ALONE) and not _alone(node)


def _what_it_does(members: Sequence[Node], level: tuple[int, int]) -> tuple[object, ...] | None:
    """The signature that parts joined into one step share; None for a part that is constant or joins no other.

    Of fusions that read one product: the level, that product, and their operations unless every generator has them all. Of
    single numbers worked out from a call's inputs, and of writes to state at the same positions: the level.
    """
    if members[0].constant or not all(isinstance(v.type, TensorType) for n in members for v in (n, *n.src)):
        return None
    if isinstance(members[0].op, Write) and _alone(members[0]):
        return (WRITES, level, members[0].src[1])
    if any(map(_alone, members)) or all(isinstance(n.op, ALIASES) for n in members):
        return None
    at = {n: i for i, n in enumerate(members)}
    read = {maker_of(s) for n in members for s in n.src if s not in at}
    products = frozenset(s for s in read if isinstance(s.op, ALONE) and not s.constant)
    if not products and _of_numbers(members):
        return (NUMBERS, level)
    does = [(type(n.op), getattr(n.op, "fn", None), n.dtype, tuple(at.get(s, s.dtype) for s in n.src)) for n in members]
    plain = all(map(_is_plain, members))
    return (level, products, None if plain else tuple(does)) if len(products) == 1 else None


def _of_numbers(members: Sequence[Node]) -> bool:
    """Tell whether nothing but single numbers is worked out, from single numbers, by what every generator has."""
    values = {v for n in members for v in (n, *n.src)}
    return all(isinstance(n.op, (Map, Convert, *ALIASES)) for n in members) and all(v.tensor.elements == 1 for v in values)


def _is_plain(n: Node) -> bool:
    """Tell whether every generator has a node's operation, so that no fusion that it joins is refused for it."""
    if isinstance(n.op, Write):
        n = n.src[2]
    moves = isinstance(n.op, (*ALIASES, Concat, Convert)) or (isinstance(n.op, Map) and n.op.fn in ARITHMETIC)
    values = (n,) if isinstance(n.op, Item) else (n, *n.src)  # what an item picks from has several types
    return moves and all(v.dtype.is_float and 16 <= v.dtype.bits <= 32 for v in values)


def readers_of(graph: Graph) -> dict[Node, set[Node | None]]:
    """The readers of each node; None among them stands for a result of the graph."""
    readers: dict[Node, set[Node | None]] = {}
    for node in graph.nodes():
        readers[node] = set()
        for s in node.src:
            readers[s].add(node)
    for output in graph.outputs:
        readers[output].add(None)
    return readers


def part_of(members: Sequence[Node], readers: Mapping[Node, set[Node | None]], once: bool) -> Part:
    """Nodes, sources first, as a part; what nobody among `readers` reads is a result, too."""
    inside = set(members)
    inputs = dict.fromkeys(s for n in members for s in n.src if s not in inside)
    outputs = [n for n in members if not readers[n] or not readers[n] <= inside]
    if all(isinstance(n.op, Item) for n in outputs):
        outputs.sort(key=lambda n: n.op.index if isinstance(n.op, Item) else 0)
    return Part(_kind(members), tuple(members), tuple(inputs), tuple(outputs), once)


def _kind(members: Sequence[Node]) -> Kind:
    ops = [n.op for n in members]
    if _only_quantizes(members):
        return "quantize"
    for kind, classes in _NAMING:
        if any(isinstance(op, classes) for op in ops):
            return kind
    rest = [op for op in ops if not isinstance(op, (*ALIASES, Const))]
    if not rest:
        return "view"
    if any(isinstance(op, Write) for op in rest) and all(isinstance(op, (*CAST, *MOVE, Write)) for op in rest):
        return "write"
    if all(isinstance(op, (*CAST, *MOVE)) for op in rest):
        return "quantize" if any(isinstance(op, CAST) for op in rest) else "move"
    return "elementwise"


def _only_quantizes(members: Sequence[Node]) -> bool:
    """Tell whether all that members do is quantise what they are given, by scales that they may find themselves."""
    inside = set(members)
    needed: set[Node] = set()
    for node in reversed(members):  # readers first
        if isinstance(node.op, Quantize):
            data = node.src[0]
            while data in inside and isinstance(data.op, (*ALIASES, Convert)):
                data = data.src[0]
            if data in inside:
                return False
            needed.add(node)
        if node in needed:
            needed.update(node.src)
    return bool(needed) and all(n in needed or isinstance(n.op, ALIASES) for n in members)


def parts_for(graph: Graph, target: Target) -> list[Part]:
    """The graph's parts, those that no candidate of a target takes whole cut; in an order in which they can run."""
    able = [c for c in discover(kind=target.kind) if "fusion" in c.kinds and c.preference < LAST_RESORT]

    def taken(problem: FusionProblem) -> bool:
        return any(concerns(c, problem, target) and refusal(c, problem, target) is None for c in able)

    readers = readers_of(graph)
    return [p for part in partition(graph) for p in (cut(part, readers, taken) if able else [part])]


def cut(part: Part, readers: Mapping[Node, set[Node | None]], taken: Taken) -> list[Part]:
    """A part's pieces in an order in which they can run; itself where some kernel takes it whole, or none takes a piece.

    Args:
        part: what is cut, if it is a fusion.
        readers: of each node of the graph; None for a result.
        taken: whether a kernel is generated for a problem.
    """
    if not _may_be_cut(part) or _taken(part, taken):
        return [part]
    groups = _grown(part.nodes, readers, taken)
    parts = [part_of(g, readers, False) for g in groups]
    work = [[n for n in p.nodes if not isinstance(n.op, (*VIEWS, Const))] for p in parts]
    left = sum(len(w) for p, w in zip(parts, work, strict=True) if not _taken(p, taken))
    whole = sum(map(len, work))
    return parts if left < whole and len(parts) <= whole else [part]


def _may_be_cut(part: Part) -> bool:
    if part.once or not decided(part) or not 1 < len(part.nodes) <= MOST_NODES:
        return False
    problem, _ = part.posed
    alone = any(isinstance(n.op, Write) for n in part.nodes)
    return isinstance(problem, FusionProblem) and not problem.only_views and not alone


def _taken(part: Part, taken: Taken) -> bool:
    problem, _ = part.posed
    return isinstance(problem, FusionProblem) and taken(problem)


def _grown(nodes: Sequence[Node], readers: Mapping[Node, set[Node | None]], taken: Taken) -> list[list[Node]]:
    """Nodes, sources first, in groups of which each reads those before it."""
    groups: list[list[Node]] = []
    at: dict[Node, int] = {}
    seen: set[Node] = set()
    mine = set(nodes)
    waiting: set[Node] = set()  # views of what comes from outside: they go with what reads them first

    def ahead(n: Node) -> list[Node]:
        return [m for s in n.src if s in waiting for m in (*ahead(s), s)]

    def seen_alone() -> dict[Node, set[Node | None]]:
        """Readers among what has been seen, so that what is read later is no result yet."""
        return {m: {r for r in readers[m] if r not in mine or r in seen} for m in seen}

    for n in nodes:
        inside = [at[s] for s in n.src if s in at]
        if isinstance(n.op, VIEWS) and not inside and all(s in waiting or s not in mine for s in n.src):
            waiting.add(n)
            seen.add(n)
            continue
        seen.add(n)
        new = [*dict.fromkeys(ahead(n)), n]
        place = max(inside) if inside else len(groups) - 1
        joins = place >= 0 and (isinstance(n.op, VIEWS) or _taken(part_of([*groups[place], *new], seen_alone(), False), taken))
        if not joins:
            groups.append([])
            place = len(groups) - 1
        groups[place] += new
        at.update(dict.fromkeys(new, place))
        waiting.difference_update(new)
    if waiting:
        groups.append([n for n in nodes if n in waiting])
    return groups
