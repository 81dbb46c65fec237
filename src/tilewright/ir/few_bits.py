"""Weights of a few bits as nodes: a linear layer with one, and 4-bit codes two to a byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.dtype import F8E4M3FN, F32, S8, DType
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
    factor: Node | None = None,
    divides: bool = False,
    quantize_activations: bool = False,
) -> Node:
    """x @ w^T + bias in x's type, where w = (code - zero_point) * scale + offset, times `factor` or divided by it.

    Args:
        x: f16, bf16, f32 or f64 [rows, in].
        codes: [out, in].
        scale: [out, groups].
        group: codes along `in` that share a scale, a zero point and an offset.
        zero_point: of the codes' type, [out, groups].
        offset: f32 [out, groups]: multiplies the sums of x by groups, a second, small product.
        bias: [out].
        factor: f32 [1]: multiplies the sums.
        divides: the sums are divided by it instead.
        quantize_activations: x is quantised to 8 bits first, a scale a row: to s8, or to f8e4m3fn where codes are floats.
    """
    steps = [] if factor is None else [Apply("divide" if divides else "multiply", factor)]
    if offset is not None:
        steps.append(Apply("add", gemm(_sums(x, group), swap_last(offset))))
    if bias is not None:
        steps.append(Apply("add", bias))
    whole_rows = scale.shape[1] == 1 and codes.dtype.bits == 8  # one scale a row, in no need of blocks
    rhs = Side(codes, True, scale, zero_point, None if whole_rows else (1, group))
    lhs = _in_codes(x, F8E4M3FN if codes.dtype.is_float else S8) if quantize_activations else Side(x)
    return fused_gemm(lhs, rhs, Result(x.dtype), steps)


def _in_codes(x: Node, to: DType) -> Side:
    """x [rows, in] as 8-bit codes with a scale for each row, its largest magnitude / the largest code."""
    wide = convert(x, F32)
    scale = map_("divide", reduce_("maximum", map_("abs", wide), [1], keepdims=True), const(float(to.max), F32))
    if to.is_float:  # an integer is 0 where a row of zeros is divided by 0
        scale = map_("maximum", scale, const(2.0**-126, F32))
    return Side(Node(Quantize(to), wide, scale), scale=scale)


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
    up with 0. Floats (f4e2m1fn) have a sign, two bits of exponent and one of the fraction (OCP MX 1.0, 5.3.3)."""
    import torch

    low = half_codes(codes)
    if low.shape[-1] % 2:
        low = torch.nn.functional.pad(low, (0, 1))
    return low[..., 0::2] | low[..., 1::2] << 4


def half_codes(codes: torch.Tensor) -> torch.Tensor:
    """The 4 bits, as u8, of each 4-bit code that a byte carries: two's complement, or the code of an f4e2m1fn."""
    import torch

    low = codes.view(torch.uint8)
    if not codes.is_floating_point():
        return low & 15
    half = torch.zeros(256, dtype=torch.uint8, device=codes.device)
    half[four_bit_floats(codes.device).long()] = torch.arange(16, dtype=torch.uint8, device=codes.device)
    return half[low.int()]


def unpack_halves(packed: torch.Tensor, count: int, code_type: DType) -> torch.Tensor:
    """The `count` 4-bit codes of a type that u8 [..., ceil(count / 2)] holds, one to a byte."""
    import torch

    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :count]
    if code_type.is_float:
        return four_bit_floats(packed.device)[codes.int()].view(code_type.to_torch())
    if code_type.is_signed:
        return ((codes ^ 8).view(torch.int8) - 8).contiguous()
    return codes.contiguous()


def four_bit_floats(device: torch.device) -> torch.Tensor:
    """The bytes u8 [16] that carry the values of f4e2m1fn, by its codes."""
    import torch

    size = torch.tensor((0, 0.5, 1, 1.5, 2, 3, 4, 6), device=device)
    return torch.cat((size, -size)).to(torch.float8_e4m3fn).view(torch.uint8)
