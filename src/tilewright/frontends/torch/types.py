"""torch's types as the graph's, and torch's conversions.

Type promotion is torch's own: the type of an operator's result is read off the export, and where the type it computes in
is another (comparisons), `torch.result_type` answers on empty stand-ins. A Python number is weak: it takes the type of the
tensors it meets. An expression of floats that is clamped lies in a range, which a conversion may rely on.
"""

from __future__ import annotations

import math
import operator
from typing import cast

import torch

from tilewright.dtype import BF16, F8E4M3FN, F16, F32, F64, OPAQUE, PRED, S32, S64, U8, U32, U64, DType, from_torch
from tilewright.errors import InputError
from tilewright.frontends.torch.registry import DependsOnDataError, Operand, Scalar
from tilewright.frontends.torch.symbols import extent_of
from tilewright.ir.build import const, convert, map_
from tilewright.ir.constant import scalar_value
from tilewright.ir.extent import Extent
from tilewright.ir.graph import Node
from tilewright.ir.ops import Broadcast, Convert, Map, Reshape, Select, Slice, Transpose
from tilewright.ir.types import TensorType


def dtype_of(t: torch.dtype) -> DType:
    """The element type that torch dtype `t` is, `opaque` where the graph has none (complex, sub-byte, quantised)."""
    try:
        found = from_torch(t)
    except InputError:
        return OPAQUE
    return found if found.to_torch() is t else OPAQUE


def type_of(value: torch.Tensor, where: str) -> TensorType:
    """The type of a traced tensor; `opaque` if its elements are of no type the graph has.

    Raises:
        UnsupportedError: its shape depends on data.
    """
    shape = tuple(map(extent_of, value.shape))
    if any(d is None for d in shape):
        raise DependsOnDataError(
            f"a shape depends on the data: [{', '.join(map(str, value.shape))}]",
            where=where,
            hint="select with a mask (torch.where) instead of picking elements (x[x > 0], nonzero, unique)",
        )
    d = dtype_of(value.dtype)
    return TensorType(d, () if d is OPAQUE else tuple(e for e in shape if e is not None))


def converted(x: Operand, dtype: DType) -> Node:
    """x converted as torch converts, or a number as a constant of that type.

    torch saturates only toward f8e4m3fn; the other formats overflow to infinity or NaN. A float becomes a narrow integer by way
    of a wide one, whose low bits it keeps: -3.0 is 253 as u8. What is out of the wide one's range is undefined in torch and
    saturates here (NaN gives 0), as in XLA.
    """
    if isinstance(x, Extent):
        return const(x, dtype)
    if not isinstance(x, Node):
        return const(_number(x, dtype), dtype)
    if x.dtype.is_float and dtype.is_integer and not lies_within(x, dtype):
        return _whole(x, dtype)
    return convert(x, dtype, "saturate" if dtype is F8E4M3FN else "wrap")


def _whole(x: Node, dtype: DType) -> Node:
    """Floats of any size as integers: through the signed type that torch's kernels convert by."""
    if dtype is U64:  # which is its own way above zero
        return Node(Select(), map_("less", x, const(0, x.dtype)), convert(convert(x, S64), U64), convert(x, U64))
    if dtype in (S32, S64):
        return convert(x, dtype)
    return convert(convert(x, S64 if dtype is U32 or (dtype is U8 and x.dtype is F64) else S32), dtype)


def _number(x: Scalar, dtype: DType) -> Scalar:
    """A number of that type: whether it is not 0, the whole part modulo 2**bits, or itself."""
    if dtype is PRED:
        return bool(x)
    if not dtype.is_integer:
        return x
    low = int(x) % (1 << dtype.bits)
    return low - (1 << dtype.bits) if low > dtype.max else low


def common_dtype(*operands: Operand) -> DType:
    """The type torch promotes these operands to (`torch.result_type`)."""
    a, b = (_stand_in(x) for x in operands)
    return dtype_of(torch.result_type(a, b))


def _stand_in(x: Operand) -> torch.Tensor:
    # A number is given as a tensor wherever one is wanted, so that result_type sees it as weak.
    if not isinstance(x, Node):
        return cast(torch.Tensor, x)
    return torch.empty([1] * min(len(x.shape), 1), dtype=x.dtype.to_torch(), device="meta")


def mapped(fn: str, dtype: DType, *operands: Operand) -> Node:
    """Elementwise `fn` on the operands, each converted to `dtype` first."""
    return map_(fn, *(converted(x, dtype) for x in operands))


def mapped_wide(fn: str, dtype: DType, *operands: Operand) -> Node:
    """Apply a function as `mapped` does, but without rounding a number that f16 or bf16 cannot hold to it: the step is done in
    f32."""
    if dtype in (F16, BF16) and any(_loses_bits(x, dtype) for x in operands):
        return converted(mapped(fn, F32, *operands), dtype)
    return mapped(fn, dtype, *operands)


def rounded(value: float, dtype: DType) -> float:
    """`value` as the nearest number of a float type, or itself for an integer type."""
    return torch.tensor(value, dtype=torch.float64).to(dtype.to_torch()).item() if dtype.is_float else value


def _loses_bits(x: Operand, dtype: DType) -> bool:
    if isinstance(x, Node):
        return not x.shape and x.dtype.is_float and x.dtype.bits > dtype.bits
    return rounded(float(x), dtype) != x


Range = tuple[float, float]

_ANY: Range = (-math.inf, math.inf)
_MOST_NESTED = 24
_KNOWN: dict[str, Range] = {"logistic": (0, 1), "tanh": (-1, 1), "sine": (-1, 1), "cosine": (-1, 1), "erf": (-1, 1)}
_MONOTONE = {"ceil": math.ceil, "floor": math.floor, "trunc": math.trunc, "round_half_even": round}
_BY_A_NUMBER = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}


def lies_within(x: Node, dtype: DType) -> bool:
    """Tell whether every number of `x`, without what is behind the point, is one of the integer type; NaN aside."""
    low, high = _range(x, 0, {})
    return low > dtype.min - 1 and high < dtype.max + 1


def _range(x: Node, depth: int, known: dict[Node, Range]) -> Range:
    """Numbers between which those of `x` lie; every step rounds, which keeps their order."""
    if x not in known:  # once, however many read it
        known[x] = _found(x, depth, known)
    return known[x]


def _found(x: Node, depth: int, known: dict[Node, Range]) -> Range:
    number = scalar_value(x)
    if number is not None:
        return (float(number), float(number)) if number == number else _ANY
    if depth > _MOST_NESTED:
        return _ANY
    if isinstance(x.op, (Broadcast, Reshape, Slice, Transpose)):
        return _range(x.src[0], depth + 1, known)
    if isinstance(x.op, Convert) and x.dtype.is_float:
        source = x.src[0].dtype
        held = _range(x.src[0], depth + 1, known) if source.is_float else (float(source.min), float(source.max))
        return _rounded(held, x.dtype)
    return _of_function(x.op.fn, x, depth + 1, known) if isinstance(x.op, Map) and x.dtype.is_float else _ANY


def _of_function(fn: str, x: Node, depth: int, known: dict[Node, Range]) -> Range:
    if fn in _KNOWN:
        return _KNOWN[fn]
    if fn not in ("abs", "clamp", "maximum", "minimum", "relu", *_MONOTONE, *_BY_A_NUMBER):
        return _ANY
    ranges = [_range(s, depth, known) for s in x.src]
    if fn == "clamp":
        low, own, high = ranges
        return min(max(own[0], low[0]), high[0]), min(max(own[1], low[1]), high[1])
    if fn in ("maximum", "minimum"):
        extreme = max if fn == "maximum" else min
        return extreme(r[0] for r in ranges), extreme(r[1] for r in ranges)
    low, high = ranges[0]
    if fn == "relu":
        return max(low, 0.0), max(high, 0.0)
    if fn == "abs":
        return 0.0, max(-low, high)
    if fn in _MONOTONE:
        return (
            float(_MONOTONE[fn](low)) if math.isfinite(low) else low,
            float(_MONOTONE[fn](high)) if math.isfinite(high) else high,
        )
    ends = [_BY_A_NUMBER[fn](a, b) for a in ranges[0] for b in ranges[1]]
    return _ANY if any(e != e for e in ends) else _rounded((min(ends), max(ends)), x.dtype)


def _rounded(held: Range, dtype: DType) -> Range:
    low, high = torch.tensor(held, dtype=torch.float64).to(dtype.to_torch()).to(torch.float64).tolist()
    return (low, high) if low <= high else _ANY  # NaN: too large for a type without infinities
