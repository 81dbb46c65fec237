"""ONNX's reductions and normalisations."""

from __future__ import annotations

import math

from tilewright.dtype import F16, F32, F64, S64, DType
from tilewright.frontends.onnx.by_torch import cumulative
from tilewright.frontends.onnx.node import Converter, OpNode, converts
from tilewright.frontends.onnx.tensors import element_type
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, const, convert, map_, reduce_, reshape, slice_, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Iota, LayerNorm, Pad, Select, Softmax, gemm

MOST_SUMMED = 512  # elements of a cumulative sum


def _axes(op: OpNode, x: Node) -> list[int] | None:
    """Axes to reduce; None for none at all."""
    given = op.axes(1)
    if not given:
        return None if op.integer("noop_with_empty_axes", 0) else list(range(len(x.shape)))
    return [op.normal_axis(a, len(x.shape)) for a in given]


def _reduction(function: str) -> Converter:
    def convert_reduction(op: OpNode) -> Node:
        x = op.input(0)
        axes = _axes(op, x)
        if function == "mean" and not x.dtype.is_float:
            raise Unmodelled("it takes the mean of integers")
        return x if axes is None else reduce_(function, x, axes, bool(op.integer("keepdims", 1)))

    return convert_reduction


for _name, _function, _until in (
    ("ReduceSum", "add", 13),
    ("ReduceMean", "mean", 18),
    ("ReduceMax", "maximum", 20),
    ("ReduceMin", "minimum", 20),
    ("ReduceProd", "multiply", 18),
):
    converts(_name, 1, _until)(_reduction(_function))


@converts("ReduceL1", 1, 18)
@converts("ReduceL2", 1, 18)
@converts("ReduceSumSquare", 1, 18)
@converts("ReduceLogSum", 1, 28)
@converts("ReduceLogSumExp", 1, 28)
def _reduction_of_a_function(op: OpNode) -> Node:
    """Sums of |x|, x * x, x and exp(x), of which the second also under a root and the last two as logarithms.

    ONNX's own definition of some goes by way of f32, also for f64.
    """
    x = op.input(0)
    axes, keep = _axes(op, x), bool(op.integer("keepdims", 1))
    if not x.dtype.is_float:
        raise Unmodelled(f"it reduces {x.dtype}")
    wide = convert(x, _wide(x.dtype))

    def summed(y: Node) -> Node:
        return y if axes is None else reduce_("add", y, axes, keep)

    kind = op.op_type.removeprefix("Reduce")
    if kind == "L1":
        y = summed(map_("abs", wide))
    elif kind in ("L2", "SumSquare"):
        y = summed(map_("multiply", wide, wide))
        y = map_("sqrt", y) if kind == "L2" else y
    elif kind == "LogSum":
        y = map_("log", summed(wide))
    elif axes is None or any(x.shape[a] == 0 for a in axes):
        y = map_("log", summed(map_("exponential", wide)))
    else:
        top = reduce_("maximum", wide, axes, keepdims=True)
        finite = map_("is_finite", top)
        top = Node(Select(), finite, top, broadcast(const(0.0, top.dtype), top.shape))
        total = summed(map_("exponential", map_("subtract", wide, top)))
        y = map_("add", map_("log", total), reshape(top, total.shape))
    return convert(y, x.dtype)


@converts("GlobalAveragePool", 1, 22)
@converts("GlobalMaxPool", 1, 22)
def _global_pool(op: OpNode) -> Node:
    x = op.input(0)
    return reduce_("mean" if op.op_type == "GlobalAveragePool" else "maximum", x, range(2, len(x.shape)), keepdims=True)


@converts("ArgMax", 1, 13)
@converts("ArgMin", 1, 13)
def _arg_extreme(op: OpNode) -> Node:
    x = op.input(0)
    axis = op.axis("axis", 0, len(x.shape))
    function = "maximum" if op.op_type == "ArgMax" else "minimum"
    place = _place_of(x, axis, function, last=bool(op.integer("select_last_index", 0)))
    return place if op.integer("keepdims", 1) else reshape(place, (*x.shape[:axis], *x.shape[axis + 1 :]))


@converts("Hardmax", 1, 13)
def _hardmax(op: OpNode) -> Node:
    """1 at the first largest element along the axis, 0 elsewhere; before version 13 along all axes from it on together."""
    x = op.input(0)
    shape = x.shape
    axis = op.axis("axis", -1 if op.version >= 13 else 1, len(shape))
    if op.version < 13:
        x, axis = reshape(x, (math.prod(shape[:axis]), math.prod(shape[axis:]))), 1
    hot = _hot(x, axis)
    return reshape(hot, shape)


def _hot(x: Node, axis: int) -> Node:
    return convert(map_("equal", Node(Iota(S64, x.shape, axis)), _place_of(x, axis, "maximum", last=False)), x.dtype)


def _place_of(x: Node, axis: int, function: str, last: bool) -> Node:
    """s64: where along `axis`, which stays with extent 1, the extreme element stands; a NaN counts as one."""
    hit = map_("equal", x, reduce_(function, x, [axis], keepdims=True))
    if x.dtype.is_float:
        hit = map_("or", hit, map_("is_nan", x))
    step = Node(Iota(S64, x.shape, axis))
    other = const(-1 if last else x.shape[axis], S64)
    return reduce_("maximum" if last else "minimum", Node(Select(), hit, step, other), [axis], keepdims=True)


@converts("CumSum", 11, 14)
def _cumsum(op: OpNode) -> Node:
    """A cumulative sum of few integers along one axis: a product with a triangle of ones.

    Floats are left to torch: an infinity times the triangle's zeros would reach the elements before it. So are many integers: a
    product's work grows with their square.
    """
    x = op.input(0)
    axis = op.normal_axis(op.known_ints(1)[0], len(x.shape))
    n = x.shape[axis]
    if x.dtype.is_float or n > MOST_SUMMED:
        return cumulative(op, x, axis)
    source, result = (Node(Iota(S64, (n, n), a)) for a in (0, 1))
    if op.integer("reverse", 0):
        source, result = result, source
    ones = convert(map_("less" if op.integer("exclusive", 0) else "less_equal", source, result), x.dtype)
    perm = [*(a for a in range(len(x.shape)) if a != axis), axis]
    moved = transpose(x, perm)
    summed = gemm(reshape(moved, (x.tensor.elements // n if n else 0, n)), ones, out_dtype=x.dtype)
    return transpose(reshape(summed, moved.shape), [perm.index(a) for a in range(len(perm))])


@converts("CumProd", 26, 26)
def _cumprod(op: OpNode) -> Node:
    x = op.input(0)
    return cumulative(op, x, op.normal_axis(op.known_ints(1)[0], len(x.shape)), "cumprod")


@converts("Softmax", 1, 13)
@converts("LogSoftmax", 1, 13)
def _softmax(op: OpNode) -> Node:
    """A softmax along one axis; before version 13 along all from it on.

    In f16 it is left to ONNX's own definition, which rounds each step and not the result alone: onnx's tests hold f16 to
    that. A rule makes one softmax of the steps again.
    """
    x = op.input(0)
    log = op.op_type == "LogSoftmax"
    if x.dtype is F16 and not log and op.version >= 13:
        raise Unmodelled("f16 is rounded at each step")
    rest = op.version < 13
    return softmax(x, op.axis("axis", 1 if rest else -1, len(x.shape)), log=log, rest=rest)


def softmax(x: Node, axis: int, *, log: bool, rest: bool) -> Node:
    """A softmax, or its logarithm, along an axis; with `rest` along all from it on together."""
    if not rest:
        return Node(Softmax(axis, log), x)
    flat = reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
    return reshape(Node(Softmax(1, log), flat), x.shape)


@converts("LayerNormalization", 17, 17)
def _layer_normalization(op: OpNode) -> list[Node | None]:
    """A layer norm and, where wanted, the mean and the inverse standard deviation it used."""
    x, scale, bias = op.input(0), op.input(1), op.optional(2)
    axis = op.axis("axis", -1, len(x.shape))
    epsilon = op.real("epsilon", 1e-5)
    given = [scale] if bias is None else [scale, bias]
    y = Node(LayerNorm(axis, epsilon), x, *(convert(g, x.dtype) for g in given))
    if not (op.wants(1) or op.wants(2)):
        return [y]
    stash = element_type(op.integer("stash_type", 1), op.where)
    wide = convert(x, stash)
    axes = list(range(axis, len(x.shape)))
    mean = reduce_("mean", wide, axes, keepdims=True)
    centred = map_("subtract", wide, mean)
    variance = reduce_("mean", map_("multiply", centred, centred), axes, keepdims=True)
    return [y, mean, map_("rsqrt", map_("add", variance, const(epsilon, stash)))]


@converts("RMSNormalization", 23, 23)
def _rms_normalization(op: OpNode) -> Node:
    x, scale = op.input(0), op.input(1)
    if scale.dtype is not x.dtype:
        raise Unmodelled(f"it scales {x.dtype} by {scale.dtype}")
    axis = op.axis("axis", -1, len(x.shape))
    return Node(LayerNorm(axis, op.real("epsilon", 1e-5), center=False), x, scale)


@converts("BatchNormalization", 7, 15)
def _batch_normalization(op: OpNode) -> Node:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias, one of each a channel (axis 1)."""
    if op.integer("training_mode", 0) or any(op.wants(i) for i in range(1, 5)):
        raise Unmodelled("it is told to train")
    if not op.integer("spatial", 1):
        raise op.refuse("BatchNormalization with one mean for each place", "export it with operator set 9 or newer")
    x = op.input(0)
    dtype = _wide(x.dtype)
    channels = x.shape[1] if len(x.shape) > 1 else 1
    shape = (channels, *[1] * max(len(x.shape) - 2, 0))
    scale, bias, mean, variance = (reshape(convert(op.input(i), dtype), shape) for i in range(1, 5))
    spread = map_("sqrt", map_("add", variance, const(op.real("epsilon", 1e-5), dtype)))
    normal = map_("divide", map_("subtract", convert(x, dtype), mean), spread)
    return convert(map_("add", map_("multiply", normal, scale), bias), x.dtype)


@converts("InstanceNormalization", 1, 22)
def _instance_normalization(op: OpNode) -> Node:
    """Each channel of each sample to mean 0 and variance 1, then * scale + bias, one of each a channel."""
    x, scale, bias = op.input(0), op.input(1), op.input(2)
    if len(x.shape) < 3:
        raise op.malformed(f"InstanceNormalization of {x.type}", "it takes [N, C, D1, …]")
    shape = (x.shape[1], *[1] * (len(x.shape) - 2))
    normal = Node(LayerNorm(2, op.real("epsilon", 1e-5)), x)
    return map_("add", map_("multiply", normal, reshape(scale, shape)), reshape(bias, shape))


@converts("LpNormalization", 1, 22)
def _lp_normalization(op: OpNode) -> Node:
    """x / |x|_p along an axis; 0 where the norm is 0."""
    x, p = op.input(0), op.integer("p", 2)
    axis = op.axis("axis", -1, len(x.shape))
    if p not in (1, 2):
        raise Unmodelled(f"p={p}")
    size = reduce_("add", map_("abs", x) if p == 1 else map_("multiply", x, x), [axis], keepdims=True)
    norm = size if p == 1 else map_("sqrt", size)
    zero = const(0.0, x.dtype)
    safe = Node(Select(), map_("equal", norm, zero), const(1.0, x.dtype), norm)
    return map_("divide", x, safe)


@converts("LRN", 1, 13)
def _local_response_normalization(op: OpNode) -> Node:
    """x / (bias + alpha / size * s) ** beta, s the sum of squares over `size` channels around each."""
    x, size = op.input(0), op.integer("size")
    if len(x.shape) < 3 or size < 1:
        raise op.malformed(f"LRN of {x.type} over {size} channels", "it takes [N, C, D1, …]")
    dtype = _wide(x.dtype)
    wide = convert(x, dtype)
    before = (size - 1) // 2
    rest = (0,) * (len(x.shape) - 2)
    none = (0,) * len(x.shape)
    padded = Node(Pad((0, before, *rest), (0, size - 1 - before, *rest), none), map_("multiply", wide, wide), const(0, dtype))
    total = slice_(padded, 1, 0, x.shape[1])
    for i in range(1, size):
        total = map_("add", total, slice_(padded, 1, i, i + x.shape[1]))
    scaled = map_("multiply", total, const(op.real("alpha", 1e-4) / size, dtype))
    base = map_("add", scaled, const(op.real("bias", 1.0), dtype))
    return convert(map_("divide", wide, map_("power", base, const(op.real("beta", 0.75), dtype))), x.dtype)


def _wide(dtype: DType) -> DType:
    """The type to compute in: f32, or f64 for f64."""
    return F64 if dtype is F64 else F32
