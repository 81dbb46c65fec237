"""Prologues: views, casts and dequantisation before a product become part of the operand."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.dtype import PRED
from tilewright.ir.anchor import ANCHORS, operands_of, rebuilt, stores_of
from tilewright.ir.expression import Sources
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import VIEWS, Attention, Convert, Dequantize, Gather, Param, Slice
from tilewright.ir.pattern import Match, Pat, rule

FEW_QUERIES = 64  # rows of a tile


@rule(Pat(ANCHORS), stage="prologue")
def read_operand_through_views_and_casts(m: Match) -> Node | None:
    """gemm(f(x), b) -> gemm(x, b) {lhs = f(param0)}, for f a view, a dequantisation or a widening cast; any operand.

    Where: f is a reshape, transpose, slice or broadcast; a dequantize; a convert from a type that takes no more bytes; or one
    from integers to the truth values of an attention's mask with one row for all queries. The kernel then reads what is stored,
    never a wider copy; a store that reads f(x) too reads it likewise, unless f is a slice.
    Blocks of keys and values that a table of integers picks out of a cache are read where they lie, too, where queries are few.
    Keys and values with more than one scale only where queries are few: every tile of queries would dequantise them again.
    Other readers of f(x) keep it. Exact: yes.
    """
    node = m.node
    operands, stores = operands_of(node), stores_of(node)
    beside, inside = set(toposort(stores)), toposort(operands)
    tables = {n.src[0] for n in inside if isinstance(n.op, Gather)}
    for leaf in inside:
        if not isinstance(leaf.op, Param) or leaf in tables:
            continue
        source = node.src[leaf.op.index]
        taken = readable(source) or _tells_what_is_seen(operands, leaf, source) or _picks_pages(node, operands, leaf, source)
        if not taken or (leaf in beside and isinstance(source.op, Slice)):
            continue  # a store that reads the same part would have to cut it out again
        if _dequantised_by_every_tile(node, operands, leaf, source):
            m.refuse("every tile of queries would dequantise its keys and values again")
            continue
        sources = Sources(node.src)
        inner = {leaf: Node(source.op, *(sources.param(s) for s in source.src))}
        return rebuilt(node, substitute(operands, inner), substitute(stores, inner), sources.nodes)
    return None


def _tells_what_is_seen(operands: Sequence[Node], leaf: Node, source: Node) -> bool:
    """Tell whether a node makes truth values of integers, a few for each sequence, which say what keys an attention sees."""
    if not isinstance(source.op, Convert) or source.dtype is not PRED or not source.src[0].dtype.is_integer:
        return False
    mask = operands[3:]
    return leaf in toposort(mask) and leaf not in toposort(operands[:3]) and mask[0].shape[-2:-1] in ((), (1,))


def _picks_pages(node: Node, operands: Sequence[Node], leaf: Node, source: Node) -> bool:
    """Tell whether a node picks blocks of keys or values out of a cache, by a table of integers, for few queries."""
    pages = isinstance(source.op, Gather) and not source.op.elementwise and isinstance(node.op, Attention)
    return pages and leaf in toposort(operands[1:3]) and few_queries(node) and _beside(operands, leaf)


def _beside(operands: Sequence[Node], leaf: Node) -> bool:
    """Tell whether queries and the mask do not read a leaf."""
    return leaf not in toposort((operands[0], *operands[3:]))


def _dequantised_by_every_tile(node: Node, operands: Sequence[Node], leaf: Node, source: Node) -> bool:
    """Tell whether an attention of many queries would read keys or values with scales that a product cannot take out."""
    several = isinstance(source.op, Dequantize) and any(s.tensor.elements > 1 for s in source.src[1:])
    return several and isinstance(node.op, Attention) and leaf in toposort(operands[1:3]) and not few_queries(node)


def few_queries(attention: Node) -> bool:
    """Tell whether the queries that share keys are rows of one tile, so that keys and values are read once for them."""
    q, k = operands_of(attention)[:2]
    return q.shape[1] * q.shape[2] <= FEW_QUERIES * k.shape[1]


def readable(source: Node) -> bool:
    """Tell whether a node is a view, a dequantisation or a widening cast, which a kernel does as it reads."""
    op = source.op
    if isinstance(op, (*VIEWS, Dequantize)):
        return True
    if isinstance(op, Convert):
        given = source.src[0].dtype
        return given.kind in ("int", "uint", "float") and given.bits <= op.dtype.bits
    return False


@rule(Pat(ANCHORS), stage="prologue")
def read_side_inputs_unbroadcast(m: Match) -> Node | None:
    """gemm(a, b, f(s)) -> gemm(a, b, s) {store over f(param)}, for a side input that a broadcast, reshape, transpose, widening
    cast or dequantisation made.

    Where: f's source is no larger than its result. Exact: yes. A bias stays a vector however the source wrote it, and a
    residual that arrives as codes is read as codes.
    """
    node = m.node
    in_operands = {n for n in toposort(operands_of(node)) if isinstance(n.op, Param)}
    for leaf in toposort(stores_of(node)):
        if not isinstance(leaf.op, Param) or leaf in in_operands:
            continue
        source = node.src[leaf.op.index]
        if isinstance(source.op, Slice) or not readable(source):
            continue
        sources = Sources(node.src)
        inner = Node(source.op, *(sources.param(s) for s in source.src))
        stores = substitute(stores_of(node), {leaf: inner})
        return rebuilt(node, operands_of(node), stores, sources.nodes)
    return None
