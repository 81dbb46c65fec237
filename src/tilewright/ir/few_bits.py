"""Weights of a few bits as nodes: a linear layer with one, and 4-bit codes two to a byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.dtype import F32, S8, DType
from tilewright.ir.build import broadcast, const, convert, map_, reduce_, reshape, swap_last
from tilewright.ir.fused import Apply, Result, Side, fused_gemm
from tilewright.ir.graph import Node
from tilewright.ir.ops import Concat, Quantize, gemm

if TYPE_CHECKING:
    import torch


def quantised_linear(
    x: Node,
    codes: Node,
    scale: Node,
    group: int,
    *,
    zero_point: Node | None = None,
    offset: Node | None = None,
    bias: Node | None = None,
    quantize_activations: bool = False,
) -> Node:
    """x @ w^T + bias in x's type, where w = (code - zero_point) * scale + offset.

    Args:
        x: f16, bf16, f32 or f64 [rows, in].
        codes: [out, in].
        scale: [out, groups].
        group: codes along `in` that share a scale, a zero point and an offset.
        zero_point: of the codes' type, [out, groups].
        offset: f32 [out, groups]: multiplies the sums of x by groups, a second, small product.
        bias: [out].
        quantize_activations: x is quantised to s8 first, a scale a row.
    """
    steps: list[Apply] = []
    if offset is not None:
        steps.append(Apply("add", gemm(_sums(x, group), swap_last(offset))))
    if bias is not None:
        steps.append(Apply("add", bias))
    whole_rows = scale.shape[1] == 1 and codes.dtype.bits == 8  # one scale a row, in no need of blocks
    rhs = Side(codes, True, scale, zero_point, None if whole_rows else (1, group))
    return fused_gemm(_in_codes(x) if quantize_activations else Side(x), rhs, Result(x.dtype), steps)


def _in_codes(x: Node) -> Side:
    """x [rows, in] as s8 codes with a scale for each row, its largest magnitude / 127."""
    wide = convert(x, F32)
    scale = map_("divide", reduce_("maximum", map_("abs", wide), [1], keepdims=True), const(float(S8.max), F32))
    return Side(Node(Quantize(S8), wide, scale), scale=scale)


def _sums(x: Node, group: int) -> Node:
    """Sums [rows, groups] of x by groups along its columns, in f32."""
    rows, inner = x.shape
    wide = convert(x, F32)
    if inner % group:
        wide = Node(Concat(1), wide, broadcast(const(0.0, F32), (rows, group - inner % group)))
    return reduce_("add", reshape(wide, (rows, -(-inner // group), group)), [2])


def held_finite(scale: torch.Tensor, steps: torch.Tensor | int, to: torch.dtype) -> torch.Tensor:
    """Scales (f16, bf16 or f32, normal) that were rounded to the nearest, the next smaller where that was upwards and a weight
    of so many steps would be infinity in type `to`. What is not finite stays so: it tells of such a weight."""
    import torch

    bits = scale.view(torch.int32 if scale.itemsize == 4 else torch.int16)  # the next smaller number has the next smaller bits
    beyond = (scale.to(torch.float32) * steps).to(to).isinf() & scale.isfinite()
    return (bits - beyond.to(bits.dtype)).view(scale.dtype)


def pack_halves(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes, one to a byte [..., n], as u8 [..., ceil(n / 2)]: the first of two in the low half; the last byte is filled
    up with 0."""
    import torch

    low = codes.view(torch.uint8) & 15
    if low.shape[-1] % 2:
        low = torch.nn.functional.pad(low, (0, 1))
    return low[..., 0::2] | low[..., 1::2] << 4


def unpack_halves(packed: torch.Tensor, count: int, code_type: DType) -> torch.Tensor:
    """The `count` s4 or u4 codes that u8 [..., ceil(count / 2)] holds, one to a byte."""
    import torch

    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :count]
    if code_type.is_signed:
        return ((codes ^ 8).view(torch.int8) - 8).contiguous()
    return codes.contiguous()
