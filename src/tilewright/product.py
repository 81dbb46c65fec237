"""`matmul`: one product, compiled like any program and kept for the next call of the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch

from tilewright.compiler import compile
from tilewright.dtype import F32, F64, DType, dtype
from tilewright.errors import InputError
from tilewright.hardware.detect import one_of
from tilewright.ir.build import input_, reshape
from tilewright.ir.fused import Apply, Result, Side, fused_gemm
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import FUNCTIONS, Overflow
from tilewright.ir.types import Shape, TensorType
from tilewright.program import Program
from tilewright.runtime.arrays import Array, dtype_of, from_dlpack, is_numpy
from tilewright.threads import valid_count

DEFAULT_BUDGET_S = 1.0
_OF_THE_RESULT = ("scale", "bias", "residual", "out_scale", "out_zero_point")  # what broadcasts to it


def matmul(
    a: object,
    b: object,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    a_dtype: str | None = None,
    b_dtype: str | None = None,
    acc_dtype: str | None = None,
    out_dtype: str | None = None,
    overflow: Overflow = "wrap",
    a_scale: object = None,
    a_zero_point: object = None,
    b_scale: object = None,
    b_zero_point: object = None,
    group_size: int | None = None,
    scale: object = None,
    bias: object = None,
    activation: str | None = None,
    residual: object = None,
    out_scale: object = None,
    out_zero_point: object = None,
    device: str | torch.device | None = None,
    budget_s: float = DEFAULT_BUDGET_S,
    threads: int | None = None,
) -> object:
    """activation((a @ b) * scale + bias) + residual, as `out_dtype`.

    Arrays are torch tensors, NumPy arrays or anything with DLPack; the result is NumPy's if all of them are. Anything but a and
    b may also be a plain number.

    Args:
        a, b: [*batch, M, K] and [*batch, K, N]; [*batch, K, M] and [*batch, N, K] when transposed. Batch axes broadcast.
            A vector [K] is a row of a or a column of b whatever the transpose, and the result lacks that axis, as in NumPy.
        transpose_a, transpose_b: the operand is stored with its last two axes exchanged.
        a_dtype, b_dtype: logical type where the array cannot say it: "s4" or "u4" codes, one to a byte.
        acc_dtype: s32 for integers and f32 for floats if not given; a narrower one must be asked for.
        out_dtype: the accumulator's (f32 once anything is scaled) if not given.
        overflow: how an integer accumulator becomes a narrower integer: "wrap" (modulo 2**bits) or "saturate".
        a_scale, b_scale: the operand stands for (code - zero_point) * scale. Per tensor, per row of a, per column of b
            (shaped to broadcast against the stored operand), or per group along K with `group_size`.
        a_zero_point, b_zero_point: integers, shaped as the operand's scale.
        group_size: elements along K that share one value of `b_scale`.
        scale: multiplies the product; anything that broadcasts to the result.
        bias: [N], or anything that broadcasts to the result.
        activation: "relu", "gelu", "gelu_tanh", "silu", "tanh", "logistic" or another function of `map`.
        residual: added last, shaped as the result.
        out_scale, out_zero_point: quantise the result to `out_dtype` (round half to even, saturate).
        device: where to run; arrays are moved there. None is where they lie.
        budget_s: seconds to spend choosing a kernel the first time a shape is seen.
        threads: threads on a CPU; None is torch's number, but no more than the machine has for this process.

    Raises:
        InputError: a value is no array, or an unknown dtype or function is named.
        TypeMismatchError: extents or types do not fit.
    """
    given: dict[str, object] = {
        "a": a,
        "b": b,
        "a_scale": a_scale,
        "a_zero_point": a_zero_point,
        "b_scale": b_scale,
        "b_zero_point": b_zero_point,
        "scale": scale,
        "bias": bias,
        "residual": residual,
        "out_scale": out_scale,
        "out_zero_point": out_zero_point,
    }
    named = {"a": a_dtype, "b": b_dtype, "a_zero_point": a_dtype, "b_zero_point": b_dtype, "out_zero_point": out_dtype}
    arrays: dict[str, Array] = {}
    types: dict[str, TensorType] = {}
    for name, value in given.items():
        if value is not None or name in ("a", "b"):
            said = named.get(name)
            wanted = None if said is None else dtype(said)
            arrays[name] = _array(value, name, wanted or _number_type(name, types))
            types[name] = _type(arrays[name], wanted, name)
    if group_size is not None and group_size < 1:
        raise InputError(f"group_size is {group_size}", hint="a positive number of elements along K")
    request = (transpose_a, transpose_b, acc_dtype, out_dtype, overflow, group_size, activation)
    where = device or one_of(str(t.device) for t in arrays.values() if isinstance(t, torch.Tensor))
    return _compiled(tuple(types.items()), request, where, budget_s, valid_count(threads))(*arrays.values())


def _number_type(name: str, types: Mapping[str, TensorType]) -> DType:
    """The type of an argument given as a plain number: its operand's for a zero point, else a float as wide as the operands."""
    if name.endswith("zero_point") and name[0] in types:
        return types[name[0]].dtype
    return F64 if any(types[side].dtype is F64 for side in "ab" if side in types) else F32


def _array(value: object, name: str, number_type: DType) -> Array:
    if isinstance(value, torch.Tensor) or is_numpy(value):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if not number_type.holds(value):
            raise InputError(f"{value} is no {number_type}", where=name)
        return np.asarray(value, dtype=number_type.to_numpy())
    if hasattr(value, "__dlpack__"):
        return from_dlpack(value, name)
    raise InputError(f"a {type(value).__name__} is no array", where=name, hint="a torch tensor, NumPy array or DLPack")


def _type(array: Array, wanted: DType | None, name: str) -> TensorType:
    found = dtype_of(array, name)
    if wanted is not None and wanted is not found and wanted.to_torch() != found.to_torch():
        raise InputError(f"{name} holds {found}, not {wanted}", hint="4-bit codes travel one to a byte")
    return TensorType(wanted or found, tuple(array.shape))


@lru_cache(maxsize=1024)
def _compiled(
    types: tuple[tuple[str, TensorType], ...],
    request: tuple[bool, bool, str | None, str | None, Overflow, int | None, str | None],
    device: str | torch.device,
    budget_s: float,
    threads: int | None,
) -> Program:
    transpose_a, transpose_b, acc_dtype, out_dtype, overflow, group_size, activation = request
    inputs = {name: input_(name, t.dtype, t.shape) for name, t in types}
    node, dropped = _as_matrices(inputs)
    # NumPy's transpose of a vector is the vector.
    transpose_a, transpose_b = transpose_a and -2 not in dropped, transpose_b and -1 not in dropped
    k_axis = -1 if transpose_b else -2
    b_shape = node["b"].shape
    block: Shape | None = None
    if group_size is not None:
        at = len(b_shape) + k_axis
        block = tuple(group_size if i == at else 1 for i in range(len(b_shape)))
    lhs = Side(node["a"], transpose_a, node.get("a_scale"), node.get("a_zero_point"))
    rhs = Side(node["b"], transpose_b, node.get("b_scale"), node.get("b_zero_point"), block)
    steps: list[Apply] = []
    for fn, operand in (("multiply", "scale"), ("add", "bias")):
        if operand in node:
            steps.append(Apply(fn, node[operand]))
    if activation is not None:
        if activation not in FUNCTIONS or FUNCTIONS[activation].arity != 1 or FUNCTIONS[activation].to_pred:
            raise InputError(f"no activation {activation!r}", hint="relu, gelu, gelu_tanh, silu, tanh, logistic")
        steps.append(Apply(activation))
    if "residual" in node:
        steps.append(Apply("add", node["residual"]))
    result = _result(node, None if out_dtype is None else dtype(out_dtype), overflow)
    product = fused_gemm(lhs, rhs, result, steps, None if acc_dtype is None else dtype(acc_dtype))
    shape = [d for i, d in enumerate(product.shape) if i - len(product.shape) not in dropped]
    graph = Graph("matmul", tuple(inputs.values()), (reshape(product, shape),), ("result",))
    return compile(graph, device=device, budget_s=budget_s, threads=threads)


def _as_matrices(given: Mapping[str, Node]) -> tuple[dict[str, Node], list[int]]:
    """The arguments with a vector a as one row and a vector b as one column, and the axes which that adds to the result.

    What broadcasts to the result gets its added axes, too; what belongs to a vector b becomes a column with it.
    """
    node = dict(given)
    dropped: list[int] = []
    if len(given["b"].shape) == 1:
        dropped.append(-1)
        names = ("b", "b_scale", "b_zero_point", *_OF_THE_RESULT)
        node |= {n: reshape(node[n], (*node[n].shape, 1)) for n in names if n in node and node[n].shape}
    if len(given["a"].shape) == 1:
        dropped.append(-2)
        names = ("a", *_OF_THE_RESULT)
        node |= {n: reshape(node[n], (*node[n].shape[:-1], 1, node[n].shape[-1])) for n in names if n in node and node[n].shape}
    return node, dropped


def _result(node: dict[str, Node], out: DType | None, overflow: Overflow) -> Result | None:
    if out is None:
        for name in ("out_scale", "out_zero_point"):
            if name in node:
                raise InputError(f"{name} is given but not the type to quantise to", hint="out_dtype='s8'")
        return None
    return Result(out, overflow, node.get("out_scale"), node.get("out_zero_point"))
