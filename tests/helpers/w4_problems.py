"""Gemms with constant weights of few bits, by a line of the notation."""

from dataclasses import replace

from tilewright.compiler import optimise
from tilewright.ir.graph import Node, substitute
from tilewright.ir.notation import parse
from tilewright.ir.ops import Concat, Input, Param, Transpose
from tilewright.schedule.problem import Problem, problem_of


def posed(line, constant=True):
    """A line's problem, its right operand with scales and zero points constant; `~` before it permits excess precision."""
    (node,) = optimise(parse(line[1:]), excess_precision=True).outputs if line.startswith("~") else parse(line).outputs
    problem = problem_of(node)
    assert isinstance(problem, Problem)
    labels = [s.op.label for s in node.src if isinstance(s.op, Input)]
    return Problem(problem.op, problem.types, tuple(constant and n in ("b", "b_scale", "b_zero_point") for n in labels))


def side_by_side(problem):
    """The problem with its weight in two parts, joined as siblings are."""
    axis = 0 if isinstance(problem.op.rhs.op, Transpose) else 1
    types, weights, joined = [], [], {}
    for i, (t, weight) in enumerate(zip(problem.types, problem.weights, strict=True)):
        cuts = (t.shape[axis] // 4, t.shape[axis] - t.shape[axis] // 4) if weight else ()
        parts = [replace(t, shape=(*t.shape[:axis], cut, *t.shape[axis + 1 :])) for cut in cuts] or [t]
        nodes = [Node(Param(len(types) + j, part)) for j, part in enumerate(parts)]
        joined[Node(Param(i, t))] = Node(Concat(axis), *nodes) if weight else nodes[0]
        types += parts
        weights += [weight] * len(parts)
    lhs, rhs, *stores = substitute((problem.op.lhs, problem.op.rhs, *problem.op.stores), joined)
    return Problem(replace(problem.op, lhs=lhs, rhs=rhs, stores=tuple(stores)), tuple(types), tuple(weights))
