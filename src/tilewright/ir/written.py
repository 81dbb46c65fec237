"""Expressions as rows take them: norms and softmaxes written out, each arrangement of a source a source of its own."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.dtype import F32
from tilewright.ir.access import Unsupported
from tilewright.ir.build import const, convert, map_, reshape
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import VIEWS, LayerNorm, Param, Reduce, Reshape, Softmax


def written_out(roots: Sequence[Node]) -> list[Node]:
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
        else:
            made[n] = n.with_src(src)
    return [made[r] for r in roots]


def _reduction(op: Reduce, n: Node, x: Node) -> Node:
    if all(x.shape[a] == 1 for a in op.axes):
        return reshape(x, n.shape)
    if n.dtype.is_float and n.dtype.bits < 32:
        return convert(Node(op, convert(x, F32)), n.dtype)
    return Node(op, x)


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


def apart(roots: Sequence[Node]) -> tuple[list[Node], tuple[int, ...]]:
    """The expressions with a param of its own for each arrangement in which a source is read, and whose each is. Sources are
    dense: a reshape of one is a param of that shape."""
    order = toposort(roots)
    chains: set[Node] = set()
    tops: dict[Node, None] = dict.fromkeys(r for r in roots)
    for n in order:
        if isinstance(n.op, Param) or (isinstance(n.op, VIEWS) and n.src[0] in chains):
            chains.add(n)
        else:
            tops.update(dict.fromkeys(n.src))
    replaced: dict[Node, Node] = {}
    sources: list[int] = []
    for top in tops:
        if top not in chains:
            continue
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
        replaced[top] = value
    return substitute(roots, replaced), tuple(sources)
