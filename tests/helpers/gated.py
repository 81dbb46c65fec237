"""Gemms whose store reads the left half of the columns and the right half together: SwiGLU and its kind."""

from dataclasses import replace

from tilewright.dtype import F16, F32, S8
from tilewright.ir.build import const, convert, input_, map_, slice_, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Gemm, Param, Quantize
from tilewright.schedule.problem import problem_of


def gated(dtype=F16, rows=(37,), depth=72, width=40, out=None, function="silu", batch=(), scaled=None, side=False):
    """function(x @ gate) * (x @ up), both weights one of twice as many columns.

    Args:
        dtype: of the operands.
        rows, depth, width: extents of x, and the columns of the result.
        out: codes to which the result is quantised.
        batch: axes before all, which the weight has too.
        scaled: whether halves have scales and biases of their own; those of 8 bits if not said.
        side: a residual is added.
    """
    scaled = dtype.bits == 8 if scaled is None else scaled
    wide = F16 if dtype.bits == 8 else dtype
    src = [input_("x", dtype, (*batch, *rows, depth)), input_("w", dtype, (*batch, 2 * width, depth))]
    src += (
        [input_(name, kind, (width,)) for i in range(2) for name, kind in ((f"s{i}", F32), (f"b{i}", wide))] if scaled else []
    )
    src += [input_("residual", wide, (*batch, *rows, width))] if side else []
    params = [Node(Param(i, s.tensor)) for i, s in enumerate(src)]
    right = transpose(params[1], (*range(len(batch)), len(batch) + 1, len(batch)))
    acc = Node(Acc(Gemm(dtype.accumulator, params[0], right, (params[0],)).acc_type))

    def half(i):
        x = convert(slice_(acc, -1, i * width, (i + 1) * width), F32)
        if scaled:
            x = map_("multiply", map_("multiply", x, const(0.01, F32)), params[2 + 2 * i])
            x = map_("add", x, convert(params[3 + 2 * i], F32))
        return convert(x, wide)

    x = map_("multiply", map_(function, half(0)), half(1))
    x = map_("add", x, params[-1]) if side else x
    x = x if out is None else Node(Quantize(out), convert(x, F32), const(0.03, F32))
    problem = problem_of(Node(Gemm(dtype.accumulator, params[0], right, (x,)), *src))
    return replace(problem, weights=tuple(0 < i < len(src) - side for i in range(len(src))))


def of_halves(problem, function="silu", out=None):
    """A problem whose store is its accumulator, with function(left half) * right half for that, of another type if said."""
    (acc,) = problem.op.stores
    assert isinstance(acc.op, Acc)
    axis, extent = len(acc.shape) - 1, acc.shape[-1] // 2
    left, right = (slice_(acc, axis, i * extent, (i + 1) * extent) for i in range(2))
    store = map_("multiply", map_(function, left), right)
    return replace(problem, op=replace(problem.op, stores=(store if out is None else convert(store, out),)))


CASES = {
    "f16": gated,
    "s8 to s8": lambda: gated(S8, (5, 9), 100, 24, S8),
    "f16, a batch, a residual": lambda: gated(F16, (19,), 40, 33, batch=(3,), side=True),
    "f32, gelu": lambda: gated(F32, (7,), 31, 5, function="gelu"),
}


def of_ranges(rows=20, depth=40, width=40, cuts=((0, 20), (20, 40)), dtype=F16):
    """A store for each range of columns of silu(left half) * right half."""
    src = [input_("x", dtype, (rows, depth)), input_("w", dtype, (depth, 2 * width))]
    params = [Node(Param(i, s.tensor)) for i, s in enumerate(src)]
    acc = Node(Acc(Gemm(F32, *params, (params[0],)).acc_type))
    left, right = (slice_(acc, -1, i * width, (i + 1) * width) for i in range(2))
    stores = (map_("multiply", map_("silu", slice_(left, -1, *cut)), slice_(right, -1, *cut)) for cut in cuts)
    return problem_of(Node(Gemm(F32, *params, tuple(stores)), *src))
