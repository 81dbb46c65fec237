"""Fusions as problems: norms, and quantising by row."""

from tilewright.dtype import F32, S8
from tilewright.ir.build import const, map_, reduce_
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import Input, LayerNorm, Quantize
from tilewright.schedule.problem import FusionProblem, fusion_of


def problem_of(*roots) -> FusionProblem:
    return fusion_of([n for n in toposort(roots) if isinstance(n.op, Input)], roots)[0]


def norm(x, *more, center=True, epsilon=1e-5):
    return Node(LayerNorm(len(x.shape) - 1, epsilon, center), x, *more)


def by_row(x, dtype=S8):
    """Quantised by a scale of each row's own."""
    scale = map_("divide", reduce_("maximum", map_("abs", x), (len(x.shape) - 1,), True), const(float(dtype.max), F32))
    return Node(Quantize(dtype), x, scale), scale
