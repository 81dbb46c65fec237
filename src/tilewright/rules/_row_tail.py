"""What follows a product row by row, as expressions that its stores may hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tilewright.ir.anchor import operands_of, rebuilt, stores_of
from tilewright.ir.build import items
from tilewright.ir.expression import ELEMENTWISE, Sources
from tilewright.ir.graph import Graph, Node, Users
from tilewright.ir.ops import LayerNorm, Reduce
from tilewright.ir.pattern import Step, Trace
from tilewright.ir.types import Shape


@dataclass(frozen=True)
class RowTail:
    """A gemm of one store, and operations that give rows of its result's shape, or a number for each, of its rows and of what
    all rows read; what else they read is constant or computed before the gemm.

    Attributes:
        gemm: the gemm.
        inside: these operations, and the gemm itself, each with its expression.
        sources: what the expressions read.
        users: who reads what in the graph.
    """

    gemm: Node
    inside: Mapping[Node, Node]
    sources: Sources
    users: Users

    @classmethod
    def of(cls, gemm: Node, graph: Graph) -> RowTail:
        """All that follows a gemm of a graph so."""
        order = graph.nodes()
        place = {n: i for i, n in enumerate(order)}
        sources, inside = Sources(gemm.src), {gemm: stores_of(gemm)[0]}
        for n in order[place[gemm] :]:
            free = all(s in inside or s.constant or place[s] < place[gemm] for s in n.src)
            if n not in inside and free and any(s in inside for s in n.src) and _by_row(n, gemm.shape):
                inside[n] = Node(n.op, *(inside[s] if s in inside else sources.param(s) for s in n.src))
        return cls(gemm, inside, sources, graph.users())

    def only(self, nodes: Collection[Node]) -> RowTail:
        """Some of these operations."""
        return RowTail(self.gemm, {n: x for n, x in self.inside.items() if n in nodes}, self.sources, self.users)

    def read(self) -> list[Node]:
        """Those that others read, or that leave the graph."""
        return [n for n in self.inside if any(r is None or r not in self.inside for r in self.users[n])]

    def stored(self, rule: str, stage: str, trace: Trace) -> dict[Node, Node]:
        """What others read, each with a result of one gemm in its place."""
        read = self.read()
        one = rebuilt(self.gemm, operands_of(self.gemm), [self.inside[n] for n in read], self.sources.nodes)
        made = dict(zip(read, items(one), strict=True))
        trace.steps.extend(Step(rule, stage, n, made[n]) for n in read if n is not self.gemm)
        return made


def _by_row(n: Node, shape: Shape) -> bool:
    """Tell whether an operation gives rows of such a shape, or a number for each, of its row and of what all rows read."""
    last, rows = len(shape) - 1, shape[:-1]
    if not isinstance(n.op, (LayerNorm, Reduce, *ELEMENTWISE)) or n.shape not in (shape, (*rows, 1)):
        return False
    if any(s.shape[:-1] not in (rows, (1,) * last, ()) for s in n.src):
        return False
    if isinstance(n.op, LayerNorm):
        return n.op.axis == last
    return not isinstance(n.op, Reduce) or (n.op.axes == (last,) and n.op.keepdims)
