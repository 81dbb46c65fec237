"""Expressions through Triton's interpreter, evaluated as kernels do: by tiles of rows and columns. TRITON_INTERPRET=1 must have
been set before Triton was imported."""

import math
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import torch
from triton.runtime import interpreter

from tilewright.candidates.triton.expressions.emit import Emitter, Tile, check
from tilewright.candidates.triton.expressions.text import Text
from tilewright.candidates.triton.runtime.module import IMPORTS, module
from tilewright.ir.axes import axes_of
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Acc, Param
from tilewright.lowering.access import Access, of_operand

ROWS, COLUMNS = 2048, 32


def _fused(self, x, y, z):
    """The interpreter rounds the product of a fused multiply-add."""
    with np.errstate(all="ignore"):
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(wide.astype(np.float32), z.dtype.scalar)


def _converted(given, source, target, rounding, convert=interpreter._convert_float):
    """The interpreter drops the bits that bf16 has no room for, and takes its small numbers for zeros."""
    if source.name == "fp32" and target.name == "bf16":
        return torch.from_numpy(np.ascontiguousarray(given)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    if source.name == "bf16" and target.name == "fp32":
        return (given.astype(np.uint32) << 16).view(np.float32)
    return convert(given, source, target, rounding)


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """The interpreter multiplies the bits of bf16, and wraps nothing."""
    x, y = (_numbers(h.data, h.dtype.scalar.name) for h in (a, b))
    product = np.matmul(x, y)
    if product.dtype == np.int64:
        product = product.astype(np.int32)
    with np.errstate(all="ignore"):
        return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)


def _numbers(data, name):
    """Float64, or s64."""
    if name == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if name.startswith("fp8"):
        kind = {"fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2}[name]
        return data.view(kind).astype(np.float64)
    return data.astype(np.int64 if data.dtype.kind in "iu" else np.float64)


interpreter.InterpreterBuilder.create_fma = _fused
interpreter.InterpreterBuilder.create_dot = _dot
interpreter._convert_float = _converted


def in_memory(t: torch.Tensor) -> torch.Tensor:
    """Bytes as a kernel is given them: fp8 and pred as u8."""
    return t.contiguous().view(torch.uint8) if t.itemsize == 1 and t.dtype is not torch.int8 else t.contiguous()


def scalars(numbers: Mapping[str, float | int]) -> list[object]:
    """The same for numbers: what is of one element to the compiler is a Python float to the interpreter."""
    as_f32 = interpreter.tl.float32
    return [
        n if isinstance(n, int) else interpreter.tl.tensor(interpreter.TensorHandle(np.array([n], np.float32), as_f32), as_f32)
        for n in numbers.values()
    ]


def run_expressions(
    roots: Sequence[Node],
    sources: Sequence[torch.Tensor],
    acc: torch.Tensor | None = None,
    accesses: Sequence[Access] | None = None,
    tile: tuple[int, int] = (ROWS, COLUMNS),
    across: bool = False,
) -> list[torch.Tensor]:
    """Expressions over params, and an accumulator, in one kernel.

    Raises:
        Unsupported: one has no form in Triton.
    """
    check(roots)
    accesses = accesses or [of_operand(r, columns_last=True) for r in roots]
    rows = math.prod(a.extent for a in axes_of((accesses[0].rows,)))
    columns = accesses[0].columns_extent if acc is None else acc.shape[-1]
    text = Text()
    text.do(f"rows = tl.program_id(0) * {tile[0]} + tl.arange(0, {tile[0]})")
    text.do(f"columns = tl.program_id(1) * {tile[1]} + tl.arange(0, {tile[1]})")
    text.do(f"row_mask = rows < {rows}")
    text.do(f"column_mask = columns < {columns}")
    upright, lying = ("[None, :]", "[:, None]") if across else ("[:, None]", "[None, :]")
    if acc is not None:
        mask = f"row_mask{upright} & column_mask{lying}"
        text.do(f"acc = tl.load(a + (rows{upright} * {columns} + columns{lying}), mask={mask}, other=0)")
    names = Tile("rows", "columns", columns, "row_mask", "column_mask", "acc", across)
    emitter = Emitter(text, names, lambda n: f"p{n.op.index}")
    for i, access in enumerate(accesses):
        emitter.store(access, f"o{i}")
    given = [f"p{i}" for i in range(len(sources))] + [f"o{i}" for i in range(len(roots))] + ["a", *text.numbers]
    kernel = module(f"{IMPORTS}\n\n@triton.jit\ndef kernel({', '.join(given)}):\n{text}\n").kernel
    results = [torch.full(r.shape, 113).to(r.dtype.to_torch()) for r in roots]
    memory = [in_memory(t) for t in (*sources, *results, acc if acc is not None else torch.empty(1))]
    with np.errstate(all="ignore"):
        kernel[(-(-rows // tile[0]), -(-columns // tile[1]))](*memory, *scalars(text.numbers))
    return results


def run_expression(root: Node, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """One expression over params."""
    assert not any(isinstance(n.op, Acc) for n in toposort((root,)))
    assert all(n.op.index < len(sources) for n in toposort((root,)) if isinstance(n.op, Param))
    return run_expressions([root], sources)[0]
