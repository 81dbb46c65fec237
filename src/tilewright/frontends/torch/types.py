"""torch's types as the graph's, and torch's conversions.

Type promotion is torch's own: the type of an operator's result is read off the export, and where the type it computes in
is another (comparisons), `torch.result_type` answers on empty stand-ins. A Python number is weak: it takes the type of the
tensors it meets.
"""

from __future__ import annotations

from typing import cast as narrow

import torch

from tilewright.dtype import BF16, F8E4M3FN, F16, F32, F64, OPAQUE, PRED, S32, S64, U8, U32, U64, DType, from_torch
from tilewright.errors import InputError
from tilewright.frontends.torch.range import lies_within
from tilewright.frontends.torch.registry import DependsOnDataError, Operand, Scalar
from tilewright.ir.build import const, convert, map_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Select
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
    shape = tuple(value.shape)
    if not all(type(d) is int for d in shape):
        raise DependsOnDataError(
            f"a shape depends on the data: [{', '.join(map(str, shape))}]",
            where=where,
            hint="select with a mask (torch.where) instead of picking elements (x[x > 0], nonzero, unique)",
        )
    d = dtype_of(value.dtype)
    return TensorType(d, () if d is OPAQUE else shape)


def cast(x: Operand, dtype: DType) -> Node:
    """x converted as torch converts, or a number as a constant of that type.

    torch saturates only toward f8e4m3fn; the other formats overflow to infinity or NaN. A float becomes a narrow integer by way
    of a wide one, whose low bits it keeps: -3.0 is 253 as u8. What is out of the wide one's range is undefined in torch and
    saturates here (NaN gives 0), as in XLA.
    """
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
        return narrow(torch.Tensor, x)
    return torch.empty([1] * min(len(x.shape), 1), dtype=x.dtype.to_torch(), device="meta")


def mapped(fn: str, dtype: DType, *operands: Operand) -> Node:
    """Elementwise `fn` on the operands, each converted to `dtype` first."""
    return map_(fn, *(cast(x, dtype) for x in operands))


def mapped_wide(fn: str, dtype: DType, *operands: Operand) -> Node:
    """Apply a function as `mapped` does, but without rounding a number that f16 or bf16 cannot hold to it: the step is done in
    f32."""
    if dtype in (F16, BF16) and any(_loses_bits(x, dtype) for x in operands):
        return cast(mapped(fn, F32, *operands), dtype)
    return mapped(fn, dtype, *operands)


def rounded(value: float, dtype: DType) -> float:
    """`value` as the nearest number of a float type, or itself for an integer type."""
    return torch.tensor(value, dtype=torch.float64).to(dtype.to_torch()).item() if dtype.is_float else value


def _loses_bits(x: Operand, dtype: DType) -> bool:
    if isinstance(x, Node):
        return not x.shape and x.dtype.is_float and x.dtype.bits > dtype.bits
    return rounded(float(x), dtype) != x
