"""Recipes: what runs a step, as data, so that a saved program runs it again without the generator that made it.

A runner is a function, of which nothing can be asked. Whoever makes one that can be made again from data says so with
`describe`; `recipe_of` asks for it when a program is saved. A runner that nobody described (a library's call, the reference) is
built again by its candidate (`Built`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import torch

from tilewright import plug_ins
from tilewright.ir.artefact import Kind
from tilewright.ir.graph import Node
from tilewright.schedule.candidate import Kernel, Runner, discover
from tilewright.schedule.record import Knobs


class CallShape(msgspec.Struct, frozen=True):
    """The numbers of a call of a generated CPU kernel (`candidates/llvm/runtime/calls.py`).

    Attributes:
        pointers: number of pointers it is given: sources, results, what is given if anything is, scratch, packed right operand.
        read: sources whose addresses it needs.
        first: index of the first result's pointer.
        results: types of the results.
        alone: bytes of scratch for one thread.
        each: bytes of scratch for each further thread.
        one: it is never worth a second thread.
        packed_bytes: bytes of the packed right operand, 0 for none.
        given: extents that its code leaves open, and the problem's numbers (`Module.given`).
    """

    pointers: int
    read: tuple[int, ...]
    first: int
    results: tuple[Kind, ...]
    alone: int
    each: int
    one: bool
    packed_bytes: int = 0
    given: tuple[int, ...] = ()


class Called(CallShape, frozen=True, kw_only=True, tag="called", forbid_unknown_fields=True):
    """A call of a generated CPU kernel.

    Attributes:
        code: name of its object code.
        packed: name of the packed right operand, "" for none.
    """

    code: str
    packed: str


class Prepared(msgspec.Struct, frozen=True, tag="prepared", forbid_unknown_fields=True):
    """A kernel of a gemm, behind operands that torch evaluates: their expressions as text, "" for one that the kernel reads
    itself; `k_last` tells how the right one is to lie."""

    left: str
    right: str
    k_last: bool
    call: Called


class Checked(msgspec.Struct, frozen=True, tag="checked", forbid_unknown_fields=True):
    """A kernel that picks by indices; the problem's expressions say which was out of range, as an error."""

    call: Called


class Built(msgspec.Struct, frozen=True, tag="built", forbid_unknown_fields=True):
    """A kernel that its candidate builds again; `package` is what `plug_ins.said` gives of a plug-in's, "" of ours."""

    candidate: str
    knobs: Knobs
    package: str = ""

    @classmethod
    def of(cls, kernel: Kernel) -> Built:
        """The recipe of a kernel."""
        package = next((c.package for c in discover() if c.name == kernel.candidate), "")
        return cls(kernel.candidate, kernel.schedule.knobs, plug_ins.said(package) if package else "")


class Split(msgspec.Struct, frozen=True, tag="split", forbid_unknown_fields=True):
    """The kernels of a gemm's pieces, in order (`candidates/split.py`)."""

    pieces: tuple[Recipe, ...]


_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Row = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Extent = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
_Offset = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
_Signed = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]


class TensorMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An array that TMA reads or writes a box at a time, as `cuTensorMapEncodeTiled` takes it (CUDA Driver API, 6.28).

    Attributes:
        offset_bytes: of its first element, from the address.
        dtype, swizzle: numbers of `CUtensorMapDataType` and `CUtensorMapSwizzle`.
        element_bytes: bytes of an element.
        box, shape, strides: in elements, outer first.
    """

    offset_bytes: _Offset
    dtype: Annotated[int, msgspec.Meta(ge=0, le=12)]
    swizzle: Annotated[int, msgspec.Meta(ge=0, le=3)]
    element_bytes: Literal[1, 2, 4, 8]
    box: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=256)], ...], msgspec.Meta(min_length=1, max_length=5)]
    shape: Annotated[tuple[_Extent, ...], msgspec.Meta(min_length=1, max_length=5)]
    strides: Annotated[tuple[_Offset, ...], msgspec.Meta(min_length=1, max_length=5)]


class MachineCode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU kernel, and how the CUDA driver starts it.

    Attributes:
        binary: name of its cubin.
        entry: name of its function.
        grid: blocks along x, y and z.
        threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        early: it may start before what is ahead of it on its stream has ended (programmatic dependent launch).
        maps: the arrays that lie at its first pointers: it takes descriptors of them, each followed by extents and strides.
        numbers: its last arguments; integers are of 32 bits, the others f32.
    """

    binary: str
    entry: Annotated[str, msgspec.Meta(pattern="^[A-Za-z_$][A-Za-z0-9_$]*$")]
    grid: tuple[_Count, _Row, _Row]
    threads: Annotated[int, msgspec.Meta(ge=32, le=1024, multiple_of=32)]
    shared_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    early: bool
    maps: tuple[TensorMap, ...]
    numbers: tuple[_Signed | float, ...]


class Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pointer that a GPU kernel is given: to a source or a result by its number, to scratch memory of so many bytes, or to so
    many counters of 32 bits, which are zero before a call and after it."""

    of: Literal["source", "result", "scratch", "counters"]
    number: _Offset


class Operand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operand that torch evaluates and lays out on each call (`hopper/gemm/plan.py`, `Matrix`): the number that it has as a
    source, its expression as text, how it lies."""

    number: _Count
    root: str
    extents: tuple[_Extent, _Extent, _Extent]
    strides: tuple[_Offset, _Offset, _Offset]
    columns_last: bool
    permuted: bool


class Launched(msgspec.Struct, frozen=True, tag="launched", forbid_unknown_fields=True):
    """A call of a GPU kernel (`candidates/triton/runtime/launch.py`).

    Attributes:
        code: the kernel.
        pointers: what it is given, in order.
        results: types of the arrays that it writes.
        held: packed weights: numbers that they have as sources, behind the problem's own, and their names.
        operands: sources that are made on each call.
    """

    code: MachineCode
    pointers: tuple[Pointer, ...]
    results: tuple[Kind, ...]
    held: tuple[tuple[_Count, str], ...]
    operands: tuple[Operand, ...]


Recipe = Called | Prepared | Checked | Launched | Built | Split


class Parts(Protocol):
    """A place for what is no small data. Each method gives the name under which it is found again."""

    def code(self, content: bytes) -> str:
        """Leave object code."""
        ...

    def bytes(self, memory: torch.Tensor) -> str:
        """Leave memory, u8 [n]."""
        ...

    def text(self, roots: Sequence[Node]) -> str:
        """The text of expressions, their large constants left."""
        ...


Describe = Callable[[Parts], Recipe | None]

R = TypeVar("R", bound=Runner)

_described: WeakKeyDictionary[Runner, Describe] = WeakKeyDictionary()


def describe(runner: R, how: Describe) -> R:
    """The runner, of which `recipe_of` gives from now on what `how` says."""
    _described[runner] = how
    return runner


def described(runner: Runner) -> bool:
    """Tell whether there is a recipe of a runner."""
    return runner in _described


def recipe_of(runner: Runner, parts: Parts) -> Recipe | None:
    """The recipe of a runner; None of one that nobody described."""
    how = _described.get(runner)
    return None if how is None else how(parts)
