"""Generated plain Triton gemms in the interpreter, on random gemms and at every place where extents end: run by
tests/candidates/triton/test_interpreted.py, which sets TRITON_INTERPRET=1."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from computed_problems import problem
from gated import CASES, of_ranges
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from random_anchors import gemms
from triton_map import in_memory, scalars

from tilewright.candidates.triton.gemm import candidate as triton_gemm
from tilewright.candidates.triton.gemm.kernel import TileConfig, write
from tilewright.candidates.triton.runtime.module import module
from tilewright.compiler import optimise
from tilewright.dtype import BF16, F16, F32, S8, S32
from tilewright.hardware.chips.nvidia_a100 import CHIP as A100
from tilewright.hardware.chips.nvidia_h100 import CHIP as H100
from tilewright.hardware.target import Target
from tilewright.ir.build import broadcast, const, convert, input_, map_, reshape
from tilewright.ir.graph import Graph, Node
from tilewright.ir.notation import parse
from tilewright.ir.ops import Acc, Gemm, Param, Reduce, gemm
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import plan_for, refusal
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import Problem, problem_of
from tilewright.schedule.sample import random_sources

TARGETS = {c.name: Target(c.name, c, "cuda", c.sms, features=c.requires) for c in (A100, H100)}
POINTS = [
    TileConfig(32, 64, 64, 4, 2),
    TileConfig(64, 32, 32, 4, 3, split_k=2),
    TileConfig(16, 64, 64, 4, 2, split_k=4, group_m=2),
    TileConfig(16, 128, 64, 4, 2, swap_ab=True),
    TileConfig(64, 32, 32, 4, 2, split_k=2, swap_ab=True),
]


def run(problem: Problem, sources, point, target, weights=()):
    """The problem's results by one kernel, computed in poisoned memory."""
    plan = plan_for(triton_gemm.CANDIDATE, problem, target)
    spec = replace(plan.spec, point=point)
    outside = triton_gemm.operands_outside(plan.outside, spec.rhs, {i: sources[i] for i in weights})
    results = [torch.full(t.shape, 77).to(t.dtype.to_torch()) for t in problem.outputs]
    given = [in_memory(outside[i] if i in outside else sources[i]) for i in spec.sources]
    given += [in_memory(t) for t in results]
    kind = torch.float32 if problem.acc.dtype is F32 else torch.int32
    workspace = {name: torch.full((size,), 1 << 20, dtype=torch.int32) for name, size in spec.workspace.items()}
    if "sums" in workspace:
        workspace["sums"] = workspace["sums"].to(kind)
    counters = workspace["counters"].zero_() if workspace else torch.zeros(0)
    given += workspace.values()
    with np.errstate(all="ignore"):
        written = write(spec)
        module(written.text).kernel[(spec.config.tiles * point.split_k,)](*given, *scalars(written.numbers))
    assert not counters.any()
    return results


def assert_right(problem, sources, point, target, weights=()):
    why = check(problem, expect(problem, sources), run(problem, sources, point, target, weights))
    assert why is None, f"{problem} with {point}: {why}"


@seed(20261121)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(gemms(), st.sampled_from(POINTS), st.sampled_from(sorted(TARGETS)))
def test_random_gemms_agree_with_the_oracle(node, point, chip):
    problem, target = problem_of(node), TARGETS[chip]
    why = refusal(triton_gemm.CANDIDATE, problem, target)
    if why is None:
        assert_right(problem, random_sources(problem), point, target)
    else:
        assert why == "an extent is 0" or "Triton" in why or "store" in why or "epilogue" in why or "axes" in why, why


LINES = [
    "u8[17,70] scale=tensor zero_point @ u8[70,31] scale=channel zero_point -> f32",
    "f32[5,1] @ f32[1,7]",
    "f16[33,512] @ s4[40,512]^T group=64 -> f16",
    "f16[16,384] @ u4[384,40] group=128 zero_point, silu -> f16",
    "s8[33,47] @ s8[47,19] * scale + bias, relu -> f16",
    "u8[40,64] zero_point @ s8[64,48] scale=channel -> s8 scale=tensor",
    "s8[17,70] @ u8[70,31] -> s32",
    "u8[17,70] @ u8[70,31] -> s32",
    "u8[17,70] @ u4[31,70]^T -> s32",
    "bf16[1,100] @ s8[37,100]^T scale=channel, silu * residual -> bf16",
    "f16[7,13,96] @ f8e4m3fn[96,72] + bias, relu -> f16",
    "f8e4m3fn[33,100] scale=tensor @ f8e4m3fn[100,64] scale=channel -> bf16",
    "f32[1,65] @ f32[65,1] + residual",
    "bf16[3,5,64]^T @ bf16[3,5,17] -> f32",
]


@pytest.mark.thin(4)
@pytest.mark.parametrize("line", LINES)
def test_a_line_agrees_with_the_oracle(line):
    problem = problem_of(parse(line).outputs[0])
    sources = random_sources(problem)
    for point, target in zip(POINTS[:4], (TARGETS[n] for n in sorted(TARGETS) * 2), strict=True):
        assert_right(problem, sources, point, target)


def test_extreme_codes_and_infinities_are_what_they_are():
    problem = problem_of(parse("s8[20,130] @ s8[130,20] -> s32").outputs[0])
    sources = [torch.full((20, 130), -128, dtype=torch.int8), torch.full((130, 20), -128, dtype=torch.int8)]
    (got,) = run(problem, sources, POINTS[1], TARGETS["nvidia_a100"])
    assert got.eq(130 * 16384).all()
    problem = problem_of(parse("f32[20,40] @ f32[40,20], relu").outputs[0])
    a, b = torch.randn(20, 40), torch.randn(40, 20)
    a[3, 5], a[4, 6], b[7, 8] = float("nan"), float("inf"), float("-inf")
    (got,) = run(problem, [a, b], POINTS[0], TARGETS["nvidia_h100"])
    torch.testing.assert_close(got, torch.relu(a @ b), equal_nan=True)


@pytest.mark.thin(4)
@pytest.mark.parametrize("depth", [256, 320])
def test_an_operand_repeated_along_k_is_as_wide_as_a_step(depth):
    group = 64
    types = TensorType(F16, (32, depth // group)), TensorType(F16, (depth, 32))
    params = [Node(Param(i, t)) for i, t in enumerate(types)]
    lhs = reshape(broadcast(reshape(params[0], (32, depth // group, 1)), (32, depth // group, group)), (32, depth))
    acc = Node(Acc(TensorType(F32, (32, 32))))
    problem = problem_of(
        Node(Gemm(F32, lhs, params[1], (acc,)), *(input_(f"x{i}", t.dtype, t.shape) for i, t in enumerate(types)))
    )
    for point in POINTS[:3]:
        assert_right(problem, random_sources(problem), point, TARGETS["nvidia_h100"])


def test_a_constant_that_lies_badly_is_laid_out_once():
    line = "s8[33,64] @ s8[64,48] * scale -> f16"
    node = parse(line).outputs[0]
    types = tuple(s.tensor for s in node.src)
    problem = Problem(node.op, types, (False, True, *(False for _ in types[2:])))
    assert problem.rhs.dtype is S8
    assert problem.acc.dtype is S32
    plan = plan_for(triton_gemm.CANDIDATE, problem, TARGETS["nvidia_h100"])
    assert list(plan.outside) == [len(types) + 1]
    assert 1 not in plan.spec.sources
    sources = random_sources(problem)
    assert_right(problem, sources, POINTS[1], TARGETS["nvidia_h100"], weights=(1,))
    index = len(types) + 1
    first, again = (triton_gemm.operands_outside(plan.outside, plan.spec.rhs, {1: sources[1]})[index] for _ in range(2))
    assert first is again
    sources[1].neg_()
    assert torch.equal(triton_gemm.operands_outside(plan.outside, plan.spec.rhs, {1: sources[1]})[index], -first)


@pytest.mark.thin(4)
@pytest.mark.parametrize("point", POINTS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_both_halves_of_the_columns_meet_in_a_store(name, point):
    problem = CASES[name]()
    assert_right(problem, random_sources(problem), point, TARGETS["nvidia_h100"], weights=())


@pytest.mark.thin(4)
@pytest.mark.parametrize("point", POINTS, ids=str)
@pytest.mark.parametrize("cuts", [((0, 20), (20, 40)), ((0, 40), (3, 17))], ids=str)
def test_ranges_of_what_both_halves_give_are_written_whole(cuts, point):
    problem = of_ranges(cuts=cuts)
    assert_right(problem, random_sources(problem), point, TARGETS["nvidia_h100"])


COMPUTED = [
    (BF16, "silu", "beta", None),
    (F16, "masked", "masked", "relu"),
    (F32, "by a row", "turned", "by a column"),
    (F32, "exponential", "biases", "turned"),
    (BF16, "narrowed", "a column", None),
    (S8, "bounded", None, "masked"),
]


@pytest.mark.thin(4)
@pytest.mark.parametrize(("d", "name", "side", "right"), COMPUTED, ids=str)
def test_operands_are_computed_while_they_are_loaded(d, name, side, right):
    """A function of zero is not zero: past the ends of K there must be zeros all the same."""
    for (m, k, n), point in zip(((33, 70, 17), (5, 131, 40)), (POINTS[0], POINTS[2]), strict=True):
        p = problem(d, name, m, k, n, side, right)
        assert_right(p, random_sources(p), point, TARGETS["nvidia_h100"])


@pytest.mark.thin(4)
@pytest.mark.parametrize("point", POINTS, ids=str)
@pytest.mark.parametrize("special", [None, float("nan"), -float("inf")], ids=str)
def test_the_largest_magnitude_is_found_beside_the_result(point, special):
    m, k, n = 77, 70, 130
    y = map_("multiply", gemm(input_("a", BF16, (m, k)), input_("b", BF16, (k, n))), const(0.25))
    largest = Node(Reduce("maximum", (0, 1)), map_("abs", y))
    graph = optimise(Graph("g", y.src[0].src, (convert(y, BF16), largest), ("out", "amax")))
    (node,) = (x for x in graph.nodes() if isinstance(x.op, Gemm))
    p = problem_of(node)
    assert len(p.op.stores) == 2
    sources = random_sources(p)
    if special is not None:
        sources[0][-1, -1] = special
    assert_right(p, sources, point, TARGETS["nvidia_h100"])
