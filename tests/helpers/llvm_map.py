"""Arrays through generated functions: what is written for one vector, done to every element."""

import math
from collections.abc import Callable, Sequence

import torch

from tilewright.candidates.llvm.expressions.text import Function, Module, vec
from tilewright.candidates.llvm.expressions.vector import Columns, Vectors, check
from tilewright.candidates.llvm.runtime import engine
from tilewright.ir.axes import axes_of
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param
from tilewright.lowering.access import Access, of_operand

LANES = 16
Emit = Callable[[Function, list[str]], str]


def begin(pointers: int) -> tuple[Module, Function, list[str]]:
    """The entry that Python calls with so many addresses."""
    module = Module()
    f = Function(module, "python", [("ptr", "self"), ("ptr", "args"), ("i64", "count")], "ptr", public=True)
    given = [f.load("ptr", f.at("%args", 8 * i), 8) for i in range(pointers)]
    return module, f, [f.intrinsic("PyLong_AsVoidPtr", "ptr", ("ptr", p)) for p in given]


def end(module: Module, f: Function, processor: tuple[str, str] | None = None) -> str:
    module.declarations["_Py_NoneStruct"] = "@_Py_NoneStruct = external global i8"
    f.intrinsic("Py_IncRef", "void", ("ptr", "@_Py_NoneStruct"))
    f.finish("ptr @_Py_NoneStruct")
    return module.text(*(processor or engine.host()))


def map_arrays(
    emit: Emit, arrays: Sequence[torch.Tensor], elements: Sequence[str], result: str, out: torch.dtype, lanes: int = LANES
) -> torch.Tensor:
    """`emit` on vectors of every array, whose LLVM types are `elements`; its value is of type `result`, kept as `out`."""
    count = arrays[0].numel()
    padded = -(-count // lanes) * lanes
    held = [torch.zeros(padded, dtype=a.dtype) for a in arrays]
    for memory, a in zip(held, arrays, strict=True):
        memory[:count] = a.flatten()
    filled = torch.empty(padded, dtype=out)
    module, f, pointers = begin(len(arrays) + 1)
    with f.loop(0, padded, lanes) as loop:

        def at(pointer: str, element: str) -> str:
            return f.v(f"getelementptr {element}, ptr {pointer}, i64 {loop.index}")

        values = [f.load(vec(lanes, e), at(p, e)) for p, e in zip(pointers, elements, strict=False)]
        f.store(vec(lanes, result), emit(f, values), at(pointers[-1], result))
    engine.function(end(module, f))(*(t.data_ptr() for t in (*held, filled)))
    return filled[:count].reshape(arrays[0].shape)


def run_expression(
    root: Node,
    sources: Sequence[torch.Tensor],
    acc: torch.Tensor | None = None,
    lanes: int = LANES,
    access: Access | None = None,
) -> torch.Tensor:
    """An expression over params (and an accumulator of f32 or s32), evaluated as kernels do: by rows and blocks of columns.

    Raises:
        Unsupported: it has no vectors.
    """
    check([root])
    access = access or of_operand(root, columns_last=True)
    rows, columns = math.prod(a.extent for a in axes_of((access.rows,))), access.columns_extent
    held = [s.contiguous() for s in sources]
    filled = torch.full(root.shape, 113).to(root.dtype.to_torch())
    width = 0 if acc is None else acc.shape[-1]
    held += [] if acc is None else [acc.contiguous()]
    module, f, pointers = begin(len(held) + 1)
    leaves = {n: pointers[n.op.index] for n in toposort((root,)) if isinstance(n.op, Param)}
    of_acc = vec(lanes, "float" if acc is not None and acc.is_floating_point() else "i32")
    for first in range(0, columns, lanes):
        mask = f.first_lanes(lanes, columns - first) if columns - first < lanes else None
        block = Columns(first, (access.first + first) % lanes == 0 and access.first % lanes == 0, mask)
        vectors = Vectors(f, access, lanes, block, leaves.__getitem__)
        with f.loop(0, rows) as loop:
            given = None
            if acc is not None:
                place = f.mul(f.add(f.mul(loop.index, width), access.first + first), 4)
                given = f.load_where(of_acc, f.at(pointers[-2], place), mask)
            vectors.store(loop.index, vectors.row(loop.index, given), pointers[-1])
    engine.function(end(module, f))(*(t.data_ptr() for t in (*held, filled)))
    return filled
