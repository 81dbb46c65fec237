"""erfc as XLA expands it: some ninety operations of rational approximations that are one function."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import cast

import torch

from tilewright.dtype import DType
from tilewright.errors import TilewrightError
from tilewright.ir.build import const, input_, map_
from tilewright.ir.constant import scalar_value
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node
from tilewright.ir.ops import Map, Select
from tilewright.ir.pattern import Match, Pat, rule

MAX_OPERATIONS = 400
ULPS = 8  # and x**2 more: rounding x**2 changes exp(-x**2) by so much, and the expansion multiplies by that


@rule(Pat(Select, where=lambda n: n.dtype.is_float and n.dtype.bits >= 32), stage="recognise")
def expansion_of_erfc_is_erfc(m: Match) -> Node | None:
    """select(|x| < 1, 1 - x * P(x * x), …) -> erfc(x)

    Where: f32 or f64; the result depends on x alone, elementwise; nothing else reads what stands in between; and it *is* erfc:
    it is evaluated at some 2,000 points, the limits among them, and agrees within 8 + x**2 units in the last place. Exact: no,
    within that. Source: the expansion of chlo.erfc, after Cephes' ndtr.c.
    """
    x = _operand(m.node)
    if x is None or x.dtype is not m.node.dtype:
        return None
    inside = _between(m.node, x)
    if inside is None or not _is_erfc(m.node, x, inside):
        return None
    if m.read_outside(n for n in inside if n is not m.node) is not None:
        m.refuse("what this erfc is expanded to is also read elsewhere")
        return None
    return map_("erfc", x)


def _operand(node: Node) -> Node | None:
    """x, where the node selects by |x| < 1."""
    test = node.src[0]
    if not isinstance(test.op, Map) or test.op.fn != "less" or scalar_value(test.src[1]) != 1:
        return None
    size = test.src[0]
    return size.src[0] if isinstance(size.op, Map) and size.op.fn == "abs" else None


def _between(root: Node, x: Node) -> list[Node] | None:
    """The elementwise operations from x to the root, if they read nothing else but numbers; sources first."""
    order: list[Node] = []
    seen = {x}
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in seen and scalar_value(node) is None:
            if not isinstance(node.op, (Map, Select)) or len(seen) > MAX_OPERATIONS:
                return None
            seen.add(node)
            stack.append((node, True))
            stack.extend((s, False) for s in node.src)
    return order


def _is_erfc(root: Node, x: Node, inside: list[Node]) -> bool:
    """Tell whether the root is erfc of x at every point looked at."""
    points, _, _ = _ideal(x.dtype)
    at = input_("x", x.dtype, points.shape)
    moved: dict[Node, Node] = {x: at}
    for node in inside:
        src: list[Node] = []
        for s in node.src:
            number = None if s in moved else scalar_value(s)
            src.append(moved[s] if number is None else const(number, s.dtype))
        moved[node] = Node(node.op, *src)
    return _agrees(moved[root], at)


@lru_cache(maxsize=4)  # a program expands every erfc of a type alike
def _agrees(root: Node, at: Node) -> bool:
    points, ideal, bound = _ideal(at.dtype)
    try:
        found = cast("torch.Tensor", evaluate_nodes([root], {at: points})[0]).to(torch.float64)
    except TilewrightError:
        return False
    return bool(torch.where(torch.isnan(ideal), torch.isnan(found), (found - ideal).abs() <= bound).all())


@cache
def _ideal(dtype: DType) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Points, erfc there in f64, and how far a result of type `dtype` may be from it."""
    edges = torch.tensor([0.0, 1.0, 1e-30, 1e30, float("inf"), float("nan")], dtype=torch.float64)
    points = torch.cat([torch.linspace(-7, 28, 2001, dtype=torch.float64), edges, -edges]).to(dtype.to_torch())
    wide = points.to(torch.float64)
    ideal = torch.special.erfc(wide)
    ulps = ULPS + wide.square().clamp(max=1e4)
    return points, ideal, ulps * dtype.epsilon * ideal.abs() + torch.finfo(points.dtype).tiny
