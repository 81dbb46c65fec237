"""Calls of kernels from Python: the entries of their modules, and one function in machine code that does what calls need.

A small product is over in less time than the interpreter takes for ten operations. This function asks the sources for their
addresses, has the results made, takes scratch memory and runs the kernel without any of them. It runs a *chain* of kernels as
well, of which each may read what those before it wrote: such values lie in one block of memory, and Python's lock is let go of
once for all.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from ctypes import addressof, c_int64
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tilewright.candidates.llvm.expressions.text import Function, Int, Module
from tilewright.candidates.llvm.gemm.nest import CACHE_LINE, rounded
from tilewright.candidates.llvm.runtime import engine
from tilewright.candidates.llvm.runtime.scratch import give, maker, take
from tilewright.candidates.llvm.runtime.watch import write_moved
from tilewright.errors import InputError
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import Runner
from tilewright.schedule.recipe import Called, CallShape, Checked, Parts, describe

MOST_POINTERS = 10_000
COUNTERS = 4 * CACHE_LINE  # behind the pointers that a kernel is given
ON_STACK = 1 << 15  # bytes of scratch that are not worth a pool
# What the function is bound to: a table of numbers, these, what says which index was out of range, what makes each result, what
# is kept alive.
USED = (torch.Tensor.contiguous, torch.Tensor.data_ptr, torch.get_num_threads, take, give)
CONTIGUOUS, DATA_PTR, THREADS, TAKE, GIVE, MISSES, MAKERS = range(1, 8)
# The table: these numbers; places of the given values; offsets of the values between; fixed addresses; then each link.
LINKS, GIVEN, RESULTS, BETWEEN, FIXED, POINTERS, BLOCK, ALONE, EACH, ONE, STACK, TEAM, PLACES = range(13)
KERNEL, ALWAYS_ONE, MISS, COUNT, INDICES = range(5)  # a link: these numbers, then which address each of its pointers is
# Addresses: none, scratch memory, the word in which a kernel says that an index was out of range; given values, results, values
# between, fixed ones.
NULL, SCRATCH, MISSED, FIRST_VALUE = range(4)


@dataclass(frozen=True)
class Call:
    """The needs of a call of one kernel.

    Attributes:
        kernel: its function, from `engine.function`.
        shape: the numbers.
        packed: the packed right operand, u8, from the first cache line in it on; None for a kernel that has none.
        missed: says of sources which index among them was out of range, as an error; None for a kernel that picks by none.
    """

    kernel: Any
    shape: CallShape
    packed: torch.Tensor | None = None
    missed: Callable[[Sequence[torch.Tensor]], object] | None = None

    def recipe(self, parts: Parts) -> Called | Checked:
        """The call as data, its code and packed operand left with `parts`."""
        called = self.called(parts)
        return called if self.missed is None else Checked(called)

    def called(self, parts: Parts) -> Called:
        """The call itself as data, whoever says what went wrong in it."""
        packed = ""
        if self.packed is not None:
            at = aligned(self.packed) - self.packed.data_ptr()
            packed = parts.bytes(self.packed[at : at + self.shape.packed_bytes])
        numbers = {name: getattr(self.shape, name) for name in CallShape.__struct_fields__}
        return Called(**numbers, code=parts.code(self.kernel.__module__.object), packed=packed)

    @property
    def results(self) -> tuple[TensorType, ...]:
        """Types of the results."""
        return tuple(kind.type for kind in self.shape.results)

    @cached_property
    def table(self) -> Any:
        """The numbers that calls give beside tensors, as i64 in memory that lives as long as this call."""
        return (c_int64 * len(self.shape.given))(*self.shape.given)


def restored(recipe: Called, code: Mapping[str, engine.Code], memory: Callable[[str], torch.Tensor], sources: int) -> Call:
    """A call from its recipe, of a kernel with so many sources; `code` holds the mapped objects, `memory` gives packed weights.

    Raises:
        InputError: its numbers do not fit together.
    """
    last = recipe.pointers - 2 - bool(recipe.given)  # behind the results
    fits = (
        all(0 <= i < recipe.first for i in recipe.read)
        and sources <= recipe.first
        and recipe.first + len(recipe.results) <= last
    )
    if not fits or not 0 <= recipe.pointers <= MOST_POINTERS or recipe.alone < 0 or recipe.each < 0:
        raise InputError("a saved call does not fit its step", hint="save the program again")
    if recipe.code not in code:
        raise InputError("the machine code of a saved call is missing", hint="save the program again")
    packed = memory(recipe.packed) if recipe.packed else None
    if packed is not None and packed.numel() != recipe.packed_bytes:
        raise InputError("the packed weight of a saved call has another size", hint="save the program again")
    return Call(code[recipe.code].function(), recipe, packed)


def aligned(t: torch.Tensor) -> int:
    """The address of the first cache line that begins in a tensor."""
    return rounded(t.data_ptr())


@dataclass(frozen=True)
class Link:
    """A call of a chain.

    Attributes:
        call: the call.
        sources: number of the value that each source which the kernel reads is.
        results: numbers of the values that its results are.
        missed: what says of the chain's given values which index was out of range, as an error.
    """

    call: Call
    sources: Mapping[int, int]
    results: Sequence[int]
    missed: Callable[[Sequence[torch.Tensor]], object] | None = None


_bound: WeakKeyDictionary[Runner, Call] = WeakKeyDictionary()


def call_of(runner: Runner) -> Call | None:
    """The call that a runner is bound to; None of one that does anything else."""
    return _bound.get(runner)


def bound(call: Call) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """A function from sources to results.

    Sources may have any strides. It raises what asking them for their addresses raises: of what is no tensor, TypeError; and
    what `missed` does.
    """
    first = call.shape.first
    results = range(first, first + len(call.shape.results))
    run = chained([Link(call, {i: i for i in call.shape.read}, results, call.missed)], range(first), {}, results)
    _bound[run] = call
    return describe(run, call.recipe)


def chained(
    links: Sequence[Link], given: Sequence[int], fixed: Mapping[int, torch.Tensor], wanted: Sequence[int], threads: int = 0
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """A function that runs calls one after the other, from values that it is given to those that are wanted.

    Args:
        links: the calls, in order.
        given: numbers of the values that it is given, which may have any strides.
        fixed: dense values that are the same in each call, and lie where they do now.
        wanted: numbers of the results that it gives. Others end with the call.
        threads: threads for each call; 0 for as many as the calling thread may use.
    """
    shapes = [link.call.shape for link in links]
    made = {
        v: kind.type
        for link, shape in zip(links, shapes, strict=True)
        for v, kind in zip(link.results, shape.results, strict=True)
    }
    read = {v for link in links for v in link.sources.values()}
    places = [i for i, v in enumerate(given) if v in read and v not in fixed]
    offsets, block_bytes = _laid_out(links, {v: t for v, t in made.items() if v not in wanted})
    values = [*(given[i] for i in places), *wanted, *offsets]
    index = {v: FIRST_VALUE + i for i, v in enumerate(values)}
    addresses = list[int]()

    def at(address: int) -> int:
        addresses.append(address)
        return FIRST_VALUE + len(values) + len(addresses) - 1

    for v in read - index.keys():
        index[v] = at(fixed[v].data_ptr())
    misses = list[Callable[[Sequence[torch.Tensor]], object]]()
    records = list[int]()
    for link, shape in zip(links, shapes, strict=True):
        pointers = [NULL] * shape.pointers
        for i, v in link.sources.items():
            pointers[i] = index[v]
        for i, v in enumerate(link.results, shape.first):
            pointers[i] = index[v]
        pointers[-2] = SCRATCH
        if shape.given:
            pointers[-3] = at(addressof(link.call.table))
        if link.call.packed is not None:
            pointers[-1] = at(aligned(link.call.packed))
        if link.missed is not None:
            pointers[-1] = MISSED
            misses.append(link.missed)
        miss = len(misses) if link.missed is not None else 0
        records += [link.call.kernel.__self__, shape.one, miss, len(pointers), *pointers]
    one = all(shape.one for shape in shapes)
    alone, each = max(shape.alone for shape in shapes), max(0 if shape.one else shape.each for shape in shapes)
    stack = one and block_bytes + alone <= ON_STACK
    numbers = (
        len(links), len(places), len(wanted), len(offsets), len(addresses), max(shape.pointers for shape in shapes),
        block_bytes, alone, each, one, stack, threads, *places, *offsets.values(), *addresses, *records,
    )  # fmt: skip
    table = struct.pack(f"={len(numbers)}q", *numbers)
    makers = [maker(made[v].shape, made[v].dtype.to_torch()) for v in wanted]
    kept = tuple((link.call.packed, link.call.kernel, link.call.table) for link in links), tuple(fixed.values())
    return caller().bound(engine.METH_O, (table, *USED, tuple(misses), *makers, kept))


def _laid_out(links: Sequence[Link], between: Mapping[int, TensorType]) -> tuple[dict[int, int], int]:
    """Offsets in bytes of values that calls write and later ones read, and the bytes of all: a value takes the first room that
    no other has which is still read when it is written."""
    last = {v: i for i, link in enumerate(links) for v in (*link.results, *link.sources.values())}
    found, size = dict[int, int](), 0
    live = list[tuple[int, int, int]]()  # where a value lies, where the next one may, the last call that touches it
    for i, link in enumerate(links):
        live = [room for room in live if room[2] >= i]
        for v in link.results:
            if v not in between:
                continue
            start, bytes_ = 0, rounded(prod(between[v].shape) * between[v].dtype.to_torch().itemsize)
            for first, end, _ in sorted(live):
                if first - start >= bytes_:
                    break
                start = max(start, end)
            live.append((start, start + bytes_, last[v]))
            found[v], size = start, max(size, start + bytes_)
    return found, size


_caller: engine.Code | None = None


def caller() -> engine.Code:
    """The functions that `bound` and `watch` bind, in this process: made when first asked for, if they were not read from a
    saved program."""
    global _caller
    if _caller is None:
        _caller = engine.loaded(_text())
    return _caller


def take_caller(code: engine.Code) -> None:
    """Use a saved program's functions of this version in place of those that are still to be made."""
    global _caller
    _caller = _caller or code


@cache
def _text() -> str:
    """python(self, sources): see the names of `self`'s parts above. And what `write_moved` writes."""
    module = Module()
    write_moved(module)
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
    numbers = [f.load("i64", f.at(table, 8 * i)) for i in range(PLACES)]
    given, count, between = numbers[GIVEN], numbers[RESULTS], numbers[BETWEEN]
    first_result = f.add(given, FIRST_VALUE)
    first_between = f.add(first_result, count)
    first_fixed = f.add(first_between, between)
    d = f.dynamic_alloca(f.mul(f.add(first_fixed, numbers[FIXED]), 8))  # the addresses
    counters = f.v(f"and i64 {f.add(f.mul(numbers[POINTERS], 8), CACHE_LINE - 1)}, -{CACHE_LINE}")
    arguments = f.dynamic_alloca(f.add(counters, COUNTERS))
    count_held = f.add(given, 1)  # given values, then the memory to work in
    held = f.dynamic_alloca(f.mul(count_held, 8))
    memory = f.at(held, f.mul(given, 8))
    with f.loop(0, count_held) as loop:
        f.store("ptr", "null", f.at(held, f.mul(loop.index, 8)), 8)
    results = checked(f.intrinsic("PyList_New", "ptr", ("i64", count)))
    contiguous, data_ptr = part(CONTIGUOUS), part(DATA_PTR)
    with f.loop(0, given) as loop:
        index = f.load("i64", f.at(table, f.mul(f.add(loop.index, PLACES), 8)))
        source = checked(f.intrinsic("PySequence_GetItem", "ptr", ("ptr", "%sources"), ("i64", index)))
        dense = f.intrinsic("PyObject_CallOneArg", "ptr", ("ptr", contiguous), ("ptr", source))
        release(source)
        f.store("ptr", checked(dense), f.at(held, f.mul(loop.index, 8)), 8)
        place_of(dense, f.add(loop.index, FIRST_VALUE))
    with f.loop(0, count) as loop:
        made = checked(f.intrinsic("PyObject_CallNoArgs", "ptr", ("ptr", part(f.add(loop.index, MAKERS)))))
        f.intrinsic("PyList_SetItem", "i32", ("ptr", results), ("i64", loop.index), ("ptr", made))
        place_of(made, f.add(loop.index, first_result))
    offsets = f.at(table, f.mul(f.add(given, PLACES), 8))
    fixed = f.at(offsets, f.mul(between, 8))
    with f.loop(0, numbers[FIXED]) as loop:
        address = f.load("i64", f.at(fixed, f.mul(loop.index, 8)))
        f.store("i64", address, f.at(d, f.mul(f.add(first_fixed, loop.index), 8)), 8)
    missed = f.alloca(8)
    f.store("ptr", "null", f.at(d, 8 * NULL), 8)
    f.store("ptr", missed, f.at(d, 8 * MISSED), 8)

    threads = f.alloca(8)
    f.store("i64", numbers[TEAM], threads, 8)
    unsaid = f.compare("eq", numbers[TEAM], 0)
    with f.when(f.v(f"and i1 {unsaid}, {f.compare('eq', numbers[ONE], 0)}")):
        number = checked(f.intrinsic("PyObject_CallNoArgs", "ptr", ("ptr", part(THREADS))))
        of_torch = f.intrinsic("PyLong_AsLong", "i64", ("ptr", number))
        f.store("i64", f.intrinsic("tilewright_team", "i64", ("i64", of_torch)), threads, 8)
        release(number)
    team, pooled = f.load("i64", threads, 8), f.compare("eq", numbers[STACK], 0)
    work = f.alloca(8)
    with f.when(pooled):
        size = f.add(f.add(numbers[BLOCK], numbers[ALONE]), f.mul(numbers[EACH], f.sub(team, 1)))
        number = checked(f.intrinsic("PyLong_FromLong", "ptr", ("i64", str(size))))
        taken = f.intrinsic("PyObject_CallOneArg", "ptr", ("ptr", part(TAKE)), ("ptr", number))
        release(number)
        f.store("ptr", checked(taken), memory, 8)
        address = f.intrinsic("PyTuple_GetItem", "ptr", ("ptr", taken), ("i64", "0"))
        f.store("ptr", f.intrinsic("PyLong_AsVoidPtr", "ptr", ("ptr", address)), work, 8)
    with f.when(f.v(f"xor i1 {pooled}, true")):
        f.store("ptr", f.dynamic_alloca(f.add(numbers[BLOCK], numbers[ALONE])), work, 8)
    base = f.load("ptr", work, 8)
    f.store("ptr", f.at(base, numbers[BLOCK]), f.at(d, 8 * SCRATCH), 8)
    with f.loop(0, between) as loop:
        offset = f.load("i64", f.at(offsets, f.mul(loop.index, 8)))
        f.store("ptr", f.at(base, offset), f.at(d, f.mul(f.add(first_between, loop.index), 8)), 8)

    misses = part(MISSES)
    state = f.intrinsic("PyEval_SaveThread", "ptr")
    links = f.at(fixed, f.mul(numbers[FIXED], 8))
    with f.loop(0, numbers[LINKS], carried=[("ptr", links)]) as loop:
        link = loop.carried[0]
        address, always_one, miss, pointers = (f.load("i64", f.at(link, 8 * i)) for i in range(INDICES))
        indices = f.at(link, 8 * INDICES)
        with f.loop(0, pointers) as inner:
            index = f.load("i64", f.at(indices, f.mul(inner.index, 8)))
            f.store("i64", f.load("i64", f.at(d, f.mul(index, 8)), 8), f.at(arguments, f.mul(inner.index, 8)), 8)
        f.store("i64", "0", missed, 8)
        alone = f.compare("ne", always_one, 0)
        kernel = f.v(f"inttoptr i64 {address} to ptr")
        some = f.v(f"select i1 {alone}, i64 1, i64 {team}")
        f.do(f"call void {kernel}(ptr {arguments}, i64 {some}, i64 0)")
        out_of_range = f.v(f"and i1 {f.compare('ne', miss, 0)}, {f.compare('ne', f.load('i64', missed, 8), 0)}")
        with f.when(out_of_range):
            f.intrinsic("PyEval_RestoreThread", "void", ("ptr", state))
            says = f.intrinsic("PyTuple_GetItem", "ptr", ("ptr", misses), ("i64", str(f.sub(miss, 1))))
            release(asked(says, "%sources"))
            f.intrinsic("PyEval_SaveThread", "ptr")
        loop.next = [f.at(indices, f.mul(pointers, 8))]
    f.intrinsic("PyEval_RestoreThread", "void", ("ptr", state))
    with f.when(pooled):
        given_back = f.intrinsic("PyObject_CallOneArg", "ptr", ("ptr", part(GIVE)), ("ptr", f.load("ptr", memory, 8)))
        release(checked(given_back))
    f.call("release", ("ptr", held), ("i64", str(count_held)))
    f.do(f"ret ptr {results}")
    f.label("fail")
    f.call("release", ("ptr", held), ("i64", str(count_held)))
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
