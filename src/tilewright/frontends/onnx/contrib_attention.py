"""onnxruntime's attentions (domain com.microsoft): Attention, QAttention, MultiHeadAttention, GroupQueryAttention, and its
RotaryEmbedding.

All but the last are read as the graph's own attention with a mask. A padding mask adds `mask_filter_value` to a score, which
is finite, so a query that may see nothing still has weights.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from tilewright.dtype import F32, PRED, S32, S64
from tilewright.frontends.onnx.attention import both, capped, joined_heads, repeated_heads, split_heads, turned
from tilewright.frontends.onnx.matmul import matmul
from tilewright.frontends.onnx.node import OpNode, converts
from tilewright.frontends.onnx.quantize import lined_up, shifted_product
from tilewright.frontends.onnx.scope import MICROSOFT
from tilewright.ir.build import broadcast, const, convert, map_, reshape, slice_, swap_last, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Attention, Concat, Gather, Iota, Pad, Select, Softmax, gemm

_MASKED = -10000.0  # mask_filter_value
_LOW = -1e30  # what no score comes near; below it, f32 no longer tells a score that is masked from one that is hidden


def _scale(op: OpNode, q: Node) -> float:
    return op.real("scale", 0.0) or (1 / math.sqrt(q.shape[3]) if q.shape[3] else 1.0)


def _refuse(
    op: OpNode,
    attributes: tuple[str, ...] = (),
    inputs: tuple[int, ...] = (),
    hint: str = "export the model for the CPU, or without that fusion",
) -> None:
    """Refuse what is not read: most of it onnxruntime's CPU kernels do not have either.

    Raises:
        UnsupportedError: the node asks for it.
    """
    asked = [a for a in attributes if op.has(a) and op.integer(a)] + [
        f"input {i}" for i in inputs if op.optional(i) is not None
    ]
    if asked:
        raise op.refuse(f"{op.op_type} with {asked[0]}", hint)


def _padding(op: OpNode, mask: Node | None, batch: int, length: int, total: int) -> Node | None:
    """Numbers that a padding mask adds to the scores, ready to broadcast: 0, or `mask_filter_value` where it hides a key.

    A mask of one number a row of the batch gives the keys' count; of two, their ends and then their starts; a matrix or a
    stack of matrices keeps where it is positive. One number for all the keys of a row stands for no mask.
    """
    if mask is None or (len(mask.shape) == 2 and mask.shape[1] == 1 != total and mask.shape[0] in (1, batch)):
        return None
    if len(mask.shape) == 1 and mask.shape[0] in (batch, 2 * batch):
        key = Node(Iota(S32, (1, total), 1))
        end = reshape(slice_(convert(mask, S32), 0, 0, batch), (batch, 1))
        kept = map_("less", key, end)
        if mask.shape[0] == 2 * batch:
            start = reshape(slice_(convert(mask, S32), 0, batch, 2 * batch), (batch, 1))
            kept = map_("and", kept, map_("greater_equal", key, start))
    elif mask.shape[-1:] == (total,) and mask.shape[1:-1] in ((), (length,)):
        kept = map_("greater", mask, const(0, mask.dtype)) if mask.dtype is not PRED else mask
    else:
        raise op.refuse(f"{op.op_type} with a mask {mask.type}", "a mask of [batch, keys]")
    queries = kept.shape[1:-1] or (1,)
    kept = reshape(kept, (kept.shape[0], 1, *queries, total))
    return Node(Select(), kept, const(0.0, F32), const(op.real("mask_filter_value", _MASKED), F32))


def _attend(op: OpNode, q: Node, k: Node, v: Node, padding: Node | None, bias: Node | None, past: int) -> Node:
    """[batch, length, heads * size] of v; if `unidirectional`, query i but the last sees keys 0…i + past alone.

    Causality puts the lowest finite number where padding would have its own. A query whose other keys are as low, by that
    padding or by the bias, therefore has weights on keys after it, and a causal attention node says less than this.
    """
    length, total = q.shape[2], k.shape[2]
    causal = bool(op.integer("unidirectional", 0)) and length > 1
    finite = bias is None and (padding is None or op.real("mask_filter_value", _MASKED) > _LOW)
    flagged = causal and finite and past == total - length
    if causal and not flagged:
        shape = (1, 1, length, total)
        query = Node(Iota(S64, shape, 2))
        hidden = map_("greater", Node(Iota(S64, shape, 3)), map_("add", query, const(past, S64)))
        hidden = map_("and", hidden, map_("less", query, const(length - 1, S64)))
        elsewhere = const(0.0, F32) if padding is None else padding
        padding = Node(Select(), hidden, const(torch.finfo(torch.float32).min, F32), elsewhere)
    if bias is not None and len(bias.shape) != 4:
        raise op.malformed(f"{op.op_type} with a bias {bias.type}", "it has 4 axes")
    added = padding
    if bias is not None:
        added = bias if padding is None else map_("add", convert(bias, F32), padding)
    sources = [q, k, v] if added is None else [q, k, v, added]
    return joined_heads(Node(Attention(_scale(op, q), "lower" if flagged else "no"), *sources))


def _with_past(op: OpNode, past: Node | None, k: Node, v: Node) -> tuple[Node, Node]:
    """Keys and values after those of `past` [2, batch, heads, length, size]."""
    if past is None:
        return k, v
    halves = [reshape(slice_(past, 0, i, i + 1), past.shape[1:]) for i in (0, 1)]
    return Node(Concat(2), halves[0], k), Node(Concat(2), halves[1], v)


def _self_attention(
    op: OpNode, projected: Node, sizes: list[int], mask: Node | None, past: Node | None, bias: Node | None
) -> list[Node | None]:
    """Results of attention over one projection [batch, length, q | k | v], and what is kept of keys and values."""
    heads = op.integer("num_heads")
    at = (0, sizes[0], sizes[0] + sizes[1], sum(sizes))
    q, k, v = (split_heads(op, slice_(projected, 2, low, high), heads) for low, high in pairwise(at))
    k, v = _with_past(op, past, k, v)
    batch, length, total = q.shape[0], q.shape[2], k.shape[2]
    added = _padding(op, mask, batch, length, total)
    y = _attend(op, q, k, v, added, bias, 0 if past is None else past.shape[3])
    present = None
    if op.wants(1):
        if k.shape != v.shape:
            raise op.refuse(
                f"{op.op_type} that keeps keys of {k.shape[3]} and values of {v.shape[3]} elements in one result",
                "leave that result out, or give both one size",
            )
        present = Node(Concat(0), *(reshape(t, (1, *t.shape)) for t in (k, v)))
    return [y, present]


@converts("Attention", 1, 1, MICROSOFT)
def _attention(op: OpNode) -> list[Node | None]:
    """softmax(scale * q @ k^T + masks) @ v, where q, k and v are columns of input @ weights + bias."""
    _refuse(op, ("past_present_share_buffer", "do_rotary"), (6,))
    x, weights, bias = op.input(0), op.input(1), op.optional(2)
    sizes = op.integers("qkv_hidden_sizes", ()) or [weights.shape[1] // 3] * 3
    if len(sizes) != 3 or sum(sizes) != weights.shape[1]:
        raise op.malformed(f"Attention with {sizes} of {weights.type}", "q, k and v side by side")
    projected = matmul(x, weights, out_dtype=x.dtype)
    if bias is not None:
        projected = map_("add", projected, bias)
    return _self_attention(op, projected, sizes, op.optional(3), op.optional(4), op.optional(5))


@converts("QAttention", 1, 1, MICROSOFT)
def _qattention(op: OpNode) -> list[Node | None]:
    """Attention of a quantised input by quantised weights."""
    _refuse(op, ("past_present_share_buffer", "do_rotary"))
    x, weights, bias = op.input(0), op.input(1), op.input(2)
    product = shifted_product(x, op.optional(6), weights, op.optional(7))
    factor = map_("multiply", lined_up(op.input(3), x, True), lined_up(op.input(4), weights, False))
    projected = map_("add", map_("multiply", convert(product, F32), convert(factor, F32)), convert(bias, F32))
    sizes = [weights.shape[1] // 3] * 3
    return _self_attention(op, convert(projected, bias.dtype), sizes, op.optional(5), op.optional(8), None)


@converts("MultiHeadAttention", 1, 1, MICROSOFT)
def _multi_head_attention(op: OpNode) -> list[Node | None]:
    """q, k and v each [batch, length, heads * size] (k and v maybe split into heads already), a bias for all, masks, a past."""
    _refuse(op, (), (8, 9))
    query, key, value, bias = op.input(0), op.optional(1), op.optional(2), op.optional(3)
    heads = op.integer("num_heads")
    if key is None or value is None or len(query.shape) != 3:
        raise op.refuse("MultiHeadAttention with packed operands", "export the model for the CPU: q, k and v apart")
    three = [query, key, value]
    if bias is not None:
        at = 0
        for i, x in enumerate(three):
            size = x.shape[2] if len(x.shape) == 3 else x.shape[1] * x.shape[3]
            if len(x.shape) == 3:
                three[i] = map_("add", x, slice_(bias, 0, at, at + size))
            at += size
    q, k, v = (split_heads(op, x, heads) if len(x.shape) == 3 else x for x in three)
    past_k, past_v = op.optional(6), op.optional(7)
    if past_k is not None and past_v is not None:
        k, v = Node(Concat(2), past_k, k), Node(Concat(2), past_v, v)
    length, total = q.shape[2], k.shape[2]
    added = _padding(op, op.optional(4), q.shape[0], length, total)
    if op.wants(3):
        raise op.refuse("MultiHeadAttention with its scores as a result", "leave that output out")
    return [_attend(op, q, k, v, added, op.optional(5), 0 if past_k is None else past_k.shape[2]), k, v]


def _within(op: OpNode, length: int, table: Node) -> None:
    """See that a table has a row for each position.

    Raises:
        InputError: it is too short.
    """
    if length > table.shape[0]:
        what = f"{op.op_type} over {length} positions by a table {table.type}"
        raise op.malformed(what, "a shorter sequence, or export the model with a longer table")


@converts("RotaryEmbedding", 1, 1, MICROSOFT)
def _rotary_embedding(op: OpNode) -> Node:
    """Rotary embedding as ONNX's, from tables [positions, size / 2] and positions: one a token, or the first one's."""
    _refuse(op, ("is_packed_batching",))
    given, positions, cos, sin = op.input(0), op.input(1), op.input(2), op.input(3)
    size = op.integer("rotary_embedding_dim", 0)
    if len(given.shape) == 4:
        x = transpose(given, (0, 2, 1, 3))
    else:
        heads = op.integer("num_heads", 0) if size else 0
        width = given.shape[2] // heads if heads else cos.shape[1] * 2
        if not width or given.shape[2] % width:
            raise op.malformed(f"RotaryEmbedding of {given.type} by {cos.type}", "heads * size")
        x = reshape(given, (*given.shape[:2], given.shape[2] // width, width))
    _within(op, x.shape[1], cos)
    if positions.tensor.elements == 1 and len(positions.shape) == 1:
        line = Node(Iota(S64, (1, x.shape[1]), 1))
        positions = broadcast(map_("add", line, convert(positions, S64)), x.shape[:2])
    y = turned(x, cos, sin, positions, size or x.shape[3], bool(op.integer("interleaved", 0)), wraps=False)
    return transpose(y, (0, 2, 1, 3)) if len(given.shape) == 4 else reshape(y, given.shape)


@converts("GroupQueryAttention", 1, 1, MICROSOFT)
def _group_query_attention(op: OpNode) -> list[Node | None]:
    """Causal attention of q over a cache of keys and values, with `seqlens_k` + 1 keys in each row of the batch.

    The new keys follow those that are in the cache, of which a row has seqlens_k + 1 - length; none in a first prompt, whose
    length is the whole. What of the cache follows them is left as it was.
    """
    cached = "export the model with a cache of the whole length, in the type of the query, and without its scores"
    _refuse(op, ("sliding_window_cache", "qk_output", "kv_cache_bit_width"), (12, 13), cached)
    _refuse(op, (), (14, 15))
    query, heads, groups = op.input(0), op.integer("num_heads"), op.integer("kv_num_heads")
    if groups < 1 or heads < 1 or heads % groups:
        raise op.malformed(f"{heads} query heads over {groups} key heads", "a whole number each")
    if op.optional(1) is None:
        size = query.shape[2] // (heads + 2 * groups)
        at = (0, heads * size, (heads + groups) * size, (heads + 2 * groups) * size)
        three = [slice_(query, 2, low, high) for low, high in pairwise(at)]
    else:
        three = [query, op.input(1), op.input(2)]
    batch, length = query.shape[:2]
    (whole,) = op.known_ints(6)
    count = reshape(convert(op.input(5), S64), (batch, 1))  # of keys before the last
    first = length == whole
    past = const(0, S64) if first else map_("add", count, const(1 - length, S64))
    q, k, v = (reshape(x, (batch, length, n, x.shape[2] // n)) for x, n in zip(three, (heads, groups, groups), strict=True))
    if op.integer("do_rotary", 0):
        cos, sin, positions = op.input(7), op.input(8), op.optional(9)
        if positions is None or first:
            start = (
                past if positions is None else reshape(slice_(reshape(positions, (positions.tensor.elements,)), 0, 0, 1), ())
            )
            positions = broadcast(map_("add", Node(Iota(S64, (1, length), 1)), convert(start, S64)), (batch, length))
        _within(op, whole, cos)
        interleaved = bool(op.integer("rotary_interleaved", 0))
        q, k = (turned(x, cos, sin, positions, cos.shape[1] * 2, interleaved, wraps=False) for x in (q, k))
    q, k, v = (transpose(x, (0, 2, 1, 3)) for x in (q, k, v))
    k, v = (_appended(op.optional(i), x, past, whole, first) for i, x in ((3, k), (4, v)))
    total = k.shape[2]
    shape = (1, 1, length, total)
    last = map_("add", Node(Iota(S64, shape, 2)), past if first else reshape(past, (batch, 1, 1, 1)))
    key = Node(Iota(S64, shape, 3))
    mask = map_("less_equal", key, last if op.integer("causal", 1) else reshape(count, (batch, 1, 1, 1)))
    window = op.integer("local_window_size", -1)
    if window >= 0:
        mask = map_("and", mask, map_("greater", key, map_("subtract", last, const(window, S64))))
    bias = op.optional(10)
    if bias is not None and bias.shape[-1] < total:  # one for each key; the cache may hold more
        none = (0,) * len(bias.shape)
        bias = Node(Pad(none, (*none[:-1], total - bias.shape[-1]), none), bias, const(0.0, bias.dtype))
    scale, cap, sink = _scale(op, q), op.real("softcap", 0.0), op.optional(11)
    smooth = op.integer("smooth_softmax", -1) == 1
    if cap or sink is not None or smooth:
        y = _with_sink(q, k, v, mask, bias, scale, cap, sink, smooth)
    else:
        if bias is not None:
            mask = both(bias, mask)
        plain = first and total == length and bias is None and window < 0 and op.integer("causal", 1)
        sources = (q, k, v) if plain else (q, k, v, mask)
        y = Node(Attention(scale, "lower" if plain else "no", zero_masked_rows=True), *sources)
    return [joined_heads(y), k, v]


def _appended(past: Node | None, new: Node, count: Node, whole: int, first: bool) -> Node:
    """New keys or values [batch, heads, length, size] after the first `count` of the past ones; as many as the longest has, or
    the cache holds."""
    held = past.shape[2] if past is not None else 0
    if past is None or not held or (first and held <= whole):
        return new
    batch, heads, length, size = new.shape
    total = max(held, whole)
    both_ = Node(Concat(2), past, new)
    place = Node(Iota(S64, (1, total), 1))
    start = broadcast(reshape(count, (1, 1)) if first else count, (batch, 1))
    added = map_("add", map_("subtract", place, start), const(held, S64))
    fresh = map_("and", map_("greater_equal", place, start), map_("less", added, const(held + length, S64)))
    kept = map_("minimum", place, const(held + length - 1, S64))
    index = Node(Select(), fresh, added, broadcast(kept, (batch, total)))
    index = broadcast(reshape(index, (batch, 1, total, 1)), (batch, heads, total, size))
    return Node(Gather(2, elementwise=True), both_, index)


def _with_sink(
    q: Node, k: Node, v: Node, mask: Node, bias: Node | None, scale: float, cap: float, sink: Node | None, smooth: bool
) -> Node:
    """Attention spelt out, its scores capped, and one more score a head (`sink`, or 0 if smooth) in the softmax's sum."""
    groups = q.shape[1] // k.shape[1]
    k, v = (repeated_heads(x, groups) for x in (k, v))
    scores = gemm(q, swap_last(k), acc_dtype=F32)
    scores = map_("multiply", scores, const(scale, F32))
    if cap:
        scores = capped(scores, cap)
    if bias is not None:
        scores = map_("add", scores, convert(bias, F32))
    scores = Node(Select(), broadcast(mask, scores.shape), scores, const(float("-inf"), F32))
    if sink is None and not smooth:
        return gemm(convert(Node(Softmax(3), scores), q.dtype), v, out_dtype=q.dtype)
    extra = const(0.0, F32) if sink is None else reshape(convert(sink, F32), (1, q.shape[1], 1, 1))
    widened = Node(Concat(3), scores, broadcast(extra, (*scores.shape[:3], 1)))
    weights = slice_(Node(Softmax(3), widened), 3, 0, scores.shape[3])
    return gemm(convert(weights, q.dtype), v, out_dtype=q.dtype)
