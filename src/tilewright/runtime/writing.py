"""Writes to a program's state (`Graph.state`): results that a fusion's kernel puts into larger arrays, or copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import torch

from tilewright.errors import TypeMismatchError
from tilewright.ir.graph import Node
from tilewright.ir.ops import Call, Write
from tilewright.runtime.partition import Part
from tilewright.schedule.candidate import Kernel, Runner
from tilewright.schedule.problem import FusionProblem

if TYPE_CHECKING:
    from tilewright.ir.graph import Value

_COMPARED = "tilewright.as_traced.default"  # the call that ends another way than the traced one (frontends/torch/taken.py)


class _Step(Protocol):
    @property
    def part(self) -> Part: ...


_S = TypeVar("_S", bound=_Step)
ALIGNED = 16  # bytes, as generated kernels take memory


def bind_outputs(
    problem: FusionProblem, part: Part, kernel: Kernel, weights: Mapping[int, torch.Tensor], kept: Mapping[Node, Value]
) -> Runner:
    """A fusion's kernel with those results that are writes to state: it writes them there, or they are copied."""
    arrays = {i: cast("torch.Tensor", kept[n.src[0]]) for i, n in enumerate(part.outputs) if isinstance(n.op, Write)}
    if kernel.place is not None and all(a.is_contiguous() and a.data_ptr() % ALIGNED == 0 for a in arrays.values()):
        return kernel.place(weights, arrays)
    run = kernel.prepare(weights)

    def copied(sources: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        results = list(run(sources))
        for i, array in arrays.items():
            room = problem.destinations[i]
            assert room is not None
            array.narrow(room.axis, room.start, results[i].shape[room.axis]).copy_(results[i])
            results[i] = array
        return results

    return copied


def written(part: Part, name: str) -> Callable[[Sequence[Value]], Sequence[Value]]:
    """A write that is a step by itself, as its positions are data: values of the part's inputs in, the array out.

    Raises:
        TypeMismatchError: when it runs, on a CPU: a position is out of range.
    """
    (node,) = part.nodes
    assert isinstance(node.op, Write)
    x, positions, y = (part.inputs.index(s) for s in node.src)
    axis = node.op.axis

    def run(values: Sequence[Value]) -> Sequence[Value]:
        array, at, new = (cast("torch.Tensor", values[i]) for i in (x, positions, y))
        try:
            array[(slice(None),) * axis + (at.to(torch.int64),)] = new
        except IndexError as error:
            raise TypeMismatchError(f"write: {error}", where=name) from error
        return [array]

    return run


def compared_first(steps: Sequence[_S]) -> tuple[_S, ...]:
    """The steps with those ahead that comparisons with the traced way need: a call that ends there wrote nothing yet."""
    needed: set[Node] = set()
    ahead: set[int] = set()
    for i, step in reversed([*enumerate(steps)]):
        if _compares(step) or needed.intersection(step.part.outputs):
            ahead.add(i)
            needed.update(step.part.inputs)
    return tuple(steps[i] for i in sorted(range(len(steps)), key=lambda i: i not in ahead))


def written_before_compared(steps: Sequence[_Step]) -> set[Node]:
    """The states written to by steps that a comparison follows, as its outcome depends on them."""
    last = max((i for i, step in enumerate(steps) if _compares(step)), default=0)
    writes = [n for step in steps[:last] for n in step.part.nodes if isinstance(n.op, Write)]
    roots: set[Node] = set()
    for node in writes:
        while isinstance(node.op, Write):
            node = node.src[0]
        roots.add(node)
    return roots


def _compares(step: _Step) -> bool:
    return any(isinstance(n.op, Call) and n.op.target == _COMPARED for n in step.part.nodes)
