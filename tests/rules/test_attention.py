"""Attention recognised in every layout and spelling, equal to what was written; and left where it is something else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from rule_checks import arithmetic, assert_close, assert_no_growth, assert_order_is_free, graph_of, refusals, staged

from tilewright.compiler import optimise
from tilewright.dtype import BF16, F8E4M3FN, F16, F32, F64, PRED, S8, S32, U8, DType
from tilewright.hardware.detect import detect
from tilewright.ir.build import broadcast, const, convert, input_, map_, reduce_, reshape, swap_last, transpose
from tilewright.ir.evaluate import evaluate
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import Attention, Dequantize, Iota, Quantize, Select, Softmax, gemm
from tilewright.runtime.partition import parts_for

RULE = "softmax_between_two_products_is_attention"
B, H, S, T, D, V = 2, 4, 6, 10, 8, 12


def op(fn: str, *args: Node | float) -> Node:
    like = next(a for a in args if isinstance(a, Node))
    return map_(fn, *(a if isinstance(a, Node) else const(a, like.dtype) for a in args))


def where(pred: Node, on: Node | float, off: Node | float) -> Node:
    like = on if isinstance(on, Node) else off
    dtype = like.dtype if isinstance(like, Node) else F32
    return Node(Select(), pred, *(n if isinstance(n, Node) else const(n, dtype) for n in (on, off)))


def softmax(x: Node) -> Node:
    return Node(Softmax(len(x.shape) - 1), x)


def qkv(dtype: DType = F32, heads: int = H, kv_heads: int = H) -> tuple[Node, Node, Node]:
    shapes = ((B, heads, S, D), (B, kv_heads, T, D), (B, kv_heads, T, V))
    q, k, v = (input_(n, dtype, s) for n, s in zip("qkv", shapes, strict=True))
    return q, k, v


@dataclass(frozen=True)
class Plain:
    """Attention written out on [B, H, S, D]; each part can be replaced."""

    scores: Callable[[Node], Node] = lambda s: op("multiply", s, 0.25)
    weights: Callable[[Node], Node] = lambda w: w
    softmax: Callable[[Node], Node] = softmax

    def __call__(self, q: Node, k: Node, v: Node) -> Node:
        product = gemm(q, swap_last(k), out_dtype=q.dtype)
        return gemm(self.weights(self.softmax(self.scores(product))), v, out_dtype=q.dtype)


def attention_of(graph: Graph, count: int = 1) -> Node:
    """The graph's attention, of which there is one, while there is no softmax."""
    found = [n for n in graph.nodes() if isinstance(n.op, Attention)]
    assert len(found) == count and not any(isinstance(n.op, Softmax) for n in graph.nodes())
    return found[0]


def check(out: Node, tolerance: float = 1e-6, *, orders: int = 3, seed: int = 0) -> Node:
    """The attention that `out` becomes: equal, no more work, the same in any order of rules."""
    before = graph_of(out)
    after = assert_order_is_free(before, "recognise", orders=orders)
    assert_close(before, after, tolerance, seed)
    assert_no_growth(before, after, bytes_too=False)
    return attention_of(after)


def attributes(node: Node) -> Attention:
    assert isinstance(node.op, Attention)
    return node.op


# Where the scale stands.


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16], ids=str)
def test_plain_attention(dtype: DType):
    q, k, v = qkv(dtype)
    found = check(Plain()(q, k, v), 4 * max(dtype.epsilon, F32.epsilon))
    assert found.src == (q, k, v)
    assert found.op == Attention(0.25)


@pytest.mark.parametrize(
    "place",
    [
        lambda q, k, v: Plain(lambda s: op("divide", s, 4.0))(q, k, v),
        lambda q, k, v: Plain(lambda s: op("multiply", 0.25, s))(q, k, v),
        lambda q, k, v: Plain(lambda s: s)(op("multiply", q, 0.25), k, v),
        lambda q, k, v: Plain(lambda s: s)(q, op("divide", k, 4.0), v),
        lambda q, k, v: Plain(lambda s: s)(op("multiply", q, 0.5), op("multiply", k, 0.5), v),
        lambda q, k, v: Plain(lambda s: op("multiply", op("divide", s, 2.0), 0.5))(q, k, v),
        lambda q, k, v: Plain(lambda s: op("multiply", s, 0.5))(op("multiply", 0.5, q), k, v),
    ],
)
def test_scale_on_query_key_or_product(place: Callable[[Node, Node, Node], Node]):
    q, k, v = qkv()
    found = check(place(q, k, v))
    assert found.src == (q, k, v) and found.op == Attention(0.25)


def test_without_a_scale_it_is_one():
    q, k, v = qkv()
    assert check(Plain(lambda s: s)(q, k, v)).op == Attention(1.0)


def test_key_scaled_after_it_is_transposed_as_torch_onnx_writes_it():
    q, k, v = qkv()
    flat = transpose(reshape(k, (B * H, T, D)), (0, 2, 1))
    scaled = op("multiply", reshape(flat, (B, H, D, T)), 0.5)
    out = gemm(softmax(gemm(op("multiply", q, 0.5), scaled)), v)
    found = check(out)
    assert found.src == (q, k, v) and found.op == Attention(0.25)


# Layouts.


def test_a_batch_of_matrices():
    q, k, v = (input_(n, F32, s) for n, s in (("q", (6, S, D)), ("k", (6, T, D)), ("v", (6, T, V))))
    found = check(Plain()(q, k, v))
    assert found.shape == (1, 6, S, V)


def test_matrices_without_a_batch():
    q, k, v = (input_(n, F32, s) for n, s in (("q", (S, D)), ("k", (T, D)), ("v", (T, V))))
    found = check(Plain()(q, k, v))
    assert found.shape == (1, 1, S, V)


def test_heads_merged_into_the_batch_and_split_for_the_mask():
    """torch.matmul as PyTorch decomposes it: bmm between reshapes."""
    q, k, v = qkv()
    mask = input_("m", F32, (B, 1, 1, T))

    def merged(n: Node) -> Node:
        return reshape(n, (B * H, *n.shape[2:]))

    scores = reshape(gemm(merged(q), swap_last(merged(k))), (B, H, S, T))
    weights = softmax(op("add", op("multiply", scores, 0.25), mask))
    out = reshape(gemm(reshape(weights, (B * H, S, T)), merged(v)), (B, H, S, V))
    found = check(out)
    assert found.src == (q, k, v, mask)


def test_heads_behind_the_sequence_as_projections_leave_them():
    x = input_("x", F32, (B, S, H * D))
    q, k, v = (transpose(reshape(op("tanh", op("add", x, float(i))), (B, S, H, D)), (0, 2, 1, 3)) for i in range(3))
    out = transpose(Plain()(q, k, v), (0, 2, 1, 3))
    found = check(reshape(out, (B, S, H * D)))
    assert found.src == (q, k, v)


def test_both_products_transposed_as_jax_leaves_them():
    """einsum contracts the values first: v^T @ w^T."""
    q, k, v = qkv()
    weights = softmax(op("multiply", gemm(q, swap_last(k)), 0.25))
    assert check(gemm(swap_last(v), swap_last(weights))).src == (q, k, v)
    turned = swap_last(gemm(k, swap_last(q)))
    assert check(gemm(softmax(op("multiply", turned, 0.25)), v)).src == (q, k, v)
    columns = Node(Softmax(2), op("multiply", gemm(k, swap_last(q)), 0.25))  # softmax over rows of k q^T
    assert check(gemm(swap_last(columns), v)).src == (q, k, v)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_repeated_for_groups_of_queries(groups: int):
    """transformers' repeat_kv: a broadcast between reshapes."""
    q, k, v = qkv(kv_heads=H // groups)

    def repeated(n: Node) -> Node:
        b, h, t, d = n.shape
        return reshape(broadcast(reshape(n, (b, h, 1, t, d)), (b, h, groups, t, d)), (b, h * groups, t, d))

    found = check(Plain()(q, repeated(k), repeated(v)))
    assert found.src == (q, k, v)


def test_groups_with_heads_interleaved_permute_the_queries():
    """k.repeat(1, 2, 1, 1): head i of the queries reads head i % 2 of the keys."""
    q, k, v = qkv(kv_heads=2)

    def tiled(n: Node) -> Node:
        b, h, t, d = n.shape
        return reshape(broadcast(reshape(n, (b, 1, h, t, d)), (b, 2, h, t, d)), (b, 2 * h, t, d))

    found = check(Plain()(q, tiled(k), tiled(v)))
    assert found.src[1:] == (k, v) and found.shape == (B, H, S, V)


def test_one_key_head_for_all_by_broadcasting():
    q, k, v = qkv(kv_heads=1)
    found = check(Plain()(q, k, v))
    assert found.src == (q, k, v)


def test_groups_among_the_rows_as_jax_leaves_them():
    """jax.nn.dot_product_attention: [B, K, S * G, D] @ [B, K, D, T], masked as [B, K, S, G, T]."""
    groups, kv = 2, 2
    q = input_("q", F32, (B, S, kv, groups, D))
    k, v = input_("k", F32, (B, T, kv, D)), input_("v", F32, (B, T, kv, V))
    rows = reshape(transpose(q, (0, 2, 1, 3, 4)), (B, kv, S * groups, D))
    product = reshape(gemm(rows, transpose(k, (0, 2, 3, 1))), (B, kv, S, groups, T))
    scores = transpose(op("multiply", product, 0.25), (3, 0, 1, 2, 4))
    seen = reshape(causal(S, T), (1, 1, 1, S, T))
    weights = softmax(where(seen, scores, -math.inf))
    flat = reshape(transpose(weights, (1, 2, 4, 0, 3)), (B, kv, T, groups * S))
    out = gemm(transpose(v, (0, 2, 3, 1)), flat)
    found = check(out)
    assert attributes(found).causal == "upper"
    assert found.src[0].shape == (B, kv * groups, S, D) and found.src[1].shape == (B, kv, T, D)


def test_a_decoding_step_and_other_small_extents():
    for b, h, s, t in ((1, 1, 1, 1), (1, 4, 1, 7), (3, 1, 5, 1), (1, 1, 5, 5), (2, 3, 1, 1)):
        q, k, v = (input_(n, F32, (b, h, x, 4)) for n, x in (("q", s), ("k", t), ("v", t)))
        mask = input_("m", F32, (b, 1, 1, t))
        check(Plain(lambda x, mask=mask: op("add", x, mask))(q, k, v), orders=1)


def test_nothing_to_attend_to_is_left_alone():
    q, k, v = (input_(n, F32, s) for n, s in (("q", (1, 2, 3, 4)), ("k", (1, 2, 0, 4)), ("v", (1, 2, 0, 4))))
    graph = graph_of(Plain()(q, k, v))
    assert staged(graph, "recognise").outputs == graph.outputs


# Masks.


def causal(queries: int, keys: int, offset: int = 0) -> Node:
    """pred: key <= query + offset, by iota as compilers write it."""
    rows, columns = (Node(Iota(S32, (queries, keys), axis)) for axis in (0, 1))
    return op("greater_equal", op("add", rows, const(offset, S32)), columns)


def constant_causal(queries: int, keys: int, offset: int = 0) -> Node:
    return const(torch.ones(queries, keys, dtype=torch.bool).tril(offset), PRED)


@pytest.mark.parametrize("table", [causal, constant_causal])
@pytest.mark.parametrize("fill", [-math.inf, -3.4028234663852886e38, -2.38e38, -1e9])
@pytest.mark.parametrize(("offset", "kind"), [(0, "upper"), (T - S, "lower")])
def test_selected_causal_masks(table: Callable[..., Node], fill: float, offset: int, kind: str):
    q, k, v = qkv()
    seen = table(S, T, offset)
    found = check(Plain(lambda s: where(seen, op("multiply", s, 0.25), fill))(q, k, v))
    assert found.op == Attention(0.25, kind) and found.src == (q, k, v)  # type: ignore[arg-type]
    hidden = op("not", seen)
    found = check(Plain(lambda s: where(hidden, fill, op("multiply", s, 0.25)))(q, k, v))
    assert found.op == Attention(0.25, kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("fill", [-math.inf, -3.4028234663852886e38])
def test_added_causal_masks(fill: float):
    q, k, v = qkv()
    table = torch.full((1, 1, S, T), fill).triu(1)
    for mask in (const(table, F32), where(causal(S, T), 0.0, fill)):
        found = check(Plain(lambda s, mask=mask: op("add", op("multiply", s, 0.25), mask))(q, k, v))
        assert found.op == Attention(0.25, "upper") and found.src == (q, k, v)


def alibi(keys: int) -> Node:
    """A slope for each head times the key's position, f32 [1, H, 1, keys], as in Bloom (arXiv 2108.12409)."""
    slopes = const(torch.tensor([0.5, 0.25, 0.125, 0.0625]).reshape(1, H, 1, 1), F32)
    return op("multiply", slopes, convert(Node(Iota(S32, (1, 1, 1, keys), 3)), F32))


@pytest.mark.parametrize("fill", [-math.inf, -3.4028234663852886e38])
@pytest.mark.parametrize("first", ["bias", "mask"])
@pytest.mark.parametrize(("offset", "kind"), [(0, "upper"), (T - S, "lower")])
def test_a_causal_mask_added_beside_a_constant_bias_is_causality(fill: float, first: str, offset: int, kind: str):
    q, k, v = qkv()
    bias, mask = alibi(T), where(causal(S, T, offset), 0.0, fill)
    terms = (bias, mask) if first == "bias" else (mask, bias)
    found = check(Plain(lambda s: op("add", op("add", op("multiply", s, 0.25), terms[0]), terms[1]))(q, k, v))
    assert attributes(found).causal == kind and found.src == (q, k, v, bias)


@pytest.mark.parametrize("kind", ["an input", "large", "infinite", "NaN", "rows that see nothing"])
def test_a_causal_mask_that_drowns_stays_one_beside(kind: str):
    queries, keys = (T, S) if kind == "rows that see nothing" else (S, T)
    q, k, v = (input_(n, F32, (B, H, t, D)) for n, t in (("q", queries), ("k", keys), ("v", keys)))
    offset = min(keys - queries, 0)
    number = {"large": -1e30, "infinite": -math.inf, "NaN": math.nan}.get(kind)
    bias = alibi(keys) if number is None else const(torch.tensor([1.0, number] + [0.0] * (keys - 2)), F32)
    bias = input_("bias", F32, (keys,)) if kind == "an input" else bias
    mask = where(causal(queries, keys, offset), 0.0, LEAST)
    graph = graph_of(Plain(lambda s: op("add", op("add", s, bias), mask))(q, k, v))
    found = attention_of(staged(graph, "recognise"))
    assert attributes(found).causal == "no" and len(found.src) == 4


def test_square_causal_masks_are_upper():
    q, k, v = (input_(n, F32, (B, H, S, D)) for n in "qkv")
    found = check(Plain(lambda s: where(causal(S, S), s, -math.inf))(q, k, v))
    assert attributes(found).causal == "upper"


@pytest.mark.parametrize("fill", [-1e4, -1e9])
def test_a_finite_number_that_is_added_stays_a_mask(fill: float):
    """A score may be as large, so it is not causality."""
    q, k, v = qkv()
    mask = const(torch.full((S, T), fill).triu(1), F32)
    found = check(Plain(lambda s: op("add", s, mask))(q, k, v))
    assert attributes(found).causal == "no" and len(found.src) == 4


def test_a_finite_number_put_in_the_place_of_scores_stays_exactly_that():
    q, k, v = qkv()
    keep = input_("keep", PRED, (B, 1, 1, T))
    for fill, seen in ((-1e4, causal(S, T)), (-1e9, keep), (-5.0, keep)):
        found = check(Plain(lambda s, fill=fill, seen=seen: where(seen, op("multiply", s, 0.25), fill))(q, k, v))
        held = attributes(found)
        assert held.causal == "no" and held.scores is not None and len(held.operands) == 3


def test_a_row_that_is_hidden_by_finite_numbers_stays_uniform():
    q, k, v = qkv()
    keep = input_("keep", PRED, (B, 1, S, T))
    for fill in (-1e9, -3.4028234663852886e38):
        before = graph_of(Plain(lambda s, fill=fill: where(keep, s, fill))(q, k, v))
        after = staged(before, "recognise")
        attention_of(after)
        generator = torch.Generator().manual_seed(0)
        feeds = {n.op.label: torch.randn(n.shape, generator=generator) for n in (q, k, v)}
        visible = torch.rand(keep.shape, generator=generator) > 0.5
        visible[0, 0, 2] = False
        (a,), (b,) = (evaluate(g, {**feeds, "keep": visible}) for g in (before, after))
        assert torch.allclose(a, b, atol=1e-6)
        assert torch.allclose(b[0, :, 2], feeds["v"][0].mean(1), atol=1e-6)


LEAST = -3.4028234663852886e38


def drowned(keep: torch.Tensor, before: Graph, after: Graph) -> None:
    """Both programs agree on a mask, and rows that see nothing have equal weights."""
    generator = torch.Generator().manual_seed(0)
    feeds = {n.op.label: torch.randn(n.shape, generator=generator) for n in before.inputs if n.dtype is F32}  # type: ignore[attr-defined]
    (a,), (b,) = (evaluate(g, {**feeds, "keep": keep}) for g in (before, after))
    assert torch.allclose(a, b, atol=1e-6) and not b.isnan().any()
    blind = ~keep.any(-1, keepdim=True).expand(B, H, S, 1)
    mean = feeds["v"].mean(-2, keepdim=True).expand(b.shape)
    assert torch.allclose(torch.where(blind, b, mean), mean, atol=1e-6)


@pytest.mark.parametrize("shape", [(T,), (S, T), (B, 1, 1, T), (B, H, S, T)])
@pytest.mark.parametrize("kind", ["shown", "hidden", "placed", "reshaped"])
def test_a_mask_that_drowns_scores_is_truth_values(shape: tuple[int, ...], kind: str):
    keep, (q, k, v) = input_("keep", PRED, shape), qkv()
    if kind == "placed":
        out = Plain(lambda s: where(broadcast(keep, s.shape), op("multiply", s, 0.25), -1e30))(q, k, v)
    else:
        mask = where(op("not", keep), LEAST, const(0.0, F32)) if kind == "hidden" else where(keep, const(0.0, F32), LEAST)
        if kind == "reshaped":
            mask = reshape(where(reshape(keep, (keep.tensor.elements,)), const(0.0, F32), LEAST), shape)
        out = Plain(lambda s: op("add", op("multiply", s, 0.25), mask))(q, k, v)
    found = check(out)
    assert attributes(found).equal_masked_rows and not attributes(found).zero_masked_rows
    assert len(found.src) == 4 and found.src[3].dtype is PRED
    seen = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.5
    seen.reshape(-1, shape[-1])[0] = False
    drowned(seen, graph_of(out), staged(graph_of(out), "recognise"))


def test_padding_before_the_first_key_leaves_rows_of_a_causal_model_equal_weights_for_all_keys():
    """Transformers masks a decoder so: what is hidden by padding or causality has the least number added."""
    keep, (q, k, v) = input_("keep", PRED, (B, 1, 1, T)), qkv()
    mask = where(op("and", causal(S, T), keep), const(0.0, F32), LEAST)
    out = Plain(lambda s: op("add", s, mask))(q, k, v)
    found = check(out)
    assert attributes(found) == replace(attributes(found), causal="upper", equal_masked_rows=True, scores=None)
    assert found.src[3] is keep
    seen = torch.ones(B, 1, 1, T, dtype=torch.bool)
    seen[0, ..., :3] = seen[1, ..., 4:] = False
    before, after = graph_of(out), staged(graph_of(out), "recognise")
    feeds = {n: torch.randn(x.shape, generator=torch.Generator().manual_seed(2)) for n, x in zip("qkv", (q, k, v), strict=True)}
    (a,), (b,) = (evaluate(g, {**feeds, "keep": seen}) for g in (before, after))
    assert torch.allclose(a, b, atol=1e-6)
    assert torch.allclose(b[0, :, :3], feeds["v"][0].mean(1, keepdim=True).expand(H, 3, V), atol=1e-6)


@pytest.mark.parametrize("fill", [-1e4, -1e29, -math.inf, 1e30])
def test_numbers_that_do_not_drown_or_are_no_numbers_are_not_equal_weights(fill: float):
    keep, (q, k, v) = input_("keep", PRED, (B, 1, 1, T)), qkv()
    mask = where(keep, const(0.0, F32), fill)
    found = attention_of(staged(graph_of(Plain(lambda s: op("add", s, mask))(q, k, v)), "recognise"))
    assert not attributes(found).equal_masked_rows
    for on in (1.0, -1e31):
        mask = where(keep, const(on, F32), LEAST)
        found = attention_of(staged(graph_of(Plain(lambda s, mask=mask: op("add", s, mask))(q, k, v)), "recognise"))
        assert not attributes(found).equal_masked_rows and found.src[3].dtype is F32


def test_what_causality_hides_beside_a_mask_that_drowns_has_no_weight():
    """A row that sees nothing has equal weights for those keys alone that causality leaves: no attention says so."""
    keep, (q, k, v) = input_("keep", PRED, (B, 1, 1, T)), qkv()
    mask = where(keep, const(0.0, F32), LEAST)
    out = Plain(lambda s: where(causal(S, T), op("add", s, mask), -math.inf))(q, k, v)
    assert not attributes(attention_of(staged(graph_of(out), "recognise"))).equal_masked_rows


@pytest.mark.parametrize("shape", [(T,), (S, T), (1, 1, 1, T), (B, 1, S, T), (1, H, S, T), (B, H, S, T), (B, 1, S, 1)])
@pytest.mark.parametrize("kind", ["keep", "hide", "add", "subtract"])
def test_masks_of_every_shape(shape: tuple[int, ...], kind: str):
    q, k, v = qkv()
    mask = input_("m", F32 if kind in ("add", "subtract") else PRED, shape)

    def masked(s: Node) -> Node:
        if kind in ("add", "subtract"):
            return op(kind, op("multiply", s, 0.25), mask)
        scaled = op("multiply", s, 0.25)
        return where(mask, scaled, -math.inf) if kind == "keep" else where(mask, -math.inf, scaled)

    found = check(Plain(masked)(q, k, v), orders=2)
    assert len(found.src) == 4 and found.src[3].dtype is mask.dtype
    if kind in ("keep", "add"):
        given = found.src[3]
        assert given is mask or given.src == (mask,)


def test_a_predicate_spelt_as_a_bias_is_a_predicate_again():
    q, k, v = qkv()
    keep = input_("keep", PRED, (B, 1, 1, T))
    for bias in (where(keep, 0.0, -math.inf), where(op("not", keep), -math.inf, 0.0)):
        found = check(Plain(lambda s, bias=bias: op("add", s, bias))(q, k, v))
        assert found.src[3].dtype is PRED


def test_several_masks_become_one():
    q, k, v = qkv()
    keep, more = input_("keep", PRED, (B, 1, 1, T)), input_("more", PRED, (S, T))
    bias, second = input_("bias", F32, (1, H, S, T)), input_("second", F32, (B, 1, 1, T))
    low = -3.4028234663852886e38
    chains: dict[str, Callable[[Node], Node]] = {
        "two predicates": lambda s: where(more, where(keep, s, -math.inf), -math.inf),
        "two biases": lambda s: op("add", op("add", s, bias), second),
        "bias, then predicate": lambda s: where(keep, op("add", s, bias), -math.inf),
        "predicate, then bias": lambda s: op("add", where(keep, s, -math.inf), bias),
        "bias, then low": lambda s: where(keep, op("add", s, bias), low),
        "low, then bias": lambda s: op("add", where(keep, s, low), bias),
        "low and bias": lambda s: op("add", where(causal(S, T), s, low), bias),
        "predicate, then low": lambda s: where(more, where(keep, s, -math.inf), low),
    }
    for name, chain in chains.items():
        found = check(Plain(lambda s, chain=chain: chain(op("multiply", s, 0.25)))(q, k, v), orders=1)
        assert len(found.src) == 4 and attributes(found).causal == "no", name


def test_what_is_causal_among_masks_is_causality():
    q, k, v = qkv()
    keep, bias = input_("keep", PRED, (B, 1, 1, T)), input_("bias", F32, (1, H, S, T))
    table, full = causal(S, T, T - S), const(torch.ones(S, T, dtype=torch.bool), PRED)
    hidden = where(op("and", op("and", full, table), keep), 0.0, -math.inf)
    chains: dict[str, tuple[Callable[[Node], Node], Node]] = {
        "one after the other": (lambda s: where(keep, where(table, s, -math.inf), -math.inf), keep),
        "both at once": (lambda s: where(op("and", keep, op("and", full, table)), s, -math.inf), keep),
        "spelt as a bias": (lambda s: op("add", s, hidden), keep),
        "beside a bias": (lambda s: op("add", op("add", s, where(table, 0.0, -math.inf)), bias), bias),
        "before a bias": (lambda s: op("add", where(table, s, -math.inf), bias), bias),
    }
    for name, (chain, left) in chains.items():
        found = check(Plain(lambda s, chain=chain: chain(op("multiply", s, 0.25)))(q, k, v), orders=1)
        assert attributes(found).causal == "lower" and found.src[3:] == (left,), name


@pytest.mark.parametrize(("queries", "keys", "kind"), [(7, 7, "upper"), (3, 10, "lower"), (9, 4, "upper"), (1, 5, "upper")])
def test_causality_written_out_for_every_batch_and_head(queries: int, keys: int, kind: str):
    """Transformers' own masks are so: one predicate, positions read from a table for each batch."""
    q, k, v = (input_(n, F32, (B, H, t, D)) for n, t in (("q", queries), ("k", keys), ("v", keys)))
    at = {n: Node(Iota(S32, (B, 1, *shape), axis)) for n, axis, shape in (("q", 2, (queries, 1)), ("k", 3, (1, keys)))}
    shift = keys - queries if kind == "lower" else 0
    seen = op("less_equal", at["k"], op("add", at["q"], shift))
    same = op("equal", *(op("multiply", n, 0) for n in at.values()))
    keep = input_("keep", PRED, (B, 1, 1, keys))
    for mask, left in ((op("and", same, seen), ()), (op("and", op("and", same, seen), keep), (keep,))):
        graph = graph_of(Node(Attention(0.5, zero_masked_rows=True), q, k, v, broadcast(mask, (B, H, queries, keys))))
        after = staged(graph, "recognise")
        found = attention_of(after)
        assert attributes(found).causal == kind and found.src[3:] == left
        assert_close(graph, after, 1e-5)
        assert_no_growth(graph, after)


@pytest.mark.parametrize("nearly", ["one more", "one less", "shifted", "of one batch", "of one head", "other way"])
def test_what_is_nearly_causal_stays_a_mask(nearly: str):
    q, k, v = (input_(n, F32, (B, H, S, D)) for n in "qkv")
    table = torch.ones(B, H, S, S, dtype=torch.bool).tril()
    if nearly == "one more":
        table[..., 2, 4] = True
    elif nearly == "one less":
        table[..., 4, 2] = False
    elif nearly == "shifted":
        table = table.tril(-1)
    elif nearly == "other way":
        table = table.mT.contiguous()
    else:
        table[(0,) if nearly == "of one batch" else (0, 1)] = True
    mask, keep = const(table, PRED), input_("keep", PRED, (B, 1, 1, S))
    for given in (mask, op("and", mask, keep), where(op("and", mask, keep), 0.0, -math.inf)):
        graph = graph_of(Node(Attention(0.5, zero_masked_rows=True), q, k, v, given))
        found = attention_of(staged(graph, "recognise"))
        assert attributes(found).causal == "no" and len(found.src) == 4


def test_a_mask_that_lets_everything_be_seen_is_none():
    q, k, v = qkv()
    everything = const(torch.ones(S, T, dtype=torch.bool), PRED)
    for masked in (lambda s: where(everything, s, -math.inf), lambda s: op("add", s, const(torch.zeros(1, 1, 1, T), F32))):
        assert check(Plain(masked)(q, k, v)).op == Attention(1.0)


def test_a_row_of_a_causal_table_is_not_causality():
    """[1, T] broadcasts over queries: every query sees the first key alone."""
    q, k, v = qkv()
    found = check(Plain(lambda s: where(constant_causal(1, T), s, -math.inf))(q, k, v))
    assert attributes(found).causal == "no" and len(found.src) == 4


def test_scaling_behind_a_predicate_is_scaling_before_it():
    q, k, v = qkv()
    keep = input_("keep", PRED, (B, 1, 1, T))
    found = check(Plain(lambda s: op("multiply", where(keep, s, -math.inf), 0.25))(q, k, v))
    assert attributes(found).scale == 0.25


# Guards, expressions, types.


def test_guards_against_rows_that_see_nothing():
    q, k, v = qkv()
    keep = input_("keep", PRED, (B, 1, S, T))
    plain = Plain(lambda s: where(keep, s, -math.inf), lambda w: where(op("is_nan", w), 0.0, w))
    before = graph_of(plain(q, k, v))
    after = assert_order_is_free(before, "recognise", orders=3)
    found = attention_of(after)
    assert found.op == Attention(1.0, zero_masked_rows=True)
    generator = torch.Generator().manual_seed(1)
    feeds = {n.op.label: torch.randn(n.shape, generator=generator) for n in (q, k, v)}
    visible = torch.rand(keep.shape, generator=generator) > 0.4
    visible[1, 0, 3] = False
    (a,), (b,) = (evaluate(g, {**feeds, "keep": visible}) for g in (before, after))
    assert torch.allclose(a, b, atol=1e-6) and not b[1, :, 3].any()
    (c,) = evaluate(staged(graph_of(replace(plain, weights=lambda w: w)(q, k, v)), "recognise"), {**feeds, "keep": visible})
    assert c[1, :, 3].isnan().all()  # without the guard such a row is NaN, before and after


def test_a_guard_by_the_bias_as_onnx_defines_it():
    q, k, v = qkv()
    keep = input_("keep", PRED, (B, 1, S, T))
    for bias in (where(keep, 0.0, -math.inf), input_("bias", F32, (B, 1, S, T))):
        blind = op("equal", reduce_("maximum", bias, [3], keepdims=True), -math.inf)
        out = Plain(lambda s, bias=bias: op("add", s, bias), lambda w, blind=blind: where(blind, 0.0, w))(q, k, v)
        assert attributes(check(out)).zero_masked_rows


def test_a_guard_by_another_bias_is_kept_as_it_is():
    q, k, v = qkv()
    bias, other = input_("bias", F32, (B, 1, S, T)), input_("other", F32, (B, 1, S, T))
    for reduced, axis in ((other, 3), (bias, 0)):
        blind = op("equal", reduce_("maximum", reduced, [axis], keepdims=True), -math.inf)
        out = Plain(lambda s: op("add", s, bias), lambda w, blind=blind: where(blind, 0.0, w))(q, k, v)
        held = attributes(check(out))
        assert not held.zero_masked_rows and held.weights is not None


def test_soft_cap_goes_into_the_scores():
    q, k, v = qkv()
    mask = input_("m", F32, (S, T))
    capped = lambda s: op("multiply", op("tanh", op("divide", op("multiply", s, 0.25), 30.0)), 30.0)  # noqa: E731
    found = check(Plain(lambda s: op("add", capped(s), mask))(q, k, v))
    held = attributes(found)
    assert held.scores is not None and held.weights is None and held.operands == ()
    assert held.scale == pytest.approx(0.25 / 30)


def test_sides_of_scores_and_weights_become_sources():
    q, k, v = qkv()
    temperature = input_("temperature", F32, (S, 1))
    drop = input_("drop", F32, (B, H, S, T))
    found = check(Plain(lambda s: op("multiply", s, temperature), lambda w: op("multiply", w, drop))(q, k, v))
    held = attributes(found)
    assert len(held.operands) == 3 and held.scores is not None and held.weights is not None
    assert len(found.src) == 5
    mask = input_("m", F32, (1, 1, S, T))
    found = check(Plain(lambda s: op("add", op("multiply", s, temperature), mask))(q, k, v))
    assert len(attributes(found).operands) == 4


def codes(x: Node, scale: float, dtype: DType, zero_point: int | None = None) -> Node:
    """x rounded to codes and back, per tensor."""
    extra = [const(scale, F32), *([] if zero_point is None else [const(zero_point, dtype)])]
    return Node(Dequantize(x.dtype), Node(Quantize(dtype), x, *extra), *extra)


@pytest.mark.parametrize(("dtype", "zero"), [(S8, None), (S8, 3), (U8, 100), (F8E4M3FN, None)])
def test_quantised_attention_keeps_every_rounding(dtype: DType, zero: int | None):
    """Pairs around both products, as quantised models have them; bit for bit in f32."""
    q, k, v = qkv()
    q, k, v = (codes(op("multiply", n, 0.5), 0.02, dtype, zero) for n in (q, k, v))
    mask = input_("m", F32, (B, 1, 1, T))
    plain = Plain(
        lambda s: op("add", op("multiply", codes(s, 0.03, dtype, zero), 0.5), mask),
        lambda w: codes(where(op("is_nan", w), 0.0, w), 0.004, dtype, zero),
    )
    found = check(plain(q, k, v), 1e-7)
    held = attributes(found)
    assert held.scores is not None and held.weights is not None and held.scale == 1.0 and held.zero_masked_rows
    assert [n.op.name for n in found.src[:3]] == ["dequantize"] * 3


def test_quantised_key_is_rearranged_beside_what_makes_it():
    """quantise(view(x)) becomes quantise of x in the layout that is read: no view is left between the codes and the product."""
    q, _, v = qkv()
    x = input_("x", F32, (B, T, H * D))
    k = transpose(reshape(op("tanh", x), (B, T, H, D)), (0, 2, 3, 1))
    scores = gemm(q, codes(op("multiply", k, 0.5), 0.02, S8))
    found = check(gemm(softmax(scores), v))
    key = found.src[1]
    assert key.op.name == "dequantize" and key.src[0].op.name == "quantize"
    assert key.shape == (B, H, T, D)


@pytest.mark.parametrize("kind", ["shown", "hidden", "placed"])
def test_a_mask_that_drowns_scores_in_codes_is_truth_values(kind: str):
    """The mask of a quantised BERT, which no step has to make any more."""
    keep, (q, k, v) = input_("keep", PRED, (B, 1, 1, T)), qkv()

    def masked(s: Node) -> Node:
        scaled = codes(op("multiply", s, 0.25), 0.03, S8)
        if kind == "placed":
            return where(broadcast(keep, s.shape), scaled, -1e30)
        mask = where(op("not", keep), LEAST, const(0.0, F32)) if kind == "hidden" else where(keep, const(0.0, F32), LEAST)
        return op("add", scaled, mask)

    out = Plain(masked, lambda w: codes(w, 0.004, U8, 0))(q, k, v)
    found = check(out, orders=2)
    held = attributes(found)
    assert held.equal_masked_rows and held.scores is not None and held.weights is not None
    assert found.src[:3] == (q, k, v) and found.src[3].dtype is PRED
    seen = torch.rand(keep.shape, generator=torch.Generator().manual_seed(1)) > 0.5
    seen[0] = False
    before, after = graph_of(out), staged(graph_of(out), "recognise")
    feeds = {n: torch.randn(x.shape, generator=torch.Generator().manual_seed(2)) for n, x in zip("qkv", (q, k, v), strict=True)}
    (a,), (b,) = (evaluate(g, {**feeds, "keep": seen}) for g in (before, after))
    assert torch.equal(a, b) or torch.allclose(a, b, atol=1e-6)
    assert [p.kind for p in parts_for(optimise(before), detect("cpu"))] == ["attention"]


def test_causality_of_scores_in_codes():
    q, k, v = qkv()
    out = Plain(lambda s: where(causal(S, T), codes(op("multiply", s, 0.25), 0.03, S8), -math.inf))(q, k, v)
    found = check(out, orders=2)
    assert attributes(found).causal == "upper" and attributes(found).scores is not None and found.src == (q, k, v)


def test_heads_repeated_for_groups_of_scores_in_codes():
    q, k, v = qkv(kv_heads=2)

    def twice(n: Node) -> Node:
        b, h, t, d = n.shape
        return reshape(broadcast(reshape(n, (b, h, 1, t, d)), (b, h, 2, t, d)), (b, 2 * h, t, d))

    found = check(Plain(lambda s: codes(op("multiply", s, 0.25), 0.03, S8))(q, twice(k), twice(v)), orders=2)
    assert found.src == (q, k, v) and attributes(found).scores is not None


def test_a_mask_beside_a_scale_that_is_no_number_stays_as_it_is():
    """Its scores read a source of their own, so that operands are expressions."""
    keep, scale, (q, k, v) = input_("keep", PRED, (B, 1, 1, T)), input_("scale", F32, (B, H, S, T)), qkv()
    mask = where(keep, const(0.0, F32), LEAST)
    out = Plain(lambda s: op("add", codes(op("multiply", s, scale), 0.03, S8), mask))(q, k, v)
    found = check(out, orders=2)
    assert attributes(found).operands and not attributes(found).equal_masked_rows


def test_codes_read_elsewhere_are_not_rearranged():
    q, k, v = qkv()
    turned = codes(swap_last(k), 0.02, S8)
    before = graph_of(gemm(softmax(gemm(q, turned)), v), turned)
    after = staged(before, "recognise")
    assert attention_of(after).src[1] == transpose(turned, (0, 1, 3, 2))
    assert sum(n.op.name == "quantize" for n in after.nodes()) == 1
    assert_close(before, after, 1e-6)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_softmax_in_f32_between_casts(dtype: DType):
    q, k, v = qkv(dtype)
    mask = input_("m", dtype, (B, 1, 1, T))
    out = Plain(lambda s: op("add", op("multiply", s, 0.25), mask), softmax=lambda s: convert(softmax(convert(s, F32)), dtype))(
        q, k, v
    )
    found = check(out, 8 * dtype.epsilon)
    assert found.src == (q, k, v, mask)
    wide = gemm(convert(softmax(op("multiply", gemm(q, swap_last(k)), 0.25)), dtype), v, out_dtype=dtype)
    assert check(wide, 4 * dtype.epsilon).src == (q, k, v)


def test_a_result_wider_than_the_query_widens_the_query():
    q, k, v = qkv(BF16)
    weights = softmax(op("multiply", gemm(q, swap_last(k)), 0.25))
    found = check(gemm(convert(weights, BF16), v), 2 * BF16.epsilon)
    assert found.dtype is F32 and found.src[0] == convert(q, F32)


# Where it must not fire.


def test_what_is_read_elsewhere_is_named_and_left():
    q, k, v = qkv()
    product = gemm(q, swap_last(k))
    scores = op("multiply", product, 0.25)
    weights = softmax(scores)
    out = gemm(weights, v)
    for value, name in ((product, "gemm"), (scores, "multiply"), (weights, "softmax")):
        graph = graph_of(out, value)
        assert refusals(graph, RULE, "recognise") == [f"the {name} inside this attention is also read elsewhere"]
        assert staged(graph, "recognise").outputs == graph.outputs
    read = graph_of(out, op("tanh", q), op("tanh", k), op("tanh", v))  # the operands may be read
    attention_of(staged(read, "recognise"))


def test_one_softmax_for_two_products_stays():
    q, k, v = qkv()
    weights = softmax(gemm(q, swap_last(k)))
    graph = graph_of(gemm(weights, v), gemm(weights, op("tanh", v)))
    after = staged(graph, "recognise")
    assert after.outputs == graph.outputs and arithmetic(after) == arithmetic(graph)


@pytest.mark.parametrize(
    ("scores", "why"),
    [
        (
            lambda s, m: op("multiply", op("add", s, m), 0.25),
            "its scores are scaled after they are masked",
        ),
        (lambda s, m: op("tanh", op("add", s, m)), "its scores go through tanh after they are masked"),
        (
            lambda s, m: codes(op("add", s, m), 0.1, S8),
            "its scores go through quantize after they are masked",
        ),
        (
            lambda s, m: where(op("greater", m, 0.0), op("add", s, m), -5.0),
            "it puts -5 in the place of scores that are masked already",
        ),
        (
            lambda s, m: where(op("greater", m, 0.0), s, op("multiply", m, 2.0)),
            "what it puts in the place of scores is not one number",
        ),
        (
            lambda s, m: op("add", where(causal(S, T), s, -1e9), m),
            "its causal mask hides scores behind a finite number, and something follows it",
        ),
    ],
)
def test_what_an_attention_cannot_say_is_refused(scores: Callable[[Node, Node], Node], why: str):
    q, k, v = qkv()
    mask = input_("m", F32, (B, 1, S, T))
    graph = graph_of(Plain(lambda s: scores(s, mask))(q, k, v))
    assert refusals(graph, RULE, "recognise") == [why]
    assert not any(isinstance(n.op, Attention) for n in staged(graph, "recognise").nodes())


def test_a_late_guard_is_refused():
    q, k, v = qkv()
    late = Plain(lambda s: s, lambda w: (lambda r: where(op("is_nan", r), 0.0, r))(op("multiply", w, input_("d", F32, (T,)))))
    why = "its guard against rows that see nothing does not stand right behind the softmax"
    assert refusals(graph_of(late(q, k, v)), RULE, "recognise") == [why]


def other_programs() -> dict[str, Node]:
    q, k, v = (input_(n, F32, (B, H, S, S)) for n in "qkv")
    product = gemm(q, swap_last(k))
    codes_q, codes_k = input_("cq", S8, (B, H, S, S)), input_("ck", S8, (B, H, S, S))
    return {
        "softmax over the heads": gemm(Node(Softmax(1), product), v),
        "softmax over the queries": gemm(Node(Softmax(2), product), v),
        "weights transposed": gemm(swap_last(softmax(product)), v),
        "log softmax": gemm(Node(Softmax(3, log=True), product), v),
        "no product before": gemm(softmax(q), v),
        "no softmax": gemm(op("tanh", product), v),
        "heads mixed": gemm(reshape(transpose(softmax(product), (0, 2, 1, 3)), (B, H, S, S)), v),
        "integer product": gemm(softmax(convert(gemm(codes_q, codes_k), F32)), v),
        "other product after": gemm(softmax(product), softmax(product)),
        "routing": gemm(op("multiply", softmax(product), product), v),
    }


@pytest.mark.parametrize("name", other_programs())
def test_other_programs_keep_their_softmax(name: str):
    out = other_programs()[name]
    before = graph_of(out)
    after = staged(before, "recognise")
    assert not any(isinstance(n.op, Attention) for n in after.nodes())
    assert_close(before, after, 1e-6)


# An attention that a front end read as one already.


@pytest.mark.parametrize("quantised", [False, True])
def test_repeated_heads_of_an_attention_are_grouped(quantised: bool):
    q, k, v = qkv(kv_heads=2)

    def repeated(n: Node) -> Node:
        b, h, t, d = n.shape
        r = reshape(broadcast(reshape(n, (b, h, 1, t, d)), (b, h, 2, t, d)), (b, h * 2, t, d))
        return codes(r, 0.02, S8) if quantised else r

    mask = input_("m", PRED, (B, 1, S, T))
    before = graph_of(Node(Attention(0.25, zero_masked_rows=True), q, repeated(k), repeated(v), mask))
    after = assert_order_is_free(before, "recognise", orders=3)
    found = attention_of(after)
    assert found.src[1].shape == (B, 2, T, D) and found.src[2].shape == (B, 2, T, V)
    assert_close(before, after, 1e-6)
    assert_no_growth(before, after)


MASKS = {"for all heads": (B, 1, 1, T), "a head": (1, H, 1, T), "a head of any batch": (H, 1, T), "for all": (T,)}


@pytest.mark.parametrize("kind", ["none", "lower", *MASKS])
def test_single_queries_that_share_keys_are_rows_of_one_head(kind: str):
    _, k, v = qkv(kv_heads=2)
    q, shape = input_("q", F32, (B, H, 1, D)), MASKS.get(kind)
    mask = [] if shape is None else [input_("m", F32, shape)]
    before = graph_of(Node(Attention(0.25, "lower" if kind == "lower" else "no"), q, k, v, *mask))
    after = assert_order_is_free(before, "recognise", orders=3)
    found = attention_of(after)
    assert found.src[0].shape == (B, 2, H // 2, D) and found.src[1:3] == (k, v) and attributes(found).causal == "no"
    assert_close(before, after, 1e-6)
    assert_no_growth(before, after)


def test_queries_that_share_no_keys_or_see_different_ones_stay():
    _, k, v = qkv(kv_heads=2)
    one, two = (input_("q", F32, (B, H, n, D)) for n in (1, 2))
    for node in (
        Node(Attention(0.25), two, k, v),
        Node(Attention(0.25, "upper"), one, k, v),  # sees the first key alone
        Node(Attention(0.25), one, *qkv()[1:]),
    ):
        graph = graph_of(node)
        assert staged(graph, "recognise").outputs == graph.outputs


def test_heads_that_are_not_repeated_alike_stay():
    q, k, v = qkv(kv_heads=2)

    def repeated(n: Node, *, inner: bool) -> Node:
        b, h, t, d = n.shape
        shape = (b, h, 1, t, d) if inner else (b, 1, h, t, d)
        full: tuple[int, ...] = (b, h, 2, t, d) if inner else (b, 2, h, t, d)
        return reshape(broadcast(reshape(n, shape), full), (b, h * 2, t, d))

    own = input_("own", F32, (B, H, T, V))
    for keys, values in ((repeated(k, inner=True), own), (repeated(k, inner=False), repeated(v, inner=False))):
        graph = graph_of(Node(Attention(0.25), q, keys, values))
        assert staged(graph, "recognise").outputs == graph.outputs
    plain = graph_of(Node(Attention(0.25), *qkv(kv_heads=2)))
    assert staged(plain, "recognise").outputs == plain.outputs


Kind = Literal["f32", "codes"]


@pytest.mark.parametrize("kind", ["f32", "codes"])
def test_many_layers_take_time_in_proportion(kind: Kind):
    """Twenty layers in one program: each is recognised, in two sweeps of the graph."""
    x = input_("x", F32, (B, S, H * D))
    out = x
    for layer in range(20):
        parts = [op("tanh", op("multiply", out, 1.0 + layer + i / 7)) for i in range(3)]
        heads = [transpose(reshape(p, (B, S, H, D)), (0, 2, 1, 3)) for p in parts]
        if kind == "codes":
            heads = [codes(h, 0.02, S8) for h in heads]
        out = op("add", reshape(transpose(Plain()(*heads), (0, 2, 1, 3)), (B, S, H * D)), out)
    before = graph_of(out)
    attention_of(staged(before, "recognise"), count=20)
