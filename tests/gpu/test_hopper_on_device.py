"""Hopper gemms on a device: random gemms, odd sizes, every type and store, built, verified in poisoned and guarded memory."""

import random

import pytest
import torch
from on_device import assert_follows_its_stream, assert_right, assert_the_same_every_time, device, drawn

from tilewright.candidates.triton.hopper.gemm.candidate import CANDIDATE
from tilewright.ir.notation import parse
from tilewright.schedule.candidate import plan_for
from tilewright.schedule.problem import problem_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper device"
    ),
]

COUNT = 100
LINES = [
    "s8[16,256,192] @ s8[16,128,192]^T -> s8",
    "s8[3,200,144] @ s8[3,96,144]^T -> s8",
    "u8[140,640] zero_point @ s8[640,48] scale=channel -> s8 scale=tensor",
    "u8[300,704] @ u8[310,704]^T -> s32",
    "s8[300,256] @ u8[96,256]^T -> s8 saturate",
    "bf16[130,96] @ bf16[96,72] + bias, gelu -> bf16",
    "bf16[130,96]^T @ bf16[130,72] + bias, gelu_tanh -> bf16",
    "f16[7,130,96] @ f16[96,72] + bias, silu -> f16",
    "bf16[3,5,6400] @ bf16[3,6400,176] -> f32",
    "bf16[512,1024] @ bf16[1024,1000] + bias + residual, relu -> bf16",
    "f8e4m3fn[640,1280] scale=channel @ f8e4m3fn[1280,640] scale=channel -> bf16",
    "f8e4m3fn[65,1280] @ f8e5m2[960,1280]^T -> f8e4m3fn scale=tensor",
    "f8e5m2[64,1280] @ f8e5m2[960,1280]^T, tanh -> f8e5m2 scale=tensor",
    "f8e4m3fn[250,640] block=1x128 @ f8e4m3fn[300,640]^T block=128x128 -> bf16",
    "f8e4m3fn[130,1000] block=1x128 @ f8e5m2[1000,256] block=128x128 + bias -> f32",
    "f8e4m3fn[130,512] block=1x128 @ f8e4m3fn[256,512]^T block=128x128 + residual:bf16 -> bf16",
    "bf16[1024,5120] @ bf16[1280,5120]^T -> bf16",
]


def test_random_gemms_are_right():
    problems = drawn(CANDIDATE, COUNT, 11, 5 * COUNT)
    assert_right(
        CANDIDATE,
        [(p, random.Random(i).choice(list(plan_for(CANDIDATE, p, device()).schedules()))) for i, p in enumerate(problems)],
    )


def test_every_type_is_right_at_points_of_every_kind():
    problems = [problem_of(parse(line).outputs[0]) for line in LINES]
    cases = []
    for problem in problems:
        kinds = {}
        for s in plan_for(CANDIDATE, problem, device()).schedules():
            kind = s["deferred_store"], s["multicast"], s["stream_k"] > 0, s["split_k"], s["tile_n"] in (64, 128, 256)
            kinds.setdefault(kind, s)
        cases += [(problem, s) for s in kinds.values()]
    assert_right(CANDIDATE, cases)


def test_a_weight_packed_for_wide_stores_gives_the_same():
    from dataclasses import replace

    problem = problem_of(parse("s8[300,512] @ s8[512,256] -> s8").outputs[0])
    constant = replace(problem, weights=(False, True))
    schedule = next(s for s in plan_for(CANDIDATE, constant, device()).schedules() if s["vector_store"])
    a, b = (torch.randint(-128, 128, t.shape, dtype=torch.int8, device="cuda") for t in problem.types)
    run = plan_for(CANDIDATE, constant, device()).build(schedule).prepare({1: b})
    assert torch.equal(run([a, b])[0], (a.double() @ b.double()).long().to(torch.int8))


@pytest.mark.parametrize(
    ("line", "knob", "none"),
    [
        ("bf16[256,8192] @ bf16[8192,512] -> f32", "stream_k", 0),
        ("bf16[128,4096] @ bf16[4096,4096]^T -> bf16", "split_k", 1),
    ],
)
def test_parts_of_k_are_added_up_in_the_same_order_on_every_run(line, knob, none):
    problem = problem_of(parse(line).outputs[0])
    schedule = next(s for s in plan_for(CANDIDATE, problem, device()).schedules() if s[knob] > none)
    assert_the_same_every_time(CANDIDATE, problem, schedule)


def test_a_kernel_runs_on_the_current_stream_and_in_a_graph():
    problem = problem_of(parse("bf16[256,512] @ bf16[512,128] + bias -> bf16").outputs[0])
    assert_follows_its_stream(CANDIDATE, problem, next(iter(plan_for(CANDIDATE, problem, device()).schedules())))
