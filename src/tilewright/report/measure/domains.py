"""Random values that an input may take without making the program meaningless.

Random integers are no token ids and random scales may be zero or negative. The graph says what an input is for:

- an integer of 32 bits or more that picks elements (the indices of a gather) stays within the extent that it picks from, and
  indices of places to write differ from one another;
- one that is compared, converted to a float or truth value, or handed to an opaque call is a mask: each row of its last axis
  is ones and then zeros, as padding leaves it;
- a float that scales a quantisation is positive;
- anything else takes any value of its type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tilewright.ir.graph import Graph, Node, toposort
from tilewright.ir.ops import (
    Broadcast,
    Call,
    Concat,
    Convert,
    Dequantize,
    Gather,
    Input,
    Item,
    Map,
    Pad,
    Param,
    Quantize,
    Reshape,
    Select,
    Slice,
    Transpose,
    Write,
)
from tilewright.schedule.sample import random_tensor

MOVES = (Reshape, Transpose, Slice, Broadcast, Item, Concat, Pad)


@dataclass(frozen=True)
class Domain:
    """The domain of an input's random values; `stop` is the end of a range of indices, `distinct` ones if possible."""

    kind: Literal["any", "index", "mask", "positive"] = "any"
    stop: int = 0
    distinct: bool = False

    def __str__(self) -> str:
        names = {"any": "random", "positive": "random, positive", "mask": "random padding mask of 0 and 1"}
        return names.get(self.kind, f"random indices 0 to {self.stop - 1}")

    def draw(self, node: Node, generator: torch.Generator) -> torch.Tensor:
        """A random value for the input `node`."""
        t = node.tensor
        if self.distinct and t.elements <= self.stop:
            return torch.randperm(self.stop, generator=generator)[: t.elements].reshape(t.shape).to(t.dtype.to_torch())
        if self.kind == "index":
            return torch.randint(0, max(self.stop, 1), t.shape, generator=generator).to(t.dtype.to_torch())
        if self.kind == "mask":
            width = t.shape[-1] if t.shape else 1
            lengths = torch.randint((width + 1) // 2, width + 1, (*t.shape[:-1], 1), generator=generator)
            return (torch.arange(width) < lengths).reshape(t.shape).to(t.dtype.to_torch())
        return random_tensor(t, generator, positive=self.kind == "positive")


def domains(graph: Graph) -> dict[Node, Domain]:
    """The domain of every input of a program as it was read."""
    stops: dict[Node, int] = {}
    masks: set[Node] = set()
    places: set[Node] = set()
    positive: set[Node] = set()
    carried: dict[Node, frozenset[Node]] = {}  # inputs whose integers an integer value is made of
    floats: dict[Node, Node] = {}  # the input that a float value is a view or cast of
    for node in graph.nodes():
        carried[node] = _carried(node, carried, stops, masks)
        if isinstance(node.op, Write):
            places.update(carried[node.src[1]])
        if isinstance(node.op, Input) and node.tensor.dtype.is_float:
            floats[node] = node
        elif isinstance(node.op, (Convert, *MOVES)) and node.src[0] in floats:
            floats[node] = floats[node.src[0]]
        positive.update(floats[s] for s in _scales(node) if s in floats)
    found: dict[Node, Domain] = {}
    for node in graph.inputs:
        if node in stops:
            found[node] = Domain("index", stops[node], distinct=node in places)
        elif node in masks:
            found[node] = Domain("mask")
        else:
            found[node] = Domain("positive" if node in positive else "any")
    return found


def _carried(node: Node, carried: dict[Node, frozenset[Node]], stops: dict[Node, int], masks: set[Node]) -> frozenset[Node]:
    """The inputs whose integers this node's value is made of; records what the node says of its sources' inputs."""
    op = node.op
    if isinstance(op, Input):
        wide = node.tensor.dtype.is_integer and node.tensor.dtype.bits >= 32
        return frozenset({node}) if wide else frozenset()
    sources = [carried[s] for s in node.src]
    together = frozenset[Node]().union(*sources)
    if not together:
        return together
    if isinstance(op, (Gather, Write)):
        extent = node.src[0].shape[op.axis]
        stops.update((i, min(extent, stops.get(i, extent))) for i in sources[1])
        return sources[0] if isinstance(op, Gather) else frozenset()
    if isinstance(op, Call):
        masks.update(together)
        return frozenset()
    if isinstance(op, (Map, Convert)):
        if node.tensor.dtype.is_integer:
            return together
        masks.update(together)
        return frozenset()
    if isinstance(op, Select):
        return sources[1] | sources[2]
    return together if isinstance(op, MOVES) else frozenset()


def _scales(node: Node) -> list[Node]:
    """The sources of a node that scale a quantisation, in the node itself or in an expression it carries."""
    if isinstance(node.op, (Quantize, Dequantize)):
        return [node.src[1]]
    inner = toposort(node.op.region_roots())
    under = toposort(n.src[1] for n in inner if isinstance(n.op, (Quantize, Dequantize)))
    return [node.src[n.op.index] for n in under if isinstance(n.op, Param)]
