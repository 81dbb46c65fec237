"""Gemms printed in the notation of `notation.py`, one line a gemm; that file also lists the parts that are printed and not
parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from tilewright.dtype import F32, DType
from tilewright.ir.expression import depends_on_acc
from tilewright.ir.fused import natural_accumulator
from tilewright.ir.graph import Node
from tilewright.ir.notation import ADDENDS, FACTORS, OPERATORS
from tilewright.ir.ops import (
    ALIASES,
    VIEWS,
    Acc,
    Call,
    Concat,
    Const,
    Convert,
    Dequantize,
    Gemm,
    Map,
    Param,
    Quantize,
    Reshape,
    Slice,
    Transpose,
)
from tilewright.ir.text import print_expression
from tilewright.ir.types import Shape, TensorType, Type

SHOWN_OPS = 6
SYMBOLS = {fn: sign for sign, fn in OPERATORS.items()}
ROLES = {"add": ADDENDS, "subtract": ADDENDS, "multiply": FACTORS, "divide": FACTORS}


def show_gemm(op: Gemm) -> str:
    """A gemm in the notation."""
    head = f"{_show_operand(op.lhs, rows=True)} @ {_show_operand(op.rhs, rows=False)}"
    tails = [_show_store(store, op) for store in op.stores]
    return head + tails[0] if len(tails) == 1 else f"{head} {{{';'.join(tails)} }}"


def _show_operand(root: Node, *, rows: bool) -> str:
    node, transposed = root, ""
    rank = len(root.shape)
    if isinstance(node.op, Transpose) and node.op.perm == (*range(rank - 2), rank - 1, rank - 2):
        node, transposed = node.src[0], "^T"
    if isinstance(node.op, Param):
        return f"{node.type}{transposed}"
    if isinstance(node.op, Reshape) and isinstance(node.src[0].op, Param):
        return f"{node.src[0].type} as {_extents(node.shape)}{transposed}"
    if isinstance(node.op, Dequantize) and isinstance(node.src[0].op, Param):
        code, scale = node.src[0], node.src[1]
        zero = " zero_point" if len(node.src) == 3 else ""
        return f"{code.type}{transposed}{_show_scale(node, code, scale, rows, bool(transposed))}{zero}"
    if isinstance(node.op, Concat) and all(isinstance(n.op, Param) for n in node.src):
        return f"{'|'.join(str(n.type) for n in node.src)}{transposed}"
    if isinstance(node.op, Convert) and isinstance(node.src[0].op, Param) and node.src[0].dtype.is_integer:
        return f"{node.src[0].type}{transposed}"
    return f"{root.type}{{{print_expression(root)}}}"


def _show_scale(node: Node, code: Node, scale: Node, rows: bool, transposed: bool) -> str:
    op = node.op
    assert isinstance(op, Dequantize)
    rank = len(code.shape)
    k_axis = rank + ((-1 if rows else -2) if not transposed else (-2 if rows else -1))
    if op.block is not None:
        if all(b == 1 for i, b in enumerate(op.block) if i != k_axis):
            return f" group={op.block[k_axis]}"
        return f" block={op.block[-2]}x{op.block[-1]}"
    if isinstance(scale.op, Const) and scale.op.data.scalar() == 1:
        return ""
    return " scale=tensor" if scale.tensor.elements == 1 else " scale=channel"


def _show_store(store: Node, op: Gemm) -> str:
    """Range of acc, steps, result and view of a store, if its steps form a chain; else its expression in braces."""
    view, node = "", store
    while isinstance(node.op, (Reshape, Transpose)):
        shown = _extents(node.shape) if isinstance(node.op, Reshape) else f"({','.join(map(str, node.op.perm))})"
        view, node = f" as {shown}{view[3:]}", node.src[0]
    result = ""
    if isinstance(node.op, Quantize):
        result = f" -> {node.dtype} scale={_spread(node.src[1].tensor)}{' zero_point' if len(node.src) == 3 else ''}"
        node = node.src[0]
    elif isinstance(node.op, Convert):
        saturates = node.op.overflow == "saturate" and (node.src[0].dtype.is_integer or node.dtype.is_float)
        result, node = f" -> {node.dtype}{' saturate' if saturates else ''}", node.src[0]
    if op.acc_dtype is not natural_accumulator(op.lhs.dtype, op.rhs.dtype):
        result = f"{result or f' -> {node.dtype}'} acc={op.acc_dtype}"
    dependent = depends_on_acc((store,))
    steps: list[str] = []
    while not isinstance(node.op, Acc):
        inner = [s for s in node.src if s in dependent]
        if isinstance(node.op, Slice) and isinstance(node.src[0].op, Acc):
            steps.append(f" [{node.op.start[-1]}:{node.op.stop[-1]}]")
            break
        if isinstance(node.op, (Quantize, Dequantize)) and inner == [node.src[0]]:
            steps.append(f", {node.op.name}({node.dtype})")
            node = inner[0]
            continue
        if isinstance(node.op, Convert) and len(inner) == 1:
            steps += [] if node.dtype is F32 else [f", {node.dtype}"]  # the notation computes steps in f32 by itself
            node = inner[0]
            continue
        step = _show_step(node, inner, node.shape) if isinstance(node.op, Map) and len(inner) == 1 else None
        if step is None:
            steps.append(f" {{{print_expression(node)}}}")
            break
        steps.append(step)
        node = inner[0]
    return "".join(reversed(steps)) + result + view


def _extents(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _spread(scale: TensorType) -> str:
    if scale.elements == 1:
        return "tensor"
    if scale.shape[-1] == 1:
        return "row"
    return "column" if set(scale.shape[:-1]) <= {1} else str(scale)


def _show_step(node: Node, inner: list[Node], shape: Shape) -> str | None:
    assert isinstance(node.op, Map)
    fn = node.op.fn
    if len(node.src) == 1:
        return f", {fn}"
    if len(node.src) != 2 or (node.src[0] is not inner[0] and fn not in ("add", "multiply", "maximum", "minimum")):
        return None
    other = node.src[1] if node.src[0] is inner[0] else node.src[0]
    shown = _show_side(other, shape, ROLES.get(fn, {}))
    if shown is None:
        return None
    return f" {SYMBOLS[fn]} {shown}" if fn in SYMBOLS else f", {fn}({shown})"


def _show_side(side: Node, shape: Shape, words: Mapping[str, str]) -> str | None:
    """A number, a source by the word for its role and for what has a value of its own, or by its type; None of another side."""
    value, scaled = side, False
    while isinstance(value.op, (*VIEWS, Convert, Dequantize)):
        scaled |= isinstance(value.op, Dequantize)
        value = value.src[0]
    if isinstance(value.op, Const) and value.tensor.elements == 1 and not scaled:
        return _show_number(value.op.data.scalar(), value.dtype)
    if not isinstance(value.op, Param):
        return None
    axes = [a for a, d in enumerate(side.shape, len(shape) - len(side.shape)) if d != 1]
    spread = "number" if not axes else "column" if axes == [len(shape) - 1] else "result" if side.shape == shape else ""
    if not spread and side.shape == (*shape[:-1], 1):
        spread = "row"
    return f"{words[spread]}:{value.dtype}" if spread in words else str(value.tensor.with_shape(side.shape))


def _show_number(value: float | int | bool | None, t: DType) -> str:
    """The shortest digits that give the value back, and its type unless that is f32."""
    assert value is not None
    digits = str(int(value)) if not t.is_float else str(np.float32(value)) if t is F32 else repr(float(value))
    digits = digits.removesuffix(".0")
    return digits if t is F32 else f"{digits}:{t}"


def op_name(node: Node) -> str:
    """The name of an operation in reports: the function of a `map`, the target of a `call`, else the op."""
    if isinstance(node.op, Map):
        return node.op.fn
    return node.op.target if isinstance(node.op, Call) else node.op.name


def show_fusion(nodes: Sequence[Node], results: Sequence[Type]) -> str:
    """The operations of a fusion in order, views left out unless there is nothing else, and the types of its results."""
    inner = [n for n in nodes if not isinstance(n.op, (Param, Const))]
    working = [n for n in inner if not isinstance(n.op, ALIASES)] or inner
    runs = [(name, len(list(group))) for name, group in groupby(op_name(n) for n in working)]
    shown = [f"{name} x{count}" if count > 1 else name for name, count in runs[:SHOWN_OPS]]
    if len(runs) > SHOWN_OPS:
        shown.append(f"{sum(count for _, count in runs[SHOWN_OPS:])} more")
    return f"{', '.join(shown)} -> {', '.join(map(str, results))}"
