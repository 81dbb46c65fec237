"""Taking apart what a model joined by hand, so that each part can carry its own tail; `siblings` joins again."""

from __future__ import annotations

from itertools import pairwise

from tilewright.ir.build import slice_
from tilewright.ir.carrier import operands_of, stores_of
from tilewright.ir.expression import ELEMENTWISE, Sources, make_gemm, reshape_groups, slice_columns
from tilewright.ir.graph import Node, substitute
from tilewright.ir.ops import Acc, Gemm, Param, Reshape, Slice, Transpose
from tilewright.ir.pattern import Match, Pat, rule


def one_axis(node: Node) -> tuple[int, int, int] | None:
    """The axis, start and stop of a slice that cuts one axis without stepping; None for any other."""
    op = node.op
    if not isinstance(op, Slice) or any(step != 1 for step in op.step):
        return None
    cut = [a for a, d in enumerate(node.src[0].shape) if (op.start[a], op.stop[a]) != (0, d)]
    return (cut[0], op.start[cut[0]], op.stop[cut[0]]) if len(cut) == 1 else None


def only_cut_apart(m: Match, node: Node) -> bool:
    """Whether everything that reads `node` is a slice of one and the same axis, and no two overlap: slicing earlier then does
    the same work."""
    found: list[tuple[int, int, int]] = []
    for reader in m.users[node]:
        cut = None if reader is None else one_axis(reader)
        if cut is None:
            return False
        found.append(cut)
    found.sort()
    same_axis = len({axis for axis, _, _ in found}) == 1
    return same_axis and all(a[2] <= b[1] for a, b in pairwise(found))


@rule(Pat(Slice, (Pat((*ELEMENTWISE, Transpose, Reshape), name="x"),)), stage="unfuse")
def slice_before_what_does_not_mix(m: Match) -> Node | None:
    """slice(f(x, s)) -> f(slice(x), slice(s)), f elementwise, a transpose, or a reshape that keeps the axis.

    Where: all that reads f are slices of one axis that do not overlap (for a transpose or reshape, always: they cost nothing).
    Exact: yes.
    """
    cut, x = one_axis(m.node), m["x"]
    if cut is None:
        return None
    axis, start, stop = cut
    if isinstance(x.op, Transpose):
        return Node(x.op, slice_(x.src[0], x.op.perm[axis], start, stop))
    if isinstance(x.op, Reshape):
        return _slice_before_reshape(m.node, x, axis, start, stop)
    if not only_cut_apart(m, x):
        m.refuse("what it is cut from is also read otherwise")
        return None
    if getattr(x.op, "block", None) is not None:
        m.refuse("its scale is given per block")
        return None
    rank = len(x.shape)
    src: list[Node] = []
    for s in x.src:
        at = axis - (rank - len(s.shape))
        varies = at >= 0 and s.shape[at] != 1
        src.append(slice_(s, at, start, stop) if varies else s)
    return Node(x.op, *src)


def _slice_before_reshape(node: Node, x: Node, axis: int, start: int, stop: int) -> Node | None:
    """The slice moved before a reshape, if the cut axis, or the leading one of its group, is kept in proportion."""
    before = x.src[0].shape
    for old, new in reshape_groups(before, x.shape) or ():
        if axis not in new:
            continue
        if axis != new[0] or not old:
            return None
        inner = 1
        for a in new[1:]:
            inner *= x.shape[a]
        tail = 1
        for a in old[1:]:
            tail *= before[a]
        if (start * inner) % tail or (stop * inner) % tail:
            return None
        return Node(Reshape(node.shape), slice_(x.src[0], old[0], start * inner // tail, stop * inner // tail))
    return None


@rule(Pat(Slice, (Pat(Gemm, name="gemm"),)), stage="unfuse")
def slice_of_gemm_is_gemm_of_slice(m: Match) -> Node | None:
    """slice_N(gemm(a, b)) -> gemm(a, slice_N(b)).

    Where: all that reads the gemm are slices of its last axis that do not overlap, so that no column is computed twice; its
    one store is elementwise. Exact: yes.
    """
    cut, gemm = one_axis(m.node), m["gemm"]
    op = gemm.op
    assert isinstance(op, Gemm)
    if cut is None or cut[0] != len(gemm.shape) - 1 or gemm.shape != op.acc_type.shape:
        return None
    if not only_cut_apart(m, gemm):
        m.refuse("the gemm is also read otherwise than cut by columns")
        return None
    _, start, stop = cut
    acc = Node(Acc(op.acc_type))
    (store,) = stores_of(gemm)
    lhs, rhs = operands_of(gemm)
    sources = Sources(gemm.src)
    if isinstance(rhs.op, Param):  # cut outside, where what made the operand can be cut in turn
        narrow_rhs = sources.param(slice_(gemm.src[rhs.op.index], -1, start, stop))
    else:
        narrow_rhs = slice_(rhs, -1, start, stop)
    part = slice_columns(store, start, stop, op.acc_type.shape[-1], acc)
    if part is None:
        m.refuse("its store rearranges the product")
        return None
    narrow_acc = Node(Acc(Gemm(op.acc_dtype, lhs, narrow_rhs, ()).acc_type))
    (part,) = substitute((part,), {slice_(acc, -1, start, stop): narrow_acc})
    return make_gemm(op.acc_dtype, lhs, narrow_rhs, (part,), sources.nodes)
