"""Elements of results by themselves: what they should be is what the whole problem's check says, and a wrong one is found."""

import pytest
import torch
from attentions import attention
from fusions import by_row, norm, problem_of
from hypothesis import HealthCheck, given, settings
from random_anchors import attentions, gemms

from tilewright.dtype import BF16, F32, PRED, S8, S64
from tilewright.ir.anchor import stores_of
from tilewright.ir.build import input_, map_, reshape, slice_, transpose
from tilewright.ir.graph import Node
from tilewright.ir.notation import parse
from tilewright.ir.ops import Concat, Dequantize, Gather, Iota, LayerNorm, Pad, Reduce, Softmax
from tilewright.schedule import problem as problems
from tilewright.schedule.expected import expect
from tilewright.schedule.intervals import orderable
from tilewright.schedule.problem import FusionProblem
from tilewright.schedule.sample import random_sources
from tilewright.schedule.spot_check import _expected, sampled, spot_check

MANY = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def agrees(problem):
    """All elements of small results, and 200 of large ones, are expected to be what they are for the problem as a whole."""
    assert sampled(problem)
    sources = random_sources(problem)
    whole = expect(problem, sources)
    roots = problem.roots if isinstance(problem, FusionProblem) else stores_of(problem.node)
    for i, root in enumerate(roots):
        at = torch.randperm(root.tensor.elements, generator=torch.Generator().manual_seed(1))[:200]
        low, mid, high = _expected(problem, root, at, sources, 0.0)
        wanted = [orderable(t.expand(root.shape)).reshape(-1)[at] for t in (whole.reference[i], whole.low[i], whole.high[i])]
        torch.testing.assert_close(mid.double(), wanted[0].double(), rtol=2e-2, atol=1e-4, equal_nan=True)
        if not whole.exact[i] and mid.is_floating_point():
            scale = float(wanted[0].double().abs().nan_to_num(0, 0, 0).max())
            for end, other in ((low, wanted[1]), (high, wanted[2])):
                torch.testing.assert_close(end.double(), other.double(), rtol=2e-2, atol=2e-2 * scale + 1e-4, equal_nan=True)
    right = {i: t.clone() for i, t in enumerate(whole.reference)}
    assert spot_check(problem, sources, right, 0.001)[0] is None


@settings(max_examples=20, **MANY)
@given(gemms())
def test_products(node):
    if all(t.elements for t in (*(s.tensor for s in node.src), node.op.lhs.tensor)):
        agrees(problems.problem_of(node))


@settings(max_examples=20, **MANY)
@given(attentions())
def test_attentions(node):
    agrees(problems.problem_of(node))


@pytest.mark.parametrize("causal", ["no", "upper", "lower"])
@pytest.mark.parametrize("mask", [None, (PRED, (2, 1, 1, 40)), (F32, (1, 2, 33, 40))])
def test_masks(mask, causal):
    agrees(problems.problem_of(attention((2, 2, 2, 33, 40, 8, 5), mask=mask, causal=causal, zero_masked_rows=True)))


X, W, Y = input_("x", F32, (6, 40, 24)), input_("w", F32, (24,)), input_("y", F32, (6, 7, 24))
FUSIONS = {
    "norm": (norm(X, W),),
    "norm of two axes": (Node(LayerNorm(1, 1e-5, False), X),),
    "softmax": (Node(Softmax(1), X), Node(Softmax(-1, True), X)),
    "reduce": (Node(Reduce("add", (0, 2)), X), Node(Reduce("maximum", (1,), True), X), Node(Reduce("add", ()), X)),
    "gather": (Node(Gather(0), input_("t", F32, (50, 24)), input_("i", S64, (6, 40))),),
    "concat": (Node(Concat(1), X, Y, X),),
    "blocks": (Node(Dequantize(F32, (8, 4)), input_("q", S8, (40, 24)), input_("s", F32, (5, 6))),),
    "quantised rows": by_row(X),
    "nested": (map_("add", norm(Node(Softmax(1), X), W), transpose(reshape(X, (6, 24, 40)), (0, 2, 1))),),
    "places": (map_("add", Node(Iota(F32, (6, 40, 24), 1)), slice_(X, 1, 0, 40)),),
}


@pytest.mark.parametrize("roots", FUSIONS.values(), ids=FUSIONS.keys())
def test_fusions(roots):
    agrees(problem_of(*roots))


def test_wrong_elements_are_found_and_named():
    problem = problems.problem_of(parse("bf16[300,96] @ bf16[96,200] + bias, gelu -> bf16").outputs[0])
    sources = random_sources(problem)
    right = expect(problem, sources).reference[0]
    ends = right.clone()
    ends[-1, -1] += 8
    assert "result 0 is wrong at [299, 199]: " in (spot_check(problem, sources, {0: ends}, 0.0)[0] or "")
    rows = right.clone()
    rows[256:] = 77
    assert "for " in (spot_check(problem, sources, {0: rows}, 0.0)[0] or "")
    shifted = right.roll(1, 0)
    assert spot_check(problem, sources, {0: shifted}, 0.0)[0] is not None
    missing = torch.full_like(right, float("nan"))
    assert ": nan for " in (spot_check(problem, sources, {0: missing}, 0.0)[0] or "")
    assert spot_check(problem, sources, {}, 0.0)[0] is None


def test_what_cannot_be_sampled_is_said_so():
    scalar = input_("v", F32, ())
    assert not sampled(problem_of(Node(Pad((0, 1, 0), (0, 0, 0), (0, 0, 0)), X, scalar)))
    assert not sampled(problem_of(Node(Reduce("add", (0,)), input_("long", F32, (1 << 21,)))))
    assert not sampled(problems.problem_of(parse("f32[0,4] @ f32[4,4]").outputs[0]))
    assert sampled(problems.problem_of(attention((1, 1, 1, 4096, 4096, 64, 64), dtype=BF16)))
