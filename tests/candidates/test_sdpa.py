"""The forms in which a GPU's library is given an attention; each runs here on torch's kernels for CPUs."""

import pytest
import torch
from attentions import attention
from ptx import H200

from tilewright.candidates.library.sdpa import CANDIDATE
from tilewright.dtype import BF16, F16, F32, PRED
from tilewright.schedule.candidate import plan_for
from tilewright.schedule.expected import check, expect
from tilewright.schedule.problem import problem_of
from tilewright.schedule.sample import random_sources

DECODING = (2, 2, 1, 4, 70, 16, 8)  # four queries of a head of keys, as the rules leave one query of eight heads over two


def points(shape, dtype=F16, **more):
    problem = problem_of(attention(shape, dtype, **more))
    plan = plan_for(CANDIDATE, problem, H200)
    return problem, plan, list(plan.schedules())


@pytest.mark.parametrize("shape", [DECODING, (1, 4, 2, 3, 33, 8, 8)], ids=["rows of a group", "drafts of a group"])
@pytest.mark.parametrize(
    "mask", [None, (PRED, (2, 1, 1, 70)), (PRED, (1, 2, 4, 70)), (F32, (4, 70))], ids=["plain", "length", "each row", "added"]
)
def test_every_form_is_right(shape, mask):
    if mask is not None and shape is not DECODING:
        mask = (mask[0], tuple(1 if d == 2 else {4: 3, 70: 33}.get(d, d) for d in mask[1]))
    more = {} if mask is None else {"mask": mask}
    problem, plan, schedules = points(shape, BF16, **more)
    assert len(schedules) == 4 and sum("query_heads" in dict(s.knobs) for s in schedules) == 2
    sources = random_sources(problem)
    for schedule in schedules:
        results = plan.build(schedule).prepare({})(sources)
        assert check(problem, expect(problem, sources), results) is None, schedule


@pytest.mark.parametrize("queries", [1, 4])
def test_rows_that_see_nothing_have_equal_weights_where_the_graph_says_so(queries):
    problem, plan, schedules = points((2, 4, 2, queries, 70, 16, 8), BF16, mask=(PRED, (2, 1, 1, 70)), equal_masked_rows=True)
    sources = random_sources(problem)
    sources[3] = torch.arange(70).reshape(1, 1, 1, 70) < torch.tensor([0, 30]).reshape(2, 1, 1, 1)
    for schedule in schedules:
        assert check(problem, expect(problem, sources), plan.build(schedule).prepare({})(sources)) is None, schedule


def test_heads_of_one_query_are_what_the_library_is_given(monkeypatch):
    """Keys and values are given as they lie, not repeated."""
    given = []
    library = torch.nn.functional.scaled_dot_product_attention

    def seen(q, k, v, **options):
        given.append((tuple(q.shape), tuple(k.shape), options["enable_gqa"]))
        return library(q, k, v, **options)

    problem, plan, (first, *_) = points(DECODING)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    plan.build(first).prepare({})(random_sources(problem))
    assert given == [((2, 8, 1, 16), (2, 2, 70, 16), True)]


@pytest.mark.parametrize(
    ("shape", "dtype", "more", "count"),
    [
        ((1, 4, 1, 256, 256, 16, 16), F16, {}, 2),
        ((1, 4, 1, 16, 256, 16, 16), F16, {"causal": "upper"}, 2),
        ((1, 4, 1, 1, 256, 16, 16), F16, {}, 2),
        (DECODING, F32, {}, 1),
    ],
    ids=["prefill", "causal", "one row", "f32"],
)
def test_other_attentions_keep_their_form(shape, dtype, more, count):
    _, _, schedules = points(shape, dtype, **more)
    assert len(schedules) == count and not any("query_heads" in dict(s.knobs) for s in schedules)
