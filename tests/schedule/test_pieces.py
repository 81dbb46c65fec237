"""Large results are judged a piece at a time: the same verdict, in little memory."""

import subprocess
import sys

import pytest
import torch

from tilewright.ir.notation import parse
from tilewright.schedule import expected as judge
from tilewright.schedule import intervals
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources

LINES = [
    "f32[70,33] @ f32[33,50] + bias, gelu -> bf16",
    "f32[2,3,7,33] @ f32[3,33,50] * row + residual -> f32",
    "s8[70,33] @ s8[33,50] * scale + bias -> s8 scale=column",
    "bf16[5,1,64] @ bf16[64,40], f8e4m3fn",
    "f64[30,20] @ f64[20,10]",
    "s8[70,33] @ s8[33,50] -> s8",
]


def small(monkeypatch, elements=64):
    monkeypatch.setattr(intervals, "PIECE", elements)


@pytest.mark.parametrize("text", LINES)
def test_pieces_give_the_interval_of_the_whole(text, monkeypatch):
    problem = problem_of(parse(text).outputs[0])
    sources = random_sources(problem)
    whole = judge.expect(problem, sources)
    small(monkeypatch)
    cut = judge.expect(problem, sources)
    assert cut.exact == whole.exact
    for name in ("reference", "low", "high", "width"):
        for a, b in zip(getattr(cut, name), getattr(whole, name), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-6, atol=0, equal_nan=True)
    assert judge.check(problem, cut, whole.reference) is None


@pytest.mark.parametrize("place", [(0, 0), (17, 49), (69, 3)])
def test_a_wrong_element_is_found_in_its_piece(place, monkeypatch):
    small(monkeypatch)
    problem = problem_of(parse(LINES[0]).outputs[0])
    expected = judge.expect(problem, random_sources(problem))
    wrong = expected.reference[0].clone()
    wrong[place] += 100
    wrong[69, 49] += 100
    assert f"2 of 3500 elements differ, first at {list(place)}" in str(judge.check(problem, expected, [wrong]))


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (1, 100), (3, 5, 7, 2), (2, 65), (65, 2)])
def test_pieces_cover_a_shape_once_in_order(shape, monkeypatch):
    small(monkeypatch, 8)
    t = torch.arange(torch.tensor(shape).prod().int().item() if shape else 1).reshape(shape)
    parts = [t[i].reshape(-1) for i in intervals.pieces(shape, intervals.most_at_once(t))]
    assert all(p.numel() <= 8 for p in parts)
    assert torch.equal(torch.cat(parts), t.reshape(-1))


def test_judging_takes_a_few_times_the_result():
    """The reference, two ends and a width are kept; what they are worked out from is not."""
    code = """if True:
        import resource
        from tilewright.ir.notation import parse
        from tilewright.schedule.expected import check, expect
        from tilewright.schedule.problem import problem_of
        from tilewright.schedule.sample import random_sources
        problem = problem_of(parse("f32[2048,16] @ f32[16,4096] + bias, relu -> f32").outputs[0])
        sources = random_sources(problem)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        expected = expect(problem, sources)
        assert check(problem, expected, expected.reference) is None
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(grown * 1024 / (2048 * 4096 * 4))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 17, "times the bytes of the result"


def test_pieces_are_larger_where_launching_an_operation_takes_longer_than_a_million_elements():
    here, there = torch.empty(3), torch.empty(3, device="meta")
    assert intervals.most_at_once(here, here) == intervals.PIECE
    assert intervals.most_at_once(here, there) == intervals.ON_GPU * intervals.PIECE
