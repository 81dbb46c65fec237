"""ONNX's Resize and GridSample. An axis of Resize becomes elements picked at known places, or sums of a few of them; where
torch's `upsample_*` means the same, that is left to torch, which does all axes in one pass."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tilewright.dtype import F32, F64
from tilewright.frontends.onnx.by_torch import by_torch
from tilewright.frontends.onnx.node import OpNode, converts
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import const, convert, expand_dims, map_
from tilewright.ir.extent import is_open
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather
from tilewright.ir.types import TensorType

_LINEAR = {3: "upsample_linear1d", 4: "upsample_bilinear2d", 5: "upsample_trilinear3d"}
_USUAL_A = -0.75  # of cubic weights, which torch's are
_GRID_MODES = {"linear": 0, "bilinear": 0, "nearest": 1, "cubic": 2, "bicubic": 2}
_GRID_PADDINGS = {"zeros": 0, "border": 1, "reflection": 2}

MOST = 1 << 24  # elements of an axis: to there f32 counts places


@dataclass(frozen=True)
class _Axis:
    """An axis that another one takes the place of.

    Attributes:
        at: which.
        before, after: extents.
        scale: what places are divided by; `after / before` or what it was rounded from.
    """

    at: int
    before: int
    after: int
    scale: float

    def places(self, transform: str) -> np.ndarray:
        """The places of new elements in the old axis (`coordinate_transformation_mode`), in f32 as onnxruntime has them."""
        one = np.float32
        y, n, scale = np.arange(self.after, dtype=one), one(self.before), one(self.scale)
        if transform == "align_corners":
            return y * (n - 1) / one(self.after - 1) if self.after > 1 else y
        if transform == "asymmetric":
            return y / scale
        if transform == "pytorch_half_pixel" and self.after == 1:
            return y
        if transform in ("half_pixel", "pytorch_half_pixel"):
            return (y + one(0.5)) / scale - one(0.5)
        if transform == "half_pixel_symmetric":
            return n / 2 * (1 - one(self.after) / (scale * n)) + (y + one(0.5)) / scale - one(0.5)
        raise Unmodelled(f"its coordinates are {transform!r}")


@converts("Resize", 11, 19)
def _resize(op: OpNode) -> Node:
    x, mode = op.input(0), op.text("mode", "nearest")
    transform, rank = op.text("coordinate_transformation_mode", "half_pixel"), len(x.shape)
    if is_open(x.shape) or 0 in x.shape:
        raise Unmodelled("an extent is open, or 0")
    numbered = [op.normal_axis(a, rank) for a in op.integers("axes", range(rank))]
    axes = [a for a in _axes(op, x, numbered) if a.after != a.before or a.scale != 1.0]
    if any(a.after < 1 for a in axes):
        raise Unmodelled("nothing is left of an axis")
    if any(a.after > MOST for a in axes):
        raise Unmodelled(f"an axis of more than {MOST} elements")
    if op.integer("antialias", 0) and any(a.scale < 1 for a in axes):
        raise Unmodelled("it smooths what it makes smaller")
    return _resized(op, x, axes, mode, transform)


@converts("Upsample", 9, 9)
def _upsample(op: OpNode) -> Node:
    x = op.input(0)
    if is_open(x.shape) or 0 in x.shape:
        raise Unmodelled("an extent is open, or 0")
    axes = [a for a in _by_scales(op, x, range(len(x.shape)), 1) if a.scale != 1.0]
    if any(a.scale < 1 for a in axes):
        raise op.malformed("Upsample by less than 1")
    return _resized(op, x, axes, op.text("mode", "nearest"), "asymmetric")


def _axes(op: OpNode, x: Node, axes: Sequence[int]) -> list[_Axis]:
    """The axes as `sizes` or `scales` have them."""
    given = op.optional(3)
    if given is None or given.shape == (0,):
        return _by_scales(op, x, axes, 2)
    sizes = op.known_ints(3)
    if is_open(sizes) or len(sizes) != len(axes):
        raise Unmodelled(f"sizes {sizes} for {len(axes)} axes")
    factors = [w / x.shape[a] for w, a in zip(sizes, axes, strict=True)]
    policy = op.text("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return [_Axis(a, x.shape[a], w, f) for a, w, f in zip(axes, sizes, factors, strict=True)]
    factor = max(factors) if policy == "not_smaller" else min(factors)
    return [_Axis(a, x.shape[a], int(x.shape[a] * factor + 0.5), factor) for a in axes]


def _by_scales(op: OpNode, x: Node, axes: Sequence[int], index: int) -> list[_Axis]:
    source = op.input(index)
    scales = op.known.listed(source)
    if scales is None or is_open(scales) or len(scales) != len(axes):
        raise Unmodelled(f"its scales are not known, or not of {len(axes)} axes")
    if min(scales, default=1.0) <= 0:
        raise op.malformed(f"{op.op_type} by {min(scales)}")
    return [
        _Axis(a, x.shape[a], int(np.floor(np.float32(x.shape[a]) * np.float32(s))), s)
        for a, s in zip(axes, scales, strict=True)
    ]


def _resized(op: OpNode, x: Node, axes: Sequence[_Axis], mode: str, transform: str) -> Node:
    if mode == "nearest":
        for axis in axes:
            at = _rounded(axis.places(transform), op.text("nearest_mode", "round_prefer_floor" if op.version > 9 else "floor"))
            x = Node(Gather(axis.at), x, const(torch.from_numpy(at.clip(0, axis.before - 1).astype(np.int64))))
        return x
    if mode not in ("linear", "cubic") or not x.dtype.is_float:
        raise Unmodelled(f"mode {mode!r} of {x.dtype}")
    wide = x.dtype if x.dtype is F64 else F32
    made = _by_upsample(op, convert(x, wide), axes, mode, transform) or functools.reduce(
        lambda y, axis: _weighed(op, y, axis, mode, transform), axes, convert(x, wide)
    )
    return convert(made, x.dtype)


def _rounded(places: np.ndarray, how: str) -> np.ndarray:
    """The nearest whole place of each, as `nearest_mode` says."""
    if how not in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"):
        raise Unmodelled(f"nearest_mode {how!r}")
    if how.startswith("round"):
        places = np.ceil(places - 0.5) if how.endswith("floor") else np.floor(places + 0.5)
    return np.ceil(places) if how == "ceil" else np.floor(places)


def _by_upsample(op: OpNode, x: Node, axes: Sequence[_Axis], mode: str, transform: str) -> Node | None:
    """All axes by torch; None where it has none that means the same."""
    rank, corners = len(x.shape), transform == "align_corners"
    half = transform == "half_pixel" or (transform == "pytorch_half_pixel" and all(a.after > 1 for a in axes))
    target = _LINEAR.get(rank) if mode == "linear" else "upsample_bicubic2d" if rank == 4 else None
    cubic = mode == "cubic" and (op.integer("exclude_outside", 0) or abs(_cubic_a(op) - _USUAL_A) > 1e-6)
    if target is None or cubic or not (half or corners) or any(a.at < 2 for a in axes):
        return None
    found = {a.at: a for a in axes}
    shape = tuple(found[i].after if i in found else d for i, d in enumerate(x.shape))
    scales = [found[i].scale if i in found else 1.0 for i in range(2, rank)]
    return by_torch(op, f"aten.{target}.default", [x, list(shape[2:]), corners, *scales], [x.tensor.with_shape(shape)])[0]


def _cubic_a(op: OpNode) -> float:
    return op.real("cubic_coeff_a", _USUAL_A)


def _weighed(op: OpNode, x: Node, axis: _Axis, mode: str, transform: str) -> Node:
    """An axis as sums of two or four neighbours, of which those beyond an end are that end's, or are left out."""
    places = axis.places(transform)
    first = np.floor(places)
    r = places - first
    if mode == "linear":
        offsets, weights = range(2), [1 - r, r]
    else:
        a, offsets = _cubic_a(op), range(-1, 3)
        near = [((a + 2) * d - (a + 3)) * d * d + 1 for d in (r, 1 - r)]
        far = [((a * d - 5 * a) * d + 8 * a) * d - 4 * a for d in (r + 1, 2 - r)]
        weights = [far[0], *near, far[1]]
    taps = [first + o for o in offsets]
    if op.integer("exclude_outside", 0):
        weights = [np.where((t >= 0) & (t < axis.before), w, 0.0) for t, w in zip(taps, weights, strict=True)]
        whole = sum(weights)
        weights = [w / whole for w in weights]
    terms: list[Node] = []
    for tap, weight in zip(taps, weights, strict=True):
        at = const(torch.from_numpy(tap.clip(0, axis.before - 1).astype(np.int64)))
        by = expand_dims(const(torch.from_numpy(weight).to(x.dtype.to_torch())), axis.at, len(x.shape))
        terms.append(map_("multiply", Node(Gather(axis.at), x, at), by))
    return functools.reduce(lambda a, b: map_("add", a, b), terms)


@converts("GridSample", 16, 22)
def _grid_sample(op: OpNode) -> Node:
    """x [N, C, *spatial] at the places of a grid [N, *new, axes], which torch reads as ONNX does."""
    x, grid = op.input(0), op.input(1)
    mode, padding = _GRID_MODES.get(op.text("mode", "linear")), _GRID_PADDINGS.get(op.text("padding_mode", "zeros"))
    rank = len(x.shape)
    if mode is None or padding is None or rank not in (4, 5) or (rank == 5 and mode == 2):
        raise Unmodelled(f"mode {op.text('mode', 'linear')!r} over {x.type}")
    if len(grid.shape) != rank or grid.shape[-1] != rank - 2 or grid.shape[0] != x.shape[0]:
        raise op.malformed(f"GridSample of {x.type} at {grid.type}")
    if not x.dtype.is_float or not grid.dtype.is_float or 0 in (*x.shape, *grid.shape):
        raise Unmodelled(f"it reads {x.type} at {grid.type}")
    wide = F64 if F64 in (x.dtype, grid.dtype) else F32
    args = [convert(x, wide), convert(grid, wide), mode, padding, bool(op.integer("align_corners", 0))]
    result = TensorType(wide, (*x.shape[:2], *grid.shape[1:-1]))
    return convert(by_torch(op, f"aten.grid_sampler_{rank - 2}d.default", args, [result])[0], x.dtype)
