"""`matmul`: one product, compiled like any program and kept for the next call of the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from tilewright.compiler import compile
from tilewright.dtype import DType, dtype, from_numpy, from_torch
from tilewright.errors import InputError
from tilewright.ir.build import input_
from tilewright.ir.fused import Apply, Result, Side, fused_gemm
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import FUNCTIONS, Overflow
from tilewright.ir.types import Shape, TensorType
from tilewright.runtime.executable import Executable

DEFAULT_BUDGET_S = 0.2


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
    device: str = "cpu",
    budget_s: float = DEFAULT_BUDGET_S,
) -> object:
    """activation((a @ b) * scale + bias) + residual, as `out_dtype`.

    Arrays are torch tensors, NumPy arrays or anything with DLPack; the result is NumPy's if all of them are.

    Args:
        a, b: [*batch, M, K] and [*batch, K, N]; [*batch, K, M] and [*batch, N, K] when transposed. Batch axes broadcast.
        transpose_a, transpose_b: the operand is stored with its last two axes exchanged.
        a_dtype, b_dtype: logical type where the array cannot say it: "s4" or "u4" codes, one to a byte.
        acc_dtype: s32 for integers and f32 for floats if not given; a narrower one must be asked for.
        out_dtype: the accumulator's (f32 once anything is scaled) if not given.
        overflow: how an integer accumulator becomes a narrower integer: "wrap" (modulo 2**bits) or "saturate".
        a_scale, b_scale: the operand stands for (code - zero_point) * scale. Per tensor, per row of a, per column of b
            (shaped to broadcast against the stored operand), or per group along K with `group_size`.
        a_zero_point, b_zero_point: of the operand's type, shaped as its scale.
        group_size: elements along K that share one value of `b_scale`.
        scale: multiplies the product; a number or anything that broadcasts.
        bias: [N], or anything that broadcasts.
        activation: "relu", "gelu", "gelu_tanh", "silu", "tanh", "logistic" or another function of `map`.
        residual: added last, shaped as the result.
        out_scale, out_zero_point: quantise the result to `out_dtype` (round half to even, saturate).
        device: where to run; arrays are moved there.
        budget_s: seconds to spend choosing a kernel the first time a shape is seen.

    Raises:
        InputError: a value is no array, or an unknown dtype or function is named.
        TypeMismatchError: extents or types do not fit.
    """
    given = {
        "a": (a, a_dtype),
        "b": (b, b_dtype),
        "a_scale": (a_scale, None),
        "a_zero_point": (a_zero_point, a_dtype),
        "b_scale": (b_scale, None),
        "b_zero_point": (b_zero_point, b_dtype),
        "scale": (scale, None),
        "bias": (bias, None),
        "residual": (residual, None),
        "out_scale": (out_scale, None),
        "out_zero_point": (out_zero_point, out_dtype),
    }
    arrays = {name: _array(value) for name, (value, _) in given.items() if value is not None}
    types = tuple((name, _type(arrays[name], given[name][1], name)) for name in arrays)
    request = (transpose_a, transpose_b, acc_dtype, out_dtype, overflow, group_size, activation)
    return _compiled(types, request, device, budget_s)(*arrays.values())


def _array(value: object) -> object:
    return torch.tensor(value, dtype=torch.float32) if isinstance(value, (int, float)) else value


def _type(array: object, named: str | None, name: str) -> TensorType:
    shape: Sequence[int] | None = getattr(array, "shape", None)
    if shape is None:
        raise InputError(f"a {type(array).__name__} is no array", where=name, hint="a torch tensor, NumPy array or DLPack")
    if isinstance(array, torch.Tensor):
        found = from_torch(array.dtype)
    elif type(array).__module__ == "numpy":
        found = from_numpy(array.dtype)  # type: ignore[attr-defined]
    else:
        found = from_torch(torch.from_dlpack(array).dtype)
    wanted = dtype(named) if named is not None else found
    if wanted is not found and wanted.to_torch() != found.to_torch():
        raise InputError(f"{name} holds {found}, not {wanted}", hint="4-bit codes travel one to a byte")
    return TensorType(wanted, tuple(shape))


@lru_cache(maxsize=1024)
def _compiled(
    types: tuple[tuple[str, TensorType], ...],
    request: tuple[bool, bool, str | None, str | None, Overflow, int | None, str | None],
    device: str,
    budget_s: float,
) -> Executable:
    transpose_a, transpose_b, acc_dtype, out_dtype, overflow, group_size, activation = request
    node = {name: input_(name, t.dtype, t.shape) for name, t in types}
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
        if activation not in FUNCTIONS or FUNCTIONS[activation].arity != 1:
            raise InputError(f"no activation {activation!r}", hint="relu, gelu, gelu_tanh, silu, tanh, logistic")
        steps.append(Apply(activation))
    if "residual" in node:
        steps.append(Apply("add", node["residual"]))
    result = _result(node, None if out_dtype is None else dtype(out_dtype), overflow)
    product = fused_gemm(lhs, rhs, result, steps, None if acc_dtype is None else dtype(acc_dtype))
    graph = Graph("matmul", tuple(node.values()), (product,), ("result",))
    return compile(graph, device=device, budget_s=budget_s)


def _result(node: dict[str, Node], out: DType | None, overflow: Overflow) -> Result | None:
    if out is None:
        if "out_scale" in node:
            raise InputError("out_scale is given but not the type to quantise to", hint="out_dtype='s8'")
        return None
    return Result(out, overflow, node.get("out_scale"), node.get("out_zero_point"))
