"""Machine code of the gemm of few rows (`_kernel.py`) with what a program does to its sums."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import cast

from tilewright.candidates.triton.expressions.emit import Tile
from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.expressions.text import Text, Written
from tilewright.candidates.triton.hopper.fast_math import FastMath
from tilewright.candidates.triton.hopper.ptx import EDITION, clustered, rewriting
from tilewright.candidates.triton.hopper.w4.form import Form
from tilewright.candidates.triton.runtime import module
from tilewright.dtype import DType
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param

KERNEL = "tilewright.candidates.triton.hopper.w4._kernel.gemm"
STATEMENTS = sha256(Path(__file__).with_name("_kernel.py").read_bytes()).hexdigest()[:12]  # which Triton's cache does not know


def written(form: Form) -> tuple[Written, list[str]]:
    """A form's module, and names of its kernel's arguments but for numbers."""
    plan = form.plan
    leaves = {n for a in plan.stores for n in toposort((a.root,)) if isinstance(n.op, Param)} - {plan.second}
    sides = sorted({_pointer(n) for n in leaves}, key=lambda n: int(n[1:]))
    words = ["codes", "scales", *(["zeros"] if plan.weights.zero is not None else [])]
    pointers = [*sides, *(f"o{i}" for i in range(len(plan.stores)))]
    t = Text("gl")
    row_mask = t.v(f"rows < {plan.rows}") if form.columns != plan.rows else None
    column_mask = t.v(f"columns < {plan.outs}") if plan.outs % (form.point.out_tile // plan.halves) else None
    near = {} if plan.second is None else {plan.second: "second"}
    tile = Tile("rows", "columns", plan.outs, row_mask, column_mask, "acc", across=True, near=near)
    for i, access in enumerate(plan.stores):
        FastMath(t, tile, _pointer, {}).store(access, f"o{i}")
    store = ("acc", "second", "rows", "columns", "side"), t
    given = ["x", f"({', '.join(words)})"]
    note = f"statements of {STATEMENTS}, rewritten by {EDITION}"
    made = module.instance(KERNEL, form.config, given, pointers, {"store": store}, t.numbers, note=note)
    return made, ["x", *words, *pointers]


def _pointer(leaf: Node) -> str:
    """What the kernel calls the memory of a source."""
    return f"p{cast('Param', leaf.op).index}"


def compiled(form: Form, types: tuple[DType, ...], device: int = 0) -> module.Built:
    """A form's machine code; `types` are those of the gemm's sources. Once it has run it is loaded on one device."""
    text, names = written(form)
    kinds = dict.fromkeys(names, "*i32") | {"x": pointer_type(form.plan.operand)}
    kinds |= {n: pointer_type(types[int(n[1:])]) for n in names if n[0] == "p"}
    kinds |= {f"o{i}": pointer_type(a.root.dtype) for i, a in enumerate(form.plan.stores)}
    point = form.point
    with rewriting(*([partial(clustered, size=point.cluster)] if point.cluster > 1 else [])):
        built = module.build(
            text,
            "kernel",
            kinds,
            module.Arch("cuda", 90, 32),
            device,
            num_warps=point.warps,
            launch_pdl=True,
            maxnreg=point.registers,
            enable_fp_fusion=False,
        )
    return replace(built, names=tuple(names))
