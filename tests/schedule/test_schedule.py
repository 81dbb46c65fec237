"""A schedule: knobs with their values, dataclasses of knobs, and the record of one that is kept on disk."""

from dataclasses import dataclass
from itertools import islice

import pytest
import torch
from attentions import SHAPES, attention
from between_ranks import between
from fusions import norm
from fusions import problem_of as fusion_of
from w4_problems import posed

from tilewright.dtype import BF16, F16, F32
from tilewright.hardware.chips.nvidia_h200 import CHIP
from tilewright.hardware.detect import cpu
from tilewright.hardware.target import Target
from tilewright.ir.build import broadcast, const, convert, input_, map_, reduce_, swap_last
from tilewright.ir.graph import Node
from tilewright.ir.notation import parse
from tilewright.ir.ops import Acc, AllReduce, Gemm, Param, ReduceScatter, gemm
from tilewright.ir.types import TensorType
from tilewright.schedule.candidate import HasCostModel, Refusal, Schedule, concerns, discover, planned
from tilewright.schedule.key import circumstances
from tilewright.schedule.problem import Problem, problem_of
from tilewright.schedule.record import Record, checked, with_checksum

TARGETS = [cpu(), Target("NVIDIA H200", CHIP, "cuda", 132, features=frozenset({"cuda", "sm_90"}))]
X = input_("x", BF16, (64, 256))


def between_ranks(op):
    """A product in bf16 of which ranks add up the sums."""
    lhs, rhs = TensorType(BF16, (16, 256)), TensorType(BF16, (128, 256))
    sums = Node(op, convert(Node(Acc(TensorType(F32, (16, 128)))), BF16))
    return Problem(Gemm(F32, Node(Param(0, lhs)), swap_last(Node(Param(1, rhs))), (sums,)), (lhs, rhs), (False, True))


PROBLEMS = [
    *(problem_of(parse(line).outputs[0]) for line in (
        "bf16[64,256] @ bf16[256,128] + bias, gelu -> bf16",
        "f32[64,256] @ f32[256,128]",
        "s8[64,256] @ s8[128,256]^T",
        "f8e4m3fn[64,256] @ f8e4m3fn[128,256]^T * scale -> bf16",
    )),
    problem_of(gemm(input_("x", F32, (64, 256)), const(torch.ones(256, 128)))),
    posed("f16[16,512] @ s4[128,512]^T group=64 -> f16"),
    problem_of(attention(SHAPES[3])),
    problem_of(attention((1, 2, 1, 128, 128, 64, 64), F16)),
    fusion_of(norm(X), map_("tanh", X)),
    fusion_of(map_("add", *(broadcast(reduce_("add", X, [axis], keepdims=True), X.shape) for axis in (0, 1)))),
    fusion_of(Node(AllReduce(("tp",), (2,), "add"), X)),
    *(between_ranks(op) for op in (AllReduce(("tp",), (2,)), ReduceScatter(("tp",), (2,), axis=0))),
    *(between("bf16[512,256] @ bf16[256,256]^T -> bf16", 2, op) for op in ("gather", "scatter", "reduce")),
]  # fmt: skip
POINTS = 50


@dataclass(frozen=True)
class Sizes:
    tile: int
    wide: bool
    kind: str | None = None


def test_a_dataclass_of_knobs_and_its_schedule_name_one_another():
    schedule = Schedule.of_point(Sizes(3, wide=True), bits=14)
    assert schedule == Schedule.of(tile=3, wide=True, bits=14)
    assert schedule.point(Sizes) == Sizes(3, wide=True)
    assert Schedule.of_point(Sizes(3, False, "ring")).point(Sizes) == Sizes(3, False, "ring")


def read_back(schedule, target):
    key = circumstances(target, excess_precision=False)
    record = Record("a candidate", schedule.knobs, 1.0, (), key=key, problem="a problem", made_s=0.0)
    found = checked(with_checksum(record), key.digest(), Record)
    assert found is not None
    return Schedule(found.knobs)


@pytest.mark.parametrize("candidate", discover(), ids=lambda c: c.name)
def test_a_schedule_read_back_from_its_record_is_the_same_kernel(candidate, monkeypatch):
    """Knobs keep their values and types (1 and True are equal, and other sizes), so the configuration is the same one."""
    configs = []
    point = Schedule.point
    monkeypatch.setattr(Schedule, "point", lambda self, kind: configs.append(point(self, kind)) or configs[-1])
    met = 0
    for problem, target in ((p, t) for p in PROBLEMS for t in TARGETS if concerns(candidate, p, t)):
        plan = planned(candidate, problem, target)
        for schedule in islice(() if isinstance(plan, Refusal) else plan.schedules(), POINTS):
            again = read_back(schedule, target)
            assert again == schedule and repr(again) == repr(schedule)
            if isinstance(plan, HasCostModel):
                seen = []
                for one in (schedule, again):
                    configs.clear()
                    plan.work(one)
                    seen.append(repr(configs))
                assert seen[0] == seen[1]
            met += 1
    assert met, "no problem here for it"
