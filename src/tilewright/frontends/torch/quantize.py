"""`quantized_decomposed`: the quantise and dequantise operators that torch's export-based quantisation writes.

torch multiplies by the reciprocal of the scale where `quantize` divides: the two differ by one code where the quotient
lies within a rounding error of a tie.
"""

from __future__ import annotations

from tilewright.dtype import F32, F64, DType
from tilewright.frontends.torch.registry import Operand, Site, operators
from tilewright.frontends.torch.types import converted, mapped
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import expand_dims, reshape
from tilewright.ir.graph import Node
from tilewright.ir.ops import Dequantize, Quantize
from tilewright.ir.types import Shape, normalize_axis

_NAMESPACE = "quantized_decomposed"


def _whole(t: Operand | None) -> Operand | None:
    """One value for the whole tensor, whether it came as a number or as a tensor of one element."""
    return reshape(t, ()) if isinstance(t, Node) else t


def _along(t: Node | None, axis: int, x: Node) -> Node | None:
    """One value for each position of an axis."""
    return None if t is None else expand_dims(t, normalize_axis(axis, len(x.shape), _NAMESPACE), len(x.shape))


def _groups(x: Node, size: int) -> Shape:
    """Blocks of `size` along the last axis."""
    return (*(1 for _ in x.shape[:-1]), size)


def _sources(scale: Operand, zero: Operand | None, compute: DType, code: DType) -> list[Node]:
    """Scale and, unless it is 0, zero point.

    Raises:
        Unmodelled: the zero point is no value of the code's type.
    """
    sources = [converted(scale, F64 if compute is F64 else F32)]
    if zero is None or (not isinstance(zero, Node) and zero == 0):
        return sources
    fits = zero.dtype.is_integer if isinstance(zero, Node) else code.min <= zero <= code.max
    if not fits or not code.is_integer:
        raise Unmodelled(f"its zero point is no {code}")
    return [*sources, converted(zero, code)]


def _quantize(
    site: Site, x: Node, scale: Operand, zero: Operand | None, low: object, high: object, block: Shape | None = None
) -> Node:
    """clamp(round(x / scale) + zero, low, high) in codes of the result's type."""
    sources = _sources(scale, zero, x.dtype, site.dtype)
    if not site.dtype.is_integer or not isinstance(low, int) or not isinstance(high, int):
        raise Unmodelled("its codes are no integers, or their bounds not constant")
    q = Node(Quantize(site.dtype, block), x, *sources)
    within = low <= site.dtype.min and high >= site.dtype.max
    return q if within else mapped("clamp", site.dtype, low, q, high)


def _dequantize(site: Site, q: Node, scale: Operand, zero: Operand | None, block: Shape | None = None) -> Node:
    """(q - zero) * scale."""
    return Node(Dequantize(site.dtype, block), q, *_sources(scale, zero, site.dtype, q.dtype))


@operators(_NAMESPACE, "quantize_per_tensor.default", "quantize_per_tensor.tensor", "quantize_per_tensor.tensor2")
def quantize_per_tensor(
    site: Site, x: Node, scale: Operand, zero_point: Operand, quant_min: object, quant_max: object, *_: object
) -> Node:
    """One scale for all."""
    whole = _whole(scale)
    assert whole is not None
    return _quantize(site, x, whole, _whole(zero_point), quant_min, quant_max)


@operators(_NAMESPACE, "dequantize_per_tensor.default", "dequantize_per_tensor.tensor", "dequantize_per_tensor.tensor2")
def dequantize_per_tensor(site: Site, q: Node, scale: Operand, zero_point: Operand, *_: object, **__: object) -> Node:
    """One scale for all."""
    whole = _whole(scale)
    assert whole is not None
    return _dequantize(site, q, whole, _whole(zero_point))


@operators(_NAMESPACE, "quantize_per_channel.default")
def quantize_per_channel(
    site: Site, x: Node, scales: Node, zero_points: Node, axis: int, quant_min: int, quant_max: int, *_: object
) -> Node:
    """One scale for each position of an axis."""
    scale = _along(scales, axis, x)
    assert scale is not None
    return _quantize(site, x, scale, _along(zero_points, axis, x), quant_min, quant_max)


@operators(_NAMESPACE, "dequantize_per_channel.default")
def dequantize_per_channel(
    site: Site, q: Node, scales: Node, zero_points: Node | None, axis: int, *_: object, **__: object
) -> Node:
    """One scale for each position of an axis."""
    scale = _along(scales, axis, q)
    assert scale is not None
    return _dequantize(site, q, scale, _along(zero_points, axis, q))


@operators(_NAMESPACE, "quantize_per_token.default")
def quantize_per_token(
    site: Site, x: Node, scales: Node, zero_points: Node, quant_min: int, quant_max: int, *_: object
) -> Node:
    """One scale for each row, the last axis of `scales` being 1."""
    return _quantize(site, x, scales, zero_points, quant_min, quant_max)


@operators(_NAMESPACE, "dequantize_per_token.default")
def dequantize_per_token(site: Site, q: Node, scales: Node, zero_points: Node, *_: object) -> Node:
    """One scale for each row, the last axis of `scales` being 1."""
    return _dequantize(site, q, scales, zero_points)


@operators(_NAMESPACE, "quantize_per_channel_group.default")
def quantize_per_channel_group(
    site: Site, x: Node, scales: Node, zero_points: Node, quant_min: int, quant_max: int, dtype: object, group_size: int
) -> Node:
    """One scale for each group of `group_size` along the last axis."""
    return _quantize(site, x, scales, zero_points, quant_min, quant_max, _groups(x, group_size))


@operators(_NAMESPACE, "dequantize_per_channel_group.default")
def dequantize_per_channel_group(
    site: Site,
    q: Node,
    scales: Node,
    zero_points: Node | None,
    quant_min: int,
    quant_max: int,
    dtype: object,
    group_size: int,
    output_dtype: object = None,
) -> Node:
    """One scale for each group of `group_size` along the last axis."""
    return _dequantize(site, q, scales, zero_points, _groups(q, group_size))
