"""Building one gemm with what surrounds it: quantised operands, an epilogue of steps, a converted or quantised result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.dtype import BY_NAME, F32, S32, DType
from tilewright.errors import TypeMismatchError
from tilewright.ir.build import const, convert, map_, reduce_, reshape, swap_last
from tilewright.ir.expression import Sources
from tilewright.ir.graph import Node, label_of
from tilewright.ir.ops import FUNCTIONS, Acc, Dequantize, Gemm, Input, Overflow, Quantize, Reshape
from tilewright.ir.types import Shape, broadcast_shapes


@dataclass(frozen=True)
class Side:
    """One operand.

    Attributes:
        value: as stored, [*batch, rows, columns], or with the last two axes exchanged if `transposed`.
        transposed: multiply by its transpose.
        scale: broadcasts against the stored value, or holds one value a block; None multiplies the codes themselves.
        zero_point: an integer for each value of the scale, of the stored type.
        block: extents of the blocks, one an axis of the stored value.
    """

    value: Node
    transposed: bool = False
    scale: Node | None = None
    zero_point: Node | None = None
    block: Shape | None = None


@dataclass(frozen=True)
class Apply:
    """One step of the epilogue: function `fn` of the running value and, for a binary function, a side input.

    The name of a dtype stands for the conversion to it.
    """

    fn: str
    operand: Node | None = None


@dataclass(frozen=True)
class Result:
    """The type that is stored, and the scale (and zero point) if it is quantised on the way."""

    dtype: DType
    overflow: Overflow = "wrap"
    scale: Node | None = None
    zero_point: Node | None = None


def fused_gemm(
    lhs: Side, rhs: Side, result: Result | None, steps: Sequence[Apply] = (), acc_dtype: DType | None = None
) -> Node:
    """One gemm node: lhs @ rhs, then `steps` in f32 (or in the accumulator's type while it suffices), then `result`.

    Codes against codes (both operands integer, or both 8-bit float) multiply as they are: per-tensor and per-row or
    per-column scales move to the epilogue, and zero points become corrections by row and column sums
    ((a - za) @ (b - zb) = a @ b - za colsum(b) - zb rowsum(a) + K za zb; Jacob et al. 2018, arXiv 1712.05877, eq. 7).
    Otherwise a scaled operand is dequantised to the other operand's type before the product, and an unscaled integer one
    becomes that type, which must hold it exactly.

    Raises:
        TypeMismatchError: extents or types do not fit, a scale or zero point of codes varies along K, or something is given
            that would have no effect.
    """
    sources = Sources()
    for side in (lhs, rhs):
        _check_side(side)
    a, b = lhs.value.dtype, rhs.value.dtype
    codes = (a.is_integer and b.is_integer) or (a.is_float and b.is_float and a.bits == b.bits == 8)
    codes = codes and not lhs.block and not rhs.block
    wider = max(a, b, key=lambda d: (d.is_float, d.bits))
    compute = wider if wider.is_float and wider.bits >= 16 else F32
    left = _operand(sources, lhs, codes, compute)
    right = _operand(sources, rhs, codes, compute)
    acc_type = acc_dtype or natural_accumulator(left.dtype, right.dtype)
    gemm = Gemm(acc_type, left, right, ())
    acc = Node(Acc(gemm.acc_type))
    value = acc
    if codes:
        value = _corrected(sources, value, lhs, rhs)
        for side, axis in ((lhs, -1), (rhs, -2)):
            if side.scale is not None:
                value = _float(value)
                value = map_("multiply", value, convert(_along(sources.add(side.scale), side, axis), value.dtype))
    for step in steps:
        value = _step(sources, value, step)
    if result is not None:
        value = _stored(sources, value, result)
    return Node(Gemm(acc_type, left, right, (value,)), *sources.nodes)


def natural_accumulator(a: DType, b: DType) -> DType:
    """The type a product accumulates in unless another is asked for: that of the wider operand."""
    return a.accumulator if a.bits >= b.bits else b.accumulator


def _check_side(side: Side) -> None:
    """Raise TypeMismatchError for what would be left out without a word."""
    stored = side.value.tensor
    if stored.rank < 2:
        raise TypeMismatchError(f"{stored} is no matrix", hint="give a vector as one row or one column")
    if side.block is not None and side.scale is None:
        raise TypeMismatchError(f"blocks of {list(side.block)} are given for {stored}, but no scale", hint="a scale a block")
    if side.zero_point is not None and not (stored.dtype.is_integer and side.zero_point.dtype.is_integer):
        raise TypeMismatchError(f"a zero point {side.zero_point.type} of {stored}", hint="only integers have one, an integer")
    for parameter in (side.scale, side.zero_point):
        if parameter is not None and side.block is None:
            _fits(parameter, stored.shape, f"its operand {stored}", None)


def _fits(given: Node, shape: Shape, what: str, where: str | None) -> None:
    """Raise TypeMismatchError, with the name of what was given, if it does not broadcast to `shape`."""
    try:
        wrong = None if broadcast_shapes(given.shape, shape) == shape else "is larger than"
    except TypeMismatchError:
        wrong = "does not broadcast to"
    if wrong is not None:
        *_, rows, columns = (1, *shape) if len(shape) < 2 else shape
        named = f"{label_of(_root(given))} {given.type}" if isinstance(_root(given).op, Input) else str(given.type)
        hint = f"[{columns}] is one value a column, [{rows},1] one a row, [] one for all"
        raise TypeMismatchError(f"{named} {wrong} {what}", where=where, hint=hint)


def _root(node: Node) -> Node:
    """The node that a view shows."""
    while isinstance(node.op, Reshape):
        node = node.src[0]
    return node


def _operand(sources: Sources, side: Side, codes: bool, compute: DType) -> Node:
    value = sources.add(side.value)
    stored = value.dtype
    if not codes and (side.scale is not None or side.zero_point is not None):
        scale = const(1.0, F32) if side.scale is None else sources.add(side.scale)
        zero = [] if side.zero_point is None else [sources.add(side.zero_point)]
        value = Node(Dequantize(compute, side.block), value, scale, *zero)
    elif not codes and stored.is_integer:
        if max(-stored.min, stored.max) * compute.epsilon > 2:
            raise TypeMismatchError(f"{compute} does not hold every {stored}", hint="convert one operand first, or scale it")
        value = convert(value, compute)
    return swap_last(value) if side.transposed else value


def _along(parameter: Node, side: Side, summed_axis: int) -> Node:
    """A scale or zero point as it broadcasts against acc: it may not vary along K."""
    if parameter.tensor.elements != 1:
        rank = len(parameter.shape)
        stored_axis = summed_axis if not side.transposed else {-1: -2, -2: -1}[summed_axis]
        if rank >= -stored_axis and parameter.shape[stored_axis] != 1:
            raise TypeMismatchError(f"a scale or zero point {parameter.type} of codes varies along K", hint="give it per block")
        if side.transposed:
            parameter = swap_last(parameter) if rank >= 2 else reshape(parameter, (*parameter.shape, 1))
    return parameter


def _corrected(sources: Sources, acc: Node, lhs: Side, rhs: Side) -> Node:
    if lhs.zero_point is None and rhs.zero_point is None:
        return acc
    k_axis = {False: (-1, -2), True: (-2, -1)}
    value = _wide(acc)
    wide = value.dtype
    zero = [
        None if s.zero_point is None else convert(_along(sources.add(s.zero_point), s, axis), wide)
        for s, axis in ((lhs, -1), (rhs, -2))
    ]
    sums: list[Node | None] = []
    for side, other_zero, pick in ((lhs, zero[1], 0), (rhs, zero[0], 1)):
        if other_zero is None:
            sums.append(None)
            continue
        total = reduce_("add", convert(side.value, wide), [k_axis[side.transposed][pick]], keepdims=True)
        total = swap_last(total) if side.transposed else total
        sums.append(sources.add(total))
    row_sums, column_sums = sums
    if zero[0] is not None and column_sums is not None:
        value = map_("subtract", value, map_("multiply", zero[0], column_sums))
    if zero[1] is not None and row_sums is not None:
        value = map_("subtract", value, map_("multiply", zero[1], row_sums))
    if zero[0] is not None and zero[1] is not None:
        k = lhs.value.shape[-2 if lhs.transposed else -1]
        value = map_("add", value, map_("multiply", map_("multiply", zero[0], zero[1]), const(k, wide)))
    return value


def _float(value: Node) -> Node:
    return value if value.dtype.is_float and value.dtype.bits >= 32 else convert(value, F32)


def _wide(value: Node) -> Node:
    return value if value.dtype.bits >= 32 else convert(value, S32)


def _step(sources: Sources, value: Node, step: Apply) -> Node:
    if step.fn in BY_NAME:
        return convert(value, BY_NAME[step.fn])
    f = FUNCTIONS[step.fn]
    if step.operand is None:
        return map_(step.fn, value if value.dtype.kind in f.kinds else _float(value))
    operand = sources.param(step.operand)
    _fits(step.operand, value.shape, f"the result {list(value.shape)}", step.fn)
    if operand.dtype.is_integer and value.dtype.is_integer:
        value = _wide(value)
        return map_(step.fn, value, convert(operand, value.dtype))
    value = _float(value)
    return map_(step.fn, value, convert(operand, value.dtype))


def _stored(sources: Sources, value: Node, result: Result) -> Node:
    if result.zero_point is not None and (result.scale is None or not result.dtype.is_integer):
        why = "without a scale" if result.scale is None else f"of {result.dtype}"
        raise TypeMismatchError(f"a zero point of the result {why} would have no effect", hint="leave it out")
    if result.scale is None:
        overflow: Overflow = "saturate" if result.dtype.is_integer and value.dtype.is_float else result.overflow
        return convert(value, result.dtype, overflow)
    if result.dtype.bits > 8 and not result.dtype.is_integer:
        raise TypeMismatchError(f"a result is not quantised to {result.dtype}", hint="an integer or 8-bit float type")
    extra = [sources.add(p) for p in (result.scale, result.zero_point) if p is not None]
    return Node(Quantize(result.dtype), _float(value), *extra)
