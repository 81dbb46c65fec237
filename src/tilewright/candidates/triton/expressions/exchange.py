"""Stores into the memory of other ranks, and the wait for theirs: the text that a product's epilogue and the kernel behind it
are given beside their own.

Each rank has memory that all of its group reach, in this order:

    own words     epoch: calls that are over; tiles stored; programs that are done; ns to wait for a rank
    region 0      what rank 0 sends: a line of flags, and two slots
    region 1, …   the same of the others

A call's epoch is the number of calls before it. A product stores its partial sums into its region of every rank that wants
them, in the slot of the epoch's last bit. The block that stores last sets the flags to epoch + 1 (release, system scope). The
kernel behind waits until all flags of its rank are there (acquire), and adds up the regions in order. Once all of its programs
have read the epoch, the call is counted: the next kernel that stores begins when this one has ended. Of a kernel that both
stores and waits (`runtime/gather.py`) each program has a flag of its own in the line.

Numbers are kept in memory, not passed, so that a CUDA graph may be replayed; they count up and are compared by their
difference, so that they may wrap. A rank is at most one call ahead of another, so a flag that is there is epoch + 1 or
epoch + 2; whatever else it holds is of a call before, of this problem or of another that shares the memory.

Two slots suffice. A rank stores for epoch e + 2 when its own kernel for e + 1 has ended. That one saw the flags that every rank
set in its product for e + 1, which runs behind its kernel for e: nobody reads the slot any more. So all ranks of a group must
make the same calls in the same order, each on one stream.

PTX ISA 9.0, chapter 8: a barrier of the block orders its threads' stores before thread 0's release, and release and acquire are
cumulative. So stores by other blocks, counted with `acq_rel` at system scope, come before the flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, runtime_checkable

import torch

from tilewright.candidates.triton.expressions.emit import Emitter
from tilewright.candidates.triton.expressions.printer import pointer_type
from tilewright.candidates.triton.expressions.text import Text
from tilewright.dtype import DType
from tilewright.ir.mesh import Symmetric
from tilewright.ir.types import TensorType
from tilewright.lowering.access import Access
from tilewright.schedule.candidate import Runner, Schedule
from tilewright.sizes import next_power_of_2

LINE = 128  # bytes: what a rank's flags have to themselves
FLAGS = LINE // 4
LEAST_SLOT = 1 << 12  # bytes
EPOCH, STORED, DONE, LIMIT = 0, 4, 8, 16  # places of the own words, in bytes
OWN, LATE = "own", "late"  # names of arguments: the own words, and a word that the host reads
SHARED = 1 << 16  # number of the first of these and of other ranks' memory among a kernel's sources


@dataclass(frozen=True)
class Exchange:
    """The memory of a group of ranks.

    Attributes:
        ranks: how many there are.
        slot_bytes: room for what a rank sends to another one in a call; a multiple of `LINE`.
    """

    ranks: int
    slot_bytes: int

    @property
    def region_bytes(self) -> int:
        """Bytes from one rank's region to the next."""
        return LINE + 2 * self.slot_bytes

    @property
    def bytes(self) -> int:
        """Bytes of a rank's memory, zeros at first."""
        return LINE + self.ranks * self.region_bytes

    def region(self, rank: int) -> int:
        """The place of what a rank sends, in bytes."""
        return LINE + rank * self.region_bytes

    def words(self, memory: Symmetric) -> torch.Tensor:
        """A rank's own words."""
        return memory.buffers[memory.own][:LINE].view(torch.int32)

    def prepare(self, memory: Symmetric) -> None:
        """Have kernels that wait in this memory do so for no longer than it says."""
        memory.buffers[memory.own][LIMIT : LIMIT + 8].view(torch.int64).fill_(int(1e9 * memory.limit_s))

    def sent(self, memory: Symmetric, dtype: DType) -> dict[int, torch.Tensor]:
        """The arguments of a product's kernel, by number: the own words, and this rank's region with each rank."""
        mine = self.region(memory.own)
        regions = [b[mine : mine + self.region_bytes].view(dtype.to_torch()) for b in memory.buffers]
        return dict(enumerate([self.words(memory), *regions], SHARED))

    def received(self, memory: Symmetric, dtype: DType) -> list[torch.Tensor]:
        """The regions of all ranks with this one."""
        mine = memory.buffers[memory.own]
        starts = map(self.region, range(self.ranks))
        return [mine[at : at + self.region_bytes].view(dtype.to_torch()) for at in starts]

    def arrival(self, dtype: DType, pointers: tuple[str, ...]) -> Arrival:
        """The wait of a kernel whose arguments for the regions are called so."""
        return Arrival(self, dtype, pointers)

    def slot_of(self, epoch: str, dtype: DType) -> str:
        """The place of an epoch's slot in a region, in elements."""
        size = dtype.bits // 8
        return f"({epoch} & 1) * {self.slot_bytes // size} + {LINE // size}"


@dataclass(frozen=True)
class Push:
    """A product's store into the memory of a group's ranks.

    Attributes:
        exchange: the memory.
        rows: rows of the result that each rank wants, of all of them in turn; 0 where each wants all.
        arrivals: tiles that are stored in a call.
        grants: the kernel behind may be launched while tiles are stored (programmatic dependent launch).
    """

    exchange: Exchange
    rows: int
    arrivals: int = 0
    grants: bool = False

    @property
    def names(self) -> list[str]:
        """The kernel's arguments: the own words, and for each rank of the group where this one's region lies there."""
        return [OWN, *(f"to{i}" for i in range(self.exchange.ranks))]

    def kinds(self, dtype: DType) -> dict[str, str]:
        """Triton's types of the arguments."""
        return {name: "*i32" if name == OWN else pointer_type(dtype) for name in self.names}

    def store(self, emitter: Emitter, access: Access) -> None:
        """Write the store of a tile, and the flags behind the last one."""
        t, tile = emitter.text, emitter.tile
        if self.grants:
            statement(t, "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "", [])
        epoch = t.v(f"{t.language}.load({OWN})")
        slot, value = t.v(self.exchange.slot_of(epoch, access.root.dtype)), emitter.value(access)
        for rank, name in enumerate(self.names[1:]):
            if self.rows:
                here = t.v(f"{tile.rows} // {self.rows} == {rank}")
                mask = here if tile.row_mask is None else t.v(f"{here} & {tile.row_mask}")
                emitter.tile = replace(tile, row_mask=mask)
            # Rows are counted from the product's first one, those that a rank wants from its own.
            first = rank * self.rows * access.root.shape[-1]
            emitter.store(access, f"{name} + ({slot} - {first})" if first else f"{name} + {slot}", value)
        emitter.tile = tile
        _told(t, _arrival(self), self.names, epoch)


@dataclass(frozen=True)
class Arrival:
    """The wait of a kernel for what the ranks of its group send. After `Symmetric.limit_s` it goes on without, and
    tells the host; further waits end at once, as a graph may hold hundreds.

    Attributes:
        exchange: the memory.
        dtype: type of what is sent.
        pointers: the kernel's arguments for the regions, in the order of ranks.
    """

    exchange: Exchange
    dtype: DType
    pointers: tuple[str, ...]

    KINDS: ClassVar[dict[str, str]] = {OWN: "*i32", LATE: "*i32"}
    by_rows: ClassVar[bool] = False

    def wait(self, t: Text, programs: int) -> None:
        """Write the wait, and point the arguments for the regions to this call's slots. The call is counted while others' sums
        travel: the product has ended, and every program knows the epoch when the last one counts."""
        t.do(f"epoch = {t.language}.load({OWN})")
        end_statement(t, programs)
        wait_statement(t, self.exchange)
        t.do(f"slot = {self.exchange.slot_of('epoch', self.dtype)}")
        for name in self.pointers:
            t.do(f"{name} += slot")

    def end(self, t: Text, programs: int) -> None:
        """Write nothing: the call is counted."""


@runtime_checkable
class Pushing(Protocol):
    """A product's plan of which the store may go to other ranks' memory."""

    def pushing(self) -> Sequence[Schedule]:
        """The most promising points at which it may; none where it may not."""
        ...

    def pushed(self, schedule: Schedule, push: Push) -> Running:
        """A function that gives the runner of a point, whose results are other ranks'."""
        ...


class Waits(Protocol):
    """The waits of a kernel, as text.

    Attributes:
        pointers: the kernel's arguments for what is sent.
        by_rows: it waits for the rows that it is about to read, and is begun while the product is at work; else it waits once,
            for all.
    """

    KINDS: ClassVar[dict[str, str]]
    by_rows: ClassVar[bool]

    @property
    def pointers(self) -> tuple[str, ...]: ...

    def wait(self, t: Text, programs: int) -> None:
        """Write the wait of so many programs for all, or what comes before all waits, and point the arguments to this call's
        slots."""
        ...

    def end(self, t: Text, programs: int) -> None:
        """Write what counts the call, where the last of so many programs is done, if it is not counted yet."""
        ...


@runtime_checkable
class WaitsByRows(Waits, Protocol):
    """Waits for some rows at a time.

    Attributes:
        extents: rows and columns of each of the arguments.
    """

    @property
    def extents(self) -> tuple[int, int]: ...

    def in_order(self, t: Text, program: str, rows: int, pieces: int) -> str:
        """Write the number of a program, of which `pieces` in turn have so many rows, in the order in which rows come."""
        ...

    def take(self, t: Text) -> None:
        """Write what takes the next part of the work, as `taken`."""
        ...

    def wait_for(self, t: Text, first: str | None, rows: int) -> None:
        """Write the wait for so many rows from a first one on, where `seen` does not say that they are there; None: for all of
        them."""
        ...


class Inbox(Protocol):
    """Memory into which other ranks store."""

    def prepare(self, memory: Symmetric) -> None:
        """Write the numbers that kernels find in this rank's memory."""
        ...

    def words(self, memory: Symmetric) -> torch.Tensor:
        """A rank's own words."""
        ...

    def received(self, memory: Symmetric, dtype: DType) -> list[torch.Tensor]:
        """The sources that ranks send, where they lie."""
        ...

    def arrival(self, dtype: DType, pointers: tuple[str, ...]) -> Waits:
        """The waits of a kernel whose arguments for what is sent are called so."""
        ...


@runtime_checkable
class Awaiting(Protocol):
    """A fusion's plan whose kernel may wait for what ranks send."""

    def awaiting(self, schedule: Schedule, inbox: Inbox, sent: Sequence[int]) -> Running:
        """A function that gives the runner of a point.

        Args:
            schedule: the point.
            inbox: the memory.
            sent: sources that ranks send, in their order.
        """
        ...


Running = Callable[[Mapping[int, torch.Tensor], Symmetric], Runner]  # given the constant sources by number, and the memory


def statement(t: Text, asm: str, kinds: str, given: Sequence[str]) -> None:
    """Write a statement of PTX for each thread: $1 and on are what is given, of these kinds (`r` 32 bits, `l` 64)."""
    constraints = ",".join(["=r", *kinds])
    where = f"{t.language}.inline_asm_elementwise"
    t.do(f"{where}({asm!r}, {constraints!r}, [{', '.join(given)}], {t.language}.int32, is_pure=False, pack=1)")


def _told(t: Text, asm: str, addresses: Sequence[str], epoch: str) -> None:
    """A statement of which $1 is the epoch, and addresses are $2 and on."""
    statement(t, asm, "r" + "l" * len(addresses), [epoch, *(f"{a}.to({t.language}.int64)" for a in addresses)])


def tell_statement(t: Text, flags: Sequence[str]) -> None:
    """Write what sets a flag with each rank, once all threads of the block have stored."""
    first = "{ .reg .pred q; .reg .b32 t; barrier.sync 0; mov.u32 t, %tid.x; setp.eq.u32 q, t, 0; "
    _told(t, f"{first}{_flags(2, len(flags))}", flags, "epoch")


def wait_statement(t: Text, exchange: Exchange, flag: str = "0") -> None:
    """Write the wait for a flag of each rank, that of this number in its line."""
    _told(t, _wait(exchange), [OWN, LATE, f"({OWN} + ({LINE // 4} + {flag}))"], "epoch")


def end_statement(t: Text, programs: int, before: str = "") -> None:
    """Write what counts a call, where the last of so many programs is done; `before`: what that one's first thread does, where
    `q` holds."""
    _told(t, _end(programs, before), [OWN], "epoch")


def _arrival(push: Push) -> str:
    """$2 own words, $3 and on the regions. The threads of a block meet; the first one counts the tile."""
    return (
        "{ .reg .pred q; .reg .b32 t, c; barrier.sync 0; mov.u32 t, %tid.x; setp.eq.u32 q, t, 0; mov.b32 c, -1; "
        f"@q atom.acq_rel.sys.global.add.u32 c, [$2+{STORED}], 1; setp.eq.u32 q, c, {push.arrivals - 1}; "
        f"@q st.relaxed.sys.global.b32 [$2+{STORED}], 0; {_flags(3, push.exchange.ranks)}"
    )


def _flags(first: int, count: int) -> str:
    """The end of a statement, in which the thread where `q` holds sets the flags at so many operands from a first one on."""
    flags = " ".join(f"@q st.relaxed.sys.global.b32 [${first + i}], t;" for i in range(count))
    return f"add.s32 t, $1, 1; @q fence.acq_rel.sys; {flags} mov.b32 $0, 0; }}"


def _wait(exchange: Exchange) -> str:
    """$2 own words, $3 the host's word, $4 the first rank's flag. Each of the first threads waits for one rank, and then all
    meet."""
    return (
        "{ .reg .pred q, w; .reg .b32 t, f, v; .reg .b64 a, x, y, z; mov.u32 t, %tid.x; "
        f"ld.global.b64 z, [$2+{LIMIT}]; setp.lt.u32 q, t, {exchange.ranks}; "
        f"mad.wide.u32 a, t, {exchange.region_bytes}, $4; mov.u64 x, %globaltimer; add.s32 v, $1, 1; "
        "L: mov.b32 f, v; @q ld.acquire.sys.global.b32 f, [a]; sub.s32 f, f, v; setp.lt.u32 w, f, 2; @w bra D; "
        "mov.u64 y, %globaltimer; sub.s64 y, y, x; setp.lt.s64 w, y, z; @w bra L; "
        "add.s32 t, t, 1; setp.gt.s64 w, z, 0; @w st.relaxed.sys.global.b32 [$3], t; "
        f"mov.b64 z, 0; st.relaxed.sys.global.b64 [$2+{LIMIT}], z; "
        "D: barrier.sync 0; mov.b32 $0, 0; }"
    )


def _end(programs: int, before: str = "") -> str:
    """$2 own words. Every program has read the epoch when the last one counts."""
    return (
        "{ .reg .pred q; .reg .b32 t, c; barrier.sync 0; mov.u32 t, %tid.x; setp.eq.u32 q, t, 0; mov.b32 c, -1; "
        f"@q atom.acq_rel.gpu.global.add.u32 c, [$2+{DONE}], 1; setp.eq.u32 q, c, {programs - 1}; "
        f"{before}@q st.relaxed.gpu.global.b32 [$2+{DONE}], 0; add.s32 t, $1, 1; @q st.relaxed.gpu.global.b32 [$2+{EPOCH}], t; "
        "mov.b32 $0, 0; }"
    )


def slot_bytes(tensor: TensorType) -> int:
    """The room for partial sums of a type: a power of two, so that problems of about one size share memory."""
    return max(LEAST_SLOT, next_power_of_2(tensor.size_bytes))
