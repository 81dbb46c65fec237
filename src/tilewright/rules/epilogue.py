"""Epilogues: elementwise tails and views that follow a product become part of its store."""

from __future__ import annotations

from tilewright.ir.anchor import ANCHORS, operands_of, rebuilt, stores_of
from tilewright.ir.expression import ELEMENTWISE, REARRANGE, Sources, views_outward
from tilewright.ir.graph import Node, Users
from tilewright.ir.ops import Convert, Dequantize, Quantize, Slice
from tilewright.ir.pattern import Match, Pat, rule


@rule(Pat(ELEMENTWISE, where=lambda n: any(isinstance(s.op, ANCHORS) for s in n.src)), stage="epilogue")
def absorb_elementwise_into_store(m: Match) -> Node | None:
    """f(gemm(a, b), s) -> gemm(a, b, s) {store = f(store, s)}; gemm or attention.

    Where: nothing else reads the gemm, f does not broadcast it, and it has one store. The other operands become sources; they
    cannot depend on the gemm, since f alone reads it. Views of the accumulator move to the root of the store. A widening f
    (dequantize, or a cast to more bits) whose result a product, a norm or the like reads is left to that reader: what is
    stored stays narrow. Exact: yes.
    """
    node = m.node
    if left_to_its_readers(node, m.users):
        return None
    for producer in dict.fromkeys(s for s in node.src if isinstance(s.op, ANCHORS)):
        why = _stays(m, node, producer)
        if why is None:
            return _absorbed(node, producer)
        m.refuse(why)
    return None


def left_to_its_readers(node: Node, users: Users) -> bool:
    """Tell whether a node only widens what a product, a norm or the like reads, who can as well read it narrow."""
    if not isinstance(node.op, (Convert, Dequantize)) or node.dtype.bits <= node.src[0].dtype.bits:
        return False
    return not all(r is None or isinstance(r.op, ELEMENTWISE) for r in _readers_past_views(users, node))


def _readers_past_views(users: Users, node: Node) -> set[Node | None]:
    """The readers of a value, past views of it."""
    found: set[Node | None] = set()
    pending = [node]
    while pending:
        for reader in users[pending.pop()]:
            if reader is not None and isinstance(reader.op, (*REARRANGE, Slice)):
                pending.append(reader)
            else:
                found.add(reader)
    return found


def _stays(m: Match, node: Node, producer: Node) -> str | None:
    """The sentence why `node` cannot move into the store of `producer`, or None."""
    name = producer.op.name
    if len(m.users[producer]) != 1:
        return f"{len(m.users[producer])} operations read the {name}"
    return stays_outside(node, producer)


def stays_outside(node: Node, producer: Node) -> str | None:
    """The sentence why an elementwise operation cannot be computed where its producer's result is stored, or None."""
    name = producer.op.name
    if producer.shape != node.shape:
        return f"it broadcasts the {name} from {list(producer.shape)} to {list(node.shape)}"
    if isinstance(node.op, Quantize) and producer in node.src[1:]:
        return f"the {name} is its scale"
    return None


def _absorbed(node: Node, producer: Node) -> Node:
    sources = Sources(producer.src)
    (store,) = stores_of(producer)
    src = [store if s is producer else sources.param(s) for s in node.src]
    return rebuilt(producer, operands_of(producer), [views_outward(Node(node.op, *src))], sources.nodes)


@rule(Pat(REARRANGE, (Pat(ANCHORS, name="producer"),)), stage="epilogue")
def absorb_view_into_store(m: Match) -> Node | None:
    """view(gemm(a, b)) -> gemm(a, b) {store = view(store)}; a view is a reshape or transpose; gemm or attention.

    Where: nothing else reads the gemm, and it has one store. Exact: yes, the result is written where the view would find it.
    """
    producer = m["producer"]
    if len(m.users[producer]) != 1:
        m.refuse(f"{len(m.users[producer])} operations read the {producer.op.name}")
        return None
    (store,) = stores_of(producer)
    return rebuilt(producer, operands_of(producer), [views_outward(Node(m.node.op, store))], producer.src)
