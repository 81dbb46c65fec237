"""Reading what normalisations are made of: values that hold one number a row, under whatever views and roundings they stand.

A row value is computed from a reduction that keeps no element of its row. Reshapes do not reorder it and the steps on it are
elementwise, so it may be followed through both; rounding it to a narrower float on the way is not part of its meaning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.ir.constant import scalar_value, unrounded
from tilewright.ir.extent import is_open
from tilewright.ir.graph import Node
from tilewright.ir.ops import Map, Reduce, Reshape
from tilewright.ir.ops.shape import reduced_shape
from tilewright.ir.types import Shape

COUNT_TOLERANCE = 1e-6  # 1 / n rounded to f32


@dataclass(frozen=True)
class RowMean:
    """The mean of `x` over `axes`."""

    x: Node
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Spread:
    """(mean(y**2) + epsilon) ** power over axes; with `difference`, mean(y**2) - mean(y)**2 in place of the mean square."""

    y: Node
    axes: tuple[int, ...]
    epsilon: float
    power: float
    difference: bool


def function_of(node: Node) -> str:
    """The name of an elementwise function, or "" for anything else."""
    return node.op.fn if isinstance(node.op, Map) else ""


def kept_shape(shape: Shape, axes: Sequence[int]) -> Shape:
    """Shape of a row value that broadcasts against its rows."""
    return reduced_shape(shape, tuple(axes), True)


def spans_rows(node: Node, shape: Shape, axes: Sequence[int]) -> bool:
    """Tell whether a row value, as it stands, broadcasts against the rows it was computed from."""
    kept = kept_shape(shape, axes)
    missing = len(kept) - len(node.shape)
    return missing >= 0 and node.shape == kept[missing:] and all(d == 1 for d in kept[:missing])


class RowReader:
    """Reads row values.

    Attributes:
        passed: the nodes between what was read and what it was computed from.
        why: a sentence, where something nearly was what was looked for.
    """

    def __init__(self) -> None:
        self.passed: list[Node] = []
        self.why: str | None = None

    def bare(self, node: Node) -> Node:
        """The row value before reshapes and roundings."""
        while isinstance(node.op, Reshape) or unrounded(node) is not node:
            self.passed.append(node)
            node = node.src[0]
        self.passed.append(node)
        return node

    def wide(self, node: Node) -> Node:
        """A value with elements in its rows, before roundings."""
        base = unrounded(node)
        while node is not base:
            self.passed.append(node)
            node = node.src[0]
        return base

    def reduction(self, node: Node, fn: str) -> RowMean | None:
        """The value that `node` reduces by `fn`, and the axes; None for any other node."""
        node = self.bare(node)
        if not isinstance(node.op, Reduce) or node.op.fn != fn or not node.dtype.is_float:
            return None
        return RowMean(self.wide(node.src[0]), node.op.axes)

    def mean(self, node: Node) -> RowMean | None:
        """The value that `node` is the mean of: by a mean, or by a sum divided by the count or multiplied by its reciprocal."""
        node = self.bare(node)
        if isinstance(node.op, Reduce):
            return self.reduction(node, "mean")
        factor, rest = self._scaled(node)
        total = self.reduction(rest, "add") if rest is not None else None
        if total is None:
            return None
        count = math.prod(total.x.shape[a] for a in total.axes)
        if not is_open((count,)) and abs(factor * count - 1) <= COUNT_TOLERANCE:
            return total
        self.why = f"its mean divides the sum by {1 / factor:g}, not by {count}" if factor else None
        return None

    def _scaled(self, node: Node) -> tuple[float, Node | None]:
        """A number, and the rest that `node` is that many times."""
        if function_of(node) == "divide":
            number = scalar_value(node.src[1])
            return (1 / number, node.src[0]) if number else (1.0, None)
        if function_of(node) == "multiply":
            for rest, other in (node.src, reversed(node.src)):
                number = scalar_value(other)
                if number is not None:
                    return number, rest
        return 1.0, None

    def square(self, node: Node) -> Node | None:
        """y, if `node` is y * y or y ** 2."""
        node = self.wide(node)
        self.passed.append(node)
        if function_of(node) == "multiply" and node.src[0] is node.src[1]:
            return node.src[0]
        if function_of(node) == "power" and scalar_value(node.src[1]) == 2 and node.src[0].shape == node.shape:
            return node.src[0]
        return None

    def spread(self, node: Node) -> Spread | None:
        """The deviation, or its inverse, that `node` is."""
        power = 1.0
        node = self.bare(node)
        while True:
            fn = function_of(node)
            if fn in ("sqrt", "rsqrt"):
                power, node = power * (0.5 if fn == "sqrt" else -0.5), self.bare(node.src[0])
            elif fn == "power" and (number := scalar_value(node.src[1])) is not None:
                power, node = power * number, self.bare(node.src[0])
            elif fn == "divide" and scalar_value(node.src[0]) == 1:
                power, node = -power, self.bare(node.src[1])
            else:
                break
        epsilon = 0.0
        if function_of(node) == "add":
            for rest, other in (node.src, reversed(node.src)):
                number = scalar_value(other)
                if number is not None and math.isfinite(number):
                    epsilon, node = float(number), self.bare(rest)
                    break
        if power in (0.5, -0.5):
            return self._variance(node, epsilon, power)
        if epsilon and function_of(node) == "sqrt" and RowReader().spread(node) is not None:
            self.why = "its epsilon is added after the root, not under it"
        return None

    def _variance(self, node: Node, epsilon: float, power: float) -> Spread | None:
        if function_of(node) in ("maximum", "relu"):
            node = self._not_negative(node)
        if function_of(node) != "subtract":
            return self._mean_square(node, epsilon, power)
        whole = self._mean_square(node.src[0], epsilon, power)
        root = self.square(self.bare(node.src[1])) if whole is not None else None
        mean = self.mean(root) if root is not None else None
        if whole is None or mean is None or mean.x is not whole.y or mean.axes != whole.axes:
            return None
        return Spread(whole.y, whole.axes, epsilon, power, difference=True)

    def _mean_square(self, node: Node, epsilon: float, power: float) -> Spread | None:
        mean = self.mean(node)
        if mean is None:
            return None
        y = self.square(mean.x)
        return None if y is None else Spread(unrounded(y), mean.axes, epsilon, power, difference=False)

    def _not_negative(self, node: Node) -> Node:
        """The variance inside maximum(0, variance), which rounding may have made negative."""
        if function_of(node) == "relu":
            return self.bare(node.src[0])
        for rest, other in (node.src, reversed(node.src)):
            if scalar_value(other) == 0:
                return self.bare(rest)
        return node
