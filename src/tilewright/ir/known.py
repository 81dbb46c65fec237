"""Values that follow from shapes and small constants alone: a reshape's target and a slice's bounds must be such values.

Exporters compute shapes with ordinary operators (Shape, Gather, Concat, Range, …). Such a chain has a value; it is computed on
demand, and only for an operator that must know it. Where it begins with open extents (`ir/extent.py`) its numbers are extents,
too. Weights are never looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch

from tilewright.ir.dims import exactly
from tilewright.ir.extent import is_open
from tilewright.ir.graph import Node
from tilewright.ir.ops import (
    Broadcast,
    Call,
    Concat,
    Convert,
    Extents,
    Gather,
    Item,
    Map,
    Own,
    Reduce,
    Reshape,
    Select,
    Slice,
    Transpose,
)
from tilewright.ir.types import TensorType

LARGEST = 4096  # elements
RANDOM = frozenset(
    {"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
_NOT_WHILE_READING = RANDOM | {"If", "Loop", "Scan"}  # drawn anew each run; may not end

Known = torch.Tensor | np.ndarray[Any, Any]  # an array of objects where extents are open

_FUNCTIONS: dict[str, Callable[..., Any]] = {  # of arrays of objects
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "negate": lambda a: -a,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "equal": lambda a, b: a == b,
    "not_equal": lambda a, b: a != b,
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "greater": lambda a, b: a > b,
    "greater_equal": lambda a, b: a >= b,
    "sign": np.frompyfunc(lambda v: (v > 0) - (v < 0), 1, 1),
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
}


def _quotient(a: int, b: int) -> int:
    """a / b, rounded toward zero; -1 for a zero divisor, as for the operations."""
    if type(b) is int and b == 0:
        return -1
    less_a, less_b = a < 0, b < 0
    size = (-a if less_a else a) // (-b if less_b else b)
    return -size if less_a is not less_b else size


_TRUNCATING = {"divide": _quotient, "remainder": lambda a, b: a - _quotient(a, b) * b}


class KnownValues:
    """Remembers what was found, so that reading a model looks at each node once."""

    def __init__(self) -> None:
        self._values: dict[Node, Known | None] = {}

    def __call__(self, node: Node) -> torch.Tensor | None:
        """The value of `node` if it is small, and no input of the model or open extent takes part in it, else None."""
        found = self._found(node)
        return found if isinstance(found, torch.Tensor) else None

    def listed(self, node: Node) -> list[int] | list[float] | None:
        """The elements of `node` in order, if it is small and no input of the model takes part in it; whole numbers among them
        may be open extents."""
        found = self._found(node)
        return None if found is None else cast("list[int]", found.reshape(-1).tolist())

    def _found(self, node: Node) -> Known | None:
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

    def _computed(self, node: Node) -> Known | None:
        values = [v for s in node.src if (v := self._values[s]) is not None]
        if len(values) < len(node.src):
            return None
        if not isinstance(node.op, Extents) and all(isinstance(v, torch.Tensor) for v in values):
            return cast("torch.Tensor", node.op.evaluate(node, cast("list[torch.Tensor]", values)))
        with exactly():
            found = _of_extents(node, [_objects(v) for v in values])
        found = None if found is None else np.asarray(found, dtype=object)
        if found is None or is_open(found.reshape(-1).tolist()):
            return found
        return torch.tensor(found.tolist(), dtype=node.dtype.to_torch())


def _objects(value: Known) -> np.ndarray[Any, Any]:
    return np.array(value.tolist(), dtype=object) if isinstance(value, torch.Tensor) else value


def _of_extents(node: Node, src: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any] | None:
    """The value of an operation on whole numbers, some of them open; None for one that has none."""
    op = node.op
    if not (node.dtype.is_integer or node.dtype.kind == "pred"):
        return None
    if isinstance(op, Extents):
        return np.array(op.values, dtype=object).reshape(node.shape)
    if isinstance(op, Map):
        f = np.frompyfunc(_TRUNCATING[op.fn], 2, 1) if op.fn in _TRUNCATING else _FUNCTIONS.get(op.fn)
        return None if f is None else np.asarray(f(*src), dtype=object)
    if isinstance(op, Convert):
        return src[0] if node.src[0].dtype.is_integer and node.dtype.bits >= 32 else None
    if isinstance(op, Select):
        return np.asarray(np.where(src[0].astype(bool), src[1], src[2]), dtype=object)
    if isinstance(op, Reduce):
        if op.fn not in ("add", "multiply"):
            return None
        over, rest = [*op.axes], [a for a in range(src[0].ndim) if a not in op.axes]
        length = math.prod(src[0].shape[a] for a in over)
        rows = src[0].transpose(rest + over).reshape(-1, length) if length else np.empty((node.tensor.elements, 0))
        flat = [sum(r) if op.fn == "add" else math.prod(r) for r in rows]
        return np.array(flat, dtype=object).reshape(node.shape)
    if isinstance(op, (Reshape, Broadcast)):
        return src[0].reshape(op.shape) if isinstance(op, Reshape) else np.broadcast_to(src[0], op.shape)
    if isinstance(op, Transpose):
        return src[0].transpose(op.perm)
    if isinstance(op, Slice):
        return src[0][tuple(slice(lo, hi, by) for lo, hi, by in zip(op.start, op.stop, op.step, strict=True))]
    if isinstance(op, Concat):
        return np.concatenate(src, op.axis)
    if isinstance(op, Gather) and not op.elementwise and not is_open(src[1].reshape(-1).tolist()):
        return np.take(src[0], src[1].astype(np.int64), op.axis)
    return None


def _may_be_known(node: Node) -> bool:
    if not node.constant or not isinstance(node.type, TensorType) or node.dtype.kind == "opaque" or node.type.open:
        return False
    drawn = isinstance(node.op, Call) and node.op.target in _NOT_WHILE_READING
    return node.type.elements <= LARGEST and not isinstance(node.op, (Item, Own)) and not drawn
