"""The kernel between product and results where all ranks want the sums: it adds up the tiles of the rows that its rank owns, in
the order of ranks, rounds once, and stores them into the memory of all ranks, chunk by chunk as those become complete."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.candidates.triton.expressions.chunks import ADDED, RANK, Chunks, arrive, begin, taken, wait
from tilewright.candidates.triton.expressions.exchange import LATE, OWN, SHARED
from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.expressions.text import KernelSource, Text
from tilewright.candidates.triton.hopper.arch import SM_90
from tilewright.candidates.triton.runtime.launch import caller, pointers
from tilewright.candidates.triton.runtime.module import IMPORTS, Built, build, launcher
from tilewright.hardware.target import Target
from tilewright.ir.mesh import Symmetric
from tilewright.schedule.candidate import Runner

WARPS = 8
VECTOR_BYTES = 16  # that a thread reads or writes at once
VECTORS = 2  # of each rank that a thread has under way
TAKEN_BY_EACH = 4  # parts, about
MOST_BLOCKS = 8
DEPENDENT_LAUNCH = "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait\n"


@dataclass(frozen=True)
class Adders:
    """The kernel of some programs, which take parts of chunks in turn.

    Attributes:
        chunks: the memory of ranks.
        programs: how many there are.
        target: the device.
    """

    chunks: Chunks
    programs: int
    target: Target

    @property
    def block(self) -> int:
        """Elements that a program adds up at a time."""
        return 32 * WARPS * VECTORS * VECTOR_BYTES // self.chunks.dtype.size_bytes(1)

    @property
    def blocks(self) -> int:
        """Blocks that a program takes at a time."""
        return min(max(self.chunks.part // (self.block * TAKEN_BY_EACH * self.programs), 1), MOST_BLOCKS)

    @property
    def parts(self) -> int:
        """Parts of a chunk that programs take; of a shorter one the last are empty."""
        return -(-self.chunks.chunk * self.chunks.columns // (self.blocks * self.block))

    def text(self) -> KernelSource:
        """A module with the function `kernel`."""
        c, t, ranks = self.chunks, Text(), range(self.chunks.ranks)
        kind = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}[c.dtype.name]
        t.do("gdc_launch_dependents()")
        begin(t)
        t.do(f"rank = tl.load({OWN} + {RANK // 4}, volatile=True)")
        t.do(f"tiles += (epoch & 1) * {c.slot(c.ranks * c.part_room)}")
        t.do(f"place = (epoch & 1) * {c.slot(c.sums_room)} + rank * {c.part}")
        part, parts = self.blocks * self.block, self.parts
        t.do("seen = tl.program_id(0) * 0 - 1")
        taken(t, ADDED)
        with t.block(f"while taken < {c.count * parts}:"):
            t.do(f"chunk = taken // {parts}")
            with t.block("if chunk != seen:"):
                wait(t, c, False, "0", str(c.ranks), "chunk", "1")
            t.do("seen = chunk")
            t.do(f"first = chunk * {c.chunk * c.columns} + taken % {parts} * {part}")
            t.do(f"end = tl.minimum(chunk * {c.chunk} + {c.chunk}, {c.rows}) * {c.columns}")
            with t.block(f"for at in range(first, tl.minimum(first + {part}, end), {self.block}):"):
                t.do(f"i = at + tl.arange(0, {self.block})")
                t.do("exists = i < end")
                for r in ranks:
                    source = f"tiles + {r * c.slot(c.part_room)} + i"
                    t.do(f"x{r} = tl.load({source}, mask=exists, other=0.0).to(tl.float32)")
                t.do(f"y = ({' + '.join(f'x{r}' for r in ranks)}).to(tl.{kind})")
                for r in ranks:
                    t.do(f"tl.store(to{r} + place + i, y, mask=exists)")
            arrive(t, c, "chunk", parts, [f"of{r}" for r in ranks])
            taken(t, ADDED)
        t.do("gdc_wait()")  # what comes next takes the last kernel's end for that of all
        names = [OWN, LATE, "tiles", *(f"to{r}" for r in ranks), *(f"of{r}" for r in ranks)]
        head = f"{IMPORTS}{DEPENDENT_LAUNCH}\n\n@triton.jit\ndef kernel({', '.join(names)}):\n"
        return KernelSource(f"{head}{t}\n", t.numbers)

    def build(self) -> Built:
        """Its machine code."""
        c, ranks = self.chunks, range(self.chunks.ranks)
        pointer = pointer_type(c.dtype)
        kinds = {OWN: "*i32", LATE: "*i32", "tiles": pointer} | {f"to{r}": pointer for r in ranks}
        kinds |= {f"of{r}": "*i32" for r in ranks}
        return build(self.text(), kinds, SM_90, self.target.index, num_warps=WARPS, launch_pdl=True)

    def runner(self, memory: Symmetric) -> Runner:
        """A function that runs it, without sources or results of its own."""
        c, built = self.chunks, self.build()
        words = c.words(memory)
        tiles = c.elements(memory, memory.own, c.tiles, 2 * c.ranks * c.part_room)
        sums = [c.elements(memory, r, c.sums, 2 * c.sums_room) for r in range(c.ranks)]
        held: dict[int, torch.Tensor] = dict(enumerate([words[memory.own], memory.late, tiles, *sums, *words], SHARED))
        start = launcher(built.kernel, (self.programs,), self.target.index, built.numbers)
        return caller(start, pointers("source", held), 0, (), held, self.target)
