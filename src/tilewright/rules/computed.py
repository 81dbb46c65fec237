"""Prologues: values computed before a product are computed where the product reads them, as operands or beside the sum."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.dtype import PRED
from tilewright.ir.anchor import ANCHORS, operands_of, rebuilt, stores_of
from tilewright.ir.expression import ELEMENTWISE, QUICK, Sources
from tilewright.ir.graph import Node, Users, substitute, toposort
from tilewright.ir.ops import (
    VIEWS,
    Attention,
    Call,
    Convert,
    Dequantize,
    Gather,
    Gemm,
    Input,
    Item,
    Map,
    Param,
    Quantize,
    Select,
    Write,
)
from tilewright.ir.pattern import Match, Pat, rule
from tilewright.rules.prologue import few_queries, readable

LONG_WAY = 64  # nodes of one prologue


@rule(Pat(Gemm), stage="computed")
def compute_operand_where_it_is_read(m: Match) -> Node | None:
    """gemm(f(x, y), b) -> gemm(x, y, b) {lhs = f(param0, param1)}, for f elementwise functions, selects, casts and views.

    Where: nothing else reads f(x, y); x and y are in memory whoever reads them (inputs, constants, results of products and
    calls); each element is still computed once: the product does not repeat the operand for a batch, no store reads it, and a
    function of more than an instruction or two is not repeated by a broadcast; the other operand has no scales by blocks, whose
    kernels want this one as it lies. An integer product takes integer functions alone. Whether a kernel evaluates f while it
    loads or a step of its own does is measured. Exact: yes.
    """
    node = m.node
    op = node.op
    assert isinstance(op, Gemm)
    beside = set(toposort(op.stores))
    for i, root in enumerate((op.lhs, op.rhs)):
        other = (op.rhs, op.lhs)[i]
        for leaf in toposort((root,)):
            if not isinstance(leaf.op, Param):
                continue
            source = node.src[leaf.op.index]
            found = prologue_of(source)
            if found is None or all(isinstance(n.op, VIEWS) for n in found):
                continue
            why = _stays(m, node, root, other, leaf, found, beside)
            if why is not None:
                m.refuse(why)
                continue
            sources = Sources(node.src)
            roots = substitute((op.lhs, op.rhs), {leaf: _expression(source, found, sources)})
            return rebuilt(node, roots, op.stores, sources.nodes)
    return None


def _stays(m: Match, node: Node, root: Node, other: Node, leaf: Node, found: Sequence[Node], beside: set[Node]) -> str | None:
    """The sentence why an operand is computed by a step of its own, or None."""
    op = node.op
    assert isinstance(op, Gemm)
    if leaf in beside or leaf in toposort((other,)):
        return "the product reads what is computed twice, and would compute it as often"
    shared = _read_elsewhere(found, node, m.users)
    if shared is not None:
        return f"{shared.op.name} has other readers, so that it is computed and kept anyway"
    batch, own = op.acc_type.shape[:-2], root.shape[:-2]
    one_matrix = root is op.rhs and all(d == 1 for d in own)
    elements = found[-1].tensor.elements
    if root.tensor.elements > elements or (batch != own and not one_matrix):
        return "the product repeats the operand, and would compute it as often"
    if any(n.tensor.elements < elements and not _quick(n) for n in found):
        return "a function is repeated by a broadcast, and would be computed as often"
    if any(isinstance(n.op, Dequantize) and n.op.block is not None for n in toposort((other,))):
        return "kernels for scales by blocks take the other operand as it lies in memory"
    if op.acc_dtype.is_integer and not all(_is_integer(n) for n in found):
        return "an integer product is exact, and a float function before it rounds"
    return None


@rule(Pat(Attention), stage="computed")
def compute_cached_keys_where_they_are_read(m: Match) -> Node | None:
    """attention(q, f(k, s), v) -> attention(q, k, s, v) {operands = param0, f(param1, param2), param3}; values alike

    As a cache of codes is written out: (codes - zero) * scale + offset, with scales narrowed on the way. Where: f is of
    functions of an instruction or two, selects, casts and views; it reads 8-bit codes, or is smaller than the keys, as their
    scales are; queries are few, so that each key is read by one tile; nothing else reads f; it is made of what lies in memory,
    where a table may pick blocks.
    Exact: yes.
    """
    node = m.node
    operands, stores = operands_of(node), stores_of(node)
    op = node.op
    assert isinstance(op, Attention)
    beside = set(toposort([*operands[:1], *operands[3:], *stores, *(r for r in (op.scores, op.weights) if r is not None)]))
    for root in operands[1:3]:
        for leaf in toposort((root,)):
            if not isinstance(leaf.op, Param) or leaf in beside:
                continue
            source = node.src[leaf.op.index]
            found = prologue_of(source, picks=True)
            if found is None or all(isinstance(n.op, (*VIEWS, Gather)) for n in found) or not all(_quick(n) for n in found):
                continue
            if not few_queries(node):
                return None
            inside = {*found}
            codes = any(s.dtype.bits <= 8 and s.dtype is not PRED for n in found for s in n.src if s not in inside)
            if source.tensor.elements > root.tensor.elements or not (codes or source.tensor.elements < root.tensor.elements):
                continue
            shared = _read_elsewhere(found, node, m.users)
            if shared is not None:
                m.refuse(f"{shared.op.name} has other readers, so that it is computed and kept anyway")
                continue
            sources = Sources(node.src)
            return rebuilt(node, substitute(operands, {leaf: _expression(source, found, sources)}), stores, sources.nodes)
    return None


@rule(Pat(Gemm), stage="computed")
def compute_side_input_in_the_store(m: Match) -> Node | None:
    """gemm(a, b, f(c)) -> gemm(a, b, c) {store over f(param2)}, for f elementwise functions, selects, casts and views, slices
    among them: beta * C, a mask on it, a narrowed residual.

    Where: nothing else reads f(c), and c is in memory whoever reads it; no operand is f(c); a function of more than an
    instruction or two is computed once an element, by one store. Exact: yes.
    """
    node = m.node
    operands, stores = operands_of(node), stores_of(node)
    in_operands = set(toposort(operands))
    for leaf in toposort(stores):
        if not isinstance(leaf.op, Param) or leaf in in_operands:
            continue
        source = node.src[leaf.op.index]
        found = prologue_of(source)
        if found is None:
            continue
        shared = _read_elsewhere(found, node, m.users)
        if shared is not None:
            m.refuse(f"{shared.op.name} has other readers, so that it is computed and kept anyway")
            continue
        reading = [s for s in stores if leaf in toposort((s,))]
        if any(not _quick(n) and (len(reading) > 1 or n.tensor.elements < reading[0].tensor.elements) for n in found):
            m.refuse("a function is repeated by a broadcast or for several stores, and would be computed as often")
            continue
        sources = Sources(node.src)
        inner = _expression(source, found, sources)
        return rebuilt(node, operands, substitute(stores, {leaf: inner}), sources.nodes)
    return None


def prologue_of(top: Node, *, picks: bool = False) -> list[Node] | None:
    """The elementwise operations and views between `top` and what lies in memory whoever reads it, sources first; None if there
    are none, too many, or another kind of step is among them, which then computes them with what it gives. `picks`: slices that
    a table picks out of what lies in memory are no other kind."""
    order: list[Node] = []
    seen: set[Node] = set()
    pending = [(top, False)]
    while pending:
        n, done = pending.pop()
        if done:
            order.append(n)
            continue
        if n in seen or _in_memory(n):
            continue
        fine = isinstance(n.op, (*ELEMENTWISE, *VIEWS)) and not isinstance(n.op, Quantize)
        if isinstance(n.op, Gather):
            fine = picks and not n.op.elementwise and _in_memory(n.src[0])
        if not fine or len(seen) >= LONG_WAY:
            return None
        seen.add(n)
        pending.append((n, True))
        pending.extend((s, False) for s in reversed(n.src[1:] if isinstance(n.op, Gather) else n.src))
    return order or None


def _in_memory(n: Node) -> bool:
    """A value is there whoever reads it; of a constant that is only viewed or widened, what it is made of."""
    if isinstance(n.op, Item):
        n = n.src[0]
    made = n.constant and (isinstance(n.op, Dequantize) or not readable(n))
    return made or isinstance(n.op, (Input, Call, Write, *ANCHORS))


def _read_elsewhere(found: Sequence[Node], reader: Node, users: Users) -> Node | None:
    """The first computed node of a prologue that something else reads as well, None if none is; views and casts compute
    nothing."""
    inside = {*found, reader}
    computes = (n for n in found if isinstance(n.op, (Map, Select)))
    return next((n for n in computes if not all(r in inside for r in users[n])), None)


def _expression(top: Node, found: Sequence[Node], sources: Sources) -> Node:
    """A prologue over `param`s."""
    made: dict[Node, Node] = {}
    for n in found:
        made[n] = Node(n.op, *(made[s] if s in made else sources.param(s) for s in n.src))
    return made[top]


def _quick(n: Node) -> bool:
    return not isinstance(n.op, Map) or n.op.fn in QUICK


def _is_integer(n: Node) -> bool:
    return not any(t.dtype.is_float for t in (n, *n.src)) or isinstance(n.op, (Convert, Select, *VIEWS))
