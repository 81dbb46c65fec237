"""Taking apart products that a model joined by hand, so that each part can carry its own tail; `siblings` joins again."""

from __future__ import annotations

import math
from itertools import pairwise

from tilewright.ir.anchor import ANCHORS, operands_of, stores_of
from tilewright.ir.build import slice_
from tilewright.ir.expression import ELEMENTWISE, Sources, make_gemm, slice_columns
from tilewright.ir.graph import Node, substitute
from tilewright.ir.ops import Acc, Convert, Dequantize, Gemm, Param, Reshape, Slice, Transpose
from tilewright.ir.pattern import Match, Pat, rule
from tilewright.ir.types import reshape_groups

LOOK_UP = 64  # operations looked at on the way from a slice up to the product it cuts

Cut = tuple[int, int, int]  # axis, start, stop


def one_axis(node: Node) -> Cut | None:
    """The axis, start and stop of a slice that cuts one axis without stepping; None for any other."""
    op = node.op
    if not isinstance(op, Slice) or any(step != 1 for step in op.step):
        return None
    cut = [a for a, d in enumerate(node.src[0].shape) if (op.start[a], op.stop[a]) != (0, d)]
    return (cut[0], op.start[cut[0]], op.stop[cut[0]]) if len(cut) == 1 else None


def only_cut_apart(m: Match, node: Node, but: Node | None = None) -> bool:
    """Tell whether everything that reads `node` (leaving out `but`) is a slice of one and the same axis, and no two overlap:
    slicing earlier then does the same work."""
    found: list[Cut] = []
    for reader in m.users[node]:
        if reader is not None and reader is but:
            continue
        cut = None if reader is None else one_axis(reader)
        if cut is None:
            return False
        found.append(cut)
    found.sort()
    same_axis = len({axis for axis, _, _ in found}) <= 1
    return same_axis and all(a[2] <= b[1] for a, b in pairwise(found))


@rule(Pat(Slice, (Pat((*ELEMENTWISE, Transpose, Reshape), name="x"),)), stage="unfuse")
def slice_before_what_does_not_mix(m: Match) -> Node | None:
    """slice(f(x, s)) -> f(slice(x), slice(s)), f elementwise, a transpose, or a reshape that keeps the axis.

    Where: for f elementwise, all that reads it are slices of one axis that do not overlap, and it follows a product that can be
    cut likewise, or it is a cast or dequantisation and only products, which fold it, read what is cut; anything else is left
    whole. f of constants, a transpose or a reshape: always, they cost nothing at run time. Exact: yes.
    """
    cut, x = one_axis(m.node), m["x"]
    if cut is None:
        return None
    if isinstance(x.op, (Transpose, Reshape)):
        earlier = _through(x, cut)
        if earlier is None:
            return None
        inner = slice_(x.src[0], *earlier)
        return Node(x.op, inner) if isinstance(x.op, Transpose) else Node(Reshape(m.node.shape), inner)
    if not (x.constant or _only_products_fold(m, x) or _follows_a_product(m, x, cut)):
        return None
    if not x.constant and not only_cut_apart(m, x):
        m.refuse("what it is cut from is also read otherwise")
        return None
    if getattr(x.op, "block", None) is not None:
        m.refuse("its scale is given per block")
        return None
    return Node(x.op, *(s if c is None else slice_(s, *c) for s, c in zip(x.src, _cuts(x, cut), strict=True)))


def _cuts(x: Node, cut: Cut) -> list[Cut | None]:
    """The cut of each operand of an elementwise operation; None for one that does not vary along the axis."""
    axis, start, stop = cut
    found: list[Cut | None] = []
    for s in x.src:
        at = axis - (len(x.shape) - len(s.shape))
        found.append((at, start, stop) if at >= 0 and s.shape[at] == x.shape[axis] else None)
    return found


def _through(view: Node, cut: Cut) -> Cut | None:
    """The cut of a transpose's or reshape's source that gives this cut of its result; None if no one run of an axis does.

    Of a reshape: the cut axis is the leading one of its group, and its ends fall on whole steps of the source's leading axis.
    """
    axis, start, stop = cut
    if isinstance(view.op, Transpose):
        return view.op.perm[axis], start, stop
    before = view.src[0].shape
    for old, new in reshape_groups(before, view.shape) or ():
        if axis not in new:
            continue
        if axis != new[0] or not old:
            return None
        inner, tail = math.prod(view.shape[a] for a in new[1:]), math.prod(before[a] for a in old[1:])
        if (start * inner) % tail or (stop * inner) % tail:
            return None
        return old[0], start * inner // tail, stop * inner // tail
    return None


def _only_products_fold(m: Match, x: Node) -> bool:
    """Tell whether x is something that an operand can hold, and only products read the slice of it."""
    if not isinstance(x.op, (Convert, Dequantize)):
        return False
    return all(r is not None and isinstance(r.op, ANCHORS) for r in m.users[m.node])


def _follows_a_product(m: Match, x: Node, cut: Cut) -> bool:
    """Tell whether some way up from x leads to a gemm whose last axis this cut is, past nothing that is read otherwise."""
    pending: list[tuple[Node, Cut]] = [(x, cut)]
    for _ in range(LOOK_UP):
        if not pending:
            break
        n, here = pending.pop()
        if isinstance(n.op, (Transpose, Reshape)):
            above = [(n.src[0], _through(n, here))]
        else:
            above = list(zip(n.src, _cuts(n, here), strict=True))
        for s, c in above:
            if c is None or not only_cut_apart(m, s, n):
                continue
            if isinstance(s.op, Gemm):
                if c[0] == len(s.shape) - 1 and s.shape == s.op.acc_type.shape:
                    return True
            elif isinstance(s.op, (*ELEMENTWISE, Transpose, Reshape)):
                pending.append((s, c))
    return False


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
