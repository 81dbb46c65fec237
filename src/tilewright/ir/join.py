"""Putting expressions side by side: one operand for several gemms."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.ir.build import broadcast, slice_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Concat, Const, Convert, Dequantize, Quantize, Slice, Transpose
from tilewright.ir.types import normalize_axis


def join(parts: Sequence[Node], axis: int) -> Node:
    """concat(parts) along `axis`, with what the parts share pulled out of it.

    concat(f(x1), f(x2)) -> f(concat(x1, x2)) for a cast, transpose or dequantisation; adjacent slices of one value become one
    slice, and all of them the value itself. Exact: nothing is computed differently.
    """
    if len(parts) == 1:
        return parts[0]
    axis = normalize_axis(axis, len(parts[0].shape), "join")
    whole = _adjacent(parts, axis)
    if whole is not None:
        return whole
    op = parts[0].op
    same = all(p.op == op and len(p.src) == len(parts[0].src) for p in parts)
    if same and isinstance(op, Transpose):
        return Node(op, join([p.src[0] for p in parts], op.perm[axis]))
    if same and isinstance(op, Convert):
        return Node(op, join([p.src[0] for p in parts], axis))
    if same and isinstance(op, (Dequantize, Quantize)) and (op.block is None or op.block[axis] == 1):
        codes = join([p.src[0] for p in parts], axis)
        scales = [_join_scales(parts, i, axis) for i in range(1, len(parts[0].src))]
        return Node(op, codes, *scales)
    return Node(Concat(axis), *parts)


def _adjacent(parts: Sequence[Node], axis: int) -> Node | None:
    """The value, or one slice of it, of which the parts are slices that follow each other along `axis`."""
    ops = [p.op for p in parts]
    if not all(isinstance(o, Slice) for o in ops) or len({p.src[0] for p in parts}) != 1:
        return None
    slices = [o for o in ops if isinstance(o, Slice)]
    base = parts[0].src[0]
    for i, s in enumerate(slices):
        if any(by != 1 for by in s.step) or (i and s.start[axis] != slices[i - 1].stop[axis]):
            return None
        if any((s.start[a], s.stop[a]) != (0, d) for a, d in enumerate(base.shape) if a != axis):
            return None
    return slice_(base, axis, slices[0].start[axis], slices[-1].stop[axis])


def _join_scales(parts: Sequence[Node], i: int, axis: int) -> Node:
    """Scales (or zero points) of the parts, for the joined value."""
    scales = [p.src[i] for p in parts]
    rank = len(parts[0].shape)
    at = axis - (rank - len(scales[0].shape))
    varies = [at >= 0 and s.shape[at] != 1 for s in scales]
    if len(set(scales)) == 1 and not any(varies):
        return scales[0]
    full: list[Node] = []
    for part, s in zip(parts, scales, strict=True):
        shape = [1] * (rank - len(s.shape)) + list(s.shape)
        shape[axis] = part.shape[axis]
        full.append(broadcast(s, shape))
    return join(full, axis)


def is_joined(node: Node) -> bool:
    """Whether an operand holds several values side by side."""
    while not isinstance(node.op, Concat):
        if not node.src or isinstance(node.op, Const):
            return False
        node = node.src[0]
    return True
