"""Values that follow from shapes and small constants alone: a reshape's target and a slice's bounds must be such values.

Exporters compute shapes with ordinary operators (Shape, Gather, Concat, Range, …). Shapes are concrete here, so such a
chain has a value; it is computed on demand, and only for an operator that must know it. Weights are never looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from tilewright.ir.graph import Node
from tilewright.ir.ops import Call, Item
from tilewright.ir.types import TensorType

LARGEST = 4096  # elements
RANDOM = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
_NOT_WHILE_READING = RANDOM | {"If", "Loop", "Scan"}  # drawn anew each run; may not end


class KnownValues:
    """Remembers what was found, so that reading a model looks at each node once."""

    def __init__(self) -> None:
        self._values: dict[Node, torch.Tensor | None] = {}

    def __call__(self, node: Node) -> torch.Tensor | None:
        """The value of `node` if it is small and no input of the model takes part in it, else None."""
        stack: list[tuple[Node, Iterator[Node]]] = [(node, self._below(node))]
        while stack:
            current, rest = stack[-1]
            pending = next((s for s in rest if s not in self._values), None)
            if pending is not None:
                stack.append((pending, self._below(pending)))
                continue
            stack.pop()
            if current not in self._values:
                self._values[current] = self._computed(current)
        return self._values[node]

    def _below(self, node: Node) -> Iterator[Node]:
        if node in self._values:
            return iter(())
        if not _may_be_known(node):
            self._values[node] = None
            return iter(())
        return iter(node.src)

    def _computed(self, node: Node) -> torch.Tensor | None:
        values = [self._values[s] for s in node.src]
        if any(v is None for v in values):
            return None
        return cast("torch.Tensor", node.op.evaluate(node, [v for v in values if v is not None]))


def _may_be_known(node: Node) -> bool:
    if not node.constant or not isinstance(node.type, TensorType) or node.dtype.kind == "opaque":
        return False
    drawn = isinstance(node.op, Call) and node.op.target in _NOT_WHILE_READING
    return node.type.elements <= LARGEST and not isinstance(node.op, Item) and not drawn
