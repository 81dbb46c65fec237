"""Elementwise operations. All broadcast their operands as NumPy does; none promotes a type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from tilewright.dtype import F64, PRED, DType
from tilewright.errors import TypeMismatchError
from tilewright.ir.factor import Factor, aligned
from tilewright.ir.graph import Node, Op
from tilewright.ir.ops.functions import FUNCTIONS, by_bits, evaluate_function, narrow_integer, result_dtype
from tilewright.ir.ops.rounding import to_float
from tilewright.ir.types import Shape, TensorType, Type, broadcast_shapes

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

Overflow = Literal["wrap", "saturate", "ieee"]


@dataclass(frozen=True)
class Map(Op):
    """Function `fn` (a key of `functions.FUNCTIONS`) on each element; operands share one type."""

    fn: str

    def infer(self, *src: TensorType) -> Type:
        f = FUNCTIONS.get(self.fn)
        if f is None:
            raise TypeMismatchError(f"map knows no function {self.fn!r}")
        if len(src) != f.arity:
            raise TypeMismatchError(f"{self.fn} takes {f.arity} operands, not {len(src)}")
        if len({t.dtype for t in src}) != 1:
            raise TypeMismatchError(
                f"{self.fn} takes operands of one type, not {', '.join(map(str, src))}", hint="convert first"
            )
        if src[0].dtype.kind not in f.kinds:
            raise TypeMismatchError(f"{self.fn} does not take {src[0].dtype}")
        return TensorType(result_dtype(f, src[0].dtype), broadcast_shapes(*(t.shape for t in src), where=self.fn))

    def factors(self, node: Node) -> tuple[Factor, ...]:
        return aligned(node.tensor, [s.tensor for s in node.src])

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        return evaluate_function(FUNCTIONS[self.fn], node.src[0].dtype, list(src))


@dataclass(frozen=True)
class Select(Op):
    """`on_true` where `pred`, else `on_false`, element by element."""

    def infer(self, *src: TensorType) -> Type:
        if len(src) != 3 or src[0].dtype is not PRED or src[1].dtype is not src[2].dtype:
            raise TypeMismatchError(f"select takes pred and two operands of one type, not {', '.join(map(str, src))}")
        return TensorType(src[1].dtype, broadcast_shapes(*(t.shape for t in src), where="select"))

    def factors(self, node: Node) -> tuple[Factor, ...]:
        return aligned(node.tensor, [s.tensor for s in node.src])

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        return by_bits(partial(torch.where, src[0]), src[1], src[2])


@dataclass(frozen=True)
class Convert(Op):
    """Each element as `dtype`.

    To an integer from an integer: `wrap` keeps the low bits, `saturate` clamps. To an integer from a float: rounds toward
    zero, clamps, and NaN gives 0 (XLA's rule), whatever `overflow` says. To a float: round half to even, once; past the
    largest finite value `saturate` clamps to it (to a type of a greater range nothing is past it, and infinity stays), any
    other value gives the format's infinity or, where it has none, NaN. To pred: not equal to zero.
    """

    arity: ClassVar[int | None] = 1

    dtype: DType
    overflow: Overflow = "wrap"

    def infer(self, *src: TensorType) -> Type:
        (x,) = src
        if self.dtype.kind == "opaque":
            raise TypeMismatchError(f"nothing converts to {self.dtype}")
        return x.with_dtype(self.dtype)

    def factors(self, node: Node) -> tuple[Factor, ...]:
        return aligned(node.tensor, [s.tensor for s in node.src])

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        return convert_tensor(src[0], node.src[0].dtype, self.dtype, self.overflow)


def convert_tensor(x: torch.Tensor, source: DType, target: DType, overflow: Overflow) -> torch.Tensor:
    """`Convert` on a tensor of logical type `source`."""
    if target is PRED:
        return x.to(torch.float32) != 0 if source.is_float and source.bits <= 8 else x != 0
    if target.is_float:
        narrows = source is not target and source.max >= target.max
        return to_float(x, target, saturate=overflow == "saturate" and narrows)
    if source.is_float:
        return _float_to_integer(x, target)
    if overflow == "saturate" and source.is_integer and source is not target:
        x = _clamp_integer(x, source, target)
    if source.name == "u64":
        x = x.view(torch.int64)
    elif source.name in ("u16", "u32"):
        x = x.to(torch.int64)
    return narrow_integer(x, target)


def _float_to_integer(x: torch.Tensor, target: DType) -> torch.Tensor:
    wide = torch.nan_to_num(x.to(torch.float64), nan=0.0, posinf=float("inf"), neginf=float("-inf"))
    wide = wide.clamp(float(target.min), float(target.max)).trunc()
    if target.bits < 64:
        return wide.to(torch.int64).to(target.to_torch())
    # 2**63 - 1 is no float64: clamp below it, then put the limit back.
    if target.kind == "int":
        inside = wide.clamp(max=2.0**63 - 1024).to(torch.int64)
        return torch.where(wide >= 2.0**63 - 1, torch.full_like(inside, (1 << 63) - 1), inside)
    upper = wide >= 2.0**63
    low = torch.where(upper, wide - 2.0**63, wide).clamp(max=2.0**63 - 1024).to(torch.int64)
    value = torch.where(upper, low + torch.full_like(low, -(1 << 63)), low)
    return torch.where(wide >= 2.0**64 - 1, torch.full_like(low, -1), value).view(torch.uint64)


def _clamp_integer(x: torch.Tensor, source: DType, target: DType) -> torch.Tensor:
    if source.name == "u64":
        v = x.view(torch.int64)
        top = torch.full_like(v, min(int(target.max), (1 << 63) - 1))
        return torch.where((v < 0) | (v > top), top, v).view(torch.uint64)
    wide = x.to(torch.int64)
    return wide.clamp(max(int(target.min), -(1 << 63)), min(int(target.max), (1 << 63) - 1)).to(
        torch.int64 if source.name in ("u16", "u32") else x.dtype
    )


def _check_scale(x: TensorType, scale: TensorType, zero_point: TensorType | None, block: Shape | None, op: str) -> None:
    if not scale.dtype.is_float:
        raise TypeMismatchError(f"{op}: the scale is {scale.dtype}, not a float", hint="convert it")
    if block is not None and any(b < 1 for b in block):
        raise TypeMismatchError(f"{op}: a block cannot be {list(block)}")
    for what, t in (("scale", scale), ("zero point", zero_point)):
        if t is None:
            continue
        if block is None:
            if broadcast_shapes(x.shape, t.shape, where=f"{op} {what}") != x.shape:
                raise TypeMismatchError(f"{op}: {what} {t} is larger than {x}")
        elif len(block) != x.rank or t.shape != tuple(-(-d // b) for d, b in zip(x.shape, block, strict=True)):
            raise TypeMismatchError(f"{op}: {what} {t} does not give one value a {list(block)} block of {x}")


def _scaled(node: Node, block: Shape | None) -> tuple[Factor, ...]:
    """The factors of what scales: elementwise, or along an axis of whole blocks also an axis of the scales."""
    if block is None:
        return aligned(node.tensor, [s.tensor for s in node.src])
    found: list[Factor] = []
    for axis, (extent, size) in enumerate(zip(node.shape, block, strict=True)):
        if extent % size == 0:
            found.append(Factor((axis,) * len(node.src), axis))
        elif size > extent:
            found.append(Factor((axis, *(None for _ in node.src[1:])), axis))
    return tuple(found)


def expand_blocks(t: torch.Tensor, shape: Shape, block: Shape | None) -> torch.Tensor:
    """A scale or zero point given per block, repeated to the shape of what it scales; as it is when not blocked."""
    if block is None:
        return t
    for axis, b in enumerate(block):
        if b > 1:
            t = t.repeat_interleave(min(b, max(shape[axis], 1)), axis).narrow(axis, 0, shape[axis])
    return t


@dataclass(frozen=True)
class Quantize(Op):
    """saturate(round_half_even(x / scale) + zero_point), sources x, scale[, zero_point] (ONNX QuantizeLinear).

    The scale broadcasts against x as NumPy does (scalar: per tensor; [C, 1]: per row), or, with `block`, holds one value
    for each block of that shape. The division is in f32 (f64 if x is f64); the sum is exact; NaN gives 0. To a float the
    quotient is converted, past the largest value as `overflow` says, and the zero point is not added.
    """

    dtype: DType
    block: Shape | None = None
    overflow: Overflow = "saturate"

    def infer(self, *src: TensorType) -> Type:
        if len(src) not in (2, 3):
            raise TypeMismatchError(f"quantize takes x, scale and maybe a zero point, not {len(src)} operands")
        x = src[0].dtype
        _check_scale(src[0], src[1], src[2] if len(src) == 3 else None, self.block, "quantize")
        if not (x.is_float or x.is_integer) or not (self.dtype.is_float or (self.dtype.is_integer and self.dtype.bits <= 32)):
            raise TypeMismatchError(f"quantize does not turn {x} into {self.dtype}", hint="s32 and narrower, or a float")
        if len(src) == 3 and src[2].dtype is not self.dtype:
            raise TypeMismatchError(f"quantize to {self.dtype} has a zero point of type {src[2].dtype}")
        return src[0].with_dtype(self.dtype)

    def factors(self, node: Node) -> tuple[Factor, ...]:
        return _scaled(node, self.block)

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        compute = torch.float64 if node.src[0].dtype is F64 else torch.float32
        scale = expand_blocks(src[1].to(compute), node.shape, self.block)
        quotient = src[0].to(compute) / scale
        if self.dtype.is_float:
            return to_float(quotient, self.dtype, saturate=self.overflow == "saturate")
        rounded = torch.round(quotient)
        if self.dtype.bits <= 8 and compute is torch.float32:
            # Held to 18 bits, past which every 8-bit code is an end, the sum is exact in f32 too.
            code = rounded.clamp(-(2.0**17), 2.0**17)
            if len(src) == 3:
                code = code + expand_blocks(src[2].to(compute), node.shape, self.block)
            return code.nan_to_num(0.0).clamp(float(self.dtype.min), float(self.dtype.max)).to(self.dtype.to_torch())
        rounded = rounded.to(torch.float64)
        if len(src) == 3:
            rounded = rounded + expand_blocks(src[2].to(torch.float64), node.shape, self.block)
        return _float_to_integer(rounded, self.dtype)


@dataclass(frozen=True)
class Dequantize(Op):
    """(x - zero_point) * scale, sources x, scale[, zero_point] (ONNX DequantizeLinear); result of type `dtype`.

    Scale as for `Quantize`. The difference is exact, then rounded to f32 (f64 for a result of f64) if it does not fit; the
    product is rounded to that, then to `dtype`.
    """

    dtype: DType
    block: Shape | None = None

    def infer(self, *src: TensorType) -> Type:
        if len(src) not in (2, 3):
            raise TypeMismatchError(f"dequantize takes x, scale and maybe a zero point, not {len(src)} operands")
        _check_scale(src[0], src[1], src[2] if len(src) == 3 else None, self.block, "dequantize")
        if not self.dtype.is_float:
            raise TypeMismatchError(f"dequantize gives a float, not {self.dtype}")
        if not (src[0].dtype.is_float or src[0].dtype.is_integer):
            raise TypeMismatchError(f"dequantize does not take {src[0]}")
        if len(src) == 3 and src[2].dtype is not src[0].dtype:
            raise TypeMismatchError(f"dequantize of {src[0]} has a zero point of type {src[2].dtype}")
        return src[0].with_dtype(self.dtype)

    def factors(self, node: Node) -> tuple[Factor, ...]:
        return _scaled(node, self.block)

    def evaluate(self, node: Node, src: Sequence[torch.Tensor]) -> Value:
        compute = torch.float64 if self.dtype is F64 else torch.float32
        x, shape = src[0], node.shape
        if len(src) == 3 and node.src[0].dtype.is_integer:
            # int64 keeps the difference of two s32 exact
            wide = torch.int64 if node.src[0].dtype.bits >= 32 else torch.int32
            x = x.to(wide) - expand_blocks(src[2].to(wide), shape, self.block)
        return to_float(x.to(compute) * expand_blocks(src[1].to(compute), shape, self.block), self.dtype)
