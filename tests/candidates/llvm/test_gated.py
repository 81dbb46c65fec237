"""Generated CPU gemms whose stores read both halves of the columns together (SwiGLU): right within the oracle's bounds at every
edge, at any of their sizes; and one kernel of a whole MLP."""

import pytest
import torch
from gated import CASES, gated, of_halves
from w4_problems import posed

from tests.candidates.llvm.test_w4 import CPU, built
from tilewright.candidates.llvm.gemm import candidate as gemm
from tilewright.compiler import compile
from tilewright.dtype import BF16, F32, S8, U8
from tilewright.frontends import LoadOptions, load
from tilewright.schedule.candidate import plan_for, refusal
from tilewright.schedule.expected import expect
from tilewright.schedule.measure import examine
from tilewright.schedule.sample import random_sources

MORE = {
    "bf16, one row": lambda: gated(BF16, (1,), 64, 33, side=True),
    "bf16, scales, a residual": lambda: gated(BF16, (3, 23), 200, 97, scaled=True, side=True),
    "u8, a batch": lambda: gated(U8, (7,), 65, 130, batch=(2,)),
    "s8, whole panels": lambda: gated(S8, (26,), 64, 64, S8, function="gelu"),
    "f32, straight from registers": lambda: gated(F32, (70,), 31, 65, function="relu"),
    "f32, several passes": lambda: gated(F32, (9,), 5000, 40),
}


@pytest.mark.parametrize("name", [*CASES, *MORE])
def test_both_halves_of_the_columns_meet_in_a_store(name):
    problem = {**CASES, **MORE}[name]()
    assert refusal(gemm.CANDIDATE, problem, CPU) is None
    sources = random_sources(problem)
    weights = {i: t for i, t in enumerate(sources) if problem.weights[i]}
    points = list(plan_for(gemm.CANDIDATE, problem, CPU).schedules())
    expected = expect(problem, sources)
    for schedule in dict.fromkeys((points[0], points[len(points) // 2], points[-1])):
        run = plan_for(gemm.CANDIDATE, problem, CPU).build(schedule).prepare(weights)
        assert examine(problem, expected, run, sources) is None, schedule


@pytest.mark.parametrize(
    "line",
    [
        "f32[1,256] @ u4[202,256]^T group=128 zero_point",
        "f32[37,1024] @ u4[1024,78] group=32",
        "bf16[16,256] @ s4[130,256]^T group=64",
        "~bf16[17,120] @ s4[120,34] group=8",
        "u8[3,200] scale=channel zero_point @ u4[130,200]^T group=8 zero_point",
        "s8[6,2,264] group=264 @ s4[34,264]^T group=264",
    ],
)
def test_weights_of_4_bits(line):
    problem = of_halves(posed(line), out=BF16)
    sources = random_sources(problem)
    for run in built(problem, sources):
        assert examine(problem, expect(problem, sources), run, sources) is None


def test_a_weight_packed_by_halves_is_not_taken_for_the_same_weight_packed_in_order():
    apart, sources = posed("f32[5,64] @ f32[64,64]"), [torch.randn(5, 64), torch.randn(64, 64)]
    together = of_halves(apart)
    shared = set(plan_for(gemm.CANDIDATE, apart, CPU).schedules()) & set(plan_for(gemm.CANDIDATE, together, CPU).schedules())
    schedule = min(shared, key=str)
    for problem in (apart, together, apart):
        run = plan_for(gemm.CANDIDATE, problem, CPU).build(schedule).prepare({1: sources[1]})
        assert examine(problem, expect(problem, sources), run, sources) is None


class Mlp(torch.nn.Module):
    """Llama's: down(silu(gate(x)) * up(x)) and a residual (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, width, hidden):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_mlp_is_two_generated_gemms_and_nothing_else(dtype):
    torch.manual_seed(0)
    module, x = Mlp(48, 100).to(dtype).eval(), torch.randn(3, 5, 48).to(dtype)
    program = compile(load(module, LoadOptions({}, None, (x,))), budget_s=0)
    assert [(s.part.kind, s.decision.kernel.candidate) for s in program.steps] == [("gemm", "llvm")] * 2
    with torch.no_grad():
        wanted = module.double()(x.double())
    error = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(program(x).double(), wanted, rtol=error, atol=error)
