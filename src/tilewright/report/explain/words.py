"""Descriptions of a gemm's or attention's expressions in words: how an operand is read, what happens before a result is
written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.ir.anchor import acc_of, operands_of, stores_of
from tilewright.ir.expression import depends_on_acc
from tilewright.ir.graph import Node, toposort
from tilewright.ir.ops import (
    Acc,
    Attention,
    Broadcast,
    Concat,
    Const,
    Convert,
    Dequantize,
    Gemm,
    Input,
    Map,
    Param,
    Quantize,
    Reshape,
    Slice,
    Transpose,
    maker_of,
)
from tilewright.ir.text import print_expression
from tilewright.ir.types import Shape, TensorType
from tilewright.report.words import ranged

SIGNS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
COMMUTES = frozenset({"add", "multiply", "maximum", "minimum"})
ATTENTION_OPERANDS = ("q", "k", "v", "mask")


def source_name(node: Node, names: Mapping[Node, str]) -> str:
    """A value that a product reads: an input, a constant, or the operation that computes it with its name in `names`."""
    if isinstance(node.op, Input):
        return f"input {node.op.label}"
    if isinstance(node.op, Const):
        if node.tensor.elements == 1:
            return f"{node.op.data.scalar():g}"
        return f"constant {node.op.data.label}" if node.op.data.label else "a constant"
    made_by = maker_of(node)
    name = names.get(node) or names.get(made_by)
    op = made_by.op.fn if isinstance(made_by.op, Map) else made_by.op.name
    shown = op if name is None else f"{op} {name}"
    return f"{shown}, from constants alone" if node.constant else shown


def operand_words(node: Node, names: Mapping[Node, str]) -> list[str]:
    """A line for each operand of a gemm or attention: the stored tensor, then how it is read."""
    called = ATTENTION_OPERANDS if isinstance(node.op, Attention) else ("left", "right")
    lines: list[str] = []
    for name, root in zip(called, operands_of(node), strict=False):
        read = [_reading(n) for n in _path(root)]
        stored = _beside([_stored(leaf, node, names) for leaf in _leaves(root)]) or _shown(root)
        lines.append(f"{name}: {', '.join([stored, *read])}")
    return lines


def _beside(stored: Sequence[str]) -> str:
    """Several stored tensors; equal types once, with all their names."""
    if len(stored) < 2 or any(" (" not in s for s in stored):
        return " beside ".join(stored)
    named: dict[str, list[str]] = {}
    for s in stored:
        kind, _, name = s.removesuffix(")").partition(" (")
        named.setdefault(kind, []).append(name)
    times = {kind: f"{len(names)} x " if len(names) > 1 else "" for kind, names in named.items()}
    return " beside ".join(f"{times[kind]}{kind} ({ranged(names)})" for kind, names in named.items())


def _path(root: Node) -> list[Node]:
    """The operations between a stored tensor and the operand, from the tensor outward; scales are not followed."""
    found: list[Node] = []
    while root.src:
        found.append(root)
        root = root.src[0]
    return found[::-1]


def _leaves(root: Node) -> list[Node]:
    """The stored tensors of an operand: several where they are concatenated."""
    if isinstance(root.op, Concat):
        return [leaf for s in root.src for leaf in _leaves(s)]
    return _leaves(root.src[0]) if root.src else [root]


def _stored(leaf: Node, node: Node, names: Mapping[Node, str]) -> str:
    if not isinstance(leaf.op, Param):
        return _shown(leaf)
    return f"{leaf.type} ({source_name(node.src[leaf.op.index], names)})"


def _reading(node: Node) -> str:
    op = node.op
    if isinstance(op, Dequantize):
        zero = " and a zero point" if len(node.src) == 3 else ""
        return f"dequantised to {op.dtype} with {_scale(node.src[1].tensor, node.shape, op.block)}{zero}"
    if isinstance(op, Convert):
        return f"converted to {op.dtype}"
    if isinstance(op, Transpose):
        rank = len(op.perm)
        swap = op.perm == (*range(rank - 2), rank - 1, rank - 2)
        return "transposed" if swap else f"axes in the order {_list(op.perm)}"
    if isinstance(op, Reshape):
        return f"seen as {_list(op.shape)}"
    if isinstance(op, Slice):
        return f"a slice of it: {_ranges(op, node.src[0].shape)}"
    if isinstance(op, Broadcast):
        return f"repeated to {_list(op.shape)}"
    if isinstance(op, Concat):
        return f"side by side along axis {op.axis}"
    return f"through {op.fn if isinstance(op, Map) else op.name}"


def _scale(scale: TensorType, shape: Shape, block: Shape | None) -> str:
    if block is not None:
        sizes = [b for b in block if b != 1]
        return f"one scale a group of {sizes[0]}" if len(sizes) == 1 else f"one scale a block of {_list(block)}"
    if scale.elements == 1:
        return "one scale"
    aligned = (1,) * (len(shape) - scale.rank) + scale.shape
    varying = [axis for axis, d in enumerate(aligned) if d != 1]
    if varying == [len(shape) - 1]:
        return "one scale a column"
    return "one scale a row" if varying == [len(shape) - 2] else f"scales of shape {_list(scale.shape)}"


def store_words(node: Node, names: Mapping[Node, str]) -> list[tuple[list[str], str]]:
    """The steps from the accumulator on, and what is written, for each store of a gemm or attention."""
    return [_store(root, node, names) for root in stores_of(node)]


def _store(root: Node, node: Node, names: Mapping[Node, str]) -> tuple[list[str], str]:
    written = str(root.type)
    views: list[str] = []
    while isinstance(root.op, (Reshape, Transpose)):
        views.append(_reading(root))
        root = root.src[0]
    if views:
        written += f", written where the program wants it ({', '.join(reversed(views))})"
    return _chain(root, node, names), written


def inner_words(node: Node, names: Mapping[Node, str]) -> dict[str, list[str]]:
    """The steps within an attention: of its "scores" before they are masked, of its "weights" before they multiply values."""
    op = node.op
    roots = {"scores": op.scores, "weights": op.weights} if isinstance(op, Attention) else {}
    return {name: _chain(root, node, names) for name, root in roots.items() if root is not None}


def _chain(root: Node, node: Node, names: Mapping[Node, str]) -> list[str]:
    """The steps from the accumulator to an expression of it."""
    dependent = depends_on_acc((root,))
    steps: list[str] = []
    while not isinstance(root.op, Acc):
        inner = [s for s in root.src if s in dependent]
        if len(inner) != 1:
            steps.append(_expression(root, node, names))
            break
        steps.append(_step(root, inner[0], node, names))
        root = inner[0]
    return steps[::-1]


def _step(root: Node, inner: Node, node: Node, names: Mapping[Node, str]) -> str:
    op = root.op
    if isinstance(op, Quantize) and root.src[0] is inner:
        zero = " and a zero point" if len(root.src) == 3 else ""
        return f"quantise to {op.dtype} with {_scale(root.src[1].tensor, root.shape, op.block)}{zero}"
    if isinstance(op, Dequantize) and root.src[0] is inner:
        return f"dequantise with {_scale(root.src[1].tensor, root.shape, op.block)}"
    if isinstance(op, Convert):
        narrows = op.dtype.is_integer and (root.src[0].dtype.is_float or op.dtype.bits < root.src[0].dtype.bits)
        return f"convert to {op.dtype}{', ' + _OVERFLOW[op.overflow] if narrows else ''}"
    if isinstance(op, Slice):
        return f"take {_ranges(op, inner.shape)}"
    if isinstance(op, Map) and len(root.src) == 1:
        return op.fn
    if isinstance(op, Map) and len(root.src) == 2:
        other = root.src[1] if root.src[0] is inner else root.src[0]
        side = _side(other, node, names)
        if root.src[0] is inner or op.fn in COMMUTES:
            return f"{SIGNS[op.fn]} {side}" if op.fn in SIGNS else f"{op.fn} with {side}"
        return f"{side} {SIGNS[op.fn]} it" if op.fn in SIGNS else f"{op.fn} of {side} and it"
    return _expression(root, node, names)


_OVERFLOW = {"wrap": "wrapping", "saturate": "saturating", "ieee": "overflowing to infinity"}


def _side(side: Node, node: Node, names: Mapping[Node, str]) -> str:
    """A side input in an epilogue, its views and casts left out."""
    inner = side
    while isinstance(inner.op, (Convert, Reshape, Broadcast, Transpose)):
        inner = inner.src[0]
    if isinstance(inner.op, Param):
        source = node.src[inner.op.index]
        name = source_name(source, names)
        return name if source.tensor.elements == 1 and isinstance(source.op, Const) else f"{inner.type} ({name})"
    return _shown(inner) if isinstance(inner.op, Const) else _expression(inner, node, names)


def _shown(leaf: Node) -> str:
    if isinstance(leaf.op, Const) and leaf.tensor.elements == 1:
        return f"{leaf.op.data.scalar():g}"
    return str(leaf.type)


def _expression(root: Node, node: Node, names: Mapping[Node, str]) -> str:
    shown = {n: _shown(n) for n in toposort((root,)) if isinstance(n.op, Const)}
    for n in toposort((root,)):
        if isinstance(n.op, Param):
            shown[n] = f"<{source_name(node.src[n.op.index], names)}>"
    return print_expression(root, shown)


def _list(values: Sequence[int]) -> str:
    return f"[{','.join(map(str, values))}]"


def _ranges(op: Slice, shape: Shape) -> str:
    names = {len(shape) - 1: "columns", len(shape) - 2: "rows"}
    parts = [
        f"{names.get(axis, f'axis {axis}')} {lo}:{hi}{f':{by}' if by != 1 else ''}"
        for axis, (lo, hi, by, d) in enumerate(zip(op.start, op.stop, op.step, shape, strict=True))
        if (lo, hi, by) != (0, d, 1)
    ]
    return ", ".join(parts) or "all"


def accumulator_words(node: Node) -> str:
    """The type a product accumulates in, and over how many terms."""
    acc = acc_of(node)
    if isinstance(node.op, Gemm):
        return f"{acc.type}, sums of {node.op.lhs.shape[-1]} products"
    assert isinstance(node.op, Attention)
    causal = "" if node.op.causal == "no" else f", causal ({node.op.causal})"
    scale = "" if node.op.scale == 1 else f"{node.op.scale:.6g} "
    return f"{acc.type}, softmax({scale}q k^T) v{causal}"
