"""Expressions as rows take them: norms and softmaxes decomposed, each arrangement of a source a source of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tilewright.dtype import F32
from tilewright.ir.build import broadcast, const, convert, map_, reshape, slice_
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import (
    VIEWS,
    Broadcast,
    Concat,
    Const,
    Convert,
    Gather,
    LayerNorm,
    Map,
    Pad,
    Param,
    Reduce,
    Reshape,
    Select,
    Softmax,
)
from tilewright.schedule.candidate import Unsupported

POWERS = (0.5, 1.0, 2.0, 3.0, 4.0)


def decompose(roots: Sequence[Node]) -> list[Node]:
    """The expressions with no operation left but sums, means, maxima, elementwise ones, views; floats are added up in f32."""
    made: dict[Node, Node] = {}
    for n in toposort(roots):
        src = [made[s] for s in n.src]
        op = n.op
        if isinstance(op, LayerNorm):
            made[n] = _norm(op, n, src)
        elif isinstance(op, Softmax):
            made[n] = _softmax(op, n, src[0])
        elif isinstance(op, Reduce):
            made[n] = _reduction(op, n, src[0])
        elif isinstance(op, Pad):
            made[n] = _padded(op, src[0], src[1])
        elif isinstance(op, Gather) and not op.elementwise:
            made[n] = _picked(replace(op, axis=op.axis % len(src[0].shape)), src[0], src[1])
        else:
            made[n] = _power(n, src)
    return [made[r] for r in roots]


def powers_as_products(roots: Sequence[Node]) -> tuple[Node, ...]:
    """The expressions with floats to the power of a small number that is written there in products."""
    made: dict[Node, Node] = {}
    for n in toposort(roots):
        made[n] = _power(n, [made[s] for s in n.src])
    return tuple(made[r] for r in roots)


def _reduction(op: Reduce, n: Node, x: Node) -> Node:
    if all(x.shape[a] == 1 for a in op.axes):
        of_zero = n.dtype.is_float and op.fn in ("add", "mean")  # which -0, added to 0, comes to
        return reshape(map_("add", x, const(0.0, n.dtype)) if of_zero else x, n.shape)
    if n.dtype.is_float and n.dtype.bits < 32:
        return convert(Node(op, convert(x, F32)), n.dtype)
    return Node(op, x)


def _power(n: Node, src: Sequence[Node]) -> Node:
    """A float to the power of a small whole number, of 1/2 or of -1/2, in products, a root and a quotient; else the node."""
    if not isinstance(n.op, Map) or n.op.fn != "power":
        return n.with_src(src)
    x, exponent = src
    while isinstance(exponent.op, (Broadcast, Reshape)):
        exponent = exponent.src[0]
    if not isinstance(exponent.op, Const) or exponent.tensor.elements != 1 or n.dtype is not F32 or x.shape != n.shape:
        return n.with_src(src)
    y = float(exponent.op.data.tensor().reshape(()).item())
    if abs(y) not in POWERS:
        return n.with_src(src)
    if abs(y) == 0.5:  # of minus infinity a root is none
        value = map_("sqrt", map_("abs", x)) if y > 0 else map_("rsqrt", map_("abs", x))
        outside = map_("and", map_("less", x, const(0.0, F32)), map_("greater", x, const(-math.inf, F32)))
        return Node(Select(), outside, const(math.nan, F32), value)
    value = x
    for _ in range(int(abs(y)) - 1):
        value = map_("multiply", value, x)
    return value if y > 0 else map_("divide", const(1.0, F32), value)


def _padded(op: Pad, x: Node, fill: Node) -> Node:
    """A pad as a concatenation of `x` with repetitions of the fill value; cuts where the padding is negative.

    Raises:
        Unsupported: it pads between elements.
    """
    if any(i and d > 1 for i, d in zip(op.interior, x.shape, strict=True)):
        raise Unsupported("numbers between elements have no vector form")
    fill = reshape(fill, (1,) * len(x.shape))
    for axis, (low, high) in enumerate(zip(op.low, op.high, strict=True)):
        edges = [
            broadcast(fill, (*x.shape[:axis], count, *x.shape[axis + 1 :])) if count > 0 else None for count in (low, high)
        ]
        parts = [part for part in (edges[0], x, edges[1]) if part is not None]
        x = Node(Concat(axis), *parts) if len(parts) > 1 else x
        x = slice_(x, axis, max(-low, 0), x.shape[axis] + min(high, 0))  # last: a side may cut more than there was of x
    return x


def _picked(op: Gather, table: Node, index: Node) -> Node:
    """Elements of a table by index, picked from the sources it is computed from, where no more is computed then."""
    axis = op.axis
    grows = math.prod(index.shape) > table.shape[axis]
    if grows or not isinstance(table.op, (Map, Convert, Select)):
        return Node(op, table, index)
    found: list[Node] = []
    for s in table.src:
        mine = axis - (len(table.shape) - len(s.shape))
        if mine < 0:
            found.append(s)
        elif s.shape[mine] != table.shape[axis]:
            found.append(reshape(s, (*s.shape[:mine], *(1 for _ in index.shape), *s.shape[mine + 1 :])))
        else:
            found.append(_picked(replace(op, axis=mine), s, index))
    return table.with_src(found)


def _over(x: Node, fn: str, axes: tuple[int, ...]) -> Node:
    return _reduction(op := Reduce(fn, axes, True), Node(op, x), x)  # type: ignore[arg-type]


def _norm(op: LayerNorm, n: Node, src: Sequence[Node]) -> Node:
    if n.dtype.bits > 32:
        raise Unsupported(f"{n.dtype} has no vectors here")
    x, *more = (convert(s, F32) for s in src)
    axes = tuple(range(op.axis % len(n.shape), len(n.shape)))
    if op.center:
        x = map_("subtract", x, _over(x, "mean", axes))
    variance = _over(map_("multiply", x, x), "mean", axes)
    y = map_("multiply", x, map_("rsqrt", map_("add", variance, const(op.epsilon, F32))))
    for fn, side in zip(("multiply", "add"), more, strict=False):
        y = map_(fn, y, side)
    return convert(y, n.dtype)


def _softmax(op: Softmax, n: Node, x: Node) -> Node:
    if n.dtype.bits > 32:
        raise Unsupported(f"{n.dtype} has no vectors here")
    axes = (op.axis % len(n.shape),)
    x = convert(x, F32)
    below = map_("subtract", x, _over(x, "maximum", axes))
    weight = map_("exponential", below)
    if op.log:
        return convert(map_("subtract", below, map_("log", _over(weight, "add", axes))), n.dtype)
    return convert(map_("multiply", weight, map_("divide", const(1.0, F32), _over(weight, "add", axes))), n.dtype)


def param_per_access(roots: Sequence[Node]) -> tuple[list[Node], tuple[int, ...]]:
    """The expressions with a param of its own for each arrangement in which a source is read, and whose each is. Sources are
    dense: a reshape of one is a param of that shape."""
    order = toposort(roots)
    chains: set[Node] = set()
    tops: dict[Node, None] = dict.fromkeys(r for r in roots)
    for n in order:
        if isinstance(n.op, Param) or (isinstance(n.op, VIEWS) and n.src[0] in chains):
            chains.add(n)
        else:
            tops.update(dict.fromkeys(n.src[1:] if isinstance(n.op, Gather) else n.src))
    sources: list[int] = []

    def source(top: Node) -> Node:
        """A new param under the views of another."""
        leaf, views = top, list[Node]()
        while leaf.src:
            views.append(leaf)
            leaf = leaf.src[0]
        assert isinstance(leaf.op, Param)
        value = Node(Param(len(sources), leaf.tensor))
        sources.append(leaf.op.index)
        for view in reversed(views):
            reshapes = isinstance(view.op, Reshape) and isinstance(value.op, Param)
            value = Node(Param(len(sources) - 1, view.tensor)) if reshapes else Node(view.op, value)
        return value

    moved: dict[Node, Node] = {}
    for n in order:
        if n in chains:
            if n in tops:
                moved[n] = source(n)
            continue
        picks = isinstance(n.op, Gather) and n.src[0] in chains  # a table of its own
        moved[n] = n.with_src([source(s) if picks and i == 0 else moved[s] for i, s in enumerate(n.src)])
    return [moved[r] for r in roots], tuple(sources)
