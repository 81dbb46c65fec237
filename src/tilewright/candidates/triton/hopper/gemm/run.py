"""Machine code of Hopper kernels (types of their arguments, what is rewritten in their PTX) and its calls from Python: TMA
descriptors of what a kernel reads and writes, made once an address."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.hopper.gemm.epilogue import Program
from tilewright.candidates.triton.hopper.gemm.form import Form, size
from tilewright.candidates.triton.hopper.gemm.plan import Matrix
from tilewright.candidates.triton.hopper.gemm.view import TmaView
from tilewright.candidates.triton.hopper.ptx import Rewrite, narrowed, paired, rewriting, split, unsigned, widest_products
from tilewright.candidates.triton.runtime import module
from tilewright.candidates.triton.runtime.launch import Counters, addresses, dense, maker, on
from tilewright.candidates.triton.runtime.module import Built, launcher
from tilewright.candidates.triton.runtime.versions import tensor_map
from tilewright.dtype import U8, DType
from tilewright.ir.graph import toposort
from tilewright.ir.ops import Dequantize, Param
from tilewright.schedule.candidate import Runner
from tilewright.schedule.packed import packed_once

MOST_KEPT = 256  # argument lists by address; a program's addresses repeat
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


def compiled(form: Form, types: tuple[DType, ...], device: int = 0) -> Built:
    """A form's machine code; `types` are those of the gemm's sources. Once it has run it is loaded on one device."""
    program = Program(form)
    names = tuple(program.arguments)
    written = program.write()
    kinds = tuple((signature(form, names, types) | written.signature).items())
    kernel = _machine_code(written.text, kinds, form.chained, _Rewritten.of(form), device)
    return Built(kernel, tuple(written.numbers.values()), names)


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


class Tma:
    """The array behind one of a kernel's descriptors.

    Args:
        meta: what Triton says of the descriptor's boxes.
        shape, strides: in elements, outer first.
        offset_bytes: of its first element from the address.
    """

    def __init__(self, meta: Mapping[str, Any], shape: Sequence[int], strides: Sequence[int], offset_bytes: int) -> None:
        self._meta, self._shape, self._strides, self._offset = meta, list(shape), list(strides), offset_bytes

    def at(self, address: int) -> list[object]:
        """The kernel's arguments for the array at an address."""
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
        from triton.runtime import driver

        m = self._meta
        made = tensor_map(driver.active.utils)(  # pyright: ignore[reportAttributeAccessIssue]
            address + self._offset,
            m["swizzle"],
            m["elem_size"],
            TMA_DTYPE_DEVICE_TO_HOST[m["elem_type"]],
            m["block_size"],
            self._shape,
            self._strides,
            0,
        )
        return [made, *self._shape, *self._strides]


def of_matrix(matrix: Matrix, meta: Mapping[str, Any]) -> Tma:
    """An operand as the kernel's boxes cut it."""
    batch, rows, k = matrix.extents
    over, down, along = matrix.strides
    if matrix.flat and over:
        rows *= batch
    shape, strides = ([rows, k], [down, 1]) if matrix.along_k else ([k, rows], [along, 1])
    if matrix.batched:
        shape, strides = [batch, *shape], [over, *strides]
    return Tma(meta, shape, strides, matrix.offset * size(matrix.dtype))


def of_view(view: TmaView, bytes_each: int, meta: Mapping[str, Any]) -> Tma:
    """A result as the kernel's boxes cut it."""
    return Tma(meta, view.shape, view.strides, view.offset * bytes_each)


def runner(form: Form, built: Built, weights: Mapping[int, torch.Tensor]) -> Runner:
    """What runs a form's kernel."""
    plan, blocks, shared_tiles = form.plan, form.point.blocks, form.point.shared_tiles
    device = torch.device(plan.target.device)
    index, kernel = device.index or 0, built.kernel
    start = launcher(kernel, (blocks,), index)
    metas = kernel.metadata.tensordesc_meta
    operands = [*([] if form.coded else [plan.lhs]), plan.rhs]
    arrays: list[Tma] = [of_matrix(m, meta) for m, meta in zip(operands, metas, strict=False)]
    packed = [] if form.coded is None else [weights[form.coded.first + i] for i in range(len(form.coded.descriptors))]
    for i, t in enumerate(packed):
        assert form.coded is not None
        cut = form.coded.cut(form.coded.descriptors[i], t)
        arrays.append(Tma(metas[len(arrays)], cut.shape, cut.stride(), 0))
    first = len(arrays)
    views = [(i, o) for i, o in enumerate(form.outs) if o.view is not None]
    for meta, (_, o) in zip(metas[first:], views, strict=False):
        assert o.view is not None
        arrays.append(of_view(o.view, size(o.access.root.dtype), meta))
    fetched = [o.fetched for o in form.outs if o.fetched is not None]
    for meta, (leaf, view) in zip(metas[first + len(views) :], fetched, strict=True):
        arrays.append(of_view(view, size(leaf.dtype), meta))
    read = [leaf.op.index for leaf, _ in fetched if isinstance(leaf.op, Param)]
    read += [int(n[1:]) for n in built.names if n[0] == "p" and n[1:].isdigit()]
    plain = [i for i, o in enumerate(form.outs) if o.view is None]
    make = maker(plan.problem.outputs, str(device))
    tiles = form.config.tiles(plan.batch, plan.M, plan.N)
    extents = [plan.batch, plan.M, plan.N, plan.K, *([tiles - shared_tiles] if form.config.streamed else []), *built.numbers]
    arrivals = max(shared_tiles, 1) * form.config.groups * (2 if form.config.paired else 1)
    counters = Counters(arrivals, device) if form.config.streamed else None
    known: dict[tuple[int, ...], list[object]] = {}
    partial = 2 * blocks * form.config.tile_m * form.config.shape_n

    # The kernel's arguments: what it multiplies, results by TMA, what else is read, other results, room for parts of sums.
    fixed = [0] * (first + len(views) + len(read) + len(plain))
    by_tma, by_pointer = range(first, first + len(views)), range(len(fixed) - len(plain), len(fixed))
    written = list(zip((*by_tma, *by_pointer), (*(i for i, _ in views), *plain), strict=True))
    constant = {at: t for at, m in enumerate(operands) if (t := _held(m, weights)) is not None}
    constant |= dict(enumerate(packed, len(operands)))
    constant |= {at: dense(weights[i]) for at, i in enumerate(read, by_tma.stop) if i in weights}
    for at, t in constant.items():
        fixed[at] = t.data_ptr()
    laid_out = [(at, m) for at, m in enumerate(operands) if m.source is None and at not in constant]
    given = [(at, m.source) for at, m in enumerate(operands) if m.source is not None and at not in constant]
    given += [(at, i) for at, i in enumerate(read, by_tma.stop) if at not in constant]

    def run(sources: Sequence[torch.Tensor], _kept: object = constant) -> list[torch.Tensor]:  # by its address alone
        found, copies = addresses(fixed, given, sources)
        for at, matrix in laid_out:
            copies.append(matrix.copied(sources))
            found[at] = copies[-1].data_ptr()
        out = make()
        for at, i in written:
            found[at] = out[i].data_ptr()
        if counters is not None:
            room = torch.empty(partial, dtype=plan.problem.acc.dtype.to_torch(), device=device), counters.take()
            found += [t.data_ptr() for t in room]
        key = tuple(found)
        arguments = known.get(key)
        if arguments is None:
            if len(known) >= MOST_KEPT:
                known.clear()
            arguments = []
            for array, address in zip(arrays, found, strict=False):
                arguments += array.at(address)
            arguments += [*found[len(arrays) :], *extents]
            known[key] = arguments
        start(*arguments)
        return out

    return on(index, run)


def _held(matrix: Matrix, weights: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """A constant operand, copied once where it has to be or does not lie densely."""
    if not matrix.constant:
        return None
    if matrix.source is not None:
        return dense(weights[matrix.source])
    nodes = toposort((matrix.root,))
    if not any(isinstance(n.op, Dequantize) for n in nodes):
        return matrix.copied(weights)
    read = [weights[n.op.index] for n in nodes if isinstance(n.op, Param)]  # codes, which may be dropped and unpacked again
    return packed_once(read, matrix, lambda: matrix.copied(weights))
