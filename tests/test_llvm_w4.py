"""Generated kernels for 4-bit weights: right within the oracle's bounds, and the same at any number of threads."""

import pytest
import torch

from tilewright.candidates.llvm import w4
from tilewright.hardware.detect import detect
from tilewright.ir.notation import parse
from tilewright.schedule.expected import expect
from tilewright.schedule.measure import examine
from tilewright.schedule.problem import Problem, problem_of

CPU = detect("cpu")


def posed(line: str, constant: bool = True) -> Problem:
    """A line's problem, its right operand with scales and zero points constant."""
    (node,) = parse(line).outputs
    problem = problem_of(node)
    count = 3 if "zero_point" in line else 2
    return Problem(problem.op, problem.types, tuple(constant and 1 <= i <= count for i in range(len(problem.types))))


def values(problem: Problem) -> list[torch.Tensor]:
    """Random sources; scales are small and positive."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i, t in enumerate(problem.types):
        if t.dtype.is_integer:
            low, high = (-8, 8) if t.dtype.kind == "int" else (0, 16)
            made.append(torch.randint(low, high, t.shape, dtype=t.dtype.to_torch(), generator=generator))
        else:
            x = torch.randn(t.shape, generator=generator)
            made.append(((x.abs() + 0.1) / 50 if i == 2 else x).to(t.dtype.to_torch()))
    return made


@pytest.mark.parametrize(
    "line",
    [
        "f32[1,64] @ s4[64,64]^T group=64",
        "f32[1,8192] @ u4[200,8192]^T group=128 zero_point",
        "f32[16,8192] @ s4[384,8192]^T group=64",
        "f32[37,1024] @ u4[1024,77] group=32, relu",
        "f16[3,200] @ u4[130,200]^T group=8 zero_point + bias -> f16",
        "bf16[1,256] @ s4[48,256]^T group=64 -> bf16",
        "bf16[16,8192] @ s4[384,8192]^T group=64 -> bf16",
        "bf16[40,2,96] @ u4[33,96]^T group=32 -> bf16",
        "bf16[1,1024] @ u4[100,1024]^T group=64 zero_point -> bf16",
        "bf16[5,112] @ s4[112,17] group=16 + bias -> bf16",
        "bf16[5,120] @ s4[120,17] group=8 -> bf16",
    ],
)
def test_results_are_the_oracles_at_any_number_of_threads(line):
    problem = posed(line)
    assert w4.CANDIDATE.refuse(problem, CPU) is None
    sources = values(problem)
    before = torch.get_num_threads()
    try:
        for schedule in w4.CANDIDATE.schedules(problem, CPU):
            kernel = w4.CANDIDATE.build(problem, schedule, CPU)
            run = kernel.prepare({i: t for i, t in enumerate(sources) if problem.weights[i]})
            assert examine(problem, expect(problem, sources), run, sources) is None
            results = []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                results.append(run(sources)[0].clone())
            assert all(torch.equal(results[0], r) for r in results[1:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("line", "constant", "why"),
    [
        ("f32[4,64] @ s4[64,64]^T group=64", False, "not constant"),
        ("f32[4,64] @ s8[64,64]^T group=64", True, "not 4-bit codes"),
        ("f32[4,60] @ s4[64,60]^T group=60", True, "multiple of 8"),
    ],
)
def test_what_it_does_not_do_it_refuses(line, constant, why):
    assert why in str(w4.CANDIDATE.refuse(posed(line, constant), CPU))
