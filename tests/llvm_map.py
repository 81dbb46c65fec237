"""Arrays through a generated function: what `emit` writes for one vector, done to every element."""

from collections.abc import Callable, Sequence

import torch

from tilewright.candidates.llvm import _engine as engine
from tilewright.candidates.llvm._text import Function, Module, vec

LANES = 16
Emit = Callable[[Function, list[str]], str]


def map_arrays(
    emit: Emit, arrays: Sequence[torch.Tensor], elements: Sequence[str], result: str, out: torch.dtype, lanes: int = LANES
) -> torch.Tensor:
    """`emit` on vectors of every array, whose LLVM types are `elements`; its value is of type `result`, kept as `out`."""
    count = arrays[0].numel()
    padded = -(-count // lanes) * lanes
    held = [torch.zeros(padded, dtype=a.dtype) for a in arrays]
    for room, a in zip(held, arrays, strict=True):
        room[:count] = a.flatten()
    filled = torch.empty(padded, dtype=out)
    engine.function(_text(emit, elements, result, lanes))(*(t.data_ptr() for t in (*held, filled)), padded)
    return filled[:count].reshape(arrays[0].shape)


def _text(emit: Emit, elements: Sequence[str], result: str, lanes: int) -> str:
    module = Module()
    f = Function(module, "python", [("ptr", "self"), ("ptr", "args"), ("i64", "count")], "ptr", public=True)
    given = [f.load("ptr", f.at("%args", 8 * i), 8) for i in range(len(elements) + 2)]
    pointers = [f.intrinsic("PyLong_AsVoidPtr", "ptr", ("ptr", p)) for p in given[:-1]]
    total = f.intrinsic("PyLong_AsLong", "i64", ("ptr", given[-1]))
    with f.loop(0, total, lanes) as loop:

        def at(pointer: str, element: str) -> str:
            return f.v(f"getelementptr {element}, ptr {pointer}, i64 {loop.index}")

        values = [f.load(vec(lanes, e), at(p, e)) for p, e in zip(pointers, elements, strict=False)]
        f.store(vec(lanes, result), emit(f, values), at(pointers[-1], result))
    module.declarations["_Py_NoneStruct"] = "@_Py_NoneStruct = external global i8"
    f.intrinsic("Py_IncRef", "void", ("ptr", "@_Py_NoneStruct"))
    f.finish("ptr @_Py_NoneStruct")
    return module.text(*engine.host())
