"""ATen's reductions, softmax and normalisations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod

import torch

from tilewright.dtype import BF16, F16, F32, F64, PRED, S64, DType
from tilewright.frontends.torch.registry import Scalar, Site, aten
from tilewright.frontends.torch.types import converted, mapped
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import const, map_, places, reduce_, reshape
from tilewright.ir.extent import bounds_of
from tilewright.ir.graph import Node
from tilewright.ir.ops import LayerNorm, Select, Softmax
from tilewright.ir.types import normalize_axis

Axes = int | Sequence[int] | None
# Distances between 2**-50 and 2**47 have squares of all bits, 2**31 of which add up; those beyond are brought there.
_FAR, _SMALLER = 2.0**47, 2.0**-82
_NEAR, _LARGER = 2.0**-50, 2.0**97


def _axes(x: Node, dim: Axes) -> list[int]:
    """Axes from the front: all for None or an empty list, none of a rank-0 tensor."""
    rank = len(x.shape)
    chosen = [dim] if isinstance(dim, int) else list(dim or ())
    return sorted({normalize_axis(d, rank, "reduction") for d in chosen}) if chosen and rank else list(range(rank))


def _reduction(fn: str) -> Callable[..., Node]:
    def reduction(site: Site, self: Node, dim: Axes = None, keepdim: bool = False, **_: object) -> Node:
        x = converted(self, site.dtype)
        if not x.shape:  # one number, which is added to 0: of -0, too
            return reduce_(fn, reshape(x, (1,)), [0])
        return reduce_(fn, x, _axes(self, dim), keepdim)

    return reduction


def _test(fn: str) -> Callable[..., Node]:
    def test(site: Site, self: Node, dim: Axes = None, keepdim: bool = False) -> Node:
        return converted(reduce_(fn, converted(self, PRED), _axes(self, dim), keepdim), site.dtype)

    return test


def _extreme_along(fn: str) -> Callable[..., list[Node | None]]:
    def extreme(site: Site, self: Node, dim: int, keepdim: bool = False) -> list[Node | None]:
        if 1 in site.used:
            raise Unmodelled("where the extreme stands has no node")
        return [reduce_(fn, self, _axes(self, dim), keepdim), None]

    return extreme


aten("sum.default", "sum.dim_IntList")(_reduction("add"))
aten("mean.default", "mean.dim")(_reduction("mean"))
aten("amax.default", "max.default")(_reduction("maximum"))
aten("amin.default", "min.default")(_reduction("minimum"))
aten("max.dim")(_extreme_along("maximum"))
aten("min.dim")(_extreme_along("minimum"))
aten("any.default", "any.dim", "any.dims")(_test("or"))
aten("all.default", "all.dim", "all.dims")(_test("and"))


@aten("prod.default", "prod.dim_int")
def prod_(site: Site, self: Node, dim: Axes = None, keepdim: bool = False, **_: object) -> Node:
    """The product of elements."""
    if site.dtype in (F16, BF16):
        raise Unmodelled("torch rounds a product of 16 bits after every factor, and it may overflow where the end does not")
    return reduce_("multiply", converted(self, site.dtype), _axes(self, dim), keepdim)


@aten("var.correction", "std.correction")
def var(site: Site, self: Node, dim: Axes = None, *, correction: Scalar | None = None, keepdim: bool = False) -> Node:
    """Mean squared distance from the mean, over max(0, n - correction) instead of n; its root."""
    return var_mean(site, self, dim, correction=correction, keepdim=keepdim)[0]


@aten("var_mean.correction", "std_mean.correction")
def var_mean(
    site: Site, self: Node, dim: Axes = None, *, correction: Scalar | None = None, keepdim: bool = False
) -> list[Node]:
    """Variance or standard deviation, and mean."""
    axes, root = _axes(self, dim), "std" in site.target
    if (
        not root and site.readers and site.readers <= {"aten.add.Tensor", "aten.add.Scalar"}
    ):  # an epsilon: a norm, of f32 sums in torch, too
        x = converted(self, site.compute_dtype)
        results = _variance(x, axes, correction, keepdim), reduce_("mean", x, axes, keepdim)
    elif site.dtype is F64:
        raise Unmodelled("torch's running mean of f64 has no sum that overflows, but differences that do")
    else:
        spread, mean = _spread_and_mean(site, self, axes, correction, keepdim, root=root)
        results = spread, _running(mean, self, axes, keepdim) if 1 in site.used else mean
    return [converted(x, site.dtype) for x in results]


def _spread_and_mean(
    site: Site, self: Node, axes: list[int], correction: Scalar | None, keepdim: bool, *, root: bool
) -> tuple[Node, Node]:
    """Variance (or its root) and mean, neither overflowing nor vanishing on the way.

    torch sums squares of f32 in f64, which no kernel for rows has. Here powers of two keep them in f32: one of the count, for
    sums and distances, and one of each furthest distance, for its square. Between them no bit is rounded otherwise.
    """
    x, count = converted(self, site.compute_dtype), prod(self.shape[a] for a in axes)
    if x.dtype is not F32 or self.dtype is F16 or not count:
        variance = _variance(x, axes, correction, keepdim)
        return map_("sqrt", variance) if root else variance, reduce_("mean", x, axes, keepdim)
    less = 2.0 ** (bounds_of(count)[1] - 1).bit_length() * 4
    if prod(site.out.shape) == 1 and len(site.outs) == 1 and self.dtype is F32:  # on a CPU by a mean of f32 sums
        mean = mapped("multiply", F32, reduce_("mean", x, axes, keepdims=True), 1 / less)
        x = mapped("multiply", F32, x, 1 / less)
    else:
        x = mapped("multiply", F32, x, 1 / less)
        mean = reduce_("mean", x, axes, keepdims=True)
    distance = map_("subtract", x, mean)
    furthest = reduce_("maximum", map_("abs", distance), axes, keepdims=True)

    def by_size(if_far: float, if_near: float, otherwise: float) -> Node:
        far, near = map_("greater", furthest, converted(_FAR, F32)), map_("less", furthest, converted(_NEAR, F32))
        other = Node(Select(), near, converted(if_near, F32), converted(otherwise, F32))
        return Node(Select(), far, converted(if_far, F32), other)

    moment = _mean_square(map_("multiply", distance, by_size(_SMALLER, _LARGER, 1.0)), axes, _divisor(count, correction))
    back = by_size(less / _SMALLER, less / _LARGER, less)
    moment = map_("sqrt", moment) if root else map_("multiply", moment, back)
    shape = mean.shape if keepdim else tuple(d for i, d in enumerate(mean.shape) if i not in axes)
    return reshape(map_("multiply", moment, back), shape), reshape(mapped("multiply", F32, mean, less), shape)


def _running(mean: Node, x: Node, axes: list[int], keepdim: bool) -> Node:
    """A mean as torch's running one gives it: after an infinity NaN, so that only the last number may be one."""
    if not axes:
        return mean
    last: Node | None = None
    for a in axes:
        at_end = map_("equal", places(x.shape[a]), const(x.shape[a] - 1, S64))
        line = reshape(at_end, [d if b == a else 1 for b, d in enumerate(x.shape)])
        last = line if last is None else map_("and", last, line)
    assert last is not None
    before = reduce_("and", map_("or", map_("is_finite", x), last), axes, keepdim)
    kept = map_("or", before, map_("not", map_("is_inf", mean)))
    return Node(Select(), kept, mean, converted(torch.nan, mean.dtype))


def _variance(x: Node, axes: list[int], correction: Scalar | None, keepdim: bool) -> Node:
    distance = map_("subtract", x, reduce_("mean", x, axes, keepdims=True))
    return _mean_square(distance, axes, _divisor(prod(x.shape[a] for a in axes), correction), keepdim)


def _mean_square(x: Node, axes: list[int], count: float, keepdim: bool = True) -> Node:
    return mapped("divide", x.dtype, reduce_("add", map_("multiply", x, x), axes, keepdim), count)


def _divisor(count: int, correction: Scalar | None) -> float:
    correction = 1 if correction is None else correction
    if isinstance(correction, float) and not correction.is_integer():
        return max(0.0, operator.index(count) - correction)  # an open extent's number: an extent knows whole ones alone
    return max(0, count - int(correction))


@aten("linalg_vector_norm.default")
def vector_norm(
    site: Site,
    self: Node,
    ord: Scalar = 2,
    dim: Axes = None,
    keepdim: bool = False,
    **_: object,
) -> Node:
    """Euclidean length."""
    if ord != 2:
        raise Unmodelled(f"a norm of order {ord}")
    x = converted(self, site.compute_dtype)
    return converted(map_("sqrt", reduce_("add", map_("multiply", x, x), _axes(self, dim), keepdim)), site.dtype)


def _softmax(log: bool) -> Callable[..., Node]:
    def softmax(site: Site, self: Node, dim: int, *_: object, **__: object) -> Node:
        x = reshape(converted(self, site.dtype), self.shape or (1,))
        return reshape(Node(Softmax(normalize_axis(dim, len(x.shape), site.target), log), x), self.shape)

    return softmax


aten("softmax.int", "_softmax.default")(_softmax(log=False))
aten("log_softmax.int", "_log_softmax.default")(_softmax(log=True))


@aten("layer_norm.default")
def layer_norm(
    site: Site,
    input: Node,
    normalized_shape: Sequence[int],
    weight: Node | None = None,
    bias: Node | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Node:
    """Mean 0 and variance 1 over the last axes, then scale and shift."""
    op = LayerNorm(len(input.shape) - len(normalized_shape), eps)
    return _normalized(op, input, weight, bias, site.dtype)


@aten("native_layer_norm.default")
def native_layer_norm(
    site: Site,
    input: Node,
    normalized_shape: Sequence[int],
    weight: Node | None,
    bias: Node | None,
    eps: float,
) -> list[Node]:
    """The normalised tensor, the mean and 1 / the standard deviation."""
    first = len(input.shape) - len(normalized_shape)
    y = _normalized(LayerNorm(first, eps), input, weight, bias, site.outs[0].dtype)
    return [y, *_statistics(site, input, list(range(first, len(input.shape))), eps, keepdim=True)]


@aten("rms_norm.default")
def rms_norm(
    site: Site,
    input: Node,
    normalized_shape: Sequence[int],
    weight: Node | None = None,
    eps: float | None = None,
) -> Node:
    """x / sqrt(mean(x**2) + eps) over the last axes, then scale; eps is the compute type's epsilon if not given."""
    epsilon = eps if eps is not None else torch.finfo(site.compute_dtype.to_torch()).eps
    op = LayerNorm(len(input.shape) - len(normalized_shape), epsilon, center=False)
    return _normalized(op, input, weight, None, site.dtype)


def _normalized(op: LayerNorm, x: Node, weight: Node | None, bias: Node | None, out: DType) -> Node:
    """The norm in x's own type, or in f32 where scale and bias are of another."""
    factors = [f for f in (weight, bias) if f is not None]
    d = x.dtype if all(f.dtype is x.dtype for f in factors) else _wider(x.dtype, factors)
    if weight is None and bias is not None:
        return converted(mapped("add", d, Node(op, converted(x, d)), bias), out)
    return converted(Node(op, converted(x, d), *(converted(f, d) for f in factors)), out)


def _wider(d: DType, factors: Sequence[Node]) -> DType:
    return max((d, *(f.dtype for f in factors)), key=lambda t: t.bits)


def _statistics(site: Site, x: Node, axes: list[int], epsilon: float, keepdim: bool) -> list[Node]:
    """Mean and 1 / sqrt(variance + epsilon), in the types of the second and third result."""
    moments = _moments(converted(x, site.compute_dtype), axes, epsilon, keepdim)
    return [converted(m, t.dtype) for m, t in zip(moments, site.outs[1:], strict=True)]


def _moments(x: Node, axes: list[int], epsilon: float, keepdim: bool) -> tuple[Node, Node]:
    """Mean and 1 / sqrt(variance + epsilon)."""
    variance = _variance(x, axes, 0, keepdim)
    return reduce_("mean", x, axes, keepdim), map_("rsqrt", mapped("add", x.dtype, variance, epsilon))


@aten("native_group_norm.default")
def native_group_norm(
    site: Site,
    input: Node,
    weight: Node | None,
    bias: Node | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> list[Node]:
    """Layer norm over groups of channels, then scale and shift by channel; its mean; 1 / its standard deviation."""
    d = site.compute_dtype
    grouped = reshape(converted(input, d), (N, group, C // group * HxW))
    y = reshape(Node(LayerNorm(2, eps), grouped), input.shape)
    channels = (1, C, *(1,) * (len(input.shape) - 2))
    if weight is not None:
        y = mapped("multiply", d, y, reshape(weight, channels))
    if bias is not None:
        y = mapped("add", d, y, reshape(bias, channels))
    return [converted(y, site.dtype), *_statistics(site, grouped, [2], eps, keepdim=False)]


@aten("_native_batch_norm_legit_no_training.default")
def batch_norm(
    site: Site,
    input: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node,
    running_var: Node,
    momentum: float,
    eps: float,
) -> list[Node | None]:
    """(x - mean) / sqrt(var + eps) by channel with recorded statistics, then scale and shift."""
    d = site.compute_dtype
    scale = map_("rsqrt", mapped("add", d, running_var, eps))
    y = _by_channel(converted(input, d), converted(running_mean, d), scale, weight, bias)
    return [converted(y, site.dtype), None, None]


@aten("_native_batch_norm_legit.no_stats")
def batch_norm_of_batch(
    site: Site, input: Node, weight: Node | None, bias: Node | None, training: bool, momentum: float, eps: float
) -> list[Node]:
    """(x - mean) / sqrt(var + eps) by channel with the batch's own statistics, as instance norm uses it."""
    x = converted(input, site.compute_dtype)
    others = [a for a in range(len(x.shape)) if a != 1]
    mean, scale = _moments(x, others, eps, keepdim=False)
    y = _by_channel(x, mean, scale, weight, bias)
    return [converted(y, site.dtype), converted(mean, site.outs[1].dtype), converted(scale, site.outs[2].dtype)]


def _by_channel(x: Node, mean: Node, scale: Node, weight: Node | None, bias: Node | None) -> Node:
    """(x - mean) * scale * weight + bias, all but x vectors along axis 1."""
    channels = (1, x.shape[1], *(1,) * (len(x.shape) - 2))
    if weight is not None:
        scale = mapped("multiply", x.dtype, scale, weight)
    y = map_("multiply", map_("subtract", x, reshape(mean, channels)), reshape(scale, channels))
    return y if bias is None else mapped("add", x.dtype, y, reshape(bias, channels))
