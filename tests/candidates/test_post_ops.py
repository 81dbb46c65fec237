"""Epilogues: which operations oneDNN takes over, and which it must leave."""

import pytest
import torch

from tilewright.candidates.library.onednn import ACTIVATIONS, CANDIDATE, read_post_ops
from tilewright.compiler import optimise
from tilewright.dtype import BF16, F32, DType
from tilewright.hardware.detect import cpu
from tilewright.ir.build import const, convert, input_, map_
from tilewright.ir.graph import Graph, Node
from tilewright.ir.ops import gemm
from tilewright.schedule.candidate import plan_for, refusal
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import Problem, problem_of
from tilewright.schedule.sample import random_sources


def problem(dtype: DType, fn: str | None, *, bias: DType | None = None, round_first: bool = False) -> Problem:
    torch.manual_seed(0)
    x, w = input_("x", dtype, (33, 96)), const(torch.randn(96, 50).to(dtype.to_torch()))
    value: Node = convert(gemm(x, w), dtype if round_first else F32)
    if bias is not None:
        value = map_("add", value, convert(const(torch.randn(50).to(bias.to_torch())), value.dtype))
    if fn is not None:
        value = map_(fn, value)
    graph = optimise(Graph("g", (x,), (convert(value, dtype),), ("y",)))
    found = problem_of(graph.outputs[0])
    assert isinstance(found, Problem)
    return found


HAS_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
bf16_only = pytest.mark.skipif(not HAS_BF16, reason="oneDNN packs no bf16 for this processor")


@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=bf16_only)], ids=str)
@pytest.mark.parametrize("fn", [*ACTIVATIONS, None])
@pytest.mark.parametrize("with_bias", [True, False])
def test_bias_and_activation_are_the_librarys_and_right(dtype: DType, fn: str | None, with_bias: bool) -> None:
    p = problem(dtype, fn, bias=dtype if with_bias else None)
    post = read_post_ops(p)
    assert (post.bias is not None) == with_bias
    assert (post.attr, post.algorithm) == (ACTIVATIONS[fn] if fn is not None else ("none", ""))
    assert refusal(CANDIDATE, p, cpu()) is None
    sources = random_sources(p)
    expected = expect(p, sources)
    weights = {i: t for i, t in enumerate(sources) if p.weights[i]}
    for schedule in plan_for(CANDIDATE, p, cpu()).schedules():
        run = plan_for(CANDIDATE, p, cpu()).build(schedule).prepare(weights)
        assert check(p, expected, run(sources)) is None, schedule


def test_a_bias_finer_than_the_operands_is_not_rounded_to_them() -> None:
    post = read_post_ops(problem(BF16, None, bias=F32))
    assert post.bias is None


@bf16_only
def test_an_activation_of_a_rounded_product_is_not_moved_before_the_rounding() -> None:
    p = problem(BF16, "gelu", round_first=True)
    post = read_post_ops(p)
    assert post.attr == "none" or post.done.dtype is BF16
    sources = random_sources(p)
    weights = {i: t for i, t in enumerate(sources) if p.weights[i]}
    for schedule in plan_for(CANDIDATE, p, cpu()).schedules():
        run = plan_for(CANDIDATE, p, cpu()).build(schedule).prepare(weights)
        assert check(p, expect(p, sources), run(sources)) is None


def test_several_stores_are_left_alone() -> None:
    torch.manual_seed(0)
    x = input_("x", F32, (8, 16))
    parts = [map_("relu", gemm(x, const(torch.randn(16, 4)))) for _ in range(2)]
    graph = optimise(Graph("g", (x,), tuple(parts), ("a", "b")))
    p = problem_of(graph.outputs[0].src[0])
    assert isinstance(p, Problem)
    assert len(p.op.stores) == 2
    assert read_post_ops(p).attr == "none"
