"""Random data of fusions: indices are in range however they are made of the sources, and where they cannot be it is said."""

from dataclasses import replace

import pytest
import torch

import tilewright
import tilewright.schedule.search as search_module
from tilewright.candidates.reference import CANDIDATE as REFERENCE
from tilewright.dtype import F32, S64
from tilewright.hardware.detect import detect
from tilewright.ir.build import const, map_
from tilewright.ir.graph import Node
from tilewright.ir.ops import Gather, Param
from tilewright.ir.types import TensorType
from tilewright.report.explain.findings import fallback
from tilewright.schedule.bench import UNCHECKED
from tilewright.schedule.problem import FusionProblem
from tilewright.schedule.sample import random_sources
from tilewright.schedule.search import search

# Stands for a library beside the reference: with two of them a fusion is checked.
SECOND = replace(REFERENCE, name="second", preference=30)


@pytest.fixture
def two_candidates(monkeypatch):
    real = search_module.discover
    monkeypatch.setattr(search_module, "discover", lambda *a: [*real(*a), SECOND])


TABLE = torch.randn(9, 4)
IDS = torch.randint(0, 9, (2, 7))
INDEXED = {
    "divided": (lambda x, i: x[i // 2], torch.randperm(18)),
    "remainder": (lambda x, i: x[i % 9], torch.randint(0, 100, (5,))),
    "positions of a mask": (lambda x, i: torch.nn.functional.embedding(torch.cumsum((i != 1).int(), 1) * (i != 1) + 1, x), IDS),
    "gather of gather": (lambda x, i: x[i[i]], torch.randperm(9)),
    "backwards": (lambda x, i: x[8 - i].flip(0), torch.randperm(9)),
    "negative": (lambda x, i: x[-1 - i], torch.randperm(9)),
    "clamped": (lambda x, i: x[i.clamp(0, 8)], torch.randint(-100, 100, (5,))),
    "shifted and scaled": (lambda x, i: x[2 * i + 3], torch.tensor([0, 1, 2])),
    "of two": (lambda x, i: x[i + i.flip(0)], torch.tensor([0, 1, 2, 3])),
    "elements": (lambda x, i: torch.gather(x, 0, (i // 3)[:, None].expand(-1, 4)), torch.randperm(27)),
    "of floats": (lambda x, i: x[(i * 3).to(torch.int64)], torch.rand(6)),
    "sorted by": (lambda x, i: x[torch.argsort(i)], torch.randperm(9)),
}


@pytest.mark.parametrize("name", INDEXED)
def test_indices_made_beside_their_gather_are_in_range(name, two_candidates):
    f, index = INDEXED[name]

    class M(torch.nn.Module):
        def forward(self, x, i):
            return f(x * 2, i)

    program = tilewright.compile(M(), example_inputs=(TABLE, index), budget_s=0, cache=False)
    fusions = [s.decision for s in program.steps if s.decision is not None and isinstance(s.decision.problem, FusionProblem)]
    assert fusions and not any(r.why.startswith(UNCHECKED) for d in fusions for r in d.rejected)
    torch.testing.assert_close(program(TABLE, index), M()(TABLE, index))


def picking(extent, *, far):
    """x[i + far], of which no row is in range where `far` is past it."""
    x, i = Node(Param(0, TensorType(F32, (extent, 3)))), Node(Param(1, TensorType(S64, (4,))))
    index = map_("add", map_("multiply", i, const(0, S64)), const(far, S64))
    return FusionProblem((Node(Gather(0), map_("tanh", x), index),), (x.tensor, i.tensor), (False, False))


def test_weights_beside_an_index_are_what_they_are():
    x, i, w = (Node(Param(n, TensorType(t, s))) for n, (t, s) in enumerate(((F32, (9, 3)), (S64, (4,)), (S64, (4,)))))
    problem = FusionProblem((Node(Gather(0), x, map_("add", i, w)),), (x.tensor, i.tensor, w.tensor), (False, False, True))
    far = torch.tensor([8, 7, 6, 5])
    _, drawn, given = random_sources(problem, given={2: far})
    assert given is far and int((drawn + far).max()) < 9 and int((drawn + far).min()) >= -9


@pytest.mark.parametrize("budget_s", [0, 0.05])
def test_where_the_oracle_fails_torch_runs_it_and_reports_say_so(budget_s):
    problem = picking(5, far=77)
    lost = []
    decision = search(problem, detect("cpu"), budget_s=budget_s, candidates=[SECOND, REFERENCE], lost=lambda *a: lost.append(a))
    assert decision.kernel.candidate == "reference" and not lost
    assert any(r.candidate == "second" and r.why.startswith(f"{UNCHECKED}: index out of range") for r in decision.rejected)


def test_a_program_whose_indices_no_draw_meets_runs_and_says_so(two_candidates):
    class M(torch.nn.Module):
        def forward(self, x, i):
            return torch.tanh(x)[i - 1000]

    x, i = torch.randn(20, 4), torch.tensor([1005, 1000, 1019])
    program = tilewright.compile(M(), example_inputs=(x, i), budget_s=0, cache=False)
    torch.testing.assert_close(program(x, i), M()(x, i))
    assert any(UNCHECKED in f.why for f in fallback(program, {}))
