"""`tilewright::linear`, the operation of `tilewright.Linear`, as the product that it is: what follows can be folded into it."""

from __future__ import annotations

import math

import torch

from tilewright.dtype import BF16, DType, dtype
from tilewright.frontends.torch.registry import Site, operators
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import convert, reshape
from tilewright.ir.few_bits import quantised_linear, unpack_halves
from tilewright.ir.graph import Node
from tilewright.ir.literal import Literal
from tilewright.ir.ops import Const
from tilewright.ir.types import Shape, TensorType


@operators("tilewright", "linear.default", "linear_without_derivative.default")
def linear(
    site: Site,
    x: Node,
    packed: Node,
    scales: Node,
    zero_points: Node | None,
    offsets: Node | None,
    order: Node | None,
    factor: Node | None,
    bias: Node | None,
    code_type: str,
    group_size: int,
    divides: bool,
    quantize_activations: bool,
) -> Node:
    """x [..., in] by a weight of a few bits; a weight that is computed, or whose inputs have an order, stays an operation."""
    if order is not None:
        raise Unmodelled("its inputs have an order")
    if not isinstance(packed.op, Const) or not isinstance(scales.op, Const):
        raise Unmodelled("its weight is computed")
    of, inner = dtype(code_type), x.shape[-1]
    codes = _retyped(packed.op, of, (packed.shape[0], inner))
    zeros = None
    if zero_points is not None:
        if not isinstance(zero_points.op, Const):
            raise Unmodelled("its zero points are computed")
        zeros = _retyped(zero_points.op, of, zero_points.shape, halves=False)
    rows = reshape(x, (math.prod(x.shape[:-1]), inner))
    y = quantised_linear(
        rows,
        codes,
        scales if scales.dtype.bits > 8 else convert(scales, BF16),
        group_size,
        zero_point=zeros,
        offset=offsets,
        bias=bias,
        factor=factor,
        divides=divides,
        quantize_activations=quantize_activations,
    )
    return reshape(y, site.out.shape)


def _retyped(held: Const, of: DType, shape: Shape, *, halves: bool = True) -> Node:
    """A constant as codes of a type, one to a byte, made when first used."""
    data = held.data

    def load() -> torch.Tensor:
        return unpack_halves(data.tensor(), shape[-1], of) if halves and of.bits == 4 else data.tensor()

    return Node(Const(Literal(TensorType(of, shape), load, data.label)))
