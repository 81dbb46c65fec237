"""Operations between ranks and what stands around them, one after the other: what operands need is gathered, the product is a
gemm of this rank alone, by any kernel, and its result is reduced. Nothing is slower than this plain way.

With `gather=push` a kernel of ours gathers rows over memory that GPUs of one host reach of each other
(`triton/runtime/gather.py`), in one launch for all that can travel together.

The pieces are problems of their own, which a job's ranks search together (`runtime/agreement.py`); the whole is verified and
timed by all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from tilewright.dtype import BF16, F32
from tilewright.hardware.target import Target
from tilewright.ir.graph import Node
from tilewright.ir.mesh import team
from tilewright.ir.ops import AllGather, AllReduce, ReduceScatter
from tilewright.lowering.pieces import joined, kernels_of, offered, own_of, whole_of
from tilewright.lowering.stages import Stage, Stages
from tilewright.schedule.candidate import (
    CPU,
    FUSION,
    GEMM,
    GPU,
    Candidate,
    Kernel,
    Runner,
    Schedule,
)
from tilewright.schedule.problem import AnyProblem, FusionProblem, Problem

if TYPE_CHECKING:
    from tilewright.candidates.triton.runtime.gather import Gather

LIBRARY, RANKS = "library", "ranks"  # who reduces: the process group's own operation, or each rank all values in order
PUSH = "push"  # who gathers, if not the library: our kernel
MOST_PUSHED = 4 << 20  # bytes of a rank in one launch; more of them travel faster by copies (`chunked`)
MOST_RANKS = 16
ONE_SHOT, TWO_SHOT = "one_shot", "two_shot"  # torch's all-reduces over memory that GPUs of one host reach of each other
MOST_ONE_SHOT = 8 << 20  # bytes, all of which each rank reads of all


@dataclass(frozen=True)
class Plan:
    """The stages of a problem. A kernel's schedule names its pieces, so that none of them is searched for twice."""

    problem: Problem | FusionProblem
    target: Target
    stages: tuple[Stage, ...]
    results: tuple[int, ...]

    def schedules(self) -> tuple[Schedule, ...]:
        nodes = [s.what for s in self.stages if isinstance(s.what, Node)]
        sums = any(isinstance(n.op, (AllReduce, ReduceScatter)) and n.dtype.is_float for n in nodes)
        shot = [n for n in nodes if _in_shots(n)] if self.target.kind == "cuda" else []
        one = bool(shot) and all(n.tensor.size_bytes <= MOST_ONE_SHOT for n in shot)
        hows = [LIBRARY, *[RANKS] * sums, *[TWO_SHOT] * bool(shot), *[ONE_SHOT] * one]
        if not any(self._pushed(s) for s in self.stages):
            return tuple(Schedule.of(reduce=how) for how in hows)
        return tuple(Schedule.of(reduce=how, gather=way) for how in hows for way in (LIBRARY, PUSH))

    def pieces(self) -> list[AnyProblem]:
        """The problems of this rank alone."""
        return [s.what for s in self.stages if not isinstance(s.what, Node)]

    def pieces_with(self, weights: Mapping[int, torch.Tensor]) -> list[tuple[AnyProblem, dict[int, torch.Tensor]]]:
        """The pieces, each with its constant sources at hand by index."""
        return [
            (s.what, {at: weights[i] for at, i in enumerate(s.places) if i in weights})
            for s in self.stages
            if not isinstance(s.what, Node)
        ]

    def offers(self, schedule: Schedule) -> bool:
        return offered(self.pieces(), schedule, self.target)

    def of_pieces(self, schedule: Schedule, chosen: Sequence[tuple[str, Schedule]]) -> Schedule:
        """A point with candidate and point of each piece."""
        return joined(schedule, chosen)

    def build(self, schedule: Schedule) -> Kernel:
        """A kernel for each piece: those that `schedule` names, else the fastest.

        Raises:
            UnsupportedError: a piece's candidate is gone, or refuses.
        """
        pieces, knobs = self.pieces(), dict(schedule.knobs)
        kernels, how = kernels_of(pieces, schedule, self.target), str(knobs["reduce"])
        turns = self._turns() if knobs.get("gather") == PUSH else [([s], None) for s in self.stages]
        for _, gather in turns:
            if gather is not None:
                gather.build()  # which all ranks can, before they meet in `prepare`
        held = zip([s for s in self.stages if not isinstance(s.what, Node)], kernels, strict=True)
        unused = {i: all(s.places.index(i) in k.releasable for s, k in held if i in s.places) for i in self._weights()}
        releasable = frozenset(i for i, not_read in unused.items() if not_read and not self._travels(i))

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            return self._runner(kernels, weights, how, turns)

        return whole_of(CANDIDATE.name, own_of(schedule), pieces, kernels, prepare, releasable)

    def _weights(self) -> list[int]:
        return [i for i, weight in enumerate(self.problem.weights) if weight]

    def _travels(self, source: int) -> bool:
        return any(isinstance(s.what, Node) and source in s.places for s in self.stages)

    def _passing(self, stage: Stage) -> bool:
        """Tell whether what an operation between ranks reads is a product's only result, which no other one is a view of, and
        nobody else reads it."""
        (place,) = stage.places
        makes = any(isinstance(s.what, Problem) and s.results == (place,) for s in self.stages)
        return makes and sum(s.places.count(place) for s in self.stages) == 1 and place not in self.results

    def _pushed(self, stage: Stage) -> AllGather | None:
        """A stage's operation, if our kernel may do it: rows are gathered, by NVIDIA GPUs."""
        op = stage.what.op if isinstance(stage.what, Node) else None
        if not isinstance(op, AllGather) or op.axis != 0 or not 1 < op.ranks <= MOST_RANKS:
            return None
        return op if "cuda" in self.target.features and 0 < _own_bytes(stage) <= MOST_PUSHED else None

    def _turns(self) -> list[tuple[list[Stage], Gather | None]]:
        """The stages in turns, gathers that are pushed in one launch together: it is made once one of them is read, or another
        one does not go with them. None: an ordinary stage."""
        from tilewright.candidates.triton.runtime.gather import Gather

        found, waiting = list[tuple[list[Stage], Gather | None]](), list[Stage]()

        def launch() -> None:
            if waiting:
                types = tuple(s.what.tensor for s in waiting if isinstance(s.what, Node))
                op = self._pushed(waiting[0])
                assert op is not None
                found.append(([*waiting], Gather(types, op.ranks, self.target)))
                waiting.clear()

        for stage in self.stages:
            op = self._pushed(stage)
            read = any(i in s.results for s in waiting for i in stage.places)
            most = sum(map(_own_bytes, [*waiting, stage])) > MOST_PUSHED if op else False
            if read or most or (op and waiting and op != self._pushed(waiting[0])):
                launch()
            if op:
                waiting.append(stage)
            else:
                found.append(([stage], None))
        launch()
        return found

    def _runner(
        self,
        kernels: Sequence[Kernel],
        weights: Mapping[int, torch.Tensor],
        how: str,
        turns: Sequence[tuple[list[Stage], Gather | None]],
    ) -> Runner:
        own = iter(kernels)
        runners: list[tuple[list[int], list[int], Runner]] = []
        for stages, gather in turns:
            reads, makes = [i for s in stages for i in s.places], [i for s in stages for i in s.results]
            first = stages[0]
            if isinstance(first.what, Node):
                runner = _between(first.what, how, self._passing(first)) if gather is None else _pushing(first.what, gather)
            else:
                runner = next(own).prepare({at: weights[i] for at, i in enumerate(reads) if i in weights})
            runners.append((reads, makes, runner))

        def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            values = dict(enumerate(sources))
            for reads, makes, runner in runners:
                values.update(zip(makes, runner([values[i] for i in reads]), strict=True))
            return [values[i] for i in self.results]

        return run


def _own_bytes(stage: Stage) -> int:
    """Bytes that a rank gives to an operation between ranks, as torch has them."""
    assert isinstance(stage.what, Node)
    return stage.what.src[0].dtype.to_torch().itemsize * stage.what.src[0].tensor.elements


def _in_shots(node: Node) -> bool:
    """Tell whether torch's all-reduces over shared memory take it: they read 16 bytes at a time, of each rank's share."""
    op, size = node.op, node.tensor.size_bytes
    return (
        isinstance(op, AllReduce) and op.fn == "add" and node.dtype in (F32, BF16) and size > 0 and size % (16 * op.ranks) == 0
    )


def _between(node: Node, how: str, passing: bool) -> Runner:
    """A runner of an operation between ranks, over a value that nobody else reads if it is `passing`. One in shots is made by
    all ranks together."""
    if how in (ONE_SHOT, TWO_SHOT) and _in_shots(node):
        return _shot(node, how)

    def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if how == RANKS:
            return [cast("torch.Tensor", node.op.evaluate(node, [sources[0]]))]
        return [team().run(node, sources[0], overwritten=passing)]

    return run


def _pushing(node: Node, gather: Gather) -> Runner:
    """A runner of a launch that gathers for a node, and for others over the same ranks. It is made by all ranks together."""
    assert isinstance(node.op, AllGather)
    return gather.runner(team().symmetric(node.op.over, gather.exchange.bytes))


def _shot(node: Node, how: str) -> Runner:
    """A runner of torch's all-reduce. It waits for all ranks when it begins and ends, so all calls use one buffer."""
    op, size = node.op, node.tensor.size_bytes
    assert isinstance(op, AllReduce)
    memory = team().symmetric(op.over, 1 << (size - 1).bit_length())
    buffer = memory.buffers[memory.own][:size].view(node.dtype.to_torch()).view(node.shape)
    ops = torch.ops.symm_mem

    def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        buffer.copy_(sources[0])
        if how == ONE_SHOT:
            return [cast("torch.Tensor", ops.one_shot_all_reduce(buffer, "sum", memory.group))]
        return [cast("torch.Tensor", ops.two_shot_all_reduce_(buffer, "sum", memory.group)).clone()]

    return run


def plan(problem: Problem | FusionProblem, target: Target) -> Plan:
    """Take every gemm and fusion that holds operations between ranks."""
    found = Stages(problem)
    return Plan(problem, target, tuple(found.stages), found.results)


CANDIDATE = Candidate("sequential", GEMM | FUSION, CPU | GPU, 50, plan, ranks="several")
