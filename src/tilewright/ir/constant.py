"""Facts about a node known without running the program: the number it holds everywhere, its value if constants make it, what it
is a multiple or a rounding of."""

from __future__ import annotations

import math
from typing import cast
from weakref import WeakKeyDictionary

import torch

from tilewright.dtype import PRED
from tilewright.ir.build import const
from tilewright.ir.dims import Scope, scope_of
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node, toposort
from tilewright.ir.instance import nodes_at
from tilewright.ir.ops import (
    Broadcast,
    Call,
    Concat,
    Const,
    Convert,
    Gather,
    Iota,
    Map,
    Pad,
    Reduce,
    Reshape,
    Select,
    Slice,
    Transpose,
)
from tilewright.ir.types import TupleType

LARGEST_MASK, MASK_NODES = 1 << 22, 8  # elements of a mask that is looked at, and nodes that make it
_SPREAD = (Broadcast, Reshape, Transpose)
_CLOSED = (Broadcast, Call, Concat, Convert, Gather, Map, Pad, Reduce, Reshape, Select, Slice, Transpose)


def scalar_value(node: Node) -> float | int | bool | None:
    """The one number that `node` holds everywhere: a one-element constant, or a mask that constants make and that is the same
    everywhere, seen through views, repetition and conversion.

    None if it is none, or holds no element.
    """
    conversions: list[Convert] = []
    while isinstance(node.op, (*_SPREAD, Convert)):
        if node.tensor.elements == 0:
            return None
        if isinstance(node.op, Convert):
            conversions.append(node.op)
        node = node.src[0]
    if not isinstance(node.op, Const) or node.tensor.elements != 1:
        everywhere = _everywhere(node) if node.dtype is PRED else None
        if everywhere is None or not conversions:
            return everywhere
        node = const(everywhere, PRED)
        assert isinstance(node.op, Const)
    literal = node.op.data
    for op in reversed(conversions):
        node = Node(op, node)
    if conversions:
        value = cast("torch.Tensor", evaluate_nodes([node], {})[0])
        return value.reshape(()).item()
    return literal.scalar()


_masks: WeakKeyDictionary[Node, bool | None] = WeakKeyDictionary()


def _everywhere(mask: Node) -> bool | None:
    """The value of a pred that is the same everywhere; None if it differs or is not known."""
    if mask not in _masks and mask.tensor.open:
        scope, now = _example(mask)
        found = _everywhere(now)
        if found is not None:
            scope.found(
                f"a mask holds {found} everywhere", lambda values: _everywhere(nodes_at((mask,), values)[mask]) is found
            )
        _masks[mask] = found
    if mask not in _masks:
        values = constant_value(mask, LARGEST_MASK, MASK_NODES)
        known = values is not None and values.numel() > 0 and values.any() == values.all()
        _masks[mask] = bool(values.any()) if values is not None and known else None
    return _masks[mask]


def _example(node: Node) -> tuple[Scope, Node]:
    """The scope of a node with open extents, and the node for the hints."""
    scope = cast("Scope", scope_of(node.shape))
    return scope, nodes_at((node,), scope.hints)[node]


def scalar_like(value: float, node: Node) -> Node:
    """A constant number of `node`'s type, without axes."""
    return const(value, node.dtype)


def unrounded(node: Node) -> Node:
    """The value before any conversion between floats of 16 bits or more that keeps infinity; what is made narrower than that is
    quantised, and what saturates is clamped."""
    while is_rounding(node):
        node = node.src[0]
    return node


def is_rounding(node: Node) -> bool:
    """Tell whether a node only rounds a float of 16 bits or more to another, or widens it."""
    if not isinstance(node.op, Convert) or node.op.overflow == "saturate":
        return False
    return all(d.is_float and d.bits >= 16 for d in (node.dtype, node.src[0].dtype))


def scaling(node: Node) -> tuple[int, float] | None:
    """The source that a node multiplies by a number, by index, and the number; a divisor counts as its reciprocal."""
    if not isinstance(node.op, Map) or node.op.fn not in ("multiply", "divide") or not node.dtype.is_float:
        return None
    for at, other in ((0, 1), (1, 0))[: 1 if node.op.fn == "divide" else 2]:
        number = scalar_value(node.src[other])
        if number and math.isfinite(number) and node.src[at].shape == node.shape:
            return at, 1 / number if node.op.fn == "divide" else float(number)
    return None


def constant_value(node: Node, max_elements: int = 1 << 24, max_nodes: int = 64) -> torch.Tensor | None:
    """The value of a node that nothing but constants and `iota` make; None if it depends on anything else.

    Nor is one computed that would take values of more than `max_elements` elements or more than `max_nodes` nodes: looking
    costs no more than that either.
    """
    made = _made_of(node, max_nodes)
    if made is None or any(n.tensor.elements > max_elements for n in made):
        return None
    return cast("torch.Tensor", evaluate_nodes([node], {})[0])


def repeating_value(node: Node, max_elements: int = 1 << 24, max_nodes: int = 64) -> torch.Tensor | None:
    """The same with one element along each axis over which the value repeats: it broadcasts to the node's shape.

    Elementwise operations are done on so much alone: a mask written out for each of many batches costs no more than one.
    """
    made = _made_of(node, max_nodes)
    values: dict[Node, torch.Tensor] = {}
    for n in toposort((node,)) if made is not None else ():
        given = [values[s] for s in n.src]
        if isinstance(n.op, Broadcast):
            values[n] = given[0].reshape((1,) * (len(n.shape) - given[0].dim()) + given[0].shape)
            continue
        alike = isinstance(n.op, (Map, Select, Convert))
        given = given if alike else [v.expand(s.shape) for v, s in zip(given, n.src, strict=True)]
        extents = torch.broadcast_shapes(*(v.shape for v in given)) if alike else n.shape
        if math.prod(extents) > max_elements:
            return None
        values[n] = _once(cast("torch.Tensor", evaluate_nodes([n], dict(zip(n.src, given, strict=True)))[0]))
    return values.get(node)


def _once(value: torch.Tensor) -> torch.Tensor:
    """One element along each axis over which a value repeats; 8-bit floats, which torch does not compare, as they are."""
    if value.is_floating_point() and value.element_size() == 1:
        return value
    for axis, extent in enumerate(value.shape):
        first = value.narrow(axis, 0, min(extent, 1))
        if extent > 1 and torch.equal(value, first.expand_as(value)):
            value = first
    return value


def _made_of(node: Node, max_nodes: int) -> set[Node] | None:
    """The nodes that `node` is made of, itself included; None unless they are constants, `iota` and at most `max_nodes`
    nodes."""
    if not node.constant:
        return None
    seen: set[Node] = {node}
    stack = [node]
    while stack:
        n = stack.pop()
        if isinstance(n.type, TupleType) or n.type.open:
            return None
        if isinstance(n.op, (Const, Iota)):
            continue
        fresh = [s for s in dict.fromkeys(n.src) if s not in seen]
        seen.update(fresh)
        if not isinstance(n.op, _CLOSED) or len(seen) > max_nodes:
            return None
        stack.extend(fresh)
    return seen
