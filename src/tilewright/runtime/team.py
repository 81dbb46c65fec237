"""The ranks of a running job as a team (`ir/mesh.py`): their values travel through torch.distributed.

Groups are our own, one for each set of mesh axes that a program's collective operations run along: gloo on CPUs, NCCL on GPUs.
So no collective of the user's stands between ours, and what waits for a rank that is gone ends by itself. What ranks agree on
goes through a store (`peers.py`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from tilewright.errors import InputError, PeerError, UnsupportedError, counted
from tilewright.hardware.detect import detect
from tilewright.ir.graph import Node
from tilewright.ir.mesh import Mesh, Result, Symmetric, in_team
from tilewright.ir.ops import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from tilewright.ir.ops.functions import by_bits
from tilewright.runtime.calls import RING, WORDS, Board, Line, new_file, shared
from tilewright.runtime.peers import CONTROL_S, Peers, first_line
from tilewright.runtime.symmetric import forbid_multicast, reached

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented
    from torch.distributed.device_mesh import DeviceMesh

LIMIT_S = 5.0  # to wait for a rank that lives; $TILEWRIGHT_PEER_LIMIT says otherwise
SLICE_S = 0.2  # after which a rank that waits looks whether the others live
MAKING_S = 30.0  # to make a group of ranks that all are there
GLOO, NCCL = "gloo", "nccl"
HOST_BYTES = 255
BROKEN = ("gloo/transport", "pair closure", "onnection")  # in what gloo and NCCL say of a connection
# torch 2.13 has other names for these, which 2.11 does not know, and warns of those
_GATHER = getattr(dist, "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor")
_SCATTER = getattr(dist, "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor")
SUMMED = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8})
"""The types that gloo and NCCL add up. Neither keeps a NaN among maxima, so maxima and minima are ours."""


class ProcessTeam:
    """One process among the ranks of a mesh.

    Attributes:
        mesh, rank, device: the mesh, this rank's place in it, and where it computes.
        limit_s: seconds to wait for a rank that lives.
        peers: signs of life of the others, and agreement with them.
        links: by what values travel, and between how many hosts.
        on_host: this rank's place among those of its host, and how many these are.
        programs: the names of the programs that were compiled for it, in order: the same on all ranks.
        spent_s: seconds that this rank spent in collective operations; on a GPU while `timing` alone, when each waits for what
            goes before it.
    """

    mesh: Mesh
    rank: int
    device: str
    limit_s: float
    peers: Peers
    links: str
    on_host: tuple[int, int]
    programs: list[str]
    spent_s: float
    timing: bool

    def __init__(self, mesh: Mesh, ranks: Sequence[int], device: str, limit_s: float) -> None:
        """`ranks` are the global ranks of the mesh, in its order. All of them make their team at the same time."""
        self.mesh, self.rank, self.device, self.limit_s = mesh, ranks.index(dist.get_rank()), device, limit_s
        self._global = tuple(ranks)
        self._groups: dict[tuple[str, ...], _Group] = {}
        self._symmetric: dict[tuple[tuple[str, ...], int], Symmetric] = {}
        self._error: PeerError | None = None
        self._turn = threading.RLock()
        self.spent_s, self.timing, self.programs = 0.0, False, []
        self.peers = Peers(self._connector(), self.rank, mesh.size)
        hosts = self.peers.gathered(socket.gethostname(), str, "the hosts")
        self._hosts = len(set(hosts))
        self.on_host = hosts[: self.rank].count(hosts[self.rank]), hosts.count(hosts[self.rank])
        self.links = f"{GLOO if device == 'cpu' else NCCL}, {counted(self._hosts, 'host')}"

    def _connector(self) -> Callable[[], TCPStore]:
        """A function that opens a connection to the store that rank 0 keeps."""
        control = _made(self._global, GLOO, timedelta(seconds=MAKING_S if self._came() else CONTROL_S))
        own = socket.gethostname()
        kept = _store("localhost", 0, is_master=True) if self.rank == 0 else None
        said = torch.zeros(HOST_BYTES + 8, dtype=torch.uint8)
        if kept is not None:
            words = kept.port.to_bytes(8, "little") + own.encode()[:HOST_BYTES].ljust(HOST_BYTES, b"\0")
            said = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        dist.broadcast(said, self._global[0], group=control)
        words = bytes(said.tolist())
        port, host = int.from_bytes(words[:8], "little"), words[8:].rstrip(b"\0").decode()
        self._kept = kept
        return partial(_store, "localhost" if host == own else host, port, is_master=False)

    def _came(self) -> bool:
        """Wait until all ranks come here, and tell whether that is known.

        Each sends each of the others a byte on the job's own group: the end of a rank breaks a connection of every other one,
        which torch does not notice while a group is made. Of a job that has more ranks than the mesh, or no gloo, it is not
        known.

        Raises:
            PeerError: a rank has ended, or did not come in ten minutes.
        """
        if dist.get_world_size() != len(self._global) or "cpu:gloo" not in str(dist.get_backend_config()):
            return False
        came = torch.zeros(len(self._global), dtype=torch.uint8)
        work = dist.all_to_all_single(came, torch.ones_like(came), async_op=True)
        assert work is not None
        until, why = time.monotonic() + CONTROL_S, ""
        while not why:
            try:
                work.wait(timedelta(seconds=SLICE_S))
                return True
            except RuntimeError as error:
                if work.is_completed():  # the job's own limit may be shorter than ours
                    late = "timed out" in str(error).lower()
                    if not late and not any(words in str(error) for words in BROKEN):
                        raise
                    why = "did not come to compile in time" if late else "ended before it came to compile"
                elif time.monotonic() > until:
                    why = f"did not come to compile in {CONTROL_S:g} s"
        away = [r for r, g in enumerate(self._global) if not came[g] and r != self.rank]
        who = f"rank {away[0]}" if len(away) == 1 else f"one of the ranks {', '.join(map(str, away)) or 'of the job'}"
        raise PeerError(f"{who} {why}", hint="see what that rank printed, and start the job again")

    def prepare(self, overs: Iterable[tuple[str, ...]]) -> None:
        """Make the groups along these sets of mesh axes. All ranks name the same."""
        new = sorted(set(overs) - set(self._groups))
        words = self._shared(len(new)) if new else None
        for i, over in enumerate(new):
            members = self.mesh.group(self.rank, over)
            ranks = sorted(self._global[r] for r in members)
            within, several = timedelta(seconds=self.limit_s + 1), len(members) > 1
            made = _made(ranks, GLOO if self.device == "cpu" else NCCL, within) if several else None
            lines: Board | dist.ProcessGroup | None = None
            if several and words is not None:
                count = self.mesh.size * RING * WORDS
                lines = Board(words[i * count : (i + 1) * count], self.rank)
            elif several:
                lines = _made(ranks, GLOO, within)
            self._groups[over] = _Group(members, tuple(ranks.index(self._global[r]) for r in members), made, lines)

    def _shared(self, groups: int) -> memoryview | None:
        """Memory of all ranks for the lines of so many groups; None where they have none, as on several hosts."""
        path, words = "", None
        if self._hosts == 1 and self.rank == 0:
            with suppress(OSError):
                path = new_file(groups * self.mesh.size)
        try:
            path = self.peers.gathered(path, str, "the memory that ranks share")[0]
            with suppress(OSError):
                words = shared(path) if path else None
            return words if all(self.peers.gathered(words is not None, bool, "whether ranks share memory")) else None
        finally:
            if path and self.rank == 0:
                Path(path).unlink()

    @contextmanager
    def working(self) -> Generator[None]:
        """A context in which collective operations run as this rank's, and whose errors the other ranks are told of.

        One thread is in it at a time: which of two calls came first may differ by rank, and their operations would meet.

        Raises:
            InputError: another thread of this rank is in it, on which both fail, and all ranks.
            PeerError: this rank or another one failed before. Others may still wait in a collective operation of the call that
                failed, so none of this team runs again.
        """
        with self.peers.telling():
            for (over, _), memory in self._symmetric.items():
                if self._error is None and (late := int(memory.late)):
                    rank = self._group(over).members[late - 1]
                    self._error = PeerError(f"rank {rank} did not send its values in time", hint=f"see what rank {rank} does")
            if self._error is None and self.peers.own.failed:
                self._error = PeerError(self.peers.own.failed, hint="compile the program again on every rank")
            if self._error is not None:
                raise PeerError(self._error.what, where=self._error.where, hint=self._error.hint)
            if not self._turn.acquire(blocking=False):
                hint = "one call at a time, in the same order on every rank; then compile the program again on every rank"
                raise InputError(f"two threads call programs on the mesh {self.mesh} at the same time", hint=hint)
            try:
                with in_team(self):
                    yield
                    if self.peers.own.failed:  # by another thread: this call may have met its call on other ranks
                        raise PeerError(self.peers.own.failed)
            finally:
                self._turn.release()

    def at(self, place: str) -> None:
        """Say where this rank is."""
        self.peers.own.place = place

    def begin(self, program: int, given: Mapping[tuple[str, ...], int], parts: int = 0) -> None:
        """Begin a call of a program, by its place in `programs`: before values travel along axes that `given` names, ranks see
        that all of them are in this call.

        Args:
            program: the program.
            given: by the axes of its operations the digest of what lies whole along them (`calls.digest_of`); 0 for none.
            parts: the digest of the whole tensors of which its other inputs are parts; 0 where that is not known.
        """
        for over, digest in given.items():
            group = self._group(over)
            group.calls += 1
            group.due = line = Line(group.calls, program, digest, parts)
            if group.lines is not None and not isinstance(group.lines, Board):  # on their way while this rank computes
                every = torch.empty(group.size, WORDS, dtype=torch.int64)
                work = _GATHER(every.reshape(-1), torch.tensor(line), group=group.lines, async_op=True)
                group.sent = cast("dist.Work", work), every

    def see(self, overs: Iterable[tuple[str, ...]]) -> None:
        """See that the ranks along these axes which came to their calls are in this one, where that was not looked at yet. That
        goes before a kernel which sends values by itself.

        Raises:
            PeerError: one is in another call, failed or is gone.
        """
        for group in map(self._group, overs):
            line, group.due = group.due, None
            if line is not None:
                with self._ending():
                    self._see(line, group, time.perf_counter())

    def exchange(self, value: torch.Tensor, over: Sequence[str], fold: Callable[[list[torch.Tensor]], Result]) -> Result:
        group = self._group(over)
        return fold([value] if group.size == 1 else self._gathered(value, group))

    def run(self, node: Node, value: torch.Tensor, *, overwritten: bool = False) -> torch.Tensor:
        """The collective operation of a node by the backend's own, where it has it: sums are then rounded at each addition.
        A value that may be `overwritten` is where they are made."""
        op = node.op
        assert isinstance(op, Collective)
        group = self._group(op.over)
        travels = group.size > 1 and value.numel() > 0
        bits = value.dtype.itemsize * 8 == node.dtype.bits  # else codes lie one to a byte, and a sum is to wrap
        if travels and isinstance(op, AllGather) and op.axis == 0 and group.in_order:  # as it comes, it is the result
            every = value.new_empty((group.size * value.shape[0], *value.shape[1:]))
            self._meet(partial(_GATHER, _bytes(every), _bytes(value.contiguous())), group)
            return every
        if travels and isinstance(op, AllGather):
            parts = self._gathered(value, group)
            return by_bits(lambda *x: torch.cat(x, op.axis), *parts)
        if travels and isinstance(op, AllToAll):
            mine = self._chunks(value, op.split, group)
            out = torch.empty_like(mine)
            self._meet(partial(dist.all_to_all_single, _bytes(out), _bytes(mine)), group)
            return by_bits(lambda *x: torch.cat(x, op.join), *(out[i] for i in group.order))
        if travels and bits and isinstance(op, AllReduce) and op.fn == "add" and value.dtype in SUMMED:
            out = value if overwritten and value.is_contiguous() else value.clone(memory_format=torch.contiguous_format)
            self._meet(partial(dist.all_reduce, out), group)
            return out
        if travels and bits and isinstance(op, ReduceScatter) and op.fn == "add" and value.dtype in SUMMED:
            mine = self._chunks(value, op.axis, group)
            out = torch.empty_like(mine[0])
            self._meet(partial(_SCATTER, out.reshape(-1), mine.reshape(-1)), group)
            return out
        return cast("torch.Tensor", op.evaluate(node, [value]))

    def symmetric(self, over: Sequence[str], size: int) -> Symmetric:
        key = tuple(over), size
        if key not in self._symmetric:
            group = self._group(over)
            if group.made is None:
                raise UnsupportedError(f"one rank alone along {', '.join(over)} shares no memory")
            if not self.links.endswith("1 host"):
                raise UnsupportedError(f"GPUs share memory within a host, the mesh is on {self.links.partition(', ')[2]}")
            buffers = reached(group.made, group.order, size, self.device, self.peers)
            late = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            at = group.members.index(self.rank)
            self._symmetric[key] = Symmetric(tuple(buffers), at, late, group.made.group_name, self.limit_s)
        return self._symmetric[key]

    def count_alike(self) -> None:
        """Have all ranks count calls in the memory that they share from one number on, after some that one of them did not
        come to the end of."""
        for memory in self._symmetric.values():
            own = next(memory.turns)
            for _ in range(max(self.peers.gathered(own, int, "the calls in shared memory")) - own):
                next(memory.turns)

    def barrier(self) -> None:
        """Wait for all ranks."""
        everywhere = tuple(name for name, _ in self.mesh.axes)
        self.prepare([everywhere])
        self.exchange(torch.zeros(1, device=self.device), everywhere, len)

    def _group(self, over: Sequence[str]) -> _Group:
        names = tuple(over)
        self.prepare([names])
        return self._groups[names]

    def _chunks(self, value: torch.Tensor, axis: int, group: _Group) -> torch.Tensor:
        """The parts of a value along an axis, one behind the other, for the ranks of a group in torch's order."""
        if axis == 0 and group.in_order and value.is_contiguous():
            return value.reshape(group.size, value.shape[0] // group.size, *value.shape[1:])
        parts = value.tensor_split(group.size, axis)
        mine = value.new_empty((group.size, *parts[0].shape))
        for place, part in zip(group.order, parts, strict=True):
            mine[place].copy_(part)
        return mine

    def _gathered(self, value: torch.Tensor, group: _Group) -> list[torch.Tensor]:
        """The values of all ranks of a group, in the mesh's order."""
        mine = value.contiguous()
        every = value.new_empty((group.size, *value.shape))
        if value.numel():
            self._meet(partial(_GATHER, _bytes(every), _bytes(mine)), group)
        return [every[i] for i in group.order]

    def _meet(self, start: Callable[..., dist.Work | None], group: _Group) -> None:
        """Run a collective operation of torch's, and wait for it no longer than this team waits.

        Raises:
            PeerError: a rank failed, is gone, or did not come in time.
        """
        own = self.peers.own
        own.meetings += 1
        began = time.perf_counter()
        if why := self.peers.fault():
            self._error = PeerError(why)
            raise self._error
        if self.timing and self.device != "cpu":
            torch.cuda.synchronize(self.device)
            began = time.perf_counter()
        line, group.due = group.due, None
        if line is not None:
            with self._ending():
                self._see(line, group, began)
        # On a GPU it goes on the current stream, with no event between two streams; NCCL's own watchdog ends what takes longer
        # than the group's limit. It raises what the operation itself does not take.
        work = start(group=group.made, async_op=self.device == "cpu")
        try:
            with self._ending():
                if work is not None:
                    self._waited(work, group, began)
                elif self.timing:
                    torch.cuda.synchronize(self.device)
                if line is not None and isinstance(group.lines, Board) and self.device == "cpu":
                    self._compare(line, group, [group.lines.read(r, line.number) for r in group.members], came=True)
        finally:
            self.spent_s += time.perf_counter() - began

    @contextmanager
    def _ending(self) -> Generator[None]:
        """A context whose errors end this team. That of a connection names the rank that is gone; any other one is as it was.

        gloo has no type of its own for errors of a connection: they are told by their words, or by a rank that is gone.
        """
        try:
            yield
        except PeerError as error:
            self._error = error
            raise
        except RuntimeError as error:
            if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
                raise  # of memory or of a device: this rank's own
            why = self.peers.after_break()
            if not why and not any(words in str(error) for words in BROKEN):
                raise
            self._error = PeerError(why or f"the connection to another rank broke: {first_line(error)}")
            raise self._error from error

    def _see(self, line: Line, group: _Group, began: float) -> None:
        """Say this rank's line of a call, and compare it with those of the ranks that came to it: on several hosts all of them.

        Raises:
            PeerError: one is of another call.
        """
        if isinstance(group.lines, Board):
            group.lines.write(line)
            self._compare(line, group, [group.lines.read(r, line.number) for r in group.members])
        elif group.sent is not None:
            work, every = group.sent
            self._waited(work, group, began)
            said = every.tolist()
            self._compare(line, group, [Line(*said[i]) for i in group.order], came=True)

    def _compare(self, line: Line, group: _Group, said: Sequence[Line | None], *, came: bool = False) -> None:
        """See that ranks of a group are in one call; with `came` all of them are to be in it by now."""
        for r, theirs in zip(group.members, said, strict=True):
            if (theirs is None and not came) or (theirs is not None and theirs.agrees(line)):
                continue
            (a, here), (b, there) = sorted([(self.rank, line), (r, theirs or line)])
            if theirs is None:
                raise PeerError(f"rank {r} did not say which program it is in", hint="compile the program again on every rank")
            if here.program != there.program:
                what = f"rank {a} calls {self._program(here)} while rank {b} calls {self._program(there)}"
                raise PeerError(what, hint="the same programs in the same order on every rank")
            whose = "with other values of an input that is to lie whole on both"
            if here.given == there.given:
                whose = "with parts of other tensors"
            what = f"ranks {a} and {b} call {self._program(here)} {whose}"
            hint = "the same calls in the same order on every rank; broadcast an input that each computes by itself"
            raise PeerError(what, hint=hint)

    def _program(self, line: Line) -> str:
        """A line's program in words: which it is of those that were compiled, and its name."""
        return f"program {line.program + 1} ({self.programs[line.program]})"

    def _waited(self, work: dist.Work, group: _Group, began: float) -> None:
        while True:
            try:
                work.wait(timedelta(seconds=SLICE_S))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            if why := self.peers.fault():
                raise PeerError(why)
            if time.perf_counter() - began > self.limit_s:
                raise self._late(group)

    def _late(self, group: _Group) -> PeerError:
        """The rank of a group that did not come."""
        own = self.peers.own
        place = own.place or "a collective operation"
        behind = min(group.members, key=lambda r: (self.peers.state(r).meetings, r == self.rank))
        if behind == self.rank or self.peers.state(behind).meetings >= own.meetings:
            return PeerError(f"{place} did not end in {self.limit_s:g} s, though all ranks came to it")
        at = self.peers.state(behind).place
        hint = f"see what rank {behind} does" + (f"; it was last at {at}" if at else "")
        return PeerError(f"rank {behind} did not reach {place} in {self.limit_s:g} s", hint=hint)


class _Group:
    """The ranks along some axes.

    Attributes:
        members: ranks of the mesh, in its order.
        order: torch's place of each.
        in_order: these are the places from 0 on.
        made: torch's group; None for one rank alone.
        lines: by what ranks say which call they are in: memory that they share, or another group of torch's.
        calls: how many calls were made with it.
        due: this rank's line of the call under way, until values travel.
        sent: what gathers all ranks' lines of it, and where they will be.
    """

    def __init__(
        self,
        members: tuple[int, ...],
        order: tuple[int, ...],
        made: dist.ProcessGroup | None,
        lines: Board | dist.ProcessGroup | None,
    ) -> None:
        self.members, self.order, self.made, self.lines, self.size = members, order, made, lines, len(members)
        self.in_order = order == tuple(range(len(order)))
        self.calls, self.due = 0, cast("Line | None", None)
        self.sent: tuple[dist.Work, torch.Tensor] | None = None


_made_of: Counter[str] = Counter()  # how many groups of ours these ranks have


def _made(ranks: Sequence[int], backend: str, within: timedelta) -> dist.ProcessGroup:
    """A group of torch's, made by its own ranks alone.

    Raises:
        PeerError: they did not all come to make it.
    """
    whose = "_".join(map(str, sorted(ranks)))
    try:
        with _named(f"tilewright_{whose}_{_made_of[whose]}"):
            made = dist.new_group(sorted(ranks), timeout=within, backend=backend, use_local_synchronization=True)
    except RuntimeError as error:
        late = "timeout" in str(error).lower()
        if not isinstance(error, dist.DistError) and not late and not any(words in str(error) for words in BROKEN):
            raise
        what = f"ranks {', '.join(map(str, sorted(ranks)))} did not meet in {within.total_seconds():g} s: {first_line(error)}"
        raise PeerError(what, hint="all of them compile for the same meshes, in the same order") from error
    _made_of[whose] += 1
    assert isinstance(made, dist.ProcessGroup)
    return made


@contextmanager
def _named(name: str) -> Generator[None]:
    """A context in which torch gives a group that this thread makes this name.

    By itself it counts the groups that a process is in, of which some ranks may have more than others: of the user's, or of
    another mesh. Then they wait for each other under different names.
    """
    torchs: Any = dist.distributed_c10d
    with _making_names:
        its_own = getattr(torchs, "_hash_ranks_to_str", None)  # other versions of torch may have none
        if its_own is not None and its_own is not _name_of:
            _of_torch.append(its_own)
            torchs._hash_ranks_to_str = _name_of
    _given.name = name
    try:
        yield
    finally:
        _given.name = None


def _name_of(*given: object) -> str:
    """The name of a group of torch's: ours, where this thread makes one of ours."""
    return getattr(_given, "name", None) or _of_torch[-1](*given)


_given, _making_names = threading.local(), threading.Lock()
_of_torch: list[Callable[..., str]] = []


def _store(host: str, port: int, *, is_master: bool) -> TCPStore:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

    return TCPStore(host, port, None, is_master, timedelta(seconds=60), wait_for_workers=False)


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes, which every backend moves."""
    return t.reshape(-1).view(torch.uint8)


_teams: dict[tuple[Mesh, tuple[int, ...], str], ProcessTeam] = {}
_making = threading.Lock()


def team_of(given: object, device: str | None) -> ProcessTeam:
    """The team of this process for a mesh: a torch `DeviceMesh`, a `Mesh` of all ranks of the job, or its text ("tp=2").

    The ranks are those that torch.distributed knows; where it was not initialised and the environment is torchrun's, it is.

    Raises:
        InputError: it is no mesh, of other ranks, or there is no job.
        PeerError: ranks run in other circumstances.
    """
    mesh, ranks = mesh_of(given)
    where = detect(device).device if device is not None else _device(given)
    initialise(where)
    count = dist.get_world_size()
    ranks = tuple(range(count)) if ranks is None else ranks
    if len(ranks) != mesh.size:
        raise InputError(f"a mesh of {mesh} on {count} ranks", hint=f"{mesh.size} ranks: torchrun --nproc-per-node {mesh.size}")
    if dist.get_rank() not in ranks:
        raise InputError(f"rank {dist.get_rank()} is not in the mesh {mesh}", hint="call it on the mesh's ranks alone")
    with _making:
        key = mesh, ranks, where
        found = _teams.get(key)
        if found is not None and found.peers.own.failed:
            found.peers.leave(together=True)
            found = None
        if found is None:
            found = _teams[key] = ProcessTeam(mesh, ranks, where, _limit_s())
        return found


def mesh_of(given: object) -> tuple[Mesh, tuple[int, ...] | None]:
    """A mesh, and the global ranks in its order; None for all of them.

    Raises:
        InputError: it is no mesh.
    """
    if isinstance(given, Mesh):
        return given, None
    if isinstance(given, str):
        return Mesh.parse(given), None
    if hasattr(given, "mesh_dim_names") and hasattr(given, "mesh"):
        found = cast("DeviceMesh", given)
        names = found.mesh_dim_names or tuple(f"axis{i}" for i in range(found.mesh.dim()))
        return Mesh(tuple(zip(names, found.mesh.shape, strict=True))), tuple(found.mesh.flatten().tolist())
    raise InputError(f"a mesh of type {type(given).__name__}", where="mesh", hint='a torch DeviceMesh, or "tp=2"')


def initialise(device: str) -> None:
    """Have torch.distributed know the ranks, from torchrun's environment if nobody did.

    Raises:
        InputError: there is no job.
    """
    if dist.is_initialized():
        return
    job, backend = os.environ.get("TILEWRIGHT_JOB"), "cpu:gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    if not {"RANK", "WORLD_SIZE"} <= set(os.environ):
        hint = "torchrun --nproc-per-node 2 program.py, or torch.distributed.init_process_group"
        raise InputError("a mesh needs a process for each rank, and there is one alone", where="mesh", hint=hint)
    if device != "cpu":
        torch.cuda.set_device(device)
        forbid_multicast()
    if job:  # the command line started the ranks
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, init_method=f"file://{job}", rank=rank, world_size=count)
    else:
        dist.init_process_group(backend)


def _device(given: object) -> str:
    kind = getattr(given, "device_type", "cpu")
    if kind == "cpu":
        return "cpu"
    if kind != "cuda":
        raise UnsupportedError(f"a mesh of {kind} devices", hint="cpu or cuda")
    return f"cuda:{os.environ.get('LOCAL_RANK', torch.cuda.current_device())}"


def _limit_s() -> float:
    given = os.environ.get("TILEWRIGHT_PEER_LIMIT", "")
    try:
        found = float(given) if given else LIMIT_S
    except ValueError:
        found = 0.0
    if not found > 0:
        raise InputError(f"TILEWRIGHT_PEER_LIMIT={given!r}", hint="seconds to wait for another rank, such as 5")
    return found
