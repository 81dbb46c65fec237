"""Random gemms with several stores and random attentions: what one line of the gemm notation cannot say.

Operands through views (transposed, split into heads, parts of something larger), batches that broadcast; results from ranges of
columns, each with steps, a type and a view of its own.
"""

import math

from hypothesis import strategies as st

from tilewright.dtype import BF16, F16, F32, PRED, S8, S32, U8
from tilewright.ir.build import const, convert, input_, map_, reshape, slice_, swap_last, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Attention, Dequantize, Gemm, Param, Quantize
from tilewright.ir.types import TensorType

EXTENT = st.sampled_from([1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64, 65, 100, 130])
PRODUCTS = [(S8, S8, S32), (U8, S8, S32), (S8, U8, S32), (U8, U8, S32), *[(t, t, F32) for t in (F32, BF16, F16)]]
UNARY = ("relu", "gelu", "gelu_tanh", "silu", "tanh", "logistic", "negate", "abs")
BATCHES = [((), ()), ((2,), (2,)), ((3,), ()), ((), (2,)), ((2, 1), (3,)), ((1,), (3,))]


class Drawn:
    """Sources as they are drawn."""

    def __init__(self, draw):
        self.draw, self.types = draw, []

    def source(self, dtype, shape):
        self.types.append(TensorType(dtype, tuple(shape)))
        return Node(Param(len(self.types) - 1, self.types[-1]))

    def operand(self, dtype, shape):
        """An operand of this shape, under a view of a source."""
        *lead, rows, columns = shape
        match self.draw(st.sampled_from(["plain", "plain", "transposed", "heads", "part"])):
            case "transposed":
                return swap_last(self.source(dtype, (*lead, columns, rows)))
            case "heads" if len(lead) == 1:
                return transpose(reshape(self.source(dtype, (rows, lead[0] * columns)), (rows, *lead, columns)), (1, 0, 2))
            case "part":
                first, beyond = self.draw(st.integers(0, 3)), self.draw(st.integers(0, 3))
                return slice_(
                    self.source(dtype, (*lead, rows, first + columns + beyond)), len(lead) + 1, first, first + columns
                )
        return self.source(dtype, shape)

    def stores(self, acc, widest=3):
        """Results of an accumulator's columns."""
        return tuple(self._store(acc) for _ in range(self.draw(st.integers(1, widest))))

    def product_of_halves(self, acc):
        """SwiGLU and its kind, of either half first."""
        axis, extent = len(acc.shape) - 1, acc.shape[-1] // 2
        parts = [slice_(acc, axis, i * extent, (i + 1) * extent) for i in range(2)]
        if acc.dtype is S32:
            shape = self.draw(st.sampled_from([(), (extent,)]))
            parts = [map_("multiply", convert(x, F32), self.source(F32, shape)) for x in parts]
        gate, other = self.draw(st.permutations(parts))
        return map_("multiply", map_(self.draw(st.sampled_from(UNARY)), gate), other)

    def _store(self, acc):
        draw, columns = self.draw, acc.shape[-1]
        x = acc
        if isinstance(acc.op, Acc) and draw(st.booleans()):
            first = draw(st.integers(0, columns - 1))
            x = slice_(x, len(x.shape) - 1, first, draw(st.integers(first + 1, columns)))
        if acc.dtype is S32 and draw(st.integers(0, 4)) == 0:
            return self._viewed(draw(st.sampled_from([x, convert(x, S8), convert(x, S8, "saturate")])))
        if x.dtype is not F32:
            x = convert(x, F32)
        if acc.dtype is S32:
            x = map_("multiply", x, self.source(F32, draw(st.sampled_from([(), x.shape[-1:]]))))
        for _ in range(draw(st.integers(0, 3))):
            x = self._step(x)
        match draw(st.sampled_from(["f32", "bf16", "f16", "codes", "codes"])):
            case "bf16":
                x = convert(x, BF16)
            case "f16":
                x = convert(x, F16)
            case "codes":
                dtype = draw(st.sampled_from([S8, U8]))
                shape = draw(st.sampled_from([(), x.shape[-1:], (*x.shape[:-1], 1)]))
                zero = [self.source(dtype, ())] if draw(st.booleans()) and not shape else []
                x = Node(Quantize(dtype), x, self.source(F32, shape), *zero)
        return self._viewed(x)

    def _step(self, x):
        match self.draw(st.integers(0, 4)):
            case 0:
                low, high = sorted(self.draw(st.tuples(st.integers(-3, 3), st.integers(-3, 3))))
                return map_("minimum", map_("maximum", x, const(float(low), F32)), const(float(high), F32))
            case 1:
                shape = self.draw(st.sampled_from([x.shape[-1:], (*x.shape[:-1], 1), ()]))
                return map_(self.draw(st.sampled_from(["add", "subtract", "multiply"])), x, self.source(F32, shape))
            case 2:
                return map_("add", x, convert(self.source(self.draw(st.sampled_from([BF16, F16])), x.shape), F32))
            case _:
                return map_(self.draw(st.sampled_from(UNARY)), x)

    def _viewed(self, x):
        *lead, rows, columns = x.shape
        match self.draw(st.sampled_from(["none", "heads", "transposed", "flat"])):
            case "heads":
                each = self.draw(st.sampled_from([d for d in range(1, columns + 1) if columns % d == 0]))
                n = len(lead)
                split = reshape(x, (*lead, rows, columns // each, each))
                return transpose(split, (*range(n), n + 1, n, n + 2))
            case "transposed":
                return swap_last(x)
            case "flat":
                return reshape(x, (math.prod(x.shape),))
        return x


@st.composite
def gemms(draw, paired=False):
    """A gemm with one to three stores; `paired`: of what a function of half of the columns makes of the other half."""
    drawn = Drawn(draw)
    m, n, k = draw(EXTENT), draw(EXTENT) * (1 + paired), draw(st.one_of(EXTENT, st.just(0)))
    left, right = draw(st.sampled_from(BATCHES))
    a, b, acc = draw(st.sampled_from(PRODUCTS))
    lhs, rhs = drawn.operand(a, (*left, m, k)), drawn.operand(b, (*right, k, n))
    out = Node(Acc(Gemm(acc, lhs, rhs, (lhs,)).acc_type))
    stores = drawn.stores(drawn.product_of_halves(out) if paired else out)
    return Node(Gemm(acc, lhs, rhs, stores), *_inputs(drawn))


@st.composite
def attentions(draw):
    """An attention: grouped heads, masks of any broadcast shape, causal or not, codes for operands, stores with views."""
    drawn = Drawn(draw)
    batch, keyed, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    small = st.sampled_from([1, 2, 3, 7, 8, 15, 16, 17, 33, 40])
    queries, keys, depth, width = draw(small), draw(small), draw(small), draw(small)
    dtype, coded = draw(st.sampled_from([F32, BF16, F16])), draw(st.integers(0, 3)) == 0
    operands = []
    for heads, rows, columns in ((keyed * group, queries, depth), (keyed, keys, depth), (keyed, keys, width)):
        if coded:
            codes = drawn.source(S8, (batch, heads, rows, columns))
            operands.append(Node(Dequantize(F32), codes, drawn.source(F32, ())))
        elif draw(st.booleans()):  # as a projection leaves it
            operands.append(transpose(drawn.source(dtype, (batch, rows, heads, columns)), (0, 2, 1, 3)))
        else:
            operands.append(drawn.source(dtype, (batch, heads, rows, columns)))
    if draw(st.booleans()):
        full = (batch, keyed * group, queries, keys)
        shape = [d if draw(st.booleans()) else 1 for d in full]
        operands.append(drawn.source(draw(st.sampled_from([PRED, F32, BF16])), shape))
    out = Node(Acc(TensorType(operands[0].dtype, (batch, keyed * group, queries, width))))
    x = out
    if draw(st.integers(0, 2)) == 0:
        x = Node(Quantize(S8), x if x.dtype is F32 else convert(x, F32), drawn.source(F32, ()))
    if draw(st.booleans()):
        x = reshape(transpose(x, (0, 2, 1, 3)), (batch, queries, keyed * group * width))
    causal = draw(st.sampled_from(["no", "upper", "lower"]))
    return Node(Attention(0.25, causal, True, tuple(operands), None, None, (x,)), *_inputs(drawn))


def _inputs(drawn):
    return [input_(f"x{i}", t.dtype, t.shape) for i, t in enumerate(drawn.types)]
