"""Calls of kernels from Python: the entries of their modules, and one function in machine code that does what a call needs.

A small product is over in less time than the interpreter takes for ten operations. This function asks the sources for their
addresses, has the results made, takes scratch memory and runs the kernel without any of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, c_int64
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from tilewright.candidates.llvm.expressions.text import Function, Int, Module
from tilewright.candidates.llvm.gemm.nest import CACHE_LINE, rounded
from tilewright.candidates.llvm.runtime import engine
from tilewright.candidates.llvm.runtime.scratch import give, maker, take
from tilewright.errors import InputError
from tilewright.ir.artefact import Kind
from tilewright.ir.types import TensorType
from tilewright.schedule.recipe import Called, Parts, describe

MOST_POINTERS = 10_000
COUNTERS = 4 * CACHE_LINE  # behind the pointers that a kernel is given
ON_STACK = 1 << 15  # bytes of scratch that are not worth a pool
# What the function is bound to: a table of numbers, these, what makes each result, what is kept alive.
USED = (torch.Tensor.contiguous, torch.Tensor.data_ptr, torch.get_num_threads, take, give)
CONTIGUOUS, DATA_PTR, THREADS, TAKE, GIVE, MAKERS = range(1, 7)
# The table: these numbers, then the indices of the sources that are read.
KERNEL, POINTERS, READ, RESULTS, FIRST, ALONE, EACH, ONE, STACK, PACKED, GIVEN, INDICES = range(12)


@dataclass(frozen=True)
class Call:
    """The needs of a call of one kernel.

    Attributes:
        kernel: its function, from `engine.function`.
        pointers: number of pointers it is given: sources, results, what is given if anything is, scratch, packed right operand.
        read: sources whose addresses it needs.
        first: index of the first result's pointer.
        results: types of the results.
        alone: bytes of scratch for one thread.
        each: bytes of scratch for each further thread.
        one: it is never worth a second thread.
        packed: the packed right operand, u8, from the first cache line in it on; None for a kernel that has none.
        packed_bytes: its bytes.
        given: extents that its code leaves open, and the problem's numbers (`Module.given`).
    """

    kernel: Any
    pointers: int
    read: Sequence[int]
    first: int
    results: Sequence[TensorType]
    alone: int
    each: int
    one: bool
    packed: torch.Tensor | None = None
    packed_bytes: int = 0
    given: tuple[int, ...] = ()

    def recipe(self, parts: Parts) -> Called:
        """The call as data, its code and packed operand left with `parts`."""
        packed = ""
        if self.packed is not None:
            at = aligned(self.packed) - self.packed.data_ptr()
            packed = parts.bytes(self.packed[at : at + self.packed_bytes])
        results = tuple(map(Kind.of, self.results))
        code = parts.code(self.kernel.__module__.object)
        shape = code, self.pointers, tuple(self.read), self.first, results, self.alone, self.each, self.one
        return Called(*shape, packed, self.packed_bytes, self.given)

    @cached_property
    def table(self) -> Any:
        """What is given, in memory, i64, for as long as the kernel may be called with their address."""
        return (c_int64 * len(self.given))(*self.given)


def restored(recipe: Called, code: Mapping[str, engine.Code], memory: Callable[[str], torch.Tensor], sources: int) -> Call:
    """A call from its recipe, of a kernel with so many sources; `code` holds the mapped objects, `memory` gives packed weights.

    Raises:
        InputError: its numbers do not fit together.
    """
    results = tuple(kind.type for kind in recipe.results)
    last = recipe.pointers - 2 - bool(recipe.given)  # behind the results
    fits = all(0 <= i < recipe.first for i in recipe.read) and sources <= recipe.first and recipe.first + len(results) <= last
    if not fits or not 0 <= recipe.pointers <= MOST_POINTERS or recipe.alone < 0 or recipe.each < 0:
        raise InputError("a saved call does not fit its step", hint="save the program again")
    if recipe.code not in code:
        raise InputError("the machine code of a saved call is missing", hint="save the program again")
    packed = memory(recipe.packed) if recipe.packed else None
    if packed is not None and packed.numel() != recipe.packed_bytes:
        raise InputError("the packed weight of a saved call has another size", hint="save the program again")
    shape = recipe.pointers, recipe.read, recipe.first, results, recipe.alone, recipe.each, recipe.one
    return Call(code[recipe.code].function(), *shape, packed, recipe.packed_bytes, recipe.given)


def aligned(t: torch.Tensor) -> int:
    """The address of the first cache line that begins in a tensor."""
    return -(-t.data_ptr() // 64) * 64


def bound(call: Call) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """A function from sources to results.

    Sources may have any strides. It raises what asking them for their addresses raises: of what is no tensor, TypeError.
    """
    stack = call.one and call.alone <= ON_STACK
    makers = [maker(t.shape, t.dtype.to_torch()) for t in call.results]
    packed = 0 if call.packed is None else aligned(call.packed)
    numbers = (
        call.kernel.__self__, call.pointers, len(call.read), len(makers), call.first, call.alone, call.each, call.one,
        stack, packed, addressof(call.table) if call.given else 0, *call.read,
    )  # fmt: skip
    table = struct.pack(f"={len(numbers)}q", *numbers)
    run = caller().bound(engine.METH_O, (table, *USED, *makers, (call.packed, call.kernel, call.table)))
    return describe(run, call.recipe)


_caller: engine.Code | None = None


def caller() -> engine.Code:
    """The function that `bound` binds, in this process: made when first asked for, if it was not read from a saved program."""
    global _caller
    if _caller is None:
        _caller = engine.loaded(_text())
    return _caller


def take_caller(code: engine.Code) -> None:
    """Use a saved program's function of this version in place of one that is still to be made."""
    global _caller
    _caller = _caller or code


@cache
def _text() -> str:
    """python(self, sources): see the names of `self`'s parts above."""
    module = Module()
    _release(module)
    f = Function(module, "python", [("ptr", "self"), ("ptr", "sources")], "ptr", public=True)

    def checked(value: str) -> str:
        """A new reference; without one, an exception has been raised."""
        name = f.fresh("made")
        f.do(f"br i1 {f.v(f'icmp eq ptr {value}, null')}, label %fail, label %{name}")
        f.label(name)
        return value

    def part(index: Int) -> str:
        return f.intrinsic("PyTuple_GetItem", "ptr", ("ptr", "%self"), ("i64", str(index)))

    def asked(what: str, of: str) -> str:
        return checked(f.intrinsic("PyObject_CallOneArg", "ptr", ("ptr", what), ("ptr", of)))

    def release(value: str) -> None:
        f.intrinsic("Py_DecRef", "void", ("ptr", value))

    def place_of(tensor: str, index: Int) -> None:
        """Store a tensor's address where the kernel reads it."""
        number = asked(data_ptr, tensor)
        f.store("ptr", f.intrinsic("PyLong_AsVoidPtr", "ptr", ("ptr", number)), f.at(d, f.mul(index, 8)), 8)
        release(number)

    table = f.intrinsic("PyBytes_AsString", "ptr", ("ptr", part(0)))
    numbers = [f.load("i64", f.at(table, 8 * i)) for i in range(INDICES)]
    counters = f.v(f"and i64 {f.add(f.mul(numbers[POINTERS], 8), CACHE_LINE - 1)}, -{CACHE_LINE}")
    d = f.dynamic_alloca(f.add(counters, COUNTERS))
    held = f.dynamic_alloca(f.mul(numbers[READ], 8))
    for pointers, count in ((d, numbers[POINTERS]), (held, numbers[READ])):
        with f.loop(0, count) as loop:
            f.store("ptr", "null", f.at(pointers, f.mul(loop.index, 8)), 8)
    results = checked(f.intrinsic("PyList_New", "ptr", ("i64", numbers[RESULTS])))
    contiguous, data_ptr = part(CONTIGUOUS), part(DATA_PTR)
    with f.loop(0, numbers[READ]) as loop:
        index = f.load("i64", f.at(table, f.mul(f.add(loop.index, INDICES), 8)))
        source = checked(f.intrinsic("PySequence_GetItem", "ptr", ("ptr", "%sources"), ("i64", index)))
        dense = f.intrinsic("PyObject_CallOneArg", "ptr", ("ptr", contiguous), ("ptr", source))
        release(source)
        f.store("ptr", checked(dense), f.at(held, f.mul(loop.index, 8)), 8)
        place_of(dense, index)
    with f.loop(0, numbers[RESULTS]) as loop:
        made = checked(f.intrinsic("PyObject_CallNoArgs", "ptr", ("ptr", part(f.add(loop.index, MAKERS)))))
        f.intrinsic("PyList_SetItem", "i32", ("ptr", results), ("i64", loop.index), ("ptr", made))
        place_of(made, f.add(loop.index, numbers[FIRST]))
    last = f.at(d, f.mul(numbers[POINTERS], 8))
    f.store("i64", numbers[PACKED], f.at(last, -8), 8)
    with f.when(f.compare("ne", numbers[GIVEN], 0)):
        f.store("i64", numbers[GIVEN], f.at(last, -24), 8)

    threads, memory = f.alloca(8), f.alloca(8)
    f.store("i64", "1", threads, 8)
    with f.when(f.compare("eq", numbers[ONE], 0)):
        number = checked(f.intrinsic("PyObject_CallNoArgs", "ptr", ("ptr", part(THREADS))))
        of_torch = f.intrinsic("PyLong_AsLong", "i64", ("ptr", number))
        f.store("i64", f.intrinsic("tilewright_team", "i64", ("i64", of_torch)), threads, 8)
        release(number)
    team, pooled = f.load("i64", threads, 8), f.compare("eq", numbers[STACK], 0)
    with f.when(pooled):
        size = f.add(numbers[ALONE], f.mul(numbers[EACH], f.sub(team, 1)))
        number = checked(f.intrinsic("PyLong_FromLong", "ptr", ("i64", str(size))))
        taken = f.intrinsic("PyObject_CallOneArg", "ptr", ("ptr", part(TAKE)), ("ptr", number))
        release(number)
        f.store("ptr", checked(taken), memory, 8)
        address = f.intrinsic("PyTuple_GetItem", "ptr", ("ptr", taken), ("i64", "0"))
        f.store("ptr", f.intrinsic("PyLong_AsVoidPtr", "ptr", ("ptr", address)), f.at(last, -16), 8)
    with f.when(f.v(f"xor i1 {pooled}, true")):
        f.store("ptr", f.dynamic_alloca(numbers[ALONE]), f.at(last, -16), 8)
    state = f.intrinsic("PyEval_SaveThread", "ptr")
    kernel = f.v(f"inttoptr i64 {numbers[KERNEL]} to ptr")
    f.do(f"call void {kernel}(ptr {d}, i64 {team}, i64 0)")
    f.intrinsic("PyEval_RestoreThread", "void", ("ptr", state))
    with f.when(pooled):
        taken = f.load("ptr", memory, 8)
        given = f.intrinsic("PyObject_CallOneArg", "ptr", ("ptr", part(GIVE)), ("ptr", taken))
        release(taken)
        release(checked(given))
    f.call("release", ("ptr", held), ("i64", numbers[READ]))
    f.do(f"ret ptr {results}")
    f.label("fail")
    f.call("release", ("ptr", held), ("i64", numbers[READ]))
    release(results)
    f.finish("ptr null")
    return module.text(*engine.host())


def _release(module: Module) -> None:
    """release(held, count): let go of references, of which any may be null."""
    f = Function(module, "release", [("ptr", "held"), ("i64", "count")])
    with f.loop(0, "%count") as loop:
        f.intrinsic("Py_DecRef", "void", ("ptr", f.load("ptr", f.at("%held", f.mul(loop.index, 8)), 8)))
    f.finish()


def write_entries(
    module: Module, pointers: int, counters: int, begin: Callable[[Function], str] = lambda f: "@worker", *, packs: bool = False
) -> None:
    """Write a kernel's entries into its module.

    run(arguments, threads, pack), for callers in machine code, sets the counters to zero, which follow the pointers at
    `arguments` a cache line each, and runs the function that `begin` gives on up to as many threads, each with `arguments` and
    its number. python(pointers…, threads) is the same, called by CPython as METH_FASTCALL; with `packs`, `pack` is its last
    argument.
    """
    counters_at = rounded(8 * pointers)
    f = Function(module, "run", [("ptr", "arguments"), ("i64", "threads"), ("i64", "pack")], public=True)
    for i in range(counters):
        f.store("i64", "0", f.at("%arguments", counters_at + CACHE_LINE * i), 8)
    worker = begin(f)
    alone = f.compare("eq", "%threads", 1)
    with f.when(alone):
        f.do(f"call void {worker}(ptr %arguments, i64 0)")
    with f.when(f.v(f"xor i1 {alone}, true")):
        f.intrinsic("tilewright_parallel", "void", ("ptr", worker), ("ptr", "%arguments"), ("i64", "%threads"))
    f.finish()

    f = Function(module, "python", [("ptr", "self"), ("ptr", "args"), ("i64", "count")], "ptr", public=True)
    d = f.alloca(counters_at + CACHE_LINE * counters)
    for i in range(pointers):
        value = f.intrinsic("PyLong_AsVoidPtr", "ptr", ("ptr", f.load("ptr", f.at("%args", 8 * i), 8)))
        f.store("ptr", value, f.at(d, 8 * i), 8)
    threads, pack = (
        f.intrinsic("PyLong_AsLong", "i64", ("ptr", f.load("ptr", f.at("%args", 8 * (pointers + i)), 8))) if i <= packs else "0"
        for i in (0, 1)
    )
    state = f.intrinsic("PyEval_SaveThread", "ptr")
    f.call("run", ("ptr", d), ("i64", threads), ("i64", pack))
    f.intrinsic("PyEval_RestoreThread", "void", ("ptr", state))
    f.finish_with_none()
