"""Gemms with constant weights of few bits, by a line of the notation."""

from tilewright.compiler import optimise
from tilewright.ir.notation import parse
from tilewright.ir.ops import Input
from tilewright.schedule.problem import Problem, problem_of


def posed(line, constant=True):
    """A line's problem, its right operand with scales and zero points constant; `~` before it permits excess precision."""
    (node,) = optimise(parse(line[1:]), excess_precision=True).outputs if line.startswith("~") else parse(line).outputs
    problem = problem_of(node)
    assert isinstance(problem, Problem)
    labels = [s.op.label for s in node.src if isinstance(s.op, Input)]
    return Problem(problem.op, problem.types, tuple(constant and n in ("b", "b_scale", "b_zero_point") for n in labels))
