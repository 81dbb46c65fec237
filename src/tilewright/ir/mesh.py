"""Meshes of ranks: how a tensor lies on one, and the exchange of values between ranks.

A *mesh* names axes of ranks, as `jax.sharding.Mesh` and torch's `DeviceMesh` do: `tp=4`, or `dp=2, tp=4`, whose ranks are
counted with the last axis fastest. A *placement* says for each axis of a tensor which mesh axes split it, and over which axes
its values are partial sums. Placement and mesh together are Shardy's and DTensor's notion of a sharding.

A program for one rank has the same text on every rank. Its collective operations (`ir/ops/collective.py`) meet their peers
through the `Team` that the evaluation runs in.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from tilewright.errors import InputError, TilewrightError, TypeMismatchError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from tilewright.ir.graph import Node


Result = TypeVar("Result")


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid.

    Attributes:
        axes: the name and the number of ranks of each axis; the last one varies fastest from rank to rank.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names) or not all(name.isidentifier() for name in names):
            raise InputError(f"mesh axes {', '.join(map(repr, names))}", hint='distinct identifiers, as in "dp=2,tp=4"')
        if any(size < 1 for _, size in self.axes):
            raise InputError(f"a mesh of {self}", hint="each axis has one rank or more")

    @staticmethod
    def parse(text: str) -> Mesh:
        """The mesh written as `tp=4` or `dp=2,tp=4`.

        Raises:
            InputError: the text is not of that form.
        """
        axes: list[tuple[str, int]] = []
        for part in text.split(","):
            name, _, size = (p.strip() for p in part.partition("="))
            if not size.isdecimal():
                raise InputError(f"no mesh: {text!r}", hint='names and numbers of ranks, as in "dp=2,tp=4"')
            axes.append((name, int(size)))
        return Mesh(tuple(axes))

    def __str__(self) -> str:
        """The form that `parse` reads."""
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    def ranks_of(self, over: Sequence[str]) -> int:
        """The number of ranks along some axes.

        Raises:
            InputError: the mesh has no such axis.
        """
        sizes = dict(self.axes)
        for name in over:
            if name not in sizes:
                raise InputError(f"the mesh {self} has no axis {name!r}", hint=f"one of {', '.join(sizes)}")
        return math.prod(sizes[name] for name in over)

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's place on each axis."""
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return found

    def index(self, rank: int, over: Sequence[str]) -> int:
        """A rank's place among the ranks of its group along some axes, the last of `over` varying fastest."""
        sizes, at = dict(self.axes), self.coordinates(rank)
        place = 0
        for name in over:
            place = place * sizes[name] + at[name]
        return place

    def group(self, rank: int, over: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from a rank along some axes alone, ordered by `index`."""
        same = {name: at for name, at in self.coordinates(rank).items() if name not in over}
        peers = [r for r in range(self.size) if all(self.coordinates(r)[n] == at for n, at in same.items())]
        return tuple(sorted(peers, key=lambda r: self.index(r, over)))


@dataclass(frozen=True)
class Placement:
    """A way for one tensor to lie on a mesh.

    Attributes:
        splits: for each axis of the tensor the mesh axes that split it, the first one outermost; () leaves it whole.
        partial: mesh axes over which the values are summands of the tensor.
    """

    splits: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names):
            raise TypeMismatchError(f"a mesh axis is used twice: {self}")

    def __str__(self) -> str:
        """The text, such as `[tp, ]`, or `[, dp] partial tp`."""
        shown = ", ".join("*".join(names) for names in self.splits)
        return f"[{shown}]" + (f" partial {', '.join(self.partial)}" if self.partial else "")

    @property
    def rank(self) -> int:
        """The number of the tensor's axes."""
        return len(self.splits)

    @property
    def names(self) -> tuple[str, ...]:
        """The mesh axes that it uses."""
        return (*itertools.chain(*self.splits), *self.partial)

    @staticmethod
    def whole(rank: int) -> Placement:
        """The placement of a tensor of `rank` axes that every rank holds."""
        return Placement(((),) * rank)

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """The shape of one rank's part.

        Raises:
            TypeMismatchError: the number of axes differs.
            UnsupportedError: ranks do not divide an extent.
        """
        if len(shape) != len(self.splits):
            raise TypeMismatchError(f"the placement {self} is of {len(self.splits)} axes, the tensor {list(shape)} is not")
        found: list[int] = []
        for extent, names in zip(shape, self.splits, strict=True):
            ranks = mesh.ranks_of(names)
            if extent % ranks:
                hint = f"pad the axis to a multiple of {ranks}, or leave it whole"
                raise UnsupportedError(
                    f"{ranks} ranks do not divide an extent of {extent}", where=f"placement {self}", hint=hint
                )
            found.append(extent // ranks)
        return tuple(found)

    def split(self, tensor: torch.Tensor, mesh: Mesh) -> list[torch.Tensor]:
        """Each rank's part. A partial tensor lies whole with the first rank of each group, and is 0 with the others.

        Raises:
            TypeMismatchError: the number of axes differs.
            UnsupportedError: ranks do not divide an extent.
        """
        return [self.part(tensor, mesh, rank) for rank in range(mesh.size)]

    def part(self, tensor: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
        """One rank's part, as `split` has it."""
        part = tensor
        for axis, (names, extent) in enumerate(zip(self.splits, self.local_shape(tensor.shape, mesh), strict=True)):
            part = part.narrow(axis, mesh.index(rank, names) * extent, extent)
        return part if mesh.index(rank, self.partial) == 0 else part.new_zeros(part.shape)

    def joined(self, parts: Sequence[torch.Tensor], mesh: Mesh) -> torch.Tensor:
        """The tensor of which ranks hold these parts: the inverse of `split`, partial sums added in float64 or s64.

        Raises:
            TypeMismatchError: there is not one part a rank, or ranks that should hold the same bits do not.
        """
        import torch

        if len(parts) != mesh.size:
            raise TypeMismatchError(f"{len(parts)} parts on a mesh of {mesh.size} ranks", where=f"placement {self}")
        others = tuple(name for name, _ in mesh.axes if name not in self.names)
        for rank, part in enumerate(parts):
            first = mesh.group(rank, others)[0]
            if not _same_bits(part, parts[first]):
                raise TypeMismatchError(f"ranks {first} and {rank} hold other values of one part", where=f"placement {self}")
        held = {rank: part for rank, part in enumerate(parts) if mesh.index(rank, others) == 0}
        if self.partial:
            wide = torch.float64 if parts[0].dtype.is_floating_point else torch.int64
            sums = {r: sum(parts[p].to(wide) for p in mesh.group(r, self.partial)) for r in held}
            held = {r: cast("torch.Tensor", sums[r]).to(parts[0].dtype) for r in held if mesh.index(r, self.partial) == 0}
        shape = [d * mesh.ranks_of(names) for d, names in zip(parts[0].shape, self.splits, strict=True)]
        out = parts[0].new_empty(shape)
        for rank, part in held.items():
            at = tuple(
                slice(mesh.index(rank, names) * d, (mesh.index(rank, names) + 1) * d)
                for d, names in zip(part.shape, self.splits, strict=True)
            )
            out[at] = part
        return out


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    if a is b:
        return True
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    x, y = (t.new_empty(t.shape).copy_(t).view(-1) if t.numel() == 1 else t.contiguous().view(-1) for t in (a, b))
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))  # one element counts as contiguous, whatever its stride


@dataclass(frozen=True)
class Symmetric:
    """Memory of the ranks of a group that each of them reaches, all zeros when it was made.

    Attributes:
        buffers: bytes of each rank, ordered by `Mesh.index`, as this one reaches them.
        own: the place of this rank among them.
        late: one s32 that this rank's device can write and its host read: one more than the place of a rank that was waited
            for in vain.
        group: torch's name of the group; "" where it is none of torch's.
        limit_s: seconds that a kernel waits for another rank.
        turns: numbers of the calls that take turns in it, which each rank counts by itself.
    """

    buffers: tuple[torch.Tensor, ...]
    own: int
    late: torch.Tensor
    group: str = ""
    limit_s: float = 5.0
    turns: Iterator[int] = field(default_factory=itertools.count, compare=False)


class Team(Protocol):
    """One rank among its peers: what a collective operation runs in.

    Attributes:
        mesh: the mesh of all ranks.
        rank: this one.
    """

    mesh: Mesh
    rank: int

    def exchange(self, value: torch.Tensor, over: Sequence[str], fold: Callable[[list[torch.Tensor]], Result]) -> Result:
        """`fold` of the values that the ranks along some axes give at the same time, ordered by `Mesh.index`.

        Every rank of the group passes a function that gives the same; the result is not written to.
        """
        ...

    def run(self, node: Node, value: torch.Tensor, *, overwritten: bool = False) -> torch.Tensor:
        """The collective operation of a node on this rank's value, which may be `overwritten` if so said, by the library of the
        team's own that does it."""
        ...

    def symmetric(self, over: Sequence[str], size: int) -> Symmetric:
        """Memory of so many bytes a rank that the ranks along some axes reach; the same at each call. All of them ask together.

        Raises:
            UnsupportedError: they do not reach each other's.
        """
        ...


_team: ContextVar[Team | None] = ContextVar("team", default=None)


def team() -> Team:
    """The team of the evaluation under way.

    Raises:
        UnsupportedError: there is none: a program for several ranks runs on one alone.
    """
    found = _team.get()
    if found is None:
        hint = "run it on a mesh: --mesh, `compile(…, mesh=…)`, or `evaluate_mesh`"
        raise UnsupportedError("a collective operation needs its peers", hint=hint)
    return found


@contextlib.contextmanager
def in_team(member: Team) -> Generator[None]:
    """A context in which collective operations run as this rank's."""
    token = _team.set(member)
    try:
        yield
    finally:
        _team.reset(token)


@dataclass
class _Round:
    """One collective of one group: what its ranks have given so far, and what came of it."""

    given: dict[int, torch.Tensor]
    result: object = None
    over: bool = False


class _Board:
    """The place where simulated ranks meet."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.changed = threading.Condition()
        self.rounds: dict[tuple[tuple[int, ...], int], _Round] = {}
        self.busy = mesh.size  # ranks that do not wait for others
        self.error: BaseException | None = None

    def rests(self) -> None:
        """One rank less is busy; called with `changed` held. Ranks that wait while none is busy would wait for ever."""
        self.busy -= 1
        if self.busy == 0 and self.error is None and self.rounds:
            group, _ = min(self.rounds)
            self.error = UnsupportedError(
                f"ranks wait for each other for ever, rank {group[0]} and its group among them",
                hint="all ranks run the same collective operations in the same order",
            )
        self.changed.notify_all()


class _Simulated:
    """One rank of a board."""

    def __init__(self, board: _Board, rank: int) -> None:
        self.mesh, self.rank, self._board = board.mesh, rank, board
        self._groups: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._turns = Counter[tuple[int, ...]]()

    def exchange(self, value: torch.Tensor, over: Sequence[str], fold: Callable[[list[torch.Tensor]], Result]) -> Result:
        names, board = tuple(over), self._board
        if names not in self._groups:
            self._groups[names] = self.mesh.group(self.rank, names)
        group = self._groups[names]
        self._turns[group] += 1
        key = group, self._turns[group]
        with board.changed:
            if board.error is not None:
                raise board.error
            current = board.rounds.setdefault(key, _Round({}))
            current.given[self.rank] = value
            last = len(current.given) == len(group)
            if not last:
                board.rests()
                while not current.over and board.error is None:
                    board.changed.wait()
                if not current.over:
                    raise cast("BaseException", board.error)
                return cast("Result", current.result)
        result = fold([current.given[r] for r in group])  # once for all
        with board.changed:
            current.result, current.over = result, True
            del board.rounds[key]
            board.busy += len(group) - 1
            board.changed.notify_all()
        return result

    def run(self, node: Node, value: torch.Tensor, *, overwritten: bool = False) -> torch.Tensor:
        return cast("torch.Tensor", node.op.evaluate(node, [value]))

    def symmetric(self, over: Sequence[str], size: int) -> Symmetric:
        raise UnsupportedError("simulated ranks have no memory that others reach", hint="run it on ranks: torchrun")


def simulate(mesh: Mesh, work: Callable[[int], Result]) -> list[Result]:
    """The results of `work(rank)` for every rank of a mesh, each in a thread of its own, whose collectives meet.

    Raises:
        TilewrightError: a rank failed, or ranks wait for each other for ever.
    """
    board, results = _Board(mesh), cast("list[Result]", [None] * mesh.size)

    def one(rank: int) -> None:
        try:
            with in_team(_Simulated(board, rank)):
                results[rank] = work(rank)
        except BaseException as error:
            with board.changed:
                board.error = board.error or error
        finally:
            with board.changed:
                board.rests()

    contexts = [copy_context() for _ in range(mesh.size)]
    threads = [threading.Thread(target=c.run, args=(one, r), name=f"rank {r}", daemon=True) for r, c in enumerate(contexts)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if board.error is not None:
        raise board.error
    return results


def split_feeds(
    feeds: Mapping[str, torch.Tensor], placements: Mapping[str, Placement], mesh: Mesh
) -> list[dict[str, torch.Tensor]]:
    """Each rank's inputs: parts of what `placements` names, all of the others.

    Raises:
        InputError: a value cannot be split so.
    """
    per_rank: list[dict[str, torch.Tensor]] = [{} for _ in range(mesh.size)]
    for name, value in feeds.items():
        placement = placements.get(name, Placement.whole(value.dim()))
        try:
            parts = placement.split(value, mesh)
        except TilewrightError as error:
            raise type(error)(error.what, where=f"input {name!r}", hint=error.hint) from error
        for feed, part in zip(per_rank, parts, strict=True):
            feed[name] = part
    return per_rank
