"""Copies between the memories of a host's ranks, by the copy engines, beside kernels: a second stream, flags, and waits for
them. Nothing here takes a multiprocessor for longer than a few µs.

Each rank has memory that all of its group reach, twice, for calls that take turns (channels):

    own words      epoch: calls that are over; the number of the call under way (epoch + 1); ns to wait for a rank; its place
    free flags     one of each rank: the number of the last call in which it had read all that was sent to it
    arrived flags  of each rank `FLAGS`, one for each piece that it sends in a call
    data           what ranks send

A rank sends by pushing: a copy into the receiver's data, and behind it, on the same stream, a copy of the word that has the
call's number into the receiver's flag. Copies of one stream follow one another, so the flag comes after the data; and unlike a
kernel, a copy needs no room on a multiprocessor, of which a persistent gemm has all. A kernel of one warp waits on the stream
of the kernels (acquire, system scope): it is alone on that stream, and what it waits for was issued before, on another stream
of another GPU, so it keeps nobody from coming.

Before a rank sends, it waits until all have read what the last call of this channel sent (`begin`). Behind all its reads a
rank says so to all, and counts the call (`end`), by a kernel that stores into the others' memory (release, system scope).
Numbers are kept in memory and compared by their difference, so a CUDA graph may be replayed, and they may wrap. Which channel a
call takes is counted on the host: ranks make the same calls in the same order, and a graph keeps the channel of its capture.

A wait ends after the limit: results are wrong then, a word that the host reads names the rank, and further waits end at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.candidates.triton.expressions.text import KernelSource
from tilewright.candidates.triton.runtime.cubin import check, driver
from tilewright.candidates.triton.runtime.module import IMPORTS, Built, arch_of, build, launcher
from tilewright.hardware.target import Target
from tilewright.ir.mesh import Symmetric
from tilewright.sizes import next_power_of_2

LINE = 128  # bytes: what a rank's flags have to themselves
EPOCH, CALL, LIMIT, PLACE = 0, 4, 16, 24  # places of the own words, in bytes
MOST_RANKS, FLAGS = 16, 32
FREE, ARRIVED, DATA = LINE, LINE * (1 + MOST_RANKS), 1 << 13  # places in a channel
CHANNELS = 2
MOST_BYTES = 1 << 30  # of a channel
LEAST_BYTES = 1 << 20

# $1 own words, $2 the host's word, $3 flags, $4 how many, $5 bytes from one to the next, $6 what is added to the epoch, $7 the
# rank of the first, $8 one that is not waited for, $9 whether the call begins here. Each of the first threads waits for one.
WAIT = (
    "{ .reg .pred q, w; .reg .b32 t, f, v; .reg .b64 a, x, y, z; mov.u32 t, %tid.x; "
    f"ld.global.b32 v, [$1+{EPOCH}]; add.s32 f, v, 1; setp.eq.u32 q, t, 0; setp.ne.and.u32 q, $9, 0, q; "
    f"@q st.global.b32 [$1+{CALL}], f; add.s32 v, v, $6; ld.global.b64 z, [$1+{LIMIT}]; "
    "setp.lt.u32 q, t, $4; setp.ne.and.u32 q, t, $8, q; mad.wide.u32 a, t, $5, $3; mov.u64 x, %globaltimer; "
    "L: mov.b32 f, v; @q ld.acquire.sys.global.b32 f, [a]; sub.s32 f, f, v; setp.ge.s32 w, f, 0; @w bra D; "
    "mov.u64 y, %globaltimer; sub.s64 y, y, x; setp.lt.s64 w, y, z; @w bra L; "
    "add.s32 t, t, $7; add.s32 t, t, 1; setp.gt.s64 w, z, 0; @w st.relaxed.sys.global.b32 [$2], t; "
    f"mov.b64 z, 0; st.relaxed.sys.global.b64 [$1+{LIMIT}], z; D: mov.b32 $0, 0; }}"
)
WAIT_TYPES = {"words": "*i32", "late": "*i32", "flags": "*i32"}
WAIT_NUMBERS = ("count", "stride", "more", "first", "without", "begins")


def _end(ranks: int) -> str:
    """$1 own words, $2 and on this rank's free flag with each rank. One thread counts the call, and tells all."""
    told = " ".join(f"@q st.release.sys.global.b32 [${2 + i}], v;" for i in range(ranks))
    return (
        f"{{ .reg .pred q; .reg .b32 t, v; mov.u32 t, %tid.x; setp.eq.u32 q, t, 0; ld.global.b32 v, [$1+{CALL}]; "
        f"@q st.global.b32 [$1+{EPOCH}], v; {told} mov.b32 $0, 0; }}"
    )


def _kernel(pointers: Sequence[str], numbers: Sequence[str], asm: str) -> KernelSource:
    """A kernel of one warp that is one statement of PTX."""
    given = ", ".join([*(f"{p}.to(tl.int64)" for p in pointers), *numbers])
    constraints = ",".join(["=r", *["l"] * len(pointers), *["r"] * len(numbers)])
    call = f"tl.inline_asm_elementwise({asm!r}, {constraints!r}, [{given}], tl.int32, is_pure=False, pack=1)"
    text = f"{IMPORTS}\n\n@triton.jit\ndef kernel({', '.join([*pointers, *numbers])}):\n    {call}\n"
    return KernelSource(text, {})


class Lane:
    """A stream beside torch's current one, for copies. They are begun through the CUDA driver, past torch: there may be dozens
    before the kernel that waits for others' is launched."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream, self._event = torch.cuda.Stream(self._device), torch.cuda.Event()
        kinds = ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self._copy = ctypes.CFUNCTYPE(*kinds)(("cuMemcpyDtoDAsync_v2", driver()))

    def follow(self) -> None:
        """Have what comes on it wait for all that the current stream has now."""
        self._event.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._event)

    def join(self) -> None:
        """Have the current stream wait for all that it has now."""
        self._event.record(self._stream)
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def copy(self, to: int, of: int, count: int) -> None:
        """Copy bytes between addresses on it; what is read must live until the current stream has joined.

        Raises:
            UnsupportedError: the driver does not.
        """
        check(self._copy(to, of, count, self._stream.cuda_stream), "cannot copy between ranks")

    def here(self, to: torch.Tensor, of: torch.Tensor) -> None:
        """Copy on the current stream."""
        to.copy_(of, non_blocking=True)


@dataclass(frozen=True)
class Sizes:
    """The memory of a group of ranks.

    Attributes:
        ranks: how many there are.
        data_bytes: what a rank receives in a call, at most.
    """

    ranks: int
    data_bytes: int

    @property
    def channel_bytes(self) -> int:
        """Bytes of a channel: data in a power of two, so that problems of about one size share memory."""
        return DATA + max(LEAST_BYTES, next_power_of_2(self.data_bytes))

    @property
    def bytes(self) -> int:
        """Bytes of a rank's memory, zeros at first."""
        return CHANNELS * self.channel_bytes

    def machine_code(self, target: Target) -> tuple[Built, Built]:
        """The kernels that wait for flags, and that end a call."""
        arch, ends = arch_of(target), [f"to{i}" for i in range(self.ranks)]
        waits = _kernel([*WAIT_TYPES], WAIT_NUMBERS, WAIT), WAIT_TYPES | dict.fromkeys(WAIT_NUMBERS, "i32")
        over = _kernel(["words", *ends], (), _end(self.ranks)), dict.fromkeys(["words", *ends], "*i32")
        first, second = (build(source, types, arch, target.index, num_warps=1) for source, types in (waits, over))
        return first, second


class Copies:
    """One rank's copies to the others, and its waits for theirs: the calls of a runner.

    Attributes:
        ranks, own: how many ranks there are, and this one's place.
        lane: the stream of the copies.
        late: a word that the host reads: one more than the place of a rank that was waited for in vain.
    """

    def __init__(self, memory: Symmetric, sizes: Sizes, target: Target, code: tuple[Built, Built]) -> None:
        self.ranks, self.own, self.lane = sizes.ranks, memory.own, lane(target.device)
        self._memory, self.late = memory, memory.late
        self._wait = launcher(code[0].kernel, (1,), target.index).run
        self._end = launcher(code[1].kernel, (1,), target.index).run
        each = sizes.channel_bytes
        self._channels = [[b[i * each : (i + 1) * each] for b in memory.buffers] for i in range(CHANNELS)]
        self._addresses = [[b.data_ptr() for b in c] for c in self._channels]
        for channel in self._channels:
            words = channel[self.own][:LINE].view(torch.int32)
            words[LIMIT // 4 : LIMIT // 4 + 2].view(torch.int64).fill_(int(1e9 * memory.limit_s))
            words[PLACE // 4].fill_(memory.own)
        self._at = 0

    def begin(self) -> None:
        """Begin a call: wait until all ranks have read what the last one of its channel sent. Then the lane may send."""
        self._at = next(self._memory.turns) % CHANNELS
        self._waits(FREE, self.ranks, LINE, 0, 0, self.ranks, 1)
        self.lane.follow()

    @property
    def words(self) -> torch.Tensor:
        """The channel of this rank in this call, from its own words on, in words."""
        return self._channels[self._at][self.own].view(torch.int32)

    def data(self, rank: int) -> torch.Tensor:
        """The data of a rank, as bytes: what is sent to it in this call."""
        return self._channels[self._at][rank][DATA:]

    def send(self, rank: int, place: int, of: torch.Tensor) -> None:
        """Copy a dense tensor into a rank's data, from a byte on, on the lane."""
        assert of.is_contiguous()
        self.lane.copy(self._addresses[self._at][rank] + DATA + place, of.data_ptr(), of.nbytes)

    def tell(self, rank: int, flag: int) -> None:
        """Set a flag of this rank with another one, behind what was sent to it."""
        here = self._addresses[self._at]
        self.lane.copy(here[rank] + ARRIVED + self.own * LINE + 4 * flag, here[self.own] + CALL, 4)

    def wait(self, rank: int, flag: int) -> None:
        """Have the current stream wait for a flag of a rank."""
        self._waits(ARRIVED + rank * LINE + 4 * flag, 1, LINE, 1, rank, self.ranks, 0)

    def wait_all(self, flag: int) -> None:
        """Have the current stream wait for a flag of all other ranks."""
        self._waits(ARRIVED + 4 * flag, self.ranks, LINE, 1, 0, self.own, 0)

    def _waits(self, place: int, *numbers: int) -> None:
        own = self._addresses[self._at][self.own]
        self._wait(own, self.late.data_ptr(), own + place, *numbers)

    def end(self) -> None:
        """End a call, of which the current stream has all reads: tell all ranks, once this one's copies are done, too."""
        self.lane.join()
        here = self._addresses[self._at]
        self._end(here[self.own], *(there + FREE + self.own * LINE for there in here))


lane = Lane  # which tests replace
