"""Operations between ranks and the product beside them, in pieces that overlap: while one piece is multiplied, another travels.

A product whose rows are gathered begins with this rank's own; the others are pushed by each rank into the memory of all, and
are multiplied as they come. A product whose sums are reduced is made in pieces; each is pushed to the rank that adds it up
while the next one is multiplied, and one generated kernel adds up the summands of all ranks in their order, with one rounding,
and goes on with what the gemm's stores say. Where two ranks both want the sums, each pushes its pieces to the other one, and
both add up all rows: no more bytes travel than if sums were sent back. Pushes are copies (`triton/runtime/copies.py`), which
take no multiprocessor.
Results go to their places where a kernel writes into given memory (`schedule.candidate.writer_of`), which all generated ones
do on GPUs; a library's are copied.

With `via=library` the team's own operations (NCCL, gloo) move the pieces, on a second stream where there are streams.

The pieces are problems of one rank alone, which a job's ranks search together (`runtime/agreement.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import prod
from typing import TYPE_CHECKING, cast

import torch

from tilewright.dtype import BF16, F16, F32
from tilewright.hardware.target import Target
from tilewright.ir.build import convert, map_
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.mesh import team
from tilewright.ir.ops import AllReduce, Param, ReduceScatter
from tilewright.ir.types import TensorType
from tilewright.lowering.gathered import Gathered, gathering
from tilewright.lowering.pieces import joined, kernels_of, offered, own_of, whole_of
from tilewright.lowering.rows import Rows, rows_of
from tilewright.lowering.stages import Stage, Stages
from tilewright.schedule.candidate import (
    GEMM,
    GPU,
    Candidate,
    Kernel,
    Runner,
    Schedule,
    Unsupported,
    writer_of,
)
from tilewright.schedule.problem import AnyProblem, FusionProblem, Problem, fusion_of

if TYPE_CHECKING:
    from tilewright.candidates.triton.runtime.copies import Copies

PUSH, LIBRARY = "push", "library"
GATHER, SCATTER, REDUCE = "gather", "scatter", "reduce"
ONCE = "once"  # a reduction where ranks send each other all that they have
CHUNKS = {GATHER: {PUSH: (1, 2), LIBRARY: (2,)}, SCATTER: {PUSH: (1, 2), LIBRARY: (2,)}}
CHUNKS[REDUCE] = {PUSH: (2, 4), LIBRARY: (2, 4)}
FEWEST_ROWS, FEWEST_OF_PIECE = 256, 32  # on a GPU: what is shorter begins for longer than it travels
MOST_RANKS = 16
SUMMAND = 1 << 16  # number of the first rank's sums among the values that a piece reads


@dataclass(frozen=True)
class Piece:
    """A problem of some rows.

    Attributes:
        rows: the problem.
        places: for each of its sources the index among the whole problem's values (`Stages`), or `SUMMAND` and a rank.
    """

    rows: Rows
    places: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A product with operations between ranks before or behind it.

    Attributes:
        problem, target: what is done, and where.
        kind: what the operations do.
        over, ranks: names of the mesh axes, and how many ranks there are along them.
        before, product, tail: its stages: fusions of this rank and gathers; what multiplies; what follows a reduction.
        met: the first operation between ranks, over a stand-in.
        results: the place of each result among the stages' values.
        gathered: the operands that are gathered.
    """

    problem: Problem
    target: Target
    kind: str
    over: tuple[str, ...]
    ranks: int
    before: tuple[Stage, ...]
    product: Stage
    met: Node
    tail: tuple[Stage, ...]
    results: tuple[int, ...]
    gathered: tuple[Gathered, ...] = ()

    @property
    def multiplied(self) -> Problem:
        """The product of this rank alone."""
        assert isinstance(self.product.what, Problem)
        return self.product.what

    @property
    def total(self) -> int:
        """The place of reduced sums among the values."""
        return len(self.problem.types) + 1

    @property
    def data_bytes(self) -> int:
        """Bytes that a rank receives in a call, its own share counted."""
        if self.kind == GATHER:
            return self.gathered[-1].end
        whole = self.multiplied.outputs[0]
        size = whole.dtype.to_torch().itemsize * whole.elements
        return 2 * size if self.kind == REDUCE else size

    @cached_property
    def points(self) -> dict[Schedule, tuple[Piece, ...]]:
        """The points, and the pieces of each in the order in which they are built."""
        from tilewright.candidates.triton.runtime.copies import MOST_BYTES

        rows, found = self.multiplied.M, dict[Schedule, tuple[Piece, ...]]()
        cuda = self.target.kind == "cuda"
        for via, several in CHUNKS[self.kind].items():
            for chunks in several:
                each, rest = divmod(rows, self.ranks * chunks)
                few = not each or (cuda and each < FEWEST_OF_PIECE)
                if rest or few or (via == PUSH and (not cuda or self.data_bytes > MOST_BYTES)):
                    continue
                found[Schedule.of(via=via, chunks=chunks)] = tuple(self._pieces(via, each))
        return found

    def _pieces(self, via: str, each: int) -> Iterable[Piece]:
        """The pieces of one point, of which each rank has so many rows: fusions before, the product, what adds up, what
        follows."""
        for stage in self.before:
            if isinstance(stage.what, FusionProblem):
                yield Piece(Rows(stage.what, {}), stage.places)
        yield Piece(rows_of(self.multiplied, each * self.ranks if self.kind == REDUCE else each), self.product.places)
        if self.kind == GATHER:
            return
        if self.at_once(via):
            yield self._sum(each * self.ranks, whole=True)
            return
        if via == PUSH:
            yield self._sum(each, whole=self.kind == SCATTER)
        if self.kind == REDUCE or via == LIBRARY:
            for stage in self.tail:
                assert isinstance(stage.what, FusionProblem)
                yield Piece(rows_of(stage.what, each * self.ranks if self.kind == REDUCE else each), stage.places)

    def at_once(self, via: str) -> bool:
        """Tell whether ranks that all want the sums send each other all that they have, and add up all rows."""
        return self.kind == REDUCE and via == PUSH and self.ranks == 2

    def _sum(self, rows: int, *, whole: bool) -> Piece:
        """The sum over ranks, rounded once, of some rows; if it is the `whole` of what is left, with what follows."""
        of_each = self.met.tensor
        given = [Node(Param(i, t)) for i, t in enumerate(self.problem.types)]
        summands = [Node(Param(SUMMAND + r, of_each)) for r in range(self.ranks)]
        total = convert(reduce(lambda a, b: map_("add", a, b), (convert(p, F32) for p in summands)), of_each.dtype)
        roots = [total]
        if whole:
            values = [*given, total, total]  # the product's own sums, which nobody reads, and those of all
            for stage in self.tail:
                assert isinstance(stage.what, FusionProblem)
                reads = {n: values[stage.places[n.op.index]] for n in toposort(stage.what.roots) if isinstance(n.op, Param)}
                values += substitute(stage.what.roots, reads)
            roots = [values[i] for i in self.results]
        region, order = fusion_of([*given, *summands], roots)
        places = tuple(cast("Param", n.op).index for n in order)
        weights = tuple(i < SUMMAND and self.problem.weights[i] for i in places)
        return Piece(rows_of(replace(region, weights=weights), rows), places)

    def schedules(self) -> tuple[Schedule, ...]:
        return tuple(self.points)

    @cached_property
    def _every(self) -> dict[AnyProblem, Piece]:
        return {p.rows.problem: p for pieces in self.points.values() for p in pieces}

    def pieces(self) -> list[AnyProblem]:
        """The problems of this rank alone, of all points."""
        return [*self._every]

    def pieces_with(self, weights: Mapping[int, torch.Tensor]) -> list[tuple[AnyProblem, dict[int, torch.Tensor]]]:
        """The same, each with its constant sources at hand by index."""
        return [
            (problem, {at: weights[i] for at, i in enumerate(piece.places) if i in weights})
            for problem, piece in self._every.items()
        ]

    def pieces_of(self, schedule: Schedule) -> list[AnyProblem]:
        """Those that one point needs."""
        return [p.rows.problem for p in self.points[schedule]]

    def overlapped(self, schedule: Schedule) -> int:
        """The number of parts of which one is multiplied while another one travels: each rank's of its own, but for sums of
        all rows."""
        return cast("int", schedule["chunks"]) * (1 if self.kind == REDUCE else self.ranks)

    def of_pieces(self, schedule: Schedule, chosen: Sequence[tuple[str, Schedule]]) -> Schedule:
        """A point with candidate and point of each of its pieces, of those chosen for the pieces of all points."""
        known = dict(zip(self._every, chosen, strict=True))
        return joined(schedule, [known[p.rows.problem] for p in self.points[schedule]])

    def offers(self, schedule: Schedule) -> bool:
        pieces = self.points.get(own_of(schedule))
        return pieces is not None and offered([p.rows.problem for p in pieces], schedule, self.target)

    def build(self, schedule: Schedule) -> Kernel:
        """A kernel for each piece: those that `schedule` names, else the fastest.

        Raises:
            UnsupportedError: a piece's candidate is gone, or refuses.
        """
        point, target = own_of(schedule), self.target
        pieces = self.points[point]
        problems = [p.rows.problem for p in pieces]
        kernels = kernels_of(problems, schedule, target)
        mover = self._pushing() if point["via"] == PUSH else lambda: Library(target)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            moves = mover()  # first of all: ranks agree on memory
            built = [Built(p, k, weights) for p, k in zip(pieces, kernels, strict=True)]
            via = str(point["via"])
            way = WAYS[ONCE if self.at_once(via) else self.kind, via]
            return lambda sources: way(self, cast("int", point["chunks"]), built, moves, sources)

        return whole_of(CANDIDATE.name, point, problems, kernels, prepare)

    def _pushing(self) -> Callable[[], Copies]:
        """A function that makes what pushes, its machine code made."""
        from tilewright.candidates.triton.runtime.copies import Copies, Sizes

        sizes = Sizes(self.ranks, self.data_bytes)
        code = sizes.machine_code(self.target)
        return lambda: Copies(team().symmetric(self.over, sizes.bytes), sizes, self.target, code)


class Built:
    """A piece and its kernel, ready."""

    def __init__(self, piece: Piece, kernel: Kernel, weights: Mapping[int, torch.Tensor]) -> None:
        self.piece = piece
        self._run = kernel.prepare({at: weights[i] for at, i in enumerate(piece.places) if i in weights})
        self._write = writer_of(self._run)

    def run(self, values: Sequence[torch.Tensor], first: int, given: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor]:
        """The results for the rows from `first` on.

        Args:
            values: of the whole problem, by place.
            first: a row.
            given: values that are of those rows alone already, by place.
        """
        return self._run(self._sources(values, first, given))

    def into(
        self,
        results: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        first: int,
        given: Mapping[int, torch.Tensor],
    ) -> None:
        """Write the results for the rows from `first` on, of which there are so many, into memory."""
        sources = self._sources(values, first, given)
        if self._write is not None and all(r.is_contiguous() and r.data_ptr() % 16 == 0 for r in results):
            self._write(sources, results)
            return
        for to, made in zip(results, self._run(sources), strict=True):
            to.copy_(made)

    def _sources(self, values: Sequence[torch.Tensor], first: int, given: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        rows, found = self.piece.rows, list[torch.Tensor]()
        for at, place in enumerate(self.piece.places):
            if place in given:
                found.append(given[place])
            else:
                value, axis = values[place], rows.axes.get(at)
                found.append(value if axis is None else value.narrow(axis, first, rows.rows))
        return found


class Library:
    """Operations between ranks by the team's own, on a second stream where there is one."""

    def __init__(self, target: Target) -> None:
        self._device = torch.device(target.device)
        self._stream = torch.cuda.Stream(self._device) if target.kind == "cuda" else None

    def follow(self) -> None:
        """Have what comes wait for all that the current stream has now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def meet(self, op: Node, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin an operation, and give what waits for its result. `value` must live until then."""
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            made = team().run(op, value)
            done = None if self._stream is None else self._stream.record_event()

        def wait() -> torch.Tensor:
            if done is not None:
                torch.cuda.current_stream(self._device).wait_event(done)
            return made

        return wait


def _results(plan: Plan) -> list[torch.Tensor]:
    """Memory for the results."""
    types = plan.problem.outputs
    return [torch.empty(t.shape, dtype=t.dtype.to_torch(), device=plan.target.device) for t in types]


def _rows(tensors: Iterable[torch.Tensor], first: int, count: int) -> list[torch.Tensor]:
    return [t.narrow(0, first, count) for t in tensors]


def _others(own: int, ranks: int) -> list[int]:
    """The other ranks, in the order in which one sends to them: each is sent to by one at a time."""
    return [(own + step) % ranks for step in range(1, ranks)]


def _before(plan: Plan, built: list[Built], sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The values up to the product, gathered ones standing for themselves, and what this rank gives to each gather."""
    values, own, at = list(sources), list[torch.Tensor](), 0
    for stage in plan.before:
        if isinstance(stage.what, Node):
            own.append(values[stage.places[0]].contiguous())
            values.append(own[-1])
        else:
            values += built[at].run(values, 0, {})
            at += 1
    return values, own


def gather_push(
    plan: Plan, chunks: int, built: list[Built], copies: Copies, sources: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    values, own = _before(plan, built, sources)
    product, here, ranks = built[-1], copies.own, plan.ranks
    each = product.piece.rows.rows
    copies.begin()
    for peer in _others(here, ranks):
        for j in range(chunks):
            for g, mine in zip(plan.gathered, own, strict=True):
                copies.send(peer, g.offset + (here * chunks + j) * each * g.row_bytes, mine.narrow(0, j * each, each))
            copies.tell(peer, j)
    results = _results(plan)
    come = [g.seen(copies.data(here)) for g in plan.gathered]
    for source in (here, *reversed(_others(here, ranks))):
        for j in range(chunks):
            first = (source * chunks + j) * each
            if source != here:
                copies.wait(source, j)
            parts = _rows(own, j * each, each) if source == here else _rows(come, first, each)
            given = {g.value: part for g, part in zip(plan.gathered, parts, strict=True)}
            product.into(_rows(results, first, each), values, first, given)
    copies.end()
    return results


def gather_library(
    plan: Plan, chunks: int, built: list[Built], library: Library, sources: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    values, own = _before(plan, built, sources)
    product, here = built[-1], team().mesh.index(team().rank, plan.over)
    each = product.piece.rows.rows
    library.follow()
    coming = [
        [library.meet(_with_rows(g.op, each), part) for g, part in zip(plan.gathered, _rows(own, j * each, each), strict=True)]
        for j in range(chunks)
    ]
    results = _results(plan)

    def multiply(source: int, j: int, parts: Sequence[torch.Tensor]) -> None:
        first = (source * chunks + j) * each
        given = {g.value: part for g, part in zip(plan.gathered, parts, strict=True)}
        product.into(_rows(results, first, each), values, first, given)

    for j in range(chunks):
        multiply(here, j, _rows(own, j * each, each))
    for j, waits in enumerate(coming):
        come = [wait() for wait in waits]
        for source in _others(here, plan.ranks):
            multiply(source, j, _rows(come, source * each, each))
    return results


def scatter_push(
    plan: Plan, chunks: int, built: list[Built], copies: Copies, sources: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    product, total = built
    here, ranks, each = copies.own, plan.ranks, product.piece.rows.rows
    copies.begin()
    data = _typed(copies.data(here), plan.multiplied.outputs[0])  # a part of each rank, one after the other
    results, kept = _results(plan), list[torch.Tensor]()
    for j in range(chunks):
        for owner in (*_others(here, ranks), here):
            kept += product.run(sources, (owner * chunks + j) * each, {})
            if owner != here:
                copies.lane.follow()
                copies.send(owner, (here * chunks + j) * each * _row_bytes(kept[-1]), kept[-1])
                copies.tell(owner, j)
        copies.wait_all(j)
        come = {SUMMAND + r: data.narrow(0, (r * chunks + j) * each, each) for r in range(ranks)}
        total.into(_rows(results, j * each, each), sources, j * each, come | {SUMMAND + here: kept[-1]})
    copies.end()
    return results


def scatter_library(
    plan: Plan, chunks: int, built: list[Built], library: Library, sources: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    product, tail = built[0], built[1:]
    each, ranks, whole = product.piece.rows.rows, plan.ranks, plan.multiplied.outputs[0]
    results, kept = _results(plan), list[torch.Tensor]()
    waiting: list[Callable[[], torch.Tensor]] = []
    for j in range(chunks):
        kept.append(torch.empty((ranks * each, *whole.shape[1:]), dtype=whole.dtype.to_torch(), device=plan.target.device))
        for owner in range(ranks):
            product.into(_rows(kept[-1:], owner * each, each), sources, (owner * chunks + j) * each, {})
        library.follow()
        waiting.append(library.meet(_with_rows(plan.met, ranks * each), kept[-1]))
        if j:
            _follow(plan, tail, results, sources, (j - 1) * each, waiting[j - 1]())
    _follow(plan, tail, results, sources, (chunks - 1) * each, waiting[-1]())
    return results


def reduce_push(
    plan: Plan, chunks: int, built: list[Built], copies: Copies, sources: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    product, total, *tail = built
    here, ranks, each = copies.own, plan.ranks, total.piece.rows.rows
    copies.begin()
    both = _typed(copies.data(here), plan.multiplied.outputs[0], 2)  # parts of sums of all rows, and then the sums
    rows, row = plan.multiplied.M, _row_bytes(both)
    results, kept = _results(plan), list[torch.Tensor]()

    def add_up(j: int) -> None:
        copies.wait_all(j)
        come = {SUMMAND + r: both.narrow(0, (r * chunks + j) * each, each) for r in range(ranks)}
        first = rows + (j * ranks + here) * each
        (own,) = made = _rows([both], first, each)
        total.into(made, sources, 0, come | {SUMMAND + here: kept[j].narrow(0, here * each, each)})
        copies.lane.follow()
        for peer in _others(here, ranks):
            copies.send(peer, first * row, own)
            copies.tell(peer, chunks + j)

    def finish(j: int) -> None:
        copies.wait_all(chunks + j)
        _follow(plan, tail, results, sources, j * ranks * each, both.narrow(0, rows + j * ranks * each, ranks * each), copies)

    for j in range(chunks + 2):  # what comes is waited for when the next products are under way
        if j < chunks:
            kept += product.run(sources, j * ranks * each, {})
            copies.lane.follow()
            for owner in _others(here, ranks):
                copies.send(owner, (here * chunks + j) * each * row, kept[j].narrow(0, owner * each, each))
                copies.tell(owner, j)
        if 0 <= j - 1 < chunks:
            add_up(j - 1)
        if j - 2 >= 0:
            finish(j - 2)
    copies.end()
    return results


def reduce_at_once(
    plan: Plan, chunks: int, built: list[Built], copies: Copies, sources: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    product, total = built
    here, ranks, each = copies.own, plan.ranks, product.piece.rows.rows
    copies.begin()
    data = _typed(copies.data(here), plan.multiplied.outputs[0], ranks)  # of each rank all rows, one after the other
    rows, row = plan.multiplied.M, _row_bytes(data)
    results, kept = _results(plan), list[torch.Tensor]()
    for j in range(chunks + 1):  # what comes is waited for when the next products are under way
        if j < chunks:
            kept += product.run(sources, j * each, {})
            copies.lane.follow()
            for peer in _others(here, ranks):
                copies.send(peer, (here * rows + j * each) * row, kept[j])
                copies.tell(peer, j)
        if j:
            first = (j - 1) * each
            copies.wait_all(j - 1)
            come = {SUMMAND + r: data.narrow(0, r * rows + first, each) for r in range(ranks)}
            total.into(_rows(results, first, each), sources, first, come | {SUMMAND + here: kept[j - 1]})
    copies.end()
    return results


def reduce_library(
    plan: Plan, chunks: int, built: list[Built], library: Library, sources: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    product, tail = built[0], built[1:]
    part = product.piece.rows.rows
    results, kept, waiting = _results(plan), list[torch.Tensor](), list[Callable[[], torch.Tensor]]()
    for j in range(chunks):
        kept += product.run(sources, j * part, {})
        library.follow()
        waiting.append(library.meet(_with_rows(plan.met, part), kept[-1]))
        if j:
            _follow(plan, tail, results, sources, (j - 1) * part, waiting[j - 1]())
    _follow(plan, tail, results, sources, (chunks - 1) * part, waiting[-1]())
    return results


def _follow(
    plan: Plan,
    tail: Sequence[Built],
    results: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    first: int,
    total: torch.Tensor,
    copies: Copies | None = None,
) -> None:
    """Compute what follows the sums of some rows, into the results."""
    copy = torch.Tensor.copy_ if copies is None else copies.lane.here
    rows = total.shape[0]
    if tail:
        outs = [results[plan.results.index(plan.total + 1 + i)] for i in range(len(tail[0].piece.rows.problem.outputs))]
        tail[0].into(_rows(outs, first, rows), sources, first, {plan.total: total})
    for place, result in zip(plan.results, results, strict=True):
        if place == plan.total:
            copy(result.narrow(0, first, rows), total)


def _typed(data: torch.Tensor, whole: TensorType, times: int = 1) -> torch.Tensor:
    """Bytes as a number of arrays of a type, one below the other."""
    kind, shape = whole.dtype.to_torch(), (times * whole.shape[0], *whole.shape[1:])
    return data[: kind.itemsize * prod(shape)].view(kind).view(shape)


def _row_bytes(t: torch.Tensor) -> int:
    return t.element_size() * prod(t.shape[1:])


def _with_rows(op: Node, rows: int) -> Node:
    """An operation between ranks over so many rows."""
    given = op.src[0].tensor
    return Node(op.op, Node(Param(0, given.with_shape((rows, *given.shape[1:])))))


WAYS: dict[tuple[str, str], Callable[..., list[torch.Tensor]]] = {
    (GATHER, PUSH): gather_push,
    (GATHER, LIBRARY): gather_library,
    (SCATTER, PUSH): scatter_push,
    (SCATTER, LIBRARY): scatter_library,
    (REDUCE, PUSH): reduce_push,
    (ONCE, PUSH): reduce_at_once,
    (REDUCE, LIBRARY): reduce_library,
}


def plan(problem: Problem, target: Target) -> Plan:
    """The plan of a product whose rows are gathered, or whose sums are reduced.

    Raises:
        Unsupported: the reason why there is none.
    """
    found = Stages(problem)
    product, *behind = found.stages
    if not isinstance(product.what, Problem):
        g = gathering(problem, found)
        met = g.operands[0].op
        made = Plan(problem, target, GATHER, g.over, g.ranks, g.before, g.product, met, (), g.results, g.operands)
    else:
        op, met = _reduced(problem, found)
        kind = SCATTER if isinstance(op, ReduceScatter) else REDUCE
        made = Plan(problem, target, kind, op.over, op.ranks, (), product, met, tuple(behind[1:]), found.results)
    rows = made.multiplied.M
    if made.ranks > MOST_RANKS:
        raise Unsupported(f"{made.ranks} ranks: up to {MOST_RANKS}")
    if target.kind == "cuda" and rows < FEWEST_ROWS:
        raise Unsupported(f"{rows} rows: of fewer than {FEWEST_ROWS} a piece begins for longer than it travels")
    if not made.points:
        raise Unsupported(f"{rows} rows are not divided among {made.ranks} ranks in pieces of {FEWEST_OF_PIECE}")
    return made


def _reduced(problem: Problem, found: Stages) -> tuple[AllReduce | ReduceScatter, Node]:
    """The reduction of a product's sums, beside which nothing travels.

    Raises:
        Unsupported: the sentence why there is none.
    """
    (met, *tail), count = found.stages[1:], len(problem.types)
    assert isinstance(met.what, Node)
    op = met.what.op
    if not isinstance(op, (AllReduce, ReduceScatter)) or any(isinstance(s.what, Node) for s in tail) or op.ranks == 1:
        raise Unsupported("more than the product's sums travel")
    if met.places != (count,) or any(count in s.places for s in tail) or count in found.results:
        raise Unsupported("the sums of one rank are read, too")
    if min(found.results) <= count or len(set(found.results)) < len(found.results):
        raise Unsupported("a result does not come from the sums, or is given twice")
    if op.fn != "add" or met.what.dtype not in (F32, BF16, F16):
        raise Unsupported(f"{op.fn} of {met.what.dtype.name}: sums of f32, bf16 or f16 are added up")
    if isinstance(op, ReduceScatter) and op.axis != 0:
        raise Unsupported("rows alone are shared out")
    return op, met.what


CANDIDATE = Candidate("chunked", GEMM, GPU, 51, plan, ranks="several")
