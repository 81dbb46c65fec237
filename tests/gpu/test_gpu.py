"""The same programs on a CUDA device: `pytest -m gpu` there. CI has none."""

import pytest
import torch
from between_ranks import summed

import tilewright
from tilewright.frontends import LoadOptions
from tilewright.ir.evaluate import evaluate
from tilewright.ir.mesh import Mesh
from tilewright.ir.notation import parse
from tilewright.report.measure.inputs import make_feeds
from tilewright.report.measure.verify import verify_program
from tilewright.rules.calibrate import calibrate
from tilewright.schedule.expected import expect_on_mesh
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

LINES = [
    "s8[16,256,192] @ s8[16,128,192]^T -> s8",
    "s8[33,47] @ s8[47,19] * scale + bias, relu -> f16",
    "u8[40,64] zero_point @ s8[64,48] scale=channel -> s8 scale=tensor",
    "f16[16,512] @ s4[96,512]^T group=64 -> f16",
    "f16[16,512] @ u4[512,96] group=128 zero_point, silu * residual -> f16",
    "bf16[130,96] @ bf16[96,72] + bias, gelu -> bf16",
    "f16[7,130,96] @ f16[96,72] + bias, relu -> f16",
    "f32[33,65] @ f32[65,17] + residual",
    "f64[33,65] @ f64[65,17]",
    "f8e4m3fn[64,128] scale=tensor @ f8e4m3fn[128,64] scale=channel -> bf16",
    "f8e4m3fn[64,128] @ f8e5m2[96,128]^T -> f32",
    "f32[0,8] @ f32[8,5] -> f32",
    "f32[4,0] @ f32[0,5] -> f32",
]


@pytest.mark.parametrize("line", LINES)
def test_a_product_on_the_gpu_agrees_with_the_oracle(line: str) -> None:
    graph = parse(line)
    program = tilewright.compile(graph, device="cuda", budget_s=0.1)
    feeds = make_feeds(graph)
    verified = verify_program(program, line, feeds)
    assert verified.verified, verified.first_difference
    assert all(s.decision.kernel.candidate != "reference" for s in program.steps if s.part.kind in ("gemm", "attention"))


def test_a_16_bit_product_with_an_epilogue_stays_on_the_matrix_unit() -> None:
    program = tilewright.compile(parse("bf16[512,512] @ bf16[512,512] + bias, gelu -> bf16"), device="cuda", budget_s=0.2)
    kernel = program.steps[0].decision.kernel
    assert kernel.candidate == "hopper" or "compute=bf16" in str(kernel.schedule)


def test_both_spellings_of_the_xla_thread_are_exact_and_one_graph() -> None:
    programs = [
        tilewright.compile(f"examples/xla_7117_{name}.hlo", device="cuda", budget_s=0.2) for name in ("s8", "s32_convert")
    ]
    a, b = (torch.randint(-128, 128, (16, 1024, 1024), dtype=torch.int8, device="cuda") for _ in range(2))
    want = (a.double() @ b.double().mT).long().to(torch.int8)
    for program in programs:
        got = program(a, b)
        assert got.device.type == "cuda"
        assert torch.equal(got, want)
    assert problem_of(programs[0].graph.outputs[0]) == problem_of(programs[1].graph.outputs[0])


def test_inputs_on_the_host_are_moved_and_a_module_runs() -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.LayerNorm(96), torch.nn.Linear(96, 8)
    ).eval()
    x = torch.randn(5, 64)
    program = tilewright.compile(module, example_inputs=(x,), device="cuda", budget_s=0.2)
    got = program(x)
    assert got.device.type == "cuda"
    want = evaluate(program.source, [x], float64=True)[0]
    torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


def test_an_operator_without_a_node_runs_on_the_host_between_steps_on_the_device() -> None:
    class Sorted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(torch.sort(self.linear(x), dim=-1).values)

    module, x = Sorted().eval(), torch.randn(4, 16)
    program = tilewright.compile(module, example_inputs=(x,), device="cuda", budget_s=0.1)
    with torch.no_grad():
        torch.testing.assert_close(program(x).cpu(), module(x), rtol=1e-4, atol=1e-5)


def test_a_region_that_no_generated_kernel_takes_is_compiled_by_torch() -> None:
    class Centred(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x - x.mean(0, keepdim=True)) - x.mean(1, keepdim=True)

    x = torch.randn(96, 640)
    program = tilewright.compile(Centred().eval(), example_inputs=(x,), device="cuda", budget_s=1.0)
    decisions = [s.decision for s in program.steps if s.decision is not None]
    tried = {d.kernel.candidate for d in decisions} | {r.candidate for d in decisions for r in d.rejected if r.time_us}
    assert "inductor" in tried, decisions
    torch.testing.assert_close(program(x).cpu(), Centred()(x), rtol=1e-4, atol=1e-5)


def test_calibration_on_the_gpu_sees_what_the_cpu_sees() -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.LayerNorm(96), torch.nn.Linear(96, 8)
    ).eval()
    graph = tilewright.load(module, LoadOptions(example_inputs=(torch.randn(33, 64),)))
    batch = {graph.inputs[0].op.label: torch.randn(33, 64)}  # type: ignore[attr-defined]
    here, there = calibrate(graph, [batch]), calibrate(graph, [batch], "cuda")
    for node, seen in here.seen.items():
        assert there.seen[node].largest == pytest.approx(seen.largest, rel=1e-4)
        torch.testing.assert_close(there.seen[node].rows, seen.rows, rtol=1e-4, atol=1e-5)


def test_what_ranks_must_give_is_worked_out_on_the_device():
    problem, mesh = summed("bf16[48,64] @ bf16[96,64]^T -> bf16", 2), Mesh.parse("tp=2")

    def on_cpu(r: int) -> list[torch.Tensor]:
        with torch.device("cpu"):
            return random_sources(problem, seed=r)

    (_, here), (_, there) = (expect_on_mesh(problem, on_cpu, mesh, 1, device) for device in ("cpu", "cuda"))
    first, second = (expect_on_mesh(problem, lambda r: random_sources(problem, seed=r), mesh, 1, "cuda")[0] for _ in range(2))
    assert all(a.device.type == "cuda" and torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(t.device.type == "cuda" for t in there.reference)
    torch.testing.assert_close(here.reference[0], there.reference[0].cpu(), rtol=1e-2, atol=1e-2)  # the sum, before codes
