"""LLVM IR as text: one function at a time, values by name, counted loops with carried values.

llvmlite's own builder has no bfloat and no scalable way to say `splat`; the textual form is LLVM's reference, LangRef. No
optimiser runs over this text, only instruction selection, so constants are folded while writing.

Numbers that are data of a problem, such as scales, are no part of the text: a call passes them (`Module.given`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tilewright.ir.extent import Extent, extent_at
from tilewright.schedule.candidate import Unsupported

Int = int | str  # an i64: a number known now, an extent known when the kernel is called, or the name of a value

# The name of a vector that each block makes of registers: of a number of the problem or of what is held; which, lanes, element.
HELD = re.compile(r"%(number|held)(\d+)\.(\d+)\.(\w+)")

# All that a kernel may call beside LLVM's own intrinsics.
THREADS = ("tilewright_parallel", "tilewright_finished", "tilewright_meet", "tilewright_team")
PYTHON = (
    "PyLong_AsVoidPtr", "PyLong_AsLong", "PyLong_FromLong", "PyEval_SaveThread", "PyEval_RestoreThread",
    "Py_IncRef", "Py_DecRef", "PyObject_CallNoArgs", "PyObject_CallOneArg", "PySequence_GetItem",
    "PyTuple_GetItem", "PyBytes_AsString", "PyList_New", "PyList_SetItem",
)  # fmt: skip
MEMORY = ("memcpy", "memmove", "memset")  # which LLVM calls of its own accord


def _is(x: Int, number: int) -> bool:
    """Tell whether a number is known to be this one; what is open is not asked."""
    return type(x) is int and x == number


def vec(lanes: int, element: str) -> str:
    """The type of a vector: `<16 x float>`."""
    return f"<{lanes} x {element}>"


def f32(value: float) -> str:
    """A float constant as LLVM wants it: the bits of the double of the same value."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value)) if abs(value) < 3.5e38 else (value,)
    return f64(rounded)


def f64(value: float) -> str:
    """A double constant as LLVM wants it."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


def suffix(type_: str) -> str:
    """A type in the name of an overloaded intrinsic: `<16 x float>` is v16f32."""
    names = {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16", "ptr": "p0"}
    if type_.startswith("<"):
        lanes, element = type_[1:-1].split(" x ")
        return f"v{lanes}{suffix(element)}"
    return names.get(type_, type_)


class Source(NamedTuple):
    """A kernel as it is generated.

    Attributes:
        text: the module.
        given: what calls give beside tensors (`Module.given`).
    """

    text: str
    given: tuple[int, ...]


@dataclass
class Module:
    """Functions and the declarations they need.

    Attributes:
        rounds_bf16: the processor has AVX-512 BF16's instruction for that, which takes denormal numbers for zero, as the one
            that multiplies does.
        given_at: which of a call's pointers is that to what it gives beside tensors, 8 bytes each; None where nothing is.
        register_lanes: how many elements of 4 bytes a register holds; 0 where the problem's numbers are literals.
        given: that, by what it stands for: extents that are not known now, and the problem's numbers as bits. Problems that
            differ in these alone have one text.
    """

    rounds_bf16: bool = False
    given_at: int | None = None
    register_lanes: int = 0
    given: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    functions: list[str] = field(default_factory=list)
    declarations: dict[str, str] = field(default_factory=dict)

    def slot(self, key: Hashable, value: int) -> int:
        """The place of a value among those that calls give; `key` says what it stands for."""
        self.given.setdefault(key, value)
        return list(self.given).index(key)

    def given_for(self, values: Mapping[str, int]) -> tuple[int, ...]:
        """The numbers that a call gives beside tensors, for values of the dims by name."""
        return tuple(extent_at(x, values) for x in self.given.values())

    def text(self, cpu: str, features: str) -> str:
        """The whole module for one processor; the same functions always give the same text."""
        attributes = (
            f'attributes #0 = {{ nounwind "target-cpu"="{cpu}" "target-features"="{features}" "no-trapping-math"="true" '
            '"prefer-vector-width"="512" "min-legal-vector-width"="512" "frame-pointer"="none" }'
        )
        return "\n".join([*sorted(self.declarations.values()), *self.functions, attributes, ""])

    def source(self, cpu: str, features: str) -> Source:
        """The text for one processor, and what its calls give where no extent is open."""
        return Source(self.text(cpu, features), self.given_for({}))


@dataclass
class Loop:
    """A counted loop: its index, the carried values inside, what they become, and what they are afterwards."""

    index: str
    carried: list[str]
    next: list[str]


class Function:
    """One function being written. Arguments are named `%name`."""

    def __init__(
        self, module: Module, name: str, args: Sequence[tuple[str, str]], returns: str = "void", *, public: bool = False
    ):
        self.module, self.name = module, name
        linkage = "" if public else "internal "
        self._head = f"define {linkage}{returns} @{name}({', '.join(f'{t} %{n}' for t, n in args)}) #0 {{"
        self._lines: list[str] = []
        self._block = "entry"
        self._count = 0
        self._allocas: list[str] = []
        self._loaded: dict[int, str] = {}
        self._arguments = {n for _, n in args}
        self._before: list[str] = []  # lines before those that read numbers
        self._reads: list[str] = []
        self._numbers = ""  # the address of what the call gives
        self._registers: dict[tuple[int, int, str], str] = {}  # numbers that were read
        self._held: list[list[str]] = []  # registers of vectors that blocks pass on
        self._in_block: dict[str, str] = {}  # vectors of either in this block
        self.known: dict[tuple[object, ...], Any] = {}  # what was computed once, by what it was made of
        self.numbers: dict[str, float] = {}  # the values of the problem's numbers, by the names of their vectors

    def finish(self, value: str = "void") -> None:
        """End with a return and hand the text to the module."""
        self.do(f"ret {value}")
        lines = [*self._allocas, *self._before, *self._reads, *self._lines]
        self.module.functions.append("\n".join([self._head, "entry:", *lines, "}"]))

    def number(self, x: Int) -> Int:
        """A number known now or the name of a value: an extent that is open is read where the function begins.

        Raises:
            Unsupported: the function has no arguments of the kernel's to read it from.
        """
        if not isinstance(x, Extent):
            return x
        if self.module.given_at is None or "arguments" not in self._arguments:
            raise Unsupported(f"{self.name} cannot be written for an open extent")
        slot = self.module.slot(("extent", x.terms), x)
        if slot not in self._loaded:
            table, at = "%" + self.fresh("x"), "%" + self.fresh("x")
            if not self._loaded:
                self._allocas += [
                    f"  %given.at = getelementptr i8, ptr %arguments, i64 {8 * self.module.given_at}",
                    "  %given = load ptr, ptr %given.at, align 8",
                ]
            self._allocas += [
                f"  {at} = getelementptr i8, ptr %given, i64 {8 * slot}",
                f"  {table} = load i64, ptr {at}, align 8",
            ]
            self._loaded[slot] = table
        return self._loaded[slot]

    def finish_with_none(self) -> None:
        """End with a new reference to Python's None."""
        self.module.declarations["_Py_NoneStruct"] = "@_Py_NoneStruct = external global i8"
        self.intrinsic("Py_IncRef", "void", ("ptr", "@_Py_NoneStruct"))
        self.finish("ptr @_Py_NoneStruct")

    # -- values

    def fresh(self, prefix: str = "v") -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def do(self, instruction: str) -> None:
        instruction = self._resolved(instruction)
        self._lines.append("  " + instruction)

    def v(self, expression: str) -> str:
        """The name of a new value."""
        name = "%" + self.fresh()
        self.do(f"{name} = {expression}")
        return name

    def intrinsic(self, name: str, returns: str, *args: tuple[str, Int]) -> str:
        """Call a function of LLVM's or of `THREADS` and `PYTHON`; `args` are types and values. Gives its result's name, if any.

        Raises:
            ValueError: a name that a process might not have, or have another function for.
        """
        if not name.startswith("llvm.") and name not in THREADS + PYTHON:
            raise ValueError(f"{name} is no function that a kernel may call")
        types, given = ", ".join(t for t, _ in args), ", ".join(f"{t} {self.number(x)}" for t, x in args)
        self.module.declarations[name] = f"declare {returns} @{name}({types})"
        call = f"call {returns} @{name}({given})"
        if returns == "void":
            self.do(call)
            return ""
        return self.v(call)

    def call(self, name: str, *args: tuple[str, Int]) -> None:
        """Call another function of the module."""
        self.do(f"call void @{name}({', '.join(f'{t} {self.number(x)}' for t, x in args)})")

    def alloca(self, size_bytes: int) -> str:
        """Memory of the function's own, aligned to a cache line."""
        name = "%" + self.fresh("a")
        self._allocas.append(f"  {name} = alloca [{size_bytes} x i8], align 64")
        return name

    def dynamic_alloca(self, size_bytes: Int) -> str:
        """Like `alloca`, of a size that is known when the function runs. Not in a loop: it stays until the function returns."""
        return self.v(f"alloca i8, i64 {self.number(size_bytes)}, align 64")

    # -- numbers that a call passes

    def number_given(self, key: Hashable, value: float, bits: int, lanes: int, element: str) -> str:
        """A number of the problem in every lane, of an element type of at most 32 bits; `key` says what it stands for.

        Like a literal's, its name holds in every block.
        """
        name = f"%number{self.module.slot(key, bits)}.{lanes}.{element}"
        self.numbers[name] = value
        return name

    def numbers_from_here(self) -> None:
        """Read numbers here, behind loops that leave them no registers, and not where the function begins. No loop is open."""
        self._before += [*self._reads, *self._lines]
        self._reads, self._lines = [], []

    def held(self, value: str, lanes: int, element: str) -> str:
        """The name of a vector for blocks that follow. Of lanes that are no power of two LLVM would pass on each one by itself
        (`getVectorTypeBreakdown`), so that registers of it are passed on."""
        most = self.module.register_lanes
        if not lanes & (lanes - 1) or not most or lanes % most or not value.startswith("%v"):
            return value
        parts = [self.shuffle(vec(lanes, element), value, value, range(i, i + most)) for i in range(0, lanes, most)]
        self._held.append(parts)
        return f"%held{len(self._held) - 1}.{lanes}.{element}"

    def _resolved(self, value: str) -> str:
        """Text in which vectors that are made of registers are values of the block that is being written."""
        return HELD.sub(self._made, value) if "%number" in value or "%held" in value else value

    def _made(self, name: re.Match[str]) -> str:
        """Such a vector in this block, where instruction selection sees of which registers it is."""
        found = self._in_block.get(name[0])
        if found is None:
            index, lanes, element, most = int(name[2]), int(name[3]), name[4], self.module.register_lanes
            if name[1] == "held":
                parts = self._held[index]
            else:
                parts = [self._first(index, min(lanes, most), element)] * -(-lanes // most)
            found, count = parts[0], min(lanes, most)
            for part in parts[1:]:
                if part == parts[0]:
                    found = self.shuffle(vec(most, element), part, part, [i % most for i in range(lanes)])
                    break
                if count > most:  # as wide as what it is put behind
                    picks = [min(i, most) for i in range(count)]
                    part = self.shuffle(vec(most, element), part, "poison", picks)
                found = self.shuffle(vec(count, element), found, part, range(count + most))
                count += most
            self._in_block[name[0]] = found
        return found

    def _first(self, index: int, lanes: int, element: str) -> str:
        """A number in every lane of a register, read where the function begins."""
        key, at = (index, lanes, element), self.module.given_at
        assert at is not None
        if key not in self._registers:
            lines, self._lines = self._lines, self._reads
            if not self._numbers:
                self._numbers = self.load("ptr", self.at("%arguments", 8 * at), 8)
            one = self.load(element, self.at(self._numbers, 8 * index), 8)
            self._registers[key] = self.splat(lanes, element, one)
            self._lines = lines
        return self._registers[key]

    # -- memory; offsets in bytes

    def at(self, pointer: str, offset: Int) -> str:
        return pointer if _is(offset, 0) else self.v(f"getelementptr i8, ptr {pointer}, i64 {self.number(offset)}")

    def load(self, type_: str, pointer: str, align: int = 1) -> str:
        return self.v(f"load {type_}, ptr {pointer}, align {align}")

    def store(self, type_: str, value: str, pointer: str, align: int = 1) -> None:
        self.do(f"store {type_} {value}, ptr {pointer}, align {align}")

    def load_where(self, type_: str, pointer: str, mask: str | None) -> str:
        """Lanes of consecutive memory where `mask` is set (all without one); zero elsewhere, and not touched."""
        if mask is None:
            return self.load(type_, pointer)
        lanes = vec(int(type_[1:].split(" ")[0]), "i1")
        return self.intrinsic(
            f"llvm.masked.load.{suffix(type_)}.p0",
            type_,
            ("ptr", pointer),
            ("i32 immarg", "1"),
            (lanes, mask),
            (type_, "zeroinitializer"),
        )

    def store_where(self, type_: str, value: str, pointer: str, mask: str | None) -> None:
        if mask is None:
            self.store(type_, value, pointer)
            return
        lanes = vec(int(type_[1:].split(" ")[0]), "i1")
        name = f"llvm.masked.store.{suffix(type_)}.p0"
        self.intrinsic(name, "void", (type_, value), ("ptr", pointer), ("i32 immarg", "1"), (lanes, mask))

    def prefetch(self, pointer: str, level: int = 1) -> None:
        """Prefetch a cache line into the first-level cache or the second."""
        near = ("i32 immarg", str(4 - level))
        self.intrinsic("llvm.prefetch.p0", "void", ("ptr", pointer), ("i32 immarg", "0"), near, ("i32 immarg", "1"))

    # -- 64-bit integers

    def add(self, a: Int, b: Int) -> Int:
        if not isinstance(a, str) and not isinstance(b, str):
            return a + b
        if _is(a, 0) or _is(b, 0):
            return b if _is(a, 0) else a
        return self.v(f"add nsw i64 {self.number(a)}, {self.number(b)}")

    def sub(self, a: Int, b: Int) -> Int:
        if not isinstance(a, str) and not isinstance(b, str):
            return a - b
        return a if _is(b, 0) else self.v(f"sub nsw i64 {self.number(a)}, {self.number(b)}")

    def mul(self, a: Int, b: Int) -> Int:
        if not isinstance(a, str) and not isinstance(b, str):
            return a * b
        if _is(a, 0) or _is(b, 0):
            return 0
        if _is(a, 1) or _is(b, 1):
            return b if _is(a, 1) else a
        return self.v(f"mul nsw i64 {self.number(a)}, {self.number(b)}")

    def div(self, a: Int, b: int) -> Int:
        """a // b for a >= 0."""
        if not isinstance(a, str):
            return a // b
        return a if _is(b, 1) else self.v(f"udiv i64 {a}, {self.number(b)}")

    def rem(self, a: Int, b: int) -> Int:
        """a % b for a >= 0."""
        if not isinstance(a, str):
            return a % b
        return 0 if _is(b, 1) else self.v(f"urem i64 {a}, {self.number(b)}")

    def min(self, a: Int, b: Int) -> Int:
        if isinstance(a, int) and isinstance(b, int):
            return min(a, b)
        return self.intrinsic("llvm.smin.i64", "i64", ("i64", self.number(a)), ("i64", self.number(b)))

    def max(self, a: Int, b: Int) -> Int:
        if isinstance(a, int) and isinstance(b, int):
            return max(a, b)
        return self.intrinsic("llvm.smax.i64", "i64", ("i64", self.number(a)), ("i64", self.number(b)))

    # -- vectors

    def splat(self, lanes: int, element: str, scalar: str) -> str:
        type_ = vec(lanes, element)
        first = self.v(f"insertelement {type_} poison, {element} {scalar}, i64 0")
        return self.v(f"shufflevector {type_} {first}, {type_} poison, <{lanes} x i32> zeroinitializer")

    def shuffle(self, type_: str, a: str, b: str, picks: Sequence[int]) -> str:
        """Lanes of a and b by number, b's after a's; of literals, a literal."""
        if a[0] == b[0] == "<":
            lanes = [*a[1:-1].split(", "), *b[1:-1].split(", ")]
            return f"<{', '.join(lanes[i] for i in picks)}>"
        mask = ", ".join(f"i32 {i}" for i in picks)
        return self.v(f"shufflevector {type_} {a}, {type_} {b}, <{len(picks)} x i32> <{mask}>")

    def iota(self, lanes: int, element: str = "i32", step: int = 1) -> str:
        return f"<{', '.join(f'{element} {i * step}' for i in range(lanes))}>"

    def first_lanes(self, lanes: int, count: Int) -> str:
        """A mask of the first `count` lanes (none below 0, all above); of a known count, a literal.

        LLVM 22 selects wrong instructions for AVX2 where it finds out for itself that a mask is constant: one that is wider
        than a register and whose upper half is false becomes a load of that whole half. One lane alone is hidden from it: a
        masked store of one is selected as a store of one element, as wide as the lane was before it was narrowed.
        """
        if isinstance(count, int):
            if count != 1:
                return f"<{', '.join(f'i1 {str(i < count).lower()}' for i in range(lanes))}>"
            count = self.v('call i64 asm "", "=r,0"(i64 1)')
        n = self.v(f"trunc i64 {self.max(self.min(count, lanes), 0)} to i32")
        return self.v(f"icmp slt {vec(lanes, 'i32')} {self.iota(lanes)}, {self.splat(lanes, 'i32', n)}")

    # -- control

    def label(self, name: str) -> None:
        self._lines.append(f"{name}:")
        self._block = name
        self._in_block.clear()

    def jump(self, label: str) -> None:
        self.do(f"br label %{label}")

    @contextmanager
    def loop(self, start: Int, stop: Int, step: Int = 1, carried: Sequence[tuple[str, str]] = ()) -> Generator[Loop]:
        """`for index in range(start, stop, step)`. Inside set `next`; afterwards `carried` holds the last values."""
        start, stop, step = self.number(start), self.number(stop), self.number(step)
        carried = [(type_, self._resolved(first)) for type_, first in carried]
        before, name = self._block, self.fresh("loop")
        head, body, done = f"{name}.head", f"{name}.body", f"{name}.done"
        self.jump(head)
        self.label(head)
        index, values = f"%{name}.i", [f"%{name}.c{i}" for i in range(len(carried))]
        phis = len(self._lines)
        self._lines.append("")
        more = self.v(f"icmp slt i64 {index}, {stop}")
        self.do(f"br i1 {more}, label %{body}, label %{done}")
        self.label(body)
        loop = Loop(index, values, list(values))
        yield loop
        following = self.v(f"add nsw i64 {index}, {step}")
        loop.next = [self._resolved(x) for x in loop.next]
        last = self._block
        self.jump(head)
        lines = [f"  {index} = phi i64 [{start}, %{before}], [{following}, %{last}]"]
        for (type_, first), value, nxt in zip(carried, values, loop.next, strict=True):
            lines.append(f"  {value} = phi {type_} [{first}, %{before}], [{nxt}, %{last}]")
        self._lines[phis] = "\n".join(lines)
        self.label(done)

    @contextmanager
    def when(self, condition: str) -> Generator[None]:
        """Do what follows only if the i1 `condition` holds."""
        name = self.fresh("if")
        self.do(f"br i1 {condition}, label %{name}.then, label %{name}.end")
        self.label(f"{name}.then")
        yield
        self.jump(f"{name}.end")
        self.label(f"{name}.end")

    def compare(self, how: str, a: Int, b: Int) -> str:
        """An i1: `how` is slt, sge, eq, ne, …"""
        return self.v(f"icmp {how} i64 {self.number(a)}, {self.number(b)}")

    @contextmanager
    def tasks(self, counter: str, total: Int, finished: str | None = None) -> Generator[str]:
        """Threads take task numbers below `total` from a shared counter until none is left. Each adds what it has done to the
        i32 `finished`, for those that wait until all are (`meet`)."""
        name = self.fresh("tasks")
        before = self._block
        self.jump(f"{name}.next")
        self.label(f"{name}.next")
        done, phi = f"%{name}.count", len(self._lines)
        self._lines.append("")
        task = self._take(counter)
        self.do(f"br i1 {self.compare('slt', task, total)}, label %{name}.do, label %{name}.done")
        self.label(f"{name}.do")
        yield task
        if finished is not None:
            more = self.v(f"add i32 {done}, 1")
            self._lines[phi] = f"  {done} = phi i32 [0, %{before}], [{more}, %{self._block}]"
        self.jump(f"{name}.next")
        self.label(f"{name}.done")
        if finished is not None:
            with self.when(self.v(f"icmp ne i32 {done}, 0")):
                self.intrinsic("tilewright_finished", "void", ("ptr", finished), ("i32", done))

    def meet(self, finished: str, total: Int) -> None:
        """Wait until all threads together have finished `total` tasks."""
        total = self.number(total)
        count = str(total) if isinstance(total, int) else self.v(f"trunc i64 {total} to i32")
        self.intrinsic("tilewright_meet", "void", ("ptr", finished), ("i32", count))

    @contextmanager
    def tasks_ahead(self, counter: str, total: Int) -> Generator[tuple[str, str]]:
        """`tasks`, each with the one that the thread will do next: for long tasks whose data are worth asking for early."""
        name = self.fresh("tasks")
        first, before = self._take(counter), self._block
        self.jump(f"{name}.next")
        self.label(f"{name}.next")
        task, phi = f"%{name}.task", len(self._lines)
        self._lines.append("")
        self.do(f"br i1 {self.compare('slt', task, total)}, label %{name}.do, label %{name}.done")
        self.label(f"{name}.do")
        following = self._take(counter)
        yield task, following
        self._lines[phi] = f"  {task} = phi i64 [{first}, %{before}], [{following}, %{self._block}]"
        self.jump(f"{name}.next")
        self.label(f"{name}.done")

    def _take(self, counter: str) -> str:
        return self.v(f"atomicrmw add ptr {counter}, i64 1 monotonic")
