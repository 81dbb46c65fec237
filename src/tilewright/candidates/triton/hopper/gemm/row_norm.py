"""A norm of the result's rows within a gemm's stores: what it normalises, and what becomes of it, as expressions of their own.

A block has some of a row's columns. So expressions follow one another: `x`, of the sums; the numbers of each row, which the
blocks that share it find together (`_rows.py`); `y`, of those numbers and of what x differs by from the mean of the block's own
part of the row; and then the stores, of y or of x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.dtype import F32
from tilewright.ir.axes import Axis, Layout, axes_of
from tilewright.ir.build import convert, map_
from tilewright.ir.constant import scalar_value
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import Acc, LayerNorm, Param
from tilewright.ir.types import TensorType
from tilewright.lowering.access import Access, of_store
from tilewright.schedule.candidate import Unsupported


@dataclass(frozen=True)
class RowNorm:
    """A norm of rows.

    Attributes:
        x: what is normalised, f32 without further digits, over the accumulator.
        y: the norm, likewise, over the differences in the accumulator's place.
        rstd, shift: what stands in y for the inverse of a row's deviation, and for how far in such deviations the mean of the
            block's part lies above the row's.
        epsilon, center: see `LayerNorm`.
        normalised: flags of the stores that have y in the accumulator's place; the others have x.
    """

    x: Access
    y: Access
    rstd: Node
    shift: Node
    epsilon: float
    center: bool
    normalised: tuple[bool, ...]


def row_norm(stores: Sequence[Node], number: int, columns: int) -> tuple[tuple[Node, ...], RowNorm] | None:
    """Rewrite stores that hold a norm; None where none does.

    Args:
        stores: a gemm's stores.
        number: the number of its sources.
        columns: N.

    Returns:
        The stores, over y or x in the accumulator's place, and the norm.

    Raises:
        Unsupported: there are several, or it is not one of the rows of the product.
    """
    norms = [n for n in toposort(stores) if isinstance(n.op, LayerNorm)]
    if not norms:
        return None
    if len(norms) > 1:
        raise Unsupported("the stores hold several norms")
    (norm,) = norms
    op, x, *beside = norm.op, *norm.src
    assert isinstance(op, LayerNorm)
    if op.axis % len(norm.shape) != len(norm.shape) - 1:
        raise Unsupported("a norm over more than the last axis")
    if norm.dtype.bits > 32:
        raise Unsupported(f"a norm of {norm.dtype}")
    if any(isinstance(n.op, Acc) for n in toposort(beside)):
        raise Unsupported("the scale of a norm is computed from the product")
    given = of_store(convert(x, F32))
    own = given.views[given.root].layout
    if not (_same(own[:-1], given.rows) and _same(own[-1:], given.columns)) or (given.first, x.shape[-1]) != (0, columns):
        raise Unsupported("what is normalised are not rows of the product")
    stand_in, of_row = Node(Acc(TensorType(F32, x.shape))), TensorType(F32, (*x.shape[:-1], 1))
    rstd, shift = (Node(Param(number + i, of_row)) for i in range(2))
    y = map_("multiply", stand_in, rstd)
    y = map_("add", y, shift) if op.center else y
    for fn, side in zip(("multiply", "add"), beside, strict=False):
        y = y if fn == "multiply" and scalar_value(side) == 1 else map_(fn, y, convert(side, F32))
    found, normalised = list[Node](), list[bool]()
    for root in stores:
        reads_norm = norm in toposort((root,))
        read = norm if reads_norm else x
        marked = substitute((root,), {read: Node(Param(number + 2, read.tensor))})
        if any(isinstance(n.op, Acc) for n in toposort(marked)):
            raise Unsupported("a store reads the sums in two ways, or before what is normalised is computed of them")
        found += substitute((root,), {read: convert(stand_in, read.dtype)})
        normalised.append(reads_norm)
    of_y = of_store(convert(convert(y, norm.dtype), F32))
    return tuple(found), RowNorm(given, of_y, rstd, shift, op.epsilon, op.center, tuple(normalised))


def _same(dims: Layout, axes: Sequence[Axis]) -> bool:
    """Tell whether dimensions are these axes, in order."""
    return [a for a in axes_of(dims) if a.extent > 1] == [a for a in axes if a.extent > 1]
