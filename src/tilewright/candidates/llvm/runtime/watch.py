"""A watch over memory that kernels read at addresses taken earlier: it may lie elsewhere by now.

torch moves a tensor's memory under all that share it: `share_memory_()`, a queue of torch.multiprocessing, `resize_`. Asking
many tensors for their addresses from Python takes as long as a small product. Machine code asks libtorch's C interface
(torch/csrc/inductor/aoti_torch/c/shim.h), whose handle of a tensor is the address of a pointer to its `TensorImpl`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache

import torch

from tilewright.candidates.llvm.expressions.text import Function, Module
from tilewright.candidates.llvm.runtime import engine
from tilewright.ir.state import end_bytes

NAME = "moved"
ASKED = ("aoti_torch_get_data_ptr", "aoti_torch_get_storage_size")
COUNT, DATA, SIZE, TENSORS = range(4)  # the table: how many, the functions that are asked, then each tensor
IMPL, ADDRESS, LEAST, NUMBERS = range(4)  # a tensor: its TensorImpl, where it was, bytes that its storage must have


def watch(tensors: Sequence[torch.Tensor], code: engine.Code | None) -> Callable[[], object]:
    """A function that tells whether the memory of a tensor no longer lies where it does now, or has become too small for it.

    Args:
        tensors: strided ones with data, held as long as the function lives.
        code: a module with what `write_moved` writes; without one Python compares.
    """
    found = [(t.data_ptr(), end_bytes(t)) for t in tensors]
    asked = _asked()
    if code is not None and asked is not None and code.address(NAME):
        each = [number for t, place in zip(tensors, found, strict=True) for number in (t._cdata, *place)]  # pyright: ignore[reportPrivateUsage]
        table = struct.pack(f"={TENSORS + len(each)}q", len(tensors), *asked, *each)
        moved = code.bound(engine.METH_NOARGS, (table, tuple(tensors)), NAME)
        if not moved():  # else this torch answers otherwise
            return moved
    kept = [*zip(tensors, found, strict=True)]
    return lambda: any(t.data_ptr() != at or t.untyped_storage().nbytes() < end for t, (at, end) in kept)


@cache
def _asked() -> tuple[int, ...] | None:
    """Addresses of the functions of `ASKED`; None where this build of torch has them elsewhere."""
    try:
        library = ctypes.CDLL("libtorch_cpu.so")  # which torch has loaded
        return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in ASKED)
    except (OSError, AttributeError):
        return None


def write_moved(module: Module) -> None:
    """Write moved(self, nothing): 1 where a tensor of `self`'s table lies elsewhere or its storage is too small, else 0."""
    f = Function(module, NAME, [("ptr", "self"), ("ptr", "nothing")], "ptr", public=True)
    table = f.intrinsic(
        "PyBytes_AsString", "ptr", ("ptr", f.intrinsic("PyTuple_GetItem", "ptr", ("ptr", "%self"), ("i64", "0")))
    )
    count, data, size = (f.load("i64", f.at(table, 8 * i)) for i in range(TENSORS))
    data, size = (f.v(f"inttoptr i64 {address} to ptr") for address in (data, size))
    answer, wrong = f.alloca(8), f.alloca(8)
    f.store("i64", "0", wrong, 8)

    def differs(how: str, function: str, tensor: str, wanted: int) -> str:
        """An i1: the function fails, or what it gives compares so with a number of the tensor."""
        f.store("i64", "0", answer, 8)
        failed = f.v(f"icmp ne i32 {f.v(f'call i32 {function}(ptr {tensor}, ptr {answer})')}, 0")
        other = f.compare(how, f.load("i64", answer, 8), f.load("i64", f.at(tensor, 8 * wanted)))
        return f.v(f"or i1 {failed}, {other}")

    with f.loop(0, count) as loop:
        tensor = f.at(table, f.add(f.mul(loop.index, 8 * NUMBERS), 8 * TENSORS))
        with f.when(f.v(f"or i1 {differs('ne', data, tensor, ADDRESS)}, {differs('slt', size, tensor, LEAST)}")):
            f.store("i64", "1", wrong, 8)
    f.finish(f"ptr {f.intrinsic('PyLong_FromLong', 'ptr', ('i64', f.load('i64', wrong, 8)))}")
