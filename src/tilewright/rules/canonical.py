"""One spelling for what can be spelt several ways: operations that change nothing, and several where one does."""

from __future__ import annotations

import torch

from tilewright.dtype import F32
from tilewright.ir.build import broadcast, reshape, transpose
from tilewright.ir.constant import constant_value
from tilewright.ir.graph import Node
from tilewright.ir.ops import (
    VIEWS,
    Broadcast,
    Concat,
    Const,
    Convert,
    Dequantize,
    Gather,
    Map,
    Quantize,
    Reshape,
    Select,
    Slice,
    Transpose,
)
from tilewright.ir.pattern import Match, Pat, rule

LONGEST_RUN = 1 << 16  # indices looked at


@rule(Pat((Reshape, Broadcast, Convert), where=lambda n: n.type == n.src[0].type), stage="canonical")
def drop_what_changes_nothing(m: Match) -> Node | None:
    """reshape | broadcast | convert (x) -> x

    Where: the type stays the same. Exact: yes.
    """
    return m.node.src[0]


@rule(Pat(Concat, where=lambda n: len(n.src) == 1 or any(0 in s.shape for s in n.src)), stage="canonical")
def drop_concat_of_nothing(m: Match) -> Node | None:
    """concat(x, nothing) -> x; concat(x) -> x; concat(x, nothing, y) -> concat(x, y)

    Where: nothing is a source without extent along the axis. Exact: yes. Exporters write the one step of a recurrence so.
    """
    op, src = m.node.op, m.node.src
    assert isinstance(op, Concat)
    kept = [s for s in src if s.shape[op.axis]] or [src[0]]
    if len(kept) == len(src) > 1:
        return None
    return Node(op, *kept) if len(kept) > 1 else kept[0]


@rule(Pat(Gather, where=lambda n: n.src[1].constant), stage="canonical")
def gather_of_a_run_is_a_slice(m: Match) -> Node | None:
    """gather(x, [i, i + step, i + 2 step, …]) -> reshape(slice(x)); one index is a run, too

    Where: the indices are constants that ascend evenly, whole slices are picked, and none lies outside. Exact: yes. Exporters
    write `qkv[0]`, `qkv[1]`, `qkv[2]` so.
    """
    op, (x, index) = m.node.op, m.node.src
    assert isinstance(op, Gather)
    value = None if op.elementwise or index.tensor.elements == 0 else constant_value(index, max_elements=LONGEST_RUN)
    if value is None:
        return None
    axis, extent = op.axis % len(x.shape), x.shape[op.axis]
    at = [i + extent if i < 0 and op.wraps else i for i in value.reshape(-1).to(torch.int64).tolist()]
    step = at[1] - at[0] if len(at) > 1 else 1
    if step < 1 or at != [at[0] + k * step for k in range(len(at))] or not 0 <= at[0] <= at[-1] < extent:
        return None
    start, stop, by = [0] * len(x.shape), [*x.shape], [1] * len(x.shape)
    start[axis], stop[axis], by[axis] = at[0], at[-1] + 1, step
    return reshape(Node(Slice(tuple(start), tuple(stop), tuple(by)), x), m.node.shape)


@rule(Pat(Transpose), stage="canonical")
def drop_transpose_in_order(m: Match) -> Node | None:
    """transpose(x, 0 1 2 …) -> x. Exact: yes."""
    op = m.node.op
    assert isinstance(op, Transpose)
    return m.node.src[0] if list(op.perm) == list(range(len(op.perm))) else None


@rule(Pat(Slice, where=lambda n: n.type == n.src[0].type), stage="canonical")
def drop_slice_of_everything(m: Match) -> Node | None:
    """slice(x, all of it) -> x

    Where: the extents stay; a step above 1 can only stand on an axis of one element. Exact: yes.
    """
    return m.node.src[0]


@rule(Pat(Reshape, (Pat(Reshape, name="inner"),)), stage="canonical")
def join_reshapes(m: Match) -> Node | None:
    """reshape(reshape(x)) -> reshape(x). Exact: yes."""
    return reshape(m["inner"].src[0], m.node.shape)


@rule(Pat(Transpose, (Pat(Transpose, name="inner"),)), stage="canonical")
def join_transposes(m: Match) -> Node | None:
    """transpose(transpose(x, p), q) -> transpose(x, p[q]). Exact: yes."""
    outer, inner = m.node.op, m["inner"].op
    assert isinstance(outer, Transpose) and isinstance(inner, Transpose)
    return transpose(m["inner"].src[0], [inner.perm[q] for q in outer.perm])


@rule(Pat((Map, Select), where=lambda n: any(isinstance(s.op, Broadcast) for s in n.src)), stage="canonical")
def broadcast_inside_the_function(m: Match) -> Node | None:
    """map(x, broadcast(y)) -> map(x, y)

    Where: the operands left still span the result's shape. Exact: yes, `map` and `select` broadcast by the same rule.
    """
    src = [s.src[0] if isinstance(s.op, Broadcast) else s for s in m.node.src]
    for i, original in enumerate(m.node.src):
        trial = Node(m.node.op, *src)
        if trial.type == m.node.type:
            return trial
        src[i] = original
    return None


@rule(Pat((Map, Select), where=lambda n: any(isinstance(s.op, Broadcast) for s in n.src)), stage="canonical")
def function_before_the_broadcast(m: Match) -> Node | None:
    """map(broadcast(x), number) -> broadcast(map(x, number))

    Where: what is left of the operands without their broadcasts is smaller than the result; `select` likewise. A mask of keys
    is then one row for all queries. Exact: yes, each element is computed once instead of wherever it is repeated.
    """
    small = Node(m.node.op, *(s.src[0] if isinstance(s.op, Broadcast) else s for s in m.node.src))
    return broadcast(small, m.node.shape) if small.tensor.elements < m.node.tensor.elements else None


@rule(Pat((Quantize, Dequantize), where=lambda n: len(n.src) == 3), stage="canonical")
def drop_zero_point_of_zero(m: Match) -> Node | None:
    """quantize(x, s, 0) -> quantize(x, s); dequantize likewise.

    Where: the zero point is a constant, zero everywhere. Exact: yes.
    """
    zero = m.node.src[2]
    while isinstance(zero.op, (Reshape, Transpose, Broadcast, Slice)):
        zero = zero.src[0]
    if not isinstance(zero.op, Const) or bool(zero.op.data.tensor().to(torch.float32).any()):
        return None
    return Node(m.node.op, *m.node.src[:2])


@rule(Pat(Quantize, where=lambda n: getattr(n.op, "block", None) is None and n.src[0].dtype is F32), stage="canonical")
def quantising_what_was_dequantised_alike_gives_the_codes(m: Match) -> Node | None:
    """quantize(dequantize(codes, s, z), s, z) -> codes; through views if s and z are one value each.

    Where: the same type of integers of at most 16 bits; s is constant, each value between 2**-64 and 2**64 in magnitude. Exact:
    yes, the quotient is within 2**-22 of codes - z, by its size, and rounds to it. Quantisers write it around what moves data.
    """
    value, views = m.node.src[0], list[Node]()
    while isinstance(value.op, VIEWS):
        views.append(value)
        value = value.src[0]
    op, (scale, *_) = value.op, m.node.src[1:]
    if not isinstance(op, Dequantize) or op.block is not None or value.src[1:] != m.node.src[1:]:
        return None
    if value.src[0].dtype is not m.node.dtype or not m.node.dtype.is_integer or m.node.dtype.bits > 16:
        return None
    if views and any(t.tensor.elements != 1 for t in m.node.src[1:]):
        return None
    known = constant_value(scale, LONGEST_RUN)
    if known is None or not bool(((known.abs() >= 2.0**-64) & (known.abs() <= 2.0**64)).all()):
        return None
    codes = value.src[0]
    for view in reversed(views):
        codes = Node(view.op, codes)
    return codes
