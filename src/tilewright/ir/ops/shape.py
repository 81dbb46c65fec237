"""Operations that move, pick or make elements without computing on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from tilewright.dtype import DType
from tilewright.errors import TypeMismatchError
from tilewright.ir.factor import Factor, aligned
from tilewright.ir.graph import Node, Op
from tilewright.ir.ops.functions import by_bits, narrow_integer
from tilewright.ir.ops.rounding import to_float
from tilewright.ir.types import Shape, TensorType, Type, broadcast_shapes, normalize_axis, reshape_groups

if TYPE_CHECKING:
    from tilewright.ir.graph import Value


@dataclass(frozen=True)
class Reshape(Op):
    """The same elements in row-major order under another shape."""

    arity: ClassVar[int | None] = 1

    shape: Shape

    def infer(self, *src: TensorType) -> Type:
        (x,) = src
        if x.elements != math.prod(self.shape) or any(d < 0 for d in self.shape):
            raise TypeMismatchError(f"{x} cannot be reshaped to {list(self.shape)}")
        return x.with_shape(self.shape)

    def factors(self, node: Node) -> tuple[Factor, ...]:
        before, after = node.src[0].shape, node.shape
        found: list[Factor] = []
        for old, new in reshape_groups(before, after) or ():  # a run of axes is cut at its outermost one alone
            outer = [next((a for a in axes if shape[a] != 1), None) for axes, shape in ((old, before), (new, after))]
            if outer[0] is not None and outer[1] is not None:
                found.append(Factor((outer[0],), outer[1]))
        return tuple(found)

    def of_part(self, node: Node, shape: Shape, src: Sequence[TensorType]) -> Op:
        return Reshape(shape)

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        return src[0].reshape(self.shape)


@dataclass(frozen=True)
class Transpose(Op):
    """Axis i of the result is axis perm[i] of the source."""

    arity: ClassVar[int | None] = 1

    perm: tuple[int, ...]

    def infer(self, *src: TensorType) -> Type:
        (x,) = src
        if sorted(self.perm) != list(range(x.rank)):
            raise TypeMismatchError(f"{list(self.perm)} is no permutation of the axes of {x}")
        return x.with_shape(x.shape[p] for p in self.perm)

    def factors(self, node: Node) -> tuple[Factor, ...]:
        return tuple(Factor((p,), axis) for axis, p in enumerate(self.perm))

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        return src[0].permute(self.perm)


@dataclass(frozen=True)
class Slice(Op):
    """Elements start, start + step, … below stop, on every axis; steps are positive."""

    arity: ClassVar[int | None] = 1

    start: Shape
    stop: Shape
    step: Shape

    def infer(self, *src: TensorType) -> Type:
        (x,) = src
        if not len(self.start) == len(self.stop) == len(self.step) == x.rank:
            raise TypeMismatchError(f"slice of {x} needs {x.rank} starts, stops and steps")
        for lo, hi, by, d in zip(self.start, self.stop, self.step, x.shape, strict=True):
            if not 0 <= lo <= hi <= d or by < 1:
                raise TypeMismatchError(f"slice [{lo}:{hi}:{by}] does not lie in an axis of {d}", where=f"slice of {x}")
        return x.with_shape(-(-(hi - lo) // by) for lo, hi, by in zip(self.start, self.stop, self.step, strict=True))

    def factors(self, node: Node) -> tuple[Factor, ...]:
        cut = zip(self.start, self.stop, self.step, node.src[0].shape, strict=True)
        return tuple(Factor((axis,), axis) for axis, c in enumerate(cut) if c == (0, c[3], 1, c[3]))

    def of_part(self, node: Node, shape: Shape, src: Sequence[TensorType]) -> Op:
        whole = [f.result for f in self.factors(node)]
        return Slice(
            self.start, tuple(d if a in whole else s for a, (d, s) in enumerate(zip(shape, self.stop, strict=True))), self.step
        )

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        index = tuple(slice(lo, hi, by) for lo, hi, by in zip(self.start, self.stop, self.step, strict=True))
        return src[0][index]


@dataclass(frozen=True)
class Pad(Op):
    """Sources x and a scalar: `low` and `high` copies of the scalar around each axis, `interior` between elements.

    Negative `low` or `high` crops, as in StableHLO.
    """

    arity: ClassVar[int | None] = 2

    low: Shape
    high: Shape
    interior: Shape

    def infer(self, *src: TensorType) -> Type:
        x, value = src
        if value.dtype is not x.dtype or value.elements != 1:
            raise TypeMismatchError(f"pad of {x} takes one {x.dtype}, not {value}")
        if not len(self.low) == len(self.high) == len(self.interior) == x.rank or any(i < 0 for i in self.interior):
            raise TypeMismatchError(f"pad of {x} needs {x.rank} lows, highs and interiors")
        shape = [self._extent(d, axis) for axis, d in enumerate(x.shape)]
        if any(d < 0 for d in shape):
            raise TypeMismatchError(f"pad crops more of {x} than there is")
        return x.with_shape(shape)

    def _extent(self, d: int, axis: int) -> int:
        return self.low[axis] + self.high[axis] + d + max(d - 1, 0) * self.interior[axis]

    def factors(self, node: Node) -> tuple[Factor, ...]:
        edges = zip(self.low, self.high, self.interior, strict=True)
        return tuple(Factor((axis, None), axis) for axis, e in enumerate(edges) if e == (0, 0, 0))

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        x, value = src
        return by_bits(lambda a, v: self._padded(a, v, node.shape), x, value.reshape(()))

    def _padded(self, x: torch.Tensor, value: torch.Tensor, shape: Shape) -> torch.Tensor:
        spread = [d + max(d - 1, 0) * i for d, i in zip(x.shape, self.interior, strict=True)]
        # Space for everything, then crop what negative edges take away.
        front = [max(lo, 0) for lo in self.low]
        space = [f + s + max(hi, 0) for f, s, hi in zip(front, spread, self.high, strict=True)]
        out = value.expand(space).clone()
        out[tuple(slice(f, f + s, i + 1) for f, s, i in zip(front, spread, self.interior, strict=True))] = x
        crop = [max(-lo, 0) for lo in self.low]
        return out[tuple(slice(c, c + d) for c, d in zip(crop, shape, strict=True))]


@dataclass(frozen=True)
class Concat(Op):
    """Sources side by side along `axis`."""

    axis: int

    def infer(self, *src: TensorType) -> Type:
        if not src:
            raise TypeMismatchError("concat of nothing")
        axis = normalize_axis(self.axis, src[0].rank, "concat")
        rest = {(t.dtype, t.rank, t.shape[:axis], t.shape[axis + 1 :]) for t in src}
        if len(rest) != 1:
            raise TypeMismatchError(f"concat along axis {axis} of {', '.join(map(str, src))}")
        total = sum(t.shape[axis] for t in src)
        return src[0].with_shape((*src[0].shape[:axis], total, *src[0].shape[axis + 1 :]))

    def factors(self, node: Node) -> tuple[Factor, ...]:
        joined = self.axis % len(node.shape)
        return tuple(Factor((axis,) * len(node.src), axis) for axis in range(len(node.shape)) if axis != joined)

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        return by_bits(lambda *t: torch.cat(t, self.axis), *src)


@dataclass(frozen=True)
class Write(Op):
    """Sources x, integer positions [n] and y: x with slice i of y for its slice positions[i] along `axis` (torch's index_copy).

    x is an input that is state (`Graph.state`), or another write to one, and nothing else reads it: the result takes
    its memory. Positions are distinct; negative ones count from the end, or where `wraps` is false are out of range, as for
    torch's index_copy.
    """

    arity: ClassVar[int | None] = 3

    axis: int
    wraps: bool = True

    def infer(self, *src: TensorType) -> Type:
        x, positions, y = src
        axis = normalize_axis(self.axis, x.rank, "write")
        if not positions.dtype.is_integer or positions.rank != 1:
            raise TypeMismatchError(f"write takes a vector of integer positions, not {positions}")
        if y != x.with_shape((*x.shape[:axis], positions.elements, *x.shape[axis + 1 :])):
            raise TypeMismatchError(f"write of {y} to {positions.elements} positions of axis {axis} of {x}")
        return x

    def factors(self, node: Node) -> tuple[Factor, ...]:
        written = self.axis % len(node.shape)
        return tuple(Factor((axis, None, axis), axis) for axis in range(len(node.shape)) if axis != written)

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        x, positions, y = src
        index = positions.to(torch.int64)
        if self.wraps:
            index = torch.where(index < 0, index + x.shape[self.axis], index)
        return by_bits(lambda x, y: x.index_copy(self.axis, index, y), x, y)


@dataclass(frozen=True)
class Broadcast(Op):
    """The source repeated to `shape`, by NumPy's rule (align right, stretch axes of 1)."""

    arity: ClassVar[int | None] = 1

    shape: Shape

    def infer(self, *src: TensorType) -> Type:
        (x,) = src
        if broadcast_shapes(x.shape, self.shape, where="broadcast") != self.shape:
            raise TypeMismatchError(f"{x} does not broadcast to {list(self.shape)}")
        return x.with_shape(self.shape)

    def factors(self, node: Node) -> tuple[Factor, ...]:
        return aligned(node.tensor, [node.src[0].tensor])

    def of_part(self, node: Node, shape: Shape, src: Sequence[TensorType]) -> Op:
        return Broadcast(shape)

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        return src[0].expand(self.shape)


@dataclass(frozen=True)
class Gather(Op):
    """Sources x and integer indices, both read along `axis`.

    Whole slices (default): the result is x.shape[:axis] + indices.shape + x.shape[axis + 1:] (ONNX Gather, an embedding
    lookup). `elementwise`: indices have x's rank and pick one element each (ONNX GatherElements). Negative indices count
    from the end; where `wraps` is false they are out of range, as for torch's embedding.
    """

    arity: ClassVar[int | None] = 2

    axis: int
    elementwise: bool = False
    wraps: bool = True

    def infer(self, *src: TensorType) -> Type:
        x, index = src
        axis = normalize_axis(self.axis, x.rank, "gather")
        if not index.dtype.is_integer:
            raise TypeMismatchError(f"gather takes integer indices, not {index}")
        if not self.elementwise:
            return x.with_shape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))
        if index.rank != x.rank or any(i > d for a, (i, d) in enumerate(zip(index.shape, x.shape, strict=True)) if a != axis):
            raise TypeMismatchError(f"elementwise gather from {x} with indices {index}")
        return x.with_shape(index.shape)

    def factors(self, node: Node) -> tuple[Factor, ...]:
        x, index = node.src
        axis = self.axis % len(x.shape)
        if self.elementwise:
            same = (a for a, (d, i) in enumerate(zip(x.shape, index.shape, strict=True)) if d == i and a != axis)
            return tuple(Factor((a, a), a) for a in same)
        kept = [Factor((a, None), a if a < axis else a + len(index.shape) - 1) for a in range(len(x.shape)) if a != axis]
        return (*kept, *(Factor((None, a), axis + a) for a in range(len(index.shape))))

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        x, index = src
        axis = self.axis % x.dim()
        index = index.to(torch.int64)
        if self.wraps:
            index = torch.where(index < 0, index + x.shape[axis], index)
        try:
            if self.elementwise:
                return by_bits(lambda t: torch.gather(t, axis, index), x)
            picked = by_bits(lambda t: torch.index_select(t, axis, index.reshape(-1)), x)
        except (IndexError, RuntimeError) as error:
            if index.numel() and (int(index.min()) < 0 or int(index.max()) >= x.shape[axis]):
                wrong = next(i for i in (int(index.min()), int(index.max())) if not 0 <= i < x.shape[axis])
                raise IndexError(f"index out of range: {wrong} of {x.shape[axis]} along axis {axis}") from error
            raise
        return picked.reshape(node.shape)


@dataclass(frozen=True)
class Iota(Op):
    """0, 1, 2, … along `axis`, the same on every other; converted as `convert` does where the type is too narrow."""

    arity: ClassVar[int | None] = 0
    constant_source: ClassVar[bool] = True

    dtype: DType
    shape: Shape
    axis: int

    def infer(self, *src: TensorType) -> Type:
        normalize_axis(self.axis, len(self.shape), "iota")
        if not (self.dtype.is_integer or self.dtype.is_float) or any(d < 0 for d in self.shape):
            raise TypeMismatchError(f"iota cannot give {TensorType(self.dtype, self.shape)}")
        return TensorType(self.dtype, self.shape)

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        axis = self.axis % len(self.shape)
        count = torch.arange(self.shape[axis], dtype=torch.int64)
        line = to_float(count, self.dtype) if self.dtype.is_float else narrow_integer(count, self.dtype)
        return line.reshape([-1 if a == axis else 1 for a in range(len(self.shape))]).expand(self.shape)


def reduced_shape(shape: Shape, axes: tuple[int, ...], keepdims: bool) -> Shape:
    """`shape` with `axes` gone, or 1 when kept."""
    if keepdims:
        return tuple(1 if a in axes else d for a, d in enumerate(shape))
    return tuple(d for a, d in enumerate(shape) if a not in axes)


def broadcastable(small: Shape, large: Shape) -> bool:
    """Tell whether `small` broadcasts to exactly `large`."""
    try:
        return broadcast_shapes(small, large) == large
    except TypeMismatchError:
        return False


VIEWS = (Reshape, Transpose, Slice, Broadcast)  # what a kernel reads as addresses
