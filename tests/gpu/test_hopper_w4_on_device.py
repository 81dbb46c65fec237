"""Gemms with weights of few bits on a device: every kind of code, scale and store, at several points, and again and again."""

import pytest
import torch
from gated import of_halves
from on_device import assert_right, device
from w4_problems import posed

from tilewright.candidates.triton.hopper.w4.candidate import CANDIDATE
from tilewright.dtype import F16
from tilewright.schedule.candidate import plan_for, refusal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper device"
    ),
]

LINES = [
    "~f16[1,8192] @ s4[3584,8192]^T group=64 -> f16",
    "~f16[16,8192] @ s4[3584,8192]^T group=64 -> f16",
    "f16[16,8192] @ s4[3584,8192]^T group=64 -> f16",
    "~f16[40,4096] @ s4[1024,4096]^T group=128 -> f16",
    "f16[64,4096] @ u4[1024,4096]^T group=32 zero_point -> f16",
    "~bf16[7,4096] @ u4[1000,4096]^T group=128 zero_point + bias, silu -> bf16",
    "bf16[33,1024] @ s4[1024,1016] group=64 * residual -> bf16",
    "~f16[2,5,11008] @ s4[300,11008]^T group=64 -> f32",
    "f16[3,1024] @ s8[1024,1024]^T scale=channel -> f16",
    "bf16[20,1024] @ s8[1024,1024]^T group=64 + bias, gelu -> bf16",
    "~f16[16,4096] @ s4[20000,4096]^T group=64 -> f16",
    "f16[300,4096] @ s4[1000,4096]^T group=64 -> f16",
    "bf16[200,1024] @ u4[520,1024]^T group=32 zero_point + bias, silu -> bf16",
    "f16[1000,2048] @ u4[2048,640] group=128 * residual -> f16",
    "bf16[2,64,1024] @ s4[768,1024]^T group=1024 -> bf16",
    "f16[9,1024] @ u8[1024,1024]^T group=128 zero_point -> f8e4m3fn scale=tensor",
    "f16[2,2048] @ s4[11008,2048]^T group=64 -> f16",
    "s8[1,4096] scale=channel @ s4[4096,4096]^T group=64 -> f16",
    "f8e4m3fn[16,8192] scale=tensor @ u4[1000,8192]^T group=32 zero_point -> bf16",
    "f8e5m2[33,1024] scale=channel @ s4[1024,1016] group=128 + bias -> f16",
    "u8[60,2048] scale=channel @ s8[640,2048]^T group=64 -> f16",
    "s8[5,4096] @ s4[520,4096]^T -> s32",
    "s8[16,4096] scale=channel @ s4[4096,4096]^T scale=channel -> f16",
    "s8[300,4096] scale=channel @ s4[1000,4096]^T group=128 -> f16",
    "f8e4m3fn[1000,2048] scale=channel @ u4[2048,640] group=64 zero_point * residual -> bf16",
    "u8[200,1088] scale=tensor @ u4[520,1088]^T group=32 zero_point + bias, silu -> bf16",
    "f8e5m2[130,1024] @ s4[768,1024]^T group=1024 -> f16",
    "s8[260,1024] scale=channel @ s8[640,1024]^T group=128 -> f16",
]
GATED = [
    "~f16[1,4096] @ s4[28672,4096]^T group=64 -> f32",
    "~bf16[16,4096] @ u4[2000,4096]^T group=128 zero_point -> f32",
    "f16[33,2048] @ s8[2048,600] scale=channel -> f32",
    "s8[8,4096] scale=channel @ s4[1048,4096]^T group=64 -> f32",
]


def test_every_kind_is_right_at_several_points():
    cases = []
    for problem in [*map(posed, LINES), *(of_halves(posed(line), out=F16) for line in GATED)]:
        assert refusal(CANDIDATE, problem, device()) is None, problem
        kinds, told = {}, ("wgmma", "clusters", "cluster", "tile_m", "stream_k", "multicast")
        for s in plan_for(CANDIDATE, problem, device()).schedules():
            kinds.setdefault(tuple(v for k, v in s.knobs if k in told), s)
        cases += [(problem, s) for s in list(kinds.values())[:3]]
    assert_right(CANDIDATE, cases)


@pytest.mark.parametrize("rows", [1, 16, 48])
def test_a_result_is_the_same_on_every_run_alone_and_in_a_chain(rows):
    problem = posed(f"~f16[{rows},8192] @ s4[3584,8192]^T group=64 -> f16")
    schedule = next(iter(plan_for(CANDIDATE, problem, device()).schedules()))
    codes = torch.randint(-8, 8, (3584, 8192), device="cuda").to(torch.int8)
    scales = (torch.rand(3584, 128, device="cuda") * 0.02 + 0.01).half()
    x = torch.randn(rows, 8192, device="cuda").half()
    run = plan_for(CANDIDATE, problem, device()).build(schedule).prepare({1: codes, 2: scales})
    want = x.double() @ (codes.view(3584, 128, 64) * scales.double()[:, :, None]).view(3584, 8192).T
    (first,) = run([x, codes, scales])
    assert (first.double() - want).norm() / want.norm() < 3e-4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [run([x, codes, scales])[0] for _ in range(20)]
    for _ in range(5):
        for r in results:
            r.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(r, first) for r in results)


def test_a_chain_of_products_waits_for_what_it_reads():
    problem = posed("~f16[16,4096] @ s4[4096,4096]^T group=64 -> f16")
    schedule = next(iter(plan_for(CANDIDATE, problem, device()).schedules()))
    codes = torch.randint(-8, 8, (4096, 4096), device="cuda").to(torch.int8)
    scales = torch.full((4096, 64), 0.0035, device="cuda").half()
    run = plan_for(CANDIDATE, problem, device()).build(schedule).prepare({1: codes, 2: scales})
    x = torch.randn(16, 4096, device="cuda").half()
    alone = x
    for _ in range(6):
        (alone,) = run([alone, codes, scales])
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chained = x
        for _ in range(6):
            (chained,) = run([chained, codes, scales])
    for _ in range(10):
        graph.replay()
        assert torch.equal(chained, alone)
