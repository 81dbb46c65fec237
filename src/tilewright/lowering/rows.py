"""A problem for some of its rows: the same expressions over fewer rows, and which of its sources those are rows of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tilewright.errors import TypeMismatchError
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Acc, Param
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import Unsupported
from tilewright.schedule.problem import FusionProblem, Problem


@dataclass(frozen=True)
class Rows:
    """A problem for so many rows of another one's.

    Attributes:
        problem: the problem.
        axes: its sources of which rows are taken, and the axis of each that they are.
    """

    problem: Problem | FusionProblem
    axes: Mapping[int, int]

    def sources(self, whole: Sequence[torch.Tensor], first: int, given: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """The sources for the rows from `first` on, of those of the whole problem; `given` are there by number already."""
        rows = self.rows
        taken = {i: whole[i].narrow(axis, first, rows) for i, axis in self.axes.items() if i not in given}
        return [given[i] if i in given else taken.get(i, t) for i, t in enumerate(whole)]

    @property
    def rows(self) -> int:
        """The number of rows that it is for."""
        return self.problem.outputs[0].shape[0]


def rows_of(problem: Problem | FusionProblem, rows: int) -> Rows:
    """The problem for `rows` of its rows, which are the first axis of all its results and the left operand's of a product.

    Raises:
        Unsupported: its rows depend on each other, or are not told apart.
    """
    taken = _Taken(rows)
    if isinstance(problem, FusionProblem):
        roots = [taken.of(root, 0) for root in problem.roots]
        made = replace(problem, roots=tuple(roots), types=taken.types(problem), destinations=())
    else:
        op = problem.op
        if len(op.acc_type.shape) != 2:
            raise Unsupported("rows of one matrix alone are taken apart")
        lhs, stores = taken.of(op.lhs, 0), [taken.of(store, 0) for store in op.stores]
        whole = replace(op, lhs=lhs, stores=tuple(stores))
        made = replace(problem, op=whole, types=taken.types(problem))
        taken.check((op.rhs,))
    taken.check(made.roots if isinstance(made, FusionProblem) else (made.op.lhs, *made.op.stores))
    if any(problem.weights[i] for i in taken.axes):
        raise Unsupported("a constant has values for each row")
    return Rows(made, dict(taken.axes))


class _Taken:
    """Expressions for some of their rows, and the sources that were met on the way."""

    def __init__(self, rows: int) -> None:
        self.axes: dict[int, int] = {}
        self._rows, self._made = rows, dict[tuple[Node, int], Node]()

    def of(self, node: Node, axis: int) -> Node:
        """An expression whose axis is the rows', for some of them."""
        if (node, axis) not in self._made:
            self._made[node, axis] = self._of(node, axis)
        return self._made[node, axis]

    def _of(self, node: Node, axis: int) -> Node:
        op = node.op
        shape = tuple(self._rows if a == axis else d for a, d in enumerate(node.shape))
        if isinstance(op, Param):
            if self.axes.setdefault(op.index, axis) != axis:
                raise Unsupported("a source is read by rows and otherwise")
            return Node(Param(op.index, node.tensor.with_shape(shape)))
        if isinstance(op, Acc):
            if axis != 0:
                raise Unsupported("rows of a result are other rows of its sums")
            return Node(Acc(op.type.with_shape(shape)))
        factor = next((f for f in op.factors(node) if f.result == axis), None)
        if factor is None:
            raise Unsupported(f"rows of {op.name} depend on one another")
        src = [s if a is None else self.of(s, a) for s, a in zip(node.src, factor.axes, strict=True)]
        try:
            made = Node(op.of_part(node, shape, [s.tensor for s in src]), *src)
        except TypeMismatchError as error:  # rows that share a scale, say
            raise Unsupported(f"rows of {op.name} are not taken apart") from error
        if made.shape != shape:
            raise Unsupported(f"rows of {op.name} are not taken apart")
        return made

    def types(self, problem: Problem | FusionProblem) -> tuple[TensorType, ...]:
        """The types of a problem's sources, of which some have fewer rows."""
        found = list(problem.types)
        for i, axis in self.axes.items():
            found[i] = found[i].with_shape(self._rows if a == axis else d for a, d in enumerate(found[i].shape))
        return tuple(found)

    def check(self, roots: Sequence[Node]) -> None:
        """See that expressions read no source whole that has fewer rows now."""
        for n in toposort(roots):
            if isinstance(n.op, Param) and n.op.index in self.axes and n.shape[self.axes[n.op.index]] != self._rows:
                raise Unsupported("a source is read by rows and otherwise")
