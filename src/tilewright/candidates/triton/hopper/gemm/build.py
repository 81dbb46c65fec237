"""Machine code of Hopper kernels: types of their arguments, and what is rewritten in their PTX."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.hopper.gemm.epilogue import Program
from tilewright.candidates.triton.hopper.gemm.form import Form
from tilewright.candidates.triton.hopper.ptx import (
    Rewrite,
    narrowed,
    paired,
    rewriting,
    split,
    unsigned,
    widest_products,
)
from tilewright.candidates.triton.runtime import module
from tilewright.dtype import U8, DType

TMA_TYPES = {"bf16": "bf16", "f16": "fp16", "s8": "i8", "u8": "i8", "f8e4m3fn": "fp8e4nv", "f8e5m2": "fp8e5"}


def signature(form: Form, names: Iterable[str], types: tuple[DType, ...]) -> dict[str, str]:
    """Triton's type of each argument of a form's kernel."""
    found: dict[str, str] = {}
    config = form.config
    for name in names:
        if name == "a_desc":
            found[name] = descriptor(TMA_TYPES[form.plan.lhs.dtype.name], form.plan.lhs.box(config.rows, config.tile_k))
        elif name == "b_desc":
            found[name] = descriptor(TMA_TYPES[form.plan.rhs.dtype.name], form.plan.rhs.box(config.unit, config.tile_k))
        elif form.coded and name in form.coded.descriptors:
            found[name] = descriptor("i32", form.coded.box(name, config.tile_m), plain=True)
        elif name.endswith("_desc"):
            out = form.outs[int(name[1:-5])]
            what = (out.access.root, out.view) if name[0] == "c" else out.fetched
            assert what is not None and what[1] is not None
            found[name] = descriptor(pointer_type(what[0].dtype)[1:], what[1].box)
        elif name == "partial":
            found[name] = "*i32" if config.integer else "*fp32"
        elif name == "arrived":
            found[name] = "*i32"
        elif name[1:].isdigit():
            at = int(name[1:])
            found[name] = pointer_type(types[at] if name[0] == "p" else form.outs[at].access.root.dtype)
        else:
            found[name] = "i32"
    return found


def descriptor(kind: str, box: Iterable[int], *, plain: bool = False) -> str:
    """Triton's type of an argument by which TMA moves boxes of an array; `plain`: rows follow one another in shared memory."""
    from triton.experimental.gluon import language as gl

    extents = list(box)
    element = gl.dtype(re.sub(r"^([iu])(?=\d)", lambda m: {"i": "int", "u": "uint"}[m[1]], kind))
    layout = gl.NVMMASharedLayout.get_default_for(extents, element)
    if plain:
        layout = gl.NVMMASharedLayout(0, element.primitive_bitwidth, len(extents))
    return f"tensordesc<{kind}{extents},{layout!r}>"


def compiled(form: Form, types: tuple[DType, ...], device: int = 0) -> module.Built:
    """A form's machine code; `types` are those of the gemm's sources. Once it has run it is loaded on one device."""
    program = Program(form)
    names = tuple(program.arguments)
    written = program.write()
    kinds = tuple((signature(form, names, types) | written.signature).items())
    kernel = _machine_code(written.text, kinds, form.chained, _Rewritten.of(form), device)
    return module.Built(kernel, tuple(written.numbers.values()), names)


@dataclass(frozen=True)
class _Rewritten:
    """What is rewritten in a form's PTX."""

    widest: bool
    columns: int | None
    lhs_unsigned: bool
    rhs_unsigned: bool
    paired: int | None
    split: int
    groups: int
    ring_bytes: tuple[int, int]

    @classmethod
    def of(cls, form: Form) -> _Rewritten:
        config = form.config
        widest = config.integer and config.shape_n == 256
        columns = config.tile_n if config.tile_n < config.shape_n else None
        pair = (0 if form.coded else 1) if config.paired else None  # descriptor of the right operand
        rings = config.num_stages * config.tile_m * 128, config.num_stages * config.tile_n * 128
        return cls(
            widest, columns, form.plan.lhs.dtype is U8, form.plan.rhs.dtype is U8, pair, config.split, config.groups, rings
        )

    def rewrites(self) -> list[Rewrite]:
        """In order."""
        found: list[Rewrite] = [widest_products] if self.widest else []
        if self.columns is not None:
            found.append(partial(narrowed, columns=self.columns))
        if self.lhs_unsigned or self.rhs_unsigned:
            found.append(partial(unsigned, lhs=self.lhs_unsigned, rhs=self.rhs_unsigned))
        if self.split > 1:
            found.append(partial(split, blocks=self.split, groups=self.groups, ring_bytes=self.ring_bytes))
        return found if self.paired is None else [*found, partial(paired, right=self.paired)]


@lru_cache(maxsize=512)
def _machine_code(text: str, kinds: tuple[tuple[str, str], ...], chained: bool, rewritten: _Rewritten, device: int) -> Any:
    """Triton's compiled kernel of a text, which loads itself once, on the device that is then the current one."""
    with rewriting(*rewritten.rewrites()):
        return module.compiled(
            module.module(text).kernel,
            dict(kinds),
            module.Arch("cuda", 90, 32),
            num_warps=4,
            launch_pdl=chained,
            enable_fp_fusion=False,
        )
