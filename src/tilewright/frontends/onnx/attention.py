"""ONNX's Attention and RotaryEmbedding.

Where the graph's own attention expresses the whole operator, it is read as that. A soft cap, a result out of the middle or
another precision is read as the products, the mask and the softmax that the operator's definition spells out.
"""

from __future__ import annotations

import math

from tilewright.dtype import F32, F64, PRED, S64, DType
from tilewright.frontends.onnx.node import OpNode, converts
from tilewright.frontends.onnx.tensors import element_type
from tilewright.frontends.unmodelled import Unmodelled
from tilewright.ir.build import broadcast, const, convert, map_, reduce_, reshape, slice_, swap_last, transpose
from tilewright.ir.graph import Node
from tilewright.ir.ops import Attention, Concat, Gather, Iota, Pad, Select, Softmax, gemm
from tilewright.ir.ops.attention import Causal

_NEGATIVE_INFINITY = float("-inf")
_RAW, _CAPPED, _MASKED, _PROBABILITIES = range(4)  # what the fourth result holds


@converts("Attention", 23, 25)
def _attention(op: OpNode) -> list[Node | None]:
    q, k, v = (_heads(op, op.input(i), "q_num_heads" if i == 0 else "kv_num_heads") for i in range(3))
    past_k, past_v = op.optional(4), op.optional(5)
    past = 0
    if past_k is not None and past_v is not None:
        past = past_k.shape[2]
        k, v = Node(Concat(2), past_k, k), Node(Concat(2), past_v, v)
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise op.malformed(f"{q.shape[1]} query heads over {k.shape[1]} key heads", "a whole number each")
    scale = op.real("scale", 1 / math.sqrt(q.shape[3]) if q.shape[3] else 1.0)
    causal, mask = _mask(op, q, k, past)
    stated = element_type(op.integer("softmax_precision"), op.where) if op.has("softmax_precision") else None
    if op.real("softcap", 0.0) or op.wants(3) or stated is F64:
        if causal != "no":
            visible = _visible(q, k, const(0 if causal == "upper" else k.shape[2] - q.shape[2], S64), -1, 0)
            mask = visible if mask is None else both(mask, visible)
        y, scores = _spelt_out(op, q, k, v, mask, scale, stated)
    else:
        sources = [q, k, v] if mask is None else [q, k, v, mask]
        y, scores = Node(Attention(scale, causal, zero_masked_rows=True), *sources), None
    if len(op.input(0).shape) == 3:
        y = joined_heads(y)
    return [y, k, v, scores]


def _heads(op: OpNode, x: Node, attribute: str) -> Node:
    """[batch, heads, length, size], from that or from [batch, length, heads * size]."""
    if len(x.shape) == 4:
        return x
    if len(x.shape) != 3:
        raise op.malformed(f"Attention over {x.type}", "3 or 4 axes")
    return split_heads(op, x, op.integer(attribute))


def split_heads(op: OpNode, x: Node, heads: int) -> Node:
    """[batch, length, heads * size] as [batch, heads, length, size].

    Raises:
        InputError: the last axis is not divided by the number of heads.
    """
    if heads < 1 or x.shape[2] % heads:
        raise op.malformed(f"{heads} heads in {x.type}", "the last axis is heads * size")
    return transpose(reshape(x, (*x.shape[:2], heads, x.shape[2] // heads)), (0, 2, 1, 3))


def joined_heads(y: Node) -> Node:
    """[batch, heads, length, size] as [batch, length, heads * size]."""
    return reshape(transpose(y, (0, 2, 1, 3)), (y.shape[0], y.shape[2], y.shape[1] * y.shape[3]))


def _mask(op: OpNode, q: Node, k: Node, past: int) -> tuple[Causal, Node | None]:
    """The keys a query may see: as a causal rule of the attention node if it is one, the rest as a mask."""
    length, total = q.shape[2], k.shape[2]
    given, valid = op.optional(3), op.optional(6)
    mask = None if given is None else _padded(given, total, op)
    offset = const(past, S64)
    if valid is not None:
        count = reshape(convert(valid, S64), (q.shape[0], 1, 1, 1))
        padding = map_("less", Node(Iota(S64, (1, 1, 1, total), 3)), count)
        mask = padding if mask is None else both(mask, padding)
        offset = map_("subtract", count, const(length, S64))
    left, right = op.integer("left_window_size", -1), op.integer("right_window_size", -1)
    causal: Causal = "no"
    if op.integer("is_causal", 0):
        if valid is None and left < 0 and past in (0, total - length):
            causal = "upper" if past == 0 else "lower"
        else:
            right = 0
    if left >= 0 or right >= 0:
        window = _visible(q, k, offset, left, right)
        mask = window if mask is None else both(mask, window)
    return causal, mask


def _padded(mask: Node, total: int, op: OpNode) -> Node:
    """A mask over fewer keys than there are hides the rest; version 23 lets one over a single key stand for all."""
    short = total - mask.shape[-1] if mask.shape else 0
    if short <= 0 or (op.version == 23 and mask.shape[-1] == 1):
        return mask
    hidden = const(False, PRED) if mask.dtype is PRED else const(_NEGATIVE_INFINITY, mask.dtype)
    none = (0,) * len(mask.shape)
    return Node(Pad(none, (*none[:-1], short), none), mask, hidden)


def _visible(q: Node, k: Node, offset: Node, left: int, right: int) -> Node:
    """pred [.., queries, keys]: key j is at most `right` after and `left` before query i + offset (-1: no bound)."""
    shape = (1, 1, q.shape[2], k.shape[2])
    query = map_("add", Node(Iota(S64, shape, 2)), offset)
    key = Node(Iota(S64, shape, 3))
    seen: Node | None = None
    if right >= 0:
        seen = map_("less_equal", key, map_("add", query, const(right, S64)))
    if left >= 0:
        near = map_("greater_equal", key, map_("subtract", query, const(left, S64)))
        seen = near if seen is None else map_("and", seen, near)
    assert seen is not None
    return seen


def both(mask: Node, seen: Node) -> Node:
    """A mask that also hides what is not `seen`."""
    if mask.dtype is PRED:
        return map_("and", mask, seen)
    return map_("add", mask, _bias(seen, mask.dtype))


def _bias(mask: Node, dtype: DType) -> Node:
    """The additive form of a mask: 0 and minus infinity for a pred."""
    if mask.dtype is not PRED:
        return convert(mask, dtype)
    return Node(Select(), mask, const(0.0, dtype), const(_NEGATIVE_INFINITY, dtype))


def _spelt_out(
    op: OpNode, q: Node, k: Node, v: Node, mask: Node | None, scale: float, precision: DType | None
) -> tuple[Node, Node | None]:
    """softmax(cap * tanh(scale * q @ k^T / cap) + mask) @ v, and the scores at the stage that the node asks for."""
    groups = q.shape[1] // k.shape[1]
    k, v = (repeated_heads(t, groups) for t in (k, v))
    wide = F64 if F64 in (q.dtype, precision) else F32
    scores = gemm(q, swap_last(k), acc_dtype=F64 if q.dtype is F64 else F32)
    stages = {_RAW: map_("multiply", scores, const(scale, scores.dtype))}
    cap = op.real("softcap", 0.0)
    stages[_CAPPED] = capped(stages[_RAW], cap) if cap else stages[_RAW]
    stages[_MASKED] = stages[_CAPPED] if mask is None else map_("add", stages[_CAPPED], _bias(mask, scores.dtype))
    weights = Node(Softmax(3), convert(stages[_MASKED], wide))
    if mask is not None:  # a query that may see no key gives 0, whatever its scores are
        blind = map_("equal", reduce_("maximum", _bias(mask, wide), [-1], True), const(_NEGATIVE_INFINITY, wide))
        weights = Node(Select(), blind, const(0.0, wide), weights)
    stages[_PROBABILITIES] = weights = convert(weights, q.dtype)
    mode = op.integer("qk_matmul_output_mode", 0)
    if mode not in stages:
        raise Unmodelled(f"qk_matmul_output_mode={mode}")
    return gemm(weights, convert(v, q.dtype), out_dtype=q.dtype), convert(stages[mode], q.dtype)


def capped(scores: Node, cap: float) -> Node:
    """cap * tanh(scores / cap)."""
    limit = const(cap, scores.dtype)
    return map_("multiply", map_("tanh", map_("divide", scores, limit)), limit)


def repeated_heads(x: Node, groups: int) -> Node:
    """Each head `groups` times in a row."""
    if groups == 1:
        return x
    b, h, t, d = x.shape
    return reshape(broadcast(reshape(x, (b, h, 1, t, d)), (b, h, groups, t, d)), (b, h * groups, t, d))


@converts("RotaryEmbedding", 23, 23)
def _rotary_embedding(op: OpNode) -> Node:
    """Pairs (a, b) of a head's first `rotary_embedding_dim` elements turned to (a cos - b sin, a sin + b cos).

    Source: Su et al. 2021 (arXiv 2104.09864).
    """
    given, cos, sin, positions = op.input(0), op.input(1), op.input(2), op.optional(3)
    x = transpose(given, (0, 2, 1, 3)) if len(given.shape) == 4 else given
    if len(x.shape) == 3:
        heads = op.integer("num_heads")
        x = reshape(x, (*x.shape[:2], heads, x.shape[2] // heads))
    size = op.integer("rotary_embedding_dim", 0) or x.shape[3]
    y = turned(x, cos, sin, positions, size, bool(op.integer("interleaved", 0)))
    return transpose(y, (0, 2, 1, 3)) if len(given.shape) == 4 else reshape(y, given.shape)


def turned(x: Node, cos: Node, sin: Node, positions: Node | None, size: int, interleaved: bool, *, wraps: bool = True) -> Node:
    """x [batch, length, heads, *] with the first `size` elements of each head turned.

    cos and sin are [batch, length, size / 2], or tables [positions, size / 2] to read at `positions` [batch, length]; those
    below zero count from the end if it `wraps`, and are refused as the program runs if not.
    """
    if positions is not None:
        cos, sin = (Node(Gather(0, wraps=wraps), t, positions) for t in (cos, sin))
    cos, sin = (reshape(t, (*t.shape[:2], 1, t.shape[2])) for t in (cos, sin))
    pairs = slice_(x, 3, 0, size)
    half = size // 2
    if interleaved:
        apart = reshape(pairs, (*pairs.shape[:3], half, 2))
        a, b = (reshape(slice_(apart, 4, i, i + 1), (*pairs.shape[:3], half)) for i in (0, 1))
    else:
        a, b = slice_(pairs, 3, 0, half), slice_(pairs, 3, half, size)
    real = map_("subtract", map_("multiply", a, cos), map_("multiply", b, sin))
    imaginary = map_("add", map_("multiply", a, sin), map_("multiply", b, cos))
    if interleaved:
        ends = [reshape(t, (*t.shape, 1)) for t in (real, imaginary)]
        done = reshape(Node(Concat(4), *ends), pairs.shape)
    else:
        done = Node(Concat(3), real, imaginary)
    return done if size == x.shape[3] else Node(Concat(3), done, slice_(x, 3, size, x.shape[3]))
