"""ONNX's matrix products: MatMul, Gemm, Einsum, and weights packed in 2, 4 or 8 bits, tables of them included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tilewright.dtype import F32, S4, S8, S64, U4, U8, DType
from tilewright.frontends.onnx.node import OpNode, converts
from tilewright.frontends.onnx.scope import MICROSOFT
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, const, convert, map_, reduce_, reshape, slice_, swap_last, transpose
from tilewright.ir.graph import Node
from tilewright.ir.literal import Literal
from tilewright.ir.ops import Concat, Const, Dequantize, Gather, Quantize, Reshape, Select, gemm
from tilewright.ir.types import TensorType

EIGHT_BITS = 4  # accuracy_level of onnxruntime's MatMulNBits: activations may be quantised to 8 bits


def matmul(a: Node, b: Node, acc_dtype: DType | None = None, out_dtype: DType | None = None) -> Node:
    """a @ b as numpy.matmul has it: a vector is a row on the left and a column on the right, batch axes broadcast."""
    left, right = a, b
    if len(a.shape) == 1:
        left = reshape(a, (1, *a.shape))
    if len(b.shape) == 1:
        right = reshape(b, (*b.shape, 1))
    product = gemm(left, right, acc_dtype=acc_dtype, out_dtype=out_dtype)
    shape = list(product.shape)
    if len(b.shape) == 1:
        del shape[-1]
    if len(a.shape) == 1:
        del shape[-1 if len(b.shape) == 1 else -2]
    return reshape(product, shape)


@converts("MatMul", 1, 13)
def _matmul(op: OpNode) -> Node:
    a, b = op.input(0), op.input(1)
    return matmul(a, b, out_dtype=a.dtype)


def gemm_operands(op: OpNode, right: int) -> tuple[Node, Node]:
    """The matrices that are the first input and this one, transposed where `transA` and `transB` say so.

    Raises:
        InputError: one is no matrix.
    """
    a, b = op.input(0), op.input(right)
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise op.malformed(f"{op.op_type} of {a.type} and {b.type}", "it takes matrices")
    return swap_last(a) if op.integer("transA", 0) else a, swap_last(b) if op.integer("transB", 0) else b


def gemm_of(op: OpNode) -> Node:
    """alpha * A' @ B' + beta * C, rounded once to the operands' type.

    Raises:
        InputError: A or B is no matrix.
        Unmodelled: integers are scaled by a fraction.
    """
    a, b = gemm_operands(op, 1)
    c = op.optional(2)
    alpha, beta = op.real("alpha", 1.0), op.real("beta", 1.0)
    dtype = a.dtype
    if dtype.is_integer and (alpha != int(alpha) or beta != int(beta)):
        raise Unmodelled("it scales integers by a fraction")
    y = gemm(a, b)
    if alpha != 1.0:
        y = map_("multiply", y, const(alpha if dtype.is_float else int(alpha), y.dtype))
    if c is not None:
        c = convert(c, y.dtype)
        if beta != 1.0:
            c = map_("multiply", c, const(beta if dtype.is_float else int(beta), y.dtype))
        y = map_("add", y, broadcast(c, y.shape))
    return convert(y, dtype)


converts("Gemm", 7, 13)(gemm_of)


class _Term(NamedTuple):
    """A tensor and a label for each of its axes."""

    node: Node
    labels: tuple[str, ...]


@converts("Einsum", 12, 28)
def _einsum(op: OpNode) -> Node:
    """Operands two at a time: labels that both have and nothing later needs are multiplied out by a gemm."""
    operands = [op.input(i) for i in range(len(op.sources))]
    left, arrow, right = op.text("equation").replace(" ", "").partition("->")
    texts = left.split(",")
    if len(texts) != len(operands):
        raise op.malformed(f"Einsum names {len(texts)} operands, {len(operands)} are given")
    terms = [_Term(n, _labels(t, len(n.shape), op)) for t, n in zip(texts, operands, strict=True)]
    named = [label for t in terms for label in t.labels]
    if arrow:
        widest = max((sum(label.startswith(".") for label in t.labels) for t in terms), default=0)
        result = _labels(right, len(right.replace("...", "")) + (widest if "..." in right else 0), op)
    else:
        spread = sorted({label for label in named if label.startswith(".")}, key=lambda label: -int(label[1:]))
        result = (*spread, *sorted(label for label in set(named) if named.count(label) == 1 and label.isalpha()))
    for label in named:
        extents = {t.node.shape[t.labels.index(label)] for t in terms if label in t.labels}
        if len(extents - {1}) > 1:
            raise Unmodelled(f"the axes called {label!r} differ in extent")
        if len(extents) > 1:  # an axis of 1 stands for all of a longer one
            terms = [_without(t, label) if label in t.labels and t.node.shape[t.labels.index(label)] == 1 else t for t in terms]
    total = terms[0]
    for i, term in enumerate(terms[1:], 1):
        later = {label for t in terms[i + 1 :] for label in t.labels}
        total = _contracted(total, term, {*result, *later})
    total = _summed(total, set(result))
    return transpose(total.node, [total.labels.index(label) for label in result])


def _labels(text: str, rank: int, op: OpNode) -> tuple[str, ...]:
    """A label for each axis; those an ellipsis stands for are counted from its right."""
    before, dots, after = text.partition("...")
    hidden = rank - len(before) - len(after)
    if hidden < 0 or (hidden and not dots) or (not (before + after).isalpha() and before + after):
        raise op.malformed(f"Einsum term {text!r} for a tensor of rank {rank}")
    labels = (*before, *(f".{i}" for i in reversed(range(hidden))), *after)
    if len(set(labels)) != len(labels):
        raise Unmodelled("it takes a diagonal")
    return labels


def _without(term: _Term, label: str) -> _Term:
    """The term less an axis of extent 1."""
    at = term.labels.index(label)
    shape = term.node.shape
    return _Term(reshape(term.node, (*shape[:at], *shape[at + 1 :])), (*term.labels[:at], *term.labels[at + 1 :]))


def _summed(term: _Term, wanted: set[str]) -> _Term:
    """The term with the axes nobody wants added up."""
    gone = [i for i, label in enumerate(term.labels) if label not in wanted]
    if not gone:
        return term
    return _Term(reduce_("add", term.node, gone), tuple(label for label in term.labels if label in wanted))


def _contracted(a: _Term, b: _Term, wanted: set[str]) -> _Term:
    a, b = _summed(a, wanted | set(b.labels)), _summed(b, wanted | set(a.labels))
    shared = [label for label in a.labels if label in b.labels]
    batch = [label for label in shared if label in wanted]
    inner = [label for label in shared if label not in wanted]
    rows = [label for label in a.labels if label not in shared]
    columns = [label for label in b.labels if label not in shared]
    extent = dict(zip((*a.labels, *b.labels), (*a.node.shape, *b.node.shape), strict=True))

    def flattened(term: _Term, *groups: Sequence[str]) -> Node:
        order = [*batch, *(label for g in groups for label in g)]
        moved = transpose(term.node, [term.labels.index(label) for label in order])
        return reshape(moved, [*(extent[label] for label in batch), *(math.prod(extent[x] for x in g) for g in groups)])

    left, right = flattened(a, rows, inner), flattened(b, inner, columns)
    product = gemm(left, right, out_dtype=a.node.dtype) if inner else map_("multiply", left, right)
    labels = (*batch, *rows, *columns)
    return _Term(reshape(product, [extent[label] for label in labels]), labels)


@converts("MatMulNBits", 1, 1, MICROSOFT)
def _matmul_nbits(op: OpNode) -> Node:
    """A @ W^T, W [N, K] in groups of `block_size` along K: (code - zero point) * scale (onnxruntime's contrib operator).

    Codes lie in B [N, groups, bytes a group], the low half of a byte first; zero points, packed the same way or as floats,
    are 2**(bits - 1) when absent. An `accuracy_level` of 4 permits to quantise A to 8 bits by the groups of the weights, which
    is done for weights of 4 bits with whole zero points; the product is then one of f32, whatever A is. With `g_idx`, which is
    the group of each place along K, every place has a scale of its own.
    """
    a, packed, scales = op.input(0), op.input(1), op.input(2)
    n, k = op.integer("N"), op.integer("K")
    bits, block = op.integer("bits", 4), op.integer("block_size")
    if bits not in (2, 4, 8):
        raise op.refuse(f"MatMulNBits of {bits} bits", "2, 4 or 8 bits")
    groups = -(-k // block) if block > 0 else 0
    if (
        groups < 1
        or n < 1
        or packed.tensor.elements != n * groups * (block * bits // 8)
        or scales.tensor.elements != n * groups
    ):
        raise op.malformed(f"MatMulNBits of N={n} K={k} by {packed.type}, scales {scales.type}")
    zero = op.optional(3)
    order = op.optional(4)
    quantize_activations = (
        op.integer("accuracy_level", 0) == EIGHT_BITS and bits == 4 and (zero is None or not zero.dtype.is_float)
    )
    quantize_activations = quantize_activations and order is None
    if order is not None and (bits != 4 or (zero is not None and not zero.dtype.is_float)):  # onnxruntime's own differ or fail
        what = f"MatMulNBits of {bits} bits with g_idx" + (" and zero points" if zero is not None else "")
        raise op.refuse(what, "quantize without reordering (act_order)")
    dtype = F32 if quantize_activations else a.dtype
    plain = zero is None and bits < 8 and isinstance(packed.op, Const)  # then s4 codes: no zero points to keep
    codes = unpacked(reshape(packed, (n, groups * block * bits // 8)), bits, signed=plain)
    scale = reshape(scales, (n, groups))
    if zero is not None:
        held = -(-groups * bits // 8)
        zero = (
            reshape(zero, (n, groups))
            if zero.dtype.is_float
            else slice_(unpacked(reshape(zero, (n, held)), bits), 1, 0, groups)
        )
    if order is not None:
        if len(order.shape) != 1 or order.shape[0] < k:
            raise op.malformed(f"MatMulNBits of K={k} with g_idx {order.type}", "a group for each place along K")
        at = slice_(order, 0, 0, k)
        codes, scale = slice_(codes, 1, 0, k), Node(Gather(1, wraps=False), scale, at)
        zero = None if zero is None else Node(Gather(1, wraps=False), zero, at)
        groups, block = k, 1
    if zero is not None and zero.dtype.is_float:
        apart = convert(convert(reshape(codes, (n, groups, block)), U8), F32)
        shifted = map_("subtract", apart, reshape(convert(zero, F32), (n, groups, 1)))
        whole = map_("multiply", shifted, reshape(convert(scale, F32), (n, groups, 1)))
        weight = slice_(convert(reshape(whole, (n, groups * block)), dtype), 1, 0, k)
    else:
        codes = slice_(codes, 1, 0, k)
        zeros = [] if zero is None else [zero]
        if zero is None and not plain:
            zeros = [broadcast(const(1 << bits - 1, codes.dtype), (n, groups))]
        weight = Node(Dequantize(dtype, (1, block)), codes, scale, *zeros)
    left = _quantized(a, block) if quantize_activations else a
    y = convert(reshape(matmul(left, swap_last(weight), out_dtype=dtype), (*a.shape[:-1], n)), a.dtype)
    bias = op.optional(5)
    return y if bias is None else map_("add", y, bias)


def _quantized(a: Node, block: int) -> Node:
    """a [..., K] by way of s8 codes, `block` along K sharing a scale: their largest magnitude / 127. A vector becomes a row."""
    a = convert(reshape(a, (1, *a.shape)) if len(a.shape) == 1 else a, F32)
    *outer, k = a.shape
    groups = -(-k // block)
    if k % block:
        nothing = broadcast(const(0.0, F32), (*outer, groups * block - k))
        whole = Node(Concat(len(outer)), a, nothing)
    else:
        whole = a
    apart = reshape(whole, (math.prod(outer) * groups, block))
    scale = map_("divide", reduce_("maximum", map_("abs", apart), [1], keepdims=True), const(127.0, F32))
    codes = reshape(Node(Quantize(S8), apart, scale), (*outer, groups * block))
    shape = (*(1 for _ in outer), block)
    return Node(Dequantize(F32, shape), slice_(codes, len(outer), 0, k), reshape(scale, (*outer, groups)))


def unpacked(packed: Node, bits: int, *, signed: bool = False) -> Node:
    """u8 [rows, bytes] as codes [rows, bytes * 8 / bits], those of 2 bits as u4 too.

    A weight stays a weight, unpacked when first used, and may become s4: each code less half of how many there are.
    """
    if bits == 8:
        return packed
    each, ones = 8 // bits, (1 << bits) - 1
    shape = (packed.shape[0], packed.shape[1] * each)
    source = packed.src[0] if isinstance(packed.op, Reshape) else packed
    if isinstance(source.op, Const):
        data = source.op.data

        def load() -> torch.Tensor:
            whole = data.tensor().reshape(-1)
            codes = torch.stack([whole >> bits * i & ones for i in range(each)], -1).reshape(shape)
            return codes.to(torch.int8) - (1 << bits - 1) if signed else codes

        return Node(Const(Literal(TensorType(S4 if signed else U4, shape), load, data.label)))
    parts = [map_("and", map_("shift_right_logical", packed, const(bits * i, U8)), const(ones, U8)) for i in range(each)]
    apart = [reshape(p, (*packed.shape, 1)) for p in parts]
    return convert(reshape(Node(Concat(2), *apart), shape), U4)


@converts("GatherBlockQuantized", 1, 1, MICROSOFT)
def _gather_block_quantized(op: OpNode) -> Node:
    """Slices of (code - zero point) * scale, a scale for each `block_size` along `quantize_axis`; 0 for an index outside.

    u8 data hold codes of `bits` bits, low bits first along the last axis; their zero point is 2**(bits - 1) when absent, that
    of a 4-bit type 0. What is gathered is the codes.
    """
    data, indices, scales, zeros = op.input(0), op.input(1), op.input(2), op.optional(3)
    rank = len(data.shape)
    axis, along = op.axis("gather_axis", 0, rank), op.axis("quantize_axis", 1, rank)
    block, bits = op.integer("block_size", 128), op.integer("bits", 4)
    if data.dtype.is_float or block < 1:
        raise op.refuse(f"GatherBlockQuantized of {data.type}", "integer codes by blocks")
    if data.dtype is U8:
        if bits not in (2, 4, 8):
            raise op.refuse(f"GatherBlockQuantized of {bits} bits", "2, 4 or 8 bits")
        extent = data.shape[-1] * (8 // bits)
        data = _unpacked_last(data, bits, extent)
        if zeros is not None:
            zeros = _unpacked_last(zeros, bits, scales.shape[-1])
        else:
            zeros = broadcast(const(1 << bits - 1, data.dtype), scales.shape)
    wanted = tuple(-(-d // block) if a == along else d for a, d in enumerate(data.shape))
    if scales.shape != wanted or (zeros is not None and zeros.shape != wanted):
        raise op.malformed(f"GatherBlockQuantized with scales {scales.type} for {data.type}")
    parameters = [scales] if zeros is None else [scales, zeros]
    n, index = data.shape[axis], convert(indices, S64)
    inside = map_("clamp", const(-n, S64), index, const(n - 1, S64))  # the nearest that there is
    if axis == along:
        y = Node(Gather(axis), Node(Dequantize(scales.dtype, _blocks(rank, along, block)), data, *parameters), inside)
    else:
        picked = [Node(Gather(axis), t, inside) for t in (data, *parameters)]
        place = along if along < axis else along + len(indices.shape) - 1
        y = Node(Dequantize(scales.dtype, _blocks(len(picked[0].shape), place, block)), *picked)
    known = map_("and", map_("less", index, const(n, S64)), map_("greater_equal", index, const(-n, S64)))
    known = reshape(known, (*[1] * axis, *indices.shape, *[1] * (rank - 1 - axis)))
    return Node(Select(), broadcast(known, y.shape), y, const(0.0, y.dtype))


def _blocks(rank: int, axis: int, block: int) -> tuple[int, ...]:
    return tuple(block if a == axis else 1 for a in range(rank))


def _unpacked_last(packed: Node, bits: int, extent: int) -> Node:
    """u8 [..., bytes] as codes [..., extent]."""
    rows = packed.tensor.elements // packed.shape[-1] if packed.shape[-1] else 0
    codes = unpacked(reshape(packed, (rows, packed.shape[-1])), bits)
    return reshape(slice_(codes, 1, 0, extent), (*packed.shape[:-1], extent))
