"""Generated attention against the oracle: masks, causality, grouped heads, narrow types, roundings inside, views outside."""

import itertools
from dataclasses import replace

import pytest
import torch
from attentions import SHAPES, attention, quantised

from tilewright.candidates.llvm.attention.candidate import CANDIDATE, _instruction
from tilewright.dtype import BF16, F16, F32, F64, PRED
from tilewright.hardware.detect import chips, detect
from tilewright.ir.evaluate import evaluate_nodes
from tilewright.ir.graph import Node
from tilewright.ir.ops.attention import causal_shift
from tilewright.schedule.candidate import plan_for, refusal
from tilewright.schedule.expected import check, expect
from tilewright.schedule.measure import examine
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources
from tilewright.schedule.search import search

CPU = detect("cpu")


def runner(problem, weights=()):
    assert refusal(CANDIDATE, problem, CPU) is None
    (schedule,) = plan_for(CANDIDATE, problem, CPU).schedules()
    return plan_for(CANDIDATE, problem, CPU).build(schedule).prepare({})


def assert_right(node, seed=0):
    problem = problem_of(node)
    sources = random_sources(problem, seed)
    assert examine(problem, expect(problem, sources), runner(problem), sources) is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", ["no", "upper", "lower"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_every_shape_and_type(shape, causal, dtype):
    assert_right(attention(shape, dtype, causal=causal, zero_masked_rows=True))


@pytest.mark.thin(3)
@pytest.mark.parametrize("mask", [PRED, F32, BF16], ids=str)
@pytest.mark.parametrize("spread", itertools.product([False, True], repeat=4), ids=str)
def test_masks_of_every_broadcast_shape(mask, spread):
    shape = SHAPES[1]
    extents = (shape[0], shape[1], shape[3], shape[4])
    given = tuple(d if full else 1 for d, full in zip(extents, spread, strict=True))
    assert_right(attention(shape, mask=(mask, given), causal="lower"))


@pytest.mark.parametrize(("queries", "keys"), [(100, 100), (64, 64), (7, 200), (100, 40), (130, 33)])
@pytest.mark.parametrize("causal", ["upper", "lower"])
def test_keys_that_causality_hides_from_a_tile_are_left_out(causal, queries, keys):
    """A value that is no number has no effect in tiles that see no key of its panel."""
    node = attention((2, 4, 2, queries, keys, 24, 20), causal=causal, zero_masked_rows=True)
    assert_right(node)
    problem = problem_of(node)
    sources = random_sources(problem, 0)
    (wanted,) = runner(problem)(sources)
    sources[2][:, :, -1] = float("nan")
    (found,) = runner(problem)(sources)
    blind = max(
        0, keys - 1 - 64 - causal_shift(causal, queries, keys)
    )  # queries more than a panel and a tile before the last key
    assert torch.equal(found[:, :, :blind], wanted[:, :, :blind])
    assert bool(found[:, :, -1].isnan().all()) == (causal == "lower" or queries >= keys)


def test_rows_that_see_nothing_and_values_that_are_no_numbers():
    for zero in (False, True):
        node = attention((1, 2, 1, 3, 5, 8, 4), mask=(PRED, (1, 1, 3, 5)), zero_masked_rows=zero)
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(s.shape, generator=generator) for s in node.src[:3])
        mask = torch.ones(1, 1, 3, 5, dtype=torch.bool)
        mask[0, 0, 1] = False  # the second query sees nothing
        q[0, 0, 0, 0], k[0, 1, 2, 3], v[0, 1, 4, 0] = float("nan"), float("inf"), float("nan")
        sources = [q, k, v, mask]
        (got,) = runner(problem_of(node))(sources)
        wanted = evaluate_nodes((node,), dict(zip(node.src, sources, strict=True)))[0]
        assert torch.equal(got.isnan(), wanted.isnan()) and torch.allclose(got, wanted, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("causal", ["no", "upper", "lower"])
def test_rows_that_see_nothing_have_equal_weights_where_the_graph_says_so(causal):
    node = attention((2, 4, 2, 13, 33, 24, 40), mask=(PRED, (2, 1, 1, 33)), causal=causal, equal_masked_rows=True)
    problem = problem_of(node)
    sources = random_sources(problem)
    sources[3] = torch.arange(33).reshape(1, 1, 1, 33) >= torch.tensor([40, 9]).reshape(2, 1, 1, 1)
    assert examine(problem, expect(problem, sources), runner(problem), sources) is None
    (got,) = runner(problem)(sources)
    assert torch.allclose(got[0], sources[2][0].mean(1).repeat_interleave(2, 0)[:, None].expand(got[0].shape), atol=1e-5)


def test_a_quantised_attention_rounds_where_the_graph_rounds():
    node = quantised((2, 3, 1, 20, 37, 16, 24))
    sources = [
        torch.randint(-128, 128, s.shape, dtype=torch.int8, generator=torch.Generator().manual_seed(1)) for s in node.src
    ]
    (got,) = runner(problem_of(node))(sources)
    wanted = evaluate_nodes((node,), dict(zip(node.src, sources, strict=True)))[0]
    off = (got.int() - wanted.int()).abs()
    # A sum that falls the other way changes one score by a code: rare, and seen in few results.
    assert got.dtype is torch.int8 and off.max() <= 1 and (off > 0).float().mean() < 0.01
    assert check(problem_of(node), expect(problem_of(node), sources), [got]) is None
    # Leaving a rounding out is no flip: it shows.
    plain = replace(node.op, scores=None)
    (other,) = runner(problem_of(Node(plain, *node.src)))(sources)
    assert check(problem_of(node), expect(problem_of(node), sources), [other]) is not None


@pytest.mark.parametrize("name", [c.name for c in chips() if _instruction((F32,) * 3, c)])
def test_bf16_is_multiplied_as_it_is_where_an_instruction_of_vectors_does(name):
    chip = next(c for c in chips() if c.name == name)
    narrow, wide, mixed = (_instruction(types, chip) for types in ((BF16,) * 3, (F32,) * 3, (BF16, BF16, F32)))
    has = any(u.instruction in ("vdpbf16ps zmm", "bfdot v.4s") for u in chip.units)
    assert narrow is not None and narrow.dot.tile == 1 and narrow.dot.lhs is (BF16 if has else F32)
    assert wide is not None and wide.dot.lhs is F32 and mixed == wide


def test_threads_and_layouts_change_nothing():
    node = attention(SHAPES[1], mask=(F32, (1, 1, 13, 33)))
    problem = problem_of(node)
    sources = random_sources(problem)
    run, before = runner(problem), torch.get_num_threads()
    wanted = run(sources)[0]
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            assert torch.equal(run(sources)[0], wanted)
    finally:
        torch.set_num_threads(before)
    turned = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in sources]
    assert torch.equal(run(turned)[0], wanted)


def test_what_it_cannot_do_it_refuses_with_a_sentence():
    assert "f64" in refusal(CANDIDATE, problem_of(attention(SHAPES[0], F64)), CPU)
    assert refusal(CANDIDATE, problem_of(attention((1, 1, 1, 0, 4, 8, 8))), CPU) == "an extent is zero"


def test_search_takes_it_or_something_faster():
    node = attention((1, 4, 1, 64, 64, 32, 32))
    decision = search(problem_of(node), CPU, budget_s=0.05)
    named = {decision.kernel.candidate, *(r.candidate for r in decision.rejected)}
    assert decision.verified and {"llvm_attention", "sdpa"} <= named
