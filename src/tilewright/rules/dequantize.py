"""Dequantisation written out as arithmetic: codes times a scale, with or without a zero point, by tensor, channel or group."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tilewright.dtype import BF16, F16, F32, S4, S8, U4, U8, DType
from tilewright.ir.anchor import ANCHORS
from tilewright.ir.build import const, convert, reshape
from tilewright.ir.constant import constant_value, scalar_value
from tilewright.ir.graph import Node, Users
from tilewright.ir.ops import VIEWS, Broadcast, Concat, Convert, Dequantize, Map, Reshape
from tilewright.ir.pattern import Match, Pat, rule
from tilewright.ir.types import Shape, reshape_groups
from tilewright.rules._codes import are_codes, viewed
from tilewright.rules.casts import holds

LARGEST_ZEROS = 1 << 20  # elements of a constant zero point that are looked at


@rule(Pat(Map, where=lambda n: getattr(n.op, "fn", "") == "multiply" and n.dtype.is_float), stage="recognise")
def codes_times_a_scale_are_dequantised(m: Match) -> Node | None:
    """convert(codes) * scale | (convert(codes) - zero_point) * scale -> dequantize(codes, scale[, zero_point])

    Where: codes are integers or floats of at most 8 bits, through views and casts that hold them; the scale is of fewer
    elements, maybe repeated by group; zero points are codes, or numbers that are; a product reads the result, through views and
    casts.
    Exact: yes, codes and their differences are exact in every float of 16 bits, and the product is rounded once.
    """
    node = m.node
    for x, scale in (node.src, reversed(node.src)):
        if x.shape != node.shape or not x.dtype.is_float or x.dtype.bits < 16:
            continue
        found = _read(x)
        if found is None:
            continue
        codes, zero = found
        scale, block = _unrepeated(scale, node.shape)
        if scale.tensor.elements >= max(node.tensor.elements, 2):
            m.refuse("its scale is as large as what it scales")
            continue
        if zero is not None and block is not None:
            zero, zeros_block = _unrepeated(zero, node.shape)
            if zeros_block != block:
                m.refuse("its zero points are repeated otherwise than its scales")
                continue
        if not _multiplied(node, m.users):
            return None
        return Node(Dequantize(node.dtype, block), codes, scale, *([] if zero is None else [zero]))
    return None


@rule(
    Pat(Convert, (Pat(Dequantize, where=lambda n: n.dtype is F32),), where=lambda n: n.dtype in (F16, BF16)), stage="recognise"
)
def dequantised_values_are_rounded_at_once(m: Match) -> Node | None:
    """convert(dequantize[f32](codes, scale), bf16) -> dequantize[bf16](codes, scale); f16 alike

    Where: the cast does not saturate; nothing else reads the f32 values. Exact: yes, a dequantisation to 16 bits multiplies in
    f32 and rounds the product once.
    """
    op, inner = m.node.op, m.node.src[0]
    assert isinstance(op, Convert) and isinstance(inner.op, Dequantize)
    if op.overflow == "saturate":
        return None
    if not m.users.only(inner):
        m.refuse("the dequantised values are also read in f32")
        return None
    return Node(replace(inner.op, dtype=op.dtype), *inner.src)


@rule(Pat(Reshape, (Pat(Dequantize, where=lambda n: getattr(n.op, "block", None) is None),)), stage="recognise")
def groups_that_are_joined_are_blocks(m: Match) -> Node | None:
    """reshape(dequantize(codes [.., G, g, ..], scale [.., G, 1, ..]), [.., G * g, ..])
    -> dequantize(reshape(codes), scale [.., G, ..]) by block

    Where: the reshape joins axes, along the last of which neither scale nor zero point varies. Exact: yes.
    """
    inner = m.node.src[0]
    assert isinstance(inner.op, Dequantize)
    rank = len(inner.shape)
    beside = [reshape(t, (1,) * (rank - len(t.shape)) + t.shape) for t in inner.src[1:]]
    sizes = tuple(max(t.shape[a] for t in beside) for a in range(rank))
    groups = reshape_groups(inner.shape, m.node.shape)
    block = None if groups is None else _joined(groups, inner.shape, sizes)
    if block is None or any(t.shape != sizes for t in beside):
        return None
    fewer = tuple(-(-d // b) for d, b in zip(m.node.shape, block, strict=True))
    return Node(Dequantize(inner.op.dtype, block), reshape(inner.src[0], m.node.shape), *(reshape(t, fewer) for t in beside))


@rule(Pat(Dequantize, where=lambda n: n.src[0].constant and n.src[0].dtype in (S8, U8)), stage="recognise")
def constant_codes_of_four_bits_are_kept_so(m: Match) -> Node | None:
    """dequantize(codes, scale[, zero_point]) of s8 or u8 -> dequantize(convert(codes, s4 or u4), scale[, convert(zero_point)])

    Where: the codes are constant and made by `and` or shifts, as nibbles of a byte are taken apart, so that 4 bits hold them; a
    zero point is a constant that they hold, too. Exact: yes. Half the bytes of a byte a code are then read at every call.
    """
    codes, *rest = m.node.src
    low, high = value_range(codes)
    for dtype in (U4, S4):
        if dtype.min <= low and high <= dtype.max:
            zeros = [_as_codes(z, dtype, negated=False) for z in rest[1:]]
            if any(z is None for z in zeros):
                m.refuse("its zero point takes more than 4 bits")
                return None
            return Node(m.node.op, convert(codes, dtype), rest[0], *(z for z in zeros if z is not None))
    return None


def value_range(node: Node) -> tuple[int, int]:
    """Numbers between which all values of an integer node lie, as far as the operations that made it tell: what is given may be
    all that its type holds."""
    op, dtype = node.op, node.dtype
    whole = int(dtype.min), int(dtype.max)
    if isinstance(op, (*VIEWS, Concat)):
        ranges = [value_range(s) for s in node.src]
        return min(r[0] for r in ranges), max(r[1] for r in ranges)
    if isinstance(op, Convert) and node.src[0].dtype.is_integer:
        low, high = value_range(node.src[0])
        return (low, high) if whole[0] <= low and high <= whole[1] else whole
    if not isinstance(op, Map) or len(node.src) != 2:
        return whole
    number = scalar_value(node.src[1])
    if op.fn == "and" and number is None:
        number = scalar_value(node.src[0])
    if number is None:
        return whole
    by = int(number)
    if op.fn == "and":
        return (0, by) if by >= 0 else whole
    low, high = value_range(node.src[0])
    if op.fn in ("add", "subtract"):
        low, high = (low + by, high + by) if op.fn == "add" else (low - by, high - by)
        return (low, high) if whole[0] <= low and high <= whole[1] else whole
    if not 0 <= by < dtype.bits or op.fn not in ("shift_right_logical", "shift_right_arithmetic"):
        return whole
    arithmetic = op.fn == "shift_right_arithmetic" and dtype.kind == "int"
    if low < 0 and not arithmetic:
        return (0, ((1 << dtype.bits) - 1) >> by) if by else whole
    return (low >> by, high >> by) if arithmetic or dtype.kind == "int" or op.fn == "shift_right_logical" else whole


def _joined(groups: list[tuple[list[int], list[int]]], before: Shape, sizes: Shape) -> Shape | None:
    """The block over which a scale of `sizes` repeats once the axes are joined; None if it is none, or one axis is split."""
    block: list[int] = []
    grouped = False
    for old, new in groups:
        if not new:  # an axis of one element that vanishes
            continue
        if len(new) > 1:
            return None
        varied = [a for a in old if sizes[a] != 1]
        inner = [a for a in old if not varied or a > varied[-1]]
        if any(sizes[a] != before[a] for a in old if a not in inner):
            return None
        block.append(prod(before[a] for a in inner))
        grouped |= bool(varied) and block[-1] > 1
    return tuple(block) if grouped else None


def _multiplied(node: Node, users: Users) -> bool:
    """Tell whether a product reads a value, through views, casts and concatenations."""
    seen, pending = {node}, [node]
    while pending:
        for reader in users[pending.pop()]:
            if reader is None or reader in seen:
                continue
            if isinstance(reader.op, ANCHORS):
                return True
            if isinstance(reader.op, (*VIEWS, Convert, Concat)):
                seen.add(reader)
                pending.append(reader)
    return False


def _read(node: Node) -> tuple[Node, Node | None] | None:
    """The codes, as they lie in `node`, and the zero point that make a float by exact casts, views and a difference."""
    views: list[Node] = []
    while True:
        if isinstance(node.op, VIEWS):
            views.append(node)
        elif not isinstance(node.op, Convert) or not (
            holds(node.dtype, node.src[0].dtype) or (_is_shift(node.src[0]) and node.dtype.bits >= 16)
        ):
            break
        node = node.src[0]
    views.reverse()
    zero = None
    codes = node
    if _is_shift(node):
        found = _shifted(node)
        if found is None:
            return None
        codes, zero = found
        zero = viewed(zero, node, views)
        if zero is None:
            return None
    elif not are_codes(node.dtype):
        return None
    for view in views:
        codes = Node(view.op, codes)
    return codes, zero


def _is_shift(node: Node) -> bool:
    wide = node.dtype.is_float and node.dtype.bits >= 16
    wide |= node.dtype.kind == "int" and node.dtype.bits >= 16
    return isinstance(node.op, Map) and node.op.fn in ("subtract", "add") and wide


def _shifted(node: Node) -> tuple[Node, Node] | None:
    """Integer codes and the zero point, of their type, of which a node is the difference."""
    assert isinstance(node.op, Map)
    added = node.op.fn == "add"
    for x, other in ((0, 1), (1, 0))[: 2 if added else 1]:
        read = _read(node.src[x]) if node.src[x].shape == node.shape else None
        if read is None or read[1] is not None or read[0].dtype.kind not in ("int", "uint") or read[0] is node.src[x]:
            continue
        zero = _as_codes(node.src[other], read[0].dtype, negated=added)
        if zero is not None:
            return read[0], zero
    return None


def _as_codes(t: Node, dtype: DType, *, negated: bool) -> Node | None:
    """A zero point in the type of the codes: what was widened, or constants that the type holds."""
    if not negated:
        read = _read(t)
        if read is not None and read[1] is None and read[0].dtype is dtype:
            return read[0]
    value = constant_value(t, LARGEST_ZEROS)
    if value is None:
        return None
    value = -value.double() if negated else value.double()
    if value.numel() == 0 or bool((value != value.round()).any()) or value.min() < dtype.min or value.max() > dtype.max:
        return None
    return const(value.to(dtype.to_torch()), dtype)


def _unrepeated(t: Node, shape: Shape) -> tuple[Node, Shape | None]:
    """A scale without the repetition of each value for a group of neighbours, and the block of a group; a scale that is not
    repeated so as it is."""
    casts: list[Node] = []
    node = t
    while isinstance(node.op, Convert):
        casts.append(node)
        node = node.src[0]
    if not isinstance(node.op, Reshape) or not isinstance(node.src[0].op, Broadcast) or node.shape != shape:
        return t, None
    spread = node.src[0]
    rank = len(spread.shape)
    small = reshape(spread.src[0], (1,) * (rank - len(spread.src[0].shape)) + spread.src[0].shape)
    groups = reshape_groups(spread.shape, shape)
    block = None if groups is None else _joined(groups, spread.shape, small.shape)
    if block is None:
        return t, None
    small = reshape(small, tuple(-(-d // b) for d, b in zip(shape, block, strict=True)))
    for cast in reversed(casts):
        small = convert(small, cast.dtype)
    return small, block
