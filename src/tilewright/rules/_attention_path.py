"""Finding softmax attention in a graph: two products, a softmax between them, and where queries, keys and heads lie.

From the second product the softmax is looked for upwards, and from it the first product, through views, casts, guards, masks
and quantisation. Axes are then named by what they are to the products, not by where a program happened to put them, so that
batches of matrices, merged heads, grouped queries and transposed products are all one case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.dtype import DType
from tilewright.ir.axes import (
    Axis,
    Layout,
    Placed,
    axes_of,
    broadcast_aligned,
    layout_of,
    propagate_to_source,
    propagate_to_user,
)
from tilewright.ir.constant import is_rounding, scalar_value
from tilewright.ir.expression import REARRANGE
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Convert, Dequantize, Gemm, Map, Param, Quantize, Select, Softmax

MAX_STEPS = 16
MAX_LOOKS = 48


@dataclass(frozen=True)
class Step:
    """An operation on the way: the node, and which of its sources the way goes through."""

    node: Node
    at: int

    @property
    def source(self) -> Node:
        """The source that the way goes through."""
        return self.node.src[self.at]

    @property
    def others(self) -> list[Node]:
        """The sources that the way does not go through."""
        return [s for i, s in enumerate(self.node.src) if i != self.at]

    @property
    def is_nan_guard(self) -> bool:
        """Tell whether it is select(is_nan(w), 0, w), with which an exporter makes the softmax of a row that sees nothing 0."""
        if not isinstance(self.node.op, Select) or self.at != 2 or scalar_value(self.node.src[1]) != 0:
            return False
        test = self.node.src[0]
        return isinstance(test.op, Map) and test.op.fn == "is_nan" and test.src[0] is self.source


@dataclass(frozen=True)
class Applied:
    """A step that computes: its sources other than the one on the way, where they lie; None for a number."""

    step: Step
    sides: tuple[Placed | None, ...]


@dataclass(frozen=True)
class Found:
    """Attention as it stands in the graph.

    Attributes:
        query, key, value: operands of the products; `value` and `key` lie along the same keys.
        scores, weights: operations on the first product, and on the softmax, in order of execution.
        product: layout of the first product, [*batch, rows, columns].
        keys, depth, value_depth: axes of the softmax, of the sums of the first product, and of values alone.
        out, out_dtype: layout and type of the second product's result.
        inside: everything that stands between the operands and the second product.
    """

    query: Placed
    key: Placed
    value: Placed
    scores: list[Applied]
    weights: list[Applied]
    product: Layout
    keys: tuple[Axis, ...]
    depth: tuple[Axis, ...]
    value_depth: tuple[Axis, ...]
    out: Layout
    out_dtype: DType
    inside: list[Node]


def plain(node: Node) -> DType | None:
    """The type a float gemm stores, if it multiplies its two sources as they are and stores the product alone."""
    op = node.op
    if not isinstance(op, Gemm) or len(op.stores) != 1 or not op.acc_dtype.is_float:
        return None
    if not (isinstance(op.lhs.op, Param) and isinstance(op.rhs.op, Param) and (op.lhs.op.index, op.rhs.op.index) == (0, 1)):
        return None
    store = op.stores[0]
    inner = store.src[0] if isinstance(store.op, Convert) else store
    return store.dtype if isinstance(inner.op, Acc) and store.dtype.is_float else None


def find(second: Node) -> Found | None:
    """The attention that ends in the product `second`, or None."""
    if plain(second) is None or 0 in second.shape:
        return None
    for at in (0, 1):
        down = _way(second.src[at], lambda n: isinstance(n.op, Softmax) and not n.op.log)
        if down is None:
            continue
        softmax = down[-1].source if down else second.src[at]
        up = _way(softmax.src[0], lambda n: plain(n) is not None)
        found = _placed(second, at, down, softmax, up) if up is not None else None
        if found is not None:
            return found
    return None


def _way(start: Node, wanted: Callable[[Node], bool]) -> list[Step] | None:
    """The steps from `start` up to a wanted node, nearest the start first; empty if `start` is wanted itself."""
    stack: list[tuple[Node, list[Step]]] = [(start, [])]
    seen: set[Node] = set()
    while stack:
        node, steps = stack.pop()
        if wanted(node):
            return steps
        if node in seen or len(steps) >= MAX_STEPS or len(seen) >= MAX_LOOKS:
            continue
        seen.add(node)
        stack.extend((node.src[i], [*steps, Step(node, i)]) for i in reversed(_onward(node)))
    return None


def _onward(node: Node) -> Sequence[int]:
    """The sources of `node`, by index, that scores or weights may come from."""
    op = node.op
    if isinstance(op, REARRANGE):
        return (0,)
    if isinstance(op, Convert):
        types = (node.dtype, node.src[0].dtype)
        codes = all(d.is_float for d in types) and min(d.bits for d in types) <= 8
        return (0,) if codes or is_rounding(node) else ()
    if isinstance(op, (Quantize, Dequantize)):
        return (0,) if op.block is None else ()
    if isinstance(op, (Map, Select)) and node.dtype.is_float:
        first = 1 if isinstance(op, Select) else 0
        return [i for i in range(first, len(node.src)) if node.src[i].shape == node.shape and scalar_value(node.src[i]) is None]
    return ()


def _placed(second: Node, at: int, down: list[Step], softmax: Node, up: list[Step]) -> Found | None:
    """The parts with their axes, if the softmax is over what both products make of keys."""
    assert isinstance(softmax.op, Softmax)
    first = up[-1].source if up else softmax.src[0]
    layout = layout_of(softmax.shape)
    keys = layout[softmax.op.axis % len(layout)] if layout else ()
    scores = _along(up, layout, propagate_to_source)
    weights = _along(down[::-1], layout, propagate_to_user)
    if scores is None or weights is None or 0 in (*first.src[0].shape, *first.src[1].shape):
        return None
    operands = _first_operands(first, scores[1], keys)
    last = _second_operand(second, at, weights[1], keys)
    if operands is None or last is None:
        return None
    guards = [s.node.src[0] for s in down if s.is_nan_guard]
    query, key, depth = operands
    value, value_depth, out = last
    dtype = plain(second)
    assert dtype is not None
    inside = [first, *(s.node for s in up), softmax, *(s.node for s in down), *guards]
    beside = [second.src[1 - at], *(n for s in (*up, *down) if not s.is_nan_guard for n in s.others)]
    if any(n in inside for n in beside):
        return None  # what is computed between is needed for itself
    return Found(query, key, value, scores[0][::-1], weights[0], scores[1], keys, depth, value_depth, out, dtype, inside)


def _applied(step: Step, layout: Layout) -> Applied | None:
    """The step with its sides placed, for a result of `layout`."""
    sides: list[Placed | None] = []
    for i, side in enumerate(step.node.src):
        if i == step.at or step.is_nan_guard or scalar_value(side) is not None:
            sides.append(None)
            continue
        lies = broadcast_aligned(side.shape, layout)
        if lies is None:
            return None
        sides.append(Placed(side, lies).without_views())
    return Applied(step, tuple(sides))


def _along(
    steps: Sequence[Step], layout: Layout, past_view: Callable[[Node, Layout], Layout | None]
) -> tuple[list[Applied], Layout] | None:
    """The steps with their sides placed, taken in this order from a value of `layout` on, and the layout of the last one's end.

    `past_view` says how a value lies on the other side of a view; None if a view breaks the layout, or a side does not fit it.
    """
    done: list[Applied] = []
    for step in steps:
        if isinstance(step.node.op, REARRANGE):
            beyond = past_view(step.node, layout)
            if beyond is None:
                return None
            layout = beyond
        else:
            applied = _applied(step, layout)
            if applied is None:
                return None
            done.append(applied)
    return done, layout


def _fresh(extent: int) -> tuple[Axis, ...]:
    return (Axis(extent),) if extent > 1 else ()


def _first_operands(first: Node, product: Layout, keys: tuple[Axis, ...]) -> tuple[Placed, Placed, tuple[Axis, ...]] | None:
    """Query and key, whichever operand they are, and the axis their product sums over."""
    lhs, rhs = first.src
    rows, columns = product[-2:]
    depth = _fresh(lhs.shape[-1])
    left, right = (broadcast_aligned(s.shape[:-2], product[:-2]) for s in (lhs, rhs))
    if left is None or right is None:
        return None
    on_left, on_right = Placed(lhs, (*left, rows, depth)), Placed(rhs, (*right, depth, columns))
    if axes_of((columns,)) == axes_of((keys,)):
        return on_left, on_right, depth
    return (on_right, on_left, depth) if axes_of((rows,)) == axes_of((keys,)) else None


def _second_operand(
    second: Node, at: int, weights: Layout, keys: tuple[Axis, ...]
) -> tuple[Placed, tuple[Axis, ...], Layout] | None:
    """Value, the axis it adds, and the layout of the product, for weights that are operand `at` of it."""
    value = second.src[1 - at]
    batch = broadcast_aligned(value.shape[:-2], weights[:-2])
    summed, rows = (weights[-1], weights[-2]) if at == 0 else (weights[-2], weights[-1])
    if batch is None or axes_of((summed,)) != axes_of((keys,)):
        return None
    depth = _fresh(value.shape[-1 if at == 0 else -2])
    if at == 0:
        return Placed(value, (*batch, summed, depth)), depth, (*weights[:-2], rows, depth)
    return Placed(value, (*batch, depth, summed)), depth, (*weights[:-2], depth, rows)
