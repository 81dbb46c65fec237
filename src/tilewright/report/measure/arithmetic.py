"""Arithmetic of a step, for the roofline: products as the report counts them, all else by the element."""

from __future__ import annotations

from tilewright.ir.graph import Node
from tilewright.ir.ops import Attention, Dequantize, Gemm, LayerNorm, Map, Quantize, Reduce, Select, Softmax
from tilewright.report.program import Step, tensor_types

# Operations an element: subtract, square, two sums, scale, shift, multiply; subtract, exponential, sum, divide.
_PER_ELEMENT = {LayerNorm: 7, Softmax: 4, Quantize: 2, Dequantize: 2, Map: 1, Select: 1}


def arithmetic(step: Step, ops: int) -> int:
    """Operations of a step, `ops` of them those of its products: 0 where it only moves data, or a library's call hides it."""
    if any(isinstance(n.op, (Gemm, Attention)) for n in step.part.nodes):
        return ops
    return sum(_of(n) for n in step.part.nodes)


def _of(node: Node) -> int:
    if isinstance(node.op, Reduce):
        return sum(t.elements for s in node.src for t in tensor_types(s))
    each = next((n for kind, n in _PER_ELEMENT.items() if isinstance(node.op, kind)), 0)
    return each * sum(t.elements for t in tensor_types(node))
