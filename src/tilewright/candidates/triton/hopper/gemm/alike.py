"""Stores that differ in where they read and write alone, as those of Q, K and V do: one code serves them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from tilewright.candidates.triton.hopper.gemm.form import Out
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Param, Slice


def leaves(out: Out, second: Node | None) -> list[Node]:
    """What a store reads of memory, in order."""
    return [n for n in toposort((out.access.root,)) if isinstance(n.op, Param) and n is not second]


def alike(outs: Sequence[Out], tile_n: int) -> bool:
    """Whether several stores take equal ranges of columns, of whole tiles, one after the other, and do the same with them."""
    extent = outs[0].access.columns_extent
    if len(outs) < 2 or extent % tile_n or any(o.view is None for o in outs):
        return False
    follow = all(o.access.first == i * extent for i, o in enumerate(outs))
    return follow and len({_shape(o) for o in outs}) == 1


def _shape(out: Out) -> Hashable:
    """A store without the sources it reads, where in them it begins, and the columns it takes."""
    number: dict[Node, int] = {}
    found: list[Hashable] = [out.view, out.columns, out.access.columns_extent]
    for n in toposort((out.access.root,)):
        number[n] = len(number)
        if isinstance(n.op, Param):
            found.append((n.tensor, replace(out.access.of_leaf(n), offset=0)))
        elif isinstance(n.op, Slice):
            found.append((n.op.step, n.tensor, number[n.src[0]]))
        else:
            found.append((n.op, n.tensor, *(number[s] for s in n.src)))
    return tuple(found)
