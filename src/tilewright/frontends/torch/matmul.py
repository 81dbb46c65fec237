"""ATen's matrix products and attention.

A float product accumulates in f32 (f64 of f64 operands) and is rounded once to its result's type, after the bias where one
operator adds it. In the last bit there, torch's CPU and GPU libraries differ. An integer product wraps in its operands' type,
as torch's does; `_int_mm` accumulates in s32.
"""

from __future__ import annotations

import math

from tilewright.dtype import F8E4M3FN, F32, S32, DType
from tilewright.frontends.torch.registry import Scalar, Site, aten
from tilewright.frontends.torch.types import converted, mapped
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, map_, reshape, swap_last
from tilewright.ir.graph import Node
from tilewright.ir.ops import Attention, gemm
from tilewright.ir.types import Shape, broadcast_shapes


def _accumulator(a: Node) -> DType:
    return a.dtype.accumulator if a.dtype.is_float else a.dtype


def _product(a: Node, b: Node, out: DType) -> Node:
    """a @ b, stored as `out`."""
    return gemm(a, b, acc_dtype=_accumulator(a), out_dtype=out, overflow="saturate" if out is F8E4M3FN else "wrap")


@aten("mm.default", "bmm.default", "mm.dtype", "bmm.dtype")
def mm(site: Site, self: Node, mat2: Node, *_: object, **__: object) -> Node:
    """self @ mat2; the `dtype` overloads keep more of the accumulator."""
    return _product(self, mat2, site.dtype)


@aten("matmul.default", "mv.default", "dot.default", "vdot.default")
def matmul(site: Site, self: Node, other: Node) -> Node:
    """self @ other by NumPy's rule: a vector is a row on the left, a column on the right, and its axis goes."""
    a = reshape(self, (1, *self.shape)) if len(self.shape) == 1 else self
    b = reshape(other, (*other.shape, 1)) if len(other.shape) == 1 else other
    return reshape(_product(a, b, site.dtype), site.out.shape)


@aten("linear.default")
def linear(site: Site, input: Node, weight: Node, bias: Node | None = None) -> Node:
    """input @ weight.T + bias; weight is [N, K], or a vector [K]."""
    x = reshape(input, (1, *input.shape)) if len(input.shape) == 1 else input
    w = reshape(weight, (1, *weight.shape)) if len(weight.shape) == 1 else weight
    y = _affine(site.dtype, bias, x, swap_last(w), 1, 1)
    return reshape(y, site.out.shape)


@aten("addmm.default", "addmm.dtype", "baddbmm.default", "baddbmm.dtype")
def addmm(
    site: Site, self: Node, mat1: Node, mat2: Node, *_: object, beta: Scalar = 1, alpha: Scalar = 1, **__: object
) -> Node:
    """beta * self + alpha * (mat1 @ mat2); with beta 0, self is not read."""
    return _affine(site.dtype, self, mat1, mat2, beta, alpha)


@aten("addmv.default")
def addmv(site: Site, self: Node, mat: Node, vec: Node, *, beta: Scalar = 1, alpha: Scalar = 1) -> Node:
    """beta * self + alpha * (mat @ vec)."""
    column = reshape(broadcast(self, site.out.shape), (*site.out.shape, 1))
    return reshape(_affine(site.dtype, column, mat, reshape(vec, (*vec.shape, 1)), beta, alpha), site.out.shape)


def _affine(out: DType, bias: Node | None, a: Node, b: Node, beta: Scalar, alpha: Scalar) -> Node:
    """beta * bias + alpha * (a @ b) in the accumulator's type, then rounded to `out`; where K is 0 beta * bias, -0 too."""
    if not a.shape[-1]:
        alpha = 1
    if beta == 0 or bias is None:
        bias = None
        if alpha == 1:
            return _product(a, b, out)
    acc = _accumulator(a)
    y = gemm(a, b, acc_dtype=acc)
    if bias is not None and not a.shape[-1]:
        return converted(broadcast(mapped("multiply", acc, bias, beta), y.shape), out)
    if alpha != 1:
        y = mapped("multiply", acc, y, alpha)
    if bias is not None:
        y = mapped("add", acc, y, bias if beta == 1 else mapped("multiply", acc, bias, beta))
    return converted(y, out)


@aten("_int_mm.default")
def int_mm(site: Site, self: Node, mat2: Node) -> Node:
    """s8 @ s8 accumulated in s32."""
    return gemm(self, mat2, acc_dtype=S32)


@aten("_scaled_mm.default")
def scaled_mm(
    site: Site,
    self: Node,
    mat2: Node,
    scale_a: Node,
    scale_b: Node,
    bias: Node | None = None,
    scale_result: Node | None = None,
    *_: object,
    **__: object,
) -> Node:
    """(self * scale_a) @ (mat2 * scale_b) + bias of 8-bit floats; one scale a tensor, or one a row and one a column."""
    m, n = site.out.shape
    scales = [_outer_scale(s, shape) for s, shape in ((scale_a, (m, 1)), (scale_b, (1, n)))]
    if scale_result is not None or any(s is None for s in scales):
        raise Unmodelled("its scales are not one a tensor, a row or a column")
    y = gemm(self, mat2, acc_dtype=F32)
    for scale in scales:
        assert scale is not None
        y = map_("multiply", y, converted(scale, F32))
    if bias is not None:
        y = mapped("add", F32, y, bias)
    return converted(y, site.dtype)


def _outer_scale(scale: Node, shape: Shape) -> Node | None:
    if math.prod(scale.shape) == 1:
        return reshape(scale, ())
    return scale if scale.shape == shape else None


@aten("scaled_dot_product_attention.default")
def attention(
    site: Site,
    query: Node,
    key: Node,
    value: Node,
    attn_mask: Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Node:
    """softmax(scale * query @ key.T + mask) @ value over any leading axes, the last of which is heads.

    Causal means that query i sees keys 0…i. A row that may see nothing gives 0, as in torch.
    """
    if dropout_p > 0:
        raise site.refuse("draws random numbers (dropout)", "model.eval()")
    q, k, v = _heads(site, query, key, value)
    mask = None if attn_mask is None else _mask(attn_mask, site.out.shape[:-1] + key.shape[-2:-1])
    op = Attention(
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        causal="upper" if is_causal else "no",
        zero_masked_rows=True,
    )
    operands = (q, k, v) if mask is None else (q, k, v, mask)
    return reshape(Node(op, *operands), site.out.shape)


def _heads(site: Site, *tensors: Node) -> list[Node]:
    """Every operand as [batch, heads, length, width] over the common leading axes."""
    lead = broadcast_shapes(*(t.shape[:-3] for t in tensors), where=site.where)
    counts = [t.shape[-3] if len(t.shape) > 2 else 1 for t in tensors]
    whole = [broadcast(t, (*lead, n, *t.shape[-2:])) for t, n in zip(tensors, counts, strict=True)]
    return [reshape(t, (math.prod(lead), n, *t.shape[-2:])) for t, n in zip(whole, counts, strict=True)]


def _mask(mask: Node, scores: Shape) -> Node:
    """The mask against [batch, heads, queries, keys]."""
    if len(scores) <= 4:
        return mask
    return reshape(broadcast(mask, scores), (math.prod(scores[:-3]), *scores[-3:]))
