"""A candidate of a function that multiplies matrices: what it takes, what it gives, and how it refuses."""

import pytest
import torch

from tilewright.candidates.library import candidate_of_call
from tilewright.hardware.detect import detect
from tilewright.ir.notation import parse
from tilewright.schedule.bench import Bench
from tilewright.schedule.candidate import Schedule
from tilewright.schedule.problem import problem_of


def multiply(a, b, halves):
    product = torch.matmul(a.float(), b.float())
    return product if halves else product + 1


CANDIDATE = candidate_of_call("multiplying", multiply, [{"halves": True}, {"halves": False}], {"cpu"})


def posed(text):
    return problem_of(parse(text).outputs[0])


def test_its_points_are_built_and_verified():
    problem = posed("bf16[7,13] @ bf16[13,5] + bias, relu -> bf16")
    target = detect("cpu")
    schedules = CANDIDATE.plan(problem, target).schedules()
    assert schedules == [Schedule.of(halves=True), Schedule.of(halves=False)]
    right, wrong = (Bench(problem, target, {}).attempt(0, CANDIDATE, s).fault for s in schedules)
    assert right is None
    assert wrong.kind == "wrong"


@pytest.mark.parametrize(
    "text", ["f32[7,13] @ bf16[13,5]", "s8[7,13] @ s8[13,5] -> s32", "f32[2,7,13] @ f32[2,13,5]", "f64[7,13] @ f64[13,5]"]
)
def test_other_problems_are_refused_with_a_sentence(text):
    found = CANDIDATE.plan(posed(text), detect("cpu"))
    assert found.why.startswith("it multiplies two matrices of one type (f32, f16, bf16) into f32, not ")
