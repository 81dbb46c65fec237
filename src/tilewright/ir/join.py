"""Putting expressions side by side: one operand for several gemms."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.dtype import DType
from tilewright.ir.build import broadcast, slice_
from tilewright.ir.graph import Node, Op
from tilewright.ir.ops import Concat, Convert, Dequantize, Quantize, Reshape, Slice, Transpose
from tilewright.ir.types import normalize_axis, reshape_groups

Manner = tuple[tuple[Op | type[Op], tuple[tuple[DType, int], ...]] | DType, ...]


def manner_of(root: Node) -> Manner:
    """The way in which an operand is read, whatever its data and width: the operations on it and the types that they read.

    Parts of one manner stand side by side under one copy of these operations.
    """
    found: list[tuple[Op | type[Op], tuple[tuple[DType, int], ...]]] = []
    node = root
    while isinstance(node.op, (Slice, Reshape, Transpose, Convert, Dequantize, Quantize)):
        if not isinstance(node.op, Slice):
            found.append((Reshape if isinstance(node.op, Reshape) else node.op, _read_types(node)))
        node = node.src[0]
    return (*found, node.dtype)


def join(parts: Sequence[Node], axis: int) -> Node:
    """concat(parts) along `axis`, with what the parts share pulled out of it.

    concat(f(x1), f(x2)) -> f(concat(x1, x2)) for a cast, transpose, reshape or dequantisation; adjacent slices of one value
    become one slice, and all of them the value itself. Exact: nothing is computed differently.
    """
    axis = normalize_axis(axis, len(parts[0].shape), "join")
    parts = _adjacent_as_one(parts, axis)
    if len(parts) == 1:
        return parts[0]
    op = parts[0].op
    if not isinstance(op, (Reshape, Transpose, Convert, Dequantize, Quantize)) or any(
        type(p.op) is not type(op) for p in parts
    ):
        return Node(Concat(axis), *parts)
    if any(_read_types(p) != _read_types(parts[0]) for p in parts):
        return Node(Concat(axis), *parts)
    if isinstance(op, Reshape):
        return _join_reshapes(parts, axis) or Node(Concat(axis), *parts)
    if any(p.op != op for p in parts):
        return Node(Concat(axis), *parts)
    if isinstance(op, Transpose):
        return Node(op, join([p.src[0] for p in parts], op.perm[axis]))
    if isinstance(op, Convert):
        return Node(op, join([p.src[0] for p in parts], axis))
    return _join_scaled(op, parts, axis)


def _read_types(part: Node) -> tuple[tuple[DType, int], ...]:
    return tuple((s.dtype, len(s.shape) if s is part.src[0] else 0) for s in part.src)


def _adjacent_as_one(parts: Sequence[Node], axis: int) -> list[Node]:
    """The parts, slices of one value that follow each other along `axis` made one slice, or the value if that is all of it."""
    found: list[Node] = []
    for part in parts:
        last, now = _span(found[-1], axis) if found else None, _span(part, axis)
        if last is not None and now is not None and last[0] is now[0] and last[2] == now[1]:
            found[-1] = slice_(now[0], axis, last[1], now[2])
        else:
            found.append(part)
    return found


def _span(part: Node, axis: int) -> tuple[Node, int, int] | None:
    """The value of which `part` is a run of `axis`, where it starts and stops; None if it is cut otherwise or not at all."""
    op = part.op
    if not isinstance(op, Slice) or any(by != 1 for by in op.step):
        return None
    base = part.src[0]
    if any((op.start[a], op.stop[a]) != (0, d) for a, d in enumerate(base.shape) if a != axis):
        return None
    return base, op.start[axis], op.stop[axis]


def _join_reshapes(parts: Sequence[Node], axis: int) -> Node | None:
    """Reshapes of parts joined along the leading one of the axes that each merges into `axis`; None if they do not fit."""
    first = parts[0]
    for old, new in reshape_groups(first.src[0].shape, first.shape) or ():
        if axis not in new:
            continue
        if len(new) != 1 or not old:
            return None
        at = old[0]
        rest = {(p.src[0].shape[:at], p.src[0].shape[at + 1 :], p.shape[:axis], p.shape[axis + 1 :]) for p in parts}
        inner = math.prod(first.src[0].shape[at + 1 : old[-1] + 1])
        if len(rest) != 1 or any(p.src[0].shape[at] * inner != p.shape[axis] for p in parts):
            return None
        shape = list(first.shape)
        shape[axis] = sum(p.shape[axis] for p in parts)
        return Node(Reshape(tuple(shape)), join([p.src[0] for p in parts], at))
    return None


def _join_scaled(op: Dequantize | Quantize, parts: Sequence[Node], axis: int) -> Node:
    """Codes side by side, and their scales and zero points."""
    codes = [p.src[0] for p in parts]
    columns = [[p.src[i] for p in parts] for i in range(1, len(parts[0].src))]
    if op.block is None:
        return Node(op, join(codes, axis), *(_join_scales(parts, scales, axis) for scales in columns))
    if any(p.shape[axis] % op.block[axis] for p in parts[:-1]):
        return Node(Concat(axis), *parts)  # a block would reach over into the next part
    return Node(op, join(codes, axis), *(join(scales, axis) for scales in columns))


def _join_scales(parts: Sequence[Node], scales: Sequence[Node], axis: int) -> Node:
    """Scales (or zero points) of the parts, for the joined value."""
    rank = len(parts[0].shape)
    varies = any(len(s.shape) >= rank - axis and s.shape[axis - rank] != 1 for s in scales)
    if len(set(scales)) == 1 and not varies:
        return scales[0]
    full: list[Node] = []
    for part, s in zip(parts, scales, strict=True):
        shape = [1] * (rank - len(s.shape)) + list(s.shape)
        shape[axis] = part.shape[axis]
        full.append(broadcast(s, shape))
    others = [max(f.shape[a] for f in full) for a in range(rank)]
    spread = [broadcast(f, [f.shape[a] if a == axis else d for a, d in enumerate(others)]) for f in full]
    return join(spread, axis)
