"""Weights are packed once in a process, whoever multiplies by them and by however many rows."""

import gc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright.candidates.llvm.gemm.candidate as llvm
from tilewright.candidates.llvm.w4 import candidate as w4
from tilewright.hardware.detect import detect
from tilewright.ir.notation import parse
from tilewright.schedule import packed
from tilewright.schedule.candidate import plan_for
from tilewright.schedule.expected import check, expect
from tilewright.schedule.packed import WORDS, all_packed_once, packed_once, sums
from tilewright.schedule.problem import Problem, problem_of
from tilewright.schedule.sample import random_sources

CPU = detect("cpu")
pytestmark = pytest.mark.skipif(llvm.engine.available() is not None, reason="no generated kernels")


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


def test_a_weight_that_lies_where_another_one_lay_is_another_one():
    memory, digests = np.zeros(600, np.float32), {}
    one = torch.from_numpy(memory)
    with packed.unwritten([one], digests):
        first = packed_once([one], "a place", lambda: torch.zeros(1))
    one.share_memory_()  # which moves it
    memory[:] = 1
    other = torch.from_numpy(memory)
    with packed.unwritten([one, other], digests):
        assert packed_once([other], "a place", lambda: torch.ones(1)) is not first
        assert packed_once([one], "a place", lambda: torch.ones(1)) is first
    del one
    with packed.unwritten([other], digests):
        assert len(digests) == 1


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
        kernel = plan_for(llvm.CANDIDATE, problem, CPU).build(next(iter(plan_for(llvm.CANDIDATE, problem, CPU).schedules())))
        runners.append(kernel.prepare({1: sources[1]}))
        assert check(problem, expect(problem, sources, 0.0), runners[-1](sources)) is None
    assert len(packs) == 3 and len({t.data_ptr() for t in packs}) == 1


def test_four_bit_weights_are_packed_once_for_any_number_of_rows(monkeypatch):
    packs = []
    monkeypatch.setattr(w4, "packed_once", lambda s, form, pack: packs.append(packed_once(s, form, pack)) or packs[-1])
    held = []
    for rows in (2, 3):
        (node,) = parse(f"f32[{rows},256] @ u4[96,256]^T group=64 zero_point").outputs
        posed = problem_of(node)
        problem = Problem(posed.op, posed.types, (False, *[True] * (len(posed.types) - 1)))
        sources = random_sources(problem) if not held else [random_sources(problem)[0], *held[0][1:]]
        weights = {i: t for i, t in enumerate(sources) if i}
        schedule = next(iter(plan_for(w4.CANDIDATE, problem, CPU).schedules()))
        run = plan_for(w4.CANDIDATE, problem, CPU).build(schedule).prepare(weights)
        held.append([*sources])
        assert check(problem, expect(problem, sources), run(sources)) is None
    assert packs[0] is packs[1]


def test_several_tensors_are_packed_together_once():
    made = []

    def pack():
        made.append(1)
        return [torch.ones(3), torch.zeros(2)]

    weight = torch.arange(6.0)
    first = all_packed_once([weight], "both", 2, pack)
    again = all_packed_once([weight.clone()], "both", 2, pack)
    assert [id(t) for t in first] == [id(t) for t in again] and len(made) == 1
    del first, again[0]
    gc.collect()
    assert len(all_packed_once([weight], "both", 2, pack)) == 2 and len(made) == 2


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9 * WORDS), st.integers(0, 2**32 - 1), st.integers(0, 7))
def test_sums_tell_single_bits_apart(count, seed, bit):
    """Bytes stand for a GPU's weights; the arithmetic is the same on a CPU."""
    chance = np.random.default_rng(seed)
    flat = torch.from_numpy(chance.integers(0, 256, count, dtype=np.uint8))
    before = sums(flat)
    assert torch.equal(sums(flat.clone()), before) and before.numel() == 16 * -(-count // (4 * WORDS))
    at = int(chance.integers(count))
    flat[at] ^= 1 << bit
    after = sums(flat)
    differ = (after != before).reshape(-1, 16).any(1)
    assert differ.nonzero().reshape(-1).tolist() == [at // (4 * WORDS)]


def test_sums_are_those_of_the_formula():
    flat = torch.randint(0, 256, (4 * WORDS,), dtype=torch.uint8)
    words = [int(x) for x in flat.view(torch.int32).numpy().view(np.uint32)[:2000]]
    flat[8000:] = 0
    keys = packed._keys("cpu").numpy().view(np.uint64)
    expected = [sum(int(k) * x for k, x in zip(row, words, strict=False)) % 2**64 >> 32 for row in keys]
    assert sums(flat).numpy().view(np.uint32).tolist() == expected
