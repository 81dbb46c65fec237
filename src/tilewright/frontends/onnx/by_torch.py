"""ONNX operators that torch computes: convolutions, the largest elements, cumulative sums, scattered elements, determinants.

Each stands as a `call` of torch's own operator (`frontends/torch/call.py`), between nodes of the graph that make its operands
what that operator takes. What torch's operator does not take is left to onnx's evaluator, which is a hundred times slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tilewright.dtype import BF16, F16, F32, F64, PRED, S8, S16, S32, S64, U8
from tilewright.frontends.onnx.node import OpNode, converts
from tilewright.frontends.onnx.pool import paddings
from tilewright.frontends.torch.call import call
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, concat, const, convert, expand_dims, extents, items, map_, places, reshape, slice_
from tilewright.ir.extent import is_open
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather, Iota, Pad, Quantize, Select
from tilewright.ir.types import TensorType

_FLOATS = (F16, BF16, F32, F64)
_NUMBERS = (*_FLOATS, S8, S16, S32, S64, U8)  # that torch sorts and scatters on every device
_REASON = "no node of the graph expresses it"
_CONVOLUTION = "aten.convolution.default"
_LONG = 4096  # elements of which torch looks for the largest in a tenth of the time in which it sorts them
_MOST_SPATIAL = 3  # axes, of torch's


def by_torch(op: OpNode, target: str, args: Sequence[object], types: Sequence[TensorType], **named: object) -> list[Node]:
    """Results of torch's operator `target`, which a note names."""
    made = call(target, args, named, types, op.where)
    op.note(f"{op.where}: {target} is left to torch: {_REASON}")
    return items(made)


@converts("Conv", 1, 22)
def _conv(op: OpNode) -> Node:
    """Windows [O, C / groups, *kernel] over [N, C, *spatial], with what is padded before and behind."""
    return _convolved(op, op.input(0), op.input(1), op.optional(2))


def _convolved(op: OpNode, x: Node, w: Node, bias: Node | None) -> Node:
    groups, strides, dilations = _windows(op, x, w)
    kernel = w.shape[2:]
    if x.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise Unmodelled(f"{groups} groups of windows {w.type} over {x.type}")
    _bias_fits(bias, x, w.shape[0])
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    low, high = paddings(op, x.shape[2:], reach, strides)
    whole = [e + a + b - r for e, a, b, r in zip(x.shape[2:], low, high, reach, strict=True)]
    if min(*low, *high, *whole) < 0:
        raise Unmodelled(f"windows of {reach} over {list(x.shape[2:])}")
    result = x.tensor.with_shape((x.shape[0], w.shape[0], *(n // s + 1 for n, s in zip(whole, strides, strict=True))))
    if low != high:
        x, low = _padded(x, low, high), [0] * len(low)
    args = [x, w, bias, strides, low, dilations, False, [0] * len(low), groups]
    return by_torch(op, _CONVOLUTION, args, [result])[0]


@converts("ConvInteger", 10, 10)
def _conv_integer(op: OpNode) -> Node:
    """Windows of codes over codes, each less its zero point, added up in s32."""
    return convert(_of_codes(op, op.input(0), op.optional(2), op.input(1), op.optional(3), None), S32)


@converts("QLinearConv", 10, 10)
def _qlinear_conv(op: OpNode) -> Node:
    """The s32 sums of windows, and a bias of s32, times (x_scale * w_scale / y_scale), quantized by y's zero point."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = (op.input(i) for i in range(8))
    sums = convert(_of_codes(op, x, x_zero, w, w_zero, op.optional(8)), F32)
    by_x, by_w, by_y = (convert(_along(n, 1, sums), F32) for n in (x_scale, w_scale, y_scale))
    factor = map_("divide", map_("multiply", by_x, by_w), by_y)
    zero = _along(y_zero, 1, sums)
    return Node(Quantize(y_zero.dtype), map_("multiply", sums, factor), const(1.0, F32), reshape(zero, ()))


def _of_codes(op: OpNode, x: Node, x_zero: Node | None, w: Node, w_zero: Node | None, bias: Node | None) -> Node:
    """f64 sums of products of codes less their zero points, which are exact."""
    if x.dtype not in (S8, U8) or w.dtype not in (S8, U8) or (bias is not None and bias.dtype is not S32):
        raise Unmodelled(f"windows {w.type} over {x.type}")
    x, w = convert(x, F64), convert(w, F64)
    if x_zero is not None:
        x = map_("subtract", x, convert(_along(x_zero, 1, x), F64))
    if w_zero is not None:
        w = map_("subtract", w, convert(_along(w_zero, 0, w), F64))
    return _convolved(op, x, w, None if bias is None else convert(bias, F64))


def _along(n: Node, axis: int, x: Node) -> Node:
    """A number, or one for each place of an axis of x, laid so as to broadcast to x."""
    if n.tensor.elements == 1:
        return reshape(n, (1,) * len(x.shape))
    if n.shape != x.shape[axis : axis + 1]:
        raise Unmodelled(f"a scale or zero point {n.type} for {x.type}")
    return expand_dims(n, axis, len(x.shape))


@converts("Det", 11, 22)
def _det(op: OpNode) -> Node:
    x = op.input(0)
    if x.dtype not in (F32, F64) or len(x.shape) < 2 or x.shape[-1] != x.shape[-2] or 0 in x.shape:
        raise Unmodelled(f"of {x.type}")
    types = [x.tensor.with_shape(x.shape[:-2]), x.tensor, TensorType(S32, x.shape[:-1])]
    return by_torch(op, "aten._linalg_det.default", [x], types)[0]


@converts("TensorScatter", 24, 24)
def _tensor_scatter(op: OpNode) -> Node:
    """A cache [B, …, length, …] with an update written along `axis`, in each sequence from its own place on."""
    x, updates, start = op.input(0), op.input(1), op.optional(2)
    rank = len(x.shape)
    axis, mode = op.axis("axis", -2, rank), op.text("mode", "linear")
    wanted = tuple(updates.shape[axis] if a == axis else d for a, d in enumerate(x.shape))
    if axis == 0 or updates.tensor != TensorType(x.dtype, wanted) or mode not in ("linear", "circular"):
        raise op.malformed(f"TensorScatter of {updates.type} into {x.type} along axis {axis}, {mode}")
    if x.dtype not in _NUMBERS or 0 in updates.shape or updates.shape[axis] > x.shape[axis]:
        raise Unmodelled(f"it writes {updates.type} into {x.type}")
    at = Node(Iota(S64, updates.shape, axis))
    if start is not None:
        at = map_("add", at, broadcast(expand_dims(convert(start, S64), 0, rank), updates.shape))
    if mode == "circular":
        at = map_("remainder", at, extents([x.shape[axis]], single=True))
    return by_torch(op, "aten.scatter.src", [x, axis, at, updates], [x.tensor])[0]


@converts("ConvTranspose", 1, 22)
def _conv_transpose(op: OpNode) -> Node:
    """Windows [C, O / groups, *kernel], each times an element of [N, C, *spatial], added up where they overlap; `pads` of the
    sums are cut off on each side."""
    x, w, bias = op.input(0), op.input(1), op.optional(2)
    groups, strides, dilations = _windows(op, x, w)
    rank, kernel, channels = len(strides), w.shape[2:], w.shape[1] * groups
    if x.shape[1] != w.shape[0] or x.shape[1] % groups:
        raise Unmodelled(f"{groups} groups of windows {w.type} over {x.type}")
    _bias_fits(bias, x, channels)
    more = op.integers("output_padding", [0] * rank)
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    sums = [s * (e - 1) + r for e, s, r in zip(x.shape[2:], strides, reach, strict=True)]
    auto = op.text("auto_pad", "NOTSET")
    if op.has("output_shape") or auto in ("SAME_UPPER", "SAME_LOWER"):
        wanted = op.integers("output_shape", [e * s for e, s in zip(x.shape[2:], strides, strict=True)])[-rank:]
        cut = [n + m - d for n, m, d in zip(sums, more, wanted, strict=True)]
        if not op.has("output_shape"):  # of steps longer than windows there are fewer sums than that
            cut = [max(n, 0) for n in cut]
        less, rest = [n // 2 for n in cut], [n - n // 2 for n in cut]
        low, high = (less, rest) if auto == "SAME_UPPER" else (rest, less)
    else:
        low, high = paddings(op, x.shape[2:], reach, strides)
    if len(more) != rank or min(*low, *high, *more) < 0 or any(m > b for m, b in zip(more, high, strict=True)):
        symmetric = len(more) == rank and low == high and min(*low, *more) >= 0
        if not symmetric or any(m >= max(s, d) for m, s, d in zip(more, strides, dilations, strict=True)):
            raise Unmodelled(f"sums of {sums} cut by {low} and {high}, with {more} more")
    shape = [n - a - b + m for n, a, b, m in zip(sums, low, high, more, strict=True)]
    if min(shape) < 1:
        raise Unmodelled(f"sums of {sums} cut by {low} and {high}")
    result = x.tensor.with_shape((x.shape[0], channels, *shape))
    if low == high and all(m < max(s, d) for m, s, d in zip(more, strides, dilations, strict=True)):
        return by_torch(op, _CONVOLUTION, [x, w, bias, strides, low, dilations, True, more, groups], [result])[0]
    none, whole = [0] * rank, result.with_shape((x.shape[0], channels, *sums))
    y = by_torch(op, _CONVOLUTION, [x, w, bias, strides, none, dilations, True, none, groups], [whole])[0]
    for axis, (a, d) in enumerate(zip(low, shape, strict=True), 2):
        y = slice_(y, axis, a, a + d)
    return y


def _windows(op: OpNode, x: Node, w: Node) -> tuple[int, list[int], list[int]]:
    """Groups, strides and dilations of a convolution, which fit what it reads."""
    rank = len(x.shape) - 2
    groups, ones = op.integer("group", 1), [1] * rank
    strides, dilations = op.integers("strides", ones), op.integers("dilations", ones)
    if x.dtype not in _FLOATS or w.dtype is not x.dtype:
        raise Unmodelled(f"it takes {x.dtype} and {w.dtype}")
    if not 1 <= rank <= _MOST_SPATIAL or len(w.shape) != rank + 2 or not len(strides) == len(dilations) == rank:
        raise Unmodelled(f"windows {w.type} over {x.type}")
    if min(groups, *strides, *dilations, *w.shape) < 1 or 0 in x.shape[1:]:
        raise Unmodelled("nothing in it, or a step of 0")
    if op.integers("kernel_shape", list(w.shape[2:])) != list(w.shape[2:]):
        raise Unmodelled("kernel_shape is not that of the windows")
    return groups, strides, dilations


def _bias_fits(bias: Node | None, x: Node, channels: int) -> None:
    if bias is not None and bias.tensor != TensorType(x.dtype, (channels,)):
        raise Unmodelled(f"a bias {bias.type} for {channels} channels")


def _padded(x: Node, low: Sequence[int], high: Sequence[int]) -> Node:
    return Node(Pad((0, 0, *low), (0, 0, *high), (0,) * len(x.shape)), x, const(0.0, x.dtype))


@converts("TopK", 1, 24)
def _top_k(op: OpNode) -> list[Node | None]:
    """The k largest or smallest along an axis and where they stand, in order; of equal ones those in front come first, which
    torch's sort promises, and its `topk` of numbers that all differ."""
    x = op.input(0)
    if x.dtype not in _NUMBERS or not x.shape:
        raise Unmodelled(f"it sorts {x.type}")
    axis = op.axis("axis", -1, len(x.shape))
    count = op.known_ints(1)[0] if op.optional(1) is not None else op.integer("k")
    if not 0 <= count <= x.shape[axis]:
        raise op.malformed(f"TopK of {count} among {x.shape[axis]}")
    largest = bool(op.integer("largest", 1))
    if x.dtype in (F16, BF16, F32) and not is_open((x.shape[axis],)) and x.shape[axis] >= _LONG and count < x.shape[axis]:
        place = _top_places(op, x, axis, count, largest)
        return [Node(Gather(axis, elementwise=True), x, place), place]
    how = {"stable": True, "dim": axis, "descending": largest}
    found = by_torch(op, "aten.sort.stable", [x], [x.tensor, TensorType(S64, x.shape)], **how)
    return [slice_(f, axis, 0, count) for f in found]


def _top_places(op: OpNode, x: Node, axis: int, count: int, largest: bool) -> Node:
    """Places of the k largest or smallest floats. Torch's `topk` looks among whole numbers in their order, and of equal
    ones in that of their places: the bits of f32 as a number with a sign, in the upper half, and how many stand behind."""
    n, wide = x.shape[axis], convert(x, F32)
    wide = Node(Select(), map_("equal", wide, const(0.0, F32)), const(0.0, F32), wide)  # -0 is 0
    wide = Node(Select(), map_("is_nan", wide), const(math.nan, F32), wide)
    bits = by_torch(op, "aten.view.dtype", [wide, torch.int32], [TensorType(S32, x.shape)])[0]
    ordered = Node(Select(), map_("less", bits, const(0, S32)), map_("xor", bits, const(0x7FFFFFFF, S32)), bits)
    ordered = ordered if largest else map_("not", ordered)
    behind = map_("subtract", const(n - 1, S64), Node(Iota(S64, x.shape, axis)))
    keys = map_("add", map_("multiply", convert(ordered, S64), const(1 << 32, S64)), behind)
    result = keys.tensor.with_shape(count if a == axis else d for a, d in enumerate(x.shape))
    top = by_torch(op, "aten.topk.default", [keys, count, axis, True, True], [result, result])[0]
    return map_("subtract", const(n - 1, S64), map_("and", top, const(0xFFFFFFFF, S64)))


def cumulative(op: OpNode, x: Node, axis: int, function: str = "cumsum") -> Node:
    """Sums of all elements up to each along an axis, or of those before it (`exclusive`), or from the end (`reverse`); or
    products ("cumprod").

    Raises:
        Unmodelled: they are of a type that torch does not add up as ONNX does.
    """
    if x.dtype not in (*_FLOATS, S32, S64):
        raise Unmodelled(f"it adds up {x.dtype}")
    n, dtype = x.shape[axis], x.dtype
    y = convert(x, F32) if dtype.is_float and dtype.bits < 32 else x
    backwards = bool(op.integer("reverse", 0))
    if backwards:
        y = Node(Gather(axis), y, places(n, n - 1, -1))
    if op.integer("exclusive", 0) and n > 0:
        first = reshape(const(0 if function == "cumsum" else 1, y.dtype), (1,) * len(y.shape))
        y = concat([broadcast(first, [1 if a == axis else d for a, d in enumerate(y.shape)]), slice_(y, axis, 0, n - 1)], axis)
    y = by_torch(op, f"aten.{function}.default", [y, axis], [y.tensor], dtype=y.dtype.to_torch())[0]
    if backwards:
        y = Node(Gather(axis), y, places(n, n - 1, -1))
    return convert(y, dtype)


_REDUCED = {"mul": "prod", "max": "amax", "min": "amin"}


@converts("ScatterElements", 11, 18)
def _scatter_elements(op: OpNode) -> Node:
    """The source with an element written, added to, multiplied with or compared with, at each index along an axis."""
    x, index, updates = op.input(0), op.input(1), op.input(2)
    if x.dtype not in (*_NUMBERS, PRED) or not x.shape or updates.tensor != TensorType(x.dtype, index.shape):
        raise Unmodelled(f"it writes {updates.type} at {index.type} into {x.type}")
    axis, how = op.axis("axis", 0, len(x.shape)), op.text("reduction", "none")
    if len(index.shape) != len(x.shape) or any(i > d for i, d in zip(index.shape, x.shape, strict=True)) or 0 in index.shape:
        raise Unmodelled(f"indices {index.type} for {x.type}")
    at = convert(index, S64)
    at = Node(Select(), map_("less", at, const(0, S64)), map_("add", at, extents([x.shape[axis]], single=True)), at)
    if how == "none":
        target, args = "aten.scatter.src", [x, axis, at, updates]
    elif how == "add" and x.dtype is not PRED:
        target, args = "aten.scatter_add.default", [x, axis, at, updates]
    elif how in _REDUCED and x.dtype is not PRED:
        target, args = "aten.scatter_reduce.two", [x, axis, at, updates, _REDUCED[how]]
    else:
        raise Unmodelled(f"reduction {how!r} of {x.dtype}")
    return by_torch(op, target, args, [x.tensor])[0]


@converts("ScatterND", 11, 18)
def _scatter_nd(op: OpNode) -> Node:
    """The source with slices written at rows of indices, or added."""
    x, index, updates = op.input(0), op.input(1), op.input(2)
    depth, how = index.shape[-1] if index.shape else 0, op.text("reduction", "none")
    if x.dtype not in (*_NUMBERS, PRED) or not 0 < depth <= len(x.shape) or how not in ("none", "add") or 0 in index.shape:
        raise Unmodelled(f"it writes at {index.type} into {x.type}")
    if updates.tensor != TensorType(x.dtype, (*index.shape[:-1], *x.shape[depth:])):
        raise Unmodelled(f"it writes {updates.type} at {index.type} into {x.type}")
    last = len(index.shape) - 1
    at = [reshape(slice_(convert(index, S64), last, i, i + 1), index.shape[:-1]) for i in range(depth)]
    return by_torch(op, "aten.index_put.default", [x, at, updates, how == "add"], [x.tensor])[0]
