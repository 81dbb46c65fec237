"""ONNX's MaxPool and AveragePool as the largest and the mean of shifted slices, where the window is small."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from tilewright.dtype import F32
from tilewright.frontends.onnx.node import OpNode, converts
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import const, convert, map_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Pad, Slice

_LARGEST = 64  # places of a window, each of which is a slice


@converts("MaxPool", 1, 22)
def _max_pool(op: OpNode) -> Node:
    """The largest element under each window; what is padded is smaller than any."""
    if op.wants(1):
        raise Unmodelled("it gives places")
    return _pooled(op, "maximum")


@converts("AveragePool", 1, 22)
def _average_pool(op: OpNode) -> Node:
    """The sum under each window, divided by how many elements it has; those padded count if `count_include_pad`."""
    return _pooled(op, "add")


def _pooled(op: OpNode, function: str) -> Node:
    """Elements under each window joined by "maximum", or added and divided by their number."""
    x = op.input(0)
    spatial = x.shape[2:]
    kernel = op.integers("kernel_shape")
    rank = len(spatial)
    ones, none = [1] * rank, [0] * rank
    strides, dilations = op.integers("strides", ones), op.integers("dilations", ones)
    if not x.dtype.is_float:
        raise Unmodelled("it pools integers")
    dtype = x.dtype
    if function == "add" and dtype.bits < 32:
        x = convert(x, F32)
    if not 1 <= rank == len(kernel) == len(strides) == len(dilations) or math.prod(kernel) > _LARGEST or min(kernel) < 1:
        raise Unmodelled(f"a window of {kernel}")
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    auto = op.text("auto_pad", "NOTSET")
    low, high = none, none
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        short = [max((-(-e // s) - 1) * s + r - e, 0) for e, s, r in zip(spatial, strides, reach, strict=True)]
        less, more = [n // 2 for n in short], [n - n // 2 for n in short]
        low, high = (less, more) if auto == "SAME_UPPER" else (more, less)
    elif auto == "NOTSET":
        pads = op.integers("pads", (*none, *none))
        low, high = pads[:rank], pads[rank:]
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
    if any(low) or any(high):
        x = Node(
            Pad((0, 0, *low), (0, 0, *high), (0,) * (rank + 2)), x, const(0.0 if function == "add" else float("-inf"), x.dtype)
        )
    y: Node | None = None
    for place in itertools.product(*(range(k) for k in kernel)):
        starts = [p * d for p, d in zip(place, dilations, strict=True)]
        stops = [a + (n - 1) * s + 1 for a, n, s in zip(starts, counts, strides, strict=True)]
        part = Node(Slice((0, 0, *starts), (*x.shape[:2], *stops), (1, 1, *strides)), x)
        y = part if y is None else map_(function, y, part)
    assert y is not None
    if function == "maximum":
        return y
    if not any(low) and not any(high):  # each window has all of its places
        return convert(map_("divide", y, const(float(math.prod(kernel)), x.dtype)), dtype)
    padded = bool(op.integer("count_include_pad", 0))
    sides = zip(spatial, low, declared, counts, strides, kernel, dilations, strict=True)
    numbers = [_elements(e, (a, b) if padded else (0, 0), a, n, s, k, d) for e, a, b, n, s, k, d in sides]
    number = torch.ones((), dtype=torch.float64)
    for each in numbers:
        number = number.unsqueeze(-1) * torch.tensor(each, dtype=torch.float64)
    number = number.reshape(1, 1, *counts).to(x.dtype.to_torch())
    return convert(map_("divide", y, const(number, x.dtype)), dtype)


def _elements(
    extent: int, counted: Sequence[int], low: int, windows: int, stride: int, kernel: int, dilation: int
) -> list[int]:
    """The number of places of each window along an axis that lie in the extent, or in the padding before and behind that
    counts."""
    starts = [i * stride - low for i in range(windows)]
    inside = [[-counted[0] <= s + k * dilation < extent + counted[1] for k in range(kernel)] for s in starts]
    return [max(sum(i), 1) for i in inside]
