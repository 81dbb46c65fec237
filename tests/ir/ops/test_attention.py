"""Attention against torch's scaled_dot_product_attention and NumPy, in float64."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.bias import causal_lower_right
from values import constant, random_array, run, value_of

from tilewright.dtype import BF16, F8E4M3FN, F16, F32, F64, PRED, S8
from tilewright.errors import TypeMismatchError
from tilewright.ir.build import const, convert, input_, items, map_, reshape, swap_last, transpose
from tilewright.ir.evaluate import accumulate_in_float64
from tilewright.ir.graph import Node
from tilewright.ir.ops import Acc, Attention, Dequantize, Param, Quantize
from tilewright.ir.types import TensorType


def by_torch(q, k, v, scale, mask=None, causal=False):
    tensors = [torch.from_numpy(np.asarray(x, np.float64)) for x in (q, k, v)]
    bias = None if mask is None else torch.from_numpy(mask if mask.dtype == bool else np.asarray(mask, np.float64))
    f = torch.nn.functional.scaled_dot_product_attention
    return f(*tensors, attn_mask=bias, is_causal=causal, scale=scale, enable_gqa=True).numpy()


def operands(d, b=2, hq=4, hk=2, s=5, t=7, dim=3, dv=6, seed=0):
    rng = np.random.default_rng(seed)
    return [random_array(d, shape, rng, 0) for shape in ((b, hq, s, dim), (b, hk, t, dim), (b, hk, t, dv))]


def close(got, wanted, d):
    scale = np.nanmax(np.abs(wanted), initial=1)
    assert got.shape == wanted.shape
    assert np.array_equal(np.isnan(got.astype(np.float64)), np.isnan(wanted))
    error = np.abs(got.astype(np.float64) - wanted)
    assert np.nanmax(error, initial=0) <= scale * (d.epsilon if d.bits < 32 else 32 * d.epsilon)


@pytest.mark.parametrize("d", [F64, F32, F16, BF16, F8E4M3FN], ids=str)
@pytest.mark.parametrize("hk", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_torchs(d, hk, causal):
    q, k, v = operands(d, hk=hk)
    got = run(Attention(0.7, "upper" if causal else "no"), (q, d), (k, d), (v, d))
    assert got.dtype == d.to_numpy()
    close(got, by_torch(q, k, v, 0.7, causal=causal), d)


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 1, 5, 7), (2, 1, 1, 7), (5, 7), (7,), (5, 1), ()])
@pytest.mark.parametrize("kind", [PRED, F32, F64], ids=str)
def test_masks_broadcast_and_keep_or_add(shape, kind):
    q, k, v = operands(F32)
    mask = random_array(kind, shape, np.random.default_rng(1), 0)
    if kind is PRED:
        mask = mask | (np.arange(7) == 0)[: shape[-1] if shape else 1].reshape(shape[-1:])
    got = run(Attention(0.5), (q, F32), (k, F32), (v, F32), (mask, kind))
    close(got, by_torch(q, k, v, 0.5, np.broadcast_to(mask, (2, 4, 5, 7)).copy()), F32)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("kind", [PRED, F32], ids=str)
def test_a_row_that_sees_nothing_is_nan_or_zero(zero, kind):
    q, k, v = operands(F32)
    mask = np.ones((5, 7), bool)
    mask[2] = False
    bias = mask if kind is PRED else np.where(mask, 0, -np.inf).astype(np.float32)
    got = run(Attention(0.5, "no", zero), (q, F32), (k, F32), (v, F32), (bias, kind))
    wanted = by_torch(q, k, v, 0.5)
    wanted[:, :, 2] = 0 if zero else np.nan
    close(got, wanted, F32)


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from(["no", "upper", "lower"]))
def test_causal_masks_count_from_either_corner(s, t, causal):
    q, k, v = operands(F64, s=s, t=t)
    visible = {"no": np.ones((s, t), bool), "upper": np.tri(s, t, 0, bool), "lower": np.tri(s, t, t - s, bool)}[causal]
    scores = np.einsum("bhsd,bhtd->bhst", q, np.repeat(k, 2, 1)) * 0.7
    scores = np.where(visible, scores, -np.inf)
    with np.errstate(all="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = np.nan_to_num(weights / weights.sum(-1, keepdims=True))
    wanted = weights @ np.repeat(v, 2, 1)
    close(run(Attention(0.7, causal, True), (q, F64), (k, F64), (v, F64)), wanted, F64)
    if causal == "lower":
        with pytest.warns(UserWarning, match="will produce NaNs") if s > t else nullcontext():
            with_torch = causal_lower_right(s, t)._materialize("cpu").numpy()
        assert np.array_equal(with_torch, visible)


@pytest.mark.parametrize("extents", [{"b": 0}, {"hq": 0}, {"s": 0}, {"t": 0}, {"dim": 0}, {"dv": 0}])
@pytest.mark.parametrize("zero", [False, True])
def test_nothing_to_attend_to(extents, zero):
    q, k, v = operands(F32, **extents)
    got = run(Attention(0.5, "lower", zero), (q, F32), (k, F32), (v, F32))
    assert got.shape == (*q.shape[:3], v.shape[3])
    if "t" in extents:
        assert (got == 0).all()
    if "dim" in extents and got.size:
        assert np.isfinite(got[:, :, -1]).all()


def test_operands_scores_weights_and_stores_are_expressions():
    """Quantised keys read transposed, rounded scores and weights, two results in two types."""
    q, _, v = operands(F32, hk=4)
    rng = np.random.default_rng(2)
    codes, zero = random_array(S8, (2, 4, 3, 7), rng), np.int8(3)
    sources = [constant(q, F32), constant(codes, S8), const(0.05, F32), const(3, S8), constant(v, F32)]
    params = [Node(Param(i, s.tensor)) for i, s in enumerate(sources)]
    keys = swap_last(Node(Dequantize(F32), *params[1:4]))
    inner, result = Node(Acc(TensorType(F32, (2, 4, 5, 7)))), Node(Acc(TensorType(F32, (2, 4, 5, 6))))
    step = const(1 / 64, F32)
    rounded = Node(Dequantize(F32), Node(Quantize(S8), inner, step), step)
    flat = reshape(transpose(result, (0, 2, 1, 3)), (2, 5, 24))
    op = Attention(
        0.5,
        operands=(params[0], keys, params[4]),
        scores=map_("minimum", inner, const(1.0, F32)),
        weights=rounded,
        stores=(convert(flat, F16), Node(Quantize(S8), result, params[2])),
    )
    node = Node(op, *sources)
    assert [str(t) for t in node.type.items] == ["f16[2,5,24]", "s8[2,4,5,6]"]

    k = (codes.astype(np.float64) - float(zero)) * np.float64(np.float32(0.05))
    scores = np.minimum(q.astype(np.float64) @ k * 0.5, 1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = np.rint(weights / weights.sum(-1, keepdims=True) * 64) / 64
    wanted = weights @ v.astype(np.float64)
    for float64 in (False, True):
        with accumulate_in_float64(float64):
            first, second = (value_of(i) for i in items(node))
        close(first, wanted.transpose(0, 2, 1, 3).reshape(2, 5, 24), F16)
        error = np.abs(second.astype(np.float64) - np.clip(np.rint(wanted / np.float32(0.05)), -128, 127))
        assert error.max() <= 1 and (error > 0).mean() < 0.02


def test_wrong_operands_are_refused():
    q, k, v = (input_(n, F32, s) for n, s in (("q", (2, 4, 5, 3)), ("k", (2, 2, 7, 3)), ("v", (2, 2, 7, 6))))
    i8 = input_("i", S8, (2, 2, 7, 6))
    scores, result = TensorType(F32, (2, 4, 5, 7)), TensorType(F32, (2, 4, 5, 6))
    acc, out = Node(Acc(scores)), Node(Acc(result))
    plain = tuple(Node(Param(i, n.tensor)) for i, n in enumerate((q, k, v)))
    over = r"attention over q f32\[2,4,5,3\], k "
    for node, message in (
        (lambda: Node(Attention(1.0), q, k), "attention takes q, k, v and maybe a mask, not 2 operands"),
        (lambda: Node(Attention(1.0), q, k, v, q, q), "not 5 operands"),
        (lambda: Node(Attention(1.0), q, k, reshape(v, (2, 2, 42))), over),
        (lambda: Node(Attention(1.0), q, k, i8), over),
        (lambda: Node(Attention(1.0), q, i8, v), over),
        (lambda: Node(Attention(1.0), q, v, k), over),
        (lambda: Node(Attention(1.0), q, *[input_(n, F32, (2, 3, 7, 3)) for n in "kv"]), over),
        (lambda: Node(Attention(1.0), q, *[input_(n, F32, (2, 0, 7, 3)) for n in "kv"]), over),
        (
            lambda: Node(Attention(1.0), q, k, v, input_("m", F32, (6, 7))),
            r"mask f32\[6,7\] does not broadcast to \[2, 4, 5",
        ),
        (lambda: Node(Attention(1.0), q, k, v, input_("m", S8, (5, 7))), r"mask s8\[5,7\] does not broadcast"),
        (lambda: Node(Attention(1.0, "yes"), q, k, v), "attention: causal is 'yes', not one of no, upper, lower"),
        (lambda: Node(Attention("a"), q, k, v), "attention: scale is 'a', not a number"),
        (lambda: Node(Attention(1.0, operands=plain), q, k, i8), r"param 2 of operands is f32\[2,2,7,6\]; the source is not"),
        (lambda: Node(Attention(1.0, operands=plain), q, k), r"param 2 of operands is .*; the source is not"),
        (
            lambda: Node(Attention(1.0, operands=(plain[0], plain[1], Node(Acc(v.tensor)))), q, k),
            r"an operand of attention reads its own accumulator \(attention\)",
        ),
        (lambda: Node(Attention(1.0, stores=(acc,)), q, k, v), r"stores read acc as f32\[2,4,5,7\]; it is f32\[2,4,5,6\]"),
        (lambda: Node(Attention(1.0, scores=out), q, k, v), r"scores read acc as f32\[2,4,5,6\]; it is f32\[2,4,5,7\]"),
        (lambda: Node(Attention(1.0, scores=convert(acc, F16)), q, k, v), r"scores must stay f32\[2,4,5,7\], not become f16"),
        (lambda: Node(Attention(1.0, weights=convert(acc, F16)), q, k, v), r"weights must stay f32\[2,4,5,7\], not become"),
    ):
        with pytest.raises(TypeMismatchError, match=message):
            node()
