"""A float model in 16 bits: products, attention and norms read and leave f16 or bf16, and nothing else is rounded.

Like quantising, this is a choice that feeds the rewrite rules, and not one of them. Where a value meets a product, an attention
or a norm, `in_half` writes a cast to 16 bits and back, as a model file might have them, and the rules fold these casts. What
lies between (bias, activation, residual, the sums inside) stays in f32, where kernels hold it anyhow; but a gelu that is
quantised at once is one of f16, as in a model of that type, which a GPU computes two at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tilewright.dtype import F16, F32, DType, dtype
from tilewright.errors import InputError
from tilewright.ir.build import convert
from tilewright.ir.expression import REDUCED_PRECISION_SAFE_TO_8_BITS
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import VIEWS, Attention, Convert, Dequantize, Gemm, LayerNorm, Map, Quantize, Softmax
from tilewright.ir.pattern import Rule, Trace, discover, released, rewrite

RECOGNISED = ("accumulator", "canonical", "recognise")


def half(name: str) -> DType:
    """The 16-bit type called `name`.

    Raises:
        InputError: it is none of "f16" and "bf16".
    """
    if name not in ("f16", "bf16"):
        raise InputError(f"{name!r} is no float of 16 bits", hint="f16 or bf16")
    return dtype(name)


def recognised(graph: Graph) -> Graph:
    """The graph with its norms, activations and attentions in one node each."""
    rules = [r for r in discover("tilewright.rules", Rule) if r.stage in RECOGNISED]
    trace = Trace()
    return released(rewrite(graph, rules, trace), trace)


def in_half(graph: Graph, to: DType) -> Graph:
    """The model with its f32 products, attentions and norms in `to`, f16 or bf16; inputs and results keep their types.

    Norms and attention are recognised first, so that what they compute inside is not rounded. Products of two quantised
    operands, and masks that are added to scores, are left as they are; a weight that alone is quantised is dequantised to `to`.
    """
    graph = recognised(graph)
    rounded = {n for node in graph.nodes() for n in _met(node) if n.dtype is F32}
    quantised = _quantised_at_once(graph) if to is F16 else set[Node]()
    origins = dict(graph.origins)
    settled: dict[Node, Node] = {}
    for node in graph.nodes():
        src = [settled[s] for s in node.src]
        if node in quantised:
            made = convert(Node(node.op, *(convert(s, to) for s in src)), F32)
        elif node not in rounded:
            made = _in_its_own_type(node, src)
        elif isinstance(node.op, Dequantize):
            made = convert(Node(replace(node.op, dtype=to), *src), F32)
        else:
            made = convert(convert(_in_its_own_type(node, src), to), F32)
        settled[node] = made
        if node in graph.origins:
            origins.setdefault(made, graph.origins[node])
    return graph.with_outputs([settled[o] for o in graph.outputs], origins)


def _met(node: Node) -> Iterator[Node]:
    """The values at which a node meets the memory."""
    if isinstance(node.op, Gemm):
        quantised = [_dequantized(s) for s in node.src]
        if not all(quantised):
            yield from (q or s for q, s in zip(quantised, node.src, strict=True))
    elif isinstance(node.op, Attention):
        yield from node.src[:3]
    elif isinstance(node.op, (LayerNorm, Softmax)):
        yield from (node.src[0], node)


def _quantised_at_once(graph: Graph) -> set[Node]:
    """The gelus of f32 that nothing reads but, through views, a quantisation to 8 bits."""
    readers = Counter(s for n in graph.nodes() for s in {*n.src})
    readers.update(graph.outputs)
    found: set[Node] = set()
    for n in graph.nodes():
        if not isinstance(n.op, Quantize) or n.dtype.bits != 8:
            continue
        value = n.src[0]
        while isinstance(value.op, VIEWS) and readers[value] == 1:
            value = value.src[0]
        known = isinstance(value.op, Map) and value.op.fn in REDUCED_PRECISION_SAFE_TO_8_BITS
        if known and value.dtype is F32 and readers[value] == 1:
            found.add(value)
    return found


def _dequantized(node: Node) -> Node | None:
    """The dequantisation that a node is a view of."""
    while isinstance(node.op, VIEWS):
        node = node.src[0]
    return node if isinstance(node.op, Dequantize) else None


def _in_its_own_type(node: Node, src: Sequence[Node]) -> Node:
    """The node over other sources; an attention over q, k and v as they were before they were widened."""
    narrow = [s.src[0] for s in src[:3] if isinstance(s.op, Convert)]
    if isinstance(node.op, Attention) and not node.op.regions() and node.dtype is F32 and len(narrow) == 3:
        return convert(Node(node.op, *narrow, *src[3:]), F32)
    return node.with_src(src)
