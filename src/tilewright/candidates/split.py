"""Joined gemms taken apart again: each store's columns as a gemm of its own, timed as a whole against the joined form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from tilewright.hardware.target import Target
from tilewright.ir.build import slice_
from tilewright.ir.expression import make_gemm
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import Acc, Concat, Gemm, Slice, Transpose
from tilewright.schedule.candidate import Kernel, Runner, discover
from tilewright.schedule.problem import Problem, ProblemKind, problem_of
from tilewright.schedule.schedule import Schedule
from tilewright.schedule.search import search

PART_BUDGET_S = 0.1


def columns_read(store: Node) -> tuple[int, int] | None:
    """The one range of acc's columns that a store reads; None if it reads several, or all."""
    ranges: set[tuple[int, int]] = set()
    for n in toposort((store,)):
        if any(isinstance(s.op, Acc) for s in n.src):
            if not isinstance(n.op, Slice):
                return None
            ranges.add((n.op.start[-1], n.op.stop[-1]))
    return ranges.pop() if len(ranges) == 1 else None


def part_of(problem: Problem, i: int) -> Node:
    """The gemm that computes store `i` alone, over the problem's own stand-in sources.

    Raises:
        AssertionError: the store does not read one range of columns (see `columns_read`).
    """
    op = problem.op
    read = columns_read(op.stores[i])
    assert read is not None
    rhs = _columns(op.rhs, len(op.rhs.shape) - 1, *read)
    acc = Node(Acc(op.acc_type))
    narrow = Node(Acc(Gemm(op.acc_dtype, op.lhs, rhs, ()).acc_type))
    (store,) = substitute((op.stores[i],), {slice_(acc, -1, *read): narrow})
    return make_gemm(op.acc_dtype, op.lhs, rhs, (store,), problem.node.src)


def _columns(root: Node, axis: int, start: int, stop: int) -> Node:
    """An operand restricted to part of an axis; one of several side by side is picked as it is."""
    if isinstance(root.op, Transpose):
        return Node(root.op, _columns(root.src[0], root.op.perm[axis], start, stop))
    if isinstance(root.op, Concat) and root.op.axis == axis:
        at = 0
        for part in root.src:
            if (at, at + part.shape[axis]) == (start, stop):
                return part
            at += part.shape[axis]
    return slice_(root, axis, start, stop)


class Split:
    name = "split"
    kinds = frozenset[ProblemKind]({"gemm"})
    preference = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if len(problem.op.stores) == 1:
            return "the gemm has one store, so there is nothing to take apart"
        if any(columns_read(s) is None for s in problem.op.stores):
            return "a store reads more than one range of columns"
        return None

    def schedules(self, problem: Problem, target: Target) -> Iterable[Schedule]:
        return (Schedule.of(gemms=len(problem.op.stores)),)

    def build(self, problem: Problem, schedule: Schedule, target: Target) -> Kernel:
        others = [c for c in discover() if c.name != self.name]
        nodes = [part_of(problem, i) for i in range(len(problem.op.stores))]
        own = list(problem.node.src)
        places = [[own.index(s) for s in n.src] for n in nodes]
        kernels: list[Kernel] = []
        for node, place in zip(nodes, places, strict=True):
            part = problem_of(node)
            assert isinstance(part, Problem)
            part = Problem(part.op, part.types, tuple(problem.weights[i] for i in place))
            kernels.append(search(part, target, budget_s=PART_BUDGET_S, candidates=others).kernel)

        def prepare(weights: Mapping[int, torch.Tensor]) -> Runner:
            runners = [
                k.prepare({at: weights[i] for at, i in enumerate(place) if i in weights})
                for k, place in zip(kernels, places, strict=True)
            ]

            def run(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                return [r([sources[i] for i in place])[0] for r, place in zip(runners, places, strict=True)]

            return run

        parts = ", ".join(dict.fromkeys(k.candidate for k in kernels))
        return Kernel(
            self.name,
            Schedule.of(gemms=len(kernels), by=parts),
            prepare,
            workspace_bytes=max(k.workspace_bytes for k in kernels),
            packed_bytes=sum(k.packed_bytes for k in kernels),
        )


CANDIDATE = Split()
