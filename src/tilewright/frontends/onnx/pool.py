"""ONNX's MaxPool and AveragePool as the largest and the mean of shifted slices, where the window is not too large."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch

from tilewright.dtype import F32, S64
from tilewright.frontends.onnx.node import OpNode, converts
from tilewright.frontends.onnx.shape import number
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import const, convert, map_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Iota, Pad, Select, Slice

_LARGEST = 64  # places of a window, or of its axes together, each of which is a slice


@converts("MaxPool", 1, 22)
def _max_pool(op: OpNode) -> list[Node]:
    """The largest element under each window, and the place of the first such in x; what is padded is smaller than any."""
    return _pooled(op, "maximum")


@converts("AveragePool", 1, 22)
def _average_pool(op: OpNode) -> Node:
    """The sum under each window, divided by how many elements it has; those padded count if `count_include_pad`."""
    return _pooled(op, "add")[0]


def _pooled(op: OpNode, function: str) -> list[Node]:
    """Elements under each window joined by "maximum", with their places if these are wanted, or added and divided by their
    number."""
    x = op.input(0)
    spatial = x.shape[2:]
    kernel = op.integers("kernel_shape")
    rank = len(spatial)
    ones = [1] * rank
    strides, dilations = op.integers("strides", ones), op.integers("dilations", ones)
    if not x.dtype.is_float:
        raise Unmodelled("it pools integers")
    dtype = x.dtype
    if function == "add" and dtype.bits < 32:
        x = convert(x, F32)
    if not 1 <= rank == len(kernel) == len(strides) == len(dilations) or sum(kernel) > _LARGEST or min(kernel) < 1:
        raise Unmodelled(f"a window of {kernel}")
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    low, high = paddings(op, spatial, reach, strides)
    declared = high
    whole = [e + a + b - r for e, a, b, r in zip(spatial, low, high, reach, strict=True)]
    counts = [n // s + 1 for n, s in zip(whole, strides, strict=True)]
    if op.integer("ceil_mode", 0):  # one more window if it starts before the padding behind
        more = [-(-n // s) + 1 for n, s in zip(whole, strides, strict=True)]
        starts = zip(more, strides, spatial, low, strict=True)
        counts = [n - 1 if (n - 1) * s >= e + a else n for n, s, e, a in starts]
        held = [(n - 1) * s + r for n, s, r in zip(counts, strides, reach, strict=True)]
        high = [max(h - e - a, b) for h, e, a, b in zip(held, spatial, low, high, strict=True)]
    if min(counts) < 1 or min(*low, *high) < 0:
        raise Unmodelled(f"windows of {reach} over {list(spatial)}")
    edges = (0, 0, *low), (0, 0, *high), (0,) * (rank + 2)
    padded = any(low) or any(high)
    source = Node(Pad(*edges), x, const(0.0 if function == "add" else float("-inf"), x.dtype)) if padded else x
    windows = kernel, dilations, counts, strides
    if function == "maximum" and op.wants(1):
        if math.prod(kernel) > _LARGEST:
            raise Unmodelled(f"it gives places in a window of {kernel}")
        at = _places(x, columns=bool(op.integer("storage_order", 0)))
        at = Node(Pad(*edges), at, const(0, S64)) if padded else at
        return _largest(_slices(source, range(rank), *windows), _slices(at, range(rank), *windows))
    y, together = source, [range(rank)] if math.prod(kernel) <= _LARGEST else [range(a, a + 1) for a in range(rank)]
    for axes in together:  # of a large window one axis after another, which takes fewer slices and another pass for each
        y = functools.reduce(functools.partial(map_, function), _slices(y, axes, *windows))
    if function == "maximum":
        return [y]
    if not padded:  # each window has all of its places
        return [convert(map_("divide", y, const(float(math.prod(kernel)), x.dtype)), dtype)]
    counted = bool(op.integer("count_include_pad", 0))
    sides = zip(spatial, low, declared, counts, strides, kernel, dilations, strict=True)
    numbers = [_elements(e, (a, b) if counted else (0, 0), a, n, s, k, d) for e, a, b, n, s, k, d in sides]
    many = torch.ones((), dtype=torch.float64)
    for each in numbers:
        many = many.unsqueeze(-1) * torch.tensor(each, dtype=torch.float64)
    many = many.reshape(1, 1, *counts).to(x.dtype.to_torch())
    return [convert(map_("divide", y, const(many, x.dtype)), dtype)]


def _slices(
    x: Node, axes: Sequence[int], kernel: Sequence[int], dilations: Sequence[int], counts: Sequence[int], strides: Sequence[int]
) -> list[Node]:
    """Slices of what lies at each place of the windows along some spatial axes, of which there are so many."""
    found: list[Node] = []
    for place in itertools.product(*(range(kernel[a]) for a in axes)):
        start, stop, step = [0] * len(x.shape), [*x.shape], [1] * len(x.shape)
        for a, p in zip(axes, place, strict=True):
            start[a + 2] = p * dilations[a]
            stop[a + 2] = start[a + 2] + (counts[a] - 1) * strides[a] + 1
            step[a + 2] = strides[a]
        found.append(Node(Slice(tuple(start), tuple(stop), tuple(step)), x))
    return found


def _places(x: Node, columns: bool) -> Node:
    """s64, in x's shape: where each element stands in x laid flat, by rows or each channel by columns."""
    order = [*range(len(x.shape))]
    order[2:] = order[:1:-1] if columns else order[2:]
    flat, size = [Node(Iota(S64, x.shape, a)) for a in range(len(x.shape))], 1
    for a in reversed(order):
        flat[a] = map_("multiply", flat[a], number(size))
        size = size * x.shape[a]
    return functools.reduce(functools.partial(map_, "add"), flat)


def _largest(values: Sequence[Node], places: Sequence[Node]) -> list[Node]:
    """The largest of some values, elementwise, and its place: that of the first, where several are as large."""
    best, at = values[0], places[0]
    for value, place in zip(values[1:], places[1:], strict=True):
        more = map_("greater", value, best)
        best, at = Node(Select(), more, value, best), Node(Select(), more, place, at)
    return [best, at]


def paddings(op: OpNode, spatial: Sequence[int], reach: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """The places before and behind each axis that windows reach beyond it, by `auto_pad` and `pads`.

    Raises:
        Unmodelled: `pads` are not two for each axis.
    """
    auto, none = op.text("auto_pad", "NOTSET"), [0] * len(spatial)
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        short = [max((-(-e // s) - 1) * s + r - e, 0) for e, s, r in zip(spatial, strides, reach, strict=True)]
        less, more = [n // 2 for n in short], [n - n // 2 for n in short]
        return (less, more) if auto == "SAME_UPPER" else (more, less)
    pads = op.integers("pads", (*none, *none)) if auto == "NOTSET" else [*none, *none]
    if len(pads) != 2 * len(spatial):
        raise Unmodelled(f"pads {pads} for {len(spatial)} axes")
    return pads[: len(spatial)], pads[len(spatial) :]


def _elements(
    extent: int, counted: Sequence[int], low: int, windows: int, stride: int, kernel: int, dilation: int
) -> list[int]:
    """The number of places of each window along an axis that lie in the extent, or in the padding before and behind that
    counts."""
    starts = [i * stride - low for i in range(windows)]
    inside = [[-counted[0] <= s + k * dilation < extent + counted[1] for k in range(kernel)] for s in starts]
    return [max(sum(i), 1) for i in inside]
