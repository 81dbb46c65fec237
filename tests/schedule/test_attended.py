"""Checks of attention on scores of any size."""

import math

import pytest
import torch

from tilewright.dtype import BF16, F8E4M3FN, F16, F32, PRED
from tilewright.ir.build import input_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Attention
from tilewright.schedule import expected as judge
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources


def posed(heads, queries, keys, depth, *, dtype=F32, kv_heads=None, mask=None, **attributes):
    names = [("q", heads, queries), ("k", kv_heads or heads, keys), ("v", kv_heads or heads, keys)]
    src = [input_(n, dtype, (2, h, t, depth)) for n, h, t in names]
    if mask is not None:
        src.append(input_("mask", mask, (2, 1, queries, keys)))
    return problem_of(Node(Attention(**attributes), *src))


def in_f32(problem, sources, narrowed=lambda t: t):
    """Another order of the same steps: in f32 throughout, the scale put on q, weights of base 2 divided at the end."""
    op = problem.op
    q, k, v = (t.float() for t in sources[:3])
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = op.masked((narrowed(q) * op.scale) @ narrowed(k).transpose(-1, -2), sources[3] if len(sources) == 4 else None)
    weights = torch.exp2((scores - scores.amax(-1, keepdim=True)) * math.log2(math.e))
    return [((weights @ v) / weights.sum(-1, keepdim=True)).to(sources[0].dtype)]


def ten_bits(t):
    """Rounded to 10 bits of mantissa, as TF32 does."""
    bits = t.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


SHAPES = [
    {"heads": 2, "queries": 128, "keys": 128, "depth": 512, "scale": 1.0, "causal": "upper"},
    {"heads": 2, "queries": 96, "keys": 160, "depth": 256, "scale": 1.0, "causal": "lower"},
    {"heads": 4, "kv_heads": 2, "queries": 33, "keys": 67, "depth": 64, "scale": 0.125},
    {"heads": 1, "queries": 64, "keys": 64, "depth": 128, "scale": 3.0, "mask": F32},
    {"heads": 2, "queries": 5, "keys": 1, "depth": 7, "scale": -1.0},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_right_attentions_of_large_scores_pass_and_dropped_precision_does_not(shape):
    problem = posed(**shape)
    sources = random_sources(problem)
    expected = expect(problem, sources)
    assert check(problem, expected, in_f32(problem, sources)) is None
    assert check(problem, expected, [problem.op.evaluate(problem.node, sources)]) is None
    if shape["keys"] > 1:
        assert check(problem, expected, in_f32(problem, sources, ten_bits)) is not None
        shifted = in_f32(problem, [sources[0], sources[1].roll(1, 2), *sources[2:]])
        assert "elements differ" in str(check(problem, expected, shifted))
        off = 2.0**-9 if shape["scale"] < 1 else 2.0**-6
        assert check(problem, expected, [t * (1 + off) for t in in_f32(problem, sources)]) is not None


def test_half_precision_is_held_to_its_own_rounding():
    problem = posed(2, 64, 64, 256, dtype=BF16, scale=1.0)
    sources = random_sources(problem)
    expected = expect(problem, sources)
    assert check(problem, expected, in_f32(problem, sources)) is None
    assert check(problem, expected, in_f32(problem, [sources[0].flip(-1), *sources[1:]])) is not None


@pytest.mark.parametrize(("dtype", "gap", "size"), [(F32, 89.0, 1.0), (BF16, 88.0, 3.0), (F16, 18.0, 10.0)])
def test_weights_that_vanish_beside_a_value_of_0_may_be_taken_for_0(dtype, gap, size):
    """The largest weight's value is 0, so that all of a result comes from weights too small for a kernel's types."""
    problem = posed(1, 1, 2, 1, dtype=dtype, scale=1.0)
    q, k, v = (torch.zeros(t.shape, dtype=t.dtype.to_torch()) for t in problem.types)
    q.fill_(1.0)
    k[:, :, 0], v[:, :, 1] = gap, size
    expected = expect(problem, [q, k, v])
    assert 0 < float(expected.reference[0].abs().max()) < 1e-6
    assert check(problem, expected, [torch.zeros_like(q)]) is None
    assert check(problem, expected, [torch.full_like(q, 1e-4 if dtype is F16 else 1e-30)]) is not None


def test_what_vanishes_in_types_that_keep_subnormals_is_less_than_the_least_of_these():
    problem = posed(1, 4, 4, 16, dtype=F8E4M3FN, scale=1.0)
    lost = judge._vanished(problem, torch.ones(problem.types[2].shape, dtype=torch.float8_e4m3fn))
    assert 0 < float(lost.max()) <= 2.0**-9 * (4 + 1)  # the least number, for each of four values, and for a result


def test_pieces_give_what_the_whole_does(monkeypatch):
    problem = posed(4, 13, 11, 8, kv_heads=2, mask=F32, scale=2.0, causal="lower")
    sources = random_sources(problem)
    whole = expect(problem, sources)
    monkeypatch.setattr(judge, "most_at_once", lambda *t: 30)
    cut = expect(problem, sources)
    for name in ("reference", "low", "high", "width"):
        for a, b in zip(getattr(whole, name), getattr(cut, name), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


def test_hidden_keys_and_rows_without_any_leave_no_tolerance():
    problem = posed(1, 4, 6, 16, scale=1.0, mask=PRED, zero_masked_rows=True)
    q, k, v, mask = random_sources(problem)
    mask[:, :, :, 0], mask[:, :, 1], mask[:, :, :, 5] = True, False, False
    k[:, :, 5] = math.inf
    expected = expect(problem, [q, k, v, mask])
    right = in_f32(problem, [q, torch.where(k.isinf(), 0.0, k), v, mask])[0].nan_to_num(0.0)
    assert check(problem, expected, [right]) is None
    right[0, 0, 1, 0] = 1e-3
    assert check(problem, expected, [right]) is not None
