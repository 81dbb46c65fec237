"""Kernels for Hopper with no GPU: every kind of point on small matrices in the machine that runs PTX, copies and products late,
warps in a random order."""

import random
from dataclasses import replace

import pytest
from tests.candidates.llvm.test_emulated_kernels import problem, wrong
from tests.candidates.triton.hopper.test_attention import coded
from w4_problems import posed

from tilewright.dtype import BF16, F16
from tilewright.ir.build import input_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Attention
from tilewright.schedule.problem import problem_of

pytest.importorskip("triton")

from ptx import H200

from tilewright.candidates.triton.attention import candidate as attention
from tilewright.candidates.triton.gemm import candidate as gemm
from tilewright.candidates.triton.hopper.attention import candidate as hopper_attention
from tilewright.candidates.triton.hopper.gemm import candidate as hopper
from tilewright.candidates.triton.hopper.gemm import plan as hopper_plan
from tilewright.candidates.triton.hopper.gemm.space import tile_configs
from tilewright.candidates.triton.hopper.w4 import candidate as hopper_w4
from tilewright.schedule.candidate import Schedule, plan_for, refusal

pytestmark = pytest.mark.conformance

LINES = [
    "s8[2,200,144] @ s8[2,96,144]^T -> s8",
    "u8[140,300] zero_point @ s8[300,48] scale=channel -> s8 scale=tensor",
    "u8[150,256] @ u8[80,256]^T -> s32",
    "bf16[130,96] @ bf16[96,72] + bias, gelu -> bf16",
    "bf16[130,96]^T @ bf16[130,72] + bias, gelu_tanh -> bf16",
    "f16[3,130,96] @ f16[96,72] + bias, silu -> f16",
    "bf16[2,5,640] @ bf16[2,640,176] -> f32",
    "bf16[200,320] @ bf16[320,250] + bias + residual, relu -> bf16",
    "f8e4m3fn[140,640] scale=channel @ f8e4m3fn[640,320] scale=channel -> bf16",
    "f8e4m3fn[65,512] @ f8e5m2[320,512]^T -> f8e4m3fn scale=tensor",
    "f8e4m3fn[150,512] block=1x128 @ f8e4m3fn[300,512]^T block=128x128 -> bf16",
    "f8e4m3fn[130,500] block=1x128 @ f8e5m2[500,256] block=128x128 + bias -> f32",
    "bf16[512,256] @ bf16[520,256]^T -> bf16",
    "s8[600,256] @ s8[520,256]^T -> s8",
]
SPLIT = [
    "bf16[100,1024] @ bf16[1024,256] + bias, gelu_tanh -> bf16",
    "s8[64,2048] scale=tensor @ s8[136,2048]^T scale=channel -> s8 scale=tensor",
]
W4 = [
    "~f16[1,512] @ s4[300,512]^T group=64 -> f16",
    "~f16[16,1024] @ u4[640,1024]^T group=32 zero_point + bias -> f16",
    "bf16[33,512] @ s4[512,504] group=64 * residual -> bf16",
    "f16[3,512] @ s8[256,512]^T scale=channel -> f16",
    "s8[12,512] scale=channel @ s4[200,512]^T group=64 -> f16",
    "f16[100,256] @ u4[200,256]^T group=32 zero_point + bias, silu -> f16",
    "s8[100,256] scale=channel @ s4[136,256]^T group=64 -> f16",
    "f8e4m3fn[70,192] scale=tensor @ u4[200,192]^T group=64 zero_point -> bf16",
]
PLAIN = [
    "s8[3,100,96] @ s8[3,64,96]^T -> s8",
    "bf16[65,200] @ bf16[200,72] + bias, gelu -> bf16",
    "f32[33,65] @ f32[65,17] + residual",
    "f16[40,256] @ s4[72,256]^T group=64 -> f16",
    "f8e5m2[64,320] @ f8e5m2[96,320]^T -> f8e5m2 scale=tensor",
]


def assert_right(candidate, p, schedules, target):
    assert schedules
    for number, schedule in enumerate(schedules):
        how = {"late": True, "seed": number, "fenced_copies": candidate not in (gemm.CANDIDATE, attention.CANDIDATE)}
        assert wrong(candidate, p, schedule, target, **how) is None, schedule


def kinds(p, target, of):
    """The first of each kind among the Hopper kernel's points."""
    found = {}
    for point in tile_configs(hopper_plan.plan_of(p, target)):
        found.setdefault(of(point), point)
    return [Schedule.of_point(point) for point in found.values()]


@pytest.mark.parametrize("line", LINES)
def test_every_kind_of_point_is_right(line):
    p, target = problem(line), replace(H200, cores=4)

    def kind(point):
        loops = point.deferred_store, point.multicast, point.pingpong, point.vector_store, point.stream_k > 0
        return *loops, point.tile_n in (64, 128, 256)

    assert_right(hopper.CANDIDATE, p, kinds(p, target, kind), target)


@pytest.mark.parametrize("line", SPLIT)
def test_clusters_that_share_k_are_right(line):
    p, target = problem(line), replace(H200, cores=16)
    schedules = [s for s in kinds(p, target, lambda point: point.split_k) if s["split_k"] > 1]
    assert_right(hopper.CANDIDATE, p, schedules, target)


@pytest.mark.parametrize("line", W4)
def test_weights_of_few_bits_are_right(line):
    p, found = posed(line), {}
    for s in plan_for(hopper_w4.CANDIDATE, p, H200).schedules():
        names = ("wgmma", "cluster", "tile_m", "tile_n", "in_flight", "unroll", "k_chunks")
        found.setdefault(tuple(v for k, v in s.knobs if k in names), s)
    assert_right(hopper_w4.CANDIDATE, p, list(found.values())[:4], H200)


@pytest.mark.parametrize("line", PLAIN)
def test_plain_triton_is_right(line):
    p = problem(line)
    schedules = list(plan_for(gemm.CANDIDATE, p, H200).schedules())[:40]
    assert_right(gemm.CANDIDATE, p, [schedules[0], random.Random(0).choice(schedules)], H200)


def attend(batch, heads, queries, keys, depth, dtype=F16, causal="no"):
    src = [input_(n, dtype, (batch, heads, t, depth)) for n, t in (("q", queries), ("k", keys), ("v", keys))]
    return problem_of(Node(Attention(0.125, causal), *src))


@pytest.mark.parametrize(
    "p",
    [
        attend(1, 2, 64, 128, 64),
        attend(1, 2, 100, 100, 64, BF16, "lower"),
        attend(1, 1, 200, 700, 128),
        coded(tokens=128, batch=1, heads=3),
    ],
    ids=["a tile", "causal", "many keys", "codes"],
)
@pytest.mark.parametrize("candidate", [hopper_attention.CANDIDATE, attention.CANDIDATE], ids=["hopper", "plain"])
def test_attention_is_right(p, candidate):
    target = replace(H200, cores=4)
    assert refusal(candidate, p, target) is None
    assert_right(candidate, p, list(plan_for(candidate, p, target).schedules())[:4], target)
