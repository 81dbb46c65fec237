"""A product whose rows are gathered from the ranks of a group: what each gives, and where it lies in what all receive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.ir.graph import Node
from tilewright.ir.ops import AllGather
from tilewright.ir.types import TensorType
from tilewright.lowering.rows import rows_of
from tilewright.lowering.stages import Stage, Stages
from tilewright.schedule.candidate import Inapplicable, Unsupported
from tilewright.schedule.problem import Problem

ALIGNED = 128  # bytes, of what lies one behind the other in a rank's data


@dataclass(frozen=True)
class Gathered:
    """An operand, or its scales, whose rows are gathered.

    Attributes:
        source, value: places of what this rank has, and of the whole, among the problem's values (`Stages`).
        type: of the whole.
        offset: of its bytes in the data that ranks send.
        op: the operation, over a stand-in.
    """

    source: int
    value: int
    type: TensorType
    offset: int
    op: Node

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, as torch has them."""
        return self.type.dtype.to_torch().itemsize * (self.type.elements // self.type.shape[0])

    @property
    def end(self) -> int:
        """The place behind its last byte."""
        return self.offset + self.row_bytes * self.type.shape[0]

    def seen(self, data: torch.Tensor) -> torch.Tensor:
        """The whole in the data that ranks send."""
        return data[self.offset : self.end].view(self.type.dtype.to_torch()).view(self.type.shape)


@dataclass(frozen=True)
class Gathering:
    """A product behind gathers.

    Attributes:
        before: gathers, and fusions of this rank that give what some of them gather.
        product: the stage that multiplies.
        operands: what is gathered.
        over, ranks: names of the mesh axes, and how many ranks there are along them.
        results: the place of each result among the stages' values.
    """

    before: tuple[Stage, ...]
    product: Stage
    operands: tuple[Gathered, ...]
    over: tuple[str, ...]
    ranks: int
    results: tuple[int, ...]

    @property
    def multiplied(self) -> Problem:
        """The product."""
        assert isinstance(self.product.what, Problem)
        return self.product.what

    @property
    def data_bytes(self) -> int:
        """Bytes of all rows."""
        return self.operands[-1].end


def gathering(problem: Problem, found: Stages) -> Gathering:
    """The gathers before a product.

    Raises:
        Inapplicable: nothing is gathered before it.
        Unsupported: the reason why rows are not all that travels.
    """
    at = next(i for i, s in enumerate(found.stages) if isinstance(s.what, Problem))
    before, product, behind = found.stages[:at], found.stages[at], found.stages[at + 1 :]
    operands, value, offset = list[Gathered](), len(problem.types), 0
    for stage in before:
        if isinstance(stage.what, Node):
            operands.append(Gathered(stage.places[0], value, stage.what.tensor, offset, stage.what))
            offset = -(-operands[-1].end // ALIGNED) * ALIGNED
            value += 1
        else:
            value += len(stage.what.outputs)
    if not operands:
        raise Inapplicable("nothing is gathered before the product")
    op = operands[0].op.op
    if behind or not isinstance(op, AllGather) or any(g.op.op != op for g in operands) or op.axis != 0 or op.ranks == 1:
        raise Unsupported("rows are gathered, or sums reduced, but not both, and nothing else travels")
    assert isinstance(product.what, Problem)
    axes, values = rows_of(product.what, 1).axes, {g.value for g in operands}
    if any(axes.get(_place(product.places, value)) != 0 for value in values):
        raise Unsupported("what is gathered is no rows of the left operand")
    if any(values & {*s.places} for s in before) or values & {*found.results}:
        raise Unsupported("what is gathered is read by others, too")
    if found.results != tuple(range(value, value + len(product.what.outputs))):
        raise Unsupported("a result is not one of the product's own, or is given twice")
    return Gathering(tuple(before), product, tuple(operands), op.over, op.ranks, found.results)


def _place(places: Sequence[int], value: int) -> int:
    return places.index(value) if value in places else -1
