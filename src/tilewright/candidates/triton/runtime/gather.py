"""An all-gather of few rows by one kernel, over the memory of `expressions/exchange.py`: each program stores its share of this
rank's rows into the memory of all others, sets a flag there, waits for the same program's flags of the others, and copies what
came into the results. What is gathered at the same time, such as codes and their scales, goes in one launch.

A program waits for that of its number on other ranks alone, none for another one of its own rank, and there are no more than
multiprocessors: none keeps another one from coming. So the kernel behind may be launched at once (programmatic dependent
launch): all programs are at work by then, and those of other ranks need no multiprocessor of this one.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from tilewright.candidates.triton.expressions.exchange import (
    FLAGS,
    LATE,
    LEAST_SLOT,
    LINE,
    OWN,
    SHARED,
    Exchange,
    end_statement,
    tell_statement,
    wait_statement,
)
from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.expressions.text import KernelSource, Text
from tilewright.candidates.triton.runtime.launch import caller, pointers
from tilewright.candidates.triton.runtime.module import IMPORTS, Built, arch_of, build, launcher
from tilewright.dtype import S8, S32, DType
from tilewright.hardware.target import Target
from tilewright.ir.mesh import Symmetric
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import Runner
from tilewright.sizes import next_power_of_2, round_up

DEPENDENT_LAUNCH = "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait\n"
VECTOR_BYTES = 16  # that a thread reads or writes at once
MOST_WARPS, MOST_VECTORS = 8, 4  # of a program; of a thread, under way at once
RANK = "rank"  # name of an argument: this rank's place in the group


@dataclass(frozen=True)
class Part:
    """One of the tensors that travel.

    Attributes:
        place: where a rank's rows lie in a slot, in bytes.
        word: the type that they are copied as.
        count: words of a rank's rows.
    """

    place: int
    word: DType
    count: int

    @property
    def bytes(self) -> int:
        """Bytes of a rank's rows."""
        return self.count * self.word.size_bytes(1)

    @property
    def vectors(self) -> int:
        return -(-self.bytes // VECTOR_BYTES)


@dataclass(frozen=True)
class Gather:
    """The kernel of some tensors whose rows ranks gather.

    Attributes:
        types: of the results, which have the rows of each rank in turn.
        ranks: how many there are.
        target: the device.
    """

    types: tuple[TensorType, ...]
    ranks: int
    target: Target

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The tensors, one behind the other in a slot."""
        found, place = list[Part](), 0
        for t in self.types:
            size = rank_bytes(t, self.ranks)
            word = S8 if size % 4 else S32
            found.append(Part(place, word, size // word.size_bytes(1)))
            place = round_up(place + size, LINE)
        return tuple(found)

    @property
    def exchange(self) -> Exchange:
        """The memory of ranks: a power of two, so that those of about one size share it."""
        last = self.parts[-1]
        return Exchange(self.ranks, max(LEAST_SLOT, next_power_of_2(last.place + last.bytes)))

    @property
    def vectors(self) -> int:
        """Vectors of the largest of a rank's tensors."""
        return max(part.vectors for part in self.parts)

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return min(MOST_WARPS, next_power_of_2(-(-self.vectors // 32)))

    @property
    def programs(self) -> int:
        """Programs, each of which has a flag."""
        return max(1, min(FLAGS, self.target.cores, -(-self.vectors // (32 * self.warps))))

    @property
    def step(self) -> int:
        """Vectors that a thread has under way at once."""
        return min(MOST_VECTORS, next_power_of_2(-(-self.vectors // (32 * self.warps * self.programs))))

    @property
    def arguments(self) -> dict[str, str]:
        """Triton's types of the kernel's arguments."""
        every = [(f"{name}{g}", pointer_type(part.word)) for name in "po" for g, part in enumerate(self.parts)]
        return dict(every) | dict.fromkeys([OWN, LATE, *(f"to{r}" for r in range(self.ranks))], "*i32") | {RANK: "i32"}

    def text(self) -> KernelSource:
        """A module with the function `kernel`."""
        t, e, ranks = Text(), self.exchange, range(self.ranks)
        dependent = self._dependent_launch
        if dependent:
            t.do("gdc_launch_dependents()")
            t.do("gdc_wait()")
        t.do("program = tl.program_id(0)")
        t.do(f"epoch = tl.load({OWN})")
        for g, part in enumerate(self.parts):
            size = part.word.size_bytes(1)
            t.do(f"slot{g} = {e.slot_of('epoch', part.word)} + {part.place // size}")
            with self._blocks(t, part):
                t.do(f"x = tl.load(p{g} + i, mask=exists)")
                for r in ranks:
                    t.do(f"tl.store({_as(f'to{r}', part.word)} + (slot{g} + i), x, mask=exists & ({RANK} != {r}))")
                t.do(f"tl.store(o{g} + ({RANK} * {part.count} + i), x, mask=exists)")
        tell_statement(t, [f"(to{r} + program)" for r in ranks])
        end_statement(t, self.programs)  # every program has read the epoch
        wait_statement(t, e, "program")
        for g, part in enumerate(self.parts):
            size = part.word.size_bytes(1)
            with self._blocks(t, part):
                for r in ranks:
                    place = f"{_as(OWN, part.word)} + ({e.region(r) // size} + slot{g} + i)"
                    t.do(f"x{r} = tl.load({place}, mask=exists & ({RANK} != {r}))")
                for r in ranks:
                    t.do(f"tl.store(o{g} + ({r * part.count} + i), x{r}, mask=exists & ({RANK} != {r}))")
        head = f"{IMPORTS}{DEPENDENT_LAUNCH if dependent else ''}"
        return KernelSource(f"{head}\n\n@triton.jit\ndef kernel({', '.join(self.arguments)}):\n{t}\n", t.numbers)

    @contextmanager
    def _blocks(self, t: Text, part: Part) -> Generator[None]:
        """Indents what a program does with each of its blocks of a part: words `i`, where they exist."""
        words = 32 * self.warps * self.step * VECTOR_BYTES // part.word.size_bytes(1)
        block = min(words, next_power_of_2(part.count))
        with t.block(f"for at in range(program * {block}, {part.count}, {self.programs * block}):"):
            t.do(f"i = at + tl.arange(0, {block})")
            t.do(f"exists = i < {part.count}")
            yield

    @property
    def _dependent_launch(self) -> bool:
        return arch_of(self.target).capability == 90

    def build(self) -> Built:
        """Its machine code."""
        options = {"launch_pdl": True} if self._dependent_launch else {}
        return build(self.text(), self.arguments, arch_of(self.target), self.target.index, num_warps=self.warps, **options)

    def runner(self, memory: Symmetric) -> Runner:
        """A function that gathers this rank's tensors."""
        e, count, built = self.exchange, len(self.types), self.build()
        e.prepare(memory)
        words, *regions = e.sent(memory, S32).values()
        shared = dict(enumerate([words, memory.late, *regions], SHARED))
        given = [*pointers("source", range(count)), *pointers("result", range(count)), *pointers("source", shared)]
        start = launcher(built.kernel, (self.programs,), self.target.index, [memory.own])
        return caller(start, given, count, self.types, shared, self.target)


def rank_bytes(whole: TensorType, ranks: int) -> int:
    """Bytes of a rank's rows, as torch has them."""
    return whole.dtype.to_torch().itemsize * whole.elements // ranks


def _as(pointer: str, word: DType) -> str:
    """Memory of words of 32 bits as that of others."""
    return pointer if word is S32 else f"{pointer}.to(tl.pointer_type(tl.int8))"
