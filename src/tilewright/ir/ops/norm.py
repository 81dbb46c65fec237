"""Reductions and the operations built on them: softmax, layer norm. All compute in f32 or wider."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from tilewright.dtype import F64, PRED, U64, DType
from tilewright.errors import TypeMismatchError
from tilewright.ir.factor import Factor, aligned
from tilewright.ir.graph import Node, Op
from tilewright.ir.ops.functions import as_s64, narrow_integer
from tilewright.ir.ops.integers import in_order_u64
from tilewright.ir.ops.rounding import to_float
from tilewright.ir.ops.shape import broadcastable, reduced_shape
from tilewright.ir.types import TensorType, Type, normalize_axis

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

Reduction = Literal["add", "multiply", "maximum", "minimum", "and", "or", "mean"]


def _compute(d: DType) -> torch.dtype:
    return torch.float64 if d is F64 else torch.float32


@dataclass(frozen=True)
class Reduce(Op):
    """`fn` over `axes` (sorted, not negative); integers wrap; floats narrower than f32 accumulate in f32.

    Over no elements: 0 for add, 1 for multiply, the type's lowest or highest value for maximum and minimum (an infinity where
    it has one), NaN for mean. On pred, add and maximum are `or`, multiply and minimum `and`.
    """

    arity: ClassVar[int | None] = 1

    fn: Reduction
    axes: tuple[int, ...]
    keepdims: bool = False

    def infer(self, *src: TensorType) -> Type:
        (x,) = src
        if list(self.axes) != sorted({normalize_axis(a, x.rank, "reduce") for a in self.axes}):
            raise TypeMismatchError(f"reduce axes {list(self.axes)} of {x} are not sorted, distinct and non-negative")
        if (self.fn in ("and", "or") and x.dtype.is_float) or (self.fn == "mean" and not x.dtype.is_float):
            raise TypeMismatchError(f"reduce {self.fn} does not take {x.dtype}")
        return x.with_shape(reduced_shape(x.shape, self.axes, self.keepdims))

    def factors(self, node: Node) -> tuple[Factor, ...]:
        found: list[Factor] = []
        for axis in range(len(node.src[0].shape)):
            if axis not in self.axes:
                gone = 0 if self.keepdims else sum(a < axis for a in self.axes)
                found.append(Factor((axis,), axis - gone))
            elif self.fn != "mean":
                found.append(Factor((axis,), None, self.fn))
        return tuple(found)

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        x, d = src[0], node.dtype
        if not self.axes:
            return x
        wide = x.to(_compute(d)) if d.is_float else x if d is PRED else as_s64(x)
        kept = self._reduced(wide, d).reshape(node.shape)
        if d is PRED:
            return kept
        return narrow_integer(kept, d) if d.is_integer else to_float(kept, d)

    def _reduced(self, x: torch.Tensor, d: DType) -> torch.Tensor:
        axes = list(self.axes)
        if d is PRED:
            return x.all(axes) if self.fn in ("and", "multiply", "minimum") else x.any(axes)
        if self.fn == "add":
            return x.sum(axes)
        if self.fn == "mean":
            return x.mean(axes)
        if self.fn in ("maximum", "minimum"):
            if any(x.shape[a] == 0 for a in axes):
                worst = d.lowest if self.fn == "maximum" else d.highest
                worst = -1 if worst == U64.max else worst  # its bits, as s64
                return torch.full(reduced_shape(tuple(x.shape), self.axes, False), worst, dtype=x.dtype, device=x.device)
            extreme = partial(torch.amax if self.fn == "maximum" else torch.amin, dim=axes)
            picked = (in_order_u64(extreme, to_pred=False) if d is U64 else extreme)(x)
            return _signed_zeros(picked, x, axes, greater=self.fn == "maximum") if d.is_float else picked
        one_by_one = {"multiply": torch.mul, "and": torch.bitwise_and, "or": torch.bitwise_or}[self.fn]
        start = {"multiply": 1, "and": -1, "or": 0}[self.fn]
        for axis in reversed(axes):
            total = torch.full_like(x.select(axis, 0), start) if x.shape[axis] else x.sum(axis) + start
            for part in x.unbind(axis):
                total = one_by_one(total, part)
            x = total
        return x


def _signed_zeros(picked: torch.Tensor, x: torch.Tensor, axes: list[int], *, greater: bool) -> torch.Tensor:
    """Extremes over axes whose zeros are +0 (or, of a minimum, -0) if any among the elements is."""
    zeros = picked == 0
    if not zeros.any():
        return picked
    wanted = ((x == 0) & (x.signbit() != greater)).any(axes) == greater
    return torch.where(zeros, torch.where(wanted, 0.0, -0.0).to(picked.dtype), picked)


@dataclass(frozen=True)
class Softmax(Op):
    """exp(x - max) / sum along `axis`, or its logarithm."""

    arity: ClassVar[int | None] = 1

    axis: int
    log: bool = False

    def infer(self, *src: TensorType) -> Type:
        (x,) = src
        normalize_axis(self.axis, x.rank, "softmax")
        if not x.dtype.is_float:
            raise TypeMismatchError(f"softmax does not take {x.dtype}")
        return x

    def factors(self, node: Node) -> tuple[Factor, ...]:
        own = self.axis % len(node.shape)
        return tuple(Factor((axis,), axis) for axis in range(len(node.shape)) if axis != own)

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        f = torch.log_softmax if self.log else torch.softmax
        return to_float(f(src[0].to(_compute(node.dtype)), self.axis), node.dtype)


@dataclass(frozen=True)
class LayerNorm(Op):
    """(x - mean) / sqrt(var + epsilon) over the axes from `axis` on, then * scale + bias; sources x[, scale[, bias]].

    `center=False` is RMS norm: x / sqrt(mean(x**2) + epsilon). Scale and bias broadcast against x. Computed in f32.
    Sources: Ba et al. 2016 (arXiv 1607.06450); Zhang and Sennrich 2019 (arXiv 1910.07467).
    """

    axis: int
    epsilon: float
    center: bool = True

    def infer(self, *src: TensorType) -> Type:
        if not 1 <= len(src) <= 3:
            raise TypeMismatchError(f"layer_norm takes x and maybe scale and bias, not {len(src)} operands")
        x = src[0]
        normalize_axis(self.axis, x.rank, "layer_norm")
        if not x.dtype.is_float:
            raise TypeMismatchError(f"layer_norm does not take {x.dtype}")
        for t in src[1:]:
            if t.dtype is not x.dtype or not broadcastable(t.shape, x.shape):
                raise TypeMismatchError(f"layer_norm of {x} cannot take a scale or bias {t}")
        return x

    def factors(self, node: Node) -> tuple[Factor, ...]:
        own = self.axis % len(node.shape)
        return aligned(node.tensor, [s.tensor for s in node.src])[:own]

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        x = src[0].to(_compute(node.dtype))
        axes = list(range(self.axis % x.dim(), x.dim()))
        if self.center:
            x = x - x.mean(axes, keepdim=True)
        y = x * torch.rsqrt(x.square().mean(axes, keepdim=True) + self.epsilon)
        if len(src) > 1:
            y = y * src[1].to(y.dtype)
        if len(src) > 2:
            y = y + src[2].to(y.dtype)
        return to_float(y, node.dtype)
