"""Weights are packed once in a process, whoever multiplies by them and by however many rows."""

import gc

import pytest
import torch

import tilewright.candidates.llvm.gemm as llvm
from tilewright.hardware.detect import detect
from tilewright.ir.notation import parse
from tilewright.schedule.expected import check, expect
from tilewright.schedule.packed import packed_once
from tilewright.schedule.problem import Problem, problem_of
from tilewright.schedule.sample import random_sources

CPU = detect("cpu")
pytestmark = pytest.mark.skipif(llvm.engine.available() is not None, reason="no OpenMP")


def test_the_same_bits_are_packed_once_while_somebody_holds_them():
    made = []

    def pack():
        made.append(1)
        return torch.ones(3)

    weight = torch.arange(6.0)
    first = packed_once([weight], "a form", pack)
    assert packed_once([weight.clone()], "a form", pack) is first  # another copy of the same weights
    assert len(made) == 1
    assert packed_once([weight], "another form", pack) is not first
    assert packed_once([weight.reshape(2, 3)], "a form", pack) is not first
    assert packed_once([weight.view(torch.int32)], "a form", pack) is not first
    weight.data[3] = 7  # unseen by torch's own count of writes
    assert packed_once([weight], "a form", pack) is not first
    weight.data[3] = 3
    assert packed_once([weight], "a form", pack) is first
    count = len(made)
    del first
    gc.collect()
    packed_once([weight], "a form", pack)
    assert len(made) == count + 1


@pytest.mark.parametrize("text", ["f32[{},96] @ f32[96,250] + bias, gelu", "s8[{},96] @ s8[96,250] -> s8"])
def test_rows_of_any_number_share_a_packing(text, monkeypatch):
    packs = []
    monkeypatch.setattr(llvm, "packed_once", lambda s, form, pack: packs.append(packed_once(s, form, pack)) or packs[-1])
    weight = None
    runners = []
    for rows in (64, 100, 3000):
        problem = problem_of(parse(text.format(rows)).outputs[0])
        assert isinstance(problem, Problem)
        problem = Problem(problem.op, problem.types, tuple(i == 1 for i in range(len(problem.types))))
        sources = random_sources(problem)
        weight = sources[1] if weight is None else weight
        sources[1] = weight.clone()
        kernel = llvm.CANDIDATE.build(problem, next(iter(llvm.CANDIDATE.schedules(problem, CPU))), CPU)
        runners.append(kernel.prepare({1: sources[1]}))
        assert check(problem, expect(problem, sources, 0.0), runners[-1](sources)) is None
    assert len(packs) == 3 and len({t.data_ptr() for t in packs}) == 1
