"""Problems with operations between ranks as stages: problems of one rank alone, and operations between ranks, in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.ir.expression import depends_on_acc, make_gemm
from tilewright.ir.graph import Node, substitute, toposort
from tilewright.ir.ops import Acc, Collective, Input, Param
from tilewright.schedule.problem import AnyProblem, FusionProblem, Problem, collectives_of, fusion_of, problem_of


@dataclass(frozen=True)
class Stage:
    """One of the things that are done in turn.

    Attributes:
        what: a problem of this rank alone, or an operation between ranks over a stand-in.
        places: for each of its sources the index among the gemm's sources and, behind them, the results of earlier stages.
        results: the same for its results.
    """

    what: AnyProblem | Node
    places: tuple[int, ...]
    results: tuple[int, ...]


class Stages:
    """The stages of a problem.

    Attributes:
        values: what stands for its sources, and behind them for the results of stages.
        stages: the stages, in order.
        results: the place of each of the problem's results among the values.
    """

    values: list[Node]
    stages: list[Stage]
    results: tuple[int, ...]

    def __init__(self, problem: Problem | FusionProblem) -> None:
        self._problem = problem
        self.values = [Node(Param(i, t)) for i, t in enumerate(problem.types)]
        self.stages = []
        if isinstance(problem, FusionProblem):
            self._of_fusion(problem)
        else:
            self._of_gemm(problem)

    def _of_fusion(self, problem: FusionProblem) -> None:
        made: dict[Node, Node] = {}
        for n in collectives_of(problem):
            made[n] = self._met(n, self._computed(substitute(n.src, made)[0]))
        self._finish(substitute(problem.roots, made), {})

    def _of_gemm(self, problem: Problem) -> None:
        op = problem.op
        dependent = depends_on_acc(op.stores)
        between = collectives_of(problem)
        made: dict[Node, Node] = {}
        for n in between:
            if n not in dependent:
                made[n] = self._met(n, self._computed(substitute(n.src, made)[0]))
        lhs, rhs, *stores = substitute((op.lhs, op.rhs, *op.stores), made)
        behind = [n for n in toposort(stores) if isinstance(n.op, Collective) and n not in self.values]
        stand_in = {n: Node(Input(f"met {i}", n.tensor)) for i, n in enumerate(behind)}
        given = substitute_below(behind, stand_in)
        finals = substitute(stores, stand_in)
        acc = Node(Acc(op.acc_type))
        whole = [self._of_product(root, acc, stand_in) for root in (*given, *finals)]
        written = list(dict.fromkeys(w for w in whole if w is not None))
        product = make_gemm(op.acc_dtype, lhs, rhs, tuple(written), self.values)
        part = problem_of(product)
        places = tuple(self.values.index(s) for s in product.src)
        self._add(replace(part, weights=self._weights(places)), places, [w.tensor for w in written])
        first = len(self.values) - len(written)
        known = {w: self.values[first + i] for i, w in enumerate(written)}
        for n, root, w in zip(behind, given, whole, strict=False):
            value = known[root] if w is root else self._computed(substitute((root,), known)[0])
            known[stand_in[n]] = self._met(n, value)
        self._finish(substitute(finals, known), known)

    def _finish(self, tails: Sequence[Node], known: dict[Node, Node]) -> None:
        """The results, of which those that are no values yet are computed together."""
        rest = [t for t in dict.fromkeys(tails) if t not in self.values]
        known |= dict(zip(rest, self._fused(rest), strict=True)) if rest else {}
        self.results = tuple(self.values.index(known.get(t, t)) for t in tails)

    def _of_product(self, root: Node, acc: Node, stand_in: Mapping[Node, Node]) -> Node | None:
        """The part of an expression that the product stores: all of it, the accumulator that it goes on from, or nothing."""
        nodes = toposort((root,))
        if acc not in nodes:
            return None
        return acc if any(n in stand_in.values() for n in nodes) else root

    def _add(self, what: AnyProblem | Node, places: Sequence[int], types: Sequence[object]) -> list[Node]:
        results = range(len(self.values), len(self.values) + len(types))
        self.stages.append(Stage(what, tuple(places), tuple(results)))
        made = [Node(Param(i, t)) for i, t in zip(results, types, strict=True)]  # type: ignore[arg-type]
        self.values += made
        return made

    def _met(self, n: Node, value: Node) -> Node:
        (made,) = self._add(Node(n.op, Node(Param(0, value.tensor))), [self.values.index(value)], [n.tensor])
        return made

    def _computed(self, root: Node) -> Node:
        return root if root in self.values else self._fused([root])[0]

    def _fused(self, roots: Sequence[Node]) -> list[Node]:
        """Expressions over values as a fusion."""
        read = [n for n in toposort(roots) if isinstance(n.op, Param)]
        region, order = fusion_of(read, roots)
        places = tuple(self.values.index(s) for s in order)
        return self._add(replace(region, weights=self._weights(places)), places, [r.tensor for r in roots])

    def _weights(self, places: Sequence[int]) -> tuple[bool, ...]:
        own = self._problem.weights
        return tuple(i < len(own) and own[i] for i in places)


def substitute_below(nodes: Sequence[Node], replacement: Mapping[Node, Node]) -> list[Node]:
    """The one source of each node with every occurrence of a key in it replaced."""
    return [substitute(n.src, replacement)[0] for n in nodes]
