"""Plain Triton gemms on a CUDA device: random gemms and every type, built, verified in poisoned and guarded memory."""

import random

import pytest
import torch
from on_device import assert_follows_its_stream, assert_right, assert_the_same_every_time, device, drawn

from tilewright.candidates.triton.gemm.candidate import CANDIDATE
from tilewright.ir.notation import parse
from tilewright.schedule.candidate import plan_for
from tilewright.schedule.problem import problem_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

COUNT = 120
LINES = [
    "s8[16,256,192] @ s8[16,128,192]^T -> s8",
    "u8[140,640] zero_point @ s8[640,48] scale=channel -> s8 scale=tensor",
    "u8[17,700] @ u8[700,310] -> s32",
    "bf16[1,4096] @ s8[1024,4096]^T scale=channel, silu * residual -> bf16",
    "bf16[130,96] @ bf16[96,72] + bias, gelu -> bf16",
    "f16[7,130,96] @ f16[96,72] + bias, relu -> f16",
    "f16[7,130,96] @ f8e4m3fn[96,72] + bias, tanh -> f16",
    "f32[333,650] @ f32[650,170] + residual",
    "f16[300,512] @ s4[200,512]^T group=128 -> f16",
    "f16[16,384] @ u4[384,40] group=64 zero_point, silu -> f16",
    "f8e4m3fn[640,1280] scale=tensor @ f8e4m3fn[1280,640] scale=channel -> bf16",
    "f8e4m3fn[64,1280] @ f8e5m2[960,1280]^T -> f8e4m3fn scale=tensor",
    "f8e5m2[64,1280] @ f8e5m2[960,1280]^T -> f8e5m2 scale=tensor",
    "bf16[3,5,6400]^T @ bf16[3,5,170] -> f32",
]


def point(problem, i):
    """One of the first points of the space, another for each problem."""
    points = list(plan_for(CANDIDATE, problem, device()).schedules())
    return random.Random(i).choice(points[:40])


def test_random_gemms_are_right():
    problems = drawn(CANDIDATE, COUNT, 7, 3 * COUNT)
    assert_right(CANDIDATE, [(p, point(p, i)) for i, p in enumerate(problems)])


def test_every_type_is_right_at_the_first_points_of_its_space():
    problems = [problem_of(parse(line).outputs[0]) for line in LINES]
    cases = [(p, s) for p in problems for s in list(plan_for(CANDIDATE, p, device()).schedules())[:3]]
    assert_right(CANDIDATE, cases)


def test_parts_of_k_are_added_up_in_the_same_order_on_every_run():
    problem = problem_of(parse("bf16[64,8192] @ bf16[8192,256] -> f32").outputs[0])
    schedule = next(s for s in plan_for(CANDIDATE, problem, device()).schedules() if s["split_k"] == 8)
    assert_the_same_every_time(CANDIDATE, problem, schedule)


def test_a_kernel_runs_on_the_current_stream_and_in_a_graph():
    problem = problem_of(parse("f16[256,512] @ f16[512,128] + bias -> f16").outputs[0])
    assert_follows_its_stream(
        CANDIDATE, problem, next(s for s in plan_for(CANDIDATE, problem, device()).schedules() if s["split_k"] > 1)
    )
