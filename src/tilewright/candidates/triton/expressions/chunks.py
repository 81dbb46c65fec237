"""Partial sums of many rows in the memory of the ranks that own them: where they lie, and the text of stores and waits.

Each rank owns as many rows of the result, which are cut into chunks. A product stores its tiles where the owner of their rows
adds them up, chunk by chunk; where all ranks want the sums, the owner stores them back, chunk by chunk. A rank's memory, which
all of its group reach:

    own words     epoch: calls that are over; the call that gave up; programs that are done; this rank; ns to wait for another;
                  parts of the last kernel's work that programs took, and of the one that adds up
    counters      of a chunk and an owner, tiles that this rank has stored; of a chunk, parts whose sums it has stored
    flags         of a chunk and a rank: its tiles are here; its sums are here
    tiles         two slots, of each rank the rows that this one owns
    sums          two slots of the whole result, where all ranks want it

As in `exchange.py`, epochs lie in memory, so that a CUDA graph may be replayed, and calls use slots in turn. Who stores a
chunk's last tile, or its last sums, sets the chunk's flag to epoch + 1 (release, system scope); kernels behind wait for the
flags of the rows that they read (acquire). A rank is at most one call ahead of another, so a flag that is there is epoch + 1 or
epoch + 2; whatever else it holds is of a call before, of this problem or of another that shares the memory.

Two slots suffice. A rank begins a product when its last kernel of the call before has ended, and that one, having begun behind
its predecessors, ends behind them. So a store for epoch e + 2 comes after this rank's wait in call e + 1 for the tiles of all
ranks, or for sums of all, each of which its rank stored after its last kernel of call e had ended.

No kernel waits for what may not go on. Products wait for nobody. Kernels behind are launched when all blocks of the product are
at work, and so on; they wait for products, or for sums that others' kernels make, which are at work or ahead of those that
wait. After `Symmetric.limit_s` a wait ends without; the call gives up, so that its other programs do not wait as long each, and
further waits end at once, as a graph may hold hundreds.

PTX ISA 9.0: a thread that waits for its bulk copies sees their writes (9.7.9.25.4), a completed copy is followed by an implicit
proxy fence, and release and acquire are cumulative (chapter 8), over barriers of the block and counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar

import torch

from tilewright.candidates.triton.expressions.exchange import (
    EPOCH,
    LATE,
    LIMIT,
    LINE,
    OWN,
    end_statement,
    slot_bytes,
    statement,
)
from tilewright.candidates.triton.expressions.text import Text
from tilewright.dtype import DType
from tilewright.ir.mesh import Symmetric
from tilewright.ir.types import TensorType

MOST_CHUNKS = 32
GAVE_UP, RANK, TAKEN, ADDED = 4, 12, 24, 28  # places of own words, in bytes
COUNTERS = LINE


@dataclass(frozen=True)
class Chunks:
    """The memory of a group of ranks.

    Attributes:
        ranks: how many there are.
        rows, columns: extents of the part of the result that a rank owns.
        dtype: what travels.
        chunk: rows of a chunk; the last one may have fewer.
        spread: all ranks want the sums, which their owners store back.
        shared: each rank owns all rows: tiles go to every one.
    """

    ranks: int
    rows: int
    columns: int
    dtype: DType
    chunk: int
    spread: bool
    shared: bool = False

    @property
    def count(self) -> int:
        """Chunks of a rank's rows."""
        return -(-self.rows // self.chunk)

    @property
    def part(self) -> int:
        """Elements that a rank owns."""
        return self.rows * self.columns

    @property
    def part_room(self) -> int:
        """Bytes for what a rank sends to another one in a call."""
        return slot_bytes(TensorType(self.dtype, (self.rows, self.columns)))

    @property
    def sums_room(self) -> int:
        """Bytes for the sums of all rows; 0 where they stay with their owners."""
        return slot_bytes(TensorType(self.dtype, (self.ranks * self.rows, self.columns))) if self.spread else 0

    @property
    def sum_counters(self) -> int:
        """The place of counters of sums, in bytes."""
        return COUNTERS + 4 * MOST_CHUNKS * self.ranks

    @property
    def flags(self) -> tuple[int, int]:
        """The places of flags of tiles and of sums, in bytes."""
        first = self.sum_counters + 4 * MOST_CHUNKS
        return first, first + 4 * MOST_CHUNKS * self.ranks

    @property
    def tiles(self) -> int:
        """The place of tiles, in bytes."""
        return -(-(self.flags[1] + 4 * MOST_CHUNKS * self.ranks) // LINE) * LINE

    @property
    def sums(self) -> int:
        """The place of sums, in bytes."""
        return self.tiles + 2 * self.ranks * self.part_room

    @property
    def bytes(self) -> int:
        """Bytes of a rank's memory, zeros at first. Problems that need as many share it, and one's slots are the other's: so
        those where all ranks want the sums, whose slots lie elsewhere, need a line more than any of those where none does."""
        return self.sums + 2 * self.sums_room + (LINE if self.spread else 0)

    def prepare(self, memory: Symmetric) -> None:
        """Write the numbers that kernels find in this rank's memory."""
        mine = memory.buffers[memory.own]
        mine[LIMIT : LIMIT + 8].view(torch.int64).fill_(int(1e9 * memory.limit_s))
        mine[RANK : RANK + 4].view(torch.int32).fill_(memory.own)

    def words(self, memory: Symmetric) -> list[torch.Tensor]:
        """The memory of each rank, as words."""
        return [b[: self.tiles].view(torch.int32) for b in memory.buffers]

    def elements(self, memory: Symmetric, rank: int, first: int, size: int) -> torch.Tensor:
        """Bytes of a rank's memory, as what travels."""
        return memory.buffers[rank][first : first + size].view(self.dtype.to_torch())

    def sent(self, memory: Symmetric) -> list[torch.Tensor]:
        """The slots of this rank's tiles with each rank, as far as the second one's end."""
        first, size = self.tiles + memory.own * self.part_room, (self.ranks + 1) * self.part_room
        return [self.elements(memory, r, first, size) for r in range(self.ranks)]

    def slot(self, room: int) -> int:
        """Elements from a slot to the next one, of so many bytes each."""
        return room // self.dtype.size_bytes(1)


@dataclass(frozen=True)
class Inbox:
    """The memory that a kernel behind reads: tiles of all ranks, of the rows that its rank owns; or the sums of all rows."""

    chunks: Chunks
    of_sums: bool

    def prepare(self, memory: Symmetric) -> None:
        """See `Chunks.prepare`."""
        self.chunks.prepare(memory)

    def received(self, memory: Symmetric, dtype: DType) -> list[torch.Tensor]:
        """The sources that ranks send, where they lie in the first slot."""
        c, own = self.chunks, memory.own
        if self.of_sums:
            return [c.elements(memory, own, c.sums, 2 * c.sums_room)]
        first, size = c.tiles, (c.ranks + 1) * c.part_room
        return [c.elements(memory, own, first + r * c.part_room, size) for r in range(c.ranks)]

    def words(self, memory: Symmetric) -> torch.Tensor:
        """A rank's own words."""
        return self.chunks.words(memory)[memory.own]

    def arrival(self, dtype: DType, pointers: tuple[str, ...]) -> ChunkArrival:
        """The wait of a kernel whose arguments for what is sent are called so."""
        return ChunkArrival(self.chunks, self.of_sums, pointers)


@dataclass(frozen=True)
class ChunkArrival:
    """The waits of a kernel for the chunks whose rows it reads; see `Inbox` and `exchange.Arrival`."""

    chunks: Chunks
    of_sums: bool
    pointers: tuple[str, ...]

    KINDS: ClassVar[dict[str, str]] = {OWN: "*i32", LATE: "*i32"}
    by_rows: ClassVar[bool] = True

    @property
    def extents(self) -> tuple[int, int]:
        """Rows and columns of each of the arguments."""
        return self.chunks.rows * (self.chunks.ranks if self.of_sums else 1), self.chunks.columns

    def wait(self, t: Text, programs: int) -> None:
        """Write what comes before all waits: the epoch, and this call's slots."""
        c = self.chunks
        begin(t)
        t.do(f"slot = (epoch & 1) * {c.slot(c.sums_room if self.of_sums else c.ranks * c.part_room)}")
        for name in self.pointers:
            t.do(f"{name} += slot")

    def in_order(self, t: Text, program: str, rows: int, pieces: int) -> str:
        """Write the number of a program, of which `pieces` in turn have so many rows, in the order in which rows come: a chunk
        of each rank."""
        c = self.chunks
        if not self.of_sums or c.rows % c.chunk or c.chunk % rows:
            return program
        each = c.chunk // rows * pieces
        chunk, owner = t.v(f"{program} // {each * c.ranks}"), t.v(f"{program} // {each} % {c.ranks}")
        return t.v(f"({owner} * {c.count} + {chunk}) * {each} + {program} % {each}")

    def wait_for(self, t: Text, first: str | None, rows: int) -> None:
        """Write the wait for so many rows from a first one on, where `seen` does not say that they are there; None: for all of
        them."""
        c = self.chunks
        if first is None:
            with t.block("if seen != -2:"):
                wait(t, c, self.of_sums, "0", str(c.ranks), "0", str(c.count))
            t.do("seen = -2")
            return
        last = t.v(f"tl.minimum({first} + {rows - 1}, {self.extents[0] - 1})")
        if not self.of_sums:
            chunk, end = t.v(f"{first} // {c.chunk}"), t.v(f"{last} // {c.chunk}")
            owner, owners, key = "0", str(c.ranks), end
        else:
            owner, end_owner = t.v(f"{first} // {c.rows}"), t.v(f"{last} // {c.rows}")
            one = t.v(f"{owner} == {end_owner}")  # else of all chunks of some
            chunk = t.v(f"tl.where({one}, {first} % {c.rows} // {c.chunk}, 0)")
            end = t.v(f"tl.where({one}, {last} % {c.rows} // {c.chunk}, {c.count - 1})")
            owners, key = t.v(f"{end_owner} - {owner} + 1"), t.v(f"{end_owner} * {c.count} + {end}")
        with t.block(f"if ({key} != seen) | ({chunk} != {end}) | ({owners} != {'1' if self.of_sums else owners}):"):
            wait(t, c, self.of_sums, owner, owners, chunk, t.v(f"{end} - {chunk} + 1"))
        t.do(f"seen = {key}")

    def take(self, t: Text) -> None:
        """Write what takes the next part of the work, as `taken`."""
        taken(t, TAKEN)

    def end(self, t: Text, programs: int) -> None:
        """Write what counts the call, where the last of so many programs is done."""
        # What comes next takes this kernel's end for that of those ahead. Nobody takes work any more.
        nothing = " ".join(f"@q st.relaxed.gpu.global.b32 [$2+{place}], 0;" for place in (TAKEN, ADDED))
        end_statement(t, programs, f"@q griddepcontrol.wait; {nothing} ")


def taken(t: Text, place: int) -> None:
    """Write what takes the next part of a kernel's work. Programs that began while the product was at work, on the few SMs that
    are left, take what comes first; those that begin behind it the rest."""
    t.do(f"taken = {t.language}.atomic_add({OWN} + {place // 4}, 1, sem='relaxed')")


def begin(t: Text) -> None:
    """Write what reads the epoch: not from a cache of the SM, which may know it from a kernel before."""
    t.do(f"epoch = {t.language}.load({OWN}, volatile=True)")


def wait(t: Text, chunks: Chunks, of_sums: bool, owner: str, owners: str, chunk: str, count: str) -> None:
    """Write the wait for some chunks of some ranks, each from a first one on."""
    given = ["epoch", f"{OWN}.to(tl.int64)", f"{LATE}.to(tl.int64)", owner, owners, chunk, count]
    statement(t, _wait(chunks, chunks.flags[of_sums]), "rllrrrr", given)


def _wait(chunks: Chunks, flags: int) -> str:
    """$1 epoch, $2 own words, $3 the host's word, $4 and $5 ranks, $6 and $7 chunks. A thread waits for every so many-th flag;
    then all meet."""
    return (
        "{ .reg .pred q, w; .reg .b32 i, n, o, c, f, v, s; .reg .b64 a, x, y, z; "
        f"mov.u32 i, %tid.x; mov.u32 s, %ntid.x; mul.lo.s32 n, $5, $7; add.s32 v, $1, 1; ld.global.b64 z, [$2+{LIMIT}]; "
        "mov.u64 x, %globaltimer; A: setp.ge.s32 q, i, n; @q bra D; div.u32 o, i, $7; rem.u32 c, i, $7; add.s32 o, o, $4; "
        f"add.s32 c, c, $6; mad.lo.s32 c, c, {chunks.ranks}, o; mad.wide.u32 a, c, 4, $2; "
        f"L: ld.acquire.sys.global.b32 f, [a+{flags}]; sub.s32 f, f, v; setp.lt.u32 w, f, 2; @w bra N; "
        f"ld.relaxed.gpu.global.b32 f, [$2+{GAVE_UP}]; setp.eq.u32 w, f, v; @w bra N; "
        "mov.u64 y, %globaltimer; sub.s64 y, y, x; setp.lt.s64 w, y, z; @w bra L; "
        "add.s32 o, o, 1; setp.gt.s64 w, z, 0; @w st.relaxed.sys.global.b32 [$3], o; "
        f"st.relaxed.gpu.global.b32 [$2+{GAVE_UP}], v; mov.b64 z, 0; st.relaxed.sys.global.b64 [$2+{LIMIT}], z; "
        "N: add.s32 i, i, s; bra A; D: barrier.sync 0; mov.b32 $0, 0; }"
    )


def arrive(t: Text, chunks: Chunks, chunk: str, parts: int, ranks: list[str]) -> None:
    """Write what counts a part of a chunk whose sums are stored, and tells all ranks behind the last one of so many."""
    given = ["epoch", f"{OWN}.to(tl.int64)", chunk, *(f"{r}.to(tl.int64)" for r in ranks)]
    statement(t, _arrival(chunks, parts), "rlr" + "l" * len(ranks), given)


def _arrival(chunks: Chunks, parts: int) -> str:
    """$1 epoch, $2 own words, $3 the chunk, $4 and on the memory of the ranks. The threads of a block meet; the first one
    counts."""
    flags = " ".join(
        f"add.s64 b, ${4 + i}, a; @q st.relaxed.sys.global.b32 [b+{chunks.flags[1]}], t;" for i in range(chunks.ranks)
    )
    return (
        "{ .reg .pred q; .reg .b32 t, c, m; .reg .b64 a, b; barrier.sync 0; mov.u32 t, %tid.x; setp.eq.u32 q, t, 0; "
        f"mov.b32 c, -1; mad.wide.u32 a, $3, 4, $2; @q atom.acq_rel.sys.global.add.u32 c, [a+{chunks.sum_counters}], 1; "
        f"setp.eq.u32 q, c, {parts - 1}; @q st.relaxed.sys.global.b32 [a+{chunks.sum_counters}], 0; "
        f"@q fence.acq_rel.sys; ld.global.b32 m, [$2+{RANK}]; mad.lo.s32 m, $3, {chunks.ranks}, m; mul.wide.u32 a, m, 4; "
        f"add.s32 t, $1, 1; {flags} mov.b32 $0, 0; }}"
    )


# Of a warpgroup whose stores of a tile are in memory the first thread counts the tile, and is told whether it is the chunk's
# last one. $1 own words, $2 the place of the counter in bytes, $3 the last count.
COUNT = (
    "{ .reg .pred q; .reg .b32 t, c; .reg .b64 a; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.u32 q, t, 0; "
    "mov.b32 c, -1; cvt.u64.u32 a, $2; add.s64 a, a, $1; @q atom.acq_rel.sys.global.add.u32 c, [a], 1; setp.eq.u32 q, c, $3; "
    "@q st.relaxed.sys.global.b32 [a], 0; @q fence.acq_rel.sys; selp.b32 $0, 1, 0, q; }"
)
# Behind that one it sets the flag with a rank that wants the chunk. $1 own words, $2 the rank's memory, $3 whether it is the
# last one, $4 the place of the first rank's flag.
PUBLISH = (
    "{ .reg .pred q; .reg .b32 m, e; .reg .b64 a, b; setp.ne.u32 q, $3, 0; mov.b32 m, 0; mov.b32 e, 0; "
    f"@q ld.global.b32 m, [$1+{RANK}]; @q ld.relaxed.gpu.global.b32 e, [$1+{EPOCH}]; add.s32 e, e, 1; "
    "mul.wide.u32 a, m, 4; cvt.u64.u32 b, $4; add.s64 a, a, b; add.s64 a, a, $2; @q st.relaxed.sys.global.b32 [a], e; }"
)
STORED = "cp.async.bulk.wait_group 0;"  # a thread's copies have been written, not read alone
STATEMENTS = sha256(f"{COUNT} {PUBLISH} {STORED}".encode()).hexdigest()[:12]  # which Triton's cache does not know
